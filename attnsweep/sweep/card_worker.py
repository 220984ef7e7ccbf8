"""The child process of one card: it takes one problem at a time and tells every row as it comes.

It talks to its parent in lines of JSON: what to do on its standard input, what happens on its
standard output. It writes no file of the run and compiles nothing; the parent does both. When its
input ends, it ends, and its GPU process with it.

Only what starts the GPU process is imported here; `tasks` is, while that starts.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, BinaryIO

from attnsweep.bench.gpu import Gpu, WorkerError
from attnsweep.bench.worker import Worker
from attnsweep.core.errors import AttnsweepError, NoGpuError
from attnsweep.core.problem import Problem
from attnsweep.device.process import die_with
from attnsweep.sweep.messages import CardFault, Message, Pipe

if TYPE_CHECKING:
    from attnsweep.sweep.card_tasks import Tasks

# How long an idle child may take to notice that it should end.
_IDLE_S = 0.2
OpenGpu = Callable[[Message], AbstractContextManager[Gpu]]


def serve(read: BinaryIO, write: BinaryIO, open_gpu: OpenGpu) -> None:
    """Obey the lines of `read` until they end, which ends the process; or until a fault.

    open_gpu: makes the GPU from the first message.
    """
    pipe = Pipe(write)
    todo: SimpleQueue[Message] = SimpleQueue()
    ending = threading.Event()
    tasks: Tasks | None = None

    def listen() -> None:
        for line in read:
            message = json.loads(line)
            if message["do"] == "cubin":
                assert tasks is not None
                tasks.compiler.answer(message)
            else:
                todo.put(message)
        todo.put({"do": "end"})
        if not ending.wait(_IDLE_S):
            os._exit(0)  # whatever the main thread works on or waits for

    threading.Thread(target=listen, daemon=True).start()
    begin = todo.get()
    try:
        with open_gpu(begin) as gpu:
            first = begin.get("first")
            if first is not None:
                first = Problem.of(first["problem"]), first["seed"]
            with ThreadPoolExecutor(1) as aside:
                described = aside.submit(gpu.describe, preload=begin["preload"], first=first)
                from attnsweep.sweep.card_tasks import (
                    Tasks,  # a second, while the GPU process starts
                )
            here = described.result()
            tasks = Tasks(pipe, gpu, here, begin["cache_dir"])
            pipe.tell("ready", environment=here.model_dump(mode="json"))
            while (message := todo.get())["do"] != "end":
                tasks.do(message)
            ending.set()  # the GPU process ends before this one
    except NoGpuError as error:
        pipe.tell("gone", why=error.what)
    except AttnsweepError as error:
        pipe.tell("fault", why=error.render())
    except (CardFault, WorkerError) as error:
        pipe.tell("fault", why=str(error))


def worker(begin: Message) -> AbstractContextManager[Gpu]:
    """The process that owns this child's card. A parent on this machine holds the card's lock."""
    cache_dir = begin["cache_dir"]
    place = Path(cache_dir) if cache_dir else None
    return Worker(begin["timeout_s"], cache_dir=place, card_held=not begin["remote"])


def main(open_gpu: OpenGpu = worker) -> None:
    """Serve the process that started this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the parent handles Ctrl-C
    die_with(os.getppid())
    told = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints is no message
    code = 1
    try:
        serve(sys.stdin.buffer, told, open_gpu)
        code = 0
    except BaseException:
        traceback.print_exc()  # the parent shows the last line
    sys.stderr.flush()
    os._exit(code)  # the thread that reads cannot be joined
