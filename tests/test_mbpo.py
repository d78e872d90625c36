"""MBPO: model, fits, rollouts, buffers and loop against numbers worked out by other means.

What it shares with RLPD, word for word, is tested in test_rlpd.py, too.
"""

import math
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
import tyro
from conftest import load, metrics_of, spy_on, tiny_args
from torch import nn

import common
from algos import mbpo

CPU = torch.device("cpu")
nan, inf = math.nan, math.inf


@pytest.fixture
def walk(tmp_path):
    """A run in the environment where every step depends on seed and actions: fits at 4, 9, 14..."""
    args = tiny_args(mbpo, None, tmp_path / "run")
    return replace(args, env_id="Walk-v0", total_timesteps=30)


@pytest.fixture
def spy(monkeypatch):
    return spy_on(monkeypatch, mbpo)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def make_model(num_members=3, num_elites=2, learns_end=False, hidden_dim=8, noise=0.3):
    """Of two observations and one action. The constants that biases start with hide mistakes."""
    torch.manual_seed(0)
    model = mbpo.Dynamics(num_members, num_elites, 2, 1, hidden_dim, learns_end)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn(parameter.shape))
    return model


SCALES = {  # some that tell each input and each output apart
    "input_mean": torch.tensor([0.3, 2.0, -0.1]),
    "input_std": torch.tensor([1.5, 4.0, 0.5]),
    "target_mean": torch.tensor([-1.0, 0.2, 1.0]),
    "target_std": torch.tensor([0.7, 0.4, 0.1]),
}


def set_scales(model):
    for name, value in SCALES.items():
        getattr(model, name).copy_(value)


def make_rows(num_rows):
    """Transitions of two observations and one action. [n, 8]"""
    rng = np.random.default_rng(0)
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
    small = {"num_members": 3, "num_elites": 2, "max_model_updates": 10, "model_batch_size": 16}
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
    """The mean over rows and dimensions of each member, against torch.distributions; their sum, so
    that each learns as it would alone; the penalty on the bounds. Gradients: finite differences."""
    mean, raw, target = torch.randn(3, 3, 5, 4, dtype=torch.float64)
    low, high = torch.randn(2, 4, dtype=torch.float64)
    loss = mbpo.mbpo_model_loss(mean, raw, target, low, high)
    density = torch.distributions.Normal(mean, (0.5 * raw).exp()).log_prob(target)
    members = [(-2 * density[m] - math.log(2 * math.pi)).sum().item() / (5 * 4) for m in range(3)]
    penalty = 0.01 * sum(high.tolist()) - 0.01 * sum(low.tolist())
    assert loss.item() == pytest.approx(sum(members) + penalty, rel=1e-10)

    def whole(mean, raw, low, high):
        return mbpo.mbpo_model_loss(mean, mbpo.bound_log_var(raw, low, high), target, low, high)

    inputs = [x.clone().requires_grad_() for x in (mean, 3 * raw, low - 1, high + 1)]
    assert torch.autograd.gradcheck(whole, inputs)


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
    full, bound, rows, one = torch.zeros(3, 4, 2), torch.zeros(2), torch.zeros(3, 4), torch.ones(())
    q, row, column = torch.zeros(2, 4), torch.zeros(4), torch.zeros(4, 1)
    for loss, *inputs in (
        (mbpo.mbpo_model_loss, full, full, full[:1], bound, bound),
        (mbpo.mbpo_model_loss, full, full[:, :, :1], full, bound, bound),
        (mbpo.mbpo_model_loss, full, full, full[:, :1], bound, bound),
        (mbpo.mbpo_model_loss, full[0], full[0], full[0], bound, bound),
        (mbpo.mbpo_model_loss, full, full, full, bound[:1], bound),
        (mbpo.mbpo_model_loss, full, full, full, bound[:, None], bound[:, None]),
        (mbpo.termination_loss, rows[..., None], rows),
        (mbpo.termination_loss, rows[..., None], rows[..., None]),
        (mbpo.termination_loss, rows, rows[:1]),
        (mbpo.sac_loss, q, column),
        (mbpo.sac_loss, q, q),
        (mbpo.sac_loss, q[..., None], column),
        (mbpo.sac_policy_loss, column, q, one),
        (mbpo.sac_policy_loss, column, q[..., None], one),
        (mbpo.soft_target, column, row, q, row, one, 0.9),
        (mbpo.soft_target, row, column, q, row, one, 0.9),
        (mbpo.soft_target, row, row, q[..., None], row, one, 0.9),
        (mbpo.temperature_loss, one, column, 0.0),
    ):
        with pytest.raises(AssertionError):
            loss(*inputs)


def test_S8_losses_are_means_of_rows():
    """A batch of N is the mean of N batches of one. Rows are paired: permuting one input changes a
    loss, but for the actor's, a sum of its two terms."""
    low, high, alpha = torch.full((3,), -2.0), torch.ones(3), torch.tensor(0.7)
    table, q, row = torch.randn(3, 2, 6, 3), torch.randn(2, 6), torch.randn(1, 6)
    for loss, is_paired, *inputs in (
        (lambda *tables: mbpo.mbpo_model_loss(*tables, low, high), True, *table),
        (mbpo.termination_loss, True, q, torch.eye(6)[:2]),
        (lambda q, target: mbpo.sac_loss(q, target[0]), True, q, row),
        (lambda q, log_prob: mbpo.sac_policy_loss(log_prob[0], q, alpha), False, q, row),
    ):
        rows = [loss(*(x[:, [b]] for x in inputs)) for b in range(6)]
        torch.testing.assert_close(loss(*inputs), torch.stack(rows).mean())
        permuted = loss(inputs[0].flip(1), *inputs[1:])
        assert torch.isclose(permuted, loss(*inputs)) == (not is_paired)


# ---- networks


