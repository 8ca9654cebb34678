"""The table of exclusions in docs/limits.md is the one that its program writes."""

from tests.docs.pages import PAGES
from tools.site import exclusions


def test_the_page_has_the_table_that_the_program_writes():
    assert exclusions.table() in PAGES["docs/limits.md"]
