"""RLPD: targets, ensemble, sampling and loop against numbers worked out by other means."""

import itertools
import math
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import load, save_rows, spy_on, tiny_args
from torch import nn

import common
from algos import crr, rlpd


@pytest.fixture(scope="module")
def algo():
    return rlpd


@pytest.fixture
def walk(probe_data, tmp_path):
    """A run in the environment where every step depends on seed and actions, with prior data."""
    args = tiny_args(rlpd, "random:80", tmp_path / "run")
    return replace(args, env_id="Walk-v0", total_timesteps=30)


@pytest.fixture
def spy(monkeypatch):
    return spy_on(monkeypatch, rlpd)


def record_replay(args, file):
    path = f"{args.run_dir}/checkpoint.pt"
    rlpd.evaluate_checkpoint(replace(args, evaluate=path, record_replay=str(file)))


# ---- losses


def test_target_by_hand():
    reward, terminated = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 1.0, 0.0])
    next_q = torch.tensor([[4.0, 5.0, 6.0], [7.0, 1.0, -1.0]])
    log_prob, alpha = torch.tensor([-2.0, 9.0, 3.0]), torch.tensor(0.5)
    soft = rlpd.soft_target(reward, terminated, next_q, log_prob, alpha, 0.9)
    # 1 + .9 (4 + 1), the reward alone, 3 + .9 (-1 - 1.5)
    assert soft.tolist() == pytest.approx([5.5, 2.0, 0.75])
    hard = rlpd.soft_target(reward, terminated, next_q, log_prob, 0.0, 0.9)
    assert hard.tolist() == pytest.approx([4.6, 2.0, 2.1])


def test_S13_R6_entropy_is_inside_gamma_and_the_mask():
    """Where the episode ended, nothing follows: neither value nor entropy."""
    one, zero = torch.ones(1), torch.zeros(1)
    args = (zero, one, torch.full((2, 1), 7.0), torch.full((1,), -5.0), torch.tensor(3.0))
    assert rlpd.soft_target(*args, 0.9).item() == 0
    args = (zero, zero, torch.zeros(2, 1), torch.full((1,), -5.0), torch.tensor(3.0))
    assert rlpd.soft_target(*args, 0.9).item() == pytest.approx(0.9 * 15)


def test_critic_loss_by_hand():
    q = torch.tensor([[1.0, 2.0], [3.0, 4.0], [0.0, 0.0]])
    target = torch.tensor([1.0, 0.0])
    assert rlpd.rlpd_loss(q, target).item() == pytest.approx((0 + 4 + 4 + 16 + 1 + 0) / 6)


def test_R4_actor_loss_is_of_the_mean_of_all_critics():
    """The gradient in each Q is -1 / (C B): doubling one member changes the loss by its share."""
    q = torch.randn(10, 4, requires_grad=True)
    log_prob, alpha = torch.randn(4), torch.tensor(0.3)
    loss = rlpd.policy_loss(log_prob, q, alpha)
    loss.backward()
    torch.testing.assert_close(q.grad, torch.full((10, 4), -1 / 40))
    expected = sum(0.3 * log_prob[b] - q[:, b].sum() / 10 for b in range(4)) / 4
    torch.testing.assert_close(loss.detach(), expected.detach())


@pytest.mark.parametrize("entropy", [-3.0, 1.0])
def test_S14_alpha_rises_while_entropy_is_too_low(entropy):
    """d/dlog_alpha alpha (H - target) = alpha (H - target); nothing flows into the policy."""
    log_alpha = nn.Parameter(torch.tensor(0.4))
    log_prob = torch.full((5,), -entropy, requires_grad=True)
    loss = rlpd.temperature_loss(log_alpha, log_prob, -0.5)
    loss.backward()
    assert log_alpha.grad.item() == pytest.approx(math.exp(0.4) * (entropy + 0.5), rel=1e-5)
    assert log_prob.grad is None


def test_S8_no_broadcast():
    column = torch.zeros(4, 1)
    for call in (
        lambda: rlpd.rlpd_loss(torch.zeros(3, 4), column),
        lambda: rlpd.rlpd_loss(torch.zeros(3, 4, 1), column),
        lambda: rlpd.policy_loss(column, torch.zeros(3, 4), torch.tensor(1.0)),
        lambda: rlpd.temperature_loss(torch.tensor(0.0), column, -1.0),
        lambda: rlpd.temperature_loss(torch.zeros(1), torch.zeros(4), -1.0),
        lambda: rlpd.soft_target(
            column, torch.zeros(4), torch.zeros(2, 4), torch.zeros(4), torch.tensor(1.0), 0.9
        ),
    ):
        with pytest.raises(AssertionError):
            call()


def test_S8_losses_are_means_of_rows():
    """A batch of N is the mean of N batches of one; permuting the targets alone changes it."""
    q, target, log_prob = torch.randn(3, 6), torch.randn(6), torch.randn(6)
    alpha = torch.tensor(0.7)
    rows = [rlpd.rlpd_loss(q[:, [b]], target[[b]]) for b in range(6)]
    torch.testing.assert_close(rlpd.rlpd_loss(q, target), torch.stack(rows).mean())
    rows = [rlpd.policy_loss(log_prob[[b]], q[:, [b]], alpha) for b in range(6)]
    torch.testing.assert_close(rlpd.policy_loss(log_prob, q, alpha), torch.stack(rows).mean())
    assert rlpd.rlpd_loss(q, target.flip(0)) != rlpd.rlpd_loss(q, target)


