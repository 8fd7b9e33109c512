"""Error of a ZIP merge where G query heads share a KV head: ``head_fit`` ``mean`` against ``least_squares``.

    python benchmarks/zip_heads.py

Keys, values and queries are random (standard normal, queries twice as long) or the demo model's reading documents of
its task. The demo model has G = 2. For G = 1 each query head is taken alone; for 4 and 8 the KV heads of one and of two
layers are laid side by side, as one head of twice or four times the size, in which each query reads its own part: as
many query heads, of real queries and keys, then compete for each merged entry. The first ``--prompt`` tokens are
compressed by SnapKV's selection with ZIP. Printed is ||o' - o|| / ||o|| over the G heads, for the query that comes last
in the prompt and, averaged, for the next ``--queries`` ones; scores are those of that last query alone
(``zip_window`` 1) and of the last 32.
"""

import argparse
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from vllm_kvmerge import demo
from vllm_kvmerge.demo import recall
from vllm_kvmerge.evaluation.trace import LayerTrace, trace
from vllm_kvmerge.policies import CompressionContext, CompressionPolicy, Entries, Queries
from vllm_kvmerge.policies.mergers import DropMerger, ZipMerger
from vllm_kvmerge.policies.selectors import WindowTopK
from vllm_kvmerge.policies.trackers import SumTracker

GROUPS = (1, 2, 4, 8)
WINDOW = 32

Head = tuple[Tensor, Tensor, Tensor, float]
"""Queries ``[G, T, d]``, keys and values ``[T, d]`` of one KV head, and the scale of its logits."""


def random_heads(num_groups: int, num_tokens: int, count: int) -> Iterator[Head]:
    generator = torch.Generator().manual_seed(num_groups)
    for _ in range(count):
        queries = 2 * torch.randn(num_groups, num_tokens, 64, generator=generator)
        keys, values = torch.randn(2, num_tokens, 64, generator=generator)
        yield queries, keys, values, 64**-0.5


def real_heads(num_groups: int, documents: list[list[LayerTrace]]) -> Iterator[Head]:
    for layers in documents:
        step = max(1, num_groups // 4)
        for start in range(0, len(layers), step):
            some = layers[start : start + step]
            queries = torch.cat([layer.queries for layer in some], 1).transpose(0, 1)  # [heads, T, d]
            keys, values = (
                torch.cat([getattr(layer, name) for layer in some], 1).transpose(0, 1) for name in ("keys", "values")
            )
            group = len(queries) // len(keys)
            if num_groups <= group:
                for first in range(0, len(queries), num_groups):
                    head = first // group
                    yield queries[first : first + num_groups], keys[head], values[head], some[0].scale
            else:
                size = keys.shape[2]
                wide = torch.zeros(len(queries), queries.shape[1], len(keys) * size)
                for index, query in enumerate(queries):
                    part = index // group * size
                    wide[index, :, part : part + size] = query
                yield wide, *(plane.transpose(0, 1).flatten(1) for plane in (keys, values)), some[0].scale


def attend(queries: Tensor, entries: Entries, scale: float) -> Tensor:
    """``[G, q, d]`` for ``[G, q, d]``."""
    logits = scale * queries @ entries.keys[0].T + entries.log_votes[0]
    return logits.softmax(-1) @ entries.values[0]


def errors(head: Head, merger: ZipMerger | DropMerger, budget: int, num_prompt: int) -> tuple[float, float]:
    """Of the prompt's last query, and the mean of all later ones."""
    queries, keys, values, scale = head
    seen = queries[:, num_prompt - WINDOW : num_prompt]
    positions = torch.arange(num_prompt).unsqueeze(0)
    zeros = torch.zeros(1, num_prompt)
    entries = Entries(keys[None, :num_prompt], values[None, :num_prompt], zeros, zeros, zeros, positions)
    logits = (scale * seen @ keys[:num_prompt].T).masked_fill(positions > positions[0, -WINDOW:, None], -torch.inf)
    entries.scores = logits.softmax(-1).sum((0, 1)).unsqueeze(0)
    context = CompressionContext.of_layer(
        entries, budget, num_prompt, True, scale=scale, queries=Queries(seen.unsqueeze(0), positions[:, -WINDOW:])
    )
    policy = CompressionPolicy(tracker=SumTracker(), selector=WindowTopK(), merger=merger)
    after = policy.compress(entries, context).entries
    wanted = queries[:, num_prompt - 1 :]
    full, left = attend(wanted, entries, scale), attend(wanted, after, scale)
    distance = (left - full).transpose(0, 1).flatten(1).norm(dim=1) / full.transpose(0, 1).flatten(1).norm(dim=1)
    return float(distance[0]), float(distance[1:].mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=768)
    parser.add_argument("--queries", type=int, default=64)
    parser.add_argument("--budget", type=int, default=154, help="entries that stay")
    parser.add_argument("--seed", type=int, default=7)
    arguments = parser.parse_args()
    rng, length = np.random.default_rng(arguments.seed), arguments.prompt + arguments.queries
    texts = [recall.training_sample(rng, length, 16, 5)[0].tolist() for _ in range(arguments.documents)]
    documents = trace(demo.model_path(), texts)
    # Random keys are at right angles: none is similar.
    kinds = {"random": (-1.0,), "demo model": (0.8, -1.0)}
    print("| keys | T | G | scores of | dropped | mean | least squares |\n|---|---|---|---|---|---|---|")
    for kind, thresholds in kinds.items():
        for threshold in thresholds:
            for num_groups in GROUPS:
                heads = random_heads(num_groups, length, 16) if kind == "random" else real_heads(num_groups, documents)
                heads = list(heads)
                for window in (1, WINDOW):
                    fields = {"merge_threshold": threshold, "zip_window": window}
                    mergers = {"dropped": DropMerger()} | {
                        fit: ZipMerger(head_fit=fit, **fields) for fit in ("mean", "least_squares")
                    }
                    found = {
                        name: np.mean([errors(head, merger, arguments.budget, arguments.prompt) for head in heads], 0)
                        for name, merger in mergers.items()
                    }
                    cells = (f"{now:.3f}, {later:.3f}" for now, later in found.values())
                    print(f"| {kind} | {threshold:g} | {num_groups} | {window} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
