"""Which tests reach a symbol: a call at the beginning of its function notes the test that runs.

Engines and servers that tests share are processes of their own, which began under another test: which one runs now
stands in a file for each process of pytest-xdist.
"""

import ast
import os
from pathlib import Path

from tests.mutants.table import find

FOLDER = "KVMERGE_REACH"
"""The variable that names the folder of notes."""

_noted: set[tuple[str, str]] = set()


def current(folder: str) -> Path:
    """The file that names the test that runs now."""
    return Path(folder, "current." + os.environ.get("PYTEST_XDIST_WORKER", "main"))


def reached(symbol: str) -> None:
    folder = os.environ.get(FOLDER)
    if not folder:
        return
    try:
        test = current(folder).read_text()
    except FileNotFoundError:
        return
    if test and (symbol, test) not in _noted:
        _noted.add((symbol, test))
        with Path(folder, f"{os.getpid()}.reached").open("a") as file:
            file.write(f"{symbol}\t{test}\n")


def instrumented(source: str, symbols: list[str]) -> str:
    """A file's source with the call in each of its functions ``symbols``."""
    lines = source.splitlines(keepends=True)
    calls: dict[int, list[str]] = {}
    for symbol in symbols:
        node = find(source, symbol)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        is_documented = ast.get_docstring(node) is not None
        first = node.body[min(is_documented, len(node.body) - 1)]
        line = min([first.lineno, *(one.lineno for one in getattr(first, "decorator_list", []))])
        call = f'__import__("tests.mutants.reach", fromlist=["reached"]).reached({symbol!r})\n'
        calls.setdefault(line, []).append(" " * first.col_offset + call)
    for line, more in sorted(calls.items(), reverse=True):
        lines[line - 1 : line - 1] = more
    return "".join(lines)


def noted(folder: Path) -> dict[str, set[str]]:
    """By symbol, the tests that have reached it."""
    found: dict[str, set[str]] = {}
    for file in folder.glob("*.reached"):
        for line in file.read_text().splitlines():
            symbol, test = line.split("\t")
            found.setdefault(symbol, set()).add(test)
    return found
