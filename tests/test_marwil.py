"""MARWIL: its norm, weights and loss by hand arithmetic, and the checklist of known bugs.

What it shares with AWR, letter for letter, is tested in test_awr.py.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import ByHand, flat, load

from algos import marwil

T = torch.tensor


@pytest.fixture(scope="module")
def algo():
    return marwil


# ---- norm


def test_norm_recursion_in_closed_form():
    """Constant batches of mean square q: c2_n = q + (1 - rate)^n (c2_0 - q)."""
    advantage, rate, squared_norm = T([3.0, -4.0]), 0.1, T(100.0)
    q = (9 + 16) / 2
    for n in range(1, 51):
        squared_norm = marwil.update_norm(squared_norm, advantage, rate)
        assert squared_norm.item() == pytest.approx(q + 0.9**n * (100 - q), rel=1e-5)


def test_norm_starts_from_the_first_batch():
    advantage = T([3.0, -4.0], requires_grad=True)
    squared_norm = marwil.update_norm(None, advantage, 0.1)
    assert squared_norm.item() == 12.5 and not squared_norm.requires_grad
    assert marwil.update_norm(squared_norm, advantage, 0.1).item() == pytest.approx(12.5)


# ---- weights and loss


def test_marwil_loss_by_hand():
    log_prob, advantage, squared_norm = T([-1.0, -2.0, -3.0]), T([2.0, -1.0, 100.0]), T(4.0)
    # c = 2, beta = 0.5: exp(0.5), exp(-0.25), and the clip; a quarter of the squared error
    policy = (math.exp(0.5) * 1 + math.exp(-0.25) * 2 + 20 * 3) / 3
    value = 0.25 * (4 + 1 + 10_000) / 3 / 2
    loss = marwil.marwil_loss(log_prob, advantage, squared_norm, 0.5, 20.0, T(0.25))
    assert loss.item() == pytest.approx(policy + value, rel=1e-5)


def test_weights_are_those_of_awr_at_the_inverse_beta():
    """With c = 1 and no clip: exp(beta A) against exp(A / beta)."""
    advantage = torch.randn(100)
    weight = marwil.marwil_weight(advantage, T(1.0), 0.4, math.inf)
    torch.testing.assert_close(weight, torch.exp(advantage / 2.5))


def test_weights_are_monotone_positive_and_clipped():
    weight = marwil.marwil_weight(torch.linspace(-30, 30, 1001), T(1.0), 1.4, 20.0)
    assert (weight.diff() >= 0).all() and weight.min() > 0
    assert weight.max().item() == pytest.approx(20.0)


def test_weights_are_scale_free():
    """Rewards and V times k, c2 times k^2: the same weights."""
    advantage = torch.randn(100)
    weight = marwil.marwil_weight(advantage, T(2.0), 1.0, 20.0)
    scaled = marwil.marwil_weight(1000 * advantage, T(2.0e6), 1.0, 20.0)
    torch.testing.assert_close(scaled, weight)


def test_gradient_of_V_is_that_of_the_squared_error_alone():
    """dL/dV_b = value_coef (V_b - R_b) / B: the weights contribute nothing."""
    returns, value = torch.randn(8), torch.randn(8, requires_grad=True)
    marwil.marwil_loss(torch.randn(8), returns - value, T(0.5), 1.0, 20.0, T(3.0)).backward()
    torch.testing.assert_close(value.grad, 3 * (value.detach() - returns) / 8)


def test_zero_advantages_give_the_gradient_of_cloning():
    log_prob = torch.randn(8, requires_grad=True)
    marwil.marwil_loss(log_prob, torch.zeros(8), T(1.0), 1.0, 20.0, T(1.0)).backward()
    assert torch.equal(log_prob.grad, torch.full((8,), -1 / 8))


def test_tabular_optimum():
    """One state, three actions, counts n and advantages A: pi(a) ~ n_a exp(beta A_a / c)."""
    counts, advantages, beta, squared_norm = [5, 3, 2], [-1.0, 0.5, 2.0], 0.7, T(2.25)
    action = torch.eye(3).repeat_interleave(T(counts), dim=0)  # [10, 3]
    advantage = T(advantages).repeat_interleave(T(counts))  # [10]
    logits = torch.zeros(3, requires_grad=True)
    opt = torch.optim.Adam([logits], 0.05)
    for _ in range(1500):
        pi = marwil.Categorical(torch.log_softmax(logits.expand(10, 3), dim=-1))
        loss = marwil.marwil_loss(pi.log_prob(action), advantage, squared_norm, beta, 20.0, T(1.0))
        opt.zero_grad()
        loss.backward()
        opt.step()
    odds = np.array([n * math.exp(beta * a / 1.5) for n, a in zip(counts, advantages)])
    assert torch.softmax(logits, 0).tolist() == pytest.approx(odds / odds.sum(), abs=1e-3)


# ---- checklist


def test_M1_M5_the_setting_of_rllib_is_reproduced_and_does_not_adapt():
    """start 100, rate 1e-8, no clip, by hand in double precision; and after 20,000 updates with a
    mean square of 40,000 the norm is still 100 + 0.0002 (40,000 - 100) = 108."""
    rng = np.random.default_rng(0)
    log_prob, advantage = rng.normal(size=32), 5 * rng.normal(size=32)
    c2 = 100 + 1e-8 * ((advantage**2).mean() - 100)
    weight = np.exp(1.0 * advantage / (1e-8 + np.sqrt(c2)))
    expected = -(weight * log_prob).mean() + 0.5 * (advantage**2).mean()
    squared_norm = marwil.update_norm(T(100.0), T(advantage).float(), 1e-8)
    loss = marwil.marwil_loss(
        T(log_prob).float(), T(advantage).float(), squared_norm, 1.0, math.inf, T(1.0)
    )
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    squared_norm, advantage = T(100.0), T([200.0, -200.0])
    for _ in range(20_000):
        squared_norm = marwil.update_norm(squared_norm, advantage, 1e-8)
    assert squared_norm.item() == pytest.approx(108, abs=0.1)


def test_M1_rate_and_start_reach_the_loop(tiny):
    """The logged norm after n updates against the recursion over the logged mean squares."""
    marwil.train(replace(tiny, norm_start=50.0, norm_rate=0.25, log_interval=1))
    with open(f"{tiny.run_dir}/metrics.csv") as file:
        rows = [line.strip().split(",") for line in file][1:]
    squares = [2 * float(row[3]) for row in rows if row[2] == "losses/value"]
    norms = [float(row[3]) for row in rows if row[2] == "stats/squared_norm"]
    expected = 50.0
    for square, norm in zip(squares, norms, strict=True):
        expected += 0.25 * (square - expected)
        assert norm == pytest.approx(expected, rel=1e-4)


def test_M2_a_batch_is_drawn_from_single_rows_not_from_episodes(probe_data):
    """32 rows of 60 episodes of five steps: whole episodes would be seven of them."""
    dataset = marwil.common.load_dataset(probe_data, marwil.common.make_env("Probe-v0"))
    buffer = marwil.Buffer(dataset, torch.device("cpu"))
    buffer.returns = torch.arange(300.0)
    _, _, row = buffer.sample(32, torch.Generator().manual_seed(0))
    assert len((row // 5).unique()) > 20


def test_M3_beta_0_is_behaviour_cloning_bit_for_bit_and_V_is_not_touched(tiny, probe_data):
    dataset = marwil.common.load_dataset(probe_data, marwil.common.make_env("Probe-v0"))
    actor, value = marwil.Actor(1, 1, 16, discrete=False), marwil.Value(1, 16, T(0.0), T(1.0))
    advantage = torch.randn(300) - value(dataset.obs)
    loss = marwil.marwil_loss(
        actor(dataset.obs).log_prob(dataset.action), advantage, T(1.0), 0.0, 20.0, T(1.0)
    )
    loss.backward()
    cloning = -actor(dataset.obs).log_prob(dataset.action).mean()
    grads = torch.autograd.grad(cloning, list(actor.parameters()))
    for parameter, grad in zip(actor.parameters(), grads):
        assert torch.equal(parameter.grad, grad)
    assert all(parameter.grad is None for parameter in value.parameters())

    marwil.train(replace(tiny, beta=0.0, total_updates=3))
    torch.manual_seed(tiny.seed)
    marwil.Actor(1, 1, 16, discrete=False)  # drawn first
    fresh = marwil.Value(1, 16, T(0.0), T(1.0))
    state = load(tiny.run_dir)["value"]
    for name, parameter in fresh.named_parameters():
        assert torch.equal(state[name], parameter)


def test_M4_the_norm_is_in_the_checkpoint(tiny, tmp_path):
    """test_resume.py: N + N is 2N to the bit. Here: it is the norm that was logged last."""
    marwil.train(tiny)
    with open(f"{tiny.run_dir}/metrics.csv") as file:
        logged = [line.split(",")[3] for line in file if "stats/squared_norm" in line]
    saved = load(tiny.run_dir)["squared_norm"].item()
    assert saved == pytest.approx(float(logged[-1]), rel=1e-5)


def test_M5_huge_advantages_do_not_overflow_and_the_default_norm_fits_them():
    advantage = T([1000.0, -400.0, 200.0])
    loss = marwil.marwil_loss(T([-1.0, -1.0, -1.0]), advantage, T(100.0), 1.0, 20.0, T(1.0))
    assert torch.isfinite(loss)  # RLlib's exp(1000 / 10) is infinite in float32
    squared_norm = marwil.update_norm(None, advantage, 1e-3)
    weight = marwil.marwil_weight(advantage, squared_norm, 1.0, 20.0)
    assert weight.min() > 0.1 and weight.max() < 10


def test_M7_S12_actions_are_normalised_once_on_the_way_in(tiny, tmp_path):
    """Pendulum's torque of +-2 is +-1 for the policy: cloning +2 gives an action near +2."""
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(101, 3)).astype(np.float32).clip(-1, 1)
    flags = {"terminations": np.zeros(100, bool), "truncations": np.ones(100, bool)}
    arrays = {
        "observations": obs[:-1],
        "next_observations": obs[1:],
        "rewards": rng.normal(size=100),
    }
    np.savez(tmp_path / "d.npz", actions=np.full((100, 1), 2.0), **arrays, **flags)
    args = replace(tiny, env_id="Pendulum-v1", dataset=str(tmp_path / "d.npz"), beta=0.0)
    marwil.train(replace(args, total_updates=400, eval_interval=400, learning_rate=1e-2))
    policy = marwil.load_policy(f"{tiny.run_dir}/checkpoint.pt")
    assert policy(obs[:5]) == pytest.approx(np.full((5, 1), 2.0), abs=0.1)


