"""Datasets, evaluation, and what surrounds a run. Nothing here learns, and a reader needs it for
neither the maths of an algorithm nor its loop.

A policy, for everything in this file, is a function of a batch of observations that returns a batch
of actions in the units of the environment: [E, *obs_shape] -> [E, *action_shape].

The npz layout that we read and write has N rows, one per step:

    observations  actions  rewards  next_observations  terminations  truncations

D4RL's names (terminals, timeouts) and layouts without next_observations are converted on reading.

Shapes: N rows of a dataset, E episodes, O observation, A action.
"""

import contextlib
import csv
import ctypes
import json
import math
import os
import re
import shlex
import signal
import sys
import threading
import time
import traceback
import zipfile
import zlib
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args, get_origin

import gymnasium as gym
import numpy as np
import torch
import tyro
from tqdm import tqdm

Policy = Callable[[np.ndarray], np.ndarray]
MakeEnv = Callable[..., gym.Env]  # of an id and keywords; a script may wrap its environments

SHIPPED = Path(__file__).resolve().parent / "benchmark" / "data"  # <env id>.npz, found by `auto`
RANDOM_STEPS = 100_000  # what `random` stands for
LARGE = 1e15  # numbers of a dataset are smaller, so that no sum of squares overflows in float32
MAX_EPISODE_STEPS = 30_000  # then an evaluation cuts it off: Atari's episodes end after 27,000
RECORD_SEEDS = 1_000_000  # from here on, seeds of recorded episodes, which no evaluation has

# Each field: its name in our npz layout first, then what other people's files call it.
NAMES = {
    "obs": ("observations",),
    "action": ("actions",),
    "reward": ("rewards",),
    "next_obs": ("next_observations",),
    "terminated": ("terminations", "terminals"),
    "truncated": ("truncations", "timeouts"),
}


class InputError(Exception):
    """A mistake in what the user gave us. The scripts print it as one line and exit with code 2."""


class Stopped(KeyboardInterrupt):
    """A signal ended the run, which was saved. Python's callers see Ctrl-C as they know it."""


def one_line(message: object) -> str:
    return " ".join(str(message).split())


