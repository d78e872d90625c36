"""FQF: fractions, losses, replay and loop against numbers worked out by other means."""

import io
import itertools
import math
import shlex
import signal
import struct
import sys
from collections import deque
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
import tyro
from conftest import load

import common
from algos import fqf


class FakeGameEnv(gym.Env):
    """Images of the size of a game's, and rewards of several sizes: -3, 0, 7, 0, -3, .."""

    observation_space = gym.spaces.Box(0, 255, (84, 84), np.uint8)
    action_space = gym.spaces.Discrete(4)

    def frame(self):
        return self.np_random.integers(256, size=(84, 84), dtype=np.uint8)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.frame(), {}

    def step(self, action):
        reward = (-3.0, 0.0, 7.0, 0.0)[self.time % 4]
        self.time += 1
        return self.frame(), reward, bool(self.np_random.random() < 0.1), False, {}


gym.register("FakeGame-v0", FakeGameEnv, max_episode_steps=10)


@pytest.fixture
def walk(tmp_path):
    """A run of a fraction of a second that sees everything that happens now and then."""
    return fqf.Args(
        env_id="Steps-v0",
        total_timesteps=60,
        batch_size=6,
        gamma=0.9,
        learning_rate=1e-3,
        hidden_dim=8,
        eval_interval=1000,
        eval_episodes=2,
        checkpoint_interval=1000,
        log_interval=5,
        run_dir=str(tmp_path / "run"),
        quiet=True,
        device="cpu",
        torch_threads=1,
        num_fractions=4,
        num_cosines=5,
        kappa=1.0,
        fraction_learning_rate=1e-4,
        entropy_coef=1e-3,
        weight_targets_by_fraction=False,
        double_q=False,
        n_steps=1,
        target_interval=4,
        buffer_capacity=1000,
        learning_starts=6,
        train_frequency=3,
        epsilon_final=0.2,
        epsilon_steps=30,
    )


@pytest.fixture
def spy(monkeypatch):
    """Keep the arguments and the result of every call of a function of fqf.py, or of a method."""

    def install(name, owner=fqf):
        calls, original = [], getattr(owner, name)

        def spied(*args):
            result = original(*args)
            calls.append((*args, result))
            return result

        monkeypatch.setattr(owner, name, spied)
        return calls

    return install


@pytest.fixture
def modules(monkeypatch):
    """The networks of a run, caught as they are made."""
    made = {}

    def catch(name, factory):
        original = getattr(fqf, factory)

        def make(*args):
            made[name] = original(*args)
            return made[name]

        monkeypatch.setattr(fqf, factory, make)

    catch("network", "QuantileNetwork")
    catch("target", "deepcopy")
    catch("proposal", "FractionProposal")
    return made


def metrics(args, key):
    """{step: value} of one key in metrics.csv."""
    rows = [row.split(",") for row in Path(args.run_dir, "metrics.csv").read_text().splitlines()]
    return {int(row[0]): float(row[3]) for row in rows if row[2] == key}


def random_fractions(num_rows, num_fractions, dtype=torch.float64):
    """Rows of tau_0 = 0 < .. < tau_N = 1, far from equal steps."""
    step = torch.softmax(torch.randn(num_rows, num_fractions, dtype=torch.float64), dim=1)
    tau = torch.cat([torch.zeros(num_rows, 1, dtype=torch.float64), step.cumsum(dim=1)], dim=1)
    tau[:, -1] = 1
    return tau.to(dtype)


@pytest.fixture(autouse=True)
def same_numbers_each_time():
    torch.manual_seed(0)


# ---- fractions


def test_fractions_rise_from_exactly_0_to_exactly_1():
    proposal = fqf.FractionProposal(32, 32, True)
    with torch.no_grad():
        proposal.linear.weight.copy_(torch.eye(32))
    logits = torch.randn(2000, 32)
    tau, entropy = proposal(logits)
    assert tau.shape == (2000, 33) and entropy.shape == (2000,)
    assert (tau[:, 0] == 0).all() and (tau[:, -1] == 1).all()  # a sum of 32 floats is not
    assert (tau.diff(dim=1) > 0).all()
    tau_hat = fqf.midpoints(tau)
    assert ((tau[:, :-1] < tau_hat) & (tau_hat < tau[:, 1:])).all()
    expected = torch.softmax(logits.double(), dim=1)
    torch.testing.assert_close(tau.diff(dim=1).double(), expected, rtol=0, atol=1e-6)
    # steps narrower than the rounding of a float may come out as 0, or as that much below it
    tau, _ = proposal(20 * logits)
    assert (tau.diff(dim=1) > -1e-6).all() and (tau[:, -1] == 1).all()


def test_F9_fractions_start_close_to_equal_steps():
    """Xavier with gain 0.01: for normal features logits differ by some 0.013; with gain 1, by 1."""
    proposal = fqf.FractionProposal(128, 32, True)
    bound = 0.01 * math.sqrt(6 / (128 + 32))
    assert proposal.linear.weight.abs().max().item() == pytest.approx(bound, rel=1e-2)
    assert (proposal.linear.bias == 0).all()
    tau, entropy = proposal(torch.randn(256, 128))
    relative = tau.diff(dim=1) * 32 - 1
    assert relative.abs().max() < 0.1 and 0.005 < relative.std() < 0.03
    assert (math.log(32) - entropy).abs().max() < 1e-3


def test_entropy_is_at_most_log_n_and_only_at_equal_logits():
    proposal = fqf.FractionProposal(6, 6, True)
    with torch.no_grad():
        proposal.linear.weight.copy_(torch.eye(6))
    logits = torch.randn(50, 6)
    _, entropy = proposal(logits)
    expected = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(entropy, expected)
    assert (entropy < math.log(6) - 1e-3).all()
    _, entropy = proposal(torch.full((1, 6), 3.7))
    assert entropy.item() == pytest.approx(math.log(6), abs=1e-6)


def test_qr_dqn_fractions_are_equal_steps_for_every_state():
    proposal = fqf.FractionProposal(16, 32, False)
    tau, entropy = proposal(100 * torch.randn(20, 16))
    torch.testing.assert_close(tau, torch.linspace(0, 1, 33).expand(20, -1), rtol=0, atol=3e-7)
    torch.testing.assert_close(entropy, torch.full((20,), math.log(32)))


# ---- the gradient of W1


CURVES = {  # a quantile function that rises, and its integral
    "cubic": (lambda t: t**3, lambda t: t**4 / 4),
    "exponential": (
        lambda t: -torch.log(1 - 0.999 * t),
        lambda t: (1 - 0.999 * t) * (torch.log(1 - 0.999 * t) - 1) / 0.999,
    ),
    "logit": (
        lambda t: torch.log((t + 0.01) / (1.01 - t)),
        lambda t: (t + 0.01) * (torch.log(t + 0.01) - 1) + (1.01 - t) * (torch.log(1.01 - t) - 1),
    ),
}


def wasserstein(tau, integral):
    """sum_i of the area between F and F(tau_hat_i), from tau_i to tau_{i+1}. If F rises, that is
    G(tau_{i+1}) - 2 G(tau_hat_i) + G(tau_i), G being the integral of F."""
    middle = (tau[:-1] + tau[1:]) / 2
    return (integral(tau[1:]) - 2 * integral(middle) + integral(tau[:-1])).abs().sum().item()


def wasserstein_by_quadrature(tau, curve, num_cells=20_000):
    """The same for any F, by the mid-point rule."""
    total = 0.0
    for left, right in zip(tau[:-1].tolist(), tau[1:].tolist()):
        width = (right - left) / num_cells
        at = left + width * (torch.arange(num_cells, dtype=torch.float64) + 0.5)
        middle = torch.tensor((left + right) / 2, dtype=torch.float64)
        total += width * (curve(at) - curve(middle)).abs().sum().item()
    return total


def slopes(tau, distance, h):
    """Central differences in tau_1..tau_{N-1}."""
    result = []
    for i in range(1, len(tau) - 1):
        up, down = tau.clone(), tau.clone()
        up[i] += h
        down[i] -= h
        result.append((distance(up) - distance(down)) / (2 * h))
    return torch.tensor(result, dtype=torch.float64)


def autograd_slopes(tau, curve):
    tau = tau.clone().requires_grad_()
    middle = fqf.midpoints(tau[None].detach())
    loss = fqf.fraction_loss(tau[None], curve(middle), curve(tau[None, 1:-1].detach()))
    assert loss.shape == (1,)
    loss.sum().backward()
    assert tau.grad[0] == tau.grad[-1] == 0  # the ends stay where they are
    return tau.grad[1:-1]


@pytest.mark.parametrize("name", CURVES)
def test_closed_form_of_W1_is_its_integral(name):
    """The yardstick of the next tests, measured by another one."""
    curve, integral = CURVES[name]
    for tau in random_fractions(5, 6):
        expected = wasserstein_by_quadrature(tau, curve)
        assert wasserstein(tau, integral) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("sign", [1, -1])
def test_F4_fraction_gradient_is_that_of_W1(name, sign):
    """Also for an F that falls, where Proposition 1 without absolute values has the wrong sign."""
    curve, integral = CURVES[name]
    for tau in random_fractions(5, 6):
        actual = autograd_slopes(tau, lambda t: sign * curve(t))
        expected = slopes(tau, lambda t: wasserstein(t, integral), h=1e-5)
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
        middle = (tau[:-1] + tau[1:]) / 2
        plain = sign * (2 * curve(tau[1:-1]) - curve(middle[1:]) - curve(middle[:-1]))
        torch.testing.assert_close(plain, sign * actual)
        assert actual.abs().max() > 1e-2


def test_F4_fraction_gradient_where_F_falls_and_then_rises():
    """Exact if F is monotone from each tau_i to the next; it turns at 1/2, where one of them is."""
    tau = torch.tensor([0, 0.12, 0.3, 0.5, 0.66, 0.85, 1], dtype=torch.float64)
    actual = autograd_slopes(tau, lambda t: torch.cos(2 * math.pi * t))
    expected = slopes(
        tau,
        lambda t: wasserstein_by_quadrature(t, lambda x: torch.cos(2 * math.pi * x)),
        h=1e-4,
    )
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def test_F4_fraction_loss_of_a_random_network_by_brute_force():
    """A network's quantiles rise and fall as they like."""
    network = randomised_network()
    features, action = network.features(torch.randn(5, 2)), torch.tensor([0, 2, 1, 1, 0])
    tau = random_fractions(5, 7, torch.float32).requires_grad_()
    quantiles = network(features, fqf.midpoints(tau.detach()), action).detach()
    edges = network(features, tau[:, 1:-1].detach(), action).detach()
    rises = quantiles.diff(dim=1) > 0
    assert rises.any() and not rises.all()
    loss = fqf.fraction_loss(tau, quantiles, edges)
    loss.sum().backward()
    for b in range(5):
        expected = 0.0
        for i in range(1, 7):
            error_below = abs(edges[b, i - 1].item() - quantiles[b, i - 1].item())
            error_above = abs(edges[b, i - 1].item() - quantiles[b, i].item())
            assert tau.grad[b, i].item() == pytest.approx(error_below - error_above, abs=1e-6)
            expected += (error_below - error_above) * tau[b, i].item()
        assert loss[b].item() == pytest.approx(expected, abs=1e-5)


