"""The report stands on its own."""

import re
from html.parser import HTMLParser
from pathlib import Path

from tests.evaluation.runs import small_config
from tests.evaluation.test_runner import constant, go


class Page(HTMLParser):
    """Everything in a page that a browser could follow or fetch, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.values: list[str] = []
        self.ids: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append(tag)
        self.values += [value or "" for _, value in attrs]
        self.ids += [value or "" for name, value in attrs if name == "id"]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_report_is_self_contained(tmp_path: Path) -> None:
    config = small_config(
        tmp_path,
        policies=["full", "h2o", "keepkv"],
        tasks=["demo_recall", {"task": "demo_recall", "length": 96, "facts": 2}],
    )
    assert go(config, tmp_path / "out", constant)[0] == 0
    source = (tmp_path / "out" / "report.html").read_text()
    page = Page(source)
    assert "http" not in source and "@import" not in source
    assert not {"script", "link", "img", "iframe", "object", "image"} & set(page.tags)
    # For both tasks score against budget and memory; a heat map for each budget.
    assert page.tags.count("svg") == 6
    references = [value.partition("#")[2].rstrip(")") for value in page.values if re.match(r"(url\()?#", value)]
    assert references and set(references) <= set(page.ids)
    for text in ("0.000 [0.000, 0.490]", "script 1", "seed: 3", "question_agnostic: false", "demo_recall length=96"):
        assert text in page.text
    assert page.text.count("keepkv") > 10


def test_plots_as_files(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    go(config, tmp_path / "out", constant)
    names = sorted(path.name for path in (tmp_path / "out" / "plots").iterdir())
    assert names == ["heat-0.25.svg", "heat-64.svg", "memory-0.svg", "score-0.svg"]
    summary = (tmp_path / "out" / "summary.md").read_text()
    for name in names:
        svg = (tmp_path / "out" / "plots" / name).read_text()
        assert svg.startswith("<svg") and 'xmlns="http://www.w3.org/2000/svg"' in svg
        assert f"(plots/{name})" in summary
    assert "share of the prompt" in (tmp_path / "out" / "plots" / "score-0.svg").read_text()
    # A finished run gives the same report.
    page = (tmp_path / "out" / "report.html").read_bytes()
    go(config, tmp_path / "out", constant)
    assert (tmp_path / "out" / "report.html").read_bytes() == page
