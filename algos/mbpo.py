r"""MBPO: Model-Based Policy Optimization. Online RL, continuous actions.

Paper: "When to Trust Your Model: Model-Based Policy Optimization", M. Janner, J. Fu, M. Zhang,
S. Levine, 2019, arXiv:1906.08253.

Idea: SAC that learns mostly from imagined transitions. A model learns to predict reward and next
state (fit_model). In it, the policy takes k steps from states that really occurred (rollout). k is
small, since errors add up, but rollouts are many, so that SAC can make G updates per real step. The
model is an ensemble, since a policy would exploit the mistakes of a single network. Its members
have their own initial weights and training rows, so that they disagree where data are few. Each
imagined step is made by a random elite, one of the members that predict best.

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
    - Each fit begins with a new Adam: old averages made first steps too long (benchmark/NOTES.md).
    - Where a task ends is given, as by the authors, for those in TERMINATION. For any other it is
      learned: each member also predicts a logit, from which a rollout draws whether it ends.
    - k grows with steps, not epochs. A fit is capped (max_model_updates). alpha's loss has alpha
      where theirs has log alpha. log std of the policy is squashed: a clip has no gradient.

Shapes: n rows, B batch, G updates per step, M members, C = 2 critics, both in a target (Z = 2),
O observation, A action, D = 1 + O of x, W = 2 O + A + 3 a transition, E evaluation episodes

Run it, resume it (a checkpoint has 6 MB), run it with the paper's settings (up to 600 MB):
    python algos/mbpo.py --env-id Pendulum-v1
    python algos/mbpo.py --resume runs/<run>
    python algos/mbpo.py --env-id Hopper-v5 --total-timesteps 130000 --learning-starts 5000 \
        --hidden-dim 256 --learning-rate 3e-4 --updates-per-step 20 --target-entropy -1 \
        --no-normalize-targets --model-hidden-dim 200 --model-batch-size 256 \
        --model-train-interval 250 --rollout-batch-size 100000 --max-rollout-length 15 \
        --rollout-grow-from 25000 --rollout-grow-until 155000 --eval-interval 1000 \
        --max-model-updates 20000 --checkpoint-interval 10000
"""

import contextlib
import io
import math
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Literal

import tyro

# ---- arguments


@dataclass
class Args:
    # task
    env_id: str = "Pendulum-v1"  # Gymnasium environment
    seed: int = 1  # same seed, same machine: same numbers to the last bit
    # budget
    total_timesteps: int = 2_000  # budget in environment steps
    # optimisation
    batch_size: int = 256  # transitions per update
    gamma: float = 0.99  # discount
    learning_rate: float = 1e-3  # step size of Adam, for every network without a flag of its own
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"  # the last two fall to 0
    warmup_updates: int = 0  # the learning rate first climbs from 0 over this many updates
    hidden_dim: int = 128  # width of the hidden layers, in every network
    # evaluation and stops
    eval_interval: int = 200  # updates (online: environment steps) between evaluations
    eval_episodes: int = 10  # episodes per evaluation
    eval_seed: int = 10_000  # evaluation episode i starts from eval_seed + i
    target_return: float | None = None  # stop when an evaluation's mean return gets there
    patience: int | None = None  # stop after this many evaluations without a better one
    # the run
    checkpoint_interval: int = 500  # updates (or steps) between saves; Ctrl-C, SIGTERM save, too
    log_interval: int = 100  # updates (or steps) between entries in the logs
    run_dir: str | None = None  # folder of the run [runs/<algo>__<env>__<seed>__<time>]
    resume: str | None = None  # folder of a run to continue, with its flags; budgets may change
    evaluate: str | None = None  # checkpoint to evaluate instead of training
    record: str | None = None  # with --evaluate: save its episodes as a dataset, FILE.npz
    capture_video: bool = False  # with --evaluate: film one episode, next to the checkpoint
    track: bool = False  # log to Weights & Biases, too (pip install wandb)
    quiet: bool = False  # print nothing but errors
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # auto takes a GPU if there is one
    torch_threads: int | None = None  # CPU threads [all cores]
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
    max_model_updates: int = 2_000  # a fit has at most so many updates, or one epoch
    model_batch_size: int = 64  # transitions per update of the model, for each member its own
    rollout_batch_size: int = 10_000  # rollouts after each fit, from as many real states
    min_rollout_length: int = 1  # k, steps of a rollout, until step rollout_grow_from
    max_rollout_length: int = 1  # k from step rollout_grow_until on; linear in between
    rollout_grow_from: int = 20_000  # step at which k begins to grow, if the maximum is larger
    rollout_grow_until: int = 150_000  # step at which k has grown to max_rollout_length
    retain_steps: int = 1_000  # for at least how many steps imagined transitions are kept


