"""The memory that `put` takes rows from: filled by the driver between steps, at addresses that never move."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from safetensors.numpy import load
from torch import Tensor

from vtaps.runtime.program import LockError, Program, SiteEntry


@dataclass(frozen=True)
class PatchMemory:
    """The rows of one edit.  ``groups``: sites whose rows are equally wide, and their memory ``[slots, sites, width]``
    in the model's dtype."""

    groups: Sequence[tuple[tuple[str, ...], Tensor]]
    sites: Mapping[str, SiteEntry]

    @classmethod
    def of(cls, program: Program, name: str, dtype: torch.dtype, device: torch.device) -> PatchMemory:
        edit = program.edits[name]
        by_width: dict[int, list[str]] = {}
        for site in edit.sites:
            by_width.setdefault(program.sites[site].width, []).append(site)
        return cls(
            [
                (tuple(sites), torch.zeros((edit.slots, len(sites), width), dtype=dtype, device=device))
                for width, sites in by_width.items()
            ],
            program.sites,
        )

    def place(self, site: str) -> tuple[Tensor, int]:
        """The memory that holds a site, and which of its sites it is."""
        for sites, memory in self.groups:
            if site in sites:
                return memory, sites.index(site)
        raise KeyError(site)

    def write(self, name: str, first: int, payload: bytes) -> None:
        """Fill the slots ``first …``; ``payload``: safetensors, site → ``[rows, width]`` in the model's dtype, bfloat16
        as its bits in uint16.

        Raises LockError for rows that do not fit the memory.
        """
        rows = load(payload)
        for sites, memory in self.groups:
            for number, site in enumerate(sites):
                if site not in rows:
                    raise LockError(f"edits.{name}", f"no rows came for {site}")
                found = torch.from_numpy(self.sites[site].own(rows[site]).copy())
                if memory.dtype == torch.bfloat16 and found.dtype == torch.uint16:
                    found = found.view(torch.bfloat16)
                room = memory[first : first + len(found), number]
                if found.dtype != memory.dtype or found.shape != room.shape:
                    told = f"{found.dtype} {list(found.shape)} at {site}, slot {first}"
                    raise LockError(
                        f"edits.{name}", f"{told}, where the memory holds {memory.dtype} {list(room.shape)}"
                    )
                room.copy_(found)


def memories(program: Program, dtype: torch.dtype, device: torch.device) -> Mapping[str, PatchMemory]:
    """The memory of every edit that puts."""
    return {
        name: PatchMemory.of(program, name, dtype, device) for name, edit in program.edits.items() if edit.verb == "put"
    }
