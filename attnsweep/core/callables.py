"""How a callable of the user's is named, and asked for: `mine=module:function?layout=bshd`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

CALL = r"(([A-Za-z_]\w*(\.[A-Za-z_]\w*)*|[\w./-]*\w\.py):[A-Za-z_]\w*)"
"""`module:function` or `file.py:function`."""
LABEL = r"[a-z0-9][a-z0-9_-]*"
_OPTION = r"(graph=(true|false)|layout=(bhsd|bshd)|workspace=\d+|strict=true)"
CALLABLE = re.compile(rf"({LABEL}=)?{CALL}(\?{_OPTION}(&{_OPTION})*)?")
"""Any Python callable, with a label before it and options behind it."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A callable, and how it is asked for. Its text is its name in rows.

    graph: whether a CUDA graph holds its calls; one that none can hold is refused if it is True,
    and issued call by call if it is None. layout: of q, k, v and o. workspace: bytes of device
    memory that a call may take beside its outputs; None is no limit. strict: whether the strict
    judge calls it, in a process of its own.
    """

    call: str
    label: str = ""
    graph: bool | None = None
    layout: Literal["bhsd", "bshd"] = "bhsd"
    workspace: int | None = None
    strict: bool = False

    @classmethod
    def of(cls, name: str) -> Asked:
        """Read what CALLABLE matches."""
        named, _, options = name.partition("?")
        label, _, call = named.rpartition("=")
        given = dict(part.split("=") for part in options.split("&") if part)
        return cls(
            call,
            label,
            {"true": True, "false": False}.get(given.get("graph", "")),
            "bshd" if given.get("layout") == "bshd" else "bhsd",
            int(given["workspace"]) if "workspace" in given else None,
            "strict" in given,
        )

    def __str__(self) -> str:
        options = [] if self.graph is None else [f"graph={str(self.graph).lower()}"]
        options += [] if self.layout == "bhsd" else [f"layout={self.layout}"]
        options += [] if self.workspace is None else [f"workspace={self.workspace}"]
        options += ["strict=true"] if self.strict else []
        named = f"{self.label}={self.call}" if self.label else self.call
        return f"{named}?{'&'.join(options)}" if options else named
