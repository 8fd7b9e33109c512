"""Plain rows on vLLM's FlashAttention, with a stand-in for its compiled operators (``flash_attention``)."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from tests.engine.cuda import flash_attention
from tests.engine.cuda.scene import GROUPS, HEADS, MAX_ROWS, SCALE, Request, Scene
from tests.ops.test_cpu import relative_error
from vllm_kvmerge.engine.attention import flash
from vllm_kvmerge.engine.attention.rows import BatchRow, PromptScores, ScoreWindow
from vllm_kvmerge.ops import NO_UPDATE, ScoreMode, ScoreUpdate, reference

SUM, EMA = ScoreUpdate(ScoreMode.SUM, 0.9), ScoreUpdate(ScoreMode.LOG_EMA, 0.8)
TOLERANCE = 1e-2
"""Of what is rounded to bfloat16."""


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("window", [0, 9])
def test_the_stand_in_is_attention(version, window):
    """As PyTorch's own: rows of several lengths, in pages in any order, some of their heads' queries sharing keys."""
    generator = torch.Generator().manual_seed(window)
    cache = torch.randn(2, 7, 3, 16, 32, generator=generator).bfloat16()
    keys, values = cache.transpose(2, 3)
    table = torch.randperm(7, generator=generator)[:6].view(2, 3).int()
    lens, used = (1, 20), (40, 33)
    query = torch.randn(21, 6, 32, generator=generator).bfloat16()
    output, starts = torch.empty_like(query), torch.tensor([0, 1, 21], dtype=torch.int32)
    with flash_attention.installed(version) as calls:
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        _, lse = flash_attn_varlen_func(
            query, keys, values, 20, starts, 40, seqused_k=torch.tensor(used, dtype=torch.int32), causal=True,
            window_size=[window - 1, 0] if window else None, block_table=table, out=output, return_softmax_lse=True,
            fa_version=version,
        )  # fmt: skip
        assert calls == [version]
    for row, (count, length) in enumerate(zip(lens, used, strict=True)):
        tokens = slice(starts[row], starts[row + 1])
        q = query[tokens].transpose(0, 1).float()
        k, v = (one[table[row].long()].flatten(0, 1)[:length].transpose(0, 1).float() for one in (keys, values))
        position, entry = torch.arange(length - count, length).unsqueeze(1), torch.arange(length)
        seen = (entry <= position) & ((entry > position - window) if window else True)
        expected = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True).transpose(0, 1)
        assert relative_error(output[tokens].float(), expected) < TOLERANCE
        logits = (q @ k.repeat_interleave(2, 0).mT * 32**-0.5).masked_fill(~seen, -torch.inf)
        assert torch.allclose(lse[:, tokens], logits.logsumexp(-1), atol=1e-4)


def test_the_stand_in_demands_what_the_real_one_does():
    def call(**changed) -> None:
        numbers = {"dtype": torch.int32}
        given = {
            "q": torch.zeros(3, 4, 32, dtype=torch.float16),
            "k": torch.zeros(4, 16, 2, 32, dtype=torch.float16),
            "max_seqlen_q": 2,
            "cu_seqlens_q": torch.tensor([0, 1, 3], **numbers),
            "max_seqlen_k": 20,
            "seqused_k": torch.tensor([5, 20], **numbers),
            "block_table": torch.zeros(2, 2, **numbers),
            "causal": True,
        }
        given |= changed
        flash_attn_varlen_func(**given, v=given["k"], out=torch.empty_like(given["q"]))

    with flash_attention.installed(2):
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        call()
        for wrong in (
            {"q": torch.zeros(3, 4, 32)},
            {"k": torch.zeros(4, 12, 2, 32, dtype=torch.float16)},
            {"cu_seqlens_q": torch.tensor([0, 1, 3])},
            {"seqused_k": torch.tensor([5, 0], dtype=torch.int32)},
            {"seqused_k": torch.tensor([5, 21], dtype=torch.int32)},
            {"max_seqlen_q": 1},
            {"block_table": torch.zeros(2, 2, 2, dtype=torch.int32)[..., 0]},
        ):
            with pytest.raises((AssertionError, RuntimeError)):
                call(**wrong)
        with pytest.raises(NotImplementedError, match="s_aux"):
            call(s_aux=torch.zeros(4))


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


def plain(scene: Scene, seq_len: int, num_tokens: int = 1, **row) -> Request:
    return Request(scene.maker.sequence(0, 0, seq_len), num_tokens, BatchRow(**row))


def compressed(scene: Scene, front: int, tail: int, seq_len: int, num_tokens: int = 1, update=NO_UPDATE) -> Request:
    return Request(scene.maker.sequence(front, tail, seq_len), num_tokens, BatchRow(front, tail, update))


def check(scene: Scene, requests: list[Request], num_rows: int | None = None) -> None:
    """Output and scores are the reference's."""
    scene.finish_cache()
    metadata = scene.builder.build(0, scene.common(requests, num_rows))
    expected = scene.expected(requests)
    scene.forward(metadata, len(expected))
    assert relative_error(scene.output[: len(expected)].float(), expected.float()) < TOLERANCE
    assert scene.output[len(expected) :].isnan().all()
    assert relative_error(scene.scores(scene.ours, requests), scene.scores(scene.theirs, requests)) < 1e-4


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_batch_of_everything(flashing, interleaved):
    """Plain and compressed rows in no particular order, decoding, chunks and prompts, some of them scored."""
    make, calls = flashing
    scene = make(1, interleaved=interleaved)
    window = ScoreWindow(5, SUM, PromptScores.empty(1, HEADS, 90))
    requests = [
        compressed(scene, 37, 64, 99, update=SUM),
        plain(scene, 70, 9),
        compressed(scene, 20, 50, 77, 3, EMA),
        plain(scene, 90, 40, window=window),
        compressed(scene, 17, 200, 210, update=EMA),
        plain(scene, 30, 30),
    ]
    check(scene, requests)
    assert len(calls) == 1
    statistics, query = torch.zeros(2, HEADS, 90), scene.query[1 + 9 + 3 :][:40]
    reference.score_prompt_queries(query[-5:], scene.theirs, requests[3].sequence.blocks, SUM, SCALE, *statistics)
    assert relative_error(window.prompt_scores.scores[0], statistics[0]) < 1e-4


