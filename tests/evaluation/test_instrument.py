"""The attention instrument's measurements and files."""

import json
import re

import numpy as np
import pytest
import torch

from tests.demo_model import NUM_LAYERS
from tests.entries import gather_entries
from vllm_kvmerge import demo
from vllm_kvmerge.demo import language, recall
from vllm_kvmerge.evaluation import attention
from vllm_kvmerge.evaluation.instrument import (
    END,
    PROMPT_END,
    Findings,
    MergeMap,
    attention_spread,
    full_probabilities,
    measure,
)
from vllm_kvmerge.evaluation.merge_map import Ledger, RecordedPolicy
from vllm_kvmerge.evaluation.replay import Schedule, TracedSequence, full_outputs, output_errors
from vllm_kvmerge.evaluation.trace import text_documents, trace
from vllm_kvmerge.request.parameters import parse_compression

pytestmark = pytest.mark.slow

PROMPT, QUERIES, INTERVAL = 300, 40, 16
SCHEDULE = Schedule(PROMPT, QUERIES, INTERVAL, torch.float32)
LAYERS = list(range(NUM_LAYERS))
MERGING = ["asymkv", "cam", "d2o", "grkv", "keepkv", "kvmerger", "weightedkv", "zsmerge"]


@pytest.fixture(scope="module")
def layers():
    return trace(
        demo.model_path(), [recall.training_sample(np.random.default_rng(), PROMPT + QUERIES, 8, 5)[0].tolist()]
    )[0]


@pytest.fixture(scope="module")
def full(layers):
    return full_outputs(layers, SCHEDULE)


def config_of(policy, budget=0.2, **parameters):
    return parse_compression({"policy": policy, "budget": budget, "interval": INTERVAL, **parameters})


