"""The place of PyTorch's scaled_dot_product_attention: what stands there, and who holds it."""

from __future__ import annotations

import gc
import sys
import weakref
from pkgutil import resolve_name
from types import CellType, ModuleType
from typing import Any

NAME, PLACE = "scaled_dot_product_attention", "torch.nn.functional"

# What stood in the place of PyTorch's function, in this and in earlier recordings, and the cell of
# each that holds PyTorch's own.
stood: list[tuple[weakref.ref[Any], CellType]] = []


class InPlace:
    """What stands in the place of PyTorch's function: for a program it is that function.

    A package has the same in its sdpa_patch.py. Neither may import the other: each is copied alone.

    It is no function of Python's, which a class would make a method. It equals PyTorch's own, so
    that tables which programs make for `__torch_function__` have both; and whoever unpickles it
    gets what stands in the place there.
    """

    __slots__ = ("__weakref__",)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, InPlace) or other is pytorchs()

    def __hash__(self) -> int:
        return hash(pytorchs())

    def __getattr__(self, name: str) -> Any:
        return getattr(pytorchs(), name)

    def __repr__(self) -> str:
        return repr(pytorchs())

    def __reduce__(self) -> Any:
        return resolve_name, (f"{PLACE}:{NAME}",)

    def __copy__(self) -> InPlace:
        return self

    def __deepcopy__(self, _: object) -> InPlace:
        return self


def pytorchs() -> Any:
    """PyTorch's own function, whatever stands in its place."""
    return sys.modules["torch"]._C._nn.scaled_dot_product_attention


def is_held(torch: Any) -> bool:
    """Whether what was made before may call PyTorch's function without a module's name for it.

    A functools.partial may, or a default argument, an attribute of an object, TorchScript.
    """
    if any(ours() is not None for ours, _ in stood):
        return True  # of a recording before, which calls PyTorch's own
    own = pytorchs()
    modules = list(sys.modules.values())
    known = {id(vars(each)) for each in modules if isinstance(each, ModuleType)}
    # A list that PyTorch makes once, with what then stands there, to ask classes about it.
    known.add(id(torch.overrides.get_overridable_functions()[torch.nn.functional]))
    known |= {id(cell) for _, cell in stood} | {id(sys._getframe())}
    for each in gc.get_referrers(own):
        if isinstance(each, dict):  # nobody calls a key
            harmless = id(own) not in map(id, each.values())
        else:  # nor what a set holds, or PyTorch's list of names
            named = isinstance(each, tuple) and each[1:] == (f"aten::{NAME}",)
            harmless = named or isinstance(each, set)
        if id(each) not in known and not harmless:
            return True
    compiled = torch.jit.ScriptModule, torch.jit.ScriptFunction
    return any(issubclass(type(each), compiled) for each in gc.get_objects())


def replace(old: Any, new: Any) -> None:
    """Put a function in the place of another wherever modules have it, by whatever name."""
    for path, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and (path == PLACE or not path.startswith("torch.")):
            for name, each in list(vars(module).items()):
                if each is old:
                    setattr(module, name, new)
