"""Run the benchmark: every row of TABLE, for several seeds, several runs at once.

    python benchmark/run.py                       every run that benchmark/results/ lacks, or has
                                                  from older code (GENERATION)
    python benchmark/run.py --results runs/again  every run, also those that are published there
    python benchmark/run.py --only crr --seeds 2  rows whose name contains "crr", two seeds each
    python benchmark/run.py --quick               every row for a few updates: does it still work?
    python benchmark/run.py --list                the rows and what they cost; runs nothing

Some rows use datasets that other people made and that are not ours to ship, or that are too large.
They are looked for in runs/data/ and left out if they are not there; benchmark/data/README.md says
where they come from.

A run is a subprocess of the plain script. One that is done is skipped, one that was interrupted
goes on from its checkpoint, one that fails or is killed is reported with its last lines while the
others go on (the exit code is then 1, and the same command tries it again). Runs live in
runs/benchmark/<row>/<seed>/ (with "--results runs/again" in runs/again-runs/), which two runners
never share. When one is done, its evaluations are copied to benchmark/results/<row>/<seed>/, small
and committed, for report.py. With one thread each, as the published ones had, they end in the same
bits on the same kind of machine; what is made again is compared. Linux or macOS.

On a SLURM cluster, one array job does the same, one task per seed:
    sbatch --array=1-5 --wrap 'python benchmark/run.py --jobs 1 --seed $SLURM_ARRAY_TASK_ID'

On a Ray cluster (pip install ray), every run waits for a core of any node:
    ray start --head                               on the first node
    ray start --address=FIRST:6379                 on each of the others
    python benchmark/run.py --ray auto             on any of them; "--ray local" needs none of this

All nodes must have this folder under the same path, with file locks, as NFSv4 gives them. If a
worker or a node dies, its runs go on elsewhere from their checkpoints. If the nodes are alike, they
end in the same bits. Ray's workers step back for all else that a node does, unless it was started
with RAY_worker_niceness=0 in the environment.
"""

import csv
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TextIO

import tyro

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmark" / "results"  # the published ones
sys.path.insert(0, str(ROOT))  # for common.py

# Of each file: raised by one when a change of it, or of common.py, changes its numbers. A published
# run of an older generation is marked in the tables, and run.py makes it again.
GENERATION = {
    "awr": 2,
    "marwil": 2,
    "crr": 2,
    "rlpd": 2,
    "mbpo": 2,
    "fqf": 3,
    "gail": 2,
    "dreamer": 2,
}

# What a run's process executes before the script. On Linux a run is to die with the process that
# started it: when that is killed, a run that lived on would share its folder with its successor.
DIE_WITH_PARENT = """
import ctypes, os, signal, sys
parent, *command = sys.argv[1:]
if sys.platform == "linux":
    PR_SET_PDEATHSIG = 1  # its number in linux/prctl.h
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        sys.exit("the runner died before the run began")
os.execv(command[0], command)
"""


@dataclass(frozen=True)
class Row:
    algo: str
    env_id: str
    dataset: str
    variant: str  # "bc" is what report.py puts into the column of that name
    flags: str
    minutes: float  # of one run, on one core of a laptop
    table: str = ""  # of report.py, if it is not the algorithm's own

    @property
    def name(self) -> str:
        dataset = "shipped" if self.dataset == "auto" else self.dataset
        dataset = Path(dataset).stem if dataset.endswith(".npz") else dataset
        name = f"{self.table or self.algo}__{short_name(self.env_id)}__{dataset}__{self.variant}"
        return name.replace(":", "-").replace("/", "-")

    @property
    def arguments(self) -> list[str]:
        """All that makes a run of this row what it is, but for the seed. report.py shows them."""
        identity = ["--env-id", self.env_id]
        if self.algo not in WITHOUT_DATA:
            identity += ["--dataset", self.dataset]
        return [*identity, *EVALUATION.split(), *self.flags.split()]


def short_name(env_id: str) -> str:
    """Without the module that an environment of our own comes from."""
    return env_id.rpartition(":")[2]


