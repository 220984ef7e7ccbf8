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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, cast

from attnsweep import __version__
from attnsweep.core.errors import NoGpuError, SpecError, ToolchainError
from attnsweep.core.files import install_command, shipped
from attnsweep.device.cards import InstalledCard
from attnsweep.sweep import dask_worker
from attnsweep.sweep.cards import AWAY_S
from attnsweep.sweep.fleet import Arrivals, Fleet
from attnsweep.sweep.messages import Child, Deliver, Message

_LOOK_S = 1.0
# How long a scheduler may take to answer.
CONNECT_S = 10.0
# How long a run that finds no worker with a GPU waits for the first.
COMING_S = 60.0
# A worker that is busy with another run is left out after so long. A run whose asker was killed
# frees its workers before that.
_IN_USE_S = dask_worker.SILENT_S + 15.0


@dataclass(frozen=True, slots=True)
class ClusterCard(InstalledCard):
    """A worker of a cluster. uuid: its name there; the card tells its own when it is ready.

    address: of its process; one that is started again has another.
    """

    address: str

    @property
    def hashed(self) -> str | None:
        """None: the asking process does not know the hash of a worker's card."""
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
        Client(address, timeout=CONNECT_S, set_as_default=False).close()
        # Dask connects this one again, for as long, to a scheduler that was started again.
        client = Client(address, timeout=AWAY_S, set_as_default=False)
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


def cards_of(client: Any, say: Callable[[str], None]) -> list[ClusterCard]:
    """The workers that have a GPU; waits for the first one. Raises NoGpuError if none comes.

    say: told what is waited for.
    """
    ends, waits = time.monotonic() + COMING_S, False
    while True:
        workers = _workers(client)
        found = _with_gpu(workers)
        if found:
            return found
        address = client.scheduler.address
        some = f"none of the {len(workers)} workers of {address} has a GPU"
        none = some if workers else f"no worker has come to {address}"
        how = (
            f"CUDA_VISIBLE_DEVICES=0 dask worker {address} --nthreads 1 --resources GPU=1, "
            "for each card"
        )
        if time.monotonic() > ends:
            raise NoGpuError(f"{none}, waited {COMING_S:g} s", hint=how)
        if not waits:
            say(f"{none}: waiting up to {COMING_S:g} s for one; start it: {how}")
        waits = True
        time.sleep(_LOOK_S / 2)


def arrivals(client: Any) -> Arrivals:
    """Tells which workers with a GPU are there, once a second."""

    @contextmanager
    def told(there: Callable[[Sequence[InstalledCard], float], None]) -> Iterator[None]:
        ended = threading.Event()

        def look() -> None:
            while not ended.wait(_LOOK_S):
                seen_at = time.monotonic()
                with contextlib.suppress(Exception):  # the scheduler may come back
                    cards = _with_gpu(_workers(client))
                    if client.status == "running":
                        there(cards, seen_at)

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(2 * _LOOK_S)

    return told


def _workers(client: Any) -> dict[str, dict[str, Any]]:
    """Every worker by its address. Raises OSError or another error if the scheduler is away, where
    Client.scheduler_info tells what it knew last.
    """
    found = client.sync(client.scheduler.identity, n_workers=-1)["workers"]
    return cast(dict[str, dict[str, Any]], found)


def _with_gpu(workers: Mapping[str, Mapping[str, Any]]) -> list[ClusterCard]:
    names = {
        str(facts["name"]): address
        for address, facts in workers.items()
        if facts.get("resources", {}).get("GPU", 0) >= 1
        and not str(facts.get("status")).startswith("clos")  # `closing_gracefully` among them
    }
    return [ClusterCard(number, name, "", names[name]) for number, name in enumerate(sorted(names))]


def starter(
    client: Any, command: Sequence[str] | None = None
) -> Callable[[InstalledCard, Deliver], Child]:
    """Starts the child of a cluster's card. command: in place of the real child's."""
    run = uuid.uuid4().hex

    def start(card: InstalledCard, deliver: Deliver) -> Child:
        assert isinstance(card, ClusterCard)
        return ClusterChild(client, card, deliver, command, run)

    return start


