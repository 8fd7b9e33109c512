"""The KV cache of one worker, as compressed requests use it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec

from vllm_kvmerge.engine.arguments import plugin_config, request_limits
from vllm_kvmerge.engine.attention.hidden_states import HiddenStates
from vllm_kvmerge.engine.attention.rows import QueryRing
from vllm_kvmerge.engine.blocks import WINDOW_SPECS, compressed_group, has_states, window_blocks
from vllm_kvmerge.engine.head_budgets import check_head_budgets, head_budgets_of
from vllm_kvmerge.engine.messages import MoveWindow
from vllm_kvmerge.engine.support import UnsupportedConfigError
from vllm_kvmerge.engine.surrogate import Surrogate, check_fingerprint, check_surrogate
from vllm_kvmerge.engine.worker.cache_positions import turn_blocks
from vllm_kvmerge.engine.worker.compactor import Compactor
from vllm_kvmerge.engine.worker.output_weights import OutputWeights
from vllm_kvmerge.engine.worker.rotary import find_rotation
from vllm_kvmerge.engine.worker.tensor_parallel import HeadShare
from vllm_kvmerge.ops import HeadPages, PagedKVCache, implementation, override
from vllm_kvmerge.ops.types import sent
from vllm_kvmerge.policies.head_budgets import HeadBudgets
from vllm_kvmerge.policies.rotation import Rotation
from vllm_kvmerge.request.limits import ModelShape

logger = init_logger(__name__)


class CompressedCache:
    """The layers' caches, set up once vLLM has allocated them."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        self._config = vllm_config
        self._device = device
        self._compactor: Compactor | None = None
        self._hidden_states: HiddenStates | None = None
        self._output_weights: OutputWeights | None = None
        self.pool: list[PagedKVCache] = []
        """The caches that all blocks lie in, those of other groups of layers included."""
        self._windows: dict[int, tuple[list[PagedKVCache], Rotation | None]] = {}
        """Caches and RoPE of the layers of each group with a window."""
        self.group = 0
        """Index of the compressed layers' group, among those of the KV cache."""
        self._window_blocks: tuple[tuple[int, int], ...] = ()
        self._head_pages = False
        """Heads with different budgets may have pages of their own."""
        self.has_states = False
        """Blocks of the pool may hold states of Mamba or linear-attention layers."""

    @property
    def compactor(self) -> Compactor:
        assert self._compactor is not None, "there is no KV cache yet"
        return self._compactor

    @property
    def layers(self) -> dict[str, Any]:
        """The model's attention layers by name."""
        is_latent = self._config.model_config.use_mla
        return get_layers_from_vllm_config(self._config, MLAAttention if is_latent else Attention)

    @property
    def _seen(self) -> HiddenStates:
        assert self._hidden_states is not None, "there is no KV cache yet"
        return self._hidden_states

    def pool_sizes(self) -> tuple[int, int, list[tuple[int, int]]]:
        """Blocks of the pool, the null block included, tokens of a block, and ``Limits.window_blocks``."""
        first = self.compactor.layers[0]
        return len(first.log_votes), first.block_size, list(self._window_blocks)

    def release_cache(self) -> None:
        """Releases a KV cache that is about to be replaced, such as the one that vLLM profiles graphs with."""
        self._compactor, self.pool, self._windows = None, [], {}
        for layer in self.layers.values():
            layer.impl.forget_cache()

    def use_cache(self, kv_cache_config: KVCacheConfig, model: nn.Module) -> None:
        """Sets up the layers' caches, which have been allocated."""
        self.group = compressed_group(kv_cache_config)
        self._window_blocks = window_blocks(kv_cache_config, self._config)
        group = kv_cache_config.kv_cache_groups[self.group]
        all_layers = self.layers
        layer_names = self._attach_layers(kv_cache_config)
        layers = [all_layers[name] for name in layer_names]
        pages = [layer.impl.paged(layer, layer.kv_cache) for layer in layers]
        groups = {
            index: one.layer_names
            for index, one in enumerate(kv_cache_config.kv_cache_groups)
            if not isinstance(one.kv_cache_spec, MambaSpec)
        }
        # A layer of each group has the same memory. The last one's views are taken: those with metadata.
        ordered = [*(names for index, names in groups.items() if index != self.group), group.layer_names]
        everything: list[Any] = [all_layers[name] for names in ordered for name in names]
        pool = {layer.kv_cache.data_ptr(): layer.impl.paged(layer, layer.kv_cache) for layer in everything}
        self.pool = list(pool.values())
        self._windows = {
            index: self._window_layers(model, names) for index, names in groups.items() if index != self.group
        }
        limits = request_limits(self._config)
        self._head_pages = limits.head_pages
        override(plugin_config(self._config).operators)
        _check_layers(layers, limits.shape)
        logger.info("KV cache operators: %s", implementation(pages[0]))
        heads, num_kv_heads = HeadShare.of(self._config), pages[0].num_kv_heads
        self._query_shape = (layers[0].impl.num_heads, layers[0].impl.head_size)
        self._model = model
        self._output_weights = OutputWeights(model, layer_names, num_kv_heads, self._query_shape)
        self._hidden_states = self._watched(model, layer_names, heads.indices(num_kv_heads))
        self._compactor = Compactor(
            layers=pages,
            scale=layers[0].impl.scale,
            head_indices=heads.indices(num_kv_heads),
            all_heads=heads.gather,
            output_weights=self._output_weights,
            softmax=lambda layer: layers[layer].impl.softmax,
            head_budgets=self._head_budgets(model, layer_names),
            rotation=None if limits.shape.has_latents else find_rotation(model, layer_names),
            group_size=self._query_shape[0] // num_kv_heads,
            hidden_size=self._config.model_config.get_hidden_size(),
            max_bytes=limits.workspace_bytes,
            max_seconds=limits.max_seconds,
            is_alone=heads.num_workers == 1,
        )

    def _attach_layers(self, kv_cache_config: KVCacheConfig) -> list[str]:
        """Tells the layers what their caches are; returns the names of those that have compressed ones of their own."""
        group = kv_cache_config.kv_cache_groups[self.group]
        # Of layers that share one cache, the others follow what its own one does.
        all_layers = self.layers
        owners = {
            name: getattr(all_layers[name], "kv_sharing_target_layer_name", None) or name for name in group.layer_names
        }
        layer_names = list(dict.fromkeys(owners.values()))
        for name, owner in owners.items():
            all_layers[name].impl.attach(all_layers[name], layer_names.index(owner))
        self.has_states = has_states(kv_cache_config)
        for layer in all_layers.values():
            # States need pages in one piece, and KV connectors copy pages.
            layer.impl.interleaved = self.has_states or self._config.kv_transfer_config is not None
        for one in kv_cache_config.kv_cache_groups:
            # Cells of other layers are in proportion to their heads: where these are of another size, so are metadata.
            if isinstance(one.kv_cache_spec, WINDOW_SPECS):
                for name in one.layer_names:
                    all_layers[name].impl.has_metadata = one.kv_cache_spec.head_size == group.kv_cache_spec.head_size
        return layer_names

    def _window_layers(self, model: nn.Module, layer_names: list[str]) -> tuple[list[PagedKVCache], Rotation | None]:
        """Caches of layers with a window, and their RoPE if it is one that keys can be turned by."""
        names = [name for name in layer_names if self.layers[name].kv_sharing_target_layer_name is None]
        layers: list[Any] = [self.layers[name] for name in names]
        return [layer.impl.paged(layer, layer.kv_cache) for layer in layers], find_rotation(model, names)

    def _watched(self, model: nn.Module, layer_names: list[str], heads: list[int]) -> HiddenStates:
        """The model's hidden states, with what the server's surrogate model predicts for this worker's ``heads``."""
        name, surrogates = plugin_config(self._config).kvzap, None
        if name is not None:
            check_surrogate(name, self._config.model_config)
            check_fingerprint(name, model)
            of_all = Surrogate.load(name).of_heads(heads, self._config.model_config.dtype, self._device)
            surrogates = [of_all[extract_layer_index(name)] for name in layer_names]
        max_tokens = self._config.scheduler_config.max_num_batched_tokens
        return HiddenStates(model, layer_names, max_tokens, surrogates, len(heads), self._device)

    def _head_budgets(self, model: nn.Module, layer_names: list[str]) -> HeadBudgets | None:
        if (name := plugin_config(self._config).head_budgets) is None:
            return None
        check_head_budgets(name, self._config.model_config)
        return head_budgets_of(name, model, [extract_layer_index(one) for one in layer_names])

    def _ring(self, window: int) -> QueryRing:
        num_layers, dtype = len(self.compactor.layers), self._config.model_config.dtype
        return QueryRing.empty(num_layers, window, *self._query_shape, dtype, self._device)

    def _table(self, pages: HeadPages) -> Tensor | None:
        """The table that attention reads instead of ``pages``; None: there is none on the CPU."""
        return None

    def zero_block_ids(self, block_ids: list[int]) -> None:
        """Zeroes the keys and values of blocks that a compressed request, or layers with a state, wrote."""
        index = sent(torch.tensor(block_ids), self._device)
        for pages in self.compactor.layers:
            pages.content.index_fill_(0, index, 0)

    def _poison(self, block_ids: list[int]) -> None:
        index = sent(torch.tensor(block_ids), self._device)
        for cache in self.pool:
            cache.poison_blocks(index)

    @contextmanager
    def copying(self, scheduler_output: SchedulerOutput) -> Iterator[None]:
        """Meanwhile vLLM zeroes a step's new blocks. The step's copies of blocks follow, which vLLM's own function
        would do as if the cache had no metadata."""
        if self.has_states:  # pages in one piece, metadata included
            yield
            return
        copies, scheduler_output.kv_cache_block_copies = scheduler_output.kv_cache_block_copies, None
        yield
        if copies:
            self.copy([one.src_block_id for one in copies], [one.dst_block_id for one in copies])

    def copy(self, sources: list[int], targets: list[int]) -> None:
        """Copies blocks, given by their ids."""
        if targets:
            ids = sent(torch.tensor([sources, targets]), self._device)
            for cache in self.pool:
                cache.copy_blocks(*ids)

    def _turn_windows(self, moves: list[MoveWindow], seq_len: int, shift: int) -> None:
        """Turns the keys that layers with a window have of a request of ``seq_len`` tokens, whose positions move by
        ``shift``."""
        for window in moves:
            copied = [pair for pair in zip(window.sources, window.blocks, strict=True) if pair[0] != pair[1]]
            self.copy([source for source, _ in copied], [target for _, target in copied])
            caches, rotation = self._windows[window.group]
            if not shift or not window.blocks or rotation is None:
                continue
            num_keys = seq_len - window.first_row * caches[0].block_size
            turn_blocks(caches, rotation, window.blocks, num_keys, shift)


def _check_layers(layers: list[Any], shape: ModelShape) -> None:
    """Raises UnsupportedConfigError if the layers are not what requests are checked against."""
    if (expected := shape.num_layers) != len(layers):
        raise UnsupportedConfigError(
            f"model layers: {len(layers)} have a cache of full attention, its config says {expected}"
        )
    for layer in layers:
        softmax = layer.impl.softmax
        for trait, has, known in (
            ("soft-caps its logits", softmax.cap > 0.0, shape.caps_logits),
            ("has attention sinks", softmax.sinks is not None, shape.has_sinks),
        ):
            if has and not known:  # requests are checked against what is known
                raise UnsupportedConfigError(f"the model {trait}, which its configuration does not say")
