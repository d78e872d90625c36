"""CRR: its losses by hand arithmetic, and the checklist of bugs that other implementations have."""

import math
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import flat, load, save_rows

import common
from algos import crr

T = torch.tensor


@pytest.fixture(scope="module")
def algo():
    return crr


# ---- losses by hand


def test_td_target_by_hand():
    reward, terminated = T([1.0, 2.0, 3.0]), T([0.0, 1.0, 0.0])
    next_q = T([[10.0, 10.0, -4.0], [8.0, 20.0, 5.0]])[:, None]  # [C, 1, B]
    # 1 + 0.5 * min(10, 8); a terminated row is its reward; 3 + 0.5 * min(-4, 5)
    target = crr.td_target(reward, terminated, next_q, torch.ones(1, 3), 0.5)
    assert target.tolist() == [5.0, 2.0, 1.0]


def test_td_loss_by_hand():
    q = T([[1.0, 2.0], [3.0, 5.0]])
    target = T([0.0, 2.0])
    # critic 1: (1 + 0) / 2, critic 2: (9 + 9) / 2
    assert crr.td_loss(q, target).item() == pytest.approx(0.5 + 9.0)


def test_C5_advantage_and_weight_table():
    q, q_samples = T([1.0, 2.0, 3.0]), T([[0.0, 2.0, 5.0], [1.0, 2.0, 3.0]])
    prob = torch.full((2, 3), 0.5)
    mean = crr.crr_advantage(q, q_samples, prob, "mean")
    top = crr.crr_advantage(q, q_samples, prob, "max")
    assert mean.tolist() == [0.5, 0.0, -1.0]
    assert top.tolist() == [0.0, 0.0, -2.0]
    assert crr.crr_weight(mean, "binary", 1.0, 20.0).tolist() == [1.0, 0.0, 0.0]  # A = 0 is not > 0
    assert crr.crr_weight(top, "binary", 1.0, 20.0).tolist() == [0.0, 0.0, 0.0]
    for advantage in (mean, top):
        expected = [math.exp(a / 0.5) for a in advantage.tolist()]
        weight = crr.crr_weight(advantage, "exp", 0.5, 20.0)
        assert weight.tolist() == pytest.approx(expected, rel=1e-6)


def test_exp_weight_is_clipped_and_never_overflows():
    weight = crr.crr_weight(T([1e6, math.log(20.0), 1.0, -1e6]), "exp", 1.0, 20.0)
    assert weight.tolist() == pytest.approx([20.0, 20.0, math.e, 0.0], rel=1e-6)


def test_max_baseline_is_never_below_mean_and_equal_for_one_sample():
    q, q_samples, prob = torch.randn(100), torch.randn(4, 100), torch.full((4, 100), 0.25)
    top, mean = (crr.crr_advantage(q, q_samples, prob, kind) for kind in ("max", "mean"))
    assert (top <= mean).all() and (top < mean).any()
    one = (q, q_samples[:1], torch.ones(1, 100))
    assert torch.equal(crr.crr_advantage(*one, "max"), crr.crr_advantage(*one, "mean"))


def test_crr_loss_by_hand():
    log_prob, advantage = T([-1.0, -2.0, -3.0, -4.0]), T([1.0, -1.0, 2.0, 0.0])
    # rows 0 and 2 count, the mean is over all four rows
    assert crr.crr_loss(log_prob, advantage, "binary", 1.0, 20.0).item() == 1.0
    expected = (math.e * 1 + math.exp(-1) * 2 + math.exp(2) * 3 + 1 * 4) / 4
    assert crr.crr_loss(log_prob, advantage, "exp", 1.0, 20.0).item() == pytest.approx(expected)


def test_fraction_of_positive_max_advantages_is_one_in_m_plus_one():
    """If data and policy are the same distribution, the data action is best with chance 1/(m+1)."""
    q = torch.randn(5, 200_000, generator=torch.Generator().manual_seed(0))
    advantage = crr.crr_advantage(q[0], q[1:], torch.full((4, 200_000), 0.25), "max")
    weight = crr.crr_weight(advantage, "binary", 1.0, 20.0)
    assert weight.mean().item() == pytest.approx(1 / 5, abs=0.005)