@pytest.mark.parametrize("layer_norm", [True, False])
def test_each_critic_by_hand(layer_norm):
    """Linear, layer norm, ReLU, twice, and Linear, in matrix products of its own parameters."""
    critic = mbpo.TwoCritics(3, 2, [8, 8], layer_norm)
    with torch.no_grad():  # biases and affine parameters start at constants, which hide mistakes
        for parameter in critic.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    obs, action = torch.randn(5, 3), torch.randn(5, 2)
    expected = []
    for member in critic.members:
        own, h = list(member.parameters()), torch.cat([obs, action], dim=1)
        for _ in range(2):
            h = h @ own.pop(0).T + own.pop(0)
            if layer_norm:
                deviation = h - h.mean(dim=1, keepdim=True)
                h = deviation / (deviation.pow(2).mean(dim=1, keepdim=True) + 1e-5).sqrt()
                h = h * own.pop(0) + own.pop(0)
            h = h.clamp(min=0)
        expected.append((h @ own.pop(0).T + own.pop(0))[:, 0])
        assert own == []
    assert len(expected) == 2
    torch.testing.assert_close(critic(obs, action), torch.stack(expected), rtol=1e-4, atol=1e-5)


def test_R3_the_two_critics_share_nothing():
    """They start differently, and a loss of the second reaches its own parameters alone."""
    critic = mbpo.TwoCritics(3, 2, [8, 8], layer_norm=True)
    q = critic(torch.randn(5, 3), torch.randn(5, 2))  # [2, 5]
    assert (q[0] != q[1]).all()
    q[1].sum().backward()
    assert all(parameter.grad.abs().sum() == 0 for parameter in critic.members[0].parameters())
    assert all(parameter.grad.abs().sum() > 0 for parameter in critic.members[1].parameters())


def test_initial_weights_of_the_critics_are_xavier():
    for member in mbpo.TwoCritics(17, 6, [256, 256], layer_norm=False).members:
        for layer in (member[0], member[2], member[4]):
            bound = math.sqrt(6 / sum(layer.weight.shape))
            assert layer.weight.abs().max().item() == pytest.approx(bound, rel=2e-2)
            assert layer.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.2)
            assert layer.bias.abs().max() == 0


def test_log_var_stays_within_its_bounds():
    """For any input, by the closed form; with a gradient outside, where a clip has none: a variance
    that once was too large would stay so."""
    raw = torch.cat([torch.tensor([-1e4]), torch.linspace(-40, 40, 801), torch.tensor([1e4])])
    again = raw.double().requires_grad_()
    raw.requires_grad_()
    log_var = mbpo.bound_log_var(raw, torch.tensor(-10.0), torch.tensor(0.5))
    wanted = bounded(again, -10.0, 0.5)
    assert (log_var >= -10).all() and (log_var <= 0.5 + 1e-4).all()
    torch.testing.assert_close(log_var.double(), wanted, rtol=1e-5, atol=1e-5)
    log_var.sum().backward()
    wanted.sum().backward()
    torch.testing.assert_close(raw.grad.double(), again.grad, rtol=1e-4, atol=1e-6)
    at = {x: raw.grad[1 + 10 * (40 + x)].item() for x in (-15, -5, 5)}
    # sigmoid of the distance to the bound outside, nearly 1 inside
    assert at[-15] == pytest.approx(1 / (1 + math.exp(5)), rel=1e-2) and at[-5] > 0.98
    assert at[5] == pytest.approx(1 / (1 + math.exp(4.5)), rel=1e-2)


@pytest.mark.parametrize("learns_end", [False, True])
def test_each_member_is_an_ordinary_mlp(learns_end):
    """Four hidden layers with SiLU; first the means, then the log variances, then the logit. A loss
    of one member reaches its own slices alone."""
    model = make_model(learns_end=learns_end)
    inputs = torch.randn(3, 5, 3)  # each member has its own rows
    expected = torch.stack([member_of(model, m)(inputs[m]) for m in range(3)])
    assert expected.shape == (3, 5, 3 + 3 + learns_end) and len(member_of(model, 0)) == 9
    output = model.net(inputs)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    mean, log_var, end_logit = model.heads(expected)
    assert torch.equal(mean, expected[..., :3]) and torch.equal(end_logit, expected[..., 6:])
    wanted = bounded(expected[..., 3:6], model.min_log_var, model.max_log_var)
    torch.testing.assert_close(log_var.double(), wanted, rtol=1e-4, atol=1e-4)
    output[1].sum().backward()
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
        assert len({weight.sum().item() for weight in layer.weight}) == 7  # each its own
    assert model.min_log_var.tolist() == [-10] * 3 and model.max_log_var.tolist() == [0.5] * 3
    assert model.elites.tolist() == [0, 1, 2, 3, 4]


