"""What holds at ``logits`` and ``samples`` alone: rows that are sampled, token ids as columns, bans."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from vtaps.spec.behind import LOGITS, SAMPLES
from vtaps.spec.diagnostics import Diagnostic
from vtaps.spec.document import Document
from vtaps.spec.plan import ArmPlan, EditPlan
from vtaps.spec.rows import Interval, Rows, intersect, merge
from vtaps.spec.spec import Edit, Read
from vtaps.spec.tree import Site

SAMPLED_ROWS = ("sampling", "generated", "{steps: […]}")


def sampled_only(rows: Rows) -> bool:
    """Whether all rows that it can select are rows whose output is sampled."""
    return rows.word in ("sampling", "generated") or rows.steps is not None or rows.after is not None


def check_rows(acting: Edit | Read, sites: Sequence[Site], doc: Document) -> list[Diagnostic]:
    """VT310 where a location behind the forward is asked for rows that it does not have."""
    name = next((s.name for s in sites if s.sampled), None)
    if name is None or sampled_only(acting.tokens):
        return []
    message = f"`{name}` exists at rows that are sampled"
    return [Diagnostic("VT310", message, doc.at(*acting.where, "tokens"), SAMPLED_ROWS)]


def check_edit(edit: Edit, sites: Sequence[Site], doc: Document) -> list[Diagnostic]:
    """VT340 for token ids, and VT341 for a ban, at a location where columns are no tokens."""
    at = (*edit.where, edit.verb)
    other = next((s.name for s in sites if s.name != LOGITS), None)
    found = []
    if edit.ids is not None and other is not None:
        message = f"`ids` are columns of `{LOGITS}`; those of {other} are no tokens"
        found.append(Diagnostic("VT340", message, doc.at(*at, "ids"), note="`dims` narrows any location"))
    elif edit.ids is not None and edit.dims is not None:
        message = f"{edit.verb} is narrowed by `ids` and by `dims`; at `{LOGITS}` they are the same"
        found.append(Diagnostic("VT340", message, doc.at(*at, "dims"), note="say one of them"))
    if bans(edit) and other is not None:
        message = f"-inf bans tokens at `{LOGITS}`; at {other} it would make the model's output NaN"
        found.append(Diagnostic("VT341", message, doc.at(*at, "value")))
    return found


def check_read(read: Read, sites: Sequence[Site], doc: Document) -> list[Diagnostic]:
    """VT342 where more is asked of the sampled tokens than their ids."""
    if all(s.name != SAMPLES for s in sites):
        return []
    if len(sites) > 1:
        what = f"`{SAMPLES}` holds token ids and is read alone; {read.name!r} has other locations too"
    elif read.kind != "rows":
        what = f"`{SAMPLES}` holds token ids: there is nothing to take of them but the ids themselves"
    else:
        return []
    return [Diagnostic("VT342", what, doc.at(*read.where, "at"))]


def bans(edit: Edit) -> bool:
    return edit.coefficient == -math.inf


def check_bans(
    edits: Mapping[str, EditPlan], arms: Mapping[str, ArmPlan], doc: Document, found: list[Diagnostic]
) -> None:
    """VT343 where a banned token could be sampled after all: no other is left, or a later edit of the arm makes its
    logit another number.  One finding an edit."""
    told: set[str] = set()
    for arm in arms.values():
        banned: list[Interval] = []
        by: dict[Rows, list[Interval]] = {}
        for name in arm.arm.edits:
            plan = edits.get(name)
            if plan is None or plan.sites[0].name != LOGITS or name in told:
                continue
            edit, width = plan.edit, plan.sites[0].width or 0
            columns = merge(plan.columns if plan.columns is not None else [(0, width)])
            if bans(edit):
                banned = merge([*banned, *columns])
                same = by[edit.tokens] = merge([*by.get(edit.tokens, []), *columns])
                if same == [(0, width)]:
                    told.add(name)
                    message = f"arm {arm.arm.name!r} bans every token of the vocabulary"
                    found.append(Diagnostic("VT343", message, doc.at(*edit.where, edit.verb)))
            elif intersect(columns, banned) and not _keeps_bans(plan, arm):
                told.add(name)
                message = f"{edit.verb} of {name!r} acts on tokens that arm {arm.arm.name!r} has banned before it"
                note = "after a ban: `add` without `keep_norm`, and `scale` by more than 0; or list the ban last"
                found.append(Diagnostic("VT343", message, doc.at(*edit.where, edit.verb), note=note))


def _keeps_bans(plan: EditPlan, arm: ArmPlan) -> bool:
    """Whether −inf stays −inf under an edit, at every sweep point of the arm."""
    edit = plan.edit
    if edit.verb == "scale":
        used = [e.coefficient for point in arm.points for e in point.edits if e.edit == edit.name]
        return all(by is not None and by > 0 for by in used)
    return edit.verb == "python" or (edit.verb == "add" and not edit.keep_norm)
