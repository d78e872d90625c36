"""What SAC of Stable-Baselines-Jax learns in as many steps as a row of algos/rlpd.py that is SAC:

    python learn_sbx_sac.py rlpd__Pendulum-v1__shipped__sac-data-in-buffer --seed 1

It is no peer of RLPD or MBPO, but of the SAC that both are built on: it says how much of their lead
is theirs. Where the row begins with our prior data in its buffer, so does this one, by the add() of
its buffer.

The same as ours: two critics and an actor with two hidden layers of 128, batch size, discount, soft
targets, step sizes, a learned temperature that starts at 1 and has our target entropy, random
actions before the first update, and as many updates of the critics per step, one of them with one
of the actor and the temperature. The most probable action is evaluated.

Not the same: a target always has the entropy (ours: not in the mazes), the actor's loss takes the
smaller one of the critics (ours: their mean), the temperature's is linear in log(alpha) (ours: in
alpha), log std is clipped (ours: squashed), and the initial weights are Flax's.
"""

import os

import gymnasium as gym
import numpy as np
from learning import Task, common

# XLA's pool has a thread per core that the process may use: one, as for all others here
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-1:])
from sbx import SAC  # imports jax
from stable_baselines3.common.callbacks import BaseCallback

ROWS = dict.fromkeys(
    (
        "rlpd__Pendulum-v1__shipped__sac-data-in-buffer",
        "rlpd__MazeLarge-v0__maze-large__sac-data-in-buffer",
    ),
    "sbx-sac-data-in-buffer",
)
task = Task("sbx", "sbx-rl", ROWS)
ours = task.args
shift = ours["reward_shift"]
env = gym.wrappers.TransformReward(common.make_env(task.env_id), lambda reward: reward + shift)
settings = {
    "learning_rate": ours["learning_rate"],
    "qf_learning_rate": ours["learning_rate"],
    "learning_starts": ours["learning_starts"],
    "batch_size": ours["batch_size"],
    "gamma": ours["gamma"],
    "tau": ours["tau"],
    "train_freq": ours["train_frequency"],
    "gradient_steps": ours["gradient_updates_per_step"],
    "policy_delay": ours["gradient_updates_per_step"],
    "target_entropy": -env.action_space.shape[0] / 2,
}
network = {"net_arch": [ours["hidden_dim"]] * 2, "n_critics": ours["num_critics"]}
model = SAC("MlpPolicy", env, **settings, policy_kwargs=network, seed=task.seed)
if ours["data_in_buffer"]:
    data = task.load_dataset()
    columns = (data.obs, data.next_obs, data.action, data.reward, data.terminated)
    for row in zip(*(column.numpy() for column in columns)):
        model.replay_buffer.add(*(np.array([value]) for value in row), infos=[{}])


def policy(obs: np.ndarray) -> np.ndarray:
    return model.predict(obs, deterministic=True)[0]


class Evaluation(BaseCallback):
    """Called after each step and before its updates: an evaluation is due once the next step is."""

    def _on_step(self) -> bool:
        done = self.num_timesteps - 1
        if done > 0 and done % task.eval_interval == 0:
            task.evaluate(done)
        return True


task.start(policy, **settings, **network, data_in_buffer=ours["data_in_buffer"])
model.learn(task.budget, Evaluation())
task.evaluate(task.budget)
