"""benchmark/report.py against numbers that were worked out by hand or by brute force."""

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmark import report, speed

ROOT = Path(__file__).resolve().parents[1]
GROUP = ("crr", "Env-v1", "shipped")
RESULTS = (b"<!-- results:begin -->", b"<!-- results:end -->")
HEADLINE = (b"<!-- headline:begin -->", b"<!-- headline:end -->")
SPEED = (b"<!-- speed:begin -->", b"<!-- speed:end -->")
BEFORE, AFTER = b"# caf\xc3\xa9\r\ntext \n\n", b"\r\nmore\t\n\n| a | 1.0 |"  # mixed line ends
SOURCE = """import math


class Critic:
    @staticmethod
    def forward(x):
        return x  # [B]


@torch.no_grad()
def crr_loss(x):
    return x

"""


def write_run(
    folder: Path, curve: dict[int, float], behaviour: float | None = None, generation: int = 0
) -> None:
    rows = ["step,seconds,key,value"]
    if generation:
        rows.append(f"0,0,generation,{generation}")
    if behaviour is not None:
        rows.append(f"0,0.1,stats/behaviour_return,{behaviour}")
    for step, value in curve.items():
        rows += [f"{step},1.5,eval/return_mean,{value}", f"{step},1.5,eval/return_max,5000"]
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text("\n".join(rows) + "\n")


@pytest.fixture
def options(tmp_path: Path) -> report.Options:
    """Four seeds with last = 10 20 40 100 and best = 60 50 80 200, BC, a random policy; a repo with
    a README, the page of one algorithm and its file.

    Step 0 is higher than all else: an untrained network must never be the best one.
    """
    results, root = tmp_path / "results", tmp_path / "root"
    write_run(results / "random__Env-v1" / "1", {0: -3.5})
    for seed, best, last in ((1, 60, 10), (2, 50, 20), (3, 80, 40), (4, 200, 100)):
        curve = {0: 999, 500: best, 1000: last}
        write_run(results / "crr__Env-v1__shipped__mean-exp" / str(seed), curve, behaviour=12)
    write_run(results / "crr__Env-v1__shipped__bc" / "1", {0: 1, 500: 9, 1000: 7}, behaviour=22)
    (root / "algos").mkdir(parents=True)
    (root / "README.md").write_bytes(BEFORE + b"old".join(HEADLINE) + AFTER)
    quote = b"<!-- quote crr_loss -->\nold\n<!-- end quote -->"
    (root / "algos" / "crr.md").write_bytes(BEFORE + quote + b"old".join(RESULTS) + AFTER)
    (root / "algos" / "crr.py").write_text(SOURCE)
    return report.Options(results, root)


def cells(table: str) -> list[list[str]]:
    lines = table.replace("\u00a0", " ").splitlines()  # spaces at which no line breaks
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def one_line_of(capsys: pytest.CaptureFixture) -> str:
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("report: ") and captured.err.count("\n") == 1
    return captured.err


# ---- statistics


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([1, 2, 3, 4], 2.5),  # (2 + 3) / 2
        ([100, 3, 0, 1], 2),  # (1 + 3) / 2: sorted first, and the outlier has no say
        ([13, 0, 1000, 4, 5], 7.1),  # (.75 * 4 + 5 + .75 * 13) / 2.5; trim_mean would say 22 / 3
        ([0, 2, 4, 7, 12, 100], 6),  # (.5 * 2 + 4 + 7 + .5 * 12) / 3; trim_mean would say 6.25
        ([-7], -7),
        ([1, 5], 3),
    ],
)
def test_iqm_by_hand(scores, expected):
    assert report.iqm(np.array(scores)) == pytest.approx(expected, abs=1e-12)


def test_iqm_is_over_the_last_axis():
    scores = np.array([[0, 1, 3, 100], [8, 6, 4, -50]])
    assert report.iqm(scores) == pytest.approx([2, 5])


def test_interval_of_constant_scores_is_a_point():
    assert report.bootstrap_interval(np.full((5, 1), 3.25)) == (3.25, 3.25)


def test_interval_against_all_resamples():
    """6 seeds have 6^6 equally likely resamples: the exact quantiles, with an IQM of our own."""
    scores = np.array([3.0, 4.7, 11.0, 12.9, 20.3, 31.6])
    _, b, c, d, e, _ = np.sort(list(itertools.product(scores, repeat=6)), axis=1).T
    exact = (0.5 * b + c + d + 0.5 * e) / 3
    low, high = report.bootstrap_interval(scores[:, None])
    outer_low, inner_low, inner_high, outer_high = np.quantile(exact, [0.02, 0.03, 0.97, 0.98])
    assert outer_low <= low <= inner_low and inner_high <= high <= outer_high
    # neither a 90 % nor a 99 % interval would pass
    assert inner_low < np.quantile(exact, 0.05) and np.quantile(exact, 0.95) < inner_high
    assert outer_low > np.quantile(exact, 0.005) and np.quantile(exact, 0.995) > outer_high
    assert low < (0.5 * 4.7 + 11.0 + 12.9 + 0.5 * 20.3) / 3 < high


