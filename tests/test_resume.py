"""A run that is stopped and resumed ends bit-equal to one that never stopped."""

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    ACTOR_LOSS,
    ALGOS,
    OFFLINE,
    ROOT,
    WITH_DATA,
    assert_equal,
    assert_same_state,
    budget,
    data,
    flat,
    load,
    metrics_of,
)

import common

OFFLINE_FLAGS = {
    "default": {},
    "random-data": {"dataset": "random:200", "normalize_reward": True},
    "epochs": {"total_epochs": 2},
    "discrete": {"env_id": "Choice-v0", "dataset": "random:200"},
}
OWN_FLAGS = {
    "awr": {
        "at-a-refresh": {"refresh_interval": 10},
        "td-lambda": {"td_lambda": 0.9, "normalize_advantage": False, "value_warmup": 13},
    },
    "marwil": {
        "at-a-refresh": {"refresh_interval": 10},
        "norm": {"norm_start": 3.0, "norm_rate": 0.1},
        "cloning": {"beta": 0.0},
    },
    "crr": {
        "hard": {"weight_type": "exp", "advantage_type": "max", "tau": 1.0, "target_interval": 7},
        "cwp": {"num_cwp_samples": 3},
    },
    "rlpd": {
        "default": {},
        "no-data": {"dataset": "none"},
        "data-in-buffer": {"data_in_buffer": True, "offline_batch_ratio": 0.0},
        "full-ring": {"buffer_capacity": 13},
        "pretrained": {"offline_pretrain_updates": 7},
        "now-and-then": {"train_frequency": 7, "log_interval": 5, "learning_starts": 0},
        "fixed-alpha": {"alpha": 0.2, "backup_entropy": False, "critic_layer_norm": False},
        "in-mid-episode": {"env_id": "Walk-v0", "dataset": "random:50"},
        "pendulum": {"env_id": "Pendulum-v1", "dataset": "random:50"},
    },
    "mbpo": {
        "default": {},
        "full-rings": {"buffer_capacity": 13, "retain_steps": 5},
        "at-a-fit": {"learning_starts": 5},
        "sac": {"real_ratio": 1.0},
        "model-alone": {"real_ratio": 0.0, "critic_layer_norm": True},
        "raw-targets": {"normalize_targets": False, "alpha": 0.2},
        "learned-end": {"env_id": "Walk-v0"},
        "known-end": {"env_id": "Pendulum-v1"},
    },
    "fqf": {
        "default": {},
        "prioritized": {"prioritized": True},
        "full-ring": {"buffer_capacity": 13, "prioritized": True},
        "three-steps": {"n_steps": 3, "double_q": True, "weight_targets_by_fraction": False},
        "qr-dqn": {"learn_fractions": False},
        "now-and-then": {"train_frequency": 7, "log_interval": 5, "learning_starts": 0},
        "cart-pole": {"env_id": "CartPole-v1"},
    },
    "gail": {
        "default": {},
        "in-mid-rollout": {"num_steps": 7, "env_id": "Walk-v0", "dataset": "random:50"},
        "four-environments": {"num_envs": 4, "num_steps": 3, "env_id": "Walk-v0"}
        | {"dataset": "random:50", "eval_interval": 20},
        "discrete": {"env_id": "Steps-v0", "dataset": "random:50", "absorbing": True},
        "some-of-the-expert": {"num_expert_episodes": 20, "expert_subsampling": 2},
        "frozen": {"learn_discriminator": False, "reward_type": "logit"},
        "pendulum": {"env_id": "Pendulum-v1", "dataset": "random:50", "gradient_penalty": 0.0},
    },
    "dreamer": {
        "default": {},
        "four-environments": {"num_envs": 4, "learning_starts": 16},
        "full-ring": {"buffer_capacity": 13},
        "images": {"env_id": "PixelCatch-v0"},
        "imagine-all": {"imagine_last": None},
        "ratio-with-a-remainder": {"replay_ratio": 13.0},  # an update every 2.46 steps
        "cart-pole": {"env_id": "CartPole-v1"},
    },
}
CASES = [
    pytest.param(name, flags, id=f"{name}-{case}")
    for name in ALGOS
    for case, flags in ((OFFLINE_FLAGS if name in OFFLINE else {}) | OWN_FLAGS[name]).items()
]


