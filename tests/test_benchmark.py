"""benchmark/run.py runs what is not done, goes on with what was cut off, reports what failed."""

import csv
import errno
import inspect
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
import tyro
from conftest import (
    ALGOS,
    OFFLINE,
    ROOT,
    WITH_DATA,
    assert_same_state,
    load,
    processes,
    published,
    wait_until,
)

import common
from benchmark import (
    fqf_fractions,
    model_error,
    references,
    report,
    run,
    speed,
    time_per_step,
    weights,
)
from benchmark.peers import learning

sys.path.insert(0, str(ROOT / "benchmark" / "data"))
import make
import make_experts

pytestmark = pytest.mark.slow  # it starts scripts, again and again
DATASETS = [("Pendulum-v1", make.PENDULUM), ("CartPole-v1", make.CART_POLE)]
DATASETS += [("MountainCarContinuous-v0", make.MOUNTAIN_CAR)]


def check_flags(algo, flags):
    args = tyro.cli(algo.Args, args=flags)
    common.check_flags(args, algo.LIMITS)
    if hasattr(algo, "check_args"):
        algo.check_args(args)


@pytest.fixture
def options(tmp_path):
    return run.Options(runs=tmp_path / "runs", results=tmp_path / "results", seeds=1, jobs=2)


TINY = "--hidden-dim 16 --batch-size 32 --eval-interval 200 --log-interval 10 --total-updates"
TINY_ONLINE = f"{TINY.replace('updates', 'timesteps')} 60 --learning-starts 20 --eval-episodes 1"


def row(variant, num_updates, flags=""):
    flags = f"{TINY} {num_updates} {flags} --eval-episodes 1"
    return run.Row("crr", "Pendulum-v1", "random:300", variant, flags, minutes=0)


def test_names_are_folders():
    name = run.Row("fqf", "ALE/Pong-v5", "minari:a/b-v0", "x", "", 0).name
    assert name == "fqf__ALE-Pong-v5__minari-a-b-v0__x" and run.TABLE[0].name.count("__") == 3
    name = run.Row("rlpd", "mine.envs:Maze-v0", "none", "x", "", 0).name
    assert name == "rlpd__Maze-v0__none__x"  # without the module


def test_every_row_has_a_script_and_a_name_of_its_own():
    assert len({row.name for row in run.TABLE}) == len(run.TABLE)
    for entry in run.TABLE:
        assert (ROOT / "algos" / f"{entry.algo}.py").is_file()
        task = (entry.env_id, entry.dataset)
        variants = {row.variant for row in run.TABLE if (row.env_id, row.dataset) == task}
        # cloning, which every offline table must have; RLPD is compared with SAC
        assert "bc" in variants or entry.algo == "rlpd" or entry.dataset == "none"


def test_every_algorithm_has_a_generation():
    assert run.GENERATION.keys() == ALGOS.keys()


def test_runs_of_older_code_are_made_again(options, monkeypatch, capsys):
    """Also if their folder is still there, done: it must be neither published nor gone on with."""
    monkeypatch.setattr(run, "EVALUATION", "")
    monkeypatch.setattr(run, "TABLE", [row("good", 20)])
    monkeypatch.setitem(run.GENERATION, "crr", 4)
    assert run.main(options) == 0
    name = run.TABLE[0].name
    result, folder = options.results / name / "1" / "metrics.csv", options.runs / name / "1"
    assert run.generation_of(result) == 4
    assert result.read_text().splitlines()[1] == "0,0,generation,4"
    seconds = (folder / "metrics.csv").stat().st_mtime_ns
    capsys.readouterr()
    assert run.main(options) == 0 and "1 of 1 runs are done" in capsys.readouterr().out

    monkeypatch.setitem(run.GENERATION, "crr", 5)
    assert run.main(options) == 0
    assert "0 of 1 runs are done, 1 to go" in capsys.readouterr().out
    assert run.generation_of(result) == 5
    assert (folder / "metrics.csv").stat().st_mtime_ns > seconds  # trained, not copied

    # published before generations were counted
    result.write_text(result.read_text().replace("0,0,generation,5\n", ""))
    assert run.generation_of(result) == 1
    monkeypatch.setattr(run, "RESULTS", options.results)
    again = run.Options(results=options.results.parent / "again", runs=options.runs, seeds=1)
    assert run.main(again) == 0
    assert f"{name} seed 1: done, the published run is of older code\n" in capsys.readouterr().out


def test_every_algorithm_is_known_for_what_it_is():
    assert set(run.ONLINE) == set(report.ONLINE) == ALGOS.keys() - set(OFFLINE)
    assert set(run.WITHOUT_DATA) == ALGOS.keys() - set(WITH_DATA)
    assert {row.algo for row in run.TABLE} == ALGOS.keys()


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("algo", ALGOS)
def test_flags_of_every_row_are_accepted(algo, quick, options):
    options.quick = quick
    commands = {}  # rows that differ in their task alone are checked once
    for row in (row for row in run.TABLE if row.algo == algo):
        command = run.Run(row, 1, options.runs, options.results).command(options)
        commands[row.flags] = command
    for python, script, *flags in commands.values():
        assert (python, script) == (sys.executable, str(ROOT / "algos" / f"{algo}.py"))
        check_flags(ALGOS[algo], flags)


@pytest.mark.parametrize("env_id", ["PixelCatch-v0", "MinAtar/Breakout-v1"])
def test_random_policy_of_environments_that_dreamer_makes(env_id, tmp_path, monkeypatch):
    """A catch is 1 of 8 places: a mean return of -3/4, +-0.09 with 50 episodes. Breakout pays for
    bricks alone."""
    if env_id.startswith("MinAtar/"):
        pytest.importorskip("minatar")
    run.evaluate_random_policy(env_id, tmp_path)
    file = tmp_path / f"random__{env_id.replace('/', '-')}" / "1" / "metrics.csv"
    value = float(file.read_text().split(",")[-1])
    low, high = (-1, -0.4) if env_id == "PixelCatch-v0" else (0, 2)
    assert low < value < high
    published = ROOT / "benchmark" / "results" / file.relative_to(tmp_path)
    assert published.read_text() == file.read_text()


