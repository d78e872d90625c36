"""What tianshou's FQF learns in as many steps of CartPole as algos/fqf.py:

    python learn_tianshou_fqf.py fqf__CartPole-v1__none__default --seed 1

The calls of its trainer: 4 steps of its collector, an update. The same as ours: a torso of two
layers of 128 and a head with one more, 16 fractions, 64 cosines, batch size, discount, returns of
10 steps, a copy to the target network every 20 updates, Adam and RMSProp with their step sizes, the
entropy bonus of the fractions, the buffer, epsilon and how it falls, and 1,000 random steps before
the first update. The most valuable action is evaluated.

Not the same: its Huber loss has kappa = 1 (ours: 10), it always makes double-Q targets (ours:
plain), all targets count alike (ours: each as much as its stair is wide), and Adam's epsilon is
1e-8 (ours: 0.01 over the batch size, as the authors have it).
"""

import gymnasium as gym
import numpy as np
import torch
from learning import Task
from tianshou.algorithm.modelfree.fqf import FQF, FQFPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory, RMSpropOptimizerFactory
from tianshou.data import Batch, Collector, ReplayBuffer
from tianshou.utils.net.common import Net
from tianshou.utils.net.discrete import FractionProposalNetwork, FullQuantileFunction
from tianshou.utils.torch_utils import policy_within_training_step

task = Task("tianshou", "tianshou", ("fqf__CartPole-v1__none__default",))
ours = task.args
env = gym.make(task.env_id)
env.action_space.seed(task.seed)
torso = Net(state_shape=env.observation_space.shape, hidden_sizes=[ours["hidden_dim"]] * 2)
model = FullQuantileFunction(
    preprocess_net=torso,
    action_shape=int(env.action_space.n),
    hidden_sizes=(ours["hidden_dim"],),
    num_cosines=ours["num_cosines"],
)
fractions = FractionProposalNetwork(ours["num_fractions"], model.input_dim)
network = FQFPolicy(model=model, fraction_model=fractions, action_space=env.action_space)
settings = {
    "gamma": ours["gamma"],
    "num_fractions": ours["num_fractions"],
    "ent_coef": ours["entropy_coef"],
    "n_step_return_horizon": ours["n_steps"],
    "target_update_freq": ours["target_interval"],
}
algo = FQF(
    policy=network,
    optim=AdamOptimizerFactory(lr=ours["learning_rate"]),
    fraction_optim=RMSpropOptimizerFactory(lr=ours["fraction_learning_rate"]),
    **settings,
)
buffer = ReplayBuffer(ours["buffer_capacity"])
collector = Collector(algo, env, buffer, exploration_noise=True)
collector.reset(gym_reset_kwargs={"seed": task.seed})


@torch.no_grad()
def policy(obs: np.ndarray) -> np.ndarray:
    return network(Batch(obs=obs, info=None)).act  # [E]


kept = ("learning_rate", "fraction_learning_rate", "hidden_dim", "num_cosines", "buffer_capacity")
kept += ("learning_starts", "train_frequency", "epsilon_final", "epsilon_steps")
task.start(policy, **settings, **{name: ours[name] for name in kept})
frequency = ours["train_frequency"]
for step in range(frequency, task.budget + 1, frequency):
    progress = 0 if step <= ours["learning_starts"] else min(step / ours["epsilon_steps"], 1)
    network.set_eps_training(1 + (ours["epsilon_final"] - 1) * progress)
    with policy_within_training_step(network):
        collector.collect(n_step=frequency)
        if step >= ours["learning_starts"]:
            algo.update(buffer, ours["batch_size"])
    if step % task.eval_interval == 0 or step == task.budget:
        task.evaluate(step)
