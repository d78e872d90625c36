"""Dreamer: replay, the whole loop, its wiring and its logs against numbers worked out by other
means."""

import io
import itertools
import math
import shlex
import signal
import sys
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
import tyro
from conftest import StepsEnv, load
from dreamer_helpers import (
    BINS,
    ByHand,
    TallyEnv,
    drawn,
    metrics,
    nano_networks,
    randomise,
    sequence,
    symexp,
)
from torch import nn

import common
from algos import dreamer
from benchmark import dreams

pytestmark = pytest.mark.usefixtures("nano")

PAGE = Path(dreamer.__file__).with_suffix(".md").read_text()


def weights(module):
    return torch.cat([x.detach().flatten().clone() for x in module.state_dict().values()])


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


# ---- replay

COLUMNS = ("obs", "action_index", "reward", "is_first", "is_last", "is_terminal")


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
        for env, (rows, action) in enumerate(zip(self.rows, actions)):
            self.buffer.set_action(env, action)
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
                assert batch["action_index"][b, t] == row["action"]
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
        torch.save(streams.buffer.state_dict(), file)
        file.seek(0)
        other = dreamer.Buffer(2 * 8, 2, (2,))
        other.load_state_dict(torch.load(file, weights_only=True))
        original = streams.buffer
        for _ in range(6):
            obs = np.array([9, len(streams.rows[0])])
            for buffer in (original, other):
                buffer.add(0, obs, 1.0, is_first=True)
                buffer.set_action(0, 2)
                buffer.set_action(1, 0)
            if min(original.size) >= 3:
                left, right = original.sample(30, 3, drawn()), other.sample(30, 3, drawn())
                assert all(torch.equal(x, y) for x, y in zip(left, right))
        assert_same(original.state_dict(), other.state_dict())


def test_state_of_a_ring_is_no_larger_than_what_it_holds():
    """A checkpoint has the filled part: 10 rows of 50,000 that would take 150 MB."""
    streams = Streams(capacity=50_000, num_envs=2, obs_shape=(32, 32, 3))
    for _ in range(5):
        streams.add(0)
        streams.add(1)
    file = io.BytesIO()
    torch.save(streams.buffer.state_dict(), file)
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
            assert buffer["action_index"][row, i] == action
            assert buffer["reward"][row, i] == reward
            assert [buffer[name][row, i].item() for name in COLUMNS[3:]] == flags
        for before, after in itertools.pairwise(expected):
            assert (before[4] == 1) == (after[3] == 1)  # last, first
            lengths.add(before[0][1] if before[4] else None)
            ends.add((before[4], before[5]))
    assert lengths == {None, 1, 2, 3, 4} and ends == {(0, 0), (1, 0), (1, 1)}


def test_actions_are_kept_as_they_were_played(walk, spy):
    """Not as they were chosen, where the environment plays another: in the rows of the buffer, and
    in what the agent remembers of its last action when it observes what came of it."""
    calls = spy("recur", dreamer.RSSM)
    args = replace(walk, env_id="Stubborn-v0", total_timesteps=30, learning_starts=27)
    dreamer.train(args)
    checkpoint, others = load(args.run_dir), 0
    buffer, acting = checkpoint["buffer"], [call[1:4] for call in calls if len(call[1]) == 3]
    for i, env in enumerate(TallyEnv.made[:3]):
        rows = [(row["obs"], row["action"]) for row in env.rows if "action" in row]
        assert len(rows) == len(env.asked) == 10
        others += sum(played != asked for (_, played), asked in zip(rows, env.asked))
        stored = buffer["action_index"][: len(env.rows), i].tolist()
        expected = [row["action"] - 5 if "action" in row else 0 for row in env.rows]
        assert stored == expected
        for (_, _, memory), (obs, _) in zip(acting[:10], rows):
            assert memory[i].tolist() == [float(obs[2] == k) for k in (5, 6, 7)]
    assert others > 3


def test_S1_D3_truncated_is_last_but_not_terminal(walk, spy):
    """What the continue head learns, and what the returns of the critic see."""
    losses, returns = spy("continue_loss"), spy("td_lambda_returns")
    args = replace(walk, env_id="Tally-v0")
    dreamer.train(args)
    cuts = 0
    buffer = load(args.run_dir)["buffer"]
    assert (buffer["is_terminal"] <= buffer["is_last"]).all()
    for (_, is_terminal, _), (_, cont, *_, mix, _) in zip(losses, returns[1::2], strict=True):
        assert torch.equal(cont, 1 - is_terminal[:, -3:])
        cuts += ((mix == 0) * cont).sum().item()
    for *_, mix, _ in returns[::2]:
        assert (mix == 0.8).all()  # nothing is cut in imagination
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
    monkeypatch.setattr(dreams, "film", lambda *_: np.zeros((3, 2, 8, 8, 3), np.uint8))
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def assert_as_by_hand(args, rtol, atol):
    dreamer.train(args)
    hand = ByHand(args)
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
    "plain": {"total_timesteps": 84, "learning_starts": 36},
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
    if args.total_timesteps == 84:
        free = [nats < 0.3 for nats in hand.nats]
        assert 0.1 < np.mean(free) < 0.95 and hand.scales[0] < 1 < hand.scales[-1]
        assert hand.starts == {(0, 0), (1, 0), (1, 1)} and hand.num_updates == 16
        assert all(0 < np.mean(clipped) < 1 for clipped in hand.clipped)


