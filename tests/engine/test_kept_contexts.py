"""Contexts that are kept under an id: pinned, refused, deleted, saved and loaded."""

import asyncio
import json
import os
import shutil
import time
from dataclasses import replace

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from vllm import SamplingParams

from tests.engine.conftest import random_prompt
from vllm_kvmerge import compression
from vllm_kvmerge.engine.contexts import CONTEXT_KEY, call_contexts
from vllm_kvmerge.engine.saved_contexts import ABANDONED, UNFINISHED, load_all, remove, save

CONTEXT, QUESTION, ANSWER = 430, 25, 20
POLICIES = {"snapkv": {}, "h2o": {}, "adakv": {"decode": "bounded"}, "kvzip": {}, "morphkv": {"decode": "bounded"}}


class Client:
    """What API servers have of an engine, here of one in this process. before: what is awaited before workers read."""

    def __init__(self, engine, before=None) -> None:
        self._llm, self._before = engine.llm, before
        self.vllm_config, self.engine_core = engine.scheduler.vllm_config, self

    async def call_utility_async(self, method: str, *args):
        return getattr(self._llm.llm_engine.engine_core.engine_core, method)(*args)

    async def collective_rpc(self, method: str, args=()):
        if self._before is not None:
            await self._before()
        return self._llm.collective_rpc(method, args=args)

    def call(self, name: str, **arguments):
        return asyncio.run(call_contexts(self, name, **arguments))


@pytest.fixture
def client(engine):
    assert engine.llm.reset_prefix_cache()
    with engine.sharing_contexts():
        yield Client(engine)
        engine.scheduler._contexts.clear()


@pytest.fixture
def said(monkeypatch) -> list[str]:
    """Errors that have been logged."""
    texts: list[str] = []
    logger = "vllm_kvmerge.engine.saved_contexts.logger"
    monkeypatch.setattr(f"{logger}.error", lambda text, *args: texts.append(text % args))
    return texts


def text(seed: int, length: int = CONTEXT) -> list[int]:
    return random_prompt(np.random.default_rng(seed), length)


def params(policy: str, max_tokens: int = ANSWER, keep: dict | None = None, context: int = CONTEXT, **fields):
    fields = {"budget": 96, "interval": 8} | POLICIES.get(policy, {}) | fields
    extra = compression(policy, context_tokens=context, **fields)
    if keep is not None:
        extra |= {CONTEXT_KEY: json.dumps(keep)}
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra)


def ask(engine, prompt, some) -> tuple[list[int], int]:
    output = engine.generate([prompt], some)[0]
    return list(output.outputs[0].token_ids), output.num_cached_tokens


def fill(engine, *seeds: int) -> None:
    """What two prompts take is more than the pool holds."""
    engine.generate([text(seed, 3900) for seed in seeds], SamplingParams(max_tokens=2))


def test_what_cannot_be_kept_is_refused(engine, client, monkeypatch):
    monkeypatch.setattr(engine.scheduler._contexts, "_max_blocks", 7)
    for index in range(2):
        ask(engine, text(840 + index), params("snapkv", 2, {"id": str(index)}))
        assert client.call("created", id=str(index))["tokens"] == CONTEXT
    kept = engine.scheduler._contexts._kept
    kept["0"] = replace(kept["0"], salt="another")  # of a user who alone is told its id
    output = engine.generate([text(842)], params("snapkv", 2, {"id": "third"}))[0]
    assert output.outputs[0].finish_reason == "error" and output.num_cached_tokens in (None, 0)
    status, message = client.call("created", id="third")["refused"]
    size = engine.scheduler._accounts._bytes_per_block
    assert status == 409 and f"takes {3 * size} bytes" in message and f"hold {6 * size} of the {7 * size}" in message
    assert message.endswith("; delete some: 1")
    assert client.call("created", id="third") is None  # told once
    engine.generate([text(843)], params("snapkv", 2, {"id": "roomy"}, budget=CONTEXT))
    assert client.call("created", id="roomy")["refused"][0] == 400
    client.call("delete", id="0", salt="another")
    monkeypatch.setattr(engine.manager, "copy_of", lambda num_blocks: None)
    ask(engine, text(844), params("h2o", 2, {"id": "no-copy"}))
    assert client.call("created", id="no-copy")["refused"][0] == 409
    assert [one["id"] for one in client.call("list")] == ["1"]


