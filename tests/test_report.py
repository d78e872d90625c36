"""benchmark/report.py against numbers that were worked out by hand or by brute force."""

import itertools
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmark import report

ROOT = Path(__file__).resolve().parents[1]
GROUP = ("crr", "Env-v1", "shipped")
MARKERS = (b"<!-- results:begin -->", b"<!-- results:end -->")
GLANCE = (b"<!-- glance:begin -->", b"<!-- glance:end -->")
BEFORE, AFTER = b"# caf\xe9\r\ntext \n\n", b"\r\nmore\t\n\n| a | 1.0 |"  # no UTF-8, mixed line ends
BETWEEN = b"\r\n \nin between"


def write_run(folder: Path, curve: dict[int, float], behaviour: float | None = None) -> None:
    rows = ["step,seconds,key,value"]
    if behaviour is not None:
        rows.append(f"0,0.1,stats/behaviour_return,{behaviour}")
    for step, value in curve.items():
        rows += [f"{step},1.5,eval/return_mean,{value}", f"{step},1.5,eval/return_max,5000"]
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text("\n".join(rows) + "\n")


@pytest.fixture
def options(tmp_path: Path) -> report.Options:
    """Four seeds with last = 10 20 40 100 and best = 60 50 80 200, BC, a random policy, a README.

    Step 0 is higher than all else: an untrained network must never be the best one.
    """
    results = tmp_path / "results"
    write_run(results / "random__Env-v1" / "1", {0: -3.5})
    for seed, best, last in ((1, 60, 10), (2, 50, 20), (3, 80, 40), (4, 200, 100)):
        curve = {0: 999, 500: best, 1000: last}
        write_run(results / "crr__Env-v1__shipped__mean-exp" / str(seed), curve, behaviour=12)
    write_run(results / "crr__Env-v1__shipped__bc" / "1", {0: 1, 500: 9, 1000: 7}, behaviour=22)
    sections = GLANCE[0] + b"old" + GLANCE[1] + BETWEEN + MARKERS[0] + b"old" + MARKERS[1]
    (tmp_path / "README.md").write_bytes(BEFORE + sections + AFTER)
    docs = tmp_path / "docs"
    return report.Options(
        results, tmp_path / "README.md", docs / "figures", page=docs / "page" / "index.html"
    )


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


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


def test_table_by_hand(options):
    table = cells(report.table(report.read_results(options.results), GROUP))
    assert table[0] == [
        "variant",
        "seeds",
        "updates",
        "random policy",
        "behaviour policy",
        "BC",
        "last: IQM [95 % interval]",
        "last: mean [95 % interval]",
        "best: IQM [95 % interval]",
    ]
    assert len(table[1]) == 9 and set("".join(table[1])) == set(":- ") - {" "}
    last_low, last_high = report.bootstrap_interval(np.array([[10.0], [20], [40], [100]]))
    best_low, best_high = report.bootstrap_interval(np.array([[60.0], [50], [80], [200]]))
    # behaviour: (4 * 12 + 22) / 5; last: (20 + 40) / 2 and 170 / 4; best: (60 + 80) / 2
    # the mean's interval: the quantiles of all 4^4 equally likely resamples
    means = [np.mean(draw) for draw in itertools.product([10.0, 20, 40, 100], repeat=4)]
    low, high = np.percentile(means, [2.5, 97.5])
    name, *_, mean, _ = table[2]
    mean, mean_low, mean_high = map(float, re.findall(r"[\d.]+", mean))
    assert (name, mean) == ("mean-exp", 42.5)
    assert (mean_low, mean_high) == (pytest.approx(low, abs=2.6), pytest.approx(high, abs=2.6))
    last = f"30.0 [{last_low:.1f}, {last_high:.1f}]"
    best = f"70.0 [{best_low:.1f}, {best_high:.1f}]"
    assert table[2][:7] == ["mean-exp", "4", "1,000", "-3.5", "14.0", "7.0", last]
    assert table[2][8] == best
    # BC stands last although b < m; one seed has no interval
    assert table[3] == ["bc", "1", "1,000", "-3.5", "14.0", "7.0", "7.0", "7.0", "9.0"]
    assert len(table) == 4


def test_table_without_references(tmp_path):
    write_run(tmp_path / "awr__Env-v2__random-10__exp" / "1", {100: 2.04})
    write_run(tmp_path / "random__Other-v0" / "1", {0: 1})
    table = cells(report.table(report.read_results(tmp_path), ("awr", "Env-v2", "random-10")))
    assert table[2] == ["exp", "1", "100", "-", "-", "-", "2.0", "2.0", "2.0"]


