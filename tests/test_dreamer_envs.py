"""Dreamer: policy, pictures, and what is wrapped around environments, against numbers worked out
by other means."""

import io
import itertools
import math
import sys
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import load
from dreamer_helpers import ByHand, FilmEnv, metrics, nano_networks, randomise

import common
from algos import dreamer
from benchmark import dreams

pytestmark = pytest.mark.usefixtures("nano")


def spaces_of(env):
    return common.check_spaces(env, actions="discrete", images=True)[:2]


def dream(policy, env, seed):
    return dreams.film(dreamer.dream, policy, env, seed)


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
    calls = spy("forward", dreamer.Encoder)
    args = replace(walk, env_id=env_id, num_envs=1, total_timesteps=15)
    dreamer.train(args)  # 12 steps, and then one update after each
    acted = [call[-1][0] for call in calls if len(call[-1]) == 1][:13]
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
    assert len(set(expected.flatten())) > 1
    # alone, it does what it does in company
    np.testing.assert_array_equal([policy(x[2:3])[0] for x in obs], expected[:, 2])
    # without the reset it would have played otherwise
    assert [policy(x[2:3])[0] for x in obs[::-1]] != [policy(x[2:3])[0] for x in obs]


def test_policy_of_a_checkpoint_acts_as_the_run_did(film, modules):
    """load_policy on best.pt and checkpoint.pt, in a wrapped environment."""
    dreamer.train(replace(film, total_timesteps=24, eval_interval=12))
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
        super().__call__(obs)
        action = self.actions[self.num_seen % len(self.actions)]
        self.num_seen += 1
        self.memory = self.memory._replace(action=torch.eye(3)[[action - 5]])
        return np.array([action])


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
    film = dream(policy, gym.make("StillFilm-v0"), seed=4)
    frames = frames_of("StillFilm-v0", actions, seed=4)
    assert film.shape == (3, 24, 8, 8, 3) and policy.num_seen == 24
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
    film = dream(policy, env, seed=2)
    policy.reset()
    obs, played = gym.make("LongFilm-v0").reset(seed=2)[0], []
    for frame in film[0]:
        played.append(policy(frame[None])[0])
    np.testing.assert_array_equal(film[0], frames_of("LongFilm-v0", played, seed=2))
    np.testing.assert_array_equal(film[0, 0], obs)
    other = dream(policy, gym.make("LongFilm-v0"), seed=3)
    assert (other[0, 0] != film[0, 0]).any()


def test_with_eyes_closed_a_dream_depends_on_actions_and_on_nothing_else(dreamer_policy):
    """Frames after the third may be whatever they like; an action matters from the frame on that
    follows it."""

    def dreamt(actions, changed_from=10**9):
        env = gym.make("StillFilm-v0")
        env.unwrapped.changed_from = changed_from
        return dream(Scripted(dreamer_policy, *actions), env, seed=4)

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


@pytest.mark.parametrize("length", [1, 2, 6, 30])
def test_dreams_of_short_and_of_long_episodes(dreamer_policy, length):
    """One step: two frames, all of them seen. Six steps: the last four of seven frames are dreamt.
    And no more than 24 frames are drawn."""
    env_id = "OneStepFilm-v0" if length == 1 else "StillFilm-v0"
    env = gym.make(env_id, max_episode_steps=length)
    film = dream(Scripted(dreamer_policy, *CYCLE), env, seed=4)
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
    strip, moments = dreams.draw(film)
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
    dreams.save_image(str(path), picture)
    with Image.open(path) as image:
        assert image.format == "PNG"
        np.testing.assert_array_equal(np.array(image), picture)
    colours = np.array([[0, 0, 0], [255, 255, 255], [255, 0, 0], [0, 0, 255]], np.uint8)
    frames = [colours[rng.integers(4, size=(9, 14))] for _ in range(5)]
    dreams.save_image(str(tmp_path / "a.gif"), *frames)
    kind, info, seen = gif_frames(tmp_path / "a.gif")
    assert (kind, info["loop"], info["duration"]) == ("GIF", 0, 250)
    np.testing.assert_array_equal(seen, frames)
    assert sorted(x.name for x in tmp_path.iterdir()) == ["a.gif", "new"]


