"""Functions of ``python.yaml``."""

import torch


def keep_norm(rows: torch.Tensor) -> torch.Tensor:
    """Zero the largest column of each row, and keep the row's length."""
    largest = rows.abs().argmax(-1, keepdim=True)
    changed = rows.scatter(-1, largest, 0.0)
    return changed * rows.norm(dim=-1, keepdim=True) / changed.norm(dim=-1, keepdim=True)