def test_interval_shrinks_with_seeds():
    scores = np.random.default_rng(3).normal(size=(400, 1))
    widths = [np.ptp(report.bootstrap_interval(scores[:n])) for n in (6, 50, 400)]
    assert widths[0] > 1.5 * widths[1] > 0
    assert widths[1] > 1.5 * widths[2] > 0


def test_interval_is_deterministic():
    scores = np.random.default_rng(4).normal(size=(7, 2))
    assert report.bootstrap_interval(scores) == report.bootstrap_interval(scores.copy())


def test_interval_is_stratified_by_task():
    # every task keeps its share of the scores: always four 0s and four 10s, an IQM of 5
    by_task = np.tile([0.0, 10.0], (4, 1))
    assert report.bootstrap_interval(by_task) == (5, 5)
    # seeds are drawn per task: drawn as pairs, x and -x would cancel in every resample
    x = np.array([1.0, 2.0, 5.0, 9.0])
    low, high = report.bootstrap_interval(np.stack([x, -x], axis=1))
    assert low < -0.5 and high > 0.5


# ---- tables


def table_of(folder: Path, algo: str) -> list[list[str]]:
    results = report.read_results(folder)
    return cells(report.table(results | report.side_by_side(results), algo))


def test_table_by_hand(options):
    table = table_of(options.results, "crr")
    assert table[0] == [
        "task",
        "variant",
        "seeds",
        "budget",
        "last: IQM [95 % interval]",
        "best: IQM [95 % interval]",
    ]
    assert len(table[1]) == 6 and set("".join(table[1])) == set(":- ") - {" "}
    last_low, last_high = report.bootstrap_interval(np.array([[10.0], [20], [40], [100]]))
    best_low, best_high = report.bootstrap_interval(np.array([[60.0], [50], [80], [200]]))
    # behaviour: (4 * 12 + 22) / 5; last: (20 + 40) / 2; best: (60 + 80) / 2
    last = f"30.0 [{last_low:.1f}, {last_high:.1f}]"
    best = f"70.0 [{best_low:.1f}, {best_high:.1f}]"
    task = "Env-v1, shipped"
    first = f"{task} (random -3.50, data 14.0)"  # once per task
    assert table[2] == [first, "mean-exp", "4", "1,000 updates", last, best]
    # BC stands last although b < m; one seed has no interval
    assert table[3] == [task, "bc", "1", "1,000 updates", "7.00", "9.00"]
    assert len(table) == 4


def test_mean_and_its_interval_by_hand():
    """170 / 4, and the quantiles of all 4^4 equally likely resamples."""
    scores = np.array([10.0, 20, 40, 100])
    means = [np.mean(draw) for draw in itertools.product(scores, repeat=4)]
    mean, low, high = report.estimate(scores, report.mean)
    assert mean == 42.5
    assert (low, high) == pytest.approx(tuple(np.percentile(means, [2.5, 97.5])), abs=2.6)


def test_table_without_references(tmp_path):
    write_run(tmp_path / "awr__Env-v2__random-10__exp" / "1", {100: 2.04})
    write_run(tmp_path / "random__Other-v0" / "1", {0: 1})
    line = ["Env-v2, random-10", "exp", "1", "100 updates", "2.04", "2.04"]
    assert table_of(tmp_path, "awr")[2:] == [line]


def test_digits():
    """As many as a reader needs, and no minus before a zero."""
    values = (-1234.56, 9.876, -0.75, -0.001, None)
    assert [*map(report.number, values)] == ["-1234.6", "9.88", "-0.75", "0.00", "-"]


def test_groups_have_figures_of_their_own(options):
    write_run(options.results / "crr__Env-v1__random-10__max-exp" / "1", {100: 77})
    assert report.main(options) == 0
    page = (options.root / "algos" / "crr.md").read_text()
    for dataset in ("random-10", "shipped"):
        assert f"](../../results/crr__Env-v1__{dataset}.png)" in page
        assert (options.results / f"crr__Env-v1__{dataset}.png").is_file()


def test_algorithms_on_the_same_data_stand_side_by_side(options):
    """On CRR's page: AWR and CRR's main variant on shipped; AWR's has its own rows and BC, which is
    MARWIL's where there is no other. random-10 has CRR alone, and MARWIL, which only clones there,
    has no page's worth of results."""
    for seed in (1, 2):
        write_run(options.results / "awr__Env-v1__shipped__default" / str(seed), {0: 1, 900: 66})
        write_run(
            options.results / "crr__Env-v1__shipped__mean-binary" / str(seed), {0: 1, 900: 55}
        )
    write_run(options.results / "marwil__Env-v1__shipped__bc" / "1", {0: 1, 900: 33})
    write_run(options.results / "crr__Env-v1__random-10__mean-binary" / "1", {100: 77})
    awr = table_of(options.results, "awr")[2:]
    compare = " (random -3.50, data 14.0)"  # its data are those of the other rows
    assert [(row[0], row[1], row[2], row[4]) for row in awr] == [
        ("Env-v1, shipped" + compare, "default", "2", "66.0 [66.0, 66.0]"),
        ("Env-v1, shipped", "bc", "1", "33.0"),
    ]
    crr = table_of(options.results, "crr")[2:]
    assert [(row[0], row[1]) for row in crr] == [
        ("Env-v1, random-10 (random -3.50)", "mean-binary"),
        ("Env-v1, shipped" + compare, "mean-binary"),  # the main one first
        ("Env-v1, shipped", "mean-exp"),
        ("Env-v1, shipped", "awr"),
        ("Env-v1, shipped", "bc"),
    ]
    results = report.read_results(options.results)
    results |= report.side_by_side(results)
    assert report.references(results, ("awr", "Env-v1", "shipped"))["BC"] == 33  # it has none
    assert report.references(results, ("crr", "Env-v1", "shipped"))["BC"] == 7  # its own
    assert report.tasks_of(results, "marwil") == {}
    assert report.main(options) == 0
    assert (options.results / "all__Env-v1__shipped.png").is_file()
    assert (
        "](../../results/all__Env-v1__shipped.png)"
        in (options.root / "algos" / "crr.md").read_text()
    )


