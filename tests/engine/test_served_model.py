"""What a model's tokenizer and chat template make of KVzip's prompts."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast
from vllm.config import ModelConfig

from vllm_kvmerge.engine.served_model import EngineModel
from vllm_kvmerge.policies.trackers import REPEAT, RESUME
from vllm_kvmerge.request.spec import CompressionError, CompressionSpec, parse_compression

TEMPLATE = """{{ '<s> ' }}{% for message in messages %}{{ '[user] ' + message['content'] + ' [end] ' }}{% endfor %}
{%- if add_generation_prompt %}{{ '[model] ' }}{% endif %}"""
WORDS = ["<unk>", "<s>", "[user]", "[end]", "[model]", *dict.fromkeys(f"{REPEAT} {RESUME}".split())]


def served(folder: Path, words: list[str], template: str | None, skip_tokenizer_init: bool = False) -> EngineModel:
    """A model whose tokenizer knows these words alone."""
    ids = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", chat_template=template).save_pretrained(
        folder
    )
    (folder / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    return EngineModel(ModelConfig(str(folder), skip_tokenizer_init=skip_tokenizer_init))


def prompts(model: EngineModel, **fields: Any) -> list[list[int]]:
    """The prompts of a request, as they are resolved and as whoever parses its text again has them."""
    config = parse_compression({"policy": "kvzip", **fields})
    assert config is not None
    resolved = config.for_model(model)
    again = parse_compression(resolved.text)
    assert again is not None

    def of(config: CompressionSpec) -> list[list[int]]:
        return [getattr(config.policy.tracker, name) for name in ("repeat_prompt", "resume_prompt", "answer_prompt")]

    assert of(again) == of(resolved)
    return of(resolved)


def ids(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


def test_a_chat_template_gives_the_authors_prompts(tmp_path: Path) -> None:
    """The words between what a user says and what the model answers begin the answer."""
    model = served(tmp_path, WORDS, TEMPLATE)
    assert model.answer_prefix == " [end] [model] "
    repeat, resume, answer = ids(REPEAT), ids(RESUME), ids("[end] [model]")
    assert prompts(model) == [repeat, resume, answer]
    assert min(map(len, (repeat, resume, answer))) > 1
    # One that a request gives, be it an empty one, takes the place of its default alone.
    assert prompts(model, repeat_prompt="previous exactly.") == [ids("previous exactly."), resume, answer]
    assert prompts(model, answer_prompt=[], resume_prompt=[7]) == [repeat, [7], []]


@pytest.mark.parametrize(
    ("words", "template"),
    [
        (WORDS, None),
        ([word for word in WORDS if word != "exactly."], TEMPLATE),
        ([word for word in WORDS if word != "[model]"], TEMPLATE),
        (WORDS, "{{ raise_exception('no user may speak') }}"),
        (WORDS, "{{ '<s> [model] ' }}"),
    ],
)
def test_without_words_for_all_of_them_there_are_no_prompts(tmp_path: Path, words: list[str], template: str) -> None:
    model = served(tmp_path, words, template)
    assert prompts(model) == [[], [], []]
    assert prompts(model, repeat_prompt="previous context") == [model.encode("previous context"), [], []]


def test_a_text_that_cannot_be_encoded_is_refused_by_name(tmp_path: Path) -> None:
    known, skipped = served(tmp_path, WORDS, TEMPLATE), served(tmp_path, WORDS, TEMPLATE, skip_tokenizer_init=True)
    assert (skipped.encode("previous"), skipped.answer_prefix) == (None, None)
    assert prompts(skipped) == [[], [], []]
    assert prompts(skipped, resume_prompt=[3, 4]) == [[], [3, 4], []]
    for model, text in ((known, "previous nonsense"), (skipped, "previous")):
        with pytest.raises(CompressionError, match=f"cannot encode '{text}'; allowed: token ids") as caught:
            prompts(model, resume_prompt=text)
        assert (caught.value.param, caught.value.reason) == ("kv_compression.resume_prompt", "invalid_value")
        assert caught.value.status == 400
