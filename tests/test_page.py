"""The page of benchmark/report.py: its numbers by hand, and what a browser makes of it."""

import html
import json
import re
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import tyro
from conftest import ALGOS
from test_report import cells, write_run

from benchmark import report, run

pytestmark = pytest.mark.slow  # it looks at the page in a browser
ROOT = Path(__file__).resolve().parents[1]
NASTY = "</script><img src=x onerror=\"failures.push('xss')\"><!--<script>&amp;@DATA@'"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """CRR and AWR on the same data, cloning, RLPD without any, a random policy."""
    results = tmp_path / "results"
    write_run(results / "random__Env-v1" / "1", {0: -3.456})
    for seed, best, last in ((1, 60, 10), (2, 50, 20), (3, 80, 40), (4, 200, 100)):
        curve = {0: 999, 500: best, 1000: last}
        row = results / "crr__Env-v1__shipped__mean-binary"
        write_run(row / str(seed), curve, behaviour=12)
    write_run(results / "crr__Env-v1__shipped__max-exp" / "1", {0: 1, 500: 25, 2000: 15})
    write_run(results / "crr__Env-v1__shipped__bc" / "1", {0: 1, 500: 9, 1000: 7})
    awr = results / "awr__Env-v1__shipped__default"
    write_run(awr / "1", {0: 1, 500: 5, 1000: 10})
    write_run(awr / "2", {0: 3, 500: 9, 1000: 30.04})
    write_run(results / "rlpd__Other-v0__none__default" / "1", {0: -0.004, 300: 0.126})
    return results


def data_of(page: bytes) -> dict:
    return json.loads(re.search(r'id="data">(.*)</script>', page.decode())[1])


# ---- what is in it


def test_data_by_hand(folder):
    data = report.page_data(report.read_results(folder))
    rows = {(row["algo"], row["variant"]): row for row in data["rows"]}
    assert list(rows) == [  # in the README's order, cloning last
        ("awr", "default"),
        ("crr", "max-exp"),
        ("crr", "mean-binary"),
        ("crr", "bc"),
        ("rlpd", "default"),
    ]
    # two seeds: 1/4 of all resamples has the one twice, 1/4 the other, so the interval is the two
    assert rows["awr", "default"] == {
        "algo": "awr",
        "env": "Env-v1",
        "dataset": "shipped",
        "variant": "default",
        "seeds": 2,
        "older": False,
        "budget": [1000, 1000],
        "random": -3.46,  # two digits below 10, one from there on
        "behaviour": 12,  # CRR's: it is that of the dataset
        "bc": 7,
        "last": [20, 10, 30],
        "mean": [20, 10, 30],
        "best": [20, 10, 30],
        "command": None,
        "steps": [0, 500, 1000],
        "iqm": [2, 7, 20],
        "low": [1, 5, 10],
        "high": [3, 9, 30],
    }
    # four: the middle two of 10 20 40 100, and of 50 60 80 200
    crr = rows["crr", "mean-binary"]
    assert (crr["last"][0], crr["mean"][0], crr["best"][0]) == (30, 42.5, 70)
    assert crr["behaviour"] == 12 and crr["iqm"] == [999, 70, 30]
    # one: no interval, and a band without width
    rlpd = rows["rlpd", "default"]
    assert (rlpd["last"], rlpd["mean"], rlpd["best"]) == ([0.13], [0.13], [0.13])
    assert rlpd["iqm"] == rlpd["low"] == rlpd["high"] == [0, 0.13]
    assert str(rlpd["iqm"][0]) == "0.0"  # not -0.0
    assert rlpd["random"] is rlpd["bc"] is rlpd["behaviour"] is None
    lines = [(line["label"], line["row"]) for line in data["charts"][0]["lines"]]
    assert lines == [("awr", 0), ("crr", 2), ("bc", 3)]
    charts = [(chart["title"], chart["unit"], chart["random"]) for chart in data["charts"]]
    assert charts == [
        ("Env-v1, shipped", "updates", -3.46),
        ("awr, Env-v1, shipped", "updates", -3.46),
        ("crr, Env-v1, shipped", "updates", -3.46),
        ("rlpd, Other-v0", "environment steps", None),
    ]


