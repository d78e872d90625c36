"""python ours_sac.py SETTING [--variant compile]: algos/rlpd.py as a user runs it, the loop of
train() itself, with its sampling, its logging, and its steps of an environment that does nothing.

17 observations and 6 actions, batch 256, 2 x 256. "rlpd": half of each batch from 100,000 rows of
prior data, 10 critics with layer norm, 20 updates per step. "sac": no data, 2 critics, one update
per step. A critic update is what counts.
"""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
from timing import ARGS, marks_at_entries, report

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from algos import rlpd


class StillEnv(gym.Env):
    observation_space = gym.spaces.Box(-np.inf, np.inf, (17,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (6,), np.float32)

    def reset(self, seed=None, options=None):
        return np.zeros(17, np.float32), {}

    def step(self, action):
        return np.zeros(17, np.float32), 0.0, False, False, {}


marks = marks_at_entries("losses/actor")
gym.register("Still-v0", StillEnv, max_episode_steps=1000)
UPDATES_PER_STEP = {"rlpd": 20, "sac": 1}[ARGS.algo]
UPDATES_PER_STEP = ARGS.flags.get("gradient_updates_per_step", UPDATES_PER_STEP)
assert ARGS.updates % UPDATES_PER_STEP == 0  # windows are whole steps
OWN_FLAGS = {
    "rlpd": {"dataset": "random:100000", "num_critics": 10},
    "sac": {"dataset": "none", "num_critics": 2, "critic_layer_norm": False},
}
with tempfile.TemporaryDirectory() as folder:
    args = rlpd.Args(
        env_id="Still-v0",
        total_timesteps=(1 + ARGS.windows) * ARGS.updates // UPDATES_PER_STEP,
        log_interval=ARGS.updates // UPDATES_PER_STEP,  # the first window warms up
        eval_interval=10**9,
        eval_episodes=1,
        learning_starts=0,
        gradient_updates_per_step=UPDATES_PER_STEP,
        hidden_dim=256,
        run_dir=f"{folder}/run",
        torch_threads=ARGS.threads,
        compile=ARGS.variant == "compile",
        quiet=True,
        **OWN_FLAGS[ARGS.algo],
    )
    rlpd.train(replace(args, **ARGS.flags))
report(marks)
