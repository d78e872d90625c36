"""python tianshou_fqf.py SETTING: an update of tianshou's FQF, by the call that its trainer makes,
without its logs, or what its prioritised buffer does with its tree. 32 fractions, 64 cosines.

"fqf": 4 observations, 2 actions, torso 4-128-128, head 128-128-2, batch 128, 50,000 rows.
"fqf-atari": 4 x 84 x 84 bytes, 4 actions, its convolutions of the Nature network to 3,136 features,
head 3136-512-4, batch 32, 2,000 rows. As in its example, the buffer holds single frames and stacks
them when it samples; unlike there, its own class divides the pixels by 255. Neither makes a
difference in time that stands out from the noise.
"fqf-tree": one index of 128 in a call, drawn from its tree of a million random priorities, which
then gets a new one; without the weights of importance sampling.

The networks are the same as ours; Adam for the quantiles (not fused) and RMSProp for the fractions,
too. It does more: double Q cannot be switched off, so that the online network sees the next state,
as well, and there, too, at the 31 inner fractions, which nothing reads (its modules stay in
training mode). Together 158 fractions per transition, of which 95 are needed, and 3 passes of the
torso instead of 2. It gathers a batch twice, computes priorities without prioritised replay, and
makes the targets in numpy, in double precision.
"""

import math

import gymnasium as gym
import numpy as np
import torch
from tianshou.algorithm.modelfree.fqf import FQF, FQFPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory, RMSpropOptimizerFactory
from tianshou.data import Batch, ReplayBuffer, SegmentTree
from tianshou.env.atari.atari_network import DQNet, ScaledObsInputActionReprNet
from tianshou.utils.net.common import ActionReprNetWithVectorOutput, Net
from tianshou.utils.net.discrete import FractionProposalNetwork, FullQuantileFunction
from tianshou.utils.torch_utils import policy_within_training_step
from timing import ARGS, measure

NUM_FRACTIONS, CAPACITY, DRAWS = 32, 1_000_000, 128
torch.manual_seed(0)
rng = np.random.default_rng(0)


def fill(buffer: ReplayBuffer, obs: np.ndarray, num_actions: int) -> ReplayBuffer:
    """One step at a time, as its collector does; episodes of 500 steps."""
    for row in range(buffer.maxsize):
        step = {"obs": obs[row], "obs_next": obs[row + 1], "info": {}}
        step |= {"act": rng.integers(num_actions), "rew": -rng.random()}
        buffer.add(Batch(step | {"terminated": False, "truncated": row % 500 == 499}))
    return buffer


def measure_fqf(
    torso: ActionReprNetWithVectorOutput,
    hidden_dim: int,
    num_actions: int,
    batch_size: int,
    buffer: ReplayBuffer,
) -> None:
    model = FullQuantileFunction(
        preprocess_net=torso, action_shape=num_actions, hidden_sizes=(hidden_dim,), num_cosines=64
    )
    policy = FQFPolicy(
        model=model,
        fraction_model=FractionProposalNetwork(NUM_FRACTIONS, model.input_dim),
        action_space=gym.spaces.Discrete(num_actions),
    )
    algo = FQF(
        policy=policy,
        optim=AdamOptimizerFactory(lr=1e-3),
        fraction_optim=RMSpropOptimizerFactory(lr=1e-4),
        gamma=0.99,
        num_fractions=NUM_FRACTIONS,
        target_update_freq=250,
    )

    def update() -> None:
        stats = algo.update(buffer, batch_size)
        assert math.isfinite(stats.loss)  # the sum of both

    with policy_within_training_step(policy):
        measure(update)


if ARGS.algo == "fqf":
    obs = rng.standard_normal((50_001, 4), dtype=np.float32)
    torso = Net(state_shape=4, hidden_sizes=(128, 128))
    measure_fqf(torso, 128, 2, 128, fill(ReplayBuffer(50_000), obs, 2))
elif ARGS.algo == "fqf-atari":
    frames = rng.integers(256, size=(2_004, 84, 84), dtype=np.uint8)
    obs = np.lib.stride_tricks.sliding_window_view(frames, 4, axis=0).transpose(0, 3, 1, 2)
    buffer = ReplayBuffer(2_000, stack_num=4, ignore_obs_next=True, save_only_last_obs=True)
    torso = DQNet(c=4, h=84, w=84, action_shape=4, features_only=True)
    measure_fqf(ScaledObsInputActionReprNet(torso), 512, 4, 32, fill(buffer, obs, 4))
elif ARGS.algo == "fqf-tree":
    tree = SegmentTree(CAPACITY)
    tree[np.arange(CAPACITY)] = rng.random(CAPACITY)
    priorities = rng.random(DRAWS)

    def update() -> None:
        tree[tree.get_prefix_sum_idx(np.random.rand(DRAWS) * tree.reduce())] = priorities
        assert math.isfinite(tree.reduce())

    measure(update, DRAWS)
else:
    raise SystemExit(f"tianshou_fqf.py has no setting {ARGS.algo!r}")
