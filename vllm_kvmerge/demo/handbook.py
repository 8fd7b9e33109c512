"""A document in English, the handbook of a mountain station that does not exist, and questions about it: examples for
language models."""

import json
import random
from functools import cache
from pathlib import Path

QUESTIONS = Path(__file__).with_name("handbook.json")
"""Questions and what right answers hold."""


@cache
def document() -> str:
    """Some 2,200 tokens."""
    return Path(__file__).with_name("handbook.txt").read_text(encoding="utf-8")


def draw_example() -> dict[str, str]:
    """A chat's message, the document and a question, and what a right answer holds, for the server's page."""
    question, answer = random.choice(json.loads(QUESTIONS.read_text(encoding="utf-8")))
    return {"kind": "chat", "prompt": f"{document()}\n\n{question}", "answer": answer}
