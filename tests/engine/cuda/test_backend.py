"""The CUDA backend without a GPU: what it asks of one, and what graphs may rely on.

``tests/ops/test_triton.py`` runs ``test_backend_interpreted``.
"""

import os
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)


from tests.engine.cuda.gpu import GPU, OnGPU, SimulatedGPU  # noqa: E402
from tests.engine.cuda.scene import GROUPS, HEAD_SIZE, HEADS, MAX_ROWS, Request, Scene  # noqa: E402
from tests.ops.triton_compiler import launches  # noqa: E402
from vllm_kvmerge.engine.attention import cuda  # noqa: E402
from vllm_kvmerge.engine.attention.cuda import CUDAAttentionBackend, CUDAAttentionBuilder, CUDAAttentionImpl  # noqa: E402
from vllm_kvmerge.engine.attention.flash import FlashBatch  # noqa: E402
from vllm_kvmerge.engine.attention.rows import BatchRow, PromptScores, QueryRing, ScoreWindow  # noqa: E402
from vllm_kvmerge.engine.support import UnsupportedConfigError  # noqa: E402
from vllm_kvmerge.ops import ScoreMode, ScoreUpdate  # noqa: E402

SUM = ScoreUpdate(ScoreMode.SUM, 0.9)


def ring(window: int, device=GPU) -> QueryRing:
    return QueryRing.empty(1, window, HEADS * GROUPS, HEAD_SIZE, torch.float32, device)


def batches(scene: Scene) -> dict[str, list[Request]]:
    """Decoding: all rows have one token. Mixed: chunks and prompts too."""
    window = ScoreWindow(5, SUM, PromptScores.empty(1, HEADS, 90, GPU))
    decoding = [
        scene.compressed(37, 64, 99, 1, SUM, ring=ring(4)),
        scene.plain(70, 1),
        scene.compressed(20, 50, 77, 1, ScoreUpdate(ScoreMode.LOG_EMA, 0.8), ring=ring(2)),
        scene.paged(64, 80, 95, 1, SUM),
        scene.coded(70, 80, 99),
    ]
    mixed = [
        *decoding,
        scene.plain(90, 40, window=window, ring=ring(6)),
        scene.compressed(17, 30, 45, 3, SUM),
    ]
    return {"decoding": decoding, "mixed": mixed}


@pytest.mark.parametrize("with_flash", [False, True])
@pytest.mark.parametrize(
    ("kind", "window", "owner"), [("decoding", 0, None), ("mixed", 0, None), ("mixed", 0, "other"), ("mixed", 50, None)]
)
def test_nothing_waits_for_the_gpu(kind, window, owner, with_flash, gpu, monkeypatch):
    """Building metadata, writing the cache, attention: no value is read, no tensor crosses over but as it should."""
    flashed = []

    def attend(self, *arguments):
        flashed.append(arguments)
        return torch.zeros(HEADS * GROUPS, self.num_tokens, device=GPU)

    monkeypatch.setattr(FlashBatch, "attend", attend)
    with SimulatedGPU():
        scene = Scene(0, device=GPU, window=window)
        scene.impl.kv_sharing_target_layer_name = owner
        scene.builder.keeps_queries, scene.builder.uses_flash = True, with_flash
        scene.impl.flash_version = 2
        requests = batches(scene)[kind]
    if window:
        requests = [replace(one, row=BatchRow()) for one in requests]
    scene.finish_cache()
    common = scene.common(requests)
    scene.cache = scene.cache.as_subclass(OnGPU)
    num_tokens = sum(request.num_tokens for request in requests)
    with SimulatedGPU(), launches() as found:
        metadata = scene.builder.build(0, common)
        slots = torch.zeros(num_tokens, dtype=torch.int64, device=GPU)
        new = torch.zeros(num_tokens, HEADS, HEAD_SIZE, device=GPU)
        scene.impl.do_kv_cache_update(scene.layer, new, new, scene.cache, slots)
        scene.forward(metadata, num_tokens)
    names = {launch.kernel.__name__ for launch in found}
    assert len(flashed) == (with_flash and (kind == "mixed" or window > 0))
    if flashed and window:  # there all rows are plain
        assert names == {"write"}
        return
    assert {"write", "attend"} <= names and ("finish" in names or window)
    assert ("keep" in names) == (not window and owner is None)
    assert ("update_columns" in names) == (kind == "mixed" and not window)


@pytest.mark.parametrize("seed", range(20))
def test_every_row_is_attended_to_once(seed):
    """By a part that is told of at least as many queries as it has, and of not many more."""
    rng = np.random.default_rng(seed)
    scene = Scene(seed)
    num_rows = int(rng.integers(1, MAX_ROWS + 1))
    lens = np.where(rng.random(num_rows) < 0.4, 1, rng.integers(1, 41, num_rows))
    requests = []
    for length in lens:
        seq_len = int(length + rng.integers(0, 60))
        requests.append(Request(scene.maker.sequence(0, 0, seq_len), int(length), BatchRow(3, 5)))
    metadata = scene.builder.build(0, scene.common(requests))
    seen = []
    for part in metadata.parts:
        longest = int(part.query_lens.max())
        least = int(part.query_lens.min())
        assert longest <= part.max_query_len <= max(longest, cuda.shortest_chunk(GROUPS))
        assert longest <= 2 * least or part.max_query_len == cuda.shortest_chunk(GROUPS)
        assert (part.max_query_len == 1) == (longest == 1)
        assert (part.fronts == 3).all()
        seen += zip(part.query_starts.tolist(), part.query_lens.tolist(), part.seq_lens.tolist(), strict=True)
    starts = np.cumsum(lens) - lens
    wanted = [(int(a), r.num_tokens, r.sequence.seq_len) for a, r in zip(starts, requests, strict=True)]
    assert sorted(seen) == wanted


