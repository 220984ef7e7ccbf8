"""What the HTML page says of baselines, and what a narrow window shows of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from browsers import browsed, browser
from pages import visible
from samples import baseline, candidate, full_run

from attnsweep.core.trial import Accuracy, Status
from attnsweep.reports import html as page
from attnsweep.store.run import open_run

pytest.importorskip("vl_convert", reason="needs the html extra: vl-convert-python")
pytest.importorskip("jinja2", reason="needs the html extra: Jinja2")

RECORDED = Path(__file__).parent.parent.parent / "results" / "h100-80gb-hbm3" / "h100"


def test_a_noisy_base_and_a_baseline_over_the_limit_are_marked_on_the_page() -> None:
    noisy = baseline("torch_cudnn", 57.4).with_(status=Status.NOISY, detail="quartiles")
    over = baseline("unfused", 71.0).with_(accuracy=Accuracy(rel_err=7.1e-6, limit=5.0e-6))
    run = full_run(trials=[candidate("flash_fwd_wgmma", 28.1, BLOCK_M=64), noisy, over])
    text = visible(page.render(run))
    assert "base, noisy" in text
    assert "at least 2.04×" in text
    assert "torch_cudnn stayed noisy" in text
    assert "unfused: error 7.1e-06, over the limit 5.0e-06" in text


def narrow_tables(text: str) -> list[str]:
    return re.findall(r'<table class="summary">.*?</table>', text, re.DOTALL)


def test_the_time_is_next_to_the_problem_where_a_narrow_window_shows_it() -> None:
    (summary,) = narrow_tables(page.render(full_run()))
    header = re.findall(r"<th [^>]*>([^<]*)</th>", summary.split("</thead>")[0])
    assert header[:3] == ["problem", "µs", "best of ours"]
    row = re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", summary.split("<tbody>")[1], re.DOTALL)
    assert row[1] == "28.10"
    assert row[2] == "three_kernel_wgmma"


def test_a_baseline_that_is_faster_wins_no_card_for_us() -> None:
    run = full_run()
    text = page.render(full_run(trials=[*run.trials, baseline("flash_attn_3", 25.0)]))
    assert "is the best of ours; flash_attn_3 is faster (1.12×)" in text
    assert "</b> wins" not in text
    assert "</b> wins" in page.render(run)


# Loads page.html in a frame as wide as a small phone and writes which text of a plot is cut.
PHONE = """<body><iframe src="page.html" style="width:360px;height:9000px;border:0"></iframe><p></p>
<script>
const frame = document.querySelector("iframe");
const timer = setInterval(() => {
  const page = frame.contentDocument;
  if (page?.documentElement.dataset.drawn !== "yes") return;
  clearInterval(timer);
  const said = [];
  for (const svg of page.querySelectorAll("figure svg")) {
    const box = svg.getBoundingClientRect();
    for (const text of svg.querySelectorAll("text")) {
      const own = text.getBoundingClientRect();
      if (own.width && (own.left < box.left - 1 || own.right > box.right + 1)) {
        said.push(text.textContent);
      }
    }
  }
  const wide = page.documentElement.scrollWidth;
  document.querySelector("p").textContent = `cut: ${said.join("; ")} width: ${wide}.`;
}, 100);
</script>"""


@browser
def test_no_text_of_a_plot_is_cut_on_a_phone(tmp_path) -> None:
    page.write(open_run(RECORDED), tmp_path / "page.html")
    phone = tmp_path / "phone.html"
    phone.write_text(PHONE)
    document, _, _ = browsed(phone, "", "--allow-file-access-from-files")
    assert re.search(r"<p>(.*?)</p>", document)[1] == "cut:  width: 360."
