"""The demo model's evaluation tasks: what they ask, and what an answer is worth."""

import math

import pytest

from vllm_kvmerge.demo import language
from vllm_kvmerge.demo.train import build_tokenizer
from vllm_kvmerge.evaluation.tasks import demo
from vllm_kvmerge.evaluation.tasks.base import Completion

TOKENIZER = build_tokenizer()
ANSWERING = [demo.DemoRecall(length=400, facts=12), demo.DemoMultikey(length=400)]


def samples(task, count=20, seed=3):
    return task.samples(count, seed, TOKENIZER)


def score(task, sample, words) -> float:
    return task.score(sample, Completion(" " + " ".join(words)))


@pytest.mark.parametrize("task", ANSWERING, ids=lambda task: task.name)
def test_samples_and_scores(task):
    drawn = samples(task)
    assert drawn == samples(task) and drawn != samples(task, seed=4)
    assert samples(task, count=3) == drawn[:3]
    for sample in drawn:
        assert len(TOKENIZER.encode(sample.prompt)) == task.length
        words = sample.references[0].split()
        assert sample.max_tokens == len(words) + 1
        assert score(task, sample, words) == 1.0
        assert score(task, sample, []) == 0.0
        assert score(task, sample, ["sun"] * len(words)) == 0.0
        assert 0 <= score(task, sample, words[: len(words) // 2]) < 1


def flawed(words: list[str], place: int) -> list[str]:
    return [*words[:place], "sun", *words[place + 1 :]]


@pytest.mark.parametrize(
    ("number", "given", "worth"),
    [
        (0, lambda words: [*words, "."], 0.0),  # the whole answer and no more is wanted
        (1, lambda words: flawed(words, 1), 0.75),  # a digit of the first of four facts
    ],
)
def test_what_part_of_an_answer_counts(number, given, worth):
    (sample,) = samples(ANSWERING[number], count=1)
    assert score(ANSWERING[number], sample, given(sample.references[0].split())) == worth


def test_questions_are_drawn_from_all_facts_alike():
    places = []
    for sample in samples(demo.DemoRecall(length=200, facts=4), count=60):
        keys = [part.split()[0] for part in sample.context.split("remember ")[1:]]
        places.append(keys.index(sample.question.split()[1]))
    assert set(places) == {0, 1, 2, 3}


def test_text():
    task = demo.DemoText(length=100, continuation=30)
    for sample in samples(task, count=4):
        assert len(TOKENIZER.encode(sample.prompt)) == 100
        continuation = TOKENIZER.encode(sample.continuation, add_special_tokens=False)
        assert len(continuation) == sample.max_tokens == 30
        assert min(continuation) >= language.FILLER_BASE
    assert task.score(sample, Completion("", [math.log(0.5)] * 30)) == pytest.approx(math.log(2))
    assert not task.higher_is_better and task.needs_logprobs


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (demo.DemoRecall(length=100), "length: 100 tokens cannot hold"),
        (demo.DemoMultikey(facts=2, asked=3), "asked: 3 facts of 2"),
        (demo.DemoRecall(length=40, facts=1, asked_in=0.1), "asked_in: no fact begins in the last 0.1 of 40 tokens"),
    ],
)
def test_options_that_leave_no_room(task, message):
    with pytest.raises(ValueError, match=message):
        samples(task, count=1)


def test_the_fact_asked_for_is_near_the_end():
    for sample in samples(demo.DemoRecall(length=400, facts=12, asked_in=0.2), count=20):
        words = sample.prompt.split()
        assert words.index(words[-1]) >= 320 and words.count(words[-1]) == 2
