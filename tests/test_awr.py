"""AWR: its returns, weights and losses by hand arithmetic, and the checklist of known bugs."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ByHand, flat, load, save_rows

import common
from algos import awr

T = torch.tensor


@pytest.fixture(scope="module")
def algo():
    return awr


def episodes(num_rows=60, seed=0):
    """Random rewards and values; episodes of random length with both kinds of end."""
    rng = np.random.default_rng(seed)
    reward, next_value = T(rng.normal(size=(2, num_rows)))
    end = rng.integers(8, size=num_rows)
    terminated, truncated = T(end == 0), T(end == 1)
    truncated[-1] = not terminated[-1]
    return reward, terminated, truncated, next_value


# ---- returns


@pytest.mark.parametrize("td_lambda", [0.0, 0.3, 0.95, 1.0])
def test_lambda_returns_are_the_average_of_n_step_returns(td_lambda):
    """The other definition, by brute force: (1 - l) sum_n l^(n-1) G_n, the rest on the longest.

    G_n = r_t + ... + gamma^(n-1) r_{t+n-1} + gamma^n V(s_{t+n}), without the V of a terminal state.
    """
    reward, terminated, truncated, next_value = episodes()
    gamma, expected = 0.9, []
    for t in range(len(reward)):
        last = next(k for k in range(t, len(reward)) if terminated[k] or truncated[k])
        n_step = []
        for n in range(1, last - t + 2):
            rewards = sum(gamma**k * reward[t + k] for k in range(n))
            alive = not terminated[t + n - 1]
            n_step.append(rewards + gamma**n * next_value[t + n - 1] * alive)
        weights = [(1 - td_lambda) * td_lambda**n for n in range(len(n_step))]
        weights[-1] = td_lambda ** (len(n_step) - 1)
        expected.append(sum(weight * value for weight, value in zip(weights, n_step)))
    actual = awr.lambda_returns(reward, terminated, truncated, next_value, gamma, td_lambda)
    torch.testing.assert_close(actual, torch.stack(expected).to(actual.dtype), rtol=1e-5, atol=1e-5)


def test_lambda_1_is_the_bootstrapped_sum_and_lambda_0_is_one_step_td():
    reward, terminated, truncated, next_value = (x.float() for x in episodes())
    ends = terminated.bool(), truncated.bool()
    finite_part, discount, last = awr.common.returns_to_go(reward, *ends, 0.9)
    one = awr.lambda_returns(reward, *ends, next_value, 0.9, 1.0)
    assert torch.equal(one, finite_part + discount * next_value[last])
    assert torch.equal(awr.lambda_returns(reward, *ends, 0 * next_value, 0.9, 1.0), finite_part)
    zero = awr.lambda_returns(reward, *ends, next_value, 0.9, 0.0)
    torch.testing.assert_close(zero, reward + 0.9 * (1 - terminated) * next_value)


def test_S3_episodes_do_not_see_each_other():
    """Two episodes in either order: the returns go with them."""
    reward, value = T([1.0, 2.0, 3.0, 4.0, 5.0]), T([6.0, 7.0, 8.0, 9.0, 10.0])
    end, cut = T([False, True, False, False, False]), T([False, False, False, False, True])
    order = [2, 3, 4, 0, 1]
    returns = awr.lambda_returns(reward, end, cut, value, 0.5, 0.5)
    moved = awr.lambda_returns(*(field[order] for field in (reward, end, cut, value)), 0.5, 0.5)
    torch.testing.assert_close(moved, returns[order])
    # by hand: the terminated row is its reward, the truncated one bootstraps, then backwards
    assert returns[1].item() == 2.0
    assert returns[0].item() == pytest.approx(1 + 0.5 * (0.5 * 6 + 0.5 * 2))
    assert returns[4].item() == pytest.approx(5 + 0.5 * 10)
    assert returns[3].item() == pytest.approx(4 + 0.5 * (0.5 * 9 + 0.5 * 10))


def make_buffer(path, gamma=0.9):
    dataset = awr.common.load_dataset(str(path), awr.common.make_env("Probe-v0"))
    return dataset, awr.Buffer(dataset, torch.device("cpu"))


def test_S2_S4_refresh_bootstraps_from_the_true_final_observation(probe_data):
    """Row by row with V(next_obs), where the buffer takes V of the next row inside an episode."""
    dataset, buffer = make_buffer(probe_data)
    value = awr.Value(1, 8, T(0.5), T(2.0))
    with torch.no_grad():
        expected = awr.lambda_returns(
            dataset.reward, dataset.terminated, dataset.truncated, value(dataset.next_obs), 0.9, 0.7
        )
    buffer.refresh(value, 0.9, 0.7)
    torch.testing.assert_close(buffer.returns, expected)
    assert not buffer.returns.requires_grad


def test_refresh_at_lambda_1_asks_V_for_final_observations_only(probe_data):
    """V(s) = s of 30 truncated episodes is all that their returns need."""
    dataset, buffer = make_buffer(probe_data)
    asked = []

    def v_of_all(obs):
        asked.append(len(obs))
        return obs[:, 0]

    buffer.refresh(SimpleNamespace(of_all=v_of_all), 0.9, 1.0)
    assert asked == [60]  # episodes; 30 of them terminate, and their V counts 0
    ends = dataset.terminated, dataset.truncated
    expected = awr.lambda_returns(dataset.reward, *ends, dataset.next_obs[:, 0], 0.9, 1.0)
    torch.testing.assert_close(buffer.returns, expected)


def test_S2_a_cut_is_worth_its_own_final_observation_not_the_next_start(tmp_path):
    """Two rows, both cut: from 3 to 5 and from 1 to 2, with V(s) = s."""
    path = save_rows(tmp_path / "d.npz", [3, 1], [0, 0], [0.5, 0.25], [5, 2], [0, 0], [1, 1])
    _, buffer = make_buffer(path)
    buffer.refresh(SimpleNamespace(of_all=lambda obs: obs[:, 0]), 0.5, 1.0)
    assert buffer.returns.tolist() == [0.5 + 0.5 * 5, 0.25 + 0.5 * 2]


def test_buffer_draws_rows_that_belong_together(probe_data):
    dataset, buffer = make_buffer(probe_data)
    buffer.returns = torch.arange(300.0)
    obs, action, returns = buffer.sample(1000, torch.Generator().manual_seed(0))
    row = returns.long()
    assert torch.equal(obs, dataset.obs[row]) and torch.equal(action, dataset.action[row])
    # i.i.d. over all rows, with replacement: about 300 (1 - e^(-1000/300)) = 289 different ones
    assert 280 < len(row.unique()) < 298


def test_V_starts_at_the_constant_that_agrees_with_its_own_bootstrap(tiny):
    """c = mean(M + D c): with V = c, the mean of all returns is c, in whatever unit rewards are."""
    awr.train(replace(tiny, reward_scale=7.0, learning_rate=1e-30))
    state = load(tiny.run_dir)["value"]
    dataset, _ = make_buffer(tiny.dataset)
    returns = awr.lambda_returns(
        7.0 * dataset.reward,
        dataset.terminated,
        dataset.truncated,
        state["mean"].expand(300),
        tiny.gamma,
        1.0,
    )
    torch.testing.assert_close(returns.mean(), state["mean"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(returns.std(), state["std"], rtol=1e-4, atol=1e-4)


# ---- losses


def test_regression_loss_by_hand():
    assert awr.regression_loss(T([1.0, 2.0]), T([4.0, 2.0])).item() == 0.5 * 9 / 2


def test_awr_loss_by_hand():
    log_prob, advantage = T([-1.0, -2.0, -3.0]), T([2.0, -1.0, 100.0])
    # exp(2 / 2), exp(-1 / 2), and the clip
    expected = (math.e * 1 + math.exp(-0.5) * 2 + 20 * 3) / 3
    assert awr.awr_loss(log_prob, advantage, 2.0, 20.0).item() == pytest.approx(expected)


def test_infinite_beta_is_behaviour_cloning_bit_for_bit(probe_data):
    """The gradient of every parameter of a real actor, with and without standardisation."""
    dataset, _ = make_buffer(probe_data)
    actor = awr.Actor(1, 1, 16, discrete=False)
    parameters = list(actor.parameters())
    for advantage in (1e6 * torch.randn(300), awr.standardize(torch.randn(300), T(3.0), T(0.1))):
        log_prob = actor(dataset.obs).log_prob(dataset.action)
        loss = awr.awr_loss(log_prob, advantage, math.inf, 20.0)
        cloning = -actor(dataset.obs).log_prob(dataset.action).mean()
        grads = torch.autograd.grad(loss, parameters), torch.autograd.grad(cloning, parameters)
        assert all(torch.equal(left, right) for left, right in zip(*grads))


def test_weights_are_monotone_positive_and_clipped():
    advantage = torch.linspace(-30, 30, 1001)
    weight = awr.awr_weight(advantage, 0.7, 20.0)
    assert (weight.diff() >= 0).all() and weight.min() > 0
    assert weight.max().item() == pytest.approx(20.0)


def test_standardised_weights_do_not_depend_on_shift_or_scale_of_the_reward():
    advantage = torch.randn(1000)

    def weight(advantage):
        mean, std = advantage.mean(), advantage.std(correction=0)
        return awr.awr_weight(awr.standardize(advantage, mean, std), 1.0, 20.0)

    torch.testing.assert_close(weight(advantage + 5), weight(advantage), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(weight(1000 * advantage), weight(advantage), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("beta", [math.inf, 3.0, 1.0, 0.5, 0.3, 0.1])
def test_weights_of_standard_normal_advantages(beta):
    """What to expect in stats/weight_mean and stats/weight_ess, in closed form:
    E min(e^(x/b), 20)^k = e^(k^2 / 2b^2) Phi(b log 20 - k/b) + 20^k (1 - Phi(b log 20)).
    For beta = 1 these are 1.64 and 0.40."""

    def phi(x):
        return 0.5 * math.erfc(-x / math.sqrt(2))

    def moment(k):
        if beta == math.inf:
            return 1.0
        clip = beta * math.log(20)
        below = math.exp(k**2 / (2 * beta**2)) * phi(clip - k / beta)
        return below + 20**k * phi(-clip)

    advantage = torch.randn(400_000, generator=torch.Generator().manual_seed(0)).double()
    weight = awr.awr_weight(advantage, beta, 20.0)
    assert weight.mean().item() == pytest.approx(moment(1), rel=0.01)
    ess = awr.effective_sample_size(weight).item()
    assert ess == pytest.approx(moment(1) ** 2 / moment(2), rel=0.02)


def test_effective_sample_size_by_hand():
    assert awr.effective_sample_size(T([3.0, 3.0, 3.0])).item() == pytest.approx(1.0)
    assert awr.effective_sample_size(T([0.0, 5.0, 0.0, 0.0])).item() == pytest.approx(0.25)
    assert awr.effective_sample_size(torch.zeros(4)).item() == 0.0


# ---- discrete actions


def test_categorical_by_hand():
    pi = awr.Categorical(T([[0.2, 0.5, 0.3], [0.7, 0.2, 0.1]]).log())
    action = T([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    assert pi.log_prob(action).tolist() == pytest.approx([math.log(0.3), math.log(0.7)])
    assert pi.greedy().tolist() == [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]
    entropies = [-sum(p * math.log(p) for p in row) for row in ([0.2, 0.5, 0.3], [0.7, 0.2, 0.1])]
    assert pi.statistics()["stats/policy_entropy"] == pytest.approx(sum(entropies) / 2)
    with pytest.raises(AssertionError):
        pi.log_prob(action[:, :2])


def test_discrete_actor_starts_uniform_and_its_probabilities_sum_to_one():
    pi = awr.Actor(3, 4, 64, discrete=True)(torch.randn(50, 3))
    torch.testing.assert_close(pi.log_probs.exp().sum(-1), torch.ones(50))
    assert (pi.log_probs.exp() - 0.25).abs().max() < 0.02


def test_cart_pole_is_learned_from_the_shipped_data(tmp_path):
    """A wide margin: the behaviour is at 184, this actor before training at 11."""
    flags = {"hidden_dim": 64, "eval_interval": 1500, "checkpoint_interval": 1500}
    args = awr.Args(env_id="CartPole-v1", total_updates=1500, run_dir=str(tmp_path / "run"))
    args = replace(args, **flags, value_warmup=300, learning_rate=1e-3, quiet=True)
    assert awr.train(args)["eval/return_mean"] > 130


# ---- checklist


def test_A1_one_beta_fits_all_rewards_only_if_advantages_are_standardised():
    """The paper's 0.05 on raw advantages of size 100 picks single rows; the code's 1.0 on
    standardised ones does not care about the size."""
    advantage = 100 * torch.randn(1000, generator=torch.Generator().manual_seed(0))
    raw = awr.awr_weight(advantage, 0.05, 20.0)
    assert ((raw < 1e-6) | (raw > 19.9)).float().mean() > 0.99
    scaled = awr.awr_weight(awr.standardize(advantage, T(0.0), T(100.0)), 1.0, 20.0)
    assert ((scaled > 0.05) & (scaled < 19.9)).float().mean() > 0.98


def test_A2_weights_come_from_advantages_not_from_returns(tiny, tmp_path):
    """A shift of all rewards moves every return, and no advantage. (Terminated episodes would end
    the shift early, so that the data here is cut instead.)"""
    rng = np.random.default_rng(0)
    obs, action, reward = rng.normal(size=(3, 201)).clip(-1, 1)
    cut = np.arange(200) % 10 == 9
    rows = obs[:-1], action[:-1], reward[:-1], obs[1:], cut & False, cut
    tiny = replace(tiny, dataset=save_rows(tmp_path / "d.npz", *rows), learning_rate=1e-3)
    awr.train(tiny)
    shifted = replace(tiny, reward_shift=1.0, run_dir=str(tmp_path / "shifted"))
    awr.train(shifted)
    actors = [flat(load(args.run_dir), ["actor"]) for args in (tiny, shifted)]
    torch.testing.assert_close(*actors, rtol=1e-3, atol=1e-3)
    means = [load(args.run_dir)["value"]["mean"].item() for args in (tiny, shifted)]
    assert means[1] - means[0] == pytest.approx(1 / (1 - tiny.gamma), rel=1e-3)


def test_A3_the_number_of_updates_is_the_budget_whatever_the_data(tiny, tmp_path):
    for num_rows in (50, 500):
        args = replace(tiny, dataset=f"random:{num_rows}", run_dir=str(tmp_path / str(num_rows)))
        assert awr.train(args)["step"] == 20
        steps = [
            state["step"].item() for state in load(args.run_dir)["value_opt"]["state"].values()
        ]
        assert set(steps) == {20.0}


def test_A4_weights_are_clipped_before_exp_can_overflow():
    weight = awr.awr_weight(T([1e6, 1e38, -1e38]), 1e-3, 20.0)
    assert weight.tolist() == pytest.approx([20.0, 20.0, 0.0])
    assert torch.isfinite(awr.awr_weight(T([80.0]), 1.0, math.inf)).all()  # no clip, if asked for


def test_A5_plain_exp_and_the_mean_over_the_batch():
    """Not a softmax: a row's weight does not depend on the other rows, nor on the batch size."""
    log_prob, advantage = torch.randn(7), torch.randn(7)
    whole = awr.awr_loss(log_prob, advantage, 1.0, 20.0)
    rows = [awr.awr_loss(log_prob[i : i + 1], advantage[i : i + 1], 1.0, 20.0) for i in range(7)]
    torch.testing.assert_close(whole, torch.stack(rows).mean())


