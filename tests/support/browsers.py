"""A page as a real browser draws it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from html import unescape
from pathlib import Path

import pytest

# Parts of the browser's own window that are pages, and need a process that draws them.
_WINDOW = "WebUIReloadButton,WebUIOmniboxPopup,WebUIOmniboxAimPopup,WebUIOmniboxFullPopup"
_NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, _NAMES)), "")
browser = pytest.mark.skipif(not BROWSER, reason="needs a browser: Chromium is not installed")


# Loads pages in frames of a width and writes, when each is drawn: its document, and its text that
# is cut.
_FRAMES = """<!doctype html><meta charset="utf-8"><body><script>
const text = (of) => [...of.querySelectorAll("figure svg")].flatMap((svg) => {
  const box = svg.getBoundingClientRect();
  return [...svg.querySelectorAll("text")].filter((text) => {
    const own = text.getBoundingClientRect();
    return own.width && (own.left < box.left - 1 || own.right > box.right + 1);
  }).map((text) => text.textContent);
});
for (const [address, style] of %s) {
  const frame = document.body.appendChild(document.createElement("iframe"));
  frame.style = "height:14000px;border:0;" + style;
  frame.src = address;
  const timer = setInterval(() => {
    const page = frame.contentDocument;
    if (!page?.documentElement?.dataset.drawn) return;
    clearInterval(timer);
    const found = { html: page.documentElement.outerHTML, cut: text(page) };
    found.width = page.documentElement.scrollWidth;
    const wide = [...page.querySelectorAll(".scroll")].filter((box) => box.clientWidth + 1 < box.scrollWidth);
    found.scrolls = wide.filter((box) => box.clientWidth).map((box) => box.firstElementChild.className);
    const kept = document.body.appendChild(document.createElement("pre"));
    kept.dataset.page = address;
    kept.textContent = JSON.stringify(found);
  }, 100);
}
</script>"""


@dataclass(frozen=True)
class Page:
    """A page as it was drawn."""

    html: str
    cut: list[str]
    """Text of plots that is not all in sight."""
    width: int
    scrolls: list[str]
    """Tables that are wider than the place they have."""


def drawn(directory: Path, pages: dict[str, str]) -> tuple[dict[str, Page], list[str], list[str]]:
    """The pages, each an address in a directory and the style of its frame, in one browser.

    With them what their scripts said, and every address that they asked for.
    """
    (directory / "frames.html").write_text(_FRAMES % json.dumps([*pages.items()]))
    document, said, asked = _browsed(directory / "frames.html")
    kept = re.findall(r'<pre data-page="(.*?)">(.*?)</pre>', document, re.DOTALL)
    found = {unescape(name): Page(**json.loads(unescape(text))) for name, text in kept}
    return found, said, asked


def _browsed(file: Path) -> tuple[str, list[str], list[str]]:
    log = file.with_name("net.json")
    command = [
        BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-extensions",
        "--disable-background-networking", "--disable-component-update", "--no-first-run",
        f"--disable-features={_WINDOW}",
        "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={file.with_name('profile')}",
        f"--log-net-log={log}", "--enable-logging=stderr",
        "--window-size=1280,1000", "--virtual-time-budget=30000", "--dump-dom",
        "--allow-file-access-from-files", f"file://{file}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    said = re.findall(r'CONSOLE[^"]*"(.*)", source', done.stderr)
    events = [event.get("params", {}) for event in json.loads(log.read_text())["events"]]
    # The browser asks for things of its own; those have no page that initiated them.
    asked = {e["url"] for e in events if e.get("initiator", "not an origin") != "not an origin"}
    return done.stdout, said, sorted(url for url in asked if not url.startswith(("file:", "data:")))
