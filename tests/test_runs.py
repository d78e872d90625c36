"""The section `runs` of common.py: once, on one offline and on one online file."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    OFFLINE,
    REAL_ENV,
    WITH_DATA,
    as_flags,
    budget,
    data,
    load,
    metrics_of,
    on_two_files,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

import common


@on_two_files
@pytest.mark.parametrize(("name", "value"), [("eval_seed", 3), ("eval_episodes", 3)])
def test_flags_of_evaluation_reach_it(algo, name, value, tiny, monkeypatch):
    calls = []
    monkeypatch.setattr(
        common, "evaluate", lambda *arguments, **_: calls.append(arguments) or np.zeros(2)
    )
    algo.train(replace(tiny, **{name: value}))
    position = {"eval_episodes": 2, "eval_seed": 3}[name]
    assert len(calls) == 3 and {call[position] for call in calls} == {value}


@on_two_files
def test_checkpoint_interval(algo, tiny, monkeypatch):
    saved = []
    original = common.save_atomically
    monkeypatch.setattr(
        common, "save_atomically", lambda path, write: saved.append(path) or original(path, write)
    )
    algo.train(replace(tiny, checkpoint_interval=7))
    assert sum(path.endswith("checkpoint.pt") for path in saved) == 2 + 1  # 7, 14, and the last


def test_choices_are_checked_from_python_too(algo, tiny):
    own = {"crr": ("weight_type", "advantage_type"), "gail": ("reward_type",)}
    own |= {"dreamer": ("size",)}
    for name in ("lr_schedule", "device", *own.get(algo.ALGO, ())):
        with pytest.raises(common.InputError, match=f"{name} must be one of .*, got foo"):
            algo.train(replace(tiny, **{name: "foo"}))


@on_two_files
def test_default_run_dir(algo, tiny, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    algo.train(replace(tiny, run_dir=None))
    (folder,) = Path("runs").iterdir()
    assert re.fullmatch(rf"{algo.ALGO}__{tiny.env_id}__1__\d{{8}}-\d{{6}}-\d{{6}}", folder.name)
    assert {"args.json", "metrics.csv", "checkpoint.pt", "best.pt"} <= set(os.listdir(folder))


@on_two_files
def test_logs(algo, tiny, run):
    code, out, _ = run(*as_flags(replace(tiny, quiet=False)))
    assert code == 0 and "\r" not in out  # not a terminal: plain lines
    assert out.count("eval return") == 3 and "the budget is spent" in out
    lines = Path(tiny.run_dir, "metrics.csv").read_text().splitlines()
    assert lines[0] == "step,seconds,key,value"
    keys = {line.split(",")[2] for line in lines[1:]}
    assert keys >= {f"eval/return_{name}" for name in ("mean", "std", "min", "max")}
    groups = ("charts/", "eval/", "losses/", "stats/", "time/")
    assert all(key.startswith(groups) for key in keys)
    assert json.loads(Path(tiny.run_dir, "args.json").read_text())["gamma"] == 0.99
    events = EventAccumulator(tiny.run_dir).Reload()
    assert set(events.Tags()["scalars"]) == keys
    loss = "losses/actor"
    logged = [float(line.split(",")[3]) for line in lines if f",{loss}," in line]
    shown = [event.value for event in events.Scalars(loss)]
    assert shown == pytest.approx(logged, rel=1e-5) and len(shown) == 4


@on_two_files
def test_progress_bar_on_a_terminal(tiny, monkeypatch, run):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    _, out, _ = run(*as_flags(replace(tiny, quiet=False)))
    assert any("50%" in part and "10/20 [" in part and "eval" in part for part in out.split("\r"))


@on_two_files
def test_wrong_choice_and_unknown_flag(run):
    for flags in (["--lr-schedule", "none"], ["--no-such-flag"], ["--batch-size", "many"]):
        code, _, err = run(*flags)
        assert code == 2 and flags[0] in err


@on_two_files
def test_budget_of_the_other_kind_is_told_the_right_flag(algo, run):
    right, others = "total_timesteps", ("--total-updates", "--total-epochs")
    if algo.ALGO in OFFLINE:
        right, others = "total_updates", ("--total-timesteps",)
    for flag in others:
        line = f"there is no {flag[2:].replace('-', '_')} here: the budget is {right}\n"
        assert run(flag, 5) == run(f"{flag}=5") == (2, "", line)
        assert run(flag.replace("l-", "l_"), 5) == (2, "", line)


@pytest.mark.parametrize("algo", WITH_DATA, indirect=True)
def test_broken_dataset_reaches_the_user_as_one_line(algo, tiny, tmp_path, run):
    """test_common.py goes through all of them; here the way to the exit code."""
    path = tmp_path / "page.npz"
    path.write_text("<!DOCTYPE html><html></html>")
    code, _, err = run(*as_flags(replace(tiny, dataset=str(path))))
    assert code == 2
    assert err.startswith(
        f"dataset {path}: not a complete npz file, get it again (it starts with b'<!"
    )
    assert not Path(tiny.run_dir).exists()


@pytest.fixture
def finished(algo, tiny):
    algo.train(tiny)
    return tiny, Path(tiny.run_dir, "checkpoint.pt")


def both_ways(run, args, path, *flags):
    """The same complaint from --resume and from --evaluate."""
    evaluated = run("--evaluate", path, *flags)
    resumed = run("--resume", args.run_dir, *flags)
    assert evaluated[0] == resumed[0] == 2 and evaluated[1] == resumed[1] == ""
    assert evaluated[2].count("\n") == resumed[2].count("\n") == 1
    return evaluated[2], resumed[2]


@on_two_files
def test_truncated_checkpoint(algo, finished, run):
    args, path = finished
    path.write_bytes(path.read_bytes()[:-1000])
    for err in both_ways(run, args, path):
        assert err.startswith(f"cannot use {path} with {algo.ALGO}.py: ")


@on_two_files
def test_pickle_in_place_of_a_checkpoint_is_not_run(algo, finished, run):
    args, path = finished

    class Harm:
        def __reduce__(self):
            return (open, (f"{path}.harm", "w"))

    torch.save({"algo": algo.ALGO, "harm": Harm()}, path)
    for err in both_ways(run, args, path):
        assert err.startswith(f"cannot use {path} with {algo.ALGO}.py: ")
    assert not Path(f"{path}.harm").exists()


@on_two_files
def test_checkpoint_of_another_algorithm(algo, finished, run):
    args, path = finished
    torch.save(load(args.run_dir) | {"algo": "sarsa"}, path)
    for err in both_ways(run, args, path):
        assert err == f"cannot use {path} with {algo.ALGO}.py: it is a checkpoint of sarsa\n"


@on_two_files
def test_a_best_pt_in_place_of_a_checkpoint(algo, finished, run):
    args, path = finished
    path.write_bytes(Path(args.run_dir, "best.pt").read_bytes())
    code, _, err = run("--resume", args.run_dir)
    assert (code, err) == (2, f"{path} is a best.pt: it acts, but it cannot be resumed\n")


@on_two_files
def test_checkpoint_of_another_environment(algo, finished, run):
    args, path = finished
    before = path.read_bytes()
    other = REAL_ENV.get(algo.ALGO, "Pendulum-v1")
    evaluated, resumed = both_ways(run, args, path, "--env-id", other)
    assert evaluated == f"--evaluate keeps env_id = {args.env_id} of the run, got {other}\n"
    assert resumed == f"--resume keeps env_id = {args.env_id} of the run, got {other}\n"
    assert path.read_bytes() == before


@on_two_files
def test_checkpoint_of_another_version(algo, finished, run):
    args, path = finished
    checkpoint = load(args.run_dir)
    checkpoint["args"]["no_such_flag"] = 1
    torch.save(checkpoint, path)
    for err in both_ways(run, args, path):
        why = "another version made it: its flags differ"
        assert err == f"cannot use {path} with {algo.ALGO}.py: {why}\n"


@on_two_files
def test_checkpoint_of_other_networks(algo, finished, run):
    """The user gave the actor one more layer, and goes on with an old run."""
    args, path = finished
    checkpoint = load(args.run_dir)
    del checkpoint["actor"][next(reversed(checkpoint["actor"]))]
    torch.save(checkpoint, path)
    (name, value) = next(iter(budget(algo, 25).items()))
    more = f"--{name.replace('_', '-')}", value
    for flags in (["--evaluate", path], ["--resume", args.run_dir, *more]):
        code, _, err = run(*flags)
        assert code == 2 and err.count("\n") == 1 and "Missing key(s)" in err
        assert err.startswith(f"cannot use {path} with {algo.ALGO}.py: ")


@on_two_files
def test_run_dir_that_is_a_file(algo, tiny, tmp_path, run):
    (tmp_path / "file").write_text("mine")
    flags = as_flags(replace(tiny, run_dir=str(tmp_path / "file")))
    code, _, err = run(*flags)
    assert code == 2 and err.startswith(f"cannot use {tmp_path / 'file'} as run_dir: ")
    assert (tmp_path / "file").read_text() == "mine"


@on_two_files
def test_resume_from_the_command_line(algo, finished, run):
    """Typed flags are told apart from defaults: a default that was typed is a change, too."""
    args, _ = finished
    code, _, err = run("--resume", args.run_dir, "--batch-size", "256")
    assert (code, err) == (2, "--resume keeps batch_size = 32 of the run, got 256\n")
    (name, value) = next(iter(budget(algo, 25).items()))
    code, _, err = run("--resume", args.run_dir, f"--{name.replace('_', '-')}", value)
    assert (code, err) == (0, "") and load(args.run_dir)["step"] == 25


@pytest.mark.parametrize("algo", OFFLINE, indirect=True)
def test_resume_of_a_run_in_epochs_wants_epochs(algo, tiny, run):
    algo.train(replace(tiny, total_epochs=1))
    code, _, err = run("--resume", tiny.run_dir, "--total-updates", "99")
    assert code == 2 and "counted in epochs" in err


@pytest.mark.slow
@pytest.mark.parametrize("size", ["256k", "12k"])
@pytest.mark.parametrize("algo", ["crr"], indirect=True)
def test_full_disk(algo, size, tmp_path):
    """A real file system without room for a checkpoint: one line, exit code 1, no half of a file.
    With 12 kB, TensorBoard's thread is the first to fail."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
    try:
        mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:  # without the right to mount: a limit on the size of files is the nearest thing
        if size == "12k":
            pytest.skip("needs the right to mount")
        limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000));"
        limit += "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
    else:
        limit = ""
    try:
        run_dir = disk / "run"
        flags = f"--eval-episodes 1 --dataset random:300 --hidden-dim 256 --run-dir {run_dir}"
        flags += " --total-updates 20 --eval-interval 20"
        code = f"import runpy, sys; {limit} sys.argv = {[algo.__file__, *flags.split()]!r}\n"
        code += f"runpy.run_path({algo.__file__!r}, run_name='__main__')"
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert result.returncode == 1
        assert result.stderr.count("\n") == 1 and result.stderr.startswith(f"{algo.ALGO}: ")
        if size == "256k":
            assert f"cannot write {run_dir}/best.pt: " in result.stderr
            assert "what was saved before is intact" in result.stderr
        assert not list(run_dir.glob("*.tmp")) and not list(run_dir.glob("*.pt"))
    finally:
        if mounted:
            subprocess.run(["umount", str(disk)], check=True)


