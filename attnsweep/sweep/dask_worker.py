"""What runs on a Dask worker: the child process of its card, and the way between it and the asker.

The asker sends lines through a Dask queue and hears lines as events of a topic, so that nothing but
JSON text travels. Kernels and headers come with the first lines; machine code comes by its content.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from attnsweep import __version__
from attnsweep.compile.nvrtc import default_cache_dir
from attnsweep.core.files import shipped, write_file
from attnsweep.sweep.messages import COMMAND, Message, Process

SILENT_S = 60.0
ALIVE_S = 5.0
SHIPPED = "shipped"


def queue_of(name: str) -> str:
    """The queue of lines to a child."""
    return f"attnsweep-{name}-to"


def topic_of(name: str) -> str:
    """The topic of Dask on which a child publishes its lines."""
    return f"attnsweep-{name}-from"


def texts_of(directory: Path) -> dict[str, str]:
    """The kernels and headers in a directory and below it, by their relative names."""
    return {
        path.relative_to(directory).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(directory.rglob("*"))
        if path.suffix in (".py", ".cu", ".cuh") and "__pycache__" not in path.parts
    }


def digest_of(texts: dict[str, str]) -> str:
    """One digest of such texts."""
    return hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).hexdigest()


def serve(name: str, version: str, command: Sequence[str] | None, silent_s: float) -> None:
    """Run a child and carry lines, until it ends or the asker is done or gone.

    version: of the asker's attnsweep. command: of the child, in place of the real one. silent_s:
    an asker that is not heard of for so long is gone, and its card is free again.
    """
    import dask
    from distributed import Queue, get_worker

    worker = get_worker()

    def tell(message: Message) -> None:
        worker.log_event(topic_of(name), json.dumps(message))

    if version != __version__:
        tell({"say": "gone", "why": f"it has attnsweep {__version__}, not {version}"})
        return
    tell({"say": "begun"})
    with tempfile.TemporaryDirectory(prefix="attnsweep-") as place:
        carrier = Carrier(Path(place), tell)
        # Dask's own, such as one thread for BLAS, would make this child unlike that of --gpus.
        daskish = dask.config.get("distributed.nanny.pre-spawn-environ", {})
        child = Process(command or COMMAND, {}, carrier.told, without=daskish)
        try:
            _carry(Queue(queue_of(name)), carrier, child, silent_s)
        finally:
            child.stop(2.0)
            if carrier.ended is None:
                carrier.ended = child.why
            tell({"say": "over", "why": carrier.ended})  # a child's `ended` is of its searches


def _carry(queue: Any, carrier: Carrier, child: Process, silent_s: float) -> None:
    def listen() -> None:
        with contextlib.suppress(Exception):  # the asker is silent, or the scheduler is gone
            while (message := json.loads(queue.get(timeout=silent_s)))["do"] != "end":
                carrier.lines.put(message)
        carrier.lines.put({"do": "end"})

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    while (message := carrier.lines.get())["do"] != "end":
        if message["do"] != "alive":
            carrier.ended = carrier.here(message)
            if carrier.ended is not None:
                break
            child.send(message)
    if thread.is_alive():
        with contextlib.suppress(Exception):
            queue.put(json.dumps({"do": "end"}))  # the listener's turn


class Carrier:
    """Turns the asker's paths into those of this host, and back."""

    def __init__(self, place: Path, tell: Any) -> None:
        self._place, self._tell = place, tell
        self._cache = default_cache_dir() / "received"
        self.ended: str | None = None
        self.lines: SimpleQueue[Message] = SimpleQueue()
        """What the asker sends; `end` also if the child has ended."""

    def told(self, message: Message | None) -> None:
        """The child told something, or ended."""
        if message is None:
            self.lines.put({"do": "end"})
            return
        if message["say"] == "compile":
            message["source"] = self._named(Path(message["source"]))
        self._tell(message)

    def here(self, message: Message) -> str | None:
        """Make a message one of this host; returns why that cannot be, or None."""
        if message["do"] == "open":
            if digest_of(texts_of(shipped("kernels"))) != message.pop("shipped"):
                return "the kernels of its attnsweep are not those of the asker"
            for number, texts in message.pop("texts").items():
                for name, text in texts.items():
                    path = (self._place / number / name).resolve()
                    if not path.is_relative_to(self._place.resolve()):
                        return f"a kernel's name leads elsewhere: {name}"
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(text, encoding="utf-8")
            spec = self._place / "spec.yaml"
            spec.write_text(message.pop("text"), encoding="utf-8")
            message["spec"] = str(spec)
            message["families"] = {
                family: str(shipped("kernels") if at == SHIPPED else self._place / at)
                for family, at in message["families"].items()
            }
        elif message["do"] == "cubin" and "data" in message:
            data = base64.b64decode(message.pop("data"))
            digest = hashlib.sha256(data).hexdigest()
            if digest != message["digest"]:
                return "machine code arrived damaged"
            path = self._cache / digest[:2] / digest / "stage.cubin"
            if not path.is_file() or path.read_bytes() != data:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_file(path, data)
            message["path"] = str(path)
        return None

    def _named(self, source: Path) -> str:
        for name, root in ((SHIPPED, shipped("kernels")), ("", self._place)):
            if source.is_relative_to(root):
                return (Path(name) / source.relative_to(root)).as_posix()
        raise ValueError(f"{source} is no kernel of this sweep")
