"""MBPO: model, fits, rollouts, buffers and loop against numbers worked out by other means."""

import inspect
import itertools
import math
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
import tyro
from conftest import load, tiny_args
from torch import nn

import common
from algos import mbpo

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def algo():
    return mbpo


@pytest.fixture
def walk(tmp_path):
    """A run in the environment where every step depends on seed and actions: fits at 4, 9, 14..."""
    args = tiny_args(mbpo, None, tmp_path / "run")
    return replace(args, env_id="Walk-v0", total_timesteps=30)


@pytest.fixture
def spy(monkeypatch):
    """Keep the arguments and the result of every call of a function of mbpo.py."""

    def install(name):
        calls, original = [], getattr(mbpo, name)

        def spied(*args, **named):
            result = original(*args, **named)
            calls.append((*inspect.signature(original).bind(*args, **named).args, result))
            return result

        monkeypatch.setattr(mbpo, name, spied)
        return calls

    return install


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def make_model(num_members=3, num_elites=2, learns_end=False, hidden_dim=8, noise=0.3):
    """Of two observations and one action. Biases and bounds start at constants, which hide
    mistakes."""
    torch.manual_seed(0)
    model = mbpo.Dynamics(num_members, num_elites, 2, 1, hidden_dim, learns_end)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn(parameter.shape))
    return model


def make_rows(num_rows, seed=0):
    """Transitions of two observations and one action. [n, 8]"""
    rng = np.random.default_rng(seed)
    obs, next_obs = rng.normal(2, 3, (num_rows, 2)), rng.normal(0, 1, (num_rows, 2))
    action, reward = rng.uniform(-1, 1, num_rows), rng.normal(5, 2, num_rows)
    end = rng.random(num_rows) < 0.3
    return mbpo.as_rows(obs, action, reward, next_obs, end, np.zeros(num_rows))


def filled(rows, capacity=None):
    buffer = mbpo.Buffer(capacity or len(rows), 2, 1, CPU)
    for row in rows:
        buffer.add(row[None])
    return buffer


def fit_args(**flags):
    small = {"num_members": 3, "num_elites": 2, "max_model_epochs": 3, "model_batch_size": 16}
    return mbpo.Args(**small | flags)


def member_of(model, i):
    """Slice i of the stack as an ordinary MLP with ordinary layers."""
    layers = []
    for stack in model.net[::2]:
        _, input_dim, output_dim = stack.weight.shape
        layers += [nn.Linear(input_dim, output_dim), nn.SiLU()]
        with torch.no_grad():
            layers[-2].weight.copy_(stack.weight[i].T)
            layers[-2].bias.copy_(stack.bias[i, 0])
    return nn.Sequential(*layers[:-1])


def bounded(raw, low, high):
    """bound_log_var once more, as log(e^low + 1 / (e^-raw + e^-high)), in double precision."""
    raw, low, high = (torch.as_tensor(x).double() for x in (raw, low, high))
    return torch.logaddexp(low, -torch.logaddexp(-raw, -high))


# ---- losses


def test_model_loss_is_minus_two_log_normal():
    """Element by element, against torch.distributions, and the penalty on the bounds."""
    mean, log_var, target = torch.randn(3, 3, 5, 4, dtype=torch.float64)
    low, high = torch.randn(2, 4, dtype=torch.float64)
    expected = 0.01 * sum(high.tolist()) - 0.01 * sum(low.tolist())
    for m in range(3):
        for b in range(5):
            for d in range(4):
                normal = torch.distributions.Normal(mean[m, b, d], (0.5 * log_var[m, b, d]).exp())
                density = normal.log_prob(target[m, b, d]).item()
                expected += (-2 * density - math.log(2 * math.pi)) / (5 * 4)
    loss = mbpo.mbpo_model_loss(mean, log_var, target, low, high)
    assert loss.item() == pytest.approx(expected, rel=1e-10)


def test_model_loss_is_a_sum_over_members():
    """Each gets the gradient that it would get alone: seven learn as fast as one."""
    mean, log_var = torch.randn(2, 4, 6, 3).requires_grad_()
    target, low, high = torch.randn(4, 6, 3), torch.full((3,), -2.0), torch.ones(3)
    loss = mbpo.mbpo_model_loss(mean, log_var, target, low, high)
    alone = [
        mbpo.mbpo_model_loss(mean[[m]], log_var[[m]], target[[m]], low, high) for m in range(4)
    ]
    penalty = 0.01 * 3 * 3
    torch.testing.assert_close(loss - penalty, sum(each - penalty for each in alone))
    (together,) = torch.autograd.grad(loss, mean, retain_graph=True)
    (single,) = torch.autograd.grad(alone[2], mean)
    torch.testing.assert_close(together[2], single[2])


def test_bounds_are_pulled_together():
    """By 0.01 each through the penalty; through the likelihood, as finite differences say."""
    raw = 3 * torch.randn(2, 5, 3, dtype=torch.float64)
    mean, target = torch.randn(2, 2, 5, 3, dtype=torch.float64)
    low = torch.tensor([-1.0, -2.0, 0.3], dtype=torch.float64, requires_grad=True)
    high = torch.tensor([0.5, 1.0, 0.9], dtype=torch.float64, requires_grad=True)
    loss = mbpo.mbpo_model_loss(mean, raw, target, low, high)
    for bound, slope in ((low, -0.01), (high, 0.01)):
        (grad,) = torch.autograd.grad(loss, bound, retain_graph=True)
        assert grad.tolist() == pytest.approx([slope] * 3)

    def whole(low, high):
        return mbpo.mbpo_model_loss(mean, mbpo.bound_log_var(raw, low, high), target, low, high)

    assert torch.autograd.gradcheck(whole, (low, high))


def test_termination_loss_by_hand():
    logit = torch.tensor([[0.0, 2.0, -1.0], [3.0, -3.0, 0.5]])
    end = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]])
    expected = 0.0
    for m in range(2):
        for b in range(3):
            p = 1 / (1 + math.exp(-logit[m, b].item()))
            expected -= math.log(p if end[m, b] else 1 - p) / 3  # mean of rows, sum of members
    assert mbpo.termination_loss(logit, end).item() == pytest.approx(expected)


def test_sac_loss_by_hand():
    """For each of the two critics half the mean square, as in SAC."""
    q, target = torch.tensor([[1.0, 2.0, 0.0], [3.0, 4.0, 1.0]]), torch.tensor([1.0, 0.0, 5.0])
    expected = 0.5 * (0 + 4 + 25) / 3 + 0.5 * (4 + 16 + 16) / 3
    assert mbpo.sac_loss(q, target).item() == pytest.approx(expected)


def test_actor_loss_is_of_the_lesser_critic():
    """In each row: its gradient goes to the smaller Q alone, -1 / B."""
    q = torch.tensor([[1.0, 5.0, -2.0, 0.0], [2.0, 3.0, -1.0, -4.0]], requires_grad=True)
    log_prob, alpha = torch.tensor([0.5, -1.0, 2.0, 0.0]), torch.tensor(0.3)
    loss = mbpo.sac_policy_loss(log_prob, q, alpha)
    loss.backward()
    assert loss.item() == pytest.approx((0.3 * (0.5 - 1 + 2) - (1 + 3 - 2 - 4)) / 4)
    assert q.grad.tolist() == [[-0.25, 0, -0.25, 0], [0, -0.25, 0, -0.25]]


def test_S8_no_broadcast():
    full, bound, rows = torch.zeros(3, 4, 2), torch.zeros(2), torch.zeros(3, 4)
    for call in (
        lambda: mbpo.mbpo_model_loss(full, full, full[:1], bound, bound),
        lambda: mbpo.mbpo_model_loss(full, full[:, :, :1], full, bound, bound),
        lambda: mbpo.mbpo_model_loss(full, full, full[:, :1], bound, bound),
        lambda: mbpo.mbpo_model_loss(full[0], full[0], full[0], bound, bound),
        lambda: mbpo.mbpo_model_loss(full, full, full, bound[:1], bound),
        lambda: mbpo.mbpo_model_loss(full, full, full, bound[:, None], bound[:, None]),
        lambda: mbpo.termination_loss(rows[..., None], rows),
        lambda: mbpo.termination_loss(rows[..., None], rows[..., None]),
        lambda: mbpo.termination_loss(rows, rows[:1]),
        lambda: mbpo.sac_loss(torch.zeros(2, 4), torch.zeros(4, 1)),
        lambda: mbpo.sac_loss(torch.zeros(2, 4), torch.zeros(2, 4)),
        lambda: mbpo.sac_loss(torch.zeros(2, 4, 1), torch.zeros(4, 1)),
        lambda: mbpo.sac_policy_loss(torch.zeros(4, 1), torch.zeros(2, 4), torch.tensor(1.0)),
        lambda: mbpo.sac_policy_loss(torch.zeros(4, 1), torch.zeros(2, 4, 1), torch.tensor(1.0)),
    ):
        with pytest.raises(AssertionError):
            call()


def test_S8_losses_are_means_of_rows():
    """A batch of N is the mean of N batches of one; permuting the targets alone changes it."""
    mean, log_var, target = torch.randn(3, 2, 6, 3)
    bounds = (torch.full((3,), -2.0), torch.ones(3))
    rows = [
        mbpo.mbpo_model_loss(mean[:, [b]], log_var[:, [b]], target[:, [b]], *bounds)
        for b in range(6)
    ]
    loss = mbpo.mbpo_model_loss(mean, log_var, target, *bounds)
    torch.testing.assert_close(loss, torch.stack(rows).mean())
    assert not torch.isclose(mbpo.mbpo_model_loss(mean, log_var, target.flip(1), *bounds), loss)
    logit, end = torch.randn(2, 6), torch.tensor([[1.0, 0, 0, 1, 0, 1], [0, 0, 1.0, 1, 0, 0]])
    rows = [mbpo.termination_loss(logit[:, [b]], end[:, [b]]) for b in range(6)]
    torch.testing.assert_close(mbpo.termination_loss(logit, end), torch.stack(rows).mean())
    q, goal = torch.randn(2, 6), torch.randn(6)
    rows = [mbpo.sac_loss(q[:, [b]], goal[[b]]) for b in range(6)]
    torch.testing.assert_close(mbpo.sac_loss(q, goal), torch.stack(rows).mean())
    assert mbpo.sac_loss(q, goal.flip(0)) != mbpo.sac_loss(q, goal)
    alpha = torch.tensor(0.7)
    rows = [mbpo.sac_policy_loss(goal[[b]], q[:, [b]], alpha) for b in range(6)]
    torch.testing.assert_close(mbpo.sac_policy_loss(goal, q, alpha), torch.stack(rows).mean())


# ---- networks


def test_log_var_stays_within_its_bounds():
    """For any input, in order, and by the closed form."""
    low, high = torch.tensor(-10.0), torch.tensor(0.5)
    raw = torch.cat([torch.tensor([-1e4]), torch.linspace(-40, 40, 801), torch.tensor([1e4])])
    log_var = mbpo.bound_log_var(raw, low, high)
    assert (log_var >= -10).all() and (log_var <= 0.5 + 1e-4).all()
    assert (log_var.diff() >= 0).all() and (log_var[300:500].diff() > 0).all()
    torch.testing.assert_close(log_var.double(), bounded(raw, low, high), rtol=1e-5, atol=1e-5)
    assert log_var[0] == -10 and log_var[-1].item() == pytest.approx(0.5, abs=1e-4)


