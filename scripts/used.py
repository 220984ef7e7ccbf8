"""Blocks about packages: what models, training and masks gained, what dispatch lost when not tuned.

All come from results/: models.json and training_models.json are what benchmarks/models.py wrote,
training.json and masks_served.json what training.py and masks.py beside it did, and the runs
whose names begin with `held_out` are of shapes on which benchmarks/dispatch.py judges a package of
the other runs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tests" / "support"))

import dispatch_judged  # noqa: E402

CARD = "results/h100-80gb-hbm3"
_BOTH = (
    *("flash_training", "flash_short", "batched", "flash_dims", "flash_long"),
    *("between", "between_short"),
)
TUNED = {
    "H100": [f"h100-80gb-hbm3/{name}" for name in ("h100", *_BOTH)],
    "H200": [f"h200/{name}" for name in ("h200", *_BOTH)],
}
"""The runs of each card that others next to them judge."""
_DECODING = (
    *("decode", "decode_models", "decode_heads", "decode_queries"),
    *("held_out_decode", "held_out_decode_later"),
)
JUDGES = {
    "held_out": (),
    "held_out_later": (),
    "held_out_later, by held_out too": ("held_out",),
    "held_out_decode_last, by decoding too": _DECODING,
    "held_out_few, by decoding too": (*_DECODING, "held_out_decode_last", "decode_dims"),
    "held_out_dims, by head_dims too": ("head_dims",),
    "held_out_value_dims, by value_dims too": ("value_dims",),
    "held_out_backward, by backward, its dims and short too": (
        *("backward", "backward_dims", "backward_short"),
    ),
}
"""What judges a package of TUNED, and of more runs."""
NAMES = {"llama": "Llama", "qwen": "Qwen", "diffusion": "diffusion-like blocks"}
MODES = {"eager": "eager", "compiled": "compiled", "graph": "CUDA graph"}
STEPS = ("eager", "compiled")
NOT_RECORDED = "Not recorded yet.\n"


_FAULTS = {
    "layouts": "gradients of several layouts in turn",
    "expanded_gradients": "expanded gradients after an ordinary one",
    "alignment": "tensors that begin 2 to 8 bytes off",
    "strides": "rows 65 to 72 elements apart, expanded tensors",
    "empty_rows": "masks that leave queries no key",
    "low_scores": "scores far below zero",
    "many": "65,536 items or heads",
    "expanded_queries": "expanded queries beside v of another head_dim",
    "masks_of_queries": "masks of one number for each query",
    "float32_masks": "a float32 mask beside bf16",
    "mask_alone": "a mask alone records gradients",
    "idle_slots": "packed sequences, some without a query",
}


def faults(path: Path = ROOT / "results/h200/pytorch_faults.json") -> str:
    """What PyTorch alone got wrong of the calls of each fault, and attnsweep of the same."""
    if not path.is_file():
        return NOT_RECORDED
    found = json.loads(path.read_text(encoding="utf-8"))
    facts = found["environment"]
    lines = [
        f"Wrong of the calls that were made; {facts['gpu']}, driver {facts['driver']}, PyTorch "
        f"{found['torch']}, {facts['date'][:10]}:",
        "",
        "| calls | PyTorch alone | `attention` | PyTorch's name, enabled |",
        "|---|---:|---:|---:|",
    ]
    rows = {(row["fault"], row["who"]): row for row in found["rows"]}
    for fault, what in _FAULTS.items():
        if (fault, "alone") not in rows:
            continue
        cells, every = (
            [],
            max(rows[fault, who]["calls"] for who in ("alone", "attention", "enabled")),
        )
        for who in ("alone", "attention", "enabled"):
            row = rows[fault, who]
            ended = ", then the process ended" if row["ended"] or row["calls"] < every else ""
            cells.append(f"{len(row['wrong'])} of {row['calls']}{ended}")
        lines.append(f"| {what} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def models(path: Path = ROOT / CARD / "models.json") -> str:
    """Prefill before and after for each model, tokens and mode; errors and greedy tokens."""
    if not path.is_file():
        return NOT_RECORDED
    found = json.loads(path.read_text(encoding="utf-8"))
    lines = ["| model | tokens | " + " | ".join(MODES.values()) + " | error, before | after |"]
    lines.append("|---|---:|" + "---:|" * (len(MODES) + 2))
    for name, model in found["models"].items():
        for tokens, prefill in model["prefill"].items():
            times = [_time(prefill.get(mode)) for mode in MODES]
            error = prefill.get("error", {})
            errors = [_percent(error.get(who)) for who in ("sdpa", "package")]
            lines.append(f"| {' | '.join([NAMES[name], tokens, *times, *errors])} |")
    lines += ["", _greedy(found["models"]), "", _origin(found)]
    return "\n".join(lines) + "\n"


def _time(found: Mapping[str, Any] | None) -> str:
    if not found or "failed" in found:
        return "–"
    return f"{found['before_ms']:.1f} → {found['after_ms']:.1f} ms, {found['gain']:.2f}×"


def _percent(error: float | None) -> str:
    return "–" if error is None else f"{error:.2%}"


def _greedy(found: Mapping[str, Any]) -> str:
    """How many greedy tokens of each model were as before."""
    each = ((NAMES[name], model.get("greedy", {})) for name, model in found.items())
    told = [(name, greedy) for name, greedy in each if "same_as_sdpa" in greedy]
    if not told:
        return "No greedy tokens were compared."
    said = "; ".join(
        f"{name} {greedy['same_as_sdpa']['package']} "
        f"(attention in float64: {greedy['same_as_sdpa']['float64']})"
        for name, greedy in told
    )
    return f"Greedy tokens as before, among the first {told[0][1]['tokens']}: {said}."


def _origin(found: Mapping[str, Any]) -> str:
    made = found["environment"]
    packages = ", ".join(f"{name} {version}" for name, version in made["packages"].items())
    card = f"{made.get('gpu', 'CPU')}, driver {made.get('driver', '–')}"
    return f"{card}, {packages}, {made['date'][:10]}."


def training(path: Path = ROOT / CARD / "training.json") -> str:
    """Training steps by PyTorch and with the package."""
    if not path.is_file():
        return NOT_RECORDED
    found = json.loads(path.read_text(encoding="utf-8"))
    lines = [
        "| shape, bf16 | code | eager, µs | × | compiled, µs | × |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for row in found["rows"]:
        cells = [row["shape"], f"`{row['code']}`"]
        for mode in STEPS:
            middle, low, high = row[mode]["ratio"]
            cells += [_change(row[mode]), f"{middle:.2f} ({low:.2f}–{high:.2f})"]
        lines.append(f"| {' | '.join(cells)} |")
    made = found["environment"]
    origin = f"{made['gpu']}, driver {made['driver']}, torch {found['torch']}, {made['date'][:10]}"
    lines += ["", f"{origin}; {found['rounds']} rounds."]
    return "\n".join(lines) + "\n"


def steps_served(path: Path = ROOT / CARD / "training.json") -> list[float]:
    """PyTorch's time of a training step over the package's, of calls that a kernel serves."""
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    served = [row for row in rows if row["code"] in ("tuned", "near")]
    return [row[mode]["ratio"][0] for row in served for mode in STEPS]


def model_steps(path: Path = ROOT / CARD / "training_models.json") -> dict[str, Any]:
    """The whole models whose training steps were timed, and by how much each became faster."""
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    gains = [row[mode]["gain"] for row in rows for mode in STEPS]
    return {"models": sorted({row["model"] for row in rows}), "gains": gains}


def training_models(path: Path = ROOT / CARD / "training_models.json") -> str:
    """Training steps of whole models by PyTorch and with the package, and how losses went apart."""
    found = json.loads(path.read_text(encoding="utf-8"))
    lines = [
        "| model | tokens | eager, ms | × | compiled, ms | × |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in found["rows"]:
        cells = [NAMES[row["model"]], f"{row['batch']} x {row['tokens']}"]
        for mode in STEPS:
            step = row[mode]
            cells += [f"{step['before_ms']:.1f} → {step['after_ms']:.1f}", f"{step['gain']:.3f}"]
        lines.append(f"| {' | '.join(cells)} |")
    errors = [
        f"{NAMES[row['model']]} {_percent(error['package'])} (PyTorch {_percent(error['sdpa'])})"
        for row in found["rows"]
        if (error := row.get("error"))
    ]
    curve = found["curve"]
    apart, last = curve["apart"], {who: every[-1] for who, every in curve["losses"].items()}
    lines += [
        "",
        f"Gradients of a step, off those with attention in float64: {'; '.join(errors)}. "
        f"Losses of {curve['steps']} steps of a small Llama at 4 x {curve['tokens']} tokens are "
        f"within {apart['package']} of PyTorch's (its flash backend: {apart['flash']}), "
        f"and end at {last['package']}, PyTorch's at {last['sdpa']}.",
        "",
        _origin(found),
    ]
    return "\n".join(lines) + "\n"


PAGED = {
    "decoding in bf16": (("paged", "paged_more", "paged_rows"), "flash_attn_3_ready"),
    "decoding from FP8": (
        ("paged_fp8", "paged_fp8_more", "paged_fp8_rest"),
        "flash_attn_3_fp8_ready",
    ),
    "prompts in pieces": (("append", "append_few"), "flash_attn_3_ready"),
    "prompts in pieces, pages of one slot": (("append_fp8",), "flash_attn_3"),
}
"""Runs of paged caches, and the baseline of each: FlashAttention-3 with its metadata ready."""
_FEW_QUERIES, _BEYOND_L2 = 16, 2 * 60 * 2**20


def paged(book: Any) -> dict[str, list[dict[str, Any]]]:
    """Each recorded problem of a kind: our µs, FlashAttention-3's, its ratio, and dense PyTorch's.

    read: the share of our time that a plain read of the same bytes takes, as limits.json has its
    rate, where queries are few and the bytes far more than L2 holds. A problem on which
    FlashAttention-3 has no sound row is left out.
    """
    rate = book.file("limits.json")["rates"]["dram_read"]
    found: dict[str, list[dict[str, Any]]] = {}
    for kind, (runs, baseline) in PAGED.items():
        found[kind] = []
        for run in filter(book.has, runs):
            for problem in book.problems(run):
                ours, theirs, dense = (
                    book.find(run, problem=problem, provider=provider)
                    for provider in ("attnsweep", baseline, "torch_dense")
                )
                if theirs is not None:
                    row = {"problem": problem.label, "ours": ours.us, "theirs": theirs.us}
                    row |= {"ratio": theirs.us / ours.us}
                    if problem.seqlen_q <= _FEW_QUERIES and problem.min_bytes > _BEYOND_L2:
                        row |= {"read": 1e6 * problem.min_bytes / rate / ours.us}
                    found[kind].append(row | ({"dense": dense.us / ours.us} if dense else {}))
    return found


def paged_table(found: Mapping[str, list[dict[str, Any]]], gpu: str) -> str:
    """The rows of `paged` in Markdown."""
    lines = [f"On an {gpu}, in the same rounds:", ""]
    lines += ["| problem | µs | × FlashAttention-3 | × PyTorch, dense | × plain read |"]
    lines += ["|---|" + "---:|" * 4]
    for row in (row for rows in found.values() for row in rows):
        dense, read = (f"{row[name]:.2f}" if name in row else "–" for name in ("dense", "read"))
        times = f"{row['ours']:.1f} | {row['ratio']:.2f}"
        problem = row["problem"].replace(" bf16 causal", "")  # which all are
        lines.append(f"| {problem} | {times} | {dense} | {read} |")
    return "\n".join(lines) + "\n"


def beside_flashinfer(book: Any) -> str:
    """How many times as long as ours FlashInfer and XQA take, as a sentence."""
    said = []
    for name, provider in (("FlashInfer", "flashinfer"), ("XQA", "xqa")):
        ratios = [
            book.find("flashinfer", problem=problem, provider=provider).us
            / book.find("flashinfer", problem=problem, provider="attnsweep").us
            for problem in book.problems("flashinfer")
        ]
        said.append(f"{name} takes {min(ratios):.2f} to {max(ratios):.2f} times as long")
    return f"{', '.join(said)}.\n"


def serving_table(book: Any) -> str:
    """What benchmarks/serving.py wrote: calls of a step, and tokens a second of a loop."""
    calls, loop = (book.file(f"serving_{what}.json") for what in ("calls", "loop"))
    lines = ["| a step's call | µs | FlashAttention-3, µs | × | behind a gather, µs |"]
    lines += ["|---|" + "---:|" * 4]
    for row in calls["rows"]:
        us = row["us"]
        times = f"{us['attnsweep']:.0f} | {us['flash_attn_3']:.0f} | {row['over_flash_3']:.2f}"
        lines.append(f"| {row['call']} | {times} | {us['torch_gathered']:.0f} |")
    lines += ["", "| loop | tokens/s | FlashAttention-3 | × | behind a gather |"]
    lines += ["|---|" + "---:|" * 4]
    for row in loop["rows"]:
        rate = row["tokens_per_s"]
        ours, theirs = rate["attnsweep"], rate["flash_attn_3"]
        what = f"{row['guesses']} guesses each" if row["guesses"] else "no guesses"
        what += ", CUDA graphs" if row.get("graphs") else ""
        numbers = f"{ours:.0f} | {theirs:.0f} | {row['over_flash_3']:.2f}"
        gathered = f"{rate['torch_gathered']:.0f}" if "torch_gathered" in rate else "–"
        lines.append(f"| {what} | {numbers} | {gathered} |")
    return "\n".join(lines) + "\n"


def masked(place: Path = ROOT / CARD) -> dict[str, Any]:
    """What benchmarks/masks.py wrote of calls with a mask, and masked_models.py of models."""
    files = (place / "masks_served.json", place / "masked_models.json")
    calls, models = (json.loads(path.read_text(encoding="utf-8")) for path in files)
    return {**calls, "models": models["models"], "of_models": models}


def masks(found: Mapping[str, Any]) -> str:
    """Microseconds of a call, and milliseconds of a model's forward, by PyTorch and with ours."""
    lines = ["| call, bf16 | PyTorch, µs | attnsweep, µs | × | host, µs |", "|---|" + "---:|" * 4]
    lines += [
        f"| {row['call']} | {row['sdpa_us']:.0f} | {row['ours_us']:.0f} | {row['ratio']:.1f} | "
        f"{row['host_sdpa_us']:.0f} → {row['host_us']:.0f} |"
        for row in (*found["calls"], *found["arguments"])
    ]
    left = [row for row in found["models"] if len({*row["served"].split(" of ")}) > 1]
    if left:
        raise ValueError(f"the page says that all calls are served, and not of {left}")
    lines += ["", "| model | | PyTorch, ms | attnsweep, ms | × | error, PyTorch | attnsweep |"]
    lines.append("|---|---|" + "---:|" * 5)
    lines += [
        f"| {row['model']} | {'compiled' if row['compiled'] else 'eager'} | "
        f"{row['sdpa_ms']:.1f} | {row['ours_ms']:.1f} | {row['ratio']:.2f} | "
        f"{_percent(row['sdpa_off'])} | {_percent(row['off'])} |"
        for row in found["models"]
    ]
    origins = dict.fromkeys([_origin(found), _origin(found["of_models"])])
    return "\n".join([*lines, "", *origins]) + "\n"


