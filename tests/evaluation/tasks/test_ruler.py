"""RULER's prompts against its definition: what is in them, where, how often, and how long they are."""

import json
import math
import random
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from transformers import AutoTokenizer

from vllm_kvmerge import demo
from vllm_kvmerge.evaluation.tasks.base import TASKS, Completion, Sample
from vllm_kvmerge.evaluation.tasks.ruler.common_words import CommonWords
from vllm_kvmerge.evaluation.tasks.ruler.frequent_words import FrequentWords
from vllm_kvmerge.evaluation.tasks.ruler.qa import Squad
from vllm_kvmerge.evaluation.tasks.ruler.text import NOISE

DATA = Path(__file__).parents[2] / "data" / "eval"
NIAH = [f"niah_{kind}" for kind in ("single_1", "single_2", "single_3", "multikey_1", "multikey_2", "multikey_3")]
NIAH += ["niah_multivalue", "niah_multiquery"]
SYNTHETIC = [*NIAH, "vt", "cwe", "fwe"]
QA = {"qa_1": str(DATA / "squad.json"), "qa_2": str(DATA / "hotpotqa.json")}
NEEDLE = re.compile(r"One of the special magic (numbers|uuids) for (\S[^:]*?) is: (\S+?)\.(?=\s|$)")


class Pieces:
    """A token is up to four letters, three digits, or one other character, with a space before it if there is one."""

    def encode(self, text: str) -> list[str]:
        return ["<s>", *re.findall(r" ?(?:[A-Za-z]{1,4}|[0-9]{1,3}|[^A-Za-z0-9])| ", text, re.DOTALL)]


@cache
def tokenizer_named(name: str) -> Any:
    return Pieces() if name == "pieces" else AutoTokenizer.from_pretrained(demo.model_path())


def draw(task: str, count: int = 3, seed: int = 0, tokenizer: str = "pieces", **options: Any) -> list[Sample]:
    if task in QA:
        options.setdefault("data_file", QA[task])
    return TASKS[f"ruler_{task}"](**options).samples(count, seed, tokenizer_named(tokenizer))


@pytest.mark.parametrize("tokenizer", ["pieces", "demo"])
@pytest.mark.parametrize("length", [1500, 4096])
@pytest.mark.parametrize("task", SYNTHETIC)
def test_prompt_and_answer_fill_the_length(task: str, length: int, tokenizer: str) -> None:
    samples = draw(task, count=4, tokenizer=tokenizer, length=length)
    totals = [len(tokenizer_named(tokenizer).encode(sample.prompt)) + sample.max_tokens for sample in samples]
    assert len(totals) == 4 and max(totals) <= length
    assert min(totals) > (0.9 if task in ("vt", "cwe") else 0.7) * length, "but for a step or two"


@pytest.mark.parametrize("task", [*SYNTHETIC, *QA])
def test_seeds_decide(task: str) -> None:
    first, again, other = (draw(task, seed=seed, length=1500) for seed in (1, 1, 2))
    assert first == again
    assert all(one.prompt != two.prompt for one, two in zip(first, other, strict=True))
    assert len({sample.prompt for sample in first}) == len(first)
    assert draw(task, count=2, seed=1, length=1500) == first[:2], "how many are drawn changes none"


@pytest.mark.parametrize("task", [*SYNTHETIC, *QA])
def test_the_question_comes_after_the_context(task: str) -> None:
    """Officially what follows the question belongs to the model's turn."""
    (sample,) = draw(task, count=1, length=1500)
    assert sample.context.endswith("\n") and sample.question.endswith(sample.answer_prefix)
    assert sample.answer_prefix.startswith(" The special magic" if task.startswith("niah") else " Answer:")


@pytest.mark.parametrize("task", [*SYNTHETIC, "qa_1"])
def test_too_short_a_length_is_refused(task: str) -> None:
    with pytest.raises(ValueError, match="length"):
        draw(task, length=100)


# Needles