def test_groups_have_tables_and_figures_of_their_own(options, capsys):
    write_run(options.results / "crr__Env-v1__random-10__max-exp" / "1", {100: 77})
    assert report.main(options) == 0
    printed = capsys.readouterr().out
    first, second = printed.split("### ")[1:]  # random-10, shipped
    assert "| 77.0 |" in first and "| 42.5 [" not in first
    assert "| 77.0 |" not in second and "| 42.5 [" in second
    for dataset, part in (("random-10", first), ("shipped", second)):
        path = f"docs/figures/crr__Env-v1__{dataset}.png"
        assert f"]({path})" in part and (options.readme.parent / path).is_file()


def test_algorithms_on_the_same_data_come_first_side_by_side(options, capsys):
    """AWR and CRR's main variant on shipped; BC is MARWIL's where there is one. AWR's own table
    would say nothing new, CRR's has its other variants; random-10 has CRR alone."""
    for seed in (1, 2):
        write_run(options.results / "awr__Env-v1__shipped__default" / str(seed), {0: 1, 900: 66})
        write_run(
            options.results / "crr__Env-v1__shipped__mean-binary" / str(seed), {0: 1, 900: 55}
        )
    write_run(options.results / "marwil__Env-v1__shipped__bc" / "1", {0: 1, 900: 33})
    write_run(options.results / "crr__Env-v1__random-10__mean-binary" / "1", {100: 77})
    assert report.main(options) == 0
    together, alone, own = capsys.readouterr().out.split("### ")[1:]
    assert [part.splitlines()[0] for part in (together, alone, own)] == [
        "Env-v1, shipped",
        "crr, Env-v1, random-10",
        "crr, Env-v1, shipped",
    ]
    rows = cells(together.split("\n\n")[1])[2:]
    assert [(row[0], row[1], row[5], row[6]) for row in rows] == [
        ("awr", "2", "33.0", "66.0 [66.0, 66.0]"),
        ("crr", "2", "33.0", "55.0 [55.0, 55.0]"),
        ("bc", "1", "33.0", "33.0"),
    ]
    rows = cells(own.split("\n\n")[1])[2:]
    assert [row[0] for row in rows] == ["mean-binary", "mean-exp", "bc"]
    assert {row[5] for row in rows} == {"7.0"}  # its own BC
    results = report.read_results(options.results)
    results |= report.side_by_side(results)
    assert report.references(results, ("awr", "Env-v1", "shipped"))["BC"] == 33  # it has none
    assert (options.figures / "all__Env-v1__shipped.png").is_file()


def test_online_algorithms_stand_apart_and_ablations_beside_their_default(options, capsys):
    """RLPD counts environment steps: it is in no table of updates. Its ablations get a table of
    their own with the default in it, and both get the BC of the offline file on the same data."""
    for name, value in (("rlpd", 50), ("rlpd-ablation", 40)):
        variant = "default" if name == "rlpd" else "no-layer-norm"
        for seed in (1, 2):
            folder = options.results / f"{name}__Env-v1__shipped__{variant}" / str(seed)
            write_run(folder, {0: 1, 300: value}, behaviour=12)
    write_run(options.results / "rlpd__Env-v1__shipped__sac" / "1", {0: 1, 300: 30})
    write_run(options.results / "crr__Env-v1__shipped__mean-binary" / "1", {0: 1, 900: 55})
    write_run(options.results / "marwil__Other-v1__shipped__bc" / "1", {0: 1, 900: 33})
    write_run(options.results / "rlpd__Other-v1__shipped__default" / "1", {0: 1, 300: 77})
    assert report.main(options) == 0
    parts = capsys.readouterr().out.split("### ")[1:]
    tables = {part.splitlines()[0]: cells(part.split("\n\n")[1]) for part in parts}
    assert list(tables) == [
        "crr, Env-v1, shipped",
        "rlpd, Env-v1, shipped",
        "rlpd, Other-v1, shipped",
        "rlpd-ablation, Env-v1, shipped",
    ]
    online = tables["rlpd, Env-v1, shipped"]
    assert online[0][2] == "environment steps" and tables["crr, Env-v1, shipped"][0][2] == "updates"
    assert [row[:7] for row in online[2:]] == [
        ["default", "2", "300", "-3.5", "12.0", "7.0", "50.0 [50.0, 50.0]"],
        ["sac", "1", "300", "-3.5", "12.0", "7.0", "30.0"],
    ]
    assert tables["rlpd, Other-v1, shipped"][2][5] == "33.0"
    ablation = tables["rlpd-ablation, Env-v1, shipped"]
    assert [(row[0], row[6][:4]) for row in ablation[2:]] == [
        ("no-layer-norm", "40.0"),
        ("rlpd", "50.0"),
    ]
    assert ablation[0][2] == "environment steps"


