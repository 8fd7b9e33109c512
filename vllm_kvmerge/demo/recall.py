"""The plainest question to the demo model: one of several facts.

``python -m vllm_kvmerge.demo.recall --length 1000 --facts 16`` prints a prompt, and its answer on stderr. A fact is
``remember K d d d d .``, a question ``recall K`` and its answer ``d d d d </s>``; see ``documents`` for all kinds.
"""

import argparse
import sys

import numpy as np

from vllm_kvmerge.demo import documents


def draw_prompt(rng: np.random.Generator, length: int, num_facts: int) -> documents.Prompt:
    """A prompt of exactly ``length`` tokens (``<s>`` included) that asks for one of its facts."""
    return documents.draw_prompt(rng, "recall", length, num_facts)


def draw_example() -> dict[str, str]:
    """A prompt and its answer, other ones each time, for the server's page."""
    prompt = draw_prompt(np.random.default_rng(), length=1000, num_facts=16)
    return {"kind": "completion", "prompt": prompt.text, "answer": prompt.answer}


def main() -> None:
    parser = argparse.ArgumentParser(description="Prints a prompt of the recall task, and its answer on stderr.")
    parser.add_argument("--length", type=int, default=1000, help="tokens")
    parser.add_argument("--facts", type=int, default=16)
    parser.add_argument("--seed", type=int, default=None, help="default: another prompt at each run")
    arguments = parser.parse_args()
    prompt = draw_prompt(np.random.default_rng(arguments.seed), arguments.length, arguments.facts)
    print(prompt.text)
    print("answer:", prompt.answer, file=sys.stderr)


if __name__ == "__main__":
    main()
