"""FQF: fractions, losses, replay and loop against numbers worked out by other means."""

import io
import itertools
import math
import shlex
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
from conftest import assert_equal, load, metrics_of, spy_on, tiny_args

import common
from algos import fqf
from benchmark import distributions

CPU = torch.device("cpu")
PAGE = Path(fqf.__file__).with_name("fqf.md")


@pytest.fixture(scope="module")
def algo():
    return fqf


@pytest.fixture
def walk(tmp_path):
    """18 updates that see everything that happens now and then: at steps 9, 12, .., 60."""
    flags = {"total_timesteps": 60, "learning_starts": 6, "train_frequency": 3, "batch_size": 6}
    flags |= {"gamma": 0.9, "target_interval": 4, "buffer_capacity": 1000}
    flags |= {"hidden_dim": 8, "num_cosines": 5, "weight_targets_by_fraction": False}
    flags |= {"learning_rate": 1e-3, "fraction_learning_rate": 1e-4, "epsilon_steps": 30}
    return replace(tiny_args(fqf, None, tmp_path / "run"), eval_interval=1000, **flags)


LOUD = {"learning_rate": 3e-3, "fraction_learning_rate": 2e-2, "entropy_coef": 0.05}


@pytest.fixture
def spy(monkeypatch):
    """Keep the arguments and the result of every call of a function of fqf.py, or of a method."""
    return lambda name, owner=fqf: spy_on(monkeypatch, owner)(name)


def metrics(args, key):
    """{step: value} of one key in metrics.csv."""
    rows = metrics_of(args.run_dir)
    return {int(step): float(value) for step, name, value in rows if name == key}


def random_fractions(num_rows, num_fractions, dtype=torch.float64):
    """Rows of tau_0 = 0 < .. < tau_N = 1, far from equal steps."""
    step = torch.softmax(torch.randn(num_rows, num_fractions, dtype=torch.float64), dim=1)
    tau = torch.cat([torch.zeros(num_rows, 1, dtype=torch.float64), step.cumsum(dim=1)], dim=1)
    tau[:, -1] = 1
    return tau.to(dtype)


# ---- fractions


def test_fractions_rise_from_exactly_0_to_exactly_1():
    proposal, logits = fqf.FractionProposal(32, 32, True), torch.randn(2000, 32)
    with torch.no_grad():
        proposal.linear.weight.copy_(torch.eye(32))
    tau, entropy = proposal(logits)
    assert tau.shape == (2000, 33) and entropy.shape == (2000,)
    assert (tau[:, 0] == 0).all() and (tau[:, -1] == 1).all()  # a sum of 32 floats is not
    tau_hat = fqf.midpoints(tau)
    assert ((tau[:, :-1] < tau_hat) & (tau_hat < tau[:, 1:])).all()
    expected = torch.distributions.Categorical(logits=logits.double())
    torch.testing.assert_close(tau.diff(dim=1).double(), expected.probs, rtol=0, atol=1e-6)
    torch.testing.assert_close(entropy.double(), expected.entropy(), rtol=1e-5, atol=0)
    assert (entropy < math.log(32) - 1e-3).all()
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


def test_qr_dqn_fractions_are_equal_steps_for_every_state():
    tau, entropy = fqf.FractionProposal(16, 32, False)(100 * torch.randn(20, 16))
    torch.testing.assert_close(tau, torch.linspace(0, 1, 33).expand(20, -1), rtol=0, atol=3e-7)
    torch.testing.assert_close(entropy, torch.full((20,), math.log(32)))


# ---- the gradient of W1

CURVES = {  # quantile functions that rise
    "cubic": lambda t: t**3,
    "exponential": lambda t: -torch.log(1 - 0.999 * t),
    "logit": lambda t: torch.log((t + 0.01) / (1.01 - t)),
}


def wasserstein(tau, curve, num_cells=20_000):
    """The area between F and its staircase, by the mid-point rule. [N + 1] -> a number"""
    cell = (torch.arange(num_cells, dtype=torch.float64) + 0.5) / num_cells
    left, width = tau[:-1, None], tau.diff()[:, None]  # [N, 1]
    error = (curve(left + width * cell) - curve(left + width / 2)).abs()  # [N, cells]
    return (width * error).sum().item() / num_cells


def slopes(tau, curve, h=1e-5):
    """Central differences of W1 in tau_1..tau_{N-1}."""
    nudges = h * torch.eye(len(tau), dtype=torch.float64)[1:-1]
    rises = [wasserstein(tau + x, curve) - wasserstein(tau - x, curve) for x in nudges]
    return torch.tensor(rises, dtype=torch.float64) / (2 * h)


def autograd_slopes(tau, curve):
    tau = tau.clone().requires_grad_()
    middle = fqf.midpoints(tau[None].detach())
    loss = fqf.fraction_loss(tau[None], curve(middle), curve(tau[None, 1:-1].detach()))
    assert loss.shape == (1,)
    loss.sum().backward()
    assert tau.grad[0] == tau.grad[-1] == 0  # the ends stay where they are
    return tau.grad[1:-1]


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("sign", [1, -1])
def test_F4_fraction_gradient_is_that_of_W1(name, sign):
    """Also for an F that falls, where Proposition 1 without absolute values has the wrong sign."""

    def curve(t):
        return sign * CURVES[name](t)

    for tau in random_fractions(5, 6):
        actual = autograd_slopes(tau, curve)
        torch.testing.assert_close(actual, slopes(tau, curve), rtol=1e-5, atol=1e-5)
        middle = (tau[:-1] + tau[1:]) / 2
        plain = 2 * curve(tau[1:-1]) - curve(middle[1:]) - curve(middle[:-1])
        torch.testing.assert_close(plain, sign * actual)
        assert actual.abs().max() > 1e-2


def test_F4_fraction_gradient_where_F_falls_and_then_rises():
    """Exact if F is monotone from each tau_i to the next; it turns at 1/2, where one of them is."""
    tau = torch.tensor([0, 0.12, 0.3, 0.5, 0.66, 0.85, 1], dtype=torch.float64)
    curve = lambda t: torch.cos(2 * math.pi * t)  # noqa: E731
    expected = slopes(tau, curve, h=1e-4)
    torch.testing.assert_close(autograd_slopes(tau, curve), expected, rtol=0, atol=1e-5)


def test_descent_on_the_fraction_loss_lowers_W1():
    """F = t^3: equal steps have 0.03119; through the proposal's bias, 60 steps come to 0.0261."""
    curve, proposal = CURVES["cubic"], fqf.FractionProposal(3, 8, True)
    opt, distances = torch.optim.SGD([proposal.linear.bias], lr=2.0), []
    for step in range(61):
        tau, _ = proposal(torch.zeros(2, 3))
        if step % 12 == 0:
            distances.append(wasserstein(tau[0].detach().double(), curve))
        opt.zero_grad()
        edges = curve(tau[:, 1:-1].detach())
        fqf.fraction_loss(tau, curve(fqf.midpoints(tau)), edges).mean().backward()
        opt.step()
    assert distances[0] == pytest.approx(0.03119, abs=1e-5)
    assert distances[-1] == pytest.approx(0.0261, abs=1e-4)
    assert (np.diff(distances) < 0).all()


# ---- the quantile loss


def tilted(delta, tau_hat, kappa):
    """|tau_hat - 1[delta < 0]| Huber(delta) / kappa of one error."""
    small = abs(delta) <= kappa
    huber = 0.5 * delta**2 if small else kappa * (abs(delta) - 0.5 * kappa)
    return abs(tau_hat - (1 if delta < 0 else 0)) * huber / kappa