def test_B9_weight_decay_is_part_of_the_gradient():
    """With gradients as small as the decay: Adam of the loss + decay_l / 2 |W_l|^2 in layer l; of
    biases and bounds, nothing is added."""
    model = make_model()
    opt, generator = model.optimizer(0.01), seeded()
    decays = {f"net.{2 * i}.weight": d for i, d in enumerate((2.5e-5, 5e-5, 7.5e-5, 7.5e-5, 1e-4))}
    copies = {name: nn.Parameter(x.detach().double()) for name, x in model.named_parameters()}
    plain = torch.optim.Adam(copies.values(), 0.01)
    assert decays.keys() < copies.keys()
    for _ in range(4):
        for name, parameter in model.named_parameters():
            parameter.grad = 1e-5 * torch.randn(parameter.shape, generator=generator)
            decay = decays.get(name, 0.0) * copies[name].detach()
            copies[name].grad = parameter.grad.double() + decay
        opt.step()
        plain.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.double(), copies[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("constant", [0.0, 0.1, -1 / 3, 1e-3, 12_345.678])
def test_a_column_that_is_constant_but_for_rounding_has_std_one(constant):
    """Divided by the std of its last bits, it would be noise as large as the signal; a column that
    moves by a hundredth of a percent is scaled as any other."""
    table = torch.full((1000, 3), constant)
    table[::2, 1] = torch.nextafter(table[::2, 1], torch.tensor(inf))
    table[::2, 2] += 1e-4 * max(abs(constant), 1e-3)
    model = make_model()
    model.set_scales(table, table, True)
    for std in (model.input_std, model.target_std):
        assert std[0] == 1 and (constant == 0 or std[1] == 1)
        assert std[2].item() == pytest.approx(0.5e-4 * max(abs(constant), 1e-3), rel=0.05)


# ---- samples of the model


@pytest.mark.parametrize("learns_end", [False, True])
def test_B6_sample_by_hand(learns_end):
    """Row by row, with the member drawn for it: s' = s + change and r in the environment's units,
    reward first, as mean + std x noise. MOPO would subtract where members disagree."""
    model = make_model(num_members=4, num_elites=3, learns_end=learns_end)
    model.elites.copy_(torch.tensor([3, 0, 2]))
    set_scales(model)
    obs, action = torch.randn(20, 2), torch.randn(20, 1)
    reward, next_obs, end_logit = model.sample(obs, action, seeded())
    again = seeded()
    choice = torch.randint(3, (20,), generator=again).tolist()
    noise = torch.randn(20, 3, generator=again)
    assert set(choice) == {0, 1, 2}
    for b in range(20):
        x = (torch.cat([obs[b], action[b]]) - SCALES["input_mean"]) / SCALES["input_std"]
        output = member_of(model, [3, 0, 2][choice[b]])(x)
        std = (0.5 * bounded(output[3:6], model.min_log_var, model.max_log_var)).exp()
        y = SCALES["target_mean"] + SCALES["target_std"] * (output[:3] + std * noise[b])
        assert reward[b].item() == pytest.approx(y[0].item(), rel=1e-3, abs=1e-4)
        expected = [obs[b, 0].item() + y[1].item(), obs[b, 1].item() + y[2].item()]
        assert next_obs[b].tolist() == pytest.approx(expected, rel=1e-3, abs=1e-3)
        assert end_logit[b].tolist() == pytest.approx(output[6:].tolist(), rel=1e-3, abs=1e-4)
    assert reward.shape == (20,) and end_logit.shape == (20, int(learns_end))


def test_B1_only_elites_make_rollouts():
    """Each row and each call draws one of them, all equally often; the others would answer NaN."""
    model = make_model(num_members=6, num_elites=3)
    model.elites.copy_(torch.tensor([4, 1, 3]))
    with torch.no_grad():
        model.min_log_var.fill_(-60.0)  # next to no noise
        for parameter in model.net.parameters():
            parameter.zero_()
            parameter[[0, 2, 5]] = nan
        for m in (1, 3, 4):  # member m says m, for any input
            model.net[-1].bias[m, 0] = torch.tensor([m, m, m, -1e4, -1e4, -1e4])
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


# ---- rollouts


class FakeModel:
    """One step further in both dimensions; the reward is 10 times the first, plus the action."""

    def sample(self, obs, action, generator):
        return 10 * obs[:, 0] + action[:, 0], obs + 1, obs[:, :1] - 2


def make_actor():
    torch.manual_seed(1)
    actor = mbpo.GaussianActor(2, 1, [8, 8])
    with torch.no_grad():
        actor.net[-1].weight.mul_(100)
        actor.net[-1].bias.copy_(torch.tensor([0.4, 0.3]))
    return actor


def ends_on_the_right(next_obs):
    return next_obs[:, 0] > 3.5


@pytest.mark.parametrize(
    ("ends", "length", "num_steps"),
    [(None, 3, 3), (ends_on_the_right, 1, 1), (ends_on_the_right, 3, 3), (ends_on_the_right, 7, 4)],
)
def test_B6_B7_a_rollout_by_hand(ends, length, num_steps):
    """Actions are drawn from the policy; an end, if not known, with the probability of its logit.
    A row is stored once per step, its end with terminated 1, then no more. None is truncated. A
    rollout has the length asked for, unless all rows have ended, here in the fourth step."""
    rows = torch.stack([torch.linspace(0, 4, 40), 100 * torch.arange(40.0)], dim=1)
    actor, again = make_actor(), seeded()
    tables = mbpo.rollout(FakeModel(), actor, ends, rows, length, seeded())
    assert len(tables) == num_steps and len(tables[0]) == 40
    for table in tables:
        mean, log_std = actor(rows)
        action = torch.tanh(mean + log_std.exp() * torch.randn(mean.shape, generator=again))
        ended = rows[:, 0] > 2.5
        if ends is None:
            chance = 1 / (1 + torch.exp(2 - rows[:, 0]))
            ended = torch.rand(len(rows), generator=again) < chance
        reward, flags = 10 * rows[:, :1] + action, torch.stack([ended, ended & False], dim=1)
        expected = torch.cat([rows, action, reward, rows + 1, flags], dim=1)
        torch.testing.assert_close(table, expected)
        assert ended.any()
        rows = rows[~ended] + 1
    assert (len(rows) == 0) == (num_steps < length)


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
NEVER_END = "HalfCheetah-v5 HumanoidStandup-v5 Pendulum-v1 Pusher-v5 Reacher-v5 Swimmer-v5"
LARGE = "Ant-v5 Humanoid-v5 HumanoidStandup-v5"


def test_B8_all_of_these_are_known():
    assert mbpo.TERMINATION.keys() == {*CAN_END.split(), *NEVER_END.split()}


@pytest.mark.parametrize(
    "env_id",
    [
        pytest.param(env_id, marks=[pytest.mark.slow] if env_id in LARGE.split() else [])
        for env_id in f"{CAN_END} {NEVER_END}".split()
    ],
)
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


def at(index, *values):
    """Changes of a state: one of these values, in one of these dimensions."""
    return [(i, value) for i in np.atleast_1d(index) for value in values]


EDGES = {  # env: changes that end it, changes that do not, of the state in which an episode begins
    "Hopper-v5": (  # the authors write abs(next_obs < 100), with a misplaced bracket: -200 passes
        at(0, 0.7, -5.0, nan)
        + at(1, 0.2, -0.2, 3.0, nan, inf, -inf)
        + at(range(2, 11), 100.0, -100.0, -200.0, nan, inf, -inf),
        at(0, 0.7001, 500.0) + at(1, 0.1999, -0.1999) + at(range(2, 11), 99.9, -99.9),
    ),
    "Walker2d-v5": (
        at(0, 0.8, 2.0, -1.0, nan, inf) + at(1, 1.0, -1.0, nan, -inf),
        at(0, 0.8001, 1.9999) + at(1, 0.9999, -0.9999) + at(2, 500.0),
    ),
    "Ant-v5": (
        at(0, 0.1999, 1.0001, -1.0) + at(range(105), nan, inf, -inf),
        at(0, 0.2, 1.0) + at(1, 500.0),
    ),
    "Humanoid-v5": (at(0, 1.0, 2.0, -1.0, nan, inf), at(0, 1.0001, 1.9999) + at(1, 500.0)),
    "InvertedPendulum-v5": (
        at(1, 0.2001, -0.2001, 3.0) + at(range(4), nan, inf, -inf),
        at(1, 0.2, -0.2) + at(0, 500.0),
    ),
    "InvertedDoublePendulum-v5": (
        at((1, 2, 3, 4), nan) + at((3, 4), -1.0),
        at(0, 5.0) + at(5, 500.0),
    ),
    "Pendulum-v1": ([], at(0, nan) + at(2, 500.0)),
}


@pytest.mark.parametrize("env_id", EDGES)
def test_B8_at_each_threshold(env_id):
    ending, going_on = EDGES[env_id]
    first_obs, _ = common.make_env(env_id).reset(seed=0)
    states = torch.tensor(first_obs, dtype=torch.float32).repeat(1 + len(ending + going_on), 1)
    for state, (i, value) in zip(states, ending + going_on):  # the last is not changed
        state[i] = value
    expected = [True] * len(ending) + [False] * (len(going_on) + 1)
    assert mbpo.TERMINATION[env_id](states).tolist() == expected


def test_B8_double_pendulum_ends_below_one_metre():
    """Two links of 0.6 m: the tip is at 0.6 (cos t1 + cos(t1 + t2)), for all pairs of angles."""
    first, second = np.meshgrid(np.linspace(-3.1, 3.1, 101), np.linspace(-3.1, 3.1, 101))
    first, second = first.flatten(), second.flatten()
    states = np.zeros((len(first), 9), np.float32)
    states[:, 1:5] = np.stack([np.sin(first), np.sin(second), np.cos(first), np.cos(second)], 1)
    height = 0.6 * (np.cos(first) + np.cos(first + second))
    clear = abs(height - 1) > 1e-5  # of rounding
    actual = mbpo.TERMINATION["InvertedDoublePendulum-v5"](torch.from_numpy(states)).numpy()
    np.testing.assert_array_equal(actual[clear], (height <= 1)[clear])
    assert 100 < (height > 1).sum() < len(height) - 100


@pytest.mark.parametrize(
    ("env_id", "kind", "width"), [("Walk-v0", "learned", 7), ("Pendulum-v1", "known", 8)]
)
def test_ends_are_known_or_learned(walk, spy, capsys, env_id, kind, width):
    """A logit only where there is no function."""
    calls, ends = spy("rollout"), mbpo.TERMINATION.get(env_id)
    mbpo.train(replace(walk, env_id=env_id, total_timesteps=10, quiet=False))
    assert {call[2] for call in calls} == {ends} and (ends is None) == (kind == "learned")
    assert load(walk.run_dir)["model"]["net.8.bias"].shape == (3, 1, width)
    assert f"termination is {kind}" in capsys.readouterr().out
    ended = load(walk.run_dir)["imagined"]["rows"][:, -2]
    assert (ended.sum() > 0) == (kind == "learned")


# ---- fits


def fit_by_hand(model, real, args, generator, learning_rate):
    """fit_model once more: a list of MLPs, each with its own Adam, torch.distributions, loops.
    -> members, bounds, elites, errors, number of epochs, last loss with its decay, R^2"""
    rows = real.rows[: real.size].double()
    inputs, end = rows[:, :3], rows[:, 6]
    targets = torch.cat([rows[:, 3:4], rows[:, 4:6] - rows[:, :2]], dim=1)  # r, s' - s
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
    best, errors = list(members), [inf] * len(members)
    epoch, waited = 0, 0
    steps = 0
    num_batches = len(range(0, len(training), args.model_batch_size))
    while steps + num_batches <= args.max_model_updates and waited < 6:
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
            steps += 1
        for m, member in enumerate(members):
            error = ((member(inputs[holdout])[:, :3] - targets[holdout]) ** 2).mean().item()
            if error < 0.99 * errors[m]:
                best[m], errors[m], waited = deepcopy(member), error, 0
    elites = sorted(range(len(members)), key=errors.__getitem__)[: args.num_elites]
    r2 = 1 - np.mean(errors) / targets.var(dim=0).mean().item()
    return best, (low, high), elites, errors, epoch, loss.item(), r2


@pytest.mark.parametrize(
    ("learns_end", "flags"),
    [
        (False, {}),
        (True, {"normalize_targets": False}),
        (False, {"num_members": 5, "num_elites": 3, "max_model_updates": 180}),
    ],
    ids=["known-end", "raw-targets", "patience"],
)
def test_B9_a_fit_by_hand(flags, learns_end):
    """The second one, which starts from the weights of the first, but with a new Adam. Every draw,
    batch and step; weights, bounds, elites and errors."""
    args = fit_args(**flags)
    model = make_model(args.num_members, args.num_elites, learns_end, noise=0.1)
    real, rate = filled(make_rows(55), capacity=100), 0.02
    mbpo.fit_model(model, real, 0, rate, fit_args(**flags | {"max_model_updates": 6}), seeded(1))
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
    assert statistics["stats/max_log_var"] == pytest.approx(bounds[1].mean().item(), abs=1e-3)
    if args.max_model_updates == 180:
        assert 7 < epochs < 60  # patience ran out


HOLD_OUT = {  # errors of each member by epoch, then for ever; epochs of the fit, the best of each
    "at-once": ([[9.0]], 1 + 6, [1]),  # more than 5 in vain
    "just-in-time": ([[*[9.0] * 6, 8.0]], 7 + 6, [7]),  # 5 in vain, then a better one
    "too-late": ([[*[9.0] * 7, 8.0]], 7, [1]),
    "slowly": ([[10.0, 9.93, 9.86]], 3 + 6, [3]),  # against the best, not the last
    "noise": ([[9.0, 8.92]], 7, [1]),  # 0.9 percent
    "cap": ([[40.0 - epoch for epoch in range(20)]], 15, [15]),
    "diverged": ([[9.0, 8.0, nan]], 2 + 6, [2]),
    "one-is-enough": ([[9.0], [10.0 / (1 + 0.1 * e) for e in range(8)]], 8 + 6, [1, 8]),
    # to its own best epoch; the lowest of these errors, not of the last ones, make the elites
    "each-its-own": ([[5.0, 4.96, 4.0], [4.0, 3.0, 9.0], [3.0, 9.0, 9.0, 2.9, 9.0]], 10, [3, 2, 4]),
}


@pytest.mark.parametrize(("errors", "epochs", "best"), HOLD_OUT.values(), ids=HOLD_OUT)
def test_B9_patience_and_each_member_goes_back_to_its_best_epoch(monkeypatch, errors, epochs, best):
    """All members learn on while one of them gets better by more than a percent."""
    weights, size = [], len(errors)

    def mse(self, inputs, targets):
        """The next errors, instead of true ones."""
        weights.append([member_of(self, m) for m in range(size)])
        return torch.tensor([(own + own[-1:] * 20)[len(weights) - 1] for own in errors])

    monkeypatch.setattr(mbpo.Dynamics, "mse", mse)
    num_elites = min(2, size)
    args = fit_args(num_members=size, num_elites=num_elites, max_model_updates=31)
    model = make_model(size, num_elites)
    statistics = mbpo.fit_model(model, filled(make_rows(40)), 0, 1e-2, args, seeded())
    assert len(weights) == statistics["stats/model_epochs"] == epochs
    for m, epoch in enumerate(best):
        for other in {epoch, 1, epochs}:
            pairs = zip(member_of(model, m)[::2], weights[other - 1][m][::2])
            same = [torch.equal(x.weight, y.weight) for x, y in pairs]
            assert same == [other == epoch] * 5
    lowest = [own[epoch - 1] for own, epoch in zip(errors, best)]
    assert model.elites.tolist() == sorted(range(size), key=lowest.__getitem__)[:2]
    actual = [statistics[f"stats/holdout_mse_{m}"] for m in range(size)]
    assert actual == pytest.approx(lowest)
    assert statistics["stats/holdout_mse"] == pytest.approx(np.mean(lowest))


@pytest.mark.parametrize(("num_rows", "epochs"), [(10, 12), (40, 6), (100, 2), (400, 1)])
def test_a_fit_is_capped_in_gradient_steps(monkeypatch, num_rows, epochs):
    """12 of them, in whole epochs and at least one: 8, 32, 80 and 320 training rows are 1, 2, 5 and
    20 batches of 16. A cap in epochs would leave the first fits, of few rows, almost none."""
    errors, steps = iter(range(100, 0, -1)), []  # always better: patience never runs out
    monkeypatch.setattr(mbpo.Dynamics, "mse", lambda *_: torch.full((3,), float(next(errors))))
    original = torch.optim.Adam.step
    monkeypatch.setattr(torch.optim.Adam, "step", lambda self: steps.append(0) or original(self))
    args = fit_args(max_model_updates=12)
    scalars = mbpo.fit_model(make_model(), filled(make_rows(num_rows)), 0, 1e-3, args, seeded())
    assert scalars["stats/model_epochs"] == epochs
    assert len(steps) == {10: 12, 40: 12, 100: 10, 400: 20}[num_rows]


def rows_seen(model, num_rows, args, generator):
    """Fit rows whose first observation is their number.
    -> rows, numbers held out per epoch, and numbers trained on per epoch, [M, n] each"""
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
    mbpo.fit_model(model, filled(rows), 0, 1e-3, args, generator)
    hook.remove()
    assert trained.pop() == []
    return rows, held_out, trained


def test_B4_bootstrap_and_hold_out():
    """Every member has its own rows, drawn with replacement once per fit and shuffled per epoch;
    the rows held out are the same for all, and no member is trained on any."""
    model, args = make_model(7, 5), fit_args(num_members=7, num_elites=5, max_model_updates=20)
    generator, fits = seeded(2), []
    for _ in range(2):
        _, held_out, trained = rows_seen(model, 100, args, generator)
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
    ("num_rows", "expected"), [(3, 1), (9, 1), (10, 2), (999, 199), (25_004, 5000), (30_000, 5000)]
)
def test_B4_a_fifth_is_held_out_at_most_5000_at_least_1(num_rows, expected):
    real, seen, model = mbpo.Buffer(30_000, 2, 1, CPU), [], make_model()
    real.add(make_rows(num_rows))
    model.net.register_forward_pre_hook(lambda net, inputs: seen.append(inputs[0].shape))
    args = fit_args(max_model_updates=1, model_batch_size=30_000)
    mbpo.fit_model(model, real, 0, 1e-3, args, seeded())
    assert seen == [(3, num_rows - expected, 3), (3, expected, 3)]


