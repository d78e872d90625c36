"""python imitation_gail.py gail-loop: GAIL.train() of imitation on CartPole, with its rollouts,
both learners and its logs (its default formats, log and csv, but not the screen). It neither
evaluates nor saves. A step of one environment is what counts.

8 environments (its make_vec_env: one after the other, each with a Monitor) x 128 steps, then PPO of
Stable-Baselines3, 8 epochs of mini-batches of 256, then 16 updates of the discriminator with 256
rows of the expert and 256 of the policy. All networks are 64 x 64 with tanh (the discriminator's
default is ReLU). The expert's 10 episodes and the learning rates are the same as ours.

It does less: no gradient penalty, no entropy of D. Its policy and V see raw observations; only the
discriminator's input is normalised, by its RunningNorm, as in its examples. It needs Gymnasium
0.29, whose CartPole takes a quarter less time per step.
It does more: V and the discriminator see 8 rows at every step of the rollout, ours all 1,024 after
it. Every update of either learner computes statistics, which ours does once per rollout, and Adam
is not fused. For the discriminator, every step of an environment is kept once more, as a dict; and
it asks the policy for the log-probabilities of a batch, which only AIRL reads.
"""

import tempfile
from pathlib import Path

import numpy as np
from imitation.algorithms.adversarial.gail import GAIL
from imitation.data.types import Trajectory
from imitation.rewards.reward_nets import BasicRewardNet
from imitation.util.logger import configure
from imitation.util.networks import RunningNorm
from imitation.util.util import make_vec_env
from stable_baselines3 import PPO
from timing import ARGS, clock, report
from torch import nn

NUM_ENVS, NUM_STEPS = 8, 128
if ARGS.algo != "gail-loop":
    raise SystemExit(f"imitation_gail.py has no setting {ARGS.algo!r}")
assert ARGS.updates % (NUM_ENVS * NUM_STEPS) == 0  # windows are whole rollouts

data = Path(__file__).resolve().parents[1] / "data" / "CartPole-v1-expert.npz"
with np.load(data) as file:
    ours = dict(file)
expert, start = [], 0
for end in np.flatnonzero(ours["terminations"] | ours["truncations"]) + 1:
    last_obs = ours["next_observations"][end - 1 : end]
    obs = np.concatenate([ours["observations"][start:end], last_obs])
    expert.append(Trajectory(obs, ours["actions"][start:end], infos=None, terminal=True))
    start = end

envs = make_vec_env("CartPole-v1", rng=np.random.default_rng(1), n_envs=NUM_ENVS)
ppo = PPO(
    "MlpPolicy",
    envs,
    learning_rate=1e-3,
    n_steps=NUM_STEPS,
    batch_size=256,
    n_epochs=8,
    gamma=0.99,
    gae_lambda=0.95,
    clip_range=0.2,
    ent_coef=0.01,
    vf_coef=0.5,
    max_grad_norm=0.5,
    policy_kwargs={"net_arch": [64, 64], "activation_fn": nn.Tanh},  # separate for policy and V
    seed=1,
    device="cpu",
)
discriminator = BasicRewardNet(
    envs.observation_space,
    envs.action_space,
    hid_sizes=(64, 64),
    activation=nn.Tanh,
    normalize_input_layer=RunningNorm,
)
marks = []


def mark(round_number: int) -> None:
    if (round_number + 1) * NUM_ENVS * NUM_STEPS % ARGS.updates == 0:
        marks.append(clock())


with tempfile.TemporaryDirectory() as folder:
    trainer = GAIL(
        demonstrations=expert,
        demo_batch_size=256,
        n_disc_updates_per_round=16,
        venv=envs,
        gen_algo=ppo,
        reward_net=discriminator,
        disc_opt_kwargs={"lr": 1e-3},
        log_dir=folder,
        custom_logger=configure(folder, ["log", "csv"]),
        allow_variable_horizon=True,
    )
    trainer.train((1 + ARGS.windows) * ARGS.updates, callback=mark)  # the first window warms up
report(marks)