def test_runs_skips_and_reports_failures(options, monkeypatch, capsys):
    monkeypatch.setattr(run, "EVALUATION", "")
    monkeypatch.setattr(run, "TABLE", [row("good", 20), row("bad", 20, "--beta -1")])
    assert run.main(options) == 1
    out = capsys.readouterr().out
    assert "crr__Pendulum-v1__random-300__good seed 1: done" in out
    assert "crr: beta must be > 0, got -1.0" in out  # the last lines of what failed
    good = options.results / "crr__Pendulum-v1__random-300__good" / "1"
    rows = (good / "metrics.csv").read_text().splitlines()
    assert rows[0] == "step,seconds,key,value" and len(rows) == 1 + 2 + 4 * 2  # two evaluations
    assert {line.split(",")[0] for line in rows[1:]} == {"0", "20"}
    args = json.loads((good / "args.json").read_text())
    assert args["seed"] == 1 and not os.path.isabs(args["run_dir"])
    random = options.results / "random__Pendulum-v1" / "1" / "metrics.csv"
    assert -1800 < float(random.read_text().split(",")[-1]) < -900
    assert not (options.results / "crr__Pendulum-v1__random-300__bad").exists()

    monkeypatch.setattr(run, "TABLE", [row("good", 20)])
    before = (good / "metrics.csv").stat().st_mtime_ns
    assert run.main(options) == 0
    assert "1 of 1 runs are done, 0 to go" in capsys.readouterr().out
    assert (good / "metrics.csv").stat().st_mtime_ns == before


def test_online_runs_are_counted_in_steps(options, monkeypatch):
    """A finished one is known as such, also if it was not published before we were killed."""
    monkeypatch.setattr(run, "EVALUATION", "")
    rows = [run.Row("rlpd", "Pendulum-v1", "auto", "x", TINY_ONLINE, 0, "rlpd-ablation")]
    monkeypatch.setattr(run, "TABLE", rows)
    assert rows[0].name == "rlpd-ablation__Pendulum-v1__shipped__x"
    assert run.main(options) == 0
    folder = options.results / rows[0].name / "1"
    first = (folder / "metrics.csv").read_text()
    assert "\n60," in first
    (folder / "metrics.csv").unlink()
    monkeypatch.setattr(run.Run, "start", lambda *_: pytest.fail("it is done"))
    assert run.main(options) == 0
    assert (folder / "metrics.csv").read_text() == first


def test_an_interrupted_run_goes_on_from_its_checkpoint(options, monkeypatch, tmp_path):
    """Stop the whole benchmark in the middle of a run; the same command finishes it."""
    script = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from benchmark import run
