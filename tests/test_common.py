"""common.py: datasets (every layout and every bad file), returns-to-go, evaluation.

Most tests run on Counter, whose observation is the number of steps so far: a row that is shifted,
dropped or taken from the wrong episode shows at once. steps() prints a dataset in one line.
"""

import os
import pickle
import random
import sys
import zipfile

import gymnasium as gym
import numpy as np
import pytest
import torch

import common
from common import InputError

LOW, HIGH = np.array([-1, 0], np.float32), np.array([3, 10], np.float32)  # deliberately lopsided


class Counter(gym.Env):
    """obs = steps so far, reward = (sum of the action) * (steps so far, this one included).

    Reset with a seed, it terminates after 2 + seed % 4 steps; without one, never. The time limit
    is 4: seeds 0, 1, 2, 3 end after 2, 3, 4, 4 steps, the third with both flags set.
    """

    steps = resets = 0  # of all instances together

    def __init__(self):
        self.observation_space = gym.spaces.Box(0, np.inf, (1,), np.float32)
        self.action_space = gym.spaces.Box(LOW, HIGH)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        Counter.resets += 1
        self.count, self.end = 0, None if seed is None else 2 + seed % 4
        return np.array([self.count], np.float32), {}

    def step(self, action):
        Counter.steps += 1
        self.count += 1
        reward = float(np.sum(action)) * self.count
        return np.array([self.count], np.float32), reward, self.count == self.end, False, {}


class Switch(Counter):
    """Counter with the discrete actions 1 and 2."""

    def __init__(self):
        super().__init__()
        self.action_space = gym.spaces.Discrete(2, start=1)


gym.register("Counter-v0", f"{__name__}:Counter", max_episode_steps=4)  # Minari wants a string here
gym.register("Switch-v0", Switch, max_episode_steps=4)
gym.register("ShortPendulum-v0", "gymnasium.envs.classic_control:PendulumEnv", max_episode_steps=10)


@pytest.fixture
def env():
    return common.make_env("Counter-v0")


@pytest.fixture
def load(tmp_path, env):
    """Save arrays as an npz file, and load that."""

    def save_and_load(arrays, env=env, **kwargs):
        path = str(tmp_path / "data.npz")
        np.savez(path, **arrays)
        return common.load_dataset(path, env, **kwargs)

    return save_and_load


def column(*values):
    return np.array(values, np.float32)[:, None]


def flags(num_rows, *rows):
    return np.isin(np.arange(num_rows), rows)


def good(**changes):
    """Two episodes of 3 steps, in our layout: the first terminates, the second is cut."""
    arrays = {
        "observations": column(0, 1, 2, 0, 1, 2),
        "actions": np.array([[-1, 0], [3, 10], [1, 5], [2, 2.5], [0, 0], [0, 10]], np.float32),
        "rewards": np.array([1, 2, 3, 4, 5, 6], np.float32),
        "next_observations": column(1, 2, 3, 1, 2, 3),
        "terminations": flags(6, 2),
        "truncations": flags(6, 5),
    }
    return {name: array for name, array in (arrays | changes).items() if array is not None}


def put(name, row, value):
    """good(), with one row changed."""
    array = good()[name].copy()
    array[row] = value
    return {name: array}


def steps(dataset):
    """obs>next_obs of every row, with T where it terminated and C where it was cut."""
    columns = dataset.obs[:, 0], dataset.next_obs[:, 0], dataset.terminated, dataset.truncated
    return " ".join(f"{o:g}>{n:g}{'T' * t}{'C' * c}" for o, n, t, c in zip(*map(list, columns)))


def refused(call, *fragments):
    with pytest.raises(InputError) as error:
        call()
    message = str(error.value)
    assert len(message.splitlines()) == 1
    for fragment in fragments:
        assert fragment in message


# ---- environments and actions


@pytest.mark.parametrize(
    "env_id", ["Nope-v0", "Pendulum-v99", "no_such_module:Pendulum-v1", "a:b:c", ":Pendulum-v1", ""]
)
def test_unknown_environment(env_id):
    refused(lambda: common.make_env(env_id), f"cannot make the environment {env_id}: ")


def test_S12_pendulum_actions_by_hand():
    space = common.make_env("Pendulum-v1").action_space  # [-2, 2]
    raw, normalized = column(-2, -1, 0, 0.5, 2), column(-1, -0.5, 0, 0.25, 1)
    np.testing.assert_array_equal(common.normalize_action(raw, space), normalized)
    np.testing.assert_array_equal(common.unnormalize_action(normalized, space), raw)


