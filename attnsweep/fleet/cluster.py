"""Cards of a Dask cluster: each worker that has the resource GPU is one.

`attnsweep[cluster]` brings Dask's `distributed`. The scheduler hands out nothing but one long task
for each card; who gets which problem is decided here, as with `--gpus`.
"""

from __future__ import annotations

import base64
import contextlib
import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from attnsweep import __version__
from attnsweep.errors import NoGpuError, SpecError, ToolchainError
from attnsweep.files import install_command, shipped
from attnsweep.fleet import bridge
from attnsweep.fleet.process import Child, Deliver, Message
from attnsweep.gpu.cards import InstalledCard

_LOOK_S = 1.0
# How long a scheduler may take to answer.
CONNECT_S = 10.0
# How long a worker that its nanny restarts may be away.
_AWAY_S = 30.0
# A worker that is busy with another run is left out after so long. A run whose asker was killed
# frees its workers before that.
_IN_USE_S = bridge.SILENT_S + 15.0


@dataclass(frozen=True, slots=True)
class ClusterCard(InstalledCard):
    """A worker of a cluster. uuid: its name there; the card tells its own when it is ready."""

    @property
    def hashed(self) -> str | None:
        """Not known here."""
        return None

    def __str__(self) -> str:
        """`worker tcp://10.0.0.2:41235`."""
        return f"worker {self.uuid}"


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """A client of the scheduler at this address. Raises SpecError for what is no address,
    ToolchainError without Dask, or NoGpuError if the scheduler does not answer.
    """
    try:
        from distributed import Client
    except ImportError as error:
        what = "--scheduler needs Dask's distributed"
        raise ToolchainError(what, hint=install_command("cluster")) from error
    _check(address)  # a Client of a wrong one is half made, and ends only after 20 s
    try:
        client = Client(address, timeout=CONNECT_S, set_as_default=False)
    except (OSError, ValueError, RuntimeError) as error:
        hint = "start one: dask scheduler; then workers: see docs/how-to/cluster.md"
        raise NoGpuError(f"no scheduler answers: {error}", where=address, hint=hint) from error
    try:
        yield client
    finally:
        with contextlib.suppress(Exception):  # the scheduler may be gone
            client.close(timeout=5)


def _check(address: str) -> None:
    """Raise SpecError if this is no address, or one that needs what Dask is not told."""
    from distributed.comm.addressing import parse_address, parse_host_port
    from distributed.security import Security

    try:
        scheme, where = parse_address(address)
        host, port = parse_host_port(where)
        if scheme not in ("tcp", "tls") or not host or not 0 < port < 2**16:
            raise ValueError("there are tcp://HOST:PORT and tls://HOST:PORT")
    except ValueError as error:
        raise SpecError(
            f"no address of a scheduler: {address!r}: {error}",
            where="--scheduler",
            hint="give the one that `dask scheduler` prints: tcp://HOST:8786",
        ) from error
    if scheme == "tls" and Security().get_connection_args("client").get("ssl_context") is None:
        raise SpecError(
            f"{address} needs certificates, and Dask's settings name none",
            where="--scheduler",
            hint="DASK_DISTRIBUTED__COMM__TLS__CA_FILE, …__CLIENT__CERT and …__CLIENT__KEY, or "
            "~/.config/dask: see https://distributed.dask.org/en/stable/tls.html",
        )


def cards_of(client: Any) -> list[ClusterCard]:
    """The workers that have a GPU. Raises NoGpuError if there is none."""
    workers = client.scheduler_info(n_workers=-1)["workers"].values()
    names = sorted(str(w["name"]) for w in workers if w.get("resources", {}).get("GPU", 0) >= 1)
    if not names:
        address = client.scheduler.address
        none = f"none of the {len(workers)} workers of {address} has a GPU"
        raise NoGpuError(
            none if workers else f"no worker has come to {address}",
            hint=f"CUDA_VISIBLE_DEVICES=0 dask worker {address} --nthreads 1 --resources GPU=1, "
            "for each card",
        )
    return [ClusterCard(number, name, "") for number, name in enumerate(names)]


def starter(
    client: Any, command: Sequence[str] | None = None
) -> Callable[[InstalledCard, Deliver], Child]:
    """Starts the child of a cluster's card. command: in place of the real child's."""
    run = uuid.uuid4().hex
    return lambda card, deliver: ClusterChild(client, card, deliver, command, run)


class _WorkerLost(Exception):
    """The worker is not there, or cannot run the child; its nanny may bring another."""


class _InUse(Exception):
    """The worker serves another run."""


