"""Fronts in files: what a worker holds of a kept context, written as safetensors and read back."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from vllm_kvmerge.ops import HeadPages, PagedKVCache
from vllm_kvmerge.ops.types import sent

SAMPLE = 256
"""Numbers of each parameter by which models are told apart."""

MANIFEST = "manifest"
"""Entry of a file's metadata: what its server knows of the front, as JSON text."""


class SavedFrontError(RuntimeError):
    """A file cannot be written, or used. The message says why."""


def file_of(folder: Path, rank: int, num_ranks: int) -> Path:
    """The file of one tensor-parallel worker in a context's folder."""
    return folder / f"rank-{rank}-of-{num_ranks}.safetensors"


def fingerprint(model: nn.Module) -> str:
    """What tells a model's weights, as this worker holds them, from others'."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        sample = parameter.detach().flatten()[:SAMPLE].float().cpu()
        # Modules that may have LoRA adapters hold those that the model has without.
        name = name.replace(".base_layer.", ".")
        digest.update(f"{name} {tuple(parameter.shape)}".encode() + sample.numpy().tobytes())
    return digest.hexdigest()


def front_tensors(
    layers: Sequence[PagedKVCache], blocks: list[int], pages: HeadPages | None, others: Mapping[str, Tensor | None]
) -> dict[str, Tensor]:
    """A front as tensors on the CPU: of each layer keys and values ``[n, H, 2 * bs * d]`` and the planes of metadata
    ``[4, n, H, bs]`` as int32, of its ``n`` blocks (ids); pages by the place of their block; and ``others``."""
    index = sent(torch.tensor(blocks), layers[0].device)
    tensors = {name: tensor.cpu().contiguous() for name, tensor in others.items() if tensor is not None}
    for number, cache in enumerate(layers):
        tensors[f"content.{number}"] = cache.content.index_select(0, index).cpu()
        planes = [plane.index_select(0, index).view(torch.int32) for plane in cache.metadata]
        tensors[f"metadata.{number}"] = torch.stack(planes).cpu()
    if pages is not None:
        num_lanes = len(layers) * pages.num_kv_heads
        place = torch.zeros(max(*blocks, int(pages.ids.max()) // num_lanes) + 1, dtype=torch.int64)
        place[torch.tensor(blocks)] = torch.arange(len(blocks))
        tensors["pages.ids"] = place[pages.ids // num_lanes] * num_lanes + pages.ids % num_lanes
        tensors["pages.fronts"] = pages.fronts.clone()
        if pages.coded is not None:
            tensors["pages.coded"] = pages.coded
    return tensors


def window_tensors(caches: Sequence[PagedKVCache], blocks: list[int]) -> dict[str, Tensor]:
    """What blocks (ids) of layers with a window hold, as tensors on the CPU: keys and values ``[n, H, 2 * bs * d]`` of
    each of the pool's ``caches``."""
    if not blocks:
        return {}
    index = sent(torch.tensor(blocks), caches[0].device)
    return {f"window.{number}": cache.content.index_select(0, index).cpu() for number, cache in enumerate(caches)}


def restore_windows(caches: Sequence[PagedKVCache], blocks: list[int], tensors: Mapping[str, Tensor]) -> None:
    """Writes ``window_tensors`` into blocks (ids).

    Raises:
        SavedFrontError: they do not fit; nothing has been written.
    """
    found = [tensors.get(f"window.{number}") for number in range(len(caches))] if blocks else []
    for cache, one in zip(caches, found, strict=False):
        fits = one is not None and one.shape == (len(blocks), *cache.content.shape[1:])
        if one is None or not fits or one.dtype != cache.content.dtype:
            raise SavedFrontError("its windows do not fit this cache")
    for cache, one in zip(caches, found, strict=False):
        cache.content.index_copy_(0, sent(torch.tensor(blocks), cache.device), one.to(cache.device))  # type: ignore[union-attr]


