"""A section for each card, from whatever is recorded of it: made-up runs of two cards."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "scripts"))
from cards import cards
from records import Book

import docs

CARD = json.loads((docs.ROOT / docs.RESULTS / "ladder" / "environment.json").read_text())
PROBLEM = {"batch": 1, "heads": 8, "heads_kv": 8, "head_dim": 64, "dtype": "fp16", "causal": False}
SPECS = {
    "flash_short": {"title": "Short", "kernel": "flash_fwd_wgmma", "fused": True},
    "h200": {"title": "As models call it", "kernel": "flash_fwd_wgmma", "fused": True},
    "ladder": {"title": "Ladder"},
}
ROUNDS = 8


def row(provider, seqlen, us, *, status="ok", error=1e-4, **more):
    """A row whose rounds all took `us`, or, if it is noisy, from half to twice as long."""
    rounds = [us / 2, 2 * us] * (ROUNDS // 2) if status == "noisy" else [us] * ROUNDS
    ours = provider == "attnsweep"
    return {
        "kernel": "flash_fwd_wgmma" if ours else provider,
        "provider": provider,
        "config": {"PDL": 0} if ours else {},
        "problem": PROBLEM | {"seqlen_q": seqlen, "seqlen_k": seqlen},
        "status": status,
        "detail": None if status == "ok" else f"it is {status}",
        "time_us": None
        if status == "skipped"
        else {"median": us, "low": min(rounds), "high": max(rounds), "samples": ROUNDS, "rounds": rounds},
        "accuracy": {"rel_err": error, "limit": 1e-3},
        **more,
    }


def record(results, slug, name, rows, protocol=4):
    directory = results / slug / name
    directory.mkdir(parents=True)
    gpu = {"h100-80gb-hbm3": "NVIDIA H100 80GB HBM3", "h200": "NVIDIA H200", "l4": "NVIDIA L4"}
    facts = CARD | {"gpu": gpu[slug], "protocol": protocol}
    (directory / "environment.json").write_text(json.dumps(facts))
    (directory / "trials.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    (directory / "spec.yaml").write_text("measure: {rank_by: warm}\n")


@pytest.fixture
def results(tmp_path):
    """An H100 with protocol 4, and an H200 with protocol 3."""
    (tmp_path / "renamed.json").write_text('{"flash_short": "flash_short_h200"}')
    record(
        tmp_path,
        "h100-80gb-hbm3",
        "flash_short",
        [
            row("attnsweep", 512, 10.0, chained_us=9.5),
            row("cudnn", 512, 12.0),
            row("flash_attn_3", 512, 15.0),
            row("torch_flash", 512, 30.0, error=2e-3),
            row("attnsweep", 1024, 20.0),
            row("cudnn", 1024, 18.0),
            row("flash_attn_3", 1024, 20.0),
            row("attnsweep", 2048, 40.0),
            row("cudnn", 2048, 60.0, status="noisy"),
            row("triton_flash", 2048, 90.0),
            row("flash_attn_3", 2048, 0.0, status="skipped"),
        ],
    )
    old = row("attnsweep", 512, 10.0)
    old["config"] = {"PDL": 2}
    rows = [old, row("torch_cudnn", 512, 14.0)]
    record(tmp_path, "h200", "flash_short_h200", rows, protocol=None)
    rows = [row("attnsweep", 512, 10.0), row("torch_cudnn", 512, 11.0)]
    record(tmp_path, "h200", "h200", rows)
    record(tmp_path, "l4", "other", rows)
    (tmp_path / "replay").mkdir()
    return tmp_path


def test_cards_have_an_order_and_only_what_is_recorded(results):
    found = cards(results, SPECS)
    assert [card.gpu for card in found] == ["NVIDIA H100 80GB HBM3", "NVIDIA H200"]
    assert [list(card.tables) for card in found] == [["flash_short"], ["flash_short", "h200"]]
    assert found[1].where("flash_short") == "h200/flash_short_h200"
    known = Book(results / "h200")
    assert cards(results, SPECS, known)[1].book is known


def test_a_plain_read_is_no_baseline_of_a_table(tmp_path):
    rows = [row("attnsweep", 512, 10.0), row("plain_read", 512, 9.0, error=1.0), row("cudnn", 512, 12.0)]
    record(tmp_path, "h200", "ladder", rows)
    (card,) = cards(tmp_path, SPECS)
    (found,) = card.tables["ladder"]
    assert [*found["baselines"]] == ["cudnn"]


def test_losses_and_lower_bounds_stay_in_the_means(results):
    h100, h200 = cards(results, SPECS)
    each, pooled = h100.means
    assert each.ratios == pytest.approx([1.2, 0.9, 0.75])  # the third: a noisy baseline's best round
    assert (each.slower, each.overlapping, each.protocol) == (2, 0, "4")
    assert each.mean == pytest.approx((1.2 * 0.9 * 0.75) ** (1 / 3))
    assert each.fa3 == pytest.approx([1.5, 1.0])
    assert each.fa3_mean == pytest.approx(1.5**0.5)
    assert (pooled.of, pooled.protocol, pooled.mean) == ("", "4 or later", each.mean)
    short, models, pooled = h200.means
    assert (short.overlapping, models.overlapping) == (1, 0)
    assert short.protocol == "3"
    assert (short.fa3, short.fa3_mean) == ([], None)
    # The problem is that of both specs; the one without overlap counts.
    assert (pooled.protocol, pooled.ratios) == ("4 or later", pytest.approx([1.1]))


def test_a_row_that_a_later_run_contradicts_is_shown_and_in_no_mean(results):
    before, *_ = cards(results, SPECS)
    earlier = {"contradicted": {"h100-80gb-hbm3/flash_short": ["(1,8,1024,64) fp16 full"]}}
    (results / "earlier.json").write_text(json.dumps(earlier))
    after, *_ = cards(results, SPECS)
    assert len(after.tables["flash_short"]) == len(before.tables["flash_short"])
    for old, new in zip(before.means, after.means, strict=True):
        labels = [[each["problem"].label for each in mean.records] for mean in (old, new)]
        assert labels[1] == [label for label in labels[0] if "1024" not in label]
        assert len(labels[1]) < len(labels[0])
