"""What holds one file per algorithm together: copies are fine if a machine checks them."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "algos").glob("*.py"))
TREES = {file.stem: ast.parse(file.read_text()) for file in FILES}

# These carry the algorithm itself, so that they differ by design. Everything else that two files
# both define is the same text in both.
MAY_DIFFER = {
    "Args": "the flags of an algorithm are its own",
    "ALGO": "the name",
    "LIMITS": "of those flags",
    "check_args": "it checks those flags",
    "make_env": "each prepares images in its own way",
    "Buffer": "offline, online and sequence data are stored differently",
    "make_policy": "what acts is the algorithm's own",
    "load_policy": "it builds the algorithm's networks",
    "train": "the loop is the lesson",
    "evaluate_checkpoint": "some algorithms have more to show: a replay buffer, a plot, a dream",
}
FLAG_MAY_DIFFER = {
    "beta": "a symbol of each paper: a temperature here, its inverse there",
    "dataset": "an online run can do without one",
    "lr_schedule": "GAIL's default falls, and its help says until when",
}
SECTIONS = ["arguments", "networks", "buffer", "losses", "checkpoint", "training"]
HEADINGS = ["Paper:", "Idea:", "Equations", "Differences from the paper:", "Shapes:", "Run it"]
MOST_LINES = {"awr": 450, "marwil": 450, "crr": 480, "rlpd": 620, "gail": 680, "fqf": 720}
MOST_LINES |= {"mbpo": 880, "dreamer": 1050}
GROUPS = ["task", "budget", "optimisation", "evaluation and stops", "the run"]  # of the flags
SHARED_FLAGS = [  # in this order, at the top of every Args that has them
    *("env_id", "seed", "dataset", "reward_scale", "reward_shift", "normalize_reward"),
    *("total_updates", "total_epochs", "total_timesteps", "batch_size", "gamma", "learning_rate"),
    *("lr_schedule", "warmup_updates", "hidden_dim", "eval_interval", "eval_episodes"),
    *("eval_seed", "target_return", "patience", "checkpoint_interval", "log_interval", "run_dir"),
    *("resume", "evaluate", "record", "capture_video", "track", "quiet", "device"),
    *("torch_threads", "compile"),
]
EVERY_FILE_HAS = {  # of those: the controls that no algorithm may lack
    *("env_id", "seed", "eval_interval", "eval_episodes", "eval_seed", "target_return"),
    *("patience", "lr_schedule", "warmup_updates", "checkpoint_interval", "log_interval"),
    *("run_dir", "resume", "evaluate", "record", "capture_video", "track", "quiet", "device"),
    "torch_threads",
}
ALLOWED_IMPORTS = {
    *("collections", "contextlib", "copy", "dataclasses", "functools", "io", "itertools", "math"),
    *("pathlib", "sys", "typing"),
    *("gymnasium", "numpy", "torch", "tyro", "common"),
}


def definitions(tree):
    """Top-level functions, classes and constants by name."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node
    return found


def flags(name):
    """Args as {flag: (type, help)}; the help is the trailing comment."""
    lines = (ROOT / "algos" / f"{name}.py").read_text().splitlines()
    node = definitions(TREES[name])["Args"]
    result = {}
    for field in node.body:
        assert isinstance(field, ast.AnnAssign), "Args holds flags and nothing else"
        assert field.lineno == field.end_lineno, f"{field.target.id}: one line per flag"
        code, _, comment = lines[field.lineno - 1].partition("  # ")
        assert comment, f"{field.target.id} has no help"
        result[field.target.id] = (code.split(":")[1].split("=")[0].strip(), comment)
    return result


def text_of(source, node):
    """Of a definition, with its decorators, which are no part of its segment."""
    decorators = [ast.unparse(decorator) for decorator in getattr(node, "decorator_list", [])]
    return [*decorators, ast.get_source_segment(source, node)]


def shared_differences(left, right):
    """Names that both sources define, differently, although they may not."""
    mine, others = definitions(ast.parse(left)), definitions(ast.parse(right))
    return [
        name
        for name in mine.keys() & others.keys() - MAY_DIFFER.keys()
        if text_of(left, mine[name]) != text_of(right, others[name])
    ]


def flag_differences(mine, others):
    shared = mine.keys() & others.keys() - FLAG_MAY_DIFFER.keys()
    return [flag for flag in shared if mine[flag] != others[flag]]


@pytest.mark.parametrize("name", TREES)
def test_same_name_same_text(name):
    for other in TREES:
        sources = [(ROOT / "algos" / f"{file}.py").read_text() for file in (name, other)]
        assert shared_differences(*sources) == [], f"between {name}.py and {other}.py"


def test_awr_and_marwil_differ_where_the_papers_do():
    """Their diff is the lesson: of what may differ elsewhere, these are the same text, too."""
    awr, marwil = ((ROOT / "algos" / f"{name}.py").read_text() for name in ("awr", "marwil"))
    for name in ("Buffer", "make_policy", "load_policy"):
        assert f"\ndef {name}(" in awr or f"\nclass {name}:" in awr
        left, right = (
            ast.get_source_segment(source, definitions(ast.parse(source))[name])
            for source in (awr, marwil)
        )
        assert left == right, name


@pytest.mark.parametrize("name", TREES)
def test_one_vocabulary_of_flags(name):
    mine = flags(name)
    assert mine.keys() >= EVERY_FILE_HAS
    shared = [flag for flag in SHARED_FLAGS if flag in mine]
    assert list(mine)[: len(shared)] == shared, "shared flags come first, in one order"
    for other in TREES:
        assert flag_differences(mine, flags(other)) == [], f"between {name}.py and {other}.py"


