"""Dreamer: model, replay, returns, losses, loop and pictures against numbers worked out by other
means."""

import bisect
import io
import itertools
import math
import shlex
import signal
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
import tyro
from conftest import StepsEnv, load
from torch import nn

import common
from algos import dreamer

NANO = dreamer.Size(deter=6, groups=2, classes=3, units=5, depth=2, blocks=2, image_size=8)
NUM_CLASSES = NANO.groups * NANO.classes
BINS = np.sign(np.linspace(-20, 20, 255)) * np.expm1(np.abs(np.linspace(-20, 20, 255)))


class TallyEnv(gym.Env):
    """One sees a number of the episode, the time, and the action before; every reward is another.
    Episodes have 1 to 4 steps and are terminated, or truncated, by turns of the seed. The actions
    are 5, 6 and 7. Whatever happens is noted in `rows`."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = gym.spaces.Discrete(3, start=5)
    made = []  # noqa: RUF012  those of a run come first, in order

    def __init__(self):
        self.rows = []
        self.made.append(self)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.seed, self.time, self.last = seed, 0, 1 + seed % 4
        obs = np.array([seed % 1009, 0.0, -1.0])
        self.rows.append({"seed": seed, "obs": obs, "reward": 0.0, "first": 1})
        return obs, {}

    def step(self, action):
        assert self.action_space.contains(action) and self.time < self.last
        self.rows[-1]["action"] = action
        self.time += 1
        obs = np.array([self.seed % 1009, self.time, action], np.float64)
        reward, is_over, is_end = 10.0 * self.time + action, self.time == self.last, self.seed % 2
        end, cut = bool(is_over and is_end), bool(is_over and not is_end)
        self.rows.append({"obs": obs, "reward": reward, "end": end, "cut": cut})
        return obs, reward, end, cut, {}


class FilmEnv(gym.Env):
    """A walk, seen as an image of 8 x 8 pixels; every pixel depends on seed, time and actions.
    Terminated outside of +-2; the actions are 5, 6 and 7: back, stay, forth."""

    observation_space = gym.spaces.Box(0, 255, (8, 8, 3), np.uint8)
    action_space = gym.spaces.Discrete(3, start=5)
    changed_from = 10**9  # from this time on, frames are inverted

    def frame(self):
        grid = np.arange(8 * 8 * 3).reshape(8, 8, 3) * (1 + self.time) + 40 * self.position
        frame = (grid % 256).astype(np.uint8)
        return 255 - frame if self.time >= self.changed_from else frame

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.position, self.time = self.np_random.normal(), 0
        return self.frame(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.position += 0.5 * (action - 6) + 0.3 * self.np_random.normal()
        self.time += 1
        end = bool(abs(self.position) > 2)
        return self.frame(), float(2 - self.position**2), end, False, {}


class OneStepFilmEnv(FilmEnv):
    """Every step is the last."""

    def step(self, action):
        return *super().step(action)[:2], True, False, {}


class ForgetfulChoiceEnv(gym.Env):
    """Draws from a generator that no seed reaches."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        return np.random.default_rng().normal(size=2).astype(np.float32), {}

    def step(self, action):
        return self.reset()[0], 0.0, False, False, {}


