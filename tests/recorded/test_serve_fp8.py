"""FP8 winners in a package: what is exported, and which kernel a shape gets."""

from dataclasses import replace
from pathlib import Path

import pytest
from fake_compiler import FakeCompiler
from hypothesis import given, settings
from hypothesis import strategies as st
from packages import H100
from recorded import changed

from attnsweep.core.errors import StoreError
from attnsweep.core.hardware import ARCHS
from attnsweep.core.problem import Problem
from attnsweep.core.trial import OURS, Status
from attnsweep.family.discover import discover
from attnsweep.family.space import Space
from attnsweep.serve import export as serve_export
from attnsweep.serve.package_kernels import spares
from attnsweep.serve.runtime import families
from attnsweep.serve.runtime.fp8_dispatch import choose_fp8
from attnsweep.serve.runtime.table import read_table
from attnsweep.store import run as store_run

FAMILIES = discover()
FAMILY = FAMILIES[families.FP8.kernel.name]
ARCH = ARCHS["sm_90a"]
RESULTS = Path(__file__).parent.parent.parent / "results"
FP8_RUN, H100_RUN = RESULTS / "h100-80gb-hbm3/fp8_h100", RESULTS / "h100-80gb-hbm3/h100"


def export(place, runs, out="my_attention"):
    compilers = {"sm_90a": FakeCompiler(ARCH, place / "cache")}
    return serve_export.export(runs, place / out, FAMILIES, compilers=compilers)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    return export(tmp_path_factory.mktemp("fp8"), [FP8_RUN])


@pytest.fixture(scope="module")
def known(exported):
    return read_table(exported.directory / exported.name).fp8[H100]


def shape(batch, heads, seqlen, head_dim, dtype="e4m3_tensor", causal=False, *, heads_kv=None):
    return Problem(*(batch, heads, heads_kv or heads, seqlen, seqlen, head_dim, dtype), causal=causal)


# ---- the package ----
def test_the_run_of_fp8_problems_is_exported(exported, known):
    """Without a time of PyTorch's attention, which has no FP8."""
    assert (exported.winners, exported.left_out, exported.gpus) == (12, [], (H100.label,))
    made = read_table(exported.directory / exported.name)
    assert made.gpus == {}
    assert len(known.winners) == 12
    one = next(w for w in known.winners if w.problem == shape(4, 16, 4096, 128))
    assert one.time_us == pytest.approx(511.04, abs=1e-3)  # as ranked
    assert "BLOCK_N=96 WARPGROUPS=3" in one.kernel.config
    assert one.kernel.values.PERSISTENT == 132
    for kernel in (*(w.kernel for w in known.winners), *known.spare):
        assert made.code(kernel.stages["fwd"])
        assert kernel.stages["fwd"].function == "flash_fwd_fp8_wgmma"


def test_the_ranking_rules_which_candidate_wins(tmp_path):
    """Noisy rows are not ranked, so they are not in the package either, however fast."""
    run = store_run.open_run(FP8_RUN)
    far = [t.provider == OURS and t.status is Status.OK and t.accuracy.error > 0.06 for t in run.trials]
    few = [t.with_(status=Status.NOISY) if off else t for t, off in zip(run.trials, far, strict=True)]
    assert any(far)
    done = export(tmp_path, [changed(run, tmp_path / "run", few)])
    made = read_table(done.directory / done.name).fp8[H100]
    errors = {
        (t.problem, t.time_us.median): t.accuracy.timed_err
        for t in few
        if t.kernel == families.FP8.kernel.name and t.time_us and t.accuracy
    }
    assert made.winners
    for w in made.winners:
        error = next(e for (s, us), e in errors.items() if s == w.problem and abs(us - w.time_us) < 1e-3)
        assert error <= 0.06


def test_one_package_has_both(tmp_path):
    both = export(tmp_path, [FP8_RUN, H100_RUN])
    made = read_table(both.directory / both.name)
    assert (len(made.gpus[H100].winners), len(made.fp8[H100].winners)) == (9, 12)
    assert (both.winners, both.gpus) == (21, (H100.label,))


def test_what_cannot_be_exported_is_said(tmp_path):
    run = store_run.open_run(FP8_RUN)
    baselines = [t for t in run.trials if t.kernel != families.FP8.kernel.name]
    with pytest.raises(StoreError, match="no correct candidate of flash_fwd_fp8_wgmma"):
        export(tmp_path, [changed(run, tmp_path / "baselines", baselines)])
    cut = [t.with_(schedule={**t.schedule, "chunks": 2}) for t in run.trials]
    with pytest.raises(StoreError, match="cut into chunks"):
        export(tmp_path, [changed(run, tmp_path / "cut", cut)])


