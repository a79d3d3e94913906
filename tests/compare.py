"""Comparison of what ranks have sent: nested containers of tensors and plain values."""

from __future__ import annotations

import math
from typing import Any

import torch


def difference(a: Any, b: Any, where: str = "", close: bool = False) -> str | None:
    """Says where two pictures differ first; ``None`` if they are the same.

    Arguments:
        close: numbers may differ by rounding; otherwise they must be the same to the bit.
    """
    if type(a) is not type(b):
        return f"{where}: {type(a).__name__} and {type(b).__name__}"
    if isinstance(a, torch.Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{where}: {a.dtype}{list(a.shape)} and {b.dtype}{list(b.shape)}"
        if a.is_sparse:
            a, b = a.coalesce().to_dense(), b.coalesce().to_dense()
        if close and a.is_floating_point():
            if torch.allclose(a, b, rtol=1e-5, atol=1e-7, equal_nan=True):
                return None
        elif torch.equal(a, b) or (a.is_floating_point() and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())):
            return None
        largest = (a.double() - b.double()).abs().max().item() if a.numel() else 0.0
        return f"{where}: tensors differ by up to {largest:.3g}"
    if isinstance(a, dict):
        if list(a) != list(b) and set(a) != set(b):
            return f"{where}: keys {sorted(map(str, set(a) ^ set(b)))} are on one side only"
        parts = [(f"{where}[{key!r}]", a[key], b[key]) for key in a]
    elif isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return f"{where}: lengths {len(a)} and {len(b)}"
        parts = [(f"{where}[{i}]", x, y) for i, (x, y) in enumerate(zip(a, b))]
    elif isinstance(a, float) and (close and math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-7) or a != a and b != b):
        return None
    else:
        return None if a == b else f"{where}: {a!r} and {b!r}"
    for place, x, y in parts:
        found = difference(x, y, place, close)
        if found is not None:
            return found
    return None