def test_the_tests_above_see_a_difference():
    """With one file they compare it with itself; a sibling that strays must be caught."""
    source = (ROOT / "algos" / "crr.py").read_text()
    assert shared_differences(
        source, source.replace("        return q - q_candidates", "        return q_candidates")
    ) == ["crr_advantage"]
    assert shared_differences(
        source, source.replace("@torch.no_grad()\ndef update_target", "def update_target")
    ) == ["update_target"]
    assert shared_differences(source, source.replace('ALGO = "crr"', 'ALGO = "awr"')) == []
    mine = flags("crr")
    assert flag_differences(mine, mine | {"gamma": ("float", "another help")}) == ["gamma"]


@pytest.mark.parametrize("name", TREES)
def test_flags_are_in_named_groups(name):
    """The same in the same order in all files; a flag is in the same group everywhere."""
    node = definitions(TREES[name])["Args"]
    source = ast.get_source_segment((ROOT / "algos" / f"{name}.py").read_text(), node)
    assert re.findall(r"^    # (.*)$", source, re.MULTILINE) == [*GROUPS, f"{name.upper()} only"]
    starts = ["env_id", "total_", "batch_size", "eval_interval", "checkpoint_interval"]
    for group, first_flag in zip(GROUPS, starts):
        assert f"    # {group}\n    {first_flag}" in source
    own = source.split(" only\n")[1]
    assert not any(f"    {flag}: " in own for flag in SHARED_FLAGS)


@pytest.mark.parametrize("name", TREES)
def test_a_file_stays_short(name):
    assert len((ROOT / "algos" / f"{name}.py").read_text().splitlines()) <= MOST_LINES[name]


def help_block(name):
    source = (ROOT / "algos" / f"{name}.py").read_text()
    return re.search(
        r'^if __name__ == "__main__":  # torch .*?sys\.exit\(\)\n', source, re.M | re.S
    ).group()


def test_help_is_answered_by_the_same_lines_everywhere():
    assert len({help_block(name) for name in TREES}) == 1


@pytest.mark.parametrize("name", TREES)
def test_every_flag_is_read(name):
    """As args.flag, outside of the functions that only check it."""
    read = set()
    for tree in (TREES[name], ast.parse((ROOT / "common.py").read_text())):
        for definition, node in definitions(tree).items():
            if definition not in ("check_args", "check_flags"):
                for inner in ast.walk(node):
                    if isinstance(inner, ast.Attribute) and ast.unparse(inner.value) in (
                        "args",
                        "self.args",
                    ):
                        read.add(inner.attr)
    assert flags(name).keys() - read == set()


@pytest.mark.parametrize("name", TREES)
def test_sections_in_order(name):
    source = (ROOT / "algos" / f"{name}.py").read_text()
    found = re.findall(r"^# ---- (.*)$", source, re.MULTILINE)
    assert found == [section for section in SECTIONS if section in found]
    assert set(SECTIONS) - set(found) <= {"buffer"}


@pytest.mark.parametrize("name", TREES)
def test_docstring_headings(name):
    docstring = ast.get_docstring(TREES[name])
    positions = [re.search(rf"^{heading}", docstring, re.MULTILINE) for heading in HEADINGS]
    missing = [heading for heading, found in zip(HEADINGS, positions) if not found]
    assert missing == []
    starts = [found.start() for found in positions]
    assert starts == sorted(starts)
    assert re.search("arXiv:|NeurIPS", docstring)
    assert f"python algos/{name}.py --resume" in docstring
    assert 20 <= docstring.count("\n") + 1 <= 50


@pytest.mark.parametrize("name", TREES)
def test_imports_are_allowed(name):
    """Anything else is imported where it is used, so that a plain run does not need it."""
    for node in TREES[name].body:
        if isinstance(node, ast.Import):
            assert {alias.name.split(".")[0] for alias in node.names} <= ALLOWED_IMPORTS
        elif isinstance(node, ast.ImportFrom):
            assert node.module.split(".")[0] in ALLOWED_IMPORTS


LOSSES = {  # where there are several
    "fqf": "quantile_huber_loss",
    "mbpo": "mbpo_model_loss",  # its other losses are SAC's
    "dreamer": "dreamer_actor_loss",
}


@pytest.mark.parametrize("name", TREES)
def test_there_is_a_pure_loss_with_a_shape_assert(name):
    """<algo>_loss takes tensors and numbers, no network, and starts by checking shapes."""
    loss = definitions(TREES[name])[LOSSES.get(name, f"{name}_loss")]
    annotations = {ast.unparse(argument.annotation) for argument in loss.args.args}
    assert annotations <= {"torch.Tensor", "float", "int", "str", "bool"}
    assert isinstance(loss.body[1], ast.Assert)


@pytest.mark.parametrize("file", [*FILES, ROOT / "common.py"], ids=lambda file: file.name)
def test_ascii_and_width(file):
    for number, line in enumerate(file.read_text().splitlines(), 1):
        assert line.isascii() and len(line) <= 100, f"{file.name}:{number}"


def test_top_level_entries():
    allowed = {"algos", "benchmark", "tests", "common.py", "requirements.txt", "README.md"}
    allowed |= {"LICENSE", "runs", "MUJOCO_LOG.TXT"}  # the last two are made by running things
    found = {path.name for path in ROOT.iterdir() if not path.name.startswith((".", "__"))}
    assert found <= allowed
