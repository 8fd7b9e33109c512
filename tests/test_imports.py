"""No circles among the package's modules and packages; modules that are imported alone, and what they leave out.

The directions between packages are import-linter's contracts in pyproject.toml (``make lint``).
"""

import subprocess
import sys
from graphlib import CycleError, TopologicalSorter

import grimp
import pytest

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
        ("vllm_kvmerge.server.middleware", {"vllm"}),
    ],
)
def test_module_alone(module: str, left_out: set[str]) -> None:
    """It is the first that a process imports; what it does not need is not imported with it."""
    code = f"import sys, {module}; print(*sorted({left_out} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "\n", "")
