"""The command line: every flag at another value, every wrong input with its line and exit code."""

import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    ACTOR_LOSS,
    ALGOS,
    CLONING,
    OFFLINE,
    REAL_ENV,
    WITH_DATA,
    WITH_REWARDS,
    as_flags,
    budget,
    data,
    flat,
    load,
    tiny_args,
)

import common

# ---- every flag works at a non-default value, and does what it says

CHANGES_TRAINING = {
    "env_id": "Pendulum-v1",
    "seed": 5,
    "batch_size": 16,
    "gamma": 0.5,
    "learning_rate": 2e-3,
    "lr_schedule": "cosine",
    "warmup_updates": 10,
    "hidden_dim": 24,
    "target_return": -100.0,
}
REWARD_FLAGS = {"reward_scale": 2.0, "reward_shift": 1.0}
OFFLINE_FLAGS = {"normalize_reward": True, "total_updates": 21, "total_epochs": 1}
OWN_FLAGS = {  # these change training, too
    "awr": {
        "beta": 0.1,
        "max_weight": 1.1,
        "normalize_advantage": False,
        "td_lambda": 0.5,
        "refresh_interval": 3,
        "value_warmup": 9,
    },
    "marwil": {
        "beta": 0.1,
        "max_weight": 1.1,
        "norm_start": 100.0,
        "norm_rate": 0.5,
        "td_lambda": 0.5,
        "refresh_interval": 3,
    },
    "crr": {
        "advantage_type": "max",
        "weight_type": "exp",
        "num_action_samples": 2,
        "tau": 0.5,
        "target_interval": 3,
    },
    "rlpd": {
        "total_timesteps": 21,
        "offline_batch_ratio": 0.25,
        "offline_pretrain_updates": 3,
        "data_in_buffer": True,
        "buffer_capacity": 7,
        "learning_starts": 6,
        "train_frequency": 2,
        "gradient_updates_per_step": 3,
        "num_hidden_layers": 3,
        "num_critics": 4,
        "num_min_critics": 1,
        "critic_layer_norm": False,
        "backup_entropy": False,
        "alpha": 0.3,
        "target_entropy": -3.0,
        "tau": 0.5,
    },
    "mbpo": {
        "total_timesteps": 21,
        "buffer_capacity": 7,
        "learning_starts": 6,
        "updates_per_step": 3,
        "critic_layer_norm": True,
        "alpha": 0.3,
        "target_entropy": -3.0,
        "tau": 0.5,
        "real_ratio": 0.5,
        "num_members": 4,
        "num_elites": 1,
        "model_hidden_dim": 9,
        "model_learning_rate": 2e-3,
        "normalize_targets": False,
        "model_train_interval": 4,
        "model_batch_size": 4,
        "max_model_updates": 2,
        "rollout_batch_size": 21,
        "min_rollout_length": 2,
        "max_rollout_length": 2,
        "rollout_grow_from": 14,
        "rollout_grow_until": 20,
        "retain_steps": 5,
    },
    "fqf": {
        "env_id": "CartPole-v1",
        "total_timesteps": 21,
        "num_fractions": 5,
        "num_cosines": 9,
        "kappa": 0.1,
        "learn_fractions": False,
        "fraction_learning_rate": 1e-2,
        "entropy_coef": 0.5,
        "weight_targets_by_fraction": False,
        "double_q": True,
        "n_steps": 2,
        "target_interval": 2,
        "buffer_capacity": 9,
        "learning_starts": 6,
        "train_frequency": 2,
        "epsilon_final": 0.9,
        "epsilon_steps": 3,
        "prioritized": True,
    },
    "gail": {
        "total_timesteps": 25,
        "num_expert_episodes": 10,
        "expert_subsampling": 2,
        "num_envs": 2,
        "num_steps": 4,
        "reward_type": "logit",
        "absorbing": True,
        "learn_discriminator": False,
        "discriminator_learning_rate": 2e-3,
        "discriminator_updates": 3,
        "discriminator_entropy_coef": 0.1,
        "gradient_penalty": 0.0,
        "num_epochs": 2,
        "gae_lambda": 0.5,
        "max_ratio_change": 1e-3,
        "policy_entropy_coef": 0.5,
        "max_grad_norm": 1e-3,
    },
    "dreamer": {
        "env_id": "CartPole-v1",
        "total_timesteps": 21,
        "size": "mini",
        "num_envs": 2,
        "learning_starts": 6,
        "buffer_capacity": 9,
        "replay_ratio": 16.0,
        "sequence_length": 2,
        "free_nats": 100.0,
        "actor_critic_learning_rate": 2e-3,
        "imagine_last": 3,
        "horizon": 3,
        "td_lambda": 0.5,
        "policy_entropy_coef": 0.5,
        "replay_critic_coef": 0.0,
        "tau": 0.5,
    },
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
}
OWN_FLAGS_THAT_LEAVE_TRAINING = {
    "crr": {
        "num_cwp_samples": 2,
        "beta": 0.1,  # of exp weights only
        "max_weight": 2.0,  # of exp weights only
    },
    "fqf": {
        "priority_alpha": 0.1,  # of prioritised replay only
        "priority_beta": 0.1,  # of prioritised replay only
        "priority_beta_steps": 7,  # of prioritised replay only
    },
}
ELSEWHERE = {"run_dir", "resume", "evaluate", "record", "capture_video", "track"}
ELSEWHERE_OF = {"rlpd": {"record_replay"}, "fqf": {"plot"}, "dreamer": {"from_pixels"}}


