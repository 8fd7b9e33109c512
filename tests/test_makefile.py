"""``make`` leaves environments of other checkouts alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("target", ["setup", "serve"])
def test_an_environment_of_another_checkout_is_refused(tmp_path: Path, target: str) -> None:
    info, python = tmp_path / "site/vllm_kvmerge-0.1.0.dist-info", tmp_path / "bin/python"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-kvmerge\nVersion: 0.1.0\n")
    (info / "direct_url.json").write_text(json.dumps({"dir_info": {"editable": True}, "url": f"file://{tmp_path}"}))
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nPYTHONPATH={info.parent} exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    if target == "serve":  # has been set up, later than all files of this checkout
        (tmp_path / ".vllm-kvmerge-setup").touch()
    command = ["make", "-C", str(Path(__file__).parents[1]), target, f"VENV={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"MAKEFLAGS": ""}, timeout=60)
    assert done.returncode != 0 and "has the package of another checkout" in done.stderr