# ---- networks


def members_of(critic):
    """Every slice of the stack as an ordinary MLP with ordinary layers."""
    members = []
    for i in range(len(critic.net[0].weight)):
        layers = []
        for stack in critic.net:
            if isinstance(stack, nn.ReLU):
                layers.append(nn.ReLU())
                continue
            weight, bias = stack.weight[i].detach(), stack.bias[i, 0].detach()
            if isinstance(stack, rlpd.EnsembleLinear):
                layers.append(nn.Linear(*weight.shape))
                weight = weight.T
            else:
                layers.append(nn.LayerNorm(weight.shape[1]))
                weight = weight[0]
            layers[-1].load_state_dict({"weight": weight, "bias": bias})
        members.append(nn.Sequential(*layers))
    return nn.ModuleList(members)


def randomised_critic(num_members=4, layer_norm=True):
    critic = rlpd.EnsembleCritic(num_members, 3, 2, [8, 8], layer_norm)
    with torch.no_grad():  # biases and affine parameters start at constants, which hide mistakes
        for parameter in critic.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    return critic


@pytest.mark.parametrize("layer_norm", [True, False])
def test_each_member_is_an_ordinary_mlp(layer_norm):
    """Linear, layer norm, ReLU, twice, and Linear, in matrix products of its own slices."""
    critic = randomised_critic(layer_norm=layer_norm)
    obs, action = torch.randn(5, 3), torch.randn(5, 2)
    expected = []
    for i in range(4):
        slices = [parameter[i] for parameter in critic.parameters()]
        h = torch.cat([obs, action], dim=1)
        for _ in range(2):
            h = h @ slices.pop(0) + slices.pop(0)
            if layer_norm:
                deviation = h - h.mean(dim=1, keepdim=True)
                h = deviation / (deviation.pow(2).mean(dim=1, keepdim=True) + 1e-5).sqrt()
                h = h * slices.pop(0) + slices.pop(0)
            h = h.clamp(min=0)
        expected.append((h @ slices.pop(0) + slices.pop(0))[:, 0])
        assert slices == []
    torch.testing.assert_close(critic(obs, action), torch.stack(expected), rtol=1e-4, atol=1e-5)


def test_R3_members_share_nothing():
    """They start differently; a change of member 1, in any parameter, is seen in its output alone,
    and a loss of its output reaches its slices alone."""
    critic = rlpd.EnsembleCritic(4, 3, 2, [8, 8], layer_norm=True)
    obs, action = torch.randn(5, 3), torch.randn(5, 2)
    before = critic(obs, action).detach()
    assert len({row.item() for row in before[:, 0]}) == 4
    for parameter in critic.parameters():
        original = parameter[1].detach().clone()
        with torch.no_grad():
            parameter[1] += torch.rand_like(original)  # layer norm takes out a shift of all units
        changed = (critic(obs, action) != before).any(dim=1)
        assert changed.tolist() == [False, True, False, False]
        with torch.no_grad():
            parameter[1] = original
    critic(obs, action)[2].sum().backward()
    for parameter in critic.parameters():
        assert parameter.grad[2].abs().sum() > 0
        assert parameter.grad[[0, 1, 3]].abs().sum() == 0


def test_initial_weights_are_xavier_of_one_member():
    """Not of the stack, whose fan-in would count the members."""
    layer = rlpd.EnsembleLinear(10, 23, 256)
    bound = math.sqrt(6 / (23 + 256))
    assert layer.weight.abs().max().item() == pytest.approx(bound, rel=1e-2)
    assert layer.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
    assert layer.bias.abs().max() == 0


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_R8_layer_norm_between_linear_and_relu_of_the_critics_only(num_layers):
    critic = rlpd.EnsembleCritic(3, 3, 2, [8] * num_layers, True)
    kinds = [type(layer).__name__ for layer in critic.net]
    block = ["EnsembleLinear", "EnsembleLayerNorm", "ReLU"]
    assert kinds == [*block * num_layers, "EnsembleLinear"]
    assert "Norm" not in str(rlpd.EnsembleCritic(3, 3, 2, [8] * num_layers, False))
    kinds = [type(layer).__name__ for layer in rlpd.GaussianActor(3, 2, [8] * num_layers).net]
    assert kinds == [*["Linear", "ReLU"] * num_layers, "Linear"]


@pytest.mark.parametrize("num_layers", [1, 3])
def test_num_hidden_layers_is_of_every_network(walk, num_layers):
    """One weight matrix more than hidden layers, the critics' by the input; it evaluates, too."""
    rlpd.train(replace(walk, num_hidden_layers=num_layers, total_timesteps=8))
    checkpoint, width = load(walk.run_dir), walk.hidden_dim
    hidden, num_critics = [(width, width)] * (num_layers - 1), walk.num_critics
    shapes = [tuple(x.shape) for x in checkpoint["actor"].values() if x.dim() == 2]
    assert shapes == [(width, 2), *hidden, (2, width)]
    for name in ("critic", "target_critic"):
        weights = [x for key, x in checkpoint[name].items() if key.endswith("weight")]
        shapes = [tuple(x.shape) for x in weights if x.shape[1] > 1]  # else of a layer norm
        expected = [(3, width), *hidden, (width, 1)]
        assert shapes == [(num_critics, *shape) for shape in expected]
    policy = rlpd.load_policy(f"{walk.run_dir}/checkpoint.pt")
    assert policy(np.zeros((4, 2), np.float32)).shape == (4, 1)