def flags_of(name):
    """-> {flag: value} that change the training of an algorithm, and that do not"""
    changes = CHANGES_TRAINING | OWN_FLAGS[name]
    changes |= {"dataset": "random:100"} if name in WITH_DATA else {}
    changes |= REWARD_FLAGS if name in WITH_REWARDS else {}
    changes |= OFFLINE_FLAGS if name in OFFLINE else {}
    if name == "dreamer":  # it has sizes
        changes.pop("hidden_dim")
    return changes, LEAVES_TRAINING | OWN_FLAGS_THAT_LEAVE_TRAINING.get(name, {})


ALL_FLAGS = [(name, flag) for name in ALGOS for flags in flags_of(name) for flag in flags]


def test_every_flag_is_tried(algo):
    changes, leaves = flags_of(algo.ALGO)
    tried = changes.keys() | leaves.keys() | ELSEWHERE | ELSEWHERE_OF.get(algo.ALGO, set())
    tried |= {"compile"} if hasattr(algo.Args, "compile") else set()  # where it pays
    assert tried == {field.name for field in fields(algo.Args)}


@pytest.fixture(scope="module")
def baseline(algo, probe_data, tmp_path_factory):
    args = tiny_args(algo, probe_data, tmp_path_factory.mktemp("baseline") / "run")
    args = replace(args, device="auto")
    algo.train(args)
    return args, flat(load(args.run_dir))


@pytest.mark.parametrize(("algo", "name"), ALL_FLAGS, indirect=["algo"])
def test_flag(algo, name, baseline, tmp_path, run):
    args, expected = baseline
    changes, leaves = flags_of(algo.ALGO)
    value = (changes | leaves)[name]
    assert value != getattr(args, name)
    args = replace(args, **{name: value}, run_dir=str(tmp_path / "run"))
    if name == "env_id":
        args = replace(args, **data(algo, "random:100"))
    if name == "data_in_buffer":
        args = replace(args, offline_batch_ratio=0.0)
    if name == "num_envs" and algo.ALGO == "dreamer":  # each needs a sequence
        args = replace(args, learning_starts=8)
    code, out, err = run(*as_flags(args))
    assert (code, err) == (0, "")
    assert bool(out) == (not args.quiet)
    checkpoint = load(args.run_dir)
    assert checkpoint["args"][name] == value
    actual = flat(checkpoint)
    same = actual.shape == expected.shape and torch.equal(actual, expected)
    # two threads may add up in another order, and need not
    assert same == (name in leaves) or name == "torch_threads"
    if name == "torch_threads":
        assert torch.get_num_threads() == 2
        torch.set_num_threads(1)
    if name in ("eval_interval", "log_interval"):
        loss = ACTOR_LOSS.get(algo.ALGO, "losses/actor")
        key = {"eval_interval": ",eval/return_mean,", "log_interval": f",{loss},"}[name]
        logged = Path(args.run_dir, "metrics.csv").read_text().count(key)
        moved_at_3 = algo.ALGO in ("marwil", "crr")  # in the others, the actor still waits
        num_evals = 1 + 5 + moved_at_3 + 1
        num_logs = 20 if algo.ALGO in OFFLINE else 16  # the others only act, for 4 steps (FQF: 3)
        num_logs += algo.ALGO == "fqf"
        num_logs -= 5 * (algo.ALGO == "awr")  # its actor waits for 5 updates
        if algo.ALGO == "gail":  # an update every 5 steps: nothing new at 3, 9 and 18
            num_evals, num_logs = 1 + 3 + 1, 4
        assert logged == {"eval_interval": num_evals, "log_interval": num_logs}[name]


def test_divergence_is_not_silent(algo, tiny):
    """Weights 1[NaN > 0] are 0: without a check the actor would stand still and look healthy."""
    step = 10 if algo.ALGO == "dreamer" else 5  # at 5 its first losses, of before that update
    line = rf"losses/\w+ is (nan|inf) at (update|step) {step}: it diverged"
    with pytest.raises(common.InputError, match=line):
        algo.train(replace(tiny, learning_rate=1e30))


