"""Runs that are stopped, fail in part or go on; a scripted back end stands for the engine."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.evaluation.runs import ScriptedBackend, constant, small_config
from vllm_kvmerge.errors import CommandError
from vllm_kvmerge.evaluation import command, report
from vllm_kvmerge.evaluation.backends import BackendError, RequestError, ServerTokenizer
from vllm_kvmerge.evaluation.results import RunFolder
from vllm_kvmerge.evaluation.runner import _tokenize, chat_frame, draw_prompts
from vllm_kvmerge.evaluation.tasks.base import Sample
from vllm_kvmerge.evaluation.tasks.demo import DemoRecall
from vllm_kvmerge.request.proof import Verified

CELLS, SAMPLES = 3, 4
LABEL = "demo_recall length=128 facts=2"


@pytest.fixture(autouse=True)
def no_plots(monkeypatch):
    """Drawing takes half of a run's time."""
    monkeypatch.setattr(report, "draw_plots", lambda config, tasks: {})


def go(config, folder, answer=constant) -> tuple[int, ScriptedBackend]:
    backend = ScriptedBackend(answer)
    with RunFolder(folder, config.identity()) as opened:
        return command.run_and_report(config, opened, backend), backend


def at(place: int, error: BaseException):
    """Answers, but for the one at this place."""

    def answer(index, request):
        if index == place:
            raise error
        return constant(index, request)

    return answer


