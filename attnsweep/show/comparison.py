"""How the best of ours compares with the fastest peer, in a sentence for each problem."""

from __future__ import annotations

import math

from attnsweep.choose.base import fastest_round
from attnsweep.show.figures import figure
from attnsweep.show.sentences import Row, Section, is_recorded

_TITLES = {
    "torch_flash": "PyTorch's flash attention",
    "torch_cudnn": "PyTorch's cuDNN attention",
    "torch_efficient": "PyTorch's memory-efficient attention",
    "torch_math": "PyTorch's plain attention",
    "unfused": "unfused attention",
    "cudnn": "cuDNN",
    "triton_flash": "Triton's fused attention",
    "flash_attn_2": "FlashAttention-2",
    "flash_attn_3": "FlashAttention-3",
    "flash_attn_3_fp8": "FlashAttention-3 in FP8",
    "flash_attn_4": "FlashAttention-4",
    "attnsweep_bf16": "attnsweep's own attention in bf16",
}
"""The name that a reader has for each peer."""


def sentence(section: Section) -> str:
    """`flash_fwd_wgmma is 1.10 ± 0.01 times as fast as FlashAttention-3 (398 against 438 µs) on …`.

    The figure after ± reaches to the farther end of the 95 % interval. A peer that is faster is
    named first, and no difference is claimed where the interval holds 1.
    """
    label, row, best = section.problem.label, section.winner, section.best_baseline
    if row is None:
        return f"No candidate is right and timed on {label}."
    ours, us = str(row["kernel"]), figure(row["time_us"], 3)
    unit = "µs" if row["timed_as"] == "warm" else f"µs {row['timed_as']}"
    if best is None or row["ratio_to_best_baseline"] is None:
        return f"{ours} takes {us} {unit} on {label}{_where(row)}; no peer was timed with it."
    peer = _TITLES.get(best["provider"], best["provider"])
    noisy = row["ratio_of"] == "bound"
    peer_us = fastest_round(best["trial"]) if noisy else best["time_us"]
    times, ratio = (us, figure(peer_us, 3)), row["ratio_to_best_baseline"]
    low, high = row["ratio_low"], row["ratio_high"]
    on = f" on {label}{_where(row)}"
    if best["over_limit"]:
        on += f"; the error of {peer} is over the limit"
    if noisy:
        if ratio <= 1:
            return (
                f"{peer} was too noisy to compare with {ours} ({times[0]} against {times[1]} "
                f"{unit} in its fastest round){on}."
            )
        return (
            f"{ours} is at least {_floored(ratio)} times as fast as {peer}, which was noisy "
            f"({times[0]} against {times[1]} {unit} in its fastest round){on}."
        )
    if low is None or high is None:
        first, second, factor = (ours, peer, ratio) if ratio >= 1 else (peer, ours, 1 / ratio)
        both = times if ratio >= 1 else times[::-1]
        return (
            f"{first} is about {factor:.2f} times as fast as {second} ({both[0]} against {both[1]} "
            f"{unit}, not in the same rounds){on}."
        )
    if low <= 1 <= high:
        return (
            f"No difference between {ours} and {peer} was shown ({times[0]} against {times[1]} "
            f"{unit}, a ratio of {_pm(ratio, low, high)}){on}."
        )
    if ratio > 1:
        return (
            f"{ours} is {_pm(ratio, low, high)} times as fast as {peer} ({times[0]} against "
            f"{times[1]} {unit}){on}."
        )
    return (
        f"{peer} is {_pm(1 / ratio, 1 / high, 1 / low)} times as fast as {ours}, the best of ours "
        f"({times[1]} against {times[0]} {unit}){on}."
    )


def _where(row: Row) -> str:
    """Where a recorded row was measured."""
    return f", recorded on {row['recorded_on'] or 'an unknown GPU'}" if is_recorded(row) else ""


def _floored(ratio: float) -> str:
    return f"{math.floor(100 * ratio) / 100:.2f}"


def _pm(ratio: float, low: float, high: float) -> str:
    """`1.10 ± 0.01`: as many decimals as the half-width has, two or three; it is rounded up."""
    half = max(ratio - low, high - ratio, 0.0)
    decimals = 2 if half >= 0.005 else 3
    # The interval of the printed figure holds the one that was found.
    half += abs(round(ratio, decimals) - ratio)
    up = math.ceil(round(half * 10**decimals, 6)) / 10**decimals
    return f"{ratio:.{decimals}f} ± {up:.{decimals}f}"