@pytest.mark.parametrize("reward", [0.0, 0.1, -3e4])
def test_A6_equal_returns_are_cloned(tiny, tmp_path, reward):
    """All rewards are the same, in episodes of one step that terminate: every advantage is a
    rounding error, and the actor is that of behaviour cloning, with weights of 1."""
    rng = np.random.default_rng(0)
    obs, action = rng.normal(size=(2, 200)).clip(-1, 1)
    rows = obs, action, np.full(200, reward), obs, np.ones(200), np.zeros(200)
    path = save_rows(tmp_path / "d.npz", *rows)
    args = replace(tiny, dataset=path, value_warmup=100, total_updates=120, learning_rate=1e-3)
    awr.train(args)
    awr.train(replace(args, beta=math.inf, run_dir=f"{tiny.run_dir}-cloning"))
    actors = [flat(load(path), ["actor"]) for path in (tiny.run_dir, f"{tiny.run_dir}-cloning")]
    torch.testing.assert_close(*actors, rtol=0, atol=2e-3)


def test_S8_no_broadcast():
    b, column = torch.randn(6), torch.randn(6, 1)
    for wrong in (
        lambda: awr.awr_loss(column, b, 1.0, 20.0),
        lambda: awr.awr_loss(b, column, 1.0, 20.0),
        lambda: awr.awr_loss(column, column, 1.0, 20.0),
        lambda: awr.regression_loss(column, b),
        lambda: awr.regression_loss(column, column),
        lambda: awr.lambda_returns(b, b > 0, b > 0, column, 0.9, 0.9),
    ):
        with pytest.raises(AssertionError):
            wrong()


