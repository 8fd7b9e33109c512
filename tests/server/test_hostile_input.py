"""Schemathesis: requests that the OpenAPI document allows, and such that it does not, to a real server.

None may end with HTTP 500, take long, leave a traceback in the log, or keep others from being answered. Two documents:
the server's own, all of whose operations are called; and the generating routes with a sound request around
``kv_compression``, which is drawn from the field's schema, so that most requests reach the field's checks and many the
engine. ``make fuzz CASES=10000`` calls more than ``make test``.
"""

import copy
import itertools
import re
import time
from collections import Counter
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings

from tests.server.conftest import Server, serving

pytestmark = pytest.mark.engine

SECONDS = 60
"""That an answer may take on a busy machine: no request here generates more than a few tokens."""

PROMPT = " ".join(f"remember fiso {1000 + i}." for i in range(60)) + " recall fiso"
SHORT = {"max_tokens": 4, "temperature": 0}
SOUND: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "demo", "prompt": PROMPT, **SHORT},
    "/v1/chat/completions": {"model": "demo", "messages": [{"role": "user", "content": PROMPT}], **SHORT},
    "/v1/kvmerge/contexts": {"model": "demo", "prompt": PROMPT},
}
"""Routes that take the field, and what else they need."""

OTHERS = {"/scale_elastic_ep"}
"""Not called: would change the server for all later cases."""

KNOWN = ("/v1/systemone", 501, ""), ("/v1/responses", 500, "list index out of range")
"""What stock vLLM answers: where a model takes no structured decisions; to an earlier answer without content."""

FEW = 300
"""About as many requests in `make test`, over both documents, not drawn at random."""

GENERATING = (
    "/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/responses", "/v1/messages",
)  # fmt: skip
"""Routes whose answers are as long as the model allows unless a request says how long."""

TOKENS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "n", "best_of")


@pytest.fixture(scope="module")
def server():
    with serving() as ready:
        yield ready


@pytest.fixture(scope="module")
def document(server: Server) -> dict[str, Any]:
    return httpx.get(server.url + "/openapi.json", timeout=60).json()


def around_the_field(document: dict[str, Any]) -> dict[str, Any]:
    """The document with nothing left to draw but the field."""
    narrow = copy.deepcopy(document)
    models = narrow["components"]["schemas"]
    narrow["paths"] = {path: {"post": narrow["paths"][path]["post"]} for path in SOUND}
    for path, operation in narrow["paths"].items():
        name = operation["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
        fixed = {key: {"enum": [value]} for key, value in SOUND[path].items()}
        fixed["kv_compression"] = models[name]["properties"]["kv_compression"]
        models[name] = {"type": "object", "additionalProperties": False, "required": [*fixed], "properties": fixed}
    return narrow


def bounded(case: Any) -> None:
    """The model exists, and what is generated stays short: long answers are no fault."""
    if isinstance(case.body, dict):
        if isinstance(case.body.get("model"), str):
            case.body["model"] = "demo"
        too_long = (name for name in TOKENS if isinstance(case.body.get(name), int) and case.body[name] > 4)
        case.body.update(dict.fromkeys(too_long, 4))
        if case.operation.path in GENERATING:
            case.body.setdefault("max_tokens" if "responses" not in case.operation.path else "max_output_tokens", 4)


def check(server: Server, case: Any, seen: Counter[int]) -> None:
    start = time.monotonic()
    response = case.call(base_url=server.url, timeout=SECONDS)
    seen[response.status_code] += 1
    found = case.operation.path, response.status_code
    is_known = any(found == (path, status) and said in response.text for path, status, said in KNOWN)
    assert response.status_code < 500 or is_known, (case.as_curl_command(), response.text[:2000])
    assert "Traceback" not in response.text
    assert time.monotonic() - start < SECONDS
    if case.operation.path == "/v1/kvmerge/contexts" and response.status_code == 200 and case.method == "POST":
        httpx.delete(f"{server.url}/v1/kvmerge/contexts/{response.json()['id']}", timeout=60)


def fuzz(server: Server, document: dict[str, Any], cases: int | None, seen: Counter[int]) -> None:
    """At least half of ``cases``, spread over all operations, in both of Schemathesis' modes; about half of ``FEW`` by
    default."""
    schema = schemathesis.openapi.from_dict(document)
    operations = [one for one in (found.ok() for found in schema.get_all_operations()) if one.path not in OTHERS]
    each = max(1, (cases or FEW) // 2 // (2 * len(operations)))
    unseen: dict[str, Any] = {"database": None, "suppress_health_check": list(HealthCheck), "deadline": None}
    while not seen or (cases and seen.total() < cases // 2):  # some operations have few cases to draw
        for operation, mode in itertools.product(operations, schemathesis.GenerationMode):
            if mode is schemathesis.GenerationMode.NEGATIVE and not list(operation.body):
                continue

            @settings(max_examples=each, derandomize=cases is None, **unseen)
            @given(case=operation.as_strategy(generation_mode=mode))
            def call(case):
                bounded(case)
                check(server, case, seen)

            call()


@pytest.mark.slow
@pytest.mark.parametrize("what", ["all operations", "the field"])
def test_no_request_ends_with_500(what: str, server: Server, document: dict[str, Any], request) -> None:
    seen: Counter[int] = Counter()
    chosen = document if what == "all operations" else around_the_field(document)
    fuzz(server, chosen, request.config.getoption("--fuzz-cases"), seen)
    print(f"\n{what}: {seen.total()} requests, by status: {dict(seen)}")
    assert seen[200]
    assert server.process.poll() is None
    assert server.complete(PROMPT, max_tokens=4)["usage"]["completion_tokens"] == 4
    # Some of vLLM's routes, for Anthropic's clients and for scores, log what they refuse with a traceback.
    refused = re.compile(r"\[\S+:\d+\](?= Error (in count_tokens|in create_messages|during generation))")
    known = {match[0] for line in server.log if (match := refused.search(line))}
    assert not [line for line in server.log if "Traceback" in line and not any(place in line for place in known)]
