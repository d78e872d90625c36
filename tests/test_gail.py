"""GAIL: discriminator, rewards, advantages, PPO and loop against numbers worked out by other
means. Who is imitated, and what is paid meanwhile, is in test_probe.py."""

import itertools
import math
import os
import shlex
import signal
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
import tyro
from conftest import (
    ProbeEnv,
    WalkEnv,
    assert_equal,
    assert_same_state,
    load,
    metrics_of,
    save_rows,
    tiny_args,
)

import common
from algos import gail
from benchmark import discriminator

LOG2 = math.log(2)
REWARDS = ("softplus", "logsigmoid", "logit")


class QuitEnv(gym.Env):
    """Action 1 ends the episode, action 0 goes on, for ten steps at most. One sees the time."""

    observation_space = gym.spaces.Box(0, 10, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.time += 1
        return np.full(1, self.time, np.float32), 0.0, bool(action == 1), False, {}


class OneStepEnv(ProbeEnv):
    """Every step is the last."""

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, True, False, {}


class RichEnv(WalkEnv):
    """The walk, paid in other numbers."""

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, 1e6 - 1000 * reward, terminated, truncated, info


class ForgetfulEnv(ProbeEnv):
    """Draws from a generator that no seed reaches."""

    def reset(self, seed=None, options=None):
        return np.random.default_rng().normal(size=1).astype(np.float32), {}


ENVS = {"Quit": QuitEnv, "OneStep": OneStepEnv, "RichWalk": RichEnv, "Forgetful": ForgetfulEnv}
for name, entry_point in ENVS.items():
    gym.register(f"{name}-v0", entry_point, max_episode_steps=10)


@pytest.fixture(scope="session")
def experts(tmp_path_factory):
    """A file of random episodes of each walk: the discriminator has something to tell apart."""
    folder, paths = tmp_path_factory.mktemp("experts"), {}
    for env_id in ("Walk-v0", "Steps-v0"):
        rows = common.random_steps(gym.make(env_id), 120, seed=0)
        rows["truncated"][-1] = not rows["terminated"][-1]
        paths[env_id] = str(folder / f"{env_id}.npz")
        np.savez(paths[env_id], **{common.NAMES[name][0]: column for name, column in rows.items()})
    return paths


@pytest.fixture
def walk(experts, tmp_path):
    """A run of a fraction of a second: four rollouts of 5 steps of 3 environments, after each of
    which D has 3 updates and PPO 2 epochs of 2 mini-batches, the second one smaller."""
    flags = {"env_id": "Walk-v0", "total_timesteps": 60, "num_envs": 3, "num_steps": 5}
    flags |= {"batch_size": 8, "gamma": 0.9, "gae_lambda": 0.8, "num_epochs": 2}
    flags |= {"learning_rate": 3e-3, "discriminator_learning_rate": 5e-3}
    flags |= {"discriminator_updates": 3, "discriminator_entropy_coef": 0.05}
    flags |= {"eval_interval": 1000, "eval_episodes": 1, "log_interval": 1}
    return replace(tiny_args(gail, experts["Walk-v0"], tmp_path / "run"), **flags)


@pytest.fixture(params=["Steps-v0", "Walk-v0"])
def either(request, walk, experts):
    """Discrete and continuous actions. A test that asks for it is run with both."""
    return replace(walk, env_id=request.param, dataset=experts[request.param])


def copied(x):
    if isinstance(x, np.ndarray):
        return x.copy()
    return x.detach().clone() if isinstance(x, torch.Tensor) else x


@pytest.fixture
def spy(monkeypatch):
    """Keep copies of the arguments and the result of every call: some are changed later."""

    def install(name, owner=gail):
        calls, original = [], getattr(owner, name)

        def spied(*args):
            before = [copied(x) for x in args]
            result = original(*args)
            calls.append((*before, copied(result)))
            return result

        monkeypatch.setattr(owner, name, spied)
        return calls

    return install


@pytest.fixture
def modules(monkeypatch):
    """The networks of a run, caught as they are made."""
    made, kinds = {}, {"actor": gail.PPOActor, "value": gail.StateValue}
    kinds |= {"discriminator": gail.Discriminator, "normalizer": gail.Normalizer}
    for name, kind in kinds.items():

        def init(self, *args, name=name, original=kind.__init__):
            made[name] = self
            original(self, *args)

        monkeypatch.setattr(kind, "__init__", init)
    return made


def rollouts_of(adds):
    """The arguments of Buffer.add, [5, K, ..] each, by rollout of 5 steps."""
    columns = [[torch.as_tensor(np.asarray(x)).float() for x in add[1:6]] for add in adds]
    starts = range(0, len(adds) - 4, 5)
    return [[torch.stack(column) for column in zip(*columns[t : t + 5])] for t in starts]


def metrics(args, key):
    """{step: value} of one key in metrics.csv."""
    rows = metrics_of(args.run_dir)
    return {int(step): float(value) for step, name, value in rows if name == key}


# ---- the discriminator's loss and the reward


def test_G1_before_it_learns_D_is_one_half():
    """f = 0 exactly, whatever the input; the reward is log 2, -log 2 or 0, the loss 2 log 2."""
    logit = gail.Discriminator(5, 32)(100 * torch.randn(64, 5))
    assert logit.shape == (64,) and (logit == 0).all()
    for kind, expected in zip(REWARDS, (LOG2, -LOG2, 0.0)):
        assert gail.gail_reward(logit, kind).tolist() == pytest.approx([expected] * 64, abs=1e-6)
    for entropy_coef in (0.0, 0.3):  # H(1/2) = log 2 is taken off, and is flat there
        expert, policy = (torch.zeros(8, requires_grad=True) for _ in range(2))
        loss = gail.gail_loss(expert, policy, entropy_coef)
        assert loss.item() == pytest.approx((2 - entropy_coef) * LOG2, abs=1e-6)
        loss.backward()
        torch.testing.assert_close(expert.grad, torch.full((8,), -1 / 16))
        torch.testing.assert_close(policy.grad, torch.full((8,), 1 / 16))


@pytest.mark.parametrize("entropy_coef", [0.0, 0.3])
def test_loss_is_binary_cross_entropy_less_entropy(entropy_coef):
    """Expert 1, policy 0; the entropy is a mean over both. Values and gradients."""
    logits = [(3 * torch.randn(7, dtype=torch.float64)).requires_grad_() for _ in range(2)]
    bce = torch.nn.functional.binary_cross_entropy_with_logits
    expected = sum(bce(f, torch.full_like(f, label)) for f, label in zip(logits, (1, 0)))
    both = torch.distributions.Bernoulli(logits=torch.cat(logits))
    expected = expected - entropy_coef * both.entropy().mean()
    actual = gail.gail_loss(*logits, entropy_coef)
    torch.testing.assert_close(actual, expected)
    gradients = [torch.autograd.grad(loss, logits) for loss in (actual, expected)]
    torch.testing.assert_close(*gradients)


def test_G1_three_rewards_are_what_they_say_of_D():
    """-log(1 - D), log D and their difference, where a double can still tell 1 - D from 0. What
    looks more like the expert is paid more, whatever the type."""
    logit = torch.linspace(-12, 12, 97, dtype=torch.float64)
    D = 1 / (1 + torch.exp(-logit))
    expected = (-torch.log(1 - D), torch.log(D), torch.log(D) - torch.log(1 - D))
    rewards = [gail.gail_reward(logit, kind) for kind in REWARDS]
    for reward, wanted in zip(rewards, expected):
        torch.testing.assert_close(reward, wanted, rtol=1e-6, atol=1e-9)
        assert (reward.diff() > 0).all()
    assert (rewards[0] > 0).all() and (rewards[1] < 0).all()


def test_G2_rewards_and_loss_are_exact_where_the_sigmoid_is_not():
    """In floats sigmoid(17) is 1 and its log(1 - D) infinite: softplus is 17 and its slope 1."""
    logit = torch.linspace(-100, 100, 401).requires_grad_()
    softplus = gail.gail_reward(logit, "softplus")
    torch.testing.assert_close(softplus, -gail.gail_reward(-logit, "logsigmoid"))
    wide = [max(f, 0) + math.log1p(math.exp(-abs(f))) for f in logit.tolist()]
    torch.testing.assert_close(softplus.double(), torch.tensor(wide, dtype=torch.float64))
    for expert, policy in ((logit, -logit), (-logit, logit)):
        loss = gail.gail_loss(expert, policy, 0.1)
        (gradient,) = torch.autograd.grad(loss, logit)
        assert loss.isfinite() and gradient.isfinite().all()
    # an expert row at -100 costs 100, and a policy row at 100 as much; D is sure: no entropy
    wrong = torch.full((1,), 100.0)
    assert gail.gail_loss(-wrong, wrong, 0.3).item() == pytest.approx(200)


def fit(expert, policy, num_steps, entropy_coef=0.0, penalty=0.0):
    """A discriminator of two batches of rows."""
    discriminator = gail.Discriminator(expert.shape[1], 32)
    opt = torch.optim.Adam(discriminator.parameters(), 1e-2)
    for _ in range(num_steps):
        loss = gail.gail_loss(discriminator(expert), discriminator(policy), entropy_coef)
        if penalty > 0:
            mix = torch.rand(len(expert), 1)
            between = (expert + mix * (policy - expert)).requires_grad_()
            slope = torch.autograd.grad(discriminator(between).sum(), between, create_graph=True)
            loss = loss + penalty * gail.slope_penalty(slope[0])
        opt.zero_grad()
        loss.backward()
        opt.step()
    return discriminator


def test_G1_best_logit_is_the_log_of_the_density_ratio():
    """Two states, two actions, counted: f* = log p_expert(s, a) - log p_policy(s, a)."""
    counts = {(-1, 0): (10, 40), (-1, 1): (20, 10), (1, 0): (30, 30), (1, 1): (40, 20)}
    cells = torch.tensor([[s, 1.0 - a, a, 0.0] for s, a in counts])
    rows = [cells.repeat_interleave(torch.tensor(n), dim=0) for n in zip(*counts.values())]
    best = [math.log(mine / yours) for mine, yours in counts.values()]
    assert fit(*rows, 600)(cells).tolist() == pytest.approx(best, abs=0.05)


def test_G10_entropy_and_penalty_keep_the_discriminator_from_being_sure():
    """On rows that are told apart at once, |f| is the smaller, the larger either coefficient."""

    def confidence(**flags):
        torch.manual_seed(0)
        x = torch.full((16, 1), 0.5)
        discriminator = fit(x, -x, 300, **flags)
        return (discriminator(x[:1]) - discriminator(-x[:1])).item()

    plain = confidence()
    by_entropy = [confidence(entropy_coef=coef) for coef in (1.0, 3.0)]
    by_penalty = [confidence(penalty=penalty) for penalty in (0.3, 10.0)]
    assert plain > 6
    assert plain > by_entropy[0] + 0.5 > by_entropy[1] + 1
    assert plain > by_penalty[0] + 0.5 > by_penalty[1] + 1
    assert by_penalty[1] == pytest.approx(1, abs=0.3)  # a slope of 1 over a distance of 1


# ---- the slope


def test_slope_penalty_by_hand():
    """f = w x has the slope w everywhere: 0 if |w| = 1, 1 if |w| = 2, 1 if w = 0."""
    for w, expected in (([0.6, -0.8], 0), ([1.2, 1.6], 1), ([0, 0.5], 0.25), ([0.0, 0], 1)):
        slope = torch.tensor(w).expand(5, 2)
        assert gail.slope_penalty(slope).item() == pytest.approx(expected, abs=1e-6)
    mixed = torch.tensor([[3.0, 4.0], [0.0, 1.0], [0.0, 0.0]])  # 16, 0 and 1
    assert gail.slope_penalty(mixed).item() == pytest.approx(17 / 3)


def test_slope_of_exactly_zero_has_a_finite_gradient():
    """As at the start, where f = 0 everywhere: |0| has no derivative, and 0 / 0 would be NaN."""
    discriminator, x = gail.Discriminator(4, 8), torch.randn(3, 4, requires_grad=True)
    (slope,) = torch.autograd.grad(discriminator(x).sum(), x, create_graph=True)
    loss = gail.slope_penalty(slope)
    assert loss.item() == 1 and (slope == 0).all()
    gradients = torch.autograd.grad(loss, list(discriminator.parameters()), allow_unused=True)
    assert all(x is None or x.isfinite().all() for x in gradients)


# ---- what the discriminator sees


def test_G9_parts_of_an_input():
    """Observation, action, mark: an action of 1.7 is played as 1 and must look like the expert's 1;
    a one-hot action has a block of its own; all absorbing states are one and the same input."""
    obs = torch.tensor([[7.0, -8.0], [5.0, 6.0]])
    action, mark = torch.tensor([[1.7, -0.2], [0.0, 1.0]]), torch.zeros(2)
    rows = [[7.0, -8.0, 1.0, -0.2, 0.0], [5.0, 6.0, 0.0, 1.0, 0.0]]
    assert torch.equal(gail.discriminator_input(obs, action, mark), torch.tensor(rows))
    rows[1] = [0.0, 0.0, 0.0, 0.0, 1.0]
    mark[1] = 1
    assert torch.equal(gail.discriminator_input(obs, action, mark), torch.tensor(rows))
    # in any number of axes
    grid = gail.discriminator_input(obs.expand(3, 2, 2), -action.expand(3, 2, 2), mark.expand(3, 2))
    rows[0][2:4] = [-1.0, 0.2]
    assert torch.equal(grid, torch.tensor(rows).expand(3, 2, 5))


def test_absorbing_share_by_counting():
    """Three episodes of 4, 1 and 7 steps, two of them terminated; with gamma 0.9, ten absorbing
    states come after each end."""
    chain = ["step"] * 4 + ["after"] * 10 + ["step"] * 1 + ["after"] * 10 + ["step"] * 7
    share = chain.count("after") / len(chain)
    assert gail.absorbing_share(2 / 12, 0.9) == pytest.approx(share)
    assert gail.absorbing_share(torch.tensor(2 / 12), 0.9).item() == pytest.approx(share)
    assert gail.absorbing_share(0.0, 0.9) == 0
    assert gail.absorbing_share(1.0, 0.75) == pytest.approx(4 / 5)


# ---- the normaliser


def test_normalizer_is_that_of_all_rows_together():
    """Lots of different sizes, centres and spreads, one row among them: float64, all at once."""
    rng = np.random.default_rng(0)
    lots = [rng.normal(3 * k, 1 + k, (n, 2)) for k, n in enumerate((40, 7, 1, 300, 15))]
    normalizer = gail.Normalizer(torch.tensor(lots[0], dtype=torch.float32))
    for k, lot in enumerate(lots):
        if k > 0:
            normalizer.update(torch.tensor(lot, dtype=torch.float32))
        seen = np.concatenate(lots[: k + 1])
        assert normalizer.count.item() == len(seen)
        np.testing.assert_allclose(normalizer.mean.numpy(), seen.mean(axis=0), rtol=1e-5)
        np.testing.assert_allclose(normalizer.std.numpy(), seen.std(axis=0), rtol=1e-5)
    expected = (seen[::9] - seen.mean(axis=0)) / (seen.std(axis=0) + 1e-3)
    actual = normalizer(torch.tensor(seen[::9], dtype=torch.float32))
    np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-4, atol=1e-4)


