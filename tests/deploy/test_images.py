"""The Dockerfiles: linted, and the CPU image's steps carried out in a clean root (marker image_steps; minutes).

See image_steps for what carrying out the steps does not cover. The CUDA image's steps are only linted.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from dockerfile_parse import DockerfileParser

from tests.deploy import image_steps

DOCKERFILES = ("Dockerfile", "docker/Dockerfile.cpu")
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "nvcc", "make")


@pytest.fixture(params=DOCKERFILES)
def dockerfile(request, repository) -> Path:
    return repository / request.param


def instructions(path: Path) -> list[tuple[str, str]]:
    steps = DockerfileParser(fileobj=path.open("rb")).structure
    return [(step["instruction"], step["value"]) for step in steps if step["instruction"] != "COMMENT"]


def last_stage(path: Path) -> list[tuple[str, str]]:
    steps = instructions(path)
    return steps[max(n for n, (kind, _) in enumerate(steps) if kind == "FROM") :]


def test_hadolint_finds_nothing(dockerfile, repository):
    program = Path(sys.executable).with_name("hadolint")
    command = [program, "--config", repository / ".hadolint.yaml", dockerfile]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_what_the_image_promises(dockerfile):
    steps = last_stage(dockerfile)
    said = dict(steps)
    assert json.loads(said["ENTRYPOINT"]) == ["vllm-kvmerge", "serve"]
    assert json.loads(said["CMD"])[0] == "demo"
    assert said["USER"] == "10001:10001"
    assert said["VOLUME"] == "/models"
    assert said["EXPOSE"] == "8000"
    assert said["HEALTHCHECK"].endswith('CMD ["vllm-kvmerge", "health"]')
    for label in ("title", "description", "licenses", "version", "revision"):
        assert f"org.opencontainers.image.{label}=" in said["LABEL"]
    assert "HF_HOME=/models" in said["ENV"]
    assert not any("g++" in value for kind, value in steps if kind == "RUN")
    assert sum(kind == "FROM" for kind, _ in instructions(dockerfile)) == 2


def test_images_are_of_this_version_and_of_the_tried_release(repository):
    from vllm_kvmerge import __version__
    from vllm_kvmerge.engine.support import SUPPORTED_RELEASES

    assert all(("ARG", f"VERSION={__version__}") in last_stage(repository / name) for name in DOCKERFILES)
    first = instructions(repository / "Dockerfile")[0]
    assert first == ("ARG", "VLLM_IMAGE=vllm/vllm-openai:v{}.{}.0".format(*SUPPORTED_RELEASES[0]))


def test_the_context_holds_what_is_copied_and_no_builds(dockerfile, repository):
    is_ignored = image_steps.ignored(repository).match_file
    copied = [value.split() for kind, value in instructions(dockerfile) if kind == "COPY"]
    sources = [word for words in copied if not words[0].startswith("--from") for word in words[:-1]]
    assert "vllm_kvmerge" in sources
    for source in sources:
        assert (repository / source).exists() and not is_ignored(source)
    for path in ("vllm_kvmerge/ops/_native.so", "csrc/cpu/__pycache__/x.pyc", ".git/config", ".venv/bin/python"):
        assert is_ignored(path)
    assert not is_ignored("vllm_kvmerge/ops/cpu.py")


def test_serve_takes_the_images_options(repository, parse, monkeypatch, tmp_path):
    """The CPU image's file and command line, through the command's own parser; the command line wins."""
    steps = dict(last_stage(repository / "docker/Dockerfile.cpu"))
    command = json.loads(steps["CMD"])
    assert parse(command).host == "127.0.0.1"
    monkeypatch.setattr("vllm_kvmerge.cli.arguments.SYSTEM_CONFIG", repository / "docker/serve-cpu.yaml")
    args = parse(command)
    assert (args.model_tag, args.host, args.enforce_eager, args.max_model_len) == ("demo", "0.0.0.0", True, 4096)
    assert parse([*command, "--host", "127.0.0.2"]).host == "127.0.0.2"
    own = tmp_path / "own.yaml"
    own.write_text("port: 8001\n")
    args = parse([*command, "--config", str(own)])
    assert (args.host, args.port) == ("127.0.0.1", 8001)
    cuda = yaml.safe_load((repository / "docker/serve-cuda.yaml").read_text())
    assert cuda == {"host": "0.0.0.0"}


@pytest.mark.engine
def test_the_compose_file(repository, node_modules):
    config = repository / "tests/deploy/dclint.json"
    command = [node_modules / ".bin/dclint", "--config", config, repository / "docker/compose.yaml"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_compose_publishes_on_loopback_alone(repository):
    services = yaml.safe_load((repository / "docker/compose.yaml").read_text())["services"]
    assert set(services) == {"server", "prometheus", "grafana"}
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        assert "mem_limit" in service
        for source in (volume.split(":")[0] for volume in service["volumes"]):
            assert not source.startswith(".") or (repository / "docker" / source).is_dir()
    assert services["server"]["environment"]["VLLM_API_KEY"].startswith("${VLLM_API_KEY:?")  # or it does not start
    assert services["grafana"]["environment"]["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    build = services["server"]["build"]
    assert (repository / "docker" / build["context"] / build["dockerfile"]).exists()


@pytest.mark.image_steps
@pytest.mark.engine
@pytest.mark.timeout(3600)
def test_the_cpu_images_steps_in_a_clean_root(repository):
    """Builds the image's files below build/image-steps, starts its command there as its user, and asks it something.

    The server sees no network but a loopback interface of its own, and may write only where the chart mounts something.
    """
    if os.geteuid() != 0 or not shutil.which("debootstrap"):
        pytest.skip("needs root and debootstrap (apt-get install debootstrap)")
    folder = Path(os.environ.get("IMAGE_STEPS", repository / "build/image-steps"))
    folder.mkdir(parents=True, exist_ok=True)
    image_steps.make_base(folder / "base")
    index = os.environ.get("TORCH_INDEX", "")
    image = image_steps.build(
        repository / "docker/Dockerfile.cpu", repository, folder / "base", folder, {"TORCH_INDEX": index}
    )
    check_image(image)


def check_image(image: image_steps.Stage) -> None:
    assert (image.entrypoint, image.command[0]) == (["vllm-kvmerge", "serve"], "demo")
    found = image.run(f"for name in {' '.join(COMPILERS)}; do command -v $name || true; done; id -u; id -g")
    assert found.split() == ["10001", "10001"]
    assert "native, " in image.run("vllm-kvmerge doctor", sealed=True)
    # The command in the background, as the image's only one; then a client of the same network.
    serve = " ".join([*image.entrypoint, *image.command])
    ask = (
        "import json, urllib.request as u; body = {'model': 'demo', 'prompt': 'remember dada 4821. recall dada', "
        "'max_tokens': 5, 'temperature': 0, 'kv_compression': {'policy': 'keepkv', 'budget': 256}}; "
        "r = u.Request('http://127.0.0.1:8000/v1/completions', json.dumps(body).encode(), "
        "{'Content-Type': 'application/json'}); print(json.load(u.urlopen(r, timeout=60))['choices'][0]['text'])"
    )
    script = f"""
        {serve} > /tmp/log 2>&1 & server=$!
        for second in $(seq 600); do
            if vllm-kvmerge health 2> /tmp/health; then break; fi
            kill -0 $server || {{ cat /tmp/log; exit 1; }}
            sleep 1
        done
        python3 -c "{ask}" || {{ tail -40 /tmp/log; exit 1; }}
        grep -o 'Starting vLLM server on .*' /tmp/log
        grep -q libtcmalloc_minimal /proc/$server/maps
        if grep 'libtcmalloc is not found' /tmp/log; then exit 1; fi
        kill -TERM $server; wait $server
        if touch /opt/vllm-kvmerge 2> /dev/null; then exit 1; fi
    """
    began = time.monotonic()
    printed = image.run(script, sealed=True)
    assert "4821" in printed.replace(" ", ""), printed
    assert "http://0.0.0.0:8000" in printed
    print(f"served after {time.monotonic() - began:.0f} s")
