"""What do AWR, MARWIL and CRR clone? The weights that each gives to the rows of one dataset.

    python benchmark/weights.py   (a few minutes)

Trains all three on the Pendulum data that we ship, takes the advantages of all rows, and draws two
pictures of the weights, results/weights.png, from results/weights.csv:

left    the effective sample size, (sum w)^2 / (N sum w^2), as beta moves: from 1, every row counts
        the same and it is behaviour cloning, to a few rows that count for all others
right   how much of the weight goes to the rows of each behaviour in the data, at the default beta
"""

import csv
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import common
from algos import awr, crr, marwil
from benchmark.report import PALETTE

ENV_ID = "Pendulum-v1"
BETAS = np.geomspace(0.03, 30, 31)  # AWR's and CRR's; MARWIL's is the inverse
NOISE = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the five behaviours in benchmark/data/make.py, in turn
MAX_WEIGHT = 20.0


@dataclass
class Options:
    updates: int = 4_000  # of each algorithm
    runs: Path = ROOT / "runs" / "weights"  # trained once; delete it to train anew
    results: Path = ROOT / "benchmark" / "results"  # where weights.csv and weights.png go


def load_run(algo, options: Options) -> tuple[dict, common.Dataset]:
    """A trained checkpoint, and the data as its networks see it."""
    run_dir = options.runs / f"{algo.ALGO}-{options.updates}"
    args = algo.Args(env_id=ENV_ID, total_updates=options.updates, run_dir=str(run_dir))
    if not (run_dir / "checkpoint.pt").exists():
        with torch.enable_grad():
            algo.train(args)
    checkpoint = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    env = common.make_env(ENV_ID)
    dataset = common.load_dataset(args.dataset, env, reward_scale=args.reward_scale)
    for obs in (dataset.obs, dataset.next_obs):
        obs.sub_(checkpoint["obs_mean"]).div_(checkpoint["obs_std"])
    return checkpoint, dataset


@torch.no_grad()
def return_advantage(algo, options: Options) -> tuple[torch.Tensor, dict]:
    """R - V(s) of all rows, for AWR and MARWIL. -> [N]"""
    checkpoint, dataset = load_run(algo, options)
    value = algo.Value(3, algo.Args.hidden_dim, mean=torch.zeros(()), std=torch.ones(()))
    value.load_state_dict(checkpoint["value"])
    buffer = algo.Buffer(dataset, torch.device("cpu"))
    buffer.refresh(value, algo.Args.gamma, algo.Args.td_lambda)
    return buffer.returns - value.of_all(buffer.obs), checkpoint


@torch.no_grad()
def critic_advantage(options: Options) -> torch.Tensor:
    """Q(s, a) - mean_j Q(s, a_j) of all rows, for CRR. -> [N]"""
    checkpoint, dataset = load_run(crr, options)
    actor = crr.Actor(3, 1, crr.Args.hidden_dim, discrete=False)
    critic = crr.TwinCritic(3, 1, crr.Args.hidden_dim)
    actor.load_state_dict(checkpoint["actor"])
    critic.load_state_dict(checkpoint["critic"])
    generator = torch.Generator().manual_seed(0)
    candidates, prob = crr.candidate_actions(
        actor(dataset.obs), crr.Args.num_action_samples, generator
    )
    q = critic(dataset.obs, torch.cat([dataset.action[None], candidates])).mean(dim=0)
    return crr.crr_advantage(q[0], q[1:], prob, "mean")