def test_equal_steps_are_best_for_a_straight_line():
    tau = torch.linspace(0, 1, 9, dtype=torch.float64)
    gradient = autograd_slopes(tau, lambda t: 3 * t - 2)
    torch.testing.assert_close(gradient, torch.zeros(7, dtype=torch.float64))
    uneven = torch.tensor([0, 0.1, 1], dtype=torch.float64)
    assert autograd_slopes(uneven, lambda t: 3 * t - 2).item() == pytest.approx(3 * (0.05 - 0.45))


def test_descent_on_the_fraction_loss_lowers_W1():
    """F = t^3: equal steps have 0.03119; through the proposal's bias, 250 steps come to 0.0260."""
    curve, integral = CURVES["cubic"]
    proposal = fqf.FractionProposal(3, 8, True)
    opt = torch.optim.SGD([proposal.linear.bias], lr=0.5)
    distances = []
    for step in range(251):
        tau, _ = proposal(torch.zeros(2, 3))
        if step % 50 == 0:
            distances.append(wasserstein(tau[0].detach().double(), integral))
        middle, edges = fqf.midpoints(tau.detach()), tau[:, 1:-1].detach()
        opt.zero_grad()
        fqf.fraction_loss(tau, curve(middle), curve(edges)).mean().backward()
        opt.step()
    assert distances[0] == pytest.approx(0.03119, abs=1e-5)
    assert distances[-1] == pytest.approx(0.0260, abs=1e-4)
    assert (np.diff(distances) < 0).all()


# ---- the quantile loss


def huber(delta, kappa):
    return 0.5 * delta**2 if abs(delta) <= kappa else kappa * (abs(delta) - 0.5 * kappa)


def tilted(delta, tau_hat, kappa):
    return abs(tau_hat - (1 if delta < 0 else 0)) * huber(delta, kappa) / kappa


@pytest.mark.parametrize("kappa", [0.3, 1.0, 2.5])
def test_F6_quantile_huber_loss_by_brute_force(kappa):
    """Three different sizes: i are the predictions, summed; j the targets, averaged."""
    quantiles, target = 2 * torch.randn(3, 4), 2 * torch.randn(3, 5)
    tau_hat = fqf.midpoints(random_fractions(3, 4, torch.float32))
    weight = random_fractions(3, 5, torch.float32).diff(dim=1)
    actual = fqf.quantile_huber_loss(quantiles, tau_hat, target, weight, kappa)
    for b in range(3):
        expected = 0.0
        for i in range(4):
            for j in range(5):
                delta = target[b, j].item() - quantiles[b, i].item()
                expected += weight[b, j].item() * tilted(delta, tau_hat[b, i].item(), kappa)
        assert actual[b].item() == pytest.approx(expected, rel=1e-5)


def test_F6_gradient_is_that_of_finite_differences():
    """The indicator is a constant, and the target is not moved towards the prediction."""
    quantiles = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    target = 2 * torch.randn(2, 4, dtype=torch.float64)
    tau_hat = fqf.midpoints(random_fractions(2, 3))
    rest = (tau_hat, target, torch.full_like(target, 0.25), 0.7)
    fqf.quantile_huber_loss(quantiles, *rest).sum().backward()
    for b in range(2):
        for i in range(3):
            nudge = torch.zeros(2, 3, dtype=torch.float64)
            nudge[b, i] = 1e-6
            losses = [fqf.quantile_huber_loss(quantiles + x, *rest) for x in (nudge, -nudge)]
            slope = (losses[0] - losses[1]).sum().item() / 2e-6
            assert quantiles.grad[b, i].item() == pytest.approx(slope, abs=1e-6)


def test_equal_steps_make_it_the_loss_of_qr_dqn():
    """Dabney et al. 2018, algorithm 1: sum_i E_j rho_{tau_hat_i}(y_j - theta_i)."""
    num = 8
    tau, _ = fqf.FractionProposal(5, num, False)(torch.randn(3, 5))
    theta, target = torch.randn(3, num), 2 * torch.randn(3, num)
    weight = torch.full_like(target, 1 / num)
    actual = fqf.quantile_huber_loss(theta, fqf.midpoints(tau), target, weight, 1.0)
    for b in range(3):
        total = 0.0
        for i in range(num):
            errors = [target[b, j].item() - theta[b, i].item() for j in range(num)]
            total += sum(tilted(error, (2 * i + 1) / (2 * num), 1.0) for error in errors) / num
        assert actual[b].item() == pytest.approx(total, rel=1e-5)
    quantiles = torch.randn(3, num, 4)
    torch.testing.assert_close(fqf.action_values(tau, quantiles), quantiles.mean(dim=1))


def test_one_fraction_is_half_the_huber_loss_of_dqn():
    delta = torch.linspace(-3, 3, 13)[:, None]
    half, one = torch.full((13, 1), 0.5), torch.ones(13, 1)
    actual = fqf.quantile_huber_loss(torch.zeros(13, 1), half, delta, one, 1.0)
    inside = delta[:, 0].abs() <= 1
    torch.testing.assert_close(actual[inside], 0.25 * delta[inside, 0] ** 2)
    torch.testing.assert_close(actual[~inside], 0.5 * (delta[~inside, 0].abs() - 0.5))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_F6_the_loss_is_least_at_the_quantile(share):
    """A share tau_hat of the targets lies below it, not above it."""
    grid = torch.linspace(-3, 3, 1201)[:, None]
    target = torch.distributions.Normal(0, 1).icdf((torch.arange(400) + 0.5) / 400)
    args = target.expand(1201, 400), torch.full((1201, 400), 1 / 400), 0.01
    loss = fqf.quantile_huber_loss(grid, torch.full((1201, 1), share), *args)
    expected = torch.distributions.Normal(0, 1).icdf(torch.tensor(share)).item()
    assert grid[loss.argmin()].item() == pytest.approx(expected, abs=0.02)


def test_weights_of_targets_are_like_repeating_them():
    quantiles, tau_hat = torch.randn(2, 3), fqf.midpoints(random_fractions(2, 3, torch.float32))
    target = torch.randn(2, 3)
    gaps = torch.tensor([[0.25, 0.5, 0.25], [0.125, 0.125, 0.75]])
    actual = fqf.quantile_huber_loss(quantiles, tau_hat, target, gaps, 1.0)
    for b, counts in enumerate(([2, 4, 2], [1, 1, 6])):
        repeated = target[b].repeat_interleave(torch.tensor(counts))[None]
        equal = torch.full_like(repeated, 1 / 8)
        rows = quantiles[[b]], tau_hat[[b]], repeated, equal
        torch.testing.assert_close(actual[[b]], fqf.quantile_huber_loss(*rows, 1.0))


def test_F5_value_weighs_quantiles_by_their_steps():
    tau = torch.tensor([[0, 0.5, 0.6, 1.0], [0, 0.2, 0.9, 1.0]])
    quantiles = torch.tensor([[[1.0, 10], [2, 20], [3, 30]], [[1, -1], [0, 4], [5, 5]]])
    expected = torch.tensor([[0.5 + 0.2 + 1.2, 5 + 2 + 12], [0.2 + 0.5, -0.2 + 2.8 + 0.5]])
    torch.testing.assert_close(fqf.action_values(tau, quantiles), expected)


def test_F5_the_weights_sum_to_one():
    tau, quantiles = random_fractions(5, 7), torch.randn(5, 7, 3, dtype=torch.float64)
    ones = torch.ones_like(quantiles)
    constant = fqf.action_values(tau, ones)
    torch.testing.assert_close(constant, torch.ones_like(constant))
    torch.testing.assert_close(
        fqf.action_values(tau, quantiles + 4.5), fqf.action_values(tau, quantiles) + 4.5
    )


def test_S1_target_by_hand():
    """Terminated: the reward alone. Truncated, or cut after m steps: gamma^m of what comes then."""
    reward = torch.tensor([1.0, 2.0, -3.0])
    discount, terminated = torch.tensor([0.9, 0.9, 0.729]), torch.tensor([0.0, 1.0, 0.0])
    next_quantiles = torch.tensor([[1.0, 2.0], [100.0, -100.0], [10.0, 0.0]])
    target = fqf.quantile_target(reward, discount, terminated, next_quantiles)
    torch.testing.assert_close(target, torch.tensor([[1.9, 2.8], [2.0, 2.0], [4.29, -3.0]]))
    assert (target[1] == 2).all()


# ---- both losses


def loss_inputs(num_rows=4, num_fractions=3, num_targets=5):
    tau = random_fractions(num_rows, num_fractions, torch.float32)
    return {
        "tau": tau,
        "entropy": torch.rand(num_rows),
        "quantiles": torch.randn(num_rows, num_fractions),
        "edge_quantiles": torch.randn(num_rows, num_fractions - 1),
        "target": torch.randn(num_rows, num_targets),
        "target_weight": torch.full((num_rows, num_targets), 1 / num_targets),
        "weight": torch.rand(num_rows) + 0.1,
        "kappa": 0.8,
        "entropy_coef": 0.3,
    }


def test_both_losses_by_hand():
    x = loss_inputs()
    quantile_loss, proposal_loss = fqf.fqf_loss(*x.values())
    expected_quantile = expected_fraction = 0.0
    for b in range(4):
        weight, tau = x["weight"][b].item(), x["tau"][b].tolist()
        quantiles, edges = x["quantiles"][b].tolist(), x["edge_quantiles"][b].tolist()
        for i in range(3):
            for y in x["target"][b].tolist():
                loss = tilted(y - quantiles[i], (tau[i] + tau[i + 1]) / 2, 0.8)
                expected_quantile += weight * loss / 5 / 4
        for i in (1, 2):
            gradient = abs(edges[i - 1] - quantiles[i - 1]) - abs(edges[i - 1] - quantiles[i])
            expected_fraction += weight * gradient * tau[i] / 4
        expected_fraction -= 0.3 * x["entropy"][b].item() / 4
    assert quantile_loss.item() == pytest.approx(expected_quantile, rel=1e-5)
    assert proposal_loss.item() == pytest.approx(expected_fraction, rel=1e-5)


def test_F10_importance_weights_are_on_both_losses_but_not_on_the_entropy():
    x = loss_inputs()
    losses = fqf.fqf_loss(*x.values())
    permuted = fqf.fqf_loss(*(x | {"weight": x["weight"].flip(0)}).values())
    assert losses[0] != permuted[0] and losses[1] != permuted[1]
    nothing = fqf.fqf_loss(*(x | {"weight": torch.zeros(4)}).values())
    assert nothing[0] == 0
    torch.testing.assert_close(nothing[1], -0.3 * x["entropy"].mean())
    twice = fqf.fqf_loss(*(x | {"weight": 2 * x["weight"], "entropy_coef": 0.0}).values())
    once = fqf.fqf_loss(*(x | {"entropy_coef": 0.0}).values())
    torch.testing.assert_close(torch.stack(twice), 2 * torch.stack(once))


@pytest.mark.parametrize("name", [name for name, x in loss_inputs().items() if np.ndim(x)])
def test_S8_no_broadcast(name):
    """Neither one row for all, nor a column, nor one dimension too many. With as many rows as edges
    all of them would fit each other."""
    x = loss_inputs(num_rows=2, num_fractions=3)
    for wrong in (x[name][:1], x[name][..., None]):
        with pytest.raises(AssertionError):
            fqf.fqf_loss(*(x | {name: wrong}).values())


