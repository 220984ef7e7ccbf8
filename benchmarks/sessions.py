"""Count what `check --recorded` says of recordings of the same code in this repository's history.

It needs no GPU, but git and its history. Every version of every recorded run is read. Two
recordings of a problem on the same GPU whose winners are the same config are a pair; nothing should
have changed, but for the session. Each pair is compared as it is, and with the newer winner slowed
by a known share.
"""

from __future__ import annotations

import gzip
import itertools
import math
import statistics
import subprocess
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from setting import RESULTS, console, options, write

from attnsweep import Run, Trial, compare_runs, open_run, rank

SHARES = (0.0, 0.02, 0.03, 0.05, 0.08)


def git(*arguments: str) -> bytes:
    """What git prints."""
    command = ["git", *arguments]
    return subprocess.run(command, cwd=RESULTS.parent, capture_output=True, check=True).stdout


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
            rows = gzip.decompress(rows) if path.endswith(".gz") else rows
            (run / Path(path).name.removesuffix(".gz")).write_bytes(rows)
            environment = git("show", f"{commit}:{folder}/environment.json")
            (run / "environment.json").write_bytes(environment)
            yield open_run(run)


def pairs(runs: Iterable[Run]) -> list[tuple[Run, Run, Trial]]:
    """Two recordings of one winner on one GPU by one protocol, in order, and its newer row.

    A recording is the rows of a problem whose winner was timed in rounds.
    """
    found: dict[object, dict[object, tuple[Trial, Run]]] = defaultdict(dict)
    for run in (run for run in runs if run.environment):
        frame = rank(run)
        for winner in frame.loc[frame["winner"], "trial"]:
            if not winner.time_us or not winner.time_us.rounds:
                continue
            rows = replace(run, trials=[t for t in run.trials if t.problem == winner.problem])
            card = run.environment.gpu, run.environment.protocol
            what = *card, winner.problem, winner.kernel, str(winner.config)
            found[what][(*winner.time_us.rounds,)] = (winner, rows)
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
    verdicts: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        found = pairs(versions(Path(place)))
        for share in SHARES:
            told = [compare_runs(old, slower(new, winner, share)).findings[0] for old, new, winner in found]
            verdicts[f"{100 * share:g} %"] = dict(Counter(each.verdict.value for each in told))
            if not share:
                sizes = sorted(abs(100 * math.log(each.ratio)) for each in told if each.ratio is not None)
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
