"""LESS: what its state adds to attention, and that training it helps."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.processes import end_with_tests

FOLDER = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(FOLDER))
torch.set_num_threads(1)

from less import Example, FeatureMaps, Window, attention, fit, state_cost  # noqa: E402


def stretch(seed, num_heads=2, group=2, prompt=48, answer=8, size=8):
    """Random entries and queries of one layer, and full attention's output."""
    torch.manual_seed(seed)
    keys, values = (torch.randn(num_heads, prompt + answer, size) for _ in range(2))
    queries = torch.randn(num_heads, group, 32 + answer, size)
    out, _ = attention(queries[:, :, 32:], keys, values, torch.zeros(keys.shape[:2]), size**-0.5)
    return Window(keys, values, queries, out, {"h2o": torch.rand(num_heads, prompt)}, 0.0)


def test_a_state_adds_to_the_numerator_and_the_denominator():
    window, kept = stretch(0), torch.arange(3, 24).expand(2, -1)
    example, maps = Example.of(window, slice(0, 2), kept), FeatureMaps(2, 2, 8, rank=3, hidden=4)
    torch.nn.init.ones_(maps.scales[0])
    with torch.no_grad():
        found, phi = example.predicted(maps), maps.features(example.queries)
        psi = [maps.state(*(plane[:, i : i + 1] for plane in (window.keys, window.values)))[..., -1] for i in range(48)]
    for head in range(2):
        for query in range(8):
            total, norm = torch.zeros(8), 0.0
            for i in range(48 + query + 1):
                key, value = window.keys[head, i], window.values[head, i]
                if i >= 48 or 3 <= i < 24:
                    weight = math.exp(example.queries[head, 1, query] @ key / math.sqrt(8))
                else:
                    weight = float(phi[head, 1, query] @ psi[i][head])
                total, norm = total + weight * value, norm + weight
            torch.testing.assert_close(found[head, 1, query], total / norm, rtol=1e-2, atol=1e-2)


def test_training_brings_attention_closer_to_that_of_all_entries():
    torch.manual_seed(0)
    examples, project = [], torch.randn(16, 32)
    for seed in range(4):
        kept = torch.rand(2, 48).topk(12).indices
        examples.append(Example.of(stretch(seed), slice(0, 2), kept))
    maps = FeatureMaps(2, 2, 8, rank=32, hidden=64)
    fit(maps, examples, project, epochs=25)
    with torch.no_grad():
        after, before = (
            sum(float(one.error(out, project)) for one, out in zip(examples, outs, strict=True))
            for outs in ([one.predicted(maps) for one in examples], [one.out for one in examples])
        )
    assert after < 0.5 * before


def test_a_state_costs_what_its_bytes_say():
    assert state_cost(8, 64) == 9 and 8 * 2 * 2 * 64 < 8 * 65 * 4 <= 9 * 2 * 2 * 64


@pytest.mark.benchmarks
def test_all_of_a_prompt_is_as_good_as_full_attention(tmp_path):
    for step in ("train", "compare"):
        command = f"less.py {step} --model demo --count 8 --prompt 128 --answer 32 --shares 0.99 --epochs 2"
        files = ["--kernels", tmp_path, "--output", tmp_path / "less.json"]
        subprocess.run([sys.executable, *command.split(), *files], cwd=FOLDER, check=True, preexec_fn=end_with_tests)
    rows = {row["name"]: row["losses"] for row in json.loads((tmp_path / "less.json").read_text())["rows"]}
    assert len(rows) == 7 and len(rows["full"]) == 8
    assert rows["snapkv 0.99 eviction"] == pytest.approx(rows["full"], abs=0.02)