@pytest.mark.parametrize("normalize_targets", [True, False])
def test_B9_scales_are_of_the_training_rows(normalize_targets):
    """Not of those held out, whose error would be a little too good."""
    model, args = make_model(), fit_args(normalize_targets=normalize_targets)
    rows, held_out, _ = rows_seen(model, 50, args, seeded())
    training = sorted(set(range(50)) - set(held_out[0][0].tolist()))
    rows = rows[training].double().numpy()
    targets = np.column_stack([rows[:, 3], rows[:, 4:6] - rows[:, :2]])
    expected = [rows[:, :3].mean(0), rows[:, :3].std(0, ddof=1), np.zeros(3), np.ones(3)]
    if normalize_targets:
        expected[2:] = targets.mean(0), targets.std(0, ddof=1)
    for name, value in zip(SCALES, expected):
        np.testing.assert_allclose(getattr(model, name), value, rtol=1e-4)


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
    """s' = s + A s + B a and a linear reward, without noise, with an end on the right: R^2 above
    0.99, and the sampled steps are right in the environment's units. Raw targets are harder: one
    dimension drowns another."""
    rng = np.random.default_rng(0)
    matrix = np.array([[-0.2, 0.5, 0.3], [0.1, -0.4, -0.6], [1.0, 0.5, 2.0]])  # s'_1, s'_2, r

    def steps(count):
        obs = rng.normal([3.0, -1.0], [2.0, 0.5], (count, 2))
        action = rng.uniform(-1, 1, (count, 1))
        change = np.concatenate([obs, action], axis=1) @ matrix.T
        return obs, action, change[:, 2] + 4, obs + change[:, :2]

    obs, *rest = steps(400)
    real = mbpo.Buffer(400, 2, 1, CPU)
    real.add(mbpo.as_rows(obs, *rest, obs[:, 0] > 3, np.zeros(400)))
    model = make_model(hidden_dim=32, noise=0, learns_end=True)
    args = fit_args(max_model_updates=800, model_batch_size=32, normalize_targets=normalize_targets)
    statistics = mbpo.fit_model(model, real, 0, 1e-2, args, seeded())
    assert 1 - share < statistics["stats/holdout_r2"] <= 1
    obs, action, reward, next_obs = steps(500)
    sampled = model.sample(torch.tensor(obs).float(), torch.tensor(action).float(), seeded())
    for actual, expected in ((sampled[0][:, None], reward[:, None]), (sampled[1], next_obs)):
        error = ((actual.numpy() - expected) ** 2).mean(0)
        assert (error < share * expected.var(0)).all()
    chance = torch.sigmoid(sampled[2][:, 0]).numpy()
    assert ((chance > 0.5) == (obs[:, 0] > 3)).mean() > 0.9


