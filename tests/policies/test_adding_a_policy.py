"""What docs/adding-a-policy.md shows: installed, tested and requested as it stands there."""

import re
from pathlib import Path

import pytest

from tests.policies.packages import install, run

pytestmark = pytest.mark.engine

DOCUMENT = (Path(__file__).parents[2] / "docs" / "adding-a-policy.md").read_text()
FILES = dict(re.findall(r"^`(\S+)`:\n\n```\w+\n(.*?)^```", DOCUMENT, re.M | re.S))
(MERGER,) = re.findall(r"^## A merger\n.*?^```python\n(.*?)^```", DOCUMENT, re.M | re.S)
COMPRESS = "import json, sys, vllm_kvmerge as v; [print(v.compression(**json.loads(text))) for text in sys.argv[1:]]"
REQUESTS = re.findall(r"^```json\n(.*?)^```", DOCUMENT, re.M | re.S)[0].splitlines()


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("strided") / "source"
    source.mkdir()
    for name, text in FILES.items():
        (source / name).write_text(text)
    install(source, source.with_name("site"))
    return source.with_name("site")


def test_its_test_passes(packages: Path) -> None:
    assert set(FILES) == {"kvmerge_strided.py", "pyproject.toml", "test_strided.py"}
    test = packages.with_name("source") / "test_strided.py"
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={test.parent}", str(test), packages=packages)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


def test_its_requests_are_valid(packages: Path) -> None:
    done = run("-c", COMPRESS, *REQUESTS, packages=packages)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == len(REQUESTS) == 3


def test_its_merger_works(packages: Path) -> None:
    """Two alike become their mean; the sink that takes one in keeps its position."""
    code = f"""{MERGER}
import torch
from vllm_kvmerge.policies import CompressionPolicy, PARTS

keys = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [1.0, 0.1], [0.0, -1.0]]])
zeros = torch.zeros(1, 4)
entries = Entries(keys, keys + 1, zeros, zeros, zeros, torch.arange(4).unsqueeze(0))
selector = PARTS["selector"]["streaming_llm"](num_sink_tokens=2)
policy = CompressionPolicy(tracker=PARTS["tracker"]["none"](), selector=selector, merger=Averaging())
result = policy.compress(entries, CompressionContext.of_layer(entries, budget=3, num_tokens=4, at_prompt_end=False))
assert result.num_merged == 1 and result.entries.positions.tolist() == [[0, 1, 3]]
torch.testing.assert_close(result.entries.keys[0], torch.tensor([[1.0, 0.05], [0.0, 1.0], [0.0, -1.0]]))
torch.testing.assert_close(result.entries.values, result.entries.keys + 1)
"""
    done = run("-c", code, packages=packages)
    assert (done.returncode, done.stderr) == (0, "")
