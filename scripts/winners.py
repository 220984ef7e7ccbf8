"""Write attnsweep/use/runtime/table.json and cubins.zip.xz: the winners behind attnsweep.attention.

Usage: python scripts/winners.py [--check]. Needs NVRTC. With --check it writes nothing, needs no
NVRTC, and returns 1 if the table is not what results/ gives, or if the kernels' text has changed
since they were compiled.
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


def main() -> int:
    """Write both files, or compare the table."""
    runs = find_runs(ROOT / "results")
    if "--check" in sys.argv[1:]:
        now, shipped = outline(exported_table(runs)), outline(json.loads(TABLE.read_text()))
        stale = [key for key in sorted({*now, *shipped}) if now.get(key) != shipped.get(key)]
        if stale:
            print(f"{TABLE.name} is stale ({', '.join(stale)}): run python scripts/winners.py")
        return 1 if stale else 0
    with tempfile.TemporaryDirectory() as place:
        done = export(runs, Path(place) / "winners")
        made = done.directory / done.name
        TABLE.write_bytes((made / TABLE.name).read_bytes())
        PACKED.write_bytes(packed(made / "cubins"))
    size = PACKED.stat().st_size / 2**10
    print(f"{done.winners} winners, {done.kernels} kernels, {size:.0f} KiB of cubins")
    return 0


if __name__ == "__main__":
    sys.exit(main())
