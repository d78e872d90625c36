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
    except (gym.error.Error, ImportError, TypeError, ValueError) as error:
        raise InputError(f"cannot make the environment {env_id}: {one_line(error)}") from None


def one_line(message: object) -> str:
    return " ".join(str(message).split())


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

    obs: torch.Tensor  # [N, O] float32 (images stay uint8)
    action: torch.Tensor  # [N, A] float32, in [-1, 1], or one-hot for a discrete space
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
        for name in NAMES:
            checksum = zlib.crc32(getattr(self, name).numpy(), checksum)
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

    if spec == "random":
        spec = f"random:{RANDOM_STEPS}"

    if spec.startswith("random:"):
        num_steps = spec.removeprefix("random:")
        if not num_steps.isdecimal() or int(num_steps) == 0:
            raise InputError(f"dataset {spec}: write random:N with N a number of steps above 0")
        fields = random_steps(env, int(num_steps), seed)
    elif spec.startswith("minari:"):
        fields = read_minari(spec.removeprefix("minari:"))
    elif spec.endswith(".npz"):
        fields = read_npz(spec)
    else:
        raise InputError(f"dataset {spec}: expected auto, random, random:N, PATH.npz or minari:ID")

    try:
        fields = validate(fields, env)
    except InputError as error:
        raise InputError(f"dataset {spec}: {error}") from None
    done = fields["terminated"] | fields["truncated"]
    first_row = np.flatnonzero(np.concatenate([[True], done[:-1]]))  # of each episode
    episode_returns = np.add.reduceat(fields["reward"].astype(np.float64), first_row)

    if normalize_reward:
        span = episode_returns.max() - episode_returns.min()
        if span == 0:
            raise InputError(f"dataset {spec}: all episodes have the same return: do not normalise")
        reward_scale = reward_scale * 1000 / span
    fields["reward"] = (reward_scale * fields["reward"] + reward_shift).astype(np.float32)
    fields["action"] = normalize_action(fields["action"], env.action_space)

    tensors = {name: torch.from_numpy(field) for name, field in fields.items()}
    return Dataset(**tensors, episode_returns=episode_returns, source=spec)


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
    try:
        with open(path, "rb") as file:
            head = file.read(256)
    except OSError as error:
        raise InputError(f"dataset {path} cannot be read: {error.strerror}") from None
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
                for spelling in reversed(spellings):  # ours wins if a file has several
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
    for name, field in fields.items():
        if np.ndim(field) == 0:  # a single number, or a member of the zip that is no array
            raise InputError(f"dataset {path}: {NAMES[name][0]} is not an array of rows")
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
    arrays = [array for episode in episodes for array in (episode.observations, episode.actions)]
    if not arrays or not all(isinstance(array, np.ndarray) for array in arrays):
        raise InputError(f"minari:{dataset_id}: observations and actions must be plain arrays")
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


