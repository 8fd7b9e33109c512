"""KV connectors: only the blocks of uncompressed requests are loaded and stored."""

from collections.abc import Callable
from dataclasses import replace

from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput


class HiddenRequests:
    """Requests, by id, that a scheduler's KV connector does not know.

    Blocks of a request that is compressed may change after any step, and hold what no hash of tokens stands for.
    """

    def __init__(self, group: int) -> None:
        """group: index of the group of layers that are compressed."""
        self._group = group
        self._ids: set[str] = set()
        self._began_with: dict[str, set[int]] = {}
        """Blocks of requests that began in steps whose outputs have not come yet."""

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ids

    def add(self, request_id: str) -> None:
        self._ids.add(request_id)

    def plain_part(self, output: SchedulerOutput) -> SchedulerOutput:
        """A step's output as a connector may see it: without hidden requests. Those that have ended are forgotten."""
        if not self._ids:
            return output
        is_hidden, state = self.__contains__, output.kv_connector_block_state
        plain = replace(
            output,
            scheduled_new_reqs=[one for one in output.scheduled_new_reqs if not is_hidden(one.req_id)],
            scheduled_cached_reqs=_plain_cached(output.scheduled_cached_reqs, is_hidden),
            num_scheduled_tokens={
                name: number for name, number in output.num_scheduled_tokens.items() if not is_hidden(name)
            },
            finished_req_ids=output.finished_req_ids - self._ids,
            preempted_req_ids=output.preempted_req_ids and output.preempted_req_ids - self._ids,
            kv_connector_block_state=state and replace(state, req_ids=state.req_ids - self._ids),
        )
        self._ids -= output.finished_req_ids
        return plain

    def note_begun(self, output: SchedulerOutput) -> None:
        """Notes the blocks that hidden requests begin with in a step, before any is compressed."""
        cached = output.scheduled_cached_reqs
        begun = {one.req_id: one.block_ids for one in output.scheduled_new_reqs}
        begun |= {
            name: blocks
            for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True)
            if name in cached.resumed_req_ids and blocks is not None
        }
        self._began_with |= {name: set(blocks[self._group]) for name, blocks in begun.items() if name in self._ids}

    def spoilt(self, invalid_blocks: set[int], output: SchedulerOutput) -> list[str]:
        """Requests that began with blocks that the connector has not loaded after all. output: the step's."""
        found = [name for name, blocks in self._began_with.items() if blocks & invalid_blocks]
        for name in output.num_scheduled_tokens:
            self._began_with.pop(name, None)
        return found


def _plain_cached(cached: CachedRequestData, is_hidden: Callable[[str], bool]) -> CachedRequestData:
    kept = [index for index, name in enumerate(cached.req_ids) if not is_hidden(name)]
    return replace(
        cached,
        req_ids=[cached.req_ids[index] for index in kept],
        resumed_req_ids={name for name in cached.resumed_req_ids if not is_hidden(name)},
        new_token_ids=[cached.new_token_ids[index] for index in kept] if cached.new_token_ids else [],
        all_token_ids={name: tokens for name, tokens in cached.all_token_ids.items() if not is_hidden(name)},
        new_block_ids=[cached.new_block_ids[index] for index in kept],
        num_computed_tokens=[cached.num_computed_tokens[index] for index in kept],
        num_output_tokens=[cached.num_output_tokens[index] for index in kept],
    )