CRR_VARIANTS = {
    "mean-binary": "",
    "max-binary": "--advantage-type max",
    "mean-exp": "--weight-type exp",
}
TABLE = [
    Row("crr", "Pendulum-v1", "random:100000", variant, f"{flags} --total-updates 10000", 3.0)
    for variant, flags in CRR_VARIANTS.items()
]
TABLE += [
    Row("crr", "Pendulum-v1", "auto", "mean-binary", "--total-updates 5000", 1.5),
    Row("crr", "CartPole-v1", "auto", "mean-binary", "", 3.5),
]
# The three that weigh what they clone, side by side. Cloning itself is MARWIL with beta = 0.
RETURN_WEIGHTED = {
    ("marwil", "bc"): ("--beta 0", 0.8),
    ("marwil", "default"): ("", 1.2),
    ("awr", "default"): ("", 1.4),
}
TABLE += [
    Row(algo, env_id, dataset, variant, flags, minutes)
    for env_id, dataset in (
        ("Pendulum-v1", "auto"),
        ("CartPole-v1", "auto"),
        ("Pendulum-v1", "random:100000"),
    )
    for (algo, variant), (flags, minutes) in RETURN_WEIGHTED.items()
]
RLLIB_NORM = "--norm-start 100 --norm-rate 1e-8 --max-weight inf"
TABLE += [  # the norm as RLlib has it, lambda as in AWR's paper, and sharper weights
    Row("marwil", "Pendulum-v1", "auto", "rllib-norm", RLLIB_NORM, 1.2),
    Row("awr", "Pendulum-v1", "auto", "lambda-0.95", "--td-lambda 0.95", 1.4),
    Row("awr", "CartPole-v1", "auto", "beta-0.5", "--beta 0.5", 1.4),
]
# RLPD, SAC without the data, and SAC that starts with the data in its buffer
SAC = "--num-critics 2 --no-critic-layer-norm --offline-batch-ratio 0"
SAC_VARIANTS = {
    "default": ("", 1.0),
    "sac": (SAC, 0.35),
    "sac-data-in-buffer": (f"{SAC} --data-in-buffer", 0.6),
}
ABLATIONS = {
    "no-layer-norm": ("--no-critic-layer-norm", 0.8),
    "no-symmetric-sampling": ("--offline-batch-ratio 0 --data-in-buffer", 1.0),
    "2-critics": ("--num-critics 2", 0.7),
    "utd-1": ("--gradient-updates-per-step 1", 0.3),
    "no-data": ("--offline-batch-ratio 0", 1.0),
}
SWING_UP = ("Pendulum-v1", "auto"), "--total-timesteps 1200 --eval-interval 100", 2.5
SPARSE = (
    ("MountainCarContinuous-v0", "auto"),
    "--gradient-updates-per-step 4 --no-backup-entropy --learning-starts 500"
    " --total-timesteps 4000 --eval-interval 500 --eval-episodes 20",
    5.0,
)
RUNNING = (
    ("HalfCheetah-v5", "runs/data/halfcheetah-replay-sac.npz"),
    "--hidden-dim 256 --gradient-updates-per-step 2 --learning-starts 1000"
    " --total-timesteps 10000 --eval-interval 1000 --eval-episodes 10",
    14.0,
)
RLPD_ROWS = {
    SWING_UP: ("default", "sac", "sac-data-in-buffer"),
    SPARSE: ("default", "sac"),
    RUNNING: ("default", "sac"),
}
TABLE += [
    Row("rlpd", *task, variant, f"{task_flags} {SAC_VARIANTS[variant][0]}", minutes)
    for (task, task_flags, task_minutes), variants in RLPD_ROWS.items()
    for variant in variants
    for minutes in (task_minutes * SAC_VARIANTS[variant][1],)
]
TABLE += [
    Row(
        "rlpd",
        *SWING_UP[0],
        variant,
        f"{SWING_UP[1]} {flags}",
        SWING_UP[2] * share,
        "rlpd-ablation",
    )
    for variant, (flags, share) in ABLATIONS.items()
]
# Mazes with a sparse reward (mazes.py), where the prior data matter: all of the above, and more
MAZE = (
    "--reward-shift -1 --no-backup-entropy --gradient-updates-per-step 4"
    " --total-timesteps {} --eval-interval 500"
)
MAZES = {
    "Medium": (("default", "sac", "sac-data-in-buffer"), 4_000),
    "Large": (("default", "sac", "sac-data-in-buffer"), 12_000),
}
MAZE_ABLATIONS = {
    "no-layer-norm": "--no-critic-layer-norm",
    "no-symmetric-sampling": "--offline-batch-ratio 0 --data-in-buffer",
    "2-critics": "--num-critics 2",
    "ratio-0.25": "--offline-batch-ratio 0.25",
    "ratio-0.75": "--offline-batch-ratio 0.75",
    "utd-1": "--gradient-updates-per-step 1",
}
MAZE_TASKS = {
    size: (f"benchmark.mazes:Maze{size}-v0", f"runs/data/maze-{size.lower()}.npz") for size in MAZES
}
TABLE += [
    Row(
        "rlpd",
        *MAZE_TASKS[size],
        variant,
        f"{MAZE.format(steps)} {SAC_VARIANTS[variant][0]}",
        steps / 1_000 * (0.6 if variant == "default" else 0.3),
    )
    for size, (variants, steps) in MAZES.items()
    for variant in variants
]
TABLE += [
    Row(
        "rlpd",
        *MAZE_TASKS["Large"],
        variant,
        f"{MAZE.format(12_000)} {flags}",
        7.0,
        "rlpd-ablation",
    )
    for variant, flags in MAZE_ABLATIONS.items()
]
# MBPO and SAC, which is rlpd.py without data: one update per step, as usual, and as many as MBPO
SWING_UP_ALONE = ("Pendulum-v1", "none"), "--total-timesteps 2000", 1.9
BALANCING = (
    ("InvertedPendulum-v5", "none"),
    "--total-timesteps 5000 --learning-starts 500 --eval-interval 500 --eval-episodes 20",
    6.0,
)
HOPPING = (
    ("Hopper-v5", "none"),
    "--total-timesteps 20000 --learning-starts 1000 --learning-rate 3e-4 --target-entropy -1"
    " --eval-interval 1000 --eval-episodes 20 --checkpoint-interval 2500",
    30.0,
)
MBPO = {
    SWING_UP_ALONE: "",
    BALANCING: "--learning-rate 3e-4 --target-entropy -0.05 --model-train-interval 250"
    " --model-batch-size 256",
    HOPPING: "--model-hidden-dim 200 --model-batch-size 256 --model-train-interval 250"
    " --rollout-batch-size 50000",
}
TABLE += [
    Row("mbpo", *task, "default", f"{task_flags} {flags}", minutes)
    for (task, task_flags, minutes), flags in MBPO.items()
]
ONE, TEN = (f"--gradient-updates-per-step {number}" for number in (1, 10))
TABLE += [
    Row("rlpd", *task, variant, f"{task_flags} {SAC} {updates}", minutes, "mbpo")
    for (task, task_flags, _), variant, updates, minutes in (
        (SWING_UP_ALONE, "sac", ONE, 0.3),
        (SWING_UP_ALONE, "sac-10-updates", TEN, 1.2),
        (HOPPING, "sac-10-updates", TEN, 14.0),
    )
]
TABLE += [
    Row(
        "mbpo",
        *task[0],
        "no-model",
        f"{task[1]} {MBPO[task]} --real-ratio 1",
        minutes,
        "mbpo-ablation",
    )
    for task, minutes in ((SWING_UP_ALONE, 1.3), (BALANCING, 3.5))
]
# FQF, the same with prioritised replay, and with fractions that stay 1/N apart, which is QR-DQN
POLE = ("CartPole-v1", "none")
FQF_VARIANTS = {"default": "", "prioritized": "--prioritized", "qr-dqn": "--no-learn-fractions"}
TABLE += [Row("fqf", *POLE, variant, flags, 4.0) for variant, flags in FQF_VARIANTS.items()]
LANDING = (
    ("LunarLander-v3", "none"),
    "--total-timesteps 200000 --train-frequency 2 --batch-size 64 --n-steps 3 --target-interval 50"
    " --buffer-capacity 100000 --learning-starts 2000 --epsilon-steps 20000 --eval-interval 10000"
    " --checkpoint-interval 50000",
)
TABLE += [
    Row("fqf", *LANDING[0], variant, f"{LANDING[1]} {FQF_VARIANTS[variant]}", 11.0)
    for variant in ("default", "qr-dqn")
]
FQF_ABLATIONS = {
    "paper-rate": "--fraction-learning-rate 2.5e-9",
    "equal-targets": "--no-weight-targets-by-fraction",
}
TABLE += [
    Row("fqf", *POLE, variant, flags, 4.0, "fqf-ablation")
    for variant, flags in FQF_ABLATIONS.items()
]
# GAIL, and what makes its returns mean something: a discriminator that is frozen before it learned
# anything. Behaviour cloning of the same rows is MARWIL's.
EXPERT = "benchmark/data/{}-expert.npz"
GAIL_TASKS = {
    "CartPole-v1": ("--total-timesteps 100000 --eval-interval 5000", 0.3),
    "Pendulum-v1": ("--total-timesteps 200000 --eval-interval 10000", 0.6),
    "LunarLander-v3": (
        "--total-timesteps 400000 --num-envs 16 --discriminator-updates 32 --policy-entropy-coef 0"
        " --eval-interval 40000",
        1.5,
    ),
}
FEW = {"num_expert_episodes": 4, "expert_subsampling": 10}  # hardly enough to clone
GAIL_VARIANTS = {
    "default": "",
    "frozen": "--no-learn-discriminator",
    "absorbing": "--absorbing",
    "absorbing-frozen": "--absorbing --no-learn-discriminator",
    "few": " ".join(f"--{name.replace('_', '-')} {n}" for name, n in FEW.items()),
}
GAIL_ROWS = {
    "CartPole-v1": ("default", "frozen", "absorbing", "absorbing-frozen"),
    "Pendulum-v1": ("default", "frozen", "few"),  # nothing ends: --absorbing changes nothing
    "LunarLander-v3": ("default", "absorbing", "absorbing-frozen", "few"),
}
TABLE += [
    Row("gail", env_id, EXPERT.format(env_id), variant, f"{task} {GAIL_VARIANTS[variant]}", minutes)
    for env_id, (task, minutes) in GAIL_TASKS.items()
    for variant in GAIL_ROWS[env_id]
]
LANDER = ("LunarLander-v3", EXPERT.format("LunarLander-v3"))
NO_PENALTY = f"{GAIL_TASKS[LANDER[0]][0]} --gradient-penalty 0"
TABLE += [Row("gail", *LANDER, "no-penalty", NO_PENALTY, 1.5, "gail-ablation")]
PAPER = (  # but for TRPO; with this batch size, the discriminator sees a whole rollout at once
    "--hidden-dim 100 --gamma 0.995 --gae-lambda 0.97 --num-steps 625 --batch-size 5000"
    " --discriminator-updates 1 --discriminator-learning-rate 0.01 --gradient-penalty 0"
    " --expert-subsampling 10 --total-timesteps 1500000 --eval-interval 50000"
)
POLE_EXPERT = ("CartPole-v1", EXPERT.format("CartPole-v1"))
TABLE += [Row("gail", *POLE_EXPERT, "paper", PAPER, 4.0, "gail-ablation")]
CLONED = [(env_id, EXPERT.format(env_id)) for env_id in GAIL_TASKS]
CLONED += [
    (env_id, f"runs/data/{env_id}-few.npz")
    for env_id, variants in GAIL_ROWS.items()
    if "few" in variants
]
TABLE += [Row("marwil", *task, "bc", "--beta 0", 0.8) for task in CLONED]
# Dreamer, on its own pixels, and on those of a game that others wrote
TABLE += [Row("dreamer", "PixelCatch-v0", "none", "default", "", 9.0)]
BREAKOUT = (
    "--size mini --total-timesteps 40000 --replay-ratio 32 --horizon 15 --gamma 0.99"
    " --actor-critic-learning-rate 2e-4 --policy-entropy-coef 1e-3 --eval-interval 2000"
    " --checkpoint-interval 10000"
)
TABLE += [Row("dreamer", "MinAtar/Breakout-v1", "none", "default", BREAKOUT, 20.0)]
EVALUATION = "--eval-episodes 50"
QUICK = "--eval-episodes 2 --hidden-dim 32"
QUICK_OFFLINE = f"{QUICK} --total-updates 1200 --eval-interval 600"
QUICK_ONLINE = f"{QUICK} --total-timesteps 600 --eval-interval 600 --learning-starts 500"
QUICK_GAIL = f"{QUICK} --total-timesteps 800 --eval-interval 800 --num-steps 50"
QUICK_DREAMER = (
    "--eval-episodes 2 --total-timesteps 512 --eval-interval 512 --learning-starts 256"
    " --sequence-length 8 --batch-size 64 --replay-ratio 8"
)
ONLINE = ("rlpd", "mbpo", "fqf", "gail", "dreamer")  # counted in environment steps, not in updates
WITHOUT_DATA = ("mbpo", "fqf", "dreamer")  # they have no such flag
RANDOM_EPISODES = 50  # of the uniform random policy, the zero of every table


