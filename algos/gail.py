r"""GAIL: Generative Adversarial Imitation Learning, on PPO. Continuous or discrete actions.

Paper: "Generative Adversarial Imitation Learning", J. Ho, S. Ermon, 2016, arXiv:1606.03476.

Idea: imitate an expert from recordings. A discriminator D learns to tell the expert's states and
actions from the policy's; PPO is rewarded for fooling it, and so learns to stay with the expert.

Equations (f(s, a): the discriminator's output, D = sigmoid(f), 1 for the expert):
    discriminator   minimise -log D of the expert's (s, a) - log(1 - D) of the policy's,
                    + gradient_penalty (|df/dx| - 1)^2 at mixtures x of the two, - entropy of D
    reward          -log(1 - D) = softplus(f) > 0, which favours long episodes; or log D < 0, which
                    favours short ones; or f, which may favour either. --absorbing removes this bias
    advantage       A_t = delta_t + gamma lambda (1 - terminated or truncated) A_{t+1}
                    delta_t = r_t + gamma (1 - terminated) V(s_{t+1}) - V(s_t)
    value           minimise (A + V_old(s) - V(s))^2 / 2
    policy          maximise min(rho A, clip(rho, 1 - c, 1 + c) A), rho = pi(a|s) / pi_old(a|s),
                    A normalised over the rollout, + policy_entropy_coef entropy of pi

Differences from the paper:
    - PPO in place of TRPO. D learns from mini-batches. The paper's D is 1 for the policy.
    - Added: the gradient penalty of WGAN-GP (arXiv:1704.00028); D's entropy (in the authors' code).
    - A running normaliser of observations. Rewards times 1 - gamma: V is as large as a reward.
    - --absorbing is from Kostrikov et al. 2018 (arXiv:1809.02925). After a termination D sees one
      absorbing state there, 1 / (1 - gamma) here. Reward f is that of AIRL (arXiv:1710.11248).
    - The learning rates fall to 0. To raise the budget at --resume, use --lr-schedule constant.

Shapes: T steps of a rollout, K environments, B batch, O observation, A action (discrete: one-hot),
I = O + A + 1 inputs of D (1: marks an absorbing state), E evaluation episodes

Run it, then resume it:
    python algos/gail.py --env-id Pendulum-v1 --total-timesteps 200000
    python algos/gail.py --resume runs/<run>

The paper's hyper-parameters for CartPole (a batch of 5,000 is a whole rollout, 8 x 625 steps):
    python algos/gail.py --hidden-dim 100 --gamma 0.995 --gae-lambda 0.97 --num-steps 625 \
        --batch-size 5000 --discriminator-updates 1 --discriminator-learning-rate 0.01 \
        --gradient-penalty 0 --expert-subsampling 10 --total-timesteps 1500000
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
    env_id: str = "CartPole-v1"  # Gymnasium environment
    seed: int = 1  # same seed, same machine: same numbers to the last bit
    dataset: str = "auto"  # the expert: auto (benchmark/data) | PATH.npz | minari:ID | random[:N]
    # budget
    total_timesteps: int = 100_000  # budget in environment steps
    # optimisation
    batch_size: int = 256  # transitions per update
    gamma: float = 0.99  # discount
    learning_rate: float = 1e-3  # step size of Adam, for every network without a flag of its own
    lr_schedule: Literal["constant", "linear", "cosine"] = "linear"  # fall to 0 at total_timesteps
    warmup_updates: int = 0  # the learning rate first climbs from 0 over this many updates
    hidden_dim: int = 64  # width of the hidden layers, in every network
    # evaluation and stops
    eval_interval: int = 5_000  # updates (online: environment steps) between evaluations
    eval_episodes: int = 10  # episodes per evaluation
    eval_seed: int = 10_000  # evaluation episode i starts from eval_seed + i
    target_return: float | None = None  # stop when an evaluation's mean return gets there
    patience: int | None = None  # stop after this many evaluations without a better one
    # the run
    checkpoint_interval: int = 20_000  # updates (or steps) between saves; Ctrl-C, SIGTERM save, too
    log_interval: int = 1_000  # updates (or steps) between entries in the logs
    run_dir: str | None = None  # folder of the run [runs/<algo>__<env>__<seed>__<time>]
    resume: str | None = None  # folder of a run to continue, with its flags; budgets may change
    evaluate: str | None = None  # checkpoint to evaluate instead of training
    record: str | None = None  # with --evaluate: save its episodes as a dataset, FILE.npz
    capture_video: bool = False  # with --evaluate: film one episode, next to the checkpoint
    track: bool = False  # log to Weights & Biases, too (pip install wandb)
    quiet: bool = False  # print nothing but errors
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # auto takes a GPU if there is one
    torch_threads: int | None = None  # CPU threads [all cores]
    # GAIL only
    num_expert_episodes: int | None = None  # use only the first N of the dataset [all]
    expert_subsampling: int = 1  # keep every N-th step of the expert's episodes
    num_envs: int = 8  # K, environments that are stepped side by side
    num_steps: int = 128  # T, steps of each in a rollout
    reward_type: Literal["softplus", "logsigmoid", "logit"] = "softplus"  # -log(1-D) | log D | f
    absorbing: bool = False  # also reward the time after an end: no bias to long or short episodes
    learn_discriminator: bool = True  # False: D stays at 1/2, as a control experiment
    discriminator_learning_rate: float = 1e-3  # of the discriminator (Adam)
    discriminator_updates: int = 16  # of the discriminator, after every rollout
    discriminator_entropy_coef: float = 1e-3  # weight of the entropy of D
    gradient_penalty: float = 1.0  # weight of (|df/dx| - 1)^2
    num_epochs: int = 8  # passes of PPO over a rollout
    gae_lambda: float = 0.95  # lambda of the advantages; 1: discounted sums, 0: one-step TD
    max_ratio_change: float = 0.2  # c, PPO's clip of pi / pi_old
    policy_entropy_coef: float = 0.01  # how much the entropy of the policy counts
    max_grad_norm: float = 0.5  # clip of the gradient of policy and V


LIMITS = {  # rule: flags; common.LIMITS has those of the shared ones
    "> 0": "num_expert_episodes expert_subsampling num_steps discriminator_updates num_epochs "
    "max_ratio_change max_grad_norm",
    "in (0, inf)": "discriminator_learning_rate",
    "in [0, inf)": "discriminator_entropy_coef gradient_penalty",
    "in [0, 1]": "gae_lambda",
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

ALGO = "gail"


def check_args(args: Args) -> None:
    """Rules between flags."""
    if args.total_timesteps % args.num_envs != 0:
        multiple = f"a multiple of num_envs {args.num_envs}"
        raise InputError(f"total_timesteps must be {multiple}, got {args.total_timesteps}")
    if args.total_timesteps < args.num_steps * args.num_envs:
        spent = f"total_timesteps {args.total_timesteps} is spent before the first update"
        raise InputError(f"{spent}: lower --num-steps or --num-envs")


# ---- networks


def tanh_mlp(input_dim: int, hidden_dim: int, output_dim: int, output_gain: float) -> nn.Sequential:
    first, second = nn.Linear(input_dim, hidden_dim), nn.Linear(hidden_dim, hidden_dim)
    output = nn.Linear(hidden_dim, output_dim)
    # orthogonal, as usual with PPO; with a small output_gain all outputs start close to 0
    for layer, gain in ((first, math.sqrt(2)), (second, math.sqrt(2)), (output, output_gain)):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), output)


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
        return self.net(obs).squeeze(-1)  # [B]


class Discriminator(nn.Module):
    """f(s, a), whose sigmoid is D: the probability that it is the expert's. [B, I] -> [B]"""

    def __init__(self, input_dim: int, hidden_dim: int):
        super().__init__()
        self.net = tanh_mlp(input_dim, hidden_dim, 1, output_gain=0.0)  # at first f = 0, D = 1/2

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(inputs).squeeze(-1)  # [B]


