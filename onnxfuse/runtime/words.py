"""What ONNX Runtime says, in fewer words."""

from __future__ import annotations

import re

_STATUS = re.compile(r"\[ONNXRuntimeError\] : \d+ : \w+ : ")
_NODE = re.compile(r"Non-zero status code returned while running (\w+) node\. Name:'([^']*)' Status Message: ")
_SOURCE = re.compile(r"^\S+\.(?:cc|cpp|h|cu|cuh):\d+ .*?(?:\) (?:const )?|\] )(?=\S)")
"""A file of the runtime's, a line and the signature of a function: what was asserted comes after it."""


def runtime_words(error: object) -> str:
    """The first line of what ONNX Runtime says, without its status and its own files, the node before it."""
    text = _STATUS.sub("", str(error).strip())
    node = next(reversed(list(_NODE.finditer(text))), None)  # the innermost, of bodies in bodies
    said = text[node.end():] if node is not None else text
    lines = said.strip().splitlines() or [""]
    line = " ".join(_SOURCE.sub("", lines[0]).split()).rstrip(".")
    where = "" if node is None else f"{node[1]} '{node[2]}': " if node[2] else f"{node[1]}: "
    return f"{where}{line}."
