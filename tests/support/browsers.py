"""A page as a real browser draws it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

# Parts of the browser's own window that are pages, and need a process that draws them.
_WINDOW = "WebUIReloadButton,WebUIOmniboxPopup,WebUIOmniboxAimPopup,WebUIOmniboxFullPopup"
_NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, _NAMES)), "")
browser = pytest.mark.skipif(not BROWSER, reason="needs a browser: Chromium is not installed")


def browsed(file: Path, fragment: str = "", *flags: str) -> tuple[str, list[str], list[str]]:
    """The drawn document of a file, what its scripts said, and every address that it asked for."""
    log = file.with_name("net.json")
    command = [
        BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-extensions",
        "--disable-background-networking", "--disable-component-update", "--no-first-run",
        f"--disable-features={_WINDOW}",
        "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={file.with_name('profile')}",
        f"--log-net-log={log}", "--enable-logging=stderr",
        "--window-size=1280,1000", "--virtual-time-budget=30000", *flags, "--dump-dom",
        f"file://{file}{fragment}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    said = re.findall(r'CONSOLE[^"]*"(.*)", source', done.stderr)
    events = [event.get("params", {}) for event in json.loads(log.read_text())["events"]]
    # The browser asks for things of its own; those have no page that initiated them.
    asked = {e["url"] for e in events if e.get("initiator", "not an origin") != "not an origin"}
    return done.stdout, said, sorted(url for url in asked if not url.startswith(("file:", "data:")))
