"""Scores of an answer's tokens with the full cache, from the model's hidden states."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.ops.bad_words import apply_bad_words
from vllm.v1.sample.ops.penalties import apply_all_penalties

from vllm_kvmerge.engine.messages import Verify

ROWS = 64
"""Tokens whose logits are computed at a time."""

LEAST_TOLERANCE = 1e-4
"""Difference of two logits that counts as rounding, whatever the dtype: operators add in other orders."""


def score_tokens(
    hidden_states: Tensor, one: Verify, compute_logits: Callable[[Tensor], Tensor | None], dtype: torch.dtype
) -> Tensor | None:
    """``[tokens, 2]`` float32: of each token its log-probability, and 1.0 where the largest logit is the token's.

    Logits differ by rounding if the difference is at most the spacing of numbers in ``dtype``, the model's, at the
    largest one. hidden_states: ``[count, hidden]``, of the tokens before those. compute_logits: the model's; all
    tensor-parallel workers call this, and those that get no logits return None.
    """
    scores = []
    for begin in range(0, one.count, ROWS):
        logits = compute_logits(hidden_states[begin : begin + ROWS])
        if logits is None:
            continue
        first = one.num_prompt_tokens + one.first + begin
        logits = logits.float()
        if one.masks:  # vLLM's own log-probabilities are of what the grammar allows, before anything else changes it
            _hide(logits, one.masks[begin : begin + ROWS])
        tokens = torch.tensor(one.tokens[first : first + len(logits)], device=logits.device).unsqueeze(1)
        log_probs = logits.gather(1, tokens) - logits.logsumexp(1, keepdim=True)
        logits = _processed(logits, first, one)
        most = logits.amax(1, keepdim=True)
        tolerance = (most.abs() * torch.finfo(dtype).eps).clamp(min=LEAST_TOLERANCE)
        scores.append(torch.cat([log_probs, (logits.gather(1, tokens) >= most - tolerance).float()], 1))
    return torch.cat(scores) if scores else None


def _hide(logits: Tensor, masks: Sequence[bytes]) -> None:
    """Hides the tokens that a grammar does not allow; in place. masks: of ``GrammarMasks``."""
    packed = np.frombuffer(b"".join(masks), np.uint8).reshape(len(masks), -1)
    hidden = torch.from_numpy(np.unpackbits(packed, axis=1, bitorder="little") == 0)[:, : logits.shape[1]]
    logits[:, : hidden.shape[1]].masked_fill_(hidden.to(logits.device), float("-inf"))


def _processed(logits: Tensor, first: int, one: Verify) -> Tensor:
    """What the request's parameters make of logits that precede the tokens from place ``first`` on; in place."""
    params: SamplingParams = one.params
    prompt, before = one.tokens[: one.num_prompt_tokens], one.num_prompt_tokens
    outputs = [one.tokens[before : first + row] for row in range(len(logits))]
    if params.allowed_token_ids is not None:
        hidden = torch.ones_like(logits[0], dtype=torch.bool)
        hidden[params.allowed_token_ids] = False
        logits.masked_fill_(hidden, float("-inf"))
    if params.bad_words_token_ids:
        apply_bad_words(logits, dict.fromkeys(range(len(logits)), params.bad_words_token_ids), outputs)
    if params.logit_bias:
        places = torch.tensor(list(params.logit_bias), device=logits.device)
        logits[:, places] += torch.tensor(list(params.logit_bias.values()), device=logits.device)
    if (num_early := min(len(logits), before + params.min_tokens - first)) > 0 and params.all_stop_token_ids:
        logits[:num_early, list(params.all_stop_token_ids)] = float("-inf")
    penalties = params.presence_penalty, params.frequency_penalty, params.repetition_penalty
    if penalties != (0.0, 0.0, 1.0):
        presence, frequency, repetition = logits.new_tensor(penalties).unsqueeze(1).expand(3, len(logits))
        prompts = torch.tensor(prompt, device=logits.device).expand(len(logits), len(prompt))
        logits = apply_all_penalties(logits, prompts, presence, frequency, repetition, outputs)
    return logits
