"""Write table.json and cubins/ in attnsweep/serve/runtime: the winners behind attnsweep.attention.

Usage: python scripts/winners.py [--check]. Needs the NVRTC of the recorded runs, since the machine
code of another is not what they timed. With --check it writes nothing, needs no NVRTC, and returns
1 if the table is not what results/ gives, or if the kernels' text has changed since.
"""

from __future__ import annotations

import io
import json
import lzma
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attnsweep import exported_table, find_runs
from attnsweep.family.discover import discover
from attnsweep.serve.export import export, table_text
from attnsweep.serve.export_code import BACKWARD_FAMILY, FAMILY

ROOT = Path(__file__).parent.parent
PLACE = ROOT / "attnsweep" / "serve" / "runtime"
TABLE, CUBINS = PLACE / "table.json", PLACE / "cubins"
# Cubins of an archive. A first call unpacks one or two, so they must not be large. 936 kernels
# were 3086 KiB in groups of 36 cubins, 2551 in groups of 108, 2201 in groups of 288.
GROUP = 124
# Runs that judge the shipped table, and so tune nothing in it.
JUDGES = ("held_out_decode", "held_out_decode_later")


def recorded() -> list[Path]:
    """The runs that were measured, but for JUDGES; a replay repeats one of them."""
    runs = find_runs(ROOT / "results")
    return [run for run in runs if run.parent.name != "replay" and run.name not in JUDGES]


def grouped(table: Mapping[str, Any]) -> dict[str, list[str]]:
    """The cubins of each archive: alike ones next to each other, since they share most bytes."""

    def likeness(kernel: Mapping[str, Any]) -> tuple[object, ...]:
        config = [int(number) for number in re.findall(r"\d+", table["configs"][kernel["config"]])]
        return kernel["head_dim"], config, kernel["mask"], kernel["dtype"]

    codes = (
        f"{kernel['stages'][stage][form][:16]}.cubin"
        for kernel in sorted(table["kernels"], key=likeness)
        for form in (0, 1)  # without and with the log-sum-exp; a backward has one
        for stage in sorted(kernel["stages"])
        if form < len(kernel["stages"][stage])
    )
    files = list(dict.fromkeys(codes))  # two kernels may have the same code of a stage
    groups = [files[first : first + GROUP] for first in range(0, len(files), GROUP)]
    return {f"{number:02}.zip.xz": group for number, group in enumerate(groups)}


def packed(cubins: Path, files: Sequence[str]) -> bytes:
    """Cubins as one compressed file; equal cubins give equal bytes."""
    together = io.BytesIO()
    with zipfile.ZipFile(together, "w", zipfile.ZIP_STORED) as file:
        for name in files:
            file.writestr(zipfile.ZipInfo(name), (cubins / name).read_bytes())
    return lzma.compress(together.getvalue(), preset=9 | lzma.PRESET_EXTREME)


def write(made: Path) -> None:
    """Put the table and the cubins of an exported package in their place."""
    table = json.loads((made / TABLE.name).read_text())
    table["archives"] = grouped(table)
    if CUBINS.exists():
        shutil.rmtree(CUBINS)
    CUBINS.mkdir()
    for archive, files in table["archives"].items():
        (CUBINS / archive).write_bytes(packed(made / CUBINS.name, files))
    TABLE.write_text(table_text(table))


def outline(table: dict[str, Any]) -> dict[str, Any]:
    """What of a table follows from results/ and the kernels' text, whoever compiles."""
    kernels = [{**kernel, "stages": {}} for kernel in table["kernels"]]
    return {**table, "kernels": kernels, "attnsweep": "", "archives": {}}


def stale(shipped: dict[str, Any]) -> list[str]:
    """The entries of a table that are not what they would be today."""
    runs = recorded()
    # Not by open_run, which reads all rows too.
    environments = [json.loads((run / "environment.json").read_text()) for run in runs]
    measured = {environment["nvrtc"] for environment in environments}
    now = outline(exported_table(runs)) | {"nvrtc": ", ".join(sorted(measured))}
    shipped = outline(shipped)
    return [key for key in sorted({*now, *shipped}) if now.get(key) != shipped.get(key)]


def main(arguments: Sequence[str]) -> int:
    """Write the table and the archives, or compare the table."""
    if "--check" not in arguments:
        with tempfile.TemporaryDirectory() as place:
            # What comes with attnsweep serves 16 bits.
            of_16_bits = {name: discover()[name] for name in (FAMILY, BACKWARD_FAMILY)}
            done = export(recorded(), Path(place) / "winners", of_16_bits)
            write(done.directory / done.name)
        size = sum(path.stat().st_size for path in CUBINS.iterdir()) / 2**10
        print(f"{done.winners} winners, {done.kernels} kernels, {size:.0f} KiB of cubins")
    found = stale(json.loads(TABLE.read_text()))
    if found == ["nvrtc"]:
        print(f"{TABLE.name}: compile with the NVRTC that the runs were measured with")
    elif found:
        print(f"{TABLE.name} is stale ({', '.join(found)}): run python scripts/winners.py")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
