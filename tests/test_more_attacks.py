"""Attacks that were invented without a look at the other tests."""

import os
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from conftest import CLONING, as_flags, load

import common
from algos import crr, gail

VECTOR = gym.spaces.Box(-10, 10, (2,), np.float32)
BOX = gym.spaces.Box(-1, 1, (1,), np.float32)


class Odd(gym.Env):
    """Ten steps; the third does one thing wrong."""

    def __init__(self, wrong="", observation_space=VECTOR, action_space=BOX):
        self.wrong = wrong
        self.observation_space, self.action_space = observation_space, action_space

    def obs(self):
        if self.wrong == "floats in an integer space":
            return np.full(2, 0.7)
        obs = np.zeros(self.observation_space.shape, self.observation_space.dtype)
        return {"a list": obs.tolist(), "complex": obs + 1j}.get(self.wrong, obs)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.obs(), {}

    def step(self, action):
        self.time += 1
        wrong = self.wrong if self.time == 3 else ""
        obs = np.full(2, 1e39) if wrong == "1e39" else self.obs()
        end = np.array([True, False]) if wrong == "two ends" else False
        info = {"no info": None, "text as info": "x"}.get(wrong, {})
        return obs, 1.0, end, self.time == 10, info


FAULTS = ["1e39", "two ends", "no info", "text as info", "complex"]
for fault in [*FAULTS, "a list", ""]:
    name = f"Odd{fault.title().replace(' ', '')}-v0"
    gym.register(name, Odd, kwargs={"wrong": fault}, disable_env_checker=True)
SPACES = {
    "NoObservation": {"observation_space": gym.spaces.Box(-1, 1, (0,), np.float32)},
    "NoAction": {"action_space": gym.spaces.Box(-1, 1, (0,), np.float32)},
    "HugeBounds": {"action_space": gym.spaces.Box(-3e38, 3e38, (1,), np.float32)},
    "HugeDoubles": {"action_space": gym.spaces.Box(-1e300, 1e300, (1,), np.float64)},
}
INTEGERS = gym.spaces.Box(-10, 10, (2,), np.int64)
SPACES["Cut"] = {"wrong": "floats in an integer space", "observation_space": INTEGERS}
for name, kwargs in SPACES.items():
    gym.register(f"{name}-v0", Odd, kwargs=kwargs, disable_env_checker=True)


def still(obs):
    return np.zeros((len(obs), 1), np.float32)


@pytest.fixture
def algo():
    return crr


def one_line(run, *flags):
    code, _, err = run(*flags)
    assert code == 2 and err.count("\n") == 1, (code, err)
    return err


def with_flag(tiny, **flags):
    return as_flags(replace(tiny, **flags))


# ---- environments


@pytest.mark.parametrize("fault", FAULTS)
def test_one_line_for_what_an_environment_does(fault):
    env_id = f"Odd{fault.title().replace(' ', '')}-v0"
    with pytest.raises(common.InputError, match=f"the environment {env_id} fails in "):
        common.evaluate(still, env_id, episodes=1, seed=0, rows=[[]])


def test_a_list_is_an_observation():
    assert isinstance(common.make_env("OddAList-v0").reset()[0], np.ndarray)


def test_floats_of_an_integer_space_are_not_cut_off_in_silence():
    """Training would see 0.7 and an evaluation 0."""
    with pytest.raises(common.InputError, match="fails in reset"):
        common.evaluate(still, "Cut-v0", episodes=1, seed=0)


@pytest.mark.parametrize("name", ["NoObservation", "NoAction", "HugeBounds", "HugeDoubles"])
def test_spaces_without_room_or_without_bounds_in_float32(name):
    """Huge ones: half of high - low is inf in float32, and every action becomes inf or 0."""
    with pytest.raises(common.InputError):
        common.check_spaces(common.make_env(f"{name}-v0"))


def test_a_size_that_numpy_has_no_word_for(tiny, run):
    one_line(run, *with_flag(tiny, env_id="Odd-v0", dataset=f"random:{10**23}"))


# ---- flags and shells


def test_1e3_behind_an_equals_sign(tiny, run):
    assert common.whole_numbers(["--total-updates=1e3"], crr.Args) == ["--total-updates=1000"]


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_target_that_no_return_reaches_is_refused(tiny, run, value):
    one_line(run, *with_flag(tiny), f"--target-return={value}")


