r"""MARWIL: monotonic advantage re-weighted imitation learning. Offline, any kind of action.

Paper: "Exponentially Weighted Imitation Learning for Batched Historical Data", Q. Wang, J. Xiong,
L. Han, P. Sun, H. Liu, T. Zhang, NeurIPS 2018. The authors published no code; RLlib has it.

Idea: clone the actions of a fixed dataset, each weighted by how much better things went after it
than V expects in its state. AWR, which came later, does the same. MARWIL has two ideas of its own:
a running norm takes the scale of the reward out of the weights, and one loss trains the policy and
V together, from the first update on.

Equations:
    return      R_t = r_t + gamma ((1 - lambda) V(s_{t+1}) + lambda R_{t+1})
                on the last step of an episode: r if it terminated, r + gamma V(s') if truncated
    advantage   A = R - V(s), with V before its step
    norm        c^2 <- c^2 + norm_rate (mean_b A_b^2 - c^2), before it is used
    loss        minimise value_coef A^2 / 2 - min(exp(beta A / c), max_weight) log pi(a|s)
                V learns from the first term, the policy from the second; no gradient through the
                weight. beta = 0: -log pi(a|s) alone, behaviour cloning, V is not trained

Differences from the paper:
    - c^2 starts from the first batch and moves by 1e-3 of the way to each batch's mean A^2. RLlib
      starts it at 100, where the paper's rate of 1e-8 keeps it: c stays at 10 on most tasks, and on
      Pendulum a few rows get all the weight.
    - Observations are standardised. Weights are clipped: a single one can outweigh a batch.
    - value_coef = 1 / (variance of the returns). The policy and V share no weights, so that Adam
      takes the same steps for any coefficient, as long as its eps is small beside the gradients.
    - Returns are computed again every refresh_interval updates. With lambda = 1, the paper's, V is
      in them only where an episode was truncated. A lambda below 1 is our option.

Shapes: N rows of data, B batch, O observation, A action (discrete: one-hot), E evaluation episodes

Run it, then resume it (a checkpoint costs 2 MB + 4 bytes per row of data):
    python algos/marwil.py --env-id Pendulum-v1
    python algos/marwil.py --resume runs/<run>

RLlib's norm, rate (the paper's), step size and batch:
    python algos/marwil.py --env-id CartPole-v1 --norm-start 100 --norm-rate 1e-8 \
        --max-weight inf --learning-rate 1e-4 --batch-size 2000
"""

import contextlib
import io
import math
import sys
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
    reward_scale: float = 1.0  # training sees reward_scale * reward + reward_shift
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
    # MARWIL only
    beta: float = 1.0  # sharpness of the weights exp(beta A / c); 0: behaviour cloning without V
    max_weight: float = 20.0  # upper clip of exp weights
    norm_start: float | None = None  # c^2 before the first update [mean A^2 of the first batch]
    norm_rate: float = 1e-3  # how far c^2 moves towards the mean A^2 of each batch
    td_lambda: float = 1.0  # lambda of the returns; 1: discounted sum of rewards, 0: one-step TD
    refresh_interval: int = 1_000  # updates between new returns; lower it if lambda is small


# rule: flags; common.LIMITS has those of the shared ones
LIMITS = {"in [0, inf)": "beta", "in [0, 1]": "norm_rate", "in (0, 1e38)": "norm_start"}

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

ALGO = "marwil"


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


class Value(nn.Module):
    """V(s) = mean + std * net(s): the network works at scale 1, whatever the rewards are."""

    def __init__(self, obs_dim: int, hidden_dim: int, mean: torch.Tensor, std: torch.Tensor):
        super().__init__()
        self.net = mlp(obs_dim, hidden_dim, 1)
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return self.mean + self.std * self.net(obs).squeeze(-1)  # [B]

    @torch.no_grad()
    def of_all(self, obs: torch.Tensor) -> torch.Tensor:
        """V of a whole dataset, in parts that fit into the cache. [N, O] -> [N]"""
        return torch.cat([self(part) for part in obs.split(4096)])


# ---- buffer


