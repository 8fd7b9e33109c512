"""KV connectors that load late, or in vain; they store as vLLM's ``ExampleConnector`` does, in files."""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import safetensors.torch
import torch
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector, ExampleConnectorMetadata

STEPS = 4
"""After which a load is reported, if it is over by then."""


@dataclass
class Load:
    """token_ids: of the prompt, which say where it is stored. block_ids: those that are to be loaded."""

    request_id: str
    token_ids: list[int]
    block_ids: list[int]


@dataclass
class LateMetadata(ExampleConnectorMetadata):
    loads: list[Load] = field(default_factory=list)


class Invalid(ExampleConnector):
    """Reports blocks that were not loaded."""

    _invalid: set[int] = set()

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self._invalid = self._invalid, set()
        return invalid


class LateConnector(Invalid):
    """Loads in a thread, while the request waits. With ``num_missing`` in its configuration, so many blocks, the last
    ones of each request's first load, are left as they are, and reported as invalid."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_missing: int = self._kv_transfer_config.get_from_extra_config("num_missing", 0)
        self._asked: list[Load] = []
        self._tried: set[str] = set()
        self._pool = ThreadPoolExecutor(1)
        self._caches: dict[str, Tensor] = {}
        self._loading: dict[str, tuple[int, Future[set[int]]]] = {}
        self._step = 0

    # In the scheduler.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        number = max(super().get_num_new_matched_tokens(request, num_computed_tokens)[0] or 0, 0)
        return number, number > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens > 0:
            (block_ids,) = blocks.get_block_ids()
            end = (len(request.prompt_token_ids) - 2) // self._block_size
            start = end - num_external_tokens // self._block_size
            self._asked.append(Load(request.request_id, request.prompt_token_ids, block_ids[start:end]))

    def build_connector_meta(self, scheduler_output: Any) -> LateMetadata:
        asked, self._asked = self._asked, []
        return LateMetadata(super().build_connector_meta(scheduler_output).requests, asked)

    # In the worker.

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        self._caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._step += 1
        for load in self._get_connector_metadata().loads:  # type: ignore[attr-defined]
            self._loading[load.request_id] = self._step, self._pool.submit(self._load, load)

    def _load(self, load: Load) -> set[int]:
        """Blocks that were not loaded."""
        found = load.block_ids
        if self._num_missing and load.request_id not in self._tried:
            self._tried.add(load.request_id)
            found = found[: -self._num_missing]
        last = (len(load.token_ids) - 2) // self._block_size
        first = last - len(load.block_ids)
        for name, cache in self._caches.items():
            file = self._generate_filename_debug(name, torch.tensor(load.token_ids)[: last * self._block_size], [])
            stored = safetensors.torch.load_file(file)["kv_cache"].unflatten(0, (last, self._block_size))
            cache[found] = stored[first : first + len(found)].transpose(1, 2)
        return set(load.block_ids[len(found) :])

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        over = {name for name, (step, load) in self._loading.items() if load.done() and self._step >= step + STEPS}
        for name in over:
            self._invalid = self._invalid | self._loading.pop(name)[1].result()
        return None, over or None


class VainConnector(Invalid):
    """Loads within the step, but in vain: all blocks are filled with what must not be read."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        loads = [one for one in self._get_connector_metadata().requests if not one.is_store]  # type: ignore[attr-defined]
        self._invalid = {slot // self._block_size for one in loads for slot in one.slot_mapping.tolist()}
        for layer in forward_context.no_compile_layers.values() if self._invalid else ():
            layer.kv_cache[list(self._invalid)] = 7.0
