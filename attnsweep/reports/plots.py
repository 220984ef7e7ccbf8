"""The library that draws a page's plots in the reader's browser, from vl-convert-python."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

from attnsweep.compile.nvrtc import default_cache_dir
from attnsweep.core.errors import ToolchainError
from attnsweep.core.files import install_command, write_file

# vl-convert holds a whole JavaScript engine. In a process of its own, its 1.3 s pass while the run
# is ranked, and its 80 MB stay out of this process.
_BUNDLE = """
import sys, vl_convert
bundle = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
sys.stdout.buffer.write(bundle.encode())
"""


class PlotLibrary:
    """Vega, Vega-Lite and Vega-Embed as one script that sets `window.vegaEmbed`.

    The cache keeps it by vl-convert's version. If it is not there, the constructor starts a process
    that builds it. Raises ToolchainError without vl-convert.
    """

    def __init__(self) -> None:
        try:
            version = metadata.version("vl-convert-python")
        except metadata.PackageNotFoundError as error:
            raise ToolchainError(
                "an HTML page needs Vega-Lite, from vl-convert-python",
                hint=install_command("html"),
            ) from error
        self._kept = default_cache_dir() / "page" / f"vega-{version}.js"
        self._text: str | None = None
        self._child: subprocess.Popen[bytes] | None = None
        try:
            self._text = self._kept.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            command = [sys.executable, "-c", _BUNDLE]
            self._child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def text(self) -> str:
        """The script; waits until it is built. Raises ToolchainError if vl-convert fails."""
        if self._text is None:
            self._text = self._made()
        return self._text

    def _made(self) -> str:
        assert self._child is not None  # without a text, there is a child
        made, said = self._child.communicate()
        if self._child.returncode:
            last = said.decode("utf-8", "replace").strip().splitlines()[-1:]
            raise ToolchainError(
                f"vl-convert failed: {last[0] if last else 'no message'}",
                hint=install_command("html"),
            )
        text = made.decode().replace("</script", "<\\/script")
        try:
            self._kept.parent.mkdir(parents=True, exist_ok=True)
            write_file(self._kept, text.encode())
        except OSError:
            pass  # a cache only saves time
        return text
