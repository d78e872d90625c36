"""RLlib's MARWIL: its local learner as training_step() calls it, with one call per window.

Not timed, in its favour: the learner connector, which in Ray Data's actors takes each batch through
the value network to get its returns (about 3 ms of CPU), runs once at the start; an index into the
result replaces Ray Data, so that no cluster starts. A call makes many updates, as with a large
dataset_num_iters_per_learner: with one per call, metrics would make each about a tenth slower.

Its Gaussian is not squashed, its weights have no upper limit, one Adam steps both networks, and the
return of a truncated episode goes on with the value of its last observation.
"""

import math
from collections.abc import Iterator

import gymnasium as gym
import numpy as np
import torch
from ray.rllib.algorithms.marwil import MARWILConfig
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.metrics import NUM_ENV_STEPS_SAMPLED_LIFETIME
from timing import ARGS, clock, report

torch.manual_seed(0)
spaces = gym.spaces.Box(-np.inf, np.inf, (3,)), gym.spaces.Box(-1, 1, (1,))
networks = DefaultModelConfig(
    fcnet_hiddens=[256, 256], fcnet_activation="relu", vf_share_layers=False
)
config = MARWILConfig().training(beta=1.0, lr=3e-4, gamma=0.99, train_batch_size_per_learner=256)
config.environment(observation_space=spaces[0], action_space=spaces[1])
config.rl_module(model_config=networks)
learner = config.build_learner(spaces={DEFAULT_MODULE_ID: spaces})

rng, episodes = np.random.default_rng(0), []
for _ in range(500):
    episode = SingleAgentEpisode(
        observations=list(rng.standard_normal((201, 3), dtype=np.float32)),
        actions=list(rng.uniform(-1, 1, (200, 1)).astype(np.float32)),
        rewards=list(-rng.random(200)),
        truncated=True,
        len_lookback_buffer=0,
    )
    episodes.append(episode)
# All columns that the learner gets: 201 rows per episode, the last of which is masked in the loss.
connector = config.build_learner_connector(*spaces)
columns = connector(rl_module=learner.module, batch={}, episodes=episodes, shared_data={})
columns = {f"{DEFAULT_MODULE_ID}/{key}": c for key, c in columns[DEFAULT_MODULE_ID].items()}
assert columns[f"{DEFAULT_MODULE_ID}/loss_mask"].sum() == 100_000


class Batches:
    """Stands in for ray.data.DataIterator, of which the learner needs no more than this."""

    def iter_torch_batches(self, batch_size: int, device: torch.device) -> Iterator[dict]:
        while True:
            rows = torch.randint(100_500, (batch_size,))
            yield {key: column[rows] for key, column in columns.items()}


marks = []
for _ in range(1 + ARGS.windows):  # the first window warms up
    results = learner.update(
        training_data=TrainingData(data_iterators=[Batches()]),
        minibatch_size=256,
        num_iters=ARGS.updates,
        timesteps={NUM_ENV_STEPS_SAMPLED_LIFETIME: 0},
    )
    assert math.isfinite(results[DEFAULT_MODULE_ID]["total_loss"].peek())
    marks.append(clock())
report(marks)
