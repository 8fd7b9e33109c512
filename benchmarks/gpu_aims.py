"""Whether what gpu_operators.py measured reaches what the operators are meant to reach on a GPU like the H200."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from gpu_bench import TOLERANCE, Row

LARGE = 256 << 20
"""Bytes of live keys and values from which on attention is to reach its share of the copy bandwidth."""

OURS = ("triton", "cuda")
CUDA = ("cuda",)


@dataclass(frozen=True)
class Aim:
    """reached: None where nothing that was measured tells. found: the worst of it, in words."""

    text: str
    found: str
    reached: bool | None

    def __str__(self) -> str:
        word = {True: "reached", False: "NOT reached", None: "not measured"}[self.reached]
        return f"{word:12}  {self.text}" + (f": {self.found}" if self.found else "")


def _worst(text: str, values: Iterable[tuple[float, str]], limit: float, show: Callable[[float], str]) -> Aim:
    """An aim that every value is at most ``limit``."""
    found = sorted(values)
    if not found:
        return Aim(text, "", None)
    value, case = found[-1]
    missed = sum(value > limit for value, _ in found)
    share = f"; {missed} of {len(found)} miss it" if missed else f"; of {len(found)}"
    return Aim(text, f"{show(value)} ({case}){share}", missed == 0)


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def _attention(rows: Sequence[Row], part: str, names: Sequence[str]) -> list[Row]:
    return [
        row for row in rows if row.part == part and row.operator == "paged_attention" and row.implementation in names
    ]


def _size(row: Row) -> tuple[object, ...]:
    return tuple(row.shape.get(name) for name in ("rows", "entries", "groups", "queries")) + (row.dtype,)


def _fastest(rows: Iterable[Row]) -> dict[tuple[object, ...], Row]:
    """The fastest row of each size."""
    found: dict[tuple[object, ...], Row] = {}
    for row in rows:
        if _size(row) not in found or row.seconds < found[_size(row)].seconds:
            found[_size(row)] = row
    return found


def _share_of_copy(rows: Sequence[Row], names: Sequence[str], text: str, least: float) -> Aim:
    """Each case's fastest implementation; values are what is missing to all of the bandwidth."""
    best: dict[str, Row] = {}
    for row in _attention(rows, "decode", names):
        if row.shape["live_bytes"] >= LARGE and row.shape["front"] and row.shape["mode"] != "none":
            best[row.case] = max(row, best.get(row.case, row), key=lambda one: one.share)
    found = ((1 - row.share, f"{row.case}, {row.implementation}") for row in best.values())
    return _worst(text, found, 1 - least, lambda missing: _percent(1 - missing))


def _skewed(rows: Sequence[Row]) -> Aim:
    found = (
        (1 / row.share, f"{row.case}, {row.implementation}") for row in _attention(rows, "skewed", OURS) if row.share
    )
    text = "a long sequence among short ones takes at most 1.3 times what its bytes do at copy bandwidth"
    return _worst(text, found, 1.3, lambda times: f"{times:.2f}")


def _score_update(rows: Sequence[Row]) -> Aim:
    ours = _attention(rows, "decode", OURS)
    plain = {
        (_size(row), row.implementation): row for row in ours if row.shape["front"] and row.shape["mode"] == "none"
    }
    found = [
        (row.seconds / plain[_size(row), row.implementation].seconds - 1, f"{row.case}, {row.implementation}")
        for row in ours
        if row.shape["mode"] != "none" and (_size(row), row.implementation) in plain
    ]
    return _worst("score update takes at most 8% of attention without it", found, 0.08, _percent)


def _against(
    rows: Sequence[Row], names: Sequence[str], peer: Callable[[Row], bool], text: str, limit: float, part: str,
    theirs: str,
) -> Aim:  # fmt: skip
    """Our fastest attention, with votes and without an update, over the fastest peer at the same size."""
    ours = _fastest(row for row in _attention(rows, part, names) if row.shape["front"] and row.shape["mode"] == "none")
    others = _fastest(row for row in rows if row.part == theirs and peer(row) and row.is_right)
    found = (
        (ours[size].seconds / other.seconds, f"{ours[size].case}, {ours[size].implementation} / {other.implementation}")
        for size, other in others.items()
        if size in ours
    )
    return _worst(text, found, limit, lambda ratio: f"{ratio:.2f} of its time")


def _is_flex(row: Row) -> bool:
    return row.implementation.startswith("Flex")


def _is_flash(row: Row) -> bool:
    return row.implementation in ("SDPA flash", "flash_attn")


def _compactions(rows: Sequence[Row]) -> Aim:
    found = [row for row in rows if row.part == "compaction"]
    prefill = min((row.seconds for row in found if row.operator == "prefill"), default=None)
    shares = [] if prefill is None else [
        (row.seconds / prefill, f"{row.operator} {row.implementation}, {row.case}")
        for row in found if row.operator != "prefill"
    ]  # fmt: skip
    return _worst("compaction to a tenth takes at most 3% of its prompt's attention", shares, 0.03, _percent)


def _merges(rows: Sequence[Row]) -> Aim:
    """Of one layer, beside attention of one layer: all else that a decode step does is left out, so it is stricter."""
    found = [row for row in rows if row.part == "merges"]
    most = max((row.shape["rows"] for row in found if row.operator == "paged_attention"), default=0)
    steps = _fastest(row for row in found if row.operator == "paged_attention" and row.shape["rows"] == most)
    seconds = {row.shape["entries"]: row.seconds for row in steps.values()}
    best: dict[str, Row] = {}
    for row in found:
        if row.operator == "merge_entries" and row.shape["units"] == most and row.shape["entries"] in seconds:
            best[row.case] = min(row, best.get(row.case, row), key=lambda one: one.seconds)
    shares = (
        (row.seconds / seconds[row.shape["entries"]], f"{row.case}, {row.implementation}") for row in best.values()
    )
    text = f"merge of one interval for {most or 'all'} requests takes at most 2% of a decode step's attention"
    return _worst(text, shares, 0.02, _percent)


def _errors(rows: Sequence[Row], dtype: str) -> Aim:
    limit = TOLERANCE[dtype]
    found = ((row.error, f"{row.operator} {row.implementation}, {row.case}") for row in rows
             if row.dtype == dtype and row.errors)  # fmt: skip
    return _worst(f"errors in {dtype} are at most {limit:.0e}", found, limit, lambda error: f"{error:.1e}")


def aims(rows: Sequence[Row]) -> list[Aim]:
    """All of them, each with the worst that was found."""
    flex = "attention with votes is at least as fast as FlexAttention over pages"
    return [
        _errors(rows, "bfloat16"),
        _errors(rows, "float32"),
        _share_of_copy(rows, OURS, "decoding with votes and score update reaches 85% of copy bandwidth", 0.85),
        _share_of_copy(rows, CUDA, "the same in CUDA C++: 90%", 0.9),
        _skewed(rows),
        _score_update(rows),
        _against(rows, OURS, _is_flex, f"{flex}: decoding", 1.0, "decode", "peers"),
        _against(rows, OURS, _is_flex, f"{flex}: chunks of prompts", 1.0, "prefill", "prefill"),
        _against(rows, CUDA, _is_flash, "decoding in CUDA C++ is within 5% of FlashAttention without votes", 1.05,
                 "decode", "peers"),
        _compactions(rows),
        _merges(rows),
    ]  # fmt: skip
