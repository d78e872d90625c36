"""Turn the results of benchmark/run.py into tables and learning curves, and put them in the README
and on a page.

    python benchmark/report.py           print the tables, draw the figures, update README and page
    python benchmark/report.py --check   write nothing; exit code 1 if README or page is out of date
    python benchmark/report.py --results runs/again     results that are not the published ones:
                                                        all that is made of them goes there, too

The page is one file that works without a network: curves to hover and filter, a table to sort, and
the command of each row. Its HTML, style and script are benchmark/page.html.

A row of a table is one folder results/<algo>__<env>__<dataset>__<variant>/ with a run per seed.
Where several algorithms were trained on the same data, a table of all of them comes first.

The last evaluation of a run says what training ends with, the best one what early stopping on the
true return would have kept. They are reported apart: a maximum of noisy numbers is too high by its
nature, and offline it needs the environment that one does not have.

Shapes: S seeds, T tasks, E evaluations, R resamples.
"""

import csv
import json
import math
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmark import run

RESULTS = ROOT / "benchmark" / "results"
PAGE = ROOT / "benchmark" / "page.html"  # the template
EMPTY_README = b"""# Results

<!-- glance:begin --><!-- glance:end -->

<!-- results:begin --><!-- results:end -->
"""
NUM_RESAMPLES = 10_000
HEADER = (
    "| variant | seeds | {unit} | random policy | behaviour policy | BC "
    "| last: IQM [95 % interval] | last: mean [95 % interval] | best: IQM [95 % interval] |"
)
NOTE = """\
Made by `python benchmark/report.py`. Returns are means over the evaluation episodes. IQM is the
interquartile mean over seeds; in brackets stand 95 % bootstrap intervals. *Last* is the policy at
the end of training; *best* is the highest evaluation of each run, which flatters. *BC* is the last
IQM of behaviour cloning on the same data. A variant that is named after a library (axiomrl, d3rlpy,
imitation, mbrl, sbx, tianshou) is its own code with the same data and budget; its script in
`benchmark/peers/` says what else is the same and what is not. `ppo` and `dqn`, of
Stable-Baselines3, had Dreamer's pixels and half an hour of one core, which is many more steps."""

MAIN_VARIANT = {"crr": "mean-binary"}  # of each algorithm, beside the others; else "default"
CLONES = ("marwil", "crr")  # whose behaviour cloning stands beside them all: the first there is
ONLINE = ("rlpd", "mbpo", "fqf", "gail", "dreamer")  # counted in steps; apart from the others
ABLATIONS = {f"{algo}-ablation": algo for algo in ONLINE}  # whose default stands beside them

# Okabe and Ito's colours, which colour-blind readers can tell apart, without yellow (too pale).
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")

# The panels of overview.png, in the order in which the README teaches the files: of each algorithm
# a task that it learns, with as many seeds and as different from its neighbours' as there are.
OVERVIEW = {
    "awr": ("Pendulum-v1", "shipped"),
    "marwil": ("CartPole-v1", "shipped"),
    "crr": ("Pendulum-v1", "random-100000"),
    "rlpd": ("MountainCarContinuous-v0", "shipped"),
    "mbpo": ("InvertedPendulum-v5", "none"),
    "fqf": ("CartPole-v1", "none"),
    "gail": ("Pendulum-v1", "Pendulum-v1-expert"),  # CartPole needs no expert: see the README
    "dreamer": ("PixelCatch-v0", "none"),
}

