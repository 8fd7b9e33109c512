"""Messages located by what they add to the conversation before them, or refused."""

import asyncio
import json
from contextvars import copy_context
from typing import Any

import jinja2
import pytest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from tests.server.conftest import check_refused, events
from vllm_kvmerge import compression
from vllm_kvmerge.engine.validation import PREFIX, Prefix, check_prompt
from vllm_kvmerge.policies.fields import MAX_RANGES
from vllm_kvmerge.request.recommended import recommendations
from vllm_kvmerge.request.spec import CompressionError, parse_compression
from vllm_kvmerge.server.messages import CONTEXT, RenderingError, locate

ROLES = ["system", "user", "assistant", "user"]
MESSAGES = [{"role": role, "content": f"words of {index}"} for index, role in enumerate(ROLES)]

TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
PIECEWISE = {
    "plain": TURNS,
    "tools first": "{% if tools %}[{{ tools }}]{% endif %}" + TURNS,
    "default system": "{% if messages[0].role != 'system' %}<system>be kind</>{% endif %}" + TURNS,
    "without system": "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}</>{% endfor %}",
}
OTHERS = {
    "count ahead": "{{ messages | length }} " + TURNS,
    "last one marked": "{% for m in messages %}{% if loop.last %}!{% endif %}{{ m.content }}{% endfor %}",
    "system at the end": "{% for m in messages[1:] %}{{ m.content }}{% endfor %}{{ messages[0].content }}",
    "must end with user": "{% if messages[-1].role != 'user' %}{{ raise('no') }}{% endif %}" + TURNS,
}


def render(template: str, **body: Any) -> str:
    def refuse(reason: str) -> None:
        raise RenderingError(reason)

    return jinja2.Environment().from_string(template).render(**body, **{"raise": refuse})


def locate_by(
    field: dict[str, Any], request: dict[str, Any], template: str = TURNS, asked: list[dict[str, Any]] | None = None
) -> tuple[dict[str, Any], Prefix]:
    """What ``locate`` makes of a field of the policy local, with a token per character of what the template renders."""
    config = parse_compression({"policy": "local", **field})
    assert config is not None

    async def tokenize(body: dict[str, Any]) -> list[int]:
        if asked is not None:
            asked.append(body)
        return [ord(letter) for letter in render(template, **body)]

    value, prefix = asyncio.run(locate(config, request, tokenize))
    replaced = parse_compression(value)
    assert replaced is not None and not replaced.names_messages and value["policy"] == "local"
    return value, prefix


def located(template: str, protect: dict[str, Any], **request: Any) -> tuple[list[str], str]:
    """The text of each range, and the text that was asked for at last."""
    body = {"messages": MESSAGES, **request}
    text = render(template, **body)
    found, prefix = locate_by({"protect": protect}, body, template)
    assert prefix.field == "protect.messages"
    beginning = "".join(map(chr, prefix.tokens))
    assert text.startswith(beginning)
    return [text[start:end] for start, end in found["protect"]["tokens"]], beginning


@pytest.mark.parametrize("template", PIECEWISE.values(), ids=PIECEWISE)
def test_a_message_is_what_it_adds(template):
    assert located(template, {"messages": [2]})[0] == ["<assistant>words of 2</>"]
    texts, beginning = located(template, {"messages": ["user"]})
    assert texts == ["<user>words of 1</>", "<user>words of 3</>"] and beginning.endswith("words of 3</>")
    first = located(template, {"messages": [0]}, tools="a tool")[0]
    expected = {"tools first": ["[a tool]<system>words of 0</>"], "without system": []}
    name = next(name for name, one in PIECEWISE.items() if one == template)
    assert first == expected.get(name, ["<system>words of 0</>"])


@pytest.mark.parametrize("template", PIECEWISE.values(), ids=PIECEWISE)
def test_a_context_ends_where_its_last_message_does(template):
    """One rendering of each context, the whole conversation included; without tokens there is none."""
    request = {"messages": MESSAGES, "tools": "a tool"}
    for count in range(1, len(MESSAGES) + 1):
        asked: list[dict[str, Any]] = []
        rendered = render(template, messages=MESSAGES[:count], tools="a tool")
        if not rendered:
            with pytest.raises(CompressionError, match="renders nothing of the first 1 messages; allowed: context_tok"):
                locate_by({"context_messages": count}, request, template)
            continue
        value, prefix = locate_by({"budget": 0.5, "context_messages": count}, request, template, asked)
        assert value == {"policy": "local", "budget": 0.5, "context_tokens": len(rendered)}
        assert prefix == ("context_messages", list(map(ord, rendered)))
        assert asked == [{"messages": MESSAGES[:count], "tools": "a tool", "add_generation_prompt": False}]