@pytest.mark.parametrize(("algo", "flags"), CASES, indirect=["algo"])
def test_S17_n_plus_n_is_2n(algo, tiny, tmp_path, flags):
    tiny = replace(tiny, **flags)
    whole = replace(tiny, **budget(algo, 40), run_dir=str(tmp_path / "whole"))
    half = replace(tiny, **budget(algo, 20), run_dir=str(tmp_path / "half"))
    more = replace(half, **budget(algo, 40), resume=half.run_dir)
    if "total_epochs" in flags:  # 2 epochs of ceil(300 / 32) = 10 updates
        whole = replace(whole, total_epochs=4)
        more = replace(more, **budget(algo, 20), total_epochs=4)
    algo.train(whole)
    algo.train(half)
    assert load(half.run_dir)["step"] == 20
    algo.train(more)
    assert load(whole.run_dir)["step"] == 40
    assert_same_state(load(whole.run_dir), load(half.run_dir))
    assert_same_state(load(whole.run_dir, "best.pt"), load(half.run_dir, "best.pt"))
    assert metrics_of(whole.run_dir) == metrics_of(half.run_dir)


def test_S17_n_need_not_be_a_multiple_of_the_eval_interval(algo, tiny, tmp_path):
    """The closing evaluation at N is one that the run of 2N does not have, but it only looks."""
    algo.train(replace(tiny, **budget(algo, 30), run_dir=str(tmp_path / "whole")))
    half = replace(tiny, **budget(algo, 15), run_dir=str(tmp_path / "half"))
    algo.train(half)
    algo.train(replace(half, **budget(algo, 30), resume=half.run_dir))
    whole, half = load(tmp_path / "whole"), load(tmp_path / "half")
    for key in whole.keys() - {"args", "log_position", "best_return", "evals_since_best"}:
        assert_equal(whole[key], half[key], key)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_S17_interrupted_schedule_goes_on_where_it_was(algo, tiny, tmp_path, monkeypatch, schedule):
    """A signal in the middle of the budget: the schedule still spans the whole of it."""
    args = replace(tiny, lr_schedule=schedule, warmup_updates=5)
    handler = signal.getsignal(signal.SIGTERM)  # Ray's, where its tests came first
    whole = replace(args, run_dir=str(tmp_path / "whole"))
    algo.train(whole)

    original = common.Run.log

    def interrupting(self, scalars, **options):
        original(self, scalars, **options)
        if self.step == 10 and ACTOR_LOSS.get(algo.ALGO, "losses/actor") in scalars:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(common.Run, "log", interrupting)
    with pytest.raises(common.Stopped):
        algo.train(args)
    stride = getattr(args, "num_envs", 1)
    assert load(args.run_dir)["step"] == 10 + stride  # the step after it
    monkeypatch.undo()
    algo.train(replace(args, resume=args.run_dir))
    assert_same_state(load(whole.run_dir), load(args.run_dir))
    assert signal.getsignal(signal.SIGTERM) == handler  # it was put back


OWN_PARTS = {
    "awr": {"value", "actor_opt", "value_opt", "returns", "advantage_mean", "advantage_std"},
    "marwil": {"value", "opt", "returns", "squared_norm"},
    "crr": {"critic", "target_actor", "target_critic", "actor_opt", "critic_opt"},
    "rlpd": {"critic", "target_critic", "actor_opt", "critic_opt", "alpha_opt", "log_alpha"}
    | {"buffer", "num_updates", "episode", "episode_actions", "current_obs"},
    "mbpo": {"critic", "target_critic", "actor_opt", "critic_opt", "alpha_opt", "log_alpha"}
    | {"real", "imagined", "model", "num_updates", "episode", "episode_actions", "current_obs"},
    "fqf": {"network", "target_network", "proposal", "quantile_opt", "fraction_opt", "buffer"}
    | {"num_updates", "episode", "episode_actions", "current_obs"},
    "gail": {"value", "discriminator", "normalizer", "opt", "discriminator_opt", "rollout"}
    | {"num_updates", "policy_is_new", "episodes", "episode_actions", "current_obs"},
    "dreamer": {"model", "critic", "slow_critic", "model_opt", "actor_opt", "critic_opt", "buffer"}
    | {"num_updates", "last_update", "return_scale", "memory", "episodes"}
    | {"episode_actions", "current_obs"},
}
NUM_UPDATES = {  # of an optimiser in 20 updates, or steps
    ("awr", "actor_opt"): 15,  # V warms up for 5
    ("rlpd", "critic_opt"): 32,  # two per step, after 4
    ("rlpd", "actor_opt"): 16,
    ("rlpd", "alpha_opt"): 16,
    **{("mbpo", f"{name}_opt"): 32 for name in ("critic", "actor", "alpha")},
    **{("fqf", f"{name}_opt"): 17 for name in ("quantile", "fraction")},
    ("gail", "opt"): 32,  # four rollouts, eight epochs of one mini-batch each
    ("gail", "discriminator_opt"): 64,  # sixteen per rollout
    **{("dreamer", f"{name}_opt"): 16 for name in ("model", "actor", "critic")},
}


