"""The drain: what a server answers between the signal to stop and its end.

These tests drive the middleware alone; ``test_front_door`` and ``test_several_processes`` stop real servers.
"""

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from vllm_kvmerge.server.draining import DrainingMiddleware, drain_first


def answers(client) -> dict[str, int]:
    codes = {path: client.get(path).status_code for path in ("/health", "/ping", "/metrics")}
    return codes | {"post": client.post("/v1/completions").status_code}


def app_with(answer) -> Starlette:
    routes = [Route(path, lambda _: PlainTextResponse("ok")) for path in ("/health", "/ping", "/metrics")]
    routes.append(Route("/v1/completions", answer, methods=["POST"]))
    return Starlette(routes=routes, middleware=[Middleware(DrainingMiddleware)])


def test_new_requests_are_refused_once_the_engine_stops():
    app = app_with(lambda _: PlainTextResponse("ok"))
    client = TestClient(app)
    calls = []
    engine = SimpleNamespace(shutdown=lambda timeout: calls.append((timeout, answers(client))))
    drain_first(engine, app.state)
    assert set(answers(client).values()) == {200}
    engine.shutdown(timeout=30)
    draining = {"/health": 503, "/ping": 503, "/metrics": 200, "post": 503}
    assert calls == [(pytest.approx(30, abs=5), draining)]  # from before the engine is told
    refusal = client.post("/v1/completions")
    assert refusal.headers["retry-after"] == "1"
    assert refusal.json()["error"]["code"] == 503


def test_the_engine_stops_when_all_have_been_answered():
    """Both parts of it: with an answer under way, and with one that takes longer than there is time."""
    begun, go_on = threading.Event(), threading.Event()

    def answer(_):
        begun.set()
        assert go_on.wait(60)
        return PlainTextResponse("whole")

    for timeout, waits in ((60, True), (0.1, False), (0, False)):
        app, stopped, answered = app_with(answer), [], []
        begun.clear(), go_on.clear()
        engine = SimpleNamespace(shutdown=lambda timeout, seen=stopped: seen.append(timeout))
        drain_first(engine, app.state)
        poster = threading.Thread(
            target=lambda app=app, seen=answered: seen.append(TestClient(app).post("/v1/completions").text)
        )
        poster.start()
        assert begun.wait(60)
        stopper = threading.Thread(target=lambda engine=engine, timeout=timeout: engine.shutdown(timeout=timeout))
        stopper.start()
        if waits:
            while not getattr(app.state, "kvmerge_draining", False):
                time.sleep(0.01)
            assert stopped == [] and stopper.is_alive()
            go_on.set()
        stopper.join(60)
        assert len(stopped) == 1 and (stopped[0] > 0) == waits
        go_on.set()
        poster.join(60)
        assert answered == ["whole"] if waits else "has been stopped" in answered[0]


def test_a_stream_that_is_cut_off_ends_with_an_error():
    begun, answered = threading.Event(), []

    async def events():
        yield "data: 1\n\n"
        begun.set()
        await asyncio.Event().wait()

    app = app_with(lambda _: StreamingResponse(events(), media_type="text/event-stream"))
    engine = SimpleNamespace(shutdown=lambda timeout: None)
    drain_first(engine, app.state)
    poster = threading.Thread(target=lambda: answered.append(TestClient(app).post("/v1/completions").text))
    poster.start()
    assert begun.wait(60)
    engine.shutdown(timeout=0)
    poster.join(60)
    (text,) = answered
    first, error, last, _ = text.split("\n\n")
    assert (first, last) == ("data: 1", "data: [DONE]") and "has been stopped" in error


def test_the_thread_that_answers_does_not_wait_for_itself():
    app, stopped = app_with(None), []
    app.state.kvmerge_answering = {object()}
    engine = SimpleNamespace(shutdown=lambda timeout: stopped.append(timeout))
    drain_first(engine, app.state)

    async def stop() -> None:
        engine.shutdown(timeout=600)

    asyncio.run(stop())
    assert stopped == [600]
