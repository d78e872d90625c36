"""Turn the results of benchmark/run.py into tables and learning curves, and put them where they are
read.

    python benchmark/report.py           draw the figures, update all that is generated
    python benchmark/report.py --check   write nothing; exit code 1 if something is out of date
    python benchmark/report.py --results runs/again     results that are not the published ones:
                                                        all that is made of them goes there, too

Generated are: the table at the top of README.md; of each algos/<name>.md its table of results and
what it quotes from the code; the tables of benchmark/SPEED.md (measured by benchmark/speed.py); and
benchmark/results/index.html, one file that works without a network: curves to hover and filter, a
table to sort, and the command of each row. Its HTML, style and script are benchmark/page.html.

A row of a table is one folder results/<algo>__<env>__<dataset>__<variant>/ with a run per seed.

The last evaluation of a run says what training ends with, the best one what early stopping on the
true return would have kept. They are reported apart: a maximum of noisy numbers is too high by its
nature, and offline it needs the environment that one does not have.

Shapes: S seeds, T tasks, E evaluations, R resamples.
"""

import ast
import csv
import json
import math
import os
import re
import shlex
import sys
import textwrap
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
NUM_RESAMPLES = 10_000
HEADER = (
    "| task | variant | seeds | budget | last: IQM [95 % interval] | best: IQM [95 % interval] |"
)
NOTE = """\
Mean return of the evaluation episodes, then IQM over seeds. *Last*: after training. *Best*: the
highest evaluation of each run, which is biased upwards.
[More on these tables](../benchmark/README.md#the-tables)."""
OLDER = "\u2020 Made by an earlier version of the file, whose defaults may differ."
MEANINGS = {
    "bc": "behaviour cloning (`marwil.py --beta 0`)",
    "few-bc": "behaviour cloning of the rows of `few`",
}

MAIN_VARIANT = {"crr": "mean-binary"}  # of each algorithm, beside the others; else "default"
CLONES = ("marwil", "crr")  # whose behaviour cloning stands beside them all: the first there is
ONLINE = ("rlpd", "mbpo", "fqf", "gail", "dreamer")  # counted in steps; apart from the others
ABLATIONS = {f"{algo}-ablation": algo for algo in ONLINE}  # whose default stands beside them

# Okabe and Ito's colours, which colour-blind readers can tell apart, without yellow (too pale).
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")


@dataclass(frozen=True)
class Headline:
    """A line of the table in README.md, and a panel of its figure."""

    title: str
    paper: str
    learns_from: str
    actions: str
    task: tuple[str, str]  # environment, dataset
    references: tuple[str, ...]  # rows of other people's code on that task


