"""What `compile` and `run --dry-run` print at any width, and why a baseline was refused."""

import pytest

from attnsweep.baselines.backend import why_not
from attnsweep.core.hardware import arch_named
from attnsweep.core.trial import Resources, Status, Trial
from attnsweep.family.discover import discover
from attnsweep.reports import views as view
from attnsweep.specs.load import load_spec
from attnsweep.specs.model import BASELINES
from attnsweep.specs.plan import plan

SPEC = """
problems:
  - {batch: 1, heads: 2, seqlen: [256, 512], head_dim: 64}
kernels: {naive: {}, three_kernel_mma: {}}
"""


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    path = tmp_path_factory.mktemp("view") / "small.yaml"
    path.write_text(SPEC)
    families = discover(None)
    return plan(load_spec(path, families), arch_named("sm_80"))


@pytest.fixture(scope="module")
def trials(planned):
    stage = {"registers": 128, "spill_bytes": 0, "smem_bytes": 98304, "blocks_per_sm": 2, "occupancy": 0.25}
    out = []
    for item in planned:
        for space in item.spaces:
            for number, config in enumerate(space.configs[:3]):
                used = Resources.model_validate(
                    {name: stage[name] for name in stage if name in Resources.model_fields}
                    | {"stages": dict.fromkeys(space.kernel.stages, stage)}
                )
                out.append(
                    Trial(
                        kernel=space.kernel.name,
                        provider="attnsweep",
                        config=dict(config),
                        problem=item.problem,
                        status=Status.PRUNED if number == 2 else Status.OK,
                        detail="spills 16 bytes, the spec allows 0" if number == 2 else None,
                        resources=used,
                    )
                )
    return out


def plain(lines):
    return [line.plain for line in lines]


def fits(lines, width):
    return all(len(line) <= width and line == line.rstrip() for line in lines)


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("every", [False, True], ids=["stages", "all"])
def test_compiled_keeps_names_and_numbers_whole(trials, width, every):
    lines = plain(view.compiled(trials, arch_named("sm_80"), every, width))
    assert fits(lines, width), "\n".join(lines)
    for label in {trial.problem.label for trial in trials}:
        assert lines.count(label) == 1
    words = " ".join(lines).split()
    assert words.count("three_kernel_mma") >= 2
    assert words.count("128") >= len({(t.problem, t.kernel) for t in trials})
    if every:
        for trial in trials:
            for name, value in trial.config.items():
                assert f"{name}={value}" in words
    assert "registers" in words


@pytest.mark.parametrize("width", [60, 80, 120])
def test_planned_names_every_rule_that_removed_something(planned, width):
    lines = plain(view.planned(planned, None, width))
    assert fits(lines, width), "\n".join(lines)
    for item in planned:
        assert lines.count(item.problem.label) == 1
        for space in item.spaces:
            for rule, n in space.removed.items():
                assert not n or any(f"{rule} {n}" in line for line in lines)


# As PyTorch 2 gives them, in this order, when only the efficient backend may run.
WARNED = [
    "Memory efficient kernel not used because: (Triggered internally at sdp_utils.cpp:786.)",
    "Expected query, key and value to have head_dim below 256. (Triggered internally at x.h:9.)",
    "Flash attention kernel not used because: (Triggered internally at sdp_utils.cpp:788.)",
    "Flash attention has been runtime disabled. (Triggered internally at sdp_utils_cpp.h:547.)",
    "cuDNN attention kernel not used because: (Triggered internally at sdp_utils.cpp:790.)",
    "cuDNN attention has been runtime disabled. (Triggered internally at sdp_utils.cpp:678.)",
]
ABORTED = RuntimeError("No available kernel. Aborting execution.\nmore")


@pytest.mark.parametrize(
    ("name", "warned", "reason"),
    [
        ("torch_efficient", WARNED, "Expected query, key and value to have head_dim below 256"),
        ("torch_flash", WARNED, "Flash attention has been runtime disabled"),
        ("torch_cudnn", WARNED, "cuDNN attention has been runtime disabled"),
        ("torch_cudnn", ["CuDNN attention kernel not used because: no plan."], "no plan"),
        ("torch_flash", WARNED[:2], "No available kernel. Aborting execution."),
        ("torch_flash", [], "No available kernel. Aborting execution."),
        ("flash_attn_2", WARNED, "No available kernel. Aborting execution."),
    ],
)
def test_a_refused_backend_gives_its_own_reason(name, warned, reason):
    assert why_not(name, ABORTED, warned) == reason


def test_list_says_how_to_get_each_baseline_that_is_missing(installed):
    installed("torch 2.9")
    text = "\n".join(line.plain for line in view.families({}, BASELINES, 200))
    assert "not installed: cudnn: pip install nvidia-cudnn-frontend" in text
    assert "flash_attn_3, flash_attn_3_fp8: pip install tokenspeed-fa3 (fp16, bf16, FP8)" in text
    assert "torch_flash:" not in text
    told = view.families_json({}, BASELINES)["missing_baselines"]
    assert told["flash_attn_4"] == "pip install flash-attn-4"
    assert set(told) == {name for name in BASELINES if name.startswith(("cudnn", "triton", "flash"))}