@on_two_files
def test_a_file_that_cannot_be_written_is_code_1(tiny, run, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    code, _, err = run(*as_flags(tiny))
    assert code == 1 and err.startswith("cannot write ") and err.count("\n") == 1
    assert "No space left on device; what was saved before is intact" in err


def signal_at(monkeypatch, step, number=signal.SIGTERM):
    """The process gets a signal in the middle of a step."""
    original = common.lr_factor

    def interrupted(update, *rest):
        if update == step:
            os.kill(os.getpid(), number)
        return original(update, *rest)

    monkeypatch.setattr(common, "lr_factor", interrupted)


@pytest.fixture
def handlers():
    """-> the present ones, which must be back after the test. A shell starts background jobs
    without Ctrl-C, so it is set."""

    def now():
        return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    original = signal.signal(signal.SIGINT, signal.default_int_handler)
    before = now()
    yield now
    assert now() == before
    signal.signal(signal.SIGINT, original)


@pytest.mark.parametrize("algo", ["crr"], indirect=True)
def test_a_signal_makes_the_next_step_the_last(algo, tiny, monkeypatch, capsys, handlers):
    """Before the first evaluation there is no best.pt: the hint names a file that exists."""
    signal_at(monkeypatch, step=3)
    with pytest.raises(common.Stopped, match="15"):
        algo.train(replace(tiny, quiet=False))
    assert load(tiny.run_dir)["step"] == 4
    out = capsys.readouterr().out
    assert "stopped at update 4: SIGTERM was received" in out
    path = re.search(r"--evaluate (\S+)", out).group(1)
    assert path.endswith("checkpoint.pt") and Path(path).is_file()
    assert f"--resume {tiny.run_dir}\n" in out  # the budget need not be raised


@pytest.mark.parametrize("algo", ["crr"], indirect=True)
def test_a_signal_in_the_last_step_changes_nothing(algo, tiny, monkeypatch, handlers):
    signal_at(monkeypatch, step=20)
    assert algo.train(tiny)["step"] == 20


@pytest.mark.parametrize("algo", ["crr"], indirect=True)
def test_a_second_signal_has_its_usual_effect(algo, tiny, monkeypatch, handlers):
    before, seen = handlers(), []
    original = common.lr_factor

    def twice(update, *rest):
        if update == 3:
            os.kill(os.getpid(), signal.SIGINT)
            seen.extend(handlers())
            os.kill(os.getpid(), signal.SIGINT)
        return original(update, *rest)

    monkeypatch.setattr(common, "lr_factor", twice)
    with pytest.raises(KeyboardInterrupt):
        algo.train(tiny)
    assert seen == before


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("algo", ["crr"], indirect=True)
def test_nohup_is_heard(algo, tiny, monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal_at(monkeypatch, step=3, number=signal.SIGHUP)
    try:
        assert algo.train(tiny)["step"] == 20
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("algo", ["crr"], indirect=True)
def test_a_run_outside_the_main_thread(algo, tiny):
    """Python lets only the main thread handle signals."""
    with ThreadPoolExecutor() as pool:
        assert pool.submit(algo.train, tiny).result()["step"] == 20


@pytest.mark.parametrize("algo", ["crr"], indirect=True)
def test_a_second_ctrl_c_is_code_130(tiny, run, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(common, "lr_factor", interrupted)
    code, _, err = run(*as_flags(tiny))
    assert (code, err) == (130, "stopped at once; what was saved before is intact\n")


@pytest.mark.parametrize("algo", ["crr"], indirect=True)
def test_handlers_are_put_back_after_an_exception(algo, tiny, monkeypatch, handlers):
    """Also while somebody still holds the traceback, as a notebook does."""

    def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(common, "lr_factor", broken)
    before = handlers()
    try:
        algo.train(tiny)
    except ZeroDivisionError as error:
        assert handlers() == before and error.__traceback__


def test_a_loop_that_never_asks_ends_with_its_budget(tmp_path):
    args = replace(common_args(), run_dir=str(tmp_path / "run"))
    run = common.Run("crr", args, {})
    run.start(5, {}, about="a test")
    assert list(run.steps()) == [1, 2, 3, 4, 5] and run.is_last
    run.finish()


def test_a_budget_that_is_no_multiple_of_the_stride_ends_too(tmp_path):
    run = common.Run("crr", replace(common_args(), run_dir=str(tmp_path / "run")), {})
    run.start(10, {}, about="a test")
    assert list(run.steps(stride=4)) == [4, 8, 12] and run.is_last
    run.finish()


def common_args():
    from algos import crr

    return crr.Args(quiet=True, device="cpu", torch_threads=1)


def test_speeds_are_those_since_the_last_entry(tmp_path, monkeypatch):
    """Per second of a clock that the test sets: 30 updates in 10 s, then 10 in 20 s."""
    clock = [100.0]
    monkeypatch.setattr(common.time, "perf_counter", lambda: clock[0])
    run = common.Run("crr", replace(common_args(), run_dir=str(tmp_path / "run")), {})
    run.start(100, {}, about="a test")
    for step, seconds in ((30, 10), (40, 20)):
        run.step, clock[0] = step, clock[0] + seconds
        run.log({}, updates=step)
    run.finish()
    speeds = [row for row in metrics_of_all(run.folder) if row[1] == "charts/updates_per_second"]
    assert speeds == [("30", "charts/updates_per_second", "3"), ("40", speeds[1][1], "0.5")]


def metrics_of_all(folder):
    rows = [line.split(",") for line in Path(folder, "metrics.csv").read_text().splitlines()]
    return [(step, key, value) for step, _, key, value in rows]


@pytest.mark.parametrize(
    ("rule", "inside", "outside"),
    [
        ("> 0", (1e-9, math.inf), (0, -1, math.nan)),
        (">= 0", (0, 5), (-1, math.nan)),
        (">= 1", (1, math.inf), (0.99, math.nan)),
        ("in (0, inf)", (1e-300, 1e300), (0, math.inf, math.nan)),
        ("in [0, inf)", (0, 1e300), (-1e-9, math.inf, math.nan)),
        ("in (0, 1e38)", (1e-9, 9.9e37), (0, 1e38, math.nan)),
        ("in [0, 1)", (0, 0.999), (-0.1, 1, math.nan)),
        ("in (0, 1]", (1e-9, 1), (0, 1.1, math.nan)),
        ("in [0, 1]", (0, 1), (-0.1, 1.1, math.nan)),
        ("in [1, 2^10]", (1, 2**10), (0, 2**10 + 1)),
        ("in [1, 2^15)", (1, 2**15 - 1), (0, 2**15)),
        ("in [0, 10^6)", (0, 10**6 - 1), (-1, 10**6)),
        ("in [0, 2^63)", (0, 2**63 - 1), (-1, 2**63)),
        ("finite", (-1e300, 0, 1e300), (math.inf, -math.inf, math.nan)),
    ],
)
def test_rules(rule, inside, outside):
    assert all(common.RULES[rule](value) for value in inside)
    assert not any(common.RULES[rule](value) for value in outside)


def test_every_limit_has_a_rule_and_a_flag(algo):
    names = {field.name for field in fields(algo.Args)}
    for rule, flags in algo.LIMITS.items():
        assert rule in common.RULES and set(flags.split()) <= names


@pytest.mark.parametrize(
    ("step", "interval", "stride", "due"),
    [
        (10, 5, 1, True),
        (11, 5, 1, False),
        (11, 5, 2, True),
        (12, 5, 2, False),
        (0, 5, 1, True),
        (24, 20, 8, True),
        (32, 20, 8, False),
    ],
)
def test_is_due(step, interval, stride, due):
    assert common.is_due(step, interval, stride) == due


def test_lr_factor():
    constant = [common.lr_factor(k, 10, "constant", 4) for k in (1, 2, 3, 4, 5, 10)]
    assert constant == [0.25, 0.5, 0.75, 1, 1, 1]
    linear = [common.lr_factor(k, 10, "linear", 0) for k in (1, 6, 10)]
    assert linear == pytest.approx([1, 0.5, 0.1])
    cosine = [common.lr_factor(k, 8, "cosine", 0) for k in (1, 3, 5, 7)]
    assert cosine == pytest.approx([1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2])
    assert common.lr_factor(4, 12, "linear", 4) == 1
    assert common.lr_factor(5, 12, "linear", 4) == 1  # it falls from where the warm-up ends
    assert common.lr_factor(9, 12, "linear", 4) == pytest.approx(0.5)


def test_state_of_a_part_goes_there_and_back():
    network, generator = torch.nn.Linear(2, 1), torch.Generator().manual_seed(7)
    opt = torch.optim.Adam(network.parameters())
    network(torch.ones(1, 2)).sum().backward()
    opt.step()
    tensor, parameter = torch.arange(3.0), torch.nn.Parameter(torch.ones(()))
    parts = [network, opt, generator, tensor, parameter]
    states = [common.get_state(part) for part in parts]
    assert not states[-1].requires_grad and torch.equal(states[3], tensor)
    twin, twin_generator = torch.nn.Linear(2, 1), torch.Generator()
    twin_opt = torch.optim.Adam(twin.parameters())
    twins = [twin, twin_opt, twin_generator, torch.zeros(3), torch.nn.Parameter(torch.zeros(()))]
    for part, state in zip(twins, states):
        common.set_state(part, state)
    assert torch.equal(twin.weight, network.weight) and twin_opt.state_dict()["state"]
    assert torch.rand((), generator=twin_generator) == torch.rand((), generator=generator)
    assert torch.equal(twins[3], tensor) and twins[4].item() == 1 and twins[4].requires_grad
    mine = twin_opt.state_dict()["state"][0]["exp_avg"]  # no part of the file it was read from
    assert mine.data_ptr() != states[1]["state"][0]["exp_avg"].data_ptr()
    assert torch.equal(common.get_state(np.arange(3)), torch.arange(3))
    assert common.get_state([1, 2]) == [1, 2] and common.get_state(5) == 5


@on_two_files
def test_resume_refuses_other_flags_and_other_data(algo, tiny, probe_data, tmp_path):
    path = tmp_path / "data.npz"
    path.write_bytes(Path(probe_data).read_bytes())
    tiny = replace(tiny, **data(algo, str(path)))
    algo.train(tiny)
    more = replace(tiny, resume=tiny.run_dir, **budget(algo, 40))
    with pytest.raises(
        common.InputError, match=r"--resume keeps gamma = 0\.99 of the run, got 0\.9"
    ):
        algo.train(replace(more, gamma=0.9))
    with pytest.raises(common.InputError, match=f"--resume keeps env_id = {tiny.env_id}"):
        algo.train(replace(more, env_id=REAL_ENV.get(algo.ALGO, "Pendulum-v1")))
    with pytest.raises(common.InputError, match=r"is at (update|step) 20 already"):
        algo.train(replace(more, **budget(algo, 20)))
    with pytest.raises(common.InputError, match="holds a run: --resume it"):
        algo.train(tiny)
    rows = dict(np.load(path))
    rows["rewards"][3] += 1
    np.savez(path, **rows)
    if algo.ALGO in WITH_DATA:
        with pytest.raises(common.InputError, match="is not the data that the run began with"):
            algo.train(more)
    assert load(tiny.run_dir)["step"] == 20  # nothing was touched


@on_two_files
def test_resume_may_change_budget_intervals_and_stops(algo, tiny):
    algo.train(tiny)
    changes = {"eval_interval": 7, "checkpoint_interval": 3, "log_interval": 2, "patience": 50}
    algo.train(replace(tiny, resume=tiny.run_dir, **budget(algo, 30), target_return=1e9, **changes))
    checkpoint = load(tiny.run_dir)
    assert checkpoint["step"] == 30 and checkpoint["args"]["eval_interval"] == 7


@on_two_files
def test_the_clock_goes_on_after_a_resume(algo, tiny):
    algo.train(tiny)
    checkpoint = load(tiny.run_dir)
    checkpoint["log_position"]["seconds"] = 1000.0
    torch.save(checkpoint, f"{tiny.run_dir}/checkpoint.pt")
    algo.train(replace(tiny, resume=tiny.run_dir, **budget(algo, 30)))
    last = Path(tiny.run_dir, "metrics.csv").read_text().splitlines()[-1]
    assert 1000 < float(last.split(",")[1]) < 2000


@on_two_files
def test_resume_drops_what_was_logged_after_the_checkpoint(algo, tiny, tmp_path):
    """After a kill, metrics.csv is ahead of the checkpoint, and may end in half a line. TensorBoard
    hides what was written after the checkpoint, too."""
    whole = replace(tiny, **budget(algo, 30), run_dir=str(tmp_path / "whole"))
    algo.train(whole)
    algo.train(tiny)
    loss = "losses/actor"
    with open(f"{tiny.run_dir}/metrics.csv", "a") as file:
        file.write(f"25,1.0,{loss},5\n26,1.0,losses/act")
    writer = SummaryWriter(tiny.run_dir)
    writer.add_scalar(loss, 123.0, 25)
    writer.close()
    time.sleep(1.1)  # TensorBoard orders its files by the second
    algo.train(replace(tiny, **budget(algo, 30), resume=tiny.run_dir))
    assert metrics_of(whole.run_dir) == metrics_of(tiny.run_dir)
    rows = [metrics_of_all(x.run_dir) for x in (whole, tiny)]  # the speeds, too
    assert [row[:2] for row in rows[0]] == [row[:2] for row in rows[1]]
    events = EventAccumulator(tiny.run_dir).Reload().Scalars(loss)
    assert [event.step for event in events] == [5, 10, 15, 20, 25, 30]
    assert 123.0 not in [event.value for event in events]


@pytest.mark.parametrize("algo", OFFLINE, indirect=True)
def test_the_hint_at_the_end_names_the_budget_that_counts(algo, tiny, capsys):
    algo.train(replace(tiny, total_epochs=1, quiet=False))
    assert "--total-epochs <more>" in capsys.readouterr().out


@on_two_files
def test_early_stops_and_best(algo, tiny, monkeypatch, capsys):
    """Evaluations are scripted: 1, 3, 3, 2, 2, ... so that every rule has one right answer."""
    script = iter([0.0, 1.0, 3.0, 3.0, 2.0, 2.0, 2.0, 2.0])
    monkeypatch.setattr(
        common, "evaluate", lambda *_, **__: np.full(2, next(script), dtype=np.float64)
    )
    args = replace(tiny, **budget(algo, 100), patience=2, quiet=False)
    result = algo.train(args)
    assert (result["step"], result["eval/best_return"]) == (40, 3.0)  # 20 best, 30, 40 not better
    assert load(args.run_dir, "best.pt")["step"] == 20
    assert "the last 2 evaluations were not better" in capsys.readouterr().out

    script = iter([0.0, 1.0, 3.0, 2.0])
    args = replace(args, target_return=3.0, run_dir=args.run_dir + "-target")
    assert algo.train(args)["step"] == 20
    assert "an evaluation reached the target of 3.0" in capsys.readouterr().out


@on_two_files
def test_best_and_patience_survive_a_resume(algo, tiny, monkeypatch):
    """5, 3, resumed, 4: the 5 is still the best, and the 4 the second in a row without a better."""
    script = iter([0.0, 5.0, 3.0, 4.0, 4.0])
    monkeypatch.setattr(common, "evaluate", lambda *_, **__: np.full(2, next(script)))
    algo.train(tiny)
    result = algo.train(replace(tiny, resume=tiny.run_dir, **budget(algo, 40), patience=2))
    assert (result["step"], result["eval/best_return"]) == (30, 5.0)
    assert load(tiny.run_dir, "best.pt")["step"] == 10


@on_two_files
def test_S20_checkpoints_load_without_pickle(algo, tiny):
    algo.train(tiny)
    for name in ("checkpoint.pt", "best.pt"):
        torch.load(f"{tiny.run_dir}/{name}", weights_only=True)
