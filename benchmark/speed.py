"""How fast is an update? Ours, the peers' and the limit, measured side by side.

    python benchmark/speed.py --peers            ours, the limit, other libraries in fresh venvs
    python benchmark/speed.py --peers --only awr one algorithm; the figures of the others stay
    python benchmark/speed.py --only awr         ours against the limit; printed, not written
    python benchmark/speed.py --only start       none of them: what a start and large data cost
    python benchmark/speed.py --growth           how the cost grows with five flags (4 minutes)
    python benchmark/speed.py --check            exit code 1 if SPEED.md has other figures

Machines are noisy, so that only ratios within one run mean something: the contenders take turns,
round after round, each in a process of its own, several windows each. Printed are updates per
CPU-second at one thread and per second of wall-clock at two, the median over all windows with
their range, and the ratio to ours in the same round, the median over rounds with its range. The
limit is what the matrix products of the same networks cost, forward, backward and Adam, without
anything else (benchmark/peers/limit.py).

Also: how long --help and the first update take, and what a dataset of a million transitions costs.
The windows go to benchmark/results/speed.csv and start.csv, the tables between the speed markers of
benchmark/SPEED.md.

--growth times our scripts alone, at one thread, while one flag goes up and all others stay: the
windows go to results/growth.csv, their medians, on two logarithmic axes, to results/growth.png. A
cost that is proportional to the flag has slope 1 there, and one that does not depend on it slope 0.
"""

import csv
import io
import json
import math
import os
import re
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
    "sbx": "sbx-rl==0.28.0 jax==0.10.2 jaxlib==0.10.2 gymnasium-robotics",  # the last for mazes
    "sb3": "stable-baselines3==2.9.2",
    "mbrl": "mbrl==0.2.0",
    "tianshou": "tianshou==2.0.1",
    "sheeprl": "sheeprl==0.8.4",
    "imitation": "imitation==1.0.1",  # brings Stable-Baselines3 2.2.1 and Gymnasium 0.29.1
}
WITH_COMMON = ("tyro", "tqdm")  # what common.py imports beside them
NEWER = {  # mbrl pins some that break on Python 3.11 or NumPy 2
    "mbrl": "hydra-core==1.3.2 omegaconf==2.3.0 gymnasium==1.1.1"
}
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
SCRIPT_KINDS = {"rlpd": "_sac", "sac": "_sac", "fqf-buffer": "_fqf"}  # of ours and of limit
SCRIPT_KINDS |= {
    algo: f"_{kind}"
    for kind in ("mbpo", "fqf", "gail", "dreamer")
    for algo in PEERS
    if kind in algo
}
WITHOUT_LIMIT = ("fqf-loop", "fqf-tree", "gail-loop")  # they hardly multiply matrices
COMPILED = ("rlpd", "sac", "fqf", "fqf-atari")  # the files that have the flag
VARIANTS = {algo: {"ours, --compile": "compile"} for algo in COMPILED}  # of ours
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

START = {  # flags with which the first update comes at once; GAIL's comes after a rollout
    "awr": "--value-warmup 0",
    "marwil": "",
    "crr": "",
    "rlpd": "--learning-starts 0",
    "mbpo": "--learning-starts 3",  # the model is fitted before
    "fqf": "--learning-starts 0",
    "gail": "",
    "dreamer": "--learning-starts 128",  # a sequence of each environment
}
NUM_STARTS = 3  # of each
START_COLUMNS = ("help_cpu", "cpu", "seconds", "peak_mb")  # of start.csv, what measure_start gives
LARGE_ROWS, LARGE_OBS, LARGE_ACTIONS = 1_000_000, 17, 6  # a dataset of HalfCheetah's size
LARGE_MB = LARGE_ROWS * (4 * (2 * LARGE_OBS + LARGE_ACTIONS + 1) + 2) / 2**20  # floats, two flags


@dataclass
class Panel:
    """One flag that goes up. A window is about half a second, as far as one update allows it."""

    title: str
    setting: str  # of a script in benchmark/peers/, which says what the other flags are
    flags: dict  # that are not as they are there
    updates: dict[int, int]  # value of the flag -> updates per window
    unit: str = "update"  # whose cost is drawn


