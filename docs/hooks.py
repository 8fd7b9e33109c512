"""Hooks of MkDocs: links that leave ``docs/``, the project's own pages, and ``llms.txt``."""

import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PROJECT_PAGES = {
    "README.md": "overview.md",
    "SECURITY.md": "SECURITY.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
}
"""Pages of the repository's root that the site has beside those of docs/, and their names there."""

LINK = re.compile(r"(?P<image>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^)\s]+)\)")
CODE = re.compile(r"^(?P<fence>```+).*?^(?P=fence)$", re.M | re.S)

_pages: list[Page] = []


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, name in PROJECT_PAGES.items():
        files.append(File.generated(config, name, content=(ROOT / path).read_text()))
    # Figures that pages show from elsewhere in the repository.
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.svg")):
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page with its links as the site has them."""
    name = page.file.src_uri
    home = "" if name in PROJECT_PAGES.values() else "docs"
    folder = posixpath.dirname(posixpath.join(home, name))

    def moved(match: re.Match[str]) -> str:
        target, _, anchor = match["target"].partition("#")
        if not target or "://" in target or target.startswith("mailto:"):
            return match[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        if not (ROOT / path).exists():
            return match[0]  # MkDocs reports it
        in_site = PROJECT_PAGES.get(path, path.removeprefix("docs/"))
        if files.get_file_from_path(in_site) is not None:
            here = posixpath.relpath(in_site, posixpath.dirname(name) or ".")
            return f"{match['image']}[{match['text']}]({here}{'#' + anchor if anchor else ''})"
        if not config.repo_url:
            return match["text"]
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        url = f"{config.repo_url.rstrip('/')}/{kind}/{os.environ.get('REPOSITORY_REF', 'main')}/{path}"
        return f"{match['image']}[{match['text']}]({url}{'#' + anchor if anchor else ''})"

    parts, end = [], 0
    for code in CODE.finditer(markdown):
        parts += [LINK.sub(moved, markdown[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, LINK.sub(moved, markdown[end:])])


def on_nav(nav: Navigation, *, config: MkDocsConfig, files: Files) -> None:
    _pages[:] = nav.pages


def on_post_build(*, config: MkDocsConfig) -> None:
    """Writes each page as Markdown beside its HTML, and ``llms.txt``, which lists them (https://llmstxt.org)."""
    site, base = Path(config.site_dir), config.site_url or ""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    section: str | None = None
    for page in _pages:
        top = page.ancestors[-1].title if page.ancestors else "Start"
        if top != section:
            section = top
            lines += ([""] if lines[-1] else []) + [f"## {section}", ""]
        target = site / page.file.src_uri
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(page.markdown or "")
        lines.append(f"- [{page.title}]({base}{page.file.src_uri})")
    (site / "llms.txt").write_text("\n".join(lines) + "\n")
