"""What tests measure on the demo model: recall, loss, and answers to a second question."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vllm_kvmerge.demo import documents, recall
from vllm_kvmerge.demo.documents import DIGITS_PER_ANSWER, Prompt
from vllm_kvmerge.demo.language import BOS, distinct_keys
from vllm_kvmerge.evaluation.continuation import forced
from vllm_kvmerge.request.parameters import FULL, compression

if TYPE_CHECKING:
    from vllm import LLM


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
        digits=sum(digits) / (len(pairs) * recall.DIGITS_PER_ANSWER),
    )


def evaluate(llm: "LLM", prompts: list[Prompt], policies: list[str], budget: int | float) -> list[Score]:
    """Scores of ``policies`` (``full`` for none) on ``prompts`` with an engine made with ``kvmerge_engine_args``."""
    from vllm import SamplingParams

    scores = []
    for policy in policies:
        parameters = {} if policy == FULL else {"budget": budget}
        params = SamplingParams(
            temperature=0, max_tokens=recall.DIGITS_PER_ANSWER + 1, extra_args=compression(policy, **parameters)
        )
        outputs = llm.generate([prompt.text for prompt in prompts], params, use_tqdm=False)
        scores.append(score([output.outputs[0].text for output in outputs], prompts, policy))
    return scores


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


def second_question(
    rng: np.random.Generator, length: int, num_facts: int, between: int
) -> tuple[list[int], list[int], int]:
    """Token ids of a prompt that ends with a question, and of its continuation; the length of the latter's last answer.

    The continuation is the answer, text and another question up to ``between`` tokens, and that question again with its
    answer.
    """
    keys = distinct_keys(rng)
    facts = [documents.recall(rng, keys) for _ in range(num_facts)]
    first, second = (facts[index].questions[0] for index in rng.permutation(num_facts)[:2])
    body = documents.document(rng, length - 1 - len(first.ask), [fact.statements[0] for fact in facts])
    text = documents.document(rng, between - len(first.answer) - len(second.ask), [])
    continuation = [*first.answer, *text, *second.ask, *second.ask, *second.answer]
    return [BOS, *body, *first.ask], continuation, len(second.answer)


def second_answers(llm: "LLM", drawn: list[tuple[list[int], list[int], int]], fields: dict[str, object]) -> float:
    """Share of the second questions answered right in every digit; ``llm`` has ``ForcedContinuation``.

    fields: of ``kv_compression``.
    """
    params = [forced(continuation, fields) for _, continuation, _ in drawn]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt, *_ in drawn], params, use_tqdm=False)
    right = []
    for output, (_, continuation, num_answered) in zip(outputs, drawn, strict=True):
        ranks = [at[token].rank for at, token in zip(output.outputs[0].logprobs, continuation, strict=True)]
        right.append(all(rank == 1 for rank in ranks[-num_answered:][:DIGITS_PER_ANSWER]))
    return float(np.mean(right))
