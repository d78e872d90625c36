"""Small environments with known answers, and a short run of each algorithm to start from."""

import csv
import math
import os
import sys
import time
from dataclasses import fields, replace
from pathlib import Path

os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # videos are rendered without a screen

import gymnasium as gym
import numpy as np
import pytest
import torch
from dreamer_helpers import film, modules, nano, spy, walk  # noqa: F401

import common
from algos import awr, crr, dreamer, fqf, gail, marwil, mbpo, rlpd

ALGOS = {"awr": awr, "marwil": marwil, "crr": crr, "rlpd": rlpd, "mbpo": mbpo, "fqf": fqf}
ALGOS |= {"gail": gail, "dreamer": dreamer}
OFFLINE = ("awr", "marwil", "crr")
WITH_REWARDS = (*OFFLINE, "rlpd")  # those that learn from the rewards of a dataset
WITH_DATA = (*WITH_REWARDS, "gail")  # those that read a dataset
ROOT = Path(__file__).resolve().parents[1]
torch.set_num_threads(1)  # tests run several at once, and small networks gain nothing from two


class ProbeEnv(gym.Env):
    """One action in [-1, 1], one or two states, for datasets that are written by hand.

    It is stepped only by evaluation: reward 1 - (a - 0.5)^2, ten steps, then truncated.
    """

    observation_space = gym.spaces.Box(-10, 10, (1,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), float(1 - (action[0] - 0.5) ** 2), False, False, {}


class ImageEnv(ProbeEnv):
    observation_space = gym.spaces.Box(0, 255, (8, 8, 3), np.uint8)


class BytesEnv(ProbeEnv):
    """A vector of bytes, such as the memory of a game."""

    observation_space = gym.spaces.Box(0, 255, (4,), np.uint8)

    def reset(self, seed=None, options=None):
        return np.zeros(4, np.uint8), {}

    def step(self, action):
        obs = self.np_random.integers(256, size=4).astype(np.uint8)
        return obs, float(action[0]), False, False, {}


class ByteChoiceEnv(BytesEnv):
    action_space = gym.spaces.Discrete(2)

    def step(self, action):
        return super().step([action])


class UnboundedEnv(ProbeEnv):
    action_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)


class SeveralEnv(ProbeEnv):
    action_space = gym.spaces.MultiDiscrete([2, 3])


class ChoiceEnv(ProbeEnv):
    """The actions are 5, 6 and 7; reward 1 for 6."""

    action_space = gym.spaces.Discrete(3, start=5)

    def step(self, action):
        assert self.action_space.contains(action)
        return np.zeros(1, np.float32), float(action == 6), False, False, {}


