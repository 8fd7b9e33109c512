"""Kept contexts in files, so that a server has them again after it has been restarted.

A context is a folder with a file of each tensor-parallel worker (``worker/saved_fronts.py``), made under another name
and renamed when all of them are there. Files carry a manifest that says what they are good for.
"""

import asyncio
import hashlib
import json
import os
import shutil
import time
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from vllm_kvmerge.engine.arguments import CONFIG_KEY
from vllm_kvmerge.engine.contexts import WAIT, call_contexts
from vllm_kvmerge.engine.support import QUANTISED, SUPPORTED_RANGE
from vllm_kvmerge.engine.worker.saved_fronts import SavedFrontError, file_of, read_manifest

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.protocol import EngineClient

logger = init_logger(__name__)

FORMAT = 2
"""Of the files; those of another are refused."""

UNFINISHED = ".unfinished-"
"""Beginning of the names of folders that are being written."""

ABANDONED = 3600.0
"""Seconds after which nobody writes to such a folder any more."""

WAIT_SECONDS = 0.1
"""Between two looks at whether another server has loaded a context."""


def identity(config: "VllmConfig") -> dict[str, Any]:
    """What a server must have in common with the one that wrote a file, by the name that a refusal gives."""
    model = config.model_config
    options = (config.additional_config or {}).get(CONFIG_KEY) or {}  # not checked again: the folder may be gone
    settings = json.dumps(model.hf_config.to_dict(), sort_keys=True, default=str)
    return {
        "format": FORMAT,
        "version": metadata.version("vllm-kvmerge"),
        "vllm": SUPPORTED_RANGE,
        "model": Path(model.model).name,
        "revision": model.revision,
        "configuration": hashlib.sha256(settings.encode()).hexdigest(),
        "dtype": str(model.dtype),
        "kv_cache_dtype": config.cache_config.cache_dtype if config.cache_config.cache_dtype in QUANTISED else None,
        "quantization": model.quantization,
        "block_size": config.cache_config.block_size,
        "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
        "device": config.device_config.device_type,
        "kvzap": options.get("kvzap"),
        "head_pages": options.get("head_pages", True),
    }


async def save(engine_client: "EngineClient", folder: Path, context_id: str, salt: str | None) -> None:
    """Writes a kept context to a folder of its own below ``folder``; not one that is not compressed, or that has an
    adapter or images, which its tokens do not tell from others.

    Raises:
        OSError, RuntimeError: it cannot be written; nothing is left.
    """
    front = await call_contexts(engine_client, "front", id=context_id, salt=salt)
    if front is None:
        raise RuntimeError(f"there is no context {context_id}")
    if front["key"] is None:
        logger.warning("The context %s is not saved: it is not compressed, or consists of more than tokens", context_id)
        return
    unfinished = folder / f"{UNFINISHED}{context_id}"
    manifest = {"identity": identity(engine_client.vllm_config), "context": {**front, "salt": salt}}
    try:
        unfinished.mkdir(parents=True)
        order = json.dumps({"folder": str(unfinished), "manifest": json.dumps(manifest), **_place(front)})
        _raise_first(await engine_client.collective_rpc("save_front", args=(order,)))
        os.replace(unfinished, folder / context_id)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


async def load_all(engine_client: "EngineClient", folder: Path) -> None:
    """Keeps the contexts that ``folder`` holds; logs which of them are refused, and why."""
    remove_expired(folder)
    for unfinished in folder.glob(f"{UNFINISHED}*"):
        if unfinished.stat().st_mtime < time.time() - ABANDONED:
            shutil.rmtree(unfinished, ignore_errors=True)
    for one in sorted(folder.iterdir()) if folder.is_dir() else ():
        if one.is_dir() and not one.name.startswith("."):
            try:
                await _load(engine_client, one)
            except (SavedFrontError, OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
                logger.error("The saved context %s is not used: %s", one.name, error)


async def _load(engine_client: "EngineClient", folder: Path) -> None:
    ours = identity(engine_client.vllm_config)
    found = sorted(folder.glob("rank-*.safetensors"))
    if not found:
        raise SavedFrontError("it has no files")
    manifest = read_manifest(found[0])
    for name, value in ours.items():
        theirs = manifest["identity"].get(name)
        if theirs != value:
            raise SavedFrontError(f"it was saved with {name} {theirs!r}, and this server has {value!r}")
    num_ranks = ours["tensor_parallel_size"]
    for rank in range(num_ranks):
        if read_manifest(file_of(folder, rank, num_ranks)) != manifest:
            raise SavedFrontError(f"the file of worker {rank} is of another context")
    context = manifest["context"]
    if context["id"] != folder.name:
        raise SavedFrontError(f"it is of the context {context['id']}")
    while (place := await call_contexts(engine_client, "restore", id=context["id"], context=context)) == WAIT:
        # Another server of this engine has it read. Until then this one is not ready either.
        await asyncio.sleep(WAIT_SECONDS)
    if place is None:
        return  # it is there
    order, failed = json.dumps({"folder": str(folder), **_place(place)}), True
    try:
        errors = await engine_client.collective_rpc("load_front", args=(order,))
        failed = any(errors)
    finally:
        await call_contexts(engine_client, "restored", id=context["id"], failed=failed)
    _raise_first(errors)
    logger.info("The saved context %s is kept again, %d tokens", folder.name, context["tokens"])


def _place(front: dict[str, Any]) -> dict[str, Any]:
    return {name: front[name] for name in ("key", "blocks", "window_blocks")}


def _raise_first(errors: list[str | None]) -> None:
    for rank, error in enumerate(errors):
        if error is not None:
            raise RuntimeError(f"worker {rank}: {error}")


def remove(folder: Path, context_id: str) -> None:
    """Deletes a context's files, if there are any."""
    shutil.rmtree(folder / context_id, ignore_errors=True)


def remove_expired(folder: Path) -> None:
    """Deletes the files of contexts whose time is up."""
    for path in folder.glob("*/rank-0-*.safetensors"):
        try:
            expires = read_manifest(path)["context"]["expires_at"]
        except (SavedFrontError, OSError, ValueError, KeyError, TypeError):
            continue  # whoever loads it says what is wrong with it
        if expires is not None and expires <= time.time():
            remove(folder, path.parent.name)


def is_saved(folder: Path | None, context_id: str) -> bool:
    return folder is not None and (folder / context_id).is_dir()
