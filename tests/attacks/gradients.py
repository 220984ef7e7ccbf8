"""Backwards that look right to a judge without a defence: see test_gradients.py."""

import torch

from attacks import kernels
from attacks.kernels import MEMORY


def weights_of(q, k, lse):
    return (q @ k.mT * q.shape[-1] ** -0.5 - lse.double()[..., None]).exp()


def gradients(q, k, v, o, lse, do, weights_of=weights_of):
    """The right answer, with nothing but outputs rounded."""
    kind, scale, group = q.dtype, q.shape[-1] ** -0.5, q.shape[1] // k.shape[1]
    q, k, v, o, do = (x.double() for x in (q, k, v, o, do))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    weights = weights_of(q, k, lse)
    of_scores = weights * (do @ v.mT - (do * o).sum(-1, keepdim=True)) * scale
    made = of_scores @ k, of_scores.mT @ q, weights.mT @ do
    of_heads = (x.unflatten(1, (-1, group)).sum(2) for x in made[1:])
    return tuple(x.to(kind) for x in (made[0], *of_heads))


def backward(function):
    """A callable that launches it."""

    def call(q, k, v, o, lse, do):
        kernels.WORK_US[0] += 100.0
        MEMORY["calls"] = MEMORY.get("calls", 0) + 1
        return function(q, k, v, o, lse, do)

    return call


honest = backward(gradients)


def kept(key):
    def run(*given):
        now = key(*given)
        if now not in MEMORY:
            MEMORY[now] = gradients(*given)
        return tuple(x.clone() for x in MEMORY[now])

    return backward(run)


by_pointer = kept(lambda q, k, v, o, lse, do: q.data_ptr())
by_fingerprint = kept(lambda q, k, v, o, lse, do: kernels.fingerprint(do))


@backward
def keeps_weights(*given):
    """P of the first call is that of all: it depends on no dO."""

    def first(q, k, lse):
        return MEMORY.setdefault("weights", weights_of(q, k, lse))

    return gradients(*given, weights_of=first)


def later(change):
    """Right in ten calls, and changed in those after them."""

    def run(*given):
        made = gradients(*given)
        return change(*made) if MEMORY["calls"] > 10 else made

    return backward(run)


def _scaled(dq, dk, dv):
    dv[-1, -1, -1] *= 1.5
    return dq, dk, dv


one_row_late = later(_scaled)
swapped_late = later(lambda dq, dk, dv: (dq, dv, dk))
two_late = later(lambda dq, dk, dv: (dq, dk))
one_buffer_late = later(lambda dq, dk, dv: (dq, dk, dk))
swapped = backward(lambda *given: (lambda dq, dk, dv: (dq, dv, dk))(*gradients(*given)))


@backward
def computes_once(*given):
    """On inputs that the last call had, it copies its outputs, in a twentieth of the time."""
    now = tuple(x.view(torch.uint8).numpy().tobytes() for x in given)
    if MEMORY.get("inputs") == now:
        kernels.WORK_US[0] -= 95.0
    else:
        MEMORY["inputs"], MEMORY["out"] = now, gradients(*given)
    return tuple(x.clone() for x in MEMORY["out"])


@backward
def of_its_own_forward(q, k, v, o, lse, do):
    """It takes neither o nor lse, but computes both."""
    group = q.shape[1] // k.shape[1]
    of_keys = (x.double().repeat_interleave(group, 1) for x in (k, v))
    wide, values = of_keys
    scores = q.double() @ wide.mT * q.shape[-1] ** -0.5
    return gradients(q, k, v, scores.softmax(-1) @ values, scores.logsumexp(-1), do)


@backward
def one_call_wrong(*given):
    dq, dk, dv = gradients(*given)
    return _scaled(dq, dk, dv) if MEMORY["calls"] == 36 else (dq, dk, dv)


@backward
def promises_all(*given):
    dq, dk, dv = gradients(*given)
    return (dq, dk, dv) if given[1].shape[2] == 20 else (dq, dk, dv * 0)


promises_all.supports = lambda problem: True
