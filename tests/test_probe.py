"""Problems whose answer is known by hand. They catch what unit tests of losses cannot: s for s', a
target that never moves, a flag that masks what it should not, the sign of an advantage."""

from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ALGOS, CLONING, OFFLINE, WITH_REWARDS, budget, load, save_rows


def values(algo, args, obs, action):
    """V(s), or the mean of all Q(s, a), of a finished run, at raw observations."""
    checkpoint = load(args.run_dir)
    obs = torch.tensor(obs, dtype=torch.float32)[:, None]
    if algo.ALGO in OFFLINE:
        obs = (obs - checkpoint["obs_mean"]) / checkpoint["obs_std"]
    with torch.no_grad():
        if algo.ALGO in ("rlpd", "mbpo"):
            sizes = (1, 1, [args.hidden_dim] * 2, args.critic_layer_norm)
            if algo.ALGO == "rlpd":
                critic = algo.EnsembleCritic(args.num_critics, *sizes)
            else:
                critic = algo.TwoCritics(*sizes)
            critic.load_state_dict(checkpoint["critic"])
            return critic(obs, torch.tensor(action, dtype=torch.float32)[:, None]).mean(0).tolist()
        if algo.ALGO == "crr":
            critic = algo.TwinCritic(1, 1, args.hidden_dim)
            critic.load_state_dict(checkpoint["critic"])
            return critic(obs, torch.tensor(action, dtype=torch.float32)[:, None]).mean(0).tolist()
        value = algo.Value(1, args.hidden_dim, torch.zeros(()), torch.ones(()))
        value.load_state_dict(checkpoint["value"])
        return value(obs).tolist()


def greedy_action(algo, args, obs=0.0):
    policy = algo.load_policy(f"{args.run_dir}/checkpoint.pt")
    return policy(np.array([[obs]], np.float32)).item()


@pytest.fixture
def probe_args(algo, tiny):
    """RLPD sees the data alone here: its own steps are another problem."""
    own = {
        "awr": {"refresh_interval": 50, "value_warmup": 200},
        "marwil": {"refresh_interval": 50},
        "crr": {"tau": 0.05},
        "rlpd": {"tau": 0.05, "offline_batch_ratio": 1.0, "alpha": 0.0, "learning_starts": 0}
        | {"gradient_updates_per_step": 1},
        # half of it real, and some entropy: else imagined steps soon are all of one action
        "mbpo": {"tau": 0.05, "alpha": 0.05, "learning_starts": 100, "real_ratio": 0.5}
        | {"model_train_interval": 100, "max_model_updates": 200, "retain_steps": 100}
        | {"model_hidden_dim": 32, "rollout_batch_size": 2_000, "max_rollout_length": 1},
        "fqf": {"learning_starts": 100, "target_interval": 20, "num_fractions": 8}
        # a Huber loss of a large kappa rounds quantiles off
        | {"fraction_learning_rate": 1e-3, "epsilon_final": 0.5, "kappa": 0.1},
        "gail": {"num_envs": 4, "num_steps": 20, "gradient_penalty": 1.0}
        | {"discriminator_updates": 8, "discriminator_learning_rate": 3e-3},
    }
    scale = {"reward_scale": 1.0} if algo.ALGO in WITH_REWARDS else {}
    return replace(
        tiny,
        **scale,
        hidden_dim=32,
        batch_size=64,
        **budget(algo, 800),
        eval_interval=1000,
        learning_rate=3e-3,
        log_interval=1000,
        **own[algo.ALGO],
    )


@pytest.mark.parametrize("length", [2, 7, 10])
@pytest.mark.parametrize("algo", WITH_REWARDS, indirect=True)
def test_S1_truncation_bootstraps(algo, probe_args, tmp_path, length):
    """0 -> 1 -> 0 -> ..., leaving 1 pays 1, cut every few steps, gamma 0.9. The cuts are no ends:
    V(0) = 0.9 V(1) and V(1) = 1 + 0.9 V(0), that is 4.737 and 5.263.

    Treating a cut as an end gives values of 0 to 4, bootstrapping from the wrong state swaps them.
    """
    obs = np.arange(length * 70) % 2
    action = np.random.default_rng(0).uniform(-1, 1, len(obs))
    cut = np.arange(len(obs)) % length == length - 1
    path = save_rows(tmp_path / "d.npz", obs, action, obs, 1 - obs, cut & False, cut)
    args = replace(probe_args, dataset=path, gamma=0.9)
    algo.train(args)
    expected = np.array([0.9, 1.0]) / (1 - 0.9**2)
    assert values(algo, args, [0, 1], [0.5, -0.5]) == pytest.approx(expected, abs=0.15)


