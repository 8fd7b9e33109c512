"""The cases of gpu_operators.py, part by part: each is checked, then timed."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from gpu_bench import BLOCK_SIZE, DECAY, Bench, Caches, Results, Row, expected_attention, gather_entries, relative_error
from gpu_peers import Problem, all_peers, timed
from torch import Tensor

from vllm_kvmerge.engine.attention.rows import PromptScores, QueryRing
from vllm_kvmerge.engine.messages import Compress
from vllm_kvmerge.engine.worker.compaction import Compaction
from vllm_kvmerge.engine.worker.compactor import Compactor
from vllm_kvmerge.ops import (
    NO_UPDATE,
    AttentionBatch,
    HeadPages,
    PagedKVCache,
    Rows,
    ScoreMode,
    ScoreUpdate,
    SequenceLayers,
    cuda,
    reference,
    triton,
)
from vllm_kvmerge.ops.coded import LARGEST_CODE, Int8Pages, number_of, scaled, slots_of
from vllm_kvmerge.ops.types import PLANES, PageTables
from vllm_kvmerge.policies.entries import Entries
from vllm_kvmerge.request.spec import parse_compression

Part = Callable[[Bench, argparse.Namespace, Results], Iterator[Row]]


LEAST_BUDGET = 40
"""More than policies protect."""


def has_cuda(device: torch.device) -> bool:
    """Whether there are CUDA's operators for a device."""
    try:
        return cuda.runs_on(device) is None
    except (OSError, ImportError):
        return False


def attention_calls(device: torch.device) -> dict[str, Callable[..., None]]:
    """Each implementation of attention that there is."""
    calls: dict[str, Callable[..., None]] = {"triton": triton.paged_attention}
    if has_cuda(device):
        calls["cuda"] = cuda.paged_attention
    return calls


@dataclass(frozen=True)
class Attention:
    """A call of attention for the newest ``queries`` of each sequence. front: entries that have votes."""

    groups: int
    front: int
    mode: str
    queries: int = 1

    def query(self, bench: Bench, rows: int) -> Tensor:
        tokens, heads = rows * self.queries, bench.heads * self.groups
        return bench.rand(tokens, heads, bench.head_size).to(bench.dtype)

    @property
    def update(self) -> ScoreUpdate | None:
        return None if self.mode == "none" else ScoreUpdate(ScoreMode(self.mode), DECAY)

    def batch(self, bench: Bench, table: Tensor, entries: Sequence[int]) -> AttentionBatch:
        """entries: of each sequence, of which all have the same front."""
        rows, update = len(table), self.update or NO_UPDATE
        lens, front, mode = (torch.full((rows,), n) for n in (self.queries, self.front, update.mode.code))
        planes = torch.arange(rows) * self.queries, lens, torch.tensor(entries), front, front, mode
        numbers = [plane.to(bench.device, torch.int32) for plane in planes]
        decays = torch.full((rows,), update.decay, device=bench.device)
        return AttentionBatch(table, *numbers, decays, self.queries)

    def seen(self, entries: int) -> int:
        """Pairs of a query and an entry that it sees, for a sequence and query head."""
        return self.queries * entries - self.queries * (self.queries - 1) // 2


