"""The prose model: its text, its batches, its training and its scores."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_kvmerge.demo import prose, scores_prose, train_prose
from vllm_kvmerge.demo.prose import SOURCES, Page, read_pages, text_of
from vllm_kvmerge.demo.training import Schedule, Stage

SENTENCES = [
    f"Number {i} of the lines says that the value of {i * 7} is read before {i} is written." for i in range(200)
]

SCHEDULE = Schedule(
    tokens_per_step=128, learning_rate=1e-3, stages=(Stage(32, 2), Stage(256, 2), Stage(64, 2, repeats=True))
)


@pytest.fixture(scope="module")
def tokenizer():
    return train_prose.train_tokenizer(SENTENCES)


@pytest.fixture(scope="module")
def text(tokenizer):
    pages = [" ".join(SENTENCES[:60]), *SENTENCES]
    return train_prose.tokens_of([Page(str(i), page) for i, page in enumerate(pages)], tokenizer)


def test_text_of_a_page():
    page = """<html><head><title>No</title></head><body><nav><nav>no</nav><p>no</p></nav>
    <div class="related top"><div>no</div><p>no</p></div>
    <h1>A  heading<a class="headerlink" href="#a">¶</a></h1>
    <p>One <code>word</code>\n and &lt;more&gt;.<br>Next&nbsp;line.<p>Two.
    <pre>if x:\n    y = 1\n</pre><table><tr><td>a</td><td>b</td></tr></table>
    <div id="searchbox"><br></div><script>no</script></body></html>"""
    assert text_of(page) == "A heading\n\nOne word and <more>.\nNext line.\n\nTwo.\n\nif x:\n    y = 1\n\na b\n"


def test_pages_are_read_in_order_and_a_tenth_is_held_out(tmp_path):
    with pytest.raises(ValueError, match="packages: .* has no .*html; it comes from Debian's python3.11-doc"):
        list(read_pages(tmp_path))
    for source in SOURCES:
        for folder in source.folders:
            (tmp_path / folder / "_modules").mkdir(parents=True)
    folder = tmp_path / SOURCES[0].folders[0]
    for i in range(400):
        (folder / f"{i:03}.html").write_text(f"<p>{i} {'word ' * 100}")
    (folder / "400.html").write_text(f"<p>7 {'word ' * 100}")  # a copy of another
    (folder / "401.html").write_text("<p>short")
    (folder / "genindex.html").write_text("<p>list " * 100)
    (folder / "_modules" / "source.html").write_text("<p>code " * 100)
    pages = list(read_pages(tmp_path))
    assert [page.text.split()[0] for page in pages] == [str(i) for i in range(400)]
    assert pages[0].name == f"python3.11-doc/{SOURCES[0].folders[0]}/000.html"
    held_out = [page for page in pages if page.is_held_out]
    assert 20 < len(held_out) < 65
    # What is held out depends on the name alone, whatever else there is.
    (folder / "000.html").unlink()
    assert [page for page in read_pages(tmp_path) if page.is_held_out] == [p for p in held_out if p is not pages[0]]


def test_tokens_give_texts_back(tokenizer, text):
    again = train_prose.train_tokenizer(SENTENCES)
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    for line in ("Grüße: 日本 1234\n    if x:\n\n", SENTENCES[3]):
        ids = tokenizer.encode(line)
        assert ids[0] == train_prose.BOS and tokenizer.decode(ids[1:]) == line
    ends = np.flatnonzero(text == train_prose.EOS)
    assert len(ends) == 1 + len(SENTENCES) and tokenizer.decode(text[ends[0] + 1 : ends[1]]) == SENTENCES[0]


def test_batches_are_windows_of_the_text(text):
    sizes = set()
    for step in range(40):
        inputs, targets = train_prose.draw_batch(text, 0, step, 1, SCHEDULE)
        assert torch.equal(inputs, train_prose.draw_batch(text, 0, step, 1, SCHEDULE)[0])
        assert (inputs[:, 0] == train_prose.BOS).all() and torch.equal(inputs[:, 1:], targets[:, :-1])
        sizes.add(tuple(inputs.shape))
        windows = np.lib.stride_tricks.sliding_window_view(text, targets.shape[1])
        assert (windows == targets[0].numpy()).all(1).any()
        assert not (targets[:, :-1] == train_prose.EOS).any()  # all within a page
    # Documents longer than a step are read one at a time.
    assert sizes == {(4, 32), (1, 256)}
    assert not torch.equal(*(train_prose.draw_batch(text, seed, 0, 0, SCHEDULE)[1] for seed in (0, 1)))


def test_windows_that_repeat_a_passage(text):
    passages = set()
    for step in range(40):
        _, targets = train_prose.draw_batch(text, 0, step, 2, SCHEDULE)
        if targets.shape[1] != 64:
            continue  # an earlier stage's
        for window in targets.numpy():
            period = next(n for n in range(1, 65) if (window[n:] == window[:-n]).all())
            assert train_prose.SHORTEST_PASSAGE <= period <= 32
            assert (np.lib.stride_tricks.sliding_window_view(text, period) == window[:period]).all(1).any()
            passages.add(period)
    assert len(passages) > 8


def trained(folder, tokenizer, text, stop_after=()):
    for stop in (*stop_after, None):
        trainer = train_prose.ProseTrainer(text, tokenizer, folder, 0, "cpu", stop, SCHEDULE)
        trainer.run()
    return trainer.model.state_dict()


def test_an_interrupted_run_gets_to_the_same_model_which_loads(tmp_path, tokenizer, text):
    whole = trained(tmp_path / "whole", tokenizer, text)
    parts = trained(tmp_path / "parts", tokenizer, text, stop_after=(1, 3))
    for name, weight in whole.items():
        assert torch.equal(weight, parts[name]), name
    untrained, other = (
        train_prose.ProseTrainer(text, tokenizer, tmp_path / "new", seed, "cpu").model.lm_head.weight for seed in (0, 1)
    )
    assert not torch.equal(untrained, other) and not torch.equal(untrained, whole["lm_head.weight"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", local_files_only=True)
    assert model.dtype == torch.bfloat16 and model.config.num_key_value_heads < model.config.num_attention_heads
    assert sum(file.stat().st_size for file in (tmp_path / "whole").glob("*.safetensors")) < 12e6
    loaded = AutoTokenizer.from_pretrained(tmp_path / "whole", local_files_only=True)
    assert loaded.encode(SENTENCES[0]) == tokenizer.encode(SENTENCES[0])


def test_every_weight_has_one_optimizer(tmp_path, tokenizer, text):
    trainer = train_prose.ProseTrainer(text, tokenizer, tmp_path, 0, "cpu")
    muon, adamw = ([id(p) for group in one.param_groups for p in group["params"]] for one in trainer.optimizers)
    assert sorted(muon + adamw) == sorted(id(p) for p in trainer.model.parameters())
    layers = trainer.model.model.layers
    assert set(muon) == {
        id(p) for layer in layers for name, p in layer.named_parameters() if name.endswith("proj.weight")
    }


def test_losses_by_place(tokenizer):
    torch.manual_seed(0)
    model = train_prose.build_model()
    texts = [" ".join(SENTENCES[:20]), SENTENCES[0], " ".join(SENTENCES[20:80])]
    every, pages = scores_prose.windows_of(texts, tokenizer, 129, 1_000)
    lengths = [len(tokenizer.encode(text)) - 1 for text in texts]
    assert pages.tolist() == [0] * (lengths[0] // 128) + [2] * (lengths[2] // 128)
    assert every[1, 1:].tolist() == tokenizer.encode(texts[0])[129:257]
    tokens, chosen = scores_prose.windows_of(texts, tokenizer, 129, 3)
    assert torch.equal(tokens, every[[0, round((len(every) - 1) / 2), len(every) - 1]]) and chosen.tolist() == [0, 2, 2]
    assert tokens.shape == (3, 129) and (tokens[:, 0] == train_prose.BOS).all()
    with pytest.raises(ValueError, match="length: no page has 10000 tokens"):
        scores_prose.windows_of(texts, tokenizer, 10_000, 3)
    losses, near = scores_prose.losses_of(model, tokens), scores_prose.near_losses_of(model, tokens, 32)
    assert losses.shape == near.shape == (3, 128)
    with torch.no_grad():
        whole = model(tokens, labels=tokens).loss
        part = torch.cat([tokens[:1, :1], tokens[:1, 33:65]], dim=1)
        last = model(part[:, :-1]).logits[0, -16:].log_softmax(-1).gather(1, part[0, -16:, None])[:, 0]
    assert losses.mean().item() == pytest.approx(whole.item(), rel=1e-5)
    torch.testing.assert_close(near[:, :32], losses[:, :32])
    # The next parts begin at tokens 33 - 16 and 49 - 16.
    torch.testing.assert_close(near[0, 48:64], -last)


def test_an_interval_takes_pages_as_its_samples():
    values = np.array([1.0, 1.0, 1.0, 1.0, 3.0, 3.0, 3.0, 3.0])
    # One draw of two pages in four has the first alone, one the second.
    assert scores_prose.interval_of(values, np.repeat([0, 1], 4)) == (1.0, 3.0)
    low, high = scores_prose.interval_of(values, np.arange(8))
    assert 1.0 < low < 2.0 < high < 3.0
    # A page of three windows counts as three of one.
    assert scores_prose.interval_of(np.array([0.0, 0.0, 0.0, 4.0]), np.array([0, 0, 0, 1])) == (0.0, 4.0)


def test_held_out_pages_are_written(tmp_path, monkeypatch):
    pages = [Page(f"page {i}", f"text {i}") for i in range(60)]
    monkeypatch.setattr(prose, "read_pages", lambda packages: iter(pages))
    file = tmp_path / "held-out.jsonl"
    monkeypatch.setattr("sys.argv", ["prose", "--packages", str(tmp_path), "--held-out", str(file)])
    prose.main()
    names = [json.loads(line)["name"] for line in file.read_text().splitlines()]
    assert names == [page.name for page in pages if page.is_held_out] and names
