"""What storing keys and values in fewer bits changes: ``python benchmarks/front_formats.py [MODEL]``.

A model of ``vllm-kvmerge serve`` (default: qwen2.5-coder-0.5b) reads 300 tokens of prose after 1,200 whose keys and
values have been stored so. Printed are the divergence (KL, nats per token) of its predictions from those over bfloat16,
and in which share of places its first choice is the same. No entry is evicted.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from vllm_kvmerge.demo import pretrained

TEXT = Path("/usr/share/common-licenses/GPL-3")
CONTEXT, AFTER = 1200, 300

Format = Callable[[Tensor], Tensor]


def whole_numbers(bits: int, dim: int) -> Format:
    """Scales are shared along ``dim`` of ``[1, H, n, d]``: -1, by entry; -2, by channel."""
    largest = 2 ** (bits - 1) - 1

    def stored(rows: Tensor) -> Tensor:
        scales = (rows.float().abs().amax(dim, keepdim=True) / largest).half().float()
        return ((rows.float() / scales).round().clamp(-largest, largest) * scales).to(rows.dtype)

    return stored


def fp8(rows: Tensor) -> Tensor:
    largest = torch.finfo(torch.float8_e4m3fn).max
    return rows.clamp(-largest, largest).to(torch.float8_e4m3fn).to(rows.dtype)


def unchanged(rows: Tensor) -> Tensor:
    return rows


FORMATS: dict[str, tuple[Format, Format]] = {
    "int8 (front: int8)": (whole_numbers(8, -1), whole_numbers(8, -1)),
    "int8, keys by channel": (whole_numbers(8, -2), whole_numbers(8, -1)),
    "int8 keys, int4 values": (whole_numbers(8, -1), whole_numbers(4, -1)),
    "int4 keys by channel, bfloat16 values": (whole_numbers(4, -2), unchanged),
    "fp8 (e4m3)": (fp8, fp8),
}


def main() -> None:
    path = pretrained.folder(sys.argv[1] if len(sys.argv) > 1 else "qwen2.5-coder-0.5b")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    tokens = torch.tensor([AutoTokenizer.from_pretrained(path).encode(TEXT.read_text())[: CONTEXT + AFTER]])
    positions = torch.arange(CONTEXT, CONTEXT + AFTER).unsqueeze(0)
    with torch.inference_mode():
        whole = DynamicCache()
        model(tokens[:, :CONTEXT], past_key_values=whole, logits_to_keep=1)
        rows = [(layer.keys, layer.values) for layer in whole.layers]

        def predictions(of_keys: Format, of_values: Format) -> Tensor:
            cache = DynamicCache()
            for number, (keys, values) in enumerate(rows):
                cache.update(of_keys(keys), of_values(values), number)
            logits = model(tokens[:, CONTEXT:], past_key_values=cache, position_ids=positions).logits[0]
            return logits.float().log_softmax(-1)

        print(f"largest number of a key: {max(keys.abs().max().item() for keys, _ in rows):.0f}")
        expected = predictions(unchanged, unchanged)
        for name, formats in FORMATS.items():
            found = predictions(*formats)
            divergence = (expected.exp() * (expected - found)).sum(-1).mean().item()
            same = (expected.argmax(-1) == found.argmax(-1)).float().mean().item()
            print(f"{name:40} {divergence:8.4f} {same:6.3f}")


if __name__ == "__main__":
    main()
