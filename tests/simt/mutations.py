"""The seeded bugs of mutations.toml, and how one is put into a template."""

import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

from attnsweep.core.cases import Case
from attnsweep.core.ops import BACKWARD
from attnsweep.core.problem import Problem

MUTATIONS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("mutations.toml").read_text())
CASES = {
    "grouped": Case(Problem(2, 4, 2, 97, 161, 64)),
    "causal": Case(Problem(1, 2, 1, 97, 161, 64, causal=True)),
    "wide": Case(Problem(1, 2, 1, 97, 161, 128)),
    "five tiles": Case(Problem(1, 1, 1, 65, 600, 64)),
    "one short of a tile": Case(Problem(1, 1, 1, 64, 126, 64, causal=True)),
    "fp32": Case(Problem(1, 2, 1, 17, 70, 516, "fp32", causal=True)),
    "fp32, causal": Case(Problem(2, 4, 2, 97, 161, 64, "fp32", causal=True)),
    "fp32, one short of a tile": Case(Problem(1, 1, 1, 64, 126, 64, "fp32", causal=True)),
    "fp32, keys grow": Case(Problem(1, 2, 1, 97, 400, 64, "fp32"), "large_scores"),
    "fp32, head_dim 88": Case(Problem(2, 4, 2, 97, 161, 88, "fp32")),
    "fp32, head_dim 216": Case(Problem(1, 2, 1, 65, 100, 216, "fp32", causal=True)),
    "large scores": Case(Problem(1, 1, 1, 129, 129, 64), "large_scores"),
    "keys grow": Case(Problem(1, 2, 1, 97, 400, 64), "large_scores"),
    "18 tiles": Case(Problem(1, 1, 1, 65, 1100, 64)),
    "five tiles in full": Case(Problem(1, 1, 1, 290, 600, 64)),
    "rows end in a tile": Case(Problem(1, 2, 1, 200, 333, 64, causal=True)),
    "causal, 300 rows": Case(Problem(1, 1, 1, 300, 500, 64, causal=True)),
    "heads in groups": Case(Problem(1, 5, 5, 150, 200, 64, causal=True)),
    "packed heads": Case(Problem(2, 12, 2, 5, 131, 64, causal=True)),
    "fp8": Case(Problem(2, 4, 2, 97, 161, 64, "e4m3")),
    "fp8, 300 rows": Case(Problem(1, 1, 1, 300, 500, 64, "e4m3", causal=True)),
    "fp8, equal keys": Case(Problem(1, 2, 1, 97, 333, 128, "e4m3", causal=True), "equal_keys"),
    "fp8, keys grow": Case(Problem(1, 2, 1, 97, 600, 64, "e4m3"), "large_scores"),
    "fp8, keys below 0": Case(Problem(1, 2, 1, 130, 200, 64, "e4m3", causal=True), "far_below"),
    "fp8, head_dim 256": Case(Problem(1, 2, 1, 65, 200, 256, "e4m3")),
    "fp8, blocks": Case(Problem(1, 4, 2, 65, 600, 64, "e4m3_block")),
    "one tile of keys": Case(Problem(1, 4, 2, 100, 60, 64)),
    "head_dim 72": Case(Problem(2, 4, 2, 97, 161, 72)),
    "head_dims 192 and 128": Case(Problem.parse("(2,4/2,97x161,192/128) fp16 full")),
    "head_dims 64 and 128": Case(Problem.parse("(2,4/2,97x161,64/128) fp16 full")),
    "softcap, large scores": Case(Problem.parse("(1,2,97x161,64) fp16 full softcap(2)")),
    "sinks": Case(Problem.parse("(2,4/2,97x161,64) fp16 full sinks")),
    "bias": Case(Problem.parse("(2,4/2,97x400,64) fp16 full bias(item,head)")),
    "finite masks": Case(Problem.parse("(3,2/1,97x333,64) bf16 full bias(item)"), "finite_mask"),
    "NaN behind the keys": Case(Problem.parse("(3,2/1,97x321,64) bf16 full padded(right,10)"), "nan_padding"),
    "NaN before the keys": Case(Problem.parse("(3,2/1,97x321,64) bf16 causal padded(left,10)"), "nan_padding"),
    "NaN behind a mask's keys": Case(Problem.parse("(3,2/1,97x321,64) bf16 boolean(padding,11)"), "nan_padding"),
    "NaN behind a query's keys": Case(Problem.parse("(3,4/2,1x321,64) bf16 boolean(padding,11)"), "nan_padding"),
    "gradients, NaN behind the keys": Case(
        replace(Problem.parse("(3,2/1,97x321,64) bf16 causal padded(right,10)"), op=BACKWARD), "nan_padding"
    ),
    "blocks": Case(Problem.parse("(1,2,200x700,64) fp16 boolean(blocks,25)")),
    "holes": Case(Problem.parse("(2,2,97x333,64) fp16 boolean(holes,50)")),
    "documents": Case(Problem.parse("(1,2,200x333,64) fp16 boolean(documents,3)")),
    "long holes": Case(Problem.parse("(1,1,70x1101,64) fp16 boolean(holes,50)")),
    "many tiles": Case(Problem.parse("(1,1,2200x80,64) fp16 boolean(documents,3)")),
    "many items": Case(Problem.parse("(1100,1,1x200,64) fp16 boolean(padding,30)")),
    "long documents": Case(Problem.parse("(1,1,200x2700,64) fp16 boolean(documents,2)")),
    "causal as a tensor": Case(Problem.parse("(1,2,200x336,64) fp16 boolean(causal)")),
    "causal as a tensor, 209 rows": Case(Problem.parse("(1,2,209x368,64) fp16 boolean(causal)")),
    "packed sequences": Case(Problem.parse("(1,2,300,64) fp16 full packed(4)")),
    "packed, window": Case(Problem.parse("(1,2,420,64) fp16 window(63,0) packed(3,10)")),
    "pages": Case(Problem.parse("(4,8/2,2x200,64) bf16 causal paged(16,1x200+1x65+1x17+1x100)")),
    "pages, all keys": Case(Problem.parse("(4,8/2,1x200,64) bf16 full paged(64,1x200+1x65+1x17+1x100)")),
    "pages, fp8": Case(Problem.parse("(4,8/2,1x200,64) bf16 causal paged(16,e4m3,1x200+1x65+1x17+1x100)")),
    "pages, window": Case(Problem.parse("(4,8/2,9x200,64) fp16 window(40,0) paged(16,1x200+1x65+1x17+1x100)")),
    "appended": Case(Problem.parse("(4,8/2,40x200,64) bf16 causal paged(16,1x200+1x65+1x17+1x100)")),
    "appended, fp8": Case(Problem.parse("(4,8/2,40x200,64) bf16 causal paged(16,e4m3,1x200+1x65+1x17+1x100)")),
    "appended, page 1": Case(Problem.parse("(4,8/2,40x200,64) bf16 causal paged(1,1x200+1x65+1x17+1x100)")),
    "appended, parts": Case(Problem.parse("(2,8/2,8x1000,64) bf16 causal paged(16,1x1000+1x300)")),
    "appended, four parts": Case(Problem.parse("(3,16/2,30x2600,64) bf16 causal paged(16,2x2600+1x30)")),
    "appended, many requests": Case(Problem.parse("(40,2/1,3x40,64) bf16 causal paged(8,40x40)")),
    "appended, window": Case(Problem.parse("(4,10/2,40x300,64) fp16 window(70,0) paged(64,1x300+1x65+1x17+1x200)")),
    "many pages": Case(Problem.parse("(2,2/1,1x4400,64) fp16 full paged(16,1x4400+1x70)")),
    "head_dim 512, five tiles": Case(Problem(1, 3, 1, 70, 600, 512)),
    "head_dim 512, causal": Case(Problem(1, 2, 1, 150, 300, 512, causal=True)),
    "head_dim 512, keys grow": Case(Problem(1, 2, 1, 70, 400, 512), "large_scores"),
    "head_dim 328, NaN behind the keys": Case(
        Problem.parse("(3,2/1,70x321,328) bf16 full padded(right,10)"), "nan_padding"
    ),
    "latent": Case(Problem.parse("(3,20/1,2x300,576/512) bf16 causal paged(64,1x300+1x65+1x1) value_in_key")),
    "over 16 units": Case(Problem(1, 1, 1, 17, 4000, 64), "large_scores"),
}


