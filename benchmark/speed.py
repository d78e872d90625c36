"""How fast is an update? Ours, the peers' and the limit, measured side by side.

    python benchmark/speed.py                    ours against the limit
    python benchmark/speed.py --peers            and against other libraries, each in a fresh venv
    python benchmark/speed.py --only awr         one algorithm; the figures of the others stay

Machines are noisy, so that only ratios within one run mean something: the contenders take turns,
round after round, each in a process of its own, several windows each. Printed are updates per
CPU-second at one thread and per second of wall-clock at two, the median over all windows with
their range, and the ratio of the medians. The limit is what the matrix products of the same
networks cost, forward, backward and Adam, without anything else (benchmark/peers/limit.py).

Also: how long --help and the first update take, and what a dataset of a million transitions costs.
The windows go to benchmark/results/speed.csv, the tables between the speed markers of the README.
"""

import csv
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmark import report

PACKAGES = {
    "d3rlpy": "d3rlpy==2.8.1",
    "axiomrl": "axiomrl==1.0.3",
    "rllib": "ray[rllib]==2.60.0",
    "sbx": "sbx-rl==0.28.0 jax==0.10.2 jaxlib==0.10.2",
    "sb3": "stable-baselines3==2.9.2",
    "mbrl": "mbrl==0.2.0",
    "tianshou": "tianshou==2.0.1",
    "sheeprl": "sheeprl==0.8.4",
    "imitation": "imitation==1.0.1",  # brings Stable-Baselines3 2.2.1 and Gymnasium 0.29.1
}
NEWER = {"mbrl": "hydra-core==1.3.2 omegaconf==2.3.0"}  # it pins some that break on Python 3.11
PEERS = {  # of each algorithm: scripts in benchmark/peers/, named after a package of above
    "awr": ("axiomrl_awr",),
    "marwil": ("axiomrl_marwil", "rllib_marwil"),
    "crr": ("d3rlpy_crr", "axiomrl_crr"),
    "rlpd": ("sbx_sac",),  # 10 critics with layer norm, 20 updates per step
    "sac": ("sbx_sac", "sb3_sac"),  # rlpd.py without data: 2 critics, 1 update per step
    "mbpo-model": ("mbrl_mbpo", "axiomrl_mbpo"),  # the three pieces of mbpo.py
    "mbpo-rollout": ("mbrl_mbpo", "axiomrl_mbpo"),
    "mbpo-sac": ("mbrl_mbpo", "axiomrl_mbpo"),
    "fqf": ("tianshou_fqf", "axiomrl_fqf"),  # vectors
    "fqf-atari": ("tianshou_fqf", "axiomrl_fqf"),  # images
    "fqf-loop": (),  # environment steps of a whole run
    "fqf-tree": ("tianshou_fqf",),  # draws and new priorities of the sum tree
    "gail-loop": ("imitation_gail", "axiomrl_gail"),  # environment steps of a whole run
    "dreamer": ("sheeprl_dreamer",),
}
SCRIPT_KINDS = {"rlpd": "_sac", "sac": "_sac"}  # ours and limit; else those of the algorithm
SCRIPT_KINDS |= {
    algo: f"_{kind}"
    for kind in ("mbpo", "fqf", "gail", "dreamer")
    for algo in PEERS
    if kind in algo
}
WITHOUT_LIMIT = ("fqf-loop", "fqf-tree", "gail-loop")  # they hardly multiply matrices
VARIANTS = {  # of ours
    algo: {"ours, --compile": "compile", "ours, a loop over the critics": "loop"}
    for algo in ("rlpd", "sac")
}
VARIANTS |= {algo: {"ours, --compile": "compile"} for algo in ("mbpo-sac", "fqf")}
VARIANTS |= {"fqf-tree": {"a plain Python tree": "python"}}
VARIANTS |= {"gail-loop": {"ours, --gradient-penalty 0": "no-penalty"}}  # the peers have none
# per window; AWR and MARWIL compute all returns once in 1,000, RLPD makes about 25 a second
UPDATES = {"awr": 1_000, "marwil": 1_000, "crr": 1_000, "rlpd": 200, "sac": 500}
UPDATES |= {"mbpo-model": 200, "mbpo-rollout": 200_000, "mbpo-sac": 300}
UPDATES |= {"fqf": 300, "fqf-atari": 20, "fqf-loop": 2_000, "fqf-tree": 128_000}
UPDATES |= {"gail-loop": 8_192}  # 8 rollouts
UPDATES |= {"dreamer": 2}  # one takes seconds
TITLES = {"rlpd": "RLPD critic update", "sac": "SAC critic update"}
TITLES |= {"mbpo-model": "MBPO step of the ensemble", "mbpo-sac": "MBPO update of SAC"}
TITLES |= {"mbpo-rollout": "MBPO transition of a rollout"}
TITLES |= {"fqf": "FQF update, vectors", "fqf-atari": "FQF update, Atari images"}
TITLES |= {"fqf-loop": "FQF step of CartPole", "fqf-tree": "FQF draw from a million priorities"}
TITLES |= {"gail-loop": "GAIL step of CartPole", "dreamer": "Dreamer update"}
TORCH = "torch==2.13.0"


