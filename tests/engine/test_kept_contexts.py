"""Contexts that are kept under an id: pinned, refused, deleted, saved and loaded."""

import asyncio
import json
import os
import shutil
import time
from dataclasses import replace

import numpy as np
import pytest
from vllm import SamplingParams

from tests.engine.conftest import random_prompt
from vllm_kvmerge import compression
from vllm_kvmerge.engine import saved_contexts
from vllm_kvmerge.engine.contexts import CONTEXT_KEY, call_contexts
from vllm_kvmerge.engine.saved_contexts import ABANDONED, UNFINISHED, SavedContexts

CONTEXT, QUESTION, ANSWER = 430, 25, 20
POLICIES = {
    "snapkv": {},
    "h2o": {},
    "adakv": {"decode": "bounded"},
    "kvzip": {"front": "int8"},
    "keydiff": {"front": "int4", "decode": "grow"},
    "morphkv": {"decode": "bounded"},
}


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


def load(client, folder, prompt, some) -> None:
    """What a server does before it sends a request."""
    prompt = {"type": "token", "prompt_token_ids": prompt, "cache_salt": some.extra_args.get("salt")}
    asyncio.run(SavedContexts(client, folder).load_front(prompt, some))


def load_saved(client, folder, asked) -> None:
    for policy, (prompts, _) in asked.items():
        load(client, folder, prompts[0], params(policy))


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
            ask(engine, context, params(policy, 2, {"id": policy, "content": {"of": policy}}))
            assert asyncio.run(SavedContexts(client, folder).save(policy, None, 1.0))
            asked[policy] = prompts, [ask(engine, prompt, params(policy))[0] for prompt in prompts]
        engine.scheduler._contexts.clear()
    return folder, asked


def test_saved_contexts_are_there_again(engine, client, saved):
    """By their id for all who ask, and by what they are for all requests that bring it."""
    folder, asked = saved
    contexts = SavedContexts(client, folder)
    assert {one["id"] for one in asyncio.run(contexts.listed(None))} == set(POLICIES)
    for policy, (prompts, expected) in asked.items():
        kept = asyncio.run(contexts.get(policy, None))
        assert (kept["token_ids"], kept["content"]) == (prompts[1], {"of": policy})
        assert asyncio.run(contexts.get(policy, "another salt")) is None
        for _ in range(2):  # another API server may do so too
            load(client, folder, prompts[0], params(policy))
        for prompt, answer, cached in zip(prompts, expected, (CONTEXT, CONTEXT - 1), strict=True):
            assert ask(engine, prompt, params(policy)) == (answer, cached), policy
    assert len(engine.manager.fronts) == len(POLICIES)
    engine.assert_empty()


def test_other_requests_find_no_saved_context(engine, client, saved):
    folder, asked = saved
    (prompt, _), _ = asked["snapkv"]
    salted = params("snapkv")
    salted.extra_args["salt"] = "another"
    for other, some in (
        ([*prompt[:9], 5, *prompt[10:]], params("snapkv")),
        (prompt, params("snapkv", budget=95)),
        (prompt, params("snapkv", context=CONTEXT - 1)),
        (prompt, params("h2o")),
        (prompt, salted),
    ):
        load(client, folder, other, some)
        assert len(engine.manager.fronts) == 0


@pytest.mark.parametrize("fails", [False, True])
def test_two_api_servers_load_one_front(engine, client, saved, fails):
    """The second one waits for the first, or loads it itself if that fails: workers read nothing until it has asked."""
    folder, asked = saved
    (prompt, _), (expected, _) = asked["snapkv"]
    begin = {"type": "token", "prompt_token_ids": prompt}, params("snapkv")

    async def load_both() -> None:
        has_asked = asyncio.Event()

        async def wait() -> None:
            await has_asked.wait()
            if fails:
                raise RuntimeError("no worker")

        loading = asyncio.create_task(SavedContexts(Client(engine, wait), folder).load_front(*begin))
        while not engine.scheduler._contexts._restored:
            await asyncio.sleep(0.01)
        asyncio.get_running_loop().call_later(0.05, has_asked.set)
        await SavedContexts(client, folder).load_front(*begin)
        assert len(engine.manager.fronts) == 1
        await loading

    asyncio.run(load_both())
    assert ask(engine, prompt, begin[1]) == (expected, CONTEXT)


