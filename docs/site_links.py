"""A hook of mkdocs: files outside docs/ that pages link to become part of the site.

Links are written so that they work in the repository (`../results/lm/python/length.png`,
`../CONTRIBUTING.md`). mkdocs knows docs/ alone, so every linked file outside it is added to the
site here as `repository/PATH`, and links are rewritten to lead there. A Markdown file among them
becomes a page. A link to a file that does not exist stays as it is: mkdocs then warns, and a
strict build fails.
"""

import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#|/)([^)#\s]+)")
OUTSIDE = "repository/"
ALWAYS = ("CONTRIBUTING.md", "CHANGELOG.md")  # the navigation has them


def source(uri: str) -> str:
    """The path in the repository of a file of the site."""
    return uri.removeprefix(OUTSIDE) if uri.startswith(OUTSIDE) else f"docs/{uri}"


def place(path: str) -> str:
    """The path in the site of a file of the repository."""
    return path.removeprefix("docs/") if path.startswith("docs/") else OUTSIDE + path


def targets(path: str) -> set[str]:
    """The files of the repository to which a Markdown file of it links."""
    text = (ROOT / path).read_text(encoding="utf-8")
    here = posixpath.dirname(path)
    found = {posixpath.normpath(posixpath.join(here, link)) for link in LINK.findall(text)}
    return {x for x in found if not x.startswith("..") and (ROOT / x).is_file()}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside docs/ that pages, or other files added so, link to."""
    waiting = [source(page.src_uri) for page in files.documentation_pages()] + list(ALWAYS)
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        if not path.startswith("docs/"):
            files.append(File.generated(config, place(path), abs_src_path=os.fspath(ROOT / path)))
        if path.endswith(".md"):
            new = targets(path) - seen
            seen |= new
            waiting += [x for x in new if not x.startswith("docs/")]
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead every link to a file of the repository to its place in the site."""
    here = posixpath.dirname(source(page.file.src_uri))

    def lead(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(here, link[1]))
        if path.startswith("..") or not (ROOT / path).is_file():
            return link[1]
        return posixpath.relpath(place(path), posixpath.dirname(page.file.src_uri) or ".")

    return LINK.sub(lead, markdown)
