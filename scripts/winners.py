"""Write attnsweep/use/runtime/table.json and cubins.zip.xz: the winners behind attnsweep.attention.

Usage: python scripts/winners.py [--check]. Needs the NVRTC of the recorded runs, since the machine
code of another is not what they timed. With --check it writes nothing, needs no NVRTC, and returns
1 if the table is not what results/ gives, or if the kernels' text has changed since.
"""

from __future__ import annotations

import io
import json
import lzma
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from attnsweep import export, exported_table, find_runs

ROOT = Path(__file__).parent.parent
PLACE = ROOT / "attnsweep" / "use" / "runtime"
TABLE, PACKED = PLACE / "table.json", PLACE / "cubins.zip.xz"


def recorded() -> list[Path]:
    """The runs that were measured; a replay repeats one of them."""
    return [run for run in find_runs(ROOT / "results") if run.parent.name != "replay"]


def packed(cubins: Path) -> bytes:
    """All cubins as one compressed file; equal cubins give equal bytes."""
    together = io.BytesIO()
    with zipfile.ZipFile(together, "w", zipfile.ZIP_STORED) as file:
        for path in sorted(cubins.glob("*.cubin")):
            file.writestr(zipfile.ZipInfo(path.name), path.read_bytes())
    return lzma.compress(together.getvalue(), preset=9 | lzma.PRESET_EXTREME)


def outline(table: dict[str, Any]) -> dict[str, Any]:
    """What of a table follows from results/ and the kernels' text, whoever compiles."""
    kernels = [{**kernel, "stages": []} for kernel in table["kernels"]]
    return {**table, "kernels": kernels, "attnsweep": ""}


def stale(shipped: dict[str, Any]) -> list[str]:
    """The entries of a table that are not what they would be today."""
    runs = recorded()
    # Not by open_run, which reads all rows too.
    environments = [json.loads((run / "environment.json").read_text()) for run in runs]
    measured = {environment["nvrtc"] for environment in environments}
    now = outline(exported_table(runs)) | {"nvrtc": ", ".join(sorted(measured))}
    shipped = outline(shipped)
    return [key for key in sorted({*now, *shipped}) if now.get(key) != shipped.get(key)]


def main() -> int:
    """Write both files, or compare the table."""
    if "--check" not in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as place:
            done = export(recorded(), Path(place) / "winners")
            made = done.directory / done.name
            TABLE.write_bytes((made / TABLE.name).read_bytes())
            PACKED.write_bytes(packed(made / "cubins"))
        size = PACKED.stat().st_size / 2**10
        print(f"{done.winners} winners, {done.kernels} kernels, {size:.0f} KiB of cubins")
    found = stale(json.loads(TABLE.read_text()))
    if found == ["nvrtc"]:
        print(f"{TABLE.name}: compile with the NVRTC that the runs were measured with")
    elif found:
        print(f"{TABLE.name} is stale ({', '.join(found)}): run python scripts/winners.py")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
