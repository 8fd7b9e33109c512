"""Runs that are stopped, fail in part or go on; a scripted back end stands for the engine."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.evaluation.runs import ScriptedBackend, constant, small_config
from vllm_kvmerge.errors import CommandError
from vllm_kvmerge.evaluation import command, report
from vllm_kvmerge.evaluation.backends import Answer, BackendError, Request, RequestError, ServerTokenizer
from vllm_kvmerge.evaluation.config import EvalConfig
from vllm_kvmerge.evaluation.results import RunFolder
from vllm_kvmerge.evaluation.runner import _tokenize, chat_frame, draw_prompts
from vllm_kvmerge.evaluation.summary import TaskSummary
from vllm_kvmerge.evaluation.tasks.base import Sample
from vllm_kvmerge.evaluation.tasks.demo import DemoRecall

CELLS, SAMPLES = 3, 4

known_plots: dict[str, dict[str, str]] = {}


@pytest.fixture(autouse=True)
def plots_are_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most runs come to the same figures, and drawing takes half of a run's time."""
    draw = report.draw_plots

    def known_or_drawn(config: EvalConfig, tasks: list[TaskSummary]) -> dict[str, str]:
        asked = repr((config, tasks))
        if asked not in known_plots:
            known_plots[asked] = draw(config, tasks)
        return known_plots[asked]

    monkeypatch.setattr(report, "draw_plots", known_or_drawn)


