"""Commands and programs in the fenced blocks of the documentation."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
"""All pages of the site; those of the repository's root are among them."""

FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$", re.M | re.S)


def fences(page: Path, section: str = "") -> list[tuple[str, str]]:
    """Language and text of each fenced block, as a reader copies it.

    section: the heading of the second level below which they are; default: the whole page.
    """
    text = page.read_text()
    if section:
        text = text.split(f"\n## {section}\n")[1].partition("\n## ")[0]
    return [
        (one["language"], re.sub(rf"^{one['indent']}", "", one["text"], flags=re.M)) for one in FENCE.finditer(text)
    ]


def blocks(page: Path, language: str, section: str = "") -> list[str]:
    return [text for name, text in fences(page, section) if name == language]


def commands(script: str) -> list[str]:
    """What a shell is given at a time, without comments: a loop is one command, of several lines."""
    found, lines = [], ""
    for line in script.splitlines():
        lines += re.sub(r"(^|\s)#( .*|$)", "", line).rstrip() + "\n"
        if line.endswith("\\"):
            lines = lines.removesuffix("\\\n").rstrip() + " "
        elif is_complete(lines):
            found += [lines.strip()] if lines.strip() else []
            lines = ""
    assert not lines, f"has no end: {lines}"
    return found


def is_complete(lines: str) -> bool:
    try:
        words = shlex.split(lines)
    except ValueError:  # an open quotation
        return False
    return words.count("for") == words.count("done") and not lines.rstrip().endswith("{")
