"""Far beyond the length that the model was trained on: ``python benchmarks/endless.py``.

The demo model reads one text of ``--spans`` times ``--trained`` tokens, documents of ``--document`` tokens one after
the other, in chunks of ``--chunk`` (``prefill``), and the perplexity of each span is reported: with positions of the
cache, as the model is; with those of the text and with a full cache, for a table of RoPE that is as long as the text
(``--hf-overrides``); and for each span read alone, with a full cache. The table that is printed has the first span, and
four parts of equally many.

``--generate N`` has each policy generate N tokens instead, with positions of the cache, and looks at what the cache
holds then.
"""

import argparse
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from report import save, short
from rich.progress import track

from vllm_kvmerge import demo
from vllm_kvmerge.demo import documents
from vllm_kvmerge.demo.language import BOS, plain_text
from vllm_kvmerge.evaluation.options import print_table
from vllm_kvmerge.ops import SequenceLayers, gather_metadata, gather_rows

SLOT = 8192
"""Bytes of a token in the cache, at least."""

ROOM = 256
"""Tokens beyond the text's, for what the engine rounds up."""


@dataclass(frozen=True)
class Span:
    """Perplexity of a span of the text, which begins after ``start`` tokens."""

    case: str
    start: int
    perplexity: float


@dataclass(frozen=True)
class Held:
    """What a request's cache holds after ``tokens``, over layers and heads. is_finite: all numbers of it. votes: of a
    head's entries together, the least and the most. largest: magnitudes of scores, second statistics, keys and values.
    position: largest that RoPE counts."""

    case: str
    tokens: int
    is_finite: bool
    votes: tuple[float, float]
    largest: dict[str, float]
    position: int


def text(arguments: argparse.Namespace, spans: int) -> list[int]:
    size, tokens, part = arguments.document, [BOS], 0
    while len(tokens) < spans * arguments.trained:
        rng = np.random.default_rng((arguments.seed, part))
        # Of a document without <s>.
        tokens += documents.training_sample(rng, size + 1)[0][1:].tolist() if size else plain_text(rng, 512)
        part += 1
    return tokens[: spans * arguments.trained]


def engine(arguments: argparse.Namespace, pool: int, longest: int, **options: Any) -> Any:
    from vllm import LLM

    from vllm_kvmerge import kvmerge_engine_args

    return LLM(
        **kvmerge_engine_args(
            model=demo.model_path(),
            dtype=arguments.dtype,
            enforce_eager=True,
            max_model_len=longest,
            max_num_batched_tokens=2048,
            kv_cache_memory_bytes=pool * SLOT,
            additional_config={"kvmerge": {"max_compaction_seconds": 600}},
            **options,
        )
    )


def losses(llm: Any, prompts: list[list[int]], fields: dict[str, Any] | None) -> np.ndarray:
    """-ln p of all tokens, one prompt after the other; 0 for the first of each."""
    from vllm import SamplingParams

    from vllm_kvmerge import compression

    extra = None if fields is None else compression(**fields)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False, extra_args=extra)
    found = []
    for prompt in prompts:
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        rows = zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
        found += [0.0, *(-row[token].logprob for row, token in rows)]
    return np.array(found)


def read(arguments: argparse.Namespace) -> list[Span]:
    tokens = text(arguments, arguments.spans)
    length, size = len(tokens), arguments.trained
    longest, few = length + ROOM, 2 * (arguments.budget + arguments.chunk) + ROOM
    common = {"budget": arguments.budget, "prefill": {"chunk": arguments.chunk}}
    extended = {"hf_overrides": {"max_position_embeddings": longest}}
    cases: list[tuple[str, str, dict[str, Any] | None, list[list[int]]]] = [
        ("each span alone", "extended", None, [tokens[start : start + size] for start in range(0, length, size)]),
        ("full", "extended", None, [tokens]),
    ]
    for positions, name in (("text", "extended"), ("cache", "own")):
        for policy in arguments.policies:
            fields = {"policy": policy, "positions": positions, **common}
            cases.append((f"{policy}, positions of the {positions}", name, fields, [tokens]))
    engines = {
        "extended": engine(arguments, longest, longest, **extended),
        "own": engine(arguments, few, longest),
    }
    rows = []
    for case, name, fields, prompts in track(cases, "cases"):
        by_span = losses(engines[name], prompts, fields).reshape(arguments.spans, size).mean(1)
        rows += [Span(case, index * size, math.exp(one)) for index, one in enumerate(by_span.tolist())]
    return rows


