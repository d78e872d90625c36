"""Does a run on Atari hold its memory, stop and go on? On Breakout, for a while.

    python benchmark/breakout.py --minutes 20
    python benchmark/breakout.py --minutes 20 --algo dreamer

For FQF, a replay buffer of a million frames is filled first, step by step, and its memory read off.
Then algos/fqf.py plays Breakout with the paper's layers, or algos/dreamer.py with --size small, and
a buffer that is full before it trains, so that nothing has a reason to grow. It is stopped by
SIGTERM, resumed for a minute, stopped again. The resident memory, every ten seconds, goes to
benchmark/results/breakout.csv, or breakout_dreamer.csv.
"""

import csv
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

ROOT = Path(__file__).resolve().parents[1]
CAPACITY = 5_000
GAME = (
    f"--env-id ALE/Breakout-v5 --buffer-capacity {CAPACITY} --learning-starts {CAPACITY}"
    " --total-timesteps 10000000 --eval-interval 5000 --log-interval 500 --torch-threads 1"
)
COMMANDS = {
    "fqf": f"{GAME} --hidden-dim 512 --batch-size 32 --learning-rate 5e-5",
    "dreamer": f"{GAME} --size small --replay-ratio 16 --eval-episodes 4",
}
FILL = """
import sys, time
sys.path.insert(0, sys.argv[1])
import numpy as np
from algos import fqf
def megabytes():
    with open("/proc/self/status") as file:
        kib = next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))
        return kib * 1024 / 1e6
before, obs = megabytes(), np.random.default_rng(0).integers(256, size=(4, 84, 84), dtype=np.uint8)
buffer = fqf.Buffer(1_000_000, (4, 84, 84))
buffer.add_frame(obs, 0)
for step in range(1_100_000):
    buffer.add_step(0, 0.0, False, False, obs)
assert buffer.size == 1_000_000
print(buffer.num_bytes() / 1e6, megabytes() - before)
"""


@dataclass
class Options:
    algo: Literal["fqf", "dreamer"] = "fqf"  # whose script plays
    minutes: float = 20  # of the first run
    results: Path = ROOT / "benchmark" / "results"  # where breakout.csv goes


def watch(command: list[str], minutes: float, phase: str, rows: list[dict]) -> str:
    """Run it for a while, reading its memory off; then SIGTERM. -> what it printed"""
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    start = time.time()
    while time.time() - start < 60 * minutes:
        time.sleep(10)
        assert process.poll() is None, f"it ended with exit code {process.returncode}"
        status = Path(f"/proc/{process.pid}/status").read_text()
        kib = int(re.search(r"VmRSS:\s+(\d+) kB", status).group(1))
        seconds = round(time.time() - start)
        rows.append({"phase": phase, "seconds": seconds, "megabytes": round(kib * 1024 / 1e6)})
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM
    print(output, flush=True)
    return output


def fill_buffer() -> None:
    command = [sys.executable, "-c", FILL, str(ROOT)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    computed, resident = map(float, result.stdout.split())
    print(f"a million frames: {computed:,.0f} MB computed, {resident:,.0f} MB resident", flush=True)


def main(options: Options) -> None:
    if options.algo == "fqf":
        fill_buffer()
    rows, script = [], [sys.executable, str(ROOT / "algos" / f"{options.algo}.py")]
    with tempfile.TemporaryDirectory() as folder:
        place = ["--run-dir", f"{folder}/run"]
        output = watch(
            [*script, *COMMANDS[options.algo].split(), *place], options.minutes, "first", rows
        )
        stopped = int(re.search(r"stopped at step ([\d,]+)", output).group(1).replace(",", ""))
        resume = shlex.split(re.search(r"resume: python \S+ (.*)", output).group(1))
        output = watch([*script, *resume], 1, "resumed", rows)
        went_on = int(re.search(r"stopped at step ([\d,]+)", output).group(1).replace(",", ""))
        metrics = Path(folder, "run", "metrics.csv").read_text()
        losses = [float(line.split(",")[3]) for line in metrics.splitlines() if "losses/" in line]
    assert went_on > stopped and all(abs(loss) < 1e6 for loss in losses)
    name = "breakout.csv" if options.algo == "fqf" else f"breakout_{options.algo}.csv"
    with open(options.results / name, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    first = [row["megabytes"] for row in rows if row["phase"] == "first"]
    quarter = len(first) // 4
    print(
        f"resident memory: at most {max(first[: 2 * quarter]):,} MB in the first half,"
        f" {max(first[2 * quarter :]):,} MB in the second; stopped at step {stopped:,},"
        f" resumed, stopped again at step {went_on:,}"
    )


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
