"""axiomrl's AWR: the two calls that its trainer makes per step, without callbacks and evaluation.

Its actor has a third 256 x 256 layer that cannot be switched off, about a quarter of its update.
It steps the value network before it computes the advantages, so that this one runs forward twice,
and normalises the advantages over the batch. The returns are computed once at the start, not timed.
"""

import math

import numpy as np
import torch
from axiomrl.algorithms import AWRAlgorithm
from axiomrl.data.offline_dataset import TransitionDataset
from axiomrl.models.mlp_iql import MLPIQLModel
from timing import measure

torch.manual_seed(0)
rng = np.random.default_rng(0)
dataset = TransitionDataset(
    obs=rng.standard_normal((100_000, 3), dtype=np.float32),
    actions=rng.uniform(-1, 1, (100_000, 1)).astype(np.float32),
    rewards=-rng.random(100_000, dtype=np.float32),
    next_obs=rng.standard_normal((100_000, 3), dtype=np.float32),
    dones=np.arange(100_000) % 200 == 199,  # it knows no truncations: a done ends the return
).with_discounted_returns_to_go(gamma=0.99)
algo = AWRAlgorithm(
    model=MLPIQLModel(obs_dim=3, action_dim=1, hidden_sizes=(256, 256)),
    learning_rate=3e-4,
    beta=1.0,
    max_weight=20.0,
    normalize_advantages=True,
)


def update() -> None:
    result = algo.update(dataset.sample(256, device="cpu"), global_step=0)
    assert all(math.isfinite(value) for value in result.metrics.values())


measure(update)
