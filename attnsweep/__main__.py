"""`attnsweep`, and `python -m attnsweep`."""

import os
import sys
import traceback


def main() -> None:
    """Run the command line. Ctrl-C while it is imported has no traceback either."""
    try:
        _open_closed_streams()
        from attnsweep.cli import main as run
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)  # noqa: T201 -- the console is not there yet
        sys.exit(130)
    except Exception:  # not exit code 1, which would be a verdict
        traceback.print_exc()
        print("error: attnsweep cannot start: install it again", file=sys.stderr)  # noqa: T201
        sys.exit(70)
    run()


def _open_closed_streams() -> None:
    """Discard what goes to a stream that was closed, as by `>&-`.

    Otherwise the next file that is opened would take its number, and get what is printed.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False, encoding="utf-8")
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False, encoding="utf-8")


if __name__ == "__main__":
    main()