def discriminator_input(
    obs: torch.Tensor, action: torch.Tensor, absorbing: torch.Tensor
) -> torch.Tensor:
    """An absorbing state, which follows an end, has no observation and no action, only its mark.
    [.., O] normalised, [.., A], [..] -> [.., I]"""
    assert obs.shape[:-1] == action.shape[:-1] == absorbing.shape
    mark = absorbing.unsqueeze(-1)  # [.., 1]
    # the expert's actions are in [-1, 1]: one outside would give the policy away
    parts = [(1 - mark) * obs, (1 - mark) * action.clamp(-1, 1), mark]
    return torch.cat(parts, dim=-1)  # [.., I]


class Normalizer(nn.Module):
    """(s - mean) / std over all that was seen so far, the expert's states and the policy's."""

    def __init__(self, obs: torch.Tensor):
        super().__init__()
        self.register_buffer("count", torch.tensor(float(len(obs)), device=obs.device))
        self.register_buffer("mean", obs.mean(dim=0))  # [O]
        self.register_buffer("std", obs.std(dim=0, correction=0))  # [O]

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        # 1e-3: std may be 0. clamp: the policy's first states may be many of the expert's std away
        return ((obs - self.mean) / (self.std + 1e-3)).clamp(-10, 10)

    def update(self, obs: torch.Tensor) -> None:
        """Mean and std of all so far and [B, O] together."""
        count = self.count + len(obs)
        share, change = len(obs) / count, obs.mean(dim=0) - self.mean
        # variance of a union: the mean of the two variances, and the variance of the two means
        within = share * obs.var(dim=0, correction=0) + (1 - share) * self.std**2  # [O]
        self.std.copy_((within + share * (1 - share) * change**2).sqrt())
        self.mean.add_(share * change)
        self.count.copy_(count)