# The lines of the table at the top of the README: of each algorithm a task on which somebody else's
# code was measured, too, which of its variants that are, and what the paper reports. No paper has
# one of these tasks: a figure says its own, and stands here only if we read it in the authors' own
# text.
UNREAD = "no figure that we could check"
GLANCE = {
    "awr": (
        ("Pendulum-v1", "shipped"),
        ("axiomrl",),
        "HalfCheetah, online: 9,121 after 33 million steps (authors' log)",
    ),
    "marwil": (("Pendulum-v1", "shipped"), ("axiomrl",), UNREAD),
    "crr": (("Pendulum-v1", "random-100000"), ("d3rlpy",), UNREAD),
    "rlpd": (
        ("Pendulum-v1", "shipped"),
        ("sbx-sac", "sbx-sac-data-in-buffer"),
        "its own benchmarks: 2.5 x earlier methods (abstract)",
    ),
    "mbpo": (
        ("Pendulum-v1", "none"),
        ("mbrl", "sbx-sac", "sbx-sac-10-updates"),
        "Ant: its 300,000 steps match 3 million of SAC (figure 2)",
    ),
    "fqf": (("CartPole-v1", "none"), ("tianshou",), UNREAD),
    "gail": (
        ("Pendulum-v1", "Pendulum-v1-expert"),
        ("imitation",),
        "Hopper, 4 trajectories of 50 steps: 3,614, expert 3,571, BC 51 (table 3)",
    ),
    "dreamer": (
        ("MinAtar-Breakout-v1", "none"),
        ("ppo", "dqn"),
        "Atari 100k, 26 games: 125 % of a gamer on average, median 49 % (table 9)",
    ),
}
GLANCE_HEADER = (
    "| algorithm | task | random policy | behaviour policy | BC "
    "| ours: IQM [95 % interval] (seeds) | a reference: IQM (seeds) | the paper | command |"
)
GLANCE_NOTE = """\
Made by `python benchmark/report.py` from the last evaluation of every run. The command makes a row
again, beside what is published; `python benchmark/report.py --results runs/again` then shows it. A
reference had the same data and budget and was not tuned (`python benchmark/references.py`). RLPD's
is SAC, without the data and with them; Dreamer's are no Dreamers: `ppo` and `dqn` had the same
pixels and half an hour of one core, which is many more steps (`benchmark/peers/sb3_pixels.py`)."""


@dataclass
class Options:
    results: Path = RESULTS  # folders <row>/<seed>/metrics.csv
    readme: Path | None = None  # with the markers of results and of glance [ours; else in results]
    figures: Path | None = None  # where the PNGs go [results]
    page: Path | None = None  # all results, to be hovered [index.html in results]
    check: bool = False  # write nothing, exit with 1 if the README or the page is out of date


@dataclass
class Run:
    """One seed of one row."""

    steps: np.ndarray  # [E] rising
    returns: np.ndarray  # [E]
    behaviour: float | None  # mean return of the dataset's episodes


Results = dict[tuple[str, ...], list[Run]]  # (algo, env, dataset, variant) or ("random", env)


class ReportError(Exception):
    """Printed as one line; the exit code is then 2."""


# ---- statistics


def iqm(scores: np.ndarray) -> np.ndarray:
    """Interquartile mean over the last axis: the mean of the middle half, blind to one lucky seed.

    Value i of n, in order, covers [i, i + 1] and weighs what of it lies in [n / 4, 3 n / 4], so 5
    values weigh 0, .75, 1, .75, 0. rliable uses scipy.stats.trim_mean, which drops whole values
    (0, 1, 1, 1, 0): the same if n is a multiple of 4, else it averages more than the middle half.
    """
    n = scores.shape[-1]
    i = np.arange(n)
    weights = np.clip(np.minimum(i + 1, 3 * n / 4) - np.maximum(i, n / 4), 0, None)
    return np.average(np.sort(scores, axis=-1), axis=-1, weights=weights)


def mean(scores: np.ndarray) -> np.ndarray:
    return scores.mean(axis=-1)


def bootstrap_interval(
    scores: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray] = iqm
) -> tuple[float, float]:
    """[S, T] -> the 95 % percentile-bootstrap interval of a statistic of all S * T scores.

    Stratified: each task draws its seeds anew, apart from the others, since seed 3 of one task has
    nothing to do with seed 3 of another. With T > 1 the scores must share a scale.
    """
    num_seeds, num_tasks = scores.shape
    rng = np.random.default_rng(0)  # the same data must give the same README
    index = rng.integers(num_seeds, size=(NUM_RESAMPLES, num_seeds, num_tasks))
    resampled = scores[index, np.arange(num_tasks)]  # [R, S, T]
    low, high = np.percentile(statistic(resampled.reshape(NUM_RESAMPLES, -1)), [2.5, 97.5])
    return low.item(), high.item()


# ---- reading


def read_run(path: Path) -> Run:
    returns, behaviour = {}, None
    with open(path, newline="") as file:
        reader = csv.DictReader(file)
        try:
            if reader.fieldnames != ["step", "seconds", "key", "value"]:
                raise ValueError("the columns must be step,seconds,key,value")
            for row in reader:
                if None in row or None in row.values():
                    raise ValueError("a row must have 4 fields")
                if row["key"] not in ("eval/return_mean", "stats/behaviour_return"):
                    continue
                value = float(row["value"])
                if not math.isfinite(value):
                    raise ValueError(f"{row['key']} is {value}")
                if row["key"] == "eval/return_mean":
                    returns[int(row["step"])] = value
                else:
                    behaviour = value
            if not returns:
                raise ValueError("no eval/return_mean up to here, the end")
        except (ValueError, csv.Error) as error:
            raise ReportError(f"{path}, line {reader.line_num}: {error}") from None
    steps = sorted(returns)
    return Run(np.array(steps), np.array([returns[step] for step in steps]), behaviour)


