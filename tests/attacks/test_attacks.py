"""Each attack twice: it does not pass, and without its defence it does."""

from __future__ import annotations

import itertools
import re

import pytest

pytest.importorskip("torch")

from attacks import kernels
from attnsweep.baselines import prepare
from attnsweep.baselines.backend import Unavailable
from attnsweep.baselines.prepare import BoundBaseline
from attnsweep.bench.bench import Bench
from attnsweep.verify import compare, device_case
from attnsweep.verify.device_case import DeviceCase, WrongResult
from attnsweep.verify.verifier import Verifier


def judged(bench, name, rounds=2):
    """What a judge says of a callable: `confirmed`, or why not."""
    name = f"attacks.kernels:{name}"
    try:
        bench.add_baseline(name)
        for _ in range(rounds):
            for kind in ("warm", "cold"):
                bench.replay(name, kind)
        bench.confirm(name, 800.0)
    except (WrongResult, Unavailable) as error:
        return error.detail if isinstance(error, WrongResult) else str(error)
    return "confirmed"


# -- the defences, as what is there without them ---------------------------------------------------


def inputs_stay(patch):
    patch.setattr(Verifier, "begin", lambda self, **how: None)
    patch.setattr(Verifier, "begin_cold", lambda self, copies, **how: None)
    patch.setattr(DeviceCase, "draw", lambda self: None)


def two_contents(patch):
    """As it was: heads are negated, or not, and cold copies are equal."""
    made = DeviceCase.__init__

    def init(self, *args, **options):
        made(self, *args, **options)
        self.redraws = False

    patch.setattr(DeviceCase, "__init__", init)


def replays_unseen(patch):
    """As it was for callables: one output is judged, before the rounds."""
    patch.setattr(Verifier, "look", lambda self, proven: None)
    patch.setattr(Verifier, "end", lambda *args, **options: None)
    patch.setattr(Verifier, "repeat", lambda *args, **options: 0)


def no_limits(patch):
    patch.setattr(DeviceCase, "_refuse", lambda *args: None)


def nan_is_near(patch):
    no_limits(patch)
    found = compare.Comparer.found
    patch.setattr(
        compare.Comparer, "found", lambda self, n: [one | {"nans": 0} for one in found(self, n)]
    )
    patch.setattr(device_case, "_worst", lambda accuracy: 0.0)


def inputs_unseen(patch):
    patch.setattr(DeviceCase, "renew_inputs", lambda self, count: False)
    patch.setattr(Verifier, "repeat", lambda *args, **options: 0)


def no_contract(patch):
    patch.setattr(prepare, "breach", lambda *args: "")
    numbers = iter(range(10**6))
    patch.setattr(prepare, "memory_of", lambda tensor: next(numbers))


def no_flags(patch):
    patch.setattr(prepare, "restore_flags", lambda torch, before: [])


def judge_waits(patch):
    """The output is looked at when all threads are done."""
    collect = BoundBaseline.collect

    def later(self, copy, into):
        for thread in kernels.THREADS:
            thread.join()
        collect(self, copy, into)

    patch.setattr(BoundBaseline, "collect", later)


def last_call_alone(patch):
    series_alone(patch)
    patch.setattr(prepare.secrets, "randbelow", lambda count: count)


def series_alone(patch):
    patch.setattr(Bench, "_refuse_reuse", lambda self, entry: None)


ATTACKS = [
    ("computes_once", series_alone, "use again what one of them computed"),
    ("by_pointer", inputs_stay, "drawn anew"),
    ("by_fingerprint", inputs_stay, "drawn anew|normal"),
    ("two_answers", two_contents, "drawn anew"),
    ("of_all_copies", two_contents, "drawn anew"),
    ("one_row_late", replays_unseen, "row 8 of head 7"),
    ("knows_the_check", two_contents, "drawn anew"),
    ("window", no_limits, "relative error"),
    ("low_precision", no_limits, "relative error"),
    ("gain", no_limits, "relative error|scaled"),
    ("one_head_unwritten", nan_is_near, "NaN or were never written"),
    ("changes_inputs", inputs_unseen, "wrote to its inputs|relative error"),
    ("one_buffer", no_contract, "the same memory"),
    ("lazy", no_contract, "returned Lazy"),
    ("sets_flags", no_flags, "changed settings of PyTorch"),
    ("later", judge_waits, "relative error"),
    ("idles", last_call_alone, "drawn anew|use again"),
]


@pytest.mark.parametrize(("name", "defence", "said"), ATTACKS, ids=[a[0] for a in ATTACKS])
def test_an_attack_does_not_pass(name, defence, said, bench):
    assert re.search(said, judged(bench, name))


@pytest.mark.parametrize(("name", "defence", "said"), ATTACKS, ids=[a[0] for a in ATTACKS])
def test_an_attack_passes_without_its_defence(name, defence, said, monkeypatch, request):
    defence(monkeypatch)
    assert judged(request.getfixturevalue("bench"), name) == "confirmed"


# -- what is right, and what is no attack ----------------------------------------------------------


def test_no_replay_and_no_copy_has_inputs_that_another_had(bench):
    assert judged(bench, "recorded") == "confirmed"
    calls = kernels.MEMORY["contents"]
    bench.replay(NAME, "warm"), bench.replay(NAME, "cold")
    del calls[:]
    for kind in ("warm", "cold"):
        for _ in range(3):
            bench.replay(NAME, kind)
    replays = [[*group] for _, group in itertools.groupby(calls[: 6 * 4], key=lambda one: one[1:])]
    assert len(replays) == len({group[0][1:] for group in replays}) == 6  # warm: untimed and timed
    cold = calls[6 * 4 :]
    assert len({one[0] for one in cold}) == 4
    assert len({one[1:] for one in cold}) == len(cold) == 6 * 4


NAME = "attacks.kernels:recorded"


@pytest.mark.parametrize("name", ["honest", "waits"])
def test_a_right_callable_is_confirmed(name, bench):
    assert judged(bench, name) == "confirmed"


def test_what_no_graph_holds_is_labelled(bench):
    _, issued = bench.add_baseline("attacks.kernels:waits")
    assert issued == (
        "no CUDA graph holds its calls: attacks.kernels:waits raised RuntimeError: operation not "
        f"permitted when stream is capturing (kernels.py:{line_of('raise RuntimeError')})"
    )
    assert bench.add_baseline("attacks.kernels:honest")[1] is None


def line_of(text):
    with open(kernels.__file__) as file:
        return next(number for number, line in enumerate(file, 1) if text in line)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("raises_in_the_third_call", r"raised ValueError: not today \(kernels.py:\d+\)"),
        ("leaves", r"raised SystemExit: 0 \(kernels.py"),
        ("no_tensor", "returned list in place of a torch.Tensor"),
        ("returns_an_input", "returned memory of an input"),
        ("nothing_is_here", "cannot import attacks.kernels:nothing_is_here"),
    ],
)
def test_what_breaks_the_contract_is_a_sentence(name, said, bench):
    assert re.search(said, judged(bench, name))
    assert judged(bench, "honest") == "confirmed"  # and nothing of it is left
