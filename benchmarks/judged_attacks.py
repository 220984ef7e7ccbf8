"""Judge the attacks of tests/attacks that run on a card: the judge may confirm none of them.

Usage: python benchmarks/judged_attacks.py [FILE.json]. Needs a GPU and PyTorch. Each attack is a candidate
of one small problem, as in `attnsweep run`; so are callables that are right, which must be
confirmed. For each the file has the status of its row, which of `ok` and `noisy` means confirmed,
and the reason. What reads its inputs on the host, or would write beside them by their address,
runs on the CPU alone, where CI judges all of them with and without their defence. So do two that
may be right on a card: what raises in its third call, which is a graph's there, so that no graph
holds its calls; and what has one answer for all cold copies, which there are none of where one call
outlasts a replay.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from setting import console, options, spec_of, write

from attnsweep import run

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
SPEC = """
name: attacks
arch: sm_90a
problems: [{batch: 2, heads: 4, heads_kv: 2, seqlen: 256, head_dim: 64, dtype: bf16}]
kernels:
  flash_fwd_mma:
    {BLOCK_M: 64, BLOCK_N: 64, NUM_WARPS: 4, KEY_GROUPS: 1, NUM_STAGES: 2, SWIZZLE: 1, Q_IN_REGISTERS: 1,
     BLOCK_ORDER: 0}
baselines: [torch_flash]
measure: {rounds: 5, eager: false}
"""


def main() -> None:
    """Judge them in one sweep, print, and write."""
    arguments = options(__doc__, "attacks.json").parse_args()
    # The processes that call them import them too.
    os.environ["PYTHONPATH"] = os.pathsep.join((str(TESTS), os.environ.get("PYTHONPATH", "")))
    sys.path.insert(0, str(TESTS))
    asked = {f"attacks.kernels:{name}": name for name in (*RIGHT, *ATTACKS)}
    with tempfile.TemporaryDirectory() as place:
        spec = spec_of(f"{SPEC}candidates: {[*asked]}\n", Path(place))
        done = run(spec, results=Path(place) / "results", fresh=True).run
    rows: list[dict[str, Any]] = []
    for trial in done.trials:
        if (name := asked.get(trial.provider)) is not None:
            said = (trial.detail or "").replace(trial.provider, name)
            confirmed = trial.status.value in ("ok", "noisy")
            rows.append(
                {
                    "callable": name,
                    "right": name in RIGHT,
                    "confirmed": confirmed,
                    "status": trial.status.value,
                    "reason": said,
                    "issued": trial.issued,
                }
            )
            console.print(rows[-1])
    unlike = [row["callable"] for row in rows if row["confirmed"] is not row["right"]]
    facts = {"problem": done.trials[0].problem.label, "attacks": len(ATTACKS), "judged wrongly": unlike}
    write(arguments.file, done.environment, facts | {"rows": rows})
    missing = [name for name in asked.values() if name not in {row["callable"] for row in rows}]
    if unlike or missing:
        raise SystemExit(f"judged wrongly: {unlike}; not judged: {missing}")


if __name__ == "__main__":
    main()
