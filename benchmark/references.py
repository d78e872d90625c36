"""Let other people's implementations learn what ours learned, with the same data and budget:

    python benchmark/references.py                  every run of RUNS that is not done yet
    python benchmark/references.py --only fqf       those whose row contains "fqf"
    python benchmark/references.py --venvs FOLDER   keep the peers' environments for the next time

Each peer gets a fresh venv with the version that benchmark/speed.py times. The scripts are
benchmark/peers/learn_*.py; their results stand beside our rows in benchmark/results/, where
report.py finds them. All of it takes about an hour of one core. A peer that fails is reported, and
the others go on.
"""

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmark.speed import install

# script, row of ours, what the peer's row ends with, seeds
RUNS = (
    ("learn_d3rlpy_crr", "crr__Pendulum-v1__random-100000__mean-binary", "d3rlpy", 2),
    ("learn_axiomrl", "awr__Pendulum-v1__shipped__default", "axiomrl", 2),
    ("learn_axiomrl", "marwil__Pendulum-v1__shipped__default", "axiomrl", 2),
    ("learn_imitation_gail", "gail__Pendulum-v1__Pendulum-v1-expert__default", "imitation", 2),
    ("learn_tianshou_fqf", "fqf__CartPole-v1__none__default", "tianshou", 2),
    (
        "learn_sbx_sac",
        "rlpd__Pendulum-v1__shipped__sac-data-in-buffer",
        "sbx-sac-data-in-buffer",
        2,
    ),
    (
        "learn_sbx_sac",
        "rlpd__MazeLarge-v0__maze-large__sac-data-in-buffer",
        "sbx-sac-data-in-buffer",
        2,
    ),
    ("learn_mbrl_mbpo", "mbpo__Pendulum-v1__none__default", "mbrl", 2),
)


@dataclass
class Options:
    only: str = ""  # rows whose name contains this
    venvs: Path | None = None  # keep the peers' environments here [a temporary folder]
    results: Path = ROOT / "benchmark" / "results"  # where they are published


def learn(script: str, row: str, seed: int, venvs: Path, results: Path) -> bool:
    """In the peer's environment, which is made if need be. -> whether it did"""
    try:
        python = install(script.split("_")[1], venvs)
        command = [python, str(ROOT / "benchmark" / "peers" / f"{script}.py"), row]
        command += ["--seed", str(seed), "--results", str(results.resolve())]
        subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
    except subprocess.CalledProcessError as error:
        print(f"FAILED with exit code {error.returncode}", flush=True)
        return False
    return True


def main(options: Options) -> int:
    entries = [
        (script, row, f"{row.rpartition('__')[0]}__{variant}", seed)
        for script, row, variant, num_seeds in RUNS
        for seed in range(1, num_seeds + 1)
    ]
    entries = [entry for entry in entries if options.only in entry[2]]
    if not entries:
        print(f"references.py: no row's name contains {options.only!r}", file=sys.stderr)
        return 2
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        venvs = (options.venvs or Path(folder)).resolve()
        for script, row, name, seed in entries:
            if (options.results / name / str(seed) / "metrics.csv").exists():
                continue
            print(f"{name} seed {seed}", flush=True)
            if not learn(script, row, seed, venvs, options.results):
                failed.append(f"{name} seed {seed}")
    if failed:
        print(f"{len(failed)} failed:", *failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
