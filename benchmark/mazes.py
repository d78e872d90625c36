"""Mazes with a sparse reward, and prior data that mostly lead elsewhere, for RLPD.

    python benchmark/mazes.py     writes runs/data/maze-medium.npz and maze-large.npz, in minutes
    python algos/rlpd.py --env-id benchmark.mazes:MazeMedium-v0 \\
        --dataset runs/data/maze-medium.npz --reward-shift -1 --no-backup-entropy

A ball is pushed through a maze, from the top left to the bottom right. Reward 1 at the goal, where
the episode ends, else 0: so the mean return is the share of episodes that get there, and training
sees 0 and -1. The mazes and the physics are Gymnasium-Robotics' PointMaze (pip install
gymnasium-robotics). An agent that explores by chance hardly ever gets there. The data come from a
controller that walks from random places to other random places, with noise: they show every
corridor, but the goal only in a few of 2,000 episodes. What the agent itself finds there is soon
more than the data have of it, and still less than one row in a thousand of both together.
"""

import sys
from pathlib import Path

import gymnasium as gym
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for common.py
import common

MAZES = {  # r: where episodes start, g: the goal, #: a wall
    "Medium": """
        ########
        #r.##..#
        #..#...#
        ##...###
        #..#...#
        #.#..#.#
        #...##g#
        ########""",
    "Large": """
        ############
        #r...#.....#
        #.##.#.#.#.#
        #......#...#
        #.####.###.#
        #..#.#.....#
        ##.#.#.#.###
        #..#...#..g#
        ############""",
}
STEPS = {"Medium": 100, "Large": 150}  # of an episode; the shortest way takes about 60, or 90
ROWS = {"Medium": 200_000, "Large": 300_000}  # of the data
GOAL_SHARE = 0.0006  # of the targets of its controller


class Repeat(gym.Wrapper):
    """Every action lasts four of PointMaze's steps, which are short."""

    def step(self, action):
        for _ in range(4):
            obs, reward, terminated, truncated, info = self.env.step(action)
            if terminated:
                break
        return obs, reward, terminated, truncated, info


def make_maze(size: str, **kwargs) -> gym.Env:
    import gymnasium_robotics  # noqa: F401  registers PointMaze

    cells = [[{"#": 1, ".": 0}.get(cell, cell) for cell in row] for row in MAZES[size].split()]
    flags = {"maze_map": cells, "continuing_task": False, "max_episode_steps": -1}
    return Repeat(gym.make(f"PointMaze_{size}-v3", **flags, **kwargs))


for size, limit in STEPS.items():
    gym.register(f"Maze{size}-v0", make_maze, max_episode_steps=limit, kwargs={"size": size})


def next_cell(
    free: set[tuple[int, int]], start: tuple[int, int], goal: tuple[int, int]
) -> tuple[int, int]:
    """The first step of a shortest path from start to goal, found from the goal backwards."""
    toward, border = {goal: goal}, [goal]
    while start not in toward:
        reached, border = border, []
        for row, column in reached:
            for down, right in ((1, 0), (-1, 0), (0, 1), (0, -1)):
                cell = (row + down, column + right)
                if cell in free and cell not in toward:
                    toward[cell] = (row, column)
                    border.append(cell)
    return toward[start]


def make_data(size: str, path: Path) -> None:
    env, rng = common.make_env(f"Maze{size}-v0"), np.random.default_rng(0)
    maze = env.unwrapped.maze
    lines = MAZES[size].split()
    marks = {(i, j): x for i, line in enumerate(lines) for j, x in enumerate(line) if x != "#"}
    goal = next(cell for cell, x in marks.items() if x == "g")
    others, rows = [cell for cell in marks if cell != goal], []  # at the end of a corridor

    def draw_target() -> tuple[int, int]:
        return goal if rng.random() < GOAL_SHARE else others[rng.integers(len(others))]

    done, num_episodes = True, 0
    while len(rows) < ROWS[size]:
        if done:
            num_episodes += 1
            start = np.array(others[rng.integers(len(others))])
            obs, _ = env.reset(seed=num_episodes, options={"reset_cell": start})
            target, noise = draw_target(), rng.uniform(0.2, 1)
        ball = env.unwrapped.point_env.data
        place, speed = ball.qpos[:2], ball.qvel[:2]
        cell = tuple(int(x) for x in maze.cell_xy_to_rowcol(place))
        if cell == target:
            target = draw_target()
        way_point = maze.cell_rowcol_to_xy(np.array(next_cell(set(marks), cell, target)))
        action = 5 * (way_point - place) - speed + noise * rng.normal(size=2)
        action = action.clip(-1, 1).astype(np.float32)
        next_obs, reward, terminated, truncated, _ = env.step(action)
        done = terminated or truncated
        rows.append((obs, action, reward, next_obs, terminated, truncated))
        obs = next_obs
    columns = [np.stack(column) for column in zip(*rows)]
    arrays = {names[0]: column for names, column in zip(common.NAMES.values(), columns)}
    common.save_npz(str(path), arrays)
    num_goals = arrays["terminations"].sum()
    print(f"{path}: {len(rows):,} rows, {num_episodes} episodes, {num_goals} reach the goal")


if __name__ == "__main__":
    for size in MAZES:
        make_data(size, ROOT / f"runs/data/maze-{size.lower()}.npz")