def attention_by_hand(layer, position):
    """``[4, position + 1]``: the full cache's attention of the query at ``position``; two heads share one's keys."""
    query, keys = layer.queries[position].double(), layer.keys[: position + 1].double()
    logits = [[layer.scale * query[head] @ key[head // 2] for key in keys] for head in range(4)]
    return torch.tensor(logits, dtype=torch.float64).softmax(-1)


def entries_of(sequence, layer):
    where = sequence.caches[layer], sequence.blocks, sequence.front, sequence.tail, sequence.num_tokens
    return gather_entries(*where)


def test_nothing_is_lost_with_the_whole_cache(layers, full):
    measured = measure(full, layers, config_of("keepkv", PROMPT + QUERIES), SCHEDULE, LAYERS)
    assert measured.layer_error.shape == (NUM_LAYERS, QUERIES) and measured.error.shape == (NUM_LAYERS, 4, QUERIES)
    assert measured.layer_error.max() < 1e-5 and measured.error.max() < 1e-5
    for mass in (measured.kept, measured.represented):
        torch.testing.assert_close(mass, torch.ones(NUM_LAYERS, 4, QUERIES))


@pytest.mark.parametrize("policy", ["h2o", "snapkv", "adakv"])
def test_what_dropping_keeps_is_the_attention_on_positions_kept(layers, full, policy):
    config = config_of(policy)
    measured = measure(full, layers, config, SCHEDULE, LAYERS)
    sequence = TracedSequence(layers, torch.float32)
    sequence.write(PROMPT)
    sequence.compress(config, config.resolve_budget(PROMPT))
    for start in range(0, QUERIES, INTERVAL):
        count = min(INTERVAL, QUERIES - start)
        sequence.attend(sequence.write(count), config)
        for step in {start, start + count - 1}:
            for index, layer in enumerate(layers):
                positions = entries_of(sequence, index).positions
                weights = attention_by_hand(layer, PROMPT + step)
                for head in range(4):
                    kept = [p for p in positions[head // 2].tolist() if 0 <= p <= PROMPT + step]
                    expected = weights[head, kept].sum().item()
                    assert measured.kept[index, head, step].item() == pytest.approx(expected, abs=1e-5)
        if config.decode == "bounded":
            sequence.compress(config, config.resolve_budget(PROMPT))
    assert torch.equal(measured.kept, measured.represented)
    assert measured.kept.min() < 0.9


@pytest.mark.parametrize("policy", MERGING)
def test_entries_are_what_provenance_says_after_several_compressions(layers, policy):
    config = config_of(policy)
    ledger = Ledger(LAYERS, 2)
    recorded = config.model_copy(update={"policy": RecordedPolicy.of(config.policy, ledger.record)})
    sequence, budget = TracedSequence(layers, torch.float32), config.resolve_budget(PROMPT)
    ledger.extend(PROMPT)
    sequence.write(PROMPT)
    for _ in range(2):
        sequence.compress(recorded, budget)
        if config.decode != "bounded":
            break
        sequence.attend(sequence.write(INTERVAL), config)
        ledger.extend(sequence.num_tokens)
    assert ledger.residual < 1e-5
    num_mixed = 0
    for index, layer in enumerate(layers):
        stored, provenance = entries_of(sequence, index), ledger.layers[index]
        assert torch.equal(stored.positions, provenance.positions)
        torch.testing.assert_close(stored.log_votes, provenance.log_votes)
        tokens = layer.values[: sequence.num_tokens].transpose(0, 1)
        live = provenance.is_live
        mixed = provenance.shares @ tokens
        assert (mixed - stored.values)[live].norm() / stored.values[live].norm() < 1e-5
        own = provenance.origins >= 0
        keys = layer.keys[provenance.origins.clamp(min=0), torch.arange(2).unsqueeze(1)]
        # Beside what joins it, an entry's own value may weigh so little that it is lost in rounding.
        has_own = provenance.shares.gather(2, provenance.origins.clamp(min=0).unsqueeze(2)).squeeze(2) != 0
        unmixed = own & has_own & (provenance.num_tokens_of_each == 1) & (policy != "grkv")  # changes keys of others
        assert torch.equal(stored.keys[unmixed], keys[unmixed])
        num_mixed += int((provenance.num_tokens_of_each > 1).sum())
    assert num_mixed > 0


@pytest.mark.parametrize("policy", MERGING)
def test_shares_of_attention_are_in_order(layers, full, policy):
    measured = measure(full, layers, config_of(policy), SCHEDULE, LAYERS)
    assert (measured.kept >= 0).all() and (measured.represented <= 1 + 1e-5).all()
    assert (measured.represented >= measured.kept).all() and measured.represented.mean() > measured.kept.mean()
    assert (END in measured.snapshots) == (policy != "grkv")


def test_errors_are_those_of_the_table(layers, full):
    config = config_of("zsmerge")
    measured = measure(full, layers, config, SCHEDULE, LAYERS)
    assert measured.layer_error.mean().item() == pytest.approx(
        np.mean(list(output_errors(layers, config, PROMPT, QUERIES, torch.float32))), rel=1e-5
    )
    # All heads' error is between the heads' own.
    assert (measured.layer_error <= measured.error.amax(1) + 1e-6).all()
    assert (measured.layer_error >= measured.error.amin(1) - 1e-6).all()


def test_some_layers_are_measured_as_among_all(layers, full):
    config = config_of("pyramidinfer")
    whole, part = (measure(full, layers, config, SCHEDULE, some) for some in (LAYERS, [2]))
    assert torch.equal(whole.kept[2:3], part.kept) and torch.equal(whole.error[2:3], part.error)


def test_votes_and_sizes_are_counted(layers, full):
    found = Findings(LAYERS)
    for _ in range(2):
        found.add(measure(full, layers, config_of("zsmerge", 60), SCHEDULE, LAYERS), layers)
    edges, counts = found.vote_histogram(PROMPT_END)
    slots, tokens = 8, PROMPT - 52
    for layer in LAYERS:
        # Two documents, two heads, 60 entries of which 8 are slots; all tokens are somewhere.
        assert counts[layer].sum() == 2 * 2 * 60 and counts[layer][0] == 2 * 2 * (60 - slots)
        sizes = found.tokens_of_each[PROMPT_END][layer]
        assert sizes[1] == 2 * 2 * (60 - slots) and sizes == {1: 208, tokens // slots: 2 * 2 * slots}
    assert edges[0] == 0 and edges[-1] == pytest.approx(0.6 * np.log(tokens / slots), rel=1e-5)


def test_a_map_names_tokens_and_targets(layers, full):
    snapshot = measure(full, layers, config_of("kvmerger"), SCHEDULE, LAYERS).snapshots[PROMPT_END]
    for layer, provenance in snapshot.items():
        for head in range(2):
            found = MergeMap.of(provenance, head, layers[layer].keys)
            assert found.num_pairs == len(found.tokens) and not found.is_dense
            assert not set(found.tokens) & set(found.retained) and set(found.targets) <= set(found.retained)
            keys = layers[layer].keys[:, head].double()
            for token, target, weight, similarity in found.pairs():
                one, other = keys[token], keys[target]
                assert similarity == pytest.approx((one @ other / one.norm() / other.norm()).item(), abs=1e-4)
                assert similarity > 0.75 - 1e-4 and 0 < weight < 1
                # KVMerger's target is the most similar of all that stay.
                cosines = torch.nn.functional.cosine_similarity(keys[found.retained], one, dim=-1)
                assert cosines.max().item() == pytest.approx(similarity, abs=1e-4)


def test_a_dense_map_lists_the_largest_weights(layers, full):
    provenance = measure(full, layers, config_of("grkv"), SCHEDULE, LAYERS).snapshots[PROMPT_END][1]
    found = MergeMap.of(provenance, 0, layers[1].keys)
    assert found.is_dense and found.num_pairs > 8 * len(found.tokens)
    pairs = found.pairs()
    assert len(pairs) == 8 * len(found.tokens)
    first = {token: weight for token, _, weight, _ in reversed(pairs)}
    for row, token in enumerate(found.tokens):
        assert abs(first[token]) == pytest.approx(np.abs(found.weights[row]).max(), rel=1e-4)


COMMON = ["--documents", "2", "--prompt", "200", "--queries", "24", "--facts", "8", "--questions", "2", "--seed", "5"]


def table(text, title):
    """Cells by policy of the table below the line that begins with ``title``."""
    rows = text[text.index(title) :].splitlines()[1:]
    start = next(i for i, line in enumerate(rows) if line.startswith("|-"))
    cells = {}
    for line in rows[start + 1 :]:
        if not line.startswith("|"):
            break
        name, *values = (cell.strip() for cell in line.strip("| \n").split("|"))
        cells[name] = values
    return cells


@pytest.mark.engine
def test_the_command_writes_numbers_plots_and_a_summary(tmp_path, capsys):
    options = ["--policies", "zsmerge", "cam", "grkv", "h2o", "--budget", "0.4", "--output", str(tmp_path)]
    attention.main([*COMMON, *options])
    printed = capsys.readouterr().out
    errors, shares = table(printed, "Error of attention's output"), table(printed, "Share of full attention")
    assert set(errors) == set(shares) == {"zsmerge", "cam", "grkv", "h2o"}

    assert {path.name for path in tmp_path.iterdir()} == {
        "summary.md",
        "summary.json",
        "policies-by-step-0.4.svg",
        "error-by-mass-0.4.svg",
        "zsmerge-0.4",
        "cam-0.4",
        "grkv-0.4",
        "h2o-0.4",
    }
    always = {"numbers.json", "heads.svg", "steps.svg", "votes.svg"}
    at_end = {"merge-map-end.svg"}
    at_prompt_end = {"merge-map-prompt-end.svg"}
    expected = {
        "zsmerge": always | at_prompt_end | at_end,
        "cam": always | at_end | {"merge-map-end.npz"},
        "grkv": always | at_prompt_end | {"merge-map-prompt-end.npz"},
        "h2o": always,
    }
    summary = (tmp_path / "summary.md").read_text()
    for policy, files in expected.items():
        folder = tmp_path / f"{policy}-0.4"
        assert {path.name for path in folder.iterdir()} == files
        for path in folder.glob("*.svg"):
            assert path.read_text().rstrip().endswith("</svg>")
        numbers = json.loads((folder / "numbers.json").read_text())
        assert (numbers["policy"], numbers["budget"], numbers["entries"], numbers["seed"]) == (policy, 0.4, 80, 5)
        variants = numbers["variants"]
        assert list(variants) == (["merged"] if policy == "h2o" else ["merged", "dropped"])
        means = [np.mean(one["layer_error"]["mean"]) for one in variants.values()]
        assert errors[policy] == [" / ".join(f"{mean:.3f}" for mean in means)]
        assert np.shape(variants["merged"]["kept"]["std"]) == (NUM_LAYERS, 4, 24)
        assert f"| {policy} | 0.4 | merged | {means[0]:.3f} |" in summary
        for one in variants.values():
            assert one["residual"] < 1e-5
        for cache in variants.get("dropped", {"cache": {}})["cache"].values():
            assert not any(one["pairs"] for heads in cache["merge_map"].values() for one in heads)
    weights = np.load(tmp_path / "grkv-0.4" / "merge-map-prompt-end.npz")
    assert weights["layer1_head0_weights"].shape == (
        len(weights["layer1_head0_tokens"]),
        len(weights["layer1_head0_carriers"]),
    )


@pytest.mark.engine
def test_with_and_without_a_folder_errors_are_the_same(tmp_path, capsys):
    options = [*COMMON, "--policies", "keepkv", "--budget", "0.1", "30", "--layers", "1"]
    attention.main(options)
    short = capsys.readouterr().out
    attention.main([*options, "--output", str(tmp_path), "--format", "png"])
    rows = table(short, "Error")
    assert rows == table(capsys.readouterr().out, "Error")
    assert all(re.fullmatch(r"\d\.\d{3} / \d\.\d{3}", cell) for cell in rows["keepkv"]) and len(rows["keepkv"]) == 2
    assert (tmp_path / "keepkv-30" / "heads.png").read_bytes().startswith(b"\x89PNG")
    numbers = json.loads((tmp_path / "keepkv-30" / "numbers.json").read_text())
    assert numbers["variants"]["merged"]["layers"] == [1]


def test_spread_of_attention(layers, capsys):
    probabilities = torch.zeros(1, 4, 100)
    probabilities[0, 0, 7] = 1
    probabilities[0, 1, :40:2] = 1 / 20
    probabilities[0, 2, :3] = torch.tensor([0.05, 0.5, 0.45])
    probabilities[0, 3, :2] = torch.tensor([0.25, 0.75])
    entropy, count = attention_spread(probabilities)
    assert entropy[0, :2].tolist() == pytest.approx([0, np.log(20)], abs=1e-5)
    assert entropy[0, 3].item() == pytest.approx(0.75 * np.log(4 / 3) + 0.25 * np.log(4))
    # 18 twentieths are 0.9 but for rounding.
    assert count[0, 0] == 1 and count[0, 1] in (18, 19) and count[0, 2:].tolist() == [2, 2]
    attention.main([*COMMON, "--policies", "local", "--budget", "50", "--layers", "0", "2"])
    spread = table(capsys.readouterr().out, "Spread of full attention")
    # Layer 0 looks at places a few tokens back.
    assert set(spread) == {"0", "2"} and 1 <= int(spread["0"][1]) < 10
    entropies, _ = attention_spread(full_probabilities(layers[2], slice(PROMPT, PROMPT + QUERIES), torch.float32))
    assert entropies.min() > 0 and entropies.max() < np.log(PROMPT + QUERIES)


def test_other_parts_can_be_named(capsys):
    options = [*COMMON, "--policies", "snapkv", "--budget", "0.3"]
    attention.main([*options, "--set", "merger=kvmerger", "merge_threshold=0.5"])
    printed = capsys.readouterr().out
    assert "merger=kvmerger, merge_threshold=0.5" in printed
    attention.main(options)
    merged, dropped = table(printed, "Error")["snapkv"][0].split(" / ")
    # What it would be if it did not merge is the policy as it is.
    assert merged != dropped == table(capsys.readouterr().out, "Error")["snapkv"][0]


def test_a_text_is_read(tmp_path, capsys):
    rng = np.random.default_rng()
    text = " ".join(recall.draw_prompt(rng, 400, 8).text for _ in range(2))
    path = tmp_path / "text.txt"
    path.write_text(text)
    documents = text_documents(demo.model_path(), path, 8, 224)
    assert [len(document) for document in documents] == [224] * 3
    words = {word: index for index, word in enumerate(language.VOCABULARY)}
    assert documents[0] == [language.BOS] + [words[word] for word in text.split()[:223]]
    assert documents[2] == [language.BOS] + [words[word] for word in text.split()[446:669]]
    attention.main([*COMMON, "--text", str(path), "--policies", "local", "--budget", "50", "--documents", "8"])
    assert "3 documents" in capsys.readouterr().out
    lines = tmp_path / "texts.jsonl"
    lines.write_text("".join(json.dumps({"text": " ".join(text.split()[:count])}) + "\n" for count in (100, 500, 300)))
    assert text_documents(demo.model_path(), lines, 8, 224) == [documents[0], documents[1], documents[0]]
    assert text_documents(demo.model_path(), lines, 2, 224) == documents[:2]


@pytest.mark.parametrize(
    "options, message",
    [
        (["--policies", "full"], "what the others are compared with"),
        (["--model", "nowhere"], "no model in nowhere"),
        (["--layers", str(NUM_LAYERS)], f"--layers {NUM_LAYERS}: the model's are 0 to {NUM_LAYERS - 1}"),
        (["--budget", "2.0"], "kv_compression.budget"),
        (["--set", "merger"], "must be FIELD=VALUE"),
        (["--set", "merger=glue"], "unknown merger 'glue'"),
        (["--text", "nowhere.txt"], "nowhere.txt"),
        (["--text", __file__, "--prompt", "100000"], "tokens, and a document takes"),
        (["--queries", "0"], "0 is less than 1"),
        (["--documents", "0"], "--documents must be at least 1"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
    ],
)
def test_mistakes_are_said_in_a_line(options, message, capsys):
    with pytest.raises(SystemExit) as stop:
        attention.main([*COMMON, "--policies", "h2o", *options])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
