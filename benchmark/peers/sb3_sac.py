"""python sb3_sac.py SETTING: Stable-Baselines3's SAC, its train() as learn() calls it, with the
sampling from its replay buffer and its logger's records; no environment, no output of the logs.

"sac" has 2 critics and makes one update of everything per call. "rlpd" is as near as it gets: 10
critics and 20 critic updates per call, but no LayerNorm, which spares it work, and an update of the
actor and the temperature with each of the 20, which RLPD makes once. A critic update is what
counts. Target and actor's loss take the minimum of all critics (RLPD: of 2, and the mean).
"""

import math

import gymnasium as gym
import numpy as np
from stable_baselines3 import SAC
from stable_baselines3.common.logger import Logger
from timing import ARGS, measure

NUM_CRITICS, UPDATES_PER_CALL = {"sac": (2, 1), "rlpd": (10, 20)}[ARGS.algo]


class Spaces(gym.Env):
    observation_space = gym.spaces.Box(-np.inf, np.inf, (17,))
    action_space = gym.spaces.Box(-1, 1, (6,))


model = SAC(
    "MlpPolicy",
    Spaces(),
    buffer_size=100_000,
    batch_size=256,
    gradient_steps=UPDATES_PER_CALL,
    policy_kwargs={"net_arch": [256, 256], "n_critics": NUM_CRITICS},
    seed=0,
    device="cpu",
)
model.set_logger(Logger(folder=None, output_formats=[]))

rng, buffer = np.random.default_rng(0), model.replay_buffer
obs = rng.standard_normal((100_001, 17), dtype=np.float32)
buffer.observations[:, 0], buffer.next_observations[:, 0] = obs[:-1], obs[1:]
buffer.actions[:, 0] = rng.uniform(-1, 1, (100_000, 6))
buffer.rewards[:, 0] = -rng.random(100_000)
buffer.full = True  # none is terminal


def update() -> None:
    model.train(gradient_steps=UPDATES_PER_CALL, batch_size=256)
    values = model.logger.name_to_value
    assert math.isfinite(values["train/critic_loss"] + values["train/actor_loss"])


measure(update, UPDATES_PER_CALL)
