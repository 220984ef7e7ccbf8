"""What a graph of a stranger's calls must not hold."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_graphs import FakeGraphs

from attnsweep.device import graph_audit


def why_not(*calls):
    """Of a graph of these calls, one after the other, each of which gets the graph."""
    graphs = FakeGraphs()
    graphs.add()  # what the judge does before them
    audit = graph_audit.Audit(graphs, 7)
    for call in calls:
        audit.mark()
        call(graphs)
        audit.mark()
        graphs.add(kind=1)
    return audit.why_not()


def kernels(graphs):
    for kind in (2, 0, 1, 0):
        graphs.add(kind)


def two_streams(graphs):
    begun, side = graphs.add(), []
    for _ in range(2):
        side = [graphs.add(after=side or [begun])]
    graphs.add()
    graphs.last += side  # which its stream waits for


def overlapping_itself(graphs):
    graphs.add()
    graphs.add(early=True)


def nothing(graphs):
    """It launches nothing."""


def a_graph(*kinds):
    return lambda graphs: graphs.add(4, inside=kinds)


@pytest.mark.parametrize("call", [kernels, two_streams, overlapping_itself, nothing, a_graph(0, 1, 2)])
def test_work_of_the_device_in_series_may_be_there(call):
    assert why_not(call, call, kernels) == ""


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (3, "a host function"),
        (6, "a wait for an event"),
        (7, "a record of an event"),
        *((kind, f"a node of kind {kind}") for kind in (8, 9, 12, 13, 99)),
    ],
)
def test_other_nodes_may_not(kind, said):
    for call in (lambda graphs: graphs.add(kind), a_graph(0, kind)):
        assert why_not(kernels, call) == f"its graph holds {said}"


def goes_on(graphs):
    begun = graphs.add()
    graphs.add(after=[begun])  # nothing waits for it


def begins_early(graphs):
    graphs.last.append(graphs.add(after=[1]))  # right behind the first node of all


def begins_at_once(graphs):
    graphs.last.append(graphs.add(after=[]))


def overlaps_the_one_before(graphs):
    graphs.add(early=True)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (goes_on, "work of one of its calls goes on beside the next"),
        (begins_early, "work of one of its calls begins before the one before it ends"),
        (begins_at_once, "work of one of its calls begins before the one before it ends"),
        (overlaps_the_one_before, "one of its calls may begin before the one before it ends"),
    ],
)
def test_calls_may_not_overlap(call, said):
    assert why_not(kernels, call, kernels) == said


def test_a_side_stream_that_waits_for_the_call_before_last_begins_early():
    ends = []

    def call(graphs):
        graphs.add()
        ends.append(graphs.last[0])

    def last(graphs):
        graphs.last.append(graphs.add(after=[ends[0]]))

    assert why_not(call, call, last).endswith("begins before the one before it ends")


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a driver")
def test_a_machine_without_a_driver_has_no_graphs():
    assert graph_audit.driver() is None
