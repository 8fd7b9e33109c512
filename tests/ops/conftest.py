"""Random paged caches and the dense sequences they stand for."""

import importlib.util
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.engine.cuda.gpu import GPU, WAITS, SimulatedGPU
from tests.entries import write_front
from tests.ops.on_gpu import OnGPU
from vllm_kvmerge.ops import AttentionBatch, PagedKVCache, SequenceLayers, cell_bytes, cpu, reference, write_tokens
from vllm_kvmerge.ops.types import NO_UPDATE, QUANTISED, ScoreMode, ScoreUpdate, Softmax, stored
from vllm_kvmerge.policies.base import DEAD, Entries

NUM_BLOCKS = 256
"""Of a cache."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3} | dict.fromkeys(QUANTISED, 1e-2)
"""By dtype of the cache; quantised ones have queries in bfloat16."""


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@dataclass
class Sequence:
    """One request: its segments, its blocks, and its live entries in float64 (``[H, n, d]`` and ``[H, n]``)."""

    front: int
    tail: int
    seq_len: int
    blocks: Tensor
    keys: Tensor
    values: Tensor
    log_votes: Tensor


class CacheMaker:
    """Fills a paged cache with random sequences in shuffled blocks; everything else in it is poison."""

    def __init__(
        self,
        seed: int,
        num_kv_heads: int,
        head_size: int,
        block_size: int,
        dtype: torch.dtype,
        interleaved: bool = False,
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.num_kv_heads, self.head_size, self.block_size, self.dtype = num_kv_heads, head_size, block_size, dtype
        elements = cell_bytes(head_size, dtype) // dtype.itemsize
        self.cache = torch.full((NUM_BLOCKS, num_kv_heads, block_size, elements), torch.nan, dtype=dtype)
        self.scales = {"key_scale": 0.5, "value_scale": 2.0} if dtype in QUANTISED else {}
        self.interleaved = interleaved
        self.query_dtype = torch.bfloat16 if dtype in QUANTISED else dtype
        self.pages = self.views(self.cache)
        self._free = (torch.randperm(NUM_BLOCKS - 1, generator=self.generator) + 1).tolist()

    def views(self, cache: Tensor) -> PagedKVCache:
        """Of one like this maker's."""
        return PagedKVCache.of(cache, self.head_size, **self.scales, interleaved=self.interleaved)

    def stored(self, rows: Tensor, plane: str) -> Tensor:
        """What the plane holds of float32 rows, in float64."""
        scale = self.pages.scale_of(plane)
        return stored(rows / scale, self.dtype).double() * scale

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def sequence(self, front: int, tail: int, seq_len: int, num_dead: int = 0) -> Sequence:
        bs, heads, d = self.block_size, self.num_kv_heads, self.head_size
        num_blocks = -(-seq_len // bs)
        blocks = torch.zeros(num_blocks, dtype=torch.int32)
        used = set(range(-(-front // bs))) | set(range(tail // bs, num_blocks))
        for index in used:
            blocks[index] = self._free.pop()
        entries = Entries(
            keys=self.randn(heads, front, d),
            values=self.randn(heads, front, d),
            log_votes=self.randn(heads, front).abs(),
            scores=torch.zeros(heads, front),
            aux=torch.zeros(heads, front),
            positions=torch.arange(front).expand(heads, -1).clone(),
        )
        dead = torch.zeros(heads, front, dtype=torch.bool)
        dead[:, :num_dead] = True
        entries.kill(dead)
        write_front(self.pages, blocks, entries)
        key, value = self.randn(seq_len - tail, heads, d), self.randn(seq_len - tail, heads, d)
        slots = torch.arange(tail, seq_len)
        write_tokens(self.pages, blocks[slots // bs].long() * bs + slots % bs, key, value)
        stored_keys = self.stored(torch.cat([entries.keys, key.transpose(0, 1)], 1), "keys")
        stored_values = self.stored(torch.cat([entries.values, value.transpose(0, 1)], 1), "values")
        log_votes = torch.cat([entries.log_votes, torch.zeros(heads, seq_len - tail)], 1).double()
        assert (entries.positions[:, :num_dead] == DEAD).all()
        return Sequence(front, tail, seq_len, blocks, stored_keys, stored_values, log_votes)

    def layers(self, s: Sequence) -> SequenceLayers:
        return SequenceLayers.of(self.pages, s.blocks, s.front, s.tail, s.seq_len)


class Watch(TorchFunctionMode):
    """Refuses what waits for a GPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        assert name not in WAITS, f"{name} waits for the GPU"
        return function(*args, **(kwargs or {}))


def by_the_rule(lengths: list[int], slots: int, least: int, step: int = 64) -> tuple[list[int], list[int], list[int]]:
    """(pieces, parts, order), as ``Division.lists``: the share is the smallest number of whole steps with which
    ``slots`` blocks at a time could do all, one for each piece of a row longer than it, and the others for the rest
    together."""

    def fits(share: int) -> bool:
        blocks = sum(-(-length // share) for length in lengths if length > share)
        return sum(length for length in lengths if length <= share) <= (slots - blocks) * share

    share = next(share for share in range(least, 1 << 30, step) if fits(share))
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    counts = [-(-length // share) for length in lengths]
    pieces = [row for row in order for _ in range(counts[row])]
    firsts = [sum(counts[other] for other in order[: order.index(row)]) for row in range(len(lengths))]
    return pieces, [number for pair in zip(firsts, counts, strict=True) for number in pair], order


def cuda_module(name: str) -> ModuleType:
    """A file of csrc/cuda."""
    path = Path(__file__).parents[2] / "csrc" / "cuda" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"cuda_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # which dataclasses look up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def emulated_library(request) -> Path:
    """``--emulated-library``, or the CUDA operators, built for the CPU unless their sources are as they were."""
    given = request.config.getoption("--emulated-library", default=None)
    if given is not None:
        return given.resolve()
    compiler = shlex.split(os.environ.get("CXX", "c++"))[0]
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no C++ compiler {compiler!r}")
    builder = cuda_module("build")
    library = Path(__file__).parents[2] / "build" / "_cuda_emulated.so"
    changed = max(path.stat().st_mtime for path in builder.SOURCES.iterdir())
    if not library.exists() or library.stat().st_mtime < changed:
        builder.build(library, library.parent / "cuda" / "emulated", emulated=True)
    return library


def cuda_on_gpu() -> OnGPU:
    """CUDA's operators on this machine's GPU; skips a test where there is no GPU or they were not built."""
    from vllm_kvmerge.ops import cuda

    if not torch.cuda.is_available():
        pytest.skip("there is no GPU that PyTorch can use")
    if not cuda.LIBRARY.exists():
        pytest.skip("the operators in CUDA C++ are not built: make cuda")
    cuda.library()  # one that was built and cannot be loaded is a fault
    return OnGPU(cuda, torch.device("cuda"))


@contextmanager
def row_major_caches() -> Iterator[None]:
    """Caches with keys row by row, as on a GPU, unless they are asked for as on the CPU."""
    of = PagedKVCache.of

    def row_major(cache: Tensor, head_size: int, row_major_keys: bool = True, **more) -> PagedKVCache:
        return of(cache, head_size, row_major_keys, **more)

    with mock.patch.object(PagedKVCache, "of", row_major):
        yield


@contextmanager
def emulated(library: Path) -> Iterator[ModuleType]:
    """CUDA's operators, emulated on the CPU."""
    from vllm_kvmerge.ops import cuda

    cuda.use(library)
    try:
        with row_major_caches():
            yield cuda
    finally:
        cuda.use(None)


@pytest.fixture
def cuda(emulated_library):
    with emulated(emulated_library) as operators:
        yield operators


def complete(module: ModuleType) -> SimpleNamespace:
    """A module's operators, and the reference's where it has none."""
    return SimpleNamespace(**(vars(reference) | vars(module)))


def pytest_generate_tests(metafunc):
    if any(mark.args[0] == "operators" for mark in metafunc.definition.iter_markers("parametrize")):
        return
    if "operators" in metafunc.fixturenames:
        own = getattr(metafunc.module, "OPERATORS", None)
        levels = cpu.levels() if cpu.LIBRARY.exists() else []
        if not metafunc.config.getoption("all"):
            levels = levels[:1]
        interpreted = ["triton"] if os.environ.get("TRITON_INTERPRET") == "1" else []
        on_gpu = ["triton-gpu"] if torch.cuda.is_available() and not interpreted else []
        metafunc.parametrize("operators", own or ["plain-torch", *interpreted, *levels, *on_gpu], indirect=True)


@pytest.fixture
def operators(request):
    """The module of operators: the reference, then the native ones on every level that this machine runs, or in the
    fast layer on the best one.

    With TRITON_INTERPRET=1 also Triton's, in its interpreter; ``test_triton`` starts a process like that. CUDA's, in
    the emulation, where a module says so with ``OPERATORS``. Names that end with ``-gpu``: on copies of all tensors on
    a GPU, where there is one; of these cases, tests/conftest.py takes a sample.
    """
    params = request.node.callspec.params
    if request.param.startswith("cuda") and (params.get("dtype") in QUANTISED or params.get("head_size", 0) > 256):
        pytest.skip("CUDA C++ has no operator for heads above 256 or caches of 8 bits: Triton's are taken")
    if request.param == "cuda-gpu":
        yield cuda_on_gpu()
    elif request.param == "triton-gpu":
        with row_major_caches():  # codes that are copied as other numbers must lie here as there
            yield OnGPU(complete(pytest.importorskip("vllm_kvmerge.ops.triton")), torch.device("cuda"))
    elif request.param == "reference-gpu":  # without a GPU: tensors that cannot be mixed with the CPU's
        with SimulatedGPU(may_wait=True), row_major_caches():
            yield OnGPU(reference, GPU)
    elif request.param == "cuda":
        yield request.getfixturevalue("cuda")
    elif request.param == "plain-torch":
        yield reference
    elif request.param == "triton":
        with row_major_caches():
            yield complete(pytest.importorskip("vllm_kvmerge.ops.triton"))
    else:
        before = cpu.level()
        cpu.set_level(request.param)
        yield cpu
        cpu.set_level(before)


SUM, MEAN, EMA = ScoreUpdate(ScoreMode.SUM, 0.9), ScoreUpdate(ScoreMode.MEAN, 1.0), ScoreUpdate(ScoreMode.LOG_EMA, 0.8)
UPDATES = [None, SUM, MEAN, EMA]
SOFTMAXES = ["plain", "capped", "sinks", "capped-sinks"]


def softmax_of(maker: CacheMaker, kind: str, num_kv_heads: int, groups: int) -> Softmax:
    """One of ``SOFTMAXES``, whose cap and sinks matter beside logits of about 1."""
    sinks = 2.0 + maker.randn(num_kv_heads, groups) if "sinks" in kind else None
    return Softmax(0.7 if "capped" in kind else 0.0, sinks)


def block_table(sequences: list[Sequence]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence([s.blocks for s in sequences], batch_first=True)


def batch_of(
    sequences: list[Sequence],
    query_lens: list[int],
    updates: list[ScoreUpdate | None],
    max_query_len: int | None = None,
) -> AttentionBatch:
    """A batch of these sequences, whose tokens follow one another."""
    lens = torch.tensor(query_lens, dtype=torch.int32)
    segments = [[s.seq_len, s.front, s.tail] for s in sequences]
    chosen = [update or NO_UPDATE for update in updates]
    return AttentionBatch(
        block_table(sequences),
        lens.cumsum(0, dtype=torch.int32) - lens,
        lens,
        *torch.tensor(segments, dtype=torch.int32).T.contiguous().unbind(),
        torch.tensor([update.mode.code for update in chosen], dtype=torch.int32),
        torch.tensor([update.decay for update in chosen]),
        max_query_len,
    )


def row_major_copies(maker: CacheMaker, row_major: bool = True) -> tuple[PagedKVCache, PagedKVCache]:
    """Two caches with the same entries; the second one's keys lie as on a GPU."""
    theirs = maker.views(maker.cache.clone())
    ours = PagedKVCache.of(maker.cache.clone(), maker.head_size, row_major, **maker.scales)
    ours.keys.copy_(maker.pages.keys)
    return theirs, ours


def statistics(pages: PagedKVCache, sequences: list[Sequence]) -> tuple[Tensor, Tensor]:
    """Scores and aux of all live entries."""
    located = [SequenceLayers.of(pages, s.blocks, s.front, s.tail, s.seq_len) for s in sequences]
    planes = [reference.gather_metadata(one)[1:3] for one in located]
    scores, aux = (torch.cat(some, 1) for some in zip(*planes, strict=True))
    return scores, aux


def first_in_window(position, window, chunked):
    """Position of the first token that the one at ``position`` sees."""
    return position - position % window if chunked else max(0, position - window + 1)


def padded(batch: AttentionBatch, max_query_len: int | None) -> AttentionBatch:
    """The batch with two more rows, without queries, as captured graphs are padded."""
    return batch.map(lambda t: torch.nn.functional.pad(t, (0, 0, 0, 2) if t.dim() == 2 else (0, 2)), max_query_len)
