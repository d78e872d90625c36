"""GAIL: Generative Adversarial Imitation Learning, on PPO. Continuous or discrete actions.

Paper: "Generative Adversarial Imitation Learning", J. Ho, S. Ermon, 2016, arXiv:1606.03476.

Idea: behave like an expert of whom there are only recordings, and learn from no other reward. A
discriminator D learns to tell the expert's states and actions from the policy's, and what looks
like the expert to it is rewarded, by an ordinary policy-gradient method, here PPO. Cloning copies
actions in the expert's states alone; GAIL acts, and learns to come back where it went astray.

Equations (f(s, a): the discriminator's output, D = sigmoid(f), 1 for the expert):
    discriminator   minimise -log D of the expert's (s, a) - log(1 - D) of the policy's,
                    + gradient_penalty (|df/dx| - 1)^2 between them, - a little entropy of D
    reward          r = -log(1 - D) = softplus(f)       alternatives: log D, or f itself
    advantage       A_t = delta_t + gamma lambda (1 - done) A_{t+1}
                    delta_t = r_t + gamma (1 - terminated) V(s_{t+1}) - V(s_t)
    value           minimise (A + V_old(s) - V(s))^2 / 2
    policy          maximise min(rho A, clip(rho, 1 - c, 1 + c) A), rho = pi(a|s) / pi_old(a|s),
                    A normalised over the rollout, and a little entropy of pi

softplus(f) > 0: even an agent that fools nobody is paid for every step, and in CartPole nothing
else counts. So ask what the discriminator adds: --no-learn-discriminator keeps it as it starts, at
D = 1/2. log D < 0 charges for every step: it pays to end an episode. --absorbing removes both.

Differences from the paper:
    - PPO in place of TRPO; mini-batches for D, which is 1 for the expert, not for the policy.
    - The penalty, of WGAN-GP (arXiv:1704.00028), and D's entropy, of the authors' code.
    - One running normaliser of observations, for policy, V and D alike.
    - Rewards are multiplied with 1 - gamma: V is then as large as a reward, whatever gamma is.
    - --absorbing is Kostrikov et al. 2018 (arXiv:1809.02925); there, D sees one absorbing state per
      end, here as many as the reward counts. The reward f is that of AIRL (arXiv:1710.11248).

Shapes: T steps of a rollout, K environments, B batch, O observation, A action (discrete: one-hot),
I = O + A + 1 inputs of D, E evaluation episodes. A scalar per transition is [B], never [B, 1].

Run it:
    python algos/gail.py --env-id CartPole-v1
    python algos/gail.py --env-id Pendulum-v1 --total-timesteps 200000

The paper's set for CartPole, but for TRPO. A batch of 5,000 is a whole rollout:
    python algos/gail.py --hidden-dim 100 --gamma 0.995 --gae-lambda 0.97 --num-steps 625 \\
        --batch-size 5000 --discriminator-updates 1 --discriminator-learning-rate 0.01 \\
        --gradient-penalty 0 --expert-subsampling 10 --total-timesteps 1500000

Resume it:
    python algos/gail.py --resume runs/<run>
Its episodes are played again: exact in any environment that is a function of seed and actions. A
checkpoint has 0.2 MB, and the rollout and the actions of the running episodes so far.
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
    env_id: str = "CartPole-v1"  # Gymnasium environment
    seed: int = 1  # same seed, same machine: same numbers to the last bit
    dataset: str = "auto"  # the expert: auto (ours) | PATH.npz | minari:ID | random | random:N
    total_timesteps: int = 100_000  # budget in environment steps
    batch_size: int = 256  # transitions per update
    gamma: float = 0.99  # discount
    learning_rate: float = 1e-3  # of every optimiser (Adam) that has no flag of its own
    lr_schedule: Literal["constant", "linear", "cosine"] = "linear"  # the last two fall to 0
    warmup_updates: int = 0  # the learning rate first climbs from 0 over this many updates
    hidden_dim: int = 64  # width of the hidden layers, in every network
    eval_interval: int = 5_000  # updates (online: environment steps) between evaluations
    eval_episodes: int = 10  # episodes per evaluation
    eval_seed: int = 10_000  # evaluation episode i starts from eval_seed + i
    target_return: float | None = None  # stop when an evaluation's mean return gets there
    patience: int | None = None  # stop after this many evaluations without a better one
    checkpoint_interval: int = 20_000  # updates (or steps) between saves; Ctrl-C, SIGTERM save, too
    log_interval: int = 1_000  # updates (or steps) between entries in the logs
    run_dir: str | None = None  # folder of the run [runs/<algo>__<env>__<seed>__<time>]
    resume: str | None = None  # folder of a run to go on with; its flags hold, budgets may change
    evaluate: str | None = None  # checkpoint to evaluate instead of training
    record: str | None = None  # with --evaluate: save its episodes as a dataset, FILE.npz
    capture_video: bool = False  # with --evaluate: film one episode, next to the checkpoint
    quiet: bool = False  # print nothing but errors
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # auto takes a GPU if there is one
    torch_threads: int | None = None  # CPU threads [all cores]
    compile: bool = False  # torch.compile the networks: slow to start; for large ensembles, FQF
    # GAIL only
    num_expert_episodes: int | None = None  # the first so many of the dataset [all]
    expert_subsampling: int = 1  # keep one of so many steps of the expert's episodes
    num_envs: int = 8  # K, environments that are stepped side by side
    num_steps: int = 128  # T, steps of each in a rollout
    reward_type: Literal["softplus", "logsigmoid", "logit"] = "softplus"  # > 0 | < 0 | any sign
    absorbing: bool = False  # reward what comes after an end, too: no bias to live or to die
    learn_discriminator: bool = True  # False: it stays at D = 1/2, a control
    discriminator_learning_rate: float = 1e-3  # of the discriminator (Adam)
    discriminator_updates: int = 16  # of the discriminator, after every rollout
    discriminator_entropy_coef: float = 1e-3  # how much D is drawn towards 1/2
    gradient_penalty: float = 1.0  # how much the slope of f is drawn towards 1; 0: not at all
    num_epochs: int = 8  # passes of PPO over a rollout
    gae_lambda: float = 0.95  # lambda of the advantages; 1: discounted sums, 0: one-step TD
    max_ratio_change: float = 0.2  # c, PPO's clip of pi / pi_old
    policy_entropy_coef: float = 0.01  # how much the entropy of the policy counts
    max_grad_norm: float = 0.5  # clip of the gradient of policy and V


if __name__ == "__main__":  # parsed here for --help and typos, which need not wait for torch
    tyro.cli(Args, description=__doc__)

import gymnasium as gym
import numpy as np
import torch
from torch import nn

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))  # for common.py
import common
from common import InputError

ALGO = "gail"


def check_args(args: Args) -> None:
    """Refuse what would waste a run, before it begins."""
    positive = (
        "total_timesteps batch_size learning_rate hidden_dim eval_interval eval_episodes patience "
        "checkpoint_interval log_interval torch_threads num_expert_episodes expert_subsampling "
        "num_envs num_steps discriminator_learning_rate discriminator_updates num_epochs "
        "max_ratio_change max_grad_norm"
    )
    values = {name: getattr(args, name) for name in positive.split()}
    rules = [(name, "> 0", value is None or value > 0) for name, value in values.items()]
    for name in ("learning_rate", "discriminator_learning_rate"):
        rules.append((name, "finite", getattr(args, name) < math.inf))
    for name in ("discriminator_entropy_coef", "gradient_penalty", "policy_entropy_coef"):
        rules.append((name, "in [0, inf)", 0 <= getattr(args, name) < math.inf))
    rules += [
        ("seed", "in [0, 2^63)", 0 <= args.seed < 2**63),
        ("eval_seed", "in [0, 2^31)", 0 <= args.eval_seed < 2**31),
        ("gamma", "in [0, 1)", 0 <= args.gamma < 1),
        ("warmup_updates", ">= 0", args.warmup_updates >= 0),
        ("gae_lambda", "in [0, 1]", 0 <= args.gae_lambda <= 1),
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
    if args.total_timesteps % args.num_envs != 0:
        multiple = f"a multiple of num_envs {args.num_envs}"
        raise InputError(f"total_timesteps must be {multiple}, got {args.total_timesteps}")


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


def tanh_mlp(input_dim: int, hidden_dim: int, output_dim: int, output_gain: float) -> nn.Sequential:
    layers = [
        nn.Linear(input_dim, hidden_dim),
        nn.Tanh(),
        nn.Linear(hidden_dim, hidden_dim),
        nn.Tanh(),
        nn.Linear(hidden_dim, output_dim),
    ]
    # as usual with PPO: orthogonal, and with a small output_gain a policy without a preference
    for layer, gain in zip(layers[::2], (math.sqrt(2), math.sqrt(2), output_gain)):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


class Gaussian(NamedTuple):
    """pi(.|s) over continuous actions: Normal(mean, std) in every dimension. A sample is clipped to
    [-1, 1] where it is played or judged; log_prob is of what was drawn, before the clip."""

    mean: torch.Tensor  # [B, A]
    log_std: torch.Tensor  # [A], the same in every state

    def sample(self, generator: torch.Generator) -> torch.Tensor:
        noise = torch.randn(self.mean.shape, device=self.mean.device, generator=generator)
        return self.mean + self.log_std.exp() * noise  # [B, A]

    def log_prob(self, action: torch.Tensor) -> torch.Tensor:
        assert action.shape == self.mean.shape
        z = (action - self.mean) / self.log_std.exp()  # [B, A]
        return (-0.5 * z**2 - self.log_std - 0.5 * math.log(2 * math.pi)).sum(-1)  # [B]

    def entropy(self) -> torch.Tensor:
        return (self.log_std + 0.5 * math.log(2 * math.pi * math.e)).sum()  # scalar

    def greedy(self) -> torch.Tensor:
        return self.mean.clamp(-1, 1)  # [B, A]

    def statistics(self) -> dict[str, float]:
        return {"stats/policy_std": self.log_std.exp().mean().item()}


class Softmax(NamedTuple):
    """pi(.|s) over discrete actions, which are one-hot vectors."""

    log_probs: torch.Tensor  # [B, A]

    def sample(self, generator: torch.Generator) -> torch.Tensor:
        index = torch.multinomial(self.log_probs.exp(), 1, generator=generator)[:, 0]  # [B]
        return nn.functional.one_hot(index, self.log_probs.shape[-1]).float()  # [B, A]

    def log_prob(self, action: torch.Tensor) -> torch.Tensor:
        assert action.shape == self.log_probs.shape
        return (action * self.log_probs).sum(-1)  # [B]

    def entropy(self) -> torch.Tensor:
        return -(self.log_probs.exp() * self.log_probs).sum(-1).mean()  # scalar

    def greedy(self) -> torch.Tensor:
        best = self.log_probs.argmax(-1)  # [B]
        return nn.functional.one_hot(best, self.log_probs.shape[-1]).float()  # [B, A]

    def statistics(self) -> dict[str, float]:
        return {"stats/policy_entropy": self.entropy().item()}


class PPOActor(nn.Module):
    """pi(.|s). Starts without a preference, with std 1 or with equal probabilities."""

    def __init__(self, obs_dim: int, action_dim: int, hidden_dim: int, discrete: bool):
        super().__init__()
        self.net = tanh_mlp(obs_dim, hidden_dim, action_dim, output_gain=0.01)
        self.log_std = None if discrete else nn.Parameter(torch.zeros(action_dim))

    def forward(self, obs: torch.Tensor) -> Gaussian | Softmax:
        output = self.net(obs)  # [B, A]
        if self.log_std is None:
            return Softmax(torch.log_softmax(output, dim=-1))
        return Gaussian(output, self.log_std)


class StateValue(nn.Module):
    """V(s). [B, O] -> [B]"""

    def __init__(self, obs_dim: int, hidden_dim: int):
        super().__init__()
        self.net = tanh_mlp(obs_dim, hidden_dim, 1, output_gain=1.0)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return self.net(obs).squeeze(-1)


class Discriminator(nn.Module):
    """f(s, a), whose sigmoid is D: the probability that it is the expert's. [B, I] -> [B]"""

    def __init__(self, input_dim: int, hidden_dim: int):
        super().__init__()
        self.net = tanh_mlp(input_dim, hidden_dim, 1, output_gain=0.0)  # at first f = 0, D = 1/2

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(inputs).squeeze(-1)


