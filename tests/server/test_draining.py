"""The drain: what a server answers between the signal to stop and its end.

These tests drive the middleware alone; ``test_front_door`` and ``test_several_processes`` stop real servers.
"""

import asyncio
import threading
import time
from types import SimpleNamespace

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from vllm_kvmerge.server.draining import DrainingMiddleware, drain_first


def app_with(answer) -> Starlette:
    routes = [Route("/v1/completions", answer, methods=["POST"])]
    return Starlette(routes=routes, middleware=[Middleware(DrainingMiddleware)])


def draining(app: Starlette, stopped: list[float]) -> SimpleNamespace:
    """An engine that the application stops. stopped: times that it is given."""
    engine = SimpleNamespace(shutdown=lambda timeout: stopped.append(timeout))
    drain_first(engine, app.state)
    return engine


def posted(app: Starlette, texts: list[str]) -> threading.Thread:
    """A client whose answer comes into ``texts``."""
    thread = threading.Thread(target=lambda: texts.append(TestClient(app).post("/v1/completions").text))
    thread.start()
    return thread


def test_the_engine_stops_when_all_have_been_answered():
    begun, go_on = threading.Event(), threading.Event()

    def answer(_):
        begun.set()
        assert go_on.wait(60)
        return PlainTextResponse("whole")

    for timeout, waits in ((60, True), (0.1, False), (0, False)):
        app, stopped, answered = app_with(answer), [], []
        begun.clear(), go_on.clear()
        engine, poster = draining(app, stopped), posted(app, answered)
        assert begun.wait(60)
        stopper = threading.Thread(target=engine.shutdown, args=(timeout,))
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
    engine, poster = draining(app, []), posted(app, answered)
    assert begun.wait(60)
    engine.shutdown(timeout=0)
    poster.join(60)
    (text,) = answered
    first, error, last, _ = text.split("\n\n")
    assert (first, last) == ("data: 1", "data: [DONE]") and "has been stopped" in error


def test_the_thread_that_answers_does_not_wait_for_itself():
    app, stopped = app_with(None), []
    app.state.kvmerge_answering = {object()}
    engine = draining(app, stopped)

    async def stop() -> None:
        engine.shutdown(timeout=600)

    asyncio.run(stop())
    assert stopped == [600]