def test_the_official_prompt_of_one_value() -> None:
    (sample,) = draw("niah_single_1", count=1, length=600)
    ((kind, key, value),) = NEEDLE.findall(sample.context)
    assert kind == "numbers" and re.fullmatch(r"[1-9]\d{6}", value)
    before, *lines, nothing = sample.context.split("\n")
    lines.remove(f"One of the special magic numbers for {key} is: {value}.")
    assert set(lines) == {NOISE} and nothing == ""
    assert (before, sample.question) == (
        "A special magic number is hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the number afterwards.",
        f"What is the special magic number for {key} mentioned in the provided text? "
        f"The special magic number for {key} mentioned in the provided text is",
    )
    assert sample.references == [value] and sample.max_tokens == 128


def test_the_official_prompt_of_several_values() -> None:
    (sample,) = draw("niah_multiquery", count=1, length=1000)
    values = {key: value for _, key, value in NEEDLE.findall(sample.context)}
    asked = [next(key for key in values if values[key] == value) for value in sample.references]
    listed = f"{asked[0]}, {asked[1]}, {asked[2]}, and {asked[3]}"
    assert len(values) == 4
    assert sample.context.startswith(
        "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the numbers afterwards.\n"
    )
    assert sample.question == (
        f"What are all the special magic numbers for {listed} mentioned in the provided text? "
        f"The special magic numbers for {listed} mentioned in the provided text are"
    )


@pytest.mark.parametrize("task", NIAH)
def test_what_is_asked_is_there_once(task: str) -> None:
    keys = {"niah_multikey_1": 4, "niah_multikey_2": None, "niah_multikey_3": None, "niah_multiquery": 4}.get(task, 1)
    values_per_key, asked = (4 if task == name else 1 for name in ("niah_multivalue", "niah_multiquery"))
    kind = "uuids" if task.endswith("_3") else "numbers"
    shape = r"[1-9]\d{6}" if kind == "numbers" else r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-\w{12}"
    for sample in draw(task, count=5, length=2000):
        needles = NEEDLE.findall(sample.context)
        by_key: dict[str, list[str]] = {}
        for found_kind, key, value in needles:
            assert found_kind == kind
            assert re.fullmatch(shape if task == "niah_multikey_3" else r"\S+-.+", key)  # adjective-noun
            by_key.setdefault(key, []).append(value)
        if keys is None:
            assert len(by_key) > 15 and sample.context.count("\n") == len(needles) + 1, "nothing but needles"
        else:
            assert len(by_key) == keys
        assert {len(values) for values in by_key.values()} == {values_per_key}
        assert len(sample.references) == asked * values_per_key
        asked_keys = [key for key in by_key if f" {key}" in sample.question]
        assert sorted(sample.references) == sorted(value for key in asked_keys for value in by_key[key])
        assert all(re.fullmatch(shape, value) and sample.prompt.count(value) == 1 for value in sample.references)


def test_needles_lie_at_forty_depths_between_sentences(tmp_path: Path) -> None:
    """With 200 sentences, a needle at depth d is behind the first int(200 * d / 100)."""
    sentences = [f"Here is sentence number {number}." for number in range(200)]
    (essay := tmp_path / "essay.txt").write_text("\n\n".join(sentences))
    task: Any = TASKS["ruler_niah_single_2"](haystack=str(essay))
    draw_words = task.generator(random.Random(3), None)
    found: Counter[int] = Counter()
    for _ in range(1000):
        before, _, after = draw_words(0, 1000).context.split("\n")[1].partition("One of the special magic ")
        start = before.count("sentence")
        assert before.strip() == " ".join(sentences[:start])
        assert after.partition(". ")[2] == " ".join(sentences[start:])
        found[start] += 1
    assert set(found) == {int(200 * round(100 * step / 39) / 100) for step in range(40)}
    assert max(found.values()) < 50, "25 each, and chance"