# ---- buffer


def numbered(first, count):
    return torch.arange(first, first + count).float()[:, None].expand(-1, 6)


def oldest_first(state):
    return torch.roll(state["rows"], -state["position"], dims=0)


@pytest.mark.parametrize("num_rows", [0, 1, 4, 6, 7, 8, 10, 13, 14, 20])
def test_B2_a_buffer_that_grows_by_brute_force(num_rows):
    """Empty, partly filled, full, come round: against a list that forgets its head. A copy that was
    loaded from the state goes on alike, and the state is not changed by what is written later."""
    buffer = mbpo.Buffer(7, 1, 1, CPU)
    remembered = list(range(num_rows))[-7:]
    for i in range(num_rows):
        buffer.add(numbered(i, 1))
    for capacity in (7, 11, 12, 30):
        buffer.grow(capacity)
        state, before = buffer.state_dict(), remembered
        again = mbpo.Buffer(7, 1, 1, CPU)
        again.add(numbered(900, 5))  # what was there before does not count
        again.load_state_dict(state)
        for size in (0, 1, 3):
            remembered = (remembered + list(range(num_rows, num_rows + size)))[-capacity:]
            for each in (buffer, again):
                each.add(numbered(num_rows, size))
                own = each.state_dict()
                assert own["capacity"] == len(each.rows) == capacity
                assert oldest_first(own)[:, 0].tolist() == remembered
                assert each.size == len(remembered) == len(own["rows"])
            num_rows += size
        assert oldest_first(state)[:, 0].tolist() == before
    with pytest.raises(AssertionError):
        buffer.grow(29)


