"""A tunable parameter of a family, and its values on a card."""

from __future__ import annotations

from dataclasses import dataclass

from attnsweep.hardware import Arch
from attnsweep.trial import Value

SMS = "sms"
"""The value of a parameter that stands for the number of SMs of the card, as in a spec."""


@dataclass(frozen=True, slots=True)
class Param:
    """One tunable parameter of a family, with the values that a sweep tries by default.

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
        least = min([1, *(int(own) for own in self.values if not isinstance(own, str))])
        return f"{self.name} must be at least {least}, not {value}" if value < least else None
