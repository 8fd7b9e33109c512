"""Kept contexts in files: for this server after a restart, and for others that share the folder.

A context is a folder, made under another name and renamed when it is complete. Its name has the context's id and a
digest of what its front depends on, by which requests that bring the same context find it. In it are a record of the
context and the front's files, one of each tensor-parallel worker (``worker/saved_fronts.py``). Files carry a manifest
that says what they are good for.
"""

import asyncio
import hashlib
import json
import math
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.logger import init_logger

from vllm_kvmerge.engine.arguments import CONFIG_KEY, request_limits
from vllm_kvmerge.engine.contexts import WAIT, call_contexts
from vllm_kvmerge.engine.metrics import count_saved_context
from vllm_kvmerge.engine.served_model import EngineModel
from vllm_kvmerge.engine.support import QUANTISED, SUPPORTED_RANGE
from vllm_kvmerge.engine.worker.saved_fronts import SavedFrontError, file_of, read_manifest
from vllm_kvmerge.request.spec import EXTRA_ARGS_KEY, CompressionError, parse_compression

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.protocol import EngineClient
    from vllm.sampling_params import SamplingParams

logger = init_logger(__name__)

FORMAT = 3
"""Of the files; those of another are refused."""

NAME = re.compile(r"([A-Za-z0-9_-]{1,64})\.([0-9a-f]{32})")
"""Of a context's folder: its id, and the digest."""

RECORD = "context.json"
"""File with what is shown of a context, how long it took to make, and what else its server keeps of it."""

OF_FRONT = ("token_ids", "policy", "segments", "kept_bytes", "blocks", "window_blocks", "windows")
"""What the manifest has of ``ContextStore.call``'s description of a context, besides its salt; the rest is recorded."""

DAMAGE = (SavedFrontError, OSError, ValueError, KeyError, TypeError)
"""Exceptions from files that are torn, or not ours."""

UNFINISHED = ".unfinished-"
"""Beginning of the names of folders that are being written."""

ABANDONED = 3600.0
"""Seconds after which nobody writes to such a folder any more."""

WAIT_SECONDS = 0.1
"""Between two looks at whether another of the engine's API servers has loaded a front."""


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
        "head_budgets": options.get("head_budgets"),
        "head_pages": options.get("head_pages", True),
    }


