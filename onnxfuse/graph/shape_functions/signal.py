"""Windows and spectra."""

from __future__ import annotations

from onnxfuse.graph.dims import dim
from onnxfuse.graph.shape_functions.context import FLOAT, Context, Type, shape_function


@shape_function("MelWeightMatrix")
def _mel(context: Context) -> list[Type]:
    bins, length = context.elements(0), context.elements(1)
    dtype = int(context.attribute("output_datatype", FLOAT))
    if bins is None or length is None:
        return [Type(dtype, context.unknown_shape(2))]
    return [Type(dtype, (length[0] // 2 + 1, bins[0]))]


@shape_function("BlackmanWindow", "HammingWindow", "HannWindow")
def _window(context: Context) -> list[Type]:
    size = context.elements(0)
    return [Type(int(context.attribute("output_datatype", FLOAT)), size or context.unknown_shape(1))]


@shape_function("STFT")
def _stft(context: Context) -> list[Type]:
    signal, step, window = context.shape(0), context.integers(1), context.shape(2)
    if signal is None:
        return [Type(context.dtype(), context.unknown_shape(4))]
    given = context.elements(3) if context.has(3) else window
    if given is None or not step or step[0] <= 0:
        places = (context.unknown(1, 4), context.unknown(2, 4))
    else:
        bins = given[0] // 2 + 1 if context.attribute("onesided", 1) else given[0]
        places = ((signal[1] - given[0]) // step[0] + 1, bins)
    return [Type(context.dtype(), (signal[0], *places, dim(2)))]
