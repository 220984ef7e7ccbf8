"""Write table.json and cubins/ in attnsweep/serve/runtime: the winners behind attnsweep.attention.

It also writes how many there are into docs/how-to/use.md.

Usage: python scripts/winners.py [--check]. What is shipped already, of families whose text is the
same, is not compiled again. The rest needs the NVRTC of the recorded runs, since the machine code
of another is not what they timed. With --check it writes nothing, needs no NVRTC, and returns 1 if
the table is not what results/ gives, or if the kernels' text has changed since.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import hashlib
import itertools
import json
import re
import shutil
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import paged_times

from attnsweep import families, find_runs
from attnsweep.compile.nvrtc import nvrtc_version
from attnsweep.family.discover import discover
from attnsweep.serve import export as exports
from attnsweep.serve.export import Identity, export, table_text
from attnsweep.serve.export_code import FAMILY, cubin_file
from attnsweep.serve.runtime.families import DECLARED, WITHOUT_RIVAL
from attnsweep.serve.runtime.table import ALIGNMENT, BASE, WINDOW, Code, read_table

ROOT = Path(__file__).parent.parent
PLACE = ROOT / "attnsweep" / "serve" / "runtime"
TABLE, CUBINS = PLACE / "table.json", PLACE / "cubins"
PAGE, TOLD = ROOT / "docs" / "how-to" / "use.md", re.compile(r"\d+( kernels\s+in\s+)\d+( KiB)")
# Most bytes of an archive, and cubins of the base, whose bytes others repeat; a first call unpacks
# the base and one archive, 8 MB at most. 1074 kernels unpacked in 26 ms of a first call so, at most
# 28. Archives of half the size took 10 % more bytes and 20 ms, of twice the size 4 % fewer.
GROUP, OF_BASE = 19 * 2**18, 40
# Share by which a kernel may be slower than the winner of a shape and serve in its place.
SLOWER = 0.02
# Runs that judge the shipped table, and so tune nothing in it.
JUDGES = ("held_out_few",)


def recorded() -> list[Path]:
    """The runs that were measured, but for JUDGES and paged caches; a replay repeats another."""
    runs = find_runs(ROOT / "results")
    apart = (*JUDGES, *(run.name for run in paged_times.recorded()))
    return [run for run in runs if run.parent.name != "replay" and run.name not in apart]


def grouped(table: Mapping[str, Any], cubins: Mapping[str, bytes]) -> dict[str, list[str]]:
    """The cubins of each archive: alike ones next to each other, since they share most bytes.

    The base has some of all kinds, and stages that many kernels share.
    """

    def kind(kernel: Mapping[str, Any]) -> tuple[Any, ...]:
        return kernel["head_dim"], table["configs"][kernel["config"]], kernel["mask"]

    common, kinds = dict[str, None](), list[list[str]]()
    met = set[str]()
    for _, alike in itertools.groupby(sorted(table["kernels"], key=kind), kind):
        both, files = list(alike), dict[str, None]()  # of two types of elements: nearly one code
        for stage, kernel in itertools.product(sorted(both[0]["stages"]), both):
            (files if stage in _MAIN else common).setdefault(cubin_file(kernel["stages"][stage]))
        kinds.append([file for file in files if file not in met])
        met |= {*files}
    kinds = in_a_row([files for files in kinds if files], cubins)
    main = [*itertools.chain(*kinds)]
    some = dict.fromkeys(main[at * len(main) // OF_BASE] for at in range(OF_BASE if main else 0))
    groups, size, archive = {BASE: [*common, *some]}, GROUP + 1, ""
    for files in kinds:
        own = [file for file in files if file not in some]
        needed = sum(len(cubins[file]) for file in own)
        if size + needed > GROUP:  # a call needs one archive
            archive, size = f"{len(groups) - 1:02}.lzma2", 0
            groups[archive] = []
        groups[archive] += own
        size += needed
    return groups


def in_a_row(kinds: Sequence[list[str]], cubins: Mapping[str, bytes]) -> list[list[str]]:
    """The kinds, each next to the one left whose code is the most like it: 7 % fewer bytes.

    Which is told by the share of pairs of instructions that both have.
    """
    pairs = []
    for files in kinds:
        every = (cubins[file] for file in files)
        pairs.append({code[at : at + 32] for code in every for at in range(0, len(code), 16)})
    row, left = list[int](), [*range(len(kinds))]

    def likeness(other: int) -> float:
        both = len(pairs[row[-1]] & pairs[other])
        return both / (len(pairs[row[-1]]) + len(pairs[other]) - both)

    while left:
        row.append(max(left, key=likeness) if row else left[0])
        left.remove(row[-1])
    return [kinds[at] for at in row]


_MAIN = ("fwd", "keys", "queries")
"""Stages whose code is of one kernel; a mask's, and what combines splits, many have in common."""


