"""The scheduler's state of a compressed request, from its arrival until it is freed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
from vllm.v1.request import Request

from vllm_kvmerge.engine.fronts import SharedFront
from vllm_kvmerge.engine.hints import Hints
from vllm_kvmerge.engine.internal_requests import RepeatingRequest
from vllm_kvmerge.engine.messages import FrontReport, Kind, Score
from vllm_kvmerge.engine.schedule import UNCOMPRESSED, FrontSize, RequestCompression, Segments
from vllm_kvmerge.engine.spreading import SpreadCompression
from vllm_kvmerge.request.limits import Limits


@dataclass(frozen=True)
class Offer:
    """A front that a request may begin with. copied: its blocks that the request writes to, and gets copies of. passed:
    those of layers with a window that the request does not get, but which may be read in its first step."""

    front: SharedFront
    copied: tuple[KVCacheBlock, ...]
    passed: tuple[KVCacheBlock, ...] = ()


@dataclass(eq=False)
class RequestState:
    """What is known of one compressed request.

    request: vLLM's. schedule: when it is compressed, and to what size. most_tokens: that it has slots for at once.
    hints: on what it leaves in the prefix cache.

    Its cache: front is its compressed segments; None: it is not compressed. offer: a front that it may begin with.
    num_hit_blocks: blocks that it found in the prefix cache when it was admitted. given_up: blocks that the compression
    under way reads, and gives back after its last part. keys: of its context's front, by the number of tokens, those
    of the context's parts included, longest first.

    What is under way: due_since: the turn since when a compression is due. work: the compression that is spread over
    steps. repetition: the internal request that repeats its context; is_repeated: the last one has been scheduled, or
    scores have been recalled.

    What is owed: reported: what compressions came to, by the number of tokens computed then. unreported: blocks that a
    compression freed whose workers have not reported yet; negative: that it took. kept_bytes, external_bytes: reserved
    in workers outside the pool; None: not yet.
    """

    request: Request
    schedule: RequestCompression
    most_tokens: int
    hints: Hints = field(default_factory=Hints)
    front: Segments | None = None
    offer: Offer | None = None
    num_hit_blocks: int = 0
    given_up: list[KVCacheBlock] = field(default_factory=list)
    keys: Mapping[int, BlockHash] = field(default_factory=dict)
    due_since: int | None = None
    work: SpreadCompression | None = None
    repetition: RepeatingRequest | None = None
    is_repeated: bool = False
    reported: dict[int, FrontReport] = field(default_factory=dict)
    unreported: int = 0
    kept_bytes: int | None = None
    external_bytes: int | None = None
    _due: tuple[Segments | None, int | None] = None, None
    """``due_at``, and the segments that it is of."""

    @property
    def policy(self) -> str:
        return self.schedule.config.name

    @property
    def segments(self) -> Segments:
        """Its cache's; of one that waits to begin with a front, those that it will have then."""
        if self.front is not None:
            return self.front
        return UNCOMPRESSED if self.offer is None else self.offer.front.segments

    # Its next compression.

    @property
    def due_at(self) -> int | None:
        """Number of computed tokens at which it is compressed next; None: never, as far as counts tell."""
        segments = self.segments
        if self._due[0] is not segments:  # asked several times in each step
            self._due = segments, self.schedule.next_compression(segments)
        return self._due[1]

    @property
    def is_due(self) -> bool:
        due_at = self.due_at
        return due_at is not None and self.request.num_computed_tokens >= due_at

    @property
    def is_scored(self) -> bool:
        """False if its context has to be repeated before it is compressed."""
        return self.is_repeated or not self.schedule.repeats_context

    @property
    def awaits_pressure(self) -> bool:
        return self.schedule.config.awaits_pressure

    @property
    def awaits_repetition(self) -> bool:
        return self.schedule.repeats_context and self.due_at is not None

    @property
    def is_refresh(self) -> bool:
        return self.schedule.is_refresh(self.segments, self.request.num_computed_tokens)

    @property
    def num_entries(self) -> int:
        """Entries per KV head that a compression would read now."""
        return self.schedule.num_entries(self.segments, self.request.num_computed_tokens)

    @property
    def kind(self) -> Kind:
        return self.schedule.config.text, self.num_entries.bit_length()

    @property
    def ends_now(self) -> bool:
        """True if it ends with the token of this step, so that its context's front would not come to be."""
        request = self.request
        return request.num_computed_tokens + 1 >= request.num_prompt_tokens + request.max_tokens

    def new_front(self) -> FrontSize:
        """Of a compression now. Raises PartError."""
        num_computed = self.request.num_computed_tokens
        return self.schedule.new_front(self.segments, num_computed, self.reported.get(num_computed))

    def window(self) -> Score | None:
        """Queries that its first compression needs; None: none, or it has been compressed."""
        if self.front is not None:
            return None
        schedule = self.schedule
        if self.awaits_pressure:
            start = 0 if schedule.query_window else None
        else:
            start = None if self.due_at is None else schedule.window_start(self.due_at)
        return None if start is None else Score(start, schedule.config.text, schedule.query_window, self.due_at)

    def draft_end(self) -> int:
        """Number of tokens that a step may come to if some of them are drafts.

        A compression follows a step whose tokens are all certain, so one token before it is left to such a step.
        """
        if not self.schedule.takes_drafts:
            return 0
        total = self.request.num_prompt_tokens + self.request.max_tokens
        return min(total, total if self.due_at is None else self.due_at) - 1

    # What has happened to it.

    def adopted(self) -> None:
        """It has begun with a front: the context's scores are not needed, nor what the way there came to."""
        self.shrink_kept()
        self.reported.clear()

    def shrink_kept(self) -> None:
        """Its context's scores are no longer needed."""
        if self.kept_bytes is not None:
            self.kept_bytes = self.schedule.ring_bytes

    def release_kept(self) -> None:
        self.kept_bytes = self.external_bytes = None


class RequestStates(dict[str, RequestState]):
    """By id, all compressed requests, in the order of their arrival."""

    def reserve(self, state: RequestState, limits: Limits) -> bool:
        """Reserves a request's memory outside the pool until it ends or is preempted; False if it must wait for that of
        others, as it does for blocks. One that runs alone always finds room."""
        if state.kept_bytes is not None:
            return True
        schedule = state.schedule
        kept, external = schedule.ring_bytes + schedule.score_bytes, schedule.external_bytes
        held = sum(one.kept_bytes or 0 for one in self.values())
        held_external = sum(one.external_bytes or 0 for one in self.values())
        if (held and kept and held + kept > limits.kept_bytes) or (
            held_external and external and held_external + external > limits.max_external_bytes
        ):
            return False
        state.kept_bytes, state.external_bytes = kept, external
        return True

    def release_kept(self, running: Sequence[Request]) -> None:
        """Releases what requests that do not run have reserved: room is reserved before vLLM looks for blocks, and one
        that found none must not keep others waiting."""
        ids = {request.request_id for request in running}
        for request_id, state in self.items():
            if state.kept_bytes is not None and request_id not in ids:
                state.release_kept()
