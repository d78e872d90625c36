"""Make the prior data of the benchmark's MuJoCo task: the whole replay buffer of a short SAC run.

    python benchmark/data/make_replay.py     about 5 minutes on one core

Too large to ship; benchmark/run.py looks for it in runs/data/ and leaves its rows out until it is
there. The same two commands make prior data for any other environment.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENV_ID = "HalfCheetah-v5"
SAC = "--dataset none --num-critics 2 --no-critic-layer-norm --gradient-updates-per-step 1"
FLAGS = f"{SAC} --hidden-dim 256 --learning-starts 1000 --seed 100"
RUN = "runs/data/sac-halfcheetah"
FILE = "runs/data/halfcheetah-replay-sac.npz"

if __name__ == "__main__":
    script = [sys.executable, "algos/rlpd.py"]
    budget = "--total-timesteps 20000 --eval-interval 5000 --torch-threads 1"
    command = f"--env-id {ENV_ID} {FLAGS} {budget} --run-dir {RUN}".split()
    subprocess.run([*script, *command], cwd=ROOT, check=True)
    command = f"--evaluate {RUN}/checkpoint.pt --record-replay {FILE}".split()
    subprocess.run([*script, *command], cwd=ROOT, check=True)