def test_so_many_threads_would_end_the_process(tiny):
    """libgomp: Thread creation failed, without a line of ours. Not tried here: it would end us."""
    with pytest.raises(common.InputError, match="torch_threads must be"):
        common.check_flags(replace(tiny, torch_threads=30_000), {})


def test_an_empty_name_of_a_record(tiny, run):
    """An unset variable of the shell: it was evaluated, and nothing was recorded."""
    crr.train(tiny)
    one_line(run, "--evaluate", f"{tiny.run_dir}/best.pt", "--record", "")


@pytest.mark.parametrize(
    ("more", "step"), [({}, 10), (CLONING["crr"], 10), ({"checkpoint_interval": 5}, 5)]
)
def test_a_run_that_diverged_between_two_log_entries_is_told(tiny, run, more, step):
    """It ended with code 0 and networks of NaN; on Pendulum the line blamed the environment."""
    flags = with_flag(tiny, learning_rate=1e30, log_interval=10**6, **more)
    assert f"is not finite at update {step}: it diverged" in one_line(run, *flags)
    assert not Path(tiny.run_dir, "checkpoint.pt").exists()


# ---- files


def test_a_recording_does_not_replace_its_checkpoint(tiny, run):
    crr.train(tiny)
    path = Path(tiny.run_dir, "mine.npz")
    os.rename(f"{tiny.run_dir}/best.pt", path)
    before = path.read_bytes()
    one_line(run, "--evaluate", path, "--record", path)
    assert path.read_bytes() == before


def test_a_new_run_does_not_replace_a_best_policy(tiny, run):
    """checkpoint.pt was deleted to save room; best.pt is what the user kept."""
    crr.train(tiny)
    os.remove(f"{tiny.run_dir}/checkpoint.pt")
    before = Path(tiny.run_dir, "best.pt").read_bytes()
    assert "holds a run: --resume it" in one_line(run, *with_flag(tiny))
    assert Path(tiny.run_dir, "best.pt").read_bytes() == before


@pytest.mark.parametrize("value", [0.5, 2, -1])
def test_flags_of_a_dataset_are_0_or_1(tiny, run, probe_data, tmp_path, value):
    with np.load(probe_data) as file:
        arrays = dict(file)
    arrays["terminations"] = np.where(arrays["terminations"], value, 0)
    np.savez(tmp_path / "d.npz", **arrays)
    assert "terminations is neither 0 nor 1 in row 9" in one_line(
        run, *with_flag(tiny, dataset=f"{tmp_path}/d.npz")
    )


@pytest.mark.parametrize(
    ("name", "factor", "line"),
    [
        ("observations", 1e38, "observations is not finite in row 0: [1.e+38]"),
        ("rewards", 1e14, "rewards, scaled and shifted, is not finite in row 0: 1e+16"),
    ],
)
def test_numbers_that_overflow_on_the_way_in(tiny, run, probe_data, tmp_path, name, factor, line):
    """They ended as `losses/critic is nan: lower --learning-rate`."""
    with np.load(probe_data) as file:
        arrays = dict(file)
    arrays[name] = np.full(arrays[name].shape, factor)
    if name == "observations":
        del arrays["next_observations"]
    np.savez(tmp_path / "d.npz", **arrays)
    flags = with_flag(tiny, dataset=f"{tmp_path}/d.npz", reward_scale=100.0)
    assert line in one_line(run, *flags)


# ---- runs


@pytest.mark.parametrize("algo", [gail])
def test_a_policy_that_was_evaluated_does_not_count_twice_for_patience(tiny, tmp_path, monkeypatch):
    """The end of a budget evaluated it again, on the grid: N + N stopped earlier than 2N."""
    flags = {"num_envs": 2, "num_steps": 10, "eval_interval": 4, "patience": 100}
    monkeypatch.setattr(common, "evaluate", lambda *_, **__: np.zeros(2))  # nothing gets better
    whole = replace(tiny, total_timesteps=64, run_dir=f"{tmp_path}/whole", **flags)
    gail.train(whole)
    for half in (32, 40):
        part = replace(whole, total_timesteps=half, run_dir=f"{tmp_path}/{half}")
        gail.train(part)
        gail.train(replace(part, total_timesteps=64, resume=part.run_dir))
        counts = [load(x)["evals_since_best"] for x in (whole.run_dir, part.run_dir)]
        assert counts[0] == counts[1], half
