"""Faults of a declaration: what is wrong with a value that a family declares, and how to fix it.

Each function returns None, or a Fault. `declare` raises it with the place in the declaration.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnsweep.core.formats import CACHE_DTYPES
from attnsweep.core.hardware import ARCHS
from attnsweep.core.layouts import EXAMPLES as LAYOUTS
from attnsweep.core.ops import DTYPE_BYTES, OPS, ORDERS
from attnsweep.core.scores import KINDS as SCORES
from attnsweep.family.launch import Launch, TensorMap

TENSORS = tuple("qkvo")
# More than float32 scores of the longest sequence that a card holds, 2**66; a limit below it
# prunes a candidate instead, or cuts its call into chunks.
_MOST_BYTES = 2**72
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_KEYWORDS = """
    alignas alignof asm auto bool break case catch char class const constexpr const_cast continue
    decltype default delete do double dynamic_cast else enum explicit export extern false float for
    friend goto if inline int long mutable namespace new noexcept nullptr operator private protected
    public register reinterpret_cast return short signed sizeof static static_assert static_cast
    struct switch template this thread_local throw true try typedef typeid typename union unsigned
    using virtual void volatile wchar_t while and or not xor
"""
_RESERVED = frozenset(_KEYWORDS.split())
_OWN_OPTION = re.compile(r"-(-gpu-architecture|arch|I|-include-path|D|U|-device-c$|rdc=t|dlto|dc$)")


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong, and how to fix it."""

    what: str
    fix: str


@functools.cache
def _macro(name: str) -> str | None:
    """Why -D cannot define this name, or None."""
    if not _IDENTIFIER.fullmatch(name):
        return "is no C identifier"
    if name in _RESERVED or name.startswith("__"):
        return "is reserved in CUDA C++"
    return None


def of_kernel(kernel: Any) -> Fault | None:
    """The fault of a field of a Family, or None."""
    if not isinstance(kernel.name, str) or not _IDENTIFIER.fullmatch(kernel.name):
        what = f"a kernel's name names its template NAME.cu, and cannot be {kernel.name!r}"
        return Fault(what, 'write a C identifier, as in Family("naive", ...)')
    if not isinstance(kernel.summary, str):
        return Fault(f"summary is text, not {kernel.summary!r}", 'write summary="one line"')
    archs = {*ARCHS, *(name.rstrip("a") for name in ARCHS)}
    if not isinstance(kernel.min_arch, str) or kernel.min_arch not in archs:
        what = f"min_arch is one of {', '.join(ARCHS)}, not {kernel.min_arch!r}"
        return Fault(what, 'write min_arch="sm_80", or "sm_90a" for that architecture alone')
    for name, least, known in (
        ("dtypes", 1, DTYPE_BYTES),
        ("layouts", 0, LAYOUTS),
        ("cache_dtypes", 0, CACHE_DTYPES),
        ("scores", 0, SCORES),
        ("ops", 1, OPS),
    ):
        own = getattr(kernel, name)
        some = isinstance(own, tuple) and len(own) >= least
        if not some or not all(isinstance(each, str) and each in known for each in own):
            what = f"{name} are a tuple of {', '.join(known)}, not {own!r}"
            return Fault(what, f'write a tuple of one as {name}=("{next(iter(known))}",)')
    dims = kernel.head_dims
    for name, own in (("head_dims", dims), ("head_dims_v", kernel.head_dims_v)):
        if not isinstance(own, tuple | range) or not all(type(dim) is int for dim in own):
            what = f"{name} are a tuple of whole numbers, or a range, not {own!r}"
            return Fault(what, "write a tuple of one as (64,)")
        if min(own, default=0 if own is dims else 1) < 1:
            what = f"{name} are above 0, not {min(own)}" if own else f"{name} are empty"
            return Fault(what, f"write the supported ones, as in {name}=(64, 128)")
    if not isinstance(kernel.usual_head_dims, tuple) or not {*kernel.usual_head_dims} <= {*dims}:
        what = f"usual_head_dims are a tuple of head_dims, not {kernel.usual_head_dims!r}"
        return Fault(what, "write some of head_dims, or leave them out")
    if type(kernel.rounds_scores) is not int or kernel.rounds_scores < 0:
        what = f"rounds_scores is a count, not {kernel.rounds_scores!r}"
        return Fault(what, "write 1 if the family stores scores in the problem's dtype, else 0")
    needy = dict.fromkeys(("padded", "packed", "paged"), kernel.layouts)
    needy |= {"boolean": kernel.masks}
    for name, declared in needy.items():
        if name in declared and kernel.empty_rows is not True:
            field = "masks" if declared is kernel.masks else "layouts"
            what = f"{field} have {name}, but the family has no empty_rows"
            return Fault(what, "write 0 for queries that see no key, and empty_rows=True")
    if kernel.order not in ORDERS:
        what = f"order is one of {', '.join(ORDERS)}, not {kernel.order!r}"
        return Fault(what, 'write order="bshd" for tensors (batch, seqlen, heads, head_dim)')
    if (fault := _of_options("compile_options", kernel.compile_options)) is not None:
        return fault
    dirs = kernel.include_dirs
    if not isinstance(dirs, tuple) or not all(isinstance(one, str | Path) for one in dirs):
        what = f"include_dirs are a tuple of directories, not {dirs!r}"
        return Fault(what, 'write a tuple of one as ("../cutlass/include",)')
    served = kernel.supports
    pairs = isinstance(served, tuple) and all(isinstance(p, tuple) and len(p) == 2 for p in served)
    if not pairs or not all(isinstance(said, str) and said for said, _ in served):
        what = f"supports are a tuple of pairs of a sentence and a function, not {served!r}"
        return Fault(what, 'write (("one length", lambda p: p.seqlen_q == p.seqlen_k),)')
    for said, rule in served:
        if (fault := of_function(f"supports {said!r}", rule, ("problem",))) is not None:
            return fault
    switches = kernel.params if isinstance(kernel.params, tuple) else ()
    named = [getattr(param, "name", None) for param in switches]
    if not isinstance(kernel.deterministic, bool) and kernel.deterministic not in named:
        what = f"deterministic is not {kernel.deterministic!r}"
        return Fault(what, "write True or False, or the name of one of its switches")
    return None


