"""Reductions of rows and columns, and running totals, with what is computed around them.

rows.py            over the last axes; rows_text.py its text, streaming.py rows that registers do not hold
columns.py         over other axes
transposed.py      between tensors that lie along the rows and others across; transposed_text.py its text
split.py           few long rows, in several steps; split_text.py their text, online.py sums that join their maximum
pieces.py          long rows that lie in short pieces, in several steps too; pieces_text.py their text, moments.py means
                   and variances in one pass
scans.py           running totals; scans_text.py its text, scans_split.py of few rows, scans_expected.py how many
                   kernels they take
reduction.py       what these six have in common; phases.py the phases that they run in
peel.py            rows that begin between two vectors
"""
