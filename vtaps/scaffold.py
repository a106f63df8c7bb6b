"""A model → a first spec of it, commented, that checks as it is: the library's side of ``vtaps init``."""

from __future__ import annotations

import json
import os
import re
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from vtaps.check import check_text
from vtaps.runtime.trees import tree_for
from vtaps.spec import aliases
from vtaps.spec.chat import ChatError, Template
from vtaps.spec.diagnostics import Diagnostic, Span
from vtaps.spec.models import find_config
from vtaps.spec.tree import ROWS, ModelTree, Module

SCHEMA = "spec-v1.schema.json"
LENGTH = 512
"""``max_model_len`` of a first spec, where the model takes as many tokens."""

_CHAT = """\
    # In the model's own chat template; `text:` in the place of `chat:` is served as it stands.
    - {id: france, chat: [{role: user, content: "What is the capital of France?"}]}
    - {id: japan, chat: [{role: user, content: "What is the capital of Japan?"}]}
"""
_TEXT = """\
    - {id: france, text: "The capital of France is"}
    - {id: japan, text: "The capital of Japan is"}
"""


def models_here(folder: Path) -> list[str]:
    """The models in ``folder`` and in its ``models/``, by the paths that lead there."""
    if (folder / "config.json").is_file():
        return ["."]
    return sorted(os.path.relpath(p.parent, folder) for p in folder.glob("models/*/config.json"))


def first_spec(model: str, out: Path) -> tuple[str | None, list[Diagnostic]]:
    """The text of a spec at ``out`` for ``model`` (a directory or ``config.json`` relative to the working directory, or
    a hub id in the local cache); nothing is written.  Findings: the model's (VT213, VT214, VT504), and those of the
    spec where there is none that checks."""
    span = Span(model)
    folder, found = find_config(model, Path.cwd(), span)
    if folder is None:
        return None, found
    tree, problems = tree_for(folder, "auto", span)
    found += problems
    if tree is None:
        return None, found
    told = [Diagnostic("VT214", f"no module of {tree.architecture} is known to put out rows of {_rows(tree)}", span)]
    for text in _texts(tree, model, folder, out):
        result = check_text(text, out)
        if result.ok:
            return text, found
        told = [replace(d, span=span) for d in result.diagnostics]
    return None, [*found, *told]


def _texts(tree: ModelTree, model: str, folder: Path, out: Path) -> Iterator[str]:
    """The spec, then plainer ones for models that refuse a part of it."""
    head = _head(tree, model, out)
    prompts = _CHAT if _takes_chat(folder) else _TEXT
    for at in _places(tree):
        for read in _reads(tree, at):
            yield head + _body(tree, at, read, _path(model, out), _length(folder), prompts)


def _takes_chat(folder: Path) -> bool:
    try:
        Template(folder).turns([{"role": "user", "content": "x"}])
    except ChatError:
        return False
    return True