def discriminator_input(
    obs: torch.Tensor, action: torch.Tensor, absorbing: torch.Tensor
) -> torch.Tensor:
    """[.., O] normalised, [.., A], [..] -> [.., I]

    The expert's actions are in [-1, 1]: without the clip, an action outside would give the policy
    away. An absorbing state, which follows an end, has no observation and no action, only its mark.
    """
    assert obs.shape[:-1] == action.shape[:-1] == absorbing.shape
    absorbing = absorbing.unsqueeze(-1)  # [.., 1]
    is_state = 1 - absorbing
    return torch.cat([is_state * obs, is_state * action.clamp(-1, 1), absorbing], dim=-1)


class Normalizer(nn.Module):
    """(s - mean) / std over all that was seen so far, the expert's states and the policy's."""

    def __init__(self, obs: torch.Tensor):
        super().__init__()
        self.register_buffer("count", torch.tensor(float(len(obs)), device=obs.device))
        self.register_buffer("mean", obs.mean(dim=0))  # [O]
        self.register_buffer("std", obs.std(dim=0, correction=0))  # [O]

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        # where the expert hardly ever went, the policy's first states are many std away
        return ((obs - self.mean) / (self.std + 1e-3)).clamp(-10, 10)

    def update(self, obs: torch.Tensor) -> None:
        """Mean and std of the union with [B, O]."""
        count = self.count + len(obs)
        share, change = len(obs) / count, obs.mean(dim=0) - self.mean
        within = share * obs.var(dim=0, correction=0) + (1 - share) * self.std**2
        self.std.copy_((within + share * (1 - share) * change**2).sqrt())
        self.mean.add_(share * change)
        self.count.copy_(count)


