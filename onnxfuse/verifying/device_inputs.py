"""Inputs of sessions on a GPU, which stay there from one run to the next where they are the same arrays."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxfuse.verifying.device_values import HOST, copied
from onnxfuse.verifying.evaluate import plain_feeds

Array = NDArray[Any]


@dataclass(frozen=True)
class Held:
    """An input on the GPU: the array and the element type that were given, what it was copied from, and what has the
    copy."""

    given: Array
    kind: int
    name: str
    host: Array
    value: Any


@dataclass
class DeviceInputs:
    """Those of the last run.

    Attributes:
        device: the GPU's number; where: tensors lie, in ONNX Runtime's words; held: by formal name.
    """

    device: int
    where: str
    held: dict[str, Held] = field(default_factory=dict)

    def placed(self, name: str, given: Array, kind: int) -> Held:
        """An input on the GPU; one in host memory stays there.  What edges of a run leave as it is, weights above all,
        is copied once for all, and all inputs are for a kernel's variants: one that wrote to them would be found out by
        the next."""
        held = self.held.get(name)
        if held is None or held.given is not given or held.kind != kind:
            self.held.pop(name, None)  # both need not be there at one time
            ((formal, plain),) = plain_feeds({name: given}, {name: kind}).items()
            host = np.asarray(plain, order="C")  # in host memory ONNX Runtime works in the array itself
            value = copied(host, HOST if name.startswith("h") else self.where, self.device)
            held = self.held[name] = Held(given, kind, formal, host, value)
        return held

    def forget(self) -> None:
        """Hold none."""
        self.held.clear()