def validate(fields: dict[str, np.ndarray], env: gym.Env) -> dict[str, np.ndarray]:
    """One clear line for whatever is wrong; else the fields in our own layout, shapes and types."""
    obs_space, action_space = env.observation_space, env.action_space
    row_shapes = {"obs": obs_space.shape, "next_obs": obs_space.shape, "action": action_space.shape}
    num_rows = len(fields["action"])
    if num_rows == 0:
        raise InputError("it has no rows")

    for name, field in fields.items():
        label = NAMES[name][0]
        if field.dtype.kind not in "fiub":
            raise InputError(f"{label} holds {field.dtype}, not numbers")
        if len(field) != num_rows and (name != "obs" or "next_obs" in fields):
            raise InputError(f"{label} has {len(field)} rows, actions has {num_rows}")
        # [N, 1] where [N] is meant, or the reverse, is common and harmless
        shape, expected = field.shape[1:], row_shapes.get(name, ())
        if shape != expected and {shape, expected} != {(), (1,)}:
            raise InputError(
                f"a row of {label} has shape {shape}, the environment's has {expected}"
            )
        field = fields[name] = field.reshape(len(field), *expected)
        finite = (np.abs(field) <= np.finfo(np.float32).max).all(axis=tuple(range(1, field.ndim)))
        if not finite.all():
            raise InputError(f"{label} is not finite in row {finite.argmin()}")

    action = fields["action"]
    if isinstance(action_space, gym.spaces.Box):
        low, high, action_dtype = action_space.low, action_space.high, np.float32
        slack = 1e-4 * (high - low)  # float32 rounding of someone else's scaling
        inside = ((action >= low - slack) & (action <= high + slack)).all(axis=1)
        action = action.clip(low, high)
        allowed = f"the box {low} to {high}"
    else:
        first, last, action_dtype = action_space.start, action_space.start + action_space.n - 1, int
        inside = (action >= first) & (action <= last) & (action == np.round(action))
        allowed = f"{first} to {last}"
    if not inside.all():
        row = inside.argmin()
        message = (
            f"action {fields['action'][row]} in row {row} is not in {allowed} of {env.spec.id}"
        )
        raise InputError(one_line(f"{message} (actions are in the environment's own units)"))
    is_image = obs_space.dtype == np.uint8 and len(obs_space.shape) > 1
    obs_dtype = np.uint8 if is_image else np.float32
    if obs_dtype == np.uint8 and fields["obs"].dtype != np.uint8:
        raise InputError(f"observations holds {fields['obs'].dtype}, the environment's are uint8")

    # episodes: terminated wins if both flags are set; the end of the file is a cut, too
    terminated, cuts_known = fields["terminated"].astype(bool), "truncated" in fields
    truncated = np.zeros(num_rows, dtype=bool)
    if cuts_known:
        truncated = fields["truncated"].astype(bool)
    elif "next_obs" in fields:  # where a row does not start at the end of the last, one was cut
        truncated[:-1] = row_differs(fields["obs"][1:], fields["next_obs"][:-1])
    truncated = cut_at_end(truncated) & ~terminated

    fields |= {"action": action, "terminated": terminated, "truncated": truncated}
    if "next_obs" not in fields:
        fields = add_next_obs(fields, cuts_known)
    dtypes = {"obs": obs_dtype, "next_obs": obs_dtype, "reward": np.float32, "action": action_dtype}
    for name, dtype in dtypes.items():
        fields[name] = np.ascontiguousarray(fields[name], dtype=dtype)

    done = fields["terminated"] | fields["truncated"]
    broken = row_differs(fields["obs"][1:], fields["next_obs"][:-1]) & ~done[:-1]
    if broken.any():
        raise InputError(
            f"next_observations of row {broken.argmax()} is not observations of the next row, yet"
            " neither flag ends the episode there"
        )
    return {name: fields[name] for name in NAMES}