@pytest.mark.parametrize(("weight_type", "bc"), [("binary", 0.0), ("exp", 1.0)])
def test_indifferent_critic_gives_no_gradient_or_that_of_cloning(weight_type, bc):
    log_prob = torch.randn(8, requires_grad=True)
    crr.crr_loss(log_prob, torch.zeros(8), weight_type, 1.0, 20.0).backward()
    assert torch.equal(log_prob.grad, torch.full((8,), -bc / 8))


def test_infinite_beta_is_behaviour_cloning_bit_for_bit():
    log_prob = torch.randn(8, requires_grad=True)
    crr.crr_loss(log_prob, 1e6 * torch.randn(8), "exp", math.inf, 20.0).backward()
    assert torch.equal(log_prob.grad, torch.full((8,), -1 / 8))


def test_update_target_by_hand():
    network, target = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    with torch.no_grad():
        network.weight.fill_(3.0), network.bias.fill_(-1.0)
        target.weight.fill_(1.0), target.bias.fill_(1.0)
    crr.update_target(target, network, 0.25)
    assert (target.weight.item(), target.bias.item()) == (1.5, 0.5)
    assert (network.weight.item(), network.bias.item()) == (3.0, -1.0)
    crr.update_target(target, network, 1.0)
    assert torch.equal(target.weight, network.weight)


# ---- the tanh-Gaussian


def test_S11_density_integrates_to_one():
    """The Jacobian of tanh, its sign and its place: any mistake shows in the integral."""
    action = torch.linspace(-0.999, 0.999, 200_001, dtype=torch.float64)[:, None]
    for mean, log_std in ((0.0, -0.5), (0.7, -1.0), (-1.0, -2.0)):
        pi = crr.TanhGaussian(torch.full_like(action, mean), torch.full_like(action, log_std))
        density = pi.log_prob(action).exp()
        assert torch.trapezoid(density, action[:, 0]).item() == pytest.approx(1.0, abs=1e-3)


def test_log_prob_matches_torch_distributions_in_float64():
    generator = torch.Generator().manual_seed(0)
    mean, log_std, u = torch.randn(3, 50, 4, generator=generator, dtype=torch.float64)
    u = u.clamp(-3, 3)  # tanh(3) = 0.995: what is closer to 1 is clipped
    base = torch.distributions.Normal(mean, log_std.exp())
    tanh = torch.distributions.TransformedDistribution(
        base, torch.distributions.TanhTransform(cache_size=1)
    )
    expected = tanh.log_prob(torch.tanh(u)).sum(-1)
    pi = crr.TanhGaussian(mean, log_std)
    torch.testing.assert_close(pi.log_prob(torch.tanh(u)), expected, rtol=1e-6, atol=1e-6)
    pi = crr.TanhGaussian(mean.float(), log_std.float())
    actual = pi.log_prob(torch.tanh(u.float())).double()
    torch.testing.assert_close(actual, expected, rtol=2e-3, atol=2e-3)  # atanh near 1 in float32


def test_S10_saturated_data_actions_are_finite(tiny):
    """Pendulum and MuJoCo data are full of actions at +-1, where atanh is infinite."""
    assert (abs(np.load(tiny.dataset)["actions"]) == 1).sum() == 20
    crr.train(replace(tiny, weight_type="exp", beta=math.inf))  # every row counts
    assert torch.isfinite(flat(load(tiny.run_dir))).all()


def test_C3_sampled_actions_stay_inside_the_box():
    mean, log_std = 5 * torch.randn(100, 3), torch.full((100, 3), 2.0)
    pi = crr.TanhGaussian(mean, log_std)
    samples, _ = crr.candidate_actions(pi, 50, torch.Generator().manual_seed(0))
    assert samples.shape == (50, 100, 3) and samples.abs().max() <= 1


