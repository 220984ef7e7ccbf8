"""Calls the whole operator at random in one process and checks each against float64. Needs PyTorch.

    PYTHONPATH=. python tests/support/net.py --seconds 300 --seed 1

`--calls N` makes the first N calls of a sequence, `--only N` that call alone.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from drawn_calls import VARLEN, Drawn, Exact, Limits, Made, Sizes, direction_of, draw, exact, make
from unguarded import unguarded

import attnsweep
from attnsweep.serve.runtime import package
from attnsweep.serve.runtime.operator import Operator
from attnsweep.serve.runtime.table import read_table

OUT, GRAD = 1e-2, 2e-2
"""Errors of a row relative to its length: 16-bit products and outputs err by 3e-3."""
OUT_UNIT, GRAD_UNIT = 1e-2, 4e-2
"""And relative to what a row is summed from, which may cancel."""
FAR = -1e5
"""Sums of score and mask below this are so coarse in float32 that a log-sum-exp loses the count of keys."""
ONE_IN, STEPS = 12, 40
"""How rarely a call with gradients is made many times from one place, and how many: such steps are trusted then."""
CARD = Limits(
    known=(
        *(Sizes(4, 16, kv, n, n, d, d, dtype) for kv in (16, 4) for n in (512, 1000) for d in (64, 128)
          for dtype in ("bf16", "fp16")),
        *(Sizes(8, 32, 8, n, 1500, 128, 128) for n in (1, 4, 16)),
        *(Sizes(2, 8, kv, 2048, 2048, d, d) for kv in (8, 2) for d in (64, 128)),
        *(Sizes(3, 8, 8, n, n, 64, 64) for n in (704, 832)),
        *(Sizes(2, 8, kv, *each, 128, 128) for kv in (8, 2) for each in ((500, 1024), (1024, 700))),
        Sizes(2, 8, 8, 777, 777, 256, 256), Sizes(2, 8, 8, 640, 640, 96, 96), Sizes(2, 8, 8, 512, 512, 192, 128),
    ),
    seqlens=(1, 2, 7, 17, 64, 65, 129, 300, 512, 577, 777, 832, 1024, 1500, 2048),
    batches=(1, 2, 4, 9),
    head_dims=(8, 16, 40, 64, 64, 64, 72, 80, 96, 128, 128, 128, 192, 256),
    scores=2**25,
    many_head_dim=64,
)  # fmt: skip
LENGTHS = ((128, 128), (192, 192), (100, 128), (128, 192), (192, 128))
STAND_IN = Limits(known=tuple(Sizes(2, 4, kv, *each) for kv in (4, 2) for each in LENGTHS))

Open = Callable[[Drawn, Made], bool]
OPEN: dict[str, Open] = {
    "NaN in what lengths hide, by PyTorch": lambda drawn, made: drawn.hidden_nan and by_pytorch(made),
    "rows of far sums, by PyTorch": lambda drawn, made: bool(far_rows(made).any()) and by_pytorch(made),
}
"""Faults that are known and not away, as docs/explanation/pytorch.md says: which calls have them."""


def by_pytorch(made: Made) -> bool:
    """Whether PyTorch may compute a call, or its gradients."""
    if made.drawn.direction is not None or made.drawn.entry not in ("attention", "sdpa"):
        return True
    how = {"scale": made.drawn.scale, "softcap": made.drawn.softcap, "sinks": made.sinks, **made.arguments}
    return attnsweep.explain_attention(made.q, made.k, made.v, enable_gqa=True, **how).kernel is None


def far_rows(made: Made) -> Any:
    """Which queries see keys, all of them with far sums."""
    if made.added is None:
        return torch.zeros(1, dtype=torch.bool)
    most = made.added.float().amax(-1, keepdim=True)
    return (most < FAR) & (most > -math.inf)


def enabled(*given: Any, **how: Any) -> Any:
    """PyTorch's function while attnsweep stands in its place."""
    with attnsweep.enable():
        return F.scaled_dot_product_attention(*given, **how)


ENTRIES: dict[str, Callable[..., Any]] = {
    "attention": lambda *given, **how: attnsweep.attention(*given, **how),
    "sdpa": enabled,
    "flash_attn_func": lambda *given, **how: attnsweep.flash_attn_func(*given, **how),
    "attention_varlen": lambda *given, **how: attnsweep.attention_varlen(*given, **how),
    "flash_attn_varlen_func": lambda *given, **how: attnsweep.flash_attn_varlen_func(*given, **how),
}


def invoke(made: Made, q: Any, k: Any, v: Any) -> Any:
    """Make the call with these tensors of it; its output as the entry has it."""
    drawn, how = made.drawn, dict(made.arguments)
    flash = drawn.entry.startswith("flash")
    if drawn.scale is not None:
        how["softmax_scale" if flash else "scale"] = drawn.scale
    if drawn.softcap:
        how["softcap"] = drawn.softcap
    if made.sinks is not None:
        how["sinks"] = made.sinks
    if drawn.entry in VARLEN:
        q, k, v = (each[0].transpose(0, 1) for each in (q, k, v))
    elif flash:
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    elif q.shape[1] != k.shape[1]:
        how["enable_gqa"] = True
    return ENTRIES[drawn.entry](q, k, v, **how)


