"""The documentation's links, paths, commands and tables, compared with the repository."""

import ast
import importlib.util
import json
import re
from pathlib import Path

import pytest

from vllm_kvmerge.cli import COMMANDS
from vllm_kvmerge.policies import PARTS, PRESETS
from vllm_kvmerge.request.parameters import parse_compression

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "vllm_kvmerge"
README = (ROOT / "README.md").read_text()
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]

WRITTEN_BY_COMMANDS = {"benchmarks/results/gpu_serving.json"}
"""Paths that a command of the documentation writes."""

TOP = "vllm_kvmerge|tests|csrc|benchmarks|configs|deploy|docker|docs"
IN_PACKAGE = "ops|policies|request|engine|server|cli"


def words(text: str) -> int:
    return len(text.split())


def anchors(text: str) -> set[str]:
    """What GitHub makes of a page's headings."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", prose, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(page: Path) -> list[str]:
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and anchor not in anchors(file.read_text())):
            dead.append(target)
    return dead


def missing_paths(text: str) -> set[str]:
    """Paths below the repository, and those in backticks below the package, that are not there."""
    named = {path.rstrip(".") for path in re.findall(rf"(?<![\w/.-])(?:{TOP})/[\w./*-]+", text)}
    missing = {path for path in named if not any(ROOT.glob(path))} - WRITTEN_BY_COMMANDS
    for path in re.findall(rf"`((?:{IN_PACKAGE})/[\w./*-]+)`", text):
        if not any(PACKAGE.glob(path)):
            missing.add(path)
    return missing


def test_readme_is_short():
    assert words(README) <= 900


def test_the_figure_of_the_readme_is_measured():
    rows = json.loads((ROOT / "benchmarks" / "results" / "memory_pressure.json").read_text())["rows"]
    by_case = {row["case"]: row for row in rows}
    stock, ours = by_case["stock vLLM"], by_case["keepkv"]
    text = " ".join(README.split())
    assert f"completes {stock['requests_per_minute']['median']:.1f} requests per minute" in text
    assert f"up to {stock['most_preemptions']} preemptions" in text
    assert f"it completes {ours['requests_per_minute']['median']:.1f}, with none" in text
    assert ours["most_preemptions"] == 0


def leaderboard(title: str) -> dict[str, str]:
    """Scores at a quarter by policy, of the page's first table with such a heading."""
    text = (ROOT / "docs" / "leaderboard.md").read_text()
    table = re.search(rf"^##+ {title}.*?\n\n(.*?)\n\n", text, re.M | re.S)
    assert table is not None
    header, _, *rows = [[cell.strip(" *") for cell in row.strip("|").split("|")] for row in table[1].splitlines()]
    return {row[0]: row[header.index("0.25")].split()[0] for row in rows}


def test_the_answers_of_the_readme_are_those_of_the_leaderboard():
    known, later = leaderboard("The question is known"), leaderboard("The question comes later")
    rows = re.findall(r"^\| `([\w =]+)` \| ([\d.]+) \| ([\d.]+) \|$", README, re.M)
    assert len(rows) == 5
    assert rows == [(policy, known[policy], later[policy]) for policy, *_ in rows]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page):
    assert dead_links(page) == []


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_paths_exist(page):
    assert missing_paths(page.read_text()) == set()


def test_what_is_not_there_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# One heading\n[a](#one-heading) [b](#another) [c](none.md) [d](https://example.org/none.md)\n")
    assert dead_links(page) == ["#another", "none.md"]
    text = "See `engine/none.py`, vllm_kvmerge/none.py, `ops/types.py` and tests/test_docs.py."
    assert missing_paths(text) == {"engine/none.py", "vllm_kvmerge/none.py"}


def test_pages_named_in_code_exist():
    folders = [PACKAGE, *(ROOT / name for name in ("tests", "csrc", "benchmarks", "configs", "deploy", "docker"))]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".h", ".cpp", ".yaml")]
    named = {
        name for path in [*files, ROOT / "Dockerfile"] for name in re.findall(r"docs/[\w/-]+\.md", path.read_text())
    }
    assert named
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def code(page: Path) -> str:
    """A page's code, a line for each line of a block and for each span in a paragraph."""
    text = page.read_text()
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S)
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    return "\n".join([*blocks, *spans])


