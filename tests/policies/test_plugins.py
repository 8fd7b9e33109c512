"""Parts and presets that other packages bring: real packages, really installed."""

import json
import shutil
from pathlib import Path

import pytest

from tests.policies.packages import install, run

pytestmark = pytest.mark.engine

DATA = Path(__file__).parents[1] / "data"
LIST = ("-m", "vllm_kvmerge.cli", "policies", "--json")
PARSE = """
import sys
from vllm_kvmerge.request.spec import parse_compression
policy = parse_compression(sys.argv[1]).policy
print([type(part).__module__ for part in policy.parts], policy.selector, sep="|")
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("packages") / "site"
    install(DATA / "plugin", target)
    return target


@pytest.mark.parametrize(
    ("request_", "end_window"),
    [({"policy": "oldest"}, 4), ({"policy": "keepkv", "selector": "oldest", "end_window": 2}, 2)],
)
def test_a_request_uses_a_plugin(packages: Path, request_: dict, end_window: int) -> None:
    done = run("-c", PARSE, json.dumps(request_), packages=packages)
    assert done.returncode == 0, done.stderr
    assert "'kvmerge_oldest'" in done.stdout and f"end_window={end_window}" in done.stdout


def test_plugins_that_fail_are_named_and_the_others_are_listed(packages: Path) -> None:
    with_broken_ones = packages.with_name("all")
    shutil.copytree(packages, with_broken_ones)
    install(DATA / "broken_plugins", with_broken_ones)
    done = run(*LIST, packages=with_broken_ones)
    assert done.returncode == 0
    errors = done.stderr.splitlines()
    assert errors == [
        "policy plugin 'absent' (kvmerge_absent) failed: ModuleNotFoundError: No module named 'kvmerge_absent'",
        "policy plugin 'duplicate' (kvmerge_duplicate) failed: ValueError: policy 'h2o' is registered already",
        *(line for line in errors if "plugin 'misfits' (kvmerge_misfits) is left out: " in line),
        "policy plugin 'raising' (kvmerge_raising) failed: RuntimeError: over two lines",
    ]
    for name, fault in {
        "no_such_part": "there is no selector 'newest'; allowed: ",
        "no_scores": "selector 'h2o' needs scores, tracker 'none' keeps none",
        "no_such_parameter": "its parts have no parameter windwo",
        "bad_default": "default of decay: ",
    }.items():
        (line,) = (line for line in errors if line.startswith(f"policy {name!r} "))
        assert fault in line
    listed = json.loads(done.stdout)
    names = [preset["name"] for preset in listed["presets"]]
    assert names[-2:] == ["sound", "oldest"] and names.count("h2o") == 1
    assert not {"no_such_part", "no_scores", "no_such_parameter", "bad_default"} & set(names)
    preset = listed["presets"][-1]
    assert preset["parts"]["selector"] == "oldest" and preset["defaults"]["end_window"] == 4
    (part,) = (part for part in listed["parts"]["selector"] if part["name"] == "oldest")
    assert part["summary"] == "The beginning of the text, and its end."
    assert [field["default"] for field in part["fields"]] == [8]
    assert "oldest" in listed["schema"]["$defs"]["SnapkvRequest"]["properties"]["selector"]["enum"]


@pytest.mark.thin(3)
@pytest.mark.parametrize("first", ["", "import vllm_kvmerge.ops; ", "import kvmerge_halving; "])
def test_a_plugin_may_call_operators_when_it_is_imported(packages: Path, first: str) -> None:
    """In a process that has imported nothing but what serving does: the package is complete before it loads plugins."""
    request_ = json.dumps({"policy": "h2o", "merger": "halving"})
    done = run("-c", first + PARSE, request_, packages=packages, from_scratch=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "'kvmerge_halving'" in done.stdout


def test_importing_policies_loads_no_plugin(packages: Path) -> None:
    code = "import sys, vllm_kvmerge.policies as p; print('kvmerge_oldest' in sys.modules, 'oldest' in p.PRESETS)"
    assert run("-c", code, packages=packages, from_scratch=True).stdout == "False False\n"