def read_results(folder: Path) -> Results:
    results: Results = {}
    for path in sorted(folder.glob("*/*/metrics.csv")):
        row, run = tuple(path.parts[-3].split("__")), read_run(path)
        is_random = row[0] == "random" and len(row) == 2
        if len(row) != 4 and not is_random:
            raise ReportError(f"{path}: not in a folder <algo>__<env>__<dataset>__<variant>")
        if run.steps[-1] == 0 and not is_random:
            raise ReportError(f"{path}: no evaluation after step 0, nothing was trained")
        results.setdefault(row, []).append(run)
    if all(len(row) == 2 for row in results):
        raise ReportError(f"no results in {folder}: run python benchmark/run.py first")
    return results


def main_variant(algo: str) -> str:
    return MAIN_VARIANT.get(algo, "default")


def side_by_side(results: Results) -> Results:
    """Where several algorithms saw the same data: ("all", env, dataset, algo), and one "bc"."""
    tasks: dict[tuple[str, ...], dict[str, list[Run]]] = {}
    for row, runs in results.items():
        is_main = len(row) == 4 and row[3] == main_variant(row[0])
        if is_main and row[0] not in ONLINE:
            tasks.setdefault(row[1:3], {})[row[0]] = runs
    together = {}
    for task, algos in tasks.items():
        if len(algos) > 1:
            together |= {("all", *task, algo): runs for algo, runs in algos.items()}
            bc = clones_of(results, task)
            together |= {("all", *task, "bc"): bc} if bc else {}
    for name, algo in ABLATIONS.items():
        for task in {row[1:3] for row in results if row[0] == name}:
            runs = results.get((algo, *task, "default"))
            together |= {(name, *task, algo): runs} if runs else {}
    return together


def clones_of(results: Results, task: tuple[str, ...]) -> list[Run] | None:
    clones = [results.get((algo, *task, "bc")) for algo in CLONES]
    return next((runs for runs in clones if runs), None)


def groups_of(results: Results) -> list[tuple[str, ...]]:
    """The tables, in order. An algorithm's own adds something if it has variants, or is alone."""
    groups = sorted({row[:3] for row in results if len(row) == 4})
    together = {group[1:] for group in groups if group[0] == "all"}
    num_variants = {group: len(group_of(results, group).keys() - {"bc"}) for group in groups}
    return [
        group
        for group in groups
        if group[0] == "all"
        or num_variants[group] > 1
        or (num_variants[group] == 1 and group[1:] not in together)
    ]


def group_of(results: Results, group: tuple[str, ...]) -> dict[str, list[Run]]:
    """The variants of one (algo, env, dataset), with the baseline at the end."""
    variants = sorted((row[3] == "bc", row[3]) for row in results if row[:3] == group)
    return {variant: results[(*group, variant)] for _, variant in variants}


def references(results: Results, group: tuple[str, ...]) -> dict[str, float | None]:
    """What a return has to be compared with; None where nobody measured it."""
    variants = group_of(results, group)
    random = [run.returns[-1] for run in results.get(("random", group[1]), [])]
    # a control may be given other data
    informed = [variants["default"]] if "default" in variants else variants.values()
    behaviour = [run.behaviour for runs in informed for run in runs]
    behaviour = [value for value in behaviour if value is not None]
    clones = variants.get("bc") or clones_of(results, group[1:])
    bc = last_and_best(clones)[0] if clones else None
    return {
        "random": np.mean(random).item() if random else None,
        "behaviour": np.mean(behaviour).item() if behaviour else None,
        "BC": None if bc is None else iqm(bc).item(),
    }


def last_and_best(runs: list[Run]) -> tuple[np.ndarray, np.ndarray]:
    """-> [S], [S]. As for best.pt, the untrained network of step 0 cannot be the best one."""
    last = np.array([run.returns[-1] for run in runs])
    best = np.array([run.returns[run.steps > 0].max() for run in runs])
    return last, best


