"""Where does the time of a run go? CPU time of train(), line by line, and of its numbered steps.

    python benchmark/time_per_step.py dreamer --env-id CartPole-v1 --from-pixels --size small ...

All flags after the name are those of the script. A line is charged with everything that it calls.
What comes before the loop is left out, and so is the last step: logs, evaluations, checkpoints. The
second table names the most expensive statements.
"""

import ast
import importlib
import inspect
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
SHOWN = 12  # statements
STEP = re.compile(r"# (\d+\. .*)")


def steps_of(source: list[str]) -> dict[int, str]:
    """Line of train(), from 1 on -> the comment of the numbered step that it belongs to"""
    steps, name = {}, ""
    for number, line in enumerate(source, 1):
        match = STEP.search(line)
        name = match.group(1) if match else name
        if name:
            steps[number] = name
    return steps


def statements_of(source: str) -> dict[int, int]:
    """Line -> the first line of the smallest statement that it is a part of"""
    first = {}
    for node in ast.walk(ast.parse(source)):  # outer ones first
        if isinstance(node, ast.stmt):
            for number in range(node.lineno, node.end_lineno + 1):
                first[number] = node.lineno
    return first


def seconds_per_line(train: Callable, args) -> dict[int, float]:
    """CPU seconds of every line of train(), from 1 on"""
    seconds, last, tracer = {}, [0.0, None], sys.gettrace()

    def in_train(frame, event, arg):
        now = time.process_time()
        if last[1] is not None:
            seconds[last[1]] = seconds.get(last[1], 0.0) + now - last[0]
        line = frame.f_lineno - frame.f_code.co_firstlineno + 1
        last[:] = [time.process_time(), line if event == "line" else None]
        return in_train

    def at_calls(frame, event, arg):  # all but train() itself is left alone
        return in_train if frame.f_code is train.__code__ else None

    sys.settrace(at_calls)
    try:
        train(args)
    finally:
        sys.settrace(tracer)
    return seconds


def main() -> None:
    algo = importlib.import_module(f"algos.{sys.argv[1]}")
    source = inspect.getsource(algo.train)
    lines = source.splitlines()
    steps, statements = steps_of(lines), statements_of(source)
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--run-dir", f"{folder}/run", "--quiet", "--torch-threads", "1", *sys.argv[2:]]
        seconds = seconds_per_line(algo.train, tyro.cli(algo.Args, args=flags))
    log_step = list(dict.fromkeys(steps.values()))[-1]  # evaluations, checkpoints
    seconds = {line: s for line, s in seconds.items() if steps.get(line, log_step) != log_step}
    total, per_step, per_statement = sum(seconds.values()), {}, {}
    for line, s in seconds.items():
        per_step[steps[line]] = per_step.get(steps[line], 0.0) + s
        first = statements[line]
        per_statement[first] = per_statement.get(first, 0.0) + s
    print("| step | % |\n| :-- | --: |")
    for name in dict.fromkeys(steps.values()):
        if name in per_step:
            print(f"| {name} | {100 * per_step[name] / total:.1f} |")
    print("\n| statement | % |\n| :-- | --: |")
    for first in sorted(per_statement, key=per_statement.get, reverse=True)[:SHOWN]:
        print(f"| `{lines[first - 1].strip()}` | {100 * per_statement[first] / total:.1f} |")
    print(f"\n{total:.0f} CPU-seconds in all")


if __name__ == "__main__":
    main()