def test_S12_lopsided_box_by_hand():
    space = gym.spaces.Box(LOW, HIGH)  # center (1, 5), half range (2, 5)
    raw = np.array([[-1, 0], [3, 10], [1, 5], [2, 2.5]], np.float32)
    normalized = np.array([[-1, -1], [1, 1], [0, 0], [0.5, -0.5]], np.float32)
    np.testing.assert_array_equal(common.normalize_action(raw, space), normalized)
    np.testing.assert_array_equal(common.unnormalize_action(normalized, space), raw)


def test_S12_round_trip_and_clip():
    space = gym.spaces.Box(LOW, HIGH)
    raw = np.random.default_rng(0).uniform(LOW, HIGH, (1000, 2)).astype(np.float32)
    back = common.unnormalize_action(common.normalize_action(raw, space), space)
    assert back.dtype == np.float32
    np.testing.assert_allclose(back, raw, rtol=0, atol=2e-6)
    above = np.full(2, 1 + 1e-6, np.float32)  # what a tanh and a cast may give
    np.testing.assert_array_equal(common.unnormalize_action(above, space), HIGH)
    np.testing.assert_array_equal(common.unnormalize_action(-above, space), LOW)


def test_S12_rounding_never_leaves_the_unit_box():
    space = gym.spaces.Box(-3.0, 0.1, (1,))  # in float32, (0.1 + 1.45) / 1.55 comes out above 1
    assert common.normalize_action(space.high, space) == 1  # else atanh of it is nan
    assert common.normalize_action(space.low, space) == -1


def test_S12_load_dataset_returns_normalized_actions(load):
    by_hand = [[-1, -1], [1, 1], [0, 0], [0.5, -0.5], [-0.5, -1], [-0.5, 1]]
    assert load(good()).action.tolist() == by_hand


def test_S12_rounding_outside_the_box_is_clipped(load):
    dataset = load(good(**put("actions", 1, [3.0001, 10.0005])))
    assert dataset.action[1].tolist() == [1, 1]


# ---- specs


def test_random_rows_by_hand(env):
    dataset = common.load_dataset("random:10", env, seed=3)
    # S2, S5: the last row of an episode leads to its true final observation, not to the reset
    assert steps(dataset) == "0>1 1>2 2>3 3>4C 0>1 1>2 2>3 3>4C 0>1 1>2C"
    dataset = common.load_dataset("random:7", env, seed=0)
    assert steps(dataset) == "0>1 1>2T 0>1 1>2 2>3 3>4C 0>1C"
    assert dataset.source == "random:7"
    # the reward is a function of the action: both belong to the same row
    raw = common.unnormalize_action(dataset.action.numpy(), env.action_space).sum(axis=1)
    np.testing.assert_allclose(dataset.reward, raw * dataset.next_obs[:, 0].numpy(), rtol=1e-5)


def test_random_is_a_function_of_the_seed():
    env = common.make_env("Pendulum-v1")
    one, same, other = (common.load_dataset("random:250", env, seed) for seed in (1, 1, 2))
    for name in ("obs", "action", "reward", "next_obs", "terminated", "truncated"):
        assert torch.equal(getattr(one, name), getattr(same, name)), name
    for name in ("obs", "action"):
        assert not torch.equal(getattr(one, name)[0], getattr(other, name)[0]), name


def test_random_fills_the_box(env):
    action = common.load_dataset("random:2000", env).action
    assert action.shape == (2000, 2) and action.abs().max() <= 1
    assert (action.min(dim=0).values < -0.99).all() and (action.max(dim=0).values > 0.99).all()
    assert action.mean(dim=0).abs().max() < 0.06  # 4.6 standard errors


def test_random_discrete_actions():
    action = common.load_dataset("random:50", common.make_env("Switch-v0")).action
    assert action.shape == (50, 2) and (action.sum(dim=1) == 1).all()
    assert (action.sum(dim=0) > 10).all()  # both of them occur


def test_random_without_a_number(env, monkeypatch):
    monkeypatch.setattr(common, "RANDOM_STEPS", 7)
    dataset = common.load_dataset("random", env)
    assert len(dataset) == 7 and dataset.source == "random:7"


@pytest.mark.parametrize("spec", ["random:0", "random:x", "random:-5", "random:1e3", "random:1.5"])
def test_random_with_a_bad_number(env, spec):
    refused(lambda: common.load_dataset(spec, env), f"dataset {spec}: ", "random:N with N > 0")


@pytest.mark.parametrize("spec", ["", "randomly", "data.hdf5", "Minari:x"])
def test_unknown_spec(env, spec):
    refused(lambda: common.load_dataset(spec, env), f"dataset {spec}: expected auto, random")