def learning_curve(runs: list[Run]) -> tuple[np.ndarray, np.ndarray]:
    """-> steps [E], returns [S, E].

    A run that stopped early has fewer evaluations than its siblings. Its last value is carried
    forward, as that is the policy it ended with; to drop it would let the line jump where the seeds
    that are left happen to be good or bad.
    """
    steps = np.unique(np.concatenate([run.steps for run in runs]))
    steps = steps[steps >= max(run.steps[0] for run in runs)]  # nothing to carry before that
    position = [np.searchsorted(run.steps, steps, side="right") - 1 for run in runs]
    return steps, np.stack([run.returns[index] for run, index in zip(runs, position)])


def curve_and_band(runs: list[Run]) -> tuple[np.ndarray, ...]:
    """-> steps, IQM, and the low and high end of its 95 % interval, [E] each."""
    steps, returns = learning_curve(runs)
    low, high = np.array([bootstrap_interval(column[:, None]) for column in returns.T]).T
    return steps, iqm(returns.T), low, high


# ---- writing


def unit(group: tuple[str, ...]) -> str:
    """What the budget of these runs is counted in."""
    return "environment steps" if ABLATIONS.get(group[0], group[0]) in ONLINE else "updates"


def title(group: tuple[str, ...]) -> str:
    return ", ".join(part for part in group if part not in ("all", "none"))


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def span(values: list[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,}-{high:,}"


def estimate(
    scores: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray]
) -> tuple[float, ...]:
    """[S] -> value, low, high. One seed says nothing about the others: it gets no interval."""
    value = statistic(scores).item()
    return (value, *bootstrap_interval(scores[:, None], statistic)) if len(scores) > 1 else (value,)


def in_brackets(value: float, *interval: float) -> str:
    return f"{number(value)} [{', '.join(map(number, interval))}]" if interval else number(value)


def table(results: Results, group: tuple[str, ...]) -> str:
    lines = [HEADER.format(unit=unit(group)), "| :-- |" + " --: |" * 8]
    compare = [number(value) for value in references(results, group).values()]
    for variant, runs in group_of(results, group).items():
        last, best = last_and_best(runs)
        budget = span([run.steps[-1] for run in runs])
        scores = (estimate(last, iqm), estimate(last, mean), estimate(best, iqm))
        cells = [variant, str(len(runs)), budget, *compare]
        cells += [in_brackets(*score) for score in scores]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def glance(results: Results) -> str:
    """One line per algorithm, on top of the README."""
    lines = [GLANCE_HEADER, "| :-- | :-- |" + " --: |" * 5 + " :-- | :-- |"]
    for algo, (task, others, paper) in GLANCE.items():
        group, variant = (algo, *task), main_variant(algo)
        variants = group_of(results, group)
        if variant not in variants:
            continue
        runs = variants[variant]
        cells = [algo, title(task), *map(number, references(results, group).values())]
        cells.append(f"{in_brackets(*estimate(last_and_best(runs)[0], iqm))} ({len(runs)})")
        measured = {name: variants[name] for name in others if name in variants}
        scores = {name: iqm(last_and_best(theirs)[0]).item() for name, theirs in measured.items()}
        peers = [f"{name}: {number(scores[name])} ({len(measured[name])})" for name in measured]
        row = "__".join((*group, variant))
        command = f"`python benchmark/run.py --only {row} --seeds {len(runs)} --results runs/again`"
        lines.append(f"| {' | '.join([*cells, '; '.join(peers) or '-', paper, command])} |")
    return "\n\n".join(["\n".join(lines), GLANCE_NOTE])


