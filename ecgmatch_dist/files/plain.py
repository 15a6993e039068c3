"""Texts from elsewhere, made harmless for the place where they are shown: a terminal, a log, a spreadsheet.

Pages need nothing of this: their templates escape HTML."""

import re

from rich.markup import escape

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, line separators, marks that turn the direction of writing, and what stands for the bytes of a file's
name that are not UTF-8: no file and no terminal takes it."""
NUMBER = re.compile(r"[+-]?[0-9][0-9.,eE%± ()+-]*")
"""Numbers, also with an interval or a sign of per cent: a spreadsheet computes nothing else from them."""


def plain_line(text: str) -> str:
    """One line for a terminal or a log: escape sequences are shown, not obeyed. Line breaks and tabs become spaces."""
    return CONTROL.sub(_shown, text)


def plain_lines(text: str) -> str:
    """A message for a terminal; its own line breaks stay."""
    return "\n".join(plain_line(line) for line in text.split("\n"))


def plain_markup(text: str) -> str:
    """A text for rich, which would take words in brackets for its own marks, and raise on some."""
    return escape(plain_line(text))


def plain_cell(text: str) -> str:
    """A cell of a CSV table: one line that no spreadsheet takes for a formula."""
    text = plain_line(text)
    is_formula = text[:1] in ("=", "@") or (text[:1] in ("+", "-") and not NUMBER.fullmatch(text) and len(text) > 1)
    return f"'{text}" if is_formula else text


def _shown(match: re.Match[str]) -> str:
    mark = match[0]
    return " " if mark in "\t\n\r" else f"\\x{ord(mark):02x}"
