"""Mutants: faults planted in the product, each of which some test must find.

A mutant is a symbol, what is wrong with it, and a replacement within its source, so that it outlasts renames and moved
lines elsewhere. ``tests/mutants/*.yaml`` lists them:

- fault: what would be wrong with the product
  symbol: vllm_kvmerge.policies.mergers.zip:Zip.merge   # or a file of C++ and a function, csrc/cpu/zipping.cpp:zip
  found_by: a test of the fast layer that fails with it, run alone, and passes without it
  old: text of the symbol's source, found there once; no text: the whole body of a function
  new: what takes its place
  row: of the record of defects in docs/reliability.md whose fix this reverses
  needs: avx512, without which nothing can find it (default: nothing)
"""

import ast
import textwrap
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]


class Stale(ValueError):
    """The source is no longer what a mutant expects."""


@dataclass(frozen=True)
class Mutant:
    fault: str
    symbol: str
    new: str
    found_by: str
    old: str = ""
    row: int | None = None
    needs: str = ""
    group: str = ""

    @property
    def path(self) -> Path:
        """Of its file, in the repository."""
        module = self.symbol.partition(":")[0]
        if "/" in module:
            return Path(module)
        path = Path(*module.split("."))
        return path / "__init__.py" if (ROOT / path).is_dir() else path.with_suffix(".py")

    @property
    def is_native(self) -> bool:
        """Whether it is compiled."""
        return self.path.suffix != ".py"

    def plant(self, source: str) -> str:
        """The source of its file, with the fault.

        Raises:
            Stale: the file has no such symbol, or the symbol not exactly once the text.
        """
        start, end = self._native_span(source) if self.is_native else span(source, self.symbol)
        body, new = source[start:end], self.new.rstrip("\n")
        if self.old:
            old = self.old.rstrip("\n")
            if body.count(old) != 1:
                raise Stale(f"{self.symbol} has {body.count(old)} times: {old}")
            body = body.replace(old, new)
        else:
            body = replace_body(body, new)
        changed = source[:start] + body + source[end:]
        if not self.is_native:
            ast.parse(changed)
        return changed

    def _native_span(self, source: str) -> tuple[int, int]:
        """From a function's name in its definition to the closing brace in the first column."""
        name = self.symbol.partition(":")[2]
        for line in source.splitlines():
            if f" {name}(" in line and not line.startswith((" ", "//", "#")) and not line.rstrip().endswith(";"):
                start = source.index(line)
                return start, source.index("\n}", start) + 2
        raise Stale(f"{self.path} has no function {name}")


def find(source: str, symbol: str) -> ast.stmt:
    """The definition, or assignment, of a symbol."""
    found: ast.stmt | ast.Module = ast.parse(source)
    for name in symbol.partition(":")[2].split("."):
        for one in ast.walk(found) if isinstance(found, ast.FunctionDef) else found.body:  # type: ignore[attr-defined]
            if name in names(one):
                found = one
                break
        else:
            raise Stale(f"there is no {symbol}")
    assert isinstance(found, ast.stmt)
    return found


def names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def span(source: str, symbol: str) -> tuple[int, int]:
    """Where a symbol's source begins and ends, decorators included."""
    node = find(source, symbol)
    lines = source.splitlines(keepends=True)
    first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])
    assert node.end_lineno is not None
    return sum(map(len, lines[: first - 1])), sum(map(len, lines[: node.end_lineno]))


def replace_body(source: str, new: str) -> str:
    """A function's source with another body after its docstring."""
    indent = source[: len(source) - len(source.lstrip())]
    node = ast.parse(textwrap.dedent(source)).body[0]
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    is_documented = ast.get_docstring(node) is not None
    if is_documented and len(node.body) == 1:
        raise Stale("a function that has a docstring alone has no body to replace")
    first = node.body[is_documented]
    kept = "".join(source.splitlines(keepends=True)[: first.lineno - 1])
    return kept + textwrap.indent(textwrap.dedent(new), indent + "    ") + "\n"


def mutants() -> list[Mutant]:
    """All, in the order of the files' names and lines."""
    paths = sorted(Path(__file__).parent.glob("*.yaml"))
    return [Mutant(group=path.stem, **fields) for path in paths for fields in yaml.safe_load(path.read_text())]
