"""How far can MBPO's model be trusted? Its error along a rollout, and on held-out rows over time.

    python benchmark/run.py --only mbpo__Pendulum-v1__none__default --seeds 1 --results runs/again
    python benchmark/run.py --only mbpo__Hopper-v5__none__default --seeds 1 --results runs/again
    python benchmark/model_error.py

The first two train the models, in about half an hour; with results of their own, since runs whose
results are there would be skipped. The third takes a minute.

For each task, from the run of seed 1, two pictures in results/model_error.png:

left    the trained policy plays new episodes in the real environment. From each of their states
        the model takes the same actions, as in a rollout: sampled, with a new elite for every row
        and step. How far is its state from the real one after k steps? In units of the standard
        deviation of the states of these episodes; "nothing changes" is the error of a model that
        predicts no change at all
right   the error of each member on the rows that a fit held out, over training, and that of the
        elites on the steps since the last fit, which no member had seen

The numbers of the left are in results/model_error.csv, those of the right in the run's metrics.csv.
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
from algos import mbpo
from benchmark.report import PALETTE

TASKS = ("Pendulum-v1", "Hopper-v5")
EPISODES, FIRST_SEED = 20, 20_000  # not those of training or evaluation
LENGTH = 15  # the paper's longest rollout


@dataclass
class Options:
    runs: Path = ROOT / "runs" / "again-runs"  # of run.py
    results: Path = ROOT / "benchmark" / "results"  # where the csv and the png go


def row_name(env_id: str) -> str:
    return f"mbpo__{env_id}__none__default"


def play(env_id: str, actor: mbpo.GaussianActor, generator: torch.Generator) -> list[tuple]:
    """Episodes of the policy with its noise -> [(obs [T + 1, O], action [T, A])]"""
    env, episodes = common.make_env(env_id), []
    for episode in range(EPISODES):
        obs, done = [env.reset(seed=FIRST_SEED + episode)[0]], False
        actions = []
        while not done:
            x = torch.as_tensor(obs[-1], dtype=torch.float32)
            action, _ = mbpo.sample_action(*actor(x), generator)  # [A]
            actions.append(action)
            unscaled = common.unnormalize_action(action.numpy(), env.action_space)
            next_obs, _, terminated, truncated, _ = env.step(unscaled)
            obs.append(next_obs)
            done = terminated or truncated
        obs = torch.as_tensor(np.array(obs), dtype=torch.float32)
        episodes.append((obs, torch.stack(actions)))
    return episodes


def rollout_errors(
    model: mbpo.Dynamics, episodes: list[tuple], generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Distance of the model's states from the real ones, and of no change at all, after 1, 2, ...
    steps from each of n starts. -> [LENGTH, n], [LENGTH, n]"""
    std = torch.cat([obs for obs, _ in episodes]).std(dim=0) + 1e-6  # [O]
    episodes = [(obs, action) for obs, action in episodes if len(action) >= LENGTH]
    starts = [(episode, t) for episode in episodes for t in range(len(episode[1]) - LENGTH + 1)]
    real = torch.stack([obs[t : t + LENGTH + 1] for (obs, _), t in starts], dim=1)
    actions = torch.stack([action[t : t + LENGTH] for (_, action), t in starts], dim=1)
    predicted, errors, no_change = real[0], [], []  # [n, O]
    for k in range(LENGTH):
        _, predicted, _ = model.sample(predicted, actions[k], generator)
        errors.append(((predicted - real[k + 1]) / std).pow(2).mean(dim=1).sqrt())
        no_change.append(((real[0] - real[k + 1]) / std).pow(2).mean(dim=1).sqrt())
    return torch.stack(errors), torch.stack(no_change)


