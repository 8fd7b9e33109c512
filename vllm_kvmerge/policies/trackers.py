"""Trackers: rank entries by statistics that attention accumulates."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from vllm_kvmerge import ops
from vllm_kvmerge.policies.base import MAX_QUERIES, MAX_TOKENS, Entries, Repetition, ScoreMode, ServedModel, Tracker
from vllm_kvmerge.policies.registry import register

ScoreWindow = Annotated[int, Field(ge=1, le=MAX_TOKENS)] | Literal["all"]
"""Number of the prompt's last queries to score."""


# Far enough from 0 and 1 for float32 to tell the weights of past and present from 0.
EmaDecay = Annotated[
    float, Field(ge=1e-5, le=1.0 - 1e-5, description="Weight of the past in the moving average of scores.")
]
"""Weight alpha of KeepKV eq. 8."""


class ScoringTracker(Tracker):
    """Trackers that score the prompt's last queries."""

    score_window: ScoreWindow = Field(64, description="Number of the prompt's last tokens scored as queries, or 'all'.")

    @property
    def prompt_window(self) -> ScoreWindow:
        return self.score_window


@register
class NoTracker(Tracker):
    """Attention accumulates nothing."""

    name = "none"
    source = "positions alone decide"
    mode = ScoreMode.NONE

    def importance(self, entries: Entries) -> Tensor:
        return torch.zeros_like(entries.scores)


@register
class SumTracker(ScoringTracker):
    """Attention probability accumulated over queries: ``s <- decay * s + a`` (ZSMerge eq. 5; H2O has decay 1).

    ``scores`` holds s. ``aux`` is left to the merger.
    """

    name = "sum"
    source = "H2O; ZSMerge eq. 5"
    mode = ScoreMode.SUM

    decay: float = Field(1.0, ge=0.0, le=1.0, description="Factor applied to the accumulated score at each query.")

    @property
    def update_decay(self) -> float:
        return self.decay

    def importance(self, entries: Entries) -> Tensor:
        return entries.scores


@register
class MeanTracker(ScoringTracker):
    """Mean attention probability over the queries that saw the entry (WeightedKV algorithm 1).

    ``scores`` holds the probability accumulated over queries, summed over the query heads that share the KV head, and
    ``aux`` the number of queries.
    """

    name = "mean"
    source = "WeightedKV algorithm 1"
    mode = ScoreMode.MEAN

    def importance(self, entries: Entries) -> Tensor:
        """-inf for an entry that no query has seen."""
        return torch.where(entries.aux > 0, entries.scores / entries.aux, -torch.inf)


@register
class LogEmaTracker(ScoringTracker):
    """Moving average of the *unnormalised* attention score s = exp(logit), kept as its logarithm (KeepKV eq. 8).

    ``scores`` holds S, the logarithm of the average before bias correction: with ``a = ema_decay``,
    ``S <- logaddexp(S + ln a, logit + ln(1 - a))``. ``aux`` holds t, the number of queries that updated the entry;
    where it is 0, S means nothing.
    """

    name = "log_ema"
    source = "KeepKV eq. 8"
    mode = ScoreMode.LOG_EMA

    ema_decay: EmaDecay = 0.9

    @property
    def update_decay(self) -> float:
        return self.ema_decay

    def importance(self, entries: Entries) -> Tensor:
        """ln(p s_hat): the logarithm of the entry's contribution to attention's denominator."""
        return ops.log_contributions(entries.log_votes, entries.scores, entries.aux, self.ema_decay)


TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]

Prompt = Annotated[list[TokenId], Field(max_length=1024)] | Annotated[str, Field(max_length=4096)] | None
"""None: the model's default; empty until the model is known."""

REPEAT = "\n\nRepeat the previous context exactly."
RESUME = "\n\nRepeat the part of the previous context exactly, starting with"

LARGEST_NORMALIZED = 1e9
"""Score of a context's first tokens, where scores are not probabilities."""

LEAD = 8
"""Tokens before a chunk, other than a context's first, that the model is shown as what it begins after."""


