"""What an engine of its own generates for jobs: run as ``python -m``, arguments on stdin.

Stock vLLM with its own attention, or the plugin; eagerly in any case.
"""

import json
import os
import sys
from dataclasses import asdict

from tests.gpu.compare import NUM_CANDIDATES, Generated


def main() -> None:
    command = json.load(sys.stdin)
    arguments, is_stock = command["engine"], command["is_stock"]
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if is_stock:
        os.environ["VLLM_PLUGINS"] = ""
    from vllm import LLM, SamplingParams

    if is_stock:
        arguments["attention_backend"] = "TRITON_ATTN"  # the one that knows every dtype and is in every build
    else:
        from vllm_kvmerge import kvmerge_engine_args
        from vllm_kvmerge.ops import OPERATORS

        arguments["additional_config"] = {"kvmerge": {"operators": dict.fromkeys(OPERATORS, "reference")}}
        arguments = kvmerge_engine_args(**arguments)
    llm = LLM(**arguments)
    params = [
        SamplingParams(
            temperature=0, max_tokens=command["num_tokens"], ignore_eos=True, logprobs=NUM_CANDIDATES, extra_args=extra
        )
        for _, extra in command["jobs"]
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in command["jobs"]]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    print("RESULT", json.dumps([asdict(Generated.of(output.outputs[0])) for output in outputs]))


if __name__ == "__main__":
    main()
