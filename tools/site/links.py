"""A hook of MkDocs: links that lead out of `docs/` lead to the site's own page, or become plain text."""

import pathlib
import re
from typing import Any

ARCHITECTURE = pathlib.Path(__file__).parents[2] / "ARCHITECTURE.md"


def on_page_read_source(page: Any, config: Any) -> str:
    """Returns a page's text; that of `architecture.md` is the file that lies beside `docs/`.

    Args:
        page: The page.
        config: The site's configuration.
    """
    shown = page.file.src_uri == "architecture.md"
    text = (ARCHITECTURE if shown else pathlib.Path(page.file.abs_src_path)).read_text(encoding="utf-8")
    text = text.replace("](docs/", "](") if shown else text
    text = text.replace("](../ARCHITECTURE.md", "](architecture.md")
    text = re.sub(r"\]\(\.\./README\.md(#[\w-]+)?\)", "](index.md)", text)
    out = r"\.\./" * (page.file.src_uri.count("/") + 1)
    return re.sub(rf"\[([^\]]+)\]\({out}[^)]+\)", r"\1", text)
