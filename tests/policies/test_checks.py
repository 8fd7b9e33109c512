"""What is checked of another package's parts."""

import pytest
import torch

from vllm_kvmerge.policies.checks import check_range


@pytest.mark.parametrize(("index", "is_allowed"), [(-1, False), (0, True), (6, True), (7, False)])
def test_an_index_is_within_its_range(index, is_allowed):
    indices = torch.tensor([[2, index]])
    if is_allowed:
        check_range("kept", indices, 0, 7)
    else:
        with pytest.raises(ValueError, match="kept must be from 0 to 6"):
            check_range("kept", indices, 0, 7)