def lines(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def test_a_whole_run(tmp_path):
    config = small_config(tmp_path)
    status, backend = go(config, tmp_path / "out")
    assert status == 0
    assert backend.started == [(128 + 5, False)]
    assert [request.compression for request in backend.requests[:3]] == [
        {"policy": "full"},
        {"policy": "keepkv", "zip_mode": "votes", "budget": 0.25},
        {"policy": "keepkv", "zip_mode": "votes", "budget": 64},
    ]
    # Sample after sample, each under all policies and budgets; a prompt is the same for all of them.
    first, *same, other = (request.token_ids for request in backend.requests[:4])
    assert same == [first] * 2 and other != first
    found = lines(tmp_path / "out")
    assert len(found) == CELLS * SAMPLES == len({(line["cell"], line["sample"]) for line in found})
    assert found[2] == {
        "cell": f"{LABEL} | keepkv zip_mode=votes | 64",
        "task": LABEL, "policy": "keepkv zip_mode=votes", "budget": 64, "sample": 0,
        "seed": 3, "score": 0.0, "prediction": "0 0 0 0", "references": found[0]["references"], "prompt_tokens": 128,
        "mean_entries": 64, "mean_bytes": 65536.0, "peak_entries": 128, "peak_bytes": 131072, "seconds": 0.5,
        "log_prob_change": None,
    }  # fmt: skip
    # A finished run asks nothing more.
    status, backend = go(config, tmp_path / "out")
    assert (status, backend.requests, backend.started) == (0, [], [])


@pytest.mark.parametrize(
    ("error", "torn", "said"),
    [
        (MemoryError("killed"), b"", ""),
        (MemoryError("killed"), b'{"cell": "demo_re', ""),
        (KeyboardInterrupt(), b"", "stopped after 5 samples; the same command goes on from there"),
    ],
)
def test_a_stopped_run_goes_on(tmp_path, capsys, error, torn, said):
    config = small_config(tmp_path)
    with pytest.raises(type(error)):
        go(config, tmp_path / "out", at(5, error))
    assert len(lines(tmp_path / "out")) == 5 and said in capsys.readouterr().err
    with (tmp_path / "out" / "results.jsonl").open("ab") as file:
        file.write(torn)
    status, backend = go(config, tmp_path / "out")
    assert status == 0 and len(backend.requests) == CELLS * SAMPLES - 5
    go(config, tmp_path / "other")
    assert lines(tmp_path / "out") == lines(tmp_path / "other")


def test_failed_requests(tmp_path, capsys, monkeypatch):
    monkeypatch.undo()  # there are plots of what has been answered
    config = small_config(tmp_path)

    def failing(index, request):
        return RequestError("too hot") if request.compression.get("budget") == 64 else constant(index, request)

    status, backend = go(config, tmp_path / "out", failing)
    printed = capsys.readouterr().err
    cell = f"{LABEL} | keepkv zip_mode=votes | 64"
    assert status == 1 and len(backend.requests) == CELLS * SAMPLES
    assert f"failed: {cell}, sample 0: too hot" in printed
    assert f"incomplete: {cell}: 0 of 4 samples, 4 failed" in printed
    assert len(lines(tmp_path / "out")) == 2 * SAMPLES
    failures = (tmp_path / "out" / "failures.jsonl").read_text().splitlines()
    assert json.loads(failures[1]) == {"cell": cell, "sample": 1, "message": "too hot"}
    for name in ("summary.md", "report.html"):
        text = (tmp_path / "out" / name).read_text()
        assert "Incomplete: 1 cells lack samples" in text and "0 of 4 samples, 4 failed" in text
    # What failed is asked again.
    status, backend = go(config, tmp_path / "out")
    assert status == 0 and len(backend.requests) == SAMPLES
    assert "Incomplete" not in (tmp_path / "out" / "report.html").read_text()


def test_scores_that_cannot_be_had(tmp_path, monkeypatch):
    def score(self, sample, completion):
        raise KeyError("gold")

    monkeypatch.setattr(DemoRecall, "score", score)
    assert go(small_config(tmp_path, policies=["full"]), tmp_path / "out")[0] == 1
    failure = json.loads((tmp_path / "out" / "failures.jsonl").read_text().splitlines()[0])
    assert failure["message"] == "score: KeyError: 'gold'"


def test_agreement(tmp_path):
    """It is asked of compressed answers alone, and fails where it was skipped."""
    config = small_config(tmp_path, tasks=[{"task": "ngram_repetition", "metric": "agreement"}], samples=1)
    some = {"agrees": [True, False, True, True], "log_probs": [-2.0, -1.0, 0.0, 0.0], "tokens": 9}

    def answer(index, request):
        found = {"skipped": "no_room"} if request.compression.get("budget") == 64 else some
        verified = Verified.of(found, [-1.0] * 4, is_sampled=False) if request.verify else None
        return replace(constant(index, request), verified=verified)

    status, _ = go(config, tmp_path / "out", answer)
    full, quarter = lines(tmp_path / "out")
    assert (full["score"], full["log_prob_change"]) == (1.0, None)
    assert (quarter["budget"], quarter["score"], quarter["log_prob_change"]) == (0.25, 0.75, -0.25)
    failure = json.loads((tmp_path / "out" / "failures.jsonl").read_text())
    assert status == 1 and failure["message"] == "score: ValueError: not verified: no_room"
    assert "agreement, higher is better" in (tmp_path / "out" / "summary.md").read_text()


def test_a_dead_engine_ends_the_run(tmp_path, capsys):
    config = small_config(tmp_path)
    assert go(config, tmp_path / "out", at(7, BackendError("the engine died")))[0] == 1
    printed = capsys.readouterr().err
    assert "the engine died" in printed and printed.count("incomplete: ") == CELLS
    assert "2 of 4" in (tmp_path / "out" / "summary.md").read_text()
    assert go(config, tmp_path / "out")[0] == 0


def test_another_configuration_is_refused(tmp_path):
    go(small_config(tmp_path), tmp_path / "out")
    for changes, said in (
        ({"seed": 4}, r"another configuration \(seed: 3 there, 4 now\); choose another folder"),
        ({"budgets": [0.25], "samples": 3}, r"budgets: \[0.25, 64\] there, \[0.25\] now; tasks.0.samples: 4 there, 3"),
        ({"engine": {"dtype": "float32"}}, r"engine.dtype: null there, \"float32\" now"),
    ):
        with pytest.raises(CommandError, match=said):
            go(small_config(tmp_path, **changes), tmp_path / "out")
    # An option's default spelled out is no change.
    small = small_config(tmp_path, tasks=[{"task": "demo_recall", "length": 128, "facts": 2, "samples": 4}])
    assert go(small, tmp_path / "out")[0] == 0


def test_a_run_goes_on_with_more_samples(tmp_path):
    go(small_config(tmp_path), tmp_path / "out")
    before = lines(tmp_path / "out")
    more = small_config(tmp_path, samples=SAMPLES + 2)
    status, backend = go(more, tmp_path / "out")
    assert status == 0 and len(backend.requests) == 2 * CELLS
    found = lines(tmp_path / "out")
    assert found[: len(before)] == before and {line["sample"] for line in found} == set(range(SAMPLES + 2))
    with pytest.raises(CommandError, match="samples: 6 there, 4 now"):
        go(small_config(tmp_path), tmp_path / "out")


def test_other_samples_are_refused(tmp_path, monkeypatch):
    config = small_config(tmp_path)
    go(config, tmp_path / "out")
    draw = DemoRecall.samples
    monkeypatch.setattr(DemoRecall, "samples", lambda self, count, seed, t: draw(self, count, seed + 1, t))
    with pytest.raises(CommandError, match="draws other samples than when this run began"):
        go(config, tmp_path / "out")


def test_folders_that_cannot_be_used(tmp_path):
    config = small_config(tmp_path)
    go(config, tmp_path / "out")
    path = tmp_path / "out" / "results.jsonl"
    path.write_text(path.read_text().replace('"seed": 3', '"sed": 3', 1))
    with pytest.raises(CommandError, match=r"results.jsonl, line 1: "):
        RunFolder(tmp_path / "out", config.identity())
    (tmp_path / "out" / "config.yaml").unlink()
    with pytest.raises(CommandError, match="no config.yaml"):
        RunFolder(tmp_path / "out", config.identity())
    with pytest.raises(CommandError, match="--output"):
        RunFolder(path / "out", config.identity())
    first = RunFolder(tmp_path / "other", config.identity())
    with first, pytest.raises(CommandError, match="another run is writing there"):
        RunFolder(tmp_path / "other", config.identity())
    RunFolder(tmp_path / "other", config.identity())


@pytest.fixture
def tokenizer():
    return ScriptedBackend(constant).tokenizer


def test_texts_are_split_at_tokens(tmp_path, monkeypatch, tokenizer):
    config = small_config(tmp_path, samples=1)
    sample = Sample("remember fiso 19", "53. recall fiso", references=[], max_tokens=3, continuation=" 1 9")
    monkeypatch.setattr(DemoRecall, "samples", lambda *_: [sample])
    (prompt,) = draw_prompts(config, config.tasks[0], tokenizer)
    assert prompt.token_ids == tokenizer.encode(sample.prompt)
    assert prompt.continuation == tokenizer.encode("1 9", add_special_tokens=False)
    assert (prompt.context_tokens, prompt.length) == (None, len(prompt.token_ids) + 2)


@pytest.mark.parametrize(
    ("context", "question", "compressed"),
    [
        ("remember fiso 1953.", " recall fiso", "remember fiso 1953."),
        # "recallfiso" is one unknown word: the context shares its last token with the question, which gets it.
        ("remember fiso 1953. recall", "fiso one two", "remember fiso 1953."),
        ("remember fiso 1953.", "", None),
    ],
)
def test_context_of_a_question_agnostic_run(tokenizer, context, question, compressed):
    prompt = _tokenize(Sample(context, question, references=[], max_tokens=3), tokenizer, agnostic=True)
    assert prompt.context_tokens == (compressed and len(tokenizer.encode(compressed)))


def test_prompts_in_a_chat_template(tmp_path, tokenizer):
    tokenizer.chat_template = "{{ bos_token }} one {{ messages[0].content }}{% if add_generation_prompt %} ,{% endif %}"
    sample = Sample("remember fiso 1953.", " recall fiso two", references=[], max_tokens=3, answer_prefix=" two")
    frame = chat_frame(tokenizer)
    assert frame == ("<s> one ", " ,")
    prompt = _tokenize(sample, tokenizer, agnostic=True, frame=frame)
    wanted = "<s> one remember fiso 1953. recall fiso , two"
    assert prompt.token_ids == tokenizer.encode(wanted, add_special_tokens=False)
    context = tokenizer.encode("<s> one remember fiso 1953.", add_special_tokens=False)
    assert prompt.token_ids[: prompt.context_tokens] == context
    # For one task of a run, and for all but one.
    task = {"task": "demo_recall", "length": 128, "facts": 2}
    drawn = {}
    for asked, where in ((True, {}), (False, {"chat_template": True}), (True, {"chat_template": False})):
        config = small_config(tmp_path, chat_template=asked, tasks=[{**task, **where}])
        drawn[asked, len(where)] = draw_prompts(config, config.tasks[0], tokenizer)[0].token_ids
        assert ("chat_template" in config.tasks[0].label) == bool(where)
    bos, *plain = drawn[True, 1]
    one, comma = tokenizer.convert_tokens_to_ids(["one", ","])
    assert drawn[True, 0] == drawn[False, 1] == [bos, one, *plain, comma]


@pytest.mark.parametrize("template", [None, "{{ messages[0]['content'] | upper }}"])
def test_no_chat_template_that_would_do(tokenizer, template):
    tokenizer.chat_template = template
    with pytest.raises(CommandError, match="chat_template: needs a tokenizer with a chat template"):
        chat_frame(tokenizer)


def test_the_template_of_a_server():
    said = {}

    def post(path: str, body: dict) -> dict:
        said[path] = body
        return {"tokens": [1, 2], "prompt": "<s>user: what a user says</s>model:"}

    assert chat_frame(ServerTokenizer(SimpleNamespace(post=post))) == ("<s>user: ", "</s>model:")
    assert said["/tokenize"]["messages"][0]["role"] == "user" and said["/tokenize"]["add_generation_prompt"]
    assert said["/detokenize"]["tokens"] == [1, 2]


def test_samples_that_cannot_be_drawn(tmp_path):
    text = {"task": "demo_text", "length": 64, "continuation": 8}
    for changes, said in (
        ({"chat_template": True, "tasks": [text]}, "chat_template: demo_text length=64 continuation=8 has texts"),
        ({"tasks": [{"task": "demo_recall", "length": 32, "facts": 9}]}, "task demo_recall length=32 facts=9: .*cann"),
    ):
        with pytest.raises(CommandError, match=said):
            go(small_config(tmp_path, **changes), tmp_path / "out")
    # Nothing was answered, so the folder is not bound to those configurations.
    assert go(small_config(tmp_path), tmp_path / "out")[0] == 0
