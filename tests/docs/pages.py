"""The README and the pages of `docs/`: their links, anchors, blocks and commands."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]
}
SHOWN_ONLY = "<!-- shown only -->"
_FENCE = re.compile(
    rf"^(?P<mark>{re.escape(SHOWN_ONLY)}\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


class Block(NamedTuple):
    """A fenced block: its page, its language, its text, and whether it is marked as shown only."""

    page: str
    language: str
    text: str
    shown_only: bool


def blocks(language: str | None = None) -> Iterator[Block]:
    """Yields the blocks of all pages, or those of one language."""
    for page, text in PAGES.items():
        for found in _FENCE.finditer(text):
            if language in (None, found["language"]):
                yield Block(page, found["language"], found["text"], bool(found["mark"]))


def prose(page: str) -> str:
    """Returns a page without its blocks."""
    return _FENCE.sub("", PAGES[page])


def links(page: str) -> list[str]:
    """Returns the targets of a page's links within this repository."""
    text = re.sub(r"`[^`]*`", "", prose(page))
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]


def anchors(text: str) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub and MkDocs make them."""
    titles = re.findall(r"^#+ (.+)$", _FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip()) for title in titles}


def commands() -> Iterator[tuple[str, str]]:
    """Yields (page, command) of each `python -m ...` in blocks, and in the prose with arguments, unless it is shown only."""
    for block in blocks():
        if not block.shown_only:
            for line in block.text.replace("\\\n", " ").splitlines():
                if found := re.search(r"python -m (?:tfdist|tools)\b[^#>&|]*", line):
                    yield block.page, found[0].strip()
    for page in PAGES:
        for found in re.findall(r"`(?!Usage)[^`]*?(python -m (?:tfdist|tools)\.\w+ [^`]+)`", prose(page)):
            yield page, found.replace("\n", " ")
