"""What requests gain from compressed caches in the prefix cache: ``python benchmarks/contexts.py``.

Documents: questions about a few documents, some of which are asked about often (Zipf), in a pool with room for some of
them. Clients send the next question when they have an answer. All sides have a pool of the same bytes. In each repeat
they begin with an empty prefix cache, and answer a part of the questions in turn; those that wait are stopped.

Chat: turns of one user, each of which sends the whole history, with ``reuse`` and without.

The models have random weights. Ratios are to stock vLLM in the same repeat.
"""

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from report import Spread, save, short
from sides import ModelShape, Run, Side
from turns import Case, take_turns, wait
from vllm_side import CLOCKS, vllm_side

from vllm_kvmerge.evaluation.summary import print_table

STOCK, PLAIN = "stock vLLM", "plain"
FLOAT32 = 2
"""Bytes of a float32 number, as a multiple of bfloat16's, in which a ``ModelShape`` counts."""
HITS, MISSES = "vllm:kvmerge_context_hits_total", "vllm:kvmerge_context_misses_total"
CONTEXTS, CONTEXT_BYTES = "vllm:kvmerge_shared_contexts", "vllm:kvmerge_shared_context_bytes"


@dataclass(frozen=True)
class DocumentsRow:
    """One side that answers questions about documents. Spreads are over repeats, of all their questions or, late, of
    the second half.

    tokens_found: share of the prompts' tokens that were in the prefix cache. context_hits: share of the questions whose
    document was there compressed, and mebibytes: of such a document; None without a policy.
    """

    case: str
    requests_per_minute: Spread
    ratio: Spread
    late_ratio: Spread
    tokens_found: Spread
    context_hits: Spread | None
    mebibytes: float | None
    first_token_p50: Spread
    first_token_p99: Spread


@dataclass(frozen=True)
class ChatRow:
    """One side of chats. first_tokens: seconds to the first token, by turn. growth: those of the last turn, as a
    multiple of those of the second. tokens_found: share of the last prompt's tokens."""

    case: str
    first_tokens: list[Spread]
    growth: Spread
    tokens_found: Spread


def side(name: str, folder: Path, shape: ModelShape, num_bytes: int, clock: str) -> Side:
    """vLLM with a pool of so many bytes, and with the plugin unless it is the stock one. Numbers are float32, which
    every processor can compute with."""
    is_ours = name != STOCK
    own = {"additional_config": {"kvmerge": {"max_compaction_seconds": 600}}} if is_ours else {}
    engine = own | {"dtype": "float32", "kv_cache_memory_bytes": num_bytes}
    return vllm_side(name, folder, shape, 0, is_ours, clock=clock, **engine)


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


# Documents.


def ask(arguments: argparse.Namespace, repeat: int) -> list[list[int]]:
    """Prompts: documents drawn by Zipf's law, each with another question."""
    rng = np.random.default_rng([arguments.seed, repeat])
    documents = rng.integers(1, 32_000, (arguments.documents, arguments.tokens)).tolist()
    shares = np.arange(1, arguments.documents + 1) ** -arguments.exponent
    drawn = rng.choice(arguments.documents, arguments.questions, p=shares / shares.sum())
    questions = rng.integers(1, 32_000, (arguments.questions, arguments.question_tokens)).tolist()
    return [documents[one] + question for one, question in zip(drawn, questions, strict=True)]


def answer(case: Case, arguments: argparse.Namespace, repeat: int) -> Iterator[Run]:
    """A run for each part of a repeat's questions, once it is asked for."""
    prompts = ask(arguments, repeat)
    for start in range(0, len(prompts), arguments.part):
        yield case.side.run(
            prompts[start : start + arguments.part],
            arguments.answer_tokens,
            case.compression,
            cold=start == 0,
            at_once=arguments.clients,
        )


