"""Dreamer: a policy that learns in a learned world model. Images or vectors, discrete actions.

Paper: "Mastering Diverse Domains through World Models" (DreamerV3), D. Hafner, J. Pasukonis, J. Ba,
T. Lillicrap, 2023, arXiv:2301.04104. We follow its revision of 2024, most ports that of 2023.

Idea: a world model turns observations into latent states, and learns how a state follows from the
last one and an action, and what reward it brings. Actor and critic learn from trajectories imagined
in it. A state is (h, z): h, of a GRU, remembers; z is a few categorical variables, drawn from the
posterior q(z|h, x) where x is observed, else from the prior p(z|h), which learns to predict q.

Equations (sg: no gradient; v: the critic's value; p, q, pi have 1 % uniform mixed in; two-hot(y):
cross-entropy, y split between the two nearest of J bins; they grow exponentially, so any y fits):
    model       h_t = GRU(h_{t-1}, z_{t-1}, a_{t-1}), posterior q(z|h, x), prior p(z|h), and heads
                of (h, z) for x, for the reward r and for c, the probability to go on
    its loss    |x - x_hat|^2 + two-hot(r) + BCE(c)
                + max(1, KL(sg(q) || p)) + 0.1 max(1, KL(q || sg(p)))       (1: the free nats)
    returns     R_t = r_{t+1} + gamma c_{t+1} ((1 - lambda) v_{t+1} + lambda R_{t+1}), R_H = v_H
    critic      minimise w_t (two-hot(R_t) + two-hot(v of a slow copy)), w_t = gamma^t c_0 .. c_t,
                + 0.3 times this on replayed steps: their real r, imagined R for v, w = 1 - is_last
    actor       maximise w_t (log pi(a_t|s_t) sg(R_t - v_t) / max(1, scale) + eta entropy of pi),
                scale: running distance from the 5th to the 95th percentile of R

Differences from the paper:
    - The convolutions of 2023, 4 x 4 with stride 2; those of 2024, 5 x 5 and pooled, cost far more.
    - Adam and two learning rates, as in 2023: less to read than LaProp. The clip is that of 2024.
    - The decoder's first layer is dense, where that of 2024 has blocks: more weights (see SIZES).
    - Evaluation takes the most likely z and action; the authors draw them, which scores less.
    - Sequences start from a state of zeros, not a stored one; so imagination starts from their last
      steps, which remember. No online queue. The critic's loss on replays does not reach the model.
    - The actor's last layer starts at 0: the first steps are random. Atari: lives start with FIRE.

Shapes: B sequences of T steps, L last ones of each; N = B L, or any number of rows; H horizon; K
environments; A actions; h is [D], of G blocks; z is [S, C], flat [S C], that is S times C; features
of both [F]; embedding of x [E]; J bins; images of P channels [W, W, P], else vectors [O].

Run it, resume it (a checkpoint takes 7 MB at the default size, and 3.1 KB per step, 12.3 KB with
64 x 64 pixels). The paper's flags, metrics and results are in algos/dreamer.md.
    python algos/dreamer.py
    python algos/dreamer.py --resume runs/<run>
    python algos/dreamer.py --evaluate runs/<run>/best.pt --capture-video    (dream.png, dream.gif)
"""

import contextlib
import io
import math
import sys
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

import tyro

# ---- arguments


@dataclass
class Args:
    # task
    env_id: str = "PixelCatch-v0"  # Gymnasium environment
    seed: int = 1  # same seed, same machine: same numbers to the last bit
    # budget
    total_timesteps: int = 16_000  # budget in environment steps
    # optimisation
    batch_size: int = 256  # transitions per update
    gamma: float = 0.997  # discount
    learning_rate: float = 1e-3  # step size of Adam, for every network without a flag of its own
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"  # the last two fall to 0
    warmup_updates: int = 0  # the learning rate first climbs from 0 over this many updates
    # evaluation and stops
    eval_interval: int = 1_000  # updates (online: environment steps) between evaluations
    eval_episodes: int = 20  # episodes per evaluation
    eval_seed: int = 10_000  # evaluation episode i starts from eval_seed + i
    target_return: float | None = None  # stop when an evaluation's mean return gets there
    patience: int | None = None  # stop after this many evaluations without a better one
    # the run
    checkpoint_interval: int = 4_000  # updates (or steps) between saves; Ctrl-C, SIGTERM save, too
    log_interval: int = 200  # updates (or steps) between entries in the logs
    run_dir: str | None = None  # folder of the run [runs/<algo>__<env>__<seed>__<time>]
    resume: str | None = None  # folder of a run to continue, with its flags; budgets may change
    evaluate: str | None = None  # checkpoint to evaluate instead of training
    record: str | None = None  # with --evaluate: save its episodes as a dataset, FILE.npz
    capture_video: bool = False  # with --evaluate: film one episode, next to the checkpoint
    track: bool = False  # log to Weights & Biases, too (pip install wandb)
    quiet: bool = False  # print nothing but errors
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # auto takes a GPU if there is one
    torch_threads: int | None = None  # CPU threads [all cores]
    # DREAMER only
    size: Literal["tiny", "mini", "small", "12m", "50m", "paper"] = "tiny"  # of networks, images
    from_pixels: bool = False  # see what the environment renders, not what it observes
    num_envs: int = 8  # K, environments that are stepped side by side
    learning_starts: int = 1_024  # first steps, with random actions and without updates
    buffer_capacity: int = 100_000  # steps that the replay buffer holds; then the oldest go
    replay_ratio: float = 64.0  # replayed steps per new one; batch of 256: an update every 4 steps
    sequence_length: int = 16  # T, steps of a sequence; a batch has batch_size / T of them
    free_nats: float = 1.0  # a KL below this is good enough
    actor_critic_learning_rate: float = 1e-4  # of actor and critic (Adam)
    imagine_last: int | None = 8  # imagine from so many last steps of each sequence [all]
    horizon: int = 10  # H, steps that are imagined
    td_lambda: float = 0.95  # lambda of the returns; 1: discounted sum of rewards, 0: one-step TD
    policy_entropy_coef: float = 3e-3  # how much the entropy of the policy counts
    replay_critic_coef: float = 0.3  # how much the critic's loss on replayed rewards counts
    tau: float = 0.02  # how far the targets move towards the networks; 1: hard copy


