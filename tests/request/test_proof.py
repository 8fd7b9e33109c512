"""What a request's report adds up of several sequences."""

from typing import Any

from vllm_kvmerge.request.proof import BytesHeld, CompressionProof, EntriesKept


def proof(entries: EntriesKept, **others: Any) -> CompressionProof:
    numbers = dict.fromkeys(("blocks_returned", "compressions", "merged", "evicted", "reused_tokens"), 0) | others
    held = BytesHeld(end=100, peak=numbers.pop("peak", 200))
    return CompressionProof(
        policy="h2o", parameters={}, budget=64, tokens=90, entries=entries, bytes=held, notes=["one"], **numbers
    )


def test_sequences_of_an_answer():
    one = proof(EntriesKept(mean=60, least=50, most=64), merged=3, compressions=2)
    two = proof(EntriesKept(mean=70, least=None, most=80), merged=4, peak=300)
    both = CompressionProof.of_all([one, two])
    assert CompressionProof.of_all([one]) is one
    assert (both.sequences, both.entries) == (2, EntriesKept(mean=65, least=50, most=80))
    assert both.bytes == BytesHeld(end=200, peak=500)
    assert (both.merged, both.compressions, both.tokens, both.notes) == (7, 2, 180, ["one"])