run.EVALUATION = ""
run.TABLE = [run.Row("crr", "Pendulum-v1", "random:300", "x", {TINY + " 600"!r}, 0)]
options = run.Options(runs=Path({str(options.runs)!r}), results=Path({str(options.results)!r}))
options.seeds, options.jobs, options.threads = 1, 1, 1
sys.exit(run.main(options))
"""
    command = [sys.executable, "-c", script]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    run_dir = options.runs / "crr__Pendulum-v1__random-300__x" / "1"
    while not (
        (run_dir / "metrics.csv").exists() and "losses" in (run_dir / "metrics.csv").read_text()
    ):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted" in output
    stopped_at = load(run_dir)["step"]
    assert 0 < stopped_at < 600 and not (options.results / "x").exists()
    subprocess.run(command, check=True, capture_output=True)
    assert load(run_dir)["step"] == 600
    result = options.results / run_dir.parent.name / "1" / "metrics.csv"
    steps = [int(line.split(",")[0]) for line in result.read_text().splitlines()[1:]]
    assert steps == sorted(steps) and steps.count(600) == 4 and steps.count(200) == 4


@pytest.fixture
def cut_off(options, monkeypatch, capsys):
    """A row with two seeds, of which the first is killed at its first checkpoint: the folder of
    that run, and what was printed."""
    long = row("long", 1500, "--checkpoint-interval 300 --log-interval 300")
    monkeypatch.setattr(run, "TABLE", [long])
    options.seeds, options.threads = 2, 1
    start, folder = run.Run.start, options.runs / long.name

    def start_and_kill(self, options):
        start(self, options)
        if self.seed == 1:
            wait_until(lambda: (self.run_dir / "checkpoint.pt").exists())
            self.process.kill()

    with monkeypatch.context() as patch:
        patch.setattr(run.Run, "start", start_and_kill)
        assert run.main(options) == 1
    assert 0 < load(folder / "1")["step"] < 1500 == load(folder / "2")["step"]
    return folder / "1", capsys.readouterr().out


def test_a_seed_that_is_killed_is_reported_and_goes_on_later(cut_off, options, capsys, tmp_path):
    """The other seed is done; the same command brings the first to where it would have been."""
    run_dir, out = cut_off
    name = run_dir.parent.name
    assert f"{name} seed 1: FAILED\n    killed by SIGKILL\n" in out
    assert f"{name} seed 2: done" in out and f"1 failed: {name} seed 1\n" in out
    assert [path.name for path in (options.results / name).iterdir()] == ["2"]
    assert run.main(options) == 0
    assert "1 of 2 runs are done, 1 to go" in capsys.readouterr().out
    again = run.Options(runs=tmp_path / "again", results=tmp_path / "results-again", seed=1)
    again.threads = 1
    assert run.main(again) == 0
    assert_same_state(load(run_dir), load(again.runs / name / "1"))
    assert published(options.results / name / "1") == published(again.results / name / "1")


def test_a_full_disk_is_reported_and_leaves_the_checkpoint(cut_off, options, monkeypatch, capsys):
    """A limit on the size of files stands for the disk: too small for a checkpoint of CRR."""
    run_dir, _ = cut_off
    checkpoint = (run_dir / "checkpoint.pt").read_bytes()
    flags = f"{TINY} 20 --value-warmup 5 --eval-episodes 1"
    small = run.Row("awr", "Pendulum-v1", "random:300", "bc", flags, 0)
    monkeypatch.setattr(run, "TABLE", [*run.TABLE, small])
    start, (soft, hard) = run.Run.start, resource.getrlimit(resource.RLIMIT_FSIZE)

    def start_without_room(self, options):
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(checkpoint) - 2_000, hard))
        start(self, options)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    with monkeypatch.context() as patch:
        patch.setattr(run.Run, "start", start_without_room)
        assert run.main(options) == 1
    out = capsys.readouterr().out
    file = os.path.relpath(run_dir / "checkpoint.pt", ROOT)
    assert f"seed 1: FAILED\n    crr: cannot write {file}: " in out
    assert "what was saved before is intact\n    exit code 1\n" in out
    assert f"{small.name} seed 1: done" in out
    assert (run_dir / "checkpoint.pt").read_bytes() == checkpoint
    assert not list(run_dir.glob("*.tmp"))


def test_results_that_cannot_be_written(options, monkeypatch, capsys):
    """The run is done, and is published by the same command, once there is room."""
    monkeypatch.setattr(run, "TABLE", [row("good", 20)])

    def no_room(folder, rows):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))

    run.evaluate_random_policy("Pendulum-v1", options.results)
    with monkeypatch.context() as patch:
        patch.setattr(run, "write_metrics", no_room)
        assert run.main(options) == 1
    out = capsys.readouterr().out
    assert "FAILED\n    it is done, but was not published: [Errno 28] No space left" in out
    monkeypatch.setattr(run.Run, "start", lambda *_: pytest.fail("it is done"))
    assert run.main(options) == 0
    assert published(options.results / run.TABLE[0].name / "1")[-1][0] == "20"


def test_runs_that_cannot_be_started_stop_the_others(options, monkeypatch, capsys):
    """As if the disk were full: the run that goes on saves a checkpoint, and nothing is torn."""
    monkeypatch.setattr(run, "TABLE", [row("long", 100_000), row("none", 20)])
    start, runs = run.Run.start, []

    def start_the_first(self, options):
        runs.append(self)
        if len(runs) == 2:
            metrics = runs[0].run_dir / "metrics.csv"
            wait_until(lambda: metrics.exists() and "losses/" in metrics.read_text())
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "output.txt")
        start(self, options)

    monkeypatch.setattr(run.Run, "start", start_the_first)
    assert run.main(options) == 1
    captured = capsys.readouterr()
    assert captured.err == "run.py: [Errno 28] No space left on device: 'output.txt'\n"
    assert "the same command goes on" in captured.out
    assert 0 < load(runs[0].run_dir)["step"] < 100_000


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_runs_die_with_their_runner(options, tmp_path):
    """Also if it is killed: else they would write beside those that the same command starts. The
    run is stopped before, so that it cannot end by itself."""
    script = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import PosixPath
from benchmark import run
from benchmark.run import Options, Row
entry = run.Run({row("long", 100_000)!r}, 1, {tmp_path!r} / "run", {tmp_path!r})
entry.hold(wait=False)
entry.start({options!r})
input()
"""
    runner = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE)
    words = ("algos/crr.py", os.path.relpath(tmp_path, ROOT))
    wait_until(lambda: (tmp_path / "run" / "metrics.csv").exists())
    (pid,) = processes(*words)
    os.kill(pid, signal.SIGSTOP)
    runner.kill()
    runner.wait()
    wait_until(lambda: pid not in processes(*words))