@register
class ReconstructionTracker(Tracker):
    """Largest attention that an entry gets while the model repeats the context (KVzip).

    Once the context has been computed, the model reads it again after itself, one chunk of ``chunk_size`` tokens at a
    time, each after a prompt that asks for it. An entry's score is the largest probability that any query of prompt and
    chunk, of any query head that shares the KV head, gives it. As in the authors' code, the softmax is over the first
    ``num_prefix_tokens`` tokens of the sequence, the chunk where it is in the context, and the tokens that follow the
    context up to the query's own; the rest of the context is attended to, but not counted. Chunks begin behind those
    first tokens, which have the largest score there is. Nothing is accumulated after that. ``normalized`` is KVzip+, by
    which KVzap's models are trained: a probability of query t and query head g for entry i counts as
    a ||W_O^g v_i|| / ||h_t||, with the hidden state h that the layer's attention reads.

    Prompts are texts or token ids. Those of the authors are the default for models with a chat template, whose words
    between a user's and the model's begin the answer; for other models, and where the tokenizer lacks a word of them,
    there are none: the context's own tokens say what to repeat.
    """

    name = "reconstruction"
    source = "KVzip section 3, arXiv:2505.23416"
    mode = ScoreMode.NONE
    repeats_context = True

    chunk_size: int = Field(2000, ge=1, le=MAX_TOKENS, description="Tokens of the context that are repeated at once.")
    repeat_prompt: Prompt = Field(None, description="Prompt for the context's first chunk: token ids or text.")
    resume_prompt: Prompt = Field(
        None, description="Prompt for each further chunk, followed by the 8 tokens before that chunk."
    )
    answer_prompt: Prompt = Field(None, description="Start of the answer, after either prompt.")
    num_prefix_tokens: int = Field(
        4, ge=0, le=MAX_TOKENS, description="First tokens, such as a system prompt, that are kept and not repeated."
    )
    normalized: bool = Field(
        False,
        description="Multiply each probability by ||W_O v|| / ||h||: projected value over the query's hidden state.",
    )

    @property
    def normalizes(self) -> bool:
        return self.normalized

    token_fields = ("repeat_prompt", "resume_prompt", "answer_prompt")

    @classmethod
    def model_defaults(cls, model: ServedModel) -> dict[str, Any]:
        texts = REPEAT, RESUME, model.answer_prefix
        encoded = [None if text is None else model.encode(text) for text in texts]
        return dict(zip(cls.token_fields, [[]] * 3 if None in encoded else encoded, strict=True))

    @property
    def _prompts(self) -> list[list[int]]:
        """Token ids of all prompts; none for one that has not been made tokens."""
        given = (getattr(self, name) for name in self.token_fields)
        return [prompt if isinstance(prompt, list) else [] for prompt in given]

    def repetition(self, context: Sequence[int], index: int) -> Repetition | None:
        start = self.num_prefix_tokens + index * self.chunk_size
        if start >= len(context):
            return None
        end = min(start + self.chunk_size, len(context))
        first, other, answer = self._prompts
        asked = [*other, *context[max(0, start - LEAD) : start]] if index else first
        return Repetition(start, end, self.num_prefix_tokens, [*asked, *answer, *context[start:end]])

    def num_repeated(self, context: int) -> int:
        first, other, answer = map(len, self._prompts)
        asked = max(first, other + LEAD) + answer
        return asked + min(self.chunk_size, context)

    def importance(self, entries: Entries) -> Tensor:
        first = entries.positions < self.num_prefix_tokens
        return entries.scores.masked_fill(first, LARGEST_NORMALIZED if self.normalized else 1.0)


@register
class LookaheadTracker(Tracker):
    """Largest attention that an entry gets from the context's own queries, turned as if the text came again: KVzip's
    scores without its repetition.

    When a model repeats a text, each token looks for its earlier occurrence, and for what followed it. So does its
    query of the first reading, once RoPE puts it behind the text, ``chunk_size`` positions further on or as many as the
    context has. Queries are taken in blocks of ``lookahead`` tokens, and attend to the ``chunk_size`` newest entries
    and all of their own block's, and to the first ``num_prefix_tokens`` of the sequence. They share their probabilities
    with what they would see of the repetition, for which the first reading stands: the same entries up to their own, at
    the true distances. An entry's score is the largest probability that any query of any query head that shares the KV
    head gives it; those first tokens have the largest there is. Only a block's queries are kept.
    """

    name = "lookahead"
    source = "own design, after KVzip section 3, arXiv:2505.23416"
    mode = ScoreMode.NONE
    reads_ahead = True
    needs_rotation = True

    chunk_size: int = Field(2048, ge=1, le=MAX_TOKENS, description="Newest entries that a query attends to.")
    lookahead: int = Field(64, ge=1, le=MAX_QUERIES, description="Tokens whose queries see each other's entries.")
    num_prefix_tokens: int = Field(4, ge=0, le=MAX_TOKENS, description="First tokens, which are kept.")

    @property
    def query_window(self) -> int:
        return self.lookahead

    @property
    def takes_cap(self) -> bool:
        return True

    @property
    def takes_sinks(self) -> bool:
        return True

    @property
    def prompt_window(self) -> ScoreWindow:
        return "all"

    def importance(self, entries: Entries) -> Tensor:
        return entries.scores.masked_fill(entries.positions < self.num_prefix_tokens, 1.0)


@register
class PredictedTracker(Tracker):
    """Scores that a small model predicts from each token's hidden states, one linear layer or MLP per layer (KVzap).

    ``scores`` holds the prediction: the logarithm of the token's KVzip+ score in this head. Generated tokens are scored
    as the prompt's are. The server has to have such a model (``--kvzap``).
    """

    name = "predicted"
    source = "KVzap, arXiv:2601.07891"
    mode = ScoreMode.NONE
    predicts_scores = True

    @property
    def prompt_window(self) -> ScoreWindow:
        return "all"

    def importance(self, entries: Entries) -> Tensor:
        return entries.scores


def attention_mass(tracker: Tracker, entries: Entries) -> Tensor:
    """``[H, n]`` float32: each entry's share of its head's attention, by the tracker's importance; 0 for dead entries.

    Unlike importance it is comparable between heads and layers. All 0 if the tracker knows nothing. Scores of a
    reconstruction are comparable as they are: probabilities of single queries, in heads that saw the same ones. So are
    predicted ones, whose logarithms are.
    """
    importance = tracker.importance(entries).masked_fill(~entries.is_live, -torch.inf)
    if tracker.repeats_context or tracker.reads_ahead:
        return importance.clamp(min=0.0)
    if tracker.predicts_scores:
        return importance.clamp(max=80.0).exp()
    if tracker.mode == ScoreMode.LOG_EMA:
        return importance.softmax(dim=1).nan_to_num(nan=0.0)  # NaN: no entry was ever scored
    mass = importance.clamp(min=0.0)
    return mass / mass.sum(dim=1, keepdim=True).clamp(min=torch.finfo(mass.dtype).tiny)
