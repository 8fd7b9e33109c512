"""Shared by the tests of images, charts and manifests."""

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
    shutil.copy(repository / "tests/deploy/package.json", folder)
    if not (folder / "node_modules/.bin/dclint").exists():
        command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--silent"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder / "node_modules"