def packed(data: bytes, before: bytes) -> bytes:
    """LZMA2 that goes on after `before`, as `table.unpacked` reads it.

    By liblzma itself, since Python's module has no way to give it what is before.
    """
    found = ctypes.util.find_library("lzma")
    if found is None:
        sys.exit("needs liblzma, the library of xz")
    library, options, extreme = ctypes.CDLL(found), _Options(), 9 | 1 << 31
    library.lzma_lzma_preset(ctypes.byref(options), ctypes.c_uint32(extreme))
    kept = ctypes.create_string_buffer(before, len(before))
    options.dict_size, options.lc, options.lp, options.pb = WINDOW, 0, 4, 4  # words of 16 bytes
    options.preset_dict, options.preset_dict_size = ctypes.addressof(kept), len(before)
    chain = (_Filter * 2)(_Filter(0x21, ctypes.addressof(options)), _Filter(2**64 - 1, None))
    out, size = ctypes.create_string_buffer(len(data) + 2**16), ctypes.c_size_t(0)
    room = ctypes.c_size_t(len(out))
    given = (chain, None, data, ctypes.c_size_t(len(data)), out, ctypes.byref(size), room)
    if code := library.lzma_raw_buffer_encode(*given):
        sys.exit(f"liblzma returned {code}")
    return out.raw[: size.value]


class _Options(ctypes.Structure):
    """lzma_options_lzma, of lzma/lzma12.h; its last fields are reserved."""

    _fields_ = (
        ("dict_size", ctypes.c_uint32),
        ("preset_dict", ctypes.c_void_p),
        *((name, ctypes.c_uint32) for name in ("preset_dict_size", "lc", "lp", "pb")),
        ("rest", ctypes.c_uint64 * 16),
    )


class _Filter(ctypes.Structure):
    """lzma_filter, of lzma/filter.h."""

    _fields_ = (("id", ctypes.c_uint64), ("options", ctypes.c_void_p))


def write(made: Path) -> None:
    """Put the table and the cubins of an exported package in their place."""
    table = json.loads((made / TABLE.name).read_text(encoding="utf-8"))
    cubins = {path.name: path.read_bytes() for path in (made / CUBINS.name).iterdir()}
    groups = grouped(table, cubins)
    table["archives"] = {
        archive: [[file, len(cubins[file])] for file in files] for archive, files in groups.items()
    }
    if CUBINS.exists():
        shutil.rmtree(CUBINS)
    CUBINS.mkdir()
    before = b""
    for archive, files in groups.items():
        data = b"".join(cubins[file] + bytes(-len(cubins[file]) % ALIGNMENT) for file in files)
        if len(before) + len(data) > WINDOW:
            sys.exit(f"{archive} and {BASE} are larger than {WINDOW} bytes")
        (CUBINS / archive).write_bytes(packed(data, before))
        before = before or data  # the base is the first
    TABLE.write_text(table_text(table), encoding="utf-8")


def kept(old: Mapping[str, Any], table: Mapping[str, Any]) -> dict[Identity, dict[str, bytes]]:
    """Cubins by stage of what is shipped, of families whose text is the same in today's table."""
    if table["format"] != old["format"]:
        return {}
    there, found = read_table(PLACE), dict[Identity, dict[str, bytes]]()

    def archives(kernel: Mapping[str, Any]) -> list[str]:
        files = map(cubin_file, kernel["stages"].values())
        return sorted(there.archives[file].archive for file in files)

    for kernel in sorted(old["kernels"], key=archives):  # each is unpacked once
        own = _identity(kernel, old)
        if old["source"].get(own[0]) == table["source"].get(own[0]):
            codes = {stage: Code(cubin_file(of), of, "") for stage, of in kernel["stages"].items()}
            found[own] = {stage: there.code(code) for stage, code in codes.items()}
    return found


