"""``vllm-kvmerge policies``: everything that a request can name, without vLLM."""

import json
import re

import pytest

from vllm_kvmerge.cli import main
from vllm_kvmerge.policies import PARTS
from vllm_kvmerge.request.catalogue import describe_policies

PRESETS = describe_policies()["presets"]


@pytest.fixture
def printed(capsys, monkeypatch):
    """What the command prints, given its words."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*words: str) -> str:
        assert main(["policies", *words]) == 0
        return capsys.readouterr().out

    return run


@pytest.mark.slow
def test_all_about_a_policy_or_a_part(printed, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    for preset in PRESETS:
        assert all(f"│ {name} " in printed(preset["name"]) for name in preset["defaults"])
    for kind, parts in PARTS.items():
        for name, part in parts.items():
            text = printed(name)
            assert f"{kind.capitalize()} {name}: " in text and all(f"│ {field} " in text for field in part.model_fields)


def test_a_name_that_is_none(capsys):
    assert main(["policies", "keepvk"]) != 0
    error = capsys.readouterr().err
    assert "no policy or part 'keepvk'; allowed: " in error and "keepkv" in error


def test_a_short_table_names_all_presets_and_parts(printed):
    table, _, below = printed().partition("└")
    for preset in PRESETS:
        assert any(f"│ {preset['name']} " in line and preset["source"] in line for line in table.splitlines())
    for kind, parts in PARTS.items():
        assert f"\n{kind}: " in below and all(re.search(rf"\b{name}\b", below) for name in parts)


def test_policies_as_json(printed):
    assert json.loads(printed("--json")) == describe_policies()