@pytest.fixture(scope="module")
def saved(engine, tmp_path_factory):
    """Contexts of all policies in a folder, and what is answered after them; they are gone from the engine."""
    folder, asked = tmp_path_factory.mktemp("contexts"), {}
    assert engine.llm.reset_prefix_cache()
    with engine.sharing_contexts():
        client = Client(engine)
        for index, policy in enumerate(POLICIES):
            context = text(860 + index)
            prompts = [context + text(86, QUESTION), context]
            ask(engine, context, params(policy, 2, {"id": policy, "info": {"model": "demo"}}))
            asyncio.run(save(client, folder, policy, None))
            asked[policy] = prompts, [ask(engine, prompt, params(policy))[0] for prompt in prompts]
    return folder, asked


def test_saved_contexts_are_there_again(engine, client, saved):
    folder, asked = saved
    described = []
    for _ in range(2):  # another API server may do so too
        asyncio.run(load_all(client, folder))
        described.append(client.call("list"))
    assert described[0] == described[1] and {one["id"] for one in described[0]} == set(POLICIES)
    for policy, (prompts, expected) in asked.items():
        for prompt, answer, cached in zip(prompts, expected, (CONTEXT, CONTEXT - 1), strict=True):
            assert ask(engine, prompt, params(policy)) == (answer, cached), policy
    for policy in POLICIES:
        client.call("delete", id=policy)
    engine.assert_empty()


@pytest.mark.parametrize("fails", [False, True])
def test_a_server_is_ready_when_others_have_loaded(engine, client, saved, said, fails):
    """Or when it has itself what they could not: workers read nothing, and fail if told so, until it has asked too."""
    folder, _ = saved

    async def load_both() -> list[dict]:
        has_asked = asyncio.Event()

        async def wait() -> None:
            await has_asked.wait()
            if fails:
                raise RuntimeError("no worker")

        loading = asyncio.create_task(load_all(Client(engine, wait), folder))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_soon(has_asked.set)
        await load_all(client, folder)
        found = await call_contexts(client, "list")
        await loading
        return found

    assert {one["id"] for one in asyncio.run(load_both())} == set(POLICIES)


def test_two_ids_of_one_context_are_saved_and_let_go_each_by_itself(engine, client, tmp_path, monkeypatch):
    for name in ("one", "two"):
        ask(engine, text(88), params("morphkv", 2, {"id": name, "content": {"of": name}}))
        asyncio.run(save(client, tmp_path, name, None))
    for name in ("one", "two"):
        client.call("delete", id=name)
    assert engine.llm.reset_prefix_cache()
    asyncio.run(load_all(client, tmp_path))
    assert [client.call("get", id=name)["content"] for name in ("one", "two")] == [{"of": "one"}, {"of": "two"}]
    client.call("delete", id="one")
    # What workers keep for others has no room any more.
    monkeypatch.setattr(engine.manager.fronts, "_max_kept_bytes", 0)
    for seed, is_there in ((880, False), (880, False), (88, True)):
        assert (ask(engine, text(seed), params("morphkv"))[1] == CONTEXT - 1) == is_there
    client.call("delete", id="two")
    engine.assert_empty()


def test_a_context_that_its_tokens_do_not_tell_is_not_saved(engine, client, tmp_path):
    """As one of an adapter: the salt stands for whatever else is part of a front's key."""
    ask(engine, text(89), params("snapkv", 2, {"id": "one"}))
    kept = engine.scheduler._contexts._kept
    kept["one"] = replace(kept["one"], salt="another")
    asyncio.run(save(client, tmp_path, "one", "another"))
    assert list(tmp_path.iterdir()) == []
    assert client.call("delete", id="one", salt="another") is not None
    engine.assert_empty()


IDENTITY = ("model", "dtype", "kv_cache_dtype", "block_size", "tensor_parallel_size", "version", "format")


