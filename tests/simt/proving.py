"""Calls in Python that a Verifier on the CPU judges, and the bench that binds them to buffers."""

from dataclasses import replace

import numpy as np

from attnsweep.compile.launches import Candidate, LaunchPlan
from attnsweep.core import cases
from attnsweep.verify import backward, encoding, rounded
from attnsweep.verify.verifier import Verifier

from .device import HostBuffer

KIND = {"fp16": np.uint16, "bf16": np.uint16, "fp32": np.uint32, "bool": np.uint8, "int32": np.int32}


class Call:
    """One call bound to buffers: `write` gets the problem, the buffers, and the call's number."""

    stage_names, once_names = ("fwd",), ()

    def __init__(self, write, launches, buffers):
        self.write, self.problem, self.buffers = write, launches.problem, buffers
        self.number, self.copies = 0, []

    def enqueue(self, copy=0):
        at = self.copies[copy - 1] if copy else {}
        self.write(self.problem, {**self.buffers, **at}, self.number)
        self.number += 1

    def turn(self, copy=0, *, back=False, every=True):
        """Its tensors lie as those of a problem: see Family.order."""

    def capture(self, calls, *, after):
        def replay():
            for number in range(calls):
                self.enqueue()
                after(number)

        return replay


def inputs_in(problem, buffers):
    return {
        name: buffers[name]
        .of(np.float32 if name.endswith(("_scale", "lse", "sinks")) else KIND.get(problem.tensor(name).dtype, np.uint8))
        .reshape(problem.shape_of(name))
        for name in problem.inputs
    }


def attend(problem, buffers, number=0):
    """A right call: the rounded maths."""
    rows = np.arange(problem.seqlen_q)
    out = rounded.reference(inputs_in(problem, buffers), problem, rows, rounded.ForwardMaths(True))
    buffers["o"].upload(encoding.to_bits(out.astype(np.float32), problem.out_dtype))


def differentiate(problem, buffers, number=0):
    """A right call of a backward."""
    every = np.arange(problem.seqlen_q), np.arange(problem.seqlen_k)
    maths = (backward.BackwardMaths(rounding=True),)
    (made,) = backward.gradients(inputs_in(problem, buffers), problem, *every, maths)
    for name, values in made.items():
        buffers[name].upload(encoding.to_bits(values.astype(np.float32), problem.dtype))


def attend_with_lse(problem, buffers, number=0):
    attend(problem, buffers)
    rows = np.arange(problem.seqlen_q)
    lse = rounded.log_sum_exp(inputs_in(problem, buffers), problem, rows)
    buffers["lse"].of(np.float32)[: lse.size] = lse.ravel()


class Bench:
    """A Verifier, and the workspaces of the candidates that it is given."""

    def __init__(self, device, problem, seed=3):
        self.proof, self.problem = Verifier(problem, seed, device), problem
        self.calls = []

    def prove(self, write, *, small=False, workspaces=None, **facts):
        workspaces, lse = workspaces or {}, facts.pop("lse", False)
        own = {item: HostBuffer(item[1]) for item in workspaces.items()}

        def bind(launches, copies):
            named = {name: own[name, nbytes] for name, nbytes in launches.workspaces.items()}
            return Call(write, launches, {**copies[0], **named})

        def launches(problem):
            return LaunchPlan(problem, (), workspaces, lse=lse)

        timed = launches(self.problem)
        self.call = bind(timed, [self.proof.timed.buffers])
        checked = facts.get("cases") or cases.small_cases(self.problem)
        checks = tuple(launches(case.problem) for case in checked)
        candidate = Candidate("k", {}, timed, checks, 0, **facts)
        return self.proof.of_candidate(candidate, self.call, bind, own, small=small)

    def repeat(self, write, calls=12, **how):
        _, proven = self.prove(write, **how)
        return self.proof.repeat(proven, calls, 1e3)

    def repeat_turns(self, write, short, calls=12, **facts):
        """Prove calls on `short`, as on short turns, and repeat them."""
        timed = LaunchPlan(self.problem, (), {})
        turns = replace(timed, problem=short)

        def bind(launches, copies):
            return Call(write, launches, copies[0])

        candidate = Candidate("k", {}, timed, (), 0, turns=turns, **facts)
        self.turns = self.proof.of_turns(candidate, bind, {})
        return self.proof.repeat(self.turns, calls, 1e3)