def test_page_says_what_the_tables_say(folder):
    """Every number of every table, read back from the text."""
    results = report.read_results(folder)
    everything = results | report.side_by_side(results)
    for row in data_of(report.page(results))["rows"]:
        task = ", ".join(part for part in (row["env"], row["dataset"]) if part != "none")
        lines = [
            line
            for line in cells(report.table(everything, row["algo"]))[2:]
            if line[0].partition(" (")[0] == task
        ]
        compare = dict(re.findall(r"(random|data) (-?[\d.]+)", lines[0][0]))  # once per task
        for name, text in (("random", "random"), ("behaviour", "data")):
            assert row[name] == (float(compare[text]) if text in compare else None)
        (line,) = [line for line in lines if line[1] == row["variant"]]
        seeds, budget = line[2:4]
        assert (str(row["seeds"]), f"{row['budget'][1]:,}") == (seeds, budget.split()[0])
        for name, text in zip(("last", "best"), line[4:]):
            assert row[name] == [float(number) for number in re.findall(r"-?[\d.]+", text)]


def test_same_results_same_bytes(folder):
    assert report.page(report.read_results(folder)) == report.page(report.read_results(folder))


def test_no_name_ends_the_script(folder):
    """A folder cannot be named like this. A table elsewhere could."""
    results = report.read_results(folder)
    results["crr", "Env-v1", "<!--", NASTY] = results["crr", "Env-v1", "shipped", "bc"][:]
    page = report.page(results)
    assert page.count(b"</script>") == report.PAGE.read_bytes().count(b"</script>")
    assert NASTY in {row["variant"] for row in data_of(page)["rows"]}


def test_command_of_every_row_makes_its_runs():
    """The flags on the page, read by the script itself, are those that the published runs had."""
    results = ROOT / "benchmark" / "results"
    harmless = {"seed", "run_dir", "quiet", "device", "torch_threads", "checkpoint_interval"}
    rows = [row for row in run.TABLE if (results / row.name / "1" / "args.json").exists()]
    assert rows
    for row in rows:
        _, script, *flags = report.command_of(tuple(row.name.split("__"))).split()
        assert script == f"algos/{row.algo}.py"
        args = json.loads(json.dumps(asdict(tyro.cli(ALGOS[row.algo].Args, args=flags))))
        for file in (results / row.name).glob("*/args.json"):  # of every seed
            if run.generation_of(file.with_name("metrics.csv")) < run.GENERATION[row.algo]:
                continue  # the page marks it: older code had other defaults
            published = json.loads(file.read_text())
            differ = {
                key for key in args.keys() | published.keys() if args.get(key) != published.get(key)
            }
            assert differ <= harmless, f"{file}: {differ}"
            assert published["seed"] == int(file.parent.name)


def test_published_page_is_small_and_needs_nothing_else():
    page = (ROOT / "benchmark" / "results" / "index.html").read_bytes()
    assert len(page) < 1_000_000
    addresses = set(re.findall(rb"https?://[^\s\"']*", page))
    assert addresses <= {b"http://www.w3.org/2000/svg"}  # a name, which is never fetched
    assert not re.search(rb"@import|url\((?!#)|<(script|img|iframe)[^>]*\ssrc|<link[^>]*http", page)
    data = data_of(page)
    folders = {path.parents[1].name for path in (ROOT / "benchmark/results").glob("*/*/args.json")}
    names = ("algo", "env", "dataset", "variant")
    assert folders <= {"__".join(row[name] for name in names) for row in data["rows"]}


# ---- what a browser makes of it


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next((path for path in map(shutil.which, BROWSERS) if path), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason=f"none of {', '.join(BROWSERS)}")
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --disable-dev-shm-usage
    --no-first-run --disable-background-networking --disable-component-update --disable-sync
    --virtual-time-budget=20000"""
LISTEN = """<script>
    window.failures = [];
    addEventListener("error", (event) => failures.push(event.message), true);
    addEventListener("unhandledrejection", (event) => failures.push(String(event.reason)));
</script>"""
# What a reader sees, and does. The last line of a test's own script is `outcome = {...};`
READER = """
    const all = (selector, root = document) => [...root.querySelectorAll(selector)];
    const text = (element) => element.textContent.trim();
    const bodies = () => all("#table tbody").filter((body) => !body.hidden);
    const column = (i) => bodies().map((body) => text(body.rows[0].cells[i]));
    const figures = () => all("figure").filter((figure) => !figure.hidden);
    const titles = () => figures().map((figure) => text(figure.querySelector("figcaption")));
    const readout = (figure) => all(".readout tr", figure).map((row) => [...row.cells].map(text));
    const caption = (figure) => text(figure.querySelector(".readout caption"));
    const type = (name, value) => {
        const field = document.querySelector(`[name=${name}]`);
        field.value = value;
        field.dispatchEvent(new Event("input", { bubbles: true }));
    };
    const press = (element, key) => element.dispatchEvent(new KeyboardEvent("keydown", { key }));
