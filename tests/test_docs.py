"""README.md, algos/*.md and benchmark/*.md say what is true: links, commands, quotes, metrics."""

import ast
import html
import re
import shlex
from pathlib import Path
from urllib.parse import unquote

import pytest
from conftest import ALGOS
from markdown_it import MarkdownIt
from test_consistency import flags
from test_page import browse, needs_browser

from benchmark import report

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PAGES = sorted((ROOT / "algos").glob("*.md"))
DOCUMENTS = [README, *PAGES, *sorted((ROOT / "benchmark").glob("**/*.md"))]
DOCUMENTS = [path for path in DOCUMENTS if "results" not in path.parts]
HEADINGS = [
    "The idea",
    "Equations and code",
    "A picture",
    "Commands",
    "Logged metrics",
    "What differs",
    "Results",
    "What did not work",
    "When to use it",
]
MARKDOWN = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


each_document = pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
each_page = pytest.mark.parametrize("path", PAGES, ids=name_of)


def without_code(text: str) -> str:
    """Code blocks, fenced and indented, and code in a line: no links, tables or equations there."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "`code`", text)


def anchors(text: str) -> set[str]:
    """As GitHub makes them of headings: lower case, no punctuation, - for a space."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def commands(text: str) -> list[str]:
    """All that calls one of our scripts, with continued lines joined: in blocks and in lines."""
    text = text.replace("\\\n", " ")
    return re.findall(r"(?:^ *|`|&& )python ((?:algos|benchmark)/[\w/]+\.py[^\n`#|&]*)", text, re.M)


def known_flags(algo: str) -> set[str]:
    mine = {flag.replace("_", "-"): type for flag, (type, _) in flags(algo).items()}
    return {f"--{flag}" for flag in mine} | {
        f"--no-{flag}" for flag, type in mine.items() if type == "bool"
    }


