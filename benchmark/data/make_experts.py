"""Make the demonstrations that GAIL imitates by default: episodes of trained agents of this repo.

    python benchmark/data/make_experts.py     about 15 minutes on one core

Each agent is trained with a seed that no row of the benchmark uses, until it is good enough. Its
best checkpoint plays episodes from starts that no evaluation uses. The runs stay in runs/data/.
There, too, goes what the benchmark's FEW leaves of each, so that cloning can have the same rows.
"""

import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # for common.py
import common
from algos.gail import expert_rows
from benchmark.run import FEW, LANDING

EXPERTS = {  # environment: algorithm, its flags, episodes to record
    "CartPole-v1": ("awr", "--beta 0.5 --eval-episodes 50 --target-return 500", 10),
    "Pendulum-v1": ("rlpd", "--eval-episodes 20", 20),
    "LunarLander-v3": ("fqf", f"{LANDING[1]} --eval-episodes 20 --target-return 270", 20),
}


def save_few(env_id: str) -> None:
    """The rows that GAIL sees with seed 1, each of them an episode of its own."""
    file = str(common.SHIPPED / f"{env_id}-expert.npz")
    dataset = common.load_dataset(file, common.make_env(env_id))
    rows, _ = expert_rows(dataset, *FEW.values(), seed=1)
    with np.load(file) as arrays:
        kept = {name: array[rows.numpy()] for name, array in arrays.items()}
    kept["truncations"] = ~kept["terminations"]
    common.save_npz(str(ROOT / "runs" / "data" / f"{env_id}-few.npz"), kept)


if __name__ == "__main__":
    for env_id, (algo, flags, num_episodes) in EXPERTS.items():
        script = [sys.executable, f"algos/{algo}.py"]
        run_dir = f"runs/data/expert-{env_id}"
        train = f"--env-id {env_id} --seed 100 {flags} --run-dir {run_dir}"
        file = f"benchmark/data/{env_id}-expert.npz"
        record = f"--eval-episodes {num_episodes} --eval-seed 20000 --record {file}"
        if not (ROOT / run_dir / "checkpoint.pt").exists():
            subprocess.run([*script, *train.split()], cwd=ROOT, check=True)
        record = f"--evaluate {run_dir}/best.pt {record}"
        subprocess.run([*script, *record.split()], cwd=ROOT, check=True)
        save_few(env_id)