def test_haystacks_of_one_s_own(tmp_path: Path) -> None:
    """Plain text, or JSON as RULER has it; both are repeated until the prompt is full, white space collapses."""
    (plain := tmp_path / "essay.txt").write_text("Blue  birds sing.\n\nRed ones sleep.")
    (official := tmp_path / "essay.json").write_text(json.dumps({"text": plain.read_text()}))
    one, two = (draw("niah_single_2", length=1000, haystack=str(path)) for path in (plain, official))
    assert one == two
    for sample in one:
        body = re.sub(" +", " ", NEEDLE.sub("", sample.context.split("\n")[1])).strip()
        assert body in "Blue birds sing. Red ones sleep. " * 1000 and len(body) > 1000
    assert "harbour" in draw("niah_single_2")[0].context, "the text that ships"
    for name, content in (("none.txt", None), ("empty.txt", " \n "), ("a.json", "[1]"), ("b.json", '{"essay": "x"}')):
        if content is not None:
            (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match="^haystack: "):
            draw("niah_single_2", haystack=str(tmp_path / name))


def test_more_needles_than_places_are_refused() -> None:
    with pytest.raises(ValidationError, match="40 needles"):
        TASKS["ruler_niah_multikey_1"](num_needle_k=21, num_needle_v=2)


# Variable tracking


def test_the_official_prompt_of_variable_tracking() -> None:
    instruction = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    wording = (
        "Find all variables that are assigned the value {0} in the text above. Answer: According to the chain(s) "
        "of variable assignment in the text above, 5 variables are assigned the value {0}, they are: "
    )
    for sample in draw("vt", count=5, length=1500):
        nothing, example, asked = sample.prompt.split(instruction)
        (solved, solved_value), (chain, value) = check_chain(example, letters=3), check_chain(asked, letters=5)
        assert nothing == "" and sample.references == chain and sample.max_tokens == 30
        assert example.endswith(f"\nQuestion: {wording.format(solved_value)} {' '.join(solved)}\n\n")
        assert asked.endswith(f"\nQuestion: {wording.format(value)}")


def check_chain(text: str, letters: int) -> tuple[list[str], str]:
    """Variables and value of the chain of four hops that is the text's, in order, among repeated sentences."""
    lines = [line for line in text.partition("\nQuestion: ")[0].split("\n") if line != NOISE]
    assert 0 < len(lines) < text.count("\n")
    start = re.fullmatch(r"VAR ([A-Z]+) = ([1-9]\d{4})", lines[0])
    assert start is not None
    chain = [start[1]]
    for line in lines[1:]:
        hop = re.fullmatch(r"VAR ([A-Z]+) = VAR ([A-Z]+) ", line)
        assert hop is not None and hop[2] == chain[-1]
        chain.append(hop[1])
    assert len(set(chain)) == 5 and {len(name) for name in chain} == {letters}
    return chain, start[2]


def test_assignments_lie_anywhere_in_order() -> None:
    """Five of n lines, drawn without replacement, have an assignment before them: on average the k (n + 1) / 6-th."""
    places = np.zeros(5)
    for sample in draw("vt", count=300, tokenizer="demo", length=1500):
        lines = sample.context.rpartition("\n\n")[2].split("\n")[:-1]
        found = [number - earlier for earlier, number in enumerate(np.flatnonzero([line != NOISE for line in lines]))]
        places += (np.array(found) + 1) / (len(lines) - 5 + 1)
    assert np.allclose(places / 300, np.arange(1, 6) / 6, atol=0.03)


def test_several_chains() -> None:
    (sample,) = draw("vt", count=1, length=2000, num_chains=3, num_hops=2)
    assignments = re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?(\w+)", sample.context)
    assert len(assignments) == 9 and "3 variables are assigned" in sample.question
    value_of: dict[str, str] = {}
    for name, origin in assignments:
        value_of[name] = value_of.get(origin, origin)
    asked = re.search(r"assigned the value (\d+) in", sample.question)
    assert asked is not None
    assert set(sample.references) == {name for name, value in value_of.items() if value == asked[1]}
    assert len(sample.references) == 3


# Common words