def test_layer_norm_bounds_q_for_any_action():
    """|Q| <= |w| sqrt(H) + |b| at inputs a million times larger than any; without it, no bound."""
    torch.manual_seed(0)
    obs, action = 1e6 * torch.randn(256, 17), 1e6 * torch.randn(256, 6)
    largest = {}
    for layer_norm in (True, False):
        critic = rlpd.EnsembleCritic(2, 17, 6, [256, 256], layer_norm)
        bounds = critic.net[-1].weight.norm(dim=1)[:, 0] * math.sqrt(256)  # [C], and b = 0
        largest[layer_norm] = critic(obs, action).abs().max(dim=1).values / bounds
    assert (largest[True] <= 1).all() and (largest[False] > 1e3).all()


def test_R4_subset_is_of_the_members_asked_for():
    critic = randomised_critic()
    obs, action = torch.randn(5, 3), torch.randn(5, 2)
    for members in itertools.permutations(range(4), 2):
        actual = rlpd.subset_q(critic, torch.tensor(members), obs, action)
        expected = critic(obs, action)[list(members)]
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_sampled_actions_have_the_density_they_are_said_to_have():
    mean, log_std = torch.tensor([[0.3, -1.0]]).expand(7, 2), torch.tensor([[-0.5, 0.2]])
    generator = torch.Generator().manual_seed(0)
    action, log_prob = rlpd.sample_action(mean, log_std.expand(7, 2), generator)
    noise = torch.randn(7, 2, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(action, torch.tanh(mean + log_std.exp() * noise))
    base = torch.distributions.Normal(mean, log_std.exp().expand(7, 2))
    pi = torch.distributions.TransformedDistribution(base, torch.distributions.TanhTransform())
    torch.testing.assert_close(log_prob, pi.log_prob(action).sum(1), rtol=1e-4, atol=1e-4)


def test_S11_the_density_integrates_to_one():
    grid = torch.linspace(-0.9999995, 0.9999995, 400_001, dtype=torch.float64)[:, None]
    mean, log_std = torch.full_like(grid, 0.4), torch.full_like(grid, -0.3)
    density = rlpd.tanh_gaussian_log_prob(mean, log_std, torch.atanh(grid)).exp()
    assert torch.trapezoid(density, grid[:, 0]).item() == pytest.approx(1, abs=1e-3)


def test_gradients_reach_mean_and_std_through_the_sample():
    mean, log_std = torch.zeros(1, 1, requires_grad=True), torch.zeros(1, 1, requires_grad=True)
    action, _ = rlpd.sample_action(mean, log_std, torch.Generator().manual_seed(3))
    noise = torch.randn(1, 1, generator=torch.Generator().manual_seed(3))
    action.sum().backward()
    slope = 1 - torch.tanh(noise) ** 2
    torch.testing.assert_close(mean.grad, slope)
    torch.testing.assert_close(log_std.grad, slope * noise)


def test_S11_log_prob_is_exact_far_out():
    """log(1 - tanh(u)^2 + 1e-6), the popular form, is off by 25 at u = 20."""
    u = torch.tensor([[-20.0], [8.0], [12.0], [20.0]])
    # u = mean: the Gaussian part is -log(2 pi) / 2; log(1 - tanh^2) = 2 log 2 - 2|u| up to e^-16
    expected = -0.5 * math.log(2 * math.pi) - (2 * math.log(2) - 2 * u.abs()[:, 0])
    actual = rlpd.tanh_gaussian_log_prob(u.clone(), torch.zeros(4, 1), u)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


# ---- buffer


def test_ring_by_brute_force():
    """Rows one by one and in lots, against a list that forgets its head."""
    buffer = rlpd.Buffer(7, 1, 1, torch.device("cpu"))
    remembered, count = [], 0
    for size in (1, 1, 3, 1, 5, 7, 2, 1, 1):
        rows = torch.arange(count, count + size).float()[:, None].expand(-1, 6)
        count += size
        buffer.add(rows)
        remembered = (remembered + rows[:, 0].tolist())[-7:]
        state = buffer.state_dict()
        assert torch.roll(state["rows"], -state["position"], dims=0)[:, 0].tolist() == remembered
        assert buffer.size == len(remembered)
    again = rlpd.Buffer(7, 1, 1, torch.device("cpu"))
    again.add(torch.zeros(5, 6))  # what was there before does not count
    again.load_state_dict(buffer.state_dict())
    for each in (buffer, again):
        each.add(torch.full((1, 6), -1.0))
    assert torch.equal(buffer.rows, again.rows) and buffer.position == again.position


def test_every_row_is_drawn_and_no_other():
    buffer = rlpd.Buffer(100, 1, 1, torch.device("cpu"))
    buffer.rows.fill_(math.nan)
    buffer.add(torch.arange(10.0)[:, None].expand(-1, 6))
    drawn = buffer.sample(4, 500, torch.Generator().manual_seed(0))
    assert drawn.shape == (4, 500, 6)
    counts = torch.bincount(drawn[..., 0].flatten().long(), minlength=10)
    assert len(counts) == 10 and counts.min() > 150  # 200 each


def test_rows_and_fields_are_inverse():
    rng = np.random.default_rng(0)
    fields = [rng.normal(size=(5, 3)), rng.normal(size=(5, 2)), rng.normal(size=5)]
    fields += [rng.normal(size=(5, 3)), rng.random(5) < 0.5, rng.random(5) < 0.5]
    rows = rlpd.as_rows(*fields)
    buffer = rlpd.Buffer(5, 3, 2, torch.device("cpu"))
    for actual, expected in zip(buffer.split(rows), fields, strict=True):
        assert actual.shape == expected.shape
        np.testing.assert_array_equal(actual.numpy(), expected.astype(np.float32))


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0])
@pytest.mark.parametrize("batch_size", [32, 7])
def test_R1_R2_every_mini_batch_has_its_exact_share(walk, tmp_path, spy, ratio, batch_size):
    """In the run itself: data are told by their reward, which the environment never pays."""
    rows = np.zeros(40), np.zeros(40), np.full(40, 1000.0), np.zeros(40)
    data = save_rows(tmp_path / "d.npz", *rows, np.ones(40, bool), np.zeros(40, bool))
    calls = spy("mixed_batches")
    rlpd.train(
        replace(
            walk,
            env_id="Probe-v0",
            dataset=data,
            offline_batch_ratio=ratio,
            batch_size=batch_size,
            gradient_updates_per_step=5,
        )
    )
    blocks = [call[-1] for call in calls if call[2] > 0]
    assert len(blocks) == 26
    for block in blocks:
        assert block.shape[:2] == (5, batch_size)
        counts = (block[..., 2] == 1000).sum(dim=1)
        assert counts.tolist() == [round(ratio * batch_size)] * 5