@pytest.mark.parametrize(
    ("flags", "lengths", "capacities"),
    [
        ({}, [1, 1, 2, 3, 3, 3], [40, 40, 80, 120, 120, 120]),
        # fits are 5 steps apart: for 8 steps, the rollouts of two, 14, have to be kept
        ({"retain_steps": 8, "rollout_batch_size": 7}, [1, 1, 2, 3, 3, 3], [14, 14, 28, *[42] * 3]),
        ({"max_rollout_length": 1, "retain_steps": 5}, [1] * 6, [20] * 6),
        ({"min_rollout_length": 3, "retain_steps": 1000}, [3] * 6, [12_000] * 6),
    ],
    ids=str,
)
def test_B2_B3_lengths_and_rows_kept_in_a_run(walk, spy, monkeypatch, flags, lengths, capacities):
    """k from 1 at step 5 to 3 at step 15: fits at 4, 9, 14, 19, 24 and 29 make rollouts of 1, 1.8,
    2.8, 3, 3 and 3 steps, rounded down. Rows outlive a fit while there is room; then the oldest
    go. All rows of all rollouts, against a list."""
    calls, grown = spy("rollout"), spy_on(monkeypatch, mbpo.Buffer)("grow")
    mbpo.train(replace(walk, **flags))
    assert [call[4] for call in calls] == lengths
    assert all(1 <= len(call[-1]) <= call[4] for call in calls)
    assert [call[1] for call in grown] == capacities
    remembered = torch.empty(0, 8)
    for call, capacity in zip(calls, capacities):
        remembered = torch.cat([remembered, *call[-1]])[-capacity:]
    imagined = load(walk.run_dir)["imagined"]
    assert imagined["capacity"] == capacities[-1]
    assert torch.equal(oldest_first(imagined), remembered)
    total, last = (sum(len(x) for call in part for x in call[-1]) for part in (calls, calls[-1:]))
    assert (len(remembered) == total) == (flags.get("retain_steps") == 1000)
    assert len(remembered) > last or flags.get("retain_steps") == 5


def test_rollouts_start_from_real_states(walk, spy, monkeypatch):
    """All of them equally often, in chunks that lose no row."""
    monkeypatch.setattr(mbpo, "ROLLOUT_CHUNK", 900)
    calls = spy("rollout")
    mbpo.train(replace(walk, rollout_batch_size=2000, total_timesteps=25))
    assert [len(call[3]) for call in calls] == [900, 900, 200] * 5
    newest = torch.cat([table for call in calls[-3:] for table in call[-1]])
    imagined = oldest_first(load(walk.run_dir)["imagined"])
    assert len(newest) > 2000 and torch.equal(imagined[-len(newest) :], newest)
    real = load(walk.run_dir)["real"]["rows"]
    for fit in range(5):
        starts = torch.cat([call[3] for call in calls[3 * fit : 3 * fit + 3]])
        num_real = 4 + 5 * fit
        counts = (starts[:, None] == real[None, :num_real, :2]).all(dim=2).sum(dim=0)
        assert counts.sum() == 2000
        spread = math.sqrt(2000 / num_real)
        assert (counts - 2000 / num_real).abs().max() < 4 * spread


# ---- the loop


@pytest.mark.parametrize(
    ("batch_size", "ratio", "num_real"),
    [(32, 0.0, 0), (32, 0.25, 8), (32, 1.0, 32), (7, 0.2, 1), (7, 0.99, 6), (256, 0.05, 12)],
)
def test_B10_every_mini_batch_has_its_exact_share(
    walk, monkeypatch, spy, batch_size, ratio, num_real
):
    """In the run itself: first rows of the real buffer, then imagined ones, told by membership.
    These, in this order, are what the critics learn from."""
    blocks, original = [], mbpo.mixed_batches

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
    mbpo.train(replace(args, total_timesteps=14))
    assert len(blocks) == 10 and len(targets) == 3 * 10
    for (reward, terminated, *_), batch in zip(targets, torch.cat(blocks)):
        assert torch.equal(reward, batch[:, 3]) and torch.equal(terminated, batch[:, 6])


def fake_fit(model, *_):
    """Some elites, weights and scales."""
    with torch.no_grad():
        for layer in model.net[::2]:
            layer.weight.mul_(1.2)
    model.elites.copy_(torch.tensor([2, 0]))
    set_scales(model)
    return {"losses/model": 0.0}