def figure(results: Results, group: tuple[str, ...], path: Path) -> None:
    from matplotlib.figure import Figure  # slow to import; without pyplot it always draws with Agg

    variants = group_of(results, group)
    canvas = Figure(figsize=(8, 4), dpi=100, layout="constrained")
    axes = canvas.subplots()
    lines = []
    for i, (variant, runs) in enumerate(variants.items()):
        color = "black" if variant == "bc" else PALETTE[i % len(PALETTE)]
        style = "-" if variant == "bc" or i < len(PALETTE) else "-."
        steps, middle, low, high = curve_and_band(runs)
        axes.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
        lines += axes.plot(steps, middle, style, color=color, linewidth=1.8, label=variant)
    lines.sort(key=lambda line: -line.get_ydata()[-1])  # the legend in the order of the line ends

    compare = references(results, group)
    for name, color, dashes in (
        ("random", "0.6", (0, (7, 3))),
        ("behaviour", "0.4", (0, (2, 2))),
    ):
        if compare[name] is not None:
            label = f"{name} ({number(compare[name])})"
            style = {"color": color, "linestyle": dashes, "linewidth": 1.4, "zorder": 1}
            lines.append(axes.axhline(compare[name], label=label, **style))
    # a curve may leave the picture on its way, or a control at -10,000 would flatten all others
    ends = [line.get_ydata()[-1] for line in lines]
    room = max(ends) - min(ends)
    if room > 0 and axes.get_ylim()[0] < min(ends) - room:
        highest = max(line.get_ydata().max() for line in lines[: len(variants)])
        axes.set_ylim(min(ends) - room, max(highest, *ends) + 0.2 * room)

    num_seeds = span([len(runs) for runs in variants.values()])
    axes.set_title(f"{title(group)}  (IQM and 95 % interval, seeds: {num_seeds})", loc="left")
    axes.set_xlabel(unit(group))
    axes.set_ylabel("evaluation return")
    budgets = [run.steps[-1] for runs in variants.values() for run in runs]
    if max(budgets) > 10 * min(budgets):  # else the shortest would be a stroke at the edge
        axes.set_xscale("log")
    else:
        axes.locator_params(axis="x", nbins=6)  # more would touch each other
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.margins(x=0.01)
    axes.grid(color="0.92")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    canvas.legend(handles=lines, loc="outside right center", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.savefig(path, metadata={"Software": None})  # a new matplotlib alone is no new figure


def overview(results: Results, path: Path) -> None:
    """All algorithms at a glance: the first figure of the README. Drawn at twice the pixels at
    which it is shown, so that its small letters stay sharp."""
    from matplotlib.figure import Figure

    rows = {algo: (algo, *task, main_variant(algo)) for algo, task in OVERVIEW.items()}
    rows = {algo: row for algo, row in rows.items() if row in results}
    if not rows:
        return
    canvas = Figure(figsize=(9, 4.5), dpi=200, layout="constrained")
    canvas.get_layout_engine().set(h_pad=0.08, w_pad=0.06)
    panels = canvas.subplots(2, 4).flat
    for (algo, row), axes in zip(rows.items(), panels):
        steps, middle, low, high = curve_and_band(results[row])
        band = axes.fill_between(steps, low, high, color=PALETTE[0], alpha=0.2, linewidth=0)
        (line,) = axes.plot(steps, middle, color=PALETTE[0], linewidth=1.6)
        random = references(results, row[:3])["random"]
        level = math.nan if random is None else random
        dashed = axes.axhline(level, color="0.45", linestyle=(0, (5, 3)), linewidth=1.1, zorder=1)
        name = algo.capitalize() if algo == "dreamer" else algo.upper()
        axes.set_title(name, fontsize=9, fontweight="bold", loc="left", x=-0.15)
        axes.set_title(row[1], fontsize=8, loc="right", color="0.3")
        axes.set_xlabel(f"{unit(row)}, {len(results[row])} seeds", fontsize=7.5, color="0.3")
        axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:g}k" if x else "0")
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.locator_params(nbins=4)
        axes.tick_params(labelsize=7.5, color="0.7")
        axes.margins(x=0.02)
        axes.grid(color="0.93")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color("0.7")
    for axes in panels:  # no results yet
        axes.set_axis_off()
    labels = ("evaluation return, IQM over seeds", "95 % interval", "random policy")
    legend = {"loc": "outside lower center", "ncols": 3, "fontsize": 8, "frameon": False}
    canvas.legend([line, band, dashed], labels, **legend)
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.savefig(path, metadata={"Software": None})


def section(results: Results, figures: dict[tuple[str, ...], Path], readme: Path) -> str:
    """All that stands between the markers."""
    parts = [NOTE]
    for group, path in figures.items():
        name = title(group)
        link = Path(os.path.relpath(path, readme.parent)).as_posix()
        image = f"![learning curves of {name}]({link})"
        parts += [f"### {name}", table(results, group), image]
    return "\n\n".join(parts)


def command_of(row: tuple[str, ...]) -> str | None:
    """What one types for the first seed of a row; None for a row that run.py does not know."""
    known = {entry.name: entry for entry in run.TABLE}.get("__".join(row))
    if known is None:
        return None
    return shlex.join(["python", f"algos/{known.algo}.py", *known.arguments, "--seed", "1"])


def rounded(value: float | None) -> float | None:
    """To the digit of the tables, one more where returns are small. Without -0.0."""
    return None if value is None else round(float(value), 1 if abs(value) >= 10 else 2) + 0.0


