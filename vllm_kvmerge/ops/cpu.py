"""The operators in C++ (csrc/cpu), with the signatures and semantics of ``reference``.

Arguments are checked on the native side: TypeError for a wrong dtype, ValueError for anything else.
"""

import math
import sys
from collections.abc import Sequence
from functools import cache as cached
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_kvmerge.ops import reference
from vllm_kvmerge.ops.attention import Fusion
from vllm_kvmerge.ops.layout import Operand, layout_check
from vllm_kvmerge.ops.types import (
    PLAIN_SOFTMAX,
    PLANES,
    QUANTISED,
    AttentionBatch,
    Changes,
    Destination,
    HeadPages,
    Metadata,
    PagedKVCache,
    PlaneName,
    ScoreMode,
    ScoreUpdate,
    SequenceLayers,
    Softmax,
    least_overflow,
)
from vllm_kvmerge.ops.zipping import ZIP_MODES, ZipGroups, ZipMode, ZipPlanes

LIBRARY = Path(__file__).with_name("_native.so")


@cached
def library() -> Any:
    """The loaded library. Raises OSError or ImportError if there is none that works.

    PyTorch, imported above, has loaded the OpenMP runtime that the library's threads use.
    """
    if not LIBRARY.exists():
        raise OSError(f"{LIBRARY} is missing: it was not built when the package was installed")
    import tvm_ffi

    try:
        return tvm_ffi.load_module(str(LIBRARY))
    except RuntimeError as error:
        raise OSError(f"{LIBRARY} cannot be loaded: {error}") from error


def runs_on(device: torch.device) -> str | None:
    """Says why these operators do not run on a device; None if they do."""
    return None if device.type == "cpu" else f"the cache is on {device}"


def obstacle(operand: Operand) -> str | None:
    """Says why these operators cannot work on ``operand``; None if they can."""
    if isinstance(operand, Tensor):
        known = operand.dtype in (torch.float32, torch.int64, torch.bool)
        return None if known else f"elements are {operand.dtype}"
    return _layout_obstacle(operand)


@layout_check
def _layout_obstacle(cache: PagedKVCache) -> str | None:
    if cache.keys.dtype not in (torch.float32, torch.bfloat16, torch.float16, *QUANTISED):
        return f"the cache is {cache.keys.dtype}"
    if cache.head_size % 16 or not 32 <= cache.head_size <= 512:
        return f"head size {cache.head_size} is not a multiple of 16 from 32 to 512"
    if cache.block_size % 16:
        return f"block size {cache.block_size} is not a multiple of 16"
    if cache.keys.stride(3) != 1:
        return "keys are not transposed"
    first = cache.keys.data_ptr()
    plane_bytes = cache.block_size * cache.head_size * cache.keys.element_size()
    num_regions = 1 if cache.is_interleaved else cache.keys.shape[0] * cache.num_kv_heads
    metadata = first + num_regions * 2 * plane_bytes
    expected = [first, first + plane_bytes, *(metadata + i * 4 * cache.block_size for i in range(4))]
    for name, address, place in zip(PLANES, cache.addresses, expected, strict=True):
        if address != place:
            return f"the plane of {name} is not where it should be"
    return None


def description(device: torch.device) -> str:
    """Describes these operators, for logs."""
    return f"native, {level()}"


def levels() -> list[str]:
    """Instruction set levels that the library has and this machine supports, the best first."""
    return list(library().levels().split())


def level() -> str:
    """The level in use: the best one, unless ``set_level`` chose another."""
    return str(library().level())


def set_level(name: str) -> None:
    """Sets the level of all operators. Raises ValueError if the machine does not support it."""
    library().set_level(name)


@cached
def _function(name: str) -> Any:
    return library()[name]


def _softmax(softmax: Softmax) -> tuple[float, Tensor | None]:
    return softmax.cap, None if softmax.sinks is None else softmax.sinks.contiguous()


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
    if window:  # vLLM's own operator attends in a window on the CPU
        reference.paged_attention(query, cache, batch, scale, output, softmax, window, chunked)
        return
    pages: tuple[Any, ...] = [], None, None, None
    if batch.pages is not None:
        pages = _keys(batch.pages.layers), *_pages(batch.pages), batch.pages.coded
    scale *= cache.key_scale
    arguments = *pages, *_softmax(softmax), cache.value_scale
    _function("paged_attention")(query, cache.keys, *batch.tensors, scale, output, *arguments)


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
    """See ``reference.score_prompt_queries``. lse: not used."""
    arguments = update.mode.code, update.decay, scale * cache.key_scale, scores, aux
    _function("score_prompt_queries")(query, cache.keys, blocks, *arguments, *_softmax(softmax))


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
    weights = None if weights is None else weights.contiguous()
    where = seq_len, context, start, sinks
    _function("score_repetition")(
        query, cache.keys, blocks, scale * cache.key_scale, *where, scores, weights, own, *_softmax(softmax)
    )


