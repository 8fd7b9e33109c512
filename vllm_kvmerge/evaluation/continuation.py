"""Makes a request generate a given continuation, so that its log-probabilities can be read."""

from typing import TYPE_CHECKING

from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

if TYPE_CHECKING:
    import torch

CONTINUATION = "kvmerge_continuation"
"""Key of ``SamplingParams.extra_args``: the token ids to generate."""


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
