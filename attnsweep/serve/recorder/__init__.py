"""Records the attention calls of this process: one line per kind of call, and how often it ran.

`attnsweep shapes` has a program import a copy of this folder, which has no attnsweep beside it.
"""
