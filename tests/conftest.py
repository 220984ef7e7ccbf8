"""What all tests share: which of them run where, one cache of compiled code, the command line.

And of what is too much for a push, those that it runs: others for each commit.
"""

import gc
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

try:
    from hypothesis import settings
except ImportError:  # a GPU machine may run tests/gpu alone
    settings = None

if "PYTEST_XDIST_WORKER" in os.environ:
    # As many processes as cores: threads of a matrix product each would wait for one another, which
    # makes tests of PyTorch (OMP) three times as long.
    for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        os.environ.setdefault(variable, "1")
pytest_plugins = ["without_gpu"]
BY_FILE = tuple(f"tests/{name}/" for name in ("unit", "numerics", "process", "pytorch", "recorded", "source"))
BY_FILE += tuple(f"tests/compile/test_{name}" for name in ("calls", "interpret", "trace", "tunings"))
CACHE_VARIABLE = "ATTNSWEEP_CACHE_DIR"
SEED_VARIABLE = "SIMT_SEED"
T = TypeVar("T")


def pytest_addoption(parser: pytest.Parser) -> None:
    """What takes too long for each push."""
    parser.addoption(
        "--thorough",
        action="store_true",
        help="fifteen times the examples of each property, and every corner of every kernel",
    )


def pytest_configure(config: pytest.Config) -> None:
    """How many examples each property gets; and Ctrl-C works, as tests press it.

    A shell without job control has what it starts with `&` ignore it.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if settings is not None:
        # A busy machine is no failure: speed is shown in recorded runs, never by a timed test.
        settings.register_profile("push", deadline=None, max_examples=20)
        settings.register_profile("thorough", deadline=None, max_examples=300)
        settings.load_profile("thorough" if config.option.thorough else "push")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n`, tests of one file in BY_FILE go to one process, and all that need the one GPU.

    What is dear is made once for a file: a recorded run is read, a large spec planned, a process
    that traces calls started.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith("tests/gpu/"):
                return "tests/gpu/"
            return nodeid.split("::")[0] if nodeid.startswith(BY_FILE) else nodeid

    return Scheduling(config, log) if config.option.dist == "load" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none, and leave out what is too much for a push.

    A file's first such test is skipped with the reason; its others, hundreds, are left out.
    """
    _leave_some(config, items)
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    reason = _why_no_gpu() if on_gpu else None
    if reason is None:
        return
    firsts = {item.path: item for item in reversed(on_gpu)}
    for item in firsts.values():
        item.add_marker(pytest.mark.skip(reason=reason))
    left = {*on_gpu} - {*firsts.values()}
    config.hook.pytest_deselected(items=[item for item in on_gpu if item in left])
    items[:] = [item for item in items if item not in left]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Modules and tests are no garbage: look for none while they are made."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Thousands of tests and recorded rows are no garbage: look less often for what is."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def _leave_some(config: pytest.Config, items: list[Any]) -> None:
    """Leave N cases of each test marked nightly(push=N), unless all are asked for.

    Tests that name one `of` are drawn together. Where N is 1, half of the tests have their case.
    """
    if everything(config):
        return
    groups: dict[tuple[str, int], list[Any]] = defaultdict(list)
    for item in items:
        if marker := item.get_closest_marker("nightly"):
            groups[marker.kwargs.get("of", item.originalname), marker.kwargs["push"]].append(item)
    ones = [group for group in groups if group[1] == 1]
    without = drawn(ones, str, len(ones) // 2)
    left: set[Any] = set()
    for group, each in groups.items():
        push = 0 if group in without else group[1]
        left |= {*each} - {*drawn(each, lambda item: item.name, push)}
    if left:
        config.hook.pytest_deselected(items=sorted(left, key=lambda item: item.nodeid))
        items[:] = [item for item in items if item not in left]


def pytest_report_header() -> str:
    """What a sample was drawn by."""
    drawn_by = seed() or "nothing"
    return f"a sample drawn by {drawn_by} (or {SEED_VARIABLE}); all: -m nightly"


def _why_no_gpu() -> str | None:
    try:
        import cupy
    except ImportError:
        return "needs a GPU: CuPy is not installed"
    try:
        return None if cupy.cuda.runtime.getDeviceCount() else "needs a GPU: none found"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"needs a GPU: {error}"


@pytest.fixture(scope="session", autouse=True)
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One folder of compiled code for the session and all its processes.

    A folder that the environment names is kept, and used again by the next session.
    """
    with pytest.MonkeyPatch.context() as patch:
        if CACHE_VARIABLE not in os.environ:
            base = tmp_path_factory.getbasetemp()
            own = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
            patch.setenv(CACHE_VARIABLE, str(own / "cubins"))
        yield Path(os.environ[CACHE_VARIABLE])


@dataclass(frozen=True, slots=True)
class Done:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def attnsweep(constants: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Run the command line in this process: errors become exit codes as they do for a user.

    width: of what it writes to, which is no terminal.
    """
    from attnsweep import cli
    from attnsweep.reports import terminal

    def run(*arguments: object, width: int = 120) -> Done:
        constants(sys, argv=["attnsweep", *map(str, arguments)])
        for console in (terminal.console, terminal.errors):
            constants(console, width=width)
        capsys.readouterr()
        code: object = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code or 0
        captured = capsys.readouterr()
        assert isinstance(code, int), code
        return Done(code, captured.out, captured.err)

    return run


@pytest.fixture
def constants(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets values of a module or another object, which has them: constants(module, COMING_S=1.0).

    How long or how much something is, its version, its place; never what does something.
    """

    def set_(module: object, **values: object) -> None:
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)  # raises where there is none

    return set_


@pytest.fixture
def timed_by(constants: Callable[..., None]) -> Callable[..., None]:
    """Has modules tell the time by a function: timed_by(now, module, another)."""

    def set_(now: Callable[[], float], *modules: object) -> None:
        clock = SimpleNamespace(monotonic=now, perf_counter=now, perf_counter_ns=now)
        for module in modules:
            constants(module, time=clock)

    return set_


@pytest.fixture(scope="session")
def drawn_by() -> str:
    """What random tests are seeded by."""
    return seed()


@cache
def seed() -> str:
    """What a sample is drawn by: $SIMT_SEED, or the commit that is checked out, or nothing."""
    if given := os.environ.get(SEED_VARIABLE):
        return given
    command = ["git", "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    except OSError:  # no git
        return ""
    return done.stdout.strip()[:12]


def everything(config: pytest.Config) -> bool:
    """Whether all is asked for, by -m, -k or an id."""
    named = any("::" in argument for argument in config.args)
    marked = {"nightly", "mutation"} & set(config.getoption("-m").split())
    return bool(marked or config.getoption("-k") or named)


def drawn(items: Iterable[T], name: Callable[[T], str], count: int) -> list[T]:
    """So many of them, others for each seed."""
    drawn_by = seed()
    return sorted(items, key=lambda item: sha256((drawn_by + name(item)).encode()).digest())[:count]


@pytest.fixture
def few(pytestconfig: pytest.Config) -> Callable[[list[object], int], list[object]]:
    """Leaves a number of items of a list, or all of it at night."""
    if everything(pytestconfig):
        return lambda items, _: items
    return lambda items, count: drawn(items, str, count)


@pytest.fixture
def some(request: pytest.FixtureRequest) -> Callable[[list[object], int], list[object]]:
    """Leaves some items of a list, others for each test; all of it with --thorough, as at night."""
    if request.config.option.thorough or everything(request.config):
        return lambda items, _: items
    return lambda items, count: drawn(items, lambda item: request.node.name + str(item), count)


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """Give Ctrl-C and SIGTERM back to pytest: a command has handlers of its own."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture(scope="session")
def nursery() -> Iterator[Any]:
    """Forks the processes of fake cards."""
    from nursery import Nursery

    with Nursery() as made:
        yield made
