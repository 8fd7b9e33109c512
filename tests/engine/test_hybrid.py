"""A model of sliding-window layers beside full attention: these are compressed, those are vLLM's own."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from tests import preloaded
from tests.engine.conftest import Engine, preempting, random_prompt, run
from tests.engine.spread import spread_over
from tests.engine.test_async_scheduler import make_request, make_scheduler
from tests.engine.test_async_scheduler import run as run_schedule
from tests.engine.test_plain import STOCK
from tests.engine.test_pressure import params as asleep
from tests.engine.test_pressure import watched
from tests.engine.test_repetition import PROMPTS, dense_scores, scores
from tests.engine.test_tensor_parallel import NUM_TOKENS, generate, splits_among_heads
from tests.presets import SMALL
from tests.random_model import WINDOW, write_gemma
from vllm_kvmerge import compression, kvmerge_engine_args
from vllm_kvmerge.engine.scheduler import AsyncCompressionScheduler, SyncCompressionScheduler
from vllm_kvmerge.engine.usage import REPORT_KEY, USAGE_KEY
from vllm_kvmerge.evaluation.continuation import ForcedContinuation
from vllm_kvmerge.policies import PRESETS

pytestmark = pytest.mark.engine

__all__ = ["scores", "watched"]  # fixtures

BLOCK_SIZE, NUM_BLOCKS, NUM_FULL, MAX_TOKENS = 32, 400, 2, 24
NUM_PRESSED = 80
"""Blocks for six requests of 100 tokens and 300 more, which take some 110."""
BYTES_PER_BLOCK = NUM_FULL * 2 * BLOCK_SIZE * (2 * 32 * 4 + 16)
"""Of as many layers as a group has, in float32."""

POLICIES = sorted(set(PRESETS) - {"kvzap"})  # which needs a model of its own


def arguments(folder: Path, **others) -> dict:
    return {
        "model": str(folder),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 2048,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 256,  # so that blocks leave the window between chunks of a prompt
        "block_size": BLOCK_SIZE,
        "kv_cache_memory_bytes": NUM_BLOCKS * BYTES_PER_BLOCK,
        "seed": 0,
        **others,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_gemma(tmp_path_factory.mktemp("gemma"))


@contextmanager
def running(folder: Path, **others) -> Iterator[Engine]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    others = {"logits_processors": [ForcedContinuation]} | others
    llm = LLM(**kvmerge_engine_args(**arguments(folder, **others)))
    yield Engine(llm)
    llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module")
def engine(folder) -> Iterator[Engine]:
    with running(folder) as engine:
        yield engine


def prompts_of_many_lengths() -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [random_prompt(rng, int(length)) for length in np.geomspace(10, 1500, 12)]


def stock(folder: Path, **others) -> list[list[int]]:
    """Tokens from stock vLLM, in a process of its own into which no plugin is loaded."""
    job = json.dumps([arguments(folder, **others), prompts_of_many_lengths(), MAX_TOKENS])
    environment = os.environ | {"VLLM_PLUGINS": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = preloaded.run([sys.executable, "-c", STOCK], input=job, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.split("TOKENS", 1)[1])


@pytest.fixture(scope="module")
def stock_tokens(folder) -> list[list[int]]:
    return stock(folder)


def greedy(policy: str | None = None, max_tokens: int = MAX_TOKENS, **fields) -> SamplingParams:
    extra = compression(policy, **SMALL.get(policy, {}) | fields) if policy else None
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra)


def add(engine: Engine, request_id: str, prompt: list[int], params: SamplingParams) -> None:
    engine.llm.llm_engine.add_request(request_id, {"prompt_token_ids": prompt}, params)


def num_taken(engine: Engine) -> int:
    return engine.pool.num_gpu_blocks - 1 - engine.pool.get_num_free_blocks()


def test_plain_requests_equal_stock_vllm(engine, stock_tokens):
    assert len(engine.scheduler._managers) == 3 and engine.pool.num_gpu_blocks == NUM_BLOCKS
    assert len({token for tokens in stock_tokens for token in tokens}) > 50  # what they read decides
    prompts = prompts_of_many_lengths()
    assert engine.tokens(prompts, greedy()) == stock_tokens
    engine.assert_empty()
    for prompt, expected in zip(prompts, stock_tokens, strict=True):
        first, again = (engine.generate([prompt], greedy())[0] for _ in range(2))
        assert list(first.outputs[0].token_ids) == list(again.outputs[0].token_ids) == expected
        assert again.num_cached_tokens == (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_a_budget_that_is_never_exceeded_changes_nothing(engine, stock_tokens):
    prompts = prompts_of_many_lengths()
    names = ["streaming_llm", "h2o", "keepkv"]
    params = [
        greedy(names[i % 3], budget=max(40, len(prompt)), interval=MAX_TOKENS) for i, prompt in enumerate(prompts)
    ]
    assert engine.tokens(prompts, params) == stock_tokens
    engine.assert_empty()


def test_entries_stay_within_budget_and_interval(engine):
    """Of the layers of full attention; the others hold their window."""
    assert len(engine.compression.compactor.layers) == NUM_FULL
    check_budgets(engine, POLICIES)


def check_budgets(engine: Engine, policies: list[str]) -> None:
    """Counts entries in the cache at each step; all policies run at once."""
    budget, interval, num_tokens = 64, 16, 120
    rng, block_size = np.random.default_rng(12), engine.manager.block_size
    bounded = [policy for policy in policies if policy != "kvzip"]
    for policy in bounded:
        params = greedy(policy, num_tokens, budget=budget, interval=interval, decode="bounded")
        add(engine, policy, random_prompt(rng, 300), params)
    layers = engine.compression.compactor.layers
    sizes: dict[str, list[float]] = {policy: [] for policy in bounded}
    live: dict[tuple[str, int], float] = {}
    windows = [one for one in engine.scheduler._managers if one is not engine.manager]

    def watch():
        for request in engine.scheduler.running:
            segments = engine.manager.segments.get(request.request_id)
            if segments is None:
                continue
            policy = request.request_id.rsplit("-", 1)[0]
            if (policy, segments.tail) not in live:
                blocks = [block.block_id for block in engine.manager.req_to_blocks[request.request_id]]
                blocks = blocks[: -(-segments.front // block_size)]
                counts = [
                    (layer.positions[blocks].transpose(0, 1).flatten(1)[:, : segments.front] >= 0).sum(1)
                    for layer in layers
                ]
                live[policy, segments.tail] = float(torch.stack(counts).double().mean())
            sizes[policy].append(live[policy, segments.tail] + request.num_computed_tokens - segments.tail)
            for manager in windows:
                held = [block for block in manager.req_to_blocks[request.request_id] if not block.is_null]
                assert len(held) <= WINDOW // BLOCK_SIZE + 2 or request.num_computed_tokens == 300

    run(engine, watch)
    for policy, seen in sizes.items():
        assert len(seen) >= num_tokens - 1, policy
        assert budget - 1 <= max(seen) <= budget + interval, policy
    engine.assert_empty()


def jobs() -> list[tuple[list[int], SamplingParams]]:
    rng, told = np.random.default_rng(3), []
    shared = random_prompt(rng, 400)
    for index, policy in enumerate([*POLICIES, None]):
        length = int(rng.integers(100, 600))
        prompt = [*shared[: length // 2], *random_prompt(rng, length)[length // 2 :]]
        fields = [
            {},
            {"context_tokens": length - 40},
            {"prefill": {"chunk": 70}},
            {"decode": "bounded"},
            {"refresh": {"every": 20}},
        ][index % 5]
        try:
            told.append((prompt, greedy(policy, 40, budget=64, interval=8, **fields) if policy else greedy()))
        except ValueError:  # the policy does not go with these fields
            told.append((prompt, greedy(policy, 40, budget=64, interval=8)))
    for policy, fields in (("snapkv", {"allocator": "adaptive"}), ("morphkv", {"skip_layers": 1}), ("pyramidkv", {})):
        told.append((random_prompt(rng, 350), greedy(policy, 40, budget=64, interval=8, **fields)))
    moving = greedy("h2o", 40, budget=64, interval=8, decode="bounded", positions="cache")
    told.append((random_prompt(rng, 350), moving))
    threshold = {"threshold": 0.01, "max": 0.8}
    told.append((random_prompt(rng, 350), greedy("snapkv", 40, budget=threshold, decode="bounded")))
    return told


def check_company_and_preemption(engine: Engine, told: list[tuple[list[int], SamplingParams]]) -> list[list[int]]:
    """Each request gives the same tokens beside the others, alone and preempted; returns them."""
    assert engine.llm.reset_prefix_cache()
    together = engine.tokens([prompt for prompt, _ in told], [params for _, params in told])
    engine.assert_empty()
    assert together == [engine.tokens([prompt], params)[0] for prompt, params in told]
    for index, (prompt, params) in enumerate(told):
        add(engine, str(index), prompt, params)
    preempted = run(engine, preempting(engine, 20))
    assert [preempted[str(index)] for index in range(len(told))] == together
    engine.assert_empty()
    return together


@pytest.mark.slow
def test_requests_of_every_kind_beside_each_other_alone_and_preempted(engine):
    told = jobs()
    alone = check_company_and_preemption(engine, told)
    growing = [random_prompt(np.random.default_rng(seed), 100) for seed in range(5)]
    with engine.with_blocks(60):
        for index, prompt in enumerate(growing):
            add(engine, f"growing{index}", prompt, greedy(max_tokens=300))
        for index, (prompt, params) in enumerate(told):
            add(engine, str(index), prompt, params)
        counts = []
        squeezed = run(engine, lambda: counts.extend(r.num_preemptions for r in engine.scheduler.requests.values()))
    assert max(counts) > 0, "the pool is too large to test preemption"
    assert [squeezed[str(index)] for index in range(len(told))] == alone
    engine.assert_empty()


@pytest.mark.slow
def test_compressions_that_are_spread(engine):
    told = jobs()
    assert engine.llm.reset_prefix_cache()
    prompts, params = [prompt for prompt, _ in told], [params for _, params in told]
    expected = engine.tokens(prompts, params)
    assert engine.llm.reset_prefix_cache()
    with spread_over(3) as spread:
        assert engine.tokens(prompts, params) == expected
    assert len(spread.parts) > 10
    engine.assert_empty()


@pytest.mark.slow
def test_two_workers_equal_one(engine, folder, tmp_path):
    told = [(prompt, params.extra_args) for prompt, params in jobs() if not splits_among_heads(params.extra_args)]
    first, second = generate(tmp_path, arguments(folder), told)
    params = [
        SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, extra_args=extra) for _, extra in told
    ]
    alone = engine.tokens([prompt for prompt, _ in told], params)
    assert len(told) > len(POLICIES) - 3 and first == alone
    assert second == alone[::4]  # which hits the prefix cache
    engine.assert_empty()


def check_prefix_cache(engine: Engine, policy: str, num_tokens: int, num_cached: int) -> None:
    """What is computed from approximations is not found. num_tokens: that are generated. num_cached: of the prompt's
    tokens, those that later requests find."""
    prompt = random_prompt(np.random.default_rng(6), 430)
    assert engine.llm.reset_prefix_cache()
    cold, known = engine.generate([prompt], greedy())[0], []
    for number in (1, num_tokens):
        assert engine.llm.reset_prefix_cache()
        answer = engine.tokens([prompt], greedy(policy, number, budget=100, interval=8))[0]
        known.append(len(engine.pool.cached_block_hash_to_block))
    assert known[0] == known[1] >= 430 // engine.scheduler._manager.block_size
    for longer in (prompt, [*prompt, *answer]):
        warm = engine.generate([longer], greedy())[0]
        assert warm.num_cached_tokens == num_cached
        if longer == prompt:
            assert list(warm.outputs[0].token_ids) == list(cold.outputs[0].token_ids)
    engine.assert_empty()


@pytest.mark.thin(4)
@pytest.mark.parametrize("policy", ["h2o", "snapkv", "keepkv", "adakv"])
def test_the_prefix_cache_stays_as_full_attention_left_it(engine, policy):
    """In all layers, in a window too."""
    check_prefix_cache(engine, policy, 80, 416)


def test_a_hit_that_is_cut_short_has_its_own_window(engine):
    """Queries of a prompt's last tokens are scored, so the hit ends before them; the window there is another one."""
    prompt = random_prompt(np.random.default_rng(8), 500)
    params = greedy("snapkv", budget=64, score_window=200)
    assert engine.llm.reset_prefix_cache()
    cold = engine.generate([prompt], params)[0]
    warm = engine.generate([prompt], params)[0]
    assert cold.num_cached_tokens == 0 and warm.num_cached_tokens == 288
    assert list(warm.outputs[0].token_ids) == list(cold.outputs[0].token_ids)
    engine.assert_empty()


