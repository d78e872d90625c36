"""d3rlpy's CRR: the two calls that its fit() makes per step, without its logger and progress bar.

Differs from its defaults: two critics (1), soft targets on every update (a hard copy every 100).
"""

import logging
import math

import d3rlpy
import numpy as np
import structlog
from timing import measure

structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
d3rlpy.seed(0)

# It reads the next observation from the row below: 201 rows hold the 200 steps of an episode that
# was cut by a time limit.
rng, episodes = np.random.default_rng(0), []
for _ in range(500):
    obs = rng.standard_normal((201, 3), dtype=np.float32)
    actions = rng.uniform(-1, 1, (201, 1)).astype(np.float32)
    rewards = -rng.random((201, 1), dtype=np.float32)
    episodes.append(d3rlpy.dataset.Episode(obs, actions, rewards, terminated=False))
dataset = d3rlpy.dataset.create_infinite_replay_buffer(episodes)
assert dataset.transition_count == 100_000

encoder = d3rlpy.models.VectorEncoderFactory(hidden_units=[256, 256])
config = d3rlpy.algos.CRRConfig(
    batch_size=256,
    n_critics=2,
    n_action_samples=4,
    actor_learning_rate=3e-4,
    critic_learning_rate=3e-4,
    actor_encoder_factory=encoder,
    critic_encoder_factory=encoder,
    target_update_type="soft",
)
algo = config.create(device="cpu")
algo.build_with_dataset(dataset)


def update() -> None:
    losses = algo.update(dataset.sample_transition_batch(256))
    assert all(math.isfinite(value) for value in losses.values())


measure(update)
