"""The page in a browser, against the real server."""

import json
import re
import shlex
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from tests import browser
from tests.demo_model import BYTES_PER_BLOCK
from tests.server.conftest import wait_until
from vllm_kvmerge.demo import recall

lacking = browser.missing()
pytestmark = [pytest.mark.browser, pytest.mark.skipif(lacking is not None, reason=f"no browser: {lacking}")]

SHORT = "remember fiso 1953. recall fiso"

WATCH = """() => {
  window.growth = [];
  for (const side of ["a", "b"]) {
    const answer = document.querySelector(`.side.${side} .answer`);
    const note = () => window.growth.push([side, answer.textContent.length]);
    new MutationObserver(note).observe(answer, {childList: true});
  }
}"""


@pytest.fixture(scope="module")
def shared_page(server) -> Iterator[Any]:
    with browser.open_page(server.url, viewport={"width": 1280, "height": 800}) as page:
        yield page


@pytest.fixture
def page(shared_page) -> Any:
    shared_page.reload()
    shared_page.locator("#run:enabled").wait_for()
    return shared_page


def fill(page: Any, prompt: str, max_tokens: int, ignore_eos: bool = True) -> None:
    page.get_by_label("Prompt", exact=True).fill(prompt)
    page.get_by_label("Max tokens").fill(str(max_tokens))
    page.get_by_label("Go on after the end").set_checked(ignore_eos)


def choose(page: Any, side: str, policy: str, budget: str | None = None, unit: str = "share") -> Any:
    """Sets a side's policy; returns the side."""
    root = page.locator(f".side.{side}")
    root.locator("[name=policy]").select_option(policy)
    if budget is not None:
        root.locator("[name=unit]").select_option(unit)
        root.locator("[name=budget]").fill(budget)
    return root


def run(page: Any) -> None:
    page.get_by_role("button", name="Run").click()
    browser.wait_for_state(page, "done")


def curl_body(side: Any) -> dict[str, Any]:
    """The body that the side would send, off the command that it shows."""
    if side.locator(".curl pre").is_hidden():
        side.locator(".curl summary").click()
    words = shlex.split(side.locator(".curl pre", has_text="curl").inner_text())
    return json.loads(words[words.index("-d") + 1])


def size(num_bytes: float) -> str:
    """As the page shows sizes from 1 KiB to 100 MiB: three digits, thousands apart."""
    value, unit = (num_bytes / 2**20, "MiB") if num_bytes >= 2**20 else (num_bytes / 2**10, "KiB")
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def test_both_answers_stream_and_memory_falls_where_a_cache_is_compressed(server, page):
    fill(page, recall.draw_prompt(np.random.default_rng(), 2000, 16).text, 150)
    choose(page, "a", "full")
    compressed = choose(page, "b", "keepkv", "10")
    page.evaluate(WATCH)
    run(page)

    growth = page.evaluate("window.growth")
    for side in "ab":
        lengths = [length for name, length in growth if name == side and length]
        assert len(set(lengths)) > 10 and lengths == sorted(lengths)
    # What the page says is what the server says to anybody who does not find the page's prompt compressed already.
    body = {**curl_body(compressed), "stream": False, "vllm_xargs": {"kvmerge_usage": 1}, "cache_salt": "another"}
    del body["stream_options"]
    answer = server.post("/v1/completions", body).json()
    assert compressed.locator(".answer").text_content() == answer["choices"][0]["text"]
    report = answer["kv_transfer_params"]["kvmerge"]
    # Side B may find the prompt's blocks of side A, which it cannot compress in place: seven more for a moment.
    peaks = {size(report["peak_bytes"] + more * BYTES_PER_BLOCK) for more in (0, 7)}
    assert compressed.locator("[data-figure=peak]").inner_text() in peaks
    assert int(compressed.locator("[data-figure='entries / head']").inner_text()) <= 200 + 32
    assert f"B keepkv 10%: {size(report['mean_bytes'])}" in page.locator("#summary").inner_text()

    events = compressed.locator(".events li").all_text_contents()
    # Seven blocks of 32, and the one that is being filled.
    sizes = f"{size(63 * BYTES_PER_BLOCK)} → {size(8 * BYTES_PER_BLOCK)}"
    assert events[0].endswith(f" s, 2,000 tokens: 2,000 → 200 entries, {sizes}")
    assert len(events) == 1 + 149 // 32 and page.locator(".side.a .events li").count() == 0

    # The plots show that: a fall at each compression, a line that only rises beside it. A large size is a small y.
    plot = page.locator("#bytes-plot")
    assert [plot.locator(f".{side} .marker").count() for side in "ab"] == [0, len(events)]
    falls, rises = (heights(plot.locator(f"path.line.{side}")) for side in "ba")
    assert falls.index(min(falls)) < falls.index(max(falls)) and falls[-1] > min(falls) + 100
    assert rises == sorted(rises, reverse=True)
    assert all(len(heights(page.locator(f"#rate-plot path.line.{side}"))) > 5 for side in "ab")


