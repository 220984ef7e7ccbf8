"""Baselines: the libraries that candidates are compared with."""