@pytest.mark.parametrize("kappa", [0.3, 1.0, 2.5])
def test_F6_quantile_huber_loss_by_brute_force(kappa):
    """Three different sizes: i are the predictions, summed; j the targets, averaged."""
    quantiles, target = 2 * torch.randn(3, 4), 2 * torch.randn(3, 5)
    tau_hat = fqf.midpoints(random_fractions(3, 4, torch.float32))
    weight = random_fractions(3, 5, torch.float32).diff(dim=1)
    actual = fqf.quantile_huber_loss(quantiles, tau_hat, target, weight, kappa)
    for b in range(3):
        expected = 0.0
        for i, j in itertools.product(range(4), range(5)):
            delta = target[b, j].item() - quantiles[b, i].item()
            expected += weight[b, j].item() * tilted(delta, tau_hat[b, i].item(), kappa)
        assert actual[b].item() == pytest.approx(expected, rel=1e-5)


def test_F6_gradient_is_that_of_finite_differences():
    """The indicator is a constant, and the target is not moved towards the prediction."""
    quantiles = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    target = 2 * torch.randn(2, 4, dtype=torch.float64)
    rest = fqf.midpoints(random_fractions(2, 3)), target, torch.full_like(target, 0.25), 0.7
    assert torch.autograd.gradcheck(lambda x: fqf.quantile_huber_loss(x, *rest), quantiles)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_F6_the_loss_is_least_at_the_quantile(share):
    """A share tau_hat of the targets lies below it, not above it."""
    grid, normal = torch.linspace(-3, 3, 1201)[:, None], torch.distributions.Normal(0, 1)
    target = normal.icdf((torch.arange(400) + 0.5) / 400).expand(1201, 400)
    rest = target, torch.full((1201, 400), 1 / 400), 0.01
    loss = fqf.quantile_huber_loss(grid, torch.full((1201, 1), share), *rest)
    expected = normal.icdf(torch.tensor(share)).item()
    assert grid[loss.argmin()].item() == pytest.approx(expected, abs=0.02)


def test_a_converged_F_is_the_quantile_function_with_the_default_kappa():
    """Of N(0, 5). A large kappa pulls F towards the mean: with 10, F(0.906) is 4.57, not 6.59."""
    share = (torch.arange(16) + 0.5) / 16
    normal = torch.distributions.Normal(0, 5)
    target = normal.icdf((torch.arange(500) + 0.5) / 500)
    grid = torch.linspace(-12, 12, 961)[:, None]
    found = {}
    for kappa in (fqf.Args.kappa, 10.0):
        rest = target.expand(961, 500), torch.full((961, 500), 1 / 500), kappa
        losses = [fqf.quantile_huber_loss(grid, torch.full((961, 1), x), *rest) for x in share]
        found[kappa] = grid[torch.stack(losses).argmin(dim=1), 0]
    error = (found[fqf.Args.kappa] - normal.icdf(share)).abs()
    assert error.max() < 0.7 and error[2:-2].max() < 0.4  # the outermost have few targets beyond
    assert found[10.0][14].item() == pytest.approx(4.57, abs=0.05)
    assert normal.icdf(share)[14].item() == pytest.approx(6.59, abs=0.01)


def test_F5_value_weighs_quantiles_by_their_steps():
    tau = torch.tensor([[0, 0.5, 0.6, 1.0], [0, 0.2, 0.9, 1.0]])
    quantiles = torch.tensor([[[1.0, 10], [2, 20], [3, 30]], [[1, -1], [0, 4], [5, 5]]])
    expected = torch.tensor([[0.5 + 0.2 + 1.2, 5 + 2 + 12], [0.2 + 0.5, -0.2 + 2.8 + 0.5]])
    torch.testing.assert_close(fqf.action_values(tau, quantiles), expected)


def test_S1_target_by_hand():
    """Terminated: the reward alone. Truncated, or cut after m steps: gamma^m of what comes then."""
    reward = torch.tensor([1.0, 2.0, -3.0])
    discount, terminated = torch.tensor([0.9, 0.9, 0.729]), torch.tensor([0.0, 1.0, 0.0])
    next_quantiles = torch.tensor([[1.0, 2.0], [100.0, -100.0], [10.0, 0.0]])
    target = fqf.quantile_target(reward, discount, terminated, next_quantiles)
    torch.testing.assert_close(target, torch.tensor([[1.9, 2.8], [2.0, 2.0], [4.29, -3.0]]))


# ---- rows of a batch


def loss_inputs(num_rows, num_fractions=3, num_targets=5):
    return {
        "tau": random_fractions(num_rows, num_fractions, torch.float32),
        "quantiles": torch.randn(num_rows, num_fractions),
        "edge_quantiles": torch.randn(num_rows, num_fractions - 1),
        "target": torch.randn(num_rows, num_targets),
        "target_weight": random_fractions(num_rows, num_targets, torch.float32).diff(dim=1),
    }


def both_losses(tau, quantiles, edge_quantiles, target, target_weight):
    """As the loop calls them. -> [2, B]"""
    huber = fqf.quantile_huber_loss(quantiles, fqf.midpoints(tau), target, target_weight, 0.8)
    return torch.stack([huber, fqf.fraction_loss(tau, quantiles, edge_quantiles)])


@pytest.mark.parametrize("name", loss_inputs(1))
def test_S8_no_broadcast(name):
    """Neither one row for all, nor a column, nor one dimension too many. With as many rows as edges
    all of them would fit each other."""
    x = loss_inputs(num_rows=2)
    for wrong in (x[name][:1], x[name][..., None]):
        with pytest.raises(AssertionError):
            both_losses(**x | {name: wrong})


def test_S8_no_broadcast_in_the_target():
    flat, column, quantiles = torch.zeros(4), torch.zeros(4, 1), torch.zeros(4, 3)
    for scalars in ((column, flat, flat), (flat, column, flat), (flat, flat, column)):
        with pytest.raises(AssertionError):
            fqf.quantile_target(*scalars, quantiles)


def test_S8_rows_do_not_mix():
    """Each row of a batch has the loss that it has alone; with the targets of another, another."""
    x = loss_inputs(num_rows=6)
    whole = both_losses(**x)
    alone = [both_losses(**{name: each[[b]] for name, each in x.items()}) for b in range(6)]
    torch.testing.assert_close(whole, torch.cat(alone, dim=1))
    permuted = both_losses(**x | {"target": x["target"].flip(0)})
    assert (permuted[0] != whole[0]).all() and torch.equal(permuted[1], whole[1])


# ---- networks


def randomised_networks():
    """No two outputs are alike, and fractions differ from state to state."""
    network, proposal = fqf.QuantileNetwork((2,), 3, 8, 5), fqf.FractionProposal(8, 4, True)
    with torch.no_grad():
        for parameter in (*network.parameters(), *proposal.parameters()):
            parameter.add_(0.5 * torch.randn(parameter.shape))
    return network, proposal


def doubles(module):
    return {name: x.detach().double().clone() for name, x in module.named_parameters()}


def features_by_hand(p, obs):
    """psi(s) of one state, plain matrix algebra. [O] -> [D]"""
    hidden = torch.relu(p["torso.0.weight"] @ obs + p["torso.0.bias"])
    return torch.relu(p["torso.2.weight"] @ hidden + p["torso.2.bias"])