def test_samples_have_the_right_distribution():
    mean, log_std = T([[0.3, -1.0]]), T([[-1.0, 0.5]])
    pi = crr.TanhGaussian(mean, log_std)
    samples, _ = crr.candidate_actions(pi, 200_000, torch.Generator().manual_seed(0))
    u = torch.atanh(samples[:, 0].double().clamp(-1 + 1e-9, 1 - 1e-9))
    assert u.mean(0).tolist() == pytest.approx([0.3, -1.0], abs=0.01)
    assert u.std(0).tolist() == pytest.approx([math.exp(-1.0), math.exp(0.5)], rel=0.01)


def test_log_std_stays_in_its_bounds_with_a_gradient_at_both():
    actor = crr.Actor(2, 1, 8, discrete=False)
    for push, bound in ((3.0, 2.0), (-3.0, -5.0)):
        with torch.no_grad():
            actor.net[-1].weight.zero_()
            actor.net[-1].bias.fill_(push)
        _, log_std = actor(torch.randn(4, 2))
        actor.zero_grad()
        log_std.sum().backward()
        assert log_std[:, 0].tolist() == pytest.approx([bound] * 4, abs=0.05)
        assert actor.net[-1].bias.grad[1] > 0


# ---- networks


def test_actor_starts_in_the_middle_of_the_box_with_the_same_std_everywhere():
    mean, log_std = crr.Actor(3, 2, 64, discrete=False)(torch.randn(100, 3))
    assert mean.abs().max() < 0.05 and (log_std + 1.5).abs().max() < 0.2  # the middle of [-5, 2]


def test_critics_are_independent_networks():
    critic = crr.TwinCritic(3, 2, 16)
    q = critic(torch.randn(5, 3), torch.randn(5, 2))
    assert q.shape == (2, 5) and not torch.equal(q[0], q[1])
    q[0].sum().backward()
    grads = [parameter.grad for parameter in critic.members[1].parameters()]
    assert all(grad is None or not grad.any() for grad in grads)


def test_each_sampled_action_is_paired_with_its_own_state():
    """repeat against repeat_interleave: a mistake here gives states the actions of others."""
    critic = crr.TwinCritic(1, 1, 1)

    class Readable(torch.nn.Module):  # 1000 s + a
        def forward(self, x):
            return (1000 * x[..., :1] + x[..., 1:]).float()

    critic.members = torch.nn.ModuleList([Readable(), Readable()])
    obs = torch.arange(5.0)[:, None]  # [B, 1]
    action = T([[1.0], [2.0], [3.0]]).expand(3, 5)[..., None] / 10  # [M, B, 1]
    expected = 1000 * torch.arange(5.0)[None, :] + T([0.1, 0.2, 0.3])[:, None]  # [M, B]
    torch.testing.assert_close(critic(obs, action)[0], expected)


# ---- checklist


def test_S8_no_broadcast():
    """[B] times [B, 1] is [B, B]: the mean of that is cloning, silently."""
    log_prob, advantage = torch.randn(6), torch.randn(6)
    next_q = torch.randn(2, 3, 6), torch.randn(3, 6)
    for wrong in (
        lambda: crr.crr_loss(log_prob[:, None], advantage, "exp", 1.0, 20.0),
        lambda: crr.crr_loss(log_prob, advantage[:, None], "exp", 1.0, 20.0),
        lambda: crr.crr_loss(log_prob[:, None], advantage[:, None], "exp", 1.0, 20.0),
        lambda: crr.td_target(log_prob[:, None], log_prob, *next_q, 0.9),
        lambda: crr.td_target(log_prob, log_prob[:, None], *next_q, 0.9),
        lambda: crr.td_target(log_prob, log_prob, next_q[0][..., None], next_q[1], 0.9),
        lambda: crr.td_target(log_prob, log_prob, next_q[0], next_q[1].T, 0.9),
        lambda: crr.td_loss(torch.randn(2, 6), log_prob[:, None]),
        lambda: crr.crr_advantage(log_prob[:, None], *[torch.randn(4, 6)] * 2, "mean"),
        lambda: crr.crr_advantage(log_prob, torch.randn(4, 6), torch.randn(4), "mean"),
        lambda: crr.TanhGaussian(torch.randn(6, 1), torch.randn(6, 1)).log_prob(torch.rand(6)),
    ):
        with pytest.raises(AssertionError):
            wrong()


