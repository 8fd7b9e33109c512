"""Perplexity of long texts, read token by token with a cache that may be limited."""

import math
import random
from collections.abc import Iterator, Sequence
from typing import Self

from pydantic import Field, model_validator

from vllm_kvmerge.evaluation.tasks.base import Completion, Sample, Task, Tokenizer, register
from vllm_kvmerge.evaluation.tasks.data import choose, read_texts

TRIES = 256
"""Most tokens that a window is moved by to a place where its text is read as the same tokens again."""


@register
class Perplexity(Task):
    """Windows of ``length`` tokens: the first ``prompt`` are the prompt, the others its forced continuation.

    Each window begins with an empty cache. A prompt is read at once, with full attention; what follows is decoded
    token by token, so that a policy with ``decode: bounded`` compresses as it does when it generates. A window's last
    ``stride`` tokens are scored (but no token of a prompt): those that no window before it has scored. All windows
    score equally many tokens, so that the mean of their scores is the mean over tokens.

    WeightedKV (section V-A) takes windows of 4,096, 8,192 and 16,384 tokens with strides of half of that, caches of
    1,024 and 256 entries, 4 of them the first tokens and 508 or 124 the newest, and compresses at every token:
    ``length: 4096``, ``stride: 2048``, a ``prompt`` no longer than the cache, ``budgets: [256]`` and the policy
    ``{policy: weightedkv, selector: h2o, interval: 1, recent_window: 124}``. Which of a window's tokens it counts
    it does not say; here it is those that are new in it, as in Press et al., arXiv 2012.15409.

    Windows lie in one text each and begin ``stride`` tokens apart, or a few more: a window begins where its prompt and
    its whole text are read as the very tokens that they were cut from.
    """

    name = "perplexity"
    source = "WeightedKV, arXiv 2503.01330, section V-A"
    metric = "perplexity (a sample's score: -ln p per token)"
    higher_is_better = False
    needs_logprobs = True

    length: int = Field(4096, ge=2, description="Tokens of a window.")
    prompt: int = Field(64, ge=1, description="Tokens of a window that are read at once, and not scored.")
    stride: int | None = Field(None, ge=1, description="Tokens from one window's start to the next; default: length.")
    text_file: str | None = Field(None, description="One text; or, as .jsonl, one object per line, with a text.")
    dataset: str | None = Field(None, description="Instead: a name on the Hugging Face hub, or a folder.")
    config: str | None = Field(None, description="The data set's configuration.")
    split: str = Field("test", description="The data set's split.")
    field: str = Field("text", description="Which field of the data set, or of a line, holds the text.")
    separator: str | None = Field(None, description="Joins all texts into one, where each is a line or so.")
    documents: int | None = Field(None, ge=1, description="How many texts to draw; default: all.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.prompt >= self.length:
            raise ValueError(f"prompt: must be less than length ({self.length}), got {self.prompt}")
        if self.stride is not None and self.stride > self.length:
            raise ValueError(f"stride: must be at most length ({self.length}), got {self.stride}")
        if (self.text_file is None) == (self.dataset is None):
            raise ValueError("text_file, dataset: exactly one of them must be given")
        return self

    @property
    def num_scored(self) -> int:
        """Tokens that a window scores: its last ones."""
        return min(self.stride or self.length, self.length - self.prompt)

    def samples(self, count: int, seed: int, tokenizer: Tokenizer) -> list[Sample]:
        """All windows of all texts, or ``count`` of them drawn at random, in their order."""
        rng = random.Random(seed)
        samples = [sample for text in self._texts(rng) for sample in self._windows(text, tokenizer)]
        if not samples:
            raise ValueError(f"length: no text has {self.length} tokens; allowed: shorter windows, or a separator")
        return choose(samples, count, rng)

    def score(self, sample: Sample, completion: Completion) -> float:
        """Mean of -ln p over the scored tokens."""
        if len(completion.logprobs) != sample.max_tokens:
            raise ValueError(f"{len(completion.logprobs)} log-probabilities for {sample.max_tokens} tokens")
        scored = completion.logprobs[-self.num_scored :]
        return -math.fsum(scored) / len(scored)

    def summary(self, scores: Sequence[float]) -> float:
        """The perplexity of all scored tokens."""
        return math.exp(super().summary(scores))

    def _windows(self, text: str, tokenizer: Tokenizer) -> Iterator[Sample]:
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        start = 0
        while start + self.length <= len(token_ids):
            for moved in range(TRIES):
                window = token_ids[start + moved : start + moved + self.length]
                if len(window) < self.length:
                    return
                if (halves := self._cut(window, tokenizer)) is not None:
                    break
            else:
                raise ValueError(
                    f"length, prompt: none of {TRIES} windows from token {start} on can be cut: their text is read as "
                    "other tokens"
                )
            prompt, continuation = halves
            yield Sample(prompt, "", [], self.length - self.prompt, continuation)
            start += moved + (self.stride or self.length)

    def _cut(self, window: list[int], tokenizer: Tokenizer) -> tuple[str, str] | None:
        """The texts of a window's prompt and continuation; None if they are not read as its tokens.

        What the tokenizer puts in front of every text, such as ``<s>``, comes before the prompt's tokens.
        """
        prompt, whole = tokenizer.decode(window[: self.prompt]), tokenizer.decode(window)
        front = tokenizer.encode("")
        same = tokenizer.encode(prompt) == front + window[: self.prompt] and tokenizer.encode(whole) == front + window
        return (prompt, whole[len(prompt) :]) if same and whole.startswith(prompt) else None

    def _texts(self, rng: random.Random) -> list[str]:
        if self.text_file is not None:
            texts: Sequence[str] = read_texts("text_file", self.text_file, self.field)
        else:
            texts = self._load_dataset(str(self.dataset))
        chosen = choose(texts, self.documents, rng)
        return chosen if self.separator is None else [self.separator.join(chosen)]

    def _load_dataset(self, name: str) -> Sequence[str]:
        try:
            from datasets import load_dataset
        except ImportError as error:
            raise ValueError("dataset: it is read with datasets: pip install 'vllm-kvmerge[eval]'") from error
        try:
            return load_dataset(name, self.config, split=self.split)[self.field]
        except Exception as error:  # of its many kinds, none is documented
            raise ValueError(f"dataset: cannot load {name}: {error}") from error