def sections(text: str) -> dict[str, str]:
    parts = re.split(r"^## (.*)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2]))


# ---- all documents


@each_document
def test_links_and_images_exist(path):
    text = path.read_text()
    targets = re.findall(r"\]\(([^)\s]+)\)", without_code(text).replace("`code`", "code"))
    for target in targets:
        if not target.startswith(("http://", "https://")):
            file, _, anchor = unquote(target).partition("#")
            linked = (path.parent / file).resolve() if file else path
            assert linked.exists(), f"{name_of(path)}: {target}"
            assert not anchor or anchor in anchors(linked.read_text()), f"{name_of(path)}: {target}"


@each_document
def test_commands_are_accepted(path):
    """Every script exists, every flag is one of its own."""
    for command in commands(path.read_text()):
        script, *words = shlex.split(command)
        assert (ROOT / script).is_file(), command
        if script.startswith("algos/"):
            used = {word.split("=")[0] for word in words if word.startswith("--")}
            assert used <= known_flags(Path(script).stem) | {"--help"}, command
        else:
            source = (ROOT / script).read_text()
            for word in words:
                if word.startswith("--"):
                    name = word[2:].replace("-", "_")
                    is_field = re.search(rf'^    {name}: |"--{word[2:]}"', source, re.MULTILINE)
                    assert is_field or word == "--help" or "time_per_step" in script, command


@each_document
def test_tables_have_at_most_eight_columns(path):
    for line in without_code(path.read_text()).splitlines():
        if line.startswith("|"):
            assert line.replace("\\|", "").count("|") <= 9, f"{name_of(path)}: {line[:80]}"


@each_document
def test_it_renders(path):
    """No marker is left over: what a reader would see as a stray star, fence, bracket or dollar."""
    text = re.sub(r"^\$\$$.*?^\$\$$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    page = MARKDOWN.render(re.sub(r"\$`?[^$\n]+`?\$", "", text))
    page = re.sub(r"<!--.*?-->|<(pre|code)\b.*?</\1>", "", page, flags=re.DOTALL)
    seen = html.unescape(re.sub(r"<[^>]+>", "", page))
    stray = re.findall(r"^.*(?:```|\*\*|\]\(|\$\$|^#+ |\| :?--|^\s*\| ).*$", seen, re.MULTILINE)
    assert stray == []


def test_the_tests_above_see_a_mistake(tmp_path):
    assert commands(
        "x `python algos/crr.py --beta 2` y\n    python benchmark/run.py --only a \\\n  --list"
    ) == [
        "algos/crr.py --beta 2",
        "benchmark/run.py --only a    --list",
    ]
    assert "--no-learn-fractions" in known_flags("fqf") and "--no-gamma" not in known_flags("fqf")
    assert anchors("# A b, c?\n```\n# no\n```\n## `x` y") == {"a-b-c", "x-y"}
    broken = tmp_path / "x.md"
    for text in ("**a\n", "[a] (b)\n[a](\n", "|a|b|\n| :-- |\n"):
        broken.write_text(text)
        with pytest.raises(AssertionError):
            test_it_renders(broken)


# ---- the README


def test_readme_is_short():
    assert len(README.read_text().splitlines()) <= 220


def test_flags_that_the_readme_names_exist():
    """Also those in its tables, where `...` stands for a script."""
    known = {"--help"}.union(*map(known_flags, ALGOS))
    known |= {"--list", "--only", "--seeds", "--results"}  # of benchmark/run.py
    known |= {"--index-url", "--logdir"}  # of pip and tensorboard
    text = README.read_text()
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", re.sub(r"<!--.*?-->", "", text))) <= known


def test_readme_explains_the_keys_that_all_files_log():
    text = README.read_text()
    for file in [*(ROOT / "algos").glob("*.py"), ROOT / "common.py"]:
        keys = re.findall(r'"((?:charts|eval)/\w+)"', file.read_text())
        missing = {key for key in keys if f"`{key}`" not in text} - {"eval/dream"}
        assert missing - {"eval/best_return"} == set(), file.name


def test_readme_runs_its_python():
    """The names that it imports are there, and the arguments are flags."""
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    tree = ast.parse(block)
    (line,) = (node for node in tree.body if isinstance(node, ast.ImportFrom))
    algo = ALGOS[line.module.removeprefix("algos.")]
    assert all(hasattr(algo, alias.name) for alias in line.names)
    (call,) = (
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.func.id == "Args"
    )
    algo.Args(**{keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords})


# ---- the pages of the algorithms


@each_page
def test_page_has_its_headings_and_is_short(path):
    text = path.read_text()
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == HEADINGS
    table = re.search(r"<!-- results:begin -->\n(.*)<!-- results:end -->", text, re.DOTALL)
    assert len(text.splitlines()) - len(table[1].splitlines()) <= 180
    title, subtitle = [line for line in text.splitlines() if line][:2]
    assert title.startswith("# ") and subtitle.startswith(f"[`{path.stem}.py`]({path.stem}.py) · ")


def test_every_algorithm_has_a_page_with_results():
    assert {page.stem for page in PAGES} == {*ALGOS}
    for page in PAGES:
        _, _, rest = page.read_text().partition("<!-- results:begin -->")
        assert "| last: IQM" in rest.partition("<!-- results:end -->")[0], name_of(page)


@each_page
def test_page_quotes_its_file(path):
    text = path.read_text()
    quotes = re.findall(r"<!-- quote (\S+) -->\n```python\n", text)
    assert 3 <= len(quotes) <= 6
    assert text.count("```python") == len(quotes) == text.count("<!-- end quote -->")
    assert report.quoted(text, path.with_suffix(".py").read_text()) == text


@each_page
def test_equations_are_closed(path):
    """$$ on lines of their own, in pairs; braces, \\left and \\begin, too."""
    text = without_code(path.read_text())
    assert text.count("$$") == len(re.findall(r"^\$\$$", text, re.MULTILINE))
    blocks = re.findall(r"^\$\$\n(.*?)\n\$\$$", text, re.DOTALL | re.MULTILINE)
    assert blocks and 2 * len(blocks) == text.count("$$")
    for block in blocks:
        assert block.strip() and block.count("{") == block.count("}"), block
        for left, right in ((r"\left", r"\right"), (r"\begin{", r"\end{")):
            lefts = re.findall(re.escape(left) + r"(?![a-z])", block)
            assert len(lefts) == len(re.findall(re.escape(right) + r"(?![a-z])", block)), block


@each_page
def test_markdown_leaves_equations_alone(path):
    r"""GitHub reads Markdown first and equations afterwards: of \, it leaves a comma, of \{ a
    brace that LaTeX does not show, and two lone underscores become italics."""
    text = without_code(path.read_text())
    blocks = re.findall(r"^\$\$\n.*?^\$\$$", text, re.DOTALL | re.MULTILINE)
    rest = re.sub(r"^\$\$\n.*?^\$\$$", "", text, flags=re.DOTALL | re.MULTILINE)
    for equation in blocks + re.findall(r"\$[^$\n]+\$", rest):
        page = MARKDOWN.render(f"x {equation}")
        assert html.unescape(page) == f"<p>x {equation}</p>\n"


def logged(algo: str) -> tuple[set[str], list[str]]:
    """The losses/ and stats/ keys of a file, and patterns for those that are f-strings."""
    strings = re.findall(
        r'(f?)"((?:losses|stats)/[^"\s]+)"', (ROOT / f"algos/{algo}.py").read_text()
    )
    plain = {key for prefix, key in strings if not prefix}
    patterns = [re.sub(r"\{[^}]*\}", r"[\\w<>{}*]+", key) for prefix, key in strings if prefix]
    return plain, patterns


@each_page
def test_page_explains_what_its_file_logs(path):
    """All of it, and nothing else."""
    plain, patterns = logged(path.stem)
    rows = re.findall(r"^\| (`.*)$", sections(path.read_text())["Logged metrics"], re.MULTILINE)
    first = " ".join(row.split("|")[0] for row in rows)
    explained = set(re.findall(r"`((?:losses|stats)/[\w<>{}*]+)`", first))
    assert plain - explained == set(), "not on the page"
    for pattern in patterns:
        assert any(re.fullmatch(pattern, key) for key in explained), pattern
    unknown = {key for key in explained - plain if not any(re.fullmatch(p, key) for p in patterns)}
    assert unknown == set(), "not in the file"


def test_logged_sees_the_keys():
    plain, patterns = logged("mbpo")
    assert {"losses/critic", "stats/rollout_length"} <= plain
    assert any(re.fullmatch(pattern, "stats/holdout_mse_0") for pattern in patterns)
    assert not any(re.fullmatch(pattern, "losses/critic") for pattern in patterns)


# ---- what a browser makes of them

STYLE = """<style>
    body { max-width: 1012px; margin: auto; font: 16px/1.5 sans-serif; overflow-wrap: break-word; }
    img { max-width: 100%; }
    pre { overflow: auto; } table { display: block; overflow: auto; }
</style>"""  # GitHub's, as far as widths go


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("path", [README, *PAGES[:2]], ids=name_of)
@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_sticks_out(path, width, tmp_path):
    base = f'<base href="{path.parent.as_uri()}/">'
    body = MARKDOWN.render(path.read_text())
    page = f"<!doctype html><html><head>{base}{STYLE}</head><body>{body}</body></html>"
    outcome = browse(
        page.encode(),
        """
        if (document.readyState !== "complete")  // its images are not there yet
                await new Promise((done) => addEventListener("load", done));
        outcome = { inner: innerWidth, width: document.documentElement.scrollWidth,
                    images: all("img").map((image) => image.naturalWidth),
                    headings: all("h1, h2").map(text) };
        """,
        tmp_path,
        f"--window-size={width},900",
    )
    assert outcome["width"] <= outcome["inner"]
    assert outcome["images"] and all(outcome["images"])
    assert len(outcome["headings"]) == len(
        re.findall(r"^##? ", without_code(path.read_text()), re.M)
    )


def test_the_line_that_makes_a_table_of_metrics(tmp_path, monkeypatch):
    """Two episodes that end at one step, as those of several environments may."""
    pandas = pytest.importorskip("pandas")
    line = next(x.strip() for x in README.read_text().splitlines() if "pandas.read_csv" in x)
    key = "charts/episodic_return"
    rows = ["step,seconds,key,value", f"5,0.1,{key},1", f"5,0.1,{key},3", "5,0.2,losses/a,7"]
    (tmp_path / "metrics.csv").write_text("\n".join(rows))
    monkeypatch.chdir(tmp_path)
    table = eval(line, {"pandas": pandas})
    assert table.to_dict() == {key: {5: 2.0}, "losses/a": {5: 7.0}}