def fleet(client: Any, workers: Sequence[ClusterCard]) -> Fleet:
    """These workers, and those that come later."""
    return Fleet(workers, start_child=starter(client), arrivals=arrivals(client))


class _Lost(Exception):
    """The child cannot go on. say: what is told of it beside why, if anything."""

    def __init__(self, why: str, say: str | None = None) -> None:
        super().__init__(why)
        self.say = say


class ClusterChild:
    """The child of a worker, through `dask_worker.serve` there."""

    def __init__(
        self,
        client: Any,
        card: ClusterCard,
        deliver: Deliver,
        command: Sequence[str] | None,
        run: str,
    ) -> None:
        """run: the same for all children of a run."""
        self._client, self._card, self._deliver = client, card, deliver
        self._name = uuid.uuid4().hex
        self._run = f"attnsweep-{run}-"
        self._out: SimpleQueue[Message] = SimpleQueue()
        self.why = "its worker left the cluster"
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
            self._client.unsubscribe_topic(dask_worker.topic_of(self._name))
            if self._task is not None:
                self._task.release()

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
        if message["say"] == "over":
            self.why = message["why"]
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
            self.why = str(error) or type(error).__name__
            if not isinstance(error, _Lost):
                self.why = f"the scheduler is lost: {self.why}"
                self._deliver({"say": "away", "why": self.why, "blame": False})
            elif error.say is not None:
                self._deliver({"say": error.say, "why": self.why})
            self._finish()

    def _write(self) -> None:
        """Send lines, and now and then that the asker is alive."""
        from distributed import Queue

        queue: Any = Queue(dask_worker.queue_of(self._name), client=self._client)
        message: Message = {"do": "alive"}
        while message["do"] != "end":
            try:
                message = self._out.get(timeout=dask_worker.ALIVE_S)
            except Empty:
                message = {"do": "alive"}
            queue.put(json.dumps(message))

    def _watch(self, command: Sequence[str] | None) -> None:
        """Start the task, and notice if the worker or the scheduler is lost."""
        self._client.subscribe_topic(dask_worker.topic_of(self._name), self._heard)
        began, at, waiting = time.monotonic(), self._card.address, False
        self._task = self._client.submit(
            dask_worker.serve, self._name, __version__, command, dask_worker.SILENT_S,
            key=self._run + self._name, workers=[at], pure=False,
            allow_other_workers=False, resources={"GPU": 1}, retries=0,
        )  # fmt: skip
        while not self._over.wait(_LOOK_S):
            if self._task.status in ("cancelled", "lost"):
                raise ConnectionError("its client had to connect again")
            if at not in self._client.scheduler_info(n_workers=-1)["workers"]:
                raise _Lost("its worker left the cluster", "away")
            if self._task.status == "error":
                raise _Lost(f"{self._task.exception()!r}")
            if self._begun or not self._busy(at):
                continue
            if time.monotonic() - began > _IN_USE_S:
                why = "it works for another run; run the same command when that has ended"
                raise _Lost(why, "gone")
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
        numbers = {at: str(number) for number, at in enumerate(places)} | {own: dask_worker.SHIPPED}
        self._roots = {number: Path(at) for at, number in numbers.items()}
        return {
            **message,
            "text": Path(message["spec"]).read_text(encoding="utf-8"),
            "families": {family: numbers[at] for family, at in message["families"].items()},
            "texts": {numbers[at]: dask_worker.texts_of(Path(at)) for at in places},
            "shipped": dask_worker.digest_of(dask_worker.texts_of(shipped("kernels"))),
        }

    def _local(self, source: str) -> Path:
        first, _, rest = source.partition("/")
        path = (self._roots[first] / rest).resolve()
        if not path.is_relative_to(self._roots[first].resolve()):
            raise ValueError(f"{source} is no kernel of this sweep")
        return path