def test_auto(env, monkeypatch, tmp_path):
    monkeypatch.setattr(common, "SHIPPED", tmp_path)
    monkeypatch.setattr(common, "RANDOM_STEPS", 5)
    np.savez(tmp_path / "Switch-v0.npz", **good())  # another environment's
    assert common.load_dataset("auto", env).source == "random:5"
    np.savez(tmp_path / "Counter-v0.npz", **good())
    dataset = common.load_dataset("auto", env)
    assert dataset.source == str(tmp_path / "Counter-v0.npz")
    assert steps(dataset) == "0>1 1>2 2>3T 0>1 1>2 2>3C"


# ---- npz layouts


def test_our_layout(load):
    dataset = load(good())
    assert len(dataset) == 6
    assert steps(dataset) == "0>1 1>2 2>3T 0>1 1>2 2>3C"
    assert dataset.reward.tolist() == [1, 2, 3, 4, 5, 6]
    assert dataset.source.endswith("data.npz")


def test_d4rl_names(load):
    renamed = {"terminations": None, "truncations": None}
    dataset = load(good(**renamed, terminals=flags(6, 2), timeouts=flags(6, 5)))
    assert steps(dataset) == "0>1 1>2 2>3T 0>1 1>2 2>3C"


def test_one_episode_that_joins_everywhere(load):
    first = {name: array[:3] for name, array in good().items()}
    assert steps(load(first)) == "0>1 1>2 2>3T"


def test_one_row(load):
    first = {name: array[:1] for name, array in good().items()}
    assert steps(load(first)) == "0>1C"


def test_d4rl_without_next_observations(load):
    """Episodes: 0 1 2 terminated, 0 1 2 3 timed out, 0 timed out, 0 terminated, 0 1 left open."""
    arrays = {
        "observations": column(0, 1, 2, 0, 1, 2, 3, 0, 0, 0, 1),
        "actions": np.tile(HIGH, (11, 1)),
        "rewards": np.arange(11),  # names the row
        "terminals": flags(11, 2, 8),
        "timeouts": flags(11, 6, 7),
    }
    dataset = load(arrays)
    # rows 6, 7 and 10 have no successor in the file; row 5 and row 9 are where their episodes stop
    assert dataset.reward.tolist() == [0, 1, 2, 3, 4, 5, 8, 9]
    dataset.next_obs[dataset.terminated] = -1  # not in the file, and nothing looks at it
    assert steps(dataset) == "0>1 1>2 2>-1T 0>1 1>2 2>3C 0>-1T 0>1C"
    assert dataset.episode_returns.tolist() == [0 + 1 + 2, 3 + 4 + 5, 8, 9]


def test_d4rl_without_next_observations_names_the_row_of_the_file(load):
    changes = {"next_observations": None, "terminations": flags(6), "truncations": flags(6, 2)}
    rewards = np.array([0, 0, 0, 0, np.nan, 0])  # row 2 is dropped before this one is found
    refused(lambda: load(good(**changes, rewards=rewards)), "rewards is not finite in row 4")


def test_d4rl_without_next_observations_nor_two_steps_in_a_row(load):
    cut_everywhere = good(terminations=flags(6), truncations=flags(6, 0, 1, 2, 3, 4, 5))
    del cut_everywhere["next_observations"]
    refused(lambda: load(cut_everywhere), "no next_observations")


def test_S6_final_observation_stored_with_each_episode(load):
    """N + number of episodes: 0 1 2 3 terminated, 0 1 2 cut, 0 1 left open."""
    arrays = {
        "observations": column(0, 1, 2, 3, 0, 1, 2, 0, 1),
        "actions": np.tile(HIGH, (6, 1)),
        "rewards": np.arange(6),
        "terminations": flags(6, 2),
        "truncations": flags(6, 2, 4),
    }
    dataset = load(arrays)
    assert steps(dataset) == "0>1 1>2 2>3T 0>1 1>2C 0>1C"
    assert dataset.reward.tolist() == [0, 1, 2, 3, 4, 5]


def test_cuts_are_inferred_where_rows_do_not_join(load):
    """No truncations in the file: 0 1 2 terminated, 0 1 cut, 0 1 left open."""
    arrays = {
        "observations": column(0, 1, 2, 0, 1, 0, 1),
        "next_observations": column(1, 2, 3, 1, 2, 1, 2),
        "actions": np.tile(HIGH, (7, 1)),
        "rewards": np.arange(7),
        "terminals": flags(7, 2),
    }
    assert steps(load(arrays)) == "0>1 1>2 2>3T 0>1 1>2C 0>1 1>2C"


def test_rounding_is_not_a_cut(load):
    exact = np.array([[0.1], [0.2], [0.3]])  # float64: not equal to its float32 copy
    changes = {"observations": exact[:2], "next_observations": exact[1:].astype(np.float32)}
    first = {name: array[:2] for name, array in good().items()} | changes
    assert load(first).truncated.tolist() == [False, True]
    del first["truncations"]
    assert load(first).truncated.tolist() == [False, True]