def test_normalizer_of_a_constant_is_bounded():
    """Where the expert never moved, any move is many std away: not infinitely many."""
    normalizer = gail.Normalizer(torch.full((20, 1), 5.0))
    obs = torch.tensor([[5.0], [5.002], [4.0], [1e6]])
    assert normalizer(obs)[:, 0].tolist() == pytest.approx([0, 2, -10, 10], abs=1e-2)


# ---- networks and policies


def test_gaussian_is_that_of_torch():
    """A sample is not clipped: what is clipped later is no part of the density."""
    mean, log_std, action = 2 * torch.randn(6, 3), torch.randn(3) / 2, 2 * torch.randn(6, 3)
    pi, reference = gail.Gaussian(mean, log_std), torch.distributions.Normal(mean, log_std.exp())
    torch.testing.assert_close(pi.log_prob(action), reference.log_prob(action).sum(-1))
    torch.testing.assert_close(pi.entropy(), reference.entropy().sum(-1).mean())
    assert torch.equal(pi.greedy(), mean.clamp(-1, 1)) and (mean.abs() > 1).any()
    std = pi.statistics()["stats/policy_std"]
    assert std == pytest.approx(log_std.exp().mean().item(), rel=1e-5)
    sample, noise = pi.sample(torch.Generator().manual_seed(0)), torch.Generator().manual_seed(0)
    expected = mean + log_std.exp() * torch.randn(6, 3, generator=noise)
    torch.testing.assert_close(sample, expected)
    assert (sample.abs() > 1).any()


def test_softmax_is_that_of_torch():
    logits, index = torch.randn(6, 4), torch.tensor([0, 3, 2, 2, 1, 0])
    pi = gail.Softmax(torch.log_softmax(logits, -1))
    reference = torch.distributions.Categorical(logits=logits)
    torch.testing.assert_close(pi.log_prob(torch.eye(4)[index]), reference.log_prob(index))
    torch.testing.assert_close(pi.entropy(), reference.entropy().mean())
    assert torch.equal(pi.greedy(), torch.eye(4)[logits.argmax(-1)])
    entropy = pi.statistics()["stats/policy_entropy"]
    assert entropy == pytest.approx(reference.entropy().mean().item(), rel=1e-5)


def test_softmax_samples_have_its_probabilities():
    """One-hot, each row from its own distribution."""
    probs = torch.tensor([[0.1, 0.2, 0.7], [0.5, 0.5, 0.0]])
    pi = gail.Softmax(probs.clamp(min=1e-30).log().repeat(20_000, 1))
    sample = pi.sample(torch.Generator().manual_seed(0))
    assert sample.shape == (40_000, 3) and sample.dtype == torch.float32
    assert (sample.sum(-1) == 1).all() and set(sample.unique().tolist()) == {0, 1}
    shares = sample.view(20_000, 2, 3).mean(0)
    torch.testing.assert_close(shares, probs, rtol=0, atol=0.015)