ANY, CONTINUOUS, DISCRETE = "continuous, discrete", "continuous", "discrete"
HEADLINES = {
    "awr": Headline(
        "AWR",
        "https://arxiv.org/abs/1910.00177",
        "dataset",
        ANY,
        ("Pendulum-v1", "shipped"),
        ("axiomrl",),
    ),
    "marwil": Headline(
        "MARWIL",
        "https://papers.nips.cc/paper/2018/hash/4aec1b3435c52abbdf8334ea0e7141e0-Abstract.html",
        "dataset",
        ANY,
        ("Pendulum-v1", "shipped"),
        ("axiomrl",),
    ),
    "crr": Headline(
        "CRR",
        "https://arxiv.org/abs/2006.15134",
        "dataset",
        ANY,
        ("Pendulum-v1", "random-100000"),
        ("d3rlpy",),
    ),
    "rlpd": Headline(
        "RLPD",
        "https://arxiv.org/abs/2302.02948",
        "environment, dataset",
        CONTINUOUS,
        ("MazeLarge-v0", "maze-large"),
        ("sbx-sac-data-in-buffer",),
    ),
    "mbpo": Headline(
        "MBPO",
        "https://arxiv.org/abs/1906.08253",
        "environment",
        CONTINUOUS,
        ("Pendulum-v1", "none"),
        ("mbrl",),
    ),
    "fqf": Headline(
        "FQF",
        "https://arxiv.org/abs/1911.02140",
        "environment (vectors or images)",
        DISCRETE,
        ("CartPole-v1", "none"),
        ("tianshou",),
    ),
    "gail": Headline(
        "GAIL",
        "https://arxiv.org/abs/1606.03476",
        "environment (no reward), expert",
        ANY,
        ("Pendulum-v1", "Pendulum-v1-expert"),
        ("imitation",),
    ),
    "dreamer": Headline(
        "DreamerV3",
        "https://arxiv.org/abs/2301.04104",
        "environment (vectors or images)",
        DISCRETE,
        ("PixelCatch-v0", "none"),
        (),
    ),
}
HEADLINE_HEADER = (
    "| algorithm | file | lines | learns from | actions | task (random policy) "
    "| ours [95 % interval] (seeds) | reference (seeds) |"
)
LABELS = {"sbx-sac-data-in-buffer": "sbx, SAC + data"}  # of references in README.md
HEADLINE_NOTE = """\
Numbers are returns of the last evaluation: the mean over its episodes, then the interquartile mean
(IQM) over seeds. The best possible return is about -145 on Pendulum, 500 on CartPole, 1 on
PixelCatch and in the maze. *shipped* and *expert* are
[datasets in this repository](benchmark/data/README.md), *maze-large* is made by a script of it.
*random-100000* is 100,000 steps of a random policy, so CRR has a harder task than AWR and MARWIL.
A reference is another library with the same data and budget. RLPD's reference is SAC that starts
with the dataset in its replay buffer. We tuned our defaults on these tasks, and chose the maze as
prior data count there. [Nobody tuned the references](benchmark/README.md#references)."""


@dataclass
class Options:
    results: Path = RESULTS  # folders <row>/<seed>/metrics.csv; figures and index.html go there
    root: Path | None = None  # of README.md and algos/ [the repo, if the results are the published]
    check: bool = False  # write nothing, exit with 1 if anything is out of date


@dataclass
class Run:
    """One seed of one row."""

    steps: np.ndarray  # [E] rising
    returns: np.ndarray  # [E]
    behaviour: float | None  # mean return of the dataset's episodes
    is_older: bool = False  # made by older code


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
    ours = {row.name: run.GENERATION[row.algo] for row in run.TABLE}
    for path in sorted(folder.glob("*/*/metrics.csv")):
        name = path.parts[-3]
        row, one = tuple(name.split("__")), read_run(path)
        is_random = row[0] == "random" and len(row) == 2
        if len(row) != 4 and not is_random:
            raise ReportError(f"{path}: not in a folder <algo>__<env>__<dataset>__<variant>")
        if one.steps[-1] == 0 and not is_random:
            raise ReportError(f"{path}: no evaluation after step 0, nothing was trained")
        one.is_older = name in ours and run.generation_of(path) < ours[name]
        results.setdefault(row, []).append(one)
    for row, runs in results.items():  # two versions of the code are two methods: no IQM over both
        results[row] = [one for one in runs if not one.is_older] or runs
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
    for row in results:  # what GAIL's rows "few" see, cloned
        if row[0] == "marwil" and row[2] == f"{row[1]}-few":
            together["gail", row[1], f"{row[1]}-expert", "few-bc"] = results[row]
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
    # of all that saw this dataset: random data are drawn anew for each seed
    same = {row[0] for row in results if row[1:3] == group[1:3] and row[0] != "all"}
    behaviour = []
    for algo in same:
        learners = group_of(results, (algo, *group[1:]))
        # a control may be given other data
        informed = [learners["default"]] if "default" in learners else learners.values()
        behaviour += [one.behaviour for runs in informed for one in runs]
    behaviour = sorted(value for value in behaviour if value is not None)
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
    """Of a group or a task. A dataset that is named after its environment does not say it again."""
    env = group[-2]
    names = ", ".join(part for part in group if part not in ("all", "none"))
    return names.replace(f"{env}, {env}-", f"{env}, ")


def rounded(value: float | None) -> float | None:
    """One digit, two where returns are small. Without -0.0."""
    return None if value is None else round(float(value), 1 if abs(value) >= 10 else 2) + 0.0


