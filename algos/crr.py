r"""CRR: Critic Regularized Regression. Offline RL, continuous or discrete actions.

Paper: "Critic Regularized Regression", Z. Wang, A. Novikov, K. Zolna, J. T. Springenberg, S. Reed,
B. Shahriari, N. Siegel, J. Merel, C. Gulcehre, N. Heess, N. de Freitas, 2020, arXiv:2006.15134.

Idea: clone the actions of a fixed dataset, but only (or mostly) those that a learned critic rates
above the policy's own. No action outside the data is ever cloned: the critic may be wrong there.

Equations (Q', pi': target networks; s', a': the next step; Q without an index: mean of the Q_i):
    critic      minimise sum_i (Q_i(s, a) - y)^2
                y = r + gamma (1 - terminated) min_i Q'_i(s', a'),          a' ~ pi'(.|s')
    advantage   A(s, a) = Q(s, a) - mean_j Q(s, a_j)  or  Q(s, a) - max_j Q(s, a_j)
                a_1..a_M ~ pi(.|s). Discrete: in the mean and in y, E_pi is a sum over all actions
    weight      f = 1[A > 0]  (binary)  or  f = min(exp(A / beta), max_weight)  (exp)
    actor       maximise f log pi(a|s); f counts as a constant

Differences from the paper:
    - Two critics with squared error instead of one distributional critic. y takes the smallest Q_i,
      since overestimates add up from backup to backup. The advantage takes their mean.
    - A tanh-Gaussian policy (discrete: a categorical one) instead of a mixture of Gaussians.
    - Soft target updates. The paper's hard copies: --tau 1 --target-interval 100.
    - Greedy evaluation. By the paper's critic-weighted policy (CWP): --num-cwp-samples 10.
    - Observations are standardised. Rewards are scaled by 0.1, which fits Pendulum's large ones.

Shapes: B batch, C critics (2: TwinCritic), M sampled actions (or all A), K candidates of CWP, O
observation, A action (discrete: one-hot; in equations A is the advantage), E evaluation episodes

Run it, then resume it (a checkpoint costs 3 MB):
    python algos/crr.py --env-id Pendulum-v1
    python algos/crr.py --resume runs/<run>

The paper's hyper-parameters, on a Minari dataset:
    python algos/crr.py --env-id HalfCheetah-v5 --dataset minari:mujoco/halfcheetah/medium-v0 \
        --weight-type exp --learning-rate 1e-4 --batch-size 1024 --tau 1 --target-interval 100 \
        --num-cwp-samples 10 --reward-scale 1 --total-updates 500000
"""

import contextlib
import io
import math
import sys
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import tyro

# ---- arguments


@dataclass
class Args:
    # task
    env_id: str = "Pendulum-v1"  # Gymnasium environment
    seed: int = 1  # same seed, same machine: same numbers to the last bit
    dataset: str = "auto"  # auto (benchmark/data, else random) | random[:N] | PATH.npz | minari:ID
    reward_scale: float = 0.1  # training sees reward_scale * reward + reward_shift
    reward_shift: float = 0.0  # see reward_scale
    normalize_reward: bool = False  # first scale returns to a span of 1000, as usual on D4RL
    # budget
    total_updates: int = 10_000  # budget in gradient updates
    total_epochs: int | None = None  # budget in passes over the dataset, instead
    # optimisation
    batch_size: int = 256  # transitions per update
    gamma: float = 0.99  # discount
    learning_rate: float = 3e-4  # step size of Adam, for every network without a flag of its own
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"  # the last two fall to 0
    warmup_updates: int = 0  # the learning rate first climbs from 0 over this many updates
    hidden_dim: int = 256  # width of the hidden layers, in every network
    # evaluation and stops
    eval_interval: int = 1_000  # updates (online: environment steps) between evaluations
    eval_episodes: int = 10  # episodes per evaluation
    eval_seed: int = 10_000  # evaluation episode i starts from eval_seed + i
    target_return: float | None = None  # stop when an evaluation's mean return gets there
    patience: int | None = None  # stop after this many evaluations without a better one
    # the run
    checkpoint_interval: int = 5_000  # updates (or steps) between saves; Ctrl-C, SIGTERM save, too
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
    # CRR only
    advantage_type: Literal["mean", "max"] = "mean"  # baseline over the sampled actions' values
    weight_type: Literal["binary", "exp"] = "binary"  # f = 1[A > 0] or exp(A / beta), A: advantage
    beta: float = 1.0  # temperature of exp weights (inf: behaviour cloning) and of CWP
    max_weight: float = 20.0  # upper clip of exp weights
    num_action_samples: int = 4  # M, sampled actions of the baseline (unused if discrete and mean)
    num_cwp_samples: int = 0  # K > 0: evaluate with CWP, K samples (discrete: all actions)
    tau: float = 0.005  # how far the targets move towards the networks; 1: hard copy
    target_interval: int = 1  # updates between target updates


