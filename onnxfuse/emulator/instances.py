"""What kernel texts call of the headers again and again: instances of templates that are compiled once for all texts.

To compile these anew for each text was a tenth of its time, and what functions of the precompiled header call g++ makes
for every text, whether it calls them or not.  All are functions of the numbers that they are given: what reads or
writes memory that a caller points to, or casts a float to an integer that may not hold it, is compiled with the caller,
and with the checks of alignment, bounds and casts that a caller is compiled with.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

_FORMATS = ("5, 10", "8, 7")
_LONG = ("long", "unsigned long", "long long", "unsigned long long")
_EXCHANGED = ("int", "unsigned", *_LONG, "float", "double", "__half", "__half2", "__nv_bfloat16", "__nv_bfloat162")
_FOLDS = ("Sum", "Prod", "Max", "MaxNumber", "Min")
_EXPONENTIALS = (
    ("Exp<true>", "MaxNumber"), ("Exp<false>", "Max"), ("Exp<true>", "Max"), ("ExpDifference", "MaxNumber"))
_LANES = (2, 4, 8, 16, 32)
_SIXTEEN_BITS = ("__half", "__nv_bfloat16")
_WHOLE = {
    "bool": (4, 8), "signed char": (8,), "unsigned char": (8,), "short": (8,), "unsigned short": (8,), "int": (4, 8),
    "unsigned": (4, 8), "long long": (2, 4), "unsigned long long": (2, 4)}


@cache
def instances() -> tuple[str, ...]:
    """Their declarations, without ``template`` before them."""
    return (*_conversions(), *_reductions(), *_packs(), *_exponentials())


def _conversions() -> Iterator[str]:
    for places in _FORMATS:
        yield f"unsigned short onnxfuse_emulator::encode<{places}>(double, bool)"
        yield f"float onnxfuse_emulator::decode<{places}>(unsigned short)"
    for kind in _LONG:
        yield f"double onnxfuse_emulator::odd<{kind}>({kind})"
    for whole in ("int", "unsigned", "long long", "unsigned long long"):
        for kind in ("float", "double"):
            yield f"{whole} onnxfuse_emulator::saturate<{whole}, {kind}>({kind})"
    lanes = "unsigned long long"
    yield f"const {lanes}* onnxfuse_emulator_lanes<{lanes}, 1>(const {lanes} (&)[1], int)"
    for kind in _EXCHANGED:
        yield f"{kind} onnxfuse_emulator::exchange<{kind}>(onnxfuse_emulator::Warp, unsigned, {kind}, int, int, int)"


def _reductions() -> Iterator[str]:
    for fold in _FOLDS:
        for kind, widths in (("float", (1, 2, 4, 8)), ("double", (1, 2))):
            for lanes in _LANES:
                yield f"{kind} of::reduce_lanes<of::{fold}, {lanes}, {kind}>({kind})"
            for width in widths:
                yield f"{kind} of::fold<of::{fold}, {kind}, {width}>({kind} (&)[{width}])"


def _packs() -> Iterator[str]:
    floats = {("float", "float"): (1, 2, 4, 8), ("double", "double"): (1, 2, 4)}
    sixteen = {(kind, "float"): (1, 2, 4, 8) for kind in _SIXTEEN_BITS}
    whole = {(kind, kind): widths for kind, widths in _WHOLE.items()}
    for (stored, computed), widths in (floats | sixteen | whole).items():
        for width in widths:
            yield (f"of::Vector<{stored}, {width}> of::pack<{stored}, {width}, {computed}>"
                   f"(const {computed} (&)[{width}])")


def _exponentials() -> Iterator[str]:
    for exponential, fold in _EXPONENTIALS:
        template = f"void of::add_exponentials<of::{exponential}, of::{fold}, float"
        for width in (1, 4, 8):
            yield f"{template}, {width}>(float (&)[{width}], float (&)[{width}], const float (&)[{width}])"
            for count in sorted({width, 8, 16}):
                yield f"{template}, {width}, {count}>(float&, float (&)[{width}], const float (&)[{count}])"