class ExtremeEnv(gym.Env):
    """Numbers as large as floats can be, of both signs."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        return self.draw(), {}

    def draw(self):
        return (self.np_random.uniform(-1, 1, size=2) * 3e38).astype(np.float32)

    def step(self, action):
        reward = float(self.np_random.choice([-1e30, 1e12, 0.0, 1e-30]))
        return self.draw(), reward, bool(self.np_random.random() < 0.2), False, {}


class TwoStateEnv(gym.Env):
    """The action is the next state, 0 or 1. Arriving in 1 pays 2, in 0 it costs 1; and 1 twice in a
    row is the end, which only those can tell who remember where they were."""

    observation_space = gym.spaces.Box(0, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.place = 0
        return np.eye(2, dtype=np.float32)[0], {}

    def step(self, action):
        end, self.place = bool(self.place == action == 1), int(action)
        return np.eye(2, dtype=np.float32)[action], (-1.0, 2.0)[action], end, False, {}


for name, entry_point in {
    "Tally": TallyEnv,
    "Film": FilmEnv,
    "OneStepFilm": OneStepFilmEnv,
    "ForgetfulChoices": ForgetfulChoiceEnv,
    "Extreme": ExtremeEnv,
    "TwoState": TwoStateEnv,
}.items():
    gym.register(f"{name}-v0", entry_point, max_episode_steps=10)
gym.register("LongFilm-v0", FilmEnv, max_episode_steps=100, kwargs={})


@pytest.fixture(autouse=True)
def same_numbers_each_time(monkeypatch):
    """And the smallest networks, whatever the command line would call them."""
    torch.manual_seed(0)
    monkeypatch.setitem(dreamer.SIZES, "tiny", NANO)
    TallyEnv.made.clear()


@pytest.fixture
def walk(tmp_path):
    """A run of a fraction of a second: 16 updates, both kinds of end, returns of some size."""
    return dreamer.Args(
        env_id="Steps-v0",
        total_timesteps=60,
        batch_size=12,
        gamma=0.9,
        learning_rate=1e-2,
        eval_interval=1000,
        eval_episodes=1,
        checkpoint_interval=1000,
        log_interval=1,
        run_dir=str(tmp_path / "run"),
        quiet=True,
        device="cpu",
        torch_threads=1,
        num_envs=3,
        learning_starts=12,
        buffer_capacity=1000,
        replay_ratio=4.0,
        sequence_length=4,
        free_nats=0.3,
        actor_critic_learning_rate=5e-3,
        imagine_last=3,
        horizon=3,
        td_lambda=0.8,
        policy_entropy_coef=0.05,
        replay_critic_coef=0.3,
        tau=0.02,
    )


@pytest.fixture
def film(walk):
    """The same on images."""
    return replace(walk, env_id="Film-v0")


def copied(x):
    if isinstance(x, torch.Tensor):
        return x.detach().clone()
    if isinstance(x, np.ndarray):
        return x.copy()
    return type(x)(map(copied, x)) if isinstance(x, tuple | list) else x


@pytest.fixture
def spy(monkeypatch):
    """Keep a copy of arguments and result of every call of a function, or of a method."""

    def install(name, owner=dreamer):
        calls, original = [], getattr(owner, name)

        def spied(*args, **kwargs):
            before = [copied(x) for x in args]
            result = original(*args, **kwargs)
            calls.append((*before, copied(result)))
            return result

        monkeypatch.setattr(owner, name, spied)
        return calls

    return install


def enliven(model, actor, critic):
    """Weights where zeros were: rewards and values of some size, and an actor with preferences. A
    bell over the bins, whose place the input moves, so that no far bin has any weight."""
    draw = torch.Generator().manual_seed(7)
    k = torch.arange(255.0) - 127
    with torch.no_grad():
        for layer in (model.reward[-1], critic.net[-1]):
            tilt = 0.8 * torch.randn(1, layer.in_features, generator=draw)
            layer.weight.copy_(k[:, None] * tilt)
            layer.bias.copy_(-(k**2) / 32)
        actor.net[-1].weight.copy_(torch.randn(actor.net[-1].weight.shape, generator=draw))
        model.cont[-1].bias.fill_(1.0)
    return model, actor, critic


@pytest.fixture
def modules(monkeypatch):
    """The networks of a run, caught as they are made, with something in them to learn from."""
    made, build, copy = {}, dreamer.build_networks, deepcopy

    def make(*args):
        networks = enliven(*build(*args))
        made.update(zip(("model", "actor", "critic"), networks))
        return networks

    def make_slow(original):
        copied = copy(original)
        if isinstance(original, torch.nn.Module):  # not a part of a checkpoint
            made["slow_critic"] = copied
        return copied

    monkeypatch.setattr(dreamer, "build_networks", make)
    monkeypatch.setattr(dreamer, "deepcopy", make_slow)
    return made


def nano_networks(obs_shape=(2,), num_actions=3, size=NANO):
    return enliven(*dreamer.build_networks(obs_shape, num_actions, size))


def weights(module):
    return torch.cat([x.detach().flatten().clone() for x in module.state_dict().values()])


def metrics(args, key):
    """{step: value} of one key in metrics.csv."""
    rows = [row.split(",") for row in Path(args.run_dir, "metrics.csv").read_text().splitlines()]
    return {int(row[0]): float(row[3]) for row in rows if row[2] == key}


def log_of(args):
    """Step, key and value of every logged scalar that is not a time."""
    rows = [row.split(",") for row in Path(args.run_dir, "metrics.csv").read_text().splitlines()]
    return [(step, key, value) for step, _, key, value in rows if "_second" not in key]


def assert_same(left, right, where="checkpoint"):
    """Bit for bit, all but the clock and the names of folders."""
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype and torch.equal(left, right), where
    elif isinstance(left, dict):
        assert left.keys() == right.keys(), where
        for key in left.keys() - {"seconds", "num_bytes", "run_dir"}:
            assert_same(left[key], right[key], f"{where}.{key}")
    elif isinstance(left, list | tuple):
        for a, b in zip(left, right, strict=True):
            assert_same(a, b, where)
    else:
        assert left == right, where


def one_hot(index, num):
    return torch.eye(num)[index]


# ---- the state is forgotten at the start of an episode


def sequence(num=3, length=6):
    """embed, last_action, is_first, h, z of `num` sequences, without a start."""
    return [
        torch.randn(num, length, NANO.units),
        one_hot(torch.randint(3, (num, length)), 3),
        torch.zeros(num, length),
        torch.tanh(torch.randn(num, NANO.deter)),
        one_hot(torch.randint(3, (num, 2)), 3).flatten(1),
    ]


def drawn():
    return torch.Generator().manual_seed(3)


PARTS = [(part, start) for start in (0, 3) for part in ("last_action", "h", "z")]


@pytest.mark.parametrize(("part", "start"), [*PARTS, ("embed", 3)])
def test_D1_after_is_first_no_part_of_the_past_matters(part, start):
    """What was seen and done before, the states at the start of the sequence, and the action at
    is_first itself: each alone makes a difference without is_first, and none with it."""
    rssm = nano_networks()[0].rssm
    where, one = ["embed", "last_action", "is_first", "h", "z"].index(part), sequence()
    other = [x.clone() for x in one]
    if part == "embed":
        other[where][:, :start] *= -10
    elif part == "last_action":
        other[where][:, : start + 1] = one[where][:, : start + 1].roll(1, dims=2)
    else:
        other[where] = one[where].roll(1, dims=1)
    for is_first, differs in ((0, True), (1, False)):
        for inputs in (one, other):
            inputs[2][:, start] = is_first
        left, right = rssm.observe(*one, drawn()), rssm.observe(*other, drawn())
        assert ((left[0] - right[0])[:, start:].abs().max() > 1e-4) == differs
    for x, y in zip(left, right):  # h, z, q
        assert torch.equal(x[:, start:], y[:, start:])
    assert start == 0 or not torch.equal(left[0][:, :start], right[0][:, :start])


def test_D1_an_episode_in_the_middle_is_like_one_at_the_start():
    """h, z and posteriors from is_first on are those of a sequence that starts there, from zeros,
    after no action. Only in the rows that have it."""
    rssm = nano_networks()[0].rssm
    embed, last_action, is_first, h, z = sequence()
    plain = rssm.observe(embed, last_action, is_first, h, z, None)
    is_first[1, 2] = 1
    whole = rssm.observe(embed, last_action, is_first, h, z, None)
    for x, y in zip(whole, plain):
        assert torch.equal(x[[0, 2]], y[[0, 2]]) and torch.equal(x[1, :2], y[1, :2])
    assert (whole[0][1, 2:] - plain[0][1, 2:]).abs().max() > 1e-3
    last_action[1, 2] = 0
    zeros = [torch.zeros_like(x) for x in (is_first[:, 2:], h, z)]
    alone = rssm.observe(embed[:, 2:], last_action[:, 2:], *zeros, None)
    for x, y in zip(whole, alone):
        torch.testing.assert_close(x[1, 2:], y[1], rtol=1e-5, atol=1e-6)


def test_D1_acting_forgets_as_well(walk):
    """An agent that has just been switched on remembers nothing; where an episode starts in a run,
    it remembers as little, h, z and action, and elsewhere all of what act() gave back."""
    for x, dim in zip(nano_networks()[0].rssm.initial(4), (6, 6, 3)):
        assert x.shape == (4, dim) and not x.any()
    calls, kept, forgot = [], 0, 0
    act = dreamer.act

    def noted(model, actor, obs, memory, generator):
        before = [x.clone() for x in memory]
        after = act(model, actor, obs, memory, generator)
        if generator is not None:  # of training, not of an evaluation
            calls.append((obs[:, 1].tolist(), before, [x.clone() for x in after]))
        return after

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dreamer, "act", noted)
        dreamer.train(replace(walk, env_id="Tally-v0"))
    assert len(calls) == 20 and not any(x.any() for x in calls[0][1])
    for (_, _, given), (times, taken, _) in itertools.pairwise(calls):
        for i, time in enumerate(times):
            if time == 0:
                forgot += 1
                assert not any(x[i].any() for x in taken)
            else:
                kept += 1
                assert all(torch.equal(x[i], y[i]) for x, y in zip(given, taken))
    assert kept > 10 and forgot > 5


# ---- the model, by hand


def doubles(module):
    return {name: x.detach().double().numpy() for name, x in module.state_dict().items()}


def silu(x):
    return x / (1 + np.exp(-x))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def rms_norm(x, scale):
    return x / np.sqrt(np.mean(x**2) + 1e-4) * scale


def dense_by_hand(p, name, x):
    linear = p[f"{name}.0.weight"] @ x + p[f"{name}.0.bias"]
    return silu(rms_norm(linear, p[f"{name}.1.weight"]))


def gru_by_hand(p, h, z, a):
    """One row, one output at a time; p of an RSSM of NANO size, the blocks being 3 x 3."""
    parts = [dense_by_hand(p, f"from_{name}", x) for name, x in (("h", h), ("z", z), ("action", a))]
    inputs, mixed = np.concatenate(parts), np.zeros(6)
    for j in range(6):
        block, inner = divmod(j, 3)
        own = sum(h[3 * block + i] * p["mix_h.weight"][block, i, inner] for i in range(3))
        mixed[j] = own + p["mix_h.bias"][block, 0, inner] + p["mix_inputs.weight"][j] @ inputs
    mixed = silu(rms_norm(mixed, p["mix_norm.0.weight"]))
    new = np.zeros(6)
    for j in range(6):
        block, inner = divmod(j, 3)
        reset, candidate, update = (
            sum(mixed[3 * block + i] * p["gates.weight"][block, i, k] for i in range(3))
            + p["gates.bias"][block, 0, k]
            for k in (inner, 3 + inner, 6 + inner)
        )
        candidate, update = np.tanh(sigmoid(reset) * candidate), sigmoid(update - 1)
        new[j] = update * candidate + (1 - update) * h[j]
    return new


def randomise(module, scale=1.0):
    """Biases and scales that are not 0 and 1, so that a forgotten one shows."""
    with torch.no_grad():
        for x in module.parameters():
            x.add_(scale * torch.randn_like(x))
    return module


def test_gru_step_by_hand():
    rssm = randomise(nano_networks()[0].rssm)
    p, h, z = doubles(rssm), torch.randn(5, 6), torch.rand(5, 6)
    action = torch.rand(5, 3)
    with torch.no_grad():
        actual = rssm.recur(h, z, rssm.from_action(action))
    rows = zip(*(x.double().numpy() for x in (h, z, action)))
    expected = np.stack([gru_by_hand(p, *row) for row in rows])
    np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-4, atol=1e-5)


def test_gru_remembers_at_first():
    """With all gates at 0 the update gate is sigmoid(-1) = 0.269 and the candidate 0."""
    rssm = nano_networks()[0].rssm
    with torch.no_grad():
        rssm.gates.weight.zero_()
    h = torch.randn(4, 6)
    new = rssm.recur(h, torch.rand(4, 6), torch.randn(4, 5))
    torch.testing.assert_close(new, h * (1 - 1 / (1 + math.e)))


@pytest.mark.parametrize(("input_dim", "output_dim", "blocks"), [(6, 9, 3), (8, 4, 2), (5, 7, 1)])
def test_D16_block_linear_is_a_block_diagonal_matrix(input_dim, output_dim, blocks):
    layer = dreamer.BlockLinear(input_dim, output_dim, blocks)
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    x = torch.randn(11, input_dim)
    matrix = torch.block_diag(*layer.weight.detach())
    assert matrix.shape == (input_dim, output_dim)
    expected = x @ matrix + layer.bias.detach().flatten()
    actual = layer(x)
    assert actual.shape == (11, blocks, output_dim // blocks)
    torch.testing.assert_close(actual.flatten(1).detach(), expected)
    assert sum(p.numel() for p in layer.parameters()) == matrix.numel() // blocks + output_dim


def mixed_softmax(logits):
    """0.99 softmax + 0.01 / C, one vector."""
    e = np.exp(logits - logits.max())
    return 0.99 * e / e.sum() + 0.01 / len(logits)


def test_prior_and_posterior_by_hand():
    """p(z|h): two layers; q(z|h, x): one layer of both. Groups of 3 classes, each mixed alone."""
    rssm = randomise(nano_networks()[0].rssm)
    p, h, embed = doubles(rssm), torch.randn(4, 6), torch.randn(4, 5)
    with torch.no_grad():
        log_p, log_q = rssm.prior(h), rssm.posterior(h, rssm.posterior_embed(embed))
        stacked = rssm.prior(torch.stack([h, 2 * h]))  # any leading shape
    assert log_p.shape == log_q.shape == (4, 2, 3)
    torch.testing.assert_close(stacked[0], log_p)
    for n in range(4):
        x, e = h[n].double().numpy(), embed[n].double().numpy()
        hidden = dense_by_hand(p, "prior_net.1", dense_by_hand(p, "prior_net.0", x))
        logits = p["prior_net.2.weight"] @ hidden + p["prior_net.2.bias"]
        both = p["posterior_h.weight"] @ x + p["posterior_h.bias"] + p["posterior_embed.weight"] @ e
        hidden = silu(rms_norm(both, p["posterior_net.0.weight"]))
        others = p["posterior_net.2.weight"] @ hidden + p["posterior_net.2.bias"]
        for group in range(2):
            part = slice(3 * group, 3 * group + 3)
            for log_probs, by_hand in ((log_p, logits[part]), (log_q, others[part])):
                actual = log_probs[n, group].double().exp().numpy()
                np.testing.assert_allclose(actual, mixed_softmax(by_hand), rtol=1e-3, atol=1e-6)


def test_heads_by_hand():
    """Reward and continue have one hidden layer; actor, critic and the decoder of vectors three."""
    model, actor, critic = (randomise(x, 0.3) for x in nano_networks())
    features = torch.randn(4, 3, 12)
    heads = {"reward": (model, 1), "cont": (model, 1), "decoder.net": (model, 3)}
    heads |= {"actor": (actor, 3), "critic": (critic, 3)}
    with torch.no_grad():
        outputs = {"reward": model.reward(features), "cont": model.cont(features)}
        outputs["decoder.net"] = model.decoder(features.flatten(0, 1)).unflatten(0, (4, 3))
        outputs |= {"actor": actor(features).exp(), "critic": critic(features)}
    widths = {"reward": 255, "cont": 1, "decoder.net": 2, "actor": 3, "critic": 255}
    for name, (network, num_layers) in heads.items():
        p, prefix = doubles(network), "net" if name in ("actor", "critic") else name
        assert outputs[name].shape == (4, 3, widths[name])
        x = features[2, 1].double().numpy()
        for k in range(num_layers):
            x = dense_by_hand(p, f"{prefix}.{k}", x)
        x = p[f"{prefix}.{num_layers}.weight"] @ x + p[f"{prefix}.{num_layers}.bias"]
        expected = mixed_softmax(x) if name == "actor" else x
        np.testing.assert_allclose(outputs[name][2, 1].numpy(), expected, rtol=1e-4, atol=1e-4)


def convolve(image, weight, bias):
    """4 x 4 with stride 2 and one pixel of zeros around, one output at a time. [W, W, C]"""
    width = len(image)
    padded = np.zeros((width + 2, width + 2, image.shape[2]))
    padded[1:-1, 1:-1] = image
    output = np.zeros((width // 2, width // 2, len(weight)))
    for i, j, k in np.ndindex(output.shape):
        patch = padded[2 * i : 2 * i + 4, 2 * j : 2 * j + 4]  # [4, 4, C]
        output[i, j, k] = (patch * weight[k].transpose(1, 2, 0)).sum() + bias[k]
    return output


def test_encoder_of_images_by_hand():
    """16 x 16 pixels: 4 x 4 after two stages of 2 and 4 channels, each normed over its channels."""
    size = NANO._replace(image_size=16)
    encoder = randomise(nano_networks((16, 16, 3), 3, size)[0].encoder, 0.3)
    p, image = doubles(encoder), torch.rand(2, 16, 16, 3) - 0.5
    with torch.no_grad():
        actual = encoder(image)
    assert actual.shape == (2, 4 * 4 * 4) and encoder.embed_dim == 64
    x = image[1].double().numpy()
    for k in (0, 3):
        x = convolve(x, p[f"net.{k}.weight"], p[f"net.{k}.bias"])
        for i, j in np.ndindex(x.shape[:2]):
            x[i, j] = silu(rms_norm(x[i, j], p[f"net.{k + 1}.weight"]))
    np.testing.assert_allclose(actual[1].numpy(), x.flatten(), rtol=1e-3, atol=1e-4)


def deconvolve(image, weight, bias):
    """The transpose: every input pixel adds its 4 x 4 patch."""
    width = len(image)
    padded = np.zeros((2 * width + 2, 2 * width + 2, weight.shape[1]))
    for i, j, k in np.ndindex(image.shape):
        padded[2 * i : 2 * i + 4, 2 * j : 2 * j + 4] += image[i, j, k] * weight[k].transpose(
            1, 2, 0
        )
    return padded[1:-1, 1:-1] + bias


def test_decoder_of_images_by_hand():
    """The way back, with no norm before the sigmoid."""
    size = NANO._replace(image_size=16)
    decoder = randomise(nano_networks((16, 16, 3), 3, size)[0].decoder, 0.3)
    p, features = doubles(decoder), torch.randn(2, 12)
    with torch.no_grad():
        actual = decoder(features)
    assert actual.shape == (2, 16, 16, 3) and 0 < actual.min() < actual.max() < 1
    x = p["input.weight"] @ features[1].double().numpy() + p["input.bias"]
    x = x.reshape(4, 4, 4)
    for k in (0, 3):  # norm, SiLU, transposed convolution
        for i, j in np.ndindex(x.shape[:2]):
            x[i, j] = silu(rms_norm(x[i, j], p[f"net.{k}.weight"]))
        x = deconvolve(x, p[f"net.{k + 2}.weight"], p[f"net.{k + 2}.bias"])
    np.testing.assert_allclose(actual[1].numpy(), sigmoid(x), rtol=1e-3, atol=1e-4)


def test_encoder_of_vectors_by_hand():
    encoder = randomise(nano_networks((2,))[0].encoder, 0.3)
    p, x = doubles(encoder), torch.randn(3, 2)
    expected = x[1].double().numpy()
    for k in range(3):
        expected = dense_by_hand(p, f"net.{k}", expected)
    assert encoder.embed_dim == 5
    np.testing.assert_allclose(encoder(x)[1].detach().numpy(), expected, rtol=1e-4, atol=1e-5)


def test_imagination_by_hand():
    """Actions of the policy at the state that they leave, z of the prior, inverse distribution
    functions of the same uniform numbers; H + 1 states, H actions, and no gradient."""
    model, actor, _ = nano_networks()
    h, z = torch.tanh(torch.randn(4, 6)), one_hot(torch.randint(3, (4, 2)), 3).flatten(1)
    features, actions = dreamer.imagine(model, actor, h, z, 3, drawn())
    assert features.shape == (4, 4, 12) and actions.shape == (4, 3, 3)
    assert not features.requires_grad and not actions.requires_grad
    uniforms = drawn()
    assert torch.equal(features[:, 0], torch.cat([h, z], dim=1))
    p, p_actor = doubles(model.rssm), doubles(actor)
    h, z = h.double().numpy(), z.double().numpy()
    for t in range(3):
        u_action = torch.rand(4, 1, generator=uniforms).numpy()
        u_state = torch.rand(4, 2, 1, generator=uniforms).numpy()
        for n in range(4):
            x = np.concatenate([h[n], z[n]])
            for k in range(3):
                x = dense_by_hand(p_actor, f"net.{k}", x)
            pi = mixed_softmax(p_actor["net.3.weight"] @ x + p_actor["net.3.bias"])
            action = np.eye(3)[np.searchsorted(pi.cumsum(), u_action[n, 0])]
            assert actions[n, t].tolist() == action.tolist()
            h[n] = gru_by_hand(p, h[n], z[n], action)
            hidden = dense_by_hand(p, "prior_net.1", dense_by_hand(p, "prior_net.0", h[n]))
            logits = p["prior_net.2.weight"] @ hidden + p["prior_net.2.bias"]
            for group in range(2):
                prior = mixed_softmax(logits[3 * group : 3 * group + 3])
                drawn_class = np.searchsorted(prior.cumsum(), u_state[n, group, 0])
                z[n, 3 * group : 3 * group + 3] = np.eye(3)[drawn_class]
            expected = np.concatenate([h[n], z[n]])
            np.testing.assert_allclose(features[n, t + 1].numpy(), expected, rtol=1e-4, atol=1e-5)


# ---- initial weights


@pytest.fixture(scope="module")
def small_networks():
    """Large enough for a standard deviation to be told: D 512, 8 blocks, units 256, 64 x 64."""
    torch.manual_seed(0)
    return dreamer.build_networks((64, 64, 3), 6, dreamer.SIZES["small"])


FEATURES = 512 + 16 * 16
FAN_INS = {  # by hand; two layers whose outputs are added share the sum of their inputs
    "encoder.net.0": 3 * 16,
    "encoder.net.3": 16 * 16,
    "encoder.net.6": 32 * 16,
    "encoder.net.9": 64 * 16,
    "rssm.from_h.0": 512,
    "rssm.from_z.0": 256,
    "rssm.from_action.0": 6,
    "rssm.mix_h": 512 // 8 + 3 * 256,
    "rssm.mix_inputs": 512 // 8 + 3 * 256,
    "rssm.gates": 512 // 8,
    "rssm.prior_net.0.0": 512,
    "rssm.prior_net.1.0": 256,
    "rssm.prior_net.2": 256,
    "rssm.posterior_h": 512 + 128 * 4 * 4,
    "rssm.posterior_embed": 512 + 128 * 4 * 4,
    "rssm.posterior_net.2": 256,
    "decoder.input": FEATURES,
    "decoder.net.2": 128 * 4,
    "decoder.net.5": 64 * 4,
    "decoder.net.8": 32 * 4,
    "decoder.net.11": 16 * 4,
    "reward.0.0": FEATURES,
    "cont.0.0": FEATURES,
    "cont.1": 256,
}
HEAD_FAN_INS = {"net.0.0": FEATURES, "net.1.0": 256, "net.2.0": 256}


def test_D16_initial_weights_are_truncated_normal_of_variance_one_over_fan_in(small_networks):
    """At +-2 sigma of the normal that was cut, whose sigma is that of the result over 0.8796."""
    model, actor, critic = small_networks
    expected = {("model", name): fan_in for name, fan_in in FAN_INS.items()}
    for network in ("actor", "critic"):
        expected |= {(network, name): fan_in for name, fan_in in HEAD_FAN_INS.items()}
    networks = {"model": model, "actor": actor, "critic": critic}
    seen = set()
    for (network, name), fan_in in expected.items():
        weight = networks[network].get_submodule(name).weight.detach()
        seen.add(id(networks[network].get_submodule(name).weight))
        std, num = fan_in**-0.5, weight.numel()
        limit = 2 * std / 0.87962566
        assert weight.std().item() == pytest.approx(std, rel=0.01 + 3 / math.sqrt(num)), name
        assert abs(weight.mean().item()) < 5 * std / math.sqrt(num), name
        assert weight.abs().max() <= limit * (1 + 1e-4), name
        if num > 10_000:  # the cut is where it should be, and no clamp: few are close to it
            assert weight.abs().max() > 0.97 * limit, name
            assert (weight.abs() > 0.999 * limit).float().mean() < 1e-3, name
    # every other weight is a scale of a norm, or a head that starts at zero
    others = {"reward.1", "net.3"}
    for network in networks.values():
        for name, module in network.named_modules():
            weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
            if isinstance(module, nn.RMSNorm):
                assert (weight == 1).all()
            elif weight is not None and id(weight) not in seen:
                assert name in others and not weight.any(), name
            assert bias is None or not bias.any()


def test_D16_fan_ins_keep_the_variance(small_networks):
    """Inputs of variance 1 make sums of variance 1: of the split layers together, of a block, and
    of a transposed convolution, 2 x 2 of whose 4 x 4 weights meet in a pixel."""
    model = small_networks[0]
    rssm = model.rssm
    with torch.no_grad():
        h, inputs, embed = torch.randn(200, 512), torch.randn(200, 768), torch.randn(200, 2048)
        mixed = rssm.mix_h(h).flatten(1) + rssm.mix_inputs(inputs)
        posterior = rssm.posterior_h(h) + rssm.posterior_embed(embed)
        gates = rssm.gates(h)
        convolved = model.encoder.net[3](torch.randn(20, 16, 32, 32))[:, :, 1:-1, 1:-1]
        transposed = model.decoder.net[2](torch.randn(20, 128, 4, 4))[:, :, 1:-1, 1:-1]
    for x in (mixed, posterior, gates, convolved, transposed):
        assert x.var().item() == pytest.approx(1, abs=0.1)


def test_D16_every_norm_is_rms_with_eps_1e_4(small_networks):
    norms = [
        module
        for network in small_networks
        for module in network.modules()
        if isinstance(module, nn.RMSNorm | nn.LayerNorm | nn.BatchNorm2d)
    ]
    assert len(norms) == 4 + 3 + 1 + 2 + 1 + 4 + 2 + 3 + 3
    for norm in norms:
        assert type(norm) in (nn.RMSNorm, dreamer.ChannelNorm) and norm.eps == 1e-4
    x = torch.full((1, 8), 1e-2)  # x^2 = eps
    torch.testing.assert_close(nn.RMSNorm(8, 1e-4)(x), torch.full((1, 8), 0.5**0.5))


def test_D16_channel_norm_is_over_the_channels_of_a_pixel():
    norm, x = dreamer.ChannelNorm(3, 1e-4), torch.randn(2, 3, 4, 4)
    nn.init.normal_(norm.weight)
    actual = norm(x)
    assert actual.shape == x.shape
    for n, i, j in np.ndindex(2, 4, 4):
        pixel = x[n, :, i, j].double().numpy()
        expected = rms_norm(pixel, norm.weight.detach().double().numpy())
        np.testing.assert_allclose(actual[n, :, i, j].detach().numpy(), expected, rtol=1e-5)


def test_D13_before_it_learns_everything_is_worth_exactly_nothing(small_networks):
    """Rewards and values are 0.0, not almost; all actions are equally likely."""
    model, actor, critic = small_networks
    features = 10 * torch.randn(64, 3, FEATURES)
    with torch.no_grad():
        for logits in (model.reward(features), critic(features)):
            assert logits.shape == (64, 3, 255)
            assert (dreamer.two_hot_mean(logits) == 0.0).all()
        pi = actor(features).exp()
    torch.testing.assert_close(pi, torch.full((64, 3, 6), 1 / 6))


def test_sizes_have_the_weights_of_their_names():
    """The paper counts 12, 50 and 200 million with other convolutions; ours are within a quarter.
    Made without memory."""
    with torch.device("meta"):
        counts = {
            name: sum(
                p.numel()
                for network in dreamer.build_networks((64, 64, 3), 18, dreamer.SIZES[name])
                for p in network.parameters()
            )
            for name in ("12m", "50m", "paper")
        }
    expected = {"12m": 12e6, "50m": 50e6, "paper": 200e6}
    assert counts == pytest.approx(expected, rel=0.25)


# ---- categorical distributions


def test_D12_unimix_by_hand():
    logits = torch.tensor([[0.0, math.log(3), -200.0, 200.0], [0.0, 0.0, 0.0, 0.0]])
    expected = [[0.0025, 0.0025, 0.0025, 0.9925], [0.25] * 4]
    torch.testing.assert_close(dreamer.unimix(logits).exp(), torch.tensor(expected))
    logits = 3 * torch.randn(7, 5, 4)
    expected = 0.99 * torch.softmax(logits, -1) + 0.01 / 4
    torch.testing.assert_close(dreamer.unimix(logits), torch.log(expected))


def test_D12_no_class_is_impossible_in_prior_posterior_and_actor():
    """However sure the networks are: 0.01 / C at least, and some come close to that."""
    model, actor, _ = nano_networks()
    with torch.no_grad():
        for layer in (model.rssm.prior_net[-1], model.rssm.posterior_net[-1], actor.net[-1]):
            layer.weight.mul_(1000)
        h, features = torch.randn(50, 6), torch.randn(50, 12)
        q = model.rssm.posterior(h, torch.randn(50, 5)).exp()
        for probs in (model.rssm.prior(h).exp(), q, actor(features).exp()):
            assert probs.min() >= 0.01 / 3 * (1 - 1e-5) and probs.min() < 0.01 / 3 * 1.01
            torch.testing.assert_close(probs.sum(-1), torch.ones(probs.shape[:-1]))


def test_samples_have_their_probabilities():
    """Exact one-hot vectors, each class as often as it should be, two groups independently."""
    probs = torch.tensor([[0.1, 0.2, 0.7], [0.5, 0.05, 0.45]])
    num = 20_000
    draws = dreamer.sample(probs.log().expand(num, 2, 3), drawn())
    assert draws.shape == (num, 2, 3)
    assert ((draws == 0) | (draws == 1)).all() and (draws.sum(-1) == 1).all()
    sigma = (probs * (1 - probs) / num).sqrt()
    assert ((draws.mean(0) - probs).abs() < 5 * sigma).all()
    both = torch.einsum("ni,nj->ij", draws[:, 0], draws[:, 1]) / num
    joint = probs[0][:, None] * probs[1]
    assert ((both - joint).abs() < 5 * (joint * (1 - joint) / num).sqrt()).all()


def test_samples_by_inverse_distribution_function(monkeypatch):
    """At the edges, too: a uniform number beyond a sum that rounding left short of 1."""
    log_probs = torch.tensor([0.25, 0.5, 0.25]).log()
    edges = [(0.0, 0), (0.2, 0), (0.3, 1), (0.7, 1), (0.8, 2), (1 - 2**-24, 2)]
    for uniform, expected in edges:
        monkeypatch.setattr(torch, "rand", lambda *_, u=uniform, **__: torch.full((1,), u))
        assert dreamer.sample(log_probs, drawn()).argmax().item() == expected
    short = torch.tensor([0.25, 0.5, 0.2]).log()
    assert dreamer.sample(short, drawn()).tolist() == [0, 0, 1]


def test_without_a_generator_the_most_likely():
    log_probs = torch.log_softmax(torch.randn(100, 2, 5), -1)
    modes = dreamer.sample(log_probs, None)
    assert torch.equal(modes, one_hot(log_probs.argmax(-1), 5))


@pytest.mark.parametrize("greedy", [True, False])
def test_gradient_goes_straight_through_samples(greedy):
    """As if they were the probabilities; here d(p . c) / d logits = p (c - p . c)."""
    logits, c = torch.randn(4, 5, requires_grad=True), torch.randn(4, 5)
    (
        dreamer.sample(torch.log_softmax(logits, -1), None if greedy else drawn()) * c
    ).sum().backward()
    p = torch.softmax(logits.detach(), -1)
    torch.testing.assert_close(logits.grad, p * (c - (p * c).sum(-1, keepdim=True)))
    assert logits.grad.abs().max() > 0.01


# ---- symlog, and two-hot


def test_symlog_by_hand_and_back():
    """sign(x) log(1 + |x|)."""
    x = torch.tensor([0.0, 1.0, -1.0, math.e - 1, 1 - math.e**5, 1e-8])
    expected = torch.tensor([0.0, math.log(2), -math.log(2), 1.0, -5.0, 1e-8])
    torch.testing.assert_close(dreamer.symlog(x), expected)
    x = torch.logspace(-6, 8, 57, dtype=torch.float64)
    x = torch.cat([-x.flip(0), torch.zeros(1), x])
    torch.testing.assert_close(dreamer.symexp(dreamer.symlog(x)), x, rtol=1e-10, atol=0)
    assert (dreamer.symlog(x).diff() > 0).all()
    x = torch.linspace(-20, 20, 41, dtype=torch.float64)
    torch.testing.assert_close(dreamer.symlog(dreamer.symexp(x)), x)


def test_D13_bins_are_symmetric_and_exponential():
    bins = dreamer.BINS
    assert bins.shape == (255,) and dreamer.NUM_BINS == 255 and bins[127] == 0
    assert torch.equal(bins, -bins.flip(0)) and (bins.diff() > 0).all()
    np.testing.assert_allclose(bins.numpy(), BINS, rtol=1e-5)
    assert bins[-1].item() == pytest.approx(math.exp(20) - 1, rel=1e-6)


def two_hot(x):
    """255 weights, by looking for the two neighbours."""
    weight, x = np.zeros(255), min(max(x, BINS[0]), BINS[-1])
    k = max(bisect.bisect_left(BINS, x) - 1, 0)
    weight[k + 1] = (x - BINS[k]) / (BINS[k + 1] - BINS[k])
    weight[k] = 1 - weight[k + 1]
    return weight


def weights_of(target):
    """The gradient of a cross-entropy is p - t: read t off at equal logits."""
    logits = torch.zeros(len(target), 255, dtype=torch.float64, requires_grad=True)
    dreamer.two_hot_loss(logits, target).sum().backward()
    return 1 / 255 - logits.grad


TARGETS = [0.0, 1.0, -1.0, 0.03, -0.4, 12.3, -700.0, 1e5, -3.3e7, 4.8e8, 1e-9]


def test_D13_two_hot_weights_by_hand():
    """At most two, neighbours, none below 0; they sum to 1 and their mean is the target."""
    actual = weights_of(torch.tensor(TARGETS, dtype=torch.float64)).numpy()
    bins = dreamer.BINS.double().numpy()
    for weight, target in zip(actual, TARGETS):
        np.testing.assert_allclose(weight, two_hot(target), atol=2e-4)
        where = np.flatnonzero(np.abs(weight) > 1e-12)
        assert len(where) <= 2 and where[-1] - where[0] <= 1 and weight.min() > -1e-12
        assert weight.sum() == pytest.approx(1)
        assert weight @ bins == pytest.approx(target, rel=1e-9, abs=1e-12)


def test_D13_two_hot_is_linear_between_bins():
    share = torch.tensor([0.0, 0.25, 0.5, 1.0], dtype=torch.float64)
    for k in (0, 100, 126, 127, 253):
        low, high = dreamer.BINS[k].double(), dreamer.BINS[k + 1].double()
        actual = weights_of(low + share * (high - low))
        torch.testing.assert_close(actual[:, k + 1], share)
        torch.testing.assert_close(actual[:, k], 1 - share)


def test_D13_a_target_on_a_bin_is_that_bin_alone():
    """All 255, 0 among them, to the last bit."""
    logits = torch.randn(255, 255)
    loss = dreamer.two_hot_loss(logits, dreamer.BINS)
    expected = -torch.log_softmax(logits, -1).diagonal()
    assert torch.equal(loss, expected)


def test_D13_targets_out_of_range_are_the_last_bins():
    far = torch.tensor([1e12, math.inf, -1e12, -math.inf, 3e38], dtype=torch.float64)
    actual = weights_of(far)
    for weight, k in zip(actual, (254, 254, 0, 0, 254)):
        torch.testing.assert_close(weight, one_hot(k, 255).double())


def test_D13_two_hot_loss_is_cross_entropy_by_brute_force():
    logits = 3 * torch.randn(3, len(TARGETS), 255)
    target = torch.tensor(TARGETS).expand(3, -1)
    actual = dreamer.two_hot_loss(logits, target)
    assert actual.shape == (3, len(TARGETS))
    log_probs = torch.log_softmax(logits.double(), -1).numpy()
    for i, j in np.ndindex(actual.shape):
        expected = -(two_hot(TARGETS[j]) * log_probs[i, j]).sum()
        assert actual[i, j].item() == pytest.approx(expected, rel=1e-3)


def test_D13_equal_probabilities_are_exactly_zero():
    """A sum from left to right is not: that of float32 is off by more than a half."""
    for constant in (0.0, 3.7, -80.0):
        assert (dreamer.two_hot_mean(torch.full((5, 2, 255), constant)) == 0.0).all()
    naive = sum((b / 255 for b in dreamer.BINS), torch.zeros(()))
    assert abs(naive.item()) > 0.5
    symmetric = torch.randn(4, 128)
    logits = torch.cat([symmetric.flip(1)[:, :-1], symmetric], dim=1)
    assert dreamer.two_hot_mean(logits).abs().max() < 20  # of 4.8e8


def test_D13_two_hot_there_and_back():
    logits = torch.tensor(np.stack([two_hot(x) for x in TARGETS])).log().float()
    actual = dreamer.two_hot_mean(logits)
    np.testing.assert_allclose(actual.numpy(), TARGETS, rtol=1e-4, atol=1e-6)


def test_D13_the_mean_is_taken_in_real_space():
    """Half at symexp(0.157 * 20), half at its mirror's neighbour: no mean of exponents."""
    logits = torch.full((1, 255), -math.inf)
    logits[0, [147, 106]] = 0.0
    expected = (BINS[147] + BINS[106]) / 2
    assert dreamer.two_hot_mean(logits).item() == pytest.approx(expected, rel=1e-4)
    logits = torch.randn(6, 255).double() - (torch.arange(255) - 127).abs()
    expected = torch.softmax(logits, -1).numpy() @ BINS
    np.testing.assert_allclose(dreamer.two_hot_mean(logits.float()), expected, rtol=1e-3, atol=1e-5)