def test_C1_weights_stay_with_their_rows():
    log_prob = T([-1.0, -2.0, -3.0])
    loss = crr.crr_loss(log_prob, T([1.0, -1.0, -1.0]), "binary", 1.0, 20.0)
    permuted = crr.crr_loss(log_prob, T([-1.0, -1.0, 1.0]), "binary", 1.0, 20.0)
    assert (loss.item(), permuted.item()) == (pytest.approx(1 / 3), pytest.approx(1.0))


def test_S8_loss_of_a_batch_is_the_mean_of_its_rows():
    log_prob, advantage = torch.randn(7), torch.randn(7)
    rows = [
        crr.crr_loss(log_prob[i : i + 1], advantage[i : i + 1], "exp", 1.0, 20.0) for i in range(7)
    ]
    whole = crr.crr_loss(log_prob, advantage, "exp", 1.0, 20.0)
    torch.testing.assert_close(whole, torch.stack(rows).mean())


def test_C2_S9_no_gradient_through_the_weight():
    advantage = torch.randn(8, requires_grad=True)
    log_prob = torch.randn(8, requires_grad=True)
    crr.crr_loss(log_prob, advantage, "exp", 1.0, 20.0).backward()
    assert advantage.grad is None and log_prob.grad is not None


def test_C9_all_zero_batch_gives_zero_gradient_and_is_logged(tiny):
    log_prob = torch.randn(8, requires_grad=True)
    crr.crr_loss(log_prob, -torch.ones(8), "binary", 1.0, 20.0).backward()
    assert not log_prob.grad.any()  # and no division by the sum of weights: no NaN
    crr.train(tiny)
    with open(f"{tiny.run_dir}/metrics.csv") as file:
        rows = [line.strip().split(",") for line in file]
    values = {(step, key): float(value) for step, _, key, value in rows[1:]}
    for step in ("5", "10", "15", "20"):  # binary: the mean weight is the fraction that is cloned
        fraction = values[step, "stats/advantage_positive"]
        assert 0 < fraction < 1 and values[step, "stats/weight_mean"] == fraction
        assert values[step, "stats/q_max"] > values[step, "stats/q_mean"]


def test_C8_evaluation_is_deterministic_by_default(tiny):
    crr.train(tiny)
    obs = np.random.default_rng(0).normal(size=(5, 1)).astype(np.float32)
    policy = crr.load_policy(f"{tiny.run_dir}/checkpoint.pt")
    assert np.array_equal(policy(obs), policy(obs))
    cwp = crr.load_policy(f"{tiny.run_dir}/checkpoint.pt", num_cwp_samples=10)
    assert not np.array_equal(cwp(obs), cwp(obs))  # CWP draws


def test_cwp_draws_with_softmax_of_q_over_beta(tiny):
    """Two candidate actions with known values: the better one is drawn in the right proportion."""
    actor, critic = crr.Actor(1, 1, 8, discrete=False), crr.TwinCritic(1, 1, 8)

    class Sign(torch.nn.Module):  # Q = +1 for a > 0, -1 for a < 0
        def forward(self, x):
            return x[..., 1:].sign()

    critic.members = torch.nn.ModuleList([Sign(), Sign()])
    space = crr.common.make_env("Probe-v0").action_space
    args = replace(tiny, num_cwp_samples=2, beta=2.0)
    policy = crr.make_policy(actor, critic, torch.zeros(1), torch.ones(1), space, args)
    positive = (policy(np.zeros((100_000, 1), np.float32)) > 0).mean()
    # both candidates are positive with 1/4, one of them with 1/2: then softmax([1, -1] / 2) decides
    expected = 0.25 + 0.5 / (1 + math.exp(-2 / 2.0))
    assert positive == pytest.approx(expected, abs=0.01)


# ---- discrete actions


def categorical(*probs):
    return crr.Categorical(T(probs).log())


