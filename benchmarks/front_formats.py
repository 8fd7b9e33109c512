"""What storing keys and values in fewer bits changes: ``python benchmarks/front_formats.py [MODEL]``.

A model of ``vllm-kvmerge serve`` (default: qwen2.5-coder-0.5b) reads 300 tokens of prose after 1,200 whose keys and
values have been stored so. Printed are the channel with a key's largest number and, for each format, the divergence
(KL, nats per token) of its predictions from those over bfloat16, and in which share of places its first choice is the
same. No entry is evicted.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from vllm_kvmerge.demo import pretrained
from vllm_kvmerge.ops.coded import CODINGS, Coding

TEXT = Path("/usr/share/common-licenses/GPL-3")
CONTEXT, AFTER = 1200, 300

Format = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Of keys and values, ``[H, n, d]``."""


def coded(coding: Coding, is_shuffled: bool = False) -> Format:
    """As fronts that are coded so hold the tokens, in order or in any."""

    def stored(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        order = torch.arange(keys.shape[1])
        if is_shuffled:
            order = torch.randperm(len(order), generator=torch.Generator().manual_seed(1))
        planes = (rows[:, order].float() for rows in (keys, values))
        live = torch.ones(keys.shape[:2], dtype=torch.bool)
        found = CODINGS[coding].decode(CODINGS[coding].encode(*planes, live))
        keys, values = (rows[:, order.argsort()] for rows in found)
        return keys, values

    return stored


def symmetric(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Keys as whole numbers from -7 to 7 times a scale of each channel."""
    scales = (keys.float().abs().amax(1, keepdim=True) / 7).half().float()
    return (keys.float() / scales).round().clamp(-7, 7) * scales, values


def fp8(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    largest = torch.finfo(torch.float8_e4m3fn).max
    keys, values = (rows.clamp(-largest, largest).to(torch.float8_e4m3fn).float() for rows in (keys, values))
    return keys, values


def unchanged(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    return keys, values


FORMATS: dict[str, Format] = {
    "front: int8": coded("int8"),
    "front: int4": coded("int4"),
    "front: int4, tokens in any order": coded("int4", is_shuffled=True),
    "4-bit keys by channel, without offsets": symmetric,
    "fp8 (e4m3)": fp8,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="qwen2.5-coder-0.5b", choices=pretrained.SOURCES)
    path = pretrained.folder(parser.parse_args().model)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    tokens = torch.tensor([AutoTokenizer.from_pretrained(path).encode(TEXT.read_text())[: CONTEXT + AFTER]])
    positions = torch.arange(CONTEXT, CONTEXT + AFTER).unsqueeze(0)
    with torch.inference_mode():
        whole = DynamicCache()
        model(tokens[:, :CONTEXT], past_key_values=whole, logits_to_keep=1)
        rows = [(layer.keys, layer.values) for layer in whole.layers]

        def predictions(stored: Format) -> Tensor:
            cache = DynamicCache()
            for number, (keys, values) in enumerate(rows):
                cache.update(*(plane.to(keys.dtype).unsqueeze(0) for plane in stored(keys[0], values[0])), number)
            logits = model(tokens[:, CONTEXT:], past_key_values=cache, position_ids=positions).logits[0]
            return logits.float().log_softmax(-1)

        channels = torch.cat([keys[0].mT.flatten(0, 1) for keys, _ in rows])
        largest = channels[channels.abs().amax(1).argmax()]
        print(f"keys' largest channel: {largest.min():.0f} to {largest.max():.0f}")
        expected = predictions(unchanged)
        for name, stored in FORMATS.items():
            found = predictions(stored)
            divergence = (expected.exp() * (expected - found)).sum(-1).mean().item()
            same = (expected.argmax(-1) == found.argmax(-1)).float().mean().item()
            print(f"{name:40} {divergence:8.4f} {same:6.3f}")


if __name__ == "__main__":
    main()
