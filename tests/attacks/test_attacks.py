"""Each attack twice: it does not pass, and without its defence it does."""

import itertools
import re

import pytest
from fake_graphs import FakeGraphs

pytest.importorskip("torch")

from attacks import kernels
from attacks.strict_bench import said_of
from attnsweep.baselines import prepare
from attnsweep.baselines.backend import Unavailable
from attnsweep.baselines.prepare import BoundBaseline
from attnsweep.bench.entries import CallableEntry
from attnsweep.core.user_code import BoundFunction
from attnsweep.device import graph_audit
from attnsweep.verify import compare, device_case
from attnsweep.verify.device_case import DeviceCase, WrongResult
from attnsweep.verify.verifier import Verifier

# Each starts processes that import PyTorch: too many for a push.
pytestmark = pytest.mark.nightly(push=12, of="attacks")


def judged(bench, name, rounds=2, kinds=("warm", "cold")):
    """What a judge says of a callable: `confirmed`, or why not."""
    name = f"attacks.kernels:{name}"
    try:
        bench.add_baseline(name)
        for _ in range(rounds):
            for kind in kinds:
                bench.replay(name, kind)
        bench.confirm(name, 800.0)
    except (WrongResult, Unavailable) as error:
        return error.detail if isinstance(error, WrongResult) else str(error)
    return "confirmed"


# -- the defences, as what is there without them ---------------------------------------------------


def no_hard_inputs(patch):
    patch.setattr(Verifier, "hard", lambda self, often: None)


def inputs_stay(patch):
    no_hard_inputs(patch)
    patch.setattr(Verifier, "begin", lambda self, *proven, **how: None)
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
    no_hard_inputs(patch)
    patch.setattr(Verifier, "look", lambda self, proven, copies=(): None)
    patch.setattr(Verifier, "end", lambda *args, **options: 0)
    patch.setattr(Verifier, "repeat", lambda *args, **options: 0)


def no_limits(patch):
    patch.setattr(DeviceCase, "_refuse", lambda *args: None)


def nan_is_near(patch):
    no_limits(patch)
    found = compare.Comparer.found
    patch.setattr(compare.Comparer, "found", lambda self, n: [one | {"nans": 0} for one in found(self, n)])
    patch.setattr(device_case, "_worst", lambda accuracy: 0.0)


def inputs_unseen(patch):
    no_hard_inputs(patch)
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

    def later(self, *how):
        for thread in kernels.THREADS:
            thread.join()
        return collect(self, *how)

    patch.setattr(BoundBaseline, "collect", later)


def last_call_alone(patch):
    patch.setattr(prepare, "_chosen", lambda calls, room: [])


def last_call_alone_in_any_time(patch):
    last_call_alone(patch)
    series_alone(patch)


def lse_unseen(patch):
    patch.setattr(DeviceCase, "_refuse_lse", lambda *args: None)


def what_was_returned(patch):
    patch.setattr(BoundFunction, "_written", lambda self, made, into: made)


def series_alone(patch):
    patch.setattr(CallableEntry, "_refuse_reuse", lambda self: None)


ATTACKS = [
    ("computes_once", series_alone, "use again what one of them computed"),
    ("by_pointer", inputs_stay, "drawn anew"),
    ("by_fingerprint", inputs_stay, "drawn anew|normal"),
    ("two_answers", two_contents, "drawn anew"),
    ("of_all_copies", two_contents, "drawn anew"),
    ("one_row_late", replays_unseen, "row 8 of head 3"),
    ("knows_the_check", two_contents, "drawn anew"),
    ("window", no_limits, "relative error"),
    ("low_precision", no_limits, "relative error"),
    ("gain", no_limits, "relative error|scaled"),
    ("one_head_unwritten", nan_is_near, "NaN or were never written"),
    ("changes_inputs", inputs_unseen, "wrote to its inputs|relative error"),
    ("writes_beside_inputs", inputs_unseen, "wrote to its inputs, or next to them"),
    ("one_buffer", no_contract, "the same memory"),
    ("lazy", no_contract, "returned Lazy"),
    ("sets_flags", no_flags, "changed settings of PyTorch"),
    ("sets_flags_later", no_flags, "changed settings of PyTorch: backends.cuda.matmul.allow_tf32"),
    ("later", judge_waits, "relative error"),
    ("idles", last_call_alone_in_any_time, "drawn anew|use again"),
    ("idles_once", last_call_alone, "drawn anew"),
    ("two_buffers", last_call_alone, "the same memory"),
    ("every_other", series_alone, "use again what one of them computed"),
    ("by_content", series_alone, "use again what one of them computed"),
    ("in_a_file", inputs_stay, "drawn anew|normal"),
    ("smoothed", inputs_stay, "drawn anew"),
    ("with_lse_of_before", lse_unseen, "log-sum-exp off by"),
    ("with_log2", lse_unseen, "log-sum-exp off by"),
    ("zeros", no_limits, "relative error"),
    ("mean_of_values", no_limits, "relative error"),
    ("swapped_heads", no_limits, "relative error"),
    ("coarse", no_limits, "relative error"),
    ("without_a_maximum", no_hard_inputs, "NaN .*9x20.*, huge_scores, drawn anew"),
    ("low_rank", no_limits, "relative error"),
    ("sloppy_where_it_is_easy", no_limits, "relative error"),
    ("half_of_the_rows", no_limits, "relative error"),
    ("returns_another", what_was_returned, "a parameter out, and returned another one"),
    ("a_parameter", no_contract, "returned Parameter"),
    ("sets_the_default", no_flags, "changed settings of PyTorch: default dtype"),
]


