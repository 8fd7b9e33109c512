"""How far compression moves attention's output: ``python -m vllm_kvmerge.evaluation.attention``.

Queries, keys and values of the demo model reading fresh documents go through the paged cache layer by layer, compressed
at the end of the prompt and, where the policy is bounded, again every ``--interval`` tokens, as in serving. Reported is
||o' - o|| / ||o|| over the outputs of all heads, o being full attention's, averaged over the next queries, layers and
documents; and the same where what does not stay is dropped instead of merged.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from vllm_kvmerge.attention.backend import PromptScores, QueryRing
from vllm_kvmerge.cache.plan import CompressionPlan
from vllm_kvmerge.config import CompressionConfig, parse_compression
from vllm_kvmerge.evaluation.options import add_document_options, draw_documents, parser_of, print_table, seed_of
from vllm_kvmerge.kernels import UPDATE_MODES, Pages, cell_bytes, column_scores, paged_attention, write_tokens
from vllm_kvmerge.policies import PRESETS
from vllm_kvmerge.worker.compactor import Compaction, Compactor
from vllm_kvmerge.worker.runner import score_update

BLOCK_SIZE = 32


@dataclass(frozen=True)
class LayerTrace:
    """What one attention layer saw: queries ``[T, H * G, d]``, keys and values ``[T, H, d]``, all float32, after RoPE.

    output_weights: ``[H, G, hidden, d]``, its output projection by query head.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    output_weights: Tensor
    scale: float


def trace(model_path: str, documents: list[list[int]]) -> list[list[LayerTrace]]:
    """For each document (token ids), what every layer of a Transformers model saw while reading it."""
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    seen: list[LayerTrace] = []

    def attention(module, query, key, value, *args, scaling, **kwargs):  # type: ignore[no-untyped-def]
        weight = module.o_proj.weight.detach().float()
        num_kv_heads, head_size = key.shape[1], key.shape[3]
        split = weight.view(weight.shape[0], num_kv_heads, -1, head_size).permute(1, 2, 0, 3)
        seen.append(LayerTrace(*(tensor[0].transpose(0, 1).float() for tensor in (query, key, value)), split, scaling))
        return sdpa_attention_forward(module, query, key, value, *args, scaling=scaling, **kwargs)

    AttentionInterface.register("kvmerge_trace", attention)
    model = AutoModelForCausalLM.from_pretrained(
        model_path, dtype=torch.float32, attn_implementation="kvmerge_trace", local_files_only=True
    )
    traces = []
    for document in documents:
        with torch.no_grad():
            model(torch.tensor([document]))
        traces.append(list(seen))
        seen.clear()
    return traces


