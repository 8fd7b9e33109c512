"""Files that a task's options name, read with errors that name the option and the line."""

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def read_text(field: str, path: str) -> str:
    """The text of the file that the option ``field`` names; ``~`` is the home folder.

    Raises:
        ValueError: it cannot be read, or is not in UTF-8.
    """
    file = Path(path).expanduser()
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{field}: cannot read {file}: {reason}") from error


def parse_rows(origin: str, lines: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects in lines of JSON, each with its place for errors; blank lines are passed over.

    Raises:
        ValueError: a line holds something else.
    """
    for number, line in enumerate(lines, 1):
        if line.strip():
            place = f"{origin}, line {number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{place}: must be an object, got {type(row).__name__}")
            yield place, row


def read_rows(field: str, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects in a file of JSON lines, as ``parse_rows`` gives them."""
    # Not splitlines, which also ends a line at characters that JSON texts may hold.
    return parse_rows(f"{field}: {Path(path).expanduser()}", read_text(field, path).split("\n"))


def read_texts(field: str, path: str, column: str = "text") -> list[str]:
    """The text of the file that the option ``field`` names; of JSON lines the one that each has in ``column``, once."""
    if Path(path).suffix != ".jsonl":
        return [read_text(field, path)]
    texts = []
    for place, row in read_rows(field, path):
        if not isinstance(row.get(column), str):
            raise ValueError(f"{place}: no object with a text in {column}")
        texts.append(row[column])
    return list(dict.fromkeys(texts))


def choose(items: Sequence[T], count: int | None, rng: random.Random) -> list[T]:
    """All items, or ``count`` of them drawn at random, in their order."""
    if count is None or count >= len(items):
        return list(items)
    return [items[place] for place in sorted(rng.sample(range(len(items)), count))]
