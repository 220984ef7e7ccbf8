"""The cards of this machine, from NVML: nothing here starts CUDA or disturbs a card."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from attnsweep.core.errors import NoGpuError, SpecError
from attnsweep.core.files import install_command
from attnsweep.core.hardware import Arch, arch_of

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class InstalledCard:
    """One card. number: its place among the visible ones. uuid: as nvidia-smi -L prints it."""

    number: int
    uuid: str
    name: str

    @property
    def hashed(self) -> str | None:
        """The UUID as rows have it, if it is known: see Environment.uuid."""
        return hashed(self.uuid)

    def __str__(self) -> str:
        """`card 1, NVIDIA H200 (GPU-1b2c3d4e)`."""
        return f"card {self.number}, {self.name} ({self.uuid[:12]})"


def hashed(uuid: str) -> str:
    """Twelve hex digits of a hash of the UUID: they tell cards apart without naming one."""
    return hashlib.sha256(uuid.encode()).hexdigest()[:12]


def installed() -> list[InstalledCard]:
    """The cards that CUDA would show this process, in the order of $CUDA_VISIBLE_DEVICES if it is
    set, otherwise in that of nvidia-smi. Raises NoGpuError without NVML or a driver.
    """
    try:
        import pynvml
    except ImportError as error:
        raise NoGpuError(
            "--gpus needs nvidia-ml-py, which lists the cards", hint=install_command("cuda13")
        ) from error
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        found = [
            (text(pynvml.nvmlDeviceGetUUID(card)), text(pynvml.nvmlDeviceGetName(card)))
            for card in handles
        ]
    except pynvml.NVMLError as error:
        raise NoGpuError(f"the cards cannot be listed: {error}") from error
    cards = [InstalledCard(number, uuid, name) for number, (uuid, name) in enumerate(found)]
    visible = os.environ.get(VISIBLE)
    if visible is None:
        return cards
    shown = []
    for word in filter(None, map(str.strip, visible.split(","))):
        fits = _fitting(word, cards)
        if len(fits) != 1:  # CUDA too ignores this word and all that follow
            break
        shown.append(fits[0])
    return [InstalledCard(n, card.uuid, card.name) for n, card in enumerate(shown)]


def installed_arch() -> Arch | None:
    """The architecture of this machine's GPUs if all have the same one, without starting CUDA.

    From NVML, with the number of SMs; None without nvidia-ml-py, a driver, or a known card.
    """
    try:
        import pynvml as nvml

        nvml.nvmlInit()
        cards = [nvml.nvmlDeviceGetHandleByIndex(n) for n in range(nvml.nvmlDeviceGetCount())]
        (capability,) = {tuple(map(int, nvml.nvmlDeviceGetCudaComputeCapability(c))) for c in cards}
        (cores,) = {int(nvml.nvmlDeviceGetNumGpuCores(card)) for card in cards}
        arch = arch_of((capability[0], capability[1]))
    except Exception:  # ImportError, any of NVML's own errors, or cards of several kinds
        return None
    # A core is what makes an fp32 multiply-add a clock.
    return None if arch is None else replace(arch, sm_count=cores // arch.fma_per_clock)


def chosen(asked: str, cards: Sequence[InstalledCard]) -> list[InstalledCard]:
    """The cards that `--gpus` names: `all`, numbers, or UUIDs or their beginnings, with commas.

    Raises SpecError for a name of no card or of several, a card named twice, or cards of several
    kinds; NoGpuError if there are none.
    """
    there = "\n  ".join(["there are:", *map(str, cards)])
    if not cards:
        limited = f" ({VISIBLE}={os.environ[VISIBLE]})" if VISIBLE in os.environ else ""
        raise NoGpuError(f"no card is visible here{limited}", where="--gpus")
    if asked.strip() == "all":
        found = list(cards)
    else:
        found = []
        for word in map(str.strip, asked.split(",")):
            if word.upper().startswith("MIG"):
                what = f"{word!r} is a part of a card, and only whole ones are timed"
                raise SpecError(what, where="--gpus", hint=there)
            fits = _fitting(word, cards)
            if len(fits) != 1:
                what = f"{word!r} is {'no card' if not fits else 'the beginning of several cards'}"
                raise SpecError(what, where="--gpus", hint=there)
            if fits[0] in found:
                raise SpecError(f"{word!r} names a card again", where="--gpus", hint=there)
            found += fits
    if len({card.name for card in found}) > 1:
        named = "\n  ".join(map(str, found))
        raise SpecError(
            "cards of several kinds: a run is of one kind",
            where="--gpus",
            hint=f"{named}\n  sweep each kind on its own, then compare: attnsweep compare",
        )
    return found


def _fitting(word: str, cards: Sequence[InstalledCard]) -> list[InstalledCard]:
    if word.isdecimal():
        return [card for card in cards if card.number == int(word)]
    wanted = word.lower()
    if not wanted.startswith("gpu-") or len(wanted) < 5:
        return []
    return [card for card in cards if card.uuid.lower().startswith(wanted)]


def text(value: str | bytes) -> str:
    """NVML's text as str; some bindings return bytes."""
    return value if isinstance(value, str) else value.decode()
