"""Judge callables that are right, many times: the judge may refuse none of them.

Usage: python benchmarks/right_callables.py [FILE.json] [--runs 17] [--budget-s 3000]
[--again NAME ...] [--alike 1]. Ten ways to compute attention are candidates of a spec of three
shapes in fp16 and bf16, beside torch_flash. A run judges each of them once on each problem, as
`attnsweep run` does, so 17 runs judge each of them 102 times; none begins after the budget. The
file counts the statuses of the rows, of which `ok` and `noisy` are right, and has the reason of
each other one, times, and ratios to torch_flash; a second call adds to it, on such a card with the
same driver and packages. --again judges only the callables that it names and replaces their rows.
--alike N puts N copies of each into a run: one run of 17 copies judges each 102 times too, and
takes less time.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from types import ModuleType
from typing import Any

from setting import console, options, spec_of, write

from attnsweep import Environment, Problem, Trial, run

# A spec has a family of ours.
CONFIG = (
    "BLOCK_M: 64, BLOCK_N: 64, NUM_WARPS: 4, KEY_GROUPS: 1, NUM_STAGES: 2, SWIZZLE: 1, "
    "Q_IN_REGISTERS: 1, BLOCK_ORDER: 0"
)
SPEC = f"""
name: right_callables
arch: sm_90a
problems:
  - {{batch: 2, heads: 16, seqlen: 1024, head_dim: 64, dtype: [fp16, bf16]}}
  - {{batch: 4, heads: 16, seqlen: 2048, head_dim: 128, causal: true, dtype: [fp16, bf16]}}
  - {{batch: 1, heads: 32, seqlen: 4096, head_dim: 128, causal: true, dtype: [fp16, bf16]}}
kernels: {{flash_fwd_mma: {{{CONFIG}}}}}
baselines: [torch_flash]
measure: {{rounds: 9, cold: false, eager: false}}
"""
TUTORIAL = Path(__file__).parent.parent / "docs" / "tutorials" / "judge.md"


def _sdpa(backend: str) -> Any:
    def call(q: Any, k: Any, v: Any, *, problem: Problem) -> Any:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        with sdpa_kernel(getattr(SDPBackend, backend)):
            return scaled_dot_product_attention(q, k, v, is_causal=problem.causal)

    return call


flash, cudnn = _sdpa("FLASH_ATTENTION"), _sdpa("CUDNN_ATTENTION")
efficient, math = _sdpa("EFFICIENT_ATTENTION"), _sdpa("MATH")
# A process loads this file once for each callable. Each load would compile its own mask, and after
# eight of them the compiler gives up.
KEPT = vars(sys.modules.setdefault("kept_for_right_callables", ModuleType("kept")))


def flex(q: Any, k: Any, v: Any, *, problem: Problem) -> Any:
    """FlexAttention, compiled at the first call."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if "flex" not in KEPT:
        KEPT["flex"] = torch.compile(flex_attention)
    if problem.causal and problem.label not in KEPT:
        sizes = (None, None, problem.seqlen_q, problem.seqlen_k)
        mask = create_block_mask(lambda _b, _h, i, j: i >= j, *sizes, device="cuda")
        KEPT[problem.label] = mask
    return KEPT["flex"](q, k, v, block_mask=KEPT.get(problem.label))


def naive(q: Any, k: Any, v: Any, *, problem: Problem) -> Any:
    """Three operators in float32."""
    import torch

    scores = (q.float() @ k.float().mT) * q.shape[-1] ** -0.5
    if problem.causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1) @ v.float()).to(q.dtype)


def compiled(q: Any, k: Any, v: Any, *, problem: Problem) -> Any:
    """`naive`, compiled at the first call."""
    import torch

    return KEPT.setdefault("naive", torch.compile(naive))(q, k, v, problem=problem)


def flash_3(q: Any, k: Any, v: Any, *, problem: Problem, out: Any) -> None:
    """FlashAttention-3, with (batch, seqlen, heads, head_dim)."""
    made = _flash_3().flash_attn_func(q, k, v, causal=problem.causal)
    out.copy_(made[0] if isinstance(made, tuple) else made)


def _flash_3() -> Any:
    wanted = ("flash_attn_interface", "fa3_fwd_interface")
    found = (name for name in wanted if importlib.util.find_spec(name))
    return importlib.import_module(next(found, wanted[0]))


def _by_flash_3(problem: Problem) -> bool | str:
    in_bf16 = _flash_3().__name__ != "fa3_fwd_interface" or problem.dtype == "bf16"
    return in_bf16 or "fa3-fwd is built for bf16 alone"


flash_3.supports = _by_flash_3  # type: ignore[attr-defined]


def ours(q: Any, k: Any, v: Any, *, problem: Problem) -> Any:
    """The attention that comes with attnsweep."""
    from attnsweep import attention

    return attention(q, k, v, is_causal=problem.causal)