def attention(
    bench: Bench, caches: Caches, shape: Attention, part: str, name: str, call: Callable[..., None],
    rows_of: tuple[Tensor, Sequence[int]] | None = None, fronts: "Fronts | None" = None,
) -> Row:  # fmt: skip
    """One implementation of attention; checked for the first and the last sequence. rows_of: block table, and how many
    entries each sequence has, if not all that ``caches`` has for each. fronts: where they lie, if in pages."""
    table, lengths = rows_of or (caches.table, [caches.entries] * caches.rows)
    rows, n, heads, scale = len(lengths), sum(lengths), bench.heads, bench.head_size**-0.5
    query, batch = shape.query(bench, rows), shape.batch(bench, table, lengths)
    output = torch.full_like(query, torch.nan)

    batches = [batch] * caches.copies if fronts is None else [replace(batch, tables=one) for one in fronts.tables]

    def run(number: int) -> None:
        call(query, caches.pages(number), batches[number % caches.copies], scale, output)

    checked = sorted({0, rows - 1})
    front = shape.front
    before = [
        gather_entries(caches.pages(0), table[row], front, front, lengths[row])
        if fronts is None
        else fronts.entries(row)
        for row in checked
    ]
    run(0)
    errors = {"output": 0.0} | ({} if shape.update is None else {"scores": 0.0})
    for row, entries in zip(checked, before, strict=True):
        tokens = slice(row * shape.queries, (row + 1) * shape.queries)
        expected, scores = expected_attention(query[tokens], entries, scale, shape.update)
        errors["output"] = worst(errors["output"], relative_error(output[tokens], expected))
        if scores is not None:
            located = SequenceLayers.of(caches.pages(0), table[row], front, front, lengths[row])
            after = reference.gather_metadata(located)[1]
            errors["scores"] = worst(errors["scores"], relative_error(after, scores))
    size = heads * (n * 2 * bench.head_size * bench.dtype.itemsize + 4 * rows * front)
    if fronts is not None and fronts.is_coded:  # bytes and two scales
        size += heads * rows * front * (2 * bench.head_size * (1 - bench.dtype.itemsize) + 4)
    size += heads * n * {"none": 0, "sum": 8, "mean": 16, "log_ema": 16}[shape.mode]
    flops = 4 * heads * shape.groups * bench.head_size * sum(map(shape.seen, lengths))
    sizes = " + ".join(f"{lengths.count(length)} x {length}" for length in dict.fromkeys(lengths))
    queries = "" if shape.queries == 1 else f"{shape.queries} new, "
    return Row(
        part,
        "paged_attention",
        name,
        f"{sizes}, {queries}G {shape.groups}, front {front}, {shape.mode}" + (f", {fronts}" if fronts else ""),
        bench.dtype_name,
        bench.time(run, caches.copies),
        bytes=size if shape.queries == 1 else 0,
        flops=0 if shape.queries == 1 else flops,
        errors=errors,
    )


