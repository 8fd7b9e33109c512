"""Documented commands of our own programs: their options go through the program's parser, servers are checked by the
doctor, and what takes a minute is run with less to do.
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

import pytest

from tests import preloaded
from tests.documented import PAGES, ROOT, blocks, commands, fences
from tests.vllm_library import HAS_AVX512
from vllm_kvmerge import demo
from vllm_kvmerge.cli import main

PROGRAM = re.compile(
    r"^(?P<before>(?:for .*; do)?\s*)(?:[A-Z]\w*=\S+ )*(?:\.venv/bin/)?(?P<name>vllm-kvmerge|python) ", re.M
)
"""Ours, with variables before it and its folder."""


def test_blocks_say_their_language():
    known = {"sh", "bash", "python", "json", "text", "yaml", "toml"}
    assert [(page.name, text[:40]) for page in PAGES for name, text in fences(page) if name not in known] == []


def ours() -> list[list[str]]:
    """Documented commands of our own programs, in the words that a shell makes of them."""
    script = ['show() { "$PYTHON" -S -c "import json, sys; print(json.dumps(sys.argv[1:]))" "$@"; }']
    for command in (one for page in PAGES for text in blocks(page, "sh") for one in commands(text)):
        if PROGRAM.search(command) and "-m venv" not in command and "setup.py" not in command:
            command = command.replace("[any option of vllm serve]", "").replace("MODEL", "demo")
            script.append(PROGRAM.sub(r"\g<before> show \g<name> ", command))
    shell = subprocess.run(
        ["bash", "-c", "\n".join(script)],
        capture_output=True, text=True, check=True, env=os.environ | {"PYTHON": sys.executable},
    )  # fmt: skip
    assert shell.stderr == ""
    return [json.loads(line) for line in sorted(set(shell.stdout.splitlines()))]


class Parsed(BaseException):
    """Its parser has taken a program's options."""


@pytest.mark.slow
@pytest.mark.engine
def test_programs_take_the_documented_options(monkeypatch):
    """Each program's own parser; ``test_servers_could_start`` has the servers, tests/engine/test_sizing.py ``size``."""
    parse_args = argparse.ArgumentParser.parse_args

    def parse_and_end(parser: argparse.ArgumentParser, *given):
        raise Parsed(parse_args(parser, *given))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_end)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    count = 0
    for program, *words in ours():
        is_own = program == "vllm-kvmerge" and words[0] in ("serve", "doctor", "size")
        if is_own or words[0].endswith("draw.py"):  # read sys.argv themselves
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
    lines = lines.replace("build/heads.json", str(demo.head_budgets_path("demo")))
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
