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

import lazy_loader

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
