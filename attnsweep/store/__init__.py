"""Runs on disk: rows, provenance, and the machine code of winners."""