class SavedContexts:
    """The contexts that a server keeps: those of its engine, and those of a folder that other servers may use too.

    A context in the folder is one of all servers, until it is deleted there. folder: None for none. max_bytes: of the
    folder; None for any number.
    """

    def __init__(self, engine_client: "EngineClient", folder: Path | None, max_bytes: int | None = None) -> None:
        self._client, self._folder, self._max_bytes = engine_client, folder, max_bytes
        self._identity = identity(engine_client.vllm_config)
        config = engine_client.vllm_config
        self._model = EngineModel(config.model_config, request_limits(config).is_calibrated)
        self._refused: set[str] = set()
        """Names of those that have been read in vain."""
        self._loading: dict[str, asyncio.Task[None]] = {}
        """By digest."""

    async def get(self, context_id: str, salt: str | None) -> dict[str, Any] | None:
        """A context with its tokens and content, as ``ContextStore.call`` describes it; None: there is none."""
        kept: dict[str, Any] | None = await self._call("get", id=context_id, salt=salt)
        if self._folder is None or (kept is not None and not kept["saved"]):
            return kept
        path = await asyncio.to_thread(self._find, context_id)
        if path is None:
            if kept is not None:  # another server has deleted it
                await self._call("delete", id=context_id, salt=salt)
            return None
        if kept is None:
            kept = await asyncio.to_thread(self._whole, path, salt)
        if kept is not None:
            _note_use(path)
        return kept

    async def listed(self, salt: str | None) -> list[dict[str, Any]]:
        """All contexts of this salt, without tokens."""
        kept: list[dict[str, Any]] = await self._call("list", salt=salt)
        if self._folder is None:
            return kept
        saved = {one["id"]: one for one in await asyncio.to_thread(self._records, salt)}
        there = [one for one in kept if not one["saved"] or saved.pop(one["id"], None) is not None]
        return there + sorted(saved.values(), key=itemgetter("created"))

    async def delete(self, context_id: str, salt: str | None) -> bool:
        """Deletes a context, and its files; False: there is none."""
        if await self.get(context_id, salt) is None:
            return False
        await self._call("delete", id=context_id, salt=salt)
        if self._folder is not None and (path := self._find(context_id)) is not None:
            _remove(path)
        return True

    async def save(self, context_id: str, salt: str | None, seconds: float) -> bool:
        """Writes a context of the engine to the folder, if there is one; False: it is not compressed, or has an adapter
        or images, which its tokens do not tell from others. seconds: that it took to make.

        Raises:
            OSError, RuntimeError: it cannot be written; nothing is left.
        """
        if (folder := self._folder) is None:
            return False
        front = await self._call("front", id=context_id, salt=salt)
        if front is None:
            raise RuntimeError(f"there is no context {context_id}")
        if front["key"] is None:
            logger.warning("The context %s is not saved: it is not compressed, or is more than tokens", context_id)
            return False
        digest = self._digest(front["token_ids"], front["policy"], salt)
        record = {name: value for name, value in front.items() if name not in (*OF_FRONT, "key")}
        record |= {"saved": True, "salt": salt, "identity": self._identity}
        unfinished = folder / f"{UNFINISHED}{context_id}"
        try:
            unfinished.mkdir(parents=True)
            other = await asyncio.to_thread(self._link, digest, unfinished)
            if other is None:
                manifest = json.dumps({name: front[name] for name in OF_FRONT} | {"salt": salt})
                order = json.dumps({"folder": str(unfinished), "manifest": manifest, **_place(front)})
                _raise_first(await self._client.collective_rpc("save_front", args=(order,)))
            record["seconds"] = max(seconds, other or 0.0)
            (unfinished / RECORD).write_text(json.dumps(record))
            if (size := _num_bytes(unfinished)) > (self._max_bytes or size):
                raise RuntimeError(f"it takes {size} bytes; allowed: up to {self._max_bytes}")
            os.replace(unfinished, folder / f"{context_id}.{digest}")
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        await self._call("saved", id=context_id, salt=salt, digest=digest)
        count_saved_context("saved")
        await asyncio.to_thread(self._tidy)
        return True

    async def load_front(self, prompt: Any, params: "SamplingParams") -> None:
        """Has workers read the front of a request's context, if it is in the folder and not in the engine. prompt: as
        vLLM's servers pass it on; of tokens alone, for the model without adapters."""
        field = (params.extra_args or {}).get(EXTRA_ARGS_KEY)
        spec = None if field is None else parse_compression(field)
        is_tokens = isinstance(prompt, dict) and prompt.get("type") == "token"
        if self._folder is None or spec is None or spec.context_tokens is None or not is_tokens:
            return
        tokens = prompt["prompt_token_ids"][: spec.context_tokens]
        try:
            policy = spec.for_model(self._model).front_policy
        except CompressionError:
            return  # whoever checks the request says so
        digest = self._digest(tokens, policy, prompt.get("cache_salt"))
        path = await asyncio.to_thread(self._find, digest=digest)
        if path is None:
            return
        _note_use(path)
        if digest not in self._loading:
            if await self._call("has", digest=digest):
                return
            task = self._loading[digest] = asyncio.create_task(self._load(path, digest))
            task.add_done_callback(lambda _: self._loading.pop(digest, None))
        await asyncio.shield(self._loading[digest])  # a client that leaves must not leave blocks that nobody holds

    async def _load(self, path: Path, digest: str) -> None:
        try:
            front = await asyncio.to_thread(self._front, path)
            while (place := await self._call("restore", digest=digest, front=front)) == WAIT:
                await asyncio.sleep(WAIT_SECONDS)
            if place is None:
                return  # it is there
            order, errors = json.dumps({"folder": str(path), **_place(place)}), ["it has not been read"]
            try:
                errors = await self._client.collective_rpc("load_front", args=(order,))
            finally:
                await self._call("restored", digest=digest, failed=any(errors))
            _raise_first(errors)
        except DAMAGE as error:
            self._refuse(path, error)
        except RuntimeError as error:  # the engine's: it has no room, say
            logger.warning("The saved context %s is not loaded: %s", path.name, error)
        else:
            count_saved_context("loaded")
            logger.info("The saved context %s is loaded, %d tokens", path.name, len(front["token_ids"]))

    def _refuse(self, path: Path, error: Exception) -> None:
        self._refused.add(path.name)
        if path.is_dir():  # otherwise it has been deleted meanwhile
            count_saved_context("refused")
            logger.error("The saved context %s is not used: %s", path.name, error)

    async def _call(self, call: str, **arguments: Any) -> Any:
        return await call_contexts(self._client, call, **arguments)

    def _digest(self, tokens: list[int], policy: str, salt: str | None) -> str:
        """Of all that a front depends on, but the model's weights."""
        text = json.dumps([self._identity, policy, salt])
        return hashlib.sha256(text.encode() + np.asarray(tokens, dtype=np.int64).tobytes()).hexdigest()[:32]

    def _saved(self) -> Iterator[tuple[Path, str, str]]:
        """Contexts in the folder: each one's path, id and digest."""
        with suppress(OSError):
            for path in self._folder.iterdir() if self._folder is not None else ():
                if (name := NAME.fullmatch(path.name)) is not None:
                    yield path, name[1], name[2]

    def _find(self, context_id: str | None = None, digest: str | None = None) -> Path | None:
        """A context of this id, or one with a front of this digest that has not been refused."""
        for path, of_id, of_front in self._saved():
            if of_id == context_id or (of_front == digest and path.name not in self._refused):
                return path
        return None

    def _record(self, path: Path, salt: str | None) -> dict[str, Any] | None:
        """What is recorded of a context; None: it has another salt, or its time is up. Raises what ``DAMAGE`` has."""
        record: dict[str, Any] = json.loads((path / RECORD).read_text())
        if record["salt"] != salt or _has_expired(record):
            return None
        for name, value in self._identity.items():
            theirs = record["identity"].get(name)
            if theirs != value:
                raise SavedFrontError(f"it was saved with {name} {theirs!r}, and this server has {value!r}")
        return record

    def _whole(self, path: Path, salt: str | None) -> dict[str, Any] | None:
        """A context with its tokens; None: as ``_record``, or it is refused."""
        try:
            record = self._record(path, salt)
            return record and {**record, "token_ids": self._front(path)["token_ids"]}
        except DAMAGE as error:
            self._refuse(path, error)
            return None

    def _records(self, salt: str | None) -> list[dict[str, Any]]:
        """Of all contexts of this salt and this server's model; those that cannot be read are left out."""
        records = []
        for path, *_ in self._saved():
            with suppress(*DAMAGE):
                if (record := self._record(path, salt)) is not None:
                    records.append(record)
        return records

    def _front(self, path: Path) -> dict[str, Any]:
        """What manifests say of a front. Raises what ``DAMAGE`` has."""
        files = sorted(path.glob("rank-*.safetensors"))
        if not files:
            raise SavedFrontError("it has no files")
        manifest = read_manifest(files[0])
        num_ranks = self._identity["tensor_parallel_size"]
        for rank in range(num_ranks):
            if read_manifest(file_of(path, rank, num_ranks)) != manifest:
                raise SavedFrontError(f"the file of worker {rank} is of another context")
        if not path.name.endswith(self._digest(manifest["token_ids"], manifest["policy"], manifest["salt"])):
            raise SavedFrontError("its files are of another context")
        return manifest

    def _link(self, digest: str, target: Path) -> float | None:
        """Gives a folder the files of a front that has been saved already: the seconds that it took to make; None:
        there is none, or the file system does not share files."""
        source, num_ranks = self._find(digest=digest), self._identity["tensor_parallel_size"]
        if source is None:
            return None
        try:
            for rank in range(num_ranks):
                os.link(file_of(source, rank, num_ranks), file_of(target, rank, num_ranks))
            return float(json.loads((source / RECORD).read_text())["seconds"])
        except DAMAGE:
            for path in target.iterdir():
                path.unlink()
            return None

    def _tidy(self) -> None:
        """Deletes contexts whose time is up, what was never finished, and, while the rest takes more than it may, the
        context of least worth: one that took twice as long to make, per byte, stays unused for twice as long."""
        now, worths = time.time(), []
        for path in self._folder.glob(f"{UNFINISHED}*") if self._folder is not None else ():
            with suppress(OSError):
                if path.stat().st_mtime < now - ABANDONED:
                    shutil.rmtree(path, ignore_errors=True)
        for path, *_ in self._saved():
            with suppress(OSError):
                seconds, num_bytes = 0.0, max(1, _num_bytes(path))
                unused = max(1.0, now - path.stat().st_mtime)
                with suppress(*DAMAGE):
                    record = json.loads((path / RECORD).read_text())
                    seconds = float(record["seconds"])
                    if _has_expired(record):
                        _remove(path)
                        continue
                worths.append((seconds / num_bytes / unused, num_bytes, path))
        excess = sum(num_bytes for _, num_bytes, _ in worths) - (self._max_bytes or math.inf)
        for _, num_bytes, path in sorted(worths):
            if excess <= 0:
                return
            _remove(path)
            count_saved_context("evicted")
            logger.info("The saved context %s is deleted to make room", path.name)
            excess -= num_bytes


def _place(front: dict[str, Any]) -> dict[str, Any]:
    return {name: front[name] for name in ("key", "blocks", "window_blocks")}


def _raise_first(errors: list[str | None]) -> None:
    for rank, error in enumerate(errors):
        if error is not None:
            raise SavedFrontError(f"worker {rank}: {error}")


def _has_expired(record: dict[str, Any]) -> bool:
    return record["expires_at"] is not None and record["expires_at"] <= time.time()


def _num_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def _note_use(path: Path) -> None:
    """Marks a context as used just now, for all servers."""
    with suppress(OSError):
        os.utime(path)


def _remove(path: Path) -> None:
    """Deletes a context's folder, at once for those who look for it."""
    gone = path.with_name(UNFINISHED + path.name)
    with suppress(OSError):
        os.replace(path, gone)
        shutil.rmtree(gone, ignore_errors=True)