def number(value: float | None) -> str:
    return "-" if value is None else f"{rounded(value):.{1 if abs(value) >= 10 else 2}f}"


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
    """A narrow column breaks before the bracket, never in it: \u00a0 is a space that stays."""
    ends = ",\u00a0".join(map(number, interval))
    return f"{number(value)} [{ends}]" if interval else number(value)


def named(variant: str, runs: list[Run]) -> str:
    return f"{variant}\u00a0\u2020" if any(run.is_older for run in runs) else variant


def tasks_of(results: Results, algo: str) -> dict[tuple[str, ...], dict[str, list[Run]]]:
    """Task -> variant -> runs: the algorithm's own, its ablations, others on the same data, and
    cloning at the end. The task of the README comes first."""
    names = (algo, f"{algo}-ablation")  # where it only clones, it does so for others
    tasks = {row[1:3] for row in results if row[0] in names and row[3] != "bc"}
    found, first = {}, HEADLINES[algo].task if algo in HEADLINES else ()
    for task in sorted(tasks, key=lambda task: (task != first, task)):
        variants = {}
        for name in together_with(algo):
            variants |= group_of(results, (name, *task))
        variants.pop(algo, None)  # in the last two it is the default once more
        bc = variants.pop("bc", None) or clones_of(results, task)
        order = sorted(variants, key=lambda variant: variant != main_variant(algo))  # stable
        found[task] = {variant: variants[variant] for variant in order} | ({"bc": bc} if bc else {})
    return found


def together_with(algo: str) -> tuple[str, ...]:
    """The first parts of the groups that a page shows. CRR's has the three offline algorithms side
    by side, for all of them."""
    return (algo, f"{algo}-ablation") + (("all",) if algo == "crr" else ())


def table(results: Results, algo: str) -> str:
    """All that was measured with one algorithm: a line per task and variant. The first of a task
    says what its returns have to be compared with."""
    lines = [HEADER, "| :-- | :-- |" + " --: |" * 4]
    for task, variants in tasks_of(results, algo).items():
        compare = references(results, (algo, *task))
        known = {"random": compare["random"], "data": compare["behaviour"]}
        known = [f"{name} {number(value)}" for name, value in known.items() if value is not None]
        task_cell = f"{title(task)} ({', '.join(known)})" if known else title(task)
        for variant, runs in variants.items():
            last, best = last_and_best(runs)
            is_online = algo in ONLINE and not variant.endswith("bc")
            budget = span([run.steps[-1] for run in runs])
            cells = [task_cell, named(variant, runs), str(len(runs))]
            cells += [f"{budget}\u00a0{'steps' if is_online else 'updates'}"]
            cells += [in_brackets(*estimate(scores, iqm)) for scores in (last, best)]
            lines.append(f"| {' | '.join(cells)} |")
            task_cell = title(task)
    return "\n".join(lines)


def flags_of(entry: run.Row) -> dict[str, str]:
    """Flag -> its value, "" if it has none."""
    flags: dict[str, str] = {}
    for word in entry.flags.split():
        if word.startswith("--"):
            flags[word] = ""
        else:
            flags[[*flags][-1]] = word
    return flags


def legend(results: Results, algo: str) -> str:
    """The flags of a page's rows: those of a task, and what each variant adds to them."""
    known = {entry.name: entry for entry in run.TABLE}

    def code(entry: run.Row, flags: dict[str, str]) -> str:
        words = [] if entry.algo == algo else [f"{entry.algo}.py --dataset {entry.dataset}"]
        words += [f"{flag} {value}".strip() for flag, value in flags.items()]
        return f"`{' '.join(words)}`"

    of_tasks, of_variants = [], {}
    for task, variants in tasks_of(results, algo).items():
        main = known.get("__".join((algo, *task, main_variant(algo))))
        common = flags_of(main) if main else {}
        if common:
            of_tasks.append(f"{title(task)}: {code(main, common)}")
        for variant in variants:
            names = ("__".join((name, *task, variant)) for name in (algo, f"{algo}-ablation"))
            entry = next((known[name] for name in names if name in known), None)
            if variant in MEANINGS:
                of_variants[variant] = MEANINGS[variant]
            elif entry and entry != main:
                flags = {flag: x for flag, x in flags_of(entry).items() if common.get(flag) != x}
                of_variants.setdefault(variant, code(entry, flags))
    meanings = [f"`{variant}`: {text}" for variant, text in of_variants.items()]
    parts = [f"- *Flags of all rows of a task.* {'; '.join(of_tasks)}."] if of_tasks else []
    parts += [f"- *Flags that a variant adds.* {'; '.join(meanings)}."] if meanings else []
    return "\n".join(parts)