class WalkEnv(gym.Env):
    """A random walk that the action, in [-1, 3], steers: every step depends on the seed and on all
    actions before it. The end of the world is at +-2; ten steps are truncated."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = gym.spaces.Box(-1, 3, (1,), np.float32)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.position, self.time = self.np_random.normal(), 0
        return np.array([self.position, self.time]), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.position += 0.5 * (action[0] - 1) + 0.3 * self.np_random.normal()
        self.time += 1
        obs, end = np.array([self.position, self.time]), bool(abs(self.position) > 2)
        return obs, float(-(self.position**2)), end, False, {}


class StepsEnv(WalkEnv):
    """The same walk with the actions 5, 6 and 7: back, stay, forth."""

    action_space = gym.spaces.Discrete(3, start=5)

    def step(self, action):
        assert self.action_space.contains(action)
        self.position += 0.5 * (action - 6) + 0.3 * self.np_random.normal()
        self.time += 1
        obs, end = np.array([self.position, self.time]), bool(abs(self.position) > 2)
        return obs, float(-(self.position**2)), end, False, {}


ENVS = {
    "Walk": WalkEnv,
    "Steps": StepsEnv,
    "Probe": ProbeEnv,
    "Image": ImageEnv,
    "Unbounded": UnboundedEnv,
    "Several": SeveralEnv,
}
ENVS |= {"Choice": ChoiceEnv, "Bytes": BytesEnv, "ByteChoice": ByteChoiceEnv}
for name, entry_point in ENVS.items():
    gym.register(f"{name}-v0", entry_point, max_episode_steps=10)


def save_rows(path, obs, action, reward, next_obs, terminated, truncated):
    columns = [np.asarray(column, np.float32) for column in (obs, action, reward, next_obs)]
    np.savez(
        path,
        observations=columns[0].reshape(-1, 1),
        actions=columns[1].reshape(-1, 1),
        rewards=columns[2],
        next_observations=columns[3].reshape(-1, 1),
        terminations=np.asarray(terminated, bool),
        truncations=np.asarray(truncated, bool),
    )
    return str(path)


@pytest.fixture(scope="session")
def probe_data(tmp_path_factory):
    """300 random rows of the probe environment: short episodes, both kinds of end."""
    rng = np.random.default_rng(0)
    obs = rng.normal(size=301).astype(np.float32)
    terminated = np.arange(300) % 10 == 9
    truncated = np.arange(300) % 10 == 4
    action = rng.uniform(-1, 1, 300)
    action[:20] = np.repeat([-1.0, 1.0], 10)  # saturated actions belong into every test
    reward = rng.normal(size=300)
    next_obs = obs[1:].copy()  # where an episode ends, the next one starts elsewhere
    next_obs[terminated | truncated] = rng.normal(size=60)
    path = tmp_path_factory.mktemp("data") / "probe.npz"
    return save_rows(path, obs[:-1], action, reward, next_obs, terminated, truncated)


TINY_FLAGS = {  # so that 20 updates see everything that happens now and then
    "awr": {"value_warmup": 5, "refresh_interval": 7},
    "marwil": {"refresh_interval": 7},
    "crr": {},
    "rlpd": {"learning_starts": 4, "gradient_updates_per_step": 2, "num_critics": 3},
    "mbpo": {"learning_starts": 4, "updates_per_step": 2, "model_train_interval": 5}
    | {"real_ratio": 0.1}
    | {"num_members": 3, "num_elites": 2, "model_hidden_dim": 8, "model_batch_size": 8}
    | {"max_model_updates": 8, "rollout_batch_size": 20, "retain_steps": 10}
    | {"max_rollout_length": 3, "rollout_grow_from": 5, "rollout_grow_until": 15},
    "fqf": {"learning_starts": 3, "train_frequency": 1, "target_interval": 5, "num_fractions": 4}
    | {"num_cosines": 8, "epsilon_steps": 15, "epsilon_final": 0.2, "learning_rate": 3e-2}
    | {"priority_beta_steps": 30, "n_steps": 1},
    "gail": {"num_envs": 1, "num_steps": 5, "lr_schedule": "constant"},
    # 32 transitions in a batch: one update per step
    "dreamer": {"num_envs": 1, "learning_starts": 4, "replay_ratio": 32.0, "sequence_length": 4}
    | {"imagine_last": 2, "horizon": 2, "buffer_capacity": 100, "gamma": 0.99},
}
TINY_ENV = {"fqf": "Steps-v0", "dreamer": "Steps-v0"}  # else Probe-v0
REAL_ENV = {"fqf": "CartPole-v1", "dreamer": "CartPole-v1"}  # else Pendulum-v1
ACTOR_LOSS = {"fqf": "losses/quantile"}  # of what acts; else losses/actor


CLONING = {  # behaviour cloning, in the words of each
    "awr": {"beta": math.inf},
    "marwil": {"beta": 0.0},
    "crr": {"weight_type": "exp", "beta": math.inf},
}


FAST_PROBES = (  # one for each file; the others of test_probe.py are slow
    "test_two_step_mdp_with_known_v[awr-1.0]",
    "test_two_step_mdp_with_known_v[marwil-0.5]",
    "test_two_step_mdp_with_known_q[crr-flags0]",
    "test_two_step_mdp_with_known_q[rlpd-flags2]",
    "test_S1_online_truncation_bootstraps[mbpo]",
    "test_S1_S2_discrete_online_truncation_bootstraps[flags0-fqf]",
    "test_expert_is_followed_and_not_the_reward[softplus-gail]",
)


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.name == "test_probe.py" and item.name not in FAST_PROBES:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def same_numbers_each_time():
    """Of tests that draw tensors without a generator."""
    torch.manual_seed(0)


@pytest.fixture(params=ALGOS, scope="session")
def algo(request):
    """The module of an algorithm. A test that asks for it is run for each of them."""
    return ALGOS[request.param]


# what lives once in common.py is tested once: on an offline file, and on an online one
on_two_files = pytest.mark.parametrize("algo", ["crr", "rlpd"], indirect=True)


@pytest.fixture
def run(algo, monkeypatch, capsys):
    """A script as the shell would call it, without the seconds that importing torch takes.

    -> exit code, output, and error without the algorithm's name, with which it must begin
    """

    def call(*flags):
        monkeypatch.setattr(sys, "argv", [algo.__file__, *map(str, flags)])
        own = [algo.evaluate_checkpoint] if hasattr(algo, "evaluate_checkpoint") else []
        try:
            code = common.main(algo.ALGO, algo.Args, algo.train, algo.load_policy, *own)
        except SystemExit as exit:  # tyro's own errors
            return exit.code, *capsys.readouterr()
        out, err = capsys.readouterr()
        assert not err or err.startswith(f"{algo.ALGO}: ")
        return code, out, err.removeprefix(f"{algo.ALGO}: ")

    return call


def spy_on(monkeypatch, module):
    """-> install(name): keep the arguments and the result of every call of a function of a script,
    or of common.py, which it calls."""

    def install(name):
        owner = module if hasattr(module, name) else common
        calls, original = [], getattr(owner, name)

        def spied(*args, **options):
            result = original(*args, **options)
            calls.append((*args, *options.values(), result))
            return result

        monkeypatch.setattr(owner, name, spied)
        return calls

    return install


def as_flags(args):
    """--name value for every field; booleans and None as tyro wants them."""
    flags = []
    for field in fields(args):
        value, name = getattr(args, field.name), field.name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        elif value is not None:
            flags += [f"--{name}", str(value)]
    return flags


def metrics_of(run_dir):
    """Step, key and value of every logged scalar that is not a time."""
    rows = [line.split(",") for line in Path(run_dir, "metrics.csv").read_text().splitlines()]
    return [(step, key, value) for step, _, key, value in rows if "_second" not in key]


def budget(algo, count):
    """As many updates, or environment steps."""
    return {"total_updates" if algo.ALGO in OFFLINE else "total_timesteps": count}


def data(algo, dataset):
    """The flag, for those that have it."""
    return {"dataset": dataset} if algo.ALGO in WITH_DATA else {}


def width(algo, hidden_dim):
    """The flag, for those that have it; Dreamer has sizes, of which the smallest is the default."""
    return {} if algo.ALGO == "dreamer" else {"hidden_dim": hidden_dim}


def tiny_args(algo, dataset, run_dir):
    """Arguments of a run that takes a fraction of a second."""
    return algo.Args(
        env_id=TINY_ENV.get(algo.ALGO, "Probe-v0"),
        **data(algo, dataset),
        **budget(algo, 20),
        batch_size=32,
        **width(algo, 16),
        eval_interval=10,
        eval_episodes=2,
        checkpoint_interval=1000,
        log_interval=5,
        run_dir=str(run_dir),
        device="cpu",
        torch_threads=1,
        quiet=True,
        **TINY_FLAGS[algo.ALGO],
    )


@pytest.fixture
def tiny(algo, probe_data, tmp_path):
    return tiny_args(algo, probe_data, tmp_path / "run")


def load(run_dir, name="checkpoint.pt"):
    return torch.load(f"{run_dir}/{name}", weights_only=True)


NETWORKS = ("actor", "value", "critic", "target_actor", "target_critic", "network", "proposal")
NETWORKS += ("target_network", "discriminator", "normalizer", "model", "slow_critic")


def flat(checkpoint, keys=NETWORKS):
    """All parameters in one vector, to compare two runs bit for bit."""
    states = [checkpoint[key] for key in keys if key in checkpoint]
    return torch.cat([tensor.flatten() for state in states for tensor in state.values()])


def assert_same_state(left: dict, right: dict):
    """Everything in two checkpoints but the clock and the names of their folders."""
    assert left.keys() == right.keys()
    for key in left.keys() - {"log_position", "args"}:
        assert_equal(left[key], right[key], key)


def assert_equal(left, right, where):
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right), where
    elif isinstance(left, dict):
        assert left.keys() == right.keys(), where
        for key in left:
            assert_equal(left[key], right[key], f"{where}.{key}")
    elif isinstance(left, list | tuple):
        for a, b in zip(left, right, strict=True):
            assert_equal(a, b, where)
    else:
        assert left == right, where


def published(folder):
    """What benchmark/run.py copied of a run, but for the seconds."""
    with open(folder / "metrics.csv", newline="") as file:
        return [(row["step"], row["key"], row["value"]) for row in csv.DictReader(file)]


def wait_until(condition):
    """Without a word about how long it may take, but a test that hangs is to end."""
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.01)


def processes(*words):
    """pid -> command of the processes that live and whose command has all of the words (Linux)."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().decode(errors="replace")
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:  # it ended
            continue
        if state not in "ZX" and all(word in command for word in words):
            found[int(folder.name)] = command.split("\0")
    return found


