"""A lock as facts in words, by section and name: what two locks are compared by."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vtaps.codegen.renames import Lock, section_of
from vtaps.spec.arms import IDENTITY
from vtaps.spec.expand import one_line, rows_of, written
from vtaps.spec.layers import collapsed
from vtaps.spec.pattern import part_of
from vtaps.spec.rows import Rows
from vtaps.spec.sizes import exact


@dataclass(frozen=True)
class Fact:
    """``text`` is shown, ``key`` compared."""

    text: str
    key: Any


Subject = tuple[str, str]
"""Section and name; the model and the engine have no name."""

Facts = dict[Subject, dict[str, Fact]]


def facts(lock: Lock) -> Facts:
    """Everything in a lock that bears on what a run asks and gives, in the order of a spec.  What follows from other
    facts (slots, reasons, digests of the files that vtaps writes) is not there."""
    out: Facts = {("model", ""): _model(lock), ("engine", ""): _engine(lock)}
    for name, site in lock["sites"].items():
        out["locations", name] = _site(site)
    for where, forward in lock.get("forwards", {}).items():
        out["forwards", where] = {
            "text": _digest(forward["digest"]),
            "ops": _plain(len(forward["ops"]), forward["ops"]),
        }
    for name, vector in lock["vectors"].items():
        out["vectors", name] = _vector(vector)
    for name, gate in lock.get("gates", {}).items():
        out["gates", name] = _gate(name, gate, lock)
    for name, edit in lock["edits"].items():
        out["edits", name] = _edit(name, edit, lock)
    for name, read in lock["reads"].items():
        if part_of(name) == name:
            out["reads", name] = _read(read)
    for name, o in lock["overrides"].items():
        ids = ", ".join(map(str, o["ids"]))
        said = f"{_text(o['text'])} ({ids})" if o["text"] is not None else ids
        out["overrides", name] = {"start": _plain(o["start"]), "tokens": Fact(said, o["ids"])}
    for name, m in lock["metrics"].items():
        out["metrics", name] = _metric(m)
    for name, group in lock["prompts"].items():
        out["prompts", name] = {"prompts": Fact(count(group["count"], "prompt"), group["digest"])}
    for name, arm in lock["arms"].items():
        out["arms", name] = _arm(arm)
        out["sampling", name] = {k: _plain(v) for k, v in sorted(arm["sampling"].items())}
    named = {v.get("file") for v in lock["vectors"].values()} | {g.get("file") for g in lock["prompts"].values()}
    named |= {d["python"]["file"] for s in ("edits", "reads") for d in lock[s].values() if "python" in d}
    named |= {f"{r['run']}:{r['read']}" for e in lock["edits"].values() if (r := e.get("rows")) and "run" in r}
    for file, digest in lock["outside"].items():
        if file not in named and file != "model:config.json":
            out["files", file] = {"content": _digest(digest)}
    return out


def count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _plain(value: Any, key: Any = None) -> Fact:
    text = _text(value)
    return Fact(text, text if key is None else key)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return json.dumps(value, ensure_ascii=False)


def _number(value: Any) -> Fact:
    """A number, or one of the words that stand for one."""
    return _word(value) if isinstance(value, str) else _plain(float(value))


def _word(value: Any) -> Fact:
    """A name, or a text that needs no quotes."""
    return Fact("none" if value is None else str(value), value)


def _digest(digest: str | None) -> Fact:
    return Fact("none" if digest is None else short(digest), digest)


def short(digest: str) -> str:
    """The first digits of a digest, enough to tell two apart."""
    return digest.removeprefix("sha256:")[:12]


def _model(lock: Lock) -> dict[str, Fact]:
    model, tree = lock["model"], lock["tree"]
    out = {key: _word(model[key]) for key in ("path", "revision", "tokenizer", "dtype")}
    out |= {"architecture": _word(tree["architecture"]), "config": _digest(model["config"])}
    out |= {"modules": _digest(tree["digest"]), "vLLM": _word(tree["vllm"]), "vLLM range": _word(tree["vllm_range"])}
    return out | {"final norm": _word((lock.get("lens") or {}).get("norm"))}


def _engine(lock: Lock) -> dict[str, Fact]:
    engine = lock["engine"]
    mode = Fact(f"{engine['mode']} ({engine['reason']})" if engine.get("reason") else engine["mode"], engine["mode"])
    out = {"mode": mode, "tap_memory": Fact(str(exact(engine["tap_memory"])), engine["tap_memory"])}
    return out | {f"vllm.{key}": _plain(value) for key, value in sorted(engine["vllm"].items())}


def _site(site: Mapping[str, Any]) -> dict[str, Fact]:
    layer = site["layer"]
    module = site["module"]
    if layer is not None:  # one change of many layers is told once
        module = re.sub(rf"\.{layer}(?=\.|$)", ".{layer}", module, count=1)
    out = {"served": _word(site["mode"]), "module": _word(module)}
    for key in ("op", "inside", "input", "output", "residual", "columns", "rows", "shard"):
        if site.get(key) is not None:
            out[key] = _plain(site[key])
    return out | {key: _word(site[key]) for key in ("width", "heads", "dtype") if site[key] is not None}


def _vector(vector: Mapping[str, Any]) -> dict[str, Fact]:
    said = {k: v for k, v in vector.items() if v is not None and k not in ("file", "digest", "read", "minus")}
    said |= {k: v for k, v in said.pop("random", {}).items() if v is not None}
    out = {key: _plain(value) for key, value in said.items()}
    if vector.get("digest") is not None:
        out["file"] = Fact(f"{vector['file']} ({short(vector['digest'])})", vector["digest"])
    elif vector.get("file") is not None:
        out["file"] = _word(vector["file"])
    for key in ("read", "minus"):
        if key in vector:
            of = vector[key]
            out[key] = Fact(f"{of['arm']}.{of['read']}", of)
    return out


def _rows(tokens: Mapping[str, Any]) -> Fact:
    rows = rows_of(Rows.from_json(tokens))
    return Fact(rows if isinstance(rows, str) else one_line(rows), tokens)


def _at(sites: list[str]) -> Fact:
    return Fact(collapsed(sites), sorted(sites))


def _python(named: Mapping[str, Any]) -> Fact:
    told = f" ({short(named['digest'])})" if named["digest"] else ""
    return Fact(f"{named['file']}:{named['function']}{told}", [named["function"], named["digest"]])


FIELDS = {
    "at": "sites", "tokens": "position", "scale": "coefficient", "by": "coefficient",
    "to": "coefficient", "value": "coefficient", "vector": "vector", "min": "min", "max": "max", "index": "feature",
}  # fmt: skip
"""The last word of a sweep path → what it sets of a point's edit."""

