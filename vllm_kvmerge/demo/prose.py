"""Real prose for the prose model: text of manuals that Debian packages hold, and which of it is never trained on.

    apt-get download python3.11-doc postgresql-doc-15 sqlite3-doc rust-doc python-django-doc
    for package in *.deb; do dpkg -x "$package" DIR; done

unpacks them; nothing needs to be installed. ``python -m vllm_kvmerge.demo.prose --packages DIR --held-out FILE`` writes
the pages that are never trained on.
"""

import argparse
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

HELD_OUT = 10
"""One page of so many is held out."""

MIN_PAGE, MAX_PAGE = 400, 400_000
"""Characters of a page. Shorter ones are tables of contents, longer ones are lists of changes."""

NO_PROSE = frozenset((
    "contents", "print", "search", "genindex", "genindex-all", "genindex-Symbols", "py-modindex", "bookindex", "toc",
    "keyword_index", "doclist", "biblio", "flat_index", "toctree", "changes", "doc_keyword_crossref",
    "doc_pagelink_crossref", "doc_target_crossref",
))  # fmt: skip
"""Names of pages that list other pages or versions, or repeat what others say."""

NO_PROSE_FOLDERS = frozenset(["_modules", "releaselog"])
"""Source code; lists of versions."""


@dataclass(frozen=True)
class Source:
    """Pages of one manual.

    folders: below the folder that packages are unpacked in.
    """

    package: str
    licence: str
    folders: tuple[str, ...]


_RUST = "usr/share/doc/rust-doc/html/"
SOURCES = (
    Source("python3.11-doc", "PSF-2.0", ("usr/share/doc/python3.11/html",)),
    Source("postgresql-doc-15", "PostgreSQL", ("usr/share/doc/postgresql-doc-15/html",)),
    Source("sqlite3-doc", "public domain", ("usr/share/doc/sqlite3",)),
    Source(
        "rust-doc",
        "MIT or Apache-2.0",
        tuple(_RUST + book for book in ("book", "edition-guide", "nomicon", "reference")),
    ),
    Source("python-django-doc", "BSD-3-Clause", ("usr/share/doc/python-django-doc/html",)),
)


@dataclass(frozen=True)
class Page:
    """name: package and path, which decides whether the page is held out."""

    name: str
    text: str

    @property
    def is_held_out(self) -> bool:
        return zlib.crc32(self.name.encode()) % HELD_OUT == 0


class _Text(HTMLParser):
    """Collects the text of a page without navigation; white space counts in ``pre`` alone."""

    _SKIPPED_TAGS = frozenset(["script", "style", "head", "nav", "header", "footer", "svg", "button"])
    _SKIPPED_NAMES = frozenset((
        "navheader", "navfooter", "navigation", "search", "related", "sphinxsidebar", "footer", "headerlink",
        "mobile-nav", "nosearch", "fancy_toc", "toc", "toctree", "toctree-wrapper", "hd", "ft", "sidebar", "menu-bar",
        "global-nav", "searchbox", "search-wrapper",
    ))  # fmt: skip
    _VOID = frozenset((
        "area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr",
    ))  # fmt: skip
    _PARAGRAPHS = frozenset((
        "p", "h1", "h2", "h3", "h4", "h5", "h6", "pre", "table", "dl", "ul", "ol", "blockquote", "section", "article",
    ))  # fmt: skip
    _LINES = frozenset(["br", "div", "li", "dt", "dd", "tr"])

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._skipped, self._depth, self._preformatted = "", 0, 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._depth:
            self._depth += tag == self._skipped
            return
        names = {name for key, value in attrs if key in ("class", "id", "role") for name in (value or "").split()}
        if tag not in self._VOID and (tag in self._SKIPPED_TAGS or names & self._SKIPPED_NAMES):
            self._skipped, self._depth = tag, 1
            return
        self._break(tag)
        self._preformatted += tag == "pre"

    def handle_endtag(self, tag: str) -> None:
        if self._depth:
            self._depth -= tag == self._skipped
            return
        self._preformatted = max(0, self._preformatted - (tag == "pre"))
        self._break(tag)

    def handle_data(self, data: str) -> None:
        if not self._depth:
            self.parts.append(data if self._preformatted else re.sub(r"\s+", " ", data))

    def _break(self, tag: str) -> None:
        if tag in self._PARAGRAPHS:
            self.parts.append("\n\n")
        elif tag in self._LINES:
            self.parts.append("\n")
        elif tag in ("td", "th"):
            self.parts.append(" ")


def text_of(html: str) -> str:
    """Text of a page: paragraphs apart by an empty line, at most one space in a row but at the beginning of lines."""
    parser = _Text()
    parser.feed(html)
    parser.close()
    text = re.sub(r"(?<=\S)[ \t]+", " ", "".join(parser.parts).replace("\xa0", " ").replace("\N{PILCROW SIGN}", ""))
    text = re.sub(r"[ \t]+$|^ (?=\S)", "", text, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n") + "\n"


def read_pages(packages: Path) -> Iterator[Page]:
    """All pages, in the order of sources and names; of pages with the same text the first.

    Raises:
        ValueError: a source is not there.
    """
    seen = set()
    for source in SOURCES:
        for folder in source.folders:
            root = packages / folder
            if not root.is_dir():
                raise ValueError(f"packages: {packages} has no {folder}; it comes from Debian's {source.package}")
            for file in sorted(root.rglob("*.html")):
                if file.stem in NO_PROSE or not NO_PROSE_FOLDERS.isdisjoint(file.relative_to(root).parts):
                    continue
                text = text_of(file.read_text(encoding="utf-8", errors="replace"))
                if MIN_PAGE <= len(text) <= MAX_PAGE and text not in seen:
                    seen.add(text)
                    yield Page(f"{source.package}/{file.relative_to(packages)}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=Path, required=True, help="folder that the packages are unpacked in")
    parser.add_argument("--held-out", type=Path, required=True, help="file to write: JSON lines, name and text")
    arguments = parser.parse_args()
    with arguments.held_out.open("w", encoding="utf-8") as file:
        for page in read_pages(arguments.packages):
            if page.is_held_out:
                file.write(json.dumps({"name": page.name, "text": page.text}) + "\n")


if __name__ == "__main__":
    main()
