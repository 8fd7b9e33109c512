"""What any engine with the plugin on a GPU must do; ``test_serving`` runs this once for each engine.

No file of tests by its name: it needs an engine's ``--setting``.
"""

import numpy as np
import pytest

from tests.engine.conftest import random_prompt
from tests.engine.test_recall import test_recall_on_fresh_prompts  # noqa: F401
from tests.engine.test_stress import assert_same_or_tied, draw_jobs, run_together
from tests.gpu.compare import Tolerance, assert_all_close, assert_close
from tests.gpu.setting import OFTEN
from vllm_kvmerge import compression, demo

BLOCK_SIZE = 32


@pytest.fixture(autouse=True)
def only_where_it_tells(request, setting):
    if request.node.name.startswith("test_recall"):
        if setting.model != demo.model_path():
            pytest.skip("a model of random weights has nothing to recall")
        if setting.is_small:
            pytest.skip("the small engine takes no prompts of this length")


def test_the_engine_is_the_one_that_was_asked_for(engine, setting):
    config = engine.llm.llm_engine.vllm_config
    assert config.use_v2_model_runner == (setting.runner == "v2")
    assert str(config.model_config.dtype) == f"torch.{setting.dtype}"
    assert config.scheduler_config.async_scheduling
    if setting.is_on_gpu:
        mode = "NONE" if setting.is_eager else "FULL_AND_PIECEWISE"
        assert config.compilation_config.cudagraph_mode.name == mode
        assert not engine.runner.compression.compactor.layers[0].keys.is_cpu


def test_plain_requests_are_vllms(engine, setting, expected):
    found = engine.run(setting.plain_jobs(), setting.num_tokens)
    assert_all_close(found, expected["vllm"], setting.against_vllm, "plain")
    engine.assert_empty()


def test_flash_attention_of_plain_rows(engine, setting, monkeypatch):
    """It is called where it knows the dtype, and gives what ours does."""
    from vllm_kvmerge.engine.attention.flash import FlashBatch

    builders = [group.get_metadata_builder() for groups in engine.runner.attn_groups for group in groups]
    using = [builder for builder in builders if builder.uses_flash]
    if setting.dtype == "float32" or not setting.is_on_gpu:
        assert not using
        return
    assert len(using) == len(builders)
    attend, calls = FlashBatch.attend, []

    def counted(self, *args):
        calls.append(self)
        return attend(self, *args)

    monkeypatch.setattr(FlashBatch, "attend", counted)
    assert engine.llm.reset_prefix_cache()
    found = engine.run(setting.plain_jobs(), setting.num_tokens)
    num_calls = len(calls)
    assert num_calls >= len(engine.runner.compression.layers)
    for builder in using:
        monkeypatch.setattr(builder, "uses_flash", False)
    assert engine.llm.reset_prefix_cache()
    ours = engine.run(setting.plain_jobs(), setting.num_tokens)
    assert len(calls) == num_calls
    assert_all_close(found, ours, setting.against_itself, "flash")
    engine.assert_empty()


@pytest.mark.parametrize("is_exceeded", [False, True], ids=["never-scored", "scored"])
def test_a_budget_with_room_changes_nothing(engine, setting, expected, is_exceeded):
    """If the budget could be exceeded, requests are scored and move to blocks of their own, and lose nothing."""
    jobs = []
    for index, (prompt, _) in enumerate(setting.plain_jobs()):
        budget = max(40, len(prompt)) if is_exceeded else setting.longest + setting.num_tokens
        policy = OFTEN[index % len(OFTEN)]
        jobs.append((prompt, compression(policy, budget=budget, interval=setting.num_tokens)))
    found = engine.run(jobs, setting.num_tokens)
    assert_all_close(found, expected["vllm"], setting.against_vllm, "roomy")
    engine.assert_empty()


@pytest.mark.parametrize("company", ["together", "alone"])
def test_policies_are_the_references(engine, setting, expected, company):
    """Every preset, with plain requests between them: what the operators' reference makes of them, run eagerly."""
    jobs = setting.compressed_jobs()
    if company == "together":
        found = engine.run(jobs, setting.num_tokens)
    else:
        found = [engine.run([job], setting.num_tokens)[0] for job in jobs]
    assert_all_close(found, expected["reference"], setting.against_itself, company)
    engine.assert_empty()