def section(results: Results, algo: str, figures: str) -> str:
    """What stands between the markers of a page. figures: where the PNGs are, seen from it"""
    text = table(results, algo)
    tasks = tasks_of(results, algo)
    groups = [
        group
        for group in groups_of(results)
        if group[1:] in tasks and group[0] in together_with(algo)
    ]
    names = {"all": ", side by side", f"{algo}-ablation": ", ablations"}
    order = [*tasks]
    groups.sort(key=lambda group: (order.index(group[1:]), together_with(algo).index(group[0])))
    curves = [
        f"[{title(group[1:])}{names.get(group[0], '')}]({figures}{'__'.join(group)}.png)"
        for group in groups
    ]
    parts = [text, legend(results, algo)]
    parts += [f"!{curves[0].replace('[', '[learning curves of ', 1)}"] if curves else []
    parts += [f"More learning curves: {', '.join(curves[1:])}."] if curves[1:] else []
    parts += [f"{NOTE} {OLDER}" if "\u2020" in text else NOTE]
    return "\n\n".join(part for part in parts if part)


def headline(results: Results, root: Path) -> str:
    """The table of README.md, one line per algorithm. root: of the repo that it describes"""
    lines = [HEADLINE_HEADER, "| :-- | :-- | --: |" + " :-- |" * 3 + " --: | --: |"]
    for algo, line in HEADLINES.items():
        group, variant = (algo, *line.task), main_variant(algo)
        variants = group_of(results, group)
        if variant not in variants:
            continue
        runs, random = variants[variant], references(results, group)["random"]
        budget = max(run.steps[-1] for run in runs)
        others = [
            f"{LABELS.get(name, name)} {number(iqm(at_budget(variants[name], budget)).item())}"
            f" ({len(variants[name])})"
            for name in line.references
            if name in variants
        ]
        file = root / "algos" / f"{algo}.py"
        link = f", [page](algos/{algo}.md)" if file.with_suffix(".md").exists() else ""
        ours = in_brackets(*estimate(last_and_best(runs)[0], iqm))
        ours += f"\u00a0({len(runs)})"
        cells = [f"{line.title} ([paper]({line.paper}){link})", f"[`{algo}.py`](algos/{algo}.py)"]
        cells += [str(len(file.read_text().splitlines())), line.learns_from, line.actions]
        cells += [f"{title(line.task)} ({number(random)})"]
        cells += [named(ours, runs), "; ".join(others) or "-"]
        lines.append(f"| {' | '.join(cells)} |")
    text = "\n".join(lines)
    notes = [HEADLINE_NOTE, OLDER] if "\u2020" in text else [HEADLINE_NOTE]
    return "\n\n".join([text, *notes])


def at_budget(runs: list[Run], budget: int) -> np.ndarray:
    """The last evaluation that a run had made when it had used the budget. -> [S]"""
    return np.array([run.returns[run.steps <= budget][-1] for run in runs])


def quoted(text: str, source: str) -> str:
    """A Markdown text, with what it quotes from a file as it stands there today."""
    lines, places = source.splitlines(), {}
    for node in ast.parse(source).body:
        inner = node.body if isinstance(node, ast.ClassDef) else []
        for one in (node, *inner):
            if isinstance(one, ast.FunctionDef | ast.ClassDef):
                name = one.name if one is node else f"{node.name}.{one.name}"
                first = min([one.lineno, *(line.lineno for line in one.decorator_list)])
                places[name] = textwrap.dedent("\n".join(lines[first - 1 : one.end_lineno]))

    def block(match: re.Match) -> str:
        if match[1] not in places:
            raise ReportError(f"a page quotes {match[1]}, which its file does not have")
        return f"<!-- quote {match[1]} -->\n```python\n{places[match[1]]}\n```\n<!-- end quote -->"

    return re.sub(r"<!-- quote (\S+) -->\n.*?<!-- end quote -->", block, text, flags=re.DOTALL)


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

    rows = {algo: (algo, *line.task, main_variant(algo)) for algo, line in HEADLINES.items()}
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
        # small, so that the longest does not run into the name
        axes.set_title(title(row[1:3]), fontsize=6.5, loc="right", color="0.3")
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


