"""A headless browser on the page at /kvmerge/ui.

``python -m tests.browser http://127.0.0.1:8000 docs/images/ui.png`` takes the picture in docs/tutorials.md from a
running server of the demo model.
"""

import argparse
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

CHROMIUM = "chromium"
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
TIMEOUT = 120_000
"""Milliseconds that anything on the page may take."""


def missing() -> str | None:
    """What a browser test lacks here, if anything."""
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "the Python package playwright is not installed (it is in the extra dev)"
    return None if shutil.which(CHROMIUM) else f"there is no {CHROMIUM} (Debian: apt-get install {CHROMIUM})"


@contextmanager
def open_page(url: str, **context: Any) -> Iterator[Any]:
    """The page of the server at ``url`` in a browser of its own, once it can be used; ``context``: as for Playwright.

    Raises AssertionError if the browser complained about anything by the end.
    """
    from playwright.sync_api import sync_playwright

    complaints: list[str] = []
    # The browser's processes may still write to their profile when it has been closed.
    with sync_playwright() as playwright, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = playwright.chromium.launch_persistent_context(
            profile, executable_path=shutil.which(CHROMIUM), args=FLAGS, **context
        )
        browser.set_default_timeout(TIMEOUT)
        page = browser.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.goto(url + "/kvmerge/ui")
        page.locator("#run:enabled, #key-field:visible").first.wait_for()
        yield page
        browser.close()
    # A browser reports every answer other than 2xx, of which some are meant.
    assert [text for text in complaints if not text.startswith("Failed to load resource")] == []


def wait_for_state(page: Any, state: str) -> None:
    for side in "ab":
        page.locator(f'.side.{side}[data-state="{state}"]').wait_for()
    if state != "running":
        page.locator("#run:enabled").wait_for()


def main() -> None:
    parser = argparse.ArgumentParser(description="Takes a picture of the page after a comparison.")
    parser.add_argument("url", help="of a server of the demo model")
    parser.add_argument("file")
    arguments = parser.parse_args()
    with open_page(arguments.url, viewport={"width": 1280, "height": 720}, color_scheme="light") as page:
        side = page.locator(".side.b")
        page.get_by_label("Verify").check()
        side.locator("[name=policy]").select_option("snapkv")
        side.locator("[name=budget]").fill("30")
        side.locator(".more summary").click()
        side.locator("[name=decode]").select_option("bounded")
        side.locator(".more summary").click()
        for _ in range(2):  # the first time warms the server up
            page.locator("#example").click()
            page.locator("#expected:visible").wait_for()
            page.locator("#run").click()
            wait_for_state(page, "done")
        page.screenshot(path=arguments.file, full_page=True)


if __name__ == "__main__":
    main()