def damage(folder, how: str) -> str:
    """Returns what is said of it."""
    (path,) = folder.glob("*.safetensors")
    if how in IDENTITY:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
        manifest = json.loads(metadata["manifest"])
        manifest["identity"][how] = "another"
        save_file(load_file(path), path, metadata | {"manifest": json.dumps(manifest)})
        return f"with {how} 'another'"
    content = bytearray(path.read_bytes())
    if how == "a bit":
        content[-1000] ^= 1
    elif how == "weights":
        content[content.index(b'"weights":"') + len(b'"weights":"')] ^= 1  # of a digit, another
    else:
        content = content[: len(content) // 2 if how == "torn" else 0]
    path.write_bytes(content)
    return "checksum" if how in ("a bit", "weights") else "torn"


@pytest.mark.thin(3)
@pytest.mark.parametrize("how", ["torn", "a bit", "empty", "weights", *IDENTITY])
def test_a_file_that_does_not_fit_is_not_used(engine, client, saved, said, tmp_path, how):
    folder, asked = saved
    shutil.copytree(folder / "snapkv", tmp_path / "snapkv")
    error = damage(tmp_path / "snapkv", how)
    asyncio.run(load_all(client, tmp_path))
    assert client.call("list") == [] and len(said) == 1 and "snapkv" in said[0] and error in said[0]
    assert ask(engine, asked["snapkv"][0][0], params("snapkv"))[1] < CONTEXT
    assert not engine.scheduler._contexts and engine.pool.get_num_free_blocks() == engine.pool.num_gpu_blocks - 1


def test_weights_of_another_model_are_told_apart(engine, client, saved, said, monkeypatch):
    monkeypatch.setattr("vllm_kvmerge.engine.worker.compression.fingerprint", lambda model: "another")
    asyncio.run(load_all(client, saved[0]))
    assert len(said) == len(POLICIES) and all("other weights" in one for one in said)
    assert client.call("list") == []
    engine.generate([[5, 6, 7]], SamplingParams(max_tokens=1))
    assert engine.compression._fronts == {}
    engine.assert_empty()


def test_what_could_not_be_saved_leaves_nothing(engine, client, tmp_path, monkeypatch):
    ask(engine, text(87), params("snapkv", 2, {"id": "one"}))

    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr("vllm_kvmerge.engine.worker.compression.write_front", fail)
    with pytest.raises(RuntimeError, match="worker 0: no space left"):
        asyncio.run(save(client, tmp_path, "one", None))
    assert list(tmp_path.iterdir()) == []
    client.call("delete", id="one")
    remove(tmp_path, "one")  # which is not there


def test_a_folder_that_is_being_written_is_left_alone_until_nobody_writes_to_it_any_more(tmp_path):
    now = time.time()
    for name, age in (("written", ABANDONED - 60), ("abandoned", ABANDONED + 60)):
        (tmp_path / f"{UNFINISHED}{name}").mkdir()
        os.utime(tmp_path / f"{UNFINISHED}{name}", (now - age, now - age))
    asyncio.run(load_all(None, tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [f"{UNFINISHED}written"]


def test_the_longest_request_finds_room_beside_all_contexts(engine, client):
    """Which outlast it, and everything else."""
    fields = {"context": 700, "budget": 320}
    for index in range(20):
        ask(engine, text(900 + index, 700), params("snapkv", 2, {"id": str(index)}, **fields))
    kept = client.call("list")
    assert 0 < len(kept) < 20
    question = text(900, 700) + text(901, QUESTION), params("snapkv", **fields)
    answer, cached = ask(engine, *question)
    assert cached == 700
    assert len(engine.tokens([text(90, 4000)], SamplingParams(max_tokens=90, ignore_eos=True))[0]) == 90
    assert client.call("list") == kept and ask(engine, *question) == (answer, cached)
    for one in kept:
        assert client.call("delete", id=one["id"])["bytes"] == one["bytes"]
    engine.assert_empty()
    fill(engine, 902, 903)
    assert ask(engine, *question)[1] < 700


def test_an_id_is_given_once_until_the_prefix_cache_is_reset(engine, client):
    for _ in range(2):
        outputs = engine.generate([text(91), text(92)], params("snapkv", 2, {"id": "one"}))
        assert sorted(output.outputs[0].finish_reason for output in outputs) == ["error", "length"]
        assert engine.llm.reset_prefix_cache() and client.call("list") == []
        engine.assert_empty()


@pytest.mark.thin(3)
@pytest.mark.parametrize("how", ["whole", "torn", "raises"])
def test_a_context_is_asked_for_while_it_is_loaded(engine, client, saved, said, tmp_path, how):
    folder, asked = saved
    shutil.copytree(folder / "snapkv", tmp_path / "snapkv")
    if how == "torn":
        damage(tmp_path / "snapkv", "a bit")
    prompt, expected = (of_each[0] for of_each in asked["snapkv"])
    answers = []

    async def meanwhile() -> None:
        answers.append(ask(engine, prompt, params("snapkv"))[0])
        if how == "raises":
            raise RuntimeError("no worker")

    asyncio.run(load_all(Client(engine, meanwhile), tmp_path))
    assert [one["id"] for one in client.call("list")] == (["snapkv"] if how == "whole" else [])
    answers += [ask(engine, prompt, params("snapkv"))[0] for _ in range(2)]
    assert answers == [expected] * 3
    client.call("delete", id="snapkv")
    fill(engine, 93)
    engine.assert_empty()
