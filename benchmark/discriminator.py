"""What GAIL's discriminator sees: its reward over the states of Pendulum, early and late in a run.

    python benchmark/discriminator.py

Trains GAIL with a constant learning rate, and stops once on the way. Each panel shows the reward
softplus(f(s, a)) for the action that the policy takes in s, over angle and angular velocity; on top
of it, states of the expert and of the policy, the end of each episode left out.

Shapes: G x G grid of states, N states of episodes, O observation, A action.
"""

import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import common
from algos import gail

ENV_ID, GRID = "Pendulum-v1", 121
SHOWN_STEPS = 100  # of an episode: after that, good policies stand still


@dataclass
class Options:
    early: int = 8_192  # environment steps of the panel on the left
    late: int = 102_400  # and of the one on the right
    seed: int = 11
    results: Path = ROOT / "benchmark" / "results"  # where the figure goes


def train(options: Options, folder: Path) -> list[Path]:
    """-> the checkpoints of the early and of the late panel"""
    run_dir, early = folder / "run", folder / "early.pt"
    args = gail.Args(env_id=ENV_ID, seed=options.seed, lr_schedule="constant", quiet=True)
    args.total_timesteps, args.eval_interval, args.run_dir = options.early, 10**9, str(run_dir)
    gail.train(args)
    shutil.copy(run_dir / "checkpoint.pt", early)
    args.total_timesteps, args.resume, args.run_dir = options.late, str(run_dir), None
    gail.train(args)
    return [early, run_dir / "checkpoint.pt"]


def angle_and_velocity(obs: np.ndarray) -> np.ndarray:
    """(cos, sin, velocity) -> angle, 0 upright, and velocity. [.., 3] -> [.., 2]"""
    return np.stack([np.arctan2(obs[..., 1], obs[..., 0]), obs[..., 2]], axis=-1)


def reward_map(checkpoint: dict, policy: common.Policy) -> np.ndarray:
    """softplus(f(s, a)) for a of the policy. -> [G, G], rows of one velocity"""
    angle, velocity = np.meshgrid(np.linspace(-np.pi, np.pi, GRID), np.linspace(-8, 8, GRID))
    obs = np.stack([np.cos(angle), np.sin(angle), velocity], axis=-1).astype(np.float32)
    obs = obs.reshape(-1, 3)  # [G G, 3]
    space = common.make_env(ENV_ID).action_space
    action = torch.tensor(common.normalize_action(policy(obs), space))  # [G G, 1]
    discriminator = gail.Discriminator(3 + 1 + 1, checkpoint["args"]["hidden_dim"])
    discriminator.load_state_dict(checkpoint["discriminator"])
    normalizer = gail.Normalizer(torch.zeros(1, 3))
    normalizer.load_state_dict(checkpoint["normalizer"])
    with torch.no_grad():
        inputs = gail.discriminator_input(
            normalizer(torch.tensor(obs)), action, torch.zeros(len(obs))
        )
        return gail.gail_reward(discriminator(inputs), "softplus").reshape(GRID, GRID).numpy()


def episode_states(policy: common.Policy) -> np.ndarray:
    """Of ten episodes. -> angle and velocity [N, 2]"""
    rows = [[] for _ in range(10)]
    common.evaluate(policy, ENV_ID, len(rows), seed=0, rows=rows)
    obs = np.stack([step[0] for episode in rows for step in episode[:SHOWN_STEPS]])
    return angle_and_velocity(obs)


def draw(panels: list[tuple[str, np.ndarray, np.ndarray]], expert: np.ndarray, path: Path) -> None:
    """Panels: title, reward map and states of the policy."""
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(11, 5), dpi=100, layout="constrained")
    all_axes = figure.subplots(1, len(panels), sharex=True, sharey=True)
    for axes, (title, reward, states) in zip(all_axes, panels):
        extent = (-np.pi, np.pi, -8, 8)
        image = axes.imshow(reward, origin="lower", extent=extent, aspect="auto", cmap="viridis")
        figure.colorbar(image, ax=axes, label="reward softplus(f)")
        axes.plot(*states.T, ".", markersize=2.5, color="white", label="policy")
        axes.plot(*expert.T, ".", markersize=2.5, color="tab:red", label="expert")
        axes.set_title(title, loc="left")
        axes.set_xlabel("angle, 0 is upright")
    all_axes[0].set_ylabel("angular velocity")
    all_axes[0].legend(loc="upper left", markerscale=4, facecolor="0.6")
    figure.savefig(path, metadata={"Software": None})


def main(options: Options) -> None:
    data = common.load_dataset(
        str(common.SHIPPED / f"{ENV_ID}-expert.npz"), common.make_env(ENV_ID)
    )
    episodes = data.obs.numpy().reshape(-1, 200, 3)[:10, :SHOWN_STEPS]  # all have 200 steps
    panels = []
    with tempfile.TemporaryDirectory() as folder:
        for path in train(options, Path(folder)):
            checkpoint = torch.load(path, weights_only=True)
            policy = gail.load_policy(str(path))
            title = f"after {checkpoint['step']:,} environment steps"
            panels.append((title, reward_map(checkpoint, policy), episode_states(policy)))
    expert = angle_and_velocity(episodes.reshape(-1, 3))
    draw(panels, expert, options.results / "discriminator.png")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
