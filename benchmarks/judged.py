"""Have the judge look at callables that are right, and at attacks: is any of them called wrongly?

right: the ten of right_callables.py are candidates of a spec of three shapes in fp16 and bf16, beside
torch_flash. A run judges each of them once on each problem, as `attnsweep run` does, so 17 runs
judge each of them 102 times. The file counts the statuses of the rows, of which `ok` and `noisy`
are right, and has the reason of each other one.

attacks: those of tests/attacks that run on a card, and right ones next to them. What reads its
inputs on the host, or would write beside them by their address, runs on the CPU alone, where CI
judges all of them with and without their defence. So do two that may be right on a card: what
raises in its third call, which is a graph's there, so that no graph holds its calls; and what has
one answer for all cold copies, which there are none of where one call outlasts a replay.

strict: PyTorch's flash with and without `--strict`: seconds, the ratio to torch_flash, and the time
of a call by events and by the judge's clock.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from right_callables import names
from setting import console, described, options, spec_of, write, write_rows

from attnsweep import Problem, Run, judge, run

# A spec has a family of ours.
SPEC = """
name: judged
arch: sm_90a
problems: [{problems}]
kernels:
  flash_fwd_mma: {{BLOCK_M: 64, BLOCK_N: 64, NUM_WARPS: 4, KEY_GROUPS: 1, NUM_STAGES: 2, SWIZZLE: 1,
                  Q_IN_REGISTERS: 1, BLOCK_ORDER: 0}}
baselines: [torch_flash]
measure: {{{measure}, eager: false}}
candidates: {calls}
"""
PROBLEMS = """
  {batch: 2, heads: 16, seqlen: 1024, head_dim: 64, dtype: [fp16, bf16]},
  {batch: 4, heads: 16, seqlen: 2048, head_dim: 128, causal: true, dtype: [fp16, bf16]},
  {batch: 1, heads: 32, seqlen: 4096, head_dim: 128, causal: true, dtype: [fp16, bf16]}"""
SMALL = "{batch: 2, heads: 4, heads_kv: 2, seqlen: 256, head_dim: 64, dtype: bf16}"
STRICT = (
    "2,16,1024,64 bf16",
    "16,16,512,64 bf16 causal",
    "16,12,577,64 fp16",
    "4,16,4096,64 bf16 causal",
    "8,16,729,72 bf16",
    "4,16,2048,128 bf16 causal",
    "8,16,1024,128 fp16",
    "4,32,4096,128 bf16 causal",
    "1,16,8192,128 fp16",
    "2,16,2048,256 bf16 causal",
)
TESTS = Path(__file__).parent.parent / "tests"
RIGHT = ("honest", "with_lse", "waits")
ATTACKS = (
    *("by_pointer", "by_fingerprint", "two_answers", "knows_the_check", "smoothed"),
    *("zeros", "mean_of_values", "swapped_heads", "half_of_the_rows", "one_head_unwritten"),
    *("window", "low_rank", "low_precision", "coarse", "gain", "without_scale"),
    *("without_a_maximum", "sloppy_where_it_is_easy", "changes_inputs", "returns_an_input"),
    *("one_buffer", "two_buffers", "idles", "idles_once", "later", "lazy", "a_parameter"),
    *("sets_flags", "sets_flags_later", "sets_the_default", "with_log2", "with_lse_of_before"),
    *("writes_less", "returns_another", "no_tensor", "three_outputs", "two_shapes", "another_dtype"),
    *("leaves", "interrupts", "out_of_memory", "wants_more"),
)
GOOD = ("ok", "noisy")


def swept(calls: Iterable[str], problems: str, measure: str, place: Path) -> Run:
    """The run of a sweep of these candidates."""
    spec = spec_of(SPEC.format(problems=problems, measure=measure, calls=[*calls]), place)
    return run(spec, results=place / "results", fresh=True).run


def right(file: Path | None, place: Path, runs: int) -> None:
    """Judge the right ones, run by run; the file has what was judged so far."""
    asked = {call: name for name, call in names(place).items()}
    cases: dict[tuple[str, str], Any] = defaultdict(lambda: {"statuses": Counter(), "not_right": []})
    for number in range(1, runs + 1):
        done = swept(asked, PROBLEMS, "rounds: 9, cold: false", place)
        for trial in done.trials:
            if (name := asked.get(trial.provider)) is None:
                continue
            case = cases[name, trial.problem.label]
            case["statuses"][trial.status.value] += 1
            if trial.status.value not in GOOD:  # in place of the path by which rows name it
                case["not_right"].append((trial.detail or "").replace(trial.provider, name))
        count = dict(sum((case["statuses"] for case in cases.values()), Counter()))
        console.print(f"run {number}: {count}")
        found = [{"callable": of, "problem": on} | case for (of, on), case in cases.items()]
        write(file, done.environment, {"runs": number, "all": count, "cases": found})


def attacks(file: Path | None, place: Path) -> None:
    """Judge the attacks in one sweep. Raises SystemExit if any, or a right one, is judged wrongly."""
    # The processes that call them import them too.
    os.environ["PYTHONPATH"] = os.pathsep.join((str(TESTS), os.environ.get("PYTHONPATH", "")))
    sys.path.insert(0, str(TESTS))
    asked = {f"attacks.kernels:{name}": name for name in (*RIGHT, *ATTACKS)}
    done = swept(asked, SMALL, "rounds: 5", place)
    rows = [
        {
            "callable": name,
            "right": name in RIGHT,
            "confirmed": trial.status.value in GOOD,
            "status": trial.status.value,
            "reason": (trial.detail or "").replace(trial.provider, name),
            "issued": trial.issued,
        }
        for trial in done.trials
        if (name := asked.get(trial.provider)) is not None
    ]
    unlike = [row["callable"] for row in rows if row["confirmed"] is not row["right"]]
    facts = {"problem": done.trials[0].problem.label, "attacks": len(ATTACKS), "judged wrongly": unlike}
    console.print(facts)
    write(file, done.environment, facts | {"rows": rows})
    missing = {*asked.values()} - {row["callable"] for row in rows}
    if unlike or missing:
        raise SystemExit(f"judged wrongly: {unlike}; not judged: {sorted(missing)}")


def strict(call: str) -> Iterator[dict[str, Any]]:
    """A callable judged in both ways on each shape."""
    for shape in STRICT:
        problem = Problem.parse(shape)
        found: dict[str, Any] = {"callable": "flash", "problem": problem.label}
        for mode in ("friendly", "strict"):
            begun = time.monotonic()
            of = judge(call, problem, against=("torch_flash",), strict=mode == "strict", rounds=9)
            found[mode] = {"verdict": of.verdict, "seconds": round(time.monotonic() - begun, 1)}
            found[mode] |= {"time_us": of.time_us, "trusted_us": of.trusted_us, "x_base": of.x_base}
        yield found


def main() -> None:
    """Judge what is asked for, print, and write the file if one is named."""
    parser = options(__doc__, "what", ("right", "attacks", "strict"))
    parser.add_argument("--runs", type=int, default=17, help="of the right ones")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        if given.what == "right":
            right(given.file, place, given.runs)
        elif given.what == "attacks":
            attacks(given.file, place)
        else:
            write_rows(given.file, described(), strict(names(place)["flash"]), "cases")


if __name__ == "__main__":
    main()
