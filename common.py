"""Datasets and evaluation, shared by all algorithms. Nothing here is needed to follow the maths.

A policy, for everything in this file, is a function of a batch of observations that returns a batch
of actions in the units of the environment: [E, *obs_shape] -> [E, *action_shape].

The npz layout that we read and write has N rows, one per step:

    observations  actions  rewards  next_observations  terminations  truncations

D4RL's names (terminals, timeouts) and layouts without next_observations are converted on reading.

Shapes: N rows of a dataset, E episodes, O observation, A action.
"""

import os
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch

Policy = Callable[[np.ndarray], np.ndarray]

SHIPPED = Path(__file__).resolve().parent / "benchmark" / "data"  # <env id>.npz, found by `auto`
RANDOM_STEPS = 100_000  # what `random` stands for

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


# ---- environments


def make_env(env_id: str, **kwargs) -> gym.Env:
    try:
        return gym.make(env_id, **kwargs)
    except (gym.error.Error, ImportError) as error:
        raise InputError(f"cannot make the environment {env_id}: {one_line(error)}") from None


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def normalize_action(action: np.ndarray, space: gym.spaces.Box) -> np.ndarray:
    """From the units of the environment to [-1, 1]: the only actions that networks ever see."""
    center, half_range = (space.high + space.low) / 2, (space.high - space.low) / 2
    return ((action - center) / half_range).astype(np.float32)


def unnormalize_action(action: np.ndarray, space: gym.spaces.Box) -> np.ndarray:
    """From [-1, 1] to the units of the environment. The clip removes rounding, nothing else."""
    center, half_range = (space.high + space.low) / 2, (space.high - space.low) / 2
    return np.clip(center + half_range * action, space.low, space.high).astype(space.dtype)


# ---- datasets


@dataclass
class Dataset:
    """Transitions in the order in which they happened, as CPU tensors."""

    obs: torch.Tensor  # [N, O] float32 (images stay uint8)
    action: torch.Tensor  # [N, A] float32 in [-1, 1], or [N] int64 for a discrete space
    reward: torch.Tensor  # [N] float32, after scaling and shifting
    next_obs: torch.Tensor  # [N, O]: the true successor, also where an episode was truncated
    terminated: torch.Tensor  # [N] bool: the MDP ended here; nothing to bootstrap from
    truncated: torch.Tensor  # [N] bool: the episode was cut here, but would have gone on
    episode_returns: np.ndarray  # [num_episodes] undiscounted, in the environment's own rewards
    source: str  # what the spec turned out to mean

    def __len__(self) -> int:
        return len(self.reward)

    def fingerprint(self) -> int:
        """Differs if the data differ: a resumed run must go on with what it began with."""
        checksum = 0
        for field in (self.obs, self.action, self.reward, self.next_obs, self.terminated):
            checksum = zlib.crc32(field.numpy(), checksum)
        return checksum


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

    if spec == "random" or spec.startswith("random:"):
        num_steps = spec.removeprefix("random").removeprefix(":") or str(RANDOM_STEPS)
        if not num_steps.isdecimal() or int(num_steps) == 0:
            raise InputError(f"dataset {spec}: write random:N with N a number of steps above 0")
        fields, source = random_steps(env, int(num_steps), seed), f"random:{num_steps}"
    elif spec.startswith("minari:"):
        fields, source = read_minari(spec.removeprefix("minari:")), spec
    elif spec.endswith(".npz"):
        fields, source = read_npz(spec), spec
    else:
        raise InputError(f"dataset {spec}: expected auto, random, random:N, PATH.npz or minari:ID")

    fields = validate(fields, env, source)
    done = fields["terminated"] | fields["truncated"]
    first_row = np.flatnonzero(np.concatenate([[True], done[:-1]]))  # of each episode
    episode_returns = np.add.reduceat(fields["reward"].astype(np.float64), first_row)

    if normalize_reward:
        span = episode_returns.max() - episode_returns.min()
        if span == 0:
            raise InputError(
                f"dataset {source}: all episodes have the same return; cannot normalise"
            )
        reward_scale = reward_scale * 1000 / span
    fields["reward"] = (reward_scale * fields["reward"] + reward_shift).astype(np.float32)
    if isinstance(env.action_space, gym.spaces.Box):
        fields["action"] = normalize_action(fields["action"], env.action_space)

    tensors = {name: torch.from_numpy(field) for name, field in fields.items()}
    return Dataset(**tensors, episode_returns=episode_returns, source=source)


