"""N-gram repetition, counted by hand."""

import json

import pytest

from vllm_kvmerge.evaluation.tasks.base import TASKS, Completion
from vllm_kvmerge.evaluation.tasks.repetition import NgramRepetition, repetition


@pytest.mark.parametrize(
    ("text", "n", "expected"),
    [
        ("a b c d", 1, 0),
        ("a b a b", 1, 1 / 2),  # a b | a b
        ("a b a b a", 2, 1 / 2),  # ab ba ab ba: two of four are new
        ("a a a a a", 2, 3 / 4),  # aa, four times
        ("A b. a B .", 3, 1 / 4),  # the fourth is the first
        ("one two", 3, 0),
        ("", 1, 0),
        ("It's it's", 1, 1 / 2),
        ("stop. stop.", 1, 1 / 2),
    ],
)
def test_by_hand(text, n, expected):
    assert repetition(text, n) == expected


def test_samples(tmp_path):
    task = NgramRepetition(words=300, max_tokens=50)
    assert TASKS["ngram_repetition"] is NgramRepetition and not task.higher_is_better
    everything = task.samples(10**6, 0, None)
    assert len({sample.prompt for sample in everything}) == len(everything) == 60
    assert all("at least 300 words" in sample.prompt and sample.max_tokens == 50 for sample in everything)
    assert task.samples(5, 1, None) == task.samples(5, 1, None) != task.samples(5, 2, None)
    score = task.score(everything[0], Completion("x y " * 12))  # 24 words, 15 10-grams, 2 different
    assert score == 1 - 2 / 15
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"write {i}", "length": 100}) + "\n" for i in range(7)) + "\n")
    prompts = [s.prompt for s in NgramRepetition(data_file=str(path)).samples(7, 0, None)]
    assert prompts == [f"write {i}" for i in range(7)]
    assert len(NgramRepetition(data_file=str(path)).samples(3, 0, None)) == 3
    path.write_text('{"text": "x"}\n')
    with pytest.raises(ValueError, match="line 1: no object with the field prompt"):
        NgramRepetition(data_file=str(path)).samples(1, 0, None)
    with pytest.raises(ValueError, match="data_file: cannot read"):
        NgramRepetition(data_file=str(tmp_path / "x")).samples(1, 0, None)