def test_S9_no_gradient_through_the_weight():
    advantage, log_prob = (torch.randn(8, requires_grad=True) for _ in range(2))
    awr.awr_loss(log_prob, advantage, 1.0, 20.0).backward()
    assert advantage.grad is None and log_prob.grad is not None


def test_S10_saturated_data_actions_are_finite(tiny):
    assert (abs(np.load(tiny.dataset)["actions"]) == 1).sum() == 20
    awr.train(replace(tiny, beta=math.inf))
    assert torch.isfinite(flat(load(tiny.run_dir))).all()


@pytest.mark.parametrize("reward_scale", [2.0**20, 2.0**-23, 2.0**-40])
def test_reward_scale_does_not_matter(tiny, tmp_path, reward_scale):
    """V's network works at scale 1, and so do the gradients of its loss; advantages are divided by
    their std. By powers of two, about 1e6, 1e-7 and 1e-12, nearly all rounding is the same."""
    awr.train(tiny)
    scaled = replace(tiny, reward_scale=reward_scale, run_dir=str(tmp_path / "scaled"))
    awr.train(scaled)
    left, right = (load(args.run_dir) for args in (tiny, scaled))
    torch.testing.assert_close(flat(left, ["actor"]), flat(right, ["actor"]), rtol=1e-4, atol=1e-5)
    for name in ("net.0.weight", "net.4.weight"):
        torch.testing.assert_close(left["value"][name], right["value"][name], rtol=1e-4, atol=1e-5)


