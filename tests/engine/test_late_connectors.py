"""KV connectors that load asynchronously, several at once, and in vain: of plain requests, beside compressed ones."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm.v1.request import RequestStatus

from tests.engine.conftest import Engine, engine_arguments, engine_with, in_a_process, random_prompt, run
from tests.engine.test_connectors import BLOCK_SIZE, MAX_TOKENS, SIZE, greedy, prompts, tokens
from tests.engine.test_plain import STOCK
from vllm_kvmerge.engine.usage import REPORT_KEY

pytestmark = [pytest.mark.engine, pytest.mark.slow]

LATE = {"kv_connector": "LateConnector", "kv_connector_module_path": "tests.engine.late_connector"}
VAIN = LATE | {"kv_connector": "VainConnector"}


def connector(folder: Path, kind: dict[str, Any], policy: str = "fail", **extra: Any) -> dict[str, Any]:
    extra = {"shared_storage_path": str(folder), **extra}
    return {"kv_role": "kv_both", "kv_connector_extra_config": extra, "kv_load_failure_policy": policy} | kind


@contextmanager
def running(transfer: dict[str, Any]) -> Iterator[Engine]:
    from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown

    try:
        with engine_with(**engine_arguments() | SIZE, kv_transfer_config=transfer) as engine:
            yield engine
    finally:
        ensure_kv_transfer_shutdown()


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Without a connector."""
    job = [engine_arguments() | SIZE, prompts(), MAX_TOKENS]
    return in_a_process(["-c", STOCK], job, is_stock=True)[0]


def spoil(engine: Engine) -> None:
    """Forgets all that was computed, and leaves in every block what must be zeroed before it is used."""
    assert engine.llm.reset_prefix_cache()
    engine.manager.note_spoilt({block.block_id for block in engine.pool.blocks if not block.is_null})
    for cache in engine.compression.pool:
        cache.content.fill_(float("nan"))


def test_requests_whose_blocks_come_later(expected, tmp_path):
    """Beside compressed ones, which go on meanwhile, of the same prompts: these never wait for a connector."""
    with running(connector(tmp_path, LATE)) as engine:
        spoil(engine)
        assert engine.tokens(prompts(), greedy()) == expected
        spoil(engine)
        compressed = [engine.tokens([prompt], greedy("h2o"))[0] for prompt in prompts()]
        assert len(list(tmp_path.iterdir())) == len(prompts())
        spoil(engine)
        waited: list[set[str]] = []

        def watch() -> None:
            held = engine.scheduler.kv_holding_waiting
            waiting = {one.request_id for one in held if one.status == RequestStatus.WAITING_FOR_REMOTE_KVS}
            if waiting and any(one.request_id.startswith("compressed") for one in engine.scheduler.running):
                waited.append({one.split("-")[0] for one in waiting})

        for index, prompt in enumerate(prompts()):
            engine.add(f"plain {index}", prompt, greedy())
            engine.add(f"compressed {index}", prompt, greedy("h2o"))
        found = run(engine, watch)
        names = [[f"{kind} {index}" for index in range(len(expected))] for kind in ("plain", "compressed")]
        assert [[found[name] for name in some] for some in names] == [expected, compressed]
        # Those that never exceed their budget are plain.
        short = {name for name, prompt in zip(names[1], prompts(), strict=True) if len(prompt) < 64 + MAX_TOKENS}
        assert short and {*names[0]} <= set.union(*waited) <= {*names[0]} | short
        engine.assert_empty()
        # A request that ends while its blocks come.
        spoil(engine)
        engine.add("one", prompts()[-1], greedy())
        engine.add("other", random_prompt(np.random.default_rng(4), 300), greedy("snapkv"))
        engine.llm.llm_engine.step()
        (waiting,) = engine.scheduler.kv_holding_waiting
        engine.llm.llm_engine.abort_request([waiting.request_id], internal=True)
        assert list(run(engine)) == ["other"]
        for _ in range(10):
            engine.llm.llm_engine.step()
        engine.assert_empty()


def test_blocks_that_do_not_come_are_computed(expected, tmp_path):
    """Zeroed before, as all are that are not loaded."""
    with running(connector(tmp_path, LATE, "recompute", num_missing=3)) as engine:
        assert engine.tokens(prompts(), greedy()) == expected
        spoil(engine)
        engine.scheduler.max_num_scheduled_tokens = 40  # so that chunks end within such blocks
        assert engine.tokens(prompts(), greedy()) == expected
        engine.assert_empty()


def test_several_connectors(expected, tmp_path):
    """All store; whoever has a prompt's blocks loads them."""
    folders = [tmp_path / "first", tmp_path / "second"]
    several = [connector(folders[0], {"kv_connector": "ExampleConnector"}), connector(folders[1], LATE)]
    for one, folder in zip(several, folders, strict=True):
        del one["kv_load_failure_policy"]
        folder.mkdir()
    extra = {"kv_connector_extra_config": {"connectors": several}}
    with running({"kv_connector": "MultiConnector", "kv_role": "kv_both"} | extra) as engine:
        spoil(engine)
        assert engine.tokens(prompts(), greedy()) == expected
        compressed = engine.tokens(prompts(), greedy("keepkv"))
        assert [len(list(folder.iterdir())) for folder in folders] == [len(prompts())] * 2
        for folder in folders:
            spoil(engine)
            again = engine.generate([*prompts(), *prompts()], [greedy()] * 8 + [greedy("keepkv")] * 8)
            assert tokens(again) == expected + compressed
            cached = [(len(one) - 1) // BLOCK_SIZE * BLOCK_SIZE for one in prompts()]
            assert [one.num_cached_tokens for one in again[:8]] == cached
            engine.assert_empty()
            for stored in folder.iterdir():  # from the next time on the other connector has them
                shutil.rmtree(stored)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_compressed_requests_fail_with_the_load_that_they_share(tmp_path, policy):
    """They began with blocks that a plain request's load was to fill in the same step."""
    prompt = random_prompt(np.random.default_rng(5), 500)
    with running(connector(tmp_path, VAIN, policy)) as engine:
        expected = engine.tokens([prompt], greedy())[0]
        compressed = engine.tokens([prompt], greedy("h2o"))[0]
        assert engine.llm.reset_prefix_cache()
        plain, same, other = engine.generate(
            [prompt, prompt, prompt[:200]], [greedy(), greedy("h2o"), greedy("streaming_llm")]
        )
        assert plain.outputs[0].finish_reason == ("error" if policy == "fail" else "length")
        for one in (same, other):
            assert one.outputs[0].finish_reason == "error"
            assert "did not load blocks" in one.kv_transfer_params[REPORT_KEY]["error"]
        if policy == "recompute":
            assert list(plain.outputs[0].token_ids) == expected
            assert engine.tokens([prompt], greedy("h2o"))[0] == compressed
        engine.assert_empty()