"""


def browse(page: bytes, script: str, tmp_path: Path, *flags: str, address: str = "") -> dict:
    """Open the page, run a script in it, and give back its `outcome` and all that went wrong."""
    script = f"""<script>(async () => {{
        let outcome = null;
        try {{ {READER} {script} }} catch (error) {{ failures.push(String(error.stack)); }}
        const element = document.createElement("pre");
        element.id = "outcome";
        element.textContent = JSON.stringify({{ outcome, failures }});
        document.body.append(element);
    }})();</script>"""
    source = page.decode().replace("<head>", f"<head>{LISTEN}", 1)
    (tmp_path / "page.html").write_text(source + script, encoding="utf-8")
    url = (tmp_path / "page.html").as_uri() + address
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    command = [BROWSER, *FLAGS.split(), profile, *flags, "--dump-dom", url]
    done = subprocess.run(command, capture_output=True, timeout=300)
    found = re.search(r'<pre id="outcome">(.*?)</pre>', done.stdout.decode(), re.DOTALL)
    assert found, done.stderr.decode()[-2000:]
    result = json.loads(html.unescape(found[1]))
    assert result["failures"] == []
    return result["outcome"]


@needs_browser
def test_sort_filter_and_commands(folder, tmp_path, monkeypatch):
    row = run.Row("crr", "Env-v1", "auto", "max-exp", "--beta 'a  b'", 1)
    monkeypatch.setattr(run, "TABLE", [row])
    results = report.read_results(folder)
    outcome = browse(
        report.page(results),
        """
        const heads = all("#table thead th");
        const click = (i) => { heads[i].querySelector("button").click(); return column(4); };
        const sorted = heads.map((head) => text(head));
        const shown = { titles: titles(), variants: column(4), count: text(count),
                        resources: performance.getEntriesByType("resource").length,
                        cells: all("td", bodies()[2].rows[0]).map(text) };
        const orders = [click(10), click(10), click(7), click(7), click(1)];
        const sorts = heads.map((head) => head.getAttribute("aria-sort"));

        const commands = all("#table tbody button");
        commands[0].click();
        const line = document.querySelector(".command code");
        const copies = [];  // with a clipboard that takes it, and with one that refuses
        const take = async (words) => { copies.push(words); };
        const refuse = () => Promise.reject();
        for (const writeText of [take, refuse]) {
            const clipboard = { value: { writeText }, configurable: true };
            Object.defineProperty(navigator, "clipboard", clipboard);
            getSelection().removeAllRanges();
            document.querySelector(".command button").click();
            await new Promise((done) => setTimeout(done, 100));
            copies.push(text(document.querySelector(".command button")), getSelection().toString());
        }
        const command = { buttons: commands.length, code: text(line), copies };
        click(10);  // the command stays with its row
        const moved = line.closest("tbody") === bodies().find((body) => body.rows.length > 1)
            && text(line.closest("tbody").rows[0].cells[4]);
        commands[0].click();
        command.hidden = document.querySelector(".command") === null;

        const filtered = {};
        const choices = [["algo", "awr"], ["env", "Other-v0"], ["variant", "bc"],
                         ["text", "  CRR   bin"], ["text", "--beta"], ["text", "zzz"]];
        for (const [name, value] of choices) {
            type(name, value);
            filtered[value] = [column(4), titles(), location.hash];
            type(name, "");
        }
        type("text", "crr");
        document.querySelector("button[type=reset]").click();
        await new Promise((done) => setTimeout(done, 100));
        const reset = [column(4).length, location.hash, text(count)];
        outcome = { sorted, shown, orders, sorts, command, moved, filtered, reset };
        """,
        tmp_path,
    )
    shown = outcome["shown"]
    assert shown["count"] == "5 of 5 rows, 3 plots" and shown["resources"] == 0
    # AWR's own chart has nothing that is not in the first
    assert shown["titles"] == ["Env-v1, shipped", "crr, Env-v1, shipped", "rlpd, Other-v0"]
    assert shown["variants"] == ["default", "max-exp \u2020", "mean-binary", "bc", "default"]
    low, high = report.bootstrap_interval(np.array([[10.0], [20], [40], [100]]))
    mean = report.bootstrap_interval(np.array([[10.0], [20], [40], [100]]), report.mean)
    best = report.bootstrap_interval(np.array([[60.0], [50], [80], [200]]))
    assert shown["cells"] == [
        "-",
        *("crr", "Env-v1", "shipped", "mean-binary", "4", "1,000", "-3.46", "12.0", "7.00"),
        f"30.0 [{low:.1f}, {high:.1f}]",
        f"42.5 [{mean[0]:.1f}, {mean[1]:.1f}]",
        f"70.0 [{best[0]:.1f}, {best[1]:.1f}]",
    ]
    # last: 30 mean-binary, 20 awr, 15 max-exp, 7 bc, 0.1 rlpd, which has no random policy: at the
    # end, whichever way that column is sorted
    last = ["mean-binary", "default", "max-exp \u2020", "bc", "default"]
    assert outcome["orders"][:2] == [last, last[::-1]]
    assert outcome["orders"][2][-1] == outcome["orders"][3][-1] == "default"
    assert outcome["orders"][4][0] == outcome["orders"][4][-1] == "default"  # awr .. rlpd
    assert outcome["sorts"] == [None, "ascending", *["none"] * 11]
    command = report.command_of(("crr", "Env-v1", "shipped", "max-exp"))
    assert command.startswith("python algos/crr.py --env-id Env-v1 --dataset auto")
    *copies, said, selected = outcome["command"].pop("copies")
    assert copies == [command, "copied", command] and selected == command
    assert said in ("copied", "selected: press Ctrl-C")  # a browser may allow the older way
    assert outcome["command"] == {"buttons": 1, "code": command, "hidden": True}
    assert outcome["moved"] == "max-exp \u2020"
    both = ["Env-v1, shipped", "crr, Env-v1, shipped"]
    assert {name: found[:2] for name, found in outcome["filtered"].items()} == {
        "awr": [["default"], both[:1]],
        "Other-v0": [["default"], ["rlpd, Other-v0"]],
        "bc": [["bc"], both[:1]],
        "  CRR   bin": [["mean-binary"], both[:1]],
        "--beta": [["max-exp \u2020"], both[1:]],
        "zzz": [[], []],
    }
    assert outcome["filtered"]["Other-v0"][2] == "#env=Other-v0"
    assert outcome["reset"] == [5, "", "5 of 5 rows, 3 plots"]


@needs_browser
def test_hover_and_keys(folder, tmp_path):
    outcome = browse(
        report.page(report.read_results(folder)),
        """
        const [first, second] = figures();
        const plot = first.querySelector(".plot");
        const place = (line, name) => Number(line.getAttribute(name));
        const upright = (line) => place(line, "x1") === place(line, "x2");
        const ends = all("line.grid", plot).filter(upright).map((line) => place(line, "x1"));
        const left = plot.getBoundingClientRect().left;
        const hover = (share) => {  // of the way from 0 to 1,000
            const x = left + Math.min(...ends) + share * (Math.max(...ends) - Math.min(...ends));
            plot.dispatchEvent(new PointerEvent("pointermove", { clientX: x, clientY: 5 }));
            return [caption(first), readout(first), all("circle", plot).length];
        };
        const before = [caption(first), readout(first), all("circle", plot).length];
        const middle = hover(0.52);
        const begin = hover(0.1);
        plot.dispatchEvent(new PointerEvent("pointerleave"));
        const after = [caption(first), readout(first), all("circle", plot).length];
        const keys = ["Home", "ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft", "Escape"].map(
            (key) => { press(plot, key); return caption(first); });
        press(second.querySelector(".plot"), "End");
        const late = readout(second);
        press(plot, "Home"); press(plot, "ArrowRight");
        const spoken = ["role", "tabindex", "aria-label", "aria-valuenow", "aria-valuetext"].map(
            (name) => plot.getAttribute(name));
        const colors = all(".curve", plot).map((line) => getComputedStyle(line).stroke);
        outcome = { before, middle, begin, after, keys, late, spoken, colors };
        """,
        tmp_path,
    )
    low, high = report.bootstrap_interval(np.array([[60.0], [50], [80], [200]]))
    band = f"[{low:.1f}, {high:.1f}]"
    assert outcome["middle"] == [
        "IQM [95 %] at 500 updates",
        [
            ["crr", "70.0", band, "4 seeds"],
            ["bc", "9.00", "", "1 seed"],
            ["awr", "7.00", "[5.00, 9.00]", "2 seeds"],
            ["random", "-3.46", ""],
            ["behaviour", "12.0", ""],
        ],
        3,
    ]
    assert outcome["begin"][0] == "IQM [95 %] at 0 updates"
    assert outcome["before"] == outcome["after"]
    caption, rows, num_dots = outcome["before"]
    assert caption == "IQM [95 %] at the end, 1,000 updates" and num_dots == 0
    assert rows[1] == ["awr", "20.0", "[10.0, 30.0]", "2 seeds"]
    steps = ["at 0", "at 500", "at 1,000", "at 1,000", "at 500", "at the end, 1,000"]
    assert outcome["keys"] == [f"IQM [95 %] {step} updates" for step in steps]
    # max-exp was trained for longer than the other two, which have ended by then
    assert [row[0] for row in outcome["late"][:3]] == [
        "mean-binary (ended at 1,000)",
        "max-exp",
        "bc (ended at 1,000)",
    ]
    spoken = f"500 updates: crr 70.0 {band}; bc 9.00 ; awr 7.00 [5.00, 9.00]"
    assert outcome["spoken"] == ["slider", "0", "Env-v1, shipped", "500", spoken]
    rgb = [tuple(int(color[i : i + 2], 16) for i in (1, 3, 5)) for color in report.PALETTE]
    assert outcome["colors"][:2] == [f"rgb{color}" for color in rgb[:2]]


@needs_browser
@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_phone_in_light_and_dark(folder, tmp_path, scheme):
    """Nothing sticks out at a phone's width, and text stands out (4.5 : 1, as WCAG asks)."""
    outcome = browse(
        report.page(report.read_results(folder)),
        """
        const luminance = (color) => {
            const parts = color.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255);
            const linear = (c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
            const [r, g, b] = parts.map(linear);
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        };
        const page = luminance(getComputedStyle(document.body).backgroundColor);
        const contrast = (element, name) => {
            const own = luminance(getComputedStyle(element)[name]);
            return (Math.max(own, page) + 0.05) / (Math.min(own, page) + 0.05);
        };
        const root = document.documentElement;
        outcome = {
            isDark: page < 0.5, inner: innerWidth, width: root.scrollWidth,
            right: Math.max(...figures().map((figure) => figure.getBoundingClientRect().right)),
            texts: [...all("body, a, label, .readout *, td").map((text) => contrast(text, "color")),
                    ...all("svg text").map((text) => contrast(text, "fill"))],
            curves: all(".curve").map((line) => contrast(line, "stroke")),
        };
        """,
        tmp_path,
        "--window-size=390,844",
        f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}",
    )
    assert outcome["isDark"] == (scheme == "dark")
    assert max(outcome["width"], outcome["right"]) <= outcome["inner"] < 600
    assert min(outcome["texts"]) >= 4.5
    assert min(outcome["curves"]) >= 2  # orange on white is the palest of the palette


