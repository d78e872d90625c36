"""benchmark/run.py --ray: a real cluster, whose workers and nodes are killed under the runs."""

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from conftest import ROOT, assert_same_state, load, processes, published, wait_until

from benchmark import run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc"),
]

TOTAL = 6000  # seconds of a run, in which a busy machine must find the time to kill it twice
TINY = "--hidden-dim 16 --batch-size 32 --eval-interval 3000 --eval-episodes 1"
TINY = f"{TINY} --checkpoint-interval 500 --total-updates {TOTAL}"
LONG = run.Row("crr", "Pendulum-v1", "random:300", "long", TINY, 0)
BAD = run.Row("crr", "Pendulum-v1", "random:300", "bad", f"{TINY} --beta -1", 0)


@pytest.fixture
def options(tmp_path):
    """With the random policy's results, so that the runner need not make them."""
    random = "random__Pendulum-v1"
    shutil.copytree(ROOT / "benchmark" / "results" / random, tmp_path / "results" / random)
    yield run.Options(runs=tmp_path / "runs", results=tmp_path / "results", seeds=1, threads=1)
    for pid in processes(str(tmp_path)) | processes(os.path.relpath(tmp_path, ROOT)):
        os.kill(pid, signal.SIGKILL)  # there are none, unless a test fails


