"""LongBench's prompts, cuts and metrics against its definition, worked by hand."""

import json
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from transformers import AutoTokenizer

from tests.evaluation.tasks.tokenizers import BOS, Pieces
from vllm_kvmerge import demo
from vllm_kvmerge.evaluation.tasks.base import TASKS, Completion, Sample, Task
from vllm_kvmerge.evaluation.tasks.longbench import (
    DATASETS,
    classification,
    code_similarity,
    count,
    normalize_answer,
    qa_f1,
    retrieval,
    rouge_l,
    truncate_middle,
)

DATA = Path(__file__).parents[2] / "data" / "eval" / "longbench"


def task(dataset: str, **options: Any) -> Task:
    return TASKS[f"longbench_{dataset}"](**({"data_dir": str(DATA)} | options))


def rows(dataset: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / f"{dataset}.jsonl").read_text().splitlines()]


def score(dataset: str, text: str, references: list[str], classes: list[str] | None = None) -> float:
    data = {} if classes is None else {"all_classes": classes}
    return task(dataset).score(Sample("", "", references, 1, data=data), Completion(text))


def test_the_sixteen_tasks_are_registered() -> None:
    names = {name for name in TASKS if name.startswith("longbench_")}
    assert names == {f"longbench_{dataset}" for dataset in DATASETS} and len(names) == 16
    tokens = {
        32: ["hotpotqa", "2wikimqa", "musique", "triviaqa", "passage_count", "passage_retrieval_en"],
        64: ["multifieldqa_en", "trec", "lcc", "repobench-p"],
        128: ["narrativeqa", "qasper", "samsum"],
        512: ["gov_report", "qmsum", "multi_news"],
    }
    assert {name: entry.max_tokens for name, entry in DATASETS.items()} == {
        name: limit for limit, datasets in tokens.items() for name in datasets
    }
    assert {TASKS[name].metric for name in names} == {
        "F1",
        "ROUGE-L",
        "classification",
        "count",
        "retrieval",
        "code similarity",
    }


# Prompts


def test_a_prompt_about_an_article() -> None:
    first = task("qasper").samples(9, 0, Pieces())[0]
    instruction = (
        "as concisely as you can, using a single phrase or sentence if possible. If the question cannot be answered "
        'based on the information in the article, write "unanswerable". If the question is a yes/no question, answer '
        '"yes", "no", or "unanswerable". Do not provide any explanation.\n\n'
    )
    assert first.context == (
        f"You are given a scientific article and a question. Answer the question {instruction}"
        "Article: Abstract. We study how dyes fade. Method. Dyes were dissolved in ethanol {99%} and left in the sun. "
        "Result. All of them faded.\n\n"
    )
    assert first.question == (
        f" Answer the question based on the above article {instruction}Question: Which solvent do they use?\n\nAnswer:"
    )
    assert first.references == ["ethanol", "They use ethanol"]
    assert first.max_tokens == 128 and first.data == {} and first.continuation is None


def test_a_prompt_of_examples() -> None:
    (sample,) = task("trec").samples(1, 0, Pieces())
    assert sample.prompt == (
        "Please determine the type of the question below. Here are some examples of questions.\n\n"
        "Question: Where is the mill ?\nType: Location\nQuestion: How many wheels has a mill ?\nType: Number\n"
        "Question: Who built the mill ?\nType:"
    )
    assert sample.question == "Question: Who built the mill ?\nType:"
    assert sample.data == {"all_classes": ["Number", "Location", "Person", "Person group"]}


def test_prompts_of_code() -> None:
    """What precedes the line to be completed is context where it is all there is, and asked where it is `input`."""
    (sample,) = task("lcc").samples(1, 0, Pieces())
    assert (
        sample.context
        == 'Please complete the code given below. \ndef area(width, height):\n    """Of a rectangle."""\n'
    )
    assert sample.question == "Next line of code:\n"
    (sample,) = task("repobench-p").samples(1, 0, Pieces())
    assert sample.context.endswith("return width * height\n\n")
    assert sample.question == "from shapes import area\n\ndef volume(width, height, depth):\nNext line of code:\n"


@pytest.mark.parametrize("dataset", DATASETS)
def test_every_prompt_ends_with_what_is_asked(dataset: str, tmp_path: Path) -> None:
    row = {"input": "<asked>", "context": "<text>", "answers": ["a"], "all_classes": None}
    (tmp_path / f"{dataset}.jsonl").write_text(json.dumps(row))
    (sample,) = task(dataset, data_dir=str(tmp_path)).samples(1, 0, Pieces())
    assert sample.prompt == DATASETS[dataset].prompt.replace("{context}", "<text>").replace("{input}", "<asked>")
    assert "<text>" in sample.context and "<asked>" not in sample.context
    assert ("<asked>" in sample.question) == ("{input}" in DATASETS[dataset].prompt)
    assert sample.question.strip()


