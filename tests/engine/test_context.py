"""``context_tokens``: a prompt's first tokens are compressed before the rest of it, the question, is read."""

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from tests.engine.conftest import MAX_MODEL_LEN, random_prompt, run
from tests.measures import continuation_loss, score
from vllm_kvmerge import compression
from vllm_kvmerge.demo import recall
from vllm_kvmerge.evaluation.continuation import CONTINUATION
from vllm_kvmerge.policies import PRESETS
from vllm_kvmerge.request.parameters import parse_compression

POLICIES = ["streaming_llm", "h2o", "snapkv", "keepkv", "zsmerge", "morphkv", "grkv", "pyramidkv"]
"""One of each kind: without scores, with them, merging, with queries of its own, with uneven budgets."""


def greedy(max_tokens: int, policy: str | None = None, **parameters) -> SamplingParams:
    logprobs = parameters.pop("prompt_logprobs", None)
    extra = compression(policy, **parameters) if policy else None
    return SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, prompt_logprobs=logprobs, extra_args=extra
    )


def name_of(request) -> str:
    return request.request_id.rsplit("-", 1)[0]


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
    document = recall.training_sample(rng, CONTEXT + QUESTION + ANSWER, 12, 13)[0].tolist()
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


@pytest.mark.slow
def test_a_budget_that_is_never_exceeded_changes_nothing(engine):
    rng = np.random.default_rng(22)
    policies = ["h2o", "keepkv", "morphkv", "criticalkv"]
    prompts = [random_prompt(rng, length) for length in (60, 400, 1100)]
    full = engine.tokens(prompts, greedy(24)) * len(policies)

    def marked(**parameters) -> list[list[int]]:
        params = [
            greedy(24, policy, context_tokens=int(len(prompt) * 0.7), **parameters)
            for policy in policies
            for prompt in prompts
        ]
        return engine.tokens(prompts * len(policies), params)

    for decode in ("bounded", "grow"):
        assert marked(budget=1500, interval=24, decode=decode) == full
    # An entry for each token of the context is enough for policies that keep the rest.
    assert marked(budget=1.0, decode="grow") == full
    engine.assert_empty()


@pytest.mark.slow
def test_the_question_is_read_before_any_of_it_is_compressed(engine):
    """Compressions happen at the context's end, then at the prompt's, then every interval; ``grow``: at the first."""
    context, length, num_tokens, budget, interval = 1300, 1700, 80, 128, 16
    rng = np.random.default_rng(23)
    tails: dict[str, set[int]] = {}
    live: dict[str, list[int]] = {}
    for decode in ("bounded", "grow"):
        for policy in ("streaming_llm", "h2o", "snapkv", "keepkv", "morphkv"):
            params = greedy(num_tokens, policy, budget=budget, interval=interval, decode=decode, context_tokens=context)
            engine.add(f"{decode} {policy}", random_prompt(rng, length), params)
            tails[f"{decode} {policy}"] = set()
            live[f"{decode} {policy}"] = []

    def watch():
        for request in engine.scheduler.running:
            segments = engine.manager.segments.get(request.request_id)
            if segments is not None:
                tails[name_of(request)].add(segments.tail)
                live[name_of(request)].append(segments.front + request.num_computed_tokens - segments.tail)

    run(engine, watch)
    for name in tails:
        if name.startswith("grow"):
            assert tails[name] == {context}
            assert max(live[name]) == budget + length - context + num_tokens - 2  # of the last step but one
        else:
            assert tails[name] == {context, *range(length, length + num_tokens, interval)}
            assert max(live[name][-num_tokens + 1 :]) <= budget + interval
    engine.assert_empty()


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


def test_the_result_does_not_depend_on_chunks_company_or_the_prefix_cache(engine, monkeypatch):
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
    for cached in ([0] * len(POLICIES), hits):
        outputs = engine.generate(prompts, params)
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected
        assert [output.num_cached_tokens for output in outputs] == cached
    # Whoever wrote them: plain requests have put all of the prompts' blocks into the cache.
    engine.generate(prompts, greedy(1))
    outputs = engine.generate(prompts, params)
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    assert [output.num_cached_tokens for output in outputs] == hits
    for chunk in (37, 97, context + 1):
        with monkeypatch.context() as patch:
            patch.setattr(engine.scheduler, "max_num_scheduled_tokens", chunk)
            assert engine.llm.reset_prefix_cache()
            assert engine.tokens(prompts, params) == expected, chunk
    others = [random_prompt(rng, int(n)) for n in rng.integers(50, 1200, 9)]
    params_of_others = [
        greedy(20),
        greedy(30, "h2o", budget=100),
        greedy(20, "keepkv", budget=0.3, context_tokens=45),
    ] * 3
    together = engine.tokens(
        [*others[:5], *prompts, *others[5:]], [*params_of_others[:5], *params, *params_of_others[5:]]
    )
    assert together[5:-4] == expected
    engine.assert_empty()


