"""SAEs held against the places that use them: files, widths, features, the place they were trained at, digests."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from vtaps.spec.diagnostics import Diagnostic
from vtaps.spec.document import Document, NodePath
from vtaps.spec.locations import locate
from vtaps.spec.plan import EditPlan, ReadPlan, SaePlan
from vtaps.spec.saes import Sae, alias_of, files_of, folder_at, key_of, open_sae
from vtaps.spec.spec import Spec
from vtaps.spec.tensor_files import VectorError, file_digest
from vtaps.spec.tree import ModelTree, Site

CODES = {"sae": "VT335", "feature": "VT336", "nonfinite": "VT308"}


@dataclass(frozen=True)
class _Use:
    """One SAE at one site; ``texts``: how the spec spells the locations; ``to``: a feature is set to a value beside the
    others; ``whole``: the row becomes what all of them say; ``features``: those that are named, with where."""

    sae: str
    site: Site
    texts: tuple[str, ...]
    where: NodePath
    to: bool = False
    whole: bool = False
    features: tuple[tuple[int, NodePath], ...] = ()
    top: int | None = None
    reads: bool = False

    @property
    def read(self) -> tuple[int, ...] | None:
        """The features that a read asks for, None for the most active."""
        return tuple(index for index, _ in self.features) or None


def check_saes(
    spec: Spec, edits: Mapping[str, EditPlan], reads: Mapping[str, ReadPlan], tree: ModelTree, doc: Document,
    found: list[Diagnostic],
) -> tuple[dict[str, str], tuple[SaePlan, ...]]:  # fmt: skip
    """VT335 to VT338, VT301 and VT308; returns file → digest of the SAEs that are used, and what they are."""
    digests: dict[str, str] = {}
    opened: dict[str, Sae | None] = {}
    told: set[tuple[str, str, str]] = set()
    plans: dict[tuple[str, str], set[tuple[int, ...] | None]] = {}
    wholes: set[str] = set()

    def tell(use: _Use, code: str, message: str, where: NodePath, **more: str | tuple[str, ...] | None) -> None:
        if (key := (use.sae, code, str(where))) not in told:
            told.add(key)
            found.append(Diagnostic(code, f"SAE {use.sae!r}: {message}", doc.at(*where), **more))  # type: ignore[arg-type]

    for use in _uses(spec, edits, reads):
        if use.sae not in spec.saes:
            continue
        defined = spec.saes[use.sae]
        if "{layer}" in defined.path and any(t.startswith("resid_pre") for t in use.texts):
            message = f"{{layer}} at resid_pre[i] could be i or i−1, since resid_pre[i] is {use.site.name}"
            tell(use, "VT335", message + ": write resid_post", use.where)
            continue
        try:
            folder = folder_at(defined.path, use.site.layer)
        except VectorError as error:
            tell(use, "VT335", f"{error.message} ({use.site.name})", use.where)
            continue
        if folder not in opened:
            opened[folder] = None
            try:
                opened[folder] = open_sae(doc.folder, folder)
                digests |= {name: file_digest(doc.folder / name) for name in files_of(folder)}
            except VectorError as error:
                tell(use, "VT335", error.message, (*defined.where, key_of(defined.path)))
        if (sae := opened[folder]) is not None:
            _check(use, sae, tree, doc, tell)
            plans.setdefault((use.sae, folder), set()).update([use.read] if use.reads else [])
            wholes |= {folder} if use.whole else set()
    return digests, tuple(_planned(plans, wholes, opened))


def _planned(
    held: Mapping[tuple[str, str], set[tuple[int, ...] | None]], wholes: Collection[str],
    opened: Mapping[str, Sae | None],
) -> Iterator[SaePlan]:  # fmt: skip
    """``wholes``: the folders of those that an edit puts in a row's place."""
    for (name, folder), reads in sorted(held.items(), key=lambda one: one[0]):
        if (sae := opened[folder]) is not None:
            size = sum(sae.held(ids)[1] for ids in reads if ids is not None or folder not in wholes)
            size += sae.whole if folder in wholes else 0
            yield SaePlan(name, folder, sae.architecture, sae.d_in, sae.d_sae, size)


