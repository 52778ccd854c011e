"""Text from files as it may be shown: characters that steer a terminal, or hide, are written out.

Names in models, rules and records are anybody's.  Printed as they are they could set a terminal's title, clear its
screen, make links, turn the direction of a line round, or pass for lines of onnxfuse's own.
"""

from __future__ import annotations

from unicodedata import category

_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode's categories of controls, formats (bidirectional overrides among them), lone surrogates, private and
unassigned characters, and its own separators of lines and paragraphs."""


def visible(text: str) -> str:
    """The text in one line, with every character that shows nothing as its code: ``\\x1b``, ``\\n``, ``\\u202e``.

    What is visible stays as it is, so that the text may be passed through twice.
    """
    if text.isprintable():
        return text
    return "".join(_code(letter) if category(letter) in _HIDDEN else letter for letter in text)


def visible_lines(text: str) -> str:
    """The same for a text of several lines: its line ends and tabs stay."""
    if text.isprintable():
        return text
    return "\n".join("\t".join(map(visible, line.split("\t"))) for line in text.split("\n"))


def _code(letter: str) -> str:
    known = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(letter)
    if known is not None:
        return known
    number = ord(letter)
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
