"""What d3rlpy's CRR learns from the data of algos/crr.py, in as many updates:

    python learn_d3rlpy_crr.py crr__Pendulum-v1__random-100000__mean-binary --seed 1

The same as ours: rows, batch size, discount, two critics with the smaller one in the target, two
hidden layers of 256, Adam and its step size, soft targets, mean advantage over 4 samples, binary
weights, standardised observations, rewards times 0.1. All of these are settings of its own; its
defaults are one critic, hard copies every 100 updates, exponential weights, a batch of 100, raw
observations and rewards.

Not the same: its policy is a Gaussian around tanh(mean) whose samples are not squashed (ours: tanh
of a Gaussian). Its predict() draws from a critic-weighted policy; here as there tanh(mean) is
evaluated.
"""

import logging

import d3rlpy
import numpy as np
import structlog
import torch
from learning import Task, common

structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
task = Task("d3rlpy", "d3rlpy", ("crr__Pendulum-v1__random-100000__mean-binary",))
ours = task.args
d3rlpy.seed(task.seed)

# It reads the next observation from the row below, which an episode that was cut by a time limit
# needs one more of. Its action and its reward are never read.
data, episodes, start = task.load_dataset(), [], 0
assert not data.terminated.any()
for end in np.flatnonzero(data.truncated) + 1:
    rows = [*range(start, end), end - 1]
    obs = torch.cat([data.obs[start:end], data.next_obs[end - 1 : end]])
    reward = data.reward[rows].unsqueeze(1)
    arrays = (array.numpy() for array in (obs, data.action[rows], reward))
    episodes.append(d3rlpy.dataset.Episode(*arrays, terminated=False))
    start = end
dataset = d3rlpy.dataset.create_infinite_replay_buffer(episodes)
assert dataset.transition_count == len(data)

settings = {
    "batch_size": ours["batch_size"],
    "gamma": ours["gamma"],
    "n_critics": 2,
    "advantage_type": ours["advantage_type"],
    "weight_type": ours["weight_type"],
    "n_action_samples": ours["num_action_samples"],
    "actor_learning_rate": ours["learning_rate"],
    "critic_learning_rate": ours["learning_rate"],
    "target_update_type": "soft",
    "tau": ours["tau"],
}
hidden_units = [ours["hidden_dim"]] * 2
encoder = d3rlpy.models.VectorEncoderFactory(hidden_units=hidden_units)
algo = d3rlpy.algos.CRRConfig(
    **settings,
    actor_encoder_factory=encoder,
    critic_encoder_factory=encoder,
    observation_scaler=d3rlpy.preprocessing.StandardObservationScaler(
        mean=data.obs.mean(0).numpy(), std=data.obs.std(0).numpy()
    ),
).create(device="cpu")
algo.build_with_dataset(dataset)


@torch.no_grad()
def policy(obs: np.ndarray) -> np.ndarray:
    scaled = algo.observation_scaler.transform(torch.as_tensor(obs, dtype=torch.float32))
    mean = algo.impl.policy(scaled).squashed_mu  # [E, A]
    return common.unnormalize_action(mean.numpy(), task.action_space)


task.start(policy, reward_scale=ours["reward_scale"], hidden_units=hidden_units, **settings)
for update in range(1, task.budget + 1):
    algo.update(dataset.sample_transition_batch(ours["batch_size"]))
    if update % task.eval_interval == 0 or update == task.budget:
        task.evaluate(update)