@pytest.mark.parametrize("algo", report.ONLINE)
def test_online_algorithms_are_counted_in_environment_steps(tmp_path, algo):
    write_run(tmp_path / f"{algo}__Env-v1__none__default" / "1", {0: 1, 300: 9})
    write_run(tmp_path / f"{algo}-ablation__Env-v1__none__less" / "1", {0: 1, 300: 5})
    results = report.read_results(tmp_path)
    for name in (algo, f"{algo}-ablation"):
        assert cells(report.table(results, (name, "Env-v1", "none")))[0][2] == "environment steps"


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
    row = cells(report.table(results, GROUP))[2]
    assert row[2] == "10-30" and row[7].startswith("7.0 [")  # (4 + 8 + 9) / 3


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
    report.figure(report.read_results(options.results), GROUP, options.figures / "x.png")
    (axes,) = drawn[0].axes
    lines = {line.get_label(): line for line in axes.lines}
    assert lines["mean-exp"].get_xdata().tolist() == [0, 500, 1000]
    assert lines["mean-exp"].get_ydata().tolist() == [999, 70, 30]
    assert lines["bc"].get_ydata().tolist() == [1, 9, 7]
    for label, value in (("random (-3.5)", -3.5), ("behaviour (14.0)", 14)):
        assert set(lines[label].get_ydata()) == {value}
        assert lines[label].get_linestyle() != "-"
    band = axes.collections[1].get_paths()[0].vertices
    expected = report.bootstrap_interval(np.array([[10.0], [20], [40], [100]]))
    assert set(band[band[:, 0] == 1000][:, 1]) == set(expected)
    legend = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert legend == ["mean-exp", "bc", "a-low", "random (-3.5)", "behaviour (14.0)"]


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
    paths = [options.figures / name for name in ("a.png", "b.png")]
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
    assert names == [("CRR", "Pendulum-v1"), ("Dreamer", "PixelCatch-v0")]
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
    assert not (options.figures / "overview.png").exists()


def test_overview_shows_all_eight():
    results = report.read_results(ROOT / "benchmark" / "results")
    assert [*report.OVERVIEW] == ["awr", "marwil", "crr", "rlpd", "mbpo", "fqf", "gail", "dreamer"]
    for algo, task in report.OVERVIEW.items():
        assert (algo, *task, report.main_variant(algo)) in results
        assert ("random", task[0]) in results


# ---- at a glance


def test_glance_by_hand(tmp_path):
    """Two algorithms with results: CRR with a reference of two seeds, MBPO with one of the two."""
    write_run(tmp_path / "random__Pendulum-v1" / "1", {0: -1200})
    crr, mbpo = "crr__Pendulum-v1__random-100000", "mbpo__Pendulum-v1__none"
    for seed, last in ((1, -100), (2, -120), (3, -140), (4, -400)):
        write_run(tmp_path / f"{crr}__mean-binary" / str(seed), {0: 9, 500: 8, 900: last}, -1300)
    for seed, last in ((1, -150), (2, -170)):
        write_run(tmp_path / f"{crr}__d3rlpy" / str(seed), {0: 9, 900: last})
    write_run(tmp_path / f"{crr}__bc" / "1", {0: 9, 900: -1100})
    write_run(tmp_path / f"{mbpo}__default" / "1", {0: 9, 900: -145.04})
    write_run(tmp_path / f"{mbpo}__sbx-sac" / "1", {0: 9, 900: -960})
    results = report.read_results(tmp_path)
    text = report.glance(results)
    head, _, *rows = cells(text.split("\n\n")[0])
    assert [len(row) for row in (head, *rows)] == [9, 9, 9]
    low, high = report.bootstrap_interval(np.array([[-100.0], [-120], [-140], [-400]]))
    ours = f"-130.0 [{low:.1f}, {high:.1f}] (4)"  # (-120 - 140) / 2
    assert rows[0] == [
        "crr",
        "Pendulum-v1, random-100000",
        "-1200.0",
        "-1300.0",  # a reference says nothing about the data
        "-1100.0",
        ours,
        "d3rlpy: -160.0 (2)",  # (-150 - 170) / 2
        "no figure that we could check",
        f"`python benchmark/run.py --only {crr}__mean-binary --seeds 4 --results runs/again`",
    ]
    assert rows[1][:7] == [
        "mbpo",
        "Pendulum-v1",
        "-1200.0",
        "-",
        "-",
        "-145.0 (1)",
        "sbx-sac: -960.0 (1)",
    ]
    assert rows[1][7].startswith("Ant: its 300,000 steps")
    results.pop(("mbpo", "Pendulum-v1", "none", "sbx-sac"))
    assert cells(report.glance(results).split("\n\n")[0])[3][6] == "-"


