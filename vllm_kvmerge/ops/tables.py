"""Tables that come with the package as JSON."""

from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

Table = TypeVar("Table")


def read_table(path: Path, schema: TypeAdapter[Table]) -> Table:
    """The table in a file. Raises ValueError, which names the file, if it cannot be read or is not of the schema."""
    try:
        return schema.validate_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"[{part!r}]" for part in first["loc"])
        raise ValueError(f"{path} is broken: {where and where + ': '}{first['msg']}") from error
