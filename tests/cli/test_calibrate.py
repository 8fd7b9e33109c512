"""``vllm-kvmerge calibrate``: what it measures, what it writes, and what it refuses."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from tests.cli.conftest import refusal
from tests.engine.test_repetition import dense_scores
from tests.random_model import write_gemma
from vllm_kvmerge import demo
from vllm_kvmerge.cli import main
from vllm_kvmerge.demo.handbook import document
from vllm_kvmerge.demo.recall import draw_prompt
from vllm_kvmerge.engine.head_budgets import read_head_budgets
from vllm_kvmerge.policies.head_budgets import measured_shares

NOTHING = {"repeat_prompt": [], "resume_prompt": [], "answer_prompt": []}
"""The demo model's: it has no words to ask for a repetition."""


def test_the_file_says_what_heads_get_of_kvzips_scores(tmp_path, capsys):
    """Of two texts of one's own. What ships for the demo model was measured on others, and is similar."""
    rng, tokenizer = np.random.default_rng(5), AutoTokenizer.from_pretrained(demo.model_path())
    texts = [draw_prompt(rng, 400, 24).context for _ in range(2)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    path = tmp_path / "new" / "heads.json"
    command = ["calibrate", demo.model_path(), "--texts", str(tmp_path / "texts.jsonl"), "--output", str(path)]
    assert main(command) == 0 and capsys.readouterr().out.splitlines()[-1] == str(path)
    found, shipped = read_head_budgets(str(path)), read_head_budgets(demo.head_budgets_path("demo"))
    contexts = [tokenizer.encode(text) for text in texts]
    expected = [measured_shares(dense_scores(one, len(one), 0, NOTHING).float()) for one in contexts]
    assert torch.allclose(torch.tensor(found.shares).double(), torch.stack(expected).mean(0), atol=0.03)
    assert found.fingerprint == shipped.fingerprint and found.shape == shipped.shape == (4, 2)
    shares = np.array([found.shares, shipped.shares]).reshape(2, -1)
    assert np.allclose(shares.mean(1), 1.0, atol=1e-3) and np.corrcoef(shares)[0, 1] > 0.85


def test_layers_with_windows_do_not_compete(tmp_path):
    """They are not compressed."""
    model, path = write_gemma(tmp_path / "gemma"), tmp_path / "heads.json"
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": document()}) + "\n")
    command = ["calibrate", str(model), "--max-tokens", "300", "--texts", str(tmp_path / "texts.jsonl")]
    assert main([*command, "--output", str(path)]) == 0
    shares = np.array(read_head_budgets(str(path)).shares)
    sees_all = np.arange(6) % 3 == 2
    assert (shares[~sees_all] == 1).all() and (shares[sees_all] != 1).any()
    assert shares[sees_all].mean() == pytest.approx(1.0, abs=2e-3)


def test_what_is_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for words, said in (
        (
            ["/no/such/model", "--output", str(tmp_path / "h.json")],
            "no model in /no/such/model: there is no such folder",
        ),
        (["demo", "--output", str(tmp_path / "file" / "h.json")], "--output "),
        (["demo", "--output", str(tmp_path / "h.json"), "--device", "tpu"], "--device tpu: "),
        (["demo", "--output", str(tmp_path / "h.json"), "--texts", "/no/texts"], "--texts /no/texts: "),
    ):
        assert said in refusal(capsys, "calibrate", *words)
