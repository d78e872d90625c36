"""GAIL: discriminator, rewards, advantages, PPO and loop against numbers worked out by other
means."""

import io
import itertools
import math
import shlex
import signal
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
import tyro
from conftest import ProbeEnv, WalkEnv, load

import common
from algos import gail

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


class PoorEnv(WalkEnv):
    """The walk, paid in NaN."""

    def step(self, action):
        obs, _, terminated, truncated, info = super().step(action)
        return obs, math.nan, terminated, truncated, info


class ForgetfulEnv(ProbeEnv):
    """Draws from a generator that no seed reaches."""

    def reset(self, seed=None, options=None):
        return np.random.default_rng().normal(size=1).astype(np.float32), {}


gym.register("Quit-v0", f"{__name__}:QuitEnv", max_episode_steps=10)  # Minari wants a string here
gym.register("OneStep-v0", OneStepEnv, max_episode_steps=10)
gym.register("PoorWalk-v0", PoorEnv, max_episode_steps=10)
gym.register("ForgetfulProbe-v0", ForgetfulEnv, max_episode_steps=10)


def play(env_id, num_steps, seed=0):
    """Rows of random episodes, up to the first end after `num_steps` steps."""
    env, rng = gym.make(env_id), np.random.default_rng(seed)
    env.action_space.seed(seed)
    rows, done = [], True
    while not done or len(rows) < num_steps:
        if done:
            obs, _ = env.reset(seed=int(rng.integers(2**31)))
        action = env.action_space.sample()
        next_obs, reward, terminated, truncated, _ = env.step(action)
        rows.append((obs, action, reward, next_obs, terminated, truncated))
        obs, done = next_obs, terminated or truncated
    return rows


def save(path, rows):
    """A file of rows (obs, action, reward, next_obs, terminated, truncated)."""
    names = [spellings[0] for spellings in common.NAMES.values()]
    np.savez(path, **{name: np.array(column) for name, column in zip(names, zip(*rows))})
    return str(path)


@pytest.fixture(scope="session")
def experts(tmp_path_factory):
    """A file of random episodes of each walk: the discriminator has something to tell apart."""
    folder, paths = tmp_path_factory.mktemp("experts"), {}
    for env_id in ("Walk-v0", "Steps-v0"):
        paths[env_id] = save(folder / f"{env_id}.npz", play(env_id, 120))
    return paths


@pytest.fixture
def walk(experts, tmp_path):
    """A run of a fraction of a second: rollouts of 5 steps of 3 environments."""
    return gail.Args(
        env_id="Walk-v0",
        dataset=experts["Walk-v0"],
        total_timesteps=60,
        batch_size=8,
        gamma=0.9,
        learning_rate=3e-3,
        lr_schedule="constant",
        hidden_dim=16,
        eval_interval=1000,
        eval_episodes=1,
        checkpoint_interval=1000,
        log_interval=1,
        run_dir=str(tmp_path / "run"),
        quiet=True,
        device="cpu",
        torch_threads=1,
        num_envs=3,
        num_steps=5,
        reward_type="softplus",
        discriminator_learning_rate=5e-3,
        discriminator_updates=3,
        discriminator_entropy_coef=0.05,
        gradient_penalty=1.0,
        num_epochs=2,
        gae_lambda=0.8,
        max_ratio_change=0.2,
        policy_entropy_coef=0.01,
        max_grad_norm=0.5,
    )


@pytest.fixture
def steps(walk, experts):
    """The same, with discrete actions."""
    return replace(walk, env_id="Steps-v0", dataset=experts["Steps-v0"])


def copied(x):
    if isinstance(x, np.ndarray):
        return x.copy()
    return x.detach().clone() if isinstance(x, torch.Tensor) else x


@pytest.fixture
def spy(monkeypatch):
    """Keep a copy of arguments and result of every call of a function of gail.py, or a method."""

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
    made = {}

    def catch(name, kind):
        original = kind.__init__

        def init(self, *args):
            made[name] = self
            original(self, *args)

        monkeypatch.setattr(kind, "__init__", init)

    catch("actor", gail.PPOActor)
    catch("value", gail.StateValue)
    catch("discriminator", gail.Discriminator)
    catch("normalizer", gail.Normalizer)
    return made


def weights(module):
    return torch.cat([x.detach().flatten().clone() for x in module.state_dict().values()])


def metrics(args, key):
    """{step: value} of one key in metrics.csv."""
    rows = [row.split(",") for row in Path(args.run_dir, "metrics.csv").read_text().splitlines()]
    return {int(row[0]): float(row[3]) for row in rows if row[2] == key}


@pytest.fixture(autouse=True)
def same_numbers_each_time():
    torch.manual_seed(0)


# ---- the discriminator's loss and the reward


def test_G1_before_it_learns_D_is_one_half():
    """f = 0 exactly, whatever the input; the reward is log 2, -log 2 or 0, the loss 2 log 2."""
    discriminator = gail.Discriminator(5, 32)
    logit = discriminator(100 * torch.randn(64, 5))
    assert logit.shape == (64,) and (logit == 0).all()
    rewards = [gail.gail_reward(logit, kind) for kind in REWARDS]
    for reward, expected in zip(rewards, (LOG2, -LOG2, 0.0)):
        assert reward.tolist() == pytest.approx([expected] * 64, abs=1e-6)
    assert gail.gail_loss(logit, logit, 0.0).item() == pytest.approx(2 * LOG2, abs=1e-6)
    # H(1/2) = log 2 is taken off
    assert gail.gail_loss(logit, logit, 0.3).item() == pytest.approx(1.7 * LOG2, abs=1e-6)


@pytest.mark.parametrize("entropy_coef", [0.0, 0.3])
def test_G1_gradient_at_one_half(entropy_coef):
    """-1/2 on every expert logit and +1/2 on every policy logit, over B; H is flat there."""
    expert, policy = (torch.zeros(8, requires_grad=True) for _ in range(2))
    gail.gail_loss(expert, policy, entropy_coef).backward()
    torch.testing.assert_close(expert.grad, torch.full((8,), -1 / 16))
    torch.testing.assert_close(policy.grad, torch.full((8,), 1 / 16))


def test_G1_one_step_raises_the_expert_and_lowers_the_policy():
    discriminator = gail.Discriminator(3, 16)
    expert, policy = torch.randn(32, 3) + 1, torch.randn(32, 3) - 1
    opt = torch.optim.SGD(discriminator.parameters(), lr=0.1)
    gail.gail_loss(discriminator(expert), discriminator(policy), 0.0).backward()
    opt.step()
    assert discriminator(expert).mean() > 0.01 and discriminator(policy).mean() < -0.01


@pytest.mark.parametrize("entropy_coef", [0.0, 0.3])
def test_loss_is_binary_cross_entropy_less_entropy(entropy_coef):
    """Expert 1, policy 0; the entropy is a mean over both. Values and gradients."""
    expert = (3 * torch.randn(7, dtype=torch.float64)).requires_grad_()
    policy = (3 * torch.randn(7, dtype=torch.float64)).requires_grad_()
    bce = torch.nn.functional.binary_cross_entropy_with_logits
    expected = bce(expert, torch.ones_like(expert)) + bce(policy, torch.zeros_like(policy))
    both = torch.distributions.Bernoulli(logits=torch.cat([expert, policy]))
    expected = expected - entropy_coef * both.entropy().mean()
    actual = gail.gail_loss(expert, policy, entropy_coef)
    torch.testing.assert_close(actual, expected)
    for left, right in zip(
        torch.autograd.grad(actual, (expert, policy)),
        torch.autograd.grad(expected, (expert, policy)),
    ):
        torch.testing.assert_close(left, right)


def test_entropy_by_hand():
    """D of 1/2, 1/4 and 0.9; at most log 2, and 0 where D is sure."""
    probs = [0.5, 0.25, 0.9]
    logits = torch.tensor([math.log(p / (1 - p)) for p in probs])
    expected = [-p * math.log(p) - (1 - p) * math.log(1 - p) for p in probs]
    for logit, entropy in zip(logits, expected):
        actual = gail.bernoulli_entropy(logit[None]).item()
        assert actual == pytest.approx(entropy, abs=1e-6) and actual <= LOG2 + 1e-6
    assert gail.bernoulli_entropy(logits).item() == pytest.approx(sum(expected) / 3, abs=1e-6)
    for sure in (-90.0, 90.0):
        assert abs(gail.bernoulli_entropy(torch.full((2,), sure)).item()) < 1e-6


def test_G1_three_rewards_are_what_they_say_of_D():
    """-log(1 - D), log D and their difference, where a double can still tell 1 - D from 0."""
    logit = torch.linspace(-12, 12, 97, dtype=torch.float64)
    D = 1 / (1 + torch.exp(-logit))
    expected = (-torch.log(1 - D), torch.log(D), torch.log(D) - torch.log(1 - D))
    for kind, reward in zip(REWARDS, expected):
        torch.testing.assert_close(gail.gail_reward(logit, kind), reward, rtol=1e-6, atol=1e-9)
    assert (gail.gail_reward(logit, "softplus") > 0).all()
    assert (gail.gail_reward(logit, "logsigmoid") < 0).all()


def test_G2_rewards_and_loss_are_exact_where_the_sigmoid_is_not():
    """In floats sigmoid(17) is 1 and its log(1 - D) infinite: softplus is 17 and its slope 1."""
    logit = torch.linspace(-100, 100, 401).requires_grad_()
    softplus = gail.gail_reward(logit, "softplus")
    torch.testing.assert_close(softplus, -torch.nn.functional.logsigmoid(-logit))
    torch.testing.assert_close(softplus, -gail.gail_reward(-logit, "logsigmoid"))
    wide = [max(f, 0) + math.log1p(math.exp(-abs(f))) for f in logit.tolist()]
    torch.testing.assert_close(softplus.double(), torch.tensor(wide, dtype=torch.float64))
    assert gail.gail_reward(torch.tensor(40.0), "softplus").item() == pytest.approx(40)
    for expert, policy in ((logit, -logit), (-logit, logit)):
        loss = gail.gail_loss(expert, policy, 0.1)
        (gradient,) = torch.autograd.grad(loss, logit)
        assert loss.isfinite() and gradient.isfinite().all()
    # an expert row at -100 costs 100, and a policy row at 100 as much
    wrong = torch.full((1,), 100.0)
    assert gail.gail_loss(-wrong, wrong, 0.0).item() == pytest.approx(200)


@pytest.mark.parametrize("kind", REWARDS)
def test_G1_reward_rises_with_the_logit(kind):
    """What looks more like the expert is paid more, at every f and whatever the type."""
    reward = gail.gail_reward(torch.linspace(-30, 30, 601, dtype=torch.float64), kind)
    assert (reward.diff() > 0).all()


def fit(expert, policy, num_steps, entropy_coef=0.0, penalty=0.0, learning_rate=1e-2):
    """A discriminator of the rows of two functions, which make a batch at each call."""
    discriminator = gail.Discriminator(expert().shape[1], 32)
    opt = torch.optim.Adam(discriminator.parameters(), learning_rate)
    for _ in range(num_steps):
        x, y = expert(), policy()
        loss = gail.gail_loss(discriminator(x), discriminator(y), entropy_coef)
        if penalty > 0:
            between = (x + torch.rand(len(x), 1) * (y - x)).requires_grad_()
            slope = torch.autograd.grad(discriminator(between).sum(), between, create_graph=True)
            loss = loss + penalty * gail.slope_penalty(slope[0])
        opt.zero_grad()
        loss.backward()
        opt.step()
    return discriminator


