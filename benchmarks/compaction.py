"""What one compaction costs, beside one decode step: ``python benchmarks/compaction.py``.

One layer with random queries, keys and values is compressed to ``--budget`` at the end of a prompt (scores and queries
included), and again each time ``--interval`` tokens have been added (bounded policies). A decode step is attention of
one token to all entries, on the same operators. Times are per layer.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
from report import Spread, save, time_of
from rich.progress import track

from vllm_kvmerge.evaluation.attention import LayerTrace, TracedSequence
from vllm_kvmerge.evaluation.options import print_table
from vllm_kvmerge.policies import PRESETS
from vllm_kvmerge.policies.rotation import Rotation
from vllm_kvmerge.request.parameters import parse_compression


@dataclass(frozen=True)
class Row:
    """Milliseconds per layer: of the compaction when the prompt ends, and of one while generating, if there is any."""

    policy: str
    prompt_end: Spread
    decoding: Spread | None


def milliseconds(seconds: list[float]) -> Spread:
    return Spread.of([1e3 * value for value in seconds])


def random_layer(arguments: argparse.Namespace) -> LayerTrace:
    num_tokens = arguments.entries + arguments.interval * (arguments.repeats + 1)
    heads, groups, size = arguments.kv_heads, arguments.groups, arguments.head_size
    angles = torch.rand(num_tokens, size // 2)
    weights = torch.randn(heads, groups, heads * groups * size, size) / size**0.5
    return LayerTrace(
        queries=torch.randn(num_tokens, heads * groups, size),
        keys=torch.randn(num_tokens, heads, size),
        values=torch.randn(num_tokens, heads, size),
        output_weights=weights.to(getattr(torch, arguments.dtype)),
        scale=size**-0.5,
        rotation=Rotation(torch.cat([angles.cos(), angles.sin()], dim=1)),
    )


def measure(policy: str, layer: LayerTrace, arguments: argparse.Namespace) -> Row:
    dtype = getattr(torch, arguments.dtype)
    config = parse_compression({"policy": policy, "budget": arguments.budget, "interval": arguments.interval})
    assert config is not None
    prompt_end, decoding = [], []
    for _ in range(arguments.repeats):
        sequence = TracedSequence([layer], dtype)
        sequence.write(arguments.entries)
        started = perf_counter()
        sequence.compress(config, arguments.budget)
        prompt_end.append(perf_counter() - started)
    if config.decode == "bounded":
        for _ in range(arguments.repeats):
            sequence.attend(sequence.write(arguments.interval), config)
            started = perf_counter()
            sequence.compress(config, arguments.budget)
            decoding.append(perf_counter() - started)
    return Row(policy, milliseconds(prompt_end), milliseconds(decoding) if decoding else None)


def decode_step(layer: LayerTrace, num_entries: int, arguments: argparse.Namespace) -> Spread:
    sequence = TracedSequence([layer], getattr(torch, arguments.dtype))
    sequence.write(num_entries - 1)
    newest = sequence.write(1)
    seconds = time_of(lambda: sequence.attend(newest), 10 * arguments.repeats)
    return Spread(1e3 * seconds.median, 1e3 * seconds.least, 1e3 * seconds.most)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=4096, help="tokens of the prompt")
    parser.add_argument("--budget", type=int, default=410)
    parser.add_argument("--interval", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--groups", type=int, default=4, help="query heads per KV head")
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--policies", nargs="+", default=sorted(PRESETS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/compaction.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    layer = random_layer(arguments)
    steps = {n: decode_step(layer, n, arguments) for n in (arguments.entries, arguments.budget)}
    rows = [measure(policy, layer, arguments) for policy in track(arguments.policies, "policies")]
    save(
        arguments.output, vars(arguments) | {"decode_step_ms": json.dumps({n: str(s) for n, s in steps.items()})}, rows
    )
    print_table(
        f"Compaction of {arguments.entries} entries to {arguments.budget}, ms per layer: median (range); "
        "a decode step: " + ", ".join(f"{spread} over {n} entries" for n, spread in steps.items()),
        ["when the prompt ends", f"every {arguments.interval} tokens"],
        {row.policy: [str(row.prompt_end), str(row.decoding or "")] for row in rows},
    )


if __name__ == "__main__":
    main()