@pytest.mark.slow
@pytest.mark.parametrize(("length", "chunk_size"), [(500, 150), (267, 2000), (511, 300)])
def test_scores_of_a_repeated_context_are_those_of_a_dense_computation(engine, folder, scores, length, chunk_size):
    """A repetition begins with its parent's window. Beside a request that generates, 510 tokens of the last context
    would be computed after two steps, so that the window at its last block would be gone after the third."""
    prompt = random_prompt(np.random.default_rng(61), length + 20)
    fields = {"chunk_size": chunk_size, "num_prefix_tokens": 4, **PROMPTS}
    assert engine.llm.reset_prefix_cache()
    add(engine, "other", random_prompt(np.random.default_rng(62), 20), greedy(max_tokens=60))
    engine.llm.llm_engine.step()
    add(engine, "one", prompt, greedy("kvzip", budget=0.5, context_tokens=length, **fields))
    run(engine)
    (found,) = scores
    expected = dense_scores(prompt[:length], chunk_size, 4, PROMPTS, path=folder)
    assert (found - expected).abs().max() < 1e-4 * expected.max()
    engine.assert_empty()


def test_blocks_that_compressed_requests_wrote_are_zeroed_for_all_layers(engine, stock_tokens):
    assert engine.llm.reset_prefix_cache()
    rng = np.random.default_rng(9)
    engine.tokens([random_prompt(rng, 600) for _ in range(4)], greedy("keepkv", 60, budget=200))
    unclean = sorted(engine.manager._unclean)
    assert len(unclean) > 10
    for layer in engine.compression.compactor.layers:
        layer.keys[unclean], layer.values[unclean] = float("nan"), float("nan")
    with engine.with_blocks(NUM_BLOCKS // 2):
        assert engine.tokens(prompts_of_many_lengths(), greedy()) == stock_tokens
    assert engine.tokens(prompts_of_many_lengths(), greedy()) == stock_tokens
    engine.assert_empty()


def test_a_report_counts_the_blocks_of_all_layers(engine):
    assert engine.llm.reset_prefix_cache()
    params = greedy("keepkv", 40, budget=64)
    params.extra_args = {**(params.extra_args or {}), USAGE_KEY: True}
    add(engine, "one", random_prompt(np.random.default_rng(10), 500), params)
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


@pytest.mark.thin(24)
@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"kvzip"}))
def test_under_pressure_requests_are_compressed_and_none_is_preempted(engine, watched, policy):
    preempted, compressed = watched
    prompts = [random_prompt(np.random.default_rng(seed), 100) for seed in range(6)]
    with engine.with_blocks(NUM_PRESSED):
        tokens = engine.tokens(prompts, asleep(policy, 300))
    engine.assert_empty()
    assert [len(one) for one in tokens] == [300] * 6
    assert preempted == [] and compressed