def _explained(made: Made) -> str:
    if made.drawn.entry not in ("attention", "sdpa"):
        return made.drawn.entry
    how = {"scale": made.drawn.scale, "softcap": made.drawn.softcap, "sinks": made.sinks, **made.arguments}
    try:
        return str(attnsweep.explain_attention(made.q, made.k, made.v, enable_gqa=True, **how))
    except Exception as error:
        return f"not explained: {error}"


def as_heads_first(drawn: Drawn, tensor: Any) -> Any:
    """A tensor in the output's form as (batch, heads, seqlen, head_dim)."""
    if drawn.entry in VARLEN:
        return tensor.transpose(0, 1)[None]
    return tensor.transpose(1, 2) if drawn.entry == "flash_attn_func" else tensor


@dataclass(frozen=True)
class Wrong:
    """A call that is not right, and how it is made again."""

    drawn: Any
    seed: int
    number: int
    what: str
    served: str
    again: str = ""
    script: str = "net.py"

    def __str__(self) -> str:
        script = f"python tests/support/{self.script}"
        return (
            f"call {self.number} of seed {self.seed}: {self.what}\n  {self.drawn}\n  served: {self.served}\n"
            f"  once more, at once: {self.again}\n  alone: {script} --seed {self.seed} --only {self.number}\n"
            f"  with those ahead of it: {script} --seed {self.seed} --calls {self.number + 1}"
        )


def wrong_rows(got: Any, want: Any, most: Any, rows: Any = None) -> str:
    """What is wrong with a tensor, or nothing. most: the error that each row may have. rows: which count."""
    if got.shape != want.shape:
        return f"has shape {tuple(got.shape)}, not {tuple(want.shape)}"
    error, length = (each.norm(dim=-1, keepdim=True) for each in (got.double() - want, want))
    bad = ~(error <= most)
    bad = bad if rows is None else bad & rows
    if not bool(bad.any()):
        return ""
    at = tuple(bad.nonzero()[0].tolist()[:-1])
    values = f"{float(error[at]):.3g} off, of length {float(length[at]):.3g}"
    return f"{int(bad.sum())} of {bad.numel()} rows are wrong, the first {at}: {values}"


@dataclass
class Net:
    """A sequence of calls. call: makes one of them; choose: its operator, ahead of it.

    by: how many calls were served by what, so far; left_out: because of what fault. Other calls
    than those of the dense operator have their own `drawn`, `made`, `counted`, `explained` and
    `compared`, and `script`, which makes them.
    """

    limits: Any
    device: str
    seed: int
    call: Callable[..., Any] = invoke
    choose: Callable[[Any], None] = lambda drawn: None
    kept: dict[Any, Any] = field(default_factory=dict)
    by: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    script: ClassVar[str] = "net.py"
    open: ClassVar[dict[str, Open]] = OPEN

    def drawn(self, number: int) -> Any:
        """The call of a number, without its tensors."""
        return draw(self.limits, self.seed, number)

    def made(self, drawn: Any) -> Any:
        """Its tensors."""
        return make(drawn, self.device, self.kept)

    def counted(self) -> Counter[str]:
        """Calls so far, by what served them."""
        return Counter(attnsweep.attention_counters())

    def explained(self, made: Any) -> str:
        """What would serve a call, and why."""
        return _explained(made)

    def one(self, number: int) -> Wrong | None:
        """Make the call of a number, and say whether it is wrong."""
        drawn = self.drawn(number)
        if len(self.kept) > 60:  # of gigabytes, on a card
            self.kept.clear()
        made = self.made(drawn)
        self.choose(drawn)  # who serves it
        for name, has in self.open.items():
            if has(drawn, made):
                self.left_out[name] += 1
                return None
        what, served = self.checked(made)
        if not what:
            return None
        again, _ = self.checked(made)
        return Wrong(drawn, self.seed, number, what, served, again or "right", self.script)

    def checked(self, made: Made) -> tuple[str, str]:
        """What is wrong with a call, and who served it."""
        self.choose(made.drawn)
        before = self.counted()
        try:
            what = self.compared(made)
        except torch.OutOfMemoryError:  # float64 takes more than any call
            self.kept.clear()
            torch.cuda.empty_cache()
            self.left_out["no memory"] += 1
            what = ""
        except Exception as error:  # whatever it is, it is a finding
            what = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            if "CUDA error" in str(error):  # nothing works in this process any more
                raise SystemExit(f"{what}\n  {made.drawn}") from error
        served = self.counted() - before
        self.by.update(served)
        by = ", ".join(sorted(served)) or "nobody counted it"
        return what, f"{by}; {self.explained(made)}" if what else by

    def compared(self, made: Any) -> str:
        """What is wrong with a call's answer, or nothing."""
        drawn = made.drawn
        given = (made.q, made.k, made.v)
        if drawn.direction is None:
            out = self.call(made, *given)
            return self._output(made, out, exact(made))
        leaves = [each.detach().requires_grad_(name in drawn.needs) for name, each in zip("qkv", given, strict=True)]
        asked = [each for each in leaves if each.requires_grad]
        for _ in range(STEPS if drawn.seed % ONE_IN == 0 else 0):
            out = self.call(made, *leaves)
            if out.requires_grad:
                torch.autograd.grad(out, asked, direction_of(made, out))
        out = self.call(made, *leaves)
        if not out.requires_grad:
            return "the output has no gradient"
        direction = direction_of(made, out)
        want = exact(made, as_heads_first(drawn, direction))
        if what := self._output(made, out.detach(), want):
            return what
        if drawn.entry == "sdpa" and bool(want.empty.any()):
            return ""  # PyTorch's backends differ in what such a query has
        for name, got in zip(drawn.needs, torch.autograd.grad(out, asked, direction), strict=True):
            rows = None
            if made.rows is not None:
                # Beyond the last sequence nothing is promised.
                inside = sum(drawn.lengths[0 if name == "q" else 1])
                rows = (torch.arange(got.shape[2], device=got.device) < inside)[:, None]
            exact_one = want.grads[name]
            most = GRAD * exact_one.norm(dim=-1, keepdim=True) + GRAD_UNIT * want.units[name]
            if what := wrong_rows(got, exact_one, most, rows):
                return f"gradient of {name}: {what}"
        return ""

    def _output(self, made: Made, out: Any, want: Exact) -> str:
        rows = None if made.rows is None else made.rows[:, None]
        if made.drawn.entry == "sdpa":  # PyTorch's backends differ in these
            rows = ~want.empty
        most = OUT * want.out.norm(dim=-1, keepdim=True) + OUT_UNIT * want.out_unit
        what = wrong_rows(as_heads_first(made.drawn, out), want.out, most, rows)
        return f"output: {what}" if what else ""

    def run(self, numbers: Iterator[int] | range, seconds: float = float("inf")) -> Iterator[tuple[int, Wrong | None]]:
        """The calls of these numbers, one after the other, for so long."""
        end = time.monotonic() + seconds
        for number in numbers:
            if time.monotonic() > end:
                return
            yield number, self.one(number)