@dataclass
class Options:
    only: str = ""  # rows whose name contains this
    seeds: int = 5  # seeds 1..N of every row
    seed: int | None = None  # this seed alone
    jobs: int = 2  # runs at once, on this machine
    threads: int = 1  # of each run
    ray: str = ""  # auto: the Ray cluster that runs here | HOST:PORT: of one | local: start one
    list: bool = False  # print the rows and what they cost, and run nothing
    quick: bool = False  # a few updates of every row, one seed, kept out of the results
    results: Path = RESULTS  # where finished runs are copied to; what is there is done
    runs: Path | None = None  # where runs live [runs/benchmark; <results>-runs for other results]


@dataclass
class Run:
    row: Row
    seed: int
    run_dir: Path
    result_dir: Path
    process: "subprocess.Popen | RayTask | None" = None
    held_lock: TextIO | None = None

    @property
    def lock(self) -> Path:  # beside the folder: start() may clear that
        return Path(f"{self.run_dir}.lock")

    def flags(self, options: Options) -> list[str]:
        """All that decides what the run learns."""
        quick = QUICK_ONLINE if self.row.algo in ONLINE else QUICK_OFFLINE
        quick = {"gail": QUICK_GAIL, "dreamer": QUICK_DREAMER}.get(self.row.algo, quick)
        flags = [*self.row.arguments, *(quick.split() if options.quick else [])]
        return [*flags, "--seed", str(self.seed)]

    def command(self, options: Options) -> list[str]:
        script = [sys.executable, str(ROOT / "algos" / f"{self.row.algo}.py"), "--quiet"]
        run_dir = os.path.relpath(self.run_dir, ROOT)
        if (self.run_dir / "checkpoint.pt").exists():
            # an environment in a module of its own is imported only if it is named again
            return [*script, "--env-id", self.row.env_id, "--resume", run_dir]
        place = ["--run-dir", run_dir, "--torch-threads", str(options.threads)]
        return [*script, *self.flags(options), *place]

    @property
    def generation(self) -> int:
        return GENERATION[self.row.algo]

    def is_published(self) -> bool:
        file = self.result_dir / "metrics.csv"
        return file.exists() and generation_of(file) >= self.generation

    def is_begun(self) -> bool:
        """By the code of today. What older code left behind starts anew."""
        file = self.run_dir / "generation.txt"
        is_current = file.exists() and int(file.read_text()) == self.generation
        return is_current and (self.run_dir / "checkpoint.pt").exists()

    def has_other_flags(self, options: Options) -> bool:
        """The row was changed since its checkpoint: it must not go on under the row's name."""
        file = self.run_dir / "flags.txt"
        return self.is_begun() and file.read_text().split() != self.flags(options)

    def hold(self, wait: bool) -> None:
        """Keep others out of the folder: another runner, or what a dead node left behind. The
        run's process inherits the lock, and it ends with the process."""
        self.run_dir.parent.mkdir(parents=True, exist_ok=True)
        self.held_lock = open(self.lock, "a")  # noqa: SIM115 (start closes it)
        fcntl.flock(self.held_lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))

    def start(self, options: Options) -> None:
        if not self.is_begun():  # also if it was killed before its first checkpoint
            shutil.rmtree(self.run_dir, ignore_errors=True)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        (self.run_dir / "generation.txt").write_text(str(self.generation))
        (self.run_dir / "flags.txt").write_text(" ".join(self.flags(options)))
        command = [sys.executable, "-c", DIE_WITH_PARENT, str(os.getpid()), *self.command(options)]
        with open(self.run_dir / "output.txt", "w") as log, self.held_lock as lock:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=log, stderr=log, pass_fds=[lock.fileno()]
            )

    def is_finished(self) -> bool:
        """Its last evaluation is that of its last update, or step."""
        if not self.is_begun() or not (self.run_dir / "metrics.csv").exists():
            return False
        args = json.loads((self.run_dir / "args.json").read_text())
        rows = evaluations(self.run_dir / "metrics.csv")
        steps = [int(row["step"]) for row in rows if row["key"] == "eval/return_max"]  # its last
        return max(steps, default=0) >= args.get("total_updates", args.get("total_timesteps"))

    def publish(self) -> list[str]:
        """-> what is to be told if that fails"""
        try:
            self.copy_results()
        except OSError as error:
            return [f"it is done, but was not published: {error}"]
        return []

    def copy_results(self) -> None:
        self.result_dir.mkdir(parents=True, exist_ok=True)
        shutil.copy(self.run_dir / "args.json", self.result_dir)
        dreams = sorted(self.run_dir.glob("dreams/*.png"))  # Dreamer's, one per evaluation
        if dreams:
            shutil.copy(dreams[-1], self.result_dir / "dream.png")
        # last, since this file says that the run is done
        made_by = {"step": 0, "seconds": 0, "key": "generation", "value": self.generation}
        write_metrics(self.result_dir, [made_by, *evaluations(self.run_dir / "metrics.csv")])

    def comparison(self) -> str:
        """With the published run, if this one was made again."""
        published = RESULTS / self.row.name / str(self.seed) / "metrics.csv"
        file = self.result_dir / "metrics.csv"
        if not published.exists() or file.samefile(published):
            return ""
        if generation_of(published) < self.generation:
            return ", the published run is of older code"
        mine, theirs = (
            [row | {"seconds": None} for row in evaluations(path) if row["key"].startswith("eval/")]
            for path in (file, published)
        )
        return ", every return as published" if mine == theirs else ", but not as published"

    def end(self) -> list[str]:
        """Publish it. If it failed, or that fails: what is to be told about it."""
        code, output = self.process.returncode, self.run_dir / "output.txt"
        if code == 0:
            return self.publish()
        lines = output.read_text().splitlines()[-5:] if output.exists() else []
        return [
            *lines,
            f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}",
        ]