def fractions_by_hand(p, psi):
    """tau_0..tau_N of one state as a list, and their entropy. [D] -> N + 1 numbers, a number"""
    logits = p["linear.weight"] @ psi.detach() + p["linear.bias"]
    step = torch.exp(logits) / torch.exp(logits).sum()
    tau = [torch.zeros((), dtype=torch.float64)]
    for each in step:
        tau.append(tau[-1] + each)
    return tau, -(step * torch.log(step)).sum()


def quantiles_by_hand(p, psi, tau):
    """F(tau) of every action, at one fraction of one state. [D], float -> [A]"""
    num_cosines = p["embedding.weight"].shape[1]
    cosines = [math.cos(math.pi * k * tau) for k in range(1, num_cosines + 1)]
    cosines = torch.tensor(cosines, dtype=torch.float64)
    phi = torch.relu(p["embedding.weight"] @ cosines + p["embedding.bias"])
    hidden = torch.relu(p["hidden.weight"] @ (psi * phi) + p["hidden.bias"])
    return p["output.weight"] @ hidden + p["output.bias"]


def staircase_by_hand(network, proposal, obs):
    """tau_i as numbers, and F(tau_hat_i) of all actions, of one state."""
    with torch.no_grad():
        psi = features_by_hand(network, obs)
        tau = [each.item() for each in fractions_by_hand(proposal, psi)[0]]
        middle = [(left + right) / 2 for left, right in itertools.pairwise(tau)]
        return tau, [quantiles_by_hand(network, psi, at) for at in middle]


def best_action_by_hand(network, proposal, obs):
    tau, quantiles = staircase_by_hand(network, proposal, obs)
    q = sum((tau[i + 1] - tau[i]) * quantiles[i] for i in range(len(quantiles)))
    return q.argmax().item()


def test_F7_staircase_by_hand_with_cosines_from_1():
    network, proposal = randomised_networks()
    obs = torch.randn(4, 2)
    tau, quantiles = fqf.staircase(network, proposal, obs)
    assert tau.shape == (4, 5) and quantiles.shape == (4, 4, 3)
    for b in range(4):
        edges, expected = staircase_by_hand(doubles(network), doubles(proposal), obs[b].double())
        assert tau[b].tolist() == pytest.approx(edges, abs=1e-5)
        expected = torch.stack(expected).float()
        torch.testing.assert_close(quantiles[b].detach(), expected, rtol=1e-3, atol=1e-4)


