"""Write the generated pages of docs/, and the blocks of the README and other pages.

Usage: python scripts/docs.py [--check]. With --check it writes nothing and returns 1 if a page is
stale. Prose is in scripts/pages, claims in scripts/claims; every figure comes from results/.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ["COLUMNS"] = "120"  # as wide as a pipe prints; the console reads it once

import accuracy
import typer.cli
from cards import by_spec, cards
from claims import ENV, Sheet
from performance import csv
from records import Book
from typer.testing import CliRunner
from used import (
    beside_flashinfer,
    faults,
    judged,
    masked,
    masks,
    model_steps,
    models,
    paged,
    paged_table,
    serving_table,
    steps_served,
    training,
    training_models,
)

import attnsweep
from attnsweep.cli import app
from attnsweep.core.hardware import ARCHS

ROOT = Path(__file__).parent.parent
DATA = Path(__file__).parent / "claims"
RESULTS = "results/h200"
# Where each page is. Links between pages follow from it; a page of scripts/pages has its name here.
PAGES = {
    "readme": "README.md",
    "benchmarks": "docs/benchmarks.md",
    "claims": "docs/claims.md",
    "compare": "docs/how-to/compare.md",
    "cli": "docs/cli.md",
    "engine": "docs/how-to/engine.md",
    "kernels": "docs/kernels.md",
    "performance": "docs/performance.md",
    "performance csv": "docs/performance.csv",
    "schema": "docs/spec.schema.json",
    "measuring": "docs/measuring.md",
    "numerics": "docs/explanation/numerics.md",
    "profile": "docs/how-to/profile.md",
    "pytorch": "docs/explanation/pytorch.md",
    "tried": "docs/tried.md",
    "tune": "docs/how-to/tune.md",
    "tutorial": "docs/tutorials/without-a-gpu.md",
    "use": "docs/how-to/use.md",
    "model": "docs/tutorials/your-model.md",
}
TEMPLATES = ("benchmarks", "claims", "kernels", "performance")
NOTE = "<!-- Written by scripts/docs.py; change scripts/pages, scripts/claims or the code. -->\n\n"
TUNED = ("tune", "4,32,4096,64", "--dtype", "bf16", "--replay", "quickstart")
RECORDED = tuple(f"results/h100-80gb-hbm3/{name}" for name in ("flash_short", "h100"))
QUICKSTART = ("run", "quickstart")


def sheets(book: Book) -> dict[str, Sheet]:
    """Every file of claims, by its name."""
    return {path.stem: Sheet(path, book) for path in sorted(DATA.glob("*.toml"))}


def render(template: str, page: str, known: dict[str, Any]) -> str:
    """A template filled in, with links as they are on a page."""

    def root(path: str) -> str:
        return os.path.relpath(path, Path(PAGES[page]).parent)

    text = ENV.get_template(f"{template}.md").render(
        **known,
        root=root,
        link=lambda name: root(PAGES[name]),
        results=lambda name: root(f"{RESULTS}/{known['book'].place(name)}"),
    )
    lines = "\n".join(line.rstrip() for line in text.splitlines())
    return re.sub(r"\n{3,}", "\n\n", lines).strip() + "\n"


def output_of(app: typer.Typer, *arguments: str, code: int = 0) -> str:
    """What a command prints, run in this process; `code` is its exit code."""
    done = CliRunner().invoke(app, arguments, prog_name="attnsweep")
    if done.exit_code != code:
        raise RuntimeError(f"{' '.join(arguments)}: exit {done.exit_code}\n{done.output}")
    return "\n".join(line.rstrip() for line in done.stdout.strip().splitlines()) + "\n"


def cli() -> str:
    """The commands, by Typer's own generator."""
    text = output_of(typer.cli.app, "attnsweep.cli", "utils", "docs", "--name", "attnsweep")

    # Its list of commands is cut off, and each has a heading.
    text = re.sub(r"\*\*Commands\*\*:\n\n(?:\* .*\n)+\n", "", text)
    text = re.sub(r"\* `--help`: .*\n", "", text)
    text = re.sub(r" <(?:str|path)>`", "`", text)
    text = re.sub(r"\*\*Usage\*\*:\n\n```console\n.*\n```\n\n", "", text)  # arguments are listed
    text = text.replace("**Options**:\n\n\n", "").replace(" range>", ">")
    text = re.sub(r"Examples:\n(?:\nattnsweep .*\n)+", "", text)
    archs = f"ne of {', '.join(ARCHS)}"
    text = text.replace(f"o{archs}", "an architecture").replace(f"O{archs}", "An architecture")
    # What several commands take is said once, before them; --help says which take it.
    counts = Counter(re.findall(r"^\* `-.*\n", text, re.MULTILINE))
    shared = [line for line in counts if counts[line] > 1]
    for line in shared:
        text = text.replace(line, "")
    text = text.replace("**Options**:\n\n\n", "")
    first, rest = text.split("\n## ", 1)
    # A command's page has what its summary leaves out, and so does its --help.
    rest = re.sub(r"(`\n\n.+\n)(?:\n(?!\*\*|#).+\n)+", r"\1", rest)
    listed = f"**Of several commands**:\n\n{''.join(shared)}"
    about = (
        "The `--help` of a command says more: examples, and which of the shared options it takes. "
        f"An architecture is o{archs}.\n"
    )
    return re.sub(r"\n{3,}", "\n\n", f"{NOTE}{first}\n{about}\n{listed}\n## {rest}")


