"""What traces a callable, forked by a nursery that has imported PyTorch and Triton: seconds, for each."""

import sys
from pathlib import Path

from attnsweep.compile.traced import server, triton, warm  # noqa: F401 -- Triton's part is imported too
from attnsweep.core.user_code import user_modules

warm.import_all()
warm.digest()


def main() -> None:
    """Serve as the program does: without modules of tests, which would be taken for the user's."""
    for name, file in user_modules().items():
        if Path(file).parent == Path(__file__).parent:
            sys.modules[name] = server
    server.main()
