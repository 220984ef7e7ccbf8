"""Judge right callables with and without `--strict`: what it costs, and how near its clock comes.

Usage: python benchmarks/strict.py [FILE.json] [--rounds 9] [--callables flash] [--shapes …].
For each callable and shape, the file has the seconds of both judgements, both ratios to
torch_flash, and the time of a call by events and by the judge's clock. It also tells what happens
if another user opens memory that this one exports, where root runs it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from right_callables import names
from setting import console, described, options, write

from attnsweep import Problem, judge

SHAPES = (
    "2,16,1024,64 bf16",
    "16,16,512,64 bf16 causal",
    "16,12,577,64 fp16",
    "4,16,4096,64 bf16 causal",
    "8,16,729,72 bf16",
    "4,16,2048,128 bf16 causal",
    "8,16,1024,128 fp16",
    "4,32,4096,128 bf16 causal",
    "1,16,8192,128 fp16",
    "2,16,2048,256 bf16 causal",
)
NOBODY = 65534
# Without attnsweep: another user may not be able to read it.
OPENS = """
import ctypes, sys
cuda, context, pointer = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_uint64()
class Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 64)]
handle = Handle.from_buffer_copy(bytes.fromhex(sys.argv[1]))
steps = cuda.cuInit(0), cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
steps += (cuda.cuCtxSetCurrent(context),)
opened = cuda.cuIpcOpenMemHandle_v2
opened.argtypes = [ctypes.c_void_p, Handle, ctypes.c_uint]
print(*steps, opened(ctypes.byref(pointer), handle, 1))
"""


def opened_by(user: int) -> str:
    """What a process of a user says that opens memory of this one: 0 is success in each step."""
    from cupy.cuda import runtime

    handle = runtime.ipcGetMemHandle(runtime.malloc(2 << 20)).hex()
    python = "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable
    command = [python, "-c", OPENS, handle]
    try:
        done = subprocess.run(command, user=user, cwd="/", capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{type(error).__name__}: {error}"
    return done.stdout.strip() or done.stderr.strip()[-300:] or f"exit code {done.returncode}"


def compared(call: str, problem: Problem, rounds: int) -> dict[str, Any]:
    """One callable judged in both ways."""
    found: dict[str, Any] = {}
    for mode, strict in (("friendly", False), ("strict", True)):
        begun = time.monotonic()
        verdict = judge(call, problem, against=("torch_flash",), strict=strict, rounds=rounds)
        found[mode] = {
            "verdict": verdict.verdict,
            "reason": verdict.reason,
            "seconds": round(time.monotonic() - begun, 1),
            "time_us": verdict.time_us,
            "ci95": verdict.ci95,
            "trusted_us": verdict.trusted_us,
            "x_base": verdict.x_base,
            "calls_judged": verdict.calls_judged,
        }
        console.print(f"{mode} {found[mode]['seconds']} s: {verdict.sentence}")
    return found


def main() -> None:
    """Judge each callable on each shape, print, and write."""
    parser = options(__doc__, "strict.json")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--callables", default="flash")
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    arguments = parser.parse_args()
    environment = described()
    other = opened_by(NOBODY) if os.geteuid() == 0 else "not tried: that needs root"
    console.print(f"memory opened by another user: {other}")
    cases: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        asked = names(Path(place))
        for shape in arguments.shapes:
            for name in arguments.callables.split(","):
                problem = Problem.parse(shape)
                found = compared(asked[name], problem, arguments.rounds)
                cases.append({"callable": name, "problem": problem.label, **found})
                write(arguments.file, environment, {"cases": cases, "other_user": other})


if __name__ == "__main__":
    main()
