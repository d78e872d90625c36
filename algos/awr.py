"""AWR: Advantage-Weighted Regression. Offline RL, continuous or discrete actions.

Paper: "Advantage-Weighted Regression: Simple and Scalable Off-Policy Reinforcement Learning",
X. B. Peng, A. Kumar, G. Zhang, S. Levine, 2019, arXiv:1910.00177.

Idea: clone the actions of a fixed dataset, each weighted by how much better things went after it
than V expects in its state. Two regressions, nothing else: one for V, one for the policy.

Equations:
    return      R_t = r_t + gamma ((1 - lambda) V(s_{t+1}) + lambda R_{t+1})
                on the last step of an episode: r if it terminated, r + gamma V(s') if truncated
    value       minimise (R - V(s))^2 / 2
    advantage   A = R - V(s), with V after its step
                Z = (A - mean) / std, mean and std of A over the whole dataset
    actor       maximise min(exp(Z / beta), max_weight) log pi(a|s); no gradient through the weight

Differences from the paper:
    - Offline: the data is given and stays. The paper collects more in every iteration; here, one
      iteration is refresh_interval updates, after which R, mean and std are computed again. V
      bootstraps once per iteration: lower it if lambda is small or episodes are short fragments.
    - lambda = 1, the plain discounted return, which trusts V only where an episode was cut. The
      paper's value: --td-lambda 0.95.
    - Advantages are standardised, as in the authors' code, so that beta = 1 fits any reward. The
      paper's text has beta = 0.05 for raw advantages: --no-normalize-advantage --beta 0.05.
    - An update is one step of V and one of the policy; the paper takes hundreds of the one, then
      hundreds of the other. V has a head start (value_warmup): before, its advantages are noise.
    - A learned std, Adam and two layers of 256 instead of a fixed std, SGD and 128 x 64 units:
      today's defaults, the same in all our offline files.
    - Observations are standardised with the mean and std of the dataset.

Shapes: N rows of data, B batch, O observation, A action (discrete: one-hot), E evaluation episodes.
A scalar per transition is [B], never [B, 1].

Run it:
    python algos/awr.py --env-id Pendulum-v1
    python algos/awr.py --env-id CartPole-v1
    python algos/awr.py --beta inf   (behaviour cloning: every weight is exactly 1)

The authors' lambda and step size, on a Minari dataset:
    python algos/awr.py --env-id HalfCheetah-v5 --dataset minari:mujoco/halfcheetah/medium-v0 \\
        --td-lambda 0.95 --learning-rate 5e-5 --refresh-interval 200 --total-updates 500000

Resume it:
    python algos/awr.py --resume runs/<run>   (a checkpoint costs 2 MB + 4 bytes per row of data)
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
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from functools import partial
from typing import BinaryIO, Literal, NamedTuple, get_args, get_origin

import tyro

# ---- arguments


@dataclass
class Args:
    env_id: str = "Pendulum-v1"  # Gymnasium environment
    seed: int = 1  # same seed, same machine: same numbers to the last bit
    dataset: str = "auto"  # auto (ours, else random) | random | random:N | PATH.npz | minari:ID
    reward_scale: float = 1.0  # training sees reward_scale * reward + reward_shift
    reward_shift: float = 0.0  # see reward_scale
    normalize_reward: bool = False  # first scale rewards so that the data's returns span 1000
    total_updates: int = 10_000  # budget in gradient updates
    total_epochs: int | None = None  # budget in epochs of N / batch_size updates, instead
    batch_size: int = 256  # transitions per update
    gamma: float = 0.99  # discount
    learning_rate: float = 3e-4  # of every optimiser (Adam) that has no flag of its own
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"  # the last two fall to 0
    warmup_updates: int = 0  # the learning rate first climbs from 0 over this many updates
    hidden_dim: int = 256  # width of the hidden layers, in every network
    eval_interval: int = 1_000  # updates (online: environment steps) between evaluations
    eval_episodes: int = 10  # episodes per evaluation
    eval_seed: int = 10_000  # evaluation episode i starts from eval_seed + i
    target_return: float | None = None  # stop when an evaluation's mean return gets there
    patience: int | None = None  # stop after this many evaluations without a better one
    checkpoint_interval: int = 5_000  # updates (or steps) between saves; Ctrl-C, SIGTERM save, too
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
    # AWR only
    beta: float = 1.0  # temperature of the weights exp(A / beta); inf: behaviour cloning
    max_weight: float = 20.0  # upper clip of exp weights
    normalize_advantage: bool = True  # standardise A over the dataset
    td_lambda: float = 1.0  # lambda of the returns; 1: discounted sum of rewards, 0: one-step TD
    refresh_interval: int = 1_000  # updates between new returns; lower it if lambda is small
    value_warmup: int = 1_000  # the first updates train V alone


if __name__ == "__main__":  # parsed here for --help and typos, which need not wait for torch
    tyro.cli(Args, description=__doc__)

import gymnasium as gym
import numpy as np
import torch
from torch import nn

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))  # for common.py
import common
from common import InputError

ALGO = "awr"


def check_args(args: Args) -> None:
    """Refuse what would waste a run, before it begins."""
    positive = (
        "total_updates total_epochs batch_size reward_scale learning_rate hidden_dim eval_interval "
        "eval_episodes patience checkpoint_interval log_interval torch_threads beta "
        "refresh_interval"
    )
    values = {name: getattr(args, name) for name in positive.split()}
    rules = [(name, "> 0", value is None or value > 0) for name, value in values.items()]
    rules += [
        ("seed", "in [0, 2^63)", 0 <= args.seed < 2**63),
        ("eval_seed", "in [0, 2^31)", 0 <= args.eval_seed < 2**31),
        ("reward_scale", "finite", args.reward_scale < math.inf),
        ("reward_shift", "finite", math.isfinite(args.reward_shift)),
        ("learning_rate", "finite", args.learning_rate < math.inf),
        ("gamma", "in [0, 1)", 0 <= args.gamma < 1),
        ("warmup_updates", ">= 0", args.warmup_updates >= 0),
        ("max_weight", ">= 1", args.max_weight >= 1),
        ("td_lambda", "in [0, 1]", 0 <= args.td_lambda <= 1),
        ("value_warmup", ">= 0", args.value_warmup >= 0),
        ("record", "a name that ends in .npz", (args.record or ".npz").endswith(".npz")),
        ("record", "used with --evaluate", not args.record or args.evaluate),
        ("capture_video", "used with --evaluate", not args.capture_video or args.evaluate),
        ("resume", "used without --evaluate", not args.resume or not args.evaluate),
    ]
    for field in fields(args):  # the command line checks choices by itself, Python does not
        if get_origin(field.type) is Literal:
            choices = get_args(field.type)
            rules.append((field.name, f"one of {choices}", getattr(args, field.name) in choices))
    for name, rule, holds in rules:
        if not holds:
            raise InputError(f"{name} must be {rule}, got {getattr(args, name)}")


def check_spaces(env: gym.Env) -> tuple[int, int, bool]:
    """-> O, A and whether actions are discrete, if observations and actions are of a known kind."""
    obs_space, action_space, env_id = env.observation_space, env.action_space, env.spec.id
    if not isinstance(obs_space, gym.spaces.Box) or len(obs_space.shape) != 1:
        raise InputError(f"{env_id}: observations must be vectors, not {obs_space}")
    if isinstance(action_space, gym.spaces.Discrete):
        return obs_space.shape[0], int(action_space.n), True
    if not isinstance(action_space, gym.spaces.Box) or len(action_space.shape) != 1:
        raise InputError(f"{env_id}: actions must be vectors or discrete, not {action_space}")
    if not action_space.is_bounded() or not (action_space.low < action_space.high).all():
        raise InputError(f"{env_id}: actions must have finite bounds, not {action_space}")
    return obs_space.shape[0], action_space.shape[0], False


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


class TanhGaussian(NamedTuple):
    """pi(.|s) over continuous actions: a = tanh(u), u ~ Normal(mean, std) in every dimension."""

    mean: torch.Tensor  # [B, A]
    log_std: torch.Tensor  # [B, A]

    def log_prob(self, action: torch.Tensor) -> torch.Tensor:
        """log pi(a|s) of actions of the data. [B, A] -> [B]"""
        # at +-1 atanh is infinite, and close to it so large that one row would rule the loss
        u = torch.atanh(action.clamp(-0.999, 0.999))  # [B, A]
        return tanh_gaussian_log_prob(self.mean, self.log_std, u)

    def greedy(self) -> torch.Tensor:
        return torch.tanh(self.mean)  # [B, A]

    def statistics(self) -> dict[str, float]:
        return {"stats/policy_std": self.log_std.exp().mean().item()}


class Categorical(NamedTuple):
    """pi(.|s) over discrete actions, which are one-hot vectors."""

    log_probs: torch.Tensor  # [B, A]

    def log_prob(self, action: torch.Tensor) -> torch.Tensor:
        """log pi(a|s) of actions of the data. [B, A] -> [B]"""
        assert action.shape == self.log_probs.shape
        return (action * self.log_probs).sum(-1)  # [B]

    def greedy(self) -> torch.Tensor:
        best = self.log_probs.argmax(-1)  # [B]
        return nn.functional.one_hot(best, self.log_probs.shape[-1]).float()  # [B, A]

    def statistics(self) -> dict[str, float]:
        entropy = -(self.log_probs.exp() * self.log_probs).sum(-1)  # [B]
        return {"stats/policy_entropy": entropy.mean().item()}


class Actor(nn.Module):
    """pi(.|s). Only the output layer depends on the kind of action."""

    LOG_STD_MIN, LOG_STD_MAX = -5.0, 2.0

    def __init__(self, obs_dim: int, action_dim: int, hidden_dim: int, discrete: bool):
        super().__init__()
        self.discrete = discrete
        self.net = mlp(obs_dim, hidden_dim, action_dim if discrete else 2 * action_dim)
        with torch.no_grad():  # start without a preference, with the same std in every state
            self.net[-1].weight.mul_(0.01)
            self.net[-1].bias.zero_()

    def forward(self, obs: torch.Tensor) -> TanhGaussian | Categorical:
        output = self.net(obs)  # [B, A] or [B, 2A]
        if self.discrete:
            return Categorical(torch.log_softmax(output, dim=-1))
        mean, log_std = output.chunk(2, dim=-1)  # [B, A], [B, A]
        # a clamp has no gradient outside its bounds, and std would stick to the floor
        low, high = self.LOG_STD_MIN, self.LOG_STD_MAX
        return TanhGaussian(mean, low + 0.5 * (high - low) * (1 + torch.tanh(log_std)))


class Value(nn.Module):
    """V(s) = mean + std * net(s): the network works at scale 1, whatever the rewards are."""

    def __init__(self, obs_dim: int, hidden_dim: int):
        super().__init__()
        self.net = mlp(obs_dim, hidden_dim, 1)
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("std", torch.ones(()))

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return self.mean + self.std * self.net(obs).squeeze(-1)  # [B]


# ---- buffer


def value_of_all(value: Value, obs: torch.Tensor) -> torch.Tensor:
    """V of a whole dataset, in parts that fit into the cache. [N, O] -> [N]"""
    return torch.cat([value(part) for part in obs.split(4096)])


class Buffer:
    """The dataset as tensors on the device; rows are drawn i.i.d., whatever their episode."""

    def __init__(self, dataset: common.Dataset, device: torch.device):
        self.obs, self.action = dataset.obs.to(device), dataset.action.to(device)
        self.reward, self.terminated = dataset.reward.to(device), dataset.terminated.to(device)
        self.truncated = dataset.truncated.to(device)
        self.last = self.terminated | self.truncated  # [N] where episodes end
        self.final_obs = dataset.next_obs.to(device)[self.last]  # [num_episodes, O]
        self.returns = torch.zeros_like(self.reward)  # [N]
        self.size, self.device = len(dataset), device

    @torch.no_grad()
    def refresh(self, value: Value, gamma: float, td_lambda: float) -> torch.Tensor:
        """Returns of all rows with the current V. -> their advantages [N], which AWR scales with"""
        v = value_of_all(value, self.obs)  # [N]
        next_v = v.roll(-1)  # the next row holds the next state ...
        next_v[self.last] = value_of_all(value, self.final_obs)  # ... but not where episodes end
        self.returns = lambda_returns(
            self.reward, self.terminated, self.truncated, next_v, gamma, td_lambda
        )
        return self.returns - v

    def sample(self, batch_size: int, generator: torch.Generator) -> list[torch.Tensor]:
        """[B, O], [B, A], [B]"""
        index = torch.randint(self.size, (batch_size,), device=self.device, generator=generator)
        return [field[index] for field in (self.obs, self.action, self.returns)]


# ---- losses


def lambda_returns(
    reward: torch.Tensor,
    terminated: torch.Tensor,
    truncated: torch.Tensor,
    next_value: torch.Tensor,
    gamma: float,
    td_lambda: float,
) -> torch.Tensor:
    """R_t = r_t + gamma ((1 - lambda) V(s_{t+1}) + lambda R_{t+1}), all [N]

    That is a plain return of the rewards r_t + gamma (1 - lambda) V(s_{t+1}), discounted with
    gamma lambda. After the last row of an episode comes 0 if it terminated, V(s') if truncated.
    """
    assert reward.shape == terminated.shape == truncated.shape == next_value.shape
    bootstrap = gamma * (1 - td_lambda) * next_value.masked_fill(terminated, 0.0)  # [N]
    finite_part, discount, last = common.returns_to_go(
        reward + bootstrap, terminated, truncated, gamma * td_lambda
    )
    return finite_part + discount * next_value[last]  # [N]


def regression_loss(value: torch.Tensor, returns: torch.Tensor) -> torch.Tensor:
    """L_V = mean_b (R_b - V(s_b))^2 / 2. [B], [B] -> scalar"""
    assert value.shape == returns.shape and value.dim() == 1
    return 0.5 * ((returns - value) ** 2).mean()


def standardize(advantage: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    """(A - mean) / std, with the mean and std of the whole dataset. [B], scalar, scalar -> [B]"""
    return (advantage - mean) / (std + 1e-5)  # constant advantages: 0, not a division by 0


def awr_weight(advantage: torch.Tensor, beta: float, max_weight: float) -> torch.Tensor:
    """min(exp(A / beta), max_weight), clipped before exp so that it cannot overflow. -> [B]"""
    return torch.exp((advantage / beta).clamp(max=math.log(max_weight)))


def effective_sample_size(weight: torch.Tensor) -> torch.Tensor:
    """(sum w)^2 / (B sum w^2): 1 if all rows count the same, 1/B if one row counts alone."""
    return weight.sum() ** 2 / (len(weight) * (weight**2).sum() + 1e-8)


def awr_loss(
    log_prob: torch.Tensor, advantage: torch.Tensor, beta: float, max_weight: float
) -> torch.Tensor:
    """L_pi = -mean_b min(exp(A_b / beta), max_weight) log pi(a_b|s_b). [B], [B] -> scalar"""
    assert log_prob.shape == advantage.shape and log_prob.dim() == 1
    weight = awr_weight(advantage.detach(), beta, max_weight)
    return -(weight * log_prob).mean()


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
    obs_dim, action_dim, discrete = check_spaces(env)
    actor = Actor(obs_dim, action_dim, args.hidden_dim, discrete).to(device)
    actor.load_state_dict(checkpoint["actor"])
    obs_mean, obs_std = checkpoint["obs_mean"].to(device), checkpoint["obs_std"].to(device)
    return make_policy(actor, obs_mean, obs_std, env.action_space)


def make_policy(
    actor: Actor, obs_mean: torch.Tensor, obs_std: torch.Tensor, action_space: gym.Space
) -> common.Policy:
    """What is evaluated: the greedy action."""

    @torch.no_grad()
    def policy(obs: np.ndarray) -> np.ndarray:
        obs = torch.as_tensor(obs, dtype=torch.float32, device=obs_mean.device)  # [E, O]
        action = actor((obs - obs_mean) / obs_std).greedy()  # [E, A]
        return common.unnormalize_action(action.cpu().numpy(), action_space)

    return policy


# ---- training


def pick_device(device: str) -> torch.device:
    if device == "auto":
        gpus = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
        device = next((name for name, is_here in gpus.items() if is_here), "cpu")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError):
        raise InputError(f"device {device} is not available here; try --device cpu") from None


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
    "total_updates total_epochs eval_interval checkpoint_interval log_interval target_return "
    "patience quiet resume dataset"
)
EVALUATE_MAY_CHANGE = (
    "eval_episodes eval_seed record capture_video quiet device torch_threads evaluate"
)


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
    obs_dim, action_dim, discrete = check_spaces(env)
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
    dataset = common.load_dataset(
        args.dataset,
        env,
        args.seed,
        reward_scale=args.reward_scale,
        reward_shift=args.reward_shift,
        normalize_reward=args.normalize_reward,
    )
    if len(dataset) == 1:
        raise InputError(
            f"dataset {dataset.source} has a single row: nothing can be learned from it"
        )
    fingerprint = dataset.fingerprint()
    obs_mean, obs_std = dataset.obs.mean(0), dataset.obs.std(0) + 1e-3  # [O], [O]
    dataset.obs.sub_(obs_mean).div_(obs_std)  # in place: a large dataset is held once
    dataset.next_obs.sub_(obs_mean).div_(obs_std)
    obs_mean, obs_std = obs_mean.to(device), obs_std.to(device)
    buffer = Buffer(dataset, device)
    total = args.total_updates
    if args.total_epochs is not None:
        total = args.total_epochs * math.ceil(len(dataset) / args.batch_size)

    # networks
    actor = Actor(obs_dim, action_dim, args.hidden_dim, discrete).to(device)
    value = Value(obs_dim, args.hidden_dim).to(device)
    # V starts at the constant k that is the mean of its own returns: k = mean(finite + discount k),
    # and works at their scale
    finite_part, discount, _ = common.returns_to_go(
        dataset.reward, dataset.terminated, dataset.truncated, args.gamma
    )
    constant = finite_part.mean() / (1 - discount.mean())
    value.mean.copy_(constant)
    value.std.copy_((finite_part + discount * constant).std().clamp(min=1e-6))
    eps = 1e-8 * min(1.0, value.std.item() ** 2)  # Adam's own would hide gradients of small rewards
    actor_opt = torch.optim.Adam(actor.parameters(), args.learning_rate, fused=True)
    value_opt = torch.optim.Adam(value.parameters(), args.learning_rate, eps=eps, fused=True)
    parts = {"actor": actor, "value": value, "actor_opt": actor_opt, "value_opt": value_opt}

    # resume
    step, best_return, evals_since_best = 0, -math.inf, 0
    log_position = {}
    if args.resume:
        if checkpoint["fingerprint"] != fingerprint:
            raise InputError(f"{dataset.source} is not the data that the run began with")
        old_updates = checkpoint["args"]["total_updates"]
        if args.total_epochs is not None and args.total_updates != old_updates:
            raise InputError(f"{run_dir} is counted in epochs: give --total-epochs instead")
        if checkpoint["step"] >= total:
            done = f"{run_dir} is at update {checkpoint['step']} already"
            raise InputError(f"{done}: give it a larger budget")
        for name, part in parts.items():
            part.load_state_dict(checkpoint[name])
        generator.set_state(checkpoint["generator"])
        buffer.returns = checkpoint["returns"].to(device)
        advantage_mean = checkpoint["advantage_mean"].to(device)
        advantage_std = checkpoint["advantage_std"].to(device)
        step, log_position = checkpoint["step"], checkpoint["log_position"]
        best_return, evals_since_best = checkpoint["best_return"], checkpoint["evals_since_best"]
    if args.value_warmup >= total:
        nothing = f"value_warmup {args.value_warmup} leaves the actor no update of {total}"
        raise InputError(f"{nothing}: lower it, or raise the budget")
    args = replace(args, resume=None)
    if args.compile:
        for network in (actor, value):
            network.compile()

    try:
        os.makedirs(run_dir, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot use {run_dir} as run_dir: {error.strerror}") from None
    args_json = json.dumps(asdict(args), indent=2).encode()
    save_atomically(f"{run_dir}/args.json", lambda file: file.write(args_json))
    logger = Logger(run_dir, total, args.quiet, **log_position)
    episode_returns = dataset.episode_returns
    logger.line(
        f"{ALGO} on {args.env_id}: {len(dataset):,} transitions of {dataset.source},"
        f" {len(episode_returns)} episodes, mean return {episode_returns.mean():.1f}"
        f"\nrun: {run_dir} on {device}"
    )
    if step == 0:
        logger.scalars(0, {"stats/behaviour_return": episode_returns.mean()})
        policy = make_policy(actor, obs_mean, obs_std, env.action_space)
        eval_returns = common.evaluate(policy, args.env_id, args.eval_episodes, args.eval_seed)
        logger.evaluation(0, eval_returns)
        if args.value_warmup > 0:
            logger.line(f"updates 1 to {args.value_warmup:,} train V alone (value_warmup)")

    # loop
    stop_reason, exit_signal = "", 0
    with StopSignal() as stop_signal:
        while not stop_reason:
            step += 1
            factor = lr_factor(step, total, args.lr_schedule, args.warmup_updates)
            for opt in (actor_opt, value_opt):
                opt.param_groups[0]["lr"] = args.learning_rate * factor

            # 1. returns and advantages of all data, with the current V
            if (step - 1) % args.refresh_interval == 0 or step == args.value_warmup + 1:
                advantage = buffer.refresh(value, args.gamma, args.td_lambda)  # [N]
                advantage_mean, advantage_std = advantage.mean(), advantage.std(correction=0)

            # 2. sample a minibatch
            obs, action, returns = buffer.sample(args.batch_size, generator)

            # 3. value: regress on the returns
            value_loss = regression_loss(value(obs), returns)
            value_opt.zero_grad()
            value_loss.backward()
            value_opt.step()

            # 4. actor: clone the actions after which things went better than V expects
            with torch.no_grad():
                advantage = returns - value(obs)  # [B]
            scaled_advantage = advantage
            if args.normalize_advantage:
                scaled_advantage = standardize(advantage, advantage_mean, advantage_std)
            pi = actor(obs)
            log_prob = pi.log_prob(action)  # [B]
            actor_loss = awr_loss(log_prob, scaled_advantage, args.beta, args.max_weight)
            if step > args.value_warmup:
                actor_opt.zero_grad()
                actor_loss.backward()
                actor_opt.step()

            # 5. log, evaluate, stop, save
            if step % args.log_interval == 0:
                weight = awr_weight(scaled_advantage, args.beta, args.max_weight)
                unexplained = advantage.var(correction=0) / (returns.var(correction=0) + 1e-20)
                clipped = (weight > 0.999 * args.max_weight).float().mean()
                statistics = {
                    "charts/updates_per_second": logger.speed(step),
                    "charts/learning_rate": actor_opt.param_groups[0]["lr"],
                    "losses/value": value_loss.item(),
                    "losses/actor": actor_loss.item(),
                    "stats/return_mean": returns.mean().item(),
                    "stats/explained_variance": 1 - unexplained.item(),
                    "stats/advantage_mean": advantage.mean().item(),
                    "stats/advantage_std": advantage.std(correction=0).item(),
                    "stats/weight_mean": weight.mean().item(),
                    "stats/weight_max": weight.max().item(),
                    "stats/weight_clipped": clipped.item(),
                    "stats/weight_ess": effective_sample_size(weight).item(),
                    "stats/log_prob": log_prob.mean().item(),
                    **pi.statistics(),
                }
                logger.scalars(step, statistics)
                logger.progress(step)
                for name in ("losses/value", "losses/actor"):
                    if not math.isfinite(statistics[name]):
                        message = f"{name} is {statistics[name]} at update {step}: it diverged"
                        raise InputError(f"{message}; lower --learning-rate or --max-weight")
            is_best = False
            if step == total:
                stop_reason = "the budget is spent"
            actor_has_moved = step > args.value_warmup
            if (step % args.eval_interval == 0 and actor_has_moved) or step == total:
                policy = make_policy(actor, obs_mean, obs_std, env.action_space)
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
                policy_state |= {"obs_mean": obs_mean, "obs_std": obs_std}
                policy_state |= {"actor": actor.state_dict()}
            if is_best:
                save_atomically(best_path, partial(torch.save, policy_state))
            if stop_reason or step % args.checkpoint_interval == 0:
                checkpoint = policy_state | {
                    "best_return": best_return,
                    "evals_since_best": evals_since_best,
                    "fingerprint": fingerprint,
                    "log_position": logger.position(step),
                    "generator": generator.get_state(),
                    "returns": buffer.returns,
                    "advantage_mean": advantage_mean,
                    "advantage_std": advantage_std,
                    **{name: part.state_dict() for name, part in parts.items()},
                }
                save_atomically(checkpoint_path, partial(torch.save, checkpoint))

    command, run = f"python {sys.argv[0]}", shlex.quote(run_dir)
    budget = "total-updates" if args.total_epochs is None else "total-epochs"
    more = "" if step < total else f" --{budget} <more>"
    saved = "best.pt" if best_return > -math.inf else "checkpoint.pt"
    logger.line(
        f"stopped at update {step:,}: {stop_reason}"
        f"\nresume: {command} --resume {run}{more}\nevaluate: {command} --evaluate {run}/{saved}"
    )
    logger.close()
    evaluations = {"eval/return_mean": logger.last_eval, "eval/best_return": best_return}
    return {"step": step, "signal": exit_signal, **evaluations}


def evaluate_checkpoint(args: Args) -> dict[str, float]:
    """--evaluate: the checkpoint's policy on fresh episodes, which can be recorded and filmed."""
    check_args(args)
    saved = load_checkpoint(args.evaluate)["args"]
    check_unchanged(args, saved, EVALUATE_MAY_CHANGE, "--evaluate")
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
