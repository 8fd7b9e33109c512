"""Contexts that a server keeps under an id, over HTTP."""

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.conftest import Server, check_refused, events, wait_until

pytestmark = pytest.mark.engine

ROUTE = "/v1/kvmerge/contexts"
FIELD = {"policy": "snapkv", "budget": 96}
FACTS = " ".join(f"remember fiso {1000 + i}." for i in range(120)) + " remember gofu 4821."
QUESTION = " recall gofu"
MESSAGES = [{"role": "system", "content": FACTS}, {"role": "user", "content": "remember bado 7777."}]
ASKED = [{"role": "assistant", "content": "remember fiso 1."}, {"role": "user", "content": "recall gofu"}]


@pytest.fixture(autouse=True)
def nothing_left(server: Server) -> Iterator[None]:
    """Deletes what a test leaves, under the salts that tests use."""
    yield
    for salted in ({}, {"cache_salt": "mine"}):
        for one in httpx.get(server.url + ROUTE, params=salted).json()["data"]:
            httpx.delete(f"{server.url}{ROUTE}/{one['id']}", params=salted)
    assert server.metric("vllm:num_requests_running") == 0


def keep(server: Server, **body: Any) -> dict[str, Any]:
    content = {} if "messages" in body else {"prompt": FACTS}
    response = server.post(ROUTE, {"model": "demo", "kv_compression": FIELD} | content | body)
    assert response.status_code == 200, response.text
    return response.json()


def tokens_of(server: Server, **body: Any) -> list[int]:
    return server.post("/tokenize", {"model": "demo", **body}).json()["tokens"]


