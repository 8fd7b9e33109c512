"""No circles among the package's modules and packages; modules alone leave out what they do not need; vLLM is patched
in one package.

The directions between packages are import-linter's contracts in pyproject.toml (``make lint``).
"""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

import vllm_kvmerge

PACKAGE = "vllm_kvmerge"
DEEPEST = 5
"""Names in the longest path of a module, ``vllm_kvmerge.evaluation.tasks.ruler.niah``."""


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    """All imports, also those inside functions and those for type checking alone."""
    return grimp.build_graph(PACKAGE, cache_dir=None)


def circle(graph: grimp.ImportGraph, depth: int) -> list[str]:
    """A circle of imports, where modules count as their first ``depth`` names; empty: there is none."""

    def shortened(module: str) -> str:
        return ".".join(module.split(".")[:depth])

    imports: dict[str, set[str]] = {}
    for module in graph.modules:
        imported = {shortened(other) for other in graph.find_modules_directly_imported_by(module)}
        imports.setdefault(shortened(module), set()).update(imported - {shortened(module)})
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return error.args[1]
    return []


@pytest.mark.parametrize("depth", range(2, DEEPEST + 1))
def test_no_circle(graph: grimp.ImportGraph, depth: int) -> None:
    assert not circle(graph, depth)


def test_depths_reach_every_module(graph: grimp.ImportGraph) -> None:
    assert max(module.count(".") + 1 for module in graph.modules) == DEEPEST


def test_circles_are_found() -> None:
    graph = grimp.build_graph(PACKAGE, cache_dir=None)
    graph.add_import(importer="vllm_kvmerge.ops.types", imported="vllm_kvmerge.policies.entries")
    assert {"vllm_kvmerge.ops", "vllm_kvmerge.policies"} <= set(circle(graph, 2))
    graph.remove_import(importer="vllm_kvmerge.ops.types", imported="vllm_kvmerge.policies.entries")
    assert not circle(graph, 2)
    graph.add_import(importer="vllm_kvmerge.ops.types", imported="vllm_kvmerge.ops.dispatch")
    assert "vllm_kvmerge.ops.dispatch" in circle(graph, 3)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("module", "left_out"),
    [
        ("vllm_kvmerge.plugin", {"vllm", "torch", "numpy"}),
        ("vllm_kvmerge.cli", {"vllm", "torch", "numpy"}),
        ("vllm_kvmerge.cli.serve", {"vllm", "torch"}),
        ("vllm_kvmerge.evaluation.command", {"vllm", "torch", "matplotlib"}),
        ("vllm_kvmerge.ops", {"vllm", "triton"}),
        ("vllm_kvmerge.policies", {"vllm", "triton"}),
        ("vllm_kvmerge.request", {"vllm", "triton"}),
    ],
)
def test_module_alone(module: str, left_out: set[str]) -> None:
    """It is the first that a process imports; what it does not need is not imported with it."""
    code = f"import sys, {module}; print(*sorted({left_out} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "\n", "")


def vllm_names(tree: ast.Module) -> set[str]:
    """Names that a module binds to parts of vLLM, by import statements or ``import_module``."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or "vllm" for alias in node.names if alias.name.split(".")[0] == "vllm"}
        elif isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "vllm":
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign) and "import_module('vllm." in ast.unparse(node):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def root(expression: ast.expr) -> str | None:
    """``a`` of ``a.b().c``; None: it begins with no name."""
    while isinstance(expression, ast.Attribute | ast.Call | ast.Subscript):
        expression = expression.func if isinstance(expression, ast.Call) else expression.value
    return expression.id if isinstance(expression, ast.Name) else None


def test_vllm_is_subclassed_and_patched_in_the_engine_alone() -> None:
    """Elsewhere: the base classes that vLLM offers for middlewares, options and logits processors."""
    subclasses, patches = set(), set()
    folder = Path(vllm_kvmerge.__file__).parent
    for path in folder.rglob("*.py"):
        place = path.relative_to(folder)
        if place.parts[0] == "engine":
            continue
        text = path.read_text()
        if "vllm" not in text.replace(PACKAGE, ""):
            continue
        tree = ast.parse(text)
        names = vllm_names(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and any(root(base) in names for base in node.bases):
                subclasses.add((str(place), node.name))
            elif isinstance(node, ast.Assign):
                attributes = [target for target in node.targets if isinstance(target, ast.Attribute)]
                patches |= {(str(place), ast.unparse(target)) for target in attributes if root(target) in names}
    assert subclasses == {
        ("cli/arguments.py", "ServeParser"),
        ("evaluation/continuation.py", "ForcedContinuation"),
        ("server/guard.py", "GuardMiddleware"),
    }
    assert not patches