class TracedSequence:
    """One document's keys and values in pages of its own, computed token by token as a server would."""

    def __init__(self, layers: list[LayerTrace], dtype: torch.dtype) -> None:
        self.layers, self.dtype = layers, dtype
        num_tokens, num_kv_heads, head_size = layers[0].keys.shape
        shape = (-(-num_tokens // BLOCK_SIZE), num_kv_heads, BLOCK_SIZE, cell_bytes(head_size, dtype) // dtype.itemsize)
        self.pages = [Pages.of(torch.zeros(shape, dtype=dtype), head_size) for _ in layers]
        self.blocks = torch.arange(shape[0], dtype=torch.int32)
        self.num_tokens = self.front = self.tail = 0
        self.compactor = Compactor(
            self.pages, layers[0].scale, list(range(num_kv_heads)), output_weights=lambda i: layers[i].output_weights
        )

    def write(self, count: int) -> slice:
        """Stores the keys and values of the next ``count`` tokens; returns which they are."""
        new = slice(self.num_tokens, self.num_tokens + count)
        for layer, pages in zip(self.layers, self.pages, strict=True):
            write_tokens(
                pages,
                torch.arange(new.start, new.stop),
                layer.keys[new].to(self.dtype),
                layer.values[new].to(self.dtype),
            )
        self.num_tokens = new.stop
        return new

    def attend(self, new: slice, config: CompressionConfig | None = None) -> list[Tensor]:
        """Each layer's attention output for these newest tokens, ``[q, H * G, d]``; scores as the policy keeps them."""
        update = score_update(config) if config is not None and config.tracks_decode and self.front > 0 else None
        mode, decay = (update.mode, update.decay) if update else ("none", 1.0)
        int32 = partial(torch.full, (1,), dtype=torch.int32)
        outputs = []
        for layer, pages in zip(self.layers, self.pages, strict=True):
            query = layer.queries[new].to(self.dtype)
            outputs.append(torch.empty_like(query))
            paged_attention(
                query,
                pages,
                self.blocks.unsqueeze(0),
                int32(0),
                int32(len(query)),
                int32(self.num_tokens),
                int32(self.front),
                int32(self.tail),
                int32(UPDATE_MODES.index(mode)),
                torch.tensor([decay]),
                layer.scale,
                outputs[-1],
            )
        return outputs

    def compress(self, config: CompressionConfig, budget: int) -> None:
        """Compresses the cache to ``budget`` entries, in the blocks where it lies."""
        capacity = config.policy.allocator.capacity(budget)
        num_entries = self.front + self.num_tokens - self.tail
        new_front = num_entries if capacity is None else min(num_entries, capacity)
        plan = CompressionPlan(
            request_id="",
            compression="",
            front=self.front,
            tail=self.tail,
            num_tokens=self.num_tokens,
            budget=budget,
            new_front=new_front,
            blocks=self.blocks[: -(-new_front // BLOCK_SIZE)].tolist(),
        )
        compaction = Compaction(plan, config.policy, self.blocks, self._prompt_scores(config), self._ring(config))
        self.compactor.run([compaction])
        self.front, self.tail = new_front, self.num_tokens

    def _prompt_scores(self, config: CompressionConfig) -> PromptScores | None:
        if self.front > 0 or not config.prompt_window:
            return None
        window = self.num_tokens if config.prompt_window == "all" else min(config.prompt_window, self.num_tokens)
        scores = PromptScores.empty(len(self.layers), self.layers[0].keys.shape[1], self.num_tokens)
        for index, (layer, pages) in enumerate(zip(self.layers, self.pages, strict=True)):
            query = layer.queries[self.num_tokens - window : self.num_tokens].to(self.dtype)
            statistics = scores.scores[index], scores.aux[index]
            column_scores(query, pages, self.blocks, self.num_tokens, score_update(config), layer.scale, *statistics)
        return scores

    def _ring(self, config: CompressionConfig) -> QueryRing | None:
        window = config.policy.query_window
        if window == 0:
            return None
        num_heads, head_size = self.layers[0].queries.shape[1:]
        ring = QueryRing(len(self.layers), window, num_heads, head_size, self.dtype)
        for index, layer in enumerate(self.layers):
            newest = layer.queries[max(0, self.num_tokens - window) : self.num_tokens]
            ring.write(index, newest.to(self.dtype), self.num_tokens)
        return ring


def output_errors(
    layers: list[LayerTrace], config: CompressionConfig, num_prompt_tokens: int, num_queries: int, dtype: torch.dtype
) -> Iterator[float]:
    """||o' - o|| / ||o|| of each layer and each of the next ``num_queries`` queries."""
    full, compressed = TracedSequence(layers, dtype), TracedSequence(layers, dtype)
    budget = config.resolve_budget(num_prompt_tokens)
    for sequence in (full, compressed):
        sequence.write(num_prompt_tokens)
    compressed.compress(config, budget)
    interval = config.interval or BLOCK_SIZE
    for start in range(0, num_queries, interval):
        count = min(interval, num_queries - start)
        expected = full.attend(full.write(count))
        actual = compressed.attend(compressed.write(count), config)
        if config.decode == "bounded":
            compressed.compress(config, budget)
        for one, other in zip(actual, expected, strict=True):
            distance = (one.float() - other.float()).flatten(1).norm(dim=1)
            yield from (distance / other.float().flatten(1).norm(dim=1)).tolist()


def main(argv: list[str] | None = None) -> None:
    parser = parser_of(__doc__, (0.5, 0.3, 0.2, 0.1, 0.05), sorted(PRESETS))
    add_document_options(parser, documents=8, questions=5)
    parser.add_argument("--queries", type=int, default=64, help="how many queries after it")
    parser.add_argument("--interval", type=int, default=16, help="tokens between compressions")
    parser.add_argument("--dtype", default="float32", help="dtype of the cache")
    arguments = parser.parse_args(argv)
    seed = seed_of(arguments)
    length = arguments.prompt + arguments.queries
    documents = draw_documents(arguments, seed, length)
    traces = trace(arguments.model, documents)
    dtype = getattr(torch, arguments.dtype)

    def error(policy: str, budget: int | float, **overrides: str) -> float:
        config = parse_compression({"policy": policy, "budget": budget, "interval": arguments.interval, **overrides})
        assert config is not None
        sizes = (arguments.prompt, arguments.queries, dtype)
        return float(np.mean([value for layers in traces for value in output_errors(layers, config, *sizes)]))

    rows: dict[str, list[str]] = {}
    for policy in arguments.policies:
        rows[policy] = []
        for budget in arguments.budget:
            cell = f"{error(policy, budget):.3f}"
            if PRESETS[policy].merger != "drop":
                cell += f" / {error(policy, budget, merger='drop'):.3f}"
            rows[policy].append(cell)
    print_table(
        f"Error of attention's output, merged / dropped: {arguments.documents} documents, {arguments.prompt} tokens "
        f"compressed, next {arguments.queries} queries, {arguments.dtype}, seed {seed}",
        [f"budget {budget}" for budget in arguments.budget],
        rows,
    )


if __name__ == "__main__":
    main()
