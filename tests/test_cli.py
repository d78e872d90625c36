"""The command line: every flag at another value, every wrong input with its line and exit code."""

import json
import os
import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, flat, load, tiny_args

from algos import crr

SCRIPT = str(ROOT / "algos" / "crr.py")


def run(monkeypatch, capsys, *flags):
    """main() as the shell would call it, without the seconds that importing torch takes."""
    monkeypatch.setattr(sys, "argv", [SCRIPT, *map(str, flags)])
    try:
        code = crr.main()
    except SystemExit as exit:  # tyro's own errors
        code = exit.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def as_flags(args):
    """--name value for every field; booleans and None as tyro wants them."""
    flags = []
    for field in fields(args):
        value, name = getattr(args, field.name), field.name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        elif value is not None:
            flags += [f"--{name}", str(value)]
    return flags


# ---- every flag works at a non-default value, and does what it says

CHANGES_TRAINING = {
    "env_id": "Pendulum-v1",
    "seed": 5,
    "dataset": "random:100",
    "reward_scale": 2.0,
    "reward_shift": 1.0,
    "normalize_reward": True,
    "total_updates": 21,
    "total_epochs": 1,
    "batch_size": 16,
    "gamma": 0.5,
    "learning_rate": 1e-3,
    "lr_schedule": "cosine",
    "warmup_updates": 10,
    "hidden_dim": 24,
    "target_return": -100.0,
    "advantage_type": "max",
    "weight_type": "exp",
    "num_action_samples": 2,
    "action_clip": 0.1,
    "tau": 0.5,
    "target_interval": 3,
}
LEAVES_TRAINING = {
    "eval_interval": 3,
    "eval_episodes": 3,
    "eval_seed": 3,
    "patience": 100,
    "checkpoint_interval": 7,
    "log_interval": 1,
    "quiet": False,
    "device": "cpu",
    "torch_threads": 2,
    "num_cwp_samples": 2,
    "beta": 0.1,  # of exp weights only
    "max_weight": 2.0,  # of exp weights only
}
ELSEWHERE = {"run_dir", "resume", "evaluate", "record", "capture_video", "compile"}


def test_every_flag_is_tried():
    tried = CHANGES_TRAINING.keys() | LEAVES_TRAINING.keys() | ELSEWHERE
    assert tried == {field.name for field in fields(crr.Args)}


@pytest.fixture(scope="module")
def baseline(probe_data, tmp_path_factory):
    args = tiny_args(probe_data, tmp_path_factory.mktemp("baseline") / "run")
    args = replace(args, device="auto")
    crr.train(args)
    return args, flat(load(args.run_dir))


@pytest.mark.parametrize("name", CHANGES_TRAINING | LEAVES_TRAINING)
def test_flag(name, baseline, monkeypatch, capsys, tmp_path):
    args, expected = baseline
    value = (CHANGES_TRAINING | LEAVES_TRAINING)[name]
    assert value != getattr(args, name)
    args = replace(args, **{name: value}, run_dir=str(tmp_path / "run"))
    if name == "env_id":
        args = replace(args, dataset="random:100")
    code, out, err = run(monkeypatch, capsys, *as_flags(args))
    assert (code, err) == (0, "")
    assert bool(out) == (not args.quiet)
    checkpoint = load(args.run_dir)
    assert checkpoint["args"][name] == value
    actual = flat(checkpoint)
    same = actual.shape == expected.shape and torch.equal(actual, expected)
    assert same == (name in LEAVES_TRAINING)
    if name == "torch_threads":
        assert torch.get_num_threads() == 2
        torch.set_num_threads(1)
    if name in ("eval_interval", "log_interval"):
        key = {"eval_interval": ",eval/return_mean,", "log_interval": ",losses/actor,"}[name]
        logged = Path(args.run_dir, "metrics.csv").read_text().count(key)
        assert logged == {"eval_interval": 1 + 6 + 1, "log_interval": 20}[name]


@pytest.mark.parametrize(("name", "value"), [("eval_seed", 3), ("eval_episodes", 3)])
def test_flags_of_evaluation_reach_it(name, value, tiny, monkeypatch):
    calls = []
    monkeypatch.setattr(
        crr.common, "evaluate", lambda *arguments: calls.append(arguments) or np.zeros(2)
    )
    crr.train(replace(tiny, **{name: value}))
    position = {"eval_episodes": 2, "eval_seed": 3}[name]
    assert len(calls) == 3 and {call[position] for call in calls} == {value}