def test_columns_and_doubles_become_our_shapes_and_types(load):
    wide = {name: array.astype(np.float64) for name, array in good().items()}
    for name in ("rewards", "terminations", "truncations"):
        wide[name] = wide[name][:, None]  # [N, 1]
    wide["observations"] = wide["observations"][:, 0]  # [N], where the space says [1]
    dataset, expected = load(wide), load(good())
    for name in ("obs", "action", "reward", "next_obs", "terminated", "truncated"):
        field = getattr(dataset, name)
        assert torch.equal(field, getattr(expected, name)), name
        assert field.dtype == (torch.bool if name.endswith("ated") else torch.float32), name
    assert dataset.obs.shape == (6, 1) and dataset.reward.shape == (6,)


def test_S4_end_of_file_is_a_cut(load):
    dataset = load(good(truncations=flags(6)))
    assert steps(dataset) == "0>1 1>2 2>3T 0>1 1>2 2>3C"
    dataset = load(good(terminations=flags(6, 2, 5)))  # but not if the episode is over anyway
    assert steps(dataset) == "0>1 1>2 2>3T 0>1 1>2 2>3T"


def test_S7_terminated_wins_if_both_flags_are_set(load):
    dataset = load(good(truncations=flags(6, 2, 5)))
    assert dataset.terminated.tolist() == [False, False, True, False, False, False]
    assert dataset.truncated.tolist() == [False, False, False, False, False, True]


def test_discrete_actions_become_one_hot_and_come_back(load):
    """The actions of this environment are 1 and 2, not 0 and 1."""
    env = common.make_env("Switch-v0")
    dataset = load(good(actions=column(1, 2, 2, 1, 1, 2)), env)
    assert dataset.action.dtype == torch.float32
    assert dataset.action.tolist() == [[1, 0], [0, 1], [0, 1], [1, 0], [1, 0], [0, 1]]
    back = common.unnormalize_action(dataset.action.numpy(), env.action_space)
    assert back.tolist() == [1, 2, 2, 1, 1, 2]
    assert all(env.action_space.contains(action) for action in back)


# ---- minari


