"""Every command and program of the documentation: which test runs it, or why none does.

A reader copies what is in fenced blocks. ``RUN_BY`` and ``NOT_RUN`` say of each what runs it; what is in neither fails,
and so does an entry that no page needs any more. Besides, the documented options of each of our programs go through
its own parser, and what takes a minute is run with less to do.
"""

import argparse
import ast
import contextlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests import preloaded
from tests.documented import PAGES, ROOT, commands, fences
from tests.vllm_library import HAS_AVX512
from vllm_kvmerge import demo
from vllm_kvmerge.cli import main
from vllm_kvmerge.evaluation.config import read_config
from vllm_kvmerge.evaluation.runner import cells_of
from vllm_kvmerge.request.parameters import parse_compression

RUN_BY = {
    "server/test_readme.py::test_the_request_of_the_readme": ["README.md [bash]"],
    "policies/test_adding_a_policy.py::test_its_test_passes": ["docs/adding-a-policy.md [python]"],
    "server/test_readme.py::test_the_commands_of_the_page_on_contexts": ["docs/contexts.md [bash]"],
    "server/test_server.py::test_the_documented_command_of_vllms_own_benchmark": ["docs/performance.md [bash]"],
    "server/test_readme.py::outputs": ["docs/quickstart.md [bash]"],
    "engine/test_async_llm.py::test_the_documented_program": ["docs/quickstart.md [python]"],
    "server/test_tutorials.py::test_a_chat": ["docs/tutorials/chat.md [python]"],
    "server/test_tutorials.py::test_a_document": ["docs/tutorials/document.md [python]"],
    "server/test_tutorials.py::test_kubernetes": ["docs/tutorials/kubernetes.md [bash]"],
    "server/test_tutorials.py::test_pressure": ["docs/tutorials/pressure.md [python]"],
    "server/test_readme.py::test_the_command_of_the_page_on_verifying": ["docs/verify.md [bash]"],
    "server/test_readme.py::readme_server": ["make serve"],
    "server/test_front_door.py::certificate": ["openssl req"],
    "server/test_front_door.py::test_the_documented_request_over_tls": ["curl --cacert"],
    "benchmarks/test_leaderboard.py::test_the_papers_table_is_what_the_command_prints": [
        "python benchmarks/papers_scores.py"
    ],
    "server/test_several_processes.py::test_the_documented_requests": ["curl -s"],
    "server/test_vllm_serve.py::test_compression_is_on_where_the_configuration_asks_for_it": ["vllm serve"],
    "engine/test_sizing.py::test_the_command": ["vllm-kvmerge size"],
    "server/test_dashboard.py::test_promtool_agrees": ["cd deploy/prometheus && promtool"],
    "deploy/test_chart.py::test_documented_secrets": ["kubectl create secret"],
    "deploy/test_chart.py::test_documented_installations": ["helm install", "helm upgrade"],
    "cli/test_doctor.py::test_a_server_that_would_be_refused": ["vllm-kvmerge doctor"],
    "cli/test_doctor.py::test_a_vllm_that_is_not_installed": ["vllm-kvmerge doctor --vllm"],
    "test_commands.py::test_with_less_to_do": [
        "vllm-kvmerge train-kvzap",
        "vllm-kvmerge eval configs/eval/demo.yaml",
        "python benchmarks/step_latency.py",
    ],
    "server/test_readme.py::test_an_evaluation_of_a_server": ["vllm-kvmerge eval configs/eval/demo.yaml --endpoint"],
    "benchmarks/test_benchmarks.py::test_serving": ["python benchmarks/serving.py"],
    "benchmarks/test_operators.py::test_native_operators_are_measured": ["python benchmarks/operators.py"],
    "benchmarks/test_benchmarks.py::test_compaction": ["python benchmarks/compaction.py"],
    "benchmarks/test_benchmarks.py::test_memory_pressure": ["python benchmarks/memory_pressure.py"],
    "benchmarks/test_benchmarks.py::test_contexts": ["python benchmarks/contexts.py"],
    "benchmarks/test_kvpress_scores.py::test_methods_that_are_the_same_give_the_same_answers": [
        "python benchmarks/kvpress_scores.py",
    ],
    "benchmarks/test_gpu_operators.py::test_every_operator_is_checked_and_every_aim_is_judged": [
        "python benchmarks/gpu_operators.py",
    ],
    "benchmarks/test_gpu_serving.py::test_a_part_runs_and_is_saved_beside_others": [
        "python benchmarks/gpu_serving.py",
    ],
    "server/test_dashboard.py::test_panels_can_be_drawn_without_grafana": ["python deploy/grafana/draw.py"],
    "server/test_ui_browser.py::page": ["python -m tests.browser"],
    "test_commands.py::test_servers_could_start": ["vllm-kvmerge serve"],
}
"""Tests, below tests/, and what each runs: beginnings of commands, without variables before them and the folder of a
program, or page and language for whole blocks. Of several beginnings that fit, the longest counts."""