def test_the_task_of_the_readme_comes_first(tmp_path):
    for env, dataset in (("Acrobot-v1", "none"), ("CartPole-v1", "none"), ("Zoo-v1", "none")):
        write_run(tmp_path / f"fqf__{env}__{dataset}__default" / "1", {0: 1, 300: 9})
    tasks = [row[0] for row in table_of(tmp_path, "fqf")[2:]]
    assert tasks == ["CartPole-v1", "Acrobot-v1", "Zoo-v1"]


def test_online_algorithms_stand_apart_and_ablations_beside_their_default(options):
    """RLPD counts environment steps: CRR is not in its table. Cloning on the same data is, and its
    budget says that it is counted in updates. The ablations have a figure of their own, with the
    default in it."""
    for name, value in (("rlpd", 50), ("rlpd-ablation", 40)):
        variant = "default" if name == "rlpd" else "a-layer-less"
        for seed in (1, 2):
            folder = options.results / f"{name}__Env-v1__shipped__{variant}" / str(seed)
            write_run(folder, {0: 1, 300: value}, behaviour=12)
    write_run(options.results / "rlpd__Env-v1__shipped__sac" / "1", {0: 1, 300: 30})
    write_run(options.results / "crr__Env-v1__shipped__mean-binary" / "1", {0: 1, 900: 55})
    table = table_of(options.results, "rlpd")
    assert table_of(options.results, "crr")[2][3] == "900 updates"
    assert [row[1:5] for row in table[2:]] == [
        ["default", "2", "300 steps", "50.0 [50.0, 50.0]"],
        ["sac", "1", "300 steps", "30.0"],
        ["a-layer-less", "2", "300 steps", "40.0 [40.0, 40.0]"],
        ["bc", "1", "1,000 updates", "7.00"],
    ]
    results = report.read_results(options.results)
    results |= report.side_by_side(results)
    ablation = report.group_of(results, ("rlpd-ablation", "Env-v1", "shipped"))
    assert list(ablation) == ["a-layer-less", "rlpd"]
    assert report.main(options) == 0
    for name in ("rlpd", "rlpd-ablation"):
        assert (options.results / f"{name}__Env-v1__shipped.png").is_file()


def test_what_gail_sees_little_of_is_also_cloned(tmp_path):
    write_run(tmp_path / "gail__Env-v1__Env-v1-expert__few" / "1", {0: 1, 300: 9})
    write_run(tmp_path / "marwil__Env-v1__Env-v1-few__bc" / "1", {0: 1, 700: 5})
    table = table_of(tmp_path, "gail")
    assert [(row[1], row[3], row[4]) for row in table[2:]] == [
        ("few", "300 steps", "9.00"),
        ("few-bc", "700 updates", "5.00"),
    ]


@pytest.mark.parametrize("algo", report.ONLINE)
def test_online_algorithms_are_counted_in_environment_steps(tmp_path, algo):
    write_run(tmp_path / f"{algo}__Env-v1__none__default" / "1", {0: 1, 300: 9})
    write_run(tmp_path / f"{algo}-ablation__Env-v1__none__less" / "1", {0: 1, 300: 5})
    assert [row[3] for row in table_of(tmp_path, algo)[2:]] == ["300 steps"] * 2
    for name in (algo, f"{algo}-ablation"):
        assert report.unit((name, "Env-v1", "none")) == "environment steps"


def test_runs_of_older_code_are_marked(tmp_path, monkeypatch):
    """A row of two older seeds; a row that is all new; a peer's, without a generation."""
    rows = [
        report.run.Row("fqf", "CartPole-v1", "none", name, "", 1) for name in ("default", "new")
    ]
    monkeypatch.setattr(report.run, "TABLE", rows)
    monkeypatch.setitem(report.run.GENERATION, "fqf", 3)
    folder = tmp_path / "fqf__CartPole-v1__none__default"
    write_run(folder / "1", {0: 1, 300: 9})
    write_run(folder / "2", {0: 1, 300: 9}, generation=2)
    write_run(tmp_path / "fqf__CartPole-v1__none__new" / "1", {0: 1, 300: 9}, generation=3)
    write_run(tmp_path / "fqf__CartPole-v1__none__tianshou" / "1", {0: 1, 300: 9})
    variants = [row[1] for row in table_of(tmp_path, "fqf")[2:]]
    assert variants == ["default \u2020", "new", "tianshou"]
    results = report.read_results(tmp_path)
    for text in (report.section(results, "fqf", ""), report.headline(results, ROOT)):
        assert text.count(report.OLDER) == 1
    rows = report.page_data(results)["rows"]
    assert {row["variant"]: row["older"] for row in rows} == {
        "default": True,
        "new": False,
        "tianshou": False,
    }


