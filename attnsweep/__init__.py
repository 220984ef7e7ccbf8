"""attnsweep: find the fastest correct attention kernel for a GPU and a shape, by measuring."""

__version__ = "0.1.0"