LIMITS = {  # rule: flags; common.LIMITS has those of the shared ones
    "> 0": "updates_per_step num_members num_elites model_hidden_dim model_train_interval "
    "max_model_updates model_batch_size rollout_batch_size min_rollout_length "
    "retain_steps",
    ">= 0": "rollout_grow_from",
    "in (0, inf)": "model_learning_rate",
    "in [0, 1]": "real_ratio",
}

if __name__ == "__main__":  # torch takes seconds: Ctrl-C in them is quiet, --help need not wait
    sys.excepthook = lambda kind, *x: kind is KeyboardInterrupt or sys.__excepthook__(kind, *x)
    if {"-h", "--help"} & {*sys.argv}:
        with contextlib.redirect_stdout(io.StringIO()) as flags, contextlib.suppress(SystemExit):
            tyro.cli(Args)  # prints the flags; below they go between title and docstring
        sys.stdout.write(f"{__doc__.splitlines()[0]}\n{flags.getvalue()}\n{__doc__}")
        sys.exit()

import gymnasium as gym
import numpy as np
import torch
from torch import nn

sys.path[1:1] = map(str, Path(__file__).resolve().parents[:2])  # common.py: beside, or above
import common
from common import InputError

ALGO = "mbpo"
MODEL_PATIENCE = 5  # a fit ends after more epochs than this without a better member
ROLLOUT_CHUNK = 10_000  # rows at once: activations of all would be large


def check_args(args: Args) -> None:
    """Rules between flags."""
    num_real = args.real_ratio * args.batch_size
    shortest, longest = args.min_rollout_length, args.max_rollout_length
    grow_from, grow_until = args.rollout_grow_from, args.rollout_grow_until
    rules = [
        ("learning_starts", ">= 3, for the first fit", args.learning_starts >= 3),
        ("buffer_capacity", ">= 3, for the first fit", args.buffer_capacity >= 3),
        ("alpha", "used without --target-entropy", None in (args.alpha, args.target_entropy)),
        ("real_ratio", "0, 1 or enough for a row of each kind", not 0 < num_real < 1),
        ("num_elites", f"<= num_members {args.num_members}", args.num_elites <= args.num_members),
        ("max_rollout_length", f">= min_rollout_length {shortest}", longest >= shortest),
        ("rollout_grow_until", f"> rollout_grow_from {grow_from}", grow_until > grow_from),
    ]
    for name, rule, holds in rules:
        if not holds:
            raise InputError(f"{name} must be {rule}, got {getattr(args, name)}")
    if args.total_timesteps <= args.learning_starts:
        spent = f"total_timesteps {args.total_timesteps} is spent before the first update"
        raise InputError(f"{spent}: lower --learning-starts ({args.learning_starts})")


# ---- networks


def relu_mlp(widths: list[int]) -> nn.Sequential:
    """Linear layers from each width to the next, with ReLUs between them."""
    layers = []
    for width, next_width in pairwise(widths):
        layers += [nn.Linear(width, next_width), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers[:-1])


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

    def __init__(self, obs_dim: int, action_dim: int, hidden_dims: list[int]):
        super().__init__()
        self.net = relu_mlp([obs_dim, *hidden_dims, 2 * action_dim])
        with torch.no_grad():  # start close to mean 0 and std 0.22 in every state
            self.net[-1].weight.mul_(0.01)
            self.net[-1].bias.zero_()

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_std = self.net(obs).chunk(2, dim=-1)  # [B, A], [B, A]
        # squashed, not clamped: a clamp has no gradient outside its bounds, and std would be stuck
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