@needs_browser
def test_names_are_text_and_an_address_filters(folder, tmp_path):
    results = report.read_results(folder)
    results["crr", "Env-v1", "<b>", NASTY] = results["crr", "Env-v1", "shipped", "max-exp"][:]
    outcome = browse(
        report.page(results),
        """
        const address = [column(1), column(3), document.querySelector("[name=variant]").value];
        type("algo", "");
        outcome = { address, tags: all("main img, main b").length, variants: column(4),
                    labels: all(".readout th").map(text) };
        """,
        tmp_path,
        address="#algo=crr&text=%3Cb%3E&variant=gone",
    )
    assert outcome["address"] == [["crr"], ["<b>"], ""]
    assert outcome["variants"] == [NASTY] and NASTY in outcome["labels"]
    assert outcome["tags"] == 0


@needs_browser
def test_published_page(tmp_path):
    page = (ROOT / "benchmark" / "results" / "index.html").read_bytes()
    outcome = browse(
        page,
        """
        const numbers = all(".curve").map((line) => line.getAttribute("d"));
        outcome = { rows: column(0).length, broken: numbers.filter((d) => /NaN|undefined/.test(d)),
                    cells: all("td, text").map(text).filter((cell) => /NaN|undef|Inf/.test(cell)),
                    shown: all(".curve").length };
        """,
        tmp_path,
    )
    assert outcome["rows"] == len(data_of(page)["rows"]) <= outcome["shown"]
    assert outcome["broken"] == outcome["cells"] == []