def test_fronts_in_8_bits(engine, setting):
    """Beside others and alone they are the same, and close to the same policy's front in the cache's dtype."""
    rng, length = np.random.default_rng(8), setting.longest - 10
    asked = [(policy, random_prompt(rng, length)) for policy in ("snapkv", "adakv", "zsmerge")]
    fields = {"budget": length // 3, "decode": "grow"}
    jobs = [
        (prompt, compression(policy, **fields, front=front)) for front in (None, "int8") for policy, prompt in asked
    ]
    together = engine.run(jobs, setting.num_tokens)
    plain, coded = together[: len(asked)], together[len(asked) :]
    alone = [engine.run([job], setting.num_tokens)[0] for job in jobs[len(asked) :]]
    assert_all_close(coded, alone, setting.against_itself, "8 bits")
    own = setting.against_itself
    tolerance = Tolerance(own.most + 0.1, own.mean + 0.03)
    assert_all_close(coded, plain, tolerance, "8 bits or all")
    assert all(one.candidates != other.candidates for one, other in zip(coded, plain, strict=True))
    engine.assert_empty()


def test_policies_change_what_is_generated(engine, setting, expected):
    """Otherwise the last test would say nothing."""
    jobs = setting.compressed_jobs()
    found = engine.run([(prompt, None) for prompt, _ in jobs], setting.num_tokens)
    changed = 0
    for (_, extra), plain, reference in zip(jobs, found, expected["reference"], strict=True):
        try:
            assert_close(plain, reference, setting.against_itself, "")
        except AssertionError:
            changed += 1
            assert extra is not None
    assert changed >= 0.5 * sum(extra is not None for _, extra in jobs)


@pytest.mark.parametrize("policy", ["keepkv", "snapkv", "zsmerge", "morphkv"])
def test_the_prefix_cache_is_as_plain_requests_leave_it(engine, setting, policy):
    """The same hashes, and behind them blocks from which a plain request goes on as one that computes all itself."""
    length = setting.longest - 10
    prompt = random_prompt(np.random.default_rng(6), length)
    extra = compression(policy, budget=max(40, length // 6), interval=8)

    def hashes() -> set:
        return set(engine.pool.cached_block_hash_to_block._cache)

    assert engine.llm.reset_prefix_cache()
    cold = engine.generate([prompt], engine.params(1))[0]
    assert cold.num_cached_tokens == 0
    left_by_plain = hashes()
    in_full_layers = length // BLOCK_SIZE
    assert len(left_by_plain) > in_full_layers if setting.has_windows else len(left_by_plain) == in_full_layers
    (whole,) = engine.run([(prompt, None)], setting.num_tokens)
    for hits in (False, True):  # the compressed request's own blocks, or those that a plain one has left
        assert engine.llm.reset_prefix_cache()
        if hits:
            engine.generate([prompt], engine.params(1))
        engine.run([(prompt, extra)], 40)  # it fills blocks after its compression, which must not be found
        assert hashes() == left_by_plain
        warm = engine.generate([prompt], engine.params(setting.num_tokens))[0]
        assert warm.num_cached_tokens == (length - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert_close(type(whole).of(warm.outputs[0]), whole, setting.against_itself, f"hits: {hits}")
    engine.assert_empty()


def test_requests_of_every_kind_at_once(engine, setting):
    """Preempted, aborted, sharing prompts, compressed by any policy or none: as alone, and no block is lost."""
    rng = np.random.default_rng(20)
    num_requests, longest = (12, setting.longest) if setting.is_small else (100, 3500)
    jobs = draw_jobs(rng, num_requests, longest, num_logprobs=5, of=setting.policies)
    together, num_preemptions = run_together(engine, jobs, rng)
    engine.assert_empty()
    assert num_preemptions > 0, "the pool is too large to test preemption"
    assert any(job.abort_after is not None for job in jobs)
    for index, (job, (tokens,)) in enumerate(zip(jobs, together, strict=True)):
        name = f"request {index} ({job.params.extra_args}, {len(job.prompt)} tokens)"
        alone = engine.generate([job.prompt], job.params)[0].outputs[0]
        assert tokens and (job.abort_after is not None or len(tokens) == len(alone.token_ids)), name
        assert_same_or_tied(tokens, alone, name, 2 * setting.against_itself.most)
    engine.assert_empty()


@pytest.mark.parametrize("policy", [None, "keepkv", "morphkv", "zsmerge"])
def test_decoding_runs_no_python_attention(engine, setting, policy, monkeypatch):
    """Full graphs are replayed: the backend is called for prompts alone, not once for each layer and token."""
    if not setting.is_on_gpu or setting.is_eager:
        pytest.skip("there are no CUDA graphs")
    from vllm_kvmerge.engine.attention.cuda import CUDAAttentionImpl

    forward, calls = CUDAAttentionImpl.forward, []

    def counted(self, *args, **kwargs):
        calls.append(self)
        return forward(self, *args, **kwargs)

    extra = compression(policy, budget=60, interval=8) if policy else None
    prompt, num_tokens = random_prompt(np.random.default_rng(3), 150), 60
    engine.run([(prompt, extra)], num_tokens)  # what has to be compiled, is
    assert engine.llm.reset_prefix_cache()
    monkeypatch.setattr(CUDAAttentionImpl, "forward", counted)
    engine.run([(prompt, extra)], num_tokens)
    num_layers = len(engine.runner.compression.layers)
    assert num_layers <= len(calls) <= 3 * num_layers, f"{len(calls)} calls for {num_layers} layers"
    engine.assert_empty()