@contextlib.contextmanager
def told_in_one_line(what: str, with_place: bool = False) -> Iterator[None]:
    """Other people's code and files fail in many ways. The user reads one line."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{what}: {error}") from error
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f" ({place.filename}:{place.lineno})" if with_place else ""
        reason = f"{type(error).__name__}: {one_line(error)[:300]}"
        raise InputError(f"{what}: {reason}{where}") from error


# ---- environments


class Checked(gym.Wrapper):
    """What an environment does wrong is said in one line, with the place. Observations get the type
    that their space names, rewards become floats, and ends bools."""

    def reset(self, **kwargs):
        self.num_steps, self.space = 0, self.observation_space  # slow to look up
        with self.told("reset"):
            obs, info = self.env.reset(**kwargs)
            return self.checked(obs), info

    def step(self, action):
        self.num_steps += 1
        try:
            obs, reward, terminated, truncated, info = self.env.step(action)
            reward = float(np.asarray(reward).item())
            if not math.isfinite(reward):
                raise ValueError(f"the reward is {reward}")
            return self.checked(obs), reward, bool(terminated), bool(truncated), dict(info)
        except Exception:  # `with` around it all would slow down every step
            with self.told(f"step {self.num_steps} of an episode"):
                raise

    def checked(self, obs: Any) -> Any:
        space = self.space
        if not isinstance(space, gym.spaces.Box):  # Dreamer looks at what is rendered
            return obs
        obs = np.array(obs)  # a copy: some environments write into one buffer
        if obs.dtype != space.dtype:
            with np.errstate(over="ignore"):  # what is too large for its type becomes infinite
                obs = obs.astype(space.dtype, casting="same_kind")  # floats are not cut to integers
        if obs.shape != space.shape or not np.isfinite(obs).all():
            raise ValueError(f"an observation must be finite, of shape {space.shape}, not {obs}")
        return obs

    def told(self, where: str) -> contextlib.AbstractContextManager:
        return told_in_one_line(f"the environment {self.spec.id} fails in {where}", with_place=True)


def make_env(env_id: str, **kwargs) -> gym.Env:
    with told_in_one_line(f"cannot make the environment {env_id}"):
        env = gym.make(env_id, **kwargs)
        if isinstance(env.observation_space, gym.spaces.Dict):
            env = gym.wrappers.FlattenObservation(env)
        return Checked(env)


def check_spaces(
    env: gym.Env, actions: str = "vectors or discrete", images: bool = False
) -> tuple[tuple[int, ...], int, bool]:
    """-> shape of observations, A, whether actions are discrete; a clear line on other spaces."""
    obs_space, action_space, env_id = env.observation_space, env.action_space, env.spec.id
    is_box, shape = isinstance(obs_space, gym.spaces.Box), obs_space.shape
    is_image = images and is_box and len(shape) == 3 and obs_space.dtype == np.uint8
    if not is_image and not (is_box and len(shape) == 1 and shape[0] > 0):
        kinds = "vectors or uint8 images" if images else "vectors"
        advice = "wrap it in gymnasium.wrappers.FlattenObservation"
        raise InputError(f"{env_id}: observations must be {kinds}, not {obs_space}; {advice}")
    if "discrete" in actions and isinstance(action_space, gym.spaces.Discrete):
        return shape, int(action_space.n), True
    is_usable = (
        isinstance(action_space, gym.spaces.Box)
        and len(action_space.shape) == 1
        and action_space.shape[0] > 0
        and action_space.dtype.kind == "f"  # rounded, a policy would hardly ever reach the bounds
        and (action_space.low < action_space.high).all()
        and (np.abs([action_space.low, action_space.high]) < 1e38).all()  # their span is a float32
    )
    if "vectors" not in actions or not is_usable:
        advice = "a gymnasium.ActionWrapper can translate them (vectors: floats in finite bounds)"
        raise InputError(f"{env_id}: actions must be {actions}, not {action_space}; {advice}")
    return shape, action_space.shape[0], False


def second_seed(seed: int) -> int:
    """Of a stream of random numbers apart from the one that `seed` starts: with one for both, the
    first actions of a run would be its first weights."""
    # (seed, k) are the seeds of the episodes, and SeedSequence takes seed for (seed, 0)
    return np.random.SeedSequence((seed, 0, 1)).generate_state(1).item()


def start_episode(env: gym.Env, seed: int, episode: int, actions=()) -> tuple[np.ndarray, float]:
    """Episode k always starts from the seed that (seed, k) makes. A resumed run then plays the
    actions again that it took before it stopped. -> observation, return so far"""
    obs, _ = env.reset(seed=np.random.SeedSequence((seed, episode)).generate_state(1).item())
    episode_return = 0.0
    for action in actions:
        obs, reward, _, _, _ = env.step(action)
        episode_return += float(reward)
    return np.array(obs), episode_return


class FirstFire(gym.Wrapper):
    """A life begins with FIRE, whatever the agent says: Atari games such as Breakout serve no ball
    without it, and a greedy policy that never fires would play on for 27,000 steps. What was played
    is in info["played_action"], for whoever stores it."""

    def __init__(self, env: gym.Env):
        super().__init__(env)
        self.fire = env.unwrapped.get_action_meanings().index("FIRE")

    def reset(self, **kwargs):
        self.lives, self.shots = math.inf, 0
        return self.env.reset(**kwargs)

    def step(self, action):
        lives = self.unwrapped.ale.lives()
        if lives < self.lives:
            self.shots = 2  # one may be lost: a game repeats the action before it now and then
        self.lives = lives
        if self.shots > 0:
            self.shots, action = self.shots - 1, self.fire
        obs, reward, terminated, truncated, info = self.env.step(action)
        return obs, reward, terminated, truncated, info | {"played_action": action}


def normalize_action(action: np.ndarray, space: gym.Space) -> np.ndarray:
    """From the units of the environment to what networks see, always float32 vectors: continuous
    actions in [-1, 1], discrete ones as one-hot vectors. [N, A] or [N] -> [N, A]"""
    if isinstance(space, gym.spaces.Discrete):
        return np.eye(space.n, dtype=np.float32)[action - space.start]
    center, half_range = (space.high + space.low) / 2, (space.high - space.low) / 2
    return np.clip((action - center) / half_range, -1, 1).astype(np.float32)  # against rounding


def unnormalize_action(action: np.ndarray, space: gym.Space) -> np.ndarray:
    """The way back, to the units of the environment. [N, A] -> [N, A] or [N]"""
    if isinstance(space, gym.spaces.Discrete):
        return action.argmax(axis=-1) + space.start
    center, half_range = (space.high + space.low) / 2, (space.high - space.low) / 2
    action = np.clip(center + half_range * action, space.low, space.high)  # against rounding
    return action.astype(space.dtype)


# ---- datasets


@dataclass
class Dataset:
    """Transitions in the order in which they happened, as CPU tensors."""

    obs: torch.Tensor  # [N, O] float32
    action: torch.Tensor  # [N, A] float32, in [-1, 1], or one-hot for a discrete space
    reward: torch.Tensor  # [N] float32, after scaling and shifting
    next_obs: torch.Tensor  # [N, O]: the true successor, also where an episode was truncated
    terminated: torch.Tensor  # [N] bool: the MDP ended here; nothing to bootstrap from
    truncated: torch.Tensor  # [N] bool: the episode was cut here, but would have gone on
    episode_returns: np.ndarray  # [num_episodes] undiscounted, in the environment's own rewards
    source: str  # what the spec turned out to mean
    fingerprint: int  # differs if the data differ: a resumed run must go on with what it began with

    def __len__(self) -> int:
        return len(self.reward)

    def __str__(self) -> str:
        returns = self.episode_returns
        episodes = f"{len(returns)} episodes, mean return {returns.mean():.1f}"
        return f"{len(self):,} transitions of {self.source}, {episodes}"

    def standardize(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Observations become (obs - mean) / std, in place: a large dataset is held once.
        -> mean [O], std [O], for a policy to do the same"""
        if len(self) == 1:
            raise InputError(f"dataset {self.source} has a single row: nothing can be learned")
        mean, std = self.obs.mean(0), self.obs.std(0) + 1e-3
        for obs in (self.obs, self.next_obs):
            obs.sub_(mean).div_(std)
        return mean, std


def load_dataset(
    spec: str,
    env: gym.Env,
    seed: int = 0,
    reward_scale: float = 1.0,
    reward_shift: float = 0.0,
    normalize_reward: bool = False,
) -> Dataset:
    """spec: auto | random | random:N | PATH.npz | minari:ID. Checked before anything trains on it.

    Rewards become reward_scale * r + reward_shift. normalize_reward first multiplies them by
    1000 / (best - worst episode return), as is usual for locomotion data.
    """
    if spec == "auto":
        shipped = SHIPPED / f"{env.spec.id}.npz"
        spec = str(shipped) if shipped.is_file() else "random"
    if spec == "random":
        spec = f"random:{RANDOM_STEPS}"
    kind, _, name = spec.partition(":")
    with told_in_one_line(f"dataset {spec}"):
        if kind == "random" and name.isdecimal() and int(name) > 0:
            fields = random_steps(env, int(name), seed)
        elif kind == "minari":
            fields = read_minari(name)
        elif spec.endswith(".npz"):
            fields = read_npz(spec)
        else:
            raise InputError("expected auto, random, random:N with N > 0, PATH.npz or minari:ID")
        validate(fields, env)
        if "next_obs" not in fields:
            fields = add_next_obs(fields)
        fields, num_found = find_cuts(fields)

    done = fields["terminated"] | fields["truncated"]
    first_row = np.flatnonzero(np.append(True, done[:-1]))  # of each episode
    source = spec
    if num_found > 0:
        source += f" (rows that do not join: {num_found} cuts that no flag tells of)"
    if 2 * len(first_row) > len(done):
        source += " (most episodes have one step: if it is shuffled, returns mean nothing)"
    episode_returns = np.add.reduceat(fields["reward"].astype(np.float64), first_row)
    if normalize_reward:
        span = np.ptp(episode_returns)
        if span == 0:
            raise InputError(f"dataset {spec}: all episodes have the same return: do not normalise")
        reward_scale = reward_scale * 1000 / span
    fields["reward"] = (reward_scale * fields["reward"] + reward_shift).astype(np.float32)
    complaint = f"dataset {spec}: rewards, scaled and shifted, is not finite"
    check_rows(np.abs(fields["reward"]) < LARGE, fields["reward"], complaint)
    fields["action"] = normalize_action(fields["action"], env.action_space)
    fingerprint = 0
    for field in fields.values():
        fingerprint = zlib.crc32(field, fingerprint)
    return Dataset(*map(torch.from_numpy, fields.values()), episode_returns, source, fingerprint)