@pytest.mark.parametrize(
    ("length", "frequencies", "example"), [(4096, (30, 3), (10, 3, 40)), (2000, (6, 1), (3, 1, 20))]
)
def test_frequencies_of_common_words(length: int, frequencies: tuple[int, int], example: tuple[int, int, int]) -> None:
    instruction = (
        "Below is a numbered list of words. In these words, some appear more often than others. "
        "Memorize the ones that appear most often.\n"
    )
    question = (
        "Question: What are the 10 most common words in the above list? "
        "Answer: The top 10 words that appear most often in the list are:"
    )
    for sample in draw("cwe", length=length):
        nothing, solved, asked = sample.prompt.split(instruction)
        assert nothing == "" and asked.endswith(f"\n{question}")
        counts = numbered(asked.removesuffix(f"\n{question}"))
        assert sample.references == list(dict.fromkeys(sample.references)) and len(sample.references) == 10
        assert {counts.pop(word) for word in sample.references} == {frequencies[0]}
        assert set(counts.values()) == {frequencies[1]} and len(counts) > 10

        solved_list, _, solution = solved.partition(f"\n{question} ")
        counts, common = numbered(solved_list), numbered(solution.removesuffix("\n"))
        assert len(counts) == example[2] and len(common) == 10
        assert {counts.pop(word) for word in common} == {example[0]}
        assert set(counts.values()) == {example[1]}


