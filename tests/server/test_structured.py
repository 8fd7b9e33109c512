"""Structured output and tool calls beside compression: with a real byte-level BPE tokenizer and random weights, and
with the demo model, whose tokenizer cannot spell most of it."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from tests.random_model import write_llama
from tests.server.conftest import Server, serving, wait_until

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
LOCAL = {"policy": "local", "budget": 64}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["fiso", "lume"]}, "count": {"type": "integer", "minimum": 10, "maximum": 99}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "count", "description": "Counts things.", "parameters": SCHEMA, "strict": True},
}
NAMED = {"type": "function", "function": {"name": "count"}}
TEMPLATE = "{% if tools %}{{ tools | tojson }}\n{% endif %}"
TEMPLATE += "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
TEXT = " ".join(f"The quick brown fox number {n} jumps over the lazy dog." for n in range(60))


def write_bpe_tokenizer(folder: Path) -> None:
    """Trained on the document that ships with the package."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer = ByteLevelBPETokenizer()
    text = (ROOT / "vllm_kvmerge" / "demo" / "handbook.txt").read_text()
    tokenizer.train_from_iterator([text], vocab_size=800, special_tokens=["<s>", "</s>", "<think>", "</think>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = write_llama(tmp_path_factory.mktemp("bpe"), bos_token_id=0, eos_token_id=1)
    write_bpe_tokenizer(folder)
    options = "--served-model-name", "demo"
    whitespace = "--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}'
    tools = "--enable-auto-tool-choice", "--tool-call-parser", "hermes"
    with serving(*options, *whitespace, *tools, command=("-m", "vllm_kvmerge.cli", "serve", str(folder))) as server:
        yield server


def chat(server: Server, **body) -> dict:
    body = {"model": "demo", "messages": [{"role": "user", "content": TEXT}], "kv_compression": LOCAL} | body
    response = server.post("/v1/chat/completions", {"max_tokens": 100, "temperature": 0} | body)
    assert response.status_code == 200, response.text
    answer = response.json()
    if body["kv_compression"] is not None:
        assert answer["usage"]["kv_compression"]["entries"]["most"] == LOCAL["budget"]
    return answer["choices"][0]


def check_item(text: str) -> None:
    """Whether it is JSON that matches SCHEMA."""
    found = json.loads(text)
    assert found["name"] in ("fiso", "lume") and 10 <= found["count"] <= 99 and len(found) == 2


def test_a_json_schema(bpe):
    schema = {"type": "json_schema", "json_schema": {"name": "item", "schema": SCHEMA}}
    check_item(chat(bpe, response_format=schema)["message"]["content"])


def test_a_json_object(bpe):
    choice = chat(bpe, response_format={"type": "json_object"}, max_tokens=60)
    assert choice["message"]["content"].startswith("{")  # random weights may never close it
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)


def test_a_choice(bpe):
    assert chat(bpe, structured_outputs={"choice": ["fiso", "lume"]})["message"]["content"] in ("fiso", "lume")


def test_a_regular_expression(bpe):
    pattern = "[a-f]{3}-[0-9]{4}"
    assert re.fullmatch(pattern, chat(bpe, structured_outputs={"regex": pattern})["message"]["content"])


@pytest.fixture(scope="module")
def no_whitespace(bpe):
    """A bias against tokens with white space: the grammar of tool calls allows any between JSON's tokens, where random
    weights go on with it for ever, and a call that does not end is answered as text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(bpe.process.args[bpe.process.args.index("serve") + 1])
    return {str(token): -100 for token in range(len(tokenizer)) if re.search(r"\s", tokenizer.decode([token]))}


@pytest.mark.parametrize("field", [LOCAL, None])
@pytest.mark.parametrize("tool_choice", ["required", NAMED])
def test_a_tool_call(bpe, no_whitespace, tool_choice, field):
    asked = {"tools": [TOOL], "tool_choice": tool_choice, "parallel_tool_calls": False, "logit_bias": no_whitespace}
    (call,) = chat(bpe, **asked, kv_compression=field)["message"]["tool_calls"]
    assert call["function"]["name"] == "count"
    check_item(call["function"]["arguments"])


def test_a_conversation_with_a_tool_by_the_official_client(bpe, no_whitespace):
    """A call, streamed, whose result is part of the next prompt."""
    client = openai.OpenAI(base_url=bpe.url + "/v1", api_key="none")
    messages = [{"role": "user", "content": f"Count. {TEXT}"}]
    asked = {"model": "demo", "tools": [TOOL], "tool_choice": "required", "temperature": 0, "max_tokens": 100}
    asked |= {"parallel_tool_calls": False, "logit_bias": no_whitespace, "extra_body": {"kv_compression": LOCAL}}
    for turn in range(2):
        name, arguments = "", ""
        with client.chat.completions.create(
            messages=messages, stream=True, stream_options={"include_usage": True}, **asked
        ) as stream:
            for chunk in stream:
                for call in chunk.choices[0].delta.tool_calls or [] if chunk.choices else []:
                    name += call.function.name or ""
                    arguments += call.function.arguments or ""
        assert chunk.usage.kv_compression["entries"]["most"] == LOCAL["budget"]
        assert name == "count"
        check_item(arguments)
        call = {"id": f"call-{turn}", "type": "function", "function": {"name": name, "arguments": arguments}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": "17"})


def test_a_tool_call_is_compressed_while_it_is_streamed(bpe, no_whitespace):
    field = {"policy": "h2o", "budget": 64, "decode": "bounded", "interval": 4}
    asked = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "logit_bias": no_whitespace}
    asked |= {"model": "demo", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 100, "temperature": 0}
    whole = bpe.post("/v1/chat/completions", asked | {"kv_compression": field}).json()
    client = openai.OpenAI(base_url=bpe.url + "/v1", api_key="none")
    arguments, more = "", {"extra_body": {"kv_compression": field}, "stream_options": {"include_usage": True}}
    with client.chat.completions.create(stream=True, **asked, **more) as stream:
        for chunk in stream:
            for call in chunk.choices[0].delta.tool_calls or [] if chunk.choices else []:
                arguments += call.function.arguments or ""
    told = whole["usage"]["kv_compression"]
    assert told["compressions"] > 3 and told["entries"]["most"] <= 64 + 4
    assert chunk.usage.kv_compression["entries"] == told["entries"]
    (call,) = whole["choices"][0]["message"]["tool_calls"]
    assert json.loads(arguments) == json.loads(call["function"]["arguments"])
    check_item(arguments)


def test_a_session_changes_nothing(bpe):
    def answer(**more) -> tuple[str, dict]:
        body = {"model": "demo", "prompt": f"In a session. {TEXT}", "max_tokens": 20, "kv_compression": LOCAL}
        found = bpe.post("/v1/completions", body | more).json()
        return found["choices"][0]["text"], found["usage"]["kv_compression"]["entries"]

    plain = answer(temperature=0)
    assert answer(temperature=0, session_id="one") == answer(temperature=0, vllm_xargs={"session_id": "two"}) == plain


def test_reasoning_is_told_apart(bpe):
    """A model that never stops to think: all of its answer is reasoning, the same as without a parser."""
    thinking = {"kv_compression": LOCAL, "logit_bias": {"3": -100}}  # of </think>, which a random model may choose
    folder = bpe.process.args[bpe.process.args.index("serve") + 1]
    options = "--served-model-name", "demo", "--reasoning-parser", "deepseek_r1"
    with serving(*options, command=("-m", "vllm_kvmerge.cli", "serve", folder)) as server:
        thought = chat(server, **thinking)["message"]
        streamed = {"model": "demo", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 100}
        events = server.post("/v1/chat/completions", streamed | thinking | {"temperature": 0, "stream": True})
    said = chat(bpe, **thinking)["message"]
    assert said["content"] and not thought["content"] and thought["reasoning"] == said["content"]
    lines = [line.removeprefix("data: ") for line in events.text.splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"] for line in lines for choice in json.loads(line)["choices"]]
    assert "".join(delta.get("reasoning") or "" for delta in deltas) == said["content"]


UNSPELLABLE = [
    ("/v1/chat/completions", {"response_format": {"type": "json_object"}}),
    ("/v1/chat/completions", {"structured_outputs": {"regex": "[A-Z]{3}#"}}),
    ("/v1/completions", {"structured_outputs": {"grammar": 'root ::= "{" [A-Z]+ "}"'}}),
    ("/v1/responses", {"text": {"format": {"type": "json_schema", "name": "item", "schema": SCHEMA}}}),
]
"""What the demo model's tokenizer has no tokens for, or not in this order."""


def ask_unspellable(server: Server, case: int, **more) -> httpx.Response:
    route, asked = UNSPELLABLE[case]
    prompt = {"/v1/completions": "prompt", "/v1/responses": "input"}.get(route, "messages")
    text = "recall fiso " * (50 + case)
    body = {"model": "demo", prompt: [{"role": "user", "content": text}] if prompt == "messages" else text}
    return server.post(route, body | asked | more)


@pytest.mark.parametrize("field", [None, LOCAL])
@pytest.mark.parametrize("case", range(len(UNSPELLABLE)))
def test_what_the_tokenizer_cannot_spell_is_a_bad_request(server, case, field):
    """HTTP 500 of vLLM itself, which ends the request once no token is allowed."""
    answer = ask_unspellable(server, case, kv_compression=field)
    error = answer.json()["error"]
    assert answer.status_code == error["code"] == 400 and error["type"] == "BadRequestError"
    assert error["message"].startswith("structured output: no token of the model's vocabulary can come next")


def test_a_stream_that_cannot_be_spelled_ends_with_the_error(server):
    events = ask_unspellable(server, 0, stream=True).text.split("\n\n")
    assert json.loads(events[0].removeprefix("data: "))["error"]["code"] == 400
    assert events[1] == "data: [DONE]"


def test_requests_that_cannot_be_spelled_do_no_harm_to_others(server):
    bodies = [{"kv_compression": field, "max_tokens": 60, "ignore_eos": True} for field in (None, LOCAL)]
    prompt = "lume recall " * 90

    def complete(body: dict) -> str:
        return server.complete(prompt, **body)["choices"][0]["text"]

    alone = [complete(body) for body in bodies]
    with ThreadPoolExecutor(14) as pool:
        together = [pool.submit(complete, body) for body in bodies * 3]
        bad = [pool.submit(ask_unspellable, server, case, kv_compression=LOCAL) for case in (0, 1, 2, 3) * 2]
        assert [one.result().status_code for one in bad] == [400] * 8
        assert [one.result() for one in together] == alone * 3
    assert server.process.poll() is None
    wait_until(lambda: not server.metric("vllm:kv_cache_usage_perc"))