def random_steps(env: gym.Env, num_steps: int, seed: int) -> dict[str, np.ndarray]:
    """A uniform random policy, run on the spot."""
    space, rng = env.action_space, np.random.default_rng(seed)
    if isinstance(space, gym.spaces.Box):
        actions = rng.uniform(space.low, space.high, (num_steps, *space.shape)).astype(space.dtype)
    else:
        actions = rng.integers(space.start, space.start + space.n, num_steps)

    rows = []
    obs, _ = env.reset(seed=seed)
    for action in actions:
        next_obs, reward, terminated, truncated, info = env.step(action)
        action = info.get("played_action", action)  # FirstFire may have played another
        rows.append((obs, action, reward, next_obs, terminated, truncated))
        obs = env.reset()[0] if terminated or truncated else next_obs
    return {name: np.stack(column) for name, column in zip(NAMES, zip(*rows))}


def read_npz(path: str) -> dict[str, np.ndarray]:
    """The fields of a file. No pickle is ever loaded: a dataset must not be able to run code."""
    with open(path, "rb") as file:
        start = file.read(20)
    # a web page, half of a download; is_zipfile would read a device for ever
    if not (os.path.isfile(path) and zipfile.is_zipfile(path)):
        raise InputError(f"not a complete npz file, get it again (it starts with {start})")
    with np.load(path, allow_pickle=False) as file:  # an array of objects is a ValueError
        found = file.files
        fields = {
            name: np.atleast_1d(file[spelling])
            for name, spellings in NAMES.items()
            for spelling in reversed(spellings)  # ours wins
            if spelling in found
        }
    for name in ("obs", "action", "reward", "terminated"):
        if name not in fields:
            raise InputError(f"no array '{NAMES[name][0]}' (there are: {', '.join(found)})")
    return fields


def read_minari(dataset_id: str) -> dict[str, np.ndarray]:
    with told_in_one_line("this needs a package, pip install 'minari[hdf5,hf]'"):
        import minari  # slow to import
    parts = []
    for episode in minari.load_dataset(dataset_id, download=True).iterate_episodes():
        obs, action = episode.observations, episode.actions
        if not (isinstance(obs, np.ndarray) and isinstance(action, np.ndarray)):
            raise InputError("observations and actions must be plain arrays")
        # T steps have T + 1 observations: the last one is a true successor, too
        ends = (episode.terminations, cut_at_end(episode.truncations))
        parts.append((obs[:-1], action, episode.rewards, obs[1:], *ends))
    return {name: np.concatenate(column) for name, column in zip(NAMES, zip(*parts))}


def cut_at_end(truncated: np.ndarray) -> np.ndarray:
    """An episode that stops with neither flag set was cut there."""
    return np.append(truncated[:-1], True)


def check_rows(is_fine: np.ndarray, column: np.ndarray, complaint: str) -> None:
    is_fine = is_fine.reshape(len(column), -1).all(axis=1)
    if not is_fine.all():
        row = is_fine.argmin()
        raise InputError(f"{complaint} in row {row}: {one_line(column[row])[:100]}")


def validate(fields: dict[str, np.ndarray], env: gym.Env) -> None:
    """One clear line for whatever is wrong; else the fields get our own shapes and types."""
    obs_shape, space = env.observation_space.shape, env.action_space
    row_shapes = {"obs": obs_shape, "next_obs": obs_shape, "action": space.shape}
    num_rows = len(fields["action"])
    if num_rows == 0:
        raise InputError("it has no rows")
    for name, field in fields.items():
        label, shape, expected = NAMES[name][0], field.shape[1:], row_shapes.get(name, ())
        if field.dtype.kind not in "fiub":
            raise InputError(f"{label} holds {field.dtype}, not numbers")
        if len(field) != num_rows and (name != "obs" or "next_obs" in fields):
            raise InputError(f"{label} has {len(field)} rows, actions has {num_rows}")
        # [N, 1] where [N] is meant, or the reverse, is common and harmless
        if shape != expected and {shape, expected} != {(), (1,)}:
            raise InputError(f"a row of {label} has shape {shape}, the environment's {expected}")
        with np.errstate(over="ignore"):  # what is too large for float32 becomes infinite
            fields[name] = np.ascontiguousarray(field.reshape(-1, *expected), np.float32)
        check_rows(np.abs(fields[name]) < LARGE, fields[name], f"{label} is not finite")
        if name in ("terminated", "truncated"):
            check_rows(np.isin(field, (0, 1)), field, f"{label} is neither 0 nor 1")
            fields[name] = fields[name].astype(bool)

    action = fields["action"]
    if isinstance(space, gym.spaces.Discrete):
        low, high, slack = space.start, space.start + space.n - 1, 0
        fields["action"] = action.round().clip(low, high).astype(int)
    else:
        low, high = space.low, space.high
        slack = 1e-4 * (high - low)  # float32 rounding of someone else's scaling
        fields["action"] = action.clip(low, high).astype(np.float32)
    complaint = one_line(f"actions, in the units of {env.spec.id}, is not in {low} to {high}")
    check_rows(np.abs(action - fields["action"]) <= slack, action, complaint)