def ask(server: Server, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    return server.post(path, {"model": "demo", "max_tokens": 6, "temperature": 0, "logprobs": 1} | body)


def said(response: httpx.Response) -> tuple[str, list[float], int]:
    """What a request is answered: text, log-probabilities of its tokens, and the number of all tokens."""
    assert response.status_code == 200, response.text
    (choice,), usage = response.json()["choices"], response.json()["usage"]
    found = choice["logprobs"]
    row = found.get("token_logprobs") or [token["logprob"] for token in found["content"]]
    return choice.get("text") or choice["message"]["content"], row, usage["total_tokens"]


def assert_said(response: httpx.Response, expected: tuple[str, list[float], int]) -> None:
    """Log-probabilities up to rounding: a prompt of which some is in the prefix cache is computed in other chunks."""
    text, row, total = said(response)
    assert (text, row, total) == (expected[0], pytest.approx(expected[1], abs=1e-4), expected[2])


def cached(response: httpx.Response) -> int:
    return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_prompt_is_kept_and_asked(server, contexts_dir):
    """Answers are those of requests that bring all of it, which are made first, under a salt that shares nothing."""
    tokens = tokens_of(server, prompt=FACTS)
    question = tokens_of(server, prompt=QUESTION, add_special_tokens=False)
    ordinary = {"kv_compression": FIELD | {"context_tokens": len(tokens)}, "cache_salt": "other"}
    expected = said(ask(server, prompt=tokens + question, **ordinary))
    kept = keep(server, ttl=1000)
    shown = {"object": "kv_context", "model": "demo", "messages": None, "tokens": len(tokens), "entries": 96}
    assert kept == kept | shown | {"saved": True}
    assert [path.name.partition(".")[0] for path in contexts_dir.iterdir()] == [kept["id"]]
    assert kept["id"].startswith("ctx-") and kept["seconds"] > 0 and kept["bytes"] > 0
    assert kept["expires_at"] - kept["created"] in (999, 1000, 1001)
    assert kept["kv_compression"] == kept["kv_compression"] | FIELD
    listed = httpx.get(server.url + ROUTE).json()
    assert listed == {"object": "list", "data": [kept | {"seconds": None}]}
    address = f"{server.url}{ROUTE}/{kept['id']}"
    assert httpx.get(address).json() == kept | {"seconds": None}

    named, found = {"kv_compression": {"context": kept["id"]}}, server.metric("vllm:kvmerge_context_hit_tokens_total")
    for prompt in (QUESTION, question):
        answer = ask(server, prompt=prompt, **named)
        assert_said(answer, expected)
        assert cached(answer) == len(tokens)
    assert server.metric("vllm:kvmerge_context_hit_tokens_total") == found + 2 * len(tokens)
    assert server.metric("vllm:kvmerge_kept_contexts") == 1
    assert server.metric("vllm:kvmerge_kept_context_bytes") == kept["bytes"]
    in_text = {"vllm_xargs": {"kv_compression": json.dumps({"context": kept["id"]} | FIELD)}}
    assert_said(ask(server, prompt=QUESTION, **in_text), expected)
    # Others with the same tokens and policy find it too.
    assert cached(ask(server, prompt=tokens + question, kv_compression=ordinary["kv_compression"])) == len(tokens)
    several = ask(server, prompt=[QUESTION, question, " remember"], **named).json()["choices"]
    assert [one["text"] for one in several[:2]] == [expected[0]] * 2 and len(several) == 3
    chunks = events(ask(server, prompt=QUESTION, **named, stream=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected[0]

    assert httpx.delete(address).json() == {"id": kept["id"], "object": "kv_context", "deleted": True}
    for answer in (ask(server, prompt=QUESTION, **named), httpx.delete(address)):
        assert answer.status_code == 404 and kept["id"] in answer.json()["error"]["message"]
    assert httpx.get(server.url + ROUTE).json()["data"] == [] and not list(contexts_dir.iterdir())
    assert server.metric("vllm:kvmerge_kept_contexts") == 0


@pytest.mark.parametrize("field", [{"budget": 0.3}, FIELD | {"protect": {"messages": ["user"]}, "budget": 0.3}])
def test_a_chat_goes_on_after_the_messages_that_are_kept(server, field):
    chats = "/v1/chat/completions"
    whole = {"messages": MESSAGES + ASKED, "cache_salt": "other"}
    expected = said(ask(server, chats, kv_compression=field | {"context_messages": 2}, **whole, logprobs=True))
    kept = keep(server, messages=MESSAGES, kv_compression=field)
    assert kept["messages"] == 2
    assert [kept["tokens"]] == [len(tokens_of(server, messages=MESSAGES, add_generation_prompt=False))]
    named = {"kv_compression": {"context": kept["id"]}, "logprobs": True}
    answer = ask(server, chats, messages=ASKED, **named)
    assert_said(answer, expected)
    assert cached(answer) == kept["tokens"]
    refused = ask(server, messages=ASKED, prompt=QUESTION, kv_compression=named["kv_compression"])
    assert "this context is messages; allowed: /v1/chat/completions" in refused.json()["error"]["message"]
    refused = ask(server, chats, messages=ASKED, chat_template_kwargs={"a": 1}, **named)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "chat_template_kwargs")


def test_what_renders_the_messages_is_kept_with_them(server):
    tools = [{"type": "function", "function": {"name": "recall", "parameters": {"type": "object", "properties": {}}}}]
    kept = keep(server, messages=MESSAGES, tools=tools, chat_template_kwargs={"enable_thinking": False})
    assert kept["tokens"] == len(tokens_of(server, messages=MESSAGES, tools=tools, add_generation_prompt=False))
    body = {"messages": ASKED, "tool_choice": "none", "kv_compression": {"context": kept["id"]}, "logprobs": False}
    for more in ({"tools": tools}, {}):
        assert cached(ask(server, "/v1/chat/completions", **body, **more)) == kept["tokens"]


def test_a_context_is_seen_under_its_salt_alone(server):
    mine, others = keep(server, cache_salt="mine"), keep(server)
    address = f"{server.url}{ROUTE}/{mine['id']}"
    named = {"prompt": QUESTION, "kv_compression": {"context": mine["id"]}}
    for params, seen in (({}, [others["id"]]), ({"cache_salt": "another"}, [])):
        assert httpx.get(address, params=params).status_code == 404
        assert httpx.delete(address, params=params).status_code == 404
        assert ask(server, **named, **params).status_code == 404
        assert [one["id"] for one in httpx.get(server.url + ROUTE, params=params).json()["data"]] == seen
    params = {"cache_salt": "mine"}
    assert httpx.get(address, params=params).json()["id"] == mine["id"]
    assert cached(ask(server, **named, **params)) == mine["tokens"]
    assert httpx.delete(address, params=params).status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "part"),
    [
        ({"kv_compression": {"policy": "full"}}, 400, "kv_compression.policy: 'full' leaves nothing to keep"),
        ({"kv_compression": None}, 400, "kv_compression: is missing, and this server has no default"),
        ({"kv_compression": FIELD | {"reuse": "turns"}}, 400, "kv_compression.reuse: "),
        ({"kv_compression": FIELD | {"context_tokens": 5}}, 400, "kv_compression.context_tokens: "),
        ({"kv_compression": {"context": "ctx-1"}}, 400, "kv_compression.context: contexts are kept by servers"),
        ({"kv_compression": FIELD | {"protect": {"tokens": [[0, 90]]}}}, 400, "kv_compression.protect: 90 tokens are"),
        ({"kv_compression": {"policy": "local", "budget": 1.0}}, 400, "nothing would be compressed that could be kept"),
        ({"model": "nope"}, 404, "The model `nope` does not exist"),
        ({"model": "nope", "prompt": None, "messages": MESSAGES}, 404, "The model `nope` does not exist"),
        ({"prompt": [2] * 5000}, 400, "maximum context length"),
        ({"prompt": None}, 400, "give either prompt or messages"),
        ({"messages": MESSAGES}, 400, "give either prompt or messages"),
        ({"tools": []}, 400, "tools goes with messages alone"),
        ({"prompt": None, "messages": [{"role": "user"}]}, 400, ""),
        ({"ttl": 0}, 400, "greater than 0"),
        ({"cache_salt": ""}, 400, "cache_salt"),
    ],
)
def test_what_cannot_be_kept_is_refused(server, body, status, part):
    response = server.post(ROUTE, {"model": "demo", "prompt": FACTS, "kv_compression": FIELD} | body)
    assert response.status_code == status, response.text
    assert part in response.json()["error"]["message"]
    assert httpx.get(server.url + ROUTE).json()["data"] == []