# ---- buffer


def expert_rows(
    dataset: common.Dataset, num_episodes: int | None, subsampling: int, seed: int
) -> tuple[torch.Tensor, float]:
    """-> rows for the discriminator: every `subsampling`-th step of the first episodes, from some
    random offset; and terminations per step in those episodes."""
    last_rows = torch.nonzero(dataset.terminated | dataset.truncated)[:num_episodes, 0].tolist()
    if num_episodes is not None and len(last_rows) < num_episodes:
        limit = f"<= {len(last_rows)}, the episodes of the dataset"
        raise InputError(f"num_expert_episodes must be {limit}, got {num_episodes}")
    rng, rows, first = np.random.default_rng(seed), [], 0
    for last in last_rows:
        rows.extend(range(first + rng.integers(subsampling), last + 1, subsampling))
        first = last + 1  # of the next episode
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

    def add(self, obs, action, next_obs, terminated, truncated) -> None:
        """One step of all environments."""
        values = (obs, action, next_obs, terminated, truncated)
        for field, value in zip(self.fields.values(), values):
            field[self.size] = value
        self.size += 1

    def tensors(self, device: torch.device) -> list[torch.Tensor]:
        """[T, K, O], [T, K, A], [T, K, O], [T, K], [T, K]"""
        return [torch.tensor(field, device=device) for field in self.fields.values()]

    def state_dict(self) -> dict:
        """What a checkpoint needs: a copy of the filled part."""
        return {name: torch.tensor(field[: self.size]) for name, field in self.fields.items()}

    def load_state_dict(self, state: dict) -> None:
        self.size = len(state["obs"])
        for name, field in self.fields.items():
            field[: self.size] = state[name].numpy()


def absorbing_share(end_rate: float | torch.Tensor, gamma: float) -> float | torch.Tensor:
    """The share of absorbing states: x / (1 + x), where x = end_rate / (1 - gamma), as an end adds
    1 + gamma + gamma^2 + ... = 1 / (1 - gamma) of them. end_rate: terminations per step."""
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


# name: (reward of f, its bias where episodes can end). Add a form here and to Args.reward_type
REWARDS = {
    "softplus": (nn.functional.softplus, "softplus(f) > 0 pays for every step, whatever D says"),
    "logsigmoid": (nn.functional.logsigmoid, "log D < 0 charges for every step, whatever D says"),
    "logit": (lambda f: f, "f pays or charges for going on, as D's level happens to be"),
}


