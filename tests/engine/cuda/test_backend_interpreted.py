"""The CUDA backend's numbers, with Triton's operators in the interpreter. Run by ``tests/ops/test_triton.py``."""

import os
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET=1 is not set", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")
from triton.runtime.interpreter import InterpretedFunction  # noqa: E402

from tests.engine.cuda.scene import GROUPS, HEAD_SIZE, HEADS, MAX_ROWS, Request, Scene  # noqa: E402
from tests.ops.conftest import first_in_window  # noqa: E402
from tests.ops.test_cpu import relative_error  # noqa: E402
from vllm_kvmerge import ops  # noqa: E402
from vllm_kvmerge.engine.attention.rows import BatchRow, PromptScores, QueryRing, ScoreWindow  # noqa: E402
from vllm_kvmerge.ops import NO_UPDATE, ScoreMode, ScoreUpdate  # noqa: E402
from vllm_kvmerge.ops.types import QUANTISED  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16, *QUANTISED]
SUM, EMA = ScoreUpdate(ScoreMode.SUM, 0.9), ScoreUpdate(ScoreMode.LOG_EMA, 0.8)


@pytest.fixture(autouse=True)
def triton_operators():
    ops.choose("triton")
    yield
    ops.choose(None)


def ring(window: int, dtype=torch.float32) -> QueryRing:
    return QueryRing.empty(1, window, HEADS * GROUPS, HEAD_SIZE, dtype)


@pytest.mark.parametrize(("dtype", "interleaved"), [*((one, False) for one in DTYPES), (torch.float32, True)], ids=str)
def test_a_batch_of_everything(dtype, interleaved):
    """Decoding, chunks and whole prompts, plain and compressed, scored and kept, with heads' own pages and without, in
    no particular order."""
    scene = Scene(1, dtype, interleaved=interleaved)
    window = ScoreWindow(5, SUM, PromptScores.empty(1, HEADS, 90))
    short, long, whole = (ring(size, scene.query.dtype) for size in (4, 3, 6))
    requests = [
        scene.paged(64, 96, 120, 1, SUM),
        scene.compressed(20, 50, 77, num_tokens=9, update=EMA),
        scene.paged(96, 128, 150, 3, ScoreUpdate(ScoreMode.MEAN, 1.0)),
        scene.plain(90, 40, window=window, ring=short),
        scene.compressed(17, 200, 210, update=EMA, ring=long),
        scene.plain(30, 30, ring=whole),
    ]
    scene.builder.keeps_queries = True
    metadata = scene.check(requests)
    assert [part.max_query_len for part in metadata.parts] == [1, 9, 9, 30, 40]  # three tokens count as nine
    query = scene.query[1 + 9 + 3 :][:40]
    scene.check_window(requests[3], query)
    assert torch.equal(short.queries(90)[0], query[-4:])
    assert torch.equal(long.queries(210)[0, -1], scene.query[1 + 9 + 3 + 40])
    assert torch.equal(whole.queries(30)[0], scene.query[1 + 9 + 3 + 40 + 1 :][24:30])


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_coded_fronts_beside_others(dtype):
    """Each part is told whether it has some."""
    scene = Scene(6, dtype)
    requests = [
        scene.coded(70, 96, 120),
        scene.paged(64, 96, 120, 20, SUM),
        scene.plain(33, 1),
        scene.coded(100, 130, 171, 3),
        scene.compressed(20, 50, 77, num_tokens=40, update=EMA),
        scene.coded(33, 48, 49),
    ]
    metadata = scene.check(requests)
    assert [part.max_query_len for part in metadata.parts] == [1, 9, 20, 40]
    assert [part.tables and part.tables.coded for part in metadata.parts] == [True, True, False, None]
    alone = scene.builder.build(0, scene.common([replace(requests[2], num_tokens=1)]))
    assert alone.parts[0].tables.coded, "a captured graph may stand for it"


