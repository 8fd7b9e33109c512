"""Pieces that the commands' tests share."""

import pytest

from vllm_kvmerge.cli import main


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The line that the command prints on stderr when it refuses to run."""
    capsys.readouterr()
    assert main(list(argv)) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("vllm-kvmerge: ")
    return lines[0]
