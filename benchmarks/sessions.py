"""Count what `check --recorded` says of recordings of the same code in this repository's history.

Usage: python benchmarks/sessions.py [FILE.json]. It needs no GPU, but git and its history.

Every version of every recorded run is read. Two recordings of a problem on the same GPU whose
winners are the same config are a pair; nothing should have changed, but for the session. Each pair
is compared as it is, and with the newer winner slowed by a known share.
"""

from __future__ import annotations

import gzip
import itertools
import math
import statistics
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from setting import console, options, write

from attnsweep import Run, Trial, compare_runs, open_run, rank

ROOT = Path(__file__).parent.parent
SHARES = (0.0, 0.02, 0.03, 0.05, 0.08)


def git(*arguments: str) -> bytes:
    """What git prints."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=True).stdout


def versions(place: Path) -> Iterator[Run]:
    """Every version of every recorded run that was committed, each once."""
    seen = set()
    for commit in git("log", "--format=%H", "--", "results").decode().split():
        for line in git("ls-tree", "-r", commit, "results").decode().splitlines():
            facts, path = line.split("\t")
            blob, folder = facts.split()[2], str(Path(path).parent)
            if not Path(path).name.startswith("trials.jsonl") or blob in seen:
                continue
            seen.add(blob)
            run = place / blob
            run.mkdir()
            rows = git("cat-file", "blob", blob)  # once packed by gzip, which runs are no more
            packed = path.endswith(".gz")
            (run / Path(path).name.removesuffix(".gz")).write_bytes(gzip.decompress(rows) if packed else rows)
            environment = f"{commit}:{folder}/environment.json"
            (run / "environment.json").write_bytes(git("show", environment))
            yield open_run(run)


def recordings(run: Run) -> Iterator[tuple[Trial, Run]]:
    """The winner of each problem, if it was timed in rounds, and the rows of that problem."""
    frame = rank(run)
    for winner in frame.loc[frame["winner"], "trial"]:
        if winner.time_us is not None and winner.time_us.rounds:
            trials = [trial for trial in run.trials if trial.problem == winner.problem]
            yield winner, replace(run, trials=trials)


def pairs(runs: list[Run]) -> list[tuple[Run, Run, Trial]]:
    """Two recordings of one winner on one GPU by one protocol, in order, and its newer row."""
    found: dict[object, dict[object, tuple[Trial, Run]]] = {}
    for run in runs:
        for winner, rows in recordings(run) if run.environment else ():
            what = (run.environment.gpu, run.environment.protocol, winner.problem, winner.kernel, str(winner.config))
            found.setdefault(what, {})[(*winner.time_us.rounds,)] = (winner, rows)
    dated = (sorted(same.values(), key=lambda one: one[1].environment.date) for same in found.values())
    return [(a[1], b[1], b[0]) for same in dated for a, b in itertools.combinations(same, 2)]


def slower(run: Run, winner: Trial, share: float) -> Run:
    """The run with its winner slower by this share."""
    time, by = winner.time_us, 1 + share
    times = {name: getattr(time, name) * by for name in ("median", "low", "high")}
    times["rounds"] = [us * by for us in time.rounds]
    # Other candidates would win then: they are left out.
    kept = [t for t in run.trials if t.provider != winner.provider]
    return replace(run, trials=[winner.with_(time_us=time.model_copy(update=times)), *kept])


def main() -> None:
    """Compare every pair, print the counts, and write them if a file is named."""
    file = options(__doc__).parse_args().file
    with tempfile.TemporaryDirectory() as place:
        found = pairs(list(versions(Path(place))))
        moved: list[float] = []
        verdicts: dict[str, Any] = {}
        for share in SHARES:
            counts: Counter[str] = Counter()
            for old, new, winner in found:
                (finding,) = compare_runs(old, slower(new, winner, share)).findings
                counts[finding.verdict.value] += 1
                if not share and finding.ratio is not None:
                    moved.append(100 * math.log(finding.ratio))
            verdicts[f"{100 * share:g} %"] = dict(counts)
            console.print(f"slower by {100 * share:g} %: {dict(counts)}")
    sizes = sorted(map(abs, moved))
    near = [size for size in sizes if size < 1.5]
    facts = {
        "pairs": len(found),
        "moved_percent": [round(size, 2) for size in sizes],
        "moved_median_percent": round(statistics.median(sizes), 2),
        "below_1.5_percent": len(near),
        "rms_of_those_percent": round(math.sqrt(sum(x * x for x in near) / len(near)), 2),
        "verdicts": verdicts,
    }
    console.print_json(data=facts)
    write(file, None, facts)


if __name__ == "__main__":
    main()