# prior data of RLPD are made on the spot: 100,000 steps, as in the tables, would take the most time
FEW_DATA = {"dataset": "random:1000"}
GROWTH = {
    "batch_size": Panel("batch", "crr", {}, {16: 100, 64: 60, 256: 25, 1024: 6, 4096: 2}),
    "hidden_dim": Panel("width", "crr", {}, {32: 100, 64: 100, 128: 60, 256: 25, 512: 8, 1024: 3}),
    "num_critics": Panel(
        "ensemble",
        "rlpd",
        FEW_DATA | {"gradient_updates_per_step": 8},
        {2: 32, 4: 24, 8: 16, 16: 8, 32: 8},
    ),
    "gradient_updates_per_step": Panel(
        "update-to-data ratio",
        "rlpd",
        FEW_DATA,
        {1: 16, 2: 16, 4: 16, 8: 16, 16: 16, 32: 32},
        unit="step",
    ),
    "buffer_capacity": Panel(
        "full replay buffer", "fqf-buffer", {}, dict.fromkeys((10**3, 10**4, 10**5, 10**6), 25)
    ),
}


@dataclass
class Options:
    only: str = ""  # one algorithm, or one of its pieces, or "start" [all]
    peers: bool = False  # also time other libraries; installs each into a venv of its own
    venvs: Path | None = None  # keep those venvs here [a temporary folder]
    rounds: int = 2  # turns of every contender
    windows: int = 2  # windows per turn
    growth: bool = False  # instead: how the cost of an update of ours grows
    check: bool = False  # instead: compare SPEED.md with the CSVs
    page: Path = ROOT / "benchmark" / "SPEED.md"  # the file with the two speed markers
    results: Path = ROOT / "benchmark" / "results"  # where CSVs and growth.png go


def install(peer: str, folder: Path) -> str:
    """-> the Python of a venv with that package"""
    python, is_complete = folder / peer / "bin" / "python", folder / peer / "installed"
    if not is_complete.exists():
        print(f"installing {PACKAGES[peer]} ...", flush=True)
        subprocess.run([sys.executable, "-m", "venv", folder / peer], check=True)
        packages = [TORCH, *PACKAGES[peer].split(), *WITH_COMMON]
        stages = [[TORCH], packages]  # torch first: pip must not pick another
        stages += [NEWER[peer].split()] if peer in NEWER else []
        for packages in stages:
            subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True)
        is_complete.touch()
    return str(python)


def our_command(setting: str) -> list[str]:
    script = ROOT / "benchmark" / "peers" / f"ours{SCRIPT_KINDS.get(setting, '')}.py"
    return [sys.executable, str(script), setting]


def contenders(algo: str, venvs: Path | None) -> dict[str, list[str]]:
    """Name in the table -> command"""
    scripts, kind = ROOT / "benchmark" / "peers", SCRIPT_KINDS.get(algo, "")
    commands = {"ours": our_command(algo)}
    if algo not in WITHOUT_LIMIT:
        limit = [sys.executable, str(scripts / f"limit{kind}.py"), algo]
        commands["the limit (bare matmuls)"] = limit
    for name, variant in VARIANTS.get(algo, {}).items():
        commands[name] = [*commands["ours"], "--variant", variant]
    for script in PEERS[algo] if venvs else ():
        peer = script.split("_")[0]
        commands[peer] = [install(peer, venvs), str(scripts / f"{script}.py"), algo]
    return commands


def time_windows(name: str, command: list[str], threads: int, windows: int, updates: int) -> dict:
    """What benchmark/peers/timing.py prints: "wall" and "cpu", seconds per update of each window,
    and "peak_mb"."""
    flags = {"threads": threads, "windows": windows, "updates": updates}
    words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    result = subprocess.run([*command, *words], env=environment, capture_output=True, text=True)
    if result.returncode != 0:
        raise SystemExit(f"{name} failed:\n{result.stderr[-2000:]}")
    return json.loads(result.stdout.splitlines()[-1])


