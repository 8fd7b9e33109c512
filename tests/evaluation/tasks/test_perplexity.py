"""Windows of the perplexity task, with tokenizers whose tokens are words, pieces of words and bytes."""

import json
import math
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from vllm_kvmerge import demo
from vllm_kvmerge.evaluation.tasks.base import TASKS, Completion
from vllm_kvmerge.evaluation.tasks.perplexity import Perplexity

DEMO_TEXT = Path(__file__).parents[2] / "data/eval/demo-text.txt"

SENTENCES = (
    "The ferryman's daughter counted 1,204 boats before breakfast; none of them came back.",
    "“Überall Nebel,” wrote the captain, “and no lighthouse until Åland.”",
    "Nobody unhurriedly unwrapped the unbelievably ungainly umbrella 🌂 that she'd mislaid.",
    "def sail(boat, knots=7):\n    return boat.name + ' at ' + str(knots)",
)


def text_for(tokenizer, seed: int, sentences: int = 120) -> str:
    """Text that the tokenizer knows the words of; None: one that knows pieces of words."""
    if tokenizer is not None and "remember" in tokenizer.get_vocab():
        return " ".join(DEMO_TEXT.read_text().split()[500 * seed :][: 12 * sentences])
    rng = np.random.default_rng(seed)
    return " ".join(f"{rng.integers(10**6)} {SENTENCES[rng.integers(len(SENTENCES))]}" for _ in range(sentences))


def demo_tokenizer():
    return AutoTokenizer.from_pretrained(demo.model_path(), local_files_only=True)


def train(pre_tokenizer, decoder, **options) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>" if not options else None))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoder
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=["<s>", "<unk>"], show_progress=False, **options)
    tokenizer.train_from_iterator([text_for(None, 0)], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")


@pytest.fixture(scope="module", params=["words", "bytes", "sentencepiece"])
def tokenizer(request):
    """The demo model's; one as GPT-2 and Llama 3 have; one that, as Llama 2's, marks the start of words and of text."""
    if request.param == "words":
        return demo_tokenizer()
    if request.param == "bytes":
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        return train(pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel(), initial_alphabet=alphabet)
    return train(pre_tokenizers.Metaspace(), decoders.Metaspace())


@pytest.mark.parametrize(
    ("length", "prompt", "stride", "num_scored"),
    [(48, 16, None, 32), (64, 1, None, 63), (33, 32, None, 1), (64, 8, 32, 32), (64, 8, 60, 56), (64, 8, 64, 56)],
)
def test_windows_tile_the_text(tmp_path, tokenizer, length, prompt, stride, num_scored):
    """A stride makes them overlap, but no token is scored twice."""
    (path := tmp_path / "text.txt").write_text(text_for(tokenizer, 1))
    task = Perplexity(length=length, prompt=prompt, stride=stride, text_file=str(path))
    samples = task.samples(10**6, 0, tokenizer)
    token_ids = tokenizer.encode(path.read_text(), add_special_tokens=False)
    assert len(samples) > 0.8 * len(token_ids) / (stride or length) and task.num_scored == num_scored
    ends, place = [], 0
    for sample in samples:
        prompt_ids, whole = tokenizer.encode(sample.prompt), tokenizer.encode(sample.prompt + sample.continuation)
        continuation_ids = whole[len(prompt_ids) :]
        assert whole[: len(prompt_ids)] == prompt_ids
        assert (prompt_ids[0], len(prompt_ids)) == (tokenizer.bos_token_id, prompt + 1)
        assert len(continuation_ids) == sample.max_tokens == length - prompt
        window = prompt_ids[1:] + continuation_ids
        start = next(i for i in range(place, len(token_ids)) if token_ids[i : i + length] == window)
        assert start < place + 64, "nearly nothing is left out"
        ends.append(start + length)
        place = start + (stride or length)
    assert all(end + num_scored <= later for end, later in pairwise(ends))
    assert len(token_ids) - place < length + 64


def test_the_seed_decides_which_windows_and_documents(tmp_path, tokenizer):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"body": text_for(tokenizer, seed, 40)}) + "\n" for seed in range(8)))
    options = {"length": 96, "prompt": 4, "text_file": str(path), "field": "body"}
    task = Perplexity(**options)
    assert task.samples(5, 3, tokenizer) == task.samples(5, 3, tokenizer)
    everything = task.samples(10**6, 3, tokenizer)
    drawn = [[everything.index(one) for one in task.samples(5, seed, tokenizer)] for seed in range(6)]
    assert all(sorted(places) == places and len(set(places)) == 5 for places in drawn)
    assert len(set(map(tuple, drawn))) > 1
    some = Perplexity(**options, documents=3).samples(10**6, 1, tokenizer)
    assert all(sample in everything for sample in some) and 0 < len(some) < len(everything) / 2