def test_S8_no_broadcast_in_the_target():
    flat, column, quantiles = torch.zeros(4), torch.zeros(4, 1), torch.zeros(4, 3)
    for scalars in ((column, flat, flat), (flat, column, flat), (flat, flat, column)):
        with pytest.raises(AssertionError):
            fqf.quantile_target(*scalars, quantiles)


def test_S8_losses_are_means_of_rows():
    """A batch of N is the mean of N batches of one; permuting the targets alone changes it."""
    x = loss_inputs(num_rows=6)
    tensors = {name for name, value in x.items() if isinstance(value, torch.Tensor)}
    rows = []
    for b in range(6):
        row = {name: x[name][[b]] if name in tensors else x[name] for name in x}
        rows.append(torch.stack(fqf.fqf_loss(*row.values())))
    whole = torch.stack(fqf.fqf_loss(*x.values()))
    torch.testing.assert_close(whole, torch.stack(rows).mean(dim=0))
    permuted = fqf.fqf_loss(*(x | {"target": x["target"].flip(0)}).values())
    assert permuted[0] != whole[0]


def test_F2_a_larger_entropy_coefficient_keeps_more_entropy():
    """Quantiles that only a step at the very end gets right pull the fractions there."""
    entropies = []
    for coef in (0.0, 0.1, 1.0, 10.0):
        proposal = fqf.FractionProposal(3, 6, True)
        opt = torch.optim.SGD(proposal.parameters(), lr=0.1)
        for _ in range(60):
            tau, entropy = proposal(torch.ones(2, 3))
            middle, edges = fqf.midpoints(tau.detach()), tau[:, 1:-1].detach()
            target, ones = torch.zeros(2, 1), torch.ones(2)
            _, loss = fqf.fqf_loss(
                *(tau, entropy, 30 * middle**9, 30 * edges**9, target, target, ones, 1.0, coef)
            )
            opt.zero_grad()
            loss.backward()
            opt.step()
        entropies.append(entropy[0].item())
    assert (np.diff(entropies) > 0.01).all() and entropies[-1] > 0.98 * math.log(6)


def test_F2_without_errors_the_entropy_rises():
    """Quantiles that are all the same leave the entropy alone in the loss."""
    proposal = fqf.FractionProposal(3, 6, True)
    with torch.no_grad():
        proposal.linear.bias.copy_(torch.randn(6))
    tau, before = proposal(torch.ones(1, 3))
    flat, ones = torch.ones(1, 6), torch.ones(1)
    _, loss = fqf.fqf_loss(tau, before, flat, flat[:, 1:], flat, flat / 6, ones, 1.0, 0.1)
    loss.backward()
    with torch.no_grad():
        proposal.linear.bias.sub_(proposal.linear.bias.grad)
    assert proposal(torch.ones(1, 3))[1].item() > before.item() + 1e-3


# ---- networks


def randomised_network(num_cosines=5):
    network = fqf.QuantileNetwork((2,), 3, 8, num_cosines)
    with torch.no_grad():  # so that no two of its outputs are alike
        for parameter in network.parameters():
            parameter.add_(0.5 * torch.randn(parameter.shape))
    return network


def doubles(module):
    return {name: x.detach().double().clone() for name, x in module.named_parameters()}


def features_by_hand(p, obs):
    """psi(s) of one state, plain matrix algebra. [O] -> [D]"""
    hidden = torch.relu(p["torso.0.weight"] @ obs + p["torso.0.bias"])
    return torch.relu(p["torso.2.weight"] @ hidden + p["torso.2.bias"])


def quantiles_by_hand(p, psi, tau):
    """F(tau) of every action, at one fraction of one state. [D], float -> [A]"""
    num_cosines = p["embedding.weight"].shape[1]
    cosines = [math.cos(math.pi * k * tau) for k in range(1, num_cosines + 1)]
    cosines = torch.tensor(cosines, dtype=torch.float64)
    phi = torch.relu(p["embedding.weight"] @ cosines + p["embedding.bias"])
    hidden = torch.relu(p["hidden.weight"] @ (psi * phi) + p["hidden.bias"])
    return p["output.weight"] @ hidden + p["output.bias"]


def test_F7_quantile_network_by_hand_with_cosines_from_1():
    network = randomised_network()
    obs, tau = torch.randn(4, 2), torch.rand(4, 6)
    actual = network(network.features(obs), tau)
    assert actual.shape == (4, 6, 3)
    p = doubles(network)
    for b in range(4):
        psi = features_by_hand(p, obs[b].double())
        for i in range(6):
            expected = quantiles_by_hand(p, psi, tau[b, i].item()).float()
            torch.testing.assert_close(actual[b, i].detach(), expected, rtol=1e-4, atol=1e-4)


def test_quantiles_of_one_action_are_a_column_of_all():
    """Values and gradients, with a gather in between or without."""
    network = randomised_network()
    obs, tau, action = torch.randn(4, 2), torch.rand(4, 6), torch.tensor([2, 0, 0, 1])
    cotangent = torch.randn(4, 6)
    column = network(network.features(obs), tau)[torch.arange(4), :, action]
    expected = torch.autograd.grad((column * cotangent).sum(), list(network.parameters()))
    alone = network(network.features(obs), tau, action)
    actual = torch.autograd.grad((alone * cotangent).sum(), list(network.parameters()))
    torch.testing.assert_close(alone, column, rtol=1e-5, atol=1e-5)
    for left, right in zip(actual, expected):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)


def test_staircase_is_of_the_proposed_mid_points():
    network, proposal = randomised_network(), fqf.FractionProposal(8, 4, True)
    with torch.no_grad():
        proposal.linear.weight.normal_()
    obs = torch.randn(3, 2)
    tau, quantiles = fqf.staircase(network, proposal, obs)
    p = doubles(network)
    for b in range(3):
        psi = features_by_hand(p, obs[b].double())
        step = torch.softmax(proposal.linear.weight.double() @ psi, dim=0).tolist()
        edges = [sum(step[:i]) for i in range(5)]
        assert tau[b].tolist() == pytest.approx(edges, abs=1e-5)
        for i in range(4):
            expected = quantiles_by_hand(p, psi, (edges[i] + edges[i + 1]) / 2).float()
            torch.testing.assert_close(quantiles[b, i], expected, rtol=1e-3, atol=1e-3)


def test_S9_nothing_flows_from_the_fractions_into_the_features():
    proposal = fqf.FractionProposal(8, 4, True)
    features = torch.randn(3, 8, requires_grad=True)
    tau, entropy = proposal(features)
    (tau.square().sum() + entropy.sum()).backward()
    assert features.grad is None and proposal.linear.weight.grad.abs().sum() > 0


def test_S15_bytes_are_scaled_once_for_acting_and_for_learning():
    """The policy's actions are those of images in [0, 1]; unscaled ones would give others."""
    network = fqf.QuantileNetwork((4, 84, 84), 4, 16, 8)
    proposal = fqf.FractionProposal(network.feature_dim, 5, True)
    brightness = torch.linspace(10, 255, 24)[:, None, None, None]
    images = (torch.rand(24, 4, 84, 84) * brightness).to(torch.uint8)
    shapes = [tuple(x.shape) for x in network.torso.parameters()]
    assert shapes == [(32, 4, 8, 8), (32,), (64, 32, 4, 4), (64,), (64, 64, 3, 3), (64,)]
    with torch.no_grad():
        hidden = images.float() / 255
        for layer, stride in ((0, 4), (2, 2), (4, 1)):  # the convolutions of DQN
            weight, bias = network.torso[layer].weight, network.torso[layer].bias
            hidden = torch.relu(torch.nn.functional.conv2d(hidden, weight, bias, stride))
        scaled = hidden.flatten(1)
        assert scaled.shape == (24, 64 * 7 * 7)
        torch.testing.assert_close(network.features(images), scaled)
        torch.testing.assert_close(network.features(images.float() / 255), scaled)
        tau, _ = proposal(scaled)
        q = fqf.action_values(tau, network(scaled, fqf.midpoints(tau)))
        network.output.bias -= q.mean(dim=0)  # else one action is the best of all images
        expected = (q - q.mean(dim=0)).argmax(dim=1)
        unscaled = fqf.action_values(*fqf.staircase(network, proposal, images.float()))
    assert len(expected.unique()) > 1 and (unscaled.argmax(dim=1) != expected).any()
    policy = fqf.make_policy(network, proposal, gym.spaces.Discrete(4), torch.device("cpu"))
    assert policy(images.numpy()).tolist() == expected.tolist()


def test_S15_vectors_are_the_same_numbers_for_acting_and_for_learning():
    """A vector of bytes, or of doubles, is not an image: it becomes floats, and stays as it is."""
    for obs in (np.array([3, 250], np.uint8), np.array([0.25, -7.0])):
        buffer = fqf.Buffer(8, (2,))
        buffer.add_frame(obs, age=0)
        stored = buffer.stack(np.array([0]))
        acting = fqf.as_tensor(obs[None], torch.device("cpu"))
        assert stored.dtype == acting.dtype == torch.float32
        assert stored.tolist() == acting.tolist() == [obs.tolist()]


def test_policy_takes_the_largest_mean_in_the_units_of_the_environment():
    network, proposal = randomised_network(), fqf.FractionProposal(8, 4, True)
    with torch.no_grad():
        proposal.linear.weight.normal_()
    obs = 3 * np.random.default_rng(0).normal(size=(40, 2))
    with torch.no_grad():  # else one action may be the best of all states
        q = fqf.action_values(*fqf.staircase(network, proposal, torch.tensor(obs).float()))
        network.output.bias -= q.mean(dim=0)
    space = gym.spaces.Discrete(3, start=5)
    action = fqf.make_policy(network, proposal, space, torch.device("cpu"))(obs)
    tau, quantiles = fqf.staircase(network, proposal, torch.tensor(obs).float())
    q = [[(tau[b].diff() * quantiles[b, :, a]).sum().item() for a in range(3)] for b in range(40)]
    assert action.tolist() == [5 + int(np.argmax(row)) for row in q]
    assert len(set(action.tolist())) > 1


# ---- tree


@pytest.mark.parametrize("capacity", [1, 2, 5, 8, 13, 100])
def test_F10_every_node_is_the_sum_of_its_leaves(capacity):
    rng = np.random.default_rng(0)
    tree, leaves = fqf.SumTree(capacity), np.zeros(capacity)
    for _ in range(50):
        index = rng.integers(capacity, size=rng.integers(1, 8))
        index = np.unique(index)
        priority = 10.0 ** rng.uniform(-3, 3, len(index)) * (rng.random(len(index)) < 0.8)
        tree[index] = priority
        leaves[index] = priority
        np.testing.assert_array_equal(tree[np.arange(capacity)], leaves)
        width = len(tree.nodes) // 2
        padded = np.append(leaves, np.zeros(width - capacity))
        for node in range(1, 2 * width):  # a node of depth d covers width / 2^d leaves
            span = width >> (node.bit_length() - 1)
            first = (node << (width.bit_length() - node.bit_length())) - width
            expected = padded[first : first + span].sum()
            assert tree.nodes[node] == pytest.approx(expected, rel=1e-12)