def test_D13_the_loss_is_least_at_the_mean_of_what_comes():
    """Targets -1 and 7 by turns: a network without input learns 3."""
    logits = torch.zeros(255, requires_grad=True)
    opt = torch.optim.Adam([logits], lr=0.3)
    target = torch.tensor([-1.0, 7.0])
    for _ in range(150):
        opt.zero_grad()
        dreamer.two_hot_loss(logits.expand(2, 255), target).mean().backward()
        opt.step()
    assert dreamer.two_hot_mean(logits.detach()).item() == pytest.approx(3, abs=0.05)


# ---- losses of the model


def test_reconstruction_loss_by_hand():
    """A sum over pixels in [0, 1], or over symlog of a vector; one number per step."""
    obs = torch.tensor([0, 51, 255, 102], dtype=torch.uint8).reshape(1, 1, 2, 2, 1)
    decoded = torch.tensor([0.5, 0.2, 0.0, 0.5]).reshape(1, 1, 2, 2, 1)
    assert dreamer.reconstruction_loss(decoded, obs).tolist() == [[pytest.approx(0.25 + 1 + 0.01)]]
    obs = torch.tensor([[[math.e - 1, 0.0], [1 - math.e**2, 3.0]]])
    decoded = torch.tensor([[[0.0, 2.0], [-2.5, math.log(4)]]])
    actual = dreamer.reconstruction_loss(decoded, obs)
    torch.testing.assert_close(actual, torch.tensor([[5.0, 0.25]]))
    obs = torch.randint(256, (3, 2, 4, 4, 3), dtype=torch.uint8)
    decoded = torch.rand(3, 2, 4, 4, 3)
    actual = dreamer.reconstruction_loss(decoded, obs)
    expected = ((decoded.numpy() - obs.numpy() / 255) ** 2).reshape(3, 2, -1).sum(-1)
    np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-5)


def test_D3_continue_loss_by_hand():
    """-log c where it went on, -log(1 - c) where it ended; gradient c - target."""
    probs = torch.tensor([[0.9, 0.2, 0.5]])
    logit = torch.log(probs / (1 - probs)).requires_grad_()
    loss = dreamer.continue_loss(logit, torch.tensor([[0.0, 1.0, 1.0]]))
    expected = torch.tensor([[-math.log(0.9), -math.log(0.8), math.log(2)]])
    torch.testing.assert_close(loss, expected)
    loss.sum().backward()
    torch.testing.assert_close(logit.grad, torch.tensor([[-0.1, 0.2, 0.5]]))


def random_latents(*shape):
    return torch.log_softmax(torch.randn(*shape, 2, 3, dtype=torch.float64), -1)


def test_D11_kl_is_that_of_torch():
    """Summed over the groups. Not symmetric, 0 for equals."""
    log_q, log_p = random_latents(4, 3), random_latents(4, 3)

    def joint(log_probs):
        groups = torch.distributions.OneHotCategorical(logits=log_probs)
        return torch.distributions.Independent(groups, 1)

    divergence = torch.distributions.kl_divergence
    torch.testing.assert_close(dreamer.kl(log_q, log_p), divergence(joint(log_q), joint(log_p)))
    assert (dreamer.kl(log_q, log_p) - dreamer.kl(log_p, log_q)).abs().max() > 0.05
    assert dreamer.kl(log_q, log_q).abs().max() == 0
    torch.testing.assert_close(dreamer.entropy_of(log_q).sum(-1), joint(log_q).entropy())


def test_D11_each_side_of_the_kl_has_its_own_gradient():
    """Both have the value KL(q || p), here without free nats; dynamics moves p alone, and by
    p - q in logits, representation q alone."""
    q_logits = torch.randn(4, 3, 2, 3, dtype=torch.float64, requires_grad=True)
    p_logits = torch.randn(4, 3, 2, 3, dtype=torch.float64, requires_grad=True)
    log_q, log_p = torch.log_softmax(q_logits, -1), torch.log_softmax(p_logits, -1)
    dynamics, representation = dreamer.kl_losses(log_q, log_p, 0.0)
    expected = torch.zeros(4, 3, dtype=torch.float64)
    q, p = log_q.detach().exp(), log_p.detach().exp()
    for b, t, s, c in np.ndindex(4, 3, 2, 3):
        expected[b, t] += q[b, t, s, c] * (q[b, t, s, c] / p[b, t, s, c]).log()
    for loss in (dynamics, representation):
        assert loss.shape == (4, 3)
        torch.testing.assert_close(loss.detach(), expected)
    options = {"allow_unused": True, "retain_graph": True}
    to_q, to_p = torch.autograd.grad(dynamics.sum(), (q_logits, p_logits), **options)
    assert to_q is None
    torch.testing.assert_close(to_p, p - q)
    to_q, to_p = torch.autograd.grad(representation.sum(), (q_logits, p_logits), **options)
    assert to_p is None
    ratio = (q / p).log()
    torch.testing.assert_close(to_q, q * (ratio - (q * ratio).sum(-1, keepdim=True)))


def latents_of_kl(*kls):
    """q and p of one group that matters and one that does not, [1, T, 2, 2]: q is (1, 0) almost,
    p gives that class exp(-kl)."""
    q = torch.tensor([1 - 1e-12, 1e-12], dtype=torch.float64)
    rows = [torch.tensor([math.exp(-x), 1 - math.exp(-x)], dtype=torch.float64) for x in kls]
    even = torch.full((2,), 0.5, dtype=torch.float64)
    log_q = torch.stack([torch.stack([q, even]) for _ in kls])[None].log()
    log_p = torch.stack([torch.stack([row, even]) for row in rows])[None].log()
    return log_q.requires_grad_(), log_p.requires_grad_()


def test_D11_free_nats_are_of_a_step_before_any_mean():
    """KLs of 0.2 and 3: losses of 1 and 3, and only the second has a gradient."""
    log_q, log_p = latents_of_kl(0.2, 3.0)
    for loss, moved in zip(dreamer.kl_losses(log_q, log_p, 1.0), (log_p, log_q)):
        assert loss[0].tolist() == pytest.approx([1.0, 3.0], abs=1e-6)
        (gradient,) = torch.autograd.grad(loss.mean(), moved, retain_graph=True)
        assert not gradient[0, 0].any() and gradient[0, 1].abs().max() > 0.1


def test_D11_free_nats_are_of_all_groups_together():
    """Two groups of 0.7 each are 1.4, not 2 and not 1."""
    log_q, log_p = latents_of_kl(0.7)
    log_q, log_p = (torch.cat([x[:, :, :1], x[:, :, :1]], dim=2) for x in (log_q, log_p))
    for loss in dreamer.kl_losses(log_q, log_p, 1.0):
        assert loss.item() == pytest.approx(1.4, abs=1e-6)


def test_D11_weights_of_the_two_sides():
    """The revision of 2024; in 2023 the first was 0.5."""
    assert (dreamer.DYNAMICS_COEF, dreamer.REPRESENTATION_COEF) == (1.0, 0.1)
    assert dreamer.Args().free_nats == 1.0


# ---- returns


def test_D5_lambda_returns_by_hand_with_an_end_in_the_middle():
    """gamma 1/2, lambda 1/4, three steps, and state 2 is terminal:
    R_2 = 16 + 1/2 * 12 = 22;  R_1 = 8, since nothing follows;
    R_0 = 4 + 1/2 (3/4 * 40 + 1/4 * 8) = 20. What came with state 0 does not matter."""
    nan = math.nan
    reward = torch.tensor([[nan, 4.0, 8.0, 16.0]])
    cont = torch.tensor([[nan, 1.0, 0.0, 1.0]])
    value = torch.tensor([[nan, 40.0, 80.0, 12.0]])
    returns = dreamer.td_lambda_returns(reward, cont, torch.zeros(1, 4), value, 0.5, 0.25)
    assert returns.tolist() == [[20.0, 8.0, 22.0]]


def test_D5_D15_lambda_returns_by_hand_with_a_cut_in_the_middle():
    """The same, truncated at state 2: R_1 = 8 + 1/2 * 80 = 48, and R_0 = 4 + 1/2 (30 + 12) = 25.
    State 3 is the first of another episode; R_2 would mix the two, and is to be masked."""
    reward = torch.tensor([[0.0, 4.0, 8.0, 16.0]])
    value = torch.tensor([[0.0, 40.0, 80.0, 12.0]])
    is_last = torch.tensor([[0.0, 0.0, 1.0, 0.0]])
    returns = dreamer.td_lambda_returns(reward, torch.ones(1, 4), is_last, value, 0.5, 0.25)
    assert returns.tolist() == [[25.0, 48.0, 22.0]]


def mixture_of_n_steps(reward, cont, is_last, value, gamma, mix, t):
    """R_t as a mean of n-step returns, weighed by the chance to look n steps ahead, where at every
    state one looks on with probability lambda, and never past the last of an episode."""
    last = len(reward) - 1
    total, chance, discount, paid = 0.0, 1.0, 1.0, 0.0
    for k in range(t + 1, last + 1):
        paid += discount * reward[k]
        discount *= gamma * cont[k]
        goes_on = 0.0 if k == last else mix * (1 - is_last[k])
        total += chance * (1 - goes_on) * (paid + discount * value[k])
        chance *= goes_on
    return total


@pytest.mark.parametrize("mix", [0.0, 0.3, 0.95, 1.0])
@pytest.mark.parametrize("gamma", [0.5, 0.997])
def test_D5_lambda_returns_are_mixtures_of_n_step_returns(gamma, mix):
    """Terminated, truncated, and neither; continues between 0 and 1."""
    shape = (7, 9)
    reward, value = torch.randn(shape).double(), 5 * torch.randn(shape).double()
    cont = torch.rand(shape).double()
    cont[torch.rand(shape) < 0.2] = 0
    is_last = (torch.rand(shape) < 0.3).double()
    actual = dreamer.td_lambda_returns(reward, cont, is_last, value, gamma, mix)
    assert actual.shape == (7, 8)
    rows = [x.numpy() for x in (reward, cont, is_last, value)]
    for n, t in np.ndindex(7, 8):
        expected = mixture_of_n_steps(*(x[n] for x in rows), gamma, mix, t)
        assert actual[n, t].item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_S1_S3_nothing_leaks_from_the_next_episode():
    """Before a last step, returns do not change with anything after it; before a terminal one, not
    even with its value. Truncated, the value of the last state counts in full."""
    torch.manual_seed(1)
    reward, value, cont = torch.randn(1, 6), torch.randn(1, 6), torch.ones(1, 6)
    is_last = torch.tensor([[0.0, 0.0, 0.0, 1.0, 0.0, 0.0]])
    changed = [x.clone() for x in (reward, value)]
    for x in changed:
        x[:, 4:] += 100
    for is_terminal in (False, True):
        cont[:, 3] = 1 - float(is_terminal)
        left = dreamer.td_lambda_returns(reward, cont, is_last, value, 0.9, 0.95)
        right = dreamer.td_lambda_returns(changed[0], cont, is_last, changed[1], 0.9, 0.95)
        assert torch.equal(left[:, :3], right[:, :3])
        expected = reward[0, 3] + (0.0 if is_terminal else 0.9 * value[0, 3])
        assert left[0, 2].item() == pytest.approx(expected.item(), rel=1e-5)


# ---- losses of actor and critic


def actor_inputs(num=5, horizon=4, num_actions=3):
    logits = torch.randn(num, horizon, num_actions, dtype=torch.float64, requires_grad=True)
    action = one_hot(torch.randint(num_actions, (num, horizon)), num_actions).double()
    advantage, weight = torch.randn(num, horizon).double(), torch.rand(num, horizon).double()
    return logits, action, advantage, weight


def test_D6_D10_actor_loss_and_gradient_by_brute_force():
    """-mean w (A log pi(a) + c H): a mean over all N H steps, the entropy once. d log pi / d logits
    is a - pi, dH / d logits is -pi (log pi + H)."""
    logits, action, advantage, weight = actor_inputs()
    log_probs = torch.log_softmax(logits, -1)
    loss = dreamer.dreamer_actor_loss(log_probs, action, advantage, weight, 0.3)
    (gradient,) = torch.autograd.grad(loss, logits)
    expected, pi = 0.0, torch.distributions.Categorical(logits=logits.detach())
    log_prob, entropy = pi.log_prob(action.argmax(-1)), pi.entropy()
    for n, t in np.ndindex(5, 4):
        objective = advantage[n, t] * log_prob[n, t] + 0.3 * entropy[n, t]
        expected -= weight[n, t] * objective / 20
        p, H = pi.probs[n, t], entropy[n, t]
        slope = advantage[n, t] * (action[n, t] - p) - 0.3 * p * (p.log() + H)
        torch.testing.assert_close(gradient[n, t], -weight[n, t] * slope / 20)
    assert loss.item() == pytest.approx(expected.item())


def test_D9_actor_gradient_is_that_of_finite_differences():
    """Through the 1 % that is uniform, as the actor has it, with and without entropy."""
    logits, action, advantage, weight = actor_inputs(num=2, horizon=2)

    def loss(x, entropy_coef):
        log_probs = dreamer.unimix(x)
        return dreamer.dreamer_actor_loss(log_probs, action, advantage, weight, entropy_coef)

    for entropy_coef in (0.0, 0.5):
        (gradient,) = torch.autograd.grad(loss(logits, entropy_coef), logits)
        assert gradient.abs().max() > 0.01
        for where in np.ndindex(logits.shape):
            step = torch.zeros_like(logits)
            step[where] = 1e-5
            with torch.no_grad():
                rise = loss(logits + step, entropy_coef) - loss(logits - step, entropy_coef)
            assert gradient[where].item() == pytest.approx(rise.item() / 2e-5, abs=1e-8)


def test_D9_actions_that_paid_become_more_likely():
    """REINFORCE, with an entropy of 0: one step up where A > 0, down where A < 0, by A w."""
    logits = torch.zeros(1, 2, 3, requires_grad=True)
    action = one_hot(torch.tensor([[0, 2]]), 3)
    advantage, weight = torch.tensor([[2.0, -3.0]]), torch.tensor([[1.0, 0.5]])
    loss = dreamer.dreamer_actor_loss(torch.log_softmax(logits, -1), action, advantage, weight, 0.0)
    loss.backward()
    up = -logits.grad[0]
    expected = torch.tensor([[2 / 3, -1 / 3, -1 / 3], [0.25, 0.25, -0.5]])
    torch.testing.assert_close(up, expected * torch.tensor([[1.0], [1.0]]))


def test_D10_entropy_pulls_to_equal_probabilities():
    """Without advantages, the policy of least loss is uniform, and its loss -c log A."""
    logits = torch.randn(1, 1, 4, requires_grad=True)
    opt = torch.optim.Adam([logits], lr=0.1)
    zero, one, action = torch.zeros(1, 1), torch.ones(1, 1), one_hot(torch.tensor([[0]]), 4)
    for _ in range(200):
        loss = dreamer.dreamer_actor_loss(torch.log_softmax(logits, -1), action, zero, one, 0.5)
        opt.zero_grad()
        loss.backward()
        opt.step()
    assert loss.item() == pytest.approx(-0.5 * math.log(4), abs=1e-3)


def test_S9_advantage_and_weight_are_numbers():
    logits, action, advantage, weight = actor_inputs()
    advantage.requires_grad_()
    weight.requires_grad_()
    dreamer.dreamer_actor_loss(
        torch.log_softmax(logits, -1), action, advantage, weight, 0.1
    ).backward()
    assert logits.grad is not None and advantage.grad is None and weight.grad is None


def critic_inputs(num=4, horizon=3):
    logits = torch.randn(num, horizon, 255, requires_grad=True)
    returns, slow_value = 5 * torch.randn(num, horizon), 5 * torch.randn(num, horizon)
    return logits, returns, slow_value, torch.rand(num, horizon)


def test_D14_critic_loss_by_brute_force():
    """mean w (CE(R) + CE(slow)): both count in full."""
    logits, returns, slow_value, weight = critic_inputs()
    loss = dreamer.dreamer_critic_loss(logits, returns, slow_value, weight)
    log_probs, expected = torch.log_softmax(logits.detach().double(), -1).numpy(), 0.0
    for n, t in np.ndindex(4, 3):
        target = two_hot(returns[n, t].item()) + two_hot(slow_value[n, t].item())
        expected -= weight[n, t].item() * (target * log_probs[n, t]).sum() / 12
    assert loss.item() == pytest.approx(expected, rel=1e-4)


def test_S9_targets_of_the_critic_are_numbers():
    logits, *targets = critic_inputs()
    for x in targets:
        x.requires_grad_()
    dreamer.dreamer_critic_loss(logits, *targets).backward()
    assert logits.grad is not None and all(x.grad is None for x in targets)


def test_S8_no_broadcast():
    """[N, H] with [N, H, 1], [1, H] or [H, N] is refused by every loss."""
    logits, action, advantage, weight = actor_inputs(num=3, horizon=4)
    log_probs = torch.log_softmax(logits, -1)
    good = [log_probs, action, advantage, weight]
    wrong = {1: action[:1], 2: advantage[:1], 3: weight[..., None]}
    wrong_too = {1: action.argmax(-1), 2: advantage.T, 3: weight[:, :1]}
    for where, x in [*wrong.items(), *wrong_too.items()]:
        with pytest.raises(AssertionError):
            dreamer.dreamer_actor_loss(*good[:where], x, *good[where + 1 :], 0.1)
    good = [*critic_inputs()]
    for where, x in itertools.product((1, 2, 3), (good[1][:1], good[1].T, good[1][..., None])):
        with pytest.raises(AssertionError):
            dreamer.dreamer_critic_loss(*good[:where], x, *good[where + 1 :])
    with pytest.raises(AssertionError):
        dreamer.two_hot_loss(torch.zeros(3, 4, 255), torch.zeros(3, 1))
    with pytest.raises(AssertionError):
        dreamer.two_hot_loss(torch.zeros(3, 254), torch.zeros(3))
    with pytest.raises(AssertionError):
        dreamer.continue_loss(torch.zeros(3, 4, 1), torch.zeros(3, 4))
    with pytest.raises(AssertionError):
        dreamer.reconstruction_loss(torch.zeros(3, 4, 2), torch.zeros(3, 1, 2))
    with pytest.raises(AssertionError):
        dreamer.kl_losses(random_latents(3, 4), random_latents(3, 1), 1.0)
    with pytest.raises(AssertionError):
        dreamer.kl_losses(random_latents(3), random_latents(3), 1.0)
    for where, x in itertools.product(range(4), (torch.zeros(3, 1), torch.zeros(4, 3))):
        columns = [torch.zeros(3, 4)] * 4
        with pytest.raises(AssertionError):
            dreamer.td_lambda_returns(*columns[:where], x, *columns[where + 1 :], 0.9, 0.9)
    with pytest.raises(AssertionError):
        dreamer.td_lambda_returns(*[torch.zeros(4)] * 4, 0.9, 0.9)


def test_S8_losses_are_means_of_rows():
    """Of one row alone, of all together; and a weight belongs to its own row."""
    logits, action, advantage, weight = actor_inputs()
    log_probs = torch.log_softmax(logits.detach(), -1)
    rows = (log_probs, action, advantage, weight)
    whole = dreamer.dreamer_actor_loss(*rows, 0.1)
    parts = [dreamer.dreamer_actor_loss(*(x[n : n + 1] for x in rows), 0.1) for n in range(5)]
    torch.testing.assert_close(whole, torch.stack(parts).mean())
    assert abs(whole - dreamer.dreamer_actor_loss(*rows[:3], weight.roll(1, 0), 0.1)) > 1e-3
    rows = [x.detach() for x in critic_inputs()]
    whole = dreamer.dreamer_critic_loss(*rows)
    parts = [dreamer.dreamer_critic_loss(*(x[n : n + 1] for x in rows)) for n in range(4)]
    torch.testing.assert_close(whole, torch.stack(parts).mean())
    assert abs(whole - dreamer.dreamer_critic_loss(*rows[:3], rows[3].roll(1, 0))) > 1e-3


# ---- replay


COLUMNS = ("obs", "action", "reward", "is_first", "is_last", "is_terminal")