def measure_updates(algo: str, commands: dict[str, list[str]], options: Options) -> list[dict]:
    """One row per window: contender, threads, seconds of wall and of CPU per update."""
    rows = []
    for turn in range(options.rounds):
        for threads in (1, 2):
            for name, command in commands.items():
                timing = time_windows(name, command, threads, options.windows, UPDATES[algo])
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
    rates: dict[tuple, list[float]] = {}  # contender, threads, and the turn or None for all of them
    for row in rows:
        threads = int(row["threads"])
        value = 1 / float(row["cpu" if threads == 1 else "wall"])
        for turn in (None, row["turn"]):
            rates.setdefault((row["contender"], threads, turn), []).append(value)
    medians = {key: statistics.median(values) for key, values in rates.items()}
    turns = dict.fromkeys(row["turn"] for row in rows)
    for name in dict.fromkeys(row["contender"] for row in rows):
        cells = [name]
        for threads in (1, 2):
            windows = rates[name, threads, None]
            median = rate(medians[name, threads, None])
            cells.append(f"{median} [{rate(min(windows))}, {rate(max(windows))}]")
            ratios = [
                medians[name, threads, turn] / medians["ours", threads, turn] for turn in turns
            ]
            has_spread = name != "ours" and len(ratios) > 1
            spread = f" [{min(ratios):.2f}, {max(ratios):.2f}]" if has_spread else ""
            cells.append(f"{statistics.median(ratios):.2f}{spread}")
        peak = max(int(row["peak_mb"]) for row in rows if row["contender"] == name)
        lines.append(f"| {' | '.join([*cells, str(peak)])} |")
    return "\n".join(lines)


