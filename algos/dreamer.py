"""Dreamer: a latent world model, and a policy that learns in it. Images, vectors; discrete actions.

Paper: "Mastering Diverse Domains through World Models" (DreamerV3), D. Hafner, J. Pasukonis, J. Ba,
T. Lillicrap, 2023, arXiv:2301.04104; its revision of 2024, which most public ports do not follow.

Idea: a world model compresses what is seen into a state, and learns how states follow from actions
and what they pay; actor and critic learn from trajectories imagined in it. A state is h, the
memory, which a GRU carries on, and z, the news, a few one-hot vectors: while the agent sees, from
the posterior q, which knows x; with eyes closed, from the prior p, which learns to foresee q.

Equations (sg: no gradient; p, q, pi: 1 % uniform; two-hot(y): cross-entropy to y, shared between
the two nearest of J bins, which grow exponentially, so that rewards of any size fit):
    model       h_t = GRU(h_{t-1}, z_{t-1}, a_{t-1}), posterior q(z|h, x), prior p(z|h), and heads
                of (h, z) for x, for the reward r and for c, the probability to go on
    its loss    |x - x_hat|^2 + two-hot(r) + BCE(c)
                + max(1, KL(sg(q) || p)) + 0.1 max(1, KL(q || sg(p)))       (1: the free nats)
    returns     R_t = r_{t+1} + gamma c_{t+1} ((1 - lambda) v_{t+1} + lambda R_{t+1}), R_H = v_H
    critic      minimise w_t (two-hot(R_t) + two-hot(slow critic)), w_t = gamma^t c_0 .. c_t,
                and 0.3 of the same on replayed rewards, with imagined returns R in place of v
    actor       maximise w_t (log pi(a_t|s_t) sg(R_t - v_t) / max(1, scale) + eta entropy of pi),
                scale: running distance from the 5th to the 95th percentile of R

Differences from the paper:
    - The convolutions of 2023, 4 x 4 with stride 2; those of 2024, 5 x 5 and pooled, cost far more.
    - Adam, a clip of the gradient's norm, and another learning rate for actor and critic, as in
      2023, in place of LaProp and a clip per matrix: less to read.
    - Sequences start from a state of zeros, not from one that was stored in the replay; so only
      their last steps, which have seen something, are where imagination starts. No online queue.
    - The critic's loss on replayed rewards does not reach the model.
    - The actor's last layer starts at 0: the first steps are random. Atari: FIRE serves the ball.
    - Discrete actions only; for others, pi would need a density, and REINFORCE would stay.

Shapes: B sequences of T steps, L last ones of each, N = B L (or any number), H horizon, A actions,
K environments; h is [D], z [S, C], F = D + S C; J bins, G blocks; x is [W, W, P] or [O]; embed [E].

Run it:
    python algos/dreamer.py
    python algos/dreamer.py --evaluate runs/<run>/best.pt --capture-video    (dream.png, dream.gif)

The paper's set, for a GPU and days; its replay takes 62 GB:
    python algos/dreamer.py --env-id ALE/Breakout-v5 --size paper --total-timesteps 50000000 \\
        --batch-size 1024 --sequence-length 64 --imagine-last 64 --horizon 15 --replay-ratio 32 \\
        --learning-rate 4e-5 --actor-critic-learning-rate 4e-5 --warmup-updates 1000 \\
        --policy-entropy-coef 3e-4 --num-envs 16 --buffer-capacity 5000000

Resume it:
    python algos/dreamer.py --resume runs/<run>
The episodes that were cut are started from their seeds, and their actions played again: exact in
any environment that is a function of both. A checkpoint takes 7 MB, and 3.1 KB per step in the
replay (12.3 KB with images of 64 x 64).
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
from itertools import pairwise
from typing import BinaryIO, Literal, NamedTuple, get_args, get_origin

import tyro

# ---- arguments


@dataclass
class Args:
    env_id: str = "PixelCatch-v0"  # Gymnasium environment
    seed: int = 1  # same seed, same machine: same numbers to the last bit
    total_timesteps: int = 16_000  # budget in environment steps
    batch_size: int = 256  # transitions per update
    gamma: float = 0.997  # discount
    learning_rate: float = 1e-3  # of every optimiser (Adam) that has no flag of its own
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"  # the last two fall to 0
    warmup_updates: int = 0  # the learning rate first climbs from 0 over this many updates
    eval_interval: int = 1_000  # updates (online: environment steps) between evaluations
    eval_episodes: int = 20  # episodes per evaluation
    eval_seed: int = 10_000  # evaluation episode i starts from eval_seed + i
    target_return: float | None = None  # stop when an evaluation's mean return gets there
    patience: int | None = None  # stop after this many evaluations without a better one
    checkpoint_interval: int = 4_000  # updates (or steps) between saves; Ctrl-C, SIGTERM save, too
    log_interval: int = 200  # updates (or steps) between entries in the logs
    run_dir: str | None = None  # folder of the run [runs/<algo>__<env>__<seed>__<time>]
    resume: str | None = None  # folder of a run to go on with; its flags hold, budgets may change
    evaluate: str | None = None  # checkpoint to evaluate instead of training
    record: str | None = None  # with --evaluate: save its episodes as a dataset, FILE.npz
    capture_video: bool = False  # with --evaluate: film one episode, next to the checkpoint
    quiet: bool = False  # print nothing but errors
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # auto takes a GPU if there is one
    torch_threads: int | None = None  # CPU threads [all cores]
    compile: bool = False  # torch.compile the networks: slow to start; for large ensembles, FQF
    # DREAMER only
    size: Literal["tiny", "mini", "small", "12m", "50m", "paper"] = "tiny"  # of networks, images
    from_pixels: bool = False  # see what the environment renders, not what it observes
    num_envs: int = 8  # K, environments that are stepped side by side
    learning_starts: int = 1_024  # first steps, with random actions and without updates
    buffer_capacity: int = 100_000  # steps that the replay buffer holds; then the oldest go
    replay_ratio: float = 64.0  # steps that are replayed per environment step, once learning starts
    sequence_length: int = 16  # T, steps of a sequence; a batch has batch_size / T of them
    free_nats: float = 1.0  # a KL below this is good enough
    actor_critic_learning_rate: float = 1e-4  # of actor and critic (Adam)
    imagine_last: int | None = 8  # imagine from so many last steps of each sequence [all]
    horizon: int = 10  # H, steps that are imagined
    td_lambda: float = 0.95  # lambda of the returns; 1: discounted sum of rewards, 0: one-step TD
    policy_entropy_coef: float = 3e-3  # how much the entropy of the policy counts
    replay_critic_coef: float = 0.3  # how much the critic's loss on replayed rewards counts
    tau: float = 0.02  # how far the targets move towards the networks; 1: hard copy


if __name__ == "__main__":  # parsed here for --help and typos, which need not wait for torch
    tyro.cli(Args, description=__doc__)

import gymnasium as gym
import numpy as np
import torch
from torch import nn

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))  # for common.py
import common
from common import InputError

ALGO = "dreamer"


class Size(NamedTuple):
    deter: int  # D, of the deterministic state h
    groups: int  # S, categorical variables of the stochastic state z
    classes: int  # C, of each
    units: int  # width of the hidden layers
    depth: int  # channels of the first convolution; then twice, 4 times, 8 times as many
    blocks: int  # G, of the block-diagonal matrices in the GRU; 1: dense, as small ones can be
    image_size: int  # images are squares of so many pixels


SIZES = {  # D, S, C, units, depth, blocks, pixels
    "tiny": Size(128, 16, 16, 64, 8, 1, 32),
    "mini": Size(256, 16, 16, 128, 16, 1, 32),
    "small": Size(512, 16, 16, 256, 16, 8, 64),
    "12m": Size(2048, 32, 16, 256, 16, 8, 64),
    "50m": Size(4096, 32, 32, 512, 32, 8, 64),
    "paper": Size(8192, 32, 64, 1024, 64, 8, 64),
}


def check_args(args: Args) -> None:
    """Refuse what would waste a run, before it begins."""
    positive = (
        "total_timesteps batch_size learning_rate eval_interval eval_episodes patience "
        "checkpoint_interval log_interval torch_threads num_envs buffer_capacity replay_ratio "
        "sequence_length actor_critic_learning_rate imagine_last horizon"
    )
    values = {name: getattr(args, name) for name in positive.split()}
    rules = [(name, "> 0", value is None or value > 0) for name, value in values.items()]
    for name in ("learning_rate", "actor_critic_learning_rate", "replay_ratio"):
        rules.append((name, "finite", getattr(args, name) < math.inf))
    for name in ("free_nats", "policy_entropy_coef", "replay_critic_coef"):
        rules.append((name, "in [0, inf)", 0 <= getattr(args, name) < math.inf))
    length, last = args.sequence_length, args.imagine_last or args.sequence_length
    room = args.num_envs * length
    a_sequence_each = f">= num_envs x sequence_length = {room}"
    rules += [
        ("seed", "in [0, 2^63)", 0 <= args.seed < 2**63),
        ("eval_seed", "in [0, 2^31)", 0 <= args.eval_seed < 2**31),
        ("gamma", "in [0, 1)", 0 <= args.gamma < 1),
        ("tau", "in (0, 1]", 0 < args.tau <= 1),
        ("td_lambda", "in [0, 1]", 0 <= args.td_lambda <= 1),
        ("warmup_updates", ">= 0", args.warmup_updates >= 0),
        ("sequence_length", ">= 2", length >= 2),  # returns need a next step
        ("imagine_last", f"in [2, sequence_length {length}]", 2 <= last <= length),
        ("learning_starts", a_sequence_each, args.learning_starts >= room),
        ("buffer_capacity", a_sequence_each, args.buffer_capacity >= room),
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
    for name, divisor in (("total_timesteps", "num_envs"), ("batch_size", "sequence_length")):
        if getattr(args, name) % getattr(args, divisor) != 0:
            multiple = f"a multiple of {divisor} {getattr(args, divisor)}"
            raise InputError(f"{name} must be {multiple}, got {getattr(args, name)}")


class PixelCatch(gym.Env):
    """A ball falls through 8 x 8 cells of 4 x 4 pixels, a row per step; a paddle on the lowest row
    steps left, stays, or steps right. Reward 1 for a catch, -1 for a miss, and the episode ends."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 4}  # noqa: RUF012  as Gymnasium has it
    observation_space = gym.spaces.Box(0, 255, (32, 32, 3), np.uint8)
    action_space = gym.spaces.Discrete(3)

    def __init__(self, render_mode: str | None = None):
        self.render_mode = render_mode

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.ball, self.paddle = self.np_random.integers(8, size=2).tolist()  # columns
        self.row = 0  # of the ball
        return self.render(), {}

    def step(self, action):
        self.paddle = min(max(self.paddle + int(action) - 1, 0), 7)
        self.row += 1
        terminated = self.row == 7
        reward = (1.0 if self.ball == self.paddle else -1.0) if terminated else 0.0
        return self.render(), reward, terminated, False, {}

    def render(self):
        cells = np.full((8, 8, 3), (20, 20, 40), np.uint8)
        cells[7, self.paddle] = (80, 160, 255)
        cells[self.row, self.ball] = (255, 160, 40)
        return cells.repeat(4, axis=0).repeat(4, axis=1)