def test_whole_loop_by_hand_on_images(film, modules, in_doubles):
    hand = assert_as_by_hand(replace(film, total_timesteps=36), rtol=1e-6, atol=1e-8)
    assert hand.num_updates == 8


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
    advantage, (_, _, value, *_, result) = losses[0][2], returns[0]
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
        assert torch.equal(replayed[0], reward[:, -3:])
        assert torch.equal(replayed[1], 1 - is_terminal[:, -3:])
        assert torch.equal(replayed[2], imagined[-1][:, 0].reshape(3, 3))
        torch.testing.assert_close(replayed[4], 0.8 * (1 - is_last[:, -3:]))
        critic, replay_critic = losses[2 * k : 2 * k + 2]
        assert torch.equal(replay_critic[1], replayed[-1])
        assert torch.equal(replay_critic[3], 1 - is_last[:, -3:-1])
        assert torch.equal(replay_critic[0], critic[0][:, 0].reshape(3, 3, 255)[:, :2])
        assert torch.equal(replay_critic[2], critic[2][:, 0].reshape(3, 3)[:, :2])
        num_masked += (replay_critic[3] == 0).sum()
    assert num_masked > 2


def test_D17_gradients_are_clipped_per_tensor_by_hand():
    """To 0.3 |w|, where |w| counts as at least 0.001: weights of norm 5 allow 1.5, weights of 0
    allow 0.0003. A gradient that is small enough is left alone. The norm before is returned."""
    net = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1), nn.Linear(2, 1, bias=False))
    values = {  # weights, gradient, gradient after the clip
        "0.weight": ([[3.0, 4.0]], [[6.0, 8.0]], [[0.9, 1.2]]),
        "0.bias": ([0.0], [-2.0], [-3e-4]),
        "1.weight": ([[-10.0]], [[2.5]], [[2.5]]),
        "1.bias": ([0.0], [0.0], [0.0]),
        "2.weight": ([[0.0, 1e-4]], [[3e-4, 4e-4]], [[1.8e-4, 2.4e-4]]),
    }
    for name, x in net.named_parameters():
        x.data, x.grad = torch.tensor(values[name][0]), torch.tensor(values[name][1])
    norm = dreamer.clip_per_tensor(net)
    assert norm.item() == pytest.approx(math.sqrt(10**2 + 2**2 + 2.5**2 + 5e-4**2))
    for name, x in net.named_parameters():
        torch.testing.assert_close(x.grad, torch.tensor(values[name][2]))


def test_D17_huge_gradients_are_clipped(walk, modules, monkeypatch):
    """All tensors to 0.3 of their norms; what is logged is the norm before that."""
    for name in ("reconstruction_loss", "dreamer_critic_loss", "dreamer_actor_loss"):
        original = getattr(dreamer, name)
        monkeypatch.setattr(dreamer, name, lambda *x, loss=original: 1e9 * loss(*x))
    step, ratios = torch.optim.Adam.step, []

    def watched(opt, *args):
        for x in opt.param_groups[0]["params"]:
            ratios.append((x.grad.norm() / x.detach().norm().clamp(min=1e-3)).item())
        return step(opt, *args)

    monkeypatch.setattr(torch.optim.Adam, "step", watched)
    dreamer.train(replace(walk, total_timesteps=24))
    assert max(ratios) == pytest.approx(0.3, rel=1e-4) and np.median(ratios) > 0.29
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
    counts, sample, set_action = [], dreamer.Buffer.sample, dreamer.Buffer.set_action

    def counted(*arguments):
        counts[-1] += 1
        return sample(*arguments)

    def opened(buffer, env, action):
        if env == 0:
            counts.append(0)
        set_action(buffer, env, action)

    monkeypatch.setattr(dreamer.Buffer, "sample", counted)
    monkeypatch.setattr(dreamer.Buffer, "set_action", opened)
    dreamer.train(args)
    total = 0
    for k, count in enumerate(counts, start=1):
        total += count
        assert total == math.floor(max(0, 3 * k - 12) * ratio / 12 + 1e-9)
    assert len(counts) == 20 and load(args.run_dir)["num_updates"] == total > 1