def write_front(path: Path, tensors: dict[str, Tensor], manifest: str, weights: str) -> None:
    """Writes a file whose contents can be checked. Raises OSError or SafetensorError."""
    metadata = {MANIFEST: manifest, "weights": weights, "sha256": _checksum(tensors, manifest + weights)}
    save_file(tensors, path, metadata)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def read_manifest(path: Path) -> dict[str, Any]:
    """A file's manifest, not checked. Raises SavedFrontError."""
    try:
        with safe_open(path, framework="pt") as file:
            manifest = json.loads((file.metadata() or {})[MANIFEST])
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise SavedFrontError(f"{path.name} is torn or none of ours ({error})") from None
    if not isinstance(manifest, dict):
        raise SavedFrontError(f"{path.name} has no manifest")
    return manifest


def read_front(path: Path, weights: str) -> dict[str, Tensor]:
    """A file's tensors. Raises SavedFrontError if it is torn, or of a model with other weights."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a mapping
        checksum = _checksum(tensors, metadata[MANIFEST] + metadata["weights"])
    except (OSError, SafetensorError, KeyError) as error:
        raise SavedFrontError(f"{path.name} is torn or none of ours ({error})") from None
    if checksum != metadata.get("sha256"):
        raise SavedFrontError(f"{path.name} is torn: its checksum differs")
    if metadata["weights"] != weights:
        raise SavedFrontError(f"{path.name} is of a model with other weights")
    return tensors


def restore_front(
    layers: Sequence[PagedKVCache],
    blocks: list[int],
    tensors: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int | None, ...]],
) -> tuple[HeadPages | None, dict[str, Tensor]]:
    """Writes a front's tensors into blocks (ids); returns its pages and the other tensors.

    shapes: of these, if they are there; None: any number.

    Raises:
        SavedFrontError: they do not fit; nothing has been written.
    """
    for number, cache in enumerate(layers):
        content, metadata = (tensors.get(f"{name}.{number}") for name in ("content", "metadata"))
        shape, planes = (len(blocks), *cache.content.shape[1:]), (4, len(blocks), *cache.log_votes.shape[1:])
        if content is None or metadata is None or (content.shape, metadata.shape) != (shape, planes):
            raise SavedFrontError(f"its layer {number} does not fit this cache")
        if content.dtype != cache.content.dtype:
            raise SavedFrontError(f"it is in {content.dtype}, this cache in {cache.content.dtype}")
    num_lanes = len(layers) * layers[0].num_kv_heads
    pages = None
    if "pages.ids" in tensors:
        ids, counts = tensors["pages.ids"], tensors.get("pages.fronts")
        heads = len(layers), layers[0].num_kv_heads
        is_ours = ids.shape[:2] == heads and counts is not None and counts.shape == heads
        pages = HeadPages(layers, ids, counts, tensors.get("pages.coded"))  # type: ignore[arg-type]
        if not is_ours or not 0 <= counts.min() <= counts.max() <= ids.shape[-1] * pages.page_size(0):  # type: ignore[union-attr]
            raise SavedFrontError("its heads' pages are not those of this model")
        if not 0 <= ids.min() <= ids.max() < len(blocks) * num_lanes:
            raise SavedFrontError("its heads' pages are not in its blocks")
    others = {name: tensor for name, tensor in tensors.items() if "." not in name}
    for name, tensor in others.items():
        wanted = shapes.get(name, ())
        if len(wanted) != tensor.ndim or any(b not in (None, a) for a, b in zip(tensor.shape, wanted, strict=True)):
            raise SavedFrontError(f"its {name} do not fit this model")
    index = sent(torch.tensor(blocks), layers[0].device)
    for number, cache in enumerate(layers):
        cache.content.index_copy_(0, index, tensors[f"content.{number}"].to(index.device))
        planes_of = tensors[f"metadata.{number}"].to(index.device)
        for plane, saved in zip(cache.metadata, planes_of, strict=True):
            plane.index_copy_(0, index, saved.view(plane.dtype))
    if pages is not None:
        places, lanes = tensors["pages.ids"] // num_lanes, tensors["pages.ids"] % num_lanes
        ids = torch.tensor(blocks)[places] * num_lanes + lanes
        pages = replace(pages, ids=ids)
    return pages, others


def _checksum(tensors: Mapping[str, Tensor], text: str) -> str:
    digest = hashlib.sha256(text.encode())
    for part in _parts(tensors):
        digest.update(part)
    return digest.hexdigest()


def _parts(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    for name in sorted(tensors):
        tensor = tensors[name]
        yield f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode()
        yield tensor.contiguous().flatten().view(torch.uint8).numpy().data
