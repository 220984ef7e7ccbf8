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
    tune,
    winners,
    write_page,
)
from .bench.bench import Bench
from .bench.gpu import Gpu, WorkerError
from .bench.worker import Worker
from .choose.finals import select
from .choose.lower_bound import Skips
from .choose.search import Search
from .choose.stats import proportion_interval, ratio_interval
from .choose.strategies.gp import gp
from .choose.strategies.history import History, recorded_history, shipped_history
from .cli import app
from .compile.candidate import Build
from .compile.launches import Candidate, CompiledStage, FirstTimes, LaunchPlan
from .compile.nvrtc import Compiler, Cubin
from .core.errors import (
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
from .core.hardware import ARCHS, Arch, CardFacts, arch_named, binding, bounds
from .core.observer import Observer
from .core.problem import Problem
from .core.trial import Accuracy, Environment, Measurement, Resources, Status, Trial
from .family.family import BLOCK_LIMITS, Config, Family, Launch, Param, TensorMap
from .family.space import Space
from .regress.verdicts import Verdict
from .serve.export import Exported
from .serve.recorded_calls import shapes
from .serve.runtime.table import PackageError
from .serve.shipped import (
    attention,
    attention_counters,
    attention_varlen,
    disable,
    enable,
    explain_attention,
    explain_attention_varlen,
    flash_attn_func,
    flash_attn_varlen_func,
    register_attention,
)
from .specs.load import SweepSpec
from .store.run import Run, find_runs, latest_run
from .sweep.session import SweepOutcome
from .tools.judge import KernelVerdict, judge

__version__: str
__all__ = [
    "ARCHS",
    "BLOCK_LIMITS",
    "Accuracy",
    "Arch",
    "AttnsweepError",
    "Bench",
    "Build",
    "Candidate",
    "CardFacts",
    "CompileError",
    "CompiledStage",
    "Compiler",
    "Config",
    "Cubin",
    "Environment",
    "Exported",
    "Family",
    "FirstTimes",
    "Gpu",
    "History",
    "KernelError",
    "KernelVerdict",
    "Launch",
    "LaunchPlan",
    "Measurement",
    "NoGpuError",
    "Observer",
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
    "SweepOutcome",
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
    "attention_varlen",
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
    "explain_attention_varlen",
    "export",
    "exported_table",
    "families",
    "find_runs",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "gp",
    "judge",
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
    "tune",
    "winners",
    "write_page",
]
