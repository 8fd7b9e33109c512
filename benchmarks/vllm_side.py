"""A side that is vLLM, with the plugin or without; see ``sides.Side``."""

import json
import os
import sys
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from prometheus_client.metrics import MetricWrapperBase
from sides import ModelShape, Run, Side, answers, serve

BLOCK_SIZE = 32
CLOCKS = {"wall": perf_counter, "processor": process_time}
"""Clocks of runs. processor: counts the processor's time for the side's first process, all threads: what others take of
a machine that is shared does not count. The engine must be in that process, and have one thread."""


def vllm_side(
    name: str,
    folder: Path,
    shape: ModelShape,
    pool_tokens: int,
    plugin: bool,
    log: Path | None = None,
    clock: str = "wall",
    **arguments: Any,
) -> Side:
    """vLLM with a pool of ``pool_tokens`` tokens; what the plugin's metadata takes comes on top of that.

    log: see ``Side``. clock: one of ``CLOCKS``.
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
    engine = {"plugin": plugin, "engine": settings | arguments, "clock": clock}
    return Side(name, "vllm_side.py", engine, log=log)


def plugin_engine(model: str, num_bytes: int, max_model_len: int, **arguments: Any) -> Any:
    """vLLM's ``LLM`` with the plugin, in this process. model: as ``ModelShape.write`` returns it. num_bytes: of the KV
    cache."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    from vllm_kvmerge import kvmerge_engine_args

    settings: dict[str, Any] = {
        "model": model,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": max_model_len,
        "kv_cache_memory_bytes": num_bytes,
        "additional_config": {"kvmerge": {"max_compaction_seconds": 600}},
    }
    return LLM(**kvmerge_engine_args(**settings | arguments))


class Engine:
    def __init__(self, plugin: bool, engine: dict[str, Any], clock: str) -> None:
        from vllm import LLM

        if plugin:
            from vllm_kvmerge import kvmerge_engine_args

            engine = kvmerge_engine_args(**engine)
        self.llm, self.is_ours, self.clock = LLM(**engine), plugin, CLOCKS[clock]

    def run(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        compression: dict[str, Any] | None,
        cold: bool,
        at_once: int | None = None,
    ) -> Run:
        """at_once: requests that are unanswered at any time (default: all)."""
        from vllm import SamplingParams

        extra = None if compression is None else {"kv_compression": json.dumps(compression)}
        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, extra_args=extra
        )
        if cold:
            assert self.llm.reset_prefix_cache()
        engine = self.llm.llm_engine
        times: list[list[float]] = [[] for _ in prompts]
        answers: list[list[int]] = [[] for _ in prompts]
        cached, sent = [0] * len(prompts), list[float]()
        preemptions = _metric("vllm:num_preemptions")
        peak = 0.0
        started = self.clock()
        while len(sent) < len(prompts) or engine.has_unfinished_requests():
            num_free = (at_once or len(prompts)) - engine.get_num_unfinished_requests()
            for index, prompt in enumerate(prompts[len(sent) :][:num_free], len(sent)):
                sent.append(self.clock() - started)
                engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
            outputs = engine.step()
            now = self.clock() - started
            for output in outputs:
                index = int(output.request_id.split("-")[0])
                answers[index], cached[index] = list(output.outputs[0].token_ids), output.num_cached_tokens or 0
                times[index] += [now] * (len(answers[index]) - len(times[index]))
            peak = max(peak, _metric("vllm:kv_cache_usage_perc"))
        num_preemptions = int(_metric("vllm:num_preemptions") - preemptions)
        return Run(times, peak, num_preemptions, sent, answers, cached, _own_metrics() if self.is_ours else {})


def _metric(name: str) -> float:
    from prometheus_client import REGISTRY

    samples = [s for m in REGISTRY.restricted_registry([name, name + "_total"]).collect() for s in m.samples]
    return sum(sample.value for sample in samples if not sample.name.endswith("_created"))


def _own_metrics() -> dict[str, float]:
    """Sums over the labels of each of the plugin's metrics, if its engine is in this process: there vLLM takes them out
    of the registry."""
    from vllm_kvmerge.engine import metrics

    values: dict[str, float] = {}
    for attribute in vars(metrics).values():
        for collector in attribute if isinstance(attribute, list) else [attribute]:
            if isinstance(collector, MetricWrapperBase):
                for sample in (sample for family in collector.collect() for sample in family.samples):
                    values[sample.name] = values.get(sample.name, 0.0) + sample.value
    return values


if __name__ == "__main__":
    stream = answers()
    serve(Engine(**json.loads(sys.argv[1])).run, stream)
