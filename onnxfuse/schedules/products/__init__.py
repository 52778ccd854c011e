"""Products and convolutions, with what is computed around them.

product.py         the schedule of those whose results are maps of their sums
parts.py           what a product with what surrounds it is made of; windows.py the windows of a convolution
shape.py           blocks; blocks.py which are tried, pace.py what their time follows from
text.py            the text; epilogue.py that of what becomes of sums, of_columns.py what of that is the same for all
                   rows, direct.py results that lanes store where they have the sums
specialised.py     the text where one warp copies and the others multiply; maps.py what it can copy, boxes.py windows in
                   boxes, shared.py windows that share pieces of an image, asides.py residuals, tf32.py float32
patch.py           convolutions of few channels; pixels.py of pixels in vectors
few.py             products of few rows; few_text.py their text
tall.py            products of many rows by few columns
cut.py             results that are cut from one product's sums
integers.py        products of 8-bit integers; integer_pace.py what their time follows from
library.py         what cuBLASLt runs in a kernel's place; cudnn.py what cuDNN does
norms.py           the schedule of convolutions of whose results a norm over windows is taken; norm_groups.py of which
                   groups, column_moments.py the text that tells mean and squares with them
rows.py            the schedule of products of whose results rows are reduced; rows_text.py its text, in_two.py what
                   runs them as two kernels
"""
