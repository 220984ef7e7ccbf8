"""`attnsweep`, and `python -m attnsweep`."""

import sys


def main() -> None:
    """Run the command line. Ctrl-C while it is imported has no traceback either."""
    try:
        from attnsweep.cli import main as run
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)  # noqa: T201 -- the console is not there yet
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