def test_value_warmup_moves_V_alone(tiny, tmp_path):
    """After value_warmup updates and one more, Adam has stepped the actor exactly once."""
    awr.train(replace(tiny, total_updates=6, value_warmup=5))
    checkpoint = load(tiny.run_dir)
    steps = [
        {state["step"].item() for state in checkpoint[name]["state"].values()}
        for name in ("actor_opt", "value_opt")
    ]
    assert steps == [{1.0}, {6.0}]


def test_mean_and_std_are_those_of_the_V_that_the_actor_starts_with(tiny):
    """Also if the warm-up ends between two refreshes: update 6 refreshes, 1 and 8 would not do."""
    awr.train(replace(tiny, total_updates=6, value_warmup=5, refresh_interval=100))
    awr_only = load(tiny.run_dir)
    awr.train(
        replace(
            tiny, total_updates=6, value_warmup=5, refresh_interval=5, run_dir=f"{tiny.run_dir}2"
        )
    )
    for name in ("advantage_mean", "advantage_std", "returns"):
        assert torch.equal(awr_only[name], load(f"{tiny.run_dir}2")[name])


def test_an_actor_that_overflows_is_not_silent(tiny):
    with pytest.raises(
        common.InputError, match=r"losses/actor is .* diverged; lower --learning-rate"
    ):
        awr.train(replace(tiny, max_weight=math.inf, beta=1e-6, value_warmup=0, log_interval=1))


