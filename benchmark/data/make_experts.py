"""Make the demonstrations that GAIL imitates by default: episodes of trained agents of this repo.

    python benchmark/data/make_experts.py         about 15 minutes on one core
    python benchmark/data/make_experts.py --few   seconds: a few rows of the episodes that are there

Each agent is trained with a seed that no row of the benchmark uses, until it is good enough. Its
best checkpoint plays episodes from starts that no evaluation uses. The runs stay in runs/data/.
There, too, goes what the benchmark's FEW leaves of each, so that cloning can have the same rows.
"""

import argparse
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
    (ROOT / "runs" / "data").mkdir(parents=True, exist_ok=True)
    with np.load(file) as arrays:
        kept = {name: array[rows.numpy()] for name, array in arrays.items()}
    kept["truncations"] = ~kept["terminations"]
    common.save_npz(str(ROOT / "runs" / "data" / f"{env_id}-few.npz"), kept)


def save_expert(env_id: str) -> None:
    algo, flags, num_episodes = EXPERTS[env_id]
    script = [sys.executable, f"algos/{algo}.py"]
    run_dir = f"runs/data/expert-{env_id}"
    train = f"--env-id {env_id} --seed 100 {flags} --run-dir {run_dir}"
    if not (ROOT / run_dir / "checkpoint.pt").exists():
        subprocess.run([*script, *train.split()], cwd=ROOT, check=True)
    file = f"benchmark/data/{env_id}-expert.npz"
    record = f"--evaluate {run_dir}/best.pt --eval-episodes {num_episodes} --eval-seed 20000"
    subprocess.run([*script, *record.split(), "--record", file], cwd=ROOT, check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--few", action="store_true", help="train and record nothing")
    few_alone = parser.parse_args().few
    for env_id in EXPERTS:
        if not few_alone:
            save_expert(env_id)
        save_few(env_id)
