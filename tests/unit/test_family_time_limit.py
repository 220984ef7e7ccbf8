"""A declaration whose functions never return, and limits that a config exceeds."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from samples import PROBLEM

from attnsweep.core.errors import KernelError
from attnsweep.core.hardware import arch_named
from attnsweep.family import time_limit
from attnsweep.family.family import BLOCK_LIMITS, Config, Family, Launch, Param
from attnsweep.family.space import Space
from attnsweep.reports import terminal, views
from attnsweep.specs.plan import PlannedProblem

ARCH = arch_named("sm_90a")


def family(smem: int = 0, threads: int = 32, defines: dict[str, int] | None = None) -> Family:
    kernel = Family("toy", summary="", params=(Param("A", (1, 2), ""), Param("B", (0, 1), "")))
    kernel.stage("fwd")(lambda c, p, a: Launch("toy", (1, 1, 1), threads * c.A, (), smem * c.A, defines or {}))
    return kernel


def endless(config: Config, problem: object, arch: object) -> bool:
    while config.A == 2 and config.B == 1:
        pass
    return True


LOOP_LINE = endless.__code__.co_firstlineno + 1


def test_an_endless_rule_is_ended_once_and_named_with_its_line_and_config(constants) -> None:
    constants(time_limit, LIMIT_S=0.2)
    asked = []

    def rule(config: Config, problem: object, arch: object) -> bool:
        asked.append(config.label)
        return endless(config, problem, arch)

    kernel = family()
    kernel.rule("never ends")(rule)
    begun = time.monotonic()
    with pytest.raises(KernelError) as caught:
        Space.build(kernel, PROBLEM, ARCH)
    assert time.monotonic() - begun < 5
    said = caught.value.render()
    assert "rule rule of toy did not return within 0.2 s" in said
    assert any(f"test_family_time_limit.py:{LOOP_LINE + n}: rule" in said for n in (0, 1))
    assert f"config A=2 B=1, problem {PROBLEM.label}" in said
    assert asked.count("A=2 B=1") == 1


def test_ctrl_c_in_a_slow_rule_names_it_too(constants) -> None:
    kernel = family()
    kernel.rule("never ends")(endless)
    constants(time_limit, LIMIT_S=60.0)
    timer = threading.Timer(0.8, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt, match=r"in rule endless of toy\n  config A=2 B=1, prob"):
        Space.build(kernel, PROBLEM, ARCH)
    timer.join()


def test_what_ctrl_c_interrupted_is_printed(capsys) -> None:
    def app() -> None:
        raise KeyboardInterrupt("toy.py:3: in rule endless of toy\n  config A=2")

    with pytest.raises(SystemExit) as ended:
        terminal.to_the_end(app)
    assert ended.value.code == 130
    assert "interrupted: toy.py:3: in rule endless of toy" in capsys.readouterr().err


def test_the_alarm_is_given_back() -> None:
    Space.build(family(), PROBLEM, ARCH)
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert time_limit.elapsed_s() == 0.0


def test_another_users_alarm_is_left_alone() -> None:
    before = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    try:
        Space.build(family(), PROBLEM, ARCH)
        assert signal.getsignal(signal.SIGALRM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGALRM, before)


def test_an_exceeded_limit_is_named_with_value_and_maximum() -> None:
    space = Space.build(family(smem=200_000), PROBLEM, ARCH)
    assert space.removed[BLOCK_LIMITS] == 2
    assert space.excess_text == (f"bytes of shared memory of stage fwd 400,000, at most {ARCH.smem_per_block:,}")
    both = Space.build(family(smem=300_000), PROBLEM, ARCH)
    assert "300,000 to 600,000, at most" in both.excess_text
    shown = views.planned([PlannedProblem(PROBLEM, (both,), {})], None, 200)
    assert "block_limits 4 (bytes of shared memory of stage fwd 300,000" in " ".join(
        " ".join(line.plain for line in shown).replace("\u00a0", " ").split()
    )
    threads = Space.build(family(threads=1024), PROBLEM, ARCH)
    assert threads.excess_text == "threads per block of stage fwd 2,048, at most 1,024"


@pytest.mark.parametrize("name", ["A", "HEAD_DIM"])
def test_defines_may_not_override_a_parameter_or_a_constant(name) -> None:
    with pytest.raises(KernelError, match=f"would override the stage's own {name}"):
        Space.build(family(defines={name: 3}), PROBLEM, ARCH)
    Space.build(family(defines={"OTHER": 3}), PROBLEM, ARCH)


def test_a_second_ctrl_c_while_threads_end_prints_no_traceback() -> None:
    program = """
import os, signal, threading, time
from attnsweep.reports import terminal

def app():
    def compiles():
        threading.main_thread().join()
        time.sleep(0.2)  # the interpreter waits for this thread now
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
    threading.Thread(target=compiles).start()
    raise KeyboardInterrupt

terminal.to_the_end(app)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stderr, done.returncode) == ("interrupted\n", -signal.SIGINT)
