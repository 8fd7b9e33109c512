"""No circles among the package's modules and packages; modules alone leave out what they do not need; vLLM is patched
in one package.

The directions between packages are import-linter's contracts in pyproject.toml (``make lint``).
"""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

import vllm_kvmerge

PACKAGE = "vllm_kvmerge"


def test_no_circle() -> None:
    """Among modules, and among packages of every depth; imports inside functions and for type checking count."""
    graph = grimp.build_graph(PACKAGE, cache_dir=None)
    for depth in range(2, 1 + max(len(module.split(".")) for module in graph.modules)):
        imports = defaultdict(set)
        for module in graph.modules:
            for other in graph.find_modules_directly_imported_by(module):
                imports[".".join(module.split(".")[:depth])].add(".".join(other.split(".")[:depth]))
        TopologicalSorter({one: others - {one} for one, others in imports.items()}).prepare()  # or a CycleError


@pytest.mark.engine
@pytest.mark.parametrize(
    ("statements", "left_out"),
    [
        ("import vllm_kvmerge.plugin", {"vllm", "torch", "numpy"}),
        ("import vllm_kvmerge.cli", {"vllm", "torch", "numpy"}),
        ("from vllm_kvmerge.cli import main; main(['eval', 'list'])", {"vllm", "torch", "matplotlib"}),
        pytest.param("from vllm_kvmerge.cli import main; main(['policies'])", {"vllm"}, marks=pytest.mark.slow),
        ("import vllm_kvmerge.cli.serve", {"vllm", "torch"}),
        ("import vllm_kvmerge.evaluation.command", {"vllm", "torch", "matplotlib"}),
        pytest.param("import vllm_kvmerge.demo.train, vllm_kvmerge.demo.scores", {"vllm"}, marks=pytest.mark.slow),
        ("import vllm_kvmerge.ops", {"vllm", "triton"}),
        ("import vllm_kvmerge.policies", {"vllm", "triton"}),
        ("import vllm_kvmerge.request", {"vllm", "triton"}),
    ],
)
def test_module_alone(statements: str, left_out: set[str]) -> None:
    """It is the first that a process imports; what it does not need is not imported with it."""
    code = f"{statements}; import sys; sys.exit(' '.join({left_out} & sys.modules.keys()) or None)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def vllm_names(tree: ast.Module) -> set[str]:
    """Names that a module binds to parts of vLLM, by import statements or ``import_module``."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or "vllm" for alias in node.names if alias.name.split(".")[0] == "vllm"}
        elif isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "vllm":
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign) and "import_module('vllm." in ast.unparse(node.value):
            names |= set(map(ast.unparse, node.targets))
    return names


def test_vllm_is_subclassed_and_patched_in_the_engine_alone() -> None:
    """Elsewhere: the base classes that vLLM offers for middlewares, options and logits processors."""
    subclasses, patches = set(), []
    folder = Path(vllm_kvmerge.__file__).parent
    for path in set(folder.rglob("*.py")) - set((folder / "engine").rglob("*.py")):
        tree = ast.parse(path.read_text())
        names = vllm_names(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                if any(re.split(r"\W", ast.unparse(base))[0] in names for base in node.bases):
                    subclasses.add(node.name)
            elif isinstance(node, ast.Assign):
                targets = [ast.unparse(one) for one in node.targets if isinstance(one, ast.Attribute)]
                patches += [target for target in targets if re.split(r"\W", target)[0] in names]
    assert subclasses == {"ServeParser", "ForcedContinuation", "GuardMiddleware"}
    assert not patches
