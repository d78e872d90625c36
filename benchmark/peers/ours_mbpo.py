"""python ours_mbpo.py SETTING: a piece of algos/mbpo.py, by the functions that
its loop calls, or by the loop itself. 17 observations and 6 actions, buffers of 100,000 rows.

"mbpo-model": a step of the ensemble, 7 x 4 x 200, 256 rows each. A window is one epoch of
fit_model(): with its scales, its bootstrap, its held-out rows and its snapshots.
"mbpo-rollout": one transition of 10,000 in a call, one step from each start, 5 elites, into the
buffer; with a termination function.
"mbpo-sac": an update of actor, 2 critics, temperature and targets, 2 x 256, batch 256, of which 12
rows are real; 20 updates per step of an environment that does nothing, in train() itself.
"""

import sys
import tempfile
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from timing import ARGS, clock, marks_at_entries, measure, report

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import common
from algos import mbpo

OBS, ACTION, ROWS, ROLLOUTS, UPDATES_PER_STEP = 17, 6, 100_000, 10_000, 20
CPU = torch.device("cpu")


class StillEnv(gym.Env):
    observation_space = gym.spaces.Box(-np.inf, np.inf, (OBS,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (ACTION,), np.float32)

    def reset(self, seed=None, options=None):
        return np.zeros(OBS, np.float32), {}

    def step(self, action):
        return np.zeros(OBS, np.float32), 0.0, False, False, {}


def full_buffer(num_rows: int) -> mbpo.Buffer:
    buffer = mbpo.Buffer(num_rows, OBS, ACTION, CPU)
    rows = torch.randn(num_rows, sum(buffer.widths))
    rows[:, -2:] = 0
    buffer.add(rows)
    return buffer


common.keep_freed_memory()
generator = torch.Generator().manual_seed(0)
model = mbpo.Dynamics(7, 5, OBS, ACTION, 200, learns_end=False)

if ARGS.algo == "mbpo-model":
    args = mbpo.Args(max_model_updates=1, model_batch_size=256)
    num_held_out = 5_000  # fit_model holds out a fifth of the rows, but no more than these
    assert ARGS.updates * 256 >= 4 * num_held_out
    real = full_buffer(ARGS.updates * 256 + num_held_out)
    mbpo.fit_model(model, full_buffer(20 * 256), 0, 1e-3, args, generator)  # warms up
    marks = [clock()]
    for _ in range(ARGS.windows):
        mbpo.fit_model(model, real, 0, 1e-3, args, generator)
        marks.append(clock())
    report(marks)
elif ARGS.algo == "mbpo-rollout":
    actor = mbpo.GaussianActor(OBS, ACTION, [256, 256])
    real, imagined = full_buffer(ROWS), full_buffer(ROWS)

    def update() -> None:
        obs = real.sample(1, ROLLOUTS, generator)[0, :, :OBS]
        tables = mbpo.rollout(model, actor, mbpo.TERMINATION["Hopper-v5"], obs, 1, generator)
        imagined.add(torch.cat(tables))

    measure(update, ROLLOUTS)
elif ARGS.algo == "mbpo-sac":
    marks = marks_at_entries("losses/actor")
    gym.register("Still-v0", StillEnv, max_episode_steps=1000)
    steps = ARGS.updates // UPDATES_PER_STEP  # of a window; the first one warms up
    with tempfile.TemporaryDirectory() as folder:
        mbpo.train(
            mbpo.Args(
                env_id="Still-v0",
                total_timesteps=(1 + ARGS.windows) * steps,
                log_interval=steps,
                eval_interval=10**9,
                eval_episodes=1,
                learning_starts=3,
                updates_per_step=UPDATES_PER_STEP,
                hidden_dim=256,
                model_train_interval=10**6,  # once, before the first update
                retain_steps=10**6,
                max_model_updates=1,
                rollout_batch_size=ROWS,
                run_dir=f"{folder}/run",
                torch_threads=ARGS.threads,
                quiet=True,
            )
        )
    report(marks)
else:
    raise SystemExit(f"ours_mbpo.py has no setting {ARGS.algo!r}")
