"""Rule files read one by one, so that what is wrong is told of all of them at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from onnxfuse.errors import RuleError
from onnxfuse.rules import RuleSet, load_rules
from onnxfuse.rules.yamlfile import rule_files


class WrongFilesError(RuleError):
    """Several rule files are wrong; the text has the first fault of each."""

    def __init__(self, errors: Sequence[RuleError]) -> None:
        super().__init__(f"{len(errors)} rule files are wrong.")
        self.errors = tuple(errors)

    def __str__(self) -> str:
        faults = "\n\n".join(map(str, self.errors))
        return f"{faults}\n\n{self.message}"


def read_all(paths: Iterable[Path]) -> RuleSet:
    """The rules of files and folders.

    Raises:
        RuleError: a file, or one of its rules, is wrong.
        WrongFilesError: several are.
    """
    files = list(dict.fromkeys(file for path in paths for file in rule_files(path)))
    errors = [error for file in files if (error := _fault(file)) is not None]
    if len(errors) > 1:
        raise WrongFilesError(errors)
    return load_rules(files)


def _fault(file: Path) -> RuleError | None:
    try:
        load_rules([file])
    except RuleError as error:
        return error
    return None
