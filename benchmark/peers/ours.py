"""python ours.py ALGO: algos/<ALGO>.py as a user runs it, the loop of train()
itself, its sampling and logging included."""

import importlib
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from timing import ARGS, marks_at_entries, report

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
algo = importlib.import_module(f"algos.{ARGS.algo}")
OWN_FLAGS = {
    "crr": {"weight_type": "exp"},  # as the peers do
    "awr": {"value_warmup": 0},  # V alone would be half an update
    "marwil": {},
}

marks = marks_at_entries("losses/actor")
with tempfile.TemporaryDirectory() as folder:
    rng = np.random.default_rng(0)
    obs = rng.standard_normal((100_001, 3), dtype=np.float32)
    np.savez(
        f"{folder}/data.npz",
        observations=obs[:-1],
        actions=rng.uniform(-2, 2, (100_000, 1)).astype(np.float32),
        rewards=-rng.random(100_000, dtype=np.float32),
        next_observations=obs[1:],
        terminations=np.zeros(100_000, dtype=bool),
        truncations=np.arange(100_000) % 200 == 199,
    )
    args = algo.Args(
        dataset=f"{folder}/data.npz",
        total_updates=(1 + ARGS.windows) * ARGS.updates,  # the first window warms up
        log_interval=ARGS.updates,
        eval_interval=10**9,
        eval_episodes=1,
        run_dir=f"{folder}/run",
        torch_threads=ARGS.threads,
        quiet=True,
        **OWN_FLAGS[ARGS.algo],
    )
    algo.train(replace(args, **ARGS.flags))
report(marks)
