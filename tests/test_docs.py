"""The documentation's links, paths, commands and tables, compared with the repository."""

import ast
import importlib.util
import json
import re

from tests.documented import PAGES, ROOT, fences
from vllm_kvmerge.cli import COMMANDS
from vllm_kvmerge.policies import PARTS, PRESETS
from vllm_kvmerge.request.spec import parse_compression

PACKAGE = ROOT / "vllm_kvmerge"
README = (ROOT / "README.md").read_text()


def test_paths_exist():
    """Those below the repository, and those in backticks below the package."""
    folders = "vllm_kvmerge|tests|csrc|benchmarks|configs|deploy|docker|docs"
    missing = {"benchmarks/results/gpu_serving.json"}  # a command of the documentation writes it
    for page in PAGES:
        text = page.read_text()
        named = {path.rstrip(".") for path in re.findall(rf"(?<![\w/.-])(?:{folders})/[\w./*-]+", text)}
        inside = re.findall(r"`((?:ops|policies|request|engine|server|cli)/[\w./*-]+)`", text)
        for path in named | {f"vllm_kvmerge/{name}" for name in inside}:
            assert any(ROOT.glob(path)) or path in missing, (page, path)


def test_pages_named_in_code_exist():
    folders = [PACKAGE, *(ROOT / name for name in ("tests", "csrc", "benchmarks", "configs", "deploy", "docker"))]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".h", ".cpp", ".yaml")]
    for path in [*files, ROOT / "Dockerfile"]:
        for name in re.findall(r"docs/[\w/-]+\.md", path.read_text()):
            assert (ROOT / name).exists(), (path, name)


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
    """Scores at a quarter by policy: of the page's first table with such a heading that has the policy."""
    text, scores = (ROOT / "docs" / "leaderboard.md").read_text(), dict[str, str]()
    listed = r"((?:(?:Below|Others)[^\n]*\n\n)*)"
    for table, low in re.findall(rf"^##+ {title}.*?\n\n(.*?)\n\n{listed}", text, re.M | re.S):
        header, _, *rows = [[cell.strip(" *") for cell in row.strip("|").split("|")] for row in table.splitlines()]
        found = {row[0]: row[header.index("0.25")].split()[0] for row in rows}
        scores = dict(re.findall(r"(\w[\w =]*) (\d\.\d\d)[,.]", low)) | found | scores
    return scores


def test_the_answers_of_the_readme_are_those_of_the_leaderboard():
    known, later = leaderboard("The question is known"), leaderboard("The question comes later")
    rows = re.findall(r"^\| `([\w =]+)` \| ([\d.]+) \| ([\d.]+) \|$", README, re.M)
    assert len(rows) == 5
    assert rows == [(policy, known[policy], later[policy]) for policy, *_ in rows]


def test_targets_modules_and_commands_exist():
    """Those of blocks, and of spans in paragraphs."""
    blocks = [text for page in PAGES for _, text in fences(page)]
    lines = "\n".join([*blocks, *(span for page in PAGES for span in re.findall(r"`([^`\n]+)`", page.read_text()))])
    targets = " ".join(re.findall(r"^([\w-][\w -]*):", (ROOT / "Makefile").read_text(), re.M)).split()
    named = set(" ".join(re.findall(r"^make((?: [a-z][a-z-]+)+)", lines, re.M)).split())
    assert named >= {"serve", "test", "lint"} and named <= set(targets)
    modules = set(re.findall(r"python -m ((?:vllm_kvmerge|tests)[\w.]*)", lines))
    assert modules and all(map(importlib.util.find_spec, modules))
    assert set(re.findall(r"^(?:\S*/)?vllm-kvmerge ([a-z-]+)\b", lines, re.M)) == set(COMMANDS)


def test_every_policy_is_in_the_table():
    table = (ROOT / "docs" / "policies.md").read_text().partition("\n| policy |")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.M)) == sorted(["full", *PRESETS])


def test_presets_own_defaults_are_listed():
    text = (ROOT / "docs" / "policies.md").read_text()
    table = text.partition("## Defaults of presets")[2].partition("\n## ")[0]
    listed = {
        name: dict(re.findall(r"`(\w+): ([\w.]+|\[.*?\])`", values))
        for names, values in re.findall(r"^\| (`[a-z].*?) \| (.*) \|$", table, re.M)
        for name in re.findall(r"\w+", names)
    }
    differing = {}
    for preset in PRESETS.values():
        parts = [PARTS[kind][getattr(preset, kind)] for kind in PARTS]
        fields = {name: info.default for part in parts for name, info in part.model_fields.items()}
        if changed := {name: value for name, value in preset.defaults.items() if value != fields[name]}:
            differing[preset.name] = {
                name: json.dumps(value).removesuffix(".0").replace('"', "") for name, value in changed.items()
            }
    assert listed == differing


def test_requests_in_the_text_are_accepted():
    requests = [text for page in PAGES for text in re.findall(r'`(\{"(?:policy|budget)"[^`]*\})`', page.read_text())]
    assert '{"policy": "full"}' in requests and '{"budget": 0.25}' in requests
    for text in requests:
        parse_compression(json.loads(text))  # raises


def test_every_patch_of_vllm_says_what_would_end_it():
    tree = ast.parse((PACKAGE / "engine" / "compat.py").read_text())
    patches = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    patches = [node for node in patches if not node.name.startswith(("_", "install", "register"))]  # vLLM's own hooks
    silent = [node.name for node in patches if "unnecessary" not in (ast.get_docstring(node) or "")]
    assert len(patches) > 20 and silent == []


def test_routes_that_take_the_field_are_listed():
    from vllm_kvmerge.server.middleware import CARRIERS

    text = (ROOT / "docs" / "request-field.md").read_text()
    assert [route for route in CARRIERS if f"`{route.removesuffix('/render')}`" not in text] == []