PUBLISHED = ("eval/", "stats/behaviour", "stats/holdout_mse_", "stats/fresh_mse")
PUBLISHED += ("stats/fraction_entropy",)


def evaluations(path: Path) -> list[dict[str, str]]:
    """The rows of a metrics.csv that a report or a figure needs: returns, what the data was worth,
    and how well a model predicts."""
    lines = path.read_text().splitlines(keepends=True)
    complete = [line for line in lines if line.endswith("\n")]  # a full disk tears the last one
    return [row for row in csv.DictReader(complete) if row["key"].startswith(PUBLISHED)]


def generation_of(path: Path) -> int:
    """Of the code that made a published run. Before they were numbered, it was 1."""
    with open(path, newline="") as file:
        found = [row["value"] for row in csv.DictReader(file) if row["key"] == "generation"]
    return int(found[0]) if found else 1


def write_metrics(folder: Path, rows: list[dict]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f"metrics.csv.{os.getpid()}.tmp"  # two runners may write the random policy
    with open(temporary, "w", newline="") as file:
        writer = csv.DictWriter(file, ["step", "seconds", "key", "value"])
        writer.writeheader()
        writer.writerows(rows)
    temporary.replace(folder / "metrics.csv")


def evaluate_random_policy(env_id: str, results: Path) -> None:
    """The random column of every table."""
    folder = results / f"random__{short_name(env_id)}".replace("/", "-") / "1"
    if (folder / "metrics.csv").exists():
        return
    import common  # imports torch, which takes seconds
    from algos import dreamer  # registers PixelCatch, and MinAtar when it is made

    make_env = partial(dreamer.make_env, image_size=32, from_pixels=False)
    space = make_env(env_id).action_space
    space.seed(0)
    returns = common.evaluate(
        lambda obs: [space.sample() for _ in obs],
        env_id,
        RANDOM_EPISODES,
        10_000,
        make_env=make_env,
    )
    value = {"step": 0, "seconds": 0, "key": "eval/return_mean", "value": f"{returns.mean():.7g}"}
    write_metrics(folder, [value])


# ---- on a Ray cluster


def attend(run: Run, options: Options) -> int:
    """What a Ray worker does: one run, from its start or its checkpoint to its end."""
    if not run.lock.exists():  # the driver made it
        raise OSError(f"{socket.gethostname()} has no {run.lock}: all nodes must share that folder")
    run.hold(wait=True)  # when a node dies, what it left behind may live for another second
    if run.is_finished():  # but the worker died before it could tell
        return 0
    run.start(options)
    try:
        while run.process.poll() is None:  # Ray cannot interrupt wait()
            time.sleep(0.2)
    except KeyboardInterrupt:  # of ray.cancel
        run.process.terminate()
        while run.process.poll() is None:  # it saves; a second cancel must not cut that short
            with suppress(KeyboardInterrupt):
                time.sleep(0.2)
        raise
    return run.process.returncode


class RayTask:
    """A run on the cluster, in the words of subprocess.Popen: main() treats both alike."""

    def __init__(self, run: Run, options: Options, remote_attend) -> None:
        run.run_dir.mkdir(parents=True, exist_ok=True)
        run.lock.touch()
        self.output, self.returncode = run.run_dir / "output.txt", None
        self.reference = remote_attend.remote(run, options)

    def poll(self) -> int | None:
        import ray

        if self.returncode is None and ray.wait([self.reference], timeout=0)[0]:
            try:
                self.returncode = ray.get(self.reference)
            except ray.exceptions.RayError as error:  # it could not begin, or its workers all died
                self.returncode = 1
                with open(self.output, "a") as file:
                    print(error, file=file)
        return self.returncode

    def terminate(self) -> None:
        import ray

        ray.cancel(self.reference)

    def wait(self) -> None:
        import ray

        # a cancel can be lost: it may come while the worker is between two lines of Ray's own
        while not ray.wait([self.reference], timeout=10)[0]:
            self.terminate()


def connect_to_ray(options: Options):
    """attend(), for any node of the cluster."""
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a benchmark does not phone home
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    if ":" in options.ray:  # Ray itself would try for many minutes
        host, _, port = options.ray.rpartition(":")
        socket.create_connection((host, port), timeout=10).close()
    ray.init(options.ray, **quiet)
    num_nodes = sum(node["Alive"] for node in ray.nodes())
    print(f"Ray: nodes: {num_nodes}, cores: {ray.cluster_resources().get('CPU', 0):.0f}")
    # what fails by itself would fail again; but dead workers and nodes are Ray's to replace, unless
    # it is this run that kills them all
    return ray.remote(num_cpus=options.threads, max_retries=10)(attend)


# ---- the runner


def print_table(rows: list[Row], num_seeds: int) -> None:
    """Every row, its seeds and minutes, and the hours of each algorithm, on one core."""
    for row in rows:
        print(f"{row.name:<84} {num_seeds} x {row.minutes:5.1f} min")
    for algo in [*dict.fromkeys(row.algo for row in rows), ""]:
        minutes = [row.minutes for row in rows if row.algo == algo or not algo]
        hours = sum(minutes) * num_seeds / 60
        print(f"{algo or 'all':<8} {len(minutes):4} rows {len(minutes) * num_seeds:5} runs", end="")
        print(f" {hours:7.1f} hours of one core")


def clock(seconds: float) -> str:
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02}:{int(seconds) % 60:02}"