class Fronts:
    """Fronts of all sequences of some caches, all entries but the last block or two, in pages of the heads' own. The
    entries of coded ones are made here.

    tables: of each copy.
    """

    def __init__(self, caches: Caches, is_coded: bool) -> None:
        self.caches, self.is_coded, device = caches, is_coded, caches.bench.device
        self.length = caches.entries // BLOCK_SIZE * BLOCK_SIZE - BLOCK_SIZE
        size = BLOCK_SIZE * slots_of("int8" if is_coded else None)
        blocks = caches.table[:, : -(-self.length // size)].cpu()
        ids = torch.stack([HeadPages.even(1, 0, caches.bench.heads, some) for some in blocks])
        fronts, coded = torch.full(ids.shape[:2], self.length), torch.full((len(ids),), number_of("int8"))
        self.pages = HeadPages(caches.layers[:1], ids, fronts, coded if is_coded else None)
        # Those of each sequence in a row, which must last as long as they are read.
        self._tables = torch.stack([self.pages[row : row + 1].table() for row in range(len(ids))]).to(device)
        addresses = self._tables.data_ptr() + torch.arange(len(ids), device=device) * self._tables[0].nbytes
        self.tables = [PageTables((layer,), 0, addresses, is_coded) for layer in caches.layers]
        if is_coded:
            for layer in caches.layers:
                self._fill(layer)

    def __str__(self) -> str:
        return "coded" if self.is_coded else "in pages"

    def _fill(self, layer: PagedKVCache) -> None:
        tails = self.caches.table[:, self.length // BLOCK_SIZE :].flatten().long()
        kept = [(plane, plane[tails]) for plane in (layer.keys, layer.values)]
        pages = Int8Pages.of(layer)
        for plane in (pages.keys, pages.values):
            plane.random_(-LARGEST_CODE, LARGEST_CODE + 1)
        pages.log_votes.uniform_(0.0, 3.0)
        for plane in (pages.key_scales, pages.value_scales):
            plane.uniform_(0.01, 0.02)
        for plane, before in kept:
            plane[tails] = before

    def entries(self, row: int) -> Entries:
        """Of a sequence in the first copy."""
        caches, front = self.caches, self.length
        if not self.is_coded:
            return gather_entries(caches.pages(0), caches.table[row], front, front, caches.entries)
        layer = caches.pages(0)
        pages, after = Int8Pages.of(layer), gather_entries(layer, caches.table[row], 0, front, caches.entries)
        blocks = caches.table[row, : self.pages.ids.shape[2]].long()

        def of_front(plane: Tensor) -> Tensor:
            return plane[blocks].transpose(0, 1).flatten(1, 2)[:, :front].float()

        keys = of_front(pages.keys.transpose(2, 3)) * of_front(pages.key_scales).unsqueeze(-1)
        values = of_front(pages.values) * of_front(pages.value_scales).unsqueeze(-1)
        planes = torch.cat([keys, after.keys], 1), torch.cat([values, after.values], 1)
        votes = torch.cat([of_front(pages.log_votes), after.log_votes], 1)
        scores, aux = torch.zeros(2, *votes.shape, device=votes.device)
        return Entries(*planes, votes, scores, aux, aux.long())


def worst(one: float, other: float) -> float:
    """The larger one; NaN is larger than all."""
    return one if one != one or one > other else other


def fits(bench: Bench, rows: int, entries: int, share: int = 1) -> bool:
    return Caches.bytes(bench, rows, entries) <= bench.limit // share


def decode(bench: Bench, arguments: argparse.Namespace, results: Results) -> Iterator[Row]:
    """One query for each sequence: without votes, and with votes and each way to update scores."""
    for entries in arguments.entries:
        for rows in arguments.batch:
            if not fits(bench, rows, entries):
                continue
            caches = Caches(bench, rows, entries)
            for groups in arguments.groups:
                for name, call in attention_calls(bench.device).items():
                    yield attention(bench, caches, Attention(groups, 0, "none"), "decode", name, call)
                    for mode in list(ScoreMode):
                        shape = Attention(groups, entries // 2, mode)
                        yield attention(bench, caches, shape, "decode", name, call)


def coded_fronts(bench: Bench, arguments: argparse.Namespace, results: Results) -> Iterator[Row]:
    """Decoding over fronts in 8 bits, beside the same in the cache's dtype; and how long writing them takes."""
    for entries in arguments.entries:
        for rows in arguments.batch:
            if not fits(bench, rows, entries):
                continue
            caches = Caches(bench, rows, entries)
            for is_coded in (False, True):
                fronts = Fronts(caches, is_coded)
                for groups in arguments.groups:
                    shape = Attention(groups, fronts.length, "none")
                    yield attention(bench, caches, shape, "coded", "triton", triton.paged_attention, fronts=fronts)
    yield _write_codes(bench, Caches(bench, arguments.units, arguments.entries[0]))


def _write_codes(bench: Bench, caches: Caches) -> Row:
    """Each unit is the one layer of a sequence."""
    fronts = Fronts(caches, is_coded=True)
    heads, count, d = caches.rows * bench.heads, fronts.length, bench.head_size
    keys, values = bench.rand(2, heads, count, d).unbind()
    votes = bench.rand(heads, count)
    known = [caches.seq_layers(number, 0) for number in range(caches.copies)]

    def run(number: int) -> None:
        triton.write_codes(known[number % caches.copies], fronts.pages, keys, values, votes)

    run(0)
    found = fronts.entries(caches.rows - 1)
    errors = {}
    for name, rows in (("keys", keys), ("values", values)):
        codes, scales = scaled(rows[-bench.heads :])
        expected = codes * scales.float().unsqueeze(-1)
        errors[name] = relative_error(getattr(found, name)[:, :count], expected)
    return Row(
        "coded",
        "write_codes",
        "triton",
        f"{caches.rows} units x {count}",
        bench.dtype_name,
        bench.time(run, caches.copies),
        bytes=heads * count * (2 * d * 5 + 12),
        errors=errors,
    )


def skewed(bench: Bench, arguments: argparse.Namespace, results: Results) -> Iterator[Row]:
    """A long sequence among short ones, whose entries a step's bandwidth would read in the same time by themselves."""
    lengths = [arguments.long, *[arguments.short] * arguments.others]
    widths = [-(-length // BLOCK_SIZE) for length in lengths]
    if not fits(bench, 1, sum(widths) * BLOCK_SIZE):
        return
    caches = Caches(bench, 1, sum(widths) * BLOCK_SIZE)
    table = torch.nn.utils.rnn.pad_sequence(list(caches.table[0].split(widths)), batch_first=True)
    for groups in arguments.groups:
        for name, call in attention_calls(bench.device).items():
            for shape in (Attention(groups, 0, "none"), Attention(groups, arguments.short // 2, "sum")):
                yield attention(bench, caches, shape, "skewed", name, call, (table, lengths))


def peers(bench: Bench, arguments: argparse.Namespace, results: Results) -> Iterator[Row]:
    """What else computes such attention, where it is small enough to be held several times."""
    for entries in arguments.entries:
        for rows in arguments.batch:
            if fits(bench, rows, entries, 4):
                caches = Caches(bench, rows, entries)
                for groups in arguments.groups:
                    yield from _peers(caches, Attention(groups, 0, "none"), "peers", results)


def _peers(caches: Caches, shape: Attention, part: str, results: Results) -> Iterator[Row]:
    bench, rows, n = caches.bench, caches.rows, caches.entries
    problem = Problem(caches, shape.query(bench, rows), shape.queries, bench.head_size**-0.5)
    for found in timed(all_peers(), problem):
        if found.reason:
            results.absent[f"{found.name}, {part}"] = f"{found.reason} ({rows} x {n}, G {shape.groups})"
            continue
        front = n if found.biased else 0
        queries = "" if shape.queries == 1 else f"{shape.queries} new, "
        flops = 4 * bench.heads * shape.groups * rows * bench.head_size * shape.seen(n)
        yield Row(
            part,
            "paged_attention",
            found.name,
            f"{rows} x {n}, {queries}G {shape.groups}, front {front}, none",
            bench.dtype_name,
            found.seconds,
            bytes=caches.live_bytes if shape.queries == 1 else 0,
            flops=0 if shape.queries == 1 else flops,
            errors={"output": found.error},
        )


def prefill(bench: Bench, arguments: argparse.Namespace, results: Results) -> Iterator[Row]:
    """Chunks of prompts: many queries over a cache that holds older entries, compressed ones too."""
    for rows, entries, queries in arguments.chunks:
        caches = Caches(bench, rows, entries, copies=2)
        for groups in arguments.groups:
            for front, mode in ((0, "none"), (entries // 4, "none"), (entries // 4, "sum"), (entries // 4, "log_ema")):
                shape = Attention(groups, front, mode, queries)
                yield attention(bench, caches, shape, "prefill", "triton", triton.paged_attention)
            if not arguments.no_peers:
                yield from _peers(caches, Attention(groups, 0, "none", queries), "prefill", results)


def scores(bench: Bench, arguments: argparse.Namespace, results: Results) -> Iterator[Row]:
    """The newest queries of a prompt score its entries; those that repeat a context, a part of it."""
    caches = Caches(bench, 1, max(arguments.entries[:3]))
    for mode in ("sum", "mean", "log_ema"):
        yield _prompt_scores(bench, caches, max(arguments.groups), min(64, caches.entries), mode)
    yield _repetition_scores(bench, caches, max(arguments.groups), caches.entries // 3)


def _prompt_scores(bench: Bench, caches: Caches, groups: int, num_queries: int, mode: str) -> Row:
    n, scale, shape = caches.entries, bench.head_size**-0.5, Attention(groups, 0, mode, num_queries)
    query, update = shape.query(bench, 1), shape.update
    assert update is not None
    statistics, aux = torch.zeros(2, bench.heads, n, device=bench.device)

    def run(number: int) -> None:
        triton.score_prompt_queries(query, caches.pages(number), caches.table[0], update, scale, statistics, aux)

    run(0)
    entries = gather_entries(caches.pages(0), caches.table[0], 0, 0, n)
    entries.scores.zero_()
    entries.aux.zero_()
    _, expected = expected_attention(query, entries, scale, update)
    assert expected is not None
    error = relative_error(statistics, expected)  # more calls would add to them
    return Row(
        "scores",
        "score_prompt_queries",
        "triton",
        f"{num_queries} x {n}, G {groups}, {mode}",
        bench.dtype_name,
        bench.time(run, caches.copies),
        bytes=bench.heads * n * (bench.head_size * bench.dtype.itemsize + 16),
        errors={"scores": error},
    )


def _repetition_scores(bench: Bench, caches: Caches, groups: int, num_queries: int) -> Row:
    """As many queries as tokens of the context that they repeat, its last ones."""
    context, sinks = caches.entries - num_queries, 4
    start = context - num_queries
    query = Attention(groups, 0, "none", num_queries).query(bench, 1)
    size = 2 * bench.heads * (sinks + 2 * num_queries) * bench.head_size * bench.dtype.itemsize

    def run(module: Any, number: int, where: Caches) -> Sequence[Tensor]:
        scores = torch.zeros(bench.heads, num_queries, device=where.bench.device)
        asked, pages, blocks = query.to(where.bench.device), where.pages(number), where.table[0]
        chunk = caches.entries, context, start, sinks
        module.score_repetition(asked, pages, blocks, bench.head_size**-0.5, *chunk, scores)
        return [scores]

    case = f"{num_queries} of {context} repeated, G {groups}"
    return checked(bench, "scores", "score_repetition", case, caches, size, run)


Operation = Callable[[Any, int, Caches], Sequence[Tensor]]
"""Runs an operator of a module on a copy of caches and returns what it returns."""


def compared(caches: Caches, operation: Operation) -> float:
    """The error of the results of Triton's operator, and of its changes to the pages, against the reference's."""
    twin = caches.on_cpu()
    outcomes = []
    for module, where in ((triton, caches), (reference, twin)):
        results = list(operation(module, 0, where))
        planes = [getattr(where.pages(0), name) for name in PLANES]
        outcomes.append([tensor.cpu().nan_to_num() for tensor in (*results, *planes)])
    return max(relative_error(one, other) for one, other in zip(*outcomes, strict=True))


def checked(bench: Bench, part: str, name: str, case: str, caches: Caches, size: int, operation: Operation) -> Row:
    """Times Triton's operator after it has been compared with the reference."""
    error = compared(caches, operation)
    seconds = bench.time(lambda number: operation(triton, number, caches), caches.copies)
    return Row(part, name, "triton", case, bench.dtype_name, seconds, size, 0, {"reference": error})


def merges(bench: Bench, arguments: argparse.Namespace, results: Results) -> Iterator[Row]:
    """One compaction of an interval, and decoding of as many requests with as many entries."""
    entries = arguments.entries[0]
    for rows in sorted({arguments.units, max(arguments.batch)}):
        caches = Caches(bench, rows, entries + arguments.interval)
        known = [caches.seq_layers(number, caches.entries // 2) for number in range(caches.copies)]
        yield from _merge(bench, caches, known, arguments.interval)
        for name, call in attention_calls(bench.device).items():
            shape = Attention(max(arguments.groups), entries, "sum")
            yield attention(bench, caches, shape, "merges", name, call)
        yield from _policies(bench, caches, arguments, results, entries, is_interval=True)


def _merge(bench: Bench, caches: Caches, known: list[SequenceLayers], interval: int) -> Iterator[Row]:
    """An interval's entries leave each sequence layer (of one layer); half as many of the others get a new row.

    Those that leave lie anywhere; the newest take their places.
    """
    n, d, item, heads = caches.entries, bench.head_size, bench.dtype.itemsize, caches.rows * bench.heads
    places, num_rows = n - interval, interval // 2
    order = bench.rand(heads, places).argsort(1)
    gone, targets = order[:, :interval], order[:, interval : interval + num_rows]
    kept = torch.arange(places, device=bench.device).repeat(heads, 1)
    kept.scatter_(1, gone, torch.arange(places, n, device=bench.device).expand(heads, -1))
    given = [kept, targets, *bench.rand(2, heads, targets.shape[1], d), *bench.rand(3, heads, places), kept]
    size = heads * (2 * d * (2 * interval * item + targets.shape[1] * (4 + item)) + (20 + 16) * places)

    def run(module: Any, number: int, where: Caches) -> Sequence[Tensor]:
        seq_layers = known[number % caches.copies] if where is caches else where.seq_layers(number, n // 2)
        kept, targets, keys, values, *metadata = (tensor.to(where.bench.device) for tensor in given)
        module.merge_entries(seq_layers, where.table, kept, tuple(metadata), Rows(targets, keys, values))
        return []

    case = f"{caches.rows} units x {n}, {interval} leave"
    yield checked(bench, "merges", "merge_entries", case, caches, size, run)


def _policies(
    bench: Bench, caches: Caches, arguments: argparse.Namespace, results: Results, budget: int, is_interval: bool
) -> Iterator[Row]:
    for policy in arguments.policies:
        try:
            yield policy_row(bench, caches, arguments, policy, budget, is_interval)
        except RuntimeError as error:  # what else is measured does not depend on it
            if "CUDA error" in str(error):
                raise
            results.failed[f"{policy}'s compaction"] = f"{type(error).__name__}: {error}"


def policy_row(
    bench: Bench, caches: Caches, arguments: argparse.Namespace, policy: str, budget: int, is_interval: bool
) -> Row:
    """A whole compaction as a worker runs it, on the operators that the tables choose; Python's time is counted.

    is_interval: of one layer of all sequences of the cache, while they generate; else of the first sequence at its
    prompt's end, whose layers are the copies of the cache.
    """
    n, scale = caches.entries, bench.head_size**-0.5
    config = parse_compression({"policy": policy, "budget": budget, "interval": arguments.interval})
    assert config is not None
    num_layers, requests = (1, range(caches.rows)) if is_interval else (caches.copies, range(1))
    new_front = config.resolve_capacity(n)
    assert new_front is not None
    num_blocks = -(-new_front // caches.pages(0).block_size)
    front = budget if is_interval else 0
    compactions = []
    for row in requests:
        blocks = caches.table[row, :num_blocks].tolist()
        plan = Compress(str(row), policy, "growth", n, n, budget, new_front, blocks)
        prompt_scores = ring = None
        if not is_interval and config.prompt_window:
            prompt_scores = PromptScores.empty(num_layers, bench.heads, n, bench.device)
            prompt_scores.scores.uniform_()
            prompt_scores.aux.fill_(1.0)
        if config.policy.query_window:
            query_heads = bench.heads * max(arguments.groups)
            ring = QueryRing.empty(
                num_layers, config.policy.query_window, query_heads, bench.head_size, bench.dtype, bench.device
            )
        segments = {"front": front, "tail": front}
        compactions.append(Compaction(plan, config.policy, caches.table[row], prompt_scores, ring, **segments))

    def run(number: int) -> None:
        layers = caches.layers[number % caches.copies :][:1] if is_interval else caches.layers
        Compactor(layers, scale, list(range(bench.heads))).execute(compactions)

    seconds = bench.time(run, caches.copies if is_interval else 1, captured=False)
    what = f"{len(requests)} x {n} to {budget}, {num_layers} layers"
    part = "merges" if is_interval else "compaction"
    return Row(part, "compaction", policy, what, bench.dtype_name, seconds)


def compaction(bench: Bench, arguments: argparse.Namespace, results: Results) -> Iterator[Row]:
    """A prompt's attention in chunks, then its compaction to a tenth, or the least budget, in all layers."""
    n, chunk, layers = arguments.prompt, arguments.prompt_chunk, arguments.layers
    caches = Caches(bench, 1, n, copies=layers)
    groups = max(arguments.groups)
    seconds, errors = 0.0, {}
    flops = 0
    for end in range(chunk, n + 1, chunk):
        part = _first(caches, end)
        row = attention(bench, part, Attention(groups, 0, "none", chunk), "", "triton", triton.paged_attention)
        seconds, flops = seconds + layers * row.seconds, flops + layers * row.flops
        errors[f"output at {end}"] = row.error
    case = f"prompt of {n} in chunks of {chunk}, {layers} layers, G {groups}"
    yield Row("compaction", "prefill", "triton", case, bench.dtype_name, seconds, 0, flops, errors)
    whole = Attention(groups, 0, "none", n)
    problem = Problem(_first(caches, n, copies=2), whole.query(bench, 1), n, bench.head_size**-0.5)
    for found in timed([peer for peer in all_peers() if peer.name == "SDPA"], problem):
        if found.reason:
            results.absent["SDPA of a whole prompt"] = found.reason
        else:
            case = f"prompt of {n} at once, {layers} layers, G {groups}"
            yield Row("compaction", "prefill", found.name, case, bench.dtype_name, layers * found.seconds, 0,
                      flops, {"output": found.error})  # fmt: skip
    yield from _compact(bench, caches, n // 10)
    yield from _policies(bench, caches, arguments, results, max(n // 10, LEAST_BUDGET), is_interval=False)


def _first(caches: Caches, entries: int, copies: int | None = None) -> Caches:
    """The same caches, of which only the first entries are looked at."""
    part = object.__new__(Caches)
    vars(part).update(vars(caches) | {"entries": entries, "layers": caches.layers[:copies]})
    part.copies = len(part.layers)
    part.table = caches.table[:, : -(-entries // caches.pages(0).block_size)]
    return part


def _compact(bench: Bench, caches: Caches, budget: int) -> Iterator[Row]:
    """Any ``budget`` entries of each layer move to the front, as they are or each with a new row.

    As a worker does it, as many layers at a time as its memory for keys and values is enough for.
    """
    n, d, item, layers = caches.entries, bench.head_size, bench.dtype.itemsize, caches.copies
    heads = layers * bench.heads
    kept = bench.rand(heads, n).argsort(1)[:, :budget].sort(1).values
    places = torch.arange(budget, device=bench.device).repeat(bench.heads, 1)
    planes = bench.rand(3, bench.heads, budget).unbind()
    keys, values = bench.rand(2, bench.heads, budget, d).unbind()

    step = max(1, Compactor.max_bytes // (4 * bench.heads * n * 2 * d))

    def run(module: Any, where: Caches, first: int, count: int, merged: bool) -> None:
        """Compacts ``count`` layers; all get the same metadata and rows."""
        device = where.bench.device

        def given(tensor: Tensor) -> Tensor:
            return tensor.to(device).repeat(count, *[1] * (tensor.dim() - 1))

        chosen = kept[first * bench.heads : (first + count) * bench.heads].to(device)
        metadata = *(given(plane) for plane in planes), chosen
        rows = Rows(given(places if merged else places[:, :0]), *(given(t) if merged else None for t in (keys, values)))
        blocks, segments = where.table.expand(count, -1), torch.tensor([[0, 0, n]] * count)
        seq_layers = SequenceLayers(where.layers[first : first + count], torch.arange(count), blocks, segments)
        module.merge_entries(seq_layers, blocks, chosen, metadata, rows)

    for merged in (False, True):
        size = heads * budget * (2 * d * (4 + item if merged else 2 * item) + 20 + 16)
        case = f"{layers} layers x {n} to {budget}, {'new rows' if merged else 'moved'}"

        def one_layer(module: Any, number: int, where: Caches, merged: bool = merged) -> Sequence[Tensor]:
            run(module, where, 0, 1, merged)
            return []

        def all_layers(number: int, merged: bool = merged) -> None:
            for first in range(0, layers, step):
                run(triton, caches, first, min(step, layers - first), merged)

        errors = {"reference": compared(caches, one_layer)}
        seconds = bench.time(all_layers, 1, captured=False)
        yield Row("compaction", "merge_entries", "triton", case, bench.dtype_name, seconds, size, 0, errors)


def entries(bench: Bench, arguments: argparse.Namespace, results: Results) -> Iterator[Row]:
    """The operators of compactions, on sequence layers (layers x requests)."""
    rows, n, groups = arguments.units, arguments.entries[0], max(arguments.groups)
    caches = Caches(bench, rows, n)
    d, item, all_heads = bench.head_size, bench.dtype.itemsize, rows * bench.heads
    few = max(1, n // 32)
    index = bench.rand(all_heads, n).argsort(1)
    places, some = index[:, :few], bench.rand(all_heads, few, d)
    kept = torch.arange(n - few, device=bench.device).repeat(all_heads, 1)
    newest = torch.arange(n - few, n, device=bench.device).expand(all_heads, -1)
    kept.scatter_(1, places.clamp(max=n - few - 1), newest)
    queries = bench.rand(all_heads, groups, 32, d)
    seen = torch.arange(n - 32, n, device=bench.device).clamp(min=0).repeat(all_heads, 1)
    statistics = bench.rand(3, all_heads, n)
    usable = bench.rand(all_heads, n - few) > -1.5
    slots, joining = bench.rand(all_heads, n, d), bench.rand(all_heads, few, d)
    weights = bench.rand(all_heads, n).abs()

    def operation(run: Callable[[Any, SequenceLayers, Caches], Any]) -> Operation:
        def wrapped(module: Any, number: int, where: Caches) -> Sequence[Tensor]:
            found = run(module, seq_layers(where, number), where)
            return [] if found is None else [found] if isinstance(found, Tensor) else list(found)

        return wrapped

    known = [caches.seq_layers(number, n // 2) for number in range(caches.copies)]

    def seq_layers(where: Caches, number: int) -> SequenceLayers:
        return known[number % caches.copies] if where is caches else where.seq_layers(number, n // 2)

    def to(where: Caches, *tensors: Tensor) -> list[Tensor]:
        return [tensor.to(where.bench.device) for tensor in tensors]

    name = f"{rows} units x {n}"
    cases: list[tuple[str, int, Callable[[Any, SequenceLayers, Caches], Any]]] = [
        ("gather_metadata", all_heads * n * (16 + 20), lambda m, u, w: m.gather_metadata(u)),
        ("gather_rows", all_heads * n * d * (item + 4), lambda m, u, w: m.gather_rows(u, "keys", *to(w, index))),
        ("write_metadata", all_heads * n * 36,
         lambda m, u, w: m.write_metadata(u, w.table, *to(w, *statistics, index))),
        ("write_rows", 2 * all_heads * few * d * (item + 4),
         lambda m, u, w: m.write_rows(u, w.table, *to(w, places, some, some))),
        ("move_entries", 4 * all_heads * few * d * item, lambda m, u, w: m.move_entries(u, w.table, *to(w, kept))),
        ("most_similar", all_heads * n * d * item,
         lambda m, u, w: m.most_similar(u, *to(w, index[:, :few], index[:, few:], usable))[:1]),
        ("fused_attention", 2 * all_heads * n * d * item,
         lambda m, u, w: m.fused_attention(u, *to(w, queries, seen, statistics[0], index), d**-0.5, "sum")),
        ("join_slots", slots.nbytes,
         lambda m, u, w: m.join_slots(*to(w, slots, joining, weights[:, :few], weights))[1:]),
    ]  # fmt: skip
    for operator, size, run in cases:
        yield checked(bench, "entries", operator, name, caches, size, operation(run))
    slots = torch.randperm(rows * n, device=bench.device)[: min(rows * n, 8192)] + 16
    key, value = (bench.rand(len(slots), bench.heads, d).to(bench.dtype) for _ in range(2))

    def write(module: Any, number: int, where: Caches) -> Sequence[Tensor]:
        module.write_tokens(where.pages(number), *to(where, slots, key, value))
        return []

    yield checked(bench, "entries", "write_tokens", f"{len(slots)} tokens", caches, 4 * key.nbytes, write)


def float32(bench: Bench, arguments: argparse.Namespace, results: Results) -> Iterator[Row]:
    """Some of all in float32, with products in full float32."""
    full = replace(bench, dtype=torch.float32)
    few = argparse.Namespace(
        **vars(arguments)
        | {"entries": arguments.entries[:2], "batch": arguments.batch[:3:2], "units": min(8, arguments.units)}
        | {"chunks": [(1, arguments.entries[:2][-1], min(256, arguments.entries[0] // 2))], "no_peers": True}
    )
    for part in (decode, prefill, scores, entries):
        for row in part(full, few, results):
            yield replace(row, part="float32")


PARTS: dict[str, Part] = {
    "decode": decode,
    "coded": coded_fronts,
    "skewed": skewed,
    "compaction": compaction,
    "merges": merges,
    "prefill": prefill,
    "peers": peers,
    "scores": scores,
    "entries": entries,
    "float32": float32,
}
"""In the order in which they run: what matters most comes first."""