def measure_documents(cases: list[Case], arguments: argparse.Namespace) -> list[DocumentsRow]:
    wait(cases)
    first = {}
    for case in cases:  # what is loaded at first use is loaded now
        prompt = np.random.default_rng(arguments.seed).integers(1, 32_000, arguments.tokens + 1).tolist()
        first[case.name] = case.side.run([prompt], 2, case.compression)
    repeats: dict[str, list[list[Run]]] = {case.name: [] for case in cases}
    for repeat in range(arguments.repeats):
        runs = {case.name: answer(case, arguments, repeat) for case in cases}
        num_parts = -(-arguments.questions // arguments.part)
        parts = take_turns(cases, num_parts, f"repeat {repeat + 1}", lambda case, runs=runs: next(runs[case.name]))
        for name, own in parts.items():
            repeats[name].append(own)
    return [documents_row(case, first[case.name], repeats, arguments) for case in cases]


def seconds(parts: Sequence[Run]) -> float:
    return sum(run.duration for run in parts)


def hit_share(start: dict[str, float], end: dict[str, float]) -> float:
    """Share of the contexts found compressed of those that were looked for between two readings of the metrics."""
    hits, misses = (end.get(name, 0.0) - start.get(name, 0.0) for name in (HITS, MISSES))
    return hits / (hits + misses)


def documents_row(
    case: Case, first: Run, repeats: dict[str, list[list[Run]]], arguments: argparse.Namespace
) -> DocumentsRow:
    """first: the run before all repeats. repeats: by side and repeat, the runs of its parts."""
    own = repeats[case.name]

    def spread(value: Callable[[list[Run]], float]) -> Spread:
        return Spread.of([value(parts) for parts in own])

    def ratio(since: int) -> Spread:
        both = zip(repeats[STOCK], own, strict=True)
        return Spread.of([seconds(stock[since:]) / seconds(parts[since:]) for stock, parts in both])

    def first_tokens(parts: list[Run]) -> list[float]:
        return [time for run in parts for time in run.times_to_first_token]

    num_tokens = arguments.questions * (arguments.tokens + arguments.question_tokens)
    hits = mebibytes = None
    if case.compression is not None:
        ends = [run.metrics for run in (first, *(parts[-1] for parts in own))]
        hits = Spread.of([hit_share(start, end) for start, end in zip(ends, ends[1:], strict=False)])
        mebibytes = ends[-1][CONTEXT_BYTES] / ends[-1][CONTEXTS] / 2**20
    return DocumentsRow(
        case.name,
        spread(lambda parts: 60 * arguments.questions / seconds(parts)),
        ratio(0),
        ratio(len(own[0]) // 2),
        spread(lambda parts: sum(sum(run.cached_tokens) for run in parts) / num_tokens),
        hits,
        mebibytes,
        spread(lambda parts: percentile(first_tokens(parts), 0.5)),
        spread(lambda parts: percentile(first_tokens(parts), 0.99)),
    )


def documents(arguments: argparse.Namespace, shape: ModelShape) -> list[DocumentsRow]:
    num_bytes = arguments.fit * arguments.tokens * FLOAT32 * shape.bytes_per_token
    settings = {"budget": arguments.budget, "context_tokens": arguments.tokens}
    compressions: dict[str, dict[str, Any] | None] = {STOCK: None}
    compressions |= {name: None if name == PLAIN else {"policy": name} | settings for name in arguments.sides}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cases = [
            Case(name, stack.enter_context(side(name, folder, shape, num_bytes, arguments.clock)), compression)
            for name, compression in compressions.items()
        ]
        rows = measure_documents(cases, arguments)
    print_table(
        f"{arguments.questions} questions about {arguments.documents} documents of {arguments.tokens} tokens, pool of "
        f"{num_bytes / 2**20:.0f} MiB, budget {arguments.budget}; median (range)",
        ["requests/min", "ratio", "late", "tokens found", "contexts found", "MiB", "1st token s, p50", "p99"],
        {
            row.case: [
                str(row.requests_per_minute),
                str(row.ratio),
                str(row.late_ratio),
                str(row.tokens_found),
                str(row.context_hits or ""),
                "" if row.mebibytes is None else short(row.mebibytes),
                str(row.first_token_p50),
                str(row.first_token_p99),
            ]
            for row in rows
        },
        first="",
    )
    return rows


# Chat.


def turns(case: Case, arguments: argparse.Namespace, chat: int) -> Iterator[Run]:
    """A run for each turn of a chat, once it is asked for; each side has other questions."""
    rng = np.random.default_rng([arguments.seed, chat, *case.name.encode()])
    history: list[int] = []
    for _ in range(arguments.turns):
        history += rng.integers(1, 32_000, arguments.turn_tokens - arguments.answer_tokens).tolist()
        run = case.side.run([history], arguments.answer_tokens, case.compression, cold=False)
        history += run.answers[0]
        yield run


def chat(arguments: argparse.Namespace, shape: ModelShape) -> list[ChatRow]:
    compressions: dict[str, dict[str, Any] | None] = {STOCK: None}
    for name in arguments.chat_policies:
        fields = {"policy": name, "budget": arguments.budget, "decode": "bounded"}
        compressions |= {name: fields, f"{name}, reuse": fields | {"reuse": "turns"}}
    # Room for one chat of all cases twice: the one before it goes.
    num_tokens = 2 * len(compressions) * arguments.turns * arguments.turn_tokens
    num_bytes = num_tokens * FLOAT32 * (shape.bytes_per_token + shape.metadata_bytes_per_token)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stock, ours = (
            stack.enter_context(side(name, folder, shape, num_bytes, arguments.clock)) for name in (STOCK, PLAIN)
        )
        cases = [Case(name, stock if name == STOCK else ours, fields) for name, fields in compressions.items()]
        chats: dict[str, list[list[Run]]] = {case.name: [] for case in cases}
        for number in range(arguments.chats + 1):
            runs = {case.name: turns(case, arguments, number) for case in cases}
            # The first chat is short and not counted: what is loaded at first use is loaded then.
            num_turns = arguments.turns if number else 2
            done = take_turns(cases, num_turns, f"chat {number}", lambda case, runs=runs: next(runs[case.name]))
            for name, own in done.items():
                chats[name].append(own)
    rows = [chat_row(name, own[1:], arguments) for name, own in chats.items()]
    shown = sorted({1, 2, arguments.turns // 2, arguments.turns})
    print_table(
        f"{arguments.turns} turns of {arguments.turn_tokens} tokens, budget {arguments.budget}; median (range)",
        [*(f"1st token s, turn {turn}" for turn in shown), "last / 2nd", "tokens found"],
        {
            row.case: [*(str(row.first_tokens[turn - 1]) for turn in shown), str(row.growth), str(row.tokens_found)]
            for row in rows
        },
        first="",
    )
    return rows


def chat_row(name: str, chats: list[list[Run]], arguments: argparse.Namespace) -> ChatRow:
    """chats: the runs of their turns."""
    times = [[run.time_to_first_token for run in own] for own in chats]
    num_tokens = arguments.turns * arguments.turn_tokens - arguments.answer_tokens
    return ChatRow(
        name,
        [Spread.of(of_turn) for of_turn in zip(*times, strict=True)],
        Spread.of([own[-1] / own[1] for own in times]),
        Spread.of([own[-1].cached_tokens[0] / num_tokens for own in chats]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=["documents", "chat"], default=["documents", "chat"])
    parser.add_argument("--budget", type=float, default=0.25)
    parser.add_argument("--answer-tokens", type=int, default=16)
    parser.add_argument("--documents", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=4000, help="of a document")
    parser.add_argument("--questions", type=int, default=500)
    parser.add_argument("--question-tokens", type=int, default=32)
    parser.add_argument("--exponent", type=float, default=1.0, help="of Zipf's law")
    parser.add_argument("--fit", type=int, default=12, help="documents that the pool holds")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--sides", nargs="+", default=[PLAIN, "snapkv", "kvzip"], help="plain: without a policy")
    parser.add_argument("--part", type=int, default=25, help="questions that a side answers before the next one does")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--turn-tokens", type=int, default=500, help="of a question and its answer")
    parser.add_argument("--chat-policies", nargs="*", default=["keydiff", "h2o"])
    parser.add_argument("--chats", type=int, default=5)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="processor: for a machine that is shared")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--intermediate", type=int, help="default: 4 x width")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/contexts.json"))
    arguments = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine's metrics are read in its own process
    heads = arguments.heads, arguments.kv_heads
    shape = ModelShape(arguments.layers, arguments.width, *heads, intermediate=arguments.intermediate)
    rows: list[DocumentsRow | ChatRow] = []
    if "documents" in arguments.parts:
        # A context may be followed by its repetition, which is asked for in some tokens more.
        rows += documents(arguments, replace(shape, max_tokens=2 * arguments.tokens + 200))
    if "chat" in arguments.parts:
        rows += chat(arguments, replace(shape, max_tokens=arguments.turns * arguments.turn_tokens + 1))
    save(arguments.output, vars(arguments) | {"shape": shape}, rows)


if __name__ == "__main__":
    main()