gym.register("PixelCatch-v0", PixelCatch)


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


class FreshMinAtar(gym.Wrapper):
    """MinAtar repeats an action now and then, and its reset keeps the last one of the episode
    before. But a resumed run can play an episode again only if it is a function of its seed and
    actions. It also renders floats, which would make black films."""

    def reset(self, **kwargs):
        self.unwrapped.game.last_action = 0
        return self.env.reset(**kwargs)

    def render(self):
        return (255 * self.env.render()).astype(np.uint8)


class Images(gym.ObservationWrapper):
    """Observations, or what the environment renders, as square uint8 images [W, W, P]."""

    def __init__(self, env: gym.Env, size: int, from_pixels: bool):
        import cv2  # an optional package

        super().__init__(env)
        self.cv2, self.size, self.from_pixels = cv2, size, from_pixels
        if from_pixels:
            env.reset(seed=0)  # before that there is nothing to render
        image = env.render() if from_pixels else np.zeros(env.observation_space.shape)
        if image is None:
            raise ValueError("it renders nothing")
        if from_pixels and image.dtype != np.uint8:
            raise ValueError(f"it renders {image.dtype}, not uint8")
        self.num_channels = image.shape[2] if image.ndim == 3 else 1
        if image.ndim == 3 and image.shape[0] <= 4 < self.num_channels:
            raise ValueError(f"its images {image.shape} must have the channels last")
        self.observation_space = gym.spaces.Box(0, 255, (size, size, self.num_channels), np.uint8)

    def observation(self, obs: np.ndarray) -> np.ndarray:
        image = np.asarray(self.env.render() if self.from_pixels else obs)
        if image.dtype == bool:  # MinAtar's
            image = 255 * image.astype(np.uint8)
        is_large = max(image.shape[:2]) >= self.size
        can_average = is_large and self.num_channels <= 4  # OpenCV averages no more than 4
        method = self.cv2.INTER_AREA if can_average else self.cv2.INTER_NEAREST
        image = self.cv2.resize(image, (self.size, self.size), interpolation=method)
        return image.reshape(self.observation_space.shape)


def make_env(env_id: str, image_size: int, from_pixels: bool, **kwargs) -> gym.Env:
    """Images become squares. An Atari game has up to 30 idle frames at the start, and every action
    lasts 4 frames; colours stay, and nothing is stacked, since the state h remembers."""
    is_atari, is_minatar = env_id.startswith("ALE/"), env_id.startswith("MinAtar/")
    if from_pixels:
        kwargs["render_mode"] = "rgb_array"
    try:
        if is_atari:
            import ale_py  # registers the games
            import cv2  # noqa: F401  the wrapper below resizes images with it

            ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
            kwargs["frameskip"] = 1  # the wrapper below skips, and shows the brighter of two frames
        if is_minatar:
            from minatar.gym import register_envs

            if env_id not in gym.registry:
                register_envs()
            kwargs["disable_env_checker"] = True  # it would complain that they render floats
        env = common.make_env(env_id, **kwargs)
        if is_minatar:
            env = FreshMinAtar(env)
        if is_atari:
            env = gym.wrappers.AtariPreprocessing(env, screen_size=image_size, grayscale_obs=False)
            if "FIRE" in env.unwrapped.get_action_meanings():
                env = FirstFire(env)
        space = env.observation_space
        is_image = space.dtype in (np.uint8, bool) and len(space.shape or ()) in (2, 3)
        is_ready = space.dtype == np.uint8 and space.shape[:-1] == (image_size, image_size)
        if from_pixels or (is_image and not is_ready):
            env = Images(env, image_size, from_pixels)
    except ImportError as error:
        packages = "pip install ale-py minatar opencv-python-headless"
        raise InputError(f"{env_id}: {error.name} is missing: {packages}") from None
    except (ValueError, gym.error.Error) as error:  # a game that cannot wait, or cannot be rendered
        raise InputError(f"cannot play {env_id}: {common.one_line(error)}") from None
    return env


def check_spaces(env: gym.Env) -> tuple[tuple[int, ...], int]:
    """-> the shape of observations, [O] or [W, W, P], and A, if actions are discrete."""
    obs_space, action_space, env_id = env.observation_space, env.action_space, env.spec.id
    is_box = isinstance(obs_space, gym.spaces.Box)
    is_image = is_box and len(obs_space.shape) == 3 and obs_space.dtype == np.uint8
    if not is_image and not (is_box and len(obs_space.shape) == 1):
        raise InputError(
            f"{env_id}: observations must be vectors or uint8 images, not {obs_space};"
            " try --from-pixels"
        )
    if not isinstance(action_space, gym.spaces.Discrete):
        raise InputError(f"{env_id}: actions must be discrete, not {action_space}")
    return obs_space.shape, int(action_space.n)


# ---- networks

