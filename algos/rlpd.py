"""RLPD: Reinforcement Learning with Prior Data. Online RL, continuous actions.

Paper: "Efficient Online Reinforcement Learning with Offline Data", P. J. Ball, L. Smith,
I. Kostrikov, S. Levine, 2023, arXiv:2302.02948.

Idea: SAC with a dataset beside its replay buffer. (1) Half of every mini-batch is prior data
(mixed_batches). (2) Layer normalisation keeps the critics from extrapolating to absurd values
(EnsembleLayerNorm). (3) There are many critics, and each target is made by a few random ones
(EnsembleCritic, subset_q). (4) There are many updates per step (the loop over G mini-batches).
Nothing is pre-trained, and nothing ties the policy to the data: it can become better than they are.

Equations (a prime marks a target network, i runs over the C critics):
    critics     minimise mean_i (Q_i(s, a) - y)^2, all on the same y
                y = r + gamma (1 - terminated) (min_{i in S} Q'_i(s', a') - alpha log pi(a'|s'))
                a' ~ pi(.|s'), S: Z = num_min_critics of the C, drawn anew for every update
    targets     Q' <- (1 - tau) Q' + tau Q, after every critic update
    actor       minimise alpha log pi(a|s) - mean_i Q_i(s, a),              a ~ pi(.|s)
    temperature minimise alpha (entropy - target_entropy), entropy = mean -log pi(a|s)
    The last two once per G critic updates, on the last of the G mini-batches.

Differences from the paper:
    - The defaults are a smaller set (C, G, width, steps) that fits Pendulum and a laptop.
    - log std is squashed into [-5, 2], not clipped to [-20, 2]: a clip has no gradient outside.
    - The paper chooses per domain whether entropy is part of y and the size of S. Sparse rewards:
      --no-backup-entropy; its AntMaze: --num-min-critics 1 (with a third layer, which is not here).

Shapes: B batch, G updates per step, C critics, Z of them drawn, O observation, A action,
W = 2 O + A + 3 a transition, E evaluation episodes. A scalar per transition is [B], never [B, 1].

Run it:
    python algos/rlpd.py --env-id Pendulum-v1

Without data and with two plain critics it is SAC (at G = 1, with --gradient-updates-per-step 1),
except that the actor follows the mean of the critics, not the minimum, and that the target entropy
is -A / 2, not -A. A way to make datasets:
    python algos/rlpd.py --dataset none --num-critics 2 --no-critic-layer-norm --run-dir runs/sac
    python algos/rlpd.py --evaluate runs/sac/best.pt --record episodes.npz
    python algos/rlpd.py --evaluate runs/sac/checkpoint.pt --record-replay all-that-it-saw.npz

The paper's hyper-parameters, on a Minari dataset:
    python algos/rlpd.py --env-id HalfCheetah-v5 --dataset minari:mujoco/halfcheetah/medium-v0 \\
        --num-critics 10 --hidden-dim 256 --gradient-updates-per-step 20 --learning-rate 3e-4 \\
        --learning-starts 5000 --total-timesteps 250000

Resume it:
    python algos/rlpd.py --resume runs/<run>

The episode that was cut is started anew from its seed, and its actions are played again: exact in
any environment that is a function of seed and actions. A checkpoint has 2 MB (12 at the paper's
size) and 4 W bytes per step in the buffer.
"""

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
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from functools import partial
from typing import BinaryIO, Literal, get_args, get_origin

import tyro

# ---- arguments


@dataclass
class Args:
    env_id: str = "Pendulum-v1"  # Gymnasium environment
    seed: int = 1  # same seed, same machine: same numbers to the last bit
    dataset: str = "auto"  # auto (ours, else none) | none | random[:N] | PATH.npz | minari:ID
    reward_scale: float = 1.0  # training sees reward_scale * reward + reward_shift
    reward_shift: float = 0.0  # see reward_scale
    total_timesteps: int = 2_000  # budget in environment steps
    batch_size: int = 256  # transitions per update
    gamma: float = 0.99  # discount
    learning_rate: float = 1e-3  # of every optimiser (Adam) that has no flag of its own
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"  # the last two fall to 0
    warmup_updates: int = 0  # the learning rate first climbs from 0 over this many updates
    hidden_dim: int = 128  # width of the hidden layers, in every network
    eval_interval: int = 200  # updates (online: environment steps) between evaluations
    eval_episodes: int = 10  # episodes per evaluation
    eval_seed: int = 10_000  # evaluation episode i starts from eval_seed + i
    target_return: float | None = None  # stop when an evaluation's mean return gets there
    patience: int | None = None  # stop after this many evaluations without a better one
    checkpoint_interval: int = 500  # updates (or steps) between saves; Ctrl-C, SIGTERM save, too
    log_interval: int = 100  # updates (or steps) between entries in the logs
    run_dir: str | None = None  # folder of the run [runs/<algo>__<env>__<seed>__<time>]
    resume: str | None = None  # folder of a run to go on with; its flags hold, budgets may change
    evaluate: str | None = None  # checkpoint to evaluate instead of training
    record: str | None = None  # with --evaluate: save its episodes as a dataset, FILE.npz
    capture_video: bool = False  # with --evaluate: film one episode, next to the checkpoint
    quiet: bool = False  # print nothing but errors
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # auto takes a GPU if there is one
    torch_threads: int | None = None  # CPU threads [all cores]
    compile: bool = False  # torch.compile the networks: slow to start; for large ensembles, FQF
    # RLPD only
    offline_batch_ratio: float = 0.5  # share of the dataset in every mini-batch; 0: no prior data
    offline_pretrain_updates: int = 0  # updates on the dataset alone, first; logged as steps <= 0
    data_in_buffer: bool = False  # with ratio 0: start with the dataset in the replay buffer
    buffer_capacity: int = 1_000_000  # steps that the replay buffer holds; then the oldest go
    learning_starts: int = 200  # first steps, with random actions and without updates
    train_frequency: int = 1  # steps between blocks of updates
    gradient_updates_per_step: int = 8  # G, critic updates in a block; then one of actor and alpha
    num_critics: int = 5  # C, size of the ensemble
    num_min_critics: int = 2  # Z, the drawn critics whose minimum is in a target
    critic_layer_norm: bool = True  # layer normalisation before each ReLU of the critics
    backup_entropy: bool = True  # whether -alpha log pi is part of a target
    alpha: float | None = None  # fixed temperature [learned, from 1]
    target_entropy: float | None = None  # entropy that a learned temperature aims at [-A / 2]
    tau: float = 0.005  # how far the targets move towards the networks; 1: hard copy
    record_replay: str | None = None  # with --evaluate: save its replay buffer, FILE.npz