def test_plain_requests_are_preempted_there(engine, watched):
    prompts = [random_prompt(np.random.default_rng(seed), 100) for seed in range(6)]
    with engine.with_blocks(NUM_PRESSED):
        engine.generate(prompts, asleep(None, 300))
    assert watched[0] and not watched[1]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["h2o", "snapkv", "keepkv", "morphkv", "adakv"])
def test_under_pressure_it_is_compressed_like_a_context(engine, watched, policy):
    """One that fills the pool alone, with blocks of three groups of layers."""
    prompt = random_prompt(np.random.default_rng(21), 200)
    fields = {"decode": "grow"} | ({"score_window": 32} if policy in ("snapkv", "adakv") else {})
    with engine.with_blocks(22):
        (tokens,) = engine.tokens([prompt], asleep(policy, 400, **fields))
    ((count,),) = watched[1].values()
    assert len(tokens) == 400 and watched[0] == []
    known = count + 1 - len(prompt)
    # 16 blocks or more for all tokens, and up to 3 of each window.
    assert 16 * BLOCK_SIZE <= count <= 18 * BLOCK_SIZE
    same = asleep(policy, len(tokens) - known, trigger="budget", context_tokens=count, **fields)
    assert engine.tokens([prompt + tokens[:known]], same) == [tokens[known:]]
    engine.assert_empty()