def children_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measure_start(algo: str) -> tuple[float, float, float, float]:
    """-> CPU-seconds of --help; CPU-seconds, seconds and peak MB from the command to the first
    update, the evaluation of the untrained policy included. At one thread: a second one that waits
    for a busy machine would count, too."""
    script, before = str(ROOT / "algos" / f"{algo}.py"), children_cpu()
    subprocess.run([sys.executable, script, "--help"], capture_output=True, check=True)
    help_seconds = children_cpu() - before
    loss = "losses/quantile" if algo == "fqf" else "losses/actor"
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--log-interval", "1", "--torch-threads", "1", "--run-dir", f"{folder}/run"]
        metrics, start = Path(folder, "run", "metrics.csv"), time.perf_counter()
        command = [sys.executable, script, "--quiet", *flags, *START[algo].split()]
        process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
        while not (metrics.exists() and loss in metrics.read_text()):
            if process.poll() is not None:
                raise SystemExit(f"{algo} ended before its first update")
            time.sleep(0.01)
        first_update = time.perf_counter() - start
        status, stat = (
            Path(f"/proc/{process.pid}/{name}").read_text() for name in ("status", "stat")
        )
        process.terminate()
        process.wait()
    user, system = stat.rpartition(")")[2].split()[11:13]  # in ticks; a name could hold blanks
    cpu = (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    peak_mb = int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1024
    return help_seconds, cpu, first_update, peak_mb


def measure_starts() -> list[dict]:
    """One row per start of each script, and one of the large dataset."""
    rows = []
    for turn in range(NUM_STARTS):
        for algo in START:
            values = zip(START_COLUMNS, measure_start(algo))
            rows.append({"what": algo, "turn": turn} | {key: f"{x:.4g}" for key, x in values})
            print(f"start of {algo}: {rows[-1]['seconds']} s", flush=True)
    seconds, peak_mb = measure_large_dataset()
    nothing = dict.fromkeys(START_COLUMNS, "")
    measured = {"seconds": f"{seconds:.4g}", "peak_mb": f"{peak_mb:.4g}"}
    return [*rows, {"what": "dataset", "turn": 0} | nothing | measured]


def start_table(rows: list[dict]) -> str:
    lines = [
        "| script | `--help`: CPU-seconds | first update: CPU-seconds | seconds | MB | flags |",
        "| :-- | --: | --: | --: | --: | :-- |",
    ]
    for algo in START:
        starts = [row for row in rows if row["what"] == algo]
        help_seconds, cpu, seconds, peak_mb = (
            statistics.median(float(row[key]) for row in starts) for key in START_COLUMNS
        )
        numbers = f"{help_seconds:.2f} | {cpu:.1f} | {seconds:.1f} | {peak_mb:.0f}"
        flags = f"`{START[algo]}`" if START[algo] else "-"
        lines.append(f"| {algo}.py | {numbers} | {flags} |")
    dataset = next(row for row in rows if row["what"] == "dataset")
    seconds, peak_mb = float(dataset["seconds"]), float(dataset["peak_mb"])
    lines += [
        "",
        f"A million transitions of HalfCheetah's size ({LARGE_MB:.0f} MB of arrays) load and"
        f" validate in {seconds:.1f} s, with a peak of {peak_mb:.0f} MB, {peak_mb / LARGE_MB:.1f}"
        " times the arrays.",
    ]
    return "\n".join(lines)


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


def measure_large_dataset() -> tuple[float, float]:
    """-> seconds and peak MB of reading and checking it"""
    rng = np.random.default_rng(0)
    obs = rng.standard_normal((LARGE_ROWS + 1, LARGE_OBS), dtype=np.float32)
    arrays = {
        "observations": obs[:-1],
        "actions": rng.uniform(-1, 1, (LARGE_ROWS, LARGE_ACTIONS)).astype(np.float32),
        "rewards": rng.standard_normal(LARGE_ROWS, dtype=np.float32),
        "next_observations": obs[1:],
        "terminations": np.zeros(LARGE_ROWS, dtype=bool),
        "truncations": np.arange(LARGE_ROWS) % 1000 == 999,
    }
    with tempfile.TemporaryDirectory() as folder:
        np.savez(f"{folder}/large.npz", **arrays)
        command = [sys.executable, "-c", LOAD, str(ROOT), f"{folder}/large.npz"]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds, peak_mb = map(float, result.stdout.split())
    return seconds, peak_mb


def measure_growth(options: Options) -> list[dict]:
    """One row per window: CPU-seconds of an update, or of all updates of an environment step."""
    rows = []
    for turn in range(options.rounds):
        for flag, panel in GROWTH.items():
            for value, updates in panel.updates.items():
                name = f"{panel.setting} {flag} {value}"
                flags = json.dumps(panel.flags | {flag: value})
                command = [*our_command(panel.setting), "--flags", flags]
                timing = time_windows(name, command, 1, options.windows, updates)
                per_unit = value if panel.unit == "step" else 1
                for cpu in timing["cpu"]:
                    what = {"contender": panel.setting, "flag": flag, "value": value}
                    seconds = f"{cpu * per_unit:.5g}"
                    rows.append({**what, "per": panel.unit, "turn": turn, "seconds": seconds})
                print(f"round {turn + 1} {name}: {1000 * float(seconds):.3g} ms", flush=True)
    return rows


def growth_curve(rows: list[dict], flag: str) -> tuple[list[int], list[list[float]]]:
    """-> values of the flag, rising, and of each the seconds of all its windows"""
    windows = {}
    for row in rows:
        if row["flag"] == flag:
            windows.setdefault(int(row["value"]), []).append(float(row["seconds"]))
    values = sorted(windows)
    return values, [windows[value] for value in values]


def last_slope(values: list[int], seconds: list[float]) -> float:
    """Between the last two points of the figure: 1 if twice the value costs twice the seconds."""
    return math.log(seconds[-1] / seconds[-2]) / math.log(values[-1] / values[-2])


def in_thousands(value: int) -> str:
    for unit, letter in ((10**6, "M"), (10**3, "k")):
        if value % unit == 0:
            return f"{value // unit}{letter}"
    return str(value)


def draw_growth(rows: list[dict], path: Path) -> None:
    from matplotlib.figure import Figure  # slow to import

    canvas = Figure(figsize=(10, 2.9), dpi=200, layout="constrained")
    panels = canvas.subplots(1, len(GROWTH), sharey=True)
    for (flag, panel), axes in zip(GROWTH.items(), panels):
        values, windows = growth_curve(rows, flag)
        low, middle, high = (
            [1000 * statistic(seconds) for seconds in windows]
            for statistic in (min, statistics.median, max)
        )
        color = report.PALETTE[0]
        spread = axes.vlines(values, low, high, color=color, alpha=0.35, linewidth=4)
        (line,) = axes.plot(values, middle, "o-", color=color, linewidth=1.6, markersize=3.5)
        proportional = [middle[-1] * value / values[-1] for value in values]
        style = {"color": "0.45", "linestyle": ":", "linewidth": 1.3, "zorder": 1}
        (dotted,) = axes.plot(values, proportional, **style)
        slope = last_slope(values, middle)
        corner = {"transform": axes.transAxes, "va": "top"}
        axes.text(0.05, 0.96, f"slope at the end {slope:.2f}", fontsize=7, color="0.3", **corner)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_title(panel.title, fontsize=8.5, fontweight="bold", loc="left")
        label = f"{panel.setting.split('-')[0].upper()}, --{flag.replace('_', '-')}"
        axes.set_xlabel(label, fontsize=7, color="0.3")
        axes.set_xticks(values, [in_thousands(value) for value in values])
        axes.minorticks_off()
        axes.tick_params(labelsize=7, color="0.7")
        axes.grid(color="0.93")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color("0.7")
    panels[0].set_ylabel("CPU-milliseconds, 1 thread", fontsize=7.5, color="0.3")
    panels[0].yaxis.set_major_formatter("{x:g}")
    measured = [1000 * float(row["seconds"]) for row in rows]
    panels[0].set_ylim(0.4 * min(measured), 1.5 * max(measured))  # a dotted line may leave it
    labels = ("an update (update-to-data ratio: a step), median", "all windows", "slope 1")
    legend = {"loc": "outside lower center", "ncols": 3, "fontsize": 7.5, "frameon": False}
    canvas.legend([line, spread, dotted], labels, **legend)
    canvas.savefig(path, metadata={"Software": None})


def read_rows(path: Path) -> list[dict]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def write_rows(path: Path, rows: list[dict]) -> None:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, rows[0].keys())
    writer.writeheader()
    writer.writerows(rows)
    report.write(path, text.getvalue().encode())


