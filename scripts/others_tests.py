"""Run other people's tests of attention as they are, in one process and in random order.

    python scripts/others_tests.py flash-attention CHECKOUT --sample 600 --seed 1
    python scripts/others_tests.py opinfo

CHECKOUT: a clone of FlashAttention, whose `tests/test_flash_attn.py` (`--file`: another) is run
with attnsweep's functions in the place of its own. PyTorch's samples of its own function come with
PyTorch. Needs a GPU, pytest, and what their tests import: einops and expecttest. Nothing of theirs
is kept here.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import attnsweep

UNUSED = {"num_splits", "pack_gqa", "sm_margin", "scheduler_metadata"}
"""Arguments that change how FlashAttention computes, and not what."""
KNOWN = {"dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes"} | {
    "deterministic",
    "return_attn_probs",
    "block_table",
}
"""Arguments that attnsweep's functions have besides tensors, or refuse by name."""


# ---- FlashAttention's functions by attnsweep's ----
class NotComputed:
    """Stands for a result that attnsweep has not: whatever is done with it is refused."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("log-sum-exp and weights are not returned")

    __add__ = __sub__ = __rsub__ = __eq__ = __getattr__ = _refuse  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        """Refuse PyTorch's functions too."""
        raise NotImplementedError("log-sum-exp and weights are not returned")


def adapted(
    name: str, unpacks: Callable[..., tuple[Any, ...]] = lambda *given: given
) -> Callable[..., Any]:
    """attnsweep's function of this name, called as FlashAttention's is.

    unpacks: makes of its tensors those of attnsweep's. Where weights are asked for beside the
    output of a call without dropout, tests look at the output alone.
    """
    own = getattr(attnsweep, name)

    def function(*given: Any, **how: Any) -> Any:
        for argument in [*how]:
            off = how[argument] is None or (isinstance(how[argument], int) and not how[argument])
            if argument in UNUSED or (argument not in KNOWN and off):
                del how[argument]
            elif argument not in KNOWN:
                raise NotImplementedError(f"{argument} is not computed here")
        asked = how.pop("return_attn_probs", False) or how.pop("return_softmax", False)
        dropped = how.get("dropout_p") or 0.0
        if asked and dropped == 0.0:
            out = own(*unpacks(*given), **how)
            return out, NotComputed(), None
        return own(*unpacks(*given), **how, **({"return_attn_probs": True} if asked else {}))

    return function


def _dropout_by_name(function: Callable[..., Any], tensors: int) -> Callable[..., Any]:
    """The function, which may get dropout_p after its tensors."""

    def named(*given: Any, **how: Any) -> Any:
        names = ("dropout_p", "softmax_scale", "causal", "window_size")
        return function(*given[:tensors], **dict(zip(names, given[tensors:], strict=False)), **how)

    return named


FUNCTIONS = {
    "flash_attn_func": _dropout_by_name(adapted("flash_attn_func"), 3),
    "flash_attn_varlen_func": _dropout_by_name(adapted("flash_attn_varlen_func"), 7),
    "flash_attn_qkvpacked_func": _dropout_by_name(
        adapted("flash_attn_func", lambda qkv: qkv.unbind(2)), 1
    ),
    "flash_attn_kvpacked_func": _dropout_by_name(
        adapted("flash_attn_func", lambda q, kv: (q, *kv.unbind(2))), 2
    ),
    "flash_attn_varlen_qkvpacked_func": _dropout_by_name(
        adapted(
            "flash_attn_varlen_func", lambda qkv, at, most: (*qkv.unbind(1), at, at, most, most)
        ),
        3,
    ),
    "flash_attn_varlen_kvpacked_func": _dropout_by_name(
        adapted("flash_attn_varlen_func", lambda q, kv, *rest: (q, *kv.unbind(1), *rest)), 6
    ),
}


