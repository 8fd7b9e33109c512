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
from tests.server.conftest import Server, check_refused, events, serving, wait_until

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
TEMPLATE = "{% if tools %}{{ tools | tojson }}\n{% endif %}"
TEMPLATE += "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
TEXT = " ".join(f"The quick brown fox number {n} jumps over the lazy dog." for n in range(60))


def write_bpe_tokenizer(folder: Path) -> None:
    """Trained on the document that ships with the package."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer = ByteLevelBPETokenizer()
    text = (ROOT / "vllm_kvmerge" / "demo" / "handbook.txt").read_text()
    tokenizer.train_from_iterator([text], vocab_size=800, special_tokens=["<s>", "</s>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = write_llama(tmp_path_factory.mktemp("bpe"), bos_token_id=0, eos_token_id=1)
    write_bpe_tokenizer(folder)
    options = "--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--structured-outputs-config"
    options += '{"backend": "xgrammar", "disable_any_whitespace": true}', "--served-model-name", "demo"
    with serving(*options, command=("-m", "vllm_kvmerge.cli", "serve", str(folder))) as server:
        yield server


def chat(server: Server, **body) -> dict:
    base = {"model": "demo", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 100, "temperature": 0}
    response = server.post("/v1/chat/completions", base | {"kv_compression": LOCAL} | body)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["usage"]["kv_compression"]["entries"]["most"] == LOCAL["budget"]
    return answer["choices"][0]


def check_item(text: str) -> None:
    """Whether it is JSON that matches SCHEMA."""
    found = json.loads(text)
    assert found["name"] in ("fiso", "lume") and 10 <= found["count"] <= 99 and len(found) == 2


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "item", "schema": SCHEMA}}}, r"\{.*\}"),
        ({"response_format": {"type": "json_object"}}, r"\{(.|\n)*"),  # random weights may never close it
        ({"structured_outputs": {"choice": ["fiso", "lume"]}}, "fiso|lume"),
        ({"structured_outputs": {"regex": "[a-f]{3}-[0-9]{4}"}}, "[a-f]{3}-[0-9]{4}"),
    ],
)
def test_answers_have_the_form_that_is_asked_for(bpe, asked, pattern):
    text = chat(bpe, **asked)["message"]["content"]
    assert re.fullmatch(pattern, text)
    if "schema" in str(asked):
        check_item(text)


@pytest.fixture(scope="module")
def no_whitespace(bpe):
    """A bias against tokens with white space: the grammar of tool calls allows any between JSON's tokens, where random
    weights go on with it for ever, and a call that does not end is answered as text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(bpe.process.args[bpe.process.args.index("serve") + 1])
    return {str(token): -100 for token in range(len(tokenizer)) if re.search(r"\s", tokenizer.decode([token]))}


def streamed_call(server, **asked):
    """Arguments of the call that the official client is streamed, and the report."""
    name, arguments = "", ""
    client, options = openai.OpenAI(base_url=server.url + "/v1", api_key="none"), {"include_usage": True}
    with client.chat.completions.create(stream=True, stream_options=options, **asked) as stream:
        for chunk in stream:
            for call in chunk.choices[0].delta.tool_calls or [] if chunk.choices else []:
                name += call.function.name or ""
                arguments += call.function.arguments or ""
    assert name == "count"
    check_item(arguments)
    return arguments, chunk.usage.kv_compression


def test_a_conversation_with_a_tool_by_the_official_client(bpe, no_whitespace):
    messages = [{"role": "user", "content": f"Count. {TEXT}"}]
    asked = {"model": "demo", "tools": [TOOL], "tool_choice": "required", "temperature": 0, "max_tokens": 100}
    asked |= {"parallel_tool_calls": False, "logit_bias": no_whitespace}
    for turn in range(2):
        arguments, told = streamed_call(bpe, messages=messages, extra_body={"kv_compression": LOCAL}, **asked)
        assert told["entries"]["most"] == LOCAL["budget"]
        call = {"id": f"call-{turn}", "type": "function", "function": {"name": "count", "arguments": arguments}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": "17"})
    field = {"policy": "h2o", "budget": 64, "decode": "bounded", "interval": 4}  # is compressed while it is streamed
    arguments, told = streamed_call(bpe, messages=messages[:1], extra_body={"kv_compression": field}, **asked)
    assert told["compressions"] > 3 and told["entries"]["most"] <= 64 + 4
    whole = bpe.post("/v1/chat/completions", asked | {"messages": messages[:1], "kv_compression": field}).json()
    (call,) = whole["choices"][0]["message"]["tool_calls"]
    assert json.loads(arguments) == json.loads(call["function"]["arguments"])
    assert whole["usage"]["kv_compression"]["entries"] == told["entries"]


WORDS = "recall fiso " * 50
CHAT = {"messages": [{"role": "user", "content": WORDS}]}
UNSPELLABLE = [
    ("/v1/chat/completions", CHAT | {"response_format": {"type": "json_object"}}),
    ("/v1/chat/completions", CHAT | {"structured_outputs": {"regex": "[A-Z]{3}#"}}),
    ("/v1/completions", {"prompt": WORDS, "structured_outputs": {"grammar": 'root ::= "{" [A-Z]+ "}"'}}),
    ("/v1/responses", {"input": WORDS, "text": {"format": {"type": "json_schema", "name": "item", "schema": SCHEMA}}}),
]
"""What the demo model's tokenizer has no tokens for, or not in this order."""


def test_what_the_tokenizer_cannot_spell_is_a_bad_request_and_does_no_harm_to_others(server):
    fields, prompt = (None, LOCAL), "lume recall " * 90

    def complete(field: dict | None) -> str:
        return server.complete(prompt, kv_compression=field, max_tokens=60, ignore_eos=True)["choices"][0]["text"]

    def ask(route: str, asked: dict, **more) -> httpx.Response:
        return server.post(route, {"model": "demo"} | asked | more)

    alone = [complete(field) for field in fields]
    with ThreadPoolExecutor(15) as pool:
        together = [pool.submit(complete, field) for field in fields * 3]
        bad = [pool.submit(ask, *case, kv_compression=field) for case in UNSPELLABLE for field in fields]
        stream = pool.submit(ask, *UNSPELLABLE[0], stream=True)
        for one in bad:
            check_refused(one.result(), None, "structured output: no token of the model's vocabulary can come next")
        assert [one.result() for one in together] == alone * 3
    assert events(stream.result())[0]["error"]["code"] == 400
    assert stream.result().text.split("\n\n")[1] == "data: [DONE]"
    assert server.process.poll() is None
    wait_until(lambda: not server.metric("vllm:kv_cache_usage_perc"))
