"""The original of a fused model out of a file that anybody may have changed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from onnxfuse.errors import ModelError
from onnxfuse.graph.load import LoadedModel, check
from onnxfuse.rewriting.unfusing import unfuse


def original(loaded: LoadedModel, only: Collection[str] | None = None, *, folded: bool = False) -> LoadedModel:
    """``unfuse``, and what it gives is a model like any that was loaded: what comes out of the records is checked.

    Raises:
        ModelError: see ``unfuse``; or what the records put back is no model.
    """
    result = replace(loaded, proto=unfuse(loaded.proto, only, folded=folded))
    try:
        check(result)
    except ModelError as error:
        place = str(error.place or "")
        raise ModelError(
            f"What onnxfuse's records in the model put back is no model: {error.message}",
            place=place if loaded.path is None or str(loaded.path) in place else f"{loaded.path}, {place}".rstrip(", "),
            remedy="Fuse the original model again.",
        ) from error
    return result