UNIMIX = 0.01  # share of the uniform distribution in every categorical one
NUM_BINS = 255  # J, of a return or a reward


def symlog(x: torch.Tensor) -> torch.Tensor:
    """Like x near 0, like a logarithm far away, on both sides."""
    return x.sign() * torch.log1p(x.abs())


def symexp(x: torch.Tensor) -> torch.Tensor:
    """Its inverse."""
    return x.sign() * torch.expm1(x.abs())


def preprocess(obs: torch.Tensor) -> torch.Tensor:
    """What networks see, the same when they act and when they learn."""
    if obs.dtype == torch.uint8:
        return obs.float() / 255 - 0.5
    return symlog(obs)


def fan_in_of(layer: nn.Module) -> int:
    """Inputs that add up to an output."""
    if isinstance(layer, nn.ConvTranspose2d):  # with stride 2, 2 x 2 of the 4 x 4 weights
        return layer.in_channels * 2 * 2
    if isinstance(layer, nn.Conv2d):
        return layer.in_channels * 4 * 4
    return layer.weight.shape[1]  # nn.Linear, BlockLinear


def init_weights(layer: nn.Module, fan_in: int | None = None) -> None:
    """Normal with variance 1 / fan-in, truncated at 2 standard deviations; biases 0."""
    if isinstance(layer, nn.Linear | nn.Conv2d | nn.ConvTranspose2d | BlockLinear):
        std = (fan_in or fan_in_of(layer)) ** -0.5 / 0.8796  # truncation leaves 0.8796 of it
        nn.init.trunc_normal_(layer.weight, std=std, a=-2 * std, b=2 * std)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)


def dense(input_dim: int, output_dim: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(input_dim, output_dim), nn.RMSNorm(output_dim, 1e-4), nn.SiLU())


def head(input_dim: int, units: int, num_layers: int, output_dim: int) -> nn.Sequential:
    widths = [input_dim] + [units] * num_layers
    layers = [dense(*pair) for pair in pairwise(widths)]
    return nn.Sequential(*layers, nn.Linear(units, output_dim))


class ChannelNorm(nn.RMSNorm):
    """Over the channels of every pixel, which lie last in memory. [N, P, W, W]"""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)  # [N, P, W, W]


