"""A GPU that is none: what a test says of its `call` answers every method of `Gpu`."""

from __future__ import annotations

from typing import Any


class FakeGpu:
    """Implements `attnsweep.gpu.worker.Gpu` by one method, `call(method, *args)`."""

    def call(self, method: str, *args: Any) -> Any:
        """The answer to a method; a test overrides it, or raises WorkerError there."""
        raise NotImplementedError(method)

    def trial(self, candidate):
        return self.call("trial", candidate)

    def add(self, name, candidate, *, cold):
        self.call("add", name, candidate, cold)

    def add_baseline(self, name):
        return self.call("add_baseline", name)

    def drop(self, name):
        self.forget(name)
        self.call("drop", name)

    def forget(self, name):
        pass

    def race(self, name, replay_us, kind):
        return self.call("race", name, replay_us, kind)

    def replay(self, name, kind):
        return self.call("replay", name, kind)

    def pair(self, first, second):
        return self.call("pair", first, second)

    def eager_us(self, name):
        return self.call("eager_us", name)

    def conditions(self):
        return self.call("conditions")

    def stop(self):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()
