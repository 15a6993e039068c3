"""Texts from elsewhere on a terminal, in a log, in a spreadsheet."""

import pytest
from rich.text import Text

from ecgmatch_dist.files.plain import plain_cell, plain_line, plain_lines, plain_markup


def test_escape_sequences_are_shown_and_not_obeyed() -> None:
    assert plain_line("a\x1b[2Jb\x07\x9b1m\u202ec") == "a\\x1b[2Jb\\x07\\x9b1m\\x202ec"
    assert plain_line("two\nlines\tand\rmore") == "two lines and more"
    assert plain_lines("usage\n\x1b[31mred") == "usage\n\\x1b[31mred"
    assert plain_line("ΔMAP ± 0.01 – ü") == "ΔMAP ± 0.01 – ü"


def test_marks_of_rich_are_shown_as_they_are() -> None:
    for text in ("[/]", "[/bold]", "a [red]b[/red]", "[link=http://x]y[/link]", "a [3/4] b"):
        assert Text.from_markup(plain_markup(text)).plain == text


@pytest.mark.parametrize(
    "text", ["=1+1", "@SUM(A1)", "+cmd|' /C calc'!A0", "-2+3+cmd|' /C calc'!A0", '=HYPERLINK("http://x")']
)
def test_formulas_are_texts(text: str) -> None:
    assert plain_cell(text) == f"'{text}"


@pytest.mark.parametrize(
    "text", ["", "-", "-0.5", "+1.2e-3", "-0.012 ± 0.003", "426783006", "AF", "0.9 (0.8-1.0)", "?STT"]
)
def test_numbers_and_codes_stay(text: str) -> None:
    assert plain_cell(text) == text