RUN = {key: test for test, keys in RUN_BY.items() for key in keys}

HOURS = "takes hours; options are parsed here, and its configuration is read"
CLUSTER = "needs a cluster; the names of objects are checked by tests/server/test_tutorials.py"
PACKAGES = "installs packages"
NOT_RUN = {
    "make setup": "sets the environment up in which tests run",
    "make test": "runs these tests",
    ".venv/bin/python setup.py -q build_ext --inplace": "part of make setup, before these tests",
    "pip download --no-deps --only-binary :all: --dest wheels vllm==0.33.0": "half a gigabyte",
    "pip install 'vllm-kvmerge[cuda]'": "needs a release, and a GPU to be of use",
    "pip install 'lm-eval[api]' transformers": PACKAGES,
    "lm-eval run": "needs lm-eval; its requests are sent by tests/server/test_lm_eval.py",
    "python -m venv kvpress && kvpress/bin/pip install -r benchmarks/requirements-kvpress.txt": PACKAGES,
    "apt-get install libtcmalloc-minimal4": f"{PACKAGES} of the system; make image-steps does",
    ".venv/bin/python benchmarks/leaderboard.py": "writes docs/leaderboard.md from runs that take hours",
    ".venv/bin/vllm-kvmerge eval configs/eval/papers.yaml --output eval-results/papers": HOURS,
    ".venv/bin/vllm-kvmerge eval configs/eval/real-screen.yaml": HOURS,
    "pip install '.[cuda]'": "needs a GPU to be of use",
    "docker build": "needs a container engine; make image-steps carries out its steps",
    "docker push": "needs a registry",
    "docker run": "needs a container engine",
    "docker compose": "needs a container engine; the file is checked by tests/deploy/test_images.py",
    "export VLLM_API_KEY=$(openssl rand -hex 16)": "for the container engine",
    "kubectl rollout": CLUSTER,
    "kubectl port-forward": CLUSTER,
    "export KEY=$(kubectl get secret": CLUSTER,
    "xdg-open http://127.0.0.1:8000/kvmerge/ui": "opens a window; tests/server/test_ui_browser.py opens the page",
}
"""Commands, or their beginnings, and why no test runs them."""

ELSEWHERE = {key for key in NOT_RUN if "kvpress/bin/pip" in key or "setup.py" in key}
"""Commands that are not of our programs, though they begin like them."""

LANGUAGES = {"sh", "bash", "python", "json", "text", "yaml", "toml"}
WHOLE = {"bash", "python"}
"""Languages of blocks that are run as they stand."""


PROGRAM = re.compile(
    r"^(?P<before>(?:for .*; do)?\s*)(?:[A-Z]\w*=\S+ )*(?:\.venv/bin/)?(?P<name>vllm-kvmerge|python) ", re.M
)
"""Ours, with variables before it and its folder."""


def one_line(command: str) -> str:
    return " ".join(command.split())


def bare(command: str) -> str:
    """Without variables before it, and with programs by their name."""
    return one_line(PROGRAM.sub(r"\g<before>\g<name> ", command))