WORD, OPEN = re.compile(r"…|\w+|[^\w\s]"), r"(?:\s|//[^\n]*\n|#pragma unroll[^\n]*\n)*"


def pattern(tokens: str) -> re.Pattern[str]:
    """Matches these tokens, with blanks, comments and pragmas of unrolling between them."""
    parts = ["(.*?)" if word == "…" else re.escape(word) for word in WORD.findall(tokens)]
    return re.compile(OPEN.join(parts), re.DOTALL)


def mutated(texts: dict[str, str], bug: dict[str, Any]) -> dict[str, str]:
    """The sources with the bug, each part of which fits in one place."""
    for part in (bug, *bug.get("also", ())):
        texts = _with_part(texts, part)
    return texts


def _with_part(texts: dict[str, str], part: dict[str, str]) -> dict[str, str]:
    places = []
    for name, text in texts.items():
        begin = 0
        if "after" in part:
            start = pattern(part["after"]).search(text)
            if start is None:
                continue
            begin = start.end()
        places += [(name, match) for match in pattern(part["find"]).finditer(text, begin)]
    assert len(places) == 1, f"{part['find']!r} is found {len(places)} times"
    ((name, match),) = places
    kept = iter(match.groups())
    put = re.sub("…", lambda _: next(kept), part["put"])
    text = texts[name]
    return texts | {name: text[: match.start()] + put + text[match.end() :]}