def random_steps(env: gym.Env, num_steps: int, seed: int) -> dict[str, np.ndarray]:
    """A uniform random policy, run on the spot."""
    space = env.action_space
    rng = np.random.default_rng(seed)
    if isinstance(space, gym.spaces.Box):
        actions = rng.uniform(space.low, space.high, (num_steps, *space.shape)).astype(space.dtype)
    else:
        actions = rng.integers(space.start, space.start + space.n, num_steps)

    rows = []
    obs, _ = env.reset(seed=seed)
    for action in actions:
        next_obs, reward, terminated, truncated, _ = env.step(action)
        rows.append((obs, action, reward, next_obs, terminated, truncated))
        obs = env.reset()[0] if terminated or truncated else next_obs
    return {name: np.stack(column) for name, column in zip(NAMES, zip(*rows))}


def read_npz(path: str) -> dict[str, np.ndarray]:
    """The fields of a file. No pickle is ever loaded: a dataset must not be able to run code."""
    if not os.path.isfile(path):
        raise InputError(f"dataset {path} does not exist")
    with open(path, "rb") as file:
        head = file.read(256)
    if not head:
        raise InputError(f"dataset {path} is an empty file")
    if head.lstrip().startswith(b"<"):
        raise InputError(f"dataset {path} is a web page, not an npz file; download it again")
    if not zipfile.is_zipfile(path):
        raise InputError(f"dataset {path} is not a complete npz file; make or download it again")

    fields = {}
    try:
        with np.load(path, allow_pickle=False) as file:
            for name, spellings in NAMES.items():
                for spelling in spellings:
                    if spelling in file.files:
                        fields[name] = file[spelling]
            found = ", ".join(file.files)
    except ValueError as error:
        if "allow_pickle" in str(error):
            raise InputError(f"dataset {path} holds a pickle; save plain arrays instead") from None
        raise InputError(f"dataset {path} cannot be read: {one_line(error)}") from None
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise InputError(f"dataset {path} cannot be read: {one_line(error)}") from None

    for name in ("obs", "action", "reward", "terminated"):
        if name not in fields:
            raise InputError(f"dataset {path} has no array '{NAMES[name][0]}' (it has: {found})")
    return fields


def read_minari(dataset_id: str) -> dict[str, np.ndarray]:
    try:
        import minari  # an optional package, and slow to import
    except ImportError:
        raise InputError("minari datasets need a package: pip install 'minari[hdf5,hf]'") from None
    try:
        episodes = list(minari.load_dataset(dataset_id, download=True).iterate_episodes())
    except Exception as error:  # a missing id, no network, a missing extra: many types, one meaning
        raise InputError(f"cannot load minari:{dataset_id}: {one_line(error)}") from None
    if not episodes or not isinstance(episodes[0].observations, np.ndarray):
        raise InputError(f"minari:{dataset_id}: observations must be plain arrays, not dicts")
    return {  # an episode of T steps has T + 1 observations: the last one is a true successor, too
        "obs": np.concatenate([episode.observations[:-1] for episode in episodes]),
        "action": np.concatenate([episode.actions for episode in episodes]),
        "reward": np.concatenate([episode.rewards for episode in episodes]),
        "next_obs": np.concatenate([episode.observations[1:] for episode in episodes]),
        "terminated": np.concatenate([episode.terminations for episode in episodes]),
        "truncated": np.concatenate([cut_at_end(episode.truncations) for episode in episodes]),
    }


def cut_at_end(truncated: np.ndarray) -> np.ndarray:
    """An episode that stops with neither flag set was cut there."""
    return np.append(truncated[:-1], True)