@pytest.fixture(scope="module")
def cluster():
    """A head without cores, where the runner is, and a node with one core."""
    pytest.importorskip("ray", reason="--ray is optional: pip install ray")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        # newer versions kill the processes of a dead worker, the older ones do not: run.py must
        patch.setenv("RAY_process_group_cleanup_enabled", "0")
        patch.setenv("RAY_worker_niceness", "0")  # else a busy machine has no time for workers
        cluster = Cluster(True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        session = cluster.head_node.get_session_dir_path()
        cluster.add_node(num_cpus=1)
        yield cluster
        cluster.shutdown()
    wait_until(lambda: not processes(session))  # nothing is left


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def start_runner(options, rows, address):
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import PosixPath
from benchmark import run
from benchmark.run import Options, Row
run.TABLE = {rows!r}
options = {options!r}
options.ray = {address!r}
sys.exit(run.main(options))
"""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, "-c", code], **pipes)


def test_a_run_goes_on_elsewhere_when_its_worker_or_its_node_is_killed(
    cluster, options, tmp_path, monkeypatch
):
    """First the worker, then the node. The run is stopped before each, so that it cannot end by
    itself: if it outlived its worker, it would be there forever and hold the lock."""
    cluster.add_node(num_cpus=1)
    nodes = {node.all_processes["raylet"][0].process.pid: node for node in cluster.worker_nodes}
    runner = start_runner(options, [BAD, LONG], cluster.address)
    run_dir = options.runs / LONG.name / "1"
    steps, pids = [0], []

    def has_saved():
        assert runner.poll() is None, runner.stdout.read()
        return (run_dir / "checkpoint.pt").exists() and load(run_dir)["step"] > steps[-1]

    for victim in ("worker", "node"):
        wait_until(has_saved)
        ((pid, command),) = processes("algos/crr.py", os.path.relpath(run_dir, ROOT)).items()
        os.kill(pid, signal.SIGSTOP)
        steps.append(load(run_dir)["step"])
        pids.append(pid)
        assert ("--resume" in command) == (victim == "node")
        worker = parent(pid)
        if victim == "worker":
            os.kill(worker, signal.SIGKILL)
        else:
            cluster.remove_node(nodes[parent(worker)], allow_graceful=False)
        wait_until(lambda: pid not in processes("algos/crr.py"))  # noqa: B023
    output, _ = runner.communicate()
    assert runner.returncode == 1 and len(set(pids)) == 2 and 0 < steps[1] < steps[2] < TOTAL
    assert f"{LONG.name} seed 1: done" in output
    assert f"{BAD.name} seed 1: FAILED\n    crr: beta must be > 0, got -1.0\n" in output

    here = run.Options(runs=tmp_path / "here", results=tmp_path / "results-here", seeds=1)
    here.threads = options.threads
    monkeypatch.setattr(run, "TABLE", [LONG])
    assert run.main(here) == 0
    assert_same_state(load(run_dir), load(here.runs / LONG.name / "1"))
    there, here = (published(o.results / LONG.name / "1") for o in (options, here))
    assert there == here and there[-1][0] == str(TOTAL)


def test_a_folder_that_is_not_shared(cluster, options, monkeypatch, capsys):
    """The lock that the runner makes is what a worker looks for. The other runs go on."""
    import ray

    monkeypatch.setattr(run, "TABLE", [LONG])
    monkeypatch.setattr(Path, "touch", lambda *_: None)
    options.ray = cluster.address
    assert run.main(options) == 1
    ray.shutdown()
    assert "all nodes must share that folder" in capsys.readouterr().out


def test_ctrl_c_leaves_checkpoints(options):
    """The real command; a terminal sends the signal to all processes of the group."""
    pytest.importorskip("ray", reason="--ray is optional: pip install ray")
    name = "crr__Pendulum-v1__shipped__mean-binary"  # minutes; another seed waits for a core
    command = [sys.executable, "benchmark/run.py", "--ray", "local", "--only", name, "--seeds", "9"]
    command += ["--runs", options.runs, "--results", options.results]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environment = os.environ | {"RAY_worker_niceness": "0"}
    runner = subprocess.Popen(command, cwd=ROOT, env=environment, **pipes, start_new_session=True)
    run_dir = options.runs / name / "1"

    def has_learned():
        assert runner.poll() is None, runner.stdout.read()
        file = run_dir / "metrics.csv"
        return file.exists() and "losses/" in file.read_text()

    wait_until(has_learned)
    os.killpg(runner.pid, signal.SIGINT)
    output, _ = runner.communicate()
    assert runner.returncode == 130 and output.endswith("goes on from the checkpoints\n")
    assert 0 < load(run_dir)["step"] < 5000 and not (options.results / name).exists()
    wait_until(lambda: not processes(str(options.runs)))  # nothing is left


def test_the_next_worker_waits_for_the_end_of_the_last_one(options, monkeypatch):
    """When a node dies, its processes may outlive it. Here one even finishes the run."""
    entry = run.Run(LONG, 1, options.runs / LONG.name / "1", options.results / LONG.name / "1")
    entry.run_dir.mkdir(parents=True)
    entry.lock.touch()
    monkeypatch.setattr(run.Run, "start", lambda *_: pytest.fail("it is done"))
    codes = []
    with open(entry.lock) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=lambda: codes.append(run.attend(entry, options)))
        thread.start()
        waiter = re.compile(rf"-> FLOCK .*:{entry.lock.stat().st_ino} ")
        wait_until(lambda: waiter.search(Path("/proc/locks").read_text()))
        (entry.run_dir / "args.json").write_text(json.dumps({"total_updates": TOTAL}))
        (entry.run_dir / "generation.txt").write_text(str(entry.generation))
        (entry.run_dir / "checkpoint.pt").touch()
        rows = f"step,seconds,key,value\n{TOTAL},1,eval/return_max,0\n"
        (entry.run_dir / "metrics.csv").write_text(rows)
    thread.join()
    assert codes == [0]


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("127.0.0.1:1", "Connection refused"),
        ("nowhere", "Invalid address format"),
    ],
)
def test_no_cluster(address, reason, options, monkeypatch, capsys):
    pytest.importorskip("ray", reason="--ray is optional: pip install ray")
    monkeypatch.setattr(run, "TABLE", [LONG])
    options.ray = address
    assert run.main(options) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"run.py: no Ray cluster at {address}: ") and reason in error
    assert error.count("\n") == 1


def test_no_package(options, monkeypatch, capsys):
    monkeypatch.setattr(run, "TABLE", [LONG])
    monkeypatch.setitem(sys.modules, "ray", None)  # which makes its import fail
    options.ray = "auto"
    assert run.main(options) == 2
    assert capsys.readouterr().err == "run.py: --ray needs a package: pip install ray\n"
