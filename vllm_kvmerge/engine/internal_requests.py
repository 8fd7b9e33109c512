"""Internal requests, which vLLM schedules like any other, but which no client has sent."""

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from vllm_kvmerge.engine.messages import Repeat
from vllm_kvmerge.policies.base import Tracker

FIRST = -(1 << 31)
"""Priority over all users' requests, which wait for none of them, where the scheduler goes by priorities."""

LAST = (1 << 31) - 1
"""Priority below all users' requests."""


class InternalRequest(Request):
    """A request that computes a prompt for another one. None of its blocks is found by others. It generates nothing,
    and ends with the step that computes its last token."""

    @property
    def is_scheduled(self) -> bool:
        """True if the step that computes its last token has been scheduled."""
        return self.num_computed_tokens >= self.num_prompt_tokens


class RepeatingRequest(InternalRequest):
    """The request that repeats chunk ``index`` of a ``parent``'s context, its first ``context`` tokens.

    It reads the parent's blocks of the context, as if it had hit them in the prefix cache, and computes the rest like
    any prompt.
    """

    def __init__(
        self, parent: Request, key: bytes | None, context: int, chunk: Repeat, index: int, tokens: list[int]
    ) -> None:
        # Of several runs through the same chunks, the worker may still know an earlier one that has been preempted.
        name = f"{parent.request_id}/repetition-{parent.num_preemptions}-{index}"
        super().__init__(
            request_id=name,
            prompt_token_ids=tokens,
            # Its blocks are the parent's: no lookup, none that counts as one.
            sampling_params=SamplingParams(max_tokens=1, temperature=0.0, skip_reading_prefix_cache=True),
            pooling_params=None,
            client_index=parent.client_index,
            arrival_time=parent.arrival_time,
            lora_request=parent.lora_request,
            priority=FIRST,
        )
        self.parent, self.key, self.context, self.chunk, self.index = parent, key, context, chunk, index

    @classmethod
    def of(
        cls, parent: Request, tracker: Tracker, key: bytes | None, context: int, index: int
    ) -> "RepeatingRequest | None":
        """The request for chunk ``index`` of the parent's first ``context`` tokens; None: there is no such chunk.

        key: of the scores of the parent's context; None: they are not kept.
        """
        assert parent.prompt_token_ids is not None
        tokens = parent.prompt_token_ids[:context]
        repetition = tracker.repetition(tokens, index)
        if repetition is None:
            return None
        where = context, repetition.start, repetition.end, repetition.sinks
        chunk = Repeat(parent.request_id, *where, tracker.normalizes)
        return cls(parent, key, context, chunk, index, tokens + repetition.tokens)


class VerifyingRequest(InternalRequest):
    """The request that computes an answer's tokens with the full cache, after the same prompt.

    answer: token ids. may_evict: blocks that only the prefix cache holds. It may hit blocks there up to the token whose
    logits are the first to be compared.
    """

    def __init__(self, name: str, parent: Request, answer: list[int], may_evict: bool, hash_block_size: int) -> None:
        assert parent.prompt_token_ids is not None
        super().__init__(
            request_id=name,
            # What follows the answer's last token is not compared.
            prompt_token_ids=parent.prompt_token_ids + answer[:-1],
            sampling_params=SamplingParams(max_tokens=1, temperature=0.0),
            pooling_params=None,
            client_index=parent.client_index,
            lora_request=parent.lora_request,
            mm_features=parent.mm_features,
            cache_salt=parent.cache_salt,
            priority=LAST,
        )
        self.answer, self.may_evict, self.start = answer, may_evict, parent.num_prompt_tokens - 1
        self.block_hashes = parent.block_hashes[: self.start // hash_block_size]
