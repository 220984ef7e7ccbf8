"""Verdicts follow from recorded figures, gaps are `not tested`, mistakes in the data are named."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "scripts"))
from claims import FAILS, HOLDS, OPEN, PART, Sheet, verdict
from records import Book, QueryError

import docs

ROOT = docs.ROOT
RECORDED = Book(ROOT / docs.RESULTS)
PROBLEM = {"batch": 1, "heads": 8, "heads_kv": 8, "seqlen_q": 512, "seqlen_k": 512, "head_dim": 64}
CARD = json.loads((ROOT / docs.RESULTS / "ladder" / "environment.json").read_text())
CLAIM = """
[given]
margin = 1.05
[rows]
ours = { run = "run", problem = "1,8,512,64" }
changed = { like = "ours", config = { A = 1 }, changed = "A" }
flash = { run = "run", provider = "torch_flash" }
[let]
ratio = "flash.us / ours.us"
[[claim]]
says = "SDPA is slower"
holds = "ratio > margin"
part = "ratio > 1"
measured = "{{ ours.us | d(1) }} against {{ flash.us | d(1) }} µs: {{ ratio | d(2) }}×"
"""


def sheet(name, book=RECORDED):
    return Sheet(docs.DATA / f"{name}.toml", book)


def small(tmp_path, text, *rows):
    """A file of claims about one run, whose rows are provider, config, time and status."""
    directory = tmp_path / "results" / "run"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "environment.json").write_text(json.dumps(CARD))
    lines = []
    for provider, config, us, status in rows:
        time = {"median": us, "low": us, "high": us, "samples": 1}
        accuracy = {"rel_err": 1e-4, "limit": 1e-3}
        row = {"kernel": provider, "provider": provider, "config": config, "time_us": time}
        lines.append(row | {"problem": PROBLEM, "status": status, "accuracy": accuracy})
    (directory / "trials.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "x.toml").write_text(text)
    return Sheet(tmp_path / "x.toml", Book(tmp_path / "results"))


OURS = ("attnsweep", {"A": 1}, 10.0, "ok")


@pytest.mark.parametrize(
    ("flash_us", "status", "result"),
    [(20.0, "ok", HOLDS), (10.3, "ok", PART), (9.0, "ok", FAILS), (20.0, "noisy", OPEN), (20.0, "wrong", OPEN)],
)
def test_a_verdict_follows_from_the_rows(tmp_path, flash_us, status, result):
    found = small(tmp_path, CLAIM, OURS, ("torch_flash", {}, flash_us, status))
    (said,) = found.verdicts()
    assert said.result == result
    if result != OPEN:
        assert said.measured == f"10.0 against {flash_us:.1f} µs: {flash_us / 10:.2f}×"
    else:
        assert said.note == "not recorded: provider torch_flash, run run"


def test_queries_choose_rows(tmp_path):
    other = ("attnsweep", {"A": 2}, 8.0, "ok")
    found = small(tmp_path, CLAIM, OURS, other, ("attnsweep", {"A": 3}, 1.0, "wrong"))
    assert found["ours"].us == 8.0
    assert found["changed"].config == {"A": 2}
    assert found.find(like="ours", config={"A": [1, 5]}).us == 10.0
    assert [row.us for row in found.find(like="ours", take="all")] == [8.0, 10.0]
    assert found.find(run="no such run") is None


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('provider = "torch', 'providr = "torch', r"x\.toml: .*unknown query key 'providr'"),
        ("holds =", "hold =", r"x\.toml: claim 1, 'SDPA is slower': unknown key 'hold'"),
        ("[let]", "[lets]", r"x\.toml: unknown key 'lets'"),
        ('"ratio > margin"', '"ratoi > margin"', r"x\.toml: SDPA is slower: unknown name 'ratoi'"),
        ('"ratio > margin"', '"ratio >"', r"x\.toml: SDPA is slower: 'ratio >': "),
        ('"ratio > margin"', '"ours.uss > 1"', r"x\.toml: SDPA is slower: 'ours.uss > 1': .*uss"),
        ('like = "ours"', 'like = "our"', r"x\.toml: .*like 'our': there is no such query"),
        ("margin =", "max =", r"x\.toml: 'max' is the name of a function"),
    ],
)
def test_a_mistake_names_the_file_and_the_claim(tmp_path, old, new, said):
    def use():
        found = small(tmp_path, CLAIM.replace(old, new), OURS, ("torch_flash", {}, 20.0, "ok"))
        return found.verdicts(), found["changed"]

    with pytest.raises(QueryError, match=said):
        use()


THEIRS = {"tile": "64x128x64", "softmax": "32 threads, 3 passes"}


def own(**changed):
    return sheet("e").query({"like": "theirs"})["config"] | changed


@pytest.mark.nightly(push=6)
@pytest.mark.parametrize(
    ("name", "words", "query", "factor", "before", "after"),
    [
        ("a", "fastest configuration", {"variant": THEIRS}, 0.1, FAILS, HOLDS),
        ("a", "small tiles", {"variant": {"tile": "64x64x64"}}, 0.5, FAILS, HOLDS),
        ("a", "graphs change", {"variant": {"mode": "eager"}}, 0.93, FAILS, HOLDS),
        ("a", "several streams", {"variant": {"mode": "streams"}}, 1.2, HOLDS, FAILS),
        ("a", "cannot beat SDPA", {"provider": "torch_flash"}, 2.0, HOLDS, FAILS),
        ("b", "under 5 µs", {"problem": "8,8,512,64"}, 5.0, HOLDS, FAILS),
        ("b", "one fused kernel", {"provider": "torch_flash"}, 0.4, FAILS, HOLDS),
        ("c", "is poor", {}, 20.0, HOLDS, FAILS),
        ("c", "tensor cores", {"config": {"MATH": "ffma"}}, 0.1, FAILS, HOLDS),
        ("c", "our aim", {}, 0.3, FAILS, HOLDS),
        ("d", "under 5 µs", {"kernel": "ladder_5_swizzled"}, 2.0, HOLDS, FAILS),
        ("d", "five times", {"provider": "torch_flash"}, 3.0, FAILS, HOLDS),
        ("e", "overlap", {"config": own(STAGES=1)}, 1.5, HOLDS, FAILS),
        ("e", "producer warp", {"config": own(PRODUCER_WARPS=[2, 4])}, 0.8, FAILS, PART),
        ("e", "producer warp", {"config": own(PRODUCER_WARPS=[2, 4])}, 0.5, FAILS, HOLDS),
        ("e", "waits too early", {"config": own(EARLY=1)}, 0.5, FAILS, HOLDS),
        ("e", "same bank", {"config": own(LAYOUT=[1, 2, 3])}, 1.9, HOLDS, FAILS),
        ("e", "XOR", {"config": own(LAYOUT=3)}, 1.95, HOLDS, FAILS),
        ("e", "10×", {"config": own()}, 4.0, FAILS, HOLDS),
    ],
)
def test_a_shipped_claim_turns_with_its_figures(constants, name, words, query, factor, before, after):
    def result():
        found = sheet(name)
        (claim,) = (claim for claim in found.data["claim"] if words in claim["says"])
        return verdict(found.within("claim", claim), claim).result

    assert result() == before
    runs = {"a": "three_kernel", "c": "wide_head", "d": "ladder", "e": "wmma_pipeline"}
    run = runs.get(name) or ("batched" if "5 µs" in words else "flash_short")
    changed = RECORDED.find(run, take="all", **query)
    assert changed
    for row in changed:
        constants(row, us=row.us * factor)
    assert result() == after


def test_claims_that_no_run_reaches_are_not_tested(tmp_path):
    found = {v.says: v for name in "abcde" for v in sheet(name).verdicts()}
    untested = [says for says, v in found.items() if v.result == OPEN]
    assert len(untested) == 1
    assert untested[0].startswith("WMMA for QKᵀ alone")
    assert found[untested[0]].note.startswith("no family multiplies")
    nothing = Book(tmp_path)
    assert {v.result for name in "ae" for v in sheet(name, nothing).verdicts()} == {OPEN}


SIXTEEN = {"processes": 16, "ties_hold_oracle_best": 16}


@pytest.mark.nightly(push=3)
@pytest.mark.parametrize(
    ("file", "words", "change", "result"),
    [
        ("stability", "the same winner", {"same_winner": 19}, HOLDS),
        ("stability", "the same winner", {"same_winner": 18}, FAILS),
        ("stability", "the same winner", SIXTEEN | {"same_winner": 16}, OPEN),
        ("stability", "the same winner", SIXTEEN | {"same_winner": 15}, FAILS),
        ("stability", "at most 0.5 %", {"largest_regret_percent": 0.6}, FAILS),
        ("../h100-80gb-hbm3/gate", "no false alarm", {"itself": {"comparisons": 1000, "false_alarms": 0}}, HOLDS),
        ("../h100-80gb-hbm3/gate", "no false alarm", {"itself": {"comparisons": 999, "false_alarms": 0}}, OPEN),
        ("../h100-80gb-hbm3/gate", "no false alarm", {"itself": {"comparisons": 1000, "false_alarms": 1}}, FAILS),
    ],
)
def test_targets_of_the_benchmarks(file, words, change, result):
    book = Book(RECORDED.results)
    found = book.file(f"{file}.json")
    for key, value in change.items():
        found[key] = {**found[key], **value} if key == "itself" else value
    sections = {section["file"]: section for section in sheet("benchmarks", book).sections()}
    (said,) = (v for v in sections[f"{file}.json"]["verdicts"] if words in v.says)
    assert said.result == result


# -- what is counted, by hand -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "protocol"),
    [("mma_h200", 1), ("three_kernel", 2), ("three_kernel_long", 2), ("wmma_pipeline", 3),
     ("flash_training", 4)],
)  # fmt: skip
def test_a_recording_says_its_protocol(run, protocol):
    assert Book(docs.ROOT / docs.RESULTS).protocol(run) == protocol
