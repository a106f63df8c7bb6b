"""One side of ``vtaps diff``: a spec, a lock, or either of them in a revision of git."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import jsonschema

from vtaps.check import CheckResult, check_file
from vtaps.codegen.lock import names
from vtaps.compiling import compile_plan
from vtaps.schemas import load as schema
from vtaps.spec import digests
from vtaps.spec.diagnostics import Diagnostic, has_errors, nearest
from vtaps.spec.document import Document
from vtaps.spec.files import nearest_file, read_text
from vtaps.spec.plan import Plan
from vtaps.spec.yaml import load

LOCK = ".lock.json"


class SideError(Exception):
    """A side that is not there: one line, with the nearest name where there is one."""


@dataclass(frozen=True)
class Side:
    """``lock`` is None where ``findings`` say why.  ``block``: the source, None where a lock has none beside it.
    ``plan`` and ``doc``: None for a lock.  ``notes``: where its files came from."""

    label: str
    lock: dict[str, Any] | None
    block: str | None = None
    plan: Plan | None = None
    findings: tuple[Diagnostic, ...] = ()
    documents: dict[str, str] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    doc: Document | None = None


def side(text: str) -> Side:
    """What ``text`` names: a file that is there, else ``REV:path``.  Raises SideError."""
    path = Path(text)
    if not path.exists() and ":" in text:
        revision, _, inside = text.partition(":")
        return _of_revision(text, revision, inside)
    if not path.exists():
        close = nearest_file(path)
        hint = f"; nearest: {path.with_name(close)}" if close else ""
        raise SideError(f"{text}: no such file{hint}")
    if text.endswith(LOCK):
        lock = _lock(text, _read(path))
        beside = path.parent / _block_name(text, lock)
        source = _read(beside) if beside.is_file() else None
        return _of_lock(text, lock, source, beside.name)
    return _of_check(text, check_file(text))


def _read(path: Path) -> str:
    try:
        return read_text(path)
    except OSError as error:
        raise SideError(f"{path}: {error.strerror}") from None


def _of_check(label: str, result: CheckResult) -> Side:
    found = list(result.diagnostics)
    if result.plan is not None:
        compiled, wrong = compile_plan(result.plan)
        found += wrong
        if compiled is not None:
            return Side(label, compiled.lock, compiled.block.source, result.plan, doc=result.doc)
    errors = tuple(d for d in found if has_errors([d]))
    return Side(label, None, findings=errors, documents=result.documents)


def _lock(label: str, text: str) -> dict[str, Any]:
    try:
        lock = json.loads(text)
        jsonschema.validate(lock, schema("lock-v1.schema.json"))
    except (ValueError, RecursionError) as error:
        raise SideError(f"{label}: it is not JSON: {error}") from None
    except jsonschema.ValidationError as error:
        place = ".".join(map(str, error.absolute_path)) or "the whole file"
        raise SideError(f"{label}: it is not a lock of this version: {place}: {error.message[:200]}") from None
    return dict(lock)


def _block_name(label: str, lock: dict[str, Any]) -> str:
    return PurePosixPath(lock["block"].get("file") or names(label)[0]).name


def _of_lock(label: str, lock: dict[str, Any], source: str | None, block: str) -> Side:
    if source is None:
        return Side(label, lock, notes=(f"{label}: {block} is not beside it",))
    if digests.of_text(source) != lock["block"]["digest"]:
        return Side(label, lock, notes=(f"{label}: {block} beside it is of another compilation",))
    return Side(label, lock, source)


# In a revision of git


def _git(*args: str, at: Path | None = None) -> bytes | None:
    """What git prints; None where it fails.  Raises SideError where there is no git."""
    if shutil.which("git") is None:
        raise SideError("REV:path needs git, which is not installed")
    done = subprocess.run(["git", *args], cwd=at, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    return done.stdout if done.returncode == 0 else None


def _lines(output: bytes | None, split: str) -> list[str]:
    return [t for t in (output or b"").decode("utf-8", "replace").split(split) if t]


def _of_revision(label: str, revision: str, path: str) -> Side:
    top = _git("rev-parse", "--show-toplevel")
    if top is None:
        raise SideError(f"{label}: no such file, and this folder is in no git repository")
    root = Path(top.decode().rstrip("\n"))
    commit = None if revision.startswith("-") else _git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    if commit is None:
        refs = _lines(_git("for-each-ref", "--format=%(refname:short)"), "\n")
        close = nearest(revision, ["HEAD", *refs])
        raise SideError(f"{label}: git has no revision {revision!r}" + (f"; nearest: {close}" if close else ""))
    sha = commit.decode().strip()
    inside = _inside(path, root)
    files = _lines(_git("ls-tree", "-r", "--name-only", "-z", sha, at=root), "\0")
    if inside not in files:
        same = [f for f in files if PurePosixPath(f).name == PurePosixPath(inside).name]
        close = same[0] if len(same) == 1 else nearest(inside, files)
        raise SideError(f"{label}: {revision} has no file {inside!r}" + (f"; nearest: {close}" if close else ""))
    if path.endswith(LOCK):
        lock = _lock(label, _blob(label, sha, inside, root).decode("utf-8", "replace"))
        beside = str(PurePosixPath(inside).parent / _block_name(path, lock))
        source = _blob(label, sha, beside, root).decode("utf-8", "replace") if beside in files else None
        return _of_lock(label, lock, source, PurePosixPath(beside).name)
    with _taken_out(label, sha, inside, root, files) as (spec, prefix, notes):
        return _renamed(_of_check(label, check_file(spec)), prefix, f"{revision}:", notes)


def _inside(path: str, root: Path) -> str:
    """The path from the repository's root; as git has it, only ``./`` and ``../`` start at the working folder."""
    if not path.startswith(("./", "../")):
        return path
    try:
        return (Path.cwd() / path).resolve().relative_to(root.resolve()).as_posix()
    except ValueError:
        raise SideError(f"{path}: it is outside the repository {root}") from None


