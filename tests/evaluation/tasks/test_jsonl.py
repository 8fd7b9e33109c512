"""Tasks from a user's own file."""

import json
from pathlib import Path

import pytest

from tests.evaluation.runs import small_config
from vllm_kvmerge.evaluation.tasks.base import Completion, Sample
from vllm_kvmerge.evaluation.tasks.jsonl import JsonLines


def drawn(path: Path, *lines: object, count: int = 9, seed: int = 0) -> list[Sample]:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return JsonLines(path=str(path), max_tokens=5).samples(count, seed, None)  # type: ignore[arg-type]


def test_samples(tmp_path: Path) -> None:
    lines = [{"question": f" q{i}?", "references": [str(i)]} for i in range(20)]
    first, *others = drawn(tmp_path / "a.jsonl", lines[0] | {"context": "c"}, "", *lines[1:], count=99)
    assert first == Sample("c", " q0?", ["0"], 5) and first.prompt == "c q0?"
    assert [sample.question for sample in others] == [f" q{i}?" for i in range(1, 20)]
    some = drawn(tmp_path / "a.jsonl", *lines, count=8, seed=1)
    assert some == drawn(tmp_path / "a.jsonl", *lines, count=8, seed=1)
    numbers = [int(sample.references[0]) for sample in some]
    assert len(numbers) == 8 and numbers == sorted(set(numbers))
    assert some != drawn(tmp_path / "a.jsonl", *lines, count=8, seed=2)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: Expecting property name"),
        ("[]", "line 2: must be an object, got list"),
        ({"question": "q", "answer": "a"}, "line 2: unknown field answer; allowed: context, question, references"),
        ({"question": "q", "context": 3, "references": ["a"]}, "line 2: question and context must be texts"),
        ({"question": "q", "references": []}, "line 2: references must be a list of one or more texts"),
        ({"question": "q"}, "line 2: references must be a list of one or more texts, but for metric: agreement"),
    ],
)
def test_what_is_wrong_with_a_file(tmp_path: Path, line: object, said: str) -> None:
    with pytest.raises(ValueError, match="path: cannot read /no/such.jsonl"):
        JsonLines(path="/no/such.jsonl").samples(1, 0, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="path: .*a.jsonl, ") as error:
        drawn(tmp_path / "a.jsonl", {"question": "q", "references": ["a"]}, line)
    assert said in str(error.value)


def test_agreement_takes_no_references(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"question": "q"}\n{"question": "r", "references": ["a"]}')
    (entry,) = small_config(tmp_path, tasks=[{"task": "jsonl", "path": str(path), "metric": "agreement"}]).tasks
    samples = entry.task.samples(9, 0, None)  # type: ignore[arg-type]
    assert [sample.references for sample in samples] == [[], ["a"]]
    assert entry.label == f"jsonl path={path} metric=agreement" and entry.task.metric == "agreement"


@pytest.mark.parametrize(
    ("answer", "contains", "exact"),
    [("Paris", 1, 1), (" paris.\n", 1, 1), ("It is Paris", 1, 0), ("New  York!", 1, 1), ("York", 0, 0), ("", 0, 0)],
)
def test_scores(answer: str, contains: float, exact: float) -> None:
    sample = Sample("", "q", ["Paris", "New York"], 5)
    assert JsonLines(path="x").score(sample, Completion(answer)) == contains
    assert JsonLines(path="x", match="exact").score(sample, Completion(answer)) == exact
