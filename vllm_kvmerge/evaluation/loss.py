"""Next-token loss on a compressed cache: ``python -m vllm_kvmerge.evaluation.loss``.

Held-out documents of the demo task are drawn afresh. The first part of each is the prompt, which the policy compresses;
the rest is what the engine is made to generate, token by token, and what is reported is the mean of -ln p of its tokens
(nats), p being the model's own probability.
"""

from typing import TYPE_CHECKING

import numpy as np

from vllm_kvmerge.evaluation.continuation import ForcedContinuation, forced
from vllm_kvmerge.evaluation.options import (
    add_document_options,
    draw_documents,
    make_engine,
    parser_of,
    print_table,
    seed_of,
)
from vllm_kvmerge.request.parameters import FULL

if TYPE_CHECKING:
    from vllm import LLM


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


def main() -> None:
    parser = parser_of(__doc__, (0.5, 0.3, 0.2, 0.1, 0.05), (FULL,))
    add_document_options(parser, documents=16, questions=18)
    parser.add_argument("--continuation", type=int, default=256, help="tokens of the continuation")
    parser.add_argument("--dtype", default="bfloat16", help="dtype of model and cache")
    arguments = parser.parse_args()
    seed = seed_of(arguments)
    length = arguments.prompt + arguments.continuation
    documents = draw_documents(arguments, seed, length)
    prompts, continuations = zip(*((d[: arguments.prompt], d[arguments.prompt :]) for d in documents), strict=True)
    llm = make_engine(arguments, length + 64, logits_processors=[ForcedContinuation])
    rows = {}
    for policy in arguments.policies:
        losses = [
            np.mean(continuation_loss(llm, list(prompts), list(continuations), policy, budget))
            for budget in (arguments.budget if policy != FULL else arguments.budget[:1])
        ]
        rows[policy] = [f"{loss:.3f}" for loss in losses] * (len(arguments.budget) // len(losses))
    print_table(
        f"Next-token loss (nats): {arguments.documents} documents, {arguments.prompt} tokens compressed, "
        f"{arguments.continuation} predicted, {arguments.dtype}, seed {seed}",
        [f"budget {budget}" for budget in arguments.budget],
        rows,
    )


if __name__ == "__main__":
    main()