def test_two_ids_of_one_context_are_saved_and_let_go_each_by_itself(engine, client, tmp_path, monkeypatch):
    contexts = SavedContexts(client, tmp_path)
    for name in ("one", "two"):
        ask(engine, text(88), params("morphkv", 2, {"id": name, "content": {"of": name}}))
        assert asyncio.run(contexts.save(name, None, 1.0))
    assert [file.stat().st_nlink for file in tmp_path.glob("*/*.safetensors")] == [2, 2]  # not written again
    assert [asyncio.run(contexts.get(name, None))["content"] for name in ("one", "two")] == [
        {"of": "one"},
        {"of": "two"},
    ]
    assert asyncio.run(contexts.delete("one", None)) and not asyncio.run(contexts.delete("one", None))
    # What workers keep for others has no room any more.
    monkeypatch.setattr(engine.manager.fronts, "_max_kept_bytes", 0)
    for seed, is_there in ((880, False), (880, False), (88, True)):
        assert (ask(engine, text(seed), params("morphkv"))[1] == CONTEXT - 1) == is_there
    shutil.rmtree(next(tmp_path.iterdir()))  # another server deletes it
    assert asyncio.run(contexts.get("two", None)) is None and client.call("list") == []
    engine.assert_empty()


def test_a_context_that_its_tokens_do_not_tell_is_not_saved(engine, client, tmp_path):
    """As one of an adapter: the salt stands for whatever else is part of a front's key."""
    ask(engine, text(89), params("snapkv", 2, {"id": "one"}))
    kept = engine.scheduler._contexts._kept
    kept["one"] = replace(kept["one"], salt="another")
    assert not asyncio.run(SavedContexts(client, tmp_path).save("one", "another", 1.0))
    assert list(tmp_path.iterdir()) == []
    assert client.call("delete", id="one", salt="another") is not None
    engine.assert_empty()


