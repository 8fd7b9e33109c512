"""An engine of its own that answers one batch of requests and is looked at after every step.

Run as a program: reads a job from stdin (engine arguments, prompts, compression fields of each request, number of
tokens), and prints what each request did.
"""

import json
import math
import sys
from typing import Any

from tests.engine.conftest import in_a_process


def answer(
    arguments: dict[str, Any], prompts: list[list[int]], fields: list[dict[str, Any]], max_tokens: int, timeout: float
) -> list[dict[str, Any]]:
    """Of each request: reason why it finished; tokens; finite, of their log-probabilities; highest, of entries per KV
    head after a step, once it has been compressed; compressions, those that it went through."""
    job = [arguments, prompts, fields, max_tokens]
    found: list[dict[str, Any]] = in_a_process(["-m", __name__], job, timeout=timeout)
    return found


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from tests.engine.conftest import Engine
    from vllm_kvmerge import compression, kvmerge_engine_args

    arguments, prompts, fields, max_tokens = json.load(sys.stdin)
    engine = Engine(LLM(**kvmerge_engine_args(**arguments), enforce_eager=True, skip_tokenizer_init=True, seed=0))
    core, segments = engine.llm.llm_engine, engine.manager.segments
    found = [{"tokens": 0, "finite": 0, "highest": 0, "compressions": 0} for _ in fields]
    changed_at: dict[str, int] = {}
    for index, (prompt, asked) in enumerate(zip(prompts, fields, strict=True)):
        params = SamplingParams(
            max_tokens=max_tokens,
            seed=index,
            ignore_eos=True,
            logprobs=1,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args=compression(**asked),
        )
        core.add_request(str(index), {"prompt_token_ids": prompt}, params)
    while core.has_unfinished_requests():
        for output in core.step():
            one, answer = found[int(output.request_id)], output.outputs[0]
            one["tokens"] += len(answer.token_ids)
            for token, logprobs in zip(answer.token_ids, answer.logprobs, strict=True):
                one["finite"] += math.isfinite(logprobs[token].logprob)
            if answer.finish_reason:
                one["reason"] = answer.finish_reason
        for request in engine.scheduler.running:
            segment = segments.get(request.request_id)
            if segment is not None and segment.are_compressed:
                one = found[int(request.request_id.partition("-")[0])]  # vLLM appends a random part
                one["highest"] = max(one["highest"], segment.num_entries(request.num_computed_tokens))
                one["compressions"] += changed_at.get(request.request_id) != segment.changed_at
                changed_at[request.request_id] = segment.changed_at
    core.step()  # tells the worker of the last ones that have finished
    engine.assert_empty()
    print("FOUND", json.dumps(found))


if __name__ == "__main__":
    main()
