"""Options in the words of whoever reads a message: of the command line where a command runs, else of Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager


def _sizes(values: Sequence[str]) -> str:
    pairs = (value.rpartition("=") for value in values)
    return "{" + ", ".join(f'"{name}": {size}' for name, _, size in pairs) + "}"


def _settings(values: Sequence[str]) -> str:
    pairs = (value.partition("=") for value in values)
    return "{" + ", ".join(f'"{name}": "{text}"' for name, _, text in pairs) + "}"


def _list(values: Sequence[str]) -> str:
    return "[" + ", ".join(f'"{value}"' for value in values) + "]"


def _text(values: Sequence[str]) -> str:
    return f'"{values[0]}"'


def _number(values: Sequence[str]) -> str:
    return values[0]


def _arrays(values: Sequence[str]) -> str:
    return '{"NAME": ARRAY}'


PYTHON: dict[str, tuple[str, Callable[[Sequence[str]], str]]] = {
    "database": ("database", _text), "dim": ("dims", _sizes), "disable": ("disable", _list), "embed": ("embed", _list),
    "fold-weights": ("fold_weights", _text), "inputs": ("inputs", _arrays),
    "provider-option": ("provider_options", _settings), "rules": ("rules", _list),
    "target": ("target", _text), "verify-seconds": ("verify_seconds", _number),
}
"""The keyword that stands for an option, and how its values are written."""

_commands = 0
"""How many commands run, one within the other; of the process, whose threads word errors too."""


@contextmanager
def command_line() -> Iterator[None]:
    """Word options as the command line has them."""
    global _commands
    _commands += 1
    try:
        yield
    finally:
        _commands -= 1


def option(name: str, *values: str) -> str:
    """An option with these values, or alone: "--dim batch=8 --dim s=4", or dims={"batch": 8, "s": 4}."""
    if _commands:
        return " ".join(f"--{name} {value}" for value in values) or f"--{name}"
    keyword, written = PYTHON[name]
    return f"{keyword}={written(values)}" if values else keyword


def as_data() -> str:
    """What has all of which a text shows some."""
    return "--json" if _commands else "to_json()"


def verbose() -> str:
    """What makes a text longer."""
    return "-v" if _commands else "verbose=True"