@pytest.mark.parametrize(("cls", "depth"), [(SyncCompressionScheduler, 1), (AsyncCompressionScheduler, 2)])
def test_under_pressure_one_alone_outgrows_the_pool(engine, cls, depth):
    """No model runs. When it is computed again, its tokens do not all find room, and it is compressed before that."""
    scheduler = make_scheduler(engine, cls)
    pool = scheduler.kv_cache_manager.block_pool
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - 60)
    scheduler._limits = replace(scheduler._limits, pool_tokens=60 * BLOCK_SIZE)
    schedule, watch = scheduler.schedule, preempting(SimpleNamespace(scheduler=scheduler), 1200)

    def schedule_and_preempt():
        watch()
        return schedule()

    scheduler.schedule = schedule_and_preempt
    request = make_request("long", 600, 1400, asleep("keepkv", interval=96).extra_args)
    plans = run_schedule(scheduler, [request], depth)["long"]
    assert request.num_preemptions == 1 and request.num_output_tokens == 1400
    ends = [num_tokens for _, _, num_tokens, _ in plans]
    assert len(ends) >= 2 and 50 * BLOCK_SIZE < ends[0] <= 55 * BLOCK_SIZE and ends[1] < ends[0]
    pool.free_blocks(taken)
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


@pytest.mark.slow
def test_under_pressure_beside_others(engine, watched):
    """Which give the same tokens as alone."""
    told = jobs()
    alone = [engine.tokens([prompt], params)[0] for prompt, params in told]
    assert engine.llm.reset_prefix_cache()
    with engine.with_blocks(100):
        for index in range(5):
            prompt = random_prompt(np.random.default_rng(30 + index), 300)
            add(engine, f"asleep{index}", prompt, asleep(["snapkv", "morphkv"][index % 2], 200))
        for index, (prompt, params) in enumerate(told):
            add(engine, str(index), prompt, params)
        together = run(engine)
    assert {one for one in watched[1] if one.startswith("asleep")}
    assert [len(together[f"asleep{index}"]) for index in range(5)] == [200] * 5
    assert [together[str(index)] for index in range(len(told))] == alone
    engine.assert_empty()