# ---- which kernel ----
def refused(kernel, shape):
    return families.refused_by(families.FP8, kernel.values, shape, ARCH.sm_count)


def test_a_tuned_shape_gets_its_winner(known):
    for winner in known.winners:
        choice = choose_fp8(known, winner.problem)
        assert (choice.kernel, choice.code) == (winner.kernel, "tuned")
        # Scales of heads go to the same machine code.
        choice = choose_fp8(known, replace(winner.problem, dtype="e4m3"))
        assert (choice.kernel, choice.code) == (winner.kernel, "tuned")


def test_another_shape_gets_the_nearest_winner_that_may_run_there(known):
    choice = choose_fp8(known, shape(4, 16, 3500, 128))
    assert choice.code == "near"
    assert "(4,16,4096,128) e4m3_tensor full" in choice.reason
    assert refused(choice.kernel, shape(4, 16, 3500, 128)) is None
    # The winners' blocks take turns, which needs more tiles than this shape has.
    few = shape(1, 16, 1024, 128)
    choice = choose_fp8(known, few)
    assert (choice.code, choice.kernel.values.PERSISTENT) == ("spare", 0)


def test_of_two_winners_that_are_as_near_that_of_its_own_scales_serves(known):
    first = next(w for w in known.winners if w.problem == shape(4, 16, 4096, 128))
    other = next(w for w in known.winners if w.kernel.kind == first.kernel.kind and w.kernel != first.kernel)
    of_heads = replace(other, problem=replace(first.problem, dtype="e4m3"))
    for order in ((first, of_heads), (of_heads, first)):
        both = replace(known, winners=order)
        for winner in order:
            near = replace(winner.problem, batch=3)
            assert choose_fp8(both, near).kernel == winner.kernel


SEQLENS = st.one_of(st.integers(1, 300), st.integers(1, 8000))


@settings(max_examples=200, deadline=None)
@given(
    batch=st.sampled_from((1, 3, 16)),
    heads_kv=st.sampled_from((1, 2, 5)),
    group=st.sampled_from((1, 4)),
    lengths=st.tuples(SEQLENS, SEQLENS),
    head_dim=st.sampled_from((64, 128)),
    causal=st.booleans(),
)
def test_every_shape_of_a_tuned_kind_is_served(known, batch, heads_kv, group, lengths, head_dim, causal):
    q, k = lengths
    sizes = (batch, heads_kv * group, heads_kv, q, q if causal else k, head_dim)
    one = Problem(*sizes, "e4m3", causal=causal)
    choice = choose_fp8(known, one)
    assert choice.kernel is not None, choice.reason
    alike = [w.kernel for w in known.winners if w.kernel.head_dim == head_dim]
    broken = [refused(kernel, one) for kernel in alike if kernel.mask == one.mask.kind]
    assert (choice.code == "spare") == all(broken)


def test_a_kind_that_was_not_tuned_has_no_kernel(known):
    for one in (shape(4, 16, 4096, 256), shape(4, 16, 4096, 128, "e4m3_block"), shape(4, 16, 4096, 96)):
        choice, said = choose_fp8(known, one), choose_fp8(known, one).reason
        assert choice.kernel is None
        assert said.startswith(f"no FP8 shape with head_dim {one.head_dim}, full, scales of ")
        assert "head_dim 128, causal, scales of tensors or heads" in said


@pytest.mark.nightly(push=4)
@pytest.mark.parametrize("dtype", FAMILY.dtypes)
@pytest.mark.parametrize("head_dim", FAMILY.head_dims)
@pytest.mark.parametrize("causal", [False, True])
def test_spare_kernels_round_as_the_winner_and_serve_all_lengths(dtype, head_dim, causal):
    problem = Problem(4, 16, 16, 4096, 4096, head_dim, dtype, causal=causal)
    for config in Space.build(FAMILY, problem, ARCH).configs[::97]:
        found = spares(config, problem, FAMILY, ARCH)
        shortest = [1, 2, 63, 64] if head_dim < 256 else []  # no config of the family serves them
        for seqlen in (*shortest, 65, 100, 127, 128, 129, 5000):
            of = replace(problem, seqlen_q=seqlen, seqlen_k=seqlen, batch=2)
            fit = [FAMILY.refused_by(spare, of, ARCH) is None for spare, _ in found]
            assert any(fit), config.label
        for spare, of in found:
            assert FAMILY.refused_by(spare, of, ARCH) is None
            assert of.seqlen_q == of.seqlen_k
            rounding = ("SUMS", "MAXIMA", "HEADROOM", "EXP2_POLY")
            assert [spare[name] for name in rounding] == [config[name] for name in rounding]
            assert (spare.INTERVAL > 0) == (config.INTERVAL > 0)
