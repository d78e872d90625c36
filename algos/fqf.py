"""FQF: Fully parameterised Quantile Function. Online RL, discrete actions, vectors or Atari images.

Paper: "Fully Parameterized Quantile Function for Distributional Reinforcement Learning", D. Yang,
L. Zhao, Z. Lin, T. Qin, J. Bian, T. Liu, 2019, arXiv:1911.02140.

Idea: DQN that learns the distribution of returns, not only its mean. F(tau) is the return that is
not exceeded with probability tau; it is approximated by a staircase of N stairs. QR-DQN fixes where
stairs begin and end (the fractions, 1/N apart) and learns how high they are (the quantiles). FQF
learns both: a small network proposes, for each state, the fractions at which the area between F and
the staircase, which is the 1-Wasserstein distance W1, is smallest.

Equations (F, of an action in a state; a prime: of the next state, by the target network):
    fractions   0 = tau_0 < .. < tau_N = 1, the cumulative sums of softmax(linear(psi(s)))
    mid-points  tau_hat_i = (tau_i + tau_{i+1}) / 2, i = 0..N-1
    network     F(tau) = head(psi(s) * phi(tau))_a, phi(tau) = ReLU(linear(cos(pi k tau), k > 0))
    value       Q(s, a) = sum_i (tau_{i+1} - tau_i) F(tau_hat_i)
    targets     y_j = r + gamma (1 - terminated) F'(tau_hat'_j) of a' = argmax Q'(s', .)
    quantiles   minimise sum_i sum_j (tau'_{j+1} - tau'_j) |tau_hat_i - 1[delta_ij < 0]|
                Huber_kappa(delta_ij) / kappa, delta_ij = y_j - F(tau_hat_i)
    fractions   descend dW1/dtau_i = |F(tau_i) - F(tau_hat_{i-1})| - |F(tau_i) - F(tau_hat_i)|,
                and ascend the entropy of the widths tau_{i+1} - tau_i a little

Differences from the paper:
    - dW1/dtau_i has absolute values. 2 F(tau_i) - F(tau_hat_i) - F(tau_hat_{i-1}), as in the paper,
      is the same where F rises, and has the wrong sign where a network's F falls.
    - A target counts as much as its stair is wide. Counted alike, as in the paper, narrow stairs at
      the tails count too much, and with every backup the distribution grows (benchmark/NOTES.md).
    - Targets lie at the fractions of the next state: the pass that chooses a' has them already.
    - Fractions depend on the state alone, and k counts from 1, as in the authors' code.
    - Defaults fit CartPole. At the paper's rate of 2.5e-9 fractions would not move in such a run.
    - Atari: rewards are clipped to their sign for training, as usual; FIRE serves the ball.

Shapes: B batch, N fractions, A actions, D features psi(s), H hidden, O observation, K stacked
frames, T steps of an episode, E evaluation episodes. A scalar per transition is [B], never [B, 1].

Run it:
    python algos/fqf.py --env-id CartPole-v1
    python algos/fqf.py --evaluate runs/<run>/best.pt --plot      (distributions.png, next to it)

The paper's set, for a GPU and days; its buffer takes 7.1 GB, in memory and in a checkpoint:
    python algos/fqf.py --env-id ALE/Breakout-v5 --total-timesteps 50000000 --batch-size 32 \\
        --hidden-dim 512 --learning-rate 5e-5 --fraction-learning-rate 2.5e-9 --num-fractions 32 \\
        --kappa 1 --n-steps 1 --no-weight-targets-by-fraction --target-interval 2500 \\
        --learning-starts 50000 --buffer-capacity 1000000 --epsilon-final 0.01 \\
        --epsilon-steps 250000 --eval-interval 250000 --checkpoint-interval 1000000

Resume it:
    python algos/fqf.py --resume runs/<run>
Its episode is played again: exact in any environment that is a function of seed and actions. A
checkpoint has 0.7 MB, and 46 bytes per step in CartPole's buffer.
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
    env_id: str = "CartPole-v1"  # Gymnasium environment
    seed: int = 1  # same seed, same machine: same numbers to the last bit
    total_timesteps: int = 50_000  # budget in environment steps
    batch_size: int = 128  # transitions per update
    gamma: float = 0.99  # discount
    learning_rate: float = 5e-4  # of every optimiser (Adam) that has no flag of its own
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"  # the last two fall to 0
    warmup_updates: int = 0  # the learning rate first climbs from 0 over this many updates
    hidden_dim: int = 128  # width of the hidden layers, in every network
    eval_interval: int = 2_500  # updates (online: environment steps) between evaluations
    eval_episodes: int = 10  # episodes per evaluation
    eval_seed: int = 10_000  # evaluation episode i starts from eval_seed + i
    target_return: float | None = None  # stop when an evaluation's mean return gets there
    patience: int | None = None  # stop after this many evaluations without a better one
    checkpoint_interval: int = 10_000  # updates (or steps) between saves; Ctrl-C, SIGTERM save, too
    log_interval: int = 500  # updates (or steps) between entries in the logs
    run_dir: str | None = None  # folder of the run [runs/<algo>__<env>__<seed>__<time>]
    resume: str | None = None  # folder of a run to go on with; its flags hold, budgets may change
    evaluate: str | None = None  # checkpoint to evaluate instead of training
    record: str | None = None  # with --evaluate: save its episodes as a dataset, FILE.npz
    capture_video: bool = False  # with --evaluate: film one episode, next to the checkpoint
    quiet: bool = False  # print nothing but errors
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # auto takes a GPU if there is one
    torch_threads: int | None = None  # CPU threads [all cores]
    compile: bool = False  # torch.compile the networks: slow to start; for large ensembles, FQF
    # FQF only
    num_fractions: int = 16  # N, stairs of a distribution
    num_cosines: int = 64  # features of a fraction
    kappa: float = 10.0  # of the Huber loss: smaller errors count squared, larger ones linearly
    learn_fractions: bool = True  # False: they stay 1/N apart: QR-DQN, with a cosine network
    fraction_learning_rate: float = 1e-5  # of the proposed fractions (RMSProp)
    entropy_coef: float = 1e-3  # how much the fractions are drawn towards 1/N apart
    weight_targets_by_fraction: bool = True  # a target counts as its stair is wide; False: alike
    double_q: bool = False  # the online network chooses a', the target network values it
    n_steps: int = 10  # rewards that a target adds up before it bootstraps
    target_interval: int = 20  # updates between target updates
    buffer_capacity: int = 50_000  # steps that the replay buffer holds; then the oldest go
    learning_starts: int = 1_000  # first steps, with random actions and without updates
    train_frequency: int = 4  # steps between blocks of updates
    epsilon_final: float = 0.05  # share of random actions in the end
    epsilon_steps: int = 10_000  # steps over which it falls from 1 to epsilon_final
    prioritized: bool = False  # draw transitions with large errors more often [all alike]
    priority_alpha: float = 0.6  # with --prioritized: they are drawn in proportion to error^alpha
    priority_beta: float = 0.4  # with --prioritized: exponent of the importance weights, at first
    priority_beta_steps: int = 50_000  # steps over which it rises from priority_beta to 1
    plot: bool = False  # with --evaluate: draw an episode's distributions, next to the checkpoint


if __name__ == "__main__":  # parsed here for --help and typos, which need not wait for torch
    tyro.cli(Args, description=__doc__)

import gymnasium as gym
import numpy as np
import torch
from torch import nn

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))  # for common.py
import common
from common import InputError

ALGO = "fqf"
STACK_SIZE = 4  # frames in an observation of an Atari game


def check_args(args: Args) -> None:
    """Refuse what would waste a run, before it begins."""
    positive = (
        "total_timesteps batch_size learning_rate hidden_dim eval_interval eval_episodes patience "
        "checkpoint_interval log_interval torch_threads num_fractions num_cosines kappa "
        "fraction_learning_rate n_steps target_interval buffer_capacity train_frequency "
        "epsilon_steps priority_beta_steps"
    )
    values = {name: getattr(args, name) for name in positive.split()}
    rules = [(name, "> 0", value is None or value > 0) for name, value in values.items()]
    room = STACK_SIZE + args.n_steps
    rules += [
        ("seed", "in [0, 2^63)", 0 <= args.seed < 2**63),
        ("eval_seed", "in [0, 2^31)", 0 <= args.eval_seed < 2**31),
        ("learning_rate", "finite", args.learning_rate < math.inf),
        ("fraction_learning_rate", "finite", args.fraction_learning_rate < math.inf),
        ("kappa", "finite", args.kappa < math.inf),
        ("gamma", "in [0, 1)", 0 <= args.gamma < 1),
        ("warmup_updates", ">= 0", args.warmup_updates >= 0),
        ("entropy_coef", "in [0, inf)", 0 <= args.entropy_coef < math.inf),
        ("learning_starts", ">= 0", args.learning_starts >= 0),
        ("buffer_capacity", f"> {room}, for one transition", args.buffer_capacity > room),
        ("epsilon_final", "in [0, 1]", 0 <= args.epsilon_final <= 1),
        ("priority_alpha", "in [0, 1]", 0 <= args.priority_alpha <= 1),
        ("priority_beta", "in [0, 1]", 0 <= args.priority_beta <= 1),
        ("capture_video", "used with --evaluate", not args.capture_video or args.evaluate),
        ("plot", "used with --evaluate", not args.plot or args.evaluate),
        ("record", "a name that ends in .npz", (args.record or ".npz").endswith(".npz")),
        ("record", "used with --evaluate", args.record is None or args.evaluate),
        ("resume", "used without --evaluate", not args.resume or not args.evaluate),
    ]
    for field in fields(args):  # the command line checks choices by itself, Python does not
        if get_origin(field.type) is Literal:
            choices = get_args(field.type)
            rules.append((field.name, f"one of {choices}", getattr(args, field.name) in choices))
    for name, rule, holds in rules:
        if not holds:
            raise InputError(f"{name} must be {rule}, got {getattr(args, name)}")


class FirstFire(gym.Wrapper):
    """A life begins with FIRE, whatever the agent says: games such as Breakout serve no ball
    without it, and a greedy policy that never fires would play on for 27,000 steps."""

    def __init__(self, env: gym.Env):
        super().__init__(env)
        self.fire = env.unwrapped.get_action_meanings().index("FIRE")

    def reset(self, **kwargs):
        self.lives, self.shots = math.inf, 0
        return self.env.reset(**kwargs)

    def step(self, action):
        lives = self.unwrapped.ale.lives()
        if lives < self.lives:
            self.shots = 2  # one may be lost: a game repeats the action before it now and then
        self.lives = lives
        if self.shots > 0:
            self.shots, action = self.shots - 1, self.fire
        return self.env.step(action)


def make_env(env_id: str, **kwargs) -> gym.Env:
    """An Atari game with the usual preprocessing: up to 30 idle frames at the start, every action
    lasts 4 frames, grey images of 84 x 84, the last 4 are an observation. Others as they are."""
    if not env_id.startswith("ALE/"):
        return common.make_env(env_id, **kwargs)
    try:
        import ale_py  # an optional package, and it registers the games
        import cv2  # noqa: F401  the wrapper below resizes images with it
    except ImportError:
        packages = "pip install ale-py opencv-python-headless"
        raise InputError(f"Atari games need two packages: {packages}") from None
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    env = common.make_env(env_id, frameskip=1, obs_type="grayscale", **kwargs)
    try:
        env = gym.wrappers.AtariPreprocessing(env, noop_max=30, frame_skip=4, screen_size=84)
    except ValueError as error:  # a game that cannot wait
        raise InputError(f"cannot play {env_id}: {common.one_line(error)}") from None
    if "FIRE" in env.unwrapped.get_action_meanings():
        env = FirstFire(env)
    return gym.wrappers.FrameStackObservation(env, STACK_SIZE)


def check_spaces(env: gym.Env) -> tuple[tuple[int, ...], int]:
    """-> the shape of observations, [O] or [K, 84, 84], and A, if actions are discrete."""
    obs_space, action_space, env_id = env.observation_space, env.action_space, env.spec.id
    is_stack = isinstance(env, gym.wrappers.FrameStackObservation)
    if not isinstance(obs_space, gym.spaces.Box) or not (len(obs_space.shape) == 1 or is_stack):
        raise InputError(
            f"{env_id}: observations must be vectors, or of a game ALE/..., not {obs_space}"
        )
    if not isinstance(action_space, gym.spaces.Discrete):
        raise InputError(f"{env_id}: actions must be discrete, not {action_space}")
    return obs_space.shape, int(action_space.n)


# ---- networks


class QuantileNetwork(nn.Module):
    """F(tau) = head(psi(s) * phi(tau))_a: the return of a in s that is not exceeded with
    probability tau. psi is the torso, phi the embedding, the head the two layers after them."""

    def __init__(
        self, obs_shape: tuple[int, ...], num_actions: int, hidden_dim: int, num_cosines: int
    ):
        super().__init__()
        if len(obs_shape) == 1:
            self.feature_dim = hidden_dim
            self.torso = nn.Sequential(
                nn.Linear(obs_shape[0], hidden_dim),
                nn.ReLU(inplace=True),
                nn.Linear(hidden_dim, hidden_dim),
                nn.ReLU(inplace=True),
            )
        else:  # the convolutions of DQN's paper in Nature
            self.feature_dim = 64 * 7 * 7  # from 84 x 84
            self.torso = nn.Sequential(
                nn.Conv2d(obs_shape[0], 32, kernel_size=8, stride=4),
                nn.ReLU(inplace=True),
                nn.Conv2d(32, 64, kernel_size=4, stride=2),
                nn.ReLU(inplace=True),
                nn.Conv2d(64, 64, kernel_size=3, stride=1),
                nn.ReLU(inplace=True),
                nn.Flatten(),
            )
        self.register_buffer("frequencies", math.pi * torch.arange(1, num_cosines + 1))  # pi k
        self.embedding = nn.Linear(num_cosines, self.feature_dim)
        self.hidden = nn.Linear(self.feature_dim, hidden_dim)
        self.output = nn.Linear(hidden_dim, num_actions)

    def features(self, obs: torch.Tensor) -> torch.Tensor:
        """psi(s). [B, O] or uint8 [B, K, 84, 84] -> [B, D]"""
        if obs.dtype == torch.uint8:
            obs = obs.float() / 255
        return self.torso(obs)

    def forward(
        self, features: torch.Tensor, tau: torch.Tensor, action: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[B, D], [B, N] -> of all actions [B, N, A]; with [B], of those alone [B, N]"""
        # rows [B N] for the layers, since a ReLU in place is cheap there, and not in [B, N]
        cosines = torch.cos(tau[:, :, None] * self.frequencies).flatten(0, 1)  # [B N, cosines]
        phi = self.embedding(cosines).relu_().unflatten(0, tau.shape)  # [B, N, D]
        product = (features[:, None] * phi).flatten(0, 1)  # [B N, D]
        hidden = self.hidden(product).relu_().unflatten(0, tau.shape)  # [B, N, H]
        if action is None:
            return self.output(hidden)  # [B, N, A]
        weight, bias = self.output.weight[action], self.output.bias[action]  # [B, H], [B]
        return (hidden * weight[:, None]).sum(dim=2) + bias[:, None]  # [B, N]


