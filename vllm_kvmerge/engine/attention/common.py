"""Common part of the attention backends of all platforms: refused features, and views of the cache."""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionType
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec

from vllm_kvmerge.engine.blocks import WINDOW_SPECS, MergeableAttentionSpec
from vllm_kvmerge.engine.support import UnsupportedConfigError
from vllm_kvmerge.ops import PagedKVCache, Softmax
from vllm_kvmerge.ops.types import cell_bytes

DTYPES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""Of quantised caches, by vLLM's name; vLLM calls all of them uint8."""


class MergeableImpl:
    """One layer's attention over a mergeable cache; beside a platform's own ``AttentionImpl``."""

    head_size: int
    kv_cache_dtype: str
    num_kv_heads: int
    logits_soft_cap: float
    kv_sharing_target_layer_name: str | None
    sinks: Tensor | None
    """``[H * G]``, in any dtype."""
    layer_index: int
    """The layer's place among those that are compressed; ``attach`` sets it."""
    row_major_keys: ClassVar[bool]
    """Layout of keys, see ``PagedKVCache.of``."""

    interleaved: bool = False
    """Metadata lie within their blocks (``PagedKVCache.of``); set when the cache has been allocated."""

    has_metadata: bool = True
    """Likewise: there is room for metadata in the cache."""

    _paged: tuple[Tensor, tuple[int, int], PagedKVCache] | None = None
    _plain: Softmax | None = None

    def refuse_features(self, attn_type: str, alibi: bool) -> None:
        """Raises UnsupportedConfigError if a layer uses a feature that compression does not support."""
        if alibi:
            raise UnsupportedConfigError("model uses ALiBi: not supported with KV cache compression")
        if attn_type != AttentionType.DECODER:
            raise UnsupportedConfigError(f"attention type {attn_type}: only decoder attention is supported")

    def attach(self, layer: Any, index: int) -> None:
        """Notes, when the cache has been allocated, whose attention this is; index: ``layer_index``."""
        self.layer_index = index

    @property
    def owns_cache(self) -> bool:
        """False if the layer reads an earlier one's cache, whose statistics are made of that one's queries alone."""
        return self.kv_sharing_target_layer_name is None

    @property
    def softmax(self) -> Softmax:
        """What this layer does with logits, once its weights have been loaded."""
        if self.sinks is not None:
            return Softmax(self.logits_soft_cap, self.sinks.detach().float().view(self.num_kv_heads, -1))
        if self._plain is None:
            self._plain = Softmax(self.logits_soft_cap)
        return self._plain

    def paged(self, layer: Any, kv_cache: Tensor) -> PagedKVCache:
        """Views of the cache of ``layer``, whose attention this is, made once per allocation."""
        known = self._paged
        if known is None or known[0] is not kv_cache:
            allocation = (kv_cache.data_ptr(), kv_cache.numel())
            if known is None or known[1] != allocation:
                known = self._paged = kv_cache, allocation, self.view(layer, kv_cache)
        return known[2]

    def view(self, layer: Any, kv_cache: Tensor) -> PagedKVCache:
        """Views of memory in the cache's shape."""
        scales: dict[str, float] = {}
        if (dtype := DTYPES.get(self.kv_cache_dtype)) is not None:
            kv_cache = kv_cache.view(dtype)
            scales = {"key_scale": layer._k_scale_float, "value_scale": layer._v_scale_float}
        return PagedKVCache.of(
            kv_cache,
            self.head_size,
            self.row_major_keys,
            **scales,
            interleaved=self.interleaved,
            has_metadata=self.has_metadata,
        )

    def forget_cache(self) -> None:
        """Drops the views, so that the cache can be freed."""
        self._paged = None


class MergeableBackend:
    """Answers of every platform's backend; comes before its ``AttentionBackend`` in the bases."""

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        if type(spec) in WINDOW_SPECS:
            # All layers share the pool's blocks, so their cells must be of one size.
            return replace(spec, state_content_bytes=cell_bytes(spec.head_size, spec.dtype))
        if type(spec) is not FullAttentionSpec or spec.sliding_window or spec.attention_chunk_size:
            raise UnsupportedConfigError(f"attention layer of type {type(spec).__name__}: only full attention works")
        return MergeableAttentionSpec.of(spec)

    @classmethod
    def supports_non_causal(cls) -> bool:
        return False

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER
