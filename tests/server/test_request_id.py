"""Request ids: from the client or made up, in the answer, and on log records of the request's own."""

import asyncio
import io
import json
import logging

import pytest
from pythonjsonlogger.json import JsonFormatter
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.testclient import TestClient
from vllm.config import LoggingConfig
from vllm.logger import configure_logging_if_needed

from vllm_kvmerge.engine.compat import log_as_vllm
from vllm_kvmerge.server.request_id import HEADER, RequestIdMiddleware, mark_log_records


@pytest.fixture
def log():
    """JSON lines of a logger, while records are marked."""
    factory, stream = logging.getLogRecordFactory(), io.StringIO()
    for _ in range(2):
        mark_log_records()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("test_request_id")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    logger.removeHandler(handler)
    logging.setLogRecordFactory(factory)


@pytest.fixture
def client():
    async def echo(request: Request) -> JSONResponse:
        logging.getLogger("test_request_id").info("begins")
        await asyncio.sleep(0.01)
        logging.getLogger("test_request_id").info("ends")
        return JSONResponse(request.headers[HEADER], headers={HEADER: "of the app"})

    return TestClient(RequestIdMiddleware(Starlette(routes=[Route("/echo", echo)])))


@pytest.mark.parametrize("given", ["mine-1", None, "", "x" * 129, "tab\there"])
def test_an_id_is_the_clients_or_made_up(client, log, given):
    ids = []
    for _ in range(2):
        answer = client.get("/echo", headers={} if given is None else {HEADER: given})
        assert answer.headers.get_list(HEADER) == [answer.json()]
        ids.append(answer.json())
    assert ids == ["mine-1"] * 2 if given == "mine-1" else ids[0] != ids[1] and len(ids[0]) == 32
    logging.getLogger("test_request_id").info("of no request")
    assert [line.get("request_id") for line in log()] == [ids[0]] * 2 + [ids[1]] * 2 + [None]


def test_our_lines_go_where_vllms_go(monkeypatch):
    configure_logging_if_needed(LoggingConfig())  # as an engine does: this process may have had none
    ours, theirs, own = logging.getLogger("vllm_kvmerge"), logging.getLogger("vllm"), [logging.NullHandler()]
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(ours, "level", ours.level)
    for before, after in (([], theirs.handlers), (own, own)):
        monkeypatch.setattr(ours, "handlers", before)
        log_as_vllm()
        assert ours.handlers == after != []
