"""The report stands on its own."""

import re

from tests.evaluation.runs import small_config
from tests.evaluation.test_runner import go


def test_report_is_self_contained(tmp_path):
    tasks = ["demo_recall", {"task": "demo_recall", "length": 96, "facts": 2}]
    config = small_config(tmp_path, policies=["full", "h2o", "keepkv"], tasks=tasks)
    assert go(config, tmp_path / "out")[0] == 0
    source = (tmp_path / "out" / "report.html").read_text()
    assert "http" not in source and "@import" not in source
    tags = re.findall(r"<(\w+)", source)
    assert not {"script", "link", "img", "iframe", "object", "image"} & set(tags)
    # For both tasks score against budget and memory; a heat map for each budget.
    assert tags.count("svg") == 6
    references = set(re.findall(r"""(?:url\(|href=")#([^")]+)""", source))
    assert references and references <= set(re.findall(r'\bid="([^"]+)"', source))
    for text in ("0.000 [0.000, 0.490]", "script 1", "seed: 3", "question_agnostic: false", "demo_recall length=96"):
        assert text in source
    assert source.count("keepkv") > 10


def test_plots_as_files(tmp_path):
    config = small_config(tmp_path)
    go(config, tmp_path / "out")
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
    go(config, tmp_path / "out")
    assert (tmp_path / "out" / "report.html").read_bytes() == page
