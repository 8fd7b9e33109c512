"""Messages located by what they add to the conversation before them, or refused."""

import asyncio
from contextvars import copy_context
from typing import Any

import jinja2
import pytest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from vllm_kvmerge import compression
from vllm_kvmerge.engine.validation import PREFIX, check_prompt
from vllm_kvmerge.policies.fields import MAX_RANGES, Protect
from vllm_kvmerge.request.parameters import CompressionError
from vllm_kvmerge.server.messages import locate

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


def tokenizer(template: str, asked: list[dict[str, Any]] | None = None) -> Any:
    """A token per character of what the template renders."""
    compiled = jinja2.Environment().from_string(template)

    def refuse(reason: str) -> None:
        raise CompressionError("messages", reason, "unknown_messages")

    async def tokenize(body: dict[str, Any]) -> list[int]:
        if asked is not None:
            asked.append(body)
        return [ord(letter) for letter in compiled.render(**body, **{"raise": refuse})]

    return tokenize


def located(template: str, protect: dict[str, Any], **request: Any) -> tuple[list[str], str]:
    """The text of each range, and the text that was asked for at last."""
    body = {"messages": MESSAGES, **request}
    text = jinja2.Environment().from_string(template).render(**body)
    found, prefix = asyncio.run(locate(Protect.model_validate(protect), body, tokenizer(template)))
    assert found.messages == ()
    beginning = "".join(map(chr, prefix))
    assert text.startswith(beginning)
    return [text[start:end] for start, end in found.tokens], beginning


@pytest.mark.parametrize("template", PIECEWISE.values(), ids=PIECEWISE)
def test_a_message_is_what_it_adds(template):
    assert located(template, {"messages": [2]})[0] == ["<assistant>words of 2</>"]
    texts, beginning = located(template, {"messages": ["user"]})
    assert texts == ["<user>words of 1</>", "<user>words of 3</>"] and beginning.endswith("words of 3</>")
    first = located(template, {"messages": [0]}, tools="a tool")[0]
    expected = {"tools first": ["[a tool]<system>words of 0</>"], "without system": []}
    name = next(name for name, one in PIECEWISE.items() if one == template)
    assert first == expected.get(name, ["<system>words of 0</>"])


@pytest.mark.parametrize("template", OTHERS.values(), ids=OTHERS)
def test_what_cannot_be_located_is_refused(template):
    with pytest.raises(CompressionError) as caught:
        asyncio.run(locate(Protect(messages=(0, 1)), {"messages": MESSAGES}, tokenizer(template)))
    assert caught.value.reason == "unknown_messages" and caught.value.status == 400


def test_neighbours_and_ranges_are_joined():
    assert located(TURNS, {"messages": [0, 1], "tokens": [[3, 9], [80, 85]]})[0][0] == (
        "<system>words of 0</><user>words of 1</>"
    )
    asked: list[dict[str, Any]] = []
    request = {"messages": MESSAGES, "model": "m", "tools": "t", "temperature": 0.5}
    asyncio.run(locate(Protect(messages=(1, "user", 2)), request, tokenizer(TURNS, asked)))
    assert [len(body["messages"]) for body in asked] == [1, 2, 3, 4]
    rest = {"model": "m", "tools": "t", "add_generation_prompt": False}
    assert all(body == rest | {"messages": body["messages"]} for body in asked)


@pytest.mark.parametrize("messages", [None, "text", [], [1], [{"role": 3}], [{}] * 4])
def test_odd_conversations_have_no_such_message(messages):
    with pytest.raises(CompressionError, match="there is no message 'user'"):
        asyncio.run(locate(Protect(messages=("user",)), {"messages": messages}, tokenizer(TURNS)))


def test_too_many_messages_are_refused():
    messages = MESSAGES[1:2] * (MAX_RANGES + 1)
    with pytest.raises(CompressionError, match=f"{MAX_RANGES + 1} messages are too many; allowed: {MAX_RANGES}"):
        asyncio.run(locate(Protect(messages=("user",)), {"messages": messages}, tokenizer(TURNS)))


def test_a_prompt_with_another_beginning_is_refused():
    """Whatever the chat route renders otherwise than ``/tokenize`` does, ranges of another text are never taken."""
    params = SamplingParams(extra_args=compression("local", budget=8, protect={"tokens": [[0, 3]]}))

    def check(prompt: list[int], prefix: list[int]) -> None:
        PREFIX.set(prefix)
        check_prompt({"type": "token", "prompt_token_ids": prompt}, params)

    copy_context().run(check, [1, 2, 3, 4], [1, 2, 3])
    for prompt in ([1, 2, 9, 4], [1, 2], [2, 3, 4]):
        with pytest.raises(VLLMValidationError, match="does not begin as its messages do"):
            copy_context().run(check, prompt, [1, 2, 3])
