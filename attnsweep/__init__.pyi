from .api import (
    builds,
    compare_candidates,
    compare_runs,
    compile_spec,
    counters,
    dispatch_summary,
    export,
    exported_table,
    families,
    judge_dispatch,
    load_spec,
    open_run,
    plan,
    rank,
    rebuild,
    report,
    run,
    schema,
    winners,
    write_page,
)
from .build.candidate import Build
from .build.launches import Candidate, CompiledStage, FirstTimes, Launches
from .build.nvrtc import Compiler, Cubin
from .build.observer import Observer
from .check.verdicts import Verdict
from .choose.evidence import proportion_interval, ratio_interval
from .choose.finals import select
from .choose.gp import gp
from .choose.history import History, recorded_history, shipped_history
from .choose.search import Search
from .choose.skips import Skips
from .cli import app
from .errors import (
    AttnsweepError,
    CompileError,
    KernelError,
    NoGpuError,
    ProblemError,
    SpaceError,
    SpecError,
    StoreError,
    ToolchainError,
)
from .family.chunks import CHUNKS, CHUNKS_RULE, MODES
from .family.declare import BLOCK_LIMITS, Config, Kernel, Launch, Param, TensorMap
from .family.space import Space
from .gpu.bench import Bench
from .gpu.worker import Gpu, Worker, WorkerError
from .hardware import ARCHS, Arch, Card, arch_named, binding, bounds
from .problem import Problem
from .spec.load import SweepSpec
from .store.run import Run, find_runs, latest_run
from .sweep import Outcome
from .trial import Accuracy, Environment, Measurement, Resources, Status, Trial
from .use.package import Exported
from .use.runtime.table import PackageError
from .use.shapes import shapes
from .use.shipped import (
    attention,
    attention_counters,
    disable,
    enable,
    explain_attention,
    register_attention,
)

__version__: str
__all__ = [
    "ARCHS",
    "BLOCK_LIMITS",
    "CHUNKS",
    "CHUNKS_RULE",
    "MODES",
    "Accuracy",
    "Arch",
    "AttnsweepError",
    "Bench",
    "Build",
    "Candidate",
    "Card",
    "CompileError",
    "CompiledStage",
    "Compiler",
    "Config",
    "Cubin",
    "Environment",
    "Exported",
    "FirstTimes",
    "Gpu",
    "History",
    "Kernel",
    "KernelError",
    "Launch",
    "Launches",
    "Measurement",
    "NoGpuError",
    "Observer",
    "Outcome",
    "PackageError",
    "Param",
    "Problem",
    "ProblemError",
    "Resources",
    "Run",
    "Search",
    "Skips",
    "Space",
    "SpaceError",
    "SpecError",
    "Status",
    "StoreError",
    "SweepSpec",
    "TensorMap",
    "ToolchainError",
    "Trial",
    "Verdict",
    "Worker",
    "WorkerError",
    "app",
    "arch_named",
    "attention",
    "attention_counters",
    "binding",
    "bounds",
    "builds",
    "compare_candidates",
    "compare_runs",
    "compile_spec",
    "counters",
    "disable",
    "dispatch_summary",
    "enable",
    "explain_attention",
    "export",
    "exported_table",
    "families",
    "find_runs",
    "gp",
    "judge_dispatch",
    "latest_run",
    "load_spec",
    "open_run",
    "plan",
    "proportion_interval",
    "rank",
    "ratio_interval",
    "rebuild",
    "recorded_history",
    "register_attention",
    "report",
    "run",
    "schema",
    "select",
    "shapes",
    "shipped_history",
    "winners",
    "write_page",
]
