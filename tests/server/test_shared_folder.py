"""Two servers that share a folder of contexts: one compresses, both serve."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.server.conftest import Server, serving
from tests.server.test_contexts import FACTS, FIELD, QUESTION, ROUTE, ask, assert_said, cached, keep, said, tokens_of

pytestmark = [pytest.mark.engine, pytest.mark.slow]

MAX_BYTES = 2_000_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def servers(folder: Path) -> Iterator[tuple[Server, Server]]:
    options = "--enable-prompt-tokens-details", "--kvmerge-contexts", str(folder)
    options += "--kvmerge-contexts-bytes", str(MAX_BYTES)
    with serving(*options) as first, serving(*options) as second:
        yield first, second


def counted(server: Server, event: str) -> float:
    return server.metric("vllm:kvmerge_saved_contexts_total", event=event)


def compressions(server: Server) -> float:
    return server.metric("vllm:kvmerge_compressions_total")


def ask_named(server: Server, context_id: str, **body) -> httpx.Response:
    return ask(server, prompt=QUESTION, kv_compression={"context": context_id}, **body)


def whole(server: Server, facts: str, **body) -> httpx.Response:
    """The answer to a question after a context that the request brings."""
    tokens = tokens_of(server, prompt=facts)
    question = tokens_of(server, prompt=QUESTION, add_special_tokens=False)
    return ask(server, prompt=tokens + question, kv_compression=FIELD | {"context_tokens": len(tokens)}, **body)


def num_bytes(folder: Path) -> int:
    return sum({file.stat().st_ino: file.stat().st_size for file in folder.glob("*/*")}.values())


def test_a_context_that_one_has_compressed_is_served_by_the_other(servers, folder):
    first, second = servers
    expected = said(whole(first, FACTS, cache_salt="other"))
    kept = keep(first)
    assert counted(first, "saved") == 1
    shown = httpx.get(f"{second.url}{ROUTE}/{kept['id']}").json()
    assert shown == kept | {"seconds": None} and httpx.get(second.url + ROUTE).json()["data"] == [shown]
    for answer in (ask_named(second, kept["id"]), whole(second, FACTS)):
        assert_said(answer, expected)
        assert cached(answer) == kept["tokens"]
    again = keep(second)  # finds it too, and its files
    assert again["id"] != kept["id"] and len({file.stat().st_ino for file in folder.glob("*/*.safetensors")}) == 1
    assert compressions(second) == 0 and counted(second, "loaded") == 1
    assert httpx.delete(f"{second.url}{ROUTE}/{kept['id']}").status_code == 200
    for server in servers:
        assert ask_named(server, kept["id"]).status_code == 404
        assert_said(ask_named(server, again["id"]), expected)
    assert httpx.delete(f"{first.url}{ROUTE}/{again['id']}").status_code == 200
    assert not list(folder.iterdir())


def test_a_salt_is_one_on_both(servers, folder):
    first, second = servers
    facts = FACTS.replace("fiso", "luro")
    kept, found = keep(first, prompt=facts, cache_salt="mine"), counted(second, "loaded")
    for salted in ({}, {"cache_salt": "another"}):
        assert ask_named(second, kept["id"], **salted).status_code == 404
        assert httpx.get(f"{second.url}{ROUTE}/{kept['id']}", params=salted).status_code == 404
        assert httpx.delete(f"{second.url}{ROUTE}/{kept['id']}", params=salted).status_code == 404
        assert cached(whole(second, facts, **salted)) == 0
    assert counted(second, "loaded") == found
    assert cached(ask_named(second, kept["id"], cache_salt="mine")) == kept["tokens"]
    assert httpx.delete(f"{second.url}{ROUTE}/{kept['id']}", params={"cache_salt": "mine"}).status_code == 200


def test_a_torn_file_is_refused_and_computed_anew(servers, folder):
    first, second = servers
    facts = FACTS.replace("fiso", "kiku")
    expected = said(whole(first, facts, cache_salt="other"))
    kept = keep(first, prompt=facts)
    (file,) = folder.glob("*/*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1000] ^= 1
    file.write_bytes(content)
    answer = ask_named(second, kept["id"])
    assert_said(answer, expected)
    assert cached(answer) == 0 and counted(second, "refused") == 1
    assert sum(f"context {file.parent.name} is not used" in line for line in second.log) == 1
    assert httpx.delete(f"{first.url}{ROUTE}/{kept['id']}").status_code == 200


def test_both_write_read_and_delete_at_once(servers, folder):
    """In a folder that does not hold all that they write."""
    texts = [FACTS.replace("fiso", word) for word in ("zuno", "gema", "pova")]
    expected = [said(whole(servers[0], facts, cache_salt="other")) for facts in texts]
    refused = [counted(server, "refused") for server in servers]

    def work(worker: int) -> int:
        answered = 0
        for turn in range(12):
            mine, other = servers[worker % 2], servers[(worker + turn) % 2]
            index = (worker + turn) % len(texts)
            kept = keep(mine, prompt=texts[index])
            answers = [whole(other, texts[index])]
            if (named := ask_named(other, kept["id"])).status_code != 404:  # it may have been deleted to make room
                answers.append(named)
            for answer in answers:
                assert_said(answer, expected[index])
            answered += len(answers)
            if turn % 3:
                assert httpx.delete(f"{other.url}{ROUTE}/{kept['id']}").status_code in (200, 404)
        return answered

    with ThreadPoolExecutor(4) as pool:
        assert min(pool.map(work, range(4))) > 12
    assert [counted(server, "refused") for server in servers] == refused
    assert num_bytes(folder) <= MAX_BYTES
    assert not list(folder.glob(".*"))