def test_R7_both_kinds_of_rows_are_prepared_alike(walk, tmp_path, spy):
    """Actions in [-1, 1] whatever the box, rewards scaled and shifted, 1 - terminated as the mask:
    the same transitions, taken by the environment or read from a file, are the same rows."""
    online = replace(walk, dataset="none", total_timesteps=30, learning_starts=29)
    rlpd.train(online)
    file = str(tmp_path / "replay.npz")
    record_replay(online, file)
    batches, targets = spy("mixed_batches"), spy("soft_target")
    rlpd.train(
        replace(
            walk,
            dataset=file,
            offline_batch_ratio=1.0,
            reward_scale=3.0,
            reward_shift=-2.0,
            run_dir=str(tmp_path / "again"),
        )
    )
    seen = load(online.run_dir)["buffer"]["rows"]
    drawn = torch.cat([call[-1].flatten(0, 1) for call in batches]).unique(dim=0)
    seen[:, -1] = torch.where(seen[:, -2] > 0, 0, seen[:, -1])
    seen[-1, -1] = 1 - seen[-1, -2]  # the end of a file is a cut
    torch.testing.assert_close(drawn, seen.unique(dim=0))
    for mixed, (reward, *_) in zip(batches[-3:], targets[-6::2]):
        torch.testing.assert_close(reward, 3 * mixed[-1][0, :, 3] - 2)


def test_R9_starts_with_an_empty_buffer(walk):
    """Updates from the first step on, and before it: pre-training needs no row of its own."""
    args = replace(walk, learning_starts=0, offline_pretrain_updates=5, total_timesteps=3)
    assert rlpd.train(args)["step"] == 3
    assert load(args.run_dir)["num_updates"] == 5 + 2 * 3


# ---- the loop


