"""Options and commands beside the sweep: quiet, examples, lists, caches, completion."""

import importlib
import json
import os
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import typer
from fake_compiler import REGISTERS, FakeCompiler
from samples import full_run
from sweeping import FAMILIES, use_fake_compiler
from typer.testing import CliRunner

from attnsweep import cli
from attnsweep.compile import nvrtc
from attnsweep.compile.cache import entries, fault
from attnsweep.core.errors import StoreError
from attnsweep.tools import inspect as inspect_tool

ROOT = Path(__file__).parent.parent.parent
RUN = ROOT / "results" / "h100-80gb-hbm3" / "h100"
GROUP = typer.main.get_command(cli.app)
SPEC = f"""
kernel_dir: {FAMILIES}
problems:
  - {{batch: 1, heads: 2, seqlen: [512, 64], head_dim: 64}}
kernels: {{simple: {{THREADS: [128, 32, 64]}}}}
"""


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def spec(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(SPEC)
    return path


@pytest.fixture
def fake_nvrtc(monkeypatch):
    use_fake_compiler(monkeypatch)


def commands(group=GROUP, before=()):
    """Every command with the words that call it."""
    for name, command in group.commands.items():
        yield (*before, name), command
        if hasattr(command, "commands"):
            yield from commands(command, (*before, name))


COMMANDS = dict(commands())


# -- --help ---------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [(), *COMMANDS], ids=" ".join)
def test_every_help_ends_in_examples_that_can_be_called(attnsweep, words):
    done = attnsweep(*words, "--help")
    assert done.returncode == 0
    cut = re.search(r"\S…", done.stdout)  # to fit its column
    assert cut is None
    usage = done.stdout.partition("[OPTIONS]")[2].splitlines()[0]
    assert usage == usage.upper()  # as the text names them
    assert not re.search(r"(\.\.\.|…)}", usage)  # the dots come once
    lines = [line.strip() for line in done.stdout.partition("Examples:")[2].splitlines()]
    shown = [line for line in lines if line]
    assert shown
    for line in shown:
        first, *arguments = shlex.split(line.partition(" > ")[0])
        assert first == "attnsweep"
        assert not words or tuple(arguments[: len(words)]) == words
        names, command = (), GROUP
        while arguments and hasattr(command, "commands") and arguments[0] in command.commands:
            name = arguments.pop(0)
            names, command = (*names, name), command.commands[name]
        command.make_context(" ".join(names), arguments)  # raises UsageError


# -- how much is said -----------------------------------------------------------------------


def test_quiet_prints_the_result_alone(attnsweep):
    one = ("run", "quickstart", "--problem", "1,8,512,64")
    loud = attnsweep(*one)
    assert " candidates" in loud.stderr
    for asked in (("--quiet", *one), (*one, "-q")):
        quiet = attnsweep(*asked)
        answer = "".join(loud.stdout.splitlines(keepends=True)[-2:])
        assert (quiet.returncode, quiet.stderr, quiet.stdout) == (0, "", answer)
    assert attnsweep(*one).stderr == loud.stderr, "it stayed quiet"
    assert "no such file" in attnsweep("run", "nowhere", "--quiet").stderr


def test_a_report_takes_problems_of_its_run_alone(attnsweep):
    attnsweep("run", "quickstart", "-q")
    one = attnsweep("report", "--problem", "4,32,4096,64 bf16")
    assert one.stdout.count("  #  kernel") == 1
    assert "110 candidates, 5 baselines: " in one.stdout
    rows = attnsweep("report", "--problem", "4,32,4096,64 bf16", "--csv", "-").stdout
    assert len(rows.splitlines()) == 116
    none = attnsweep("report", "--problem", "4,32,4096,64")
    assert none.returncode == 2
    assert "has no (4,32,4096,64) fp16 full" in none.stderr
    assert "it has: (1,16,1024,64) fp16 full; (4,32,4096,64) bf16 full" in none.stderr


def test_the_specs_that_ship_are_listed_a_line_each(attnsweep, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    whole = attnsweep("list", "--specs", width=80).stdout
    assert "…" not in whole, "a pipe gets all of a line"
    monkeypatch.setenv("COLUMNS", "80")
    lines = attnsweep("list", "--specs", width=80).stdout.splitlines()
    assert [line.split()[0] for line in whole.splitlines()] == [line.split()[0] for line in lines]
    shipped = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
    assert [line.split()[0] for line in lines] == shipped
    assert all(len(line) <= 80 for line in lines)
    facts = json.loads(attnsweep("list", "--specs", "--json").stdout)["specs"]
    assert [fact["name"] for fact in facts] == shipped
    told = {fact["name"]: fact["about"] for fact in facts}
    assert told["scores"] == "One H100: calls whose scores a model changes before the softmax"
    assert all(told.values())
    assert "NAME does nothing with --specs" in attnsweep("list", "naive", "--specs").stderr


def test_verbose_prints_a_line_for_each_candidate(attnsweep, spec, fake_nvrtc):
    said = attnsweep("compile", spec, "--verbose", "--arch", "sm_80").stderr.splitlines()
    rows = [line for line in said if line.startswith("  simple")]
    assert len(rows) == 5
    assert "  simple  THREADS=128  ok" in rows
    assert "exclude each other" in attnsweep("list", "-q", "-v").stderr


# -- options that would do nothing ----------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("report RUN --target-us 3", "--target-us does nothing without --html"),
        ("report RUN --full --csv -", "--full does nothing here"),
        ("report RUN --csv - --markdown -", "only one of"),
        ("check --recorded RUN RUN --kernels . --budget-s 0", "--budget-s and --kernels do nothing with --recorded"),
        ("check --recorded RUN RUN --json --markdown -", "only one of --markdown - and --json"),
        ("check --old a.py:f 1,2,64,64", "check compares --old with --new, and --new is missing"),
        ("check quickstart --against RUN --new a.py:f", "and --old is missing"),
        ("run quickstart --dry-run --resume --wait", "--resume and --wait do nothing with --dry"),
        ("run quickstart --fresh", "--fresh does nothing here: a replay keeps no rows"),
        ("compile quickstart --json --all", "--all does nothing with --json"),
        ("cache --json prune", "--json does nothing before a subcommand"),
        ("cache prune --all --days 3", "--all and --days exclude each other"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(attnsweep, tmp_path, asked, words):
    done = attnsweep(*(str(RUN) if word == "RUN" else word for word in asked.split()))
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert not [*tmp_path.iterdir()]


# -- list, inspect, report ------------------------------------------------------------------


def test_list_has_a_line_for_each_family(attnsweep, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    lines = attnsweep("list").stdout.splitlines()
    families = sorted(path.stem for path in (ROOT / "kernels").glob("[!_]*.py"))
    assert [line.split()[0] for line in lines[: len(families)]] == families
    assert "attnsweep list NAME" in lines[len(families)]
    assert len(lines) < len(families) + 20
    assert not any(" rule " in line for line in lines)


def test_list_of_a_family_is_that_family(attnsweep):
    data = json.loads(attnsweep("list", "naive", "flash_fwd_mma", "naive", "--json").stdout)
    assert [kernel["name"] for kernel in data["kernels"]] == ["naive", "flash_fwd_mma"]
    printed = attnsweep("list", "naive").stdout
    assert printed.startswith("naive  ")
    assert "baselines" not in printed
    assert "flash_fwd_mma" not in printed
    done = attnsweep("list", "naiv")
    assert (done.returncode, "did you mean 'naive'?" in done.stderr) == (2, True)


def test_inspect_takes_what_init_wrote(attnsweep):
    """A directory or a declaration, as `verify` does."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs the compile extra")
    attnsweep("init", "--kernel", "mine")
    for subject in ("mine", "mine/mine.py"):
        done = attnsweep("inspect", subject)
        assert (done.returncode, done.stdout.split()[0]) == (0, "mine"), done.stderr
    done = attnsweep("inspect", "nowhere/mine.py")
    assert (done.returncode, done.stderr.strip().endswith("nowhere/mine.py: no such declaration")) == (2, True)
    done = attnsweep("inspect", ROOT / "kernels")
    assert (done.returncode, "kernels: append_paged_wgmma, " in done.stderr) == (2, True)


def test_inspect_says_what_it_does_not_know(attnsweep):
    done = attnsweep("inspect", RUN, "--problem", "1,8,513,64")
    assert done.returncode == 2
    assert "no winner of (1,8,513,64)" in done.stderr
    assert "(16,8,256,64) fp16 full" in done.stderr
    done = attnsweep("inspect", "flash_fwd_wgma")
    assert (done.returncode, "did you mean 'flash_fwd_wgmma'?" in done.stderr) == (2, True)
    assert "2 shapes" in attnsweep("inspect", RUN, "--problem", "1,8,1,64 1,8,2,64").stderr


def test_a_run_without_a_winner_has_none_to_inspect():
    trials = [trial for trial in full_run().trials if trial.provider != "attnsweep"]
    with pytest.raises(StoreError, match="no winner"):
        inspect_tool.winner_of(full_run(trials=trials), None)


def test_report_writes_the_tables_of_a_finished_run(attnsweep, tmp_path):
    attnsweep("run", "quickstart")
    directory = tmp_path / "results" / "replay" / "quickstart"
    done = attnsweep("report", "--csv", "a.csv", "--markdown", "b.md")
    assert done.returncode == 0, done.stderr
    assert Path("a.csv").read_bytes() == (directory / "ranking.csv").read_bytes()
    assert Path("b.md").read_bytes() == (directory / "ranking.md").read_bytes()
    assert [line.split(",")[0] for line in done.stdout.splitlines()] == ["a.csv", "b.md"]
    assert attnsweep("report", "--csv", "-").stdout == Path("a.csv").read_text()
    facts = json.loads(attnsweep("report", "--csv", "a.csv", "--json").stdout)
    assert facts == {"run": "results/replay/quickstart", "csv": "a.csv"}
    done = attnsweep("report", "--csv", "nowhere/a.csv")
    assert (done.returncode, "nowhere/a.csv: cannot be written" in done.stderr) == (2, True)
    before = (directory / "trials.jsonl").read_bytes()
    done = attnsweep("report", "--csv", directory / "trials.jsonl")
    assert (done.returncode, "is part of a run" in done.stderr) == (2, True)
    assert (directory / "trials.jsonl").read_bytes() == before


# -- compile --------------------------------------------------------------------------------


def test_several_architectures_at_once(attnsweep, spec, fake_nvrtc):
    asked = ("compile", spec, "--arch", "sm_80", "--arch", "sm_90")
    done = attnsweep(*asked)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"candidates for (\w+)", done.stdout) == ["sm_80", "sm_90a"]
    rows = json.loads(attnsweep(*asked, "--json").stdout)
    assert {arch: len(of) for arch, of in rows.items()} == {"sm_80": 5, "sm_90a": 5}
    assert len(json.loads(attnsweep(*asked[:4], "--json").stdout)) == 5
    assert attnsweep(*asked, "--arch", "sm_1").returncode == 2


@pytest.mark.parametrize("width", [60, 120])
def test_each_candidate_is_shown_if_that_is_asked_for(attnsweep, spec, fake_nvrtc, width):
    lines = attnsweep("compile", spec, "--arch", "sm_80", "--all", width=width).stdout.splitlines()
    assert max(map(len, lines)) <= width
    of_candidates = [line.split() for line in lines if line.startswith("simple")]
    assert [words[1:3] for words in of_candidates] == [["ok", str(REGISTERS)]] * 5
    assert of_candidates[1][5:7] == ["50", "%"]
    assert [line.split()[-1] for line in lines if "THREADS=" in line] == [
        *("THREADS=128", "THREADS=32", "THREADS=64", "THREADS=32", "THREADS=64")
    ]


def test_an_architecture_that_a_family_lacks_is_told_before_anything_compiles(attnsweep, tmp_path, fake_nvrtc):
    (tmp_path / "wide.yaml").write_text(
        "problems:\n  - {batch: 1, heads: 2, seqlen: 512, head_dim: 64}\nkernels: {three_kernel_wgmma: {}}\n"
    )
    done = attnsweep("compile", "wide.yaml", "--arch", "sm_90a", "--arch", "sm_80", "--json")
    assert (done.returncode, done.stdout, FakeCompiler.made) == (2, "", [])
    assert "three_kernel_wgmma: needs sm_90a, not sm_80" in done.stderr


def test_ctrl_c_while_compiling_says_how_much_is_kept(attnsweep, spec, fake_nvrtc):
    FakeCompiler.errors["simple.cu"] = KeyboardInterrupt()
    done = attnsweep("compile", spec, "--arch", "sm_80")
    assert (done.returncode, done.stdout) == (130, "")
    assert re.search(r"interrupted: \d of 5 are cached for sm_80; the same command goes on", done.stderr)


# -- the cache ------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache with one old and one new entry, half of one, and files of somebody else."""
    directory = tmp_path / "cache"
    monkeypatch.setenv(nvrtc.CACHE_VARIABLE, str(directory))
    for number, age_days in enumerate((100, 1)):
        key = f"{number:02x}" * 32
        entry = directory / "sm_80" / key[:2] / key
        entry.mkdir(parents=True)
        for name in ("stage.cubin", "meta.json"):
            (entry / name).write_bytes(bytes(512))
            then = (entry / name).stat().st_mtime - 86400 * age_days
            os.utime(entry / name, (then, then))
    left = directory / "sm_80" / "00" / ".new-dead"
    left.mkdir()
    os.utime(left, (0, 0))
    (directory / "sm_80" / "00" / ".new-alive").mkdir()
    theirs = directory / "photos" / "aa" / ("aa" * 32)
    theirs.mkdir(parents=True)
    (theirs / "stage.cubin").write_text("precious")
    (theirs / "meta.json").write_text("precious")
    (directory / "sm_80" / "aa").mkdir()
    (directory / "sm_80" / "aa" / ("aa" * 32)).symlink_to(theirs)
    return directory


def test_pruning_removes_old_entries_and_nothing_else(attnsweep, cache):
    others = {path for path in cache.rglob("*") if "01" in path.parts or "photos" in path.parts}
    facts = json.loads(attnsweep("cache", "prune", "--json").stdout)
    assert attnsweep("cache").stdout.count("1 cubin,") == 2
    assert (facts["removed"], facts["bytes"], facts["left"]) == (1, 1024, 1)
    assert all(path.exists() for path in others)
    assert [path.name for path in (cache / "sm_80" / "00").iterdir()] == [".new-alive"]
    assert "removed 1 cubin, 0.0 MiB; 0 are left" in attnsweep("cache", "prune", "--all").stdout
    assert entries(cache) == []
    assert (cache / "sm_80" / "aa" / ("aa" * 32) / "stage.cubin").read_text() == "precious"


def test_what_was_traced_is_pruned_too(attnsweep, tmp_path, monkeypatch):
    monkeypatch.setenv(nvrtc.CACHE_VARIABLE, str(tmp_path))
    entry = tmp_path / "traced" / "sm_90a" / "ab" / ("ab" * 32)
    (entry / "triton").mkdir(parents=True)
    for name in ("trace.json", "triton/kernel.cubin"):
        (entry / name).write_bytes(bytes(512))
    os.utime(entry / "trace.json", (0, 0))
    facts = json.loads(attnsweep("cache", "prune", "--json").stdout)
    assert (facts["removed"], facts["bytes"], facts["left"]) == (1, 1024, 0)
    assert not entry.exists()


def test_doctor_and_compile_agree_about_a_cache_that_cannot_be_written(attnsweep, tmp_path, monkeypatch, found):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(nvrtc.CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
    found(nvrtc_version=(13, 0), driver_cuda=None)
    assert fault(tmp_path / "file" / "cache")
    out = attnsweep("doctor").stdout
    assert "compile, report and replay work" not in out
    assert f"for compile: set {nvrtc.CACHE_VARIABLE} to a writable directory" in out
    assert "it cannot be written" in attnsweep("cache").stdout


# -- schema and completion --------------------------------------------------------------------


def test_the_schema_is_printed_and_is_in_the_wheel(attnsweep):
    printed = attnsweep("schema").stdout
    assert printed == (ROOT / "docs" / "spec.schema.json").read_text(encoding="utf-8")
    assert json.loads(printed)["$id"].startswith("urn:attnsweep:")
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    included = wheel["targets"]["wheel"]["force-include"]
    assert included["docs/spec.schema.json"] == "attnsweep/spec.schema.json"


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("run qui", {"quickstart"}),
        ("run dir/", {"dir/two.yml"}),
        ("tune 1,2,3,64 --kernel flash_fwd_mm", {"flash_fwd_mma"}),
        ("compile h100 --arch sm_8", {"sm_80", "sm_86", "sm_89"}),
        ("report res", {"results/replay/quickstart"}),
        ("profile nowhere/", set()),
        ("tune shap", {"shapes.csv"}),
    ],
)
def test_a_shell_completes_names(attnsweep, tmp_path, typed, completed):
    (tmp_path / "own.yaml").write_text("")
    (tmp_path / "own.txt").write_text("")
    (tmp_path / "shapes.csv").write_text("")
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "two.yml").write_text("")
    run = tmp_path / "results" / "replay" / "quickstart"
    run.mkdir(parents=True)
    (run / "trials.jsonl").write_text("")
    words = typed.split(" ")
    asked = {"_ATTNSWEEP_COMPLETE": "complete_bash", "COMP_WORDS": f"attnsweep {typed}", "COMP_CWORD": str(len(words))}
    done = CliRunner().invoke(cli.app, [], prog_name="attnsweep", env=asked)
    assert set(done.stdout.split()) == completed


def test_a_command_that_reads_for_long_says_so(attnsweep, constants):
    """And says nothing if asked to be quiet, or if it is done at once."""
    app = importlib.import_module("attnsweep.cli.app")
    quick = attnsweep("report", RUN)
    assert "reading" not in quick.stderr
    constants(app, _LONG_S=0.0)
    for words in (("report", RUN, "--json"), ("explain", RUN), ("check", "--recorded", RUN, RUN)):
        assert f"reading {RUN}" in attnsweep(*words).stderr, words
    assert "reading" not in attnsweep("report", RUN, "-q").stderr
