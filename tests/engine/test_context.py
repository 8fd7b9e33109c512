"""``context_tokens``: a prompt's first tokens are compressed before the rest of it, the question, is read."""

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from tests.engine.conftest import MAX_MODEL_LEN, random_prompt, run
from tests.measures import continuation_loss, recall_document
from vllm_kvmerge import compression
from vllm_kvmerge.evaluation.continuation import CONTINUATION
from vllm_kvmerge.policies import PRESETS
from vllm_kvmerge.request.spec import parse_compression

POLICIES = ["streaming_llm", "h2o", "snapkv", "keepkv", "zsmerge", "morphkv", "grkv", "pyramidkv"]
"""One of each kind: without scores, with them, merging, with queries of its own, with uneven budgets."""


def greedy(max_tokens: int, policy: str | None = None, **parameters) -> SamplingParams:
    logprobs = parameters.pop("prompt_logprobs", None)
    extra = compression(policy, **parameters) if policy else None
    return SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, prompt_logprobs=logprobs, extra_args=extra
    )


CONTEXT, QUESTION, ANSWER = 700, 25, 40
"""Tokens; the question is shorter than an interval."""


THIN = 7
"""One of how many policies is of the fast layer."""


@pytest.fixture(scope="module")
def losses(engine, request):
    """By policy: those of question and answer where the context is the whole prompt, and where it is marked as one.

    Many policies at once; under "full" twice what they are without a policy.
    """
    rng = np.random.default_rng(21)
    document = recall_document(rng, CONTEXT + QUESTION + ANSWER, 12, 13)
    parameters = {"budget": 150, "interval": 30}

    def params(policy, forced, max_tokens, **more):
        extra_args = compression(policy, **parameters, **more) | {CONTINUATION: forced}
        scores = {"logprobs": 0} if "context_tokens" not in more else {"logprobs": 0, "prompt_logprobs": 0}
        return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra_args, **scores)

    names = sorted(PRESETS)[:: 1 if request.config.getoption("all") else THIN]
    plain = continuation_loss(engine.llm, [document[:CONTEXT]], [document[CONTEXT:]], "full", 0)[0]
    found = {"full": (plain, plain)}
    # The regression of grkv magnifies last digits, which depend on a batch's company.
    for some in ([name for name in names if name != "grkv"], [name for name in names if name == "grkv"]):
        assert engine.llm.reset_prefix_cache()
        alone = [params(name, document[CONTEXT:], QUESTION + ANSWER) for name in some]
        marked = [params(name, document[-ANSWER:], ANSWER, context_tokens=CONTEXT) for name in some]
        references = engine.generate([document[:CONTEXT]] * len(some), alone)
        outputs = engine.generate([document[: CONTEXT + QUESTION]] * len(some), marked)
        for name, reference, output in zip(some, references, outputs, strict=True):
            assert list(reference.outputs[0].token_ids) == document[CONTEXT:]
            found[name] = tuple(
                [-row[token].logprob for row, token in zip(rows, document[CONTEXT:], strict=True)]
                for rows in (
                    reference.outputs[0].logprobs,
                    [*output.prompt_logprobs[CONTEXT:], *output.outputs[0].logprobs],
                )
            )
    engine.assert_empty()
    return found


@pytest.mark.thin(THIN)
@pytest.mark.parametrize("policy", sorted(PRESETS))
def test_a_context_is_compressed_as_if_it_were_the_whole_prompt(losses, policy):
    """The reference is a request whose prompt is the context and which is made to generate question and answer."""
    expected, found = losses[policy]
    assert np.abs(np.subtract(found, expected)).max() < 2e-3
    assert np.abs(np.subtract(found, losses["full"][0])).max() > 0.1  # the budget is small enough to tell


def test_memory_returns_before_the_question_is_read(engine):
    prompt = random_prompt(np.random.default_rng(24), 3000)
    assert engine.llm.reset_prefix_cache()
    engine.add("long", prompt, greedy(40, "snapkv", budget=256, context_tokens=2048))
    held = []
    run(engine, lambda: held.append(engine.pool.num_gpu_blocks - 1 - engine.pool.get_num_free_blocks()))
    # Two chunks of the context, the second of which ends with the compression; then 952 tokens and 40 more.
    assert held[:3] == [32, 8, 8 + 30]
    assert max(held[3:]) == 8 + 31
    engine.assert_empty()


