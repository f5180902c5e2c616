"""From the ATen graph of a row function to a spec of class reductions, or no.

Capture knows no formula; what is lowered has generated kernels, tiles and vocabulary shards. A no
is harmless: the row function runs as it is.
"""