def heights(path: Any) -> list[float]:
    """The y coordinates of a path in order."""
    data = path.get_attribute("d")
    return [float(y) for y in re.findall(r"(?:[ML]\S+ |V)([\d.]+)", data)]


def test_the_example_prompt_is_asked_and_marked(page):
    page.get_by_role("button", name="Insert example prompt").click()
    page.locator("#expected:visible").wait_for()
    right = re.search(r"facts: (.*)\. After", page.locator("#expected").inner_text())[1]
    page.get_by_label("Max tokens").fill("5")
    page.get_by_label("Prompt", exact=True).press("Control+Enter")
    browser.wait_for_state(page, "done")
    for side in "ab":
        given = page.locator(f".side.{side} .answer").text_content().strip()[: len(right)]
        mark = "✓" if given == right else "✗"
        assert page.locator(f".side.{side} .verdict").inner_text() == f"{mark} {given}"
    page.get_by_label("Prompt", exact=True).press("End")
    page.get_by_label("Prompt", exact=True).press("a")
    assert page.locator("#expected").is_hidden()


def test_answers_are_compared_with_the_full_cache(server, page):
    fill(page, recall.draw_prompt(np.random.default_rng(1), 300, 8).text, 40)
    plain, side = choose(page, "a", "full"), choose(page, "b", "random", "33", "entries")
    page.get_by_label("Verify").check()
    run(page)
    body = {**curl_body(side), "stream": False, "cache_salt": "another"}
    del body["stream_options"]
    told = server.post("/v1/completions", body).json()["usage"]["kv_compression"]["verified"]
    assert side.locator("[data-figure=verified]").inner_text() == (
        f"{100 * told['agreeing']:.3g}% as the full cache, first difference at token {told['first_difference'] + 1}, "
        f"log p {told['log_prob_change']:+.3f}"
    )
    assert plain.locator("[data-figure=verified]").count() == 0
    assert curl_body(plain)["kv_compression"] == {"policy": "full"}
    show = "async (verified) => (await import('./ui/measure.js')).formatVerified(verified)"
    whole = {"skipped": None, "agreeing": 1.0, "first_difference": None, "log_prob_change": -1e-6}
    assert page.evaluate(show, whole) == "100% as the full cache, log p 0.000"
    assert page.evaluate(show, whole | {"agreeing": None}) == "log p 0.000"
    assert page.evaluate(show, whole | {"skipped": "no_room"}) == "skipped: no_room"


def test_an_error_is_shown_as_the_server_says_it(server, page):
    fill(page, SHORT, 3)
    choose(page, "a", "full")
    side = choose(page, "b", "keepkv", "150")
    page.get_by_role("button", name="Run").click()
    page.locator('.side.b[data-state="refused, HTTP 400"]').wait_for()
    shown = side.get_by_role("alert").inner_text()
    assert server.post("/v1/completions", curl_body(side)).json()["error"]["message"] == shown
    # One side's mistake is not the other's.
    page.locator('.side.a[data-state="done"]').wait_for()
    assert page.locator(".side.a .error").is_hidden() and page.locator(".side.a .answer").text_content()


def test_stop_stops_both_requests(server, page):
    fill(page, SHORT, 4000)
    choose(page, "b", "h2o", "256", "entries")
    page.get_by_role("button", name="Run").click()
    for side in "ab":
        page.locator(f".side.{side} [data-figure='tokens / s']", has_text=re.compile(r"\d")).wait_for()
    page.keyboard.press("Escape")
    browser.wait_for_state(page, "stopped")
    wait_until(lambda: not server.metric("vllm:num_requests_running"))
    for side in "ab":
        tokens = page.locator(f".side.{side} [data-figure='of tokens']").inner_text()
        assert 0 < int(tokens.replace(",", "")) < 4000
        assert page.locator(f".side.{side} .error").is_hidden()


def test_parameters_follow_from_the_policy_and_its_parts(server, page):
    fill(page, SHORT, 2)
    side = choose(page, "b", "snapkv", "100")
    assert isinstance(curl_body(side)["kv_compression"]["budget"], float)
    side.locator(".more summary").click()
    assert side.locator("[name=merge_threshold]").count() == 0
    side.locator("[name=merger]").select_option("zip")
    for name, value in {"merge_threshold": "0.5", "score_window": "all", "context_tokens": "4"}.items():
        side.locator(f"[name={name}]").fill(value)
    field = {"policy": "snapkv", "budget": 1.0, "context_tokens": 4, "merger": "zip", "merge_threshold": 0.5}
    assert curl_body(side)["kv_compression"] == field | {"score_window": "all"}
    assert "merge_threshold = 0.5" in side.locator(".changed").inner_text()
    run(page)
    side.locator("[name=merger]").select_option("drop")
    assert side.locator("[name=merge_threshold]").count() == 0
    choose(page, "b", "full")
    assert curl_body(side)["kv_compression"] == {"policy": "full"} and side.locator(".more").is_hidden()


