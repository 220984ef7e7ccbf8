"""Text is UTF-8 wherever it is read or written, whatever the locale says."""

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnsweep.core.files import shipped, utf8
from attnsweep.reports import terminal
from attnsweep.tools.simulator import COMPILER

ROOT = shipped("kernels").parent
PLACES = ("attnsweep", "scripts", "benchmarks", "kernels", "docs")
FILES = [path for place in PLACES for path in sorted((ROOT / place).rglob("*.py"))]
# Calls that take `encoding`, and the position of their mode, if they have one.
MODE = {"open": 1, "fdopen": 1, "NamedTemporaryFile": 0, "TemporaryFile": 0}
TEXT = ("read_text", "write_text", "TextIOWrapper", "FileHandler")
PROCESSES = ("run", "Popen", "check_output", "check_call")


def unencoded(tree: ast.AST) -> Iterator[int]:
    """Lines of calls that take the locale's encoding."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        given = {word.arg: word.value for word in node.keywords}
        if "encoding" in given or None in given:  # **options are looked at where they are made
            continue
        writes = name in TEXT and (isinstance(node.func, ast.Attribute) or name == "TextIOWrapper")
        reads = name in PROCESSES and {"text", "universal_newlines"} & given.keys()
        if writes or reads:
            yield node.lineno
        elif name in MODE:
            yield from [node.lineno] * takes_text(node, name, given)


def takes_text(node: ast.Call, name: str, given: dict[str | None, ast.expr]) -> bool:
    """Whether a call of `open` or the like opens a text file; one of `os` or `tarfile` opens none."""
    at = MODE[name]
    if isinstance(node.func, ast.Attribute):
        module = getattr(node.func.value, "id", "")
        if name == "open" and module in ("os", "tarfile", "lzma", "webbrowser", "store", "Store"):
            return False
        if name == "open" and module not in ("io", "builtins"):  # path.open("rb")
            at = 0
            if node.args and not isinstance(node.args[0], ast.Constant):
                return False  # gpu.open(problem)
    words = [*node.args[at : at + 1], *([given["mode"]] if "mode" in given else [])]
    default = "r" if name in ("open", "fdopen") else "w+b"
    mode = words[0].value if words and isinstance(words[0], ast.Constant) else default
    return "b" not in str(mode)


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("path.read_text()", 1),
        ("path.write_text(x)", 1),
        ("path.read_text(encoding='utf-8')", 0),
        ("open(path)", 1),
        ("open(path, 'rb')", 0),
        ("path.open('w')", 1),
        ("path.open('wb')", 0),
        ("os.open(path, flags)", 0),
        ("subprocess.run(x, text=True)", 1),
        ("subprocess.run(x, text=True, encoding='utf-8')", 0),
        ("subprocess.run(x)", 0),
        ("NamedTemporaryFile('w')", 1),
        ("NamedTemporaryFile()", 0),
    ],
)
def test_the_rule_finds_what_takes_the_encoding_of_the_locale(code, found):
    assert len([*unencoded(ast.parse(code))]) == found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_names_the_encoding_of_each_text(path):
    """In an ASCII locale these were tracebacks, in a Latin-1 one the page said `Âµs`."""
    lines = [*unencoded(ast.parse(path.read_text(encoding="utf-8")))]
    assert not lines, f'{path.relative_to(ROOT)}: add encoding="utf-8" in lines {lines}'


# -- locales --------------------------------------------------------------------------------------

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
RUN = ROOT / "results" / "h200" / "mma_h200"


def command(*words: object, code: int = 0, **variables: str) -> subprocess.CompletedProcess[bytes]:
    """A command in a process whose locale these variables set."""
    places = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHON"))}
    done = subprocess.run(
        [sys.executable, "-m", "attnsweep", *map(str, words)],
        capture_output=True, env=kept | {"PYTHONPATH": places} | variables, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr.decode("utf-8", "replace")
    return done


@pytest.fixture
def umlaut(tmp_path):
    """A run in a directory whose name no ASCII locale can say."""
    return Path(shutil.copytree(RUN, tmp_path / "Läufe µ" / "lauf"))


def test_the_page_and_the_tables_are_utf8_in_an_ascii_locale(umlaut):
    written = [umlaut.with_name(name) for name in ("seite ü.html", "zeilen.csv", "zeilen.md")]
    page, table, markdown = written
    command("report", umlaut, "--html", page, "--csv", table, "--markdown", markdown, **ASCII)
    text = page.read_text(encoding="utf-8")
    assert '<meta charset="utf-8">' in text
    assert "µs" in text
    assert "Âµ" not in text
    again = page.with_name("again.html")
    command("report", umlaut, "--html", again, PYTHONUTF8="1")
    assert again.read_bytes() == page.read_bytes()
    assert "µs" in markdown.read_text(encoding="utf-8")


def test_json_says_a_path_whatever_the_locale(umlaut):
    found = command("report", umlaut, "--json", **ASCII)
    assert json.loads(found.stdout.decode("utf-8"))["run"] == str(umlaut)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (ASCII, [" us", " +- ", "x base", "1.04-1.05"]),
        ({"PYTHONUTF8": "0", "PYTHONIOENCODING": "latin-1"}, ["µs", "±", "×"]),
        ({"PYTHONUTF8": "1"}, ["µs", "±", "×"]),
    ],
    ids=["ascii", "latin-1", "utf-8"],
)
def test_a_terminal_that_lacks_a_letter_gets_another_way_to_say_it(variables, said, umlaut):
    """`µs` and `±` were `?s` and `?`."""
    shown = command("report", umlaut, "--problem", "1,16,1024,64 causal", **variables).stdout
    text = shown.decode(variables.get("PYTHONIOENCODING", "utf-8"))
    assert all(word in text for word in said), text
    assert "?" not in text


def test_every_sign_that_we_print_has_an_ascii_way():
    signs = set()
    for path in (ROOT / "attnsweep").rglob("*.py"):
        if "runtime" not in path.parts:
            signs |= {sign for sign in path.read_text(encoding="utf-8") if not sign.isascii()}
    assert signs - {*terminal._IN_ASCII} <= {"ü"}


def test_a_kernel_in_such_a_directory_compiles(umlaut):
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC: attnsweep[compile]")
    for name in ("naive.cu", "naive.py"):
        text = (ROOT / "kernels" / name).read_text(encoding="utf-8").replace("naive", "mine")
        (umlaut.parent / name.replace("naive", "mine")).write_text(text, encoding="utf-8")
    spec = umlaut.with_name("mine ü.yaml")
    spec.write_text(
        "name: mine\nkernel_dir: .\nproblems: [{batch: 1, heads: 2, seqlen: 64, head_dim: 64}]\n"
        "kernels: {mine: {THREADS: 32}}\n",
        encoding="utf-8",
    )
    shown = command("compile", spec, "--arch", "sm_90a", **ASCII)
    assert b"mine" in shown.stdout
    if COMPILER is not None:
        done = command("verify", umlaut.with_name("mine.py"), "--problem", "1,1,8,64", **ASCII)
        assert b"0 findings in 1 case" in done.stderr


def test_what_an_export_copies_is_read_in_any_locale():
    code = "from attnsweep.serve import export; assert export.sources('mine')"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHON"))}
    env = kept | {"PYTHONPATH": str(ROOT)} | ASCII
    subprocess.run([sys.executable, "-c", code], env=env, check=True)


def test_text_of_ours_is_utf8_whatever_it_holds():
    assert utf8("µ") == "µ".encode()
    assert utf8(os.fsencode("ü").decode("ascii", "surrogateescape")).decode() == "ü"
    assert utf8("a\udcffb").decode() == "a\N{REPLACEMENT CHARACTER}b"
    assert utf8("a\ud800b") == b"a?b"
