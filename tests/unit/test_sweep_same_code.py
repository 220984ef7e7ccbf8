"""SameCode: of candidates with the same machine code, the first asked for has the measured row."""

import itertools
from types import SimpleNamespace

import pytest
from samples import PROBLEM, once

from attnsweep.core.trial import Accuracy, Resources, Status, Trial
from attnsweep.sweep.candidates import SameCode

USED = Resources(registers=32, spill_bytes=0, smem_bytes=0, occupancy=1.0)
ORDERS = list(itertools.permutations((1, 2, 3)))
RAN = (Status.OK, Status.NOISY)


class Stub:
    """The part of a Build that same need: a name, and code that may be another one's."""

    compiled = True

    def __init__(self, name: int, code: str = "same") -> None:
        self.name, self.code = name, code
        self.kernel = SimpleNamespace(name="k")
        self.config = SimpleNamespace(label=f"A={name}")

    def machine_code(self):
        return (self.code,)

    def row(self, **facts):
        identity = {"kernel": "k", "provider": "attnsweep", "config": {"A": self.name}}
        return Trial(**identity, problem=PROBLEM, **facts)


def compiled(build):
    facts = {"resources": USED, "schedule": {"chunks": 1}, "fingerprint": f"of {build.name}"}
    return build.row(status=Status.OK, **facts)


def measured(build, status=Status.OK):
    return compiled(build).with_(
        status=status,
        detail="quartiles" if status is Status.NOISY else None,
        accuracy=Accuracy(rel_err=1e-4, limit=1e-3),
        time_us=once(7.0),
        first_us=7.0,
        stages_us={"one": 3.0},
        launch_us=1.0,
    )


def result_of(asked, ready):
    """Rows by name if candidates are asked for and compiled in these orders, and who ran."""
    builds = {name: Stub(name) for name in asked}
    same, rows, ran = SameCode(), {}, []
    same.asked([builds[name] for name in asked[:2]])
    same.asked([builds[name] for name in asked])
    for build in (builds[name] for name in ready):
        if same.of(build) is None:
            row = measured(build)
            rows[build.name] = row
            ran.append(build.name)
        else:
            for of, row in same.replace(build, compiled(build)):
                rows[of.name] = row
        same.add(build, row)
    return rows, ran


@pytest.mark.parametrize("asked", ORDERS)
@pytest.mark.parametrize("ready", ORDERS)
def test_the_order_of_asking_decides_and_only_one_runs(asked, ready):
    rows, ran = result_of(asked, ready)
    assert ran == [ready[0]]
    assert [name for name, row in rows.items() if row.status is Status.OK] == [asked[0]]
    heir = rows[asked[0]]
    assert (heir.time_us.median, heir.first_us, heir.stages_us) == (7.0, 7.0, {"one": 3.0})
    assert heir.fingerprint == f"of {asked[0]}"
    for name in asked[1:]:
        assert rows[name].status is Status.PRUNED
        assert rows[name].time_us is None
        assert rows[name].detail.startswith("same machine code as k A=")


def test_who_ran_and_lost_its_place_keeps_its_code_and_first_time_and_nothing_else():
    """An earlier run may have left it with rounds, a race, and the state of the card."""
    first, second = Stub(1), Stub(2)
    same = SameCode()
    same.asked([first, second])
    finalist = measured(second).with_(
        warm_us=7.0, cold_us=8.0, eager_us=2.0, race={"rounds": 4}, conditions={"sm_mhz": 1980}
    )
    same.add(second, finalist)
    (of, left), (heir_of, heir) = same.replace(first, compiled(first))
    assert (of, heir_of) == (second, first)
    detail = "same machine code as k A=1"
    assert left == compiled(second).with_(status=Status.PRUNED, detail=detail, first_us=7.0)
    assert heir == measured(first)
    assert same.of(second) == (first, heir)


@pytest.mark.parametrize("status", [s for s in Status if s not in RAN], ids=str)
def test_who_did_not_run_stands_for_nobody(status):
    same = SameCode()
    same.add(Stub(1), compiled(Stub(1)).with_(status=status))
    assert same.of(Stub(2)) is None