def test_plain_rows_are_not_ours(flashing):
    """Ours gets the others alone, of which FlashAttention sees as little as it may; without any it is not called."""
    make, calls = flashing
    scene = make(2)
    requests = [plain(scene, 70, 9), compressed(scene, 20, 50, 77), plain(scene, 40), plain(scene, 30, 30)]
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
    check(scene, requests)
    assert len(calls) == 1


def test_decoding_is_ours_unless_all_rows_are_plain(flashing):
    """Where a full graph may run, nothing is prepared that it does not use; a captured one is ours throughout."""
    make, calls = flashing
    scene = make(3)
    requests = [plain(scene, length) for length in (5, 99, 70, 33)]
    check(scene, requests)
    assert len(calls) == 1
    padded = scene.builder.build(0, scene.common(requests, MAX_ROWS))
    assert padded.flash is not None and padded.parts == []  # a graph replays what was captured
    captured = scene.builder.build_for_cudagraph_capture(scene.common(requests))
    assert captured.flash is None and len(captured.parts) == 1
    mixed = [*requests[:3], compressed(scene, 20, 50, 77, update=SUM)]
    assert scene.builder.build(0, scene.common(mixed)).flash is None
    check(scene, mixed)
    only = [compressed(scene, 20, 50, 77, 4), compressed(scene, 3, 50, 60)]
    assert scene.builder.build(0, scene.common(only)).flash is None
    assert len(calls) == 1


def test_layers_with_a_window_and_such_that_read_anothers_cache(flashing):
    make, calls = flashing
    scene = make(4, window=50)
    scene.impl.kv_sharing_target_layer_name = "owner"
    # What lies before a window is numbers: of a tile that FlashAttention reads, a mask hides no others.
    requests = [plain(scene, *one) for one in ((200, 1), (30, 1), (90, 40), (70, 70), (49, 3), (400, 5))]
    check(scene, requests)
    assert len(calls) == 1


@pytest.mark.parametrize("capped", [False, True])
def test_soft_caps_and_sinks(flashing, capped):
    make, calls = flashing
    scene = make(5)
    if capped:
        scene.impl.logits_soft_cap = 0.7
    if scene.impl.flash_version == 3:
        scene.impl.sinks = 2.0 + torch.randn(HEADS * GROUPS).bfloat16()
    check(scene, [plain(scene, 70, 9), compressed(scene, 20, 50, 77, update=SUM), plain(scene, 40)])
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


def test_windows_over_blocks_of_states_are_ours():
    numbers = torch.bfloat16, torch.bfloat16
    assert flash.obstacle([layer(window=512)], *numbers, may_hold_nan=False) is None
    assert flash.obstacle([layer()], *numbers, may_hold_nan=True) is None
    assert "window" in (flash.obstacle([layer(window=512)], *numbers, may_hold_nan=True) or "")


def test_no_version_without_its_operators():
    """Neither where vLLM has no such library, nor where an empty file stands in for it."""
    assert flash.version_for(128, 0.0, False) is None
    with flash_attention.installed(2), pytest.MonkeyPatch.context() as patch:
        assert flash.version_for(128, 0.0, False) == 2
        patch.setitem(flash.OPERATORS, 2, ("_vllm_fa2_C", "not_there"))
        assert flash.version_for(128, 0.0, False) is None