@pytest.fixture
def minari(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    return pytest.importorskip("minari")


def rollout(env, seed):
    """One episode, as Minari keeps it: T steps, T + 1 observations."""
    observations, transitions, done = [env.reset(seed=seed)[0]], [], False
    while not done:
        obs, reward, terminated, truncated, _ = env.step(HIGH)
        observations.append(obs)
        transitions.append((reward, terminated, truncated))
        done = terminated or truncated
    rewards, terminations, truncations = map(np.array, zip(*transitions))
    return {
        "observations": np.stack(observations),
        "actions": np.tile(HIGH, (len(rewards), 1)),
        "rewards": rewards,
        "terminations": terminations,
        "truncations": truncations,
    }


def create(minari, env, dataset_id, episodes):
    buffers = [minari.data_collector.EpisodeBuffer(**episode) for episode in episodes]
    minari.create_dataset_from_buffers(dataset_id, buffers, env=env)


@pytest.mark.filterwarnings("ignore:.*is set to None")  # the author's name and the like
def test_S6_minari_alignment(minari, env):
    # seeds 0, 2, 3: ends after 2 steps (terminated), 4 (both flags), 4 (truncated)
    create(minari, env, "test/counter-v0", [rollout(env, seed) for seed in (0, 2, 3)])
    dataset = common.load_dataset("minari:test/counter-v0", env)
    assert steps(dataset) == "0>1 1>2T 0>1 1>2 2>3 3>4T 0>1 1>2 2>3 3>4C"
    assert dataset.reward.tolist() == [13, 26, 13, 26, 39, 52, 13, 26, 39, 52]  # 3 + 10 a count
    assert dataset.action.unique().tolist() == [1]
    assert dataset.source == "minari:test/counter-v0"


@pytest.mark.filterwarnings("ignore:.*is set to None")
def test_S4_minari_episode_with_neither_flag_was_cut(minari, env):
    unflagged = {"terminations": flags(4), "truncations": flags(4)}
    create(minari, env, "test/open-v0", [rollout(env, seed=3) | unflagged] * 2)
    dataset = common.load_dataset("minari:test/open-v0", env)
    assert steps(dataset) == "0>1 1>2 2>3 3>4C 0>1 1>2 2>3 3>4C"


def test_minari_missing_id(minari, env, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # so that nobody asks the network
    refused(lambda: common.load_dataset("minari:no/such-v0", env), "dataset minari:no/such-v0: ")


def test_minari_error_of_many_lines(minari, env, monkeypatch):
    def fail(*args, **kwargs):
        raise ConnectionError("first\n  second\n")

    monkeypatch.setattr(minari, "load_dataset", fail)
    refused(lambda: common.load_dataset("minari:no/net-v0", env), "ConnectionError: first second")


def test_minari_not_installed(env, monkeypatch):
    monkeypatch.setitem(sys.modules, "minari", None)
    refused(lambda: common.load_dataset("minari:a/b-v0", env), "pip install 'minari[hdf5,hf]'")


# ---- bad files


def good_bytes(path, save=np.savez):
    save(path, **good())
    return path.read_bytes()


def flip_a_byte(path):
    content = bytearray(good_bytes(path))
    content[content.index(good()["rewards"].tobytes())] ^= 1  # the zip holds a checksum of this
    path.write_bytes(content)


def text_instead_of_an_array(path):
    np.savez(path, **good(rewards=None))
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("rewards.npy", "1 2 3 4 5 6")


BAD_FILES = {
    "missing": (lambda path: None, "No such file"),
    "empty": (
        lambda path: path.write_bytes(b""),
        "not a complete npz file, get it again (it starts with b'')",
    ),
    "html": (
        lambda path: path.write_text("\n<!DOCTYPE html><html>404</html>"),
        "starts with b'\\n<!DOCTYPE html>",
    ),
    "noise": (lambda path: path.write_bytes(random.Random(0).randbytes(999)), "not a complete npz"),
    "half": (lambda path: path.write_bytes(good_bytes(path)[:900]), "not a complete npz"),
    "pickle": (lambda path: path.write_bytes(pickle.dumps(good())), "not a complete npz"),
    "flipped": (flip_a_byte, "BadZipFile: Bad CRC-32 for file 'rewards.npy'"),
    "text": (text_instead_of_an_array, "rewards"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_file(name, env, tmp_path):
    write, fragment = BAD_FILES[name]
    path = tmp_path / "bad.npz"
    write(path)
    refused(lambda: common.load_dataset(str(path), env), f"dataset {path}", fragment)


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("name", ["observations", "truncations"])
def test_pickle_inside_is_never_run(name, env, tmp_path):
    crater, path = tmp_path / "crater", str(tmp_path / "bad.npz")
    np.savez(path, **good(**{name: np.array([Bomb(str(crater))] * 6)}))
    refused(lambda: common.load_dataset(path, env), f"dataset {path}", "pickle")
    assert not crater.exists()
    np.load(path, allow_pickle=True)[name]  # the bomb is live: this is what we did not do
    assert crater.exists()


nan, inf = float("nan"), float("inf")
BAD_ARRAYS = {
    "no observations": ({"observations": None}, "no array 'observations'"),
    "no actions": ({"actions": None}, "no array 'actions'"),
    "no rewards": ({"rewards": None}, "no array 'rewards'"),
    "no terminations": ({"terminations": None}, "no array 'terminations'"),
    "other names": ({"actions": None, "acts": column(1)}, "next_observations, terminations"),
    "no rows": ({name: array[:0] for name, array in good().items()}, "has no rows"),
    "5 observations": ({"observations": good()["observations"][:5]}, "observations has 5 rows"),
    "5 next_observations": (
        {"next_observations": good()["next_observations"][:5]},
        "next_observations has 5 rows",
    ),
    "5 rewards": ({"rewards": np.ones(5)}, "rewards has 5 rows, actions has 6"),
    "5 terminations": ({"terminations": flags(5)}, "terminations has 5 rows"),
    "5 truncations": ({"truncations": flags(5)}, "truncations has 5 rows"),
    "7 observations, no next": (
        {"observations": column(*range(7)), "next_observations": None},
        "observations has 7 rows; expected 6, or 8",
    ),
    "wide observations": (
        {"observations": np.ones((6, 2))},
        "a row of observations has shape (2,)",
    ),
    "wide next_observations": (
        {"next_observations": np.ones((6, 2))},
        "next_observations has shape (2,)",
    ),
    "wide next_observations, no cuts": (
        {"next_observations": np.ones((6, 2)), "truncations": None, "observations": np.eye(6)},
        "observations has shape",
    ),
    "narrow actions": ({"actions": np.ones((6, 1))}, "a row of actions has shape (1,)"),
    "flat actions": ({"actions": np.ones(6)}, "a row of actions has shape ()"),
    "wide rewards": ({"rewards": np.ones((6, 2))}, "a row of rewards has shape (2,)"),
    "one number as rewards": ({"rewards": np.float32(1)}, "reward"),
    "one number as actions": ({"actions": np.float32(1)}, "action"),
    "nan observation": (put("observations", 4, nan), "observations is not finite in row 4"),
    "inf next_observation": (
        put("next_observations", 2, inf),
        "next_observations is not finite in row 2",
    ),
    "nan action": (put("actions", 3, [0, nan]), "actions is not finite in row 3"),
    "inf reward": (put("rewards", 5, -inf), "rewards is not finite in row 5"),
    "nan termination": ({"terminations": np.array([0, 0, 1, 0, nan, 0])}, "in row 4"),
    "action above": (put("actions", 2, [3.5, 0]), "in row 2: [3.5 0. ]"),
    "bounds of action above": (put("actions", 2, [3.5, 0]), "not in [-1. 0.] to [ 3. 10.]"),
    # -0.5 is inside the first dimension's bounds, not the second's
    "action below": (put("actions", 4, [0, -0.5]), "in row 4: [ 0. -0.5]"),
    "strings": ({"rewards": np.array(list("123456"))}, "rewards holds <U1, not numbers"),
    "strings as flags": ({"terminations": np.array(list("001000"))}, "terminations holds <U1"),
}


@pytest.mark.parametrize("name", BAD_ARRAYS)
def test_bad_arrays(name, load):
    changes, fragment = BAD_ARRAYS[name]
    refused(lambda: load(good(**changes)), "data.npz", fragment)


@pytest.mark.parametrize("action", [0, 3, -1, 1.5])
def test_discrete_action_out_of_range(action, load):
    actions, switch = np.array([1, 2, 1, 1, action, 1]), common.make_env("Switch-v0")
    refused(lambda: load(good(actions=actions), switch), "data.npz", "is not in 1 to 2")


# ---- rewards


def test_rewards_are_scaled_and_shifted(load):
    dataset = load(good(), reward_scale=2, reward_shift=-1)
    assert dataset.reward.tolist() == [1, 3, 5, 7, 9, 11]
    assert dataset.reward.dtype == torch.float32
    assert dataset.episode_returns.tolist() == [1 + 2 + 3, 4 + 5 + 6]  # in the rewards of the file


def test_normalize_reward_by_hand(load):
    factor = 1000 / (15 - 6)
    dataset = load(good(), normalize_reward=True)
    np.testing.assert_allclose(dataset.reward, factor * np.arange(1, 7), rtol=1e-6)
    dataset = load(good(), normalize_reward=True, reward_scale=0.5, reward_shift=3)
    np.testing.assert_allclose(dataset.reward, 0.5 * factor * np.arange(1, 7) + 3, rtol=1e-6)
    assert dataset.episode_returns.tolist() == [6, 15]


def test_normalize_reward_needs_different_returns(load):
    same = good(rewards=np.array([1, 2, 3, 3, 2, 1]))
    refused(lambda: load(same, normalize_reward=True), "data.npz", "same return")


# ---- fingerprint


def test_fingerprint_of_equal_data(load):
    assert load(good()).fingerprint == load(good()).fingerprint


@pytest.mark.parametrize(
    "name, row, value",
    [
        ("observations", 3, 0.5),
        ("actions", 4, [0, 0.5]),
        ("rewards", 0, 1.5),
        ("next_observations", 5, 3.5),
        ("terminations", 5, True),
        ("truncations", 1, True),  # the same rows, but other episodes: other returns-to-go
    ],
)
def test_fingerprint_sees_one_number(name, row, value, load):
    assert load(good()).fingerprint != load(good(**put(name, row, value))).fingerprint


# ---- returns-to-go


def brute_force(reward, terminated, truncated, gamma):
    """The definition, one row at a time, in float64."""
    returns, discounts, last_rows = [], [], []
    for t in range(len(reward)):
        total = 0.0
        for k in range(t, len(reward)):
            total += gamma ** (k - t) * float(reward[k])
            if terminated[k] or truncated[k]:
                break
        returns.append(total)
        discounts.append(0.0 if terminated[k] else gamma ** (k - t + 1))
        last_rows.append(k)
    return returns, discounts, last_rows


def random_episodes(seed, num_rows=400):
    rng = np.random.default_rng(seed)
    reward = torch.tensor(rng.normal(1, 2, num_rows), dtype=torch.float32)
    terminated, truncated = torch.tensor(rng.random((2, num_rows)) < 0.03)
    terminated[-20:] = truncated[-20:] = False  # an open tail
    return reward, terminated, truncated


@pytest.mark.parametrize("gamma", [0.9, 0.99, 1.0])
def test_S3_S4_returns_to_go_by_brute_force(gamma):
    episodes = random_episodes(seed=0)
    returns, discounts, last = common.returns_to_go(*episodes, gamma)
    expected_returns, expected_discounts, expected_last = brute_force(*episodes, gamma)
    assert returns.dtype == discounts.dtype == torch.float32
    np.testing.assert_allclose(returns, expected_returns, rtol=1e-6)
    np.testing.assert_allclose(discounts, expected_discounts, rtol=1e-6)
    assert last.tolist() == expected_last


def test_returns_to_go_do_not_drift():
    num_rows, gamma = 20_000, 0.9999
    reward, never = torch.full((num_rows,), 0.1), torch.zeros(num_rows, dtype=torch.bool)
    returns, _, _ = common.returns_to_go(reward, never, never, gamma)
    left = np.arange(num_rows, 0, -1)
    closed_form = float(reward[0]) * (1 - gamma**left) / (1 - gamma)
    np.testing.assert_allclose(returns, closed_form, rtol=1e-6)  # float32 sums are 1e-5 off


def test_S3_episodes_are_independent():
    reward, terminated, truncated = random_episodes(seed=1)
    returns, _, _ = common.returns_to_go(reward, terminated, truncated, 0.99)
    last = torch.tensor(brute_force(reward, terminated, truncated, 0.99)[2])
    for end in last.unique().tolist():
        inside = last == end
        others = common.returns_to_go(reward + 100 * inside, terminated, truncated, 0.99)[0]
        assert torch.equal(others[~inside], returns[~inside])
        assert (others[inside] > returns[inside] + 99).all()


def test_S4_a_cut_is_worth_its_value():
    """r = 3 forever and gamma = 1/2: G = V = 6 in every row, wherever the episodes were cut."""
    reward = torch.full((12,), 3.0)
    never, cuts = torch.tensor(flags(12)), torch.tensor(flags(12, 0, 4, 9))  # and an open tail
    returns, discounts, _ = common.returns_to_go(reward, never, cuts, gamma=0.5)
    assert torch.equal(returns + discounts * 6, torch.full((12,), 6.0))


def test_S1_a_termination_is_worth_nothing():
    """One episode that terminates, one that does so at the moment it is cut, one that is cut."""
    terminated, truncated = torch.tensor(flags(7, 2, 4)), torch.tensor(flags(7, 4, 6))
    returns, discounts, last = common.returns_to_go(torch.ones(7), terminated, truncated, gamma=0.5)
    assert returns.tolist() == [1.75, 1.5, 1, 1.5, 1, 1.5, 1]
    assert discounts.tolist() == [0, 0, 0, 0, 0, 0.25, 0.5]
    assert last.tolist() == [2, 2, 2, 4, 4, 6, 6]


# ---- evaluation


def scripted(obs):
    """Action (count, 1), so that step t of Counter, counted from 1, has the reward t * t."""
    return np.concatenate([obs, np.ones_like(obs)], axis=1)


def test_S5_evaluate_by_hand(monkeypatch):
    monkeypatch.setattr(Counter, "steps", 0)
    monkeypatch.setattr(Counter, "resets", 0)
    seen = []

    def policy(obs):
        seen.append(obs[:, 0].tolist())
        return scripted(obs)

    returns = common.evaluate(policy, "Counter-v0", episodes=4, seed=0)
    assert returns.tolist() == [1 + 4, 1 + 4 + 9, 1 + 4 + 9 + 16, 1 + 4 + 9 + 16]
    # all episodes in one batch; one that is over stays where it ended: no reset, no further step
    assert seen == [[0, 0, 0, 0], [1, 1, 1, 1], [2, 2, 2, 2], [2, 3, 3, 3]]
    assert Counter.steps == 2 + 3 + 4 + 4
    assert Counter.resets == 4


class Remembering:
    """scripted, from memory: it counts the steps of an episode by itself."""

    def reset(self):
        self.count = 0

    def __call__(self, obs):
        self.count += 1
        return np.full((len(obs), 2), (self.count - 1, 1), np.float32)


def test_a_policy_that_remembers_forgets_before_every_evaluation(tmp_path):
    policy = Remembering()
    for _ in range(2):
        returns = common.evaluate(policy, "Counter-v0", episodes=4, seed=0)
        assert returns.tolist() == [5, 14, 30, 30] and policy.count == 4
    recorded = common.record(policy, "Counter-v0", 4, 0, str(tmp_path / "data.npz"))
    assert recorded.tolist() == [5, 14, 30, 30]


def swing(obs):
    return 2 * np.sign(obs[:, 2:])  # a Pendulum policy: push the way it moves


def test_evaluate_episode_depends_on_its_own_seed_only():
    five = common.evaluate(swing, "Pendulum-v1", episodes=5, seed=7)
    assert len(set(five.tolist())) == 5
    assert np.array_equal(common.evaluate(swing, "Pendulum-v1", episodes=3, seed=7), five[:3])
    assert np.array_equal(common.evaluate(swing, "Pendulum-v1", episodes=2, seed=10), five[3:])


def test_evaluate_pendulum_against_a_plain_loop():
    env = gym.make("Pendulum-v1")
    obs, _ = env.reset(seed=3)
    total, truncated = 0.0, False
    while not truncated:
        obs, reward, _, truncated, _ = env.step(swing(obs[None])[0])
        total += reward
    assert common.evaluate(swing, "Pendulum-v1", episodes=1, seed=3).tolist() == [total]


def test_S19_no_global_random_numbers(env, tmp_path):
    def states():
        _, key, position, *_ = np.random.get_state()
        return random.getstate(), key.tolist(), position, torch.get_rng_state().tolist()

    before = states()
    common.evaluate(swing, "ShortPendulum-v0", episodes=2, seed=0)
    common.record(swing, "ShortPendulum-v0", 2, 0, str(tmp_path / "data.npz"))
    common.load_dataset("random:50", env)
    assert states() == before


# ---- recording


def test_record(env, tmp_path):
    path = str(tmp_path / "data.npz")
    returns = common.record(scripted, "Counter-v0", episodes=4, seed=0, path=path)
    assert returns.tolist() == [5, 14, 30, 30]

    with np.load(path) as file:
        arrays = dict(file)
    assert set(arrays) == set(good())
    counts = [0, 1, 0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3]
    assert arrays["actions"].tolist() == [[count, 1] for count in counts]  # the env's own units
    assert arrays["rewards"].tolist() == [(count + 1) ** 2 for count in counts]
    assert arrays["truncations"].tolist() == flags(13, 8, 12).tolist()  # S7: row 8 has both flags

    dataset = common.load_dataset(path, env)
    last = "3>4T 0>1 1>2 2>3 3>4C"
    assert steps(dataset) == f"0>1 1>2T 0>1 1>2 2>3T 0>1 1>2 2>3 {last}"
    assert np.array_equal(dataset.episode_returns, returns)


def test_record_keeps_what_the_policy_returned(tmp_path):
    """This one returns a view of the batch that evaluate() goes on to overwrite."""
    path = str(tmp_path / "data.npz")
    common.record(lambda obs: obs[:, :1], "ShortPendulum-v0", episodes=2, seed=0, path=path)
    with np.load(path) as file:
        np.testing.assert_array_equal(file["actions"], file["observations"][:, :1])


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_save_npz_is_all_or_nothing(error, tmp_path, monkeypatch):
    path = tmp_path / "data.npz"
    common.save_npz(str(path), good())
    old = path.read_bytes()

    def fail(file, **arrays):
        file.write(b"half")
        raise error("disk full")

    monkeypatch.setattr(np, "savez_compressed", fail)
    with pytest.raises(error, match=r"disk full|cannot write"):
        common.save_npz(str(path), good(rewards=np.zeros(6)))
    assert path.read_bytes() == old
    assert os.listdir(tmp_path) == ["data.npz"]


def test_save_npz_replaces(tmp_path, env):
    path = str(tmp_path / "new.npz")
    common.save_npz(path, good())
    common.save_npz(path, good(rewards=np.arange(6)))
    assert common.load_dataset(path, env).reward.tolist() == [0, 1, 2, 3, 4, 5]
    assert os.listdir(tmp_path) == ["new.npz"]


# ---- video


@pytest.fixture
def no_screen(monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")


def test_capture_video(no_screen, tmp_path):
    seen = []

    def policy(obs):
        seen.append(obs.copy())
        return swing(obs)

    path = common.capture_video(policy, "ShortPendulum-v0", seed=3, folder=str(tmp_path / "film"))
    assert [obs.shape for obs in seen] == [(1, 3)] * 10
    assert np.array_equal(seen[0][0], gym.make("Pendulum-v1").reset(seed=3)[0])
    with open(path, "rb") as file:
        content = file.read()
    assert path.endswith(".mp4") and content[4:8] == b"ftyp" and len(content) > 1000
    assert os.listdir(tmp_path / "film") == [os.path.basename(path)]


def test_a_policy_that_remembers_forgets_before_a_film(no_screen, tmp_path):
    class Swing(Remembering):
        def __call__(self, obs):
            return super().__call__(obs)[:, 1:]

    policy = Swing()
    for film in ("a", "b"):
        common.capture_video(policy, "ShortPendulum-v0", 3, str(tmp_path / film))
        assert policy.count == 10


@pytest.mark.parametrize("package, name", [("moviepy", "MoviePy"), ("pygame", "pygame")])
def test_capture_video_without_a_package(package, name, no_screen, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, package, None)
    folder = str(tmp_path / "film")
    refused(
        lambda: common.capture_video(swing, "ShortPendulum-v0", 0, folder),
        f"cannot film ShortPendulum-v0: {name} is not installed",
    )


@pytest.mark.filterwarnings("ignore:.*render_mode")
def test_capture_video_of_what_cannot_be_drawn(tmp_path):
    refused(lambda: common.capture_video(scripted, "Counter-v0", 0, str(tmp_path)), "Counter-v0")
