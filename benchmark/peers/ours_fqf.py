"""python ours_fqf.py SETTING [--variant compile|python]: algos/fqf.py as a user runs it, that is
train() itself, with its sampling, its logging, and one greedy action per update in an environment
that does nothing.

"fqf": 4 observations, 2 actions, 128 wide, 64 cosines, 32 fractions, batch 128.
"fqf-atari": 4 x 84 x 84 bytes, 4 actions, the Nature CNN, 512 wide, 32 fractions, batch 32.
"fqf-buffer": "fqf" with --prioritized, and a replay buffer that is full from the start.
"fqf-loop": steps of CartPole with the default flags, evaluations excluded.
"fqf-tree": draw 128 of 1,000,000 priorities, write 128 new ones; one sample counts. "python" does
the same with a plain Python tree, one sample after the other.
"""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from timing import ARGS, marks_at_entries, measure, report

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from algos import fqf

CAPACITY, DRAWN = 1_000_000, 128


class StillEnv(gym.Env):
    """An observation of zeros for ever."""

    def __init__(self, shape: tuple[int, ...], dtype: type, num_actions: int):
        high = 255 if dtype == np.uint8 else np.inf
        self.observation_space = gym.spaces.Box(-high * (dtype != np.uint8), high, shape, dtype)
        self.action_space = gym.spaces.Discrete(num_actions)
        self.obs = np.zeros(shape, dtype)

    def reset(self, seed=None, options=None):
        return self.obs.copy(), {}

    def step(self, action):
        return self.obs.copy(), 0.0, False, False, {}


class FullBuffer(fqf.Buffer):
    """As a run leaves it that has filled it: a million steps would take longer than all windows."""

    def __init__(self, capacity: int, obs_shape: tuple[int, ...], stack_size: int):
        super().__init__(capacity, obs_shape, stack_size)
        rng, slots = np.random.default_rng(0), np.arange(capacity)
        self.columns["frame"][:] = rng.standard_normal((capacity, *obs_shape))
        self.columns["age"][:] = slots % 1000
        self.columns["priority"][:] = rng.random(capacity)
        self.size = capacity


class PythonTree:
    """A sum tree in the words of a textbook."""

    def __init__(self, capacity: int):
        self.first_leaf = 1
        while self.first_leaf < capacity:
            self.first_leaf *= 2
        self.nodes = [0.0] * (2 * self.first_leaf)

    def set(self, leaf: int, priority: float) -> None:
        node = self.first_leaf + leaf
        change = priority - self.nodes[node]
        while node > 0:
            self.nodes[node] += change
            node //= 2

    def get(self, value: float) -> int:
        node = 1
        while node < self.first_leaf:
            node *= 2
            if value >= self.nodes[node]:
                value -= self.nodes[node]
                node += 1
        return node - self.first_leaf


def measure_tree() -> None:
    rng = np.random.default_rng(0)
    priorities = rng.random(CAPACITY)
    if ARGS.variant == "python":
        tree = PythonTree(CAPACITY)
        for leaf, priority in enumerate(priorities.tolist()):
            tree.set(leaf, priority)

        def update() -> None:
            uniform, new = rng.random(DRAWN).tolist(), rng.random(DRAWN).tolist()
            leaves = [tree.get(value * tree.nodes[1]) for value in uniform]
            for leaf, priority in zip(leaves, new):
                tree.set(leaf, priority)
    else:
        buffer, generator = FullBuffer(CAPACITY, (1,), 1), torch.Generator().manual_seed(0)

        def update() -> None:
            slots, _ = buffer.draw(DRAWN, generator)
            buffer.set_priority(slots, rng.random(DRAWN))

    measure(update, DRAWN)


if ARGS.algo == "fqf-tree":
    measure_tree()
    sys.exit()

LEARNER = {"num_fractions": 32, "n_steps": 1, "train_frequency": 1}
SETTINGS = {
    "fqf": {"env_id": "Still-v0", "batch_size": 128, "hidden_dim": 128} | LEARNER,
    "fqf-atari": {"env_id": "ALE/StillImages-v0", "batch_size": 32, "hidden_dim": 512} | LEARNER,
    "fqf-loop": {"env_id": "CartPole-v1"},
}
SETTINGS["fqf-buffer"] = SETTINGS["fqf"] | {"prioritized": True}
if ARGS.algo not in SETTINGS:
    raise SystemExit(f"ours_fqf.py has no setting {ARGS.algo!r}")
is_loop = ARGS.algo == "fqf-loop"
games = {
    "Still-v0": {"shape": (4,), "dtype": np.float32, "num_actions": 2},
    "ALE/StillImages-v0": {"shape": (84, 84), "dtype": np.uint8, "num_actions": 4},
}
for env_id, kwargs in games.items():
    gym.register(env_id, StillEnv, max_episode_steps=1000, kwargs=kwargs)


def make_stacked_env(env_id: str, **kwargs) -> gym.Env:
    env = gym.make(env_id, **kwargs)
    return gym.wrappers.FrameStackObservation(env, 4) if env_id.startswith("ALE/") else env


marks = marks_at_entries("losses/quantile")
fqf.make_env = make_stacked_env
if ARGS.algo == "fqf-buffer":
    fqf.Buffer = FullBuffer
starts = 1_000 if is_loop else 200
with tempfile.TemporaryDirectory() as folder:
    args = fqf.Args(
        total_timesteps=starts + (1 + ARGS.windows) * ARGS.updates,
        learning_starts=starts,
        epsilon_steps=10_000 if is_loop else 1,
        epsilon_final=0.05 if is_loop else 0.0,
        log_interval=ARGS.updates,  # the first window warms up
        eval_interval=10**9,
        eval_episodes=1,
        checkpoint_interval=10**9,
        run_dir=f"{folder}/run",
        torch_threads=ARGS.threads,
        compile=ARGS.variant == "compile",
        quiet=True,
        **SETTINGS[ARGS.algo],
    )
    fqf.train(replace(args, **ARGS.flags))
report(marks[-ARGS.windows - 1 :])