KINDS = "sliding", "chunked"


class Masked:
    """The model in Transformers, whose full-attention layers let generated tokens see some of the prompt alone."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)

    def generate(self, prompt: list[int], seen: list[int], num_tokens: int, chunk: int | None = None) -> list[int]:
        """Tokens after the prompt; seen: its positions that they see. chunk: of the other layers, if not a window."""
        tokens = list(prompt)
        for _ in range(num_tokens):
            places = torch.arange(len(tokens))
            full = places[:, None] >= places
            near = full & (places[:, None] - places < WINDOW)
            if chunk is not None:
                near = full & (places[:, None] // chunk == places // chunk)
            hidden = torch.ones(len(prompt), dtype=torch.bool)
            hidden[seen] = False
            full[len(prompt) :, : len(prompt)] &= ~hidden
            masks = {
                name: torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))[None, None]
                for name, mask in (("full_attention", full), *((f"{kind}_attention", near) for kind in KINDS))
            }
            is_hybrid = bool(getattr(self.model.config, "layer_types", None))
            with torch.no_grad():
                mask = masks if is_hybrid else masks["full_attention"]
                logits = self.logits(torch.tensor([tokens]), mask)
            tokens.append(int(logits[0, -1].argmax()))
        return tokens[len(prompt) :]

    def logits(self, tokens: torch.Tensor, masks: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.model(tokens, attention_mask=masks).logits


def test_full_layers_forget_what_streaming_llm_drops_and_windows_do_not(engine, folder):
    check_against_transformers(engine, folder)


def check_against_transformers(
    engine: Engine, folder: Path, chunk: int | None = None, masked_type: type[Masked] = Masked
) -> None:
    """Compares streaming_llm with the model in Transformers: a prompt computed with full attention, then sinks and the
    newest tokens."""
    masked, budget, sinks = masked_type(folder), 40, 4
    different = 0
    for seed in range(4):
        prompt = random_prompt(np.random.default_rng(seed), 150 + 37 * seed)
        params = greedy("streaming_llm", budget=budget, num_sink_tokens=sinks, interval=MAX_TOKENS)
        seen = [*range(sinks), *range(len(prompt) - budget + sinks, len(prompt))]
        expected = masked.generate(prompt, seen, MAX_TOKENS, chunk)
        assert engine.tokens([prompt], params)[0] == expected
        different += expected != engine.tokens([prompt], greedy())[0]
    assert different > 1
