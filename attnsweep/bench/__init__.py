"""The process that owns the GPU: it checks and times candidates and baselines."""
