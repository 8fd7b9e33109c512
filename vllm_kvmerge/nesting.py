"""How deeply JSON text may nest: parsers that call themselves, such as Python's, fail on text that nests further."""

import numpy as np

MAX_DEPTH = 64
"""Objects and arrays inside one another."""

OTHERS = bytes(set(range(256)) - set(b'"[]{}'))
STEPS = np.zeros(256, np.int8)
STEPS[list(b"[{")], STEPS[list(b"]}")] = 1, -1

CHUNK = 1 << 20
"""Brackets and quotes looked at together."""


def nests_too_deep(text: bytes) -> bool:
    """Whether JSON text in UTF-8 exceeds MAX_DEPTH. Takes time linear in its length; text that is not JSON is judged by
    what a parser reads of it before it notices."""
    if text.count(b"[") + text.count(b"{") <= MAX_DEPTH:
        return False
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = np.frombuffer(text.translate(None, OTHERS), np.uint8)
    depth = num_quotes = 0
    for start in range(0, len(marks), CHUNK):
        chunk = marks[start : start + CHUNK]
        quotes = num_quotes + np.cumsum(chunk == ord('"'), dtype=np.int32)
        depths = depth + np.cumsum(np.where(quotes % 2, 0, STEPS[chunk]), dtype=np.int32)
        if depths.max() > MAX_DEPTH:
            return True
        depth, num_quotes = int(depths[-1]), int(quotes[-1]) % 2
    return False