def page_row(row: tuple[str, ...], runs: list[Run], compare: dict[str, float | None]) -> dict:
    last, best = last_and_best(runs)
    budgets = [run.steps[-1].item() for run in runs]
    steps, *curves = curve_and_band(runs)  # [E], and three of [E]
    return {
        **dict(zip(("algo", "env", "dataset", "variant"), row)),
        "seeds": len(runs),
        "budget": [min(budgets), max(budgets)],
        **{name.lower(): rounded(value) for name, value in compare.items()},
        "last": [rounded(value) for value in estimate(last, iqm)],
        "mean": [rounded(value) for value in estimate(last, mean)],
        "best": [rounded(value) for value in estimate(best, iqm)],
        "command": command_of(row),
        "steps": steps.tolist(),
        **{
            name: [rounded(value) for value in curve]
            for name, curve in zip(("iqm", "low", "high"), curves)
        },
    }


def page_data(results: Results) -> dict:
    """Every row with its numbers and its curve, and which of them share a chart, under which names:
    a row may be in several charts, and is in the page once."""
    everything = results | side_by_side(results)
    algos = list(OVERVIEW)

    def rank(group: tuple[str, ...]) -> tuple:  # side by side first, then in the README's order
        algo = ABLATIONS.get(group[0], group[0])
        known = algos.index(algo) if algo in algos else len(algos)
        return group[0] != "all", known, group

    groups = sorted({row[:3] for row in everything if len(row) == 4}, key=rank)
    compare = {group: references(everything, group) for group in groups}
    rows, places = [], {}
    for group in groups:
        for variant, runs in group_of(results, group).items():
            places[id(runs)] = len(rows)  # side_by_side gives the same runs another name
            rows.append(page_row((*group, variant), runs, compare[group]))
    charts = [
        {
            "title": title(group),
            "unit": unit(group),
            **{name: rounded(compare[group][name]) for name in ("random", "behaviour")},
            "lines": [
                {"label": variant, "row": places[id(runs)]}
                for variant, runs in group_of(everything, group).items()
            ],
        }
        for group in groups
    ]
    return {"palette": PALETTE, "rows": rows, "charts": charts}


def page(results: Results) -> bytes:
    """The template with the results in it. No name in them can end the script that they are in:
    JSON has another way to write a <."""
    data = json.dumps(page_data(results), separators=(",", ":")).replace("<", r"\u003c")
    return PAGE.read_text(encoding="utf-8").replace("@DATA@", data).encode()


def replace_section(readme: bytes, text: str, name: str) -> bytes:
    """In bytes, so that line ends and encoding of everything around it stay as they are."""
    first, last = f"<!-- {name}:begin -->".encode(), f"<!-- {name}:end -->".encode()
    before, begin, rest = readme.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end or first in rest or last in before or last in after:
        markers = f"{first.decode()} and {last.decode()}"
        raise ReportError(f"the README must have the markers {markers}, once each, in this order")
    return b"".join([before, begin, b"\n\n", text.encode(), b"\n\n", end, after])


def write(path: Path, content: bytes) -> None:
    """Under a temporary name first: a crash leaves the old file or the new one, never a half."""
    temporary = Path(f"{path}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def main(options: Options) -> int:
    are_published = options.results == RESULTS
    readme = options.readme or (ROOT if are_published else options.results) / "README.md"
    figures = options.figures or options.results
    page_file = options.page or options.results / "index.html"
    try:
        measured = read_results(options.results)
        results = measured | side_by_side(measured)
        paths = {group: figures / f"{'__'.join(group)}.png" for group in groups_of(results)}
        text = section(results, paths, readme)
        is_known = options.readme or are_published
        old = readme.read_bytes() if is_known else EMPTY_README
        new = replace_section(old, text, "results")
        new = replace_section(new, glance(results), "glance")
        new_page = page(measured)
        if options.check:
            old_page = page_file.read_bytes() if page_file.exists() else None
            stale = [readme] * (new != old) + [page_file] * (new_page != old_page)
            for path in stale:
                message = f"{path} is out of date: run python benchmark/report.py"
                print(f"report: {message}", file=sys.stderr)
            return 1 if stale else 0
        for group, path in paths.items():
            figure(results, group, path)
        overview(results, figures / "overview.png")
        page_file.parent.mkdir(parents=True, exist_ok=True)
        write(page_file, new_page)
        write(readme, new)
    except (ReportError, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    print(text)
    print(f"\nwritten: {os.path.relpath(readme)}, {os.path.relpath(page_file)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
