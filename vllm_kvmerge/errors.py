"""The error that commands report in one line, and the file that a word on their command line names."""

from pathlib import Path


def shipped(name: str) -> Path:
    """The file ``name``, or the one of that name that came with the package: ``configs/...``, outside a checkout."""
    path = Path(name)
    within = Path(__file__).parent / path
    return within if name.startswith("configs/") and not path.exists() and within.exists() else path


class CommandError(Exception):
    """Something that the user can put right; the message is one line that says how."""
