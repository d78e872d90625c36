"""python ours_dreamer.py dreamer: algos/dreamer.py as a user runs it, that is train() itself, with
its replay and its logs; without evaluations and checkpoints. An update of everything counts: world
model, imagination, critic, slow critic, actor.

16 sequences x 64 steps of noise as images of 64 x 64 x 3, 6 actions, --size small (h 512, z
16 x 16, units 256, channels 16, 32, 64, 128), imagination from all 1,024 states, 15 steps. One
environment takes one step per update, which is about 1 % of the time.
"""

import sys
import tempfile
from pathlib import Path

import gymnasium as gym
import numpy as np
from timing import ARGS, marks_at_entries, report

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from algos import dreamer

if ARGS.algo != "dreamer":
    raise SystemExit(f"ours_dreamer.py has no setting {ARGS.algo!r}")
SEQUENCES, LENGTH, WARMUP = 16, 64, 1


class Noise(gym.Env):
    """Nothing to learn, and nothing to wait for. An episode has 50 steps."""

    observation_space = gym.spaces.Box(0, 255, (64, 64, 3), np.uint8)
    action_space = gym.spaces.Discrete(6)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.np_random.integers(256, size=(64, 64, 3), dtype=np.uint8), {}

    def step(self, action):
        self.time += 1
        obs = self.np_random.integers(256, size=(64, 64, 3), dtype=np.uint8)
        return obs, float(self.time % 7 == 0), self.time == 50, False, {}


gym.register("Noise-v0", Noise)
num_updates = 0


def is_mark(step: int) -> bool:
    """After the warm-up, once per window."""
    global num_updates
    num_updates += 1
    return num_updates >= WARMUP and (num_updates - WARMUP) % ARGS.updates == 0


marks = marks_at_entries("losses/actor", is_mark)
with tempfile.TemporaryDirectory() as folder:
    dreamer.train(
        dreamer.Args(  # what the peer shares is written out: it must not follow our defaults
            env_id="Noise-v0",
            size="small",
            batch_size=SEQUENCES * LENGTH,
            sequence_length=LENGTH,
            imagine_last=None,
            horizon=15,
            num_envs=1,
            learning_starts=LENGTH,
            replay_ratio=SEQUENCES * LENGTH,  # one update per step
            total_timesteps=LENGTH + WARMUP + ARGS.windows * ARGS.updates,
            log_interval=1,
            eval_interval=10**9,
            eval_episodes=1,
            checkpoint_interval=10**9,
            run_dir=f"{folder}/run",
            device="cpu",
            torch_threads=ARGS.threads,
            quiet=True,
        )
    )
report(marks)
