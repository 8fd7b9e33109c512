"""Which batches may run as one captured graph, and what a worker keeps of requests."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from tests.engine.cuda.scene import GROUPS, HEAD_SIZE, HEADS
from vllm_kvmerge.engine.attention.rows import BatchRow
from vllm_kvmerge.engine.messages import Compress, CompressionStep, HeadCounts, Score, attached_report
from vllm_kvmerge.engine.worker import reporting, tensor_parallel
from vllm_kvmerge.engine.worker.compaction import Execution
from vllm_kvmerge.engine.worker.compression import Compression
from vllm_kvmerge.engine.worker.cuda_runner import CUDARunnerMixin

CPU = torch.device("cpu")


@pytest.fixture
def compression() -> Compression:
    """With one layer."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.float32), parallel_config=SimpleNamespace(data_parallel_index=0)
    )
    made = Compression(config, CPU)
    made._compactor = SimpleNamespace(layers=[SimpleNamespace(num_kv_heads=HEADS)], num_kv_heads=HEADS, block_size=16)
    made._query_shape = (HEADS * GROUPS, HEAD_SIZE)
    return made


def begin(compression: Compression, score: dict[str, Score] | None = None, gone: set[str] | None = None) -> None:
    compression.begin(
        SimpleNamespace(
            kvmerge=CompressionStep(score=score or {}),
            finished_req_ids=gone or set(),
            scheduled_spec_decode_tokens={},
            preempted_req_ids=None,
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set()),
        )
    )


def test_batches_that_python_has_to_see(compression):
    assert not compression.needs_python([("plain", 1, 9)])
    assert compression.rows([("plain", 1, 9)]) == []
    snapkv = Score(40, '{"policy": "snapkv", "budget": 40}', 0)
    begin(compression, {"a": snapkv})
    assert not compression.needs_python([("a", 30, 0)]), "none of these queries is asked for"
    assert compression.needs_python([("plain", 1, 9), ("a", 1, 49)]), "a prompt's last token, computed like decoding"
    assert [row.window is not None for row in compression.rows([("plain", 1, 9), ("a", 1, 49)])] == [False, True]
    compression.states["a"].front, compression.states["a"].tail = 20, 50
    begin(compression)
    assert not compression.needs_python([("a", 1, 50)])
    assert compression.rows([("a", 1, 50)])[0].front == 20


def test_rings_of_requests(compression):
    """However many requests keep queries, and however many queries each, graphs write to their rings."""
    texts = [
        f'{{"policy": "morphkv", "budget": {20 + n}, "recent_window": {4 + n}, "tracker": "none"}}' for n in range(40)
    ]
    windows = {str(index): Score(0, text, 4 + index) for index, text in enumerate(texts)}
    begin(compression, windows)
    rows = compression.rows([(name, 1, 9) for name in windows])
    assert [row.ring.window for row in rows] == list(range(4, 44))
    assert len({row.ring.address(9) for row in rows}) == 40
    assert not any(row.needs_python for row in rows)
    begin(compression, windows, gone={"0"})
    assert "0" not in compression.states and len(compression.states) == 39
    assert compression.row("none", 1, 9) == BatchRow()


def test_runner_v1_keeps_them_out_of_full_graphs(compression, monkeypatch):
    seen = []
    monkeypatch.setattr(
        GPUModelRunner, "_determine_batch_execution_and_padding", lambda self, *args, **kwargs: seen.append(kwargs)
    )
    runner = object.__new__(CUDARunnerMixin)
    runner.compression = compression
    runner._scheduled = {"a": 1}
    runner.input_batch = SimpleNamespace(req_ids=["a"], num_computed_tokens_cpu=[49])
    runner._determine_batch_execution_and_padding(num_tokens=1)
    begin(compression, {"a": Score(40, '{"policy": "snapkv", "budget": 40}', 0)})
    runner._determine_batch_execution_and_padding(num_tokens=1)
    runner._determine_batch_execution_and_padding(num_tokens=1, force_uniform_decode=True)
    assert [kwargs.get("force_uniform_decode") for kwargs in seen] == [None, False, True]


def test_a_head_that_several_workers_hold_is_counted_once(compression, monkeypatch):
    """Four workers, two KV heads: the first and the third have one each, the others hold the same. What requests are
    told counts both."""
    config = compression._config
    config.parallel_config.tensor_parallel_size = 4
    config.model_config.hf_text_config = None
    config.model_config.model_arch_config = [SimpleNamespace(total_num_kv_heads=2)]
    compression._compactor.execute = lambda compactions, begun: Execution(
        torch.tensor([[3, 5, 1, 9, 2, 7]]), {}, {}, {}, {}, []
    )
    of_all = torch.tensor([[3, 5, 1, 9, 2, 7]] * 2 + [[1, 2, 0, 8, 3, 5]] * 2).unsqueeze(-1)
    group = SimpleNamespace(cpu_group=None, all_gather=lambda bits, dim: of_all.view(bits.dtype))
    monkeypatch.setattr(tensor_parallel, "get_tp_group", lambda: group)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *arguments: None)
    plan = Compress("a", '{"policy": "h2o", "budget": 40}', "context", 50, 50, 40, 40, [0])
    counted = []
    for rank in range(4):
        monkeypatch.setattr(tensor_parallel, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
        monkeypatch.setattr(reporting, "count_entries", lambda *counts, rank=rank: counted.append((rank, counts)))
        compression.step = CompressionStep(compress=[plan])
        compression.run_plans(lambda request: torch.tensor([0]))
    assert counted == [(0, ("h2o", 0, 3, 5, 1)), (2, ("h2o", 0, 3, 5, 1))]
    told = attached_report(compression.reporter.attach_to(ModelRunnerOutput([], {}))).counts
    assert told == {"a": HeadCounts(heads=2 * HEADS, merged=4, evicted=7, kept=17, least=2, most=7)}


def test_tokens_do_not_wait_for_numbers_of_compactions(compression, monkeypatch):
    """On a GPU they go with the next step's output, but for those that the scheduler needs at once."""
    event = SimpleNamespace(synchronize=lambda: None, query=lambda: False)
    monkeypatch.setattr(reporting.Arriving, "of", lambda counts: reporting.Arriving(counts, event))
    reporter, counts = compression.reporter, torch.tensor([[3, 5, 1, 9, 2, 7]])
    heads = tensor_parallel.HeadShare(0, 1, 1)

    def told():
        return set(attached_report(reporter.attach_to(ModelRunnerOutput([], {}))).counts)

    reporter.add_counts(["a"], counts, heads, HEADS, is_awaited=False)
    assert told() == set()
    reporter.add_counts(["b"], counts, heads, HEADS, is_awaited=True)
    assert told() == {"a", "b"}
    assert told() == set()