# ---- buffer


def expert_rows(
    dataset: common.Dataset, num_episodes: int | None, subsampling: int, seed: int
) -> tuple[torch.Tensor, float]:
    """-> the rows that the discriminator sees: of the first episodes, one in `subsampling` steps,
    from a random first one on. And how many terminations there are per step in those episodes."""
    last = torch.nonzero(dataset.terminated | dataset.truncated)[:num_episodes, 0].tolist()
    if num_episodes is not None and len(last) < num_episodes:
        limit = f"<= {len(last)}, the episodes of the dataset"
        raise InputError(f"num_expert_episodes must be {limit}, got {num_episodes}")
    rng, first, rows = np.random.default_rng(seed), 0, []
    for end in last:
        rows += range(first + rng.integers(subsampling), end + 1, subsampling)
        first = end + 1
    if not rows:
        raise InputError(f"expert_subsampling {subsampling} leaves no row: lower it")
    return torch.tensor(rows), dataset.terminated[:first].float().mean().item()


class Buffer:
    """A rollout, T steps of K environments. next_obs is the true successor of obs: where an episode
    ends, the next row starts elsewhere. In numpy, where a step is written faster than in torch."""

    def __init__(self, num_steps: int, num_envs: int, obs_dim: int, action_dim: int):
        self.fields = {
            "obs": np.zeros((num_steps, num_envs, obs_dim), np.float32),
            "action": np.zeros((num_steps, num_envs, action_dim), np.float32),
            "next_obs": np.zeros((num_steps, num_envs, obs_dim), np.float32),
            "terminated": np.zeros((num_steps, num_envs), np.float32),
            "truncated": np.zeros((num_steps, num_envs), np.float32),
        }
        self.size = 0  # steps so far

    def add(self, *step) -> None:
        """One step of all environments, in the order above."""
        for field, value in zip(self.fields.values(), step):
            field[self.size] = value
        self.size += 1

    def tensors(self, device: torch.device) -> list[torch.Tensor]:
        """[T, K, O], [T, K, A], [T, K, O], [T, K], [T, K]"""
        return [torch.tensor(field, device=device) for field in self.fields.values()]

    def state(self) -> dict:
        return {name: torch.tensor(field[: self.size]) for name, field in self.fields.items()}

    def load_state(self, state: dict) -> None:
        self.size = len(state["obs"])
        for name, field in self.fields.items():
            field[: self.size] = state[name].numpy()


