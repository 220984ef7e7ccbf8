"""The HTML page: what it says, that it is whole, and that a real browser draws it."""

import base64
import gzip
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browsers import browser, drawn
from fp8_rows import fp8_run
from pages import visible
from samples import baseline, candidate, failed, full_run

from attnsweep.core.errors import StoreError, ToolchainError
from attnsweep.core.problem import Problem
from attnsweep.core.trial import Accuracy, Status
from attnsweep.reports import html as page
from attnsweep.store.run import Run, open_run

pytest.importorskip("vl_convert", reason="needs the html extra: vl-convert-python")
pytest.importorskip("jinja2", reason="needs the html extra: Jinja2")

ROOT = Path(__file__).parent.parent.parent
RECORDED = ROOT / "results" / "h200" / "mma_h200"


class Elements(HTMLParser):
    """Every start tag with its attributes, and the text of each table cell."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.ids: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id" and value]


def data_of(text: str) -> dict:
    packed = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1]
    return json.loads(gzip.decompress(base64.b64decode(packed)))["run"]


def scaled_run(directory: Path = Path("results/h200/shapes")) -> Run:
    """Two families and a baseline on six shapes, of three sequence lengths and two batches."""
    trials = []
    for batch in (1, 4):
        for seqlen in (512, 1024, 2048):
            problem = Problem(batch, 16, 16, seqlen, seqlen, 64)
            us = 20 * batch * (seqlen / 1024) ** 2
            rows = [candidate("flash", us * (1 + m / 999 + n / 99), M=m, N=n) for m in (64, 128) for n in (1, 2, 3)]
            rows.append(candidate("slow", 9 * us, THREADS=64).with_(stages_us={"fwd": 8.8 * us}))
            rows.append(failed("flash", Status.PRUNED, "spills 8 bytes, 0 allowed", M=256, N=1))
            rows.append(baseline("torch_cudnn", 1.1 * us))
            trials += [row.with_(problem=problem) for row in rows]
    return full_run(directory, trials=trials, spec_text="kernels:\n  slow: {}\n  flash: {}\n")


# -- the text ---------------------------------------------------------------------------------


def test_the_page_is_one_file_that_asks_for_no_other():
    text = page.render(open_run(RECORDED))
    elements = Elements(text)
    for tag, attributes in elements.tags:
        for name in ("src", "href"):
            value = attributes.get(name) or "#"
            assert value.startswith(("#", "data:")), (tag, value)
    assert "default-src 'none'" in text
    assert not re.search(r"@import|url\(", "".join(re.findall(r"<style>.*?</style>", text, re.S)))
    assert len(elements.ids) == len(set(elements.ids))


def test_every_table_is_there_without_a_script():
    run = open_run(RECORDED)
    text = visible(page.render(run))
    for trial in run.trials:
        assert trial.problem.label in text
    assert "15.85 µs" in text
    assert "0.89×" in text
    assert "flash-attn-4 is not installed" in text
    assert "driver 580.159.04" in text
    assert "NVRTC" in text
    assert "Q_IN_REGISTERS=1 BLOCK_M=128 NUM_WARPS=8" in text
    assert "± half the interquartile range of the rounds" in text
    assert "≥ at least" not in text  # no baseline is noisy
    assert "of the speed of light" in text
    assert "of the bound" not in text


def test_the_data_holds_every_candidate_whatever_became_of_it():
    run = full_run()
    data = data_of(page.render(run))
    ours = [trial for trial in run.trials if trial.provider == "attnsweep"]
    assert len(data["trials"]) == len(ours)
    statuses = [data["statuses"][row[2]] for row in data["trials"]]
    assert sorted(statuses) == sorted(trial.status.value for trial in ours)
    for row in data["trials"]:
        assert (row[3] is not None) == (data["statuses"][row[2]] == "ok")
        assert len(row[5]) == len(data["kernels"][row[1]]["params"])


def test_what_a_run_holds_cannot_leave_its_place():
    wicked = '</script><script>alert(1)</script><img src=x onerror="alert(2)">'
    trials = [
        candidate("<b>naive</b>", 9.0, N=1),
        failed("naive", Status.WRONG, wicked, N=2),
        baseline("<i>baseline</i>", 8.0),
    ]
    text = page.render(full_run(trials=trials, spec_text=wicked, warnings=[wicked]))
    tags = Elements(text).tags
    assert not any(tag in ("img", "b", "i") and "onerror" in attrs for tag, attrs in tags)
    assert sum(tag == "script" for tag, _ in tags) == 3
    assert wicked not in text
    assert "&lt;b&gt;naive&lt;/b&gt;" in text


def test_the_ladder_is_in_the_specs_order_with_distances():
    text = visible(page.render(scaled_run()))
    first = text.index("Best of each family")
    assert text.index("slow", first) < text.index("flash", first)
    rung = text[first : first + 500]
    assert "Target: 5.500 µs, torch_cudnn, the fastest baseline known" in rung
    assert "8.18×" in rung  # 45 µs / 5.5 µs
    assert "met, 2" in rung
    given = visible(page.render(scaled_run(), target_us=2.5))
    assert "Target: 2.500 µs, the given target" in given
    assert "18.0×" in given


def test_a_run_of_which_nothing_is_known_still_has_a_page():
    trials = [failed("naive", Status.TIMEOUT, "no answer in 20 s", N=2)]
    text = visible(page.render(full_run(trials=trials, environment=None)))
    assert "No candidate is ok" in text
    assert "GPU and date unknown" in text


def test_recorded_rows_stay_marked():
    trials = [candidate("naive", 9.0, N=1).with_(recorded=True, recorded_on="NVIDIA H200, 2026-07-26")]
    text = visible(page.render(full_run(trials=trials)))
    assert "naive†" in text
    assert "† recorded on NVIDIA H200, 2026-07-26, not measured in this run" in text


def test_a_page_that_cannot_be_written_says_where(tmp_path):
    with pytest.raises(StoreError, match=r"no/such/x\.html: cannot be written"):
        page.write(full_run(), tmp_path / "no/such/x.html")


def test_without_the_extra_the_command_that_mends_it_is_told(monkeypatch):
    def absent(name):
        raise page.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(page.metadata, "version", absent)
    with pytest.raises(ToolchainError, match=r"pip install .*\[html\]'"):
        page.render(full_run())


def test_the_command_writes_the_page_and_says_what_it_is(attnsweep, tmp_path):
    place = tmp_path / "h200.html"
    done = attnsweep("report", RECORDED, "--html", place, "--json", "--target-us", "5")
    assert done.returncode == 0
    assert json.loads(done.stdout)["bytes"] == place.stat().st_size
    assert "Target: 5.000 µs" in visible(place.read_text())


def test_a_noisy_base_and_a_baseline_over_the_limit_are_marked_on_the_page():
    noisy = baseline("torch_cudnn", 57.4).with_(status=Status.NOISY, detail="quartiles")
    over = baseline("unfused", 71.0).with_(accuracy=Accuracy(rel_err=7.1e-6, limit=5.0e-6))
    run = full_run(trials=[candidate("flash_fwd_wgmma", 28.1, BLOCK_M=64), noisy, over])
    text = visible(page.render(run))
    assert "base, noisy" in text
    assert "at least 2.04×" in text
    assert "torch_cudnn stayed noisy" in text
    assert "unfused: error 7.1e-06, over the limit 5.0e-06" in text


def test_a_baseline_that_is_faster_wins_no_card_for_us():
    run = full_run()
    text = page.render(full_run(trials=[*run.trials, baseline("flash_attn_3", 25.0)]))
    assert "is the best of ours; flash_attn_3 is faster (1.12×)" in text
    assert "</b> wins" not in text
    assert "</b> wins" in page.render(run)


# -- the browser ------------------------------------------------------------------------------

DRAWN = '<html lang="en" data-drawn="yes"'
SEVERAL = ROOT / "results" / "h100-80gb-hbm3" / "h100"


def problems(count: int) -> Run:
    """A run of `count` problems with eight candidates each."""
    trials = [
        row.with_(problem=Problem(b, 16, 16, 1024, 1024, 64))
        for b in range(1, count + 1)
        for row in (
            *(candidate("flash", 10 + m / 7 + b, BLOCK_M=m) for m in range(8)),
            failed("naive", Status.PRUNED, "spills 24 bytes, 0 allowed", N=1),
            baseline("torch_cudnn", 11.0 + b),
        )
    ]
    return full_run(trials=trials)


# Name to run, what the address names, and the style of the frame.
PAGES = {
    "scaled": (scaled_run, "#problem=1", ""),
    "chosen": (scaled_run, "#problem=0&kernel=flash&x=N&y=M", ""),
    "recorded": (lambda: open_run(RECORDED), "", "color-scheme:dark;"),
    "several": (lambda: open_run(SEVERAL), "#problem=0", ""),
    "fp8": (fp8_run, "", ""),
    "many": (lambda: problems(62), "#problem=61", ""),
    "unknown": (lambda: full_run(environment=None), "", "width:360px;"),
}


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """All of PAGES as one browser draws them: without an error, and without a request."""
    directory, addresses = tmp_path_factory.mktemp("pages"), {}
    for name, (run, fragment, style) in PAGES.items():
        page.write(run(), directory / f"{name}.html")
        addresses[f"{name}.html{fragment}"] = style or "width:1280px;"
    addresses["several.html?phone"] = "width:360px;"
    addresses["recorded.html?tablet"] = "width:768px;"
    found, said, asked = drawn(directory, addresses)
    assert (said, asked) == ([], [])
    assert set(found) == set(addresses)
    assert all(DRAWN in each.html for each in found.values())
    places = {"?phone": " on a phone", "?tablet": " on a tablet"}

    def named(name):
        return re.split("[.?#]", name)[0] + "".join(said for sign, said in places.items() if sign in name)

    return {named(name): each for name, each in found.items()}


def plots(document: str, problem: int) -> dict[str, str]:
    """Name to figure of every plot of one problem, and of those across problems."""
    begin = document.index(f'id="problem-{problem}"')
    part = document[begin : document.index("</article>", begin)]
    across = document[document.index('id="across"') : document.index('id="provenance"')]
    found = {}
    for figure in re.findall(r"<figure.*?</figure>", part + across, re.DOTALL):
        found[re.search(r'data-plot="(\w+)"', figure)[1]] = figure
    return found


def marks(svg: str) -> int:
    """Graphical marks that have data: not axes, not frames."""
    return len(re.findall(r'aria-roledescription="(?:bar|rect mark|point|line mark|tick|text mark)"', svg))


USUAL = {"baselines", "stages", "effects", "search", "heatmap", "roofline"}


@pytest.mark.nightly(push=1)
@browser
@pytest.mark.parametrize(
    ("name", "problem", "expected"),
    [
        ("scaled", 1, USUAL | {"scaling"}),
        # Its problems differ in more than one way each, so that nothing is drawn along a shape.
        ("recorded", 0, USUAL),
    ],
)
def test_a_browser_draws_every_plot(pages, name, problem, expected):
    document = pages[name].html
    figures = plots(document, problem)
    assert set(figures) == expected
    for figure, svg in figures.items():
        assert marks(svg) >= 2, f"{figure} is empty: {svg[:400]}"
        assert "NaN" not in svg, figure
        assert 'role="graphics-document"' in svg, figure
    shown = len(re.findall("<article", document)) - len(re.findall(r"<article[^>]*hidden", document))
    assert shown == 1


@browser
def test_candidates_that_differ_in_accuracy_are_drawn_by_time_and_error(pages):
    svg = plots(pages["fp8"].html, 0)["frontier"]
    assert "Time against error, (1,16,4096,128) e4m3 causal" in svg
    assert len(re.findall('aria-roledescription="point"', svg)) == 5
    assert "NaN" not in svg
    assert all(kind in svg for kind in ("kernel", "baseline", "flash_attn_3_fp8"))


@browser
def test_the_reader_chooses_the_two_parameters(pages):
    svg = plots(pages["chosen"].html, 0)["heatmap"]
    assert "Fastest time for each N and M" in svg
    # 3 values of N by 2 of M, and one of M that was pruned.
    assert svg.count('aria-roledescription="rect mark"') == 7
    assert "pruned" in svg


@browser
def test_a_later_problem_of_many_is_unpacked_and_drawn(pages):
    document = pages["many"].html
    assert all(marks(figure) >= 2 for figure in plots(document, 61).values())
    begin = document.index('id="problem-61"')
    assert "Ranking" in document[begin : document.index("</article>", begin)]


@browser
def test_no_text_of_a_plot_is_cut_on_a_phone(pages):
    phone = pages["several on a phone"]
    assert (phone.cut, phone.width) == ([], 360)


@browser
@pytest.mark.parametrize("name", ["scaled", "several", "several on a phone", "recorded on a tablet"])
def test_no_table_is_wider_than_its_place(pages, name):
    assert pages[name].scrolls == []


@browser
def test_a_heading_says_by_what_its_table_is_sorted(pages):
    head = re.search(r'<table class="summary">.*?</thead>', pages["scaled"].html, re.DOTALL)[0]
    assert head.count('aria-sort="none"') == head.count("<th ") == 7
