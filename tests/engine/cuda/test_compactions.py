"""Compactions of a cache on a GPU: what goes there goes without waiting, and nothing of the CPU's is left over."""

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)

from tests.engine.cuda.gpu import GPU, OnGPU, SimulatedGPU  # noqa: E402
from tests.engine.worker.test_batches import GROUPS, HEAD_SIZE, NUM_HEADS, Worker  # noqa: E402
from vllm_kvmerge import ops  # noqa: E402
from vllm_kvmerge.engine.attention.rows import PromptScores, QueryRing  # noqa: E402
from vllm_kvmerge.engine.worker.cuda_compression import CUDACompression  # noqa: E402
from vllm_kvmerge.engine.worker.external import ExternalCache  # noqa: E402
from vllm_kvmerge.engine.worker.rows import score_update  # noqa: E402
from vllm_kvmerge.ops import PagedKVCache  # noqa: E402
from vllm_kvmerge.policies import PRESETS  # noqa: E402

LENGTHS = (150, 150)

DROPPING = ["local", "streaming_llm", "h2o", "snapkv", "criticalkv", "tova", "random", "knorm", "keydiff", "rkv"]
DROPPING += ["expected_attention", "triattention", "compactor"]
"""Presets that merge nothing, and give each layer and head the same budget."""


def on_gpu(worker: Worker, blocks_on_gpu: bool) -> None:
    """Makes the worker's cache, and what it keeps of requests, pass for a GPU's."""
    layers = [PagedKVCache.of(cache.as_subclass(OnGPU), HEAD_SIZE, row_major_keys=True) for cache in worker.caches]
    weights, rotation = worker.compactor.output_weights, worker.compactor.rotation
    assert rotation is not None
    worker.compactor = replace(
        worker.compactor,
        layers=layers,
        output_weights=lambda layer: weights(layer).as_subclass(OnGPU),
        rotation=replace(rotation, table=rotation.table.as_subclass(OnGPU)),
    )

    def there(compaction):
        scores, ring, blocks = compaction.prompt_scores, compaction.ring, compaction.source_blocks
        if scores is not None:
            scores = PromptScores(scores.scores.as_subclass(OnGPU), scores.aux.as_subclass(OnGPU))
        if ring is not None:
            ring = QueryRing(ring._ring.as_subclass(OnGPU))
        blocks = blocks.int()  # as runners have them
        if blocks_on_gpu:
            blocks = blocks.as_subclass(OnGPU)
        return replace(compaction, prompt_scores=scores, ring=ring, source_blocks=blocks)

    worker.first, worker.second = [there(one) for one in worker.first], [there(one) for one in worker.second]


@pytest.fixture
def reference_operators():
    ops.choose("reference")
    yield
    ops.choose(None)


PARTS = {"attention_matching": ("keydiff", {"merger": "attention_matching"})}
PARTS |= {"threshold": ("h2o", {"allocator": "threshold", "threshold": 0.01})}
"""Parts that are in no preset."""


@pytest.mark.parametrize(
    ("policy", "blocks_on_gpu"),
    # Where the block ids are is nothing to a policy: one that drops, one that merges, one with queries of its own, and
    # one with uneven budgets have them on the GPU too.
    [(one, False) for one in (*PRESETS, *PARTS)] + [(one, True) for one in ("h2o", "keepkv", "morphkv", "adakv")],
    ids=lambda value: {False: "runner-v1", True: "runner-v2"}.get(value, value),
)
def test_compactions_by_the_reference(policy, blocks_on_gpu, reference_operators):
    """Nothing of the CPU's meets what is on the GPU, and what is sent there is sent from pinned memory.

    Where entries are dropped, nothing is waited for either: the forward pass may still run.
    """
    with SimulatedGPU(may_wait=policy not in DROPPING, must_pin=True):
        policy, fields = PARTS.get(policy, (policy, {}))
        worker = Worker(policy, LENGTHS, **fields)
        on_gpu(worker, blocks_on_gpu)
        for step in (worker.first, worker.second):
            done = worker.compactor.execute(step)
            assert done.counts.device == GPU and done.counts.shape == (len(LENGTHS), 6) and not done.failures


