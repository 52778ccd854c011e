"""Depthwise convolutions, with what is computed of each element before and after them.

stencil.py         the schedule of images with channels first
parts.py           what such a convolution is made of; shape.py its tiles, text.py the text
last.py            the schedule of images with channels last
last_shape.py      what such a convolution is made of; last_strips.py its strips of windows, last_text.py the text
"""
