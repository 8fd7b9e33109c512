"""The implementation of each operator on a GPU: rules in ``choice.json``, of which later ones win over earlier ones.

A rule names an ``implementation``: ``cuda``, ``triton`` or ``reference``; if that cannot run, the next of these does.
It applies if all conditions that it names match: ``operator``; ``device``, a prefix of the GPU's name; ``head_sizes``,
a list. A rule that prefers ``cuda`` must rest on a measurement (benchmarks/gpu_operators.py) on the GPU that it names.
"""

from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, Required

import torch
from pydantic import ConfigDict, TypeAdapter
from typing_extensions import TypedDict  # pydantic takes typing's from Python 3.12 on

from vllm_kvmerge.ops.tables import read_table

RULES = Path(__file__).with_name("choice.json")

IMPLEMENTATIONS = ("reference", "native", "triton", "cuda")


class Rule(TypedDict, total=False):
    """Conditions, and what holds where they match."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # type: ignore[misc]

    operator: str
    device: str
    head_sizes: list[int]
    implementation: Required[Literal["reference", "triton", "cuda"]]


SCHEMA: TypeAdapter[Any] = TypeAdapter(list[Rule])


@cache
def rules() -> list[dict[str, Any]]:
    """The table. Raises ValueError, which names its file, if that is missing or broken."""
    found: list[dict[str, Any]] = read_table(RULES, SCHEMA)
    if not any(rule.keys() == {"implementation"} for rule in found):
        raise ValueError(f"{RULES} is broken: no rule holds everywhere")
    return found


@cache
def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


@cache
def choice(operator: str, device: str, head_size: int = 0) -> str:
    """The implementation for an operator on the GPU named ``device``. head_size: 0 for operators on plain tensors."""
    found = ""
    for rule in rules():
        holds = rule.get("operator", operator) == operator and device.startswith(rule.get("device", ""))
        if holds and head_size in rule.get("head_sizes", [head_size]):
            found = rule["implementation"]
    return found


def check_overrides(overrides: object, operators: Collection[str]) -> dict[str, str]:
    """Returns the overrides. Raises ValueError for an unknown operator or implementation."""
    if not isinstance(overrides, Mapping):
        raise ValueError(f"{overrides!r} does not say which implementation runs which operator")
    for operator, implementation in overrides.items():
        if operator not in operators:
            raise ValueError(f"there is no operator {operator!r} to choose; allowed: {', '.join(sorted(operators))}")
        if implementation not in IMPLEMENTATIONS:
            allowed = ", ".join(IMPLEMENTATIONS)
            raise ValueError(f"there are no operators called {implementation!r}; allowed: {allowed}")
    return dict(overrides)
