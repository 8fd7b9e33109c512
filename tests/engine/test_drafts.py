"""N-gram drafts beside layers with windows and latents: they change how fast tokens come, and nothing else.

Engines of a process share vLLM's groups of workers, which end with the first of them: here none outlasts another.
"""

import pytest

from tests.engine.architectures import architectures, greedy, hit, jobs, running
from tests.engine.conftest import preempting, run
from tests.engine.test_architectures import architecture, folder, name
from tests.engine.test_speculative import DRAFTING, numbers, repeating, repetitive, with_drafts

pytestmark = pytest.mark.engine

__all__ = ["architecture", "folder", "name"]  # fixtures


@architectures("latents", only=("windows", "latents"))
def test_drafts_change_no_request(folder):
    """Of prompts longer than ``max_num_batched_tokens`` too, which stock vLLM would never begin beside latents."""
    with running(folder) as engine:
        told = repeating(jobs(engine)[::2])
        prompts, params = [prompt for prompt, _ in told], [params for _, params in told]
        expected = engine.tokens(prompts, params)
    with with_drafts(), running(folder, logits_processors=[], **DRAFTING) as drafting:
        outputs = drafting.generate(prompts, params)
        assert [list(one.outputs[0].token_ids) for one in outputs] == expected
        drafted, accepted = numbers(outputs)
        assert 0 < accepted < drafted
        drafting.assert_empty()
        for index, (prompt, one) in enumerate(told):
            drafting.add(str(index), prompt, one)
        preempted = run(drafting, preempting(drafting, 12))
        assert [preempted[str(index)] for index in range(len(expected))] == expected
        # Of what follows drafts, exact blocks alone are in the prefix cache.
        prompt = repetitive(99, 400)
        assert drafting.llm.reset_prefix_cache()
        longer = [*prompt, *drafting.tokens([prompt], greedy(max_tokens=40))[0]]
        warm = drafting.generate([longer], greedy(max_tokens=40))[0]
        assert warm.num_cached_tokens == hit(drafting, len(prompt))
        assert drafting.llm.reset_prefix_cache()
        assert drafting.tokens([longer], greedy(max_tokens=40)) == [list(warm.outputs[0].token_ids)]
        drafting.assert_empty()
