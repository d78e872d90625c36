r"""FQF: Fully parameterised Quantile Function. Online RL, discrete actions, vectors or images.

Paper: "Fully Parameterized Quantile Function for Distributional Reinforcement Learning", D. Yang,
L. Zhao, Z. Lin, T. Qin, J. Bian, T. Liu, 2019, arXiv:1911.02140.

Idea: DQN that learns the distribution of returns, not only its mean. F(tau) is the return that is
not exceeded with probability tau; a staircase of N stairs approximates it. QR-DQN fixes where
stairs begin and end (the fractions, 1/N apart) and learns how high they are (the quantiles). FQF
learns both: a small network proposes, for each state, the fractions at which the area between F
and the staircase, which is the 1-Wasserstein distance W1, is smallest.

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
    - A target counts as much as its stair is wide. Counted alike, as in the paper, targets are
      another distribution than the staircase: Q and the spread are biased.
    - Targets lie at the fractions of the next state: the pass that chooses a' has them already.
    - Targets add up n_steps rewards, not 1, of the actions as they were taken: a small bias.
    - Fractions depend on the state alone, and k counts from 1, as in the authors' code.
    - Defaults fit CartPole. At the paper's rate of 2.5e-9 fractions would not move in such a run.
    - Atari: rewards are clipped to their sign for training, as usual; FIRE serves the ball.

Shapes: B batch, N fractions, A actions, D features psi(s), H hidden, O observation, K stacked
frames, C channels, W width, E evaluation episodes

Run it, resume it; and the paper's set, for a GPU and days (see fqf.md):
    python algos/fqf.py --env-id CartPole-v1
    python algos/fqf.py --resume runs/<run>
    python algos/fqf.py --env-id ALE/Breakout-v5 --total-timesteps 50000000 --batch-size 32 \
        --hidden-dim 512 --learning-rate 5e-5 --fraction-learning-rate 2.5e-9 --num-fractions 32 \
        --n-steps 1 --no-weight-targets-by-fraction --target-interval 2500 --epsilon-final 0.01 \
        --epsilon-steps 250000 --learning-starts 50000 --buffer-capacity 1000000 \
        --checkpoint-interval 1000000
"""

import contextlib
import io
import math
import sys
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import tyro

# ---- arguments


@dataclass
class Args:
    # task
    env_id: str = "CartPole-v1"  # Gymnasium environment
    seed: int = 1  # same seed, same machine: same numbers to the last bit
    # budget
    total_timesteps: int = 50_000  # budget in environment steps
    # optimisation
    batch_size: int = 128  # transitions per update
    gamma: float = 0.99  # discount
    learning_rate: float = 5e-4  # step size of Adam, for every network without a flag of its own
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"  # the last two fall to 0
    warmup_updates: int = 0  # the learning rate first climbs from 0 over this many updates
    hidden_dim: int = 128  # width of the hidden layers, in every network
    # evaluation and stops
    eval_interval: int = 2_500  # updates (online: environment steps) between evaluations
    eval_episodes: int = 10  # episodes per evaluation
    eval_seed: int = 10_000  # evaluation episode i starts from eval_seed + i
    target_return: float | None = None  # stop when an evaluation's mean return gets there
    patience: int | None = None  # stop after this many evaluations without a better one
    # the run
    checkpoint_interval: int = 10_000  # updates (or steps) between saves; Ctrl-C, SIGTERM save, too
    log_interval: int = 500  # updates (or steps) between entries in the logs
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
    # FQF only
    num_fractions: int = 16  # N, stairs of a distribution
    num_cosines: int = 64  # features of a fraction
    kappa: float = 1.0  # of the Huber loss: smaller errors count squared, larger ones linearly
    learn_fractions: bool = True  # False: they stay 1/N apart: QR-DQN, with a cosine network
    fraction_learning_rate: float = 1e-5  # of the proposed fractions (RMSProp)
    entropy_coef: float = 1e-3  # how much the fractions are drawn towards 1/N apart
    weight_targets_by_fraction: bool = True  # a target counts as its stair is wide; False: alike
    double_q: bool = False  # the online network chooses a', the target network values it
    n_steps: int = 3  # rewards that a target adds up before it bootstraps
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