class Streams:
    """A buffer, and beside it lists of all that it was given. Every row has a number of its own."""

    def __init__(self, capacity, num_envs, obs_shape=(2,)):
        self.buffer = dreamer.Buffer(capacity, num_envs, obs_shape)
        self.rows = [[] for _ in range(num_envs)]
        self.kept, self.obs_shape = capacity // num_envs, obs_shape

    def add(self, env):
        number = len(self.rows[env])
        first, last = number % 5 == 0, number % 5 == 4
        flags = {"is_first": first, "is_last": last, "is_terminal": last and number % 2 == 0}
        is_image = len(self.obs_shape) == 3
        obs = np.full(self.obs_shape, 16 * env + number) if is_image else np.array([env, number])
        self.buffer.add(env, obs, reward=number / 8, **flags)
        row = {"obs": obs, "reward": number / 8, **flags, "action": 0, "number": number}
        self.rows[env].append(row)

    def act(self, actions):
        self.buffer.set_actions(np.array(actions))
        for rows, action in zip(self.rows, actions):
            rows[-1]["action"] = action

    def valid(self, length):
        """All sequences that there are, as (environment, number of the first row)."""
        for env, rows in enumerate(self.rows):
            for first in range(max(0, len(rows) - self.kept), len(rows) - length + 1):
                yield env, first


def test_D18_sequences_by_brute_force_while_the_ring_wraps():
    """Contiguous, of one environment, never across the place where the ring is written; whatever
    came with a row comes with it. Streams grow at different speeds, one not at all for a while."""
    streams = Streams(capacity=3 * 7 + 2, num_envs=3)
    rng, generator, spans = np.random.default_rng(0), drawn(), set()
    for env in (0, 1, 2):
        streams.add(env)
    for step in range(60):
        streams.act(rng.integers(3, size=3).tolist())
        for env in range(3):
            for _ in range(1 + (step % (env + 2) == 0) if step >= 10 or env < 2 else 0):
                streams.add(env)
        if len(streams.rows[0]) < 4:
            continue
        before = {name: column.copy() for name, column in streams.buffer.columns.items()}
        batch = dict(zip(COLUMNS, streams.buffer.sample(40, 4, generator), strict=True))
        for name, column in streams.buffer.columns.items():
            np.testing.assert_array_equal(column, before[name])
        valid = set(streams.valid(4))
        for b in range(40):
            env, first = batch["obs"][b, 0].int().tolist()
            assert (env, first) in valid
            rows = streams.rows[env][first : first + 4]
            spans.add((first % 7) + 4 > 7)  # the sequence wraps
            for t, row in enumerate(rows):
                assert batch["obs"][b, t].tolist() == [env, row["number"]]
                assert batch["action"][b, t] == row["action"]
                assert batch["reward"][b, t] == row["reward"]
                assert batch["is_first"][b, t] == (t == 0 or row["is_first"])
                assert batch["is_last"][b, t] == row["is_last"]
                assert batch["is_terminal"][b, t] == row["is_terminal"]
    assert spans == {True, False} and min(len(rows) for rows in streams.rows) > 20


@pytest.mark.parametrize("num_rows", [(9, 4, 3, 12), (40, 33, 2, 50)])
def test_D18_every_start_is_equally_likely(num_rows):
    """Streams of several lengths, one shorter than a sequence; before and after the ring wraps."""
    streams = Streams(capacity=4 * 14, num_envs=4)
    for env, num in enumerate(num_rows):
        for _ in range(num):
            streams.add(env)
    valid = list(streams.valid(4))
    assert len(valid) == (16 if num_rows[0] == 9 else 33)
    obs, counts = streams.buffer.sample(1000 * len(valid), 4, drawn())[0], {}
    for env, first in obs[:, 0].int().tolist():
        counts[env, first] = counts.get((env, first), 0) + 1
    assert counts.keys() == set(valid)
    # 1000 each, with a standard deviation of 32
    assert 840 < min(counts.values()) < 1000 < max(counts.values()) < 1160


def test_D18_sequences_may_be_as_long_as_what_there_is():
    """The only start, in the only stream that is long enough; the whole ring after it wrapped."""
    streams = Streams(capacity=2 * 6, num_envs=2)
    for env, num in ((0, 6), (1, 5)):
        for _ in range(num):
            streams.add(env)
    assert streams.buffer.sample(20, 6, drawn())[0][:, 0].tolist() == [[0, 0]] * 20
    for _ in range(7):
        streams.add(1)
    starts = {tuple(row) for row in streams.buffer.sample(60, 6, drawn())[0][:, 0].tolist()}
    assert starts == {(0, 0), (1, 6)}


def test_columns_have_the_types_that_networks_want():
    streams = Streams(capacity=20, num_envs=2, obs_shape=(4, 4, 3))
    for _ in range(5):
        streams.add(0)
        streams.add(1)
    obs, action, *others = streams.buffer.sample(3, 2, drawn())
    assert obs.dtype == torch.uint8 and obs.shape == (3, 2, 4, 4, 3)
    assert action.dtype == torch.int64 and action.shape == (3, 2)
    assert all(x.dtype == torch.float32 and x.shape == (3, 2) for x in others)
    assert (obs[:, 1].int() - obs[:, 0].int() == 1).all()  # frames are those of their rows


def test_S17_a_restored_ring_goes_on_as_if_nothing_had_happened():
    """Before the first row, half full, full, and wrapped; streams of unequal length."""
    for num_rows in (1, 4, 8, 19):
        streams = Streams(capacity=2 * 8, num_envs=2)
        for k in range(num_rows):
            streams.add(0)
            if k % 3 > 0 or k == 0:
                streams.add(1)
        streams.act([1, 2])
        file = io.BytesIO()
        torch.save(streams.buffer.state(), file)
        file.seek(0)
        other = dreamer.Buffer(2 * 8, 2, (2,))
        other.load_state(torch.load(file, weights_only=True))
        original = streams.buffer
        for _ in range(6):
            obs = np.array([9, len(streams.rows[0])])
            for buffer in (original, other):
                buffer.add(0, obs, 1.0, is_first=True)
                buffer.set_actions(np.array([2, 0]))
            if min(original.size) >= 3:
                left, right = original.sample(30, 3, drawn()), other.sample(30, 3, drawn())
                assert all(torch.equal(x, y) for x, y in zip(left, right))
        assert_same(original.state(), other.state())


def test_state_of_a_ring_is_no_larger_than_what_it_holds():
    """A checkpoint has the filled part: 10 rows of 50,000 that would take 150 MB."""
    streams = Streams(capacity=50_000, num_envs=2, obs_shape=(32, 32, 3))
    for _ in range(5):
        streams.add(0)
        streams.add(1)
    file = io.BytesIO()
    torch.save(streams.buffer.state(), file)
    assert 10 * (32 * 32 * 3 + 24) < file.tell() < 10 * (32 * 32 * 3 + 24) + 6000


def stream_of(env):
    """What a buffer should hold of an environment's own notes."""
    rows = []
    for row in env.rows:
        is_last = row.get("end", False) or row.get("cut", False)
        flags = (row.get("first", 0), float(is_last), float(row.get("end", False)))
        rows.append((row["obs"].tolist(), row.get("action", 5) - 5, row["reward"], *flags))
    return rows


def test_D2_D4_S5_rows_are_what_the_environments_showed(walk):
    """Row for row, and nothing else: the first of an episode with is_first and no reward; the last
    with its reward and its kind of end, but no action; every action with what it was a reaction to.
    Nothing crosses a reset: after a last row comes the first one of the next episode."""
    args = replace(walk, env_id="Tally-v0", total_timesteps=90, replay_ratio=0.5)
    dreamer.train(args)
    buffer, lengths, ends = load(args.run_dir)["buffer"], set(), set()
    for i, env in enumerate(TallyEnv.made[:3]):
        expected = stream_of(env)
        assert buffer["size"][i] == buffer["position"][i] == len(expected) > 20
        for row, (obs, action, reward, *flags) in enumerate(expected):
            assert buffer["obs"][row, i].tolist() == obs
            assert buffer["action"][row, i] == action
            assert buffer["reward"][row, i] == reward
            assert [buffer[name][row, i].item() for name in COLUMNS[3:]] == flags
        for before, after in itertools.pairwise(expected):
            assert (before[4] == 1) == (after[3] == 1)  # last, first
            lengths.add(before[0][1] if before[4] else None)
            ends.add((before[4], before[5]))
    assert lengths == {None, 1, 2, 3, 4} and ends == {(0, 0), (1, 0), (1, 1)}


def test_S1_D3_truncated_is_last_but_not_terminal(walk, spy):
    """What the continue head learns, and what the returns of the critic see."""
    losses, returns = spy("continue_loss"), spy("td_lambda_returns")
    args = replace(walk, env_id="Tally-v0")
    dreamer.train(args)
    cuts = 0
    buffer = load(args.run_dir)["buffer"]
    assert (buffer["is_terminal"] <= buffer["is_last"]).all()
    for (_, is_terminal, _), (_, cont, is_last, *_) in zip(losses, returns[1::2], strict=True):
        assert torch.equal(cont, 1 - is_terminal[:, -3:])
        cuts += (is_last * cont).sum().item()
    for _, _, is_last, *_ in returns[::2]:
        assert not is_last.any()  # nothing is cut in imagination
    assert cuts > 10


def test_D2_last_actions_are_those_of_the_row_before(walk, spy):
    """In the tally environment one sees the action that led to a row; the networks are given the
    same, and none at the start of a sequence, or, by way of is_first, of an episode."""
    observes = spy("observe", dreamer.RSSM)
    batches = spy("sample", dreamer.Buffer)
    dreamer.train(replace(walk, env_id="Tally-v0"))
    learned = [call for call in observes if call[2].shape[1] == 4]
    assert len(learned) == len(batches) == 16
    count = 0
    for (_, _, last_action, is_first, h, z, _, _), (*_, batch) in zip(learned, batches):
        assert torch.equal(is_first, batch[3]) and is_first[:, 0].all()
        assert not h.any() and not z.any() and not last_action[:, 0].any()
        for b, t in np.argwhere(is_first.numpy() == 0):
            assert last_action[b, t].tolist() == [float(batch[0][b, t, 2] == k) for k in (5, 6, 7)]
            count += 1
    assert count > 80


def test_S18_environment_i_plays_episodes_i_and_every_kth_after(walk):
    """Each from a seed that (seed, k) makes; evaluations have their own."""
    args = replace(walk, env_id="Tally-v0", eval_episodes=4, eval_seed=77)
    dreamer.train(args)
    for i, env in enumerate(TallyEnv.made[:3]):
        seeds = [row["seed"] for row in env.rows if "seed" in row]
        expected = [
            np.random.SeedSequence((1, i + 3 * k)).generate_state(1)[0] for k in range(len(seeds))
        ]
        assert seeds == expected and len(seeds) > 4
    evaluations = [env.rows[0]["seed"] for env in TallyEnv.made[3:]]
    assert evaluations == [77, 78, 79, 80] * 2


# ---- the whole loop, by hand


def linear(p, name, x):
    bias = p.get(f"{name}.bias")
    return x @ p[f"{name}.weight"].T + (0 if bias is None else bias)


def normed(x, scale):
    """RMS norm, then SiLU, over the last dimension."""
    x = x / (x.square().mean(dim=-1, keepdim=True) + 1e-4).sqrt() * scale
    return x * torch.sigmoid(x)


def layers_of(p, name, num_layers, x):
    for k in range(num_layers):
        x = normed(linear(p, f"{name}.{k}.0", x), p[f"{name}.{k}.1.weight"])
    return x


def head_of(p, name, num_layers, x):
    return linear(p, f"{name}.{num_layers}", layers_of(p, name, num_layers, x))