@pytest.mark.parametrize("algo", OFFLINE, indirect=True)
def test_divergence_of_a_clone_is_not_silent(algo, tiny):
    """Cloning does not depend on V or Q, and MARWIL's V stands still: the actor is watched, too."""
    with pytest.raises(common.InputError, match="it diverged"):
        algo.train(replace(tiny, learning_rate=1e30, **CLONING[algo.ALGO]))


def test_vectors_of_bytes(algo, tiny):
    env_id = "ByteChoice-v0" if algo.ALGO in ("fqf", "dreamer") else "Bytes-v0"
    algo.train(replace(tiny, env_id=env_id, **data(algo, "random:100")))


def test_batch_of_one_and_dataset_of_one(algo, tiny, tmp_path):
    own = {"rlpd": {"offline_batch_ratio": 0.0}, "mbpo": {"real_ratio": 0.0}}
    own |= {"dreamer": {"batch_size": 2, "sequence_length": 2, "replay_ratio": 2.0}}  # one sequence
    algo.train(replace(tiny, **{"batch_size": 1} | own.get(algo.ALGO, {})))
    assert "nan" not in Path(tiny.run_dir, "metrics.csv").read_text()
    if algo.ALGO not in WITH_DATA:
        return
    rows = {name: array[:1] for name, array in np.load(tiny.dataset).items()}
    np.savez(tmp_path / "one.npz", **rows)
    one = replace(tiny, dataset=str(tmp_path / "one.npz"), run_dir=str(tmp_path / "one"))
    if algo.ALGO not in OFFLINE:  # they have rows of their own
        assert algo.train(one)["step"] == 20
        return
    with pytest.raises(common.InputError, match="has a single row"):
        algo.train(one)


COMPILED = [name for name, algo in ALGOS.items() if hasattr(algo.Args, "compile")]


@pytest.mark.parametrize("algo", COMPILED, indirect=True)
def test_compile_gives_the_same_numbers(algo, tiny, monkeypatch, tmp_path):
    """With the compiler's front end and its autograd, without half a minute of C++."""
    compiled_networks = []

    def compile(network):
        compiled_networks.append(type(network).__name__)
        network._compiled_call_impl = torch.compile(network._call_impl, backend="aot_eager")

    algo.train(replace(tiny, **budget(algo, 6)))
    monkeypatch.setattr(torch.nn.Module, "compile", compile)
    compiled = replace(tiny, **budget(algo, 6), compile=True, run_dir=str(tmp_path / "compiled"))
    algo.train(compiled)
    names = {"rlpd": ["EnsembleCritic", "GaussianActor"]}
    names |= {"fqf": ["QuantileNetwork", "QuantileNetwork"]}
    assert sorted(compiled_networks) == names[algo.ALGO]
    expected, actual = load(tiny.run_dir), load(compiled.run_dir)
    acts = "network" if algo.ALGO == "fqf" else "actor"
    assert actual[acts].keys() == expected[acts].keys()
    torch.testing.assert_close(flat(actual), flat(expected), rtol=1e-4, atol=1e-6)


# ---- logs


# ---- evaluate, record, film


def test_evaluate_record_and_film(algo, tiny, tmp_path, run, monkeypatch):
    env_id = REAL_ENV.get(algo.ALGO, "Pendulum-v1")
    args = replace(tiny, env_id=env_id, **data(algo, "random:300"), eval_episodes=3)
    algo.train(args)
    path, file = f"{args.run_dir}/best.pt", tmp_path / "recorded.npz"
    flags = ["--evaluate", path, "--record", file, "--capture-video"]
    code, out, err = run(*flags)
    assert (code, err) == (0, "")
    video = Path(args.run_dir, "videos", "seed-10000-episode-0.mp4")
    assert video.stat().st_size > 1000 and str(video) in out

    recorded = np.load(file)
    last_row = np.flatnonzero(recorded["terminations"] | recorded["truncations"])
    returns = np.diff(np.append(0, recorded["rewards"].cumsum(dtype=float)[last_row]))
    assert len(returns) == 3
    for name in ("mean", "std", "min", "max"):
        assert f"{name} {getattr(returns, name)():.1f}" in out
    # and the record is a dataset: train on it
    if algo.ALGO in WITH_DATA:
        again = replace(args, dataset=str(file), run_dir=str(tmp_path / "again"))
        code, _, err = run(*as_flags(again))
        assert (code, err) == (0, "")
    # the seed of the episodes is the one that was asked for; recorded ones have seeds of their own
    _, other, _ = run("--evaluate", path, "--eval-seed", 5)
    monkeypatch.setattr(common, "RECORD_SEEDS", 10**8)  # so that theirs can be asked for
    _, same, _ = run("--evaluate", path, "--eval-seed", 1_010_000)
    assert other != same and same.splitlines()[0] == out.splitlines()[0]
    # what would do nothing is refused
    code, _, err = run("--evaluate", path, "--gamma", 0.5)
    assert (code, err) == (2, "--evaluate keeps gamma = 0.99 of the run, got 0.5\n")
    code, out, _ = run("--evaluate", path, "--quiet")
    assert (code, out) == (0, "")


