import errno
import json
import lzma
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import samples
from pydantic import ValidationError
from samples import H200 as ENVIRONMENT
from samples import filled, numbers
from samples import numbered as trial

from attnsweep.core.errors import StoreError
from attnsweep.core.files import pack_code, read_code
from attnsweep.core.trial import Accuracy, Measurement, Status, Trial
from attnsweep.store import run as store_module
from attnsweep.store.rows import MAX_WARNINGS, RowReader, row_bytes
from attnsweep.store.run import find_runs, latest_run, open_run, pack, read_trials
from attnsweep.store.store import Store

# Where `python -c` finds the package even if it is not installed.
SOURCE = Path(store_module.__file__).parents[2]


# -- rows -----------------------------------------------------------------------------------


def test_rows_read_back_equal_and_in_order(tmp_path: Path) -> None:
    rows = [trial(3), trial(1, status=Status.WRONG, detail="two\nlines"), trial(2)]
    with Store.open(tmp_path / "run") as store:
        for row in rows:
            store.append(row)
        assert store.trials == rows
    assert read_trials(tmp_path / "run" / "trials.jsonl") == (rows, [])


def test_a_later_row_replaces_the_earlier_in_its_place(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        for number in (5, 4, 3):
            store.append(trial(number))
    with Store.open(tmp_path) as store:
        store.append(trial(5, detail="again"))
        assert (store.rows, len(store.trials)) == (4, 3)
    trials, _ = read_trials(tmp_path / "trials.jsonl")
    assert numbers(trials) == [5, 4, 3]
    assert [row.detail for row in trials] == ["again", None, None]


def test_rows_share_what_they_have_in_common_and_nothing_else(tmp_path: Path) -> None:
    """Of a run of 100,000 rows, equal configs and resources would be most of its memory."""
    first = trial(1, conditions={"sm_mhz": 1980}, race={"rounds": 3})
    rows = [
        first,
        first.with_(kernel="other"),
        first.with_(kernel="flags", config={"FLAG": 1}),
        first.with_(kernel="bits", config={"FLAG": True}, conditions={"sm_mhz": 1980.0}),
    ]
    with Store.open(tmp_path / "run") as store:
        for row in rows:
            store.append(row)
    read, warnings = read_trials(tmp_path / "run" / "trials.jsonl")
    assert (read, warnings) == (rows, [])
    one, other, flags, bits = read
    assert (one.config is other.config, one.conditions is flags.conditions) == (True, True)
    assert (type(flags.config["FLAG"]), type(bits.config["FLAG"])) == (int, bool)
    assert (type(one.conditions["sm_mhz"]), type(bits.conditions["sm_mhz"])) == (int, float)
    changed = one.with_(detail="new", later=1)
    assert (changed.detail, other.detail) == ("new", None)
    assert (changed.model_extra, other.model_extra) == ({"later": 1}, {})


def test_keys_of_a_newer_version_survive(tmp_path: Path) -> None:
    path = filled(tmp_path, 1)
    row = json.loads(path.read_text()) | {"energy_joules": 3.5}
    path.write_text(json.dumps(row) + "\n")
    (kept,), warnings = read_trials(path)
    with Store.open(tmp_path / "copy") as store:
        store.append(kept)
    assert warnings == []
    assert json.loads((tmp_path / "copy/trials.jsonl").read_text())["energy_joules"] == 3.5


ODD_LINES = {
    "a number as text": ('"median":7.5', '"median":"7.5"'),
    "a whole number as a float": ('"samples":3,', '"samples":3.0,'),
    "true as a number": ('"samples":3,', '"samples":true,'),
    "beyond a float": ('"median":7.5', '"median":1e400'),
    "a fact twice": ('"kernel":"flash"', '"kernel":"other","kernel":"flash"'),
    "a newer fact": ('"kernel":"flash"', '"kernel":"flash","newer":{"a":[1,2.5,null]}'),
    "a newer fact of its time": ('"median":7.5', '"median":7.5,"newer":1e3'),
    "a fact as null": ('"race":{}', '"race":null'),
    "a long whole number": ('"race":{}', '"race":{"a":123456789012345678901234567890}'),
    "minus zero": ('"low":7.4', '"low":-0.0'),
    "half a character": ('"detail":null', '"detail":"\\ud800"'),
    "space": ('"config":{', ' "config" : { '),
}


@pytest.mark.parametrize("what", ODD_LINES)
def test_an_odd_line_is_read_as_pydantic_reads_it(what, tmp_path):
    old, new = ODD_LINES[what]
    line = filled(tmp_path, 1).read_text()
    assert old in line
    odd = line.replace(old, new, 1).encode()
    reader = RowReader()
    try:
        expected = Trial.model_validate_json(odd)
    except ValidationError:
        assert isinstance(reader.row(odd), str)
        return
    for _ in range(2):  # once as what it is, once as what is known
        row = reader.row(odd)
        assert row == expected
        assert repr(row) == repr(expected)
        assert row_bytes(row) == row_bytes(expected)
    assert reader.row(line.encode()) == Trial.model_validate_json(line)


def test_names_of_other_versions_are_not_learned_without_end(tmp_path):
    line = filled(tmp_path, 1).read_text()
    reader = RowReader()
    for number in range(200):
        row = reader.row(line.replace('"kernel"', f'"newer{number}":{number},"kernel"', 1).encode())
        assert row.model_extra == {f"newer{number}": number}
    assert len(reader._extra[Trial]) <= 40


def test_nan_is_kept_as_strict_json(tmp_path: Path) -> None:
    nan = float("nan")
    bad = Measurement(median=nan, low=1.0, high=float("inf"), samples=3)
    with Store.open(tmp_path) as store:
        store.append(trial(1, time_us=bad, accuracy=Accuracy(rel_err=nan, limit=1e-3)))
    text = (tmp_path / "trials.jsonl").read_text()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    json.loads(text, parse_constant=refuse)
    (row,), warnings = read_trials(tmp_path / "trials.jsonl")
    assert len(warnings) == 1
    assert row.time_us is not None
    assert row.time_us.median != row.time_us.median
    assert row.time_us.high == float("inf")
    assert row.accuracy is not None
    assert row.accuracy.rel_err != row.accuracy.rel_err


WITH = {
    **{f"median is {value}": {"time_us": {"median": value}} for value in ("nan", "inf", "-inf", -7.5, 0.0)},
    "low is nan": {"time_us": {"low": "nan"}},
    "rounds[1] is -1.0": {"time_us": {"rounds": [7.4, -1, 7.6]}},
    "cold_us is nan": {"cold_us": "nan"},
    "stages_us.qk is inf": {"stages_us": {"qk": "inf"}},
    "its first round is -1": {"time_us": {"first_round": -1}},
    "its median is 1 and that of its rounds 7.5": {"time_us": {"median": True}},
    "has no time": {"time_us": None},
    "its error nan exceeds": {"accuracy": {"rel_err": "nan"}},
    "time_us.median: Input should be a valid number": {"time_us": {"median": "fast"}},
    "time_us.median: Input should be a valid": {"time_us": {"median": None}},
}


@pytest.mark.parametrize("why", WITH)
def test_a_row_that_cannot_be_as_it_says_is_a_warning_that_names_it(why, tmp_path):
    """It was dropped in silence, and another row won."""

    def written(row, changed):
        facts = json.loads(row.model_dump_json())
        for name, value in changed.items():
            facts[name] = facts[name] | value if isinstance(value, dict) and facts.get(name) else value
        return json.dumps(facts)

    lines = [written(trial(1), {}), written(trial(2), WITH[why])]
    (tmp_path / "trials.jsonl").write_text("\n".join([*lines, ""]))
    (warning,) = [each for each in open_run(tmp_path).warnings if "trials.jsonl:" in each]
    place, said = warning.removeprefix(f"{tmp_path}/trials.jsonl:").split(": ", 1)
    assert place == "2"
    assert why in said
    assert said.startswith(("not ranked: flash on (1,16,1024,64) fp16 full says ok, but ", "skipped, not a trial: "))
    with Store.open(tmp_path) as store:  # which measures it again
        assert numbers(store.trials) == [1]
        store.append(trial(2))
    assert not [each for each in open_run(tmp_path).warnings if "says ok" in each]
    assert numbers(open_run(tmp_path).trials) == [1, 2]


def test_a_noisy_row_with_such_a_time_is_named_too(tmp_path):
    """Its fastest round would stand for it, as the base."""
    time = trial(1).time_us.model_copy(update={"low": float("nan")})
    with Store.open(tmp_path) as store:
        store.append(trial(1, provider="torch_cudnn", status=Status.NOISY, time_us=time))
        store.append(trial(2, status=Status.WRONG, time_us=time))
    (warning,) = [each for each in open_run(tmp_path).warnings if "trials.jsonl:" in each]
    assert warning.endswith("not ranked: torch_cudnn on (1,16,1024,64) fp16 full says noisy, but time_us.low is nan")


def test_a_compiler_log_that_is_not_utf8_is_stored(tmp_path: Path) -> None:
    log = b"error: \xff \x00 \xe2\x80\xa8 end".decode("utf-8", "surrogateescape")
    with Store.open(tmp_path) as store:
        store.append(trial(1, detail=log))
        store.append(trial(2))
    trials, warnings = read_trials(tmp_path / "trials.jsonl")
    assert warnings == []
    assert numbers(trials) == [1, 2]
    assert trials[0].detail == "error: \N{REPLACEMENT CHARACTER} \x00 \u2028 end"


def test_what_a_terminal_would_obey_is_not_read(tmp_path: Path) -> None:
    """A run may be somebody else's, and its texts are printed."""
    with Store.open(tmp_path) as store:
        store.append(trial(1, detail="line\n\x1b]0;title\x07\x9b2J \x7f µ"))
        store.describe("name: x\n", ENVIRONMENT.model_copy(update={"gpu": "\x1b[2J"}), [])
    run = open_run(tmp_path)
    assert run.trials[0].detail == "line\n\ufffd]0;title\ufffd\ufffd2J \ufffd µ"
    assert run.environment is not None
    assert run.environment.gpu == "\ufffd[2J"


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b".+", b"hello", "JSON"),
        (b".+", b"[1, 2]", "object"),
        (b".+", b'{"unit": "kernel"}', "kernel: Field required"),
        (b".+", b"\xff\xfe\x00", "JSON"),
        (b".+", b"\x00" * 50, "JSON"),
        # Rows that mean something else.
        (b'"heads_kv":16', b'"heads_kv":5', "heads_kv must divide heads"),
        (b'"heads_kv":16', b'"heads_kv":16,"layout":3', "another version of attnsweep"),
        (b'"status":"ok"', b'"status":"great"', "status: Input should be"),
        (b'"median":7.5', b'"median":"fast"', "time_us.median"),
    ],
)
def test_a_foreign_line_is_skipped_and_named(tmp_path: Path, old: bytes, new: bytes, reason: str) -> None:
    path = filled(tmp_path, 2)
    first, second = path.read_bytes().splitlines(keepends=True)
    line, changed = re.subn(old, lambda _: new, first)
    assert changed == 1
    path.write_bytes(first + line + b"\r\n" + second)
    trials, (warning,) = read_trials(path)
    assert numbers(trials) == [0, 1]
    assert warning.startswith(f"{path}:2: ")
    assert reason in warning


