"""For what and how a model is planned anew beside its lock: as the lock says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onnxfuse.cuda_options import BIAS, LAYOUT, TF32
from onnxfuse.errors import LockError
from onnxfuse.graph import build_graph
from onnxfuse.graph.load import LoadedModel
from onnxfuse.locking.lock import Lock
from onnxfuse.planning.objective import Objective, read_hints


def settings_of(lock: Lock, file: Path | None) -> dict[str, Any]:
    """What the lock says of how to plan, as arguments of ``api.optimize``; sizes are left out.

    Raises:
        LockError: this release knows no such strategy or hint.
    """
    plan = lock.plan
    try:
        hints = read_hints(plan.hints)
        Objective(plan.strategy, hints, plan.least_gain)
    except ValueError as error:
        raise LockError(f"The lock asks for what this release cannot plan: {error}.",
                        place=None if file is None else str(file),
                        remedy="Mend its section plan; or `onnxfuse optimize MODEL --lock FILE` writes it anew."
                        ) from error
    provider = {LAYOUT: plan.channels_last, BIAS: plan.keeps_biases and not plan.channels_last}
    return {"target": plan.target, "disable": tuple(plan.disabled), "strategy": plan.strategy, "hints": hints,
            "least_gain": plan.least_gain, "fold_weights": plan.fold_weights, "compile": plan.compiled,
            "provider_options": {name: "1" for name, on in provider.items() if on} | (
                {TF32: "0"} if plan.keeps_float32 else {})}


def sizes_of(lock: Lock, model: LoadedModel) -> dict[str, int]:
    """The lock's sizes by the names that the model's symbols have now: those that stand where the lock's stood, in the
    input of the same name, else in the one at the same place."""
    inputs = build_graph(model).inputs
    by_name = {value.name: value for value in inputs}
    sizes: dict[str, int] = {}
    for place, (name, words) in enumerate(lock.model.inputs.items()):
        value = by_name.get(name) or (inputs[place] if place < len(inputs) else None)
        for word, size in zip(words[1:], (value and value.shape) or (), strict=False):
            if isinstance(word, str) and word in lock.plan.dims and {str(size)} == size.symbols:
                sizes.setdefault(str(size), lock.plan.dims[word])
    return sizes
