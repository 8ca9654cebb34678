"""Runs the Python blocks of a page, in order, in one namespace; the tests fork it, as a page creates its own strategy."""

import sys

from tests.docs.pages import PAGES, blocks
from tfdist.config import validation

if __name__ == "__main__":
    page = sys.argv[1]
    names = {"__name__": "__main__"}
    for block in blocks("python"):
        if block.page == page and not block.shown_only:
            lines_before = PAGES[page][: PAGES[page].index(block.text)].count(
                "\n"
            )  # so that tracebacks name the page's lines
            exec(compile("\n" * lines_before + block.text, page, "exec"), names)  # noqa: S102
            print(f"ran the block at line {lines_before}")
    if "get_config" in names:  # what a config file defines, the command calls
        validation.check(names["get_config"]())
