"""What holds of every kind of models: rows are ``ARCHITECTURES``, columns the tests. The fast layer has a diagonal."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from tests.engine.architectures import (
    ARCHITECTURES,
    BLOCK_SIZE,
    BYTES_PER_BLOCK,
    MAX_TOKENS,
    Architecture,
    architectures,
    arguments,
    check_budgets,
    check_company_and_preemption,
    greedy,
    hit,
    jobs,
    num_taken,
    policies_of,
    prompts_of_many_lengths,
    running,
    stock,
)
from tests.engine.conftest import Engine, preempting, random_prompt, run
from tests.engine.spread import spread_over
from tests.engine.test_hybrid_sharing import check_fronts
from tests.engine.test_pressure import params as asleep
from tests.engine.test_pressure import watched
from tests.engine.test_repetition import PROMPTS, dense_scores, scores
from tests.engine.test_tensor_parallel import NUM_TOKENS, generate, splits_among_heads
from tests.engine.test_verification import answered, ask, step_until
from tests.random_model import WINDOW
from vllm_kvmerge.engine.usage import REPORT_KEY, USAGE_KEY

pytestmark = pytest.mark.engine

__all__ = ["scores", "watched"]  # fixtures

STATES = "Mamba", "linear attention"
CACHELESS = "Mamba", "latents"
"""Where vLLM's CPU build has no prefix cache."""
HEADS = "larger heads", "fewer heads"


@pytest.fixture(scope="module")
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def architecture(name) -> Architecture:
    return ARCHITECTURES[name]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, architecture) -> Path:
    return architecture.write(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(folder, architecture) -> Iterator[Engine]:
    with running(folder, **architecture.arguments) as engine:
        yield engine


@pytest.fixture(scope="module")
def stock_tokens(folder, architecture) -> list[list[int]]:
    return stock(folder, **architecture.arguments)


@architectures("linear attention")
def test_answers_are_verified(engine):
    """By what vLLM says of prompt and answer as one prompt: linear attention steps through an answer otherwise."""
    prompt = random_prompt(np.random.default_rng(3), 150)
    answer = answered(engine, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), prompt)
    found = step_until(engine, ask(engine, answer))
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (output,) = engine.generate([prompt + answer], params)
    said = [one[token] for one, token in zip(output.prompt_logprobs[len(prompt) :], answer, strict=True)]
    assert found["log_probs"] == pytest.approx([one.logprob for one in said], abs=1e-3)
    assert sum(found["agrees"]) > 30
    assert all(agrees for agrees, one in zip(found["agrees"], said, strict=True) if one.rank == 1)
    changed = answer[:30] + [answer[30] ^ 1] + answer[31:]
    agrees = step_until(engine, ask(engine, changed))["agrees"]
    assert agrees[:30] == found["agrees"][:30] and not agrees[30]
    engine.assert_empty()


@architectures("windows", "latents")
def test_plain_requests_equal_stock_vllm(engine, architecture, stock_tokens):
    """Where they hit the prefix cache too, and with a budget that is never exceeded."""
    assert len({token for tokens in stock_tokens for token in tokens}) > 50  # what they read decides
    prompts = prompts_of_many_lengths()
    assert engine.tokens(prompts, greedy()) == stock_tokens
    engine.assert_empty()
    for prompt, expected in zip(prompts, stock_tokens, strict=True):
        (again,) = engine.generate([prompt], greedy())
        assert list(again.outputs[0].token_ids) == expected
        assert again.num_cached_tokens == hit(engine, len(prompt) - 1)
    assert engine.llm.reset_prefix_cache()
    params = [
        greedy(["streaming_llm", "h2o", "snapkv"][i % 3], budget=max(40, len(prompt)), interval=MAX_TOKENS)
        for i, prompt in enumerate(prompts)
    ]
    if architecture.is_exact:
        assert engine.tokens(prompts, params) == stock_tokens
    engine.assert_empty()


@architectures("larger heads", "latents")
def test_entries_stay_within_budget_and_interval(engine):
    """Of the layers of full attention."""
    check_budgets(engine, sorted({*policies_of(jobs(engine))} - {"", "kvzip", "kvzip_once"}), 120)


