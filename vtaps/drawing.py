"""Figures as pictures: SVG inside one HTML page, or PNG files.

Needs matplotlib (``pip install 'vtaps[plot]'``).  Colours are those that people who cannot tell red from green can
order too: cividis, and purple to orange about zero; lines differ in dash as well as in colour.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from vtaps.figures import Bars, Curves, Figure, Heat
from vtaps.spec.reporters import harmless

INK = "#0b0c0d"
"""Stands for the page's own text colour in an SVG: the page replaces it."""
LINES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#7f7f7f")
"""Okabe and Ito's, in an order whose neighbours differ in lightness."""
DASHES = ("-", "--", ":", "-.")
CELL = 12
"""Characters of a cell's text."""
_IDS = re.compile(r'(\bid="|\burl\(#|\bhref="#)')
"""What stands before an id in an SVG; a colour begins like none of them."""
LABELS = 40
"""Of an axis, at most; others are left out at even distances."""


def svg(figure: Figure) -> str:
    """The picture as an SVG element whose text and frame take the colour of the page."""
    with _drawn(figure) as (made, _):
        out = io.StringIO()
        # No date and no random ids: equal figures are equal bytes.
        made.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    return text[text.index("<svg") :].replace(INK, "currentColor")


def png(figure: Figure, path: Path, *, dpi: int = 160) -> None:
    """Write the picture, on white."""
    with _drawn(figure) as (made, axes):
        axes.set_title(_safe(figure.title))
        made.savefig(path, format="png", dpi=dpi, facecolor="white")


def page(figures: Sequence[Figure], title: str, facts: Sequence[tuple[str, str]]) -> str:
    """One HTML page that needs nothing beside it."""
    loader = jinja2.PackageLoader("vtaps", "templates")
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    # Ids of one picture's parts are not to be another's.
    pictures = [_IDS.sub(rf"\g<1>f{i}-", svg(figure)) for i, figure in enumerate(figures)]
    shown = [
        {"title": _safe(f.title), "caption": _safe(f.caption), "svg": s} for f, s in zip(figures, pictures, strict=True)
    ]
    return environment.get_template("plot.html.j2").render(title=title, facts=facts, figures=shown)


@contextmanager
def _drawn(figure: Figure) -> Iterator[tuple[Any, Any]]:
    import matplotlib

    # One text size, texts as texts, and names inside the file that do not change from run to run.
    settings: dict[Any, Any] = {
        "svg.fonttype": "none",
        "text.parse_math": False,
        "svg.hashsalt": "vtaps",
        "font.size": 9.0,
        "axes.titlesize": 10.0,
    }
    settings |= {key: INK for key in ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")}
    with matplotlib.rc_context(settings):
        from matplotlib.figure import Figure as Canvas

        # Not pyplot: no window system, nothing global.
        made = Canvas(figsize=_size(figure), layout="constrained")
        axes = made.add_subplot()
        match figure:
            case Heat():
                _heat(made, axes, figure)
            case Curves():
                _curves(axes, figure)
            case Bars():
                _bars(axes, figure)
        yield made, axes


def _size(figure: Figure) -> tuple[float, float]:
    """Inches."""
    match figure:
        case Heat():
            cell = 0.85 if figure.texts is not None else 0.34
            wide = max(4.5, min(16.0, 2.2 + cell * len(figure.columns)))
            return wide, max(2.4, min(14.0, 1.0 + 0.26 * len(figure.rows)))
        case Bars():
            return 6.4, max(1.6, min(14.0, 0.9 + 0.28 * len(figure.names)))
        case Curves():
            return 6.4, 3.8


def _heat(made: Any, axes: Any, figure: Heat) -> None:
    values = np.where(np.isfinite(figure.values), figure.values, np.nan)
    colours: dict[str, Any] = {"cmap": "cividis"}
    if figure.centred:
        most = float(np.nanmax(np.abs(values))) or 1.0
        colours = {"cmap": "PuOr_r", "vmin": -most, "vmax": most}
    elif figure.value_label == "probability":
        colours |= {"vmin": 0.0, "vmax": 1.0}
    image = axes.imshow(values, aspect="auto", origin="lower", interpolation="nearest", **colours)
    _ticks(axes.set_xticks, figure.columns, rotate=max(map(len, figure.columns)) > 4)
    _ticks(axes.set_yticks, figure.rows)
    axes.set_xlabel(_safe(figure.column_label))
    axes.set_ylabel(_safe(figure.row_label))
    bar = made.colorbar(image, ax=axes, label=_safe(figure.value_label))
    bar.outline.set_edgecolor(INK)
    for r, row in enumerate(figure.texts or ()):
        for c, text in enumerate(row):
            red, green, blue, _ = image.cmap(image.norm(figure.values[r, c]))
            # Not the page's ink: it stands on the cell's colour.
            colour = "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"
            axes.text(
                c, r, _safe(text.strip() or "␣" * len(text))[:CELL], ha="center", va="center", fontsize=7, color=colour
            )


def _curves(axes: Any, figure: Curves) -> None:
    named = bool(figure.x) and isinstance(figure.x[0], str)
    x = list(range(len(figure.x))) if named else list(figure.x)
    for i, (name, values) in enumerate(figure.lines):
        style: dict[str, Any] = {"color": LINES[i % len(LINES)], "linestyle": DASHES[i // 2 % len(DASHES)]}
        marker = "o" if len(x) <= 24 else None
        axes.plot(x, values, label=_safe(name), marker=marker, markersize=3.5, linewidth=1.6, **style)
    if named:
        texts = [str(name) for name in figure.x]
        _ticks(axes.set_xticks, texts, rotate=max(map(len, texts)) > 4)
    axes.set_xlabel(_safe(figure.x_label))
    axes.set_ylabel(_safe(figure.value_label))
    axes.grid(alpha=0.25, color=INK, linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    if len(figure.lines) > 1 or figure.lines[0][0] not in (figure.value_label, ""):
        axes.legend(frameon=False, fontsize=8, loc="best")


def _bars(axes: Any, figure: Bars) -> None:
    places = np.arange(len(figure.names))[::-1]
    axes.barh(places, figure.values, height=0.7, color=LINES[0])
    axes.set_yticks(places, [_safe(n) for n in figure.names])
    axes.set_xlabel(_safe(figure.value_label))
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.bar_label(axes.containers[0], fmt="%.3g", padding=3, fontsize=8)
    axes.margins(x=0.14)
    axes.spines[["top", "right"]].set_visible(False)


def _ticks(place: Any, texts: Sequence[str], *, rotate: bool = False) -> None:
    every = math.ceil(len(texts) / LABELS)
    at = list(range(0, len(texts), every))
    turned = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if rotate else {}
    place(at, [_safe(texts[i]) for i in at], **turned)


def _safe(text: str) -> str:
    """One line without control characters."""
    return "".join(c if harmless(c) else "�" for c in text.replace("\n", "↵").replace("\t", "⇥"))