def test_decoding_is_one_part_at_one_address():
    """Whatever the rows are, full graphs read the same buffers."""
    scene = Scene(3)
    scene.builder.keeps_queries = True
    requests = [Request(scene.maker.sequence(9, 20, 30 + i), 1, BatchRow()) for i in range(MAX_ROWS)]
    scene.finish_cache()
    captured = scene.builder.build_for_cudagraph_capture(scene.common(requests))
    assert (scene.seq_lens == 1).all(), "warm-ups must not read max_model_len slots"
    kept = ring(4, torch.device("cpu"))
    paged, coded = scene.paged(64, 80, 95, 1, SUM).row, scene.coded(40, 80, 95).row
    for some in (
        [paged],
        [coded],
        [BatchRow()],
        [BatchRow(9, 20, SUM, ring=kept)],
        [BatchRow(ring=kept)],
        [BatchRow()] * 3,
    ):
        step = [Request(requests[i].sequence, 1, row) for i, row in enumerate(some)]
        metadata = scene.builder.build(0, scene.common(step, num_rows=MAX_ROWS))
        (part,), (first,) = metadata.parts, captured.parts
        assert part.max_query_len == first.max_query_len == 1
        assert [tensor.data_ptr() for tensor in part.tensors] == [tensor.data_ptr() for tensor in first.tensors]
        table = some[0].table
        assert part.tables.addresses.data_ptr() == captured.parts[0].tables.addresses.data_ptr()
        assert part.tables.coded and first.tables.coded
        assert part.tables.addresses.tolist() == [0 if table is None else table.data_ptr(), *[0] * (MAX_ROWS - 1)]
        assert part.query_lens.tolist() == [1] * len(some) + [0] * (MAX_ROWS - len(some))
        address = 0 if some[0].ring is None else kept.address(29)
        assert captured.kept.addresses.tolist() == [address, *[0] * (MAX_ROWS - 1)]
        assert (metadata.kept is not None) == (some[0].ring is not None)


def test_what_vllm_is_told():
    for operator in ("merge_entries", "paged_attention", "write_tokens"):
        config = SimpleNamespace(additional_config={"kvmerge": {"operators": {operator: "reference"}}})
        support = CUDAAttentionBuilder.get_cudagraph_support(config, None)
        assert (support == AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE) == (operator == "merge_entries")
        assert (support == AttentionCGSupport.NEVER) == (operator != "merge_entries")
    assert not CUDAAttentionBackend.forward_includes_kv_cache_update
    assert AttentionBackendEnum[CUDAAttentionBackend.get_name()] is AttentionBackendEnum.CUSTOM
    assert [layout.name for layout in CUDAAttentionBackend.supported_kv_cache_layouts()] == ["LBHNC"]
    common = {"device_capability": (9, 0), "use_mla": False, "use_sparse": False}
    common |= {"has_sink": False, "use_mm_prefix": False, "use_per_head_quant_scales": False, "attn_type": "decoder"}

    def reasons(**changed) -> list[str]:
        given = {"head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 32}
        return CUDAAttentionBackend.validate_configuration(**(common | given | changed))

    assert reasons() == reasons(has_sink=True) == reasons(has_sliding_window=True) == []
    for changed in (
        {"head_size": 512},
        {"kv_cache_dtype": "fp8_ds_mla"},
        {"block_size": 24},
        {"use_mla": True},
        {"use_non_causal": True},
        {"use_kv_connector": True},
        {"use_batch_invariant": True},
    ):
        assert len(reasons(**changed)) == 1, changed


def test_vllms_cuda_platform_takes_the_backend(monkeypatch):
    """The very function that chooses it in a worker with a GPU."""
    # Its compiled operators, which a build for the CPU has not, are not needed for this.
    monkeypatch.setitem(sys.modules, "vllm._C_stable_libtorch", ModuleType("vllm._C_stable_libtorch"))
    from vllm.platforms import current_platform
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    from vllm_kvmerge.engine.compat import register_attention_backend

    monkeypatch.setattr(current_platform, "is_cuda", lambda: True, raising=False)
    register_attention_backend()
    monkeypatch.setattr(NonNvmlCudaPlatform, "get_device_capability", lambda device_id=0: DeviceCapability(9, 0))
    selected = AttentionSelectorConfig(head_size=128, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=32)
    path = NonNvmlCudaPlatform.get_attn_backend_cls(AttentionBackendEnum.CUSTOM, selected)
    assert path == "vllm_kvmerge.engine.attention.cuda.CUDAAttentionBackend"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"alibi_slopes": [0.5]}, "ALiBi"),
        ({"attn_type": "encoder"}, "only decoder attention"),
        ({"head_size": 300}, "head size 300"),
    ],
)
def test_layers_that_are_refused(changed, said):
    arguments = {"num_heads": 4, "head_size": 64, "scale": 0.125, "num_kv_heads": 2} | changed
    with pytest.raises(UnsupportedConfigError, match=said):
        CUDAAttentionImpl(**arguments)
