"""What FQF learns that others do not: draw the fractions and the distributions of trained runs.

    python benchmark/run.py --only CartPole-v1__none --seeds 1 --results runs/again
    python benchmark/fqf_fractions.py

Reads seed 1 of two rows of run.py (from runs/again-runs/): FQF with our learning rate of the
fractions, and with the paper's, at which they do not move. Draws an episode of each, as
`python algos/fqf.py --evaluate ... --plot` does, and, of all published runs that have learned
fractions, how their entropy fell: log N is what fractions 1/N apart have.
"""

import csv
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmark import report, run
from benchmark.distributions import plot_episode

EPISODES = {  # figure -> row of run.py
    "fractions.png": "fqf__CartPole-v1__none__default",
    "fractions_paper_rate.png": "fqf-ablation__CartPole-v1__none__paper-rate",
}
CURVES = {  # label -> row of run.py
    "CartPole": "fqf__CartPole-v1__none__default",
    "CartPole, prioritised replay": "fqf__CartPole-v1__none__prioritized",
    "CartPole, the paper's learning rate": "fqf-ablation__CartPole-v1__none__paper-rate",
    "LunarLander": "fqf__LunarLander-v3__none__default",
}


@dataclass
class Options:
    runs: Path = ROOT / "runs" / "again-runs"  # the checkpoints of run.py
    results: Path = run.Options.results  # its published metrics, and where the figures go


def entropy_curves(results: Path, row: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """Of each seed: steps and entropy of the fractions, as a share of log N."""
    curves = []
    for folder in sorted((results / row).iterdir()):
        with open(folder / "metrics.csv", newline="") as file:
            rows = [
                each for each in csv.DictReader(file) if each["key"] == "stats/fraction_entropy"
            ]
        largest = math.log(json.loads((folder / "args.json").read_text())["num_fractions"])
        steps = np.array([int(each["step"]) for each in rows])
        curves.append((steps, np.array([float(each["value"]) for each in rows]) / largest))
    return curves


def draw_entropy(curves: dict[str, list[tuple[np.ndarray, np.ndarray]]], path: Path) -> None:
    from matplotlib.figure import Figure  # slow to import

    canvas = Figure(figsize=(8, 4), dpi=100, layout="constrained")
    axes = canvas.subplots()
    for color, (label, seeds) in zip(report.PALETTE, curves.items()):
        for i, (steps, entropy) in enumerate(seeds):
            axes.plot(steps, entropy, color=color, linewidth=1, label=None if i else label)
    axes.set_title("how far the fractions are from 1/N apart  (one line per seed)", loc="left")
    axes.set_xlabel("environment steps")
    axes.set_ylabel("entropy of the fractions / log N")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(color="0.92")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    canvas.savefig(path, metadata={"Software": None})


def main(options: Options) -> None:
    for name, row in EPISODES.items():
        checkpoint = options.runs / row / "1" / "checkpoint.pt"
        plot_episode(str(checkpoint), str(options.results / name), eval_seed=0)
    curves = {label: entropy_curves(options.results, row) for label, row in CURVES.items()}
    draw_entropy(curves, options.results / "fraction_entropy.png")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