def _length(folder: Path) -> int:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config")
    both = config | (text if isinstance(text, dict) else {})
    known = [both.get(key) for key in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")]
    return min([LENGTH, *(n for n in known if isinstance(n, int) and n > 0)])


def _path(model: str, out: Path) -> str:
    """The model as the spec names it: a relative path starts at the spec's folder."""
    path = Path(model)
    if model.startswith("~") or path.is_absolute() or not path.exists():
        return model
    short = os.path.relpath(path, out.parent)
    if (out.parent / short).resolve() == path.resolve():
        return short
    # `..` of a folder that a link leads to is above what it links to.
    return os.path.relpath(path.absolute().parent.resolve() / path.name, out.parent.resolve())


def schema_for(out: Path) -> str:
    """The spec's schema as an editor finds it from ``out``: the nearest on the way up, or one beside it."""
    folder = out.parent.resolve()
    for above in (folder, *folder.parents):
        for name in (SCHEMA, f"schemas/{SCHEMA}"):
            if (above / name).is_file():
                return os.path.relpath(above / name, folder)
    return SCHEMA


# Places ----------------------------------------------------------------------------------------------------------


def _places(tree: ModelTree) -> Iterator[str]:
    """Where to steer, the best first: the stream after the middle layer, or what that layer's modules put out."""
    if aliases.table_of(tree) is not None:
        yield f"resid_post[{aliases.layer_count(tree) // 2}]"
        return
    stack = _stack(tree)
    layer = f"{stack}.{_count(tree, stack) // 2}"
    found = [m for m in tree.modules.values() if _is_rows(tree, m) and m.path.startswith(layer)]
    # The layer's own output where it is one tensor; else of its modules the one that is called last, which adds to the
    # stream what the layer makes of it.
    inner = [m for m in found if m.path.rpartition(".")[0] == layer]
    inner.sort(key=lambda module: -(module.enter or 0))
    yield from (f"{m.path}.output" for m in (*(m for m in found if m.path == layer), *inner))


def _is_rows(tree: ModelTree, module: Module) -> bool:
    value = module.output
    return value is not None and value.dtype == tree.dtype and value.shape == (ROWS, tree.dimensions.hidden)


def _rows(tree: ModelTree) -> str:
    return f"{tree.dimensions.hidden} columns" + (f" ({tree.unvalued})" if tree.unvalued else "")


def _stack(tree: ModelTree) -> str:
    """The path above the decoder layers: the list of as many modules, or the longest."""
    found = [m[1] for path in tree.modules if (m := re.fullmatch(r"(.+)\.0", path))]
    return max(
        found,
        key=lambda path: (_count(tree, path) == tree.dimensions.layers, _count(tree, path), -len(path)),
        default="",
    )


def _count(tree: ModelTree, stack: str) -> int:
    count = 0
    while f"{stack}.{count}" in tree.modules:
        count += 1
    return count


# The text --------------------------------------------------------------------------------------------------------


def _head(tree: ModelTree, model: str, out: Path) -> str:
    size, known = tree.dimensions, aliases.names(tree)
    if known:
        every = ", ".join(f"{name}[i]" if aliases.layered(tree, name) else name for name in known)
        told = f"Locations, i a layer from 0 to {aliases.layer_count(tree) - 1}:\n"
        told += textwrap.fill(every, 110, initial_indent="#   ", subsequent_indent="#   ")
    else:
        told = "This architecture has no aliases: a location is a module's path with `.output` or `.input`."
    schema, file = schema_for(out), out.name if _plain(out.name) else "FILE"
    return f"""\
# yaml-language-server: $schema={schema}
# With that file an editor completes and checks as you type; `vtaps schema --out {SCHEMA}` writes it.
#
# {tree.architecture}: {size.layers} layers, {size.heads} heads of {size.head_dim}, hidden size {size.hidden}.
# {told}
# `vtaps tree {model if _plain(model) else "MODEL"}` shows where they are.
#
#   vtaps check {file}      says everything that can be wrong, before any GPU time
#   vtaps compile {file}    writes the block that will run, and the lock: commit both with this file
#   vtaps run {file}        serves every prompt in every arm, prints texts and counts, writes runs/{Path(file).stem}
"""


def _reads(tree: ModelTree, at: str) -> Iterator[str]:
    """``seen``, the best first: a lens at every layer, at the end, or (a quantised unembedding) none."""
    lens = """\
  # The five most likely next tokens{}, at the row that samples the first one.
  seen: {{at: "{}", tokens: {{steps: [0]}}, sees: after_edits, lens: {{top: 5}}}}
"""
    if aliases.table_of(tree) is not None:
        yield lens.format(" as each layer would have them", "resid_post[*]")
    yield lens.format("", "logits")
    yield f"""\
  # How long each row is.
  seen: {{at: "{at}", tokens: all, sees: after_edits, norm: true}}
"""


def _body(tree: ModelTree, at: str, read: str, model: str, length: int, prompts: str) -> str:
    heads = ""
    if "z" in aliases.names(tree):
        place = f"z[{aliases.layer_count(tree) // 2}]"
        heads = f'  # no_head: {{at: "{place}", tokens: all, zero: {{heads: [0]}}}}\n'
    return f"""\
vtaps: 1
model: {{path: {_scalar(model)}}}
# `mode: eager` beside `vllm` starts in seconds on a CPU; without it vtaps serves taps inside vLLM's compiled model.
engine: {{vllm: {{max_model_len: {length}}}}}
vectors:
  # A stand-in, a random direction. In its place your own, {tree.dimensions.hidden} numbers in a file beside this one:
  # direction: {{file: direction.npy}}
  direction: {{random: {{seed: 0, norm: 1.0}}}}
reads:
{read}\
  # The rows themselves, to work with in Python; name it in an arm:
  # rows: {{at: "{at}", tokens: all, sees: after_edits}}
edits:
  # The vector times `scale` is added at every row whose output is sampled.
  steer: {{at: "{at}", tokens: sampling, add: {{vector: direction, scale: 8.0}}}}
  # Other verbs, one an edit; name it in an arm:
  # weaker: {{at: "{at}", tokens: all, scale: {{by: 0.5}}}}
  # removed: {{at: "{at}", tokens: all, project_out: {{vectors: [direction]}}}}
  # bounded: {{at: "{at}", tokens: all, clamp: {{vector: direction, max: 0.0}}}}
{heads}prompts:
  questions:
{prompts}\
arms:
  # Every arm serves every prompt: one the model as it is, one with the edit at each strength.
  base:    {{reads: [seen]}}
  steered: {{edits: [steer], reads: [seen], sweep: {{steer.add.scale: [8, 64]}}}}
sampling: {{temperature: 0, max_tokens: 16}}
"""


def _plain(text: str) -> bool:
    """Whether a shell and a comment take the text as it is."""
    return re.fullmatch(r"[\w./~-]+", text, re.ASCII) is not None


def _scalar(text: str) -> str:
    """A YAML scalar of the text, quoted where a plain one could mean something else."""
    plain = re.fullmatch(r"(~/|/|(\.\./)*)\w[\w.-]*(/[\w.-]+)+", text, re.ASCII)
    return text if plain else json.dumps(text, ensure_ascii=False)