def absorbing_share(end_rate: float | torch.Tensor, gamma: float) -> float | torch.Tensor:
    """The share of absorbing states, if every end is followed by 1 / (1 - gamma) of them: as many
    as a reward after the end counts, 1 + gamma + gamma^2 + ... end_rate: terminations per step."""
    return end_rate / (end_rate + 1 - gamma)


def draw_inputs(
    normalizer: Normalizer,
    obs: torch.Tensor,
    action: torch.Tensor,
    share: float | torch.Tensor,
    batch_size: int,
    generator: torch.Generator,
) -> torch.Tensor:
    """A batch for the discriminator, of the expert's rows or of the policy's, [N, O] and [N, A], a
    share of it absorbing. The same code for both: only behaviour may tell them apart. -> [B, I]"""
    index = torch.randint(len(obs), (batch_size,), device=obs.device, generator=generator)
    uniform = torch.rand(batch_size, device=obs.device, generator=generator)
    absorbing = (uniform < share).float()  # [B]
    return discriminator_input(normalizer(obs[index]), action[index], absorbing)


# ---- losses


def bernoulli_entropy(logit: torch.Tensor) -> torch.Tensor:
    """mean H(D) = mean -D log D - (1 - D) log(1 - D), at most log 2. [B] -> scalar"""
    # -log(1 - D) = softplus(f) and -log D = softplus(f) - f, so that H = softplus(f) - D f
    return (nn.functional.softplus(logit) - torch.sigmoid(logit) * logit).mean()


def gail_loss(
    expert_logit: torch.Tensor, policy_logit: torch.Tensor, entropy_coef: float
) -> torch.Tensor:
    """L_D = -mean log D(expert) - mean log(1 - D(policy)) - entropy_coef mean H(D), D = sigmoid(f).
    At f = 0 it is 2 log 2 = 1.386 but for the entropy. [B], [B] -> scalar"""
    assert expert_logit.shape == policy_logit.shape and expert_logit.dim() == 1
    # log D = -softplus(-f), log(1 - D) = -softplus(f): finite where sigmoid rounds to 0 or 1
    expert_loss = nn.functional.softplus(-expert_logit).mean()
    policy_loss = nn.functional.softplus(policy_logit).mean()
    entropy = bernoulli_entropy(torch.cat([expert_logit, policy_logit]))
    return expert_loss + policy_loss - entropy_coef * entropy


def slope_penalty(slope: torch.Tensor) -> torch.Tensor:
    """mean (|df/dx| - 1)^2: neither flat nor a cliff between the two. [B, I] -> scalar"""
    assert slope.dim() == 2
    return ((slope.norm(dim=1) - 1) ** 2).mean()