class TwoCritics(nn.Module):
    """Q_1(s, a) and Q_2(s, a), two networks that share nothing."""

    def __init__(self, obs_dim: int, action_dim: int, hidden_dims: list[int], layer_norm: bool):
        super().__init__()
        self.members = nn.ModuleList()
        for _ in range(2):
            layers = []
            for width, next_width in pairwise([obs_dim + action_dim, *hidden_dims]):
                layers.append(nn.Linear(width, next_width))
                if layer_norm:  # features of a fixed norm: Q is bounded for any action
                    layers.append(nn.LayerNorm(next_width))
                layers.append(nn.ReLU(inplace=True))
            self.members.append(nn.Sequential(*layers, nn.Linear(hidden_dims[-1], 1)))
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.xavier_uniform_(layer.weight)
                nn.init.zeros_(layer.bias)

    def forward(self, obs: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """[B, O], [B, A] -> [2, B]"""
        x = torch.cat([obs, action], dim=-1)  # [B, O + A]
        return torch.stack([member(x).squeeze(-1) for member in self.members])  # [2, B]


def bound_log_var(log_var: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Smoothly to about [low, high], since a clip has no gradient outside. [..., D] -> [..., D]"""
    log_var = high - nn.functional.softplus(high - log_var)
    return low + nn.functional.softplus(log_var - low)


class ModelLinear(nn.Module):
    """M linear layers that share nothing, in one batched product: y_m = x_m W_m + b_m."""

    def __init__(self, num_members: int, input_dim: int, output_dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_members, input_dim, output_dim))
        self.bias = nn.Parameter(torch.zeros(num_members, 1, output_dim))
        std = 0.5 / math.sqrt(input_dim)  # as by MBPO's authors
        nn.init.trunc_normal_(self.weight, std=std, a=-2 * std, b=2 * std)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.baddbmm(self.bias, x, self.weight)  # [M, B, input] -> [M, B, output]


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
        self.output_widths = [target_dim, target_dim, int(learns_end)]  # as in heads
        layers = []
        for width in (input_dim, hidden_dim, hidden_dim, hidden_dim):
            layers += [ModelLinear(num_members, width, hidden_dim), nn.SiLU()]
        output_layer = ModelLinear(num_members, hidden_dim, sum(self.output_widths))
        self.net = nn.Sequential(*layers, output_layer)
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
        linears = [layer for layer in self.net if isinstance(layer, ModelLinear)]
        biases = [linear.bias for linear in linears]
        groups = [{"params": [*biases, self.min_log_var, self.max_log_var]}]
        for linear, decay in zip(linears, self.WEIGHT_DECAY):
            groups.append({"params": [linear.weight], "weight_decay": decay})
        return torch.optim.Adam(groups, learning_rate, fused=True)

    def heads(self, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Outputs -> mean, log_var [..., D], logit of an end [..., 1], or [..., 0] where known."""
        mean, log_var, end_logit = output.split(self.output_widths, dim=-1)
        return mean, bound_log_var(log_var, self.min_log_var, self.max_log_var), end_logit

    def set_scales(self, inputs: torch.Tensor, targets: torch.Tensor, with_targets: bool) -> None:
        """Mean and standard deviation of what goes in, and of what comes out. [n, O + A], [n, D]"""
        tables = [(inputs, self.input_mean, self.input_std)]
        if with_targets:
            tables.append((targets, self.target_mean, self.target_std))
        for table, mean, std in tables:
            mean.copy_(table.mean(dim=0))
            std.copy_(table.std(dim=0))
            std[std <= 1e-6 * mean.abs() + 1e-12] = 1.0  # a constant, but for rounding

    def scale(self, inputs: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
        """As the networks see them. [n, O + A], [n, D] -> [n, O + A], [n, D]"""
        inputs = (inputs - self.input_mean) / self.input_std
        return [inputs, (targets - self.target_mean) / self.target_std]

    @torch.no_grad()
    def mse(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Squared error of each member's mean, of scaled rows. Members are compared by what they
        predict, not by how sure they are of it. [n, O + A], [n, D] -> [M]"""
        num_members = len(self.net[0].weight)
        mean, _, _ = self.heads(self.net(inputs.expand(num_members, -1, -1)))  # [M, n, D]
        return ((mean - targets) ** 2).mean(dim=(1, 2))  # [M]

    @torch.no_grad()
    def sample(
        self, obs: torch.Tensor, action: torch.Tensor, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The next step of n rows, each by an elite drawn for it: (r, s' - s) ~ p_m(.|s, a).
        [n, O], [n, A] -> reward [n], next_obs [n, O], end_logit [n, 1] or [n, 0]"""
        num_rows, num_elites, device = len(obs), len(self.elites), obs.device
        inputs = (torch.cat([obs, action], dim=-1) - self.input_mean) / self.input_std  # [n, O + A]
        choice = torch.randint(num_elites, (num_rows,), device=device, generator=generator)  # [n]
        output = torch.empty(num_rows, sum(self.output_widths), device=device)
        for i, member in enumerate(self.elites.tolist()):
            own_rows = (choice == i).nonzero().squeeze(1)  # [n_i]
            # the same forward pass, but of one member: with its slice in place of each stack
            own = {name: stack[member : member + 1] for name, stack in self.net.named_parameters()}
            own_output = torch.func.functional_call(self.net, own, inputs[own_rows][None])
            output[own_rows] = own_output[0]  # [1, n_i, .] -> [n_i, .]
        mean, log_var, end_logit = self.heads(output)  # [n, D], [n, D], [n, 1] or [n, 0]
        noise = torch.randn(mean.shape, device=device, generator=generator)
        target = self.target_mean + self.target_std * (mean + (0.5 * log_var).exp() * noise)
        return target[:, 0], obs + target[:, 1:], end_logit


CAN_END = "Ant-v5 Hopper-v5 Humanoid-v5 InvertedDoublePendulum-v5 InvertedPendulum-v5 Walker2d-v5"
NEVER_END = "HalfCheetah-v5 HumanoidStandup-v5 Pendulum-v1 Pusher-v5 Reacher-v5 Swimmer-v5"


def task_ends(env_id: str, next_obs: torch.Tensor) -> torch.Tensor:
    """Where a task terminates, by the rules of Gymnasium's source. These say what is healthy, which
    is negated here, since a comparison with NaN is false. [n, O] -> [n]"""
    height, angle = next_obs[:, 0], next_obs[:, 1]  # of a body, where it has them
    is_finite = next_obs.isfinite().all(dim=1)
    if env_id == "Ant-v5":
        return ~(is_finite & (height >= 0.2) & (height <= 1.0))
    if env_id == "Hopper-v5":
        is_sane = (next_obs[:, 1:].abs() < 100).all(dim=1)
        return ~(is_sane & (height > 0.7) & (angle.abs() < 0.2))
    if env_id == "Humanoid-v5":
        return ~((height > 1.0) & (height < 2.0))
    if env_id == "InvertedDoublePendulum-v5":
        sin_1, sin_2, cos_1, cos_2 = next_obs[:, 1:5].unbind(dim=1)
        cos_sum = cos_1 * cos_2 - sin_1 * sin_2  # of both angles
        return ~(0.6 * (cos_1 + cos_sum) > 1)  # height of the tip
    if env_id == "InvertedPendulum-v5":
        return ~(is_finite & (angle.abs() <= 0.2))
    if env_id == "Walker2d-v5":
        return ~((height > 0.8) & (height < 2.0) & (angle.abs() < 1))
    return torch.zeros_like(is_finite)  # NEVER_END


TERMINATION = {env_id: partial(task_ends, env_id) for env_id in f"{CAN_END} {NEVER_END}".split()}


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
        assert capacity >= len(self.rows)
        if capacity > len(self.rows):
            # a ring that is not full has position == size: nothing moves
            oldest_first = torch.roll(self.rows[: self.size], -self.position, dims=0)
            self.rows = torch.empty(capacity, sum(self.widths), device=self.rows.device)
            self.rows[: self.size] = oldest_first
            self.position = self.size

    def state_dict(self) -> dict:
        """What a checkpoint needs: a copy of the filled part, not of the capacity."""
        rows, capacity = self.rows[: self.size].clone(), len(self.rows)
        return {"rows": rows, "position": self.position, "capacity": capacity}

    def load_state_dict(self, state: dict) -> None:
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
    alpha: torch.Tensor | float,
    gamma: float,
) -> torch.Tensor:
    """y = r + gamma (1 - terminated) (min_i Q'_i(s', a') - alpha log pi(a'|s')).
    [B], [B], [Z, B], [B], [] -> [B]

    Truncation does not appear here: a truncated episode would have gone on, so it bootstraps.
    """
    assert reward.shape == terminated.shape == next_log_prob.shape == next_q.shape[1:]
    next_value = next_q.min(dim=0).values - alpha * next_log_prob  # [B]
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


def make_policy(
    actor: GaussianActor, action_space: gym.Space, device: torch.device
) -> common.Policy:
    """What is evaluated: tanh(mean), without noise."""

    @torch.no_grad()
    def policy(obs: np.ndarray) -> np.ndarray:
        mean, _ = actor(torch.as_tensor(obs, dtype=torch.float32, device=device))  # [E, A]
        return common.unnormalize_action(torch.tanh(mean).cpu().numpy(), action_space)

    return policy


def load_policy(path: str, **overrides) -> common.Policy:
    """The policy of a checkpoint: a batch of obs -> actions. `overrides` are flags, e.g. device."""
    checkpoint = common.load_checkpoint(path, ALGO, Args, overrides.get("env_id"))
    args = replace(Args(**checkpoint["args"]), **overrides)
    env, device = common.make_env(args.env_id), common.pick_device(args.device)
    (obs_dim,), action_dim, _ = common.check_spaces(env, actions="vectors")
    actor = GaussianActor(obs_dim, action_dim, [args.hidden_dim] * 2).to(device)
    actor.load_state_dict(checkpoint["actor"])
    return make_policy(actor, env.action_space, device)


# ---- training


@torch.no_grad()
def update_target(target: nn.Module, network: nn.Module, tau: float) -> None:
    """target <- (1 - tau) target + tau network, for all parameters in one call."""
    torch._foreach_lerp_(list(target.parameters()), list(network.parameters()), tau)


def fit_model(
    model: Dynamics, real: Buffer, num_fresh: int, lr: float, args: Args, generator: torch.Generator
) -> dict[str, float]:
    """Train all members on all real steps, starting from the weights of the last fit, until none
    gets better on held-out rows. Then each goes back to its best epoch; the best become elites."""
    device, num_members = real.rows.device, args.num_members
    obs, action, reward, next_obs, terminated, _ = real.split(real.rows[: real.size])
    inputs = torch.cat([obs, action], dim=-1)  # [n, O + A]
    targets = torch.cat([reward[:, None], next_obs - obs], dim=-1)  # [n, D]
    scalars = {}
    if num_fresh > 0:  # the steps since the last fit, which no member has seen: an honest error
        latest = torch.arange(real.position - num_fresh, real.position) % real.size  # a ring
        fresh_mse = model.mse(*model.scale(inputs[latest], targets[latest]))  # [M]
        scalars["stats/fresh_mse"] = fresh_mse[model.elites].mean().item()

    order = torch.randperm(real.size, device=device, generator=generator)  # [n]
    num_holdout = min(max(1, int(0.2 * real.size)), 5_000)  # a fifth, as by the authors
    holdout, training = order[:num_holdout], order[num_holdout:]  # row numbers
    model.set_scales(inputs[training], targets[training], args.normalize_targets)
    scaled_inputs, scaled_targets = model.scale(inputs, targets)  # [n, O + A], [n, D]
    # bootstrap: for the whole fit, every member has rows of its own, drawn with replacement
    shape = (num_members, len(training))
    draw = torch.randint(len(training), shape, device=device, generator=generator)
    bootstrap = training[draw]  # [M, len(training)] row numbers

    model_opt = model.optimizer(lr)
    best_weights = deepcopy(model.net.state_dict())  # and biases; each is a stack, [M, ...]
    best_error = torch.full((num_members,), math.inf, device=device)  # [M]
    last_best_epoch = 0
    # a cap in epochs would leave the first fits, whose rows are few, almost no updates
    updates_per_epoch = math.ceil(len(training) / args.model_batch_size)
    for epoch in range(1, max(1, args.max_model_updates // updates_per_epoch) + 1):
        shuffle = torch.rand(shape, device=device, generator=generator).argsort(dim=1)
        for index in bootstrap.gather(1, shuffle).split(args.model_batch_size, dim=1):  # [M, B]
            mean, log_var, end_logit = model.heads(model.net(scaled_inputs[index]))  # [M, B, D]
            bounds = (model.min_log_var, model.max_log_var)
            loss = mbpo_model_loss(mean, log_var, scaled_targets[index], *bounds)
            if end_logit.shape[-1] > 0:
                loss = loss + termination_loss(end_logit.squeeze(-1), terminated[index])
            model_opt.zero_grad()
            loss.backward()
            model_opt.step()

        error = model.mse(scaled_inputs[holdout], scaled_targets[holdout])  # [M]
        is_better = error < 0.99 * best_error  # [M] bool; less than a percent is noise
        best_error = torch.where(is_better, error, best_error)
        # each member has a best epoch of its own: copy the slices of those for which it is this one
        for name, stack in model.net.state_dict().items():
            best_weights[name][is_better] = stack[is_better]
        if is_better.any():
            last_best_epoch = epoch
        if epoch - last_best_epoch > MODEL_PATIENCE:
            break

    model.net.load_state_dict(best_weights)  # not the bounds, which members share
    model.elites.copy_(best_error.argsort()[: args.num_elites])
    return scalars | {
        "losses/model": loss.item(),
        "stats/holdout_mse": best_error.mean().item(),
        **{f"stats/holdout_mse_{m}": best_error[m].item() for m in range(num_members)},
        "stats/holdout_r2": 1 - (best_error.mean() / scaled_targets.var(dim=0).mean()).item(),
        "stats/model_epochs": epoch,
        "stats/max_log_var": model.max_log_var.mean().item(),
    }


def rollout_length(step: int, grow_from: int, grow_until: int, shortest: int, longest: int) -> int:
    """k: the shortest until grow_from, the longest from grow_until on, linear in between."""
    progress = (step - grow_from) / (grow_until - grow_from)
    length = shortest + progress * (longest - shortest)
    return int(min(max(length, shortest), longest))


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
    takes no further step. [n, O] -> transitions of each step, [n, W], [n or fewer, W], ..."""
    tables = []
    for _ in range(length):
        action, _ = sample_action(*actor(obs), generator)  # [n, A]
        reward, next_obs, end_logit = model.sample(obs, action, generator)
        if ends is not None:
            terminated = ends(next_obs)  # [n] bool
        else:
            draw = torch.rand(len(obs), device=obs.device, generator=generator)
            terminated = draw < torch.sigmoid(end_logit.squeeze(1))  # [n] bool
        flags = torch.stack([terminated, torch.zeros_like(terminated)], dim=1)  # none is truncated
        tables.append(torch.cat([obs, action, reward[:, None], next_obs, flags], dim=1))  # [n, W]
        obs = next_obs[~terminated]  # [n or fewer, O]
        if len(obs) == 0:
            break
    return tables


def train(args: Args) -> dict[str, float]:
    # setup
    run = common.Run(ALGO, args, LIMITS)
    args, device = run.args, run.device
    check_args(args)
    env = common.make_env(args.env_id)
    (obs_dim,), action_dim, _ = common.check_spaces(env, actions="vectors")
    ends = TERMINATION.get(env.spec.id)
    total_updates = (args.total_timesteps - args.learning_starts) * args.updates_per_step
    torch.manual_seed(args.seed)  # for the initial weights
    generator = torch.Generator(device).manual_seed(common.second_seed(args.seed))  # for the rest

    # data: real steps, and imagined ones. The second buffer grows with k in the loop, so that it
    # always holds the rollouts of so many fits
    fits_kept = math.ceil(args.retain_steps / args.model_train_interval)
    with common.told_in_one_line(f"buffer_capacity {args.buffer_capacity} is too much memory"):
        real = Buffer(args.buffer_capacity, obs_dim, action_dim, device)
    num_rollouts = args.rollout_batch_size
    with common.told_in_one_line(f"rollout_batch_size {num_rollouts} is too much memory"):
        imagined = Buffer(num_rollouts, obs_dim, action_dim, device)
    num_real = int(args.real_ratio * args.batch_size)  # in every batch
    uses_model = num_real < args.batch_size  # else it is SAC

    # networks
    sizes = (obs_dim, action_dim, [args.hidden_dim] * 2)
    actor = GaussianActor(*sizes).to(device)
    critic = TwoCritics(*sizes, args.critic_layer_norm).to(device)
    target_critic = deepcopy(critic)
    initial_alpha = 1.0 if args.alpha is None else args.alpha
    log_alpha = nn.Parameter(torch.tensor(initial_alpha, device=device).log())
    target_entropy = -action_dim / 2 if args.target_entropy is None else args.target_entropy
    model_sizes = (args.num_members, args.num_elites, obs_dim, action_dim, args.model_hidden_dim)
    model = Dynamics(*model_sizes, learns_end=ends is None).to(device)
    actor_opt = torch.optim.Adam(actor.parameters(), args.learning_rate, fused=True)
    critic_opt = torch.optim.Adam(critic.parameters(), args.learning_rate, fused=True)
    alpha_opt = torch.optim.Adam([log_alpha], args.learning_rate, fused=True)

    # episode: a resumed run plays the one again that it was in
    num_updates, episode = run.saved.get("num_updates", 0), run.saved.get("episode", 0)
    episode_actions = list(run.saved["episode_actions"].numpy().copy()) if run.saved else []
    current_obs, episode_return = common.start_episode(env, args.seed, episode, episode_actions)
    run.check_replay(current_obs)

    # checkpoint: best.pt holds what acts, checkpoint.pt everything that a resumed run needs
    acting = {"actor": actor}
    everything = acting | {"critic": critic, "target_critic": target_critic, "model": model}
    everything |= {"log_alpha": log_alpha, "actor_opt": actor_opt, "critic_opt": critic_opt}
    everything |= {"alpha_opt": alpha_opt, "real": real, "imagined": imagined}
    everything["generator"] = generator
    kind = "learned" if ends is None else "known"
    run.start(args.total_timesteps, everything, about=f"termination is {kind}")
    policy = make_policy(actor, env.action_space, device)
    if run.is_fresh:
        run.evaluate(policy, acting)

    # loop: step is 1, 2, .. total, or ends early by a stop
    for step in run.steps():
        is_random, since_random = step <= args.learning_starts, step - args.learning_starts
        # 1. act, and remember
        if is_random:
            taken = 2 * torch.rand(action_dim, device=device, generator=generator) - 1
        else:
            state = torch.as_tensor(current_obs, dtype=torch.float32, device=device)
            with torch.no_grad():
                taken, _ = sample_action(*actor(state), generator)  # [A]
        taken = taken.cpu().numpy()
        episode_actions.append(common.unnormalize_action(taken, env.action_space))
        new_obs, new_reward, is_terminated, is_truncated, _ = env.step(episode_actions[-1])
        transition = (current_obs, taken, new_reward, new_obs, is_terminated, is_truncated)
        real.add(as_rows(*([field] for field in transition)))
        current_obs, episode_return = np.array(new_obs), episode_return + float(new_reward)
        if is_terminated or is_truncated:
            run.log({"charts/episodic_return": episode_return})
            episode, episode_actions = episode + 1, []
            current_obs, episode_return = common.start_episode(env, args.seed, episode)

        if uses_model and since_random >= 0 and since_random % args.model_train_interval == 0:
            # 2. model: fit it to all real steps
            start_second = run.seconds()
            factor = common.lr_factor(num_updates + 1, total_updates, args.lr_schedule, warmup=0)
            model_lr = args.model_learning_rate * factor
            num_fresh = args.model_train_interval if since_random > 0 else 0  # 0: the first fit
            model_scalars = fit_model(model, real, num_fresh, model_lr, args, generator)

            # 3. imagine rollouts of k steps, from states that really occurred
            growth = (args.rollout_grow_from, args.rollout_grow_until)
            length = rollout_length(step, *growth, args.min_rollout_length, args.max_rollout_length)
            imagined.grow(fits_kept * args.rollout_batch_size * length)
            start_rows = real.sample(1, args.rollout_batch_size, generator)[0]  # [n, W]
            start_obs, _, start_reward, _, _, _ = real.split(start_rows)
            tables = []
            for some_obs in start_obs.split(ROLLOUT_CHUNK):
                tables += rollout(model, actor, ends, some_obs, length, generator)
            new_rows = torch.cat(tables)  # [n k or fewer, W]
            imagined.add(new_rows)
            _, _, model_reward, model_obs, model_end, _ = imagined.split(new_rows)
            abs_max = model_obs.abs().max().item()
            model_scalars |= {
                "stats/rollout_length": length,
                "stats/rollout_reward": model_reward.mean().item(),
                "stats/real_reward": start_reward.mean().item(),
                "stats/rollout_terminated": model_end.mean().item(),
                "stats/rollout_abs_max": abs_max,
                "time/model_seconds": run.seconds() - start_second,
            }
            run.log(model_scalars, lower="--model-learning-rate")
            if not math.isfinite(abs_max):
                message = f"stats/rollout_abs_max is {abs_max} at step {step}: it diverged"
                raise InputError(f"{message}; lower --model-learning-rate")

        if not is_random:
            # 4. SAC: draw G mini-batches, in each first num_real real rows, then imagined ones
            shape = (args.updates_per_step, args.batch_size)
            batch_rows = mixed_batches(real, imagined, *shape, num_real, generator)  # [G, B, W]
            for obs, action, reward, next_obs, terminated, _ in zip(*real.split(batch_rows)):
                num_updates += 1
                factor = common.lr_factor(
                    num_updates, total_updates, args.lr_schedule, args.warmup_updates
                )
                for opt in (actor_opt, critic_opt, alpha_opt):
                    opt.param_groups[0]["lr"] = args.learning_rate * factor
                alpha = log_alpha.detach().exp()

                # 5. critics
                with torch.no_grad():
                    next_action, next_log_prob = sample_action(*actor(next_obs), generator)
                    next_q = target_critic(next_obs, next_action)  # [2, B]
                    values = (reward, terminated, next_q, next_log_prob, alpha)
                    target = soft_target(*values, args.gamma)  # [B]
                q = critic(obs, action)  # [2, B]
                critic_loss = sac_loss(q, target)
                critic_opt.zero_grad()
                critic_loss.backward()
                critic_opt.step()
                update_target(target_critic, critic, args.tau)

                # 6. actor
                critic.requires_grad_(False)  # gradients go through the critics, not into them
                policy_action, log_prob = sample_action(*actor(obs), generator)  # [B, A], [B]
                actor_loss = sac_policy_loss(log_prob, critic(obs, policy_action), alpha)
                actor_opt.zero_grad()
                actor_loss.backward()
                actor_opt.step()
                critic.requires_grad_(True)

                # 7. temperature
                if args.alpha is None:
                    alpha_loss = temperature_loss(log_alpha, log_prob, target_entropy)
                    alpha_opt.zero_grad()
                    alpha_loss.backward()
                    alpha_opt.step()

            # 8. log the last of the G updates
            if step % args.log_interval == 0:
                td_error = (q - target).abs().mean(dim=0)  # [B]
                scalars = {
                    "charts/learning_rate": actor_opt.param_groups[0]["lr"],
                    "losses/critic": critic_loss.item(),
                    "losses/actor": actor_loss.item(),
                    "stats/alpha": alpha.item(),
                    "stats/policy_entropy": -log_prob.mean().item(),
                    "stats/target_mean": target.mean().item(),
                    "stats/q_max": q.max().item(),
                }
                kinds = {"real": slice(num_real), "model": slice(num_real, None)}
                for name, part in kinds.items():
                    if len(td_error[part]) > 0:
                        scalars[f"stats/q_{name}"] = q[:, part].mean().item()
                        scalars[f"stats/td_error_{name}"] = td_error[part].mean().item()
                run.log(scalars, updates=num_updates)

        # 9. evaluate, but not while steps are random and nothing changes; save
        if (step % args.eval_interval == 0 and not is_random) or step == args.total_timesteps:
            run.evaluate(policy, acting)
        if step % args.checkpoint_interval == 0 or run.is_last:
            place = {"num_updates": num_updates, "episode": episode, "current_obs": current_obs}
            run.save(everything | place | {"episode_actions": np.array(episode_actions)})
    return run.finish()


if __name__ == "__main__":
    sys.exit(common.main(ALGO, Args, train, load_policy))
