"""docs/troubleshooting.md has every message of the package, with what to do, and none that the package no longer has."""

from __future__ import annotations

import re

import pytest

from tests.docs import messages
from tests.docs.pages import PAGES

MESSAGES = messages.messages()
# The reasons that the table of starting tasks explains are parts of messages.
_, _, TABLES = PAGES["docs/troubleshooting.md"].partition("\n## Command line")
ROWS = [row.strip("|").split(" | ") for row in TABLES.splitlines() if row.startswith("| `")]
REMEDIES = {shown: row[1].strip() for row in ROWS for shown in re.findall(r"`([^`]+)`", row[0])}


def test_every_message_is_there_with_what_to_do():
    assert len(MESSAGES) > 400
    missing = [f"`{each.beginning}` ({each.where})" for each in MESSAGES if not REMEDIES.get(each.beginning)]
    assert not missing, "\n".join(["add to docs/troubleshooting.md:", *missing])


def test_no_message_is_there_that_the_package_does_not_have():
    assert REMEDIES.keys() <= {message.beginning for message in MESSAGES}


@pytest.mark.parametrize(
    ("source", "beginnings"),
    [
        ("raise ConfigError('a b c')", ["a b c"]),
        ("raise ConfigError(f'{x} is b. ' f'Received: {y!r}.')", ["… is b. Received: …"]),
        ("def f():\n    why = 'one' if x else 'two'\n    raise ConfigError(f'{x}: ' + why)", ["…: one", "…: two"]),
        ("def _faults():\n    yield f'`a` is {x} {y}'", ["a is … …"]),
        ("def other():\n    yield 'no message'", []),
        ("faults.append('a b')\nfaults += [f'c {d}' for d in e]", ["a b", "c …"]),
        ("warnings.warn(' '.join(words))", []),
        ("logger.warning('is lost', extra=E)\nprint('a table')", ["is lost"]),
        (
            "logger.log(E if x else W, 'one two three four five six seven eight nine ten')",
            ["one two three four five six seven eight nine"],
        ),
    ],
)
def test_the_search_for_messages_finds_them(source, beginnings):
    assert sorted(messages.beginnings(source)) == sorted(beginnings)


def test_what_is_raised_without_a_text_of_its_own_was_collected_before():
    collected = {"faults", "fault", "list(faults)", "known", "sentence"}
    raised = set(messages.raised_without_text()) - collected
    assert not [text for text in raised if not text.startswith("unknown_name_message(")]