def _keys(layers: Sequence[PagedKVCache]) -> list[Tensor]:
    return [layer.keys for layer in layers]


def _pages(pages: HeadPages | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if pages is None else (pages.ids.contiguous(), pages.fronts.contiguous())


def _located(seq_layers: SequenceLayers) -> tuple[Any, ...]:
    where = seq_layers.blocks, seq_layers.segments, *_pages(seq_layers.pages)
    return _keys(seq_layers.layers), seq_layers.layer, *where


def _changes(changes: Changes | None, plane: PlaneName) -> tuple[Tensor | None, ...]:
    if changes is None:
        return None, None, None
    new = changes.new(plane)
    own = (None, None) if new is None else (changes.row.contiguous(), new.contiguous())
    return (changes.origin.contiguous(), *own)


def _destination(seq_layers: SequenceLayers, destination: Destination) -> tuple[Tensor | None, ...]:
    if isinstance(destination, HeadPages):
        return (seq_layers.blocks[:, :0], *_pages(destination))
    return (destination, None, None)


def gather_metadata(seq_layers: SequenceLayers) -> Metadata:
    shape = seq_layers.num_heads, seq_layers.num_entries
    log_votes, scores, aux = (torch.empty(shape) for _ in range(3))
    positions = torch.empty(shape, dtype=torch.int64)
    _function("gather_metadata")(*_located(seq_layers), log_votes, scores, aux, positions)
    return log_votes, scores, aux, positions


def gather_rows(seq_layers: SequenceLayers, plane: PlaneName, index: Tensor, changes: Changes | None = None) -> Tensor:
    scales = seq_layers.scales(plane)
    if changes is not None and scales is not None:  # new rows are not over a scale
        return changes.read(plane, index, partial(gather_rows, seq_layers, plane))
    rows = torch.empty(*index.shape, seq_layers.layers[0].head_size)
    new = _changes(changes, plane)
    _function("gather_rows")(*_located(seq_layers), plane == "keys", index.contiguous(), *new, rows)
    return rows if scales is None else rows.mul_(scales)


def most_similar(
    seq_layers: SequenceLayers, sources: Tensor, targets: Tensor, usable: Tensor, changes: Changes | None = None
) -> tuple[Tensor, Tensor]:
    similarity, best = torch.empty(sources.shape), torch.empty(sources.shape, dtype=torch.int64)
    arguments = sources.contiguous(), targets.contiguous(), usable.contiguous()
    _function("most_similar")(*_located(seq_layers), *arguments, *_changes(changes, "keys"), similarity, best)
    return similarity, best


def newest_repeats(keys: Tensor, threshold: float, found: Tensor, start: int, stop: int) -> Tensor:
    similarity = torch.empty(keys.shape[0], stop - start)
    _function("newest_repeats")(keys.contiguous(), threshold, found, start, stop, similarity)
    return similarity


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
    fused = torch.empty(positions.shape)
    scales = seq_layers.scales("keys")
    queries = queries if scales is None else queries * scales.unsqueeze(1)
    arguments = (t.contiguous() for t in (queries, query_positions, log_votes, positions))
    _function("fused_attention")(*_located(seq_layers), *arguments, scale, fusion == "max", fused, *_softmax(softmax))
    return fused


def join_entries(
    seq_layers: SequenceLayers, slots: Tensor, sources: Tensor, source_weights: Tensor, slot_weights: Tensor
) -> tuple[Tensor, Tensor]:
    # Quantised keys may be over a scale: it does not change which product is the largest.
    joined = torch.empty(sources.shape, dtype=torch.int64)
    total = slot_weights.clone(memory_format=torch.contiguous_format)
    given = (t.contiguous() for t in (slots, sources, source_weights))
    _function("join_entries")(*_located(seq_layers), *given, total, joined)
    return joined, total


def move_entries(seq_layers: SequenceLayers, destination: Destination, kept: Tensor) -> None:
    where = _destination(seq_layers, destination)
    _function("move_entries")(*_located(seq_layers), *where, kept.contiguous())


def write_rows(
    seq_layers: SequenceLayers, destination: Destination, places: Tensor, keys: Tensor | None, values: Tensor | None
) -> None:
    rows = []
    for plane, given in (("keys", keys), ("values", values)):
        scales = None if given is None else seq_layers.scales(plane)
        rows.append(None if given is None else (given if scales is None else given / scales).contiguous())
    where = _keys(seq_layers.layers), seq_layers.layer, *_destination(seq_layers, destination)
    _function("write_rows")(*where, places.contiguous(), *rows)


def write_metadata(
    seq_layers: SequenceLayers,
    destination: Destination,
    log_votes: Tensor,
    scores: Tensor,
    aux: Tensor,
    positions: Tensor,
) -> None:
    planes = (t.contiguous() for t in (log_votes, scores, aux, positions))
    where = _keys(seq_layers.layers), seq_layers.layer, *_destination(seq_layers, destination)
    _function("write_metadata")(*where, *planes)


def turn_keys(
    seq_layers: SequenceLayers, destination: Destination, before: Tensor, after: Tensor, table: Tensor, is_neox: bool
) -> None:
    if after.numel() == 0:
        return
    # In float32, and no more of it than is read.
    rows = table[: int(max(before.max(), after.max())) + 1].float().contiguous()
    where = _keys(seq_layers.layers), seq_layers.layer, *_destination(seq_layers, destination)
    _function("turn_keys")(*where, before.contiguous(), after.contiguous(), rows, is_neox)


merge_entries = partial(reference.merge_entries, operators=sys.modules[__name__])


def write_tokens(cache: PagedKVCache, slot_mapping: Tensor, key: Tensor, value: Tensor) -> None:
    if cache.is_quantised:
        key, value = key.float() / cache.key_scale, value.float() / cache.value_scale
    _function("write_tokens")(cache.keys, slot_mapping, key, value)


@lru_cache(maxsize=256)
def _tensor_of(*numbers: float, dtype: torch.dtype) -> Tensor:
    """For operators that only read it: the same numbers recur, and to make a tensor takes as long as many an
    operator."""
    return torch.tensor(numbers, dtype=dtype, device="cpu")


def _counts(count: int | Tensor) -> Tensor:
    return count if isinstance(count, Tensor) else _tensor_of(int(count), dtype=torch.int64)


def largest(ranking: Tensor, count: int | Tensor) -> Tensor:
    mask = torch.empty(ranking.shape, dtype=torch.bool)
    _function("largest")(ranking.contiguous(), _counts(count), mask)
    return mask


def top(ranking: Tensor, protected: Tensor, is_live: Tensor, count: int | Tensor) -> Tensor:
    mask = torch.empty(ranking.shape, dtype=torch.bool)
    _function("top")(*(t.contiguous() for t in (ranking, protected, is_live)), _counts(count), mask)
    return mask


def newest(positions: Tensor, count: int | Tensor, num_sinks: int) -> Tensor:
    mask = torch.empty(positions.shape, dtype=torch.bool)
    _function("newest")(positions.contiguous(), _counts(count), num_sinks, mask)
    return mask


def in_place(mask: Tensor, count: int | Tensor, num_places: int | None = None) -> Tensor:
    num_places = int(count) if num_places is None else num_places
    index = torch.empty(mask.shape[0], num_places, dtype=torch.int64)
    _function("in_place")(mask.contiguous(), _counts(count), index)
    return index


def by_position(positions: Tensor) -> Tensor:
    order = torch.empty(positions.shape, dtype=torch.int64)
    _function("by_position")(positions.contiguous(), order)
    return order


def padded_nonzero(mask: Tensor, width: int | None = None) -> Tensor:
    mask = mask.contiguous()
    index = torch.empty(mask.shape[0], _function("most_true")(mask) if width is None else width, dtype=torch.int64)
    _function("padded_nonzero")(mask, index)
    return index


def inverse(index: Tensor, size: int) -> Tensor:
    where = torch.empty(index.shape[0], size, dtype=torch.int64)
    _function("inverse")(index.contiguous(), where)
    return where


def keep_queries(query: Tensor, addresses: Tensor, layer: int, tokens: Tensor | None = None) -> None:
    _function("keep_queries")(query, addresses, layer, tokens)


def read_queries(
    places: Tensor, kept: Sequence[Tensor], seq_layers: Sequence[tuple[int, int]], num_kv_heads: int
) -> Tensor:
    num_heads, head_size = kept[0].shape[2:]
    vectors = torch.empty(len(seq_layers), num_heads, places.shape[1], head_size, dtype=kept[0].dtype)
    _function("read_queries")(places.contiguous(), list(kept), torch.tensor(seq_layers), vectors)
    return vectors.view(-1, num_heads // num_kv_heads, *vectors.shape[2:])


def take(index: Tensor, planes: Sequence[Tensor], blanks: Sequence[float]) -> list[Tensor]:
    if any(plane.dtype not in (torch.float32, torch.int64) for plane in planes):
        return reference.take(index, planes, blanks)
    taken = [torch.empty(index.shape, dtype=plane.dtype) for plane in planes]
    contiguous = [plane.contiguous() for plane in planes]
    _function("take")(contiguous, index.contiguous(), _tensor_of(*blanks, dtype=torch.float32), taken)
    return taken


def put(index: Tensor, planes: Sequence[Tensor], new: Sequence[Tensor]) -> list[Tensor]:
    if any(plane.dtype not in (torch.float32, torch.int64) for plane in planes):
        return reference.put(index, planes, new)
    changed = [plane.clone(memory_format=torch.contiguous_format) for plane in planes]
    given = [one.to(plane.dtype).contiguous() for one, plane in zip(new, planes, strict=True)]
    _function("put")(index.contiguous(), given, changed)
    return changed


def overflowing(
    places: Tensor, log_votes: Tensor, keys: Tensor | None, values: Tensor | None, dtype: torch.dtype
) -> Tensor:
    given = (places, log_votes, keys, values)
    if any(t is not None and t.dtype != torch.float32 for t in given[1:]):
        return reference.overflowing(*given, dtype)
    overflowing = torch.empty(places.shape, dtype=torch.int64)
    contiguous = (None if t is None else t.contiguous() for t in given)
    _function("overflowing")(*contiguous, least_overflow(dtype), overflowing)
    return overflowing


def log_contributions(log_votes: Tensor, scores: Tensor, counts: Tensor, decay: float) -> Tensor:
    if any(t.dtype != torch.float32 for t in (log_votes, scores, counts)):
        return reference.log_contributions(log_votes, scores, counts, decay)
    out = torch.empty(log_votes.shape)
    given = (t.contiguous() for t in (log_votes, scores, counts))
    _function("log_contributions")(*given, math.log(decay), out)
    return out


def num_live(positions: Tensor) -> Tensor:
    live = torch.empty(positions.shape[0], dtype=torch.int64)
    _function("num_live")(positions.contiguous(), live)
    return live


def empty_places(
    positions: Tensor, kept: Tensor, log_votes: Tensor, scores: Tensor, aux: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if any(plane.dtype != torch.float32 for plane in (log_votes, scores, aux)):
        return reference.empty_places(positions, kept, log_votes, scores, aux)
    changed = [t.clone(memory_format=torch.contiguous_format) for t in (kept, log_votes, scores, aux)]
    _function("empty_places")(positions.contiguous(), *changed)
    return changed[0], changed[1], changed[2], changed[3]


def split_budget(shares: Tensor, total: int, least: int, most: int) -> Tensor:
    counts = torch.empty(shares.shape[:2], dtype=torch.int64)
    _function("split_budget")(shares.contiguous(), total, least, most, counts)
    return counts


def free_places(index: Tensor, positions: Tensor, num_places: int) -> Tensor:
    place = torch.empty(index.shape, dtype=torch.int64)
    _function("free_places")(index.contiguous(), positions.contiguous(), num_places, place)
    return place


def join_slots(keys: Tensor, joining: Tensor, source_weights: Tensor, slot_weights: Tensor) -> tuple[Tensor, Tensor]:
    joined = torch.empty(source_weights.shape, dtype=torch.int64)
    total = slot_weights.clone(memory_format=torch.contiguous_format)
    given = (t.contiguous() for t in (keys, joining, source_weights))
    _function("join_slots")(*given, total, joined)
    return joined, total


def hand_over(
    order: Tensor, place: Tensor, is_live: Tensor, importance: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    if importance.dtype != torch.float32:
        return reference.hand_over(order, place, is_live, importance, width)
    index, target, places = (torch.empty(order.shape[0], width, dtype=torch.int64) for _ in range(3))
    shares, count = torch.empty(order.shape[0], width), torch.empty(order.shape[0], dtype=torch.int64)
    given = (t.contiguous() for t in (order, place, is_live, importance))
    _function("hand_over")(*given, index, target, shares, places, count)
    return index, target, shares, places, count


def line_up(
    place: Tensor, positions: Tensor, aux: Tensor, scores: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if aux.dtype != torch.float32 or scores.dtype != torch.float32:
        return reference.line_up(place, positions, aux, scores, count)
    index, newest = (torch.empty(place.shape[0], count, dtype=torch.int64) for _ in range(2))
    weights, sums = (torch.empty(place.shape[0], count) for _ in range(2))
    given = (t.contiguous() for t in (place, positions, aux, scores))
    _function("line_up")(*given, index, newest, weights, sums)
    return index, newest, weights, sums


def list_joined(places: Tensor, joins: Tensor, num_places: int) -> tuple[Tensor, Tensor]:
    joined = torch.empty(places.shape[0], min(num_places, places.shape[1]), dtype=torch.int64)
    row = torch.empty(places.shape, dtype=torch.int64)
    width = _function("list_joined")(places.contiguous(), joins.contiguous(), num_places, joined, row)
    return joined[:, :width], row


def mix_in(joining: Tensor, row: Tensor, shares: Tensor, own: Tensor | None) -> Tensor:
    if any(t.dtype != torch.float32 for t in (joining, shares, own) if t is not None):
        return reference.mix_in(joining, row, shares, own)
    mixed = torch.zeros(joining.shape) if own is None else own.contiguous()
    _function("mix_in")(joining.contiguous(), row.contiguous(), shares.contiguous(), mixed, own is not None)
    return mixed


def mix_entries(
    seq_layers: SequenceLayers,
    plane: PlaneName,
    sources: Tensor,
    row: Tensor,
    shares: Tensor,
    targets: Tensor | None,
) -> Tensor:
    if shares.dtype != torch.float32:
        return reference.mix_entries(seq_layers, plane, sources, row, shares, targets)
    places = sources if targets is None else targets
    mixed = torch.empty(*places.shape, seq_layers.head_size)
    given = (t.contiguous() for t in (sources, row, shares))
    own = None if targets is None else targets.contiguous()
    _function("mix_entries")(*_located(seq_layers), plane == "keys", *given, own, mixed)
    scales = seq_layers.scales(plane)
    return mixed if scales is None else mixed.mul_(scales)


def zip_groups(
    sources: Tensor,
    targets: Tensor,
    joins: Tensor,
    planes: ZipPlanes,
    mode: ScoreMode,
    zip_mode: ZipMode,
    softmax: Softmax = PLAIN_SOFTMAX,
) -> ZipGroups:
    index, number = torch.int64, torch.float32
    if planes.log_scores.dtype != number or planes.log_votes.dtype != number:
        return reference.zip_groups(sources, targets, joins, planes, mode, zip_mode, softmax)
    wide = [torch.empty(4, *sources.shape, dtype=dtype) for dtype in (index, number)]
    lists, given = (t.contiguous() for t in (sources, targets, joins)), [plane.contiguous() for plane in planes]
    r, j = _function("zip_groups")(*lists, given, mode.code, ZIP_MODES.index(zip_mode), softmax.cap, *wide)

    def narrow(results: Tensor, number: int, width: int) -> Tensor:
        """As wide as the head that needs most of a list: so they lie in ``results``."""
        return results.as_strided((sources.shape[0], width), (width, 1), number * sources.numel())

    target, source, group, newest = (narrow(wide[0], i, width) for i, width in enumerate((r, j, j, r)))
    shares, factors, log_votes, scores = (narrow(wide[1], i, width) for i, width in enumerate((j, r, r, r)))
    return ZipGroups(target, source, group, shares, factors, log_votes, scores, newest)


def projected_norms(values: Tensor, weights: Tensor) -> Tensor:
    norms = torch.empty(values.shape[:2])
    _function("projected_norms")(values.contiguous(), weights.contiguous(), norms)
    return norms.div_(weights.shape[1])