@architectures("chunks")
@pytest.mark.timeout(900)
def test_requests_of_every_kind_alone_beside_each_other_preempted_and_spread(engine, architecture):
    told = [job for job in jobs(engine)[:: architecture.thin] if policies_of([job])[0] not in architecture.magnifies]
    tokens = check_company_and_preemption(engine, told, 20 if architecture.is_exact else None)
    if not architecture.is_exact:
        return
    assert engine.llm.reset_prefix_cache()
    with spread_over(3) as spread:
        assert engine.tokens(*map(list, zip(*told, strict=True))) == tokens
    assert len(spread.parts) > 3
    engine.assert_empty()


@architectures(but=("linear attention", "latents"))
def test_two_workers_equal_one(engine, architecture, name, folder, tmp_path):
    told = [
        (prompt, params.extra_args)
        for (prompt, params), policy in zip(jobs(engine), policies_of(jobs(engine)), strict=True)
        if policy not in architecture.magnifies and not splits_among_heads(params.extra_args)
        # Both workers have the only KV head, each with half of its queries.
        if name != "fewer heads" or policy in ("", "keydiff", "knorm", "local", "random", "streaming_llm", "tova")
    ]
    first, second = generate(tmp_path, arguments(folder, **architecture.arguments), told)
    assert engine.llm.reset_prefix_cache()
    some = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    params = [SamplingParams(**some, extra_args=extra) for _, extra in told]
    alone = engine.tokens([prompt for prompt, _ in told], params)
    # The halves of a product add up to another rounding, which of a hundred answers decides one.
    for found, expected in ((first, alone), (second, alone[::4])):  # the second hits the prefix cache
        assert sum(one != other for one, other in zip(found, expected, strict=True)) <= 1
    engine.assert_empty()


@architectures("shared caches", but=("linear attention",))
def test_full_layers_forget_what_streaming_llm_drops_and_others_do_not(engine, architecture, folder):
    """As a mask does in Transformers: a prompt computed with full attention, then sinks and the newest tokens."""
    masked, budget, sinks = architecture.masked(folder, architecture.chunk), 40, 4
    different = 0
    for seed in range(4):
        prompt = random_prompt(np.random.default_rng(seed), 150 + 37 * seed)
        params = greedy("streaming_llm", budget=budget, num_sink_tokens=sinks, interval=MAX_TOKENS)
        seen = [*range(sinks), *range(len(prompt) - budget + sinks, len(prompt))]
        expected = masked.generate(prompt, seen, MAX_TOKENS)
        assert engine.tokens([prompt], params)[0] == expected
        different += expected != engine.tokens([prompt], greedy())[0]
    assert different > 1


@architectures("fewer heads", but=CACHELESS)
@pytest.mark.parametrize("policy", ["h2o", "snapkv", "adakv"])
def test_the_prefix_cache_stays_as_full_attention_left_it(engine, policy):
    """In all layers, in a window too: what is computed from approximations is not found."""
    prompt = random_prompt(np.random.default_rng(6), 430)
    assert engine.llm.reset_prefix_cache()
    cold, known = engine.generate([prompt], greedy())[0], []
    for number in (1, 3 * max(manager.block_size for manager in engine.scheduler._managers)):
        assert engine.llm.reset_prefix_cache()
        answer = engine.tokens([prompt], greedy(policy, number, budget=100, interval=8))[0]
        known.append(len(engine.pool.cached_block_hash_to_block))
    assert known[0] == known[1] >= 430 // engine.manager.block_size
    for longer in (prompt, [*prompt, *answer]):
        warm = engine.generate([longer], greedy())[0]
        assert warm.num_cached_tokens == hit(engine, 429)
        if longer == prompt:
            assert list(warm.outputs[0].token_ids) == list(cold.outputs[0].token_ids)
    engine.assert_empty()


@architectures("windows", but=(*STATES, "latents"))
@pytest.mark.parametrize("length", [96, 256, 430])
def test_fronts_are_shared_with_what_other_layers_hold(engine, length):
    check_fronts(engine, "h2o", length)


