"""What PPO and DQN of Stable-Baselines3 learn from the pixels that algos/dreamer.py learns from, in
half an hour on one core:

    python sb3_pixels.py ppo --seed 1

The environment is that of `dreamer.py --env-id MinAtar/Breakout-v1 --size mini`, made by the same
function: paddle, ball, trail, bricks as 32 x 32 x 4 bytes, 3 actions, some repeated, no time limit.
Dreamer sees one frame at a time and remembers. These two do not remember, and a frame does not
always show where the ball goes (its trail does, but not after a bounce or at the start): they see
the last 4, stacked by VecFrameStack, black before the first.

The network has 3 convolutions (4 x 4, stride 2, ReLU) down to 4 x 4, one hidden layer of 256, and
linear heads; SB3's own needs 36 x 36 pixels. Its weights are channels-last and freed memory is
kept, as in dreamer.py: both only make it faster. What SETTINGS do not say is as SB3 has it.
Learning rates stay constant, since nobody knows how many steps there will be.

Training stops when the minutes are over. They are CPU time of learn(), with one torch thread, so
that a busy machine takes nothing away; evaluations are not counted, nor are imports and the making
of the networks. The policy is evaluated once a minute and at the end, by common.evaluate: 50
episodes with seeds from 10,000, in environments of their own, the most probable (or most valuable)
action, frames stacked as above. Where it ends depends on the speed of the machine: the same seed
does not give the same numbers.

Each evaluation writes <results>/dreamer__MinAtar-Breakout-v1__none__<ppo or dqn>/<seed>/ anew:
metrics.csv as from benchmark/run.py (step: environment steps, seconds: of CPU time) and args.json.
"""

import argparse
import json
import sys
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

import gymnasium as gym
import numpy as np
import stable_baselines3 as sb3
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack, VecTransposeImage
from stable_baselines3.common.vec_env.stacked_observations import StackedObservations
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import common
from algos.dreamer import SIZES, make_env
from benchmark.run import write_metrics
from common import keep_freed_memory

ENV_ID = "MinAtar/Breakout-v1"
ROW = "dreamer__MinAtar-Breakout-v1__none__{}"
NUM_FRAMES = 4
EVAL_EPISODES, EVAL_SEED, EVAL_INTERVAL = 50, 10_000, 60.0  # seconds
FOREVER = 10**9  # steps: the clock ends training
EPSILON_STEPS = 50_000  # of DQN, over which epsilon falls
NUM_ENVS = {"ppo": 8, "dqn": 1}
NETWORK = {"channels": [16, 32, 64], "features_dim": 256}
SETTINGS = {
    "ppo": {
        "n_steps": 128,
        "batch_size": 256,
        "n_epochs": 4,
        "learning_rate": 1e-3,
        "gamma": 0.99,
        "gae_lambda": 0.95,
        "clip_range": 0.2,
        "ent_coef": 0.01,
        "vf_coef": 0.5,
        "max_grad_norm": 0.5,
    },
    "dqn": {
        "buffer_size": 100_000,
        "learning_starts": 2_000,
        "batch_size": 32,
        "learning_rate": 2.5e-4,
        "gamma": 0.99,
        "train_freq": 4,
        "gradient_steps": 1,
        "target_update_interval": 1_000,
        "exploration_initial_eps": 1.0,
        "exploration_final_eps": 0.05,
        "exploration_fraction": EPSILON_STEPS / FOREVER,
        "optimize_memory_usage": True,  # one copy of each observation
        "replay_buffer_kwargs": {"handle_timeout_termination": False},  # nothing is truncated
    },
}

make = partial(make_env, image_size=SIZES["mini"].image_size, from_pixels=False)


class Convolutions(BaseFeaturesExtractor):
    """[N, 16, 32, 32] in [0, 1] -> [N, features_dim]"""

    def __init__(self, space: gym.spaces.Box, channels: list[int], features_dim: int):
        super().__init__(space, features_dim)
        layers = []
        for inner, outer in pairwise([space.shape[0], *channels]):
            layers += [nn.Conv2d(inner, outer, kernel_size=4, stride=2, padding=1), nn.ReLU()]
        width = space.shape[1] // 2 ** len(channels)
        layers += [nn.Flatten(), nn.Linear(channels[-1] * width**2, features_dim), nn.ReLU()]
        self.net = nn.Sequential(*layers)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.net(images)


