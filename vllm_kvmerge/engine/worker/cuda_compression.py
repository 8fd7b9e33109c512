"""Compression on a GPU: memory that is reserved before vLLM measures how much is free."""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.math_utils import cdiv
from vllm.v1.worker.block_table import get_block_table_width
from vllm.v1.worker.utils import AttentionGroup

from vllm_kvmerge.engine.arguments import request_limits
from vllm_kvmerge.engine.attention.common import DTYPES
from vllm_kvmerge.engine.attention.cuda import CUDAAttentionImpl, shortest_chunk
from vllm_kvmerge.engine.blocks import MERGEABLE_SPECS
from vllm_kvmerge.engine.worker import warm_up
from vllm_kvmerge.engine.worker.compression import Compression
from vllm_kvmerge.engine.worker.warm_up import AttentionKind
from vllm_kvmerge.ops import HeadPages, PagedKVCache
from vllm_kvmerge.ops.types import sent
from vllm_kvmerge.ops.workspace import Workspace, workspace_of
from vllm_kvmerge.policies import PRESETS
from vllm_kvmerge.request.spec import CompressionSpec

logger = init_logger(__name__)


class CUDACompression(Compression):
    """The compressed requests of one worker that has a GPU."""

    def reserve(self, specs: Mapping[str, Any]) -> None:
        """Allocates the memory that is needed permanently; call it when the model has been loaded.

        specs: the layers' KV cache specs by name. The number of blocks is not known yet, so there is room for as many
        as the memory that vLLM may use could hold.
        """
        # Other layers have blocks of the same memory, and need nothing.
        specs = {name: spec for name, spec in specs.items() if isinstance(spec, MERGEABLE_SPECS)}
        name, spec = next(iter(specs.items()))
        impl: Any = self.layers[name].impl
        max_model_len = int(self._config.model_config.max_model_len)
        dtype = self._config.model_config.dtype
        num_blocks = self._most_blocks(sum(spec.page_size_bytes for spec in specs.values()))
        shape = num_blocks, spec.num_kv_heads, spec.block_size, spec.head_size
        cache = PagedKVCache.planned(*shape, DTYPES.get(impl.kv_cache_dtype, dtype), self._device)
        work = workspace_of(self._device)
        width = get_block_table_width(cdiv(max_model_len, spec.block_size), spec.block_size)
        self._reserve_attention(work, cache, impl.num_heads, width)
        logger.info("Compression holds %.1f MiB for attention", work.num_bytes / 2**20)

    def _most_blocks(self, block_bytes: int) -> int:
        """A bound on the number of blocks. block_bytes: size of one block in all layers."""
        cache = self._config.cache_config
        if cache.num_gpu_blocks_override is not None:
            return int(cache.num_gpu_blocks_override)
        total = current_platform.get_device_total_memory(self._device.index or 0) * cache.gpu_memory_utilization
        return int(cache.kv_cache_memory_bytes or total) // block_bytes

    def _reserve_attention(self, work: Workspace, cache: PagedKVCache, num_heads: int, max_blocks: int) -> None:
        scheduler = self._config.scheduler_config
        batches = [(rows, 1) for rows in range(1, scheduler.max_num_seqs + 1)]
        # Prefills are never captured: this estimates their demand, for one long chunk or several.
        num_rows, num_tokens = 1, scheduler.max_num_batched_tokens
        while num_rows <= scheduler.max_num_seqs and num_tokens >= shortest_chunk(num_heads // cache.num_kv_heads):
            batches.append((num_rows, num_tokens))
            num_rows, num_tokens = 2 * num_rows, num_tokens // 2
        work.reserve(cache, num_heads, batches, max_blocks)

    @contextmanager
    def profiling(self) -> Iterator[None]:
        """Context for vLLM's profiling run: allocates and frees the memory that prompt scores and newest queries of
        running requests, and a compaction, may take."""
        limits = request_limits(self._config)
        kept = torch.empty(limits.kept_bytes, dtype=torch.uint8, device=self._device)
        logger.info("The KV cache leaves %.0f MiB for prompt scores and newest queries", limits.kept_bytes / 2**20)
        yield
        torch.empty(limits.workspace_bytes, dtype=torch.uint8, device=self._device)
        del kept

    def prepare_attention(self, attn_groups: list[AttentionGroup], block_table_width: int) -> None:
        """Prepares metadata builders, the workspace and all kernels, after ``use_cache`` and before graphs are
        captured, those that vLLM profiles included."""
        limits = request_limits(self._config)
        for group in attn_groups:
            builder: Any = group.get_metadata_builder()
            builder.keeps_queries = True
            if limits.head_pages:
                builder.use_pages(self.compactor.layers, limits.front_obstacle("int8") is None)
        # Exact now, and usually reserved already.
        cache = self.compactor.layers[0]
        self._max_blocks = block_table_width
        self._reserve_attention(workspace_of(self._device), cache, self._query_shape[0], block_table_width)
        self.warm_up()

    def warm_up(self) -> None:
        """Launches all kernels that serving may need, so that they are compiled. The cache stays as it is."""
        started, limits = time.perf_counter(), request_limits(self._config)
        dtype, layers = self._config.model_config.dtype, self.compactor.layers
        owned = {cache.keys.data_ptr() for cache in layers}
        kinds = []
        for layer in self.layers.values():
            impl: Any = layer.impl
            if not isinstance(impl, CUDAAttentionImpl):
                continue
            cache = impl.paged(layer, layer.kv_cache)
            is_compressed = cache.keys.data_ptr() in owned
            kinds.append(
                AttentionKind(
                    cache,
                    impl.num_heads,
                    dtype,
                    impl.scale,
                    impl.softmax,
                    impl.window,
                    impl.chunked,
                    layers if is_compressed and limits.head_pages else None,
                    shortest_chunk(impl.num_heads // impl.num_kv_heads),
                    has_scores=is_compressed,
                    may_be_coded=limits.front_obstacle("int8") is None,
                )
            )
        warm_up.attention(kinds, self._max_blocks)
        names = [name for name in PRESETS if limits.allowed_policies is None or name in limits.allowed_policies]
        policies = [CompressionSpec.of(json.dumps({"policy": name, "budget": warm_up.BUDGET})).policy for name in names]
        warm_up.compactions(self.compactor, policies, dtype, limits.head_pages, limits.front_obstacle("int8") is None)
        if self.compactor.rotation is not None and not self.has_states:  # otherwise positions are those of the text
            warm_up.windows(self._windows.values())
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        logger.info("Kernels of attention and compressions were warmed up in %.1f s", time.perf_counter() - started)

    def _table(self, pages: HeadPages) -> Tensor | None:
        # Steps that were launched before may still read the table that this replaces. PyTorch gives its memory away to
        # nothing but what comes later on this stream, which is theirs too.
        return sent(pages.table(), self._device)