LIMITS = {"> 0": "beta num_action_samples", ">= 0": "num_cwp_samples"}  # shared ones: common.LIMITS

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

ALGO = "crr"


# ---- networks


def mlp(input_dim: int, hidden_dim: int, output_dim: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(input_dim, hidden_dim),
        nn.ReLU(inplace=True),
        nn.Linear(hidden_dim, hidden_dim),
        nn.ReLU(inplace=True),
        nn.Linear(hidden_dim, output_dim),
    )


class TanhGaussian(NamedTuple):
    """pi(.|s) over continuous actions: a = tanh(u), u ~ Normal(mean, std) in every dimension."""

    mean: torch.Tensor  # [B, A]
    log_std: torch.Tensor  # [B, A]

    def log_prob(self, action: torch.Tensor) -> torch.Tensor:
        """log pi(a|s) = sum_d (log N(u_d; mean_d, std_d) - log(1 - tanh(u_d)^2)). [B, A] -> [B]"""
        assert action.shape == self.mean.shape
        # at +-1 atanh is infinite, and close to it so large that one row would dominate the loss
        u = torch.atanh(action.clamp(-0.999, 0.999))  # [B, A]
        z = (u - self.mean) / self.log_std.exp()  # [B, A]
        gaussian = -0.5 * z**2 - self.log_std - 0.5 * math.log(2 * math.pi)  # [B, A]
        # log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2u)), without rounding to log 0
        log_det = 2 * (math.log(2) - u - nn.functional.softplus(-2 * u))  # [B, A]
        return (gaussian - log_det).sum(-1)  # [B]

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
        with torch.no_grad():  # start close to mean 0 and std 0.22, or to equal probabilities
            self.net[-1].weight.mul_(0.01)
            self.net[-1].bias.zero_()

    def forward(self, obs: torch.Tensor) -> TanhGaussian | Categorical:
        output = self.net(obs)  # [B, A] or [B, 2A]
        if self.discrete:
            return Categorical(torch.log_softmax(output, dim=-1))
        mean, log_std = output.chunk(2, dim=-1)  # [B, A], [B, A]
        # squashed, not clamped: a clamp has no gradient outside its bounds, and std would be stuck
        low, high = self.LOG_STD_MIN, self.LOG_STD_MAX
        return TanhGaussian(mean, low + 0.5 * (high - low) * (1 + torch.tanh(log_std)))