def go(config, folder: Path, answer) -> tuple[int, ScriptedBackend]:
    backend = ScriptedBackend(answer)
    with RunFolder(folder, config.identity()) as opened:
        return command.run_and_report(config, opened, backend), backend


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def test_a_whole_run(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    status, backend = go(config, tmp_path / "out", constant)
    assert status == 0
    assert backend.started == [(128 + 5, False)]
    assert [request.compression for request in backend.requests[:3]] == [
        {"policy": "full"},
        {"policy": "keepkv", "zip_mode": "votes", "budget": 0.25},
        {"policy": "keepkv", "zip_mode": "votes", "budget": 64},
    ]
    # Sample after sample, each under all policies and budgets; a prompt is the same for all of them.
    assert [backend.requests[i].token_ids for i in range(3)] == [backend.requests[0].token_ids] * 3
    assert backend.requests[3].token_ids != backend.requests[0].token_ids
    found = lines(tmp_path / "out")
    assert len(found) == CELLS * SAMPLES == len({(line["cell"], line["sample"]) for line in found})
    assert found[2] == {
        "cell": "demo_recall length=128 facts=2 | keepkv zip_mode=votes | 64",
        "task": "demo_recall length=128 facts=2", "policy": "keepkv zip_mode=votes", "budget": 64, "sample": 0,
        "seed": 3, "score": 0.0, "prediction": "0 0 0 0", "references": found[0]["references"], "prompt_tokens": 128,
        "mean_entries": 64, "mean_bytes": 65536.0, "peak_entries": 128, "peak_bytes": 131072, "seconds": 0.5,
    }  # fmt: skip
    # A finished run asks nothing more.
    status, backend = go(config, tmp_path / "out", constant)
    assert (status, backend.requests, backend.started) == (0, [], [])


def test_scores_are_the_tasks(tmp_path: Path) -> None:
    config = small_config(tmp_path, samples=2)
    tokenizer = ScriptedBackend(constant).tokenizer
    prompts = draw_prompts(config, config.tasks[0], tokenizer)
    right = {tuple(prompt.token_ids): prompt.sample.references[0] for prompt in prompts[:1]}
    go(config, tmp_path / "out", lambda _, request: Answer(right.get(tuple(request.token_ids), "no"), [], None, 0.1))
    assert [line["score"] for line in lines(tmp_path / "out")] == [1.0] * CELLS + [0.0] * CELLS


@pytest.mark.parametrize("torn", [b"", b'{"cell": "demo_re'])
def test_a_killed_run_goes_on(tmp_path: Path, torn: bytes) -> None:
    config = small_config(tmp_path)

    def killed(index: int, request: Request) -> Answer:
        if index == 5:
            raise MemoryError("killed")
        return constant(index, request)

    with pytest.raises(MemoryError):
        go(config, tmp_path / "out", killed)
    assert len(lines(tmp_path / "out")) == 5
    with (tmp_path / "out" / "results.jsonl").open("ab") as file:
        file.write(torn)
    status, backend = go(config, tmp_path / "out", constant)
    assert status == 0 and len(backend.requests) == CELLS * SAMPLES - 5
    whole, _ = go(config, tmp_path / "other", constant)
    assert whole == 0 and lines(tmp_path / "out") == lines(tmp_path / "other")


def test_interrupt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small_config(tmp_path)

    def interrupted(index: int, request: Request) -> Answer:
        if index == 2:
            raise KeyboardInterrupt
        return constant(index, request)

    with pytest.raises(KeyboardInterrupt):
        go(config, tmp_path / "out", interrupted)
    assert "stopped after 2 samples; the same command goes on from there" in capsys.readouterr().err
    status, backend = go(config, tmp_path / "out", constant)
    assert status == 0 and len(backend.requests) == CELLS * SAMPLES - 2


def test_failed_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small_config(tmp_path)

    def failing(index: int, request: Request) -> Answer | RequestError:
        return RequestError("too hot") if request.compression.get("budget") == 64 else constant(index, request)

    status, backend = go(config, tmp_path / "out", failing)
    printed = capsys.readouterr().err
    cell = "demo_recall length=128 facts=2 | keepkv zip_mode=votes | 64"
    assert status == 1 and len(backend.requests) == CELLS * SAMPLES
    assert f"failed: {cell}, sample 0: too hot" in printed
    assert f"incomplete: {cell}: 0 of 4 samples, 4 failed" in printed
    assert len(lines(tmp_path / "out")) == 2 * SAMPLES
    failures = (tmp_path / "out" / "failures.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in failures][1] == {"cell": cell, "sample": 1, "message": "too hot"}
    for name in ("summary.md", "report.html"):
        text = (tmp_path / "out" / name).read_text()
        assert "Incomplete: 1 cells lack samples" in text and "0 of 4 samples, 4 failed" in text
    # What failed is asked again.
    status, backend = go(config, tmp_path / "out", constant)
    assert status == 0 and len(backend.requests) == SAMPLES
    assert "Incomplete" not in (tmp_path / "out" / "report.html").read_text()


def test_scores_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def score(self, sample: Sample, completion) -> float:
        raise KeyError("gold")

    monkeypatch.setattr(DemoRecall, "score", score)
    config = small_config(tmp_path, policies=["full"])
    assert go(config, tmp_path / "out", constant)[0] == 1
    failure = json.loads((tmp_path / "out" / "failures.jsonl").read_text().splitlines()[0])
    assert failure["message"] == "score: KeyError: 'gold'"


def test_a_dead_engine_ends_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small_config(tmp_path)

    def dying(index: int, request: Request) -> Answer:
        if index == 7:
            raise BackendError("the engine died")
        return constant(index, request)

    assert go(config, tmp_path / "out", dying)[0] == 1
    printed = capsys.readouterr().err
    assert "the engine died" in printed and printed.count("incomplete: ") == CELLS
    assert "2 of 4" in (tmp_path / "out" / "summary.md").read_text()
    assert go(config, tmp_path / "out", constant)[0] == 0


def test_another_configuration_is_refused(tmp_path: Path) -> None:
    go(small_config(tmp_path), tmp_path / "out", constant)
    with pytest.raises(CommandError, match=r"another configuration \(seed: 3 there, 4 now\); choose another folder"):
        go(small_config(tmp_path, seed=4), tmp_path / "out", constant)
    with pytest.raises(
        CommandError, match=r"budgets: \[0.25, 64\] there, \[0.25\] now; tasks.0.samples: 4 there, 3 now"
    ):
        go(small_config(tmp_path, budgets=[0.25], samples=3), tmp_path / "out", constant)
    with pytest.raises(CommandError, match=r"engine.dtype: null there, \"float32\" now"):
        go(small_config(tmp_path, engine={"dtype": "float32"}), tmp_path / "out", constant)
    # An option's default spelled out is no change.
    small = small_config(tmp_path, tasks=[{"task": "demo_recall", "length": 128, "facts": 2, "samples": 4}])
    assert go(small, tmp_path / "out", constant)[0] == 0


def test_a_run_goes_on_with_more_samples(tmp_path: Path) -> None:
    go(small_config(tmp_path), tmp_path / "out", constant)
    before = lines(tmp_path / "out")
    more = small_config(tmp_path, samples=SAMPLES + 2)
    status, backend = go(more, tmp_path / "out", constant)
    assert status == 0 and len(backend.requests) == 2 * CELLS
    found = lines(tmp_path / "out")
    assert found[: len(before)] == before and {line["sample"] for line in found} == set(range(SAMPLES + 2))
    assert go(more, tmp_path / "out", constant)[1].requests == []
    with pytest.raises(CommandError, match="samples: 6 there, 4 now"):
        go(small_config(tmp_path), tmp_path / "out", constant)


def test_other_samples_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config(tmp_path)
    go(config, tmp_path / "out", constant)
    draw = DemoRecall.samples
    monkeypatch.setattr(DemoRecall, "samples", lambda self, count, seed, t: draw(self, count, seed + 1, t))
    with pytest.raises(CommandError, match="draws other samples than when this run began"):
        go(config, tmp_path / "out", constant)


def test_broken_results_are_refused(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    go(config, tmp_path / "out", constant)
    path = tmp_path / "out" / "results.jsonl"
    path.write_text(path.read_text().replace('"seed": 3', '"sed": 3', 1))
    with pytest.raises(CommandError, match=r"results.jsonl, line 1: "):
        RunFolder(tmp_path / "out", config.identity())
    (tmp_path / "out" / "config.yaml").unlink()
    with pytest.raises(CommandError, match="no config.yaml"):
        RunFolder(tmp_path / "out", config.identity())


OPEN = """
import json, sys
from pathlib import Path
from vllm_kvmerge.evaluation.results import RunFolder
RunFolder(Path(sys.argv[1]), json.loads(sys.argv[2]))
"""


def test_one_process_writes(tmp_path: Path) -> None:
    identity = small_config(tmp_path).identity()
    command = [sys.executable, "-c", OPEN, str(tmp_path / "out"), json.dumps(identity)]
    with RunFolder(tmp_path / "out", identity):
        other = subprocess.run(command, capture_output=True, text=True)
        assert other.returncode == 1 and "another run is writing there" in other.stderr
    assert subprocess.run(command).returncode == 0


def test_no_folder_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CommandError, match="--output"):
        RunFolder(tmp_path / "file" / "out", {})


def test_texts_are_split_at_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config(tmp_path, samples=1)
    tokenizer = ScriptedBackend(constant).tokenizer
    sample = Sample(
        context="remember fiso 19", question="53. recall fiso", references=[], max_tokens=3, continuation=" 1 9"
    )
    monkeypatch.setattr(DemoRecall, "samples", lambda *_: [sample])
    (prompt,) = draw_prompts(config, config.tasks[0], tokenizer)
    assert prompt.token_ids == tokenizer.encode(sample.prompt)
    assert prompt.continuation == tokenizer.encode("1 9", add_special_tokens=False)
    assert (prompt.context_tokens, prompt.length) == (None, len(prompt.token_ids) + 2)


def test_context_of_a_question_agnostic_run() -> None:
    tokenizer = ScriptedBackend(constant).tokenizer

    def context_tokens(context: str, question: str) -> int | None:
        sample = Sample(context, question, references=[], max_tokens=3)
        return _tokenize(sample, tokenizer, agnostic=True).context_tokens

    context = "remember fiso 1953."
    assert context_tokens(context, " recall fiso") == len(tokenizer.encode(context))
    # "recallfiso" is one unknown word: the context shares its last token with the question, which gets it.
    assert context_tokens(f"{context} recall", "fiso one two") == len(tokenizer.encode(context))
    assert context_tokens("remember fiso 1953.", "") is None


def test_prompts_in_a_chat_template(tmp_path: Path) -> None:
    tokenizer = ScriptedBackend(constant).tokenizer
    tokenizer.chat_template = "{{ bos_token }} one {{ messages[0].content }}{% if add_generation_prompt %} ,{% endif %}"
    sample = Sample("remember fiso 1953.", " recall fiso two", references=[], max_tokens=3, answer_prefix=" two")
    frame = chat_frame(tokenizer)
    assert frame == ("<s> one ", " ,")
    prompt = _tokenize(sample, tokenizer, agnostic=True, frame=frame)
    wanted = "<s> one remember fiso 1953. recall fiso , two"
    assert prompt.token_ids == tokenizer.encode(wanted, add_special_tokens=False)
    assert prompt.token_ids.count(tokenizer.bos_token_id) == 1
    context = tokenizer.encode("<s> one remember fiso 1953.", add_special_tokens=False)
    assert prompt.token_ids[: prompt.context_tokens] == context
    # For one task of a run, and for all but one.
    task = {"task": "demo_recall", "length": 128, "facts": 2}
    drawn = {}
    for asked, where in ((True, {}), (False, {"chat_template": True}), (True, {"chat_template": False})):
        config = small_config(tmp_path, chat_template=asked, tasks=[{**task, **where}])
        drawn[asked, len(where)] = draw_prompts(config, config.tasks[0], tokenizer)[0].token_ids
        assert ("chat_template" in config.tasks[0].label) == bool(where)
    plain = drawn[True, 1]
    assert drawn[True, 0] == drawn[False, 1] == [plain[0], tokenizer.convert_tokens_to_ids("one"), *plain[1:],
                                                 tokenizer.convert_tokens_to_ids(",")]  # fmt: skip


@pytest.mark.parametrize("template", [None, "{{ messages[0]['content'] | upper }}"])
def test_no_chat_template_that_would_do(template: str | None) -> None:
    tokenizer = ScriptedBackend(constant).tokenizer
    tokenizer.chat_template = template
    with pytest.raises(CommandError, match="chat_template: needs a tokenizer with a chat template"):
        chat_frame(tokenizer)


def test_the_template_of_a_server() -> None:
    said = {}

    def post(path: str, body: dict) -> dict:
        said[path] = body
        return {"tokens": [1, 2], "prompt": "<s>user: what a user says</s>model:"}

    assert chat_frame(ServerTokenizer(SimpleNamespace(post=post))) == ("<s>user: ", "</s>model:")
    assert said["/tokenize"]["messages"][0]["role"] == "user" and said["/tokenize"]["add_generation_prompt"]
    assert said["/detokenize"]["tokens"] == [1, 2]


def test_texts_that_go_on_are_no_chat(tmp_path: Path) -> None:
    config = small_config(tmp_path, chat_template=True, tasks=[{"task": "demo_text", "length": 64, "continuation": 8}])
    with pytest.raises(CommandError, match="chat_template: demo_text length=64 continuation=8 has texts that go on"):
        go(config, tmp_path / "out", constant)


def test_samples_that_cannot_be_drawn(tmp_path: Path) -> None:
    config = small_config(tmp_path, tasks=[{"task": "demo_recall", "length": 32, "facts": 9}])
    with pytest.raises(CommandError, match="task demo_recall length=32 facts=9: .*cannot hold"):
        go(config, tmp_path / "out", constant)
    # Nothing was answered, so the folder is not bound to that configuration.
    assert go(small_config(tmp_path), tmp_path / "out", constant)[0] == 0