@pytest.mark.parametrize("template", OTHERS.values(), ids=OTHERS)
def test_what_cannot_be_located_is_refused(template):
    """Contexts when they are rendered, or when their rendering is compared with the prompt."""
    with pytest.raises(CompressionError) as caught:
        locate_by({"protect": {"messages": [0, 1]}}, {"messages": MESSAGES}, template)
    assert caught.value.reason == "unknown_messages" and caught.value.status == 400
    assert caught.value.param == "kv_compression.protect.messages"
    prompt = list(map(ord, render(template, messages=MESSAGES)))

    def check() -> None:
        value, prefix = locate_by({"context_messages": 3}, {"messages": MESSAGES}, template)
        PREFIX.set(prefix)
        check_prompt({"type": "token", "prompt_token_ids": prompt}, SamplingParams(extra_args=compression(**value)))

    with pytest.raises((CompressionError, VLLMValidationError), match="context_messages: .*; allowed: context_tokens"):
        copy_context().run(check)


@pytest.mark.parametrize(("protected", "context", "counts"), [([0], 4, [1, 4]), ([3], 1, [1, 3, 4])])
def test_a_context_and_protected_messages_share_renderings(protected, context, counts):
    asked: list[dict[str, Any]] = []
    field = {CONTEXT: context, "protect": {"messages": protected, "tokens": [[0, 2]]}}
    value, prefix = locate_by(field, {"messages": MESSAGES}, asked=asked)
    assert [len(body["messages"]) for body in asked] == counts
    assert value["context_tokens"] == len(render(TURNS, messages=MESSAGES[:context]))
    assert value["protect"] == locate_by(field | {CONTEXT: None}, {"messages": MESSAGES})[0]["protect"]
    assert prefix.field == (CONTEXT if context == counts[-1] else "protect.messages")


@pytest.mark.parametrize("messages", [None, "text", [], [1], [{"role": 3}], [{}] * 4])
def test_messages_that_the_chat_does_not_have_are_refused(messages):
    with pytest.raises(CompressionError, match="there is no message 'user'"):
        locate_by({"protect": {"messages": ["user"]}}, {"messages": messages})
    said = f"5 messages are more than the chat has; allowed: up to {len(messages) if isinstance(messages, list) else 0}"
    with pytest.raises(CompressionError, match=said) as caught:
        locate_by({"context_messages": 5}, {"messages": messages})
    assert (caught.value.param, caught.value.reason) == ("kv_compression.context_messages", "unknown_messages")


def test_neighbours_and_ranges_are_joined():
    texts, _ = located(TURNS, {"messages": [0, 1], "tokens": [[3, 9], [80, 85]]})
    assert texts == ["<system>words of 0</><user>words of 1</>", "</>"]


def test_too_many_messages_are_refused():
    messages = MESSAGES[1:2] * (MAX_RANGES + 1)
    with pytest.raises(CompressionError, match=f"{MAX_RANGES + 1} messages are too many; allowed: {MAX_RANGES}"):
        locate_by({"protect": {"messages": ["user"]}}, {"messages": messages})


def test_a_prompt_with_another_beginning_is_refused():
    """Whatever the chat route renders otherwise than ``/tokenize`` does, ranges of another text are never taken."""
    params = SamplingParams(extra_args=compression("local", budget=8, protect={"tokens": [[0, 3]]}))

    def check(prompt: list[int]) -> None:
        PREFIX.set(Prefix("protect.messages", [1, 2, 3]))
        check_prompt({"type": "token", "prompt_token_ids": prompt}, params)

    copy_context().run(check, [1, 2, 3, 4])
    for prompt in ([1, 2, 9, 4], [1, 2], [2, 3, 4]):
        with pytest.raises(VLLMValidationError, match="does not begin as its messages do"):
            copy_context().run(check, prompt)


CHAT = [
    {"role": "system", "content": "remember gofu 1234."},
    {"role": "user", "content": " ".join(f"remember fiso {1000 + i}." for i in range(150))},
    {"role": "assistant", "content": "remember bado 5678."},
    {"role": "user", "content": " ".join(f"remember fiso {2000 + i}." for i in range(150)) + " recall gofu"},
]

UNFINISHED = {"messages": CHAT[:3], "add_generation_prompt": False, "continue_final_message": True}


def chat(server, protect=None, **body):
    field = {"policy": "streaming_llm", "budget": 64} | ({"protect": protect} if protect is not None else {})
    more = {"max_tokens": 6, "temperature": 0, "kv_compression": field, "vllm_xargs": {"kvmerge_usage": 1}}
    return server.post("/v1/chat/completions", {"model": "demo", "messages": CHAT} | more | body)