def test_a_foreign_file_does_not_warn_without_end(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    path.write_text("x\n" * 1000)
    trials, warnings = read_trials(path)
    assert trials == []
    assert len(warnings) == MAX_WARNINGS + 1
    assert f"{1000 - MAX_WARNINGS} more" in warnings[-1]


# -- torn lines and crashes -----------------------------------------------------------------


def test_a_row_torn_anywhere_costs_that_row_only(tmp_path: Path) -> None:
    path = filled(tmp_path, 3)
    whole = path.read_bytes()
    start = whole[:-1].rfind(b"\n") + 1
    for end in (*range(start + 1, len(whole) - 1, 11), len(whole) - 1):
        path.write_bytes(whole[:end])
        complete = end == len(whole) - 1  # only the newline is missing: nothing is lost
        trials, warnings = read_trials(path)
        assert numbers(trials) == ([0, 1, 2] if complete else [0, 1])
        assert len(warnings) == (0 if complete else 1)
        with Store.open(tmp_path) as store:
            store.append(trial(9))
        trials, warnings = read_trials(path)
        assert numbers(trials) == ([0, 1, 2, 9] if complete else [0, 1, 9])
        assert warnings == []
        assert path.read_bytes().startswith(whole[:start])


def test_opening_a_torn_file_changes_nothing(tmp_path: Path) -> None:
    path = filled(tmp_path, 2)
    path.write_bytes(path.read_bytes()[:-20])
    before = path.read_bytes()
    with Store.open(tmp_path) as store:
        assert "incomplete" in store.warnings[0]
        assert store.rows == 1
    assert path.read_bytes() == before


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from samples import filled, numbers
from samples import numbered as trial
from attnsweep.store.store import Store
with Store.open(Path({directory!r})) as store:
    number = len(store.trials)
    while True:
        # Large rows, so that the kill often comes in the middle of a write.
        store.append(trial(number, detail="x" * 3_000_000))
        number += 1
"""


def test_kill_in_the_middle_of_append_loses_at_most_the_row_being_written(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    code = WRITER.format(tests=str(Path(samples.__file__).parent), directory=str(tmp_path))
    written = 0
    for attempt in range(4):
        writer = subprocess.Popen([sys.executable, "-c", code], cwd=SOURCE)
        deadline = time.monotonic() + 60
        while not path.exists() or path.stat().st_size <= written:
            assert writer.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(0.02 * attempt)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        data = path.read_bytes()
        trials, warnings = read_trials(path)
        assert len(trials) >= data.count(b"\n")
        assert numbers(trials) == list(range(len(trials)))
        assert len(warnings) <= 1
        with Store.open(tmp_path) as store:  # the lock died with its holder
            store.append(trial(len(trials), detail="after"))
        resumed, warnings = read_trials(path)
        assert warnings == []
        assert numbers(resumed) == list(range(len(trials) + 1))
        written = path.stat().st_size
    assert written > 3_000_000


def test_a_full_disk_leaves_whole_rows_and_says_how_to_go_on(tmp_path: Path) -> None:
    path = filled(tmp_path, 2)
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Store.open(tmp_path) as store:
        # The next write gets 100 bytes down, as on a disk that fills up; the one after it none.
        for room in (100, 0):
            resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + room, hard))
            try:
                with pytest.raises(StoreError, match="cannot store a row") as raised:
                    store.append(trial(2))
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            assert "2 rows are safe" in str(raised.value)
            assert "same command again" in str(raised.value)
            assert path.read_bytes() == before
        assert numbers(store.trials) == [0, 1]
        store.append(trial(2))
    assert numbers(read_trials(path)[0]) == [0, 1, 2]


def test_a_failed_fsync_takes_the_row_back(tmp_path: Path, disk) -> None:
    path = filled(tmp_path, 1)
    before = path.read_bytes()
    with Store.open(tmp_path) as store:
        disk.fails = errno.EIO
        with pytest.raises(StoreError, match="Input/output error"):
            store.append(trial(1))
        disk.fails = None
        assert path.read_bytes() == before
        assert store.rows == 1


# -- opening --------------------------------------------------------------------------------


HOLDER = """
import sys
from pathlib import Path
from attnsweep.store.store import Store
with Store.open(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_two_runs_cannot_write_the_same_directory(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, cwd=SOURCE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(StoreError, match="another attnsweep run is writing here"):
            Store.open(tmp_path)
        holder.communicate()
    with Store.open(tmp_path) as store:
        store.append(trial(1))


def test_a_replay_that_is_refused_leaves_the_rows_of_the_one_that_writes(attnsweep: Any, tmp_path: Path) -> None:
    command = ("run", "quickstart", "--limit", "1", "--results", tmp_path)
    assert attnsweep(*command).returncode == 0
    rows = tmp_path / "replay" / "quickstart" / "trials.jsonl"
    before = rows.read_bytes()
    with Store.open(rows.parent):
        refused = attnsweep(*command)
    assert "another attnsweep run is writing here" in refused.stderr
    assert rows.read_bytes() == before != b""
    assert attnsweep(*command).returncode == 0
    assert rows.read_bytes() == before  # made anew, and not added to


def test_a_replay_does_not_write_over_its_recording(attnsweep: Any, tmp_path: Path) -> None:
    command = ("run", "quickstart", "--limit", "1", "--results", tmp_path)
    assert attnsweep(*command).returncode == 0
    rows = tmp_path / "replay" / "quickstart" / "trials.jsonl"
    before = rows.read_bytes()
    spec = tmp_path / "quickstart.yaml"
    spec.write_text(
        "device: replay\nrecording: replay/quickstart\nkernels: {flash_fwd_wgmma: {}}\n"
        "problems: [{batch: 1, heads: 16, seqlen: 1024, head_dim: 64}]\n"
    )
    refused = attnsweep("run", spec, "--results", tmp_path)
    assert refused.returncode == 2
    assert "the recording is the run that its replay would write over" in refused.stderr
    assert rows.read_bytes() == before


def test_the_lock_is_free_after_close_and_after_a_failed_open(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store, pytest.raises(StoreError, match="another"):
        Store.open(tmp_path)
    store.close()
    (tmp_path / "trials.jsonl").unlink()
    (tmp_path / "trials.jsonl").mkdir()
    for _ in range(2):
        with pytest.raises(StoreError, match="cannot open the trials"):
            Store.open(tmp_path)


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "results").write_text("mine")
    with pytest.raises(StoreError, match="cannot create the run directory") as raised:
        Store.open(tmp_path / "results" / "h200" / "spec")
    for part in (str(tmp_path / "results" / "h200"), "--results", os.strerror(errno.ENOTDIR), "the name is taken"):
        assert part in str(raised.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_place_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    with pytest.raises(StoreError, match="Permission denied") as raised:
        Store.open(tmp_path / "run")
    assert "permissions" in str(raised.value)


def test_fresh_sets_earlier_rows_aside_and_loses_none(tmp_path: Path) -> None:
    path = filled(tmp_path, 2)
    before = path.read_bytes()
    for number in (7, 8):
        with Store.open(tmp_path, fresh=True) as store:
            assert store.trials == []
            store.append(trial(number))
    aside = sorted(tmp_path.glob("trials.*.jsonl"))
    assert len(aside) == 2
    assert numbers(read_trials(path)[0]) == [8]
    assert sorted(numbers(read_trials(old)[0]) for old in aside) == [[0, 1], [7]]
    assert before in [old.read_bytes() for old in aside]
    with Store.open(tmp_path / "new", fresh=True):
        pass
    assert list((tmp_path / "new").glob("trials.*.jsonl")) == []


# -- the other files ------------------------------------------------------------------------


def test_describe_and_finish_make_a_run_that_reads_back(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        store.describe("name: µ\n", ENVIRONMENT, [{"kernel": "naive", "candidates": 3}])
        store.append(trial(1))
        run = store.finish(lambda run: {"ranking.csv": f"{len(run.trials)}\n", "ranking.md": "±\n"})
    assert (tmp_path / "ranking.csv").read_text() == "1\n"
    assert (tmp_path / "ranking.md").read_text(encoding="utf-8") == "±\n"
    read = open_run(tmp_path)
    assert read == run
    assert (read.environment, read.spec_text) == (ENVIRONMENT, "name: µ\n")
    assert read.spaces == [{"kernel": "naive", "candidates": 3}]
    assert open_run(tmp_path / "trials.jsonl") == run
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".lock",
        "environment.json",
        "ranking.csv",
        "ranking.md",
        "spaces.json",
        "spec.yaml",
        "trials.jsonl",
    ]


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path, disk) -> None:
    with Store.open(tmp_path) as store:
        store.finish(lambda run: {"ranking.md": "old"})
        disk.fails = errno.ENOSPC
        with pytest.raises(StoreError, match="free some space"):
            store.finish(lambda run: {"ranking.md": "new"})
    assert (tmp_path / "ranking.md").read_text() == "old"
    assert list(tmp_path.glob(".*.tmp")) == []


def test_a_cubin_is_kept_under_its_name_and_nowhere_else(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        kept = store.keep("flash.cubin", b"\x7fELF")
        for name in ("../flash.cubin", "a/b", "", ".."):
            with pytest.raises(StoreError, match="cannot keep"):
                store.keep(name, b"")
    assert kept == tmp_path / "cubins" / "flash.cubin"
    assert kept.read_bytes() == b"\x7fELF"


# ---- reading recorded runs: what is missing, damaged or packed ----
def test_open_run_says_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no such run"):
        open_run(tmp_path / "gone")
    with pytest.raises(StoreError, match=r"not a run directory: it has no trials\.jsonl"):
        open_run(tmp_path)
    run = tmp_path / "h200" / "quick"
    filled(run, 1)
    with pytest.raises(StoreError, match="not a run directory") as raised:
        open_run(tmp_path)
    assert str(run) in str(raised.value)
    (run / "spec.yaml").write_text("name: quick\n")
    with pytest.raises(StoreError, match="not a run: neither") as raised:
        open_run(run / "spec.yaml")
    assert str(run) in (raised.value.hint or "")


def test_a_run_without_rows_names_the_command(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        with pytest.raises(StoreError, match="nothing is recorded yet") as raised:
            open_run(tmp_path)
        assert "attnsweep run SPEC" in str(raised.value)
        store.describe("name: quick\n", ENVIRONMENT)
        with pytest.raises(StoreError) as raised:
            open_run(tmp_path)
        assert f"attnsweep run {tmp_path / 'spec.yaml'}" in str(raised.value)


def test_a_broken_environment_is_a_warning(tmp_path: Path) -> None:
    filled(tmp_path, 1)
    (tmp_path / "environment.json").write_text('{"gpu": "NVIDIA H200"}')
    run = open_run(tmp_path)
    assert run.environment is None
    assert "arch: Field required" in run.warnings[0]


def test_latest_run_is_the_one_written_last(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no runs here"):
        latest_run(tmp_path)
    for age, name in ((300, "h200/a"), (100, "h100/b"), (200, "h200/c")):
        path = filled(tmp_path / name, 1)
        os.utime(path, (1_000_000 - age, 1_000_000 - age))
    with Store.open(tmp_path / "h200/empty"):  # newest, but without a row
        assert latest_run(tmp_path).directory == tmp_path / "h100/b"
    with Store.open(tmp_path / "h200/a") as store:
        store.append(trial(5))
    assert latest_run(tmp_path).directory == tmp_path / "h200/a"
    assert find_runs(tmp_path)[0] == tmp_path / "h100/b"


@pytest.mark.parametrize("text", ["{}", "[3]", "[{", "\xff"])
def test_a_plan_that_cannot_be_read_is_a_warning(tmp_path: Path, text: str) -> None:
    with Store.open(tmp_path) as store:
        store.append(trial(1))
    (tmp_path / "spaces.json").write_text(text, encoding="latin-1")
    run = open_run(tmp_path)
    assert run.spaces == []
    assert "spaces.json: not" in run.warnings[0]


def test_a_packed_run_has_the_same_rows_and_the_same_bytes_each_time(tmp_path):
    first, again = trial(32), trial(64)
    for name in ("one", "two"):
        with Store.open(tmp_path / name) as store:
            for row in (first, again, first.with_(detail="replaced", fingerprint="abc")):
                store.append(row)
        (tmp_path / name / "ranking.csv").write_text("derived")
    before = open_run(tmp_path / "one").trials
    sizes = {pack(tmp_path / name) for name in ("one", "two")}
    packed = [(tmp_path / name / "trials.jsonl.xz").read_bytes() for name in ("one", "two")]
    assert packed[0] == packed[1]
    assert sizes == {len(packed[0])}
    assert open_run(tmp_path / "one").trials == [t.with_(fingerprint=None) for t in before]
    assert not list((tmp_path / "one").glob("*.jsonl"))
    assert not (tmp_path / "one" / "ranking.csv").exists()
    assert pack(tmp_path / "one") == len(packed[0])
    assert find_runs(tmp_path) == [tmp_path / "one", tmp_path / "two"]


def test_a_packed_run_has_its_winners_code_in_one_archive(tmp_path):
    long = f"{'128-' * 30}a.fwd.cubin.xz"  # a problem of many lengths; a plain archive has names of up to 100
    for name in ("one", "two"):
        with Store.open(tmp_path / name) as store:
            store.append(trial(32))
            for stage in ("fwd", "combine"):
                store.keep(f"a.{stage}.cubin.xz", lzma.compress(stage.encode() * 1000))
            store.keep(long, lzma.compress(b"long" * 1000))
        pack(tmp_path / name)
    one, two = (tmp_path / name / "cubins" for name in ("one", "two"))
    assert [path.name for path in one.iterdir()] == ["cubins.tar.xz"]
    assert (one / "cubins.tar.xz").read_bytes() == (two / "cubins.tar.xz").read_bytes()
    assert read_code(one / "a.combine.cubin.xz") == b"combine" * 1000
    assert read_code(one / long) == b"long" * 1000
    with pytest.raises(FileNotFoundError):
        read_code(one / "b.fwd.cubin.xz")
    # What is kept later stands before what is packed, and joins it.
    (one / "a.fwd.cubin.xz").write_bytes(lzma.compress(b"later"))
    assert read_code(one / "a.fwd.cubin.xz") == b"later"
    pack(tmp_path / "one")
    assert read_code(one / "a.fwd.cubin.xz") == b"later"
    assert read_code(one / "a.combine.cubin.xz") == b"combine" * 1000


@pytest.mark.parametrize(
    "damage",
    [b"", b"not packed", lzma.compress(b"no archive" * 60), None],
    ids=["empty", "foreign", "of something else", "cut"],
)
def test_a_damaged_archive_of_code_is_named(tmp_path, damage):
    (tmp_path / "a.fwd.cubin.xz").write_bytes(lzma.compress(b"fwd"))
    pack_code(tmp_path)
    archive = tmp_path / "cubins.tar.xz"
    archive.write_bytes(archive.read_bytes()[:-20] if damage is None else damage)
    with pytest.raises(OSError, match=r"damaged: .*cubins.tar.xz"):
        read_code(tmp_path / "a.fwd.cubin.xz")


@pytest.mark.parametrize("damage", [b"", b"not packed", None], ids=["empty", "foreign", "cut"])
def test_a_damaged_packed_run_is_an_error_that_names_it(tmp_path, damage):
    with Store.open(tmp_path) as store:
        store.append(trial(32))
    pack(tmp_path)
    (path,) = tmp_path.glob("trials*")
    path.write_bytes(path.read_bytes()[:-20] if damage is None else damage)
    with pytest.raises(StoreError, match=re.escape(str(tmp_path))) as caught:
        open_run(tmp_path)
    assert "restore the file from version control" in (caught.value.hint or "")


def test_a_sweep_in_the_directory_of_a_packed_run_begins_anew(tmp_path):
    with Store.open(tmp_path) as store:
        store.append(trial(32))
    pack(tmp_path)
    with Store.open(tmp_path) as store:
        assert store.trials == []
        store.append(trial(64))
    assert numbers(open_run(tmp_path).trials) == [64]


def test_one_problem_is_set_aside_with_every_line_of_it(tmp_path):
    other = replace(trial(0).problem, batch=7)
    with Store.open(tmp_path / "run") as store:
        for row in (trial(0), trial(1, problem=other), trial(0, detail="again")):
            store.append(row)
        before = store.path.read_bytes().splitlines(keepends=True)
        store.set_aside(trial(0).problem)
        store.set_aside(trial(0).problem)  # nothing is left of it: no second file
        assert store.trials == [trial(1, problem=other)]
        assert store.rows == 1
        store.append(trial(2))
    assert read_trials(store.path)[0] == [trial(1, problem=other), trial(2)]
    [aside] = (tmp_path / "run").glob("trials.2*.jsonl")
    assert aside.read_bytes() == before[0] + before[2]


# -- the environment ------------------------------------------------------------------------------

LADDER = Path(__file__).parent.parent.parent / "results" / "h200" / "ladder"
NEEDS_IT = [
    "tune 2,8,4096,128 --replay run",
    "run replay.yaml",
    "merge run --out whole",
    "export run --out mine",
    "accept run baseline",
]
SHOWS_IT = ["report run", "explain run", "check --recorded run run"]


@pytest.fixture
def told(attnsweep, tmp_path, monkeypatch):
    """All that a command says of a run with such an environment.json."""

    def run(command, text):
        monkeypatch.chdir(tmp_path)
        shutil.copytree(LADDER, "run")
        Path("run", "environment.json").unlink()
        if text is not None:
            Path("run", "environment.json").write_text(text)
        spec = (LADDER / "spec.yaml").read_text()
        replay = "device: replay\nrecording: run\n"
        Path("replay.yaml").write_text(spec.replace("device: cuda\n", replay))
        done = attnsweep(*command.split(), width=1000)
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.mark.parametrize("command", NEEDS_IT)
@pytest.mark.parametrize("text", ["{", None], ids=["damaged", "missing"])
def test_an_environment_is_called_what_it_is_where_it_is_needed(told, command, text):
    code, said = told(command, text)
    assert code == 2
    assert ("damaged" in said) == (text is not None)
    assert ("no environment.json" in said) == (text is None)
    assert text is None or "has no" not in said


@pytest.mark.parametrize("command", SHOWS_IT)
def test_a_damaged_environment_is_not_called_missing_where_it_is_shown(told, command):
    code, said = told(command, "{")
    assert code in (0, 4)
    assert "no environment.json" not in said