def _of_options(name: str, options: object) -> Fault | None:
    """The fault of what shall be options of NVRTC, or None; those of attnsweep stay its own."""
    if not isinstance(options, tuple | list) or not all(isinstance(one, str) for one in options):
        what = f"{name} are a tuple of NVRTC's options, not {options!r}"
        return Fault(what, 'write a tuple of one as ("-use_fast_math",)')
    for one in options:
        if not re.fullmatch(r"-[^\s=]+(=\S+)?", one):
            return Fault(f"{name}: {one!r} is not one option", "write it without spaces, after a -")
        if _OWN_OPTION.match(one):
            fix = "write min_arch, include_dirs or Launch.defines instead"
            return Fault(f"{name}: attnsweep gives {one} itself", fix)
    return None


def of_params(
    params: object, kind: type, constants: Collection[str], modes: Collection[str], taken: type
) -> Fault | None:
    """The fault of a Family's params, or None.

    kind: Param. constants: names that a problem defines. modes: names of its modes. taken: Config,
    whose attributes a parameter's name would hide.
    """
    example = 'write params=(Param("BLOCK_M", (64, 128), "query rows per block"),)'
    if not isinstance(params, tuple) or not all(isinstance(param, kind) for param in params):
        return Fault(f"params are a tuple of Param, not {params!r}", example)
    defined: list[str] = []
    for param in params:
        name, values = param.name, param.values
        why = _macro(name) if isinstance(name, str) else "is not text"
        if why is None and (name in constants or name.startswith("STAGE_")):
            why = "is a constant that attnsweep defines"
        if why is None and name in modes:
            why = "is a mode that every family has"
        if why is None and hasattr(taken, name):
            why = "hides an attribute of Config"
        if why is not None:
            return Fault(f"the parameter's name {name!r} {why}", "choose another name, like TILE_K")
        if values == ():
            return Fault(f"{name}: it has no values", "write a tuple of one as (64,)")
        if not isinstance(values, tuple):
            what = f"{name}: its values must be a tuple, not {values!r}"
            return Fault(what, "write a tuple of one as (64,)")
        if not all(isinstance(value, int | str) for value in values):
            what = f"{name}: values are whole numbers, bools or text, not {values!r}"
            return Fault(what, "the preprocessor knows no others; count in smaller units")
        texts = [value for value in values if isinstance(value, str)]
        options = [text for text in texts if text.startswith("-")]
        if (fault := _of_options(name, options)) is not None:
            return fault
        texts = [text for text in texts if text not in options]
        if not all(re.fullmatch("[A-Za-z0-9_]+", text) for text in texts):
            what = f"{name}: text values are defined as {name}_VALUE, not {values!r}"
            return Fault(what, "use letters, digits and _ alone, or an option as -use_fast_math")
        defined += [name, *dict.fromkeys(f"{name}_{text.upper()}" for text in texts)]
    for name in defined:
        if defined.count(name) > 1:
            what = f"a parameter is declared twice: {name}"
            return Fault(what, "each -D has one meaning: rename one, or drop it")
    return None


