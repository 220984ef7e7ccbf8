"""`attnsweep tune` and `init`: a shape without a spec, on a stand-in for the GPU."""

import json
import re
from pathlib import Path

import pytest
from fake_gpu import FakeGpu
from samples import TEST_GPU
from sweeping import FAMILIES, use

from attnsweep.bench.gpu import WorkerError
from attnsweep.core.errors import NoGpuError
from attnsweep.core.hardware import ARCHS
from attnsweep.core.trial import Status
from attnsweep.family.discover import discover
from attnsweep.specs.load import load_spec
from attnsweep.specs.plan import plan
from attnsweep.store.run import open_run

TIMES = {"THREADS=32": 30.0, "THREADS=64": 20.0, "THREADS=128": 40.0, "THREADS=256": 50.0}
TIMES["flash_attn_3"] = 25.0
# A family with four candidates, so that a sweep is short.
SIMPLE = ("--kernel", "simple", "--kernels", str(FAMILIES))
TUNE = ("tune", "1,2,256,64", *SIMPLE)
ENDING = "simple is 1.250 ± 0.000 times as fast as FlashAttention-3 (20.0 against 25.0 µs) on"


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def gpu(gpu):
    gpu.times = TIMES.copy()
    return gpu


def on(card, /, **facts):
    """A GPU of other facts."""
    card.environment = TEST_GPU.model_copy(update=facts)


def rows_of(tmp_path, name):
    return open_run(tmp_path / "results" / "test-1" / name).trials


def test_it_ends_in_the_sentence_and_stores_a_run(attnsweep, gpu, tmp_path):
    done = attnsweep(*TUNE, "--causal", "--dtype", "bf16")
    assert done.returncode == 0, done.stderr
    said, config = done.stdout.splitlines()[-2:]
    assert said == f"{ENDING} (1,2,256,64) bf16 causal."
    directory = "results/test-1/tune-1-2-256-64-bf16-causal-simple"
    assert re.fullmatch(rf"config: THREADS=\d+; to explain it: attnsweep explain {directory}", config)
    rows = rows_of(tmp_path, "tune-1-2-256-64-bf16-causal-simple")
    assert {row.problem.label for row in rows} == {"(1,2,256,64) bf16 causal"}
    assert {row.kernel for row in rows if row.provider == "attnsweep"} == {"simple"}


def test_the_same_command_measures_nothing_twice_and_fresh_all(attnsweep, gpu, tmp_path):
    first = attnsweep(*TUNE)
    tried = len(gpu.names("trial"))
    assert tried == 4
    again = attnsweep(*TUNE)
    assert len(gpu.names("trial")) == tried
    assert again.stdout == first.stdout
    attnsweep("tune", "B=1 H=2 S=256 D=64", *SIMPLE)
    assert len(gpu.names("trial")) == tried, "the named form is another run"
    attnsweep(*TUNE, "--fresh")
    assert len(gpu.names("trial")) == 2 * tried
    directory = tmp_path / "results" / "test-1" / "tune-1-2-256-64-fp16-full-simple"
    assert len([*directory.glob("trials.*.jsonl")]) == 1, "the older rows are set aside"


def test_several_shapes_are_one_run_with_a_sentence_each(attnsweep, gpu, tmp_path):
    (tmp_path / "more.csv").write_text("B,H,S,D,causal\n1,2,512,64,true\n")
    shapes = ("1,2,256,64", "more.csv")
    done = attnsweep("tune", *shapes, *SIMPLE)
    assert done.returncode == 0, done.stderr
    *told, use = done.stdout.splitlines()[-5:]
    assert use.startswith("to explain them: attnsweep explain results/test-1/tune-2-shapes-")
    assert [line.removeprefix(f"{ENDING} ") for line in told[::2]] == [
        "(1,2,256,64) fp16 full.",
        "(1,2,512,64) fp16 causal.",
    ]
    (directory,) = (tmp_path / "results" / "test-1").iterdir()
    assert re.fullmatch("tune-2-shapes-[0-9a-f]{8}-simple", directory.name)
    attnsweep("tune", *shapes[::-1], *SIMPLE)
    assert [*directory.parent.iterdir()] == [directory], "the order makes another run"


