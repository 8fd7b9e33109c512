"""Batch files (``vllm run-batch``): their requests are compressed, refused and reported as those of a server."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from fastapi.responses import JSONResponse
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse

from tests.server.conftest import VLLM
from vllm_kvmerge import demo
from vllm_kvmerge.request.spec import EXTRA_ARGS_KEY
from vllm_kvmerge.server.batch_file import start
from vllm_kvmerge.server.messages import CHAT_ROUTE

pytestmark = pytest.mark.engine

LONG = "0 1 2 3 4 5 6 7 " * 40
LOCAL = {"policy": "local", "budget": 64}


def run(folder: Path, bodies: dict[str, dict[str, Any]], *options: str) -> dict[str, dict[str, Any]]:
    """The answers to requests, by their ids."""
    questions, answers = folder / "in.jsonl", folder / "out.jsonl"
    base = {"model": "demo", "messages": [{"role": "user", "content": LONG}], "max_tokens": 4}
    lines = [{"custom_id": name, "method": "POST", "url": CHAT_ROUTE, "body": base | bodies[name]} for name in bodies]
    questions.write_text("\n".join(map(json.dumps, lines)))
    model = ("--model", demo.model_path(), "--served-model-name", "demo", "--kv-cache-memory-bytes", "64M")
    command = [sys.executable, str(VLLM), "run-batch", "-i", str(questions), "-o", str(answers), *model, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return {answer["custom_id"]: answer for answer in map(json.loads, answers.read_text().splitlines())}


@pytest.mark.slow
def test_requests_are_compressed_refused_and_reported(tmp_path):
    twice = [{"role": "user", "content": LONG}, {"role": "user", "content": "4"}]
    bodies = {
        "plain": {},
        "ours": {EXTRA_ARGS_KEY: LOCAL},
        "carried": {"vllm_xargs": {EXTRA_ARGS_KEY: json.dumps(LOCAL)}},
        "context": {"messages": twice, EXTRA_ARGS_KEY: {"policy": "keydiff", "budget": 0.5, "context_messages": 1}},
        "unknown": {EXTRA_ARGS_KEY: {"policy": "nope"}},
        "kept": {EXTRA_ARGS_KEY: {"context": "ctx-unknown"}},
        "stream": {"stream": True},
        "stock's": {"max_tokens": -1},
    }
    answers = run(tmp_path, bodies, "--additional-config", '{"kvmerge": {}}')
    usages = {name: answer["response"]["body"]["usage"] for name, answer in answers.items() if answer["error"] is None}
    assert set(usages) == {"plain", "ours", "carried", "context"}
    assert EXTRA_ARGS_KEY not in usages["plain"]
    assert usages["ours"][EXTRA_ARGS_KEY] == usages["carried"][EXTRA_ARGS_KEY]
    assert usages["ours"][EXTRA_ARGS_KEY]["entries"]["most"] == 64
    assert 0 < usages["context"][EXTRA_ARGS_KEY]["parameters"]["context_tokens"] < usages["context"]["prompt_tokens"]
    errors = {name: answers[name]["error"]["error"] for name in set(answers) - set(usages)}
    assert {name: error["code"] for name, error in errors.items()} == {
        "unknown": 400, "kept": 404, "stream": 400, "stock's": 400
    }  # fmt: skip
    assert "unknown policy 'nope'" in errors["unknown"]["message"] and errors["stream"]["param"] == "stream"


def test_a_refused_request_has_the_status_of_its_refusal():
    refusal = ErrorResponse(error=ErrorInfo(message="too long", type="BadRequestError", code=422))

    async def answer(**field: Any) -> JSONResponse:
        around = await start(SimpleNamespace(vllm_config=SimpleNamespace(additional_config=None)))
        vllms = SimpleNamespace(create_chat_completion=AsyncMock(return_value=refusal))
        handler = around(SimpleNamespace(__self__=vllms), CHAT_ROUTE)
        return await handler(ChatCompletionRequest(messages=[{"role": "user", "content": LONG}], **field))

    for field, status, said in (({}, 422, "too long"), ({EXTRA_ARGS_KEY: LOCAL}, 400, "not read by this server")):
        response = asyncio.run(answer(**field))
        assert response.status_code == status and said in json.loads(response.body)["error"]["message"]
