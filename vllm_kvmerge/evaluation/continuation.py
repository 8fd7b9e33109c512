"""Makes a request generate a given continuation, so that its log-probabilities can be read."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from vllm_kvmerge.request.spec import compression

if TYPE_CHECKING:
    import torch

CONTINUATION = "kvmerge_continuation"
"""Key of ``SamplingParams.extra_args``: the token ids to generate."""


def forced(continuation: list[int], fields: Mapping[str, Any]) -> SamplingParams:
    """Parameters of a request that generates ``continuation`` (token ids). fields: of ``kv_compression``."""
    return SamplingParams(
        temperature=0,
        max_tokens=len(continuation),
        ignore_eos=True,
        logprobs=0,
        extra_args=compression(**fields) | {CONTINUATION: continuation},
    )


class ForcedContinuation(AdapterLogitsProcessor):
    """Lets a request generate nothing but its continuation. Log-probabilities are taken before it acts."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams):  # type: ignore[no-untyped-def]
        continuation = (params.extra_args or {}).get(CONTINUATION)
        if continuation is None:
            return None

        def force(output_ids: list[int], logits: "torch.Tensor") -> "torch.Tensor":
            wanted = continuation[len(output_ids)]
            value = logits[wanted].item()
            logits.fill_(-float("inf"))
            logits[wanted] = value
            return logits

        return force
