"""Find the fastest correct attention kernel for a GPU and a shape, by measuring.

The command line is the usual way in. From Python, on a machine with an NVIDIA GPU:

    import attnsweep

    spec = attnsweep.load_spec("h100")  # a file, or the name of a shipped spec
    outcome = attnsweep.run(spec)  # compile, check, time, rank; resumes
    for trial in attnsweep.winners(outcome.run):
        print(trial.problem.label, trial.kernel, dict(trial.config), trial.time_us.median)

Without a GPU, a recorded run is read and ranked by `open_run` and `rank`. Everything that a script
needs is in `__all__`, which `__init__.pyi` lists; a name is imported when it is first used, so that
`import attnsweep` costs nothing. Other modules may change in any release.
"""

from typing import Any

import lazy_loader

__version__ = "0.1.0"
_attached, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
_OF_PACKAGES = {
    "counters": "attention_counters",
    "explain": "explain_attention",
    "register": "register_attention",
}
"""Names that exported packages have for functions of ours."""


def __getattr__(name: str) -> Any:
    try:
        return _attached(name)
    except AttributeError as error:
        if (own := _OF_PACKAGES.get(name)) is None:
            raise
        what = f"attnsweep has no {name}, which exported packages have; its name here is {own}"
        raise AttributeError(what) from error
