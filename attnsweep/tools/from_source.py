"""The declaration of a CUDA file from elsewhere: what its text says, and what it does not.

`attnsweep init --kernel NAME --from FILE.cu` prints both, so that nobody finds a guess by a crash.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from attnsweep.family.family import PROBLEM_CONSTANTS
from attnsweep.tools.inline import NOISE, kernel_in

# How a launch passes an argument, by what it is usually called, without case and underscores.
_ARGUMENTS = {
    '"q"': "q query",
    '"k"': "k key",
    '"v"': "v value",
    '"o"': "o out output",
    "p.batch": "batch batchsize b",
    "p.heads": "heads numheads nheads h",
    "p.heads_kv": "headskv numheadskv nheadskv",
    "p.seqlen_q": "seqlen seqlenq n nq",
    "p.seqlen_k": "seqlenk m nk",
    "p.head_dim": "headdim d",
    "p.scale": "scale softmaxscale smscale",
}
_USUAL = {name: passed for passed, names in _ARGUMENTS.items() for name in names.split()}
_OPTIONAL = re.compile(r"#[ \t]*ifndef\s+(\w+)\s*\n\s*#[ \t]*define\s+\1[ \t]+(\d+)[ \t]*\n")
_FIXED = re.compile(r"(?:#[ \t]*define[ \t]+|constexpr\s+(?:unsigned|int)\s+)(\w+)[ \t=]+(\d+)\b")
_WORD = r"[A-Za-z_]\w*|\d+"
_ROWS = re.compile(rf"blockIdx\.x\s*\*\s*\(?({_WORD})|({_WORD})\s*\*\s*blockIdx\.x")
_BOUNDS = re.compile(rf"__launch_bounds__\s*\(\s*({_WORD})")
_THREADS = 128
_DECLARATION = """\
from attnsweep.core.hardware import Arch
from attnsweep.core.problem import Problem, ceil_div
from attnsweep.family.family import Config, Family, Launch, Param

kernel = Family(
    "{name}",
    summary="one line for `attnsweep list`",
    params=({params}),  # what a sweep tries
    dtypes=({dtypes}),
    head_dims=(64, 128),
    masks=({masks}),
    # Each problem that it cannot do is refused with the sentence.
    supports=({supports}),
)


@kernel.stage("fwd")
def fwd(config: Config, problem: Problem, arch: Arch) -> Launch:
    p = problem
    return Launch(
        function="{function}",
        grid=({grid}),
        threads={threads},
        smem_bytes=0,  # dynamic shared memory
        args=({args}),
    )
"""


@dataclass(frozen=True, slots=True)
class Declared:
    """A declaration. guessed: what it takes from the text; open: what it could not, with lines."""

    text: str
    guessed: tuple[str, ...]
    open: tuple[tuple[int, str], ...]


def declared(name: str, source: str) -> Declared:
    """The declaration of the one kernel in CUDA text. Raises KernelError."""
    function, parameters = kernel_in(source)
    code = NOISE.sub(" ", source)
    values = _values(source)
    fixed = {name: int(number) for name, number in _FIXED.findall(source)}
    rows, bounds = _ROWS.search(code), _BOUNDS.search(re.sub(r"//[^\n]*", "", source))
    by = next(filter(None, rows.groups()), "") if rows else ""
    threads = bounds[1] if bounds else next((n for n in values if "THREADS" in n), "")
    if not _known(threads, values, fixed):
        values = {"THREADS": [_THREADS, _THREADS // 2, 2 * _THREADS], **values}
        threads = "THREADS"
    known_rows = by == "blockDim" or _known(by, values, fixed)
    per_block = threads if by == "blockDim" or not known_rows else by
    of_heads = "p.heads, p.batch" if "blockIdx.z" in code else "p.batch * p.heads, 1"
    grid = f"ceil_div(p.seqlen_q, {_value(per_block, values, fixed)}), {of_heads}"
    passed = [_USUAL.get(each.lower().replace("_", "")) for each in parameters]
    dtypes = ["fp16"] if re.search(r"\b(?:__)?half2?\b", code) else ["bf16"] * ("bfloat16" in code)
    dtypes = dtypes or ["fp16", *["bf16"] * ("IS_BF16" in code or "element_t" in code)]
    masks = ["full", *["causal"] * bool(re.search(r"\bCAUSAL\b", code))]
    grouped = "p.heads_kv" in passed
    alone = '("no grouped heads", lambda p: p.heads == p.heads_kv),'
    text = _DECLARATION.format(
        name=name,
        function=function,
        params=" ".join(f'Param("{n}", {tuple(v)}, "as -D{n}"),' for n, v in values.items()),
        dtypes=_listed(dtypes),
        masks=_listed(masks),
        supports="" if grouped else alone,
        grid=grid,
        threads=_value(threads, values, fixed),
        args=", ".join(each or "0" for each in passed) + "," * (len(passed) == 1),
    )

    def line(words: str) -> int:
        return text[: text.index(words)].count("\n") + 1

    guessed = [f"{n}: tries {', '.join(map(str, v))}" for n, v in values.items()]
    guessed.append(f"grid ({grid}), threads {threads}")
    renamed = [
        f"{own} is {to.strip(chr(34)).removeprefix('p.')}"
        for own, to in zip(parameters, passed, strict=True)
        if to is not None
    ]
    guessed += [", ".join(renamed)] if renamed else []
    unknown = [each for each, to in zip(parameters, passed, strict=True) if to is None]
    left = [(line("        args="), f"{each} is passed as 0") for each in unknown]
    if not known_rows:
        left.append((line("        grid="), "the rows of a block are taken for its threads"))
    if "__shared__" in code and re.search(r"extern\s+__shared__", code):
        left.append((line("        smem_bytes="), "dynamic shared memory has 0 bytes"))
    return Declared(text, tuple(guessed), tuple(left))


def _values(source: str) -> dict[str, list[int]]:
    """Macros that `#ifndef` lets -D set: their number, and of powers of two half and double."""
    found: dict[str, list[int]] = {}
    for name, number in _OPTIONAL.findall(source):
        own = int(number)
        near = [own // 2, 2 * own] if own >= 4 and own & (own - 1) == 0 else []
        if name not in PROBLEM_CONSTANTS:
            found[name] = [own, *near]
    return found


def _known(word: str, values: dict[str, list[int]], fixed: dict[str, int]) -> bool:
    return word.isdigit() or word in values or word in fixed


def _value(word: str, values: dict[str, list[int]], fixed: dict[str, int]) -> str:
    """How the declaration writes a number of the template."""
    return f"config.{word}" if word in values else str(fixed.get(word, word))


def _listed(words: list[str]) -> str:
    return ", ".join(f'"{word}"' for word in words) + "," * (len(words) == 1)