def test_log_var_is_nearly_itself_well_inside():
    raw = torch.linspace(-15, 15, 100)
    low, high = torch.tensor(-25.0), torch.tensor(25.0)
    torch.testing.assert_close(mbpo.bound_log_var(raw, low, high), raw, rtol=0, atol=1e-4)


def test_log_var_has_a_gradient_outside_its_bounds():
    """Where a clip has none: the variance that once was too large would stay so."""
    raw = torch.tensor([-15.0, 5.0], requires_grad=True)
    mbpo.bound_log_var(raw, torch.tensor(-10.0), torch.tensor(0.5)).sum().backward()
    # sigmoid of the distance to the bound, times nearly 1
    expected = [1 / (1 + math.exp(5)), 1 / (1 + math.exp(4.5))]
    assert raw.grad.tolist() == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("learns_end", [False, True])
def test_each_member_is_an_ordinary_mlp(learns_end):
    """Four hidden layers with SiLU; first the means, then the log variances, then the logit."""
    model = make_model(learns_end=learns_end)
    inputs = torch.randn(3, 5, 3)  # each member has its own rows
    expected = torch.stack([member_of(model, m)(inputs[m]) for m in range(3)])
    assert expected.shape == (3, 5, 3 + 3 + learns_end) and len(member_of(model, 0)) == 9
    torch.testing.assert_close(model.net(inputs), expected, rtol=1e-4, atol=1e-5)
    mean, log_var, end_logit = model.heads(expected)
    assert torch.equal(mean, expected[..., :3]) and torch.equal(end_logit, expected[..., 6:])
    wanted = bounded(expected[..., 3:6], model.min_log_var, model.max_log_var)
    torch.testing.assert_close(log_var.double(), wanted, rtol=1e-4, atol=1e-4)


def test_members_share_nothing():
    """A loss of member 1 reaches its own slices alone."""
    model = make_model()
    mean, log_var, _ = model.heads(model.net(torch.randn(3, 5, 3)))
    (mean[1].sum() + log_var[1].sum()).backward()
    for parameter in model.net.parameters():
        assert parameter.grad[1].abs().sum() > 0
        assert parameter.grad[[0, 2]].abs().sum() == 0


def test_B5_initial_weights_are_a_truncated_normal():
    """Cut at two standard deviations of 1 / (2 sqrt(fan-in)), which leaves 0.88 of the std."""
    model = make_model(num_members=7, num_elites=5, hidden_dim=100, learns_end=True, noise=0)
    phi = math.exp(-2) / math.sqrt(2 * math.pi)
    left = math.sqrt(1 - 4 * phi / math.erf(math.sqrt(2)))
    assert left == pytest.approx(0.88, abs=1e-3)
    dims = [(3, 100), *3 * [(100, 100)], (100, 7)]
    for layer, (input_dim, output_dim) in zip(model.net[::2], dims, strict=True):
        assert layer.weight.shape == (7, input_dim, output_dim)
        std = 0.5 / math.sqrt(input_dim)
        assert 1.95 * std < layer.weight.abs().max() <= 2 * std * (1 + 1e-6)
        assert layer.weight.std().item() == pytest.approx(left * std, rel=0.05)
        assert layer.weight.mean().item() == pytest.approx(0, abs=0.06 * std)
        assert layer.bias.abs().max() == 0
        assert (
            len({weight.sum().item() for weight in layer.weight}) == 7
        )  # none starts like another
    assert model.min_log_var.tolist() == [-10] * 3 and model.max_log_var.tolist() == [0.5] * 3
    assert model.elites.tolist() == [0, 1, 2, 3, 4]


def test_weight_decay_is_part_of_the_gradient():
    """Adam by hand, on gradients as small as the decay: of W in layer l, decay_l W is added; of
    biases and bounds, nothing."""
    model = make_model()
    opt = model.optimizer(0.01)
    decays = {f"net.{2 * i}.weight": d for i, d in enumerate((2.5e-5, 5e-5, 7.5e-5, 7.5e-5, 1e-4))}
    assert all(f"net.{2 * i}.weight" in dict(model.named_parameters()) for i in range(5))
    expected = {}
    for name, parameter in model.named_parameters():
        expected[name] = x = parameter.detach().double().clone()
        grads = 1e-5 * torch.randn(4, *parameter.shape, generator=seeded())
        first, second = torch.zeros_like(x), torch.zeros_like(x)
        for t, grad in enumerate(grads.double(), start=1):
            grad = grad + decays.get(name, 0.0) * x
            first, second = 0.9 * first + 0.1 * grad, 0.999 * second + 0.001 * grad**2
            scale = (second / (1 - 0.999**t)).sqrt() + 1e-8
            x -= 0.01 * first / (1 - 0.9**t) / scale
    for t in range(4):
        for parameter in model.parameters():
            grads = 1e-5 * torch.randn(4, *parameter.shape, generator=seeded())
            parameter.grad = grads[t].clone()
        opt.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.double(), expected[name], rtol=1e-3, atol=1e-4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
            parameter.grad.zero_()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    model.optimizer(0.01).step()
    moved = {name for name, x in model.named_parameters() if not torch.equal(x, before[name])}
    assert moved == decays.keys()


@pytest.mark.parametrize("normalize_targets", [True, False])
def test_scales_are_mean_and_std_and_a_constant_has_std_one(normalize_targets):
    model = make_model()
    inputs, targets = torch.randn(50, 3) * 4 + 7, torch.randn(50, 3) * 0.1 - 3
    inputs[:, 1], targets[:, 2] = 0.1, 1 / 3
    model.set_scales(inputs, targets, normalize_targets)
    scaled_inputs, scaled_targets = model.scale(inputs, targets)
    table = inputs.double().numpy()
    for d in (0, 2):
        assert model.input_mean[d].item() == pytest.approx(table[:, d].mean(), rel=1e-5)
        assert model.input_std[d].item() == pytest.approx(table[:, d].std(ddof=1), rel=1e-5)
    assert model.input_std[1] == 1 and scaled_inputs[:, 1].abs().max() < 1e-6
    if normalize_targets:
        assert model.target_std[2] == 1 and scaled_targets[:, 2].abs().max() < 1e-6
        assert scaled_targets[:, :2].mean().item() == pytest.approx(0, abs=1e-4)
        std = scaled_targets[:, :2].std(dim=0)
        assert std.tolist() == pytest.approx([1, 1], rel=1e-4)
    else:
        assert model.target_mean.tolist() == [0] * 3 and model.target_std.tolist() == [1] * 3
        assert torch.equal(scaled_targets, targets)


def test_mse_is_of_the_mean_of_each_member():
    """Of what the networks see, whatever the variance."""
    model = make_model()
    inputs, targets = torch.randn(6, 3), torch.randn(6, 3)
    actual = model.mse(inputs, targets)
    for m in range(3):
        mean = member_of(model, m)(inputs)[:, :3].tolist()
        squares = [(mean[b][d] - targets[b, d].item()) ** 2 for b in range(6) for d in range(3)]
        assert actual[m].item() == pytest.approx(sum(squares) / 18, rel=1e-4)


@pytest.mark.parametrize("constant", [0.0, 0.1, -1 / 3, 1e-3, 12_345.678])
def test_a_column_that_is_constant_but_for_rounding_has_std_one(constant):
    """Divided by the std of its last bits, it would be noise as large as the signal; a column that
    moves by a hundredth of a percent is scaled as any other."""
    table = torch.full((1000, 3), constant)
    table[::2, 1] = torch.nextafter(table[::2, 1], torch.tensor(math.inf))
    table[::2, 2] += 1e-4 * max(abs(constant), 1e-3)
    model = make_model()
    model.set_scales(table, table, True)
    for std in (model.input_std, model.target_std):
        assert std[0] == 1 and (constant == 0 or std[1] == 1)
        assert std[2].item() == pytest.approx(0.5e-4 * max(abs(constant), 1e-3), rel=0.05)


# ---- samples of the model


def set_constant_outputs(model, outputs):
    """Member m gives outputs[m] for any input: means, raw log variances, and a logit."""
    with torch.no_grad():
        for parameter in model.net.parameters():
            parameter.zero_()
        model.net[-1].bias[:, 0] = torch.tensor(outputs)


def set_scales(model):
    """Some that tell each input and each output apart."""
    model.input_mean.copy_(torch.tensor([0.3, -1.0, 0.2]))
    model.input_std.copy_(torch.tensor([2.0, 0.5, 0.7]))
    model.target_mean.copy_(torch.tensor([0.1, -2.0, 3.0]))
    model.target_std.copy_(torch.tensor([1.5, 0.4, 10.0]))


@pytest.mark.parametrize("learns_end", [False, True])
def test_sample_by_hand(learns_end):
    """Row by row, with the member drawn for it: s' = s + change and r in the environment's units,
    reward first, as mean + std x noise."""
    model = make_model(num_members=4, num_elites=3, learns_end=learns_end)
    model.elites.copy_(torch.tensor([3, 0, 2]))
    set_scales(model)
    obs, action = torch.randn(20, 2), torch.randn(20, 1)
    reward, next_obs, end_logit = model.sample(obs, action, seeded())
    again = seeded()
    choice = torch.randint(3, (20,), generator=again).tolist()
    noise = torch.randn(20, 3, generator=again)
    assert set(choice) == {0, 1, 2}
    scales = (model.input_mean, model.input_std, model.target_mean, model.target_std)
    input_mean, input_std, target_mean, target_std = (x.tolist() for x in scales)
    for b in range(20):
        x = [*obs[b].tolist(), *action[b].tolist()]
        x = [(x[d] - input_mean[d]) / input_std[d] for d in range(3)]
        output = member_of(model, [3, 0, 2][choice[b]])(torch.tensor(x))
        std = (0.5 * bounded(output[3:6], model.min_log_var, model.max_log_var)).exp()
        y = [output[d].item() + std[d].item() * noise[b, d].item() for d in range(3)]
        y = [target_mean[d] + target_std[d] * y[d] for d in range(3)]
        assert reward[b].item() == pytest.approx(y[0], rel=1e-3, abs=1e-4)
        expected = [obs[b, 0].item() + y[1], obs[b, 1].item() + y[2]]
        assert next_obs[b].tolist() == pytest.approx(expected, rel=1e-3, abs=1e-3)
        assert end_logit[b].tolist() == pytest.approx(output[6:].tolist(), rel=1e-3, abs=1e-4)
    assert reward.shape == (20,) and end_logit.shape == (20, int(learns_end))


def test_B1_only_elites_make_rollouts():
    """Each row and each call draws one of them, all equally often; the others would answer NaN."""
    model = make_model(num_members=6, num_elites=3)
    set_constant_outputs(model, [[float(m), m, m, -1e4, -1e4, -1e4] for m in range(6)])
    model.elites.copy_(torch.tensor([4, 1, 3]))
    with torch.no_grad():
        model.min_log_var.fill_(-60.0)  # next to no noise
        for parameter in model.net.parameters():
            parameter[[0, 2, 5]] = math.nan
    generator, chosen = seeded(), []
    for _ in range(2):
        reward, next_obs, _ = model.sample(torch.zeros(3000, 2), torch.zeros(3000, 1), generator)
        chosen.append(reward.round())
        torch.testing.assert_close(next_obs, reward[:, None].expand(-1, 2))  # all of one member
        counts = {m: (chosen[-1] == m).sum().item() for m in range(6)}
        assert all(counts[m] == pytest.approx(1000, abs=120) for m in (1, 3, 4))
        assert sum(counts.values()) == 3000 and counts[0] == counts[2] == counts[5] == 0
    same = (chosen[0] == chosen[1]).float().mean().item()
    assert same == pytest.approx(1 / 3, abs=0.04)  # drawn anew


