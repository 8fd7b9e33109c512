"""The examples of docs/integrations.md against a real server of a language model.

Nothing is installed for them: an example is skipped unless the environment of ``INTEGRATIONS_PYTHON``, by default that
of these tests, or ``PATH`` has its program.
"""

import ast
import json
import os
import re
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import browser
from tests.documented import ROOT, blocks
from tests.server.conftest import OPTIONS, VLLM, Server, free_port, logged, serving, wait_until
from tests.server.test_readme import run
from vllm_kvmerge.demo import handbook, pretrained

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PAGE = ROOT / "docs/integrations.md"
REQUIREMENTS = "-r tests/server/requirements-integrations.txt"
PYTHON = os.environ.get("INTEGRATIONS_PYTHON", sys.executable)
PATH = f"{Path(PYTHON).parent}:{os.environ['PATH']}"


ROOM = "--kv-cache-memory-bytes", "512M", "--max-model-len", "8192"
"""For the README's request, whose policy reads the document twice."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Answers are short."""
    short = "--override-generation-config", '{"max_new_tokens": 20}'
    with serving(*ROOM, *short, command=("-m", "vllm_kvmerge.cli", "serve", "smollm2")) as ready:
        yield ready


def skip_without(program: str, packages: str = REQUIREMENTS) -> None:
    if shutil.which(program, path=PATH) is None:
        pytest.skip(f"there is no {program}: pip install {packages}, and see INTEGRATIONS_PYTHON")


def in_shell(server: Server, folder: Path, script: str) -> str:
    """What a user's shell prints that is in ``folder``, as if in the repository's root."""
    for name in ("LICENSE", "configs", "tests"):
        (folder / name).symlink_to(ROOT / name)
    script = script.replace("http://127.0.0.1:8000", server.url)
    script = script.replace("HuggingFaceTB/SmolLM2-135M-Instruct", pretrained.folder("smollm2"))
    vllm = f'vllm() {{ {sys.executable} {VLLM} "$@"; }}'
    environment = os.environ | {"PATH": PATH, "HF_HUB_OFFLINE": "1"}
    return run(["bash", "-c", f"set -e -o pipefail\n{vllm}\n{script}"], cwd=folder, env=environment)


@contextmanager
def started(script: str, port: int, **variables: str) -> Iterator[str]:
    """The address of the program that an example starts, once it listens."""
    words = ["env", *shlex.split(script.replace("\\\n", ""))]

    def listens() -> bool:
        with socket.socket() as s:
            return s.connect_ex(("127.0.0.1", port)) == 0

    with logged(words, PATH=PATH, **variables) as (process, log, _):
        wait_until(lambda: process.poll() is not None or listens(), 400)
        assert process.poll() is None, "".join(log[-40:])
        yield f"http://127.0.0.1:{port}"


def check(report: dict[str, Any]) -> None:
    assert report["entries"]["mean"] == pytest.approx(report["tokens"] / 4, rel=0.05)


@pytest.mark.parametrize(
    ("section", "module"),
    [("openai-python", "openai"), ("LangChain", "langchain_openai"), ("LlamaIndex", "llama_index.llms.openai_like")],
)
def test_python_clients(server: Server, tmp_path: Path, section: str, module: str) -> None:
    if subprocess.run([PYTHON, "-c", f"import {module}"], capture_output=True).returncode:
        pytest.skip(f"{PYTHON} has no {module}: pip install {REQUIREMENTS}, and see INTEGRATIONS_PYTHON")
    (program,) = blocks(PAGE, "python", section)
    (tmp_path / "example.py").write_text(program.replace("http://127.0.0.1:8000", server.url))
    *answer, report = in_shell(server, tmp_path, f"{PYTHON} example.py").splitlines()
    assert any(answer)
    check(ast.literal_eval(report))


def test_litellm(server: Server, tmp_path: Path) -> None:
    """By the field that passes through, and by that of the model's name."""
    skip_without("litellm")
    (config,), (start,), (request,) = (blocks(PAGE, language, "LiteLLM's proxy") for language in ("yaml", "sh", "bash"))
    (tmp_path / "litellm.yaml").write_text(config.replace("http://127.0.0.1:8000", server.url))
    start, port = start.splitlines()[-1].replace("litellm.yaml", str(tmp_path / "litellm.yaml")), free_port()
    key = f"sk-{secrets.token_hex(32)}"
    alone = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": key}
    with started(start.replace("4000", str(port)), port, **alone) as url:
        request = f"LITELLM_MASTER_KEY={key}\n" + request.replace("http://127.0.0.1:4000", url)
        report = json.loads(in_shell(server, tmp_path, request))["usage"]["kv_compression"]
        assert report["policy"] == "kvzip"
        check(report)
        body = {"model": "smollm2-compressed", "messages": [{"role": "user", "content": handbook.document()}]}
        bearer = {"Authorization": f"Bearer {key}"}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=bearer, timeout=300).json()
        check(answer["usage"]["kv_compression"])


def test_open_webui(server: Server, tmp_path: Path) -> None:
    """In a browser: the page shows the report."""
    skip_without("open-webui", "open-webui==0.12.*")
    if lacking := browser.missing():
        pytest.skip(lacking)
    from playwright.sync_api import sync_playwright

    (start,) = blocks(PAGE, "sh", "Open WebUI")
    port = free_port()
    start = start.replace("http://127.0.0.1:8000", server.url).replace("8080", str(port))
    alone = {"OFFLINE_MODE": "true", "RAG_EMBEDDING_ENGINE": "openai", "WEBUI_SECRET_KEY": "a key"}
    with started(start, port, DATA_DIR=str(tmp_path), **alone) as url, sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=shutil.which(browser.CHROMIUM), args=browser.FLAGS)
        page = chromium.new_page()
        page.set_default_timeout(browser.TIMEOUT)
        page.goto(url)
        page.get_by_role("button", name="Okay, Let's Go!").click()
        page.locator("#chat-input").fill(handbook.document())
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Info").hover()
        report = page.locator("[data-tippy-root]", has_text="kv_compression").inner_text()
        chromium.close()
    (tokens,), (mean,) = (re.findall(rf"\b{name}: ([\d.]+)", report) for name in ("tokens", "mean"))
    check({"tokens": float(tokens), "entries": {"mean": float(mean)}})


@pytest.mark.parametrize(
    ("section", "program", "as_documented", "less", "compressions"),
    [
        ("lm-eval", "lm-eval", "gsm8k", "kvmerge_recall --include_path tests/data/eval/lm_eval --limit 2", 2),
        ("vllm bench serve", "bash", "--num-prompts 16", "--num-prompts 2 --random-output-len 5", 2),
    ],
)
def test_by_the_servers_counter(
    server: Server, tmp_path: Path, section: str, program: str, as_documented: str, less: str, compressions: int
) -> None:
    skip_without(program)
    before = server.metric("vllm:kvmerge_compressions_total")
    (command,) = blocks(PAGE, "bash", section)
    assert as_documented in command
    in_shell(server, tmp_path, command.replace(as_documented, less))
    assert server.metric("vllm:kvmerge_compressions_total") - before >= compressions


def test_run_batch(server: Server, tmp_path: Path) -> None:
    (script,) = blocks(PAGE, "bash", "vllm run-batch")
    options = shlex.join((*OPTIONS, *ROOM))
    printed = in_shell(server, tmp_path, script.replace("\ncat ", f" {options}\ncat "))
    check(json.loads(printed.splitlines()[-1])["response"]["body"]["usage"]["kv_compression"])