class Buffer:
    """The dataset as tensors on the device; rows are drawn uniformly."""

    def __init__(self, dataset: common.Dataset, device: torch.device):
        self.obs, self.action = dataset.obs.to(device), dataset.action.to(device)
        self.reward, self.terminated = dataset.reward.to(device), dataset.terminated.to(device)
        self.truncated = dataset.truncated.to(device)
        self.last = self.terminated | self.truncated  # [N] where episodes end
        self.final_obs = dataset.next_obs.to(device)[self.last]  # [num_episodes, O]
        self.returns = torch.zeros_like(self.reward)  # [N]
        self.size, self.device = len(dataset), device

    def refresh(self, value: Value, gamma: float, td_lambda: float) -> None:
        """New returns of all rows, with the current V."""
        next_v = torch.zeros_like(self.reward)  # [N]
        if td_lambda < 1:  # with 1, V counts only where an episode was truncated
            next_v[:-1] = value.of_all(self.obs)[1:]  # the next row holds the next state ...
        next_v[self.last] = value.of_all(self.final_obs)  # ... except where an episode ends
        ends = (self.terminated, self.truncated)
        self.returns.copy_(lambda_returns(self.reward, *ends, next_v, gamma, td_lambda))

    def sample(self, batch_size: int, generator: torch.Generator) -> list[torch.Tensor]:
        """obs [B, O], action [B, A], returns [B]"""
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

    Sorted by what comes when, R_t = (r_t + gamma (1 - lambda) V(s_{t+1})) + (gamma lambda) R_{t+1}:
    the plain return of other rewards, with another discount. After the last row of an episode, R is
    0 if it terminated, and V(s') if it was truncated.
    """
    assert reward.shape == terminated.shape == truncated.shape == next_value.shape
    bootstrap = gamma * (1 - td_lambda) * next_value.masked_fill(terminated, 0.0)  # [N]
    finite_part, discount, last = common.returns_to_go(
        reward + bootstrap, terminated, truncated, gamma * td_lambda
    )
    return finite_part + discount * next_value[last]  # [N]


def update_norm(
    squared_norm: torch.Tensor | None, advantage: torch.Tensor, rate: float
) -> torch.Tensor:
    """c^2 <- c^2 + rate (mean_b A_b^2 - c^2); a c^2 of None starts from that mean. -> scalar"""
    mean_square = (advantage.detach() ** 2).mean()
    return mean_square if squared_norm is None else squared_norm.lerp(mean_square, rate)


def marwil_weight(
    advantage: torch.Tensor, squared_norm: torch.Tensor, beta: float, max_weight: float
) -> torch.Tensor:
    """min(exp(beta A / c), max_weight), clipped before exp so that it cannot overflow. -> [B]"""
    exponent = beta * advantage / (squared_norm.sqrt() + 1e-15)  # all returns are 0: not 0 / 0
    return torch.exp(exponent.clamp(max=math.log(max_weight)))


def effective_sample_size(weight: torch.Tensor) -> torch.Tensor:
    """(sum w)^2 / (B sum w^2): 1 if all rows count the same, 1/B if one row counts alone."""
    return weight.sum() ** 2 / (len(weight) * (weight**2).sum() + 1e-8)


def marwil_loss(
    log_prob: torch.Tensor,
    advantage: torch.Tensor,
    squared_norm: torch.Tensor,
    beta: float,
    max_weight: float,
    value_coef: torch.Tensor,
) -> torch.Tensor:
    """L = mean_b value_coef A_b^2 / 2 - min(exp(beta A_b / c), max_weight) log pi(a_b|s_b)

    [B], [B] -> scalar. V learns through A in the first term. beta = 0: no such term, weights of 1.
    """
    assert log_prob.shape == advantage.shape and log_prob.dim() == 1
    if beta == 0:
        return -log_prob.mean()
    weight = marwil_weight(advantage.detach(), squared_norm, beta, max_weight)
    return value_coef * 0.5 * (advantage**2).mean() - (weight * log_prob).mean()


# ---- checkpoint


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


def load_policy(path: str, **overrides) -> common.Policy:
    """The policy of a checkpoint: a batch of obs -> actions. `overrides` are flags, e.g. device."""
    checkpoint = common.load_checkpoint(path, ALGO, Args, overrides.get("env_id"))
    args = replace(Args(**checkpoint["args"]), **overrides)
    env, device = common.make_env(args.env_id), common.pick_device(args.device)
    (obs_dim,), action_dim, discrete = common.check_spaces(env)
    actor = Actor(obs_dim, action_dim, args.hidden_dim, discrete).to(device)
    actor.load_state_dict(checkpoint["actor"])
    obs_mean, obs_std = checkpoint["obs_mean"].to(device), checkpoint["obs_std"].to(device)
    return make_policy(actor, obs_mean, obs_std, env.action_space)


# ---- training


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
    obs_mean, obs_std = (x.to(device) for x in dataset.standardize())  # [O], [O]; in place
    buffer = Buffer(dataset, device)
    updates_per_epoch = math.ceil(len(dataset) / args.batch_size)
    total = args.total_epochs * updates_per_epoch if args.total_epochs else args.total_updates

    # networks
    actor = Actor(obs_dim, action_dim, args.hidden_dim, discrete).to(device)
    # V starts at the constant k that is the mean of all returns. A return that was cut ends in V
    # itself: k = mean(finite + discount k), solved for k
    finite_part, discount, _ = common.returns_to_go(
        dataset.reward, dataset.terminated, dataset.truncated, args.gamma
    )
    mean_return = finite_part.mean() / (1 - discount.mean())
    first_returns = finite_part + discount * mean_return  # [N]
    # a smaller std is that of rounding errors (1e-15: all returns are 0)
    min_std = 1e-6 * first_returns.abs().max() + 1e-15
    return_std = first_returns.std() + min_std
    value = Value(obs_dim, args.hidden_dim, mean_return, return_std).to(device)
    parameters = [*actor.parameters(), *value.parameters()]
    opt = torch.optim.Adam(parameters, args.learning_rate, fused=True)
    squared_norm = run.saved.get("squared_norm", args.norm_start)  # c^2
    if squared_norm is not None:
        squared_norm = torch.as_tensor(squared_norm, dtype=torch.float32, device=device)

    # checkpoint: best.pt holds what acts, checkpoint.pt everything that a resumed run needs
    acting = {"actor": actor, "obs_mean": obs_mean, "obs_std": obs_std}
    everything = acting | {"value": value, "opt": opt, "generator": generator}
    everything |= {"returns": buffer.returns, "fingerprint": dataset.fingerprint}
    run.start(total, everything, about=str(dataset))  # a resumed run takes up its state here
    policy = make_policy(actor, obs_mean, obs_std, env.action_space)
    if run.is_fresh:
        run.log({"stats/behaviour_return": dataset.episode_returns.mean()})
        run.evaluate(policy, acting)

    # loop: step is 1, 2, .. total, or ends early by a stop
    for step in run.steps():
        factor = common.lr_factor(step, total, args.lr_schedule, args.warmup_updates)
        opt.param_groups[0]["lr"] = args.learning_rate * factor

        # 1. returns of all data, with the current V
        if (step - 1) % args.refresh_interval == 0:
            buffer.refresh(value, args.gamma, args.td_lambda)

        # 2. sample a minibatch
        obs, action, returns = buffer.sample(args.batch_size, generator)

        # 3. advantage: how much better things went than V expects, and its running norm
        advantage = returns - value(obs)  # [B]
        squared_norm = update_norm(squared_norm, advantage, args.norm_rate)

        # 4. actor and value: one loss
        pi = actor(obs)
        log_prob = pi.log_prob(action)  # [B]
        value_coef = 1 / value.std**2  # Adam's eps then fits rewards of any scale
        loss = marwil_loss(
            log_prob, advantage, squared_norm, args.beta, args.max_weight, value_coef
        )
        opt.zero_grad()
        loss.backward()
        opt.step()

        # 5. log, evaluate, save
        if step % args.log_interval == 0:
            advantage = advantage.detach()
            weight = marwil_weight(advantage, squared_norm, args.beta, args.max_weight)
            unexplained = advantage.var(correction=0) / (returns.var(correction=0) + 1e-30)
            scalars = {
                "charts/learning_rate": opt.param_groups[0]["lr"],
                "losses/value": 0.5 * (advantage**2).mean().item(),
                "losses/actor": -(weight * log_prob).mean().item(),
                "stats/return_mean": returns.mean().item(),
                "stats/explained_variance": 1 - unexplained.item(),
                "stats/advantage_mean": advantage.mean().item(),
                "stats/advantage_std": advantage.std(correction=0).item(),
                "stats/squared_norm": squared_norm.item(),
                "stats/weight_mean": weight.mean().item(),
                "stats/weight_max": weight.max().item(),
                "stats/weight_clipped": (weight > 0.999 * args.max_weight).float().mean().item(),
                "stats/weight_ess": effective_sample_size(weight).item(),
                "stats/log_prob": log_prob.mean().item(),
                **pi.statistics(),
            }
            run.log(scalars, updates=step, lower="--learning-rate or --max-weight")  # advice if NaN
        if step % args.eval_interval == 0 or step == total:
            run.evaluate(policy, acting)
        if step % args.checkpoint_interval == 0 or run.is_last:  # budget, early stop, or Ctrl-C
            run.save(everything | {"squared_norm": squared_norm})
    return run.finish()


if __name__ == "__main__":
    sys.exit(common.main(ALGO, Args, train, load_policy))
