"""Each attention layer's output projection, split by query head, for policies that weight values by it."""

import torch
from torch import Tensor, nn
from vllm.logger import init_logger

logger = init_logger(__name__)

PROJECTION_NAMES = ("o_proj", "out_proj", "dense", "wo", "c_proj")


class OutputWeights:
    """Callable on a layer's index: ``[H, G, hidden, d]`` of this worker's heads, contiguous, in the model's dtype and
    the same tensor in each call, or None without such a module.

    layer_names: vLLM's names of the attention layers, ``....self_attn.attn``; the projection is a sibling module.
    """

    def __init__(
        self, model: nn.Module, layer_names: list[str], num_kv_heads: int, query_shape: tuple[int, int]
    ) -> None:
        self._model = model
        self._layer_names = layer_names
        self._num_kv_heads = num_kv_heads
        self._num_heads, self._head_size = query_shape
        self._cache: dict[int, Tensor | None] = {}
        self._products: dict[int, Tensor | None] = {}

    def __call__(self, layer: int) -> Tensor | None:
        if layer not in self._cache:
            self._cache[layer] = self._find(layer)
        return self._cache[layer]

    def norms(self, layer: int, values: Tensor) -> Tensor:
        """``[H, G, n]`` float32: ||W_O v||_2 of ``values`` (``[H, n, d]``) in each query head; 1 without a module."""
        if layer not in self._products:
            weight = self(layer)
            wide = None if weight is None else weight.float()
            self._products[layer] = None if wide is None else wide.mT @ wide
        product = self._products[layer]  # [H, G, d, d]: as long as d is below the hidden size, the shorter way
        values = values.float().unsqueeze(1)
        if product is None:
            return values.new_ones(len(values), self._num_heads // self._num_kv_heads, values.shape[2])
        return ((values @ product) * values).sum(-1).clamp(min=0.0).sqrt()

    def _find(self, layer: int) -> Tensor | None:
        parent = self._model.get_submodule(self._layer_names[layer].rsplit(".", 1)[0])
        for name in PROJECTION_NAMES:
            module = getattr(parent, name, None)
            if module is not None:
                # By the module's own product: its weight may be packed or quantised.
                size = self._num_heads * self._head_size
                like = next((p for p in self._model.parameters() if p.is_floating_point()), torch.empty(0))
                unit = torch.eye(size, dtype=like.dtype, device=like.device)
                columns = module.quant_method.apply(module, unit, bias=None)
                by_head = columns.view(self._num_kv_heads, -1, self._head_size, columns.shape[1])
                return by_head.transpose(2, 3).contiguous()
        logger.warning_once(
            "No output projection beside %s: policies rank by attention alone", self._layer_names[layer]
        )
        return None