def test_F10_leaves_are_drawn_in_proportion_to_their_priority():
    """An even grid of numbers in [0, 1) meets each leaf as often as its share says, to within 1."""
    rng = np.random.default_rng(0)
    for capacity in (3, 10, 37):
        tree, priority = fqf.SumTree(capacity), rng.exponential(size=capacity)
        priority[rng.integers(capacity)] = 0
        tree[np.arange(capacity)] = priority
        leaf = tree.sample((np.arange(100_000) + 0.5) / 100_000)
        counts = np.bincount(leaf, minlength=capacity)
        np.testing.assert_allclose(counts, 100_000 * priority / priority.sum(), atol=1.01)


def test_F10_a_leaf_of_zero_is_never_drawn():
    """Not by rounding either: at both ends of [0, 1), and at 1, with priorities of any size."""
    rng = np.random.default_rng(0)
    edge = np.array([0.0, np.nextafter(0, 1), np.nextafter(1, 0), 1.0])
    for _ in range(200):
        capacity = int(rng.integers(2, 70))
        tree = fqf.SumTree(capacity)
        priority = 10.0 ** rng.uniform(-6, 6, capacity) * (rng.random(capacity) < 0.4)
        priority[rng.integers(capacity)] = 1.0
        tree[np.arange(capacity)] = priority
        borders = np.cumsum(priority) / priority.sum()  # where rounding decides
        leaf = tree.sample(np.concatenate([edge, borders, rng.random(50)]))
        assert leaf.max() < capacity and (priority[leaf] > 0).all()


def test_F10_a_slot_that_is_set_twice_keeps_the_sums_right():
    tree = fqf.SumTree(6)
    tree[np.arange(6)] = 1.0
    tree[np.array([4, 1, 4, 4])] = np.array([7.0, 2.0, 7.0, 7.0])
    assert tree[np.arange(6)].tolist() == [1, 2, 1, 1, 7, 1] and tree.nodes[1] == 13


# ---- buffer


class History:
    """Episodes of random lengths, remembered as the environment shows them: whole stacks, padded
    with the first frame. One entry per observation; the last of an episode has no action."""

    def __init__(self, obs_shape, *buffers, seed=0):
        self.rng, self.obs_shape, self.buffers = np.random.default_rng(seed), obs_shape, buffers
        self.shown = []
        self.reset()

    def show(self, age):
        if len(self.obs_shape) == 1:
            obs = self.rng.normal(size=self.obs_shape)
        else:
            frame = self.rng.integers(256, size=self.obs_shape[1:], dtype=np.uint8)
            if age == 0:
                self.stack = deque([frame] * self.obs_shape[0], maxlen=self.obs_shape[0])
            else:
                self.stack.append(frame)
            obs = np.stack(self.stack)
        self.shown.append({"obs": obs.copy(), "age": age})
        return obs

    def reset(self):
        self.steps_left, obs = self.rng.integers(1, 13), self.show(0)
        for buffer in self.buffers:
            buffer.add_frame(obs, age=0)

    def step(self):
        self.steps_left -= 1
        over = self.steps_left == 0
        terminated = bool(over and self.rng.random() < 0.5)
        truncated = bool(over and (not terminated or self.rng.random() < 0.3))  # or both
        action, reward = int(self.rng.integers(5)), float(self.rng.normal())
        last = self.shown[-1]
        last |= {"action": action, "reward": reward, "terminated": terminated, "done": over}
        obs = self.show(last["age"] + 1)
        for buffer in self.buffers:
            buffer.add_step(action, reward, terminated, truncated, obs)
        if over:
            self.reset()

    def number(self, slot, capacity):
        """Which observation a slot of the ring holds: the last one that was written to it."""
        newest = len(self.shown) - 1
        return newest - (newest - slot) % capacity

    def transition(self, k, n_steps, gamma):
        """obs, action, sum of rewards, gamma^m, next_obs, terminated: m steps, one by one."""
        total, m = 0.0, 0
        for m in range(1, n_steps + 1):
            row = self.shown[k + m - 1]
            total += gamma ** (m - 1) * row["reward"]
            if row["done"] or k + m == len(self.shown) - 1:
                break
        after = self.shown[k + m]
        assert after["age"] == self.shown[k]["age"] + m  # of the same episode
        first = self.shown[k]
        return first["obs"], first["action"], total, gamma**m, after["obs"], row["terminated"]


@pytest.mark.parametrize("obs_shape", [(3,), (4, 5, 5)], ids=["vector", "stack"])
@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.parametrize("capacity", [8, 13, 40, 1000])
def test_S2_S5_S7_ring_by_brute_force(obs_shape, n_steps, capacity):
    """Every draw is what the environment showed, and everything that is whole is drawn."""
    buffer, generator = fqf.Buffer(capacity, obs_shape), torch.Generator().manual_seed(0)
    history, stack_size = History(obs_shape, buffer), obs_shape[0] if len(obs_shape) > 1 else 1
    ends = set()
    for step in range(1, 161):
        history.step()
        # with three draws per slot, and equal priorities, each slot has a stratum to itself
        batch_size = 3 * min(capacity, 200) if step % 10 == 0 else 4
        slots, weight, *batch = buffer.sample(batch_size, n_steps, 0.9, 0.5, generator)
        assert (weight == 1).all()
        numbers = [history.number(slot, capacity) for slot in slots]
        expected = zip(*[history.transition(k, n_steps, 0.9) for k in numbers])
        for actual, wanted in zip(batch, expected, strict=True):
            np.testing.assert_allclose(actual.numpy(), np.stack(wanted), rtol=1e-6, atol=1e-6)
        for k in numbers:
            if history.shown[k]["done"]:
                ends.add(history.shown[k]["terminated"])
        if step % 10 == 0:
            newest, acted = len(history.shown) - 1, []
            for k in range(max(0, newest - capacity + 1), newest):
                if "action" in history.shown[k]:
                    acted.append(k)
            whole = {
                k
                for k in acted
                if k - min(stack_size - 1, history.shown[k]["age"]) > newest - capacity
            }
            assert set(numbers) <= whole
            assert set(numbers) >= {k for k in acted if k - stack_size + 1 > newest - capacity}
    assert ends == {True, False}  # both kinds were drawn
    assert len(history.shown) > 160 and buffer.size == min(capacity, len(history.shown))