def train_until(args, step, monkeypatch):
    """SIGTERM during a step: the run saves and stops, its schedules being those of the whole."""
    runs, count, set_action = [], 0, dreamer.Buffer.set_action
    original = common.Run.__init__

    def init(self, *a):
        original(self, *a)
        runs.append(self)

    def counted(self, env, action):
        nonlocal count
        count += 1
        if count + args.num_envs == step:  # the step after the signal is the last
            runs[0].note(signal.SIGTERM, None)
        set_action(self, env, action)

    with monkeypatch.context() as patch:
        patch.setattr(common.Run, "__init__", init)
        patch.setattr(dreamer.Buffer, "set_action", counted)
        with pytest.raises(common.Stopped):
            dreamer.train(args)
    assert load(args.run_dir)["step"] == step


RESUMED = {
    "vectors": {"env_id": "Tally-v0", "lr_schedule": "cosine", "replay_ratio": 2.5},
    "images": {"env_id": "Film-v0", "buffer_capacity": 30},
}


@pytest.mark.parametrize("flags", RESUMED.values(), ids=RESUMED)
def test_D20_S18_resume_in_the_middle_of_episodes(walk, modules, tmp_path, monkeypatch, flags):
    """The rest of three episodes with what the agent remembered of them, the debt of updates, the
    ring, S and the slow critic, and all that comes after: as if never stopped."""
    walk = replace(walk, seed=4, total_timesteps=48)
    whole = replace(walk, eval_interval=20, checkpoint_interval=25, **flags)
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


def test_nothing_is_evaluated_before_the_first_update(walk):
    """Every 3 steps one is due, and updates come at 18, 24, 30, .."""
    args = replace(walk, eval_interval=3, replay_ratio=2.0, total_timesteps=33)
    dreamer.train(args)
    assert list(metrics(args, "eval/return_mean")) == [0, 18, 21, 24, 27, 30, 33]


@pytest.mark.parametrize("interval", [4, 7, 20])
def test_intervals_need_not_be_multiples_of_the_environments(walk, spy, interval):
    """Whenever a multiple went by: evaluation, checkpoint, and an entry in the log."""
    saves = spy("save_atomically", common)
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
    calls = spy("lr_factor", common)
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
    imagined_reward, cont, value, _, _, returns = calls["td_lambda_returns"][-2]
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
    assert f"takes {(num_bytes - replay) / 1e6:.0f} MB at the default size, and" in dreamer.__doc__
    for width in (32, 64):
        per_step = dreamer.Buffer(10, 1, (width, width, 3)).num_bytes() / 10
        assert f"{per_step / 1e3:.1f} KB" in dreamer.__doc__
    assert f"{5_000_000 * per_step / 1e9:.0f} GB for the replay buffer" in PAGE


def test_the_command_of_the_page_is_the_set_of_the_paper():
    """Whatever the defaults are."""
    command = PAGE.split("The paper's set")[1].split("python algos/dreamer.py")[1]
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
    replayed = [(call[1], call[4] == 0) for call in returns[1::2]]
    cont, is_last = (torch.cat(column).flatten().tolist() for column in zip(*replayed))
    assert set(zip(cont, is_last)) == {(1, False), (1, True), (0, True)}


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
        acted, act = [], dreamer.act

        def noted(model, actor, obs, *args):
            acted.append(torch.from_numpy(obs.copy()))
            return act(model, actor, obs, *args)

        patch.setattr(dreamer, "act", noted)
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
    load_state, act, mapped = dreamer.Buffer.load_state_dict, dreamer.act, []

    def is_mapped():
        return f"{film.run_dir}/checkpoint.pt" in Path("/proc/self/maps").read_text()

    def noted(*args):
        load_state(*args)
        mapped.append(is_mapped())

    def noted_act(*args, **kwargs):
        mapped.append(is_mapped())
        return act(*args, **kwargs)

    monkeypatch.setattr(common, "evaluate", lambda *_, **__: np.zeros(1))
    monkeypatch.setattr(dreams, "film", lambda *_: np.zeros((3, 2, 8, 8, 3), np.uint8))
    monkeypatch.setattr(dreamer.Buffer, "load_state_dict", noted)
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
    monkeypatch.setattr(dreamer, "MAX_GRAD_RATIO", math.inf)
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
    rssm = model.rssm
    h, z, last_action = rssm.initial(1)
    features = []
    for t, place in enumerate([0, *(step[0] for step in steps)]):
        if t > 0 and is_open_loop:
            h = rssm.recur(h, z, last_action)
            z = dreamer.most_likely(rssm.prior(h)).flatten(1)
        else:
            embed = model.encoder(dreamer.preprocess(torch.eye(2)[[place]]))
            h = rssm.recur(h, z, last_action)
            z = dreamer.most_likely(rssm.posterior(h, embed)).flatten(1)
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
            decoded = symexp(model.decoder(features))
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
        assert value[:2] == pytest.approx([5.79, 4.21], abs=1.3)
    assert result["eval/return_mean"] == 5 * 2.0 - 5 * 1.0