def section(results: Path) -> str:
    """What stands between the markers of SPEED.md, from the CSVs alone."""
    rows = read_rows(results / "speed.csv")
    measured = {row["algo"] for row in rows}
    tables = [speed_table(algo, rows) for algo in PEERS if algo in measured]
    return "\n\n".join([*tables, start_table(read_rows(results / "start.csv"))])


def main(options: Options) -> int:
    if options.growth:
        rows = measure_growth(options)
        write_rows(options.results / "growth.csv", rows)
        draw_growth(rows, options.results / "growth.png")
        return 0
    path = options.results / "speed.csv"
    chosen = [] if options.check else [algo for algo in PEERS if algo.startswith(options.only)]
    if not chosen and not options.check and options.only != "start":
        print(f"speed: --only takes start, or one of {', '.join(PEERS)}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        venvs = (options.venvs or Path(folder)).resolve() if options.peers else None
        for algo in chosen:
            rows = measure_updates(algo, contenders(algo, venvs), options)
            print(speed_table(algo, rows))
            if options.peers:  # at once: the next peer may fail to install
                others = read_rows(path) if path.exists() else []
                write_rows(path, [row for row in others if row["algo"] != algo] + rows)
    if not options.check and options.only in ("", "start"):
        write_rows(options.results / "start.csv", measure_starts())
    old = options.page.read_bytes()
    new = report.replace_section(old, section(options.results), "speed")
    if options.check:
        if new != old:
            print("speed: SPEED.md has other figures than the CSVs", file=sys.stderr)
        return 0 if new == old else 1
    report.write(options.page, new)
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