def _blob(label: str, sha: str, path: str, root: Path) -> bytes:
    """A file as a checkout would write it: what git keeps elsewhere (LFS) is brought in where that is installed."""
    found = _git("cat-file", "--filters", f"{sha}:{path}", at=root)
    found = _git("cat-file", "blob", f"{sha}:{path}", at=root) if found is None else found
    if found is None:
        raise SideError(f"{label}: git cannot read {path!r} of that revision")
    return found


@contextmanager
def _taken_out(
    label: str, sha: str, spec: str, root: Path, files: list[str]
) -> Iterator[tuple[Path, str, tuple[str, ...]]]:
    """The spec and the files that it names, in a folder of their own that mirrors this machine's: (the spec there, what
    stands before a path of the repository, notes).  What the revision does not have is linked from the working tree."""
    with tempfile.TemporaryDirectory(prefix="vtaps-diff-") as temporary:
        mirror = Path(temporary).resolve()
        place = mirror / (root / spec).relative_to("/")
        place.parent.mkdir(parents=True)
        place.write_bytes(_blob(label, sha, spec, root))
        doc, _ = load(place)
        linked = []
        for name in sorted(set(_named(None if doc is None else doc.data))):
            real = Path(os.path.normpath((root / spec).parent / name))
            there = mirror / real.relative_to("/")
            inside = real.relative_to(root).as_posix() if real.is_relative_to(root) else None
            mine = [f for f in files if inside is not None and (f == inside or f.startswith(f"{inside}/"))]
            for file in mine:
                target = mirror / (root / file).relative_to("/")
                if not target.exists():
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(_blob(label, sha, file, root))
            if not mine and real.exists() and not there.exists():
                there.parent.mkdir(parents=True, exist_ok=True)
                there.symlink_to(real)
                linked.append(name)
        note = f"{label}: {', '.join(linked)} of the working tree, which the revision does not have"
        yield place, f"{mirror}{root.as_posix()}/".replace("//", "/"), (note,) if linked else ()


PATHS = ("path", "tokenizer", "file", "dir", "run", "python")
"""Keys of a spec whose texts are paths."""


def _named(data: Any, key: str = "") -> Iterator[str]:
    """The relative paths in a spec: of one with ``{layer}`` the folder before it, of ``file:function`` the file."""
    if isinstance(data, dict):
        for k, value in data.items():
            yield from _named(value, k)
    elif isinstance(data, list):
        for value in data:
            yield from _named(value)
    elif isinstance(data, str) and key in PATHS and "\0" not in data and not data.startswith(("/", "~")):
        name = data.rpartition(":")[0] if key == "python" else data
        name = name.partition("{")[0].rpartition("/")[0] if "{" in name else name
        if name.strip("./"):
            yield name


def _renamed(found: Side, prefix: str, by: str, notes: tuple[str, ...]) -> Side:
    """A side with the paths of its temporary folder as the user gave them."""

    def told(text: str) -> str:
        return text.replace(prefix, by)

    findings = tuple(
        dataclasses.replace(
            d, message=told(d.message), note=None if d.note is None else told(d.note),
            detail=tuple(map(told, d.detail)), span=dataclasses.replace(d.span, file=told(d.span.file)),
        )
        for d in found.findings
    )  # fmt: skip
    documents = {told(file): text for file, text in found.documents.items()}
    doc = None if found.doc is None else dataclasses.replace(found.doc, file=told(found.doc.file))
    return dataclasses.replace(found, findings=findings, documents=documents, notes=(*found.notes, *notes), doc=doc)
