"""What a hostile or careless world does: environments, datasets, checkpoints, several processes."""

import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ALGOS, ROOT, as_flags, budget, load, metrics_of, on_two_files, save_rows

import common
from algos import crr, gail, rlpd

SPACE = gym.spaces.Box(-10, 10, (2,), np.float32)


class Attack(gym.Env):
    """A walk of ten steps that does one thing wrong."""

    observation_space = SPACE
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, wrong: str = ""):
        self.wrong, self.buffer = wrong, np.zeros(2, np.float32)
        if wrong == "init raises":
            raise RuntimeError("no licence")

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        self.buffer[:] = self.np_random.normal(size=2)
        if self.wrong == "reset raises":
            raise RuntimeError("no level")
        if self.wrong == "shape at reset":
            return np.zeros(3, np.float32), {}
        if self.wrong == "one value at reset":
            return self.buffer.copy()
        if self.wrong == "integers at reset":
            return np.zeros(2, np.int64), {}
        return self.buffer if self.wrong == "one buffer" else self.buffer.copy(), {}

    def step(self, action):
        self.time += 1
        self.buffer += 0.5
        wrong = self.wrong if self.time == 3 else ""
        if wrong == "step raises":
            raise ZeroDivisionError("physics")
        if wrong == "four values":
            return self.buffer.copy(), 0.0, False, {}
        obs = self.buffer if self.wrong == "one buffer" else self.buffer.copy()
        if wrong == "shape at a step":
            obs = np.zeros((2, 1), np.float32)
        if wrong == "nan in obs":
            obs[0] = np.nan
        rewards = {"nan": np.nan, "inf": np.inf, "none": None, "text": "much"}
        reward = rewards.get(wrong, np.ones(1) if self.wrong == "array as reward" else 1.0)
        return obs, reward, False, self.wrong != "no end" and self.time == 10, {}


for wrong in (
    *("init raises", "reset raises", "shape at reset", "one value at reset", "integers at reset"),
    *("one buffer", "step raises", "four values", "shape at a step", "nan in obs", "nan", "inf"),
    *("none", "text", "array as reward", "no end", ""),
):
    name = f"Attack{wrong.title().replace(' ', '')}-v0"
    gym.register(name, Attack, kwargs={"wrong": wrong}, disable_env_checker=True)


class Parts(Attack):
    """Observations in two arrays, in the order of their names: place, then time."""

    observation_space = gym.spaces.Dict(
        {"time": gym.spaces.Box(0, 10, (1,), np.float32), "place": SPACE}
    )

    def reset(self, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        return {"time": np.zeros(1, np.float32), "place": obs}, info

    def step(self, action):
        obs, *rest = super().step(action)
        return {"time": np.full(1, self.time, np.float32), "place": obs}, *rest


class Pair(Attack):
    observation_space = gym.spaces.Tuple((SPACE, SPACE))


gym.register("Parts-v0", Parts)
gym.register("Pair-v0", Pair)


def attack(wrong):
    return f"Attack{wrong.title().replace(' ', '')}-v0"


def still(obs):
    return np.zeros((len(obs), 1), np.float32)


# ---- environments


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ("reset raises", "fails in reset: RuntimeError: no level"),
        (
            "shape at reset",
            "fails in reset: .*an observation must be finite, of shape (2,), not [0. 0. 0.]",
        ),
        (
            "one value at reset",
            r"fails in reset: .*an observation must be finite, of shape (2,), not -?\d",
        ),
        ("step raises", "fails in step 3 of an episode: ZeroDivisionError: physics"),
        ("four values", "fails in step 3 of an episode: ValueError: not enough values"),
        (
            "shape at a step",
            "fails in step 3 .*an observation must be finite, of shape (2,), not [[0.] [0.]]",
        ),
        ("nan in obs", "fails in step 3 .*an observation must be finite, of shape (2,), not [ nan"),
        ("nan", "fails in step 3 .*the reward is nan"),
        ("inf", "fails in step 3 .*the reward is inf"),
        ("none", "fails in step 3 of an episode: TypeError"),
        ("text", "fails in step 3 of an episode: ValueError"),
    ],
)
def test_a_broken_environment_is_one_line(wrong, line):
    line = re.sub(r"([()[\]])", r"\\\1", line)
    with pytest.raises(common.InputError, match=f"the environment {attack(wrong)} {line}") as error:
        common.evaluate(still, attack(wrong), episodes=2, seed=0)
    assert len(str(error.value).splitlines()) == 1
    assert re.search(r"test_attacks.py:\d+\)|common.py:\d+\)", str(error.value))  # the place