if __name__ == "__main__":  # parsed here for --help and typos, which need not wait for torch
    tyro.cli(Args, description=__doc__)

import gymnasium as gym
import numpy as np
import torch
from torch import nn

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))  # for common.py
import common
from common import InputError

ALGO = "rlpd"


def check_args(args: Args) -> None:
    """Refuse what would waste a run, before it begins."""
    positive = (
        "total_timesteps batch_size reward_scale learning_rate hidden_dim eval_interval "
        "eval_episodes patience checkpoint_interval log_interval torch_threads buffer_capacity "
        "train_frequency gradient_updates_per_step num_critics num_min_critics"
    )
    values = {name: getattr(args, name) for name in positive.split()}
    rules = [(name, "> 0", value is None or value > 0) for name, value in values.items()]
    ratio = args.offline_batch_ratio
    is_pure, is_mixed = ratio in (0, 1), 0.5 < ratio * args.batch_size < args.batch_size - 0.5
    rules += [
        ("seed", "in [0, 2^63)", 0 <= args.seed < 2**63),
        ("eval_seed", "in [0, 2^31)", 0 <= args.eval_seed < 2**31),
        ("reward_scale", "finite", args.reward_scale < math.inf),
        ("reward_shift", "finite", math.isfinite(args.reward_shift)),
        ("learning_rate", "finite", args.learning_rate < math.inf),
        ("gamma", "in [0, 1)", 0 <= args.gamma < 1),
        ("warmup_updates", ">= 0", args.warmup_updates >= 0),
        ("offline_batch_ratio", "in [0, 1]", 0 <= ratio <= 1),
        ("offline_batch_ratio", "0, 1 or enough for a row of each kind", is_pure or is_mixed),
        ("offline_batch_ratio", "0 beside --data-in-buffer", ratio == 0 or not args.data_in_buffer),
        ("offline_pretrain_updates", ">= 0", args.offline_pretrain_updates >= 0),
        ("learning_starts", ">= 0", args.learning_starts >= 0),
        (
            "num_min_critics",
            f"<= num_critics {args.num_critics}",
            args.num_min_critics <= args.num_critics,
        ),
        ("alpha", "in [0, inf)", args.alpha is None or 0 <= args.alpha < math.inf),
        ("target_entropy", "finite", math.isfinite(args.target_entropy or 0)),
        ("alpha", "used without --target-entropy", None in (args.alpha, args.target_entropy)),
        ("tau", "in (0, 1]", 0 < args.tau <= 1),
        ("capture_video", "used with --evaluate", not args.capture_video or args.evaluate),
        ("resume", "used without --evaluate", not args.resume or not args.evaluate),
    ]
    for name in ("record", "record_replay"):
        path = getattr(args, name)
        rules.append((name, "a name that ends in .npz", path is None or path.endswith(".npz")))
        rules.append((name, "used with --evaluate", path is None or args.evaluate))
    for field in fields(args):  # the command line checks choices by itself, Python does not
        if get_origin(field.type) is Literal:
            choices = get_args(field.type)
            rules.append((field.name, f"one of {choices}", getattr(args, field.name) in choices))
    for name, rule, holds in rules:
        if not holds:
            raise InputError(f"{name} must be {rule}, got {getattr(args, name)}")


def check_spaces(env: gym.Env) -> tuple[int, int]:
    """-> O and A, if observations and actions are vectors."""
    obs_space, action_space, env_id = env.observation_space, env.action_space, env.spec.id
    if not isinstance(obs_space, gym.spaces.Box) or len(obs_space.shape) != 1:
        raise InputError(f"{env_id}: observations must be vectors, not {obs_space}")
    if not isinstance(action_space, gym.spaces.Box) or len(action_space.shape) != 1:
        raise InputError(f"{env_id}: actions must be continuous vectors, not {action_space}")
    if not action_space.is_bounded() or not (action_space.low < action_space.high).all():
        raise InputError(f"{env_id}: actions must have finite bounds, not {action_space}")
    return obs_space.shape[0], action_space.shape[0]


# ---- networks


def mlp(input_dim: int, hidden_dim: int, output_dim: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(input_dim, hidden_dim),
        nn.ReLU(inplace=True),
        nn.Linear(hidden_dim, hidden_dim),
        nn.ReLU(inplace=True),
        nn.Linear(hidden_dim, output_dim),
    )


def tanh_gaussian_log_prob(
    mean: torch.Tensor, log_std: torch.Tensor, u: torch.Tensor
) -> torch.Tensor:
    """log pi(tanh(u)) = sum_d (log N(u_d; mean_d, std_d) - log(1 - tanh(u_d)^2)). [B, A] -> [B]"""
    assert mean.shape == log_std.shape == u.shape
    gaussian = -0.5 * ((u - mean) / log_std.exp()) ** 2 - log_std - 0.5 * math.log(2 * math.pi)
    # log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2u)), exact where 1 - tanh(u)^2 rounds to 0
    log_det = 2 * (math.log(2) - u - nn.functional.softplus(-2 * u))
    return (gaussian - log_det).sum(-1)  # [B]


