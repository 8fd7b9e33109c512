"""Hidden states that cannot be seen: models whose layers have no module, by the names that we know, that reads them."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from tests.ops.conftest import CacheMaker
from vllm_kvmerge.engine.attention import hidden_states
from vllm_kvmerge.engine.attention.hidden_states import HiddenStates
from vllm_kvmerge.engine.attention.rows import BatchRow, Normalization, PromptScores, QueryReader, RepetitionWindow
from vllm_kvmerge.engine.support import UnsupportedConfigError
from vllm_kvmerge.engine.worker import output_weights
from vllm_kvmerge.engine.worker.output_weights import OutputWeights
from vllm_kvmerge.ops import PLAIN_SOFTMAX

HIDDEN, HEADS, GROUPS, HEAD_SIZE = 48, 2, 3, 32


class Layer(nn.Module):
    """Attention whose hidden states are read by the module ``name``."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.attn = nn.Identity()
        self.name = name
        self.add_module(name, nn.Linear(HIDDEN, HIDDEN))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.attn(self.get_submodule(self.name)(hidden))


class Model(nn.Module):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(name) for name in names)
        self.layer_names = [f"layers.{index}.attn" for index in range(len(names))]

    @torch.inference_mode()
    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


@pytest.fixture
def warnings(monkeypatch) -> list[str]:
    """Of both modules, as if none had been given yet."""
    texts: list[str] = []
    for module in (hidden_states, output_weights):
        monkeypatch.setattr(module.logger, "warning_once", lambda text, *args: texts.append(text % args))
    return texts


def watched(model: Model, surrogates: list[nn.Module] | None = None) -> HiddenStates:
    return HiddenStates(model, model.layer_names, 16, surrogates, HEADS, torch.device("cpu"))


def test_norms_that_cannot_be_seen_count_as_one(warnings):
    """Warned once, when they are first needed; the other layers' are seen all the same."""
    torch.manual_seed(0)
    model = Model(["mixer", "qkv_proj", "mixer"])
    seen = watched(model)
    seen.observe(False)
    assert not warnings
    for _ in range(2):
        seen.observe(True)
        hidden = torch.randn(5, HIDDEN)
        model(hidden)
        second = model.layers[0](hidden).norm(dim=-1).detach()
        assert torch.allclose(seen.norms[1, :5], second) and (second - 1).abs().min() > 0.5
        assert (seen.norms[[0, 2]] == 1).all()
    assert set(warnings) == {"Hidden states of attention layers cannot be seen: all count as equally long"}


def test_models_that_would_predict_nothing_are_refused():
    surrogates = [nn.Linear(HIDDEN, HEADS) for _ in range(2)]
    watched(Model(["q_proj", "c_attn"]), surrogates)
    with pytest.raises(UnsupportedConfigError, match=r"kvzap is not supported with this model: no module .* qkv_proj"):
        watched(Model(["q_proj", "mixer"]), surrogates)


def test_repetitions_are_weighed_by_their_own_hidden_states_if_these_can_be_seen(warnings):
    """Of a step's tokens, those of other requests come before a row's, and its prompt before what it repeats. Without
    hidden states and output projections KVzip+ is KVzip."""
    model = Model(["mixer"])
    unseen = watched(model)
    weights = OutputWeights(model, model.layer_names, HEADS, (HEADS * GROUPS, HEAD_SIZE))
    unseen.observe(True)
    model(torch.randn(16, HIDDEN))
    norms = torch.full((1, 24), 1e-3)
    norms[:, -8:] = 2.0
    ones = lambda _, values: torch.ones(HEADS, GROUPS, values.shape[1])  # noqa: E731
    maker = CacheMaker(0, HEADS, HEAD_SIZE, 32, torch.float32)
    sequence, query = maker.sequence(front=0, tail=0, seq_len=96), maker.randn(24, HEADS * GROUPS, HEAD_SIZE)
    found = []
    seen = SimpleNamespace(norms=norms)
    for normalization in (None, Normalization(unseen, weights.norms), Normalization(seen, ones)):
        scores = PromptScores.empty(1, HEADS, 80)
        row = BatchRow(window=RepetitionWindow(8, 80, 4, 70, 4, scores, normalization))
        reader = QueryReader(slice(5, 24), sequence.blocks, 96, row)
        reader.read(0, query, maker.pages, HEAD_SIZE**-0.5, PLAIN_SOFTMAX)
        found.append(scores.scores)
    plain, without, weighed = found
    torch.testing.assert_close(without, plain)
    torch.testing.assert_close(weighed, plain / 2.0)
    assert plain[..., 4:70].min() > 0 and weights(0) is None
    assert [text.split()[0] for text in warnings] == ["Hidden", "No"]  # output projection