def test_load_policy_acts_in_the_units_of_the_environment(algo, tiny):
    """Pendulum's torque is in [-2, 2]: a policy that saturates must say 2, not 1. The actions of
    the environment of FQF and Dreamer begin at 5."""
    discrete = {"fqf": ("network", "output.bias"), "dreamer": ("actor", "net.3.bias")}
    if algo.ALGO in discrete:
        algo.train(tiny)
        checkpoint, path = load(tiny.run_dir), f"{tiny.run_dir}/checkpoint.pt"
        network, bias = discrete[algo.ALGO]
        checkpoint[network][bias][2] = 100.0
        torch.save(checkpoint, path)
        assert algo.load_policy(path)(np.zeros((4, 2))).tolist() == [7] * 4
        return
    args = replace(tiny, env_id="Pendulum-v1", **data(algo, "random:300"))
    algo.train(args)
    path = f"{args.run_dir}/checkpoint.pt"
    checkpoint = load(args.run_dir)
    checkpoint["actor"]["net.4.bias"][0] = 100.0
    torch.save(checkpoint, path)
    assert algo.load_policy(path)(np.zeros((4, 3), np.float32)).tolist() == [[2.0]] * 4


@pytest.mark.parametrize("algo", OFFLINE, indirect=True)
def test_S15_acting_and_training_preprocess_alike(algo, tiny):
    """The policy of raw observations is the actor of standardised ones."""
    algo.train(tiny)
    checkpoint = load(tiny.run_dir)
    actor = algo.Actor(1, 1, tiny.hidden_dim, discrete=False)
    actor.load_state_dict(checkpoint["actor"])
    raw = np.load(tiny.dataset)["observations"][:50]
    standardised = (torch.tensor(raw) - checkpoint["obs_mean"]) / checkpoint["obs_std"]
    with torch.no_grad():
        expected = torch.tanh(actor(standardised).mean).numpy()
    actual = algo.load_policy(f"{tiny.run_dir}/checkpoint.pt")(raw)
    np.testing.assert_allclose(actual, expected, atol=1e-6)
    rows = np.load(tiny.dataset)["observations"]
    np.testing.assert_allclose(checkpoint["obs_mean"], rows.mean(0), atol=1e-6)
    np.testing.assert_allclose(checkpoint["obs_std"], rows.std(0, ddof=1) + 1e-3, atol=1e-5)


@pytest.mark.parametrize("algo", ["rlpd", "mbpo"], indirect=True)
def test_S15_acting_online_and_training_preprocess_alike(algo, tiny):
    """Online, observations go into the actor as they are, in evaluation as in training."""
    algo.train(tiny)
    actor = algo.GaussianActor(1, 1, [tiny.hidden_dim] * 2)
    actor.load_state_dict(load(tiny.run_dir)["actor"])
    raw = np.linspace(-3, 3, 50, dtype=np.float32)[:, None]
    with torch.no_grad():
        expected = torch.tanh(actor(torch.tensor(raw))[0]).numpy()
    actual = algo.load_policy(f"{tiny.run_dir}/checkpoint.pt")(raw)
    np.testing.assert_allclose(actual, expected, atol=1e-6)


@pytest.mark.parametrize("algo", ["dreamer"], indirect=True)
def test_from_pixels(algo, tiny, run):
    """What is rendered takes the place of what is observed, in training and wherever the policy is
    used after it."""
    args = replace(tiny, env_id="CartPole-v1", from_pixels=True)
    assert run(*as_flags(args)) == (0, "", "")
    seen = load(args.run_dir)["buffer"]["obs"]  # one environment, one row for each step, or more
    assert seen.shape[1:] == (1, 32, 32, 3) and seen.dtype == torch.uint8
    assert (seen.flatten(1).float().std(dim=1) > 5).all()  # a pole and a cart, no empty screens
    assert not torch.equal(seen[0], seen[5])
    code, out, err = run("--evaluate", f"{args.run_dir}/best.pt", "--capture-video")
    assert (code, err) == (0, "")
    for name in ("dream.png", "dream.gif", "videos/seed-10000-episode-0.mp4"):
        file = Path(args.run_dir, name)
        assert str(file) in out and file.stat().st_size > 1000


# ---- wrong input: one line, exit code 2