LIMITS = {  # rule: flags; common.LIMITS has those of the shared ones
    "> 0": "num_fractions num_cosines n_steps epsilon_steps priority_beta_steps",
    "in (0, inf)": "kappa fraction_learning_rate",
    "in [0, inf)": "entropy_coef",
    "in [0, 1]": "epsilon_final priority_alpha priority_beta",
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

ALGO = "fqf"
GAMES = ("ALE/", "MinAtar/")  # whose images make_env prepares
STACK_SIZE = 4  # frames in an observation of an Atari game


def check_args(args: Args) -> None:
    """Rules between flags."""
    room = STACK_SIZE + args.n_steps
    if args.buffer_capacity <= room:
        rule = f"> {room}, for one transition"
        raise InputError(f"buffer_capacity must be {rule}, got {args.buffer_capacity}")
    if count_blocks(args) == 0:
        spent = f"total_timesteps {args.total_timesteps} is spent before the first update"
        raise InputError(f"{spent}: lower --learning-starts or --train-frequency")


def count_blocks(args: Args) -> int:
    """Blocks of updates in the whole run: one per train_frequency, after the random steps."""
    last, frequency = args.total_timesteps, args.train_frequency
    return last // frequency - min(last, args.learning_starts) // frequency


class FreshMinAtar(gym.Wrapper):
    """Forget the last action at a reset. MinAtar repeats it at times, so that an episode would not
    follow from its seed and actions alone. Render bytes: as a video MinAtar's floats are black."""

    def reset(self, **kwargs):
        self.unwrapped.game.last_action = 0
        return self.env.reset(**kwargs)

    def render(self):
        return (255 * self.env.render()).astype(np.uint8)


def make_env(env_id: str, **kwargs) -> gym.Env:
    """Games show images, channels first; other environments are as they are."""
    try:
        if env_id.startswith("ALE/"):
            return make_atari(env_id, **kwargs)
        if env_id.startswith("MinAtar/"):
            return make_minatar(env_id, **kwargs)
        return common.make_env(env_id, **kwargs)
    except ImportError as error:
        packages = "pip install ale-py minatar opencv-python-headless"
        raise InputError(f"{env_id}: {error.name} is missing: {packages}") from None
    except ValueError as error:  # a game without NOOP cannot idle at the start
        raise InputError(f"cannot play {env_id}: {common.one_line(error)}") from None


def make_atari(env_id: str, **kwargs) -> gym.Env:
    """As usual: up to 30 idle frames at the start, every action lasts 4 frames, grey images, the
    last 4 are an observation. -> uint8 [K, 84, 84]"""
    import ale_py  # registers the games
    import cv2  # noqa: F401  AtariPreprocessing resizes images with it

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    env = common.make_env(env_id, frameskip=1, obs_type="grayscale", **kwargs)
    env = gym.wrappers.AtariPreprocessing(env, noop_max=30, frame_skip=4, screen_size=84)
    if "FIRE" in env.unwrapped.get_action_meanings():
        env = common.FirstFire(env)
    return gym.wrappers.FrameStackObservation(env, STACK_SIZE)


def make_minatar(env_id: str, **kwargs) -> gym.Env:
    """One channel for each kind of object. bool [10, 10, C] -> uint8 [C, 10, 10]"""
    from minatar.gym import register_envs

    if env_id not in gym.registry:
        register_envs()
    env = FreshMinAtar(common.make_env(env_id, disable_env_checker=True, **kwargs))
    height, width, num_channels = env.observation_space.shape
    space = gym.spaces.Box(0, 255, (num_channels, height, width), np.uint8)
    return gym.wrappers.TransformObservation(
        env, lambda obs: 255 * obs.transpose(2, 0, 1).astype(np.uint8), space
    )


# ---- networks


class QuantileNetwork(nn.Module):
    """F(tau) = head(psi(s) * phi(tau))_a: the return of a in s that is not exceeded with
    probability tau. psi is the torso, phi the embedding, the head the two layers after them."""

    def __init__(
        self, obs_shape: tuple[int, ...], num_actions: int, hidden_dim: int, num_cosines: int
    ):
        super().__init__()
        relu = nn.ReLU(inplace=True)
        if len(obs_shape) == 1:
            layers = [nn.Linear(obs_shape[0], hidden_dim), relu]
            layers += [nn.Linear(hidden_dim, hidden_dim), relu]
        elif obs_shape[1:] == (84, 84):  # Atari: the convolutions of DQN's paper in Nature
            layers = [nn.Conv2d(obs_shape[0], 32, kernel_size=8, stride=4), relu]
            layers += [nn.Conv2d(32, 64, kernel_size=4, stride=2), relu]
            layers += [nn.Conv2d(64, 64, kernel_size=3), relu, nn.Flatten()]
        else:  # MinAtar: the network of its paper
            num_channels, height, width = obs_shape
            layers = [nn.Conv2d(num_channels, 16, kernel_size=3), relu, nn.Flatten()]
            layers += [nn.Linear(16 * (height - 2) * (width - 2), hidden_dim), relu]
        self.torso = nn.Sequential(*layers)
        self.feature_dim = self.torso(torch.zeros(1, *obs_shape)).shape[1]  # D
        self.register_buffer("frequencies", math.pi * torch.arange(1, num_cosines + 1))  # pi k
        self.embedding = nn.Linear(num_cosines, self.feature_dim)
        self.hidden = nn.Linear(self.feature_dim, hidden_dim)
        self.output = nn.Linear(hidden_dim, num_actions)

    def features(self, obs: torch.Tensor) -> torch.Tensor:
        """psi(s). [B, O] or uint8 images [B, C, W, W] -> [B, D]"""
        if obs.dtype == torch.uint8:
            obs = obs.float() / 255
        return self.torso(obs)

    def forward(
        self, features: torch.Tensor, tau: torch.Tensor, action: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[B, D], [B, N] -> of all actions [B, N, A]; with actions [B], of those alone [B, N]"""
        cosines = torch.cos(tau[:, :, None] * self.frequencies)  # [B, N, cosines]
        phi = torch.relu(self.embedding(cosines))  # [B, N, D]
        hidden = torch.relu(self.hidden(features[:, None] * phi))  # [B, N, H]
        if action is None:
            return self.output(hidden)  # [B, N, A]
        # one row of the output layer per transition: the other actions would be thrown away
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
        width = log_width.exp()  # tau_{i+1} - tau_i
        inner = width.cumsum(dim=1)[:, :-1]  # [B, N - 1]; the last sum is 1, but for rounding
        tau = nn.functional.pad(inner, (1, 0), value=0.0)  # [B, N]
        tau = nn.functional.pad(tau, (0, 1), value=1.0)  # [B, N + 1]
        return tau, -(width * log_width).sum(dim=1)  # [B, N + 1], [B]


def make_networks(
    args: Args, obs_shape: tuple[int, ...], num_actions: int, device: torch.device
) -> tuple[QuantileNetwork, FractionProposal]:
    network = QuantileNetwork(obs_shape, num_actions, args.hidden_dim, args.num_cosines)
    proposal = FractionProposal(network.feature_dim, args.num_fractions, args.learn_fractions)
    return network.to(device), proposal.to(device)


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
    features = network.features(obs)  # [B, D]
    tau, _ = proposal(features)  # [B, N + 1]
    return tau, network(features, midpoints(tau))


# ---- buffer


class Buffer:
    """A ring of frames in the CPU's memory, each stored once: a slot holds the newest frame of an
    observation, and the action, reward and end that followed; the next slot, the frame after that.

    The priority of a slot is 1 without --prioritized, and 0 if the slot must not be drawn: at the
    newest frame and at the last of an episode no action was taken; in a ring that is full, the
    oldest slots have lost frames of their stacks.
    """

    def __init__(self, capacity: int, obs_shape: tuple[int, ...], stack_size: int):
        self.obs_shape, self.stack_size = obs_shape, stack_size
        frame_shape = obs_shape[1:] if stack_size > 1 else obs_shape
        dtype = np.uint8 if len(obs_shape) == 3 else np.float32
        self.columns = {
            "frame": np.empty((capacity, *frame_shape), dtype),
            "age": np.zeros(capacity, np.int64),  # steps since the episode began
            "action": np.zeros(capacity, np.int64),
            "reward": np.zeros(capacity, np.float32),
            "terminated": np.zeros(capacity, bool),
            "done": np.zeros(capacity, bool),  # terminated, or truncated
            "priority": np.zeros(capacity),
        }
        self.capacity, self.size, self.position = capacity, 0, 0  # position: of the next frame
        self.max_priority = 1.0

    def add_frame(self, obs: np.ndarray, age: int) -> None:
        slot = self.position
        self.columns["frame"][slot] = obs[-1] if self.stack_size > 1 else obs
        self.columns["age"][slot] = age
        self.position, self.size = (slot + 1) % self.capacity, min(self.size + 1, self.capacity)
        # no draws of this slot, which has no action yet, nor of the K - 1 after it: in a full ring
        # they are the oldest, and the frame that was overwritten here is part of their stacks
        no_draws = (slot + np.arange(self.stack_size)) % self.capacity  # [K]
        self.columns["priority"][no_draws] = 0

    def add_step(
        self, action: int, reward: float, terminated: bool, truncated: bool, next_obs: np.ndarray
    ) -> None:
        """What was done at the newest frame, and the frame that followed."""
        slot, columns = (self.position - 1) % self.capacity, self.columns
        columns["action"][slot], columns["reward"][slot] = action, reward
        columns["terminated"][slot], columns["done"][slot] = terminated, terminated or truncated
        columns["priority"][slot] = self.max_priority  # its error is not known yet
        self.add_frame(next_obs, columns["age"][slot] + 1)

    def stack(self, slots: np.ndarray) -> torch.Tensor:
        """Observations as the environment gave them: before the first frame of an episode, that
        frame again. [B] -> [B, *obs_shape]"""
        back = np.arange(self.stack_size)[::-1]  # [K]: K - 1, .., 1, 0 frames
        back = np.minimum(back, self.columns["age"][slots][:, None])  # [B, K]
        frames = self.columns["frame"][(slots[:, None] - back) % self.capacity]  # [B, K, ..]
        return torch.from_numpy(frames.reshape(len(slots), *self.obs_shape))

    def draw(self, batch_size: int, generator: torch.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Slot i with probability P_i = p_i / sum p. -> slots [B], P_i [B]"""
        priority = self.columns["priority"][: self.size]
        ends = priority.cumsum()  # slot i has a stretch p_i long, which ends here
        # stratified: one draw from each of B equal parts
        uniform = torch.rand(batch_size, dtype=torch.float64, generator=generator).numpy()
        place = (np.arange(batch_size) + uniform) / batch_size * ends[-1]  # [B]
        place = np.minimum(place, np.nextafter(ends[-1], 0))  # it could be rounded up to the end
        slots = np.searchsorted(ends, place, side="right")  # [B]
        return slots, priority[slots] / ends[-1]

    def sample(
        self, batch_size: int, n_steps: int, gamma: float, beta: float, generator: torch.Generator
    ) -> tuple:
        """Transitions of m steps: n_steps, or fewer if the episode, or the buffer, ends before.
        -> slots [B], importance weights [B], obs [B, O], action [B], sum_k gamma^k r_k [B],
        gamma^m [B], next_obs [B, O], terminated [B]"""
        columns, newest = self.columns, (self.position - 1) % self.capacity
        slots, probability = self.draw(batch_size, generator)  # [B], [B]
        # importance weights make up for being drawn more often; at most 1: no step gets larger
        weight = probability**-beta  # [B]
        weight = weight / weight.max()

        # of one step; then one more as long as the episode goes on and the buffer knows it
        last, reward = slots, columns["reward"][slots].astype(np.float64)  # [B], [B]
        discount = np.full(batch_size, gamma)  # [B]
        for _ in range(n_steps - 1):
            after = (last + 1) % self.capacity  # [B]
            goes_on = ~columns["done"][last] & (after != newest)  # [B]
            last = np.where(goes_on, after, last)
            reward += goes_on * discount * columns["reward"][last]
            discount = np.where(goes_on, gamma * discount, discount)

        obs, next_obs = self.stack(slots), self.stack((last + 1) % self.capacity)
        action = torch.from_numpy(columns["action"][slots])
        weight, reward, discount, terminated = (
            torch.from_numpy(x.astype(np.float32))
            for x in (weight, reward, discount, columns["terminated"][last])
        )
        return slots, weight, obs, action, reward, discount, next_obs, terminated

    def set_priority(self, slots: np.ndarray, priority: np.ndarray) -> None:
        self.columns["priority"][slots] = priority
        self.max_priority = max(self.max_priority, priority.max().item())

    def state_dict(self) -> dict:
        """What a checkpoint needs: the filled part, not a copy, and not the capacity."""
        parts = {name: column[: self.size] for name, column in self.columns.items()}
        state = {name: torch.from_numpy(part) for name, part in parts.items()}
        return state | {"max_priority": self.max_priority, "position": self.position}

    def load_state_dict(self, state: dict) -> None:
        self.size, self.position = len(state["age"]), state["position"]
        self.max_priority = state["max_priority"]
        for name, column in self.columns.items():
            column[: self.size] = state[name].numpy()


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
    """sum_i g_i tau_i, whose gradient in tau_i is g_i = dW1/dtau_i; its own value means nothing.
    tau_i [B, N + 1], F(tau_hat_i) [B, N], F(tau_i) of the inner tau_i [B, N - 1] -> [B]

    If tau_i rises, the stair below takes over from the stair above: the area grows by how far the
    lower one is from F(tau_i), and shrinks by how far the upper one was.
    """
    assert tau.shape[1] == quantiles.shape[1] + 1 == edge_quantiles.shape[1] + 2
    assert len(tau) == len(quantiles) == len(edge_quantiles) and edge_quantiles.dim() == 2
    below, above = quantiles[:, :-1], quantiles[:, 1:]  # F(tau_hat_{i-1}), F(tau_hat_i)
    gradient = (edge_quantiles - below).abs() - (edge_quantiles - above).abs()  # [B, N - 1]
    return (gradient.detach() * tau[:, 1:-1]).sum(dim=1)


# ---- checkpoint


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


def load_networks(path: str, **overrides) -> tuple:
    """Of a checkpoint. -> network, proposal, environment, device"""
    checkpoint = common.load_checkpoint(path, ALGO, Args, overrides.get("env_id"))
    args = replace(Args(**checkpoint["args"]), **overrides)
    env, device = make_env(args.env_id), common.pick_device(args.device)
    obs_shape, num_actions, _ = common.check_spaces(env, "discrete", args.env_id.startswith(GAMES))
    network, proposal = make_networks(args, obs_shape, num_actions, device)
    network.load_state_dict(checkpoint["network"])
    proposal.load_state_dict(checkpoint["proposal"])
    return network, proposal, env, device


def load_policy(path: str, **overrides) -> common.Policy:
    """The policy of a checkpoint: a batch of obs -> actions. `overrides` are flags, e.g. device."""
    network, proposal, env, device = load_networks(path, **overrides)
    return make_policy(network, proposal, env.action_space, device)


def evaluate_checkpoint(args: Args) -> dict[str, float]:
    """--evaluate, with --plot: a picture of the distributions in one episode."""
    result = common.evaluate_checkpoint(ALGO, load_policy, args, make_env)
    if args.plot:
        try:
            from benchmark.distributions import plot_episode  # draws; a run does not need it
        except ImportError:
            raise InputError("--plot needs benchmark/distributions.py of the repository") from None
        path = str(Path(args.evaluate).with_name("distributions.png"))
        plot_episode(args.evaluate, path, args.eval_seed, device=args.device)
        if not args.quiet:
            print(f"drawn in {path}")
    return result


# ---- training

ADAM_EPS = 0.01  # over the batch size, as by the authors
RMSPROP = {"alpha": 0.95, "eps": 1e-5}  # theirs is centred, too, and has eps under the root
PRIORITY_EPS = 1e-6  # so that every transition can be drawn again


def train(args: Args) -> dict[str, float]:
    # setup
    run = common.Run(ALGO, args, LIMITS)
    args, device = run.args, run.device
    check_args(args)
    env, is_atari = make_env(args.env_id), args.env_id.startswith("ALE/")
    obs_shape, num_actions, _ = common.check_spaces(env, "discrete", args.env_id.startswith(GAMES))
    first_action = int(env.action_space.start)  # networks and buffer count actions from 0
    total_updates = count_blocks(args)  # a block is one update here
    torch.manual_seed(args.seed)  # for the initial weights
    generator = torch.Generator().manual_seed(common.second_seed(args.seed))  # for the rest

    # data
    with common.told_in_one_line(f"buffer_capacity {args.buffer_capacity} is too much memory"):
        buffer = Buffer(args.buffer_capacity, obs_shape, STACK_SIZE if is_atari else 1)

    # networks
    network, proposal = make_networks(args, obs_shape, num_actions, device)
    target_network = deepcopy(network)
    eps = ADAM_EPS / args.batch_size
    quantile_opt = torch.optim.Adam(network.parameters(), args.learning_rate, eps=eps, fused=True)
    fraction_opt = torch.optim.RMSprop(proposal.parameters(), lr=0.0, **RMSPROP)  # lr: in the loop
    if args.compile:
        for each in (network, target_network):
            each.compile()

    # episode: a resumed run plays the one again that it was in
    num_updates, episode = run.saved.get("num_updates", 0), run.saved.get("episode", 0)
    episode_actions = [action.item() for action in run.saved.get("episode_actions", ())]
    current_obs, episode_return = common.start_episode(env, args.seed, episode, episode_actions)
    run.check_replay(current_obs)

    # checkpoint: best.pt holds what acts, checkpoint.pt everything that a resumed run needs
    acting = {"network": network, "proposal": proposal}
    everything = acting | {"target_network": target_network, "quantile_opt": quantile_opt}
    everything |= {"fraction_opt": fraction_opt, "buffer": buffer, "generator": generator}
    num_bytes = sum(column.nbytes for column in buffer.columns.values())
    about = f"a full replay buffer takes {num_bytes / 1e6:,.0f} MB"
    run.start(args.total_timesteps, everything, about)
    policy = make_policy(network, proposal, env.action_space, device)
    if run.is_fresh:
        buffer.add_frame(current_obs, age=0)
        run.evaluate(policy, acting, make_env)

    # loop: step is 1, 2, .. total, or ends early by a stop
    for step in run.steps():
        # 1. act, at random with probability epsilon, else with the largest Q; remember
        is_random = step <= args.learning_starts
        epsilon = 1 - (1 - args.epsilon_final) * min(1, step / args.epsilon_steps)
        if is_random or torch.rand((), generator=generator) < epsilon:
            action = torch.randint(num_actions, (), generator=generator).item() + first_action
        else:
            action = policy(current_obs[None]).item()
        episode_actions.append(action)
        next_obs, reward, terminated, truncated, info = env.step(action)
        action = info.get("played_action", action)  # a wrapper may have played another: FirstFire
        # of an Atari reward only the sign is learned from: then one kappa fits all games
        learned_reward = float(np.sign(reward) if is_atari else reward)
        buffer.add_step(action - first_action, learned_reward, terminated, truncated, next_obs)
        current_obs, episode_return = np.array(next_obs), episode_return + float(reward)
        if terminated or truncated:
            run.log({"charts/episodic_return": episode_return})
            episode, episode_actions = episode + 1, []
            current_obs, episode_return = common.start_episode(env, args.seed, episode)
            buffer.add_frame(current_obs, age=0)

        if not is_random and step % args.train_frequency == 0:
            num_updates += 1
            factor = common.lr_factor(
                num_updates, total_updates, args.lr_schedule, args.warmup_updates
            )
            quantile_opt.param_groups[0]["lr"] = args.learning_rate * factor
            fraction_opt.param_groups[0]["lr"] = args.fraction_learning_rate * factor

            # 2. draw a batch; beta rises to 1, since a bias matters most in the end
            progress = min(1, step / args.priority_beta_steps)
            beta = args.priority_beta + (1 - args.priority_beta) * progress
            slots, *rest = buffer.sample(args.batch_size, args.n_steps, args.gamma, beta, generator)
            batch = [tensor.to(device) for tensor in rest]
            weight, obs, action, reward, discount, next_obs, terminated = batch

            # 3. targets: the staircase of the best action in the next state
            with torch.no_grad():
                # [B, N + 1], [B, N, A]
                next_tau, next_quantiles = staircase(target_network, proposal, next_obs)
                if args.double_q:
                    next_q = action_values(*staircase(network, proposal, next_obs))  # [B, A]
                else:
                    next_q = action_values(next_tau, next_quantiles)  # [B, A]
                next_action = next_q.argmax(dim=1)  # [B]
                rows = torch.arange(args.batch_size, device=device)  # [B]
                next_quantiles = next_quantiles[rows, :, next_action]  # [B, N]
                target = quantile_target(reward, discount, terminated, next_quantiles)  # [B, N]
                if args.weight_targets_by_fraction:
                    target_weight = next_tau.diff(dim=1)  # [B, N]
                else:
                    target_weight = torch.full_like(target, 1 / args.num_fractions)  # [B, N]

            # 4. quantiles, at the mid-points and, for the fractions, at the inner edges
            features = network.features(obs)  # [B, D]
            tau, entropy = proposal(features)  # [B, N + 1], [B]
            tau_hat = midpoints(tau)  # [B, N]
            quantiles = network(features, tau_hat, action)  # [B, N]
            with torch.no_grad():
                edge_quantiles = network(features, tau[:, 1:-1], action)  # [B, N - 1]

            # 5. fractions: lower W1, keep some entropy; only the proposal learns from it
            loss = fraction_loss(tau, quantiles, edge_quantiles)  # [B]
            proposal_loss = (weight * loss).mean() - args.entropy_coef * entropy.mean()
            if args.learn_fractions:
                fraction_opt.zero_grad()
                proposal_loss.backward()
                fraction_opt.step()

            # 6. quantiles: regress on the targets; only the network learns from it
            loss = quantile_huber_loss(quantiles, tau_hat, target, target_weight, args.kappa)  # [B]
            quantile_loss = (weight * loss).mean()
            quantile_opt.zero_grad()
            quantile_loss.backward()
            quantile_opt.step()

            # 7. priorities, and now and then the target network
            if args.prioritized:
                td_error = (target[:, None, :] - quantiles.detach()[:, :, None]).abs()  # [B, N, N]
                td_error = (td_error * target_weight[:, None, :]).sum(dim=2).mean(dim=1)  # [B]
                priority = td_error.cpu().numpy()
                buffer.set_priority(slots, (priority + PRIORITY_EPS) ** args.priority_alpha)
            if num_updates % args.target_interval == 0:
                target_network.load_state_dict(network.state_dict())

            # 8. log the first update at or after every multiple of log_interval
            if common.is_due(step, args.log_interval, stride=args.train_frequency):
                quantiles, width = quantiles.detach(), tau.detach().diff(dim=1)  # [B, N], [B, N]
                q = (width * quantiles).sum(dim=1)  # [B]
                scalars = {
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
                    scalars["stats/quantile_crossing"] = falls.float().mean().item()
                if args.prioritized:
                    scalars["stats/priority_max"] = buffer.max_priority
                    scalars["stats/priority_beta"] = beta
                    scalars["stats/importance_mean"] = weight.mean().item()
                rates = "--learning-rate or --fraction-learning-rate"  # if a loss is NaN
                run.log(scalars, updates=num_updates, lower=rates)

        # 9. evaluate, but not while steps are random and nothing changes; save
        if (step % args.eval_interval == 0 and not is_random) or step == args.total_timesteps:
            run.evaluate(policy, acting, make_env)
        if step % args.checkpoint_interval == 0 or run.is_last:
            place = {"num_updates": num_updates, "episode": episode, "current_obs": current_obs}
            run.save(everything | place | {"episode_actions": np.array(episode_actions, dtype=int)})
    return run.finish()


if __name__ == "__main__":
    sys.exit(common.main(ALGO, Args, train, load_policy, evaluate_checkpoint))
