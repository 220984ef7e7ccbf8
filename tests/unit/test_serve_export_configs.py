"""What `attnsweep export --format` writes of a run of calls, and what it refuses."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from called_rows import FAST, LONG, ROWS, SHORT, SLOW, called, written
from hypothesis import given
from hypothesis import strategies as st
from samples import baseline, candidate

import attnsweep
from attnsweep.core.errors import AttnsweepError, SpecError, StoreError
from attnsweep.core.problem import Problem
from attnsweep.core.trial import Status
from attnsweep.serve.export_configs import export_configs

TABLE = "H=2,D=16,device_name=NVIDIA_Test_1.json"


def tables(place):
    """All tables of a directory, as vLLM's code reads one."""
    return {
        path.name: {int(key): value for key, value in json.loads(path.read_text()).items()}
        for path in place.glob("*.json")
        if not path.name.endswith(".evidence.json")
    }


def exported(place, rows=ROWS, form="vllm", out=None, **options):
    directory = place / f"run{len([*place.iterdir()])}"
    return export_configs([written(directory, rows)], out or place / "out", form, **options)


def test_a_table_is_keyed_by_the_keys_and_named_after_heads_and_card(tmp_path):
    done = exported(tmp_path, [*ROWS, *(called(Problem.parse("(1,4,64,16) bf16 full"), SLOW, 20.0),)])
    assert tables(tmp_path / "out") == {
        TABLE: {256: {"M": 64, "num_warps": 4}, 4096: {"M": 64, "num_warps": 4}},
        TABLE.replace("H=2", "H=4"): {64: SLOW},
    }
    assert (done.winners, done.kernels, done.configs, len(done.files)) == (3, 0, 2, 4)


def test_what_was_measured_lies_beside_a_table(tmp_path):
    rows = [*ROWS, *(baseline("torch_flash", 50.0).with_(problem=p) for p in (SHORT, LONG))]
    exported(tmp_path, rows)
    said = json.loads((tmp_path / "out" / TABLE.replace(".json", ".evidence.json")).read_text())
    assert (said["function"], said["gpu"]["name"]) == ("attend.py:attention", "NVIDIA Test 1")
    assert said["driver"]
    assert said["date"].startswith("2026-01-01")
    entry = said["entries"][0]
    assert Problem.of(entry["problem"]) == SHORT
    assert (entry["baseline"], entry["baseline_over_time"]) == ("torch_flash", 2.5)
    low, high = entry["interval"]
    assert 2.49 < low <= 2.5 <= high < 2.51
    assert (entry["call"]["closure"], entry["call"]["triton"]) == ("c105", "3.9.0")
    assert [each["time_over_winner"] for each in entry["ties"]] == [[1.0, 1.0]]


def test_of_ties_the_config_that_ties_on_most_shapes_is_taken(tmp_path):
    middle = Problem.parse("(1,2,1024,16) bf16 causal")
    other = {"M": 32, "num_warps": 4, "maxnreg": None}
    rows = [called(problem, SLOW, 20.0) for problem in (SHORT, middle)]
    rows += [called(SHORT, FAST, 20.0), called(middle, other, 30.0), called(LONG, other, 20.0)]
    exported(tmp_path, rows)
    made = tables(tmp_path / "out")[TABLE]
    assert {key: config["M"] for key, config in made.items()} == {256: 128, 1024: 128, 4096: 32}
    said = json.loads((tmp_path / "out" / TABLE.replace(".json", ".evidence.json")).read_text())
    assert sorted(each["config"]["M"] for each in said["entries"][0]["ties"]) == [64, 128]


def test_where_none_ties_on_more_shapes_the_winner_is_taken(tmp_path):
    exported(tmp_path, [called(SHORT, SLOW, 20.0), called(SHORT, FAST, 20.0)])
    assert tables(tmp_path / "out")[TABLE][256]["M"] == 64


