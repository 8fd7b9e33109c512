"""An engine of its own that answers prompts: stock vLLM, or with compression under each of some policies.

Run as a program: reads a job from stdin (engine arguments, prompts, compression fields of each run; null: stock vLLM),
and prints what each run gave.
"""

import json
import sys
from typing import Any

from tests.engine.conftest import in_a_process

BUDGET, MAX_TOKENS = 64, 40


def generate(
    arguments: dict[str, Any], prompts: list[list[int]], runs: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """tokens: of requests without a policy. runs: of each run each request's (tokens, report). leaked: blocks."""
    found: dict[str, Any] = in_a_process(["-m", __name__], [arguments, prompts, runs], is_stock=runs is None)
    return found


def main() -> None:
    from vllm import LLM, SamplingParams

    arguments, prompts, runs = json.load(sys.stdin)
    if runs is not None:
        from vllm_kvmerge import compression, kvmerge_engine_args
        from vllm_kvmerge.engine.usage import REPORT_KEY, USAGE_KEY

        # In bfloat16 the two operators round differently, and tokens are compared with stock vLLM's.
        own = {"plain_attention": "vllm"} | arguments.pop("additional_config", {}).get("kvmerge", {})
        arguments = kvmerge_engine_args(**arguments, additional_config={"kvmerge": own})
    llm = LLM(**arguments, enforce_eager=True, skip_tokenizer_init=True, seed=0)

    def answers(**extra: Any) -> list[Any]:
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False, **extra)
        return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)

    found: dict[str, Any] = {"tokens": [list(one.outputs[0].token_ids) for one in answers()], "runs": [], "leaked": 0}
    for fields in runs or []:
        asked = {**compression(**({"budget": BUDGET} | fields)), USAGE_KEY: True}
        outputs = answers(extra_args=asked)
        reports = [(one.kv_transfer_params or {}).get(REPORT_KEY) for one in outputs]
        tokens = [list(one.outputs[0].token_ids) for one in outputs]
        found["runs"].append(list(zip(tokens, reports, strict=True)))
    if runs is not None:
        pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        found["leaked"] = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
    print("FOUND", json.dumps(found))


if __name__ == "__main__":
    main()