def test_the_result_does_not_depend_on_chunks_or_the_prefix_cache(engine, monkeypatch):
    """What policies make of a prompt each, computed alone, all of them make of them together."""
    rng = np.random.default_rng(25)
    context, length = 300, 400
    prompts = [random_prompt(rng, length) for _ in POLICIES]
    params = [greedy(24, policy, budget=90, interval=8, context_tokens=context) for policy in POLICIES]
    expected = []
    for prompt, p in zip(prompts, params, strict=True):
        assert engine.llm.reset_prefix_cache()
        expected += engine.tokens([prompt], p)
    # A hit leaves the queries to be computed that the policy looks at, those of the context's end.
    configs = [parse_compression({"policy": policy}) for policy in POLICIES]
    windows = [max(config.prompt_window, config.policy.query_window, 1) for config in configs]
    hits = [(context - window) // 32 * 32 for window in windows]
    assert engine.llm.reset_prefix_cache()
    for cached in ([0] * len(POLICIES), hits, hits):
        outputs = engine.generate(prompts, params)
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected
        assert [output.num_cached_tokens for output in outputs] == cached
        if cached is hits:  # whoever wrote them: plain requests put all of the prompts' blocks into the cache
            engine.generate(prompts, greedy(1))
    for chunk in (37, 97, context + 1):
        with monkeypatch.context() as patch:
            patch.setattr(engine.scheduler, "max_num_scheduled_tokens", chunk)
            assert engine.llm.reset_prefix_cache()
            assert engine.tokens(prompts, params) == expected, chunk
    engine.assert_empty()


def test_a_context_of_one_token_and_one_that_leaves_one(engine):
    prompt = random_prompt(np.random.default_rng(30), 400)
    assert engine.tokens([prompt], greedy(20, "snapkv", context_tokens=1)) == engine.tokens([prompt], greedy(20))
    params = [
        greedy(20, policy, budget=96, context_tokens=context) for policy in POLICIES for context in (1, 33, 64, 399)
    ]
    assert {len(tokens) for tokens in engine.tokens([prompt] * len(params), params)} == {20}
    engine.assert_empty()


def test_a_longer_context_than_the_prompt_is_refused_before_it_is_queued(engine):
    prompt = random_prompt(np.random.default_rng(32), 50)
    bad, error = greedy(5, "snapkv", context_tokens=51), r"context_tokens: 51 tokens are more .* allowed: 1 to 50"
    for prompts in ([prompt], [[*prompt, 20], prompt]):  # the second of two
        with pytest.raises(VLLMValidationError, match=error) as caught:
            engine.generate(prompts, bad)
        assert caught.value.parameter == "kv_compression.context_tokens"
    engine.assert_empty()
    assert not engine.llm.llm_engine.has_unfinished_requests()
    assert len(engine.tokens([prompt], greedy(5, "snapkv", context_tokens=50))[0]) == 5


def test_parallel_samples_share_the_context(engine):
    """Each compresses a copy of its own."""
    prompt, fields = random_prompt(np.random.default_rng(33), 900), {"budget": 200, "context_tokens": 640}
    alone = engine.tokens([prompt], greedy(40, "keepkv", **fields))
    assert engine.tokens([prompt] * 4, greedy(40, "keepkv", **fields)) == alone * 4
    sampled = {"temperature": 1.0, "seed": 3, "max_tokens": 40, "ignore_eos": True}
    params = SamplingParams(n=4, **sampled, extra_args=compression("keepkv", **fields))
    first, second = ([one.token_ids for one in engine.generate([prompt], params)[0].outputs] for _ in range(2))
    assert first == second and len(set(map(tuple, first))) > 1
    # A prompt that is computed in several chunks takes no more random numbers than one computed at once.
    chunked = compression("keepkv", **fields | {"budget": MAX_MODEL_LEN})
    whole, found = (engine.tokens([prompt], SamplingParams(**sampled, extra_args=one)) for one in (None, chunked))
    assert whole == found
    engine.assert_empty()


def test_log_probabilities_of_the_prompt(engine):
    """Those of the context are full attention's; those of the question say what the policy lost."""
    rng = np.random.default_rng(34)
    context, length = 700, 900
    prompt = recall_document(rng, length, 12, 20)

    def logprobs(params: SamplingParams) -> np.ndarray:
        rows = engine.generate([prompt], params)[0].prompt_logprobs
        assert len(rows) == length and rows[0] is None
        return np.array([row[token].logprob for row, token in zip(rows[1:], prompt[1:], strict=True)])

    full = logprobs(greedy(2, prompt_logprobs=0))
    lossy = logprobs(greedy(2, "local", budget=32, context_tokens=context, prompt_logprobs=0))
    assert np.abs(lossy - full)[:context].max() < 1e-4  # the first token after the context is its last one's guess
    assert lossy[context:].mean() < full[context:].mean() - 0.1
    engine.assert_empty()