@pytest.mark.parametrize("command", [TUNE, ("run", "mine.yaml")], ids=["tune", "run"])
def test_its_options_reach_the_sweep(attnsweep, gpu, tmp_path, command):
    attnsweep(*TUNE, "--save-spec", "mine.yaml", "--dry-run")
    options = ("--limit", "2", "--wait", "--fresh", "--exhaustive", "--results", "elsewhere")
    done = attnsweep(*command, *options, "--progress", "json", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["problems"]
    assert json.loads(done.stderr.splitlines()[-1])["event"] == "end"
    assert len(gpu.names("trial")) == 2
    (run,) = Path("elsewhere/test-1").iterdir()
    assert "strategy: exhaustive" in (run / "spec.yaml").read_text()
    attnsweep(*command, *options)
    assert len(gpu.names("trial")) == 4  # --fresh
    attnsweep(*command, "--results", "elsewhere")
    assert len(gpu.names("trial")) == 6  # neither --fresh nor --limit


def test_ctrl_c_keeps_what_was_measured_and_is_exit_code_130(attnsweep, gpu):
    gpu.faults["add_baseline", "flash_attn_3"] = KeyboardInterrupt()
    done = attnsweep(*TUNE)
    assert done.returncode == 130
    assert "interrupted: all rows are kept; the same command continues from here" in done.stderr
    assert done.stdout.splitlines()[-2].startswith("simple takes 20.0 µs on")


def test_the_saved_spec_is_what_was_run(attnsweep, gpu, tmp_path):
    attnsweep(*TUNE, "--save-spec", "mine.yaml", "--budget-s", "60")
    spec = load_spec(tmp_path / "mine.yaml", discover)
    stored = tmp_path / "results" / "test-1" / spec.name
    assert spec == load_spec(stored / "spec.yaml", discover)
    assert spec.search.budget_s == 60
    before = len(gpu.names("trial"))
    assert attnsweep("run", "mine.yaml").returncode == 0
    assert len(gpu.names("trial")) == before


def test_a_spec_is_not_written_over_a_file_unless_it_is_forced(attnsweep, gpu, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("precious")
    done = attnsweep(*TUNE, "--save-spec", path)
    assert done.returncode == 2
    assert "is there already" in done.stderr
    assert path.read_text() == "precious"
    assert gpu.names("trial") == [], "it measured before it looked"
    assert attnsweep(*TUNE, "--save-spec", path, "--force").returncode == 0
    assert path.read_text() != "precious"
    done = attnsweep(*TUNE, "--save-spec", "nowhere/mine.yaml")
    assert (done.returncode, "cannot be written" in done.stderr) == (2, True)


def test_the_shipped_space_of_the_card_is_taken(attnsweep, gpu):
    def counted(*shape, **facts):
        if facts:
            on(gpu, **facts)
        done = attnsweep("tune", *shape, "--dry-run", "--json")
        assert done.returncode == 0, done.stderr
        return {fact["kernel"] for fact in json.loads(done.stdout)}, done.stderr

    shape = ("4,32,4096,128",)
    assert counted(*shape) == ({"flash_fwd_wgmma"}, "")
    assert counted(*shape, gpu="NVIDIA A100-SXM4-80GB", arch="sm_80") == ({"flash_fwd_mma"}, "")
    found, said = counted(*shape, gpu="NVIDIA GeForce RTX 5090", arch="sm_120a")
    assert found == {"flash_fwd_mma"}
    assert "no shipped spec was made on sm_120a; the space of l4 runs there" in said
    found, _ = counted("1,4,16,2048", "--dtype", "fp32", gpu="NVIDIA H200", arch="sm_90a")
    assert found == {"flash_fwd_fp32_wide", "flash_fwd_fp32_wgmma"}
    for card in ({}, {"gpu": "NVIDIA L4", "arch": "sm_89"}):
        found, _ = counted("4,16,1024,64", "--dtype", "fp32", **card)
        assert found == {"flash_fwd_fp32_halves", "flash_fwd_fp32_mma"}


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_it_says_what_works(attnsweep, tmp_path):
    done = attnsweep("tune", "B=4", "H=32", "S=4096", "D=128", "--causal", "--dtype", "bf16")
    assert (done.returncode, done.stdout) == (3, "")
    assert "no driver. Nothing was measured" in done.stderr
    commands = re.findall(r"attnsweep (tune .*?)(?:  |\n)", done.stderr)
    assert commands[0].startswith("tune B=4 H=32 S=4096 D=128 --causal --dtype bf16 --dry-run")
    for command in commands:
        works = attnsweep(*command.split())
        assert works.returncode == 0, works.stderr
    assert not (tmp_path / "results" / "h100-80gb-hbm3").exists()
    done = attnsweep("tune", "1,2,64,64", "--kernel", "twice", "--kernels", str(FAMILIES))
    (command,) = re.findall(r"attnsweep (tune .*--dry-run --arch sm_90a)", done.stderr)
    assert command == f"tune 1,2,64,64 --kernel twice --kernels {FAMILIES} --dry-run --arch sm_90a"
    works = attnsweep(*command.split())
    assert (works.returncode, "twice" in works.stdout) == (0, True)


@pytest.mark.usefixtures("no_gpu")
def test_a_replay_says_that_it_is_recorded(attnsweep, tmp_path):
    done = attnsweep("tune", "4,32,4096,64", "--dtype", "bf16", "--replay", "quickstart")
    assert done.returncode == 0, done.stderr
    last, use = done.stdout.splitlines()[-2:]
    assert use.endswith("to use it: attnsweep export results/replay/tune-4-32-4096-64-bf16-full --out my_attention")
    assert re.fullmatch(
        r"flash_fwd_wgmma is 1\.\d+ ± 0\.\d+ times as fast as FlashAttention-3 \(\d+ against "
        r"\d+ µs\) on \(4,32,4096,64\) bf16 full, recorded on NVIDIA H100 80GB HBM3, [\d-]+\.",
        last,
    )
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["replay"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("4,32,4096",), ["'4,32,4096'", "four numbers, not 3"]),
        (("1,2,64,64", "--arch", "sm_90a"), ["--arch needs --dry-run"]),
        (("1,2,64,64", "--dry-run", "--arch", "sm_90a", "--top", "2", "--progress", "json"),
         ["--top and --progress do nothing with --dry-run", "leave them out"]),
        (("1,2,64,64", "--force"), ["--force goes with --save-spec"]),
        (("1,2,64,64", "--dry-run", "--arch", "sm_75"), ["flash_fwd_mma", "specs: a100 (sm_80"]),
        (("1,2,64,64", "--replay", "quickstart"), ["is not recorded there", "(1,16,1024,64)"]),
        (("1,2,64,64", "--replay", "h100"), ["is a spec that measures"]),
        (("4,32,4096,64", "--replay", "quickstart"), ["it has:\n  (4,32,4096,64) bf16 full (--dtype bf16)\n"
         "  (4,32,4096,64) bf16 causal (--dtype bf16 --causal)\n  (1,16,1024,64) fp16 full\n"]),
        (("1,2,64,64", "--kernel", "flash_fwd_wgmma", "--dry-run", "--arch", "sm_80"),
         ["flash_fwd_wgmma: needs sm_90a", "naive", "--kernel"]),
        (("1,2,64,64", "--kernel", "attend.py", "--dry-run", "--arch", "sm_80"), ["attend.py:FUNCTION"]),
        (("1,2,64,63", "--kernel", "attend.py:f", "--dry-run", "--arch", "sm_80"), ["no kernel of --kernel runs"]),
    ],
    ids=lambda value: " ".join(value)[:40],
)  # fmt: skip
@pytest.mark.usefixtures("no_gpu")
def test_what_cannot_be_is_exit_code_2_and_says_what_fits(attnsweep, arguments, words):
    done = attnsweep("tune", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    for word in words:
        assert word in done.stderr


def test_a_card_that_is_too_old_is_answered_with_what_runs_where(attnsweep, gpu):
    error = NoGpuError("Tesla T4 has compute capability 7.5, which attnsweep does not support")
    gpu.environment = error
    for command in (("tune", "1,2,64,64"), ("init",)):
        done = attnsweep(*command)
        assert done.returncode == 3
        assert "families of sm_80 and later: " in done.stderr
        assert "specs: a100 (sm_80" in done.stderr


def test_a_gpu_that_does_not_answer_is_no_traceback(attnsweep, monkeypatch):
    class Dead(FakeGpu):
        def describe(self, *, preload=(), first=None):
            raise WorkerError(Status.TIMEOUT, "no answer in 60 s")

    use(monkeypatch, Dead())
    for command in (("tune", "1,2,64,64"), ("init",)):
        done = attnsweep(*command)
        assert done.returncode == 3
        assert "the GPU did not answer" in done.stderr
        assert "nvidia-smi" in done.stderr


class TestInit:
    @pytest.mark.nightly(push=2)
    @pytest.mark.parametrize("arch", ARCHS)
    def test_a_spec_for_every_architecture_has_candidates(self, attnsweep, arch):
        done = attnsweep("init", "own/../mine.yaml", "--arch", arch)
        assert done.returncode == 2, "its directory does not exist"
        assert attnsweep("init", "mine.yaml", "--arch", arch).returncode == 0
        families = discover()
        spec = load_spec(Path("mine.yaml"), families)
        assert (spec.name, spec.arch) == ("mine", arch)
        assert all(item.spaces for item in plan(spec, ARCHS[arch]))
        assert "\n# " in Path("mine.yaml").read_text()

    def test_it_is_for_this_card(self, attnsweep, gpu):
        on(gpu, gpu="NVIDIA H100 PCIe", sm_count=114)
        said = attnsweep("init").stdout
        assert said == "sweep.yaml: a sweep for NVIDIA H100 PCIe; next: attnsweep run sweep.yaml\n"
        text = Path("sweep.yaml").read_text()
        assert "after h100.yaml" in text
        assert "PERSISTENT: [0, sms]" in text
        assert "132" not in text
        on(gpu, gpu="NVIDIA H200", sm_count=132)
        assert "after h200.yaml" in attnsweep("init", "-").stdout

    def test_what_it_comments_out_is_valid_too(self, attnsweep):
        attnsweep("init", "--arch", "sm_90a")
        path = Path("sweep.yaml")
        text = path.read_text()
        before, _, rest = text.partition("# A spec can say more")
        lines = [line.removeprefix("# ") for line in rest.splitlines()[1:]]
        Path("kernels").mkdir()
        path.write_text(before + "\n".join(lines))
        spec = load_spec(path)
        assert (spec.limits.spill_bytes, spec.check.slower) == (0, 0.02)
        assert spec.kernel_dir == Path("kernels").resolve()

    def test_it_replaces_no_file_unless_it_is_forced(self, attnsweep):
        Path("sweep.yaml").write_text("precious")
        done = attnsweep("init", "--arch", "sm_90a")
        assert (done.returncode, "--force replaces it" in done.stderr) == (2, True)
        assert Path("sweep.yaml").read_text() == "precious"
        assert attnsweep("init", "--arch", "sm_90a", "--force").returncode == 0
        assert Path("sweep.yaml").read_text() != "precious"

    @pytest.mark.usefixtures("no_gpu")
    def test_without_a_gpu_it_asks_for_which(self, attnsweep):
        done = attnsweep("init")
        assert done.returncode == 3
        assert "attnsweep init --arch sm_90a" in done.stderr
        assert not Path("sweep.yaml").exists()
        said = attnsweep("init", "-", "--problem", "1,2,64,64 bf16").stderr
        assert "attnsweep init - --problem '1,2,64,64 bf16' --arch sm_90a" in said


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("command", ["tune 1,128,1638400,128 --dry-run", "init --problem 1,128,1638400,128"])
def test_a_shape_that_this_card_does_not_hold_is_refused(attnsweep, tmp_path, command):
    done = attnsweep(*command.split(), width=1000)
    assert (done.returncode, done.stdout) == (3, "")
    said = "(1,128,1638400,128) fp16 full: its tensors need 200.0 GiB, NVIDIA Test 1 has 150.0"
    assert said in done.stderr
    assert not list(tmp_path.glob("*.yaml"))