class ByHand:
    """MBPO once more: a list of networks, torch.distributions, loops; draws in the same order. Fits
    and rollouts as such have their own tests by hand. A row is s, a, r, s', terminated."""

    def __init__(self, args):
        self.args, self.env = args, common.make_env(args.env_id)
        torch.manual_seed(args.seed)
        hidden_dims = [args.hidden_dim] * 2
        self.actor = mbpo.GaussianActor(2, 1, hidden_dims)
        critic = mbpo.TwoCritics(2, 1, hidden_dims, args.critic_layer_norm)
        model_sizes = (args.num_members, args.num_elites, 2, 1, args.model_hidden_dim, True)
        self.model = mbpo.Dynamics(*model_sizes)
        self.critics = critic.members
        self.targets = deepcopy(self.critics)
        self.log_alpha = nn.Parameter(torch.tensor(math.log(args.alpha or 1.0)))
        parts = (self.critics.parameters(), self.actor.parameters(), [self.log_alpha])
        self.opts = [torch.optim.Adam(part, args.learning_rate) for part in parts]
        self.generator = seeded(common.second_seed(args.seed))
        self.real, self.imagined = [], []

    def sample(self, obs):
        output = self.actor.net(obs)
        std = torch.exp(-5 + 3.5 * (1 + torch.tanh(output[..., 1:])))
        base = torch.distributions.Normal(output[..., :1], std)
        u = base.mean + std * torch.randn(std.shape, generator=self.generator)
        tanh = torch.distributions.TanhTransform()
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
            row = [*obs, action.item(), reward, *next_obs, terminated]
            self.real.append(torch.tensor(row, dtype=torch.float32))
            obs, done = next_obs, terminated or truncated
            if args.real_ratio < 1 and step in (4, 9, 14, 19, 24):
                self.imagine({4: 1, 9: 1, 14: 2, 19: 3, 24: 3}[step])
            if step > args.learning_starts:
                self.block()

    def imagine(self, length):
        fake_fit(self.model)
        shape = (1, self.args.rollout_batch_size)
        starts = torch.randint(len(self.real), shape, generator=self.generator)[0]
        states = torch.stack([self.real[i][:2] for i in starts.tolist()])
        tables = mbpo.rollout(self.model, self.actor, None, states, length, self.generator)
        self.imagined += [*torch.cat(tables)[:, :7]]

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
            batch = torch.stack([row for part in draws for row in part[g]])
            obs, action, next_obs = batch[:, :2], batch[:, 2:3], batch[:, 4:6]
            alpha = self.log_alpha.exp().item()
            with torch.no_grad():
                next_action, next_log_prob = self.sample(next_obs)
                next_q = self.q(self.targets, next_obs, next_action)
            target = batch[:, 3].clone()
            for b in range(len(batch)):
                if not batch[b, 6]:
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
    "sac-many-updates": {"real_ratio": 1.0, "updates_per_step": 10, "total_timesteps": 12}
    | {"target_entropy": -2.0, "gamma": 0.9},
    "mbpo": {},
    "mbpo-half": {"real_ratio": 0.5, "alpha": 0.2},
    "mbpo-model-alone": {"real_ratio": 0.0, "tau": 0.5, "critic_layer_norm": True},
}


@pytest.mark.parametrize("flags", VARIANTS.values(), ids=VARIANTS)
def test_B11_S12_S13_S14_S18_whole_loop_by_hand(walk, flags, monkeypatch):
    """Terminated and truncated episodes, the k-th of which starts from seed and k; actions in a box
    that is not symmetric, at first uniform, then of the policy; every draw. With a real ratio of 1
    it is SAC: the model is not touched."""
    args = replace(walk, seed=2, total_timesteps=25, learning_rate=3e-3, retain_steps=1000)
    args = replace(args, **flags)
    monkeypatch.setattr(mbpo, "fit_model", fake_fit)
    mbpo.train(args)
    hand = ByHand(args)
    hand.run()
    checkpoint = load(args.run_dir)
    terminated, truncated = checkpoint["real"]["rows"][:, 6:].T
    assert terminated.any() and (truncated.any() or args.total_timesteps == 12)
    for name, mine in (("real", hand.real), ("imagined", hand.imagined)):
        expected = torch.stack(mine) if mine else torch.empty(0, 7)
        stored = checkpoint[name]["rows"][:, :7]
        torch.testing.assert_close(stored, expected, rtol=1e-4, atol=1e-4)
    assert (len(hand.imagined) == 0) == (args.real_ratio == 1)
    for name, value in hand.model.state_dict().items():
        assert torch.equal(checkpoint["model"][name], value)
    for name, mine in (("critic", hand.critics), ("target_critic", hand.targets)):
        wanted_state = nn.ModuleDict({"members": mine}).state_dict()
        assert checkpoint[name].keys() == wanted_state.keys()
        for actual, wanted in zip(checkpoint[name].values(), wanted_state.values()):
            torch.testing.assert_close(actual, wanted, rtol=2e-3, atol=2e-4)
    for actual, wanted in zip(checkpoint["actor"].values(), hand.actor.state_dict().values()):
        torch.testing.assert_close(actual, wanted, rtol=2e-3, atol=2e-4)
    torch.testing.assert_close(checkpoint["log_alpha"], hand.log_alpha.detach(), atol=1e-4, rtol=0)


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


def test_S9_the_actor_step_leaves_no_gradient_in_the_critics(walk, monkeypatch):
    """After it, they still hold the gradients of their own loss."""
    critics = spy_on(monkeypatch, mbpo.TwoCritics)("__init__")
    sac_loss, temperature_loss = mbpo.sac_loss, mbpo.temperature_loss
    expected, actual = [], []

    def before(*args):
        loss = sac_loss(*args)
        parameters = list(critics[0][0].parameters())
        expected.extend(torch.autograd.grad(loss, parameters, retain_graph=True))
        return loss

    def after(*args):
        actual.extend(parameter.grad.clone() for parameter in critics[0][0].parameters())
        return temperature_loss(*args)

    monkeypatch.setattr(mbpo, "sac_loss", before)
    monkeypatch.setattr(mbpo, "temperature_loss", after)
    mbpo.train(replace(walk, total_timesteps=8))
    assert len(actual) == 8 * 12  # two updates in each of four steps; 2 x 3 weights, 2 x 3 biases
    torch.testing.assert_close(actual, expected)


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
    fits, args = spy("fit_model"), replace(walk, total_timesteps=150, model_train_interval=3)
    args = replace(args, max_model_updates=1, model_batch_size=256, eval_interval=1000)
    mbpo.train(replace(args, updates_per_step=1))
    rows = load(args.run_dir)["real"]["rows"]
    obs, time, _, _, next_obs, next_time, terminated, truncated = rows.T
    assert torch.equal(next_time, time + 1)
    done = (terminated + truncated) > 0
    assert terminated.sum() >= 3 and truncated.sum() >= 3
    assert torch.equal(time[1:] == 0, done[:-1])
    assert torch.equal(obs[1:][~done[:-1]], next_obs[:-1][~done[:-1]])
    assert torch.equal(terminated > 0, next_obs.abs() > 2)
    assert (next_time[truncated > 0] == 10).all()
    in_mid_episode = [step for step in range(4, 150, 3) if not done[step - 1]]
    assert len(fits) == 49 and len(in_mid_episode) > 25


