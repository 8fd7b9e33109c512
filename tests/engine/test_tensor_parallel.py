"""Two tensor-parallel workers, each with half of the heads, give the tokens that one worker gives."""

from pathlib import Path

import numpy as np
from vllm import SamplingParams

from tests.demo_model import BYTES_PER_BLOCK
from tests.engine.conftest import DEMO_FILES, NUM_BLOCKS, engine_arguments, in_a_process, random_prompt
from vllm_kvmerge import compression, kvmerge_engine_args
from vllm_kvmerge.engine.usage import REPORT_KEY, USAGE_KEY
from vllm_kvmerge.policies import PRESETS
from vllm_kvmerge.request.spec import EXTRA_ARGS_KEY, parse_compression

NUM_TOKENS = 12

GENERATE = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    arguments, jobs, num_tokens = json.load(sys.stdin)
    llm = LLM(**arguments)
    def run(jobs):
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt, _ in jobs],
            [SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, extra_args=extra)
             for _, extra in jobs],
            use_tqdm=False)
        return [(list(o.outputs[0].token_ids), o.kv_transfer_params) for o in outputs]
    print("FOUND", json.dumps([run(jobs), run(jobs[::4])]))
"""


def answers(folder: Path, arguments: dict, jobs: list) -> list:
    """By two workers, in a process of their own: tokens and ``kv_transfer_params`` of all jobs, then of each fourth."""
    arguments = kvmerge_engine_args(**arguments, tensor_parallel_size=2)
    script = folder / "generate.py"
    script.write_text(GENERATE)
    return in_a_process([str(script)], [arguments, jobs, NUM_TOKENS], VLLM_CPU_OMP_THREADS_BIND="0|1")


def generate(folder: Path, arguments: dict, jobs: list) -> list:
    """The tokens of ``answers`` alone."""
    return [[tokens for tokens, _ in some] for some in answers(folder, arguments, jobs)]


def splits_among_heads(extra: dict | None) -> bool:
    """Whether heads compete for the budget: a worker splits it among its own, and with two heads there is nothing to
    split."""
    config = parse_compression(extra[EXTRA_ARGS_KEY]) if extra and EXTRA_ARGS_KEY in extra else None
    return config is not None and config.policy.allocator.name in ("adaptive", "global", "calibrated")


def test_two_workers_equal_one(engine, tmp_path):
    """The model has two KV heads."""
    rng = np.random.default_rng(4)
    told: list[tuple[list[int], dict | None]] = [(random_prompt(rng, 500), {USAGE_KEY: True})]
    for index, policy in enumerate(sorted(PRESETS)):
        length = int(rng.integers(150, 800))
        for context in ({}, {"context_tokens": length - 70})[: 2 if index % 4 == 0 else 1]:
            window = {"window_size": 32} if policy == "kvzap" else {}
            told.append((random_prompt(rng, length), compression(policy, budget=96, interval=8, **window, **context)))
    for threshold in (0.02, 0.005):
        budget = {"threshold": threshold, "max": 0.9}
        told.append((random_prompt(rng, 600), compression("snapkv", budget=budget, decode="bounded")))
    for policy, fields in (("kvzap", {"window_size": 32}), ("kvzip", {"normalized": True, "chunk_size": 250})):
        told.append((random_prompt(rng, 500), compression(policy, budget=96, allocator="uniform", **fields)))
    for policy in ("streaming_llm", "morphkv", "keepkv"):
        told.append((random_prompt(rng, 300), compression(policy, budget=96, interval=8, positions="cache")))
    for policy in ("snapkv", "h2o", "keepkv", "morphkv"):
        fields = {"score_window": "all"} if policy == "h2o" else {}
        told.append((random_prompt(rng, 600), compression(policy, budget=96, prefill={"chunk": 100}, **fields)))
    for policy, front in (("snapkv", "int8"), ("kvzip", "int4"), ("pyramidkv", "int8"), ("kvzip_once", "int4")):
        fields = {"allocator": "uniform"} if policy.startswith("kvzip") else {}
        told.append((random_prompt(rng, 400), compression(policy, budget=96, front=front, decode="grow", **fields)))
    arguments = engine_arguments() | {
        "kv_cache_memory_bytes": NUM_BLOCKS * BYTES_PER_BLOCK,
        "additional_config": {"kvmerge": DEMO_FILES},
    }
    whole, again = answers(tmp_path, arguments, told)
    (first, reports), second = zip(*whole, strict=True), [tokens for tokens, _ in again]
    params = [
        SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, extra_args=extra) for _, extra in told
    ]
    assert {len(tokens) for tokens in first} == {NUM_TOKENS}  # none was refused
    assert list(first[::4]) == second  # which hits the prefix cache
    outputs = engine.generate([prompt for prompt, _ in told], params)
    alone = [list(output.outputs[0].token_ids) for output in outputs]
    comparable = [index for index, (_, extra) in enumerate(told) if not splits_among_heads(extra)]
    assert len(PRESETS) <= len(comparable) < len(told)
    assert [first[index] for index in comparable] == [alone[index] for index in comparable]
    # What each was told counts the heads, and bytes, of both workers.
    assert outputs[0].kv_transfer_params[REPORT_KEY]["peak_bytes"] == -(-(500 + NUM_TOKENS - 1) // 32) * BYTES_PER_BLOCK
    assert [reports[index] for index in comparable] == [outputs[index].kv_transfer_params for index in comparable]
