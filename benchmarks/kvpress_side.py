"""A side that is kvpress on Transformers, in an environment of its own; see ``sides.Side``.

All prompts are one batch, so they must have one length. The cache of a prompt is kept after its prefill, as vLLM's
prefix cache does: a run that is not cold starts from a copy of it.
"""

import copy
import json
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

from sides import ModelShape, Run, Side, answers, serve


def kvpress_side(name: str, folder: Path, shape: ModelShape, python: str) -> Side:
    """python: that of an environment made from ``requirements-kvpress.txt``."""
    return Side(name, "kvpress_side.py", {"model": shape.write(folder)}, python)


class Engine:
    def __init__(self, model: str) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(model)
        self.model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
        self._prefills: dict[str, tuple[Any, Any]] = {}

    def run(self, prompts: list[list[int]], max_tokens: int, compression: dict[str, Any] | None, cold: bool) -> Run:
        """compression: None, or ``{"ratio": r}``, SnapKV with that share dropped."""
        import torch

        key = json.dumps([prompts, compression])
        with torch.inference_mode():
            if cold:
                self._prefills.clear()
            started = perf_counter()
            token, cache = self._prefills.pop(key, None) or self._prefill(prompts, compression)
            times = [perf_counter() - started]
            kept = token, copy.deepcopy(cache)
            started = perf_counter() - times[0]
            # The newest last; two are enough for prompts that come again in every turn, and others between them.
            self._prefills = dict([*self._prefills.items(), (key, kept)][-2:])
            for position in range(len(prompts[0]), len(prompts[0]) + max_tokens - 1):
                positions = torch.full((1, 1), position)
                logits = self.model(input_ids=token, past_key_values=cache, position_ids=positions).logits
                token = logits[:, -1:].argmax(-1)
                times.append(perf_counter() - started)
        return Run([times] * len(prompts))

    def _prefill(self, prompts: list[list[int]], compression: dict[str, Any] | None) -> tuple[Any, Any]:
        import torch
        from kvpress import SnapKVPress
        from transformers import DynamicCache

        cache = DynamicCache()
        arguments = {"input_ids": torch.tensor(prompts), "past_key_values": cache, "logits_to_keep": 1}
        if compression is None:
            logits = self.model(**arguments).logits
        else:
            with SnapKVPress(compression_ratio=compression["ratio"])(self.model):
                logits = self.model(**arguments).logits
        return logits[:, -1:].argmax(-1), cache


if __name__ == "__main__":
    stream = answers()
    serve(Engine(**json.loads(sys.argv[1])).run, stream)