def test_make_targets_exist():
    lines = re.findall(r"^([\w-][\w -]*):", (ROOT / "Makefile").read_text(), re.M)
    targets = {target for line in lines for target in line.split()}
    lines = re.findall(r"^make((?: [a-z][a-z-]+)+)", "\n".join(map(code, PAGES)), re.M)
    named = {target for line in lines for target in line.split()}
    assert named >= {"serve", "test", "lint"}
    assert named <= targets


def test_modules_and_commands_exist():
    lines = "\n".join(map(code, PAGES))
    modules = set(re.findall(r"python -m ((?:vllm_kvmerge|tests)[\w.]*)", lines))
    assert modules
    assert [name for name in sorted(modules) if importlib.util.find_spec(name) is None] == []
    commands = set(re.findall(r"^(?:\S*/)?vllm-kvmerge ([a-z-]+)\b", lines, re.M))
    assert commands == set(COMMANDS)


def test_every_policy_is_in_the_table():
    table = (ROOT / "docs" / "policies.md").read_text().partition("\n| policy |")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.M)) == sorted(["full", *PRESETS])


def test_presets_own_defaults_are_listed():
    text = (ROOT / "docs" / "policies.md").read_text()
    table = text.partition("## Defaults of presets")[2].partition("\n## ")[0]
    listed = {
        name: dict(re.findall(r"`(\w+): ([\w.]+)`", values))
        for names, values in re.findall(r"^\| (`[a-z].*?) \| (.*) \|$", table, re.M)
        for name in re.findall(r"\w+", names)
    }
    differing = {}
    for preset in PRESETS.values():
        fields = {
            name: info.default
            for kind, parts in PARTS.items()
            for name, info in parts[getattr(preset, kind)].model_fields.items()
        }
        own = {
            name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in preset.defaults.items()
        }
        if changed := {name: value for name, value in own.items() if preset.defaults[name] != fields[name]}:
            differing[preset.name] = changed
    assert listed == differing


def test_every_parameter_of_the_parts_is_listed():
    text = (ROOT / "docs" / "request-field.md").read_text()
    for kind, parts in PARTS.items():
        section = text.partition(f"### {kind.capitalize()}s\n")[2].partition("\n### ")[0].partition("\n## ")[0]
        listed = {
            (part, field, default)
            for field, names, default in re.findall(r"^\| `(\w+)` \| (.*?) \| .*? \| `(.*?)` \|", section, re.M)
            for part in re.findall(r"\w+", names)
        }
        expected = {
            (name, field, json.dumps(info.default))
            for name, part in parts.items()
            for field, info in part.model_fields.items()
        }
        assert listed == expected, kind
        for name, part in parts.items():
            assert part.model_fields or f"`{name}`" in section.rpartition("Without parameters:")[2], name


def test_requests_in_the_text_are_accepted():
    requests = [text for page in PAGES for text in re.findall(r'`(\{"policy"[^`]*\})`', page.read_text())]
    assert '{"policy": "full"}' in requests
    for text in requests:
        parse_compression(json.loads(text))  # raises


def test_every_patch_of_vllm_is_listed():
    tree = ast.parse((PACKAGE / "engine" / "compat.py").read_text())
    patches = {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith(("_", "install"))
    }
    section = (ROOT / "docs" / "design.md").read_text().partition("## Places where vLLM gives no hook")[2]
    rows = re.findall(r"^\| (`.*?`) \|", section.partition("\n## ")[0], re.M)
    assert {name for row in rows for name in re.findall(r"\w+", row)} == patches


def test_routes_that_take_the_field_are_listed():
    from vllm_kvmerge.server.middleware import CARRIERS

    text = (ROOT / "docs" / "request-field.md").read_text()
    assert [route for route in CARRIERS if f"`{route.removesuffix('/render')}`" not in text] == []


def test_the_table_by_workload_has_requests():
    page = (ROOT / "docs" / "choosing-a-policy.md").read_text()
    table = page.partition("\n| workload |")[2].partition("\n\n")[0].splitlines()[2:]
    assert len(table) == 5
    for row in table:
        (request,) = re.findall(r"`({.*?})`", row)
        parse_compression(json.loads(request))  # raises
