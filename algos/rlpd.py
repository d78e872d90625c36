r"""RLPD: Reinforcement Learning with Prior Data. Online RL, continuous actions.

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

Shapes: B batch, G updates per step, C critics, Z of them drawn, O observation, A action,
W = 2 O + A + 3 a transition, E evaluation episodes

Run it, resume it (a checkpoint: 2 MB, 12 at the paper's size, and 4 W bytes per step in the buffer)
    python algos/rlpd.py --env-id Pendulum-v1
    python algos/rlpd.py --resume runs/<run>

Without data and with two plain critics it is SAC, except that the actor follows their mean, not
their minimum, and that the target entropy is -A / 2, not -A:
    python algos/rlpd.py --dataset none --num-critics 2 --no-critic-layer-norm

The paper's hyper-parameters, on a Minari dataset:
    python algos/rlpd.py --env-id HalfCheetah-v5 --dataset minari:mujoco/halfcheetah/medium-v0 \
        --num-critics 10 --hidden-dim 256 --gradient-updates-per-step 20 --learning-rate 3e-4 \
        --learning-starts 5000 --total-timesteps 250000
"""

import contextlib
import io
import math
import sys
from copy import deepcopy
from dataclasses import dataclass, replace
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
    dataset: str = "auto"  # auto (ours, else none) | none | random[:N] | PATH.npz | minari:ID
    reward_scale: float = 1.0  # training sees reward_scale * reward + reward_shift
    reward_shift: float = 0.0  # see reward_scale
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
    compile: bool = False  # torch.compile the networks: slow to start
    # RLPD only
    offline_batch_ratio: float = 0.5  # share of the dataset in every mini-batch; 0: no prior data
    offline_pretrain_updates: int = 0  # updates on the dataset alone, first; logged as steps <= 0
    data_in_buffer: bool = False  # with ratio 0: start with the dataset in the replay buffer
    buffer_capacity: int = 1_000_000  # steps that the replay buffer holds; then the oldest go
    learning_starts: int = 200  # first steps, with random actions and without updates
    train_frequency: int = 1  # steps between blocks of updates
    gradient_updates_per_step: int = 8  # G, critic updates in a block; then one of actor and alpha
    num_hidden_layers: int = 2  # hidden layers of every network; the paper has 3 on some tasks
    num_critics: int = 5  # C, size of the ensemble
    num_min_critics: int = 2  # Z, the drawn critics whose minimum is in a target
    critic_layer_norm: bool = True  # layer normalisation before each ReLU of the critics
    backup_entropy: bool = True  # whether -alpha log pi is part of a target
    alpha: float | None = None  # fixed temperature [learned, from 1]
    target_entropy: float | None = None  # entropy that a learned temperature aims at [-A / 2]
    tau: float = 0.005  # how far the targets move towards the networks; 1: hard copy
    record_replay: str | None = None  # with --evaluate: save its replay buffer, FILE.npz


