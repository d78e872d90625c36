"""What GAIL of imitation learns from the expert of algos/gail.py, in as many environment steps:

    python learn_imitation_gail.py gail__Pendulum-v1__Pendulum-v1-expert__default --seed 1

The same as ours: the expert's rows, 8 environments x 128 steps a rollout, PPO (Stable-Baselines3's)
with 8 epochs of mini-batches of 256, its clip, its entropy bonus, discount and lambda, then 16
updates of the discriminator with 256 rows of each side, the reward -log(1 - D), step sizes of
0.001, all networks 64 x 64 with tanh. The most probable action is evaluated.

Not the same: no gradient penalty and no entropy of D. The step size of PPO stays (ours falls to 0:
its train() calls PPO's learn() once a rollout, which knows no end to fall to). Policy and V see raw
observations, and only D's are normalised, by its RunningNorm, as in its examples (ours: all). The
bounds of an action clip a plain Gaussian, as Stable-Baselines3 does it. A rollout that would pass
the budget is left out, so that it gets up to 1,023 steps less. Gymnasium is 0.29, which it needs.
"""

import tempfile

import numpy as np
from imitation.algorithms.adversarial.gail import GAIL
from imitation.data.types import Trajectory
from imitation.rewards.reward_nets import BasicRewardNet
from imitation.util.logger import configure
from imitation.util.networks import RunningNorm
from imitation.util.util import make_vec_env
from learning import Task, common
from stable_baselines3 import PPO
from torch import nn

task = Task("imitation", "imitation", ("gail__Pendulum-v1__Pendulum-v1-expert__default",))
ours, data, expert, start = task.args, task.load_dataset(), [], 0
done = (data.terminated | data.truncated).numpy()
action = common.unnormalize_action(data.action.numpy(), task.action_space)
for end in np.flatnonzero(done) + 1:
    obs = np.concatenate([data.obs[start:end], data.next_obs[end - 1 : end]])
    terminal = bool(data.terminated[end - 1])
    expert.append(Trajectory(obs, action[start:end], infos=None, terminal=terminal))
    start = end

hidden = [ours["hidden_dim"]] * 2
settings = {
    "learning_rate": ours["learning_rate"],
    "n_steps": ours["num_steps"],
    "batch_size": ours["batch_size"],
    "n_epochs": ours["num_epochs"],
    "gamma": ours["gamma"],
    "gae_lambda": ours["gae_lambda"],
    "clip_range": ours["max_ratio_change"],
    "ent_coef": ours["policy_entropy_coef"],
    "max_grad_norm": ours["max_grad_norm"],
}
rng = np.random.default_rng(task.seed)
envs = make_vec_env(task.env_id, rng=rng, n_envs=ours["num_envs"])
ppo = PPO(
    "MlpPolicy",
    envs,
    **settings,
    policy_kwargs={"net_arch": hidden, "activation_fn": nn.Tanh},  # separate for policy and V
    seed=task.seed,
    device="cpu",
)
discriminator = BasicRewardNet(
    envs.observation_space,
    envs.action_space,
    hid_sizes=hidden,
    activation=nn.Tanh,
    normalize_input_layer=RunningNorm,
)
rollout = ours["num_envs"] * ours["num_steps"]
task.budget = task.budget // rollout * rollout


def policy(obs: np.ndarray) -> np.ndarray:
    return ppo.predict(obs, deterministic=True)[0]


def after_rollout(round_number: int) -> None:
    step = (round_number + 1) * rollout
    is_due = step // task.eval_interval > (step - rollout) // task.eval_interval
    if is_due or step == task.budget:
        task.evaluate(step)


with tempfile.TemporaryDirectory() as folder:
    trainer = GAIL(
        demonstrations=expert,
        demo_batch_size=ours["batch_size"],
        n_disc_updates_per_round=ours["discriminator_updates"],
        venv=envs,
        gen_algo=ppo,
        reward_net=discriminator,
        disc_opt_kwargs={"lr": ours["discriminator_learning_rate"]},
        log_dir=folder,
        custom_logger=configure(folder, ["log", "csv"]),  # not the screen
        allow_variable_horizon=True,
    )
    task.start(policy, num_envs=ours["num_envs"], hidden=hidden, **settings)
    trainer.train(task.budget, callback=after_rollout)
