"""vLLM's GPU model runners, V1 and V2, with our parts of them on the CPU: run as ``python -m``, with jobs and chats on
stdin.

V2's own Triton kernels run in the interpreter. Attention is the CUDA backend's; its operators are the PyTorch
reference, since the interpreter would take minutes. Scheduling is asynchronous unless an engine is told otherwise, as
it is on CUDA. With FLASH=2 or 3 vLLM finds that version of FlashAttention, of which a stand-in has the compiled part,
for float32 too. With FULL_GRAPHS=1 batches that vLLM would decode with a full graph go through what stands for one.
With SPREAD=1 compressions of jobs are spread over steps.
"""

import json
import os
import sys
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from unittest.mock import patch

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
IS_V2 = os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1"
HAS_GRAPHS = os.environ.get("FULL_GRAPHS") == "1"
FLASH = int(os.environ.get("FLASH", "0"))

if IS_V2:
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.backends

    class ActiveDriver:
        @staticmethod
        def is_active() -> bool:
            return True

    # vLLM built for the CPU uses Triton where it finds this backend, which only a build of Triton for the CPU has.
    triton.backends.backends["cpu"] = triton.backends.Backend(compiler=None, driver=ActiveDriver)

import torch  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.platforms.cpu import CpuPlatform  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend  # noqa: E402
from vllm.v1.engine.core import EngineCore  # noqa: E402
from vllm.v1.worker.cpu_worker import CPUWorker  # noqa: E402
from vllm.v1.worker.utils import KVBlockZeroer  # noqa: E402

from tests import page_tables  # noqa: E402
from tests.engine import full_graphs  # noqa: E402
from tests.engine.cuda import flash_attention  # noqa: E402
from tests.engine.spread import Spread, spread_over  # noqa: E402
from tests.gpu.compare import NUM_CANDIDATES, Generated  # noqa: E402
from vllm_kvmerge import compression as compression_of  # noqa: E402
from vllm_kvmerge import kvmerge_engine_args  # noqa: E402
from vllm_kvmerge.engine.attention import cuda as backend  # noqa: E402
from vllm_kvmerge.engine.compat import CUDA_BACKEND, drop_validator, register_cache_spec  # noqa: E402
from vllm_kvmerge.engine.verification import VERIFY_KEY  # noqa: E402
from vllm_kvmerge.ops.workspace import workspace_of  # noqa: E402

if IS_V2:
    from vllm.v1.worker.cpu.model_runner import CPUModelRunner
    from vllm.v1.worker.gpu.warmup import warmup_kernels

    from vllm_kvmerge.engine.worker.cuda_runner_v2 import CUDARunnerV2Mixin as Mixin
else:
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    from vllm_kvmerge.engine.worker.cuda_runner import CUDARunnerMixin as Mixin

register_backend(AttentionBackendEnum.CPU_ATTN, CUDA_BACKEND)
register_cache_spec()

check_and_update_config = CpuPlatform.check_and_update_config


def check_as_on_cuda(vllm_config) -> None:
    """The CPU's platform turns asynchronous scheduling off."""
    asynchronous = vllm_config.scheduler_config.async_scheduling
    check_and_update_config(vllm_config)
    vllm_config.scheduler_config.async_scheduling = asynchronous
    if HAS_GRAPHS:
        full_graphs.configure(vllm_config)


if HAS_GRAPHS:
    full_graphs.install()
attention = backend.paged_attention
paged_rows = 0


def attention_by_the_reference(query, cache, batch, scale, output, softmax, window, chunked) -> None:
    """It knows no rows that only pad a batch, and no tables."""
    global paged_rows
    some = batch.map(lambda tensor: tensor[batch.query_lens > 0], batch.max_query_len)
    paged_rows += 0 if some.tables is None else int(some.tables.addresses.count_nonzero())
    attention(query, cache, page_tables.for_the_reference(some), scale, output, softmax, window, chunked)


if __name__ != "__main__":  # which imports this module once more
    backend.paged_attention = attention_by_the_reference
CpuPlatform.check_and_update_config = staticmethod(check_as_on_cuda)


def no_zeroer(*_, **__) -> None:
    raise AssertionError("vLLM's assumes a cache without metadata")


KVBlockZeroer.__init__ = no_zeroer


