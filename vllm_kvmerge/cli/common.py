"""Shared pieces of the commands: their parser, tables, and errors in one line."""

import argparse
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from vllm_kvmerge.errors import CommandError

if TYPE_CHECKING:
    from rich.table import Table


class CommandParser(argparse.ArgumentParser):
    """Raises CommandError where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise CommandError(f"{message}; see vllm-kvmerge --help")


def table_of(title: str, *headers: str, lines: bool = True) -> "Table":
    """An empty table whose first column, the names, is never cut. lines: whether there are any between its rows."""
    from rich.table import Column, Table

    first, *others = headers
    columns = [Column(first, no_wrap=True), *(Column(header, overflow="fold") for header in others)]
    return Table(*columns, title=title, show_lines=lines)


def check_folder(model: str) -> None:
    """Refuses a model's missing folder before anybody asks the Hugging Face hub for it."""
    is_path = model.startswith(("/", "./", "../", "~")) or model.count("/") > 1
    if is_path and "://" not in model and not Path(model).exists():
        raise CommandError(f"no model in {model}: there is no such folder")


@contextmanager
def quiet() -> Iterator[None]:
    """Suppresses log lines, so that an error is the only line."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def one_line(error: BaseException) -> str:
    """The first line of an exception's message, or the first of pydantic's errors."""
    if hasattr(error, "errors") and callable(error.errors) and (errors := error.errors()):
        return str(errors[0]["msg"]).removeprefix("Value error, ")
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
