"""`attnsweep export --format`: the winning configs of a run of calls, in files that others read.

`python` is a module whose `config_for` gives the keywords of a call, `triton` a list from which
`triton.Config(**entry["config"])` is made, `vllm` tables by one size, named and read as vLLM's are,
`helion` a file for each problem, which `helion.Config.load` reads.
Readers of tables call int() on every key, so ties and intervals lie beside, in NAME.evidence.json.
"""

from __future__ import annotations

import itertools
import json
import pprint
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attnsweep.choose.baseline_ratio import common_rounds
from attnsweep.choose.columns import Row
from attnsweep.choose.pace import label_of_row
from attnsweep.choose.ranking import ranked
from attnsweep.choose.stats import ratio_interval
from attnsweep.core.callables import Asked
from attnsweep.core.errors import SpecError, StoreError, reason
from attnsweep.core.hardware import arch_named
from attnsweep.core.problem import Problem, Value
from attnsweep.core.trial import OURS, Environment
from attnsweep.family.called import USUAL
from attnsweep.family.family import Config
from attnsweep.serve.export import Exported
from attnsweep.serve.portfolio import facts_of, of_size, portfolios, times_as_long
from attnsweep.store.outputs import check_output, write_output
from attnsweep.store.run import Run, environment_of, open_run

PACKAGE = "package"


def format_of(out: Path, asked: str | None) -> str:
    """The format that is asked for, or else the one that is written to `out`. Raises SpecError."""
    if asked not in (None, PACKAGE, *_TEXTS):
        known = ", ".join((PACKAGE, *_TEXTS))
        raise SpecError(f"a format is one of {known}, not {asked}", where="--format")
    return asked or {".py": "python", ".json": "triton"}.get(out.suffix, PACKAGE)


def export_configs(
    runs: Sequence[Path],
    out: Path,
    form: str,
    *,
    axis: str = "seqlen_k",
    kernel: str | None = None,
    at_most: int | None = None,
    force: bool = False,
) -> Exported:
    """Write the winning configs of a run of calls to `out`: a file, or for some a directory.

    form: python, triton, vllm or helion. axis: what of a problem is the key of a vllm table.
    kernel: one of the spec's, as if the run had no other. at_most: the most configs to keep, chosen
    to lose the least time. force: replace files. Raises StoreError or SpecError.
    """
    if len(runs) != 1:
        hint = "write a file for each, or sweep all problems in one run"
        raise SpecError(f"--format {form} takes one run, not {len(runs)}", hint=hint)
    run = open_run(runs[0])
    if not any(trial.call for trial in run.trials):
        hint = "--format package exports kernels of templates"
        raise StoreError("a run without calls", where=str(run.directory), hint=hint)
    environment, left_out = _one_kind(run), list[str]()
    entries, portfolio = _entries(run, environment, kernel, at_most, left_out)
    function = entries[0]["call"]["function"]
    capability = arch_named(environment.arch).compute_capability
    table = {
        "function": function,
        "layout": Asked.of(function).layout,
        "gpu": {
            "name": environment.gpu,
            "compute_capability": list(capability),
            "sm_count": environment.sm_count,
        },
        "driver": environment.driver,
        "date": environment.date,
        "attnsweep": environment.attnsweep,
        "entries": entries,
        **({"portfolio": portfolio} if portfolio else {}),
    }
    texts = _TEXTS[form](out, table, axis)
    for path in texts:
        check_output(path, force=force)
    for path, text in texts.items():
        write_output(path, text)
    configs = {repr(entry["config"]) for entry in entries}
    return Exported(
        *(out, function, len(entries), 0, sum(map(len, texts.values()))),
        *((environment.gpu,), left_out),
        configs=len(configs),
        files=tuple(map(str, texts)),
        portfolio=portfolio,
    )


