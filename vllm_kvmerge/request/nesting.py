"""Nesting depth of JSON text: recursive parsers, such as Python's, fail on text that nests too deeply."""

import numpy as np

MAX_DEPTH = 64
"""Objects and arrays inside one another."""

CHUNK = 1 << 16
"""Brackets and quotes processed together, few enough for the processor's cache."""

NO_OPENERS = bytes(set(range(256)) - set(b"[{"))
NO_MARKS = bytes(set(range(256)) - set(b'"[]{}'))
STEPS = bytes.maketrans(b'[{"]}', b"\x01\x01\x00\xff\xff")


def nests_too_deep(text: bytes) -> bool:
    """True if JSON text in UTF-8 exceeds ``MAX_DEPTH``; takes linear time. Text that is not JSON is judged by the part
    that a parser reads before it notices."""
    if len(text.translate(None, NO_OPENERS)) <= MAX_DEPTH:
        return False
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    text = text.translate(None, NO_MARKS)
    depth, in_string = 0, False
    for start in range(0, len(text), CHUNK):
        marks = text[start : start + CHUNK]
        in_strings = np.logical_xor.accumulate(np.frombuffer(marks, np.uint8) == ord('"')) ^ in_string
        steps = np.frombuffer(marks.translate(STEPS), np.int8) * ~in_strings
        depths = np.cumsum(steps, dtype=np.int32) + depth
        if depths.max() > MAX_DEPTH:
            return True
        depth, in_string = depths[-1], in_strings[-1]
    return False
