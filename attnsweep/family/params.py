"""A parameter of a family, the values that a config gives them, and how both are written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from attnsweep.core.errors import KernelError
from attnsweep.core.hardware import Arch
from attnsweep.core.problem import Value

SMS = "sms"
"""The value of a parameter that stands for the number of SMs of the card, as in a spec."""


@dataclass(frozen=True, slots=True)
class Param:
    """One tunable parameter of a family, with the values that a sweep tries by default.

    A text value X of parameter P defines P_X; one that begins with a hyphen is a compiler option.
    absent: of a parameter that the family got later: the value at which it does what it did
    without, so that configs recorded before are still its own. None: they are not.
    """

    name: str
    values: tuple[Value, ...]
    help: str
    absent: Value | None = None

    @property
    def counts_sms(self) -> bool:
        """Whether SMS among its values is the card's number of SMs, and no text of its own."""
        return [value for value in self.values if isinstance(value, str)] == [SMS]

    def on(self, arch: Arch, values: tuple[Value, ...] | None = None) -> tuple[Value, ...]:
        """Values (default: its own) as they are on a card: SMS is its SMs, and each comes once."""
        values = self.values if values is None else values
        if not self.counts_sms:
            return values
        return tuple(dict.fromkeys(arch.sm_count if value == SMS else value for value in values))

    def why_not(self, value: int) -> str | None:
        """Why a spec may not use this whole number as a value, or None.

        A value is at least 1, or the smallest declared value if that is less: rules divide by sizes
        and counts.
        """
        least = min([1, *(int(own) for own in self.values if isinstance(own, int))])
        return f"{self.name} must be at least {least}, not {value}" if value < least else None


class Config(Mapping[str, Value]):
    """One value for each Param of a family: a mapping that also reads as attributes."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        self._values = dict(values)
        vars(self).update(values)  # rules read them often, and __getattr__ is slow

    def __getitem__(self, name: str) -> Value:
        return self._values[name]

    def __getattr__(self, name: str) -> int:
        # Declarations do arithmetic on ints; they read the rare str Param as config["NAME"].
        try:
            return vars(self)["_values"][name]  # type: ignore[no-any-return]
        except KeyError:
            names = ", ".join(vars(self).get("_values", ()))
            raise AttributeError(f"no parameter {name!r}; it has {names}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    @cached_property
    def _hash(self) -> int:
        return hash(frozenset(self._values.items()))  # as mappings, equal in any order

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Config):
            return self._values == other._values
        return isinstance(other, Mapping) and self._values == dict(other)

    def __getstate__(self) -> dict[str, Value]:
        return self._values

    def __setstate__(self, state: dict[str, Value]) -> None:
        Config.__init__(self, state)

    @cached_property
    def label(self) -> str:
        """`BLOCK_M=64 BLOCK_N=128 …`, in declaration order."""
        return " ".join(f"{name}={text_of(value)}" for name, value in self.items())


def values_in(text: str, where: str | None = None) -> dict[str, str]:
    """The mapping of texts in `BLOCK_M=64 BLOCK_N=128 …`. Raises KernelError for any other text.

    where: the option that it is of.
    """
    values = dict[str, str]()
    for part in text.split():
        name, equals, value = part.partition("=")
        if not (name and equals and value):
            what, hint = f"not a parameter's value: {part!r}", "write NAME=VALUE, like BLOCK_M=64"
            raise KernelError(what, where=where, hint=hint)
        if name in values:
            what = f"{name} is given twice: {values[name]}, then {value}"
            raise KernelError(what, where=where, hint="drop one of the two")
        values[name] = value
    return values


def value_of(text: str) -> Value:
    """The value that a text says where nothing declares it: null, true, a number or the text."""
    known: dict[str, Value] = {"null": None, "true": True, "false": False}
    return known.get(text, int(text) if text.removeprefix("-").isdecimal() else text)


def config_in(text: str, where: str | None = None) -> Config:
    """The config in `BLOCK_M=64 num_warps=4 …`, of values that nothing declares: see values_in."""
    return Config({name: value_of(value) for name, value in values_in(text, where).items()})


def text_of(value: Value) -> str:
    """A value as a define and a label have it: a bool as 0 or 1, None as null."""
    if value is None:
        return "null"
    return str(int(value)) if isinstance(value, bool) else str(value)
