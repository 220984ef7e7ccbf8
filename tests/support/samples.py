"""Rows and environments that several tests need."""

from __future__ import annotations

from attnsweep.trial import Environment

H200 = Environment(
    gpu="NVIDIA H200",
    arch="sm_90a",
    driver="580.95.05",
    cuda="13.0",
    nvrtc="13.0",
    attnsweep="1.0",
    python="3.11",
    date="2026-07-26T10:00:00Z",
    host_cores=16,
    sm_count=132,
    clock_hz=1.98e9,
    memory_bytes=150 << 30,
    memory_bytes_per_second=4.8e12,
    l2_bytes=50 << 20,
)