def test_initial_weights_are_orthogonal():
    """W W' = gain^2 I, where W has no more rows than columns; biases 0; two tanh layers. With a
    gain of 0.01 the actor has no preference; its std is 1, and learned."""
    actor = gail.PPOActor(80, 3, 64, discrete=False)
    value, discriminator = gail.StateValue(80, 64), gail.Discriminator(80, 64)
    for gain, module in ((0.01, actor), (1.0, value), (0.0, discriminator)):
        kinds = [type(layer).__name__ for layer in module.net]
        assert kinds == ["Linear", "Tanh", "Linear", "Tanh", "Linear"]
        for layer, expected in zip(module.net[::2], (math.sqrt(2), math.sqrt(2), gain)):
            gram = layer.weight @ layer.weight.T
            eye = expected**2 * torch.eye(len(gram))
            torch.testing.assert_close(gram, eye, rtol=1e-5, atol=1e-5)
            assert (layer.bias == 0).all()
    for net in (value, discriminator):
        assert net(torch.randn(7, 80)).shape == (7,) and net(torch.randn(2, 7, 80)).shape == (2, 7)
    assert actor.log_std.tolist() == [0, 0, 0] and actor.log_std.requires_grad
    assert actor(torch.randn(7, 80)).log_std is actor.log_std
    assert "log_std" not in gail.PPOActor(80, 3, 64, discrete=True).state_dict()


# ---- advantages


def random_rollout(num_steps=12, num_envs=3, seed=0):
    """[T, K] of reward, V, V of the next state and both flags: all kinds of ends, also both. Where
    an episode goes on, the next state is that of the next row."""
    rng = np.random.default_rng(seed)
    reward, value, next_value = torch.tensor(rng.normal(size=(3, num_steps, num_envs)))
    kind = torch.tensor(rng.choice(4, size=(num_steps, num_envs), p=[0.6, 0.15, 0.15, 0.1]))
    next_value[:-1] = torch.where(kind[:-1] == 0, value[1:], next_value[:-1])
    terminated, truncated = (((kind == k) | (kind == 3)).double() for k in (1, 2))
    return reward, value, next_value, terminated, truncated


def lambda_advantage(reward, value, next_value, terminated, truncated, gamma, gae_lambda):
    """The definition, for each step alone: A_t = (1 - lambda) sum_n lambda^(n-1) A_t^(n), where
    A_t^(n) = r_t + .. + gamma^(n-1) r_(t+n-1) + gamma^n V - V(s_t). The last n has all the rest."""
    num_steps, num_envs = reward.shape
    result = torch.zeros(num_steps, num_envs, dtype=torch.float64)
    for i in range(num_envs):
        for t in range(num_steps):
            last = t
            while last < num_steps - 1 and not (terminated[last, i] or truncated[last, i]):
                last += 1
            estimates = []
            for k in range(t, last + 1):
                total = sum(gamma ** (j - t) * reward[j, i].item() for j in range(t, k + 1))
                if not terminated[k, i]:
                    total += gamma ** (k - t + 1) * next_value[k, i].item()
                estimates.append(total - value[t, i].item())
            for n, estimate in enumerate(estimates, start=1):
                share = 1 - gae_lambda if n < len(estimates) else 1
                result[t, i] += share * gae_lambda ** (n - 1) * estimate
    return result


@pytest.mark.parametrize("gae_lambda", [0.0, 0.8, 1.0])
@pytest.mark.parametrize("gamma", [0.0, 0.9])
def test_S1_S2_S3_S7_gae_by_brute_force(gae_lambda, gamma):
    """Terminated, truncated, both, and cut by the end of the rollout, in one and in several
    environments. A cut bootstraps from its own last state, and nothing leaks from the next row."""
    for seed, num_envs in enumerate((1, 1, 4, 4)):
        rollout = random_rollout(num_envs=num_envs, seed=seed)
        before = [x.clone() for x in rollout]
        expected = lambda_advantage(*rollout, gamma, gae_lambda)
        actual = gail.gae(*rollout, gamma, gae_lambda)
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-9)
        assert_equal(before, list(rollout), "inputs")
    kinds = 2 * rollout[3] + rollout[4]
    assert len(kinds.unique()) == 4


# ---- PPO


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.0, -2.0, 2.0, 2.0),
        (1.1, 2.0, -2.2, -2.2),  # inside of the clip: d rho / d log pi = rho
        (0.9, -2.0, 1.8, 1.8),
        (1.5, 2.0, -2.4, 0.0),  # a good action has become likelier by enough
        (0.5, -2.0, 1.6, 0.0),  # and a bad one rarer
        (0.5, 2.0, -1.0, -1.0),  # the wrong way: never clipped
        (1.5, -2.0, 3.0, 3.0),
    ],
)
def test_ppo_loss_and_gradient_by_hand(ratio, advantage, loss, gradient):
    old, advantage = torch.tensor([-1.3]).double(), torch.tensor([advantage]).double()
    log_prob = (old + math.log(ratio)).requires_grad_()
    actual = gail.ppo_loss(log_prob, old, advantage, 0.2)
    actual.backward()
    assert actual.item() == pytest.approx(loss) and log_prob.grad.item() == pytest.approx(gradient)
    assert (log_prob.grad == 0) == (gradient == 0)  # not just almost


def test_regression_loss_by_hand():
    """Half the square: the gradient is the error over B."""
    value = torch.tensor([1.0, 2.0, -1.0], requires_grad=True)
    loss = gail.regression_loss(value, torch.tensor([0.0, 4.0, -1.0]))
    loss.backward()
    assert loss.item() == pytest.approx((1 + 4 + 0) / 6)
    assert value.grad.tolist() == pytest.approx([1 / 3, -2 / 3, 0])


def test_S8_no_broadcast():
    flat, column, grid = torch.zeros(4), torch.zeros(4, 1), torch.zeros(4, 4)
    pairs = [(flat, column), (column, flat), (column, column), (flat, flat[:1])]
    wrong = [(gail.gail_loss, (*pair, 0.1)) for pair in pairs]
    wrong += [(gail.regression_loss, pair) for pair in pairs]
    triples = list(itertools.product((flat, column), repeat=3))[1:]
    wrong += [(gail.ppo_loss, (*triple, 0.2)) for triple in triples]
    wrong += [(gail.slope_penalty, (x,)) for x in (flat, torch.zeros(4, 4, 4))]
    inputs = [(column, column, column), (column, column[:1], flat), (column[:1], column, flat)]
    wrong += [(gail.discriminator_input, parts) for parts in inputs]
    wrong += [(gail.Gaussian(column, flat[:1]).log_prob, (x,)) for x in (flat, column[:1])]
    wrong += [(gail.Softmax(grid).log_prob, (x,)) for x in (flat, grid[:1])]
    for k, shape in itertools.product(range(5), ((4, 1), (1, 4), (4,))):
        rollout = [grid] * 5
        rollout[k] = torch.zeros(shape)
        wrong.append((gail.gae, (*rollout, 0.9, 0.8)))
    for function, args in wrong:
        with pytest.raises(AssertionError):
            function(*args)


def test_S8_losses_are_means_of_rows():
    """A batch of N is the mean of N batches of one; permuting one input alone changes it."""
    log_prob, old, advantage = torch.randn(3, 6)
    cases = [
        (lambda *x: gail.ppo_loss(*x, 0.2), (log_prob, old, advantage)),
        (gail.regression_loss, (log_prob, old)),
        (lambda *x: gail.gail_loss(*x, 0.2), (log_prob, old)),
        (gail.slope_penalty, (torch.randn(6, 3),)),
    ]
    for loss, inputs in cases:
        rows = [loss(*(x[[b]] for x in inputs)) for b in range(6)]
        torch.testing.assert_close(loss(*inputs), torch.stack(rows).mean())
    for loss, inputs in cases[:2]:  # D's losses have no pairs
        for k in range(len(inputs)):
            permuted = [x.flip(0) if k == j else x for j, x in enumerate(inputs)]
            assert loss(*permuted) != loss(*inputs)


# ---- buffer and expert


def test_buffer_by_brute_force():
    """Rows in their order. A state is a copy of all that there is so far, and no more; a buffer
    that takes it goes on where it was."""
    rng, names = np.random.default_rng(0), ["obs", "action", "next_obs", "terminated", "truncated"]
    rows = [
        (*(rng.normal(size=(2, n)) for n in (3, 1, 3)), [True, False], [False, k])
        for k in (True, False, False, True)
    ]
    columns = [np.stack([np.asarray(x, np.float32) for x in column]) for column in zip(*rows)]
    buffer, states = gail.Buffer(4, 2, 3, 1), []
    for row in rows:
        states.append(buffer.state_dict())
        buffer.add(*row)
    again = gail.Buffer(4, 2, 3, 1)
    for field in again.fields.values():
        field.fill(math.nan)  # what was there before does not count
    again.load_state_dict(states[2])
    assert again.size == 2
    for row in rows[2:]:
        again.add(*row)
    for each in (buffer, again):
        assert each.size == 4 and list(each.fields) == names
        tensors = each.tensors(torch.device("cpu"))
        for field, tensor, expected in zip(each.fields.values(), tensors, columns, strict=True):
            field.fill(0)  # the next rollout must not change what this one gave
            np.testing.assert_array_equal(tensor.numpy(), expected)
    for k, state in enumerate(states):
        for name, expected in zip(names, columns):
            np.testing.assert_array_equal(state[name].numpy(), expected[:k])
            assert state[name].untyped_storage().nbytes() == 4 * state[name].numel()