def test_quantiles_of_one_action_are_a_column_of_all():
    """Values and gradients, with a gather in between or without."""
    network, _ = randomised_networks()
    obs, tau, action = torch.randn(4, 2), torch.rand(4, 6), torch.tensor([2, 0, 0, 1])
    cotangent = torch.randn(4, 6)
    column = network(network.features(obs), tau)[torch.arange(4), :, action]
    expected = torch.autograd.grad((column * cotangent).sum(), list(network.parameters()))
    alone = network(network.features(obs), tau, action)
    actual = torch.autograd.grad((alone * cotangent).sum(), list(network.parameters()))
    torch.testing.assert_close(alone, column, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_S15_bytes_are_scaled_once_by_the_network_itself():
    """So for acting and for learning alike: both give it bytes."""
    network = fqf.QuantileNetwork((4, 84, 84), 4, 16, 8)
    images = torch.randint(256, (3, 4, 84, 84), dtype=torch.uint8)
    shapes = [tuple(x.shape) for x in network.torso.parameters()]
    assert shapes == [(32, 4, 8, 8), (32,), (64, 32, 4, 4), (64,), (64, 64, 3, 3), (64,)]
    with torch.no_grad():
        hidden = images.float() / 255
        for layer, stride in ((0, 4), (2, 2), (4, 1)):  # the convolutions of DQN
            weight, bias = network.torso[layer].weight, network.torso[layer].bias
            hidden = torch.relu(torch.nn.functional.conv2d(hidden, weight, bias, stride))
        for obs in (fqf.as_tensor(images.numpy(), CPU), images.float() / 255):
            torch.testing.assert_close(network.features(obs), hidden.flatten(1))


@pytest.mark.parametrize("obs", [np.array([3, 250], np.uint8), np.array([0.25, -7.0])])
def test_S15_vectors_are_the_same_numbers_for_acting_and_for_learning(obs):
    """A vector of bytes, or of doubles, is not an image: it becomes floats, and stays as it is."""
    buffer = fqf.Buffer(8, (2,), 1)
    buffer.add_frame(obs, age=0)
    stored, acting = buffer.stack(np.array([0])), fqf.as_tensor(obs[None], CPU)
    assert stored.dtype == acting.dtype == torch.float32
    assert stored.tolist() == acting.tolist() == [obs.tolist()]


def test_policy_of_a_checkpoint_takes_the_largest_mean_in_the_units_of_the_environment(walk):
    """Also if fractions are far from equal steps, so that plain means would choose others."""
    fqf.train(walk)
    network, proposal = randomised_networks()
    obs = 3 * np.random.default_rng(0).normal(size=(40, 2))
    with torch.no_grad():  # else one action may be the best of all states
        proposal.linear.weight.mul_(4)
        q = fqf.action_values(*fqf.staircase(network, proposal, torch.tensor(obs).float()))
        network.output.bias -= q.mean(dim=0)
        _, quantiles = fqf.staircase(network, proposal, torch.tensor(obs).float())
    checkpoint, path = load(walk.run_dir), f"{walk.run_dir}/checkpoint.pt"
    checkpoint |= {"network": network.state_dict(), "proposal": proposal.state_dict()}
    torch.save(checkpoint, path)
    parameters = doubles(network), doubles(proposal)
    expected = [5 + best_action_by_hand(*parameters, torch.tensor(row)) for row in obs]
    assert fqf.load_policy(path, device="cpu")(obs).tolist() == expected
    assert set(expected) == {5, 6, 7}
    assert (quantiles.mean(dim=1).argmax(dim=1) + 5).tolist() != expected


# ---- draws


class Uniform:
    """In place of torch.rand: these numbers."""

    def __init__(self, monkeypatch, numbers):
        numbers = torch.as_tensor(numbers, dtype=torch.float64)
        monkeypatch.setattr(fqf.torch, "rand", lambda *_, **__: numbers)


def buffer_of(priority):
    buffer = fqf.Buffer(len(priority), (1,), 1)
    buffer.size, buffer.columns["priority"][:] = len(priority), priority
    return buffer


@pytest.mark.parametrize("capacity", [3, 10, 37])
def test_F10_slots_are_drawn_in_proportion_to_their_priority(capacity, monkeypatch):
    """An even grid of numbers in [0, 1) meets each slot as often as its share says, to within 1."""
    rng = np.random.default_rng(0)
    priority = rng.exponential(size=capacity)
    priority[rng.integers(capacity)] = 0
    Uniform(monkeypatch, torch.full((100_000,), 0.5))
    slots, probability = buffer_of(priority).draw(100_000, seeded(0))
    counts = np.bincount(slots, minlength=capacity)
    np.testing.assert_allclose(counts, 100_000 * priority / priority.sum(), atol=1.01)
    np.testing.assert_allclose(probability, (priority / priority.sum())[slots])


def test_F10_a_slot_of_zero_is_never_drawn(monkeypatch):
    """Not by rounding either: at both ends of each part of [0, 1), with priorities of any size."""
    rng = np.random.default_rng(0)
    for edge in (0.0, np.nextafter(0, 1), np.nextafter(1, 0), 1.0):
        for _ in range(50):
            capacity = int(rng.integers(2, 70))
            priority = 10.0 ** rng.uniform(-6, 6, capacity) * (rng.random(capacity) < 0.4)
            priority[rng.integers(capacity)] = 1.0
            Uniform(monkeypatch, torch.full((64,), edge))
            slots, _ = buffer_of(priority).draw(64, seeded(0))
            assert slots.max() < capacity and (priority[slots] > 0).all()


# ---- buffer


class History:
    """Episodes of random lengths, remembered as the environment shows them: whole stacks, padded
    with the first frame. One entry per observation; the last of an episode has no action."""

    def __init__(self, obs_shape, *buffers):
        self.rng, self.obs_shape, self.buffers = np.random.default_rng(0), obs_shape, buffers
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
        first, after = self.shown[k], self.shown[k + m]
        assert after["age"] == first["age"] + m  # of the same episode
        return first["obs"], first["action"], total, gamma**m, after["obs"], row["terminated"]


def seeded(seed):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("obs_shape", [(3,), (4, 5, 5)], ids=["vector", "stack"])
@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.parametrize("capacity", [8, 13, 40, 1000])
def test_S2_S5_S7_ring_by_brute_force(obs_shape, n_steps, capacity):
    """Every draw is what the environment showed, and everything that is whole is drawn."""
    stack_size = obs_shape[0] if len(obs_shape) > 1 else 1
    buffer, generator, ends = fqf.Buffer(capacity, obs_shape, stack_size), seeded(0), set()
    history = History(obs_shape, buffer)
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
        shown, newest = history.shown, len(history.shown) - 1
        ends |= {shown[k]["terminated"] for k in numbers if shown[k]["done"]}
        if step % 10 == 0:
            lost = newest - capacity  # the last one that was overwritten
            acted = [k for k in range(max(0, lost + 1), newest) if "action" in shown[k]]
            whole = {k for k in acted if k - min(stack_size - 1, shown[k]["age"]) > lost}
            assert {k for k in acted if k - stack_size + 1 > lost} <= set(numbers) <= whole
    assert ends == {True, False}  # both kinds were drawn
    assert len(history.shown) > 160 and buffer.size == min(capacity, len(history.shown))


def test_state_of_a_ring_is_no_larger_than_what_it_holds():
    """A view of a large array would take all of it into the file."""
    buffer = fqf.Buffer(1_000_000, (3,), 1)
    history = History((3,), buffer)
    for _ in range(20):
        history.step()
    state, num_frames, file = buffer.state_dict(), len(history.shown), io.BytesIO()
    tensors = {name: x for name, x in state.items() if isinstance(x, torch.Tensor)}
    assert tensors.keys() == buffer.columns.keys()
    assert {len(x) for x in tensors.values()} == {num_frames}
    torch.save(state, file)
    assert len(file.getvalue()) < 10_000


def test_memory_of_a_million_frames_is_on_the_page():
    num_bytes = sum(x.nbytes for x in fqf.Buffer(1_000, (4, 84, 84), 4).columns.values())
    assert f"million frames take {1_000 * num_bytes / 1e9:.1f} GB" in PAGE.read_text()


def test_frames_of_a_game_are_stored_once():
    """84 x 84 bytes a step and some for the rest; stacks as obs and next_obs would take 8 times."""
    buffer = fqf.Buffer(4096, (4, 84, 84), 4)
    assert buffer.columns["frame"].dtype == np.uint8
    per_step = sum(column.nbytes for column in buffer.columns.values()) / 4096
    assert 84 * 84 < per_step < 84 * 84 + 40
    assert f"{1e6 * per_step / 1e9:.1f} GB" in PAGE.read_text()


@pytest.fixture
def filled():
    """A ring that has wrapped, with priorities of many sizes; the slots that can be drawn."""
    buffer, rng = fqf.Buffer(50, (3,), 1), np.random.default_rng(2)
    history = History((3,), buffer)
    for _ in range(80):
        history.step()
    drawable = np.flatnonzero(buffer.columns["priority"])
    buffer.set_priority(drawable, 10.0 ** rng.uniform(-2, 1, len(drawable)))
    return buffer, drawable, history


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_F10_weights_make_up_for_the_priorities(filled, beta):
    """(N P_i)^-beta over the largest in the batch, P being the share of all that can be drawn."""
    buffer, drawable, _ = filled
    priority = buffer.columns["priority"]
    share = priority[drawable] / priority.sum()
    slots, weight = buffer.sample(32, 1, 0.9, beta, seeded(0))[:2]
    raw = [(len(drawable) * share[list(drawable).index(slot)]) ** -beta for slot in slots]
    torch.testing.assert_close(weight.double(), torch.tensor(raw) / max(raw), rtol=1e-5, atol=0)
    assert weight.max() == 1 and weight.dtype == torch.float32
    assert beta == 0 or weight.min() < 0.7


def test_F10_with_beta_1_weighted_means_are_those_of_the_buffer(filled):
    """Without weights, what is drawn often counts too much: f is large there."""
    buffer, drawable, history = filled
    values = {slot: history.shown[history.number(slot, 50)]["reward"] for slot in drawable}
    f = {slot: value + buffer.columns["priority"][slot] for slot, value in values.items()}
    slots, weight = buffer.sample(50_000, 1, 0.9, 1.0, seeded(0))[:2]
    drawn, expected = np.array([f[slot] for slot in slots]), np.mean(list(f.values()))
    weighted = (weight.numpy() * drawn).sum() / weight.numpy().sum()
    assert weighted == pytest.approx(expected, abs=0.02)
    assert abs(drawn.mean() - expected) > 0.5


def test_F10_new_steps_have_the_largest_priority_so_far():
    buffer = fqf.Buffer(50, (3,), 1)
    history = History((3,), buffer)
    history.steps_left = 20
    history.step()
    assert buffer.columns["priority"][:2].tolist() == [1, 0]  # the newest has no action yet
    history.step()
    buffer.set_priority(np.array([0, 1]), np.array([7.5, 0.2]))
    history.step()
    assert buffer.columns["priority"][:4].tolist() == [7.5, 0.2, 7.5, 0]
    buffer.set_priority(np.arange(3), np.full(3, 0.1))
    history.step()
    np.testing.assert_allclose(buffer.columns["priority"][:5], [0.1, 0.1, 0.1, 7.5, 0])


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
        self.generator = seeded(common.second_seed(args.seed))
        self.shown, self.episode, self.num_updates, self.max_priority = [], 0, 0, 1.0

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
                action = best_action_by_hand(self.online, self.proposal, self.shown[-1]["obs"])
            obs, reward, terminated, truncated, _ = self.env.step(5 + action)
            done, reward = terminated or truncated, np.float32(reward).item()
            self.shown[-1] |= {"action": action, "reward": reward, "priority": self.max_priority}
            self.shown[-1] |= {"terminated": terminated, "done": done}
            self.show(obs)
            if done:
                self.reset()
            if step > args.learning_starts and step % args.train_frequency == 0:
                self.update(step)

    def reset(self):
        """Episode k starts from the seed that (seed, k) makes, whatever came before it."""
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
        args, total, m, num = self.args, 0.0, 0, self.args.num_fractions
        while True:
            row = self.shown[k + m]
            total += args.gamma**m * row["reward"]
            m += 1
            if row["done"] or m == args.n_steps or k + m == len(self.shown) - 1:
                break
        after, total = self.shown[k + m]["obs"], np.float32(total).item()
        discount = np.float32(args.gamma**m).item()
        tau, quantiles = staircase_by_hand(self.target, self.proposal, after)
        chooser = self.online if args.double_q else self.target
        action = best_action_by_hand(chooser, self.proposal, after)
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
        weights = scaled_share ** -(args.priority_beta * (1 - progress) + progress)
        weights = (weights / weights.max()).astype(np.float32).astype(np.float64)
        quantile_loss, fraction_loss, priorities = 0.0, 0.0, []
        for k, weight in zip(drawn, weights):
            y, y_weights = self.targets(k)
            psi = features_by_hand(self.online, self.shown[k]["obs"])
            action = self.shown[k]["action"]
            tau, entropy = fractions_by_hand(self.proposal, psi)
            at = [each.item() for each in tau]
            middle = [(at[i] + at[i + 1]) / 2 for i in range(num)]
            f_hat = [quantiles_by_hand(self.online, psi, t)[action] for t in middle]
            f_edge = [quantiles_by_hand(self.online, psi, t)[action].item() for t in at[1:-1]]
            errors = []
            for i, j in itertools.product(range(num), range(num)):
                delta = y[j] - f_hat[i]
                loss = y_weights[j] * tilted(delta, middle[i], args.kappa)
                quantile_loss += weight * loss / args.batch_size
                errors.append(y_weights[j] * abs(delta.item()) / num)
            for i in range(1, num):
                below = abs(f_edge[i - 1] - f_hat[i - 1].item())
                above = abs(f_edge[i - 1] - f_hat[i].item())
                fraction_loss += weight * (below - above) * tau[i] / args.batch_size
            fraction_loss -= args.entropy_coef * entropy / args.batch_size
            priorities.append((sum(errors) + 1e-6) ** args.priority_alpha)

        self.step(self.quantile_opt, quantile_loss, args.learning_rate)
        if args.learn_fractions:
            self.step(self.fraction_opt, fraction_loss, args.fraction_learning_rate)
        if args.prioritized:
            for k, priority in zip(drawn, priorities):
                self.shown[k]["priority"] = priority
            self.max_priority = max(self.max_priority, *priorities)
        if self.num_updates % args.target_interval == 0:
            self.target = {name: x.detach().clone() for name, x in self.online.items()}

    def step(self, opt, loss, rate):
        args, last = self.args, fqf.count_blocks(self.args)
        schedule = self.num_updates, last, args.lr_schedule, args.warmup_updates
        opt.param_groups[0]["lr"] = rate * common.lr_factor(*schedule)
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


VARIANTS = {
    "plain": {},
    "rainbow": {"double_q": True, "n_steps": 3, "prioritized": True, "priority_beta_steps": 45}
    | {"weight_targets_by_fraction": True, "buffer_capacity": 17, "kappa": 0.4},
    "qr-dqn": {"learn_fractions": False, "n_steps": 2},
    "schedule": {"lr_schedule": "linear", "warmup_updates": 4, "train_frequency": 2}
    | {"total_timesteps": 82},
    "small-ring": {"buffer_capacity": 13, "target_interval": 1, "kappa": 1.0},
}


@pytest.mark.parametrize("flags", VARIANTS.values(), ids=VARIANTS)
def test_F8_whole_loop_by_hand(walk, in_doubles, flags):
    """Terminated and truncated episodes, every draw, both optimisers, the target network, and
    targets at the fractions that the online proposal makes of the target network's features."""
    args = replace(walk, **{"total_timesteps": 120} | LOUD | flags)
    fqf.train(args)
    hand, start = ByHand(args), ByHand(args)
    hand.run()
    checkpoint = load(args.run_dir)
    ends = {row["terminated"] for row in hand.shown if row.get("done")}
    assert ends == {True, False} and checkpoint["num_updates"] == hand.num_updates >= 38
    kept = checkpoint["buffer"]["frame"]
    expected = torch.empty_like(kept)
    for k in range(len(hand.shown) - len(kept), len(hand.shown)):
        expected[k % args.buffer_capacity] = hand.shown[k]["obs"]
    assert torch.equal(kept, expected)
    for name, mine in (("network", "online"), ("target_network", "target"), ("proposal",) * 2):
        for key, wanted in getattr(hand, mine).items():
            actual = checkpoint[name][key]
            torch.testing.assert_close(actual, wanted.detach(), rtol=1e-6, atol=1e-8)
    # both moved, so that agreement means something
    for name in ("online", "proposal"):
        pairs = zip(getattr(hand, name).values(), getattr(start, name).values())
        moved = max((after - before).abs().max().item() for after, before in pairs)
        assert (moved > 0.02) == (name == "online" or args.learn_fractions)


def test_blocks_of_updates_are_counted_one_by_one():
    for starts, every, last in itertools.product(range(9), range(1, 6), (1, 7, 8, 60)):
        args = fqf.Args(learning_starts=starts, train_frequency=every, total_timesteps=last)
        expected = sum(step > starts and step % every == 0 for step in range(1, last + 1))
        assert fqf.count_blocks(args) == expected


def test_F3_S9_each_loss_trains_its_own_parameters(walk, spy, monkeypatch):
    """In the run itself: neither loss reaches the other's parameters, nothing reaches the target
    network, and what the optimisers find is the gradient of one loss and of one batch. (Without
    priorities every weight is 1, and without a coefficient the entropy has no gradient.)"""
    owners = {"quantile_huber_loss": "QuantileNetwork", "fraction_loss": "FractionProposal"}
    made, targets, expected = {name: spy(name) for name in owners.values()}, spy("deepcopy"), {}

    def watch(name, loss_function):
        def watched(*args):
            loss = loss_function(*args)
            for owner, calls in made.items():
                parameters = list(calls[0][-1].parameters())
                options = {"retain_graph": True, "allow_unused": True}
                gradients = torch.autograd.grad(loss.mean(), parameters, **options)
                if owner == owners[name]:
                    expected[name] = list(zip(parameters, gradients))
                else:
                    assert all(gradient is None for gradient in gradients)
            return loss

        monkeypatch.setattr(fqf, name, watched)

    for name in owners:
        watch(name, getattr(fqf, name))
    fqf.train(replace(walk, entropy_coef=0.0))
    assert expected.keys() == owners.keys()
    for parameter, gradient in itertools.chain(*expected.values()):
        assert gradient.abs().sum() > 0
        torch.testing.assert_close(parameter.grad, gradient)
    assert all(parameter.grad is None for parameter in targets[0][-1].parameters())


def test_F1_the_learning_rate_of_the_fractions(walk, tmp_path):
    """The paper's does nothing in a short run; a larger one does, the other rate being the same."""
    lost = {}
    for rate in (2.5e-9, 1e-2):
        args = replace(walk, fraction_learning_rate=rate, run_dir=str(tmp_path / str(rate)))
        args = replace(args, env_id="Choice-v0", hidden_dim=64, total_timesteps=120, log_interval=1)
        fqf.train(args)
        lost[rate] = math.log(4) - np.array(list(metrics(args, "stats/fraction_entropy").values()))
        assert len(lost[rate]) == 38
    assert (lost[2.5e-9] < 1e-4).all()  # as the weights start, all but equal
    assert lost[1e-2].max() > 3e-3


def test_F2_a_larger_entropy_coefficient_keeps_more_entropy(walk, tmp_path):
    lost = []  # of log 4, which equal steps have
    for coef in (0.0, 0.3, 10.0):
        args = replace(walk, **LOUD | {"entropy_coef": coef}, run_dir=str(tmp_path / str(coef)))
        fqf.train(args)
        lost.append(math.log(4) - metrics(args, "stats/fraction_entropy")[60])
    assert lost[0] > 1.5 * lost[1] and lost[1] > 10 * lost[2]


@pytest.fixture
def prioritized(walk, spy):
    """A run with priorities, and what its 18 updates saw: step, weights, and loss by loss."""
    samples, updates = (spy(name, fqf.Buffer) for name in ("sample", "set_priority"))
    losses = spy("quantile_huber_loss"), spy("fraction_loss")
    flags = {"prioritized": True, "priority_alpha": 0.7, "priority_beta_steps": 40}
    flags |= {"num_fractions": 5, "weight_targets_by_fraction": True, "log_interval": 1}
    args = replace(walk, **LOUD | flags)
    fqf.train(args)
    assert len(samples) == len(updates) == 18
    return args, list(zip(range(9, 61, 3), samples, updates, *losses, strict=True))


def test_F10_priorities_are_mean_errors_and_beta_comes_to_1(prioritized):
    """(mean over i, and over j as wide as its stair, of |delta_ij|, + 1e-6)^alpha, for the slots
    that were drawn."""
    for step, sample, (_, slots, priority, _), loss, _ in prioritized[1]:
        quantiles, _, target, target_weight, *_ = loss
        assert sample[4] == pytest.approx(min(1, 0.4 + 0.6 * step / 40))
        assert slots.tolist() == sample[-1][0].tolist()
        for b in range(6):
            stairs = list(zip(target[b].tolist(), target_weight[b].tolist()))
            errors = [w * abs(y - f) / 5 for y, w in stairs for f in quantiles[b].tolist()]
            assert priority[b] == pytest.approx((sum(errors) + 1e-6) ** 0.7, rel=1e-5)


def test_F10_importance_weights_are_on_both_losses_but_not_on_the_entropy(prioritized):
    args, rows = prioritized
    entropy = metrics(args, "stats/fraction_entropy")
    for step, sample, _, (*_, quantile_loss), (*_, fraction_loss) in rows:
        weight = sample[-1][1].tolist()
        pairs = [zip(weight, loss.tolist()) for loss in (quantile_loss, fraction_loss)]
        weighted = [sum(w * x for w, x in pair) / 6 for pair in pairs]
        weighted[1] -= args.entropy_coef * entropy[step]
        logged = [metrics(args, f"losses/{name}")[step] for name in ("quantile", "fraction")]
        assert logged == pytest.approx(weighted, rel=1e-4, abs=1e-6)
    assert max(weight) == 1 and min(weight) < 0.9


def test_logged_statistics_are_what_they_say(prioritized):
    args, rows = prioritized
    epsilon = {step: max(0.2, 1 - 0.8 * step / 30) for step, *_ in rows}
    assert metrics(args, "stats/epsilon") == pytest.approx(epsilon)
    for step, sample, _, (quantiles, _, target, target_weight, _, _), (tau, *_) in rows[-3:]:
        tensors = (tau, quantiles, target, target_weight)
        tau, quantiles, target, target_weight = (x.detach().double().numpy() for x in tensors)
        width, weight = tau[:, 1:] - tau[:, :-1], sample[-1][1].tolist()
        q = [width[b] @ quantiles[b] for b in range(6)]
        falls = [right < left for row in quantiles for left, right in itertools.pairwise(row)]
        expected = {
            "charts/learning_rate": args.learning_rate,
            "stats/fraction_entropy": -(width * np.log(width)).sum(axis=1).mean(),
            "stats/fraction_min_width": width.min(),
            "stats/fraction_max_width": width.max(),
            "stats/q_mean": np.mean(q),
            "stats/q_max": np.max(q),
            "stats/target_mean": np.mean([target_weight[b] @ target[b] for b in range(6)]),
            "stats/quantile_spread": np.mean([row[-1] - row[0] for row in quantiles]),
            "stats/quantile_crossing": np.mean(falls),
            "stats/priority_beta": sample[4],
            "stats/importance_mean": np.mean(weight),
        }
        for key, value in expected.items():
            assert metrics(args, key)[step] == pytest.approx(value, rel=1e-4, abs=1e-6), key
    largest = max(1, *(priority.max() for _, _, (_, _, priority, _), *_ in rows))
    assert metrics(args, "stats/priority_max")[60] == pytest.approx(largest, rel=1e-5)


def test_one_fraction_is_enough(walk):
    """DQN with half its loss: one step from 0 to 1, and no edge that could move."""
    args = replace(walk, num_fractions=1, log_interval=1)
    fqf.train(args)
    assert set(metrics(args, "stats/fraction_entropy").values()) == {0}
    assert set(metrics(args, "losses/fraction").values()) == {0}


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


def assert_resumed(args, cut, tmp_path):
    """Stopped at a step and resumed, everything is as if it had never stopped; only the closing
    evaluation of the first part is one that the whole does not have. -> both checkpoints"""
    whole = replace(args, run_dir=str(tmp_path / "whole"))
    fqf.train(whole)
    fqf.train(replace(args, total_timesteps=cut))
    stopped = load(args.run_dir)
    fqf.train(replace(args, resume=args.run_dir))
    left, right = load(whole.run_dir), load(args.run_dir)
    for key in left.keys() - {"args", "log_position", "best_return", "evals_since_best"}:
        assert_equal(left[key], right[key], key)
    for key in ("charts/episodic_return", "losses/quantile", "stats/fraction_entropy"):
        assert metrics(args, key) == metrics(whole, key)
    return stopped, right


@pytest.mark.parametrize("cut", [7, 22, 23, 26, 42])
def test_S17_S18_resume_in_the_middle_of_an_episode(walk, tmp_path, cut):
    """With a full ring, its tree, and several steps to a target."""
    flags = {"buffer_capacity": 13, "prioritized": True, "n_steps": 3, "double_q": True}
    stopped, _ = assert_resumed(replace(walk, seed=2, learning_starts=3, **flags), cut, tmp_path)
    assert len(stopped["episode_actions"]) > 0


def test_S18_an_environment_that_ignores_its_seed_is_not_resumed_in_silence(walk):
    """It would show another observation than the one that the run was at."""
    fqf.train(walk)
    checkpoint = load(walk.run_dir)
    checkpoint["current_obs"][1] += 1e-6
    torch.save(checkpoint, f"{walk.run_dir}/checkpoint.pt")
    with pytest.raises(common.InputError, match="plays another episode from the same seed"):
        fqf.train(replace(walk, resume=walk.run_dir, total_timesteps=70))


def test_random_steps_are_not_evaluated(walk):
    """The policy is the same as before: patience would run out."""
    args = replace(walk, eval_interval=5, learning_starts=15, train_frequency=4)
    fqf.train(replace(args, total_timesteps=33))  # a multiple of 5 up to 15 does not count
    assert list(metrics(args, "eval/return_mean")) == [0, 20, 25, 30, 33]


# ---- Atari


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


gym.register("ALE/FakeGame-v0", FakeGameEnv, max_episode_steps=10)


@pytest.fixture
def game(walk, monkeypatch):
    """A short run on images, without evaluations."""
    monkeypatch.setattr(common, "evaluate", lambda *_, **__: np.zeros(1))
    return replace(walk, env_id="ALE/Breakout-v5", batch_size=2, total_timesteps=48)


@pytest.fixture
def fake_game(game, monkeypatch):
    """On stacks of images, without an emulator."""

    def make_env(env_id, **kwargs):
        return gym.wrappers.FrameStackObservation(common.make_env(env_id, **kwargs), 4)

    monkeypatch.setattr(fqf, "make_env", make_env)
    return replace(game, env_id="ALE/FakeGame-v0", total_timesteps=40)


def test_rewards_of_games_are_stored_as_signs_and_logged_as_they_are(fake_game):
    fqf.train(fake_game)
    ring = load(fake_game.run_dir)["buffer"]
    acted = ring["priority"] > 0
    assert acted.sum() == 40
    signs = torch.tensor([-1.0, 0, 1, 0])[ring["age"] % 4]
    assert torch.equal(ring["reward"][acted], signs[acted])
    returns, expected, last = metrics(fake_game, "charts/episodic_return"), {}, 0
    for step in (ring["done"][acted].nonzero()[:, 0] + 1).tolist():
        expected[step] = float(sum((-3, 0, 7, 0)[t % 4] for t in range(step - last)))
        last = step
    assert returns == expected and len(returns) > 2


@pytest.mark.parametrize("n_steps", [1, 3])
def test_the_smallest_ring_always_has_a_transition(fake_game, spy, n_steps):
    """A stack needs 4 frames and a transition n more; one slot less could be left without any."""
    samples = spy("sample", fqf.Buffer)
    args = replace(fake_game, buffer_capacity=4 + n_steps, n_steps=n_steps, learning_starts=0)
    with pytest.raises(common.InputError, match="buffer_capacity must be"):
        fqf.train(args)
    fqf.train(replace(args, buffer_capacity=5 + n_steps, train_frequency=1))
    assert len(samples) == 40
    assert all(slots.max() < buffer.capacity for buffer, *_, (slots, *_) in samples)


def test_S15_a_greedy_run_on_images_acts_on_what_the_ring_gives_back(fake_game, spy):
    """The stack that acted, and the stack that the ring puts together for that slot."""
    acts, adds = spy("as_tensor"), spy("add_step", fqf.Buffer)
    fqf.train(replace(fake_game, epsilon_final=0.0, epsilon_steps=1, learning_starts=6))
    buffer = adds[0][0]
    assert len(acts) == 34  # every step after the first six
    stacks = buffer.stack(np.flatnonzero(buffer.columns["priority"])[6:])
    assert stacks.dtype == acts[0][-1].dtype == torch.uint8
    assert torch.equal(stacks, torch.cat([call[-1] for call in acts]))


class LivesEnv(gym.Env):
    """A game of which only the number of lives is known, before each step."""

    def __init__(self, lives):
        self.lives, self.ale, self.actions = lambda: lives[len(self.actions)], self, []

    def get_action_meanings(self):
        return ["NOOP", "UP", "FIRE", "DOWN"]

    def reset(self, seed=None, options=None):
        self.actions = []
        return 0, {}

    def step(self, action):
        self.actions.append(action)
        return 0, 0.0, False, False, {}


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
    env = common.FirstFire(inner)
    for _ in range(2):  # after a reset it begins again
        env.reset(seed=0)
        for _ in lives:
            env.step(0)
        assert inner.actions == expected


class ServedEnv(LivesEnv):
    """Three lives of four steps each; one sees the action that was played."""

    observation_space, action_space = gym.spaces.Box(0, 9, (1,)), gym.spaces.Discrete(4)
    spec = gym.envs.registration.EnvSpec("Served-v0")

    def __init__(self):
        super().__init__([3] * 4 + [2] * 4 + [1] * 4)

    def reset(self, seed=None, options=None):
        super().reset()
        return np.zeros(1, np.float32), {}

    def step(self, action):
        super().step(action)
        return np.full(1, action, np.float32), 0.0, len(self.actions) == 12, False, {}


def make_served_env(env_id, **kwargs):
    return common.FirstFire(ServedEnv())


def test_datasets_hold_the_actions_that_were_played(tmp_path):
    """FIRE where a life begins, not what the policy said: recorded, and of random steps."""
    rows = common.random_steps(make_served_env(""), 240, seed=0)
    assert rows["action"].tolist() == rows["next_obs"][:, 0].tolist()
    assert set(rows["action"]) == {0, 1, 2, 3} and (rows["action"].reshape(-1, 4)[:, :2] == 2).all()
    path = str(tmp_path / "recorded.npz")
    common.record(lambda obs: np.ones(len(obs), int), "", 2, 0, path, make_served_env)
    assert np.load(path)["actions"].tolist() == [2, 2, 1, 1] * 6


def test_the_replay_buffer_holds_the_actions_that_were_played(walk, monkeypatch):
    monkeypatch.setattr(fqf, "make_env", make_served_env)
    fqf.train(replace(walk, learning_starts=40))
    ring = load(walk.run_dir)["buffer"]
    slots = (ring["priority"] > 0).nonzero()[:, 0]
    assert len(slots) == 60 and torch.equal(
        ring["action"][slots], ring["frame"][slots + 1, 0].long()
    )
    assert (ring["action"][slots].view(-1, 4)[:, :2] == 2).all()


@pytest.fixture(scope="module")
def breakout():
    pytest.importorskip("ale_py")
    pytest.importorskip("cv2")
    return fqf.make_env("ALE/Breakout-v5")


def fire_layer(env):
    """The wrapper that serves, or None."""
    while env is not env.unwrapped:
        if isinstance(env, common.FirstFire):
            return env
        env = env.env


def test_atari_observations(breakout):
    assert common.check_spaces(breakout, "discrete", True) == ((4, 84, 84), 4, True)
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
    for seed in range(6):
        breakout.reset(seed=seed)
        counts.append(breakout.unwrapped.ale.getEpisodeFrameNumber())
    assert 1 <= min(counts) <= 8 and 23 <= max(counts) <= 30


def test_breakout_is_served_by_itself(breakout, monkeypatch):
    """A policy that does nothing loses its five lives in some hundred steps, not never."""
    inner, taken = fire_layer(breakout).env, []
    assert breakout.unwrapped.get_action_meanings()[1] == "FIRE"

    def watched(action, step=inner.step):
        taken.append((breakout.unwrapped.ale.lives(), action))
        return step(action)

    monkeypatch.setattr(inner, "step", watched)
    breakout.reset(seed=3)
    terminated = False
    while not terminated and len(taken) < 2000:
        _, _, terminated, _, _ = breakout.step(0)
    assert terminated
    lives, actions = zip(*taken)
    starts = [0] + [t for t in range(1, len(lives)) if lives[t] < lives[t - 1]]
    assert len(starts) == 5
    assert list(actions) == [int(t in starts or t - 1 in starts) for t in range(len(lives))]


def test_a_game_without_fire_is_left_alone():
    pytest.importorskip("ale_py")
    env = fqf.make_env("ALE/Freeway-v5")
    assert "FIRE" not in env.unwrapped.get_action_meanings() and fire_layer(env) is None
    assert common.check_spaces(env, "discrete", True)[0] == (4, 84, 84)


def test_a_game_that_cannot_wait_is_refused_in_one_line():
    """Two games have no idle action, which the start of an episode needs."""
    pytest.importorskip("ale_py")
    with pytest.raises(common.InputError, match="ALE/Backgammon-v5") as refusal:
        fqf.make_env("ALE/Backgammon-v5")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("package", ["ale_py", "cv2"])
def test_a_game_without_its_packages_is_refused(package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(common.InputError, match=f"{package} is missing: pip install ale-py"):
        fqf.make_env("ALE/Breakout-v5")


def test_S18_breakout_resumed_is_breakout_as_it_would_have_been(game, breakout, tmp_path):
    """A ring that has wrapped; its single frames make the stacks that the game showed when these
    actions were played."""
    args = replace(game, buffer_capacity=30)
    stopped, resumed = assert_resumed(args, 35, tmp_path)
    assert len(stopped["episode_actions"]) == 35
    buffer = fqf.Buffer(30, (4, 84, 84), 4)
    buffer.load_state_dict(resumed["buffer"])
    obs, _ = common.start_episode(breakout, args.seed, 0, [])
    shown = [obs] + [breakout.step(action)[0] for action in resumed["episode_actions"].numpy()]
    slots = np.flatnonzero(buffer.columns["priority"])
    assert len(slots) == 30 - 4
    for slot, stack in zip(slots, buffer.stack(slots).numpy()):
        np.testing.assert_array_equal(stack, shown[buffer.columns["age"][slot]])


# ---- MinAtar


@pytest.fixture
def minatar(walk, monkeypatch):
    """A short run on [4, 10, 10] images, without evaluations."""
    pytest.importorskip("minatar")
    monkeypatch.setattr(common, "evaluate", lambda *_, **__: np.zeros(1))
    return replace(walk, env_id="MinAtar/Breakout-v1")


def test_minatar_images_have_their_channels_first():
    """0 or 255 where the game says False or True; not stacked: a channel shows the trail."""
    pytest.importorskip("minatar")
    env = fqf.make_env("MinAtar/Breakout-v1")
    obs, _ = env.reset(seed=0)
    assert common.check_spaces(env, "discrete", True) == ((4, 10, 10), 3, True)
    for action in (0, 1, 2, 1):
        assert obs.dtype == np.uint8 and env.observation_space.contains(obs)
        np.testing.assert_array_equal(obs, 255 * env.unwrapped.game.state().transpose(2, 0, 1))
        obs = env.step(action)[0]
    assert set(np.unique(obs)) == {0, 255}


def test_the_network_of_small_images_by_hand():
    """One convolution of 3 x 3 and one layer, as in MinAtar's paper; the rest as for vectors."""
    network = fqf.QuantileNetwork((4, 10, 10), 3, 16, 8)
    shapes = [tuple(x.shape) for x in network.torso.parameters()]
    assert shapes == [(16, 4, 3, 3), (16,), (16, 16 * 8 * 8), (16,)] and network.feature_dim == 16
    images = 255 * torch.randint(2, (3, 4, 10, 10), dtype=torch.uint8)
    patches = (images.double() / 255).unfold(2, 3, 1).unfold(3, 3, 1)  # [B, C, 8, 8, 3, 3]
    p = doubles(network)
    hidden = torch.einsum("bcxyij,kcij->bkxy", patches, p["torso.0.weight"])
    hidden = torch.relu(hidden + p["torso.0.bias"][:, None, None]).flatten(1)
    expected = torch.relu(hidden @ p["torso.3.weight"].T + p["torso.3.bias"])
    torch.testing.assert_close(network.features(images).double(), expected, rtol=1e-4, atol=1e-5)


def test_S18_minatar_resumed_is_minatar_as_it_would_have_been(minatar, tmp_path):
    """Frames are whole observations, C channels, in a ring that has wrapped."""
    _, resumed = assert_resumed(replace(minatar, buffer_capacity=30), 35, tmp_path)
    assert resumed["buffer"]["frame"].shape == (30, 4, 10, 10)
    assert resumed["buffer"]["reward"].min() >= 0


# ---- pictures


def test_quantile_at_by_hand():
    """Steps in the order of their height: 1 up to 0.3, 2 up to 0.8, then 3."""
    tau = np.array([[0, 0.2, 0.5, 1.0], [0, 0.1, 0.2, 1.0]])
    quantiles = np.array([[3.0, 1.0, 2.0], [1.0, 2.0, 3.0]])
    heights = {0.05: [1, 1], 0.15: [1, 2], 0.29: [1, 3], 0.31: [2, 3], 0.79: [2, 3]}
    for share, expected in (heights | {0.81: [3, 3], 1.0: [3, 3]}).items():
        assert distributions.quantile_at(tau, quantiles, share).tolist() == expected


@pytest.mark.parametrize("num_fractions", [4, 1])
def test_plot_is_a_picture_next_to_the_checkpoint(walk, monkeypatch, run, num_fractions):
    """Of the episode of that seed, as the policy plays it; with one fraction, without edges."""
    fqf.train(replace(walk, eval_interval=60, num_fractions=num_fractions, **LOUD))
    shares = spy_on(monkeypatch, distributions)("quantile_at")
    path, picture = f"{walk.run_dir}/best.pt", Path(walk.run_dir, "distributions.png")
    code, out, _ = run("--evaluate", path, "--plot", "--no-quiet", "--eval-seed", 7)
    assert code == 0 and f"drawn in {picture}" in out
    data = picture.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", data[16:24]) == (1200, 900)
    assert 20_000 < len(data) < 1_000_000

    policy, env = fqf.load_policy(path, device="cpu"), fqf.make_env(walk.env_id)
    network, proposal, _, _ = fqf.load_networks(path, device="cpu")
    obs, done, seen = env.reset(seed=7)[0], False, []
    while not done:
        seen.append(obs)
        obs, _, terminated, truncated, _ = env.step(policy(obs[None])[0])
        done = terminated or truncated
    with torch.no_grad():
        tau, quantiles = fqf.staircase(network, proposal, torch.tensor(np.stack(seen)).float())
    assert [share for _, _, share, _ in shares] == [0.1, 0.9] * 3
    for number, (drawn_tau, drawn_quantiles, _, _) in enumerate(shares):
        np.testing.assert_allclose(drawn_tau, tau, atol=1e-5)
        np.testing.assert_allclose(drawn_quantiles, quantiles[:, :, number // 2], atol=1e-4)


def test_plot_without_its_package_is_refused(walk, monkeypatch, run):
    fqf.train(walk)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, _, err = run("--evaluate", f"{walk.run_dir}/checkpoint.pt", "--plot")
    assert code == 2 and "pip install matplotlib" in err


def test_the_command_of_the_docstring_is_the_set_of_the_paper():
    """Whatever the defaults are: the paper's numbers, and those that only the authors' code has."""
    command = fqf.__doc__.split("python algos/fqf.py")[-1].replace("\\\n", " ")
    args = tyro.cli(fqf.Args, args=shlex.split(command))
    fqf.check_args(args)
    expected = {"num_fractions": 32, "num_cosines": 64, "kappa": 1.0, "hidden_dim": 512}
    expected |= {"learning_rate": 5e-5, "fraction_learning_rate": 2.5e-9, "batch_size": 32}
    expected |= {"gamma": 0.99, "n_steps": 1, "lr_schedule": "constant", "epsilon_final": 0.01}
    expected |= {"double_q": False, "prioritized": False, "weight_targets_by_fraction": False}
    expected |= {"buffer_capacity": 1_000_000, "learning_starts": 50_000, "train_frequency": 4}
    expected["target_interval"] = 10_000 // 4  # updates, where the paper counts steps
    assert {name: getattr(args, name) for name in expected} == expected
    assert fqf.ADAM_EPS / args.batch_size == 0.01 / 32
    assert fqf.RMSPROP == {"alpha": 0.95, "eps": 1e-5}