def test_what_is_made_again_is_compared_with_what_is_published(
    options, monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr(run, "TABLE", [row("good", 20)])
    monkeypatch.setattr(run, "RESULTS", options.results)
    assert run.main(options) == 0
    assert f"{run.TABLE[0].name} seed 1: done\n" in capsys.readouterr().out
    published = options.results / run.TABLE[0].name / "1" / "metrics.csv"
    for edit, words in (("", "every return as published"), ("9", "but not as published")):
        text = published.read_text().removesuffix("\n")
        published.write_text(f"{text}{edit}\n")  # one more digit of the last number
        again = run.Options(results=tmp_path / f"again{edit}", seeds=1)  # with runs of its own
        assert run.main(again) == 0
        assert (tmp_path / f"again{edit}-runs" / run.TABLE[0].name / "1" / "checkpoint.pt").exists()
        assert f"seed 1: done, {words}\n" in capsys.readouterr().out


def test_two_runners_do_not_share_a_folder(options, monkeypatch, capsys, tmp_path):
    """The second one leaves the run alone, and does the other."""
    monkeypatch.setattr(run, "EVALUATION", "")
    monkeypatch.setattr(run, "TABLE", [row("busy", 20), row("free", 20)])
    busy = run.Run(run.TABLE[0], 1, options.runs / run.TABLE[0].name / "1", tmp_path)
    busy.hold(wait=False)
    assert run.main(options) == 1
    out = capsys.readouterr().out
    assert f"{run.TABLE[0].name} seed 1: FAILED\n    another runner is at it\n" in out
    assert f"{run.TABLE[1].name} seed 1: done" in out and not busy.run_dir.exists()
    busy.held_lock.close()
    assert run.main(options) == 0


def test_the_process_of_a_run_holds_its_lock(options, monkeypatch, tmp_path):
    """Also when the runner that started it no longer does."""
    entry = run.Run(row("long", 100_000), 1, tmp_path / "run", tmp_path)
    entry.hold(wait=False)
    entry.start(options)
    second = run.Run(entry.row, 1, entry.run_dir, tmp_path)
    with pytest.raises(BlockingIOError):
        second.hold(wait=False)
    entry.process.kill()
    entry.process.wait()
    second.hold(wait=False)
    second.held_lock.close()


def test_a_run_of_other_flags_is_left_alone(cut_off, options, monkeypatch, capsys):
    """The row was changed after its run began: that must neither go on nor be published as it."""
    run_dir, _ = cut_off
    checkpoint = (run_dir / "checkpoint.pt").read_bytes()
    monkeypatch.setattr(run, "TABLE", [row("long", 1500, "--checkpoint-interval 300 --beta 2")])
    options.seeds = 1
    assert run.main(options) == 1
    folder = os.path.relpath(run_dir)
    assert f"    {folder} has other flags: delete it to start anew\n" in capsys.readouterr().out
    assert (run_dir / "checkpoint.pt").read_bytes() == checkpoint


@pytest.mark.parametrize("torn", ["20,1.5,eval/ret", "20,1.5", "20,1.5,eval/return_max,-12"])
def test_a_torn_line_is_no_evaluation(torn, options, tmp_path):
    """What a full disk leaves: the last evaluation is not complete, so the run is not finished."""
    entry = run.Run(row("x", 20), 1, tmp_path, tmp_path)
    (tmp_path / "args.json").write_text(json.dumps({"total_updates": 20}))
    (tmp_path / "generation.txt").write_text(str(entry.generation))
    (tmp_path / "checkpoint.pt").touch()
    whole = "step,seconds,key,value\n20,1.5,eval/return_mean,-1234.5\n"
    (tmp_path / "metrics.csv").write_text(whole + torn)
    assert not entry.is_finished()
    assert [row["value"] for row in run.evaluations(tmp_path / "metrics.csv")] == ["-1234.5"]
    (tmp_path / "metrics.csv").write_text(whole + "20,1.5,eval/return_max,-1200.1\n")
    assert entry.is_finished()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"jobs": 0}, "--jobs must be at least 1, got 0"),
        ({"seeds": 0}, "--seeds must be at least 1, got 0"),
        ({"only": "nothing"}, "no row's name contains 'nothing': --list shows them"),
    ],
)
def test_wrong_options_of_the_runner(flags, message, options, capsys):
    for name, value in flags.items():
        setattr(options, name, value)
    assert run.main(options) == 2
    captured = capsys.readouterr()
    assert captured.err == f"run.py: {message}\n" and captured.out == ""


def test_quick_leaves_the_results_alone(options, monkeypatch, capsys):
    """One seed of a few updates, beside what is there; what it left the last time is replaced."""
    monkeypatch.setattr(run, "TABLE", [row("good", 10_000)])
    monkeypatch.setattr(run, "QUICK_OFFLINE", "--total-updates 20")
    options.quick, options.seeds = True, 3
    leftover = options.runs / "quick-results" / "old" / "1"
    leftover.mkdir(parents=True)
    assert run.main(options) == 0
    assert not options.results.is_relative_to(ROOT) and not leftover.exists()
    assert [path.name for path in options.results.glob("crr*/*")] == ["1"]
    command, words = capsys.readouterr().out.splitlines()[-1].split("   ")
    assert words == "shows what came of them"
    assert command.split()[1:3] == ["benchmark/report.py", "--results"]
    assert os.path.samefile(command.split()[3], options.results)


def test_the_time_left_counts_minutes(options, monkeypatch, capsys):
    """After one of three runs, which was to take 1 of 7 minutes: six times as long as it took. A
    run that was there already says nothing."""

    class Done:
        returncode = 0

        def poll(self):
            return 0

    rows = [run.Row("crr", "Pendulum-v1", "none", f"{i}", "", i) for i in (3, 1, 2, 4)]
    monkeypatch.setattr(run, "TABLE", rows)
    monkeypatch.setattr(run, "evaluate_random_policy", lambda *_: None)
    monkeypatch.setattr(run.Run, "is_finished", lambda self: self.row.minutes == 3)
    monkeypatch.setattr(run.Run, "copy_results", lambda self: None)
    monkeypatch.setattr(run.Run, "start", lambda self, _: setattr(self, "process", Done()))
    seconds = iter([0.0, 0.0, 600.0, 1200.0, 2400.0])
    monkeypatch.setattr(run.time, "time", lambda: next(seconds))
    monkeypatch.setattr(run.time, "sleep", lambda _: None)
    options.jobs = 1
    assert run.main(options) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "ETA" in line]
    times = [re.search("ETA ([0-9:]+)", line)[1] for line in lines]
    # 600 s for 1 minute, 6 left; 1200 s for 3 minutes, 4 left; nothing left
    assert times == ["0:00:00", "1:00:00", "0:26:40", "0:00:00"]


def test_list_says_what_the_table_costs(options, monkeypatch, capsys):
    rows = [run.Row("crr", "Pendulum-v1", "auto", name, "", 3.0) for name in ("a", "b")]
    rows += [run.Row("rlpd", "Pendulum-v1", "none", "sac", "", 12.0, "mbpo")]
    rows += [run.Row("crr", "Pendulum-v1", "runs/data/not-there.npz", "c", "", 3.0)]
    monkeypatch.setattr(run, "TABLE", rows)
    options.seeds, options.list, options.ray = 5, True, "auto"
    assert run.main(options) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "runs/data/not-there.npz is not there: its rows are left out",
        "crr__Pendulum-v1__shipped__a 5 x 3.0 min",
        "crr__Pendulum-v1__shipped__b 5 x 3.0 min",
        "mbpo__Pendulum-v1__none__sac 5 x 12.0 min",
        "crr 2 rows 10 runs 0.5 hours of one core",
        "rlpd 1 rows 5 runs 1.0 hours of one core",
        "all 3 rows 15 runs 1.5 hours of one core",
    ]
    assert not options.runs.exists() and not options.results.exists()