def test_the_prefix_cache_holds_what_full_attention_computed(engine):
    """The context's full blocks are found by hash afterwards; what was read on the compressed cache is not."""
    rng = np.random.default_rng(26)
    prompts = [random_prompt(rng, 430) for _ in POLICIES]
    context = 300
    params = [greedy(20, policy, budget=90, interval=8, context_tokens=context) for policy in POLICIES]
    assert engine.llm.reset_prefix_cache()
    cold = engine.tokens(prompts, greedy(12))
    assert engine.llm.reset_prefix_cache()
    # The second time they find all of the prompt's blocks, and leave them as they are.
    for cached in (context // 32 * 32, 416):
        engine.generate(prompts, params)
        warm = engine.generate(prompts, greedy(12))
        assert [output.num_cached_tokens for output in warm] == [cached] * len(POLICIES)
        assert [list(output.outputs[0].token_ids) for output in warm] == cold
    engine.assert_empty()


def test_a_preempted_request_comes_back_to_the_same_tokens(engine):
    """Its context is compressed again, its question read again, and its generated tokens go the way they went."""
    rng = np.random.default_rng(27)
    policies = ["h2o", "keepkv", "zsmerge", "streaming_llm", "snapkv", "morphkv", "grkv"]
    prompts = [random_prompt(rng, 250) for _ in policies]
    params = [greedy(60, policy, budget=150, interval=8, context_tokens=210) for policy in policies]
    undisturbed = engine.tokens(prompts, params)
    for i in range(6):  # these only grow, and push the others out
        engine.add(f"plain{i}", random_prompt(rng, 150), greedy(150))
    for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
        engine.add(str(i), prompt, p)
    seen: dict[str, int] = {}

    def watch():
        for request in engine.scheduler.requests.values():
            seen[name_of(request)] = max(seen.get(name_of(request), 0), request.num_preemptions)

    with engine.with_blocks(66):
        tokens = run(engine, watch)
    assert sum(seen[str(i)] > 0 for i in range(len(policies))) >= 2, seen
    assert [tokens[str(i)] for i in range(len(policies))] == undisturbed
    engine.assert_empty()


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 6])
def test_aborted_requests_leave_nothing(engine, steps, monkeypatch):
    """While the context is computed, after its compression, in the middle of the question, and after that."""
    rng = np.random.default_rng(28)
    monkeypatch.setattr(engine.scheduler, "max_num_scheduled_tokens", 256)
    for policy in ("h2o", "snapkv", "morphkv"):
        engine.add(policy, random_prompt(rng, 725), greedy(50, policy, budget=90, context_tokens=125))
    for _ in range(steps):
        engine.llm.llm_engine.step()
    engine.llm.llm_engine.abort_request(list(engine.scheduler.requests), internal=True)
    engine.assert_empty()


@pytest.mark.slow
def test_a_context_of_the_whole_prompt_is_as_none(engine):
    rng = np.random.default_rng(29)
    prompts = [random_prompt(rng, length) for length in (90, 300, 1100)]

    tokens = []
    for names in ([], ["context_tokens"]):
        params = [
            greedy(20, policy, budget=0.4, interval=8, **dict.fromkeys(names, len(prompt)))
            for policy in POLICIES
            for prompt in prompts
        ]
        tokens.append(engine.tokens(prompts * len(POLICIES), params))
    assert tokens[0] == tokens[1]
    engine.assert_empty()


def test_a_context_of_one_token_and_one_that_leaves_one(engine):
    prompt = random_prompt(np.random.default_rng(30), 400)
    assert engine.tokens([prompt], greedy(20, "snapkv", context_tokens=1)) == engine.tokens([prompt], greedy(20))
    params = [
        greedy(20, policy, budget=96, context_tokens=context) for policy in POLICIES for context in (1, 33, 64, 399)
    ]
    assert {len(tokens) for tokens in engine.tokens([prompt] * len(params), params)} == {20}
    engine.assert_empty()


