"""Scores, or their shares of a softmax, that are wanted outside of an attention: its kernel writes them, reading none.

A share is known once all keys were seen, so the first product is computed again then, tile by tile: its operands lie in
caches, and what others would write, read and write again of all scores does not.
"""

from __future__ import annotations

from onnxfuse.lowering.pull import Contracted, Scalar
from onnxfuse.schedules.attentions.parts import Stored
from onnxfuse.schedules.attentions.softmax import each_row
from onnxfuse.schedules.attentions.text import SCORE, AttentionText, each_score, products
from onnxfuse.schedules.text import indented, unrolled


class KeptText(AttentionText):
    """The body of a kernel that goes over the keys once more, and stores what is made of each score."""

    scales = False

    def closing(self) -> list[str]:
        """The results, and then those of scores, also of keys that are left out before."""
        length = self.extents["k"]
        return [
            "of::copies_here<0>();  // where there was no key",
            "__syncthreads();",
            "// Nobody reads keys any more: the first ones come again while results are stored.",
            *self.bring(1, "key_tile", "0"),
            "of::copies_asked();",
            *super().closing(),
            "// What is kept of scores and shares.",
            *self._shares(),
            f"for (idx start = 0; start < {length}; start += keys) {{",
            *indented([
                "of::copies_here<0>();",
                "__syncthreads();",
                "float scores[tiles][keys / 8][4] = {};",
                *products(self.across, self.parts),
                "// Everybody is done with the keys, and the next ones come while these scores are stored.",
                "__syncthreads();",
                f"if (start + keys < {length}) {{",
                *indented(self.bring(1, "key_tile", "start + keys")),
                "}",
                "of::copies_asked();",
                *each_row([
                    "const idx m = first + own + i * 16 + half * 8 + group;",
                    f"if (m < {self.extents['m']}) {{", *indented(self._kept_of_row()), "}",
                ]),
            ]),
            "}",
        ]

    def _shares(self) -> list[str]:
        """Lines that keep what a row's powers are multiplied by, and whether they are zeros all the same."""
        guarded = self.parts.softmax.guarded
        return [
            "float scales[tiles][2];",
            *(["bool nothings[tiles][2];"] if guarded else []),
            *each_row([
                *self.scale_of_row(),
                "scales[i][half] = scale;",
                *(["nothings[i][half] = nothing;"] if guarded else []),
            ]),
        ]

    def _kept_of_row(self) -> list[str]:
        """Lines that store what is made of a row's sums, make shares of these, and store what is made of those."""
        kept = self.parts.kept
        of_shares = [each for each in kept if self.parts.is_of_share(each.scalar)]
        lines = [line for each in kept if each not in of_shares for line in self._each_stored(each)]
        if of_shares:
            guard = "nothings[i][half] ? 0.0f : "
            all_of_them = self._scores(self.parts.softmax.score, "0", self.extents["k"])
            lines += [
                *all_of_them.outer, *each_score(all_of_them.inner),
                "const float offset = Powers::offset(most[i][half]);",
                *each_score(unrolled("int v = 0; v < pair; ++v", [
                    f"{SCORE} = {guard if self.parts.softmax.guarded else ''}"
                    f"Powers::far_term({SCORE}, by, offset) * scales[i][half];"])),
            ]
            lines += [line for each in of_shares for line in self._each_stored(each)]
        return lines

    def _each_stored(self, kept: Stored) -> list[str]:
        """Lines that store one result of all scores of a row that a thread has, in a scope of their own."""
        assert self.parts.along_keys is not None

        def known(scalar: Scalar) -> str | None:
            if scalar is self.parts.share:
                return SCORE
            return self.sum_of_a_score if isinstance(scalar, Contracted) else None

        stored, outer = self.stored(kept, self._writer(self.parts.along_keys, known), "k")
        return ["{", *indented([*outer, *each_score([
            "constexpr int width = pair;", "const idx k = start + n * 8 + corner + part;", *stored])]), "}"]
