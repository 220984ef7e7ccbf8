"""Commands that read runs, on recorded ones whose files are damaged at random: each answers, or refuses in words."""

import json
import shutil

import changes
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attnsweep.core.files import shipped

RUNS = [shipped("results") / "h200" / name for name in ("mla", "append_few", "factories", "h200_parameters")]
# RUN is the damaged copy, SAME the run as it was recorded.
COMMANDS = """
report RUN
report RUN --full --top 3
report RUN --json
report RUN --csv - -q
report RUN --markdown out.md
report RUN --html out.html
explain RUN
explain RUN --json
compare RUN SAME
compare SAME RUN --json
inspect RUN
inspect RUN --json
check --recorded SAME RUN
check --recorded RUN SAME --json
check RUN/spec.yaml --against RUN
accept RUN new
accept RUN SAME --force
accept SAME RUN
merge RUN SAME --out new
run RUN/spec.yaml --dry-run --arch sm_90a
tune 1,16,1024,64 --replay RUN --dry-run
export RUN --out new.py
""".strip().splitlines()
one_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("spec.yaml", "[" * 3000),
        ("spec.yaml", "kernels: [1]\nbaselines: 3\nproblems: 2001-99-99\n"),
        ("spec.yaml", "problems: [{batch: 0, heads: 1, heads_kv: 1, seqlen_q: 1, seqlen_k: 1, head_dim: 1, calls: 1}]"),
        ("spec.yaml", "kernels: {rows: 3, tiles: {TILE_M: [[1], 64, 0.5, {}], variants: {a: 3, b: {c: 4}}}}\n"),
        ("spaces.json", "[" * 100_000),
        ("spaces.json", '[{"problem": ["x"], "kernel": "tiles", "candidates": 3}]'),
        ("spaces.json", '[{"problem": "x", "kernel": "tiles", "candidates": 3, "removed": {"a": null}}]'),
    ],
)
def test_a_file_beside_the_rows_that_says_anything_else_ends_no_report(attnsweep, tmp_path, file, text):
    run = tmp_path / "factories"
    shutil.copytree(RUNS[2], run)
    (run / file).write_text(text)
    for command in ("report", "explain"):
        done = attnsweep(command, run)
        assert (done.returncode, f"{file}: not" in done.stderr) == (0, file == "spaces.json"), done.stderr


@one_folder
@given(st.randoms(), st.sampled_from(RUNS), st.sampled_from(COMMANDS))
def test_a_command_on_a_damaged_run_ends_in_an_answer_or_in_words(attnsweep, tmp_path, monkeypatch, rng, run, command):
    shutil.rmtree(tmp_path)
    damaged, same = tmp_path / "damaged" / run.name, tmp_path / "same" / run.name
    for copy in (damaged, same):
        shutil.copytree(run, copy)
    monkeypatch.chdir(tmp_path)
    changes.of_run(rng, damaged, RUNS)
    done = attnsweep(*(word.replace("RUN", str(damaged)).replace("SAME", str(same)) for word in command.split()))
    assert done.returncode in (0, 1, 2, 3, 4), done.stderr
    assert "Traceback" not in done.stderr
    if done.returncode == 2:
        assert "error: " in done.stderr
    elif "--json" in command and done.returncode != 3:
        json.loads(done.stdout)