# ---- few configs ----
MIDDLE = Problem.parse("(1,2,1024,16) bf16 causal")
OTHER = {"M": 32, "num_warps": 4, "maxnreg": None}
FEW = [
    *(called(SHORT, config, us) for config, us in ((FAST, 20.0), (SLOW, 20.4))),
    *(called(MIDDLE, config, us) for config, us in ((SLOW, 30.0), (FAST, 33.0))),
    *(called(LONG, config, us) for config, us in ((SLOW, 40.0), (OTHER, 41.0))),
]


def portfolio_of(place, form, out):
    """What the exported files say of the choice."""
    if form == "python":
        known = {}
        exec(out.read_text(), known)
        return known["TABLE"]["portfolio"]
    path = place / "out" / TABLE.replace(".json", ".evidence.json")
    return json.loads((path if form == "vllm" else out.with_suffix(".evidence.json")).read_text())["portfolio"]


@pytest.mark.parametrize("form", ["python", "triton", "vllm"])
def test_one_config_serves_all_and_the_files_say_what_each_problem_loses(tmp_path, form):
    out = {"python": tmp_path / "mine.py", "triton": tmp_path / "mine.json", "vllm": tmp_path / "out"}[form]
    done = exported(tmp_path, FEW, form, out, at_most=1)
    assert (done.winners, done.configs, done.left_out) == (3, 1, [])
    said = portfolio_of(tmp_path, form, out)
    assert said == done.portfolio
    assert said["kept"] == ["M=128 num_warps=8 maxnreg=128"]
    assert [(each["times_as_long"], each["off"]) for each in said["shapes"]] == [
        (1.02, False),
        (1.0, False),
        (1.0, False),
    ]
    assert [each["configs"] for each in said["curve"]] == [1, 2]


def test_a_problem_that_no_kept_config_was_timed_on_is_named(tmp_path):
    rows = [*FEW, called(Problem.parse("(1,4,64,16) bf16 full"), OTHER, 5.0)]
    done = exported(tmp_path, rows, at_most=1)
    assert done.left_out == ["(1,4,64,16) bf16 full: none of the kept configs was timed on it"]
    assert [*tables(tmp_path / "out")] == [TABLE]
    assert done.portfolio["shapes"][-1] == {
        "problem": "(1,4,64,16) bf16 full",
        "config": None,
        "times_as_long": None,
        "off": True,
    }
    assert done.portfolio["curve"][0]["without"] == 1


def test_a_config_that_is_off_is_marked_and_its_own_time_is_exported(tmp_path):
    rows = [called(SHORT, FAST, 20.0), called(LONG, FAST, 44.0), called(LONG, SLOW, 40.0)]
    rows += [called(MIDDLE, FAST, 30.0), baseline("torch_flash", 88.0).with_(problem=LONG)]
    done = exported(tmp_path, rows, "triton", tmp_path / "mine.json", at_most=1)
    assert [each["off"] for each in done.portfolio["shapes"]] == [False, True, False]
    entry = json.loads((tmp_path / "mine.evidence.json").read_text())["entries"][1]
    assert (entry["config"]["M"], entry["time_us"], entry["baseline_over_time"]) == (64, 44.0, 2.0)
    assert [tie["config"]["M"] for tie in entry["ties"]] == [128]


def test_without_a_number_nothing_is_said_of_a_choice(tmp_path):
    done = exported(tmp_path, FEW, "triton", tmp_path / "mine.json")
    assert done.portfolio is None
    assert "portfolio" not in json.loads((tmp_path / "mine.evidence.json").read_text())


