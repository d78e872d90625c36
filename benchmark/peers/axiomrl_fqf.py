"""python axiomrl_fqf.py SETTING: an update of axiomrl's FQF, by the calls that its trainer makes,
without callbacks or evaluation. 32 fractions, 64 cosines, both optimisers Adam (not fused).

"fqf": 4 observations, 2 actions, torso 4-128-128, batch 128, 50,000 rows. "fqf-atari": 4 x 84 x 84
bytes, 4 actions, its Nature network, batch 32, 2,000 rows, which hold whole observations twice.

Its head is one linear layer, and its Nature network ends in another. Neither can be configured, but
two lines here put our head (128-128-2, 3136-512-4) in place of the first and nothing in place of
the second, so that the networks are the same as ours.

It does much more. Double Q cannot be switched off. Every pass of the network runs the torso three
times and computes the quantiles at the mid-points and at the 31 inner fractions. There are three
such passes (one for each loss, the second after the step of the fractions, and one for the next
state) and one of the target network: together 221 fractions per transition, of which 95 are needed,
and 10 passes of the torso instead of 2. Neither the features before the proposal nor the fractions
after it are detached, so that both losses go back through the proposal into the torso: 3 backward
passes of it instead of 1, and one through the cosines.
"""

import itertools
import math

import torch
from axiomrl.algorithms.fqf import FQF
from axiomrl.data.replay_buffer import ReplayBuffer
from axiomrl.models.cnn import CNNFQFNetwork
from axiomrl.models.mlp_fqf_network import MLPFQFNetwork
from timing import ARGS, measure
from torch import nn

torch.manual_seed(0)
if ARGS.algo == "fqf":
    rows, batch_size, num_actions, hidden_dim = 50_000, 128, 2, 128
    obs = torch.randn(rows + 1, 4)
    network = MLPFQFNetwork(obs_dim=4, action_dim=num_actions, hidden_sizes=(128, 128))
elif ARGS.algo == "fqf-atari":
    rows, batch_size, num_actions, hidden_dim = 2_000, 32, 4, 512
    obs = torch.randint(256, (rows + 1, 4, 84, 84), dtype=torch.uint8)
    network = CNNFQFNetwork(
        obs_shape=(4, 84, 84), action_dim=num_actions, hidden_sizes=(), features_dim=3136
    )
    network.feature_extractor.projection = nn.Identity()
else:
    raise SystemExit(f"axiomrl_fqf.py has no setting {ARGS.algo!r}")
network.head = nn.Sequential(
    nn.Linear(network.feature_dim, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, num_actions)
)
algo = FQF(
    q_network=network,
    learning_rate=1e-3,
    fraction_learning_rate=1e-4,
    gamma=0.99,
    target_update_interval=250,
    num_quantiles=32,
)
buffer = ReplayBuffer(capacity=rows, obs_shape=obs.shape[1:], action_shape=(), obs_dtype=obs.dtype)
state = {"position": 0, "size": rows, "obs": obs[:-1], "next_obs": obs[1:]}
state |= {"actions": torch.randint(num_actions, (rows,)), "rewards": -torch.rand(rows)}
buffer.load_state_dict(state | {"dones": torch.zeros(rows)})
steps = itertools.count(1)  # the target network is copied by their number


def update() -> None:
    metrics = algo.update(buffer.sample(batch_size), global_step=next(steps)).metrics
    assert all(math.isfinite(value) for value in metrics.values())


measure(update)
