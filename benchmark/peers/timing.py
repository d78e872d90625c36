"""Time an update in windows and print one JSON line. Runs in the peers' environments, too, so it
needs nothing but the standard library and torch."""

import argparse
import json
import time
from collections.abc import Callable
from itertools import pairwise

import torch

parser = argparse.ArgumentParser()
parser.add_argument("algo", nargs="?", help="for the scripts that time more than one")
parser.add_argument("--variant", default="", help="of ours: compile, or loop")
parser.add_argument(
    "--flags", type=json.loads, default={}, help="of ours: JSON, over the setting's"
)
for flag, default in (("--threads", 1), ("--windows", 3), ("--updates", 100)):
    parser.add_argument(flag, type=int, default=default)
ARGS = parser.parse_args()
torch.set_num_threads(ARGS.threads)


def clock() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def report(marks: list[tuple[float, float]]) -> None:
    """marks: the clock at the start and at the end of each window."""
    with open("/proc/self/status") as status:  # not ru_maxrss, which may be the parent's peak
        peak_kb = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    wall = [(after[0] - before[0]) / ARGS.updates for before, after in pairwise(marks)]
    cpu = [(after[1] - before[1]) / ARGS.updates for before, after in pairwise(marks)]
    print(json.dumps({"wall": wall, "cpu": cpu, "peak_mb": peak_kb / 1024}))


def marks_at_entries(key: str, is_mark: Callable[[int], bool] = bool) -> list[tuple[float, float]]:
    """Of ours: the clock whenever train() has logged the key, for the steps that are marks."""
    from common import Run

    marks, log = [], Run.log

    def marked_log(run: Run, scalars: dict, **options) -> None:
        log(run, scalars, **options)
        if key in scalars and is_mark(run.step):
            marks.append(clock())

    Run.log = marked_log
    return marks


def measure(update: Callable[[], None], per_call: int = 1) -> None:
    """per_call: how many updates one call of update makes; it must divide those of a window."""
    assert ARGS.updates % per_call == 0
    for _ in range(max(5, 50 // per_call)):  # allocator, Adam's state, first calls, compilation
        update()
    marks = [clock()]
    for _ in range(ARGS.windows):
        for _ in range(ARGS.updates // per_call):
            update()
        marks.append(clock())
    report(marks)
