"""Lines of an attention kernel that multiply float32 through TF32, in place of those for 16-bit floats.

With lane = 4 g + t, a lane has of 16 x 8 powers what a product's sums have there: (g, 2 t), (g, 2 t + 1) and both eight
rows below.  An operand of a product has (g, t) and (g, t + 4) there instead.  So what is summed over is counted in
another order, in which 2 t is t and 2 t + 1 is t + 4, by powers and by values, and no lane needs another's powers.
"""

from __future__ import annotations

from onnxfuse.schedules.text import unrolled

TILES = "constexpr int long_row = depth + 4, wide_row = columns + 4, key_row = keys + 8;"
"""How far rows are from one another, so that what a warp reads at once lies in different banks: eight rows of 16 bytes,
or four rows of eight words, of values those of every second row."""


def keys(across: bool) -> list[str]:
    """Lines that load keys that lie one after the other, or across."""
    return (
        unrolled("int j = 0; j < 4; ++j", [
            "const int k = step * 8 + lane % 4 + j % 2 * 4;",
            "right[j] = __float_as_uint(key_tile[k * key_row + n * 8 + group + j / 2 * 8]);"]) if across else
        ["const float* const line = key_tile + (n * 8 + lane / 16 * 8 + lane % 8) * long_row;",
         "of::load_words(right, line + step * 8 + lane / 8 % 2 * 4);"])


def rounded(operand: str, rounds: bool) -> list[str]:
    """A line that rounds words of an operand, where it is to be."""
    return [f"of::round_tf32({operand});"] if rounds else []


def multiplied(name: str, place: str, count: int, exact: bool) -> list[str]:
    """Lines that add the products of words ``left`` and ``right``, of ``count`` columns from a place on, to sums: of
    words as they were rounded, or as they are."""
    pairs = [f"right[{2 * n}], right[{2 * n + 1}]" for n in range(count)]
    if exact:
        return [f"const unsigned words[{count}][2] = {{{', '.join(f'{{{pair}}}' for pair in pairs)}}};",
                f"of::multiply_words({name}, {place}, left, words);"]
    return unrolled("int i = 0; i < tiles; ++i", [
        f"of::mma_tf32({name}[i][{place}{f' + {n}' if n else ''}], left[i], {pair});" for n, pair in enumerate(pairs)])


def sums(exact: bool) -> list[str]:
    """Lines that sum up the second product, of powers by values."""
    return [
        "// The second product: powers by values.",
        *unrolled("int step = 0; step < keys / 8; ++step", [
            "unsigned left[tiles][4];",
            *unrolled("int i = 0; i < tiles; ++i", [
                *unrolled("int j = 0; j < 4; ++j", [
                    "left[i][j] = __float_as_uint(scores[i][step][j % 2 * 2 + j / 2]);"]),
                *rounded("left[i]", not exact),
            ]),
            "const float* const line = value_tile + (step * 8 + corner) * wide_row + group;",
            *unrolled("int c = 0; c < columns / 8; ++c", [
                "unsigned right[2] = {__float_as_uint(line[c * 8]), __float_as_uint(line[wide_row + c * 8])};",
                *rounded("right", not exact),
                *multiplied("sums", "c", 1, exact),
            ]),
        ]),
    ]
