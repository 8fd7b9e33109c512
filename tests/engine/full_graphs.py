"""Full graphs of vLLM's GPU model runners where there is no GPU.

What is captured is a forward pass, and a replay is that pass once more with the metadata that it was captured with:
what was a number in Python stays what it was then, and only what lies in buffers is of the batch.
"""

from collections import Counter
from contextlib import nullcontext
from unittest.mock import patch

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from vllm.config.compilation import CompilationMode, CUDAGraphMode
from vllm.forward_context import get_forward_context
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

SIZES = [1, 2, 4]
"""Batches of three are padded."""

done: Counter[str] = Counter()
"""Graphs that were captured, and replays."""


def configure(vllm_config) -> None:
    """After the CPU's platform, which has no graphs."""
    compilation = vllm_config.compilation_config
    compilation.mode = CompilationMode.NONE
    compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    compilation.cudagraph_capture_sizes = list(SIZES)
    compilation.max_cudagraph_capture_size = max(SIZES)
    compilation.cudagraph_num_of_warmups = 1


def install() -> None:
    CpuPlatform.graph_pool_handle = classmethod(lambda cls: None)
    torch.accelerator.get_memory_info = lambda: (0, 0)
    gpu_model_runner.graph_capture = lambda device: nullcontext()
    CudaGraphManager.capture = _capture_all


def profile(runner) -> None:
    """As a worker with a GPU does it that is not told how large the KV cache is: a cache of its own is gone after."""
    caches, initialize = [], runner.initialize_kv_cache

    def noted(*args, **kwargs) -> None:
        initialize(*args, **kwargs)
        caches.extend(StorageWeakRef(cache.untyped_storage()) for cache in runner.kv_caches)

    with patch.object(runner, "initialize_kv_cache", noted):
        runner.profile_cudagraph_memory()
    done.clear()
    assert caches and all(cache.expired() for cache in caches), "the cache of the profile is still there"


def capture(runner) -> None:
    """Before the first request, as a worker with a GPU does it."""
    with torch.inference_mode():
        (_capture_v2 if hasattr(runner, "cudagraph_manager") else _capture_v1)(runner)


class _GraphsV1:
    """A model's ``forward``, with what vLLM's ``CUDAGraphWrapper`` does."""

    def __init__(self, forward) -> None:
        self._forward = forward
        self._captured = {}

    def __call__(self, **inputs) -> torch.Tensor:
        context = get_forward_context()
        if context.cudagraph_runtime_mode != CUDAGraphMode.FULL:
            return self._forward(**inputs)
        batch = context.batch_descriptor
        if batch not in self._captured:
            done["captured"] += 1
            self._captured[batch] = inputs, context.attn_metadata, context.slot_mapping, self._forward(**inputs)
            return self._captured[batch][3]
        done["replayed"] += 1
        inputs, context.attn_metadata, context.slot_mapping, output = self._captured[batch]
        return output.copy_(self._forward(**inputs))


def _capture_v1(runner) -> None:
    runner.model.forward = _GraphsV1(runner.model.forward)
    for mode, batches in runner.cudagraph_dispatcher.get_capture_descs():
        for batch in batches:
            runner._warmup_and_capture(batch, mode)


class _GraphV2:
    """In the place of a ``torch.cuda.CUDAGraph``."""

    def __init__(self, forward) -> None:
        self._forward = forward

    def replay(self) -> None:
        done["replayed"] += 1
        self._forward(CUDAGraphMode.NONE)


def _capture_all(manager, create_forward_fn, *_) -> None:
    for batch in manager._capture_descs[CUDAGraphMode.FULL]:
        create_forward_fn(batch, warmup=True)(CUDAGraphMode.NONE)
        forward = create_forward_fn(batch, warmup=False)
        forward(CUDAGraphMode.NONE)
        manager.graphs[batch] = _GraphV2(forward)
        done["captured"] += 1
    manager._graphs_captured = True


def _capture_v2(runner) -> None:
    runner.cudagraph_manager.capture(
        runner.model,
        runner.model_state,
        runner.input_buffers,
        None,
        runner.block_tables,
        runner.attn_groups,
        runner.kv_cache_config,
    )