def damage(folder, how: str) -> str:
    """Damages the file of snapkv's context in ``folder``; what is said of it."""
    (path,) = folder.glob("snapkv.*/*.safetensors")
    content = bytearray(path.read_bytes())
    if how == "other tokens":
        (other,) = folder.glob("h2o.*/*.safetensors")
        content = other.read_bytes()
    elif how == "a bit":
        content[-1000] ^= 1
    elif how == "weights":
        content[content.index(b'"weights":"') + len(b'"weights":"')] ^= 1  # of a digit, another
    else:
        content = content[: len(content) // 2 if how == "torn" else 0]
    path.write_bytes(content)
    return {"other tokens": "of another context", "a bit": "checksum", "weights": "checksum"}.get(how, "torn")


@pytest.mark.thin(3)
@pytest.mark.parametrize("how", ["torn", "a bit", "empty", "weights", "other tokens"])
def test_a_file_that_does_not_fit_is_not_used(engine, client, saved, said, tmp_path, how):
    folder, asked = saved
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    error = damage(tmp_path, how)
    contexts, prompt = SavedContexts(client, tmp_path), asked["snapkv"][0][0]
    for _ in range(2):
        asyncio.run(contexts.load_front({"type": "token", "prompt_token_ids": prompt}, params("snapkv")))
    assert len(engine.manager.fronts) == 0 and len(said) == 1 and "snapkv" in said[0] and error in said[0]
    answer, cached = ask(engine, prompt, params("snapkv"))
    assert answer == asked["snapkv"][1][0] and cached < CONTEXT
    engine.assert_empty()


@pytest.mark.parametrize(
    "name", ["model", "dtype", "kv_cache_dtype", "block_size", "tensor_parallel_size", "version", "format"]
)
def test_a_context_of_another_server_is_not_used(client, saved, said, monkeypatch, name):
    ours = saved_contexts.identity(client.vllm_config)
    monkeypatch.setattr(saved_contexts, "identity", lambda config: ours | {name: "another"})
    folder, asked = saved
    load_saved(client, folder, asked)  # finds none
    contexts = SavedContexts(client, folder)
    assert asyncio.run(contexts.listed(None)) == [] and said == []
    assert asyncio.run(contexts.get("snapkv", None)) is None
    assert len(said) == 1 and f"saved with {name} {ours[name]!r}, and this server has 'another'" in said[0]


def test_weights_of_another_model_are_told_apart(engine, client, saved, said, monkeypatch):
    monkeypatch.setattr("vllm_kvmerge.engine.worker.compression.fingerprint", lambda model: "another")
    load_saved(client, *saved)
    assert len(said) == len(POLICIES) and all("other weights" in one for one in said)
    assert len(engine.manager.fronts) == 0
    engine.generate([[5, 6, 7]], SamplingParams(max_tokens=1))
    assert engine.compression._fronts == {}
    engine.assert_empty()


def test_what_could_not_be_saved_leaves_nothing(engine, client, tmp_path, monkeypatch):
    ask(engine, text(87), params("snapkv", 2, {"id": "one"}))
    with pytest.raises(RuntimeError, match="allowed: up to 9999"):
        asyncio.run(SavedContexts(client, tmp_path, 9999).save("one", None, 1.0))

    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr("vllm_kvmerge.engine.worker.compression.write_front", fail)
    with pytest.raises(RuntimeError, match="worker 0: no space left"):
        asyncio.run(SavedContexts(client, tmp_path).save("one", None, 1.0))
    assert list(tmp_path.iterdir()) == []


def test_what_is_cheapest_to_make_again_goes_first(engine, client, tmp_path):
    """Of a folder that is full: per byte, and the longer ago it was used."""

    def save(policy: str, max_bytes: int | None = None) -> None:
        ask(engine, text(870), params(policy, 2, {"id": policy}))
        asyncio.run(SavedContexts(client, tmp_path, max_bytes).save(policy, None, 3.5 if policy == "kvzip" else 1.0))

    def unused_for(**seconds: float) -> None:
        for policy, age in seconds.items():
            (path,) = tmp_path.glob(f"{policy}.*")
            os.utime(path, (time.time() - age, time.time() - age))

    def left() -> set[str]:
        return {path.name.partition(".")[0] for path in tmp_path.iterdir()}

    for policy in ("kvzip", "snapkv"):
        save(policy)
    room = int(1.2 * sum(file.stat().st_size for file in tmp_path.glob("*/*")))
    unused_for(kvzip=100, snapkv=50)
    save("keydiff", room)
    assert left() == {"kvzip", "keydiff"}
    assert asyncio.run(SavedContexts(client, tmp_path).get("snapkv", None)) is None  # nor here any more
    unused_for(kvzip=400, keydiff=50)
    save("knorm", room)
    assert left() == {"keydiff", "knorm"}


def test_what_nobody_wants_any_more_is_deleted(engine, client, tmp_path):
    """Contexts whose time is up, and folders that nobody writes to."""
    contexts, now = SavedContexts(client, tmp_path), time.time()
    ask(engine, text(871), params("snapkv", 2, {"id": "one", "ttl": 1.0}))
    asyncio.run(contexts.save("one", None, 1.0))
    for name, age in (("written", ABANDONED - 60), ("abandoned", ABANDONED + 60)):
        (tmp_path / f"{UNFINISHED}{name}").mkdir()
        os.utime(tmp_path / f"{UNFINISHED}{name}", (now - age, now - age))
    time.sleep(1.0)
    assert asyncio.run(contexts.get("one", None)) is None
    contexts._tidy()
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
@pytest.mark.parametrize("how", ["whole", "torn", "raises", "reset"])
def test_a_context_is_asked_for_while_it_is_loaded(engine, client, saved, said, tmp_path, how):
    folder, asked = saved
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    if how == "torn":
        damage(tmp_path, "a bit")
    prompt, expected = (of_each[0] for of_each in asked["snapkv"])
    answers = []

    async def meanwhile() -> None:
        answers.append(ask(engine, prompt, params("snapkv"))[0])
        if how == "raises":
            raise RuntimeError("no worker")
        if how == "reset":
            engine.scheduler._contexts.clear()

    load(Client(engine, meanwhile), tmp_path, prompt, params("snapkv"))
    assert len(engine.manager.fronts) == (how == "whole")
    answers += [ask(engine, prompt, params("snapkv"))[0] for _ in range(2)]
    assert answers == [expected] * 3
    fill(engine, 93)
    engine.assert_empty()
