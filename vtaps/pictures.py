"""A finished run as one page of pictures, or as PNG files: ``vtaps.plot``."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from vtaps.figures import Figure, NothingToPlot, Texts, figures
from vtaps.runtime.results.load import RunResult, load
from vtaps.spec.files import write_text
from vtaps.spec.tokens import TokenizerError, Tokens


class PlotError(Exception):
    """Nothing was drawn; the message says why, in a line."""


def plot(
    path: str | Path, out: str | Path | None = None, *, names: Sequence[str] = (), tokenizer: str | Path | None = None
) -> list[Path]:
    """Draw a finished run and return the files written.

    ``out``: FILE.html (default: ``plot.html`` in the run's folder), one page with every figure, or FILE.png: that file
    for one figure, FILE-1.png and so on for several.  ``names``: metrics and reads (default: all).  ``tokenizer``: the
    folder whose tokenizer gives token ids their texts (default: the model's, where it is found).

    Raises PlotError, and RunError where there is no finished run.
    """
    run = load(path)
    if importlib.util.find_spec("matplotlib") is None:
        raise PlotError("pictures need matplotlib: pip install 'vtaps[plot]'")
    target = Path(out) if out is not None else run.path / "plot.html"
    if target.suffix not in (".html", ".png"):
        raise PlotError(f"{target}: FILE.html or FILE.png is expected")
    try:
        found = figures(run, _texts(run, tokenizer), names)
    except NothingToPlot as error:
        raise PlotError(str(error)) from None
    try:
        return _write(run, found, target)
    except OSError as error:
        raise PlotError(f"cannot write {target}: {error.strerror or error}") from error


def _write(run: RunResult, found: Sequence[Figure], target: Path) -> list[Path]:
    from vtaps import drawing

    target.parent.mkdir(parents=True, exist_ok=True)
    if target.suffix == ".html":
        spec = run.info["spec"]["file"]
        model = " · ".join(str(run.info["model"][k]) for k in ("path", "dtype") if run.info["model"][k])
        counts = run.info["counts"]
        facts = [("model", model), ("engine", run.lock["engine"]["mode"]), ("requests", f"{counts['requests']:,}")]
        write_text(target, drawing.page(found, spec, facts))
        return [target]
    files = [target] if len(found) == 1 else [target.with_stem(f"{target.stem}-{i + 1}") for i in range(len(found))]
    for figure, file in zip(found, files, strict=True):
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            drawing.png(figure, made := Path(scratch) / file.name)
            os.replace(made, file)
    return files


def _texts(run: RunResult, tokenizer: str | Path | None) -> Texts:
    """Of a token id: from the tokenizer, else as the run's own tokens have it, else the id."""
    if tokenizer is not None:
        try:
            known = Tokens.load(Path(tokenizer))
        except TokenizerError as error:
            raise PlotError(str(error)) from None
        return lambda i: known.pieces((i,))[0]
    for name in (run.lock["model"].get("tokenizer"), run.info["model"]["path"]):
        # The spec's folder is not known here: its path is tried from this folder, and from those above.
        for folder in dict.fromkeys(Path(*Path(name).parts[i:]) for i in range(3)) if name else ():
            if folder.parts and (folder / "tokenizer.json").is_file():
                near = Tokens.load(folder)
                return lambda i: near.pieces((i,))[0]
    seen = dict(zip(run.tokens["token_id"].to_pylist(), run.tokens["text"].to_pylist(), strict=True))
    return lambda i: seen.get(i, f"#{i}")