def command_of(row: tuple[str, ...]) -> str | None:
    """What one types for the first seed of a row; None for a row that run.py does not know."""
    known = {entry.name: entry for entry in run.TABLE}.get("__".join(row))
    if known is None:
        return None
    return shlex.join(["python", f"algos/{known.algo}.py", *known.arguments, "--seed", "1"])


def page_row(row: tuple[str, ...], runs: list[Run], compare: dict[str, float | None]) -> dict:
    last, best = last_and_best(runs)
    budgets = [run.steps[-1].item() for run in runs]
    steps, *curves = curve_and_band(runs)  # [E], and three of [E]
    return {
        **dict(zip(("algo", "env", "dataset", "variant"), row)),
        "seeds": len(runs),
        "older": any(run.is_older for run in runs),
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
    algos = list(HEADLINES)

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


def replace_section(page: bytes, text: str, name: str) -> bytes:
    """In bytes, so that line ends and encoding of everything around it stay as they are."""
    first, last = f"<!-- {name}:begin -->".encode(), f"<!-- {name}:end -->".encode()
    before, begin, rest = page.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end or first in rest or last in before or last in after:
        markers = f"{first.decode()} and {last.decode()}"
        raise ReportError(f"a page must have the markers {markers}, once each, in this order")
    return b"".join([before, begin, b"\n\n", text.encode(), b"\n\n", end, after])


def write(path: Path, content: bytes) -> None:
    """Under a temporary name first: a crash leaves the old file or the new one, never a half."""
    temporary = Path(f"{path}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def generated(options: Options, measured: Results, results: Results) -> dict[Path, bytes]:
    """Every file but the figures, as it should be."""
    files = {options.results / "index.html": page(measured)}
    root = options.root or (ROOT if options.results == RESULTS else None)
    if root is None:  # all in one file beside the results
        parts = ["# Results", headline(results, ROOT)]
        for algo in {row[0]: None for row in sorted(measured) if row[0] in HEADLINES}:
            parts += [f"## {HEADLINES[algo].title}", section(results, algo, "")]
        files[options.results / "README.md"] = "\n\n".join([*parts, ""]).encode()
        return files

    readme, speed_page = root / "README.md", root / "benchmark" / "SPEED.md"
    files[readme] = replace_section(readme.read_bytes(), headline(results, root), "headline")
    for path in sorted((root / "algos").glob("*.md")):
        figures = Path(os.path.relpath(options.results, path.parent)).as_posix() + "/"
        text = section(results, path.stem, figures)
        new = replace_section(path.read_bytes(), text, "results").decode()
        files[path] = quoted(new, path.with_suffix(".py").read_text()).encode()
    if speed_page.exists():
        from benchmark import speed  # it imports this file

        text = speed.section(options.results)
        files[speed_page] = replace_section(speed_page.read_bytes(), text, "speed")
    return files


def main(options: Options) -> int:
    try:
        measured = read_results(options.results)
        results = measured | side_by_side(measured)
        files = generated(options, measured, results)
        old = {path: path.read_bytes() if path.exists() else None for path in files}
        stale = [path for path, content in files.items() if old[path] != content]
        if options.check:
            for path in stale:
                message = f"{os.path.relpath(path)} is out of date: run python benchmark/report.py"
                print(f"report: {message}", file=sys.stderr)
            return 1 if stale else 0
        for group in groups_of(results):
            figure(results, group, options.results / f"{'__'.join(group)}.png")
        overview(results, options.results / "overview.png")
        for path in stale:
            write(path, files[path])
    except (ReportError, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    print(f"written: {', '.join(map(os.path.relpath, stale)) or 'nothing is new'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
