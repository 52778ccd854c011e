"""Attention: two products with a softmax between them, whose scores never reach memory.

attention.py       the schedule
parts.py           what an attention is made of; shape.py its blocks
text.py            the text; softmax.py that of a running maximum and powers under it, tf32.py products of float32
together.py        products of four warps together; specialised.py where one warp copies and the others multiply
split.py           few queries and many keys, in two steps
visible.py         which keys a mask hides from all queries of a block; visible_text.py the text that leaves them out
kept.py            scores, or their shares, that are wanted outside
"""