WRONG_ENVS = [  # each script asks common.check_spaces for the kinds that it knows
    (["--env-id", "Several-v0"], "Several-v0: actions must be "),
    (["--env-id", "Unbounded-v0"], "Unbounded-v0: actions must "),
]
WRONG_FLAGS = [  # of common.py
    *WRONG_ENVS,
    (["--gamma", "1.0"], "gamma must be in [0, 1), got 1.0"),
    (["--learning-rate", "0"], "learning_rate must be in (0, inf), got 0.0"),
    (["--learning-rate", "inf"], "learning_rate must be in (0, inf), got inf"),
    (["--batch-size", "0"], "batch_size must be > 0, got 0"),
    (["--warmup-updates", "-1"], "warmup_updates must be >= 0, got -1"),
    (["--seed", "-1"], "seed must be in [0, 2^63), got -1"),
    (["--seed", str(2**63)], f"seed must be in [0, 2^63), got {2**63}"),
    (["--eval-seed", "1000000"], "eval_seed must be in [0, 10^6), got 1000000"),
    (["--patience", "0"], "patience must be > 0, got 0"),
    (["--tau", "nan"], "tau must be in (0, 1], got nan"),
    (["--record", "x.npz"], "record must be used with --evaluate, got x.npz"),
    (["--record", "x.txt"], "record must be a name that ends in .npz, got x.txt"),
    (["--capture-video"], "capture_video must be used with --evaluate, got True"),
    (["--resume", "a", "--evaluate", "b"], "--resume and --evaluate are two things to do"),
    (["--env-id", "Nowhere-v0"], "cannot make the environment Nowhere-v0:"),
    (["--env-id", "no_module:X-v0"], "cannot make the environment no_module:X-v0:"),
    (["--resume", "nowhere"], "there is no checkpoint nowhere/checkpoint.pt"),
    (["--evaluate", "nowhere.pt"], "there is no checkpoint nowhere.pt"),
]
if not torch.cuda.is_available():
    WRONG_FLAGS.append((["--device", "cuda"], "device cuda is not available here;"))


