"""Which known name a word was probably meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# Other names of dtypes, PyTorch's among them. By its letters, bfloat16 is next to fp16.
_DTYPES = {
    **dict.fromkeys(("float16", "half", "f16", "16"), "fp16"),
    **dict.fromkeys(("bfloat16", "bfloat", "bp16"), "bf16"),
    **dict.fromkeys(("float32", "float", "single", "f32", "tf32", "32"), "fp32"),
    **dict.fromkeys(("fp8", "float8", "f8", "e4m3fn", "float8_e4m3fn", "float8_e4m3"), "e4m3"),
}


def closest(word: str, names: Iterable[str]) -> str | None:
    """The name that is most like a word, whatever the case of its letters; None if none is."""
    folded = {name.lower(): name for name in names}
    plain = word.lower()
    meant = _DTYPES.get(plain.removeprefix("torch."))
    if meant in folded:
        return folded[meant]
    close = difflib.get_close_matches(plain, folded, n=1)
    return folded[close[0]] if close else None
