"""What the tests of Dreamer share: environments, short runs, networks, and comparisons."""

import bisect
import math
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

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


class StubbornEnv(TallyEnv):
    """As FirstFire does: the first action of an episode is 7, and `info` says so."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def step(self, action):
        self.asked.append(action)
        played = 7 if self.time == 0 else action
        return *super().step(played)[:4], {"played_action": played}


for name, entry_point in {
    "Tally": TallyEnv,
    "Stubborn": StubbornEnv,
    "Film": FilmEnv,
    "OneStepFilm": OneStepFilmEnv,
    "ForgetfulChoices": ForgetfulChoiceEnv,
    "Extreme": ExtremeEnv,
    "TwoState": TwoStateEnv,
}.items():
    gym.register(f"{name}-v0", entry_point, max_episode_steps=10)
gym.register("LongFilm-v0", FilmEnv, max_episode_steps=100, kwargs={})


@pytest.fixture
def nano(monkeypatch):
    """The smallest networks, whatever the command line would call them."""
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


def metrics(args, key):
    """{step: value} of one key in metrics.csv."""
    rows = [row.split(",") for row in Path(args.run_dir, "metrics.csv").read_text().splitlines()]
    return {int(row[0]): float(row[3]) for row in rows if row[2] == key}


def symexp(x):
    """The inverse of symlog."""
    return x.sign() * torch.expm1(x.abs())


def one_hot(index, num):
    return torch.eye(num)[index]


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


def randomise(module, scale=1.0):
    """Biases and scales that are not 0 and 1, so that a forgotten one shows."""
    with torch.no_grad():
        for x in module.parameters():
            x.add_(scale * torch.randn_like(x))
    return module


def two_hot(x):
    """255 weights, by looking for the two neighbours."""
    weight, x = np.zeros(255), min(max(x, BINS[0]), BINS[-1])
    k = max(bisect.bisect_left(BINS, x) - 1, 0)
    weight[k + 1] = (x - BINS[k]) / (BINS[k + 1] - BINS[k])
    weight[k] = 1 - weight[k + 1]
    return weight


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

    def __init__(self, args):
        self.args, self.dtype = args, torch.get_default_dtype()
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
        self.generator = torch.Generator().manual_seed(common.second_seed(args.seed))
        self.streams = [[] for _ in self.envs]
        self.scale, self.scales, self.num_updates = 0.0, [], 0
        self.clipped = [[], [], []]  # whether a tensor's gradient was
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
            own = torch.cat([h[:, rows], inputs], dim=1)
            mixed.append(own @ p["rssm.mix.weight"][block] + p["rssm.mix.bias"][block])
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
        logits = head_of(self.model, "rssm.posterior_net", 1, torch.cat([h, embed], dim=1))
        return self.mixture(logits.reshape(-1, 2, 3))

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
        opt = self.opts[which]
        opt.param_groups[0]["lr"] = rate * self.factor()
        opt.zero_grad()
        loss.backward()
        for x in opt.param_groups[0]["params"]:
            size, most = x.grad.norm().item(), 0.3 * max(x.detach().norm().item(), 1e-3)
            self.clipped[which].append(size > most)
            if size > most:
                x.grad *= most / size
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
                # not seen_as + 0.5, which is rounded twice: Adam turns 3e-8 here into 1e-4 there
                images = np.stack([rows[t]["obs"] for rows in sequences])
                target = torch.tensor(images).float().div(255).to(self.dtype)
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
