"""A worker's compressed requests: their state, their rows in a batch for attention, and the plans of a step.

Each of vLLM's model runners has one ``Compression``, and supplies the batch's order and the blocks of a request.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec
from vllm.v1.worker.utils import AttentionGroup

from vllm_kvmerge.engine.arguments import plugin_config, request_limits
from vllm_kvmerge.engine.attention.compressed import read_verified
from vllm_kvmerge.engine.attention.hidden_states import HiddenStates
from vllm_kvmerge.engine.attention.rows import (
    PLAIN,
    BatchRow,
    HeldQueries,
    Normalization,
    PredictedScores,
    PromptScores,
    QueryRing,
    RepetitionWindow,
    ScoreWindow,
)
from vllm_kvmerge.engine.blocks import WINDOW_SPECS, compressed_group, has_states, window_blocks
from vllm_kvmerge.engine.messages import (
    NO_STEP,
    Adopt,
    Compress,
    CompressionStep,
    CompressPart,
    MoveWindow,
    Repeat,
    attached_step,
    is_scheduled,
)
from vllm_kvmerge.engine.metrics import observe_compaction
from vllm_kvmerge.engine.support import UnsupportedConfigError
from vllm_kvmerge.engine.surrogate import Surrogate, check_surrogate
from vllm_kvmerge.engine.worker.arriving import Arriving
from vllm_kvmerge.engine.worker.cache_positions import turn_blocks
from vllm_kvmerge.engine.worker.compaction import Batch, Compaction, Execution, Rescoring
from vllm_kvmerge.engine.worker.compactor import Compactor
from vllm_kvmerge.engine.worker.external import ExternalCache
from vllm_kvmerge.engine.worker.head_pages import moved
from vllm_kvmerge.engine.worker.output_weights import OutputWeights
from vllm_kvmerge.engine.worker.reporting import EntryCounts, Reporter
from vllm_kvmerge.engine.worker.rotary import find_rotation
from vllm_kvmerge.engine.worker.saved_fronts import (
    SavedFrontError,
    file_of,
    fingerprint,
    front_tensors,
    read_front,
    restore_front,
    restore_windows,
    window_tensors,
    write_front,
)
from vllm_kvmerge.engine.worker.tensor_parallel import HeadShare
from vllm_kvmerge.ops import (
    NO_UPDATE,
    HeadPages,
    PagedKVCache,
    ScoreMode,
    ScoreUpdate,
    implementation,
    override,
)
from vllm_kvmerge.ops.types import sent
from vllm_kvmerge.policies.errors import PartError
from vllm_kvmerge.policies.rotation import Rotation
from vllm_kvmerge.request.spec import CompressionSpec

logger = init_logger(__name__)


@dataclass
class RequestState:
    """A worker's state of a request with a policy. update: of its scores by attention after the first compression, if
    its policy tracks them. prompt_scores: until the first compression. ring: its newest queries. complete: its complete
    cache, from the first compression on, if it is refreshed. predicts: scores of generated tokens are predicted. pages:
    of its heads, one row per layer, where the front is not an ordinary one. table: of these pages, on a GPU. found:
    ``Execution.found`` of its last compression. output: of its context's last token, until its front is shared. shift:
    what RoPE adds to the positions of its tokens, so that those of its tail follow its front."""

    front: int = 0
    tail: int = 0
    update: ScoreUpdate = NO_UPDATE
    prompt_scores: PromptScores | None = None
    ring: QueryRing | None = None
    complete: ExternalCache | None = None
    predicts: bool = False
    pages: HeadPages | None = None
    table: Tensor | None = None
    found: Arriving | None = None
    output: Tensor | None = None
    shift: int = 0


@dataclass(frozen=True)
class KeptFront:
    """What a worker keeps of a front in the prefix cache besides its blocks. pages, table, found: as in
    ``RequestState``. queries: the newest ones of the context, if its policy goes on reading them. output: the hidden
    state that the model made of the context's last token, ``[hidden]``."""

    pages: HeadPages | None
    table: Tensor | None
    found: Arriving | None
    queries: Tensor | None
    output: Tensor | None


NewRows = tuple[str, int, int, list[int]]
"""A request's id, a group of layers, and a place in its block table from which on it has blocks with other ids."""


def score_update(config: CompressionSpec) -> ScoreUpdate:
    tracker = config.policy.tracker
    return ScoreUpdate(ScoreMode(tracker.mode), tracker.update_decay)


