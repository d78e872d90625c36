"""What the learn_*.py share: the task of a row of ours, and a place beside it for what a peer does
there. Runs in the peers' environments, so it needs no more than the standard library, numpy, torch
and what common.py imports.

The budget, the data and the sizes come from the args.json that our own row published, so that the
peer cannot get others by mistake. It is evaluated where ours is: by common.evaluate, as often, with
as many episodes and the same seeds of them, the deterministic policy.

Published is <results>/<the row's algorithm, environment and data>__<peer>/<seed>/: metrics.csv as
from benchmark/run.py (seconds: CPU time without evaluations) and args.json.
"""

import argparse
import csv
import json
import random
import sys
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import common

PUBLISHED = ROOT / "benchmark" / "results"


class Task:
    """A row of ours as a peer gets it: `args` are the flags of our own run."""

    def __init__(self, peer: str, package: str, rows: dict[str, str] | tuple[str, ...]):
        """rows: those that the script can learn. A dict gives the name that the peer has there."""
        parser = argparse.ArgumentParser()
        parser.add_argument("row", choices=list(rows))
        parser.add_argument("--seed", type=int, default=1)
        parser.add_argument("--budget", type=int, help="a smaller one, to try it out [ours]")
        parser.add_argument("--results", type=Path, default=PUBLISHED)
        options = parser.parse_args()
        self.row, self.seed = options.row, options.seed
        self.args = json.loads((PUBLISHED / self.row / "1" / "args.json").read_text())
        self.env_id = self.args["env_id"]
        self.action_space = common.make_env(self.env_id).action_space
        self.unit = "total_updates" if "total_updates" in self.args else "total_timesteps"
        self.budget = options.budget or self.args[self.unit]
        self.eval_interval = min(self.args["eval_interval"], self.budget)
        name = rows[self.row] if isinstance(rows, dict) else peer
        group = self.row.rpartition("__")[0]
        self.folder = options.results / f"{group}__{name}" / str(self.seed)
        self.settings = {"peer": peer, "package": f"{package}=={version(package)}"}
        self.policy, self.rows, self.cpu = None, [], 0.0
        torch.set_num_threads(1)
        random.seed(self.seed)
        np.random.seed(self.seed)
        torch.manual_seed(self.seed)

    def load_dataset(self) -> common.Dataset:
        """The rows that our run with this seed saw, with its scale of the rewards."""
        spec = self.args["dataset"]
        spec = str(ROOT / spec) if spec.endswith(".npz") else spec
        env = common.make_env(self.env_id)
        scale, shift = self.args.get("reward_scale", 1.0), self.args.get("reward_shift", 0.0)
        return common.load_dataset(spec, env, self.seed, scale, shift)

    def start(self, policy: common.Policy, **settings) -> None:
        """policy: what is evaluated, now and whenever evaluate() is called; settings: the peer's,
        for args.json. From here on time counts."""
        self.policy = policy
        self.settings |= settings
        self.start_of_training = time.process_time()
        self.evaluate(0)

    def evaluate(self, step: int) -> None:
        self.cpu += time.process_time() - self.start_of_training
        episodes, seed = self.args["eval_episodes"], self.args["eval_seed"]
        rng = np.random.get_state(), torch.get_rng_state()  # it must not change what comes after it
        returns = common.evaluate(self.policy, self.env_id, episodes, seed)
        np.random.set_state(rng[0])
        torch.set_rng_state(rng[1])
        for name in ("mean", "std", "min", "max"):
            value = f"{getattr(returns, name)():.7g}"
            row = {"step": step, "seconds": f"{self.cpu:.3f}", "key": f"eval/return_{name}"}
            self.rows.append(row | {"value": value})
        print(f"{step:>7,} {self.cpu:6.1f} s of CPU  return {returns.mean():.1f}", flush=True)
        if step >= self.budget:
            self.publish()
        self.start_of_training = time.process_time()

    def publish(self) -> None:
        shared = ("env_id", "dataset", "batch_size", "gamma", "eval_interval", "eval_episodes")
        args = {name: self.args[name] for name in (*shared, "eval_seed") if name in self.args}
        args |= {"seed": self.seed, self.unit: self.budget} | self.settings
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "args.json").write_text(json.dumps(args, indent=2))
        with open(self.folder / "metrics.csv.tmp", "w", newline="") as file:
            writer = csv.DictWriter(file, ["step", "seconds", "key", "value"])
            writer.writeheader()
            writer.writerows(self.rows)
        (self.folder / "metrics.csv.tmp").rename(self.folder / "metrics.csv")  # last: it is done