@pytest.mark.parametrize("form", ["python", "triton", "vllm", "helion"])
@pytest.mark.parametrize("wrong", ["0", "-1", "1.5", "x", ""])
def test_a_number_of_configs_that_is_none(attnsweep, tmp_path, monkeypatch, form, wrong):
    monkeypatch.chdir(tmp_path)
    run = written(tmp_path / "run", FEW)
    out = {"python": "a.py", "triton": "a.json", "vllm": "a", "helion": "a"}[form]
    done = attnsweep("export", run, "--out", out, "--format", form, f"--at-most={wrong}")
    assert (done.returncode, done.stdout) == (2, "")
    assert "'--at-most'" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_the_command_prints_what_few_configs_cost(attnsweep, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = attnsweep("export", written(tmp_path / "run", FEW), "--out", "few.json", "--at-most", "1")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[3:] == [
        "times as long as with its winner (5% off or more: *)",
        f" 1.020   {SHORT.label}",
        f" 1.000   {MIDDLE.label}",
        f" 1.000   {LONG.label}",
        "configs   mean  worst   *  without",
        "      1  1.007  1.020   0        0",
        "      2  1.000  1.000   0        0",
    ]


def test_another_axis(tmp_path):
    rows = [called(Problem.parse(f"({batch},2,256,16) fp16 full"), FAST, 20.0) for batch in (1, 8)]
    exported(tmp_path, rows, axis="batch")
    assert [*tables(tmp_path / "out")[TABLE]] == [1, 8]
    with pytest.raises(SpecError, match=r"\(1,2,256,16\) fp16 full and \(8,2,256,16\) fp16 full have one seqlen_k"):
        exported(tmp_path, rows)
    for axis in ("causal", "dtype", "nothing"):
        with pytest.raises(SpecError, match=f"{axis} of a problem is no whole number; those are batch, heads"):
            exported(tmp_path, rows, axis=axis)


def test_one_kernel_of_several(tmp_path):
    rows = [*ROWS, called(LONG, SLOW, 10.0, "other")]
    with pytest.raises(StoreError, match=r"several functions won: attend\.py:attention, other\.py:attention"):
        exported(tmp_path, rows)
    exported(tmp_path, rows, kernel="attend")
    assert {config["M"] for config in tables(tmp_path / "out")[TABLE].values()} == {64}
    with pytest.raises(SpecError, match="--kernel: the run calls attend, other, not mine"):
        exported(tmp_path, rows, kernel="mine")


def test_a_problem_that_no_call_wins_is_left_out(tmp_path):
    template = candidate("flash", 5.0, BLOCK_M=64).with_(problem=LONG)
    wrong = called(Problem.parse("(1,2,64,16) fp16 full"), FAST, 1.0).with_(status=Status.WRONG, time_us=None)
    done = exported(tmp_path, [*ROWS, template, wrong])
    assert [*tables(tmp_path / "out")[TABLE]] == [256]
    assert done.left_out == [f"{LONG.label}: flash won, a template", "(1,2,64,16) fp16 full: no config of a call won"]
    with pytest.raises(StoreError, match=r"no winner to export\n.*no config of a call won"):
        exported(tmp_path, [wrong])


def flat(name, values):
    return {f"{name}_{number}": value for number, value in enumerate(values)}


@given(
    st.dictionaries(
        st.sampled_from(["block_sizes", "l2_groupings", "tile", "num_warps"]),
        st.integers(1, 256) | st.lists(st.integers(1, 256), min_size=1, max_size=12),
        min_size=1,
    )
)
def test_numbered_parameters_are_lists_for_helion(nested):
    config = {}
    for name, value in nested.items():
        config |= flat(name, value) if isinstance(value, list) else {name: value}
    with TemporaryDirectory() as place:
        exported(Path(place), [called(SHORT, config, 20.0)], "helion")
        assert json.loads((Path(place) / "out" / "1,2,256,16_bf16_causal.json").read_text()) == nested


def test_numbers_with_a_gap_are_names_of_their_own(tmp_path):
    config = {"a_1": 1, "a_2": 2, "b_0": 1, "b_2": 3, "c_00": 1, "_0": 4, "d_0": None}
    exported(tmp_path, [called(SHORT, config, 20.0)], "helion")
    made = json.loads((tmp_path / "out" / "1,2,256,16_bf16_causal.json").read_text())
    assert made == {name: value for name, value in config.items() if value is not None}


def test_each_problem_has_a_file_of_helions(tmp_path):
    window = Problem.parse("(1,4/2,256x512,16/8) fp16 window(64,0)")
    done = exported(tmp_path, [*ROWS, called(window, SLOW, 9.0)], "helion")
    names = ["1,2,256,16_bf16_causal", "1,2,4096,16_bf16_causal", "1,4_2,256x512,16_8_fp16_window_64,0"]
    assert sorted(done.files) == sorted(
        str(tmp_path / "out" / f"{name}{end}") for name in names for end in (".json", ".evidence.json")
    )
    said = json.loads((tmp_path / "out" / f"{names[2]}.evidence.json").read_text())
    assert [Problem.of(entry["problem"]) for entry in said["entries"]] == [window]
    assert json.loads((tmp_path / "out" / f"{names[2]}.json").read_text()) == SLOW


@pytest.mark.parametrize("form", ["triton", "vllm", "helion"])
def test_configs_of_two_autotuners_are_no_config_of_one(tmp_path, form):
    rows = [called(SHORT, {"dq.M": 64, "dkv.M": 32}, 20.0)]
    with pytest.raises(SpecError, match=r"dq\.M, dkv\.M are of two autotuners"):
        exported(tmp_path, rows, form, tmp_path / "out.json")


def test_refusals_are_a_sentence(tmp_path):
    templates = [candidate("flash", 5.0, BLOCK_M=64)]
    with pytest.raises(StoreError, match=r"a run without calls\n.*--format package"):
        exported(tmp_path, templates)
    others = [ROWS[0].with_(machine={"gpu": "NVIDIA Other", "sm_count": 8}), *ROWS[1:]]
    with pytest.raises(StoreError, match="several kinds of GPU: NVIDIA Other of 8 SMs, NVIDIA Test 1 of 132 SMs"):
        exported(tmp_path, others)
    run = written(tmp_path / "one")
    with pytest.raises(SpecError, match="a format is one of package, python, triton, vllm, helion, not pickle"):
        attnsweep.export(run, tmp_path / "out", format="pickle")
    with pytest.raises(SpecError, match="--format vllm takes one run, not 2"):
        attnsweep.export([run, run], tmp_path / "out", format="vllm")
    said = r"no winner that a package could hold\n.*one: a run of calls has no machine code; --format python"
    with pytest.raises(StoreError, match=said):
        attnsweep.export(run, tmp_path / "out")
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="is no directory, and cannot be made one"):
        attnsweep.export(run, tmp_path / "file", format="helion")
    for form, out in (("python", "x.json"), ("python", "a-b.py"), ("triton", "x.py")):
        with pytest.raises(SpecError, match=f"--format {form} writes"):
            attnsweep.export(run, tmp_path / out, format=form)


