"""Records the attention calls of this process: one line per kind of call, and how often it ran.

This folder also runs inside programs whose Python has no attnsweep: `attnsweep shapes` puts a copy
of it on the program's PYTHONPATH. It imports the standard library and PyTorch only.

    recording   what records, from its beginning to `stop`
    dispatcher  kernels of ours before PyTorch's own: they see every call, and cost the most
    eager       an object of ours in the place of PyTorch's: it sees eager calls, and costs little
    place       that place: what stands there, and who holds PyTorch's function elsewhere
    graphs      calls in CUDA graphs
    kinds       what a call is
    log         kinds and counts, in files
    start       begins once the program imports PyTorch
"""
