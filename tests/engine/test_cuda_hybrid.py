"""Models whose layers are of several kinds on vLLM's GPU model runners: the tokens of the CPU's runner."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from vllm import SamplingParams

from tests.engine.architectures import BYTES_PER_BLOCK, NUM_BLOCKS, arguments, running
from tests.engine.conftest import random_prompt
from tests.engine.full_graphs import SIZES
from tests.engine.test_cuda_runners import TOLERANCE, on_cpu
from tests.gpu.compare import NUM_CANDIDATES, Generated, Tolerance, assert_all_close
from tests.models.architectures import write_model
from tests.random_model import write_gemma, write_gemma3n, write_granite, write_llama4, write_qwen3_next
from vllm_kvmerge import compression

pytestmark = [pytest.mark.engine, pytest.mark.slow]

pytest.importorskip("triton", reason="Triton is not installed")

SOME: dict[str, dict] = {
    "h2o": {"decode": "bounded"}, "snapkv": {}, "keepkv": {"prefill": {"chunk": 30}}, "adakv": {}, "morphkv": {},
}  # fmt: skip
OTHERS: dict[str, dict] = {"streaming_llm": {"decode": "bounded", "positions": "cache"}, "kvzip": {"chunk_size": 60}}
"""Which not all of these models take."""


@dataclass(frozen=True)
class Case:
    """A model, and what it is asked for.

    num_blocks: of the pool, too few for four requests. block_bytes: of one, in as many layers as a group has. options:
    of both engines. has_states: of Mamba or linear attention, beside which no context is shared compressed. tolerance:
    where its operators round to 16 bits, and what is computed in other chunks is rounded otherwise. has_flash:
    FlashAttention suits some of its layers. preempts: where blocks suffice for a repetition, they may for all.
    """

    write: Callable[[Path], Path]
    policies: dict[str, dict] = field(default_factory=lambda: SOME)
    num_blocks: int = 32
    block_bytes: int = BYTES_PER_BLOCK
    options: dict = field(default_factory=dict)
    has_states: bool = False
    tolerance: Tolerance | None = None
    has_flash: bool = True
    preempts: bool = True

    def jobs(self) -> list:
        """(prompt, extra arguments, tokens to generate), more than run at once."""
        rng, told = np.random.default_rng(31), [(None, {}), *self.policies.items(), (None, {})]
        shared, found = random_prompt(rng, 120), []
        for index, (policy, fields) in enumerate(told):
            length = int(rng.integers(90, 150))
            prompt = [*shared[: length // 2], *random_prompt(rng, length)[length // 2 :]]
            extra = None if policy is None else compression(policy, budget=40, interval=4, **fields)
            found.append((prompt, extra, 12 if index % 2 else 8))
        # A context that another has compressed, with its window.
        context, extra = random_prompt(rng, 110), compression("adakv", budget=40, context_tokens=110)
        return found + [(context + random_prompt(rng, 20)[1:], extra, 3) for _ in range(5)]


CASES = {
    "gemma3": Case(write_gemma, SOME | OTHERS, preempts=False),
    "gpt-oss": Case(partial(write_model, name="gpt-oss"), num_blocks=26, has_flash=False),
    "gemma3n": Case(write_gemma3n, num_blocks=26),
    "llama4": Case(write_llama4, num_blocks=20, options={"max_model_len": 192}),
    "granite": Case(
        write_granite,
        num_blocks=9,
        block_bytes=2 * BYTES_PER_BLOCK,
        options={"enable_prefix_caching": False},  # with one, vLLM's CPU build fails on Mamba layers
        has_states=True,
    ),
    "qwen3-next": Case(
        write_qwen3_next,
        num_blocks=15,
        block_bytes=2 * 2 * 64 * (2 * 256 * 2 + 16),
        options={"dtype": "bfloat16"},  # vLLM's CPU build has linear attention in no other
        has_states=True,
        tolerance=Tolerance(most=0.35, mean=0.2),
    ),
}


@pytest.fixture(scope="module")
def served(request, tmp_path_factory) -> tuple[Case, Path, list]:
    """A case, its model, and what the CPU's runner generates."""
    case = CASES[request.param]
    folder = case.write(tmp_path_factory.mktemp(request.param))
    params = [
        SamplingParams(temperature=0, max_tokens=num, ignore_eos=True, logprobs=NUM_CANDIDATES, extra_args=extra)
        for _, extra, num in case.jobs()
    ]
    memory = {"kv_cache_memory_bytes": NUM_BLOCKS * case.block_bytes}
    with running(folder, **memory | case.options) as engine:
        outputs = engine.generate([prompt for prompt, *_ in case.jobs()], params)
        engine.assert_empty()
    return case, folder, [output.outputs[0] for output in outputs]


ON_BOTH_RUNNERS = "gemma3", "granite"
"""Windows and states."""
OF_EACH = [
    pytest.param(name, is_v2, marks=[pytest.mark.gpu_code] if is_v2 and name not in ON_BOTH_RUNNERS else [])
    for name in CASES
    for is_v2 in (False, True)
]


@pytest.mark.parametrize(
    ("served", "is_v2"),
    OF_EACH,
    ids=lambda one: one if isinstance(one, str) else ("v1", "v2")[one],
    indirect=["served"],
)
def test_tokens_of_the_cpu_runner(served, is_v2):
    """With asynchronous scheduling, full graphs, preemptions and prefixes that are found. On V2 plain rows outside
    graphs are FlashAttention's, where it suits a kind of layers."""
    case, folder, expected = served
    options = {
        "async_scheduling": True,
        "enforce_eager": False,
        "max_model_len": 256,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 100,
        "kv_cache_memory_bytes": case.num_blocks * case.block_bytes,
        **case.options,
    }
    result = on_cpu(arguments(folder, **options), case.jobs(), [], is_v2, flash=3 if is_v2 else 0)
    if case.tolerance is None:
        assert result["tokens"] == [list(one.token_ids) for one in expected]
        assert result["logprobs"] == pytest.approx([one.cumulative_logprob for one in expected], abs=TOLERANCE)
    else:
        found = [Generated.parse(one) for one in result["generated"]]
        assert_all_close(found, [Generated.of(one) for one in expected], case.tolerance, folder.name)
    assert len({token for tokens in result["tokens"] for token in tokens}) > 30  # what they read decides
    assert result["graphs"]["captured"] == len(SIZES) and result["graphs"]["replayed"] > 2
    assert (result["preempted"] > 0 or not case.preempts) and result["paged_rows"] > 10
    assert (result["adopted"] > 0) != case.has_states
    assert (result["cached"] > 0) == case.options.get("enable_prefix_caching", True)
    assert (result["flash"] > 20) == (is_v2 and case.has_flash)
    assert (result["is_v2"], result["states"]) == (is_v2, [])
    assert result["lost_blocks"] == 0
