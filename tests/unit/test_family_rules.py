"""A rule is asked once for all configs that it cannot tell apart; the answers are the same."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnsweep.core.errors import KernelError
from attnsweep.core.hardware import ARCHS
from attnsweep.core.layouts import EXAMPLES
from attnsweep.core.ops import OPS
from attnsweep.core.problem import Problem
from attnsweep.family.chunks import is_used
from attnsweep.family.discover import discover
from attnsweep.family.family import BLOCK_LIMITS, Config, Family, Launch, Param
from attnsweep.family.rules import refused
from attnsweep.family.space import Selection, Space
from attnsweep.tools.coverage import as_served

PROBLEM = Problem(1, 2, 2, 64, 64, 64)
ARCH = ARCHS["sm_90a"]
VALUES = {"A": (0, 1, 2), "B": (True, 2, 3), "C": ("x", "y")}


def kernel_of(*rules):
    params = tuple(Param(name, values, "") for name, values in VALUES.items())
    kernel = Family("toy", summary="", params=params)
    for number, rule in enumerate(rules):
        kernel.rule("a rule")(rule)
        kernel.rules[f"rule{number}"] = kernel.rules.pop(rule.__name__)
    kernel.stage("fwd")(lambda c, p, a: Launch("toy", (1, 1, 1), 32 if c.A < 2 else 2048, ()))
    return kernel


def asked_one_by_one(kernel, values=VALUES):
    return [
        kernel.refused_by(Config(dict(zip(values, combination, strict=True))), PROBLEM, ARCH)
        for combination in itertools.product(*values.values())
    ]


def table_rule(table, ways):
    """A rule that reads parameters in an order that depends on what it has read."""

    def rule(config, problem, arch):
        read = ()
        for way in ways:
            name = "ABC"[(way + "".join(map(str, read)).count("2")) % 3]
            value = config[name] if way % 2 else getattr(config, name)
            read += (value,)
        return table.get(read, True)

    return rule


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 5), max_size=3),
            st.dictionaries(
                st.lists(st.sampled_from([0, 1, 2, 3, True, "x", "y"]), max_size=3).map(tuple),
                st.booleans(),
                max_size=12,
            ),
        ),
        max_size=3,
    )
)
def test_the_answers_are_those_of_asking_one_by_one(rules):
    kernel = kernel_of(*(table_rule(table, ways) for ways, table in rules))
    assert list(refused(kernel, PROBLEM, ARCH, VALUES)) == asked_one_by_one(kernel)


@pytest.mark.parametrize(
    "rule",
    [
        lambda c, p, a: len({**c}) == 3 and c["A"] + len(c["C"]) < 3,
        lambda c, p, a: dict(c) != {"A": 1, "B": 2, "C": "y"},
        lambda c, p, a: hash(c) != hash(Config({"A": 1, "B": 3, "C": "x"})),
        lambda c, p, a: c != Config({"A": 0, "B": 3, "C": "x"}),
        lambda c, p, a: "A=1" not in c.label,
        lambda c, p, a: c.get("D", 7) == 7 and c.get("B") != 3,
        lambda c, p, a: "B" in c and max(v for v in c.values() if not isinstance(v, str)) < 3,
    ],
    ids=["unpacked", "dict", "hash", "equal", "label", "get", "values"],
)
def test_however_a_rule_reads_a_config(rule):
    kernel = kernel_of(rule)
    expected = asked_one_by_one(kernel)
    assert {None, "rule0"} <= set(expected)
    assert list(refused(kernel, PROBLEM, ARCH, VALUES)) == expected


def test_an_error_names_the_config_that_is_first_in_order():
    kernel = kernel_of(lambda c, p, a: c.C == "x" or c.B < 3, lambda c, p, a: 1 // (2 - c.B) < 5)
    with pytest.raises(KernelError) as one:
        asked_one_by_one(kernel)
    with pytest.raises(KernelError) as other:
        list(refused(kernel, PROBLEM, ARCH, VALUES))
    assert other.value.render() == one.value.render()
    assert "config A=0 B=2 C=x" in one.value.hint


def test_a_rule_that_guards_a_later_one_still_does():
    kernel = kernel_of(lambda c, p, a: c.B != 2, lambda c, p, a: 1 // (2 - c.B) < 5)
    assert list(refused(kernel, PROBLEM, ARCH, VALUES)) == asked_one_by_one(kernel)


SHIPPED = discover()


@pytest.mark.nightly(push=10)
@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("causal", [False, True])
def test_the_shipped_families_have_the_same_space(name, causal):
    kernel = SHIPPED[name]
    dim = kernel.some_head_dims[0]
    dtype = kernel.dtypes[0]
    op = OPS[kernel.ops[0]]
    layout = EXAMPLES[kernel.layouts[0]]
    problem = Problem(1, 8, 8, 512, 512, dim, dtype=dtype, causal=causal, op=op, layout=layout)
    problem = as_served(kernel, problem)
    # Every second value of long lists: asking one by one takes 40 µs a config.
    values, left = {}, 4000
    for param in kernel.params:
        own = param.on(ARCH)
        values[param.name] = own if left >= len(own) else own[:1]
        left //= len(values[param.name])
    values |= {"CHUNK_HEADS": (0, 4)} if len(kernel.stages) > 1 else {}
    space = Space.build(kernel, problem, ARCH, Selection(values))
    kept, removed = [], dict.fromkeys(space.removed, 0)
    for combination in itertools.product(*values.values()):
        config = Config(dict(zip(values, combination, strict=True)))
        used = "CHUNK_HEADS" not in values or is_used(config, problem)
        by = kernel.refused_by(config, problem, ARCH) if used else "chunks_are_used"
        if by is None:
            kept.append(config)
        else:
            removed[by] += 1
    assert list(space.configs) == kept
    assert space.removed == removed
    assert BLOCK_LIMITS in removed