def documented() -> list[tuple[str, str]]:
    """Page and command, or page and language of a block that is run as a whole."""
    found = []
    for page in PAGES:
        name = page.relative_to(ROOT).as_posix()
        for language, text in fences(page):
            if language in WHOLE:
                found.append((name, f"{name} [{language}]"))
            elif language == "sh":
                found += [(name, command) for command in commands(text)]
    return found


def entry(table: dict[str, str], command: str, name: Callable[[str], str]) -> str | None:
    """The longest key that the command begins with."""
    fitting = [key for key in table if re.match(re.escape(key) + r"(?!\w)", name(command))]
    return max(fitting, key=len, default=None)


def test_blocks_say_their_language():
    unknown = [(page.name, name, text[:40]) for page in PAGES for name, text in fences(page) if name not in LANGUAGES]
    assert unknown == []
    for page in PAGES:
        marks = re.findall(r"^ *```", page.read_text(), re.M)
        assert len(marks) == 2 * len(fences(page)), f"{page}: a fence without its end"
        prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
        indented = re.findall(r"(?:^|\n)\n    ((?:vllm-kvmerge|python|pip|make|curl) .*)", prose)
        assert indented == [], f"{page}: commands belong in fences"


def test_every_command_is_run_or_says_why_not():
    runs, excuses = dict.fromkeys(RUN, 0), dict.fromkeys(NOT_RUN, 0)
    missing = []
    for page, command in documented():
        excuse, run = entry(NOT_RUN, command, one_line), entry(RUN, command, bare)
        if excuse is not None:
            excuses[excuse] += 1
        elif run is not None:
            runs[run] += 1
        else:
            missing.append((page, command))
    assert missing == [], "name the test that runs it in RUN_BY, or a reason in NOT_RUN"
    assert [key for key, count in {**runs, **excuses}.items() if not count] == [], "no page has these any more"


def test_what_is_not_in_the_table_is_found():
    for command in ("vllm-kvmerge sizes", "make serves", "no page [bash]", "rm -r /"):
        assert entry(RUN, command, bare) is None and entry(NOT_RUN, command, one_line) is None
    assert entry(RUN, "A=1 .venv/bin/vllm-kvmerge doctor --vllm x", bare) == "vllm-kvmerge doctor --vllm"
    assert commands("a \\\nb  # c\n\nfor x in 1; do\n  d\ndone\ncurl -d '{\n}'\n") == [
        "a b",
        "for x in 1; do\n  d\ndone",
        "curl -d '{\n}'",
    ]


@pytest.mark.parametrize("test", RUN_BY)
def test_named_tests_exist_and_name_what_they_run(test):
    path, name = test.split("::")
    text = (ROOT / "tests" / path).read_text()
    functions = {node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)}
    assert name in functions
    for key in RUN_BY[test]:
        page, _, language = key.partition(" [")
        words = [Path(page).stem] if language else re.findall(r"[a-z_]{3,}", key.removesuffix(".py"))
        assert any(word.casefold() in text.casefold() for word in words[-2:]), f"{test} does not seem to run {key}"


def ours() -> list[list[str]]:
    """Documented commands of our own programs, in the words that a shell makes of them."""
    functions = 'show() { "$PYTHON" -S -c "import json, sys; print(json.dumps(sys.argv[1:]))" "$@"; }\n'
    script = []
    for _, command in documented():
        if entry(NOT_RUN, command, one_line) not in ELSEWHERE and PROGRAM.search(command):
            command = command.replace("[any option of vllm serve]", "").replace("MODEL", "demo")
            script.append(PROGRAM.sub(r"\g<before> show \g<name> ", command))
    shell = subprocess.run(
        ["bash", "-c", functions + "\n".join(script)],
        capture_output=True, text=True, check=True, env=os.environ | {"PYTHON": sys.executable},
    )  # fmt: skip
    assert shell.stderr == ""
    return [json.loads(line) for line in sorted(set(shell.stdout.splitlines()))]


class Parsed(BaseException):
    """Ends a program whose parser has taken its options."""