def test_a_separator_joins_short_texts(tmp_path):
    path = tmp_path / "lines.jsonl"
    words = DEMO_TEXT.read_text().split()[:90]
    path.write_text("".join(json.dumps({"text": " ".join(words[i : i + 30])}) + "\n" for i in range(0, 90, 30)))
    options = {"length": 40, "prompt": 4, "text_file": str(path)}
    with pytest.raises(ValueError, match="length: no text has 40 tokens"):
        Perplexity(**options).samples(1, 0, demo_tokenizer())
    samples = Perplexity(**options, separator=" ").samples(9, 0, demo_tokenizer())
    assert [(s.prompt + s.continuation).split() for s in samples] == [words[:40], words[40:80]]


class Plain:
    """Ids are characters."""

    def encode(self, text, **_):
        return [ord(char) for char in text]

    def decode(self, token_ids, **_):
        return "".join(map(chr, token_ids))


class Sloppy(Plain):
    """Does not read what it writes: decoding swaps two characters."""

    def decode(self, token_ids, **_):
        return super().decode(token_ids).translate({ord("a"): "b", ord("b"): "a"})


def test_a_tokenizer_that_cannot_give_back_its_text_is_refused(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("xyz" * 20 + "ab" * 500)
    task = Perplexity(length=20, prompt=5, text_file=str(path))
    with pytest.raises(ValueError, match=r"length, prompt: none of 256 windows from token 60 on"):
        task.samples(10, 0, Sloppy())
    path.write_text("xyz" * 20)
    assert len(task.samples(10, 0, Sloppy())) == 3


def test_scores_by_hand(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("abcdefgh")
    task = Perplexity(length=8, prompt=2, stride=4, text_file=str(path))
    assert TASKS["perplexity"] is Perplexity and task.needs_logprobs and not task.higher_is_better
    sample = task.samples(1, 0, Plain())[0]
    assert (sample.prompt, sample.continuation, sample.max_tokens) == ("ab", "cdefgh", 6)
    logprobs = [-100.0, -100.0, *(math.log(p) for p in (1 / 2, 1 / 4, 1 / 8, 1 / 4))]
    score = task.score(sample, Completion("", logprobs))
    assert score == pytest.approx(2 * math.log(2))  # (1 + 2 + 3 + 2) / 4 bits
    assert task.summary([score]) == pytest.approx(4)
    # The perplexity of two windows is that of all their tokens, not the mean of theirs.
    assert task.summary([math.log(2), math.log(8)]) == pytest.approx(4)
    with pytest.raises(ValueError, match="5 log-probabilities for 6 tokens"):
        task.score(sample, Completion("", logprobs[1:]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 8, "prompt": 8, "text_file": "x"}, "prompt: must be less than length"),
        ({"length": 8, "prompt": 2, "stride": 9, "text_file": "x"}, "stride: must be at most length"),
        ({"length": 8, "prompt": 2}, "exactly one of them"),
        ({"length": 8, "prompt": 2, "text_file": "x", "dataset": "y"}, "exactly one of them"),
    ],
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(ValidationError, match=message):
        Perplexity(**options)


def test_files_that_cannot_be_read(tmp_path, monkeypatch):
    def draw(**options) -> None:
        Perplexity(length=8, prompt=2, **options).samples(1, 0, Plain())

    with pytest.raises(ValueError, match="text_file: cannot read .*missing.txt"):
        draw(text_file=str(tmp_path / "missing.txt"))
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "abcdefghij"}\n\n{"body": "x"}\n')
    with pytest.raises(ValueError, match="line 3: no object with a text in text"):
        draw(text_file=str(path))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="dataset: it is read with datasets"):
        draw(dataset="someone/something")
