"""``AsyncLLM``, vLLM's engine for programs with an event loop."""

import os
import sys

import pytest

from tests import preloaded
from tests.documented import ROOT, blocks

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_the_documented_program(tmp_path):
    (code,) = (text for text in blocks(ROOT / "docs/quickstart.md", "python") if "AsyncLLM" in text)
    script = tmp_path / "program.py"
    script.write_text(code)
    environment = {key: value for key, value in os.environ.items() if key != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    done = preloaded.run([sys.executable, str(script)], env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    plain, compressed, expected = done.stdout.splitlines()[-3:]
    assert plain.removeprefix("plain:").split() and compressed.startswith("kept 300:")
    assert len(expected.removeprefix("expected:").split()) == 4
