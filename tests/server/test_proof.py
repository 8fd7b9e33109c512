"""Every answer to a request with the field says in ``usage`` what compression did."""

import itertools
from typing import Any

import httpx
import pytest

from tests.server.conftest import Server, check_refused, events, wait_until
from vllm_kvmerge.ops.coded import CODINGS
from vllm_kvmerge.request.proof import CompressionProof
from vllm_kvmerge.request.spec import parse_compression

PROMPT = [3 + i % 200 for i in range(300)]
SALTS = itertools.count()
LOCAL = {"policy": "local", "budget": 64}


def proof_in(usage: dict[str, Any]) -> CompressionProof:
    return CompressionProof.model_validate(usage["kv_compression"])


def proof(server: Server, field: Any, prompt: Any = PROMPT, **body: Any) -> CompressionProof:
    """Of a request that finds nothing in the prefix cache, unless ``body`` has a salt."""
    body = {"prompt": prompt, "max_tokens": 4, "cache_salt": str(next(SALTS)), "kv_compression": field, **body}
    return proof_in(server.complete(**body)["usage"])


def did(usage: dict[str, Any]) -> bool:
    """Whether the request was compressed, or found what another had left."""
    told = proof_in(usage)
    return told.entries.most == 64 and (told.compressions > 0) != (told.reused_tokens > 0)


def test_what_compression_did(server):
    before = server.metric("vllm:kvmerge_entries_evicted_total", policy="local")
    told = proof(server, LOCAL)
    config = parse_compression(LOCAL)
    assert config is not None and (told.policy, told.parameters) == ("local", config.parameters)
    assert (told.budget, told.compressions, told.tokens, told.merged) == (64, 1, 303, 0)
    assert told.entries.model_dump() == {"mean": 64, "least": 64, "most": 64}
    evicted = server.metric("vllm:kvmerge_entries_evicted_total", policy="local") - before
    assert told.evicted == evicted > 0 and told.evicted % (300 - 64) == 0
    # Ten blocks; two for the front, and the last, which is not full.
    assert told.blocks_returned == 7 and told.bytes.peak * 3 == told.bytes.end * 10
    assert told.notes == [] and told.sequences == 1 and told.reused_tokens == 0


def test_what_is_merged_is_told_apart(server):
    before = server.metric("vllm:kvmerge_entries_merged_total", policy="keepkv")
    told = proof(server, {"policy": "keepkv", "budget": 100, "merge_threshold": -1.0})
    assert told.merged == server.metric("vllm:kvmerge_entries_merged_total", policy="keepkv") - before > 0
    assert (told.merged + told.evicted) % 200 == 0


def test_heads_of_unequal_budgets(server):
    told = proof(server, {"policy": "adakv", "budget": 100})
    assert told.entries.least < told.entries.mean == 100 < told.entries.most


@pytest.mark.parametrize("field", [LOCAL, *(LOCAL | {"decode": "grow", "front": front} for front in CODINGS)])
@pytest.mark.parametrize(
    ("body", "lengths"),
    [
        ({"n": 3, "temperature": 1, "seed": 1}, [300, 300, 300]),
        ({"prompt": [PROMPT, PROMPT[:200], PROMPT[:100]]}, [300, 200, 100]),
    ],
)
def test_sequences_of_an_answer_are_added_up(server, field, body, lengths):
    one, several = proof(server, field), proof(server, field, **body)
    assert several.sequences == 3 and several.tokens == sum(lengths) + 9
    reused = several.reused_tokens // 300  # by those that found what another had left
    assert several.compressions == 3 - reused
    assert several.evicted == one.evicted // 236 * (sum(length - 64 for length in lengths) - 236 * reused)
    assert several.entries == one.entries


@pytest.mark.parametrize(
    ("field", "note"),
    [
        ({"policy": "full"}, "the policy is 'full'"),
        ({"policy": "local", "budget": 100_000}, "prompt and answer together could come to 304 tokens at most"),
        ({"policy": "local", "budget": 302}, "at 303 tokens, and its first compression was due at 334"),
        ({"policy": "snapkv", "budget": 303}, "the context's 300 tokens are within the budget of 303 entries"),
        ({"policy": "local", "budget": 64, "trigger": "pressure"}, "the pool of blocks was never short"),
    ],
)
def test_why_nothing_was_compressed(server, field, note):
    told = proof(server, field)
    (said,) = told.notes
    assert said.startswith("nothing was compressed: ") and note in said
    assert (told.compressions, told.evicted, told.merged, told.blocks_returned) == (0, 0, 0, 0)
    assert told.entries.model_dump() == {"mean": 303, "least": 303, "most": 303} and told.bytes.end == told.bytes.peak


def test_a_budget_that_was_raised(server):
    told = proof(server, {"policy": "snapkv", "budget": 0.02})
    (note,) = told.notes
    assert note.startswith(f"the budget was raised from 6 entries, 0.02 of 300 tokens, to {told.budget}, ")
    assert told.entries.mean == told.budget == 33


