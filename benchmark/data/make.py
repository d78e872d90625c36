"""Make the small datasets that ship with the repo: python benchmark/data/make.py

Each is a mixture of scripted episodes from good to random, so that there is something to learn and
something to leave alone. Stored without next_observations (an episode of T steps has T + 1
observations), which halves the file; common.py puts them back.
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for common.py
import common

NOISE_LEVELS = (0.0, 0.25, 0.5, 0.75, 1.0)  # probability of a uniform random action, per episode


def pendulum_controller(obs: np.ndarray) -> np.ndarray:
    """Pump energy into the swing until it is enough to reach the top, then balance there."""
    cos, sin, velocity = obs
    angle = np.arctan2(sin, cos)  # 0 is upright
    energy_lack = 5.0 - (velocity**2 / 6 + 5.0 * cos)  # mass 1, length 1, g 10: 5 at rest upright
    balance, swing_up = -8.0 * angle - 2.0 * velocity, np.sign(velocity) * energy_lack
    torque = balance if abs(angle) < 0.4 else swing_up
    return np.clip([torque], -2.0, 2.0).astype(np.float32)


def mixed_episodes(env_id: str, controller, num_episodes: int, seed: int) -> dict[str, np.ndarray]:
    env = common.make_env(env_id)
    rng = np.random.default_rng(seed)
    env.action_space.seed(seed)
    columns = {name: [] for name in common.NAMES if name != "next_obs"}
    for episode in range(num_episodes):
        noise = NOISE_LEVELS[episode % len(NOISE_LEVELS)]
        obs, _ = env.reset(seed=seed + episode)
        done, episode_return = False, 0.0
        while not done:
            action = env.action_space.sample() if rng.random() < noise else controller(obs)
            next_obs, reward, terminated, truncated, _ = env.step(action)
            for name, value in zip(columns, (obs, action, reward, terminated, truncated)):
                columns[name].append(value)
            obs, done, episode_return = next_obs, terminated or truncated, episode_return + reward
        columns["obs"].append(obs)  # the final observation: nothing about the episode is lost
        print(f"{env_id} episode {episode} noise {noise} return {episode_return:.1f}")
    arrays = {common.NAMES[name][0]: np.stack(column) for name, column in columns.items()}
    arrays["rewards"] = arrays["rewards"].astype(np.float32)
    return arrays


if __name__ == "__main__":
    arrays = mixed_episodes("Pendulum-v1", pendulum_controller, num_episodes=100, seed=0)
    common.save_npz(str(common.SHIPPED / "Pendulum-v1.npz"), arrays)