class ByHand:
    """RLPD once more: a list of critics, torch.distributions, loops; draws in the same order."""

    def __init__(self, args, dataset):
        self.args, self.env = args, common.make_env(args.env_id)
        (obs_dim,), action_dim, _ = common.check_spaces(self.env)
        torch.manual_seed(args.seed)
        hidden_dims = [args.hidden_dim] * 2
        self.actor = rlpd.GaussianActor(obs_dim, action_dim, hidden_dims)
        sizes = (args.num_critics, obs_dim, action_dim, hidden_dims, args.critic_layer_norm)
        self.members = members_of(rlpd.EnsembleCritic(*sizes))
        self.targets = deepcopy(self.members)
        self.log_alpha = nn.Parameter(torch.tensor(math.log(args.alpha or 1.0)))
        self.opts = [
            torch.optim.Adam(parameters, args.learning_rate)
            for parameters in (
                self.members.parameters(),
                self.actor.parameters(),
                [self.log_alpha],
            )
        ]
        self.generator = torch.Generator().manual_seed(common.second_seed(args.seed))
        space = self.env.action_space
        self.center = torch.tensor((space.high + space.low) / 2)
        self.half = torch.tensor((space.high - space.low) / 2)
        self.prior = [
            (obs, action, reward.item(), next_obs, bool(terminated))
            for obs, action, reward, next_obs, terminated in zip(
                dataset.obs, dataset.action, dataset.reward, dataset.next_obs, dataset.terminated
            )
        ]
        self.replay = []

    def pi(self, obs):
        output = self.actor.net(obs)
        mean, raw = output[..., : len(self.half)], output[..., len(self.half) :]
        base = torch.distributions.Normal(mean, torch.exp(-5 + 3.5 * (1 + torch.tanh(raw))))
        return base, torch.distributions.TanhTransform()

    def sample(self, obs):
        base, tanh = self.pi(obs)
        u = base.mean + base.stddev * torch.randn(base.mean.shape, generator=self.generator)
        log_prob = base.log_prob(u) - tanh.log_abs_det_jacobian(u, torch.tanh(u))
        return torch.tanh(u), log_prob.sum(-1)

    def q(self, members, obs, action):
        x = torch.cat([obs, action], dim=1)
        return [member(x)[:, 0] for member in members]

    def run(self):
        args, done, episode = self.args, True, 0
        for step in range(1, args.total_timesteps + 1):
            if done:
                seed = np.random.SeedSequence((args.seed, episode)).generate_state(1)[0]
                obs, episode = self.env.reset(seed=int(seed))[0], episode + 1
            if step <= args.learning_starts:
                action = 2 * torch.rand(len(self.half), generator=self.generator) - 1
            else:
                with torch.no_grad():
                    action, _ = self.sample(torch.tensor(obs).float())
            next_obs, reward, terminated, truncated, _ = self.env.step(
                (self.center + self.half * action).numpy()
            )
            before, after = torch.tensor(obs).float(), torch.tensor(next_obs).float()
            self.replay.append((before, action, reward, after, terminated))
            obs, done = next_obs, terminated or truncated
            if step > args.learning_starts and step % args.train_frequency == 0:
                self.block()

    def block(self):
        args = self.args
        num_updates, num_offline = args.gradient_updates_per_step, 0
        if args.dataset != "none":
            num_offline = round(args.offline_batch_ratio * args.batch_size)
        draws = []
        for rows, count in (
            (self.prior, num_offline),
            (self.replay, args.batch_size - num_offline),
        ):
            if count > 0:
                index = torch.randint(len(rows), (num_updates, count), generator=self.generator)
                draws.append([[rows[i] for i in line] for line in index.tolist()])
        alpha = self.log_alpha.exp().item()
        for g in range(num_updates):
            batch = [row for part in draws for row in part[g]]
            obs, action, next_obs = (torch.stack([row[i] for row in batch]) for i in (0, 1, 3))
            with torch.no_grad():
                next_action, next_log_prob = self.sample(next_obs)
                order = torch.randperm(args.num_critics, generator=self.generator).tolist()
                drawn = [self.targets[i] for i in order[: args.num_min_critics]]
                next_q = self.q(drawn, next_obs, next_action)
            target = torch.zeros(len(batch))
            for b, (_, _, reward, _, terminated) in enumerate(batch):
                target[b] = args.reward_scale * reward + args.reward_shift
                if not terminated:
                    value = min(q[b].item() for q in next_q)
                    if args.backup_entropy:
                        value -= alpha * next_log_prob[b].item()
                    target[b] += args.gamma * value
            losses = [((q - target) ** 2).mean() for q in self.q(self.members, obs, action)]
            self.step(0, sum(losses) / len(losses))
            with torch.no_grad():
                for old, new in zip(self.targets.parameters(), self.members.parameters()):
                    old.copy_((1 - args.tau) * old + args.tau * new)
        action, log_prob = self.sample(obs)
        values = self.q(self.members, obs, action)
        self.step(1, (alpha * log_prob - sum(values) / len(values)).mean())
        if args.alpha is None:
            goal = -len(self.half) / 2 if args.target_entropy is None else args.target_entropy
            entropy = -log_prob.mean().item()
            self.step(2, self.log_alpha.exp() * (entropy - goal))

    def step(self, number, loss):
        for opt in self.opts:
            opt.zero_grad()
        loss.backward()
        self.opts[number].step()


VARIANTS = {
    "default": {},
    "paper": {"num_critics": 10, "gradient_updates_per_step": 20, "total_timesteps": 9},
    "sac": {"dataset": "none", "num_critics": 2, "critic_layer_norm": False},
    "sac-2018": {"dataset": "none", "num_critics": 2, "alpha": 0.2, "critic_layer_norm": False},
    "sparse": {"backup_entropy": False, "num_min_critics": 1, "target_entropy": -2.0},
    "rewards": {"reward_scale": 0.1, "reward_shift": 2.0, "offline_batch_ratio": 0.25},
    "now-and-then": {"train_frequency": 3, "tau": 0.5},
}


@pytest.mark.parametrize("flags", VARIANTS.values(), ids=VARIANTS)
def test_whole_loop_by_hand(walk, flags):
    """Terminated and truncated episodes, actions in a box that is not symmetric, every draw."""
    args = replace(walk, total_timesteps=25, learning_rate=3e-3)
    args = replace(args, **flags)
    rlpd.train(args)
    dataset = common.load_dataset("random:80", common.make_env("Walk-v0"), args.seed)
    hand = ByHand(args, dataset)
    hand.run()
    checkpoint = load(args.run_dir)
    assert checkpoint["episode"] >= 2 or "total_timesteps" in flags
    stored = checkpoint["buffer"]["rows"]
    expected = torch.stack([torch.cat([row[0], row[1], row[3]]) for row in hand.replay])
    torch.testing.assert_close(stored[:, [0, 1, 2, 4, 5]], expected, rtol=1e-4, atol=1e-4)
    sizes = (args.num_critics, 2, 1, [args.hidden_dim] * 2, args.critic_layer_norm)
    for name, mine in (("critic", hand.members), ("target_critic", hand.targets)):
        critic = rlpd.EnsembleCritic(*sizes)
        critic.load_state_dict(checkpoint[name])
        trained = members_of(critic)
        for actual, wanted in zip(trained.parameters(), mine.parameters(), strict=True):
            torch.testing.assert_close(actual, wanted, rtol=2e-3, atol=2e-4)
    for actual, wanted in zip(checkpoint["actor"].values(), hand.actor.state_dict().values()):
        torch.testing.assert_close(actual, wanted, rtol=2e-3, atol=2e-4)
    torch.testing.assert_close(checkpoint["log_alpha"], hand.log_alpha.detach(), atol=1e-4, rtol=0)


