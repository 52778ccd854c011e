"""What ONNX Runtime's errors say, where that is all that tells one from another."""

from __future__ import annotations

_LACKING = ("NOT_IMPLEMENTED", "is not a registered function/op", "No Op registered for",
            "Current official support for domain")
"""Of an operator or a type that a provider has no kernel for, of one that needs a library of the user's, and of an
opset newer than the runtime."""


def is_lacking(error: BaseException) -> bool:
    """Whether an error of the runtime's, or one that came of it, says that it cannot run the model whatever the
    inputs."""
    said = str(error.__cause__ or error)
    return any(words in said for words in _LACKING)