@pytest.mark.parametrize("algo", WITH_REWARDS, indirect=True)
def test_termination_does_not_bootstrap(algo, probe_args, tmp_path):
    """The same with true ends on every step: the value is the reward."""
    obs = np.arange(500) % 2
    action, end = np.random.default_rng(0).uniform(-1, 1, 500), np.ones(500, bool)
    path = save_rows(tmp_path / "d.npz", obs, action, obs, 1 - obs, end, end & False)
    args = replace(probe_args, dataset=path, gamma=0.9)
    algo.train(args)
    assert values(algo, args, [0, 1], [0.5, -0.5]) == pytest.approx([0, 1], abs=0.05)


WEIGHT_TYPES = [("crr", {"weight_type": "binary"}), ("crr", {"weight_type": "exp", "beta": 0.2})]


@pytest.mark.parametrize(("algo", "flags"), [*WEIGHT_TYPES, ("rlpd", {})], indirect=["algo"])
def test_two_step_mdp_with_known_q(algo, probe_args, tmp_path, flags):
    """s = 0 leads to s = 1 for nothing; there, a > 0 pays 1, all else 0, and it ends.

    Q(1, a) = 1[a > 0]. The policy learns to take a > 0 there, so that Q(0, .) tends to gamma * 1,
    where cloning the data would leave it at gamma / 2.
    """
    rng = np.random.default_rng(0)
    obs = np.tile([0.0, 1.0], 500)
    action = rng.uniform(-1, 1, 1000)
    reward = np.where(obs == 1, (action > 0).astype(float), 0.0)
    end = obs == 1
    path = save_rows(tmp_path / "d.npz", obs, action, reward, obs + 1, end, end & False)
    args = replace(probe_args, dataset=path, gamma=0.8, **flags)
    algo.train(args)
    assert values(algo, args, [1.0, 1.0], [-0.5, 0.5]) == pytest.approx([0, 1], abs=0.1)
    assert values(algo, args, [0.0, 0.0], [-0.5, 0.5]) == pytest.approx([0.8, 0.8], abs=0.1)
    assert greedy_action(algo, args, 1.0) > 0.2


@pytest.mark.parametrize("algo", ["crr"], indirect=True)
def test_discrete_two_step_mdp_with_known_q(algo, probe_args, tmp_path):
    """The same with the actions 5, 6 and 7, of which 6 pays: Q(1, 6) = 1, and Q(0, .) tends to
    gamma as pi(6|1) does to 1, where the data's policy would leave it at gamma / 3."""
    obs, end = np.tile([0.0, 1.0], 500), np.tile([False, True], 500)
    action = np.random.default_rng(0).integers(5, 8, 1000)
    reward = (obs == 1) & (action == 6)
    path = save_rows(tmp_path / "d.npz", obs, action, reward, obs + 1, end, end & False)
    args = replace(probe_args, env_id="Choice-v0", dataset=path, gamma=0.8)
    algo.train(args)
    checkpoint = load(args.run_dir)
    critic = algo.TwinCritic(1, 3, args.hidden_dim)
    critic.load_state_dict(checkpoint["critic"])
    states = (torch.tensor([[0.0], [1.0]]) - checkpoint["obs_mean"]) / checkpoint["obs_std"]
    with torch.no_grad():
        q = critic(states, torch.eye(3)[:, None].expand(3, 2, 3)).mean(0)  # [A, 2]
    assert q[:, 1].tolist() == pytest.approx([0, 1, 0], abs=0.1)
    assert q[:, 0].tolist() == pytest.approx([0.8, 0.8, 0.8], abs=0.1)
    assert greedy_action(algo, args, 1.0) == 6


