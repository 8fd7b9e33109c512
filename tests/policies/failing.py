"""Parts of somebody else's that fail in every way there is."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from vllm_kvmerge.policies import MERGERS, PRESETS, SELECTORS, CompressionContext, Entries, Preset, register
from vllm_kvmerge.policies.mergers import DropMerger
from vllm_kvmerge.policies.plugins import GROUP
from vllm_kvmerge.policies.registry import register_preset
from vllm_kvmerge.policies.selectors.recent import Recent
from vllm_kvmerge.request import schema, spec

SELECTOR_FAULTS = ("raise", "shape", "dtype", "count", "sleep", "none")
MERGER_FAULTS = ("raise", "shape", "dtype", "nan_rows", "nan_votes", "kept", "twice", "sleep", "hold", "sleep_a_little")
SLEEP = 30.0
HELD = 1 << 26
"""Numbers of what holds too much, which nobody writes."""

PRESET = "failing"


class Failing(Recent):
    """A sliding window whose selection fails."""

    name: ClassVar[str] = "failing"
    source: ClassVar[str] = "a test"
    select_fault: Literal["no", "raise", "shape", "dtype", "count", "sleep", "none"] = "no"

    def select(self, entries: Entries, importance: Tensor, protected: Tensor, context: CompressionContext) -> Tensor:
        selected = super().select(entries, importance, protected, context)
        match self.select_fault:
            case "raise":
                raise RuntimeError("over two\nlines")
            case "shape":
                return selected[:, 1:]
            case "dtype":
                return selected.float()
            case "count":
                return torch.ones_like(selected)
            case "sleep":
                time.sleep(SLEEP)
            case "none":
                return None  # type: ignore[return-value]
        return selected


class FailingMerger(DropMerger):
    """Drops, and then fails."""

    name: ClassVar[str] = "failing"
    source: ClassVar[str] = "a test"
    merge_fault: Literal["no", *MERGER_FAULTS] = "no"  # type: ignore[valid-type]
    weights: list[Annotated[float, Field(ge=0.0, le=1.0)]] = [0.5]  # which has no hash

    def merge(self, entries, kept, importance, protected, context):  # type: ignore[no-untyped-def]
        update = super().merge(entries, kept, importance, protected, context)
        places = torch.arange(2, device=kept.device).repeat(len(kept), 1)
        rows = entries.values_at(kept[:, :2])
        match self.merge_fault:
            case "raise":
                raise KeyError("nothing")
            case "shape":
                return replace(update, scores=update.scores[:, 1:])
            case "dtype":
                return replace(update, kept=update.kept.int())
            case "nan_rows":
                return replace(update, changed=places, values=rows * torch.nan)
            case "nan_votes":
                return replace(update, log_votes=update.log_votes * torch.nan)
            case "kept":
                return replace(update, kept=update.kept + 10**9)
            case "twice":
                return replace(update, changed=torch.zeros_like(places), values=rows)
            case "sleep":
                time.sleep(SLEEP)
            case "hold":
                torch.empty(HELD)
            case "sleep_a_little":  # once for each slice of a batch
                time.sleep(0.2)
        return update


def register_all() -> None:
    register(Failing)
    register(FailingMerger)
    register_preset(Preset(PRESET, "a test", "none", "failing", "failing"))


@contextmanager
def registered() -> Iterator[None]:
    """The preset and its parts are known, in this process."""
    try:
        register_all()
        yield
    finally:
        PRESETS.pop(PRESET, None)
        SELECTORS.pop("failing", None)
        MERGERS.pop("failing", None)
        spec._specs.clear()
        schema.request_model.cache_clear()


FAULTS = [("select_fault", fault, "selector:failing") for fault in SELECTOR_FAULTS]
FAULTS += [("merge_fault", fault, "merger:failing") for fault in MERGER_FAULTS]
"""Field, value, and the part that is to blame."""


def write_package(folder: Path) -> dict[str, str]:
    """Makes the preset one of an installed package, for processes with the returned variables in their environment."""
    info = folder / "kvmerge_failing-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvmerge-failing\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nfailing = kvmerge_failing\n")
    (folder / "kvmerge_failing.py").write_text("from tests.policies import failing\n\nfailing.register_all()\n")
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(Path(__file__).parents[2])])}