def count_tokens(server, *counts: int) -> list[int]:
    """Tokens of the first so many messages."""
    bodies = ({"model": "demo", "messages": CHAT[:count], "add_generation_prompt": False} for count in counts)
    return [server.post("/tokenize", body).json()["count"] for body in bodies]


def test_messages_of_a_chat_are_protected(server):
    """What a protected message says is known afterwards."""
    ends = count_tokens(server, 1, 2, 3)
    for protect, tokens in (
        ({"messages": ["system"], "tokens": [[2, ends[0] + 3]]}, [[0, ends[0] + 3]]),
        ({"messages": [0, 2, "assistant"]}, [[0, ends[0]], ends[1:]]),
    ):
        answer = chat(server, protect).json()
        report = answer["kv_transfer_params"]["kvmerge"]
        assert report["kv_compression"]["protect"] == {"tokens": tokens, "messages": []}
        assert report["mean_entries"] < 64 + 32
        assert answer["choices"][0]["message"]["content"].split()[:4] == ["1", "2", "3", "4"]
    assert chat(server).json()["choices"][0]["message"]["content"].split()[:4] != ["1", "2", "3", "4"]


def test_messages_are_located_in_chats_alone(server):
    for path, content in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"max_tokens": 5, "messages": CHAT[1:]}),
        ("/invocations", {"messages": CHAT}),
    ):
        for name, field in {"protect.messages": {"protect": {"messages": [1]}}, CONTEXT: {CONTEXT: 3}}.items():
            body = {"model": "demo", "kv_compression": {"policy": "local", "budget": 64} | field} | content
            check_refused(server.post(path, body), f"kv_compression.{name}", "in requests to /v1/chat/completions")


@pytest.mark.parametrize(
    ("field", "num_messages"),
    [({"policy": "h2o", "budget": 128, "decode": "bounded"}, 4), ({"budget": 0.25}, 1)],
    ids=["the whole conversation", "without a policy"],
)
def test_the_server_counts_the_tokens_of_a_context(server, field, num_messages):
    (end,) = count_tokens(server, num_messages)
    counted, given = (field | more for more in ({"context_messages": num_messages}, {"context_tokens": end}))

    def answer(one: dict[str, Any], salt: str) -> tuple[Any, ...]:
        """Under a salt of its own none begins with what another one has left of the context."""
        found = chat(server, kv_compression=one, cache_salt=salt).json()
        del found["usage"]["prompt_tokens_details"]  # of blocks that tests before this one have left
        return found["choices"][0]["message"]["content"], found["usage"], found["kv_transfer_params"]

    text, _, report = answer(counted, "0")
    assert (text, _, report) == answer(given, "1")
    resolved = report["kvmerge"]["kv_compression"]
    assert (resolved["context_tokens"], resolved["context_messages"]) == (end, None)
    assert "policy" in field or resolved == resolved | recommendations().best("later").parameters
    chunks = events(chat(server, kv_compression=counted, cache_salt="2", stream=True))
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == text
    assert [chunk["kv_transfer_params"] for chunk in chunks if chunk.get("kv_transfer_params")] == [report]


def test_messages_are_located_in_the_text_of_a_field_however_it_is_spelt(server):
    text = json.dumps({"policy": "local", "budget": 64, "context_messages": 1}).replace("context_m", r"\u0063ontext_m")
    answer = chat(server, kv_compression=None, vllm_xargs={"kvmerge_usage": 1, "kv_compression": text}).json()
    resolved = answer["kv_transfer_params"]["kvmerge"]["kv_compression"]
    assert [resolved["context_tokens"]] == count_tokens(server, 1)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("field", "param", "body", "said"),
    [
        ({"protect": {"messages": ["tool"]}}, "protect.messages", {}, "no message 'tool'; allowed: assistant, system"),
        ({"protect": {"messages": ["user"]}}, "protect", {}, "needs 5 entries, but the budget is 64"),
        ({"protect": {"tokens": [[9000, 9010]]}}, "protect.tokens", {}, "a range ends at 9010, after the prompt"),
        # The last message is rendered without its end, and counted with it.
        ({"context_messages": 3}, "context_messages", UNFINISHED, "the prompt does not begin as its messages do"),
        ({"context_messages": 1}, "context_messages",
         {"messages": [{"role": "user", "content": [{"type": "nonsense"}]}]},
         "the first 1 messages cannot be rendered alone ("),
    ],
)  # fmt: skip
def test_what_cannot_be_located_in_the_prompt_is_refused(server, field, param, body, said, stream):
    field = {"policy": "streaming_llm", "budget": 64} | field
    response = chat(server, kv_compression=field, stream=stream, **body)
    check_refused(response, f"kv_compression.{param}", said)
    if body is UNFINISHED:  # the message before it has its end
        assert chat(server, kv_compression=field | {"context_messages": 2}, stream=stream, **body).status_code == 200
