"""`attnsweep tune`: sweep shapes in the shipped space of a card, without a spec."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from attnsweep.cli import completion, options
from attnsweep.cli.app import (
    FIND,
    app,
    examples,
    print_end,
    print_plan,
    print_result,
    print_run,
    refuse_idle_of_run,
    warn,
)
from attnsweep.core.errors import AttnsweepError, NoGpuError, SpecError
from attnsweep.reports.terminal import Form, errors

if TYPE_CHECKING:
    from attnsweep.core.problem import Problem
    from attnsweep.family.family import Family
    from attnsweep.specs.starter import Target
    from attnsweep.sweep.session import SweepOutcome


@app.command(
    rich_help_panel=FIND,
    epilog=examples(
        "attnsweep tune 4,32,4096,128 --causal --dtype bf16",
        "attnsweep tune B=4 H=32 Hkv=8 S=4096 D=128 --save-spec mine.yaml",
        "attnsweep tune 1,16,1024,64 2,32/8,1x4096,128 shapes.csv --budget-s 60",
        "attnsweep tune 1,16,1024,64 --replay quickstart",
        "attnsweep tune 4,32,4096,128 --dry-run --arch sm_90a",
    ),
)
def tune(
    context: typer.Context,
    shapes: Annotated[
        list[str],
        typer.Argument(
            metavar="SHAPE",
            help="batch,heads,seqlen,head_dim: 4,32,4096,128; or B=4 H=32 Hkv=8 S=4096 D=128 (Sq "
            "and Sk for two lengths, Dv for v of another head_dim, as in 4,32,4096,192/128); or a "
            "CSV file of such rows.",
            show_default=False,
            autocompletion=completion.tables,
        ),
    ],
    causal: options.Causal = False,
    padding: Annotated[
        str | None,
        typer.Option(
            "--padding",
            metavar="SIDE,PERCENT",
            help="Pad every shape that does not say `padded`: right,40 gives the shortest item "
            "of a batch 40 % of the keys, and the longest all.",
        ),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype",
            help="Dtype of every shape that does not name one: fp16, bf16, fp32, e4m3, "
            "e4m3_tensor or e4m3_block.",
        ),
    ] = "fp16",
    kernel: Annotated[
        list[str] | None,
        typer.Option(
            "--kernel",
            help="Sweep this family in place of the shipped choice; may be repeated.",
            autocompletion=completion.families,
        ),
    ] = None,
    exhaustive: Annotated[
        bool, typer.Option("--exhaustive", help="Try every candidate of the space.")
    ] = False,
    budget_s: Annotated[
        int | None,
        typer.Option(
            "--budget-s", min=1, help="Seconds for a shape's candidates; the finals follow."
        ),
    ] = None,
    limit: options.Limit = None,
    save_spec: Annotated[
        Path | None,
        typer.Option("--save-spec", metavar="FILE", help="Write the spec that this runs to FILE."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="With --save-spec: replace FILE if it is there.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count the candidates.")] = False,
    arch: Annotated[str | None, options.arch("With --dry-run: one of {}.")] = None,
    replay: Annotated[
        Path | None,
        typer.Option(
            "--replay",
            metavar="RUN",
            help="Take times from a recorded run, or from that of `quickstart`; needs no GPU.",
            autocompletion=completion.runs,
        ),
    ] = None,
    fresh: options.Fresh = False,
    results: options.Results = Path("results"),
    kernels: options.Kernels = None,
    top: options.Top = None,
    full: options.Full = False,
    json_: options.Json = False,
    form: options.Progress = Form.AUTO,
    wait: options.Wait = False,
) -> None:
    """Find the fastest kernel for SHAPE on this GPU; needs no spec.

    Sweeps the shipped space of this kind of GPU next to the baselines that are installed, and ends
    in a sentence for each shape: which is faster, and by how much. The run is stored in
    RESULTS/<gpu>/tune-<shape>; the same command again continues there.
    """
    from attnsweep.choose.search import DEFAULT_STRATEGY
    from attnsweep.family.discover import discover
    from attnsweep.reports import progress
    from attnsweep.specs.load import spec_of
    from attnsweep.specs.plan import plan
    from attnsweep.specs.shapes import read_dtype, read_shapes
    from attnsweep.specs.starter import Request, run_name, starter
    from attnsweep.specs.yaml_file import Document
    from attnsweep.sweep import session

    dtype = read_dtype(dtype, "--dtype")
    if arch is not None and replay is not None:
        raise SpecError("--arch and --replay exclude each other: a recording has its own")
    if arch is not None and not dry_run:
        raise SpecError("--arch needs --dry-run; this run takes the architecture of the GPU")
    if force and save_spec is None:
        raise SpecError("--force goes with --save-spec; --fresh measures everything again")
    refuse_idle_of_run(context, dry_run=dry_run, replays=replay is not None, json_=json_)
    problems = read_shapes(shapes, dtype=dtype, causal=causal, padding=padding)
    families = discover(kernels)
    try:
        target = _target(arch, replay, problems, families)
    except NoGpuError as error:
        words = [word for name in kernel or () for word in ("--kernel", name)]
        words += [] if kernels is None else ["--kernels", str(kernels)]
        words += [] if padding is None else ["--padding", padding]
        raise _without_gpu(error, [*shapes, *words], causal, dtype) from error
    search: dict[str, Any] = {"strategy": "exhaustive" if exhaustive else DEFAULT_STRATEGY}
    search |= {} if budget_s is None else {"budget_s": budget_s}
    asked = Request(problems, run_name(problems, kernel or ()), kernel or (), kernels, search)
    text = starter(asked, target, families)
    spec = spec_of(Document.parse(Path(f"{asked.name}.yaml"), text), families)
    if target.untried:
        errors.print(Text(f"note: {target.untried}"), soft_wrap=True)
    if save_spec is not None:
        write_spec(save_spec, text, force)
    if dry_run:
        print_plan(plan(spec, target.arch), limit, json_)
        return
    with progress.watch(errors, form) as observer:
        outcome = session.run(
            spec,
            results=results,
            fresh=fresh,
            limit=limit,
            wait=wait,
            observer=observer,
        )
    print_end(outcome)
    _show(outcome, top, full, json_)
    raise typer.Exit(outcome.exit_code)


def write_spec(path: Path, text: str, force: bool) -> None:
    """Write a spec, but not over a file unless it is forced, and never over a part of a run.

    Raises SpecError or StoreError.
    """
    from attnsweep.store.outputs import check_output, write_output

    check_output(path, force=force)
    write_output(path, text)


def _target(
    arch: str | None, replay: Path | None, problems: Sequence[Problem], families: dict[str, Family]
) -> Target:
    from attnsweep.tools import target

    if replay is not None:
        return target.recorded(replay, problems)
    return target.here(families, problems) if arch is None else target.named(arch, families)


def _without_gpu(
    error: NoGpuError, arguments: Sequence[str], causal: bool, dtype: str
) -> AttnsweepError:
    """The error with the commands that work without a GPU."""
    from attnsweep.reports.views import what_works

    same = f"attnsweep tune {shlex.join(arguments)}{' --causal' * causal}"
    same += f" --dtype {dtype}" if dtype != "fp16" else ""
    rows = [
        (f"{same} --dry-run --arch sm_90a", "count the candidates"),
        ("attnsweep tune 1,16,1024,64 --replay quickstart", "replay a run of an H100"),
        ("attnsweep doctor", "what is missing, and how to fix it"),
    ]
    hint = what_works([error.hint], rows, errors.width)
    return NoGpuError(f"{error.what}. Nothing was measured.", hint=hint)


def _show(outcome: SweepOutcome, top: int | None, full: bool, json_: bool) -> None:
    """The tables, and the sentence about each problem, last."""
    from attnsweep.reports import tables
    from attnsweep.reports.text import sections_of, sentence

    run = outcome.run
    if not json_:
        print_run(run, False, top, full, every=True)
        return
    warn(run)
    said = [sentence(section) for section in sections_of(run)]
    print_result([], tables.to_json(run) | {"sentences": said}, True)
