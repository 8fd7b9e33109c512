"""Reports of a request's cache find their way into the events of its stream; real streams are in ``test_server``."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from vllm.exceptions import GenerationError

from tests.request.test_proof import proof
from vllm_kvmerge.engine.arguments import PluginConfig
from vllm_kvmerge.request.proof import PROOFS_KEY, EntriesKept
from vllm_kvmerge.server.outputs import Answer, UsageFeed, follow_outputs

EVENT = b'data: {"text": "a"}\n\n'


def feed_of(*reports: dict[str, Any]) -> UsageFeed:
    feed = UsageFeed()
    feed.num_sequences = 1
    for report in reports:
        feed.note(report)
    return feed


def test_the_report_at_the_end_joins_the_last_steps():
    steps = [{"step": number, "bytes": 100 * number} for number in (4, 5, 6)]
    feed = feed_of({"steps": steps[:2]}, {"mean_bytes": 7.5, "steps": steps[1:]})
    event = json.loads(feed.add_to(EVENT).removeprefix(b"data: "))
    assert event["kv_transfer_params"]["kvmerge"] == {"mean_bytes": 7.5, "steps": steps}
    assert feed.add_to(EVENT) == EVENT


@pytest.mark.parametrize("own", ["null", '{"kvmerge": {"mean_bytes": 1}}'])
def test_an_event_that_has_the_field_has_it_once(own: str):
    event = feed_of({"mean_bytes": 7.5}).add_to(f'data: {{"kv_transfer_params": {own}, "text": "ä"}}\n\n'.encode())
    assert event.count(b"kv_transfer_params") == 1
    chunk = json.loads(event.removeprefix(b"data: "))
    assert chunk == {"text": "ä", "kv_transfer_params": {"kvmerge": {"mean_bytes": 7.5}}}


def test_an_event_of_another_form_waits_for_the_next():
    feed = feed_of({"peak_bytes": 1})
    for event in (b"", b": keep-alive\n\n", b"data: [DONE]\n\n", b'event: x\ndata: {"a": 1}\n\n', EVENT * 2):
        assert feed.add_to(event) == event
    assert b"peak_bytes" in feed.add_to(EVENT)


@pytest.mark.parametrize(
    ("extra", "default", "is_told"),
    [({"kv_compression": '{"policy": "snapkv"}'}, None, True), (None, "snapkv", True), (None, None, False)],
)
def test_a_request_that_the_engine_ended_fails_with_its_reason(extra, default, is_told):
    """Requests that cannot be compressed are not looked at."""

    async def generate(prompt: Any, sampling_params: Any, request_id: str) -> AsyncIterator[SimpleNamespace]:
        yield SimpleNamespace(finished=False, kv_transfer_params={"kvmerge": {"error": "merger zip: it broke"}})

    async def consume() -> None:
        params = SimpleNamespace(n=1, extra_args=extra, structured_outputs=None)
        await anext(client.generate(None, params, ""))

    client = SimpleNamespace(generate=generate)
    config, contexts = PluginConfig(default=default and {"policy": default}), SimpleNamespace(load_front=AsyncMock())
    follow_outputs(client, config, contexts)  # type: ignore[arg-type]
    told = pytest.raises(GenerationError, match="kv_compression: merger zip: it broke")
    with told if is_told else nullcontext():
        asyncio.run(consume())


def test_a_stream_whose_events_all_have_usage_has_the_proof_once():
    """vLLM's ``continuous_usage_stats``: in the event after the text, when the sequence has ended."""
    answer, said = Answer(), proof(EntriesKept(mean=60, least=50, most=64)).model_dump()
    params = {PROOFS_KEY: [said]}
    answer.begin().take(SimpleNamespace(finished=True, kv_transfer_params=params))  # type: ignore[arg-type]
    with_text = b'data: {"choices": [{"text": "a"}], "usage": {"total_tokens": 3}}'
    last = b'data: {"choices": [], "usage": {"total_tokens": 3}}'
    body = b"\n\n".join([with_text, last, b"data: [DONE]", b""])
    (sent,) = answer.messages({"type": "http.response.body", "body": body})
    first, second, *others = sent["body"].split(b"\n\n")
    assert first == with_text and others == [b"data: [DONE]", b""]
    assert json.loads(second.removeprefix(b"data: "))["usage"] == {"total_tokens": 3, "kv_compression": said}
