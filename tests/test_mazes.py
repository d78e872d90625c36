"""benchmark/mazes.py: mazes with a sparse reward, and a controller that knows the way."""

import numpy as np
import pytest

import common
from benchmark import mazes


def test_next_cell_is_on_a_shortest_path():
    ring = {(0, 0), (0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1), (2, 2)}  # around (1, 1)
    assert mazes.next_cell(ring, (0, 0), (0, 2)) == (0, 1)
    assert mazes.next_cell(ring, (2, 1), (0, 0)) == (2, 0)
    assert mazes.next_cell(ring, (1, 2), (1, 2)) == (1, 2)  # it is there
    assert mazes.next_cell(ring - {(0, 1)}, (0, 0), (0, 2)) == (1, 0)  # the long way round


@pytest.mark.parametrize("size", mazes.MAZES)
def test_reward_and_end_are_at_the_goal_alone(size):
    """The controller without noise walks from the start to the goal within the time limit."""
    env = common.make_env(f"Maze{size}-v0")
    obs, _ = env.reset(seed=0)
    assert obs.shape == (8,)
    maze, lines = env.unwrapped.maze, mazes.MAZES[size].split()
    free = {(i, j) for i, line in enumerate(lines) for j, cell in enumerate(line) if cell != "#"}
    goal = next((i, line.index("g")) for i, line in enumerate(lines) if "g" in line)
    start = next((i, line.index("r")) for i, line in enumerate(lines) if "r" in line)
    ball = env.unwrapped.point_env.data
    assert tuple(maze.cell_xy_to_rowcol(ball.qpos[:2])) == start
    for _ in range(mazes.STEPS[size]):
        cell = tuple(int(x) for x in maze.cell_xy_to_rowcol(ball.qpos[:2]))
        way_point = maze.cell_rowcol_to_xy(np.array(mazes.next_cell(free, cell, goal)))
        if cell == goal:
            way_point = env.unwrapped.goal
        action = (5 * (way_point - ball.qpos[:2]) - ball.qvel[:2]).clip(-1, 1).astype(np.float32)
        _, reward, terminated, truncated, _ = env.step(action)
        is_there = np.linalg.norm(ball.qpos[:2] - env.unwrapped.goal) <= 0.45
        assert (reward == 1) == terminated == is_there
        if terminated or truncated:
            break
    assert terminated and not truncated


def test_episodes_that_miss_the_goal_are_truncated():
    env = common.make_env("MazeMedium-v0")
    env.reset(seed=0)
    ends = [env.step(np.zeros(2, np.float32))[1:4] for _ in range(mazes.STEPS["Medium"])]
    assert ends[:-1] == [(0.0, False, False)] * (len(ends) - 1)
    assert ends[-1] == (0.0, False, True)
