"""The demo model over long texts: what is scored of them."""

import math

import pytest

from vllm_kvmerge.demo.train import build_tokenizer
from vllm_kvmerge.evaluation.tasks.base import Completion
from vllm_kvmerge.evaluation.tasks.demo_long import DemoPerplexity, DemoRepetition

TOKENIZER = build_tokenizer()


@pytest.mark.parametrize("text", ["documents", "plain"])
@pytest.mark.parametrize("prompt", [1, 40])
def test_windows_of_documents(text, prompt):
    task = DemoPerplexity(length=300, prompt=prompt, scored=100, text=text)
    drawn = task.samples(3, 5, TOKENIZER)
    assert drawn == task.samples(3, 5, TOKENIZER) and drawn[:2] == task.samples(2, 5, TOKENIZER)
    assert drawn != task.samples(3, 6, TOKENIZER)
    for sample in drawn:
        read = TOKENIZER.encode(sample.prompt)
        assert len(read) == prompt
        assert TOKENIZER.encode(sample.prompt + sample.continuation)[:prompt] == read
        assert len(TOKENIZER.encode(sample.prompt + sample.continuation)) == 300 == prompt + sample.max_tokens
    assert any(" </s>" in sample.continuation for sample in drawn) == (text == "documents")


def test_the_last_tokens_are_scored():
    task = DemoPerplexity(length=300, prompt=40, scored=100)
    (sample,) = task.samples(1, 5, TOKENIZER)
    assert task.score(sample, Completion("", [-9.0] * 160 + [-0.5] * 50 + [-1.5] * 50)) == pytest.approx(1.0)
    assert task.summary([1.0, 2.0]) == pytest.approx(math.exp(1.5))
    with pytest.raises(ValueError, match=r"scored: must be at most length - prompt \(260\), got 261"):
        DemoPerplexity(length=300, prompt=40, scored=261)


def test_repetition_of_what_is_continued():
    task = DemoRepetition(length=200, max_tokens=24, n=4)
    drawn = task.samples(3, 5, TOKENIZER)
    assert len({sample.prompt for sample in drawn}) == 3
    assert all(len(TOKENIZER.encode(sample.prompt)) == 200 and sample.max_tokens == 24 for sample in drawn)
    assert task.score(drawn[0], Completion("a b c d e f g h")) == 0.0
    # Nine 4-grams, of which the first four are all there are.
    assert task.score(drawn[0], Completion(" ".join("abcd" * 3))) == pytest.approx(5 / 9)
