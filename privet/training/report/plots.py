"""Pictures as SVG that stands inside of a page and takes its colours: no script, no font and no file beside it.

matplotlib draws with stand-ins for colours, and each of them is replaced by one of the page's CSS variables, so that
one picture serves light, dark and print. Names from files never go through matplotlib: legends are HTML.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

LINES = 6
"""So many lines in a picture can be told apart."""
_INK, _SOFT, _GRID = "#010101", "#020202", "#030303"
_LINE = [f"#0401{i:02x}" for i in range(LINES)]
_VARIABLES = {_INK: "--ink", _SOFT: "--soft", _GRID: "--rule"} | {c: f"--line-{i}" for i, c in enumerate(_LINE)}
_DASHES = ["", "6 2", "2 2", "8 2 2 2", "4 4", "1 3"]
_SIZE = (4.6, 2.6)
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none", "font.size": 9, "text.color": _INK, "axes.labelcolor": _INK, "axes.edgecolor": _SOFT,
    "xtick.color": _SOFT, "ytick.color": _SOFT, "xtick.labelcolor": _INK, "ytick.labelcolor": _INK,
    "axes.grid": True, "grid.color": _GRID, "grid.linewidth": 0.6, "axes.spines.top": False,
    "axes.spines.right": False, "axes.axisbelow": True, "lines.linewidth": 1.6,
}  # fmt: skip

Curves = Mapping[str, Sequence[float | None]]
"""Values by what they are of."""


def by_epoch(title: str, epochs: Sequence[float], curves: Curves, *, unit: str, share: bool = False) -> str:
    """A line for each of at most `LINES` names; `share` makes the axis go from 0 to 1."""

    def paint(axes: Any) -> None:
        from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

        for i, values in enumerate(curves.values()):
            dots = {"marker": "o", "markersize": 3} if len(epochs) <= 30 else {}
            axes.plot(epochs, _floats(values), **_line(i), **dots)
        axes.set_xlabel("epoch")
        axes.set_ylabel(unit)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        if share:
            low = min((v for values in curves.values() for v in values if v is not None), default=0.0)
            axes.set_ylim(min(0.0, low), 1.02)

    return _figure(title, paint, list(curves))


def trade_off(title: str, alphas: Sequence[float], betas: Sequence[float]) -> str:
    """The trade-off curve, with that of a model which says nothing (β = 1 − α)."""

    def paint(axes: Any) -> None:
        axes.fill_between(alphas, 0, betas, color=_LINE[0], alpha=0.12, linewidth=0)
        axes.plot(alphas, betas, **_line(0))
        axes.plot([0, 1], [1, 0], **_line(1))
        axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="false positive rate α", ylabel="false negative rate β")

    return _figure(title, paint, ["no attack is below this line", "a model that tells nothing"])


def power(title: str, alphas: Sequence[float], betas: Sequence[float], at: tuple[float, float]) -> str:
    """The same where false positives are rare: what share of members the best attack finds."""

    def paint(axes: Any) -> None:
        axes.plot(alphas, [1 - b for b in betas], **_line(0))
        axes.plot(alphas, alphas, **_line(1))
        axes.plot([at[0]], [1 - at[1]], "o", color=_LINE[0])
        axes.set(xscale="log", xlim=(min(alphas), 1), ylim=(0, 1.02))
        axes.set(xlabel="false positive rate (log)", ylabel="true positive rate")
        axes.xaxis.set_major_formatter(_plain)

    return _figure(title, paint, ["no attack is above this line", "a model that tells nothing"])


def histogram(title: str, parts: dict[str, dict[str, Any]], clip: float | None) -> str:
    """Counts over logarithmic bins, one line for each of `parts`; the outer bins hold what lies beyond the edges."""
    counts = [part["counts"] for part in parts.values()]
    first = next(iter(parts.values()))
    edges = [10 ** (first["first"] + (k - 1) / first["per_decade"]) for k in range(len(counts[0]) + 1)]
    used = [k for k in range(len(counts[0])) if any(row[k] for row in counts)] or [0]
    shown = slice(max(0, used[0] - 1), used[-1] + 2)

    def paint(axes: Any) -> None:
        for i, row in enumerate(counts):
            axes.stairs(row[shown], edges[shown.start : shown.start + len(row[shown]) + 1], **_line(i), linewidth=1.6)
        if clip is not None:
            axes.axvline(clip, color=_INK, linewidth=1, linestyle=(0, (1, 2)))
            axes.annotate("C", (clip, 1), (3, -8), xycoords=("data", "axes fraction"), textcoords="offset points")
        axes.set(xscale="log", xlabel="L2 norm of a record's gradient (log)", yscale="log", ylabel="records (log)")
        axes.set_ylim(bottom=0.7)
        axes.yaxis.set_major_formatter(_plain)
        axes.xaxis.set_major_formatter(_plain)

    return _figure(title, paint, list(parts))


def _plain(value: float, _position: int) -> str:
    return f"{value:g}"


def _floats(values: Sequence[float | None]) -> list[float]:
    return [math.nan if v is None else float(v) for v in values]


def _line(i: int) -> dict[str, Any]:
    dashes = [float(d) / 1.6 for d in _DASHES[i].split()]
    return {"color": _LINE[i], "linestyle": (0, dashes) if dashes else "-"}


def _figure(title: str, paint: Callable[[Any], None], legend: Sequence[str]) -> str:
    """A picture with its caption and, if it has several lines, what they are."""
    keys = "".join(
        f'<li><svg viewBox="0 0 26 6" aria-hidden="true"><path d="M0 3H26" fill="none" stroke-width="2" '
        f'style="stroke:var(--line-{i})" stroke-dasharray="{_DASHES[i]}"/></svg>{escape(name)}</li>'
        for i, name in enumerate(legend)
    )
    listed = f'<ul class="legend">{keys}</ul>' if len(legend) > 1 else ""
    return f"<figure><figcaption>{escape(title)}</figcaption>{_svg(title, paint)}{listed}</figure>"


def _svg(title: str, paint: Callable[[Any], None]) -> str:
    # Here and not above: it takes long to import, and most commands draw nothing.
    import matplotlib  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": title}):
        figure = Figure(figsize=_SIZE, layout="constrained")
        paint(figure.subplots())
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    return _cleaned(text.getvalue(), title)


def _cleaned(svg: str, title: str) -> str:
    """Without what belongs to a file of its own, with a title, and with the page's colours and font."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|font-family:[^;\"]*;?", "", body, flags=re.DOTALL)
    size = re.search(r'viewBox="[^"]*"', body)
    assert size is not None
    body = re.sub(r"<svg[^>]*>", f'<svg {size[0]} role="img"><title>{escape(title)}</title>', body, count=1)
    body = body.replace("xlink:href=", "href=")
    for colour, variable in _VARIABLES.items():
        body = body.replace(colour, f"var({variable})")
    used = set(re.findall(r'(?:url\(|href=")#([\w.-]+)', body))
    body = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in used else "", body)
    return re.sub(r"\s*\n\s*", " ", body)