def of_function(what: str, function: object, arguments: Sequence[str]) -> Fault | None:
    """The fault of a function that attnsweep will call with these arguments, or None."""
    called = f"def name({', '.join(arguments)})"
    if not callable(function):
        return Fault(f"{what} is {function!r}, and cannot be called", f"decorate {called}")
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        return Fault(f"{what} is asynchronous, or yields, and returns no value", f"write {called}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have none
        return None
    try:
        signature.bind(*arguments)
    except TypeError as error:
        return Fault(f"{what} is called with {', '.join(arguments)}: {error}", f"write {called}")
    return None


def of_rule(name: object, description: object) -> Fault | None:
    """The fault of a rule's name and description, or None."""
    if not isinstance(description, str):
        return Fault(
            f"a rule's description is text, not {description!r}",
            'write @kernel.rule("what it says"), with parentheses',
        )
    if not isinstance(name, str) or not name:
        return Fault(f"a rule's name is text, not {name!r}", "decorate a function that has a name")
    return None


def of_stage(
    name: object,
    params: object,
    constants: object,
    *,
    declared: Sequence[str],
    known: Collection[str],
    taken: Collection[str],
) -> Fault | None:
    """The fault of a stage's name, params or constants, or None.

    declared: the family's parameters. known: constants that a problem has. taken: other stages.
    """
    if not isinstance(name, str) or not _IDENTIFIER.fullmatch(name):
        return Fault(
            f"a stage's name is a C identifier in quotes, not {name!r}",
            'write @kernel.stage("fwd"), with parentheses',
        )
    if name.upper() in {other.upper() for other in taken}:
        what = f"two stages called {name}: both would define STAGE_{name.upper()}"
        return Fault(what, "rename one")
    for what, chosen, there in (("params", params, declared), ("constants", constants, known)):
        if not isinstance(chosen, tuple) or not all(isinstance(one, str) for one in chosen):
            example = f'write {what}=("{next(iter(there), "NAME")}",)'
            return Fault(f"stage {name}: {what} are a tuple of names, not {chosen!r}", example)
        for one in chosen:
            if one not in there:
                return Fault(
                    f"stage {name}: {what} names {one!r}; there are {', '.join(there) or 'none'}",
                    f"name those that its code depends on, or declare {one}",
                )
            if chosen.count(one) > 1:
                return Fault(f"stage {name}: {what} names {one!r} twice", "name it once")
    return None


def of_workspaces(sizes: object, tensors: Collection[str] = TENSORS) -> Fault | None:
    """Why what a workspace builder returned is refused, or None.

    tensors: names of the call's inputs and of its output.
    """
    example = 'return a mapping of names to bytes, like {"scores": 4096}, or {} for none'
    if not isinstance(sizes, Mapping):
        return Fault(f"returned {sizes!r}", example)
    for name, size in sizes.items():
        if not isinstance(name, str) or _macro(name) is not None:
            return Fault(f"names a buffer {name!r}", 'name it by a C identifier, like "scores"')
        if name in tensors:
            what = f"names a buffer {name!r}, which is one of the call's own tensors"
            return Fault(what, "choose another name")
        if type(size) is not int or not 0 <= size <= _MOST_BYTES:
            what = f"gives {name} {size!r} bytes"
            return Fault(what, "give a whole number of bytes from 0 to 2**72: use //, not /")
    return None


def of_launch(
    launch: object, buffers: Collection[str], taken: Collection[str] = ()
) -> Fault | None:
    """The fault of what a stage returned, or None.

    taken: names that the stage's parameters and constants define already.
    """
    if not isinstance(launch, Launch):
        return Fault(f"must return a Launch or None, not {launch!r}", "None leaves the stage out")
    if not isinstance(launch.function, str) or _macro(launch.function) is not None:
        what = f"has function {launch.function!r}"
        return Fault(what, 'name the template\'s extern "C" __global__ function')
    grid = launch.grid
    if type(grid) is not tuple or len(grid) != 3 or not all(type(x) is int for x in grid):
        return Fault(f"has grid {grid!r}: needs three ints", "use //, or ceil_div, not /")
    for name, value, least in (
        ("grid", min(grid), 1),
        ("threads", launch.threads, 1),
        ("smem_bytes", launch.smem_bytes, 0),
        ("min_blocks_per_sm", launch.min_blocks_per_sm, 1),
    ):
        if type(value) is not int:
            return Fault(f"has {name} {value!r}: needs an int", "use //, or ceil_div, not /")
        if value < least:
            return Fault(f"has {name} {value!r}, which is too small", f"at least {least}")
    if type(launch.carveout) is not int or not -1 <= launch.carveout <= 100:
        return Fault(f"has carveout {launch.carveout!r}", "a percentage, or -1 for the driver's")
    if not isinstance(launch.programmatic, bool):
        return Fault(f"has programmatic {launch.programmatic!r}", "True or False")
    if not isinstance(launch.args, tuple):
        return Fault(f"has args {launch.args!r}: needs a tuple", "write a tuple of one as (x,)")
    for arg in launch.args:
        if (fault := _of_argument(arg, buffers)) is not None:
            return fault
    defines = launch.defines
    if not isinstance(defines, Mapping) or not all(isinstance(n, int) for n in defines.values()):
        what = f"has defines {defines!r}: they are a mapping of names to ints"
        return Fault(what, 'write defines={"MIN_BLOCKS": 2}')
    for name in defines:
        why = _macro(name) if isinstance(name, str) else "is not text"
        if why is None and name in taken:
            what = f"has defines of {name!r}, which would override the stage's own {name}"
            return Fault(what, "choose another name; a row would report a value that was not used")
        if why is None and name.startswith("STAGE_"):
            why = "attnsweep defines"
        if why is not None:
            return Fault(f"has defines of {name!r}, which {why}", "choose another name")
    return None


def _of_argument(arg: object, buffers: Collection[str]) -> Fault | None:
    named = arg.buffer if isinstance(arg, TensorMap) else arg
    if isinstance(named, str):
        if named not in buffers:
            what = f"names the buffer {named!r}; there are {', '.join(sorted(buffers))}"
            return Fault(what, "name one of them, or return it from @kernel.workspace")
    elif isinstance(arg, int):
        if not -(2**31) <= arg < 2**31:
            return Fault(f"passes {arg}, which is no int32", "pass a smaller unit, or two ints")
    elif not isinstance(arg, float):
        what = f"passes {arg!r}: an argument is a buffer's name, an int, a float or a TensorMap"
        return Fault(what, "convert it, as in int(x)")
    return _of_tensor_map(arg) if isinstance(arg, TensorMap) else None


def _of_tensor_map(made: TensorMap) -> Fault | None:
    """The fault of a TMA descriptor that the driver would refuse, or None."""
    for name, value in (("dims", made.dims), ("strides", made.strides), ("box", made.box)):
        if type(value) is not tuple or not all(type(x) is int and x > 0 for x in value):
            what = f"has a TensorMap of {made.buffer} with {name} {value!r}"
            return Fault(what, "give a tuple of ints above 0")
    rank = len(made.dims)
    if not 1 <= rank <= 5 or len(made.box) != rank or len(made.strides) != rank - 1:
        what = f"has a TensorMap of {made.buffer} with {rank} dims, {len(made.strides)} strides "
        return Fault(
            f"{what}and {len(made.box)} sizes of the box",
            "give 1 to 5 dims, as many sizes, and a stride for every dim but the first",
        )
    if any(stride % 16 for stride in made.strides) or max(made.box) > 256:
        what = f"has a TensorMap of {made.buffer} with strides {made.strides!r}, box {made.box!r}"
        return Fault(what, "strides are multiples of 16 bytes, and a box has at most 256 elements")
    if made.swizzle_bytes not in (0, 32, 64, 128):
        what = f"has a TensorMap of {made.buffer} with swizzle_bytes {made.swizzle_bytes!r}"
        return Fault(what, "give 0, 32, 64 or 128")
    return None