def test_seeds_of_older_code_do_not_count_beside_new_ones(tmp_path, monkeypatch):
    """Older code may have had other hyper-parameters: an IQM over both would be of no method. Two
    seeds of five were made again; in another row none was."""
    monkeypatch.setitem(report.run.GENERATION, "fqf", 3)
    folder = tmp_path / "fqf__CartPole-v1__none__default"
    for seed, (last, generation) in enumerate(((100, 3), (2, 2), (300, 3), (4, 1), (6, 0)), 1):
        write_run(folder / str(seed), {0: 1, 300: last}, generation=generation)
    for seed in (1, 2):
        write_run(tmp_path / "fqf__CartPole-v1__none__qr-dqn" / str(seed), {0: 1, 300: 7 + seed})
    table = table_of(tmp_path, "fqf")
    assert [row[1:5] for row in table[2:]] == [
        ["default", "2", "300 steps", "200.0 [100.0, 300.0]"],
        ["qr-dqn \u2020", "2", "300 steps", "8.50 [8.00, 9.00]"],
    ]
    results = report.read_results(tmp_path)
    (row,) = cells(report.headline(results, ROOT).split("\n\n")[0])[2:]
    assert row[6] == "200.0 [100.0, 300.0] (2)"
    rows = report.page_data(results)["rows"]
    assert {row["variant"]: row["seeds"] for row in rows} == {"default": 2, "qr-dqn": 2}


def test_legend_has_the_flags_of_tasks_and_variants(tmp_path, monkeypatch):
    """What a variant adds to its task, in words that can be typed; peers have no flags of ours."""
    Row = report.run.Row
    rows = [
        Row("mbpo", "Env-v1", "none", "default", "--a 1 --b", 1),
        Row("mbpo", "Env-v1", "none", "c", "--a 2 --b --no-c", 1, "mbpo-ablation"),
        Row("rlpd", "Env-v1", "none", "sac", "--a 1 --d 5", 1, "mbpo"),
    ]
    monkeypatch.setattr(report.run, "TABLE", rows)
    for row in (*(row.name for row in rows), "mbpo__Env-v1__none__mbrl", "mbpo__Z-v0__none__x"):
        write_run(tmp_path / row / "1", {0: 1, 300: 9})
    lines = report.legend(report.read_results(tmp_path), "mbpo").split("\n")
    assert [line.removeprefix("- *") for line in lines] == [
        "Flags of all rows of a task.* Env-v1: `--a 1 --b`.",
        "Flags that a variant adds.* `sac`: `rlpd.py --dataset none --d 5`; `c`: `--a 2 --no-c`.",
    ]
    assert report.legend(report.read_results(tmp_path), "awr") == ""


def test_titles_do_not_say_a_name_twice():
    for group, expected in (
        (("gail", "CartPole-v1", "CartPole-v1-expert"), "gail, CartPole-v1, expert"),
        (("CartPole-v1", "CartPole-v1-expert"), "CartPole-v1, expert"),
        (("all", "Pendulum-v1", "random-10"), "Pendulum-v1, random-10"),
        (("fqf", "CartPole-v1", "none"), "fqf, CartPole-v1"),
    ):
        assert report.title(group) == expected


# ---- curves


def test_a_control_with_other_data_does_not_count_as_behaviour(tmp_path):
    """The expert of the default is at 500; the random one of a control is not what was imitated."""
    for variant, behaviour in (("default", 500), ("random-expert", 20)):
        folder = tmp_path / f"gail__Env-v1__expert__{variant}" / "1"
        write_run(folder, {0: 1, 300: 9}, behaviour)
    group = ("gail", "Env-v1", "expert")
    assert report.references(report.read_results(tmp_path), group)["behaviour"] == 500


def test_early_stop_is_carried_forward(tmp_path):
    row = tmp_path / "crr__Env-v1__shipped__exp"
    write_run(row / "1", {0: 1, 10: 2, 20: 3, 30: 4})
    write_run(row / "2", {0: 5, 10: 8})  # stopped
    write_run(row / "3", {0: 6, 20: 7, 30: 9})  # evaluated less often
    results = report.read_results(tmp_path)
    steps, returns = report.learning_curve(results[(*GROUP, "exp")])
    assert steps.tolist() == [0, 10, 20, 30]
    assert returns.tolist() == [[1, 2, 3, 4], [5, 8, 8, 8], [6, 6, 7, 9]]
    row = cells(report.table(results, "crr"))[2]
    low, high = report.bootstrap_interval(np.array([[4.0], [8], [9]]))
    assert row[3] == "10-30 updates"
    assert row[4] == f"7.50 [{low:.2f}, {high:.2f}]"  # (4 / 4 + 8 + 9 / 4) / 1.5


