"""Regions found by what they compute, and what may come into them.

grow.py          groups of nodes, grown by joining neighbours; growing.py what may stand in their place
contractions.py  attention; masks.py what computes its masks, caches.py what it puts rows into
products.py      products and convolutions with what is around them; beside.py what may come in and how that is weighed,
                 dequantised.py those of 8-bit numbers
normed.py        norms ahead of products; reduced.py residuals and norms behind them
siblings.py      products of one operand whose widths differ; sliced.py products whose results are put side by side
depthwise.py     depthwise convolutions; gated.py images that products of their means scale
horizontal.py    regions between which no edge runs, joined
recompute.py     values that are computed again where they are read; sketches.py what regions would be so
borders.py       views at the border of a chosen region
"""
