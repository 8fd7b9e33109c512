"""Recall of the demo model under every policy: ``python -m vllm_kvmerge.evaluation.recall``.

Draws fresh prompts (facts spread through filler, one question at the end), asks for the answer under full attention and
under each policy at the same budget, and prints the share of exactly right answers.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vllm_kvmerge.demo import recall
from vllm_kvmerge.demo.documents import Prompt
from vllm_kvmerge.evaluation.options import make_engine, parser_of, print_table, seed_of
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


def main() -> None:
    parser = parser_of(__doc__, (0.3,), (FULL,))
    parser.add_argument("--length", type=int, default=1024, help="tokens per prompt")
    parser.add_argument("--facts", type=int, default=16, help="facts per prompt")
    parser.add_argument("--prompts", type=int, default=200, help="how many prompts")
    parser.add_argument("--dtype", default="bfloat16", help="dtype of model and cache")
    arguments = parser.parse_args()
    seed = seed_of(arguments)
    rng = np.random.default_rng(seed)
    prompts = [recall.draw_prompt(rng, arguments.length, arguments.facts) for _ in range(arguments.prompts)]
    llm = make_engine(arguments, max_model_len=arguments.length + 64)
    by_budget = [evaluate(llm, prompts, arguments.policies, budget) for budget in arguments.budget]
    print_table(
        f"Recall: {arguments.prompts} prompts of {arguments.length} tokens with {arguments.facts} facts, "
        f"{arguments.dtype}, seed {seed}; exact answers / right digits",
        [f"budget {budget}" for budget in arguments.budget],
        {
            scores[0].policy: [f"{score.exact:.3f} / {score.digits:.3f}" for score in scores]
            for scores in zip(*by_budget, strict=True)
        },
    )


if __name__ == "__main__":
    main()
