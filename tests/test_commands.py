"""Every command and program of the documentation: which tests run it, or why none does.

A reader copies what is in fenced blocks. ``RUN_BY`` and ``NOT_RUN_FOR`` have each; what is in neither fails, and so
does an entry that no page needs any more. Besides, the documented options of each of our programs go through
its own parser, and what takes a minute is run with less to do.
"""

import argparse
import contextlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests import preloaded
from tests.documented import PAGES, ROOT, commands, fences
from tests.vllm_library import HAS_AVX512
from vllm_kvmerge import demo
from vllm_kvmerge.cli import main

RUN_BY = {
    "server/test_readme.py": [
        *("README.md [bash]", "docs/contexts.md [bash]", "docs/quickstart.md [bash]", "docs/verify.md [bash]"),
        *("make serve", "vllm-kvmerge eval configs/eval/demo.yaml --endpoint"),
    ],
    "policies/test_adding_a_policy.py": ["docs/adding-a-policy.md [python]"],
    "server/test_server.py": ["docs/performance.md [bash]"],
    "engine/test_async_llm.py": ["docs/quickstart.md [python]"],
    "server/test_tutorials.py": [
        *("docs/tutorials/chat.md [python]", "docs/tutorials/document.md [python]"),
        *("docs/tutorials/kubernetes.md [bash]", "docs/tutorials/pressure.md [python]"),
    ],
    "server/test_front_door.py": ["openssl req", "curl --cacert"],
    "server/test_several_processes.py": ["curl -s"],
    "server/test_vllm_serve.py": ["vllm serve"],
    "engine/test_sizing.py": ["vllm-kvmerge size"],
    "server/test_dashboard.py": ["cd deploy/prometheus && promtool", "python deploy/grafana/draw.py"],
    "server/test_ui_browser.py": ["python -m tests.browser"],
    "deploy/test_chart.py": ["kubectl create secret", "helm install", "helm upgrade"],
    "cli/test_doctor.py": ["vllm-kvmerge doctor", "vllm-kvmerge doctor --vllm"],
    "test_commands.py": [
        *("vllm-kvmerge serve", "vllm-kvmerge train-kvzap", "vllm-kvmerge eval configs/eval/demo.yaml"),
        "python benchmarks/step_latency.py",
    ],
    "benchmarks/test_benchmarks.py": [
        f"python benchmarks/{name}.py" for name in ("serving", "compaction", "memory_pressure", "contexts")
    ],
    **{
        f"benchmarks/test_{name}.py": [f"python benchmarks/{name}.py"]
        for name in ("operators", "kvpress_scores", "gpu_operators", "gpu_serving")
    },
    "benchmarks/test_leaderboard.py": ["python benchmarks/papers_scores.py"],
}
"""Files of tests, below tests/, and what each runs: beginnings of commands, without variables before them and the
folder of a program, or page and language for whole blocks. Of several beginnings that fit, the longest counts."""

RUN = {key: path for path, keys in RUN_BY.items() for key in keys}

NOT_RUN_FOR = {
    "sets up or runs these tests": ["make setup", "make test", ".venv/bin/python setup.py -q build_ext --inplace"],
    "installs or fetches packages": [
        "pip download --no-deps --only-binary :all: --dest wheels vllm==0.33.0",
        "pip install 'vllm-kvmerge[cuda]'",
        "pip install 'lm-eval[api]' transformers",
        "python -m venv kvpress && kvpress/bin/pip install -r benchmarks/requirements-kvpress.txt",
        "apt-get install libtcmalloc-minimal4",
        "pip install '.[cuda]'",
    ],
    "needs lm-eval; tests/server/test_lm_eval.py sends its requests": ["lm-eval run"],
    "takes hours; options are parsed here, tests/evaluation/test_config.py reads the configurations": [
        ".venv/bin/python benchmarks/leaderboard.py",
        ".venv/bin/vllm-kvmerge eval configs/eval/papers.yaml --output eval-results/papers",
        ".venv/bin/vllm-kvmerge eval configs/eval/real-screen.yaml",
    ],
    "needs a container engine; see make image-steps and tests/deploy/test_images.py": [
        *("docker build", "docker push", "docker run", "docker compose"),
        "export VLLM_API_KEY=$(openssl rand -hex 16)",
    ],
    "needs a cluster; tests/server/test_tutorials.py checks the names of objects": [
        *("kubectl rollout", "kubectl port-forward", "export KEY=$(kubectl get secret"),
    ],
    "opens a window; tests/server/test_ui_browser.py opens the page": ["xdg-open http://127.0.0.1:8000/kvmerge/ui"],
}
"""Why no test runs commands, and their beginnings."""