def test_curve_starts_where_all_seeds_have_a_value(tmp_path):
    write_run(tmp_path / "crr__Env-v1__shipped__exp" / "1", {0: 1, 10: 2, 20: 3})
    write_run(tmp_path / "crr__Env-v1__shipped__exp" / "2", {10: 5, 20: 6})
    steps, returns = report.learning_curve(report.read_results(tmp_path)[(*GROUP, "exp")])
    assert steps.tolist() == [10, 20]
    assert returns.tolist() == [[2, 3], [5, 6]]


def test_figure_draws_the_numbers(options, monkeypatch):
    from matplotlib.figure import Figure

    write_run(options.results / "crr__Env-v1__shipped__a-low" / "1", {0: 1, 1000: 2})
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kwargs: drawn.append(self))
    report.figure(report.read_results(options.results), GROUP, options.results / "x.png")
    (axes,) = drawn[0].axes
    lines = {line.get_label(): line for line in axes.lines}
    assert lines["mean-exp"].get_xdata().tolist() == [0, 500, 1000]
    assert lines["mean-exp"].get_ydata().tolist() == [999, 70, 30]
    assert lines["bc"].get_ydata().tolist() == [1, 9, 7]
    for label, value in (("random (-3.50)", -3.5), ("behaviour (14.0)", 14)):
        assert set(lines[label].get_ydata()) == {value}
        assert lines[label].get_linestyle() != "-"
    band = axes.collections[1].get_paths()[0].vertices
    expected = report.bootstrap_interval(np.array([[10.0], [20], [40], [100]]))
    assert set(band[band[:, 0] == 1000][:, 1]) == set(expected)
    legend = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert legend == ["mean-exp", "bc", "a-low", "random (-3.50)", "behaviour (14.0)"]


def test_one_fall_does_not_flatten_the_figure(tmp_path, monkeypatch):
    """A curve that goes to -10,000 and comes back to 0 leaves the picture; its end is in it."""
    from matplotlib.figure import Figure

    write_run(tmp_path / "crr__Env-v1__shipped__good" / "1", {0: 0, 10: 50, 20: 100})
    write_run(tmp_path / "crr__Env-v1__shipped__fallen" / "1", {0: 0, 10: -10_000, 20: 0})
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kwargs: drawn.append(self))
    report.figure(report.read_results(tmp_path), GROUP, tmp_path / "x.png")
    assert drawn[0].axes[0].get_ylim()[0] == -100


@pytest.mark.parametrize(("budget", "scale"), [(1000, "linear"), (1001, "log")])
def test_steps_of_a_figure_are_logarithmic_if_one_variant_has_many_more(
    budget, scale, tmp_path, monkeypatch
):
    from matplotlib.figure import Figure

    write_run(tmp_path / "crr__Env-v1__shipped__short" / "1", {0: 0, 50: 50, 100: 100})
    write_run(tmp_path / "crr__Env-v1__shipped__long" / "1", {0: 0, 50: 10, budget: 20})
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kwargs: drawn.append(self))
    report.figure(report.read_results(tmp_path), GROUP, tmp_path / "x.png")
    assert drawn[0].axes[0].get_xscale() == scale


def test_figure_file(options):
    results = report.read_results(options.results)
    paths = [options.results / name for name in ("a.png", "b.png")]
    for path in paths:
        report.figure(results, GROUP, path)
    png = paths[0].read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(png[16:20], "big") == 800  # the width, as README.md shows it
    assert len(png) < 100_000
    assert png == paths[1].read_bytes()  # no time stamp: a rerun is no diff


def test_overview(tmp_path, monkeypatch):
    """One panel per algorithm that has results, in the README's order, with its own numbers."""
    from matplotlib.figure import Figure

    write_run(tmp_path / "random__PixelCatch-v0" / "1", {0: -0.75})
    for seed, end in ((1, 0.5), (2, 1.0)):
        write_run(
            tmp_path / "dreamer__PixelCatch-v0__none__default" / str(seed), {0: -1, 4000: end}
        )
        folder = tmp_path / "crr__Pendulum-v1__random-100000__mean-binary" / str(seed)
        write_run(folder, {0: -1200, 10_000: -150 - seed})
    drawn = []
    with monkeypatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda self, *args, **kwargs: drawn.append(self))
        report.overview(report.read_results(tmp_path), tmp_path / "x.png")
    panels = drawn[0].axes
    assert len(panels) == 8 and [axes.axison for axes in panels] == [True] * 2 + [False] * 6
    names = [(axes.get_title("left"), axes.get_title("right")) for axes in panels[:2]]
    assert names == [("CRR", "Pendulum-v1, random-100000"), ("Dreamer", "PixelCatch-v0")]
    curve, random = panels[1].lines
    assert curve.get_xdata().tolist() == [0, 4000] and curve.get_ydata().tolist() == [-1, 0.75]
    assert set(random.get_ydata()) == {-0.75} and random.get_linestyle() != "-"
    band = panels[1].collections[0].get_paths()[0].vertices
    assert set(band[band[:, 0] == 4000][:, 1]) == {0.5, 1.0}  # of two seeds, the two themselves
    assert panels[0].get_xlabel() == "updates, 2 seeds"
    assert panels[1].get_xlabel() == "environment steps, 2 seeds"

    report.overview(report.read_results(tmp_path), tmp_path / "x.png")
    png = (tmp_path / "x.png").read_bytes()
    assert int.from_bytes(png[16:20], "big") == 1800  # twice 900, the width at which it is shown


