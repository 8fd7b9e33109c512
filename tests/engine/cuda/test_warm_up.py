"""Nothing is compiled while serving: what starting launches needs all the machine code that later launches need.

Counted without a GPU, by the arguments that Triton compiles a kernel anew for.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.slow

pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)

from tests.engine.cuda.gpu import GPU, OnGPU, SimulatedGPU  # noqa: E402
from tests.engine.cuda.launch_counts import counting, of_policy  # noqa: E402
from tests.engine.cuda.scene import GROUPS, HEAD_SIZE, HEADS, Request, Scene  # noqa: E402
from tests.engine.cuda.test_compactions import on_gpu  # noqa: E402
from tests.engine.worker.test_batches import GROUPS as COMPACTED_GROUPS  # noqa: E402
from tests.engine.worker.test_batches import Worker  # noqa: E402
from tests.ops.triton_compiler import launches  # noqa: E402
from vllm_kvmerge.engine.attention import cuda  # noqa: E402
from vllm_kvmerge.engine.attention.rows import (  # noqa: E402
    Normalization,
    PromptScores,
    RepetitionWindow,
    ScoreWindow,
)
from vllm_kvmerge.engine.messages import MoveWindow  # noqa: E402
from vllm_kvmerge.engine.worker import warm_up  # noqa: E402
from vllm_kvmerge.engine.worker.cuda_compression import CUDACompression  # noqa: E402
from vllm_kvmerge.engine.worker.warm_up import AttentionKind  # noqa: E402
from vllm_kvmerge.ops import ScoreMode, ScoreUpdate  # noqa: E402
from vllm_kvmerge.policies import PRESETS  # noqa: E402
from vllm_kvmerge.request.spec import parse_compression  # noqa: E402

MAX_BLOCKS = 128
"""Of a row: as many entries as chunks are cut into pieces for."""

UPDATES = [ScoreUpdate(mode, 0.9) for mode in (ScoreMode.SUM, ScoreMode.MEAN, ScoreMode.LOG_EMA)]


def of_scene(scene: Scene, fused: bool) -> AttentionKind:
    """fused: with pages of heads' own."""
    impl, has_scores = scene.impl, not scene.window
    return AttentionKind(
        scene.ours, impl.num_heads, scene.query.dtype, impl.scale, impl.softmax, impl.window, impl.chunked,
        [scene.ours] if fused else None, cuda.shortest_chunk(GROUPS), has_scores, not scene.ours.is_quantised,
    )  # fmt: skip


def requests_of(scene: Scene, seed: int) -> Iterator[list[Request]]:
    """Batches of all sizes: decoding, chunks of prompts, both; fronts, pages and updates of all kinds."""
    rng = torch.Generator().manual_seed(seed)
    plain = [scene.plain(n) for n in (1, 16, 30, 333)]
    chunks = [scene.plain(n + 20, n) for n in (2, 5, 8, 9, 16, 40)]
    if scene.window:
        yield from ([one] for one in plain + chunks)
        yield plain
        yield [plain[0], *chunks[:3]]
        return
    compressed = [scene.compressed(17, 30, 45 + n, update=UPDATES[n]) for n in range(3)]
    later = [scene.compressed(16, 32, 80, n, UPDATES[n % 3]) for n in (1, 2, 11, 33)]
    paged = [scene.paged(64, 80, 120, n, UPDATES[n % 3]) for n in (1, 3, 12)]
    if not scene.theirs.is_quantised:
        coded = [scene.coded(64, 80, 120, n) for n in (1, 2, 12)]
        yield from (coded, [*coded, *paged], [coded[1], *chunks[:3]], coded[:1], coded[1:2], coded[2:])
    yield from (plain, compressed, later, paged, [*plain, *compressed][:6], [*chunks[:3], *paged])
    yield from ([one] for one in (*plain, *chunks, *compressed, *later, *paged))
    for _ in range(4):
        everything = [*plain, *chunks, *compressed, *later, *paged]
        yield [everything[i] for i in torch.randperm(len(everything), generator=rng)[:4].tolist()]
    for update in UPDATES:  # prompts that are scored, of lengths and from places that nothing divides
        for count, seq_len in ((1, 33), (7, 90), (40, 91)):
            scores = PromptScores.empty(1, HEADS, seq_len + 3, GPU)
            window = ScoreWindow(min(count, 17), update, scores)
            yield [plain[1], scene.plain(seq_len, count, window=window)]
    norms = SimpleNamespace(norms=torch.ones(1, 256, device=GPU))
    lengths = Normalization(norms, lambda layer, values: torch.ones(HEADS, GROUPS, values.shape[1], device=GPU))
    for normalization in (None, lengths):
        for start, end, count in ((0, 16, 20), (5, 44, 31), (4, 5, 3)):
            scores = PromptScores.empty(1, HEADS, 51, GPU)
            window = RepetitionWindow(count, 50, start, end, 4, scores, normalization)
            yield [scene.plain(50 + count, count, window=window), plain[2]]


