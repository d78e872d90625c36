"""Pictures of what the world model of algos/dreamer.py imagines: a strip of frames, and a GIF.

Shapes: M frames of an episode, [W, W, P] each.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common

NUM_FRAMES, NUM_OBSERVED = 24, 3  # of a picture; of those, how many the model sees


def play(policy: Callable, env: gym.Env, seed: int) -> tuple[np.ndarray, list]:
    """The first frames of an episode, and what the policy remembered at each.
    -> [M, W, W, P], M times memory"""
    policy.reset()
    obs, done, frames, memories = env.reset(seed=seed)[0], False, [], []
    while len(frames) < NUM_FRAMES:
        action = policy(obs[None])  # [1]
        frames.append(obs)
        memories.append(policy.memory)
        if done:
            break
        obs, _, terminated, truncated, _ = env.step(action[0])
        done = terminated or truncated
    env.close()
    return np.stack(frames), memories


def film(dream: Callable, policy: Callable, env: gym.Env, seed: int) -> np.ndarray:
    """The frames of an episode; what the model decodes while it observes them; and what it imagines
    after the first few. -> [3, M, W, W, P]"""
    frames, memories = play(policy, env, seed)
    return np.concatenate([frames[None], dream(policy.model, memories, NUM_OBSERVED)])


def draw(film: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """-> a strip, one row for each of the three and time from left to right, and the frames of a
    GIF, the three side by side. White lines lie between them."""
    film = np.pad(film, ((0, 0), (0, 0), (1, 1), (1, 1), (0, 0)), constant_values=255)
    if film.shape[-1] != 3:  # one channel is grey; of MinAtar's many, the brightest is shown
        film = film.max(axis=-1, keepdims=True).repeat(3, axis=-1)
    film = film.repeat(2, axis=2).repeat(2, axis=3)  # small images are hard to see
    strip = np.concatenate([np.concatenate(row, axis=1) for row in film])
    return strip, [np.concatenate(moment, axis=1) for moment in film.swapaxes(0, 1)]


def save_image(path: str, *frames: np.ndarray) -> None:
    """One frame as PNG, several as a GIF."""
    from PIL import Image  # TensorBoard brings it

    first, *others = (Image.fromarray(frame) for frame in frames)
    gif = {"format": "GIF", "save_all": True, "append_images": others, "duration": 250, "loop": 0}
    common.save_atomically(path, partial(first.save, **gif if others else {"format": "PNG"}))
