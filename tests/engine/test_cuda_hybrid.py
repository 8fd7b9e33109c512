"""Models whose layers are of several kinds on vLLM's GPU model runners: the tokens of the CPU's runner."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.engine.conftest import random_prompt
from tests.engine.full_graphs import SIZES
from tests.engine.test_cuda_runners import TOLERANCE, on_cpu
from tests.engine.test_hybrid import BYTES_PER_BLOCK, arguments, running
from tests.models.architectures import write_model
from tests.random_model import write_gemma, write_gemma3n
from vllm import SamplingParams
from vllm_kvmerge import compression

pytestmark = pytest.mark.engine

pytest.importorskip("triton", reason="Triton is not installed")

MODELS: dict[str, Callable[[Path], Path]] = {
    "gemma3": write_gemma,
    "gpt-oss": partial(write_model, name="gpt-oss"),
    "gemma3n": write_gemma3n,
}
NUM_RINGS, NUM_BLOCKS = 1, 34


def jobs() -> list:
    """(prompt, extra arguments, tokens to generate), more than run at once."""
    rng, found = np.random.default_rng(31), []
    shared = random_prompt(rng, 150)
    for index, (policy, fields) in enumerate(
        (
            (None, {}),
            ("h2o", {"decode": "bounded", "interval": 8}),
            ("snapkv", {}),
            ("keepkv", {"interval": 8}),
            (None, {}),
            ("adakv", {}),
            ("morphkv", {"interval": 8}),
            ("snapkv", {"decode": "bounded", "interval": 8, "allocator": "adaptive"}),
            ("streaming_llm", {"interval": 8, "positions": "cache", "decode": "bounded"}),
            ("keepkv", {"interval": 8, "prefill": {"chunk": 40}}),
            ("adakv", {"interval": 8, "prefill": {"chunk": 40}}),
            ("kvzip", {"chunk_size": 60}),
            (None, {}),
        )
    ):
        length = int(rng.integers(90, 220))
        prompt = [*shared[: length // 2], *random_prompt(rng, length)[length // 2 :]]
        extra = None if policy is None else compression(policy, budget=40, **fields)
        found.append((prompt, extra, 24 if index % 2 else 10))
    # Contexts that others have compressed, with their windows.
    for policy in ("snapkv", "adakv"):
        context, extra = random_prompt(rng, 130), compression(policy, budget=40, context_tokens=130)
        found += [(context + random_prompt(rng, 20)[1:], extra, 6) for _ in range(4)]
    return found


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory) -> tuple[Path, list]:
    """A model, and what the CPU's runner generates."""
    folder = MODELS[request.param](tmp_path_factory.mktemp(request.param))
    params = [
        SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=0, extra_args=extra)
        for _, extra, num_tokens in jobs()
    ]
    with running(folder) as engine:
        outputs = engine.generate([prompt for prompt, *_ in jobs()], params)
        engine.assert_empty()
    return folder, [output.outputs[0] for output in outputs]


@pytest.mark.parametrize("is_v2", [False, True], ids=["v1", "v2"])
def test_tokens_of_the_cpu_runner(model, is_v2):
    """With asynchronous scheduling, full graphs, preemptions and prefixes that are found."""
    folder, expected = model
    options = {
        "async_scheduling": True,
        "enforce_eager": False,
        "max_model_len": 512,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 100,
        "kv_cache_memory_bytes": NUM_BLOCKS * BYTES_PER_BLOCK,
        "additional_config": {"kvmerge": {"query_rings": NUM_RINGS}},
    }
    result = on_cpu(arguments(folder, **options), jobs(), [], [], is_v2=is_v2)
    assert result["tokens"] == [list(one.token_ids) for one in expected]
    assert result["logprobs"] == pytest.approx([one.cumulative_logprob for one in expected], abs=TOLERANCE)
    assert len({token for tokens in result["tokens"] for token in tokens}) > 50  # what they read decides
    assert result["graphs"]["captured"] == len(SIZES) and result["graphs"]["replayed"] > 20
    assert result["preempted"] > 0 and result["paged_rows"] > 100 and result["adopted"] > 2
    assert (result["is_v2"], result["free_rings"], result["states"]) == (is_v2, NUM_RINGS, [])
    assert result["lost_blocks"] == 0
