"""Changes at random of what users have on disk: specs, and files of recorded runs.

`rng` is a random.Random, or Hypothesis's own, which finds the smallest change.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Sequence
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

import yaml

# Each stands in a spec as it is: what YAML reads as another type, what it cannot read, sizes without end.
SCALARS = (
    r"""
null | ~ | true | False | no | on | yes | 0 | -0 | -1 | 1 | 2 | 3 | 7 | 16 | 64 | 2147483647 | 2147483648
9223372036854775808 | -9223372036854775809 | 1_000 | 0x10 | 0o17 | 010 | 1:30 | +5 | 1e3 | 1e400 | -1e400 | 1.0 | 0.1
-0.5 | 1e-320 | .5 | 5. | .inf | -.inf | .nan | NaN | 2001-01-01 | sms | 2% | 101% | '' | "" | " " | 'a b' | é | ü٣
'١٦' | "\0" | "\ud83d" | "\U0001F600" | "𝟙𝟞" | <<: *a | *x | &a | &x 3 | !!str | !!python/none | !x | = | - | ? | : | >
% | @ | ` | [] | {} | [[]] | [{}] | {a:} | {a: 1} | [1,2] | [64,[128]] | [null] | [null,null] | [right,40] | [8,40]
[16,hnd,'32x128'] | [blocks,30] | [holes,101] | [16,'1x1+2x99999999999'] | '3 GiB' | '2 TiB' | '1e9 B' | fp16 | float16
forward | replay | gp | energy | all | none | sm_90a | sm_1 | '>= 3' | '== nan' | '<=' | naive | flash_fwd_wgmma
a.py:f | a.py:f?layout=bshd | ../x | /dev/null | {x: a.py:f} | torch_flash
""".strip()
    .replace("\n", " | ")
    .split(" | ")
)
SCALARS += ["9" * 30, "-" + "9" * 400, "9" * 5000, "'" + "9" * 5000 + " GiB'", "x" * 70_000, "0." + "1" * 5000]
SCALARS += ["[" * 300 + "]" * 300, "[" * 3000, str([*range(2000)]), f"{{{', '.join(f'k{i}: 1' for i in range(300))}}}"]
SCALARS += [f"{{{', '.join(f'a{n}: {{x: {{}}, y: {{}}, z: {{}}}}' for n in range(40))}}}"]  # variants without end
LETTERS = [*"\t\r\n\0\ufeff\x85\u2028\u200b\x1b é\"':,[]{}#&*!|>%-0e_.", "\r\n", "\n---\n", "\n...\n", "- ", "<<: *a, "]
# Values that may be right, by key; `any` of parameters.
_RIGHT = """
batch | 1 | 2 | 3 | 64 | 4096 | 2147483647 | [1,7]
heads | 1 | 2 | 3 | 8 | 64 | 12 | 2147483647 | [1,32]
heads_kv | 1 | 2 | 4 | 2147483647 | [1,2]
seqlen | 1 | 7 | 64 | 1000 | 65536 | 2147483647 | [1,64] | 10000000
seqlen_q | 1 | 2 | 33 | 4096 | 2147483647
seqlen_k | 1 | 2 | 77 | 4096 | 1048576 | 2147483647
head_dim | 1 | 16 | 40 | 64 | 72 | 128 | 192 | 256 | 512 | 576 | [64,128]
head_dim_v | 1 | 64 | 128 | 512 | 256 | null
value_in_key | true | false | [true,false]
dtype | fp16 | bf16 | fp32 | e4m3 | e4m3_tensor | e4m3_block | [fp16,bf16]
causal | true | false | [false,true]
window | [128,0] | [null,0] | [0,2147483647] | [1,1] | null | [[3,4],null] | [2147483647,2147483647]
top_left | true | false
padding | [right,40] | [left,0,7] | [right,100] | [right,1,99999999999] | null | [left,0]
packed | [8,40] | [2147483647,1] | [1,100] | [3,0,99999999999999999999] | [4096,7] | null
paged | [16] | [16,hnd,'2x64+1x4k'] | [2147483647] | [1,'1x1'] | [64,nhd,'4096x1'] | [128,'2147483647x1'] | [256,0]
cache_dtype | e4m3 | null | [null,e4m3]
boolean | [] | [item] | [item,head] | [blocks,30] | [documents,4] | [documents,2147483647] | [padding,40,1] | null
scale | 1.0 | 0.125 | 1e-300 | 1e300 | 1e-45 | null | 0.08838834764831843 | 3
softcap | 50 | 1e-30 | 1e300 | 30.0 | null
sinks | true | false
bias | [item] | [] | [item,head] | null
op | forward | backward | [forward,backward]
slower | 2% | 0.02 | 0.0001 | 100% | 1
calls | 1 | 9223372036854775807
kernels | {naive: {}} | {flash_fwd_wgmma: {}, flash_fwd_mma: {}} | {a: {family: naive}, naive: {}} | null | []
search | {strategy: gp} | {strategy: random, candidates: 3} | {seed: 99999999999999999999999} | {budget_s: 2147483647}
measure | {rank_by: energy} | {timeout_s: 1e-300} | {timeout_s: 1e300, rounds: 1} | {replay_us: 2147483647, cold: false}
limits | {workspace_bytes: 0} | {workspace_bytes: 9999999999999999999 GiB} | {spill_bytes: 999999999999999999999}
require | {registers: '<= 128'} | {occupancy: '>= 1e400'} | {hgmma: 0}
check | {slower: 1%, budget_s: 1e300}
baselines | all | [] | torch_flash | [flex,unfused] | {mine: {call: 'a.py:f'}} | ['a.py:f']
candidates | ['a.py:f'] | {mine: {call: 'a.py:f', strict: true}} | []
unserved | [{call: '1,2,3', calls: 0, reason: none}]
arch | sm_90a | sm_80 | sm_90 | null
device | cuda | replay
name | a | no | 1_0 | - | 0x10
any | 0 | 1 | 2 | 3 | 4 | 8 | 16 | 32 | 64 | 128 | 256 | [1,2] | [0,1] | [64,128,256] | sms | true | false | null
"""
RIGHT = {key: values for key, *values in (line.split(" | ") for line in _RIGHT.strip().splitlines())}
OF_PROBLEMS = [*RIGHT][: [*RIGHT].index("kernels")]


def _places(data: Any) -> list[tuple[Any, Any]]:
    """Each mapping or list in the data, with each of its keys or indices."""
    own = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [place for key, value in own for place in ((data, key), *_places(value))]


def of_spec(rng: Random, text: str) -> str:
    """The text of a spec with one to three things changed: values, keys, or letters."""
    data = yaml.safe_load(text)
    written: dict[str, str] = {}
    wild = rng.random() < 0.3

    def raw(snippet: str) -> str:
        name = f"RAW{len(written)}RAW"
        written[name] = snippet
        return name

    def value(key: object) -> str:
        return raw(rng.choice(SCALARS if wild or rng.random() < 0.1 else RIGHT.get(str(key), RIGHT["any"])))

    if rng.random() < 0.9:
        del data["problems"][rng.randint(1, 2) :]
    places, entries = _places(data), data["problems"]
    for into, key in rng.sample(places, min(len(places), rng.randint(1, 3))):
        if key not in into if isinstance(into, dict) else key >= len(into):
            continue  # an earlier change dropped it
        way = rng.randint(0, 9)
        if way == 0:
            del into[key]
        elif way == 1 and isinstance(into, list):
            into[key] = [into[key], value(key)]
        elif way == 1 and isinstance(into, dict):
            into[raw(rng.choice([str(key), rng.choice(SCALARS)]))] = into[key]
        elif way == 2 and wild:
            into[key] = rng.choice(places)[0]  # an alias, or a loop
        elif way < 7:
            names = [*RIGHT] if wild else OF_PROBLEMS
            into, name = (into if wild else rng.choice(entries or [{}])), rng.choice(names)
            if wild and rng.random() < 0.2:
                at = rng.randint(0, len(name))
                name = name[:at] + rng.choice(LETTERS) + name[at + 1 :]
            if isinstance(into, dict):
                into[name] = value(name)
        else:
            into[key] = value(key)
    flow = rng.choice([True, False, None])
    out = yaml.safe_dump(data, default_flow_style=flow, sort_keys=False, allow_unicode=True, width=10**6)
    for name, snippet in written.items():
        out = out.replace(name, snippet)
    for _ in range(rng.choice([0, 1, 2]) if wild else 0):
        at = rng.randint(0, len(out))
        out = out[:at] + rng.choice(LETTERS) + out[at + rng.randint(0, 2) :]
    if rng.random() < 0.05:
        out = out.replace("\n", "\r\n")
    return out


# -- recorded runs --

VALUES: list[Any] = [None, True, 0, -1, 1e300, 10**400, float("nan"), float("inf"), "", "x", [], {}, [None], {"a": 1}]
VALUES += ["é" * 300, -5e-324, [[]], "ok", "1e3", 0.5, ["a", 1], "2001-01-01"]
WHOLE = [b"", b"\0" * 100, b"[]", b"{}", b"null", b"[" * 5000, b"\xff\xfe", b"1", b'"x"', b"nan"]
OPEN = ("call", "conditions", "machine", "strict")
"""Facts of a row whose inner values reading leaves as they are; reports take them for what sweeps write."""


def of_run(rng: Random, directory: Path, others: Sequence[Path]) -> None:
    """Damage one or two files of a run. others: runs whose files may take their place."""
    for _ in range(rng.randint(1, 2)):
        every = [path for path in sorted(directory.rglob("*")) if path.is_file()]
        read = [path for path in every if path.name == "spec.yaml" or ".json" in path.name]
        if not read:
            return
        path = rng.choice(read if rng.random() < 0.7 else every)
        way, there = rng.randint(0, 9), path.read_bytes()
        if way == 0:
            path.unlink()
        elif way == 1:
            path.write_bytes(there[: rng.randint(0, len(there))])
        elif way == 2:
            path.write_bytes(rng.choice(WHOLE))
        elif way == 3:
            other = rng.choice(others) / path.relative_to(directory)
            path.write_bytes(other.read_bytes() if other.is_file() else b"")
        elif way == 4:
            path.unlink()
            path.mkdir()
        elif path.suffix == ".xz" and ".json" in path.name:
            with suppress(lzma.LZMAError, EOFError):
                path.write_bytes(lzma.compress(_of_rows(rng, lzma.decompress(there)), preset=0))
        elif ".jsonl" in path.name:
            path.write_bytes(_of_rows(rng, there))
        elif ".json" in path.name:
            path.write_bytes(_of_json(rng, there))
        elif path.name == "spec.yaml":
            # What another change left may be no spec any more.
            with suppress(yaml.YAMLError, TypeError, KeyError, ValueError, RecursionError):
                path.write_bytes(of_spec(rng, there.decode()).encode("utf-8", "replace"))


def _of_rows(rng: Random, text: bytes) -> bytes:
    lines = text.splitlines()
    for number in rng.sample(range(len(lines)), min(len(lines), rng.choice([1, 1, 5, 100]))):
        lines[number] = _of_json(rng, lines[number])
    if rng.random() < 0.2:
        lines.append(rng.choice([*lines[:1], b"", b"{", b"{}", b"[]"]))
    return b"\n".join(lines) + b"\n"


def _of_json(rng: Random, text: bytes) -> bytes:
    """JSON with one to three values changed, dropped or named anew."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return text
    for _ in range(rng.randint(1, 3)):
        closed = {k: v for k, v in data.items() if k not in OPEN} if isinstance(data, dict) else data
        places = [(data if into is closed else into, key) for into, key in _places(closed)]
        if not places:
            break
        into, key = rng.choice(places)
        way = rng.randint(0, 3)
        if way == 0:
            del into[key]
        elif way == 1 and isinstance(into, dict):
            into[rng.choice(["", "x", f"{key}_", "time_us", "key"])] = into[key]
        else:
            into[key] = deepcopy(rng.choice(VALUES))
    return json.dumps(data).encode()