def test_R4_a_new_subset_for_every_target(walk, spy):
    """Of the target critics, distinct members, every pair now and then, never the same for long."""
    calls = spy("subset_q")
    rlpd.train(replace(walk, num_critics=5, gradient_updates_per_step=20, total_timesteps=30))
    subsets = [tuple(sorted(call[1].tolist())) for call in calls]
    assert len(subsets) == 26 * 20
    assert set(subsets) == set(itertools.combinations(range(5), 2))
    same_as_before = np.mean([left == right for left, right in itertools.pairwise(subsets)])
    assert 0.04 < same_as_before < 0.18  # 1 in 10


@pytest.mark.parametrize("updates_per_step", [1, 20])
def test_R5_one_actor_step_per_block_one_target_step_per_update(walk, spy, updates_per_step):
    moves = spy("update_target")
    args = replace(walk, gradient_updates_per_step=updates_per_step, total_timesteps=10)
    rlpd.train(args)
    checkpoint = load(args.run_dir)
    steps = {
        name: {state["step"].item() for state in checkpoint[name]["state"].values()}
        for name in ("critic_opt", "actor_opt", "alpha_opt")
    }
    assert steps == {"critic_opt": {6 * updates_per_step}, "actor_opt": {6}, "alpha_opt": {6}}
    assert len(moves) == 6 * updates_per_step == checkpoint["num_updates"]


def test_S9_the_actor_step_leaves_no_gradient_in_the_critics(walk, monkeypatch):
    critics = []
    original = rlpd.EnsembleCritic.__init__
    monkeypatch.setattr(
        rlpd.EnsembleCritic,
        "__init__",
        lambda self, *sizes: critics.append(self) or original(self, *sizes),
    )
    seen, loss = [], rlpd.temperature_loss

    def after_the_actor(*args):
        seen.append([parameter.grad.clone() for parameter in critics[0].parameters()])
        return loss(*args)

    grads, critic_loss = [], rlpd.rlpd_loss

    def before(q, target):
        value = critic_loss(q, target)
        expected = torch.autograd.grad(value, list(critics[0].parameters()), retain_graph=True)
        grads.append([gradient.clone() for gradient in expected])
        return value

    monkeypatch.setattr(rlpd, "rlpd_loss", before)
    monkeypatch.setattr(rlpd, "temperature_loss", after_the_actor)
    rlpd.train(replace(walk, gradient_updates_per_step=1, total_timesteps=8))
    assert len(seen) == len(grads) == 4
    for left, right in zip(seen, grads):
        for actual, expected in zip(left, right):
            torch.testing.assert_close(actual, expected)


def test_first_actions_are_uniform_in_the_box(walk, tmp_path):
    args = replace(walk, dataset="none", total_timesteps=1501, learning_starts=1500)
    rlpd.train(args)
    file = str(tmp_path / "replay.npz")
    record_replay(args, file)
    action = np.load(file)["actions"][:1500, 0]
    assert -1 <= action.min() < -0.95 and 2.95 < action.max() <= 3
    quartiles = np.quantile(action, [0.25, 0.5, 0.75])
    np.testing.assert_allclose(quartiles, [0, 1, 2], atol=0.15)


def test_then_the_policy_acts_with_noise(walk):
    """After the uniform steps come those of the Gaussian, which is narrower, and not its mean."""
    args = replace(walk, dataset="none", total_timesteps=300, learning_starts=200)
    rlpd.train(replace(args, learning_rate=1e-12))
    action = load(args.run_dir)["buffer"]["rows"][:, 2]
    # the untrained Gaussian has log std -1.5: a std of 0.22 about 0, where uniform has 0.58
    assert action[:200].std().item() == pytest.approx(0.577, abs=0.05)
    assert action[200:].std().item() == pytest.approx(0.22, abs=0.04)


def test_pretraining_leaves_environment_and_buffer_alone(walk, monkeypatch):
    """Five updates on the data alone, numbered -4 to 0, then the first step."""
    steps = []
    original = common.Run.log

    def log(self, scalars, **options):
        steps.extend([self.step] * ("losses/critic" in scalars))
        original(self, scalars, **options)

    monkeypatch.setattr(common.Run, "log", log)
    env_steps = []
    step = gym.envs.registry["Walk-v0"].entry_point.step
    monkeypatch.setattr(
        gym.envs.registry["Walk-v0"].entry_point,
        "step",
        lambda self, action: env_steps.append(len(steps)) or step(self, action),
    )
    monkeypatch.setattr(common, "evaluate", lambda *_, **__: np.zeros(2))
    args = replace(walk, offline_pretrain_updates=5, total_timesteps=12, log_interval=1)
    args = replace(args, dataset="random:80")
    rlpd.train(args)
    assert len(env_steps) == 80 + 12  # the data, and the run
    checkpoint = load(args.run_dir)
    assert len(checkpoint["buffer"]["rows"]) == 12 and checkpoint["num_updates"] == 5 + 8 * 2
    assert steps == [-4, -3, -2, -1, 0, *range(5, 13)]