def _one_kind(run: Run) -> Environment:
    """Where the run was measured. Raises StoreError if that is several kinds of GPU."""
    environment = environment_of(run)
    machines = [environment.machine, *(trial.machine for trial in run.trials)]
    kinds = {f"{m['gpu']} of {m.get('sm_count')} SMs" for m in machines if "gpu" in m}
    if len(kinds) > 1:
        what = f"rows of several kinds of GPU: {', '.join(sorted(kinds))}"
        raise StoreError(what, where=str(run.directory), hint="export a run of one kind")
    return environment


def _entries(
    run: Run, environment: Environment, kernel: str | None, at_most: int | None, left_out: list[str]
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """What was measured of each problem that a call wins, and of `at_most` the facts of the choice.

    Raises StoreError or SpecError.
    """
    kernels = sorted({trial.kernel for trial in run.trials if trial.call})
    if kernel not in (None, *kernels):
        raise SpecError(f"the run calls {', '.join(kernels)}, not {kernel}", where="--kernel")
    trials = [t for t in run.trials if t.provider != OURS or kernel in (None, t.kernel)]
    shapes: list[list[Row]] = []
    for rows in ranked(trials, environment, distinct=True):
        won = next((row for row in rows if row["winner"]), None)
        if won is not None and (call := won["trial"].call):
            called = (r for r in rows if r["rank"] is not None and r["trial"].call)
            functions = [r for r in called if r["trial"].call["function"] == call["function"]]
            shapes.append([won, *(row for row in functions if row is not won)])
        else:
            why = f"{won['kernel']} won, a template" if won else "no config of a call won"
            left_out.append(f"{rows[0]['problem']}: {why}")
    where, hint = str(run.directory), f"export those of one: --kernel {' or '.join(kernels)}"
    if not shapes:
        raise StoreError("no winner to export", where=where, hint="\n  ".join(left_out))
    if len(found := sorted({own[0]["trial"].call["function"] for own in shapes})) > 1:
        raise StoreError(f"several functions won: {', '.join(found)}", where=where, hint=hint)
    if at_most is None:
        chosen = commonest([[Config(row["trial"].config) for row in _tied(own)] for own in shapes])
        return [_entry(own, config) for own, config in zip(shapes, chosen, strict=True)], None
    kept, facts = _portfolio(shapes, at_most)
    unserved = [own[0]["problem"] for own, config in zip(shapes, kept, strict=True) if not config]
    left_out += [f"{problem}: none of the kept configs was timed on it" for problem in unserved]
    pairs = zip(shapes, kept, strict=True)
    return [_entry(own, config) for own, config in pairs if config is not None], facts


def _tied(rows: Sequence[Row]) -> list[Row]:
    """The winner of a problem, which is the first, and the rows that share its rank."""
    return [row for row in rows if row["rank"] == rows[0]["rank"]]


def _portfolio(
    shapes: Sequence[Sequence[Row]], at_most: int
) -> tuple[list[Config | None], dict[str, Any]]:
    """The config of each problem if at_most may be kept, and the facts of that choice."""
    configs: dict[str, Config] = {}
    known: list[dict[str, float]] = []
    for own in shapes:
        rows = {label_of_row(row["trial"]): row["trial"] for row in own}
        known.append({})
        for trial in rows.values():
            times = times_as_long(trial, own[0]["trial"], rows)
            if times is not None:
                config = Config(trial.config)
                configs[config.label] = config
                known[-1][config.label] = times
    found = portfolios(known)
    portfolio = of_size(found, at_most)
    facts = facts_of(found, portfolio, [str(own[0]["problem"]) for own in shapes])
    return [configs[label] if label is not None else None for label in portfolio.own], facts


def commonest(shapes: Sequence[Sequence[Config]]) -> list[Config]:
    """The one that ties on the most shapes, of each shape's ties; of several, the first of them."""
    times = Counter(itertools.chain.from_iterable(map(set, shapes)))
    return [max(tied, key=lambda each: times[each]) for tied in shapes]


def _entry(rows: Sequence[Row], config: Config) -> dict[str, Any]:
    """What was measured of a problem. rows: of the winner's function, the winner the first."""
    won, tied = rows[0]["trial"], _tied(rows)
    row = next(row for row in rows if Config(row["trial"].config) == config)
    ties = []
    for each in tied:
        own, others = common_rounds(each["trial"], won)
        slower = [_rounded(end) for end in ratio_interval(own, others)] if own else None
        tie = {"config": _keywords(each["trial"].config), "time_us": _rounded(each["time_us"])}
        ties.append({**tie, "time_over_winner": slower})
    interval = [row["ratio_low"], row["ratio_high"]]
    return {
        "problem": won.problem.facts,
        "config": _keywords(config),
        "time_us": _rounded(row["time_us"]),
        "baseline": row["best_baseline"],
        "baseline_over_time": _rounded(row["ratio_to_best_baseline"]),
        "interval": None if None in interval else [*map(_rounded, interval)],
        "ties": ties,
        "call": dict(row["trial"].call),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def _keywords(config: Mapping[str, Value]) -> dict[str, Value]:
    """A config as keywords: None leaves one out."""
    return {name: value for name, value in config.items() if value is not None}


# -- the formats ------------------------------------------------------------------------------


def _python(out: Path, table: Mapping[str, Any], _: str) -> dict[Path, str]:
    if out.suffix != ".py" or not out.stem.isidentifier():
        hint = "--out attend_configs.py, or another --format: triton, vllm, helion"
        raise SpecError("--format python writes a module, NAME.py", where=str(out), hint=hint)
    text = pprint.pformat(table, width=100, sort_dicts=False)
    return {out: f"{_ABOUT}\nTABLE = {text}\n{_CODE}"}


def _triton(out: Path, table: Mapping[str, Any], _: str) -> dict[Path, str]:
    if out.suffix != ".json":
        raise SpecError("--format triton writes a file NAME.json", where=str(out))
    entries = []
    for entry in table["entries"]:
        config = _of_one_tuner(entry["config"])
        options = {name: config.pop(name) for name in USUAL if name in config}
        entries.append({"problem": entry["problem"], "config": {"kwargs": config, **options}})
    return _with_evidence(out, entries, table)


def _vllm(out: Path, table: Mapping[str, Any], axis: str) -> dict[Path, str]:
    device = table["gpu"]["name"].replace(" ", "_")
    files: dict[Path, dict[int, Any]] = {}
    for entry in table["entries"]:
        facts = entry["problem"]
        if type(key := facts.get(axis)) is not int:
            known = [name for name, fact in facts.items() if type(fact) is int]
            what = f"{axis} of a problem is no whole number; those are {', '.join(known)}"
            raise SpecError(what, where="--axis")
        path = out / f"H={facts['heads']},D={facts['head_dim']},device_name={device}.json"
        other = files.setdefault(path, {}).setdefault(key, entry)
        if other is not entry:
            one, two = (Problem.of(each["problem"]).label for each in (other, entry))
            what = f"{one} and {two} have one {axis}, and so one place in {path.name}"
            raise SpecError(what, where="--axis", hint="choose another, or export a run of one")
    _make_directory(out)
    texts: dict[Path, str] = {}
    for path, own in files.items():
        keyed = {str(key): _of_one_tuner(own[key]["config"]) for key in sorted(own)}
        entries = [own[key] for key in sorted(own)]
        texts |= _with_evidence(path, keyed, {**table, "entries": entries})
    return texts


def _helion(out: Path, table: Mapping[str, Any], _: str) -> dict[Path, str]:
    _make_directory(out)
    texts: dict[Path, str] = {}
    for entry in table["entries"]:
        name = re.sub(r"[^\w,.-]+", "_", Problem.of(entry["problem"]).label).strip("_")
        config = _with_lists(_of_one_tuner(entry["config"]))
        texts |= _with_evidence(out / f"{name}.json", config, {**table, "entries": [entry]})
    return texts


def _with_lists(config: Mapping[str, Value]) -> dict[str, Any]:
    """A config in which NAME_0, NAME_1 and so on are a list NAME, since no value is a list."""
    numbered: dict[str, dict[int, Value]] = {}
    for name, value in config.items():
        stem, _, number = name.rpartition("_")
        if stem and re.fullmatch("0|[1-9][0-9]*", number):
            numbered.setdefault(stem, {})[int(number)] = value
    lists = {
        stem: [values[at] for at in range(len(values))]
        for stem, values in numbered.items()
        if [*sorted(values)] == [*range(len(values))]
    }
    taken = {f"{stem}_{at}" for stem, values in lists.items() for at in range(len(values))}
    return {name: value for name, value in config.items() if name not in taken} | lists


def _make_directory(out: Path) -> None:
    try:
        out.mkdir(exist_ok=True)
    except OSError as error:
        what = f"is no directory, and cannot be made one: {reason(error)}"
        raise StoreError(what, where=str(out)) from error


def _of_one_tuner(config: Mapping[str, Value]) -> dict[str, Value]:
    """A copy of a config. Raises SpecError if its call has two autotuners."""
    if dotted := [name for name in config if "." in name]:
        what = f"{', '.join(dotted)} are of two autotuners, which this format cannot tell apart"
        raise SpecError(what, where="--format", hint="--format python")
    return dict(config)


def _with_evidence(path: Path, content: Any, table: Mapping[str, Any]) -> dict[Path, str]:
    evidence = path.with_name(f"{path.stem}.evidence.json")
    both = ((path, content), (evidence, table))
    return {each: json.dumps(data, indent=2) + "\n" for each, data in both}


_TEXTS: dict[str, Callable[[Path, Mapping[str, Any], str], dict[Path, str]]] = {
    "python": _python,
    "triton": _triton,
    "vllm": _vllm,
    "helion": _helion,
}
_ABOUT = '''\
"""Configs of TABLE["function"] that won, by `attnsweep export --format python`.

config_for(q, k, v, causal=True) is a dict of keywords, or None for what was not measured: another
GPU, shape, dtype or mask. TABLE says what was: times, ties, intervals, the digest of the files.
"""
'''
_CODE = '''
_DTYPES = {
    "torch.float16": "fp16",
    "torch.bfloat16": "bf16",
    "torch.float32": "fp32",
    "torch.float8_e4m3fn": "e4m3",
}


def _key(facts):
    return repr(sorted((name, list(x) if type(x) is tuple else x) for name, x in facts.items()))


_ENTRIES = {_key(entry["problem"]): entry for entry in TABLE["entries"]}


def config_for(q, k, v, causal=False, **facts):
    """The keywords of this call, or None. facts: more of its `problem`, as window=[512, 0]."""
    shapes = [tuple(tensor.shape) for tensor in (q, k, v)]
    if {len(shape) for shape in shapes} != {4} or not q.dtype == k.dtype == v.dtype:
        return None
    if TABLE["layout"] == "bshd":
        shapes = [(b, h, s, d) for b, s, h, d in shapes]
    (batch, heads, seqlen_q, head_dim), of_k, of_v = shapes
    if of_k[:3] != of_v[:3] or (of_k[0], of_k[3]) != (batch, head_dim):
        return None
    asked = {"batch": batch, "heads": heads, "heads_kv": of_k[1], "head_dim": head_dim}
    asked |= {"seqlen_q": seqlen_q, "seqlen_k": of_k[2], "dtype": _DTYPES.get(str(q.dtype))}
    asked |= {"causal": bool(causal)} | ({"head_dim_v": of_v[3]} if of_v[3] != head_dim else {})
    entry = _ENTRIES.get(_key(facts | asked))
    if entry is None or q.device.type != "cuda":
        return None
    import torch

    card, gpu = torch.cuda.get_device_properties(q.device), TABLE["gpu"]
    here = [card.name, [card.major, card.minor], card.multi_processor_count]
    there = [gpu["name"], gpu["compute_capability"], gpu["sm_count"]]
    return dict(entry["config"]) if here == there else None
'''
