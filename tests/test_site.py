"""The documentation's site: it builds without a dead link, and its generated page is up to date."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.reference import PAGE, page

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1", "REPOSITORY_URL": "https://example.org/project"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


def test_links_to_the_repository_lead_there(site):
    text = (site / "operations.html").read_text()
    code = 'href="https://example.org/project/blob/main/vllm_kvmerge/server/guard.py"'
    assert code in (site / "design.html").read_text()
    assert 'href="https://example.org/project/tree/main/deploy/prometheus"' in text
    assert 'href="SECURITY.html"' in text
    assert 'href="overview.html#limits"' in (site / "quickstart.html").read_text()


def test_llms_txt_lists_every_page(site):
    listed = {line.partition("](")[2].rstrip(")") for line in (site / "llms.txt").read_text().splitlines()} - {""}
    assert listed >= {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert [name for name in listed if not (site / name).is_file()] == []


def test_the_generated_page_is_up_to_date():
    assert PAGE.read_text() == page(), "run python -m tests.reference"