def add_next_obs(fields: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Two layouts leave next_obs out.

    Minari-like: an episode of T steps has T + 1 observations, so nothing is missing.
    D4RL-like: as many observations as actions. The successor of an episode's last step was not
    stored. A terminated row never looks at it; a truncated one would, so that row is dropped.
    """
    obs, terminated = fields["obs"], fields["terminated"]
    truncated = cut_at_end(fields.get("truncated", terminated)) & ~terminated
    row, last_row = np.arange(len(terminated)), np.flatnonzero(terminated | truncated)
    if len(obs) == len(row) + len(last_row):
        row += np.searchsorted(last_row, row)  # one final observation for each episode before
        return fields | {"obs": obs[row], "next_obs": obs[row + 1]}
    if "truncated" not in fields:
        raise InputError("it has neither next_observations nor truncations: no one knows its cuts")
    if len(obs) != len(row):
        expected = f"{len(row)}, or {len(row) + len(last_row)} with the last one of each episode"
        raise InputError(f"observations has {len(obs)} rows; expected {expected}")
    if truncated.all():
        raise InputError("it has no next_observations and no episode of 2 steps")
    next_obs = np.append(obs[1:], obs[-1:], axis=0)
    fields = fields | {"next_obs": next_obs, "truncated": np.append(truncated[1:], False)}
    return {name: field[~truncated] for name, field in fields.items()}


def find_cuts(fields: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], int]:
    """Terminated wins if both flags are set. The end of the file is a cut, too, and so is a row
    that does not lead to where the next one starts: these have no flag, and are counted."""
    obs, next_obs, terminated = fields["obs"], fields["next_obs"], fields["terminated"]
    done = terminated | cut_at_end(fields.get("truncated", terminated))
    joins = np.isclose(obs[1:], next_obs[:-1], rtol=1e-4, atol=1e-5).all(axis=1)
    found = ~done[:-1] & ~joins
    done[:-1] |= found
    fields = fields | {"truncated": done & ~terminated}
    return {name: fields[name] for name in NAMES}, found.sum()


def returns_to_go(
    reward: torch.Tensor, terminated: torch.Tensor, truncated: torch.Tensor, gamma: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[N], [N], [N] -> M [N], D [N], last [N], such that G_t = M_t + D_t V(next_obs[last_t]).

    M_t = sum_k gamma^(k-t) r_k up to the last row of the episode that t belongs to.
    D_t = gamma^(last_t - t + 1) if that episode was truncated, 0 if it terminated: a cut-off future
    is not worth 0, it is worth V of where it was cut.
    """
    assert reward.shape == terminated.shape == truncated.shape
    done = (terminated | truncated).cpu().numpy()
    row = np.arange(len(done))
    ends = np.append(np.flatnonzero(done[:-1]), row[-1:])  # the last rows of episodes
    last = ends[np.searchsorted(ends, row)]
    num_left = last - row  # rows of the episode that are still to come
    # by doubling: the sum of 1 reward, of 2, of 4, ... In doubles: no drift over long episodes
    returns, width = reward.cpu().numpy().astype(np.float64), 1
    while width <= num_left.max(initial=0):
        is_inside = num_left[:-width] >= width
        returns[:-width] += gamma**width * is_inside * returns[width:]
        width *= 2
    discount = gamma ** (num_left + 1) * ~terminated.cpu().numpy()[last]
    to_float = partial(torch.tensor, dtype=torch.float32, device=reward.device)
    return to_float(returns), to_float(discount), torch.tensor(last, device=reward.device)


# ---- evaluation


def evaluate(
    policy: Policy,
    env_id: str,
    episodes: int,
    seed: int,
    rows: list[list] | None = None,
    make_env: MakeEnv = make_env,
) -> np.ndarray:
    """Undiscounted returns [E] of `episodes` episodes, all stepped side by side.

    Episode i always starts from seed + i, in an environment of its own, so that evaluations compare
    like with like and leave training alone. An episode that is over is not stepped again: no
    autoreset, no fake transition. Every step is appended to rows[i] if `rows` is given.
    """
    if hasattr(policy, "reset"):  # it remembers
        policy.reset()
    envs = [make_env(env_id) for _ in range(episodes)]
    obs = np.stack([env.reset(seed=seed + i)[0] for i, env in enumerate(envs)])  # [E, O]
    returns, running, num_steps = np.zeros(episodes), np.ones(episodes, dtype=bool), 0
    while running.any() and num_steps < MAX_EPISODE_STEPS:
        num_steps += 1
        action = np.array(policy(obs))  # [E, A], a copy: obs changes below
        for i in np.flatnonzero(running):
            next_obs, reward, terminated, truncated, info = envs[i].step(action[i])
            if rows is not None:
                played = info.get("played_action", action[i])  # FirstFire may have played another
                is_cut = truncated or num_steps == MAX_EPISODE_STEPS
                rows[i].append((obs[i].copy(), played, reward, next_obs, terminated, is_cut))
            obs[i] = next_obs
            returns[i] += reward
            running[i] = not (terminated or truncated)
    if running.any():
        advice = "cut off; give it a time limit, max_episode_steps of gym.register"
        print(f"{env_id}: no end of an episode in {num_steps:,} steps: {advice}", file=sys.stderr)
    for env in envs:
        env.close()
    return returns


def record(
    policy: Policy, env_id: str, episodes: int, seed: int, path: str, make_env: MakeEnv = make_env
) -> np.ndarray:
    """Episodes from seeds that no evaluation has (else a policy that learns from them would be
    evaluated on what it knows), in our npz layout: a dataset for any offline algorithm."""
    rows = [[] for _ in range(episodes)]
    returns = evaluate(policy, env_id, episodes, RECORD_SEEDS + seed, rows, make_env)
    columns = zip(*[row for episode in rows for row in episode])
    arrays = {names[0]: np.stack(column) for names, column in zip(NAMES.values(), columns)}
    save_npz(path, arrays | {"rewards": arrays["rewards"].astype(np.float32)})
    return returns


def save_npz(path: str, arrays: dict[str, np.ndarray]) -> None:
    save_atomically(path, lambda file: np.savez_compressed(file, **arrays))


def capture_video(
    policy: Policy, env_id: str, seed: int, folder: str, make_env: MakeEnv = make_env
) -> str:
    """Film one episode; returns the path of the mp4."""

    def make_filmed(env_id: str) -> gym.Env:
        env = make_env(env_id, render_mode="rgb_array")
        return gym.wrappers.RecordVideo(env, folder, name_prefix=f"seed-{seed}")

    try:
        evaluate(policy, env_id, 1, seed, make_env=make_filmed)
    except gym.error.DependencyNotInstalled as error:
        raise InputError(f"cannot film {env_id}: {one_line(error)}") from None
    return os.path.join(folder, f"seed-{seed}-episode-0.mp4")


# ---- runs: what every script does around its loop

RULES = {  # what a limit says, and whether a value keeps to it. NaN keeps to none.
    "> 0": lambda x: x > 0,
    ">= 0": lambda x: x >= 0,
    ">= 1": lambda x: x >= 1,
    "in (0, inf)": lambda x: 0 < x < math.inf,
    "in [0, inf)": lambda x: 0 <= x < math.inf,
    "in (0, 1e38)": lambda x: 0 < x < 1e38,
    "in [0, 1)": lambda x: 0 <= x < 1,
    "in (0, 1]": lambda x: 0 < x <= 1,
    "in [0, 1]": lambda x: 0 <= x <= 1,
    "in [1, 2^10]": lambda x: 1 <= x <= 2**10,
    "in [1, 2^15)": lambda x: 1 <= x < 2**15,
    "in [0, 10^6)": lambda x: 0 <= x < RECORD_SEEDS,
    "in [0, 2^63)": lambda x: 0 <= x < 2**63,
    "finite": math.isfinite,
    "not empty": bool,  # as an unset variable of the shell is
    "a name that ends in .npz": lambda x: x.endswith(".npz"),
}
LIMITS = {  # of the flags that several scripts have; each script has its own beside them
    "> 0": "total_updates total_epochs total_timesteps batch_size hidden_dim eval_interval "
    "patience checkpoint_interval log_interval buffer_capacity "
    "train_frequency refresh_interval target_interval",
    ">= 0": "warmup_updates learning_starts",
    ">= 1": "max_weight",
    "in (0, inf)": "learning_rate reward_scale",
    "finite": "reward_shift target_entropy target_return",
    "in [0, inf)": "alpha policy_entropy_coef",
    "in [0, 1)": "gamma",
    "in (0, 1]": "tau",
    "in [0, 1]": "td_lambda",
    "in [1, 2^10]": "torch_threads",  # each of them is made, whatever the machine has
    "in [1, 2^15)": "num_envs eval_episodes",
    "in [0, 10^6)": "eval_seed",
    "in [0, 2^63)": "seed",
    "not empty": "resume evaluate run_dir",
    "a name that ends in .npz": "record record_replay",
}
BUDGETS = "total_updates total_timesteps total_epochs"  # the last one that is set is what counts
RESUME_MAY_CHANGE = (  # the dataset may lie elsewhere now: its fingerprint must be the same
    f"{BUDGETS} eval_interval checkpoint_interval log_interval "
    "target_return patience quiet resume dataset run_dir track"
)
WITH_EVALUATE = "record record_replay capture_video plot"  # flags that mean nothing without it
OF_ONE_CALL = f"{WITH_EVALUATE} resume evaluate quiet run_dir"  # not taken over from a checkpoint
EVALUATE_MAY_CHANGE = f"{OF_ONE_CALL} eval_episodes eval_seed device torch_threads"


def main(
    algo: str,
    args_type: type,
    train: Callable,
    load_policy: Callable,
    evaluate: Callable | None = None,
) -> int:
    """The command line of a script. Beside --resume or --evaluate, the flags of that run are the
    defaults. -> 0: done; 1: a file could not be written; 2: wrong input; 128 + signal: stopped"""
    sys.path.append(os.getcwd())  # --env-id mypackage:MyEnv-v0
    # TensorBoard's thread meets a full disk as we do, who say so
    hook = threading.excepthook
    threading.excepthook = lambda x: issubclass(x.exc_type, OSError) or hook(x)
    try:
        words = whole_numbers(sys.argv[1:], args_type)
        given = {word.partition("=")[0].replace("-", "_") for word in words}
        ours = next(name for name in BUDGETS.split() if hasattr(args_type, name))
        for name in BUDGETS.split():
            if f"__{name}" in given and not hasattr(args_type, name):
                raise InputError(f"there is no {name} here: the budget is {ours}")
        args = tyro.cli(args_type, args=words)
        if args.resume and args.evaluate:
            raise InputError("--resume and --evaluate are two things to do: give one of them")
        if args.resume or args.evaluate:
            path = args.evaluate or os.path.join(args.resume, "checkpoint.pt")
            saved = load_checkpoint(path, algo, args_type, args.env_id)["args"]
            # what writes files is taken from the command line alone
            saved = {name: x for name, x in saved.items() if name not in OF_ONE_CALL.split()}
            args = tyro.cli(args_type, args=words, default=args_type(**saved))
        evaluation = evaluate or partial(evaluate_checkpoint, algo, load_policy)
        evaluation(args) if args.evaluate else train(args)
    except (InputError, OSError) as error:
        print(f"{algo}: {one_line(error)}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    except (MemoryError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        if not re.search("(?i)memory|alloc|overflow|too big", repr(error)):
            raise
        print(f"{algo}: too large for this machine: {one_line(error)[:200]}", file=sys.stderr)
        return 2
    except Stopped as stop:
        return 128 + stop.args[0]
    except KeyboardInterrupt:
        print(f"{algo}: stopped at once; what was saved before is intact", file=sys.stderr)
        return 130
    return 0


def whole_numbers(words: list[str], args_type: type) -> list[str]:
    """1e6 is a number of steps, too."""
    counts = [f"__{x.name}" for x in fields(args_type) if int in (x.type, *get_args(x.type))]
    for i, word in enumerate(words):
        flag, equals, number = word.rpartition("=")  # two words, or one
        is_count = (flag or words[i - 1]).replace("-", "_") in counts
        is_power = re.fullmatch(r"\d+(\.\d+)?[eE]\+?\d+", number)
        if is_count and is_power and float(number).is_integer():
            words[i] = f"{flag}{equals}{int(float(number))}"
    return words


def check_types(args: Any) -> None:
    """tyro has done it for what was typed, but not for what comes from Python or from a file."""
    for field in fields(args):
        name, value = field.name, getattr(args, field.name)
        kinds = get_args(field.type) or (field.type,)
        if get_origin(field.type) is Literal:
            if value not in kinds:
                raise InputError(f"{name} must be one of {kinds}, got {value}")
        elif not isinstance(value, (*kinds, int) if float in kinds else kinds):
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise InputError(f"{name} must be {expected}, got {value} ({type(value).__name__})")


def check_flags(args: Any, limits: dict[str, str]) -> None:
    """Refuse what would waste a run, before it begins. A flag that is None is not set."""
    check_types(args)
    for rule, names in [*LIMITS.items(), *limits.items()]:
        for name in names.split():
            value = getattr(args, name, None)
            if value is not None and not RULES[rule](value):
                raise InputError(f"{name} must be {rule}, got {value}")
    for name in WITH_EVALUATE.split():
        value = getattr(args, name, None)
        if value and not args.evaluate:
            raise InputError(f"{name} must be used with --evaluate, got {value}")
        if value and os.path.abspath(str(value)) == os.path.abspath(args.evaluate):
            raise InputError(f"{name} must be another file than the checkpoint, got {value}")


def check_unchanged(args: Any, saved: dict, may_change: str, mode: str) -> None:
    """A flag that is typed beside --resume or --evaluate either works or is refused."""
    for name, value in asdict(args).items():
        if value != saved[name] and name not in may_change.split():
            raise InputError(f"{mode} keeps {name} = {saved[name]} of the run, got {value}")


def pick_device(device: str) -> torch.device:
    if device == "auto":
        gpus = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
        device = next((name for name, is_here in gpus.items() if is_here), "cpu")
    with told_in_one_line(f"device {device} is not available here; try --device cpu"):
        return torch.empty(0, device=device).device


def keep_freed_memory() -> None:
    """glibc gives freed activations back to the OS and takes them again page by page. Keeping them
    makes an update up to a quarter faster (benchmark/NOTES.md), but not GAIL's; other systems need
    no such help."""
    trim_threshold, mmap_max = -1, -4  # their numbers in malloc.h
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt"):
        ctypes.CDLL(None).mallopt(mmap_max, 0)
        ctypes.CDLL(None).mallopt(trim_threshold, 2**31 - 1)


def lr_factor(update: int, total: int, schedule: str, warmup: int) -> float:
    """What the learning rate is multiplied with at an update (1 is the first)."""
    if update <= warmup:
        return update / warmup
    progress = (update - 1 - warmup) / max(1, total - warmup)  # 0 at first, just below 1 at the end
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return {"constant": 1.0, "linear": 1 - progress, "cosine": cosine}[schedule]


def is_due(step: int, interval: int, stride: int = 1) -> bool:
    """Whether a multiple of the interval lies in the last `stride` steps, this one included."""
    return step // interval > (step - stride) // interval


def save_atomically(path: str, write: Callable[[BinaryIO], None]) -> None:
    """The file gets its name only when it is complete: a crash in the middle of a save, or a full
    disk, leaves the file before it as it was."""
    temporary = f"{path}.tmp"
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch.save turns a full disk into a RuntimeError
        reason = error.strerror if isinstance(error, OSError) else "no space left on the disk?"
        raise OSError(f"cannot write {path}: {reason}; what was saved before is intact") from None
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)


def load_checkpoint(path: str, algo: str, args_type: type, env_id: str | None = None) -> dict:
    """No code in the file is run (weights_only), and a module that it names is imported only if
    env_id names it, too. Its tensors are read when they are used (mmap). Checksums: 0.2 s per GB.
    """
    if not os.path.isfile(path):
        advice = "--resume takes the folder of a run, --evaluate a file there, such as best.pt"
        raise InputError(f"there is no checkpoint {path}: {advice}")
    with told_in_one_line(f"cannot use {path} with {algo}.py"):
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip()  # compares checksums, which torch ignores
        assert damaged is None, f"{damaged} is damaged"
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if checkpoint["algo"] != algo:
            raise InputError(f"it is a checkpoint of {checkpoint['algo']}")
        if checkpoint["args"].keys() != {field.name for field in fields(args_type)}:
            raise InputError("another version made it: its flags differ")
        assert isinstance(checkpoint["step"], int), "where the run was is not in it"
        for name in ("num_updates", "episode", "fingerprint"):
            assert isinstance(checkpoint.get(name, 0), int), f"its {name} is not a number"
        saved = args_type(**checkpoint["args"])
        check_types(saved)
        if ":" in saved.env_id and saved.env_id != env_id:
            trust = f"if you trust it, give --env-id {saved.env_id} again"
            raise InputError(f"it names a module of its own, to be imported: {trust}")
    return checkpoint


def get_state(part: Any) -> Any:
    """What a checkpoint holds of a part of a run. A number, a list, a string: itself."""
    if isinstance(part, np.ndarray):
        return torch.from_numpy(part)
    # of networks, optimisers and buffers; of generators; of tensors
    for method in ("state_dict", "get_state", "detach"):
        if hasattr(part, method):
            return getattr(part, method)()
    return part


@torch.no_grad()
def set_state(part: Any, state: Any) -> None:
    """The way back, in place. A number has no place: a script reads it from run.saved."""
    if isinstance(part, torch.optim.Optimizer):
        state = deepcopy(state)  # it would keep tensors that are mapped from the file
    for method in ("load_state_dict", "set_state", "copy_"):
        if hasattr(part, method):
            getattr(part, method)(state)


class Run:
    """The folder of a run with its logs and checkpoints, and when to stop. Around a loop:

    run = Run(ALGO, args, LIMITS)  # with --resume, run.saved is the checkpoint
    run.start(total, parts, about)  # the parts of a resumed run take up their state
    for step in run.steps():
        ...  # run.log, run.evaluate, run.save
    return run.finish()
    """

    def __init__(self, algo: str, args: Any, limits: dict[str, str]):
        paths = {x: os.fspath(y) for x, y in vars(args).items() if isinstance(y, os.PathLike)}
        args = replace(args, **paths)
        check_flags(args, limits)
        keep_freed_memory()
        if args.torch_threads is not None:
            torch.set_num_threads(args.torch_threads)
        self.algo, self.device, self.saved = algo, pick_device(args.device), {}
        # as it turned out to be: on another device, a resumed run would get other bits
        self.args = replace(args, device=self.device.type)
        env_name = re.sub(r"[^0-9A-Za-z_]", "-", args.env_id)
        now = f"{datetime.now():%Y%m%d-%H%M%S-%f}"  # a loop of the shell starts several at once
        self.folder = args.resume or args.run_dir or f"runs/{algo}__{env_name}__{args.seed}__{now}"
        path = f"{self.folder}/checkpoint.pt"
        if args.resume:
            self.saved = load_checkpoint(path, algo, type(args), args.env_id)
            check_unchanged(self.args, self.saved["args"], RESUME_MAY_CHANGE, "--resume")
            if "log_position" not in self.saved:
                raise InputError(f"{path} is a best.pt: it acts, but it cannot be resumed")
        elif os.path.exists(path) or os.path.exists(f"{self.folder}/best.pt"):
            raise InputError(f"{self.folder} holds a run: --resume it, or give another --run-dir")

    def check_replay(self, obs: np.ndarray) -> None:
        """A resumed run is to be where it was, after the actions that start_episode played."""
        if self.saved and not np.array_equal(obs, self.saved.get("current_obs")):
            raise InputError("the environment plays another episode from the same seed: no resume")

    def start(self, total: int, parts: dict[str, Any], about: str, first_step: int = 0) -> None:
        """Everything is built: give the parts of a resumed run their state, and open the logs."""
        args, saved = self.args, self.saved
        self.unit = "update" if hasattr(args, "total_updates") else "step"
        if saved:
            if saved.get("fingerprint") != parts.get("fingerprint"):
                raise InputError(f"{args.dataset} is not the data that the run began with")
            old_updates = saved["args"].get("total_updates")
            if getattr(args, "total_epochs", None) and args.total_updates != old_updates:
                raise InputError(f"{self.folder} is counted in epochs: give --total-epochs instead")
            if saved["step"] >= total:
                done = f"{self.folder} is at {self.unit} {saved['step']} already"
                raise InputError(f"{done}: give it a larger budget")
        self.total, self.first_step, self.is_fresh = total, first_step, not saved
        self.reason, self.signal = "", 0  # why the run stops
        self.step = saved.get("step", first_step)
        with told_in_one_line(f"cannot use {self.folder}/checkpoint.pt with {self.algo}.py"):
            for name in parts if saved else ():
                set_state(parts[name], saved[name])
            self.best_return = float(saved.get("best_return", -math.inf))
            self.evals_since_best = int(saved.get("evals_since_best", 0))
            position = saved.get("log_position", {"seconds": 0, "num_bytes": 0, "last_eval": 0})
            self.last_eval, num_bytes = float(position["last_eval"]), int(position["num_bytes"])
            self.clock = time.perf_counter() - position["seconds"]
        num_updates = saved.get("num_updates", max(self.step, 0))  # of an offline run: its steps
        self.counted = (num_updates, self.step, self.seconds())
        self.saved = {}  # it may hold a copy of a large buffer
        self.args = replace(args, resume=None)
        self.open_logs(num_bytes)
        is_hidden = args.quiet or not sys.stdout.isatty()
        self.bar = tqdm(total=total, initial=max(self.step, 0), disable=is_hidden, file=sys.stdout)
        self.say(f"{self.algo} on {args.env_id}: {about}\nrun: {self.folder} on {self.device}")

    def open_logs(self, num_bytes: int) -> None:
        """Two runs never share a folder: metrics.csv is locked while a run lives. What a killed run
        wrote there after its checkpoint, from num_bytes on, comes once more."""
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        with told_in_one_line(f"cannot use {self.folder} as run_dir"):
            os.makedirs(self.folder, exist_ok=True)
            self.file = open(f"{self.folder}/metrics.csv", "a", newline="")  # noqa: SIM115
        with contextlib.suppress(ImportError, OSError):  # Windows and some disks have no locks
            import fcntl

            try:  # the lock of a process, so that a notebook may resume what it saw fail
                fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):  # whatever else: a disk without locks
                raise InputError(f"{self.folder} is in use by another run") from None
        text = json.dumps(asdict(self.args), indent=2)
        save_atomically(f"{self.folder}/args.json", lambda file: file.write(text.encode()))
        self.file.truncate(min(num_bytes, self.file.tell()))
        self.csv = csv.writer(self.file)
        if self.file.tell() == 0:
            self.csv.writerow(["step", "seconds", "key", "value"])
        if self.args.track:  # it gets what TensorBoard gets, so it has to be there first
            with told_in_one_line("--track needs a package and a login (pip install wandb)"):
                import wandb

                # beside the folder of the run: inside, every scalar would be read twice
                place, name = os.path.split(os.path.abspath(self.folder))
                wandb.init(name=name, config=asdict(self.args), dir=place, sync_tensorboard=True)
        purge_step = None if self.is_fresh else self.step + 1
        self.tensorboard = SummaryWriter(self.folder, purge_step=purge_step)
        if self.is_fresh:
            self.tensorboard.add_text("args", f"```\n{text}\n```")

    def seconds(self) -> float:
        return time.perf_counter() - self.clock

    def say(self, text: str) -> None:
        if not self.args.quiet:
            try:
                self.bar.write(text)
                sys.stdout.flush()
            except BrokenPipeError:  # the reader is gone (`| head`): save and stop
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                self.signal = self.signal or signal.SIGTERM

    def steps(self, stride: int = 1) -> Iterator[int]:
        """Until the budget is spent, or evaluate() finds a reason to stop. Ctrl-C and SIGTERM make
        the next step the last, and tear nothing apart. A second one has its usual effect."""
        in_main_thread = threading.current_thread() is threading.main_thread()  # Python's condition
        noted = [x for x in signal.Signals if x.name in ("SIGINT", "SIGTERM", "SIGHUP")]
        noted = [x for x in noted if signal.getsignal(x) != signal.SIG_IGN]  # by nohup
        handlers = {x: signal.signal(x, self.note) for x in noted if in_main_thread}
        self.restore = lambda: [signal.signal(*handler) for handler in handlers.items()]
        self.stride = stride
        try:
            while not self.reason:
                self.step += stride
                if self.step >= self.total:
                    self.reason = "the budget is spent"
                elif self.signal:
                    self.reason = f"{signal.Signals(self.signal).name} was received"
                yield self.step
        finally:  # also if the loop is left by an exception, which frees this generator
            self.restore()

    def note(self, number: int, frame) -> None:
        self.signal = number
        self.restore()

    @property
    def is_last(self) -> bool:
        """Whether this step is the last. evaluate() can decide it."""
        return bool(self.reason)

    def log(
        self, scalars: dict[str, float], updates: int | None = None, lower: str = "--learning-rate"
    ) -> None:
        """To metrics.csv and TensorBoard; given the number of updates so far, with the speed since
        the last such entry. A loss that is not finite ends the run and names flags to lower."""
        if updates is not None:
            now = (updates, self.step, self.seconds())
            num_updates, num_steps, seconds = (new - old for new, old in zip(now, self.counted))
            self.counted = now
            speeds = {"charts/updates_per_second": num_updates / seconds}
            if self.unit == "step":
                speeds["charts/env_steps_per_second"] = num_steps / seconds
            scalars = speeds | scalars
        for key, value in scalars.items():
            self.csv.writerow([self.step, f"{self.seconds():.3f}", key, f"{value:.7g}"])
            self.tensorboard.add_scalar(key, value, self.step)
        self.file.flush()
        self.bar.update(max(self.step, 0) - self.bar.n)
        for key, value in scalars.items():
            if key.startswith("losses/") and not math.isfinite(value):
                message = f"{key} is {value} at {self.unit} {self.step}: it diverged"
                raise InputError(f"{message}; lower {lower}")

    def evaluate(self, policy: Policy, acting: dict, make_env: MakeEnv = make_env) -> None:
        """The best so far is kept in best.pt: the parts that act. An early stop is decided here."""
        args, names = self.args, ("mean", "std", "min", "max")
        self.check_networks(acting)
        episodes = (policy, args.env_id, args.eval_episodes, args.eval_seed)
        returns = evaluate(*episodes, make_env=make_env)
        mean = self.last_eval = returns.mean().item()
        self.log({f"eval/return_{name}": getattr(returns, name)() for name in names})
        self.bar.set_postfix_str(f"eval {mean:.1f}")
        self.say(
            f"{self.step:>9,}/{self.total:,}  eval return {mean:8.1f} +- {returns.std():.1f}"
            f" ({len(returns)} episodes)  {self.seconds():.0f} s"
        )
        # what counts is on the grid, so that N + N steps and 2N stop early at the same one; the
        # untrained policy does not count, either
        if self.step == self.first_step or not is_due(self.step, args.eval_interval, self.stride):
            return
        self.evals_since_best += 1
        if mean > self.best_return:
            self.best_return, self.evals_since_best = mean, 0
            self.write("best.pt", acting)
        if args.target_return is not None and mean >= args.target_return:
            self.reason = f"an evaluation reached the target of {args.target_return}"
        elif args.patience is not None and self.evals_since_best >= args.patience:
            self.reason = f"the last {args.patience} evaluations were not better"

    def check_networks(self, parts: dict[str, Any]) -> None:
        """The next loss that is logged may be far away: no checkpoint is lost to NaN till then."""
        networks = [part for part in parts.values() if isinstance(part, torch.nn.Module)]
        if not all(x.isfinite().all() for network in networks for x in network.parameters()):
            message = f"a network is not finite at {self.unit} {self.step}: it diverged"
            raise InputError(f"{message}; lower --learning-rate")

    def save(self, parts: dict[str, Any]) -> None:
        """checkpoint.pt: the parts, and where the run is."""
        self.check_networks(parts)
        position = {"step": self.step, "seconds": self.seconds(), "num_bytes": self.file.tell()}
        place = {"best_return": self.best_return, "evals_since_best": self.evals_since_best}
        place["log_position"] = position | {"last_eval": self.last_eval}
        self.write("checkpoint.pt", parts | place)

    def write(self, name: str, parts: dict[str, Any]) -> None:
        state = {"algo": self.algo, "args": asdict(self.args), "step": self.step}
        state |= {part_name: get_state(part) for part_name, part in parts.items()}
        save_atomically(f"{self.folder}/{name}", partial(torch.save, state))

    def finish(self) -> dict[str, float]:
        """Say how to go on. -> what train() returns"""
        script = sys.modules[type(self.args).__module__].__file__
        command, folder = f"python {os.path.relpath(script)}", shlex.quote(self.folder)
        budget = [name for name in BUDGETS.split() if getattr(self.args, name, None)][-1]
        more = "" if self.step < self.total else f" --{budget.replace('_', '-')} <more>"
        saved = "best.pt" if self.best_return > -math.inf else "checkpoint.pt"
        self.say(f"stopped at {self.unit} {self.step:,}: {self.reason}")
        if ":" in self.args.env_id:  # a module is imported only if it is typed
            command += f" --env-id {self.args.env_id}"
        self.say(f"resume: {command} --resume {folder}{more}")
        self.say(f"evaluate: {command} --evaluate {folder}/{saved}")
        for log in (self.bar, self.file, self.tensorboard):
            log.close()
        if self.args.track:
            sys.modules["wandb"].finish()
        if self.reason.endswith("was received"):
            raise Stopped(self.signal)
        result = {"eval/return_mean": self.last_eval, "eval/best_return": self.best_return}
        return {"step": self.step, **result}