def test_no_overview_of_unknown_tasks(options):
    assert report.main(options) == 0
    assert not (options.results / "overview.png").exists()


def test_overview_shows_all_eight():
    results = report.read_results(ROOT / "benchmark" / "results")
    assert [*report.HEADLINES] == ["awr", "marwil", "crr", "rlpd", "mbpo", "fqf", "gail", "dreamer"]
    for algo, line in report.HEADLINES.items():
        assert (algo, *line.task, report.main_variant(algo)) in results
        assert ("random", line.task[0]) in results


# ---- the table of the README


def test_headline_by_hand(tmp_path):
    """CRR with a reference of two seeds; FQF with one that had more steps; MBPO with none."""
    write_run(tmp_path / "random__Pendulum-v1" / "1", {0: -1200})
    crr, mbpo = "crr__Pendulum-v1__random-100000", "mbpo__Pendulum-v1__none"
    fqf = "fqf__CartPole-v1__none"
    for seed, last in ((1, -100), (2, -120), (3, -140), (4, -400)):
        write_run(tmp_path / f"{crr}__mean-binary" / str(seed), {0: 9, 500: 8, 900: last}, -1300, 9)
    for seed, last in ((1, -150), (2, -170)):
        write_run(tmp_path / f"{crr}__d3rlpy" / str(seed), {0: 9, 900: last})
    write_run(tmp_path / f"{mbpo}__default" / "1", {0: 9, 900: -145.04}, generation=9)
    write_run(tmp_path / f"{fqf}__default" / "1", {0: 0, 1000: 6}, generation=9)
    write_run(tmp_path / f"{fqf}__tianshou" / "1", {0: 0, 990: 4.25, 1010: 7, 5000: 30})
    (tmp_path / "root" / "algos").mkdir(parents=True)
    for name, num_lines in (("crr", 3), ("mbpo", 4), ("fqf", 5)):
        (tmp_path / "root" / "algos" / f"{name}.py").write_text("x\n" * num_lines)
    (tmp_path / "root" / "algos" / "crr.md").write_text("")
    text = report.headline(report.read_results(tmp_path), tmp_path / "root")
    head, _, *rows = cells(text.split("\n\n")[0])
    assert [len(row) for row in (head, *rows)] == [8, 8, 8, 8]
    low, high = report.bootstrap_interval(np.array([[-100.0], [-120], [-140], [-400]]))
    assert rows[0] == [
        "CRR ([paper](https://arxiv.org/abs/2006.15134), [page](algos/crr.md))",
        "[`crr.py`](algos/crr.py)",
        "3",
        "dataset",
        "continuous, discrete",
        "Pendulum-v1, random-100000 (-1200.0)",
        f"-130.0 [{low:.1f}, {high:.1f}] (4)",  # (-120 - 140) / 2
        "d3rlpy -160.0 (2)",  # (-150 - 170) / 2
    ]
    assert [rows[1][i] for i in (2, 5, 6, 7)] == ["4", "Pendulum-v1 (-1200.0)", "-145.0 (1)", "-"]
    assert rows[1][0] == "MBPO ([paper](https://arxiv.org/abs/1906.08253))"  # it has no page
    # what the reference had reached within 1,000 steps
    assert rows[2][5:] == ["CartPole-v1 (-)", "6.00 (1)", "tianshou 4.25 (1)"]
    assert report.OLDER not in text


def test_headline_has_a_line_of_each_algorithm():
    results = report.read_results(ROOT / "benchmark" / "results")
    rows = cells(report.headline(results, ROOT).split("\n\n")[0])[2:]
    assert len(rows) == 8
    for row, algo in zip(rows, report.HEADLINES):
        num_lines = len((ROOT / "algos" / f"{algo}.py").read_text().splitlines())
        assert f"`{algo}.py`" in row[1] and row[2] == str(num_lines)
        assert algo == "dreamer" or row[7] != "-"


# ---- quotes


def test_quotes_are_refreshed():
    """A function with its decorator, a method without its indentation, a class as it is."""
    page = "a\n" + "b\n".join(
        f"<!-- quote {name} -->\nold\n```\n<!-- end quote -->\n"
        for name in ("crr_loss", "Critic.forward", "Critic")
    )
    loss = "@torch.no_grad()\ndef crr_loss(x):\n    return x"
    method = "@staticmethod\ndef forward(x):\n    return x  # [B]"
    whole = SOURCE.split("\n\n\n")[1]
    new = report.quoted(page, SOURCE)
    assert new == "a\n" + "b\n".join(
        f"<!-- quote {name} -->\n```python\n{text}\n```\n<!-- end quote -->\n"
        for name, text in (("crr_loss", loss), ("Critic.forward", method), ("Critic", whole))
    )
    assert report.quoted(new, SOURCE) == new
    with pytest.raises(report.ReportError, match="quotes gone"):
        report.quoted("<!-- quote gone -->\n<!-- end quote -->", SOURCE)