@pytest.mark.parametrize(
    "flags",
    [
        {"learning_starts": 0, "train_frequency": 1},
        {"learning_starts": 4, "train_frequency": 3},
        {"learning_starts": 6, "train_frequency": 3},
        {"learning_starts": 7, "train_frequency": 5, "offline_pretrain_updates": 4},
    ],
)
def test_schedules_span_exactly_the_updates_of_the_run(walk, spy, flags):
    calls = spy("lr_factor")
    args = replace(walk, **flags, lr_schedule="linear")
    rlpd.train(args)
    total = calls[0][1]
    assert [call[0] for call in calls] == list(range(1, total + 1))
    assert {call[1] for call in calls} == {total}
    assert calls[-1][-1] == pytest.approx(1 / total)
    opts = [load(args.run_dir)[name] for name in ("actor_opt", "critic_opt", "alpha_opt")]
    lr = {opt["param_groups"][0]["lr"] for opt in opts}
    assert lr == {args.learning_rate * calls[-1][-1]}


def test_S2_S5_no_stored_pair_crosses_a_reset(walk):
    """The second observation counts the steps of an episode."""
    args = replace(walk, total_timesteps=300, learning_starts=250, dataset="none")
    rlpd.train(args)
    obs, time, _, _, next_obs, next_time, terminated, truncated = load(args.run_dir)["buffer"][
        "rows"
    ].T
    assert torch.equal(next_time, time + 1)
    done = (terminated + truncated) > 0
    assert done.sum() > 30 and terminated.sum() > 5 and truncated.sum() > 5
    assert torch.equal(time[1:] == 0, done[:-1])
    assert torch.equal(obs[1:][~done[:-1]], next_obs[:-1][~done[:-1]])
    assert torch.equal(terminated > 0, next_obs.abs() > 2)
    assert (next_time[(truncated > 0)] == 10).all()


def test_S18_episode_k_starts_from_seed_and_k(walk, tmp_path):
    """Not from what came before it: two runs that act differently start the same episodes."""
    starts = []
    for name, flags in (("a", {}), ("b", {"learning_starts": 100})):
        args = replace(walk, total_timesteps=200, dataset="none", run_dir=str(tmp_path / name))
        rlpd.train(replace(args, **flags))
        rows = load(args.run_dir)["buffer"]["rows"]
        starts.append(rows[rows[:, 1] == 0, 0][:20])
    assert torch.equal(*starts) and len(starts[0].unique()) == 20


@pytest.mark.parametrize("cut", [11, 13, 16, 18])
def test_S18_resume_in_the_middle_of_an_episode(walk, tmp_path, cut):
    """The rest of the episode, its return, and all that comes after it: as if never stopped."""
    whole = replace(walk, total_timesteps=40, run_dir=str(tmp_path / "whole"))
    rlpd.train(whole)
    args = replace(walk, total_timesteps=cut)
    rlpd.train(args)
    assert len(load(args.run_dir)["episode_actions"]) > 0
    rlpd.train(replace(args, total_timesteps=40, resume=args.run_dir))
    left, right = load(whole.run_dir), load(args.run_dir)
    assert torch.equal(left["buffer"]["rows"], right["buffer"]["rows"])
    logs = [Path(each.run_dir, "metrics.csv").read_text() for each in (whole, args)]
    returns = [[x.split(",")[3] for x in log.splitlines() if "episodic" in x] for log in logs]
    assert returns[0] == returns[1] and len(returns[0]) > 3


class ForgetfulEnv(gym.Env):
    """Draws from a generator that no seed reaches."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, seed=None, options=None):
        return np.random.default_rng().normal(size=1).astype(np.float32), {}

    def step(self, action):
        return np.random.default_rng().normal(size=1).astype(np.float32), 0.0, False, False, {}


def test_an_environment_that_ignores_its_seed_is_not_resumed_in_silence(walk):
    gym.register("Forgetful-v0", ForgetfulEnv, max_episode_steps=10)
    try:
        args = replace(walk, env_id="Forgetful-v0", dataset="none", total_timesteps=25)
        rlpd.train(args)
        with pytest.raises(common.InputError, match="plays another episode from the same seed"):
            rlpd.train(replace(args, resume=args.run_dir, total_timesteps=30))
    finally:
        del gym.envs.registry["Forgetful-v0"]


def test_checkpoint_holds_the_filled_part_of_the_buffer(walk):
    """A million rows of 8 numbers would be 32 MB."""
    rlpd.train(walk)
    path = Path(walk.run_dir, "checkpoint.pt")
    assert load(walk.run_dir)["buffer"]["rows"].shape == (30, 8)
    assert path.stat().st_size < 200_000


@pytest.mark.parametrize("capacity", [1000, 17])
def test_replay_is_a_dataset_for_the_offline_files(walk, tmp_path, capacity, run):
    """The last steps in the order of time and in the environment's units, from the command line."""
    args = replace(walk, buffer_capacity=capacity, total_timesteps=45)
    rlpd.train(args)
    file, path = str(tmp_path / "replay.npz"), f"{args.run_dir}/checkpoint.pt"
    code, out, _ = run("--evaluate", path, "--no-quiet", "--record-replay", file)
    num_rows = min(capacity, 45)
    assert code == 0 and f"replay buffer, {num_rows} transitions: {file}" in out
    data = np.load(file, allow_pickle=False)
    assert set(data) == {spellings[0] for spellings in common.NAMES.values()}
    assert data["terminations"].dtype == data["truncations"].dtype == bool

    whole = replace(walk, total_timesteps=45, buffer_capacity=1000, run_dir=str(tmp_path / "whole"))
    if capacity == 1000:
        rlpd.train(whole)
        rows = load(whole.run_dir)["buffer"]["rows"][-num_rows:]
        np.testing.assert_array_equal(data["observations"], rows[:, :2])
        np.testing.assert_allclose(data["actions"][:, 0], 1 + 2 * rows[:, 2], atol=1e-6)
        np.testing.assert_array_equal(data["rewards"], rows[:, 3])
    time = data["observations"][:, 1]
    done = data["terminations"] | data["truncations"]
    assert ((np.diff(time) == 1) | done[:-1]).all()  # one after the other
    again = tiny_args(crr, file, tmp_path / "crr")
    crr.train(replace(again, env_id="Walk-v0"))


