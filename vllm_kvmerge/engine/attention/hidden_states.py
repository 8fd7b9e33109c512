"""Hooks that give attention its layers' input hidden states: their norms, and predicted scores."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.logger import init_logger

from vllm_kvmerge.engine.support import UnsupportedConfigError

logger = init_logger(__name__)

PROJECTION_NAMES = ("qkv_proj", "query_key_value", "Wqkv", "c_attn", "q_proj")
"""Names of the module that makes queries of hidden states, a sibling of the attention layer."""


class HiddenStates:
    """Of each step's tokens, in the order of the batch.

    norms: ``[layers, tokens]`` float32. scores: ``[layers, tokens, H]`` float32, what the ``surrogates`` predict; None
    without any. Both are of the last step that was to be observed.

    layer_names: vLLM's names of the attention layers, ``....self_attn.attn``; hidden states are read by a sibling
    module. max_tokens: of a step. surrogates: a module for each layer, ``[n, hidden] -> [n, H]``.

    Raises UnsupportedConfigError if a layer has no such module, and the ``surrogates`` would see nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        layer_names: list[str],
        max_tokens: int,
        surrogates: list[nn.Module] | None,
        num_kv_heads: int,
        device: torch.device,
    ) -> None:
        self._projections = [_projection(model, name) for name in layer_names]
        if surrogates is not None and None in self._projections:
            raise UnsupportedConfigError(
                "kvzap is not supported with this model: no module beside its attention layers is named "
                f"{' or '.join(PROJECTION_NAMES)}"
            )
        self._surrogates = surrogates
        self._shape, self._device = (len(layer_names), max_tokens, num_kv_heads), device
        self._observes = self._is_attached = False
        self.norms = torch.empty(0, device=device)
        self.scores: Tensor | None = None

    def observe(self, needed: bool) -> None:
        """Says whether the next step's hidden states are needed."""
        self._observes = needed
        if not needed or self._is_attached:
            return
        # Hooks cost each step something, so there are none before they are needed.
        layers, tokens, heads = self._shape
        self.norms = torch.ones(layers, tokens, device=self._device)
        if self._surrogates is not None:
            self.scores = torch.zeros(layers, tokens, heads, device=self._device)
        for layer, projection in enumerate(self._projections):
            if projection is not None:
                projection.register_forward_pre_hook(partial(self._see, layer))
            else:
                logger.warning_once("Hidden states of attention layers cannot be seen: all count as equally long")
        self._is_attached = True

    def _see(self, layer: int, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if not self._observes:
            return
        hidden: Tensor = inputs[0]
        torch.linalg.vector_norm(hidden, dim=-1, dtype=torch.float32, out=self.norms[layer, : len(hidden)])
        if self._surrogates is not None:
            assert self.scores is not None
            self.scores[layer, : len(hidden)] = self._surrogates[layer](hidden)


def _projection(model: nn.Module, layer_name: str) -> nn.Module | None:
    parent = model.get_submodule(layer_name.rsplit(".", 1)[0])
    return next((found for name in PROJECTION_NAMES if (found := getattr(parent, name, None)) is not None), None)
