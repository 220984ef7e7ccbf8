"""Shared fixtures. gpu tests are skipped, with the reason, where there is no GPU."""

from __future__ import annotations

import pytest

try:
    from hypothesis import settings
except ImportError:  # a GPU machine may run tests/gpu alone
    pass
else:
    # A busy machine is no failure: speed is shown in recorded runs, never by a timed test.
    settings.register_profile("attnsweep", deadline=None)
    settings.load_profile("attnsweep")


def _why_no_gpu() -> str | None:
    try:
        import cupy
    except ImportError:
        return "needs a GPU: CuPy is not installed"
    try:
        return None if cupy.cuda.runtime.getDeviceCount() else "needs a GPU: none found"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"needs a GPU: {error}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    reason = _why_no_gpu()
    if reason is None:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))