# ---- what is written


def test_outside_the_markers_nothing_changes(options):
    assert report.main(options) == 0
    readme = (options.root / "README.md").read_bytes()
    page = (options.root / "algos" / "crr.md").read_bytes()
    assert readme.startswith(BEFORE + HEADLINE[0]) and readme.endswith(HEADLINE[1] + AFTER)
    quote = "<!-- quote crr_loss -->\n```python\n@torch.no_grad()\ndef crr_loss(x):\n    return x\n"
    start = BEFORE + f"{quote}```\n<!-- end quote -->".encode() + RESULTS[0]
    assert page.startswith(start) and page.endswith(RESULTS[1] + AFTER)
    results = report.read_results(options.results)
    inside = page.removeprefix(start).removesuffix(RESULTS[1] + AFTER).decode()
    assert inside == f"\n\n{report.section(results, 'crr', '../../results/')}\n\n"
    assert report.table(results, "crr") in inside and "old" not in readme.decode() + inside
    assert report.main(options) == 0
    assert (options.root / "README.md").read_bytes() == readme
    assert (options.root / "algos" / "crr.md").read_bytes() == page
    assert {path.name for path in options.root.glob("**/*.*")} == {"README.md", "crr.md", "crr.py"}


def test_speed_is_written_from_its_csv_files(options):
    """Where there is a page for it."""
    folder = options.root / "benchmark"
    folder.mkdir()
    (folder / "SPEED.md").write_bytes(BEFORE + b"old".join(SPEED) + AFTER)
    for name in ("speed.csv", "start.csv"):
        shutil.copy(ROOT / "benchmark" / "results" / name, options.results)
    assert report.main(options) == 0
    text = (folder / "SPEED.md").read_bytes().removeprefix(BEFORE + SPEED[0])
    expected = speed.section(options.results)
    assert text.removesuffix(SPEED[1] + AFTER).decode() == f"\n\n{expected}\n\n"


def test_crash_while_writing_leaves_the_old_files(options, monkeypatch, capsys):
    old = (options.root / "README.md").read_bytes()

    def full_disk(self, content):
        with open(self, "wb") as file:
            file.write(content[:10])
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full_disk)
    assert report.main(options) == 2
    assert "No space left" in one_line_of(capsys)
    assert (options.root / "README.md").read_bytes() == old
    assert not list(options.root.glob("**/*.tmp")) + list(options.results.glob("**/*.tmp"))


@pytest.mark.parametrize(
    "content",
    [
        b"no markers",
        b"only " + RESULTS[0],
        b"only " + RESULTS[1],
        RESULTS[1] + RESULTS[0],
        RESULTS[0] + RESULTS[1] + RESULTS[0],
        RESULTS[0] + RESULTS[1] + RESULTS[0] + RESULTS[1],
        RESULTS[0] + RESULTS[1] + RESULTS[1],
    ],
)
@pytest.mark.parametrize("check", [False, True])
def test_bad_markers(options, capsys, content, check):
    page = options.root / "algos" / "crr.md"
    page.write_bytes(content)
    options.check = check
    assert report.main(options) == 2
    assert "<!-- results:begin --> and <!-- results:end -->" in one_line_of(capsys)
    assert page.read_bytes() == content
    assert not list(options.results.glob("*.*"))


def test_other_results_have_a_readme_of_their_own(options):
    """Those of --quick, say: nothing that is published changes, all of theirs is in one place."""
    readme = ROOT / "README.md"
    before = readme.stat().st_mtime_ns
    assert report.main(report.Options(options.results)) == 0
    assert readme.stat().st_mtime_ns == before
    text = (options.results / "README.md").read_text()
    assert "## CRR\n" in text and "## AWR" not in text
    assert "| 30.0 [" in text and "](crr__Env-v1__shipped.png)" in text  # (20 + 40) / 2
    assert (options.results / "crr__Env-v1__shipped.png").is_file()
    assert (options.results / "index.html").is_file()
    assert report.main(report.Options(options.results)) == 0  # and again, from the same runs
    assert (options.results / "README.md").read_text() == text


def test_missing_readme(options, capsys):
    (options.root / "README.md").unlink()
    assert report.main(options) == 2
    assert "README.md" in one_line_of(capsys)