def test_C6_discrete_actions_are_summed_over_not_sampled():
    """sum_a pi(a|s) f(a) in closed form, whatever the number of samples and the generator."""
    pi = categorical([0.2, 0.5, 0.3], [1.0, 0.0, 0.0])
    for num_samples in (1, 7):
        action, prob = crr.candidate_actions(pi, num_samples, torch.Generator())
        assert action.shape == (3, 2, 3) and prob.shape == (3, 2)
        assert action[:, 0].tolist() == action[:, 1].tolist() == torch.eye(3).tolist()
        torch.testing.assert_close(prob, T([[0.2, 1.0], [0.5, 0.0], [0.3, 0.0]]))
    q = T([1.0, 1.0])
    q_candidates = T([[10.0, 4.0], [20.0, 5.0], [-30.0, 6.0]])  # [A, B]
    mean = crr.crr_advantage(q, q_candidates, prob, "mean")
    assert mean.tolist() == pytest.approx([1 - (2 + 10 - 9), 1 - 4])
    assert crr.crr_advantage(q, q_candidates, prob, "max").tolist() == [-19.0, -5.0]
    # min over the two critics first, then the expectation
    next_q = torch.stack([q_candidates, T([[0.0, 9.0], [30.0, 9.0], [0.0, 9.0]])])  # [C, A, B]
    target = crr.td_target(T([1.0, 2.0]), T([0.0, 0.0]), next_q, prob, 0.5)
    assert target.tolist() == pytest.approx([1 + 0.5 * (0 + 10 - 9), 2 + 0.5 * 4])


def test_max_baseline_of_discrete_actions_is_sampled_from_the_policy():
    """An action that the policy never takes is no baseline, however good the critic finds it."""
    pi = categorical([1.0, 0.0, 0.0], [0.5, 0.5, 0.0])
    action, prob = crr.candidate_actions(pi, 50, torch.Generator().manual_seed(0), exact=False)
    assert action.shape == (50, 2, 3) and prob.tolist() == [[pytest.approx(1 / 50)] * 2] * 50
    assert action[:, 0].tolist() == [[1, 0, 0]] * 50
    taken = action[:, 1].sum(0)
    assert taken[2] == 0 and taken[0] + taken[1] == 50 and min(taken[0], taken[1]) > 9
    q_of = T([[1.0, 9.0, 99.0], [1.0, 9.0, 99.0]])  # [B, A]
    q_candidates = (action * q_of).sum(-1)  # [M, B]
    # row 0: all samples are action 0, of value 1; row 1: the best that is ever taken has 9
    assert crr.crr_advantage(T([5.0, 5.0]), q_candidates, prob, "max").tolist() == [4.0, -4.0]


def test_best_action_is_cloned_if_the_policy_misses_it():
    """Q = (0, 1), the data action is the better one, and the policy takes it with p = 0.3: then
    A = 1 - max_j Q(s, a_j) > 0 if and only if none of the M = 4 samples takes it: (1 - 0.3)^4."""
    pi = crr.Categorical(T([0.7, 0.3]).log().expand(100_000, 2))
    action, prob = crr.candidate_actions(pi, 4, torch.Generator().manual_seed(0), exact=False)
    advantage = crr.crr_advantage(torch.ones(100_000), action[..., 1], prob, "max")
    weight = crr.crr_weight(advantage, "binary", 1.0, 20.0)
    assert weight.mean().item() == pytest.approx(0.7**4, abs=0.005)


def test_max_and_binary_learn_with_discrete_actions(tiny, tmp_path):
    """One state, episodes of one step, three actions with rewards 0, 1 and 0.5 as often: once the
    critic knows, every row of the best action is cloned until the policy takes it by itself."""
    action = np.arange(300) % 3
    path = save_rows(tmp_path / "d.npz", *[np.zeros(300)] * 4, np.ones(300), np.zeros(300))
    file = dict(np.load(path)) | {"actions": action + 5}
    file["rewards"] = np.array([0.0, 1.0, 0.5], np.float32)[action]
    np.savez(path, **file)
    flags = {"env_id": "Choice-v0", "dataset": path, "reward_scale": 1.0, "learning_rate": 1e-2}
    flags |= {"advantage_type": "max", "weight_type": "binary", "total_updates": 300}
    crr.train(replace(tiny, **flags, eval_interval=300, log_interval=300))
    actor = crr.Actor(1, 3, 16, discrete=True)
    actor.load_state_dict(load(tiny.run_dir)["actor"])
    assert actor(torch.zeros(1, 1)).log_probs.exp()[0, 1] > 0.8