class Greedy:
    """A policy for common.evaluate: it stacks the frames of all episodes, which start together."""

    def __init__(self, model: sb3.PPO | sb3.DQN, frame_space: gym.spaces.Box):
        self.model, self.frame_space, self.stack = model, frame_space, None

    def reset(self) -> None:
        self.stack = None

    def __call__(self, frames: np.ndarray) -> np.ndarray:
        """[E, 32, 32, 3] -> [E]"""
        num = len(frames)
        if self.stack is None:
            self.stack = StackedObservations(num, NUM_FRAMES, self.frame_space, "last")
            stacked = self.stack.reset(frames)
        else:
            stacked, _ = self.stack.update(frames, np.zeros(num, dtype=bool), [{}] * num)
        images = stacked.transpose(0, 3, 1, 2)  # [E, 16, 32, 32]
        return self.model.predict(images, deterministic=True)[0]


class Clock(BaseCallback):
    """Evaluates once a minute, and ends training when its time is over."""

    def __init__(self, policy: Greedy, limit: float, folder: Path, args: dict):
        super().__init__()
        self.policy, self.limit, self.folder, self.args = policy, limit, folder, args
        self.due, self.rows = min(EVAL_INTERVAL, limit), []

    def _on_training_start(self) -> None:
        self.start = time.process_time()

    def _on_step(self) -> bool:
        seconds = time.process_time() - self.start
        if seconds < self.due:
            return True
        self.evaluate(seconds)
        self.start = time.process_time() - seconds  # as if no time had passed
        self.due = min((seconds // EVAL_INTERVAL + 1) * EVAL_INTERVAL, self.limit)
        return seconds < self.limit

    def evaluate(self, seconds: float) -> None:
        step = self.num_timesteps
        returns = common.evaluate(self.policy, ENV_ID, EVAL_EPISODES, EVAL_SEED, make_env=make)
        for name in ("mean", "std", "min", "max"):
            value = f"{getattr(returns, name)():.7g}"
            row = {"step": step, "seconds": f"{seconds:.3f}", "key": f"eval/return_{name}"}
            self.rows.append(row | {"value": value})
        write_metrics(self.folder, self.rows)
        args = self.args | {"total_timesteps": step, "cpu_seconds": round(seconds, 3)}
        temporary = self.folder / "args.json.tmp"
        temporary.write_text(json.dumps(args, indent=2))
        temporary.rename(self.folder / "args.json")
        episodes = [info["r"] for info in self.model.ep_info_buffer]  # the last 100
        print(
            f"{step:>9,} steps  {seconds:5.0f} s of CPU  {step / seconds:.0f} steps/s"
            f"  training return {np.mean(episodes):.2f}"
            f"  eval return {returns.mean():.2f} +- {returns.std():.2f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("algo", choices=list(SETTINGS))
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmark" / "results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()

    algo, num_envs = options.algo, NUM_ENVS[options.algo]
    envs = DummyVecEnv([lambda: Monitor(make(ENV_ID))] * num_envs)
    frame_space = envs.observation_space
    envs = VecTransposeImage(VecFrameStack(envs, NUM_FRAMES, "last"))
    model = {"ppo": sb3.PPO, "dqn": sb3.DQN}[algo](
        "CnnPolicy",
        envs,
        policy_kwargs={
            "features_extractor_class": Convolutions,
            "features_extractor_kwargs": NETWORK,
            "net_arch": [],  # heads are linear
        },
        seed=options.seed,
        device="cpu",
        **SETTINGS[algo],
    )
    model.policy.to(memory_format=torch.channels_last)
    network = model.policy if algo == "ppo" else model.q_net  # DQN has a second one, for targets
    args = {
        "algo": algo,
        "seed": options.seed,
        "env_id": ENV_ID,
        "minutes": options.minutes,
        "num_envs": num_envs,
        "num_frames": NUM_FRAMES,
        **NETWORK,
        "num_weights": sum(p.numel() for p in network.parameters()),
        **SETTINGS[algo],
        "eval_episodes": EVAL_EPISODES,
        "eval_seed": EVAL_SEED,
        "torch_threads": torch.get_num_threads(),
        "stable_baselines3": sb3.__version__,
        "torch": torch.__version__,
    }
    if algo == "dqn":  # the fraction of a number of steps that means nothing
        args["exploration_steps"] = round(args.pop("exploration_fraction") * FOREVER)
    print(f"{algo}: {args['num_weights']:,} weights", flush=True)
    folder = options.results / ROW.format(algo) / str(options.seed)
    clock = Clock(Greedy(model, frame_space), 60 * options.minutes, folder, args)
    model.learn(FOREVER, clock, log_interval=None)


if __name__ == "__main__":
    main()