def channels_of(size: Size) -> list[int]:
    """Of the stages that halve an image until it has 4 x 4 pixels."""
    num_stages = int(math.log2(size.image_size // 4))
    return [size.depth * factor for factor in (1, 2, 4, 8)[:num_stages]]


class Encoder(nn.Module):
    """[N, W, W, P] or [N, O], preprocessed -> [N, E]"""

    def __init__(self, obs_shape: tuple[int, ...], size: Size):
        super().__init__()
        self.is_image = len(obs_shape) == 3
        if not self.is_image:
            self.embed_dim = size.units
            self.net = nn.Sequential(
                dense(obs_shape[0], size.units),
                dense(size.units, size.units),
                dense(size.units, size.units),
            )
        else:
            channels = channels_of(size)
            self.embed_dim = channels[-1] * 4 * 4
            layers = []
            for inner, outer in pairwise([obs_shape[2], *channels]):
                layers += [nn.Conv2d(inner, outer, kernel_size=4, stride=2, padding=1)]
                layers += [ChannelNorm(outer, 1e-4), nn.SiLU()]
            self.net = nn.Sequential(*layers).to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_image:
            return self.net(x)
        return self.net(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1).flatten(1)  # [N, E]


class Decoder(nn.Module):
    """The way back: features [N, F] -> [N, W, W, P] in (0, 1), or symlog of a vector [N, O]"""

    def __init__(self, feature_dim: int, obs_shape: tuple[int, ...], size: Size):
        super().__init__()
        self.is_image = len(obs_shape) == 3
        if not self.is_image:
            self.net = head(feature_dim, size.units, 3, obs_shape[0])
        else:
            channels = channels_of(size)[::-1]
            self.input = nn.Linear(feature_dim, 4 * 4 * channels[0])
            layers = [ChannelNorm(channels[0], 1e-4), nn.SiLU()]
            for inner, outer in pairwise([*channels, obs_shape[2]]):
                layers += [nn.ConvTranspose2d(inner, outer, kernel_size=4, stride=2, padding=1)]
                layers += [ChannelNorm(outer, 1e-4), nn.SiLU()]
            layers = layers[:-2]  # nothing after the last convolution
            self.net = nn.Sequential(*layers).to(memory_format=torch.channels_last)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        if not self.is_image:
            return self.net(features)
        x = self.input(features).unflatten(1, (4, 4, -1)).permute(0, 3, 1, 2)  # [N, P, 4, 4]
        return torch.sigmoid(self.net(x)).permute(0, 2, 3, 1)  # [N, W, W, P]


class BlockLinear(nn.Module):
    """A linear layer whose matrix has G blocks on its diagonal, all else is 0.
    [N, input_dim] -> [N, G, output_dim / G]"""

    def __init__(self, input_dim: int, output_dim: int, blocks: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(blocks, input_dim // blocks, output_dim // blocks))
        self.bias = nn.Parameter(torch.empty(blocks, 1, output_dim // blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unflatten(1, (len(self.weight), -1)).transpose(0, 1)  # [G, N, input_dim / G]
        return torch.baddbmm(self.bias, x, self.weight).transpose(0, 1)  # [N, G, output_dim / G]


def unimix(logits: torch.Tensor) -> torch.Tensor:
    """log(0.99 softmax + 0.01 / C): no class is impossible, so that no KL is infinite.
    [.., C] -> [.., C]"""
    return torch.log((1 - UNIMIX) * torch.softmax(logits, dim=-1) + UNIMIX / logits.shape[-1])


def sample(log_probs: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """One-hot vectors; without a generator, the most likely ones. The gradient goes straight
    through, as if they were the probabilities: so what the heads lose by z reaches the encoder.
    [.., C] -> [.., C]"""
    probs = log_probs.exp()
    if generator is None:
        index = probs.argmax(dim=-1, keepdim=True)  # [.., 1]
    else:  # how many cumulative probabilities a uniform number exceeds
        shape, device = (*probs.shape[:-1], 1), probs.device
        uniform = torch.rand(shape, device=device, generator=generator)
        exceeded = probs.detach().cumsum(dim=-1) < uniform  # [.., C]
        index = exceeded.sum(dim=-1, keepdim=True).clamp(max=probs.shape[-1] - 1)  # [.., 1]
    one_hot = torch.zeros_like(probs).scatter_(-1, index, 1.0)  # [.., C]
    return one_hot + (probs - probs.detach())


class RSSM(nn.Module):
    """The recurrent state-space model. A state is (h, z): h [N, D], the memory, and z [N, S C], the
    news: S one-hot vectors in a row."""

    def __init__(self, num_actions: int, embed_dim: int, size: Size):
        super().__init__()
        deter, units, stoch = size.deter, size.units, size.groups * size.classes
        self.latent_shape = (size.groups, size.classes)
        self.deter, self.stoch, self.num_actions = deter, stoch, num_actions
        self.from_h, self.from_z = dense(deter, units), dense(stoch, units)
        self.from_action = dense(num_actions, units)
        # each block is one linear layer of (its part of h, all inputs), computed as a sum of two:
        # so the inputs need not be copied for every block
        self.mix_h = BlockLinear(deter, deter, size.blocks)
        self.mix_inputs = nn.Linear(3 * units, deter, bias=False)
        self.mix_norm = nn.Sequential(nn.RMSNorm(deter, 1e-4), nn.SiLU())
        self.gates = BlockLinear(deter, 3 * deter, size.blocks)
        self.prior_net = head(deter, units, 2, stoch)
        # one linear layer of (h, embed), too; its second part is computed for all steps at once
        self.posterior_h = nn.Linear(deter, units)
        self.posterior_embed = nn.Linear(embed_dim, units, bias=False)
        self.posterior_net = nn.Sequential(
            nn.RMSNorm(units, 1e-4), nn.SiLU(), nn.Linear(units, stoch)
        )

    def recur(self, h: torch.Tensor, z: torch.Tensor, action_input: torch.Tensor) -> torch.Tensor:
        """h' = GRU(h, z, a), a through from_action. [N, D], [N, S C], [N, units] -> [N, D]"""
        inputs = torch.cat([self.from_h(h), self.from_z(z), action_input], dim=1)  # [N, 3 units]
        mixed = self.mix_norm(self.mix_h(h).flatten(1) + self.mix_inputs(inputs))  # [N, D]
        reset, candidate, update = self.gates(mixed).chunk(3, dim=2)  # [N, G, D / G] each
        # unlike in nn.GRU, reset scales the whole candidate
        candidate = torch.tanh(torch.sigmoid(reset) * candidate).flatten(1)  # [N, D]
        update = torch.sigmoid(update - 1).flatten(1)  # the -1: at first, h changes slowly
        return update * candidate + (1 - update) * h

    def prior(self, h: torch.Tensor) -> torch.Tensor:
        """log p(z|h). [.., D] -> [.., S, C]"""
        return unimix(self.prior_net(h).unflatten(-1, self.latent_shape))

    def posterior(self, h: torch.Tensor, embed_input: torch.Tensor) -> torch.Tensor:
        """log q(z|h, x), x through posterior_embed. [N, D], [N, units] -> [N, S, C]"""
        logits = self.posterior_net(self.posterior_h(h) + embed_input)  # [N, S C]
        return unimix(logits.unflatten(1, self.latent_shape))

    def initial(self, num: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """h, z and the action before: all zero."""
        zeros, dims = self.posterior_h.weight.new_zeros, (self.deter, self.stoch, self.num_actions)
        return tuple(zeros(num, dim) for dim in dims)

    def observe(
        self,
        embed: torch.Tensor,
        last_action: torch.Tensor,
        is_first: torch.Tensor,
        h: torch.Tensor,
        z: torch.Tensor,
        generator: torch.Generator | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """States of T steps that were seen, and the posteriors that z was drawn from.
        [B, T, E], [B, T, A], [B, T], [B, D], [B, S C] -> [B, T, D], [B, T, S C], [B, T, S, C]"""
        keep = (1 - is_first).unsqueeze(-1)  # [B, T, 1]
        # what does not depend on h is computed for all steps at once
        action_inputs = self.from_action(keep * last_action)  # [B, T, units]
        embed_inputs = self.posterior_embed(embed)  # [B, T, units]
        steps = []
        for t_keep, action_input, embed_input in zip(
            keep.unbind(1), action_inputs.unbind(1), embed_inputs.unbind(1)
        ):
            h = self.recur(t_keep * h, t_keep * z, action_input)
            log_q = self.posterior(h, embed_input)
            z = sample(log_q, generator).flatten(1)
            steps.append((h, z, log_q))
        return tuple(torch.stack(column, dim=1) for column in zip(*steps))


class WorldModel(nn.Module):
    """Encoder, RSSM, and three heads whose losses decide what a state has to tell: decoder, reward,
    and the logit that the episode goes on."""

    def __init__(self, obs_shape: tuple[int, ...], num_actions: int, size: Size):
        super().__init__()
        self.feature_dim = size.deter + size.groups * size.classes
        self.encoder = Encoder(obs_shape, size)
        self.rssm = RSSM(num_actions, self.encoder.embed_dim, size)
        self.decoder = Decoder(self.feature_dim, obs_shape, size)
        self.reward = head(self.feature_dim, size.units, 1, NUM_BINS)
        self.cont = head(self.feature_dim, size.units, 1, 1)
        self.apply(init_weights)
        rssm = self.rssm
        for summands in ((rssm.mix_h, rssm.mix_inputs), (rssm.posterior_h, rssm.posterior_embed)):
            for layer in summands:  # parts of one linear layer: its fan-in is their sum
                init_weights(layer, sum(fan_in_of(summand) for summand in summands))
        nn.init.zeros_(self.reward[-1].weight)  # at first it expects nothing


class LatentActor(nn.Module):
    """log pi(a|s), 1 % of it uniform. Starts without a preference. [.., F] -> [.., A]"""

    def __init__(self, feature_dim: int, num_actions: int, units: int):
        super().__init__()
        self.net = head(feature_dim, units, 3, num_actions)
        self.apply(init_weights)
        nn.init.zeros_(self.net[-1].weight)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return unimix(self.net(features))


class LatentCritic(nn.Module):
    """Logits of the return, over the bins. Starts at 0. [.., F] -> [.., J]"""

    def __init__(self, feature_dim: int, units: int):
        super().__init__()
        self.net = head(feature_dim, units, 3, NUM_BINS)
        self.apply(init_weights)
        nn.init.zeros_(self.net[-1].weight)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.net(features)


def build_networks(
    obs_shape: tuple[int, ...], num_actions: int, size: Size
) -> tuple[WorldModel, LatentActor, LatentCritic]:
    model = WorldModel(obs_shape, num_actions, size)
    actor = LatentActor(model.feature_dim, num_actions, size.units)
    return model, actor, LatentCritic(model.feature_dim, size.units)


@torch.no_grad()
def act(
    model: WorldModel,
    actor: LatentActor,
    obs: torch.Tensor,
    memory: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    generator: torch.Generator | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See, update the state, and act; without a generator, whatever is most likely. What an agent
    remembers is h, z and its action, one-hot; where an episode starts, all of them are 0.
    [N, W, W, P] or [N, O], memory -> memory"""
    h, z, last_action = memory
    embed = model.encoder(preprocess(obs))  # [N, E]
    is_first = torch.zeros_like(h[:, 0])  # [N]
    # as a sequence of one step
    inputs = (x.unsqueeze(1) for x in (embed, last_action, is_first))
    h, z, _ = model.rssm.observe(*inputs, h, z, generator)
    h, z = h.squeeze(1), z.squeeze(1)  # [N, D], [N, S C]
    action = sample(actor(torch.cat([h, z], dim=1)), generator)  # [N, A]
    return h, z, action


@torch.no_grad()
def imagine(
    model: WorldModel,
    actor: LatentActor,
    h: torch.Tensor,
    z: torch.Tensor,
    horizon: int,
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """H steps of the policy in the model, without seeing anything: z comes from the prior.
    [N, D], [N, S C] -> features of H + 1 states [N, H + 1, F], actions [N, H, A]"""
    features, actions = [torch.cat([h, z], dim=1)], []
    for _ in range(horizon):
        action = sample(actor(features[-1]), generator)  # [N, A]
        h = model.rssm.recur(h, z, model.rssm.from_action(action))
        z = sample(model.rssm.prior(h), generator).flatten(1)
        features.append(torch.cat([h, z], dim=1))
        actions.append(action)
    return torch.stack(features, dim=1), torch.stack(actions, dim=1)


# ---- buffer


class Buffer:
    """A ring of rows for every environment. A row holds an observation, the reward that came with
    it, and the action that followed; so the last observation of an episode has a row, too, whose
    action nobody uses. NumPy arrays in the memory of the CPU: images would fill that of a GPU."""

    def __init__(self, capacity: int, num_envs: int, obs_shape: tuple[int, ...]):
        self.length = capacity // num_envs
        shape, obs_dtype = (self.length, num_envs), np.uint8 if len(obs_shape) == 3 else np.float32
        self.columns = {
            "obs": np.zeros((*shape, *obs_shape), obs_dtype),
            "action": np.zeros(shape, np.int64),
            "reward": np.zeros(shape, np.float32),
            "is_first": np.zeros(shape, np.float32),
            "is_last": np.zeros(shape, np.float32),  # terminated, or truncated
            "is_terminal": np.zeros(shape, np.float32),
        }
        self.position = np.zeros(num_envs, np.int64)  # of the next row
        self.size = np.zeros(num_envs, np.int64)

    def num_bytes(self) -> int:
        return sum(column.nbytes for column in self.columns.values())

    def add(self, env: int, obs, reward=0.0, is_first=False, is_last=False, is_terminal=False):
        row = {"obs": obs, "reward": reward, "action": 0}  # set_actions() replaces the 0
        row |= {"is_first": is_first, "is_last": is_last, "is_terminal": is_terminal}
        for name, value in row.items():
            self.columns[name][self.position[env], env] = value
        self.position[env] = (self.position[env] + 1) % self.length
        self.size[env] = min(self.size[env] + 1, self.length)

    def set_actions(self, action: np.ndarray) -> None:
        """What is done about the newest row of every environment. [K]"""
        newest = (self.position - 1) % self.length
        self.columns["action"][newest, np.arange(len(newest))] = action

    def sample(
        self, num_sequences: int, num_steps: int, generator: torch.Generator
    ) -> list[torch.Tensor]:
        """Sequences that start anywhere in a stream, and may span episodes: the columns of above,
        [B, T, ...] each."""
        # all sequences of all environments are numbered; some are drawn, and found again
        num_starts = np.maximum(self.size - num_steps + 1, 0)  # [K]
        ends = num_starts.cumsum()  # [K]
        draw = torch.randint(
            int(ends[-1]), (num_sequences,), device=generator.device, generator=generator
        )
        draw = draw.cpu().numpy()  # [B]
        env = np.searchsorted(ends, draw, side="right")  # [B]
        oldest = (self.position - self.size)[env]  # [B]
        start = oldest + draw - (ends - num_starts)[env]  # [B]
        rows = (start[:, None] + np.arange(num_steps)) % self.length  # [B, T]
        batch = {name: column[rows, env[:, None]] for name, column in self.columns.items()}
        batch["is_first"][:, 0] = 1  # nobody knows the state before it
        return [torch.from_numpy(column).to(generator.device) for column in batch.values()]

    def state(self) -> dict:
        """What a checkpoint needs: the filled part, as it lies in memory."""
        filled = self.size.max()
        state = {name: torch.from_numpy(column[:filled]) for name, column in self.columns.items()}
        counts = {"position": self.position, "size": self.size}
        return state | {name: torch.from_numpy(count) for name, count in counts.items()}

    def load_state(self, state: dict) -> None:
        self.position, self.size = state["position"].numpy().copy(), state["size"].numpy().copy()
        for name, column in self.columns.items():
            column[: self.size.max()] = state[name].numpy()


# ---- losses

HALF_BINS = symexp(torch.linspace(0, 20, (NUM_BINS + 1) // 2))  # 0, .., 4.9e8
BINS = torch.cat([-HALF_BINS.flip(0)[:-1], HALF_BINS])  # [J], symmetric to the last bit


def two_hot_mean(logits: torch.Tensor) -> torch.Tensor:
    """sum_j p_j b_j, in pairs of b and -b: bins go up to 4.9e8, and the rounding errors of a plain
    sum would be large values; so equal probabilities give 0.0 exactly. [.., J] -> [..]"""
    probs = torch.softmax(logits, dim=-1)
    middle = NUM_BINS // 2
    surplus = probs[..., middle + 1 :] - probs[..., :middle].flip(-1)  # p(b) - p(-b), [.., J // 2]
    return surplus @ HALF_BINS[1:].to(logits.device)


def two_hot_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """-sum_j t_j log p_j; t shares 1 between the two bins around the target, so that sum_j t_j b_j
    is the target. [.., J], [..] -> [..]"""
    assert logits.shape[:-1] == target.shape and logits.shape[-1] == NUM_BINS
    bins = BINS.to(logits.device)
    target = target.clamp(bins[0], bins[-1])
    above = torch.bucketize(target, bins).clamp(1, NUM_BINS - 1)  # [..]; a NaN, too
    below = above - 1
    share = (target - bins[below]) / (bins[above] - bins[below])  # of the bin above
    log_probs = torch.log_softmax(logits, dim=-1)
    log_below, log_above = (
        log_probs.gather(-1, j.unsqueeze(-1)).squeeze(-1) for j in (below, above)
    )  # [..] each
    return -((1 - share) * log_below + share * log_above)


def reconstruction_loss(decoded: torch.Tensor, obs: torch.Tensor) -> torch.Tensor:
    """Squared error, summed over all pixels in [0, 1], or over symlog of a vector.
    [B, T, W, W, P] or [B, T, O] -> [B, T]"""
    assert decoded.shape == obs.shape
    target = obs.float() / 255 if obs.dtype == torch.uint8 else symlog(obs)
    return ((decoded - target) ** 2).flatten(2).sum(-1)


def continue_loss(logit: torch.Tensor, is_terminal: torch.Tensor) -> torch.Tensor:
    """-log of the probability of what happened; a truncated episode would have gone on. [B, T]"""
    assert logit.shape == is_terminal.shape
    return nn.functional.binary_cross_entropy_with_logits(logit, 1 - is_terminal, reduction="none")


def entropy_of(log_probs: torch.Tensor) -> torch.Tensor:
    """-sum p log p. [.., C] -> [..]"""
    return -(log_probs.exp() * log_probs).sum(-1)


def kl(log_left: torch.Tensor, log_right: torch.Tensor) -> torch.Tensor:
    """KL(left || right), summed over the groups. [.., S, C] -> [..]"""
    return (log_left.exp() * (log_left - log_right)).sum(dim=(-2, -1))


def kl_losses(
    log_q: torch.Tensor, log_p: torch.Tensor, free_nats: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """dynamics, max(free, KL(sg(q) || p)): trains the prior to foresee the posterior.
    representation, max(free, KL(q || sg(p))): trains the posterior to be foreseeable.
    [B, T, S, C] -> [B, T], [B, T]"""
    assert log_q.shape == log_p.shape and log_q.dim() == 4
    # the maximum of every step, before any mean: a step that is good enough has no gradient
    dynamics = kl(log_q.detach(), log_p).clamp(min=free_nats)
    representation = kl(log_q, log_p.detach()).clamp(min=free_nats)
    return dynamics, representation


def td_lambda_returns(
    reward: torch.Tensor,
    cont: torch.Tensor,
    is_last: torch.Tensor,
    bootstrap: torch.Tensor,
    gamma: float,
    td_lambda: float,
) -> torch.Tensor:
    """R_t = r_{t+1} + gamma c_{t+1} ((1 - l) b_{t+1} + l R_{t+1}), l = lambda (1 - is_last_{t+1}),
    and R_H = b_H, where b is the bootstrap: v, if imagined. r_{t+1} and c_{t+1} came with state
    t + 1. If that was the last of an episode, R_{t+1} belongs to the next one and is left out.
    [N, H + 1] -> [N, H]"""
    assert reward.shape == cont.shape == is_last.shape == bootstrap.shape and reward.dim() == 2
    discount, carry = gamma * cont, td_lambda * (1 - is_last)  # [N, H + 1] each
    returns = [bootstrap[:, -1]]
    for t in reversed(range(reward.shape[1] - 1)):
        future = (1 - carry[:, t + 1]) * bootstrap[:, t + 1] + carry[:, t + 1] * returns[-1]
        returns.append(reward[:, t + 1] + discount[:, t + 1] * future)
    return torch.stack(returns[:0:-1], dim=1)  # in the order of time, without R_H


def dreamer_actor_loss(
    log_probs: torch.Tensor,
    action: torch.Tensor,
    advantage: torch.Tensor,
    weight: torch.Tensor,
    entropy_coef: float,
) -> torch.Tensor:
    """-mean w (advantage log pi(a|s) + entropy_coef entropy(pi)).
    [N, H, A], [N, H, A], [N, H], [N, H] -> scalar"""
    assert log_probs.shape == action.shape and log_probs.shape[:-1] == advantage.shape
    assert advantage.shape == weight.shape
    log_prob = (action * log_probs).sum(-1)  # [N, H]
    objective = advantage.detach() * log_prob + entropy_coef * entropy_of(log_probs)  # [N, H]
    return -(weight.detach() * objective).mean()


def dreamer_critic_loss(
    logits: torch.Tensor, returns: torch.Tensor, slow_value: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """mean w (two_hot_loss(R) + two_hot_loss(slow critic's value)).
    [N, H, J], [N, H], [N, H], [N, H] -> scalar"""
    assert logits.shape[:-1] == returns.shape == slow_value.shape == weight.shape
    loss = two_hot_loss(logits, returns.detach()) + two_hot_loss(logits, slow_value.detach())
    return (weight.detach() * loss).mean()


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


def env_maker(args: Args) -> Callable[..., gym.Env]:
    image_size = SIZES[args.size].image_size
    return partial(make_env, image_size=image_size, from_pixels=args.from_pixels)


def load_policy(path: str, **overrides) -> "LatentPolicy":
    """The policy of a checkpoint: observations -> actions, both batches in the environment's units.
    It remembers an episode: reset() it before the next. `overrides` are flags, e.g. device."""
    checkpoint = load_checkpoint(path)
    args = replace(Args(**checkpoint["args"]), **overrides)
    env, device = env_maker(args)(args.env_id), pick_device(args.device)
    model, actor, _ = build_networks(*check_spaces(env), SIZES[args.size])
    model.load_state_dict(checkpoint["model"])
    actor.load_state_dict(checkpoint["actor"])
    return LatentPolicy(model.to(device), actor.to(device), env.action_space)


class LatentPolicy:
    """What is evaluated: the most likely action, and the most likely z. It remembers an episode."""

    def __init__(self, model: WorldModel, actor: LatentActor, action_space: gym.spaces.Discrete):
        self.model, self.actor, self.first_action = model, actor, int(action_space.start)
        self.reset()

    def reset(self) -> None:
        self.memory = None

    def __call__(self, obs: np.ndarray) -> np.ndarray:
        """[N, W, W, P] or [N, O] -> [N]"""
        memory = self.memory or self.model.rssm.initial(len(obs))
        obs = as_tensor(obs, memory[0].device)
        self.memory = act(self.model, self.actor, obs, memory, generator=None)
        return self.memory[-1].argmax(dim=1).cpu().numpy() + self.first_action


def as_tensor(obs: np.ndarray, device: torch.device) -> torch.Tensor:
    """Vectors of any type as float32; images stay uint8, the network scales them."""
    dtype = torch.uint8 if obs.ndim == 4 else torch.float32
    return torch.as_tensor(obs, dtype=dtype, device=device)


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


def keep_large_blocks() -> None:
    """glibc gives freed activations back to the OS and takes them again page by page; large ones it
    even maps one by one. Here it does neither: a fifth less CPU time (benchmark/NOTES.md)."""
    trim_threshold, mmap_max = -1, -4  # their numbers in malloc.h
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt"):
        ctypes.CDLL(None).mallopt(mmap_max, 0)
        ctypes.CDLL(None).mallopt(trim_threshold, 2**31 - 1)


@torch.no_grad()
def update_target(target: nn.Module, network: nn.Module, tau: float) -> None:
    """target <- (1 - tau) target + tau network, for all parameters in one call."""
    torch._foreach_lerp_(list(target.parameters()), list(network.parameters()), tau)


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
DYNAMICS_COEF, REPRESENTATION_COEF = 1.0, 0.1  # of the two KL losses
RETURN_SCALE_RATE = 0.01  # how fast the scale of returns follows what is imagined
MODEL_MAX_GRAD_NORM, MAX_GRAD_NORM = 1000.0, 100.0  # clips: of the first update, and of explosions
DREAM_FRAMES, DREAM_CONTEXT = 24, 3  # of a picture; of those, how many it sees before it imagines


def updates_until(step: int, args: Args) -> int:
    """Updates that are due at an environment step. A function of the step alone: no fraction of an
    update is lost, and none has to be saved."""
    steps = max(0, step - args.learning_starts)
    return int(steps * args.replay_ratio / args.batch_size)


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
    keep_large_blocks()
    if args.torch_threads is not None:
        torch.set_num_threads(args.torch_threads)
    device = pick_device(args.device)
    args = replace(args, device=device.type)  # a resumed run must not change it: bits would differ
    make = env_maker(args)
    envs = [make(args.env_id) for _ in range(args.num_envs)]
    obs_shape, num_actions = check_spaces(envs[0])
    is_image, first_action = len(obs_shape) == 3, int(envs[0].action_space.start)
    total, total_updates = args.total_timesteps, updates_until(args.total_timesteps, args)
    if total_updates == 0:
        raise InputError(
            f"total_timesteps {total} is spent before the first update: lower --learning-starts"
            f" ({args.learning_starts}) or --batch-size ({args.batch_size})"
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
    try:
        buffer = Buffer(args.buffer_capacity, args.num_envs, obs_shape)
    except (MemoryError, ValueError, OverflowError):
        raise InputError(f"buffer_capacity {args.buffer_capacity} is too much memory") from None

    # networks
    networks = build_networks(obs_shape, num_actions, SIZES[args.size])
    model, actor, critic = (network.to(device) for network in networks)
    slow_critic = deepcopy(critic).requires_grad_(False)
    model_opt = torch.optim.Adam(model.parameters(), args.learning_rate, fused=True)
    actor_opt, critic_opt = (
        torch.optim.Adam(network.parameters(), args.actor_critic_learning_rate, fused=True)
        for network in (actor, critic)
    )
    parts = {
        "model": model,
        "actor": actor,
        "critic": critic,
        "slow_critic": slow_critic,
        "model_opt": model_opt,
        "actor_opt": actor_opt,
        "critic_opt": critic_opt,
    }
    return_scale = torch.zeros((), device=device)
    percentiles = torch.tensor([0.05, 0.95], device=device)
    num_steps = args.sequence_length  # T
    num_sequences = args.batch_size // num_steps  # B
    num_last = args.imagine_last or num_steps  # L

    # resume
    step, num_updates, last_update, best_return, evals_since_best = 0, 0, 0, -math.inf, 0
    episodes = list(range(args.num_envs))  # environment i plays episodes i, i + K, i + 2K, ...
    episode_actions = [[] for _ in envs]
    memory = model.rssm.initial(args.num_envs)  # h, z and the action before, of every environment
    log_position = {}
    if args.resume:
        if checkpoint["step"] >= total:
            done = f"{run_dir} is at step {checkpoint['step']} already"
            raise InputError(f"{done}: give it a larger budget")
        for name, part in parts.items():
            part.load_state_dict(deepcopy(checkpoint[name]))  # Adam would keep the mapped tensors
        generator.set_state(checkpoint["generator"])
        buffer.load_state(checkpoint["buffer"])
        return_scale.copy_(checkpoint["return_scale"])
        memory = tuple(x.to(device) for x in checkpoint["memory"])
        step, log_position = checkpoint["step"], checkpoint["log_position"]
        num_updates, last_update = checkpoint["num_updates"], checkpoint["last_update"]
        episodes = checkpoint["episodes"]
        episode_actions = [actions.tolist() for actions in checkpoint["episode_actions"]]
        best_return, evals_since_best = checkpoint["best_return"], checkpoint["evals_since_best"]
    starts = [
        start_episode(env, args.seed, episode, actions)
        for env, episode, actions in zip(envs, episodes, episode_actions)
    ]
    current_obs = np.stack([obs for obs, _ in starts])  # [K, W, W, P] or [K, O]
    current_obs = current_obs.astype(buffer.columns["obs"].dtype)
    returns_so_far = [episode_return for _, episode_return in starts]
    is_fresh, first_update = not args.resume, num_updates
    if args.resume:
        if not np.array_equal(current_obs, checkpoint["current_obs"].numpy()):
            raise InputError(f"{args.env_id} plays another episode from the same seed: no resume")
        del checkpoint  # its file is mapped into memory
    else:
        for i, obs in enumerate(current_obs):
            buffer.add(i, obs, is_first=True)
    args = replace(args, resume=None)
    if args.compile:
        for network in (model.encoder, model.decoder, actor, critic, slow_critic):
            network.compile()

    try:
        os.makedirs(run_dir, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot use {run_dir} as run_dir: {error.strerror}") from None
    args_json = json.dumps(asdict(args), indent=2).encode()
    save_atomically(f"{run_dir}/args.json", lambda file: file.write(args_json))
    logger = Logger(run_dir, total, args.quiet, **log_position)
    num_weights = sum(p.numel() for network in networks for p in network.parameters())
    logger.line(
        f"{ALGO} on {args.env_id}: {num_weights / 1e6:.1f} million weights; a full replay buffer"
        f" takes {buffer.num_bytes() / 1e6:,.0f} MB\nrun: {run_dir} on {device}"
    )
    policy = LatentPolicy(model, actor, envs[0].action_space)
    evaluation = (policy, args.env_id, args.eval_episodes, args.eval_seed)
    if is_fresh:
        logger.evaluation(step, common.evaluate(*evaluation, make_env=make))

    # loop
    stop_reason, exit_signal = "", 0
    with StopSignal() as stop_signal:
        while not stop_reason:
            step += args.num_envs

            # 1. act in every environment: see, update the state, draw an action. Until the first
            # update all actions are equally likely, since the actor's last layer starts at 0.
            memory = act(model, actor, as_tensor(current_obs, device), memory, generator)
            action = memory[-1].argmax(dim=1).cpu().numpy()  # [K]
            buffer.set_actions(action)
            for i, env in enumerate(envs):
                taken = int(action[i]) + first_action
                obs, reward, terminated, truncated, _ = env.step(taken)
                done = terminated or truncated
                buffer.add(i, obs, reward, is_last=done, is_terminal=terminated)
                episode_actions[i].append(taken)
                returns_so_far[i] += float(reward)
                if done:  # the last observation has its row; the next episode starts with another
                    logger.scalars(step, {"charts/episodic_return": returns_so_far[i]})
                    episodes[i], episode_actions[i] = episodes[i] + args.num_envs, []
                    obs, returns_so_far[i] = start_episode(env, args.seed, episodes[i], [])
                    buffer.add(i, obs, is_first=True)
                    for remembered in memory:
                        remembered[i] = 0
                current_obs[i] = obs

            due = updates_until(step, args)
            has_update = num_updates < due
            if has_update and num_updates == first_update:  # random steps are no measure
                logger.first_step, logger.first_second = step - args.num_envs, logger.seconds()
            while num_updates < due:
                num_updates += 1
                factor = lr_factor(
                    num_updates, total_updates, args.lr_schedule, args.warmup_updates
                )
                model_opt.param_groups[0]["lr"] = args.learning_rate * factor
                for opt in (actor_opt, critic_opt):
                    opt.param_groups[0]["lr"] = args.actor_critic_learning_rate * factor

                # 2. draw sequences
                batch = buffer.sample(num_sequences, num_steps, generator)
                obs, action, reward, is_first, is_last, is_terminal = batch  # [B, T, ...] each
                action = nn.functional.one_hot(action, num_actions).float()  # [B, T, A]
                no_action = torch.zeros_like(action[:, :1])  # [B, 1, A]
                last_action = torch.cat([no_action, action[:, :-1]], dim=1)  # [B, T, A]

                # 3. world model: see, and predict what was seen, what it paid, and what comes next
                h, z, _ = model.rssm.initial(num_sequences)
                embed = model.encoder(preprocess(obs).flatten(0, 1))  # [B T, E]
                embed = embed.unflatten(0, (num_sequences, num_steps))  # [B, T, E]
                h, z, log_q = model.rssm.observe(embed, last_action, is_first, h, z, generator)
                features = torch.cat([h, z], dim=2)  # [B, T, F]
                decoded = model.decoder(features.flatten(0, 1)).view(obs.shape)  # as obs
                log_p = model.rssm.prior(h)  # [B, T, S, C]
                dynamics, representation = kl_losses(log_q, log_p, args.free_nats)
                model_losses = {
                    "losses/reconstruction": reconstruction_loss(decoded, obs),
                    "losses/reward": two_hot_loss(model.reward(features), reward),
                    "losses/continue": continue_loss(model.cont(features).squeeze(2), is_terminal),
                    "losses/dynamics": DYNAMICS_COEF * dynamics,
                    "losses/representation": REPRESENTATION_COEF * representation,
                }  # [B, T] each
                model_loss = sum(loss.mean() for loss in model_losses.values())
                model_opt.zero_grad()
                model_loss.backward()
                model_norm = nn.utils.clip_grad_norm_(model.parameters(), MODEL_MAX_GRAD_NORM)
                model_opt.step()

                # 4. imagine what the policy would do next, from the last states of every sequence;
                # the others are of no use any more
                h, z, reward, is_last, is_terminal = (
                    x[:, -num_last:].detach() for x in (h, z, reward, is_last, is_terminal)
                )  # [B, L, ...] each
                imagined, imagined_action = imagine(
                    model, actor, h.flatten(0, 1), z.flatten(0, 1), args.horizon, generator
                )  # [N, H + 1, F], [N, H, A]
                with torch.no_grad():
                    imagined_reward = two_hot_mean(model.reward(imagined))  # [N, H + 1]
                    cont = torch.sigmoid(model.cont(imagined).squeeze(2))  # [N, H + 1]
                    cont[:, 0] = 1 - is_terminal.flatten()  # known; nothing follows an end
                    # w_0 = c_0, w_t = w_{t-1} gamma c_t: how likely it is to get there, discounted
                    discount = torch.cat([cont[:, :1], args.gamma * cont[:, 1:-1]], dim=1)  # [N, H]
                    weight = discount.cumprod(dim=1)  # [N, H]
                    slow_value = two_hot_mean(slow_critic(imagined[:, :-1]))  # [N, H]

                # 5. returns, and how far apart they are: from the 5th to the 95th percentile
                value_logits = critic(imagined)  # [N, H + 1, J]
                value = two_hot_mean(value_logits.detach())  # [N, H + 1]
                is_cut = torch.zeros_like(value)  # nothing is cut in imagination
                returns = td_lambda_returns(
                    imagined_reward, cont, is_cut, value, args.gamma, args.td_lambda
                )  # [N, H]
                low, high = returns.quantile(percentiles)
                return_scale.lerp_(high - low, RETURN_SCALE_RATE)

                # 6. critic: on imagined returns; and on replayed rewards, which are real, with the
                # imagined returns as bootstrap. State 0 of what is imagined is the replayed one.
                critic_loss = dreamer_critic_loss(value_logits[:, :-1], returns, slow_value, weight)
                replay_logits, replay_slow, bootstrap = (
                    x[:, 0].unflatten(0, is_last.shape) for x in (value_logits, slow_value, returns)
                )  # [B, L, J], [B, L], [B, L]
                replay_returns = td_lambda_returns(
                    reward, 1 - is_terminal, is_last, bootstrap, args.gamma, args.td_lambda
                )  # [B, L - 1]
                replay_weight = 1 - is_last[:, :-1]  # what comes next is another episode
                replay_critic_loss = dreamer_critic_loss(
                    replay_logits[:, :-1], replay_returns, replay_slow[:, :-1], replay_weight
                )
                critic_opt.zero_grad()
                (critic_loss + args.replay_critic_coef * replay_critic_loss).backward()
                critic_norm = nn.utils.clip_grad_norm_(critic.parameters(), MAX_GRAD_NORM)
                critic_opt.step()
                update_target(slow_critic, critic, args.tau)

                # 7. actor: REINFORCE, with the critic as baseline. It has just drawn these actions:
                # no ratio and no clip is needed, nor a gradient through the model.
                advantage = (returns - value[:, :-1]) / return_scale.clamp(min=1)  # [N, H]
                log_probs = actor(imagined[:, :-1])  # [N, H, A]
                actor_loss = dreamer_actor_loss(
                    log_probs, imagined_action, advantage, weight, args.policy_entropy_coef
                )
                actor_opt.zero_grad()
                actor_loss.backward()
                actor_norm = nn.utils.clip_grad_norm_(actor.parameters(), MAX_GRAD_NORM)
                actor_opt.step()

            # 8. log, evaluate, stop, save
            # updates need not fall on multiples of log_interval: log if one went by since the last
            is_log_due = has_update and is_due(step, args.log_interval, step - last_update)
            last_update = step if has_update else last_update
            if is_log_due:
                seconds = logger.seconds() - logger.first_second
                losses = {name: loss.mean().item() for name, loss in model_losses.items()}
                losses["losses/critic"] = critic_loss.item()
                losses["losses/replay_critic"] = replay_critic_loss.item()
                losses["losses/actor"] = actor_loss.item()
                statistics = {
                    "charts/env_steps_per_second": (step - logger.first_step) / seconds,
                    "charts/updates_per_second": (num_updates - first_update) / seconds,
                    "charts/learning_rate": model_opt.param_groups[0]["lr"],
                    **losses,
                    "stats/kl": kl(log_q, log_p).mean().item(),
                    "stats/prior_entropy": entropy_of(log_p).sum(-1).mean().item(),
                    "stats/posterior_entropy": entropy_of(log_q).sum(-1).mean().item(),
                    "stats/policy_entropy": entropy_of(log_probs).mean().item(),
                    "stats/return_mean": returns.mean().item(),
                    "stats/return_scale": return_scale.item(),
                    "stats/value_mean": value.mean().item(),
                    "stats/imagined_reward": imagined_reward[:, 1:].mean().item(),
                    "stats/imagined_continue": cont[:, 1:].mean().item(),
                    "stats/model_grad_norm": model_norm.item(),
                    "stats/critic_grad_norm": critic_norm.item(),
                    "stats/actor_grad_norm": actor_norm.item(),
                }
                logger.scalars(step, statistics)
                logger.progress(step)
                for name, loss in losses.items():
                    if not math.isfinite(loss):
                        message = f"{name} is {loss} at step {step}: it diverged"
                        flags = "--learning-rate or --actor-critic-learning-rate"
                        raise InputError(f"{message}; lower {flags}")
            is_best = False
            if step == total:
                stop_reason = "the budget is spent"
            # evaluate if there was an update since it was last due: else patience would run out
            last_multiple = (step - args.num_envs) // args.eval_interval * args.eval_interval
            last_due = math.ceil(last_multiple / args.num_envs) * args.num_envs
            is_new = due > updates_until(last_due, args)
            if step == total or (is_new and is_due(step, args.eval_interval, args.num_envs)):
                eval_returns = common.evaluate(*evaluation, make_env=make)
                logger.evaluation(step, eval_returns)
                if is_image:
                    strip, _ = draw_dream(dream(policy, make(args.env_id), args.eval_seed))
                    logger.tensorboard.add_image("eval/dream", strip, step, dataformats="HWC")
                    save_image(f"{run_dir}/dreams/{step:09}.png", strip)
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
                policy_state |= {"model": model.state_dict(), "actor": actor.state_dict()}
            if is_best:
                save_atomically(best_path, partial(torch.save, policy_state))
            if is_save_due:
                checkpoint = policy_state | {
                    "num_updates": num_updates,
                    "last_update": last_update,
                    "buffer": buffer.state(),
                    "return_scale": return_scale,
                    "memory": memory,
                    "episodes": episodes,
                    "episode_actions": [
                        torch.tensor(actions, dtype=torch.int64) for actions in episode_actions
                    ],
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


@torch.no_grad()
def dream(policy: LatentPolicy, env: gym.Env, seed: int) -> np.ndarray:
    """The first frames of an episode, three times: as they are; decoded from states that see them;
    and decoded from states that see the first few, and then only which actions were taken.
    -> [3, M, W, W, P] uint8, M frames"""
    policy.reset()
    obs, _ = env.reset(seed=seed)
    frames, actions, done = [obs], [], False
    while len(frames) < DREAM_FRAMES and not done:
        actions.append(policy(frames[-1][None]))
        obs, _, terminated, truncated, _ = env.step(actions[-1][0])
        frames.append(obs)
        done = terminated or truncated
    env.close()

    model, rssm = policy.model, policy.model.rssm
    h, z, no_action = rssm.initial(1)
    device, context = h.device, min(DREAM_CONTEXT, len(frames))
    seen = torch.as_tensor(np.stack(frames), device=device)  # [M, W, W, P]
    index = torch.as_tensor(np.stack(actions) - policy.first_action, device=device)  # [M - 1, 1]
    action = nn.functional.one_hot(index, rssm.num_actions).float()  # [M - 1, 1, A]
    last_action = torch.cat([no_action[None], action]).transpose(0, 1)  # [1, M, A]
    is_first = (torch.arange(len(frames), device=device) == 0).float()[None]  # [1, M]
    embed = model.encoder(preprocess(seen))[None]  # [1, M, E]
    h, z, _ = rssm.observe(embed, last_action, is_first, h, z, generator=None)
    seeing = torch.cat([h, z], dim=2)[0]  # [M, F]

    h, z = h[:, context - 1], z[:, context - 1]  # [1, D], [1, S C]
    dreaming = [*seeing[:context]]
    for taken in action[context - 1 :]:
        h = rssm.recur(h, z, rssm.from_action(taken))
        z = sample(rssm.prior(h), generator=None).flatten(1)
        dreaming.append(torch.cat([h, z], dim=1)[0])
    decoded = model.decoder(torch.cat([seeing, torch.stack(dreaming)]))  # [2 M, W, W, P]
    decoded = (255 * decoded).round().byte().unflatten(0, (2, -1))  # [2, M, W, W, P]
    return torch.cat([seen[None], decoded]).cpu().numpy()


def draw_dream(film: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """-> a strip, one row for each of the three and time from left to right, and the frames of a
    GIF, the three side by side. White lines lie between them."""
    film = np.pad(film, ((0, 0), (0, 0), (1, 1), (1, 1), (0, 0)), constant_values=255)
    if film.shape[-1] != 3:  # one channel is grey; of MinAtar's many, the brightest is shown
        film = film.max(axis=-1, keepdims=True).repeat(3, axis=-1)
    film = film.repeat(2, axis=2).repeat(2, axis=3)  # small images are hard to see
    strip = np.concatenate([np.concatenate(row, axis=1) for row in film])
    return strip, [np.concatenate(moment, axis=1) for moment in film.swapaxes(0, 1)]


def save_image(path: str, *frames: np.ndarray) -> None:
    """One frame as PNG, several as a GIF."""
    from PIL import Image  # TensorBoard brings it

    first, *others = (Image.fromarray(frame) for frame in frames)
    gif = {"format": "GIF", "save_all": True, "append_images": others, "duration": 250, "loop": 0}
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    save_atomically(path, partial(first.save, **gif if others else {"format": "PNG"}))


def evaluate_checkpoint(args: Args) -> dict[str, float]:
    """--evaluate: the checkpoint's policy on fresh episodes, to be recorded, filmed and dreamt."""
    check_args(args)
    saved = load_checkpoint(args.evaluate)["args"]
    check_unchanged(args, saved, EVALUATE_MAY_CHANGE, "--evaluate")
    if args.torch_threads is not None:
        torch.set_num_threads(args.torch_threads)
    overrides = {name: getattr(args, name) for name in EVALUATE_MAY_CHANGE.split()}
    policy, make = load_policy(args.evaluate, **overrides), env_maker(args)
    episodes = (policy, args.env_id, args.eval_episodes, args.eval_seed)
    if args.record:
        returns = common.record(*episodes, args.record, make_env=make)
    else:
        returns = common.evaluate(*episodes, make_env=make)
    report = (
        f"{args.evaluate}: return mean {returns.mean():.1f} std {returns.std():.1f}"
        f" min {returns.min():.1f} max {returns.max():.1f} over {len(returns)} episodes"
    )
    if args.record:
        report += f"\nrecorded in {args.record}"
    if args.capture_video:
        folder, env = os.path.dirname(args.evaluate), make(args.env_id)
        film = os.path.join(folder, "videos")
        film = common.capture_video(*episodes[:2], args.eval_seed, film, make_env=make)
        report += f"\nfilmed in {film}"
        if len(env.observation_space.shape) == 3:
            strip, frames = draw_dream(dream(policy, env, args.eval_seed))
            picture = os.path.join(folder, "dream")
            save_image(f"{picture}.png", strip)
            save_image(f"{picture}.gif", *frames)
            report += f"\ndreamt in {picture}.png and {picture}.gif"
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