def test_checkpoint_interval(tiny, monkeypatch):
    saved = []
    original = crr.save_atomically
    monkeypatch.setattr(
        crr, "save_atomically", lambda path, write: saved.append(path) or original(path, write)
    )
    crr.train(replace(tiny, checkpoint_interval=7))
    assert sum(path.endswith("checkpoint.pt") for path in saved) == 2 + 1  # 7, 14, and the last


def test_choices_are_checked_from_python_too(tiny):
    for name in ("weight_type", "advantage_type", "lr_schedule", "device"):
        with pytest.raises(crr.InputError, match=f"{name} must be one of .*, got foo"):
            crr.train(replace(tiny, **{name: "foo"}))


def test_divergence_is_not_silent(tiny):
    """Weights 1[NaN > 0] are 0: without a check the actor would stand still and look healthy."""
    with pytest.raises(crr.InputError, match="the critic diverged at update 5"):
        crr.train(replace(tiny, learning_rate=1e30))


def test_batch_of_one_and_dataset_of_one(tiny, tmp_path):
    crr.train(replace(tiny, batch_size=1))
    assert "nan" not in Path(tiny.run_dir, "metrics.csv").read_text()
    rows = {name: array[:1] for name, array in np.load(tiny.dataset).items()}
    np.savez(tmp_path / "one.npz", **rows)
    with pytest.raises(crr.InputError, match="has a single row"):
        crr.train(replace(tiny, dataset=str(tmp_path / "one.npz"), run_dir=str(tmp_path / "one")))