def _change(of: Mapping[str, Any]) -> str:
    """Microseconds of a step by PyTorch, then with the package."""
    return f"{of['pytorch']['step']:.0f} → {of['package']['step']:.0f}"


def judged(results: Path = ROOT / "results", tuned: Mapping[str, Sequence[str]] = TUNED) -> str:
    """What the rule lost on the held-out shapes of each card."""
    lines = [
        "| card | judged on | shapes | slower than its best, median | 95th percentile | worst | "
        "left to PyTorch's own | × its time, median | least |",
        "|---|---|" + "---:|" * 7,
    ]
    unknown = []
    for name, names in tuned.items():
        for on, more in JUDGES.items():
            place = results / Path(names[0]).parent
            runs = [*(results / run for run in names), *(place / run for run in more)]
            judge = place / on.partition(",")[0]
            if not all(run.is_dir() for run in (*runs, judge)):
                continue
            rows = [*dispatch_judged.judged(runs, [judge])]
            found = dispatch_judged.summary(rows)
            cells = [
                *(name, on, str(found["shapes"])),
                *(f"{each:.1%}" for each in found["regret"].values()),
                *(str(found["to_sdpa"]), f"{found['gain']['median']:.2f}"),
                f"{found['gain']['least']:.2f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
            unknown += [name for row in rows if row.regret is None]
    if unknown:
        cards = " and ".join(sorted(set(unknown)))
        lines += [
            "",
            f"The table leaves out {len(unknown)} shapes of the {cards}, whose own sweeps did not "
            "time the choice.",
        ]
    return "\n".join(lines) + "\n" if len(lines) > 2 else NOT_RECORDED
