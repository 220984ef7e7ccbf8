"""Records the attention calls of this process: one line per kind of call, and how often it ran.

`attnsweep shapes` puts a copy of this folder on a program's PYTHONPATH, whose Python may have no
attnsweep: it imports the standard library and PyTorch only. `start` begins, `recorder` counts.
"""