def test_S8_no_broadcast():
    b, column = torch.randn(6), torch.randn(6, 1)
    for wrong in ((column, b), (b, column), (column, column)):
        with pytest.raises(AssertionError):
            marwil.marwil_loss(*wrong, T(1.0), 1.0, 20.0, T(1.0))


def test_S9_no_gradient_through_the_weight():
    """Without the squared error, which is V's own: the gradient by A is that of A^2 / 2 alone."""
    advantage = torch.randn(8, requires_grad=True)
    marwil.marwil_loss(10 * torch.randn(8), advantage, T(1.0), 1.0, 20.0, T(1.0)).backward()
    torch.testing.assert_close(advantage.grad, advantage.detach() / 8)


@pytest.mark.parametrize("reward_scale", [2.0**20, 2.0**-23, 2.0**-40])
def test_reward_scale_does_not_matter(tiny, tmp_path, reward_scale):
    """V's network works at scale 1, and so do the gradients of its loss; the norm takes care of the
    weights. By powers of two, about 1e6, 1e-7 and 1e-12, nearly all rounding is the same."""
    marwil.train(tiny)
    scaled = replace(tiny, reward_scale=reward_scale, run_dir=str(tmp_path / "scaled"))
    marwil.train(scaled)
    left, right = (load(args.run_dir) for args in (tiny, scaled))
    torch.testing.assert_close(flat(left, ["actor"]), flat(right, ["actor"]), rtol=1e-4, atol=1e-5)
    for name in ("net.0.weight", "net.4.weight"):
        torch.testing.assert_close(left["value"][name], right["value"][name], rtol=1e-3, atol=1e-4)


