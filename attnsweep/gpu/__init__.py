"""The process that owns the GPU: candidates and peers are checked and timed there."""