@dataclass
class Options:
    only: str = ""  # one algorithm, or one of its pieces [all]
    peers: bool = False  # also time other libraries; installs each into a venv of its own
    venvs: Path | None = None  # keep those venvs here [a temporary folder]
    rounds: int = 2  # turns of every contender
    windows: int = 2  # windows per turn
    readme: Path = ROOT / "README.md"  # the file with the two speed markers
    results: Path = ROOT / "benchmark" / "results"  # where speed.csv goes


def install(peer: str, folder: Path) -> str:
    """-> the Python of a venv with that package"""
    python = folder / peer / "bin" / "python"
    if not python.exists():
        print(f"installing {PACKAGES[peer]} ...", flush=True)
        subprocess.run([sys.executable, "-m", "venv", folder / peer], check=True)
        stages = [[TORCH], [TORCH, *PACKAGES[peer].split()]]  # first: pip must not pick another
        stages += [NEWER[peer].split()] if peer in NEWER else []
        for packages in stages:
            subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True)
    return str(python)


def contenders(algo: str, venvs: Path | None) -> dict[str, list[str]]:
    """Name in the table -> command"""
    scripts, kind = ROOT / "benchmark" / "peers", SCRIPT_KINDS.get(algo, "")
    commands = {
        "ours": [sys.executable, str(scripts / f"ours{kind}.py"), algo],
    }
    if algo not in WITHOUT_LIMIT:
        limit = [sys.executable, str(scripts / f"limit{kind}.py"), algo]
        commands["the limit (bare matmuls)"] = limit
    for name, variant in VARIANTS.get(algo, {}).items():
        commands[name] = [*commands["ours"], "--variant", variant]
    for script in PEERS[algo] if venvs else ():
        peer = script.split("_")[0]
        commands[peer] = [install(peer, venvs), str(scripts / f"{script}.py"), algo]
    return commands


def measure_updates(algo: str, commands: dict[str, list[str]], options: Options) -> list[dict]:
    """One row per window: contender, threads, seconds of wall and of CPU per update."""
    rows = []
    for turn in range(options.rounds):
        for threads in (1, 2):
            for name, command in commands.items():
                flags = {"threads": threads, "windows": options.windows, "updates": UPDATES[algo]}
                words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
                environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
                result = subprocess.run(
                    [*command, *words], env=environment, capture_output=True, text=True
                )
                if result.returncode != 0:
                    raise SystemExit(f"{name} failed:\n{result.stderr[-2000:]}")
                timing = json.loads(result.stdout.splitlines()[-1])
                peak_mb = round(timing["peak_mb"])
                for wall, cpu in zip(timing["wall"], timing["cpu"]):
                    times = {"wall": f"{wall:.5g}", "cpu": f"{cpu:.5g}", "peak_mb": peak_mb}
                    who = {"algo": algo, "contender": name}
                    rows.append({**who, "threads": threads, "turn": turn, **times})
                print(
                    f"{algo} round {turn + 1} threads {threads} {name}: {rate(1 / wall)}/s",
                    flush=True,
                )
    return rows


def rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}" if value >= 1 else f"{value:.3f}"


