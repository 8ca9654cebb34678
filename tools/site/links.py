"""A hook of MkDocs: links that lead out of `docs/` lead to the site's own page, or become plain text; one page gets its index."""

import pathlib
import re
import sys
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]
sys.path.append(str(ROOT))  # MkDocs loads this file by its path

from tools.site import messages  # noqa: E402


def on_page_read_source(page: Any, config: Any) -> str:
    """Returns a page's text; those of `architecture.md` and `quickstart.md` are in files that lie beside `docs/`.

    Args:
        page: The page.
        config: The site's configuration.
    """
    text = pathlib.Path(page.file.abs_src_path).read_text(encoding="utf-8")
    if page.file.src_uri == "architecture.md":
        text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    if page.file.src_uri == "quickstart.md":
        text = quickstart((ROOT / "README.md").read_text(encoding="utf-8"))
    text = re.sub(r"\]\((?:\./)?docs/", "](", with_index(text))
    text = text.replace("](../ARCHITECTURE.md", "](architecture.md")
    text = re.sub(r"\]\(\.\./README\.md(#[\w-]+)?\)", "](quickstart.md)", text)
    out = r"\.\./" * (page.file.src_uri.count("/") + 1)
    return re.sub(rf"\[([^\]]+)\]\({out}[^)]+\)", r"\1", text)


def with_index(text: str) -> str:
    """Returns a page's text with the index of all messages where it has the mark."""
    return text.replace(messages.MARK, messages.index(text)) if messages.MARK in text else text


def quickstart(readme: str) -> str:
    """Returns the part of the README that comes before its table of strategies, under a title of its own."""
    _, _, text = readme.partition("\n")
    return f"# Quickstart\n{text.partition('## Strategies')[0]}"