def _uses(spec: Spec, edits: Mapping[str, EditPlan], reads: Mapping[str, ReadPlan]) -> Iterator[_Use]:
    """Edits and reads; decoder rows as vectors are :mod:`vtaps.spec.vector_use`'s, but for their files."""
    swept: dict[str, list[tuple[int, NodePath]]] = {}
    for arm in spec.arms.values():
        for axis in (axis for factor in arm.sweep for axis in factor):
            target, _, field = axis.path.partition(".")
            if field == "feature.index":
                values = ((v, (*axis.where, i)) for i, v in enumerate(axis.values or ()) if type(v) is int)
                swept.setdefault(target, []).extend(values)
    for name, plan in edits.items():
        if (said := plan.edit.feature) is None:
            continue
        at = (*plan.edit.where, "feature")
        whole = said.error == "drop"
        to = said.does == "to" and not whole
        features = ((said.index, (*at, "index")), *swept.get(name, ()))
        for site in plan.sites:
            yield _Use(said.sae, site, spec.texts(plan.edit.at), (*at, "sae"), to, whole, features)
    listed = {name for arm in spec.arms.values() for name in arm.reads}
    for name, read in reads.items():
        if read.read.sae is None:
            continue
        at = (*read.read.where, "features")
        ids = tuple((i, (*at, "ids", n)) for n, i in enumerate(read.read.ids or ()) if isinstance(i, int))
        for site in read.sites:
            yield _Use(
                read.read.sae, site, spec.texts(read.read.at), (*at, "sae"), features=ids, top=read.read.top,
                reads=name in listed,
            )  # fmt: skip
    yield from _decoders(spec, edits, reads)


def _decoders(spec: Spec, edits: Mapping[str, EditPlan], reads: Mapping[str, ReadPlan]) -> Iterator[_Use]:
    """Where vectors of decoders are used, whatever the use."""
    of = {name: v for name, v in spec.vectors.items() if v.sae is not None and v.feature is not None}
    if not of:
        return
    named: dict[str, set[str | None]] = {
        n: {*p.edit.vectors, *p.edit.matrices, p.edit.vector} for n, p in edits.items()
    }
    for arm in spec.arms.values():
        for axis in (axis for factor in arm.sweep for axis in factor):
            target, _, field = axis.path.partition(".")
            if field.endswith(".vector") and target in named:
                named[target] |= {str(v) for v in axis.values or ()}
    places = [(named[n], p.sites, p.edit.at) for n, p in edits.items()]
    places += [({*p.read.vectors}, p.sites, p.read.at) for p in reads.values()]
    for used, sites, at in places:
        for vector in (v for name, v in of.items() if name in used):
            assert vector.sae is not None and vector.feature is not None
            feature = (vector.feature, (*vector.where, "feature"))
            for site in sites:
                yield _Use(vector.sae, site, spec.texts(at), (*vector.where, "sae"), features=(feature,))


def _check(use: _Use, sae: Sae, tree: ModelTree, doc: Document, tell: object) -> None:
    assert callable(tell)
    site = use.site
    if site.width != sae.d_in:
        wide = "is of unknown width" if site.width is None else f"is {site.width}"
        tell(use, "VT301", f"{sae.folder} is {sae.d_in} wide, and {site.name} {wide}", use.where)
        return
    for index, where in use.features:
        try:
            sae.feature(index)
        except VectorError as error:
            valid = (f"0 … {sae.d_sae - 1}",) if error.kind == "feature" else ()
            tell(use, CODES.get(error.kind, "VT335"), error.message, where, valid=valid)
    if use.top is not None and use.top > sae.d_sae:
        message = f"{sae.folder} has {sae.d_sae} features, fewer than {use.top}"
        tell(use, "VT336", message, (*use.where[:-1], "top"))
    if use.to and sae.architecture == "topk":
        why = f"{sae.folder} is a topk SAE, where an activation depends on all features"
        tell(use, "VT338", why, use.where, note=WHOLE)
    if sae.hook is not None and (alias := alias_of(sae.hook)) is not None:
        meant, _ = locate(tree, alias, doc.at(*use.where))
        if site.name not in {s.name for s in meant}:
            near = meant[0].name if meant else None
            message = f"{sae.folder} was trained at {sae.hook}, and {site.name} is another place"
            tell(use, "VT337", message, use.where, nearest=near)


WHOLE = "`by` goes at any SAE; `to` at standard, jumprelu and gated ones, and with `error: drop` at any"
