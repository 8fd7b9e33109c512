"""Tile sizes of Triton's kernels, by GPU: rules in ``tuning.json``, of which later ones win over earlier ones.

A rule names its kernel. It applies if all conditions that it names match: ``device``, a prefix of the GPU's name; and
lists of allowed values of ``head_size``, the head size rounded up to a power of two, ``row_bytes``, bytes of such a row
in the cache (as many as the head size: numbers of 8 bits, which are multiplied as 16), and ``groups``, query heads per
KV head. Everything else is a setting, except ``measured``, the measurement behind a rule for one GPU. Rules that name
no GPU hold on all; each kernel has some for every shape.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Required, get_args

from pydantic import ConfigDict, TypeAdapter
from typing_extensions import TypedDict  # pydantic takes typing's from Python 3.12 on

from vllm_kvmerge.ops.tables import read_table

RULES = Path(__file__).with_name("tuning.json")
CONDITIONS = ("kernel", "device", "head_size", "row_bytes", "groups")
NO_SETTINGS = (*CONDITIONS, "measured")


@dataclass(frozen=True)
class Settings:
    """Tile sizes and launch options of a kernel.

    block_m: rows of a tile, or queries. block_n: entries of a tile, or heads for ``write``. warps, stages: Triton's.
    least: entries of the smallest piece, a multiple of block_n. programs: number per multiprocessor that entries are
    cut for.
    """

    warps: int
    stages: int
    block_n: int = 16
    block_m: int = 16
    least: int = 128
    programs: int = 1

    @property
    def launch(self) -> dict[str, int]:
        return {"num_warps": self.warps, "num_stages": self.stages}


Kernel = Literal["columns", "decode", "finish", "metadata", "newest", "prefill", "rows", "similar", "write"]


class Rule(TypedDict, total=False):
    """Conditions, and the settings where they match."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # type: ignore[misc]

    kernel: Required[Kernel]
    device: str
    head_size: list[int]
    row_bytes: list[int]
    groups: list[int]
    measured: Any
    warps: int
    stages: int
    block_n: int
    block_m: int
    least: int
    programs: int


SCHEMA: TypeAdapter[Any] = TypeAdapter(list[Rule])


@cache
def rules() -> list[dict[str, Any]]:
    """The table. Raises ValueError, which names its file, if that is missing or broken."""
    found: list[dict[str, Any]] = read_table(RULES, SCHEMA)
    everywhere = {rule["kernel"] for rule in found if {"warps", "stages"} <= rule.keys() and "device" not in rule}
    if missing := sorted({*get_args(Kernel)} - everywhere):
        raise ValueError(f"{RULES} is broken: no rule for all GPUs has warps and stages of {', '.join(missing)}")
    return found


@cache
def settings(kernel: str, device: str, head_size: int = 32, row_bytes: int = 64, groups: int = 1) -> Settings:
    """Settings of a kernel on the GPU named ``device``. head_size: rounded up to a power of two."""
    chosen: dict[str, int] = {}
    for rule in rules():
        shape = {"head_size": head_size, "row_bytes": row_bytes, "groups": groups}
        holds = rule["kernel"] == kernel and device.startswith(rule.get("device", ""))
        if holds and all(value in rule.get(name, [value]) for name, value in shape.items()):
            chosen |= {name: value for name, value in rule.items() if name not in NO_SETTINGS}
    return Settings(**chosen)


@contextmanager
def trial(rule: dict[str, Any]) -> Iterator[None]:
    """Context manager in which ``rule`` wins over all in the table."""
    rules().append(rule)
    settings.cache_clear()
    try:
        yield
    finally:
        rules().remove(rule)
        settings.cache_clear()


def is_tuned(device: str) -> bool:
    """True if any rule is this GPU's own."""
    return any("device" in rule and device.startswith(rule["device"]) for rule in rules())