@pytest.mark.slow
@pytest.mark.engine
def test_programs_take_the_documented_options(monkeypatch):
    """Each program's own parser; ``test_servers_could_start`` has those of ``serve``."""
    parse_args = argparse.ArgumentParser.parse_args

    def parse_and_end(parser: argparse.ArgumentParser, *given):
        raise Parsed(parse_args(parser, *given))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_end)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    own_parser = {"serve", "doctor", "size"}
    count = 0
    for program, *words in ours():
        if program == "vllm-kvmerge" and words[0] in own_parser:
            continue
        if words[0].endswith("draw.py") or words[1:2] == ["tests.browser"]:
            continue  # read sys.argv themselves
        count += 1
        with pytest.raises(Parsed), contextlib.redirect_stderr(io.StringIO()) as said:
            try:
                run(program, words, monkeypatch)
            except SystemExit:
                pytest.fail(f"{' '.join(words)}: {said.getvalue()}")
    assert count > 20


def run(program: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", words)
    if program == "vllm-kvmerge":
        main(words)
    elif words[0] == "-m":
        monkeypatch.setattr(sys, "argv", words[1:])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(str(ROOT / words[0]), run_name="__main__")


@pytest.mark.engine
def test_configurations_are_read():
    """Those of ``eval``, and of a server, that pages name."""
    named = {word for _, *words in ours() for word in words if word.endswith(".yaml")}
    assert "configs/eval/demo.yaml" in named and "configs/default.yaml" in named
    for name in named:
        if name.startswith("configs/eval"):
            assert cells_of(read_config(ROOT / name, {})), name
        else:
            parse_compression(yaml.safe_load((ROOT / name).read_text()))


DOCTOR = """
import json, sys
from vllm_kvmerge.cli import main

for line in sys.stdin:
    assert main(["doctor", *json.loads(line), "--json"]) == 0, line
"""


@pytest.mark.slow
@pytest.mark.engine
def test_servers_could_start(monkeypatch):
    """What a server checks before it starts its engine, of each documented command, by ``vllm-kvmerge doctor``."""
    servers = [words for program, name, *words in ours() if (program, name) == ("vllm-kvmerge", "serve")]
    servers += [words for program, name, *words in ours() if (program, name) == ("vllm-kvmerge", "doctor")]
    known = [words for words in servers if words and not words[0].startswith(("Qwen/", "--vllm"))]
    if not HAS_AVX512:
        known = [words for words in known if "--kv-cache-dtype" not in words]
    assert len(known) > 10
    lines = "\n".join(json.dumps(words).replace("build/kvzap", demo.kvzap_path()) for words in known)
    monkeypatch.chdir(ROOT)
    many = os.environ | {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    done = preloaded.run([sys.executable, "-c", DOCTOR], input=lines, env=many)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]


LESS = {
    ("vllm-kvmerge", "train-kvzap"): ("--num-texts", "2", "--epochs", "1", "--tokens-per-text", "50"),
    ("vllm-kvmerge", "eval", "configs/eval/demo.yaml"): ("--samples", "1"),
    ("python", "benchmarks/step_latency.py"): (
        *("--length", "600", "--running", "2", "--budget", "128", "--policies", "snapkv", "--layers", "1"),
        *("--repeats", "1", "--together", "2", "--seconds", "0.5"),
    ),
}  # fmt: skip
"""Options that give a documented command less to do: they come behind its own, and the last one counts."""


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("beginning", LESS, ids=" ".join)
def test_with_less_to_do(beginning, tmp_path, monkeypatch):
    """All that begin so; the working directory is the repository's, as pages have it, and results are elsewhere."""
    monkeypatch.chdir(ROOT)
    fitting = [words for words in ours() if tuple(words[: len(beginning)]) == beginning]
    done = 0
    for program, *words in fitting:
        if "--endpoint" in words:
            continue
        if "--output" in words or words[:2] == ["eval", "configs/eval/demo.yaml"]:
            words += ["--output", str(tmp_path / str(done))]
        command = [sys.executable, *(["-m", "vllm_kvmerge.cli"] if program == "vllm-kvmerge" else []), *words]
        ran = preloaded.run([*command, *LESS[beginning]])
        assert ran.returncode == 0 and ran.stdout.strip(), (command, ran.stderr[-3000:])
        done += 1
    assert done