def test_a_share_is_one_of_the_context(engine):
    prompt = random_prompt(np.random.default_rng(31), 1000)
    engine.add("share", prompt, greedy(8, "snapkv", budget=0.25, context_tokens=800))
    fronts = set()

    def watch():
        fronts.update(segments.front for segments in engine.manager.segments.values())

    run(engine, watch)
    assert fronts == {200}
    engine.assert_empty()


def test_a_longer_context_than_the_prompt_is_refused_before_it_is_queued(engine):
    prompt = random_prompt(np.random.default_rng(32), 50)
    bad = greedy(5, "snapkv", context_tokens=51)
    with pytest.raises(
        VLLMValidationError, match=r"kv_compression.context_tokens: 51 tokens are more .* allowed: 1 to 50"
    ) as caught:
        engine.generate([prompt], bad)
    assert caught.value.parameter == "kv_compression.context_tokens"
    assert not engine.llm.llm_engine.has_unfinished_requests()
    with pytest.raises(VLLMValidationError, match="context_tokens"):  # the second of two
        engine.generate([random_prompt(np.random.default_rng(32), 51), prompt], bad)
    engine.assert_empty()
    assert len(engine.tokens([prompt], greedy(5, "snapkv", context_tokens=50))[0]) == 5


def test_parallel_samples_share_the_context(engine):
    prompt = random_prompt(np.random.default_rng(33), 900)
    extra = compression("keepkv", budget=200, context_tokens=640)
    alone = engine.tokens([prompt], greedy(40, "keepkv", budget=200, context_tokens=640))[0]
    assert engine.tokens([prompt] * 4, greedy(40, "keepkv", budget=200, context_tokens=640)) == [alone] * 4
    sampled = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=40, ignore_eos=True, extra_args=extra)
    first, second = (engine.generate([prompt], sampled)[0] for _ in range(2))
    assert [o.token_ids for o in first.outputs] == [o.token_ids for o in second.outputs]
    assert len({tuple(o.token_ids) for o in first.outputs}) > 1
    # A prompt that is computed in several chunks takes no more random numbers than one computed at once.
    whole, chunked = (
        SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True, extra_args=extra)
        for extra in (None, compression("keepkv", budget=MAX_MODEL_LEN, context_tokens=640))
    )
    assert engine.tokens([prompt], whole) == engine.tokens([prompt], chunked)
    engine.assert_empty()


def test_log_probabilities_of_the_prompt(engine):
    """Those of the context are full attention's; those of the question say what the policy lost."""
    rng = np.random.default_rng(34)
    context, length = 700, 900
    prompt = recall.training_sample(rng, length, 12, 20)[0].tolist()

    def logprobs(params: SamplingParams) -> np.ndarray:
        rows = engine.generate([prompt], params)[0].prompt_logprobs
        assert len(rows) == length and rows[0] is None
        return np.array([row[token].logprob for row, token in zip(rows[1:], prompt[1:], strict=True)])

    full = logprobs(greedy(2, prompt_logprobs=0))
    lossy = logprobs(greedy(2, "local", budget=32, context_tokens=context, prompt_logprobs=0))
    assert np.abs(lossy - full)[:context].max() < 1e-4  # the first token after the context is its last one's guess
    assert lossy[context:].mean() < full[context:].mean() - 0.1
    roomy = logprobs(greedy(2, "keepkv", budget=MAX_MODEL_LEN, context_tokens=context, prompt_logprobs=0))
    assert np.abs(roomy - full).max() < 1e-4
    engine.assert_empty()


def test_a_policy_that_has_not_seen_the_question_cannot_keep_its_answer(engine):
    """Recall of snapkv, whose window ends with the question or just before it."""
    rng = np.random.default_rng()
    length, question = 400, 2  # "recall K"
    prompts = [recall.draw_prompt(rng, length, 7) for _ in range(30)]

    def exact(**parameters) -> float:
        extra = compression("snapkv", budget=0.2, **parameters)
        params = SamplingParams(temperature=0, max_tokens=recall.DIGITS_PER_ANSWER + 1, extra_args=extra)
        outputs = engine.llm.generate([prompt.text for prompt in prompts], params, use_tqdm=False)
        assert {len(output.prompt_token_ids) for output in outputs} == {length}
        return score([output.outputs[0].text for output in outputs], prompts, "snapkv").exact

    aware, agnostic = exact(), exact(context_tokens=length - question)
    assert aware >= 0.4
    assert agnostic <= aware - 0.2
    engine.assert_empty()