def test_check(options, capsys):
    readme, page = options.root / "README.md", options.root / "algos" / "crr.md"
    index = options.results / "index.html"
    old = readme.read_bytes()
    options.check = True
    assert report.main(options) == 1
    out, err = capsys.readouterr()
    assert out == "" and err == "".join(
        f"report: {os.path.relpath(path)} is out of date: run python benchmark/report.py\n"
        for path in (index, readme, page)
    )
    assert readme.read_bytes() == old and not list(options.results.glob("*.*"))

    options.check = False
    report.main(options)
    capsys.readouterr()
    options.check = True
    assert report.main(options) == 0
    assert capsys.readouterr() == ("", "")

    for path, before, after in (  # a number, a quote, a line too much, a number of index.html
        (page, b"| 30.0 [", b"| 30.1 ["),
        (page, b"return x", b"return y"),
        (readme, HEADLINE[1], b"| crr | 1.0 |" + HEADLINE[1]),
        (index, b"-3.5", b"-3.6"),
    ):
        current = path.read_bytes()
        stale = current.replace(before, after)
        path.write_bytes(stale)
        assert stale != current and report.main(options) == 1
        assert os.path.relpath(path) in one_line_of(capsys)
        assert path.read_bytes() == stale
        path.write_bytes(current)

    # a number of the results that is in no table: index.html has the curves as well
    metrics = options.results / "crr__Env-v1__shipped__bc" / "1" / "metrics.csv"
    text = metrics.read_text()
    metrics.write_text(text.replace("0,1.5,eval/return_mean,1\n", "0,1.5,eval/return_mean,2\n"))
    assert metrics.read_text() != text and report.main(options) == 1
    assert os.path.relpath(index) in one_line_of(capsys)
    metrics.write_text(text)

    metrics = options.results / "crr__Env-v1__shipped__mean-exp" / "4" / "metrics.csv"
    metrics.write_text(metrics.read_text().replace("return_mean,100", "return_mean,101"))
    assert report.main(options) == 1
    assert capsys.readouterr().err.count(" is out of date: ") == 2


def test_published_documents_are_current():
    assert report.main(report.Options(check=True)) == 0


# ---- bad input


def test_no_results(options, capsys, tmp_path):
    for folder in ("empty", "missing", "random-only"):
        options.results = tmp_path / folder
        if folder == "empty":
            options.results.mkdir()
        if folder == "random-only":
            write_run(options.results / "random__Env-v1" / "1", {0: 1})
        assert report.main(options) == 2, folder
        assert "benchmark/run.py" in one_line_of(capsys)


HEADER = b"step,seconds,key,value\n"
GOOD = HEADER + b"10,1,eval/return_mean,1\n"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "line 0: the columns"),
        (b"<html>\n", "line 1: the columns"),
        (b"step,value\n1,2\n", "line 1: the columns"),
        (b"\xff\xfe\x00\x01", "decode"),
        (HEADER, "no eval/return_mean"),
        (HEADER + b"10,1,losses/actor,1\n", "no eval/return_mean"),
        (HEADER + b"10,1,eval/return_mean,abc\n", "line 2: could not convert"),
        (HEADER + b"ten,1,eval/return_mean,1\n", "line 2: invalid literal"),
        (GOOD + b"20,1,eval/return_mean,nan\n", "line 3: eval/return_mean is nan"),
        (GOOD + b"20,1,stats/behaviour_return,inf\n", "line 3: stats/behaviour_return is inf"),
        (GOOD + b"20,1,eval/ret", "line 3: a row must have 4 fields"),
        (GOOD + b"20,1,eval/return_mean,1,5\n", "line 3: a row must have 4 fields"),
        (HEADER + b"0,1,eval/return_mean,1\n", "no evaluation after step 0"),
    ],
)
def test_malformed_metrics(options, capsys, content, reason):
    path = options.results / "crr__Env-v1__shipped__mean-exp" / "3" / "metrics.csv"
    path.write_bytes(content)
    assert report.main(options) == 2
    line = one_line_of(capsys)
    assert str(path) in line and reason in line
    assert not list(options.results.glob("*.*"))


def test_values_that_the_report_does_not_use_may_be_nan(options):
    path = options.results / "crr__Env-v1__shipped__mean-exp" / "3" / "metrics.csv"
    path.write_text(path.read_text() + "1000,2,losses/actor,nan\n")
    assert report.main(options) == 0


def test_folder_that_is_no_row(options, capsys):
    write_run(options.results / "crr__Env-v1" / "1", {10: 1})
    assert report.main(options) == 2
    assert "crr__Env-v1/1/metrics.csv" in one_line_of(capsys)


# ---- command line


def test_command_line(options, tmp_path):
    script = [sys.executable, str(ROOT / "benchmark" / "report.py"), "--results"]
    done = subprocess.run([*script, "results", "--root", "root"], cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == b"written: results/index.html, root/README.md, root/algos/crr.md\n"
    assert (tmp_path / "results" / "crr__Env-v1__shipped.png").is_file()
    assert (tmp_path / "results" / "index.html").read_bytes().startswith(b"<!doctype html>")
    done = subprocess.run([*script, "nowhere", "--check"], cwd=tmp_path, capture_output=True)
    assert done.returncode == 2 and done.stderr.count(b"\n") == 1


def test_help_needs_no_slow_import():
    code = "import sys; from benchmark import report; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)
    assert not {"matplotlib", "torch", "gymnasium"} & set(done.stdout.decode().split())