NAIVE = ["--data-in-buffer", "--offline-batch-ratio", "0"]
IMAGE_WRONG_FLAGS = [(["--env-id", "Image-v0"], "Image-v0: observations must be vectors")]
DATA_WRONG_FLAGS = [
    (["--dataset", "nowhere.npz"], "dataset nowhere.npz: FileNotFoundError: "),
    (["--dataset", "nonsense"], "dataset nonsense: expected auto, random, random:N with"),
    (["--dataset", "random:0"], "dataset random:0: expected auto, random, random:N"),
]
REWARD_WRONG_FLAGS = [
    (["--reward-shift", "inf"], "reward_shift must be finite, got inf"),
    (["--reward-scale", "inf"], "reward_scale must be in (0, inf), got inf"),
]
OFFLINE_WRONG_FLAGS = [
    (["--max-weight", "0.5"], "max_weight must be >= 1, got 0.5"),
    (["--total-updates", "0"], "total_updates must be > 0, got 0"),
    (["--total-epochs", "0"], "total_epochs must be > 0, got 0"),
]
OWN_WRONG_FLAGS = {
    "awr": [
        (["--beta", "-1.0"], "beta must be > 0, got -1.0"),
        (["--beta", "nan"], "beta must be > 0, got nan"),
        (["--td-lambda", "1.1"], "td_lambda must be in [0, 1], got 1.1"),
        (["--refresh-interval", "0"], "refresh_interval must be > 0, got 0"),
        (["--value-warmup", "-1"], "value_warmup must be >= 0, got -1"),
        (["--value-warmup", "10000"], "value_warmup 10000 leaves the actor no update"),
        (["--max-weight", "nan"], "max_weight must be >= 1, got nan"),
    ],
    "marwil": [
        (["--beta", "-1.0"], "beta must be in [0, inf), got -1.0"),
        (["--beta", "inf"], "beta must be in [0, inf), got inf"),
        (["--beta", "nan"], "beta must be in [0, inf), got nan"),
        (["--norm-start", "0"], "norm_start must be in (0, 1e38), got 0.0"),
        (["--norm-start", "1e39"], "norm_start must be in (0, 1e38), got 1e+39"),
        (["--norm-rate", "-1e-8"], "norm_rate must be in [0, 1], got -1e-08"),
        (["--norm-rate", "2"], "norm_rate must be in [0, 1], got 2.0"),
        (["--td-lambda", "-0.1"], "td_lambda must be in [0, 1], got -0.1"),
        (["--refresh-interval", "0"], "refresh_interval must be > 0, got 0"),
    ],
    "crr": [
        (["--beta", "-1.0"], "beta must be > 0, got -1.0"),
        (["--beta", "nan"], "beta must be > 0, got nan"),
        (["--num-action-samples", "0"], "num_action_samples must be > 0, got 0"),
        (["--num-cwp-samples", "-1"], "num_cwp_samples must be >= 0, got -1"),
        (["--tau", "0"], "tau must be in (0, 1], got 0.0"),
    ],
    "rlpd": [
        (["--total-timesteps", "0"], "total_timesteps must be > 0, got 0"),
        (["--offline-batch-ratio", "1.1"], "offline_batch_ratio must be in [0, 1], got 1.1"),
        (["--offline-batch-ratio", "nan"], "offline_batch_ratio must be in [0, 1], got nan"),
        (["--offline-batch-ratio", "0.001"], "offline_batch_ratio must leave a row of each"),
        (["--offline-batch-ratio", "0.999"], "offline_batch_ratio must leave a row of each"),
        (["--data-in-buffer"], "offline_batch_ratio must be 0 beside --data-in-buffer"),
        (["--offline-pretrain-updates", "-1"], "offline_pretrain_updates must be >= 0, got -1"),
        (["--learning-starts", "-1"], "learning_starts must be >= 0, got -1"),
        (["--learning-starts", "2000"], "total_timesteps 2000 is spent before the first update:"),
        (["--train-frequency", "0"], "train_frequency must be > 0, got 0"),
        (["--train-frequency", "2001"], "total_timesteps 2000 is spent before the first update:"),
        (["--gradient-updates-per-step", "0"], "gradient_updates_per_step must be > 0, got 0"),
        (["--num-critics", "1"], "num_min_critics must be <= num_critics, got 2"),
        (["--num-min-critics", "0"], "num_min_critics must be > 0, got 0"),
        (["--alpha", "-0.1"], "alpha must be in [0, inf), got -0.1"),
        (["--alpha", "nan"], "alpha must be in [0, inf), got nan"),
        (["--alpha", "0.1", "--target-entropy", "-1"], "alpha must be used without --target-en"),
        (["--target-entropy", "nan"], "target_entropy must be finite, got nan"),
        (["--tau", "0"], "tau must be in (0, 1], got 0.0"),
        (["--buffer-capacity", "0"], "buffer_capacity must be > 0, got 0"),
        (["--buffer-capacity", "9" * 15], "buffer_capacity 999999999999999 is too much memory"),
        (["--buffer-capacity", "9" * 20], "buffer_capacity 99999999999999999999 is too much mem"),
        ([*NAIVE, "--buffer-capacity", "9"], "buffer_capacity must be >= the 20000 rows of the"),
        ([*NAIVE, "--dataset", "none"], "data_in_buffer needs a dataset, and Pendulum-v1 has"),
        (
            ["--dataset", "none", "--offline-pretrain-updates", "9"],
            "offline_pretrain_updates needs",
        ),
        ([*NAIVE, "--env-id", "Probe-v0"], "data_in_buffer needs a dataset, and Probe-v0 has"),
        (["--record-replay", "x.npz"], "record_replay must be used with --evaluate, got x.npz"),
        (["--record-replay", "x.txt"], "record_replay must be a name that ends in .npz, got"),
        (["--env-id", "Choice-v0"], "Choice-v0: actions must be vectors, not Dis"),
    ],
    "mbpo": [
        (["--total-timesteps", "0"], "total_timesteps must be > 0, got 0"),
        (["--learning-starts", "2"], "learning_starts must be >= 3, for the first fit, got 2"),
        (["--total-timesteps", "200"], "total_timesteps 200 is spent before the first update:"),
        (["--updates-per-step", "0"], "updates_per_step must be > 0, got 0"),
        (["--real-ratio", "1.1"], "real_ratio must be in [0, 1], got 1.1"),
        (["--real-ratio", "nan"], "real_ratio must be in [0, 1], got nan"),
        (["--real-ratio", "0.001"], "real_ratio must be 0, 1 or enough for a row of each kind"),
        (["--num-elites", "8"], "num_elites must be <= num_members 7, got 8"),
        (["--num-members", "0"], "num_members must be > 0, got 0"),
        (["--model-hidden-dim", "0"], "model_hidden_dim must be > 0, got 0"),
        (["--model-learning-rate", "inf"], "model_learning_rate must be in (0, inf), got inf"),
        (["--model-train-interval", "0"], "model_train_interval must be > 0, got 0"),
        (["--max-model-updates", "0"], "max_model_updates must be > 0, got 0"),
        (["--model-batch-size", "0"], "model_batch_size must be > 0, got 0"),
        (["--rollout-batch-size", "0"], "rollout_batch_size must be > 0, got 0"),
        (["--rollout-batch-size", "9" * 15], "rollout_batch_size 999999999999999 is too much m"),
        (["--min-rollout-length", "0"], "min_rollout_length must be > 0, got 0"),
        (["--max-rollout-length", "0"], "max_rollout_length must be >= min_rollout_length"),
        (["--rollout-grow-from", "-1"], "rollout_grow_from must be >= 0, got -1"),
        (["--rollout-grow-until", "1"], "rollout_grow_until must be > rollout_grow_from"),
        (["--retain-steps", "0"], "retain_steps must be > 0, got 0"),
        (["--alpha", "0.1", "--target-entropy", "-1"], "alpha must be used without --target-en"),
        (["--buffer-capacity", "2"], "buffer_capacity must be >= 3, for the first fit, got 2"),
        (["--buffer-capacity", "9" * 15], "buffer_capacity 999999999999999 is too much memory"),
        (["--env-id", "Choice-v0"], "Choice-v0: actions must be vectors, not Dis"),
    ],
    "fqf": [
        (["--total-timesteps", "0"], "total_timesteps must be > 0, got 0"),
        (["--learning-starts", "-1"], "learning_starts must be >= 0, got -1"),
        (["--learning-starts", "50000"], "total_timesteps 50000 is spent before the first update:"),
        (["--train-frequency", "0"], "train_frequency must be > 0, got 0"),
        (["--num-fractions", "0"], "num_fractions must be > 0, got 0"),
        (["--num-cosines", "0"], "num_cosines must be > 0, got 0"),
        (["--kappa", "0"], "kappa must be in (0, inf), got 0.0"),
        (["--kappa", "inf"], "kappa must be in (0, inf), got inf"),
        (["--fraction-learning-rate", "0"], "fraction_learning_rate must be in (0, inf), got 0.0"),
        (
            ["--fraction-learning-rate", "nan"],
            "fraction_learning_rate must be in (0, inf), got nan",
        ),
        (["--entropy-coef", "-1"], "entropy_coef must be in [0, inf), got -1.0"),
        (["--n-steps", "0"], "n_steps must be > 0, got 0"),
        (["--target-interval", "0"], "target_interval must be > 0, got 0"),
        (["--buffer-capacity", "7"], "buffer_capacity must be > 7, for one transition, got 7"),
        (["--buffer-capacity", "9" * 15], "buffer_capacity 999999999999999 is too much memory"),
        (["--buffer-capacity", "9" * 20], "buffer_capacity 99999999999999999999 is too much mem"),
        (["--epsilon-final", "1.1"], "epsilon_final must be in [0, 1], got 1.1"),
        (["--epsilon-steps", "0"], "epsilon_steps must be > 0, got 0"),
        (["--priority-alpha", "-0.1"], "priority_alpha must be in [0, 1], got -0.1"),
        (["--priority-beta", "1.1"], "priority_beta must be in [0, 1], got 1.1"),
        (["--priority-beta-steps", "0"], "priority_beta_steps must be > 0, got 0"),
        (["--plot"], "plot must be used with --evaluate, got True"),
        (["--env-id", "Probe-v0"], "Probe-v0: actions must be discrete, not Box"),
        (["--env-id", "ALE/Nothing-v5"], "cannot make the environment ALE/Nothing-v5:"),
    ],
    "gail": [
        (["--total-timesteps", "0"], "total_timesteps must be > 0, got 0"),
        (["--total-timesteps", "1001"], "total_timesteps must be a multiple of num_envs 8, got 1"),
        (["--total-timesteps", "1016"], "total_timesteps 1016 is spent before the first update:"),
        (["--num-envs", "0"], "num_envs must be in [1, 2^15), got 0"),
        (["--num-steps", "0"], "num_steps must be > 0, got 0"),
        (["--num-epochs", "0"], "num_epochs must be > 0, got 0"),
        (["--num-expert-episodes", "0"], "num_expert_episodes must be > 0, got 0"),
        (["--num-expert-episodes", "11"], "num_expert_episodes must be <= 10, the episodes"),
        (["--expert-subsampling", "0"], "expert_subsampling must be > 0, got 0"),
        (["--expert-subsampling", "99999"], "expert_subsampling 99999 leaves no row: lower it"),
        (["--discriminator-updates", "0"], "discriminator_updates must be > 0, got 0"),
        (
            ["--discriminator-learning-rate", "0"],
            "discriminator_learning_rate must be in (0, inf), got 0",
        ),
        (
            ["--discriminator-learning-rate", "inf"],
            "discriminator_learning_rate must be in (0, inf)",
        ),
        (["--discriminator-entropy-coef", "-1"], "discriminator_entropy_coef must be in [0, inf)"),
        (["--gradient-penalty", "nan"], "gradient_penalty must be in [0, inf), got nan"),
        (["--policy-entropy-coef", "-1"], "policy_entropy_coef must be in [0, inf), got -1.0"),
        (["--gae-lambda", "1.1"], "gae_lambda must be in [0, 1], got 1.1"),
        (["--max-ratio-change", "0"], "max_ratio_change must be > 0, got 0.0"),
        (["--max-grad-norm", "0"], "max_grad_norm must be > 0, got 0.0"),
        (["--env-id", "Probe-v0"], f"no {common.SHIPPED}/Probe-v0-expert.npz: give the expert"),
    ],
    "dreamer": [
        (["--total-timesteps", "0"], "total_timesteps must be > 0, got 0"),
        (["--total-timesteps", "2001"], "total_timesteps must be a multiple of num_envs 8, got 2"),
        (["--total-timesteps", "1024"], "total_timesteps 1024 is spent before the first update:"),
        (["--num-envs", "0"], "num_envs must be in [1, 2^15), got 0"),
        (
            ["--learning-starts", "127"],
            "learning_starts must be >= num_envs x sequence_length",
        ),
        (["--buffer-capacity", "0"], "buffer_capacity must be > 0, got 0"),
        (["--buffer-capacity", "127"], "buffer_capacity must be >= num_envs x sequence_length"),
        (["--buffer-capacity", "9" * 15], "buffer_capacity 999999999999999 is too much memory"),
        (["--buffer-capacity", "9" * 20], "buffer_capacity 99999999999999999999 is too much mem"),
        (["--replay-ratio", "0"], "replay_ratio must be in (0, inf), got 0.0"),
        (["--replay-ratio", "nan"], "replay_ratio must be in (0, inf), got nan"),
        (["--replay-ratio", "inf"], "replay_ratio must be in (0, inf), got inf"),
        (["--replay-ratio", "0.001"], "total_timesteps 16000 is spent before the first update:"),
        (["--sequence-length", "0"], "sequence_length must be > 0, got 0"),
        (["--sequence-length", "1"], "sequence_length must be >= 2, got 1"),
        (["--batch-size", "250"], "batch_size must be a multiple of sequence_length 16, got 250"),
        (["--free-nats", "-1"], "free_nats must be in [0, inf), got -1.0"),
        (["--free-nats", "inf"], "free_nats must be in [0, inf), got inf"),
        (
            ["--actor-critic-learning-rate", "0"],
            "actor_critic_learning_rate must be in (0, inf), got 0.0",
        ),
        (
            ["--actor-critic-learning-rate", "inf"],
            "actor_critic_learning_rate must be in (0, inf)",
        ),
        (["--imagine-last", "0"], "imagine_last must be > 0, got 0"),
        (["--imagine-last", "1"], "imagine_last must be in [2, sequence_length 16], got 1"),
        (["--imagine-last", "17"], "imagine_last must be in [2, sequence_length 16], got 17"),
        (["--horizon", "0"], "horizon must be > 0, got 0"),
        (["--td-lambda", "1.1"], "td_lambda must be in [0, 1], got 1.1"),
        (["--policy-entropy-coef", "-1"], "policy_entropy_coef must be in [0, inf), got -1.0"),
        (["--replay-critic-coef", "nan"], "replay_critic_coef must be in [0, inf), got nan"),
        (["--tau", "0"], "tau must be in (0, 1], got 0.0"),
        (["--env-id", "Probe-v0"], "Probe-v0: actions must be discrete, not Box"),
        (["--env-id", "Image-v0"], "Image-v0: actions must be discrete, not Box"),
        (["--env-id", "FrozenLake-v1"], "FrozenLake-v1: observations must be vectors or uint8 im"),
        (["--env-id", "Steps-v0", "--from-pixels"], "cannot make the environment Steps-v0:"),
        (["--env-id", "ALE/Nothing-v5"], "cannot make the environment ALE/Nothing-v5:"),
    ],
}
ALL_WRONG_FLAGS = [
    pytest.param(name, flags, line, id=f"{name} {' '.join(flags)}")
    for name in ALGOS
    for flags, line in [
        *(WRONG_FLAGS if name in ("crr", "rlpd") else ()),
        *(WRONG_ENVS if name not in ("crr", "rlpd") else ()),
        *(IMAGE_WRONG_FLAGS if name != "dreamer" else ()),
        *(DATA_WRONG_FLAGS if name in WITH_DATA else ()),
        *(REWARD_WRONG_FLAGS if name in WITH_REWARDS else ()),
        *(OFFLINE_WRONG_FLAGS if name in OFFLINE else ()),
        *OWN_WRONG_FLAGS[name],
    ]
]


