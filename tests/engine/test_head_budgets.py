"""Budgets of heads from a file (``allocator: calibrated``): what heads hold, and which files are refused."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.demo_model import BLOCK_SIZE
from tests.engine.conftest import greedy, preempting, random_prompt, run
from vllm_kvmerge import demo
from vllm_kvmerge.engine.head_budgets import check_head_budgets, head_budgets_of, read_head_budgets
from vllm_kvmerge.engine.support import UnsupportedConfigError
from vllm_kvmerge.policies.head_budgets import divided

FILE = demo.head_budgets_path("demo")
FIELDS = {"budget": 100, "allocator": "calibrated"}


def held(engine) -> torch.Tensor:
    """``[layers, heads]``: entries that each head of the only request holds in its front."""
    ((_, state),) = engine.compression.states.items()
    return state.pages.fronts


@pytest.mark.parametrize("policy", ["calibrated", "snapkv", "keepkv", "expected_attention"])
def test_heads_hold_what_the_file_says(engine, policy):
    """To a page, at the prompt's end and after compressions of generated tokens."""
    prompt, shares = random_prompt(np.random.default_rng(1), 700), np.array(read_head_budgets(FILE).shares)
    expected = divided(shares.flatten(), 100, 1, 700).reshape(shares.shape)
    assert expected.max() > 3 * 100  # heads of the demo model differ much
    found = []
    engine.add("one", prompt, greedy(policy, 150, decode="bounded", interval=32, **FIELDS))
    run(engine, lambda: found.append(held(engine).clone()) if engine.compression.states else None)
    assert np.abs(found[0].numpy() - expected).max() <= BLOCK_SIZE
    assert all((one.sum() - found[0].sum()).abs() <= BLOCK_SIZE * one.numel() for one in found)
    assert np.abs(found[-2].numpy() - expected).max() <= 2 * BLOCK_SIZE
    engine.assert_empty()


def test_a_first_compression_during_generation_divides_alike(engine):
    """Nothing has to be measured first."""
    shares, found = np.array(read_head_budgets(FILE).shares), []
    fields = FIELDS | {"budget": 64, "interval": 96}
    engine.add("one", random_prompt(np.random.default_rng(3), 40), greedy("calibrated", 150, **fields))
    run(engine, lambda: found.append(held(engine).clone()) if engine.compression.states else None)
    expected = divided(shares.flatten(), 64, 9, 160).reshape(shares.shape)
    assert np.abs(found[-2].numpy() - expected).max() <= BLOCK_SIZE < expected.max() - 64
    engine.assert_empty()


def test_an_answer_depends_neither_on_company_nor_on_preemption(engine):
    rng = np.random.default_rng(2)
    prompts = [random_prompt(rng, length) for length in (300, 520, 900)]
    params = [greedy(policy, 60, interval=16, **FIELDS) for policy in ("calibrated", "calibrated", "adakv")]
    alone = [engine.tokens([prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
    for index, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        engine.add(str(index), prompt, one)
    assert list(dict(sorted(run(engine, preempting(engine, 30)).items())).values()) == alone
    engine.assert_empty()


SHAPE = SimpleNamespace(get_total_num_hidden_layers=lambda: 4, get_total_num_kv_heads=lambda: 2)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "it cannot be read"),
        ("torn", "Invalid JSON"),
        ({"fingerprint": "f"}, "shares: Field required"),
        ({"fingerprint": "f", "shares": [[1.0, 0.0]] * 4}, "shares.0.1: Input should be greater than 0"),
        ({"fingerprint": "f", "shares": [[1.0]] * 4}, r"its \(layers, KV heads\) are \(4, 1\), the model's \(4, 2\)"),
        ({"fingerprint": "f", "shares": [[1.0, 1.0]] * 4}, "it is of another model"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(engine, tmp_path, content, said):
    path = tmp_path / "heads.json"
    if content is not None:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(UnsupportedConfigError, match=f"head_budgets=.*{said}.*; allowed: a file that vllm-kvmerge cal"):
        check_head_budgets(str(path), SHAPE)
        engine.llm.apply_model(lambda model: head_budgets_of(str(path), model, [0, 1, 2, 3]))


def test_layers_are_counted_in_the_model(engine):
    """Those that are not compressed have budgets in the file that nobody reads."""
    (some,) = engine.llm.apply_model(lambda model: head_budgets_of(FILE, model, [1, 3]))
    whole = read_head_budgets(FILE).shares
    assert some.shares == [whole[1], whole[3]]
