"""Plain rows on vLLM's FlashAttention, with a stand-in for its compiled operators (``flash_attention``)."""

from types import SimpleNamespace

import pytest
import torch

from tests.engine.cuda import flash_attention
from tests.engine.cuda.scene import GROUPS, HEADS, MAX_ROWS, Scene
from vllm_kvmerge.engine.attention import flash
from vllm_kvmerge.engine.attention.rows import PromptScores, ScoreWindow
from vllm_kvmerge.ops import ScoreMode, ScoreUpdate

SUM, EMA = ScoreUpdate(ScoreMode.SUM, 0.9), ScoreUpdate(ScoreMode.LOG_EMA, 0.8)


@pytest.fixture(params=[2, 3])
def flashing(request):
    """A scene whose plain rows may be FlashAttention's, of one version, and the calls of that."""
    with flash_attention.installed(request.param) as calls:

        def make(seed: int, **options) -> Scene:
            scene = Scene(seed, torch.bfloat16, **options)
            assert scene.impl.flash_version == request.param
            scene.builder.uses_flash = True
            return scene

        yield make, calls


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_batch_of_everything(flashing, interleaved):
    """Plain and compressed rows in no particular order, decoding, chunks and prompts, some of them scored."""
    make, calls = flashing
    scene = make(1, interleaved=interleaved)
    window = ScoreWindow(5, SUM, PromptScores.empty(1, HEADS, 90))
    requests = [
        scene.compressed(37, 64, 99, update=SUM),
        scene.plain(70, 9),
        scene.compressed(20, 50, 77, 3, EMA),
        scene.plain(90, 40, window=window),
        scene.compressed(17, 200, 210, update=EMA),
        scene.plain(30, 30),
    ]
    scene.check(requests)
    assert len(calls) == 1
    scene.check_window(requests[3], scene.query[1 + 9 + 3 :][:40])


def test_plain_rows_are_not_ours(flashing):
    """Ours gets the others alone, of which FlashAttention sees as little as it may; without any it is not called."""
    make, calls = flashing
    scene = make(2)
    requests = [scene.plain(70, 9), scene.compressed(20, 50, 77), scene.plain(40), scene.plain(30, 30)]
    scene.finish_cache()
    metadata = scene.builder.build(0, scene.common(requests))
    assert [part.fronts.tolist() for part in metadata.parts] == [[20]]
    assert metadata.flash.seq_lens.tolist() == [70, 1, 40, 30]
    del requests[1]
    common = scene.common(requests)
    metadata = scene.builder.build(0, common)
    assert metadata.parts == []
    # As stock vLLM calls it: nothing is computed for it.
    assert metadata.flash.seq_lens.data_ptr() == common.seq_lens.data_ptr()
    assert metadata.flash.query_starts.data_ptr() == common.query_start_loc.data_ptr()
    scene.check(requests)
    assert len(calls) == 1


def test_decoding_is_ours_unless_all_rows_are_plain(flashing):
    """Where a full graph may run, nothing is prepared that it does not use; a captured one is ours throughout."""
    make, calls = flashing
    scene = make(3)
    requests = [scene.plain(length) for length in (5, 99, 70, 33)]
    scene.check(requests)
    assert len(calls) == 1
    padded = scene.builder.build(0, scene.common(requests, MAX_ROWS))
    assert padded.flash is not None and padded.parts == []  # a graph replays what was captured
    captured = scene.builder.build_for_cudagraph_capture(scene.common(requests))
    assert captured.flash is None and len(captured.parts) == 1
    mixed = [*requests[:3], scene.compressed(20, 50, 77, update=SUM)]
    assert scene.builder.build(0, scene.common(mixed)).flash is None
    scene.check(mixed)
    only = [scene.compressed(20, 50, 77, 4), scene.compressed(3, 50, 60)]
    assert scene.builder.build(0, scene.common(only)).flash is None
    assert len(calls) == 1


def test_layers_with_a_window_and_such_that_read_anothers_cache(flashing):
    make, calls = flashing
    scene = make(4, window=50)
    scene.impl.kv_sharing_target_layer_name = "owner"
    # What lies before a window is numbers: of a tile that FlashAttention reads, a mask hides no others.
    requests = [scene.plain(*one) for one in ((200, 1), (30, 1), (90, 40), (70, 70), (49, 3), (400, 5))]
    scene.check(requests)
    assert len(calls) == 1


@pytest.mark.parametrize("capped", [False, True])
def test_soft_caps_and_sinks(flashing, capped):
    make, calls = flashing
    scene = make(5)
    if capped:
        scene.impl.logits_soft_cap = 0.7
    if scene.impl.flash_version == 3:
        scene.impl.sinks = 2.0 + torch.randn(HEADS * GROUPS).bfloat16()
    scene.check([scene.plain(70, 9), scene.compressed(20, 50, 77, update=SUM), scene.plain(40)])
    assert len(calls) == 1


def layer(**changed) -> SimpleNamespace:
    return SimpleNamespace(
        **{"flash_version": 3, "chunked": False, "sinks": None, "num_heads": 8, "window": 0} | changed
    )


@pytest.mark.parametrize(
    ("impls", "dtypes", "said"),
    [
        ([layer(), layer()], "bfloat16", None),
        ([layer(flash_version=2)], "float16", None),
        ([layer(window=512)], "bfloat16", None),
        ([layer(sinks=torch.zeros(8, dtype=torch.bfloat16))], "bfloat16", None),
        ([], "bfloat16", "no FlashAttention"),
        ([layer(), layer(flash_version=None)], "bfloat16", "no FlashAttention"),
        ([layer()], "float32", "the model is torch.float32 and the cache torch.float32"),
        ([layer()], "float8_e4m3fn", "the model is torch.bfloat16 and the cache torch.float8_e4m3fn"),
        ([layer()], "float16 bfloat16", "the model is torch.bfloat16 and the cache torch.float16"),
        ([layer(), layer(chunked=True)], "bfloat16", "chunked"),
        ([layer(flash_version=2, sinks=torch.zeros(8, dtype=torch.bfloat16))], "bfloat16", "no sinks"),
        ([layer(sinks=torch.zeros(8))], "bfloat16", "sinks are torch.float32"),
        ([layer(sinks=torch.zeros(96, dtype=torch.bfloat16), num_heads=96)], "bfloat16", "of 96 heads"),
    ],
)
def test_layers_that_it_does_not_suit(impls, dtypes, said):
    cache, *model = (getattr(torch, name) for name in dtypes.split())
    model = model[0] if model else torch.bfloat16 if cache == torch.float8_e4m3fn else cache
    found = flash.obstacle(impls, cache, model, may_hold_nan=False)
    assert found is None if said is None else said in found
    beside_states = flash.obstacle(impls, cache, model, may_hold_nan=True)
    has_window = found is None and impls[0].window > 0
    assert "before a window" in beside_states if has_window else beside_states == found


def test_no_version_without_its_operators():
    """Neither where vLLM has no such library, nor where an empty file stands in for it."""
    assert flash.version_for(128, 0.0, False) is None
    with flash_attention.installed(2), pytest.MonkeyPatch.context() as patch:
        assert flash.version_for(128, 0.0, False) == 2
        patch.setitem(flash.OPERATORS, 2, ("_vllm_fa2_C", "not_there"))
        assert flash.version_for(128, 0.0, False) is None
