"""When a request's cache is compressed and to what size, without an engine."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from vllm_kvmerge.engine.schedule import UNCOMPRESSED, FrontSize, RequestCompression, Segments
from vllm_kvmerge.engine.state import RequestState, RequestStates
from vllm_kvmerge.policies.allocators.pyramid import Pyramid
from vllm_kvmerge.request.limits import Limits, ModelShape
from vllm_kvmerge.request.spec import CompressionError, parse_compression

SHAPE = ModelShape(num_layers=2, num_kv_heads=4, group_size=2, head_size=32, hidden_size=256, item_size=2)
LIMITS = Limits(None, 1 << 30, 1.0, SHAPE, block_size=32, max_model_len=4096)


def compression(policy: str, num_prompt_tokens: int = 500, max_tokens: int = 100, **fields) -> RequestCompression:
    config = parse_compression({"policy": policy, "budget": 96, **fields})
    assert config is not None
    return RequestCompression.of(config, num_prompt_tokens, max_tokens, LIMITS)


def test_a_cache_that_grows_is_compressed_once():
    one = compression("snapkv", decode="grow")
    assert one.next_compression(UNCOMPRESSED) == 500
    front = one.new_front(UNCOMPRESSED, 500).places
    assert front == 96
    assert one.next_compression(Segments(front, 500)) is None
    assert compression("snapkv", num_prompt_tokens=90, decode="grow").next_compression(UNCOMPRESSED) is None


def test_a_front_is_coded_though_nothing_has_to_go():
    """But not where it would share its only block with the tokens that follow."""
    one, short = (compression("kvzip", num_prompt_tokens=length, front="int8") for length in (90, 31))
    assert one.next_compression(UNCOMPRESSED) == 90 and not one.repeats_context and one.shares_context
    assert one.new_front(UNCOMPRESSED, 90) == FrontSize(90, 90, num_blocks=2)
    assert one.next_compression(Segments(90, 90)) is None and compression("snapkv", front="int8").window
    assert compression("snapkv", num_prompt_tokens=90, front="int8").window == 0
    assert short.next_compression(UNCOMPRESSED) is None and not short.shares_context


@pytest.mark.parametrize("interval", [None, 8])
def test_a_bounded_cache_is_compressed_at_budget_and_interval(interval):
    one = compression("streaming_llm", decode="bounded", interval=interval)
    step = interval or LIMITS.block_size
    at = [one.next_compression(UNCOMPRESSED)]
    for _ in range(3):
        assert at[-1] is not None
        at.append(one.next_compression(Segments(96, at[-1])))
    assert at == [500, 500 + step, 500 + 2 * step, 500 + 3 * step]
    short = compression("streaming_llm", num_prompt_tokens=90, decode="bounded", interval=interval)
    assert short.next_compression(UNCOMPRESSED) == 96 + step


def test_a_policy_that_tracks_moves_at_the_contexts_end_though_nothing_has_to_go():
    one = compression("h2o", num_prompt_tokens=90, decode="bounded")
    assert one.next_compression(UNCOMPRESSED) == 90
    assert one.new_front(UNCOMPRESSED, 90) == FrontSize(90, 90, num_blocks=3)
    assert one.next_compression(Segments(90, 90)) == 96 + 32


def test_a_question_stays_whole_until_it_has_been_read():
    one = compression("streaming_llm", decode="bounded", context_tokens=200)
    assert one.next_compression(UNCOMPRESSED) == 200
    assert one.next_compression(Segments(96, 200)) == 500
    short = compression("streaming_llm", num_prompt_tokens=210, decode="bounded", context_tokens=200)
    assert short.next_compression(Segments(96, 200)) == 200 + 32


def test_where_some_layers_keep_everything_the_others_count():
    one = replace(compression("streaming_llm", decode="bounded"), capacity=None)
    assert one.new_front(UNCOMPRESSED, 500).places == 500
    assert one.next_compression(Segments(500, 500)) == 500 + 32
    assert one.new_front(Segments(500, 500), 532).places == 532


def test_a_layer_that_keeps_everything_has_a_page_for_its_last_entries():
    """Sixteen blocks in one layer, and three in the other."""
    config = parse_compression({"policy": "streaming_llm", "budget": 96, "skip_layers": 1})
    one = RequestCompression.of(config, 500, 100, replace(LIMITS, head_pages=True))
    assert one.new_front(UNCOMPRESSED, 500).num_blocks == 10


@pytest.mark.parametrize("end", ["minimum", "maximum"])
def test_a_pyramid_of_any_ratio_has_a_size(end):
    one = compression("pyramidkv", ratio=Pyramid.model_json_schema()["properties"]["ratio"][end])
    assert one.capacity is not None and 96 <= one.capacity <= 2 * 96


def test_cached_tokens_end_where_queries_are_needed():
    one = compression("streaming_llm")
    assert (one.window_start(500), one.longest_prefix(500)) == (None, 499)
    scored = replace(one, window=32)
    assert (scored.window_start(500), scored.longest_prefix(500)) == (468, 468)
    kept = replace(scored, query_window=48)
    assert (kept.window_start(500), kept.longest_prefix(500)) == (452, 452)
    assert replace(one, query_window=600).longest_prefix(500) == 0
    tracked = compression("h2o")
    assert tracked.window_start(500) == 500 - 64 and tracked.score_bytes > 0 and one.score_bytes == 0


def compressions(one: RequestCompression, front: int = 96) -> list[int]:
    """Numbers of tokens at which a cache is compressed until its prompt has been computed."""
    counts, segments = [], UNCOMPRESSED
    while (count := one.next_compression(segments)) is not None and count <= one.num_prompt_tokens:
        assert not counts or count > counts[-1]
        counts.append(count)
        segments = Segments(min(front, count), one.covered(segments, count), count)
    return counts


@pytest.mark.parametrize("decode", ["bounded", "grow"])
def test_a_context_is_compressed_while_it_is_computed(decode):
    """Whenever budget + chunk entries have gathered, and at its end."""
    one = compression("snapkv", decode=decode, prefill={"chunk": 100})
    assert compressions(one) == [196, 296, 396, 496, 500]
    assert compressions(compression("snapkv", decode=decode, prefill={"chunk": 404})) == [500]
    assert compressions(compression("snapkv", decode=decode, prefill={"chunk": 1000})) == [500]
    two = compression("snapkv", decode=decode, prefill={"chunk": 100}, context_tokens=300)
    assert compressions(two) == [196, 296, 300] + [500] * (decode == "bounded")
    assert compressions(compression("snapkv", 90, decode=decode, prefill={"chunk": 1})) == [90] * (decode == "bounded")


def test_a_windows_last_block_counts_as_a_whole():
    limits = replace(LIMITS, window_blocks=((3, 32), (2, 64)))
    slots = {num_tokens: limits.window_slots(num_tokens) for num_tokens in (1, 32, 33, 65, 500)}
    assert slots == {1: 2 * 32, 32: 2 * 32, 33: 3 * 32, 65: 5 * 32, 500: 5 * 32}


def test_memory_is_kept_for_whoever_came_first():
    limits, states = SimpleNamespace(kept_bytes=100, max_external_bytes=100), RequestStates()
    sizes = {"nothing": 0, "large": 1000, "small": 40, "other": 60}
    for name, size in sizes.items():
        request, schedule = SimpleNamespace(request_id=name), SimpleNamespace(ring_bytes=size // 20, score_bytes=0)
        schedule.score_bytes, schedule.external_bytes = size - schedule.ring_bytes, 0
        states[name] = RequestState(request, schedule, 0)  # type: ignore[arg-type]
    nothing, large, small, other = states.values()
    assert states.reserve(nothing, limits) and states.reserve(large, limits), "alone, it always has room"
    assert not states.reserve(small, limits) and states.reserve(large, limits), "as before"
    large.shrink_kept()
    small.shrink_kept()
    assert (large.kept_bytes, small.kept_bytes) == (50, None)
    assert states.reserve(small, limits) and not states.reserve(other, limits)
    states.release_kept([large.request])
    assert small.kept_bytes is None and states.reserve(small, limits), "who does not run holds nothing"
    large.release_kept()
    assert states.reserve(other, limits)


def test_refreshes_come_every_so_many_tokens_and_are_compressions_of_all():
    one = compression("keepkv", refresh={"every": 48}, max_tokens=200)
    at, refreshed, segments = [], [], UNCOMPRESSED
    while (due := one.next_compression(segments)) is not None and due < 700:
        if one.is_refresh(segments, due):
            refreshed.append(due)
            assert one.num_entries(segments, due) == due
        at.append(due)
        segments = Segments(one.new_front(segments, due).places, one.covered(segments, due), due)
    # Between them the cache is compressed as usual, 32 tokens after the last time.
    assert at == [500, 532, 548, 580, 596, 628, 644, 676, 692]
    assert refreshed == [548, 596, 644, 692]


def test_a_refresh_of_a_cache_that_grows_leaves_what_was_generated():
    one = compression("snapkv", refresh={"every": 48})
    first = Segments(96, 500, 500)
    assert one.next_compression(first) == 548
    assert (one.covered(first, 548), one.new_front(first, 548).places) == (500, 96)
    assert one.next_compression(Segments(96, 500, 548)) == 596


def test_no_refresh_interrupts_a_question_or_precedes_a_loss():
    one = compression("keepkv", context_tokens=300, refresh={"every": 48})
    assert one.next_compression(Segments(96, 300, 300)) == 500
    roomy = compression("streaming_llm", num_prompt_tokens=90, refresh={"every": 4})
    assert roomy.next_compression(UNCOMPRESSED) == 96 + 32


def test_a_complete_cache_needs_room():
    fields = {"policy": "h2o", "budget": 96, "refresh": {"every": 48}}
    config, room = parse_compression(fields), LIMITS.external_bytes(600)
    # Whole blocks of 32, of 2 layers and 4 heads: keys, values and four planes of metadata.
    assert config is not None and room == 608 * 2 * 4 * (2 * 32 * 2 + 16)
    limits = replace(LIMITS, max_external_bytes=room)
    limits.check(config, 500, 108)
    with pytest.raises(CompressionError, match="609 tokens.*allowed: up to 608 tokens") as caught:
        limits.check(config, 500, 109)
    grown = parse_compression({"policy": "snapkv", "budget": 600, "refresh": {"every": 48}})
    assert grown is not None
    limits.check(grown, 500, 3000)  # nothing is ever lost, so nothing is kept
    assert (caught.value.param, caught.value.reason) == ("kv_compression.refresh", "no_external_room")
