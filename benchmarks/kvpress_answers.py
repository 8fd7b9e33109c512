"""What kvpress's side of ``kvpress_scores.py`` runs, in an environment of its own: greedy answers under presses.

Reads one JSON object from stdin, ``{"model": folder, "dtype": name, "kvzap": folder, "jobs": [...]}``, and writes a
list with each job's answer, token ids, and one of what the press has kept (:meth:`Model.kept`) to stdout. A job:
``prompt`` (token ids), ``compressed`` (how many of them are read under the press; the others are read after),
``max_tokens``, ``press`` (see :func:`build`) or None.
"""

import contextlib
import json
import logging
import os
import sys
from importlib.metadata import version
from typing import Any

import numpy


def build(spec: Any, kvzap: str | None) -> Any:
    """A press from ``{"press": class, field: value, ...}``; values may be presses, and the one that a field called
    ``press`` is to hold is called ``inner``. kvzap: folder of the model's KVzap model."""
    import kvpress
    from kvpress.presses.kvzap_press import KVzapModel

    if not (isinstance(spec, dict) and "press" in spec):
        return spec
    fields = {
        "press" if name == "inner" else name: build(value, kvzap) for name, value in spec.items() if name != "press"
    }
    press = getattr(kvpress, spec["press"])(**fields)
    if isinstance(press, kvpress.KVzapPress):
        # It would load the one that the hub has for a model of this name.
        press.kvzap_model, press.post_init_from_model = KVzapModel.from_pretrained(kvzap), lambda model: None
    return press


class Model:
    def __init__(self, path: str, dtype: str, kvzap: str | None) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        logging.getLogger("kvpress").setLevel(logging.ERROR)
        self.kvzap = kvzap
        # ObservedAttentionPress reads the matrix of attention weights, which only eager attention makes; AdaKVPress
        # refuses eager attention.
        self.models = {
            kind: AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=kind).eval()
            for kind in ("sdpa", "eager")
        }

    def answer(
        self, prompt: list[int], compressed: int, max_tokens: int, press: dict[str, Any] | None
    ) -> tuple[list[int], str]:
        """As kvpress's pipeline: a press is applied while the first tokens are read, and what follows keeps its
        position. Where layers keep different numbers of entries, what is read after compression is read token by
        token: the mask of a longer part has the first layer's size. Returns the answer, and ``kept``."""
        import torch
        from transformers import DynamicCache

        torch.manual_seed(0)
        name = None if press is None else press["press"]
        model = self.models["eager" if name == "ObservedAttentionPress" else "sdpa"]
        cache, tokens, keys = DynamicCache(), [], {}
        ends = model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]

        def note_keys(module: Any, inputs: Any, given: dict[str, Any], output: Any) -> None:
            keys[module.layer_idx] = given["past_key_values"].layers[module.layer_idx].keys

        with torch.inference_mode(), contextlib.ExitStack() as applied:

            def read(part: list[int], start: int) -> int:
                positions = torch.arange(start, start + len(part)).unsqueeze(0)
                ids = torch.tensor([part])
                output = model(input_ids=ids, past_key_values=cache, position_ids=positions, logits_to_keep=1)
                return int(output.logits[0, -1].argmax())

            # Before those of the press, which runs after them.
            hooks = [one.self_attn.register_forward_hook(note_keys, with_kwargs=True) for one in model.model.layers]
            if press is not None:
                applied.enter_context(build(press, self.kvzap)(model))
            token = read(prompt[:compressed], 0)
            for hook in hooks:
                hook.remove()
            if name != "PrefillDecodingPress":
                applied.close()  # KVzip compresses now, others have done so
            kept = self.kept(model, cache, [keys[layer] for layer in range(len(keys))])
            one_by_one = name == "PyramidKVPress"
            for place in range(compressed, len(prompt), 1 if one_by_one else len(prompt)):
                token = read(prompt[place : place + 1] if one_by_one else prompt[place:], place)
            tokens.append(token)
            while len(tokens) < max_tokens and token not in ends:
                token = read([token], len(prompt) + len(tokens) - 1)
                tokens.append(token)
        return tokens, kept

    @staticmethod
    def kept(model: Any, cache: Any, keys: list[Any]) -> str:
        """Which entries are left, layer by layer and head by head: a bit for each token, in hexadecimal digits.

        keys: of all tokens in each layer, ``[1, heads, tokens, size]``; what is left is known by its key's hash.
        """
        import torch

        factors = torch.randint(-(2**62), 2**62, (keys[0].shape[3] * keys[0].itemsize,))

        def hashes(some: Any) -> Any:
            return (some.contiguous().view(torch.uint8).long() * factors).sum(3)[0]

        masks = []
        for layer, of_tokens in zip(model.model.layers, keys, strict=True):
            left = cache.layers[layer.self_attn.layer_idx].keys
            mask = torch.ones(of_tokens.shape[:3], dtype=torch.bool)
            if left.shape[2] < mask.shape[2]:
                heads = zip(hashes(of_tokens), hashes(left), strict=True)
                mask = torch.stack([torch.isin(one, kept) for one, kept in heads])[None]
            if (masked := getattr(layer.self_attn, "masked_key_indices", None)) is not None:
                mask[tuple(masked)] = False
            masks.append(mask[0])
        return numpy.packbits(torch.cat(masks).numpy(), axis=1).tobytes().hex()


def main() -> None:
    stream = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is printed goes where errors do
    given = json.load(sys.stdin)
    model = Model(given["model"], given["dtype"], given["kvzap"])
    answers, kept = [], []
    for done, job in enumerate(given["jobs"]):
        if done % 50 == 0:
            print(f"kvpress: {done} of {len(given['jobs'])}", file=sys.stderr, flush=True)
        answer, left = model.answer(**job)
        answers.append(answer)
        kept.append(left)
    versions = {name: version(name) for name in ("kvpress", "transformers", "torch")}
    json.dump({"answers": answers, "kept": kept, "versions": versions}, stream)
    stream.close()


if __name__ == "__main__":
    main()