def test_an_environment_that_cannot_be_made():
    with pytest.raises(common.InputError, match=r"cannot make the environment .*: no licence"):
        common.make_env(attack("init raises"))


@on_two_files
def test_a_broken_environment_ends_a_run_with_code_2(algo, tiny, run):
    args = replace(tiny, env_id=attack("nan"), dataset="random:2")
    if algo.ALGO == "rlpd":
        args = replace(args, dataset="none")
    code, _, err = run(*as_flags(args))
    assert code == 2 and "fails in step 3 of an episode: ValueError: the reward is nan" in err


def test_an_array_as_reward_is_a_number():
    returns = common.evaluate(still, attack("array as reward"), episodes=2, seed=0)
    assert returns.tolist() == [10.0, 10.0]


def test_an_evaluation_without_an_end_is_cut_off(monkeypatch, capsys):
    monkeypatch.setattr(common, "MAX_EPISODE_STEPS", 50)
    returns = common.evaluate(still, attack("no end"), episodes=2, seed=0)
    assert returns.tolist() == [50.0, 50.0]
    _, err = capsys.readouterr()
    assert err.count("\n") == 1 and "no end of an episode in 50 steps: cut off; give it a" in err


def test_environments_that_write_into_one_buffer(tmp_path):
    """Every row would hold the last observation twice."""
    for dataset in (
        common.load_dataset("random:30", common.make_env(attack("one buffer"))),
        recorded(attack("one buffer"), tmp_path),
    ):
        torch.testing.assert_close(dataset.next_obs, dataset.obs + 0.5)


def recorded(env_id, tmp_path):
    common.record(still, env_id, 3, 0, str(tmp_path / "recorded.npz"))
    return common.load_dataset(str(tmp_path / "recorded.npz"), common.make_env(env_id))


def test_integers_at_reset_do_not_cut_off_what_follows():
    seen = []
    common.evaluate(
        lambda obs: seen.append(obs.copy()) or still(obs), attack("integers at reset"), 1, 0
    )
    assert seen[1].dtype == np.float32 and seen[1][0, 0] % 1 != 0


def test_recorded_episodes_are_not_those_of_an_evaluation(tmp_path):
    env_id, first = attack(""), []
    common.evaluate(lambda obs: first.append(obs.copy()) or still(obs), env_id, 3, 0)
    data = recorded(env_id, tmp_path)
    starts = data.obs[::10].numpy()
    assert len(starts) == 3 and not np.isin(starts, first[0]).any()


def test_integer_actions_are_refused():
    env = common.make_env("Pendulum-v1")
    env.action_space = gym.spaces.Box(0, 4, (1,), np.int64)
    with pytest.raises(common.InputError, match="actions must be vectors or discrete, not Box"):
        common.check_spaces(env)


def test_arrays_in_a_dict_become_one_vector():
    env = common.make_env("Parts-v0")
    assert common.check_spaces(env) == ((3,), 1, False)
    obs, _ = env.reset(seed=3)
    next_obs = env.step(np.zeros(1, np.float32))[0]
    np.testing.assert_allclose(obs[:2], np.random.default_rng(3).normal(size=2), rtol=1e-6)
    assert obs[2] == 0 and next_obs.tolist() == pytest.approx([*(obs[:2] + 0.5), 1])


@pytest.mark.parametrize(
    ("env_id", "line"),
    [
        ("Pair-v0", "observations must be vectors, not Tuple.*wrappers.FlattenObservation"),
        (
            "Several-v0",
            r"actions must be vectors or discrete, not MultiDiscrete.*gymnasium.ActionWrapper",
        ),
    ],
)
def test_other_spaces_are_refused_with_what_to_do(env_id, line):
    with pytest.raises(common.InputError, match=line):
        common.check_spaces(common.make_env(env_id))