def without_compiler(made: Path, table: dict[str, Any], known: Mapping[Identity, Any]) -> bool:
    """Write to `made` the package of today's table; whether all its machine code is known."""
    if not all(_identity(kernel, table) in known for kernel in table["kernels"]):
        return False
    (made / CUBINS.name).mkdir(parents=True)
    for kernel in table["kernels"]:
        own = known[_identity(kernel, table)]
        kernel["stages"] = {name: hashlib.sha256(data).hexdigest() for name, data in own.items()}
        for name, data in own.items():
            (made / CUBINS.name / cubin_file(kernel["stages"][name])).write_bytes(data)
    (made / TABLE.name).write_text(table_text(table), encoding="utf-8")
    return True


def _identity(kernel: Mapping[str, Any], table: Mapping[str, Any]) -> Identity:
    own = (kernel["head_dim"], kernel["dtype"], kernel["mask"])
    return (kernel.get("family", FAMILY), *own, table["configs"][kernel["config"]])


def outline(table: dict[str, Any]) -> dict[str, Any]:
    """What of a table follows from results/ and the kernels' text, whoever compiles."""
    kernels = [{**kernel, "stages": {}} for kernel in table["kernels"]]
    return {**table, "kernels": kernels, "attnsweep": "", "archives": {}}


def table_of(runs: Sequence[Path], slower: float = 0.0) -> dict[str, Any]:
    """The table that an export of these runs would write, without machine code."""
    return exports.outline(runs, families(), slower=slower)


def stale(shipped: dict[str, Any]) -> list[str]:
    """The entries of a table that are not what they would be today."""
    runs = recorded()
    # Not by open_run, which reads all rows too.
    environments = [
        json.loads((run / "environment.json").read_text(encoding="utf-8")) for run in runs
    ]
    measured = {environment["nvrtc"] for environment in environments}
    now = outline(table_of(runs, slower=SLOWER)) | {"nvrtc": ", ".join(sorted(measured))}
    shipped = outline(shipped)
    return [key for key in sorted({*now, *shipped}) if now.get(key) != shipped.get(key)]


def longer() -> list[float]:
    """How much longer each shape takes than with its winner, by recorded medians: a factor."""

    def times(**how: float) -> list[float]:
        gpus = table_of(recorded(), **how)["gpus"]
        rows = [
            (gpu["l2_bytes"], w["problem"], w["time_us"]) for gpu in gpus for w in gpu["winners"]
        ]
        return [time_us for _, _, time_us in sorted(rows)]

    return [now / won for now, won in zip(times(slower=SLOWER), times(), strict=True)]


def main(arguments: Sequence[str]) -> int:
    """Write the table and the archives, or compare the table."""
    if "--check" not in arguments:
        with tempfile.TemporaryDirectory() as place:
            made, old = Path(place) / "winners", json.loads(TABLE.read_text(encoding="utf-8"))
            table = table_of(recorded(), slower=SLOWER) | {"nvrtc": old["nvrtc"]}
            known = kept(old, table)
            if not without_compiler(made, table, known):
                if known and old["nvrtc"] != (here := "{}.{}".format(*nvrtc_version())):
                    sys.exit(f"needs NVRTC {old['nvrtc']} as what is shipped, and here is {here}")
                # What comes with attnsweep serves 16 bits.
                of_16_bits = {
                    name: discover()[name] for name in DECLARED if name not in WITHOUT_RIVAL
                }
                done = export(recorded(), made, of_16_bits, slower=SLOWER, known=known)
                made = done.directory / done.name
            write(made)
        kernels = len(json.loads(TABLE.read_text(encoding="utf-8"))["kernels"])
        size = sum(path.stat().st_size for path in CUBINS.iterdir()) / 2**10
        print(f"{kernels} kernels, {size:.0f} KiB of cubins")
        page = PAGE.read_text(encoding="utf-8")
        told = TOLD.sub(rf"{kernels}\g<1>{size:.0f}\g<2>", page)
        PAGE.write_text(told, encoding="utf-8")
        factors = longer()
        mean, most = statistics.geometric_mean(factors), max(factors)
        told = (
            f"{mean:.4f} times as long as with their winners on average, {most:.2f} times at most"
        )
        print(f"{len(factors)} shapes take {told}")
    found = stale(json.loads(TABLE.read_text(encoding="utf-8")))
    if found == ["nvrtc"]:
        print(f"{TABLE.name}: compile with the NVRTC that the runs were measured with")
    elif found:
        print(f"{TABLE.name} is stale ({', '.join(found)}): run python scripts/winners.py")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