def test_glance_has_a_line_of_each_algorithm_and_its_command_is_known():
    results = report.read_results(ROOT / "benchmark" / "results")
    rows = cells(report.glance(results).split("\n\n")[0])[2:]
    assert [row[0] for row in rows] == [*report.OVERVIEW] == [*report.GLANCE]
    names = [entry.name for entry in report.run.TABLE]
    for row in rows:
        only = row[8].split()[3]
        assert [name for name in names if only in name] == [only]  # it runs this row alone
        assert row[6] != "-" and row[7]


# ---- the README


def test_readme_outside_the_markers_is_untouched(options, capsys):
    assert report.main(options) == 0
    content = options.readme.read_bytes()
    assert content.startswith(BEFORE + GLANCE[0]) and content.endswith(MARKERS[1] + AFTER)
    glance, inside = content.split(GLANCE[1] + BETWEEN + MARKERS[0])
    glance = glance.removeprefix(BEFORE + GLANCE[0]).decode()
    inside = inside.removesuffix(MARKERS[1] + AFTER).decode()
    results = report.read_results(options.results)
    table = report.table(results, GROUP)
    assert "old" not in inside and f"\n\n{table}\n\n" in inside
    assert glance == f"\n\n{report.glance(results)}\n\n"
    printed, _, places = capsys.readouterr().out.partition("\n\nwritten: ")
    assert inside.strip() == printed.strip()
    assert [Path(place).resolve() for place in places.strip().split(", ")] == [
        options.readme,
        options.page,
    ]
    assert report.main(options) == 0
    assert options.readme.read_bytes() == content
    assert {path.name for path in options.readme.parent.iterdir()} == {
        "README.md",
        "docs",
        "results",
    }


def test_crash_while_writing_leaves_the_old_readme(options, monkeypatch, capsys):
    old = options.readme.read_bytes()

    def full_disk(self, content):
        with open(self, "wb") as file:
            file.write(content[:10])
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full_disk)
    assert report.main(options) == 2
    assert "No space left" in one_line_of(capsys)
    assert options.readme.read_bytes() == old
    assert not list(options.readme.parent.glob("**/*.tmp"))


@pytest.mark.parametrize(
    "content",
    [
        b"no markers",
        b"only " + MARKERS[0],
        b"only " + MARKERS[1],
        MARKERS[1] + MARKERS[0],
        MARKERS[0] + MARKERS[1] + MARKERS[0],
        MARKERS[0] + MARKERS[1] + MARKERS[0] + MARKERS[1],
        MARKERS[0] + MARKERS[1] + MARKERS[1],
    ],
)
@pytest.mark.parametrize("check", [False, True])
def test_bad_markers(options, capsys, content, check):
    options.readme.write_bytes(content)
    options.check = check
    assert report.main(options) == 2
    assert "<!-- results:begin -->" in one_line_of(capsys)
    assert options.readme.read_bytes() == content
    assert not options.figures.exists()


def test_other_results_have_a_readme_of_their_own(options, monkeypatch):
    """Those of --quick, say: nothing that is published changes, all of theirs is in one place."""
    readme = ROOT / "README.md"
    before = readme.stat().st_mtime_ns
    assert report.main(report.Options(options.results)) == 0
    assert readme.stat().st_mtime_ns == before
    text = (options.results / "README.md").read_text()
    assert "| 30.0 [" in text and "](crr__Env-v1__shipped.png)" in text  # (20 + 40) / 2
    assert (options.results / "crr__Env-v1__shipped.png").is_file()
    assert (options.results / "index.html").is_file()
    assert report.main(report.Options(options.results)) == 0  # and again, from the same runs
    assert (options.results / "README.md").read_text() == text