def test_B6_the_model_is_sampled_and_not_its_mean():
    """Of one state and action: the moments of a mixture of two Normals, and of each alone."""
    model = make_model()
    raw = [[1.0, -2.0, 0.5, -1.0, 0.2, -3.0], [9.0] * 6, [-1.0, 0.0, 0.7, -2.0, -0.5, 0.1]]
    set_constant_outputs(model, raw)
    set_scales(model)
    size = 40_000
    obs, action = torch.tensor([[5.0, -4.0]]).expand(size, 2), torch.zeros(size, 1)
    outputs = torch.tensor(raw).double()
    means, variances = [], []
    for m in (0, 2):
        means.append(model.target_mean + model.target_std * outputs[m, :3])
        var = bounded(outputs[m, 3:], model.min_log_var, model.max_log_var).exp()
        variances.append(model.target_std**2 * var)
    for elites in ([0, 2], [0, 0], [2, 2]):
        model.elites.copy_(torch.tensor(elites))
        reward, next_obs, _ = model.sample(obs, action, seeded())
        drawn = torch.cat([reward[:, None], next_obs - obs], dim=1).double()
        parts = [elites.index(m) if elites[0] != elites[1] else m // 2 for m in elites]
        mean = sum(means[i] for i in parts) / 2
        var = sum(variances[i] + means[i] ** 2 for i in parts) / 2 - mean**2
        error = (drawn.mean(dim=0) - mean).abs() / (var / size).sqrt()
        assert error.max() < 4.5
        torch.testing.assert_close(drawn.std(dim=0), var.detach().sqrt(), rtol=0.03, atol=0)
        if elites[0] == elites[1]:  # each dimension has its own noise
            assert (torch.corrcoef(drawn.T) - torch.eye(3)).abs().max() < 0.03


# ---- rollouts


class FakeModel:
    """One step further in both dimensions; the reward is 10 times the first, plus the action."""

    def __init__(self, logit=None):
        self.logit, self.calls = logit, []

    def sample(self, obs, action, generator):
        end_logit = torch.zeros(len(obs), 0) if self.logit is None else self.logit(obs)
        self.calls.append((obs, action, 10 * obs[:, 0] + action[:, 0], obs + 1, end_logit))
        return self.calls[-1][2:]


def make_actor():
    torch.manual_seed(1)
    actor = mbpo.GaussianActor(2, 1, 8)
    with torch.no_grad():
        actor.net[-1].weight.mul_(100)
        actor.net[-1].bias.copy_(torch.tensor([0.4, 0.3]))
    return actor


def test_B7_a_row_that_terminates_goes_no_further():
    """Rows are numbered by their second dimension, 100 i + steps taken; the first says when they
    end. Each is stored once per step, its end with terminated 1, and then no more."""
    start = torch.tensor([[0.0, 0.0], [3.0, 100.0], [4.0, 200.0], [1.0, 300.0], [4.5, 400.0]])
    model = FakeModel()
    tables = mbpo.rollout(
        model, make_actor(), lambda next_obs: next_obs[:, 0] > 3.5, start, 3, seeded()
    )
    # row 0 ends at its 4th step, row 1 at its 1st, rows 2 and 4 at their 1st, row 3 at its 3rd
    alive = [[0, 1, 2, 3, 4], [0, 3], [0, 3]]
    ended = [[1, 2, 4], [], [3]]
    assert len(tables) == len(model.calls) == 3
    for t, (table, call) in enumerate(zip(tables, model.calls)):
        obs, action, reward, next_obs, terminated, truncated = filled(make_rows(1)).split(table)
        assert obs.tolist() == [[start[i, 0].item() + t, 100 * i + t] for i in alive[t]]
        assert torch.equal(next_obs, obs + 1)
        assert terminated.tolist() == [float(i in ended[t]) for i in alive[t]]
        assert truncated.tolist() == [0.0] * len(alive[t])
        assert torch.equal(action, call[1]) and torch.equal(reward, call[2])
    for before, after in itertools.pairwise(tables):
        assert torch.equal(after[:, :2], before[before[:, 6] == 0, 4:6])


def test_rollout_has_the_length_asked_for_unless_all_have_ended():
    obs, actor = torch.zeros(6, 2), make_actor()
    for length in (1, 2, 7):
        tables = mbpo.rollout(FakeModel(), actor, mbpo.never_ends, obs, length, seeded())
        assert [table.shape for table in tables] == [(6, 8)] * length
    model = FakeModel()
    tables = mbpo.rollout(model, actor, lambda x: x[:, 0] > 1.5, obs, 7, seeded())
    assert [len(table) for table in tables] == [6, 6] and len(model.calls) == 2
    assert [table[:, 6].tolist() for table in tables] == [[0.0] * 6, [1.0] * 6]


def test_B7_a_learned_end_is_drawn_with_its_probability():
    """Sigmoid of the logit, anew for every row and step."""
    chances = torch.tensor([0.02, 0.2, 0.7, 1.0]).repeat_interleave(3000)

    def logit(obs):
        return torch.logit(chances[obs[:, 1].floor().long() % 100_000])[:, None].clamp(-30, 30)

    class Staying(FakeModel):
        def sample(self, obs, action, generator):
            reward, _, end_logit = super().sample(obs, action, generator)
            return reward, obs, end_logit

    obs = torch.stack([torch.zeros(12_000), torch.arange(12_000.0)], dim=1)
    first, second = mbpo.rollout(Staying(logit), make_actor(), None, obs, 2, seeded())
    for table in (first, second):
        for i, chance in enumerate((0.02, 0.2, 0.7, 1.0)):
            rows = table[(table[:, 1] // 3000) == i, 6]
            if len(rows) > 0:
                error = 4 * math.sqrt(chance * (1 - chance) / len(rows))
                assert rows.mean().item() == pytest.approx(chance, abs=error + 1e-6)
    assert len(second) == 12_000 - first[:, 6].sum() and (second[:, 1] < 9000).all()


def test_B6_the_policy_is_sampled():
    """Of one state, u = atanh(a) has the mean and the standard deviation of the policy."""
    obs = torch.tensor([[0.5, -1.0]]).expand(20_000, 2)
    actor = make_actor()
    tables = mbpo.rollout(FakeModel(), actor, mbpo.never_ends, obs, 2, seeded())
    for step, table in enumerate(tables):
        mean, log_std = (x.item() for x in actor(obs[0] + step))
        u = torch.atanh(table[:, 2].double())
        assert u.mean().item() == pytest.approx(mean, abs=4 * math.exp(log_std) / 141)
        assert u.std().item() == pytest.approx(math.exp(log_std), rel=0.03)


def test_no_penalty_where_members_disagree(monkeypatch):
    """What is stored is what was sampled: MOPO would subtract from the reward."""
    model = make_model(num_members=4, num_elites=4, noise=1.0)
    calls, original = [], mbpo.Dynamics.sample

    def spied(self, obs, action, generator):
        calls.append((obs, action, *original(self, obs, action, generator)))
        return calls[-1][2:]

    monkeypatch.setattr(mbpo.Dynamics, "sample", spied)
    tables = mbpo.rollout(model, make_actor(), mbpo.never_ends, torch.randn(30, 2), 3, seeded())
    for table, (obs, action, reward, next_obs, _) in zip(tables, calls, strict=True):
        assert torch.equal(table[:, :6], torch.cat([obs, action, reward[:, None], next_obs], dim=1))


def test_B2_rollout_length():
    """The authors' schedule for Hopper, in epochs; a constant one; and the first step of each k."""
    steps = (0, 20, 29, 30, 85, 150, 999)
    lengths = [mbpo.rollout_length(step, 20, 150, 1, 15) for step in steps]
    assert lengths == [1, 1, 1, 2, 8, 15, 15]
    assert all(type(length) is int for length in lengths)
    assert [mbpo.rollout_length(step, 20, 150, 4, 4) for step in steps] == [4] * 7
    assert [mbpo.rollout_length(step, 0, 10, 2, 12) for step in range(12)] == [*range(2, 13), 12]
    assert mbpo.rollout_length(149_999, 20_000, 150_000, 1, 15) == 14


# ---- known ends

CAN_END = "Ant-v5 Hopper-v5 Humanoid-v5 InvertedDoublePendulum-v5 InvertedPendulum-v5 Walker2d-v5"


def test_B8_all_of_these_are_known():
    never = "HalfCheetah-v5 HumanoidStandup-v5 Pendulum-v1 Pusher-v5 Reacher-v5 Swimmer-v5"
    assert mbpo.TERMINATION.keys() == {*CAN_END.split(), *never.split()}


@pytest.mark.parametrize("env_id", sorted(mbpo.TERMINATION))
def test_B8_known_ends_are_those_of_the_environment(env_id):
    """In every one of 10,000 real steps, of states as they are stored."""
    env = common.make_env(env_id)
    env.reset(seed=0)
    env.action_space.seed(0)
    states, ends = [], []
    for _ in range(10_000):
        obs, _, terminated, truncated, _ = env.step(env.action_space.sample())
        states.append(obs.astype(np.float32))
        ends.append(terminated)
        if terminated or truncated:
            env.reset()
    actual = mbpo.TERMINATION[env_id](torch.from_numpy(np.stack(states)))
    assert actual.dtype == torch.bool and actual.shape == (10_000,)
    assert actual.tolist() == ends
    if env_id in CAN_END.split():
        assert 20 < sum(ends) < 5000
    else:
        assert sum(ends) == 0


nan, inf = math.nan, math.inf
HOPPER_REST = range(2, 11)
EDGES = {  # env: size of a state, one that goes on, changes that end it, changes that do not
    "Hopper-v5": (
        11,
        {0: 1.25},
        [
            *({0: height} for height in (0.7, -5.0, nan)),
            *({1: angle} for angle in (0.2, -0.2, 3.0, nan, inf, -inf)),
            *({i: value} for i in HOPPER_REST for value in (100.0, -100.0, nan, inf, -inf)),
        ],
        [
            *({0: height} for height in (0.7001, 500.0)),
            *({1: angle} for angle in (0.1999, -0.1999)),
            *({i: value} for i in HOPPER_REST for value in (99.9, -99.9)),
        ],
    ),
    "Walker2d-v5": (
        17,
        {0: 1.25},
        [
            *({0: height} for height in (0.8, 2.0, -1.0, nan, inf)),
            *({1: angle} for angle in (1.0, -1.0, nan, -inf)),
        ],
        [{0: 0.8001}, {0: 1.9999}, {1: 0.9999}, {1: -0.9999}, {2: 500.0}],
    ),
    "Ant-v5": (
        105,
        {0: 0.75},
        [
            *({0: height} for height in (0.1999, 1.0001, -1.0)),
            *({i: value} for i in range(105) for value in (nan, inf, -inf)),
        ],
        [{0: 0.2}, {0: 1.0}, {1: 500.0}],
    ),
    "Humanoid-v5": (
        348,
        {0: 1.4},
        [{0: height} for height in (1.0, 2.0, -1.0, nan, inf)],
        [{0: 1.0001}, {0: 1.9999}, {1: 500.0}],
    ),
    "InvertedPendulum-v5": (
        4,
        {},
        [
            *({1: angle} for angle in (0.2001, -0.2001, 3.0)),
            *({i: value} for i in range(4) for value in (nan, inf, -inf)),
        ],
        [{1: 0.2}, {1: -0.2}, {0: 500.0}],
    ),
    "InvertedDoublePendulum-v5": (
        9,
        {3: 1.0, 4: 1.0},
        [{1: nan}, {2: nan, 1: 0.1}, {3: nan}, {4: nan}, {3: -1.0}, {4: -1.0}],
        [{0: 5.0}, {5: 500.0}],
    ),
    "Pendulum-v1": (3, {0: 1.0}, [], [{0: nan}, {2: 500.0}]),
}


@pytest.mark.parametrize("env_id", EDGES)
def test_B8_at_each_threshold(env_id):
    size, base, ending, going_on = EDGES[env_id]
    changes = [{}, *going_on, *ending]
    states = torch.zeros(len(changes), size)
    for state, change in zip(states, changes):
        for i, value in (base | change).items():
            state[i] = value
    expected = [False] * (1 + len(going_on)) + [True] * len(ending)
    assert mbpo.TERMINATION[env_id](states).tolist() == expected


def test_B8_a_hopper_with_large_negative_values_has_ended():
    """The authors write abs(next_obs < 100), with a misplaced bracket, which lets -200 pass."""
    states = torch.zeros(9, 11)
    states[:, 0] = 1.25
    states[:, 2:] -= 200 * torch.eye(9)
    assert mbpo.hopper_ends(states).all()


def test_B8_double_pendulum_ends_below_one_metre():
    """Two links of 0.6 m: the tip is at 0.6 (cos t1 + cos(t1 + t2)), for all pairs of angles."""
    first, second = np.meshgrid(np.linspace(-3.1, 3.1, 101), np.linspace(-3.1, 3.1, 101))
    first, second = first.flatten(), second.flatten()
    states = np.zeros((len(first), 9), np.float32)
    states[:, 1:5] = np.stack([np.sin(first), np.sin(second), np.cos(first), np.cos(second)], 1)
    height = 0.6 * (np.cos(first) + np.cos(first + second))
    clear = abs(height - 1) > 1e-5  # of rounding
    actual = mbpo.inverted_double_pendulum_ends(torch.from_numpy(states)).numpy()
    np.testing.assert_array_equal(actual[clear], (height <= 1)[clear])
    assert 100 < (height > 1).sum() < len(height) - 100


def test_ends_are_known_or_learned(walk, tmp_path, spy, capsys):
    """A logit only where there is no function."""
    for env_id, ends, width in (("Walk-v0", None, 7), ("Pendulum-v1", mbpo.never_ends, 8)):
        calls = spy("rollout")
        args = replace(walk, env_id=env_id, run_dir=str(tmp_path / env_id), quiet=False)
        mbpo.train(replace(args, total_timesteps=10))
        assert {call[2] for call in calls} == {ends}
        assert load(args.run_dir)["model"]["net.8.bias"].shape == (3, 1, width)
        kind = "learned" if ends is None else "known"
        assert f"termination is {kind}" in capsys.readouterr().out
        if ends is not None:
            assert load(args.run_dir)["imagined"]["rows"][:, -2].sum() == 0


# ---- fits


def fit_by_hand(model, real, args, generator, learning_rate):
    """fit_model once more: a list of MLPs, each with its own Adam, torch.distributions, loops.
    -> members, bounds, elites, errors, number of epochs, last loss with its decay, R^2"""
    rows = real.rows[: real.size].double()
    inputs, end = rows[:, :3], rows[:, 6]
    targets = torch.stack(
        [rows[:, 3], rows[:, 4] - rows[:, 0], rows[:, 5] - rows[:, 1]], dim=1
    )  # r, s' - s
    order = torch.randperm(len(rows), generator=generator)
    holdout, training = order[: len(rows) // 5], order[len(rows) // 5 :]
    inputs = (inputs - inputs[training].mean(0)) / inputs[training].std(0)
    if args.normalize_targets:
        targets = (targets - targets[training].mean(0)) / targets[training].std(0)
    shape = (args.num_members, len(training))
    draw = torch.randint(len(training), shape, generator=generator)
    members = [member_of(model, m).double() for m in range(args.num_members)]
    low = nn.Parameter(model.min_log_var.detach().double())
    high = nn.Parameter(model.max_log_var.detach().double())
    decays = (2.5e-5, 5e-5, 7.5e-5, 7.5e-5, 1e-4)
    opts = [torch.optim.Adam([low, high], learning_rate)]
    opts += [torch.optim.Adam(member.parameters(), learning_rate) for member in members]
    best, errors = list(members), [math.inf] * len(members)
    epoch, waited = 0, 0
    while epoch < args.max_model_epochs and waited < 6:
        epoch, waited = epoch + 1, waited + 1
        order = torch.rand(shape, generator=generator).argsort(dim=1)
        for start in range(0, len(training), args.model_batch_size):
            loss = 0.01 * (high - low).sum()
            for m, member in enumerate(members):
                index = training[draw[m][order[m][start : start + args.model_batch_size]]]
                output = member(inputs[index])
                std = (0.5 * bounded(output[:, 3:6], low, high)).exp()
                normal = torch.distributions.Normal(output[:, :3], std)
                loss = loss - (2 * normal.log_prob(targets[index]) + math.log(2 * math.pi)).mean()
                for linear, decay in zip(member[::2], decays):
                    loss = loss + 0.5 * decay * (linear.weight**2).sum()
                if output.shape[1] > 6:
                    coin = torch.distributions.Bernoulli(logits=output[:, 6])
                    loss = loss - coin.log_prob(end[index]).mean()
            for opt in opts:
                opt.zero_grad()
            loss.backward()
            for opt in opts:
                opt.step()
        for m, member in enumerate(members):
            error = ((member(inputs[holdout])[:, :3] - targets[holdout]) ** 2).mean().item()
            if error < 0.99 * errors[m]:
                best[m], errors[m], waited = deepcopy(member), error, 0
    elites = sorted(range(len(members)), key=errors.__getitem__)[: args.num_elites]
    r2 = 1 - np.mean(errors) / targets.var(dim=0).mean().item()
    return best, (low, high), elites, errors, epoch, loss.item(), r2


@pytest.mark.parametrize(
    "flags",
    [
        {"normalize_targets": True},
        {"normalize_targets": False},
        {"num_members": 5, "num_elites": 3, "max_model_epochs": 60},
    ],
    ids=str,
)
@pytest.mark.parametrize("learns_end", [False, True])
def test_a_fit_by_hand(flags, learns_end):
    """Every draw, batch and step; weights, bounds, elites and errors."""
    args = fit_args(**flags)
    model = make_model(args.num_members, args.num_elites, learns_end, noise=0.1)
    real, rate = filled(make_rows(55), capacity=100), 0.02
    hand = fit_by_hand(model, real, args, seeded(), rate)
    members, bounds, elites, errors, epochs, loss, r2 = hand
    statistics = mbpo.fit_model(model, real, 0, rate, args, seeded())
    for m, member in enumerate(members):
        for actual, expected in zip(member_of(model, m).parameters(), member.parameters()):
            torch.testing.assert_close(actual.double(), expected, rtol=1e-3, atol=1e-3)
        assert statistics[f"stats/holdout_mse_{m}"] == pytest.approx(errors[m], rel=1e-3)
    for actual, expected in zip((model.min_log_var, model.max_log_var), bounds):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-3, atol=1e-3)
    assert model.elites.tolist() == elites
    assert statistics["stats/model_epochs"] == epochs
    assert statistics["stats/holdout_mse"] == pytest.approx(np.mean(errors), rel=1e-3)
    assert statistics["stats/holdout_r2"] == pytest.approx(r2, rel=1e-3, abs=1e-3)
    assert statistics["losses/model"] == pytest.approx(loss, rel=1e-2, abs=2e-2)
    assert statistics["stats/max_log_var"] == pytest.approx(bounds[1].mean().item(), rel=1e-3)
    if args.max_model_epochs == 60:
        assert 7 < epochs < 60  # patience ran out


def fake_errors(monkeypatch, errors):
    """Hold-out errors by epoch and member, instead of true ones -> the weights of each epoch."""
    weights = []

    def mse(self, inputs, targets):
        weights.append([member_of(self, m) for m in range(len(errors[0]))])
        return torch.tensor(errors[len(weights) - 1])

    monkeypatch.setattr(mbpo.Dynamics, "mse", mse)
    return weights


def assert_same_member(left, right):
    for a, b in zip(left.parameters(), right.parameters(), strict=True):
        assert torch.equal(a, b)


def test_B9_each_member_goes_back_to_its_own_best_epoch(monkeypatch):
    """Then the lowest of these errors, not those of the last epoch, make the elites."""
    errors = [
        [5.0, 4.0, 3.0],
        [4.96, 3.0, 3.5],  # less than a percent does not count, 25 do
        [4.0, 3.5, 3.1],
        [3.97, 2.98, 2.9],
        *[[3.97, 9.0, 9.0]] * 10,
    ]
    weights = fake_errors(monkeypatch, errors)
    model = make_model()
    statistics = mbpo.fit_model(
        model, filled(make_rows(40)), 0, 1e-2, fit_args(max_model_epochs=99), seeded()
    )
    for m, epoch in enumerate((3, 2, 4)):
        assert_same_member(member_of(model, m), weights[epoch - 1][m])
        assert not torch.equal(weights[epoch - 1][m][0].weight, weights[-1][m][0].weight)
    assert model.elites.tolist() == [2, 1]
    assert len(weights) == statistics["stats/model_epochs"] == 4 + 6
    actual = [statistics[f"stats/holdout_mse_{m}"] for m in range(3)]
    assert actual == pytest.approx([4.0, 3.0, 2.9])
    assert statistics["stats/holdout_mse"] == pytest.approx(3.3)


@pytest.mark.parametrize(
    ("errors", "max_epochs", "epochs", "best"),
    [
        ([9.0] * 20, 99, 1 + 6, 1),  # more than 5 in vain
        ([9.0] * 6 + [8.0] * 20, 99, 7 + 6, 7),  # 5 in vain, then a better one
        ([9.0] * 7 + [8.0] * 20, 99, 7, 1),  # too late
        ([10.0, 9.93, 9.86, *[9.86] * 20], 99, 3 + 6, 3),  # against the best, not the last
        ([9.0, 8.92, *[8.92] * 20], 99, 7, 1),  # 0.9 percent
        ([9.0 - epoch for epoch in range(9)], 4, 4, 4),  # the cap
        ([9.0, 8.0, nan, *[nan] * 20], 99, 2 + 6, 2),
    ],
    ids=["at-once", "just-in-time", "too-late", "slowly", "noise", "cap", "diverged"],
)
def test_B9_patience(monkeypatch, errors, max_epochs, epochs, best):
    weights = fake_errors(monkeypatch, [[error, 2 * error] for error in errors])
    model = make_model(num_members=2)
    args = fit_args(num_members=2, max_model_epochs=max_epochs)
    statistics = mbpo.fit_model(model, filled(make_rows(40)), 0, 1e-2, args, seeded())
    assert len(weights) == statistics["stats/model_epochs"] == epochs
    for m in range(2):
        assert_same_member(member_of(model, m), weights[best - 1][m])


def test_B9_one_better_member_is_enough_to_go_on(monkeypatch):
    errors = [[9.0, 10.0 / (1 + 0.1 * epoch)] for epoch in range(12)] + [[9.0, 9.0]] * 10
    weights = fake_errors(monkeypatch, errors)
    model = make_model(num_members=2, num_elites=1)
    args = fit_args(num_members=2, num_elites=1, max_model_epochs=99)
    mbpo.fit_model(model, filled(make_rows(40)), 0, 1e-2, args, seeded())
    assert len(weights) == 12 + 6 and model.elites.tolist() == [1]


def test_B9_elites_have_the_lowest_errors_after_restoring(monkeypatch):
    """Without a fake: of the weights that are there after the fit, on the rows held out."""
    held_out, original = [], mbpo.Dynamics.mse
    monkeypatch.setattr(
        mbpo.Dynamics, "mse", lambda self, *rows: held_out.append(rows) or original(self, *rows)
    )
    args = fit_args(num_members=6, num_elites=3, max_model_epochs=30)
    model = make_model(6, 3)
    mbpo.fit_model(model, filled(make_rows(60)), 0, 1e-2, args, seeded())
    inputs, targets = held_out[-1]
    errors = [((member_of(model, m)(inputs)[:, :3] - targets) ** 2).mean() for m in range(6)]
    assert model.elites.tolist() == torch.stack(errors).argsort()[:3].tolist()


def rows_seen(model, num_rows, args, generator, capacity=None):
    """Fit rows whose first observation is their number.
    -> numbers held out per epoch, and numbers trained on per epoch, [M, n] each"""
    rows = make_rows(num_rows)
    rows[:, 0] = torch.arange(num_rows)
    held_out, trained = [], [[]]

    def note(net, inputs):
        raw = inputs[0][..., 0] * model.input_std[0] + model.input_mean[0]
        numbers = raw.round().long()
        assert (raw - numbers).abs().max() < 0.1
        if torch.is_grad_enabled():
            trained[-1].append(numbers)
        else:
            held_out.append(numbers)
            trained.append([])

    hook = model.net.register_forward_pre_hook(note)
    mbpo.fit_model(model, filled(rows, capacity), 0, 1e-3, args, generator)
    hook.remove()
    assert trained.pop() == []
    return held_out, trained


def test_B4_bootstrap_and_hold_out():
    """Every member has its own rows, drawn with replacement once per fit and shuffled per epoch;
    the rows held out are the same for all, and no member is trained on any."""
    model, args = make_model(7, 5), fit_args(num_members=7, num_elites=5, max_model_epochs=4)
    generator, fits = seeded(2), []
    for _ in range(2):
        held_out, trained = rows_seen(model, 100, args, generator)
        assert len(held_out) == len(trained) == 4
        holdout = set(held_out[0][0].tolist())
        assert len(holdout) == 20
        for numbers in held_out:
            assert numbers.shape == (7, 20) and all(set(x.tolist()) == holdout for x in numbers)
        for batches in trained:
            assert [batch.shape for batch in batches] == [(7, 16)] * 5
        epochs = [torch.cat(batches, dim=1) for batches in trained]  # [7, 80]
        drawn = [sorted(epochs[0][m].tolist()) for m in range(7)]
        for epoch in epochs:
            assert [sorted(epoch[m].tolist()) for m in range(7)] == drawn  # for the whole fit
        assert len({tuple(epoch[0].tolist()) for epoch in epochs}) == 4  # in another order
        assert len({tuple(rows) for rows in drawn}) == 7  # each its own
        for rows in drawn:  # of 80 drawn with replacement, 1 - 1 / e = 0.63 are different
            assert 42 <= len(set(rows)) <= 60 and not holdout & set(rows)
        assert {row for rows in drawn for row in rows} == set(range(100)) - holdout
        fits.append((holdout, drawn))
    assert fits[0] != fits[1] and fits[0][0] != fits[1][0]  # another fit, other rows


@pytest.mark.parametrize(
    ("num_rows", "expected"),
    [(3, 1), (4, 1), (9, 1), (10, 2), (999, 199), (25_004, 5000), (30_000, 5000)],
)
def test_B4_a_fifth_is_held_out_at_most_5000_at_least_1(num_rows, expected, monkeypatch):
    sizes = []

    def mse(self, inputs, targets):
        sizes.append(len(inputs))
        return torch.ones(3)

    monkeypatch.setattr(mbpo.Dynamics, "mse", mse)
    args, real = (
        fit_args(max_model_epochs=1, model_batch_size=30_000),
        mbpo.Buffer(30_000, 2, 1, CPU),
    )
    real.add(make_rows(num_rows))
    trained = []
    model = make_model()
    model.net.register_forward_pre_hook(lambda net, inputs: trained.append(inputs[0].shape))
    mbpo.fit_model(model, real, 0, 1e-3, args, seeded())
    assert sizes == [expected] and trained == [(3, num_rows - expected, 3)]


@pytest.mark.parametrize("normalize_targets", [True, False])
def test_scales_are_of_the_training_rows(normalize_targets):
    """Not of those held out, whose error would be a little too good."""
    model, args = make_model(), fit_args(normalize_targets=normalize_targets)
    held_out, _ = rows_seen(model, 50, args, seeded())
    training = sorted(set(range(50)) - set(held_out[0][0].tolist()))
    rows = make_rows(50)
    rows[:, 0] = torch.arange(50)
    rows = rows[training].double().numpy()
    np.testing.assert_allclose(model.input_mean, rows[:, :3].mean(0), rtol=1e-4)
    np.testing.assert_allclose(model.input_std, rows[:, :3].std(0, ddof=1), rtol=1e-4)
    targets = np.column_stack([rows[:, 3], rows[:, 4:6] - rows[:, :2]])
    mean, std = targets.mean(0), targets.std(0, ddof=1)
    if not normalize_targets:
        mean, std = np.zeros(3), np.ones(3)
    np.testing.assert_allclose(model.target_mean, mean, rtol=1e-4)
    np.testing.assert_allclose(model.target_std, std, rtol=1e-4)


@pytest.mark.parametrize("capacity", [100, 20])
def test_fresh_error_is_of_the_last_steps_before_the_fit(capacity):
    """With the weights, scales and elites of the fit before, also where the ring has come round."""
    model, rows = make_model(), make_rows(27)
    set_scales(model)
    model.elites.copy_(torch.tensor([2, 1]))
    real, errors = filled(rows, capacity), []
    for m in (2, 1):
        for row in rows[-5:]:
            x = (row[:3] - model.input_mean) / model.input_std
            change = torch.stack([row[3], row[4] - row[0], row[5] - row[1]])
            target = (change - model.target_mean) / model.target_std
            errors.append(((member_of(model, m)(x)[:3] - target) ** 2).mean().item())
    statistics = mbpo.fit_model(model, real, 5, 1e-2, fit_args(), seeded())
    assert statistics["stats/fresh_mse"] == pytest.approx(np.mean(errors), rel=1e-4)
    assert "stats/fresh_mse" not in mbpo.fit_model(model, real, 0, 1e-2, fit_args(), seeded())


@pytest.mark.parametrize(("normalize_targets", "share"), [(True, 0.01), (False, 0.15)])
def test_a_linear_system_is_learned(normalize_targets, share):
    """s' = s + A s + B a and a linear reward, without noise: R^2 above 0.99, and the sampled steps
    are right in the environment's units. Raw targets are harder: one dimension drowns another."""
    rng = np.random.default_rng(0)
    matrix = np.array([[-0.2, 0.5, 0.3], [0.1, -0.4, -0.6], [1.0, 0.5, 2.0]])  # s'_1, s'_2, r

    def steps(count):
        obs = rng.normal([3.0, -1.0], [2.0, 0.5], (count, 2))
        action = rng.uniform(-1, 1, (count, 1))
        change = np.concatenate([obs, action], axis=1) @ matrix.T
        return obs, action, change[:, 2] + 4, obs + change[:, :2]

    obs, action, reward, next_obs = steps(400)
    real = mbpo.Buffer(400, 2, 1, CPU)
    real.add(mbpo.as_rows(obs, action, reward, next_obs, np.zeros(400), np.zeros(400)))
    model = make_model(hidden_dim=32, noise=0)
    args = fit_args(max_model_epochs=80, model_batch_size=32, normalize_targets=normalize_targets)
    statistics = mbpo.fit_model(model, real, 0, 1e-2, args, seeded())
    assert 1 - share < statistics["stats/holdout_r2"] <= 1
    obs, action, reward, next_obs = steps(500)
    sampled = model.sample(torch.tensor(obs).float(), torch.tensor(action).float(), seeded())
    for actual, expected in ((sampled[0][:, None], reward[:, None]), (sampled[1], next_obs)):
        error = ((actual.numpy() - expected) ** 2).mean(0)
        assert (error < share * expected.var(0)).all()


def test_an_end_is_learned():
    """Rows that end are those on the right: members give them a high probability, others a low."""
    rows = make_rows(300)
    rows[:, 6] = (rows[:, 0] > 2).float()
    model = make_model(learns_end=True, hidden_dim=16, noise=0)
    mbpo.fit_model(model, filled(rows), 0, 3e-3, fit_args(max_model_epochs=30), seeded())
    for first, low, high in ((5.0, 0.9, 1.0), (-1.0, 0.0, 0.1)):
        obs = torch.tensor([[first, 2.0]]).expand(200, 2)
        _, _, end_logit = model.sample(obs, torch.zeros(200, 1), seeded())
        chance = torch.sigmoid(end_logit)
        assert low <= chance.min() and chance.max() <= high


def test_a_fit_starts_from_the_weights_of_the_one_before():
    """With a learning rate of next to nothing it stays there."""
    model = make_model()
    before = [member_of(model, m) for m in range(3)]
    mbpo.fit_model(model, filled(make_rows(40)), 0, 1e-12, fit_args(), seeded())
    for m in range(3):
        for a, b in zip(member_of(model, m).parameters(), before[m].parameters()):
            torch.testing.assert_close(a, b)


def test_a_fit_depends_on_the_state_of_the_model_alone():
    """It begins with a new Adam: another model that gets weights, bounds and scales of the first
    from a checkpoint goes on like the first."""
    model, again, real = make_model(), make_model(noise=1.0), filled(make_rows(40))
    mbpo.fit_model(model, real, 0, 1e-2, fit_args(), seeded(0))
    again.load_state_dict(model.state_dict())
    for each in (model, again):
        mbpo.fit_model(each, real, 5, 1e-2, fit_args(), seeded(1))
    for name, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])


# ---- buffer


def numbered(first, count):
    return torch.arange(first, first + count).float()[:, None].expand(-1, 6)


def oldest_first(state):
    return torch.roll(state["rows"], -state["position"], dims=0)


@pytest.mark.parametrize("num_rows", [0, 1, 4, 6, 7, 8, 10, 13, 14, 20])
def test_a_buffer_that_grows_by_brute_force(num_rows):
    """Empty, partly filled, full, come round: against a list that forgets its head."""
    buffer = mbpo.Buffer(7, 1, 1, CPU)
    remembered = list(range(num_rows))[-7:]
    for i in range(num_rows):
        buffer.add(numbered(i, 1))
    for capacity in (7, 11, 12, 30):
        buffer.grow(capacity)
        again = mbpo.Buffer(7, 1, 1, CPU)
        again.add(numbered(900, 5))  # what was there before does not count
        again.load_state(buffer.state())
        for each in (buffer, again):
            state = each.state()
            assert state["capacity"] == len(each.rows) == capacity
            assert oldest_first(state)[:, 0].tolist() == remembered
            assert each.size == len(remembered) == len(state["rows"])
        for size in (1, 3):
            for each in (buffer, again):
                each.add(numbered(num_rows, size))
            remembered = (remembered + list(range(num_rows, num_rows + size)))[-capacity:]
            num_rows += size
            for each in (buffer, again):
                assert oldest_first(each.state())[:, 0].tolist() == remembered
                assert each.size == len(remembered)
    with pytest.raises(AssertionError):
        buffer.grow(29)


def test_a_state_is_a_copy():
    """Else what is written after it would change the checkpoint."""
    buffer = mbpo.Buffer(3, 1, 1, CPU)
    buffer.add(numbered(0, 3))
    state = buffer.state()
    buffer.add(numbered(50, 2))
    assert state["rows"][:, 0].tolist() == [0, 1, 2] and state["position"] == 0


@pytest.mark.parametrize(
    ("flags", "capacities"),
    [
        ({}, [40, 40, 80, 120, 120, 120]),
        (
            {"retain_steps": 8, "rollout_batch_size": 7},
            [11, 11, 22, 34, 34, 34],
        ),  # 8 / 5 x 7 = 11.2
        ({"max_rollout_length": 1}, [40] * 6),
        ({"min_rollout_length": 3}, [120] * 6),
    ],
    ids=str,
)
def test_B2_lengths_and_capacities_in_a_run(walk, spy, monkeypatch, flags, capacities):
    """k from 1 at step 5 to 3 at step 15: fits at 4, 9, 14, 19, 24 and 29 make rollouts of 1, 1.8,
    2.8, 3, 3 and 3 steps, rounded down."""
    grown, original = [], mbpo.Buffer.grow
    monkeypatch.setattr(
        mbpo.Buffer, "grow", lambda self, size: grown.append(size) or original(self, size)
    )
    calls, args = spy("rollout"), replace(walk, **flags)
    mbpo.train(args)
    lengths = {"max_rollout_length": [1] * 6, "min_rollout_length": [3] * 6}
    expected = next((lengths[name] for name in flags if name in lengths), [1, 1, 2, 3, 3, 3])
    assert [call[4] for call in calls] == expected
    assert all(1 <= len(call[-1]) <= call[4] for call in calls)
    assert grown == capacities
    imagined = load(args.run_dir)["imagined"]
    assert imagined["capacity"] == capacities[-1] >= len(imagined["rows"])


@pytest.mark.parametrize("retain_steps", [5, 8, 10, 1000])
def test_B3_rollouts_outlive_a_fit(walk, spy, retain_steps):
    """While there is room; then the oldest go. All rows of all rollouts, against a list."""
    calls, args = spy("rollout"), replace(walk, retain_steps=retain_steps)
    mbpo.train(args)
    remembered = torch.empty(0, 8)
    for call in calls:
        capacity = round(retain_steps / 5 * 20 * call[4])
        remembered = torch.cat([remembered, *call[-1]])[-capacity:]
    assert torch.equal(oldest_first(load(args.run_dir)["imagined"]), remembered)
    total = sum(len(table) for call in calls for table in call[-1])
    assert (len(remembered) == total) == (retain_steps == 1000)
    assert len(remembered) > sum(len(table) for table in calls[-1][-1])  # of more than one fit


def test_rollouts_start_from_real_states(walk, spy, monkeypatch):
    """All of them equally often, in chunks that lose no row."""
    monkeypatch.setattr(mbpo, "ROLLOUT_CHUNK", 900)
    calls = spy("rollout")
    args = replace(walk, rollout_batch_size=2000, total_timesteps=25)
    mbpo.train(args)
    assert [len(call[3]) for call in calls] == [900, 900, 200] * 5
    real = load(args.run_dir)["real"]["rows"]
    for fit in range(5):
        starts = torch.cat([call[3] for call in calls[3 * fit : 3 * fit + 3]])
        num_real = 4 + 5 * fit
        counts = (starts[:, None] == real[None, :num_real, :2]).all(dim=2).sum(dim=0)
        assert counts.sum() == 2000
        spread = math.sqrt(2000 / num_real)
        assert (counts - 2000 / num_real).abs().max() < 4 * spread


# ---- the loop


@pytest.mark.parametrize("ratio", [0.0, 0.05, 0.25, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("batch_size", [32, 7])
def test_B10_every_mini_batch_has_its_exact_share(walk, monkeypatch, spy, ratio, batch_size):
    """In the run itself: first rows of the real buffer, then imagined ones, told by membership.
    These, in this order, are what the critics learn from."""
    if 0 < ratio * batch_size < 1:
        ratio = 0.2
    num_real, blocks, original = int(ratio * batch_size), [], mbpo.mixed_batches

    def is_in(rows, buffer):
        return (rows[:, :, None] == buffer.rows[: buffer.size]).all(dim=3).any(dim=2)  # [G, B]

    def checked(*args):
        imagined, real = sorted(args[:2], key=lambda buffer: len(buffer.rows))
        block = original(*args)
        assert len(real.rows) == 1_000_000 and len(imagined.rows) <= 120
        assert block.shape == (3, batch_size, 8)
        expected = torch.arange(batch_size).expand(3, -1) < num_real
        assert torch.equal(is_in(block, real), expected)
        assert torch.equal(is_in(block, imagined), ~expected)
        blocks.append(block)
        return block

    monkeypatch.setattr(mbpo, "mixed_batches", checked)
    targets = spy("soft_target")
    args = replace(walk, real_ratio=ratio, batch_size=batch_size, updates_per_step=3)
    mbpo.train(replace(args, total_timesteps=20))
    assert len(blocks) == 16 and len(targets) == 3 * 16
    for (reward, terminated, *_), batch in zip(targets, torch.cat(blocks)):
        assert torch.equal(reward, batch[:, 3]) and torch.equal(terminated, batch[:, 6])


def test_B10_twelve_of_256(walk, spy):
    calls = spy("mixed_batches")
    args = replace(walk, batch_size=256, real_ratio=mbpo.Args().real_ratio, total_timesteps=6)
    mbpo.train(args)
    assert [call[4] for call in calls] == [12, 12]
    assert {call[-1].shape for call in calls} == {(2, 256, 8)}


def critics_of(stack, obs_dim, action_dim, hidden_dim, layer_norm):
    """Both slices of an EnsembleCritic as ordinary MLPs."""
    members = []
    for i in range(2):
        layers = []
        for input_dim in (obs_dim + action_dim, hidden_dim):
            layers.append(nn.Linear(input_dim, hidden_dim))
            layers += [nn.LayerNorm(hidden_dim)] if layer_norm else []
            layers.append(nn.ReLU())
        member = nn.Sequential(*layers, nn.Linear(hidden_dim, 1))
        with torch.no_grad():
            for layer, stacked in zip(member, stack.net):
                if not isinstance(layer, nn.ReLU):
                    layer.weight.copy_(stacked.weight[i].T.squeeze(1))
                    layer.bias.copy_(stacked.bias[i, 0])
        members.append(member)
    return nn.ModuleList(members)


ELITES = [2, 0]
INPUT_SCALES = ([0.3, 2.0, -0.1], [1.5, 4.0, 0.5])
TARGET_SCALES = ([-1.0, 0.2, 1.0], [0.7, 0.4, 0.1])


def fake_fit(model, *_):
    """Some elites, weights and scales; fits as such have their own test by hand."""
    if model.elites.tolist() != ELITES:  # once: so large that members differ
        with torch.no_grad():
            for layer in model.net[::2]:
                layer.weight.mul_(4)
    model.elites.copy_(torch.tensor(ELITES))
    for name, (mean, std) in (("input", INPUT_SCALES), ("target", TARGET_SCALES)):
        getattr(model, f"{name}_mean").copy_(torch.tensor(mean))
        getattr(model, f"{name}_std").copy_(torch.tensor(std))
    return {"losses/model": 0.0}


class ByHand:
    """MBPO once more: a list of networks, torch.distributions, loops; draws in the same order."""

    def __init__(self, args):
        self.args, self.env = args, common.make_env(args.env_id)
        torch.manual_seed(args.seed)
        self.actor = mbpo.GaussianActor(2, 1, args.hidden_dim)
        sizes = (2, 1, args.hidden_dim, args.critic_layer_norm)
        critic = mbpo.EnsembleCritic(2, *sizes)
        model_sizes = (args.num_members, args.num_elites, 2, 1, args.model_hidden_dim, True)
        model = mbpo.Dynamics(*model_sizes)
        fake_fit(model)
        self.members = [member_of(model, m) for m in range(args.num_members)]
        self.critics = critics_of(critic, *sizes)
        self.targets = deepcopy(self.critics)
        self.log_alpha = nn.Parameter(torch.tensor(math.log(args.alpha or 1.0)))
        self.opts = [
            torch.optim.Adam(parameters, args.learning_rate)
            for parameters in (
                self.critics.parameters(),
                self.actor.parameters(),
                [self.log_alpha],
            )
        ]
        self.generator = seeded(args.seed)
        self.real, self.imagined = [], []

    def sample(self, obs):
        output = self.actor.net(obs)
        std = torch.exp(-5 + 3.5 * (1 + torch.tanh(output[..., 1:])))
        base, tanh = (
            torch.distributions.Normal(output[..., :1], std),
            torch.distributions.TanhTransform(),
        )
        u = base.mean + base.stddev * torch.randn(base.mean.shape, generator=self.generator)
        log_prob = base.log_prob(u) - tanh.log_abs_det_jacobian(u, torch.tanh(u))
        return torch.tanh(u), log_prob.sum(-1)

    def q(self, critics, obs, action):
        x = torch.cat([obs, action], dim=1)
        return [critic(x)[:, 0] for critic in critics]

    def run(self):
        args, done, episode = self.args, True, 0
        for step in range(1, args.total_timesteps + 1):
            if done:
                seed = np.random.SeedSequence((args.seed, episode)).generate_state(1)[0]
                obs, episode = self.env.reset(seed=int(seed))[0], episode + 1
            if step <= args.learning_starts:
                action = 2 * torch.rand(1, generator=self.generator) - 1
            else:
                with torch.no_grad():
                    action, _ = self.sample(torch.tensor(obs).float())
            # the box of this environment is [-1, 3]
            next_obs, reward, terminated, truncated, _ = self.env.step((1 + 2 * action).numpy())
            before, after = torch.tensor(obs).float(), torch.tensor(next_obs).float()
            self.real.append((before, action, reward, after, terminated))
            obs, done = next_obs, terminated or truncated
            if args.real_ratio < 1 and step in (4, 9, 14, 19, 24):
                self.imagine({4: 1, 9: 1, 14: 2, 19: 3, 24: 3}[step])
            if step > args.learning_starts:
                self.block()

    @torch.no_grad()
    def imagine(self, length):
        shape = (1, self.args.rollout_batch_size)
        starts = torch.randint(len(self.real), shape, generator=self.generator)[0]
        rows = [self.real[i][0] for i in starts.tolist()]
        for _ in range(length):
            size = len(rows)
            if size == 0:
                return
            actions, _ = self.sample(torch.stack(rows))
            choice = torch.randint(len(ELITES), (size,), generator=self.generator).tolist()
            noise = torch.randn(size, 3, generator=self.generator)
            coin = torch.rand(size, generator=self.generator)
            alive = []
            for i, obs in enumerate(rows):
                x = (torch.cat([obs, actions[i]]) - torch.tensor(INPUT_SCALES[0])) / torch.tensor(
                    INPUT_SCALES[1]
                )
                output = self.members[ELITES[choice[i]]](x)
                std = (0.5 * bounded(output[3:6], -10.0, 0.5)).exp().float()
                y = torch.tensor(TARGET_SCALES[1]) * (output[:3] + std * noise[i])
                y = y + torch.tensor(TARGET_SCALES[0])
                end = coin[i].item() < 1 / (1 + math.exp(-output[6].item()))
                self.imagined.append((obs, actions[i], y[0].item(), obs + y[1:], end))
                if not end:
                    alive.append(obs + y[1:])
            rows = alive

    def block(self):
        args = self.args
        num_real = int(args.real_ratio * args.batch_size)
        draws = []
        for rows, count in ((self.real, num_real), (self.imagined, args.batch_size - num_real)):
            if count > 0:
                shape = (args.updates_per_step, count)
                index = torch.randint(len(rows), shape, generator=self.generator)
                draws.append([[rows[i] for i in line] for line in index.tolist()])
        for g in range(args.updates_per_step):
            batch = [row for part in draws for row in part[g]]
            obs, action, next_obs = (torch.stack([row[i] for row in batch]) for i in (0, 1, 3))
            alpha = self.log_alpha.exp().item()
            with torch.no_grad():
                next_action, next_log_prob = self.sample(next_obs)
                next_q = self.q(self.targets, next_obs, next_action)
            target = torch.zeros(len(batch))
            for b, (_, _, reward, _, terminated) in enumerate(batch):
                target[b] = reward
                if not terminated:
                    value = min(q[b].item() for q in next_q) - alpha * next_log_prob[b].item()
                    target[b] += args.gamma * value
            losses = [((q - target) ** 2).mean() for q in self.q(self.critics, obs, action)]
            self.step(0, sum(losses) / 2)
            with torch.no_grad():
                for old, new in zip(self.targets.parameters(), self.critics.parameters()):
                    old.copy_((1 - args.tau) * old + args.tau * new)
            action, log_prob = self.sample(obs)
            least = torch.minimum(*self.q(self.critics, obs, action))
            self.step(1, (alpha * log_prob - least).mean())
            if args.alpha is None:
                goal = -0.5 if args.target_entropy is None else args.target_entropy
                self.step(2, self.log_alpha.exp() * (-log_prob.mean().item() - goal))

    def step(self, number, loss):
        for opt in self.opts:
            opt.zero_grad()
        loss.backward()
        self.opts[number].step()


VARIANTS = {
    "sac": {"real_ratio": 1.0},
    "sac-fixed-alpha": {"real_ratio": 1.0, "alpha": 0.2},
    "sac-target-entropy": {"real_ratio": 1.0, "target_entropy": -2.0, "gamma": 0.9},
    "sac-tau": {"real_ratio": 1.0, "tau": 0.5, "critic_layer_norm": True},
    "sac-many-updates": {"real_ratio": 1.0, "updates_per_step": 10, "total_timesteps": 12},
    "mbpo": {},
    "mbpo-half": {"real_ratio": 0.5, "alpha": 0.2},
    "mbpo-model-alone": {"real_ratio": 0.0, "tau": 0.5},
}


@pytest.mark.parametrize("flags", VARIANTS.values(), ids=VARIANTS)
def test_B11_S13_S14_whole_loop_by_hand(walk, flags, monkeypatch):
    """Terminated and truncated episodes, actions in a box that is not symmetric, every draw. With
    a real ratio of 1 it is SAC, and the model is not touched."""
    args = replace(walk, total_timesteps=25, learning_rate=3e-3, retain_steps=1000)
    args = replace(args, **flags)
    monkeypatch.setattr(mbpo, "fit_model", fake_fit)
    if args.real_ratio == 1:
        for owner, name in ((mbpo, "fit_model"), (mbpo, "rollout"), (mbpo.Dynamics, "sample")):
            monkeypatch.setattr(owner, name, lambda *_, name=name: pytest.fail(f"{name} is called"))
    mbpo.train(args)
    hand = ByHand(args)
    hand.run()
    checkpoint = load(args.run_dir)
    assert checkpoint["episode"] >= 2 or "total_timesteps" in flags
    for name, mine in (("real", hand.real), ("imagined", hand.imagined)):
        stored = checkpoint[name]["rows"]
        assert len(stored) == len(mine)
        expected = [
            torch.cat([obs, action, torch.tensor([reward]).float(), next_obs, torch.tensor([end])])
            for obs, action, reward, next_obs, end in mine
        ]
        if expected:
            expected = torch.stack(expected)
            torch.testing.assert_close(stored[:, :7], expected, rtol=1e-4, atol=1e-4)
    assert (len(hand.imagined) == 0) == (args.real_ratio == 1)
    sizes = (2, 1, args.hidden_dim, args.critic_layer_norm)
    for name, mine in (("critic", hand.critics), ("target_critic", hand.targets)):
        critic = mbpo.EnsembleCritic(2, *sizes)
        critic.load_state_dict(checkpoint[name])
        for actual, wanted in zip(critics_of(critic, *sizes).parameters(), mine.parameters()):
            torch.testing.assert_close(actual, wanted, rtol=2e-3, atol=2e-4)
    for actual, wanted in zip(checkpoint["actor"].values(), hand.actor.state_dict().values()):
        torch.testing.assert_close(actual, wanted, rtol=2e-3, atol=2e-4)
    torch.testing.assert_close(checkpoint["log_alpha"], hand.log_alpha.detach(), atol=1e-4, rtol=0)


def test_sac_leaves_the_model_as_it_was(walk):
    """And imagines nothing."""
    args = replace(walk, real_ratio=1.0)
    mbpo.train(args)
    torch.manual_seed(args.seed)
    mbpo.GaussianActor(2, 1, args.hidden_dim)
    mbpo.EnsembleCritic(2, 2, 1, args.hidden_dim, False)
    fresh = mbpo.Dynamics(3, 2, 2, 1, args.model_hidden_dim, True).state_dict()
    checkpoint = load(args.run_dir)
    assert all(torch.equal(checkpoint["model"][name], fresh[name]) for name in fresh)
    assert len(checkpoint["imagined"]["rows"]) == 0


def test_fits_and_updates_come_when_they_should(walk, monkeypatch, spy):
    """The first fit when the random steps are over, then every 7 steps; updates from the step after
    the first fit on, G per step of each network; errors on fresh steps from the second fit on."""
    fits, updates, original = [], spy("mixed_batches"), mbpo.fit_model

    def fit(model, real, num_fresh, *rest):
        fits.append((real.size, num_fresh, len(updates)))
        return original(model, real, num_fresh, *rest)

    monkeypatch.setattr(mbpo, "fit_model", fit)
    moves = spy("update_target")
    args = replace(walk, learning_starts=6, model_train_interval=7, updates_per_step=3)
    mbpo.train(replace(args, total_timesteps=22))
    assert fits == [(6, 0, 0), (13, 7, 6), (20, 7, 13)]  # before the updates of its step
    assert [call[2] for call in updates] == [3] * 16
    checkpoint = load(args.run_dir)
    assert len(moves) == checkpoint["num_updates"] == 48
    for name in ("critic_opt", "actor_opt", "alpha_opt"):
        assert {state["step"].item() for state in checkpoint[name]["state"].values()} == {48}


def test_a_rollout_is_of_the_model_just_fitted_and_of_the_current_policy(walk, monkeypatch):
    seen, original, fit = [], mbpo.rollout, mbpo.fit_model
    actors, init = [], mbpo.GaussianActor.__init__
    monkeypatch.setattr(
        mbpo.GaussianActor,
        "__init__",
        lambda self, *sizes: actors.append(self) or init(self, *sizes),
    )

    def rollout(model, actor, *rest):
        assert actor is actors[0]
        seen.append((actor.net[0].weight.clone(), model.net[0].weight.clone()))
        return original(model, actor, *rest)

    def fit_model(model, real, *rest):
        result = fit(model, real, *rest)
        seen.append(model.net[0].weight.clone())
        return result

    monkeypatch.setattr(mbpo, "rollout", rollout)
    monkeypatch.setattr(mbpo, "fit_model", fit_model)
    mbpo.train(replace(walk, total_timesteps=16))
    assert len(seen) == 6
    for fitted, (_, used) in zip(seen[::2], seen[1::2]):
        assert torch.equal(fitted, used)
    assert not torch.equal(seen[1][0], seen[3][0]) and not torch.equal(seen[0], seen[2])


def test_S9_the_actor_step_leaves_no_gradient_in_the_critics(walk, monkeypatch):
    critics, original = [], mbpo.EnsembleCritic.__init__
    monkeypatch.setattr(
        mbpo.EnsembleCritic,
        "__init__",
        lambda self, *sizes: critics.append(self) or original(self, *sizes),
    )
    seen, loss = [], mbpo.temperature_loss

    def after_the_actor(*args):
        seen.append([parameter.grad.clone() for parameter in critics[0].parameters()])
        return loss(*args)

    grads, critic_loss = [], mbpo.sac_loss

    def before(q, target):
        value = critic_loss(q, target)
        expected = torch.autograd.grad(value, list(critics[0].parameters()), retain_graph=True)
        grads.append([gradient.clone() for gradient in expected])
        return value

    monkeypatch.setattr(mbpo, "sac_loss", before)
    monkeypatch.setattr(mbpo, "temperature_loss", after_the_actor)
    mbpo.train(replace(walk, total_timesteps=8))
    assert len(seen) == len(grads) == 8
    for left, right in zip(seen, grads):
        for actual, expected in zip(left, right):
            torch.testing.assert_close(actual, expected)


def test_first_actions_are_uniform_and_then_the_policy_acts_with_noise(walk):
    """Uniform in [-1, 1], as stored; then the Gaussian, which is narrower, and not its mean."""
    args = replace(walk, total_timesteps=1700, learning_starts=1500, updates_per_step=1)
    args = replace(args, real_ratio=1.0, learning_rate=1e-12, eval_interval=2000)
    mbpo.train(args)
    action = load(args.run_dir)["real"]["rows"][:, 2]
    assert -1 <= action[:1500].min() < -0.98 and 0.98 < action[:1500].max() <= 1
    quartiles = np.quantile(action[:1500], [0.25, 0.5, 0.75])
    np.testing.assert_allclose(quartiles, [-0.5, 0, 0.5], atol=0.08)
    # the untrained Gaussian has log std -1.5: a std of 0.22 about 0, where uniform has 0.58
    assert action[:1500].std().item() == pytest.approx(0.577, abs=0.03)
    assert action[1500:].std().item() == pytest.approx(0.22, abs=0.03)


def test_S12_the_environment_gets_actions_in_its_own_units(walk, monkeypatch):
    """The box is [-1, 3]; stored and imagined actions are in [-1, 1]."""
    taken = []
    step = gym.envs.registry["Walk-v0"].entry_point.step
    monkeypatch.setattr(
        gym.envs.registry["Walk-v0"].entry_point,
        "step",
        lambda self, action: taken.append(action[0]) or step(self, action),
    )
    monkeypatch.setattr(common, "evaluate", lambda *_: np.zeros(2))
    mbpo.train(walk)
    checkpoint = load(walk.run_dir)
    stored = checkpoint["real"]["rows"][:, 2].numpy()
    np.testing.assert_allclose(taken, 1 + 2 * stored, atol=1e-6)
    assert min(taken) < -0.1 and max(taken) > 2.1
    assert checkpoint["imagined"]["rows"][:, 2].abs().max() <= 1


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_schedules_span_exactly_the_updates_of_the_run(walk, spy, schedule):
    """Of all optimisers; the model's has no warm-up, and falls with the rest."""
    calls, fits = spy("lr_factor"), spy("fit_model")
    args = replace(walk, lr_schedule=schedule, warmup_updates=3, model_learning_rate=0.02)
    mbpo.train(args)
    total = 26 * 2
    of_updates = [call for call in calls if call[3] == 3]
    assert [call[0] for call in of_updates] == list(range(1, total + 1))
    assert {call[1] for call in calls} == {total} and {call[2] for call in calls} == {schedule}
    last = 1 / (total - 3)
    last = last if schedule == "linear" else 0.5 * (1 - math.cos(math.pi * last))
    assert of_updates[-1][-1] == pytest.approx(last)
    opts = [load(args.run_dir)[name] for name in ("actor_opt", "critic_opt", "alpha_opt")]
    lr = {opt["param_groups"][0]["lr"] for opt in opts}
    assert lr == {args.learning_rate * of_updates[-1][-1]}
    # fits at 4, 9, 14 ..., after 0, 4 x 2, 9 x 2 ... updates: the one of their own step is next
    progress = [2 * max(0, step - 5) / total for step in (4, 9, 14, 19, 24, 29)]
    expected = [
        1 - p if schedule == "linear" else 0.5 + 0.5 * math.cos(math.pi * p) for p in progress
    ]
    assert [call[3] for call in fits] == pytest.approx([0.02 * factor for factor in expected])


def test_S2_S5_B12_no_stored_pair_crosses_a_reset_and_only_ends_reset(walk, spy):
    """The second observation counts the steps of an episode: it starts again after an end, and at
    no other step, such as that of a fit."""
    fits, args = spy("fit_model"), replace(walk, total_timesteps=300, model_train_interval=3)
    args = replace(args, max_model_epochs=1, model_batch_size=256, eval_interval=1000)
    mbpo.train(replace(args, updates_per_step=1))
    obs, time, _, _, next_obs, next_time, terminated, truncated = load(args.run_dir)["real"][
        "rows"
    ].T
    assert torch.equal(next_time, time + 1)
    done = (terminated + truncated) > 0
    assert done.sum() > 30 and terminated.sum() > 5 and truncated.sum() > 5
    assert torch.equal(time[1:] == 0, done[:-1])
    assert torch.equal(obs[1:][~done[:-1]], next_obs[:-1][~done[:-1]])
    assert torch.equal(terminated > 0, next_obs.abs() > 2)
    assert (next_time[(truncated > 0)] == 10).all()
    in_mid_episode = [step for step in range(4, 300, 3) if not done[step - 1]]
    assert len(fits) == 99 and len(in_mid_episode) > 50


def test_S18_episode_k_starts_from_seed_and_k(walk, tmp_path):
    """Not from what came before it: two runs that act differently start the same episodes."""
    starts = []
    for name, flags in (("a", {}), ("b", {"learning_starts": 100})):
        args = replace(walk, total_timesteps=200, real_ratio=1.0, run_dir=str(tmp_path / name))
        mbpo.train(replace(args, eval_interval=1000, updates_per_step=1, **flags))
        rows = load(args.run_dir)["real"]["rows"]
        starts.append(rows[rows[:, 1] == 0, 0][:20])
    assert torch.equal(*starts) and len(starts[0].unique()) == 20


@pytest.mark.parametrize("flags", [{}, {"buffer_capacity": 13, "retain_steps": 5}], ids=str)
def test_B13_model_and_both_buffers_come_back(walk, flags):
    """Resumed at 17 for one step without a fit: the model with its elites and scales, and imagined
    rows, are those of the checkpoint, and the real ring has gone on by one."""
    args = replace(walk, total_timesteps=17, **flags)
    mbpo.train(args)
    before = load(args.run_dir)
    mbpo.train(replace(args, resume=args.run_dir, total_timesteps=18))
    after = load(args.run_dir)
    assert before["model"].keys() == after["model"].keys()
    for name in before["model"]:
        assert torch.equal(before["model"][name], after["model"][name])
    for name in ("input_mean", "input_std", "target_mean", "target_std"):
        assert before["model"][name].unique().numel() > 1  # not what it starts with
    assert len(before["model"]["elites"]) == 2
    assert before["imagined"]["capacity"] == (80 if not flags else 40)
    for name in ("position", "capacity"):
        assert before["imagined"][name] == after["imagined"][name]
    assert torch.equal(before["imagined"]["rows"], after["imagined"]["rows"])
    left, right = oldest_first(before["real"]), oldest_first(after["real"])
    assert before["real"]["capacity"] == after["real"]["capacity"] == args.buffer_capacity
    if flags:
        assert torch.equal(left[1:], right[:-1]) and len(right) == 13
        assert (before["real"]["position"], after["real"]["position"]) == (17 % 13, 18 % 13)
        assert len(before["imagined"]["rows"]) == 40  # a full ring, too
    else:
        assert torch.equal(left, right[:-1]) and after["real"]["position"] == len(right) == 18


def test_B11_S14_alpha_is_learned_from_one(walk, spy):
    """By default, towards an entropy of minus half the action's dimension."""
    losses, targets = spy("temperature_loss"), spy("soft_target")
    mbpo.train(walk)
    assert {call[2] for call in losses} == {-0.5}
    alphas = [call[4].item() for call in targets]
    assert alphas[0] == 1 and len(set(alphas)) == len(alphas) == 52


def test_a_fixed_alpha_stays(walk, spy):
    for alpha in (0.0, 0.3):
        calls = spy("soft_target")
        args = replace(walk, alpha=alpha, run_dir=f"{walk.run_dir}-{alpha}")
        mbpo.train(args)
        assert {round(call[4].item(), 6) for call in calls} == {alpha}
        assert not load(args.run_dir)["alpha_opt"]["state"]


def logged(run_dir):
    """(step, key) -> value"""
    lines = Path(run_dir, "metrics.csv").read_text().splitlines()[1:]
    rows = [line.split(",") for line in lines]
    return {(int(step), key): float(value) for step, _, key, value in rows}


def test_what_is_logged_of_model_and_rollouts(walk, spy):
    """Against the rows themselves, and against the q of the last update of a step."""
    rollouts, losses = spy("rollout"), spy("sac_loss")
    args = replace(walk, total_timesteps=15, log_interval=1, real_ratio=0.25)
    mbpo.train(args)
    log, fits = logged(args.run_dir), (4, 9, 14)
    for step, call in zip(fits, rollouts, strict=True):
        rows = torch.cat(call[-1])
        assert log[step, "stats/rollout_length"] == call[4]
        assert log[step, "stats/rollout_reward"] == pytest.approx(
            rows[:, 3].mean().item(), rel=1e-4
        )
        ended = rows[:, 6].mean().item()
        assert log[step, "stats/rollout_terminated"] == pytest.approx(ended, rel=1e-4)
        largest = rows[:, 4:6].abs().max().item()
        assert log[step, "stats/rollout_abs_max"] == pytest.approx(largest, rel=1e-4)
    assert {step for step, key in log if key == "stats/holdout_mse"} == set(fits)
    assert {step for step, key in log if key == "stats/fresh_mse"} == {9, 14}
    for step in range(5, 16):
        q, target, _ = losses[2 * (step - 4) - 1]
        error = (q - target).abs()
        for name, part in (("real", slice(0, 8)), ("model", slice(8, 32))):
            expected = q[:, part].mean().item()
            assert log[step, f"stats/q_{name}"] == pytest.approx(expected, rel=1e-3, abs=1e-5)
            expected = error[:, part].mean().item()
            assert log[step, f"stats/td_error_{name}"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("part", ["losses/model", "stats/rollout_abs_max"])
def test_a_model_that_diverged_stops_the_run(walk, monkeypatch, part):
    """Before its rows reach a critic."""
    original = mbpo.fit_model

    def fit(model, *rest):
        statistics = original(model, *rest)
        if part == "losses/model":
            return statistics | {part: nan}
        model.target_mean.fill_(inf)
        return statistics

    monkeypatch.setattr(mbpo, "fit_model", fit)
    monkeypatch.setattr(mbpo, "mixed_batches", lambda *_: pytest.fail("there was an update"))
    with pytest.raises(
        mbpo.InputError, match=rf"^{part} is (nan|inf) at step 4: it diverged; lower"
    ):
        mbpo.train(walk)


def test_patience_waits_for_updates(walk):
    """While steps are random the policy is the same: nothing to evaluate, nothing to wait for."""
    args = replace(walk, eval_interval=5, learning_starts=14)
    mbpo.train(args)
    steps = [step for step, key in logged(args.run_dir) if key == "eval/return_mean"]
    assert steps == [0, 15, 20, 25, 30]


def test_defaults_are_what_the_docstring_says():
    """The ensemble and the share of real rows are the paper's, as is the command of the docstring
    for the rest."""
    args = mbpo.Args()
    assert (args.num_members, args.num_elites, args.real_ratio) == (7, 5, 0.05)
    assert args.alpha is None and args.tau == 0.005 and args.gamma == 0.99
    assert args.model_learning_rate == 1e-3 and args.normalize_targets
    assert not args.critic_layer_norm and args.batch_size == 256
    hopper = mbpo.__doc__.index("python algos/mbpo.py --env-id Hopper-v5")
    command = mbpo.__doc__[hopper:].split("\n\n")[0]
    flags = command.replace("\\\n", " ").split()
    paper = tyro.cli(mbpo.Args, args=flags[2:])
    mbpo.check_args(paper)
    first = paper.learning_starts  # the authors count from the end of the random steps
    assert (first, paper.total_timesteps - first) == (5000, 125_000)
    assert (paper.num_members, paper.num_elites, paper.model_hidden_dim) == (7, 5, 200)
    assert (paper.model_learning_rate, paper.model_batch_size) == (1e-3, 256)
    assert (paper.learning_rate, paper.hidden_dim, paper.batch_size) == (3e-4, 256, 256)
    assert (paper.updates_per_step, paper.real_ratio) == (20, 0.05)
    assert (paper.target_entropy, paper.tau, paper.gamma) == (-1, 0.005, 0.99)
    assert paper.rollout_batch_size / paper.model_train_interval == 400  # per step
    assert paper.model_train_interval == 250 and paper.retain_steps == 1000
    assert (paper.rollout_grow_from - first, paper.rollout_grow_until - first) == (20_000, 150_000)
    assert (paper.min_rollout_length, paper.max_rollout_length) == (1, 15)
    assert not paper.normalize_targets
    assert mbpo.Dynamics.WEIGHT_DECAY == (2.5e-5, 5e-5, 7.5e-5, 7.5e-5, 1e-4)