@pytest.mark.parametrize(("algo", "flags", "line"), ALL_WRONG_FLAGS, indirect=["algo"])
def test_wrong_flag(algo, flags, line, monkeypatch, tmp_path, run):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*flags)
    assert code == 2 and out == ""
    assert err.startswith(line) and err.count("\n") == 1
    assert os.listdir(tmp_path) == []  # nothing was begun


# ---- the script as such


def test_help_answers_without_torch(algo, tmp_path):
    """From any folder; importing torch would cost seconds, so it must not have happened."""
    script = algo.__file__
    code = f"import runpy, sys; sys.argv = [{script!r}, '--help']\n"
    code += f"try: runpy.run_path({script!r}, run_name='__main__')\n"
    code += "except SystemExit as exit: print('torch' in sys.modules, exit.code)"
    output = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    assert output.endswith("False None\n")
    flags, docstring, _ = output.partition(algo.__doc__)  # letter for letter, after the flags
    assert docstring
    for field in fields(algo.Args):
        assert f"--{field.name.replace('_', '-')}" in flags


@pytest.mark.skipif(os.name != "posix", reason="a shell with head")
def test_help_survives_head(algo):
    command = f"{sys.executable} {algo.__file__} -h | head -n 2"
    result = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert result.stdout.startswith(algo.__doc__.split(":")[0]) and result.stderr == ""
