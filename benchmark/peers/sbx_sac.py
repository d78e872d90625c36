"""python sbx_sac.py SETTING: Stable-Baselines-Jax's SAC, its train() as learn() calls it, with the
sampling from its replay buffer and its logger's records; no environment, no output of the logs.

"sac" has 2 critics and makes one update of everything per call. "rlpd" has 10 with LayerNorm and
makes 20 critic updates in one compiled call, the last with one of the actor and the temperature. A
critic update is what counts. Not as in RLPD: target and actor's loss take the minimum of all 10
critics (RLPD: of 2 at random, and the mean), which adds 8 forward passes, about a quarter of the
other matrix products, to an update; and all of a batch is from one buffer.
"""

import math
import os

import gymnasium as gym
import numpy as np
from timing import ARGS, measure

# XLA does not read OMP_NUM_THREADS: its pool has a thread per core that the process may use.
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: ARGS.threads])
from sbx import SAC  # imports jax
from stable_baselines3.common.logger import Logger

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
    policy_delay=UPDATES_PER_CALL,
    policy_kwargs={
        "net_arch": [256, 256],
        "n_critics": NUM_CRITICS,
        "layer_norm": ARGS.algo == "rlpd",  # of the critics alone
    },
    seed=0,
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
    # It reads the losses, and so waits for the one compiled call that the update is.
    values = model.logger.name_to_value
    assert math.isfinite(values["train/critic_loss"] + values["train/actor_loss"])


measure(update, UPDATES_PER_CALL)