@torch.no_grad()
def measure(env_id: str, options: Options) -> list[dict]:
    """-> rows of model_error.csv"""
    path = options.runs / row_name(env_id) / "1" / "checkpoint.pt"
    checkpoint = common.load_checkpoint(str(path), mbpo.ALGO, mbpo.Args)
    args = mbpo.Args(**checkpoint["args"])
    (obs_dim,), action_dim, _ = common.check_spaces(common.make_env(env_id))
    actor = mbpo.GaussianActor(obs_dim, action_dim, [args.hidden_dim] * 2)
    actor.load_state_dict(checkpoint["actor"])
    sizes = (args.num_members, args.num_elites, obs_dim, action_dim, args.model_hidden_dim)
    model = mbpo.Dynamics(*sizes, learns_end=env_id not in mbpo.TERMINATION)
    model.load_state_dict(checkpoint["model"])
    generator = torch.Generator().manual_seed(0)
    errors, no_change = rollout_errors(model, play(env_id, actor, generator), generator)
    rows = []
    for k in range(LENGTH):
        quartiles = errors[k].quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()
        row = {"env_id": env_id, "length": k + 1, "starts": errors.shape[1]}
        row |= {name: f"{x:.4g}" for name, x in zip(("q25", "median", "q75"), quartiles)}
        rows.append(row | {"no_change": f"{no_change[k].median().item():.4g}"})
    return rows


def fit_errors(env_id: str, options: Options) -> dict[str, tuple[list, list]]:
    """-> {key: (steps, errors)} of the members on held-out rows, and of the elites on new ones"""
    curves: dict[str, tuple[list, list]] = {}
    with open(options.results / row_name(env_id) / "1" / "metrics.csv", newline="") as file:
        for row in csv.DictReader(file):
            if row["key"].startswith(("stats/holdout_mse_", "stats/fresh_mse")):
                steps, errors = curves.setdefault(row["key"], ([], []))
                steps.append(int(row["step"]))
                errors.append(float(row["value"]))
    return curves


def draw(rows: list[dict], curves: dict[str, dict], path: Path) -> None:
    """curves: of each task, what fit_errors gives"""
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(11, 3.6 * len(curves)), dpi=100, layout="constrained")
    grid = canvas.subplots(len(curves), 2, squeeze=False)
    for (left, right), (env_id, fits) in zip(grid, curves.items()):
        mine = [row for row in rows if row["env_id"] == env_id]
        length = [int(row["length"]) for row in mine]
        low, median, high, no_change = (
            [float(row[name]) for row in mine] for name in ("q25", "median", "q75", "no_change")
        )
        left.fill_between(length, low, high, color=PALETTE[0], alpha=0.2, linewidth=0)
        left.plot(length, median, "o-", color=PALETTE[0], label="model, median and quartiles")
        left.plot(length, no_change, "--", color="0.5", label="nothing changes, median")
        left.set_xlabel("steps of the rollout")
        left.set_ylabel("distance in standard deviations")
        left.set_title(f"{env_id}: error along a rollout", loc="left")
        left.set_xticks(range(1, LENGTH + 1, 2))
        left.set_ylim(bottom=0)
        left.legend(frameon=False)

        for key, (steps, errors) in fits.items():
            is_fresh = key == "stats/fresh_mse"
            style = {"color": PALETTE[1], "label": "elites, on new steps before the fit"}
            if not is_fresh:
                label = "each member, on held-out rows" if key.endswith("_0") else None
                style = {"color": PALETTE[0], "alpha": 0.5, "label": label}
            right.plot(steps, errors, linewidth=1.2, zorder=2 + is_fresh, **style)
        right.set_yscale("log")
        right.set_xlabel("environment steps")
        right.set_ylabel("squared error (1: the variance)")
        right.set_title(f"{env_id}: error of the fits", loc="left")
        right.xaxis.set_major_formatter("{x:,.0f}")
        right.legend(frameon=False)
        for axes in (left, right):
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(color="0.92")
            axes.set_axisbelow(True)
    canvas.savefig(path, metadata={"Software": None})


def main(options: Options) -> int:
    try:
        rows = [row for env_id in TASKS for row in measure(env_id, options)]
        curves = {env_id: fit_errors(env_id, options) for env_id in TASKS}
    except (common.InputError, OSError) as error:
        print(f"model_error: {error}: train the models first, see --help", file=sys.stderr)
        return 2
    with open(options.results / "model_error.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    draw(rows, curves, options.results / "model_error.png")
    print(*rows, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