def test_norm_start_may_be_an_integer(tiny):
    marwil.train(replace(tiny, norm_start=100))


# ---- the loop against an independent implementation


@pytest.mark.parametrize("norm_start", [None, 2.0])
@pytest.mark.parametrize("env_id", ["Probe-v0", "Choice-v0"])
def test_loop_equals_an_independent_implementation(tiny, norm_start, env_id, tmp_path):
    """Eight updates, with one optimiser per network: a joint loss is no more than that."""
    args = replace(
        tiny,
        env_id=env_id,
        total_updates=8,
        learning_rate=1e-2,
        refresh_interval=3,
        td_lambda=0.8,
        beta=1.3,
        max_weight=2.0,
        norm_start=norm_start,
        norm_rate=0.3,
    )
    hand = ByHand(marwil, args, tmp_path)
    marwil.train(hand.args)
    c2 = norm_start
    for step in range(8):
        if step % 3 == 0:
            returns = hand.returns()
        index = hand.draw()
        advantage = returns[index] - hand.v(hand.obs[index])
        mean_square = advantage.detach().square().sum().item() / 32
        c2 = mean_square if c2 is None else 0.7 * c2 + 0.3 * mean_square
        weight = torch.exp(1.3 * advantage.detach() / math.sqrt(c2)).clamp(max=2.0)
        hand.step(hand.value_opt, (advantage**2).sum() / 64 / hand.scale**2)
        hand.step(hand.actor_opt, -(weight * hand.log_prob(index)).sum() / 32)

    trained = load(args.run_dir)
    hand.assert_same_networks(trained)
    assert trained["squared_norm"].item() == pytest.approx(c2, rel=1e-4)