def test_an_image_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch):
    """A full disk, in the middle of the file: one line, no fragment, nothing temporary."""
    from PIL import Image

    path, picture = tmp_path / "a.png", np.zeros((4, 4, 3), np.uint8)
    dreams.save_image(str(path), picture)
    before = path.read_bytes()

    def full(self, file, **_):
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", full)
    with pytest.raises(OSError, match=r"cannot write .*a\.png: No space left on device"):
        dreams.save_image(str(path), picture + 9)
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
    expected = dream(policy, gym.make("Film-v0"), film.eval_seed)
    np.testing.assert_array_equal(last, dreams.draw(expected)[0])


def test_vectors_have_no_pictures(walk):
    dreamer.train(replace(walk, total_timesteps=30, eval_interval=15))
    assert list(metrics(walk, "eval/return_mean")) == [0, 15, 30]
    assert pictures_in_tensorboard(walk.run_dir) == {}
    assert not Path(walk.run_dir, "dreams").exists()


def test_a_checkpoint_is_dreamt_beside_its_film(film, modules, monkeypatch, capsys):
    """--capture-video: dream.png is the strip of the checkpoint, dream.gif its moments."""
    from PIL import Image

    dreamer.train(replace(film, total_timesteps=24, eval_interval=12))
    monkeypatch.setattr(common, "capture_video", lambda *_, **__: "film.mp4")
    path = f"{film.run_dir}/best.pt"
    args = replace(film, total_timesteps=24, eval_interval=12, evaluate=path)
    args = replace(args, capture_video=True, quiet=False)
    dreamer.evaluate_checkpoint(replace(args, eval_seed=5))
    policy = dreamer.load_policy(path, device="cpu")
    strip, moments = dreams.draw(dream(policy, gym.make("Film-v0"), 5))
    with Image.open(f"{film.run_dir}/dream.png") as image:
        np.testing.assert_array_equal(np.array(image), strip)
    _, _, frames = gif_frames(f"{film.run_dir}/dream.gif")
    assert [x.shape for x in frames] == [x.shape for x in moments]
    told = capsys.readouterr().out.splitlines()[-1]
    assert told == f"dreamt in {film.run_dir}/dream.png and {film.run_dir}/dream.gif"


def test_a_copy_without_the_drawing_learns_all_the_same(film, monkeypatch, capsys):
    """One line says so, once; so does --capture-video, after it made its film."""
    import benchmark

    monkeypatch.delattr(benchmark, "dreams")
    monkeypatch.setitem(sys.modules, "benchmark.dreams", None)
    args = replace(film, total_timesteps=24, eval_interval=12)
    dreamer.train(replace(args, quiet=False))
    assert capsys.readouterr().out.count("benchmark/dreams.py is missing") == 1
    assert not Path(film.run_dir, "dreams").exists()
    monkeypatch.setattr(common, "capture_video", lambda *_, **__: "film.mp4")
    args = replace(args, evaluate=f"{film.run_dir}/best.pt", capture_video=True, quiet=False)
    assert math.isfinite(dreamer.evaluate_checkpoint(args)["eval/return_mean"])
    assert capsys.readouterr().out.count("benchmark/dreams.py is missing") == 1


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
    assert spaces_of(wrapped) == ((32, 32, 3), 3)
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
    assert spaces_of(env) == (obs.shape, 2) and obs.shape[:2] == (size, size)
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
    assert spaces_of(env) == ((2,), 3)
    picture = np.zeros((8, 8, 3), np.float32)  # not bytes: an image, or something else?
    with pytest.raises(dreamer.InputError, match=r"uint8 images, not Box.*--from-pixels$"):
        dreamer.make_env("Picture-v0", 8, from_pixels=False, picture=picture)
    with pytest.raises(dreamer.InputError, match="Probe-v0: actions must be discrete, not Box"):
        spaces_of(dreamer.make_env("Probe-v0", 8, from_pixels=False))


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
    assert spaces_of(minatar) == ((32, 32, 4), 3)
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
    env = common.FirstFire(inner)
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
    assert spaces_of(breakout) == ((64, 64, 3), 4)
    assert any(isinstance(layer, common.FirstFire) for layer in layers(breakout))
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
    assert not any(isinstance(layer, common.FirstFire) for layer in layers(env))
    assert spaces_of(env)[0] == (64, 64, 3)


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
