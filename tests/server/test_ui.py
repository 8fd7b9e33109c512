"""The page's routes, on an application of their own."""

import re
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from vllm_kvmerge import __version__, demo
from vllm_kvmerge.cli.arguments import EXAMPLE_PROMPTS
from vllm_kvmerge.demo import handbook
from vllm_kvmerge.server import page
from vllm_kvmerge.server.endpoint import KVMergeEndpoint

SCRIPTS = sorted(path.name for path in page.FOLDER.glob("*.js"))


def client_of(model: str, keys: list[str] | None = None, examples: str | None = None) -> TestClient:
    app, config = FastAPI(), {"kvmerge": {"example_prompts": examples}}
    app.state.args = Namespace(scheduler_cls="some.Scheduler", model=model, api_key=keys, additional_config=config)
    KVMergeEndpoint().attach_router(app)
    return TestClient(app, follow_redirects=False)


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    yield client_of(demo.model_path(), examples=EXAMPLE_PROMPTS)


@pytest.mark.parametrize(
    ("name", "content_type"),
    [
        *((name, "text/html; charset=utf-8") for name in ("", "/index.html")),
        ("/style.css", "text/css; charset=utf-8"),
        ("/icon.svg", "image/svg+xml"),
        *((f"/{script}", "text/javascript; charset=utf-8") for script in SCRIPTS),
    ],
)
def test_files_come_with_their_type_and_nothing_may_come_from_elsewhere(client, name, content_type):
    response = client.get(page.UI_ROUTE + name)
    assert response.status_code == 200
    assert response.content == (page.FOLDER / (name.strip("/") or "index.html")).read_bytes()
    assert response.headers["content-type"] == content_type
    assert response.headers["x-content-type-options"] == "nosniff"
    policy = dict(part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";"))
    assert policy.pop("default-src") == "'none'"
    assert set(policy.values()) == {"'self'", "'none'"}
    head = client.head(page.UI_ROUTE + name)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == response.headers["content-length"]


def test_a_file_that_has_not_changed_is_not_sent_again(client):
    etag = client.get("/kvmerge/ui/app.js").headers["etag"]
    assert etag != client.get("/kvmerge/ui/api.js").headers["etag"]
    for known in (etag, f"W/{etag}", f'"other", {etag}', "*"):
        response = client.get("/kvmerge/ui/app.js", headers={"If-None-Match": known})
        assert (response.status_code, response.content, response.headers["etag"]) == (304, b"", etag)
    assert client.get("/kvmerge/ui/app.js", headers={"If-None-Match": '"other"'}).status_code == 200


@pytest.mark.parametrize(
    "name", ["nothing.js", "../page.py", "..%2fpage.py", "..%5cpage.py", "%2fetc%2fpasswd", "%2e%2e"]
)
def test_nothing_else_is_served(client, name):
    response = client.get(f"/kvmerge/ui/{name}")
    assert response.status_code in (404, 307)
    assert b"import" not in response.content and b"root:" not in response.content


def test_everything_that_the_files_name_is_there(client):
    """Scripts, styles and icons by relative addresses, so that the page works behind a proxy's prefix too."""
    html = client.get("/kvmerge/ui").text
    named = set(re.findall(r'(?:src|href)="ui/([^"]+)"', html))
    assert named and len(re.findall(r"(?:src|href)=", html)) == len(named)
    for script in SCRIPTS:
        named |= set(re.findall(r'from "\./([^"]+)"', (page.FOLDER / script).read_text()))
    assert named == {path.name for path in page.FOLDER.iterdir()} - {"index.html"}
    assert '"vllm_kvmerge.server" = ["ui/*"]' in (Path(__file__).parents[2] / "pyproject.toml").read_text()


def test_the_page_knows_the_demo_model(client):
    assert client.get("/kvmerge/ui/config").json() == {"version": __version__, "demo": True}
    drawn, other = (client.get("/kvmerge/ui/example").json() for _ in range(2))
    words = drawn["prompt"].split()
    assert drawn != other and len(words) == 1000 - 1  # and <s>
    assert words[-2] == "recall" and f"remember {words[-1]} {drawn['answer']} ." in drawn["prompt"]


def test_other_models_get_a_question_about_a_document():
    client = client_of("some/model")
    assert client.get("/kvmerge/ui/config").json()["demo"] is False
    drawn = client.get("/kvmerge/ui/example").json()
    assert drawn["kind"] == "chat" and drawn["prompt"].startswith(handbook.document())
    assert drawn["answer"] in handbook.document() and drawn["answer"] not in drawn["prompt"].splitlines()[-1]


def test_the_key_is_the_password_of_the_page():
    """A browser cannot send it otherwise when it opens a page. Answers take it as a Bearer's alone."""
    client = client_of("some/model", ["open sesame", "another"])
    for route in (
        "/kvmerge/ui",
        "/kvmerge/ui/app.js",
        "/kvmerge/ui/config",
        "/kvmerge/ui/nothing",
        "/kvmerge/policies",
    ):
        for auth in (None, ("anyone", "wrong"), ("open sesame", "")):
            answer = client.get(route, auth=auth)
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, 'Basic realm="vllm-kvmerge"')
        for auth in (("anyone", "open sesame"), ("", "another")):
            assert client.get(route, auth=auth).status_code == (404 if "nothing" in route else 200)
        assert client.get(route, headers={"Authorization": "Bearer another"}).status_code != 401
        assert client.post(route, auth=("", "another")).status_code == 401
        for value in ("Basic", "Basic !!", "Basic YW55b25l", "Basic é", "Bearer", "Digest YTpvcGVuIHNlc2FtZQ=="):
            assert client.get(route, headers={"Authorization": value.encode("latin-1")}).status_code == 401, value
    for route in ("/v1/models", "/kvmerge/uis", "/kvmerge", "/unknown"):
        answer = client.get(route, auth=("", "another"))
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert answer.json() == {"error": "Unauthorized"}  # what the page shows


def test_a_file_that_has_changed_has_another_tag(tmp_path: Path) -> None:
    tags = []
    for text in ("one", "two", "one"):
        (tmp_path / "style.css").write_text(text)
        tags.append(page.PageFile(tmp_path / "style.css").etag)
    assert tags[0] == tags[2] != tags[1]