def check_options(options: Options, rows: list[Row]) -> str:
    """-> what is wrong with them"""
    for name in ("seeds", "jobs", "threads"):
        if getattr(options, name) < 1:
            return f"--{name} must be at least 1, got {getattr(options, name)}"
    return "" if rows else f"no row's name contains {options.only!r}: --list shows them"


def main(options: Options) -> int:
    rows = [row for row in TABLE if options.only in row.name]
    if problem := check_options(options, rows):
        print(f"run.py: {problem}", file=sys.stderr)
        return 2
    for file in sorted({row.dataset for row in rows if row.dataset.endswith(".npz")}):
        if not (ROOT / file).exists():
            print(f"{file} is not there: its rows are left out")
            rows = [row for row in rows if row.dataset != file]
    seeds = range(1, 2 if options.quick else options.seeds + 1)
    seeds = seeds if options.seed is None else [options.seed]
    if options.list:
        print_table(rows, len(seeds))
        return 0
    if options.runs is None:  # what is made again must not find the runs of the first time
        is_first = options.results == RESULTS
        options.runs = ROOT / "runs" / "benchmark" if is_first else Path(f"{options.results}-runs")
    options.runs = options.runs.absolute()  # workers of Ray have a working directory of their own
    if options.quick:
        options.runs, options.results = options.runs / "quick", options.runs / "quick-results"
        shutil.rmtree(options.runs, ignore_errors=True)
        shutil.rmtree(options.results, ignore_errors=True)
    runs = [
        Run(row, seed, options.runs / row.name / str(seed), options.results / row.name / str(seed))
        for seed in seeds
        for row in rows
    ]
    waiting = [run for run in runs if not run.is_published()]
    print(f"{len(runs) - len(waiting)} of {len(runs)} runs are done, {len(waiting)} to go")
    if options.ray:
        try:
            remote_attend = connect_to_ray(options)
        except ImportError:
            print("run.py: --ray needs a package: pip install ray", file=sys.stderr)
            return 2
        except (OSError, RuntimeError, ValueError) as error:
            reason = str(error).strip().partition("\n")[0]
            print(f"run.py: no Ray cluster at {options.ray}: {reason}", file=sys.stderr)
            return 2
    for env_id in {row.env_id for row in rows}:
        evaluate_random_policy(env_id, options.results)

    stop = signal.default_int_handler  # set, since a shell's background jobs ignore SIGINT
    handlers = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    running: list[Run] = []
    failed: list[Run] = []
    num_waiting, num_ended, start, minutes_done = len(waiting), 0, time.time(), 0.0
    try:
        while waiting or running:
            ended: list[tuple[Run, list[str]]] = []  # with what is to be told of each
            while waiting and (options.ray or len(running) < options.jobs):  # Ray has a queue
                run = waiting.pop(0)
                if run.has_other_flags(options):
                    folder = os.path.relpath(run.run_dir)
                    ended.append((run, [f"{folder} has other flags: delete it to start anew"]))
                elif run.is_finished():  # it ended, but we were killed before it was copied
                    ended.append((run, run.publish()))
                elif options.ray:
                    run.process = RayTask(run, options, remote_attend)
                    running.append(run)
                else:
                    try:
                        run.hold(wait=False)
                    except BlockingIOError:
                        ended.append((run, ["another runner is at it"]))
                        continue
                    run.start(options)
                    running.append(run)
            for run in [run for run in running if run.process.poll() is not None]:
                running.remove(run)
                minutes_done += run.row.minutes
                ended.append((run, run.end()))
            for run, problem in ended:
                num_ended += 1
                minutes_left = sum(run.row.minutes for run in [*waiting, *running])
                eta = (time.time() - start) * minutes_left / (minutes_done or 1)
                failed += [run] if problem else []
                status = f"[{num_ended}/{num_waiting}, ETA {clock(eta)}] {run.row.name}"
                ending = "FAILED" if problem else "done"
                if not problem and not options.quick:
                    ending += run.comparison()
                print(f"{status} seed {run.seed}: {ending}", *problem, sep="\n    ", flush=True)
            time.sleep(0.2)
    except (KeyboardInterrupt, OSError) as reason:  # the latter if no run can be started
        for run in running:  # each saves a checkpoint on its way out
            run.process.terminate()
        for run in running:
            run.process.wait()
        if isinstance(reason, OSError):
            print(f"run.py: {reason}", file=sys.stderr)
        print("interrupted: the same command goes on from the checkpoints")
        return 1 if isinstance(reason, OSError) else 130
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if failed:
        print(f"{len(failed)} failed:", *[f"{run.row.name} seed {run.seed}" for run in failed])
        print("the same command tries them again, from their checkpoints if they have one")
    if options.quick:
        folder = os.path.relpath(options.results)
        print(f"python benchmark/report.py --results {folder}   shows what came of them")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