def test_discrete_candidates_follow_the_policy():
    """Shares of 20,000 draws are the probabilities, within five standard deviations; and what has
    diverged is reported by its loss, not by the draw."""
    prob = T([[0.1, 0.2, 0.7], [0.0, 1.0, 0.0]])
    generator = torch.Generator().manual_seed(0)
    action, weight = crr.candidate_actions(
        crr.Categorical(prob.log()), 20_000, generator, exact=False
    )
    torch.testing.assert_close(action.mean(dim=0), prob, rtol=0, atol=5 * (0.25 / 20_000) ** 0.5)
    assert weight.unique().tolist() == [pytest.approx(1 / 20_000)]
    crr.candidate_actions(crr.Categorical(prob * torch.nan), 2, generator, exact=False)


def test_continuous_candidates_are_samples_of_equal_weight():
    pi = crr.TanhGaussian(torch.randn(5, 2), torch.randn(5, 2))
    action, prob = crr.candidate_actions(pi, 3, torch.Generator().manual_seed(0))
    noise = torch.randn(3, 5, 2, generator=torch.Generator().manual_seed(0))
    expected = torch.tanh(pi.mean + pi.log_std.exp() * noise)
    assert torch.equal(action, expected) and prob.tolist() == [[pytest.approx(1 / 3)] * 5] * 3


def test_cwp_of_discrete_actions_is_exact(tiny):
    """P(a|s) ~ pi(a|s) exp(Q(s, a) / beta): here (0.5 e^1, 0.25 e^2, 0.25 e^0), normalised."""
    actor, critic = crr.Actor(1, 3, 8, discrete=True), crr.TwinCritic(1, 3, 8)
    with torch.no_grad():
        actor.net[-1].weight.zero_()
        actor.net[-1].bias.copy_(T([0.5, 0.25, 0.25]).log())

    class Table(torch.nn.Module):
        def forward(self, x):
            return x[..., 1:] @ T([[2.0], [4.0], [0.0]])

    critic.members = torch.nn.ModuleList([Table(), Table()])
    space = crr.common.make_env("Choice-v0").action_space
    args = replace(tiny, num_cwp_samples=1, beta=2.0)
    policy = crr.make_policy(actor, critic, torch.zeros(1), torch.ones(1), space, args)
    action = policy(np.zeros((100_000, 1), np.float32))
    odds = np.array([0.5 * math.e, 0.25 * math.e**2, 0.25])
    drawn = [(action == a).mean() for a in (5, 6, 7)]
    assert drawn == pytest.approx(odds / odds.sum(), abs=0.01)


# ---- flags


@pytest.mark.parametrize(("name", "value"), [("beta", 0.1), ("max_weight", 1.01)])
def test_flags_of_exp_weights(name, value, tiny, tmp_path):
    """exp(A / beta) with beta = 0.01, so that the clip is reached on this small problem, too."""
    tiny = replace(tiny, weight_type="exp", beta=0.01)
    crr.train(tiny)
    changed = replace(tiny, run_dir=str(tmp_path / "changed"), **{name: value})
    crr.train(changed)
    assert not torch.equal(flat(load(tiny.run_dir)), flat(load(changed.run_dir)))


def test_cwp_and_its_temperature_can_be_chosen_at_evaluation(tiny):
    crr.train(tiny)
    cwp = {"evaluate": f"{tiny.run_dir}/best.pt", "num_cwp_samples": 9, "eval_episodes": 5}
    returns = [
        crr.evaluate_checkpoint(replace(tiny, **cwp, beta=beta))["eval/return_mean"]
        for beta in (1000, 0.0001)
    ]
    greedy = crr.evaluate_checkpoint(replace(tiny, evaluate=cwp["evaluate"], eval_episodes=5))
    assert len({*returns, greedy["eval/return_mean"]}) == 3


# ---- the loop against an independent implementation


