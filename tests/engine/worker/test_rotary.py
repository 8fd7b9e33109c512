"""The rotation that policies are given is the one that vLLM's modules apply."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

from vllm_kvmerge.engine.worker.rotary import find_rotation

NAMES = ["layers.0.self_attn.attn", "layers.1.self_attn.attn"]
SIZE = 32


@pytest.fixture(autouse=True)
def vllm_config() -> Iterator[None]:
    with set_current_vllm_config(VllmConfig()):
        yield


def model(*modules: nn.Module | None) -> nn.Module:
    """One layer with each of these embeddings."""
    layers = nn.ModuleList()
    for module in modules:
        attention = nn.ModuleDict({"attn": nn.Identity()} | ({} if module is None else {"rotary_emb": module}))
        layers.append(nn.ModuleDict({"self_attn": attention}))
    return nn.ModuleDict({"layers": layers})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default", "rope_theta": 1e4},
        {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    ],
    ids=str,
)
def test_what_a_module_turns_comes_back(parameters, is_neox, dtype):
    module = get_rope(SIZE, 2048, is_neox, parameters, dtype)
    rotation = find_rotation(model(module, module), NAMES)
    assert rotation is not None
    positions = torch.arange(0, 2000, 40)
    queries = torch.randn(len(positions), 3 * SIZE, generator=torch.Generator().manual_seed(0)).to(dtype)
    found, _ = module.forward_native(positions, queries.clone(), queries.clone())
    vectors, found = queries.view(-1, 3, SIZE).float(), found.view(-1, 3, SIZE).float()
    error = 1e-5 if dtype == torch.float32 else 0.04  # of what bfloat16 holds
    torch.testing.assert_close(rotation.turned(vectors, positions[:, None]), found, rtol=0, atol=error)
    torch.testing.assert_close(rotation.turned_back(found, positions[:, None]), vectors, rtol=0, atol=error)


def test_what_is_no_such_rotation_is_not_found():
    parameters = {"rope_type": "default", "rope_theta": 1e4}
    plain, other, of_sections = (
        get_rope(SIZE, 512, True, parameters | more, torch.float32)
        for more in ({}, {"rope_theta": 1e5}, {"mrope_section": [4, 6, 6]})
    )
    assert find_rotation(model(plain, plain), NAMES) is not None
    for modules in ((None, None), (plain, None), (plain, other), [nn.Identity()] * 2, [of_sections] * 2):
        assert find_rotation(model(*modules), NAMES) is None