def test_an_environment_of_the_current_folder_is_found(tiny, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    code = "import gymnasium, test_attacks\ngymnasium.register('Mine-v0', test_attacks.Attack)"
    Path("mine_of_a_test.py").write_text(code)
    assert run(*as_flags(replace(tiny, env_id="mine_of_a_test:Mine-v0")))[0] == 2  # other spaces
    args = replace(tiny, env_id="mine_of_a_test:Mine-v0", dataset="random:50")
    assert run(*as_flags(args)) == (0, "", "")


def test_a_film_without_an_end_is_cut_off(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(common, "MAX_EPISODE_STEPS", 50)
    env = gym.make("Pendulum-v1", render_mode="rgb_array").unwrapped  # without its time limit
    env.spec = None
    film = common.capture_video(still, "Pendulum-v1", 0, str(tmp_path), lambda *_, **__: env)
    assert os.path.getsize(film) > 0
    assert "no end of an episode in 50 steps" in capsys.readouterr()[1]


# ---- datasets


def test_cuts_without_a_flag_are_found_and_counted(tmp_path):
    """Three episodes of two steps; the flags know of the first end alone."""
    obs, next_obs = [0, 1, 5, 6, 0, 1], [1, 2, 6, 7, 1, 2]
    flags = [0, 1, 0, 0, 0, 0]
    path = save_rows(tmp_path / "d.npz", obs, [0] * 6, [1] * 6, next_obs, [0] * 6, flags)
    dataset = common.load_dataset(path, common.make_env("Probe-v0"))
    assert dataset.truncated.tolist() == [False, True, False, True, False, True]
    assert "1 cuts that no flag tells of" in str(dataset)
    assert dataset.episode_returns.tolist() == [2, 2, 2]


def test_a_shuffled_file_is_noticed(tmp_path):
    rng = np.random.default_rng(0)
    obs = rng.permutation(200)
    path = save_rows(tmp_path / "d.npz", obs, [0] * 200, [1] * 200, obs + 1, [0] * 200, [0] * 200)
    dataset = common.load_dataset(path, common.make_env("Probe-v0"))
    assert "most episodes have one step" in str(dataset)


def huge_header(path):
    with zipfile.ZipFile(path, "w") as file:
        header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (10**15,), }"
        header = header.replace(b"10**15", b"1000000000000000").ljust(117) + b"\n"
        start = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
        for name in ("observations", "actions", "rewards", "terminations"):
            file.writestr(f"{name}.npy", start)


def unknown_compression(path):
    np.savez(path, observations=np.zeros(3))
    content = bytearray(path.read_bytes())
    for mark, offset in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        content[content.index(mark) + offset] = 99
    path.write_bytes(content)


def encrypted(path):
    np.savez(path, observations=np.zeros(3))
    content = bytearray(path.read_bytes())
    for mark, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        content[content.index(mark) + offset] |= 1
    path.write_bytes(content)


@pytest.mark.parametrize("make", [huge_header, unknown_compression, encrypted])
def test_strange_zips(make, tmp_path):
    make(tmp_path / "d.npz")
    with pytest.raises(common.InputError, match=f"dataset {tmp_path}/d.npz: ") as error:
        common.load_dataset(str(tmp_path / "d.npz"), common.make_env("Probe-v0"))
    assert len(str(error.value).splitlines()) == 1


def test_a_device_is_no_dataset(tmp_path):
    (tmp_path / "d.npz").symlink_to("/dev/zero")
    with pytest.raises(common.InputError, match="not a complete npz file"):
        common.load_dataset(str(tmp_path / "d.npz"), common.make_env("Probe-v0"))


# ---- checkpoints


@pytest.fixture
def algo():
    return crr


def test_a_flipped_bit_is_noticed(tiny, run):
    crr.train(tiny)
    path = Path(tiny.run_dir, "checkpoint.pt")
    weights = load(tiny.run_dir)["actor"]["net.2.weight"].numpy().tobytes()
    content = bytearray(path.read_bytes())
    content[content.index(weights) + 10] ^= 1
    path.write_bytes(content)
    for flags in (["--resume", tiny.run_dir], ["--evaluate", path]):
        code, _, err = run(*flags)
        assert code == 2 and f"cannot use {path} with crr.py: " in err and "is damaged" in err


@pytest.mark.parametrize("part", ["args", "step", "algo", "actor"])
@pytest.mark.parametrize("value", [None, "text", torch.zeros(7), {"net": torch.zeros(7)}, "no key"])
def test_a_checkpoint_with_a_strange_part(tiny, run, part, value):
    crr.train(tiny)
    checkpoint = load(tiny.run_dir) | {part: value}
    if value == "no key":
        del checkpoint[part]
    torch.save(checkpoint, f"{tiny.run_dir}/checkpoint.pt")
    more = ["--total-updates", "40"]
    for flags in (
        ["--evaluate", f"{tiny.run_dir}/checkpoint.pt"],
        ["--resume", tiny.run_dir, *more],
    ):
        code, _, err = run(*flags)
        assert code == 2 and err.count("\n") == 1


@pytest.mark.parametrize("part", ["best_return", "evals_since_best", "log_position", "actor_opt"])
@pytest.mark.parametrize("value", ["text", [], {}, None])
def test_a_checkpoint_with_a_strange_part_of_a_run(tiny, run, part, value):
    crr.train(tiny)
    torch.save(load(tiny.run_dir) | {part: value}, f"{tiny.run_dir}/checkpoint.pt")
    code, _, err = run("--resume", tiny.run_dir, "--total-updates", "40")
    assert code == 2 and err.count("\n") == 1 and "checkpoint.pt with crr.py: " in err


@pytest.mark.parametrize("name", ["num_updates", "episode", "fingerprint", "current_obs"])
@pytest.mark.parametrize("value", ["text", {"a": 1}])
@pytest.mark.parametrize("algo", [rlpd])
def test_a_checkpoint_with_a_strange_place(algo, tiny, name, value):
    rlpd.train(tiny)
    torch.save(load(tiny.run_dir) | {name: value}, f"{tiny.run_dir}/checkpoint.pt")
    with pytest.raises(common.InputError, match=r"is not a number|plays another episode"):
        rlpd.train(replace(tiny, resume=tiny.run_dir, total_timesteps=40))


def test_a_name_with_a_line_break_is_one_line(run):
    code, _, err = run("--env-id", "Pendulum-v1\n")
    assert code == 2 and err.count("\n") == 1


@pytest.mark.parametrize(
    ("flag", "value"), [("gamma", "high"), ("hidden_dim", 1.5), ("env_id", 3), ("quiet", None)]
)
def test_a_checkpoint_with_a_strange_flag(tiny, run, flag, value):
    crr.train(tiny)
    checkpoint = load(tiny.run_dir)
    checkpoint["args"][flag] = value
    torch.save(checkpoint, f"{tiny.run_dir}/checkpoint.pt")
    code, _, err = run("--evaluate", f"{tiny.run_dir}/checkpoint.pt")
    assert code == 2 and err.count("\n") == 1 and f"crr.py: {flag} must be " in err


def test_empty_names_are_refused(run, monkeypatch, tmp_path):
    """An unset variable of the shell would start a new run."""
    monkeypatch.chdir(tmp_path)
    for flag in ("--resume", "--evaluate", "--run-dir"):
        code, _, err = run(flag, "")
        assert code == 2 and f"{flag[2:].replace('-', '_')} must be not empty" in err
    assert os.listdir(tmp_path) == []


def test_a_checkpoint_cannot_make_us_write_or_import(tiny, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    crr.train(tiny)
    mine = tmp_path / "mine.npz"
    mine.write_text("mine")
    checkpoint, path = load(tiny.run_dir), f"{tiny.run_dir}/checkpoint.pt"
    checkpoint["args"] |= {"record": str(mine), "capture_video": True}
    torch.save(checkpoint, path)
    code, _, err = run("--evaluate", path)
    assert (code, err) == (0, "") and mine.read_text() == "mine"
    assert not Path(tiny.run_dir, "videos").exists()

    (tmp_path / "evil.py").write_text("open('harm', 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    checkpoint["args"] |= {"record": None, "env_id": "evil:X-v0"}
    torch.save(checkpoint, path)
    code, _, err = run("--evaluate", path)
    assert code == 2 and "names a module of its own" in err and not Path("harm").exists()
    with pytest.raises(common.InputError, match="names a module of its own"):  # from Python
        crr.load_policy(path)
    assert not Path("harm").exists()


@pytest.mark.parametrize("name", ALGOS)
def test_ctrl_c_while_torch_is_imported_shows_no_traceback(name, tmp_path):
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    command = [sys.executable, str(ROOT / "algos" / f"{name}.py")]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"", b"")


# ---- sizes and types


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--hidden-dim 10000000", "too large for this machine: "),
        ("--batch-size 1000000000000", "too large for this machine: "),
        (f"--dataset random:{10**15}", f"dataset random:{10**15}: MemoryError: Unable to allocate"),
    ],
)
def test_too_large_for_this_machine(tiny, run, flags, line):
    name, value = flags.split()
    args = as_flags(tiny)
    args[args.index(name) + 1] = value
    code, _, err = run(*args)
    assert code == 2 and err.startswith(line) and err.count("\n") == 1


