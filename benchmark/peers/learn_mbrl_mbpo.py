"""What mbrl's MBPO learns in as many steps as a row of algos/mbpo.py:

    python learn_mbrl_mbpo.py mbpo__Pendulum-v1__none__default --seed 1

Its own train(), whose evaluate() is replaced by ours. An epoch of it is what lies between two of
our evaluations, which is one episode here.

The same as ours: the steps, of which the first are random; two critics and an actor with two hidden
layers of 128, their batch size, discount, soft targets, step sizes and number of updates, a learned
temperature that starts at 1 and has our target entropy; an ensemble of 7 with 5 elites and hidden
layers of 100 (four of them), its batch size and step size, a fit every 100 steps, after it 10,000
rollouts of one step, which are kept as long, and 5 % real data. The mean action is evaluated.

Not the same, and as mbrl has it: the steps are counted from the end of the random ones, so that
the first fit comes 100 steps later; it explores with the mean action; a batch of SAC is real or
imagined as a whole; the actor's loss takes the smaller one of the critics (ours: their mean), log
std is clipped (ours: squashed); inputs of the model are standardised, targets are not, the bounds
of its log-variances are constants, weight decay is 1e-5, a fit stops after five epochs without
progress.
"""

import math
import tempfile

import gymnasium as gym
import numpy as np
from learning import Task
from mbrl.algorithms import mbpo
from mbrl.env.termination_fns import no_termination
from omegaconf import OmegaConf

task = Task("mbrl", "mbrl", {"mbpo__Pendulum-v1__none__default": "mbrl"})
ours = task.args
env = gym.make(task.env_id)  # its episodes never terminate
env.reset(seed=task.seed)
env.action_space.seed(task.seed)
(limit,) = env.action_space.high
settings = {
    "num_steps": task.budget - ours["learning_starts"],
    "epoch_length": task.eval_interval,
    "num_elites": ours["num_elites"],
    "patience": 5,
    "model_lr": ours["model_learning_rate"],
    "model_wd": 1e-5,
    "model_batch_size": ours["model_batch_size"],
    "validation_ratio": 0.2,
    "freq_train_model": ours["model_train_interval"],
    "effective_model_rollouts_per_step": ours["rollout_batch_size"] // ours["model_train_interval"],
    "rollout_schedule": [1, 15, ours["min_rollout_length"], ours["max_rollout_length"]],
    "num_sac_updates_per_step": ours["updates_per_step"],
    "sac_updates_every_steps": 1,
    "num_epochs_to_retain_sac_buffer": ours["retain_steps"] // task.eval_interval,
    "sac_batch_size": ours["batch_size"],
}
sac = {
    "gamma": ours["gamma"],
    "tau": ours["tau"],
    "alpha": 1.0,
    "policy": "Gaussian",
    "target_update_interval": 1,
    "automatic_entropy_tuning": True,
    # ours is the entropy of actions in [-1, 1], mbrl's that of actions in [-limit, limit]
    "target_entropy": -0.5 + math.log(limit),
    "hidden_size": ours["hidden_dim"],
    "device": "cpu",
    "lr": ours["learning_rate"],
}
model = {
    "_target_": "mbrl.models.GaussianMLP",
    "_recursive_": False,  # newer versions of Hydra would make the activation, too
    "device": "cpu",
    "num_layers": 4,
    "in_size": None,
    "out_size": None,
    "ensemble_size": ours["num_members"],
    "hid_size": ours["model_hidden_dim"],
    "propagation_method": "random_model",
    "activation_fn_cfg": {"_target_": "torch.nn.SiLU"},
}
algorithm = {
    "normalize": True,
    "normalize_double_precision": True,
    "target_is_delta": True,
    "learned_rewards": True,
    "freq_train_model": ours["model_train_interval"],
    "real_data_ratio": ours["real_ratio"],
    "sac_samples_action": True,
    "initial_exploration_steps": ours["learning_starts"],
    "random_initial_explore": True,
    "num_eval_episodes": 1,
    "dataset_size": task.budget,
    "agent": {
        "_target_": "mbrl.third_party.pytorch_sac_pranz24.SAC",
        "num_inputs": env.observation_space.shape[0],
        "action_space": {
            "_target_": "gymnasium.spaces.Box",
            "low": -float(limit),
            "high": float(limit),
            "shape": [1],
        },
        "args": sac,
    },
}
config = {"seed": task.seed, "device": "cpu", "log_frequency_agent": 1000}
config |= {"algorithm": algorithm, "dynamics_model": model, "overrides": settings}


class Agent(mbpo.SACAgent):
    """train() makes it first of all, and keeps it to itself."""

    def __init__(self, agent):
        super().__init__(agent)
        task.start(lambda obs: self.act(obs, batched=True), **settings, sac=sac, model=model)


epochs = 0


def evaluate(*_) -> float:
    global epochs
    epochs += 1
    task.evaluate(ours["learning_starts"] + epochs * task.eval_interval)
    return -np.inf  # it would save what is best so far


mbpo.SACAgent, mbpo.evaluate = Agent, evaluate
with tempfile.TemporaryDirectory() as folder:
    mbpo.train(env, env, no_termination, OmegaConf.create(config), silent=True, work_dir=folder)