@pytest.mark.parametrize("has_pages", [True, False])
@pytest.mark.parametrize(("window", "chunked"), [(0, False), (50, False), (64, True)])
@pytest.mark.parametrize(("dtype", "interleaved"), [(torch.bfloat16, True), (torch.float8_e4m3fn, False)], ids=str)
def test_attention_compiles_nothing_while_serving(dtype, interleaved, window, chunked, has_pages, gpu, monkeypatch):
    monkeypatch.setattr("tests.engine.cuda.scene.MAX_BLOCKS", MAX_BLOCKS)
    with SimulatedGPU(may_wait=True):
        scene = Scene(0, dtype, GPU, window, chunked, interleaved)
        batches = list(requests_of(scene, 1))
    scene.finish_cache()
    if window or not has_pages:
        scene.builder._buffers.layers = None
        batches = [batch for batch in batches if all(one.row.table is None for one in batch)]
    kind, served = of_scene(scene, has_pages and not window), []
    with SimulatedGPU(may_wait=True), launches() as started:
        warm_up.attention([kind, kind], MAX_BLOCKS)
    scene.cache = scene.cache.as_subclass(OnGPU)
    for batch in batches:
        num_tokens = sum(request.num_tokens for request in batch)
        with SimulatedGPU(may_wait=True), launches() as found:
            metadata = scene.builder.build(0, scene.common(batch))
            slots = torch.zeros(num_tokens, dtype=torch.int64, device=GPU)
            # Parts of the projection of queries, keys and values.
            new = torch.zeros(num_tokens, 3 * HEADS, HEAD_SIZE, dtype=scene.query.dtype, device=GPU)[:, :HEADS]
            scene.impl.do_kv_cache_update(scene.layer, new, new, scene.cache, slots)
            scene.forward(metadata, num_tokens)
        served += found
    names = {launch.kernel.__name__ for launch in served}
    assert names >= {"write", "divide", "attend"} and (window or {"update_columns", "raise_scores", "finish"} <= names)
    codes = {launch.key for launch in started}
    assert not {launch.key for launch in served} - codes
    assert len(codes) <= (22 if has_pages and not window else 15), "each takes seconds to compile"


@pytest.fixture(scope="module")
def started() -> set[tuple[object, ...]]:
    """Machine codes of the compactions that are run when a server starts."""
    with SimulatedGPU(may_wait=True, must_pin=True):
        worker = Worker("h2o", (150, 150))
        on_gpu(worker, blocks_on_gpu=True)
    compactor = replace(worker.compactor, group_size=COMPACTED_GROUPS)
    policies = [parse_compression({"policy": name, "budget": warm_up.BUDGET}).policy for name in PRESETS]
    before = worker.bytes
    with counting() as counts:
        warm_up.compactions(compactor, policies, torch.bfloat16, head_pages=True, may_be_coded=True)
    assert torch.equal(worker.bytes, before), "the cache has changed"
    return counts.machine_codes


