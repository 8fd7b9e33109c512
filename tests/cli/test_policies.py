"""``vllm-kvmerge policies``: everything that a request can name, without vLLM."""

import json
import subprocess
import sys

import pytest

from vllm_kvmerge.cli import main
from vllm_kvmerge.policies import PARTS
from vllm_kvmerge.request.catalogue import describe_policies


def test_policies_names_them_all(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["policies"]) == 0
    printed = capsys.readouterr().out
    for preset in describe_policies()["presets"]:
        assert f"│ {preset['name']} " in printed
    for kind, parts in PARTS.items():
        heading = printed.index(f" {kind.capitalize()}s ")
        for name, part in parts.items():
            row = printed.index(f"│ {name} ", heading)
            for field in part.model_fields:
                assert f"{field}=" in printed[row:]


def test_policies_fit_a_narrow_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["policies"]) == 0
    printed = capsys.readouterr().out
    assert "…" not in printed and max(map(len, printed.splitlines())) <= 80
    for preset in describe_policies()["presets"]:
        assert f"│ {preset['name']} " in printed


def test_policies_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policies", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == describe_policies()


@pytest.mark.engine
def test_policies_need_no_vllm() -> None:
    code = "import sys; from vllm_kvmerge.cli import main; main(['policies']); sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0
