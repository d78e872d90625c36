"""What axiomrl's AWR or MARWIL learns from the data of algos/awr.py or algos/marwil.py, in as many
updates:

    python learn_axiomrl.py awr__Pendulum-v1__shipped__default --seed 1

The two calls of its trainer: a batch of its dataset, an update. The same as ours: rows, batch size,
discount, Adam and its step size, two hidden layers of 256 with ReLU (its actor has a third one that
cannot be switched off), a tanh-Gaussian policy, beta = 1, of AWR weights up to 20 and normalised
advantages. Evaluated is tanh(mean).

Not the same: it knows no truncations, so that a return ends with 0 where the time limit cut an
episode (ours: with V). Observations stay as they are (ours: standardised). AWR's advantages are
normalised over the batch (ours: over the dataset), and V has no head start. The norm of MARWIL
starts at 100 and moves by 1 % per update, its trainer's defaults (ours: it starts at the first
batch and moves by 0.1 %), and its weights have no upper limit (ours: 20).
"""

import numpy as np
import torch
from axiomrl.algorithms import AWRAlgorithm, MARWILAlgorithm
from axiomrl.data.offline_dataset import TransitionDataset
from axiomrl.models.mlp_iql import MLPIQLModel
from learning import Task, common

ROWS = ("awr__Pendulum-v1__shipped__default", "marwil__Pendulum-v1__shipped__default")
task = Task("axiomrl", "axiomrl", ROWS)
ours, data = task.args, task.load_dataset()
dataset = TransitionDataset(
    obs=data.obs,
    actions=data.action,
    rewards=data.reward,
    next_obs=data.next_obs,
    dones=data.terminated | data.truncated,
).with_discounted_returns_to_go(gamma=ours["gamma"])
hidden_sizes = (ours["hidden_dim"],) * 2
model = MLPIQLModel(
    obs_dim=data.obs.shape[1], action_dim=data.action.shape[1], hidden_sizes=hidden_sizes
)
settings = {"learning_rate": ours["learning_rate"], "beta": ours["beta"]}
if task.row.startswith("awr"):
    settings |= {"max_weight": ours["max_weight"], "normalize_advantages": True}
    algo = AWRAlgorithm(model=model, **settings)
else:
    settings |= {
        "vf_coeff": 1.0,
        "moving_average_sqd_adv_norm_start": 100.0,
        "moving_average_sqd_adv_norm_update_rate": 0.01,
    }
    algo = MARWILAlgorithm(model=model, **settings)


@torch.no_grad()
def policy(obs: np.ndarray) -> np.ndarray:
    action = model.sample_actions(obs, deterministic=True).actions  # [E, A]
    return common.unnormalize_action(action.numpy(), task.action_space)


task.start(policy, hidden_sizes=hidden_sizes, **settings)
for update in range(1, task.budget + 1):
    algo.update(dataset.sample(ours["batch_size"], device="cpu"), global_step=update)
    if update % task.eval_interval == 0 or update == task.budget:
        task.evaluate(update)
