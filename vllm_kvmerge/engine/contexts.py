"""Compressed contexts that are kept under an id: pinned in the prefix cache until they are deleted or their time is up.

The scheduler owns them, so that all API servers of an engine see the same ones. A request that brings ``CONTEXT_KEY``
leaves its context as one; servers ask for everything else by ``ContextStore.call``. Fronts that have been saved come
back through it too: they are in the prefix cache like those that requests leave there.
"""

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import BlockHash, get_request_block_hasher
from vllm.v1.request import Request, RequestStatus

from vllm_kvmerge.engine.blocks import MergeableAttentionManager
from vllm_kvmerge.engine.fronts import HeldWindow, SharedFront
from vllm_kvmerge.engine.messages import Adopt
from vllm_kvmerge.engine.schedule import UNCOMPRESSED, RequestCompression, Segments
from vllm_kvmerge.request.spec import text_of

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient

CONTEXT_KEY = "kvmerge_context"
"""Key in ``SamplingParams.extra_args`` of a request that creates a context: JSON text of ``AskedContext``."""

WAIT = "wait"
"""``ContextStore.call``'s answer to a server whose front another one has workers read just now."""

MAX_REFUSALS = 1000
"""Refusals that are remembered until somebody asks for them."""


class AskedContext(BaseModel):
    """A context that is to be kept. ttl: seconds until it is deleted; None: never. info, content: what its server wants
    to know of it later, as JSON; content is long, and said only where the tokens are."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    """It is also the name of the folder that the context is saved in."""
    ttl: Annotated[float, Field(gt=0.0, le=1e9)] | None = None
    info: dict[str, Any] = {}
    content: dict[str, Any] = {}


@dataclass(frozen=True)
class KeptContext:
    """A context that is kept. front: None if it is not compressed, and only known here. tokens: its ids. salt: those of
    other salts do not see it. policy: that its front was made under, as canonical JSON text. created, expires: seconds
    since the epoch. is_saved: its server has it in files."""

    asked: AskedContext
    front: SharedFront | None
    tokens: list[int]
    salt: str | None
    policy: str
    created: float
    expires: float | None
    is_saved: bool = False

    @classmethod
    def new(
        cls, asked: AskedContext, front: SharedFront | None, tokens: list[int], salt: str | None, policy: str
    ) -> "KeptContext":
        """One that begins now."""
        now = time.time()
        return cls(asked, front, tokens, salt, policy, now, None if asked.ttl is None else now + asked.ttl)

    @property
    def num_blocks(self) -> int:
        """Of the pool, that it holds."""
        return 0 if self.front is None else len(self.front.all_blocks)

    def description(self, bytes_per_block: int) -> dict[str, Any]:
        """As JSON, without tokens."""
        return {
            "id": self.asked.id,
            "created": int(self.created),
            "expires_at": None if self.expires is None else int(self.expires),
            "tokens": len(self.tokens),
            "entries": len(self.tokens) if self.front is None else self.front.segments.front,
            "bytes": self.num_blocks * bytes_per_block,
            "kv_compression": json.loads(self.policy),
            "info": self.asked.info,
            "saved": self.is_saved,
        }


class ContextRefused(Exception):
    """A context cannot be kept. status: of HTTP."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ContextStore:
    """Contexts kept in one engine.

    bytes_per_block: over all workers. max_blocks: of the pool that contexts may hold. hash_function: of the prefix
    cache.
    """

    def __init__(
        self,
        manager: MergeableAttentionManager,
        bytes_per_block: int,
        max_blocks: int,
        hash_function: Callable[[object], bytes],
    ) -> None:
        self._manager, self._bytes_per_block, self._max_blocks = manager, bytes_per_block, max_blocks
        self._hasher = get_request_block_hasher(manager.block_pool.hash_block_size, hash_function)
        self._kept: dict[str, KeptContext] = {}
        """In the order of their last use."""
        self._held: dict[BlockHash, tuple[SharedFront, float]] = {}
        """Fronts without an id that hints have kept here, and when they are let go, in seconds since the epoch."""
        self._asked: dict[str, tuple[AskedContext, int]] = {}
        """By request: what it asks for, and blocks that it will take."""
        self._refusals: dict[str, ContextRefused] = {}
        self._restored: dict[str, SharedFront] = {}
        """Fronts whose blocks workers read from files just now, by what their server calls them."""
        self._cleared: set[str] = set()
        """Those among them that nobody wants any more."""
        self._saved: dict[str, BlockHash] = {}
        """Keys of fronts that are in files, by what their servers call them."""

    def __len__(self) -> int:
        return len(self._kept)

    def is_asked(self, request_id: str) -> bool:
        """Whether the request creates a context."""
        return request_id in self._asked

    @property
    def num_blocks(self) -> int:
        held = sum(len(front.all_blocks) for front, _ in self._held.values())
        return held + sum(one.num_blocks for one in self._kept.values())

    def ask(self, request: Request, text: str, compression: RequestCompression | None) -> None:
        """Begins a context: its request has arrived. text: the value of ``CONTEXT_KEY``.

        Raises:
            ContextRefused: it cannot be kept, as far as is known before it has been computed.
        """
        try:
            asked = AskedContext.model_validate_json(text)
        except ValidationError as error:
            raise ContextRefused(400, f"{CONTEXT_KEY}: {error.errors()[0]['msg']}") from None
        try:
            self._asked[request.request_id] = asked, self._check(asked, compression, request.cache_salt)
        except ContextRefused as refusal:
            self._refuse(asked, refusal)
            raise

    def _check(self, asked: AskedContext, compression: RequestCompression | None, salt: str | None) -> int:
        if self._manager.fronts is None:
            raise ContextRefused(400, "this server keeps no compressed contexts")
        if compression is None or not compression.shares_context:
            raise ContextRefused(400, "nothing would be compressed that could be kept; allowed: a smaller budget")
        needed = compression.new_front(UNCOMPRESSED, compression.context).num_blocks
        if needed > compression.context // self._manager.block_size:
            raise ContextRefused(400, "its front would save no block; allowed: a smaller budget, or a longer context")
        needed += self._manager.num_window_blocks(compression.context)
        self._check_room(asked.id, needed, salt)
        return needed

    def _check_room(self, context_id: str, needed: int, salt: str | None) -> None:
        self.expire()
        for one in [one for one in self._kept.values() if one.is_saved]:
            if self._taken_blocks() + needed <= self._max_blocks:
                break
            self._delete(one)  # those who ask for it find it in files
        named = [one.asked.id for one in self._kept.values() if one.salt == salt][:20]
        held, size = self._taken_blocks(), self._bytes_per_block
        advice = f"; delete some: {', '.join(named)}" if named else ""
        asked = [one.id for one, _ in self._asked.values()]
        if context_id in (*self._kept, *asked):
            raise ContextRefused(409, f"there is a context {context_id}")
        if held + needed > self._max_blocks:
            raise ContextRefused(
                409,
                f"the context takes {needed * size} bytes, and {len(self._kept)} contexts hold {held * size} of the "
                f"{self._max_blocks * size} that contexts may{advice}",
            )

    def _taken_blocks(self) -> int:
        """Blocks that count against ``max_blocks``."""
        waiting = [num_blocks for _, num_blocks in self._asked.values()]
        # Any client may keep contexts. Those that hold no blocks count like those that do.
        waiting += [self._blocks_of(one.tokens) for one in self._kept.values() if one.front is None]
        return self.num_blocks + sum(waiting)

    def hold(self, front: SharedFront | None, seconds: float) -> None:
        """Pins a front that is in the cache, without an id, for that time if there is room."""
        if front is None or not seconds:
            return
        self.expire()
        self._let_go(front.key)
        if self._taken_blocks() + len(front.all_blocks) <= self._max_blocks:
            assert self._manager.fronts is not None
            self._manager.fronts.pin(front)
            self._held[front.key] = front, time.time() + seconds

    def resume(self, adoptions: Iterable[Adopt]) -> None:
        """Lets turns go that requests go on from."""
        for adopt in adoptions if self._held else ():
            key = BlockHash(adopt.key)
            if key in self._held and self._held[key][0].turn is not None:
                self._let_go(key)

    def _let_go(self, key: BlockHash) -> None:
        if (held := self._held.pop(key, None)) is not None:
            assert self._manager.fronts is not None
            self._manager.fronts.unpin(held[0])

    def end(self, request: Request, front: SharedFront | None, compression: RequestCompression | None) -> None:
        """Keeps the context of a request that ends, if it asked for that. front: of its context, if it is there."""
        asked, _ = self._asked.pop(request.request_id, (None, 0))
        ends_well = request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
        if asked is None or not ends_well:
            return  # if it has failed, its client is told why
        if front is None or compression is None or request.prompt_token_ids is None:
            self._refuse(asked, ContextRefused(409, "there was no room to keep the context"))
            return
        tokens = request.prompt_token_ids[: compression.context]
        self.keep(KeptContext.new(asked, front, tokens, request.cache_salt, compression.config.front_policy))

    def keep(self, kept: KeptContext) -> None:
        """Pins a context's front."""
        if kept.front is not None:
            assert self._manager.fronts is not None
            self._manager.fronts.pin(kept.front)
        self._kept[kept.asked.id] = kept

    def _keep_uncompressed(self, context: dict[str, Any], tokens: list[int], salt: str | None) -> dict[str, Any]:
        """Keeps a context of which no front is good enough."""
        asked = AskedContext.model_validate(context)
        try:
            self._check_room(asked.id, self._blocks_of(tokens), salt)
        except ContextRefused as refusal:
            return {"refused": [refusal.status, str(refusal)]}
        kept = KeptContext.new(asked, None, tokens, salt, text_of(None))
        self.keep(kept)
        return kept.description(self._bytes_per_block)

    def _blocks_of(self, tokens: list[int]) -> int:
        return -(-len(tokens) // self._manager.block_size)

    def expire(self) -> None:
        """Deletes contexts whose time is up."""
        if self._kept or self._held:
            now = time.time()
            for key in [key for key, (_, expires) in self._held.items() if expires <= now]:
                self._let_go(key)
            for one in [one for one in self._kept.values() if one.expires is not None and one.expires <= now]:
                self._delete(one)

    def clear(self) -> None:
        """Deletes all contexts, and fronts that workers read just now once they have."""
        for key in list(self._held):
            self._let_go(key)
        for one in list(self._kept.values()):
            self._delete(one)
        self._cleared.update(self._restored)

    def _delete(self, kept: KeptContext) -> None:
        del self._kept[kept.asked.id]
        if kept.front is not None:
            assert self._manager.fronts is not None
            self._manager.fronts.unpin(kept.front)

    def _refuse(self, asked: AskedContext, refusal: ContextRefused) -> None:
        while len(self._refusals) >= MAX_REFUSALS:
            del self._refusals[next(iter(self._refusals))]
        self._refusals[asked.id] = refusal

    def call(self, text: str) -> str:
        """Carries out what a server asks for, as JSON text: ``{"call": name, "id": ..., "salt": ...}``.

        created: the context, once its request has ended, or ``{"refused": [status, message]}``. get: the context with
        its tokens and content; null if there is none of this id and salt. list: all of this salt. delete: the context,
        which is gone. uncompressed: keeps a ``context`` (``AskedContext``) of these ``tokens`` without a front; answers
        as created. front: all of it, with the place of its front, to be saved; without a key if there is none, or its
        tokens do not say all of it. saved: its front is in files, under a ``digest``. has: whether the front of a
        ``digest`` is there. restore: takes blocks for a ``front`` that has been saved, and says which; null if it is
        there, ``WAIT`` while it is about to be. restored: workers have read it, or have ``failed``.
        """
        self.expire()
        asked = json.loads(text)
        call, salt, kept = asked["call"], asked.get("salt"), self._kept.get(asked.get("id"))
        if call == "has":
            is_read = asked["digest"] in self._restored  # it may come to nothing
            return json.dumps(not is_read and self._is_there(self._saved.get(asked["digest"])))
        if call == "restore":
            return json.dumps(self._restore(asked["digest"], asked["front"]))
        if call == "uncompressed":
            return json.dumps(self._keep_uncompressed(asked["context"], asked["tokens"], salt))
        if call == "restored":
            self._end_restore(asked["digest"], asked["failed"])
            return json.dumps(None)
        if kept is not None and kept.salt != salt:
            kept = None
        if call == "list":
            found = [one.description(self._bytes_per_block) for one in self._kept.values() if one.salt == salt]
            return json.dumps(found)
        if call == "created" and (refusal := self._refusals.pop(asked["id"], None)) is not None:
            return json.dumps({"refused": [refusal.status, str(refusal)]})
        if kept is None:
            return json.dumps(None)
        if call == "saved" and (front := kept.front):
            self._note_saved(asked["digest"], front.key)
            self._kept[kept.asked.id] = kept = replace(kept, is_saved=True)
        described = kept.description(self._bytes_per_block)
        if call == "delete":
            self._delete(kept)
        if call == "get":
            self._kept[kept.asked.id] = self._kept.pop(kept.asked.id)
        if call in ("get", "front"):
            described |= {"token_ids": kept.tokens, "content": kept.asked.content}
        if call == "front" and kept.front is None:
            described |= {"key": None}
        elif call == "front" and (front := kept.front):
            key = self._key(kept.asked.id, kept.tokens, kept.salt, kept.policy)
            described |= {"key": front.key.hex() if key == front.key else None}
            described |= _places(front)
            described |= {"windows": [[one.group, one.first_row, len(one.blocks)] for one in front.windows]}
            described |= {"policy": kept.policy, "segments": asdict(front.segments), "kept_bytes": front.kept_bytes}
        return json.dumps(described)

    def _key(self, context_id: str, tokens: list[int], salt: str | None, policy: str) -> BlockHash | None:
        """The key of a context's front if it is one of tokens alone, without an adapter or images."""
        assert self._manager.fronts is not None
        request = Request(
            request_id=context_id,
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            cache_salt=salt,
            block_hasher=self._hasher,
        )
        return self._manager.fronts.key(request, len(tokens), policy)

    def _is_there(self, key: BlockHash | None) -> bool:
        """Whether a front is in the prefix cache, or is being made."""
        return key is not None and self._manager.fronts is not None and self._manager.fronts.is_known(key)

    def _note_saved(self, digest: str, key: BlockHash) -> None:
        self._saved = {one: key for one, key in self._saved.items() if self._is_there(key)} | {digest: key}

    def _restore(self, digest: str, saved: dict[str, Any]) -> dict[str, Any] | str | None:
        """Takes blocks for a saved front; None if it is there already. Raises ContextRefused."""
        fronts, num_blocks = self._manager.fronts, len(saved["blocks"])
        if digest in self._restored:
            return WAIT
        if fronts is None:
            raise ContextRefused(400, "this server keeps no compressed contexts")
        segments = Segments(**saved["segments"])
        key = self._key(digest, saved["token_ids"], saved["salt"], saved["policy"])
        if key is None:
            raise ContextRefused(400, "the prefix cache does not know its tokens")
        self._note_saved(digest, key)
        if fronts.is_known(key):
            return None
        blocks = self._manager.copy_of(num_blocks + len(saved["window_blocks"]))
        if blocks is None:
            raise ContextRefused(409, "there is no room for it")
        fronts.expect(key)
        others, windows = iter(blocks[num_blocks:]), list[HeldWindow]()
        for group, first_row, number in saved["windows"]:
            windows.append(HeldWindow(group, first_row, tuple(islice(others, number))))
        front = self._restored[digest] = SharedFront(
            key=key,
            segments=segments,
            num_tokens=segments.tail,
            rows=tuple(range(num_blocks)),
            blocks=tuple(blocks[:num_blocks]),
            kept_bytes=saved["kept_bytes"],
            windows=tuple(windows),
        )
        return {"key": key.hex(), **_places(front)}

    def _end_restore(self, digest: str, failed: bool) -> None:
        front = self._restored.pop(digest)
        if not failed and digest not in self._cleared:
            self._manager.share(front)
            return
        self._cleared.discard(digest)
        self._manager.discard(front.all_blocks)
        if self._manager.fronts is not None:
            self._manager.fronts.forget(front.key)


def _places(front: SharedFront) -> dict[str, list[int]]:
    """Ids of a front's blocks."""
    window_blocks = [block.block_id for one in front.windows for block in one.blocks]
    return {"blocks": [block.block_id for block in front.blocks], "window_blocks": window_blocks}


async def call_contexts(engine_client: "EngineClient", call: str, **arguments: Any) -> Any:
    """``ContextStore.call`` of the client's engine: its answer. Raises RuntimeError if the engine refuses."""
    try:
        text = json.dumps({"call": call, **arguments})
        return json.loads(await engine_client.engine_core.call_utility_async("kvmerge_contexts", text))  # type: ignore[attr-defined]
    except Exception as error:
        raise RuntimeError(str(error)) from error
