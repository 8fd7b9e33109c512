"""What runs the tests of all operators on a GPU is tested without one: the reference, on copies in a GPU's layout."""

from types import SimpleNamespace

import pytest
import torch

from tests.ops.conftest import CacheMaker
from tests.ops.on_gpu import OnGPU
from tests.ops.test_cpu import UPDATES, check_against_reference
from tests.ops.test_operators import (
    REPETITIONS,
    check_repetition,
    test_attention_over_front_and_tail,  # noqa: F401
    test_prompt_scores_do_not_depend_on_chunks,  # noqa: F401
)
from tests.ops.test_rows import (
    test_metadata_and_rows_are_those_of_the_dense_sequence,  # noqa: F401
    test_moves_rows_and_metadata_make_a_front,  # noqa: F401
    test_units_together_are_as_each_alone,  # noqa: F401
)
from vllm_kvmerge.ops import PagedKVCache, SequenceLayers, cpu, reference
from vllm_kvmerge.ops.layout import planes_obstacle

OPERATORS = ["reference-gpu"]
"""What the tests imported above run on."""


def on_gpu(**operators) -> OnGPU:
    return OnGPU(SimpleNamespace(**operators), torch.device("cpu"))


def test_an_operator_is_given_copies_as_a_gpu_has_them():
    maker = CacheMaker(0, 2, 32, 16, torch.bfloat16)
    sequence = maker.sequence(20, 40, 90)
    seq_layers = SequenceLayers(
        (maker.pages, maker.pages), torch.tensor([0, 1]), sequence.blocks.repeat(2, 1), torch.ones(2, 3)
    )
    packed = maker.randn(3, 5, 8)
    strided, expanded = packed[:, 1:3], maker.randn(1, 5).expand(7, -1)
    seen = []

    def operator(seq_layers, strided, *, expanded):
        seen.extend([seq_layers, strided, expanded])
        seq_layers.layers[0].scores.fill_(5.0)
        strided += 1
        return {}, (strided, None), [seq_layers.layers[1]]

    before = packed.clone()
    _, (result, _), (pages,) = on_gpu(operator=operator).operator(seq_layers, strided, expanded=expanded)
    copied = seen[0]
    assert (
        copied.layers[0] is copied.layers[1]
        and copied.layer is seq_layers.layer
        and copied.segments is seq_layers.segments
    )
    assert planes_obstacle(copied.layers[0]) is None and cpu.obstacle(copied.layers[0]) == "keys are not transposed"
    assert seen[1].stride() == strided.stride() and seen[1].data_ptr() != strided.data_ptr()
    assert torch.equal(seen[2], expanded)
    assert (maker.pages.scores == 5.0).all() and (pages.scores == 5.0).all()
    assert torch.equal(strided, before[:, 1:3] + 1) and torch.equal(result, strided)
    assert torch.equal(packed[:, 3:], before[:, 3:])


@pytest.mark.parametrize("wrong", ["nothing", "output", "scores"])
def test_a_wrong_operator_is_noticed(wrong):
    def attention(query, pages, batch, scale, output, softmax):
        if wrong != "nothing":
            reference.paged_attention(query, pages, batch, scale, output, softmax)
        if wrong == "output":
            output[-1, -1] *= 1.1
        if wrong == "scores":
            pages.scores.add_(1e-3)

    maker = CacheMaker(1, 2, 64, 16, torch.float32)
    sequences = [maker.sequence(40, 64, 99), maker.sequence(0, 0, 33)]
    check_against_reference(OnGPU(reference, torch.device("cpu")), maker, sequences, [1, 2], UPDATES[1:3], 2)
    with pytest.raises(AssertionError):
        check_against_reference(on_gpu(paged_attention=attention), maker, sequences, [1, 2], UPDATES[1:3], 2)


def test_a_gpu_is_what_tensors_go_to():
    """``meta`` stands for a device that is not the CPU: a tensor that stayed behind could not be mixed with it."""
    devices = set()

    def operator(pages: PagedKVCache, numbers: list[torch.Tensor]) -> None:
        devices.update(tensor.device.type for tensor in (pages.keys, pages.positions, *numbers))
        raise InterruptedError

    gpu = OnGPU(SimpleNamespace(operator=operator), torch.device("meta"))
    with pytest.raises(InterruptedError):
        gpu.operator(CacheMaker(0, 1, 32, 16, torch.float32).pages, [torch.zeros(3), torch.zeros(1).expand(4)])
    assert devices == {"meta"}


@pytest.mark.parametrize(("start", "stop", "sinks"), REPETITIONS)
def test_scores_of_a_repetition(operators, start, stop, sinks):
    check_repetition(operators, torch.bfloat16, start, stop, sinks)
