"""Does RLPD's critic overestimate? Its Q against the return that really follows, along training.

    python benchmark/overestimation.py         trains three short runs, in about five minutes

RLPD learns Pendulum with our data: as it is, without layer normalisation in its critics, and with
the data in its replay buffer instead of half of every batch. Each run is stopped every 200
environment steps, measured, and resumed, which changes nothing in it. At each stop we take 32
states of the dataset, and from each

data      the action that the data have there
policy    an action that the policy samples

We ask the critics for Q, the mean over the ensemble. Then we set the real environment to the state,
take the action, follow the policy for 400 steps, and add up what follows: rewards and entropy, as
in the target of SAC, discounted (0.99^400 = 0.02 of what comes later is missing). Where Q is above
that return, the critic overestimates.

The numbers are in results/overestimation.csv, the picture in results/overestimation.png.
"""

import csv
import math
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import common
from algos import rlpd
from benchmark.report import PALETTE

ENV_ID, NUM_STATES, HORIZON = "Pendulum-v1", 32, 400
FIRST, EVERY, LAST = 300, 200, 1_100  # environment steps: of the first stop, between two, in all
VARIANTS = {
    "RLPD": {},
    "without layer norm": {"critic_layer_norm": False},
    "without symmetric sampling": {"offline_batch_ratio": 0.0, "data_in_buffer": True},
}


@dataclass
class Options:
    seed: int = 1
    results: Path = ROOT / "benchmark" / "results"  # where the csv and the png go


@torch.no_grad()
def true_return(
    actor: rlpd.GaussianActor, alpha: float, gamma: float, obs: torch.Tensor, action: torch.Tensor
) -> torch.Tensor:
    """r_0 + sum_t gamma^t (r_t - alpha log pi(a_t|s_t)), from n states, with their first actions
    given. [n, O], [n, A] -> [n]"""
    generator = torch.Generator().manual_seed(0)  # the same noise at every stop
    envs = [gym.make(ENV_ID, max_episode_steps=HORIZON + 1) for _ in obs]
    for env, (cos, sin, speed) in zip(envs, obs.tolist()):
        env.reset()
        env.unwrapped.state = np.array([math.atan2(sin, cos), speed])
    total = torch.zeros(len(obs))
    for t in range(HORIZON):
        log_prob = torch.zeros(len(obs))
        if t > 0:
            action, log_prob = rlpd.sample_action(*actor(obs), generator)  # [n, A], [n]
        unscaled = common.unnormalize_action(action.numpy(), envs[0].action_space)
        steps = [env.step(own_action)[:2] for env, own_action in zip(envs, unscaled)]
        reward = torch.tensor([float(reward) for _, reward in steps])
        total += gamma**t * (reward - alpha * log_prob)
        obs = torch.as_tensor(np.array([next_obs for next_obs, _ in steps]))
    return total


@torch.no_grad()
def measure(path: str, obs: torch.Tensor, data_action: torch.Tensor) -> dict[str, float]:
    """Mean Q and mean true return of a checkpoint, for both kinds of action."""
    checkpoint = common.load_checkpoint(path, rlpd.ALGO, rlpd.Args)
    args = rlpd.Args(**checkpoint["args"])
    hidden_dims = [args.hidden_dim] * args.num_hidden_layers
    sizes = (obs.shape[1], data_action.shape[1], hidden_dims)
    actor = rlpd.GaussianActor(*sizes)
    actor.load_state_dict(checkpoint["actor"])
    critic = rlpd.EnsembleCritic(args.num_critics, *sizes, args.critic_layer_norm)
    critic.load_state_dict(checkpoint["critic"])
    alpha = checkpoint["log_alpha"].exp().item()
    policy_action, _ = rlpd.sample_action(*actor(obs), torch.Generator().manual_seed(1))
    row = {}
    for name, action in (("data", data_action), ("policy", policy_action)):
        row[f"q_{name}"] = critic(obs, action).mean().item()
        row[f"true_{name}"] = true_return(actor, alpha, args.gamma, obs, action).mean().item()
    return row


def run(variant: str, options: Options) -> list[dict]:
    """-> a row for every stop"""
    env, rows = common.make_env(ENV_ID), []
    dataset = common.load_dataset("auto", env, options.seed)
    chosen = np.random.default_rng(options.seed).choice(len(dataset), NUM_STATES, replace=False)
    obs, data_action = dataset.obs[chosen], dataset.action[chosen]  # [32, O], [32, A]
    with tempfile.TemporaryDirectory() as folder:
        flags = {"seed": options.seed, "quiet": True} | VARIANTS[variant]
        flags |= {"run_dir": f"{folder}/run", "eval_episodes": 1, "eval_interval": LAST}
        for step in range(FIRST, LAST + 1, EVERY):  # the first 200 are random
            resume = f"{folder}/run" if rows else None
            rlpd.train(rlpd.Args(**flags, total_timesteps=step, resume=resume))
            numbers = measure(f"{folder}/run/checkpoint.pt", obs, data_action)
            rows.append({"variant": variant, "step": step} | numbers)
            print(rows[-1], flush=True)
    return rows


def draw(rows: list[dict], path: Path) -> None:
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(11, 3.8), dpi=100, layout="constrained")
    panels = canvas.subplots(1, len(VARIANTS), sharey=True)
    for axes, variant in zip(panels, VARIANTS):
        mine = [row for row in rows if row["variant"] == variant]
        steps = [row["step"] for row in mine]
        for color, name in zip(PALETTE, ("data", "policy")):
            q, true = ([row[f"{kind}_{name}"] for row in mine] for kind in ("q", "true"))
            axes.plot(steps, q, "o-", color=color, label=f"Q of the {name}'s actions")
            axes.plot(steps, true, "--", color=color, label="the return that follows")
        axes.set_title(variant, loc="left")
        axes.set_xlabel("environment steps")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="0.92")
        axes.set_axisbelow(True)
    panels[0].set_ylabel("discounted soft return")
    panels[0].legend(frameon=False)
    canvas.savefig(path, metadata={"Software": None})


def main(options: Options) -> int:
    rows = [row for variant in VARIANTS for row in run(variant, options)]
    with open(options.results / "overestimation.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{x:.5g}" if isinstance(x, float) else x for k, x in row.items()})
    draw(rows, options.results / "overestimation.png")
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