def measure(options: Options) -> list[dict]:
    """-> rows of weights.csv: method, beta, effective sample size, share of each behaviour"""
    awr_advantage, checkpoint = return_advantage(awr, options)
    awr_advantage = awr.standardize(
        awr_advantage, awr_advantage.mean(), awr_advantage.std(correction=0)
    )
    marwil_advantage, checkpoint = return_advantage(marwil, options)
    squared_norm, crr_advantage = checkpoint["squared_norm"], critic_advantage(options)
    methods = {
        "AWR": lambda beta: awr.awr_weight(awr_advantage, beta, MAX_WEIGHT),
        "MARWIL": lambda beta: marwil.marwil_weight(
            marwil_advantage, squared_norm, 1 / beta, MAX_WEIGHT
        ),
        "CRR, exp": lambda beta: crr.crr_weight(crr_advantage, "exp", beta, MAX_WEIGHT),
        "CRR, binary": lambda beta: crr.crr_weight(crr_advantage, "binary", beta, MAX_WEIGHT),
        "AWR, not clipped": lambda beta: awr.awr_weight(awr_advantage.double(), beta, np.inf),
    }
    env = common.make_env(ENV_ID)
    done = common.load_dataset("auto", env).truncated.numpy()
    episode = np.concatenate([[0], done[:-1].cumsum()])  # [N]
    rows = []
    for name, weight_of in methods.items():
        for beta in [*BETAS, 1.0]:
            weight = weight_of(beta)
            row = {"method": name, "beta": f"{beta:.4g}"}
            row["ess"] = f"{crr.effective_sample_size(weight).item():.4f}"
            for i, noise in enumerate(NOISE):
                share = weight[episode % len(NOISE) == i].sum() / weight.sum()
                row[f"noise {noise}"] = f"{share.item():.4f}"
            rows.append(row)
    return rows


def draw(rows: list[dict], path: Path) -> None:
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(11, 4), dpi=100, layout="constrained")
    left, right = canvas.subplots(1, 2)
    names = list(dict.fromkeys(row["method"] for row in rows))
    for name, color in zip(names, (*PALETTE[:4], PALETTE[0])):
        style = {"MARWIL": "--", "AWR, not clipped": ":"}.get(name, "-")  # MARWIL lies on AWR
        mine = [row for row in rows if row["method"] == name]
        curve, default = mine[:-1], mine[-1]
        x, y = ([float(row[key]) for row in curve] for key in ("beta", "ess"))
        left.plot(x, y, style, color=color, linewidth=1.8, label=name)
        if style != ":":
            left.plot(1.0, float(default["ess"]), "o", color=color)
    left.set_xscale("log")
    left.set_ylim(0, 1.05)
    left.set_xlabel("beta (MARWIL: 1 / beta); dots: the default")
    left.set_ylabel("effective sample size (1: all rows)")
    left.set_title("How many rows count", loc="left")
    left.legend(frameon=False, fontsize=8, loc="lower right", bbox_to_anchor=(1, 0.22))

    shown = ["behaviour cloning", "AWR", "MARWIL", "CRR, exp", "CRR, binary"]
    bottom = np.zeros(len(shown))
    for i, noise in enumerate(NOISE):
        default = {row["method"]: row for row in rows if float(row["beta"]) == 1.0}
        share = [float(default[name][f"noise {noise}"]) for name in shown[1:]]
        heights = np.array([1 / len(NOISE), *share])
        shade = str(0.15 + 0.18 * i)
        right.bar(shown, heights, bottom=bottom, color=shade, label=f"noise {noise:.2f}")
        bottom += heights
    right.set_ylabel("share of the weight")
    right.set_title("Which behaviour is cloned (noise: chance of a random action)", loc="left")
    right.tick_params(axis="x", labelrotation=20)
    handles, labels = right.get_legend_handles_labels()
    right.legend(
        handles[::-1], labels[::-1], frameon=False, bbox_to_anchor=(1, 1), loc="upper left"
    )
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    left.grid(color="0.92")
    left.set_axisbelow(True)
    canvas.savefig(path, metadata={"Software": None})


def main(options: Options) -> None:
    rows = measure(options)
    with open(options.results / "weights.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    draw(rows, options.results / "weights.png")
    print(*[row for row in rows if float(row["beta"]) == 1.0], sep="\n")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