class TwinCritic(nn.Module):
    """Q_1(s, a) .. Q_C(s, a), independent networks. C = 2 is set here alone."""

    def __init__(self, obs_dim: int, action_dim: int, hidden_dim: int):
        super().__init__()
        self.members = nn.ModuleList([mlp(obs_dim + action_dim, hidden_dim, 1) for _ in range(2)])

    def forward(self, obs: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """[B, O], [B, A] -> [C, B]. Several actions per state: [B, O], [M, B, A] -> [C, M, B]."""
        obs = obs.expand(*action.shape[:-1], -1)  # [(M,) B, O]: every action of row b meets obs b
        x = torch.cat([obs, action], dim=-1)  # [(M,) B, O + A]
        return torch.stack([member(x).squeeze(-1) for member in self.members])  # [C, (M,) B]


def candidate_actions(
    pi: TanhGaussian | Categorical, num_samples: int, generator: torch.Generator, exact: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Actions a_j and weights p_j; sum_j p_j g(a_j) estimates E_{a ~ pi} g(a). -> [M, B, A], [M, B]
    M samples that count 1 / M each. Discrete and exact: all M = A actions, p_j = pi(a_j|s)."""
    if isinstance(pi, Categorical):
        prob = pi.log_probs.exp()  # [B, A]
        one_hot = torch.eye(prob.shape[1], device=prob.device)  # [A, A]
        if exact:
            return one_hot[:, None].expand(-1, len(prob), -1), prob.T  # [A, B, A], [A, B]
        uniform = torch.rand((num_samples, *prob.shape), device=prob.device, generator=generator)
        # Gumbel-max trick: the argmax of prob / Exp(1) noise is a draw from prob. Unlike
        # torch.multinomial it does not raise on NaN, which run.log() reports in a clear line
        action = one_hot[(prob / -uniform.log()).argmax(dim=2)]  # [M, B, A]
    else:
        shape = (num_samples, *pi.mean.shape)
        noise = torch.randn(shape, device=pi.mean.device, generator=generator)
        action = torch.tanh(pi.mean + pi.log_std.exp() * noise)  # [M, B, A]
    return action, torch.full_like(action[..., 0], 1 / num_samples)


# ---- buffer


class Buffer:
    """The dataset as tensors on the device; rows are drawn uniformly."""

    def __init__(self, dataset: common.Dataset, device: torch.device):
        fields = (dataset.obs, dataset.action, dataset.reward, dataset.next_obs, dataset.terminated)
        self.fields = [field.to(device, torch.float32) for field in fields]
        self.size, self.device = len(dataset), device

    def sample(self, batch_size: int, generator: torch.Generator) -> list[torch.Tensor]:
        """obs [B, O], action [B, A], reward [B], next_obs [B, O], terminated [B]"""
        index = torch.randint(self.size, (batch_size,), device=self.device, generator=generator)
        return [field[index] for field in self.fields]


# ---- losses


def td_target(
    reward: torch.Tensor,
    terminated: torch.Tensor,
    next_q: torch.Tensor,
    next_prob: torch.Tensor,
    gamma: float,
) -> torch.Tensor:
    """y = r + gamma (1 - terminated) sum_j p_j min_i Q'_i(s', a'_j). [B], [B], [C, M, B], [M, B]
    Truncation does not appear here: a truncated episode would have gone on, so it bootstraps."""
    assert reward.shape == terminated.shape == next_q.shape[2:]
    assert next_prob.shape == next_q.shape[1:]
    next_value = (next_prob * next_q.min(dim=0).values).sum(dim=0)  # [B]
    return reward + gamma * (1 - terminated) * next_value  # [B]


def td_loss(q: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """L_Q = sum_i mean_b (Q_i(s_b, a_b) - y_b)^2. [C, B], [B] -> scalar"""
    assert q.shape[1:] == target.shape
    return ((q - target) ** 2).mean(dim=1).sum()


def crr_advantage(
    q: torch.Tensor, q_candidates: torch.Tensor, prob: torch.Tensor, advantage_type: str
) -> torch.Tensor:
    """A = Q(s, a) - sum_j p_j Q(s, a_j)  or  - max_j Q(s, a_j). [B], [M, B], [M, B] -> [B]"""
    assert q.shape == q_candidates.shape[1:] and prob.shape == q_candidates.shape
    if advantage_type == "max":
        return q - q_candidates.max(dim=0).values
    return q - (prob * q_candidates).sum(dim=0)


def crr_weight(
    advantage: torch.Tensor, weight_type: str, beta: float, max_weight: float
) -> torch.Tensor:
    """f = 1[A > 0] (an action that is only as good as the baseline is not cloned), or
    f = min(exp(A / beta), max_weight), clipped before exp so that it cannot overflow. [B] -> [B]"""
    if weight_type == "binary":
        return (advantage > 0).float()
    return torch.exp((advantage / beta).clamp(max=math.log(max_weight)))


def effective_sample_size(weight: torch.Tensor) -> torch.Tensor:
    """(sum w)^2 / (B sum w^2): 1 if all rows count the same, 1/B if one row counts alone."""
    return weight.sum() ** 2 / (len(weight) * (weight**2).sum() + 1e-8)


def crr_loss(
    log_prob: torch.Tensor,
    advantage: torch.Tensor,
    weight_type: str,
    beta: float,
    max_weight: float,
) -> torch.Tensor:
    """L_pi = -mean_b f(A_b) log pi(a_b|s_b). [B], [B] -> scalar
    Divided by B, not by the sum of the weights, which can be 0."""
    assert log_prob.shape == advantage.shape and log_prob.dim() == 1
    weight = crr_weight(advantage.detach(), weight_type, beta, max_weight)
    return -(weight * log_prob).mean()


# ---- checkpoint


def make_policy(
    actor: Actor,
    critic: TwinCritic,
    obs_mean: torch.Tensor,
    obs_std: torch.Tensor,
    action_space: gym.Space,
    args: Args,
) -> common.Policy:
    """What is evaluated: greedy, or by CWP, whose draws start anew, from eval_seed, every time."""
    generator = torch.Generator(obs_mean.device).manual_seed(args.eval_seed)

    @torch.no_grad()
    def policy(obs: np.ndarray) -> np.ndarray:
        obs = torch.as_tensor(obs, dtype=torch.float32, device=obs_mean.device)  # [E, O]
        obs = (obs - obs_mean) / obs_std
        pi = actor(obs)
        action = pi.greedy()  # [E, A]
        if args.num_cwp_samples > 0:
            candidates, prob = candidate_actions(pi, args.num_cwp_samples, generator)
            q = critic(obs, candidates).mean(dim=0)  # [K, E], like prob
            # p_j exp(Q_j / beta), normalised; if sampled, every p_j is 1 / K and cancels
            cwp_prob = torch.softmax(prob.log() + q / args.beta, dim=0).T  # [E, K]
            noise = torch.empty_like(cwp_prob).exponential_(generator=generator)
            choice = (cwp_prob / noise).argmax(dim=1)  # [E], a draw by the Gumbel-max trick
            action = candidates[choice, torch.arange(len(obs), device=obs.device)]  # [E, A]
        return common.unnormalize_action(action.cpu().numpy(), action_space)

    return policy


def load_policy(path: str, **overrides) -> common.Policy:
    """The policy of a checkpoint: a batch of obs -> actions. `overrides` are flags, e.g. device."""
    checkpoint = common.load_checkpoint(path, ALGO, Args, overrides.get("env_id"))
    args = replace(Args(**checkpoint["args"]), **overrides)
    env, device = common.make_env(args.env_id), common.pick_device(args.device)
    (obs_dim,), action_dim, discrete = common.check_spaces(env)
    actor = Actor(obs_dim, action_dim, args.hidden_dim, discrete).to(device)
    critic = TwinCritic(obs_dim, action_dim, args.hidden_dim).to(device)
    actor.load_state_dict(checkpoint["actor"])
    critic.load_state_dict(checkpoint["critic"])
    obs_mean, obs_std = checkpoint["obs_mean"].to(device), checkpoint["obs_std"].to(device)
    return make_policy(actor, critic, obs_mean, obs_std, env.action_space, args)


def evaluate_checkpoint(args: Args) -> dict[str, float]:
    """--evaluate; num_cwp_samples and beta need not be those of the run."""
    return common.evaluate_checkpoint(ALGO, load_policy, args, may_change="num_cwp_samples beta")


# ---- training


@torch.no_grad()
def update_target(target: nn.Module, network: nn.Module, tau: float) -> None:
    """target <- (1 - tau) target + tau network, for all parameters in one call."""
    torch._foreach_lerp_(list(target.parameters()), list(network.parameters()), tau)


def train(args: Args) -> dict[str, float]:
    # setup
    run = common.Run(ALGO, args, LIMITS)
    args, device = run.args, run.device  # args: device=auto is now cpu, cuda or mps
    env = common.make_env(args.env_id)
    (obs_dim,), action_dim, discrete = common.check_spaces(env)
    torch.manual_seed(args.seed)  # for the initial weights
    generator = torch.Generator(device).manual_seed(common.second_seed(args.seed))  # for the rest

    # data: actions come as vectors in [-1, 1], or one-hot
    dataset = common.load_dataset(
        args.dataset, env, args.seed, args.reward_scale, args.reward_shift, args.normalize_reward
    )
    obs_mean, obs_std = (x.to(device) for x in dataset.standardize())  # [O]; in place
    buffer = Buffer(dataset, device)
    updates_per_epoch = math.ceil(len(dataset) / args.batch_size)
    total = args.total_epochs * updates_per_epoch if args.total_epochs else args.total_updates

    # networks
    actor = Actor(obs_dim, action_dim, args.hidden_dim, discrete).to(device)
    critic = TwinCritic(obs_dim, action_dim, args.hidden_dim).to(device)
    target_actor, target_critic = deepcopy(actor), deepcopy(critic)
    actor_opt = torch.optim.Adam(actor.parameters(), args.learning_rate, fused=True)
    critic_opt = torch.optim.Adam(critic.parameters(), args.learning_rate, fused=True)

    # checkpoint: best.pt holds what acts, checkpoint.pt everything that a resumed run needs
    acting = {"actor": actor, "critic": critic, "obs_mean": obs_mean, "obs_std": obs_std}
    everything = acting | {"target_actor": target_actor, "target_critic": target_critic}
    everything |= {"actor_opt": actor_opt, "critic_opt": critic_opt, "generator": generator}
    everything["fingerprint"] = dataset.fingerprint  # --resume refuses other data
    run.start(total, everything, about=str(dataset))  # a resumed run takes up its state here
    if run.is_fresh:
        run.log({"stats/behaviour_return": dataset.episode_returns.mean()})
        run.evaluate(make_policy(actor, critic, obs_mean, obs_std, env.action_space, args), acting)

    # loop: step is 1, 2, .. total, or ends early by a stop
    for step in run.steps():
        factor = common.lr_factor(step, total, args.lr_schedule, args.warmup_updates)
        for opt in (actor_opt, critic_opt):
            opt.param_groups[0]["lr"] = args.learning_rate * factor

        # 1. sample a minibatch
        obs, action, reward, next_obs, terminated = buffer.sample(args.batch_size, generator)

        # 2. critics: all regress on one target, made by the target networks
        with torch.no_grad():
            # one sample of a', as in SAC; discrete: all actions
            next_action, next_prob = candidate_actions(target_actor(next_obs), 1, generator)
            next_q = target_critic(next_obs, next_action)  # [C, 1, B], discrete: [C, A, B]
            target = td_target(reward, terminated, next_q, next_prob, args.gamma)  # [B]
        critic_loss = td_loss(critic(obs, action), target)
        critic_opt.zero_grad()
        critic_loss.backward()
        critic_opt.step()

        # 3. actor: clone the actions that the critic finds better than the policy's own
        pi = actor(obs)
        with torch.no_grad():
            # not exact for max: the max over all actions would count those that pi never takes
            exact = args.advantage_type == "mean"
            own_actions, prob = candidate_actions(pi, args.num_action_samples, generator, exact)
            all_actions = torch.cat([action[None], own_actions])  # [1 + M, B, A], for one call
            q = critic(obs, all_actions).mean(dim=0)  # [1 + M, B]
            q_data, q_own = q[0], q[1:]  # [B], [M, B]
            advantage = crr_advantage(q_data, q_own, prob, args.advantage_type)  # [B]
        log_prob = pi.log_prob(action)  # [B]
        actor_loss = crr_loss(log_prob, advantage, args.weight_type, args.beta, args.max_weight)
        actor_opt.zero_grad()
        actor_loss.backward()
        actor_opt.step()

        # 4. targets follow
        if step % args.target_interval == 0:
            update_target(target_actor, actor, args.tau)
            update_target(target_critic, critic, args.tau)

        # 5. log, evaluate, save
        if step % args.log_interval == 0:
            weight = crr_weight(advantage, args.weight_type, args.beta, args.max_weight)
            scalars = {
                "charts/learning_rate": actor_opt.param_groups[0]["lr"],
                "losses/critic": critic_loss.item(),
                "losses/actor": actor_loss.item(),
                "stats/q_mean": q_data.mean().item(),
                "stats/q_max": q.max().item(),
                "stats/advantage_mean": advantage.mean().item(),
                "stats/advantage_std": advantage.std(correction=0).item(),
                "stats/advantage_positive": (advantage > 0).float().mean().item(),
                "stats/weight_mean": weight.mean().item(),
                "stats/weight_max": weight.max().item(),
                "stats/weight_ess": effective_sample_size(weight).item(),
                "stats/log_prob": log_prob.mean().item(),
                **pi.statistics(),
            }
            run.log(scalars, updates=step, lower="--learning-rate or --max-weight")  # advice if NaN
        if step % args.eval_interval == 0 or step == total:
            policy = make_policy(actor, critic, obs_mean, obs_std, env.action_space, args)
            run.evaluate(policy, acting)
        if step % args.checkpoint_interval == 0 or run.is_last:  # budget, early stop, or Ctrl-C
            run.save(everything)
    return run.finish()


if __name__ == "__main__":
    sys.exit(common.main(ALGO, Args, train, load_policy, evaluate_checkpoint))