@pytest.mark.parametrize(("name", "defence", "said"), ATTACKS, ids=[a[0] for a in ATTACKS])
def test_an_attack_does_not_pass(name, defence, said, bench):
    assert re.search(said, judged(bench, name))


@pytest.mark.parametrize(("name", "defence", "said"), ATTACKS, ids=[a[0] for a in ATTACKS])
def test_an_attack_passes_without_its_defence(name, defence, said, monkeypatch, request):
    defence(monkeypatch)
    assert judged(request.getfixturevalue("bench"), name) == "confirmed"


def test_a_kernel_that_counts_its_calls_does_not_know_which_are_looked_at(bench, monkeypatch):
    last_call_alone(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "_OUT_OF_STEP", 1)
        names = [f"idle_{place}" for place in range(8)]
        passes = [one for one in names if judged(bench, one, 3, kinds=("warm",)) == "confirmed"]
    assert passes
    assert re.search("drawn anew", judged(bench, passes[0], 100, kinds=("warm",)))


@pytest.mark.parametrize(
    ("name", "hints"),
    [
        ("without_scale", ["it is what no scale gives"]),
        ("zeros", []),
        ("one_head_unwritten", ["of the first item only these heads are wrong, in the rows looked at: 0"]),
    ],
)
def test_what_is_wrong_has_hints_where_to_look(name, hints, bench):
    with pytest.raises(WrongResult) as error:
        bench.add_baseline(f"attacks.kernels:{name}")
    assert error.value.accuracy.hints == hints


@pytest.mark.parametrize("make", ["opened", "make_strict"])
def test_what_is_over_a_limit_is_shown_as_a_baseline_and_what_is_worse_later_is_wrong(make, request):
    open_bench, names = request.getfixturevalue(make), ["attacks.kernels:gain", "attacks.kernels:drops_all"]
    bench = open_bench(shown=names)
    accuracy, _ = bench.add_baseline(names[0])
    assert max(accuracy.shares.values()) > 1
    bench.replay(names[0], "warm")
    assert bench.confirm(names[0], 800.0)
    assert "relative error" in said_of(bench, names[1], 2)


# -- what a graph holds: see test_device_graph_audit.py --------------------------------------------


def audited(bench, name, patch):
    kernels.MEMORY["graphs"] = graphs = FakeGraphs()
    patch.setattr(graph_audit, "driver", lambda: graphs)
    return judged(bench, name)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("of_kernels", "confirmed"),
        ("of_the_host", "its graph holds a host function"),
        ("goes_on_beside", "work of one of its calls goes on beside the next"),
    ],
)
def test_a_graph_holds_work_of_the_device_in_series(name, said, bench, monkeypatch):
    assert audited(bench, name, monkeypatch) == said


@pytest.mark.parametrize("name", ["of_the_host", "goes_on_beside"])
def test_another_graph_passes_without_the_audit(name, bench, monkeypatch):
    monkeypatch.setattr(graph_audit.Audit, "why_not", lambda self: "")
    assert audited(bench, name, monkeypatch) == "confirmed"


# -- what is right, and what is no attack ----------------------------------------------------------


