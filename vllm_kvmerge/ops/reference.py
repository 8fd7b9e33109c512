"""The PyTorch reference of every operator: its definition, and the fallback of all other implementations.

Every public function here is an operator. Another implementation is a module with functions of the same name.

A sequence has two segments of logical slots, ``[0, front)`` (compressed entries) and ``[tail, seq_len)`` (ordinary
tokens); slot ``s`` lies in block ``block_table[s // block_size]``. Never compressed: ``front = tail = 0``. All
arithmetic is in float32.
"""

import ctypes
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm_kvmerge.ops import attention, neighbours, similarity, turns, zipping
from vllm_kvmerge.ops.attention import Fusion, accumulate_scores, log_bias_correction
from vllm_kvmerge.ops.regression import OutputDerivative, conjugate_gradients
from vllm_kvmerge.ops.types import (
    PLAIN_SOFTMAX,
    QUANTISED,
    AttentionBatch,
    Changes,
    Destination,
    HeadPages,
    Metadata,
    PagedKVCache,
    PlaneName,
    Rows,
    ScoreMode,
    ScoreUpdate,
    SequenceLayers,
    Softmax,
    sent,
    stored,
)
from vllm_kvmerge.ops.zipping import ZipGroups, ZipMode, ZipPlanes

MAX_PRODUCT_BYTES = 1 << 20
"""Size of a product W_O v above which values are taken in groups, which fit in the processor's caches."""