def test_separable_rows_are_separated():
    """N(1, 0.4) and N(-1, 0.4): 99% can be right, after 200 steps."""
    discriminator = fit(
        lambda: 1 + 0.4 * torch.randn(64, 1), lambda: 0.4 * torch.randn(64, 1) - 1, 200
    )
    with torch.no_grad():
        expert = discriminator(1 + 0.4 * torch.randn(2000, 1))
        policy = discriminator(0.4 * torch.randn(2000, 1) - 1)
    assert (expert > 0).float().mean() > 0.95 and (policy < 0).float().mean() > 0.95
    for kind in REWARDS:
        assert gail.gail_reward(expert, kind).mean() > gail.gail_reward(policy, kind).mean() + 1


def test_equal_rows_stay_at_one_half():
    """The policy that is the expert: nothing to find, and a reward of log 2."""
    discriminator = fit(
        lambda: torch.randn(256, 1), lambda: torch.randn(256, 1), 200, learning_rate=1e-3
    )
    with torch.no_grad():
        expert, policy = discriminator(torch.randn(2, 4000, 1))
    accuracy = ((expert > 0).float().mean() + (policy < 0).float().mean()) / 2
    assert accuracy.item() == pytest.approx(0.5, abs=0.05)
    assert gail.gail_reward(policy, "softplus").mean().item() == pytest.approx(LOG2, abs=0.1)


def test_best_logit_is_the_log_of_the_density_ratio():
    """Two states, two actions, counted: f* = log p_expert(s, a) - log p_policy(s, a)."""
    counts = {(-1, 0): (10, 40), (-1, 1): (20, 10), (1, 0): (30, 25), (1, 1): (40, 25)}
    cells = torch.tensor([[s, 1.0 - a, a, 0.0] for s, a in counts])
    expert, policy = (
        cells.repeat_interleave(torch.tensor([c[k] for c in counts.values()]), dim=0)
        for k in range(2)
    )
    discriminator = fit(lambda: expert, lambda: policy, 600)
    best = [math.log(mine / yours) for mine, yours in counts.values()]
    assert discriminator(cells).tolist() == pytest.approx(best, abs=0.05)


def test_G10_entropy_and_penalty_keep_the_discriminator_from_being_sure():
    """On rows that are told apart at once, |f| is the smaller, the larger either coefficient."""

    def confidence(**flags):
        torch.manual_seed(0)
        x = torch.full((16, 1), 0.5)
        discriminator = fit(lambda: x, lambda: -x, 300, **flags)
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


def randomised_discriminator(input_dim=4, dtype=torch.float64):
    discriminator = gail.Discriminator(input_dim, 8).to(dtype)
    with torch.no_grad():
        for parameter in discriminator.parameters():
            parameter.add_(0.5 * torch.randn(parameter.shape))
    return discriminator


def test_slope_penalty_is_that_of_finite_differences():
    """Of f in its inputs, and of the penalty in the weights: gradients go through the slope."""
    discriminator, x = randomised_discriminator(), torch.randn(3, 4, dtype=torch.float64)

    def penalty():
        with torch.no_grad():
            nudges = 1e-5 * torch.eye(4, dtype=torch.float64)
            columns = [discriminator(x + e) - discriminator(x - e) for e in nudges]
        slope = torch.stack(columns, dim=1) / 2e-5
        return sum((row.square().sum().sqrt().item() - 1) ** 2 for row in slope) / 3

    inputs = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(discriminator(inputs).sum(), inputs, create_graph=True)
    loss = gail.slope_penalty(slope)
    assert loss.item() == pytest.approx(penalty(), rel=1e-6)
    loss.backward()
    for parameter in discriminator.parameters():
        if parameter.grad is None:  # the last bias has no part in a slope
            assert parameter.shape == (1,)
            continue
        flat, gradient = parameter.data.view(-1), parameter.grad.flatten()
        for i in range(0, len(flat), 5):
            flat[i] += 1e-4
            up = penalty()
            flat[i] -= 2e-4
            down = penalty()
            flat[i] += 1e-4
            assert gradient[i].item() == pytest.approx((up - down) / 2e-4, abs=1e-4)


def test_slope_of_exactly_zero_has_a_finite_gradient():
    """As at the start, where f = 0 everywhere: |0| has no derivative, and 0 / 0 would be NaN."""
    discriminator, x = gail.Discriminator(4, 8), torch.randn(3, 4, requires_grad=True)
    (slope,) = torch.autograd.grad(discriminator(x).sum(), x, create_graph=True)
    loss = gail.slope_penalty(slope)
    assert loss.item() == 1 and (slope == 0).all()
    gradients = torch.autograd.grad(loss, list(discriminator.parameters()), allow_unused=True)
    assert all(x is None or x.isfinite().all() for x in gradients)


# ---- what the discriminator sees


def test_G9_one_hot_action_has_a_block_of_its_own():
    """O + A + 1 numbers; another action changes its block alone."""
    obs, actions = torch.randn(1, 3).expand(4, 3), torch.eye(4)
    rows = gail.discriminator_input(obs, actions, torch.zeros(4))
    assert rows.shape == (4, 3 + 4 + 1)
    assert torch.equal(rows[:, :3], obs) and torch.equal(rows[:, 3:7], torch.eye(4))
    assert (rows[:, 7] == 0).all()


def test_actions_are_clipped_for_the_discriminator():
    """An action of 1.7 is played as 1: it must look like the expert's 1, in any number of axes."""
    action = torch.tensor([[[-3.0, 0.4], [1.7, -0.2]], [[1.0, -1.0], [-1.01, 0.99]]])
    obs, mark = torch.full((2, 2, 1), 7.0), torch.zeros(2, 2)
    rows = gail.discriminator_input(obs, action, mark)
    clipped = [[[-1.0, 0.4], [1.0, -0.2]], [[1.0, -1.0], [-1.0, 0.99]]]
    torch.testing.assert_close(rows[..., 1:3], torch.tensor(clipped))
    assert (rows[..., 0] == 7).all()  # observations are not


def test_absorbing_rows_have_a_mark_and_nothing_else():
    """All of them are one and the same input, whatever the state and action they stand in for."""
    obs, action = torch.randn(6, 2), torch.randn(6, 3)
    mark = torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0, 0.0])
    rows = gail.discriminator_input(obs, action, mark)
    plain = gail.discriminator_input(obs, action, torch.zeros(6))
    assert torch.equal(rows[mark == 1], torch.eye(6)[-1].expand(3, 6))
    assert torch.equal(rows[mark == 0], plain[mark == 0])


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_draws_are_of_every_row_and_absorbing_in_their_share(share):
    normalizer = gail.Normalizer(torch.tensor([[-0.999], [0.999]]))  # mean 0, std + 1e-3 = 1
    obs, action = torch.arange(5.0)[:, None], torch.arange(5.0)[:, None] / 10
    generator = torch.Generator().manual_seed(0)
    rows = gail.draw_inputs(normalizer, obs, action, share, 5000, generator)
    absorbing = rows[:, 2] == 1
    assert absorbing.float().mean().item() == pytest.approx(share, abs=0.03)
    assert (rows[absorbing, :2] == 0).all() and (rows[~absorbing, 2] == 0).all()
    if share < 1:
        number = rows[~absorbing, 0].round().long()
        torch.testing.assert_close(rows[~absorbing, 1], number / 10)
        counts = torch.bincount(number, minlength=5) / len(number)
        assert len(counts) == 5 and (counts - 0.2).abs().max() < 0.03
        torch.testing.assert_close(rows[~absorbing, 0], number.float())


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
    obs = np.concatenate(lots)[::9]
    expected = (obs - seen.mean(axis=0)) / (seen.std(axis=0) + 1e-3)
    actual = normalizer(torch.tensor(obs, dtype=torch.float32))
    np.testing.assert_allclose(actual.numpy(), expected.clip(-10, 10), rtol=1e-4, atol=1e-4)


def test_normalizer_of_a_constant_is_bounded():
    """Where the expert never moved, any move is many std away: not infinitely many."""
    normalizer = gail.Normalizer(torch.full((20, 1), 5.0))
    obs = torch.tensor([[5.0], [5.002], [4.0], [1e6]])
    assert normalizer(obs)[:, 0].tolist() == pytest.approx([0, 2, -10, 10], abs=1e-2)


def test_a_fresh_normalizer_takes_the_state_of_another():
    normalizer = gail.Normalizer(torch.randn(9, 3))
    normalizer.update(torch.randn(4, 3))
    again = gail.Normalizer(torch.zeros(1, 3))
    again.load_state_dict(normalizer.state_dict())
    lot = torch.randn(6, 3)
    for each in (normalizer, again):
        each.update(lot)
    assert torch.equal(weights(normalizer), weights(again)) and again.count == 19


# ---- policies


def test_gaussian_is_that_of_torch():
    mean, log_std, action = torch.randn(6, 3), torch.randn(3) / 2, 2 * torch.randn(6, 3)
    mean.requires_grad_()
    pi, reference = gail.Gaussian(mean, log_std), torch.distributions.Normal(mean, log_std.exp())
    log_prob = pi.log_prob(action)
    torch.testing.assert_close(log_prob, reference.log_prob(action).sum(-1))
    torch.testing.assert_close(pi.entropy(), reference.entropy().sum(-1).mean())
    (slope,) = torch.autograd.grad(log_prob.sum(), mean)
    torch.testing.assert_close(slope, ((action - mean) / log_std.exp() ** 2).detach())
    assert torch.equal(pi.greedy(), mean.clamp(-1, 1))
    std = pi.statistics()["stats/policy_std"]
    assert std == pytest.approx(log_std.exp().mean().item(), rel=1e-5)


def test_gaussian_density_integrates_to_one():
    """Over the whole line: what is clipped is clipped later, and is no part of the density."""
    grid = torch.linspace(-8, 8, 4001, dtype=torch.float64)[:, None]
    pi = gail.Gaussian(torch.full_like(grid, 0.7), torch.tensor([-0.2], dtype=torch.float64))
    area = torch.trapezoid(pi.log_prob(grid).exp(), grid[:, 0]).item()
    assert area == pytest.approx(1, abs=1e-6)