def gail_reward(logit: torch.Tensor, reward_type: str) -> torch.Tensor:
    """-log(1 - D) = softplus(f) > 0, log D = logsigmoid(f) < 0, or f = log D - log(1 - D). [B]"""
    if reward_type == "softplus":
        return nn.functional.softplus(logit)
    if reward_type == "logsigmoid":
        return nn.functional.logsigmoid(logit)
    return logit


def gae(
    reward: torch.Tensor,
    value: torch.Tensor,
    next_value: torch.Tensor,
    terminated: torch.Tensor,
    truncated: torch.Tensor,
    gamma: float,
    gae_lambda: float,
) -> torch.Tensor:
    """A_t = delta_t + gamma lambda (1 - done_t) A_{t+1}, all [T, K]
    delta_t = r_t + gamma (1 - terminated_t) V(s_{t+1}) - V(s_t)

    A truncated episode would have gone on: it bootstraps from its last state, but what comes in the
    next row is another episode, to which nothing may leak.
    """
    assert reward.shape == value.shape == next_value.shape == terminated.shape == truncated.shape
    delta = reward + gamma * (1 - terminated) * next_value - value  # [T, K]
    carry = gamma * gae_lambda * (1 - torch.maximum(terminated, truncated))  # [T, K]
    advantage = delta.clone()
    for t in reversed(range(len(delta) - 1)):
        advantage[t] += carry[t] * advantage[t + 1]
    return advantage


def ppo_loss(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantage: torch.Tensor,
    max_ratio_change: float,
) -> torch.Tensor:
    """-mean min(rho A, clip(rho, 1 - c, 1 + c) A), rho = pi(a|s) / pi_old(a|s). [B] -> scalar"""
    assert log_prob.shape == old_log_prob.shape == advantage.shape and log_prob.dim() == 1
    ratio = torch.exp(log_prob - old_log_prob)  # [B]
    clipped = ratio.clamp(1 - max_ratio_change, 1 + max_ratio_change)
    return -torch.minimum(ratio * advantage, clipped * advantage).mean()


def regression_loss(value: torch.Tensor, returns: torch.Tensor) -> torch.Tensor:
    """L_V = mean_b (R_b - V(s_b))^2 / 2. [B], [B] -> scalar"""
    assert value.shape == returns.shape and value.dim() == 1
    return 0.5 * ((returns - value) ** 2).mean()


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
    actor = PPOActor(obs_dim, action_dim, args.hidden_dim, discrete).to(device)
    normalizer = Normalizer(torch.zeros(1, obs_dim)).to(device)
    actor.load_state_dict(checkpoint["actor"])
    normalizer.load_state_dict(checkpoint["normalizer"])
    return make_policy(actor, normalizer, env.action_space)


def make_policy(actor: PPOActor, normalizer: Normalizer, action_space: gym.Space) -> common.Policy:
    """What is evaluated: the most likely action."""

    @torch.no_grad()
    def policy(obs: np.ndarray) -> np.ndarray:
        obs = torch.as_tensor(obs, dtype=torch.float32, device=normalizer.mean.device)  # [E, O]
        action = actor(normalizer(obs)).greedy()  # [E, A]
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
    "total_timesteps eval_interval checkpoint_interval log_interval target_return "
    "patience quiet resume dataset"
)
EVALUATE_MAY_CHANGE = (
    "eval_episodes eval_seed record capture_video quiet device torch_threads evaluate"
)
BIAS = {  # what a reward teaches beside imitation
    "softplus": "softplus(f) > 0 pays for every step: compare it with --no-learn-discriminator",
    "logsigmoid": "log D < 0 charges for every step, so that it pays to end",
    "logit": "f can pay for going on or for an end",
}


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


def is_due(step: int, interval: int, stride: int) -> bool:
    """Whether a multiple of the interval went by in the last `stride` steps."""
    return step // interval > (step - stride) // interval


