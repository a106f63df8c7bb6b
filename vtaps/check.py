"""A spec file → its plan, with every finding on the way: the library's side of ``vtaps check``."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vtaps.runtime.trees import tree_for
from vtaps.spec import engine_args, quantised
from vtaps.spec.diagnostics import Diagnostic, has_errors, in_order
from vtaps.spec.document import Document
from vtaps.spec.files import path_in
from vtaps.spec.models import find_config
from vtaps.spec.parse import parse
from vtaps.spec.plan import Plan
from vtaps.spec.resolve import Context, resolve
from vtaps.spec.schema import held
from vtaps.spec.sources import KeptRows
from vtaps.spec.spec import Spec
from vtaps.spec.tokens import TokenizerError, Tokens
from vtaps.spec.tree import ModelTree
from vtaps.spec.yaml import load, loads

SHOWN_BYTES = 16 * 2**20
"""The largest file whose lines findings quote."""


@dataclass(frozen=True)
class CheckResult:
    """``plan`` is None where a finding is an error.  ``documents`` maps file name → text, to underline lines in."""

    diagnostics: list[Diagnostic]
    documents: dict[str, str]
    doc: Document | None = None
    spec: Spec | None = None
    tree: ModelTree | None = None
    plan: Plan | None = None
    model_folder: Path | None = None
    tokens: Tokens | None = None

    @property
    def ok(self) -> bool:
        return not has_errors(self.diagnostics)


def check_file(path: str | Path) -> CheckResult:
    """Check one spec: no GPU, no weights, no torch.  A tree that is not cached is built by vLLM in a process of its
    own (seconds, once a configuration)."""
    return _check(*load(path))


def check_text(text: str, path: str | Path) -> CheckResult:
    """:func:`check_file` of a text that is not written yet, as if it stood at ``path``."""
    return _check(*loads(text, str(path), Path(path).parent))


def _check(doc: Document | None, found: list[Diagnostic]) -> CheckResult:
    if doc is None:
        return CheckResult(in_order(found), _texts(None, found))
    tagged = {(d.span.line, d.span.column) for d in found if d.code == "VT008"}
    loaded = list(found)
    of_schema, refused = held(doc)
    found += [d for d in of_schema if (d.span.line, d.span.column) not in tagged]
    if isinstance(doc.data, dict) and isinstance(doc.data.get("engine"), dict):
        vllm = doc.data["engine"].get("vllm")
        if isinstance(vllm, dict):
            found += engine_args.check(doc, ("engine", "vllm"), vllm)
    spec = None if refused is None else parse(doc, loaded, refused)
    if spec is None:
        return CheckResult(in_order(found), _texts(doc, found), doc)
    where = doc.at("model", "path")
    folder, problems = find_config(spec.model.path, doc.folder, where, spec.model.revision)
    found += problems
    tree, tokens = None, None
    tokenizer_folder = folder
    if folder is not None:
        tree, problems = tree_for(folder, spec.model.dtype, where)
        found += problems
        found += quantised.check(spec, doc, folder)
        if spec.model.tokenizer is not None:
            tokenizer_folder, problems = _tokenizer_folder(spec.model.tokenizer, doc)
            found += problems
    if tree is not None and tokenizer_folder is not None:
        try:
            tokens = Tokens.load(tokenizer_folder)
        except TokenizerError as error:
            found.append(Diagnostic("VT214", str(error), where))
    plan = None
    if tree is not None and tokens is not None:
        plan, problems = resolve(spec, Context(doc, tree, tokens, _runs))
        found += problems
        if has_errors(found):
            plan = None
    return CheckResult(in_order(found), _texts(doc, found), doc, spec, tree, plan, folder, tokens)


def _runs(path: Path, arm: str, read: str) -> KeptRows:
    from vtaps.runtime.results.kept import kept_rows

    return kept_rows(path, arm, read)


def _tokenizer_folder(name: str, doc: Document) -> tuple[Path | None, list[Diagnostic]]:
    with suppress(OSError):  # find_config says what is wrong with it
        path = path_in(doc.folder, name)
        if path.is_dir():
            return path, []
    return find_config(name, doc.folder, doc.at("model", "tokenizer"))


def _texts(doc: Document | None, found: list[Diagnostic]) -> dict[str, str]:
    """The texts that findings point into: the spec's, and prompt files as far as they can be read."""
    texts: dict[str, str] = {} if doc is None else {doc.file: doc.text}
    for d in found:
        if d.span.file in texts:
            continue
        path = Path(d.span.file) if doc is None else doc.folder / d.span.file
        try:
            if path.is_file() and path.stat().st_size <= SHOWN_BYTES:
                texts[d.span.file] = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError, ValueError):
            continue
    return texts