def __getattr__(name: str) -> Any:
    """`flex_3`: one more of `flex`, by the same code."""
    of, _, number = name.rpartition("_")
    if of in OWN and number.isdigit():
        return globals()[of]
    raise AttributeError(name)


OWN = ("flash", "cudnn", "efficient", "math", "flex", "naive", "compiled", "flash_3", "ours")


def names(place: Path) -> dict[str, str]:
    """How each is asked for; the Triton kernel is the tutorial's, written to a file."""
    blocks = re.findall(r"```python\n(.+?)```", TUTORIAL.read_text(), re.DOTALL)
    (place / "triton_kernel.py").write_text(blocks[0])
    found = {own: f"{__file__}:{own}" for own in OWN}
    found["flash_3"] += "?layout=bshd"
    return found | {"triton": f"{place}/triton_kernel.py:forward"}


def number_of(call: str, number: int) -> str:
    """How one more of a callable is asked for: `flex_3`, before its options; 0: as it is."""
    place, _, options = call.partition("?")
    return call if not number else f"{place}_{number}" + (f"?{options}" if options else "")


def add(case: dict[str, Any], name: str, row: Trial, base: Trial) -> None:
    """Add a row to those of its callable and problem. base: torch_flash's beside it.

    name: the callable's, in place of the path by which rows name it.
    """
    us, base_us = (each.time_us.median if each.time_us else None for each in (row, base))
    status = row.status.value
    case["statuses"][status] = case["statuses"].get(status, 0) + 1
    if status not in ("ok", "noisy"):
        case["not_right"].append((row.detail or "").replace(row.provider, name))
    case["times_us"].append(us)
    case["x_base"].append(base_us / us if base_us and us else None)
    case["calls_judged"].append(row.accuracy.calls if row.accuracy else None)


def cases_of(found: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """The cases of a file by callable and problem; a new one is empty."""
    lists = ("not_right", "times_us", "x_base", "calls_judged")
    cases = defaultdict[tuple[str, str], dict[str, Any]](lambda: dict({n: [] for n in lists}, statuses={}))
    for case in found:
        cases[case.pop("callable"), case.pop("problem")] = case
    return cases


def same(earlier: dict[str, Any], here: Environment, again: bool) -> bool:
    """Whether a file's rows are of such a card, with the same driver and packages.

    again: some may be missing now, which what is judged anew does not need.
    """
    now = here.model_dump(mode="json")
    alike = all(earlier.get(name) == now[name] for name in ("gpu", "driver"))
    packages, known = now["packages"].items(), earlier["packages"].items()
    return alike and (packages <= known if again else packages == known)


def main() -> None:
    """Judge all of them, run by run, until the budget is spent."""
    parser = options(__doc__, "right_callables.json")
    parser.add_argument("--runs", type=int, default=17)
    parser.add_argument("--budget-s", type=float, default=3000.0, help="begin nothing after that")
    parser.add_argument("--again", nargs="+", choices=(*OWN, "triton"), default=[], help="replace their rows")
    parser.add_argument("--alike", type=int, default=1, help="copies of each in a run")
    arguments = parser.parse_args()
    earlier: dict[str, Any] = {"runs": 0, "cases": []}
    if arguments.file.exists():
        earlier = json.loads(arguments.file.read_text())
    again, alike, begun, made = arguments.again, arguments.alike, time.monotonic(), 0
    cases = cases_of([case for case in earlier["cases"] if case["callable"] not in again])
    with tempfile.TemporaryDirectory() as place:
        asked = [
            (name, number_of(call, number))
            for name, call in names(Path(place)).items()
            if not again or name in again
            for number in range(alike)
        ]
        spec = spec_of(f"{SPEC}candidates: {[call for _, call in asked]}\n", Path(place))
        while made < arguments.runs and time.monotonic() - begun < arguments.budget_s:
            made += 1
            done = run(spec, results=Path(place) / "results", fresh=True).run
            if "environment" in earlier and not same(earlier["environment"], done.environment, bool(again)):
                raise SystemExit(f"{arguments.file}: is of another card, driver or packages: name another file")
            of = {(trial.provider, trial.problem): trial for trial in done.trials}
            problems = dict.fromkeys(trial.problem for trial in done.trials)
            for (name, call), problem in itertools.product(asked, problems):
                add(cases[name, problem.label], name, of[call, problem], of["torch_flash", problem])
            count = sum((Counter(case["statuses"]) for case in cases.values()), Counter[str]())
            console.print(f"run {made}: {dict(count)}")
            found = [{"callable": name, "problem": label} | case for (name, label), case in cases.items()]
            runs = max(earlier["runs"], made * alike) if again else earlier["runs"] + made * alike
            result = {"runs": runs, "all": dict(count), "cases": found}
            result |= {"again": earlier["again"]} if "again" in earlier else {}
            measured = done.environment
            if again:
                result["again"] = {"callables": again, "date": measured.date}
                measured = Environment.model_validate(earlier.get("environment", measured))
            write(arguments.file, measured, result)


if __name__ == "__main__":
    main()
