"""The plugin serving on a GPU: ``serving_checks`` with every engine, each in a process of its own.

``tests/engine/test_cuda_runners.py`` runs a selection where there is no GPU, which shows that the checks work.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.setting import DTYPES, RUNNERS, Setting
from tests.processes import end_with_tests
from tests.random_model import write_gemma, write_llama
from vllm_kvmerge import demo

pytestmark = pytest.mark.engine

FEW_CHECKS = (
    "asked_for or vllms or flash or references[together] or 8_bits or change or is_as and keepkv or every_kind "
    "or no_python"
)
"""Those of the short test, which also run without a GPU."""
CHECKS = Path(__file__).with_name("serving_checks.py")
ROOT = CHECKS.parents[2]
HEADS_OF_128 = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "head_dim": 128,
    "initializer_range": 0.06,
}
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that PyTorch can use")


def generated(setting: Setting, jobs: list, is_stock: bool) -> list:
    asked = {"engine": setting.engine, "is_stock": is_stock, "num_tokens": setting.num_tokens, "jobs": jobs}
    environment = os.environ | {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    command = [sys.executable, "-m", "tests.gpu.generate"]
    some: dict[str, Any] = {
        "cwd": ROOT,
        "env": environment,
        "text": True,
        "capture_output": True,
        "preexec_fn": end_with_tests,
    }
    done = subprocess.run(command, input=json.dumps(asked), **some)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    return json.loads(done.stdout.split("RESULT", 1)[1])


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    llama = write_llama(tmp_path_factory.mktemp("llama"), num_hidden_layers=3, **HEADS_OF_128)
    gemma = write_gemma(tmp_path_factory.mktemp("gemma"), sliding_window=500, **HEADS_OF_128)
    return {"demo": demo.model_path(), "llama": str(llama), "gemma": str(gemma)}


@pytest.fixture(scope="module")
def with_expected(tmp_path_factory) -> Callable[[Setting], Setting]:
    """Adds to a setting what is expected, which is the same for both model runners, with graphs or without."""
    known: dict[Setting, Setting] = {}

    def add(setting: Setting) -> Setting:
        key = replace(setting, runner="", is_eager=False)
        if key not in known:
            found = {
                "vllm": generated(setting, setting.plain_jobs(), is_stock=True),
                "reference": generated(setting, setting.compressed_jobs(), is_stock=False),
            }
            path = tmp_path_factory.mktemp("expected") / "expected.json"
            path.write_text(json.dumps(found))
            known[key] = replace(key, expected=str(path))
        return replace(setting, expected=known[key].expected)

    return add


def check(setting: Setting, folder: Path, *options: str, start: Callable = subprocess.Popen) -> None:
    """Runs ``serving_checks``, some of which must pass and none fail. Passes on what it prints as it comes."""
    path = setting.write(folder / "setting.json")
    command = ["-m", "pytest", "-v", "--durations=20", "-p", "no:cacheprovider", str(CHECKS), "--setting", str(path)]
    some_passed = False
    with start(
        [sys.executable, *command, *options], cwd=ROOT, text=True, stdout=subprocess.PIPE, preexec_fn=end_with_tests
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            some_passed |= re.search(r"\d passed.* in ", line) is not None
    assert process.returncode == 0 and some_passed


@needs_gpu
@pytest.mark.parametrize("is_eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("runner", RUNNERS)
def test_short(runner, is_eager, models, with_expected, tmp_path):
    setting = Setting(runner, models["demo"], "float32", is_on_gpu=True, is_small=True, is_eager=is_eager)
    check(with_expected(setting), tmp_path, "-k", FEW_CHECKS)


@needs_gpu
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", ["demo", "llama", "gemma"])
@pytest.mark.parametrize("runner", RUNNERS)
def test_on_a_gpu(runner, model, dtype, models, with_expected, tmp_path):
    setting = with_expected(Setting(runner, models[model], dtype, is_on_gpu=True))
    check(setting, tmp_path)