def row_differs(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """[K, O], [K, O] -> [K] bool. Exact comparison first: it needs no large temporaries."""
    inner_axes = tuple(range(1, left.ndim))
    differs = (left != right).any(axis=inner_axes)
    close = np.isclose(left[differs], right[differs], rtol=1e-4, atol=1e-5)
    differs[differs] = ~close.all(axis=inner_axes)
    return differs


def add_next_obs(fields: dict[str, np.ndarray], cuts_known: bool) -> dict[str, np.ndarray]:
    """Two layouts leave next_obs out.

    Minari-like: an episode of T steps has T + 1 observations, so nothing is missing.
    D4RL-like: as many observations as actions. The successor of an episode's last step was not
    stored. A terminated row never looks at it; a truncated one would, so that row is dropped.
    """
    obs, terminated, truncated = fields["obs"], fields["terminated"], fields["truncated"]
    num_rows = len(terminated)
    last_row = np.flatnonzero(terminated | truncated)  # of each episode
    if len(obs) == num_rows + len(last_row):
        keep = np.ones(len(obs), dtype=bool)
        keep[last_row + 1 + np.arange(len(last_row))] = False  # the final observations
        return fields | {"obs": obs[keep], "next_obs": obs[np.flatnonzero(keep) + 1]}
    if not cuts_known:
        raise InputError(
            "it has neither next_observations nor truncations: nobody can tell where an episode"
            " was cut, or what came after it"
        )
    if len(obs) != num_rows:
        raise InputError(
            f"observations has {len(obs)} rows, actions has {num_rows}; expected {num_rows}, or"
            f" {num_rows + len(last_row)} with the final observation of each episode"
        )
    keep = ~truncated
    if not keep.any():
        raise InputError("it has no next_observations and no episode of 2 steps")
    next_obs = np.append(obs[1:], obs[-1:], axis=0)
    cut_before = np.append(truncated[1:], False) & ~terminated
    fields = fields | {"next_obs": next_obs, "truncated": cut_before}
    return {name: field[keep] for name, field in fields.items()}


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
    M, D, last = (torch.tensor(x, device=reward.device) for x in (returns, discounts, last_rows))
    return M, D, last


# ---- evaluation


def reset_memory(policy: Policy) -> None:
    """Before an episode. A policy that remembers has a method for it."""
    if hasattr(policy, "reset"):
        policy.reset()


def evaluate(
    policy: Policy,
    env_id: str,
    episodes: int,
    seed: int,
    rows: list[list] | None = None,
    make_env: Callable[..., gym.Env] = make_env,
) -> np.ndarray:
    """Undiscounted returns [E] of `episodes` episodes, all stepped side by side.

    Episode i always starts from seed + i, in an environment of its own, so that evaluations compare
    like with like and leave training alone. An episode that is over is not stepped again: no
    autoreset, no fake transition. Every step is appended to rows[i] if `rows` is given. A file that
    wraps its environments gives its own make_env.
    """
    reset_memory(policy)
    envs = [make_env(env_id) for _ in range(episodes)]
    obs = np.stack([env.reset(seed=seed + i)[0] for i, env in enumerate(envs)])  # [E, O]
    returns = np.zeros(episodes)
    running = np.ones(episodes, dtype=bool)
    while running.any():
        action = np.array(policy(obs))  # [E, A], a copy: obs changes below
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


def record(
    policy: Policy,
    env_id: str,
    episodes: int,
    seed: int,
    path: str,
    make_env: Callable[..., gym.Env] = make_env,
) -> np.ndarray:
    """evaluate(), with every step saved in our npz layout: a dataset for any offline algorithm."""
    rows = [[] for _ in range(episodes)]
    returns = evaluate(policy, env_id, episodes, seed, rows, make_env)
    columns = zip(*[row for episode in rows for row in episode])
    arrays = {spellings[0]: np.stack(column) for spellings, column in zip(NAMES.values(), columns)}
    arrays["rewards"] = arrays["rewards"].astype(np.float32)
    save_npz(path, arrays)
    return returns


def save_npz(path: str, arrays: dict[str, np.ndarray]) -> None:
    """Under a temporary name first: a crash leaves the old file or the new one, never a half."""
    temporary = f"{path}.tmp"
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    try:
        with open(temporary, "wb") as file:
            np.savez_compressed(file, **arrays)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def capture_video(
    policy: Policy,
    env_id: str,
    seed: int,
    folder: str,
    make_env: Callable[..., gym.Env] = make_env,
) -> str:
    """Film one episode; returns the path of the mp4."""
    try:
        env = make_env(env_id, render_mode="rgb_array")
        env = gym.wrappers.RecordVideo(env, folder, name_prefix=f"seed-{seed}")
        obs, _ = env.reset(seed=seed)
        reset_memory(policy)
        done = False
        while not done:
            obs, _, terminated, truncated, _ = env.step(policy(obs[None])[0])
            done = terminated or truncated
        env.close()
    except gym.error.DependencyNotInstalled as error:
        raise InputError(f"cannot film {env_id}: {one_line(error)}") from None
    return os.path.join(folder, f"seed-{seed}-episode-0.mp4")