class Runner(Mixin, CPUModelRunner):
    """One of vLLM's model runners as it is on the CPU, with our part of it."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        run_plans = self.compression.run_plans

        def checked(blocks_of):
            assert self.execute_model_state is None, "tokens wait for compactions"
            return run_plans(blocks_of)

        self.compression.run_plans = checked
        warm_up, is_warm = self.compression.warm_up, []

        def warmed_up() -> None:
            warm_up()
            is_warm.append(True)

        def captured(builder, common):
            assert is_warm, "a kernel would be compiled while a graph is captured"
            return capture(builder, common)

        self.compression.warm_up = warmed_up
        capture = backend.CUDAAttentionBuilder.build_for_cudagraph_capture
        backend.CUDAAttentionBuilder.build_for_cudagraph_capture = captured


class CUDAOnCPUWorker(CPUWorker):
    """The CPU's worker with what a worker with a GPU has from us."""

    def __init__(self, vllm_config, *args, **kwargs) -> None:
        drop_validator(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)

    def init_device(self) -> None:
        super().init_device()
        self.model_runner = Runner(self.vllm_config, self.device)

    def initialize_from_config(self, kv_cache_config) -> None:
        super().initialize_from_config(kv_cache_config)
        if kv_cache_config.needs_kv_cache_zeroing:
            self.model_runner._init_kv_zero_meta()

    def determine_available_memory(self) -> int:
        self.reserved = workspace_of(self.device).num_bytes > 0
        self.model_runner.profile_run()
        if HAS_GRAPHS:
            full_graphs.profile(self.model_runner)
        return super().determine_available_memory()

    def compile_or_warm_up_model(self):
        times = super().compile_or_warm_up_model()
        if IS_V2:  # as workers with a GPU do, but for kernels of sampling that the interpreter cannot run
            with patch.object(SamplingParams, "for_sampler_warmup", lambda: SamplingParams(temperature=0)):
                warmup_kernels(self.model_runner, self.execute_model, lambda _: self.sample_tokens(None))
        if HAS_GRAPHS:
            full_graphs.capture(self.model_runner)
        return times


def verified(llm: LLM, core: EngineCore, job: list) -> list:
    """Of a plain answer: whether the full cache agrees, and the log-probability of all."""
    prompt, _, num_tokens = job
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, extra_args={VERIFY_KEY: "key"})
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    assert llm.reset_prefix_cache()  # of a pool as small as this one, all blocks are in it
    answer = list(output.outputs[0].token_ids)
    asked = {"key": "key", "answer": answer, "seconds": 300.0, "max_tokens": 1000}
    asked |= {"may_evict": False, "is_last": True}
    result = core.scheduler.verify(json.dumps(asked))
    while not result.done():
        assert core.scheduler.has_requests() or core.batch_queue
        core.step_fn()
    found = json.loads(result.result(0))
    return [all(found["agrees"]), sum(found["log_probs"])]


def main() -> None:
    with ExitStack() as stack:
        if FLASH:
            stack.enter_context(flash_attention.installed(FLASH, also=torch.float32))
        run()


def run() -> None:
    arguments, jobs, chats = json.load(sys.stdin)
    llm = LLM(**kvmerge_engine_args(**arguments, worker_cls=f"{__name__}.CUDAOnCPUWorker"))
    core = llm.llm_engine.engine_core.engine_core
    preempt, preempted = core.scheduler._preempt_request, []

    def counted(request, *args, **kwargs):
        preempted.append(request)
        preempt(request, *args, **kwargs)

    core.scheduler._preempt_request = counted

    def generate(some, **more):
        more = {"temperature": 0} | more
        more |= {"ignore_eos": True, "logprobs": NUM_CANDIDATES}
        params = [SamplingParams(max_tokens=n, extra_args=e, **more) for _, e, n in some]
        return llm.generate([{"prompt_token_ids": prompt} for prompt, _, _ in some], params, use_tqdm=False)

    def ask(prompt, extra, num_tokens, stop):
        (output,) = generate([(prompt, extra, num_tokens)], stop_token_ids=stop)
        answer = output.outputs[0]
        return list(answer.token_ids), answer.cumulative_logprob, output.num_cached_tokens

    compression = core.model_executor.driver_worker.worker.model_runner.compression
    adopt, adopted = compression._adopted, []

    def noted(adoption):
        adopted.append(adoption)
        return adopt(adoption)

    compression._adopted = noted
    with spread_over(3) if os.environ.get("SPREAD") == "1" else nullcontext(Spread()) as spread:
        of_jobs = generate(jobs)
    completions = [output.outputs[0] for output in of_jobs]
    turns = [[ask(*turn) for turn in chat] for chat in chats]
    windows = [compression_of("local", budget=40, interval=8, positions=one) for one in ("text", "cache") if chats]
    sampled = [generate([(list(range(20, 80)), extra, 12)], temperature=1.0, seed=7)[0].outputs[0] for extra in windows]
    generate([([5, 6, 7], None, 1)])  # a worker hears of finished requests when the next step begins
    worker = core.model_executor.driver_worker.worker
    pool = core.scheduler.kv_cache_manager.block_pool
    result = {
        "verified": verified(llm, core, jobs[0]),
        "tokens": [list(completion.token_ids) for completion in completions],
        "logprobs": [completion.cumulative_logprob for completion in completions],
        "generated": [asdict(Generated.of(completion)) for completion in completions],
        "cached": sum(output.num_cached_tokens for output in of_jobs),
        "turns": turns,
        "sampled": [list(one.token_ids) for one in sampled],
        "is_v2": worker.use_v2_model_runner,
        "is_async": core.batch_queue is not None,
        "graphs": dict(full_graphs.done),
        "paged_rows": paged_rows,
        "flash": len(flash_attention.calls),
        "preempted": len(preempted),
        "adopted": len(adopted),
        "spread": len(set(spread.parts)),
        "restored": sum(one.restores_output for one in adopted),
        "reserved": worker.reserved,
        "states": sorted(compression.states),
        "lost_blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
    }
    print("RESULT", json.dumps(result))


if __name__ == "__main__":
    # A worker class is named, and found by importing: this module must not be there twice.
    from tests.engine import cuda_on_cpu

    cuda_on_cpu.main()