class ByHand:
    """Dreamer once more: rows in lists, one sequence and one step at a time where it matters, sums
    in place of recursions, torch.distributions, no slices of tensors; draws in the same order."""

    def __init__(self, args, clips=(1000.0, 100.0)):
        self.args, self.clips, self.dtype = args, clips, torch.get_default_dtype()
        self.envs = [gym.make(args.env_id) for _ in range(args.num_envs)]
        self.is_image = args.env_id == "Film-v0"
        torch.manual_seed(args.seed)
        shape = self.envs[0].observation_space.shape
        networks = dreamer.build_networks(shape, 3, NANO)
        self.model, self.actor, self.critic = (
            {name: x.detach().clone().requires_grad_() for name, x in net.named_parameters()}
            for net in networks
        )
        self.slow = {name: x.detach().clone() for name, x in self.critic.items()}
        self.opts = [
            torch.optim.Adam(p.values(), foreach=False)
            for p in (self.model, self.actor, self.critic)
        ]
        self.generator = torch.Generator().manual_seed(args.seed)
        self.streams = [[] for _ in self.envs]
        self.scale, self.scales, self.num_updates, self.clipped = 0.0, [], 0, [0, 0, 0]
        self.nats, self.starts = [], set()

    # networks

    def seen_as(self, obs):
        """As a buffer keeps it, and then as networks see it."""
        if self.is_image:
            return torch.tensor(obs).float().div(255).sub(0.5).to(self.dtype)
        x = torch.tensor(np.asarray(obs, np.float32)).to(self.dtype)
        return torch.where(x < 0, -torch.log(1 - x), torch.log(1 + x))

    def embed(self, x):
        """[N, 2] or [N, 8, 8, 3]"""
        p = self.model
        if not self.is_image:
            return layers_of(p, "encoder.net", 3, x)
        kernel, bias = p["encoder.net.0.weight"], p["encoder.net.0.bias"]
        x = torch.nn.functional.conv2d(x.permute(0, 3, 1, 2), kernel, bias, stride=2, padding=1)
        return normed(x.permute(0, 2, 3, 1), p["encoder.net.1.weight"]).reshape(len(x), -1)

    def decode(self, features):
        p = self.model
        if not self.is_image:
            return head_of(p, "decoder.net", 3, features)
        x = linear(p, "decoder.input", features).reshape(-1, 4, 4, 2)
        x = normed(x, p["decoder.net.0.weight"]).permute(0, 3, 1, 2)
        kernel, bias = p["decoder.net.2.weight"], p["decoder.net.2.bias"]
        x = torch.nn.functional.conv_transpose2d(x, kernel, bias, stride=2, padding=1)
        return torch.sigmoid(x).permute(0, 2, 3, 1)

    def recur(self, h, z, action):
        p, mixed = self.model, []
        parts = [
            normed(linear(p, f"rssm.from_{name}.0", x), p[f"rssm.from_{name}.1.weight"])
            for name, x in (("h", h), ("z", z), ("action", action))
        ]
        inputs = torch.cat(parts, dim=1)
        for block in range(2):
            rows = slice(3 * block, 3 * block + 3)
            own = h[:, rows] @ p["rssm.mix_h.weight"][block] + p["rssm.mix_h.bias"][block]
            mixed.append(own + inputs @ p["rssm.mix_inputs.weight"][rows].T)
        mixed = normed(torch.cat(mixed, dim=1), p["rssm.mix_norm.0.weight"])
        new = []
        for block in range(2):
            rows = slice(3 * block, 3 * block + 3)
            gates = mixed[:, rows] @ p["rssm.gates.weight"][block] + p["rssm.gates.bias"][block]
            candidate = torch.tanh(torch.sigmoid(gates[:, :3]) * gates[:, 3:6])
            update = torch.sigmoid(gates[:, 6:] - 1)
            new.append(update * candidate + (1 - update) * h[:, rows])
        return torch.cat(new, dim=1)

    def mixture(self, logits):
        return 0.99 * torch.softmax(logits, dim=-1) + 0.01 / 3

    def prior(self, h):
        return self.mixture(head_of(self.model, "rssm.prior_net", 2, h).reshape(-1, 2, 3))

    def posterior(self, h, embed):
        p = self.model
        x = linear(p, "rssm.posterior_h", h) + linear(p, "rssm.posterior_embed", embed)
        x = normed(x, p["rssm.posterior_net.0.weight"])
        return self.mixture(linear(p, "rssm.posterior_net.2", x).reshape(-1, 2, 3))

    def pi(self, features):
        return self.mixture(head_of(self.actor, "net", 3, features))

    def draw(self, probs):
        """Classes [.., 1] of uniform numbers."""
        uniform = torch.rand(*probs.shape[:-1], 1, generator=self.generator)
        sums = probs.detach().cumsum(dim=-1)
        return torch.searchsorted(sums, uniform).clamp(max=2)[..., 0]

    def mean(self, logits):
        return torch.softmax(logits, dim=-1) @ torch.tensor(BINS).to(self.dtype)

    def cross_entropy(self, logits, targets):
        """Two-hot, of rows."""
        rows = [two_hot(x) for x in targets.flatten().tolist()]
        target = torch.tensor(np.stack(rows)).to(self.dtype).reshape(logits.shape)
        return -(target * torch.log_softmax(logits, dim=-1)).sum(dim=-1)

    # playing

    def start(self, i, episode):
        seed = np.random.SeedSequence((self.args.seed, episode)).generate_state(1)[0]
        obs = self.envs[i].reset(seed=int(seed))[0]
        self.keep(i, obs, 0.0, first=1.0)
        return obs

    def keep(self, i, obs, reward, first=0.0, last=0.0, terminal=0.0):
        row = {"obs": obs, "reward": np.float32(reward).item(), "action": None}
        self.streams[i].append(row | {"first": first, "last": last, "terminal": terminal})

    def run(self):
        args = self.args
        episode = list(range(args.num_envs))
        obs = [self.start(i, i) for i in episode]
        h, z, last = (torch.zeros(args.num_envs, dim) for dim in (6, 6, 3))
        owed = 0.0
        for step in range(args.num_envs, args.total_timesteps + 1, args.num_envs):
            with torch.no_grad():
                embed = self.embed(torch.stack([self.seen_as(x) for x in obs]))
                h = self.recur(h, z, last)
                z = torch.eye(3)[self.draw(self.posterior(h, embed))].flatten(1)
                last = torch.eye(3)[self.draw(self.pi(torch.cat([h, z], dim=1)))]
            for i, env in enumerate(self.envs):
                action = last[i].tolist().index(1)
                self.streams[i][-1]["action"] = action
                obs[i], reward, end, cut, _ = env.step(5 + action)
                self.keep(i, obs[i], reward, last=float(end or cut), terminal=float(end))
                if end or cut:
                    episode[i] += args.num_envs
                    obs[i] = self.start(i, episode[i])
                    for x in (h, z, last):
                        x[i] = 0
            if step > args.learning_starts:
                owed += min(args.num_envs, step - args.learning_starts) * args.replay_ratio
            while owed >= args.batch_size:
                owed -= args.batch_size
                self.num_updates += 1
                self.learn(self.draw_sequences())

    def draw_sequences(self):
        """Of all that there are, in the order of environments and of time."""
        args, found = self.args, []
        for stream in self.streams:
            kept = stream[-(args.buffer_capacity // args.num_envs) :]
            for first in range(len(kept) - args.sequence_length + 1):
                found.append(kept[first : first + args.sequence_length])
        num = args.batch_size // args.sequence_length
        draws = torch.randint(len(found), (num,), generator=self.generator)
        return [found[k] for k in draws.tolist()]

    # learning

    def factor(self):
        """Linear: over `warmup` updates up to 1, over the rest of them down to 0."""
        args = self.args
        budget = args.total_timesteps - args.learning_starts
        last, warmup = math.floor(budget * args.replay_ratio / args.batch_size), args.warmup_updates
        if args.lr_schedule == "constant":
            return 1.0
        if self.num_updates <= warmup:
            return self.num_updates / warmup
        return (last - self.num_updates + 1) / (last - warmup)

    def step(self, which, loss, rate):
        opt, clip = self.opts[which], self.clips[min(which, 1)]
        opt.param_groups[0]["lr"] = rate * self.factor()
        opt.zero_grad()
        loss.backward()
        gradients = [x.grad for x in opt.param_groups[0]["params"]]
        norm = math.sqrt(sum(x.square().sum().item() for x in gradients))
        if norm > clip:
            self.clipped[which] += 1
            for x in gradients:
                x *= clip / (norm + 1e-6)
        opt.step()

    def learn(self, sequences):
        args, num, length = self.args, len(sequences), self.args.sequence_length
        first_start = length - (args.imagine_last or length)

        # the model: one step of all sequences after the other
        h, z = torch.zeros(num, 6), torch.zeros(num, 6)
        last, states, loss = torch.zeros(num, 3), [], 0.0
        embeds = [
            self.embed(torch.stack([self.seen_as(rows[t]["obs"]) for rows in sequences]))
            for t in range(length)
        ]
        for t in range(length):
            for b, rows in enumerate(sequences):
                if t == 0 or rows[t]["first"]:
                    mask = torch.ones(num, 1)
                    mask[b] = 0
                    h, z, last = mask * h, mask * z, mask * last
            h = self.recur(h, z, last)
            q, p = self.posterior(h, embeds[t]), self.prior(h)
            z = (torch.eye(3)[self.draw(q)] + q - q.detach()).reshape(num, 6)
            features = torch.cat([h, z], dim=1)
            states.append((h, z))
            last = torch.stack([torch.eye(3)[rows[t]["action"] or 0] for rows in sequences])

            target = torch.stack([self.seen_as(rows[t]["obs"]) for rows in sequences])
            if self.is_image:
                target = target + 0.5
            loss = loss + (self.decode(features) - target).square().sum()
            reward = torch.tensor([rows[t]["reward"] for rows in sequences])
            loss = (
                loss + self.cross_entropy(head_of(self.model, "reward", 1, features), reward).sum()
            )
            goes_on = torch.sigmoid(head_of(self.model, "cont", 1, features))[:, 0]
            for b, rows in enumerate(sequences):
                ended = rows[t]["terminal"] == 1
                loss = loss - torch.log(1 - goes_on[b] if ended else goes_on[b])
                for left, right, coef in ((q.detach(), p, 1.0), (q, p.detach(), 0.1)):
                    groups = zip(left[b], right[b])
                    nats = sum((x * (x / y).log()).sum() for x, y in groups)
                    self.nats.append(nats.item())
                    loss = loss + coef * (nats if nats > args.free_nats else 0 * nats)
        self.step(0, loss / (num * length), args.learning_rate)

        # imagination, from the states that were found before that step, sequence by sequence
        starts = [(b, t) for b in range(num) for t in range(first_start, length)]
        with torch.no_grad():
            h = torch.stack([states[t][0][b] for b, t in starts])
            z = torch.stack([states[t][1][b] for b, t in starts])
            features, actions = [torch.cat([h, z], dim=1)], []
            for _ in range(args.horizon):
                actions.append(self.draw(self.pi(features[-1])))
                h = self.recur(h, z, torch.eye(3)[actions[-1]])
                z = torch.eye(3)[self.draw(self.prior(h))].flatten(1)
                features.append(torch.cat([h, z], dim=1))
            reward = [self.mean(head_of(self.model, "reward", 1, x)) for x in features]
            goes_on = [torch.sigmoid(head_of(self.model, "cont", 1, x))[:, 0] for x in features]
            value = [self.mean(head_of(self.critic, "net", 3, x)) for x in features]
            slow = [self.mean(head_of(self.slow, "net", 3, x)) for x in features]
        returns, weight = torch.zeros(2, len(starts), args.horizon)
        for n, (b, t) in enumerate(starts):
            columns = [[x[n].item() for x in xs] for xs in (reward, goes_on, value)]
            never = [0.0] * (args.horizon + 1)
            chance = 1 - sequences[b][t]["terminal"]
            for k in range(args.horizon):
                returns[n, k] = mixture_of_n_steps(
                    columns[0], columns[1], never, columns[2], args.gamma, args.td_lambda, k
                )
                if k > 0:
                    chance *= args.gamma * columns[1][k]
                weight[n, k] = chance
        low, high = np.percentile(returns.double().numpy(), [5, 95])
        self.scale = 0.99 * self.scale + 0.01 * (high - low)
        self.scales.append(self.scale)

        # the critic, in imagination, and on the steps that were replayed
        loss = 0.0
        for k in range(args.horizon):
            logits = head_of(self.critic, "net", 3, features[k])
            both = self.cross_entropy(logits, returns[:, k]) + self.cross_entropy(logits, slow[k])
            loss = loss + (weight[:, k] * both).sum() / weight.numel()
        replayed, count = 0.0, 0
        for n, (b, t) in enumerate(starts):
            if t == length - 1:
                continue
            count += 1
            rows = sequences[b][first_start:]
            self.starts.add((rows[t - first_start]["last"], rows[t - first_start]["terminal"]))
            if rows[t - first_start]["last"]:
                continue
            columns = (
                [row["reward"] for row in rows],
                [1 - row["terminal"] for row in rows],
                [row["last"] for row in rows],
                [returns[m, 0].item() for m, (other, _) in enumerate(starts) if other == b],
            )
            known = mixture_of_n_steps(*columns, args.gamma, args.td_lambda, t - first_start)
            logits = head_of(self.critic, "net", 3, features[0][n : n + 1])
            for target in (known, slow[0][n].item()):
                replayed = replayed + self.cross_entropy(logits, torch.tensor([target]))[0]
        loss = loss + args.replay_critic_coef * replayed / count
        self.step(2, loss, args.actor_critic_learning_rate)
        for name, x in self.slow.items():
            x.copy_((1 - args.tau) * x + args.tau * self.critic[name].detach())

        # the actor
        loss = 0.0
        for k in range(args.horizon):
            pi = torch.distributions.Categorical(probs=self.pi(features[k]))
            advantage = (returns[:, k] - value[k]) / max(1.0, self.scale)
            objective = advantage * pi.log_prob(actions[k])
            objective = objective + args.policy_entropy_coef * pi.entropy()
            loss = loss - (weight[:, k] * objective).sum() / weight.numel()
        self.step(1, loss, args.actor_critic_learning_rate)


@pytest.fixture
def in_doubles(monkeypatch):
    """Networks compute in double precision: in floats, Adam makes steps of the rounding in small
    gradients, and a test that allows for it would allow for mistakes, too."""
    preprocess, sample = dreamer.preprocess, dreamer.Buffer.sample

    def wide(obs):
        return preprocess(obs if obs.dtype == torch.uint8 else obs.double()).double()

    def wider(*args):
        return [x.double() if x.is_floating_point() else x for x in sample(*args)]

    monkeypatch.setattr(dreamer, "preprocess", wide)
    monkeypatch.setattr(dreamer.Buffer, "sample", wider)
    monkeypatch.setattr(dreamer, "BINS", torch.tensor(BINS))
    monkeypatch.setattr(dreamer, "HALF_BINS", torch.tensor(BINS[127:]))
    monkeypatch.setattr(dreamer, "dream", lambda *_: np.zeros((3, 2, 8, 8, 3), np.uint8))
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def assert_as_by_hand(args, rtol, atol, clips=(1000.0, 100.0)):
    dreamer.train(args)
    hand = ByHand(args, clips)
    start = {name: dict(getattr(hand, name)) for name in ("model", "actor", "critic", "slow")}
    start = {name: {k: x.detach().clone() for k, x in p.items()} for name, p in start.items()}
    hand.run()
    checkpoint = load(args.run_dir)
    assert checkpoint["num_updates"] == hand.num_updates
    for name in start:
        actual = checkpoint["slow_critic" if name == "slow" else name]
        assert actual.keys() == start[name].keys()
        for key, wanted in getattr(hand, name).items():
            torch.testing.assert_close(
                actual[key], wanted.detach(), rtol=rtol, atol=atol, msg=f"{name} {key}"
            )
        # all of them moved, so that agreement means something
        moved = [(getattr(hand, name)[k].detach() - x).abs().max() for k, x in start[name].items()]
        assert max(moved) > (0.001 if name == "slow" else 0.01), name
    assert checkpoint["return_scale"].item() == pytest.approx(hand.scale, rel=rtol)
    if args.env_id == "Steps-v0":  # the same numbers were drawn, and no others
        assert torch.equal(checkpoint["generator"], hand.generator.get_state())
    return hand


VARIANTS = {
    "plain": {"total_timesteps": 60},
    "all-starts": {"imagine_last": None, "sequence_length": 6, "learning_starts": 19},
    "small-ring": {"buffer_capacity": 17, "replay_ratio": 3.5, "learning_starts": 14},
    "no-replay-critic": {"replay_critic_coef": 0.0, "policy_entropy_coef": 0.0, "free_nats": 0.0},
    "schedule": {"lr_schedule": "linear", "warmup_updates": 3, "tau": 0.3, "horizon": 5},
    "one-step": {"td_lambda": 0.0, "horizon": 1, "imagine_last": 2, "replay_critic_coef": 2.0},
    "one-env": {"td_lambda": 1.0, "num_envs": 1, "total_timesteps": 30},
}


@pytest.mark.parametrize("flags", VARIANTS.values(), ids=VARIANTS)
def test_whole_loop_by_hand(walk, modules, in_doubles, flags):
    """Terminated and truncated episodes, every draw, three optimisers' worth of parameters, the
    slow critic and the scale of returns, after a few updates."""
    args = replace(walk, **{"total_timesteps": 36} | flags)
    hand = assert_as_by_hand(args, rtol=1e-6, atol=1e-8)
    if args.total_timesteps == 60:
        free = [nats < 0.3 for nats in hand.nats]
        assert 0.1 < np.mean(free) < 0.9 and hand.scales[0] < 1 < hand.scales[-1]
        assert hand.starts == {(0, 0), (1, 0), (1, 1)} and hand.num_updates == 16


def test_whole_loop_by_hand_on_images(film, modules, in_doubles):
    hand = assert_as_by_hand(replace(film, total_timesteps=36), rtol=1e-6, atol=1e-8)
    assert hand.num_updates == 8


def test_D17_whole_loop_by_hand_where_all_gradients_are_clipped(
    walk, modules, in_doubles, monkeypatch
):
    monkeypatch.setattr(dreamer, "MODEL_MAX_GRAD_NORM", 0.3)
    monkeypatch.setattr(dreamer, "MAX_GRAD_NORM", 0.02)
    args = replace(walk, total_timesteps=36)
    hand = assert_as_by_hand(args, rtol=1e-6, atol=1e-8, clips=(0.3, 0.02))
    assert min(hand.clipped) > 3


@pytest.mark.parametrize("kind", ["walk", "film"])
def test_whole_loop_by_hand_in_floats(request, modules, kind):
    """As it runs in earnest: the same to within rounding."""
    args = replace(request.getfixturevalue(kind), total_timesteps=30)
    hand = assert_as_by_hand(args, rtol=1e-2, atol=1e-3)
    assert hand.num_updates == 6


# ---- wiring, seen in runs


def test_each_loss_reaches_its_own_network_and_all_of_it(film, modules, monkeypatch):
    """The model learns from its own losses, critic and actor from theirs: no gradient of one flows
    into another, and none into the slow critic."""
    backward, reached = torch.Tensor.backward, []

    def watched(loss, *args, **kwargs):
        found = []
        for name, module in modules.items():
            parameters = [x for x in module.parameters() if x.requires_grad]
            if parameters:
                options = {"retain_graph": True, "allow_unused": True}
                gradients = torch.autograd.grad(loss, parameters, **options)
                if any(x is not None for x in gradients):
                    assert all(x is not None for x in gradients), name
                    found.append(name)
        reached.append(found)
        return backward(loss, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "backward", watched)
    dreamer.train(replace(film, total_timesteps=30))
    assert reached == [["model"], ["critic"], ["actor"]] * 6
    assert not any(x.requires_grad for x in modules["slow_critic"].parameters())


def test_each_update_moves_its_own_network(walk, modules, monkeypatch):
    """Model, critic with its slow copy, actor, one after the other."""
    moments = []

    def watch(owner, name):
        original = getattr(owner, name)

        def watched(*args, **kwargs):
            moments.append({key: weights(module) for key, module in modules.items()})
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    watch(dreamer.Buffer, "sample")  # before all
    watch(dreamer, "imagine")  # the model is done
    watch(dreamer, "dreamer_actor_loss")  # the critic is done
    dreamer.train(replace(walk, total_timesteps=30))
    moves = [
        {key for key in modules if not torch.equal(before[key], after[key])}
        for before, after in itertools.pairwise(moments)
    ]
    in_turn = itertools.cycle([{"model"}, {"critic", "slow_critic"}, {"actor"}])
    assert moves == list(itertools.islice(in_turn, 3 * 6 - 1))


def gradient_of(loss, parameters):
    return [x is not None for x in torch.autograd.grad(loss, parameters, allow_unused=True)]


def test_D11_each_kl_trains_its_own_part_of_the_model():
    """Dynamics: the prior alone, not even the GRU by way of q; h reaches it, though.
    Representation: posterior, encoder and GRU, but not the prior's own layers."""
    model = nano_networks()[0]
    obs, (_, last_action, is_first, h, z) = torch.randn(3 * 4, 2), sequence(3, 4)
    parts = {
        "encoder": model.encoder,
        "posterior": model.rssm.posterior_net,
        "prior": model.rssm.prior_net,
        "gru": model.rssm.gates,
    }
    reached = []
    for which in (0, 1):
        embed = model.encoder(obs).unflatten(0, (3, 4))
        states, _, log_q = model.rssm.observe(embed, last_action, is_first, h, z, drawn())
        # on a detached h, to see what the losses themselves reach
        for log_p in (model.rssm.prior(states), model.rssm.prior(states.detach())):
            loss = dreamer.kl_losses(log_q, log_p, 0.0)[which].sum()
            names = [
                name
                for name, part in parts.items()
                for x in torch.autograd.grad(
                    loss, next(part.parameters()), retain_graph=True, allow_unused=True
                )
                if x is not None and x.abs().max() > 0
            ]
            reached.append(names)
    assert reached[0] == ["encoder", "posterior", "prior", "gru"]  # by way of h, which saw them
    assert reached[1] == ["prior"]
    assert reached[2] == reached[3] == ["encoder", "posterior", "gru"]


def test_D7_weights_start_with_the_continue_that_is_known(film, modules, spy):
    """0 from a terminal start on, 1 at any other, truncated ones among them; then gamma times what
    the model says, state after state, and never more than gamma^t."""
    losses, targets = spy("dreamer_critic_loss"), spy("continue_loss")
    actor_losses, batches = spy("dreamer_actor_loss"), spy("sample", dreamer.Buffer)
    dreamer.train(film)
    num_ends, num_cuts = 0, 0
    for (_, _, _, weight, _), (_, is_terminal, _), actor, (*_, batch) in zip(
        losses[::2], targets, actor_losses, batches, strict=True
    ):
        is_end = is_terminal[:, -3:].flatten() == 1
        assert weight.shape == (9, 3) and torch.equal(actor[3], weight)
        assert not weight[is_end].any() and (weight[~is_end, 0] == 1).all()
        later = weight[~is_end]
        for t in (1, 2):
            assert (later[:, t] < 0.9 * later[:, t - 1]).all() and (later[:, t] > 0).all()
        num_ends += is_end.sum().item()
        num_cuts += (batch[4] * (1 - batch[5]))[:, -3:].sum().item()
    assert num_ends > 1 and num_cuts > 1


def test_D5_D6_shapes_of_imagination(walk, spy):
    """H = 3: four states, three actions, three returns; 3 starts of 3 sequences."""
    imagined, returns, actor_loss = (
        spy("imagine"),
        spy("td_lambda_returns"),
        spy("dreamer_actor_loss"),
    )
    dreamer.train(replace(walk, total_timesteps=18))
    features, actions = imagined[0][-1]
    assert features.shape == (9, 4, 12) and actions.shape == (9, 3, 3)
    assert returns[0][0].shape == (9, 4) and returns[0][-1].shape == (9, 3)
    assert returns[1][0].shape == (3, 3) and returns[1][-1].shape == (3, 2)
    assert [x.shape for x in actor_loss[0][:4]] == [(9, 3, 3), (9, 3, 3), (9, 3), (9, 3)]
    assert torch.equal(actor_loss[0][1], actions)


@pytest.mark.parametrize("times", [1.0, 1000.0, 1e-3])
def test_D8_advantages_are_scaled_by_their_spread_and_not_below_1(
    walk, modules, spy, monkeypatch, tmp_path, times
):
    """All rewards and values times 1000, once S has adapted: the same advantages, and so the same
    gradient. Times 1/1000: a spread below 1 is left alone, and noise stays noise. Nothing is
    subtracted but the value."""
    two_hot_mean = dreamer.two_hot_mean
    monkeypatch.setattr(dreamer, "two_hot_mean", lambda logits: times * two_hot_mean(logits))
    monkeypatch.setattr(dreamer, "RETURN_SCALE_RATE", 1.0)
    returns, losses = spy("td_lambda_returns"), spy("dreamer_actor_loss")
    dreamer.train(replace(walk, total_timesteps=15))
    advantage, (_, _, _, value, *_, result) = losses[0][2], returns[0]
    low, high = np.percentile(result.numpy(), [5, 95])
    spread = high - low
    assert 2 < spread / times < 500
    expected = (result - value[:, :-1]) / (spread if times >= 1 else 1)
    torch.testing.assert_close(advantage, expected, rtol=1e-4, atol=1e-6)
    assert abs(advantage.mean()) > 0.05 * advantage.std()


def test_D8_the_scale_follows_slowly(walk, modules, spy):
    """S <- 0.99 S + 0.01 (P95 - P5) of all imagined returns, from 0; it is in the checkpoint."""
    returns, scale = spy("td_lambda_returns"), 0.0
    dreamer.train(walk)
    for *_, result in returns[::2]:
        low, high = np.percentile(result.double().numpy(), [5, 95])
        scale = 0.99 * scale + 0.01 * (high - low)
        assert result.shape == (9, 3)
    assert load(walk.run_dir)["return_scale"].item() == pytest.approx(scale, rel=1e-4)
    assert dreamer.RETURN_SCALE_RATE == 0.01


def test_D14_slow_critic_moves_by_two_per_cent(walk, modules):
    """After each update, towards the critic as it is then."""
    assert dreamer.Args().tau == 0.02
    dreamer.train(replace(walk, total_timesteps=15))
    checkpoint = load(walk.run_dir)
    assert checkpoint["num_updates"] == 1
    torch.manual_seed(walk.seed)
    start = nano_networks()[2].state_dict()
    for name, slow in checkpoint["slow_critic"].items():
        expected = 0.98 * start[name] + 0.02 * checkpoint["critic"][name]
        torch.testing.assert_close(slow, expected)
    assert (checkpoint["critic"]["net.3.bias"] - start["net.3.bias"]).abs().max() > 1e-3


def test_D14_the_slow_critic_is_no_target(walk, modules, spy, monkeypatch, tmp_path):
    """Another slow critic: the same returns and advantages, to the last bit; only what holds the
    critic back has changed."""
    runs, make_slow = [], dreamer.deepcopy
    for name in ("one", "other"):
        returns, losses = spy("td_lambda_returns"), spy("dreamer_critic_loss")
        actor_losses = spy("dreamer_actor_loss")
        if name == "other":
            monkeypatch.setattr(dreamer, "deepcopy", lambda x: randomise(make_slow(x), 0.5))
        dreamer.train(replace(walk, total_timesteps=15, run_dir=str(tmp_path / name)))
        runs.append((returns[0][-1], returns[1][-1], actor_losses[0][2], losses[0], losses[1]))
    one, other = runs
    assert all(torch.equal(x, y) for x, y in zip(one[:3], other[:3]))
    for loss, changed in zip(one[3:], other[3:]):
        same = [torch.equal(x, y) for x, y in zip(loss[:4], changed[:4])]
        assert same == [True, True, False, True]


def test_D15_replayed_rewards_train_the_critic(walk, modules, spy):
    """Real rewards and ends, bootstrapped by what imagination makes of each state; rows that are
    the last of their episode do not count."""
    assert dreamer.Args().replay_critic_coef == 0.3
    returns, losses, batches = (
        spy("td_lambda_returns"),
        spy("dreamer_critic_loss"),
        spy("sample", dreamer.Buffer),
    )
    dreamer.train(walk)
    num_masked = 0
    for k, (*_, batch) in enumerate(batches):
        _, _, reward, _, is_last, is_terminal = batch
        imagined, replayed = returns[2 * k : 2 * k + 2]
        expected = (reward[:, -3:], 1 - is_terminal[:, -3:], is_last[:, -3:])
        assert all(torch.equal(x, y) for x, y in zip(replayed[:3], expected))
        assert torch.equal(replayed[3], imagined[-1][:, 0].reshape(3, 3))
        critic, replay_critic = losses[2 * k : 2 * k + 2]
        assert torch.equal(replay_critic[1], replayed[-1])
        assert torch.equal(replay_critic[3], 1 - is_last[:, -3:-1])
        assert torch.equal(replay_critic[0], critic[0][:, 0].reshape(3, 3, 255)[:, :2])
        assert torch.equal(replay_critic[2], critic[2][:, 0].reshape(3, 3)[:, :2])
        num_masked += (replay_critic[3] == 0).sum()
    assert num_masked > 2


def test_D17_huge_gradients_are_clipped(walk, modules, monkeypatch):
    """To 1000 for the model and 100 for the others; the norm before that is what is logged."""
    for name in ("reconstruction_loss", "dreamer_critic_loss", "dreamer_actor_loss"):
        original = getattr(dreamer, name)
        monkeypatch.setattr(dreamer, name, lambda *x, loss=original: 1e9 * loss(*x))
    step, norms = torch.optim.Adam.step, []

    def watched(opt, *args):
        gradients = [x.grad.flatten() for x in opt.param_groups[0]["params"]]
        norms.append(torch.cat(gradients).norm().item())
        return step(opt, *args)

    monkeypatch.setattr(torch.optim.Adam, "step", watched)
    dreamer.train(replace(walk, total_timesteps=24))
    assert norms == pytest.approx([1000, 100, 100] * 4, rel=1e-3)
    for name in ("model", "critic", "actor"):
        assert min(metrics(walk, f"stats/{name}_grad_norm").values()) > 1e4
    assert all(torch.isfinite(weights(module)).all() for module in modules.values())


def test_D17_numbers_as_large_as_floats_can_be(walk):
    """Observations of 3e38 and rewards of -1e30: symlog and two-hot keep everything finite."""
    args = replace(walk, env_id="Extreme-v0")
    dreamer.train(args)
    checkpoint = load(args.run_dir)
    for name in ("model", "actor", "critic", "slow_critic"):
        assert all(torch.isfinite(x).all() for x in checkpoint[name].values())
    assert max(metrics(args, "losses/reconstruction").values()) < 1e5
    assert max(metrics(args, "losses/reward").values()) < 1e3


# ---- how many updates, and when


@pytest.mark.parametrize(
    ("num_envs", "starts", "ratio", "batch", "length"),
    [(8, 1024, 64.0, 256, 16), (3, 14, 2.5, 12, 4), (1, 5, 0.3, 4, 4), (4, 40, 32.0, 4, 2)],
)
def test_D20_updates_are_a_function_of_the_step(num_envs, starts, ratio, batch, length):
    """The largest number for which updates x batch <= ratio x (steps after the first ones): nothing
    is lost by rounding, and at no step are more due than the steps since then explain."""
    args = dreamer.Args(num_envs=num_envs, learning_starts=starts, replay_ratio=ratio)
    args = replace(args, batch_size=batch, sequence_length=length)
    before = 0
    for step in range(0, 3000, num_envs):
        due = dreamer.updates_until(step, args)
        owed = ratio * max(0, step - starts)
        assert due * batch <= owed + 1e-6 and (due + 1) * batch > owed - 1e-6
        assert 0 <= due - before <= math.ceil(num_envs * ratio / batch)
        before = due
    assert due > 100 and dreamer.updates_until(starts, args) == 0


@pytest.mark.parametrize("ratio", [4.0, 2.5, 0.7])
def test_D20_a_run_makes_exactly_the_updates_that_are_due(walk, monkeypatch, ratio):
    """Counted at every step of the environments; a remainder waits for the next one."""
    args = replace(walk, replay_ratio=ratio, log_interval=10**6)
    counts, sample, set_actions = [], dreamer.Buffer.sample, dreamer.Buffer.set_actions

    def counted(*arguments):
        counts[-1] += 1
        return sample(*arguments)

    monkeypatch.setattr(dreamer.Buffer, "sample", counted)
    monkeypatch.setattr(
        dreamer.Buffer, "set_actions", lambda *x: counts.append(0) or set_actions(*x)
    )
    dreamer.train(args)
    total = 0
    for k, count in enumerate(counts, start=1):
        total += count
        assert total == math.floor(max(0, 3 * k - 12) * ratio / 12 + 1e-9)
    assert len(counts) == 20 and load(args.run_dir)["num_updates"] == total > 1


def train_until(args, step, monkeypatch):
    """SIGTERM during a step: the run saves and stops, its schedules being those of the whole."""
    signals, count, set_actions = [], [], dreamer.Buffer.set_actions

    class Caught(dreamer.StopSignal):
        def __enter__(self):
            signals.append(self)
            return super().__enter__()

    def counted(self, *row):
        count.append(row)
        if len(count) * args.num_envs == step:
            signals[0].note(signal.SIGTERM, None)
        return set_actions(self, *row)

    with monkeypatch.context() as patch:
        patch.setattr(dreamer, "StopSignal", Caught)
        patch.setattr(dreamer.Buffer, "set_actions", counted)
        result = dreamer.train(args)
    assert result["step"] == step and result["signal"] == signal.SIGTERM


RESUMED = {
    "vectors": {"env_id": "Tally-v0", "lr_schedule": "cosine", "replay_ratio": 2.5},
    "images": {"env_id": "Film-v0", "buffer_capacity": 30},
}


@pytest.mark.parametrize("flags", RESUMED.values(), ids=RESUMED)
def test_D20_S18_resume_in_the_middle_of_episodes(walk, modules, tmp_path, monkeypatch, flags):
    """The rest of three episodes with what the agent remembered of them, the debt of updates, the
    ring, S and the slow critic, and all that comes after: as if never stopped."""
    whole = replace(walk, total_timesteps=48, eval_interval=20, checkpoint_interval=25, **flags)
    dreamer.train(whole)
    updates, played, new = [], [], set()
    for cut in (9, 21, 30):
        args = replace(whole, run_dir=str(tmp_path / str(cut)))
        train_until(args, cut, monkeypatch)
        stopped = load(args.run_dir)
        updates.append(stopped["num_updates"])
        played.append([len(actions) for actions in stopped["episode_actions"]])
        is_new = torch.tensor([not length for length in played[-1]])
        h, z, action = stopped["memory"]
        assert not h[is_new].any() and (h[~is_new] != 0).any(dim=1).all()
        assert z.sum() == 2 * (~is_new).sum() and action.sum() == (~is_new).sum()
        new |= set(is_new.tolist())
        dreamer.train(replace(args, resume=args.run_dir))
        assert_same(load(whole.run_dir), load(args.run_dir))
        assert log_of(whole) == log_of(args)
    assert updates == ([0, 1, 3] if "lr_schedule" in flags else [0, 3, 6])
    assert any(len(set(lengths)) > 1 for lengths in played)  # each in its own time
    assert new == {False, True}


def test_S18_an_environment_that_ignores_its_seed_is_not_resumed_in_silence(walk):
    args = replace(walk, env_id="ForgetfulChoices-v0", total_timesteps=24)
    dreamer.train(args)
    with pytest.raises(dreamer.InputError, match="plays another episode from the same seed"):
        dreamer.train(replace(args, resume=args.run_dir, total_timesteps=60))


def test_patience_counts_policies_not_evaluations(walk):
    """Every 3 steps one is due, and updates come at 18, 24, 30, ..: there is nothing to evaluate in
    between."""
    args = replace(walk, eval_interval=3, replay_ratio=2.0, total_timesteps=33)
    dreamer.train(args)
    assert list(metrics(args, "eval/return_mean")) == [0, 18, 24, 30, 33]


@pytest.mark.parametrize("interval", [4, 7, 20])
def test_intervals_need_not_be_multiples_of_the_environments(walk, spy, interval):
    """Whenever a multiple went by: evaluation, checkpoint, and an entry in the log."""
    saves = spy("save_atomically")
    args = replace(walk, eval_interval=interval, checkpoint_interval=interval, total_timesteps=48)
    dreamer.train(replace(args, log_interval=interval))
    due = [step for step in range(3, 49, 3) if step // interval > (step - 3) // interval]
    saved = [write.args[0]["step"] for path, write, _ in saves if path.endswith("checkpoint.pt")]
    assert saved == sorted({*due, 48})
    new = [step for step in due if step >= 15]  # with updates since the last one
    assert list(metrics(args, "eval/return_mean")) == sorted({0, *new, 48})
    updates = [0, *range(15, 49, 3)]
    logged = [b for a, b in itertools.pairwise(updates) if b // interval > a // interval]
    assert list(metrics(args, "losses/actor")) == logged


def test_rare_updates_are_logged_when_they_come(walk):
    """Updates at 24, 36, 48 and 60, an interval of 15: an entry for what went by since the last."""
    args = replace(walk, replay_ratio=1.0, log_interval=15)
    dreamer.train(args)
    assert list(metrics(args, "losses/actor")) == [24, 36, 48, 60]
    assert load(args.run_dir)["last_update"] == 60


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_schedules_span_exactly_the_updates_of_the_run(walk, spy, schedule):
    """One factor for the three rates."""
    calls = spy("lr_factor")
    args = replace(walk, lr_schedule=schedule, warmup_updates=2, total_timesteps=36)
    dreamer.train(args)
    assert [call[:2] for call in calls] == [(update, 8) for update in range(1, 9)]
    last = 1 / 6 if schedule == "linear" else (1 + math.cos(math.pi * 5 / 6)) / 2
    assert calls[0][-1] == 0.5 and calls[-1][-1] == pytest.approx(last)
    checkpoint = load(args.run_dir)
    for name, rate in (("model", 1e-2), ("actor", 5e-3), ("critic", 5e-3)):
        assert checkpoint[f"{name}_opt"]["param_groups"][0]["lr"] == pytest.approx(rate * last)
    assert list(metrics(args, "charts/learning_rate").values())[-1] == pytest.approx(
        1e-2 * last, rel=1e-5
    )


# ---- logs, and what a run takes


def test_logged_statistics_are_what_they_say(walk, modules, spy):
    """Of the last update."""
    names = (
        "reconstruction_loss",
        "two_hot_loss",
        "continue_loss",
        "kl_losses",
        "td_lambda_returns",
    )
    calls = {name: spy(name) for name in (*names, "dreamer_critic_loss", "dreamer_actor_loss")}
    dreamer.train(walk)
    log_q, log_p, _, (dynamics, representation) = calls["kl_losses"][-1]
    q, p = log_q.double().exp().numpy(), log_p.double().exp().numpy()
    imagined_reward, cont, _, value, _, _, returns = calls["td_lambda_returns"][-2]
    log_pi = calls["dreamer_actor_loss"][-1][0].double().numpy()
    reward_loss = [call[-1] for call in calls["two_hot_loss"] if call[0].shape == (3, 4, 255)][-1]
    expected = {
        "losses/reconstruction": calls["reconstruction_loss"][-1][-1].mean(),
        "losses/reward": reward_loss.mean(),
        "losses/continue": calls["continue_loss"][-1][-1].mean(),
        "losses/dynamics": dynamics.mean(),
        "losses/representation": 0.1 * representation.mean(),
        "losses/critic": calls["dreamer_critic_loss"][-2][-1],
        "losses/replay_critic": calls["dreamer_critic_loss"][-1][-1],
        "losses/actor": calls["dreamer_actor_loss"][-1][-1],
        "stats/kl": (q * np.log(q / p)).sum(axis=(2, 3)).mean(),
        "stats/prior_entropy": -(p * np.log(p)).sum(axis=(2, 3)).mean(),
        "stats/posterior_entropy": -(q * np.log(q)).sum(axis=(2, 3)).mean(),
        "stats/policy_entropy": -(np.exp(log_pi) * log_pi).sum(axis=2).mean(),
        "stats/return_mean": returns.mean(),
        "stats/return_scale": load(walk.run_dir)["return_scale"],
        "stats/value_mean": value.mean(),
        "stats/imagined_reward": imagined_reward[:, 1:].mean(),
        "stats/imagined_continue": cont[:, 1:].mean(),
    }
    for key, number in expected.items():
        assert metrics(walk, key)[60] == pytest.approx(float(number), rel=1e-4, abs=1e-5), key


def test_D21_returns_of_training_and_of_evaluation_are_told_apart(walk, modules):
    """Noisy episodes as they end, each with its own sum of rewards; and the mean of fresh episodes
    of the most likely actions."""
    args = replace(walk, env_id="Tally-v0", eval_episodes=7, log_interval=10**6)
    result = dreamer.train(args)
    expected = []
    for i, env in enumerate(TallyEnv.made[:3]):
        step, total = 0, 0.0
        for row in env.rows:
            total += row["reward"]
            step += "first" not in row
            if row.get("end") or row.get("cut"):
                expected.append((3 * step, i, total))
                total = 0.0
    logged = [(int(x[0]), float(x[2])) for x in log_of(args) if x[1] == "charts/episodic_return"]
    assert logged == [(step, total) for step, _, total in sorted(expected)] and len(logged) > 10
    policy = dreamer.load_policy(f"{args.run_dir}/checkpoint.pt", device="cpu")
    returns = common.evaluate(
        policy, args.env_id, 7, args.eval_seed, make_env=dreamer.env_maker(args)
    )
    evaluated = metrics(args, "eval/return_mean")
    assert list(evaluated) == [0, 60] and evaluated[60] == pytest.approx(returns.mean(), rel=1e-6)
    assert result["eval/return_mean"] == pytest.approx(returns.mean())
    assert metrics(args, "eval/return_max")[60] == pytest.approx(returns.max(), rel=1e-6)


def test_D19_the_replay_is_small_and_its_bytes_are_told(film, capsys):
    """100,000 steps at most. The line at the start has the bytes of the arrays."""
    assert dreamer.Args().buffer_capacity <= 200_000
    args = replace(film, buffer_capacity=60_001, total_timesteps=15, quiet=False)
    dreamer.train(args)
    told = capsys.readouterr().out.splitlines()[0]
    rows = 3 * 20_000
    expected = rows * (8 * 8 * 3 + 8 + 4 * 4) / 1e6
    assert told.endswith(f"a full replay buffer takes {expected:,.0f} MB") and expected > 12
    buffer = dreamer.Buffer(60_001, 3, (8, 8, 3))
    assert buffer.num_bytes() == sum(x.nbytes for x in buffer.columns.values()) == expected * 1e6
    checkpoint = load(args.run_dir)
    num = sum(x.numel() for part in ("model", "actor", "critic") for x in checkpoint[part].values())
    assert f": {num / 1e6:.1f} million weights;" in told


def test_sizes_in_the_docstring(tmp_path, monkeypatch):
    """A checkpoint at the default size; a step of the replay; and the replay of the paper's set."""
    monkeypatch.undo()  # the real size
    args = dreamer.Args(total_timesteps=136, learning_starts=128, replay_ratio=32.0)
    args = replace(args, eval_episodes=1, run_dir=str(tmp_path / "run"), quiet=True)
    dreamer.train(replace(args, device="cpu", torch_threads=1))
    num_bytes = Path(args.run_dir, "checkpoint.pt").stat().st_size
    buffer = load(args.run_dir)["buffer"]
    replay = sum(x.numel() * x.element_size() for x in buffer.values())
    assert f"takes {(num_bytes - replay) / 1e6:.0f} MB, and" in dreamer.__doc__
    for width in (32, 64):
        per_step = dreamer.Buffer(10, 1, (width, width, 3)).num_bytes() / 10
        assert f"{per_step / 1e3:.1f} KB" in dreamer.__doc__
    assert f"replay takes {5_000_000 * per_step / 1e9:.0f} GB" in dreamer.__doc__


def test_the_command_of_the_docstring_is_the_set_of_the_paper():
    """Whatever the defaults are."""
    command = dreamer.__doc__.split("The paper's set")[1].split("python algos/dreamer.py")[1]
    command = command.split("\n\n")[0].replace("\\\n", " ")
    args = tyro.cli(dreamer.Args, args=shlex.split(command))
    dreamer.check_args(args)
    expected = {
        "batch_size": 16 * 64,
        "sequence_length": 64,
        "imagine_last": 64,
        "horizon": 15,
        "replay_ratio": 32.0,
        "gamma": pytest.approx(1 - 1 / 333, abs=1e-5),
        "td_lambda": 0.95,
        "tau": 0.02,
        "free_nats": 1.0,
        "replay_critic_coef": 0.3,
        "policy_entropy_coef": 3e-4,
        "learning_rate": 4e-5,
        "actor_critic_learning_rate": 4e-5,
        "warmup_updates": 1000,
        "buffer_capacity": 5_000_000,
        "num_envs": 16,
    }
    assert {name: getattr(args, name) for name in expected} == expected
    size = dreamer.SIZES[args.size]
    assert size == dreamer.Size(8192, 32, 64, 1024, 64, 8, 64)
    assert (dreamer.UNIMIX, dreamer.NUM_BINS) == (0.01, 255)


# ---- the policy


def test_S15_one_preprocessing_by_hand():
    """Bytes to [-1/2, 1/2], numbers to their symlog."""
    image = torch.tensor([0, 51, 255], dtype=torch.uint8)
    torch.testing.assert_close(dreamer.preprocess(image), torch.tensor([-0.5, -0.3, 0.5]))
    vector = torch.tensor([0.0, math.e - 1, -3.0])
    expected = torch.tensor([0.0, 1.0, -math.log(4)])
    torch.testing.assert_close(dreamer.preprocess(vector), expected)


@pytest.mark.parametrize("env_id", ["Steps-v0", "Film-v0", "ByteChoice-v0"])
def test_S15_acting_and_learning_see_the_same(walk, spy, modules, monkeypatch, env_id):
    """What act() was shown, step by step, and what the buffer gives back of it: equal embeddings,
    of doubles, images and bytes that are no image."""
    monkeypatch.setattr(common, "evaluate", lambda *_, **__: np.zeros(1))
    calls = spy("observe", dreamer.RSSM)
    args = replace(walk, env_id=env_id, num_envs=1, total_timesteps=15)
    dreamer.train(args)  # 12 steps, and then one update after each
    acted = [call[1][0, 0] for call in calls if call[1].shape[:2] == (1, 1)][:13]
    buffer = load(args.run_dir)["buffer"]
    rows = [k for k in range(int(buffer["size"])) if not buffer["is_last"][k, 0]][:13]
    torch.manual_seed(args.seed)
    obs = buffer["obs"][rows, 0]
    model = nano_networks(tuple(obs.shape[1:]), 2 if env_id == "ByteChoice-v0" else 3)[0]
    with torch.no_grad():
        learned = model.encoder(dreamer.preprocess(obs))
    torch.testing.assert_close(torch.stack(acted), learned)
    assert learned.std(dim=0).max() > 0.01


def by_hand_policy(model, actor, kind, obs):
    """ByHand's networks, the mode of all, one episode: obs [T, ...] -> actions [T], [T, F]"""
    hand = ByHand.__new__(ByHand)
    hand.model, hand.actor = dict(model.named_parameters()), dict(actor.named_parameters())
    hand.is_image, hand.dtype = kind == "film", torch.float32
    h, z, last, actions, features = *(torch.zeros(1, dim) for dim in (6, 6, 3)), [], []
    with torch.no_grad():
        for x in obs:
            h = hand.recur(h, z, last)
            q = hand.posterior(h, hand.embed(hand.seen_as(x)[None]))
            z = torch.eye(3)[q.argmax(dim=-1)].flatten(1)
            features.append(torch.cat([h, z], dim=1))
            actions.append(hand.pi(features[-1]).argmax().item())
            last = torch.eye(3)[actions[-1]][None]
    return actions, torch.cat(features), hand


def walk_obs(kind, num, length):
    if kind == "film":
        return np.random.default_rng(0).integers(256, size=(length, num, 8, 8, 3)).astype(np.uint8)
    return 2 * np.random.default_rng(0).normal(size=(length, num, 2))


@pytest.mark.parametrize("kind", ["walk", "film"])
def test_policy_is_the_mode_of_the_posterior_and_of_the_actor(kind):
    """In the units of the environment, episode by episode in a batch; it remembers, reset() makes
    it forget, and the number of environments may change then."""
    shape = (8, 8, 3) if kind == "film" else (2,)
    model, actor, _ = nano_networks(shape)
    randomise(model, 0.3)
    randomise(actor, 0.1)
    policy = dreamer.LatentPolicy(model, actor, gym.spaces.Discrete(3, start=5))
    obs = walk_obs(kind, 6, 12)
    features = [by_hand_policy(model, actor, kind, obs[:, i])[1] for i in range(6)]
    with torch.no_grad():  # no action is ahead of the others everywhere
        actor.net[-1].bias.sub_(actor.net(torch.cat(features)).mean(dim=0))
    expected = [by_hand_policy(model, actor, kind, obs[:, i])[0] for i in range(6)]
    expected = 5 + np.array(expected).T
    for _ in range(2):
        played = np.stack([policy(x) for x in obs])
        np.testing.assert_array_equal(played, expected)
        policy.reset()
    assert set(expected.flatten()) == {5, 6, 7}
    # alone, it does what it does in company
    np.testing.assert_array_equal([policy(x[2:3])[0] for x in obs], expected[:, 2])
    # without the reset it would have played otherwise
    assert [policy(x[2:3])[0] for x in obs[::-1]] != [policy(x[2:3])[0] for x in obs]


def test_policy_of_a_checkpoint_acts_as_the_run_did(film, modules):
    """load_policy on best.pt and checkpoint.pt, in a wrapped environment."""
    dreamer.train(replace(film, total_timesteps=24))
    obs, played = walk_obs("film", 4, 5), []
    for name in ("best", "checkpoint"):
        policy = dreamer.load_policy(f"{film.run_dir}/{name}.pt", device="cpu")
        played.append(np.stack([policy(x) for x in obs]))
    expected = [
        by_hand_policy(modules["model"], modules["actor"], "film", obs[:, i])[0] for i in range(4)
    ]
    np.testing.assert_array_equal(played[1], 5 + np.array(expected).T)
    np.testing.assert_array_equal(played[0], played[1])
    assert policy.model is modules["model"]  # made once more, for the loaded weights


def test_S19_evaluations_begin_with_an_empty_memory(modules):
    """Two in a row, and one after other episodes: equal returns, and those of a fresh policy."""
    model, actor, _ = nano_networks()
    policy = dreamer.LatentPolicy(model, actor, gym.spaces.Discrete(3, start=5))
    first = common.evaluate(policy, "Steps-v0", 6, 0)
    assert policy.memory is not None
    np.testing.assert_array_equal(common.evaluate(policy, "Steps-v0", 6, 0), first)
    common.evaluate(policy, "Steps-v0", 3, 50)
    np.testing.assert_array_equal(common.evaluate(policy, "Steps-v0", 6, 0), first)
    # an episode is a function of its own seed, whatever is played beside it
    alone = [common.evaluate(policy, "Steps-v0", 1, i)[0] for i in range(6)]
    np.testing.assert_allclose(alone, first, rtol=1e-6)
    assert len(set(first.tolist())) == 6


# ---- pictures


@pytest.fixture
def dreamer_policy():
    """Weights of some size, so that frames differ from each other and actions matter."""
    model, actor, _ = nano_networks((8, 8, 3))
    randomise(model, 0.5)
    randomise(actor, 0.1)
    return dreamer.LatentPolicy(model, actor, gym.spaces.Discrete(3, start=5))


class Scripted(dreamer.LatentPolicy):
    """Its model, but actions that are given."""

    def __init__(self, policy, *actions):
        super().__init__(policy.model, policy.actor, gym.spaces.Discrete(3, start=5))
        self.actions, self.num_seen = actions, 0

    def __call__(self, obs):
        self.num_seen += 1
        return np.array([self.actions[(self.num_seen - 1) % len(self.actions)]])


class StillFilmEnv(FilmEnv):
    """Never ends by itself."""

    def step(self, action):
        return *super().step(action)[:2], False, False, {}


gym.register("StillFilm-v0", StillFilmEnv, max_episode_steps=100)


def frames_of(env_id, actions, seed, **flags):
    """What the environment shows."""
    env = gym.make(env_id)
    for name, value in flags.items():
        setattr(env.unwrapped, name, value)
    frames = [env.reset(seed=seed)[0]]
    for action in actions:
        obs, _, terminated, truncated, _ = env.step(action)
        frames.append(obs)
        if terminated or truncated or len(frames) == 24:
            break
    return np.stack(frames)


def dream_by_hand(policy, frames, actions, context):
    """ByHand's networks and modes: states that see all frames, and states that see some."""
    hand = ByHand.__new__(ByHand)
    hand.model, hand.is_image, hand.dtype = (
        dict(policy.model.named_parameters()),
        True,
        torch.float32,
    )
    rows = []
    with torch.no_grad():
        for num_seen in (len(frames), context):
            h, z, last, row = *(torch.zeros(1, dim) for dim in (6, 6, 3)), []
            for t, frame in enumerate(frames):
                h = hand.recur(h, z, last)
                seen = hand.posterior(h, hand.embed(hand.seen_as(frame)[None]))
                probs = seen if t < num_seen else hand.prior(h)
                z = torch.eye(3)[probs.argmax(dim=-1)].flatten(1)
                row.append(255 * hand.decode(torch.cat([h, z], dim=1))[0].double().numpy())
                last = torch.eye(3)[actions[t] - 5][None] if t < len(actions) else None
            rows.append(np.stack(row))
    return np.stack(rows)  # [2, M, 8, 8, 3], before rounding


def assert_rounded(actual, exact):
    """To the nearest byte; a half may go either way."""
    assert actual.dtype == np.uint8
    np.testing.assert_allclose(actual.astype(float), exact, atol=0.5 + 1e-2)


CYCLE = (5, 7, 6, 7, 5, 5, 6)


def test_dream_by_hand(dreamer_policy):
    """What was there, what is decoded while seeing it, and what is decoded with eyes closed after
    three frames."""
    policy = Scripted(dreamer_policy, *CYCLE)
    actions = [CYCLE[t % 7] for t in range(23)]
    film = dreamer.dream(policy, gym.make("StillFilm-v0"), seed=4)
    frames = frames_of("StillFilm-v0", actions, seed=4)
    assert film.shape == (3, 24, 8, 8, 3) and policy.num_seen == 23
    np.testing.assert_array_equal(film[0], frames)
    seeing, dreaming = dream_by_hand(policy, frames, actions, context=3)
    assert_rounded(film[1], seeing)
    assert_rounded(film[2], dreaming)
    np.testing.assert_array_equal(film[2, :3], film[1, :3])
    differs = (film[1] != film[2]).any(axis=(1, 2, 3))
    assert not differs[:3].any() and differs[3:].mean() > 0.5
    assert len({frame.tobytes() for frame in film[1]}) > 5


def test_dream_is_played_by_the_policy_itself(dreamer_policy):
    """Its most likely actions, from an empty memory, and from the seed that was asked for."""
    policy, env = dreamer_policy, gym.make("LongFilm-v0")
    policy(np.zeros((1, 8, 8, 3), np.uint8))  # something that it must forget
    film = dreamer.dream(policy, env, seed=2)
    policy.reset()
    obs, played = gym.make("LongFilm-v0").reset(seed=2)[0], []
    for frame in film[0]:
        played.append(policy(frame[None])[0])
    np.testing.assert_array_equal(film[0], frames_of("LongFilm-v0", played, seed=2))
    np.testing.assert_array_equal(film[0, 0], obs)
    other = dreamer.dream(policy, gym.make("LongFilm-v0"), seed=3)
    assert (other[0, 0] != film[0, 0]).any()


def test_with_eyes_closed_a_dream_depends_on_actions_and_on_nothing_else(dreamer_policy):
    """Frames after the third may be whatever they like; an action matters from the frame on that
    follows it."""

    def dreamt(actions, changed_from=10**9):
        env = gym.make("StillFilm-v0")
        env.unwrapped.changed_from = changed_from
        return dreamer.dream(Scripted(dreamer_policy, *actions), env, seed=4)

    plain = dreamt(CYCLE)
    for first in (3, 10):
        changed = dreamt(CYCLE, changed_from=first)
        np.testing.assert_array_equal(changed[0, first:], 255 - plain[0, first:])
        assert (changed[1, first:] != plain[1, first:]).any()
        np.testing.assert_array_equal(changed[1, :first], plain[1, :first])
        np.testing.assert_array_equal(changed[2], plain[2])
    assert (dreamt(CYCLE, changed_from=2)[2, 2:] != plain[2, 2:]).any()  # the third is seen
    script = [CYCLE[t % 7] for t in range(23)]
    for first in (2, 8):  # of frames that are dreamt, `first + 1` is the first with another past
        other = dreamt([*script[:first], 5 + (script[first] - 4) % 3, *script[first + 1 :]])
        moved = (other[2] != plain[2]).any(axis=(1, 2, 3))
        assert not moved[: first + 1].any() and moved[first + 1]


@pytest.mark.parametrize("length", [1, 2, 3, 30])
def test_dreams_of_short_and_of_long_episodes(dreamer_policy, length):
    """One step: two frames, all of them seen. Three steps: the last of four frames is dreamt. And
    no more than 24 frames are drawn."""
    env_id = "OneStepFilm-v0" if length == 1 else "StillFilm-v0"
    env = gym.make(env_id, max_episode_steps=length)
    film = dreamer.dream(Scripted(dreamer_policy, *CYCLE), env, seed=4)
    num = min(length + 1, 24)
    assert film.shape == (3, num, 8, 8, 3)
    actions = [CYCLE[t % 7] for t in range(num - 1)]
    np.testing.assert_array_equal(film[0], frames_of("StillFilm-v0", actions, seed=4)[:num])
    exact = dream_by_hand(dreamer_policy, film[0], actions, context=3)
    for actual, expected in zip(film[1:], exact):
        assert_rounded(actual, expected)
    assert (film[1] == film[2]).all() == (length < 3)


@pytest.mark.parametrize("num_channels", [1, 3, 4])
def test_strip_and_moments_pixel_by_pixel(num_channels):
    """Rows are the three kinds, columns are times, each twice as large with a white line of 1 pixel
    (2 when enlarged) on every side. A moment has the three kinds side by side. One channel is grey,
    and of four the brightest is shown."""
    film = np.random.default_rng(0).integers(256, size=(3, 5, 4, 4, num_channels)).astype(np.uint8)
    strip, moments = dreamer.draw_dream(film)
    assert strip.shape == (3 * 12, 5 * 12, 3) and strip.dtype == np.uint8
    assert len(moments) == 5 and {x.shape for x in moments} == {(12, 3 * 12, 3)}
    for y, x in itertools.product(range(36), range(60)):
        kind, time, row, column = y // 12, x // 12, y % 12, x % 12
        if 2 <= row < 10 and 2 <= column < 10:
            pixel = film[kind, time, (row - 2) // 2, (column - 2) // 2].tolist()
            expected = pixel if num_channels == 3 else 3 * [max(pixel)]
        else:
            expected = [255, 255, 255]
        assert strip[y, x].tolist() == expected
        assert moments[time][row, 12 * kind + column].tolist() == expected


def gif_frames(path):
    from PIL import Image, ImageSequence

    with Image.open(path) as image:
        frames = [np.array(frame.convert("RGB")) for frame in ImageSequence.Iterator(image)]
        return image.format, image.info, frames


def test_images_are_read_back_as_they_were(tmp_path):
    """PNG: every pixel. GIF, of few colours: every pixel, four frames a second, for ever."""
    from PIL import Image

    rng = np.random.default_rng(0)
    picture = rng.integers(256, size=(9, 14, 3)).astype(np.uint8)
    path = tmp_path / "new" / "folder" / "a.png"
    dreamer.save_image(str(path), picture)
    with Image.open(path) as image:
        assert image.format == "PNG"
        np.testing.assert_array_equal(np.array(image), picture)
    colours = np.array([[0, 0, 0], [255, 255, 255], [255, 0, 0], [0, 0, 255]], np.uint8)
    frames = [colours[rng.integers(4, size=(9, 14))] for _ in range(5)]
    dreamer.save_image(str(tmp_path / "a.gif"), *frames)
    kind, info, seen = gif_frames(tmp_path / "a.gif")
    assert (kind, info["loop"], info["duration"]) == ("GIF", 0, 250)
    np.testing.assert_array_equal(seen, frames)
    assert sorted(x.name for x in tmp_path.iterdir()) == ["a.gif", "new"]


def test_an_image_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch):
    """A full disk, in the middle of the file: one line, no fragment, nothing temporary."""
    from PIL import Image

    path, picture = tmp_path / "a.png", np.zeros((4, 4, 3), np.uint8)
    dreamer.save_image(str(path), picture)
    before = path.read_bytes()

    def full(self, file, **_):
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", full)
    with pytest.raises(OSError, match=r"cannot write .*a\.png: No space left on device"):
        dreamer.save_image(str(path), picture + 9)
    assert path.read_bytes() == before and [x.name for x in tmp_path.iterdir()] == ["a.png"]


def pictures_in_tensorboard(run_dir):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(run_dir, size_guidance={"images": 0})
    events.Reload()
    return {key: events.Images(key) for key in events.Tags()["images"]}


def test_a_run_on_images_keeps_a_dream_of_every_evaluation(film, modules):
    """In TensorBoard and as PNG, the same picture; the last one is that of the networks as they
    are in the end."""
    from PIL import Image

    dreamer.train(replace(film, total_timesteps=48, eval_interval=15))
    steps = list(metrics(film, "eval/return_mean"))
    assert steps == [0, 15, 30, 45, 48]
    files = sorted(Path(film.run_dir, "dreams").iterdir())
    assert [x.name for x in files] == [f"{step:09}.png" for step in steps[1:]]
    pictures = pictures_in_tensorboard(film.run_dir)
    assert list(pictures) == ["eval/dream"]
    assert [x.step for x in pictures["eval/dream"]] == steps[1:]
    for file, logged in zip(files, pictures["eval/dream"]):
        with Image.open(file) as one, Image.open(io.BytesIO(logged.encoded_image_string)) as two:
            np.testing.assert_array_equal(np.array(one), np.array(two))
            last = np.array(one)
    policy = dreamer.LatentPolicy(
        modules["model"], modules["actor"], gym.spaces.Discrete(3, start=5)
    )
    expected = dreamer.dream(policy, gym.make("Film-v0"), film.eval_seed)
    np.testing.assert_array_equal(last, dreamer.draw_dream(expected)[0])


def test_vectors_have_no_pictures(walk):
    dreamer.train(replace(walk, total_timesteps=30, eval_interval=15))
    assert list(metrics(walk, "eval/return_mean")) == [0, 15, 30]
    assert pictures_in_tensorboard(walk.run_dir) == {}
    assert not Path(walk.run_dir, "dreams").exists()


def test_a_checkpoint_is_dreamt_beside_its_film(film, modules, monkeypatch, capsys):
    """--capture-video: dream.png is the strip of the checkpoint, dream.gif its moments."""
    from PIL import Image

    dreamer.train(replace(film, total_timesteps=24))
    monkeypatch.setattr(common, "capture_video", lambda *_, **__: "film.mp4")
    path = f"{film.run_dir}/best.pt"
    args = replace(film, total_timesteps=24, evaluate=path, capture_video=True, quiet=False)
    dreamer.evaluate_checkpoint(replace(args, eval_seed=5))
    policy = dreamer.load_policy(path, device="cpu")
    strip, moments = dreamer.draw_dream(dreamer.dream(policy, gym.make("Film-v0"), 5))
    with Image.open(f"{film.run_dir}/dream.png") as image:
        np.testing.assert_array_equal(np.array(image), strip)
    _, _, frames = gif_frames(f"{film.run_dir}/dream.gif")
    assert [x.shape for x in frames] == [x.shape for x in moments]
    told = capsys.readouterr().out.splitlines()[-1]
    assert told == f"dreamt in {film.run_dir}/dream.png and {film.run_dir}/dream.gif"


# ---- environments, and what is wrapped around them


def catch(seed=0):
    env = dreamer.PixelCatch(render_mode="rgb_array")
    return env, env.reset(seed=seed)[0]


def catch_frame(row, ball, paddle):
    """Pixel by pixel; the ball is drawn over the paddle."""
    frame = np.zeros((32, 32, 3), np.uint8)
    for y, x in itertools.product(range(32), range(32)):
        colour = (20, 20, 40)
        if y >= 28 and 4 * paddle <= x < 4 * paddle + 4:
            colour = (80, 160, 255)
        if 4 * row <= y < 4 * row + 4 and 4 * ball <= x < 4 * ball + 4:
            colour = (255, 160, 40)
        frame[y, x] = colour
    return frame


@pytest.mark.parametrize(
    ("ball", "paddle", "actions", "paddles", "reward"),
    [
        (4, 2, [2, 2, 1, 1, 1, 1, 1], [3, 4, 4, 4, 4, 4, 4], 1.0),
        (4, 2, [2, 2, 2, 1, 1, 1, 1], [3, 4, 5, 5, 5, 5, 5], -1.0),
        (7, 0, [2, 2, 2, 2, 2, 2, 2], [1, 2, 3, 4, 5, 6, 7], 1.0),  # every distance can be made
        (0, 7, [0, 0, 0, 0, 0, 0, 0], [6, 5, 4, 3, 2, 1, 0], 1.0),
        (1, 1, [0, 0, 0, 2, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1], 1.0),  # the wall on the left
        (6, 6, [2, 2, 2, 0, 1, 1, 1], [7, 7, 7, 6, 6, 6, 6], 1.0),  # and on the right
        (3, 3, [1, 1, 1, 1, 1, 1, 2], [3, 3, 3, 3, 3, 3, 4], -1.0),  # the last step counts
    ],
)
def test_catch_by_hand(ball, paddle, actions, paddles, reward):
    """Seven steps from the highest row to the lowest, of which only the last one pays."""
    env, _ = catch()
    env.ball, env.paddle = ball, paddle
    for t, (action, column) in enumerate(zip(actions, paddles, strict=True), start=1):
        obs, paid, terminated, truncated, _ = env.step(action)
        np.testing.assert_array_equal(obs, catch_frame(t, ball, column))
        np.testing.assert_array_equal(env.render(), obs)
        assert (paid, terminated, truncated) == (reward if t == 7 else 0.0, t == 7, False)


def test_catch_starts_anywhere_and_from_its_seed():
    """All 64 starts are about equally likely; the same seed gives the same."""
    starts = []
    for seed in range(640):
        env, obs = catch(seed)
        starts.append((env.ball, env.paddle))
        if seed < 5:
            np.testing.assert_array_equal(obs, catch_frame(0, *starts[-1]))
            np.testing.assert_array_equal(catch(seed)[1], obs)
    counts = np.zeros((8, 8))
    np.add.at(counts, tuple(np.transpose(starts)), 1)
    assert counts.sum() == 640 and counts.min() >= 1 and counts.max() <= 24  # 10 +- 3.1
    assert all(abs(counts.sum(axis=k) - 80).max() < 35 for k in (0, 1))  # 80 +- 8.4


def test_catch_is_an_environment_of_gymnasium():
    from gymnasium.utils.env_checker import check_env

    env = gym.make("PixelCatch-v0", render_mode="rgb_array")
    assert isinstance(env.unwrapped, dreamer.PixelCatch)
    check_env(env.unwrapped)
    wrapped = dreamer.make_env("PixelCatch-v0", 32, from_pixels=False)
    assert dreamer.check_spaces(wrapped) == ((32, 32, 3), 3)
    assert not any(isinstance(layer, dreamer.Images) for layer in layers(wrapped))  # as it is


def layers(env):
    while env is not env.unwrapped:
        yield env
        env = env.env
    yield env


class PictureEnv(gym.Env):
    """Shows a picture, and renders another one."""

    action_space = gym.spaces.Discrete(2)
    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012  as Gymnasium has it

    def __init__(self, picture, rendered=None, render_mode=None):
        self.picture, self.rendered, self.render_mode = picture, rendered, render_mode
        high = 1 if picture.dtype == bool else 255
        self.observation_space = gym.spaces.Box(0, high, picture.shape, picture.dtype)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        return self.picture, {}

    def step(self, action):
        return self.picture, 0.0, False, False, {}

    def render(self):
        return self.rendered


gym.register("Picture-v0", PictureEnv, disable_env_checker=True)


def seen_of(picture, size, **kwargs):
    """What make_env shows of a picture, at the start and after a step."""
    env = dreamer.make_env(
        "Picture-v0", size, kwargs.pop("from_pixels", False), picture=picture, **kwargs
    )
    obs, (after, *_) = env.reset(seed=0)[0], env.step(0)
    np.testing.assert_array_equal(obs, after)
    assert env.observation_space.contains(obs) and obs.dtype == np.uint8
    assert dreamer.check_spaces(env) == (obs.shape, 2) and obs.shape[:2] == (size, size)
    return obs


def nearest(picture, size):
    """Pixel y of the larger one lies in pixel floor(y rows / size) of the smaller one."""
    rows, columns = picture.shape[:2]
    result = np.zeros((size, size, *picture.shape[2:]), picture.dtype)
    for y, x in itertools.product(range(size), range(size)):
        result[y, x] = picture[y * rows // size, x * columns // size]
    return result


def area_means(picture, size):
    """Of blocks, before rounding."""
    rows, columns = picture.shape[0] // size, picture.shape[1] // size
    result = np.zeros((size, size, *picture.shape[2:]))
    for y, x in itertools.product(range(size), range(size)):
        block = picture[y * rows : (y + 1) * rows, x * columns : (x + 1) * columns]
        result[y, x] = block.astype(float).mean(axis=(0, 1))
    return result


def noise(*shape):
    return np.random.default_rng(0).integers(256, size=shape).astype(np.uint8)


@pytest.mark.parametrize("shape", [(10, 10, 3), (5, 10, 4), (10, 7), (5, 6, 9)])
def test_small_images_are_enlarged_pixel_by_pixel(shape):
    """No colour that was not there; grey ones without channels get one; any number of channels."""
    pytest.importorskip("cv2")
    picture = noise(*shape)
    expected = nearest(picture, 16).reshape(16, 16, -1)
    assert expected.shape[2] == (1 if len(shape) == 2 else shape[2])
    np.testing.assert_array_equal(seen_of(picture, 16), expected)


@pytest.mark.parametrize("shape", [(32, 32, 3), (48, 16, 4), (32, 64), (16, 32, 1)])
def test_large_images_are_averaged(shape):
    """The mean of every block, to the nearest byte."""
    pytest.importorskip("cv2")
    picture = noise(*shape)
    seen = seen_of(picture, 16).astype(float)
    exact = area_means(picture, 16).reshape(16, 16, -1)
    np.testing.assert_allclose(seen, exact, atol=0.5 + 1e-6)
    assert exact.std() < 0.8 * picture.std()  # of noise; no pixel was merely picked


def test_large_images_of_many_channels_are_thinned():
    """OpenCV averages no more than 4 of them."""
    pytest.importorskip("cv2")
    picture = noise(32, 32, 7)
    np.testing.assert_array_equal(seen_of(picture, 16), picture[::2, ::2])


def test_truth_values_become_black_and_white():
    pytest.importorskip("cv2")
    picture = noise(10, 10, 4) < 128
    seen = seen_of(picture, 32)
    np.testing.assert_array_equal(seen, np.where(nearest(picture, 32), 255, 0))
    # of the size that is wanted: not resized, but bytes all the same
    np.testing.assert_array_equal(seen_of(picture, 10), np.where(picture, 255, 0))


def test_an_image_that_fits_is_left_alone():
    picture = noise(16, 16, 3)
    env = dreamer.make_env("Picture-v0", 16, from_pixels=False, picture=picture)
    assert not any(isinstance(layer, dreamer.Images) for layer in layers(env))
    np.testing.assert_array_equal(seen_of(picture, 16), picture)


@pytest.mark.parametrize("observed", [np.zeros(3, np.float32), noise(16, 16, 3)])
def test_from_pixels_sees_what_is_rendered(observed):
    """And nothing of what is observed, be it a vector or an image of the right size."""
    pytest.importorskip("cv2")
    rendered = noise(32, 48, 3)[::-1]
    seen = seen_of(observed, 16, rendered=rendered, from_pixels=True)
    np.testing.assert_allclose(seen.astype(float), area_means(rendered, 16), atol=0.5 + 1e-6)


REFUSED = {
    "channels first": ((noise(3, 84, 84),), False, r"its images \(3, 84, 84\) must have the "),
    "nothing": ((noise(8, 8, 3), None), True, "it renders nothing"),
    "floats": ((noise(8, 8, 3), np.zeros((8, 8, 3))), True, "it renders float64, not uint8"),
}


@pytest.mark.parametrize(("pictures", "from_pixels", "reason"), REFUSED.values(), ids=REFUSED)
def test_images_that_would_be_misread_are_refused_in_one_line(pictures, from_pixels, reason):
    pytest.importorskip("cv2")
    pictures = dict(zip(("picture", "rendered"), pictures))
    with pytest.raises(dreamer.InputError, match=f"^cannot play Picture-v0: {reason}") as refusal:
        dreamer.make_env("Picture-v0", 16, from_pixels, **pictures)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("env_id", "package"),
    [
        ("ALE/Breakout-v5", "ale_py"),
        ("ALE/Breakout-v5", "cv2"),
        ("MinAtar/Breakout-v1", "minatar.gym"),
        ("Picture-v0", "cv2"),
    ],
)
def test_a_missing_package_is_named(env_id, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    kwargs = {"picture": noise(10, 10, 3)} if env_id == "Picture-v0" else {}
    with pytest.raises(dreamer.InputError, match=f"^{env_id}: {package} is missing: pip install"):
        dreamer.make_env(env_id, 16, from_pixels=False, **kwargs)


def test_vectors_are_left_alone_and_other_spaces_are_refused():
    env = dreamer.make_env("Steps-v0", 32, from_pixels=False)
    assert dreamer.check_spaces(env) == ((2,), 3)
    picture = np.zeros((8, 8, 3), np.float32)  # not bytes: an image, or something else?
    env = dreamer.make_env("Picture-v0", 8, from_pixels=False, picture=picture)
    with pytest.raises(dreamer.InputError, match="vectors or uint8 images, not Box"):
        dreamer.check_spaces(env)
    with pytest.raises(dreamer.InputError, match="Probe-v0: actions must be discrete, not Box"):
        dreamer.check_spaces(dreamer.make_env("Probe-v0", 8, from_pixels=False))


@pytest.fixture
def minatar():
    pytest.importorskip("minatar")
    pytest.importorskip("cv2")
    return dreamer.make_env("MinAtar/Breakout-v1", 32, from_pixels=False)


def played_minatar(env, seed, actions):
    frames, rewards = [env.reset(seed=seed)[0]], []
    for action in actions:
        obs, reward, terminated, _, _ = env.step(action)
        frames.append(obs)
        rewards.append(reward)
        if terminated:
            break
    return np.stack(frames), rewards


def test_minatar_observations(minatar):
    """10 x 10 truth values as 32 x 32 bytes; all of 4 channels."""
    assert dreamer.check_spaces(minatar) == ((32, 32, 4), 3)
    obs, _ = minatar.reset(seed=3)
    np.testing.assert_array_equal(obs, 255 * nearest(minatar.unwrapped.game.state(), 32))
    obs = minatar.step(1)[0]
    np.testing.assert_array_equal(obs, 255 * nearest(minatar.unwrapped.game.state(), 32))
    assert set(np.unique(obs)) == {0, 255}


def test_S18_a_minatar_episode_is_a_function_of_seed_and_actions(minatar):
    """Although the game may repeat the action before it, and there is one of the episode before:
    with a seed whose first draw repeats, a paddle that was moving would go on to do so."""
    bare = next(layer for layer in layers(minatar) if isinstance(layer, dreamer.FreshMinAtar)).env

    def repeats_at_once(seed):
        bare.reset(seed=seed)
        return bare.unwrapped.game.random.rand() < 0.1  # what the next action draws

    seed = next(seed for seed in range(100) if repeats_at_once(seed))
    actions = np.random.default_rng(0).integers(3, size=50)
    results = {}
    for name, env in (("fresh", minatar), ("bare", bare)):
        for index, before in ((1, 1), (2, 3)):  # left and right, as the game numbers them
            env.reset(seed=0)
            game = env.unwrapped.game
            while game.last_action != before:
                env.step(index)
            env.reset(seed=seed)
            results[name, before] = game.last_action
            env.step(0)
            results[name, before] = (results[name, before], game.last_action)
    assert results["fresh", 1] == results["fresh", 3] == (0, 0)
    assert (results["bare", 1], results["bare", 3]) == ((1, 1), (3, 3))
    frames, rewards = [], []
    for before in (1, 2):
        played_minatar(minatar, 0, [before] * 5)
        film, paid = played_minatar(minatar, seed, actions)
        frames.append(film)
        rewards.append(paid)
    np.testing.assert_array_equal(*frames)
    assert rewards[0] == rewards[1] and len(frames[0]) > 3


def test_minatar_renders_bytes():
    """Of the colours that it gives as floats; and they can be what is seen."""
    pytest.importorskip("minatar")
    pytest.importorskip("seaborn")
    pytest.importorskip("cv2")
    env = dreamer.make_env("MinAtar/Breakout-v1", 40, from_pixels=True)
    obs, _ = env.reset(seed=0)
    fresh = next(layer for layer in layers(env) if isinstance(layer, dreamer.FreshMinAtar))
    exact = 255 * fresh.env.render()
    assert exact.shape == (10, 10, 3) and exact.max() > 100
    np.testing.assert_array_equal(env.render(), np.floor(exact))
    np.testing.assert_array_equal(obs, np.floor(exact).repeat(4, axis=0).repeat(4, axis=1))


class LivesEnv(gym.Env):
    """A game of which only the number of lives is known, before each step."""

    observation_space = gym.spaces.Box(0, 255, (8, 8, 3), np.uint8)
    action_space = gym.spaces.Discrete(4)

    def __init__(self, lives):
        self.script, self.ale, self.actions = lives, self, []

    def get_action_meanings(self):
        return ["NOOP", "UP", "FIRE", "DOWN"]

    def lives(self):
        return self.script[len(self.actions)]

    def reset(self, seed=None, options=None):
        self.actions = []
        return np.zeros((8, 8, 3), np.uint8), {}

    def step(self, action):
        self.actions.append(action)
        return np.zeros((8, 8, 3), np.uint8), 0.0, False, False, {}


def test_first_actions_of_every_life_are_fire():
    """Two of them; then the agent's own, until a life is lost. After a reset it begins again."""
    inner = LivesEnv([3, 3, 3, 2, 2, 2, 1])
    env = dreamer.FirstFire(inner)
    for _ in range(2):
        env.reset(seed=0)
        for _ in range(7):
            env.step(0)
        assert inner.actions == [2, 2, 0, 2, 2, 0, 2]


@pytest.fixture(scope="module")
def breakout():
    pytest.importorskip("ale_py")
    pytest.importorskip("cv2")
    return dreamer.make_env("ALE/Breakout-v5", 64, from_pixels=False)


def test_atari_observations(breakout):
    """In colour, 64 x 64, one frame of every four, the ball being served."""
    assert dreamer.check_spaces(breakout) == ((64, 64, 3), 4)
    assert any(isinstance(layer, dreamer.FirstFire) for layer in layers(breakout))
    obs, _ = breakout.reset(seed=1)
    assert obs.shape == (64, 64, 3) and obs.dtype == np.uint8
    colourful = obs.max(axis=2).astype(int) - obs.min(axis=2)
    assert (colourful > 100).mean() > 0.05  # the bricks
    screen = breakout.unwrapped.ale.getScreenRGB()
    assert abs(obs.mean(axis=(0, 1)) - screen.mean(axis=(0, 1))).max() < 2  # R, G, B in order
    start = breakout.unwrapped.ale.getEpisodeFrameNumber()
    for _ in range(5):
        after = breakout.step(2)[0]
    assert breakout.unwrapped.ale.getEpisodeFrameNumber() == start + 5 * 4
    assert (after != obs).any() and after.shape == (64, 64, 3)


def test_a_game_without_fire_is_left_alone():
    pytest.importorskip("ale_py")
    pytest.importorskip("cv2")
    env = dreamer.make_env("ALE/Freeway-v5", 64, from_pixels=False)
    assert not any(isinstance(layer, dreamer.FirstFire) for layer in layers(env))
    assert dreamer.check_spaces(env)[0] == (64, 64, 3)


def test_S18_atari_same_seed_and_actions_same_frames(breakout):
    actions, runs = np.random.default_rng(0).integers(4, size=40), []
    for seed in (5, 5, 6):
        frames = [breakout.reset(seed=seed)[0]]
        frames += [breakout.step(action)[0] for action in actions]
        runs.append(np.stack(frames))
    np.testing.assert_array_equal(runs[0], runs[1])
    assert (runs[0] != runs[2]).any()


@pytest.mark.parametrize("game", ["ALE/Backgammon-v5", "ALE/NoSuchGame-v5"])
def test_a_game_that_cannot_be_made_is_refused_in_one_line(game):
    pytest.importorskip("ale_py")
    with pytest.raises(dreamer.InputError, match=game) as refusal:
        dreamer.make_env(game, 64, from_pixels=False)
    assert "\n" not in str(refusal.value)


# ---- flags, types, memory


class BothEndsEnv(TallyEnv):
    """Every other end is also a cut: an episode that ended in its last permitted step."""

    def step(self, action):
        obs, reward, end, cut, info = super().step(action)
        return obs, reward, end, cut or end, info


gym.register("BothEnds-v0", BothEndsEnv)


def test_S7_an_end_that_is_also_a_cut_is_an_end(walk, spy):
    """is_last and is_terminal are both 1, so nothing is expected after it; a cut alone remains a
    cut."""
    returns = spy("td_lambda_returns")
    args = replace(walk, env_id="BothEnds-v0", total_timesteps=90, replay_ratio=2.0)
    dreamer.train(args)
    buffer, kinds = load(args.run_dir)["buffer"], []
    for i, env in enumerate(TallyEnv.made[:3]):
        for row, notes in enumerate(env.rows):
            flags = tuple(buffer[name][row, i].item() for name in ("is_last", "is_terminal"))
            is_end, is_cut = notes.get("end", False), notes.get("cut", False)
            assert flags == ((1, 1) if is_end else (1, 0) if is_cut else (0, 0))
            kinds.append(flags)
    assert min(kinds.count(kind) for kind in ((0, 0), (1, 0), (1, 1))) > 5
    replayed = [call[1:3] for call in returns[1::2]]
    cont, is_last = (torch.cat(column).flatten().tolist() for column in zip(*replayed))
    assert set(zip(cont, is_last)) == {(1, 0), (1, 1), (0, 1)}


class ManyTypesEnv(StepsEnv):
    """A reset gives whole numbers, as integers; steps give fractions."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def reset(self, seed=None, options=None):
        return np.rint(10 * super().reset(seed=seed)[0]).astype(np.int64), {}

    def step(self, action):
        obs, *others = super().step(action)
        return obs + 0.25, *others


gym.register("ManyTypes-v0", ManyTypesEnv, max_episode_steps=10, disable_env_checker=True)


def test_S15_observations_that_change_their_type_are_seen_as_they_are(
    walk, spy, modules, tmp_path, monkeypatch
):
    """Whatever came first: fractions are not cut off. The agent acts on what the buffer holds, and
    a run that was stopped between such steps goes on as if it had not been."""
    monkeypatch.setattr(common, "evaluate", lambda *_, **__: np.zeros(1))
    whole = replace(walk, env_id="ManyTypes-v0", total_timesteps=48)
    with monkeypatch.context() as patch:
        acted, as_tensor = [], dreamer.as_tensor

        def noted(*args):
            acted.append(as_tensor(*args).clone())
            return acted[-1]

        patch.setattr(dreamer, "as_tensor", noted)
        dreamer.train(whole)
    buffer, fractions = load(whole.run_dir)["buffer"], 0
    assert len(acted) == 16
    for i in range(3):
        rows = [k for k in range(int(buffer["size"][i])) if not buffer["is_last"][k, i]][:16]
        shown = torch.stack([obs[i] for obs in acted])
        assert torch.equal(shown, buffer["obs"][rows, i])
        is_first = buffer["is_first"][rows, i] == 1
        assert (shown[is_first] == shown[is_first].round()).all()
        assert (shown[~is_first] % 1 != 0).all()  # times are k + 1/4, and no position is whole
        fractions += (~is_first).sum()
    assert fractions > 30
    args = replace(whole, run_dir=str(tmp_path / "cut"))
    train_until(args, 21, monkeypatch)
    dreamer.train(replace(args, resume=args.run_dir))
    assert_same(load(whole.run_dir), load(args.run_dir))


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells what is mapped")
def test_a_resumed_run_lets_go_of_its_checkpoint(film, monkeypatch):
    """The file is mapped while it is read. From the second step on it is not: a replay of gigabytes
    would stay on the disk for as long as the run lasts, although its name has been taken over."""
    dreamer.train(replace(film, total_timesteps=30))
    load_state, act, mapped = dreamer.Buffer.load_state, dreamer.act, []

    def is_mapped():
        return f"{film.run_dir}/checkpoint.pt" in Path("/proc/self/maps").read_text()

    def noted(*args):
        load_state(*args)
        mapped.append(is_mapped())

    def noted_act(*args, **kwargs):
        mapped.append(is_mapped())
        return act(*args, **kwargs)

    monkeypatch.setattr(common, "evaluate", lambda *_, **__: np.zeros(1))
    monkeypatch.setattr(dreamer, "dream", lambda *_: np.zeros((3, 2, 8, 8, 3), np.uint8))
    monkeypatch.setattr(dreamer.Buffer, "load_state", noted)
    monkeypatch.setattr(dreamer, "act", noted_act)
    dreamer.train(replace(film, resume=film.run_dir, total_timesteps=48))
    assert len(mapped) == 1 + 6 and mapped[0] and not any(mapped[2:])


# ---- rewards of any size


@pytest.mark.parametrize(("rate", "factor"), [(1.0, 1.0), (0.0, 1000.0)])
def test_D8_the_gradient_of_the_actor_does_not_know_the_size_of_rewards(
    walk, modules, monkeypatch, tmp_path, rate, factor
):
    """Rewards and values times 1000: the same gradient, in direction and size, once the scale has
    adapted; if it never did, 1000 times as large."""
    two_hot_mean, gradients = dreamer.two_hot_mean, []
    monkeypatch.setattr(dreamer, "RETURN_SCALE_RATE", rate)
    monkeypatch.setattr(dreamer, "MAX_GRAD_NORM", math.inf)
    for times in (1.0, 1000.0):
        monkeypatch.setattr(dreamer, "two_hot_mean", lambda x, k=times: k * two_hot_mean(x))
        args = replace(walk, total_timesteps=15, policy_entropy_coef=0.0)
        dreamer.train(replace(args, run_dir=str(tmp_path / str(times))))
        gradients.append(torch.cat([x.grad.flatten() for x in modules["actor"].parameters()]))
        scale = load(tmp_path / str(times))["return_scale"].item()
        assert scale == 0 if rate == 0 else scale > 2 * times
    plain, larger = gradients
    assert plain.norm() > 1e-2
    torch.testing.assert_close(larger, factor * plain, rtol=1e-3, atol=1e-4 * factor * plain.norm())


# ---- a problem whose answer is known

SMALL = dreamer.Size(deter=32, groups=4, classes=4, units=32, depth=2, blocks=1, image_size=8)


def two_state_episode(actions):
    """Where one gets, what it pays, and whether it ends there; until it does."""
    place, steps = 0, []
    for action in actions:
        is_end, place = place == action == 1, action
        steps.append((place, 2.0 if place == 1 else -1.0, is_end))
        if is_end:
            break
    return steps


@torch.no_grad()
def states_of(model, steps, is_open_loop):
    """Features [1 + steps, F] of an episode that is seen; or of one that is imagined from its first
    observation and the actions, which are the places. The most likely z."""
    rssm, is_first = model.rssm, torch.zeros(1, 1)
    h, z, last_action = rssm.initial(1)
    features = []
    for t, place in enumerate([0, *(step[0] for step in steps)]):
        if t > 0 and is_open_loop:
            h = rssm.recur(h, z, rssm.from_action(last_action))
            z = dreamer.sample(rssm.prior(h), generator=None).flatten(1)
        else:
            embed = model.encoder(dreamer.preprocess(torch.eye(2)[[place]]))
            h, z, _ = rssm.observe(embed[None], last_action[None], is_first, h, z, generator=None)
            h, z = h[0], z[0]
        features.append(torch.cat([h, z], dim=1))
        if t < len(steps):
            last_action = torch.eye(2)[[steps[t][0]]]
    return torch.cat(features)


def test_two_states_with_a_known_model_policy_and_value(walk, monkeypatch):
    """500 updates. The model foresees what all 64 sequences of 6 actions show and pay, and where
    they end, by what it sees and with eyes closed. The best policy alternates: with gamma = 0.9,
    V(0) = 2 + 0.9 V(1) and V(1) = -1 + 0.9 V(0), that is 5.79 and 4.21. A greedy one would take its
    2 twice, for 3.8 and 2; one for which the cut after 10 steps is an end would expect 3.8."""
    monkeypatch.setitem(dreamer.SIZES, "tiny", SMALL)
    args = replace(
        walk,
        env_id="TwoState-v0",
        total_timesteps=1_600,
        batch_size=48,
        eval_interval=10_000,
        eval_episodes=2,
        log_interval=10_000,
        checkpoint_interval=10_000,
        num_envs=4,
        learning_starts=96,
        buffer_capacity=10_000,
        replay_ratio=16.0,
        sequence_length=6,
        free_nats=0.1,
        imagine_last=4,
        horizon=6,
        td_lambda=0.95,
        policy_entropy_coef=0.03,
        tau=0.2,
    )
    result, checkpoint = dreamer.train(args), load(args.run_dir)
    networks = dreamer.build_networks((2,), 2, SMALL)
    for name, network in zip(("model", "actor", "critic"), networks):
        network.load_state_dict(checkpoint[name])
    model, actor, critic = networks
    num_ends = 0
    for actions, is_open_loop in itertools.product(
        itertools.product((0, 1), repeat=6), (False, True)
    ):
        steps = two_state_episode(actions)
        features = states_of(model, steps, is_open_loop)
        places, rewards, ends = (list(column) for column in zip(*steps))
        with torch.no_grad():
            reward = dreamer.two_hot_mean(model.reward(features)).tolist()
            cont = torch.sigmoid(model.cont(features)).squeeze(1).tolist()
            best = actor(features).argmax(dim=1).tolist()
            decoded = dreamer.symexp(model.decoder(features))
        torch.testing.assert_close(decoded, torch.eye(2)[[0, *places]], rtol=0, atol=0.1)
        # a sequence may start anywhere: what came before its first state nobody knows
        assert reward[1:] == pytest.approx(rewards, abs=0.05)
        assert cont == pytest.approx([1.0, *(1.0 - end for end in ends)], abs=1e-2)
        goes_on = [place for place, end in zip(places, ends) if not end]
        assert best[: 1 + len(goes_on)] == [1 - place for place in [0, *goes_on]]
        num_ends += ends[-1]
    assert num_ends == 2 * (64 - 21)  # 21 of the sequences never have 1 twice in a row
    for is_open_loop in (False, True):
        features = states_of(model, two_state_episode((1, 0) * 3), is_open_loop)
        with torch.no_grad():
            value = dreamer.two_hot_mean(critic(features)).tolist()
        # imagination never starts from the first two states of a sequence: they learn less
        assert value[2:] == pytest.approx([5.79, 4.21] * 2 + [5.79], abs=0.4)
        assert value[:2] == pytest.approx([5.79, 4.21], abs=0.9)
    assert result["eval/return_mean"] == 5 * 2.0 - 5 * 1.0