class GaussianActor(nn.Module):
    """pi(.|s): a = tanh(u), u ~ Normal(mean, std) in every dimension. [B, O] -> [B, A], [B, A]"""

    LOG_STD_MIN, LOG_STD_MAX = -5.0, 2.0

    def __init__(self, obs_dim: int, action_dim: int, hidden_dim: int):
        super().__init__()
        self.net = mlp(obs_dim, hidden_dim, 2 * action_dim)
        with torch.no_grad():  # start without a preference, with the same std in every state
            self.net[-1].weight.mul_(0.01)
            self.net[-1].bias.zero_()

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_std = self.net(obs).chunk(2, dim=-1)  # [B, A], [B, A]
        # a clamp has no gradient outside its bounds, and std would stick to the floor
        low, high = self.LOG_STD_MIN, self.LOG_STD_MAX
        return mean, low + 0.5 * (high - low) * (1 + torch.tanh(log_std))


def sample_action(
    mean: torch.Tensor, log_std: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """A reparameterised sample a ~ pi(.|s), so that gradients reach mean and std, and log pi(a|s).
    [B, A], [B, A] -> [B, A], [B]"""
    noise = torch.randn(mean.shape, device=mean.device, generator=generator)
    u = mean + log_std.exp() * noise  # [B, A]
    return torch.tanh(u), tanh_gaussian_log_prob(mean, log_std, u)


class EnsembleLinear(nn.Module):
    """C linear layers that share nothing, in one batched product: y_i = x_i W_i + b_i."""

    def __init__(self, num_members: int, input_dim: int, output_dim: int):
        super().__init__()
        bound = math.sqrt(6 / (input_dim + output_dim))  # Xavier, for the shape of one member
        weight = torch.empty(num_members, input_dim, output_dim).uniform_(-bound, bound)
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.zeros(num_members, 1, output_dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.baddbmm(self.bias, x, self.weight)  # [C, B, input] -> [C, B, output]


class EnsembleLayerNorm(nn.Module):
    """C layer normalisations: over the features of one row of one member, with its own affine."""

    def __init__(self, num_members: int, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_members, 1, dim))
        self.bias = nn.Parameter(torch.zeros(num_members, 1, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normal = nn.functional.layer_norm(x, x.shape[-1:])  # [C, B, dim]
        return torch.addcmul(self.bias, self.weight, normal)


class EnsembleCritic(nn.Module):
    """Q_1(s, a)..Q_C(s, a). Slice i of all parameters is an ordinary MLP, apart from the others;
    stacked, all C of them take one call per layer."""

    def __init__(
        self, num_members: int, obs_dim: int, action_dim: int, hidden_dim: int, layer_norm: bool
    ):
        super().__init__()
        layers = []
        for input_dim in (obs_dim + action_dim, hidden_dim):
            layers.append(EnsembleLinear(num_members, input_dim, hidden_dim))
            if layer_norm:  # features of a fixed norm: Q is bounded by the weights for any action
                layers.append(EnsembleLayerNorm(num_members, hidden_dim))
            layers.append(nn.ReLU(inplace=True))
        self.net = nn.Sequential(*layers, EnsembleLinear(num_members, hidden_dim, 1))

    def forward(self, obs: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """[B, O], [B, A] -> [C, B]"""
        x = torch.cat([obs, action], dim=-1)  # [B, O + A]
        num_members = len(self.net[0].weight)  # or fewer, if called with a part of them
        x = x.expand(num_members, -1, -1)  # [C, B, O + A]
        return self.net(x).squeeze(-1)  # [C, B]


def subset_q(
    critic: EnsembleCritic, members: torch.Tensor, obs: torch.Tensor, action: torch.Tensor
) -> torch.Tensor:
    """Q_i(s, a) of the given members alone, since the others would be thrown away. -> [Z, B]"""
    parameters = {name: stack[members] for name, stack in critic.named_parameters()}
    return torch.func.functional_call(critic, parameters, (obs, action))


# ---- buffer


def as_rows(obs, action, reward, next_obs, terminated, truncated) -> torch.Tensor:
    """n transitions, of the data or of the environment, side by side in one table. -> [n, W]"""
    fields = (obs, action, reward, next_obs, terminated, truncated)
    columns = [np.asarray(field, dtype=np.float32).reshape(len(reward), -1) for field in fields]
    return torch.from_numpy(np.concatenate(columns, axis=1))


class Buffer:
    """A ring of transitions, a row each, so that to draw a batch is one index call. Rewards are
    the environment's own."""

    def __init__(self, capacity: int, obs_dim: int, action_dim: int, device: torch.device):
        self.widths = [obs_dim, action_dim, 1, obs_dim, 1, 1]  # as in as_rows
        self.rows = torch.empty(capacity, sum(self.widths), device=device)  # [capacity, W]
        self.size = self.position = 0

    def add(self, rows: torch.Tensor) -> None:
        """[n, W], n up to the capacity. The oldest rows make room."""
        index = torch.arange(self.position, self.position + len(rows)) % len(self.rows)
        self.rows[index] = rows.to(self.rows.device)
        self.position = (self.position + len(rows)) % len(self.rows)
        self.size = min(self.size + len(rows), len(self.rows))

    def sample(self, num_batches: int, batch_size: int, generator: torch.Generator) -> torch.Tensor:
        """Rows drawn i.i.d. -> [G, B, W]"""
        shape, device = (num_batches, batch_size), self.rows.device
        return self.rows[torch.randint(self.size, shape, device=device, generator=generator)]

    def split(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """[..., W] -> [..., O], [..., A], [...], [..., O], [...], [...]"""
        obs, action, reward, next_obs, terminated, truncated = rows.split(self.widths, dim=-1)
        reward, terminated, truncated = (x.squeeze(-1) for x in (reward, terminated, truncated))
        return [obs, action, reward, next_obs, terminated, truncated]

    def state(self) -> dict:
        """What a checkpoint needs: a copy of the filled part, not of the capacity."""
        return {"rows": self.rows[: self.size].clone(), "position": self.position}

    def load_state(self, state: dict) -> None:
        self.size, self.position = len(state["rows"]), state["position"]
        self.rows[: self.size] = state["rows"].to(self.rows.device)


def mixed_batches(
    first: Buffer | None,
    second: Buffer,
    num_batches: int,
    batch_size: int,
    num_first: int,
    generator: torch.Generator,
) -> torch.Tensor:
    """G mini-batches, each of num_first rows of the first buffer, then rows of the second.
    -> [G, B, W]

    Drawn per mini-batch: G B rows, first of the one, then of the other, cut into G, would give
    some mini-batches that are all of one kind.
    """
    parts = []
    if num_first > 0:
        parts.append(first.sample(num_batches, num_first, generator))
    if num_first < batch_size:
        parts.append(second.sample(num_batches, batch_size - num_first, generator))
    return torch.cat(parts, dim=1)


# ---- losses


def soft_target(
    reward: torch.Tensor,
    terminated: torch.Tensor,
    next_q: torch.Tensor,
    next_log_prob: torch.Tensor,
    alpha: torch.Tensor,
    gamma: float,
    backup_entropy: bool,
) -> torch.Tensor:
    """y = r + gamma (1 - terminated) (min_i Q'_i(s', a') - alpha log pi(a'|s')).
    [B], [B], [Z, B], [B], [] -> [B]

    Truncation does not appear here: a truncated episode would have gone on, so it bootstraps.
    """
    assert reward.shape == terminated.shape == next_log_prob.shape == next_q.shape[1:]
    next_value = next_q.min(dim=0).values  # [B]
    if backup_entropy:
        next_value = next_value - alpha * next_log_prob
    return reward + gamma * (1 - terminated) * next_value  # [B]


def rlpd_loss(q: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """L_Q = mean_i mean_b (Q_i(s_b, a_b) - y_b)^2. [C, B], [B] -> scalar"""
    assert q.dim() == 2 and q.shape[1:] == target.shape
    return ((q - target) ** 2).mean()


def policy_loss(log_prob: torch.Tensor, q: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
    """L_pi = mean_b (alpha log pi(a_b|s_b) - mean_i Q_i(s_b, a_b)). [B], [C, B], [] -> scalar

    SAC takes the minimum here, too; RLPD keeps it for the targets, which bootstrap from themselves.
    """
    assert q.dim() == 2 and q.shape[1:] == log_prob.shape
    return (alpha * log_prob - q.mean(dim=0)).mean()


def temperature_loss(
    log_alpha: torch.Tensor, log_prob: torch.Tensor, target_entropy: float
) -> torch.Tensor:
    """L_alpha = alpha (H - target_entropy): alpha rises while entropy is too low. [], [B] -> []"""
    assert log_alpha.dim() == 0 and log_prob.dim() == 1
    entropy = -log_prob.detach().mean()
    return log_alpha.exp() * (entropy - target_entropy)


# ---- checkpoint


def save_atomically(path: str, write: Callable[[BinaryIO], None]) -> None:
    """The file gets its name only when it is complete: a crash in the middle of a save, or a full
    disk, leaves the file before it as it was."""
    temporary = f"{path}.tmp"
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch.save turns a full disk into a RuntimeError
        if os.path.exists(temporary):
            os.remove(temporary)
        reason = error.strerror if isinstance(error, OSError) else "no space left on the disk?"
        raise OSError(f"cannot write {path}: {reason}; what was saved before is intact") from None


def load_checkpoint(path: str) -> dict:
    if os.path.isdir(path):
        raise InputError(f"{path} is a folder; a checkpoint is a file, for example {path}/best.pt")
    if os.path.isfile(os.path.dirname(path)):
        raise InputError(f"{os.path.dirname(path)} is a file; --resume takes the folder of a run")
    if not os.path.isfile(path):
        raise InputError(f"there is no checkpoint {path}")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        algo = checkpoint["algo"]
    except Exception as error:  # torch raises many types for a file that it cannot read
        reason = common.one_line(error).split(".")[0]
        raise InputError(f"{path} is not a complete checkpoint of ours ({reason})") from None
    if algo != ALGO:
        raise InputError(f"{path} is a checkpoint of {algo}, not of {ALGO}")
    if checkpoint["args"].keys() != asdict(Args()).keys():
        raise InputError(f"{path} was made by another version of {ALGO}.py: its flags differ")
    return checkpoint


def load_policy(path: str, **overrides) -> common.Policy:
    """The policy of a checkpoint: observations -> actions, both batches in the environment's units.
    `overrides` are flags, for example device."""
    checkpoint = load_checkpoint(path)
    args = replace(Args(**checkpoint["args"]), **overrides)
    env, device = common.make_env(args.env_id), pick_device(args.device)
    actor = GaussianActor(*check_spaces(env), args.hidden_dim).to(device)
    actor.load_state_dict(checkpoint["actor"])
    return make_policy(actor, env.action_space, device)


def make_policy(
    actor: GaussianActor, action_space: gym.Space, device: torch.device
) -> common.Policy:
    """What is evaluated: tanh(mean), without noise."""

    @torch.no_grad()
    def policy(obs: np.ndarray) -> np.ndarray:
        mean, _ = actor(torch.as_tensor(obs, dtype=torch.float32, device=device))  # [E, A]
        return common.unnormalize_action(torch.tanh(mean).cpu().numpy(), action_space)

    return policy


def save_replay(checkpoint: dict, env: gym.Env, path: str) -> int:
    """The replay buffer of a checkpoint as a dataset, oldest step first. -> number of its rows"""
    rows, position = checkpoint["buffer"]["rows"], checkpoint["buffer"]["position"]
    if len(rows) == 0:
        raise InputError("the replay buffer is still empty")
    buffer = Buffer(len(rows), *check_spaces(env), torch.device("cpu"))
    fields = dict(zip(common.NAMES, buffer.split(torch.roll(rows, -position, dims=0))))
    arrays = {common.NAMES[name][0]: field.numpy() for name, field in fields.items()}
    arrays["actions"] = common.unnormalize_action(arrays["actions"], env.action_space)
    for name in ("terminations", "truncations"):
        arrays[name] = arrays[name] > 0
    common.save_npz(path, arrays)
    return len(rows)


# ---- training


def pick_device(device: str) -> torch.device:
    if device == "auto":
        gpus = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
        device = next((name for name, is_here in gpus.items() if is_here), "cpu")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError):
        raise InputError(f"device {device} is not available here; try --device cpu") from None


@torch.no_grad()
def update_target(target: nn.Module, network: nn.Module, tau: float) -> None:
    """target <- (1 - tau) target + tau network, for all parameters in one call."""
    torch._foreach_lerp_(list(target.parameters()), list(network.parameters()), tau)


def lr_factor(step: int, total: int, schedule: str, warmup: int) -> float:
    """What the learning rate is multiplied with at update `step` (1 is the first)."""
    if step <= warmup:
        return step / warmup
    progress = (step - 1 - warmup) / max(1, total - warmup)  # 0 at first, just below 1 at the end
    if schedule == "linear":
        return 1 - progress
    if schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    return 1.0


def keep_freed_memory() -> None:
    """glibc gives freed activations back to the OS and takes them again page by page. Keeping them
    makes an update about a quarter faster (benchmark/NOTES.md); other systems need no such help."""
    trim_threshold, mmap_threshold = -1, -3  # their numbers in malloc.h
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt"):
        ctypes.CDLL(None).mallopt(mmap_threshold, 32 * 2**20)
        ctypes.CDLL(None).mallopt(trim_threshold, 256 * 2**20)


class Logger:
    """metrics.csv and TensorBoard for the record; a progress bar, or plain lines, for the eye."""

    def __init__(
        self, run_dir: str, total: int, quiet: bool, step=0, seconds=0.0, num_bytes=0, last_eval=0.0
    ):
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        self.first_step, self.total, self.last_eval = step, total, last_eval
        self.first_second, self.start = seconds, time.perf_counter() - seconds
        self.quiet, self.bar = quiet, sys.stdout.isatty() and not quiet
        self.file = open(os.path.join(run_dir, "metrics.csv"), "a", newline="")  # noqa: SIM115
        # rows after the checkpoint are logged once more
        self.file.truncate(min(num_bytes, self.file.tell()))
        self.csv = csv.writer(self.file)
        if num_bytes == 0:
            self.csv.writerow(["step", "seconds", "key", "value"])
        self.tensorboard = SummaryWriter(run_dir, purge_step=step + 1 if num_bytes > 0 else None)

    def seconds(self) -> float:
        return time.perf_counter() - self.start

    def speed(self, step: int) -> float:
        return (step - self.first_step) / (self.seconds() - self.first_second)

    def position(self, step: int) -> dict:
        """What a resumed run's logger starts from."""
        position = {"step": step, "seconds": self.seconds(), "num_bytes": self.file.tell()}
        return position | {"last_eval": self.last_eval}

    def scalars(self, step: int, values: dict[str, float]) -> None:
        for key, value in values.items():
            self.csv.writerow([step, f"{self.seconds():.3f}", key, f"{value:.7g}"])
            self.tensorboard.add_scalar(key, value, step)
        self.file.flush()

    def evaluation(self, step: int, returns: np.ndarray) -> None:
        self.last_eval, names = returns.mean().item(), ("mean", "std", "min", "max")
        self.scalars(step, {f"eval/return_{name}": getattr(returns, name)() for name in names})
        self.line(
            f"{step:>9,}/{self.total:,}  eval return {returns.mean():8.1f} +- {returns.std():.1f}"
            f" ({len(returns)} episodes)  {self.seconds():.0f} s"
        )

    def progress(self, step: int) -> None:
        if self.bar:
            filled, speed = "#" * (24 * step // self.total), self.speed(step)
            eta = timedelta(seconds=round((self.total - step) / speed))
            bar = f"[{filled:.<24}] {step:,}/{self.total:,}  {speed:.0f}/s"
            print(f"\r\033[K{bar}  eval {self.last_eval:.1f}  ETA {eta}", end="", flush=True)

    def line(self, text: str) -> None:
        if not self.quiet:
            print("\r\033[K" + text if self.bar else text, flush=True)

    def close(self) -> None:
        self.file.close()
        self.tensorboard.close()


class StopSignal:
    """Ctrl-C and SIGTERM are noted for the loop to see, so that they cannot tear an update apart.
    A second one kills the run at once."""

    def __enter__(self):
        self.number = 0
        in_main_thread = threading.current_thread() is threading.main_thread()  # Python's condition
        numbers = (signal.SIGINT, signal.SIGTERM) if in_main_thread else ()
        self.previous = {number: signal.signal(number, self.note) for number in numbers}
        return self

    def note(self, number: int, frame) -> None:
        self.number = number
        for caught in self.previous:  # the next one kills
            signal.signal(caught, signal.SIG_DFL)

    def __exit__(self, *error) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)


RESUME_MAY_CHANGE = (  # the dataset may lie elsewhere now: its fingerprint must be the same
    "total_timesteps eval_interval checkpoint_interval log_interval target_return "
    "patience quiet resume dataset"
)
EVALUATE_MAY_CHANGE = (
    "eval_episodes eval_seed record record_replay capture_video quiet device torch_threads evaluate"
)


def num_blocks(step: int, args: Args) -> int:
    """Blocks of updates up to an environment step: one per train_frequency, after the start."""
    frequency = args.train_frequency
    return step // frequency - min(step, args.learning_starts) // frequency


def start_episode(env: gym.Env, seed: int, episode: int, actions: list) -> tuple:
    """Episode k always starts from the seed that (seed, k) makes. A resumed run then plays the
    actions again that it took before it stopped. -> observation, return so far"""
    episode_seed = np.random.SeedSequence((seed, episode)).generate_state(1).item()
    obs, _ = env.reset(seed=episode_seed)
    episode_return = 0.0
    for action in actions:
        obs, reward, _, _, _ = env.step(action)
        episode_return += float(reward)
    return np.array(obs), episode_return


def check_unchanged(args: Args, saved: dict, may_change: str, mode: str) -> None:
    """A flag that is typed beside --resume or --evaluate either works or is refused."""
    for name, value in asdict(args).items():
        if value != saved[name] and name not in may_change.split():
            raise InputError(f"{mode} keeps {name} = {saved[name]} of the run, got {value}")


def train(args: Args) -> dict[str, float]:
    # setup
    check_args(args)
    keep_freed_memory()
    if args.torch_threads is not None:
        torch.set_num_threads(args.torch_threads)
    device = pick_device(args.device)
    args = replace(args, device=device.type)  # a resumed run must not change it: bits would differ
    env = common.make_env(args.env_id)
    obs_dim, action_dim = check_spaces(env)
    total, total_blocks = args.total_timesteps, num_blocks(args.total_timesteps, args)
    total_updates = args.offline_pretrain_updates + total_blocks * args.gradient_updates_per_step
    if total_blocks == 0:
        raise InputError(
            f"total_timesteps {total} is spent before the first update: lower --learning-starts"
            f" ({args.learning_starts}) or --train-frequency ({args.train_frequency})"
        )
    now, env_name = time.strftime("%Y%m%d-%H%M%S"), re.sub(r"\W", "-", args.env_id)
    run_dir = args.resume or args.run_dir or f"runs/{ALGO}__{env_name}__{args.seed}__{now}"
    checkpoint_path, best_path = (f"{run_dir}/{name}.pt" for name in ("checkpoint", "best"))
    if args.resume:
        checkpoint = load_checkpoint(checkpoint_path)
        check_unchanged(args, checkpoint["args"], RESUME_MAY_CHANGE, "--resume")
        if "generator" not in checkpoint:
            raise InputError(f"{checkpoint_path} is a best.pt: it acts, but it cannot be resumed")
    elif os.path.exists(checkpoint_path):
        raise InputError(f"{run_dir} holds a run already: --resume it, or give another --run-dir")
    torch.manual_seed(args.seed)  # for the initial weights
    generator = torch.Generator(device).manual_seed(args.seed)  # for all else that training draws

    # data
    spec, num_offline = args.dataset, round(args.offline_batch_ratio * args.batch_size)
    if spec == "auto" and not (common.SHIPPED / f"{env.spec.id}.npz").is_file():
        spec = "none"
    if spec == "none":
        num_offline = 0
        if args.offline_pretrain_updates > 0 or args.data_in_buffer:
            name = "data_in_buffer" if args.data_in_buffer else "offline_pretrain_updates"
            raise InputError(f"{name} needs a dataset, and {args.env_id} has none: give --dataset")
    try:
        online = Buffer(args.buffer_capacity, obs_dim, action_dim, device)
    except (RuntimeError, TypeError):
        raise InputError(f"buffer_capacity {args.buffer_capacity} is too much memory") from None
    offline, fingerprint, first_scalars = None, 0, {}
    prior_data = "no prior data" if spec == "none" else "prior data are not used at ratio 0"
    if num_offline > 0 or args.offline_pretrain_updates > 0 or args.data_in_buffer:
        dataset = common.load_dataset(spec, env, args.seed)
        fingerprint, returns = dataset.fingerprint(), dataset.episode_returns
        first_scalars = {"stats/behaviour_return": returns.mean()}
        prior_data = (
            f"{len(dataset):,} transitions of {dataset.source}, {len(returns)} episodes,"
            f" mean return {returns.mean():.1f}"
        )
        offline = Buffer(len(dataset), obs_dim, action_dim, device)
        offline.add(as_rows(*(getattr(dataset, name) for name in common.NAMES)))
        del dataset  # a large one is held once
    if args.data_in_buffer:
        if offline.size > args.buffer_capacity:
            raise InputError(f"buffer_capacity must be >= the {offline.size} rows of the dataset")
        online.add(offline.rows)

    # networks
    actor = GaussianActor(obs_dim, action_dim, args.hidden_dim).to(device)
    sizes = (args.num_critics, obs_dim, action_dim, args.hidden_dim, args.critic_layer_norm)
    critic = EnsembleCritic(*sizes).to(device)
    target_critic = deepcopy(critic)
    initial_alpha = 1.0 if args.alpha is None else args.alpha
    log_alpha = nn.Parameter(torch.tensor(initial_alpha, device=device).log())
    target_entropy = -action_dim / 2 if args.target_entropy is None else args.target_entropy
    actor_opt = torch.optim.Adam(actor.parameters(), args.learning_rate, fused=True)
    critic_opt = torch.optim.Adam(critic.parameters(), args.learning_rate, fused=True)
    alpha_opt = torch.optim.Adam([log_alpha], args.learning_rate, fused=True)
    parts = {
        "actor": actor,
        "critic": critic,
        "target_critic": target_critic,
        "actor_opt": actor_opt,
        "critic_opt": critic_opt,
        "alpha_opt": alpha_opt,
    }

    # resume
    step = -args.offline_pretrain_updates  # up to 0: updates on the data; from 1 on: env steps
    num_updates, best_return, evals_since_best = 0, -math.inf, 0
    episode, episode_actions = 0, []
    log_position = {"step": step}
    if args.resume:
        if checkpoint["fingerprint"] != fingerprint:
            raise InputError(f"{args.dataset} is not the data that the run began with")
        if checkpoint["step"] >= total:
            done = f"{run_dir} is at step {checkpoint['step']} already"
            raise InputError(f"{done}: give it a larger budget")
        for name, part in parts.items():
            part.load_state_dict(checkpoint[name])
        log_alpha.data.copy_(checkpoint["log_alpha"])
        generator.set_state(checkpoint["generator"])
        online.load_state(checkpoint["buffer"])
        step, log_position = checkpoint["step"], checkpoint["log_position"]
        num_updates, episode = checkpoint["num_updates"], checkpoint["episode"]
        episode_actions = list(checkpoint["episode_actions"].clone().numpy())
        best_return, evals_since_best = checkpoint["best_return"], checkpoint["evals_since_best"]
    current_obs, episode_return = start_episode(env, args.seed, episode, episode_actions)
    is_fresh, first_update = not args.resume, num_updates
    if args.resume:
        if not np.array_equal(current_obs, checkpoint["current_obs"].numpy()):
            raise InputError(f"{args.env_id} plays another episode from the same seed: no resume")
        del checkpoint  # with a copy of the buffer
    args = replace(args, resume=None)
    if args.compile:
        for network in (actor, critic):
            network.compile()

    try:
        os.makedirs(run_dir, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot use {run_dir} as run_dir: {error.strerror}") from None
    args_json = json.dumps(asdict(args), indent=2).encode()
    save_atomically(f"{run_dir}/args.json", lambda file: file.write(args_json))
    logger = Logger(run_dir, total, args.quiet, **log_position)
    logger.line(f"{ALGO} on {args.env_id}: {prior_data}\nrun: {run_dir} on {device}")
    if is_fresh:
        logger.scalars(step, first_scalars)
        policy = make_policy(actor, env.action_space, device)
        eval_returns = common.evaluate(policy, args.env_id, args.eval_episodes, args.eval_seed)
        logger.evaluation(step, eval_returns)

    # loop
    stop_reason, exit_signal = "", 0
    with StopSignal() as stop_signal:
        while not stop_reason:
            step += 1

            # 1. act, and remember
            if step > 0:
                if step <= args.learning_starts:
                    taken = 2 * torch.rand(action_dim, device=device, generator=generator) - 1
                else:
                    obs = torch.as_tensor(current_obs, dtype=torch.float32, device=device)
                    with torch.no_grad():
                        taken, _ = sample_action(*actor(obs), generator)  # [A]
                taken = taken.cpu().numpy()
                episode_actions.append(common.unnormalize_action(taken, env.action_space))
                new_obs, new_reward, terminated, truncated, _ = env.step(episode_actions[-1])
                transition = (current_obs, taken, new_reward, new_obs, terminated, truncated)
                online.add(as_rows(*([field] for field in transition)))
                current_obs, episode_return = np.array(new_obs), episode_return + float(new_reward)
                if terminated or truncated:
                    logger.scalars(step, {"charts/episodic_return": episode_return})
                    episode, episode_actions = episode + 1, []
                    current_obs, episode_return = start_episode(env, args.seed, episode, [])

            # 2. draw G mini-batches, each with its share of prior data; or none, for now
            num_batches, num_prior = args.gradient_updates_per_step, num_offline
            if step <= 0:
                num_batches, num_prior = 1, args.batch_size
            elif step <= args.learning_starts or step % args.train_frequency != 0:
                num_batches = 0
            if num_batches > 0 and num_updates == first_update:  # random steps are no measure
                logger.first_step, logger.first_second = step - 1, logger.seconds()
            rows = mixed_batches(
                offline, online, num_batches, args.batch_size, num_prior, generator
            )  # [G, B, W]
            alpha = log_alpha.detach().exp()

            # 3. critics: G updates; truncated, the last field, has no part in a target
            for obs, action, reward, next_obs, terminated, _ in zip(*online.split(rows)):
                num_updates += 1
                factor = lr_factor(
                    num_updates, total_updates, args.lr_schedule, args.warmup_updates
                )
                for opt in (actor_opt, critic_opt, alpha_opt):
                    opt.param_groups[0]["lr"] = args.learning_rate * factor
                reward = args.reward_scale * reward + args.reward_shift  # of both kinds alike
                with torch.no_grad():
                    next_action, next_log_prob = sample_action(*actor(next_obs), generator)
                    members = torch.randperm(args.num_critics, device=device, generator=generator)
                    members = members[: args.num_min_critics]  # [Z], the set S
                    next_q = subset_q(target_critic, members, next_obs, next_action)  # [Z, B]
                    target = soft_target(
                        reward,
                        terminated,
                        next_q,
                        next_log_prob,
                        alpha,
                        args.gamma,
                        args.backup_entropy,
                    )  # [B]
                q = critic(obs, action)  # [C, B]
                critic_loss = rlpd_loss(q, target)
                critic_opt.zero_grad()
                critic_loss.backward()
                critic_opt.step()
                update_target(target_critic, critic, args.tau)

            if num_batches > 0:
                # 4. actor: once per block, on obs of its last mini-batch
                critic.requires_grad_(False)  # gradients go through the critics, not into them
                action, log_prob = sample_action(*actor(obs), generator)  # [B, A], [B]
                actor_loss = policy_loss(log_prob, critic(obs, action), alpha)
                actor_opt.zero_grad()
                actor_loss.backward()
                actor_opt.step()
                critic.requires_grad_(True)

                # 5. temperature
                if args.alpha is None:
                    alpha_loss = temperature_loss(log_alpha, log_prob, target_entropy)
                    alpha_opt.zero_grad()
                    alpha_loss.backward()
                    alpha_opt.step()

            # 6. log, evaluate, stop, save
            # blocks need not fall on multiples of log_interval: log if one went by since the last
            last_block = step - (1 if step <= 0 else args.train_frequency)
            if num_batches > 0 and step // args.log_interval > last_block // args.log_interval:
                seconds = logger.seconds() - logger.first_second
                env_steps = max(step, 0) - max(logger.first_step, 0)
                td_error = (q - target).abs().mean(dim=0)  # [B]
                statistics = {
                    "charts/env_steps_per_second": env_steps / seconds,
                    "charts/updates_per_second": (num_updates - first_update) / seconds,
                    "charts/learning_rate": actor_opt.param_groups[0]["lr"],
                    "losses/critic": critic_loss.item(),
                    "losses/actor": actor_loss.item(),
                    "stats/alpha": alpha.item(),
                    "stats/policy_entropy": -log_prob.mean().item(),
                    "stats/target_mean": target.mean().item(),
                    "stats/q_max": q.max().item(),
                    "stats/q_spread": q.std(dim=0, correction=0).mean().item(),
                }
                for name, part in (
                    ("offline", slice(num_prior)),
                    ("online", slice(num_prior, None)),
                ):
                    if len(td_error[part]) > 0:
                        statistics[f"stats/q_{name}"] = q[:, part].mean().item()
                        statistics[f"stats/td_error_{name}"] = td_error[part].mean().item()
                logger.scalars(step, statistics)
                logger.progress(step)
                for name in ("losses/critic", "losses/actor"):
                    if not math.isfinite(statistics[name]):
                        message = f"{name} is {statistics[name]} at step {step}: it diverged"
                        raise InputError(f"{message}; lower --learning-rate or --reward-scale")
            is_best = False
            if step == total:
                stop_reason = "the budget is spent"
            # evaluate if there was an update since: else patience would run out in random steps
            last_eval = max(step - args.eval_interval, 0)
            is_new = step <= 0 or num_blocks(step, args) > num_blocks(last_eval, args)
            if step == total or (is_new and step % args.eval_interval == 0):
                policy = make_policy(actor, env.action_space, device)
                eval_returns = common.evaluate(
                    policy, args.env_id, args.eval_episodes, args.eval_seed
                )
                logger.evaluation(step, eval_returns)
                is_best = eval_returns.mean() > best_return
                evals_since_best = 0 if is_best else evals_since_best + 1
                best_return = max(best_return, eval_returns.mean().item())
                if args.target_return is not None and eval_returns.mean() >= args.target_return:
                    stop_reason = f"an evaluation reached the target of {args.target_return}"
                elif args.patience is not None and evals_since_best >= args.patience:
                    stop_reason = f"the last {args.patience} evaluations were not better"
            if stop_signal.number and not stop_reason:
                stop_reason = f"{signal.Signals(stop_signal.number).name} was received"
                exit_signal = stop_signal.number
            if is_best or stop_reason or step % args.checkpoint_interval == 0:
                policy_state = {"algo": ALGO, "args": asdict(args), "step": step}
                policy_state |= {"actor": actor.state_dict()}
            if is_best:
                save_atomically(best_path, partial(torch.save, policy_state))
            if stop_reason or step % args.checkpoint_interval == 0:
                checkpoint = policy_state | {
                    "num_updates": num_updates,
                    "log_alpha": log_alpha.detach(),
                    "buffer": online.state(),
                    "episode": episode,
                    "episode_actions": torch.from_numpy(np.array(episode_actions)),
                    "current_obs": torch.from_numpy(current_obs),
                    "best_return": best_return,
                    "evals_since_best": evals_since_best,
                    "fingerprint": fingerprint,
                    "log_position": logger.position(step),
                    "generator": generator.get_state(),
                    **{name: part.state_dict() for name, part in parts.items()},
                }
                save_atomically(checkpoint_path, partial(torch.save, checkpoint))
                del checkpoint  # with a copy of the buffer

    command, run = f"python {sys.argv[0]}", shlex.quote(run_dir)
    more = "" if step < total else " --total-timesteps <more>"
    saved = "best.pt" if best_return > -math.inf else "checkpoint.pt"
    logger.line(
        f"stopped at step {step:,}: {stop_reason}"
        f"\nresume: {command} --resume {run}{more}\nevaluate: {command} --evaluate {run}/{saved}"
    )
    logger.close()
    evaluations = {"eval/return_mean": logger.last_eval, "eval/best_return": best_return}
    return {"step": step, "signal": exit_signal, **evaluations}


def evaluate_checkpoint(args: Args) -> dict[str, float]:
    """--evaluate: the checkpoint's policy on fresh episodes, which can be recorded and filmed."""
    check_args(args)
    checkpoint = load_checkpoint(args.evaluate)
    check_unchanged(args, checkpoint["args"], EVALUATE_MAY_CHANGE, "--evaluate")
    if args.record_replay and "buffer" not in checkpoint:
        raise InputError(f"{args.evaluate} is a best.pt: the replay buffer is in checkpoint.pt")
    if args.torch_threads is not None:
        torch.set_num_threads(args.torch_threads)
    overrides = {name: getattr(args, name) for name in EVALUATE_MAY_CHANGE.split()}
    policy = load_policy(args.evaluate, **overrides)
    episodes = (policy, args.env_id, args.eval_episodes, args.eval_seed)
    returns = common.record(*episodes, args.record) if args.record else common.evaluate(*episodes)
    report = (
        f"{args.evaluate}: return mean {returns.mean():.1f} std {returns.std():.1f}"
        f" min {returns.min():.1f} max {returns.max():.1f} over {len(returns)} episodes"
    )
    if args.record:
        report += f"\nrecorded in {args.record}"
    if args.record_replay:
        num_rows = save_replay(checkpoint, common.make_env(args.env_id), args.record_replay)
        report += f"\nreplay buffer, {num_rows:,} transitions: {args.record_replay}"
    if args.capture_video:
        folder = os.path.join(os.path.dirname(args.evaluate), "videos")
        report += f"\nfilmed in {common.capture_video(*episodes[:2], args.eval_seed, folder)}"
    if not args.quiet:
        print(report)
    return {"eval/return_mean": returns.mean().item(), "signal": 0}


def parse_args() -> Args:
    """Beside --resume or --evaluate, the flags of that run are the defaults."""
    args = tyro.cli(Args)
    if args.resume or args.evaluate:
        saved = load_checkpoint(args.evaluate or os.path.join(args.resume, "checkpoint.pt"))["args"]
        typed = {name: getattr(args, name) for name in ("resume", "evaluate", "quiet")}
        args = tyro.cli(Args, default=Args(**saved | typed))
    return args


def main() -> int:
    """0: done; 1: a file could not be written; 2: wrong input; 128 + signal: stopped by it."""
    try:
        args = parse_args()
        result = evaluate_checkpoint(args) if args.evaluate else train(args)
    except InputError as error:
        print(f"{ALGO}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{ALGO}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{ALGO}: stopped before there was anything to save", file=sys.stderr)
        return 130
    return 128 + result["signal"] if result["signal"] else 0


if __name__ == "__main__":
    sys.exit(main())
