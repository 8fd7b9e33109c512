"""Packages of other people's, installed for a process of their own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests import preloaded

PIP = ["install", "-q", "--disable-pip-version-check", "--no-index", "--no-deps", "--no-build-isolation", "--target"]


def install(source: Path, target: Path) -> None:
    """Builds and installs the package in ``source``, without network, into the folder ``target``."""
    copy = target.with_name(f"{target.name}-{source.name}")  # building leaves files behind
    shutil.copytree(source, copy)
    subprocess.run([sys.executable, "-m", "pip", *PIP, str(target), str(copy)], check=True)


def run(*arguments: str, packages: Path, from_scratch: bool = False) -> subprocess.CompletedProcess[str]:
    """A Python process that finds what is installed in ``packages``.

    from_scratch: whether it has imported nothing yet; otherwise it has, but no package of other people's.
    """
    # This package is the one under test here, wherever another may be installed.
    paths = [str(packages), str(Path(__file__).parents[2])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    return preloaded.run([sys.executable, *arguments], env=environment, from_scratch=from_scratch)