# Cuts


def test_the_middle_is_left_out() -> None:
    """Of 1 + 40 tokens, special one first, the first and last 10: 9 words and 10 words."""
    tokenizer = Pieces()
    words = [f" {letter}{letter}" for letter in "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMN"]
    context, question = "".join(words[:35]), "".join(words[35:])
    assert len(tokenizer.encode(context + question)) == 41
    assert truncate_middle(context, question, 41, tokenizer) == (context, question)
    for max_length in (20, 21):
        short_context, short_question = truncate_middle(context, question, max_length, tokenizer)
        assert short_context == "".join(words[:9] + words[30:35]) and short_question == question
    assert truncate_middle(context, question, 8, tokenizer) == ("".join(words[:3]), "".join(words[36:])), (
        "half of the length holds less than the question"
    )


@pytest.mark.parametrize("max_length", [60, 101, 160])
def test_cut_prompts_are_the_official_ones(max_length: int) -> None:
    tokenizer = Pieces()
    samples = task("qasper", max_length=max_length).samples(9, 0, tokenizer)
    for sample, whole in zip(samples, task("qasper").samples(9, 0, tokenizer), strict=True):
        tokens = tokenizer.encode(whole.prompt)
        half = max_length // 2
        assert len(tokens) > max_length and tokens[0] == BOS
        assert sample.prompt == tokenizer.decode(tokens[1:half]) + tokenizer.decode(tokens[-half:])
        assert whole.question.endswith(sample.question)


def test_a_question_survives_a_tokenizer_that_loses_words() -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo.model_path())
    context, question = "une , deux ? " * 50, "remember trois ."
    kept, asked = truncate_middle(context, question, 41, tokenizer)
    assert asked == question
    assert len(tokenizer.encode(context)) == 201
    # 20 tokens from the start, <s> and 19 others of which every second is unknown; 20 at the end, 3 of the question.
    assert tokenizer.decode(tokenizer.encode(kept, add_special_tokens=False)).split() == [",", "?"] * 4 + [","] + (
        ["?"] + [",", "?"] * 4
    )


def test_lengths_that_leave_nothing_are_refused() -> None:
    with pytest.raises(ValidationError, match="max_length"):
        task("lcc", max_length=1)


# Data


def test_all_samples_or_some_of_them() -> None:
    everything = task("qasper").samples(3, 0, Pieces())
    assert everything == task("qasper").samples(100, 1, Pieces())
    assert [sample.references for sample in everything] == [row["answers"] for row in rows("qasper")]
    drawn = {seed: task("qasper").samples(2, seed, Pieces()) for seed in range(20)}
    assert drawn[3] == task("qasper").samples(2, 3, Pieces())
    for samples in drawn.values():
        places = [everything.index(sample) for sample in samples]
        assert len(places) == 2 and places == sorted(set(places))
    assert len({samples[0].prompt + samples[1].prompt for samples in drawn.values()}) == 3


def test_one_file() -> None:
    path = str(DATA / "trec.jsonl")
    assert task("trec", data_dir=None, data_file=path).samples(1, 0, Pieces()) == task("trec").samples(1, 0, Pieces())
    with pytest.raises(ValidationError, match="only one of them"):
        task("trec", data_file=path)