def _segment(plane: Tensor, blocks: Tensor, start: int, stop: int, slot_dim: int) -> Tensor:
    """Slots ``[start, stop)`` of a plane as ``[H, ..., stop - start, ...]``; ``slot_dim`` is the slots' place in it."""
    block_size = plane.shape[slot_dim + 1]
    first = start // block_size
    picked = plane[blocks[first : -(-stop // block_size)].long()].movedim(0, slot_dim)
    flat = picked.flatten(slot_dim, slot_dim + 1)
    return flat.narrow(slot_dim, start - first * block_size, stop - start)


def _segments(plane: Tensor, blocks: Tensor, front: int, tail: int, seq_len: int, slot_dim: int = 1) -> Tensor:
    parts = [_segment(plane, blocks, a, b, slot_dim) for a, b in ((0, front), (tail, seq_len)) if b > a]
    return parts[0] if len(parts) == 1 else torch.cat(parts, slot_dim)


def _keys_and_values(cache: PagedKVCache, blocks: Tensor, front: int, tail: int, seq_len: int) -> tuple[Tensor, Tensor]:
    """``[H, d, n]`` and ``[H, n, d]``; what is a value and a part of a key is read once."""
    if cache.row_planes == ("keys",):
        rows = _segments(_plane(cache, "keys"), blocks, front, tail, seq_len).float()
        return rows.transpose(1, 2), rows[..., : cache.values.shape[3]]
    keys = _segments(cache.keys, blocks, front, tail, seq_len, slot_dim=2)
    return keys, _segments(cache.values, blocks, front, tail, seq_len).float()


def _scatter(plane: Tensor, blocks: Tensor, start: int, values: Tensor) -> None:
    """Writes ``values`` (``[H, m]``) to the slots of a ``[B, H, bs]`` plane, from ``start`` on."""
    slots = torch.arange(start, start + values.shape[1], device=plane.device)
    plane[blocks[slots // plane.shape[2]].long(), :, slots % plane.shape[2]] = values.t().to(plane.dtype)


def _causal(num_queries: int, num_entries: int, device: torch.device) -> Tensor:
    """``[q, n]`` bool: queries of the newest tokens see entries up to their own."""
    visible = torch.ones(num_queries, num_entries, dtype=torch.bool, device=device)
    return visible.tril_(num_entries - num_queries)


def _first_seen(query_position: Any, window: int, chunked: bool) -> Any:
    """Position of the first token that a query sees in its window; of several queries, if positions are a tensor."""
    return query_position // window * window if chunked else query_position - window + 1


def _attend(
    query: Tensor, keys: Tensor, bias: Tensor | None, visible: Tensor, scale: float, softmax: Softmax
) -> tuple[Tensor, Tensor]:
    """(capped logits without bias, probabilities), both ``[H, G, q, n]``; query ``[q, H * G, d]``, keys
    ``[H, d, n]``."""
    num_queries, num_heads, head_size = query.shape
    num_kv_heads = keys.shape[0]
    grouped = query.float().view(num_queries, num_kv_heads, num_heads // num_kv_heads, head_size).permute(1, 2, 0, 3)
    logits = softmax.capped(torch.matmul(grouped * scale, keys.float().unsqueeze(1)))
    biased = logits if bias is None else logits + bias[:, None, None, :]
    return logits, softmax.probabilities(biased.masked_fill(~visible, -torch.inf))


def paged_attention(
    query: Tensor,
    cache: PagedKVCache,
    batch: AttentionBatch,
    scale: float,
    output: Tensor,
    softmax: Softmax = PLAIN_SOFTMAX,
    window: int = 0,
    chunked: bool = False,
) -> None:
    """Causal attention over front and tail, with vote bias, and the score update of the rows that have one.

    query, output: ``[num_tokens, H * G, d]``; the output of tokens of no row stays as it is. Statistics of tokens that
    are new in this call start from nothing. window: tokens that a query sees, its own included, whatever the blocks of
    those before hold; 0: all. chunked: those from the last multiple of ``window`` on instead. With a window, no row of
    the batch has a front or updates scores.
    """
    rows = zip(batch.block_table, *(tensor.tolist() for tensor in batch.tensors[1:]), strict=True)
    for number, (blocks, start, length, seq_len, front, tail, mode, decay) in enumerate(rows):
        tokens = slice(start, start + length)
        at = None if batch.pages is None else _front_places(batch.pages, number)
        if at is not None:
            assert batch.pages is not None
            if batch.pages.coding(number) and mode != ScoreMode.NONE.code:
                raise ValueError(f"row {number}: a coded front has no scores")
            layers, front = batch.pages.layers, 0
        if window:
            tail = max(tail, _first_seen(seq_len - length, window, chunked))
        keys, values = _keys_and_values(cache, blocks, front, tail, seq_len)
        if at is not None:
            assert batch.pages is not None
            front_keys, front_values, votes = _front(batch.pages, number, at)
            keys = torch.cat([front_keys.transpose(1, 2).to(keys.dtype), keys], 2)
            values = torch.cat([front_values, values], 1)
        num_entries = keys.shape[2]
        bias = None
        visible = _causal(length, num_entries, query.device)
        if window:
            positions = torch.arange(tail, seq_len, device=query.device)
            visible &= positions >= _first_seen(positions[num_entries - length :, None], window, chunked)
        if front > 0 or at is not None:
            if at is None:
                votes = _segment(cache.log_votes, blocks, 0, front, 1)
            bias = torch.cat([votes, votes.new_zeros(votes.shape[0], num_entries - votes.shape[1])], 1)
        logits, probabilities = _attend(query[tokens], keys, bias, visible, scale * cache.key_scale, softmax)
        attended = torch.matmul(probabilities, values.unsqueeze(1)) * cache.value_scale
        output[tokens] = attended.permute(2, 0, 1, 3).flatten(1, 2).to(output.dtype)
        if mode != ScoreMode.NONE.code:
            scores = _segments(cache.scores, blocks, front, tail, seq_len).clone()
            aux = _segments(cache.aux, blocks, front, tail, seq_len).clone()
            if at is not None:
                scores = torch.cat([_read(layers, "scores", at), scores], 1)
                aux = torch.cat([_read(layers, "aux", at), aux], 1)
            scores[:, num_entries - length :] = 0.0
            aux[:, num_entries - length :] = 0.0
            update = ScoreUpdate(list(ScoreMode)[mode], decay)
            scores, aux = accumulate_scores(update, logits, probabilities, visible, scores, aux)
            if at is not None:
                front = at.block.shape[1]
                _write(layers, "scores", at, scores[:, :front])
                _write(layers, "aux", at, aux[:, :front])
            for plane, statistic in ((cache.scores, scores), (cache.aux, aux)):
                if at is None:
                    _scatter(plane, blocks, 0, statistic[:, :front])
                _scatter(plane, blocks, tail, statistic[:, front:])


def score_prompt_queries(
    query: Tensor,
    cache: PagedKVCache,
    blocks: Tensor,
    update: ScoreUpdate,
    scale: float,
    scores: Tensor,
    aux: Tensor,
    softmax: Softmax = PLAIN_SOFTMAX,
    lse: Tensor | None = None,
) -> None:
    """Adds the statistics of the newest queries of a never compressed sequence to ``scores`` and ``aux``, in place.

    query: ``[q, H * G, d]``, the queries of tokens ``[seq_len - q, seq_len)``. blocks: the sequence's block ids.
    scores, aux: ``[H, seq_len]`` float32, zero for tokens that no query has seen. lse: ``[H * G, q]`` float32,
    logarithms of the denominators of the queries' probabilities, where attention has found them already; an
    implementation may ignore it.
    """
    seq_len = scores.shape[1]
    keys = _segment(cache.keys, blocks, 0, seq_len, 2)
    visible = _causal(query.shape[0], seq_len, query.device)
    # Queries in small groups, so that the matrix of probabilities stays small for any window.
    group = max(1, (1 << 22) // (query.shape[1] * seq_len))
    for start in range(0, query.shape[0], group):
        rows = slice(start, start + group)
        logits, probabilities = _attend(query[rows], keys, None, visible[rows], scale * cache.key_scale, softmax)
        new_scores, new_aux = accumulate_scores(update, logits, probabilities, visible[rows], scores, aux)
        scores.copy_(new_scores)
        aux.copy_(new_aux)


def keep_queries(query: Tensor, addresses: Tensor, layer: int, tokens: Tensor | None = None) -> None:
    """Copies a layer's queries to where they are kept, as a captured graph can: nothing depends on how many are.

    query: ``[tokens, H * G, d]``, contiguous in its last dimension. addresses: ``[n]`` int64, of the memory that the
    query is kept in, ``[layers, H * G, d]`` in its dtype, on its device, aligned to 16 bytes; 0: it is not kept.
    layer: number of the layer. tokens: ``[n]`` int64, the queries' places in ``query``; None: the first n.

    Raises ValueError on a device other than the CPU, whose memory has no addresses here.
    """
    if not query.is_cpu:
        raise ValueError(f"queries on {query.device}: addresses of the CPU's memory only")
    numbers = range(len(addresses)) if tokens is None else tokens.tolist()
    for token, address in zip(numbers, addresses.tolist(), strict=True):
        if address:
            row = query[token].contiguous()
            ctypes.memmove(address + layer * row.nbytes, row.data_ptr(), row.nbytes)


def read_queries(
    places: Tensor, kept: Sequence[Tensor], seq_layers: Sequence[tuple[int, int]], num_kv_heads: int
) -> Tensor:
    """``[U * H, G, w, d]`` as they were kept: the queries of sequence layers at ``places`` (``[requests, w]`` int64).

    kept: each request's, ``[layers, window, H * G, d]``, all of one dtype. seq_layers: of each of U its request and its
    layer, those of a request one after the other.
    """
    vectors, done = torch.empty(0), 0
    for request, some in groupby(seq_layers, key=lambda one: one[0]):
        layers, queries = [layer for _, layer in some], kept[request]
        if layers != list(range(len(queries))):  # else without a copy
            queries = queries[layers]
        # Of [layers, w, H * G, d].
        by_head = queries.index_select(1, places[request]).unflatten(2, (num_kv_heads, -1)).permute(0, 2, 3, 1, 4)
        if done == 0:
            vectors = by_head.new_empty(len(seq_layers), *by_head.shape[1:])
        vectors[done : done + len(layers)] = by_head
        done += len(layers)
    return vectors.flatten(0, 1)


def score_repetition(
    query: Tensor,
    cache: PagedKVCache,
    blocks: Tensor,
    scale: float,
    seq_len: int,
    context: int,
    start: int,
    sinks: int,
    scores: Tensor,
    weights: Tensor | None = None,
    softmax: Softmax = PLAIN_SOFTMAX,
    own: Tensor | None = None,
) -> None:
    """Raises ``scores`` of a chunk of a context to the largest probability that queries which repeat it give an entry.

    query: ``[q, H * G, d]``, the queries of tokens ``[seq_len - q, seq_len)``, all behind the ``context`` first tokens
    of a never compressed sequence. blocks: the sequence's block ids. scores: ``[H, m]``, or ``[H * G, m]`` for those of
    each query head, float32, of tokens ``[start, start + m)`` of the context; in place. Probabilities are shared by the
    first ``sinks`` tokens, up to ``start`` of them, the chunk, and the tokens from ``context`` up to the query's own;
    the largest is over queries and, in ``[H, m]``, the query heads of a KV head. weights: ``[q]`` float32, factors of
    each query's probabilities. Scores that would become NaN stay as they are.

    own: ``[q, H * G, d]``; the queries are then made of these, which are those of the context's last tokens, and
    ``seq_len`` is ``context``. All see the whole chunk, and the tokens from ``start`` up to the query's own, with which
    it shares its probabilities, are attended to by ``own``.
    """
    num_queries, num_scored = query.shape[0], scores.shape[1]
    sinks = min(sinks, start)
    ranges = (0, sinks), (start, start + num_scored), (start if own is not None else context, seq_len)
    keys = torch.cat([_segment(cache.keys, blocks, a, b, 2) for a, b in ranges if b > a], 2).float()
    num_kv_heads, _, num_keys = keys.shape
    grouped = [
        rows.float().unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3).contiguous() * (scale * cache.key_scale)
        for rows in (query, query if own is None else own)
    ]
    others = sinks + num_scored
    # Queries in groups whose logits stay in a core's cache, or, on a GPU, take up to 64 MiB.
    group = max(1, (1 << (18 if query.is_cpu else 24)) // (query.shape[1] * num_keys))
    for first in range(0, num_queries, group):
        last = min(first + group, num_queries)
        seen = num_keys - num_queries + last  # by the newest of them
        parts = zip(grouped, (slice(others), slice(others, seen)), strict=True)
        logits = torch.cat([rows[:, :, first:last].flatten(1, 2) @ keys[:, :, some] for rows, some in parts], 2)
        logits = softmax.capped(logits.unflatten(1, (-1, last - first)))
        logits.masked_fill_(~_causal(last - first, seen, query.device), -torch.inf)
        total = softmax.log_norms(logits)
        if weights is not None:
            total -= weights[first:last, None].log()
        largest = (logits[..., sinks : sinks + num_scored] - total).amax(2).exp()  # [H, G, m]
        largest = largest.amax(1) if len(scores) == num_kv_heads else largest.flatten(0, 1)
        torch.fmax(scores, largest, out=scores)


def gather_metadata(seq_layers: SequenceLayers) -> Metadata:
    """Copies (log_votes, scores, aux, positions) of all live entries: ``[H, n]`` float32, positions int64.

    Votes and positions of ordinary tokens are implied; statistics are as attention left them in the cache.
    """
    planes = zip(*(_metadata(seq_layers, *one) for one in enumerate(seq_layers)), strict=True)
    log_votes, scores, aux, positions = (torch.cat(plane) for plane in planes)
    return log_votes, scores, aux, positions


def _metadata(seq_layers: SequenceLayers, number: int, one: tuple[PagedKVCache, Tensor, int, int, int]) -> Metadata:
    cache, blocks, front, tail, seq_len = one
    positions = torch.arange(tail, seq_len, device=cache.scores.device).repeat(cache.num_kv_heads, 1)
    log_votes = torch.zeros(cache.num_kv_heads, seq_len - tail, device=cache.scores.device)
    if seq_layers.pages is not None:
        at = _front_places(seq_layers.pages, number, front)
        assert at is not None
        compressed = [_read(seq_layers.layers, name, at) for name in ("log_votes", "scores", "aux", "positions")]
        ordinary = log_votes, *(_segment(plane, blocks, tail, seq_len, 1) for plane in (cache.scores, cache.aux))
        log_votes, scores, aux, positions = (
            torch.cat([front_part.to(tail_part.dtype), tail_part], 1)
            for front_part, tail_part in zip(compressed, [*ordinary, positions], strict=True)
        )
        return log_votes, scores, aux, positions
    if front > 0:
        positions = torch.cat([_segment(cache.positions, blocks, 0, front, 1).long(), positions], 1)
        log_votes = torch.cat([_segment(cache.log_votes, blocks, 0, front, 1), log_votes], 1)
    scores, aux = (_segments(plane, blocks, front, tail, seq_len) for plane in (cache.scores, cache.aux))
    return log_votes, scores, aux, positions


@dataclass(frozen=True)
class _Places:
    """Slots of heads: layer, block, KV head and offset, ``[H, m]`` int64; any unless ``exists`` (``[H, m]`` bool)."""

    layer: Tensor | int  # a number: the same for all
    block: Tensor
    head: Tensor
    offset: Tensor
    exists: Tensor

    @property
    def index(self) -> tuple[Tensor, Tensor, Tensor]:
        """Indices into a layer's planes."""
        return self.block, self.head, self.offset

    def of(self, mask: Tensor) -> tuple[Tensor, ...]:
        """Indices of those in ``mask`` (``[H, m]`` bool), ``[count]`` each."""
        return tuple(part.expand_as(mask)[mask] for part in self.index)

    def differ(self, other: "_Places") -> Tensor:
        """``[H, m]`` bool."""
        unequal = (self.block != other.block) | (self.head != other.head) | (self.offset != other.offset)
        if isinstance(self.layer, int) and isinstance(other.layer, int):
            return unequal
        return unequal | torch.as_tensor(self.layer != other.layer)

    def by_layer(self, wanted: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yields each layer, and which of the ``wanted`` (``[H, m]`` bool) lie in it."""
        if isinstance(self.layer, int):
            yield self.layer, wanted
            return
        for number in self.layer[wanted].unique().tolist():
            yield number, wanted & (self.layer == number)


_BLANKS = {
    "keys": 0.0,
    "values": 0.0,
    "log_votes": -torch.inf,
    "scores": 0.0,
    "aux": 0.0,
    "positions": -1,
}
"""What is read where there is no slot."""


def _plane(cache: PagedKVCache, name: str) -> Tensor:
    """``[B, H, bs, ...]``."""
    plane: Tensor = getattr(cache, name)
    return plane.transpose(2, 3) if name == "keys" else plane


def _read(layers: Sequence[PagedKVCache], name: str, at: _Places) -> Tensor:
    """``[H, m, ...]`` of a plane."""
    if isinstance(at.layer, int):
        found = _plane(layers[at.layer], name)[at.index]
        missing = ~at.exists.view(*at.exists.shape, *[1] * (found.dim() - 2))
        if found.dtype in QUANTISED:  # PyTorch fills them as bytes alone
            return found.view(torch.uint8).masked_fill(missing, 0).view(found.dtype)
        return found.masked_fill(missing, _BLANKS[name])
    first = _plane(layers[0], name)
    found = torch.full((*at.exists.shape, *first.shape[3:]), _BLANKS[name], dtype=first.dtype, device=first.device)
    for number, mask in at.by_layer(at.exists):
        found[mask] = _plane(layers[number], name)[at.of(mask)]
    return found


def _write(
    layers: Sequence[PagedKVCache],
    name: str,
    at: _Places,
    values: Tensor,
    wanted: Tensor | None = None,
) -> None:
    """Writes ``values`` (``[H, m, ...]``) to the places that exist and, if given, are ``wanted``."""
    for number, mask in at.by_layer(at.exists if wanted is None else at.exists & wanted):
        plane = _plane(layers[number], name)
        plane[at.of(mask)] = (
            stored(values[mask], plane.dtype) if name in ("keys", "values") else values[mask].to(plane.dtype)
        )


def _paged_places(pages: HeadPages, row: int, slots: Tensor) -> _Places:
    """Where ``slots`` (``[H, m]`` int64) of a row's fronts lie."""
    size = pages.page_size(row)
    own, fronts = sent(pages.ids[row], slots.device), sent(pages.fronts[row], slots.device)
    ids = own.gather(1, (slots // size).clamp(0, own.shape[1] - 1))
    exists = (slots >= 0) & (slots < fronts.unsqueeze(1))
    return _Places(*pages.places(ids), slots % size, exists)


def _front_places(pages: HeadPages, row: int, front: int | None = None) -> _Places | None:
    """Where the slots ``[0, front)`` of a row's fronts lie (default: as many as there are); None if it has no pages."""
    if pages.ids[row, 0, 0] < 0:
        return None
    count = int(pages.fronts[row].max()) if front is None else front
    slots = torch.arange(count, device=pages.layers[0].device)
    return _paged_places(pages, row, slots.expand(pages.num_kv_heads, -1))


def _front(pages: HeadPages, row: int, at: _Places) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values (``[H, m, d]`` float32) and log_votes (``[H, m]``) of a row's front."""
    coding = pages.coding(row)
    if coding is None:
        keys, values, votes = (_read(pages.layers, name, at) for name in ("keys", "values", "log_votes"))
        return keys.float(), values.float(), votes
    (num_heads, count), size = at.exists.shape, pages.page_size(row)
    shape = num_heads, -(-count // size), size
    keys, values = at.exists.new_zeros(2, *shape, pages.layers[0].head_size, dtype=torch.float32)
    votes = torch.full_like(keys[..., 0], -torch.inf)
    for layer, mine, block, head in _pages_by_layer(pages[row : row + 1], size):
        keys[mine], values[mine], votes[mine] = pages.layers[layer].coded(coding).read(block, head)
    keys, values, votes = (plane.flatten(1, 2)[:, :count] for plane in (keys, values, votes))
    missing = ~at.exists
    rows = (plane.masked_fill(missing.unsqueeze(-1), 0.0) for plane in (keys, values))
    return *rows, votes.masked_fill(missing, -torch.inf)


def _pages_by_layer(pages: HeadPages, size: int) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """Yields each layer with pages of ``size`` slots that hold entries, which of ``[rows * H, pages]`` those are (bool,
    as many columns as the longest front needs), and their blocks and heads."""
    fronts, device = pages.fronts.flatten().unsqueeze(1), pages.layers[0].device
    first = torch.arange(0, int(fronts.max()), size)
    layer, block, head = pages.places(pages.ids.flatten(0, 1)[:, : len(first)])
    for number in layer[first < fronts].unique().tolist():
        mine = (first < fronts) & (layer == number)
        yield number, *(sent(part, device) for part in (mine, block[mine], head[mine]))


def _block_places(cache: PagedKVCache, layer: int, blocks: Tensor, slots: Tensor) -> _Places:
    """Where ``slots`` (``[H, m]`` int64) lie, in blocks; negative ones nowhere."""
    head = torch.arange(len(slots), device=slots.device).unsqueeze(1).expand_as(slots)
    block = blocks[slots.clamp(min=0) // cache.block_size].long()
    return _Places(layer, block, head, slots.clamp(min=0) % cache.block_size, slots >= 0)


def _entry_places(seq_layers: SequenceLayers, index: Tensor) -> Iterator[tuple[_Places, Tensor]]:
    """For each sequence layer where its part of ``index`` (``[H, m]`` int64), entries, lies; and that part."""
    parts, layers = index.chunk(len(seq_layers.layer)), seq_layers.layer.tolist()
    for number, ((cache, blocks, front, tail, _), part) in enumerate(zip(seq_layers, parts, strict=True)):
        slots = torch.where(part < front, part, part + (tail - front))
        at = _block_places(cache, layers[number], blocks, slots)
        if seq_layers.pages is not None:
            paged, in_front = _paged_places(seq_layers.pages, number, part), part < front
            pairs = zip(vars(paged).values(), vars(at).values(), strict=True)
            at = _Places(*(torch.where(in_front, mine, theirs) for mine, theirs in pairs))
        yield at, part


def _destinations(seq_layers: SequenceLayers, destination: Destination, places: Tensor) -> Iterator[_Places]:
    """For each sequence layer where its part of ``places`` (``[H, m]`` int64) lies in the destination."""
    layers = seq_layers.layer.tolist()
    for number, part in enumerate(places.chunk(len(layers))):
        if isinstance(destination, HeadPages):
            yield _paged_places(destination, number, part)
        else:
            yield _block_places(seq_layers.layers[layers[number]], layers[number], destination[number], part)


def gather_rows(seq_layers: SequenceLayers, plane: PlaneName, index: Tensor, changes: Changes | None = None) -> Tensor:
    """``[H, m, d]`` float32: keys or values of the entries at ``index`` (``[H, m]`` int64), or of the places of
    ``changes``; zeros where negative."""
    if changes is not None:
        return changes.read(plane, index, partial(gather_rows, seq_layers, plane))
    rows = torch.cat([_read(seq_layers.layers, plane, at).float() for at, _ in _entry_places(seq_layers, index)])
    scales = seq_layers.scales(plane)
    return rows if scales is None else rows * scales


def most_similar(
    seq_layers: SequenceLayers, sources: Tensor, targets: Tensor, usable: Tensor, changes: Changes | None = None
) -> tuple[Tensor, Tensor]:
    """Finds for each source the usable target whose key has the largest cosine similarity, the first of several.

    sources: ``[H, m]``, targets: ``[H, c]`` int64, indices of entries, or of the places of ``changes``; negative where
    there is none, and then a target is not usable. usable: ``[H, c]`` bool. Returns the similarity, ``[H, m]`` float32,
    at most 1, -inf where there is no source or no target is usable, and the target's index, ``[H, m]``. Other
    implementations may round new keys to the dtype that they multiply the cache's in.
    """
    source_keys, target_keys = (gather_rows(seq_layers, "keys", index, changes) for index in (sources, targets))
    return similarity.most_similar(source_keys, target_keys, sources, targets, usable)


def newest_repeats(keys: Tensor, threshold: float, found: Tensor, start: int, stop: int) -> Tensor:
    """Finds for each of the entries [``start``, ``stop``) the newest other one that repeats it (R-KV): whose key's
    product with its own is above ``threshold``, which is no less than 0.

    keys: ``[H, n, d]`` float32, the oldest first, of length 1 or 0. found: ``[H, n]`` int64, contiguous; -1 at first,
    then the same for one call after another, whose ranges go through all entries from the last backwards: a call sets
    the indices of its range, -1 where there is none, and leaves for those of older entries what it has come across.
    Returns ``[H, stop - start]`` float32, the products with the entries found, 0 where there is none.
    """
    return similarity.newest_repeats(keys, threshold, found, start, stop)


def fused_attention(
    seq_layers: SequenceLayers,
    queries: Tensor,
    query_positions: Tensor,
    log_votes: Tensor,
    positions: Tensor,
    scale: float,
    fusion: Fusion,
    softmax: Softmax = PLAIN_SOFTMAX,
) -> Tensor:
    """``[H, n]`` float32: attention to each entry, summed over the G query heads, then ``fusion`` over the queries.

    queries: ``[H, G, w, d]`` floating point. query_positions: ``[H, w]`` int64; a query sees live entries up to its own
    position. log_votes: ``[H, n]`` float32 and positions: ``[H, n]`` int64, negative where dead, are used in place of
    those in the cache.
    """
    index = torch.arange(seq_layers.num_entries, device=positions.device).repeat(seq_layers.num_heads, 1)
    keys = gather_rows(seq_layers, "keys", index)
    return attention.fused_attention(queries, query_positions, keys, log_votes, positions, scale, fusion, softmax)


def move_entries(seq_layers: SequenceLayers, destination: Destination, kept: Tensor) -> None:
    """Moves keys and values of the entries ``kept`` (``[H, C]`` int64) to places ``[0, C)`` of the destination.

    destination: ``[U, blocks]``, the blocks of each sequence layer that these slots lie in, or pages, of which places
    behind a head's front are not written; none of it is another head's source. Bytes are copied as they are; a negative
    index empties its place: key and value become zero. Source and destination may overlap in any way, as if everything
    were read first. An entry that stays in place is not touched.
    """
    places = torch.arange(kept.shape[1], device=kept.device).expand_as(kept)
    destinations = _destinations(seq_layers, destination, places)
    for (at, _), to in zip(_entry_places(seq_layers, kept), destinations, strict=True):
        moves = (~at.exists | at.differ(to)) & to.exists
        rows = {name: _read(seq_layers.layers, name, at) for name in seq_layers.layers[0].row_planes}
        for name, values in rows.items():
            _write(seq_layers.layers, name, to, values, moves)


def write_rows(
    seq_layers: SequenceLayers, destination: Destination, places: Tensor, keys: Tensor | None, values: Tensor | None
) -> None:
    """Writes keys and values (``[H, r, d]`` float32; None: they stay) to the ``places`` (``[H, r]`` int64).

    destination: as for ``move_entries``. A negative place is skipped; no place occurs twice in a head.
    """
    for name, rows in (("keys", keys), ("values", values)):
        if rows is not None:
            scales = seq_layers.scales(name)
            rows = rows if scales is None else rows / scales
            parts = rows.chunk(len(seq_layers.layer))
            for at, part in zip(_destinations(seq_layers, destination, places), parts, strict=True):
                _write(seq_layers.layers, name, at, part)


def write_metadata(
    seq_layers: SequenceLayers,
    destination: Destination,
    log_votes: Tensor,
    scores: Tensor,
    aux: Tensor,
    positions: Tensor,
) -> None:
    """Writes the metadata (``[H, C]`` each) of places ``[0, C)``; other slots stay. destination: as for
    ``move_entries``."""
    places = torch.arange(positions.shape[1], device=positions.device).expand_as(positions)
    for name, plane in (("log_votes", log_votes), ("scores", scores), ("aux", aux), ("positions", positions)):
        parts = plane.chunk(len(seq_layers.layer))
        for at, part in zip(_destinations(seq_layers, destination, places), parts, strict=True):
            _write(seq_layers.layers, name, at, part)


def write_codes(
    seq_layers: SequenceLayers, destination: HeadPages, keys: Tensor, values: Tensor, log_votes: Tensor
) -> None:
    """Writes the entries of coded fronts, whose places are ``[0, C)``: keys and values (``[H, C, d]`` float32, finite)
    as codes, and ``log_votes`` (``[H, C]`` float32). destination: pages, coded alike; those behind a head's front are
    not written."""
    coding, size = destination.coding(0), destination.page_size(0)
    assert coding is not None
    fronts = sent(destination.fronts.flatten().unsqueeze(1), keys.device)
    room = -(-int(destination.fronts.max()) // size) * size

    def in_pages(plane: Tensor) -> Tensor:
        missing = (0, 0) * (plane.dim() - 2) + (0, room - plane.shape[1])
        return torch.nn.functional.pad(plane, missing).unflatten(1, (-1, size))

    keys, values, log_votes = map(in_pages, (keys, values, log_votes))
    slots = torch.arange(room, device=keys.device).view(-1, size)
    log_votes = log_votes.masked_fill(slots >= fronts.unsqueeze(2), -torch.inf)
    for layer, mine, block, head in _pages_by_layer(destination, size):
        seq_layers.layers[layer].coded(coding).write(block, head, keys[mine], values[mine], log_votes[mine])


def join_entries(
    seq_layers: SequenceLayers,
    slots: Tensor,
    sources: Tensor,
    source_weights: Tensor,
    slot_weights: Tensor,
    operators: Any = sys.modules[__name__],
) -> tuple[Tensor, Tensor]:
    """``join_slots`` for the keys of entries: ``slots``, ``[H, s]`` int64, and ``sources``, ``[H, m]`` int64, negative
    where there is none. operators: the module whose operators do the parts."""
    keys, joining = (operators.gather_rows(seq_layers, "keys", index) for index in (slots, sources))
    joined: tuple[Tensor, Tensor] = operators.join_slots(keys, joining, source_weights, slot_weights)
    return joined


def mix_entries(
    seq_layers: SequenceLayers,
    plane: PlaneName,
    sources: Tensor,
    row: Tensor,
    shares: Tensor,
    targets: Tensor | None,
    operators: Any = sys.modules[__name__],
) -> Tensor:
    """``mix_in`` for a plane of entries: ``sources``, ``[H, m]`` int64, join ``targets``, ``[H, r]`` int64 (None:
    zeros, as many as sources); both negative where there is none, and what such a source has then is a negative row or
    no share. operators: the module whose operators do the parts.
    """
    own = None if targets is None else operators.gather_rows(seq_layers, plane, targets)
    mixed: Tensor = operators.mix_in(operators.gather_rows(seq_layers, plane, sources), row, shares, own)
    return mixed


def merge_entries(
    seq_layers: SequenceLayers,
    destination: Destination,
    kept: Tensor,
    metadata: Metadata,
    rows: Rows,
    operators: Any = sys.modules[__name__],
) -> None:
    """Carries out a compaction: ``move_entries``, ``write_metadata`` and ``write_rows``.

    destination and kept: ``[H, C]`` as for ``move_entries``. metadata: that of the places ``[0, C)``.
    Everything is read before anything is written. operators: the module whose operators do the parts.
    """
    operators.move_entries(seq_layers, destination, kept)
    operators.write_metadata(seq_layers, destination, *metadata)
    if rows.keys is not None or rows.values is not None:
        operators.write_rows(seq_layers, destination, rows.places, rows.keys, rows.values)


def turn_keys(
    seq_layers: SequenceLayers,
    destination: Destination,
    before: Tensor,
    after: Tensor,
    table: Tensor,
    is_neox: bool,
    operators: Any = sys.modules[__name__],
) -> None:
    """Turns the keys of places ``[0, C)`` as if RoPE had counted other positions (``turns``).

    destination: as for ``move_entries``. before, after: ``[H, C]`` int64, positions at which keys are turned, and are
    to be; where both are equal, or ``after`` is negative, they stay. table, is_neox: the model's. operators: the module
    whose operators do the parts.
    """
    count = after.shape[1]
    place = torch.arange(count, device=after.device).expand_as(after)
    place = place.masked_fill((after < 0) | (before == after), -1)
    pages = destination if isinstance(destination, HeadPages) else None
    # With pages no block is read, but a sequence is no longer than its blocks.
    width = -(-count // seq_layers.layers[0].block_size)
    blocks = after.new_zeros(len(seq_layers.layer), width) if isinstance(destination, HeadPages) else destination
    segments = torch.tensor([[count] * 3] * len(seq_layers.layer))
    held = SequenceLayers(seq_layers.layers, seq_layers.layer, blocks, segments, pages)
    keys = turns.moved(operators.gather_rows(held, "keys", place), table, is_neox, before, after)
    operators.write_rows(seq_layers, destination, place, keys, None)


def write_tokens(cache: PagedKVCache, slot_mapping: Tensor, key: Tensor, value: Tensor) -> None:
    """Stores new tokens: key, value ``[num_tokens, H, d]`` at flat slots ``block * bs + offset`` (negative: none)."""
    wanted = slot_mapping >= 0
    block, offset = slot_mapping[wanted] // cache.block_size, slot_mapping[wanted] % cache.block_size
    if cache.is_quantised:
        key, value = key.float() / cache.key_scale, value.float() / cache.value_scale
    cache.keys[block, :, :, offset] = stored(key[wanted], cache.keys.dtype)
    cache.values[block, :, offset] = stored(value[wanted], cache.values.dtype)


def largest(ranking: Tensor, count: int | Tensor) -> Tensor:
    """``[H, n]`` bool: the ``count`` entries of largest ``ranking`` (``[H, n]``, no NaN). Ties: lower index first.

    count: a number, or one for each head (``[H]`` int64).
    """
    n = ranking.shape[1]
    if isinstance(count, Tensor):
        count = count.unsqueeze(1)
        threshold = ranking.sort(dim=1, descending=True).values.gather(1, count.clamp(1, n) - 1)
    elif count <= 0 or count >= n:
        return torch.full_like(ranking, count > 0, dtype=torch.bool)
    elif ranking.is_cpu:  # NumPy selects in less than half of PyTorch's time
        threshold = torch.from_numpy(np.partition(ranking.numpy(), n - count, axis=1)[:, n - count : n - count + 1])
    else:
        threshold = ranking.kthvalue(n - count + 1, dim=1, keepdim=True).values
    above, level = ranking > threshold, ranking == threshold
    return above | (level & (level.cumsum(1) <= count - above.sum(1, keepdim=True)))


def top(ranking: Tensor, protected: Tensor, is_live: Tensor, count: int | Tensor) -> Tensor:
    """``[H, n]`` bool, ``count`` per head (see ``largest``): those both protected and live, then the live ones of
    largest ``ranking`` (``[H, n]`` floating point), then dead ones. Ties: lower index first."""
    limits = torch.finfo(ranking.dtype)
    ranking = ranking.nan_to_num(nan=limits.min, posinf=limits.max, neginf=limits.min)
    return largest(ranking.masked_fill(protected, torch.inf).masked_fill(~is_live, -torch.inf), count)


def newest(positions: Tensor, count: int | Tensor, num_sinks: int) -> Tensor:
    """``[H, n]`` bool: of the live entries, whose position (``[H, n]`` int64) is not negative, the ``count`` of largest
    position (see ``largest``), and those of the first ``num_sinks`` tokens."""
    return (positions >= 0) & (largest(positions, count) | (positions < num_sinks))


def in_place(mask: Tensor, count: int | Tensor, num_places: int | None = None) -> Tensor:
    """``[H, num_places]`` int64: the entries in ``mask`` (``[H, n]`` bool, ``count`` per head), entry i at i where
    i < ``count``, the others in order where there is room below ``count``; -1 from there on.

    count: a number, ``num_places`` by default, or one for each head (``[H]`` int64).
    """
    num_places = int(count) if num_places is None else num_places
    counts = count.unsqueeze(1) if isinstance(count, Tensor) else count
    place = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    is_below = place < counts
    stays, comes = mask & is_below, mask & ~is_below
    # An extra last place takes ignored elements; nothing here waits for a GPU.
    others = place.new_zeros(len(mask), num_places + 1)
    others.scatter_(1, (comes.cumsum(1) - 1).masked_fill(~comes, num_places), place)
    place, stays, is_below = (tensor[:, :num_places] for tensor in (place, stays, is_below))
    vacancy = (~stays).cumsum(1) - 1
    return torch.where(stays, place, others.gather(1, vacancy.clamp(min=0))).masked_fill(~is_below, -1)


def by_position(positions: Tensor) -> Tensor:
    """``[H, n]`` int64: the entries in ascending order of position (``[H, n]`` int64, from -1 on); stable."""
    # One sort of integers of all heads is several times faster than one sort per head.
    num_heads, n = positions.shape
    head = torch.arange(num_heads, device=positions.device).unsqueeze(1)
    order = (positions + 1 + (head << 32)).flatten().argsort(stable=True)
    return order.view(num_heads, n) - head * n


def padded_nonzero(mask: Tensor, width: int | None = None) -> Tensor:
    """``[H, width]`` int64: where ``mask`` (``[H, n]`` bool) is true, ascending, then -1.

    width: at least the largest count of any head, which is the default and makes the call wait for a GPU.
    """
    if width is None:
        width = int(mask.sum(1).max()) if len(mask) else 0
    place = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    # An extra last place takes ignored elements.
    index = place.new_full((len(mask), width + 1), -1)
    index.scatter_(1, (mask.cumsum(1) - 1).masked_fill(~mask, width), place)
    return index[:, :width].contiguous()


def inverse(index: Tensor, size: int) -> Tensor:
    """``[H, size]`` int64: place in ``index`` (``[H, m]`` int64, without repeats) of each number; -1: none.

    Negative elements of ``index`` are ignored.
    """
    # An extra last element takes ignored ones.
    where = torch.full((len(index), size + 1), -1, dtype=torch.int64, device=index.device)
    place = torch.arange(index.shape[1], device=index.device).expand_as(index)
    return where.scatter_(1, index.masked_fill(index < 0, size), place)[:, :size]


def take(index: Tensor, planes: Sequence[Tensor], blanks: Sequence[float]) -> list[Tensor]:
    """``[H, m]`` each: elements of the planes (``[H, n]``) at ``index`` (``[H, m]`` int64), where that is negative the
    plane's blank."""
    none, at = index < 0, index.clamp(min=0)
    return [plane.gather(1, at).masked_fill(none, blank) for plane, blank in zip(planes, blanks, strict=True)]


def put(index: Tensor, planes: Sequence[Tensor], new: Sequence[Tensor]) -> list[Tensor]:
    """``[H, n]`` each: the planes, with the elements of the new ones (``[H, m]``) at ``index`` (``[H, m]`` int64,
    without repeats); where that is negative, nowhere."""
    # An extra last element takes these.
    place = index.masked_fill(index < 0, planes[0].shape[1])
    return [
        torch.cat([plane, plane[:, :1]], 1).scatter_(1, place, given)[:, :-1]
        for plane, given in zip(planes, new, strict=True)
    ]


def overflowing(
    places: Tensor, log_votes: Tensor, keys: Tensor | None, values: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """``[H, r]`` int64: ``places`` (``[H, r]`` int64) whose new key or value (``[H, r, d]`` float32) is not finite in a
    dtype, or whose ``log_votes`` (``[H, C]`` float32) are infinite or NaN; elsewhere -1."""
    (votes,) = take(places, [log_votes], [0.0])
    overflows = ~(votes < torch.inf)
    for rows in (keys, values):
        if rows is not None:
            # The largest number of a row is what becomes infinite first, and NaN is larger than all.
            overflows |= ~rows.abs().amax(-1).to(dtype).isfinite()
    return places.masked_fill(~overflows, -1)


def log_contributions(log_votes: Tensor, scores: Tensor, counts: Tensor, decay: float) -> Tensor:
    """``[H, n]`` float32: ln(p s_hat) of entries whose ``scores`` are moving averages of mode ``log_ema`` over
    ``counts`` queries; -inf where that is 0. All ``[H, n]`` float32."""
    return log_votes + torch.where(counts > 0, scores - log_bias_correction(counts, decay), -torch.inf)


def num_live(positions: Tensor) -> Tensor:
    """``[H]`` int64: how many of each head's ``positions`` (``[H, n]`` int64) are not negative."""
    return (positions >= 0).sum(1)


def empty_places(
    positions: Tensor, kept: Tensor, log_votes: Tensor, scores: Tensor, aux: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """An update's ``kept``, ``log_votes``, ``scores`` and ``aux`` (``[H, C]``) where places whose position is -1 are
    empty: their metadata is -inf, 0 and 0, and ``kept`` is -1 unless that entry lies there already."""
    dead = positions == -1
    moved = kept != torch.arange(kept.shape[1], device=kept.device)
    blank = (plane.masked_fill(dead, value) for plane, value in ((log_votes, -torch.inf), (scores, 0.0), (aux, 0.0)))
    return kept.masked_fill(dead & moved, -1), *blank  # type: ignore[return-value]


def split_budget(shares: Tensor, total: int, least: int, most: int) -> Tensor:
    """``[layers, H]`` int64: entries of each head, ``least`` to ``most``, such that they are the largest of ``shares``
    (``[layers, H, n]`` float32, no NaN) of their layer, and ``total`` together.

    Of equal ones those of lower rank in their heads come first, then those of lower heads. ``H * least`` <= ``total``
    <= ``H * min(most, n)``.
    """
    ranked = shares.sort(dim=2, descending=True).values[:, :, :most]
    # The first of each head are in, whatever others have; the rest compete.
    rivals = ranked[:, :, least:].transpose(1, 2).flatten(1)  # by rank, then by head
    order = rivals.argsort(dim=1, descending=True, stable=True)[:, : total - least * shares.shape[1]]
    counts = torch.full(shares.shape[:2], least, dtype=torch.int64, device=shares.device)
    return counts.scatter_add_(1, order % shares.shape[1], torch.ones_like(order))


def free_places(index: Tensor, positions: Tensor, num_places: int) -> Tensor:
    """``[H, m]`` int64: ``index`` (``[H, m]`` int64, without repeats of live ones) where that is one of the
    ``num_places`` places, and for the others, in order, the places that are free; -1 for dead ones, whose position
    (``[H, m]`` int64) is negative."""
    is_live = positions >= 0
    stays = is_live & (index >= 0) & (index < num_places)
    goes = is_live & ~stays
    # An extra last place takes ignored elements.
    free = torch.ones(len(index), num_places + 1, dtype=torch.bool, device=index.device)
    free.scatter_(1, index.masked_fill(~stays, num_places), False)
    rank = goes.cumsum(1) - 1
    given = padded_nonzero(free[:, :-1], num_places).gather(1, rank.clamp(min=0))
    return torch.where(stays, index, given.masked_fill(~goes, -1))


def join_slots(keys: Tensor, joining: Tensor, source_weights: Tensor, slot_weights: Tensor) -> tuple[Tensor, Tensor]:
    """Joins sources to slots, which are means of keys: each in turn to that of largest k_r . k_t (ZSMerge eq. 6).

    keys: ``[H, s, d]`` float32, of the slots, and joining: ``[H, m, d]``, of the sources. source_weights: ``[H, m]``,
    slot_weights: ``[H, s]`` float32: a slot's key moves as a source of weight w joins, by w / max(1, total weight). A
    slot of weight 0 is none, and nothing joins it while there are others.
    Returns ``[H, m]`` int64, the slot of each source, and the slots' weights then.
    """
    products, between = similarity.slot_products(keys, joining)
    products = products.masked_fill((slot_weights == 0).unsqueeze(1), -torch.inf)
    total = slot_weights.clone()
    joined = torch.zeros(source_weights.shape, dtype=torch.int64, device=products.device)
    head = torch.arange(len(products), device=products.device)
    for i in range(products.shape[1]):
        joined[:, i] = slot = products[:, i].argmax(dim=1)
        total[head, slot] += source_weights[:, i]
        share = (source_weights[:, i] / total[head, slot].clamp(min=1.0)).unsqueeze(-1)
        column = products[head, :, slot]
        products[head, :, slot] = column + share * (between[:, i] - column)
    return joined, total


def hand_over(
    order: Tensor, place: Tensor, is_live: Tensor, importance: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Where the values of entries that leave go, one after the other, the smallest ``importance`` first: each to its
    right neighbour at that time (WeightedKV algorithm 1; ``neighbours``). What nothing that stays follows is lost.

    order: ``[H, n]`` int64, entries in order of position, dead ones first. place: ``[H, n]`` int64, that of each entry
    which stays; negative: the entry leaves. is_live: ``[H, n]`` bool. importance: ``[H, n]`` floating point, scores m,
    of which negative ones count as 0. width: at least twice the number of live entries of a head that leave, or n.

    Returns five tensors. Three are ``[H, width]``: int64 index of the entries that take part, those that leave and
    those that follow one, in order of position, then -1; where in this list each one's value ends, its own number if it
    stays; and its share in the value there, floating point. Then their places, ``[H, width]`` int64, -1 for those that
    leave; and how many leave, ``[H]`` int64.
    """
    leaves = (is_live & (place < 0)).gather(1, order)
    rank = torch.arange(leaves.shape[1], device=leaves.device)
    last = rank.masked_fill(leaves, -1).amax(1, keepdim=True)
    leaves &= rank < last
    column = padded_nonzero(leaves | pad(leaves, (1, -1)), width)
    none, column = column < 0, column.clamp(min=0)
    index = order.gather(1, column)
    leaves = leaves.gather(1, column) & ~none
    scores = importance.gather(1, index).clamp(min=0.0).masked_fill(none, 0.0)
    places = place.gather(1, index).masked_fill(leaves | none, -1)
    shares, target = neighbours.shares_of(scores, leaves), neighbours.next_true(~leaves)
    return index.masked_fill(none, -1), target, shares, places, leaves.sum(1)


def line_up(
    place: Tensor, positions: Tensor, aux: Tensor, scores: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The entries that are not kept in the order in which they become and join slots (ZSMerge): slots, which are live
    and whose ``aux`` is at least 1, in order of position, then the others, then dead ones.

    place: ``[H, n]`` int64, that of a kept entry, negative for ``count`` entries of each head. positions: ``[H, n]``
    int64; aux, scores: ``[H, n]`` floating point. Returns ``[H, count]`` each: index of the entry, -1 of a dead one;
    position; weight, at least 1, 0 of a dead one; and score, 0 of a dead one.
    """
    rest = padded_nonzero(place < 0, count)
    positions, aux, scores = take(rest, [positions, aux, scores], [-1, 0.0, 0.0])
    is_dead, last = positions < 0, torch.iinfo(torch.int64).max
    turn = torch.where(aux >= 1, positions - last, positions).masked_fill(is_dead, last).argsort(dim=1, stable=True)
    index, weights = rest.masked_fill(is_dead, -1), aux.clamp(min=1.0).masked_fill(is_dead, 0.0)
    planes = index, positions, weights, scores.masked_fill(is_dead, 0.0)
    return tuple(plane.gather(1, turn) for plane in planes)  # type: ignore[return-value]


def list_joined(places: Tensor, joins: Tensor, num_places: int) -> tuple[Tensor, Tensor]:
    """The places that sources join: ``[H, w]`` int64, ascending, then -1, where w is ``min(num_places, m)``, on a CPU
    as small as may be, which makes nothing wait there; and where in it each source's place is, ``[H, m]`` int64, -1 for
    a source that does not join.

    places: ``[H, m]`` int64, from 0 to below ``num_places``. joins: ``[H, m]`` bool.
    """
    # An extra last place takes ignored elements.
    is_joined = torch.zeros(len(places), num_places + 1, dtype=torch.bool, device=places.device)
    is_joined = is_joined.scatter_(1, places.masked_fill(~joins, num_places), True)[:, :num_places]
    joined = padded_nonzero(is_joined, None if places.is_cpu else min(num_places, places.shape[1]))
    return joined, (is_joined.cumsum(1) - 1).gather(1, places).masked_fill(~joins, -1)


def mix_in(joining: Tensor, row: Tensor, shares: Tensor, own: Tensor | None) -> Tensor:
    """``[H, r, d]``: ``own`` (None: zeros, as many as join), each with the sum of share_j (x_j - own) over those that
    join it.

    joining: ``[H, m, d]`` floating point. row: ``[H, m]`` int64, which one each joins; negative: none. shares: ``[H,
    m]``. own: ``[H, r, d]``. ``joining`` and ``own`` may be overwritten.
    """
    own = torch.zeros_like(joining) if own is None else own
    if own.shape[1] == 0:
        return own
    joins, index = row.unsqueeze(-1) >= 0, row.clamp(min=0).unsqueeze(-1).expand_as(joining)
    moved = joining.sub_(own.gather(1, index)).mul_(shares.unsqueeze(-1))
    # Masked rather than weighted with 0: what does not join may be NaN.
    return own.scatter_add_(1, index, moved.masked_fill_(~joins, 0.0))


def zip_groups(
    sources: Tensor,
    targets: Tensor,
    joins: Tensor,
    planes: ZipPlanes,
    mode: ScoreMode,
    zip_mode: ZipMode,
    softmax: Softmax = PLAIN_SOFTMAX,
) -> ZipGroups:
    """What becomes of entries that others join, and of these (KeepKV eq. 25; the merger ``zip`` has all formulas).

    sources, targets: ``[H, m]`` int64, indices of entries: which may join, none twice, and what; no entry is both.
    joins: ``[H, m]`` bool, which do. mode: the tracker's, which says what merged scores are. zip_mode: whether the
    merged key is scaled. softmax: its cap counts, sinks are part of the planes.
    """

    def listed(mask: Tensor, most: int) -> Tensor:
        return padded_nonzero(mask, None if mask.is_cpu else most)  # a GPU would be waited for

    return zipping.zip_groups(planes, sources, targets, joins, mode, zip_mode, softmax, listed, inverse)


def take_rows(index: Tensor, rows: Tensor, others: Tensor) -> Tensor:
    """``[H, m, d]``: of ``rows`` (``[H, r, d]``), and behind them ``others`` (``[H, s, d]``), those at ``index``
    (``[H, m]`` int64); zeros where that is negative."""
    taken = rows.new_zeros(*index.shape, rows.shape[2])
    if rows.shape[1] + others.shape[1]:
        for out, which, some, more in zip(taken, index, rows, others, strict=True):  # as little as that is held twice
            found = torch.cat([some, more]).index_select(0, which.clamp(min=0))
            out.copy_(found.masked_fill_((which < 0).unsqueeze(1), 0.0))
    return taken


def join_changes(
    kept: Tensor, positions: Tensor, changed: Tensor, earlier: Tensor, num_entries: int, width: int | None = None
) -> tuple[Tensor, Tensor]:
    """What an update changes after an earlier one: places, ascending, then -1, and the row of each, both ``[H, width]``
    int64.

    kept: ``[H, C]`` int64, the entry, of ``num_entries``, that a place holds. positions: ``[H, C]`` int64, negative
    where it is dead; such a place keeps no earlier row. changed: ``[H, r]`` int64, places that the update changes.
    earlier: ``[H, s]`` int64, entries that the earlier one has changed. Neither has one twice; negative: none. Rows
    below r are those of ``changed``, from there on those of ``earlier``. width: as for ``padded_nonzero``.
    """
    before = take(kept.masked_fill(positions < 0, -1), [inverse(earlier, num_entries)], [-1])[0]
    row = inverse(changed, kept.shape[1])
    row = torch.where((row < 0) & (before >= 0), before + changed.shape[1], row)
    places = padded_nonzero(row >= 0, width)
    return places, take(places, [row], [-1])[0]


def projected_norms(values: Tensor, weights: Tensor) -> Tensor:
    """``[H, n]``: mean over the G query heads of ||W_O v||_1.

    values: ``[H, n, d]`` floating point. weights: ``[H, G, hidden, d]``, each query head's W_O, in any floating dtype.
    """
    num_groups, hidden = weights.shape[1:3]
    size = max(1, MAX_PRODUCT_BYTES // (hidden * values.element_size()))
    norms = torch.zeros_like(values[..., 0])
    for head, of_head in enumerate(weights):
        for weight in of_head:
            weight = weight.to(values.dtype)
            for start in range(0, values.shape[1], size):
                part = slice(start, start + size)
                norms[head, part] += (values[head, part] @ weight.T).abs_().sum(-1)
    return norms / num_groups


def attention_weights(
    queries: Tensor, query_positions: Tensor, keys: Tensor, log_votes: Tensor, positions: Tensor, scale: float
) -> Tensor:
    """``[H, G, w, n]``: softmax over entries of scale * q.k + log_votes; the arguments are those of
    ``attention.fused_attention``. A query sees live entries up to its own position, and gives no weight to any where it
    sees none."""
    return attention.attention_to_keys(queries, query_positions, keys, log_votes, positions, scale)


def solve_outputs(
    right: Tensor, derivative: OutputDerivative, ridge: float, iterations: int, tolerance: float
) -> Tensor:
    """alpha, ``[H, r, d]``, with (J J^T + ridge) alpha = ``right``, to a relative residual of ``tolerance`` or after
    ``iterations`` of conjugate gradients."""

    def operator(vector: Tensor) -> Tensor:
        return derivative.forward_adjoint(vector).add_(vector, alpha=ridge)

    return conjugate_gradients(operator, right, iterations, tolerance)
