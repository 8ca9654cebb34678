"""Writes the table of features that exclude each other in docs/limits.md, from `tfdist/config/relations.py`.

python -m tools.site.exclusions
"""

from __future__ import annotations

from pathlib import Path

from tfdist.config.relations import FEATURES, RELATIONS

PAGE = Path(__file__).parents[2] / "docs" / "limits.md"
BEGIN = "<!-- written by: python -m tools.site.exclusions -->\n\n"
END = "\n<!-- end -->\n"


def table() -> str:
    """Returns the table, with its markers."""
    rows = [("not possible", "with", "reason", "remedy"), ("---",) * 4]
    rows += [
        (FEATURES[each.one], FEATURES[each.other], each.reason.removeprefix("because "), each.remedy)
        for each in RELATIONS
    ]
    return BEGIN + "".join(f"| {' | '.join(row)} |\n" for row in rows) + END


def main() -> None:
    """Writes the table into the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + table() + after)


if __name__ == "__main__":
    main()