def test_S2_the_last_step_of_an_episode_leads_to_its_last_observation():
    """Not to the first one of the next episode, which lies behind it."""
    buffer = fqf.Buffer(20, (1,))
    for start, terminated in ((0, False), (10, True)):
        buffer.add_frame(np.array([start]), age=0)
        for t in range(1, 4):
            over = t == 3
            buffer.add_step(t, 1.0, terminated and over, over and not terminated, [start + t])
    buffer.add_frame(np.array([20]), age=0)
    seen = set()
    for n_steps in (1, 2, 5):
        rows = buffer.sample(60, n_steps, 0.5, 0.0, torch.Generator().manual_seed(0))[2:]
        for obs, _, reward, discount, next_obs, terminated in zip(*rows):
            start = 10 * (obs.item() // 10)
            m = min(n_steps, start + 3 - obs.item())
            assert next_obs.item() == obs.item() + m and discount.item() == 0.5**m
            assert reward.item() == sum(0.5**k for k in range(int(m)))
            assert terminated.item() == (next_obs.item() == 13)
            seen.add((n_steps, obs.item()))
    assert seen == {(n, float(s)) for n in (1, 2, 5) for s in (0, 1, 2, 10, 11, 12)}


@pytest.mark.parametrize("obs_shape", [(3,), (4, 5, 5)], ids=["vector", "stack"])
@pytest.mark.parametrize("num_steps", [5, 60])
def test_S17_a_restored_ring_goes_on_as_if_nothing_had_happened(obs_shape, num_steps):
    buffer, again = fqf.Buffer(13, obs_shape), fqf.Buffer(13, obs_shape)
    history = History(obs_shape, buffer)
    rng, generator = np.random.default_rng(1), torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        history.step()
        slots = buffer.sample(3, 2, 0.9, 0.5, generator)[0]
        buffer.set_priority(slots, rng.exponential(size=3) * 4)
    file = io.BytesIO()
    torch.save(buffer.state(), file)
    file.seek(0)
    again.load_state(torch.load(file, weights_only=True))
    history.buffers = (buffer, again)
    for seed in range(30):
        draws = [
            each.sample(5, 2, 0.9, 0.5, torch.Generator().manual_seed(seed))
            for each in (buffer, again)
        ]
        for left, right in zip(*draws, strict=True):
            np.testing.assert_array_equal(left, right)
        priority = rng.exponential(size=5) * 4
        for each, draw in zip((buffer, again), draws):
            each.set_priority(draw[0], priority)
        history.step()
    np.testing.assert_array_equal(buffer.tree.nodes, again.tree.nodes)
    for name, column in buffer.columns.items():  # before they are first written, frames are noise
        np.testing.assert_array_equal(column[: buffer.size], again.columns[name][: again.size])
    assert (buffer.position, buffer.size) == (again.position, again.size)
    assert buffer.max_priority == again.max_priority


def test_state_of_a_ring_is_no_larger_than_what_it_holds():
    """A view of a large array would take all of it into the file."""
    buffer = fqf.Buffer(1_000_000, (3,))
    history = History((3,), buffer)
    for _ in range(20):
        history.step()
    state, num_frames = buffer.state(), len(history.shown)
    tensors = {name: x for name, x in state.items() if isinstance(x, torch.Tensor)}
    assert {"frame", "age", "action", "reward", "terminated", "done", "priority"} == set(tensors)
    for x in tensors.values():
        assert len(x) == num_frames
        assert x.untyped_storage().nbytes() == x.numel() * x.element_size()
    file = io.BytesIO()
    torch.save(state, file)
    assert len(file.getvalue()) < 10_000
    # what the docstring says of a step of CartPole, which has four numbers, not three
    per_step = sum(x.nbytes for x in tensors.values()) // num_frames + 4
    assert f"{per_step} bytes per step" in fqf.__doc__


def filled_buffer(num_steps=80, obs_shape=(3,)):
    """A ring that has wrapped, with priorities of many sizes."""
    buffer, rng = fqf.Buffer(50, obs_shape), np.random.default_rng(2)
    history = History(obs_shape, buffer)
    for _ in range(num_steps):
        history.step()
    drawable = np.flatnonzero(buffer.tree[np.arange(50)])
    buffer.set_priority(drawable, 10.0 ** rng.uniform(-2, 1, len(drawable)))
    return buffer, drawable, history


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_F10_weights_make_up_for_the_priorities(beta):
    """(N P_i)^-beta over the largest in the batch, P being the share of all that can be drawn."""
    buffer, drawable, _ = filled_buffer()
    share = buffer.tree[drawable] / buffer.tree[drawable].sum()
    slots, weight = buffer.sample(32, 1, 0.9, beta, torch.Generator().manual_seed(0))[:2]
    raw = [(len(drawable) * share[list(drawable).index(slot)]) ** -beta for slot in slots]
    torch.testing.assert_close(weight.double(), torch.tensor(raw) / max(raw), rtol=1e-5, atol=0)
    assert weight.max() == 1 and weight.dtype == torch.float32
    assert beta == 0 or weight.min() < 0.7


def test_F10_with_beta_1_weighted_means_are_those_of_the_buffer():
    """Without weights, what is drawn often counts too much: f is large there."""
    buffer, drawable, history = filled_buffer()
    values = {slot: history.shown[history.number(slot, 50)]["reward"] for slot in drawable}
    f = {slot: value + buffer.tree[np.array([slot])][0] for slot, value in values.items()}
    slots, weight = buffer.sample(50_000, 1, 0.9, 1.0, torch.Generator().manual_seed(0))[:2]
    drawn = np.array([f[slot] for slot in slots])
    expected = np.mean(list(f.values()))
    weighted = (weight.numpy() * drawn).sum() / weight.numpy().sum()
    assert weighted == pytest.approx(expected, abs=0.02)
    assert abs(drawn.mean() - expected) > 0.5


def test_F10_new_steps_have_the_largest_priority_so_far():
    buffer = fqf.Buffer(50, (3,))
    history = History((3,), buffer)
    history.steps_left = 20
    history.step()
    assert buffer.tree[np.array([0, 1])].tolist() == [1, 0]  # the newest has no action yet
    history.step()
    buffer.set_priority(np.array([0, 1]), np.array([7.5, 0.2]))
    history.step()
    assert buffer.tree[np.arange(4)].tolist() == [7.5, 0.2, 7.5, 0]
    buffer.set_priority(np.arange(3), np.full(3, 0.1))
    history.step()
    np.testing.assert_allclose(buffer.tree[np.arange(5)], [0.1, 0.1, 0.1, 7.5, 0])


def test_frames_of_a_game_are_stored_once():
    """84 x 84 bytes a step and some for the rest; stacks as obs and next_obs would take 8 times."""
    buffer = fqf.Buffer(4096, (4, 84, 84))
    assert buffer.columns["frame"].dtype == np.uint8
    assert 84 * 84 < buffer.num_bytes() / 4096 < 84 * 84 + 60
    # what the docstring says of a million, whose tree has 2^21 nodes
    per_step = sum(column.nbytes for column in buffer.columns.values()) / 4096
    assert f"{(1e6 * per_step + 8 * 2**21) / 1e9:.1f} GB" in fqf.__doc__


# ---- the loop


class ByHand:
    """FQF once more, in double precision: one row, one fraction and one error at a time, a list of
    all that was seen instead of a ring and a tree; draws in the same order."""

    def __init__(self, args):
        self.args, self.env = args, fqf.make_env(args.env_id)
        torch.manual_seed(args.seed)
        network = fqf.QuantileNetwork((2,), 3, args.hidden_dim, args.num_cosines)
        proposal = fqf.FractionProposal(args.hidden_dim, args.num_fractions, args.learn_fractions)
        self.online, self.target = doubles(network), doubles(network)
        self.proposal = doubles(proposal)
        for parameter in (*self.online.values(), *self.proposal.values()):
            parameter.requires_grad_()
        self.quantile_opt = torch.optim.Adam(self.online.values(), eps=0.01 / args.batch_size)
        self.fraction_opt = torch.optim.RMSprop(self.proposal.values(), alpha=0.95, eps=1e-5)
        self.generator = torch.Generator().manual_seed(args.seed)
        self.shown, self.episode, self.num_updates, self.max_priority = [], 0, 0, 1.0

    def fractions(self, psi):
        logits = self.proposal["linear.weight"] @ psi.detach() + self.proposal["linear.bias"]
        step = torch.exp(logits) / torch.exp(logits).sum()
        tau = [torch.zeros((), dtype=torch.float64)]
        for each in step:
            tau.append(tau[-1] + each)
        return tau, -(step * torch.log(step)).sum()

    def staircase(self, p, obs):
        """tau_i as numbers, and F(tau_hat_i) of all actions, of one state."""
        with torch.no_grad():
            psi = features_by_hand(p, obs)
            tau = [each.item() for each in self.fractions(psi)[0]]
            middle = [(left + right) / 2 for left, right in itertools.pairwise(tau)]
            return tau, [quantiles_by_hand(p, psi, at) for at in middle]

    def best_action(self, p, obs):
        tau, quantiles = self.staircase(p, obs)
        q = sum((tau[i + 1] - tau[i]) * quantiles[i] for i in range(len(quantiles)))
        return q.argmax().item()

    def run(self):
        args = self.args
        self.reset()
        for step in range(1, args.total_timesteps + 1):
            fall = (1 - args.epsilon_final) * min(1, step / args.epsilon_steps)
            is_random = step <= args.learning_starts
            is_random = is_random or torch.rand((), generator=self.generator).item() < 1 - fall
            if is_random:
                action = torch.randint(3, (), generator=self.generator).item()
            else:
                action = self.best_action(self.online, self.shown[-1]["obs"])
            obs, reward, terminated, truncated, _ = self.env.step(5 + action)
            self.shown[-1] |= {"action": action, "terminated": terminated}
            self.shown[-1]["reward"] = np.float32(reward).item()
            self.shown[-1] |= {"done": terminated or truncated, "priority": self.max_priority}
            self.show(obs)
            if terminated or truncated:
                self.reset()
            if step > args.learning_starts and step % args.train_frequency == 0:
                self.update(step)

    def reset(self):
        seed = np.random.SeedSequence((self.args.seed, self.episode)).generate_state(1)[0]
        self.show(self.env.reset(seed=int(seed))[0])
        self.episode += 1

    def show(self, obs):
        self.shown.append({"obs": torch.tensor(obs).float().double()})  # the ring keeps floats

    def draw(self):
        """Slots of a ring in their order, each as wide as its priority: one draw per B-th."""
        args, newest = self.args, len(self.shown) - 1
        numbers = range(max(0, newest - args.buffer_capacity + 1), newest)
        numbers = [k for k in numbers if "action" in self.shown[k]]
        numbers.sort(key=lambda k: k % args.buffer_capacity)
        priority = np.array([self.shown[k]["priority"] for k in numbers])
        uniform = torch.rand(args.batch_size, dtype=torch.float64, generator=self.generator)
        drawn = []
        for b in range(args.batch_size):
            place, i = (b + uniform[b].item()) / args.batch_size * priority.sum(), 0
            while place >= priority[: i + 1].sum():
                i += 1
            drawn.append(i)
        return [numbers[i] for i in drawn], len(numbers) * priority[drawn] / priority.sum()

    def targets(self, k):
        """y_j and their weights: as many steps as there are, up to n_steps."""
        args, total, m = self.args, 0.0, 0
        while True:
            row = self.shown[k + m]
            total += args.gamma**m * row["reward"]
            m += 1
            if row["done"] or m == args.n_steps or k + m == len(self.shown) - 1:
                break
        after, total = self.shown[k + m]["obs"], np.float32(total).item()
        discount = np.float32(args.gamma**m).item()
        tau, quantiles = self.staircase(self.target, after)
        action = self.best_action(self.online if args.double_q else self.target, after)
        num = args.num_fractions
        y = [total] * num
        if not row["terminated"]:
            y = [total + discount * quantiles[j][action].item() for j in range(num)]
        if args.weight_targets_by_fraction:
            return y, [tau[j + 1] - tau[j] for j in range(num)]
        return y, [1 / num] * num

    def update(self, step):
        args, num = self.args, self.args.num_fractions
        self.num_updates += 1
        drawn, scaled_share = self.draw()
        progress = min(1, step / args.priority_beta_steps)
        beta = args.priority_beta * (1 - progress) + progress
        weights = scaled_share**-beta
        weights = (weights / weights.max()).astype(np.float32).astype(np.float64)
        quantile_loss = fraction_loss = 0.0
        priorities = []
        for k, weight in zip(drawn, weights):
            y, y_weights = self.targets(k)
            psi = features_by_hand(self.online, self.shown[k]["obs"])
            action = self.shown[k]["action"]
            tau, entropy = self.fractions(psi)
            at = [each.item() for each in tau]
            f_hat = [
                quantiles_by_hand(self.online, psi, (at[i] + at[i + 1]) / 2)[action]
                for i in range(num)
            ]
            f_edge = [quantiles_by_hand(self.online, psi, t)[action].item() for t in at[1:-1]]
            errors = []
            for i in range(num):
                for j in range(num):
                    delta = y[j] - f_hat[i]
                    loss = tilted(delta, (at[i] + at[i + 1]) / 2, args.kappa)
                    quantile_loss += weight * y_weights[j] * loss / args.batch_size
                    errors.append(abs(delta.item()))
            for i in range(1, num):
                below = abs(f_edge[i - 1] - f_hat[i - 1].item())
                above = abs(f_edge[i - 1] - f_hat[i].item())
                fraction_loss += weight * (below - above) * tau[i] / args.batch_size
            fraction_loss -= args.entropy_coef * entropy / args.batch_size
            priorities.append((sum(errors) / len(errors) + 1e-6) ** args.priority_alpha)

        factor = self.factor()
        self.quantile_opt.param_groups[0]["lr"] = args.learning_rate * factor
        self.fraction_opt.param_groups[0]["lr"] = args.fraction_learning_rate * factor
        self.step(self.quantile_opt, quantile_loss)
        if args.learn_fractions:
            self.step(self.fraction_opt, fraction_loss)
        if args.prioritized:
            for k, priority in zip(drawn, priorities):
                self.shown[k]["priority"] = priority
            self.max_priority = max(self.max_priority, *priorities)
        if self.num_updates % args.target_interval == 0:
            self.target = {name: x.detach().clone() for name, x in self.online.items()}

    def factor(self):
        """Linear: over `warmup` updates up to 1, over the rest of them down to 0."""
        args, last = self.args, 0
        for step in range(1, args.total_timesteps + 1):
            last += step > args.learning_starts and step % args.train_frequency == 0
        if args.lr_schedule == "constant":
            return 1.0
        warmup = args.warmup_updates
        if self.num_updates <= warmup:
            return self.num_updates / warmup
        return (last - self.num_updates + 1) / (last - warmup)

    def step(self, opt, loss):
        opt.zero_grad()
        loss.backward()
        opt.step()


@pytest.fixture
def in_doubles(monkeypatch):
    """Networks compute in double precision: in floats, RMSProp makes large steps of the rounding in
    small gradients, and a test that allows for it would allow for mistakes, too."""

    def wider(function):
        def widened(*args):
            result = function(*args)
            if isinstance(result, torch.Tensor):
                return result.double()
            slots, weight, obs, action, *scalars = result
            weight, obs, *scalars = (x.double() for x in (weight, obs, *scalars))
            return slots, weight, obs, action, *scalars

        return widened

    monkeypatch.setattr(fqf, "as_tensor", wider(fqf.as_tensor))
    monkeypatch.setattr(fqf.Buffer, "sample", wider(fqf.Buffer.sample))
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


LOUD = {"learning_rate": 3e-3, "fraction_learning_rate": 2e-2, "entropy_coef": 0.05}
VARIANTS = {
    "plain": {},
    "rainbow": {
        "double_q": True,
        "n_steps": 3,
        "weight_targets_by_fraction": True,
        "prioritized": True,
        "priority_beta_steps": 45,
        "buffer_capacity": 17,
        "kappa": 0.4,
    },
    "qr-dqn": {"learn_fractions": False, "n_steps": 2},
    "schedule": {"lr_schedule": "linear", "warmup_updates": 4, "train_frequency": 2},
    "small-ring": {"buffer_capacity": 13, "target_interval": 1},
}


@pytest.mark.parametrize("flags", VARIANTS.values(), ids=VARIANTS)
def test_F8_whole_loop_by_hand(walk, in_doubles, flags):
    """Terminated and truncated episodes, every draw, both optimisers, the target network, and
    targets at the fractions that the online proposal makes of the target network's features."""
    args = replace(walk, total_timesteps=120, **LOUD | flags)
    fqf.train(args)
    hand = ByHand(args)
    hand.run()
    checkpoint = load(args.run_dir)
    ends = {row["terminated"] for row in hand.shown if row.get("done")}
    assert ends == {True, False} and checkpoint["num_updates"] == hand.num_updates >= 38
    kept = checkpoint["buffer"]["frame"]
    numbers = range(len(hand.shown) - len(kept), len(hand.shown))
    expected = torch.empty_like(kept)
    for k in numbers:
        expected[k % args.buffer_capacity] = hand.shown[k]["obs"]
    assert torch.equal(kept, expected)
    for name, mine in (("network", "online"), ("target_network", "target"), ("proposal",) * 2):
        for key, wanted in getattr(hand, mine).items():
            actual = checkpoint[name][key]
            torch.testing.assert_close(actual, wanted.detach(), rtol=1e-6, atol=1e-8)
    # both moved, so that agreement means something
    start = ByHand(args)
    moved = [
        max((getattr(hand, part)[key] - x).abs().max().item() for key, x in before.items())
        for part, before in (("online", start.online), ("proposal", start.proposal))
    ]
    assert moved[0] > 0.02 and (moved[1] > 0.02) == args.learn_fractions


def test_F3_S9_each_loss_trains_its_own_parameters(walk, modules, monkeypatch):
    """In the run itself: neither loss reaches the other's parameters, nothing reaches the target
    network, and what the optimisers find is the gradient of one loss and of one batch."""
    expected, original = [], fqf.fqf_loss

    def watched(*args):
        losses = original(*args)
        online = list(modules["network"].parameters())
        fractions = list(modules["proposal"].parameters())
        options = {"retain_graph": True, "allow_unused": True}
        quantile = torch.autograd.grad(losses[0], online + fractions, **options)
        fraction = torch.autograd.grad(losses[1], online + fractions, **options)
        assert all(x is None for x in quantile[len(online) :])
        assert all(x is None for x in fraction[: len(online)])
        expected.append((*quantile[: len(online)], *fraction[len(online) :]))
        return losses

    monkeypatch.setattr(fqf, "fqf_loss", watched)
    fqf.train(walk)
    assert len(expected) == 18
    parameters = (*modules["network"].parameters(), *modules["proposal"].parameters())
    for parameter, gradient in zip(parameters, expected[-1], strict=True):
        assert gradient.abs().sum() > 0
        torch.testing.assert_close(parameter.grad, gradient)
    assert all(parameter.grad is None for parameter in modules["target"].parameters())


def test_target_network_is_a_copy_now_and_then(walk, modules, monkeypatch):
    """After update u it is the network after update 4 floor(u / 4), bit for bit."""
    online, target, original = [], [], fqf.lr_factor

    def snapshot(*args):  # called before each update: what the last one left
        for states, name in ((online, "network"), (target, "target")):
            state = modules[name].state_dict()
            states.append({key: x.clone() for key, x in state.items()})
        return original(*args)

    monkeypatch.setattr(fqf, "lr_factor", snapshot)
    fqf.train(walk)
    assert len(online) == 18 and online[0].keys() == target[0].keys()
    assert not any("linear" in key for key in target[0])  # the proposal is not part of it
    assert not torch.equal(online[3]["output.weight"], online[4]["output.weight"])
    for u in range(18):
        for key in target[u]:
            assert torch.equal(target[u][key], online[4 * (u // 4)][key]), (u, key)


def test_qr_dqn_fractions_never_move(walk):
    args = replace(walk, learn_fractions=False, log_interval=1, **LOUD)
    fqf.train(args)
    checkpoint = load(args.run_dir)
    assert all((x == 0).all() for x in checkpoint["proposal"].values())
    assert not checkpoint["fraction_opt"]["state"]
    for key in ("stats/fraction_min_width", "stats/fraction_max_width"):
        width = metrics(args, key)
        assert len(width) == 18 and list(width.values()) == pytest.approx([0.25] * 18, abs=2e-7)


def test_F1_the_learning_rate_of_the_fractions(walk, tmp_path):
    """The paper's does nothing in a short run; a larger one does, the other rate being the same."""
    entropy, moved = {}, {}
    for rate in (2.5e-9, 1e-2):
        args = replace(walk, fraction_learning_rate=rate, run_dir=str(tmp_path / str(rate)))
        args = replace(args, env_id="Choice-v0", hidden_dim=64, total_timesteps=120, log_interval=1)
        fqf.train(args)
        entropy[rate] = np.array(list(metrics(args, "stats/fraction_entropy").values()))
        torch.manual_seed(args.seed)
        fqf.QuantileNetwork((1,), 3, args.hidden_dim, args.num_cosines)
        start, end = fqf.FractionProposal(args.hidden_dim, 4, True), load(args.run_dir)["proposal"]
        pairs = zip(start.state_dict().values(), end.values(), strict=True)
        moved[rate] = max((left - right).abs().max().item() for left, right in pairs)
    # the first step of RMSProp is at most rate / sqrt(1 - 0.95), and 38 were taken
    assert moved[2.5e-9] <= 38 * 2.5e-9 / math.sqrt(0.05) and moved[1e-2] > 0.02
    assert len(entropy[1e-2]) == 38
    assert (math.log(4) - entropy[2.5e-9] < 1e-4).all()  # as the weights start, all but equal
    assert math.log(4) - entropy[1e-2].min() > 3e-3


def test_F10_without_the_flag_every_weight_is_one(walk, spy):
    samples = spy("sample", fqf.Buffer)
    fqf.train(walk)
    assert len(samples) == 18
    assert all((call[-1][1] == 1).all() for call in samples)
    buffer = samples[-1][0]
    assert set(buffer.tree[np.arange(buffer.capacity)]) == {0, 1}


def test_F10_priorities_are_mean_errors(walk, spy):
    """(mean over i and j of |delta_ij| + 1e-6)^alpha, for the slots that were drawn."""
    losses, samples = spy("quantile_huber_loss"), spy("sample", fqf.Buffer)
    updates = spy("set_priority", fqf.Buffer)
    fqf.train(replace(walk, prioritized=True, priority_alpha=0.7, num_fractions=5))
    assert len(losses) == len(updates) == 18
    for (quantiles, _, target, *_), sample, (_, slots, priority, _) in zip(
        losses, samples, updates
    ):
        assert slots.tolist() == sample[-1][0].tolist()
        for b in range(6):
            errors = [abs(y - f) for y in target[b].tolist() for f in quantiles[b].tolist()]
            assert priority[b] == pytest.approx((sum(errors) / 25 + 1e-6) ** 0.7, rel=1e-5)


def test_F10_beta_comes_to_1(walk, spy):
    samples = spy("sample", fqf.Buffer)
    fqf.train(replace(walk, prioritized=True, priority_beta=0.4, priority_beta_steps=40))
    beta = [call[4] for call in samples]
    assert beta == pytest.approx([min(1, 0.4 + 0.6 * step / 40) for step in range(9, 61, 3)])
    assert any((call[-1][1] < 1).any() for call in samples)


def test_one_fraction_is_enough(walk):
    """DQN with half its loss: one step from 0 to 1, and no edge that could move."""
    args = replace(walk, num_fractions=1, log_interval=1)
    fqf.train(args)
    assert set(metrics(args, "stats/fraction_entropy").values()) == {0}
    assert set(metrics(args, "losses/fraction").values()) == {0}


def test_random_actions_are_uniform_in_the_units_of_the_environment(walk):
    """Choice-v0 refuses all but 5, 6 and 7; the buffer counts them from 0."""
    args = replace(walk, env_id="Choice-v0", total_timesteps=1503, learning_starts=1500)
    fqf.train(replace(args, buffer_capacity=4000))
    buffer = load(args.run_dir)["buffer"]
    acted = buffer["action"][buffer["priority"] > 0][:1500]
    counts = torch.bincount(acted, minlength=3)
    assert len(counts) == 3 and counts.sum() == 1500
    assert (counts - 500).abs().max() < 90  # 5 standard deviations
    repeats = (acted[1:] == acted[:-1]).float().mean().item()  # independent draws: one in three
    assert repeats == pytest.approx(1 / 3, abs=0.07)


def test_share_of_random_actions_falls_linearly(walk, monkeypatch):
    """From 1 to epsilon_final at epsilon_steps; the policy, which is asked else, says 5."""
    asked = []

    def make_policy(*_):
        return lambda obs: asked.append(len(taken)) or np.full(len(obs), 5)

    taken, add_step = [], fqf.Buffer.add_step
    monkeypatch.setattr(
        fqf.Buffer, "add_step", lambda self, *row: taken.append(row[0]) or add_step(self, *row)
    )
    monkeypatch.setattr(fqf, "make_policy", make_policy)
    monkeypatch.setattr(common, "evaluate", lambda *_, **__: np.zeros(1))
    args = replace(walk, env_id="Choice-v0", total_timesteps=4000, learning_starts=0)
    args = replace(args, train_frequency=500, epsilon_steps=3000, epsilon_final=0.1)
    fqf.train(replace(args, log_interval=500))
    greedy = np.zeros(4000)
    greedy[asked] = 1
    assert (np.array(taken)[asked] == 0).all()
    for first in range(0, 4000, 500):
        steps = np.arange(first, first + 500) + 1
        expected = 1 - np.maximum(0.1, 1 - 0.9 * steps / 3000)
        noise = 5 * math.sqrt((expected * (1 - expected)).sum())
        assert abs(greedy[first : first + 500].sum() - expected.sum()) < noise
    logged = metrics(args, "stats/epsilon")
    expected = {step: max(0.1, 1 - 0.9 * step / 3000) for step in range(500, 4001, 500)}
    assert logged == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "flags",
    [
        {"learning_starts": 0, "train_frequency": 1},
        {"learning_starts": 4, "train_frequency": 3},
        {"learning_starts": 6, "train_frequency": 3},
        {"learning_starts": 7, "train_frequency": 5},
    ],
)
def test_schedules_span_exactly_the_updates_of_the_run(walk, spy, flags):
    calls = spy("lr_factor")
    args = replace(walk, **flags, lr_schedule="linear")
    fqf.train(args)
    starts, every = flags["learning_starts"], flags["train_frequency"]
    total = sum(step > starts and step % every == 0 for step in range(1, 61))
    assert [call[:2] for call in calls] == [(update, total) for update in range(1, total + 1)]
    assert calls[-1][-1] == pytest.approx(1 / total)
    checkpoint = load(args.run_dir)
    for name, rate in (("quantile_opt", 1e-3), ("fraction_opt", 1e-4)):
        assert checkpoint[name]["param_groups"][0]["lr"] == pytest.approx(rate / total)


def test_logged_statistics_are_what_they_say(walk, spy):
    losses = spy("fqf_loss")
    args = replace(walk, log_interval=1, weight_targets_by_fraction=True, **LOUD)
    fqf.train(args)
    tau, entropy, quantiles, _, target, target_weight, *_, result = losses[-1]
    tensors = (tau, quantiles, target, target_weight)
    tau, quantiles, target, target_weight = (x.detach().double().numpy() for x in tensors)
    width, num_falls = tau[:, 1:] - tau[:, :-1], 0
    for row in quantiles:
        num_falls += sum(row[i + 1] < row[i] for i in range(3))
    q = [width[b] @ quantiles[b] for b in range(6)]
    expected = {
        "losses/quantile": result[0].item(),
        "losses/fraction": result[1].item(),
        "stats/fraction_entropy": entropy.mean().item(),
        "stats/fraction_min_width": width.min(),
        "stats/fraction_max_width": width.max(),
        "stats/q_mean": np.mean(q),
        "stats/q_max": np.max(q),
        "stats/target_mean": np.mean([target_weight[b] @ target[b] for b in range(6)]),
        "stats/quantile_spread": np.mean([row[3] - row[0] for row in quantiles]),
        "stats/quantile_crossing": num_falls / (6 * 3),
    }
    for key, value in expected.items():
        assert metrics(args, key)[60] == pytest.approx(value, rel=1e-4, abs=1e-6), key


def test_S2_S5_no_stored_pair_crosses_a_reset(walk):
    """The second number of an observation counts the steps of its episode."""
    args = replace(walk, total_timesteps=300, learning_starts=290)
    fqf.train(args)
    ring = load(args.run_dir)["buffer"]
    position, time = ring["frame"].T
    assert torch.equal(ring["age"].float(), time)
    acted, done = ring["priority"] > 0, ring["done"] & (ring["priority"] > 0)
    assert acted.sum() == 300 and not acted[-1]
    assert ring["terminated"].sum() > 5 and (done & ~ring["terminated"]).sum() > 5
    # an episode's last observation follows its last step, has no action, and is followed by a start
    assert torch.equal(time[1:] == time[:-1] + 1, acted[:-1])
    assert torch.equal(~acted[1:-1], done[:-2])
    assert torch.equal(time[1:] == 0, ~acted[:-1])
    last, after = done.nonzero()[:, 0], position[1:]
    assert torch.equal(after[last].abs() > 2, ring["terminated"][last])
    assert (time[last + 1][~ring["terminated"][last]] == 10).all()
    torch.testing.assert_close(ring["reward"][acted], -(after[acted[:-1]] ** 2))


def test_S18_episode_k_starts_from_seed_and_k(walk, tmp_path):
    """Not from what came before it: two runs that act differently start the same episodes."""
    starts = []
    for name, flags in (("a", {}), ("b", {"learning_starts": 100})):
        args = replace(walk, total_timesteps=200, run_dir=str(tmp_path / name), **flags)
        fqf.train(args)
        frame = load(args.run_dir)["buffer"]["frame"]
        starts.append(frame[frame[:, 1] == 0, 0][:18])
    assert torch.equal(*starts) and len(starts[0].unique()) == 18


def train_until(args, step, monkeypatch):
    """SIGTERM during a step: the run saves and stops, its schedules being those of the whole."""
    signals, steps, add_step = [], [], fqf.Buffer.add_step

    class Caught(fqf.StopSignal):
        def __enter__(self):
            signals.append(self)
            return super().__enter__()

    def counted(self, *row):
        steps.append(row)
        if len(steps) == step:
            signals[0].note(signal.SIGTERM, None)
        return add_step(self, *row)

    with monkeypatch.context() as patch:
        patch.setattr(fqf, "StopSignal", Caught)
        patch.setattr(fqf.Buffer, "add_step", counted)
        result = fqf.train(args)
    assert result["step"] == step and result["signal"] == signal.SIGTERM


def assert_same(left, right, where="checkpoint"):
    """Bit for bit, all but the clock and the names of folders."""
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype and torch.equal(left, right), where
    elif isinstance(left, dict):
        assert left.keys() == right.keys(), where
        for key in left.keys() - {"seconds", "num_bytes", "run_dir"}:
            assert_same(left[key], right[key], f"{where}.{key}")
    elif isinstance(left, list):
        for a, b in zip(left, right, strict=True):
            assert_same(a, b, where)
    else:
        assert left == right, where


RESUMED = {
    "default": {},
    "prioritized": {"prioritized": True, "priority_beta_steps": 70, "lr_schedule": "cosine"},
    "full-ring": {"buffer_capacity": 13, "prioritized": True, "n_steps": 3, "double_q": True},
}


@pytest.mark.parametrize("flags", RESUMED.values(), ids=RESUMED)
def test_S18_resume_in_the_middle_of_an_episode(walk, tmp_path, monkeypatch, flags):
    """The rest of the episode, ring, tree, and all that comes after: as if never stopped."""
    whole = replace(walk, run_dir=str(tmp_path / "whole"), **flags)
    fqf.train(whole)
    played = []
    for cut in (7, 22, 23, 24, 25, 41):
        args = replace(whole, run_dir=str(tmp_path / str(cut)))
        train_until(args, cut, monkeypatch)
        played.append(len(load(args.run_dir)["episode_actions"]))
        fqf.train(replace(args, resume=args.run_dir))
        assert_same(load(whole.run_dir), load(args.run_dir))
        for key in ("charts/episodic_return", "losses/quantile", "stats/fraction_entropy"):
            assert metrics(args, key) == metrics(whole, key)
    assert max(played) > 1


class ForgetfulEnv(gym.Env):
    """Draws from a generator that no seed reaches."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        return np.random.default_rng().normal(size=2).astype(np.float32), {}

    def step(self, action):
        return np.random.default_rng().normal(size=2).astype(np.float32), 0.0, False, False, {}


def test_S18_an_environment_that_ignores_its_seed_is_not_resumed_in_silence(walk):
    gym.register("ForgetfulChoice-v0", ForgetfulEnv, max_episode_steps=10)
    try:
        args = replace(walk, env_id="ForgetfulChoice-v0", total_timesteps=25)
        fqf.train(args)
        with pytest.raises(fqf.InputError, match="plays another episode from the same seed"):
            fqf.train(replace(args, resume=args.run_dir, total_timesteps=30))
    finally:
        del gym.envs.registry["ForgetfulChoice-v0"]


def test_checkpoint_holds_the_filled_part_of_the_buffer(walk):
    """A million slots of two numbers, and the rest of a slot, would be 48 MB."""
    fqf.train(replace(walk, buffer_capacity=1_000_000))
    checkpoint = load(walk.run_dir)
    frames = checkpoint["buffer"]["frame"]
    assert len(frames) == 60 + 1 + checkpoint["episode"]  # an episode has one more than steps
    assert Path(walk.run_dir, "checkpoint.pt").stat().st_size < 100_000


def test_patience_waits_for_updates(walk):
    """Without one since the last evaluation the policy is the same: nothing to wait for."""
    args = replace(walk, eval_interval=5, learning_starts=14, train_frequency=12)
    fqf.train(replace(args, total_timesteps=45))  # updates at 24 and 36, and the end
    assert list(metrics(args, "eval/return_mean")) == [0, 25, 40, 45]


def test_policy_of_a_checkpoint_acts_as_the_run_did(walk):
    fqf.train(replace(walk, **LOUD))
    checkpoint = load(walk.run_dir)
    hand = ByHand(walk)
    hand.online = {name: x.double() for name, x in checkpoint["network"].items()}
    hand.proposal = {name: x.double() for name, x in checkpoint["proposal"].items()}
    obs = 2 * np.random.default_rng(0).normal(size=(30, 2))
    policy = fqf.load_policy(f"{walk.run_dir}/checkpoint.pt", device="cpu")
    expected = [5 + hand.best_action(hand.online, torch.tensor(row)) for row in obs]
    assert policy(obs).tolist() == expected


# ---- Atari


@pytest.fixture
def fake_game(walk, monkeypatch):
    """A run on stacks of images, without an emulator."""

    def make_env(env_id, **kwargs):
        return gym.wrappers.FrameStackObservation(common.make_env(env_id, **kwargs), 4)

    monkeypatch.setattr(fqf, "make_env", make_env)
    monkeypatch.setattr(common, "evaluate", lambda *_, **__: np.zeros(1))
    return replace(walk, env_id="FakeGame-v0", batch_size=2, total_timesteps=40)


def test_rewards_of_games_are_stored_as_signs_and_logged_as_they_are(fake_game):
    fqf.train(fake_game)
    ring = load(fake_game.run_dir)["buffer"]
    acted = ring["priority"] > 0
    assert acted.sum() == 40
    signs = torch.tensor([-1.0, 0, 1, 0])[ring["age"] % 4]
    assert torch.equal(ring["reward"][acted], signs[acted])
    returns, expected, last = metrics(fake_game, "charts/episodic_return"), {}, 0
    done = (ring["done"] & acted)[acted]
    for step in (done.nonzero()[:, 0] + 1).tolist():
        expected[step] = float(sum((-3, 0, 7, 0)[t % 4] for t in range(step - last)))
        last = step
    assert returns == expected and len(returns) > 2


def test_rewards_of_vectors_are_stored_as_they_are(walk):
    fqf.train(walk)
    ring = load(walk.run_dir)["buffer"]
    assert len(ring["reward"][ring["priority"] > 0].unique()) > 50


@pytest.mark.parametrize("n_steps", [1, 3])
def test_the_smallest_ring_always_has_a_transition(fake_game, spy, n_steps):
    """A stack needs 4 frames and a transition n more; one slot less could be left without any."""
    samples = spy("sample", fqf.Buffer)
    args = replace(fake_game, buffer_capacity=4 + n_steps, n_steps=n_steps, learning_starts=0)
    with pytest.raises(fqf.InputError, match="buffer_capacity must be"):
        fqf.train(args)
    fqf.train(replace(args, buffer_capacity=5 + n_steps, train_frequency=1))
    assert len(samples) == 40
    for buffer, *_, (slots, *_) in samples:
        assert slots.max() < buffer.capacity


def test_S15_a_greedy_run_on_images_acts_on_what_the_ring_gives_back(fake_game, spy):
    """The stack that acted, and the stack that the ring puts together for that slot."""
    acts, adds = spy("as_tensor"), spy("add_step", fqf.Buffer)
    args = replace(fake_game, epsilon_final=0.0, epsilon_steps=1, learning_starts=6)
    fqf.train(args)
    buffer = adds[0][0]
    assert len(acts) == 34  # every step after the first six
    slots = np.flatnonzero(buffer.tree[np.arange(buffer.capacity)])[6:]
    stacks = buffer.stack(slots)
    assert stacks.dtype == acts[0][-1].dtype == torch.uint8
    assert torch.equal(stacks, torch.cat([call[-1] for call in acts]))


class LivesEnv(gym.Env):
    """A game of which only the number of lives is known, before each step."""

    observation_space = gym.spaces.Box(0, 255, (84, 84), np.uint8)
    action_space = gym.spaces.Discrete(4)

    def __init__(self, lives):
        self.script, self.ale, self.actions = lives, self, []

    def get_action_meanings(self):
        return ["NOOP", "UP", "FIRE", "DOWN"]

    def lives(self):
        return self.script[len(self.actions)]

    def reset(self, seed=None, options=None):
        self.actions = []
        return np.zeros((84, 84), np.uint8), {}

    def step(self, action):
        self.actions.append(action)
        return np.zeros((84, 84), np.uint8), 0.0, False, False, {}


@pytest.mark.parametrize(
    ("lives", "expected"),
    [
        ([3, 3, 3, 2, 2, 2, 1], [2, 2, 0, 2, 2, 0, 2]),
        ([0, 0, 0, 0], [2, 2, 0, 0]),  # a game without lives
        ([3, 3, 4, 4, 3, 3, 3, 2], [2, 2, 0, 0, 2, 2, 0, 2]),  # one that was won, and lost
    ],
)
def test_first_actions_of_every_life_are_fire(lives, expected):
    inner = LivesEnv(lives)
    env = fqf.FirstFire(inner)
    for _ in range(2):  # after a reset it begins again
        env.reset(seed=0)
        for _ in lives:
            env.step(0)
        assert inner.actions == expected


@pytest.fixture(scope="module")
def breakout():
    pytest.importorskip("ale_py")
    pytest.importorskip("cv2")
    return fqf.make_env("ALE/Breakout-v5")


def layers(env):
    while True:
        yield env
        if env is env.unwrapped:
            return
        env = env.env


def test_atari_observations(breakout):
    assert fqf.check_spaces(breakout) == ((4, 84, 84), 4)
    obs, _ = breakout.reset(seed=1)
    assert obs.shape == (4, 84, 84) and obs.dtype == np.uint8
    assert (obs == obs[0]).all()  # padded with the first frame
    assert 0 < obs.mean() < 255 and len(np.unique(obs)) > 3
    later = [obs] + [breakout.step(2)[0] for _ in range(6)]
    for before, after in itertools.pairwise(later):
        np.testing.assert_array_equal(after[:-1], before[1:])
    assert (later[-1][-1] != later[-1][0]).any()
    assert breakout.unwrapped.ale.getEpisodeFrameNumber() >= 6 * 4


def test_atari_episodes_start_after_up_to_30_idle_frames(breakout):
    counts = []
    for seed in range(25):
        breakout.reset(seed=seed)
        counts.append(breakout.unwrapped.ale.getEpisodeFrameNumber())
    assert 1 <= min(counts) <= 8 and 23 <= max(counts) <= 30


def test_S18_atari_same_seed_and_actions_same_frames(breakout):
    rng, runs = np.random.default_rng(0), []
    actions = rng.integers(4, size=60)
    for seed in (5, 5, 6):
        frames = [breakout.reset(seed=seed)[0]]
        frames += [breakout.step(action)[0] for action in actions]
        runs.append(np.stack(frames))
    np.testing.assert_array_equal(runs[0], runs[1])
    assert (runs[0] != runs[2]).any()


def test_breakout_is_served_by_itself(breakout, monkeypatch):
    """A policy that does nothing loses its five lives in some hundred steps, not never."""
    fire = next(layer for layer in layers(breakout) if isinstance(layer, fqf.FirstFire))
    assert breakout.unwrapped.get_action_meanings()[1] == "FIRE"
    inner, step, taken = fire.env, fire.env.step, []

    def watched(action):
        taken.append((breakout.unwrapped.ale.lives(), action))
        return step(action)

    monkeypatch.setattr(inner, "step", watched)
    breakout.reset(seed=3)
    done = False
    while not done and len(taken) < 2000:
        _, _, terminated, truncated, _ = breakout.step(0)
        done = terminated or truncated
    assert done and terminated
    lives = [each[0] for each in taken]
    starts = [0] + [t for t in range(1, len(lives)) if lives[t] < lives[t - 1]]
    expected = [int(t in starts or t - 1 in starts) for t in range(len(lives))]
    assert [each[1] for each in taken] == expected and len(starts) == 5


def test_a_game_without_fire_is_left_alone():
    pytest.importorskip("ale_py")
    env = fqf.make_env("ALE/Freeway-v5")
    assert "FIRE" not in env.unwrapped.get_action_meanings()
    assert not any(isinstance(layer, fqf.FirstFire) for layer in layers(env))
    assert fqf.check_spaces(env)[0] == (4, 84, 84)


@pytest.mark.parametrize("game", ["ALE/Backgammon-v5", "ALE/NoSuchGame-v5"])
def test_a_game_that_cannot_be_made_is_refused_in_one_line(game):
    """Two games have no idle action, which the start of an episode needs."""
    pytest.importorskip("ale_py")
    with pytest.raises(fqf.InputError, match=game) as refusal:
        fqf.make_env(game)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("package", ["ale_py", "cv2"])
def test_a_game_without_its_packages_is_refused(package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(fqf.InputError, match="pip install ale-py opencv-python-headless"):
        fqf.make_env("ALE/Breakout-v5")


def test_other_images_and_other_actions_are_refused():
    with pytest.raises(fqf.InputError, match="Image-v0: observations must be vectors, or"):
        fqf.check_spaces(fqf.make_env("Image-v0"))
    with pytest.raises(fqf.InputError, match="Probe-v0: actions must be discrete, not Box"):
        fqf.check_spaces(fqf.make_env("Probe-v0"))


def test_S18_breakout_resumed_is_breakout_as_it_would_have_been(
    walk, breakout, tmp_path, monkeypatch
):
    monkeypatch.setattr(common, "evaluate", lambda *_, **__: np.zeros(1))
    whole = replace(walk, env_id="ALE/Breakout-v5", batch_size=2, total_timesteps=48)
    whole = replace(whole, buffer_capacity=30, run_dir=str(tmp_path / "whole"))
    fqf.train(whole)
    args = replace(whole, run_dir=str(tmp_path / "cut"))
    train_until(args, 35, monkeypatch)  # the ring has wrapped
    stopped = load(args.run_dir)
    assert len(stopped["episode_actions"]) == 35
    fqf.train(replace(args, resume=args.run_dir))
    left, right = load(whole.run_dir), load(args.run_dir)
    assert_same(left, right)
    assert left["buffer"]["frame"].shape == (30, 84, 84)

    # single frames make the stacks that the game showed when these actions were played
    buffer = fqf.Buffer(30, (4, 84, 84))
    buffer.load_state(left["buffer"])
    obs, _ = fqf.start_episode(breakout, args.seed, 0, [])
    shown = [obs] + [breakout.step(action)[0] for action in left["episode_actions"].numpy()]
    for slot in np.flatnonzero(buffer.tree[np.arange(30)]):
        age = buffer.columns["age"][slot]
        np.testing.assert_array_equal(buffer.stack(np.array([slot]))[0].numpy(), shown[age])
    assert (buffer.tree[np.arange(30)] > 0).sum() == 30 - 4


# ---- pictures


def test_quantile_at_by_hand():
    """Steps in the order of their height: 1 up to 0.3, 2 up to 0.8, then 3."""
    tau = np.array([[0, 0.2, 0.5, 1.0], [0, 0.1, 0.2, 1.0]])
    quantiles = np.array([[3.0, 1.0, 2.0], [1.0, 2.0, 3.0]])
    for share, first, second in ((0.05, 1, 1), (0.15, 1, 2), (0.29, 1, 3), (0.31, 2, 3)):
        assert fqf.quantile_at(tau, quantiles, share).tolist() == [first, second]
    assert fqf.quantile_at(tau, quantiles, 0.79).tolist() == [2, 3]
    assert fqf.quantile_at(tau, quantiles, 0.81).tolist() == [3, 3]
    assert fqf.quantile_at(tau, quantiles, 1.0).tolist() == [3, 3]


def test_plot_is_a_picture_next_to_the_checkpoint(walk, monkeypatch, capsys):
    fqf.train(replace(walk, **LOUD))
    shares, original = [], fqf.quantile_at

    def watched(tau, quantiles, share):
        shares.append((tau, quantiles, share))
        return original(tau, quantiles, share)

    monkeypatch.setattr(fqf, "quantile_at", watched)
    path = f"{walk.run_dir}/best.pt"
    flags = ["fqf.py", "--evaluate", path, "--plot", "--no-quiet", "--eval-seed", "7"]
    monkeypatch.setattr("sys.argv", flags)
    assert fqf.main() == 0
    picture = Path(walk.run_dir, "distributions.png")
    assert f"drawn in {picture}" in capsys.readouterr().out
    data = picture.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", data[16:24]) == (1200, 900)
    assert 20_000 < len(data) < 1_000_000

    # what is drawn: the episode of that seed, as the policy plays it
    policy, env = fqf.load_policy(path, device="cpu"), fqf.make_env(walk.env_id)
    network, proposal, _, _ = fqf.load_networks(path, device="cpu")
    obs, done, seen = env.reset(seed=7)[0], False, []
    while not done:
        seen.append(obs)
        obs, _, terminated, truncated, _ = env.step(policy(obs[None])[0])
        done = terminated or truncated
    with torch.no_grad():
        tau, quantiles = fqf.staircase(network, proposal, torch.tensor(np.stack(seen)).float())
    assert [share for *_, share in shares] == [0.1, 0.9] * 3
    for number, (drawn_tau, drawn_quantiles, _) in enumerate(shares):
        np.testing.assert_allclose(drawn_tau, tau, atol=1e-5)
        np.testing.assert_allclose(drawn_quantiles, quantiles[:, :, number // 2], atol=1e-4)


def test_plot_without_its_package_is_refused(walk, monkeypatch):
    fqf.train(walk)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(fqf.InputError, match="pip install matplotlib"):
        fqf.evaluate_checkpoint(replace(walk, evaluate=f"{walk.run_dir}/best.pt", plot=True))


def test_plot_of_one_fraction(walk):
    """No edge to draw."""
    fqf.train(replace(walk, num_fractions=1))
    path = f"{walk.run_dir}/plot.png"
    fqf.plot_episode(f"{walk.run_dir}/best.pt", path, eval_seed=0, device="cpu")
    assert Path(path).stat().st_size > 20_000


def test_the_command_of_the_docstring_is_the_set_of_the_paper():
    """Whatever the defaults are: the paper's numbers, and those that only the authors' code has."""
    command = fqf.__doc__.split("The paper's set")[1].split("python algos/fqf.py")[1]
    command = command.split("\n\n")[0].replace("\\\n", " ")
    args = tyro.cli(fqf.Args, args=shlex.split(command))
    fqf.check_args(args)
    expected = {
        "num_fractions": 32,
        "num_cosines": 64,
        "kappa": 1.0,
        "batch_size": 32,
        "hidden_dim": 512,
        "learning_rate": 5e-5,
        "fraction_learning_rate": 2.5e-9,
        "gamma": 0.99,
        "n_steps": 1,
        "double_q": False,
        "prioritized": False,
        "weight_targets_by_fraction": False,
        "buffer_capacity": 1_000_000,
        "learning_starts": 50_000,
        "train_frequency": 4,
        "target_interval": 10_000 // 4,  # updates, where the paper counts steps
        "epsilon_final": 0.01,
        "lr_schedule": "constant",
    }
    assert {name: getattr(args, name) for name in expected} == expected
    assert fqf.ADAM_EPS / args.batch_size == 0.01 / 32
    assert fqf.RMSPROP == {"alpha": 0.95, "eps": 1e-5}