def test_files_are_replaced_if_that_is_asked_for(tmp_path):
    run, out = written(tmp_path / "run"), tmp_path / "mine.json"
    evidence = tmp_path / "mine.evidence.json"
    evidence.write_text("mine")
    with pytest.raises(SpecError, match="is there already"):
        attnsweep.export(run, out, format="triton")
    assert not out.exists()
    attnsweep.export(run, out, force=True)
    assert json.loads(evidence.read_text())["entries"]
    with pytest.raises(AttnsweepError, match="is no directory"):
        attnsweep.export(run, out, format="vllm")


def test_the_command_writes_python_of_a_run_of_calls(attnsweep, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "run")
    done = attnsweep("export", "run", "--out", "configs.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "1 config for 2 problems, of attend.py:attention on NVIDIA Test 1",
        "configs.py",
    ]
    for arguments, said in (
        (["my_attention"], "run: the runs have no winner that a package could hold"),
        (["b.py", "--axis", "batch", "--name", "x"], "--name and --axis do nothing with --format python"),
        (["my_attention", "--force"], "--force does nothing for a package"),
        (["configs.py"], "configs.py: is there already"),
    ):
        done = attnsweep("export", "run", "--out", *arguments)
        assert (done.returncode, done.stderr.split("\n")[0]) == (2, f"error: {said}")
    done = attnsweep("export", "run", "--out", "tables", "--format", "vllm", "--json")
    assert json.loads(done.stdout)["files"][0] == f"tables/{TABLE}"