def generate(arguments: argparse.Namespace) -> list[Held]:
    from vllm import SamplingParams

    from vllm_kvmerge import compression

    prompt = text(arguments, 1)[: arguments.budget]
    longest = len(prompt) + arguments.generate + ROOM
    llm = engine(arguments, len(arguments.policies) * (2 * arguments.budget + ROOM), longest)
    for policy in arguments.policies:
        extra = compression(policy, budget=arguments.budget, positions="cache")
        params = SamplingParams(max_tokens=arguments.generate + 1, ignore_eos=True, seed=0, extra_args=extra)
        llm.llm_engine.add_request(policy, {"prompt_token_ids": prompt}, params)
    core = llm.llm_engine.engine_core.engine_core
    for _ in track(range(arguments.generate), "tokens"):
        llm.llm_engine.step()
    runner = core.model_executor.driver_worker.worker.model_runner
    rows = []
    for request in core.scheduler.running:
        assert request.num_output_tokens == arguments.generate, "the pool is too small for all policies together"
        rows.append(held(runner, request.request_id, request.num_computed_tokens))
    return rows


def held(runner: Any, request_id: str, num_tokens: int) -> Held:
    state, layers = runner.compression.states[request_id], runner.compression.compactor.layers
    blocks = runner._blocks_of(request_id).repeat(len(layers), 1)
    segments = torch.tensor([[state.front, state.tail, num_tokens]] * len(layers))
    seq_layers = SequenceLayers(layers, torch.arange(len(layers)), blocks, segments, state.pages)
    index = torch.arange(seq_layers.num_entries).repeat(seq_layers.num_heads, 1)
    log_votes, scores, aux, positions = gather_metadata(seq_layers)
    found = {"scores": scores, "aux": aux}
    found |= {plane: gather_rows(seq_layers, plane, index) for plane in ("keys", "values")}  # type: ignore[arg-type]
    live = positions >= 0
    is_finite = all(bool(plane[live].isfinite().all()) for plane in (log_votes, *found.values()))
    assert int(positions.max()) < num_tokens
    votes = log_votes.exp().sum(1)
    return Held(
        case=request_id.rsplit("-", 1)[0],
        tokens=num_tokens,
        is_finite=is_finite,
        votes=(votes.min().item(), votes.max().item()),
        largest={name: plane[live].abs().max().item() for name, plane in found.items()},
        position=num_tokens - 1 + state.shift,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spans", type=int, default=20)
    parser.add_argument("--trained", type=int, default=4096, help="tokens of a span")
    parser.add_argument("--document", type=int, default=512, help="0: plain text without statements and questions")
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument("--policies", nargs="+", default=["streaming_llm", "h2o", "keepkv", "zsmerge"])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--generate", type=int, default=0, metavar="N")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    arguments = parser.parse_args()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    if arguments.generate:
        rows: list[Any] = generate(arguments)
        columns = ["tokens", "finite", "votes of a head", "largest score", "largest key", "largest position"]
        table = {
            row.case: [
                f"{row.tokens:,}",
                str(row.is_finite),
                "..".join(map(short, row.votes)),
                short(row.largest["scores"]),
                short(row.largest["keys"]),
                str(row.position),
            ]
            for row in rows
        }
    else:
        rows = read(arguments)
        by_case: dict[str, list[float]] = {}
        for row in rows:
            by_case.setdefault(row.case, []).append(math.log(row.perplexity))
        parts = [part.tolist() for part in np.array_split(np.arange(arguments.spans), min(4, arguments.spans))]
        columns = ["span 1", *(f"{part[0] + 1} to {part[-1] + 1}" for part in parts)]
        table = {
            case: [short(math.exp(np.mean([some[index] for index in part]))) for part in ([0], *parts)]
            for case, some in by_case.items()
        }
    print_table("", columns, table, first="case")
    if arguments.output:
        save(arguments.output, vars(arguments), rows)


if __name__ == "__main__":
    main()
