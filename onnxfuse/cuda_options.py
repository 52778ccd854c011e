"""Options of ONNX Runtime's CUDA provider that a plan hangs on: what they are by themselves, whether they are on, and
what a fused file costs that runs with others than it was planned for."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from onnxfuse.visible import visible
from onnxfuse.wording import option

LAYOUT, BIAS, TF32 = "prefer_nhwc", "fuse_conv_bias", "use_tf32"

USUAL = {LAYOUT: False, BIAS: False, TF32: True}
"""Whether they are on where nobody says so."""

_COSTS: dict[tuple[str, bool], str] = {
    (LAYOUT, True): "fused nodes beside convolutions stop the runtime's layout conversions, which then cost time",
    (LAYOUT, False): "what lies beside convolutions was left unfused for nothing",
    (BIAS, True): "fused nodes add biases that the convolutions would now add for nothing",
    (BIAS, False): "biases of convolutions are kernels of their own, where fused nodes could add them",
    (TF32, True): "products of float32 were left to the runtime, where fused nodes may be faster",
    (TF32, False): "kernels of fused nodes round operands of float32 products to TF32 all the same",
}
"""What becomes of a file that was planned for the opposite, by the option and whether it is on now."""


class PlannedOtherwiseWarning(UserWarning):
    """A fused model runs with other options of the CUDA provider than it was planned for."""


def is_on(options: Mapping[str, Any], name: str) -> bool:
    """Whether one of ``USUAL`` is on."""
    return str(options.get(name, int(USUAL[name]))).strip().lower() in ("1", "true")


def spelled(options: Mapping[str, Any]) -> dict[str, str]:
    """Options as a file keeps them: by name, in words."""
    return {str(name): str(options[name]) for name in sorted(options, key=str)}


def switches(options: Mapping[str, Any]) -> dict[str, str]:
    """Those of ``USUAL`` that options set, as ONNX Runtime takes them."""
    return {name: str(int(is_on(options, name))) for name in USUAL if name in options}


def planned_otherwise(
    planned: Mapping[str, Any], hangs_on: Collection[str], given: Mapping[str, Any], name: str = "the model"
) -> Iterator[str]:
    """What somebody should know who runs a fused model, called by its name, with the options ``given``: a sentence for
    each that its plan ``hangs_on`` and that is another than was planned for."""
    for each in USUAL:
        on = is_on(given, each)
        if each in hangs_on and is_on(planned, each) != on:
            anew = option("provider-option", f"{each}={int(on)}")
            yield (f"{visible(name)} was planned for {each}={int(not on)} of the CUDA provider and runs with "
                   f"{each}={int(on)}: {_COSTS[each, on]}.  Plan its original with {anew}, or run it as it was "
                   "planned.")
