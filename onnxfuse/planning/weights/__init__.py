"""Constants beside products and convolutions, folded into their weights, and weights that are laid out otherwise.

collapsing.py   which are folded; linear.py what they make of weights and bias, steps.py what a node does to a channel
joining.py      products of one operand as one, by weights that lie side by side
transposing.py  quantised weights laid out as tensor cores read them
"""