def with_blocks(page: str, blocks: dict[str, str]) -> str:
    """A hand-written page with its generated blocks written anew, each between two marks."""
    text = (ROOT / PAGES[page]).read_text(encoding="utf-8")
    for name, block in blocks.items():
        begin, end = f"<!-- {name}: written by scripts/docs.py -->\n", f"<!-- /{name} -->"
        before, rest = text.split(begin)
        text = before + begin + block + end + rest.split(end, 1)[1]
    return text


def shares_used(runs: Iterable[attnsweep.Run]) -> str:
    """How much of each limit of error the recorded rows used; nothing if none of them says so."""
    found = accuracy.summary(runs)
    if not found["of"]:
        return ""
    every = found["of"]
    least = {False: 0.9, True: 1}  # of a kernel, of a baseline
    found["of"] = [
        each for each in every if max(each["shares"].values()) > least[bool(each["baseline"])]
    ]
    found |= {"rows": sum(each["rows"] for each in every), "within": len(every) - len(found["of"])}
    text = ENV.get_template("accuracy.md").render(found=found, table=accuracy.markdown(found))
    return f"\n{text.strip()}\n"


def first_screen(answer: str, found: dict[str, Any], names: dict[str, str]) -> str:
    """What `tune -q` answers, then ours and the four fastest baselines, from its JSON."""
    (problem,) = found["problems"]
    rows = [row for row in problem["ranking"] if row["baseline"] and row["rank"]]
    rows = [problem["winner"], *sorted(rows, key=lambda row: row["time_us"])[:4]]
    names = {name: text.replace("SDPA", "PyTorch's") for name, text in names.items()}
    names |= {"torch_cudnn": "cuDNN through PyTorch", "cudnn": "cuDNN called directly"}
    best = names[problem["winner"]["best_baseline"]]
    lines = [f"| kernel | µs | TFLOP/s | times as fast as {best} |", "|---|---:|---:|---:|"]
    for row in rows:
        name = names[row["provider"]] if row["baseline"] else f"attnsweep's `{row['kernel']}`"
        ratio = f"{row['ratio_to_best_baseline']:.2f}×"
        lines.append(f"| {name} | {row['time_us']:.0f} | {row['tflops']:.0f} | {ratio} |")
    table = "\n".join(lines)
    return f"```\n$ attnsweep {' '.join(TUNED)} -q\n{answer}```\n\n{table}\n"


