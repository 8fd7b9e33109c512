"""``vllm-kvmerge`` itself: it chooses a command; every error is one line and status 2."""

import subprocess
import sys

import pytest

from tests.cli.commands import refusal
from vllm_kvmerge import __version__
from vllm_kvmerge.cli import main


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"vllm-kvmerge {__version__}\n"


def test_command_alone_needs_no_vllm() -> None:
    code = "import sys; import vllm_kvmerge.cli; sys.exit('vllm' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert "invalid choice: 'sevre'" in refusal(capsys, "sevre")
    assert "required: COMMAND" in refusal(capsys)


@pytest.mark.slow
@pytest.mark.engine
def test_fault_of_a_process_of_its_own() -> None:
    """Nothing but the one line: what vLLM logs while it is imported is held back."""
    command = [sys.executable, "-m", "vllm_kvmerge.cli", "serve", "/no/such/model"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "vllm-kvmerge: no model in /no/such/model: there is no such folder\n"
