"""How a fused loss runs: sizes, dtype and device in; strategy, rows and classes at a time out.

Pure functions and one page of rules: nothing is measured when a program compiles, so that machines
of a kind agree. Imports ``spec``.
"""