def test_download(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The zip of the data set has the same files in its folder `data`."""
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        for path in DATA.iterdir():
            archive.write(path, f"data/{path.name}")
    asked_for = []

    def fake_download(repo: str, file: str, repo_type: str) -> str:
        asked_for.append((repo, file, repo_type))
        return str(tmp_path / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fake_download)
    assert task("qasper", data_dir=None).samples(9, 0, Pieces()) == task("qasper").samples(9, 0, Pieces())
    assert asked_for == [("THUDM/LongBench", "data.zip", "dataset")]

    def offline(*arguments: str, **options: str) -> str:
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", offline)
    with pytest.raises(ValueError, match="data_dir.*no route"):
        task("qasper", data_dir=None).samples(1, 0, Pieces())


@pytest.mark.parametrize("content", [None, "", "no JSON", "[1]", '{"input": "", "context": "", "answers": []}'])
def test_data_that_cannot_be_read(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "lcc.jsonl").write_text(content)
    with pytest.raises(ValueError, match="^data_dir: .*lcc.jsonl"):
        task("lcc", data_dir=str(tmp_path)).samples(1, 0, Pieces())
    with pytest.raises(ValueError, match="^data_file: "):
        task("lcc", data_dir=None, data_file=str(tmp_path / "lcc.jsonl")).samples(1, 0, Pieces())


# Metrics


def test_normalisation() -> None:
    assert normalize_answer(" The  cat's, a DOG; an (owl)! ") == "cats dog owl"
    assert normalize_answer("theatre another") == "theatre another"


@pytest.mark.parametrize(
    ("prediction", "reference", "value"),
    [
        ("The Eiffel Tower.", "eiffel tower", 1.0),
        ("the tall iron tower", "a tower", 2 * (1 / 3) * 1 / (1 / 3 + 1)),
        ("cat cat dog", "cat dog dog", 2 / 3),  # two words in common, of three and of three
        ("", "cat", 0.0),
        ("the", "the", 0.0),  # nothing left of either
    ],
)
def test_f1(prediction: str, reference: str, value: float) -> None:
    assert qa_f1(prediction, reference, []) == pytest.approx(value)


@pytest.mark.parametrize(
    ("prediction", "reference", "value"),
    [
        ("the cat sat", "the cat ran fast", 2 * (2 / 3) * (2 / 4) / (2 / 3 + 2 / 4)),  # "the cat", of 3 and of 4 words
        ("a b. c d", "c d. a b", 1.0),  # each sentence of the reference is found in some sentence
        ("b a", "a b", 0.5),  # one of two words, whatever order is kept
        ("", "a b", 0.0),
        ("...", "a b", 0.0),
    ],
)
def test_rouge_l(prediction: str, reference: str, value: float) -> None:
    assert rouge_l(prediction, reference, []) == pytest.approx(value, abs=1e-6)


def test_rouge_gives_up_on_endless_sentences() -> None:
    assert rouge_l("word " * 550, "other " * 550, []) == 0.0


@pytest.mark.parametrize(
    ("prediction", "reference", "value"),
    [
        ("It is a Location", "Location", 1.0),
        ("Location or Number", "Location", 1 / 2),
        ("location", "Location", 0.0),
        ("Person group", "Person group", 1.0),  # "Person" is part of the right name and does not count
        ("Person group", "Person", 1 / 2),
        ("nothing", "Number", 0.0),
    ],
)
def test_classification(prediction: str, reference: str, value: float) -> None:
    assert classification(prediction, reference, ["Number", "Location", "Person", "Person group"]) == value


def test_classification_skips_a_name_as_the_official_loop_does() -> None:
    """After "a" is removed, "ab" is not looked at, stays, and counts as a second class beside the right one."""
    assert classification("abc", "abc", ["a", "ab", "abc"]) == 1 / 2


@pytest.mark.parametrize(
    ("metric", "prediction", "reference", "value"),
    [
        (retrieval, "Paragraph 7", "Paragraph 7", 1.0),
        (retrieval, "It is 7, or 17, not 3.", "Paragraph 7", 1 / 3),
        (retrieval, "seven", "Paragraph 7", 0.0),
        (count, "There are 12 of 12.", "12", 1.0),
        (count, "12 or 13 or 12 or 1", "12", 1 / 2),
        (count, "012", "12", 0.0),
        (count, "", "12", 0.0),
    ],
)
def test_numbers(metric: Any, prediction: str, reference: str, value: float) -> None:
    assert metric(prediction, reference, []) == value


@pytest.mark.parametrize(
    ("prediction", "reference", "value"),
    [
        ("\n\nreturn x", "return x", 1.0),
        ("```python\n# no\n// neither\nabcd\nreturn x", "bcde", 0.75),  # 3 of 4 characters: 2 * 3 / 8
        ("abc", "abd", 0.67),  # 4 / 6 in whole percent
        ("`x`", "", 1.0),
        ("# only", "return x", 0.0),
    ],
)
def test_similarity_of_code(prediction: str, reference: str, value: float) -> None:
    assert code_similarity(prediction, reference, []) == value


def test_the_best_reference_counts() -> None:
    assert score("qasper", "They use ethanol.", ["ethanol", "They use ethanol"]) == 1.0
    assert score("qasper", "ethanol", ["water", "pure ethanol"]) == pytest.approx(2 / 3)


@pytest.mark.parametrize("dataset", ["trec", "triviaqa", "samsum"])
def test_only_the_first_line_counts_where_there_are_examples(dataset: str) -> None:
    classes = ["Number", "Person"]
    assert score(dataset, "\n\nNumber\nPerson", ["Number"], classes) == pytest.approx(1.0)
    assert score(dataset, " \nNumber", ["Number"], classes) == 0.0, "a line of blanks is a line"


def test_elsewhere_all_lines_count() -> None:
    assert score("qasper", "ethanol\nwater", ["ethanol"]) == pytest.approx(2 / 3)
    assert score("gov_report", "one two\nthree", ["one two three"]) == pytest.approx(1.0)


@pytest.mark.parametrize("path", sorted(DATA.iterdir()), ids=lambda path: path.stem)
def test_a_reference_is_a_perfect_answer(path: Path) -> None:
    for sample in task(path.stem).samples(9, 0, Pieces()):
        for reference in sample.references:
            assert task(path.stem).score(sample, Completion(reference)) == pytest.approx(1.0)
        assert task(path.stem).score(sample, Completion("zzz " * random.Random(0).randint(1, 3))) < 0.3