@pytest.mark.parametrize("algo", [gail])
def test_a_rollout_that_is_too_large(algo, tiny, run):
    flags = {"num_steps": 10**18, "total_timesteps": 10**20}
    code, _, err = run(*as_flags(replace(tiny, **flags)))
    assert code == 2 and err.startswith("too large for this machine: ") and err.count("\n") == 1


def test_1e3_is_a_number_of_updates(tiny, run):
    args = as_flags(tiny)
    args[args.index("--total-updates") + 1] = "2.5e1"
    assert run(*args)[0] == 0 and load(tiny.run_dir)["step"] == 25


def test_only_whole_numbers_of_flags_that_count_are_rewritten():
    words = [
        "--max-weight",
        "1.25e1",
        "--run-dir",
        "1e3",
        "--total-updates",
        "1e3",
        "--seed",
        "2e0",
    ]
    words += ["--batch-size", "1.5e0", "--hidden_dim", "1.28e2"]
    expected = ["--max-weight", "1.25e1", "--run-dir", "1e3", "--total-updates", "1000"]
    expected += ["--seed", "2", "--batch-size", "1.5e0", "--hidden_dim", "128"]
    assert common.whole_numbers(words, crr.Args) == expected


def test_paths_and_floats_from_python(tiny):
    args = replace(tiny, run_dir=Path(tiny.run_dir), dataset=Path(tiny.dataset))
    assert crr.train(args)["step"] == 20
    with pytest.raises(common.InputError, match=r"batch_size must be int, got 32\.0 \(float\)"):
        crr.train(replace(tiny, batch_size=32.0))


