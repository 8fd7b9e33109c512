"""Shared by the tests of images, charts and manifests."""

import fcntl
import shutil
import subprocess
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def repository() -> Path:
    return Path(__file__).parents[2]


@pytest.fixture(scope="session")
def node_modules(repository: Path) -> Path:
    """Packages of package.json, installed below build/npm on first use; skips where there is no npm."""
    if not shutil.which("npm"):
        pytest.skip("npm is not installed")
    folder = repository / "build/npm"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # files of tests run side by side
        shutil.copy(repository / "tests/deploy/package.json", folder)
        if not (folder / "node_modules/.bin/dclint").exists():
            command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--silent"]
            subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder / "node_modules"


@pytest.fixture
def parse(monkeypatch, tmp_path):
    """The words after ``vllm-kvmerge serve`` -> its arguments, through the command's own parser."""
    from vllm_kvmerge.cli import arguments
    from vllm_kvmerge.engine.processes import METRICS_DIR

    monkeypatch.setenv(METRICS_DIR, str(tmp_path))
    monkeypatch.setenv(arguments.ALLOWED_PLUGINS, "")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    monkeypatch.setattr("vllm.logger.configure_logging_from_args", lambda args: None)
    return lambda argv: arguments.parse(argv)[0]