WAITS = {"d2o": 1, "adakv": 2, "kvzip": 2, "kvzap": 2}
"""Most times that the GPU is waited for, for each length, at a prompt's end, where budgets follow data; never while a
request generates."""


@pytest.mark.parametrize("policy", PRESETS)
def test_compactions_compile_nothing_while_serving(policy, started):
    """Of all lengths, and numbers of requests; with another budget. Uneven budgets get pages, then come from pages."""
    for lengths, fields in (((150, 150), {}), ((151,), {}), ((230, 192, 192), {}), ((201,), {"budget": 77})):
        first, second = of_policy(policy, lengths, **fields)
        served = first.machine_codes | second.machine_codes
        assert served and not served - started
        assert policy != "adakv" or any("to_pages" in code[1] for code in served)
        assert sum(first.waits.values()) <= WAITS.get(policy, 0) * len(set(lengths)) and not second.waits


@pytest.mark.parametrize("policy", ["snapkv", "kvzip", "keepkv"])
def test_coded_fronts_compile_nothing_while_serving(policy, started):
    """One launch writes the entries of all layers; for heads that are alike nothing is waited for."""
    for lengths in ((150, 150), (151,), (230,)):
        with SimulatedGPU(may_wait=True, must_pin=True):
            worker = Worker(policy, lengths, front="int8", decode="grow")
            on_gpu(worker, blocks_on_gpu=True)
        with counting() as counts:
            done = worker.compactor.execute([replace(one, coding="int8") for one in worker.first])
        assert not done.failures and counts.kernels["write_codes"] == 1
        assert not counts.machine_codes - started
        assert sum(counts.waits.values()) <= WAITS.get(policy, 0)


def test_launches_do_not_grow_with_requests():
    """Of one shape, but for queries and scores of prompts."""
    few, many = (of_policy("keepkv", lengths)[1].kernels for lengths in ((150, 190), (150, 170, 190, 200, 230)))
    assert few == many


def test_keys_that_are_turned_compile_nothing_while_serving(started):
    with SimulatedGPU(may_wait=True, must_pin=True):
        worker = Worker("streaming_llm", (150, 171), positions="cache")
        on_gpu(worker, blocks_on_gpu=True)
    for step in (worker.first, worker.second):
        with counting() as counts:
            done = worker.compactor.execute([replace(one, moves_keys=True) for one in step])
        assert not done.failures and not counts.machine_codes - started


@pytest.mark.parametrize("can_turn", [True, False])
def test_keys_in_windows_compile_nothing_while_serving(can_turn, monkeypatch):
    limits = SimpleNamespace(allowed_policies=frozenset(), head_pages=False, front_obstacle=lambda coding: "")
    monkeypatch.setattr("vllm_kvmerge.engine.worker.cuda_compression.request_limits", lambda config: limits)
    monkeypatch.setattr(CUDACompression, "layers", {})
    with SimulatedGPU(may_wait=True, must_pin=True):
        worker = Worker("streaming_llm", (150,))
        on_gpu(worker, blocks_on_gpu=True)
    config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.bfloat16), parallel_config=SimpleNamespace(data_parallel_index=0)
    )
    compression, compactor = CUDACompression(config, GPU), worker.compactor
    compression._compactor, compression._max_blocks = compactor, MAX_BLOCKS
    compression._windows = {1: (compactor.layers[:2], compactor.rotation if can_turn else None)}
    before = worker.bytes
    with counting() as started:
        compression.warm_up()
    assert torch.equal(worker.bytes, before), "the cache has changed"
    served = set()
    for first_row, blocks, seq_len, shift in ((0, [3], 16, -1), (2, [1, 6], 61, 16), (5, [4, 2, 7], 128, -40)):
        with counting() as counts:
            compression._turn_windows([MoveWindow("r", 1, first_row, blocks, blocks)], seq_len, shift)
        served |= counts.machine_codes
    assert {code[0] for code in served} == ({"read_rows", "write_rows"} if can_turn else set())
    assert not served - started.machine_codes
