"""What tests measure on the demo model: recall and loss."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_kvmerge.demo import documents
from vllm_kvmerge.demo.documents import DIGITS_PER_ANSWER, Prompt
from vllm_kvmerge.demo.language import BOS, distinct_keys
from vllm_kvmerge.evaluation.continuation import CONTINUATION
from vllm_kvmerge.request.spec import FULL, compression

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams


@dataclass(frozen=True)
class Score:
    """exact: share of prompts whose answer is right in every digit. digits: share of right digits."""

    policy: str
    exact: float
    digits: float


def score(answers: list[str], prompts: list[Prompt], policy: str) -> Score:
    pairs = [(answer.split(), prompt.answer.split()) for answer, prompt in zip(answers, prompts, strict=True)]
    digits = [a == b for given, wanted in pairs for a, b in zip(given, wanted, strict=False)]
    return Score(
        policy=policy,
        exact=sum(given == wanted for given, wanted in pairs) / len(pairs),
        digits=sum(digits) / (len(pairs) * DIGITS_PER_ANSWER),
    )


def evaluate(llm: "LLM", prompts: list[Prompt], policies: list[str], budget: int | float) -> list[Score]:
    """Scores of ``policies`` (``full`` for none) on ``prompts`` with an engine made with ``kvmerge_engine_args``."""
    from vllm import SamplingParams

    scores = []
    for policy in policies:
        parameters = {} if policy == FULL else {"budget": budget}
        params = SamplingParams(
            temperature=0, max_tokens=DIGITS_PER_ANSWER + 1, extra_args=compression(policy, **parameters)
        )
        outputs = llm.generate([prompt.text for prompt in prompts], params, use_tqdm=False)
        scores.append(score([output.outputs[0].text for output in outputs], prompts, policy))
    return scores


def recall_document(rng: np.random.Generator, length: int, num_facts: int, num_questions: int) -> list[int]:
    """``length`` token ids from ``<s>`` on: facts, and questions about some of them with their answers."""
    keys = distinct_keys(rng)
    facts = [documents.recall(rng, keys) for _ in range(num_facts)]
    asked: list[int] = []
    for fact in rng.integers(0, num_facts, num_questions):
        question = facts[fact].questions[0]
        asked += question.ask + question.answer
    return [BOS, *documents.document(rng, length - 1 - len(asked), [fact.statements[0] for fact in facts]), *asked]


def forced(continuation: list[int], fields: dict[str, Any]) -> "SamplingParams":
    """Parameters of a request that generates ``continuation`` (token ids). fields: of ``kv_compression``."""
    from vllm import SamplingParams

    extra = compression(**fields) | {CONTINUATION: continuation}
    return SamplingParams(temperature=0, max_tokens=len(continuation), ignore_eos=True, logprobs=0, extra_args=extra)


def continuation_loss(
    llm: "LLM", prompts: list[list[int]], continuations: list[list[int]], policy: str, budget: int | float
) -> list[list[float]]:
    """-ln p of every token of every continuation (token ids), given its prompt and what precedes it.

    ``llm`` must have been made with ``logits_processors=[ForcedContinuation]``. policy: ``full`` for none.
    """
    fields = {"policy": policy} | ({} if policy == FULL else {"budget": budget})
    params = [forced(continuation, fields) for continuation in continuations]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    losses = []
    for output, continuation in zip(outputs, continuations, strict=True):
        (sample,) = output.outputs
        assert list(sample.token_ids) == continuation, "the engine did not generate what it was made to"
        losses.append([-at[token].logprob for at, token in zip(sample.logprobs, continuation, strict=True)])
    return losses