NOT_RUN = {key: reason for reason, keys in NOT_RUN_FOR.items() for key in keys}
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
            if language in ("bash", "python"):
                found.append((name, f"{name} [{language}]"))
            elif language == "sh":
                found += [(name, command) for command in commands(text)]
    return found


def entry(table: dict[str, str], command: str, name: Callable[[str], str]) -> str | None:
    """The longest key that the command begins with."""
    fitting = [key for key in table if re.match(re.escape(key) + r"(?!\w)", name(command))]
    return max(fitting, key=len, default=None)


def test_blocks_say_their_language():
    known = {"sh", "bash", "python", "json", "text", "yaml", "toml"}
    assert [(page.name, text[:40]) for page in PAGES for name, text in fences(page) if name not in known] == []


def test_every_command_is_run_or_says_why_not():
    fitting = [(page, entry(NOT_RUN, one, one_line) or entry(RUN, one, bare) or one) for page, one in documented()]
    known = RUN.keys() | NOT_RUN.keys()
    unknown = [(page, key) for page, key in fitting if key not in known]
    assert unknown == [], "name the file of its test in RUN_BY, or a reason in NOT_RUN_FOR"
    assert known == {key for _, key in fitting}, "no page has these any more"
    assert [path for path in RUN_BY if not (ROOT / "tests" / path).exists()] == []


def ours() -> list[list[str]]:
    """Documented commands of our own programs, in the words that a shell makes of them."""
    functions = 'show() { "$PYTHON" -S -c "import json, sys; print(json.dumps(sys.argv[1:]))" "$@"; }\n'
    script = []
    for _, command in documented():
        excuse = entry(NOT_RUN, command, one_line) or ""
        if PROGRAM.search(command) and "kvpress/bin/pip" not in excuse and "setup.py" not in excuse:
            command = command.replace("[any option of vllm serve]", "").replace("MODEL", "demo")
            script.append(PROGRAM.sub(r"\g<before> show \g<name> ", command))
    shell = subprocess.run(
        ["bash", "-c", functions + "\n".join(script)],
        capture_output=True, text=True, check=True, env=os.environ | {"PYTHON": sys.executable},
    )  # fmt: skip
    assert shell.stderr == ""
    return [json.loads(line) for line in sorted(set(shell.stdout.splitlines()))]


class Parsed(BaseException):
    """Its parser has taken a program's options."""


@pytest.mark.slow
@pytest.mark.engine
def test_programs_take_the_documented_options(monkeypatch):
    """Each program's own parser; ``test_servers_could_start`` has those of ``serve``, ``doctor`` and ``size``."""
    parse_args = argparse.ArgumentParser.parse_args

    def parse_and_end(parser: argparse.ArgumentParser, *given):
        raise Parsed(parse_args(parser, *given))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_end)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    count = 0
    for program, *words in ours():
        is_own = program == "vllm-kvmerge" and words[0] in ("serve", "doctor", "size")
        if is_own or words[0].endswith("draw.py") or words[1:2] == ["tests.browser"]:  # read sys.argv themselves
            continue
        count += 1
        monkeypatch.setattr(sys, "argv", words[1:] if words[0] == "-m" else words)
        with pytest.raises(Parsed), contextlib.redirect_stderr(io.StringIO()) as said:
            try:
                if program == "vllm-kvmerge":
                    main(words)
                elif words[0] == "-m":
                    runpy.run_module(words[1], run_name="__main__", alter_sys=True)
                else:
                    runpy.run_path(str(ROOT / words[0]), run_name="__main__")
            except SystemExit:
                pytest.fail(f"{' '.join(words)}: {said.getvalue()}")
    assert count > 20


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
    servers = [words for program, name, *words in ours() if program == "vllm-kvmerge" and name in ("serve", "doctor")]
    known = [words for words in servers if words and not words[0].startswith(("Qwen/", "--vllm"))]
    known = [words for words in known if HAS_AVX512 or "--kv-cache-dtype" not in words]
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
    fitting = [words for words in ours() if tuple(words[: len(beginning)]) == beginning and "--endpoint" not in words]
    assert fitting
    for index, (program, *words) in enumerate(fitting):
        if "--output" in words or words[:2] == ["eval", "configs/eval/demo.yaml"]:
            words += ["--output", str(tmp_path / str(index))]
        command = [sys.executable, *(["-m", "vllm_kvmerge.cli"] if program == "vllm-kvmerge" else []), *words]
        ran = preloaded.run([*command, *LESS[beginning]])
        assert ran.returncode == 0 and ran.stdout.strip(), (command, ran.stderr[-3000:])
