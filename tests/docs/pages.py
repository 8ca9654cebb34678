"""The README and the pages of `docs/`: their links, anchors, blocks and commands."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in [*sorted(ROOT.glob("[!C]*.md")), ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
}
SHOWN_ONLY = "<!-- shown only -->"
_FENCE = re.compile(
    rf"^(?P<mark>{re.escape(SHOWN_ONLY)}\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
# A command in a code span of the prose, not only its name.
_WHOLE = re.compile(
    r"(?:^| )(python -m tools\.\w+ .+|tfdist (?:train|launch|doctor) .+|tfdist cluster (?:show|check)(?: .+)?)$"
)


class Block(NamedTuple):
    """A fenced block: its page, its language, its text, and whether it is marked as shown only."""

    page: str
    language: str
    text: str
    shown_only: bool


class Command(NamedTuple):
    """A command, as a shell is given it, and its page."""

    page: str
    text: str


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


def commands() -> Iterator[Command]:
    """Yields each line of the bash blocks, unless they are shown only, and each whole command of the prose."""
    for block in blocks("bash"):
        if not block.shown_only:
            for line in block.text.replace("\\\n", " ").splitlines():
                if text := re.sub(r"(^|\s+)#.*", "", line).strip():
                    yield Command(block.page, re.sub(r"\s+", " ", text))
    for page in PAGES:
        for span in re.findall(r"`([^`]+)`", prose(page)):
            if (found := _WHOLE.search(span.replace("\n", " "))) and not span.startswith("Usage"):
                yield Command(page, found[1])


def readers_files() -> dict[str, str]:
    """Returns the files that commands of the pages name and pages show: by name, their text."""
    whole = {"README.md": "script.py", "docs/configuration.md": "my_config.py"}
    found = {whole[block.page]: block.text for block in blocks("python") if block.page in whole}
    return found | {"circle.py": next(block.text for block in blocks("python") if "# circle.py\n" in block.text)}