@architectures("chunks", but=STATES)
def test_blocks_that_compressed_requests_wrote_are_zeroed_for_all_layers(engine, stock_tokens):
    assert engine.llm.reset_prefix_cache()
    rng = np.random.default_rng(9)
    engine.tokens([random_prompt(rng, 600) for _ in range(4)], greedy("h2o", 60, budget=200))
    unclean = sorted(engine.manager._unclean)
    assert len(unclean) > 10
    for cache in engine.compression.pool:
        cache.poison_blocks(torch.tensor(unclean))
    with engine.with_blocks(engine.pool.num_gpu_blocks * 3 // 4):
        assert engine.tokens(prompts_of_many_lengths(), greedy()) == stock_tokens
    engine.assert_empty()


@architectures("windows", only=("windows", *HEADS))
@pytest.mark.parametrize("policy", [None, "snapkv", "h2o", "keepkv"])
def test_under_pressure_requests_are_compressed_and_none_is_preempted(engine, name, watched, policy):
    """But for plain ones. There is room for about two thirds of what six requests of 400 tokens take."""
    prompts = [random_prompt(np.random.default_rng(seed), 100) for seed in range(6)]
    with engine.with_blocks(80 if name == "windows" else 64):
        tokens = engine.tokens(prompts, asleep(policy, 300))
    engine.assert_empty()
    assert [len(one) for one in tokens] == [300] * 6
    preempted, compressed = map(bool, watched)
    assert (preempted, compressed) == (policy is None, policy is not None)


# What is particular to some.


@architectures(*HEADS, only=HEADS)
def test_blocks_of_both_kinds_are_as_large(engine, name):
    specs = {type(one.kv_cache_spec).__name__: one.kv_cache_spec for one in engine.scheduler._managers}
    full, window = specs["MergeableAttentionSpec"], specs["SlidingWindowSpec"]
    assert (full.block_size, window.block_size) == {"larger heads": (32, 64), "fewer heads": (64, 32)}[name]
    assert full.head_size == 2 * window.head_size and full.page_size_bytes == window.page_size_bytes
    assert window.state_content_bytes == 2 * window.head_size * 4 + 8
    assert full.page_size_padded is None and window.page_size_padded is None
    assert engine.pool.num_gpu_blocks == 400


@architectures(only=("shared caches",))
def test_queries_of_the_caches_own_layer_alone_count(engine):
    """keepkv's second statistic counts the queries that have met an entry."""
    assert len(engine.compression.compactor.layers) == 2 and len(engine.compression.layers) == 8
    engine.add("one", random_prompt(np.random.default_rng(1), 200), greedy("keepkv", 40, budget=64, interval=100))
    seen = []

    def watch():
        for request in engine.scheduler.running:
            segments, computed = engine.segments[request.request_id], request.num_computed_tokens
            blocks = [block.block_id for block in engine.manager.req_to_blocks[request.request_id]]
            for slot in range(segments.tail, computed):
                block, offset = blocks[slot // BLOCK_SIZE], slot % BLOCK_SIZE
                for layer in engine.compression.compactor.layers:
                    seen.append((layer.aux[block, :, offset].unique().tolist(), [computed - slot]))

    run(engine, watch)
    assert len(seen) > 1000 and all(counted == expected for counted, expected in seen)
    engine.assert_empty()


@architectures(only=("Mamba",))
def test_what_other_layers_left_in_blocks_is_zeroed(engine, stock_tokens):
    """States may lie anywhere in a page, metadata of a block that is next attention's included."""
    prompts, params = map(list, zip(*jobs(engine), strict=True))
    expected = engine.tokens(prompts, params)
    free = [block.block_id for block in engine.pool.blocks if not block.ref_cnt and not block.is_null]
    assert len(free) == engine.pool.num_gpu_blocks - 1

    def spoil() -> None:
        for layer in engine.compression.compactor.layers:
            for plane in (layer.keys, layer.values, layer.log_votes, layer.scores, layer.aux):
                plane[free] = float("nan")
            layer.positions[free] = 7

    spoil()
    assert engine.tokens(prompts_of_many_lengths(), greedy()) == stock_tokens
    spoil()
    assert engine.tokens(prompts, params) == expected
    engine.assert_empty()


@architectures(only=STATES)
def test_what_a_request_with_states_holds(engine, architecture):
    """One or, where states are in the prefix cache, two blocks of each group of other layers, and what its front and
    newest tokens take."""
    assert engine.llm.reset_prefix_cache()
    taken: list[int] = []
    engine.add("one", random_prompt(np.random.default_rng(3), 700), greedy("h2o", 200, budget=64, interval=16))
    run(engine, lambda: taken.append(num_taken(engine)))
    states = 2 if "enable_prefix_caching" in architecture.arguments else 4
    assert max(taken[4:-1]) <= states + 1 + 2 < 700 // engine.manager.block_size
    engine.assert_empty()


@architectures(only=("linear attention",))
@pytest.mark.parametrize(
    ("policy", "fields"),
    [
        ("streaming_llm", {"context_tokens": 512}),
        ("h2o", {"prefill": {"chunk": 128}}),
        ("snapkv", {"prefill": {"chunk": 192}}),
        ("keepkv", {"prefill": {"chunk": 128}, "context_tokens": 448}),
    ],
)
@pytest.mark.parametrize("when", [2, 4])
def test_a_request_that_is_preempted_while_it_reads(engine, policy, fields, when):
    """Where all parts of a prompt end at a multiple of 64 tokens, linear attention rounds as before."""
    prompt = random_prompt(np.random.default_rng(5), 641)
    params = greedy(policy, budget=64, **fields)
    assert engine.llm.reset_prefix_cache()
    expected = engine.tokens([prompt], params)[0]
    assert engine.llm.reset_prefix_cache()
    engine.add("one", prompt, params)
    preemptions, preempt = [], preempting(engine, when)

    def watch() -> None:
        preempt()
        preemptions.extend(request.num_preemptions for request in engine.scheduler.requests.values())

    assert run(engine, watch)["one"] == expected and max(preemptions) == 1
    engine.assert_empty()


@architectures(only=("windows", "linear attention"))
@pytest.mark.parametrize(
    ("policy", "fields", "found"),
    [
        ("streaming_llm", {}, {"windows": 480, "linear attention": 448}),
        ("keepkv", {"context_tokens": 400}, {"windows": 352, "linear attention": 320}),
        ("snapkv", {"score_window": 200}, {"windows": 288, "linear attention": 256}),
    ],
)
def test_what_a_request_finds_again(engine, name, policy, fields, found):
    """Where a context is compressed, or its last queries are scored, the hit ends before them; the window there is
    another one, and a state is kept for the next one."""
    prompt, params = random_prompt(np.random.default_rng(8), 500), greedy(policy, budget=64, **fields)
    assert engine.llm.reset_prefix_cache()
    cold, warm = (engine.generate([prompt], params)[0] for _ in range(2))
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, found[name])
    assert list(warm.outputs[0].token_ids) == list(cold.outputs[0].token_ids)
    engine.assert_empty()


@architectures(only=("windows",))
@pytest.mark.parametrize(("length", "chunk_size"), [(500, 150), (267, 2000), (511, 300)])
def test_scores_of_a_repeated_context_are_those_of_a_dense_computation(engine, folder, scores, length, chunk_size):
    """A repetition begins with its parent's window. Beside a request that generates, 510 tokens of the last context
    would be computed after two steps, so that the window at its last block would be gone after the third."""
    prompt = random_prompt(np.random.default_rng(61), length + 20)
    fields = {"chunk_size": chunk_size, "num_prefix_tokens": 4, **PROMPTS}
    assert engine.llm.reset_prefix_cache()
    engine.add("other", random_prompt(np.random.default_rng(62), 20), greedy(max_tokens=60))
    engine.llm.llm_engine.step()
    engine.add("one", prompt, greedy("kvzip", budget=0.5, context_tokens=length, **fields))
    run(engine)
    (found,) = scores
    expected = dense_scores(prompt[:length], chunk_size, 4, PROMPTS, path=folder)
    assert (found - expected).abs().max() < 1e-4 * expected.max()
    engine.assert_empty()


@architectures("windows", only=("windows",))
def test_a_report_counts_the_blocks_of_all_layers(engine):
    assert engine.llm.reset_prefix_cache()
    params = greedy("keepkv", 40, budget=64)
    params.extra_args[USAGE_KEY] = True
    engine.add("one", random_prompt(np.random.default_rng(10), 500), params)
    taken, reports = [], []
    while engine.llm.llm_engine.has_unfinished_requests():
        for output in engine.llm.llm_engine.step():
            reports.append(output.kv_transfer_params)
        taken.append(num_taken(engine))
    report = reports[-1][REPORT_KEY]
    assert report["mean_bytes"] == pytest.approx(np.mean(taken[1:-1]) * BYTES_PER_BLOCK, rel=0.05)
    # Chunks of 256 tokens: at most the prompt's blocks in one group, and a window and two chunks in the two others.
    assert 16 * BYTES_PER_BLOCK <= report["peak_bytes"] <= (16 + 2 * 16) * BYTES_PER_BLOCK
    assert max(taken[2:]) <= (64 + 40) // BLOCK_SIZE + 1 + 2 * (WINDOW // BLOCK_SIZE + 2)