def test_lists_and_objects_are_typed_as_json(server, page):
    """Text that is no JSON stands for itself where a field takes text, and is marked elsewhere."""
    fill(page, SHORT, 2)
    side = choose(page, "b", "kvzip", "50")
    side.locator(".more summary").click()
    protect, hint = side.locator("[name=protect]"), side.locator("small", has_text="not a JSON list or object")
    protect.fill('{"tokens": [[0, 3]]')
    hint.wait_for()
    assert curl_body(side)["kv_compression"]["protect"] == '{"tokens": [[0, 3]]'
    protect.fill('{"tokens": [[0, 3]], "messages": []}')
    assert hint.count() == 0
    side.locator("[name=repeat_prompt]").fill("recall fiso")
    side.locator("[name=resume_prompt]").fill("[4, 5]")
    field = {"policy": "kvzip", "budget": 0.5, "protect": {"tokens": [[0, 3]], "messages": []}}
    field |= {"repeat_prompt": "recall fiso", "resume_prompt": [4, 5]}
    assert curl_body(side)["kv_compression"] == field
    run(page)


def test_every_policy_is_offered_with_its_own_values(server, page):
    """A form that nobody touched sends the policy alone, whatever its fields are."""
    names = [preset["name"] for preset in httpx.get(server.url + "/kvmerge/policies").json()["presets"]]
    assert page.locator(".side.b [name=policy] option").all_text_contents() == names
    for name in names:
        sent = curl_body(choose(page, "b", name))["kv_compression"]
        assert sent == {"policy": name} | ({} if name == "full" else {"budget": 0.2})


def test_a_chat_goes_to_the_chat_route(page):
    page.locator("[name=kind]").select_option("chat")
    fill(page, SHORT, 3)
    routes = []
    page.on("request", lambda request: routes.append(request.url) if "/v1/" in request.url else None)
    run(page)
    assert [url.rpartition("/v1/")[2] for url in routes] == ["chat/completions"] * 2
    for side in "ab":
        assert page.locator(f".side.{side} .answer").text_content().strip()
    assert set(curl_body(page.locator(".side.a"))["messages"][0]) == {"role", "content"}


def test_a_context_is_kept_asked_and_deleted(server, page):
    page.get_by_role("tab", name="Contexts").click()
    tab = page.locator("#contexts")
    tab.get_by_text("The server keeps no contexts.").wait_for()
    assert page.locator("#compare").is_hidden()
    facts = " ".join(f"remember fiso {1000 + i}." for i in range(120)) + " remember gofu 4821."
    tab.get_by_label("Context", exact=True).fill(facts)
    tab.get_by_label("Delete after (s)").fill("600")
    tab.locator("[name=policy]").select_option("keydiff")
    tab.locator("[name=budget]").fill("50")
    tab.get_by_role("button", name="Create").click()
    row = tab.locator("tbody tr")
    row.wait_for()
    (kept,) = httpx.get(server.url + "/v1/kvmerge/contexts").json()["data"]
    assert kept["kv_compression"]["budget"] == 0.5 and kept["kv_compression"]["policy"] == "keydiff"
    assert kept["expires_at"] - kept["created"] in (599, 600, 601)
    shown = [kept["id"], "demo", "prompt", f"{kept['tokens']:,}", f"{kept['entries']:,}", size(kept["bytes"])]
    assert row.locator("td").all_text_contents()[:6] == shown
    tab.get_by_label("Question", exact=True).fill(" recall gofu")
    tab.get_by_role("button", name="Send").click()
    asked = server.complete(" recall gofu", max_tokens=64, kv_compression={"context": kept["id"]})
    tab.locator(".answer", has_text=asked["choices"][0]["text"]).wait_for()
    assert tab.get_by_role("alert").is_hidden()
    row.get_by_role("button", name="Delete").click()
    tab.get_by_text("The server keeps no contexts.").wait_for()
    assert httpx.get(server.url + "/v1/kvmerge/contexts").json()["data"] == []
    tab.get_by_label("Context", exact=True).fill("a")
    tab.get_by_role("button", name="Create").click()
    tab.get_by_text("nothing would be compressed that could be kept").wait_for()


def test_a_server_with_a_key_is_asked_with_one(server, page):
    def guard(route):
        if route.request.headers.get("authorization") == "Bearer open sesame":
            route.continue_()
        else:
            route.fulfill(status=401, json={"error": "Unauthorized"})

    page.route("**/v1/**", guard)
    page.reload()
    page.get_by_label("API key").wait_for()
    assert page.locator("#page-error").inner_text() == "Unauthorized"
    assert page.get_by_role("button", name="Run").is_disabled()
    page.get_by_label("API key").fill("open sesame")
    page.get_by_label("API key").press("Tab")
    page.locator("#run:enabled").wait_for()
    assert page.locator("#page-error").is_hidden()
    fill(page, SHORT, 3)
    run(page)
    page.locator(".side.a .curl summary").click()
    assert "open sesame" not in page.locator(".side.a .curl").inner_text()
    page.unroute("**/v1/**")