@pytest.mark.parametrize("advantage_type", ["mean", "max"])
@pytest.mark.parametrize("weight_type", ["binary", "exp"])
def test_C4_C7_loop_equals_an_independent_implementation(tiny, advantage_type, weight_type):
    """Six updates, written once more with torch.distributions, one member and one sample at a time.

    Any wiring mistake shows: online for target networks, s for s', a minimum where a mean belongs,
    a term too many (C7), an update in the wrong order, a mask of the wrong flag.
    """
    args = replace(
        tiny,
        total_updates=6,
        learning_rate=1e-2,  # large enough that a target network is not its online twin
        target_interval=2,
        tau=0.3,
        num_action_samples=3,
        advantage_type=advantage_type,
        weight_type=weight_type,
        beta=0.7,
        max_weight=1.5,
    )
    crr.train(args)
    trained = load(args.run_dir)

    file = np.load(args.dataset)
    obs, action, reward, next_obs = (
        T(file[name]) for name in ("observations", "actions", "rewards", "next_observations")
    )
    mean, std = obs.mean(0), obs.std(0) + 1e-3
    obs, next_obs, reward = (obs - mean) / std, (next_obs - mean) / std, 0.1 * reward
    terminated = T(file["terminations"])
    torch.manual_seed(args.seed)
    actor, critic = crr.Actor(1, 1, 16, discrete=False), crr.TwinCritic(1, 1, 16)
    old_actor, old_critic = deepcopy(actor), deepcopy(critic)
    actor_opt = torch.optim.Adam(actor.parameters(), 1e-2)
    critic_opt = torch.optim.Adam(critic.parameters(), 1e-2)
    generator = torch.Generator().manual_seed(common.second_seed(args.seed))

    def distribution(network, s):
        mean, log_std = network(s)
        return torch.distributions.Normal(mean, log_std.exp())

    for step in range(1, 7):
        index = torch.randint(300, (32,), generator=generator)
        s, a, r, s2, end = (x[index] for x in (obs, action, reward, next_obs, terminated))
        noise = torch.randn(1, 32, 1, generator=generator)[0]
        with torch.no_grad():
            pi = distribution(old_actor, s2)
            x = torch.cat([s2, torch.tanh(pi.mean + pi.stddev * noise)], 1)
            values = [member(x)[:, 0] for member in old_critic.members]
            smaller = torch.where(values[0] < values[1], values[0], values[1])
            y = torch.where(end, r, r + args.gamma * smaller)
        x = torch.cat([s, a], 1)
        loss = sum(((member(x)[:, 0] - y) ** 2).sum() / 32 for member in critic.members)
        critic_opt.zero_grad()
        loss.backward()
        critic_opt.step()

        noise = torch.randn(3, 32, 1, generator=generator)
        pi = distribution(actor, s)
        with torch.no_grad():
            q = 0.5 * sum(member(x)[:, 0] for member in critic.members)
            samples = [torch.tanh(pi.mean + pi.stddev * n) for n in noise]
            sampled = [
                0.5 * sum(member(torch.cat([s, sample], 1))[:, 0] for member in critic.members)
                for sample in samples
            ]
            if advantage_type == "mean":
                advantage = q - sum(sampled) / 3
            else:
                advantage = q - torch.maximum(torch.maximum(sampled[0], sampled[1]), sampled[2])
            if weight_type == "binary":
                weight = torch.where(advantage > 0, 1.0, 0.0)
            else:
                weight = torch.exp(advantage / 0.7).clamp(max=1.5)
        clipped = a.clamp(-0.999, 0.999)
        log_prob = (pi.log_prob(torch.atanh(clipped)) - torch.log(1 - clipped**2))[:, 0]
        actor_opt.zero_grad()
        (-(weight * log_prob).sum() / 32).backward()
        actor_opt.step()
        if step % 2 == 0:
            with torch.no_grad():
                for old, new in ((old_actor, actor), (old_critic, critic)):
                    for p_old, p_new in zip(old.parameters(), new.parameters()):
                        p_old.copy_(0.7 * p_old + 0.3 * p_new)

    expected = flat(
        {
            "actor": actor.state_dict(),
            "critic": critic.state_dict(),
            "target_actor": old_actor.state_dict(),
            "target_critic": old_critic.state_dict(),
        }
    )
    torch.testing.assert_close(flat(trained), expected, rtol=1e-4, atol=2e-6)