# ---- several runs, signals, files that vanish


def test_hints_name_the_script_from_python_too(tiny, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["notebook.py"])
    crr.train(replace(tiny, quiet=False))
    assert "python algos/crr.py --resume" in capsys.readouterr().out


def test_two_runs_of_one_second_have_two_folders(tiny, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for _ in range(3):
        crr.train(replace(tiny, run_dir=None, total_updates=2))
    assert len(list(Path("runs").iterdir())) == 3


@pytest.mark.skipif(sys.platform == "win32", reason="no such lock")
def test_a_live_run_cannot_be_resumed_by_another(tiny, monkeypatch):
    crr.train(tiny)
    before = Path(tiny.run_dir, "metrics.csv").read_bytes()
    code = f"import fcntl; f = open({tiny.run_dir + '/metrics.csv'!r}, 'a')\n"
    code += "fcntl.lockf(f, fcntl.LOCK_EX); print('locked', flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], text=True, **pipes) as other:
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(common.InputError, match="is in use by another run"):
            crr.train(replace(tiny, resume=tiny.run_dir, total_updates=30))
        other.kill()
    assert Path(tiny.run_dir, "metrics.csv").read_bytes() == before
    assert crr.train(replace(tiny, resume=tiny.run_dir, total_updates=30))["step"] == 30


def test_metrics_that_were_deleted_get_a_header_again(tiny):
    crr.train(tiny)
    Path(tiny.run_dir, "metrics.csv").unlink()
    crr.train(replace(tiny, resume=tiny.run_dir, total_updates=30))
    lines = Path(tiny.run_dir, "metrics.csv").read_text().splitlines()
    assert lines[0] == "step,seconds,key,value" and lines[1].startswith("25,")


@on_two_files
def test_early_stops_do_not_depend_on_where_a_run_was_interrupted(
    algo, tiny, tmp_path, monkeypatch
):
    """The evaluation at the end of the first budget is off the grid: it must not count."""
    scripts = {"whole": [0, 5, 4, 3, 2, 1], "half": [0, 5, 9, 4, 3, 2, 1]}  # 9: at 15, off the grid
    stops = {}
    for name, script in scripts.items():
        returns = iter(script)
        monkeypatch.setattr(common, "evaluate", lambda *_, **__: np.full(2, float(next(returns))))  # noqa: B023
        args = replace(tiny, patience=2, run_dir=str(tmp_path / name))
        if name == "half":
            algo.train(replace(args, **budget(algo, 15)))
            args = replace(args, resume=args.run_dir)
        stops[name] = algo.train(replace(args, **budget(algo, 100)))["step"]
        assert load(args.run_dir, "best.pt")["step"] == 10
    assert stops == {"whole": 30, "half": 30}


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_and_reaches_the_caller(tiny, monkeypatch, number):
    original = common.lr_factor

    def interrupted(update, *rest):
        if update == 3:
            os.kill(os.getpid(), number)
        return original(update, *rest)

    monkeypatch.setattr(common, "lr_factor", interrupted)
    with pytest.raises(KeyboardInterrupt) as stop:
        crr.train(tiny)
    assert stop.value.args == (number,) and load(tiny.run_dir)["step"] == 4
    assert metrics_of(tiny.run_dir)


@pytest.mark.skipif(os.name != "posix", reason="a shell with head")
def test_head_saves_and_stops(tmp_path):
    flags = "--total-updates 100000 --eval-interval 50 --value-warmup 1 --eval-episodes 1"
    script = ROOT / "algos" / "awr.py"
    command = f"{sys.executable} {script} {flags} --hidden-dim 16 --run-dir run | head -n 3"
    start = time.monotonic()
    result = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert "Traceback" not in result.stderr and time.monotonic() - start < 300
    assert load(tmp_path / "run")["step"] < 100_000


def test_a_copied_file_finds_the_common_beside_it(tmp_path):
    """Another common.py in the folder above must not win."""
    folder = tmp_path / "copy"
    folder.mkdir()
    (tmp_path / "common.py").write_text("raise SystemExit('the wrong one')")
    for file in ("algos/crr.py", "common.py"):
        (folder / Path(file).name).write_text((ROOT / file).read_text())
    command = [sys.executable, "crr.py", "--dataset", "random:300", "--total-updates", "5"]
    result = subprocess.run(
        [*command, "--hidden-dim", "16"], cwd=folder, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert "stopped at update 5: the budget is spent" in result.stdout


@pytest.mark.slow
def test_weights_and_biases_gets_flags_and_every_scalar_once(tiny):
    """The real package, without a network."""
    pytest.importorskip("wandb")
    code = f"from algos import crr\ncrr.train({replace(tiny, track=True)!r})"
    code = code.replace("Args(", "crr.Args(")
    env = os.environ | {"WANDB_MODE": "offline", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    result = subprocess.run(
        [sys.executable, "-c", f"import conftest\n{code}"], env=env, capture_output=True, text=True
    )
    (file,) = Path(tiny.run_dir).parent.glob("wandb/offline-run-*/*.wandb")
    assert b"num_action_samples" in file.read_bytes(), result.stderr
    assert re.search(r"losses/actor [^ ]{4}\n", result.stderr)  # its summary: a bar for each of 4


def test_weights_and_biases_is_optional(tiny, run, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    code, _, err = run(*as_flags(replace(tiny, track=True)))
    assert code == 2 and err.count("\n") == 1
    assert err.startswith("--track needs a package and a login (pip install wandb): ModuleNotFound")


def test_hyper_parameters_are_in_tensorboard(tiny):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    crr.train(tiny)
    events = EventAccumulator(tiny.run_dir).Reload()
    (tag,) = events.Tags()["tensors"]
    text = events.Tensors(tag)[0].tensor_proto.string_val[0].decode()
    assert '"learning_rate": 0.0003' in text


def test_weights_and_everything_else_have_streams_of_their_own():
    """With one seed for both, the first random actions of RLPD were its first weights."""
    for seed in (0, 1, 7):
        episode = np.random.SeedSequence((seed, 0)).generate_state(1).item()  # start_episode's
        assert common.second_seed(seed) not in (seed, episode)
        first, second = torch.Generator(), torch.Generator()
        first.manual_seed(seed)
        second.manual_seed(common.second_seed(seed))
        drawn = [torch.rand(1000, generator=generator) for generator in (first, second)]
        assert abs(torch.corrcoef(torch.stack(drawn))[0, 1]) < 0.1
    for path in sorted(Path(common.__file__).parent.glob("algos/*.py")):
        source = path.read_text()
        assert source.count("manual_seed(args.seed)") == 1  # the weights
        assert source.count("manual_seed(common.second_seed(args.seed))") == 1