def validate(fields: dict[str, np.ndarray], env: gym.Env, source: str) -> dict[str, np.ndarray]:
    """One clear line for whatever is wrong; else the fields in our own layout, shapes and types."""
    num_rows = len(fields["action"])
    if num_rows == 0:
        raise InputError(f"dataset {source} has no rows")
    for name, field in fields.items():
        if field.dtype.kind not in "fiub":
            raise InputError(f"dataset {source}: {name} holds {field.dtype}, not numbers")

    # flags: terminated wins if both are set; the end of the file is a cut, too
    for name in ("reward", "terminated", "truncated"):
        if name in fields:
            check_shape(fields, name, (num_rows,), source)
    terminated = fields["terminated"].astype(bool)
    if "truncated" in fields:
        truncated = fields["truncated"].astype(bool)
    elif "next_obs" in fields and len(fields["obs"]) == len(fields["next_obs"]) == num_rows:
        truncated = np.append(row_differs(fields["obs"][1:], fields["next_obs"][:-1]), True)
    else:
        truncated = np.zeros(num_rows, dtype=bool)
    truncated = cut_at_end(truncated) & ~terminated
    fields |= {"terminated": terminated, "truncated": truncated}
    if "next_obs" not in fields:
        fields = add_next_obs(fields, source)
        num_rows = len(fields["action"])

    # shapes and types, against the spaces
    obs_space, action_space = env.observation_space, env.action_space
    obs_dtype = np.uint8 if obs_space.dtype == np.uint8 else np.float32
    for name, space, dtype in (
        ("obs", obs_space, obs_dtype),
        ("next_obs", obs_space, obs_dtype),
        ("action", action_space, np.float32),
    ):
        if isinstance(space, gym.spaces.Discrete):
            dtype = np.int64
        check_shape(fields, name, (num_rows, *space.shape), source)
        fields[name] = np.ascontiguousarray(fields[name], dtype=dtype)
    fields["reward"] = np.ascontiguousarray(fields["reward"], dtype=np.float32)

    # values
    for name in ("obs", "action", "reward", "next_obs"):
        bad = ~np.isfinite(fields[name]).reshape(num_rows, -1).all(axis=1)
        if bad.any():
            raise InputError(f"dataset {source}: {name} is not finite in row {bad.argmax()}")
    if isinstance(action_space, gym.spaces.Box):
        low, high = action_space.low, action_space.high
        slack = 1e-4 * (high - low)  # float32 rounding of someone else's scaling
        outside = (fields["action"] < low - slack) | (fields["action"] > high + slack)
        box = f"outside the box [{low.min()}, {high.max()}]"
        fields["action"] = fields["action"].clip(low, high)
    else:
        outside = (fields["action"] < action_space.start) | (
            fields["action"] >= action_space.start + action_space.n
        )
        box = f"not one of the {action_space.n} actions"
    outside = outside.reshape(num_rows, -1).any(axis=1)
    if outside.any():
        raise InputError(
            f"dataset {source}: action is {box} of {env.spec.id} in row {outside.argmax()}"
            " (actions are in the environment's own units)"
        )

    # inside an episode, each row must start where the one before it ended
    done = fields["terminated"] | fields["truncated"]
    broken = row_differs(fields["obs"][1:], fields["next_obs"][:-1]) & ~done[:-1]
    if broken.any():
        raise InputError(
            f"dataset {source}: next_obs of row {broken.argmax()} is not obs of the next row, yet"
            " neither flag ends the episode there"
        )
    return {name: fields[name] for name in NAMES}


def check_shape(fields: dict, name: str, shape: tuple[int, ...], source: str) -> None:
    """[N, 1] where [N] is meant (or the reverse) is common and harmless; all else is refused."""
    field = fields[name]
    if len(field) != shape[0]:
        raise InputError(f"dataset {source}: {name} has {len(field)} rows, action has {shape[0]}")
    if field.shape != shape and {field.shape, shape} != {shape[:1], (shape[0], 1)}:
        raise InputError(
            f"dataset {source}: a row of {name} has shape {field.shape[1:]}, the environment's has"
            f" {shape[1:]}"
        )
    fields[name] = field.reshape(shape)


