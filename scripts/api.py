"""Everything that the scripts use of attnsweep, in one place."""

from attnsweep import counters
from attnsweep.arch import arch_named as arch
from attnsweep.candidates import plan
from attnsweep.cli import app
from attnsweep.kernel import BLOCK_LIMITS, Config
from attnsweep.kernel import discover as families
from attnsweep.page import write as write_page
from attnsweep.problem import Problem
from attnsweep.ranking import rank
from attnsweep.report import files as tables
from attnsweep.schedule import CHUNKS, CHUNKS_RULE, MODES
from attnsweep.schema import schema_text
from attnsweep.search import Search
from attnsweep.spec import load_spec
from attnsweep.store import Run, find_runs, open_run
from attnsweep.trial import Environment

__all__ = ["BLOCK_LIMITS", "CHUNKS", "CHUNKS_RULE", "MODES", "Config", "Environment", "Problem"]
__all__ += ["Run", "Search", "app", "arch", "counters", "families", "find_runs"]
__all__ += ["load_spec", "open_run", "plan", "rank", "schema_text", "tables", "write_page"]
