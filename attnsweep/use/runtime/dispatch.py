"""Which kernel serves a shape, and whether it is known to beat PyTorch's own attention."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .launch import refused_by
from .table import Gpu, Guard, Shape, Winner


@dataclass(frozen=True, slots=True)
class Choice:
    """winner: whose kernel serves the shape, or None. code: a short name of the reason, of few.

    gain: expected time of PyTorch's own attention over the kernel's; 0 if nothing is known.
    """

    winner: Winner | None
    code: str
    reason: str
    gain: float = 0.0


def distance(shape: Shape, tuned: Shape, guard: Guard) -> float:
    """Octaves between two shapes: factors of two in heads of all batches, queries, and keys."""
    group, tuned_group = shape.heads // shape.heads_kv, tuned.heads // tuned.heads_kv
    return (
        abs(math.log2(shape.batch * shape.heads / (tuned.batch * tuned.heads)))
        + abs(math.log2(shape.seqlen_q / tuned.seqlen_q))
        + abs(math.log2(shape.seqlen_k / tuned.seqlen_k))
        + guard.weight_group * abs(math.log2(group / tuned_group))
    )


def choose(gpu: Gpu, shape: Shape) -> Choice:
    """The kernel for a shape, or why there is none.

    A tuned shape gets its winner if the lower end of its gain is at least 1. Any other gets the
    winner of the nearest tuned shape of its head_dim, dtype and mask whose kernel may run there, if
    that is within the guard's reach and its gain is above 1 by the guard's share for each octave.
    """
    kind = (shape.head_dim, shape.dtype, shape.causal)
    same = [w for w in gpu.winners if (w.shape.head_dim, w.shape.dtype, w.shape.causal) == kind]
    if not same:
        mask = "causal" if shape.causal else "full"
        what = f"head_dim {shape.head_dim}, {shape.dtype}, {mask}"
        return Choice(None, "not_tuned", f"no shape with {what} was tuned")
    for winner in same:
        if winner.shape == shape:
            if winner.gain_low >= 1:
                return Choice(winner, "tuned", "this shape was tuned", winner.gain)
            why = "this shape was tuned, and PyTorch's own attention is as fast"
            return Choice(None, "not_faster", why, winner.gain)
    near = sorted(((distance(shape, w.shape, gpu.guard), w.shape, w) for w in same), key=_place)
    for octaves, tuned, winner in near:
        if octaves > gpu.guard.reach:
            break
        if refused_by(winner.kernel, shape) is not None:
            continue
        gain = winner.gain_low * (1 - gpu.guard.per_octave) ** octaves
        if gain >= 1:
            why = f"near {tuned.label}, which was tuned ({octaves:.2f} octaves)"
            return Choice(winner, "near", why, gain)
        why = f"near {tuned.label} ({octaves:.2f} octaves), where we gain too little to be sure"
        return Choice(None, "not_faster", why, gain)
    tuned = near[0][1]
    why = f"no tuned shape is near enough whose kernel may run here; the nearest is {tuned.label}"
    return Choice(None, "far", why)


def _place(found: tuple[float, Shape, Winner]) -> tuple[float, Shape]:
    return found[:2]