def gail_reward(logit: torch.Tensor, reward_type: str) -> torch.Tensor:
    """-log(1 - D) = softplus(f) > 0, log D = logsigmoid(f) < 0, or f = log D - log(1 - D). [B]"""
    return REWARDS[reward_type][0](logit)


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

    A truncated episode would have gone on: it bootstraps from its own last state. The next row is
    of another episode, from which nothing may leak."""
    assert reward.shape == value.shape == next_value.shape == terminated.shape == truncated.shape
    delta = reward + gamma * (1 - terminated) * next_value - value  # [T, K]
    carry = gamma * gae_lambda * (1 - torch.maximum(terminated, truncated))  # [T, K]
    advantage = delta.clone()
    for t in reversed(range(len(delta) - 1)):
        advantage[t] += carry[t] * advantage[t + 1]
    return advantage


def ppo_loss(
    log_prob: torch.Tensor, old_log_prob: torch.Tensor, advantage: torch.Tensor, max_change: float
) -> torch.Tensor:
    """-mean min(rho A, clip(rho, 1 - c, 1 + c) A), rho = pi(a|s) / pi_old(a|s). [B] -> scalar"""
    assert log_prob.shape == old_log_prob.shape == advantage.shape and log_prob.dim() == 1
    ratio = torch.exp(log_prob - old_log_prob)  # [B]
    clipped = ratio.clamp(1 - max_change, 1 + max_change)  # [B]
    return -torch.minimum(ratio * advantage, clipped * advantage).mean()


def regression_loss(value: torch.Tensor, returns: torch.Tensor) -> torch.Tensor:
    """L_V = mean_b (R_b - V(s_b))^2 / 2. [B], [B] -> scalar"""
    assert value.shape == returns.shape and value.dim() == 1
    return 0.5 * ((returns - value) ** 2).mean()


# ---- checkpoint


def make_policy(actor: PPOActor, normalizer: Normalizer, action_space: gym.Space) -> common.Policy:
    """What is evaluated: the most likely action."""

    @torch.no_grad()
    def policy(obs: np.ndarray) -> np.ndarray:
        obs = torch.as_tensor(obs, dtype=torch.float32, device=normalizer.mean.device)  # [E, O]
        action = actor(normalizer(obs)).greedy()  # [E, A]
        return common.unnormalize_action(action.cpu().numpy(), action_space)

    return policy


def load_policy(path: str, **overrides) -> common.Policy:
    """The policy of a checkpoint: a batch of obs -> actions. `overrides` are flags, e.g. device."""
    checkpoint = common.load_checkpoint(path, ALGO, Args, overrides.get("env_id"))
    args = replace(Args(**checkpoint["args"]), **overrides)
    env, device = common.make_env(args.env_id), common.pick_device(args.device)
    (obs_dim,), action_dim, discrete = common.check_spaces(env)
    actor = PPOActor(obs_dim, action_dim, args.hidden_dim, discrete).to(device)
    normalizer = Normalizer(torch.zeros(1, obs_dim)).to(device)
    actor.load_state_dict(checkpoint["actor"])
    normalizer.load_state_dict(checkpoint["normalizer"])
    return make_policy(actor, normalizer, env.action_space)


# ---- training


def train(args: Args) -> dict[str, float]:
    # setup
    run = common.Run(ALGO, args, LIMITS)
    args, device = run.args, run.device
    check_args(args)
    envs = [common.make_env(args.env_id) for _ in range(args.num_envs)]
    (obs_dim,), action_dim, discrete = common.check_spaces(envs[0])
    total, rollout_size = args.total_timesteps, args.num_steps * args.num_envs
    updates_per_epoch = math.ceil(rollout_size / args.batch_size)
    total_updates = total // rollout_size * args.num_epochs * updates_per_epoch
    torch.manual_seed(args.seed)  # for the initial weights
    generator = torch.Generator(device).manual_seed(common.second_seed(args.seed))  # for the rest

    # data: of the expert, states and actions alone
    spec = args.dataset
    if spec == "auto":
        spec = str(common.SHIPPED / f"{envs[0].spec.id}-expert.npz")
        if not Path(spec).is_file():
            raise InputError(f"no {spec}: give the expert with --dataset (ours: benchmark/data)")
    dataset = common.load_dataset(spec, envs[0], args.seed)
    num_episodes = args.num_expert_episodes
    rows, end_rate = expert_rows(dataset, num_episodes, args.expert_subsampling, args.seed)
    expert_obs, expert_action = dataset.obs[rows].to(device), dataset.action[rows].to(device)
    expert_share = absorbing_share(end_rate, args.gamma) if args.absorbing else 0.0
    expert_returns = dataset.episode_returns[:num_episodes]
    rollout = Buffer(args.num_steps, args.num_envs, obs_dim, action_dim)

    # networks
    actor = PPOActor(obs_dim, action_dim, args.hidden_dim, discrete).to(device)
    value = StateValue(obs_dim, args.hidden_dim).to(device)
    discriminator = Discriminator(obs_dim + action_dim + 1, args.hidden_dim).to(device)
    normalizer = Normalizer(expert_obs)
    ppo_parameters = list(actor.parameters()) + list(value.parameters())
    opt = torch.optim.Adam(ppo_parameters, args.learning_rate, eps=1e-5, fused=True)
    discriminator_lr = args.discriminator_learning_rate
    discriminator_opt = torch.optim.Adam(discriminator.parameters(), discriminator_lr, fused=True)

    # episodes: environment i plays i, i + K, .. A resumed run replays those that were not finished
    num_updates = run.saved.get("num_updates", 0)
    policy_is_new = run.saved.get("policy_is_new", False)  # not evaluated yet
    episodes = run.saved.get("episodes", list(range(args.num_envs)))
    episode_actions = [[] for _ in envs]
    if run.saved:
        episode_actions = [list(x.numpy().copy()) for x in run.saved["episode_actions"]]
    current_obs = np.zeros((args.num_envs, obs_dim), np.float32)  # [K, O]
    episode_returns = [0.0 for _ in envs]
    for i, env in enumerate(envs):
        start = common.start_episode(env, args.seed, episodes[i], episode_actions[i])
        current_obs[i], episode_returns[i] = start
    run.check_replay(current_obs)

    # checkpoint: best.pt holds what acts, checkpoint.pt everything that a resumed run needs
    acting = {"actor": actor, "normalizer": normalizer}
    everything = acting | {"value": value, "discriminator": discriminator, "opt": opt}
    everything |= {"discriminator_opt": discriminator_opt, "rollout": rollout}
    everything |= {"generator": generator, "fingerprint": dataset.fingerprint}
    about = f"{len(rows):,} steps of {dataset.source}, {len(expert_returns)} episodes"
    about += f", mean return {expert_returns.mean():.1f}"
    plan = f"{total // rollout_size:,} rollouts of {rollout_size:,} steps"
    run.start(total, everything, f"{about}; {plan}")
    if not args.absorbing:
        run.say(f"note: {REWARDS[args.reward_type][1]}; --absorbing removes this")
    policy = make_policy(actor, normalizer, envs[0].action_space)
    if run.is_fresh:
        run.log({"stats/behaviour_return": expert_returns.mean()})
        run.evaluate(policy, acting)

    # loop
    for step in run.steps(args.num_envs):
        # 1. act in every environment; the environment's reward is only logged
        obs = torch.as_tensor(current_obs, device=device)  # [K, O]
        with torch.no_grad():
            action = actor(normalizer(obs)).sample(generator).cpu().numpy()  # [K, A]
        env_action = common.unnormalize_action(action, envs[0].action_space)  # [K, A] or [K]
        next_obs = np.zeros_like(current_obs)  # [K, O]
        terminated, truncated = np.zeros((2, args.num_envs), bool)  # [K], [K]
        for i, env in enumerate(envs):
            next_obs[i], env_reward, terminated[i], truncated[i], _ = env.step(env_action[i])
            episode_actions[i].append(env_action[i])
            episode_returns[i] += float(env_reward)
        rollout.add(current_obs, action, next_obs, terminated, truncated)
        # the rollout keeps the true last state of an episode; acting goes on from the reset
        for i in np.flatnonzero(terminated | truncated):
            run.log({"charts/episodic_return": episode_returns[i]})
            episodes[i], episode_actions[i] = episodes[i] + args.num_envs, []
            next_obs[i], episode_returns[i] = common.start_episode(envs[i], args.seed, episodes[i])
        current_obs = next_obs

        if rollout.size == args.num_steps:
            # from here on, these are of the whole rollout: [T, K, O] or [T, K, A], ends [T, K]
            raw_obs, action, raw_next_obs, terminated, truncated = rollout.tensors(device)
            rollout.size = 0
            update = num_updates + 1  # the first on this rollout; its learning rates hold for all
            factor = common.lr_factor(update, total_updates, args.lr_schedule, args.warmup_updates)
            opt.param_groups[0]["lr"] = args.learning_rate * factor
            discriminator_opt.param_groups[0]["lr"] = discriminator_lr * factor

            # 2. discriminator: tell the expert's steps from those of this rollout
            policy_obs, policy_action = raw_obs.flatten(0, 1), action.flatten(0, 1)  # [T K, ..]
            policy_share = absorbing_share(terminated.mean(), args.gamma) if args.absorbing else 0.0
            for _ in range(args.discriminator_updates):
                expert_input = draw_inputs(
                    normalizer, expert_obs, expert_action, expert_share, args.batch_size, generator
                )  # [B, I]
                policy_input = draw_inputs(
                    normalizer, policy_obs, policy_action, policy_share, args.batch_size, generator
                )  # [B, I]
                expert_logit = discriminator(expert_input)  # [B]
                policy_logit = discriminator(policy_input)  # [B]
                discriminator_loss = gail_loss(
                    expert_logit, policy_logit, args.discriminator_entropy_coef
                )
                if args.gradient_penalty > 0:
                    mix = torch.rand(args.batch_size, 1, device=device, generator=generator)
                    middle = (mix * expert_input + (1 - mix) * policy_input).requires_grad_()
                    f = discriminator(middle)  # [B]
                    # row b is df_b/dx_b; create_graph, since the loss contains this gradient
                    slope = torch.autograd.grad(f.sum(), middle, create_graph=True)[0]  # [B, I]
                    discriminator_loss += args.gradient_penalty * slope_penalty(slope)
                if args.learn_discriminator:  # if not, the loss is still logged
                    discriminator_opt.zero_grad()
                    discriminator_loss.backward()
                    discriminator_opt.step()

            # 3. reward the rollout with the discriminator as it is now
            obs, next_obs = normalizer(raw_obs), normalizer(raw_next_obs)  # [T, K, O] both
            with torch.no_grad():
                inputs = discriminator_input(obs, action, torch.zeros_like(terminated))  # [T, K, I]
                step_reward = gail_reward(discriminator(inputs), args.reward_type)  # [T, K]
                reward = step_reward  # logged without what --absorbing adds
                if args.absorbing:
                    mark = torch.ones_like(terminated[0, 0])  # hides obs and action: any will do
                    end_input = discriminator_input(obs[0, 0], action[0, 0], mark)  # [I]
                    end_reward = gail_reward(discriminator(end_input), args.reward_type)  # scalar
                    # for ever after an end, discounted from this step on: gamma + gamma^2 + ...
                    reward = reward + terminated * args.gamma / (1 - args.gamma) * end_reward
                reward = (1 - args.gamma) * reward  # so V is as large as a reward

                # 4. advantages and returns
                v, next_v = value(obs), value(next_obs)  # [T, K], [T, K]
                advantage = gae(
                    reward, v, next_v, terminated, truncated, args.gamma, args.gae_lambda
                )  # [T, K]
                returns = advantage + v  # [T, K]
                unexplained = advantage.var(correction=0) / (returns.var(correction=0) + 1e-20)
                # not per mini-batch: its noisy mean could flip the sign of an advantage
                advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
                old_log_prob = actor(obs).log_prob(action)  # [T, K]

            # 5. PPO: epochs of mini-batches, whose rows are step t of environment k
            for _ in range(args.num_epochs):
                order = torch.randperm(rollout_size, device=device, generator=generator)  # [T K]
                for index in order.split(args.batch_size):  # [B]
                    num_updates += 1
                    t, k = index // args.num_envs, index % args.num_envs  # [B], [B]
                    pi = actor(obs[t, k])
                    log_prob = pi.log_prob(action[t, k])  # [B]
                    actor_loss = ppo_loss(
                        log_prob, old_log_prob[t, k], advantage[t, k], args.max_ratio_change
                    )
                    value_loss = regression_loss(value(obs[t, k]), returns[t, k])
                    loss = actor_loss + value_loss - args.policy_entropy_coef * pi.entropy()
                    opt.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(ppo_parameters, args.max_grad_norm)
                    opt.step()

            # 6. normaliser: only now, since old_log_prob was computed with its old mean and std
            normalizer.update(policy_obs)
            policy_is_new = True

            # 7. log, of the last mini-batches
            if common.is_due(step, args.log_interval, rollout_size):
                log_ratio = log_prob.detach() - old_log_prob[t, k]  # [B]
                ratio = log_ratio.exp()
                is_clipped = (ratio - 1).abs() > args.max_ratio_change
                logit = torch.cat([expert_logit, policy_logit])  # [2B]
                scalars = {
                    "charts/learning_rate": opt.param_groups[0]["lr"],
                    "losses/discriminator": discriminator_loss.item(),
                    "losses/actor": actor_loss.item(),
                    "losses/value": value_loss.item(),
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
                    scalars["stats/end_reward"] = end_reward.item()
                rates = "--learning-rate or --discriminator-learning-rate"  # if a loss is NaN
                run.log(scalars, updates=num_updates, lower=rates)

        # 8. evaluate, but a policy only once; save
        is_due = common.is_due(step, args.eval_interval, args.num_envs)
        if policy_is_new and (is_due or step == total):
            run.evaluate(policy, acting)
        policy_is_new = policy_is_new and not is_due  # one off the grid does not count
        if common.is_due(step, args.checkpoint_interval, args.num_envs) or run.is_last:
            place = {"num_updates": num_updates, "policy_is_new": policy_is_new}
            actions = [torch.tensor(np.array(x)) for x in episode_actions]
            place |= {"current_obs": current_obs, "episodes": episodes, "episode_actions": actions}
            run.save(everything | place)
    return run.finish()


if __name__ == "__main__":
    sys.exit(common.main(ALGO, Args, train, load_policy))