def position_shift(config: CompressionSpec, state: RequestState) -> int:
    """``RequestState.shift`` for its front and tail."""
    return state.front - state.tail if config.positions == "cache" else 0


class Compression:
    """The compressed requests of one worker."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        self._config = vllm_config
        self._device = device
        self.states: dict[str, RequestState] = {}
        self.known_scores: dict[int, PromptScores] = {}
        """Scores of contexts in host memory, by the scheduler's numbers."""
        self.step = CompressionStep()
        self._fronts: dict[bytes, KeptFront] = {}
        self._shifts: Tensor | None = None
        """What RoPE adds to the positions of the batch's tokens; None: nothing."""
        self._begun: dict[str, tuple[Batch, PartError | None]] = {}
        """Compressions under way, and why they cannot be carried out as they should, if that is known."""
        self._last_tokens: dict[str, int] = {}
        """Places in the batch of outputs that are kept or replaced, by request."""
        self._with_drafts: frozenset[str] = frozenset()
        """Requests of whose tokens in the step some are drafts."""
        self._held: dict[str, tuple[int, HeldQueries]] = {}
        """Their queries, if they count, and the numbers of tokens computed before the step."""
        self._compactor: Compactor | None = None
        self._hidden_states: HiddenStates | None = None
        self._output_weights: OutputWeights | None = None
        self._engine = vllm_config.parallel_config.data_parallel_index
        self._counts = EntryCounts(self._engine)
        self.reporter = Reporter()
        self.pool: list[PagedKVCache] = []
        """The caches that all blocks lie in, those of other groups of layers included."""
        self._windows: dict[int, tuple[list[PagedKVCache], Rotation | None]] = {}
        """Caches and RoPE of the layers of each group with a window."""
        self.group = 0
        """Index of the compressed layers' group, among those of the KV cache."""
        self._window_blocks: tuple[tuple[int, int], ...] = ()
        self._head_pages = False
        """Heads with different budgets may have pages of their own."""
        self.has_states = False
        """Blocks of the pool may hold states of Mamba or linear-attention layers."""

    @property
    def compactor(self) -> Compactor:
        assert self._compactor is not None, "there is no KV cache yet"
        return self._compactor

    @property
    def layers(self) -> dict[str, Any]:
        """The model's attention layers by name."""
        is_latent = self._config.model_config.use_mla
        return get_layers_from_vllm_config(self._config, MLAAttention if is_latent else Attention)

    def pool_sizes(self) -> tuple[int, int, list[tuple[int, int]]]:
        """Blocks of the pool, the null block included, tokens of a block, and ``Limits.window_blocks``."""
        first = self.compactor.layers[0]
        return len(first.log_votes), first.block_size, list(self._window_blocks)

    # The KV cache.

    def release_cache(self) -> None:
        """Releases a KV cache that is about to be replaced, such as the one that vLLM profiles graphs with."""
        self._compactor, self.pool, self._windows = None, [], {}
        for layer in self.layers.values():
            layer.impl.forget_cache()

    def use_cache(self, kv_cache_config: KVCacheConfig, model: nn.Module) -> None:
        """Sets up the layers' caches, which have been allocated."""
        self.group = compressed_group(kv_cache_config)
        self._window_blocks = window_blocks(kv_cache_config, self._config)
        group = kv_cache_config.kv_cache_groups[self.group]
        # Of layers that share one cache, the others follow what its own one does.
        all_layers = self.layers
        owners = {
            name: getattr(all_layers[name], "kv_sharing_target_layer_name", None) or name for name in group.layer_names
        }
        layer_names = list(dict.fromkeys(owners.values()))
        for name, owner in owners.items():
            all_layers[name].impl.attach(all_layers[name], layer_names.index(owner))
        self.has_states = has_states(kv_cache_config)
        for layer in all_layers.values():
            # States need pages in one piece, and KV connectors copy pages.
            layer.impl.interleaved = self.has_states or self._config.kv_transfer_config is not None
        for one in kv_cache_config.kv_cache_groups:
            # Cells of other layers are in proportion to their heads: where these are of another size, so are metadata.
            if isinstance(one.kv_cache_spec, WINDOW_SPECS):
                for name in one.layer_names:
                    all_layers[name].impl.has_metadata = one.kv_cache_spec.head_size == group.kv_cache_spec.head_size
        layers = [all_layers[name] for name in layer_names]
        pages = [layer.impl.paged(layer, layer.kv_cache) for layer in layers]
        groups = {
            index: one.layer_names
            for index, one in enumerate(kv_cache_config.kv_cache_groups)
            if not isinstance(one.kv_cache_spec, MambaSpec)
        }
        # A layer of each group has the same memory. The last one's views are taken: those with metadata.
        ordered = [*(names for index, names in groups.items() if index != self.group), group.layer_names]
        everything: list[Any] = [all_layers[name] for names in ordered for name in names]
        pool = {layer.kv_cache.data_ptr(): layer.impl.paged(layer, layer.kv_cache) for layer in everything}
        self.pool = list(pool.values())
        self._windows = {
            index: self._window_layers(model, names) for index, names in groups.items() if index != self.group
        }
        override(plugin_config(self._config).operators)
        limits = request_limits(self._config)
        self._head_pages = limits.head_pages
        if (expected := limits.shape.num_layers) != len(layers):
            raise UnsupportedConfigError(
                f"model layers: {len(layers)} have a cache of full attention, its config says {expected}"
            )
        for layer in layers:
            softmax = layer.impl.softmax
            for trait, has, known in (
                ("soft-caps its logits", softmax.cap > 0.0, limits.shape.caps_logits),
                ("has attention sinks", softmax.sinks is not None, limits.shape.has_sinks),
            ):
                if has and not known:  # requests are checked against what is known
                    raise UnsupportedConfigError(f"the model {trait}, which its configuration does not say")
        logger.info("KV cache operators: %s", implementation(pages[0]))
        heads, num_kv_heads = HeadShare.of(self._config), pages[0].num_kv_heads
        self._query_shape = (layers[0].impl.num_heads, layers[0].impl.head_size)
        self._model = model
        self._output_weights = OutputWeights(model, layer_names, num_kv_heads, self._query_shape)
        self._hidden_states = self._watched(model, layer_names, heads.indices(num_kv_heads))
        self._compactor = Compactor(
            layers=pages,
            scale=layers[0].impl.scale,
            head_indices=heads.indices(num_kv_heads),
            all_heads=heads.gather,
            output_weights=self._output_weights,
            softmax=lambda layer: layers[layer].impl.softmax,
            rotation=None if limits.shape.has_latents else find_rotation(model, layer_names),
            group_size=self._query_shape[0] // num_kv_heads,
            hidden_size=self._config.model_config.get_hidden_size(),
            max_bytes=limits.workspace_bytes,
            max_seconds=limits.max_seconds,
            is_alone=heads.num_workers == 1,
        )

    def _window_layers(self, model: nn.Module, layer_names: list[str]) -> tuple[list[PagedKVCache], Rotation | None]:
        """Caches of layers with a window, and their RoPE if it is one that keys can be turned by."""
        names = [name for name in layer_names if self.layers[name].kv_sharing_target_layer_name is None]
        layers: list[Any] = [self.layers[name] for name in names]
        return [layer.impl.paged(layer, layer.kv_cache) for layer in layers], find_rotation(model, names)

    def _turn_windows(self, moves: list[MoveWindow], seq_len: int, shift: int) -> None:
        """Turns the keys that layers with a window have of a request of ``seq_len`` tokens, whose positions move by
        ``shift``."""
        for window in moves:
            copied = [pair for pair in zip(window.sources, window.blocks, strict=True) if pair[0] != pair[1]]
            self.copy([source for source, _ in copied], [target for _, target in copied])
            caches, rotation = self._windows[window.group]
            if not shift or not window.blocks or rotation is None:
                continue
            num_keys = seq_len - window.first_row * caches[0].block_size
            turn_blocks(caches, rotation, window.blocks, num_keys, shift)

    def _watched(self, model: nn.Module, layer_names: list[str], heads: list[int]) -> HiddenStates:
        """The model's hidden states, with what the server's surrogate model predicts for this worker's ``heads``."""
        name, surrogates = plugin_config(self._config).kvzap, None
        if name is not None:
            check_surrogate(name, self._config.model_config)
            of_all = Surrogate.load(name).of_heads(heads, self._config.model_config.dtype, self._device)
            surrogates = [of_all[extract_layer_index(name)] for name in layer_names]
        max_tokens = self._config.scheduler_config.max_num_batched_tokens
        return HiddenStates(model, layer_names, max_tokens, surrogates, len(heads), self._device)

    def zero_block_ids(self, block_ids: list[int]) -> None:
        """Zeroes the keys and values of blocks that a compressed request, or layers with a state, wrote."""
        index = sent(torch.tensor(block_ids), self._device)
        for pages in self.compactor.layers:
            pages.content.index_fill_(0, index, 0)

    def _poison(self, block_ids: list[int]) -> None:
        index = sent(torch.tensor(block_ids), self._device)
        for cache in self.pool:
            cache.poison_blocks(index)

    # Rows of a step's batch.

    def begin(self, scheduler_output: SchedulerOutput) -> None:
        """Begins a step: forgets requests that have ended or start anew."""
        self._counts.flush()
        self.step = attached_step(scheduler_output)
        self.reporter.is_heard = is_scheduled(scheduler_output)
        self._with_drafts = frozenset(scheduler_output.scheduled_spec_decode_tokens)
        if self.step.poison:
            self._poison(self.step.poison)
        for turn in self.step.turns:
            ended = self.states[turn.request_id]
            queries = ended.ring.queries(turn.num_tokens) if turn.keeps_queries and ended.ring is not None else None
            self._fronts[turn.key] = KeptFront(ended.pages, ended.table, ended.found, queries, None)
        for request_id in (
            scheduler_output.finished_req_ids
            | (scheduler_output.preempted_req_ids or set())
            | scheduler_output.scheduled_cached_reqs.resumed_req_ids
        ):
            self._begun.pop(request_id, None)
            self.states.pop(request_id, None)
        if self.step.adopt:
            copied = [one for one in self.step.adopt.values() if one.blocks]
            self.copy([id_ for one in copied for id_ in one.sources], [id_ for one in copied for id_ in one.blocks])
            for request_id, adoption in self.step.adopt.items():
                self.states[request_id] = self._adopted(adoption)
        # Last: a request may begin with a front and, when its next compression takes the blocks, end it in one step.
        for key in self.step.drop:
            self._fronts.pop(key, None)

    @contextmanager
    def copying(self, scheduler_output: SchedulerOutput) -> Iterator[None]:
        """Meanwhile vLLM zeroes a step's new blocks. The step's copies of blocks follow, which vLLM's own function
        would do as if the cache had no metadata."""
        if self.has_states:  # pages in one piece, metadata included
            yield
            return
        copies, scheduler_output.kv_cache_block_copies = scheduler_output.kv_cache_block_copies, None
        yield
        if copies:
            self.copy([one.src_block_id for one in copies], [one.dst_block_id for one in copies])

    def copy(self, sources: list[int], targets: list[int]) -> None:
        """Copies blocks, given by their ids."""
        if targets:
            ids = sent(torch.tensor([sources, targets]), self._device)
            for cache in self.pool:
                cache.copy_blocks(*ids)

    def _adopted(self, adoption: Adopt) -> RequestState:
        """The state of a request that begins with a front."""
        config, front = CompressionSpec.of(adoption.compression), self._fronts[adoption.key]
        state = RequestState(adoption.front, adoption.tail, pages=front.pages, table=front.table, found=front.found)
        state.shift = position_shift(config, state)
        self._track(state, config, adoption.is_partial)
        if front.pages is not None and adoption.blocks:
            state.pages = moved(front.pages, adoption.sources, adoption.blocks)
            state.table = self._table(state.pages)
        if front.queries is not None and adoption.query_window:
            state.ring = self._ring(adoption.query_window)
            state.ring.fill(front.queries, adoption.num_tokens)
        return state

    def _track(self, state: RequestState, config: CompressionSpec, is_partial: bool = False) -> None:
        """Has attention go on with a compressed request's scores as its policy asks (``CompressionSpec.tracks``)."""
        tracks = config.tracks(is_partial)
        state.update = score_update(config) if tracks else NO_UPDATE
        state.predicts = tracks and config.policy.tracker.predicts_scores

    def row(self, request_id: str, num_scheduled: int, num_computed: int) -> BatchRow:
        """The batch row of a request with ``num_scheduled`` new tokens after ``num_computed``."""
        state = self.states.get(request_id)
        if state is not None and state.front > 0:
            adoption = self.step.adopt.get(request_id)
            if adoption is not None and adoption.restores_output:
                # Nothing comes of this token, whose query the front has seen before; attention wants one after it.
                return BatchRow(state.front, state.tail - 1, pages=state.pages, table=state.table)
            predicted = PredictedScores(self._seen, None) if state.predicts else None
            return BatchRow(
                state.front,
                state.tail,
                state.update,
                predicted,
                state.ring,
                pages=state.pages,
                table=state.table,
                shift=state.shift,
            )
        window, seq_len = self.step.score.get(request_id), num_computed + num_scheduled
        if (chunk := self.step.repeat.get(request_id)) is not None:
            return self._repeating_row(chunk, num_scheduled, seq_len)
        if window is None or window.start >= seq_len:
            return PLAIN
        config = CompressionSpec.of(window.compression)
        if state is None:
            state = self.states[request_id] = self._new_state(config, num_computed, seq_len, window.query_window)
        if state.prompt_scores is None:
            return BatchRow(ring=state.ring)
        state.prompt_scores.grow(seq_len)
        if config.policy.tracker.predicts_scores:
            return BatchRow(window=PredictedScores(self._seen, state.prompt_scores), ring=state.ring)
        num_queries = min(num_scheduled, seq_len - window.start)
        return BatchRow(window=ScoreWindow(num_queries, score_update(config), state.prompt_scores), ring=state.ring)

    def _repeating_row(self, chunk: Repeat, num_scheduled: int, seq_len: int) -> BatchRow:
        """The row of an internal request that repeats a chunk of another one's context."""
        if seq_len <= chunk.context:
            return PLAIN
        state, layers = self.states.setdefault(chunk.parent, RequestState()), self.compactor.layers
        if state.prompt_scores is None:
            shape = len(layers), layers[0].num_kv_heads, chunk.context
            state.prompt_scores = PromptScores.empty(*shape, self._device)
        num_queries = min(num_scheduled, seq_len - chunk.context)
        where = chunk.context, chunk.start, chunk.end, chunk.sinks
        normalization = None
        if chunk.normalizes:
            assert self._output_weights is not None
            normalization = Normalization(self._seen, self._output_weights.norms)
        return BatchRow(window=RepetitionWindow(num_queries, *where, state.prompt_scores, normalization))

    @property
    def _seen(self) -> HiddenStates:
        assert self._hidden_states is not None, "there is no KV cache yet"
        return self._hidden_states

    def rows(self, order: Iterable[tuple[str, int, int]]) -> list[BatchRow]:
        """The batch's rows, none if no request has a policy. order: requests, with tokens scheduled and computed."""
        rows, batch = list[BatchRow](), list[tuple[str, int, int]]()
        self._last_tokens, self._shifts, self._held = {}, None, {}
        if self.states or self.step.score or self.step.repeat or self.step.outputs:
            batch = list(order)
            rows = [self.row(*request) for request in batch]
            self._last_tokens = self._watched_outputs(batch)
            if any(shifts := [row.shift for row in rows]):
                lengths = torch.tensor([num_scheduled for _, num_scheduled, _ in batch])
                self._shifts = sent(torch.tensor(shifts).repeat_interleave(lengths), self._device)
        if self._hidden_states is not None:
            self._hidden_states.observe(any(row.needs_hidden_states for row in rows))
        return [self._holding(*request, row) for request, row in zip(batch, rows, strict=True)]

    def _holding(self, request_id: str, num_scheduled: int, num_computed: int, row: BatchRow) -> BatchRow:
        """The row, but with its queries held back if some of its tokens are drafts, until ``count_verified``."""
        if request_id not in self._with_drafts or not row.counts_queries:
            return row
        held = HeldQueries()
        self._held[request_id] = num_computed, held
        return replace(row, update=NO_UPDATE, window=None, ring=None, held=held)

    @property
    def holds_queries(self) -> bool:
        """True if queries are held back until ``count_verified``."""
        return bool(self._held)

    def count_verified(self, num_tokens: Mapping[str, int]) -> None:
        """Has queries count that were held back: those of tokens that turned out to be right, and of no others.

        num_tokens: of the step's requests, how many of their tokens these are. They are the first ones.
        """
        held, self._held = self._held, {}
        verified = []
        for request_id, (num_computed, queries) in held.items():
            count = num_tokens[request_id]
            verified.append((queries, queries.reader(self.row(request_id, count, num_computed), count)))
        read_verified(verified, self.compactor.layers, self.compactor.scale, self.compactor.softmax)

    def shift_positions(self, positions: Tensor) -> None:
        """Has RoPE count the entries of the cache where requests ask for that. positions: the model's, ``[tokens]``
        int64, in place, after everything else that depends on the tokens' own has read them."""
        if self._shifts is not None:
            positions[: len(self._shifts)] += self._shifts

    def unshift_positions(self, positions: Tensor) -> None:
        """Undoes ``shift_positions``."""
        if self._shifts is not None:
            positions[: len(self._shifts)] -= self._shifts

    def _watched_outputs(self, batch: list[tuple[str, int, int]]) -> dict[str, int]:
        """``_last_tokens`` of a step."""
        restored = (request_id for request_id, one in self.step.adopt.items() if one.restores_output)
        watched = {*self.step.outputs, *restored}
        if not watched:
            return {}
        ends = accumulate(num_scheduled for _, num_scheduled, _ in batch)
        return {request_id: end - 1 for (request_id, *_), end in zip(batch, ends, strict=True) if request_id in watched}

    def exchange_outputs(self, hidden_states: Tensor) -> None:
        """Keeps the outputs of last tokens of contexts whose fronts others may begin with, and puts them in the place
        of what such a front's last token has come to since. hidden_states: the model's, ``[tokens, hidden]``."""
        places, self._last_tokens = self._last_tokens, {}
        for request_id, place in places.items():
            adoption = self.step.adopt.get(request_id)
            if adoption is not None and adoption.restores_output:
                output = self._fronts[adoption.key].output
                assert output is not None
                hidden_states[place] = output
            else:
                self.states.setdefault(request_id, RequestState()).output = hidden_states[place].clone()

    def needs_python(self, order: Iterable[tuple[str, int, int]]) -> bool:
        """True if Python code must see this step's queries, which rules out a captured graph."""
        return any(row.needs_python for row in self.rows(order))

    def _new_state(self, config: CompressionSpec, num_computed: int, seq_len: int, query_window: int) -> RequestState:
        """A state with room for the prompt scores and queries, from position ``num_computed`` on, that the policy
        needs."""
        state, layers = RequestState(), self.compactor.layers
        if config.policy.scores_tokens and not config.awaits_pressure:
            state.prompt_scores = PromptScores.empty(len(layers), layers[0].num_kv_heads, seq_len, self._device)
        if query_window:
            state.ring = self._ring(query_window)
            state.ring.start = num_computed
        return state

    def _ring(self, window: int) -> QueryRing:
        num_layers, dtype = len(self.compactor.layers), self._config.model_config.dtype
        return QueryRing.empty(num_layers, window, *self._query_shape, dtype, self._device)

    # Fronts in files.

    def save_front(self, order: str) -> str | None:
        """Writes what this worker holds of a front; an error message if it cannot. order: of
        ``saved_contexts.save``."""
        asked = json.loads(order)
        kept, heads = self._fronts.get(bytes.fromhex(asked["key"])), HeadShare.of(self._config)
        try:
            if kept is None:
                raise SavedFrontError("this worker does not know the front")
            found = None if kept.found is None else torch.tensor(kept.found.take(), dtype=kept.found.numbers.dtype)
            others = {"queries": kept.queries, "output": kept.output, "found": found}
            tensors = front_tensors(self.compactor.layers, asked["blocks"], kept.pages, others)
            tensors |= window_tensors(self.pool, asked["window_blocks"])
            path = file_of(Path(asked["folder"]), heads.rank, heads.num_workers)
            write_front(path, tensors, asked["manifest"], fingerprint(self._model))
        except (OSError, SafetensorError, SavedFrontError) as error:
            return str(error)
        return None

    def load_front(self, order: str) -> str | None:
        """Reads a front from this worker's file into blocks; an error message if it cannot. order: of
        ``saved_contexts.load_all``."""
        asked, heads = json.loads(order), HeadShare.of(self._config)
        try:
            path = file_of(Path(asked["folder"]), heads.rank, heads.num_workers)
            tensors = read_front(path, fingerprint(self._model))
            shapes = {
                "queries": (len(self.compactor.layers), None, *self._query_shape),
                "output": (self._config.model_config.get_hidden_size(),),
                "found": (self.compactor.num_found(tensors["found"]) if "found" in tensors else None,),
            }
            restore_windows(self.pool, asked["window_blocks"], tensors)
            pages, others = restore_front(self.compactor.layers, asked["blocks"], tensors, shapes)
        except SavedFrontError as error:
            return str(error)
        table = None if pages is None else self._table(pages)
        found = Arriving.of(others.pop("found")) if "found" in others else None
        others = {name: tensor.to(self._device) for name, tensor in others.items()}
        key = bytes.fromhex(asked["key"])
        self._fronts[key] = KeptFront(pages, table, found, others.get("queries"), others.get("output"))
        return None

    # Plans of a step.

    def run_plans(self, blocks_of: Callable[[str], Tensor]) -> list[NewRows]:
        """Carries out this step's compressions after its tokens have been sampled; failures go into the next report.

        Returns what the runner then writes to its block tables. blocks_of: ids of a request's blocks.
        """
        step = self.step
        if step is NO_STEP:
            return []
        self._share_scores()
        adoptions = step.adopt.values()
        self.copy([id_ for one in adoptions for id_ in one.exact], [id_ for one in adoptions for id_ in one.restored])
        for part in step.parts:
            self._carry_on(part, blocks_of)
        if not step.compress:
            return []
        started = time.perf_counter()
        moves: dict[str, list[MoveWindow]] = {plan.request_id: [] for plan in step.compress}
        for move in step.moves:
            moves[move.request_id].append(move)
        compactions, lost, begun, earlier = [], {}, {}, [0.0] * len(step.compress)
        for index, plan in enumerate(step.compress):
            if plan.request_id in self._begun:
                begun[index], error = self._begun.pop(plan.request_id)
                (compaction,), earlier[index] = begun[index].compactions, begun[index].work.seconds
            else:
                compaction, error = self._compaction(plan, blocks_of(plan.request_id))
            if any(self._windows[move.group][1] is None for move in moves[plan.request_id]):
                error = error or PartError("positions", "keys in windows cannot be turned")
            compactions.append(compaction)
            if error is not None:
                lost[index] = error
        done = self.compactor.execute(compactions, begun)
        done.failures.update(lost)
        for index, plan in enumerate(step.compress):
            self._take_over(plan, moves[plan.request_id], done.pages.get(index), done.found.get(index))
        self._keep_fronts(step)
        self._report(step, done, earlier, started)
        prefixes = [(one.request_id, self.group, 0, one.row_prefix(self.compactor.block_size)) for one in step.compress]
        return prefixes + [(one.request_id, one.group, one.first_row, one.blocks) for one in step.moves]

    def _take_over(
        self, plan: Compress, moves: list[MoveWindow], pages: HeadPages | None, found: Arriving | None
    ) -> None:
        """Notes what a compression has made of its request's cache. pages, found: of ``Execution``."""
        config, state = CompressionSpec.of(plan.compression), self.states[plan.request_id]
        state.front, state.tail, state.pages, state.found = plan.new_front, plan.num_tokens, pages, found
        state.table = None if pages is None else self._table(pages)
        before, state.shift = state.shift, position_shift(config, state)
        if state.ring is not None and state.shift != before:
            self.compactor.move_queries(state.ring, plan.seq_len, before, state.shift)
        self._turn_windows(moves, plan.seq_len, state.shift - before)
        self._track(state, config, plan.purpose == "part")
        state.prompt_scores = None

    def _keep_fronts(self, step: CompressionStep) -> None:
        """Keeps the fronts that compressions have made for others, and copies those whose requests write to them."""
        blocks = {plan.request_id: plan.blocks for plan in step.compress}
        copied = [one for one in step.fronts if one.copies]
        for one in step.fronts:
            state = self.states[one.request_id]
            pages, table = state.pages, state.table
            if pages is not None and one.copies:
                pages = moved(pages, blocks[one.request_id], one.copies)
                table = self._table(pages)
            queries = state.ring.queries(one.num_tokens) if one.keeps_queries and state.ring is not None else None
            self._fronts[one.key] = KeptFront(pages, table, state.found, queries, state.output)
        for plan in step.compress:
            self.states[plan.request_id].output = None
        self.copy(
            [id_ for one in copied for id_ in blocks[one.request_id]], [id_ for one in copied for id_ in one.copies]
        )

    def _report(self, step: CompressionStep, done: Execution, earlier: list[float], started: float) -> None:
        """Reports what a step's compressions came to. earlier: seconds spent on each in steps before. started: when
        these began."""
        heads, request_ids = HeadShare.of(self._config), [plan.request_id for plan in step.compress]
        policies = [CompressionSpec.of(plan.compression).name for plan in step.compress]
        num_heads = len(self.compactor.layers) * self.compactor.num_kv_heads
        self.reporter.add_timings(done.timings, step.is_awaited)
        self.reporter.add_failures(request_ids, done.failures, heads)
        self.reporter.add_fronts(request_ids, done.fronts)
        self.reporter.add_counts(request_ids, done.counts, heads, num_heads, is_awaited=bool(step.fronts))
        if heads.is_first_replica:
            self._counts.add(policies, done.counts)
        if heads.rank == 0:
            # Requests are compressed together: each counts an equal share of the time.
            seconds = (time.perf_counter() - started) / len(policies)
            for policy, plan, spent in zip(policies, step.compress, earlier, strict=True):
                observe_compaction(policy, self._engine, spent + seconds, is_refresh=plan.is_refresh)

    def _compaction(self, plan: Compress, blocks: Tensor) -> tuple[Compaction, PartError | None]:
        """A compression with its request's state, and why it cannot be carried out as it should. blocks: of the
        request."""
        config, state = CompressionSpec.of(plan.compression), self.states.setdefault(plan.request_id, RequestState())
        is_first = not state.tail
        # Statistics are made anew of a context's later parts, and of what has waited for pressure.
        window = config.rescoring_window if config.awaits_pressure or (plan.is_of_context and not is_first) else 0
        compaction = Compaction(
            plan,
            config.policy,
            blocks,
            state.prompt_scores,
            state.ring if config.policy.query_window or window else None,
            pages=state.pages,
            found=state.found,
            rescoring=Rescoring(score_update(config), window) if window else None,
            moves_keys=config.positions == "cache",
            front=state.front,
            tail=state.tail,
            has_pages=self._head_pages and plan.share_blocks > 0,
            # While a request generates, its tokens wait for none of them; without a next one there is no other time.
            settles_shares=plan.is_of_context or (is_first and config.decode != "bounded"),
        )
        if plan.external_tokens:
            try:
                compaction = self._with_complete(compaction, config, state)
            except (OSError, RuntimeError) as error:  # PyTorch's for memory is a RuntimeError
                return compaction, PartError("external_cache", f"no room for the complete cache: {error}")
        return compaction, None

    def _carry_on(self, part: CompressPart, blocks_of: Callable[[str], Tensor]) -> None:
        """Carries out a part of a compression; until the last one, in ``run_plans``, its request's state stays as it
        is."""
        plan = part.compress
        if plan.request_id not in self._begun:
            # On a GPU the row may get other blocks before the last part.
            compaction, error = self._compaction(plan, blocks_of(plan.request_id).clone())
            self._begun[plan.request_id] = self.compactor.begin(compaction, part.num_parts), error
        batch, _ = self._begun[plan.request_id]
        self.reporter.add_timings([batch.advance(part.until)], self.step.is_awaited)

    def _share_scores(self) -> None:
        """Keeps, recalls and forgets scores of contexts as the step says."""
        for request_id, number in self.step.scores.kept.items():
            scores = self.states[request_id].prompt_scores
            assert scores is not None
            self.known_scores[number] = scores.copy(torch.device("cpu"))
        for request_id, number in self.step.scores.recalled.items():
            state = self.states.setdefault(request_id, RequestState())
            state.prompt_scores = self.known_scores[number].copy(self._device)
        for number in self.step.scores.forgotten:
            del self.known_scores[number]

    def _table(self, pages: HeadPages) -> Tensor | None:
        """The table that attention reads instead of ``pages``; None: there is none on the CPU."""
        return None

    def _with_complete(self, compaction: Compaction, config: CompressionSpec, state: RequestState) -> Compaction:
        """Completes the request's complete cache; a refresh then starts from it. Raises OSError or RuntimeError
        if it has no room."""
        plan, pool = compaction.plan, self.compactor.layers
        if state.complete is None:
            folder = plugin_config(self._config).external_cache_dir
            state.complete = ExternalCache.empty(pool, plan.external_tokens, None if folder is None else Path(folder))
        state.complete.append(pool, compaction.source_blocks, plan.seq_len, state.front)
        if not plan.is_refresh:
            return compaction
        scores = None
        if config.refresh_window:
            assert state.ring is not None
            update = score_update(config)
            scores = state.complete.scores(
                state.ring, config.refresh_window, update, self.compactor.scale, self.compactor.softmax
            )
        return replace(compaction, prompt_scores=scores, complete=state.complete)


def set_batch_rows(attn_groups: list[AttentionGroup], rows: list[BatchRow]) -> None:
    """Passes the rows of the next batch to the compressed layers' metadata builders; no rows for a dummy batch."""
    for group in attn_groups:
        group.get_metadata_builder().rows = rows  # type: ignore[attr-defined]