def test_B13_model_and_both_buffers_come_back(walk):
    """Resumed at 17 for one step without a fit: the model with its elites and scales, and imagined
    rows, are those of the checkpoint, and the real ring, which is full, has gone on by one."""
    args = replace(walk, total_timesteps=17, buffer_capacity=13, retain_steps=5)
    mbpo.train(args)
    before = load(args.run_dir)
    mbpo.train(replace(args, resume=args.run_dir, total_timesteps=18))
    after = load(args.run_dir)
    assert before["model"].keys() == after["model"].keys() > {*SCALES, "elites", "max_log_var"}
    for name, value in before["model"].items():
        assert torch.equal(value, after["model"][name])
        assert name not in SCALES or value.unique().numel() > 1  # not what it starts with
    for name in ("position", "capacity"):
        assert before["imagined"][name] == after["imagined"][name]
    assert torch.equal(before["imagined"]["rows"], after["imagined"]["rows"])
    assert before["imagined"]["capacity"] == len(before["imagined"]["rows"]) == 40  # full, too
    left, right = oldest_first(before["real"]), oldest_first(after["real"])
    assert torch.equal(left[1:], right[:-1]) and len(right) == after["real"]["capacity"] == 13
    assert (before["real"]["position"], after["real"]["position"]) == (17 % 13, 18 % 13)


@pytest.mark.parametrize("alpha", [None, 0.0, 0.3])
def test_B11_S14_alpha_is_fixed_or_learned_from_one(walk, spy, alpha):
    """Towards an entropy of minus half the action's dimension, which is 2 here."""
    losses, targets = spy("temperature_loss"), spy("soft_target")
    mbpo.train(replace(walk, env_id="Reacher-v5", alpha=alpha, total_timesteps=10))
    alphas = [round(call[4].item(), 6) for call in targets]
    if alpha is None:
        assert {call[2] for call in losses} == {-1.0}
        assert alphas[0] == 1 and len(set(alphas)) == len(alphas) == 12
    else:
        assert set(alphas) == {alpha} and not losses
        assert not load(walk.run_dir)["alpha_opt"]["state"]


def test_what_is_logged_of_model_and_rollouts(walk, spy):
    """Against the rows themselves, and against the q of the last update of a step."""
    rollouts, losses = spy("rollout"), spy("sac_loss")
    mbpo.train(replace(walk, total_timesteps=15, log_interval=1, real_ratio=0.25))
    metrics = metrics_of(walk.run_dir)[1:]
    log = {(int(step), key): float(value) for step, key, value in metrics}
    real = load(walk.run_dir)["real"]["rows"]
    for step, call in zip((4, 9, 14), rollouts, strict=True):
        rows = torch.cat(call[-1])
        starts = (call[3][:, None] == real[:, :2]).all(dim=2).float().argmax(dim=1)
        expected = {
            "rollout_length": call[4],
            "rollout_reward": rows[:, 3].mean().item(),
            "real_reward": real[starts, 3].mean().item(),
            "rollout_terminated": rows[:, 6].mean().item(),
            "rollout_abs_max": rows[:, 4:6].abs().max().item(),
        }
        for name, value in expected.items():
            assert log[step, f"stats/{name}"] == pytest.approx(value, rel=1e-4), name
    assert [step for step, key in log if key == "stats/holdout_mse"] == [4, 9, 14]
    assert [step for step, key in log if key == "stats/fresh_mse"] == [9, 14]
    for step in range(5, 16):
        q, target, _ = losses[2 * (step - 4) - 1]
        error = (q - target).abs()
        expected = {"q_max": q.max(), "target_mean": target.mean()}
        for name, part in (("real", slice(0, 8)), ("model", slice(8, 32))):
            expected[f"q_{name}"] = q[:, part].mean()
            expected[f"td_error_{name}"] = error[:, part].mean()
        for name, value in expected.items():
            assert log[step, f"stats/{name}"] == pytest.approx(value.item(), rel=1e-3, abs=1e-5)


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
    line = rf"^{part} is (nan|inf) at step 4: it diverged; lower --model-learning-rate"
    with pytest.raises(mbpo.InputError, match=line):
        mbpo.train(walk)


def test_defaults_are_what_the_docstring_says():
    """The ensemble and the share of real rows are the paper's, as is the command of the docstring
    for the rest."""
    args = mbpo.Args()
    assert (args.num_members, args.num_elites, args.real_ratio) == (7, 5, 0.05)
    assert args.alpha is None and args.tau == 0.005 and args.gamma == 0.99
    assert args.model_learning_rate == 1e-3 and args.normalize_targets
    assert not args.critic_layer_norm and args.batch_size == 256
    hopper = mbpo.__doc__.index("python algos/mbpo.py --env-id Hopper-v5")
    flags = mbpo.__doc__[hopper:].split("\n\n")[0].replace("\\\n", " ").split()
    paper = tyro.cli(mbpo.Args, args=flags[2:])
    mbpo.check_args(paper)
    first = paper.learning_starts  # the authors count from the end of the random steps
    assert (first, paper.total_timesteps - first) == (5000, 125_000)
    assert (paper.num_members, paper.num_elites, paper.model_hidden_dim) == (7, 5, 200)
    assert (paper.model_learning_rate, paper.model_batch_size) == (1e-3, 256)
    assert (paper.learning_rate, paper.hidden_dim, paper.batch_size) == (3e-4, 256, 256)
    assert (paper.updates_per_step, paper.real_ratio) == (20, 0.05)
