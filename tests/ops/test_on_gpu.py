"""The reference on tensors that cannot be mixed with the CPU's, behind what runs tests on a GPU (``on_gpu``)."""

import pytest
import torch

from tests.ops.test_coded import test_codes_are_written_as_by_the_reference  # noqa: F401
from tests.ops.test_operators import (
    REPETITIONS,
    check_repetition,
    test_attention_over_front_and_tail,  # noqa: F401
    test_prompt_scores_do_not_depend_on_chunks,  # noqa: F401
)
from tests.ops.test_regression import test_systems_of_outputs_are_solved, test_weights_of_what_queries_see  # noqa: F401
from tests.ops.test_rows import (
    test_metadata_and_rows_are_those_of_the_dense_sequence,  # noqa: F401
    test_moves_rows_and_metadata_make_a_front,  # noqa: F401
    test_units_together_are_as_each_alone,  # noqa: F401
)

OPERATORS = ["reference-gpu"]
"""What the tests imported above run on."""


@pytest.mark.parametrize(("start", "stop", "sinks"), REPETITIONS)
def test_scores_of_a_repetition(operators, start, stop, sinks):
    check_repetition(operators, torch.bfloat16, start, stop, sinks)
