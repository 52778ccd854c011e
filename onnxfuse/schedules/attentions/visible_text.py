"""The text that leaves out keys which no query of a block sees.

    seen     the keys that some query of a range sees, and those that all of them do
    begin    tiles of keys that a block goes over; every score of another is masked
    clear    keys that all queries of a warp see: their scores need no comparison of places
"""

from __future__ import annotations

from onnxfuse.schedules.attentions.visible import Bound, Visible
from onnxfuse.schedules.lanes import Scope
from onnxfuse.schedules.text import Writer, indented


def seen(visible: Visible, writer: Writer, length: str) -> list[str]:
    """A function that sets ``low`` and ``high`` to the keys that some query from ``from`` to ``to`` sees, or, for
    ``all``, to those that each of them does; its writer has no other text."""
    bounds, narrowed = [], []
    for place, bound in enumerate(visible.bounds):
        text = writer.index(bound.index)
        lines = writer.upto(Scope.ROW)
        writer.leave(Scope.KERNEL)
        lines.append(f"return {text};")
        bounds += [f"const auto bound{place} = [&](long long m) -> long long {{", *indented(lines), "};"]
        least, most = _extremes(bound, writer)
        if bound.upper:
            narrowed.append(f"high = of::imin(high, bound{place}(all ? {least} : {most}));")
        else:
            narrowed.append(f"low = of::imax(low, bound{place}(all ? {most} : {least}));")
    return [
        *bounds,
        "const auto seen = [&](idx from, idx to, bool all, long long& low, long long& high) {",
        *indented([
            f"low = 0, high = {length};", *narrowed,
            f"low = of::imin(low, (long long){length}), high = of::imax(high, 0LL);",
        ]),
        "};",
    ]


def _extremes(bound: Bound, writer: Writer) -> tuple[str, str]:
    """The queries from ``from`` to ``to`` at which a bound is least and at which it is most, or beyond."""
    if bound.digit is None:
        return "from", "from"
    first, last = "from", "to"
    if not bound.digit.top and bound.digit.size is not None:
        # It begins anew after a period, at zero, and ends at the period's last.
        period = writer.size(bound.digit.step * bound.digit.size)
        one = f"from / {period} == to / {period}"
        first, last = f"({one} ? from : 0)", f"({one} ? to : {period} - 1)"
    return (first, last) if bound.rising else (last, first)


def narrowed(begin: str, end: str, rows: str) -> list[str]:
    """Lines that narrow a block's keys to those that some of its queries see."""
    return [
        f"seen(first, of::imin(first + rows, (idx)({rows})) - 1, false, low, high);",
        f"{begin} = of::imax({begin}, (idx)(low / keys * keys)), {end} = of::imin({end}, (idx)high);",
    ]


def clear(rows: str) -> list[str]:
    """Lines that say which keys all queries of a warp see."""
    return [
        f"seen(of::imin(first + own, (idx)({rows}) - 1), of::imin(first + own + 16 * tiles, (idx)({rows})) - 1, true, "
        "low, high);",
        "const idx clear = (idx)low, clear_end = (idx)high;",
    ]
