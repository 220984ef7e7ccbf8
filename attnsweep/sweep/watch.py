"""Running a sweep again whenever a file that it depends on is edited.

The sweep itself keeps the rows whose machine code did not change, so that only an edited family is
compiled and timed again. Needs the `watch` extra.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from attnsweep.compile.nvrtc import source_closure
from attnsweep.core.errors import AttnsweepError, ToolchainError
from attnsweep.core.files import install_command, shipped
from attnsweep.family.family import Family


def wakes(folders: Sequence[Path]) -> Iterator[object]:
    """Wait for file changes in these folders, and yield once for each burst of them.

    Raises ToolchainError if watchfiles is missing.
    """
    try:
        import watchfiles
    except ImportError as error:
        raise ToolchainError("--watch needs watchfiles", hint=install_command("watch")) from error
    yield from watchfiles.watch(*folders, raise_interrupt=True)


def files_of(spec: Path, kernels: Iterable[Family]) -> list[Path]:
    """The spec, and each family's declaration, template and headers."""
    found = {spec: None}
    for kernel in kernels:
        found[kernel.source.with_suffix(".py")] = None
        for place in (kernel.source.parent, shipped("kernels"), *kernel.include_places):
            for name in source_closure(kernel.source, kernel.include_places):
                if (place / name).is_file():
                    found[place / name] = None
    return [path.resolve() for path in found]


def state_of(files: Iterable[Path]) -> dict[Path, str | None]:
    """The hash of each file's content; None if it cannot be read."""
    state: dict[Path, str | None] = {}
    for path in files:
        try:
            state[path] = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError:
            state[path] = None
    return state


def changes(before: Mapping[Path, str | None], after: Mapping[Path, str | None]) -> list[str]:
    """`flash.cu changed`, `flash.cu vanished`, `flash.cu is back`, for each file that differs."""
    said = []
    for path, now in after.items():
        was = before.get(path, now)
        if was != now:
            how = "vanished" if now is None else "is back" if was is None else "changed"
            said.append(f"{path.name} {how}")
    return said


def keep_running(
    once: Callable[[], object], files: Callable[[], Sequence[Path]], say: Callable[[str], None]
) -> None:
    """Call `once`, and again after each edit of `files`, until Ctrl-C, which is raised.

    files: the files that `once` depends on now. What the first call raises is raised; later, what
    either raises on purpose is said, because a file that is being edited may be wrong for a while.
    """
    watched = list(files())
    state = state_of(watched)
    once()
    while True:
        folders = sorted({path.parent for path in watched if path.parent.is_dir()})
        say(f"watching {len(watched)} file{'s' * (len(watched) != 1)}; Ctrl-C ends")
        for _ in wakes(folders):
            # Again at once if a file was edited while the sweep ran.
            while edited := changes(state, now := state_of(watched)):
                state = now
                say(", ".join(edited))
                gone = [path.name for path in watched if now[path] is None]
                if gone:
                    say(f"waiting until {', '.join(gone)} can be read again")
                    continue
                try:
                    found = list(files())
                    once()
                except AttnsweepError as error:
                    say(f"error: {error.render()}")
                except OSError as error:  # a file vanished while it was read
                    say(f"error: {error}")
                else:
                    state |= state_of(path for path in found if path not in state)
                    watched = found
            if not {path.parent for path in watched} <= set(folders):
                break  # a new header lies in another folder
        else:
            return  # the watcher ended