def examples(known: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The README, two how-tos and the first tutorial, with what their commands print."""
    with contextlib.chdir(ROOT):
        printed = output_of(app, *QUICKSTART)
        tuned = output_of(app, *TUNED, "-q")
        facts = json.loads(output_of(app, *TUNED, "--json"))
        counted = output_of(app, "run", "configs/h100.yaml", "--dry-run")
        # Some problems of the first run are not in the second, so that the exit code is 4.
        checked = output_of(app, "check", "--recorded", *RECORDED, code=4).splitlines()
    readme = {
        "headline": render(
            "headline",
            "readme",
            known | {"masks": masked(), "training": steps_served(), "steps": model_steps()},
        ),
        "answer": first_screen(tuned, facts, known["performance"].data["given"]["baselines"]),
    }
    yield PAGES["readme"], with_blocks("readme", readme)
    tune = f"```console\n$ attnsweep {' '.join(TUNED)} -q\n{tuned}```\n"
    yield PAGES["tune"], with_blocks("tune", {"tune": tune})
    compare = [f"$ attnsweep check --recorded {' '.join(RECORDED)}", *checked[:4], "…"]
    block = "```console\n" + "\n".join(compare) + "\n```\n"
    yield PAGES["compare"], with_blocks("compare", {"check": block})
    first, second = (text.splitlines() for text in (printed, counted))
    later = next(n for n, line in enumerate(second[1:], 1) if line.startswith("("))
    tutorial = {
        "table": "```text\n" + "\n".join(first[:10]) + "\n…\n" + "\n".join(first[-6:]) + "\n```\n",
        "dry run": "```text\n" + "\n".join(second[:later]) + "\n```\n",
    }
    yield PAGES["tutorial"], with_blocks("tutorial", tutorial)


def pages(book: Book) -> Iterator[tuple[str, str]]:
    """Path and text of everything that is generated."""
    known: dict[str, Any] = {"book": book, "api": attnsweep, **sheets(book)}
    specs = known["performance"].data["given"]["specs"]
    known["cards"] = cards(book.results.parent, specs, book)
    known["by_spec"] = by_spec(known["cards"])
    known |= {"masks": masks(masked()), "training": training()}
    known["training_models"] = training_models()
    known["paged"], gpu = paged(book), (book.card("paged").gpu or "").removeprefix("NVIDIA ")
    known["paged_gpu"] = gpu
    for name in TEMPLATES:
        yield PAGES[name], NOTE + render(name, name, known)
    baselines = known["performance"].data["given"]["baselines"]
    yield PAGES["performance csv"], csv(known["cards"], baselines)
    yield PAGES["cli"], cli()
    yield PAGES["schema"], attnsweep.schema()
    runs = [card.book.run(name) for card in known["cards"] for name in card.tables]
    yield PAGES["numerics"], with_blocks("numerics", {"accuracy": shares_used(runs)})
    yield PAGES["model"], with_blocks("model", {"models": models(), "dispatch": judged()})
    yield PAGES["pytorch"], with_blocks("pytorch", {"faults": faults()})
    blocks = {"paged": paged_table(known["paged"], gpu), "steps": serving_table(book)}
    blocks["flashinfer"] = beside_flashinfer(book)
    yield PAGES["engine"], with_blocks("engine", blocks)
    yield from examples(known)


def renew(pages: Iterable[tuple[str, str]], root: Path, *, check: bool) -> list[str]:
    """Write the pages (path and text) that are stale, or only look. Returns their paths."""
    stale = []
    for name, text in pages:
        path = root / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if not check:
                path.write_text(text, encoding="utf-8")
    return stale


def main(arguments: Sequence[str]) -> int:
    """Write the stale pages, or only name them."""
    if set(arguments) - {"--check"}:
        print(__doc__)
        return 2
    gc.disable()  # rows hold no cycles, and looking for some takes a fifth of the time
    check = "--check" in arguments
    stale = renew(pages(Book(ROOT / RESULTS)), ROOT, check=check)
    if stale:
        print(("stale: " if check else "written: ") + ", ".join(stale))
    return 1 if stale and check else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