def dataset_of(lengths, terminated):
    """Episodes of these lengths; an observation is the number of its row."""
    ends = torch.zeros(2, sum(lengths), dtype=torch.bool)
    for last, end in zip(np.cumsum(lengths) - 1, terminated):
        ends[0 if end else 1, last] = True
    obs, returns = torch.arange(float(sum(lengths)))[:, None], np.zeros(len(lengths))
    return common.Dataset(obs, obs, obs[:, 0], obs + 1, *ends, returns, "by hand", 0)


def test_expert_rows_are_of_the_first_episodes():
    """All of them, or the first few; every nth of each, from a random first one on. Terminations
    per step are of these episodes, and of all of their steps."""
    dataset = dataset_of([4, 3, 5], [True, False, True])
    for count, num_rows, num_ends in ((1, 4, 1), (2, 7, 1), (3, 12, 2), (None, 12, 2)):
        rows, rate = gail.expert_rows(dataset, count, 1, seed=0)
        assert rows.tolist() == list(range(num_rows))
        assert rate == pytest.approx(num_ends / num_rows)
    for seed in range(10):
        rows, rate = gail.expert_rows(dataset, None, 3, seed)
        first, second, third = np.random.default_rng(seed).integers([3, 3, 3])
        expected = [*range(first, 4, 3), *range(4 + second, 7, 3), *range(7 + third, 12, 3)]
        assert rows.tolist() == expected and rate == pytest.approx(2 / 12)
    assert gail.expert_rows(dataset_of([4, 3], [False, False]), None, 1, 0)[1] == 0


# ---- the whole loop


