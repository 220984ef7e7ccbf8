"""How a callable of the user's is named, and asked for: `mine=module:function?layout=bshd`."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields
from typing import Any, Literal

CALL = r"(([A-Za-z_]\w*(\.[A-Za-z_]\w*)*|[\w./-]*\w\.py):[A-Za-z_]\w*)"
"""`module:function` or `file.py:function`."""
LABEL = r"[a-z0-9][a-z0-9_-]*"
_OPTION = r"(graph=(true|false)|layout=(bhsd|bshd)|workspace=\d+|strict=true|factory=true)"
CALLABLE = re.compile(rf"({LABEL}=)?{CALL}(\?{_OPTION}(&{_OPTION})*)?")
"""Any Python callable, with a label before it and options behind it."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A callable, and how it is asked for. Its text is its name in rows.

    graph: whether a CUDA graph holds its calls; one that none can hold is refused if it is True,
    and issued call by call if it is None. layout: of q, k, v and o. workspace: bytes of device
    memory that a call may take beside its outputs; None is no limit. strict: whether the strict
    judge calls it, in a process of its own. factory: whether it returns the callable of a problem.
    """

    call: str
    label: str = ""
    graph: bool | None = None
    layout: Literal["bhsd", "bshd"] = "bhsd"
    workspace: int | None = None
    strict: bool = False
    factory: bool = False

    @classmethod
    def of(cls, name: str) -> Asked:
        """Read what CALLABLE matches."""
        named, _, options = name.partition("?")
        label, _, call = named.rpartition("=")
        how: dict[str, Any] = dict(part.split("=") for part in options.split("&") if part)
        how |= {key: json.loads(text) for key, text in how.items() if key != "layout"}
        return cls(call, label, **how)

    def __str__(self) -> str:
        given = [(own.name, getattr(self, own.name), own.default) for own in fields(self)[2:]]
        options = [f"{name}={str(how).lower()}" for name, how, default in given if how != default]
        named = f"{self.label}={self.call}" if self.label else self.call
        return f"{named}?{'&'.join(options)}" if options else named