@pytest.mark.parametrize(("env_id", "behaviours"), DATASETS)
def test_shipped_dataset_is_what_its_script_makes(env_id, behaviours):
    """The first episodes once more: the file in the repo was made by the script beside it."""
    again, _, _ = make.mixed_episodes(env_id, behaviours, num_episodes=11, seed=0)
    shipped = np.load(ROOT / "benchmark" / "data" / f"{env_id}.npz", allow_pickle=False)
    for name, array in again.items():
        np.testing.assert_allclose(shipped[name][: len(array)], array, atol=1e-4)


@pytest.mark.parametrize(("env_id", "behaviours"), DATASETS)
def test_table_of_the_shipped_datasets_is_current(env_id, behaviours):
    """Number of rows, mean, least and best return of the file, as its README has them."""
    env = common.make_env(env_id)
    dataset = common.load_dataset("auto", env)
    returns = dataset.episode_returns
    numbers = f"{returns.mean():.1f} | {returns.min():.1f} | {returns.max():.1f} |"
    row = f"| {env_id} | all | {len(returns)} | {len(dataset):,} | {numbers}"
    assert row in (ROOT / "benchmark" / "data" / "README.md").read_text()
    assert all(name in (ROOT / "benchmark/data/README.md").read_text() for name in behaviours)


@pytest.mark.parametrize("env_id", make_experts.EXPERTS)
def test_table_of_the_shipped_experts_is_current(env_id):
    file = common.SHIPPED / f"{env_id}-expert.npz"
    dataset = common.load_dataset(str(file), common.make_env(env_id))
    returns = dataset.episode_returns
    numbers = f"{returns.mean():.1f} | {returns.min():.1f} | {returns.max():.1f} |"
    row = f" | {len(returns)} | {len(dataset):,} | {numbers}"
    lines = (ROOT / "benchmark" / "data" / "README.md").read_text().splitlines()
    assert [line.endswith(row) for line in lines if line.startswith(f"| {file.name} |")] == [True]
    assert len(returns) == make_experts.EXPERTS[env_id][2]


def test_speed_table_by_hand():
    rows = [
        {"algo": "crr", "contender": name, "threads": threads}
        | {"turn": turn, "wall": wall * factor, "cpu": 2 * wall * factor, "peak_mb": 300}
        for name, factor in (("ours", 1.0), ("peer", 2.0))
        for threads in (1, 2)
        for turn, wall in ((0, 0.01), (1, 0.02 if name == "ours" else 0.016))
    ]
    others = [row | {"algo": "awr", "wall": 1, "cpu": 1} for row in rows]
    table = speed.speed_table("crr", rows + others).splitlines()
    # one thread counts CPU time: 50 and 25 a second; two threads count wall-clock: 100 and 50. The
    # peer has half of that in the first round, and 0.625 of it in the second
    assert table[2] == "| ours | 38 [25, 50] | 1.00 | 75 [50, 100] | 1.00 | 300 |"
    ratio = "0.56 [0.50, 0.62]"  # (0.5 + 0.625) / 2
    assert table[3] == f"| peer | 20 [16, 25] | {ratio} | 41 [31, 50] | {ratio} | 300 |"
    once = speed.speed_table("crr", [row for row in rows if row["turn"] == 0]).splitlines()
    assert once[3] == "| peer | 25 [25, 25] | 0.50 | 50 [50, 50] | 0.50 | 300 |"  # no range of one


def test_speed_is_written_with_peers_alone(monkeypatch, tmp_path, capsys):
    """Ours against the limit is printed: in the table of before, the peers' turn was another day.
    A peer that fails loses nothing that was measured before."""
    monkeypatch.setattr(speed, "PEERS", {"awr": ("axiomrl_awr",), "crr": ("d3rlpy_crr",)})
    monkeypatch.setattr(speed, "START", {})
    monkeypatch.setattr(speed, "measure_large_dataset", lambda: (0.5, 2 * speed.LARGE_MB))
    rates = {"awr": 0.1, "crr": 0.2}

    def measure_updates(algo, commands, options):
        if rates[algo] is None:
            raise SystemExit("peer failed")
        row = {"algo": algo, "contender": "ours", "turn": 0, "wall": rates[algo], "peak_mb": 9}
        return [row | {"cpu": rates[algo], "threads": threads} for threads in (1, 2)]

    monkeypatch.setattr(speed, "measure_updates", measure_updates)
    monkeypatch.setattr(speed, "contenders", lambda *_: {})
    page = tmp_path / "SPEED.md"
    page.write_text("a<!-- speed:begin --><!-- speed:end -->b")
    options = speed.Options(page=page, results=tmp_path, peers=True)
    assert speed.main(options) == 0
    first = page.read_text()
    assert "| AWR update |" in first and "| ours | 5.0 [5.0, 5.0] |" in first
    assert "in 0.5 s, with a peak of 317 MB, 2.0 times the arrays." in first
    check = speed.Options(page=page, results=tmp_path, check=True)
    assert speed.main(check) == 0

    rates["crr"] = 0.4
    assert speed.main(speed.Options("crr", page=page, results=tmp_path)) == 0
    assert page.read_text() == first and "2.5 [2.5, 2.5]" in capsys.readouterr().out
    rates |= {"awr": 1.0, "crr": None}
    with pytest.raises(SystemExit):
        speed.main(options)
    assert speed.main(check) == 1 and page.read_text() == first  # not yet, but it is there
    assert [row["wall"] for row in speed.read_rows(tmp_path / "speed.csv")] == ["0.2"] * 2 + [
        "1.0"
    ] * 2
    assert speed.main(speed.Options("awx", page=page, results=tmp_path)) == 2
    assert capsys.readouterr().err.endswith("speed: --only takes start, or one of awr, crr\n")


def test_published_speed_is_what_was_measured():
    assert speed.main(speed.Options(check=True)) == 0