def test_S17_checkpoint_holds_every_part(algo, tiny):
    """Each of these, left out or reset, would make a resumed run another run."""
    algo.train(tiny)
    checkpoint = load(tiny.run_dir)
    normaliser = {"obs_mean", "obs_std"} if algo.ALGO in OFFLINE else set()
    normaliser |= {"fingerprint"} if algo.ALGO in WITH_DATA else set()
    assert checkpoint.keys() == OWN_PARTS[algo.ALGO] | normaliser | {
        *("algo", "args", "step", "log_position", "best_return", "evals_since_best"),
        "generator",
        *(() if algo.ALGO == "fqf" else ("actor",)),
    }
    assert checkpoint["args"] == asdict(tiny)
    for name in (name for name in checkpoint if name.endswith("opt")):
        states, updates = checkpoint[name]["state"], NUM_UPDATES.get((algo.ALGO, name), 20)
        assert all(state["step"].item() == updates for state in states.values()) and states


def test_S19_evaluation_does_not_change_training(algo, tiny, tmp_path):
    """Every update or only at the end, two episodes or five, greedy or CWP: the same parameters."""
    runs = [
        replace(tiny, eval_interval=1, run_dir=str(tmp_path / "a")),
        replace(tiny, eval_interval=1000, run_dir=str(tmp_path / "b")),
        replace(tiny, eval_episodes=5, run_dir=str(tmp_path / "c")),
    ]
    if algo.ALGO == "crr":
        runs[2] = replace(runs[2], num_cwp_samples=4)
    parameters = []
    for args in runs:
        algo.train(args)
        parameters.append(flat(load(args.run_dir)))
    assert torch.equal(parameters[0], parameters[1]) and torch.equal(parameters[0], parameters[2])


