"""Prints the changelog's section of the release that a tag names; fails where files disagree about its version.

python3 .github/release_notes.py v1.2.3
"""

import re
import sys
from pathlib import Path

VERSIONS = {
    "vllm_kvmerge/__init__.py": r'^__version__ = "(.+)"$',
    "deploy/helm/vllm-kvmerge/Chart.yaml": r"^appVersion: (.+)$",
    "Dockerfile": r"^ARG VERSION=(.+)$",
    "docker/Dockerfile.cpu": r"^ARG VERSION=(.+)$",
}
"""Files that say the version, and how."""

SECTION = re.compile(r"^## (?P<title>.+)\n(?P<text>(?:(?!## ).*\n?)*)", re.M)


def versions(root: Path) -> dict[str, list[str]]:
    """What each file says; the changelog's is that of its newest section with a date."""
    found = {name: re.findall(pattern, (root / name).read_text(), re.M) for name, pattern in VERSIONS.items()}
    titles = [match["title"] for match in SECTION.finditer((root / "CHANGELOG.md").read_text())]
    dated = [words[0] for words in (title.split(" - ") for title in titles) if len(words) == 2]
    return found | {"CHANGELOG.md": dated[:1]}


def notes(root: Path, tag: str) -> str:
    """The section of ``tag``; ValueError names each file that says another version or none."""
    version = tag.removeprefix("v")
    wrong = {name: found for name, found in versions(root).items() if found != [version]}
    if tag != f"v{version}" or wrong:
        raise ValueError(f"{tag} is not the version of: {wrong or 'any release, whose tags begin with v'}")
    sections = SECTION.finditer((root / "CHANGELOG.md").read_text())
    return next(match["text"].strip() for match in sections if match["title"].startswith(f"{version} - ")) + "\n"


if __name__ == "__main__":
    try:
        sys.stdout.write(notes(Path(__file__).parents[1], sys.argv[1]))
    except ValueError as problem:
        sys.exit(f"release_notes: {problem}")