SWEPT = "swept"
"""In place of a number that every arm sweeps."""


def _settled(lock: Lock, section: str, name: str, identity: Any = None) -> dict[str, Any]:
    """What the spec itself gives an edit or a gate: its numbers in arms that do not sweep them.  ``identity``: the
    coefficient of an edit that no point stores."""
    key = section.removesuffix("s")
    out: dict[str, Any] = {}
    all_swept: set[str] = set()
    for _, arm in sorted(lock["arms"].items()):
        for point in arm["points"]:
            paths = [p for p in point["values"] if section_of(p) == section and p.partition(".")[0] == name]
            swept = {p.rpartition(".")[2] for p in paths}
            swept |= {FIELDS[f] for f in swept if f in FIELDS}
            entry = next((e for e in point.get(section, ()) if e[key] == name), None)
            if entry is not None:
                out |= {k: v for k, v in entry.items() if k not in swept and k not in out and v is not None}
                all_swept |= {k for k, v in entry.items() if k in swept and v is not None}
            elif section == "edits" and name in arm["edits"] and not swept & {"coefficient", "on"}:
                out |= {"coefficient": identity} if identity is not None and "coefficient" not in out else {}
    return out | {k: SWEPT for k in sorted(all_swept - {key, "sites", "position"}) if k not in out}


def _edit(name: str, edit: Mapping[str, Any], lock: Lock) -> dict[str, Fact]:
    verb = {"put": "set", "reconstruct": "feature"}.get(edit["verb"], edit["verb"])
    out = {"verb": _word(verb), "at": _at(edit["sites"]), "tokens": _rows(edit["tokens"])}
    settled = _settled(lock, "edits", name, IDENTITY.get(edit["verb"]))
    if settled.get("vector") is not None:
        out["vector"] = _word(settled["vector"])
    for key in ("vectors", "matrices"):
        if key in edit:
            out[key] = Fact(", ".join(edit[key]), edit[key])
    if "rows" in edit:
        rows = edit["rows"]
        run = f"{rows['run']}: " if "run" in rows else ""
        told = {k: v for k, v in rows.items() if k not in ("slots", "run")}
        out["rows"] = Fact(f"{run}{rows['arm']}.{rows['read']}", told)
    if "sae" in edit:
        out["sae"] = Fact(next(v for k, v in edit["sae"].items() if k != "does"), edit["sae"])
        out["error"] = _word("drop" if edit["verb"] == "reconstruct" else "keep")
    if "feature" in settled:
        out["index"] = _word(settled["feature"])
    if "coefficient" in settled:
        does = edit.get("sae", {}).get("does")
        key = does or ("by" if verb == "scale" else "value" if edit.get("value") else "scale")
        value = settled["coefficient"]
        out[key] = _number(value)
    out |= {key: _number(settled[key]) for key in ("min", "max") if settled.get(key) is not None}
    if edit["columns"] is not None:
        out |= _columns(edit["columns"], lock["sites"].get(edit["sites"][0]) if edit["sites"] else None)
    if edit.get("keep_norm"):
        out["keep_norm"] = _plain(True)
    if "python" in edit:
        out["python"] = _python(edit["python"])
    return out | ({"when": _word(edit["when"])} if "when" in edit else {})