def test_a_venv_that_was_not_completed_is_made_again(monkeypatch, tmp_path):
    commands = []

    def fail_the_last(command, check):
        commands.append([str(word) for word in command[1:]])
        if len(commands) == 3:
            raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(subprocess, "run", fail_the_last)
    (tmp_path / "sb3").mkdir()
    with pytest.raises(subprocess.CalledProcessError):
        speed.install("sb3", tmp_path)
    python = speed.install("sb3", tmp_path)
    assert python == str(tmp_path / "sb3" / "bin" / "python") and commands[3:] == commands[:3]
    assert commands[2][-4:] == [speed.TORCH, speed.PACKAGES["sb3"], *speed.WITH_COMMON]
    assert speed.install("sb3", tmp_path) == python and len(commands) == 6


def test_start_table_by_hand(monkeypatch):
    """Medians of each column, whatever the others did in the same turn."""
    starts = [("crr", 0.2, 3.1, 5.0, 300.2), ("crr", 0.4, 3.3, 2.0, 301.0)]
    starts += [("crr", 0.3, 4.0, 2.54, 299.0), ("rlpd", 0.25, 4.0, 3.0, 350.0)]
    starts += [("dataset", "", "", 1.0, speed.LARGE_MB / 2)]
    rows = [dict(zip(("what", *speed.START_COLUMNS), start)) for start in starts]
    flags = speed.START
    monkeypatch.setattr(speed, "START", {"crr": flags["crr"], "rlpd": flags["rlpd"]})
    table = speed.start_table(rows).splitlines()
    assert table[2] == "| crr.py | 0.30 | 3.3 | 2.5 | 300 | - |"
    assert table[3] == "| rlpd.py | 0.25 | 4.0 | 3.0 | 350 | `--learning-starts 0` |"
    assert table[5].startswith("A million transitions of HalfCheetah's size (158 MB of arrays)")
    assert table[5].endswith("in 1.0 s, with a peak of 79 MB, 0.5 times the arrays.")
    monkeypatch.undo()
    assert speed.START.keys() == ALGOS.keys()
    for algo, flags in speed.START.items():
        check_flags(ALGOS[algo], flags.split())


def test_published_starts():
    """A row for each script, with the flags that it was started with."""
    page = (ROOT / "benchmark" / "SPEED.md").read_text()
    for algo, flags in speed.START.items():
        row = rf"\| {algo}\.py \| (\S+) \| (\S+) \| (\S+) \| (\S+) \| (.*) \|"
        *numbers, shown = re.search(row, page).groups()
        assert all(float(number) > 0 for number in numbers)
        assert shown == (f"`{flags}`" if flags else "-")


def test_growth_by_hand(monkeypatch, tmp_path):
    """An update that costs 1 ms and 0.5 ms for each critic, in windows of which the last is slow.
    A step with G updates costs G times an update."""
    critics = speed.Panel("ensemble", "rlpd", {"hidden_dim": 64}, {2: 30, 8: 10})
    ratio = speed.Panel("ratio", "rlpd", {}, {1: 16, 4: 8}, unit="step")
    panels = {"num_critics": critics, "gradient_updates_per_step": ratio}
    monkeypatch.setattr(speed, "GROWTH", panels)
    calls = []

    def time_windows(name, command, threads, windows, updates):
        flags = json.loads(command[command.index("--flags") + 1])
        calls.append((command[1:3], flags, threads, updates))
        cpu = 0.001 + 0.0005 * flags.get("num_critics", 4)
        return {"cpu": [cpu] * (windows - 1) + [10 * cpu]}

    monkeypatch.setattr(speed, "time_windows", time_windows)
    rows = speed.measure_growth(speed.Options(rounds=2, windows=3))
    script = [str(ROOT / "benchmark" / "peers" / "ours_sac.py"), "rlpd"]
    assert calls[0] == (script, {"hidden_dim": 64, "num_critics": 2}, 1, 30)
    assert calls[1] == (script, {"hidden_dim": 64, "num_critics": 8}, 1, 10)
    assert calls[3] == (script, {"gradient_updates_per_step": 4}, 1, 8)
    assert calls[4:] == calls[:4] and len(rows) == 2 * 4 * 3  # two turns
    row = {"contender": "rlpd", "flag": "num_critics", "value": 2, "per": "update"}
    assert rows[0] == row | {"turn": 0, "seconds": "0.002"}
    values, windows = speed.growth_curve(rows, "num_critics")
    assert values == [2, 8] and windows[0] == [0.002, 0.002, 0.02] * 2
    medians = [sorted(seconds)[3] for seconds in windows]  # 2 ms and 5 ms
    assert speed.last_slope(values, medians) == pytest.approx(np.log(2.5) / np.log(4))
    values, windows = speed.growth_curve(rows, "gradient_updates_per_step")
    assert values == [1, 4] and [min(seconds) for seconds in windows] == [0.003, 0.012]
    assert speed.last_slope(values, [0.003, 0.012]) == pytest.approx(1)
    assert speed.last_slope([1, 2, 4], [1.0, 7.0, 7.0]) == 0
    names = [speed.in_thousands(value) for value in (16, 1000, 1024, 100_000, 10**6)]
    assert names == ["16", "1k", "1024", "100k", "1M"]
    speed.draw_growth(rows, tmp_path / "growth.png")
    assert (tmp_path / "growth.png").stat().st_size > 10_000


@pytest.mark.parametrize("flag", ["batch_size", "num_critics", "buffer_capacity"])
def test_growth_times_our_scripts(flag, monkeypatch):
    """The scripts take the flags, and give back a time per window."""
    flags = {"batch_size": {}, "num_critics": {"gradient_updates_per_step": 2, "dataset": "none"}}
    flags = flags.get(flag, {}) | {"hidden_dim": 16}
    setting = speed.GROWTH[flag].setting
    panel = speed.Panel("small", setting, flags, {64: 2})
    monkeypatch.setattr(speed, "GROWTH", {flag: panel})
    rows = speed.measure_growth(speed.Options(rounds=1, windows=2))
    assert [(row["contender"], row["value"]) for row in rows] == [(setting, 64)] * 2
    assert all(float(row["seconds"]) > 0 for row in rows)