def numbered(text: str) -> Counter[str]:
    """Number of times that each word occurs in a list ``1. word 2. word``; words may have spaces."""
    parts = re.split(r"(?:^| )(\d+)\. ", text)[1:]
    assert [int(number) for number in parts[::2]] == list(range(1, len(parts) // 2 + 1))
    return Counter(parts[1::2])


def test_lists_longer_than_the_word_list(tmp_path: Path) -> None:
    """8,000 words are in the list; then others come in their place."""
    (words := tmp_path / "words.json").write_text(json.dumps({str(n): f"word{n}" for n in range(9_000)}))
    (lines := tmp_path / "words.txt").write_text("\n".join(f"word{n}" for n in range(9_000)))
    for path, shape in ((None, r"\S+-.+"), (words, r"word\d+"), (lines, r"word\d+")):
        generate = CommonWords(words=path and str(path)).generator(random.Random(0), tokenizer_named("pieces"))
        assert all(re.fullmatch(shape, word) for word in generate(0, 9_000).references)
    words.write_text("[]")
    for path in (words, tmp_path / "missing.txt"):
        with pytest.raises(ValueError, match="^words: "):
            draw("cwe", words=str(path))


# Frequent words


@pytest.mark.parametrize("alpha", [2.0, 1.5])
def test_frequencies_follow_zeta(alpha: float) -> None:
    """The k-th word occurs int(n k^-alpha / zeta(alpha)) times; n is read off the most frequent one, the dots."""
    known_zeta = {2.0: math.pi**2 / 6, 1.5: 2.612375348685488}[alpha]
    for sample in draw("fwe", alpha=alpha):
        counts = Counter(sample.context.split("coded words. ")[1].split())
        frequencies = [count for _, count in counts.most_common()]
        assert counts.pop("...") == frequencies[0]
        assert sample.references == [word for word, _ in counts.most_common(3)]
        low, high = (known_zeta * (frequencies[0] + more) for more in (0, 1))
        for rank, frequency in enumerate(frequencies, 1):
            assert math.floor(low * rank**-alpha / known_zeta) <= frequency <= high * rank**-alpha / known_zeta
        assert all(re.fullmatch("[a-z]{6}", word) for word in counts)
        assert len(frequencies) <= (4096 - 50) // 50


def test_the_official_prompt_of_frequent_words() -> None:
    (sample,) = draw("fwe", count=1, length=1000)
    assert sample.context.startswith(
        "Read the following coded text and track the frequency of each coded word. "
        "Find the three most frequently appeared coded words. "
    )
    assert sample.question == (
        "Question: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
        "appeared words in the above coded text? Answer: According to the coded text above, the three most frequently "
        "appeared words are:"
    )
    assert sample.max_tokens == 50


def test_vocabularies_that_cannot_be() -> None:
    with pytest.raises(ValidationError, match="coded_wordlen"):
        FrequentWords(coded_wordlen=2, vocab_size=500)
    with pytest.raises(ValueError, match="length"):
        draw("fwe", length=1000, alpha=9.0)


# Question answering


def test_documents_and_questions_of_squad() -> None:
    samples = draw("qa_1", count=100, length=500)
    paragraphs = [one for article in json.loads(Path(QA["qa_1"]).read_text())["data"] for one in article["paragraphs"]]
    answerable = [(one["context"], asked) for one in paragraphs for asked in one["qas"] if not asked["is_impossible"]]
    assert len(samples) == len(answerable) == 6
    instruction = (
        "Answer the question based on the given documents. Only give me the answer and do not output any other words."
    )
    for sample, (document, asked) in zip(samples, answerable, strict=True):
        assert sample.question == f"{instruction}\n\nQuestion: {asked['question']} Answer:"
        assert sample.context.startswith(f"{instruction}\n\nThe following are given documents.\n\nDocument 1:\n")
        assert document in sample.context and sample.max_tokens == 32
        assert sample.references == [answer["text"] for answer in asked["answers"]]
        numbers = [int(number) for number in re.findall(r"Document (\d+):\n", sample.context)]
        assert numbers == list(range(1, sample.context.count("Document ") + 1))


def test_paragraphs_of_the_same_article_come_first() -> None:
    """Three documents of six: the question's, and the other two of its article, in any order."""
    corpus = Squad.parse(json.loads(Path(QA["qa_1"]).read_text()))
    orders = set()
    for seed in range(30):
        sample = Squad()._draw(random.Random(seed), corpus, 0, 3)
        order = sorted((text for text in corpus.documents if text in sample.context), key=sample.context.index)
        assert len(order) == 3 and all("Orrin" in text for text in order)
        orders.add(tuple(order))
    assert len(orders) == 6
    assert Squad()._draw(random.Random(0), corpus, 0, 14).context.count("\nDocument ") == 14, "others, and all again"


def test_documents_of_hotpotqa(tmp_path: Path) -> None:
    """Questions with documents that are too long are left out."""
    data = json.loads(Path(QA["qa_2"]).read_text())
    samples = draw("qa_2", length=400)
    assert [sample.references for sample in samples] == [[asked["answer"]] for asked in data]
    for sample, asked in zip(samples, data, strict=True):
        for title, lines in asked["context"]:
            assert f":\n{title}\n{''.join(lines)}\n\n" in sample.context
    data[1]["context"][0][1] = ["word " * 1000]
    (path := tmp_path / "hotpotqa.json").write_text(json.dumps([*data, data[0]]))
    samples = draw("qa_2", count=9, length=400, data_file=str(path))
    assert [sample.references for sample in samples] == [["Lenne"], ["Lenne"]]


@pytest.mark.parametrize("task", QA)
@pytest.mark.parametrize("content", [None, "no JSON", "[]", '{"data": []}', '{"data": 3}', '[{"question": "?"}]', "7"])
def test_data_that_cannot_be_read(task: str, content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    if content is not None:
        path.write_text(content)
    for given, said in ((str(path), "^data_file: "), (None, "^data_file: name a local copy of ")):
        with pytest.raises(ValueError, match=said):
            draw(task, data_file=given)


# Scores


@pytest.mark.parametrize(
    ("references", "text", "all_of_them", "any_of_them"),
    [
        (["Paris"], "It is PARIS.", 1.0, 1.0),
        (["1234567", "7654321"], "1234567, 765432", 0.5, 1.0),
        (["a1", "b2", "c3", "d4"], "d4 c3 a1", 0.75, 1.0),
        (["a1", "b2"], "b2", 0.5, 1.0),
        (["ABCDE"], "", 0.0, 0.0),
        (["two words"], "two\nwords", 0.0, 0.0),
        (["x\ny"], " x\ty\x00", 1.0, 1.0),
    ],
)
def test_scores(references: list[str], text: str, all_of_them: float, any_of_them: float) -> None:
    """string_match_all counts references found, string_match_part asks for one; control characters are line ends."""
    sample = Sample("", "", references, 10)
    for tasks, metric, expected in (
        (SYNTHETIC, "string_match_all", all_of_them),
        (QA, "string_match_part", any_of_them),
    ):
        for task in tasks:
            assert TASKS[f"ruler_{task}"]().score(sample, Completion(text)) == expected
            assert TASKS[f"ruler_{task}"].metric == metric