def test_default_run_dir(tiny, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    crr.train(replace(tiny, run_dir=None))
    (folder,) = Path("runs").iterdir()
    assert re.fullmatch(r"crr__Probe-v0__1__\d{8}-\d{6}", folder.name)
    assert {"args.json", "metrics.csv", "checkpoint.pt", "best.pt"} <= set(os.listdir(folder))


@pytest.mark.parametrize(("name", "value"), [("beta", 0.1), ("max_weight", 1.01)])
def test_flags_of_exp_weights(name, value, tiny, tmp_path):
    """exp(A / beta) with beta = 0.01, so that the clip is reached on this small problem, too."""
    tiny = replace(tiny, weight_type="exp", beta=0.01)
    crr.train(tiny)
    changed = replace(tiny, run_dir=str(tmp_path / "changed"), **{name: value})
    crr.train(changed)
    assert not torch.equal(flat(load(tiny.run_dir)), flat(load(changed.run_dir)))


def test_compile_gives_the_same_numbers(tiny, monkeypatch, tmp_path):
    """With the compiler's front end and its autograd, without half a minute of C++."""
    compiled_networks = []

    def compile(network):
        compiled_networks.append(type(network).__name__)
        network._compiled_call_impl = torch.compile(network._call_impl, backend="aot_eager")

    crr.train(replace(tiny, total_updates=3))
    monkeypatch.setattr(torch.nn.Module, "compile", compile)
    compiled = replace(tiny, total_updates=3, compile=True, run_dir=str(tmp_path / "compiled"))
    crr.train(compiled)
    assert sorted(compiled_networks) == ["Actor", "Actor", "TwinCritic", "TwinCritic"]
    expected, actual = load(tiny.run_dir), load(compiled.run_dir)
    assert actual["actor"].keys() == expected["actor"].keys()
    torch.testing.assert_close(flat(actual), flat(expected), rtol=1e-4, atol=1e-6)


# ---- logs


def test_logs(tiny, monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, *as_flags(replace(tiny, quiet=False)))
    assert code == 0 and "\r" not in out  # not a terminal: plain lines
    assert out.count("eval return") == 3 and "the budget is spent" in out
    lines = Path(tiny.run_dir, "metrics.csv").read_text().splitlines()
    assert lines[0] == "step,seconds,key,value"
    keys = {line.split(",")[2] for line in lines[1:]}
    assert keys >= {f"eval/return_{name}" for name in ("mean", "std", "min", "max")}
    groups = ("charts/", "eval/", "losses/", "stats/", "time/")
    assert all(key.startswith(groups) for key in keys)
    assert json.loads(Path(tiny.run_dir, "args.json").read_text())["gamma"] == 0.99

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(tiny.run_dir).Reload()
    assert set(events.Tags()["scalars"]) == keys
    logged = [float(line.split(",")[3]) for line in lines if ",losses/critic," in line]
    shown = [event.value for event in events.Scalars("losses/critic")]
    assert shown == pytest.approx(logged, rel=1e-5) and len(shown) == 4


def test_progress_bar_on_a_terminal(tiny, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    _, out, _ = run(monkeypatch, capsys, *as_flags(replace(tiny, quiet=False)))
    bar = [part for part in out.split("\r") if "ETA" in part][1]
    assert "[############............] 10/20" in bar and "/s  eval" in bar


# ---- evaluate, record, film


def test_evaluate_record_and_film(tiny, monkeypatch, capsys, tmp_path):
    args = replace(tiny, env_id="Pendulum-v1", dataset="random:300", eval_episodes=3)
    crr.train(args)
    path, file = f"{args.run_dir}/best.pt", tmp_path / "recorded.npz"
    flags = ["--evaluate", path, "--record", file, "--capture-video"]
    code, out, err = run(monkeypatch, capsys, *flags)
    assert (code, err) == (0, "")
    video = Path(args.run_dir, "videos", "seed-10000-episode-0.mp4")
    assert video.stat().st_size > 1000 and str(video) in out

    data = np.load(file)
    returns = data["rewards"].reshape(3, 200).sum(1)  # Pendulum's episodes last 200 steps
    for name in ("mean", "std", "min", "max"):
        assert f"{name} {getattr(returns, name)():.1f}" in out
    # and the record is a dataset: train on it
    again = replace(args, dataset=str(file), run_dir=str(tmp_path / "again"))
    code, _, err = run(monkeypatch, capsys, *as_flags(again))
    assert (code, err) == (0, "")
    # the seed of the episodes is the one that was asked for
    _, other, _ = run(monkeypatch, capsys, "--evaluate", path, "--eval-seed", 5)
    _, same, _ = run(monkeypatch, capsys, "--evaluate", path)
    assert other != same and same.splitlines()[0] == out.splitlines()[0]
    # CWP and its temperature can be chosen now; what would do nothing is refused
    cwp = ["--evaluate", path, "--num-cwp-samples", 9]
    _, warm, _ = run(monkeypatch, capsys, *cwp, "--beta", 1000)
    _, cold, _ = run(monkeypatch, capsys, *cwp, "--beta", 0.0001)
    assert len({same, warm, cold}) == 3
    code, _, err = run(monkeypatch, capsys, "--evaluate", path, "--gamma", 0.5)
    assert (code, err) == (2, "crr: --evaluate keeps gamma = 0.99 of the run, got 0.5\n")
    code, out, _ = run(monkeypatch, capsys, "--evaluate", path, "--quiet")
    assert (code, out) == (0, "")


def test_load_policy_acts_in_the_units_of_the_environment(tiny):
    """Pendulum's torque is in [-2, 2]: a policy that saturates must say 2, not 1."""
    args = replace(tiny, env_id="Pendulum-v1", dataset="random:300")
    crr.train(args)
    path = f"{args.run_dir}/checkpoint.pt"
    checkpoint = load(args.run_dir)
    checkpoint["actor"]["net.4.bias"][0] = 100.0
    torch.save(checkpoint, path)
    assert crr.load_policy(path)(np.zeros((4, 3), np.float32)).tolist() == [[2.0]] * 4


# ---- wrong input: one line, exit code 2

WRONG_FLAGS = [
    (["--beta", "-1.0"], "crr: beta must be > 0, got -1.0"),
    (["--beta", "nan"], "crr: beta must be > 0, got nan"),
    (["--max-weight", "0"], "crr: max_weight must be > 0, got 0.0"),
    (["--num-action-samples", "0"], "crr: num_action_samples must be > 0, got 0"),
    (["--num-cwp-samples", "-1"], "crr: num_cwp_samples must be >= 0, got -1"),
    (["--gamma", "1.0"], "crr: gamma must be in [0, 1), got 1.0"),
    (["--tau", "0"], "crr: tau must be in (0, 1], got 0.0"),
    (["--action-clip", "0"], "crr: action_clip must be in (0, 1), got 0.0"),
    (["--learning-rate", "0"], "crr: learning_rate must be > 0, got 0.0"),
    (["--total-updates", "0"], "crr: total_updates must be > 0, got 0"),
    (["--total-epochs", "0"], "crr: total_epochs must be > 0, got 0"),
    (["--batch-size", "0"], "crr: batch_size must be > 0, got 0"),
    (["--reward-shift", "inf"], "crr: reward_shift must be finite, got inf"),
    (["--reward-scale", "inf"], "crr: reward_scale must be finite, got inf"),
    (["--learning-rate", "inf"], "crr: learning_rate must be finite, got inf"),
    (["--warmup-updates", "-1"], "crr: warmup_updates must be >= 0, got -1"),
    (["--seed", "-1"], "crr: seed must be in [0, 2^63), got -1"),
    (["--patience", "0"], "crr: patience must be > 0, got 0"),
    (["--record", "x.npz"], "crr: record must be used with --evaluate, got x.npz"),
    (["--capture-video"], "crr: capture_video must be used with --evaluate, got True"),
    (["--dataset", "nowhere.npz"], "crr: dataset nowhere.npz cannot be read: No such file"),
    (["--dataset", "nonsense"], "crr: dataset nonsense: expected auto, random, random:N,"),
    (["--dataset", "random:0"], "crr: dataset random:0: write random:N with N a number of steps"),
    (["--env-id", "Nowhere-v0"], "crr: cannot make the environment Nowhere-v0:"),
    (["--env-id", "no_module:X-v0"], "crr: cannot make the environment no_module:X-v0:"),
    (["--env-id", "CartPole-v1"], "crr: CartPole-v1: actions must be continuous vectors, not"),
    (["--env-id", "Image-v0"], "crr: Image-v0: observations must be vectors, not"),
    (["--env-id", "Unbounded-v0"], "crr: Unbounded-v0: actions must have finite bounds, not"),
    (["--resume", "nowhere"], "crr: there is no checkpoint nowhere/checkpoint.pt"),
    (["--evaluate", "nowhere.pt"], "crr: there is no checkpoint nowhere.pt"),
]
if not torch.cuda.is_available():
    WRONG_FLAGS.append((["--device", "cuda"], "crr: device cuda is not available here;"))


@pytest.mark.parametrize(("flags", "line"), WRONG_FLAGS, ids=[" ".join(f) for f, _ in WRONG_FLAGS])
def test_wrong_flag(flags, line, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(monkeypatch, capsys, *flags)
    assert code == 2 and out == ""
    assert err.startswith(line) and err.count("\n") == 1
    assert os.listdir(tmp_path) == []  # nothing was begun


def test_wrong_choice_and_unknown_flag(monkeypatch, capsys):
    for flags in (["--weight-type", "none"], ["--no-such-flag"], ["--batch-size", "many"]):
        code, _, err = run(monkeypatch, capsys, *flags)
        assert code == 2 and flags[0] in err


def test_broken_dataset_reaches_the_user_as_one_line(tiny, monkeypatch, capsys, tmp_path):
    """test_common.py goes through all of them; here the way to the exit code."""
    path = tmp_path / "page.npz"
    path.write_text("<!DOCTYPE html><html></html>")
    code, _, err = run(monkeypatch, capsys, *as_flags(replace(tiny, dataset=str(path))))
    assert code == 2
    assert err == f"crr: dataset {path} is a web page, not an npz file; download it again\n"
    assert not Path(tiny.run_dir).exists()


@pytest.fixture
def finished(tiny):
    crr.train(tiny)
    return tiny, Path(tiny.run_dir, "checkpoint.pt")


def both_ways(monkeypatch, capsys, args, path, *flags):
    """The same complaint from --resume and from --evaluate."""
    evaluated = run(monkeypatch, capsys, "--evaluate", path, *flags)
    resumed = run(monkeypatch, capsys, "--resume", args.run_dir, *flags)
    assert evaluated[0] == resumed[0] == 2 and evaluated[1] == resumed[1] == ""
    assert evaluated[2].count("\n") == resumed[2].count("\n") == 1
    return evaluated[2], resumed[2]


def test_truncated_checkpoint(finished, monkeypatch, capsys):
    args, path = finished
    path.write_bytes(path.read_bytes()[:-1000])
    for err in both_ways(monkeypatch, capsys, args, path):
        assert err.startswith(f"crr: {path} is not a complete checkpoint of ours (")


def test_pickle_in_place_of_a_checkpoint_is_not_run(finished, monkeypatch, capsys):
    args, path = finished

    class Harm:
        def __reduce__(self):
            return (open, (f"{path}.harm", "w"))

    torch.save({"algo": "crr", "harm": Harm()}, path)
    for err in both_ways(monkeypatch, capsys, args, path):
        assert err.startswith(f"crr: {path} is not a complete checkpoint of ours (")
    assert not Path(f"{path}.harm").exists()


def test_checkpoint_of_another_algorithm(finished, monkeypatch, capsys):
    args, path = finished
    torch.save(load(args.run_dir) | {"algo": "awr"}, path)
    for err in both_ways(monkeypatch, capsys, args, path):
        assert err == f"crr: {path} is a checkpoint of awr, not of crr\n"


def test_checkpoint_of_another_environment(finished, monkeypatch, capsys):
    args, path = finished
    before = path.read_bytes()
    evaluated, resumed = both_ways(monkeypatch, capsys, args, path, "--env-id", "Pendulum-v1")
    assert evaluated == "crr: --evaluate keeps env_id = Probe-v0 of the run, got Pendulum-v1\n"
    assert resumed == "crr: --resume keeps env_id = Probe-v0 of the run, got Pendulum-v1\n"
    assert path.read_bytes() == before


def test_checkpoint_of_another_version(finished, monkeypatch, capsys):
    args, path = finished
    checkpoint = load(args.run_dir)
    checkpoint["args"]["no_such_flag"] = 1
    torch.save(checkpoint, path)
    for err in both_ways(monkeypatch, capsys, args, path):
        assert err == f"crr: {path} was made by another version of crr.py: its flags differ\n"


def test_run_dir_that_is_a_file(tiny, monkeypatch, capsys, tmp_path):
    (tmp_path / "file").write_text("mine")
    flags = as_flags(replace(tiny, run_dir=str(tmp_path / "file")))
    code, _, err = run(monkeypatch, capsys, *flags)
    assert code == 2 and err.startswith(f"crr: cannot use {tmp_path / 'file'} as run_dir: ")
    assert (tmp_path / "file").read_text() == "mine"


def test_resume_from_the_command_line(finished, monkeypatch, capsys):
    """Typed flags are told apart from defaults: a default that was typed is a change, too."""
    args, _ = finished
    code, _, err = run(monkeypatch, capsys, "--resume", args.run_dir, "--batch-size", "256")
    assert (code, err) == (2, "crr: --resume keeps batch_size = 32 of the run, got 256\n")
    code, _, err = run(monkeypatch, capsys, "--resume", args.run_dir, "--total-updates", "25")
    assert (code, err) == (0, "") and load(args.run_dir)["step"] == 25


def test_resume_of_a_run_in_epochs_wants_epochs(tiny, monkeypatch, capsys):
    crr.train(replace(tiny, total_epochs=1))
    code, _, err = run(monkeypatch, capsys, "--resume", tiny.run_dir, "--total-updates", "99")
    assert code == 2 and "counted in epochs" in err


# ---- the script as such


def test_help_answers_without_torch(tmp_path):
    """From any folder; importing torch would cost seconds, so it must not have happened."""
    code = f"import runpy, sys; sys.argv = [{SCRIPT!r}, '--help']\n"
    code += f"try: runpy.run_path({SCRIPT!r}, run_name='__main__')\n"
    code += "except SystemExit as exit: print('torch' in sys.modules, exit.code)"
    output = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    assert output.endswith("False 0\n")
    assert "arXiv:2006.15134" in output
    for field in fields(crr.Args):
        assert f"--{field.name.replace('_', '-')}" in output


def test_full_disk(tiny, tmp_path):
    """A real file system without room for a checkpoint: one line, exit code 1, old files intact."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    try:
        mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:  # without the right to mount: a limit on the size of files is the nearest thing
        limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000));"
        limit += "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
    else:
        limit = ""
    try:
        run_dir = disk / "run"
        run_dir.mkdir()
        (run_dir / "best.pt").write_bytes(b"from before")
        flags = f"--dataset random:300 --total-updates 20 --eval-episodes 1 --run-dir {run_dir}"
        code = f"import runpy, sys; {limit} sys.argv = {[SCRIPT, *flags.split()]!r}\n"
        code += f"runpy.run_path({SCRIPT!r}, run_name='__main__')"
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert result.returncode == 1
        assert result.stderr.count("\n") == 1
        assert result.stderr.startswith(f"crr: cannot write {run_dir}/best.pt: ")
        assert "what was saved before is intact" in result.stderr
        assert (run_dir / "best.pt").read_bytes() == b"from before"
        assert not list(run_dir.glob("*.tmp")) and not (run_dir / "checkpoint.pt").exists()
    finally:
        if mounted:
            subprocess.run(["umount", str(disk)], check=True)