LIMITS = {  # rule: flags; common.LIMITS has those of the shared ones
    "> 0": "sequence_length imagine_last horizon",
    "in (0, inf)": "replay_ratio actor_critic_learning_rate",
    "in [0, inf)": "free_nats replay_critic_coef",
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

ALGO = "dreamer"


class Size(NamedTuple):
    deter: int  # D, of the deterministic state h; a multiple of blocks
    groups: int  # S, categorical variables of the stochastic state z
    classes: int  # C, of each
    units: int  # width of the hidden layers
    depth: int  # channels of the first convolution; then twice, 4 times, 8 times as many
    blocks: int  # G, of the block-diagonal matrices in the GRU; 1: dense, as small ones can be
    image_size: int  # images are squares of so many pixels, 4 times a power of 2

    def channels(self) -> list[int]:
        """Of the convolutions that halve an image until it has 4 x 4 pixels."""
        return [self.depth * 2**stage for stage in range(int(math.log2(self.image_size // 4)))]


SIZES = {  # a new name goes into Args.size, too. Million weights: all, those of Decoder.input
    "tiny": Size(128, 16, 16, 64, 8, 1, 32),  # 0.6, 0.2
    "mini": Size(256, 16, 16, 128, 16, 1, 32),  # 1.7, 0.5
    "small": Size(512, 16, 16, 256, 16, 8, 64),  # 4.8, 1.6
    "12m": Size(2048, 32, 16, 256, 16, 8, 64),  # 14.9, 5.2
    "50m": Size(4096, 32, 32, 512, 32, 8, 64),  # 59.1, 21.0
    "paper": Size(8192, 32, 64, 1024, 64, 8, 64),  # 235.8, 83.9
}


def check_args(args: Args) -> None:
    """Rules between flags."""
    steps, num_envs, length = args.total_timesteps, args.num_envs, args.sequence_length
    last, low = args.imagine_last or length, num_envs * length  # low: one sequence per env
    rules = [  # flag, what it must be, whether it is
        ("sequence_length", ">= 2", length >= 2),  # returns need a next step
        ("imagine_last", f"in [2, sequence_length {length}]", 2 <= last <= length),
        ("learning_starts", f">= num_envs x sequence_length = {low}", args.learning_starts >= low),
        ("buffer_capacity", f">= num_envs x sequence_length = {low}", args.buffer_capacity >= low),
        ("total_timesteps", f"a multiple of num_envs {num_envs}", steps % num_envs == 0),
        ("batch_size", f"a multiple of sequence_length {length}", args.batch_size % length == 0),
    ]
    for name, rule, holds in rules:
        if not holds:
            raise InputError(f"{name} must be {rule}, got {getattr(args, name)}")
    if updates_until(steps, args) == 0:
        spent = f"total_timesteps {steps} is spent before the first update"
        raise InputError(f"{spent}: lower --learning-starts or --batch-size")


def updates_until(step: int, args: Args) -> int:
    """Updates that are due until a step. A function of it alone, so that no remainder is lost."""
    return int(max(0, step - args.learning_starts) * args.replay_ratio / args.batch_size)


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


class FreshMinAtar(gym.Wrapper):
    """Forget the last action at a reset. MinAtar repeats it at times, so that an episode would not
    follow from its seed and actions alone. Render bytes: as a video MinAtar's floats are black."""

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
        self.from_pixels, shape = from_pixels, env.observation_space.shape
        if from_pixels:
            env.reset(seed=0)  # before that there is nothing to render
            image = env.render()
            if getattr(image, "dtype", None) != np.uint8:
                raise ValueError(f"it renders {getattr(image, 'dtype', 'nothing')}, not uint8")
            shape = image.shape
        num_channels = shape[2] if len(shape) == 3 else 1
        if shape[0] <= 4 < num_channels:
            raise ValueError(f"its images {shape} must have the channels last")
        self.observation_space = gym.spaces.Box(0, 255, (size, size, num_channels), np.uint8)
        can_average = max(shape[:2]) >= size and num_channels <= 4  # OpenCV averages no more than 4
        method = cv2.INTER_AREA if can_average else cv2.INTER_NEAREST
        self.resize = partial(cv2.resize, dsize=(size, size), interpolation=method)

    def observation(self, obs: np.ndarray) -> np.ndarray:
        image = np.asarray(self.env.render() if self.from_pixels else obs)
        if image.dtype == bool:  # MinAtar's
            image = 255 * image.astype(np.uint8)
        return self.resize(image).reshape(self.observation_space.shape)


def make_env(env_id: str, image_size: int, from_pixels: bool, **kwargs) -> gym.Env:
    """Images become squares. An Atari game has up to 30 idle frames at the start, and every action
    lasts 4 frames; colours stay, and nothing is stacked, since the state h remembers."""
    if from_pixels:
        kwargs["render_mode"] = "rgb_array"
    try:
        if env_id.startswith("ALE/"):
            import ale_py  # registers the games
            import cv2  # noqa: F401  AtariPreprocessing resizes images with it

            ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
            env = common.make_env(env_id, frameskip=1, **kwargs)  # the next line skips frames
            env = gym.wrappers.AtariPreprocessing(env, screen_size=image_size, grayscale_obs=False)
            if "FIRE" in env.unwrapped.get_action_meanings():
                env = common.FirstFire(env)
        elif env_id.startswith("MinAtar/"):
            from minatar.gym import register_envs

            if env_id not in gym.registry:
                register_envs()
            env = FreshMinAtar(common.make_env(env_id, disable_env_checker=True, **kwargs))
        else:
            env = common.make_env(env_id, **kwargs)
        space = env.observation_space
        is_image = space.dtype in (np.uint8, bool) and len(space.shape or ()) in (2, 3)
        is_ready = space.dtype == np.uint8 and space.shape[:-1] == (image_size, image_size)
        if from_pixels or (is_image and not is_ready):
            return Images(env, image_size, from_pixels)
        if not is_image and len(space.shape or ()) != 1:
            wrong = f"{env_id}: observations must be vectors or uint8 images, not {space}"
            raise InputError(f"{wrong}; try --from-pixels")
        return env
    except ImportError as error:
        packages = "pip install ale-py minatar opencv-python-headless"
        raise InputError(f"{env_id}: {error.name} is missing: {packages}") from None
    except (ValueError, gym.error.Error) as error:  # a game without NOOP, or without render()
        raise InputError(f"cannot play {env_id}: {common.one_line(error)}") from None


def env_maker(args: Args) -> common.MakeEnv:
    image_size = SIZES[args.size].image_size
    return partial(make_env, image_size=image_size, from_pixels=args.from_pixels)


# ---- networks

UNIMIX = 0.01  # share of the uniform distribution in every categorical one
NUM_BINS = 255  # J, of a return or a reward


def symlog(x: torch.Tensor) -> torch.Tensor:
    """sign(x) log(1 + |x|): like x near 0, like a logarithm far away."""
    return x.sign() * torch.log1p(x.abs())


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


def init_weights(layer: nn.Module) -> None:
    """Normal with variance 1 / fan-in, truncated at 2 standard deviations; biases 0."""
    if isinstance(layer, nn.Linear | nn.Conv2d | nn.ConvTranspose2d | BlockLinear):
        std = fan_in_of(layer) ** -0.5 / 0.8796  # truncation leaves 0.8796 of it
        nn.init.trunc_normal_(layer.weight, std=std, a=-2 * std, b=2 * std)
        nn.init.zeros_(layer.bias)


def dense(input_dim: int, output_dim: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(input_dim, output_dim), nn.RMSNorm(output_dim, 1e-4), nn.SiLU())


def head(input_dim: int, units: int, num_layers: int, output_dim: int) -> nn.Sequential:
    layers = [dense(*pair) for pair in pairwise([input_dim] + [units] * num_layers)]
    return nn.Sequential(*layers, nn.Linear(units, output_dim))


class ChannelNorm(nn.RMSNorm):
    """Over the channels of every pixel, which lie last in memory. [N, P, W, W]"""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)  # [N, P, W, W]


class Encoder(nn.Module):
    """[N, W, W, P] or [N, O], preprocessed -> [N, E]"""

    def __init__(self, obs_shape: tuple[int, ...], size: Size):
        super().__init__()
        self.is_image = len(obs_shape) == 3
        layers = []
        if self.is_image:
            channels = size.channels()
            self.embed_dim = channels[-1] * 4 * 4
            for inner, outer in pairwise([obs_shape[2], *channels]):
                layers += [nn.Conv2d(inner, outer, kernel_size=4, stride=2, padding=1)]
                layers += [ChannelNorm(outer, eps=1e-4), nn.SiLU()]
        else:
            self.embed_dim = size.units
            layers += [dense(n, size.units) for n in (obs_shape[0], size.units, size.units)]
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
            channels = size.channels()[::-1]
            self.input = nn.Linear(feature_dim, 4 * 4 * channels[0])
            layers = []
            for inner, outer in pairwise([*channels, obs_shape[2]]):
                layers += [ChannelNorm(inner, eps=1e-4), nn.SiLU()]
                layers += [nn.ConvTranspose2d(inner, outer, kernel_size=4, stride=2, padding=1)]
            self.net = nn.Sequential(*layers).to(memory_format=torch.channels_last)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        if not self.is_image:
            return self.net(features)
        x = self.input(features).unflatten(1, (4, 4, -1)).permute(0, 3, 1, 2)  # [N, P, 4, 4]
        return torch.sigmoid(self.net(x)).permute(0, 2, 3, 1)  # [N, W, W, P]


class BlockLinear(nn.Module):
    """G linear layers side by side: one with a matrix of G blocks on its diagonal, all else 0.
    [N, G, input_dim / G] -> [N, G, output_dim / G]"""

    def __init__(self, input_dim: int, output_dim: int, blocks: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(blocks, input_dim // blocks, output_dim // blocks))
        self.bias = nn.Parameter(torch.empty(blocks, 1, output_dim // blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.transpose(0, 1)  # [G, N, input_dim / G]
        return torch.baddbmm(self.bias, x, self.weight).transpose(0, 1)  # [N, G, output_dim / G]


def unimix(logits: torch.Tensor) -> torch.Tensor:
    """log(0.99 softmax + 0.01 / C): no class is impossible, no KL infinite. [.., C] -> [.., C]"""
    return torch.log((1 - UNIMIX) * torch.softmax(logits, dim=-1) + UNIMIX / logits.shape[-1])


def most_likely(log_probs: torch.Tensor) -> torch.Tensor:
    """One-hot vectors. [.., C] -> [.., C]"""
    index = log_probs.argmax(dim=-1, keepdim=True)  # [.., 1]
    return torch.zeros_like(log_probs).scatter_(-1, index, 1.0)


def sample(log_probs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One-hot vectors. Straight-through gradient, as if they were the probabilities: so losses
    reach the encoder through z. [.., C] -> [.., C]"""
    probs = log_probs.exp()
    uniform = torch.rand((*probs.shape[:-1], 1), device=probs.device, generator=generator)
    # the class is the number of cumulative probabilities that a uniform number exceeds
    index = (probs.detach().cumsum(dim=-1) < uniform).sum(dim=-1, keepdim=True)  # [.., 1]
    one_hot = torch.zeros_like(probs).scatter_(-1, index.clamp(max=probs.shape[-1] - 1), 1.0)
    return one_hot + (probs - probs.detach())


class Memory(NamedTuple):
    """What an agent remembers from step to step; all 0 where an episode starts."""

    h: torch.Tensor  # [N, D]
    z: torch.Tensor  # [N, S C]
    action: torch.Tensor  # the last one, one-hot [N, A]


class RSSM(nn.Module):
    """The recurrent state-space model. A state is (h, z): h [N, D], deterministic, and z [N, S C],
    stochastic: S one-hot vectors in a row."""

    def __init__(self, num_actions: int, embed_dim: int, size: Size):
        super().__init__()
        deter, units, stoch = size.deter, size.units, size.groups * size.classes
        self.latent_shape, self.blocks = (size.groups, size.classes), size.blocks
        self.memory_dims = (deter, stoch, num_actions)
        self.from_h, self.from_z = dense(deter, units), dense(stoch, units)
        self.from_action = dense(num_actions, units)
        self.mix = BlockLinear(deter + size.blocks * 3 * units, deter, size.blocks)
        self.mix_norm = nn.Sequential(nn.RMSNorm(deter, eps=1e-4), nn.SiLU())
        self.gates = BlockLinear(deter, 3 * deter, size.blocks)
        self.prior_net = head(deter, units, 2, stoch)
        self.posterior_net = head(deter + embed_dim, units, 1, stoch)

    def recur(self, h: torch.Tensor, z: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """h' = GRU(h, z, a). [N, D], [N, S C], [N, A] -> [N, D]"""
        inputs = torch.cat([self.from_h(h), self.from_z(z), self.from_action(action)], dim=1)
        # each block sees its own part of h, and all inputs
        parts = h.unflatten(1, (self.blocks, -1))  # [N, G, D / G]
        inputs = inputs.unsqueeze(1).expand(-1, self.blocks, -1)  # [N, G, 3 units]
        mixed = self.mix_norm(self.mix(torch.cat([parts, inputs], dim=2)).flatten(1))  # [N, D]
        gates = self.gates(mixed.view_as(parts))  # [N, G, 3 D / G]
        reset, candidate, update = gates.chunk(3, dim=2)  # [N, G, D / G] each
        # unlike in nn.GRU, reset scales the whole candidate
        candidate = torch.tanh(torch.sigmoid(reset) * candidate).flatten(1)  # [N, D]
        update = torch.sigmoid(update - 1).flatten(1)  # [N, D]; the -1: at first, h changes slowly
        return update * candidate + (1 - update) * h

    def prior(self, h: torch.Tensor) -> torch.Tensor:
        """log p(z|h). [.., D] -> [.., S, C]"""
        return unimix(self.prior_net(h).unflatten(-1, self.latent_shape))

    def posterior(self, h: torch.Tensor, embed: torch.Tensor) -> torch.Tensor:
        """log q(z|h, x). [N, D], [N, E] -> [N, S, C]"""
        logits = self.posterior_net(torch.cat([h, embed], dim=1))  # [N, S C]
        return unimix(logits.unflatten(1, self.latent_shape))

    def initial(self, num: int) -> Memory:
        """Nothing is remembered yet."""
        return Memory(*(self.gates.weight.new_zeros(num, dim) for dim in self.memory_dims))

    def observe(self, embed, last_action, is_first, h, z, generator) -> tuple[torch.Tensor, ...]:
        """States of T observed steps, and the posteriors that z was drawn from; last_action is the
        one before each. Where an episode starts, state and action before it count as 0.
        [B, T, E], [B, T, A], [B, T], [B, D], [B, S C] -> [B, T, D], [B, T, S C], [B, T, S, C]"""
        keep = (1 - is_first).unsqueeze(-1)  # [B, T, 1]
        columns = (embed.unbind(1), (keep * last_action).unbind(1), keep.unbind(1))
        steps = []
        for step_embed, step_action, step_keep in zip(*columns):
            h = self.recur(step_keep * h, step_keep * z, step_action)  # [B, D]
            log_q = self.posterior(h, step_embed)  # [B, S, C]
            z = sample(log_q, generator).flatten(1)  # [B, S C]
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
        nn.init.zeros_(self.reward[-1].weight)  # at first it predicts a reward of 0


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


def build_networks(obs_shape: tuple[int, ...], num_actions: int, size: Size) -> tuple:
    """-> world model, actor, critic"""
    model = WorldModel(obs_shape, num_actions, size)
    actor = LatentActor(model.feature_dim, num_actions, size.units)
    return model, actor, LatentCritic(model.feature_dim, size.units)


@torch.no_grad()
def act(model, actor, obs, memory, choose) -> Memory:
    """Observe, update the state, and act; `choose` turns log-probabilities into z and an action:
    most_likely, or sample. [N, W, W, P] or [N, O], memory -> memory"""
    dtype = torch.uint8 if obs.ndim == 4 else torch.float32  # preprocess() scales images
    obs = torch.as_tensor(obs, dtype=dtype, device=memory.h.device)
    h = model.rssm.recur(memory.h, memory.z, memory.action)  # [N, D]
    log_q = model.rssm.posterior(h, model.encoder(preprocess(obs)))  # [N, S, C]
    z = choose(log_q).flatten(1)  # [N, S C]
    return Memory(h, z, choose(actor(torch.cat([h, z], dim=1))))


@torch.no_grad()
def imagine(model, actor, h, z, horizon, generator) -> tuple[torch.Tensor, torch.Tensor]:
    """H steps of the policy in the model, without observations: z comes from the prior.
    [N, D], [N, S C] -> features of H + 1 states [N, H + 1, F], actions [N, H, A]"""
    features, actions = [torch.cat([h, z], dim=1)], []
    for _ in range(horizon):
        action = sample(actor(features[-1]), generator)  # [N, A]
        h = model.rssm.recur(h, z, action)  # [N, D]
        z = sample(model.rssm.prior(h), generator).flatten(1)  # [N, S C]
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
        self.columns = {"obs": np.zeros((*shape, *obs_shape), obs_dtype)}
        self.columns["action_index"] = np.zeros(shape, np.int64)
        for name in ("reward", "is_first", "is_last", "is_terminal"):  # is_last: also if truncated
            self.columns[name] = np.zeros(shape, np.float32)
        self.position = np.zeros(num_envs, np.int64)  # of the next row
        self.size = np.zeros(num_envs, np.int64)

    def num_bytes(self) -> int:
        return sum(column.nbytes for column in self.columns.values())

    def add(self, env: int, obs, reward=0.0, is_first=False, is_last=False, is_terminal=False):
        row = (obs, 0, reward, is_first, is_last, is_terminal)  # set_action() replaces the 0
        for column, value in zip(self.columns.values(), row):
            column[self.position[env], env] = value
        self.position[env] = (self.position[env] + 1) % self.length
        self.size[env] = min(self.size[env] + 1, self.length)

    def set_action(self, env: int, action_index: int) -> None:
        self.columns["action_index"][self.position[env] - 1, env] = action_index  # the newest row

    def sample(self, num_sequences: int, num_steps: int, generator: torch.Generator) -> list:
        """Sequences that start anywhere, and may span episodes: the columns, [B, T, ...] each."""
        # number all possible starts, one environment after the other; draw some; look up their rows
        device = generator.device
        num_starts = np.maximum(self.size - num_steps + 1, 0)  # [K]
        ends = num_starts.cumsum()  # [K]
        draw = torch.randint(int(ends[-1]), (num_sequences,), device=device, generator=generator)
        draw = draw.cpu().numpy()  # [B]
        env = np.searchsorted(ends, draw, side="right")  # [B]
        oldest = (self.position - self.size)[env]  # [B]
        start = oldest + draw - (ends - num_starts)[env]  # [B]
        rows = (start[:, None] + np.arange(num_steps)) % self.length  # [B, T]
        batch = {name: column[rows, env[:, None]] for name, column in self.columns.items()}
        batch["is_first"][:, 0] = 1  # the state before it is not stored
        return [torch.from_numpy(column).to(device) for column in batch.values()]

    def state_dict(self) -> dict:
        """What a checkpoint needs: the filled part, as it lies in memory."""
        arrays = {name: column[: self.size.max()] for name, column in self.columns.items()}
        arrays |= {"position": self.position, "size": self.size}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def load_state_dict(self, state: dict) -> None:
        self.position, self.size = state["position"].numpy().copy(), state["size"].numpy().copy()
        for name, column in self.columns.items():
            column[: self.size.max()] = state[name].numpy()


# ---- losses

HALF_BINS = torch.expm1(torch.linspace(0, 20, (NUM_BINS + 1) // 2))  # 0, .., symexp(20) = 4.9e8
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
    above = torch.bucketize(target, bins).clamp(1, NUM_BINS - 1)  # [..]; NaN stays in range
    below = above - 1
    share = (target - bins[below]) / (bins[above] - bins[below])  # of the bin above
    log_probs = torch.log_softmax(logits, dim=-1)
    log_below, log_above = log_probs.gather(-1, torch.stack([below, above], -1)).unbind(-1)
    return -((1 - share) * log_below + share * log_above)


def reconstruction_loss(decoded: torch.Tensor, obs: torch.Tensor) -> torch.Tensor:
    """Squared error, summed over pixels in [0, 1] or symlog of a vector. [B, T, ..] -> [B, T]"""
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


def kl_losses(log_q: torch.Tensor, log_p: torch.Tensor, free_nats: float) -> tuple:
    """dynamics, max(free, KL(sg(q) || p)): trains the prior to predict the posterior.
    representation, max(free, KL(q || sg(p))): trains the posterior to be predictable.
    [B, T, S, C] -> [B, T], [B, T]"""
    assert log_q.shape == log_p.shape and log_q.dim() == 4
    # the maximum of every step, before any mean: a step that is good enough has no gradient
    dynamics = kl(log_q.detach(), log_p).clamp(min=free_nats)
    representation = kl(log_q, log_p.detach()).clamp(min=free_nats)
    return dynamics, representation


def td_lambda_returns(reward, cont, bootstrap, gamma, lambdas) -> torch.Tensor:
    """R_t = r_{t+1} + gamma c_{t+1} ((1 - l_{t+1}) b_{t+1} + l_{t+1} R_{t+1}), R_H = b_H, where
    l: lambdas, b: bootstrap (imagined steps: v). At the last step of an episode l must be 0: the R
    there belongs to the next episode. [N, H + 1] each -> [N, H]"""
    assert reward.shape == cont.shape == bootstrap.shape == lambdas.shape and reward.dim() == 2
    next_return, returns = bootstrap[:, -1], torch.empty_like(reward[:, 1:])  # [N], [N, H]
    for t in reversed(range(reward.shape[1] - 1)):
        future = (1 - lambdas[:, t + 1]) * bootstrap[:, t + 1] + lambdas[:, t + 1] * next_return
        next_return = reward[:, t + 1] + gamma * cont[:, t + 1] * future  # [N]
        returns[:, t] = next_return
    return returns


def dreamer_actor_loss(
    log_probs: torch.Tensor,
    action: torch.Tensor,
    advantage: torch.Tensor,
    weight: torch.Tensor,
    entropy_coef: float,
) -> torch.Tensor:
    """-mean w (advantage log pi(a|s) + entropy_coef entropy(pi)).
    [N, H, A], [N, H, A], [N, H], [N, H] -> scalar"""
    assert log_probs.shape == action.shape and advantage.shape == weight.shape == action.shape[:-1]
    log_prob = (action * log_probs).sum(-1)  # [N, H]
    objective = advantage.detach() * log_prob + entropy_coef * entropy_of(log_probs)  # [N, H]
    return -(weight.detach() * objective).mean()


def dreamer_critic_loss(logits, returns, slow_value, weight) -> torch.Tensor:
    """mean w (two_hot_loss(R) + two_hot_loss(slow critic's value)).
    [N, H, J], [N, H], [N, H], [N, H] -> scalar"""
    assert logits.shape[:-1] == returns.shape == slow_value.shape == weight.shape
    loss = two_hot_loss(logits, returns.detach()) + two_hot_loss(logits, slow_value.detach())
    return (weight.detach() * loss).mean()


# ---- checkpoint


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
        self.memory = act(self.model, self.actor, obs, memory, most_likely)
        return self.memory.action.argmax(dim=1).cpu().numpy() + self.first_action


def load_policy(path: str, **overrides) -> LatentPolicy:
    """The policy of a checkpoint: observations -> actions, both batches in the environment's units.
    It remembers an episode: reset() it before the next. `overrides` are flags, e.g. device."""
    checkpoint = common.load_checkpoint(path, ALGO, Args, overrides.get("env_id"))
    args = replace(Args(**checkpoint["args"]), **overrides)
    env, device = env_maker(args)(args.env_id), common.pick_device(args.device)
    obs_shape, num_actions, _ = common.check_spaces(env, actions="discrete", images=True)
    model, actor, _ = build_networks(obs_shape, num_actions, SIZES[args.size])
    model.load_state_dict(checkpoint["model"])
    actor.load_state_dict(checkpoint["actor"])
    return LatentPolicy(model.to(device), actor.to(device), env.action_space)


@torch.no_grad()
def dream(model: WorldModel, memories: list[Memory], num_observed: int) -> np.ndarray:
    """An episode as the model sees it, twice: decoded from the states of a policy that observes it;
    and from states that are imagined after the first few, given only the actions.
    M times memory, of act() -> [2, M, W, W, P] uint8"""
    rssm, last = model.rssm, min(num_observed, len(memories)) - 1  # last: of the observed ones
    observed = [torch.cat([h, z], dim=1) for h, z, _ in memories]  # M times [1, F]
    imagined = observed[: last + 1]
    h, z, _ = memories[last]  # [1, D], [1, S C]
    for _, _, action in memories[last:-1]:
        h = rssm.recur(h, z, action)  # [1, D]
        z = most_likely(rssm.prior(h)).flatten(1)  # [1, S C]
        imagined.append(torch.cat([h, z], dim=1))
    decoded = model.decoder(torch.cat(observed + imagined))  # [2 M, W, W, P]
    return (255 * decoded).round().byte().unflatten(0, (2, -1)).cpu().numpy()


def evaluate_checkpoint(args: Args) -> dict[str, float]:
    """--evaluate; with --capture-video, what the model dreams is drawn, too."""
    make = env_maker(args)
    result = common.evaluate_checkpoint(ALGO, load_policy, args, make)
    env = make(args.env_id)
    if args.capture_video and len(env.observation_space.shape) == 3:
        try:
            from benchmark import dreams  # draws; a run does not need it
        except ImportError:
            outcome = "benchmark/dreams.py is missing: no pictures of what the model imagines"
        else:
            policy = load_policy(args.evaluate, device=args.device)
            path = Path(args.evaluate).with_name("dream")
            strip, moments = dreams.draw(dreams.film(dream, policy, env, args.eval_seed))
            dreams.save_image(f"{path}.png", strip)
            dreams.save_image(f"{path}.gif", *moments)
            outcome = f"dreamt in {path}.png and {path}.gif"
        if not args.quiet:
            print(outcome)
    return result


# ---- training

DYNAMICS_COEF, REPRESENTATION_COEF = 1.0, 0.1  # of the two KL losses
RETURN_SCALE_RATE = 0.01  # how fast the scale of returns follows what is imagined
MAX_GRAD_RATIO, MIN_WEIGHT_NORM = 0.3, 1e-3  # see clip_per_tensor


@torch.no_grad()
def update_target(target: nn.Module, network: nn.Module, tau: float) -> None:
    """target <- (1 - tau) target + tau network, for all parameters in one call."""
    torch._foreach_lerp_(list(target.parameters()), list(network.parameters()), tau)


@torch.no_grad()
def clip_per_tensor(network: nn.Module) -> torch.Tensor:
    """Adaptive gradient clipping: g <- g min(1, 0.3 max(|w|, 0.001) / |g|), for every tensor of
    weights w and its gradient g. Returns the norm of all gradients before."""
    weights = list(network.parameters())
    grads = [weight.grad for weight in weights]
    grad_norms = torch.stack(torch._foreach_norm(grads))
    weight_norms = torch.stack(torch._foreach_norm(weights)).clamp(min=MIN_WEIGHT_NORM)
    factors = (MAX_GRAD_RATIO * weight_norms / grad_norms).clamp(max=1)
    torch._foreach_mul_(grads, factors.unbind())
    return grad_norms.norm()


def train(args: Args) -> dict[str, float]:
    # setup
    run = common.Run(ALGO, args, LIMITS)
    args, device = run.args, run.device
    check_args(args)
    make = env_maker(args)
    envs = [make(args.env_id) for _ in range(args.num_envs)]
    obs_shape, num_actions, _ = common.check_spaces(envs[0], actions="discrete", images=True)
    num_steps, num_last = args.sequence_length, args.imagine_last or args.sequence_length  # T, L
    tail = slice(-num_last, None)  # the last L steps of a sequence
    eta = args.policy_entropy_coef
    num_sequences = args.batch_size // num_steps  # B
    schedule = (updates_until(args.total_timesteps, args), args.lr_schedule, args.warmup_updates)
    torch.manual_seed(args.seed)  # for the initial weights
    generator = torch.Generator(device).manual_seed(common.second_seed(args.seed))  # for the rest

    # data
    with common.told_in_one_line(f"buffer_capacity {args.buffer_capacity} is too much memory"):
        buffer = Buffer(args.buffer_capacity, args.num_envs, obs_shape)

    # networks
    networks = build_networks(obs_shape, num_actions, SIZES[args.size])
    model, actor, critic = (network.to(device) for network in networks)
    slow_critic = deepcopy(critic).requires_grad_(False)
    model_opt = torch.optim.Adam(model.parameters(), args.learning_rate, fused=True)
    actor_opt = torch.optim.Adam(actor.parameters(), args.actor_critic_learning_rate, fused=True)
    critic_opt = torch.optim.Adam(critic.parameters(), args.actor_critic_learning_rate, fused=True)
    return_scale = torch.zeros((), device=device)

    # episodes: environment i plays i, i + K, i + 2K, ..; a resumed run replays those it was in
    num_updates, last_update = run.saved.get("num_updates", 0), run.saved.get("last_update", 0)
    episodes = run.saved.get("episodes", list(range(args.num_envs)))
    no_actions = np.empty((args.num_envs, 0))  # K rows of nothing
    episode_actions = [x.tolist() for x in run.saved.get("episode_actions", no_actions)]
    memory = run.saved.get("memory", model.rssm.initial(args.num_envs))
    memory = Memory(*(x.to(device).clone() for x in memory))
    current_obs = np.zeros((args.num_envs, *obs_shape), buffer.columns["obs"].dtype)
    returns_so_far = [0.0] * args.num_envs
    for i, env in enumerate(envs):
        start = common.start_episode(env, args.seed, episodes[i], episode_actions[i])
        current_obs[i], returns_so_far[i] = start
        buffer.add(i, current_obs[i], is_first=True)  # a resumed run loads its own buffer later
    run.check_replay(current_obs)

    # checkpoint: best.pt holds what acts, checkpoint.pt everything that a resumed run needs
    acting = {"model": model, "actor": actor}
    everything = acting | {"critic": critic, "slow_critic": slow_critic, "model_opt": model_opt}
    everything |= {"actor_opt": actor_opt, "critic_opt": critic_opt, "return_scale": return_scale}
    everything |= {"buffer": buffer, "generator": generator}
    num_weights = sum(p.numel() for network in networks for p in network.parameters())
    about = f"{num_weights / 1e6:.1f} million weights; a full replay buffer takes"
    run.start(args.total_timesteps, everything, f"{about} {buffer.num_bytes() / 1e6:,.0f} MB")
    policy = LatentPolicy(model, actor, envs[0].action_space)
    if run.is_fresh:
        run.evaluate(policy, acting, make)
    dreams = None  # what draws them; a run does not need it
    if len(obs_shape) == 3:
        try:
            from benchmark import dreams
        except ImportError:
            run.say("benchmark/dreams.py is missing: no pictures of what the model imagines")

    # loop
    for step in run.steps(stride=args.num_envs):
        # 1. act everywhere. At first all actions are equally likely: the actor's last layer is 0
        memory = act(model, actor, current_obs, memory, partial(sample, generator=generator))
        env_actions = (memory.action.argmax(dim=1) + policy.first_action).tolist()  # [K]
        for i, (env, env_action) in enumerate(zip(envs, env_actions)):
            next_obs, reward, terminated, truncated, info = env.step(env_action)
            played = info.get("played_action", env_action) - policy.first_action  # common.FirstFire
            memory.action[i] = nn.functional.one_hot(torch.tensor(played), num_actions)
            buffer.set_action(i, played)  # into the row of the observation before, so ahead of add
            done = terminated or truncated
            buffer.add(i, next_obs, reward, is_last=done, is_terminal=terminated)
            episode_actions[i].append(env_action)
            returns_so_far[i] += float(reward)
            if done:  # the last observation has its row; the next episode starts with another
                run.log({"charts/episodic_return": returns_so_far[i]})
                episodes[i], episode_actions[i] = episodes[i] + args.num_envs, []
                next_obs, returns_so_far[i] = common.start_episode(env, args.seed, episodes[i])
                buffer.add(i, next_obs, is_first=True)
                for remembered in memory:
                    remembered[i] = 0  # h, z, action: zeros for the new episode
            current_obs[i] = next_obs

        num_due = updates_until(step, args) - num_updates
        for _ in range(num_due):
            num_updates += 1
            factor = common.lr_factor(num_updates, *schedule)
            model_opt.param_groups[0]["lr"] = args.learning_rate * factor
            for opt in (actor_opt, critic_opt):
                opt.param_groups[0]["lr"] = args.actor_critic_learning_rate * factor

            # 2. draw sequences; the action before their first step is not in them: zeros
            batch = buffer.sample(num_sequences, num_steps, generator)
            obs, action_index, reward, is_first, is_last, is_terminal = batch  # [B, T, ...] each
            action = nn.functional.one_hot(action_index, num_actions).float()  # [B, T, A]
            last_action = nn.functional.pad(action[:, :-1], (0, 0, 1, 0))  # [B, T, A]

            # 3. world model: observe, and predict observations, rewards, ends and the next z
            h, z, _ = model.rssm.initial(num_sequences)  # [B, D], [B, S C]
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
            model_norm = clip_per_tensor(model)
            model_opt.step()

            # 4. imagine what the policy would do next, from the last L states of every sequence:
            # features of H + 1 states [N, H + 1, F], and H actions [N, H, A]
            start = [x[:, tail].flatten(0, 1).detach() for x in (h, z)]  # [N, D], [N, S C]
            imagined, imagined_action = imagine(model, actor, *start, args.horizon, generator)
            with torch.no_grad():
                imagined_reward = two_hot_mean(model.reward(imagined))  # [N, H + 1]
                cont = torch.sigmoid(model.cont(imagined).squeeze(2))  # [N, H + 1]
                cont[:, 0] = 1 - is_terminal[:, tail].flatten()  # known: 0 at an end, and so is w
                # w_0 = c_0, w_t = w_{t-1} gamma c_t: how likely it is to get there, discounted
                discount = torch.cat([cont[:, :1], args.gamma * cont[:, 1:-1]], dim=1)  # [N, H]
                weight = discount.cumprod(dim=1)  # [N, H]
                slow_value = two_hot_mean(slow_critic(imagined[:, :-1]))  # [N, H]

            # 5. returns, and how far apart they are: from the 5th to the 95th percentile
            value_logits = critic(imagined)  # [N, H + 1, J]
            value = two_hot_mean(value_logits.detach())  # [N, H + 1]
            lambdas = torch.full_like(value, args.td_lambda)  # [N, H + 1]; the same everywhere
            returns = td_lambda_returns(imagined_reward, cont, value, args.gamma, lambdas)  # [N, H]
            low, high = returns.quantile(0.05), returns.quantile(0.95)
            return_scale.lerp_(high - low, RETURN_SCALE_RATE)

            # 6. critic: on the imagined states; and on the replayed ones, from which imagination
            # started (its t = 0): real rewards, bootstrapped with the imagined returns
            critic_loss = dreamer_critic_loss(value_logits[:, :-1], returns, slow_value, weight)
            replay_logits, replay_slow, bootstrap = (
                x[:, 0].unflatten(0, (-1, num_last)) for x in (value_logits, slow_value, returns)
            )  # [B, L, J], [B, L], [B, L]
            replay_reward, replay_cont = reward[:, tail], 1 - is_terminal[:, tail]  # [B, L] each
            not_last = 1 - is_last[:, tail]  # [B, L]; after a last step comes another episode
            replay_returns = td_lambda_returns(
                replay_reward, replay_cont, bootstrap, args.gamma, args.td_lambda * not_last
            )  # [B, L - 1]
            replay_critic_loss = dreamer_critic_loss(
                replay_logits[:, :-1], replay_returns, replay_slow[:, :-1], not_last[:, :-1]
            )
            critic_opt.zero_grad()
            (critic_loss + args.replay_critic_coef * replay_critic_loss).backward()
            critic_norm = clip_per_tensor(critic)
            critic_opt.step()
            update_target(slow_critic, critic, args.tau)

            # 7. actor: REINFORCE on the actions imagined in 4, with the critic as baseline
            advantage = (returns - value[:, :-1]) / return_scale.clamp(min=1)  # [N, H]
            log_probs = actor(imagined[:, :-1])  # [N, H, A]
            actor_loss = dreamer_actor_loss(log_probs, imagined_action, advantage, weight, eta)
            actor_opt.zero_grad()
            actor_loss.backward()
            actor_norm = clip_per_tensor(actor)
            actor_opt.step()

        # 8. log, if a multiple of log_interval lies between the last step with updates and this
        if num_due > 0:
            if common.is_due(step, args.log_interval, step - last_update):
                scalars = {
                    "charts/learning_rate": model_opt.param_groups[0]["lr"],
                    **{name: loss.mean().item() for name, loss in model_losses.items()},
                    "losses/critic": critic_loss.item(),
                    "losses/replay_critic": replay_critic_loss.item(),
                    "losses/actor": actor_loss.item(),
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
                lower = "--learning-rate or --actor-critic-learning-rate"  # if a loss is NaN
                run.log(scalars, updates=num_updates, lower=lower)
            last_update = step

        # 9. evaluate, once something was learned; save
        is_eval_due = common.is_due(step, args.eval_interval, args.num_envs) and num_updates > 0
        if is_eval_due or step == args.total_timesteps:
            run.evaluate(policy, acting, make)
            if dreams is not None:
                film = dreams.film(dream, policy, make(args.env_id), args.eval_seed)
                strip, _ = dreams.draw(film)
                dreams.save_image(f"{run.folder}/dreams/{step:09}.png", strip)
                run.tensorboard.add_image("eval/dream", strip, step, dataformats="HWC")
        if common.is_due(step, args.checkpoint_interval, args.num_envs) or run.is_last:
            place = {"num_updates": num_updates, "last_update": last_update}
            place |= {"episodes": episodes, "current_obs": current_obs, "memory": tuple(memory)}
            actions = [torch.tensor(x, dtype=torch.int64) for x in episode_actions]
            run.save(everything | place | {"episode_actions": actions})
    return run.finish()


if __name__ == "__main__":
    sys.exit(common.main(ALGO, Args, train, load_policy, evaluate_checkpoint))