def _columns(columns: list[list[int]], site: Mapping[str, Any] | None) -> dict[str, Fact]:
    """Columns as heads where they are whole ones."""
    size = site["width"] // site["heads"] if site and site["heads"] and site["width"] else 0
    if size and all(a % size == 0 and b % size == 0 for a, b in columns):
        heads = tuple((a // size, b // size - 1) for a, b in columns)
        return {"heads": Fact(", ".join(map(str, written(heads))), columns)}
    return {"columns": Fact(", ".join(map(str, written(tuple((a, b - 1) for a, b in columns)))), columns)}


def _gate(name: str, gate: Mapping[str, Any], lock: Lock) -> dict[str, Fact]:
    settled = _settled(lock, "gates", name)
    out = {"at": _word(gate["site"]), "tokens": _rows(gate["tokens"]), "score": _word(gate["score"])}
    out |= {"vector": _word(settled["vector"])} if settled.get("vector") else {}
    out |= {"reduce": _word(gate["reduce"])} if "reduce" in gate else {}
    out |= {key: _number(settled[key]) for key in ("above", "below") if settled.get(key) is not None}
    return {**out, "holds": _word(gate["holds"])}


def _read(read: Mapping[str, Any]) -> dict[str, Fact]:
    keeps = read["kind"]
    if keeps == "mean":
        keeps = f"mean over {'the run' if read.get('mean_over') == 'run' else 'each request'}"
    if read["top"] is not None:
        keeps += f", top {read['top']}"
    if read["ids"] is not None:
        keeps += f", ids {', '.join(map(str, read['ids']))}"
    if read["vectors"]:
        keeps += f" with {', '.join(read['vectors'])}"
    if "heads" in read:
        keeps += f", heads {', '.join(map(str, read['heads']))}"
    out = {"keeps": Fact(keeps, keeps), "at": _at(read["sites"]), "tokens": _rows(read["tokens"])}
    out["sees"] = _word(read["sees"])
    out |= {"sae": _word(read["sae"])} if "sae" in read else {}
    out |= {key: _plain(read[key]) for key in ("store", "allow", "budget") if key in read}
    return out | ({"python": _python(read["python"])} if "python" in read else {})


def _metric(metric: Mapping[str, Any]) -> dict[str, Fact]:
    pairs = zip(metric["texts"], metric["ids"], strict=True)
    of = " − ".join(f"{_text(text)} ({i})" for text, i in pairs)
    out = {"measures": Fact(f"{metric['kind']} of {of}", [metric["kind"], metric["ids"]])}
    out["tokens"] = _rows(metric["tokens"])
    if "normalize" in metric:
        between = metric["normalize"]
        out["normalize"] = Fact(f"1 is {between['one']}, 0 is {between['zero']}", between)
    return out


def _arm(arm: Mapping[str, Any]) -> dict[str, Fact]:
    def names(key: str, ordered: bool = False) -> Fact:
        found = arm[key] if ordered else sorted(arm[key])
        return Fact(", ".join(arm[key]) or "none", found)

    out = {key: names(key, key == "edits") for key in ("prompts", "edits", "reads", "metrics")}
    forced = sorted({o["override"] for p in arm["points"] for o in p["overrides"]})
    out["overrides"] = Fact(", ".join(forced) or "none", forced)
    axes: dict[str, dict[str, Any]] = {}
    for point in arm["points"]:
        for path, value in point["values"].items():
            axes.setdefault(path, {}).setdefault(_text(value), value)
    for path, values in axes.items():
        out[f"sweep {path}"] = Fact(_values(path, list(values.values())), sorted(values))
    points = sorted(json.dumps(p["values"], sort_keys=True) for p in arm["points"])
    out["points"] = Fact(str(len(points)), points)
    return out


LISTED = 24
"""Values of a sweep that are all written out."""


def _values(path: str, values: list[Any]) -> str:
    if path.endswith(".at"):
        return collapsed(str(v) for v in values)
    told = [v if isinstance(v, str) else _text(v) for v in values]
    if len(told) > LISTED:
        return f"{', '.join(told[:4])}, … {', '.join(told[-2:])} ({len(told)} values)"
    return ", ".join(told)