def evaluate_checkpoint(
    algo: str, load_policy: Callable, args: Any, make_env: MakeEnv = make_env, may_change: str = ""
) -> dict[str, float]:
    """--evaluate: the checkpoint's policy on fresh episodes, which can be recorded and filmed.
    may_change: flags of the script that need not be those of the run."""
    check_flags(args, {})
    path, seed = args.evaluate, args.eval_seed
    saved = load_checkpoint(path, algo, type(args), args.env_id)["args"]
    check_unchanged(args, saved, f"{EVALUATE_MAY_CHANGE} {may_change}", "--evaluate")
    if args.torch_threads is not None:
        torch.set_num_threads(args.torch_threads)
    with told_in_one_line(f"cannot use {path} with {algo}.py"):
        policy = load_policy(path, **asdict(args))
    run_episodes = partial(record, path=args.record) if args.record else evaluate
    returns = run_episodes(policy, args.env_id, args.eval_episodes, seed, make_env=make_env)
    report = (
        f"{path}: return mean {returns.mean():.1f} std {returns.std():.1f}"
        f" min {returns.min():.1f} max {returns.max():.1f} over {len(returns)} episodes"
    )
    if args.record:
        report += f"\nrecorded in {args.record}, from seed {RECORD_SEEDS + seed:,} on"
    if args.capture_video:
        folder = os.path.join(os.path.dirname(path), "videos")
        report += f"\nfilmed in {capture_video(policy, args.env_id, seed, folder, make_env)}"
    if not args.quiet:
        print(report)
    return {"eval/return_mean": returns.mean().item()}
