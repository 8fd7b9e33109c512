"""``vllm-kvmerge policies``: everything that a request can name, without vLLM."""

import json
import re
import subprocess
import sys

import pytest

from vllm_kvmerge.cli import main
from vllm_kvmerge.policies import PARTS
from vllm_kvmerge.request.catalogue import describe_policies


@pytest.mark.slow
def test_all_about_a_policy_or_a_part(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for preset in describe_policies()["presets"]:
        assert main(["policies", preset["name"]]) == 0
        printed = capsys.readouterr().out
        assert all(f"│ {name} " in printed for name in preset["defaults"])
    for kind, parts in PARTS.items():
        for name, part in parts.items():
            assert main(["policies", name]) == 0
            printed = capsys.readouterr().out
            assert f"{kind.capitalize()} {name}: " in printed
            assert all(f"│ {field} " in printed for field in part.model_fields)


def test_a_name_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policies", "keepvk"]) != 0
    error = capsys.readouterr().err
    assert "no policy or part 'keepvk'; allowed: " in error and "keepkv" in error


def test_a_short_table_names_all_presets_and_parts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["policies"]) == 0
    printed = capsys.readouterr().out
    lines, presets = printed.splitlines(), describe_policies()["presets"]
    assert "…" not in printed and max(map(len, lines)) <= 80
    assert len(lines) <= len(presets) + 15
    for preset in presets:
        assert any(f"│ {preset['name']} " in line and preset["source"] in line for line in lines)
    _, _, below = printed.partition("└")
    for kind, parts in PARTS.items():
        assert f"\n{kind}: " in below and all(re.search(rf"\b{name}\b", below) for name in parts)


def test_policies_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policies", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == describe_policies()


@pytest.mark.slow
@pytest.mark.engine
def test_policies_need_no_vllm() -> None:
    code = "import sys; from vllm_kvmerge.cli import main; main(['policies']); sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0
