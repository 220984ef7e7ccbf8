"""Commands that judge what is right: `judge` and `verify`."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from rich.text import Text

from attnsweep.cli import completion, options
from attnsweep.cli.app import FIND, GUARD, command, print_result, refuse_idle
from attnsweep.cli.options import option
from attnsweep.core.errors import KernelError, SpecError, ToolchainError
from attnsweep.reports import terminal
from attnsweep.reports.terminal import ProgressForm, counted, errors

if TYPE_CHECKING:
    from attnsweep.core.cases import Case
    from attnsweep.core.problem import Problem
    from attnsweep.family.family import Config, Family


class Role(StrEnum):
    """The role in which a callable is judged: candidate or baseline."""

    CANDIDATE = "candidate"
    BASELINE = "baseline"


@command(FIND)
def judge(
    name: Annotated[str, typer.Argument(show_default=False)],
    shapes: Annotated[
        list[str], typer.Argument(show_default=False, autocompletion=completion.tables)
    ],
    causal: options.Causal = False,
    backward: bool = False,
    dtype: str = "fp16",
    against: str | None = None,
    strict: bool = False,
    role: Annotated[
        Role,
        option("baseline: time it even if it is over a limit of error, as libraries are.", "--as"),
    ] = Role.CANDIDATE,
    rounds: Annotated[int, typer.Option(min=3)] = 15,
    timeout_s: Annotated[float, typer.Option(min=1)] = 30.0,
    json_: options.Json = False,
    form: options.Progress = ProgressForm.AUTO,
    wait: options.Wait = False,
) -> None:
    """Judge CALLABLE on each SHAPE: a verdict, its reason, and its time beside the baselines.

    Outputs of each timed replay are compared with float64, on inputs that no call before has seen.
    Exit code: 0 all confirmed; 1 one is wrong or refused; 2 it cannot be imported; 3 there is no
    GPU; 4 one is unconfirmed. It runs with your rights, with --strict too: judge code that you
    would run.

    :name CALLABLE: MODULE:FUNCTION or FILE.py:FUNCTION, called as f(q, k, v, problem=problem) with
        CUDA tensors (batch, heads, seqlen, head_dim); it returns o.
    :shapes SHAPE: batch,heads,seqlen,head_dim and what `tune` takes beside it, or a CSV file.
    :--backward: Judge gradients: f(q, k, v, o, lse, do) returns (dq, dk, dv).
    :--dtype: Dtype of every shape that does not name one.
    :--against NAMES: Baselines, separated by commas; other callables too (default: all).
    :--strict: Call it in a process of its own that owns nothing of the judge, each call on inputs
        that follow from the output before; a clock outside confirms its times.
    :--rounds: Rounds in which all take turns.
    :--timeout-s: Seconds that a step of it may take.

    $ attnsweep judge my_kernels.py:forward 4,32,4096,128 --causal --dtype bf16
    $ attnsweep judge my_package.attention:forward 1,16,1024,64 2,8,512,128 --json
    $ attnsweep judge my_kernels.py:forward 4,32,4096,128 --against torch_cudnn,flex
    $ attnsweep judge written_by_a_model.py:forward 4,32,4096,128 --strict --json
    """
    from dataclasses import asdict, replace

    from attnsweep.core.callables import CALLABLE
    from attnsweep.core.ops import BACKWARD
    from attnsweep.device import process
    from attnsweep.reports import progress
    from attnsweep.specs.model import BASELINES, KNOWN_BASELINES
    from attnsweep.specs.shapes import read_dtype, read_shapes
    from attnsweep.specs.yaml_file import nearest
    from attnsweep.tools import judge as tool

    problems = read_shapes(shapes, dtype=read_dtype(dtype, "--dtype"), causal=causal)
    if backward:
        problems = [replace(problem, op=BACKWARD) for problem in problems]
    names = BASELINES if against is None else tuple(filter(None, against.split(",")))
    for other in names:
        if other not in KNOWN_BASELINES and CALLABLE.fullmatch(other) is None:
            raise SpecError(
                f"unknown baseline {other!r}", where="--against", hint=nearest(other, BASELINES)
            )
    how: dict[str, Any] = {"against": names, "strict": strict, "role": role.value}
    how |= {"rounds": rounds, "timeout_s": timeout_s, "wait": wait}
    if strict:
        process.keep_out()
    with progress.watch(errors, form) as observer:
        verdicts = [tool.judge(name, each, observer=observer, **how) for each in problems]
    facts = [asdict(verdict) for verdict in verdicts]
    lines = [line for verdict in verdicts for line in (verdict.sentence, verdict.next)]
    print_result(lines, facts if len(facts) > 1 else facts[0], json_)
    raise typer.Exit(max((v.exit_code for v in verdicts), key=(0, 4, 1).index))


@command(GUARD)
def verify(
    context: typer.Context,
    kernel: Annotated[Path, typer.Argument(autocompletion=completion.families)],
    config: Annotated[list[str] | None, typer.Argument()] = None,
    problem: list[str] | None = None,
    head_dim: int | None = None,
    dtype: str | None = None,
    causal: bool = False,
    inputs: str = "normal",
    arch: Annotated[str, options.arch("One of {}.")] = "sm_90a",
    seeds: Annotated[int, typer.Option(min=0)] = 0,
    asan: bool = False,
    every: Annotated[bool, option("Run every config that the rules keep.", "--all")] = False,
    json_: options.Json = False,
) -> None:
    """Run a kernel on the CPU, without a GPU, and report what is wrong.

    A template, which needs g++, runs thread by thread; a callable of yours, FILE.py:FUNCTION as
    `judge` calls it, runs its Triton kernels in Triton's interpreter, which computes in fp16 and
    fp32, and shows neither races nor what is slow.

    Finds results over the limits of error; in a template also reads and writes out of bounds, with
    buffer, line, block and lane, deadlocks, races between threads, and barriers and copies that are
    used wrongly; in a callable writes to inputs, and the line that raised. Of each kind the first
    finding is a paragraph; the last lines count its cases, or list them (-v). The exit code is 1 if
    there is one, 2 if a kernel cannot be built. It times nothing, and sees no PTX: a pass is no run
    on a GPU.

    One config runs the small cases of every dtype, mask, layout and change of scores that the
    declaration has, with one head_dim. The last lines say what ran and what did not.

    :kernel KERNEL: A shipped family, a declaration (NAME.py), a directory of them, or a callable.
    :config CONFIG: NAME=VALUE …; others have their first value that the rules keep.
    :--problem SHAPE: In place of the small cases; may be repeated.
    :--head-dim: head_dim of the small cases (default: 64, or its least).
    :--dtype: dtype of the small cases (default: all that it has; with --problem its first).
    :--causal: Mask every shape (default: the small cases have all of its masks).
    :--inputs: Inputs of --problem: normal, large_scores and so on.
    :--seeds: Random schedules, besides the three fixed ones.
    :--asan: Build with g++'s address sanitizer; slower.

    $ attnsweep verify naive
    $ attnsweep verify mine.py BLOCK_M=64 --causal --dtype bf16
    $ attnsweep verify mine --problem 1,2/1,97x161,64 --asan --seeds 8
    $ attnsweep verify attend.py:attention BLOCK_M=64 --causal
    """
    from attnsweep.compile.calls import SAY_SO
    from attnsweep.core.callables import CALLABLE, Asked
    from attnsweep.core.errors import SpecError
    from attnsweep.core.hardware import arch_named
    from attnsweep.family.discover import families_at
    from attnsweep.tools import coverage, simulator
    from attnsweep.tools.interpret import Interpreter

    made: Any
    if called := CALLABLE.fullmatch(str(kernel)):
        refuse_idle(context, ("seeds", "asan"), "with a callable")
        if Asked.of(str(kernel)).factory:
            hint = "judge it on a GPU: attnsweep judge CALLABLE SHAPE"
            raise SpecError("the interpreter runs no kernels that a factory builds", hint=hint)
        made = Interpreter(str(kernel), arch_named(arch))
        configs_of = made.configs
    elif simulator.COMPILER is None:
        raise ToolchainError("g++ is not installed", hint="apt install g++, or conda install gxx")
    else:
        made = simulator.Simulator()
        configs_of = partial(coverage.configs_of, arch=arch_named(arch))
    how: dict[str, Any] = {"arch": arch_named(arch), "asan": asan}
    how["schedules"] = range(len(simulator.SCHEDULES) + seeds)
    findings: list[dict[str, str]] = []
    kinds: dict[str, list[tuple[str, dict[str, str]]]] = {}
    covered: list[dict[str, Any]] = []
    ran, begin = Counter[tuple[str, str]](), time.monotonic()
    with made as machine, ThreadPoolExecutor(os.cpu_count() if called else 1) as pool:
        families = [machine.family] if called else families_at(kernel)
        for family in families:
            why = machine.refusal if called else None
            asked = _runs(family, problem or (), head_dim, dtype, causal, inputs, why)
            runs, others = _configs(family, " ".join(config or ()), asked, configs_of, every)
            for chosen, cases in runs:
                ran.update((family.name, coverage.form(case)) for case in cases)
                who = {"kernel": family.name, "config": chosen.label}
                said = pool.map(partial(_finding, machine, family, chosen, how), cases)
                for case, finding in zip(cases, said, strict=True):
                    if finding is None:
                        continue
                    if called and not findings:  # whoever must say so need not wait for the rest
                        errors.print(Text(SAY_SO), soft_wrap=True)
                    found = who | {"case": case.label, "finding": finding}
                    findings.append(found)
                    alike = kinds.setdefault(_kind(found), [])
                    alike.append((coverage.form(case), found))
                    if len(alike) == 1 and not json_:
                        first = f"{' '.join(filter(None, who.values()))}: {case.label}:"
                        print_result([f"{first}\n{finding}\n"], None, False)
            covered.append(_coverage(family, runs, others))
    number, whole = counted(len(findings), "finding"), counted(ran.total(), "case")
    last = f"{number} in {whole} of {counted(len(families), 'kernel')}"
    if json_:
        print_result([], {"cases": ran.total(), "findings": findings, "coverage": covered}, True)
    for alike in () if json_ else kinds.values():
        if len(alike) > 1:
            print_result([*_alike(alike, ran), ""], None, False)
    for each in covered:
        for line in _covered_lines(each):
            errors.print(Text(line), soft_wrap=True)
    errors.print(Text(f"{last}, {time.monotonic() - begin:.1f} s on the CPU"), soft_wrap=True)
    raise typer.Exit(1 if findings else 0)


def _alike(
    alike: Sequence[tuple[str, dict[str, str]]], ran: Counter[tuple[str, str]]
) -> Iterator[str]:
    """A line for each form of the cases of one kind of finding: how many, and one of them.

    ran: how many cases of each kernel and form ran. With --verbose it has all of them.
    """
    own = alike[0][1]
    yield f"{len(alike)} of {ran.total()} cases: {own['finding'].splitlines()[0]}"
    forms: dict[str, list[str]] = {}
    for form, found in alike:
        forms.setdefault(form, []).append(found["case"])
    for form, cases in forms.items():
        shown = cases if terminal.talk is terminal.Talk.VERBOSE else cases[:1]
        yield f"  {len(cases)} of {ran[own['kernel'], form]} {form}: {'; '.join(shown)}"


def _kind(finding: dict[str, str]) -> str:
    """What findings of one bug share: all but where a thread was, and numbers but of lines."""
    told = [line for line in finding["finding"].splitlines() if not line.startswith("  in block")]
    text = re.sub(r"(?<![:\d])[\d.]+(e[+-]\d+)?", "#", "\n".join(told))
    return f"{finding['kernel']}: {text.replace('nan', '#')}"


def _configs(
    family: Family,
    words: str,
    asked: Sequence[Sequence[Case]],
    configs_of: Callable[[Family, str, Problem], Sequence[Config]],
    every: bool,
) -> tuple[list[tuple[Config, Sequence[Case]]], int]:
    """The cases of each list with one config, or with `every` one; how many configs do not run.

    asked: cases, the first of each list being the problem whose space its configs are of.
    """
    from attnsweep.tools.simulator import SimtError

    runs: list[tuple[Config, Sequence[Case]]] = []
    known: set[Config] = set()
    for whole, *cases in asked:
        try:
            found = configs_of(family, words, whole.problem)
        except SimtError as error:
            raise KernelError(str(error), where=family.declared_at) from error
        known |= {*found}
        runs += [(each, cases) for each in found[: None if every else 1] if cases]
    return runs, len(known - {each for each, _ in runs})


def _coverage(
    family: Family, runs: Sequence[tuple[Config, Sequence[Case]]], others: int
) -> dict[str, Any]:
    """The parts of a declaration that ran, and those that did not."""
    from attnsweep.tools.coverage import facts, left_out

    ran = facts(case for _, cases in runs for case in cases)
    configs = [*dict.fromkeys(config.label for config, _ in runs)]
    left = {"other_configs": others} | left_out(family, ran)
    return {"kernel": family.name, "ran": {"configs": configs} | ran, "not_run": left}


def _covered_lines(covered: dict[str, Any]) -> Iterator[str]:
    from attnsweep.tools.coverage import in_words

    ran, left = dict(covered["ran"]), dict(covered["not_run"])
    configs, others = ran.pop("configs"), left.pop("other_configs")
    config = configs[0] if len(configs) == 1 else counted(len(configs), "config")
    yield f"{covered['kernel']}: ran {' · '.join(filter(None, (config, in_words(ran))))}"
    said = [f"{counted(others, 'other config')} (--all)"] if others else []
    said += [in_words(left)] if left else []
    if said:
        yield f"{covered['kernel']}: not run: {' · '.join(said)}"


def _finding(
    machine: Any, family: Family, config: Config, how: dict[str, Any], case: Case
) -> str | None:
    """Run one case and return its fault, or None. Raises KernelError if it cannot be built."""
    from attnsweep.tools.simulator import BuildError, SimtError

    try:
        found = machine.check(family, config, case, **how)
    except BuildError as error:
        hint = (
            "the simulator knows the headers of kernels/common, the family's own, and of CUDA's "
            "cuda_fp16.h, cuda_bf16.h and mma.h; no asm"
        )
        raise KernelError(str(error), where=str(family.source), hint=hint) from error
    except SimtError as error:
        refused = family.refused_by(config, case.problem, how["arch"])
        return f"{error}" + (f"\n(the rule {refused} refuses this config here)" if refused else "")
    return None if found.ok else f"wrong: {found}"


def _runs(
    family: Family,
    problems: Sequence[str],
    head_dim: int | None,
    dtype: str | None,
    causal: bool,
    inputs: str,
    refusal: Callable[[Problem], str | None] | None,
) -> Sequence[Sequence[Case]]:
    """The problems that are asked for, or the small cases of all that the declaration promises.

    The first of each list is the problem whose space its configs are of, and does not run.
    refusal: why a callable serves no small case of a problem, or None.
    """
    from attnsweep.core.cases import Case, Inputs
    from attnsweep.core.errors import SpecError
    from attnsweep.core.ops import OPS
    from attnsweep.specs.shapes import read_dtype, read_shapes
    from attnsweep.tools.coverage import cases_of, forms

    if inputs not in get_args(Inputs):
        raise SpecError(f"--inputs is one of {', '.join(get_args(Inputs))}, not {inputs!r}")
    if problems:
        read = read_shapes(
            problems, dtype=dtype or family.dtypes[0], causal=causal, option="--problem"
        )
        own = OPS[family.ops[0]]
        of_family = (each if each.op.name in family.ops else replace(each, op=own) for each in read)
        asked = [Case(each, inputs) for each in of_family]  # type: ignore[arg-type]
        return [(each, each) for each in asked]
    dim = head_dim or (64 if 64 in family.head_dims else family.some_head_dims[0])
    dtypes = family.dtypes if dtype is None else (read_dtype(dtype, "--dtype"),)
    wholes = forms(family, dtypes, ("causal",) if causal else family.masks, dim)
    refused = {whole: refusal(whole) if refusal else None for whole in wholes}
    found = [(Case(each), *cases_of(family, each)) for each, why in refused.items() if not why]
    if not any(cases for _, *cases in found):
        why = next(filter(None, refused.values()), "")
        what = f"serves none of the small cases{': ' if why else ''}{why}"
        raise KernelError(what, where=family.declared_at, hint="give --problem")
    return found
