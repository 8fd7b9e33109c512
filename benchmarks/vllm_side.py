"""A side that is vLLM, with the plugin or without; see ``sides.Side``."""

import json
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

from sides import ModelShape, Run, Side, answers, serve

BLOCK_SIZE = 32


def vllm_side(
    name: str,
    folder: Path,
    shape: ModelShape,
    pool_tokens: int,
    plugin: bool,
    log: Path | None = None,
    package: Path | None = None,
    **arguments: Any,
) -> Side:
    """vLLM with a pool of ``pool_tokens`` tokens; what the plugin's metadata takes comes on top of that.

    log, package: see ``Side``.
    """
    bytes_per_token = shape.bytes_per_token + (shape.metadata_bytes_per_token if plugin else 0)
    settings = {
        "model": shape.write(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "enforce_eager": True,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": 64,
        "disable_log_stats": False,
        # One block is never given out.
        "kv_cache_memory_bytes": (pool_tokens + BLOCK_SIZE) * bytes_per_token,
    }
    return Side(name, "vllm_side.py", {"plugin": plugin, "engine": settings | arguments}, log=log, package=package)


class Engine:
    def __init__(self, plugin: bool, engine: dict[str, Any]) -> None:
        from vllm import LLM

        if plugin:
            from vllm_kvmerge import kvmerge_engine_args

            engine = kvmerge_engine_args(**engine)
        self.llm = LLM(**engine)

    def run(self, prompts: list[list[int]], max_tokens: int, compression: dict[str, Any] | None, cold: bool) -> Run:
        from vllm import SamplingParams

        extra = None if compression is None else {"kv_compression": json.dumps(compression)}
        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, extra_args=extra
        )
        if cold:
            assert self.llm.reset_prefix_cache()
        engine = self.llm.llm_engine
        times: list[list[float]] = [[] for _ in prompts]
        preemptions = _metric("vllm:num_preemptions")
        peak = 0.0
        started = perf_counter()
        for index, prompt in enumerate(prompts):
            engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = perf_counter() - started
            for output in outputs:
                own = times[int(output.request_id.split("-")[0])]
                own += [now] * (len(output.outputs[0].token_ids) - len(own))
            peak = max(peak, _metric("vllm:kv_cache_usage_perc"))
        return Run(times, peak, int(_metric("vllm:num_preemptions") - preemptions))


def _metric(name: str) -> float:
    from prometheus_client import REGISTRY

    samples = [s for m in REGISTRY.restricted_registry([name, name + "_total"]).collect() for s in m.samples]
    return sum(sample.value for sample in samples if not sample.name.endswith("_created"))


if __name__ == "__main__":
    stream = answers()
    serve(Engine(**json.loads(sys.argv[1])).run, stream)