class Graph(TorchDispatchMode):
    """What a GPU would capture: launches and operations on tensors. ``replay`` does the same to the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function._schema.is_mutable:
            self.steps.append(lambda: function(*args, **(kwargs or {})))
        elif function is not torch.ops.aten.empty.memory_format:  # what a graph allocates is its own
            # Anything else would leave memory behind that a replay must fill again.
            assert all(returned.alias_info is not None for returned in function._schema.returns), function
        return result

    def replay(self) -> None:
        for step in self.steps:
            step()


def captured(monkeypatch, scene: Scene, sequence) -> Graph:
    """A forward pass of dummies."""
    dummies = [Request(sequence, 1, BatchRow()) for _ in range(MAX_ROWS)]
    scene.forward(scene.builder.build_for_cudagraph_capture(scene.common(dummies)), MAX_ROWS)  # allocates
    metadata = scene.builder.build_for_cudagraph_capture(scene.common(dummies))
    graph, launch = Graph(), InterpretedFunction.run

    def recorded(kernel, *args, **kwargs):
        graph.steps.append(lambda: launch(kernel, *args, **kwargs))

    with monkeypatch.context() as patch, graph:
        patch.setattr(InterpretedFunction, "run", recorded)
        scene.forward(metadata, MAX_ROWS)
    return graph


def replayed(graph: Graph, scene: Scene, requests: list[Request]) -> None:
    """Checks the output of ``requests``."""
    scene.builder.build(0, scene.common(requests, num_rows=MAX_ROWS))
    expected = scene.expected(requests)
    graph.replay()
    assert relative_error(scene.output[: len(requests)], expected) < 1e-5
    assert scene.output[len(requests) :].isnan().all()


def in_window(scene, seq_len, num_tokens=1) -> Request:
    """A plain request, of whose tokens those that no query sees any more are poison."""
    first = first_in_window(seq_len - num_tokens, scene.window, scene.chunked) if scene.window else 0
    return Request(scene.maker.sequence(0, first, seq_len), num_tokens, BatchRow())


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_layer_with_a_window(dtype, chunked):
    """Decoding, chunks and whole prompts, longer than the window and shorter."""
    scene = Scene(4, dtype, window=50, chunked=chunked)
    scene.check([in_window(scene, *one) for one in ((200, 1), (30, 1), (90, 40), (70, 70), (49, 3), (400, 5))])


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_a_layer_that_reads_anothers_cache(num_tokens):
    """It updates no scores, keeps no queries and scores no prompt; but for that it attends as the other does."""
    scene, kept = Scene(5), ring(4)
    scene.impl.kv_sharing_target_layer_name = "owner"
    window = ScoreWindow(5, SUM, PromptScores.empty(1, HEADS, 90))
    requests = [
        scene.compressed(37, 64, 99, num_tokens, SUM, ring=kept),
        scene.paged(64, 80, 95, num_tokens, EMA),
        scene.plain(90, num_tokens, window=window),
    ]
    scene.finish_cache()
    scene.builder.keeps_queries = True
    metadata = scene.builder.build(0, scene.common(requests))
    before = scene.scores(scene.ours, requests)
    expected = scene.expected(requests)
    scene.forward(metadata, len(expected))
    assert relative_error(scene.output[: len(expected)], expected) < 1e-5
    assert torch.equal(scene.scores(scene.ours, requests), before)
    assert not torch.equal(scene.scores(scene.theirs, requests), before)
    assert not kept.queries(99).any() and not window.prompt_scores.scores.any()


def test_a_captured_graph_holds_for_every_batch(monkeypatch):
    """Captured once with dummies, then replayed for batches of other requests, sizes, fronts, updates and rings."""
    scene, first, second = Scene(2), ring(4), ring(2)
    batches = [
        [
            scene.compressed(37, 64, 99, update=SUM, ring=first),
            scene.plain(70, 1),
            scene.compressed(20, 50, 77, update=EMA),
            scene.compressed(33, 33, 40, ring=second),
            scene.paged(64, 80, 95, 1, SUM),
            scene.coded(50, 90, 133),
        ],
        [scene.plain(5, 1) for _ in range(2)],
        [scene.compressed(90, 300, 411, update=SUM, ring=second), scene.paged(96, 128, 133, 1, NO_UPDATE)],
        [scene.plain(70, 1), scene.coded(130, 150, 170), scene.coded(5, 30, 31)],
        [scene.compressed(16, 20, 20 + n, update=EMA) for n in range(1, MAX_ROWS + 1)],
    ]
    scene.finish_cache()
    scene.builder.keeps_queries = True
    graph = captured(monkeypatch, scene, batches[0][1].sequence)
    assert len(graph.steps) >= 3
    for requests in batches:
        for one in (first, second):
            one._ring.zero_()
        replayed(graph, scene, requests)
        assert relative_error(scene.scores(scene.ours, requests), scene.scores(scene.theirs, requests)) < 1e-4
        for one in (first, second):
            written = torch.zeros_like(one._ring[0])
            for index, request in enumerate(requests):
                if request.row.ring is one:
                    written[(request.sequence.seq_len - 1) % one.window] = scene.query[index]
            assert torch.equal(one._ring[0], written)
