"""What a call is: its shapes, layout, mask and options, as plain data."""

from __future__ import annotations

from typing import Any

_LARGEST_MASK = 1 << 26  # elements; a larger one is not looked at


def kind_of(
    torch: Any, seen: tuple[Any, ...], qkv: Any, mask: Any, kwargs: Any, quiet: bool
) -> dict[str, Any]:
    """The facts of a call, as plain data. quiet: do not read values of tensors.

    Shapes are (batch, heads, seqlen, head_dim). A head_dim that PyTorch padded to a multiple of 8
    is taken back from the scale.
    """
    q, k, v = qkv
    name, device, dropout, causal, grad, scale = seen[0], seen[7], *seen[9:]
    quiet = quiet or device == "meta"  # which holds no values
    kind: dict[str, Any] = {
        "op": name,
        "q": [int(size) for size in q.shape],
        "k": [int(size) for size in k.shape],
        "v": [int(size) for size in v.shape],
        "dtype": str(q.dtype).removeprefix("torch."),
        "device": device,
        "causal": bool(causal),
        "dropout": bool(dropout),
        "grad": bool(grad),
    }
    head_dim = kind["q"][-1]
    if scale is not None and scale > 0:
        own = round(scale**-2)
        if abs(own * scale**2 - 1) > 1e-6:
            kind["scale"] = True
        elif name.endswith("flash_attention") and head_dim - 8 < own < head_dim:
            kind["padded_from"] = own
        elif own != head_dim:
            kind["scale"] = True
    if q.dim() == 4:
        kind["layout"] = [layout_of(q.shape, q.stride()), layout_of(k.shape, k.stride())]
    if mask is not None:
        kind["mask"] = "unknown" if quiet else _mask_kind(torch, mask, q.shape[-2], k.shape[-2])
    if q.dim() == 4 and not quiet:
        repeats = _repeats(torch, k)
        if repeats > 1:
            kind["repeats"] = repeats
    return kind


def traced(q: Any) -> bool:
    """Whether a compiler traces the call, with tensors that hold no values: it does not run."""
    return type(q).__name__ in ("FakeTensor", "FunctionalTensor")


def traced_kind(name: str, q: Any, k: Any, v: Any) -> dict[str, Any]:
    """The facts of a call that a compiler takes apart. A size that varies is None."""
    shapes = {"q": q.shape, "k": k.shape, "v": v.shape}
    sizes = {
        of: [size if isinstance(size, int) else None for size in shape]
        for of, shape in shapes.items()
    }
    kind = {"op": name, **sizes, "dtype": str(q.dtype).removeprefix("torch.")}
    return kind | {"device": q.device.type, "traced": True}


def nested_kind(name: str, q: Any, k: Any, v: Any) -> dict[str, Any]:
    """The facts of a call on nested tensors, whose sequences have lengths of their own."""
    sizes = {of: [None] * t.dim() for of, t in (("q", q), ("k", k), ("v", v))}
    kind = {"op": name, **sizes, "dtype": str(q.dtype).removeprefix("torch.")}
    return kind | {"device": q.device.type, "nested": True}


def layout_of(shape: Any, stride: Any) -> str:
    """How a (batch, heads, seqlen, head_dim) tensor lies in memory.

    bhsd or bshd if it is whole in that order; `packed` if it is a part of rows of (seqlen, …), as
    a slice of one q, k, v tensor is; otherwise `strided`.
    """
    _, heads, seqlen, head_dim = shape

    def lies(order: tuple[int, ...], row: int | None = None) -> bool:
        step = 1
        for axis in reversed(order):
            if shape[axis] != 1 and stride[axis] != step:
                return False
            step *= shape[axis]
            if row is not None and axis == 1:
                step = row
        return True

    if lies((0, 1, 2, 3)):
        return "bhsd"
    if lies((0, 2, 1, 3)):
        return "bshd"
    if seqlen > 1 and stride[2] > heads * head_dim and lies((0, 2, 1, 3), stride[2]):
        return "packed"
    return "strided"


def _mask_kind(torch: Any, mask: Any, rows: int, keys: int) -> str:
    """`full` if it masks nothing, `causal` if it is the causal mask, aligned bottom-right."""
    if mask.numel() > _LARGEST_MASK:
        return "unknown"
    with torch.no_grad():
        sees = mask if mask.dtype == torch.bool else mask == 0
        if mask.dtype != torch.bool and not bool((sees | (mask <= -1e4)).all()):
            return "bias"
        if bool(sees.all()):
            return "full"
        lower = torch.ones(rows, keys, dtype=torch.bool, device=mask.device).tril(keys - rows)
        return "causal" if bool((sees == lower).all()) else "mask"


def _repeats(torch: Any, k: Any) -> int:
    """How often each key head stands in k; 1 if they all differ. A few rows are compared."""
    heads, seqlen = k.shape[1], k.shape[2]
    if heads < 2 or not k.numel():
        return 1
    with torch.no_grad():
        few = k.detach()[:, :, :: max(1, seqlen // 4)]
        if bool((few == few.reshape(-1)[0]).all()):
            return 1  # all the same, as before any training
        for times in range(heads, 1, -1):
            if heads % times == 0:
                groups = few.unflatten(1, (heads // times, times))
                if bool((groups == groups[:, :, :1]).all()):
                    return times
    return 1
