"""Every message of the package says what to do, or docs/messages.md does; the page has no row for any other message."""

from __future__ import annotations

import functools
import re

import pytest

from tests.docs.pages import PAGES, anchors
from tools.site import links, messages

PAGE = PAGES["docs/messages.md"]
ROWS = messages.rows(PAGE)
EXAMPLES = "While tasks start"  # rows of this section show examples, too


@functools.cache
def all_messages() -> list[messages.Message]:
    """Returns the package's messages. Not when pytest collects: each of its processes would read the whole package."""
    return messages.messages()


def test_every_message_names_its_remedy_or_has_a_row():
    assert len(all_messages()) > 400
    missing = [
        f"`{each.beginning}` ({each.where})"
        for each in all_messages()
        if not (each.remedy or each.is_report or ROWS.get(each.beginning, ("", ""))[1])
    ]
    assert not missing, "\n".join(["say what to do in the message, or in docs/messages.md:", *missing])


def test_no_row_is_of_a_message_that_the_package_does_not_have():
    known = {message.beginning for message in all_messages()}
    assert not {shown for shown, (section, _) in ROWS.items() if section != EXAMPLES} - known


def test_the_site_has_an_index_of_all_messages():
    page = links.with_index(PAGE)
    _, _, index = page.partition("## All messages")
    shown = re.findall(r"^\| `([^`]+)` \| (?:.+) \|$", index, re.MULTILINE)
    assert sorted(shown) == sorted(message.beginning for message in all_messages())
    assert set(re.findall(r"\]\(#([^)]+)\)", index)) <= anchors(PAGE)
    assert messages.MARK not in page


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("seed must be 0 or more. Received: \0.", "must be 0 or more"),
        ("the port is taken; give the task another port. Received: 1.", "give the task another port"),
        ("\0 cannot be read: \0. Restore the file, or choose another one.", "Restore the file, or choose another one"),
        ("no answer for 3 s. Is the process stopped?", "Is the process stopped?"),
        ("the training has finished", ""),
        ("a backup of the run is missing", ""),
    ],
)
def test_the_remedy_of_a_message_is_found(text, remedy):
    assert messages.Message("", text).remedy == remedy


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
