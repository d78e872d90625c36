"""The picture of `python algos/fqf.py --evaluate ... --plot`: the distributions of one episode.

Shapes: T steps of the episode, N fractions, A actions.
"""

import math
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common
from algos import fqf


def plot_episode(checkpoint: str, path: str, eval_seed: int, **overrides) -> None:
    """One greedy episode: how the fractions move with the state, how Q and the spread of returns go
    along, and, at four of its moments, the staircase of every action."""
    try:
        from matplotlib.figure import Figure  # slow to import; without pyplot it needs no screen
    except ImportError:
        raise common.InputError("--plot needs a package: pip install matplotlib") from None
    network, proposal, env, device = fqf.load_networks(checkpoint, **overrides)
    obs, _ = env.reset(seed=eval_seed)
    distributions, done = [], False
    while not done:
        with torch.no_grad():
            tensor = fqf.as_tensor(obs[None], device)
            tau, quantiles = fqf.staircase(network, proposal, tensor)
        distributions.append((tau[0].cpu().numpy(), quantiles[0].cpu().numpy()))
        action = fqf.action_values(tau, quantiles).argmax().item() + env.action_space.start
        obs, _, terminated, truncated, _ = env.step(action)
        done = terminated or truncated
    tau, quantiles = (np.stack(column) for column in zip(*distributions))  # [T, N + 1], [T, N, A]
    width = np.diff(tau, axis=1)  # [T, N]
    entropy = -(width * np.log(width.clip(1e-12))).sum(axis=1).mean()
    value = (width[:, :, None] * quantiles).sum(axis=1)  # [T, A]
    num_steps, num_fractions, num_actions = quantiles.shape

    figure = Figure(figsize=(12, 9), dpi=100, layout="constrained")
    panels = figure.subplot_mosaic([["fractions"] * 4, ["values"] * 4, [0, 1, 2, 3]])
    panels["fractions"].plot(tau[:, 1:-1], color="0.3", linewidth=0.7)
    panels["fractions"].set_title(
        f"the {num_fractions - 1} fractions of each state: entropy {entropy:.3f},"
        f" at most log {num_fractions} = {math.log(num_fractions):.3f}",
        loc="left",
    )
    panels["fractions"].set_ylabel("tau")
    panels["fractions"].set_ylim(0, 1)
    colors = [f"C{action}" for action in range(num_actions)]
    for action, color in enumerate(colors):
        low, high = (quantile_at(tau, quantiles[:, :, action], share) for share in (0.1, 0.9))
        panels["values"].fill_between(range(num_steps), low, high, color=color, alpha=0.15, lw=0)
        panels["values"].plot(value[:, action], color=color, label=f"action {action}")
    panels["values"].set_title(
        "Q, and the middle 80 % of the discounted returns, of each action", loc="left"
    )
    panels["values"].set_xlabel("step of the episode")
    panels["values"].set_ylabel("discounted return")
    panels["values"].legend(frameon=False)
    moments = np.linspace(0, num_steps - 1, 4).round().astype(int)
    for panel, moment in enumerate(moments):
        for action, color in enumerate(colors):
            panels[panel].stairs(
                quantiles[moment, :, action], tau[moment], baseline=None, color=color
            )
        panels[panel].plot(
            tau[moment],
            np.zeros(num_fractions + 1),
            "|",
            color="0.3",
            transform=panels[panel].get_xaxis_transform(),
            clip_on=False,
        )
        panels[panel].set_title(f"step {moment}", loc="left")
        panels[panel].set_xlabel("tau")
        for name in ("fractions", "values"):
            panels[name].axvline(moment, color="0.8", zorder=0)
    panels[0].set_ylabel("F(tau), the discounted return")
    for panel in panels.values():
        panel.spines[["top", "right"]].set_visible(False)
        panel.margins(x=0.01)
    common.save_atomically(path, partial(figure.savefig, format="png", metadata={"Software": None}))


def quantile_at(tau: np.ndarray, quantiles: np.ndarray, share: float) -> np.ndarray:
    """How high each staircase is at a fraction, its stairs sorted. [T, N + 1], [T, N] -> [T]"""
    order = np.argsort(quantiles, axis=1)  # a network's stairs may fall here and there
    ends = np.take_along_axis(np.diff(tau, axis=1), order, axis=1).cumsum(axis=1)  # [T, N]
    stair = np.minimum((ends < share).sum(axis=1), quantiles.shape[1] - 1)  # [T]
    return np.take_along_axis(quantiles, order, axis=1)[np.arange(len(stair)), stair]