def test_the_glance_needs_its_markers_too(options, capsys):
    content = options.readme.read_bytes().replace(GLANCE[1], b"")
    options.readme.write_bytes(content)
    assert report.main(options) == 2
    assert "<!-- glance:begin --> and <!-- glance:end -->" in one_line_of(capsys)
    assert options.readme.read_bytes() == content and not options.figures.exists()


def test_missing_readme(options, capsys):
    options.readme.unlink()
    assert report.main(options) == 2
    assert "README.md" in one_line_of(capsys)


def test_check(options, capsys):
    old = options.readme.read_bytes()
    options.check = True
    assert report.main(options) == 1
    out, err = capsys.readouterr()
    assert out == "" and err == "".join(
        f"report: {path} is out of date: run python benchmark/report.py\n"
        for path in (options.readme, options.page)
    )
    assert options.readme.read_bytes() == old
    assert not options.figures.exists() and not options.page.parent.exists()

    options.check = False
    report.main(options)
    capsys.readouterr()
    options.check = True
    current = options.readme.read_bytes()
    assert report.main(options) == 0
    assert capsys.readouterr() == ("", "")

    edits = ((b"| 42.5 [", b"| 42.6 ["), (GLANCE[1], b"| crr | 1.0 |" + GLANCE[1]))
    for old, new in edits:  # a number of the README, a line of the table on top of it
        stale = current.replace(old, new)
        assert stale != current
        options.readme.write_bytes(stale)
        assert report.main(options) == 1
        assert "README.md" in one_line_of(capsys)
        assert options.readme.read_bytes() == stale

    options.readme.write_bytes(current)
    page = options.page.read_bytes()
    options.page.write_bytes(page.replace(b"-3.5", b"-3.6"))  # a number of the page
    assert report.main(options) == 1
    assert str(options.page) in one_line_of(capsys)
    options.page.write_bytes(page)
    assert report.main(options) == 0

    # a number of the results that is in no table: the page has the curves as well
    metrics = options.results / "crr__Env-v1__shipped__bc" / "1" / "metrics.csv"
    text = metrics.read_text()
    metrics.write_text(text.replace("0,1.5,eval/return_mean,1\n", "0,1.5,eval/return_mean,2\n"))
    assert metrics.read_text() != text and report.main(options) == 1
    assert str(options.page) in one_line_of(capsys)
    metrics.write_text(text)

    metrics = options.results / "crr__Env-v1__shipped__mean-exp" / "4" / "metrics.csv"
    metrics.write_text(metrics.read_text().replace("return_mean,100", "return_mean,101"))
    assert report.main(options) == 1
    assert capsys.readouterr().err.count(" is out of date: ") == 2


# ---- bad input


def test_no_results(options, capsys, tmp_path):
    old = options.readme.read_bytes()
    for folder in ("empty", "missing", "random-only"):
        options.results = tmp_path / folder
        if folder == "empty":
            options.results.mkdir()
        if folder == "random-only":
            write_run(options.results / "random__Env-v1" / "1", {0: 1})
        assert report.main(options) == 2, folder
        assert "benchmark/run.py" in one_line_of(capsys)
        assert options.readme.read_bytes() == old


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
    old = options.readme.read_bytes()
    path = options.results / "crr__Env-v1__shipped__mean-exp" / "3" / "metrics.csv"
    path.write_bytes(content)
    assert report.main(options) == 2
    line = one_line_of(capsys)
    assert str(path) in line and reason in line
    assert options.readme.read_bytes() == old and not options.figures.exists()


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
    folders = ["--readme", "README.md", "--figures", "figures", "--page", "page.html"]
    done = subprocess.run([*script, "results", *folders], cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert b"| 42.5 [" in done.stdout
    assert b"](figures/crr__Env-v1__shipped.png)" in options.readme.read_bytes()
    assert (tmp_path / "figures" / "crr__Env-v1__shipped.png").is_file()
    assert (tmp_path / "page.html").read_bytes().startswith(b"<!doctype html>")
    done = subprocess.run([*script, "nowhere", "--check"], cwd=tmp_path, capture_output=True)
    assert done.returncode == 2 and done.stderr.count(b"\n") == 1


def test_help_needs_no_slow_import():
    code = "import sys; from benchmark import report; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)
    assert not {"matplotlib", "torch", "gymnasium"} & set(done.stdout.decode().split())