class ClusterChild:
    """The child of a worker, through `bridge.serve` there."""

    def __init__(
        self,
        client: Any,
        card: InstalledCard,
        deliver: Deliver,
        command: Sequence[str] | None,
        run: str,
    ) -> None:
        """run: the same for all children of a run."""
        self._client, self._card, self._deliver = client, card, deliver
        self._name = uuid.uuid4().hex
        self._run = f"attnsweep-{run}-"
        self._out: SimpleQueue[Message] = SimpleQueue()
        self._why = "its worker left the cluster"
        self._over = threading.Event()
        self._begun = False
        self._roots: dict[str, Path] = {}
        self._task: Any = None
        self._threads = [
            threading.Thread(target=self._guarded, args=(work,), daemon=True)
            for work in (self._write, lambda: self._watch(command))
        ]
        for thread in self._threads:
            thread.start()

    def send(self, message: Message) -> None:
        """See Child."""
        if message["do"] == "open":
            message = self._with_texts(message)
        elif message["do"] == "cubin" and "path" in message:
            data = Path(message["path"]).read_bytes()
            message = message | {"data": base64.b64encode(data).decode()}
        self._out.put(message)

    def end(self) -> None:
        """See Child."""
        self._out.put({"do": "end"})

    def stop(self, wait_s: float = 0.0) -> None:
        """See Child; a child on a worker that does not answer ends itself after a minute."""
        self.end()
        self._over.wait(wait_s)
        self._finish()
        with contextlib.suppress(Exception):
            self._client.unsubscribe_topic(bridge.topic_of(self._name))
            if self._task is not None:
                self._task.release()

    @property
    def why(self) -> str:
        """See Child."""
        return self._why

    def _finish(self) -> None:
        if not self._over.is_set():
            self._over.set()
            self._deliver(None)

    def _heard(self, event: tuple[float, str]) -> None:
        message = json.loads(event[1])
        self._begun = True
        if message["say"] == "begun":
            return
        if message["say"] == "compile":
            message["source"] = str(self._local(message["source"]))
        if message["say"] == "ended":
            self._why = message["why"]
            self._finish()
        elif not self._over.is_set():
            self._deliver(message)

    def _guarded(self, work: Callable[[], None]) -> None:
        """Do something with the cluster; what fails there ends this child."""
        try:
            work()
        except Exception as error:  # Dask raises many kinds when the scheduler is gone
            if self._over.is_set():
                return
            self._why = str(error) or type(error).__name__
            if isinstance(error, _InUse):
                self._deliver({"say": "gone", "why": self._why})
            elif not isinstance(error, _WorkerLost):
                self._deliver({"say": "gone", "why": f"the scheduler is lost: {self._why}"})
            self._finish()

    def _write(self) -> None:
        """Send lines, and now and then that the asker is alive."""
        from distributed import Queue

        queue: Any = Queue(bridge.queue_of(self._name), client=self._client)
        message: Message = {"do": "alive"}
        while message["do"] != "end":
            try:
                message = self._out.get(timeout=bridge.ALIVE_S)
            except Empty:
                message = {"do": "alive"}
            queue.put(json.dumps(message))

    def _watch(self, command: Sequence[str] | None) -> None:
        """Start the task when the worker is there, and notice if it is lost."""
        self._client.subscribe_topic(bridge.topic_of(self._name), self._heard)
        began, at, waiting = time.monotonic(), None, False
        while not self._over.wait(_LOOK_S if at is not None else 0.05):
            workers = self._client.scheduler_info(n_workers=-1)["workers"]
            there = {str(facts["name"]): address for address, facts in workers.items()}
            address = there.get(self._card.uuid)
            if at is not None and address != at:
                raise _WorkerLost("its worker left the cluster")
            if at is not None and self._task.status == "error":
                raise _WorkerLost(f"{self._task.exception()!r}")
            if at is None and address is not None:
                began, at = time.monotonic(), address
                self._task = self._client.submit(
                    bridge.serve, self._name, __version__, command, bridge.SILENT_S,
                    key=self._run + self._name, workers=[at], pure=False,
                    allow_other_workers=False, resources={"GPU": 1}, retries=0,
                )  # fmt: skip
            away_s = time.monotonic() - began
            if at is None and away_s > _AWAY_S:
                raise _WorkerLost("its worker did not come back")
            if at is None or self._begun or not self._busy(at):
                continue
            if away_s > _IN_USE_S:
                raise _InUse("it works for another run; run the same command when that has ended")
            if not waiting:
                waiting = True
                why = "it works for another run, perhaps of a process that was killed"
                self._deliver({"say": "waiting", "why": f"{why}: waiting up to {_IN_USE_S:.0f} s"})

    def _busy(self, address: str) -> bool:
        """Whether a worker has a task that is none of this run's."""
        tasks = self._client.processing().get(address, ())
        return any(not str(key).startswith(self._run) for key in tasks)

    def _with_texts(self, message: Message) -> Message:
        """The message with the spec and the kernels themselves."""
        own = str(shipped("kernels"))
        places = dict.fromkeys(at for at in message["families"].values() if at != own)
        numbers = {at: str(number) for number, at in enumerate(places)} | {own: bridge.SHIPPED}
        self._roots = {number: Path(at) for at, number in numbers.items()}
        return {
            **message,
            "text": Path(message["spec"]).read_text(encoding="utf-8"),
            "families": {family: numbers[at] for family, at in message["families"].items()},
            "texts": {numbers[at]: bridge.texts_of(Path(at)) for at in places},
            "shipped": bridge.digest_of(bridge.texts_of(shipped("kernels"))),
        }

    def _local(self, source: str) -> Path:
        first, _, rest = source.partition("/")
        path = (self._roots[first] / rest).resolve()
        if not path.is_relative_to(self._roots[first].resolve()):
            raise ValueError(f"{source} is no kernel of this sweep")
        return path