def train(args: Args) -> dict[str, float]:
    # setup
    check_args(args)
    keep_freed_memory()
    if args.torch_threads is not None:
        torch.set_num_threads(args.torch_threads)
    device = pick_device(args.device)
    args = replace(args, device=device.type)  # a resumed run must not change it: bits would differ
    envs = [common.make_env(args.env_id) for _ in range(args.num_envs)]
    action_space = envs[0].action_space
    obs_dim, action_dim, discrete = check_spaces(envs[0])
    total, rollout_size = args.total_timesteps, args.num_steps * args.num_envs
    updates_per_rollout = args.num_epochs * math.ceil(rollout_size / args.batch_size)
    # what is left of the budget after whole rollouts is played, but not learned from
    total_updates = total // rollout_size * updates_per_rollout
    if total_updates == 0:
        raise InputError(
            f"total_timesteps {total} is spent before the first update: lower --num-steps"
            f" ({args.num_steps}) or --num-envs ({args.num_envs})"
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

    # data: of the expert, states and actions alone
    spec = args.dataset
    if spec == "auto":
        shipped = common.SHIPPED / f"{envs[0].spec.id}-expert.npz"
        if not shipped.is_file():
            raise InputError(f"there is no expert of ours for {args.env_id}: give it a --dataset")
        spec = str(shipped)
    dataset = common.load_dataset(spec, envs[0], args.seed)
    rows, expert_end_rate = expert_rows(
        dataset, args.num_expert_episodes, args.expert_subsampling, args.seed
    )
    fingerprint = dataset.fingerprint()
    expert_returns = dataset.episode_returns[: args.num_expert_episodes]
    expert_obs, expert_action = dataset.obs[rows].to(device), dataset.action[rows].to(device)
    rollout = Buffer(args.num_steps, args.num_envs, obs_dim, action_dim)

    # networks
    actor = PPOActor(obs_dim, action_dim, args.hidden_dim, discrete).to(device)
    value = StateValue(obs_dim, args.hidden_dim).to(device)
    discriminator = Discriminator(obs_dim + action_dim + 1, args.hidden_dim).to(device)
    normalizer = Normalizer(expert_obs)
    ppo_parameters = [*actor.parameters(), *value.parameters()]
    opt = torch.optim.Adam(ppo_parameters, args.learning_rate, eps=1e-5, fused=True)
    discriminator_opt = torch.optim.Adam(
        discriminator.parameters(), args.discriminator_learning_rate, fused=True
    )
    parts = {
        "actor": actor,
        "value": value,
        "discriminator": discriminator,
        "normalizer": normalizer,
        "opt": opt,
        "discriminator_opt": discriminator_opt,
    }

    # resume
    step, num_updates, best_return, evals_since_best = 0, 0, -math.inf, 0
    episodes = list(range(args.num_envs))  # environment i plays episodes i, i + K, i + 2K, ...
    episode_actions = [[] for _ in envs]
    log_position = {}
    if args.resume:
        if checkpoint["fingerprint"] != fingerprint:
            raise InputError(f"{dataset.source} is not the data that the run began with")
        if checkpoint["step"] >= total:
            done = f"{run_dir} is at step {checkpoint['step']} already"
            raise InputError(f"{done}: give it a larger budget")
        for name, part in parts.items():
            part.load_state_dict(checkpoint[name])
        generator.set_state(checkpoint["generator"])
        rollout.load_state(checkpoint["rollout"])
        step, log_position = checkpoint["step"], checkpoint["log_position"]
        num_updates, episodes = checkpoint["num_updates"], checkpoint["episodes"]
        episode_actions = [
            list(actions.clone().numpy()) for actions in checkpoint["episode_actions"]
        ]
        best_return, evals_since_best = checkpoint["best_return"], checkpoint["evals_since_best"]
    starts = [
        start_episode(env, args.seed, episode, actions)
        for env, episode, actions in zip(envs, episodes, episode_actions)
    ]
    current_obs = np.stack([obs for obs, _ in starts]).astype(np.float32)  # [K, O]
    returns_so_far = [episode_return for _, episode_return in starts]
    is_fresh, first_update = not args.resume, num_updates
    if args.resume:
        if not np.array_equal(current_obs, checkpoint["current_obs"].numpy()):
            raise InputError(f"{args.env_id} plays another episode from the same seed: no resume")
        del checkpoint  # its file is mapped into memory
    args = replace(args, resume=None)
    if args.compile:
        for network in (actor, value):  # the discriminator needs a second derivative, for its slope
            network.compile()

    try:
        os.makedirs(run_dir, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot use {run_dir} as run_dir: {error.strerror}") from None
    args_json = json.dumps(asdict(args), indent=2).encode()
    save_atomically(f"{run_dir}/args.json", lambda file: file.write(args_json))
    logger = Logger(run_dir, total, args.quiet, **log_position)
    logger.line(
        f"{ALGO} on {args.env_id}: {len(rows):,} steps of {dataset.source},"
        f" {len(expert_returns)} episodes, mean return {expert_returns.mean():.1f}"
        f"\nrun: {run_dir} on {device}"
    )
    if not args.absorbing:
        bias = BIAS[args.reward_type]
        logger.line(f"note: where episodes can end, {bias}; --absorbing removes this bias")
    policy = make_policy(actor, normalizer, action_space)
    evaluation = (policy, args.env_id, args.eval_episodes, args.eval_seed)
    if is_fresh:
        logger.scalars(0, {"stats/behaviour_return": expert_returns.mean()})
        logger.evaluation(0, common.evaluate(*evaluation))

    # loop
    stop_reason, exit_signal = "", 0
    with StopSignal() as stop_signal:
        while not stop_reason:
            step += args.num_envs

            # 1. act in every environment; what it pays is logged, and nothing learns from it
            obs = torch.as_tensor(current_obs, dtype=torch.float32, device=device)  # [K, O]
            with torch.no_grad():
                action = actor(normalizer(obs)).sample(generator).cpu().numpy()  # [K, A]
            taken = common.unnormalize_action(action, action_space)
            next_obs, terminated, truncated = np.empty_like(current_obs), [], []
            for i, env in enumerate(envs):
                next_obs[i], env_reward, is_end, is_cut, _ = env.step(taken[i])
                terminated.append(is_end)
                truncated.append(is_cut)
                episode_actions[i].append(taken[i])
                returns_so_far[i] += float(env_reward)
            rollout.add(current_obs, action, next_obs, terminated, truncated)
            current_obs = next_obs
            for i, env in enumerate(envs):
                if terminated[i] or truncated[i]:  # reset in the same step: no row between episodes
                    logger.scalars(step, {"charts/episodic_return": returns_so_far[i]})
                    episodes[i], episode_actions[i] = episodes[i] + args.num_envs, []
                    current_obs[i], returns_so_far[i] = start_episode(
                        env, args.seed, episodes[i], []
                    )

            has_update = rollout.size == args.num_steps
            if has_update:
                # once per rollout, as usual with PPO, and for the discriminator alike
                factor = lr_factor(
                    num_updates + 1, total_updates, args.lr_schedule, args.warmup_updates
                )
                opt.param_groups[0]["lr"] = args.learning_rate * factor
                rate = args.discriminator_learning_rate * factor
                discriminator_opt.param_groups[0]["lr"] = rate
                raw_obs, action, raw_next_obs, terminated, truncated = rollout.tensors(device)
                rollout.size = 0

                # 2. discriminator: tell the expert's steps from those of this rollout
                expert_share, policy_share = 0.0, 0.0
                if args.absorbing:
                    expert_share = absorbing_share(expert_end_rate, args.gamma)
                    policy_share = absorbing_share(terminated.mean(), args.gamma)
                expert = (normalizer, expert_obs, expert_action, expert_share)
                own = (normalizer, raw_obs.flatten(0, 1), action.flatten(0, 1), policy_share)
                for _ in range(args.discriminator_updates):
                    expert_input = draw_inputs(*expert, args.batch_size, generator)  # [B, I]
                    policy_input = draw_inputs(*own, args.batch_size, generator)  # [B, I]
                    expert_logit = discriminator(expert_input)  # [B]
                    policy_logit = discriminator(policy_input)  # [B]
                    discriminator_loss = gail_loss(
                        expert_logit, policy_logit, args.discriminator_entropy_coef
                    )
                    if args.gradient_penalty > 0:
                        mix = torch.rand(args.batch_size, 1, device=device, generator=generator)
                        between = mix * expert_input + (1 - mix) * policy_input  # [B, I]
                        between.requires_grad_()
                        (slope,) = torch.autograd.grad(
                            discriminator(between).sum(), between, create_graph=True
                        )  # [B, I]
                        penalty = args.gradient_penalty * slope_penalty(slope)
                        discriminator_loss = discriminator_loss + penalty
                    if args.learn_discriminator:  # a frozen one draws the same numbers, for the log
                        discriminator_opt.zero_grad()
                        discriminator_loss.backward()
                        discriminator_opt.step()

                # 3. reward the rollout with the discriminator as it is now
                obs, next_obs = normalizer(raw_obs), normalizer(raw_next_obs)  # [T, K, O] both
                with torch.no_grad():
                    inputs = discriminator_input(obs, action, torch.zeros_like(terminated))
                    step_reward = gail_reward(discriminator(inputs), args.reward_type)  # [T, K]
                    reward = step_reward
                    if args.absorbing:
                        mark = torch.ones_like(terminated[0, 0])
                        absorbing_input = discriminator_input(obs[0, 0], action[0, 0], mark)  # [I]
                        end_reward = gail_reward(discriminator(absorbing_input), args.reward_type)
                        # after an end, for ever: gamma + gamma^2 + ...
                        reward = reward + terminated * args.gamma / (1 - args.gamma) * end_reward
                    reward = (1 - args.gamma) * reward

                    # 4. advantages and returns
                    v, next_v = value(obs), value(next_obs)  # [T, K], [T, K]
                    advantage = gae(
                        reward, v, next_v, terminated, truncated, args.gamma, args.gae_lambda
                    )
                    returns = advantage + v  # [T, K]
                    unexplained = advantage.var(correction=0) / (returns.var(correction=0) + 1e-20)
                    # over the rollout: in a mini-batch, a step's sign would hang on its neighbours
                    std = advantage.std(correction=0)
                    advantage = (advantage - advantage.mean()) / (std + 1e-8)
                    old_log_prob = actor(obs).log_prob(action)  # [T, K]

                # 5. PPO: some epochs of mini-batches
                columns = (obs, action, old_log_prob, advantage, returns)
                columns = [column.flatten(0, 1) for column in columns]  # [T K, ...]
                for _ in range(args.num_epochs):
                    order = torch.randperm(rollout_size, device=device, generator=generator)
                    shuffled = [column[order].split(args.batch_size) for column in columns]
                    for obs, action, old_log_prob, advantage, returns in zip(*shuffled):
                        num_updates += 1
                        pi = actor(obs)
                        log_prob = pi.log_prob(action)  # [B]
                        actor_loss = ppo_loss(
                            log_prob, old_log_prob, advantage, args.max_ratio_change
                        )
                        value_loss = regression_loss(value(obs), returns)
                        loss = actor_loss + value_loss - args.policy_entropy_coef * pi.entropy()
                        opt.zero_grad()
                        loss.backward()
                        nn.utils.clip_grad_norm_(ppo_parameters, args.max_grad_norm)
                        opt.step()

                # 6. observations: only now, since pi_old saw them through the old statistics
                normalizer.update(raw_obs.flatten(0, 1))

            # 7. log, evaluate, stop, save
            if has_update:
                losses = {
                    "losses/discriminator": discriminator_loss.item(),
                    "losses/actor": actor_loss.item(),
                    "losses/value": value_loss.item(),
                }
                for name, loss in losses.items():
                    if not math.isfinite(loss):
                        message = f"{name} is {loss} at step {step}: it diverged"
                        rates = "--learning-rate or --discriminator-learning-rate"
                        raise InputError(f"{message}; lower {rates}")
            if has_update and is_due(step, args.log_interval, rollout_size):
                seconds = logger.seconds() - logger.first_second
                log_ratio = log_prob.detach() - old_log_prob  # [B], of the last mini-batch
                ratio = log_ratio.exp()
                is_clipped = (ratio - 1).abs() > args.max_ratio_change
                logit = torch.cat([expert_logit, policy_logit])  # [2B]
                statistics = {
                    "charts/env_steps_per_second": (step - logger.first_step) / seconds,
                    "charts/updates_per_second": (num_updates - first_update) / seconds,
                    "charts/learning_rate": opt.param_groups[0]["lr"],
                    **losses,
                    "stats/accuracy_expert": (expert_logit > 0).float().mean().item(),
                    "stats/accuracy_policy": (policy_logit < 0).float().mean().item(),
                    "stats/logit_expert": expert_logit.mean().item(),
                    "stats/logit_policy": policy_logit.mean().item(),
                    "stats/discriminator_entropy": bernoulli_entropy(logit).item(),
                    "stats/gail_reward": step_reward.mean().item(),
                    "stats/explained_variance": 1 - unexplained.item(),
                    "stats/approx_kl": (ratio - 1 - log_ratio).mean().item(),
                    "stats/ratio_clipped": is_clipped.float().mean().item(),
                    **pi.statistics(),
                }
                if args.absorbing:
                    statistics["stats/end_reward"] = end_reward.item()
                logger.scalars(step, statistics)
                logger.progress(step)
            is_best = False
            if step == total:
                stop_reason = "the budget is spent"
            # evaluate if there was an update since it was last due: else patience would run out
            last_multiple = (step - args.num_envs) // args.eval_interval * args.eval_interval
            last_due = math.ceil(last_multiple / args.num_envs) * args.num_envs
            is_new = step // rollout_size > last_due // rollout_size
            if step == total or (is_new and is_due(step, args.eval_interval, args.num_envs)):
                eval_returns = common.evaluate(*evaluation)
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
            is_save_due = bool(stop_reason) or is_due(step, args.checkpoint_interval, args.num_envs)
            if is_best or is_save_due:
                policy_state = {"algo": ALGO, "args": asdict(args), "step": step}
                policy_state |= {"actor": actor.state_dict()}
                policy_state |= {"normalizer": normalizer.state_dict()}
            if is_best:
                save_atomically(best_path, partial(torch.save, policy_state))
            if is_save_due:
                checkpoint = policy_state | {
                    "num_updates": num_updates,
                    "rollout": rollout.state(),
                    "episodes": episodes,
                    "episode_actions": [
                        torch.from_numpy(np.array(actions)) for actions in episode_actions
                    ],
                    "current_obs": torch.from_numpy(current_obs),
                    "best_return": best_return,
                    "evals_since_best": evals_since_best,
                    "fingerprint": fingerprint,
                    "log_position": logger.position(step),
                    "generator": generator.get_state(),
                    **{name: part.state_dict() for name, part in parts.items()},
                }
                save_atomically(checkpoint_path, partial(torch.save, checkpoint))

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