def test_same_seed_same_numbers_other_seed_other_numbers(algo, tiny, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        torch.randn(7)  # the state of the global generator must not matter
        np.random.rand(3)
        algo.train(replace(tiny, seed=seed, run_dir=str(tmp_path / name)))
    a, b, c = (flat(load(tmp_path / name)) for name in "abc")
    assert torch.equal(a, b) and not torch.equal(a, c)


@pytest.mark.parametrize("algo", ["awr"], indirect=True)
def test_patience_waits_for_the_actor(algo, tiny):
    """V alone for 13 updates: no evaluation before the actor moves, none to lose patience with."""
    args = replace(tiny, value_warmup=13, eval_interval=2, patience=2, target_return=-1e9)
    assert algo.train(args)["step"] == 14
    steps = [step for step, key, _ in metrics_of(tiny.run_dir) if key == "eval/return_mean"]
    assert steps == ["0", "14"]


def test_a_rate_of_almost_zero_stops_every_optimiser(algo, tiny, tmp_path):
    """Warm-up over a billion updates: no network may move, so no optimiser was forgotten."""
    algo.train(replace(tiny, warmup_updates=10**9))
    own = {"fqf": "fraction_learning_rate", "gail": "discriminator_learning_rate"}
    own |= {"dreamer": "actor_critic_learning_rate"}
    own = {own[algo.ALGO]: 1e-30} if algo.ALGO in own else {}
    fresh = replace(tiny, learning_rate=1e-30, run_dir=str(tmp_path / "fresh"), **own)
    algo.train(fresh)
    keys = {"awr": ("actor", "value"), "marwil": ("actor", "value"), "fqf": ("network", "proposal")}
    keys |= {"gail": ("actor", "value", "discriminator"), "dreamer": ("model", "actor", "critic")}
    for key in keys.get(algo.ALGO, ("actor", "critic")):
        moved = flat(load(tiny.run_dir), [key]) - flat(load(fresh.run_dir), [key])
        assert moved.abs().max() < 1e-7


@pytest.mark.parametrize("algo", WITH_DATA, indirect=True)
def test_seed_reaches_the_dataset(algo, tiny, tmp_path):
    fingerprints = []
    for seed in (1, 2):
        args = replace(tiny, seed=seed, dataset="random:50", run_dir=str(tmp_path / str(seed)))
        algo.train(args)
        fingerprints.append(load(args.run_dir)["fingerprint"])
    assert fingerprints[0] != fingerprints[1]


def test_last_evaluation_and_checkpoint_are_of_the_last_update(algo, tiny):
    result = algo.train(replace(tiny, **budget(algo, 23)))
    assert result["step"] == 23 and load(tiny.run_dir)["step"] == 23
    policy = algo.load_policy(f"{tiny.run_dir}/checkpoint.pt")
    returns = algo.common.evaluate(policy, tiny.env_id, tiny.eval_episodes, tiny.eval_seed)
    assert result["eval/return_mean"] == returns.mean()  # of the actor, not of its target
    steps = [step for step, key, _ in metrics_of(tiny.run_dir) if key == "eval/return_mean"]
    # GAIL's policy of step 23 is the one of 20: the next rollout is not complete
    assert steps == ["0", "10", "20", "23"][: 3 if algo.ALGO == "gail" else 4]


def test_kill_in_the_middle_of_a_save(algo, tiny, tmp_path):
    """kill -9 while a save is half written: the checkpoint before it is whole, and the resumed run
    ends as the one that was never killed. A slow disk makes the window wide enough to hit."""
    whole = replace(
        tiny, **budget(algo, 60), checkpoint_interval=10, run_dir=str(tmp_path / "whole")
    )
    algo.train(whole)
    killed = replace(whole, run_dir=str(tmp_path / "killed"))
    script = f"""
import sys, time
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
import torch
import conftest
from algos import {algo.ALGO} as algo
save, saves = torch.save, []
def slow_save(checkpoint, file):
    if "checkpoint.pt" in file.name:
        saves.append(checkpoint["step"])
        if checkpoint["step"] == 30:
            file.write(b"half a checkpoint")
            file.flush()
            print("saving", flush=True)
            time.sleep(60)
    save(checkpoint, file)
torch.save = slow_save
algo.train(algo.Args(**{asdict(killed)!r}))
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "saving\n"
    process.kill()
    process.wait()
    assert Path(killed.run_dir, "checkpoint.pt.tmp").read_bytes() == b"half a checkpoint"
    assert load(killed.run_dir)["step"] == 20
    algo.train(replace(killed, resume=killed.run_dir))
    assert_same_state(load(whole.run_dir), load(killed.run_dir))


def test_ctrl_c_saves_and_resume_is_bit_exact(algo, tmp_path):
    """The script itself, stopped by a real Ctrl-C, then resumed with the line that it printed."""
    command = [sys.executable, algo.__file__]
    own = budget(algo, 300) | data(algo, "random:500")
    own |= {
        "awr": {"value_warmup": 20},
        "rlpd": {"gradient_updates_per_step": 2},
        "mbpo": {"max_model_updates": 50, "updates_per_step": 2},
        "fqf": {"learning_starts": 100, "train_frequency": 1},
        "gail": {"num_envs": 2, "num_steps": 5, "total_timesteps": 1000},
        "dreamer": {"num_envs": 2, "learning_starts": 20, "sequence_length": 8, "batch_size": 16}
        | {"replay_ratio": 1.0, "horizon": 2},
    }.get(algo.ALGO, {})
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in own.items()]
    flags += [] if algo.ALGO == "dreamer" else ["--hidden-dim", "16"]
    flags += ["--eval-episodes", "1", "--log-interval", "10", "--torch-threads", "1"]
    process = subprocess.Popen(
        [*command, *flags, "--run-dir", "run"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    metrics = tmp_path / "run" / "metrics.csv"
    loss = ACTOR_LOSS.get(algo.ALGO, "losses/actor")
    while not (metrics.exists() and loss in metrics.read_text()):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert "SIGINT was received" in output
    assert 10 <= load(tmp_path / "run")["step"] < own.get("total_timesteps", 300)
    resume = re.search(r"resume: python \S+ (--resume \S+)", output).group(1).split()
    subprocess.run([*command, *resume, "--quiet"], cwd=tmp_path, check=True)
    subprocess.run([*command, *flags, "--run-dir", "whole", "--quiet"], cwd=tmp_path, check=True)
    assert_same_state(load(tmp_path / "whole"), load(tmp_path / "run"))
