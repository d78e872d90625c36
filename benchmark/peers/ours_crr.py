"""algos/crr.py as a user runs it: the loop of train() itself, its sampling and logging included."""

import sys
import tempfile
from pathlib import Path

import numpy as np
from timing import ARGS, clock, report

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from algos import crr

marks = []
scalars = crr.Logger.scalars


def marked_scalars(logger: crr.Logger, step: int, values: dict) -> None:
    scalars(logger, step, values)
    if "losses/actor" in values:
        marks.append(clock())


crr.Logger.scalars = marked_scalars
with tempfile.TemporaryDirectory() as folder:
    rng = np.random.default_rng(0)
    np.savez(
        f"{folder}/data.npz",
        observations=rng.standard_normal((100_000, 3), dtype=np.float32),
        actions=rng.uniform(-2, 2, (100_000, 1)).astype(np.float32),
        rewards=-rng.random(100_000, dtype=np.float32),
        next_observations=rng.standard_normal((100_000, 3), dtype=np.float32),
        terminations=np.zeros(100_000, dtype=bool),
        truncations=np.ones(100_000, dtype=bool),  # no two rows need to join
    )
    crr.train(
        crr.Args(
            dataset=f"{folder}/data.npz",
            weight_type="exp",  # as the peers do
            total_updates=(1 + ARGS.windows) * ARGS.updates,  # the first window warms up
            log_interval=ARGS.updates,
            eval_interval=10**9,
            eval_episodes=1,
            run_dir=f"{folder}/run",
            torch_threads=ARGS.threads,
            quiet=True,
        )
    )
report(marks)
