"""Tuned attention kernels for PyTorch, exported by attnsweep.

`attention` has the signature and the meaning of torch.nn.functional.scaled_dot_product_attention.
"""

from __future__ import annotations

from pathlib import Path

from .operator import Explanation, open_package
from .table import PackageError

_operator = open_package(Path(__file__).parent, __name__.replace(".", "_"))
attention = _operator.attention
explain = _operator.explain
counters = _operator.counters
__version__ = _operator.table.attnsweep

__all__ = ["Explanation", "PackageError", "attention", "counters", "explain"]