def speed_table(algo: str, rows: list[dict]) -> str:
    rows = [row for row in rows if row["algo"] == algo]
    lines = [
        f"| {TITLES.get(algo, f'{algo.upper()} update')} | per CPU-second, 1 thread | x ours"
        " | per second, 2 threads | x ours | MB |",
        "| :-- | --: | --: | --: | --: | --: |",
    ]
    rates = {}
    for row in rows:
        unit = "cpu" if int(row["threads"]) == 1 else "wall"
        key = row["contender"], int(row["threads"])
        rates.setdefault(key, []).append(1 / float(row[unit]))
    for name in dict.fromkeys(row["contender"] for row in rows):
        cells = [name]
        for threads in (1, 2):
            mine, ours = rates[name, threads], statistics.median(rates["ours", threads])
            median = statistics.median(mine)
            cells.append(f"{rate(median)} [{rate(min(mine))}, {rate(max(mine))}]")
            cells.append(f"{median / ours:.2f}")
        peak = max(int(row["peak_mb"]) for row in rows if row["contender"] == name)
        lines.append(f"| {' | '.join([*cells, str(peak)])} |")
    return "\n".join(lines)


def children_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measure_start() -> str:
    """--help, and the time from the command to the first update with the shipped npz."""
    script, before = str(ROOT / "algos" / "crr.py"), children_cpu()
    subprocess.run([sys.executable, script, "--help"], capture_output=True, check=True)
    help_seconds = children_cpu() - before
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--total-updates", "2", "--log-interval", "1", "--run-dir", f"{folder}/run"]
        metrics, start = Path(folder, "run", "metrics.csv"), time.perf_counter()
        process = subprocess.Popen([sys.executable, script, "--quiet", *flags])
        while not (metrics.exists() and "losses/actor" in metrics.read_text()):
            time.sleep(0.01)
        first_update = time.perf_counter() - start
        process.wait()
    return (
        f"`--help` takes {help_seconds:.1f} s of CPU time. The first update comes"
        f" {first_update:.1f} s after the command, evaluation of the untrained policy included."
    )


LOAD = """
import sys, time
sys.path.insert(0, sys.argv[1])
import common
def megabytes(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key)) / 1024
env = common.make_env("HalfCheetah-v5")
before, start = megabytes("VmRSS"), time.perf_counter()
dataset = common.load_dataset(sys.argv[2], env)
print(time.perf_counter() - start, megabytes("VmHWM") - before)
"""


def measure_large_dataset() -> str:
    """A million transitions of HalfCheetah's size: 17 observations, 6 actions."""
    rng, num_rows = np.random.default_rng(0), 1_000_000
    obs = rng.standard_normal((num_rows + 1, 17), dtype=np.float32)
    arrays = {
        "observations": obs[:-1],
        "actions": rng.uniform(-1, 1, (num_rows, 6)).astype(np.float32),
        "rewards": rng.standard_normal(num_rows, dtype=np.float32),
        "next_observations": obs[1:],
        "terminations": np.zeros(num_rows, dtype=bool),
        "truncations": np.arange(num_rows) % 1000 == 999,
    }
    size = sum(array.nbytes for array in arrays.values()) / 2**20
    with tempfile.TemporaryDirectory() as folder:
        np.savez(f"{folder}/large.npz", **arrays)
        command = [sys.executable, "-c", LOAD, str(ROOT), f"{folder}/large.npz"]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds, peak = map(float, result.stdout.split())
    return (
        f"A million transitions of HalfCheetah's size ({size:.0f} MB of arrays) load and validate"
        f" in {seconds:.1f} s, with a peak of {peak:.0f} MB, {peak / size:.1f} times the arrays."
    )


def main(options: Options) -> None:
    path, rows = options.results / "speed.csv", []
    if path.exists():
        with open(path, newline="") as file:
            rows = list(csv.DictReader(file))
    with tempfile.TemporaryDirectory() as folder:
        venvs = (options.venvs or Path(folder)).resolve() if options.peers else None
        for algo in [algo for algo in PEERS if algo.startswith(options.only)]:
            commands = contenders(algo, venvs)
            rows = [row for row in rows if row["algo"] != algo]
            rows += measure_updates(algo, commands, options)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    tables = [speed_table(algo, rows) for algo in PEERS if algo in {row["algo"] for row in rows}]
    text = "\n\n".join([*tables, measure_start(), measure_large_dataset()])
    print(text)
    readme = report.replace_section(options.readme.read_bytes(), text, "speed")
    report.write(options.readme, readme)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
