"""The check of a request before vLLM queues it."""

import pytest
from vllm.sampling_params import SamplingParams

from vllm_kvmerge.engine import compat
from vllm_kvmerge.engine.validation import CompressionValidator
from vllm_kvmerge.request import spec
from vllm_kvmerge.request.spec import EXTRA_ARGS_KEY


@pytest.mark.parametrize("asked", [{"policy": "h2o", "budget": 64}, '{"policy":"h2o","budget":64}'])
def test_schedulers_get_canonical_text_and_nothing_is_parsed_twice(asked, monkeypatch):
    """Neither when the same parameters come again; what the client made stays as it is."""
    monkeypatch.setattr(compat, "install_front_end", lambda check: None)
    spec.parse_compression(asked)
    monkeypatch.setattr(spec, "_parse", None)
    extra = {EXTRA_ARGS_KEY: asked, "other": 1}
    params = SamplingParams(extra_args=extra)
    CompressionValidator.validate_params(params)
    assert extra[EXTRA_ARGS_KEY] is asked
    assert params.extra_args == {EXTRA_ARGS_KEY: '{"budget": 64, "policy": "h2o"}', "other": 1}
    monkeypatch.setattr(spec, "_canonical", None)
    CompressionValidator.validate_params(params)
