"""``vllm-kvmerge`` itself: it chooses a command; every error is one line and status 2."""

import subprocess
import sys

import pytest

from tests.cli.conftest import refusal
from vllm_kvmerge import __version__
from vllm_kvmerge.cli import main


def test_version(capsys):
    with pytest.raises(SystemExit, match="^0$"):
        main(["--version"])
    assert capsys.readouterr().out == f"vllm-kvmerge {__version__}\n"


def test_unknown_command(capsys):
    assert "invalid choice: 'sevre'" in refusal(capsys, "sevre")
    assert "required: COMMAND" in refusal(capsys)


@pytest.mark.slow
@pytest.mark.engine
def test_fault_of_a_process_of_its_own():
    """Nothing but the one line: what vLLM logs while it is imported is held back."""
    command = [sys.executable, "-m", "vllm_kvmerge.cli", "serve", "/no/such/model"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "vllm-kvmerge: no model in /no/such/model: there is no such folder\n"
