"""Queries that are kept where addresses say, on every implementation, against rows that are copied one by one."""

import os

import pytest
import torch

from vllm_kvmerge.ops import cpu, reference

LAYERS = 3
NATIVE = ["native"] if cpu.LIBRARY.exists() else []
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TRITON = ["triton"] if INTERPRETED else ["triton-gpu"] if torch.cuda.is_available() else []


@pytest.mark.parametrize("implementation", ["plain-torch", *NATIVE, *TRITON])
@pytest.mark.parametrize("heads", [(4, 32), (1, 16), (7, 80), (64, 128), (3, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_queries_go_where_addresses_say(implementation, dtype, heads):
    """All others stay, whichever the layer, wherever the queries lie in the batch, and however they are strided."""
    device = torch.device("cuda" if implementation == "triton-gpu" else "cpu")
    if "triton" in implementation:
        keep = pytest.importorskip("vllm_kvmerge.ops.triton").keep_queries
    else:
        keep = (cpu if implementation == "native" else reference).keep_queries
    places = torch.zeros(6, LAYERS, *heads, dtype=dtype, device=device)
    wanted = torch.zeros_like(places)
    # Heads of a query beside those of a key, as a model computes them.
    query = torch.randn(9, 2 * heads[0], heads[1]).to(dtype).to(device)[:, : heads[0]]

    def at(*kept: int) -> torch.Tensor:
        """Addresses of places; of -1: none."""
        size = places[0].nbytes
        return torch.tensor([places.data_ptr() + n * size if n >= 0 else 0 for n in kept], device=device)

    keep(query, at(-1, 2, -1, 0), 1)
    wanted[2, 1], wanted[0, 1] = query[1], query[3]
    assert torch.equal(places, wanted)
    keep(query, at(5, -1, 2), LAYERS - 1, torch.tensor([8, 3, 0], device=device))
    wanted[5, -1], wanted[2, -1] = query[8], query[0]
    assert torch.equal(places, wanted)
    keep(query, at(*[-1] * 9), 0)
    keep(query, at(), 0)
    assert torch.equal(places, wanted)


@pytest.mark.parametrize(("num_kv_heads", "groups", "size"), [(2, 4, 64), (1, 3, 40), (5, 1, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("read", [reference.read_queries, *([cpu.read_queries] if NATIVE else [])])
def test_kept_queries_are_read_by_head(read, dtype, num_kv_heads, groups, size):
    """Of several requests, some of whose layers are missing or out of order, from memory in which places come first."""
    kept = [torch.randn(7, LAYERS, num_kv_heads * groups, size).to(dtype).transpose(0, 1) for _ in range(3)]
    places = torch.tensor([[6, 0, 1, 2], [3, 4, 5, 6], [0, 1, 2, 3]])
    seq_layers = [(0, 0), (0, 1), (0, 2), (2, 2), (2, 0), (1, 1)]
    wanted = torch.stack([kept[request][layer, places[request]] for request, layer in seq_layers])
    wanted = wanted.unflatten(2, (num_kv_heads, groups)).permute(0, 2, 3, 1, 4).flatten(0, 1)
    assert torch.equal(read(places, kept, seq_layers, num_kv_heads), wanted)


@pytest.mark.skipif(not NATIVE, reason="the library was not built")
@pytest.mark.parametrize(
    ("places", "seq_layers", "what"),
    [([[7]], [(0, 0)], "place 7"), ([[0]], [(1, 0)], "request 1"), ([[0]], [(0, 3)], "layer 3")],
)
def test_queries_that_are_not_kept_cannot_be_read(places, seq_layers, what):
    with pytest.raises(IndexError, match=f"there is no {what}"):
        cpu.read_queries(torch.tensor(places), [torch.zeros(LAYERS, 7, 2, 16)], seq_layers, 1)