def test_a_context_that_was_found_compressed(server):
    field = {"policy": "local", "budget": 48, "context_tokens": 256, "decode": "grow"}
    first, second = (proof(server, field, cache_salt="found") for _ in range(2))
    assert (first.reused_tokens, first.compressions) == (0, 1)
    assert (second.reused_tokens, second.compressions) == (256, 0)
    assert second.entries == first.entries and second.notes == []


@pytest.mark.parametrize(("decode", "num_notes"), [("bounded", 1), ("grow", 0)])
def test_it_is_said_if_what_follows_a_context_is_compressed(server, decode, num_notes):
    field = {"policy": "keydiff", "budget": 64, "interval": 8, "context_tokens": 256, "decode": decode}
    notes = proof(server, field, max_tokens=40).notes
    assert len(notes) == num_notes and all("what follows the context" in note for note in notes)


def test_a_turn_that_was_found(server):
    field = {"policy": "local", "budget": 48, "reuse": "turns"}
    body = {"cache_salt": "turn", "max_tokens": 4, "kv_compression": field, "return_token_ids": True}
    answer = server.complete(PROMPT, **body)
    told = proof(server, field, [*PROMPT, *answer["choices"][0]["token_ids"], 5, 6, 7], cache_salt="turn")
    assert told.reused_tokens >= 301 and told.entries.most == 48


def test_an_answer_that_a_stop_string_ends(server):
    body = {"max_tokens": 12, "kv_compression": LOCAL, "vllm_xargs": {"kvmerge_usage": 1}}
    text = server.complete(PROMPT, cache_salt="whole", **body)["choices"][0]["text"]
    answer = server.complete(PROMPT, cache_salt="stop", stop=text[4:6], **body)
    (choice,) = answer["choices"]
    assert (choice["finish_reason"], choice["text"]) == ("stop", text[:4].split(text[4:6])[0])
    told, report = proof_in(answer["usage"]), answer["kv_transfer_params"]["kvmerge"]
    assert (told.compressions, told.entries.most) == (1, 64) and told.bytes.end < told.bytes.peak
    assert (report["compressions"], report["peak_bytes"]) == (1, told.bytes.peak)


@pytest.mark.parametrize("continuous", [False, True])
def test_the_last_event_of_a_stream_with_usage(server, continuous):
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": continuous}}
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 4, "kv_compression": LOCAL, "cache_salt": f"{continuous}"}
    *others, last = events(server.post("/v1/completions", body | options))
    assert proof_in(last["usage"]) == proof(server, LOCAL) and last["choices"] == []
    assert not any("kv_compression" in (event.get("usage") or {}) for event in others)


def test_each_route_that_generates(server):
    words = " ".join(f"word{number}" for number in range(80))
    chat = {"max_tokens": 4, "messages": [{"role": "user", "content": words}]}
    response = {"input": words, "max_output_tokens": 4}
    for path, body in (("/v1/chat/completions", chat), ("/v1/responses", response), ("/v1/messages", chat)):
        body = {"model": "demo", "kv_compression": LOCAL} | body
        assert did(server.post(path, body).json()["usage"]), path
        options = {"stream_options": {"include_usage": True}} if "chat" in path else {}
        streamed = [one.get("response", one) for one in events(server.post(path, body | options | {"stream": True}))]
        assert did([one["usage"] for one in streamed if one.get("usage")][-1]), path


@pytest.mark.parametrize("is_background", [False, True])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_stored_response_has_its_report_when_it_is_read_back(server, is_background, is_streamed):
    words = " ".join(f"stored{number}" for number in range(80))
    body = {"model": "demo", "input": words, "max_output_tokens": 4, "kv_compression": LOCAL, "store": True}
    answer = server.post("/v1/responses", body | {"background": is_background, "stream": is_streamed})
    told = events(answer)[0]["response"] if is_streamed else answer.json()
    url = f"{server.url}/v1/responses/{told['id']}"
    wait_until(lambda: httpx.get(url).json()["status"] in ("incomplete", "completed"))
    assert did(httpx.get(url).json()["usage"]) and did(httpx.get(url).json()["usage"])
    if is_streamed and is_background:  # from its first event on, again
        again = events(httpx.get(url, params={"stream": True}))
        assert again[0]["response"]["id"] == told["id"] and did(again[-1]["response"]["usage"])


def test_a_batch_of_chats_has_one_report(server):
    chats = [[{"role": "user", "content": f"batch{first} " * 80}] for first in range(2)]
    body = {"model": "demo", "messages": chats, "max_tokens": 4, "kv_compression": LOCAL}
    answer = server.post("/v1/chat/completions/batch", body).json()
    assert len(answer["choices"]) == 2 and did(answer["usage"])
    assert answer["usage"]["kv_compression"]["compressions"] == 2
    refused = server.post("/v1/chat/completions/batch", body | {"kv_compression": LOCAL | {"context_messages": 1}})
    check_refused(refused, "kv_compression.context_messages")


def test_other_answers_stay_as_they_are(server):
    plain = server.complete(PROMPT, max_tokens=4)
    assert "kv_compression" not in plain["usage"] and plain["kv_transfer_params"] is None
    asked = server.complete(PROMPT, max_tokens=4, kv_compression=LOCAL)
    assert asked["kv_transfer_params"] is None and {*asked["usage"]} == {*plain["usage"], "kv_compression"}
