"""MBPO: Model-Based Policy Optimization. Online RL, continuous actions.

Paper: "When to Trust Your Model: Model-Based Policy Optimization", M. Janner, J. Fu, M. Zhang,
S. Levine, 2019, arXiv:1906.08253.

Idea: SAC that learns mostly from imagined transitions. An ensemble of networks learns to predict
reward and next state (fit_model). From states that really occurred, the policy takes k steps in it
(rollout). Errors add up along a rollout, so k is small; it can be, because rollouts start all along
the real episodes. There are many of them, so SAC makes G updates per real step without overfitting.
Why an ensemble: a policy would live on the mistakes of a single model. Members start from other
weights and train on other rows (a bootstrap), so that they disagree where data are few, and each
step is made by a member drawn anew; but only by an elite, one of the best on held-out rows.

Equations (m runs over the M members, i over the two critics, a prime marks a target network):
    model       p_m(x | s, a) = Normal(mean_m, exp(log_var_m)) in every dimension, x = (r, s' - s)
                minimise sum_m E[(x - mean_m)^2 exp(-log_var_m) + log_var_m] + 0.01 sum (max - min)
                + weight decay; log_var is kept between min and max, learned, a pair per dimension
    rollout     s from the replay buffer; k times: a ~ pi(.|s), m from the elites, x ~ p_m(.|s, a)
    critics     minimise mean_i (Q_i(s, a) - y)^2, then Q' <- (1 - tau) Q' + tau Q
                y = r + gamma (1 - terminated) (min_i Q'_i(s', a') - alpha log pi(a'|s'))
    actor       minimise alpha log pi(a|s) - min_i Q_i(s, a),               a ~ pi(.|s)
    temperature minimise alpha (entropy - target_entropy), entropy = mean -log pi(a|s)

Differences from the paper:
    - The defaults are a smaller set (width, rollouts, updates, steps) that fits Pendulum.
    - Not only what goes into the model is standardised but x, too: no dimension drowns the others.
    - Each fit begins with a new Adam: with the averages of the fit before, made when errors were
      small, its first steps on new data would be too long (measured: benchmark/NOTES.md).
    - Where a task ends is given, as by the authors, for those in TERMINATION. For any other it is
      learned: each member also predicts a logit, from which a rollout draws whether it ends.
    - k grows with steps, not epochs, and a fit has at most max_model_epochs. alpha's loss has alpha
      where theirs has log alpha. log std of the policy is squashed: a clip has no gradient.

Shapes: B batch, G updates per step, M members, C = Z = 2 critics, n rows, O observation, A action,
D = 1 + O of x, W = 2 O + A + 3 a transition, E evaluation episodes. A scalar per transition is [B].

Run it: (the second: with the paper's hyper-parameters)
    python algos/mbpo.py --env-id Pendulum-v1
    python algos/mbpo.py --env-id Hopper-v5 --total-timesteps 130000 --learning-starts 5000 \\
        --hidden-dim 256 --learning-rate 3e-4 --updates-per-step 20 --target-entropy -1 \\
        --no-normalize-targets --model-hidden-dim 200 --model-batch-size 256 \\
        --model-train-interval 250 --rollout-batch-size 100000 --max-rollout-length 15 \\
        --rollout-grow-from 25000 --rollout-grow-until 155000 --eval-interval 1000

Resume it:
    python algos/mbpo.py --resume runs/<run>

The episode that was cut is started anew from its seed, and its actions are played again: exact in
any environment that is a function of seed and actions. A checkpoint has 4 W bytes per row of both
buffers: 6 MB on Pendulum, with the paper's set up to 600 MB.
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
    # MBPO only
    buffer_capacity: int = 1_000_000  # steps that the replay buffer holds; then the oldest go
    learning_starts: int = 200  # first steps, with random actions and without updates
    updates_per_step: int = 10  # G, updates of critics, actor and alpha per environment step
    critic_layer_norm: bool = False  # layer normalisation before each ReLU of the critics
    alpha: float | None = None  # fixed temperature [learned, from 1]
    target_entropy: float | None = None  # entropy that a learned temperature aims at [-A / 2]
    tau: float = 0.005  # how far the targets move towards the networks; 1: hard copy
    real_ratio: float = 0.05  # share of real transitions in every batch, the rest imagined; 1: SAC
    num_members: int = 7  # M, size of the ensemble that models the environment
    num_elites: int = 5  # members with the lowest hold-out errors: only they make rollouts
    model_hidden_dim: int = 100  # width of a member's four hidden layers (hidden_dim: all others)
    model_learning_rate: float = 1e-3  # of the model (learning_rate: all others); has no warm-up
    normalize_targets: bool = True  # the model predicts standardised rewards and changes of state
    model_train_interval: int = 100  # steps from one fit of the model and its rollouts to the next
    max_model_epochs: int = 300  # a fit ends here if the hold-out error has not stopped falling
    model_batch_size: int = 64  # transitions per update of the model, for each member its own
    rollout_batch_size: int = 10_000  # rollouts after each fit, from as many real states
    min_rollout_length: int = 1  # k, steps of a rollout, until step rollout_grow_from
    max_rollout_length: int = 1  # k from step rollout_grow_until on; linear in between
    rollout_grow_from: int = 20_000  # step at which k begins to grow, if the maximum is larger
    rollout_grow_until: int = 150_000  # step at which k has grown to max_rollout_length
    retain_steps: int = 1_000  # for at least how many steps imagined transitions are kept


if __name__ == "__main__":  # parsed here for --help and typos, which need not wait for torch
    tyro.cli(Args, description=__doc__)

import gymnasium as gym
import numpy as np
import torch
from torch import nn

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))  # for common.py
import common
from common import InputError

ALGO = "mbpo"


def check_args(args: Args) -> None:
    """Refuse what would waste a run, before it begins."""
    positive = (
        "total_timesteps batch_size learning_rate hidden_dim eval_interval eval_episodes patience "
        "checkpoint_interval log_interval torch_threads updates_per_step "
        "num_members num_elites model_hidden_dim model_learning_rate model_train_interval "
        "max_model_epochs model_batch_size rollout_batch_size min_rollout_length"
    )
    values = {name: getattr(args, name) for name in positive.split()}
    rules = [(name, "> 0", value is None or value > 0) for name, value in values.items()]
    is_pure = args.real_ratio in (0, 1)
    is_mixed = args.real_ratio * args.batch_size >= 1 and args.real_ratio < 1
    rules += [
        ("seed", "in [0, 2^63)", 0 <= args.seed < 2**63),
        ("eval_seed", "in [0, 2^31)", 0 <= args.eval_seed < 2**31),
        ("learning_rate", "finite", args.learning_rate < math.inf),
        ("model_learning_rate", "finite", args.model_learning_rate < math.inf),
        ("gamma", "in [0, 1)", 0 <= args.gamma < 1),
        ("warmup_updates", ">= 0", args.warmup_updates >= 0),
        ("learning_starts", ">= 3, for the first fit", args.learning_starts >= 3),
        ("buffer_capacity", ">= 3, for the first fit", args.buffer_capacity >= 3),
        ("alpha", "in [0, inf)", args.alpha is None or 0 <= args.alpha < math.inf),
        ("target_entropy", "finite", math.isfinite(args.target_entropy or 0)),
        ("alpha", "used without --target-entropy", None in (args.alpha, args.target_entropy)),
        ("tau", "in (0, 1]", 0 < args.tau <= 1),
        ("real_ratio", "in [0, 1]", 0 <= args.real_ratio <= 1),
        ("real_ratio", "0, 1 or enough for a row of each kind", is_pure or is_mixed),
        ("num_elites", f"<= num_members {args.num_members}", args.num_elites <= args.num_members),
        (
            "max_rollout_length",
            f">= min_rollout_length {args.min_rollout_length}",
            args.max_rollout_length >= args.min_rollout_length,
        ),
        ("rollout_grow_from", ">= 0", args.rollout_grow_from >= 0),
        (
            "rollout_grow_until",
            f"> rollout_grow_from {args.rollout_grow_from}",
            args.rollout_grow_until > args.rollout_grow_from,
        ),
        (
            "retain_steps",
            f">= model_train_interval {args.model_train_interval}",
            args.retain_steps >= args.model_train_interval,
        ),
        ("capture_video", "used with --evaluate", not args.capture_video or args.evaluate),
        ("record", "a name that ends in .npz", not args.record or args.record.endswith(".npz")),
        ("record", "used with --evaluate", not args.record or args.evaluate),
        ("resume", "used without --evaluate", not args.resume or not args.evaluate),
    ]
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


def bound_log_var(
    log_var: torch.Tensor, min_log_var: torch.Tensor, max_log_var: torch.Tensor
) -> torch.Tensor:
    """Smoothly to about [min, max], since a clip has no gradient outside. [..., D] -> [..., D]"""
    log_var = max_log_var - nn.functional.softplus(max_log_var - log_var)
    return min_log_var + nn.functional.softplus(log_var - min_log_var)


class Dynamics(nn.Module):
    """M models of the environment: reward and change of state given state and action, each a
    Normal in every dimension, D = 1 + O. Slice m of all parameters of net is an ordinary MLP."""

    WEIGHT_DECAY = (2.5e-5, 5e-5, 7.5e-5, 7.5e-5, 1e-4)  # per layer; not of biases and bounds

    def __init__(
        self,
        num_members: int,
        num_elites: int,
        obs_dim: int,
        action_dim: int,
        hidden_dim: int,
        learns_end: bool,
    ):
        super().__init__()
        input_dim, target_dim = obs_dim + action_dim, 1 + obs_dim
        self.output_widths = [target_dim, target_dim, int(learns_end)]
        dims = [input_dim] + 4 * [hidden_dim] + [sum(self.output_widths)]
        layers = []
        for layer in range(5):
            linear = EnsembleLinear(num_members, dims[layer], dims[layer + 1])
            std = 0.5 / math.sqrt(dims[layer])  # the authors' weights, not Xavier's
            nn.init.trunc_normal_(linear.weight, std=std, a=-2 * std, b=2 * std)
            layers += [linear, nn.SiLU()]
        self.net = nn.Sequential(*layers[:-1])
        # one pair of bounds per dimension, for all members
        self.min_log_var = nn.Parameter(torch.full((target_dim,), -10.0))
        self.max_log_var = nn.Parameter(torch.full((target_dim,), 0.5))
        # what a fit finds beside the weights
        self.register_buffer("input_mean", torch.zeros(input_dim))
        self.register_buffer("input_std", torch.ones(input_dim))
        self.register_buffer("target_mean", torch.zeros(target_dim))
        self.register_buffer("target_std", torch.ones(target_dim))
        self.register_buffer("elites", torch.arange(num_elites))

    def optimizer(self, learning_rate: float) -> torch.optim.Adam:
        """Decay is part of the gradient here, not AdamW's: the loss + sum_l decay_l / 2 |W_l|^2."""
        linears = self.net[::2]
        groups = [
            {"params": [linear.weight], "weight_decay": decay}
            for linear, decay in zip(linears, self.WEIGHT_DECAY)
        ]
        others = [*(linear.bias for linear in linears), self.min_log_var, self.max_log_var]
        return torch.optim.Adam([*groups, {"params": others}], learning_rate, fused=True)

    def heads(self, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What net gives -> mean, log_var [..., D], and the logit of an end [..., 1], or [..., 0]
        where that is not learned."""
        mean, log_var, end_logit = output.split(self.output_widths, dim=-1)
        return mean, bound_log_var(log_var, self.min_log_var, self.max_log_var), end_logit

    def set_scales(
        self, inputs: torch.Tensor, targets: torch.Tensor, normalize_targets: bool
    ) -> None:
        """Mean and standard deviation of what goes in, and of what comes out. [n, O + A], [n, D]"""
        tables = [(inputs, self.input_mean, self.input_std)]
        if normalize_targets:
            tables.append((targets, self.target_mean, self.target_std))
        for table, mean, std in tables:
            mean.copy_(table.mean(dim=0))
            std.copy_(table.std(dim=0))
            std[std <= 1e-6 * mean.abs() + 1e-12] = 1.0  # a constant, but for rounding

    def scale(
        self, inputs: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As the networks see them. [n, O + A], [n, D] -> [n, O + A], [n, D]"""
        inputs = (inputs - self.input_mean) / self.input_std
        return inputs, (targets - self.target_mean) / self.target_std

    @torch.no_grad()
    def mse(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Squared error of each member's mean, of scaled rows. Members are compared by what they
        predict, not by how sure they are of it. [n, O + A], [n, D] -> [M]"""
        num_members = len(self.net[0].weight)
        mean, _, _ = self.heads(self.net(inputs.expand(num_members, -1, -1)))  # [M, n, D]
        return ((mean - targets) ** 2).mean(dim=(1, 2))

    @torch.no_grad()
    def sample(
        self, obs: torch.Tensor, action: torch.Tensor, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The next step of n rows, each by an elite drawn for it: (r, s' - s) ~ p_m(.|s, a).
        [n, O], [n, A] -> reward [n], next_obs [n, O], end_logit [n, 1] or [n, 0]"""
        num_rows, num_elites, device = len(obs), len(self.elites), obs.device
        inputs = (torch.cat([obs, action], dim=-1) - self.input_mean) / self.input_std
        choice = torch.randint(num_elites, (num_rows,), device=device, generator=generator)
        output = torch.empty(num_rows, sum(self.output_widths), device=device)
        # each elite computes its own rows and no others: its slice of the stack, an ensemble of 1
        for i, member in enumerate(self.elites.tolist()):
            rows = (choice == i).nonzero().squeeze(1)  # [n_i]
            one = slice(member, member + 1)
            parameters = {name: stack[one] for name, stack in self.net.named_parameters()}
            one_output = torch.func.functional_call(self.net, parameters, inputs[rows][None])
            output[rows] = one_output[0]  # [1, n_i, .] -> [n_i, .]
        mean, log_var, end_logit = self.heads(output)
        noise = torch.randn(mean.shape, device=device, generator=generator)
        target = self.target_mean + self.target_std * (mean + (0.5 * log_var).exp() * noise)
        return target[:, 0], obs + target[:, 1:], end_logit


# Where a task terminates, as a function of the next state, [n, O] -> [n]: the rules of Gymnasium's
# source. They say what is healthy and negate it, since each comparison with a NaN is false.


def hopper_ends(next_obs: torch.Tensor) -> torch.Tensor:
    height, angle = next_obs[:, 0], next_obs[:, 1]
    is_sane = (next_obs[:, 1:].abs() < 100).all(dim=1)
    return ~(is_sane & (height > 0.7) & (angle.abs() < 0.2))


def walker2d_ends(next_obs: torch.Tensor) -> torch.Tensor:
    height, angle = next_obs[:, 0], next_obs[:, 1]
    return ~((height > 0.8) & (height < 2.0) & (angle.abs() < 1))


def ant_ends(next_obs: torch.Tensor) -> torch.Tensor:
    height, is_finite = next_obs[:, 0], next_obs.isfinite().all(dim=1)
    return ~(is_finite & (height >= 0.2) & (height <= 1.0))


def humanoid_ends(next_obs: torch.Tensor) -> torch.Tensor:
    height = next_obs[:, 0]
    return ~((height > 1.0) & (height < 2.0))


def inverted_pendulum_ends(next_obs: torch.Tensor) -> torch.Tensor:
    return ~(next_obs.isfinite().all(dim=1) & (next_obs[:, 1].abs() <= 0.2))


def inverted_double_pendulum_ends(next_obs: torch.Tensor) -> torch.Tensor:
    sin_1, sin_2, cos_1, cos_2 = next_obs[:, 1:5].unbind(dim=1)
    cos_sum = cos_1 * cos_2 - sin_1 * sin_2  # of both angles
    return ~(0.6 * (cos_1 + cos_sum) > 1)  # height of the tip


def never_ends(next_obs: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(next_obs), dtype=torch.bool, device=next_obs.device)


NEVER_END = "HalfCheetah-v5 HumanoidStandup-v5 Pendulum-v1 Pusher-v5 Reacher-v5 Swimmer-v5"
TERMINATION = dict.fromkeys(NEVER_END.split(), never_ends) | {  # of other tasks it is learned
    "Ant-v5": ant_ends,
    "Hopper-v5": hopper_ends,
    "Humanoid-v5": humanoid_ends,
    "InvertedDoublePendulum-v5": inverted_double_pendulum_ends,
    "InvertedPendulum-v5": inverted_pendulum_ends,
    "Walker2d-v5": walker2d_ends,
}


# ---- buffer


def as_rows(obs, action, reward, next_obs, terminated, truncated) -> torch.Tensor:
    """n transitions, of the data or of the environment, side by side in one table. -> [n, W]"""
    fields = (obs, action, reward, next_obs, terminated, truncated)
    columns = [np.asarray(field, dtype=np.float32).reshape(len(reward), -1) for field in fields]
    return torch.from_numpy(np.concatenate(columns, axis=1))


class Buffer:
    """A ring of transitions, a row each, so that to draw a batch is one index call."""

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

    def grow(self, capacity: int) -> None:
        """Room for more rows; those that are here stay, and the oldest are still the next to go."""
        if capacity == len(self.rows):
            return
        assert capacity > len(self.rows)
        # a ring that is not full has position == size: nothing moves
        oldest_first = torch.roll(self.rows[: self.size], -self.position, dims=0)
        self.rows = torch.empty(capacity, sum(self.widths), device=self.rows.device)
        self.rows[: self.size] = oldest_first
        self.position = self.size % capacity

    def state(self) -> dict:
        """What a checkpoint needs: a copy of the filled part, not of the capacity."""
        rows, capacity = self.rows[: self.size].clone(), len(self.rows)
        return {"rows": rows, "position": self.position, "capacity": capacity}

    def load_state(self, state: dict) -> None:
        self.grow(state["capacity"])
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


def mbpo_model_loss(
    mean: torch.Tensor,
    log_var: torch.Tensor,
    target: torch.Tensor,
    min_log_var: torch.Tensor,
    max_log_var: torch.Tensor,
) -> torch.Tensor:
    """sum_m mean_{b,d} ((x - mean)^2 exp(-log_var) + log_var) + 0.01 (sum max - sum min).
    [M, B, D] three times, [D], [D] -> scalar

    Per element it is -2 log Normal(x; mean, var) - log(2 pi). The last term pulls the bounds
    together, so that they are as wide as the data need and no wider.
    """
    assert mean.dim() == 3 and mean.shape == log_var.shape == target.shape
    assert min_log_var.shape == max_log_var.shape == mean.shape[2:]
    nll = (mean - target) ** 2 * (-log_var).exp() + log_var  # [M, B, D]
    # a sum over members, since they share nothing: each gets the gradient of its own mean
    return nll.mean(dim=(1, 2)).sum() + 0.01 * (max_log_var.sum() - min_log_var.sum())


def termination_loss(end_logit: torch.Tensor, terminated: torch.Tensor) -> torch.Tensor:
    """Cross-entropy, sum_m mean_b. [M, B], [M, B] -> scalar"""
    assert end_logit.dim() == 2 and end_logit.shape == terminated.shape
    binary_cross_entropy = nn.functional.binary_cross_entropy_with_logits
    return binary_cross_entropy(end_logit, terminated, reduction="none").mean(dim=1).sum()


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


def sac_loss(q: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """L_Q = mean_i mean_b (Q_i(s_b, a_b) - y_b)^2. [2, B], [B] -> scalar"""
    assert q.dim() == 2 and q.shape[1:] == target.shape
    return ((q - target) ** 2).mean()


def sac_policy_loss(log_prob: torch.Tensor, q: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
    """L_pi = mean_b (alpha log pi(a_b|s_b) - min_i Q_i(s_b, a_b)). [B], [2, B], [] -> scalar"""
    assert q.dim() == 2 and q.shape[1:] == log_prob.shape
    return (alpha * log_prob - q.min(dim=0).values).mean()


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


RESUME_MAY_CHANGE = (
    "total_timesteps eval_interval checkpoint_interval log_interval target_return "
    "patience quiet resume"
)
EVALUATE_MAY_CHANGE = (
    "eval_episodes eval_seed record capture_video quiet device torch_threads evaluate"
)


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


MODEL_PATIENCE = 5  # a fit ends after more epochs than this without a better member
ROLLOUT_CHUNK = 10_000  # rows at once: activations of all would be large


def rollout_length(
    step: int, grow_from: int, grow_until: int, min_length: int, max_length: int
) -> int:
    """k: min_length until grow_from, max_length from grow_until on, linear in between."""
    progress = (step - grow_from) / (grow_until - grow_from)
    length = min_length + progress * (max_length - min_length)
    return int(min(max(length, min_length), max_length))


def fit_model(
    model: Dynamics,
    real: Buffer,
    num_fresh: int,
    learning_rate: float,
    args: Args,
    generator: torch.Generator,
) -> dict[str, float]:
    """Train all members on all real steps, starting from the weights of the last fit, until none
    gets better on held-out rows. Then each goes back to its best epoch, and the best members become
    the elites.

    The rows to hold out are drawn anew for each fit, as by the authors, and fits before it trained
    on most of them: their error flatters. That of the num_fresh latest steps, measured before the
    fit, does not.
    """
    device, num_members = real.rows.device, args.num_members
    obs, action, reward, next_obs, terminated, _ = real.split(real.rows[: real.size])
    inputs = torch.cat([obs, action], dim=-1)  # [n, O + A]
    targets = torch.cat([reward[:, None], next_obs - obs], dim=-1)  # [n, D]
    statistics = {}
    if num_fresh > 0:
        latest = torch.arange(real.position - num_fresh, real.position) % real.size  # a ring
        fresh_mse = model.mse(*model.scale(inputs[latest], targets[latest]))  # [M]
        statistics["stats/fresh_mse"] = fresh_mse[model.elites].mean().item()

    order = torch.randperm(real.size, device=device, generator=generator)
    num_holdout = min(max(1, int(0.2 * real.size)), 5_000)  # as by the authors
    holdout, training = order[:num_holdout], order[num_holdout:]
    model.set_scales(inputs[training], targets[training], args.normalize_targets)
    inputs, targets = model.scale(inputs, targets)
    # every member has its own rows for the whole fit, drawn with replacement: this and the initial
    # weights are why they disagree where data are few
    shape = (num_members, len(training))
    draw = torch.randint(len(training), shape, device=device, generator=generator)
    bootstrap = training[draw]  # [M, n]

    model_opt = model.optimizer(learning_rate)
    layers = dict(model.net.named_parameters())
    best_layers = {name: layer.detach().clone() for name, layer in layers.items()}
    best_error = torch.full((num_members,), math.inf, device=device)  # [M]
    epoch, last_best_epoch = 0, 0
    while epoch < args.max_model_epochs and epoch - last_best_epoch <= MODEL_PATIENCE:
        epoch += 1
        shuffle = torch.rand(shape, device=device, generator=generator).argsort(dim=1)
        for index in bootstrap.gather(1, shuffle).split(args.model_batch_size, dim=1):  # [M, B]
            mean, log_var, end_logit = model.heads(model.net(inputs[index]))  # [M, B, D]
            bounds = (model.min_log_var, model.max_log_var)
            loss = mbpo_model_loss(mean, log_var, targets[index], *bounds)
            if end_logit.shape[-1] > 0:
                loss = loss + termination_loss(end_logit.squeeze(-1), terminated[index])
            model_opt.zero_grad()
            loss.backward()
            model_opt.step()
        error = model.mse(inputs[holdout], targets[holdout])  # [M]
        is_better = error < 0.99 * best_error  # [M]; less than a percent is noise
        best_error = torch.where(is_better, error, best_error)
        for name, layer in layers.items():
            best_layers[name][is_better] = layer.detach()[is_better]
        if is_better.any():
            last_best_epoch = epoch

    with torch.no_grad():
        for name, layer in layers.items():  # the bounds stay, since members share them
            layer.copy_(best_layers[name])
    model.elites.copy_(best_error.argsort()[: args.num_elites])
    return statistics | {
        "losses/model": loss.item(),
        "stats/holdout_mse": best_error.mean().item(),
        **{f"stats/holdout_mse_{m}": best_error[m].item() for m in range(num_members)},
        "stats/holdout_r2": 1 - (best_error.mean() / targets.var(dim=0).mean()).item(),
        "stats/model_epochs": epoch,
        "stats/max_log_var": model.max_log_var.mean().item(),
    }


@torch.no_grad()
def rollout(
    model: Dynamics,
    actor: GaussianActor,
    ends: Callable[[torch.Tensor], torch.Tensor] | None,
    obs: torch.Tensor,
    length: int,
    generator: torch.Generator,
) -> list[torch.Tensor]:
    """Up to `length` steps of the policy in the model, from each of n states; a row that terminates
    takes no further step. [n, O] -> a table of transitions per step, [n, W], [n or fewer, W], ...

    Rewards are the model's own. (MOPO, for offline data, lowers them where members disagree.)
    """
    tables = []
    for _ in range(length):
        action, _ = sample_action(*actor(obs), generator)  # [n, A]
        reward, next_obs, end_logit = model.sample(obs, action, generator)
        if ends is not None:
            terminated = ends(next_obs)  # [n]
        else:
            draw = torch.rand(len(obs), device=obs.device, generator=generator)
            terminated = draw < torch.sigmoid(end_logit.squeeze(1))
        flags = torch.stack([terminated, torch.zeros_like(terminated)], dim=1)  # none is truncated
        tables.append(torch.cat([obs, action, reward[:, None], next_obs, flags], dim=1))
        obs = next_obs[~terminated]
        if len(obs) == 0:
            break
    return tables


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
    ends = TERMINATION.get(env.spec.id)
    total, learning_starts = args.total_timesteps, args.learning_starts
    total_updates = (total - learning_starts) * args.updates_per_step
    if total_updates <= 0:
        raise InputError(
            f"total_timesteps {total} is spent before the first update: lower --learning-starts"
            f" ({learning_starts})"
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

    # data: real steps, and imagined ones. The capacity of a ring is for how long rows are kept, so
    # that of the second grows with k in the loop, for the rollouts of the last retain_steps
    rollouts_kept = args.retain_steps / args.model_train_interval * args.rollout_batch_size
    capacities = {
        "rollout_batch_size": round(rollouts_kept * args.max_rollout_length),
        "buffer_capacity": args.buffer_capacity,
    }
    trials = []
    for name, capacity in capacities.items():  # all of it now: hours later would be too late
        try:
            trials.append(Buffer(capacity, obs_dim, action_dim, device))
        except (RuntimeError, TypeError):
            raise InputError(f"{name} {getattr(args, name)} is too much memory") from None
    del trials
    real = Buffer(args.buffer_capacity, obs_dim, action_dim, device)
    imagined = Buffer(args.rollout_batch_size, obs_dim, action_dim, device)
    num_real = int(args.real_ratio * args.batch_size)  # in every batch
    uses_model = num_real < args.batch_size  # else it is SAC

    # networks
    actor = GaussianActor(obs_dim, action_dim, args.hidden_dim).to(device)
    sizes = (2, obs_dim, action_dim, args.hidden_dim, args.critic_layer_norm)
    critic = EnsembleCritic(*sizes).to(device)
    target_critic = deepcopy(critic)
    initial_alpha = 1.0 if args.alpha is None else args.alpha
    log_alpha = nn.Parameter(torch.tensor(initial_alpha, device=device).log())
    target_entropy = -action_dim / 2 if args.target_entropy is None else args.target_entropy
    sizes = (args.num_members, args.num_elites, obs_dim, action_dim, args.model_hidden_dim)
    model = Dynamics(*sizes, learns_end=ends is None).to(device)
    actor_opt = torch.optim.Adam(actor.parameters(), args.learning_rate, fused=True)
    critic_opt = torch.optim.Adam(critic.parameters(), args.learning_rate, fused=True)
    alpha_opt = torch.optim.Adam([log_alpha], args.learning_rate, fused=True)
    parts = {
        "actor": actor,
        "critic": critic,
        "target_critic": target_critic,
        "model": model,
        "actor_opt": actor_opt,
        "critic_opt": critic_opt,
        "alpha_opt": alpha_opt,
    }

    # resume
    step, num_updates, best_return, evals_since_best = 0, 0, -math.inf, 0
    episode, episode_actions = 0, []
    log_position = {"step": step}
    if args.resume:
        if checkpoint["step"] >= total:
            done = f"{run_dir} is at step {checkpoint['step']} already"
            raise InputError(f"{done}: give it a larger budget")
        for name, part in parts.items():
            part.load_state_dict(checkpoint[name])
        log_alpha.data.copy_(checkpoint["log_alpha"])
        generator.set_state(checkpoint["generator"])
        real.load_state(checkpoint["real"])
        imagined.load_state(checkpoint["imagined"])
        step, log_position = checkpoint["step"], checkpoint["log_position"]
        num_updates, episode = checkpoint["num_updates"], checkpoint["episode"]
        episode_actions = list(checkpoint["episode_actions"].clone().numpy())
        best_return, evals_since_best = checkpoint["best_return"], checkpoint["evals_since_best"]
    current_obs, episode_return = start_episode(env, args.seed, episode, episode_actions)
    is_new, first_update = not args.resume, num_updates
    if args.resume:
        if not np.array_equal(current_obs, checkpoint["current_obs"].numpy()):
            raise InputError(f"{args.env_id} plays another episode from the same seed: no resume")
        del checkpoint  # with a copy of the buffers
    args = replace(args, resume=None)
    if args.compile:
        for network in (actor, critic):  # the model gains nothing: it is all large products
            network.compile()

    try:
        os.makedirs(run_dir, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot use {run_dir} as run_dir: {error.strerror}") from None
    args_json = json.dumps(asdict(args), indent=2).encode()
    save_atomically(f"{run_dir}/args.json", lambda file: file.write(args_json))
    logger = Logger(run_dir, total, args.quiet, **log_position)
    kind = "learned" if ends is None else "known"
    logger.line(f"{ALGO} on {args.env_id}: termination is {kind}\nrun: {run_dir} on {device}")
    if is_new:
        policy = make_policy(actor, env.action_space, device)
        eval_returns = common.evaluate(policy, args.env_id, args.eval_episodes, args.eval_seed)
        logger.evaluation(step, eval_returns)

    # loop
    stop_reason, exit_signal = "", 0
    with StopSignal() as stop_signal:
        while not stop_reason:
            step += 1

            # 1. act, and remember
            if step <= learning_starts:
                taken = 2 * torch.rand(action_dim, device=device, generator=generator) - 1
            else:
                obs = torch.as_tensor(current_obs, dtype=torch.float32, device=device)
                with torch.no_grad():
                    taken, _ = sample_action(*actor(obs), generator)  # [A]
            taken = taken.cpu().numpy()
            episode_actions.append(common.unnormalize_action(taken, env.action_space))
            new_obs, new_reward, terminated, truncated, _ = env.step(episode_actions[-1])
            transition = (current_obs, taken, new_reward, new_obs, terminated, truncated)
            real.add(as_rows(*([field] for field in transition)))
            current_obs, episode_return = np.array(new_obs), episode_return + float(new_reward)
            if terminated or truncated:
                logger.scalars(step, {"charts/episodic_return": episode_return})
                episode, episode_actions = episode + 1, []
                current_obs, episode_return = start_episode(env, args.seed, episode, [])

            # 2. now and then: fit the model to all real steps, and imagine rollouts from them
            since_start = step - learning_starts
            is_due = since_start >= 0 and since_start % args.model_train_interval == 0
            if is_due and uses_model:
                start_second = logger.seconds()
                factor = lr_factor(num_updates + 1, total_updates, args.lr_schedule, 0)
                model_lr = args.model_learning_rate * factor
                num_fresh = args.model_train_interval if since_start > 0 else 0  # 0: untrained
                statistics = fit_model(model, real, num_fresh, model_lr, args, generator)
                length = rollout_length(
                    step,
                    args.rollout_grow_from,
                    args.rollout_grow_until,
                    args.min_rollout_length,
                    args.max_rollout_length,
                )
                imagined.grow(round(rollouts_kept * length))
                rows = real.sample(1, args.rollout_batch_size, generator)[0]  # [n, W]
                tables = []
                for obs in rows[:, :obs_dim].split(ROLLOUT_CHUNK):
                    tables += rollout(model, actor, ends, obs, length, generator)
                new_rows = torch.cat(tables)
                imagined.add(new_rows)
                _, _, reward, next_obs, terminated, _ = imagined.split(new_rows)
                statistics |= {
                    "stats/rollout_length": length,
                    "stats/rollout_reward": reward.mean().item(),
                    "stats/real_reward": real.split(rows)[2].mean().item(),
                    "stats/rollout_terminated": terminated.mean().item(),
                    "stats/rollout_abs_max": next_obs.abs().max().item(),
                    "time/model_seconds": logger.seconds() - start_second,
                }
                logger.scalars(step, statistics)
                for name in ("losses/model", "stats/rollout_abs_max"):
                    if not math.isfinite(statistics[name]):
                        message = f"{name} is {statistics[name]} at step {step}: it diverged"
                        raise InputError(f"{message}; lower --model-learning-rate")

            # 3. SAC, G updates: in each batch first num_real real rows, then imagined ones
            batches = []
            if step > learning_starts:
                shape = (args.updates_per_step, args.batch_size)
                rows = mixed_batches(real, imagined, *shape, num_real, generator)  # [G, B, W]
                batches = list(zip(*real.split(rows)))  # G times obs [B, O], action [B, A], ...
                if num_updates == first_update:  # random steps are no measure
                    logger.first_step, logger.first_second = step - 1, logger.seconds()
            for obs, action, reward, next_obs, terminated, _ in batches:
                num_updates += 1
                factor = lr_factor(
                    num_updates, total_updates, args.lr_schedule, args.warmup_updates
                )
                for opt in (actor_opt, critic_opt, alpha_opt):
                    opt.param_groups[0]["lr"] = args.learning_rate * factor
                alpha = log_alpha.detach().exp()

                # critics
                with torch.no_grad():
                    next_action, next_log_prob = sample_action(*actor(next_obs), generator)
                    next_q = target_critic(next_obs, next_action)  # [2, B]
                    values = (reward, terminated, next_q, next_log_prob, alpha)
                    target = soft_target(*values, args.gamma, backup_entropy=True)  # [B]
                q = critic(obs, action)  # [2, B]
                critic_loss = sac_loss(q, target)
                critic_opt.zero_grad()
                critic_loss.backward()
                critic_opt.step()
                update_target(target_critic, critic, args.tau)

                # actor
                critic.requires_grad_(False)  # gradients go through the critics, not into them
                action, log_prob = sample_action(*actor(obs), generator)  # [B, A], [B]
                actor_loss = sac_policy_loss(log_prob, critic(obs, action), alpha)
                actor_opt.zero_grad()
                actor_loss.backward()
                actor_opt.step()
                critic.requires_grad_(True)

                # temperature
                if args.alpha is None:
                    alpha_loss = temperature_loss(log_alpha, log_prob, target_entropy)
                    alpha_opt.zero_grad()
                    alpha_loss.backward()
                    alpha_opt.step()

            # 4. log, evaluate, stop, save
            if batches and step % args.log_interval == 0:
                seconds = logger.seconds() - logger.first_second
                statistics = {
                    "charts/env_steps_per_second": (step - logger.first_step) / seconds,
                    "charts/updates_per_second": (num_updates - first_update) / seconds,
                    "charts/learning_rate": actor_opt.param_groups[0]["lr"],
                    "losses/critic": critic_loss.item(),
                    "losses/actor": actor_loss.item(),
                    "stats/alpha": alpha.item(),
                    "stats/policy_entropy": -log_prob.mean().item(),
                    "stats/target_mean": target.mean().item(),
                    "stats/q_max": q.max().item(),
                }
                td_error = (q - target).abs().mean(dim=0)  # [B]
                for name, part in (("real", slice(num_real)), ("model", slice(num_real, None))):
                    if len(td_error[part]) > 0:
                        statistics[f"stats/q_{name}"] = q[:, part].mean().item()
                        statistics[f"stats/td_error_{name}"] = td_error[part].mean().item()
                logger.scalars(step, statistics)
                logger.progress(step)
                for name in ("losses/critic", "losses/actor"):
                    if not math.isfinite(statistics[name]):
                        message = f"{name} is {statistics[name]} at step {step}: it diverged"
                        raise InputError(f"{message}; lower --learning-rate")
            is_best = False
            if step == total:
                stop_reason = "the budget is spent"
            # not while steps are random: patience would run out
            if step == total or (step > learning_starts and step % args.eval_interval == 0):
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
                    "real": real.state(),
                    "imagined": imagined.state(),
                    "episode": episode,
                    "episode_actions": torch.from_numpy(np.array(episode_actions)),
                    "current_obs": torch.from_numpy(current_obs),
                    "best_return": best_return,
                    "evals_since_best": evals_since_best,
                    "log_position": logger.position(step),
                    "generator": generator.get_state(),
                    **{name: part.state_dict() for name, part in parts.items()},
                }
                save_atomically(checkpoint_path, partial(torch.save, checkpoint))
                del checkpoint  # with a copy of the buffers

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