@pytest.mark.parametrize("td_lambda", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("algo", ["awr", "marwil"], indirect=True)
def test_two_step_mdp_with_known_v(algo, probe_args, tmp_path, td_lambda):
    """The same MDP, cut after its first step in half of the episodes: V is the value of the data,
    V(1) = 1/2 and V(0) = gamma / 2, for every lambda. In s = 1 the policy learns a > 0; in s = 0,
    where nothing depends on the action, it stays with the data."""
    rng = np.random.default_rng(0)
    obs = np.tile([0.0, 0.0, 1.0], 500)
    action = rng.uniform(-1, 1, 1500)
    reward = np.where(obs == 1, (action > 0).astype(float), 0.0)
    cut, end = np.tile([True, False, False], 500), obs == 1
    path = save_rows(tmp_path / "d.npz", obs, action, reward, obs + 1, end, cut)
    args = replace(probe_args, dataset=path, gamma=0.8, td_lambda=td_lambda)
    algo.train(args)
    assert values(algo, args, [0.0, 1.0], None) == pytest.approx([0.4, 0.5], abs=0.06)
    assert greedy_action(algo, args, 1.0) > 0.3
    assert abs(greedy_action(algo, args, 0.0)) < 0.3


@pytest.mark.parametrize("algo", WITH_REWARDS, indirect=True)
def test_bandit_is_solved_and_cloning_is_not(algo, probe_args, tmp_path):
    """One step, reward -|a - 0.6|, data uniform on [-1, 1]: all move towards 0.6, cloning stays at
    the mean of the data, which is 0."""
    action = np.random.default_rng(0).uniform(-1, 1, 2000)
    rows, end = np.zeros(2000), np.ones(2000, bool)
    path = save_rows(tmp_path / "d.npz", rows, action, -abs(action - 0.6), rows, end, end & False)
    sharp = {"awr": {"beta": 0.3}, "marwil": {"beta": 3.0}}
    args = replace(probe_args, dataset=path, **sharp.get(algo.ALGO, {}))
    algo.train(args)
    assert greedy_action(algo, args) == pytest.approx(0.6, abs=0.15)
    if algo.ALGO in OFFLINE:
        cloning = replace(args, **CLONING[algo.ALGO], run_dir=args.run_dir + "-bc")
        algo.train(cloning)
        assert greedy_action(algo, cloning) == pytest.approx(0.0, abs=0.15)


ONLINE = {
    "rlpd": {"dataset": "none", "offline_batch_ratio": 0.0, "gradient_updates_per_step": 2},
    "mbpo": {"updates_per_step": 2},
}


@pytest.mark.parametrize("algo", ["rlpd", "mbpo"], indirect=True)
def test_S1_online_truncation_bootstraps(algo, probe_args):
    """1 - (a - 0.5)^2 per step, truncated every tenth: without any data the policy finds 0.5, and
    with gamma 0.9, Q(0.5) = 1 / (1 - 0.9) = 10. A cut that counts as an end gives less than 7."""
    args = replace(probe_args, gamma=0.9, learning_starts=100, **ONLINE[algo.ALGO])
    result = algo.train(args)
    assert result["eval/return_mean"] == pytest.approx(10, abs=0.1)
    assert greedy_action(algo, args) == pytest.approx(0.5, abs=0.1)
    # with alpha, a later step is worth 1 - sigma^2 + alpha (log sigma + log(2 pi e) / 2), where
    # sigma^2 = alpha / 2 is best: at 0.05 that is 1 - 0.046
    lost = {"rlpd": 0.0, "mbpo": 9 * 0.046}[algo.ALGO]
    expected = pytest.approx([10 - lost, 9 - lost], abs=0.4)
    assert values(algo, args, [0.0, 0.0], [0.5, -0.5]) == expected


@pytest.mark.parametrize("algo", ["rlpd"], indirect=True)
def test_data_alone_and_steps_alone_and_both(algo, probe_args, tmp_path):
    """The data pay for a = -0.5, the environment for a = 0.5: with the ratio goes the policy."""
    action = np.random.default_rng(0).uniform(-1, 1, 2000)
    rows, end = np.zeros(2000), np.ones(2000, bool)
    reward = 1 - (action + 0.5) ** 2
    path = save_rows(tmp_path / "d.npz", rows, action, reward, rows, end, end & False)
    found = []
    for ratio in (0.0, 0.5, 1.0):
        args = replace(probe_args, dataset=path, offline_batch_ratio=ratio, gamma=0.0)
        args = replace(args, learning_starts=100, run_dir=f"{probe_args.run_dir}-{ratio}")
        algo.train(args)
        found.append(greedy_action(algo, args))
    assert found[0] == pytest.approx(0.5, abs=0.15) and found[2] == pytest.approx(-0.5, abs=0.15)
    assert found[2] + 0.2 < found[1] < found[0] - 0.2


@pytest.mark.parametrize("algo", OFFLINE, indirect=True)
def test_discrete_bandit_is_solved_and_cloning_is_not(algo, probe_args, tmp_path):
    """Three actions, of which the rarer 6 pays: cloning takes 5, the most frequent one."""
    action = np.random.default_rng(0).choice([5, 6, 7], 2000, p=[0.5, 0.3, 0.2])
    rows, end = np.zeros(2000), np.ones(2000, bool)
    path = save_rows(tmp_path / "d.npz", rows, action, action == 6, rows, end, end & False)
    args = replace(probe_args, env_id="Choice-v0", dataset=path)
    assert algo.train(args)["eval/return_mean"] == 10  # ten steps, all paid
    cloning = replace(args, **CLONING[algo.ALGO], run_dir=args.run_dir + "-bc")
    algo.train(cloning)
    assert (greedy_action(algo, args), greedy_action(algo, cloning)) == (6, 5)


# ---- FQF: online, with discrete actions and a distribution to know


def staircase(args, obs):
    """tau [N + 1] and quantiles [N, A] of a finished run at one observation."""
    algo = ALGOS["fqf"]
    network, proposal, *_ = algo.load_networks(f"{args.run_dir}/checkpoint.pt")
    with torch.no_grad():
        tau, quantiles = algo.staircase(network, proposal, torch.tensor([obs]))
    return tau[0].double(), quantiles[0].double()


def expected_returns(args, obs):
    """Q(s, .), as a plain sum over the steps of the staircase."""
    tau, quantiles = staircase(args, obs)
    return [sum((tau[i + 1] - tau[i]) * quantiles[i, a] for i in range(8)).item() for a in range(3)]


@pytest.mark.parametrize("algo", ["fqf"], indirect=True)
@pytest.mark.parametrize(
    "flags",
    [{}, {"n_steps": 3}, {"double_q": True, "prioritized": True}, {"learn_fractions": False}],
)
def test_S1_S2_discrete_online_truncation_bootstraps(algo, probe_args, flags):
    """Action 6 pays 1 per step, truncated every tenth: Q(6) = 1 / (1 - 0.9) = 10, and one step of
    anything else costs 1. A cut that counts as an end gives less than 7. With three steps to a
    target and half of the actions random, Q is that of a worse policy: 6 is still the best."""
    task = {"env_id": "Choice-v0", "gamma": 0.9, "total_timesteps": 1500, "seed": 2}
    args = replace(probe_args, **task, **flags)
    assert algo.train(args)["eval/return_mean"] == 10
    q = expected_returns(args, [0.0])
    if "n_steps" in flags:
        assert 7.5 < q[1] < 10 and q[1] > max(q[0], q[2]) + 0.5
    else:
        assert q == pytest.approx([9, 10, 9], abs=1)
        assert [q[1] - q[0], q[1] - q[2]] == pytest.approx([1, 1], abs=0.2)


class TwoStepEnv(gym.Env):
    """From s = 0 to s = 1 for nothing. There, action 2 pays 1, action 1 flips a coin for 0 or 2.5,
    and action 0 pays nothing; then it ends, in s = 2."""

    observation_space = gym.spaces.Box(0, 2, (1,), np.float32)
    action_space = gym.spaces.Discrete(3)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.state = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        coin = 2.5 * self.np_random.integers(2)
        reward = [0.0, coin, 1.0][action] if self.state == 1 else 0.0
        self.state += 1
        return np.full(1, self.state, np.float32), float(reward), self.state == 2, False, {}


@pytest.mark.parametrize("algo", ["fqf"], indirect=True)
@pytest.mark.parametrize("flags", [{}, {"prioritized": True}, {"n_steps": 2}])
def test_two_step_mdp_with_known_distribution(algo, probe_args, flags):
    """Q(1, .) = 0, 1.25, 1, and the coin's quantiles are 0 up to 1/2, 2.5 after it. Q(0, .) tends
    to 0.8 * 1.25 = 1, with the same two halves, times 0.8."""
    gym.register("TwoStep-v0", TwoStepEnv)
    try:
        args = replace(probe_args, env_id="TwoStep-v0", gamma=0.8, total_timesteps=2500, **flags)
        algo.train(args)
        q, (tau, quantiles) = expected_returns(args, [1.0]), staircase(args, [1.0])
        first_q, first = expected_returns(args, [0.0]), staircase(args, [0.0])
    finally:
        del gym.envs.registry["TwoStep-v0"]
    assert q == pytest.approx([0, 1.25, 1], abs=0.2)
    low, high = halves(tau, quantiles[:, 1])
    assert low == pytest.approx(0, abs=0.4) and high == pytest.approx(2.5, abs=0.4)
    assert quantiles[:, 2].tolist() == pytest.approx([1] * 8, abs=0.3)
    if "n_steps" not in flags:  # else its targets hold the random second action of the past
        assert first_q == pytest.approx([1, 1, 1], abs=0.2)
        low, high = halves(first[0], first[1].mean(dim=1))
        assert low == pytest.approx(0, abs=0.4) and high == pytest.approx(2, abs=0.4)


def halves(tau, quantiles):
    """The heights of a staircase well below and well above tau = 1/2."""
    middle = (tau[1:] + tau[:-1]) / 2
    return quantiles[middle < 0.4].mean().item(), quantiles[middle > 0.6].mean().item()


# ---- GAIL: the environment pays, but only the expert is followed


@pytest.mark.parametrize("algo", ["gail"], indirect=True)
@pytest.mark.parametrize("reward_type", ["softplus", "logsigmoid", "logit"])
def test_expert_is_followed_and_not_the_reward(algo, probe_args, tmp_path, reward_type):
    """The environment pays most for a = 0.5, the expert does -0.5."""
    zeros, ends = np.zeros(200), np.zeros(200, bool)
    path = save_rows(tmp_path / "d.npz", zeros, zeros - 0.5, zeros, zeros, ends, ends)
    args = replace(probe_args, dataset=path, reward_type=reward_type, total_timesteps=8000)
    algo.train(args)
    assert greedy_action(algo, args) == pytest.approx(-0.5, abs=0.15)


@pytest.mark.parametrize("algo", ["gail"], indirect=True)
def test_discrete_expert_is_followed_and_not_the_reward(algo, probe_args, tmp_path):
    """6 pays, the expert does 7."""
    zeros, ends = np.zeros(200), np.zeros(200, bool)
    path = save_rows(tmp_path / "d.npz", zeros, zeros + 7, zeros, zeros, ends, ends)
    args = replace(probe_args, env_id="Choice-v0", dataset=path, total_timesteps=4000)
    assert algo.train(args)["eval/return_mean"] == 0
    assert greedy_action(algo, args) == 7


@pytest.mark.parametrize("algo", ["gail"], indirect=True)
@pytest.mark.parametrize("gae_lambda", [0.0, 0.95, 1.0])
def test_S1_value_of_a_frozen_discriminator(algo, probe_args, gae_lambda):
    """D = 1/2 pays log 2 in every step, truncated every tenth. Rewards are multiplied with
    1 - gamma, so that V = log 2. A cut that counts as an end gives less than half of it."""
    args = replace(probe_args, learn_discriminator=False, gae_lambda=gae_lambda, gamma=0.9)
    algo.train(replace(args, total_timesteps=4000))
    checkpoint = load(args.run_dir)
    value, normalizer = algo.StateValue(1, args.hidden_dim), algo.Normalizer(torch.zeros(1, 1))
    value.load_state_dict(checkpoint["value"])
    normalizer.load_state_dict(checkpoint["normalizer"])
    with torch.no_grad():
        assert value(normalizer(torch.zeros(1, 1))).item() == pytest.approx(np.log(2), abs=0.03)


class TwoRoomsEnv(gym.Env):
    """Two states, at random; it pays for doing the wrong thing. Ten steps are truncated."""

    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.room = self.np_random.integers(2)
        return np.full(1, 2 * self.room - 1, np.float32), {}

    def step(self, action):
        reward = float(action != self.room)
        self.room = self.np_random.integers(2)
        return np.full(1, 2 * self.room - 1, np.float32), reward, False, False, {}


@pytest.mark.parametrize("algo", ["gail"], indirect=True)
@pytest.mark.parametrize("reward_type", ["softplus", "logsigmoid", "logit"])
def test_expert_of_two_states_is_followed(algo, probe_args, tmp_path, reward_type):
    """Action 0 in state -1, action 1 in state 1: a discriminator of states or of actions alone
    could not tell, since both are as frequent as the policy's."""
    gym.register("TwoRooms-v0", TwoRoomsEnv, max_episode_steps=10)
    try:
        room, ends = np.random.default_rng(0).integers(2, size=401), np.zeros(400, bool)
        rows = (2 * room[:-1] - 1, room[:-1], room[:-1], 2 * room[1:] - 1, ends, ends)
        args = replace(probe_args, env_id="TwoRooms-v0", dataset=save_rows(tmp_path / "d", *rows))
        args = replace(args, dataset=f"{tmp_path}/d.npz", reward_type=reward_type)
        args = replace(args, total_timesteps=8000)
        assert algo.train(args)["eval/return_mean"] == 0
        actions = [greedy_action(algo, args, state) for state in (-1.0, 1.0)]
    finally:
        del gym.envs.registry["TwoRooms-v0"]
    assert actions == [0, 1]