def row_differs(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """[K, O], [K, O] -> [K] bool. Exact comparison first: it needs no large temporaries."""
    differs = (left != right).reshape(len(left), -1).any(axis=1)
    rows = np.flatnonzero(differs)
    close = np.isclose(left[rows], right[rows], rtol=1e-4, atol=1e-5)
    differs[rows] = ~close.reshape(len(rows), -1).all(axis=1)
    return differs


def add_next_obs(fields: dict[str, np.ndarray], source: str) -> dict[str, np.ndarray]:
    """Two layouts leave next_obs out.

    Minari-like: an episode of T steps has T + 1 observations, so nothing is missing.
    D4RL-like: as many observations as actions. The successor of an episode's last step was not
    stored. A terminated row never looks at it; a truncated one would, so that row is dropped.
    """
    obs, num_rows = fields["obs"], len(fields["action"])
    last_row = np.flatnonzero(fields["terminated"] | fields["truncated"])
    if len(obs) == num_rows + len(last_row):
        final_obs = last_row + 1 + np.arange(len(last_row))  # its position among the T + 1
        keep = np.ones(len(obs), dtype=bool)
        keep[final_obs] = False
        return fields | {"obs": obs[keep], "next_obs": obs[np.flatnonzero(keep) + 1]}
    if len(obs) == num_rows:
        keep = ~fields["truncated"]
        cut_before = np.append(fields["truncated"][1:], False) & keep & ~fields["terminated"]
        fields = fields | {
            "next_obs": np.append(obs[1:], obs[-1:], axis=0),
            "truncated": cut_before,
        }
        if not keep.any():
            raise InputError(f"dataset {source} has no next_observations and no episode of 2 steps")
        return {name: field[keep] for name, field in fields.items()}
    raise InputError(
        f"dataset {source}: obs has {len(obs)} rows, action has {num_rows}; expected {num_rows}, or"
        f" {num_rows + len(last_row)} with the final observation of each episode"
    )


def returns_to_go(
    reward: torch.Tensor, terminated: torch.Tensor, truncated: torch.Tensor, gamma: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[N], [N], [N] -> M [N], D [N], last [N], such that G_t = M_t + D_t V(next_obs[last_t]).

    M_t = sum_k gamma^(k-t) r_k up to the last row of the episode that t belongs to.
    D_t = gamma^(last_t - t + 1) if that episode was truncated, 0 if it terminated: a cut-off future
    is not worth 0, it is worth V of where it was cut.
    """
    assert reward.shape == terminated.shape == truncated.shape
    rewards, ends, cuts = reward.tolist(), terminated.tolist(), truncated.tolist()
    num_rows = len(rewards)
    returns, discounts, last_rows = [0.0] * num_rows, [0.0] * num_rows, [0] * num_rows
    for t in reversed(range(num_rows)):  # Python floats are doubles: no drift over long episodes
        if ends[t] or cuts[t] or t == num_rows - 1:
            future, discount, last_row = 0.0, 0.0 if ends[t] else 1.0, t
        future = rewards[t] + gamma * future
        discount = gamma * discount
        returns[t], discounts[t], last_rows[t] = future, discount, last_row
    return torch.tensor(returns), torch.tensor(discounts), torch.tensor(last_rows)


# ---- evaluation


def evaluate(
    policy: Policy, env_id: str, episodes: int, seed: int, rows: list[list] | None = None
) -> np.ndarray:
    """Undiscounted returns [E] of `episodes` episodes, all stepped side by side.

    Episode i always starts from seed + i, in an environment of its own, so that evaluations compare
    like with like and leave training alone. An episode that is over is not stepped again: no
    autoreset, no fake transition. Every step is appended to rows[i] if `rows` is given.
    """
    envs = [make_env(env_id) for _ in range(episodes)]
    obs = np.stack([env.reset(seed=seed + i)[0] for i, env in enumerate(envs)])  # [E, O]
    returns = np.zeros(episodes)
    running = np.ones(episodes, dtype=bool)
    while running.any():
        action = policy(obs)  # [E, A]
        for i in np.flatnonzero(running):
            next_obs, reward, terminated, truncated, _ = envs[i].step(action[i])
            if rows is not None:
                rows[i].append((obs[i].copy(), action[i], reward, next_obs, terminated, truncated))
            obs[i] = next_obs
            returns[i] += reward
            running[i] = not (terminated or truncated)
    for env in envs:
        env.close()
    return returns


def record(policy: Policy, env_id: str, episodes: int, seed: int, path: str) -> np.ndarray:
    """evaluate(), with every step saved in our npz layout: a dataset for any offline algorithm."""
    rows = [[] for _ in range(episodes)]
    returns = evaluate(policy, env_id, episodes, seed, rows)
    columns = zip(*[row for episode in rows for row in episode])
    arrays = {spellings[0]: np.stack(column) for spellings, column in zip(NAMES.values(), columns)}
    arrays["rewards"] = arrays["rewards"].astype(np.float32)
    save_npz(path, arrays)
    return returns


def save_npz(path: str, arrays: dict[str, np.ndarray]) -> None:
    """Under a temporary name first: a crash leaves the old file or the new one, never a half."""
    temporary = f"{path}.tmp"
    try:
        with open(temporary, "wb") as file:
            np.savez_compressed(file, **arrays)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def capture_video(policy: Policy, env_id: str, seed: int, folder: str) -> str:
    """Film one episode; returns the path of the mp4."""
    try:
        env = make_env(env_id, render_mode="rgb_array")
        env = gym.wrappers.RecordVideo(env, folder, name_prefix=f"seed-{seed}")
        obs, _ = env.reset(seed=seed)
        done = False
        while not done:
            obs, _, terminated, truncated, _ = env.step(policy(obs[None])[0])
            done = terminated or truncated
        env.close()
    except gym.error.DependencyNotInstalled as error:
        raise InputError(f"cannot film {env_id}: {one_line(error)}") from None
    return os.path.join(folder, f"seed-{seed}-episode-0.mp4")
