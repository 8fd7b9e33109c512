"""The compressions of a step, as one worker carries them out.

Each of vLLM's model runners has one ``Compression``, and supplies the batch's order and the blocks of a request.
"""

import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.worker.utils import AttentionGroup

from vllm_kvmerge.engine.arguments import plugin_config
from vllm_kvmerge.engine.attention.rows import (
    BatchRow,
    PromptScores,
)
from vllm_kvmerge.engine.messages import (
    NO_STEP,
    Compress,
    CompressionStep,
    CompressPart,
    MoveWindow,
)
from vllm_kvmerge.engine.metrics import observe_compaction
from vllm_kvmerge.engine.worker.arriving import Arriving
from vllm_kvmerge.engine.worker.compaction import Compaction, Execution, Rescoring
from vllm_kvmerge.engine.worker.external import ExternalCache
from vllm_kvmerge.engine.worker.head_pages import moved
from vllm_kvmerge.engine.worker.rows import CompressedRows, KeptFront, RequestState, position_shift, score_update
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
    HeadPages,
)
from vllm_kvmerge.policies.errors import PartError
from vllm_kvmerge.request.spec import CompressionSpec

logger = init_logger(__name__)


NewRows = tuple[str, int, int, list[int]]
"""A request's id, a group of layers, and a place in its block table from which on it has blocks with other ids."""


class Compression(CompressedRows):
    """The compressed requests of one worker."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.known_scores: dict[int, PromptScores] = {}
        """Scores of contexts in host memory, by the scheduler's numbers."""

    # Fronts in files.

    def save_front(self, order: str) -> str | None:
        """Writes what this worker holds of a front; an error message if it cannot. order: of
        ``SavedContexts.save``."""
        asked = json.loads(order)
        kept, heads = self._fronts.get(bytes.fromhex(asked["key"])), HeadShare.of(self._config)
        try:
            if kept is None:
                raise SavedFrontError("this worker does not know the front")
            data = kept.budget_data
            numbers = None if data is None else torch.tensor(data.take(), dtype=data.numbers.dtype)
            others = {"queries": kept.queries, "output": kept.output, "found": numbers}
            tensors = front_tensors(self.compactor.layers, asked["blocks"], kept.pages, others)
            tensors |= window_tensors(self.pool, asked["window_blocks"])
            path = file_of(Path(asked["folder"]), heads.rank, heads.num_workers)
            write_front(path, tensors, asked["manifest"], fingerprint(self._model))
        except (OSError, SafetensorError, SavedFrontError) as error:
            return str(error)
        return None

    def load_front(self, order: str) -> str | None:
        """Reads a front from this worker's file into blocks; an error message if it cannot. order: of
        ``SavedContexts.load_front``."""
        asked, heads = json.loads(order), HeadShare.of(self._config)
        try:
            path = file_of(Path(asked["folder"]), heads.rank, heads.num_workers)
            tensors = read_front(path, fingerprint(self._model))
            shapes = {
                "queries": (len(self.compactor.layers), None, *self._query_shape),
                "output": (self._config.model_config.get_hidden_size(),),
                "found": (self.compactor.budget_data_length(tensors["found"]) if "found" in tensors else None,),
            }
            restore_windows(self.pool, asked["window_blocks"], tensors)
            pages, others = restore_front(self.compactor.layers, asked["blocks"], tensors, shapes)
        except SavedFrontError as error:
            return str(error)
        table = None if pages is None else self._table(pages)
        budget_data = Arriving.of(others.pop("found")) if "found" in others else None
        others = {name: tensor.to(self._device) for name, tensor in others.items()}
        key = bytes.fromhex(asked["key"])
        self._fronts[key] = KeptFront(pages, table, budget_data, others.get("queries"), others.get("output"))
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
            self._take_over(plan, moves[plan.request_id], done.pages.get(index), done.budget_data.get(index))
        self._keep_fronts(step)
        self._report(step, done, earlier, started)
        prefixes = [(one.request_id, self.group, 0, one.row_prefix(self.compactor.block_size)) for one in step.compress]
        return prefixes + [(one.request_id, one.group, one.first_row, one.blocks) for one in step.moves]

    def _take_over(
        self, plan: Compress, moves: list[MoveWindow], pages: HeadPages | None, budget_data: Arriving | None
    ) -> None:
        """Notes what a compression has made of its request's cache. pages, budget_data: of ``Execution``."""
        config, state = CompressionSpec.of(plan.compression), self.states[plan.request_id]
        state.front, state.tail, state.pages, state.budget_data = plan.new_front, plan.num_tokens, pages, budget_data
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
            self._fronts[one.key] = KeptFront(pages, table, state.budget_data, queries, state.output)
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
            budget_data=state.budget_data,
            rescoring=Rescoring(score_update(config), window) if window else None,
            moves_keys=config.positions == "cache",
            front=state.front,
            tail=state.tail,
            has_pages=self._head_pages and plan.share_blocks > 0,
            coding=config.coding(plan.num_tokens, self.compactor.block_size),
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
        # A GPU's work is launched, not done.
        timing = batch.advance(part.until, part.seconds if self._device.type == "cpu" else math.inf)
        self.reporter.add_timings([timing], self.step.is_awaited)
        self.reporter.add_progress(plan.request_id, batch.work.progress)

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