def test_a_request_that_does_not_go_with_its_context_is_refused(server):
    kept = keep(server)

    def refused(status: int, param: str, path: str = "/v1/completions", **body: Any) -> str:
        body = {"prompt": QUESTION, "kv_compression": {"context": kept["id"]}} | body
        for stream in (False, True):
            message = check_refused(ask(server, path, **body, stream=stream), param, "", status)
        return message

    for name, other in {
        "policy": "keepkv", "selector": "knorm", "budget": 97, "interval": 5, "decode": "bounded", "reuse": "turns",
        "window_size": 8, "context_tokens": 5, "protect": {"tokens": [[0, 2]]},
    }.items():  # fmt: skip
        message = refused(400, f"kv_compression.{name}", kv_compression={"context": kept["id"], name: other})
        assert "not the context's; allowed: " in message
    same = {"policy": "snapkv", "selector": "snapkv", "budget": 96, "interval": None, "window_size": 32}
    assert cached(ask(server, prompt=QUESTION, kv_compression={"context": kept["id"], **same})) == kept["tokens"]
    assert "ctx-1" in refused(404, "kv_compression.context", kv_compression={"context": "ctx-1"})
    refused(404, "kv_compression.context", model="other")
    refused(400, "kv_compression.context", kv_compression={"context": 5})
    refused(400, "kv_compression.context", prompt=None)
    refused(400, "kv_compression.context", prompt=[[2, 3], 4])
    assert "it is truncated" in refused(400, "kv_compression.context", truncate_prompt_tokens=50)
    refused(400, "kv_compression.context", "/v1/chat/completions", messages=ASKED, logprobs=True)
    refused(400, "kv_compression.context", "/v1/responses", input="recall")
    refused(400, "kv_compression.context", "/invocations")


@pytest.mark.parametrize("stream", [False, True])
def test_clients_keep_contexts_by_their_route_alone(server, stream):
    asked = {"vllm_xargs": {"kvmerge_context": json.dumps({"id": "ctx-1", "ttl": None, "info": {}})}, "stream": stream}
    for path, body in (
        ("/v1/completions", {"prompt": FACTS}),
        ("/v1/chat/completions", {"messages": MESSAGES, "kv_compression": FIELD}),
        ("/invocations", {"prompt": FACTS}),
    ):
        response = ask(server, path, **body, **asked, logprobs=None)
        assert response.status_code == 400
        assert "kvmerge_context: is the server's own; allowed: POST " + ROUTE in response.json()["error"]["message"]
    assert httpx.get(server.url + ROUTE).json()["data"] == []


def test_contexts_have_a_share_of_the_pool_and_a_time(server, contexts_dir):
    large = {"kv_compression": {"policy": "knorm", "budget": 0.9}}
    ids = [keep(server, prompt=[2, *[token] * 640], **large)["id"] for token in (5, 9)]
    assert server.metric("vllm:kvmerge_kept_contexts") == 1  # the other one is in its file
    assert [one["id"] for one in httpx.get(server.url + ROUTE).json()["data"]] == ids[::-1]
    for context_id in ids:
        assert cached(ask(server, prompt=QUESTION, kv_compression={"context": context_id})) == 641
        httpx.delete(f"{server.url}{ROUTE}/{context_id}")
    body = {"model": "demo", "prompt": [2, *[9] * 1900], **large}
    error = server.post(ROUTE, body).json()["error"]
    assert "0 contexts hold" in error["message"] and (error["code"], error["type"]) == (409, "ConflictError")
    short = keep(server, ttl=2.0)
    wait_until(lambda: httpx.get(f"{server.url}{ROUTE}/{short['id']}").status_code == 404)
    assert time.time() >= short["expires_at"]
    later = keep(server)["id"]  # by then its files go too
    assert [path.name.partition(".")[0] for path in contexts_dir.iterdir()] == [later]


def test_a_context_that_cannot_be_saved_is_not_kept(server, contexts_dir):
    aside = contexts_dir.rename(contexts_dir.with_name("aside"))
    contexts_dir.touch()  # in the folder's place
    response = server.post(ROUTE, {"model": "demo", "prompt": FACTS, "kv_compression": FIELD})
    contexts_dir.unlink()
    aside.rename(contexts_dir)
    check_refused(response, None, "the context cannot be saved: ", 507)
    assert httpx.get(server.url + ROUTE).json()["data"] == []


def test_a_client_that_leaves_leaves_no_context(server):
    body = {"model": "demo", "prompt": [2, *[7] * 3900], "kv_compression": FIELD}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + ROUTE, json=body, timeout=httpx.Timeout(60, read=0.05))
    wait_until(lambda: server.metric("vllm:num_requests_running") == 0)
    assert httpx.get(server.url + ROUTE).json()["data"] == []
