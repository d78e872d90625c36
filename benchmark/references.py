"""Let other people's implementations learn what ours learned, with the same data and budget:

    python benchmark/references.py                  every run of RUNS that is not done yet
    python benchmark/references.py --only fqf       those whose row contains "fqf"
    python benchmark/references.py --venvs FOLDER   keep the peers' environments for the next time

Each peer gets a fresh venv with the version that benchmark/speed.py times. The scripts are
benchmark/peers/learn_*.py; their results stand beside our rows in benchmark/results/, where
report.py finds them. All of it takes about half an hour of one core.
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
    ("learn_d3rlpy_crr", "crr__Pendulum-v1__random-100000__mean-binary", "d3rlpy", 1),
    ("learn_d3rlpy_crr", "crr__Pendulum-v1__shipped__mean-binary", "d3rlpy", 2),
    ("learn_axiomrl", "awr__Pendulum-v1__shipped__default", "axiomrl", 2),
    ("learn_axiomrl", "marwil__Pendulum-v1__shipped__default", "axiomrl", 2),
    ("learn_imitation_gail", "gail__Pendulum-v1__Pendulum-v1-expert__default", "imitation", 2),
    ("learn_imitation_gail", "gail__CartPole-v1__CartPole-v1-expert__default", "imitation", 1),
    ("learn_tianshou_fqf", "fqf__CartPole-v1__none__default", "tianshou", 1),
    ("learn_sbx_sac", "rlpd__Pendulum-v1__shipped__sac", "sbx-sac", 2),
    (
        "learn_sbx_sac",
        "rlpd__Pendulum-v1__shipped__sac-data-in-buffer",
        "sbx-sac-data-in-buffer",
        2,
    ),
    ("learn_sbx_sac", "mbpo__Pendulum-v1__none__sac", "sbx-sac", 2),
    ("learn_sbx_sac", "mbpo__Pendulum-v1__none__sac-10-updates", "sbx-sac-10-updates", 2),
)


@dataclass
class Options:
    only: str = ""  # rows whose name contains this
    venvs: Path | None = None  # keep the peers' environments here [a temporary folder]
    results: Path = ROOT / "benchmark" / "results"  # where they are published


def main(options: Options) -> None:
    with tempfile.TemporaryDirectory() as folder:
        venvs = (options.venvs or Path(folder)).resolve()
        for script, row, variant, num_seeds in RUNS:
            if options.only not in row:
                continue
            published = options.results / f"{row.rpartition('__')[0]}__{variant}"
            for seed in range(1, num_seeds + 1):
                if (published / str(seed) / "metrics.csv").exists():
                    continue
                python = install(script.split("_")[1], venvs)
                command = [python, str(ROOT / "benchmark" / "peers" / f"{script}.py"), row]
                command += ["--seed", str(seed), "--results", str(options.results.resolve())]
                print(f"{published.name} seed {seed}", flush=True)
                subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
