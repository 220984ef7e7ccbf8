"""Which of the ordinary tests find a seeded bug: python -m tests.simt.found_by [NAME ...].

A bug of mutations.toml has a config and a case of its own. Here it meets those of the other tests:
first what every push runs, then what only the night does. Prints the first that finds it, and at
the end how many each finds. Without names: all bugs of the three Hopper families that are not said
to be missed, which takes half an hour.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator

from attnsweep.core.cases import Case, small_cases
from attnsweep.family.family import Config

from . import runs as ordinary
from . import shapes
from .harness import SimtError, Simulator, sources
from .mutations import MUTATIONS, mutated
from .recorded import winners
from .runs import KERNELS

FAMILIES = ("flash_fwd_fp8_wgmma", "flash_fwd_wgmma", "three_kernel_wgmma")


def runs(family: str) -> Iterator[tuple[str, str, Config, Iterable[Case]]]:
    """When, name, config and cases of each test of the family."""
    later = []
    for name, (kernel, problem, which) in ordinary.RUNS.items():
        if kernel.name != family:
            continue
        config = ordinary.config_for(kernel, problem, which)
        if ordinary.is_unusual(name):
            every = (*shapes.cases(problem, config), *small_cases(problem)[2:4])
            if ordinary.is_of_each_push(name):
                yield "push", name, config, every
            else:
                later.append(("night", name, config, every))
        else:
            yield "push", name, config, ordinary.cases(problem)
    yield from later
    for each in winners(KERNELS):
        if each.kernel == family:
            name = f"{each.run} {each.problem.label}"
            yield "night", name, each.config, shapes.cases(each.problem, each.config)


def found_by(simulator: Simulator, name: str) -> tuple[str, str]:
    """When, and by which test, the bug is found first."""
    bug = MUTATIONS[name]
    family, stage = bug["stage"].split(".")
    kernel = KERNELS[family]
    changed = {stage: mutated(sources(kernel), bug)}
    for when, run, config, cases in runs(family):
        for case in cases:
            try:
                found = simulator.check(kernel, config, case, changed=changed)
            except SimtError:
                return when, f"{run}, {case.label}"
            if not found.ok:
                return when, f"{run}, {case.label}"
    return "never", "none of them"


def main() -> None:
    """Ask for the bugs that the command names."""
    wanted = sys.argv[1:] or [
        name for name, bug in MUTATIONS.items() if bug["stage"].startswith(FAMILIES) and "missed" not in bug
    ]
    count: Counter[str] = Counter()
    with Simulator(1) as simulator:
        for name in wanted:
            when, run = found_by(simulator, name)
            count[when] += 1
            print(f"{when:6} {name}: {run}", flush=True)
    print(", ".join(f"{when}: {number}" for when, number in sorted(count.items())))


if __name__ == "__main__":
    main()
