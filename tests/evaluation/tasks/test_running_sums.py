"""Partial sums, counted by hand."""

from vllm_kvmerge.demo.train import build_tokenizer
from vllm_kvmerge.evaluation.tasks.base import Completion
from vllm_kvmerge.evaluation.tasks.running_sums import RunningSums


def test_right_lines():
    task = RunningSums(goods=6)
    (sample,) = task.samples(1, 0, build_tokenizer())
    (answer,) = sample.references
    assert sample.question.endswith(sample.answer_prefix) and sample.answer_prefix.count("\n") == 2
    assert task.score(sample, Completion(answer)) == 1 and task.score(sample, Completion("")) == 0
    assert task.samples(2, 0, build_tokenizer())[0] == sample != task.samples(1, 1, build_tokenizer())[0]
    lines = answer.split("\n")
    name, rest = lines[-2].split(": ")
    before, price = (int(number) for number in rest.split(" = ")[0].split(" + "))
    last, rest = lines[-1].split(": ")
    last_price = int(rest.split(" = ")[0].split(" + ")[1])
    assert task.score(sample, Completion("\n".join([*lines[:-2], lines[-1]]))) == 1 / 3  # it follows no sum
    wrong = before + price + 7
    lines[-2] = f"{name}: {before} + {price} = {wrong}"
    lines[-1] = f"{last}: {wrong} + {last_price} = {wrong + last_price}"
    assert task.score(sample, Completion("\n".join(lines))) == 2 / 3, "an error counts once"
    lines[-1] = f"{last}: {wrong} + {last_price + 1} = {wrong + last_price + 1}"
    assert task.score(sample, Completion("\n".join(lines))) == 1 / 3
