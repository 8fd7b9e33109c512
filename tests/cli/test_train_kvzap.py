"""``vllm-kvmerge train-kvzap``: what it learns from, what it writes, and what it refuses."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.cli.conftest import refusal
from tests.engine.conftest import random_prompt
from tests.engine.test_repetition import dense_scores
from vllm_kvmerge import demo
from vllm_kvmerge.cli import main
from vllm_kvmerge.cli.scored_texts import kvzip_scores, texts_of
from vllm_kvmerge.cli.train_kvzap import _arguments
from vllm_kvmerge.demo.recall import draw_prompt
from vllm_kvmerge.engine.surrogate import Surrogate, check_surrogate, fingerprint

SHAPE = SimpleNamespace(
    get_total_num_hidden_layers=lambda: 4, get_hidden_size=lambda: 256, get_total_num_kv_heads=lambda: 2
)
"""That of the demo model, as vLLM's ``ModelConfig`` says it."""


@pytest.fixture(scope="module")
def eager():
    return AutoModelForCausalLM.from_pretrained(demo.model_path(), attn_implementation="eager", dtype=torch.float32)


def test_what_is_learnt_are_the_scores_of_a_repetition(eager) -> None:
    """With a request before it, whose queries count as well."""
    context, request = random_prompt(np.random.default_rng(3), 250), [30, 31, 32]
    hidden, scores = kvzip_scores(eager, context, request)
    asked = {"repeat_prompt": request, "resume_prompt": [], "answer_prompt": []}
    expected = dense_scores(context, len(context), 0, asked, normalized=True)
    assert hidden.shape == (4, 250, 256) and scores.shape == (4, 2, 250)
    assert (scores.exp() - expected).abs().max() < 1e-4 * expected.max()


@pytest.mark.parametrize("hidden_dim", ["0", "64"])
def test_a_model_is_trained_and_can_be_loaded(eager, capsys, tmp_path, hidden_dim):
    """It knows more of a text that it has not seen than the mean of its scores."""
    command = ["train-kvzap", "demo", "--num-texts", "4", "--max-tokens", "300", "--epochs", "20"]
    assert main([*command, "--hidden-dim", hidden_dim, "--output", str(tmp_path / "new" / "kvzap")]) == 0
    said = capsys.readouterr().out
    assert "4 of 4 texts" in said and said.splitlines()[-1].startswith(f"{tmp_path}/new/kvzap: share of the variance")
    check_surrogate(str(tmp_path / "new" / "kvzap"), SHAPE)
    trained = Surrogate.load(str(tmp_path / "new" / "kvzap"))
    assert trained.config.hidden_dim == (int(hidden_dim) or None)
    assert trained.config.fingerprint == fingerprint(eager)
    text = draw_prompt(np.random.default_rng(99), 300, 24).context
    hidden, scores = kvzip_scores(eager, AutoTokenizer.from_pretrained(demo.model_path()).encode(text), [])
    predicted = torch.stack([module(one).T for module, one in zip(trained.layers, hidden, strict=True)])
    # The first layer sees single words, many of which these few texts do not have.
    assert (predicted - scores)[1:].square().mean() < 0.5 * scores[1:].var(2).mean()


def test_texts_of_ones_own(capsys, tmp_path):
    """As many as are asked for; what follows them is not read."""
    lines = '{"text": "remember fiso 1953.", "source": "mine"}\n{"text": "recall fiso"}\nnothing\n'
    (tmp_path / "texts.jsonl").write_text(lines)
    command = ["train-kvzap", demo.model_path(), "--texts", str(tmp_path / "texts.jsonl"), "--hidden-dim", "0"]
    command += ["--output", str(tmp_path / "kvzap")]
    assert main([*command, "--num-texts", "2"]) == 0
    assert "2 of 2 texts" in capsys.readouterr().out
    assert all(torch.isfinite(module.weight).all() for module in Surrogate.load(str(tmp_path / "kvzap")).layers)
    assert "texts.jsonl: line 3 must be a" in refusal(capsys, *command)


def test_texts_of_tasks(tmp_path):
    """Contexts without their questions, task by task."""
    tasks = [{"task": "demo_recall", "length": 200}, {"task": "demo_recall", "length": 300}]
    data = {"model": "demo", "policies": ["full"], "tasks": tasks, "samples": 3, "seed": 7}
    (tmp_path / "texts.yaml").write_text(yaml.safe_dump(data))
    command = ["demo", "--texts", str(tmp_path / "texts.yaml"), "--num-texts", "5", "--output", str(tmp_path)]
    texts, tokenizer = list(texts_of(_arguments(command))), AutoTokenizer.from_pretrained(demo.model_path())
    assert len(texts) == len(set(texts)) == 5
    assert [len(tokenizer.encode(text)) // 100 for text in texts] == [1, 2, 1, 2, 1]


def test_texts_of_a_folder(capsys, tmp_path):
    """A stretch of each file that is long enough, from the beginning of a line on."""
    words = "\n".join(f"remember fiso {number}." for number in range(400))
    for name, text in {"a/long.txt": words, "b/long.md": words, "short.txt": "recall fiso", "no.bin": words}.items():
        (tmp_path / "texts" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "texts" / name).write_text(text)
    command = ["train-kvzap", demo.model_path(), "--texts", str(tmp_path / "texts"), "--hidden-dim", "0"]
    command += ["--output", str(tmp_path / "kvzap")]
    assert main([*command, "--max-tokens", "100"]) == 0
    assert "2 of 2 texts" in capsys.readouterr().out
    args = _arguments([*command[1:], "--max-tokens", "100"])
    first, second = texts_of(args)
    assert first != second and all(text in words and text.startswith("remember") for text in (first, second))
    assert "the folder holds no text long enough (allowed: .md, " in refusal(capsys, *command, "--max-tokens", "5000")


@pytest.mark.parametrize(
    ("words", "texts", "said"),
    [
        (["some/model"], None, "--texts: needed for models other than demo"),
        (["demo"], "", "texts.jsonl: holds no text"),
        (["demo"], '{"text": "a"}\n{"txt": "a"}\n', 'line 2 must be a {"text": ...} (Field required)'),
        (["demo"], '{"text": 5}\n', 'line 1 must be a {"text": ...} (Input should be a valid string)'),
        (["demo", "--texts", "/no/texts"], None, "--texts /no/texts: "),
        (["/no/such/model"], '{"text": "a"}\n', "no model in /no/such/model: there is no such folder"),
        (["demo", "--device", "nowhere"], '{"text": "a"}\n', "--device nowhere: "),
        (["demo", "--num-texts", "0"], None, "argument --num-texts: must be at least 1, got 0"),
        (["demo", "--output", "/dev/null/kvzap"], None, "--output /dev/null/kvzap: Not a directory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_is_refused(capsys, tmp_path, words, texts, said):
    if texts is not None:
        (tmp_path / "texts.jsonl").write_text(texts)
        words = [*words, "--texts", str(tmp_path / "texts.jsonl")]
    with_output = words if "--output" in words else [*words, "--output", str(tmp_path / "kvzap")]
    assert said in refusal(capsys, "train-kvzap", *with_output)
