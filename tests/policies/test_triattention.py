"""TriAttention's scores against a loop over the paper's formula in float64."""

import cmath
import math

import pytest
import torch

from tests.policies.sampling import newest_queries, random_entries, rope
from vllm_kvmerge.policies import CompressionContext
from vllm_kvmerge.policies.selectors import TriAttention

HEADS, GROUP, SIZE, TOKENS, NEXT = 2, 3, 16, 40, 90


@pytest.mark.parametrize(("is_neox", "factor", "num_positions"), [(True, 1.0, 2048), (False, 1.3, 1 << 17)])
def test_scores_are_those_of_the_formula(is_neox, factor, num_positions):
    entries = random_entries(0, HEADS, TOKENS, SIZE, num_dead=5)
    vectors = 0.5 * torch.randn(HEADS, GROUP, 30, SIZE, generator=torch.Generator().manual_seed(1))
    vectors += torch.randn(HEADS, GROUP, 1, SIZE, generator=torch.Generator().manual_seed(2))
    rotation, queries = rope(SIZE, is_neox, num_positions, factor), newest_queries(vectors, NEXT)
    queries = type(queries)(rotation.turned(vectors, queries.positions.unsqueeze(1)), queries.positions)
    context = CompressionContext.of_layer(
        entries, 12, NEXT, at_prompt_end=False, scale=0.25, queries=queries, rotation=rotation
    )
    found = TriAttention(statistics_window=20).ranking(entries, entries.scores, entries.is_live, context)

    def pairs(vector: torch.Tensor, position: int = 0) -> list[complex]:
        """Before RoPE and without its factor, of what the model has turned at a position."""
        numbers, half = vector.tolist(), SIZE // 2
        of = [(f, f + half) if is_neox else (2 * f, 2 * f + 1) for f in range(half)]
        return [
            complex(numbers[i], numbers[j]) * cmath.exp(-1j * position * w) for (i, j), w in zip(of, omega, strict=True)
        ]

    omega = [1e4 ** (-2 * f / SIZE) for f in range(SIZE // 2)]
    offsets = [2**power for power in range(17) if 2**power < num_positions]
    for head in range(HEADS):
        live = entries.is_live[head].nonzero().flatten().tolist()
        scores = torch.zeros(GROUP, len(live), dtype=torch.float64)
        for group in range(GROUP):
            seen = [pairs(query) for query in vectors[head, group, -20:]]
            for number, entry in enumerate(live):
                position = int(entries.positions[head, entry])
                for f, key in enumerate(pairs(entries.keys[head, entry], position)):
                    centre, length = sum(q[f] for q in seen) / 20, sum(abs(q[f]) for q in seen) / 20
                    phase = cmath.phase(centre) - cmath.phase(key)
                    cosines = [math.cos(omega[f] * (NEXT - position + offset) + phase) for offset in offsets]
                    mean = sum(cosines) / len(cosines)
                    scores[group, number] += abs(centre) * abs(key) * mean + (length - abs(centre)) * abs(key)
        scores = (scores - scores.mean(1, keepdim=True)) / scores.std(1, correction=0, keepdim=True)
        torch.testing.assert_close(found[head, live].double(), scores.amax(0), rtol=1e-3, atol=1e-3)
