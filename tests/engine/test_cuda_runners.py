"""vLLM's GPU model runners with compression generate, on the CPU, the tokens that the CPU's runner generates."""

import json
import os
import sys
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from tests import preloaded
from tests.demo_model import BLOCK_SIZE, BYTES_PER_BLOCK, bytes_per_block
from tests.engine.conftest import engine_arguments, random_prompt
from tests.engine.full_graphs import SIZES
from tests.gpu.compare import NUM_CANDIDATES, Generated
from tests.gpu.setting import Setting
from tests.gpu.test_serving import FEW_CHECKS, check
from tests.vllm_library import needs_avx512
from vllm_kvmerge import compression, demo

pytestmark = [pytest.mark.engine, pytest.mark.slow]

pytest.importorskip("triton", reason="Triton is not installed")

MAX_TOKENS = 100
NUM_BLOCKS = 11
SMALL = engine_arguments() | {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": MAX_TOKENS}
CHATS = {"h2o": "bounded", "morphkv": "bounded", "adakv": "bounded", "snapkv": "grow"}
"""Policies that go on from turn to turn, and how."""

TOLERANCE = 1e-3
"""Of the sum of a request's log-probabilities."""


def jobs() -> list:
    """(prompt, extra arguments, tokens to generate), more than run at once."""
    rng = np.random.default_rng(21)
    shared = random_prompt(rng, 150)
    told = [
        None,
        compression("keepkv", budget=48, interval=8),
        compression("morphkv", budget=40, interval=8),
        compression("h2o", budget=0.5, context_tokens=70),
        None,
        compression("grkv", budget=64),
        compression("snapkv", budget=40, decode="bounded", interval=5),
        compression("zsmerge", budget=40, interval=8),
        compression("morphkv", budget=50, interval=4),
        compression("streaming_llm", budget=33, interval=1),
        compression("adakv", budget=40),
        compression("pyramidkv", budget=64, interval=8),
        compression("d2o", budget=64),
    ]
    found = []
    for index, extra in enumerate(told):
        length = int(rng.integers(72, 180))
        prompt = [*shared[: min(length // 2, 96)], *random_prompt(rng, length)[length // 2 :]]
        found.append((prompt, extra, 24 if index % 2 else 9))
    # It is compressed at the end of its prompt and gone with the next step, in which another takes its row.
    found.insert(3, (random_prompt(rng, 90), compression("keepkv", budget=40), 1))
    # Steps that look like decoding, of which Python has to see the queries: of the second of two that are compressed
    # while they generate, and the last chunk of a prompt.
    for _ in range(2):
        found.append((random_prompt(rng, 60), compression("morphkv", budget=60, interval=30), 60))
    found.append((random_prompt(rng, MAX_TOKENS + 1), compression("snapkv", budget=40), 12))
    # Contexts that internal requests repeat, of which Python sees the queries.
    for length, fields in ((90, {"chunk_size": 60}), (110, {"context_tokens": 80})):
        found.append((random_prompt(rng, length), compression("kvzip", budget=40, **fields), 16))
    # Contexts that are compressed while they are computed, in several chunks.
    for policy, fields in (("snapkv", {}), ("h2o", {"score_window": "all"}), ("adakv", {}), ("keepkv", {})):
        extra = compression(policy, budget=40, interval=8, prefill={"chunk": 20}, **fields)
        found.append((random_prompt(rng, 110), extra, 12))
    # Positions that count the entries of the cache, beside others in batches and graphs.
    chunks = {"prefill": {"chunk": 20}}
    for policy, fields in (("streaming_llm", {}), ("morphkv", {}), ("adakv", chunks), ("keepkv", {})):
        extra = compression(policy, budget=40, interval=8, decode="bounded", positions="cache", **fields)
        found.append((random_prompt(rng, 90), extra, 30))
    # Fronts in 8 bits, in batches and graphs with others.
    for policy, fields in (("snapkv", {}), ("adakv", {}), ("kvzip", {"context_tokens": 80}), ("zsmerge", {})):
        extra = compression(policy, budget=40, decode="grow", front="int8", **fields)
        found.append((random_prompt(rng, 100), extra, 20))
    # Contexts that others have compressed, some of them all of the prompt; as many as are not lost to other requests.
    for policy, fields in (("snapkv", {}), ("morphkv", {}), ("adakv", {"decode": "bounded"})):
        context, extra = random_prompt(rng, 97), compression(policy, budget=33, context_tokens=97, **fields)
        for index in range(9):
            question = random_prompt(rng, 20)[1:] if index % 3 else []
            found.append((context + question, extra, 8))
    return found


@pytest.fixture(scope="module")
def expected(engine) -> list:
    """What the CPU's runner generates."""
    outputs = engine.generate([prompt for prompt, *_ in jobs()], [greedy(extra, n) for _, extra, n in jobs()])
    return [output.outputs[0] for output in outputs]


def answered(engine, *asked) -> tuple[tuple, list[int], float]:
    """A turn of a chat: (prompt, extra arguments, tokens to generate, tokens that end it), and what the CPU's runner
    answers with its log-probability."""
    prompt, extra, num_tokens, stop = asked
    params = greedy(extra, num_tokens)
    params.stop_token_ids = stop
    answer = engine.generate([prompt], params)[0].outputs[0]
    return asked, list(answer.token_ids), answer.cumulative_logprob


def stopped(engine, rng: np.random.Generator, extra: dict) -> tuple[tuple, list[int], float]:
    """A turn that ends with a stop token, before its last. Its prompt is random."""
    while True:
        prompt = random_prompt(rng, 80)
        _, tokens, _ = answered(engine, prompt, extra, 12, [])
        for index in range(4, 11):
            if tokens[index] not in tokens[:index]:
                return answered(engine, prompt, extra, 12, [tokens[index]])


@pytest.fixture(scope="module")
def chats(engine) -> list[list]:
    """Of three turns, of which the first ends with a stop token; and one of two, of which the first is compressed again
    by the step that is in flight then."""
    rng, found = np.random.default_rng(22), []

    def following(turn, extra):
        (prompt, *_), answer, _ = turn
        return answered(engine, prompt + answer + random_prompt(rng, 20)[1:], extra, 12, [])

    for policy, decode in CHATS.items():
        extra = compression(policy, budget=40, interval=39, decode=decode, reuse="turns")
        with engine.sharing_contexts():
            turns = [stopped(engine, rng, extra)]
            for _ in range(2):
                turns.append(following(turns[-1], extra))
        found.append(turns)
    first = stopped(engine, rng, compression("keepkv", budget=40, interval=39, decode="bounded"))
    (prompt, _, *more), answer, logprob = first
    extra = compression("keepkv", budget=40, interval=len(answer), decode="bounded", reuse="turns")
    found.append([((prompt, extra, *more), answer, logprob), following(first, extra)])
    return found


def on_cpu(
    arguments: dict,
    jobs: list,
    chats: list,
    is_v2: bool = False,
    has_graphs: bool = True,
    is_spread: bool = False,
    flash: int = 0,
) -> dict:
    """What ``cuda_on_cpu`` finds. flash: version of FlashAttention that vLLM finds; 0: none."""
    settings = {"VLLM_USE_V2_MODEL_RUNNER": is_v2, "FULL_GRAPHS": has_graphs, "SPREAD": is_spread, "FLASH": flash}
    done = preloaded.run(
        [sys.executable, "-m", "tests.engine.cuda_on_cpu"],
        input=json.dumps([arguments, jobs, chats]),
        env=os.environ | {name: str(int(value)) for name, value in settings.items()},
        from_scratch=is_v2,  # Triton's interpreter is chosen before anything imports Triton
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.split("RESULT", 1)[1])


@pytest.mark.parametrize(
    ("is_v2", "is_spread"),
    [(False, False), (False, True), (True, False), pytest.param(True, True, marks=pytest.mark.gpu_code)],
    ids=["v1-at once", "v1-spread", "v2-at once", "v2-spread"],
)
def test_tokens_of_the_cpu_runner(is_v2, is_spread, expected, chats):
    """With asynchronous scheduling and full graphs; spread, which the scheduler decides, some of the requests. Plain
    rows outside graphs are FlashAttention's; when spread, that is turned off."""
    asked = list(zip(jobs(), expected, strict=True))
    if is_spread:
        asked, chats = asked[:14] + asked[-9:], chats[-2:]
    arguments = SMALL | {
        "async_scheduling": True,
        "enforce_eager": False,
        "kv_cache_memory_bytes": NUM_BLOCKS * BYTES_PER_BLOCK,
        "additional_config": {"kvmerge": {"plain_attention": "ours" if is_spread else "auto"}},
    }
    result = on_cpu(
        arguments,
        [job for job, _ in asked],
        [[asked for asked, *_ in turns] for turns in chats],
        is_v2=is_v2,
        is_spread=is_spread,
        flash=3 if is_v2 else 2,
    )
    assert result.pop("tokens") == [list(one.token_ids) for _, one in asked]
    assert result.pop("logprobs") == pytest.approx([one.cumulative_logprob for _, one in asked], abs=TOLERANCE)
    assert result.pop("verified") == [True, pytest.approx(expected[0].cumulative_logprob, abs=TOLERANCE)]
    assert len(result.pop("generated")) == len(asked) and result.pop("cached") > 0
    check_chats(chats, result.pop("turns"))
    # In a window the model sees the same distances either way, and random numbers depend on the tokens' positions.
    in_text, in_cache = result.pop("sampled")
    assert in_text == in_cache and len(set(in_text)) > 5
    assert (result.pop("spread") > 10) == is_spread
    num_adopted, num_restored = result.pop("adopted"), result.pop("restored")
    assert num_adopted > 1 and (is_spread or num_adopted > 5 and num_restored > 0)
    assert result.pop("preempted") > 0 and result.pop("paged_rows") > 100
    graphs = result.pop("graphs")
    assert graphs["captured"] == len(SIZES) and graphs["replayed"] > 20
    assert (result.pop("flash") > 200) != is_spread
    assert result == {"is_v2": is_v2, "is_async": True, "reserved": True, "states": [], "lost_blocks": 0}


@needs_avx512
def test_a_cache_of_8_bits():
    """Policies compress it, and one to which nothing has to go gives the tokens of plain requests. No row of it is
    FlashAttention's."""
    rng = np.random.default_rng(24)
    prompts = [random_prompt(rng, length) for length in (60, 130)]
    fields = [None, compression("h2o", budget=250)]
    fields += [compression(policy, budget=40, interval=8) for policy in ("keepkv", "snapkv", "adakv", "morphkv", "d2o")]
    fields += [compression("snapkv", budget=40, positions="cache"), compression("kvzip", budget=40, chunk_size=60)]
    jobs = [(prompt, extra, 24) for extra in fields for prompt in prompts]
    arguments = SMALL | {
        "dtype": "bfloat16",
        "kv_cache_dtype": "fp8_e4m3",
        "kv_cache_memory_bytes": 2 * NUM_BLOCKS * bytes_per_block(itemsize=1),
    }
    result = on_cpu(arguments, jobs, [], has_graphs=False, flash=2)
    plain, unchanged = result["tokens"][:2], result["tokens"][2:4]
    assert plain == unchanged and all(len(tokens) == 24 for tokens in result["tokens"])
    assert result["tokens"][4:6] != plain
    assert result["paged_rows"] > 10 and result["lost_blocks"] == 0 and result["states"] == []
    assert result["flash"] == 0


def check_chats(chats: list[list], found: list) -> None:
    """found: of each turn the tokens, their log-probability, and the number of those that were not computed.

    What a stop token ends has that one too: the step in flight computes it. The last token of others is not computed.
    """
    cached = []
    for turns, answers in zip(chats, found, strict=True):
        assert [tokens for tokens, *_ in answers] == [tokens for _, tokens, _ in turns]
        logprobs = [logprob for _, logprob, _ in answers]
        assert logprobs == pytest.approx([logprob for *_, logprob in turns], abs=TOLERANCE)
        ends = [len(prompt) + len(tokens) - (not stop) for (prompt, _, _, stop), tokens, _ in turns]
        cached.append([num_cached == end for (*_, num_cached), end in zip(answers[1:], ends[:-1], strict=True)])
    assert cached == [[True, True]] * (len(chats) - 1) + [[False]]
    assert found[-1][1][2] % BLOCK_SIZE == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM runs on the GPU here")
def test_the_checks_of_gpus(engine, tmp_path):
    """Some of those of ``tests/gpu``, which shows that they work: V1 without graphs, against the CPU's runner."""
    setting = Setting("v1", demo.model_path(), "float32", is_on_gpu=False, is_small=True)
    found = {}
    for name, some in (("vllm", setting.plain_jobs()), ("reference", setting.compressed_jobs())):
        params = [greedy(extra, setting.num_tokens, NUM_CANDIDATES) for _, extra in some]
        outputs = engine.generate([prompt for prompt, _ in some], params)
        found[name] = [asdict(Generated.of(output.outputs[0])) for output in outputs]
    path = tmp_path / "expected.json"
    path.write_text(json.dumps(found))
    check(replace(setting, expected=str(path)), tmp_path, "-k", FEW_CHECKS, start=preloaded.Popen)


def greedy(extra, num_tokens, logprobs=0):
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=logprobs, extra_args=extra)
