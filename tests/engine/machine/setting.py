"""A scheduler of ours without an engine: blocks of four tokens, pools of some tens, no model."""

from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from unittest.mock import patch

import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.structured_output import StructuredOutputManager

from tests.random_model import write_gemma
from vllm_kvmerge import demo, kvmerge_engine_args
from vllm_kvmerge.engine import compat, scheduler
from vllm_kvmerge.engine.blocks import MergeableAttentionSpec
from vllm_kvmerge.engine.scheduler import AsyncCompressionScheduler, CompressionSchedulerMixin, SyncCompressionScheduler
from vllm_kvmerge.ops.types import cell_bytes

BLOCK_SIZE = 4
WINDOW = 10
"""Of the layers that have one: not a multiple of a block."""
MAX_MODEL_LEN = 160

init_none_hash(sha256)
block_hasher = get_request_block_hasher(BLOCK_SIZE, sha256)


@dataclass(frozen=True)
class Setting:
    """What an engine is started with. step_tokens: most of a step. chunk: most of a prompt in a step beside other
    requests; 0: as many as there is room for. max_seqs: requests that run at a time. external_tokens: that complete
    caches have room for; None: as many as there are. head_pages: not where the reference runs attention on a GPU."""

    num_blocks: int = 40
    is_async: bool = False
    has_windows: bool = False
    has_prefix_cache: bool = True
    head_pages: bool = True
    by_priority: bool = False
    step_tokens: int = 32
    chunk: int = 0
    max_seqs: int = 6
    external_tokens: int | None = None

    def scheduler(self) -> CompressionSchedulerMixin:
        config = copy(_vllm_config(self.has_windows))
        config.cache_config = copy(config.cache_config)
        config.cache_config.block_size = BLOCK_SIZE
        config.cache_config.enable_prefix_caching = self.has_prefix_cache
        scheduling = config.scheduler_config = copy(config.scheduler_config)
        scheduling.max_num_batched_tokens = self.step_tokens
        scheduling.max_num_scheduled_tokens = self.step_tokens
        scheduling.long_prefill_token_threshold = self.chunk
        scheduling.max_num_seqs = self.max_seqs
        scheduling.policy = "priority" if self.by_priority else "fcfs"
        scheduling.async_scheduling = self.is_async
        config.cache_config.num_gpu_blocks = self.num_blocks
        cls = AsyncCompressionScheduler if self.is_async else SyncCompressionScheduler
        limits = replace(scheduler.request_limits(config), head_pages=self.head_pages)
        # The check is of what workers can do, whose operators on the CPU want larger blocks.
        with (
            patch.object(scheduler, "check_config"),
            patch.object(scheduler, "request_limits", lambda config: limits),
        ):
            return cls(
                vllm_config=config,
                kv_cache_config=self._cache(),
                structured_output_manager=_grammars(self.has_windows),
                block_size=BLOCK_SIZE,
            )

    def _cache(self) -> KVCacheConfig:
        sizes: dict[str, Any] = {"block_size": BLOCK_SIZE, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
        specs: list[Any] = [MergeableAttentionSpec.of(FullAttentionSpec(**sizes))]
        if self.has_windows:
            cell = cell_bytes(sizes["head_size"], sizes["dtype"])
            specs.append(SlidingWindowSpec(**sizes, sliding_window=WINDOW, state_content_bytes=cell))
        groups = [KVCacheGroupSpec([f"layer.{index}"], spec) for index, spec in enumerate(specs)]
        page = specs[0].page_size_bytes
        tensors = [
            KVCacheTensor(self.num_blocks * page, group.layer_names, self.num_blocks * page, page) for group in groups
        ]
        return KVCacheConfig(num_blocks=self.num_blocks, kv_cache_tensors=tensors, kv_cache_groups=groups)


@cache
def _vllm_config(has_windows: bool) -> VllmConfig:
    compat.install()
    compat.register_cache_spec()
    model = demo.model_path()
    if has_windows:
        model = str(write_gemma(Path(mkdtemp()), sliding_window=WINDOW))
    arguments = kvmerge_engine_args(
        model=model, dtype="float32", enforce_eager=True, max_model_len=MAX_MODEL_LEN, max_num_seqs=8
    )
    return EngineArgs(**arguments).create_engine_config()


@cache
def _grammars(has_windows: bool) -> StructuredOutputManager:
    return StructuredOutputManager(_vllm_config(has_windows))
