"""KV connectors, which load and store the blocks of requests without compression alone."""

from collections.abc import Callable
from dataclasses import replace

from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput


def plain_part(output: SchedulerOutput, is_hidden: Callable[[str], bool]) -> SchedulerOutput:
    """A step's output as a connector may see it: without the requests, by id, that are hidden from it.

    Blocks of a request that is compressed may change after any step, and hold what no hash of tokens stands for.
    """
    if not any(map(is_hidden, output.num_scheduled_tokens)):
        return output
    state = output.kv_connector_block_state
    return replace(
        output,
        scheduled_new_reqs=[one for one in output.scheduled_new_reqs if not is_hidden(one.req_id)],
        scheduled_cached_reqs=_plain_cached(output.scheduled_cached_reqs, is_hidden),
        num_scheduled_tokens={
            name: number for name, number in output.num_scheduled_tokens.items() if not is_hidden(name)
        },
        kv_connector_block_state=state
        and replace(state, req_ids={name for name in state.req_ids if not is_hidden(name)}),
    )


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
