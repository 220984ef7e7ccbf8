"""`attnsweep judge`: is a callable of anybody's right, and how fast is it?"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.text import Text

from attnsweep.cli import completion, options
from attnsweep.cli.app import FIND, app, examples, print_result
from attnsweep.core.errors import SpecError
from attnsweep.reports.terminal import Form, errors


class Role(StrEnum):
    """What a callable is judged as."""

    CANDIDATE = "candidate"
    BASELINE = "baseline"


@app.command(
    rich_help_panel=FIND,
    epilog=examples(
        "attnsweep judge my_kernels.py:forward 4,32,4096,128 --causal --dtype bf16",
        "attnsweep judge my_package.attention:forward 1,16,1024,64 2,8,512,128 --json",
        "attnsweep judge my_kernels.py:forward 4,32,4096,128 --against torch_cudnn,flex",
        "attnsweep judge written_by_a_model.py:forward 4,32,4096,128 --strict --json",
    ),
)
def judge(
    name: Annotated[
        str,
        typer.Argument(
            metavar="CALLABLE",
            help="MODULE:FUNCTION or FILE.py:FUNCTION, called as f(q, k, v, problem=problem) with "
            "CUDA tensors (batch, heads, seqlen, head_dim); it returns o.",
            show_default=False,
        ),
    ],
    shapes: Annotated[
        list[str],
        typer.Argument(
            metavar="SHAPE",
            help="batch,heads,seqlen,head_dim and what `tune` takes beside it, or a CSV file.",
            show_default=False,
            autocompletion=completion.tables,
        ),
    ],
    causal: options.Causal = False,
    backward: Annotated[
        bool,
        typer.Option(
            "--backward", help="Judge gradients: f(q, k, v, o, lse, do) returns (dq, dk, dv)."
        ),
    ] = False,
    dtype: Annotated[
        str, typer.Option("--dtype", help="Dtype of every shape that does not name one.")
    ] = "fp16",
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="NAMES",
            help="Baselines, separated by commas; other callables too (default: all).",
        ),
    ] = None,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Call it in a process of its own that owns nothing of the judge, each call on "
            "inputs that follow from the output before; a clock outside confirms its times.",
        ),
    ] = False,
    role: Annotated[
        Role,
        typer.Option(
            "--as",
            help="baseline: time it though it is over a limit, as a library.",
        ),
    ] = Role.CANDIDATE,
    rounds: Annotated[
        int, typer.Option("--rounds", min=3, help="Rounds in which all take turns.")
    ] = 15,
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", min=1, help="Seconds that a step of it may take.")
    ] = 30.0,
    json_: options.Json = False,
    form: options.Progress = Form.AUTO,
    wait: options.Wait = False,
) -> None:
    """Judge CALLABLE on each SHAPE: a verdict, its reason, and its time beside the baselines.

    Outputs of each timed replay are compared with float64, on inputs that no call before has seen.
    Exit code: 0 all confirmed; 1 one is wrong or refused; 2 it cannot be imported; 3 there is no
    GPU; 4 one is unconfirmed. It runs with your rights, with --strict too: judge code that you
    would run.
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
    lines = [Text(verdict.sentence) for verdict in verdicts]
    print_result(lines, facts if len(facts) > 1 else facts[0], json_)
    raise typer.Exit(max((v.exit_code for v in verdicts), key=(0, 4, 1).index))