# ---- the loop against an independent implementation


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("env_id", ["Probe-v0", "Choice-v0"])
def test_loop_equals_an_independent_implementation(tiny, normalize, env_id, tmp_path):
    """Eight updates: returns that are refreshed and stay as they are in between, V first, an actor
    that waits for two of them, advantages on the scale of all data."""
    args = replace(
        tiny,
        env_id=env_id,
        total_updates=8,
        learning_rate=1e-2,
        refresh_interval=3,
        value_warmup=2,
        td_lambda=0.8,
        beta=0.6,
        max_weight=2.0,
        normalize_advantage=normalize,
    )
    hand = ByHand(awr, args, tmp_path)
    awr.train(hand.args)
    for step in range(8):
        if step % 3 == 0 or step == 2:  # 2: the actor's first
            returns = hand.returns()
            if normalize:
                torch.randperm(300, generator=hand.generator)  # all rows, in an order of no weight
            with torch.no_grad():
                everything = returns - hand.v(hand.obs)
        index = hand.draw()
        with torch.no_grad():
            advantage = returns[index] - hand.v(hand.obs[index])
        value_loss = ((hand.v(hand.obs[index]) - returns[index]) ** 2).sum() / 64
        hand.step(hand.value_opt, value_loss / hand.scale**2)
        if step < 2:
            continue
        with torch.no_grad():
            if normalize:
                advantage = (advantage - everything.mean()) / everything.std(correction=0)
            weight = torch.exp(advantage / 0.6).clamp(max=2.0)
        hand.step(hand.actor_opt, -(weight * hand.log_prob(index)).sum() / 32)

    trained = load(args.run_dir)
    hand.assert_same_networks(trained)
    torch.testing.assert_close(trained["returns"], returns, rtol=1e-4, atol=1e-4)
