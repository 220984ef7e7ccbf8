"""The project's chores, each in a virtual environment of its own: `nox -l` lists them.

CI runs .ci/run, and these sessions for the rest. They use uv where it is installed. Arguments
after `--` go to the tool: `nox -s unit -- -k problem`.
"""

from __future__ import annotations

import nox

nox.needs_version = ">=2025.2"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["lint", "unit", "docs"]


@nox.session
def tests(session: nox.Session) -> None:
    """All tests; those that need a GPU are skipped, with the reason, where there is none."""
    session.install("-e", ".[compile,test,torch]", "transformers")
    session.run("python", "-m", "pytest", "-n", "auto", *session.posargs)


@nox.session
def unit(session: nox.Session) -> None:
    """The quick tests: one process, no PyTorch, no kernel is compiled."""
    session.install("-e", ".[compile,test]")
    session.run("python", "-m", "pytest", "-n", "auto", "tests/unit", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Formatting, lint, types, and whether the generated pages are current."""
    session.install("-e", ".[dev]")
    session.run("scripts/check", external=True)


@nox.session
def docs(session: nox.Session) -> None:
    """The site, into site/; a broken link fails. `nox -s docs -- serve` shows it as you write."""
    session.install("-e", ".[docs]")
    command = session.posargs or ["build", "--strict"]
    # mkdocs-material's notice about a later MkDocs is no warning about these pages.
    session.run("mkdocs", *command, env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session
@nox.parametrize("cuda", ["cuda13", "cuda12"])
def gpu(session: nox.Session, cuda: str) -> None:
    """The tests that need a GPU: `nox -s 'gpu(cuda13)'`; cuda12 for a driver older than 580."""
    session.install("-e", f".[{cuda},torch,test]", "transformers")
    session.run("python", "-m", "pytest", "-m", "gpu", *session.posargs)


@nox.session
def nightly(session: nox.Session) -> None:
    """What is too much for a push: every seeded bug, recorded winner and attack, many random calls.

    They run on the CPU, configs by tests/simt. Needs g++.
    """
    session.install("-e", ".[compile,test,torch]", "transformers")
    session.run("python", "-m", "pytest", "-n", "auto", "-m", "nightly", *session.posargs)
