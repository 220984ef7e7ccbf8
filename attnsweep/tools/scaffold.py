"""The template and the declaration that `attnsweep init --kernel` writes."""

from __future__ import annotations

import re
from pathlib import Path

from attnsweep.core.errors import KernelError
from attnsweep.core.files import shipped
from attnsweep.core.ops import ORDERS
from attnsweep.tools.inline import kernel_in

_EXAMPLE = "naive"
# How a launch passes an argument, by what it is usually called, without case and underscores.
_NAMES = {
    '"q"': "q query",
    '"k"': "k key",
    '"v"': "v value",
    '"o"': "o out output",
    "p.batch": "batch batchsize b",
    "p.heads": "heads numheads nheads h",
    "p.heads_kv": "headskv numheadskv nheadskv",
    "p.seqlen_q": "seqlen seqlenq n",
    "p.seqlen_k": "seqlenk",
    "p.head_dim": "headdim d",
    "p.scale": "scale softmaxscale",
}
_USUAL = {name: passed for passed, names in _NAMES.items() for name in names.split()}
_DECLARATION = """\
from attnsweep.core.hardware import Arch
from attnsweep.core.problem import Problem, ceil_div
from attnsweep.family.family import Config, Family, Launch, Param

kernel = Family(
    "{name}",
    summary="one line for `attnsweep list`",
    params=(Param("THREADS", (128,), "threads per block, as -DTHREADS"),),  # what a sweep tries
    dtypes=("fp16",),
    head_dims=(64, 128),
    masks=("full",),
    # Each problem that it cannot do is refused with the sentence.
    supports=(("no grouped heads", lambda p: p.heads == p.heads_kv),),
)


@kernel.stage("fwd")
def fwd(config: Config, problem: Problem, arch: Arch) -> Launch:
    p = problem
    return Launch(
        function="{function}",
        grid=(ceil_div(p.seqlen_q, config.THREADS), p.batch * p.heads, 1),  # as the kernel has it
        threads=config.THREADS,
        smem_bytes=0,  # dynamic shared memory
        args=({args}),
    )
"""


# What the smallest family has otherwise where rows lie before heads.
_TURNED = {
    "(batch, heads, seqlen_q, HEAD_DIM)": "(batch, seqlen_q, heads, HEAD_DIM)",
    "(batch, heads_kv, seqlen_k, HEAD_DIM)": "(batch, seqlen_k, heads_kv, HEAD_DIM)",
    "static_cast<long long>(batch * heads_kv + head_kv) * seqlen_k *": (
        "(static_cast<long long>(batch) * seqlen_k * heads_kv + head_kv) *"
    ),
    "(static_cast<long long>(blockIdx.y) * seqlen_q + row)": (
        "((static_cast<long long>(batch) * seqlen_q + row) * heads + blockIdx.y % heads)"
    ),
    "static_cast<long long>(j) * HEAD_DIM": "static_cast<long long>(j) * heads_kv * HEAD_DIM",
}


def template(name: str, source: Path | None, order: str = ORDERS[0]) -> str:
    """The user's own text, or that of the smallest family under another name, for an order."""
    path = source or shipped("kernels") / f"{_EXAMPLE}.cu"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise KernelError(f"cannot be read: {error}", where=str(path)) from error
    if source is None and order != ORDERS[0]:
        for one, other in _TURNED.items():
            text = text.replace(one, other)
    return text if source else re.sub(rf"\b{_EXAMPLE}\b", name, text)


def declaration(name: str, text: str | None, order: str = ORDERS[0]) -> str:
    """The declaration of a template of the user's own, or of the smallest family's copy."""
    if order != ORDERS[0]:
        own = f'    order="{order}",  # tensors are (batch, seqlen, heads, head_dim)\n)\n\n\n@'
        return declaration(name, text).replace(")\n\n\n@", own, 1)
    if text is None:
        own = (shipped("kernels") / f"{_EXAMPLE}.py").read_text(encoding="utf-8")
        return re.sub(rf"\b{_EXAMPLE}\b", name, own)
    function, parameters = kernel_in(text)
    known = [_USUAL.get(each.lower().replace("_", "")) for each in parameters]
    args = ", ".join(value or "0" for value in known) + "," * (len(known) == 1)
    declared = _DECLARATION.format(name=name, function=function, args=args)
    unknown = [each for each, value in zip(parameters, known, strict=True) if value is None]
    if unknown:
        note = f"        # Passed as 0, since their names say nothing: {', '.join(unknown)}.\n"
        declared = declared.replace("        args=", note + "        args=")
    return declared
