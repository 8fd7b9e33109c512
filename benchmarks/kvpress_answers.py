"""What kvpress's side of ``kvpress_scores.py`` runs, in an environment of its own: greedy answers under presses.

Reads one JSON object from stdin, ``{"model": folder, "jobs": [...]}``, and writes a list with each job's answer, token
ids, to stdout. A job: ``prompt`` (token ids), ``compressed`` (how many of them are read under the press; the others are
read after), ``max_tokens``, ``press`` (see :func:`build`) or None.
"""

import contextlib
import json
import os
import sys
from importlib.metadata import version
from typing import Any


def build(spec: Any) -> Any:
    """A press from ``{"press": class, field: value, ...}``; values may be presses, and the one that a field called
    ``press`` is to hold is called ``inner``."""
    import kvpress

    if not (isinstance(spec, dict) and "press" in spec):
        return spec
    fields = {"press" if name == "inner" else name: build(value) for name, value in spec.items() if name != "press"}
    return getattr(kvpress, spec["press"])(**fields)


class Model:
    def __init__(self, path: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        # ObservedAttentionPress reads the matrix of attention weights, which only eager attention makes; AdaKVPress
        # refuses eager attention.
        self.models = {
            kind: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=kind).eval()
            for kind in ("sdpa", "eager")
        }

    def answer(self, prompt: list[int], compressed: int, max_tokens: int, press: dict[str, Any] | None) -> list[int]:
        """As kvpress's pipeline: a press is applied while the first tokens are read, and what follows keeps its
        position. What is read after compression is read token by token: where layers keep different numbers of
        entries, the mask of a longer part has the first layer's size."""
        import torch
        from transformers import DynamicCache

        torch.manual_seed(0)
        model = self.models["eager" if press is not None and press["press"] == "ObservedAttentionPress" else "sdpa"]
        cache, tokens = DynamicCache(), []
        ends = model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        with torch.inference_mode(), contextlib.nullcontext() if press is None else build(press)(model):

            def read(part: list[int], start: int) -> int:
                positions = torch.arange(start, start + len(part)).unsqueeze(0)
                ids = torch.tensor([part])
                output = model(input_ids=ids, past_key_values=cache, position_ids=positions, logits_to_keep=1)
                return int(output.logits[0, -1].argmax())

            token = read(prompt[:compressed], 0)
            for place in range(compressed, len(prompt)):
                token = read([prompt[place]], place)
            tokens.append(token)
            while len(tokens) < max_tokens and token not in ends:
                token = read([token], len(prompt) + len(tokens) - 1)
                tokens.append(token)
        return tokens


def main() -> None:
    stream = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is printed goes where errors do
    given = json.load(sys.stdin)
    model = Model(given["model"])
    answers = []
    for done, job in enumerate(given["jobs"]):
        if done % 500 == 0:
            print(f"kvpress: {done} of {len(given['jobs'])}", file=sys.stderr, flush=True)
        answers.append(model.answer(**job))
    versions = {name: version(name) for name in ("kvpress", "transformers", "torch")}
    json.dump({"answers": answers, "versions": versions}, stream)
    stream.close()


if __name__ == "__main__":
    main()