class ByHand:
    """GAIL once more: rows in lists, torch.distributions, sums in place of recursions, statistics
    of all that was seen at once; draws in the same order."""

    def __init__(self, args):
        self.args, self.dtype = args, torch.get_default_dtype()
        self.envs = [gym.make(args.env_id) for _ in range(args.num_envs)]
        self.discrete = args.env_id == "Steps-v0"
        self.action_dim = 3 if self.discrete else 1
        torch.manual_seed(args.seed)
        self.actor = gail.PPOActor(2, self.action_dim, args.hidden_dim, self.discrete)
        self.value = gail.StateValue(2, args.hidden_dim)
        self.discriminator = gail.Discriminator(2 + self.action_dim + 1, args.hidden_dim)
        self.learned = [*self.actor.parameters(), *self.value.parameters()]
        self.opt = torch.optim.Adam(self.learned, eps=1e-5)
        self.discriminator_opt = torch.optim.Adam(self.discriminator.parameters())
        self.generator = torch.Generator().manual_seed(common.second_seed(args.seed))
        self.num_updates, self.ends, self.clipped = 0, set(), 0

        file, rng = np.load(args.dataset), np.random.default_rng(args.seed)
        last = np.flatnonzero(file["terminations"] | file["truncations"])
        episodes = np.split(np.arange(len(file["actions"])), last + 1)[:-1]
        episodes = episodes[: args.num_expert_episodes]
        self.expert = []
        for episode in episodes:
            offset = rng.integers(args.expert_subsampling)
            for k, row in enumerate(episode):
                if k % args.expert_subsampling == offset:
                    action = self.vector(file["actions"][row])
                    self.expert.append((self.seen_as(file["observations"][row]), action))
        self.expert_rate = file["terminations"][np.concatenate(episodes)].mean()
        self.seen = [obs for obs, _ in self.expert]
        self.look_back()

    def seen_as(self, obs):
        return torch.tensor(np.asarray(obs, np.float32)).to(self.dtype)

    def vector(self, action):
        """Of the environment's action: 5, 6, 7 or a number from -1 to 3."""
        if self.discrete:
            return torch.tensor([float(action == k) for k in (5, 6, 7)])
        return torch.tensor((action - 1) / 2).to(self.dtype)

    def units(self, action):
        if self.discrete:
            return np.int64(5 + action.tolist().index(1))
        return np.clip(1 + 2 * action.numpy(), -1, 3).astype(np.float32)

    def look_back(self):
        seen = torch.stack(self.seen).double()
        self.mean = seen.mean(dim=0).to(self.dtype)
        self.std = seen.std(dim=0, correction=0).to(self.dtype)

    def normalised(self, obs):
        return ((obs - self.mean) / (self.std + 1e-3)).clamp(-10, 10)

    def pi(self, obs):
        output = self.actor.net(obs)
        if self.discrete:
            return torch.distributions.Categorical(logits=output)
        normal = torch.distributions.Normal(output, self.actor.log_std.exp())
        return torch.distributions.Independent(normal, 1)

    def log_prob(self, pi, action):
        return pi.log_prob(action.argmax(-1) if self.discrete else action)

    def act(self, obs):
        with torch.no_grad():
            pi = self.pi(torch.stack([self.normalised(x) for x in obs]))
        if self.discrete:
            index = torch.multinomial(pi.probs, 1, generator=self.generator)[:, 0]
            return torch.eye(3)[index]
        noise = torch.randn(len(obs), 1, generator=self.generator)
        return pi.mean + pi.stddev * noise

    def start(self, i, episode):
        seed = np.random.SeedSequence((self.args.seed, episode)).generate_state(1)[0]
        return self.envs[i].reset(seed=int(seed))[0]

    def run(self):
        args = self.args
        episode = list(range(args.num_envs))
        obs = [self.start(i, i) for i in episode]
        for _ in range(args.total_timesteps // (args.num_steps * args.num_envs)):
            rollout = []
            for _ in range(args.num_steps):
                before, rows = [self.seen_as(x) for x in obs], []
                action = self.act(before)
                for i, env in enumerate(self.envs):
                    after, _, end, cut, _ = env.step(self.units(action[i]))
                    kept = action[i].float().to(self.dtype)  # as the rollout keeps it
                    rows.append((before[i], kept, self.seen_as(after), end, cut))
                    obs[i] = after
                    if end or cut:
                        self.ends.add(end)
                        episode[i] += args.num_envs
                        obs[i] = self.start(i, episode[i])
                rollout.append(rows)
            self.learn(rollout)
            self.seen += [row[0] for rows in rollout for row in rows]
            self.look_back()

    def factor(self):
        """Linear: over `warmup` updates up to 1, over the rest of them down to 0."""
        args, update = self.args, self.num_updates + 1
        size = args.num_steps * args.num_envs
        last = args.total_timesteps // size * args.num_epochs * -(-size // args.batch_size)
        if args.lr_schedule == "constant":
            return 1.0
        if update <= args.warmup_updates:
            return update / args.warmup_updates
        return (last - update + 1) / (last - args.warmup_updates)

    def input(self, obs, action):
        return torch.cat([self.normalised(obs), action.clamp(-1, 1), torch.zeros(1)])

    def absorbed(self):
        return torch.tensor([0.0] * (2 + self.action_dim) + [1.0])

    def draw(self, rows, share):
        """Rows and, here and there, the absorbing state, which has nothing but the last number."""
        index = torch.randint(len(rows), (self.args.batch_size,), generator=self.generator)
        uniform = torch.rand(self.args.batch_size, generator=self.generator)
        inputs = []
        for k, u in zip(index.tolist(), uniform.tolist()):
            row = self.input(rows[k][0], rows[k][1])
            inputs.append(self.absorbed() if u < share else row)
        return torch.stack(inputs)

    def reward(self, row):
        with torch.no_grad():
            D = torch.sigmoid(self.discriminator(row[None]))[0]
        kinds = {"softplus": -torch.log(1 - D), "logsigmoid": torch.log(D)}
        kinds["logit"] = torch.log(D) - torch.log(1 - D)
        return kinds[self.args.reward_type].item()

    def learn(self, rollout):
        args, gamma = self.args, self.args.gamma
        self.opt.param_groups[0]["lr"] = args.learning_rate * self.factor()
        rate = args.discriminator_learning_rate * self.factor()
        self.discriminator_opt.param_groups[0]["lr"] = rate
        flat = [row for rows in rollout for row in rows]
        rates = self.expert_rate, sum(row[3] for row in flat) / len(flat)
        shares = [p / (1 - gamma) / (1 + p / (1 - gamma)) for p in rates]
        if not args.absorbing:
            shares = [0, 0]
        for _ in range(args.discriminator_updates):
            self.discriminate(self.draw(self.expert, shares[0]), self.draw(flat, shares[1]))

        columns = torch.zeros(5, args.num_steps, args.num_envs)
        for t, i in itertools.product(range(args.num_steps), range(args.num_envs)):
            obs, action, after, end, cut = rollout[t][i]
            total = self.reward(self.input(obs, action))
            if end and args.absorbing:  # and then for ever
                total += sum(gamma**k for k in range(1, 400)) * self.reward(self.absorbed())
            with torch.no_grad():
                v, next_v = (self.value(self.normalised(x)[None])[0] for x in (obs, after))
            columns[:, t, i] = torch.tensor([(1 - gamma) * total, v, next_v, end, cut])
        advantage = lambda_advantage(*columns, gamma, args.gae_lambda).to(self.dtype).flatten()
        returns = advantage + columns[1].flatten()
        advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
        obs = torch.stack([self.normalised(row[0]) for row in flat])
        action = torch.stack([row[1] for row in flat])
        with torch.no_grad():
            old = self.log_prob(self.pi(obs), action)
        for _ in range(args.num_epochs):
            order = torch.randperm(len(flat), generator=self.generator).tolist()
            for first in range(0, len(flat), args.batch_size):
                batch = order[first : first + args.batch_size]
                self.improve(*(x[batch] for x in (obs, action, old, advantage, returns)))

    def discriminate(self, expert, policy):
        args, one = self.args, torch.ones(self.args.batch_size)
        f_expert, f_policy = self.discriminator(expert), self.discriminator(policy)
        bce = torch.nn.functional.binary_cross_entropy_with_logits
        loss = bce(f_expert, one) + bce(f_policy, 0 * one)
        both = torch.distributions.Bernoulli(logits=torch.cat([f_expert, f_policy]))
        loss = loss - args.discriminator_entropy_coef * both.entropy().mean()
        if args.gradient_penalty > 0:
            mix = torch.rand(args.batch_size, 1, generator=self.generator)
            for b in range(args.batch_size):
                x = (mix[b] * expert[b] + (1 - mix[b]) * policy[b]).requires_grad_()
                f = self.discriminator(x[None])[0]
                (slope,) = torch.autograd.grad(f, x, create_graph=True)
                length = slope.square().sum().sqrt() if slope.any() else 0.0
                loss = loss + args.gradient_penalty * (length - 1) ** 2 / args.batch_size
        if args.learn_discriminator:
            self.discriminator_opt.zero_grad()
            loss.backward()
            self.discriminator_opt.step()

    def improve(self, obs, action, old, advantage, returns):
        args, loss = self.args, 0.0
        low, high = 1 - args.max_ratio_change, 1 + args.max_ratio_change
        self.num_updates += 1
        pi = self.pi(obs)
        log_prob, value = self.log_prob(pi, action), self.value(obs)
        for b in range(len(obs)):
            ratio, a = torch.exp(log_prob[b] - old[b]), advantage[b]
            if (a > 0 and ratio > high) or (a < 0 and ratio < low):
                self.clipped += 1
                ratio = 0 * ratio + (high if a > 0 else low)
            loss = loss + (-ratio * a + (returns[b] - value[b]) ** 2 / 2) / len(obs)
        loss = loss - args.policy_entropy_coef * pi.entropy().mean()
        self.opt.zero_grad()
        loss.backward()
        norm = math.sqrt(sum(x.grad.square().sum().item() for x in self.learned))
        if norm > args.max_grad_norm:
            for x in self.learned:
                x.grad *= args.max_grad_norm / (norm + 1e-6)
        self.opt.step()


@pytest.fixture
def in_doubles(monkeypatch):
    """Networks compute in double precision, so that rounding does not hide a mistake."""

    class Wide(gail.Normalizer):
        def __init__(self, obs):
            super().__init__(obs.double())

    tensors = gail.Buffer.tensors
    monkeypatch.setattr(gail, "Normalizer", Wide)
    monkeypatch.setattr(
        gail.Buffer, "tensors", lambda self, device: [x.double() for x in tensors(self, device)]
    )
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def assert_as_by_hand(args, rtol, atol):
    gail.train(args)
    checkpoint, hand, start = load(args.run_dir), ByHand(args), ByHand(args)
    hand.run()
    assert checkpoint["num_updates"] == hand.num_updates
    for name in ("actor", "value", "discriminator"):
        wanted, before = getattr(hand, name).state_dict(), getattr(start, name).state_dict()
        for key in wanted:
            torch.testing.assert_close(checkpoint[name][key], wanted[key], rtol=rtol, atol=atol)
        # it moved, so that agreement means something
        moved = max((wanted[key] - before[key]).abs().max().item() for key in wanted)
        assert (moved > 0.01) == (name != "discriminator" or args.learn_discriminator)
    normalizer = checkpoint["normalizer"]
    assert normalizer["count"] == len(hand.seen)
    torch.testing.assert_close(normalizer["mean"], hand.mean, rtol=rtol, atol=atol)
    torch.testing.assert_close(normalizer["std"], hand.std, rtol=rtol, atol=atol)
    return hand


LOUD = {"learning_rate": 0.01, "num_epochs": 4, "max_ratio_change": 0.1, "total_timesteps": 90}
VARIANTS = {
    "Walk-v0 plain": {},
    "Steps-v0 plain": {},
    "Walk-v0 absorbing": {"absorbing": True},
    "Steps-v0 negative": {"absorbing": True, "reward_type": "logsigmoid", "gamma": 0.8},
    "Walk-v0 few-rows": {"expert_subsampling": 3, "num_expert_episodes": 6, "absorbing": True},
    "Steps-v0 logit": {"reward_type": "logit", "gradient_penalty": 0.0, "max_ratio_change": 0.05},
    # 99 steps are six rollouts and a half: the schedule spans the updates that there are
    "Walk-v0 schedule": {"lr_schedule": "linear", "warmup_updates": 3, "total_timesteps": 99},
    "Steps-v0 one-env": {"num_envs": 1, "num_steps": 13, "batch_size": 20, "total_timesteps": 150},
    "Walk-v0 frozen": {"learn_discriminator": False, "gae_lambda": 1.0, "policy_entropy_coef": 0.1},
    "Steps-v0 frozen": {"learn_discriminator": False, "policy_entropy_coef": 0.1},
    "Walk-v0 loose": {"max_grad_norm": 100.0, "gradient_penalty": 4.0, "gae_lambda": 0.0}
    | {"discriminator_entropy_coef": 0.0},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_whole_loop_by_hand(walk, experts, in_doubles, name):
    """Terminated and truncated episodes, actions outside of the box, every draw, three networks
    and the statistics, after a few rollouts."""
    env_id = name.split()[0]
    args = replace(walk, env_id=env_id, dataset=experts[env_id], **LOUD | VARIANTS[name])
    hand = assert_as_by_hand(args, rtol=1e-6, atol=1e-8)
    assert hand.ends == {True, False} and hand.clipped > 0


def test_whole_loop_by_hand_in_floats(either):
    """As it runs in earnest: the same to within rounding."""
    assert_as_by_hand(either, rtol=1e-3, atol=1e-4)


# ---- wiring, seen in runs


def test_G4_what_anybody_is_paid_changes_nothing(walk, tmp_path):
    """Other rewards of the environment, or of the expert: the same parameters to the last bit.
    Returns are logged, and that is all."""
    rows = dict(np.load(walk.dataset))
    np.savez(tmp_path / "other.npz", **rows | {"rewards": 7 - 1000 * rows["rewards"]})
    rich = replace(walk, env_id="RichWalk-v0", run_dir=str(tmp_path / "rich"))
    other = replace(walk, dataset=f"{tmp_path}/other.npz", run_dir=str(tmp_path / "other"))
    for args in (walk, rich, other):
        gail.train(args)
        for name in ("actor", "value", "discriminator", "normalizer", "opt", "discriminator_opt"):
            assert_equal(load(args.run_dir)[name], load(walk.run_dir)[name], name)
    returns = metrics(rich, "charts/episodic_return").values()
    assert len(returns) > 3 and all(x >= 1e6 for x in returns)


def test_S9_each_loss_reaches_its_own_parameters(either, modules, monkeypatch):
    """Advantages, returns and old probabilities are numbers: no gradient flows into V through the
    policy's loss, nor into the discriminator through the reward."""
    reached = {name: [] for name in ("gail_loss", "ppo_loss", "regression_loss")}
    options = {"retain_graph": True, "allow_unused": True}

    def watch(name):
        original = getattr(gail, name)

        def watched(*args):
            loss, found = original(*args), []
            for key in ("actor", "value", "discriminator"):
                slopes = torch.autograd.grad(loss, list(modules[key].parameters()), **options)
                found += [key] if any(x is not None for x in slopes) else []
            reached[name].append((found, [x.requires_grad for x in args if torch.is_tensor(x)]))
            return loss

        monkeypatch.setattr(gail, name, watched)

    for name in reached:
        watch(name)
    gail.train(either)
    assert reached == {
        "gail_loss": [(["discriminator"], [True, True])] * 4 * 3,
        "ppo_loss": [(["actor"], [True, False, False])] * 4 * 2 * 2,
        "regression_loss": [(["value"], [True, False])] * 4 * 2 * 2,
    }


def test_ratio_is_one_in_the_first_mini_batch_of_every_rollout(either, spy, monkeypatch):
    """Old probabilities are those with which the actions were drawn: statistics that moved between
    acting and learning, or an actor that did, would make them others."""
    drawn = []
    for policy in (gail.Gaussian, gail.Softmax):

        def sample(self, generator, original=policy.sample):
            action = original(self, generator)
            drawn.append(self.log_prob(action))
            return action

        monkeypatch.setattr(policy, "sample", sample)
    losses = spy("ppo_loss")
    gail.train(replace(either, batch_size=15, num_epochs=3, learning_rate=0.03, absorbing=True))
    assert len(losses) == 4 * 3 and len(drawn) == 4 * 5
    for k in range(4):
        (first, old, *_), _, (last, again, *_) = losses[3 * k : 3 * k + 3]
        torch.testing.assert_close(first, old, rtol=0, atol=1e-5)
        acted = torch.cat(drawn[5 * k : 5 * k + 5])
        torch.testing.assert_close(old.sort().values, acted.sort().values, rtol=0, atol=1e-5)
        assert (last - again).abs().max() > 0.01
        assert torch.equal(again.sort().values, old.sort().values)


def test_S2_G6_rewards_and_values_are_of_the_networks_as_they_are_now(
    walk, modules, spy, monkeypatch
):
    """Rewards are made after the discriminator's updates. V(s_t) is of obs and V(s_{t+1}) of the
    true next_obs. All of them see the same frozen statistics."""
    adds, gae, seen = spy("add", gail.Buffer), gail.gae, []

    def watched(*args):
        obs, action, next_obs, *ends = rollouts_of(adds)[-1]
        with torch.no_grad():
            obs, next_obs = modules["normalizer"](obs), modules["normalizer"](next_obs)
            parts = [obs, action.clamp(-1, 1), torch.zeros(5, 3, 1)]
            f = modules["discriminator"](torch.cat(parts, dim=-1))
            values = [modules["value"](x) for x in (obs, next_obs)]
        seen.append((args[:5], ((1 - 0.9) * torch.log(1 + torch.exp(f)), *values, *ends)))
        return gae(*args)

    monkeypatch.setattr(gail, "gae", watched)
    gail.train(walk)
    assert len(seen) == 4
    for actual, expected in seen:
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
        assert actual[0].std() > 1e-5  # the first rewards, too: not those of D = 1/2


def test_G5_G7_G9_discriminator_sees_all_rows_through_one_normaliser(either, spy):
    """Its inputs, with frozen statistics undone, are rows of the expert or of this very rollout;
    over some updates, all of them: no slice of the rollout is left out."""
    args = replace(either, batch_size=32, discriminator_updates=25)
    adds, draws = spy("add", gail.Buffer), spy("draw_inputs")
    gail.train(args)
    dataset = common.load_dataset(args.dataset, common.make_env(args.env_id))
    expert, seen = torch.cat([dataset.obs, dataset.action], dim=1), dataset.obs
    assert len(draws) == 4 * 50
    for k, (obs, action, *_) in enumerate(rollouts_of(adds)):
        mean, std = seen.double().mean(0), seen.double().std(0, correction=0) + 1e-3
        own = torch.cat([obs, action.clamp(-1, 1)], dim=-1).flatten(0, 1)
        calls = draws[50 * k : 50 * k + 50]
        for rows, turn, least in ((expert, 0, 0.98), (own, 1, 1)):
            inputs = torch.cat([call[-1] for call in calls[turn::2]])
            assert inputs.shape == (25 * 32, rows.shape[1] + 1) and (inputs[:, -1] == 0).all()
            raw = torch.cat([inputs[:, :2] * std + mean, inputs[:, 2:-1]], dim=1)
            nearest = torch.cdist(raw, rows.double()).min(dim=1)
            assert nearest.values.max() < 1e-4
            assert len(nearest.indices.unique()) / len(rows) >= least
        seen = torch.cat([seen, obs.flatten(0, 1)])


@pytest.mark.parametrize("absorbing", [True, False])
def test_shares_of_absorbing_states(walk, spy, absorbing):
    """p / (p + 1 - gamma) with p the terminations per step: of the expert's episodes that are
    used, and of this rollout; nobody's without the flag."""
    adds, draws = spy("add", gail.Buffer), spy("draw_inputs")
    flags = {"num_expert_episodes": 9, "expert_subsampling": 2, "absorbing": absorbing}
    gail.train(replace(walk, **flags))
    file = np.load(walk.dataset)
    last = np.flatnonzero(file["terminations"] | file["truncations"])[8]
    expert, own = file["terminations"][: last + 1].mean(), [x[3].mean() for x in rollouts_of(adds)]
    assert len(set(own)) > 1 and len(draws) == 4 * 3 * 2
    for k, call in enumerate(draws):
        rate = own[k // 6].item() if k % 2 else expert
        expected = rate / (rate + 1 - 0.9) if absorbing else 0
        assert float(call[3]) == pytest.approx(expected, abs=1e-6)
    assert any((call[-1][:, -1] == 1).any() for call in draws) == absorbing


def test_S12_actions_in_a_box_that_is_not_symmetric(walk, spy, monkeypatch):
    """-1 to 3: played as 1 + 2a, clipped; kept as drawn, for pi; judged clipped, in [-1, 1]."""
    played, step = [], WalkEnv.step
    monkeypatch.setattr(
        WalkEnv, "step", lambda self, action: played.append(action.copy()) or step(self, action)
    )
    monkeypatch.setattr(common, "evaluate", lambda *_, **__: np.zeros(1))
    adds, inputs = spy("add", gail.Buffer), spy("discriminator_input")
    gail.train(replace(walk, total_timesteps=150, num_steps=25))
    kept = np.concatenate([add[2] for add in adds])[:, 0]
    assert len(played) == 150 and (np.abs(kept) > 1).sum() > 20
    np.testing.assert_allclose(np.array(played)[:, 0], np.clip(1 + 2 * kept, -1, 3), atol=1e-6)
    judged = torch.cat([call[-1][..., 2].flatten() for call in inputs])
    assert judged.min() == -1 and judged.max() == 1


# ---- episodes


def test_S2_S5_S18_no_stored_pair_crosses_a_reset(walk, spy):
    """The second number of an observation counts the steps of its episode; three environments,
    whose episodes end by themselves or after ten steps, each in its own time. Environment i plays
    i, i + 3, i + 6, ..., each from the seed that (seed, number) makes."""
    adds = spy("add", gail.Buffer)
    gail.train(replace(walk, total_timesteps=450, learning_rate=1e-6, seed=5))
    obs, _, next_obs, terminated, truncated = (
        torch.cat(column) for column in zip(*rollouts_of(adds))
    )
    assert len(obs) == 150
    for i in range(3):
        (position, time), (next_position, next_time) = obs[:, i].T, next_obs[:, i].T
        end, cut = terminated[:, i] > 0, truncated[:, i] > 0
        assert torch.equal(next_time, time + 1)
        assert end.sum() > 2 and cut.sum() > 2
        assert torch.equal(time[1:] == 0, (end | cut)[:-1])  # and no row between two episodes
        goes_on = ~(end | cut)[:-1]
        assert torch.equal(position[1:][goes_on], next_position[:-1][goes_on])
        assert torch.equal(end, next_position.abs() > 2)  # the true last observation
        assert torch.equal(cut, next_time == 10)
        starts = position[time == 0].tolist()
        for number, start in zip(itertools.count(i, 3), starts):
            seed = np.random.SeedSequence((5, number)).generate_state(1)[0]
            assert start == np.float32(gym.make("Walk-v0").reset(seed=int(seed))[0][0])
        assert load(walk.run_dir)["episodes"][i] == i + 3 * (end | cut).sum()


@pytest.mark.parametrize(
    ("env_id", "absorbing", "expected"),
    [("Probe-v0", False, LOG2), ("OneStep-v0", False, 0.2 * LOG2), ("OneStep-v0", True, LOG2)],
)
def test_S1_G8_value_of_the_only_state(walk, env_id, absorbing, expected):
    """D = 1/2 pays log 2 in every step, times 1 - gamma. Truncated for ever is worth as much as
    going on, log 2; taken for an end, it would be 0.71 of that. Terminated is worth its last reward
    alone; with --absorbing, log 2 for ever after, too."""
    flags = {"env_id": env_id, "dataset": "random:20", "total_timesteps": 1350, "num_steps": 15}
    flags |= {"batch_size": 45, "num_epochs": 8, "learning_rate": 1e-2, "log_interval": 10_000}
    flags |= {"learn_discriminator": False, "gamma": 0.8, "gae_lambda": 0.0}
    gail.train(replace(walk, **flags, absorbing=absorbing))
    value = gail.StateValue(1, walk.hidden_dim)
    value.load_state_dict(load(walk.run_dir)["value"])
    assert value(torch.zeros(1, 1)).item() == pytest.approx(expected, abs=0.03)


# ---- G3: to live or to end


@pytest.fixture
def quit_args(walk):
    """Nobody to imitate: D stays at 1/2."""
    flags = {"env_id": "Quit-v0", "total_timesteps": 1760, "num_envs": 4, "num_steps": 20}
    flags |= {"batch_size": 40, "learning_rate": 1e-2, "discriminator_learning_rate": 1e-2}
    flags |= {"num_epochs": 4, "discriminator_updates": 4, "log_interval": 10**6}
    flags |= {"gae_lambda": 0.95, "discriminator_entropy_coef": 1e-3}
    return replace(walk, dataset="random:50", learn_discriminator=False, **flags)


def chance_to_end(args):
    """P(action 1) in the first state, as it was learned."""
    gail.train(args)
    checkpoint = load(args.run_dir)
    actor, normalizer = gail.PPOActor(1, 2, 16, True), gail.Normalizer(torch.zeros(1, 1))
    actor.load_state_dict(checkpoint["actor"])
    normalizer.load_state_dict(checkpoint["normalizer"])
    with torch.no_grad():
        return torch.softmax(actor.net(normalizer(torch.zeros(1, 1))), dim=-1)[0, 1].item()


@pytest.mark.parametrize(("kind", "ends"), [("softplus", 0), ("logsigmoid", 1)])
def test_G3_a_frozen_discriminator_teaches_to_live_or_to_end(quit_args, kind, ends):
    """A reward of one sign is a bonus or a charge for every step."""
    assert abs(chance_to_end(replace(quit_args, reward_type=kind)) - ends) < 0.2


@pytest.mark.parametrize(("kind", "r"), [("softplus", LOG2), ("logsigmoid", -LOG2)])
def test_G3_with_absorbing_states_ending_is_worth_as_much_as_staying(quit_args, spy, kind, r):
    """The last reward and those of the absorbing state for ever are (1 - gamma) r / (1 - gamma) =
    r, which is V of one who stays: at that V no step has an advantage."""
    gae = spy("gae")
    gail.train(replace(quit_args, reward_type=kind, absorbing=True, total_timesteps=400))
    assert len(gae) == 5
    for reward, value, _, terminated, *rest, _ in list(gae):
        for_ever = 0.1 * sum(r * 0.9**k for k in range(500))
        expected = torch.where(terminated > 0, for_ever, 0.1 * r)
        torch.testing.assert_close(reward, expected, rtol=1e-5, atol=1e-7)
        assert terminated.sum() > 3
        fair = torch.full_like(value, r)
        assert gail.gae(reward, fair, fair, terminated, *rest).abs().max() < 1e-6


@pytest.mark.parametrize("kind", ["softplus", "logsigmoid"])
@pytest.mark.parametrize("action", [0, 1], ids=["stays", "ends"])
def test_G3_with_absorbing_states_the_expert_is_imitated(quit_args, tmp_path, kind, action):
    """Whatever the sign of the reward; without them, the sign decides where it is against him."""
    time = np.arange(40) % 10 * (action == 0)
    ends, actions = np.full(40, action == 1), np.full(40, action)
    path = save_rows(tmp_path / "expert.npz", time, actions, 0 * time, time + 1, ends, time == 9)
    args = replace(quit_args, dataset=path, reward_type=kind, learn_discriminator=True)
    assert abs(chance_to_end(replace(args, absorbing=True)) - action) < 0.2
    if (kind, action) in (("softplus", 1), ("logsigmoid", 0)):
        args = replace(args, run_dir=str(tmp_path / "plain"))
        assert abs(chance_to_end(args) - (1 - action)) < 0.2


@pytest.mark.parametrize(
    ("kind", "hint"),
    [
        ("softplus", "softplus(f) > 0 pays for every step, whatever D says; "),
        ("logsigmoid", "log D < 0 charges for every step, whatever D says; "),
        ("logit", "f pays or charges for going on, as D's level happens to be; "),
    ],
)
def test_G3_G11_the_bias_is_told_and_nothing_is_refused(walk, tmp_path, kind, hint, capsys):
    """Episodes of many lengths, the case that other libraries refuse: a note, and a run. What f
    pays depends on D, and its note does not deny it."""
    args = replace(walk, reward_type=kind, quiet=False, total_timesteps=15)
    assert gail.train(args)["step"] == 15
    output = capsys.readouterr().out
    (note,) = [line for line in output.splitlines() if line.startswith("note: ")]
    assert hint in note and "--absorbing removes" in note
    gail.train(replace(args, absorbing=True, run_dir=str(tmp_path / "absorbing")))
    assert "note:" not in capsys.readouterr().out


# ---- checkpoints


def test_G12_checkpoint_holds_the_discriminator_and_the_normaliser(walk, modules):
    """Each as it was at the end, with its optimiser; what acts is in best.pt, too."""
    gail.train(replace(walk, eval_interval=60))
    checkpoint, best = load(walk.run_dir), load(walk.run_dir, "best.pt")
    for name, module in modules.items():
        assert_equal(checkpoint[name], dict(module.state_dict()), name)
    assert {"actor", "normalizer"} <= best.keys() and "discriminator" not in best
    for name, count in (("opt", 13), ("discriminator_opt", 6)):
        assert len(checkpoint[name]["state"]) == count


def test_G12_policy_of_a_checkpoint_is_the_most_likely_action(either):
    """Through the normaliser of the run, in the environment's units, without noise."""
    args = replace(either, learning_rate=0.02, num_epochs=8)
    gail.train(args)
    checkpoint, hand = load(args.run_dir), ByHand(args)
    hand.actor.load_state_dict(checkpoint["actor"])
    hand.mean, hand.std = checkpoint["normalizer"]["mean"], checkpoint["normalizer"]["std"]
    obs = np.random.default_rng(0).normal(size=(40, 2)) * [2, 3] + [0, 5]
    with torch.no_grad():
        output = hand.actor.net(hand.normalised(hand.seen_as(obs)))
    expected = 5 + output.argmax(-1) if hand.discrete else (1 + 2 * output).clamp(-1, 3)
    assert len(expected.unique()) > (1 if hand.discrete else 5)
    policy = gail.load_policy(f"{args.run_dir}/checkpoint.pt", device="cpu")
    np.testing.assert_allclose(policy(obs), expected.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("last", [6, 21, 48])
def test_S17_S18_resume_in_the_middle_of_rollouts_and_episodes(either, tmp_path, monkeypatch, last):
    """SIGTERM makes the next step the last: before the first update, at the end of a rollout, and
    in the middle of one. The rest of it, of three episodes, and all that comes after are as if
    never stopped."""
    flags = {"seed": 3, "absorbing": True, "lr_schedule": "cosine", "expert_subsampling": 3}
    flags |= {"eval_interval": 25, "checkpoint_interval": 25, "log_interval": 10}
    whole = replace(either, total_timesteps=84, num_steps=7, **flags)
    args = replace(whole, run_dir=str(tmp_path / "stopped"))
    gail.train(whole)
    steps, add = itertools.count(3, 3), gail.Buffer.add

    def interrupted(self, *row):
        if next(steps) == last - 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return add(self, *row)

    with monkeypatch.context() as patch:
        patch.setattr(gail.Buffer, "add", interrupted)
        with pytest.raises(common.Stopped):
            gail.train(args)
    stopped = load(args.run_dir)
    assert stopped["step"] == last and stopped["policy_is_new"] == (last > 6)  # to be evaluated
    assert len(stopped["rollout"]["obs"]) == {6: 2, 21: 0, 48: 2}[last]
    assert last == 6 or len({len(actions) for actions in stopped["episode_actions"]}) > 1
    gail.train(replace(args, resume=args.run_dir))
    assert_same_state(load(whole.run_dir), load(args.run_dir))
    assert metrics_of(whole.run_dir) == metrics_of(args.run_dir)


def test_S18_an_environment_that_ignores_its_seed_is_not_resumed_in_silence(walk):
    args = replace(walk, env_id="Forgetful-v0", dataset="random:50", total_timesteps=30)
    gail.train(args)
    with pytest.raises(gail.InputError, match="plays another episode from the same seed"):
        gail.train(replace(args, resume=args.run_dir, total_timesteps=60))


# ---- intervals and logs


@pytest.mark.parametrize(
    ("num_steps", "interval"), [(5, 3), (1, 1), (1, 7), (2, 4), (3, 7), (7, 4), (7, 20)]
)
def test_a_policy_is_evaluated_once_when_it_is_first_due(walk, num_steps, interval):
    """Else it would not be better than itself, and patience would be over. An interval need not be
    a multiple of the environments: one that was passed in the last 3 steps is due."""
    gail.train(replace(walk, num_steps=num_steps, eval_interval=interval, total_timesteps=63))
    size, expected = 3 * num_steps, [0]
    for first in range(size, 63, size):  # the step that makes a new policy
        reign = range(first, min(first + size, 63), 3)
        due = [t for t in reign if any(k % interval == 0 for k in (t - 2, t - 1, t))]
        expected += due[:1]
    if 63 % size == 0 or not due:  # the last one is evaluated at the end, unless it was before
        expected.append(63)
    assert list(metrics(walk, "eval/return_mean")) == expected


def test_saves_and_logs_need_not_be_multiples_of_the_environments(walk, spy):
    saves = spy("save_atomically", common)
    gail.train(replace(walk, checkpoint_interval=10, log_interval=20, total_timesteps=66))
    states = [write.args[0] for path, write, _ in saves if path.endswith("checkpoint.pt")]
    assert [state["step"] for state in states] == [12, 21, 30, 42, 51, 60, 66]
    assert list(metrics(walk, "losses/actor")) == [30, 45, 60]  # rollouts that went past 20, 40, 60


def test_logged_statistics_are_what_they_say(either, modules, spy):
    """Of the last update; the reward is that of a step, what comes after an end is not in it."""
    flags = {"learning_rate": 0.03, "num_epochs": 4, "absorbing": True, "num_steps": 10}
    flags["seed"] = 2
    expert_loss, penalty, losses = spy("gail_loss"), spy("slope_penalty"), spy("ppo_loss")
    value_loss, gae = spy("regression_loss"), spy("gae")
    gail.train(replace(either, **flags))
    expert, policy, loss = (x.double().numpy() for x in expert_loss[-1] if torch.is_tensor(x))
    log_prob, old, _, _, actor_loss = losses[-1]
    ratio = torch.exp(log_prob - old).double().numpy()
    tensors = (x.double().numpy() for x in gae[-1] if torch.is_tensor(x))
    reward, value, _, terminated, _, advantage = tensors
    returns = advantage + value
    mark = torch.eye(2 + (3 if either.env_id == "Steps-v0" else 1) + 1)[-1:]
    end_reward = math.log(1 + math.exp(modules["discriminator"](mark).item()))
    D = 1 / (1 + np.exp(-np.concatenate([expert, policy])))
    expected = {
        "charts/learning_rate": 0.03,
        "losses/discriminator": loss + penalty[-1][-1].item(),
        "losses/actor": actor_loss.item(),
        "losses/value": value_loss[-1][-1].item(),
        "stats/accuracy_expert": np.mean([f > 0 for f in expert]),
        "stats/accuracy_policy": np.mean([f < 0 for f in policy]),
        "stats/logit_expert": expert.mean(),
        "stats/logit_policy": policy.mean(),
        "stats/discriminator_entropy": np.mean(-D * np.log(D) - (1 - D) * np.log(1 - D)),
        "stats/gail_reward": np.mean(reward / 0.1 - terminated * 9 * end_reward),
        "stats/end_reward": end_reward,
        "stats/explained_variance": 1 - (returns - value).var() / returns.var(),
        "stats/approx_kl": np.mean(ratio - 1 - np.log(ratio)),
        "stats/ratio_clipped": np.mean([r < 0.8 or r > 1.2 for r in ratio]),
    }
    assert expected["stats/ratio_clipped"] > 0 and terminated.any()
    for key, number in expected.items():
        assert metrics(either, key)[60] == pytest.approx(number, rel=1e-4, abs=1e-5), key
    own = "stats/policy_entropy" if either.env_id == "Steps-v0" else "stats/policy_std"
    assert 0.5 < metrics(either, own)[60] < 1.5


@pytest.mark.parametrize(
    ("loss", "key"),
    [("gail_loss", "discriminator"), ("ppo_loss", "actor"), ("regression_loss", "value")],
)
def test_a_loss_that_is_not_finite_stops_the_run(walk, monkeypatch, loss, key):
    """With the flags that may help; and nothing is saved."""
    original = getattr(gail, loss)
    monkeypatch.setattr(gail, loss, lambda *args: original(*args) * math.nan)
    line = r"losses/\w+ is nan at step 15: it diverged; lower --lear.* or --discriminator-learning"
    with pytest.raises(gail.InputError, match=line):
        gail.train(walk)
    assert math.isnan(metrics(walk, f"losses/{key}")[15])
    assert not Path(walk.run_dir, "checkpoint.pt").exists()


def test_logged_returns_are_those_of_whole_episodes(walk, spy):
    """In the environment's own rewards, at the step where the episode ended."""
    adds = spy("add", gail.Buffer)
    gail.train(replace(walk, total_timesteps=150))
    expected, so_far = [], [0.0] * 3
    for number, (_, _, _, next_obs, terminated, truncated, _) in enumerate(adds, start=1):
        for i in range(3):
            so_far[i] -= next_obs[i, 0] ** 2
            if terminated[i] or truncated[i]:
                expected.append((3 * number, pytest.approx(so_far[i], rel=1e-5)))
                so_far[i] = 0.0
    rows = metrics_of(walk.run_dir)
    logged = [(int(step), float(x)) for step, key, x in rows if key == "charts/episodic_return"]
    assert logged == expected and len(expected) > 10


def test_behaviour_return_is_that_of_the_episodes_in_use(walk, capsys):
    file = np.load(walk.dataset)
    last = np.flatnonzero(file["terminations"] | file["truncations"])[:4]
    returns = [x.sum() for x in np.split(file["rewards"], last + 1)[:4]]
    gail.train(replace(walk, num_expert_episodes=4, expert_subsampling=2, quiet=False))
    logged = metrics(walk, "stats/behaviour_return")
    assert logged == {0: pytest.approx(np.mean(returns), rel=1e-5)}
    assert f"4 episodes, mean return {np.mean(returns):.1f}" in capsys.readouterr().out


def test_the_start_says_how_many_rollouts_the_budget_is(walk, capsys):
    """7 steps of each of 3 environments are 21; 99 // 21 = 4, and the last 15 steps are not used
    for an update."""
    gail.train(replace(walk, num_envs=3, num_steps=7, total_timesteps=99, quiet=False))
    assert "; 4 rollouts of 21 steps" in capsys.readouterr().out


# ---- data and docstring


def test_auto_is_our_expert_and_nothing_else(walk, tmp_path, monkeypatch):
    """Not the data of the same environment that offline algorithms take, and not random steps."""
    monkeypatch.setattr(common, "SHIPPED", tmp_path)
    content = Path(walk.dataset).read_bytes()
    (tmp_path / "Walk-v0.npz").write_bytes(content)
    auto = replace(walk, dataset="auto", run_dir=str(tmp_path / "auto"))
    with pytest.raises(gail.InputError, match=r"no .*/Walk-v0-expert\.npz: give the exp"):
        gail.train(auto)
    (tmp_path / "Walk-v0-expert.npz").write_bytes(content)
    gail.train(auto)
    gail.train(walk)
    for name in ("actor", "discriminator", "fingerprint"):
        assert_equal(load(auto.run_dir)[name], load(walk.run_dir)[name], name)


@pytest.mark.parametrize("env_id", ["Bytes-v0", "ByteChoice-v0"])
def test_bytes_are_numbers_like_others(walk, env_id):
    """A vector of bytes is normalised as any other, and does not wrap around at 256."""
    gail.train(replace(walk, env_id=env_id, dataset="random:60"))
    mean = load(walk.run_dir)["normalizer"]["mean"]
    assert mean.shape == (4,) and (mean > 80).all() and (mean < 150).all()


def test_the_command_of_the_docstring_is_the_set_of_the_paper():
    """Whatever the defaults are: the numbers of the paper and of its authors' code."""
    command = gail.__doc__.split("The paper's hyper-par")[1].split("python algos/gail.py")[1]
    args = tyro.cli(gail.Args, args=shlex.split(command.split("\n\n")[0].replace("\\\n", " ")))
    gail.check_args(args)
    expected = {"env_id": "CartPole-v1", "hidden_dim": 100, "gamma": 0.995, "gae_lambda": 0.97}
    expected |= {"batch_size": 5000, "total_timesteps": 300 * 5000, "expert_subsampling": 10}
    expected |= {"discriminator_updates": 1, "discriminator_learning_rate": 0.01}
    expected |= {"discriminator_entropy_coef": 1e-3, "gradient_penalty": 0.0}
    expected |= {"reward_type": "softplus", "absorbing": False}
    assert {name: getattr(args, name) for name in expected} == expected
    assert args.num_steps * args.num_envs == args.batch_size


# ---- the picture of the discriminator


def test_angle_is_0_upright_and_rises_counterclockwise():
    """Of (cos, sin, velocity)."""
    obs = np.array([[1, 0, 3], [0, 1, -2], [0, -1, 0], [0.6, 0.8, 8]])
    expected = [[0, 3], [math.pi / 2, -2], [-math.pi / 2, 0], [math.atan(4 / 3), 8]]
    np.testing.assert_allclose(discriminator.angle_and_velocity(obs), expected)


def test_reward_map_by_hand():
    """Row of a velocity, column of an angle, through the run's normaliser, of the policy's action
    in units of [-1, 1]: with f = obs and action, weighted, one layer after the other."""
    net, normalizer = gail.Discriminator(5, 4), gail.Normalizer(torch.randn(50, 3))
    with torch.no_grad():
        net.net[4].weight.normal_()
    checkpoint = {"args": {"hidden_dim": 4}, "discriminator": net.state_dict()}
    checkpoint["normalizer"] = normalizer.state_dict()
    found = discriminator.reward_map(checkpoint, lambda obs: obs[:, 2:] / 4)
    size, p = discriminator.GRID, net.state_dict()
    assert found.shape == (size, size) and found.std() > 0.1
    for row, column in ((0, 0), (size - 1, 10), (30, 100)):
        velocity, angle = -8 + 16 * row / (size - 1), -math.pi + 2 * math.pi * column / (size - 1)
        obs = torch.tensor([math.cos(angle), math.sin(angle), velocity])
        obs = ((obs - normalizer.mean) / (normalizer.std + 1e-3)).clamp(-10, 10)
        hidden = torch.cat([obs, torch.tensor([velocity / 8, 0.0])])
        for layer in (0, 2):
            hidden = torch.tanh(p[f"net.{layer}.weight"] @ hidden + p[f"net.{layer}.bias"])
        f = (p["net.4.weight"] @ hidden + p["net.4.bias"]).item()
        assert found[row, column] == pytest.approx(math.log(1 + math.exp(f)), rel=1e-4)