_NUMBERS = itertools.count()


@contextmanager
def guarded_and_not() -> Iterator[Callable[[Drawn], None]]:
    """Chooses the operator of a call: for half of them one whose kernels serve where they can, slow or not."""
    before = dict(vars(package))
    table = read_table(Path(package.__file__).parent)
    table = replace(table, gpus={key: unguarded(gpu) for key, gpu in table.gpus.items()})
    package.serve_by(Operator(table, f"unguarded_{next(_NUMBERS)}"))
    states = [before, dict(vars(package))]
    try:
        yield lambda drawn: vars(package).update(states[drawn.seed // 2 % 2])
    finally:
        vars(package).update(before)


def finds(plant: Callable[[], Any], sound: Net, seconds: float) -> Wrong | None:
    """The first call that a planted fault makes wrong, None if the time ends before.

    plant: makes what makes the calls. sound: the net without it: what is wrong there too is not its doing.
    """
    net = replace(sound, call=plant(), kept={})
    for number, found in net.run(itertools.count(), seconds):
        if found is not None and sound.one(number) is None:
            return found
    return None


@contextmanager
def of_operator(asked: Any) -> Iterator[Net]:
    """The net of the dense operator."""
    with guarded_and_not() as choose:
        yield Net(CARD if asked.device == "cuda" else STAND_IN, asked.device, asked.seed, choose=choose)


def main(of: Callable[[Any], AbstractContextManager[Net]], about: str) -> int:
    """Make calls until the time is over; 1 if any was wrong."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--calls", type=int, help="so many calls of the sequence, however long they take")
    parser.add_argument("--only", type=int, help="the call of this number alone")
    parser.add_argument("--most", type=int, default=20, help="wrong calls after which it ends")
    parser.add_argument("--device", default="cuda", help="cpu: small calls, without kernels of a GPU")
    parser.add_argument("--trace", action="store_true", help="say each call ahead of it, should the process die")
    asked = parser.parse_args()
    faulthandler.enable()  # says where a process dies
    with of(asked) as net:
        return _report(net, asked)


def _report(net: Net, asked: Any) -> int:
    numbers: Any = itertools.count() if asked.calls is None else range(asked.calls)
    numbers = numbers if asked.only is None else [asked.only]
    seconds = asked.seconds if asked.calls is asked.only is None else float("inf")
    if asked.trace:
        numbers = _traced(numbers, net)
    wrong, done = 0, 0
    for _, found in net.run(numbers, seconds):
        done += 1
        if found is not None:
            wrong += 1
            print(found, flush=True)
            if wrong == asked.most:
                break
    print(f"{done} calls of seed {asked.seed}, {wrong} wrong; served by {dict(net.by.most_common())}")
    if net.left_out:
        print(f"left out, as known: {dict(net.left_out)}")
    return int(wrong > 0)


def _traced(numbers: Any, net: Net) -> Iterator[int]:
    for number in numbers:
        print(number, net.drawn(number), file=sys.stderr, flush=True)
        yield number


if __name__ == "__main__":
    sys.exit(main(of_operator, str(__doc__)))
