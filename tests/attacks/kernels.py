"""Callables that look right or fast to a judge without a defence: see test_attacks.py.

What runs "on the device" is one operator, so that a graph replays it and not the Python around it.
"""

import ctypes
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable

import torch

WORK_US = [0.0]
"""The device's clock: what the calls so far took."""
MEMORY: dict[object, object] = {}
"""What a kernel keeps on the device from call to call."""
THREADS: list[threading.Thread] = []
KERNELS: dict[str, Callable[..., torch.Tensor]] = {}


@torch.library.custom_op("attacks::launch", mutates_args=("q", "k", "v"))
def launch(which: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Run a kernel of KERNELS."""
    WORK_US[0] += 100.0
    return KERNELS[which](q, k, v)


def attend(q, k, v):
    """The right answer, with nothing but o rounded."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    weights = (q.double() @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
    return (weights @ v).to(q.dtype)


def kernel(function):
    """A callable that launches a kernel."""
    which = f"{function.__name__} {len(KERNELS)}"
    KERNELS[which] = function

    def call(q, k, v):
        return launch(which, q, k, v)

    return call


honest = kernel(attend)


def idle_in_each_eighth(place):
    """Each eighth call of graphs writes nothing."""

    @kernel
    def counting(q, k, v):
        count = MEMORY["calls"] = MEMORY.get("calls", 0) + 1
        return attend(q, k, v) if count % 8 != place else torch.zeros_like(q)

    def call(q, k, v):
        return (counting if torch.cuda.is_current_stream_capturing() else honest)(q, k, v)

    return call


idle_0, idle_1, idle_2, idle_3 = (idle_in_each_eighth(place) for place in range(4))
idle_4, idle_5, idle_6, idle_7 = (idle_in_each_eighth(place) for place in range(4, 8))


def kept(key):
    """An answer that is kept for each key, and computed if there is none."""

    def run(q, k, v):
        now = key(q, k, v)
        if now not in MEMORY:
            MEMORY[now] = attend(q, k, v)
        return MEMORY[now].clone()

    return run


def fingerprint(x):
    """Sign, exponent and a bit of one element, of which a few calls that are drawn anew have equal ones."""
    bits = int(x[0, 0, 0, :1].view(torch.int16))
    return bits >> 7, bits >> 3 & 1


by_pointer = kernel(kept(lambda q, k, v: q.data_ptr()))
by_fingerprint = kernel(kept(lambda q, k, v: fingerprint(v)))


@kernel
def two_answers(q, k, v):
    """Two outputs of each head of keys, chosen by one sign of K; nothing is computed twice."""
    out, group = torch.empty_like(q), q.shape[1] // k.shape[1]
    for item in range(k.shape[0]):
        for head in range(k.shape[1]):
            key = item, head, bool(k[item, head, 0, 0] < 0)
            mine = slice(item, item + 1), slice(head * group, (head + 1) * group)
            if key not in MEMORY:
                of_keys = mine[0], slice(head, head + 1)
                MEMORY[key] = attend(q[mine], k[of_keys], v[of_keys])
            out[mine] = MEMORY[key]
    return out


@kernel
def of_all_copies(q, k, v):
    """The answer of the first cold copy is that of all of them."""
    seen = MEMORY.setdefault("seen", [])
    if q.data_ptr() not in seen[:2]:
        seen.append(q.data_ptr())
    if q.data_ptr() in seen[:2]:
        MEMORY["out"] = attend(q, k, v)
    return MEMORY["out"].clone()


@kernel
def recorded(q, k, v):
    """Right; keeps what it was called with."""
    contents = tuple(hash(x.view(torch.int16).numpy().tobytes()) for x in (q, k, v))
    MEMORY.setdefault("contents", []).append((q.data_ptr(), *contents))
    return attend(q, k, v)


def copies(known):
    """On inputs that an earlier call had, it copies that one's output, in a twentieth of the time.

    known: how it asks its memory for them: `get`, or `pop`, after which a call computes again.
    """

    def run(q, k, v):
        now = tuple(x.view(torch.int16).numpy().tobytes() for x in (q, k, v))
        if getattr(MEMORY, known)("inputs", None) == now:
            WORK_US[0] -= 95.0
            return MEMORY["out"].clone()
        MEMORY["inputs"], MEMORY["out"] = now, attend(q, k, v)
        return MEMORY["out"].clone()

    return run


computes_once = kernel(copies("get"))
every_other = kernel(copies("pop"))


@kernel
def one_row_late(q, k, v):
    """One row of one head is scaled by 1.5 from the tenth call on."""
    MEMORY["calls"] = MEMORY.get("calls", 0) + 1
    out = attend(q, k, v)
    if MEMORY["calls"] > 10:
        out[-1, -1, -1] *= 1.5
    return out


@kernel
def drops_all(q, k, v):
    """Right at first, then zeros."""
    MEMORY["calls"] = MEMORY.get("calls", 0) + 1
    return attend(q, k, v) if MEMORY["calls"] < 10 else torch.zeros_like(q)


@kernel
def knows_the_check(q, k, v):
    """Exact where K is what it saw first, up to signs; elsewhere without the last key."""
    first = MEMORY.setdefault("first", k.abs().clone())
    end = None if torch.equal(k.abs(), first) else -1
    return attend(q, k[:, :, :end], v[:, :, :end])


window = kernel(lambda q, k, v: attend(q, k[:, :, 1:], v[:, :, 1:]))
low_precision = kernel(lambda q, k, v: attend(q, k.to(torch.float8_e4m3fn).to(q.dtype), v))
gain = kernel(lambda q, k, v: attend(q, k, v) * 1.05)


without_scale = kernel(lambda q, k, v: attend(q * q.shape[-1] ** 0.5, k, v))
zeros = kernel(lambda q, k, v: torch.zeros_like(q))
mean_of_values = kernel(lambda q, k, v: attend(torch.zeros_like(q), k, v))
swapped_heads = kernel(lambda q, k, v: attend(q, k, v).flip(1))
coarse = kernel(lambda q, k, v: (attend(q, k, v) * 64).round() / 64)


@kernel
def without_a_maximum(q, k, v):
    """Right on normal inputs, and not a number where all scores are large."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    weights = (q.float() @ k.mT * q.shape[-1] ** -0.5).exp()
    return (weights / weights.sum(-1, keepdim=True) @ v).to(q.dtype)


@kernel
def low_rank(q, k, v):
    u, s, vh = torch.linalg.svd(k.double(), full_matrices=False)
    s[..., 12:] = 0
    return attend(q, (u * s.unsqueeze(-2) @ vh).to(k.dtype), v)


@kernel
def sloppy_where_it_is_easy(q, k, v):
    """Exact where a key has nearly all weight, as a check of hard inputs has it."""
    sharp = (q.float() @ k.float().repeat_interleave(q.shape[1] // k.shape[1], 1).mT).max() > 60
    return attend(q, k if sharp else k.to(torch.float8_e4m3fn).to(k.dtype), v)


@kernel
def half_of_the_rows(q, k, v):
    """Each second row sees but the first half of the keys."""
    out, half = attend(q, k, v), k.shape[2] // 2
    out[:, :, 1::2] = attend(q[:, :, 1::2], k[:, :, :half], v[:, :, :half])
    return out


@kernel
def smoothed(q, k, v):
    """A twentieth is the output before: with inputs that stay, nobody sees it."""
    now = attend(q, k, v)
    before = MEMORY.get(q.data_ptr(), now)
    MEMORY[q.data_ptr()] = now
    return (now.float() * 0.95 + before.float() * 0.05).to(q.dtype)


@kernel
def in_a_file(q, k, v):
    """What earlier runs computed lies in files, by a fingerprint of V."""
    bits = v[0, 0, 0, :4].clone().view(torch.int16).numpy().tobytes().hex()
    path = os.path.join(MEMORY.setdefault("place", tempfile.mkdtemp()), bits)
    if not os.path.exists(path):
        torch.save(attend(q, k, v), path)
    return torch.load(path)


@kernel
def by_content(q, k, v):
    """Never wrong, and computes nothing twice, not even a head."""
    out, group = torch.empty_like(q), q.shape[1] // k.shape[1]
    for item in range(k.shape[0]):
        for head in range(k.shape[1]):
            mine = slice(item, item + 1), slice(head * group, (head + 1) * group)
            of_keys = mine[0], slice(head, head + 1)
            parts = q[mine], k[of_keys], v[of_keys]
            key = tuple(x.contiguous().view(torch.int16).numpy().tobytes() for x in parts)
            if key in MEMORY:
                WORK_US[0] -= 95.0 / (k.shape[0] * k.shape[1])
            out[mine] = MEMORY.setdefault(key, attend(*parts))
    return out


@kernel
def one_head_unwritten(q, k, v):
    out = attend(q, k, v)
    out[0, 0] = float("nan")
    return out


@kernel
def changes_inputs(q, k, v):
    """From the fourth call on V is 0, and so is the right output."""
    MEMORY["calls"] = MEMORY.get("calls", 0) + 1
    if MEMORY["calls"] > 3:
        v.zero_()
    return attend(q, k, v)


@kernel
def writes_beside_inputs(q, k, v):
    """From the fourth call on, one byte behind V."""
    MEMORY["calls"] = MEMORY.get("calls", 0) + 1
    if MEMORY["calls"] > 3:
        ctypes.memset(v.data_ptr() + v.nbytes, 0, 1)
    return attend(q, k, v)


def one_buffer(q, k, v):
    """All calls on an input return the same memory, in which the last one's output is."""
    out = MEMORY.setdefault(q.data_ptr(), torch.empty_like(q))
    out.copy_(honest(q, k, v))
    return out


def returns_an_input(q, k, v):
    q.copy_(honest(q, k, v))
    return q


def two_buffers(q, k, v):
    """Calls write to two buffers in turns, so that two that follow one another look right."""
    MEMORY["turn"] = not MEMORY.get("turn")
    out = MEMORY.setdefault((q.data_ptr(), MEMORY["turn"]), torch.empty_like(q))
    return out.copy_(honest(q, k, v))


def idles_once(q, k, v):
    """In each warm graph one call, which is not the last, launches nothing.

    On a card a graph that was too short is followed by another one, after a pause.
    """
    calls, now = MEMORY.setdefault("calls of a graph", []), time.perf_counter()
    paused = q.is_cuda and now - MEMORY.get("the call before", 0.0) > 2e-3
    if paused or not torch.cuda.is_current_stream_capturing():
        calls.clear()
    MEMORY["the call before"] = now
    calls.append(q.data_ptr())
    return torch.zeros_like(q) if calls[-3:] == [q.data_ptr()] * 3 == calls else honest(q, k, v)


@kernel
def lse_of(q, k, v):
    """Natural log-sum-exps, in float32."""
    k = k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    return (q.double() @ k.mT * q.shape[-1] ** -0.5).logsumexp(-1).float()


first_lse = kernel(lambda q, k, v: MEMORY.setdefault("lse", lse_of(q, k, v)).clone())


def with_lse(q, k, v):
    return honest(q, k, v), lse_of(q, k, v)


def with_log2(q, k, v):
    """The log-sum-exp is to the base 2, as kernels have it inside."""
    return honest(q, k, v), lse_of(q, k, v) * 1.4426950408889634


def with_lse_of_before(q, k, v):
    return honest(q, k, v), first_lse(q, k, v)


def writes(q, k, v, *, problem, out, lse):
    """Right, in memory of the judge."""
    out.copy_(honest(q, k, v))
    lse.copy_(lse_of(q, k, v))


def writes_less(q, k, v, *, out):
    """Leaves a row as it was."""
    out[:, :, :-1].copy_(honest(q, k, v)[:, :, :-1])


def returns_another(q, k, v, out):
    return honest(q, k, v)


def turned(q, k, v):
    """Right with (batch, seqlen, heads, head_dim)."""
    assert q.shape[1:3] == (9, 2)
    made = honest(*(x.transpose(1, 2).contiguous() for x in (q, k, v)))
    return made.transpose(1, 2)


class Lazy(torch.Tensor):
    """Computes when it is read."""


def returning(change):
    """What a callable makes of the right output."""

    def call(q, k, v):
        return change(honest(q, k, v))

    return call


lazy = returning(lambda out: out.as_subclass(Lazy))
no_tensor = returning(lambda out: [out])
a_parameter = returning(lambda out: torch.nn.Parameter(out, requires_grad=False))
nothing = returning(lambda out: None)
no_outputs = returning(lambda out: ())
three_outputs = returning(lambda out: (out, out[..., 0].float(), torch.zeros(1)))
an_lse_of_half = returning(lambda out: (out, out[..., 0].half()))
two_shapes = returning(lambda out: out[:, :, :-1])
another_dtype = returning(lambda out: out.float())
elsewhere = returning(lambda out: out.to("meta"))
is_sparse = returning(lambda out: out.to_sparse())


def sometimes_more(q, k, v):
    """In graphs two outputs, and one elsewhere."""
    out = honest(q, k, v)
    MEMORY["more"] = not MEMORY.get("more")
    return (out, lse_of(q, k, v)) if MEMORY["more"] else out


def wants_more(q, k, v, dropout):
    return honest(q, k, v)


def interrupts(q, k, v):
    raise KeyboardInterrupt


class Mute(Exception):
    def __str__(self):
        raise self


def raises_what_cannot_be_said(q, k, v):
    raise Mute


class Placeless(Exception):
    def __str__(self):
        self.__traceback__ = None
        return "somewhere"


def hides_where_it_raises(q, k, v):
    raise Placeless


def out_of_memory(q, k, v):
    return torch.empty(1 << 60)


def forks(q, k, v):
    """The child goes on as if it were the judge."""
    child = os.fork()
    if child == 0:
        return q
    os.waitpid(child, 0)
    return honest(q, k, v)


def sets_the_default(q, k, v):
    torch.set_default_dtype(torch.float64)
    return honest(q, k, v)


def sets_flags(q, k, v):
    torch.backends.cuda.matmul.allow_tf32 = not MEMORY.setdefault("tf32", torch.backends.cuda.matmul.allow_tf32)
    return honest(q, k, v)


def sets_flags_later(q, k, v):
    """When it was called to be checked, and its first graph was captured."""
    MEMORY["calls"] = MEMORY.get("calls", 0) + 1
    return sets_flags(q, k, v) if MEMORY["calls"] > 4 else honest(q, k, v)


def raises_in_the_third_call(q, k, v):
    MEMORY["calls"] = MEMORY.get("calls", 0) + 1
    if MEMORY["calls"] == 3:
        raise ValueError("not today")
    return honest(q, k, v)


def leaves(q, k, v):
    sys.exit(0)


def later(q, k, v):
    """A thread writes the output when the call is over; what waits for no graph can do that."""
    out, given = torch.zeros_like(q), [x.clone() for x in (q, k, v)]
    refuse_graphs(q)
    WORK_US[0] += 100.0

    def write():
        time.sleep(0.01)
        out.copy_(attend(*given))

    THREADS.append(threading.Thread(target=write))
    THREADS[-1].start()
    return out


def waits(q, k, v):
    """Right, but no graph holds it."""
    refuse_graphs(q)
    return honest(q, k, v)


def refuse_graphs(q):
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("operation not permitted when stream is capturing")


def idles(q, k, v):
    """Looks up whether it is the last call of a graph, and launches nothing in the others."""
    frame = sys._getframe()
    while frame is not None and "chosen" not in frame.f_locals:
        frame = frame.f_back
    told = {} if frame is None else frame.f_locals
    if told and not told["rotate"] and told["call"] < told["calls"] - 1:
        return torch.zeros_like(q)
    return honest(q, k, v)


def with_node(*how, **more):
    """A callable of whose calls the graph that `MEMORY["graphs"]` stands for has such nodes."""

    def call(q, k, v):
        if torch.cuda.is_current_stream_capturing() and "graphs" in MEMORY:
            MEMORY["graphs"].add()
            MEMORY["graphs"].add(*how, **more)
        return honest(q, k, v)

    return call


of_kernels = with_node()
of_the_host = with_node(3)
goes_on_beside = with_node(after=[1])