def test_no_replay_and_no_copy_has_inputs_that_another_had(bench):
    assert judged(bench, "recorded") == "confirmed"
    calls = kernels.MEMORY["contents"]
    bench.replay(NAME, "warm"), bench.replay(NAME, "cold")
    del calls[:]
    for _ in range(3):
        bench.replay(NAME, "warm")
    warm = [content for content, _ in itertools.groupby(one[1:] for one in calls)]
    # A timed replay has others than before; the untimed one before it, and what is called to be out
    # of step, have those of the timed one before.
    assert len(warm) == len({*warm}) == 3 + 1
    del calls[:]
    for _ in range(3):
        bench.replay(NAME, "cold")
    assert len({one[0] for one in calls}) == 4
    assert len({one[1:] for one in calls}) == (3 + 1) * 4


NAME = "attacks.kernels:recorded"


def of_long_calls(name, patch, request):
    for module in ("attnsweep.bench.timer", "attnsweep.verify.calls"):
        patch.setattr(f"{module}.is_long", lambda problem: True)
    return judged(request.getfixturevalue("bench"), name)


@pytest.mark.parametrize("name", ["two_answers", "knows_the_check"])
def test_an_attack_does_not_pass_where_calls_are_long(name, monkeypatch, request):
    assert "drawn anew" in of_long_calls(name, monkeypatch, request)


@pytest.mark.parametrize("name", ["two_answers", "knows_the_check"])
def test_it_passes_there_without_inputs_drawn_anew(name, monkeypatch, request):
    two_contents(monkeypatch)
    assert of_long_calls(name, monkeypatch, request) == "confirmed"


def test_what_is_right_is_confirmed_where_calls_are_long(monkeypatch, request):
    assert of_long_calls("honest", monkeypatch, request) == "confirmed"


def cold_us(bench):
    """The time of a call in a short replay, each on its own copy, after an untimed replay."""
    bench.add_baseline(name := "attacks.kernels:by_content")
    return bench.race(name, 1.0, "cold")[0]


def test_what_the_untimed_replay_computed_saves_nothing(bench):
    assert cold_us(bench) > 95


def test_what_the_untimed_replay_computed_would_do_on_its_inputs(monkeypatch, request):
    two_contents(monkeypatch)
    assert cold_us(request.getfixturevalue("bench")) < 10


def test_all_calls_of_a_replay_are_judged_and_counted(bench):
    name = "attacks.kernels:honest"
    bench.add_baseline(name)
    assert bench.confirm(name, 800.0) > (alone := bench.confirm(name, 800.0))  # in a new process
    for _ in range(3):
        bench.replay(name, "warm")
    assert bench.confirm(name, 800.0) == alone + 3 * 4


@pytest.mark.parametrize("name", ["honest", "waits", "with_lse", "writes", "forks", "turned?layout=bshd"])
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
        ("nothing", "returned NoneType in place of a torch.Tensor"),
        ("no_outputs", "returned an empty tuple"),
        ("three_outputs", "returned 3 outputs, not 1"),
        ("an_lse_of_half", "returned torch.float16 on cpu, not torch.float32 on cpu"),
        ("two_shapes", r"returned the shape \(2, 2, 8, 16\), not \(2, 2, 9, 16\)"),
        ("another_dtype", "returned torch.float32 on cpu, not torch.bfloat16 on cpu"),
        ("elsewhere", "returned torch.bfloat16 on meta, not torch.bfloat16 on cpu"),
        ("is_sparse", "returned a tensor of layout torch.sparse_coo"),
        ("sometimes_more", "returned more outputs in some calls than in others"),
        ("wants_more", r"raised TypeError: wants_more\(\) missing 1 required positional"),
        ("interrupts", "raised KeyboardInterrupt"),
        ("raises_what_cannot_be_said", "raised Mute"),
        ("hides_where_it_raises", "raised Placeless: somewhere .kernels.py:"),
        ("out_of_memory", "raised RuntimeError"),
        ("writes_less", "NaN or were never written|relative error"),
        ("waits?graph=true", "no CUDA graph holds its calls: attacks.kernels:waits"),
        ("nothing_is_here", "cannot import attacks.kernels:nothing_is_here"),
    ],
)
def test_what_breaks_the_contract_is_a_sentence(name, said, bench):
    assert re.search(said, judged(bench, name))
    assert judged(bench, "honest") == "confirmed"  # and nothing of it is left
