"""Problems whose answer is known by hand. They catch what unit tests of losses cannot: s for s', a
target that never moves, a flag that masks what it should not, the sign of an advantage."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import load, save_rows

from algos import crr


def q_values(args, obs, action):
    """Mean of the two critics of a finished run, at raw observations."""
    checkpoint = load(args.run_dir)
    critic = crr.TwinCritic(1, 1, args.hidden_dim)
    critic.load_state_dict(checkpoint["critic"])
    obs = torch.tensor(obs, dtype=torch.float32)[:, None]
    obs = (obs - checkpoint["obs_mean"]) / checkpoint["obs_std"]
    with torch.no_grad():
        return critic(obs, torch.tensor(action, dtype=torch.float32)[:, None]).mean(0).tolist()


@pytest.fixture
def probe_args(tiny):
    return replace(
        tiny,
        reward_scale=1.0,
        hidden_dim=32,
        batch_size=64,
        total_updates=800,
        eval_interval=1000,
        learning_rate=3e-3,
        tau=0.05,
        log_interval=1000,
    )


def test_S1_truncation_bootstraps(probe_args, tmp_path):
    """One state, reward 1, cut every 10th step, gamma 0.9: Q = 1 / (1 - 0.9) = 10.

    Treating the cut as an end gives 1 / (1 - 0.9 * 0.9) = 5.26 on average.
    """
    rows, action = np.zeros(500), np.random.default_rng(0).uniform(-1, 1, 500)
    cut = np.arange(500) % 10 == 9
    path = save_rows(tmp_path / "d.npz", rows, action, rows + 1, rows, cut & False, cut)
    args = replace(probe_args, dataset=path, gamma=0.9)
    crr.train(args)
    assert q_values(args, [0.0, 0.0], [-0.5, 0.5]) == pytest.approx([10, 10], abs=0.5)


def test_termination_does_not_bootstrap(probe_args, tmp_path):
    """The same with true ends on every step: Q = 1."""
    rows, action = np.zeros(500), np.random.default_rng(0).uniform(-1, 1, 500)
    end = np.ones(500, bool)
    path = save_rows(tmp_path / "d.npz", rows, action, rows + 1, rows, end, end & False)
    args = replace(probe_args, dataset=path, gamma=0.9)
    crr.train(args)
    assert q_values(args, [0.0, 0.0], [-0.5, 0.5]) == pytest.approx([1, 1], abs=0.05)


@pytest.mark.parametrize("weight_type", ["binary", "exp"])
def test_two_step_mdp_with_known_q(probe_args, tmp_path, weight_type):
    """s = 0 leads to s = 1 for nothing; there, a > 0 pays 1, all else 0, and it ends.

    Q(1, a) = 1[a > 0]. The policy learns to take a > 0 there, so that Q(0, .) tends to gamma * 1,
    where cloning the data would leave it at gamma / 2.
    """
    rng = np.random.default_rng(0)
    obs = np.tile([0.0, 1.0], 500)
    action = rng.uniform(-1, 1, 1000)
    reward = np.where(obs == 1, (action > 0).astype(float), 0.0)
    end = obs == 1
    path = save_rows(tmp_path / "d.npz", obs, action, reward, obs + 1, end, end & False)
    args = replace(probe_args, dataset=path, gamma=0.8, weight_type=weight_type, beta=0.2)
    crr.train(args)
    assert q_values(args, [1.0, 1.0], [-0.5, 0.5]) == pytest.approx([0, 1], abs=0.1)
    assert q_values(args, [0.0, 0.0], [-0.5, 0.5]) == pytest.approx([0.8, 0.8], abs=0.1)
    policy = crr.load_policy(f"{args.run_dir}/checkpoint.pt")
    assert policy(np.array([[1.0]], np.float32)).item() > 0.2


def test_bandit_is_solved_and_cloning_is_not(probe_args, tmp_path):
    """One step, reward -|a - 0.6|, data uniform on [-1, 1]: CRR moves towards 0.6, cloning stays at
    the mean of the data, which is 0."""
    action = np.random.default_rng(0).uniform(-1, 1, 2000)
    rows, end = np.zeros(2000), np.ones(2000, bool)
    path = save_rows(tmp_path / "d.npz", rows, action, -abs(action - 0.6), rows, end, end & False)
    args = replace(probe_args, dataset=path)
    crr.train(args)
    cloning = replace(args, weight_type="exp", beta=np.inf, run_dir=args.run_dir + "-bc")
    crr.train(cloning)
    modes = [
        crr.load_policy(f"{run.run_dir}/checkpoint.pt")(np.zeros((1, 1), np.float32)).item()
        for run in (args, cloning)
    ]
    assert modes == [pytest.approx(0.6, abs=0.15), pytest.approx(0.0, abs=0.15)]