LIMITS = {  # rule: flags; common.LIMITS has those of the shared ones
    "> 0": "gradient_updates_per_step num_hidden_layers num_critics num_min_critics",
    ">= 0": "offline_pretrain_updates",
    "in [0, 1]": "offline_batch_ratio",
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

ALGO = "rlpd"


def check_args(args: Args) -> None:
    """Rules between flags."""
    ratio, batch_size = args.offline_batch_ratio, args.batch_size
    if ratio not in (0, 1) and not 0.5 < ratio * batch_size < batch_size - 0.5:
        raise InputError(f"offline_batch_ratio must leave a row of each kind, got {ratio}")
    if ratio > 0 and args.data_in_buffer:
        raise InputError(f"offline_batch_ratio must be 0 beside --data-in-buffer, got {ratio}")
    if args.num_min_critics > args.num_critics:
        raise InputError(f"num_min_critics must be <= num_critics, got {args.num_min_critics}")
    if args.alpha is not None and args.target_entropy is not None:
        raise InputError(f"alpha must be used without --target-entropy, got {args.alpha}")
    if count_blocks(args) == 0:
        spent = f"total_timesteps {args.total_timesteps} is spent before the first update"
        raise InputError(f"{spent}: lower --learning-starts or --train-frequency")


def count_blocks(args: Args) -> int:
    """Blocks of updates in the whole run: one per train_frequency, after the random steps."""
    last, frequency = args.total_timesteps, args.train_frequency
    return last // frequency - min(last, args.learning_starts) // frequency


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
    """Q_1(s, a)..Q_C(s, a). Slice i of every parameter belongs to critic i, an ordinary MLP."""

    def __init__(
        self,
        num_members: int,
        obs_dim: int,
        action_dim: int,
        hidden_dims: list[int],
        layer_norm: bool,
    ):
        super().__init__()
        layers = []
        for width, next_width in pairwise([obs_dim + action_dim, *hidden_dims]):
            layers.append(EnsembleLinear(num_members, width, next_width))
            if layer_norm:  # features of a fixed norm: Q is bounded by the weights for any action
                layers.append(EnsembleLayerNorm(num_members, next_width))
            layers.append(nn.ReLU(inplace=True))
        self.net = nn.Sequential(*layers, EnsembleLinear(num_members, hidden_dims[-1], 1))

    def forward(self, obs: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """[B, O], [B, A] -> [C, B]"""
        num_members = len(self.net[0].weight)  # C, but Z in subset_q
        x = torch.cat([obs, action], dim=-1).expand(num_members, -1, -1)  # [C, B, O + A]
        return self.net(x).squeeze(-1)  # [C, B]


def subset_q(
    critic: EnsembleCritic, members: torch.Tensor, obs: torch.Tensor, action: torch.Tensor
) -> torch.Tensor:
    """Q_i(s, a) of the given members alone, since the others would be thrown away. -> [Z, B]"""
    # the same forward pass, with their slices in place of the full parameters
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

    def state_dict(self) -> dict:
        """What a checkpoint needs: a copy of the filled part, not of the capacity."""
        return {"rows": self.rows[: self.size].clone(), "position": self.position}

    def load_state_dict(self, state: dict) -> None:
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
    hidden_dims = [args.hidden_dim] * args.num_hidden_layers
    actor = GaussianActor(obs_dim, action_dim, hidden_dims).to(device)
    actor.load_state_dict(checkpoint["actor"])
    return make_policy(actor, env.action_space, device)


def evaluate_checkpoint(args: Args) -> dict[str, float]:
    """--evaluate, with --record-replay: the replay buffer as a dataset, oldest step first."""
    checkpoint = common.load_checkpoint(args.evaluate, ALGO, Args, args.env_id)
    if args.record_replay and "buffer" not in checkpoint:
        raise InputError(f"{args.evaluate} is a best.pt: the replay buffer is in checkpoint.pt")
    result = common.evaluate_checkpoint(ALGO, load_policy, args)
    if args.record_replay:
        rows, position = checkpoint["buffer"]["rows"], checkpoint["buffer"]["position"]
        if len(rows) == 0:
            raise InputError("the replay buffer is still empty")
        env = common.make_env(args.env_id)
        buffer = Buffer(0, *env.observation_space.shape, *env.action_space.shape, rows.device)
        fields = buffer.split(torch.roll(rows, -position, dims=0))
        arrays = {names[0]: field.numpy() for names, field in zip(common.NAMES.values(), fields)}
        arrays["actions"] = common.unnormalize_action(arrays["actions"], env.action_space)
        for name in ("terminations", "truncations"):
            arrays[name] = arrays[name] > 0
        common.save_npz(args.record_replay, arrays)
        if not args.quiet:
            print(f"replay buffer, {len(rows):,} transitions: {args.record_replay}")
    return result


# ---- training


@torch.no_grad()
def update_target(target: nn.Module, network: nn.Module, tau: float) -> None:
    """target <- (1 - tau) target + tau network, for all parameters in one call."""
    torch._foreach_lerp_(list(target.parameters()), list(network.parameters()), tau)


def train(args: Args) -> dict[str, float]:
    # setup
    run = common.Run(ALGO, args, LIMITS)
    args, device = run.args, run.device
    check_args(args)
    env = common.make_env(args.env_id)
    (obs_dim,), action_dim, _ = common.check_spaces(env, actions="vectors")
    num_pretrain, num_blocks = args.offline_pretrain_updates, count_blocks(args)
    total_updates = num_pretrain + num_blocks * args.gradient_updates_per_step
    torch.manual_seed(args.seed)  # for the initial weights
    generator = torch.Generator(device).manual_seed(common.second_seed(args.seed))  # for the rest

    # data
    spec, num_offline = args.dataset, round(args.offline_batch_ratio * args.batch_size)
    if spec == "auto" and not (common.SHIPPED / f"{env.spec.id}.npz").is_file():
        spec = "none"
    if spec == "none":
        num_offline = 0
        if num_pretrain > 0 or args.data_in_buffer:
            name = "data_in_buffer" if args.data_in_buffer else "offline_pretrain_updates"
            raise InputError(f"{name} needs a dataset, and {args.env_id} has none: give --dataset")
    with common.told_in_one_line(f"buffer_capacity {args.buffer_capacity} is too much memory"):
        online = Buffer(args.buffer_capacity, obs_dim, action_dim, device)
    offline, fingerprint, first_scalars = None, 0, {}
    about = "no prior data" if spec == "none" else "prior data are not used at ratio 0"
    if num_offline > 0 or num_pretrain > 0 or args.data_in_buffer:
        dataset = common.load_dataset(spec, env, args.seed)
        fingerprint, about = dataset.fingerprint, str(dataset)
        first_scalars = {"stats/behaviour_return": dataset.episode_returns.mean()}
        offline = Buffer(len(dataset), obs_dim, action_dim, device)
        offline.add(as_rows(*(getattr(dataset, name) for name in common.NAMES)))
        del dataset  # a large one is held once
    if args.data_in_buffer:
        if offline.size > args.buffer_capacity:
            raise InputError(f"buffer_capacity must be >= the {offline.size} rows of the dataset")
        online.add(offline.rows)

    # networks
    sizes = (obs_dim, action_dim, [args.hidden_dim] * args.num_hidden_layers)
    actor = GaussianActor(*sizes).to(device)
    critic = EnsembleCritic(args.num_critics, *sizes, args.critic_layer_norm).to(device)
    target_critic = deepcopy(critic)
    initial_alpha = 1.0 if args.alpha is None else args.alpha
    log_alpha = nn.Parameter(torch.tensor(initial_alpha, device=device).log())
    target_entropy = -action_dim / 2 if args.target_entropy is None else args.target_entropy
    actor_opt = torch.optim.Adam(actor.parameters(), args.learning_rate, fused=True)
    critic_opt = torch.optim.Adam(critic.parameters(), args.learning_rate, fused=True)
    alpha_opt = torch.optim.Adam([log_alpha], args.learning_rate, fused=True)
    if args.compile:
        for network in (actor, critic):
            network.compile()

    # episode: a resumed run plays the one again that it was in
    num_updates, episode = run.saved.get("num_updates", 0), run.saved.get("episode", 0)
    episode_actions = list(run.saved["episode_actions"].numpy().copy()) if run.saved else []
    current_obs, episode_return = common.start_episode(env, args.seed, episode, episode_actions)
    run.check_replay(current_obs)

    # checkpoint: best.pt holds what acts, checkpoint.pt everything that a resumed run needs
    acting = {"actor": actor}
    everything = acting | {"critic": critic, "target_critic": target_critic}
    everything |= {"log_alpha": log_alpha, "actor_opt": actor_opt, "critic_opt": critic_opt}
    everything |= {"alpha_opt": alpha_opt, "buffer": online, "generator": generator}
    everything["fingerprint"] = fingerprint
    # updates before the first environment step are counted by steps up to 0
    run.start(args.total_timesteps, everything, about, first_step=-num_pretrain)
    policy = make_policy(actor, env.action_space, device)
    if run.is_fresh:
        run.log(first_scalars)
        run.evaluate(policy, acting)

    # loop: step is 1, 2, .. total, or ends early by a stop; pretraining ends at step 0
    for step in run.steps():
        is_pretraining, is_random = step <= 0, 0 < step <= args.learning_starts
        if not is_pretraining:
            # 1. act, and remember
            if is_random:
                action = 2 * torch.rand(action_dim, device=device, generator=generator) - 1
            else:
                obs = torch.as_tensor(current_obs, dtype=torch.float32, device=device)
                with torch.no_grad():
                    action, _ = sample_action(*actor(obs), generator)  # [A]
            action = action.cpu().numpy()
            episode_actions.append(common.unnormalize_action(action, env.action_space))
            next_obs, reward, terminated, truncated, _ = env.step(episode_actions[-1])
            transition = (current_obs, action, reward, next_obs, terminated, truncated)
            online.add(as_rows(*([field] for field in transition)))
            current_obs, episode_return = np.array(next_obs), episode_return + float(reward)
            if terminated or truncated:
                run.log({"charts/episodic_return": episode_return})
                episode, episode_actions = episode + 1, []
                current_obs, episode_return = common.start_episode(env, args.seed, episode)

        if is_pretraining or (not is_random and step % args.train_frequency == 0):
            # 2. draw G mini-batches, each with its share of prior data
            num_batches, num_prior = args.gradient_updates_per_step, num_offline
            if is_pretraining:
                num_batches, num_prior = 1, args.batch_size
            shape = (num_batches, args.batch_size)
            rows = mixed_batches(offline, online, *shape, num_prior, generator)  # [G, B, W]
            alpha = log_alpha.detach().exp()
            backup_alpha = alpha if args.backup_entropy else 0.0

            # 3. critics: G updates; truncated, the last field, has no part in a target
            for obs, action, reward, next_obs, terminated, _ in zip(*online.split(rows)):
                num_updates += 1
                factor = common.lr_factor(
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
                    values = (reward, terminated, next_q, next_log_prob, backup_alpha)
                    target = soft_target(*values, args.gamma)  # [B]
                q = critic(obs, action)  # [C, B]
                critic_loss = rlpd_loss(q, target)
                critic_opt.zero_grad()
                critic_loss.backward()
                critic_opt.step()
                update_target(target_critic, critic, args.tau)

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

            # 6. log the first block at or after every multiple of log_interval
            stride = 1 if is_pretraining else args.train_frequency
            if common.is_due(step, args.log_interval, stride):
                td_error = (q - target).abs().mean(dim=0)  # [B]
                scalars = {
                    "charts/learning_rate": actor_opt.param_groups[0]["lr"],
                    "losses/critic": critic_loss.item(),
                    "losses/actor": actor_loss.item(),
                    "stats/alpha": alpha.item(),
                    "stats/policy_entropy": -log_prob.mean().item(),
                    "stats/target_mean": target.mean().item(),
                    "stats/q_max": q.max().item(),
                    "stats/q_spread": q.std(dim=0, correction=0).mean().item(),
                }
                kinds = {"offline": slice(num_prior), "online": slice(num_prior, None)}
                for name, part in kinds.items():
                    if len(td_error[part]) > 0:
                        scalars[f"stats/q_{name}"] = q[:, part].mean().item()
                        scalars[f"stats/td_error_{name}"] = td_error[part].mean().item()
                run.log(scalars, updates=num_updates)

        # 7. evaluate, but not while steps are random and nothing changes; save
        if (step % args.eval_interval == 0 and not is_random) or step == args.total_timesteps:
            run.evaluate(policy, acting)
        if step % args.checkpoint_interval == 0 or run.is_last:
            place = {"num_updates": num_updates, "episode": episode, "current_obs": current_obs}
            run.save(everything | place | {"episode_actions": np.array(episode_actions)})
    return run.finish()


if __name__ == "__main__":
    sys.exit(common.main(ALGO, Args, train, load_policy, evaluate_checkpoint))
