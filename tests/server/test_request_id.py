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

from vllm_kvmerge.engine.compat import log_as_vllm
from vllm_kvmerge.server.request_id import HEADER, RequestIdMiddleware, mark_log_records


@pytest.fixture
def log(monkeypatch):
    """JSON lines of a logger, while records are marked."""
    factory = logging.getLogRecordFactory()
    mark_log_records()
    marked = logging.getLogRecordFactory()
    mark_log_records()
    assert logging.getLogRecordFactory() is marked
    stream = io.StringIO()
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


def test_a_clients_id_goes_through(client, log):
    answer = client.get("/echo", headers={HEADER: "mine-1"})
    assert answer.json() == "mine-1"
    assert answer.headers.get_list(HEADER) == ["mine-1"]
    assert [line["request_id"] for line in log()] == ["mine-1", "mine-1"]


@pytest.mark.parametrize("given", [None, "", "x" * 129, "tab\there"])
def test_an_id_is_made_up(client, log, given):
    first, second = (client.get("/echo", headers={} if given is None else {HEADER: given}) for _ in range(2))
    assert first.json() == first.headers[HEADER] != second.headers[HEADER]
    assert len(first.json()) == 32
    assert [line["request_id"] for line in log()] == [first.json()] * 2 + [second.json()] * 2


def test_what_belongs_to_no_request_is_not_marked(client, log):
    client.get("/echo")
    logging.getLogger("test_request_id").info("outside")
    assert "request_id" not in log()[-1]


def test_our_lines_go_where_vllms_go(monkeypatch):
    from vllm.config import LoggingConfig
    from vllm.logger import configure_logging_if_needed

    configure_logging_if_needed(LoggingConfig())  # as an engine does: this process may have had none
    ours = logging.getLogger("vllm_kvmerge")
    monkeypatch.setattr(ours, "handlers", [])
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    level = ours.level
    log_as_vllm()
    assert ours.handlers == logging.getLogger("vllm").handlers != []
    ours.setLevel(level)
    other = [logging.NullHandler()]
    ours.handlers = other
    log_as_vllm()
    assert ours.handlers == other