@pytest.mark.parametrize("policy", ["keepkv", "snapkv", "morphkv"])
def test_a_refresh_copies_layers_to_the_gpu(policy, reference_operators):
    """The complete cache stays on the host, of which nothing may meet what is on the GPU."""
    with SimulatedGPU(may_wait=True, must_pin=True):
        worker = Worker(policy, LENGTHS[:1], refresh={"every": 16, "queries": 8})
        on_gpu(worker, blocks_on_gpu=False)
        (first,) = worker.first
        pool, total = worker.compactor.layers, LENGTHS[0]
        complete = ExternalCache.empty(pool, total)
        complete.append(pool, first.source_blocks, total, 0)
        worker.compactor.run([first])
        window, update, scale = worker.config.refresh_window, score_update(worker.config), worker.compactor.scale
        queries = torch.randn(len(pool), 8, NUM_HEADS * GROUPS, HEAD_SIZE, device=GPU)
        scores = complete.scores(QueryRing(queries), window, update, scale) if window else None
        segments = {"front": first.plan.new_front, "tail": total}
        plan = replace(first.plan, purpose="refresh")
        refreshed = replace(first, plan=plan, prompt_scores=scores, complete=complete, **segments)
        done = worker.compactor.execute([refreshed])
        assert done.counts.device == GPU and not done.failures
        merged, evicted, *_ = done.counts.sum(0).tolist()
        assert merged + evicted == (total - 50) * len(pool) * pool[0].num_kv_heads
    assert all(not isinstance(layer.keys, OnGPU) for layer in complete.layers)


@pytest.mark.parametrize("policy", ["snapkv", "keepkv"])
def test_coded_fronts_are_written_as_on_the_cpu(policy, reference_operators):
    found = []
    for is_on_gpu in (True, False):
        with SimulatedGPU(may_wait=True, must_pin=True):
            worker = Worker(policy, LENGTHS, front="int8", decode="grow")
            on_gpu(worker, blocks_on_gpu=True)
            if not is_on_gpu:
                worker = Worker(policy, LENGTHS, front="int8", decode="grow")
                layers = [PagedKVCache.of(cache, HEAD_SIZE, row_major_keys=True) for cache in worker.caches]
                worker.compactor = replace(worker.compactor, layers=layers)
            done = worker.compactor.execute([replace(one, coding="int8") for one in worker.first])
        assert not done.failures and all(pages.coding(0) for pages in done.pages.values())
        found.append((worker.bytes, [one.table() for one in done.pages.values()]))
    assert torch.equal(found[0][0], found[1][0])
    assert all(map(torch.equal, found[0][1], found[1][1])) and all(table[-1] == 1 for table in found[0][1])


@pytest.mark.parametrize("policy", ["adakv", "d2o"])
def test_heads_get_pages_of_their_own(policy, reference_operators):
    """Their shares are waited for; what is written is what is written on the CPU, at first and from pages."""
    found = []
    for is_on_gpu in (True, False):
        with SimulatedGPU(may_wait=True, must_pin=True):
            worker, pages = Worker(policy, LENGTHS), {}
            on_gpu(worker, blocks_on_gpu=True)
            if not is_on_gpu:
                worker = Worker(policy, LENGTHS)
                layers = [PagedKVCache.of(cache, HEAD_SIZE, row_major_keys=True) for cache in worker.caches]
                worker.compactor = replace(worker.compactor, layers=layers)
            for step in (worker.first, worker.second):
                plans = [replace(one.plan, blocks=one.plan.blocks[:4], share_blocks=4) for one in step]
                numbered = enumerate(zip(step, plans, strict=True))
                step = [
                    replace(one, plan=plan, pages=pages.get(index), has_pages=True) for index, (one, plan) in numbered
                ]
                done = worker.compactor.execute(step)
                assert not done.failures
                pages = done.pages
        found.append((worker.bytes, [one.table() for one in pages.values()]))
    assert torch.equal(found[0][0], found[1][0])
    for table, other in zip(found[0][1], found[1][1], strict=True):
        assert torch.equal(table, other)
    assert len(pages[0].fronts.unique()) > 1
    with SimulatedGPU(must_pin=True):
        assert CUDACompression._table(SimpleNamespace(_device=GPU), pages[0]).device == GPU