def test_published_growth(tmp_path):
    """All panels are there, each with several windows for every value, which are as far apart as
    the ratio between them says. How long anything took is the machine's business."""
    with open(ROOT / "benchmark" / "results" / "growth.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(dict.fromkeys(row["flag"] for row in rows)) == list(speed.GROWTH)
    for flag, panel in speed.GROWTH.items():
        values, windows = speed.growth_curve(rows, flag)
        assert values == list(panel.updates) and len(values) >= 4
        np.testing.assert_allclose(np.diff(np.log(values)), np.log(values[1] / values[0]))
        assert all(len(seconds) >= 3 and min(seconds) > 0 for seconds in windows)
        mine = {(row["contender"], row["per"]) for row in rows if row["flag"] == flag}
        assert mine == {(panel.setting, panel.unit)}
        assert hasattr(ALGOS[panel.setting.split("-")[0]].Args, flag)
    speed.draw_growth(rows, tmp_path / "growth.png")
    assert (tmp_path / "growth.png").stat().st_size > 10_000


def test_variants_of_ours_have_a_contender():
    assert speed.VARIANTS.keys() <= speed.PEERS.keys()
    for algo, variants in speed.VARIANTS.items():
        commands = speed.contenders(algo, None)
        for name, variant in variants.items():
            assert commands[name] == [*commands["ours"], "--variant", variant]


def loop(seconds):
    # 1. rest
    for share in (0.1, 0.3):
        time.sleep(share)

        # 2. work,
        # and no rest
        burn(
            share * seconds,
        )


def burn(seconds):
    start = time.process_time()
    while time.process_time() - start < seconds:
        pass


def test_time_per_step_is_cpu_time_of_the_lines_themselves():
    """Two statements of a loop: one sleeps, which costs nothing, the other works."""
    source = inspect.getsource(loop)
    steps = time_per_step.steps_of(source.splitlines())
    assert steps == dict.fromkeys((2, 3, 4, 5), "1. rest") | dict.fromkeys(range(6, 11), "2. work,")
    statements = time_per_step.statements_of(source)
    assert statements[4] == 4 and statements[8] == statements[9] == statements[10] == 8
    seconds = time_per_step.seconds_per_line(loop, 1.0)
    total = sum(seconds.values())
    assert set(seconds) == {3, 4, 8, 9} and total > 0.4
    assert seconds[8] + seconds[9] > 0.9 * total


def test_every_peer_has_a_script_and_a_package():
    assert speed.PEERS.keys() == speed.UPDATES.keys()
    for script in (script for scripts in speed.PEERS.values() for script in scripts):
        assert script.split("_")[0] in speed.PACKAGES
        assert (ROOT / "benchmark" / "peers" / f"{script}.py").is_file()


def test_every_reference_has_a_script_a_package_and_a_row_of_ours():
    rows = {row.name for row in run.TABLE}
    for script, row, variant, num_seeds in references.RUNS:
        peer = script.split("_")[1]
        assert peer in speed.PACKAGES and variant.split("-")[0] == peer and num_seeds > 0
        text = (ROOT / "benchmark" / "peers" / f"{script}.py").read_text()
        assert f'"{row}"' in text and row in rows
        assert (ROOT / "benchmark" / "results" / row / "1" / "args.json").is_file()
    measured = {f"{row.rpartition('__')[0]}__{variant}" for _, row, variant, _ in references.RUNS}
    headlines = {  # Dreamer's are Stable-Baselines3's, by a script of their own
        "__".join((algo, *line.task, name))
        for algo, line in report.HEADLINES.items()
        for name in line.references
        if algo != "dreamer"
    }
    assert headlines <= measured


def test_a_reference_that_fails_does_not_stop_the_others(monkeypatch, tmp_path, capfd):
    """One cannot be installed, one ends with an error, one is there, one learns."""
    peers = tmp_path / "benchmark" / "peers"
    peers.mkdir(parents=True)
    learn = "import pathlib, sys; folder = pathlib.Path(sys.argv[5], 'a__good', sys.argv[3])"
    learn += "; folder.mkdir(parents=True); (folder / 'metrics.csv').touch()"
    for name, code in (("bad", "raise SystemExit(7)"), ("good", learn)):
        (peers / f"learn_{name}_a.py").write_text(code)
    names = ("none", "bad", "good")
    runs = [(f"learn_{name}_a", "a__default", name, 1 + (name == "good")) for name in names]
    monkeypatch.setattr(references, "RUNS", runs)
    monkeypatch.setattr(references, "ROOT", tmp_path)

    def install(peer, venvs):
        if peer == "none":
            raise subprocess.CalledProcessError(3, "pip")
        return sys.executable

    monkeypatch.setattr(references, "install", install)
    results = tmp_path / "results"
    (results / "a__good" / "2").mkdir(parents=True)
    (results / "a__good" / "2" / "metrics.csv").touch()
    assert references.main(references.Options(results=results)) == 1
    out = capfd.readouterr().out.splitlines()
    assert out[:2] == ["a__none seed 1", "FAILED with exit code 3"]
    assert out[2:4] == ["a__bad seed 1", "FAILED with exit code 7"]
    assert out[4:] == ["a__good seed 1", "2 failed: a__none seed 1 a__bad seed 1"]
    assert (results / "a__good" / "1" / "metrics.csv").exists()
    assert references.main(references.Options("good", results=results)) == 0
    assert references.main(references.Options("better", results=results)) == 2


def test_a_reference_is_published_beside_our_row(tmp_path, monkeypatch):
    """A peer that pushes as its random generator says: what it saw and what report.py reads."""
    row = "crr__Pendulum-v1__random-100000__mean-binary"
    command = ["learn", row, "--seed", "3", "--budget", "20", "--results", str(tmp_path)]
    monkeypatch.setattr("sys.argv", command)
    task = learning.Task("nobody", "numpy", (row,))
    assert (task.env_id, task.eval_interval) == ("Pendulum-v1", 20)
    assert task.args["eval_episodes"] == 50 and task.args["eval_seed"] == 10_000
    assert task.action_space.high == 2

    task.args |= {"dataset": "random:300", "eval_episodes": 2}
    env = common.make_env("Pendulum-v1")
    ours = common.load_dataset("random:300", env, seed=3, reward_scale=0.1)
    assert task.load_dataset().fingerprint == ours.fingerprint

    def policy(obs: np.ndarray) -> np.ndarray:
        return np.random.uniform(-2, 2, (len(obs), 1)).astype(np.float32)

    state = np.random.get_state()[1].copy()
    task.start(policy, tau=0.5)
    assert not list(tmp_path.iterdir())  # only a run that is done is published
    assert (np.random.get_state()[1] == state).all()
    task.evaluate(20)
    expected = common.evaluate(policy, "Pendulum-v1", 2, 10_000).mean()
    folder = tmp_path / "crr__Pendulum-v1__random-100000__nobody" / "3"
    result = report.read_run(folder / "metrics.csv")
    assert result.steps.tolist() == [0, 20] and result.behaviour is None
    assert result.returns == pytest.approx([expected, expected], rel=1e-5)
    args = json.loads((folder / "args.json").read_text())
    assert (args["seed"], args["total_updates"], args["tau"]) == (3, 20, 0.5)
    assert args["package"] == f"numpy=={np.__version__}"


def test_published_weights(tmp_path):
    """The shares of the behaviours add up, cloning is the limit of a high temperature, and the
    picture can be drawn from the file."""
    with open(ROOT / "benchmark" / "results" / "weights.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        shares = [float(value) for name, value in row.items() if name.startswith("noise")]
        assert len(shares) == 5 and sum(shares) == pytest.approx(1, abs=1e-3)
    warm = [row for row in rows if row["method"] in ("AWR", "MARWIL") and float(row["beta"]) == 30]
    assert len(warm) == 2 and all(float(row["ess"]) > 0.99 for row in warm)
    weights.draw(rows, tmp_path / "weights.png")
    assert (tmp_path / "weights.png").stat().st_size > 10_000


def test_model_error_by_hand():
    """A model that is off by (0.1, 0) more with every step: k times that after k steps, in units of
    the standard deviations, from every start that has enough steps left in its episode."""

    class Model:
        def sample(self, obs, action, generator):
            return None, obs + torch.cat([action, -action], dim=1) + torch.tensor([0.1, 0.0]), None

    torch.manual_seed(0)
    episodes = []
    for length in (20, 14, 15):  # the second is too short
        action = torch.randn(length, 1)
        changes = torch.cat([torch.zeros(1, 2), torch.cat([action, -action], dim=1)])
        episodes.append((changes.cumsum(dim=0), action))
    errors, no_change = model_error.rollout_errors(Model(), episodes, torch.Generator())
    assert errors.shape == no_change.shape == (15, 6 + 1)
    std = np.concatenate([obs.numpy() for obs, _ in episodes]).std(axis=0, ddof=1)
    for k in range(15):
        expected = 0.1 * (k + 1) / std[0] / 2**0.5
        np.testing.assert_allclose(errors[k], expected, rtol=1e-3)
    moved = (episodes[0][0][5] - episodes[0][0][2]).numpy() / std  # from step 2, after 3 steps
    assert no_change[2, 2].item() == pytest.approx((moved**2).mean() ** 0.5, rel=1e-4)


def test_published_model_error(tmp_path):
    """It grows along a rollout, from less than what no change would give, and can be drawn."""
    with open(ROOT / "benchmark" / "results" / "model_error.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    for env_id in model_error.TASKS:
        mine = [row for row in rows if row["env_id"] == env_id]
        assert [int(row["length"]) for row in mine] == list(range(1, 16))
        assert all(float(row["q25"]) <= float(row["median"]) <= float(row["q75"]) for row in mine)
        assert float(mine[0]["median"]) < float(mine[0]["no_change"])
        assert float(mine[0]["median"]) < float(mine[-1]["median"])
    curves = {
        env_id: model_error.fit_errors(env_id, model_error.Options())
        for env_id in model_error.TASKS
    }
    assert all(len(curve) == 7 + 1 for curve in curves.values())  # seven members, and new steps
    model_error.draw(rows, curves, tmp_path / "model_error.png")
    assert (tmp_path / "model_error.png").stat().st_size > 10_000


def test_published_fractions_moved_unless_the_rate_is_the_papers(tmp_path):
    """From log N on, down to clearly below it; at the paper's rate they stay to four digits."""
    results = ROOT / "benchmark" / "results"
    curves = {
        label: fqf_fractions.entropy_curves(results, row)
        for label, row in fqf_fractions.CURVES.items()
    }
    for label, seeds in curves.items():
        assert seeds and all(entropy[0] == pytest.approx(1, abs=0.02) for _, entropy in seeds)
        for steps, entropy in seeds:
            assert (np.diff(steps) > 0).all()
            if "paper" in label:
                assert entropy == pytest.approx(1, abs=1e-4)
            else:
                assert 0.5 < entropy[-1] < 0.98
    fqf_fractions.draw_entropy(curves, tmp_path / "entropy.png")
    assert (tmp_path / "entropy.png").stat().st_size > 10_000


@pytest.mark.parametrize("name", ["breakout.csv", "breakout_dreamer.csv"])
def test_published_memory_of_breakout(name):
    """Twenty minutes, and no more memory at their end than in their first half."""
    with open(ROOT / "benchmark" / "results" / name, newline="") as file:
        rows = list(csv.DictReader(file))
    first = [int(row["megabytes"]) for row in rows if row["phase"] == "first"]
    assert len(first) >= 110 and sum(row["phase"] == "resumed" for row in rows) >= 5
    assert max(first[len(first) // 2 :]) < 1.02 * max(first[: len(first) // 2])
