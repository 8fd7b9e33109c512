"""Commands that run in the tests' process, whose environment is put back afterwards."""

from pathlib import Path

import pytest

from vllm_kvmerge.cli import main
from vllm_kvmerge.cli.arguments import ALLOWED_PLUGINS
from vllm_kvmerge.engine.processes import METRICS_DIR


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(METRICS_DIR, str(tmp_path))
    monkeypatch.setenv(ALLOWED_PLUGINS, "")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The line that the command prints on stderr when it refuses to run."""
    capsys.readouterr()
    assert main(list(argv)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("vllm-kvmerge: ")
    return line
