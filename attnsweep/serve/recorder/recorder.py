"""Records from now on, until it is stopped."""

from __future__ import annotations

from pathlib import Path

from .eager import Eager
from .graphs import Graphs
from .log import TORCH, Log


class Recording:
    """Counts the attention calls of this process until `stop`. Needs torch.library.get_kernel."""

    def __init__(self, folder: Path) -> None:
        import torch

        if not hasattr(torch.library, "get_kernel"):
            raise RuntimeError(f"needs a newer PyTorch than {torch.__version__}: get_kernel")
        (folder / TORCH).touch()
        self.log = Log(folder)
        self.graphs = Graphs(self.log, torch.cuda.CUDAGraph)
        self.eager = Eager(self.log, self.graphs)

    def stop(self) -> None:
        """Give PyTorch all its own back."""
        self.eager.stop()
        self.graphs.stop()