class FractionProposal(nn.Module):
    """tau_0..tau_N of a state, and the entropy of the widths between. [B, D] -> [B, N + 1], [B]

    It learns from the fraction loss alone, and that loss trains nothing else: no gradient leaves
    through the features, and none comes in through midpoints().
    """

    def __init__(self, feature_dim: int, num_fractions: int, learned: bool):
        super().__init__()
        self.linear = nn.Linear(feature_dim, num_fractions)
        nn.init.xavier_uniform_(self.linear.weight, gain=0.01)  # start close to 1/N apart
        nn.init.zeros_(self.linear.bias)
        if not learned:
            nn.init.zeros_(self.linear.weight)  # exactly 1/N apart, and nothing ever moves it

    def forward(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        log_width = torch.log_softmax(self.linear(features.detach()), dim=1)  # [B, N]
        width = log_width.exp()
        inner = width.cumsum(dim=1)[:, :-1]  # [B, N - 1]; the whole sum would be 1 but for rounding
        zero, one = torch.zeros_like(width[:, :1]), torch.ones_like(width[:, :1])
        tau = torch.cat([zero, inner, one], dim=1)  # [B, N + 1]
        return tau, -(width * log_width).sum(dim=1)


def midpoints(tau: torch.Tensor) -> torch.Tensor:
    """tau_hat_i = (tau_i + tau_{i+1}) / 2, without a gradient: the quantile loss must not move the
    fractions, for it would shift them to where errors are small. [B, N + 1] -> [B, N]"""
    return (tau[:, :-1] + tau[:, 1:]).detach() / 2


def action_values(tau: torch.Tensor, quantiles: torch.Tensor) -> torch.Tensor:
    """Q(s, a) = sum_i (tau_{i+1} - tau_i) F_a(tau_hat_i). [B, N + 1], [B, N, A] -> [B, A]"""
    return (tau.diff(dim=1)[:, :, None] * quantiles).sum(dim=1)


def staircase(
    network: QuantileNetwork, proposal: FractionProposal, obs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The return distribution of every action: where its stairs lie, and how high they are.
    [B, O] -> tau [B, N + 1], F_a(tau_hat_i) [B, N, A]"""
    features = network.features(obs)
    tau, _ = proposal(features)
    return tau, network(features, midpoints(tau))


# ---- buffer


class SumTree:
    """Draws i with probability p_i / sum p, a whole batch in log2(capacity) steps: the p_i are the
    leaves of a binary tree, and every node holds the sum of its two children."""

    def __init__(self, capacity: int):
        self.depth = max(1, (capacity - 1).bit_length())
        self.first_leaf = 2**self.depth
        self.nodes = np.zeros(2 * self.first_leaf)  # the root is 1, node i has 2i and 2i + 1

    def __getitem__(self, index: np.ndarray) -> np.ndarray:
        return self.nodes[self.first_leaf + index]

    def __setitem__(self, index: np.ndarray, priority: np.ndarray | float) -> None:
        """Sums are made anew from the children, so that no rounding error piles up."""
        node = self.first_leaf + index
        self.nodes[node] = priority
        for _ in range(self.depth):
            node = node // 2
            self.nodes[node] = self.nodes[2 * node] + self.nodes[2 * node + 1]

    def sample(self, uniform: np.ndarray) -> np.ndarray:
        """Numbers in [0, 1) -> leaves. [B] -> [B]"""
        value = uniform * self.nodes[1]
        node = np.ones(len(value), dtype=np.int64)
        for _ in range(self.depth):
            node = 2 * node  # the left child
            left, right = self.nodes[node], self.nodes[node + 1]
            goes_right = (value >= left) & (right > 0)  # rounding must not lead to a leaf of 0
            value = value - goes_right * left
            node = node + goes_right
        return node - self.first_leaf


class Buffer:
    """A ring of steps. A slot holds the last frame of an observation and what was done about it;
    the slot after it, the frame that followed. So each frame is kept once, not in four stacks, and
    not twice as obs and next_obs. The newest slot, and the last of an episode, have no action.

    The tree knows which slots can be drawn, and how often: 0 for one that has no action, or whose
    older frames are gone; else the priority, which without --prioritized is 1 for all.

    It lies in the memory of the CPU, as arrays: a million frames would not fit into most GPUs.
    """

    def __init__(self, capacity: int, obs_shape: tuple[int, ...]):
        is_image = len(obs_shape) > 1
        frame_shape, dtype = (obs_shape[1:], np.uint8) if is_image else (obs_shape, np.float32)
        self.obs_shape, self.stack_size = obs_shape, obs_shape[0] if is_image else 1
        self.columns = {
            "frame": np.empty((capacity, *frame_shape), dtype),
            "age": np.zeros(capacity, np.int64),  # steps since the episode began
            "action": np.zeros(capacity, np.int64),
            "reward": np.zeros(capacity, np.float32),
            "terminated": np.zeros(capacity, bool),
            "done": np.zeros(capacity, bool),  # terminated, or truncated
        }
        self.tree, self.max_priority = SumTree(capacity), 1.0
        self.capacity, self.size, self.position = capacity, 0, 0  # position: of the next frame

    def num_bytes(self) -> int:
        columns = sum(column.nbytes for column in self.columns.values())
        return columns + self.tree.nodes.nbytes

    def add_frame(self, obs: np.ndarray, age: int) -> None:
        slot = self.position
        self.columns["frame"][slot] = obs[-1] if self.stack_size > 1 else obs
        self.columns["age"][slot] = age
        self.position, self.size = (slot + 1) % self.capacity, min(self.size + 1, self.capacity)
        # it has no action yet, and the frame that it replaces is missing in the stacks after it
        self.tree[(slot + np.arange(self.stack_size)) % self.capacity] = 0.0

    def add_step(
        self, action: int, reward: float, terminated: bool, truncated: bool, next_obs: np.ndarray
    ) -> None:
        """What was done at the newest frame, and the frame that followed."""
        slot, columns = (self.position - 1) % self.capacity, self.columns
        columns["action"][slot], columns["reward"][slot] = action, reward
        columns["terminated"][slot], columns["done"][slot] = terminated, terminated or truncated
        self.tree[np.array([slot])] = self.max_priority  # nobody knows its error yet
        self.add_frame(next_obs, columns["age"][slot] + 1)

    def stack(self, index: np.ndarray) -> torch.Tensor:
        """Observations as the environment gave them: before the first frame of an episode, that
        frame again. [B] -> [B, O] or [B, K, 84, 84]"""
        back = np.arange(self.stack_size)[::-1]  # K - 1, .., 1, 0 frames
        back = np.minimum(back, self.columns["age"][index][:, None])  # [B, K]
        frames = self.columns["frame"][(index[:, None] - back) % self.capacity]
        return torch.from_numpy(frames.reshape(len(index), *self.obs_shape))

    def sample(
        self, batch_size: int, n_steps: int, gamma: float, beta: float, generator: torch.Generator
    ) -> tuple:
        """-> slots, weights, and transitions of m steps, which is n_steps, or fewer if the episode,
        or what has happened so far, ends before that:
        obs [B, O], action [B], sum_k gamma^k r_k [B], gamma^m [B], next_obs [B, O], terminated [B]
        """
        uniform = torch.rand(batch_size, dtype=torch.float64, generator=generator).numpy()
        index = self.tree.sample((np.arange(batch_size) + uniform) / batch_size)  # one per stratum
        priority = self.tree[index]
        # P_i^-beta makes up for being drawn more often; over the largest, so that none is above 1
        weight = (priority / priority.min()) ** -beta  # [B]

        steps = (index[:, None] + np.arange(n_steps)) % self.capacity  # [B, n_steps]
        newest = (self.position - 1) % self.capacity
        # the last step is one that ends the episode, or whose next frame is the newest
        is_last = self.columns["done"][steps] | ((steps + 1) % self.capacity == newest)
        is_after_last = np.cumsum(is_last, axis=1) - is_last > 0  # [B, n_steps]
        discounts = gamma ** np.arange(n_steps) * ~is_after_last  # [B, n_steps]
        reward = (discounts * self.columns["reward"][steps]).sum(axis=1)
        num_steps = n_steps - is_after_last.sum(axis=1)  # m
        terminated = self.columns["terminated"][(index + num_steps - 1) % self.capacity]
        next_obs = self.stack((index + num_steps) % self.capacity)
        scalars = (weight, reward, gamma**num_steps, terminated)
        weight, reward, discount, terminated = (
            torch.from_numpy(np.asarray(x, np.float32)) for x in scalars
        )
        action = torch.from_numpy(self.columns["action"][index])
        return index, weight, self.stack(index), action, reward, discount, next_obs, terminated

    def set_priority(self, index: np.ndarray, priority: np.ndarray) -> None:
        self.tree[index] = priority
        self.max_priority = max(self.max_priority, priority.max().item())

    def state(self) -> dict:
        """What a checkpoint needs: the filled part, as it lies in memory."""
        columns = self.columns | {"priority": self.tree.nodes[self.tree.first_leaf :]}
        state = {name: torch.from_numpy(column[: self.size]) for name, column in columns.items()}
        return state | {"max_priority": self.max_priority, "position": self.position}

    def load_state(self, state: dict) -> None:
        self.size, self.position = len(state["age"]), state["position"]
        self.max_priority = state["max_priority"]
        for name, column in self.columns.items():
            column[: self.size] = state[name].numpy()
        self.tree[np.arange(self.size)] = state["priority"].numpy()


# ---- losses


def quantile_target(
    reward: torch.Tensor,
    discount: torch.Tensor,
    terminated: torch.Tensor,
    next_quantiles: torch.Tensor,
) -> torch.Tensor:
    """y_j = r + gamma^m (1 - terminated) F'(tau_hat'_j), r being the sum of m discounted rewards.
    [B], [B], [B], [B, N] -> [B, N]

    Truncation does not appear here: a truncated episode would have gone on, so it bootstraps.
    """
    assert reward.shape == discount.shape == terminated.shape == next_quantiles.shape[:1]
    return reward[:, None] + (discount * (1 - terminated))[:, None] * next_quantiles


def quantile_huber_loss(
    quantiles: torch.Tensor,
    tau_hat: torch.Tensor,
    target: torch.Tensor,
    target_weight: torch.Tensor,
    kappa: float,
) -> torch.Tensor:
    """sum_i sum_j w_j |tau_hat_i - 1[delta_ij < 0]| Huber(delta_ij) / kappa, sum_j w_j = 1.
    Predictions i: [B, N], [B, N]; targets j: [B, N'], [B, N'] -> [B]"""
    assert quantiles.shape == tau_hat.shape and target.shape == target_weight.shape
    assert quantiles.dim() == target.dim() == 2 and len(quantiles) == len(target)
    prediction, goal = torch.broadcast_tensors(quantiles[:, :, None], target[:, None, :])
    huber = nn.functional.huber_loss(prediction, goal, reduction="none", delta=kappa)  # [B, N, N']
    # too high a prediction (delta < 0) costs 1 - tau_hat, too low a one tau_hat: it settles where
    # a share tau_hat of the targets lies below it
    tilt = (tau_hat[:, :, None] - (goal < prediction).float()).abs()  # [B, N, N']
    return (tilt * huber * target_weight[:, None, :]).sum(dim=(1, 2)) / kappa


def fraction_loss(
    tau: torch.Tensor, quantiles: torch.Tensor, edge_quantiles: torch.Tensor
) -> torch.Tensor:
    """sum_i g_i tau_i, i = 1..N-1, whose gradient in tau_i is g_i = dW1/dtau_i. Its own value means
    nothing. tau_i [B, N + 1], F(tau_hat_i) [B, N], F(tau_i) of the inner tau_i [B, N - 1] -> [B]

    To raise tau_i is to hand over what lies there from the stair above to the stair below: the area
    grows by how far the lower one is from F(tau_i), and shrinks by how far the upper one was.
    """
    assert tau.shape[1] == quantiles.shape[1] + 1 == edge_quantiles.shape[1] + 2
    assert len(tau) == len(quantiles) == len(edge_quantiles) and edge_quantiles.dim() == 2
    below, above = quantiles[:, :-1], quantiles[:, 1:]  # F(tau_hat_{i-1}), F(tau_hat_i)
    gradient = (edge_quantiles - below).abs() - (edge_quantiles - above).abs()  # [B, N - 1]
    return (gradient.detach() * tau[:, 1:-1]).sum(dim=1)


def fqf_loss(
    tau: torch.Tensor,
    entropy: torch.Tensor,
    quantiles: torch.Tensor,
    edge_quantiles: torch.Tensor,
    target: torch.Tensor,
    target_weight: torch.Tensor,
    weight: torch.Tensor,
    kappa: float,
    entropy_coef: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Means over the batch, with importance weights: L_quantile, which trains the quantile network,
    and L_fraction, which trains the proposal. No parameter has a gradient of both.
    [B, N + 1], [B], [B, N], [B, N - 1], [B, N'], [B, N'], [B] -> scalar, scalar"""
    assert tau.shape[:1] == entropy.shape == weight.shape == target.shape[:1]
    huber = quantile_huber_loss(quantiles, midpoints(tau), target, target_weight, kappa)  # [B]
    fraction = fraction_loss(tau, quantiles, edge_quantiles)  # [B]
    return (weight * huber).mean(), (weight * fraction).mean() - entropy_coef * entropy.mean()


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
    network, proposal, env, device = load_networks(path, **overrides)
    return make_policy(network, proposal, env.action_space, device)


def load_networks(path: str, **overrides) -> tuple:
    checkpoint = load_checkpoint(path)
    args = replace(Args(**checkpoint["args"]), **overrides)
    env, device = make_env(args.env_id), pick_device(args.device)
    network = QuantileNetwork(*check_spaces(env), args.hidden_dim, args.num_cosines).to(device)
    proposal = FractionProposal(network.feature_dim, args.num_fractions, args.learn_fractions)
    network.load_state_dict(checkpoint["network"])
    proposal.load_state_dict(checkpoint["proposal"])
    return network, proposal.to(device), env, device


def as_tensor(obs: np.ndarray, device: torch.device) -> torch.Tensor:
    """Vectors of any type as float32; images stay uint8, the network scales them."""
    dtype = torch.uint8 if obs.ndim == 4 else torch.float32
    return torch.as_tensor(obs, dtype=dtype, device=device)


def make_policy(
    network: QuantileNetwork,
    proposal: FractionProposal,
    action_space: gym.spaces.Discrete,
    device: torch.device,
) -> common.Policy:
    """What is evaluated: argmax Q."""

    @torch.no_grad()
    def policy(obs: np.ndarray) -> np.ndarray:
        q = action_values(*staircase(network, proposal, as_tensor(obs, device)))  # [E, A]
        return q.argmax(dim=1).cpu().numpy() + action_space.start

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


RESUME_MAY_CHANGE = (
    "total_timesteps eval_interval checkpoint_interval log_interval target_return "
    "patience quiet resume"
)
EVALUATE_MAY_CHANGE = (
    "eval_episodes eval_seed record capture_video plot quiet device torch_threads evaluate"
)
ADAM_EPS = 0.01  # over the batch size; this and the next line as by the authors
RMSPROP = {"alpha": 0.95, "eps": 1e-5}
PRIORITY_EPS = 1e-6  # so that every transition can be drawn again


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
    env = make_env(args.env_id)
    obs_shape, num_actions = check_spaces(env)
    is_image, first_action = len(obs_shape) > 1, int(env.action_space.start)
    total, total_updates = args.total_timesteps, num_blocks(args.total_timesteps, args)
    if total_updates == 0:
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
    generator = torch.Generator().manual_seed(args.seed)  # for all else that training draws

    # data
    try:
        buffer = Buffer(args.buffer_capacity, obs_shape)
    except (MemoryError, ValueError, OverflowError):
        raise InputError(f"buffer_capacity {args.buffer_capacity} is too much memory") from None

    # networks
    sizes = (obs_shape, num_actions, args.hidden_dim, args.num_cosines)
    network = QuantileNetwork(*sizes).to(device)
    target_network = deepcopy(network)
    proposal = FractionProposal(network.feature_dim, args.num_fractions, args.learn_fractions)
    proposal = proposal.to(device)
    quantile_opt = torch.optim.Adam(
        network.parameters(), args.learning_rate, eps=ADAM_EPS / args.batch_size, fused=True
    )
    fraction_opt = torch.optim.RMSprop(
        proposal.parameters(), args.fraction_learning_rate, **RMSPROP
    )
    parts = {
        "network": network,
        "target_network": target_network,
        "proposal": proposal,
        "quantile_opt": quantile_opt,
        "fraction_opt": fraction_opt,
    }

    # resume
    step, num_updates, best_return, evals_since_best = 0, 0, -math.inf, 0
    episode, episode_actions = 0, []
    log_position = {}
    if args.resume:
        if checkpoint["step"] >= total:
            done = f"{run_dir} is at step {checkpoint['step']} already"
            raise InputError(f"{done}: give it a larger budget")
        for name, part in parts.items():
            part.load_state_dict(checkpoint[name])
        generator.set_state(checkpoint["generator"])
        buffer.load_state(checkpoint["buffer"])
        step, log_position = checkpoint["step"], checkpoint["log_position"]
        num_updates, episode = checkpoint["num_updates"], checkpoint["episode"]
        episode_actions = checkpoint["episode_actions"].tolist()
        best_return, evals_since_best = checkpoint["best_return"], checkpoint["evals_since_best"]
    current_obs, episode_return = start_episode(env, args.seed, episode, episode_actions)
    is_fresh, first_update = not args.resume, num_updates
    if args.resume:
        if not np.array_equal(current_obs, checkpoint["current_obs"].numpy()):
            raise InputError(f"{args.env_id} plays another episode from the same seed: no resume")
        del checkpoint  # with a copy of the buffer
    else:
        buffer.add_frame(current_obs, age=0)
    args = replace(args, resume=None)
    if args.compile:
        for each in (network, target_network):
            each.compile()

    try:
        os.makedirs(run_dir, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot use {run_dir} as run_dir: {error.strerror}") from None
    args_json = json.dumps(asdict(args), indent=2).encode()
    save_atomically(f"{run_dir}/args.json", lambda file: file.write(args_json))
    logger = Logger(run_dir, total, args.quiet, **log_position)
    memory = f"a full replay buffer takes {buffer.num_bytes() / 1e6:,.0f} MB"
    logger.line(f"{ALGO} on {args.env_id}: {memory}\nrun: {run_dir} on {device}")
    policy = make_policy(network, proposal, env.action_space, device)
    evaluation = (policy, args.env_id, args.eval_episodes, args.eval_seed)
    if is_fresh:
        logger.evaluation(step, common.evaluate(*evaluation, make_env=make_env))

    # loop
    stop_reason, exit_signal = "", 0
    with StopSignal() as stop_signal:
        while not stop_reason:
            step += 1

            # 1. act: at random with probability epsilon, else what is best on average
            epsilon = 1 - (1 - args.epsilon_final) * min(1, step / args.epsilon_steps)
            if step <= args.learning_starts or torch.rand((), generator=generator) < epsilon:
                taken = torch.randint(num_actions, (), generator=generator).item() + first_action
            else:
                taken = policy(current_obs[None]).item()
            episode_actions.append(taken)
            new_obs, new_reward, terminated, truncated, _ = env.step(taken)
            # of an Atari reward only the sign is learned from: one kappa fits all games then
            learned_reward = float(np.sign(new_reward) if is_image else new_reward)
            taken -= first_action  # networks count from 0
            buffer.add_step(taken, learned_reward, terminated, truncated, new_obs)
            current_obs, episode_return = np.array(new_obs), episode_return + float(new_reward)
            if terminated or truncated:
                logger.scalars(step, {"charts/episodic_return": episode_return})
                episode, episode_actions = episode + 1, []
                current_obs, episode_return = start_episode(env, args.seed, episode, [])
                buffer.add_frame(current_obs, age=0)

            has_update = step > args.learning_starts and step % args.train_frequency == 0
            if has_update:
                if num_updates == first_update:  # random steps are no measure
                    logger.first_step, logger.first_second = step - 1, logger.seconds()
                num_updates += 1
                factor = lr_factor(
                    num_updates, total_updates, args.lr_schedule, args.warmup_updates
                )
                quantile_opt.param_groups[0]["lr"] = args.learning_rate * factor
                fraction_opt.param_groups[0]["lr"] = args.fraction_learning_rate * factor

                # 2. draw a batch; beta comes to 1, since a bias matters most in the end
                progress = min(1, step / args.priority_beta_steps)
                beta = args.priority_beta + (1 - args.priority_beta) * progress
                slots, *batch = buffer.sample(
                    args.batch_size, args.n_steps, args.gamma, beta, generator
                )
                batch = (tensor.to(device) for tensor in batch)
                weight, obs, action, reward, discount, next_obs, terminated = batch

                # 3. targets: the staircase of the best action in the next state
                with torch.no_grad():
                    # [B, N + 1], [B, N, A]
                    next_tau, next_quantiles = staircase(target_network, proposal, next_obs)
                    if args.double_q:
                        next_q = action_values(*staircase(network, proposal, next_obs))  # [B, A]
                    else:
                        next_q = action_values(next_tau, next_quantiles)
                    next_action = next_q.argmax(dim=1)  # [B]
                    rows = torch.arange(args.batch_size, device=device)
                    next_quantiles = next_quantiles[rows, :, next_action]  # [B, N]
                    target = quantile_target(reward, discount, terminated, next_quantiles)  # [B, N]
                    if args.weight_targets_by_fraction:
                        target_weight = next_tau.diff(dim=1)  # [B, N]
                    else:
                        target_weight = torch.full_like(target, 1 / args.num_fractions)

                # 4. quantiles at the mid-points, which learn, and at the edges between the stairs,
                # from which the fractions learn
                features = network.features(obs)  # [B, D]
                tau, entropy = proposal(features)  # [B, N + 1], [B]
                quantiles = network(features, midpoints(tau), action)  # [B, N]
                with torch.no_grad():
                    edge_quantiles = network(features, tau[:, 1:-1], action)  # [B, N - 1]
                quantile_loss, proposal_loss = fqf_loss(
                    tau,
                    entropy,
                    quantiles,
                    edge_quantiles,
                    target,
                    target_weight,
                    weight,
                    args.kappa,
                    args.entropy_coef,
                )
                if args.learn_fractions:
                    fraction_opt.zero_grad()
                    proposal_loss.backward()
                    fraction_opt.step()
                quantile_opt.zero_grad()
                quantile_loss.backward()
                quantile_opt.step()

                # 5. priorities, and now and then the target network
                if args.prioritized:
                    td_error = (target[:, None, :] - quantiles.detach()[:, :, None]).abs()
                    priority = td_error.mean(dim=(1, 2)).cpu().numpy().astype(np.float64)  # [B]
                    buffer.set_priority(slots, (priority + PRIORITY_EPS) ** args.priority_alpha)
                if num_updates % args.target_interval == 0:
                    target_network.load_state_dict(network.state_dict())

            # 6. log, evaluate, stop, save
            # updates need not fall on multiples of log_interval: log if one went by since the last
            last_block = step - args.train_frequency
            if has_update and step // args.log_interval > last_block // args.log_interval:
                seconds = logger.seconds() - logger.first_second
                quantiles, width = quantiles.detach(), tau.detach().diff(dim=1)  # [B, N], [B, N]
                q = (width * quantiles).sum(dim=1)  # [B]
                statistics = {
                    "charts/env_steps_per_second": (step - logger.first_step) / seconds,
                    "charts/updates_per_second": (num_updates - first_update) / seconds,
                    "charts/learning_rate": quantile_opt.param_groups[0]["lr"],
                    "losses/quantile": quantile_loss.item(),
                    "losses/fraction": proposal_loss.item(),
                    "stats/fraction_entropy": entropy.mean().item(),
                    "stats/fraction_min_width": width.min().item(),
                    "stats/fraction_max_width": width.max().item(),
                    "stats/q_mean": q.mean().item(),
                    "stats/q_max": q.max().item(),
                    "stats/target_mean": (target_weight * target).sum(dim=1).mean().item(),
                    "stats/quantile_spread": (quantiles[:, -1] - quantiles[:, 0]).mean().item(),
                    "stats/epsilon": epsilon,
                }
                if args.num_fractions > 1:
                    falls = quantiles.diff(dim=1) < 0  # [B, N - 1]
                    statistics["stats/quantile_crossing"] = falls.float().mean().item()
                if args.prioritized:
                    statistics["stats/priority_max"] = buffer.max_priority
                    statistics["stats/priority_beta"] = beta
                    statistics["stats/importance_mean"] = weight.mean().item()
                logger.scalars(step, statistics)
                logger.progress(step)
                for name in ("losses/quantile", "losses/fraction"):
                    if not math.isfinite(statistics[name]):
                        message = f"{name} is {statistics[name]} at step {step}: it diverged"
                        rates = "--learning-rate or --fraction-learning-rate"
                        raise InputError(f"{message}; lower {rates}")
            is_best = False
            if step == total:
                stop_reason = "the budget is spent"
            # evaluate if there was an update since: else patience would run out in random steps
            is_new = num_blocks(step, args) > num_blocks(max(step - args.eval_interval, 0), args)
            if step == total or (is_new and step % args.eval_interval == 0):
                eval_returns = common.evaluate(*evaluation, make_env=make_env)
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
                policy_state |= {"network": network.state_dict()}
                policy_state |= {"proposal": proposal.state_dict()}
            if is_best:
                save_atomically(best_path, partial(torch.save, policy_state))
            if stop_reason or step % args.checkpoint_interval == 0:
                checkpoint = policy_state | {
                    "num_updates": num_updates,
                    "buffer": buffer.state(),
                    "episode": episode,
                    "episode_actions": torch.tensor(episode_actions, dtype=torch.int64),
                    "current_obs": torch.from_numpy(current_obs),
                    "best_return": best_return,
                    "evals_since_best": evals_since_best,
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


def plot_episode(checkpoint: str, path: str, eval_seed: int, **overrides) -> None:
    """One greedy episode: how the fractions move with the state, how Q and the spread of returns go
    along, and, at four of its moments, the staircase of every action."""
    try:
        from matplotlib.figure import Figure  # slow to import; without pyplot it needs no screen
    except ImportError:
        raise InputError("--plot needs a package: pip install matplotlib") from None
    network, proposal, env, device = load_networks(checkpoint, **overrides)
    obs, _ = env.reset(seed=eval_seed)
    distributions, done = [], False
    while not done:
        with torch.no_grad():
            tau, quantiles = staircase(network, proposal, as_tensor(obs[None], device))
        distributions.append((tau[0].cpu().numpy(), quantiles[0].cpu().numpy()))
        action = action_values(tau, quantiles).argmax().item() + env.action_space.start
        obs, _, terminated, truncated, _ = env.step(action)
        done = terminated or truncated
    tau, quantiles = (np.stack(column) for column in zip(*distributions))  # [T, N + 1], [T, N, A]
    width = np.diff(tau, axis=1)  # [T, N]
    entropy = -(width * np.log(width.clip(1e-12))).sum(axis=1).mean()
    value = (width[:, :, None] * quantiles).sum(axis=1)  # [T, A]
    num_steps, num_fractions, num_actions = quantiles.shape

    figure = Figure(figsize=(12, 9), dpi=100, layout="constrained")
    panels = figure.subplot_mosaic([["fractions"] * 4, ["values"] * 4, [0, 1, 2, 3]])
    panels["fractions"].plot(tau[:, 1:-1], color="0.3", linewidth=0.7)
    panels["fractions"].set_title(
        f"the {num_fractions - 1} fractions of each state: entropy {entropy:.3f},"
        f" at most log {num_fractions} = {math.log(num_fractions):.3f}",
        loc="left",
    )
    panels["fractions"].set_ylabel("tau")
    panels["fractions"].set_ylim(0, 1)
    colors = [f"C{action}" for action in range(num_actions)]
    for action, color in enumerate(colors):
        low, high = (quantile_at(tau, quantiles[:, :, action], share) for share in (0.1, 0.9))
        panels["values"].fill_between(range(num_steps), low, high, color=color, alpha=0.15, lw=0)
        panels["values"].plot(value[:, action], color=color, label=f"action {action}")
    panels["values"].set_title(
        "Q, and the middle 80 % of the discounted returns, of each action", loc="left"
    )
    panels["values"].set_xlabel("step of the episode")
    panels["values"].set_ylabel("discounted return")
    panels["values"].legend(frameon=False)
    moments = np.linspace(0, num_steps - 1, 4).round().astype(int)
    for panel, moment in enumerate(moments):
        for action, color in enumerate(colors):
            panels[panel].stairs(
                quantiles[moment, :, action], tau[moment], baseline=None, color=color
            )
        panels[panel].plot(
            tau[moment],
            np.zeros(num_fractions + 1),
            "|",
            color="0.3",
            transform=panels[panel].get_xaxis_transform(),
            clip_on=False,
        )
        panels[panel].set_title(f"step {moment}", loc="left")
        panels[panel].set_xlabel("tau")
        for name in ("fractions", "values"):
            panels[name].axvline(moment, color="0.8", zorder=0)
    panels[0].set_ylabel("F(tau), the discounted return")
    for panel in panels.values():
        panel.spines[["top", "right"]].set_visible(False)
        panel.margins(x=0.01)
    save_atomically(path, partial(figure.savefig, format="png", metadata={"Software": None}))


def quantile_at(tau: np.ndarray, quantiles: np.ndarray, share: float) -> np.ndarray:
    """How high each staircase is at a fraction, its stairs sorted. [T, N + 1], [T, N] -> [T]"""
    order = np.argsort(quantiles, axis=1)  # a network's stairs may fall here and there
    ends = np.take_along_axis(np.diff(tau, axis=1), order, axis=1).cumsum(axis=1)  # [T, N]
    stair = np.minimum((ends < share).sum(axis=1), quantiles.shape[1] - 1)  # [T]
    return np.take_along_axis(quantiles, order, axis=1)[np.arange(len(stair)), stair]


def evaluate_checkpoint(args: Args) -> dict[str, float]:
    """--evaluate: the checkpoint's policy on fresh episodes, to be recorded, filmed and drawn."""
    check_args(args)
    saved = load_checkpoint(args.evaluate)["args"]
    check_unchanged(args, saved, EVALUATE_MAY_CHANGE, "--evaluate")
    if args.torch_threads is not None:
        torch.set_num_threads(args.torch_threads)
    overrides = {name: getattr(args, name) for name in EVALUATE_MAY_CHANGE.split()}
    folder = os.path.dirname(args.evaluate)
    figure_path = os.path.join(folder, "distributions.png")
    if args.plot:
        plot_episode(args.evaluate, figure_path, **overrides)
    policy = load_policy(args.evaluate, **overrides)
    episodes = (policy, args.env_id, args.eval_episodes, args.eval_seed)
    if args.record:
        returns = common.record(*episodes, args.record, make_env=make_env)
    else:
        returns = common.evaluate(*episodes, make_env=make_env)
    report = (
        f"{args.evaluate}: return mean {returns.mean():.1f} std {returns.std():.1f}"
        f" min {returns.min():.1f} max {returns.max():.1f} over {len(returns)} episodes"
    )
    if args.record:
        report += f"\nrecorded in {args.record}"
    if args.capture_video:
        videos = os.path.join(folder, "videos")
        film = common.capture_video(*episodes[:2], args.eval_seed, videos, make_env=make_env)
        report += f"\nfilmed in {film}"
    if args.plot:
        report += f"\ndrawn in {figure_path}"
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