def test_an_empty_replay_is_no_dataset(walk, tmp_path):
    """Stopped in the middle of pre-training."""
    rlpd.train(walk)
    checkpoint = load(walk.run_dir)
    checkpoint["buffer"] = {"rows": torch.empty(0, 8), "position": 0}
    torch.save(checkpoint, f"{walk.run_dir}/checkpoint.pt")
    with pytest.raises(common.InputError, match="the replay buffer is still empty"):
        record_replay(walk, tmp_path / "x.npz")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        # pre-trained up to 0, random until 14
        ({"offline_pretrain_updates": 6, "learning_starts": 14}, [-6, -5, 0, 15, 20, 25, 30]),
        ({"learning_starts": 15}, [0, 20, 25, 30]),
    ],
)
def test_no_evaluation_while_steps_are_random(walk, flags, expected):
    """The policy is still the same: patience would run out."""
    args = replace(walk, eval_interval=5, **flags)
    rlpd.train(args)
    lines = Path(args.run_dir, "metrics.csv").read_text().splitlines()
    assert [int(x.split(",")[0]) for x in lines if "eval/return_mean" in x] == expected


def test_replay_is_in_the_checkpoint_only(walk, run):
    rlpd.train(walk)
    code, _, err = run("--evaluate", f"{walk.run_dir}/best.pt", "--record-replay", "x.npz")
    assert code == 2 and "the replay buffer is in checkpoint.pt" in err


def test_data_in_buffer_is_what_the_buffer_starts_with(walk):
    args = replace(walk, data_in_buffer=True, offline_batch_ratio=0.0)
    rlpd.train(args)
    dataset = common.load_dataset("random:80", common.make_env("Walk-v0"), args.seed)
    rows = load(args.run_dir)["buffer"]["rows"]
    assert len(rows) == 80 + 30
    torch.testing.assert_close(rows[:80, :2], dataset.obs)
    torch.testing.assert_close(rows[:80, 2:3], dataset.action)


@pytest.mark.parametrize("dataset", ["none", "auto", "random:80"])
def test_without_data_it_is_sac(walk, tmp_path, spy, dataset, capsys):
    """none, nothing shipped, or a ratio of 0: the same run to the last bit, without loading any."""
    ratio = 0.0 if dataset == "random:80" else 0.5
    calls = spy("mixed_batches")
    args = replace(walk, dataset=dataset, offline_batch_ratio=ratio, quiet=False)
    rlpd.train(args)
    assert all(call[0] is None for call in calls)
    line = "prior data are not used" if ratio == 0 else "no prior data"
    assert line in capsys.readouterr().out
    rlpd.train(replace(walk, dataset="none", run_dir=str(tmp_path / "sac")))
    for left, right in zip(
        load(args.run_dir)["actor"].values(), load(tmp_path / "sac")["actor"].values()
    ):
        assert torch.equal(left, right)


def test_S14_target_entropy_is_minus_half_the_action_dimension(walk, spy):
    calls = spy("temperature_loss")
    rlpd.train(walk)
    assert {call[2] for call in calls} == {-0.5}
    assert calls[0][0].grad is not None  # it is the parameter itself, read anew each time


def test_a_fixed_alpha_stays(walk, spy):
    for alpha in (0.0, 0.3):
        calls = spy("soft_target")
        args = replace(walk, alpha=alpha, run_dir=f"{walk.run_dir}-{alpha}")
        rlpd.train(args)
        assert {round(call[4].item(), 6) for call in calls} == {alpha}
        assert not load(args.run_dir)["alpha_opt"]["state"]


def test_defaults_are_what_the_docstring_says():
    """G per step and half of each batch; the paper's own set is in the command of the docstring."""
    args = rlpd.Args()
    assert args.offline_batch_ratio == 0.5 and args.offline_pretrain_updates == 0
    assert args.num_min_critics == 2 and args.critic_layer_norm and args.backup_entropy
    assert args.alpha is None and args.tau == 0.005 and args.gamma == 0.99
    for flag in ("--num-critics 10", "--gradient-updates-per-step 20", "--hidden-dim 256"):
        assert flag in rlpd.__doc__