def test_gaussian_samples_have_its_moments():
    mean, log_std = torch.tensor([[0.5, -2.0]]), torch.tensor([0.3, -1.0])
    pi = gail.Gaussian(mean.expand(50_000, 2), log_std)
    sample = pi.sample(torch.Generator().manual_seed(0))
    noise = torch.randn(50_000, 2, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(sample, mean + log_std.exp() * noise)
    torch.testing.assert_close(sample.mean(0), mean[0], rtol=0, atol=0.03)
    torch.testing.assert_close(sample.std(0), log_std.exp(), rtol=0.02, atol=0)
    assert abs(np.corrcoef(sample.T.numpy())[0, 1]) < 0.02
    assert (sample.abs() > 1).any()  # as a part of pi, they are not clipped


def test_softmax_is_that_of_torch():
    logits, index = torch.randn(6, 4), torch.tensor([0, 3, 2, 2, 1, 0])
    pi, reference = (
        gail.Softmax(torch.log_softmax(logits, -1)),
        torch.distributions.Categorical(logits=logits),
    )
    torch.testing.assert_close(pi.log_prob(torch.eye(4)[index]), reference.log_prob(index))
    torch.testing.assert_close(pi.entropy(), reference.entropy().mean())
    assert torch.equal(pi.greedy(), torch.eye(4)[logits.argmax(-1)])
    entropy = pi.statistics()["stats/policy_entropy"]
    assert entropy == pytest.approx(reference.entropy().mean().item(), rel=1e-5)


def test_softmax_samples_have_its_probabilities():
    """One-hot, each row from its own distribution; probabilities sum to one."""
    probs = torch.tensor([[0.1, 0.2, 0.7], [0.5, 0.5, 0.0]])
    pi = gail.Softmax(probs.clamp(min=1e-30).log().repeat(20_000, 1))
    sample = pi.sample(torch.Generator().manual_seed(0))
    assert sample.shape == (40_000, 3) and sample.dtype == torch.float32
    assert (sample.sum(-1) == 1).all() and set(sample.unique().tolist()) == {0, 1}
    shares = sample.view(20_000, 2, 3).mean(0)
    torch.testing.assert_close(shares, probs, rtol=0, atol=0.015)
    every = gail.Softmax(torch.log_softmax(torch.randn(1, 5), -1).expand(5, 5))
    assert every.log_prob(torch.eye(5)).exp().sum().item() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("discrete", [False, True])
def test_actor_starts_without_a_preference(discrete):
    """Gain 0.01: means close to 0 with std 1, or probabilities close to equal."""
    actor = gail.PPOActor(4, 3, 64, discrete)
    pi = actor(torch.randn(200, 4))
    if discrete:
        assert (pi.log_probs.exp() - 1 / 3).abs().max() < 0.02
    else:
        assert pi.mean.abs().max() < 0.05 and (pi.log_std == 0).all()
        assert pi.log_std is actor.log_std and actor.log_std.requires_grad
    assert ("log_std" in actor.state_dict()) == (not discrete)


def test_initial_weights_are_orthogonal():
    """W W' = gain^2 I, where W has no more rows than columns; biases 0; two tanh layers."""
    nets = {
        0.01: gail.PPOActor(80, 3, 64, True).net,
        1.0: gail.StateValue(80, 64).net,
        0.0: gail.Discriminator(80, 64).net,
    }
    for gain, net in nets.items():
        kinds = [type(layer).__name__ for layer in net]
        assert kinds == ["Linear", "Tanh", "Linear", "Tanh", "Linear"]
        for layer, expected in zip(net[::2], (math.sqrt(2), math.sqrt(2), gain)):
            gram = layer.weight @ layer.weight.T
            eye = expected**2 * torch.eye(len(gram))
            torch.testing.assert_close(gram, eye, rtol=0, atol=1e-5)
            assert (layer.bias == 0).all()
    for net in (gail.StateValue(80, 64), gail.Discriminator(80, 64)):
        assert net(torch.randn(7, 80)).shape == (7,) and net(torch.randn(2, 7, 80)).shape == (2, 7)


# ---- advantages


def random_rollout(num_steps=12, num_envs=3, seed=0):
    """[T, K] of reward, V, V of the next state and both flags: all kinds of ends, also both."""
    rng = np.random.default_rng(seed)
    numbers = [torch.tensor(rng.normal(size=(num_steps, num_envs))) for _ in range(3)]
    kind = rng.choice(4, size=(num_steps, num_envs), p=[0.6, 0.15, 0.15, 0.1])
    ends = [torch.tensor(np.isin(kind, both), dtype=torch.float64) for both in ((1, 3), (2, 3))]
    return [*numbers, *ends]


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
            count = len(estimates)
            for n, estimate in enumerate(estimates, start=1):
                rest = gae_lambda ** (n - 1) * (1 - gae_lambda if n < count else 1)
                result[t, i] += rest * estimate
    return result


def advantages(rollout, gamma, gae_lambda):
    """gae() and the double loop; where the episode goes on, V(s_{t+1}) is that of the next row."""
    reward, value, next_value, terminated, truncated = rollout
    goes_on = (terminated + truncated)[:-1] == 0
    next_value = next_value.clone()
    next_value[:-1][goes_on] = value[1:][goes_on]
    rollout = (reward, value, next_value, terminated, truncated)
    return gail.gae(*rollout, gamma, gae_lambda), lambda_advantage(*rollout, gamma, gae_lambda)


@pytest.mark.parametrize("gae_lambda", [0.0, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("gamma", [0.0, 0.9, 0.99])
@pytest.mark.parametrize("num_envs", [1, 4])
def test_S1_S3_S7_gae_by_brute_force(gae_lambda, gamma, num_envs):
    """Terminated, truncated, both, and cut by the end of the rollout, in several environments."""
    for seed in range(4):
        rollout = random_rollout(num_envs=num_envs, seed=seed)
        actual, expected = advantages(rollout, gamma, gae_lambda)
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-9)
    flags = torch.stack(rollout[3:])
    assert flags.sum(0).max() >= 1 and (flags[0] != flags[1]).any()


def test_gae_with_lambda_1_is_the_discounted_return_less_V():
    rollout = random_rollout()
    actual, _ = advantages(rollout, 0.9, 1.0)
    reward, value, next_value, terminated, truncated = rollout
    for i in range(3):
        future = next_value[-1, i].item()
        for t in reversed(range(12)):
            if terminated[t, i]:
                future = 0.0
            elif truncated[t, i]:
                future = next_value[t, i].item()
            future = reward[t, i].item() + 0.9 * future
            assert actual[t, i].item() == pytest.approx(future - value[t, i].item(), abs=1e-9)


def test_gae_with_lambda_0_is_one_step_and_with_gamma_0_none():
    reward, value, next_value, terminated, _ = rollout = random_rollout()
    one_step = torch.where(terminated > 0, reward, reward + 0.9 * next_value) - value
    torch.testing.assert_close(gail.gae(*rollout, 0.9, 0.0), one_step)
    for gae_lambda in (0.0, 0.7, 1.0):
        torch.testing.assert_close(gail.gae(*rollout, 0.0, gae_lambda), reward - value)


def test_S1_S2_truncation_bootstraps_from_its_own_last_state():
    """r + gamma V(final) in place of the reward, and then as if terminated: the same numbers."""
    reward, value, next_value, terminated, truncated = rollout = random_rollout(num_steps=30)
    cut = truncated * (1 - terminated)
    paid = reward + 0.9 * cut * next_value
    ended = torch.maximum(terminated, truncated)
    expected = gail.gae(paid, value, next_value, ended, torch.zeros_like(ended), 0.9, 0.8)
    torch.testing.assert_close(gail.gae(*rollout, 0.9, 0.8), expected)
    assert cut.sum() > 5
    nothing = gail.gae(reward, value, next_value, ended, truncated, 0.9, 0.8)
    assert (nothing - expected).abs().max() > 0.1


def test_S3_nothing_leaks_from_the_next_episode():
    """What comes after an end of either kind, or in another environment, is another story."""
    rollout = random_rollout(num_steps=6, num_envs=2)
    for flag in (3, 4):
        rollout[3][:], rollout[4][:] = 0, 0
        rollout[flag][2, 0] = 1
        before = gail.gae(*rollout, 0.9, 0.8)
        changed = [x.clone() for x in rollout]
        for x in changed[:3]:
            x[3:, 0] += 100
        after = gail.gae(*changed, 0.9, 0.8)
        assert torch.equal(before[:3, 0], after[:3, 0]) and torch.equal(before[:, 1], after[:, 1])
        assert (before[3:, 0] - after[3:, 0]).abs().min() > 1


def test_gae_leaves_its_inputs_as_they_were():
    rollout = random_rollout()
    before = [x.clone() for x in rollout]
    gail.gae(*rollout, 0.9, 0.8)
    assert all(torch.equal(left, right) for left, right in zip(before, rollout))


# ---- PPO


def ppo_gradient(ratio, advantage):
    """Loss and d loss / d log pi of one row, with c = 0.2."""
    old = torch.tensor([-1.3], dtype=torch.float64)
    log_prob = (old + math.log(ratio)).requires_grad_()
    loss = gail.ppo_loss(log_prob, old, torch.tensor([advantage], dtype=torch.float64), 0.2)
    loss.backward()
    return loss.item(), log_prob.grad.item()


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
    actual_loss, actual_gradient = ppo_gradient(ratio, advantage)
    assert actual_loss == pytest.approx(loss) and actual_gradient == pytest.approx(gradient)
    assert (actual_gradient == 0) == (gradient == 0)  # not just almost


def test_ppo_loss_of_many_rows_by_brute_force():
    old, advantage = torch.randn(60), torch.randn(60)
    log_prob = (old + 0.4 * torch.randn(60)).requires_grad_()
    loss = gail.ppo_loss(log_prob, old, advantage, 0.3)
    (gradient,) = torch.autograd.grad(loss, log_prob)
    total, num_clipped = 0.0, 0
    for b in range(60):
        ratio, a = math.exp(log_prob[b].item() - old[b].item()), advantage[b].item()
        clipped = ratio > 1.3 if a > 0 else ratio < 0.7
        bound = 1.3 if a > 0 else 0.7
        total -= (bound if clipped else ratio) * a / 60
        expected = 0 if clipped else -ratio * a / 60
        assert gradient[b].item() == pytest.approx(expected, abs=1e-6)
        num_clipped += clipped
    assert loss.item() == pytest.approx(total, rel=1e-5) and 5 < num_clipped < 30


def test_regression_loss_by_hand():
    """Half the square: the gradient is the error over B."""
    value = torch.tensor([1.0, 2.0, -1.0], requires_grad=True)
    loss = gail.regression_loss(value, torch.tensor([0.0, 4.0, -1.0]))
    loss.backward()
    assert loss.item() == pytest.approx((1 + 4 + 0) / 6)
    assert value.grad.tolist() == pytest.approx([1 / 3, -2 / 3, 0])


def test_S8_no_broadcast():
    flat, column, grid = torch.zeros(4), torch.zeros(4, 1), torch.zeros(4, 4)
    wrong = [
        lambda: gail.gail_loss(flat, column, 0.1),
        lambda: gail.gail_loss(column, flat, 0.1),
        lambda: gail.gail_loss(column, column, 0.1),
        lambda: gail.gail_loss(flat, flat[:1], 0.1),  # unequal sizes
        lambda: gail.slope_penalty(flat),
        lambda: gail.slope_penalty(torch.zeros(4, 4, 4)),
        lambda: gail.ppo_loss(column, column, column, 0.2),
        lambda: gail.regression_loss(flat, column),
        lambda: gail.regression_loss(column, flat),
        lambda: gail.regression_loss(column, column),
        lambda: gail.discriminator_input(column, column, column),
        lambda: gail.discriminator_input(column, column[:1], flat),
        lambda: gail.discriminator_input(column[:1], column, flat),
        lambda: gail.Gaussian(column, torch.zeros(1)).log_prob(flat),
        lambda: gail.Gaussian(column, torch.zeros(1)).log_prob(column[:1]),
        lambda: gail.Softmax(grid).log_prob(flat),
        lambda: gail.Softmax(grid).log_prob(grid[:1]),
    ]
    for k in range(3):
        ppo = [flat, flat, flat]
        ppo[k] = column
        wrong.append(lambda ppo=ppo: gail.ppo_loss(*ppo, 0.2))
    for k, shape in itertools.product(range(5), ((4, 1), (1, 4), (4,))):
        rollout = [grid] * 5
        rollout[k] = torch.zeros(shape)
        wrong.append(lambda rollout=rollout: gail.gae(*rollout, 0.9, 0.8))
    for call in wrong:
        with pytest.raises(AssertionError):
            call()


def test_S8_losses_are_means_of_rows():
    """A batch of N is the mean of N batches of one; permuting one input alone changes it."""
    log_prob, old, advantage = torch.randn(3, 6)

    def discriminate(expert, policy):
        return gail.gail_loss(expert, policy, 0.2)

    def improve(log_prob, old, advantage):
        return gail.ppo_loss(log_prob, old, advantage, 0.2)

    cases = [(discriminate, (log_prob, old)), (improve, (log_prob, old, advantage))]
    cases.append((gail.regression_loss, (log_prob, old)))
    for loss, inputs in cases:
        rows = [loss(*(x[[b]] for x in inputs)) for b in range(6)]
        torch.testing.assert_close(loss(*inputs), torch.stack(rows).mean())
    for loss, inputs in cases[1:]:  # D's loss has no pairs
        for k in range(len(inputs)):
            permuted = [x.flip(0) if k == j else x for j, x in enumerate(inputs)]
            assert loss(*permuted) != loss(*inputs)
    slope = torch.randn(6, 3)
    rows = [gail.slope_penalty(slope[[b]]) for b in range(6)]
    torch.testing.assert_close(gail.slope_penalty(slope), torch.stack(rows).mean())


# ---- buffer and expert


def test_buffer_by_brute_force():
    """Rows in their order; a partial state is all that there is, and goes on where it was."""
    rng = np.random.default_rng(0)
    rows = [
        (*(rng.normal(size=(2, n)) for n in (3, 1, 3)), [True, False], [False, k])
        for k in (True, False, False, True)
    ]
    buffer = gail.Buffer(4, 2, 3, 1)
    for k, row in enumerate(rows):
        assert buffer.size == k
        buffer.add(*row)
        state = buffer.state()
        assert list(state) == ["obs", "action", "next_obs", "terminated", "truncated"]
        for column, name in enumerate(state):
            expected = [np.asarray(each[column], np.float32) for each in rows[: k + 1]]
            np.testing.assert_array_equal(state[name].numpy(), np.stack(expected))
    file = io.BytesIO()
    buffer.size = 2
    torch.save(buffer.state(), file)
    assert all(len(x) == 2 for x in buffer.state().values())
    file.seek(0)
    again = gail.Buffer(4, 2, 3, 1)
    for field in again.fields.values():
        field.fill(math.nan)  # what was there before does not count
    again.load_state(torch.load(file, weights_only=True))
    assert again.size == 2
    for row in rows[2:]:
        again.add(*row)
    tensors = again.tensors(torch.device("cpu"))
    for (name, field), tensor in zip(buffer.fields.items(), tensors, strict=True):
        np.testing.assert_array_equal(field, again.fields[name])
        again.fields[name].fill(0)  # the next rollout must not change what this one gave
        np.testing.assert_array_equal(field, tensor.numpy())


def test_state_of_a_buffer_is_no_larger_than_what_it_holds():
    """A view would take all of the rollout into the file, and would change with the next one."""
    buffer = gail.Buffer(10_000, 2, 3, 1)
    row = (np.ones((2, 3)), np.ones((2, 1)), np.ones((2, 3)), [True] * 2, [True] * 2)
    buffer.add(*row)
    state = buffer.state()
    for x in state.values():
        assert x.untyped_storage().nbytes() == x.numel() * x.element_size()
    buffer.size = 0
    buffer.add(*(np.zeros_like(x) for x in row))
    assert all((x == 1).all() for x in state.values())


def dataset_of(lengths, terminated):
    """Episodes of these lengths; an observation is the number of its row."""
    num_rows, last = sum(lengths), np.cumsum(lengths) - 1
    ends = torch.zeros(2, num_rows, dtype=torch.bool)
    for row, end in zip(last, terminated):
        ends[0 if end else 1, row] = True
    obs = torch.arange(float(num_rows))[:, None]
    numbers = torch.zeros(num_rows)
    returns = np.zeros(len(lengths))
    return common.Dataset(obs, obs, numbers, obs + 1, *ends, returns, "by hand")


def test_expert_rows_of_the_first_episodes():
    """All of them, or the first few: and terminations per step of those alone."""
    dataset = dataset_of([4, 3, 5], [True, False, True])
    rows, rate = gail.expert_rows(dataset, None, 1, seed=0)
    assert rows.tolist() == list(range(12)) and rate == pytest.approx(2 / 12)
    for count, num_rows, num_ends in ((1, 4, 1), (2, 7, 1), (3, 12, 2)):
        rows, rate = gail.expert_rows(dataset, count, 1, seed=0)
        assert rows.tolist() == list(range(num_rows))
        assert rate == pytest.approx(num_ends / num_rows)
    assert gail.expert_rows(dataset_of([4, 3], [False, False]), None, 1, 0)[1] == 0


def test_expert_rows_are_every_nth_from_a_random_first_one():
    """Within each episode; each offset as often as any other, and not the same for all episodes.
    The rate of terminations is that of whole episodes."""
    lengths = [9, 2, 12, 5] * 30
    dataset = dataset_of(lengths, [True, False] * 60)
    first_rows = np.cumsum([0, *lengths[:-1]])
    rows, rate = gail.expert_rows(dataset, None, 4, seed=3)
    assert rate == pytest.approx(60 / sum(lengths))
    offsets, kept = [], rows.tolist()
    for first, length in zip(first_rows, lengths):
        mine = [row - first for row in kept if first <= row < first + length]
        if mine:
            offsets.append(mine[0])
            assert mine == list(range(mine[0], length, 4))
        else:
            assert length == 2  # shorter than its offset
    counts = np.bincount(offsets, minlength=4)
    assert len(counts) == 4 and counts[:2].min() > 15 and counts[2:].min() > 12
    again, _ = gail.expert_rows(dataset, None, 4, seed=3)
    other, _ = gail.expert_rows(dataset, None, 4, seed=4)
    assert torch.equal(rows, again) and not torch.equal(rows, other)


def test_expert_rows_refuse_what_there_is_not():
    dataset = dataset_of([4, 3, 5], [True, False, True])
    with pytest.raises(gail.InputError, match=r"num_expert_episodes must be <= 3, .* got 4"):
        gail.expert_rows(dataset, 4, 1, seed=0)
    with pytest.raises(gail.InputError, match="expert_subsampling 1000 leaves no row: lower it"):
        gail.expert_rows(dataset, None, 1000, seed=0)


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
        self.generator = torch.Generator().manual_seed(args.seed)
        self.num_updates, self.ends, self.clipped = 0, set(), 0

        file, rng = np.load(args.dataset), np.random.default_rng(args.seed)
        episodes, first = [], 0
        for row in range(len(file["actions"])):
            if file["terminations"][row] or file["truncations"][row]:
                episodes.append(list(range(first, row + 1)))
                first = row + 1
        episodes = episodes[: args.num_expert_episodes]
        self.expert = []
        for episode in episodes:
            offset = rng.integers(args.expert_subsampling)
            for k, row in enumerate(episode):
                if k % args.expert_subsampling == offset:
                    action = self.vector(file["actions"][row])
                    self.expert.append((self.seen_as(file["observations"][row]), action))
        rows = [row for episode in episodes for row in episode]
        self.expert_rate = sum(file["terminations"][row] for row in rows) / len(rows)
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
        seen = torch.stack(self.seen).double().numpy()
        mean, std = seen.mean(axis=0), seen.std(axis=0)
        self.mean, self.std = torch.tensor(mean).to(self.dtype), torch.tensor(std).to(self.dtype)

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

    def draw(self, rows, share):
        """Rows and, here and there, the absorbing state, which has nothing but the last number."""
        index = torch.randint(len(rows), (self.args.batch_size,), generator=self.generator)
        uniform = torch.rand(self.args.batch_size, generator=self.generator)
        inputs = []
        for k, u in zip(index.tolist(), uniform.tolist()):
            row = self.input(rows[k][0], rows[k][1])
            inputs.append(self.absorbed() if u < share else row)
        return torch.stack(inputs)

    def absorbed(self):
        return torch.tensor([0.0] * (2 + self.action_dim) + [1.0])

    def reward(self, row):
        with torch.no_grad():
            D = torch.sigmoid(self.discriminator(row[None]))[0]
        kinds = {"softplus": -torch.log(1 - D), "logsigmoid": torch.log(D)}
        kinds["logit"] = torch.log(D) - torch.log(1 - D)
        return kinds[self.args.reward_type].item()

    def learn(self, rollout):
        args, factor = self.args, self.factor()
        self.opt.param_groups[0]["lr"] = args.learning_rate * factor
        rate = args.discriminator_learning_rate * factor
        self.discriminator_opt.param_groups[0]["lr"] = rate
        flat = [row for rows in rollout for row in rows]
        rates = self.expert_rate, sum(row[3] for row in flat) / len(flat)
        shares = [p / (1 - args.gamma) / (1 + p / (1 - args.gamma)) for p in rates]
        if not args.absorbing:
            shares = [0, 0]
        for _ in range(args.discriminator_updates):
            self.discriminate(self.draw(self.expert, shares[0]), self.draw(flat, shares[1]))

        num_steps, num_envs, gamma = args.num_steps, args.num_envs, args.gamma
        reward, value, next_value, terminated, truncated = torch.zeros(5, num_steps, num_envs)
        for t in range(num_steps):
            for i, (obs, action, after, end, cut) in enumerate(rollout[t]):
                total = self.reward(self.input(obs, action))
                if end and args.absorbing:  # and then for ever
                    total += sum(gamma**k for k in range(1, 400)) * self.reward(self.absorbed())
                reward[t, i] = (1 - gamma) * total
                with torch.no_grad():
                    value[t, i] = self.value(self.normalised(obs)[None])[0]
                    next_value[t, i] = self.value(self.normalised(after)[None])[0]
                terminated[t, i], truncated[t, i] = end, cut
        rows = (reward, value, next_value, terminated, truncated)
        advantage = lambda_advantage(*rows, gamma, args.gae_lambda).to(self.dtype)
        returns = (advantage + value).flatten()
        advantage = advantage.flatten()
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
    hand = ByHand(args)
    hand.run()
    checkpoint = load(args.run_dir)
    assert checkpoint["num_updates"] == hand.num_updates
    for name in ("actor", "value", "discriminator"):
        for key, wanted in getattr(hand, name).state_dict().items():
            torch.testing.assert_close(checkpoint[name][key], wanted, rtol=rtol, atol=atol)
    normalizer = checkpoint["normalizer"]
    assert normalizer["count"] == len(hand.seen)
    torch.testing.assert_close(normalizer["mean"], hand.mean, rtol=rtol, atol=atol)
    torch.testing.assert_close(normalizer["std"], hand.std, rtol=rtol, atol=atol)
    # all of them moved, so that agreement means something
    start = ByHand(args)
    moved = [
        (weights(getattr(hand, name)) - weights(getattr(start, name))).abs().max().item()
        for name in ("actor", "value", "discriminator")
    ]
    assert moved[0] > 0.01 and moved[1] > 0.01
    assert (moved[2] > 0.01) == args.learn_discriminator
    return hand


LOUD = {"learning_rate": 0.01, "num_epochs": 4, "max_ratio_change": 0.1, "total_timesteps": 90}
VARIANTS = {
    "plain": {},
    "absorbing": {"absorbing": True},
    "absorbing-negative": {"absorbing": True, "reward_type": "logsigmoid", "gamma": 0.8},
    "few-rows": {"expert_subsampling": 3, "num_expert_episodes": 6, "absorbing": True},
    "logit": {"reward_type": "logit", "gradient_penalty": 0.0, "max_ratio_change": 0.05},
    "schedule": {"lr_schedule": "linear", "warmup_updates": 3, "discriminator_entropy_coef": 0.0},
    "one-env": {"num_envs": 1, "num_steps": 13, "batch_size": 20, "total_timesteps": 150},
    "frozen": {"learn_discriminator": False, "gae_lambda": 1.0, "policy_entropy_coef": 0.1},
    "loose": {"max_grad_norm": 100.0, "gradient_penalty": 4.0, "gae_lambda": 0.0},
}


@pytest.mark.parametrize("flags", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("kind", ["steps", "walk"])
def test_whole_loop_by_hand(request, in_doubles, kind, flags):
    """Terminated and truncated episodes, actions outside of the box, every draw, three optimisers'
    worth of parameters and the statistics, after a few rollouts."""
    args = request.getfixturevalue(kind)
    hand = assert_as_by_hand(replace(args, **LOUD | flags), rtol=1e-6, atol=1e-8)
    assert hand.ends == {True, False} and hand.clipped > 0


@pytest.mark.parametrize("kind", ["steps", "walk"])
def test_whole_loop_by_hand_in_floats(request, kind):
    """As it runs in earnest: the same to within rounding."""
    assert_as_by_hand(request.getfixturevalue(kind), rtol=1e-3, atol=1e-4)


# ---- wiring, seen in runs


@pytest.mark.filterwarnings("ignore:.*The reward is a NaN")
def test_G4_what_the_environment_pays_changes_nothing(walk, tmp_path):
    """NaN for every step: the same parameters to the last bit. It is logged, and that is all."""
    gail.train(walk)
    poor = replace(walk, env_id="PoorWalk-v0", run_dir=str(tmp_path / "poor"))
    gail.train(poor)
    left, right = load(walk.run_dir), load(poor.run_dir)
    for name in ("actor", "value", "discriminator", "normalizer", "opt", "discriminator_opt"):
        assert_same(left[name], right[name], name)
    returns = metrics(poor, "charts/episodic_return").values()
    assert len(returns) > 3 and all(math.isnan(x) for x in returns)


def test_G4_what_the_expert_was_paid_changes_nothing(walk, tmp_path):
    gail.train(walk)
    rows = dict(np.load(walk.dataset))
    rows["rewards"] = rows["rewards"] * -1000 + 7
    np.savez(tmp_path / "other.npz", **rows)
    other = replace(walk, dataset=str(tmp_path / "other.npz"), run_dir=str(tmp_path / "other"))
    gail.train(other)
    for name in ("actor", "value", "discriminator", "normalizer"):
        assert_same(load(walk.run_dir)[name], load(other.run_dir)[name], name)


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


@pytest.mark.parametrize("kind", ["steps", "walk"])
def test_each_update_moves_its_own_networks(request, modules, monkeypatch, kind):
    """The discriminator learns while policy and V stand still, then they learn while it does; the
    statistics of observations stand still throughout, and move at the end."""
    moments = []

    def watch(owner, name):
        original = getattr(owner, name)

        def watched(*args):
            moments.append({key: weights(module) for key, module in modules.items()})
            return original(*args)

        monkeypatch.setattr(owner, name, watched)

    watch(gail, "lr_factor")  # before all
    watch(gail, "gae")  # the discriminator is done
    watch(gail.Normalizer, "update")  # PPO is done
    gail.train(request.getfixturevalue(kind))
    assert len(moments) == 3 * 4
    moves = [
        {key for key in modules if not torch.equal(before[key], after[key])}
        for before, after in itertools.pairwise(moments)
    ]
    in_turn = itertools.cycle([{"discriminator"}, {"actor", "value"}, {"normalizer"}])
    assert moves == list(itertools.islice(in_turn, 11))


@pytest.mark.parametrize("kind", ["steps", "walk"])
def test_S9_each_loss_reaches_its_own_parameters(request, modules, monkeypatch, kind):
    """Advantages, returns and old probabilities are numbers: no gradient flows into V through the
    policy's loss, nor into the discriminator through the reward."""
    reached = {name: [] for name in ("gail_loss", "ppo_loss", "regression_loss")}

    def watch(name):
        original = getattr(gail, name)

        def watched(*args):
            loss = original(*args)
            keys = ("actor", "value", "discriminator")
            parameters = {key: list(modules[key].parameters()) for key in keys}
            options = {"retain_graph": True, "allow_unused": True}
            found = {
                key
                for key in keys
                if any(x is not None for x in torch.autograd.grad(loss, parameters[key], **options))
            }
            reached[name].append((found, [x.requires_grad for x in args[:3] if torch.is_tensor(x)]))
            return loss

        monkeypatch.setattr(gail, name, watched)

    for name in reached:
        watch(name)
    gail.train(request.getfixturevalue(kind))
    assert [len(calls) for calls in reached.values()] == [4 * 3, 4 * 2 * 2, 4 * 2 * 2]
    for found, learns in reached["gail_loss"]:
        assert found == {"discriminator"} and learns == [True, True]
    for found, learns in reached["ppo_loss"]:
        assert found == {"actor"} and learns == [True, False, False]
    for found, learns in reached["regression_loss"]:
        assert found == {"value"} and learns == [True, False]


@pytest.mark.parametrize("kind", ["steps", "walk"])
def test_ratio_is_one_in_the_first_mini_batch_of_every_rollout(request, spy, monkeypatch, kind):
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
    args = replace(request.getfixturevalue(kind), batch_size=15, num_epochs=3, learning_rate=0.03)
    gail.train(replace(args, absorbing=True))
    assert len(losses) == 4 * 3 and len(drawn) == 4 * 5
    for k in range(4):
        log_prob, old, *_ = losses[3 * k]
        assert ((log_prob - old).exp() - 1).abs().max() < 1e-5
        acted = torch.cat(drawn[5 * k : 5 * k + 5])
        torch.testing.assert_close(old.sort().values, acted.sort().values, rtol=0, atol=1e-5)
        log_prob, again, *_ = losses[3 * k + 2]
        assert ((log_prob - again).exp() - 1).abs().max() > 0.01
        torch.testing.assert_close(again.sort().values, old.sort().values, rtol=0, atol=0)


def rollouts_of(adds, num_steps):
    """The arguments of Buffer.add, [T, K, ..] each, by rollout."""
    columns = [[torch.as_tensor(np.asarray(x)).float() for x in add[1:6]] for add in adds]
    for first in range(0, len(adds) - num_steps + 1, num_steps):
        yield [torch.stack(column) for column in zip(*columns[first : first + num_steps])]


def test_G6_rewards_are_of_the_discriminator_as_it_is_now(walk, modules, spy, monkeypatch):
    """Every row of the rollout, after the discriminator's updates and before the advantages."""
    adds, gae, seen = spy("add", gail.Buffer), gail.gae, []

    def watched(reward, *rest):
        obs, action, *_ = list(rollouts_of(adds, 5))[-1]
        with torch.no_grad():
            obs, mark = modules["normalizer"](obs), torch.zeros(5, 3, 1)
            inputs = torch.cat([obs, action.clamp(-1, 1), mark], dim=-1)
            f = modules["discriminator"](inputs)
        seen.append((reward, (1 - 0.9) * torch.log(1 + torch.exp(f))))
        return gae(reward, *rest)

    monkeypatch.setattr(gail, "gae", watched)
    gail.train(walk)
    assert len(seen) == 4
    for reward, expected in seen:
        torch.testing.assert_close(reward, expected, rtol=1e-5, atol=1e-7)
        assert reward.std() > 1e-5  # the first ones, too: not those of D = 1/2


def test_advantages_are_normalised_over_the_rollout(walk, spy):
    """Mean 0 and std 1 of all rows, in whatever mini-batches; returns are not."""
    losses, values, gae = spy("ppo_loss"), spy("regression_loss"), spy("gae")
    gail.train(replace(walk, num_epochs=1))
    for k in range(4):
        advantage = torch.cat([call[2] for call in losses[2 * k : 2 * k + 2]])
        assert advantage.mean().item() == pytest.approx(0, abs=1e-5)
        assert advantage.std(correction=0).item() == pytest.approx(1, abs=1e-4)
        raw = gae[k][-1]
        shuffled = (raw.flatten() - raw.mean()) / raw.std(correction=0)
        torch.testing.assert_close(
            advantage.sort().values, shuffled.sort().values, rtol=1e-3, atol=1e-4
        )
        returns = torch.cat([call[1] for call in values[2 * k : 2 * k + 2]])
        expected = (raw + gae[k][1]).flatten()
        torch.testing.assert_close(returns.sort().values, expected.sort().values)


@pytest.mark.parametrize("kind", ["steps", "walk"])
def test_G5_G7_G9_discriminator_sees_all_rows_through_one_normaliser(request, spy, kind):
    """Its inputs, with frozen statistics undone, are rows of the expert or of this very rollout;
    over some updates, all of them: no slice of the rollout is left out."""
    args = replace(request.getfixturevalue(kind), batch_size=32, discriminator_updates=25)
    adds, draws = spy("add", gail.Buffer), spy("draw_inputs")
    gail.train(args)
    dataset = common.load_dataset(args.dataset, common.make_env(args.env_id))
    expert = torch.cat([dataset.obs, dataset.action], dim=1)
    if kind == "steps":
        assert torch.equal(expert[:, 2:].sum(1), torch.ones(len(expert)))
    seen = dataset.obs
    for k, (obs, action, *_) in enumerate(rollouts_of(adds, 5)):
        mean, std = seen.double().mean(0), seen.double().std(0, correction=0) + 1e-3
        own = torch.cat([obs, action.clamp(-1, 1)], dim=-1).flatten(0, 1)
        calls = draws[50 * k : 50 * k + 50]
        for rows, inputs in (
            (expert, torch.cat([call[-1] for call in calls[0::2]])),
            (own, torch.cat([call[-1] for call in calls[1::2]])),
        ):
            assert inputs.shape == (25 * 32, rows.shape[1] + 1) and (inputs[:, -1] == 0).all()
            raw = torch.cat([inputs[:, :2] * std + mean, inputs[:, 2:-1]], dim=1)
            distance = torch.cdist(raw, rows.double())
            nearest = distance.min(dim=1)
            assert nearest.values.max() < 1e-4
            share = len(nearest.indices.unique()) / len(rows)
            assert share == 1 if rows is own else share > 0.98
        seen = torch.cat([seen, obs.flatten(0, 1)])
    assert len(draws) == 4 * 50


def test_slopes_are_taken_between_the_two(walk, monkeypatch):
    """The third input of each update is a mixture of the first two, row by row, with one weight
    from 0 to 1 for all the numbers of a row."""
    inputs, forward = [], gail.Discriminator.forward

    def watched(self, x):
        inputs.append(x.detach().clone())
        return forward(self, x)

    monkeypatch.setattr(gail.Discriminator, "forward", watched)
    gail.train(replace(walk, batch_size=64))
    batches = [x for x in inputs if x.dim() == 2]
    assert len(batches) == 3 * 12
    all_weights = []
    for expert, policy, between in zip(*(batches[k::3] for k in range(3))):
        gap = expert - policy
        weight = ((between - policy) * gap).sum(1) / gap.square().sum(1)
        torch.testing.assert_close(between, policy + weight[:, None] * gap, rtol=0, atol=1e-5)
        all_weights.append(weight)
    weight = torch.cat(all_weights)
    assert weight.min() >= -1e-5 and weight.max() <= 1 + 1e-5
    quartiles = weight.quantile(torch.tensor([0.25, 0.5, 0.75]))
    torch.testing.assert_close(quartiles, torch.tensor([0.25, 0.5, 0.75]), rtol=0, atol=0.08)


@pytest.mark.parametrize("absorbing", [True, False])
def test_shares_of_absorbing_states(walk, spy, absorbing):
    """p / (p + 1 - gamma) with p the terminations per step: of the expert's episodes that are
    used, and of this rollout; nobody's without the flag."""
    adds, draws = spy("add", gail.Buffer), spy("draw_inputs")
    args = replace(walk, absorbing=absorbing, num_expert_episodes=9, expert_subsampling=2)
    gail.train(args)
    file = np.load(args.dataset)
    last = np.flatnonzero(file["terminations"] | file["truncations"])[8]
    rates = [file["terminations"][: last + 1].mean()]
    rates = [(rates[0], rows[3].mean().item()) for rows in rollouts_of(adds, 5)]
    assert len({rate for _, rate in rates}) > 1
    for k, call in enumerate(draws):
        rate = rates[k // 6][k % 2]
        expected = rate / (rate + 1 - 0.9) if absorbing else 0
        assert float(call[3]) == pytest.approx(expected, abs=1e-6)
    assert any((call[-1][:, -1] == 1).any() for call in draws) == absorbing


def test_number_of_updates(walk, tmp_path):
    """Of the discriminator, per rollout; of PPO, per epoch and mini-batch, the last being small."""
    gail.train(replace(walk, discriminator_updates=7, num_epochs=3, batch_size=4))
    checkpoint = load(walk.run_dir)
    counts = {
        name: {state["step"].item() for state in checkpoint[name]["state"].values()}
        for name in ("opt", "discriminator_opt")
    }
    assert counts == {"opt": {4 * 3 * 4}, "discriminator_opt": {4 * 7}}
    assert checkpoint["num_updates"] == 4 * 3 * 4


def test_every_row_is_in_every_epoch_once(walk, spy):
    losses = spy("regression_loss")
    gae = spy("gae")
    gail.train(replace(walk, num_epochs=3))
    for k, call in enumerate(gae):
        expected = (call[-1] + call[1]).flatten().sort().values
        orders = []
        for epoch in range(3):
            pair = losses[6 * k + 2 * epoch : 6 * k + 2 * epoch + 2]
            returns = torch.cat([each[1] for each in pair])
            torch.testing.assert_close(returns.sort().values, expected)
            orders.append(returns)
        assert not torch.equal(orders[0], orders[1]) and not torch.equal(orders[1], orders[2])


def test_a_frozen_discriminator_stays_at_one_half(walk, spy):
    gae = spy("gae")
    gail.train(replace(walk, learn_discriminator=False))
    checkpoint = load(walk.run_dir)
    assert (checkpoint["discriminator"]["net.4.weight"] == 0).all()
    assert not checkpoint["discriminator_opt"]["state"]
    for reward, *_ in gae:
        torch.testing.assert_close(reward, torch.full((5, 3), 0.1 * LOG2))
    logged = list(metrics(walk, "stats/gail_reward").values())
    assert logged == pytest.approx([LOG2] * 4, abs=1e-6)


def test_S12_actions_in_a_box_that_is_not_symmetric(walk, spy, monkeypatch):
    """-1 to 3: played as 1 + 2a, clipped; kept as drawn, for pi; judged clipped, in [-1, 1]."""
    played, step = [], WalkEnv.step
    monkeypatch.setattr(
        WalkEnv, "step", lambda self, action: played.append(action.copy()) or step(self, action)
    )
    monkeypatch.setattr(common, "evaluate", lambda *_: np.zeros(1))
    adds, inputs, losses = spy("add", gail.Buffer), spy("discriminator_input"), spy("ppo_loss")
    gail.train(replace(walk, total_timesteps=150, num_steps=25))
    kept = np.concatenate([add[2] for add in adds])[:, 0]
    assert len(played) == 150 and (np.abs(kept) > 1).sum() > 20
    np.testing.assert_allclose(np.array(played)[:, 0], np.clip(1 + 2 * kept, -1, 3), atol=1e-6)
    judged = torch.cat([call[-1][..., 2].flatten() for call in inputs])
    assert judged.min() == -1 and judged.max() == 1
    file = np.load(walk.dataset)["actions"]
    assert file.min() < -0.9 and file.max() > 2.9
    expert = torch.cat([call[-1][:, 2] for call in inputs[0:6:2]])
    distance = np.abs(expert.numpy()[:, None] - (file[:, 0] - 1) / 2).min(axis=1)
    assert distance.max() < 1e-6
    # of a mean close to 0 and a std of 1, log pi of 1.7 is not that of 1
    old = torch.cat([call[1] for call in losses[: 75 // 8 + 1]]).sort().values
    drawn = -0.5 * torch.tensor(kept[:75]) ** 2 - 0.5 * math.log(2 * math.pi)
    torch.testing.assert_close(old, drawn.sort().values, rtol=0, atol=0.1)


def test_G9_discrete_actions_are_played_in_the_units_of_the_environment(steps, spy):
    """5, 6, 7 for one-hot vectors; the environment refuses all others."""
    adds = spy("add", gail.Buffer)
    gail.train(steps)
    checkpoint = load(steps.run_dir)
    one_hot = torch.tensor(np.stack([add[2] for add in adds]))
    assert set(one_hot.unique().tolist()) == {0, 1} and (one_hot.sum(-1) == 1).all()
    for i, actions in enumerate(checkpoint["episode_actions"]):
        last = one_hot[len(adds) - len(actions) :, i].argmax(-1)
        assert actions.tolist() == (5 + last).tolist()
    assert one_hot.sum((0, 1)).min() > 8  # of 60: all three are tried


# ---- episodes


def test_S2_S5_no_stored_pair_crosses_a_reset(walk, spy):
    """The second number of an observation counts the steps of its episode; three environments,
    whose episodes end by themselves or after ten steps, each in its own time."""
    adds = spy("add", gail.Buffer)
    gail.train(replace(walk, total_timesteps=450, learning_rate=1e-6))
    obs, _, next_obs, terminated, truncated = (
        torch.cat(column) for column in zip(*rollouts_of(adds, 5))
    )
    assert len(obs) == 150
    for i in range(3):
        position, time = obs[:, i].T
        next_position, next_time = next_obs[:, i].T
        end, cut = terminated[:, i] > 0, truncated[:, i] > 0
        done = end | cut
        assert torch.equal(next_time, time + 1)
        assert end.sum() > 2 and cut.sum() > 2
        assert torch.equal(time[1:] == 0, done[:-1])  # and no row between two episodes
        goes_on = ~done[:-1]
        assert torch.equal(position[1:][goes_on], next_position[:-1][goes_on])
        assert torch.equal(end, next_position.abs() > 2)  # the true last observation
        assert torch.equal(cut, next_time == 10)
    assert not torch.equal(obs[:, 0], obs[:, 1])


def test_S2_values_are_of_the_true_next_observation(walk, modules, spy, monkeypatch):
    """V(s_t) of obs and V(s_{t+1}) of next_obs, both normalised with the frozen statistics."""
    adds, gae, seen = spy("add", gail.Buffer), gail.gae, []

    def watched(reward, value, next_value, *rest):
        obs, _, next_obs, *ends = list(rollouts_of(adds, 5))[-1]
        with torch.no_grad():
            normalised = [modules["normalizer"](x) for x in (obs, next_obs)]
            expected = [modules["value"].net(x)[..., 0] for x in normalised]
        seen.append(([value, next_value, *rest[:2]], [*expected, *ends]))
        return gae(reward, value, next_value, *rest)

    monkeypatch.setattr(gail, "gae", watched)
    gail.train(walk)
    assert len(seen) == 4
    for actual, expected in seen:
        for left, right in zip(actual, expected, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


def starting_position(env_id, seed, episode):
    state = np.random.SeedSequence((seed, episode)).generate_state(1)
    return gym.make(env_id).reset(seed=int(state[0]))[0][0].astype(np.float32).item()


def test_S18_environment_i_plays_episodes_i_and_every_kth_after(walk, spy):
    """Each from the seed that (seed, number) makes, whatever came before it."""
    adds = spy("add", gail.Buffer)
    gail.train(replace(walk, total_timesteps=180, seed=5))
    obs = torch.tensor(np.stack([add[1] for add in adds])).float()
    for i in range(3):
        starts = obs[obs[:, i, 1] == 0, i, 0].tolist()
        assert len(starts) > 5
        expected = [starting_position("Walk-v0", 5, i + 3 * k) for k in range(len(starts))]
        assert starts == expected
    episodes = load(walk.run_dir)["episodes"]
    counts = [(x - i) // 3 for i, x in enumerate(episodes)]
    done = torch.stack([torch.tensor(add[4]) | torch.tensor(add[5]) for add in adds])
    assert counts == done.sum(0).tolist()


def value_at_zero(args):
    """V of the only state, after training."""
    gail.train(args)
    checkpoint = load(args.run_dir)
    value = gail.StateValue(1, args.hidden_dim)
    value.load_state_dict(checkpoint["value"])
    with torch.no_grad():
        return value(torch.zeros(1, 1)).item()


@pytest.fixture
def one_state(walk):
    args = replace(walk, env_id="Probe-v0", dataset="random:20", total_timesteps=1350, num_steps=15)
    args = replace(args, batch_size=45, num_epochs=8, learning_rate=1e-2, log_interval=10_000)
    return replace(args, learn_discriminator=False, gamma=0.8)


def test_S1_G8_truncated_for_ever_is_worth_as_much_as_going_on(one_state):
    """Reward log 2 and a cut every ten steps: V = (1 - gamma) log 2 / (1 - gamma). Taken for an
    end, with gamma 0.8 and one-step targets, it would be 0.71 of that."""
    for gae_lambda in (0.0, 0.9):
        run_dir = f"{one_state.run_dir}-{gae_lambda}"
        args = replace(one_state, gae_lambda=gae_lambda, run_dir=run_dir)
        assert value_at_zero(args) == pytest.approx(LOG2, abs=0.03)


@pytest.mark.parametrize("absorbing", [False, True])
def test_S1_G8_terminated_is_worth_its_last_reward_alone(one_state, absorbing):
    """(1 - gamma) log 2; with --absorbing, log 2 for ever after, too."""
    args = replace(one_state, env_id="OneStep-v0", absorbing=absorbing)
    expected = LOG2 if absorbing else 0.2 * LOG2
    assert value_at_zero(args) == pytest.approx(expected, abs=0.03)


# ---- G3: to live or to end


def quit_expert(path, action):
    """Forty steps of one who always ends, or never does."""
    rows = []
    for k in range(40):
        time = k % 10 if action == 0 else 0
        rows.append(([time], action, 0.0, [time + 1], action == 1, time == 9))
    return save(path, rows)


@pytest.fixture
def quit_args(walk):
    args = replace(walk, env_id="Quit-v0", total_timesteps=1760, num_envs=4, num_steps=20)
    args = replace(args, batch_size=40, learning_rate=1e-2, discriminator_learning_rate=1e-2)
    args = replace(args, num_epochs=4, discriminator_updates=4, log_interval=10**6)
    return replace(args, gae_lambda=0.95, discriminator_entropy_coef=1e-3)


def chance_to_end(args):
    """P(action 1) in the first state, as it was learned."""
    gail.train(args)
    checkpoint = load(args.run_dir)
    actor, normalizer = gail.PPOActor(1, 2, 16, True), gail.Normalizer(torch.zeros(1, 1))
    actor.load_state_dict(checkpoint["actor"])
    normalizer.load_state_dict(checkpoint["normalizer"])
    with torch.no_grad():
        return torch.softmax(actor.net(normalizer(torch.zeros(1, 1))), dim=-1)[0, 1].item()


@pytest.mark.parametrize(("kind", "ends"), [("softplus", False), ("logsigmoid", True)])
def test_G3_a_frozen_discriminator_teaches_to_live_or_to_end(quit_args, kind, ends):
    """A reward of one sign is a bonus or a charge for every step, with nobody to imitate."""
    args = replace(quit_args, dataset="random:50", learn_discriminator=False, reward_type=kind)
    chance = chance_to_end(args)
    assert chance > 0.8 if ends else chance < 0.2


@pytest.mark.parametrize("kind", ["softplus", "logsigmoid"])
def test_G3_with_absorbing_states_ending_is_worth_as_much_as_staying(quit_args, spy, kind):
    """The last reward and those of the absorbing state for ever are (1 - gamma) r / (1 - gamma) =
    r, which is V of one who stays: at that V no step has an advantage."""
    gae = spy("gae")
    args = replace(quit_args, dataset="random:50", learn_discriminator=False, reward_type=kind)
    gail.train(replace(args, absorbing=True, total_timesteps=400))
    r = {"softplus": LOG2, "logsigmoid": -LOG2}[kind]
    assert len(gae) == 5
    for reward, value, _, terminated, truncated, gamma, gae_lambda, _ in list(gae):
        for_ever = (1 - gamma) * sum(r * gamma**k for k in range(500))
        expected = torch.where(terminated > 0, for_ever, (1 - gamma) * r)
        torch.testing.assert_close(reward, expected, rtol=1e-5, atol=1e-7)
        assert terminated.sum() > 3
        fair = torch.full_like(value, r)
        rest = (terminated, truncated, gamma, gae_lambda)
        assert gail.gae(reward, fair, fair, *rest).abs().max() < 1e-6


@pytest.mark.parametrize("kind", ["softplus", "logsigmoid"])
@pytest.mark.parametrize("action", [0, 1], ids=["stays", "ends"])
def test_G3_with_absorbing_states_the_expert_is_imitated(quit_args, tmp_path, kind, action):
    """Whatever the sign of the reward; without them, the sign decides where it is against him."""
    expert = quit_expert(tmp_path / "expert.npz", action)
    args = replace(quit_args, dataset=expert, reward_type=kind, absorbing=True)
    assert abs(chance_to_end(args) - action) < 0.2
    if (kind, action) in (("softplus", 1), ("logsigmoid", 0)):
        args = replace(args, absorbing=False, run_dir=str(tmp_path / "plain"))
        assert abs(chance_to_end(args) - (1 - action)) < 0.2


@pytest.mark.parametrize("kind", REWARDS)
def test_G3_G11_the_bias_is_told_and_nothing_is_refused(walk, tmp_path, kind, capsys):
    """Episodes of many lengths, the case that other libraries refuse: a note, and a run."""
    hints = {"softplus": "pays for every step", "logsigmoid": "charges for every step"}
    hints["logit"] = "f can pay for going on or for an end"
    args = replace(walk, reward_type=kind, quiet=False, total_timesteps=15)
    assert gail.train(args)["step"] == 15
    output = capsys.readouterr().out
    (note,) = [line for line in output.splitlines() if line.startswith("note: ")]
    assert hints[kind] in note and "--absorbing removes" in note
    gail.train(replace(args, absorbing=True, run_dir=str(tmp_path / "absorbing")))
    assert "note:" not in capsys.readouterr().out


# ---- checkpoints


def test_G12_checkpoint_holds_the_discriminator_and_the_normaliser(walk, modules):
    """Each as it was at the end, with its optimiser; what acts is in best.pt, too."""
    gail.train(replace(walk, checkpoint_interval=30))
    checkpoint, best = load(walk.run_dir), load(walk.run_dir, "best.pt")
    for name, module in modules.items():
        state = module.state_dict()
        assert_same(checkpoint[name], {key: x.detach() for key, x in state.items()}, name)
    assert {"actor", "normalizer"} <= best.keys() and "discriminator" not in best
    for name, count in (("opt", 13), ("discriminator_opt", 6)):
        assert len(checkpoint[name]["state"]) == count


@pytest.mark.parametrize("kind", ["steps", "walk"])
def test_G12_policy_of_a_checkpoint_is_the_most_likely_action(request, kind):
    """Through the normaliser of the run, in the environment's units, without noise."""
    args = replace(request.getfixturevalue(kind), learning_rate=0.02, num_epochs=8)
    gail.train(args)
    checkpoint = load(args.run_dir)
    hand = ByHand(args)
    hand.actor.load_state_dict(checkpoint["actor"])
    hand.mean, hand.std = checkpoint["normalizer"]["mean"], checkpoint["normalizer"]["std"]
    obs = np.random.default_rng(0).normal(size=(40, 2)) * [2, 3] + [0, 5]
    policy = gail.load_policy(f"{args.run_dir}/checkpoint.pt", device="cpu")
    with torch.no_grad():
        output = hand.actor.net(torch.stack([hand.normalised(hand.seen_as(x)) for x in obs]))
    if kind == "steps":
        expected = 5 + output.argmax(-1).numpy()
        assert len(set(expected)) > 1
    else:
        expected = np.clip(1 + 2 * output.numpy(), -1, 3)
        assert len(np.unique(expected)) > 5
    np.testing.assert_allclose(policy(obs), expected, rtol=1e-5, atol=1e-5)


def train_until(args, step, monkeypatch):
    """SIGTERM during a step: the run saves and stops, its schedules being those of the whole."""
    signals, count, add = [], [], gail.Buffer.add

    class Caught(gail.StopSignal):
        def __enter__(self):
            signals.append(self)
            return super().__enter__()

    def counted(self, *row):
        count.append(row)
        if len(count) * args.num_envs == step:
            signals[0].note(signal.SIGTERM, None)
        return add(self, *row)

    with monkeypatch.context() as patch:
        patch.setattr(gail, "StopSignal", Caught)
        patch.setattr(gail.Buffer, "add", counted)
        result = gail.train(args)
    assert result["step"] == step and result["signal"] == signal.SIGTERM


def log_of(args):
    """Step, key and value of every logged scalar that is not a time."""
    rows = [row.split(",") for row in Path(args.run_dir, "metrics.csv").read_text().splitlines()]
    return [(step, key, value) for step, _, key, value in rows if "_second" not in key]


RESUMED = {
    "plain": {},
    "absorbing": {"absorbing": True, "lr_schedule": "cosine", "expert_subsampling": 3},
}


@pytest.mark.parametrize("flags", RESUMED.values(), ids=RESUMED)
@pytest.mark.parametrize("kind", ["steps", "walk"])
def test_S17_S18_resume_in_the_middle_of_rollouts_and_episodes(
    request, tmp_path, monkeypatch, kind, flags
):
    """The rest of the rollout, of three episodes, and all that comes after: as if never stopped."""
    whole = replace(request.getfixturevalue(kind), total_timesteps=84, num_steps=7, **flags)
    whole = replace(whole, eval_interval=20, checkpoint_interval=25, log_interval=10)
    gail.train(whole)
    sizes, played = [], []
    for cut in (3, 18, 21, 24, 48, 63):
        args = replace(whole, run_dir=str(tmp_path / str(cut)))
        train_until(args, cut, monkeypatch)
        stopped = load(args.run_dir)
        sizes.append(len(stopped["rollout"]["obs"]))
        played.append([len(actions) for actions in stopped["episode_actions"]])
        gail.train(replace(args, resume=args.run_dir))
        assert_same(load(whole.run_dir), load(args.run_dir))
        assert log_of(whole) == log_of(args)
    assert sizes == [1, 6, 0, 1, 2, 0]
    assert any(len(set(lengths)) > 1 for lengths in played)  # each in its own time
    assert {len(x) for x in load(whole.run_dir)["rollout"].values()} == {0}


def test_S17_resume_twice_and_with_a_larger_budget(walk, tmp_path):
    """Budgets that end within a rollout: the rows so far are not lost."""
    whole = replace(walk, total_timesteps=90, num_steps=7, run_dir=str(tmp_path / "whole"))
    gail.train(whole)
    args = replace(walk, total_timesteps=30, num_steps=7)
    gail.train(args)
    assert len(load(args.run_dir)["rollout"]["obs"]) == 3
    gail.train(replace(args, total_timesteps=33, resume=args.run_dir))
    gail.train(replace(args, total_timesteps=90, resume=args.run_dir))
    left, right = load(whole.run_dir), load(args.run_dir)
    for name in left.keys() - {"args", "best_return", "evals_since_best", "log_position"}:
        assert_same(left[name], right[name], name)


def test_S18_an_environment_that_ignores_its_seed_is_not_resumed_in_silence(walk, probe_data):
    args = replace(walk, env_id="ForgetfulProbe-v0", dataset=probe_data, total_timesteps=30)
    gail.train(args)
    with pytest.raises(gail.InputError, match="plays another episode from the same seed"):
        gail.train(replace(args, resume=args.run_dir, total_timesteps=60))


def test_checkpoint_holds_the_filled_part_of_the_rollout(walk):
    """Ten thousand steps of three environments would be a megabyte."""
    gail.train(replace(walk, num_steps=4, total_timesteps=18))
    checkpoint = load(walk.run_dir)
    assert checkpoint["rollout"]["obs"].shape == (2, 3, 2)
    assert checkpoint["rollout"]["terminated"].shape == (2, 3)


# ---- intervals and logs


def steps_of(args, key="eval/return_mean"):
    return list(metrics(args, key))


def test_no_evaluation_without_an_update(walk):
    """Every 3 steps one is due, and every 15 there is a reason; the last one is at the end."""
    args = replace(walk, eval_interval=3, total_timesteps=66)
    gail.train(args)
    assert steps_of(args) == [0, 15, 30, 45, 60, 66]


@pytest.mark.parametrize("num_steps", [1, 2, 3, 7])
@pytest.mark.parametrize("interval", [1, 4, 7, 20])
def test_intervals_need_not_be_multiples_of_the_environments(walk, num_steps, interval):
    """One and the same policy is not evaluated twice; nor is one forgotten that was due."""
    args = replace(walk, num_steps=num_steps, eval_interval=interval, total_timesteps=63)
    gail.train(args)
    size, evaluated = 3 * num_steps, steps_of(args)
    assert evaluated[0] == 0 and evaluated[-1] == 63
    for before, after in itertools.pairwise(evaluated):
        assert after // size > before // size or after == 63
    for due in range(interval, 64, interval):
        before = max(step for step in evaluated if step < due)
        if due // size > before // size:  # there was an update since
            assert any(due <= step < due + max(size, 3) for step in evaluated)


def test_patience_counts_policies_not_evaluations(walk, monkeypatch):
    """One policy, evaluated twice, would not be better than itself: patience would be over."""
    by_weights = {}

    def evaluate(policy, *_):
        key = policy(np.array([[0.3, 2.0], [-1.0, 7.0]])).tobytes()
        return np.full(1, by_weights.setdefault(key, float(len(by_weights))))

    monkeypatch.setattr(common, "evaluate", evaluate)
    args = replace(walk, num_steps=3, eval_interval=7, total_timesteps=63, patience=1)
    assert gail.train(args)["step"] == 63


def test_saves_and_logs_need_not_be_multiples_of_the_environments(walk, spy):
    saves = spy("save_atomically")
    args = replace(walk, checkpoint_interval=10, log_interval=20, total_timesteps=66)
    gail.train(args)
    saved = [load for path, load, _ in saves if path.endswith("checkpoint.pt")]
    assert len(saved) == 7  # past 10, 20, 30, .., 60, and at the end
    steps = [call.args[0]["step"] for call in saved]
    assert steps == [12, 21, 30, 42, 51, 60, 66]
    assert steps_of(args, "losses/actor") == [30, 45, 60]  # rollouts that went past 20, 40, 60


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
def test_schedules_span_exactly_the_updates_of_the_run(walk, spy, schedule):
    """One factor per rollout, that of its first update, for both optimisers."""
    calls = spy("lr_factor")
    args = replace(walk, lr_schedule=schedule, warmup_updates=5, total_timesteps=66)
    gail.train(args)
    assert [call[:2] for call in calls] == [(first, 16) for first in (1, 5, 9, 13)]
    factors = {
        "constant": [0.2, 1, 1, 1],
        "linear": [0.2, 1, 8 / 11, 4 / 11],
        "cosine": [0.2, 1] + [(1 + math.cos(math.pi * x / 11)) / 2 for x in (3, 7)],
    }[schedule]
    assert [call[-1] for call in calls] == pytest.approx(factors)
    checkpoint = load(args.run_dir)
    for name, rate in (("opt", 3e-3), ("discriminator_opt", 5e-3)):
        lr = checkpoint[name]["param_groups"][0]["lr"]
        assert lr == pytest.approx(rate * factors[-1], rel=1e-6)
    logged = list(metrics(args, "charts/learning_rate").values())
    assert logged == pytest.approx([3e-3 * x for x in factors], rel=1e-5)


def test_optimisers_are_adam_with_their_own_eps(walk):
    gail.train(replace(walk, total_timesteps=15))
    checkpoint = load(walk.run_dir)
    assert checkpoint["opt"]["param_groups"][0]["eps"] == 1e-5
    assert checkpoint["discriminator_opt"]["param_groups"][0]["eps"] == 1e-8


@pytest.mark.parametrize("kind", ["steps", "walk"])
def test_logged_statistics_are_what_they_say(request, modules, spy, kind):
    """Of the last update; the reward is that of a step, what comes after an end is not in it."""
    args = replace(request.getfixturevalue(kind), learning_rate=0.03, num_epochs=4)
    args = replace(args, absorbing=True, num_steps=10)
    expert_loss, penalty, losses = spy("gail_loss"), spy("slope_penalty"), spy("ppo_loss")
    value_loss, gae = spy("regression_loss"), spy("gae")
    gail.train(args)
    expert, policy, loss = (x.double().numpy() for x in expert_loss[-1] if torch.is_tensor(x))
    log_prob, old, _, _, actor_loss = losses[-1]
    ratio = torch.exp(log_prob - old).double().numpy()
    tensors = (x.double().numpy() for x in gae[-1] if torch.is_tensor(x))
    reward, value, _, terminated, _, advantage = tensors
    returns = advantage + value
    mark = torch.eye(2 + (3 if kind == "steps" else 1) + 1)[-1:]
    end_reward = math.log(1 + math.exp(modules["discriminator"](mark).item()))
    D = 1 / (1 + np.exp(-np.concatenate([expert, policy])))
    expected = {
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
        assert metrics(args, key)[60] == pytest.approx(number, rel=1e-4, abs=1e-5), key
    own = "stats/policy_entropy" if kind == "steps" else "stats/policy_std"
    assert 0.5 < metrics(args, own)[60] < 1.5


@pytest.mark.parametrize("name", ["gail_loss", "ppo_loss", "regression_loss"])
def test_a_loss_that_is_not_finite_stops_the_run_at_once(walk, monkeypatch, name):
    """At the end of its rollout, not at the next entry in the log; and nothing is saved."""
    original, calls = getattr(gail, name), []

    def broken(*args):
        calls.append(args)
        return original(*args) * (math.nan if len(calls) > 20 else 1)

    monkeypatch.setattr(gail, name, broken)
    per_rollout = 3 if name == "gail_loss" else 4
    step = 15 * math.ceil(21 / per_rollout)
    with pytest.raises(gail.InputError, match=rf"is nan at step {step}: it diverged; lower --lea"):
        gail.train(replace(walk, log_interval=10**6, total_timesteps=300, checkpoint_interval=300))
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
                expected.append((3 * number, so_far[i]))
                so_far[i] = 0.0
    logged = [(step, value) for step, key, value in log_of(walk) if "episodic_return" in key]
    assert [int(step) for step, _ in logged] == [step for step, _ in expected]
    assert [float(x) for _, x in logged] == pytest.approx([x for _, x in expected], rel=1e-5)
    assert len(expected) > 10


def test_behaviour_return_is_that_of_the_episodes_in_use(walk, capsys):
    file = np.load(walk.dataset)
    last = np.flatnonzero(file["terminations"] | file["truncations"])[:4]
    returns = [x.sum() for x in np.split(file["rewards"], last + 1)[:4]]
    gail.train(replace(walk, num_expert_episodes=4, expert_subsampling=2, quiet=False))
    logged = metrics(walk, "stats/behaviour_return")
    assert logged == {0: pytest.approx(np.mean(returns), rel=1e-5)}
    assert "4 episodes" in capsys.readouterr().out


# ---- data


def test_auto_is_our_expert_and_nothing_else(walk, tmp_path, monkeypatch):
    """Not the data of the same environment that offline algorithms take, and not random steps."""
    monkeypatch.setattr(common, "SHIPPED", tmp_path)
    content = Path(walk.dataset).read_bytes()
    (tmp_path / "Walk-v0.npz").write_bytes(content)
    auto = replace(walk, dataset="auto", run_dir=str(tmp_path / "auto"))
    with pytest.raises(gail.InputError, match="no expert of ours for Walk-v0: give it a"):
        gail.train(auto)
    (tmp_path / "Walk-v0-expert.npz").write_bytes(content)
    gail.train(auto)
    gail.train(walk)
    for name in ("actor", "discriminator", "fingerprint"):
        assert_same(load(auto.run_dir)[name], load(walk.run_dir)[name], name)


@pytest.mark.filterwarnings("ignore:.*is set to None")  # the author's name and the like
def test_minari_reaches_the_discriminator(quit_args, tmp_path, monkeypatch, spy):
    """Two episodes, which end after 3 and 1 steps: four rows, actions 0 0 1 and 1."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    minari = pytest.importorskip("minari")
    buffers = []
    for length in (3, 1):
        buffers.append(
            minari.data_collector.EpisodeBuffer(
                observations=np.arange(length + 1, dtype=np.float32)[:, None],
                actions=np.arange(length) // (length - 1) if length > 1 else np.ones(1, int),
                rewards=np.zeros(length),
                terminations=np.arange(length) == length - 1,
                truncations=np.zeros(length, bool),
            )
        )
    minari.create_dataset_from_buffers("test/quit-v0", buffers, env=gym.make("Quit-v0"))
    draws = spy("draw_inputs")
    gail.train(replace(quit_args, dataset="minari:test/quit-v0", total_timesteps=80))
    obs, action = draws[0][1:3]
    assert obs[:, 0].tolist() == [0, 1, 2, 0]
    assert action.tolist() == [[1, 0], [1, 0], [0, 1], [0, 1]]


def test_budgets_that_cannot_be_spent_are_refused(walk):
    with pytest.raises(gail.InputError, match="total_timesteps must be a multiple of num_envs 3"):
        gail.train(replace(walk, total_timesteps=61))
    with pytest.raises(gail.InputError, match="14 is spent before the first update") as refusal:
        gail.train(replace(walk, total_timesteps=14, num_envs=1, num_steps=15))
    assert "--num-steps (15) or --num-envs (1)" in str(refusal.value)
    assert not Path(walk.run_dir).exists()


@pytest.mark.parametrize(
    ("env_id", "message"),
    [
        ("Image-v0", "observations must be vectors"),
        ("Several-v0", "actions must be vectors or discrete"),
        ("Unbounded-v0", "actions must have finite bounds"),
    ],
)
def test_other_spaces_are_refused(walk, env_id, message):
    with pytest.raises(gail.InputError, match=f"{env_id}: {message}"):
        gail.train(replace(walk, env_id=env_id))


def test_bytes_are_numbers_like_others(walk):
    """A vector of bytes is normalised as any other: next_obs must not wrap around at 256."""
    for env_id in ("Bytes-v0", "ByteChoice-v0"):
        args = replace(walk, env_id=env_id, dataset="random:60", run_dir=f"{walk.run_dir}-{env_id}")
        gail.train(args)
        mean = load(args.run_dir)["normalizer"]["mean"]
        assert mean.shape == (4,) and (mean > 80).all() and (mean < 150).all()


def test_size_of_a_checkpoint_is_what_the_docstring_says(walk):
    """At the defaults, on the environment of the default; between two rollouts."""
    args = replace(walk, env_id="CartPole-v1", dataset="random:60", hidden_dim=gail.Args.hidden_dim)
    gail.train(args)
    megabytes = Path(args.run_dir, "checkpoint.pt").stat().st_size / 1e6
    assert f"{megabytes:.1f} MB" in gail.__doc__


def test_the_command_of_the_docstring_is_the_set_of_the_paper():
    """Whatever the defaults are: the numbers of the paper and of its authors' code."""
    command = gail.__doc__.split("The paper's set")[1].split("python algos/gail.py")[1]
    command = command.split("\n\n")[0].replace("\\\n", " ")
    args = tyro.cli(gail.Args, args=shlex.split(command))
    gail.check_args(args)
    expected = {
        "env_id": "CartPole-v1",
        "hidden_dim": 100,
        "gamma": 0.995,
        "gae_lambda": 0.97,
        "batch_size": 5000,
        "discriminator_updates": 1,
        "discriminator_learning_rate": 0.01,
        "discriminator_entropy_coef": 1e-3,
        "gradient_penalty": 0.0,
        "expert_subsampling": 10,
        "reward_type": "softplus",
        "absorbing": False,
        "total_timesteps": 300 * 5000,
    }
    assert {name: getattr(args, name) for name in expected} == expected
    assert args.num_steps * args.num_envs == args.batch_size


@pytest.mark.parametrize("habit", [-0.4, 2.4])
def test_imitates_an_expert_of_continuous_actions(walk, tmp_path, habit):
    """One who always plays about the same, in a box from -1 to 3. No action is played as 1, and the
    rewards of the environment would lead there, too."""
    env, rng, rows = gym.make("Walk-v0"), np.random.default_rng(0), []
    while len(rows) < 150:
        obs, done = env.reset(seed=int(rng.integers(2**31)))[0], False
        while not done:
            action = np.array([habit + 0.2 * rng.normal()], np.float32).clip(-1, 3)
            next_obs, reward, end, cut, _ = env.step(action)
            rows.append((obs, action, reward, next_obs, end, cut))
            obs, done = next_obs, end or cut
    path = save(tmp_path / "expert.npz", rows)
    args = replace(walk, dataset=path, total_timesteps=3000, num_envs=4, num_steps=50)
    args = replace(args, batch_size=50, num_epochs=6, learning_rate=1e-2, log_interval=10**6)
    gail.train(replace(args, absorbing=True, discriminator_entropy_coef=1e-3))
    policy = gail.load_policy(f"{args.run_dir}/checkpoint.pt", device="cpu")
    obs = np.stack([np.linspace(-1, 1, 9), np.ones(9)], axis=1)
    assert np.mean(policy(obs)) == pytest.approx(habit, abs=0.7)
