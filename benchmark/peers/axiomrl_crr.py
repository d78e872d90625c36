"""axiomrl's CRR: the two calls that its trainer makes per step, without callbacks and evaluation.

Its actor has a third 256 x 256 layer that cannot be switched off, about 15 % of its update.
"""

import math

import numpy as np
import torch
from axiomrl.algorithms import CRRAlgorithm
from axiomrl.data.offline_dataset import TransitionDataset
from axiomrl.models.mlp_sac import MLPSACModel
from timing import measure

torch.manual_seed(0)
rng = np.random.default_rng(0)
dataset = TransitionDataset(
    obs=rng.standard_normal((100_000, 3), dtype=np.float32),
    actions=rng.uniform(-1, 1, (100_000, 1)).astype(np.float32),
    rewards=-rng.random(100_000, dtype=np.float32),
    next_obs=rng.standard_normal((100_000, 3), dtype=np.float32),
    dones=np.zeros(100_000, dtype=np.float32),
)
algo = CRRAlgorithm(
    model=MLPSACModel(obs_dim=3, action_dim=1, hidden_sizes=(256, 256)),
    learning_rate=3e-4,
    gamma=0.99,
    tau=0.005,
    beta=1.0,
    n_action_samples=4,
    max_weight=20.0,
    advantage_type="mean",
    weight_type="exp",
)


def update() -> None:
    result = algo.update(dataset.sample(256, device="cpu"), global_step=0)
    assert all(math.isfinite(value) for value in result.metrics.values())


measure(update)
