"""Regions of which parts have kernels of their own, launched one behind the other.

in_parts.py        what these have in common
normed.py          products and attentions of operands that norms of their rows scale
projected.py       attentions with the product of their operands
cached.py          attentions over caches that they put new rows into
sliced.py          products that write parts of one result, windows and copies beside them
gated.py           images scaled by products of their means; gated_text.py the text of these, gated_ahead.py depthwise
                   convolutions that tell the sums of the means
recurrent.py       recurrent layers, behind a product for what inputs add
"""
