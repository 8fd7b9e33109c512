"""``make setup`` leaves environments of other checkouts alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("owner", ["another", "this", "nobody"])
@pytest.mark.parametrize(("target", "does"), [("setup", "installs"), ("serve", "starting vLLM")])
def test_an_environment_of_another_checkout_is_refused(tmp_path: Path, target: str, does: str, owner: str) -> None:
    """Its Python knows what is installed, and refuses to install anything; there is nothing to serve with."""
    folder, other = tmp_path / "environment", tmp_path / "other"
    (folder / "bin").mkdir(parents=True)
    other.mkdir()
    if owner != "nobody":
        info = tmp_path / "site" / "vllm_kvmerge-0.1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-kvmerge\nVersion: 0.1.0\n")
        place = other if owner == "another" else ROOT
        (info / "direct_url.json").write_text(f'{{"dir_info": {{"editable": true}}, "url": "file://{place}"}}')
    python = folder / "bin" / "python"
    python.write_text(
        f'#!/bin/sh\n[ "$1" = -m ] && {{ echo installs >&2; exit 1; }}\n'
        f'PYTHONPATH={tmp_path / "site"} exec {sys.executable} -S "$@"\n'
    )
    python.chmod(0o755)
    if target == "serve":  # has been set up, later than all files of this checkout
        (folder / ".vllm-kvmerge-setup").touch()
    done = subprocess.run(
        ["make", "-C", str(ROOT), target, f"VENV={folder}"],
        capture_output=True, text=True, env=os.environ | {"MAKEFLAGS": ""}, timeout=60,
    )  # fmt: skip
    assert done.returncode != 0
    assert ("another checkout" in done.stderr) == (owner == "another")
    assert (does in done.stdout + done.stderr) == (owner != "another")