class InPlace(ModuleType):
    """A module with attnsweep's functions; every other function that is asked of it refuses."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in FUNCTIONS:
            return FUNCTIONS[name]
        if name.isupper():  # a setting, such as whether it is ROCm's
            return False

        def refuse(*_: Any, **__: Any) -> Any:
            raise NotImplementedError(f"attnsweep has no {name}")

        return refuse


def put_in_place(checkout: Path, file: Path) -> None:
    """Have their imports find attnsweep's functions, and helpers of tests in the checkout."""
    package = InPlace("flash_attn")
    package.__path__ = [str(checkout / "flash_attn")]
    package.__version__ = "0"
    sys.modules["flash_attn"] = package
    for name in ("flash_attn.flash_attn_interface", "flash_attn_interface"):
        sys.modules[name] = InPlace(name)
    sys.path.insert(0, str(file.parent))
    try:
        importlib.import_module("flash_attn.layers.rotary")
    except ImportError:  # it imports more than there is
        sys.modules["flash_attn.layers.rotary"] = InPlace("flash_attn.layers.rotary")


# ---- their tests ----
class Sampled:
    """A plugin of pytest: some tests in random order; what is refused is skipped and counted."""

    def __init__(self, sample: int | None, seed: int) -> None:
        self.sample, self.random = sample, random.Random(seed)
        self.refused: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.failed: list[str] = []
        self.found = 0

    @pytest.hookimpl(trylast=True)  # after --pytest=-k=… has left some out
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Leave a sample in random order: of each function as many, since one has most cases."""
        self.found = len(items)
        self.random.shuffle(items)
        count = Counter[str]()
        turn = {}
        for item in items:
            turn[item] = count[item.originalname]
            count[item.originalname] += 1
        items[:] = sorted(items, key=turn.__getitem__)[: self.sample]
        self.random.shuffle(items)

    def pytest_pyfunc_call(self, pyfuncitem: Any) -> bool:
        """Call a test; what attnsweep refuses, and what the card has no memory for, is skipped."""
        wanted = pyfuncitem._fixtureinfo.argnames
        try:
            pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in wanted})
        except NotImplementedError as error:
            why = str(error).splitlines()[0] if str(error) else "NotImplementedError"
            self.refused[why] += 1
            pytest.skip(why)
        except torch.OutOfMemoryError:
            self.refused["the card's memory is too small"] += 1
            pytest.skip("memory")
        return True

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Count how tests end."""
        if report.when == "call" or report.outcome != "passed":
            self.ended[report.outcome] += 1
        if report.failed:
            self.failed.append(report.nodeid)


def flash_attention(asked: Any) -> int:
    """Run FlashAttention's tests; 1 if one failed or none passed."""
    checkout = Path(asked.checkout).resolve()
    file = checkout / asked.file
    if not file.is_file():
        raise SystemExit(f"{file} is not there: name a clone of FlashAttention, and a --file of it")
    put_in_place(checkout, file)
    plugin, before = Sampled(asked.sample, asked.seed), Counter(attnsweep.attention_counters())
    options = f"-c {os.devnull} -p no:cacheprovider -q --tb=line -W ignore".split()
    options += [f"--rootdir={checkout}", *asked.pytest, str(file)]
    code = pytest.main(options, plugins=[plugin])
    served = Counter(attnsweep.attention_counters()) - before
    ended = plugin.ended
    refused = plugin.refused.total()
    skipped = ended["skipped"] - refused
    print(f"{ended.total()} of {plugin.found} tests, seed {asked.seed}: {ended['passed']} passed,")
    print(f"{ended['failed']} failed, {refused} refused by attnsweep, {skipped} skipped by them;")
    print(f"calls served: {dict(served)}")
    for why, count in plugin.refused.most_common():
        print(f"  {count} refused: {why}")
    for name in plugin.failed:
        print(f"  failed: {name}")
    return int(code not in (0, 5) or not ended["passed"])


