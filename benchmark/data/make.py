"""Make the small datasets that ship with the repo, and the table of their returns in README.md:

    python benchmark/data/make.py

Each is a mixture of scripted behaviours from good to random, so that there is something to learn
and something to leave alone. Stored without next_observations (an episode of T steps has T + 1
observations), which halves the file; common.py puts them back.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for common.py
import common

Controller = Callable[[np.ndarray], np.ndarray | int]  # one observation -> one action
Behaviours = dict[str, tuple[Controller, float]]  # name -> controller, chance of a random action

HEADER = """\
# The datasets that we ship

Made by `python benchmark/data/make.py` from scripted controllers; found by `--dataset auto`. Noise
is the chance of a random action. Returns are undiscounted, in the environment's own rewards.

Pendulum: one controller that swings up and balances. CartPole: one that keeps the cart in the
middle, and one that balances as well but walks the cart off the track, where the episode ends. Most
episodes are of the latter kind, so that cloning follows them. MountainCarContinuous: one that
pushes the way the car rolls, and random episodes, which never reach the flag.

| environment | behaviour | episodes | rows | return mean | min | max |
| :-- | :-- | --: | --: | --: | --: | --: |
"""
FOOTER = """
Demonstrations for GAIL, made by `python benchmark/data/make_experts.py`: whole episodes of trained
agents of this repo, as they came, LunarLander's one crash in twenty included.

| file | agent | episodes | rows | return mean | min | max |
| :-- | :-- | --: | --: | --: | --: | --: |
| CartPole-v1-expert.npz | AWR on the data above | 10 | 5,000 | 500.0 | 500.0 | 500.0 |
| Pendulum-v1-expert.npz | RLPD | 20 | 4,000 | -143.1 | -357.6 | -0.5 |
| LunarLander-v3-expert.npz | FQF | 20 | 4,994 | 230.1 | -416.5 | 320.7 |

Some rows of the benchmark use files that we do not ship: one is too large, the others are made in
seconds. `run.py` looks for them in `runs/data/` and leaves those rows out if they are not there:

| file | rows | return mean | what it is |
| :-- | --: | --: | :-- |
| halfcheetah-replay-sac.npz | 20,000 | 329 | our own SAC from its first step on: \
`python benchmark/data/make_replay.py` |
| CartPole-v1-few.npz, Pendulum-v1-few.npz, LunarLander-v3-few.npz | 200, 80, 89 | - | what GAIL \
sees of the experts above in its rows `few`: `python benchmark/data/make_experts.py --few` |
"""


def pendulum_controller(obs: np.ndarray) -> np.ndarray:
    """Pump energy into the swing until it is enough to reach the top, then balance there."""
    cos, sin, velocity = obs
    angle = np.arctan2(sin, cos)  # 0 is upright
    energy_lack = 5.0 - (velocity**2 / 6 + 5.0 * cos)  # mass 1, length 1, g 10: 5 at rest upright
    balance, swing_up = -8.0 * angle - 2.0 * velocity, np.sign(velocity) * energy_lack
    torque = balance if abs(angle) < 0.4 else swing_up
    return np.clip([torque], -2.0, 2.0).astype(np.float32)


def cart_pole_controller(obs: np.ndarray, goal: float) -> int:
    """Balance the pole and walk the cart to `goal`. Beyond 2.4 the track ends, and the episode."""
    position, velocity, angle, angular_velocity = obs
    lean = 0.1 * np.clip(position - goal, -1, 1) + 0.1 * velocity
    return int(angle + 0.5 * angular_velocity + lean > 0)


def mountain_car_controller(obs: np.ndarray) -> np.ndarray:
    """Push the way the car rolls: every swing is wider than the one before."""
    _, velocity = obs
    return np.array([1.0 if velocity >= 0 else -1.0], dtype=np.float32)


PENDULUM = {
    f"swing-up, noise {noise:.2f}": (pendulum_controller, noise)
    for noise in (0.0, 0.25, 0.5, 0.75, 1.0)
}
# Most episodes balance well and run off the track, all to the same side, and cloning follows them.
# Noise alone would not do: the most frequent action in each state would still be the good one.
CART_POLE = {"to the middle, noise 0.15": (partial(cart_pole_controller, goal=0.0), 0.15)}
for noise in (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4):
    CART_POLE[f"off the track, noise {noise:.2f}"] = partial(cart_pole_controller, goal=3.0), noise
CART_POLE["random"] = partial(cart_pole_controller, goal=0.0), 1.0


# Only the flag pays, and random pushes never get there: a few episodes that do are all it needs.
MOUNTAIN_CAR = {
    f"rocking, noise {noise:.2f}": (mountain_car_controller, noise) for noise in (0.5, 0.75, 1.0)
}


def mixed_episodes(
    env_id: str, behaviours: Behaviours, num_episodes: int, seed: int
) -> tuple[dict[str, np.ndarray], dict[str, list[float]], dict[str, int]]:
    """Episodes of all behaviours in turn. -> arrays, returns and number of rows by behaviour"""
    env = common.make_env(env_id)
    rng = np.random.default_rng(seed)
    env.action_space.seed(seed)
    columns = {name: [] for name in common.NAMES if name != "next_obs"}
    returns = {name: [] for name in behaviours}
    lengths = dict.fromkeys(behaviours, 0)
    for episode in range(num_episodes):
        name, (controller, noise) = list(behaviours.items())[episode % len(behaviours)]
        obs, _ = env.reset(seed=seed + episode)
        done, episode_return = False, 0.0
        while not done:
            action = env.action_space.sample() if rng.random() < noise else controller(obs)
            next_obs, reward, terminated, truncated, _ = env.step(action)
            for field, value in zip(columns, (obs, action, reward, terminated, truncated)):
                columns[field].append(value)
            obs, done, episode_return = next_obs, terminated or truncated, episode_return + reward
            lengths[name] += 1
        columns["obs"].append(obs)  # the final observation: nothing about the episode is lost
        returns[name].append(episode_return)

    arrays = {common.NAMES[field][0]: np.stack(column) for field, column in columns.items()}
    arrays["rewards"] = arrays["rewards"].astype(np.float32)
    return arrays, returns, lengths


def table_rows(env_id: str, returns: dict[str, list[float]], lengths: dict[str, int]) -> str:
    returns = returns | {"all": [value for values in returns.values() for value in values]}
    lengths = lengths | {"all": sum(lengths.values())}
    return "".join(
        f"| {env_id} | {name} | {len(values)} | {lengths[name]:,} | {np.mean(values):.1f} |"
        f" {min(values):.1f} | {max(values):.1f} |\n"
        for name, values in returns.items()
    )


if __name__ == "__main__":
    table = HEADER
    for env_id, behaviours, num_episodes in (
        ("Pendulum-v1", PENDULUM, 100),
        ("CartPole-v1", CART_POLE, 150),
        ("MountainCarContinuous-v0", MOUNTAIN_CAR, 15),
    ):
        arrays, returns, lengths = mixed_episodes(env_id, behaviours, num_episodes, seed=0)
        common.save_npz(str(common.SHIPPED / f"{env_id}.npz"), arrays)
        table += table_rows(env_id, returns, lengths)
    (common.SHIPPED / "README.md").write_text(table + FOOTER)
    print(table)