# ---- AWR and MARWIL once more, with loops and torch.distributions, for tests of the whole loop


class ByHand:
    """A probe dataset as the networks see it, and what the loop computes from it."""

    def __init__(self, algo, args, tmp_path):
        self.discrete = args.env_id == "Choice-v0"
        file = dict(np.load(args.dataset))
        if self.discrete:
            file["actions"] = np.random.default_rng(0).integers(5, 8, 300)
        np.savez(tmp_path / "by_hand.npz", **file)
        self.args = args = replace(args, dataset=str(tmp_path / "by_hand.npz"))

        obs = torch.tensor(file["observations"])
        mean, std = obs.mean(0), obs.std(0) + 1e-3
        self.obs = (obs - mean) / std
        self.next_obs = (torch.tensor(file["next_observations"]) - mean) / std
        self.action, self.reward = torch.tensor(file["actions"]), file["rewards"].astype(np.float64)
        self.end, self.cut = file["terminations"], file["truncations"] & ~file["terminations"]
        self.cut[-1] = not self.end[-1]

        torch.manual_seed(args.seed)
        self.actor = algo.Actor(1, 3 if self.discrete else 1, args.hidden_dim, self.discrete)
        self.value = algo.mlp(1, args.hidden_dim, 1)
        self.actor_opt = torch.optim.Adam(self.actor.parameters(), args.learning_rate)
        self.value_opt = torch.optim.Adam(self.value.parameters(), args.learning_rate)
        self.generator = torch.Generator().manual_seed(common.second_seed(args.seed))

        finite, discount = np.zeros(300), np.zeros(300)  # V starts at c = mean(M) + mean(D) c
        for t in reversed(range(300)):
            over = self.end[t] or self.cut[t]
            finite[t] = self.reward[t] + (0 if over else args.gamma * finite[t + 1])
            discount[t] = args.gamma * (self.cut[t] if over else discount[t + 1])
        self.center = finite.mean() / (1 - discount.mean())
        self.scale = (finite + discount * self.center).std(ddof=1)

    def v(self, obs):
        return self.center + self.scale * self.value(obs)[:, 0]

    def returns(self):
        with torch.no_grad():
            next_v, mixed = self.v(self.next_obs).double().numpy(), self.args.td_lambda
        returns = np.zeros(300)
        for t in reversed(range(300)):
            future = 0.0
            if self.cut[t]:
                future = next_v[t]
            elif not self.end[t]:
                future = (1 - mixed) * next_v[t] + mixed * returns[t + 1]
            returns[t] = self.reward[t] + self.args.gamma * future
        return torch.tensor(returns).float()

    def draw(self):
        return torch.randint(300, (self.args.batch_size,), generator=self.generator)

    def log_prob(self, index):
        output, action = self.actor.net(self.obs[index]), self.action[index]
        if self.discrete:
            return torch.distributions.Categorical(logits=output).log_prob(action - 5)
        log_std = -5 + 3.5 * (1 + torch.tanh(output[:, 1:]))
        pi = torch.distributions.Normal(output[:, :1], log_std.exp())
        clipped = action.clamp(-0.999, 0.999)
        return (pi.log_prob(torch.atanh(clipped)) - torch.log(1 - clipped**2))[:, 0]

    def step(self, opt, loss):
        opt.zero_grad()
        loss.backward()
        opt.step()

    def assert_same_networks(self, checkpoint):
        networks = checkpoint["actor"] | {f"v.{k}": x for k, x in checkpoint["value"].items()}
        trained = [x.flatten() for name, x in networks.items() if "net" in name]
        expected = [*self.actor.parameters(), *self.value.parameters()]
        expected = torch.cat([parameter.detach().flatten() for parameter in expected])
        torch.testing.assert_close(torch.cat(trained), expected, rtol=1e-3, atol=2e-5)