# ---- PyTorch's samples ----
def samples(
    device: str, dtype: Any, seed: int
) -> Iterator[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """PyTorch's own samples of its function's arguments: query, the others, and named ones."""
    from torch.testing._internal.common_methods_invocations import op_db

    (op,) = (each for each in op_db if each.name == "nn.functional.scaled_dot_product_attention")
    torch.manual_seed(seed)
    for sample in op.sample_inputs(device, dtype, requires_grad=True):
        yield sample.input, sample.args, sample.kwargs


def double(value: Any) -> Any:
    """A tensor of numbers in float64, others as they are."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().double().requires_grad_(value.requires_grad)
    return value


def computed(attention: Callable[..., Any], query: Any, args: Any, how: Any) -> list[Any]:
    """Output and gradients of a sample's tensors."""
    leaves = [
        each for each in (query, *args, *how.values()) if getattr(each, "requires_grad", False)
    ]
    out = attention(query, *args, **how)
    direction = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, direction, allow_unused=True)]


def opinfo(asked: Any) -> int:
    """Compare attnsweep on PyTorch's samples with float64; 1 if one errs twice as PyTorch does."""
    before, counts = Counter(attnsweep.attention_counters()), Counter[str]()
    every = [
        (dtype, sample)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        for seed in range(asked.rounds)
        for sample in samples(asked.device, dtype, asked.seed + seed)
    ]
    random.Random(asked.seed).shuffle(every)
    for dtype, (query, args, how) in every:
        if how.get("dropout_p"):
            counts["dropout, which is random"] += 1
            continue
        ours = computed(attnsweep.attention, query, args, how)
        theirs = computed(F.scaled_dot_product_attention, query, args, how)
        exact = computed(
            F.scaled_dot_product_attention,
            double(query),
            [double(x) for x in args],
            {n: double(x) for n, x in how.items()},
        )
        wrong = ""
        for name, own, other, right in zip(
            ("output", "q", "k", "v", "mask"), ours, theirs, exact, strict=False
        ):
            if own is None or right is None:
                continue
            off, limit = (float((each.double() - right).norm()) for each in (own, other))
            length = float(right.norm())
            if not off <= 2 * limit + 1e-2 * torch.finfo(dtype).eps ** 0.5 * length + 1e-6:
                wrong = f"{name} is {off:.3g} off, PyTorch's {limit:.3g}, of {length:.3g}"
                break
        counts["wrong" if wrong else "right"] += 1
        if wrong:
            sizes = [
                tuple(each.shape) if isinstance(each, torch.Tensor) else each
                for each in (query, *args)
            ]
            print(f"{dtype} {sizes} {how}: {wrong}")
    served = Counter(attnsweep.attention_counters()) - before
    print(f"PyTorch's samples: {dict(counts)}; calls served: {dict(served)}")
    return int(counts["wrong"] > 0 or not counts["right"])


def main() -> int:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    of = parser.add_subparsers(required=True)
    theirs = of.add_parser("flash-attention", help="FlashAttention's tests, of a clone")
    theirs.add_argument("checkout")
    theirs.add_argument(
        "--file",
        default="tests/test_flash_attn.py",
        help="hopper/test_flash_attn.py: FlashAttention-3's",
    )
    theirs.add_argument("--sample", type=int, help="so many of its tests (default: all)")
    theirs.add_argument(
        "--pytest", nargs="*", default=[], help="more of pytest's options: --pytest=-k=causal"
    )
    theirs.set_defaults(run=flash_attention)
    pytorchs = of.add_parser("opinfo", help="PyTorch's samples of its own function")
    pytorchs.add_argument("--device", default="cuda")
    pytorchs.add_argument("--rounds", type=int, default=3, help="of other random values")
    pytorchs.set_defaults(run=opinfo)
    for each in (theirs, pytorchs):
        each.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    code: int = asked.run(asked)
    return code


if __name__ == "__main__":
    sys.exit(main())
