"""Charts in the style of FlashAttention-2's figures 4 to 6."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .cases import Case
from .counting import Mode
from .providers import PROVIDERS
from .report import Report, Row, atomically
from .tables import rate_unit
from .timing import PACES

_COLORS = (
    "#1f5fa8", "#e07b39", "#8a8a8a", "#5fa86a", "#b5508c", "#c9b037", "#6fb7c9", "#7a5fa8", "#d0605e", "#4d4d4d",
)  # fmt: skip
_DIRECTION = {"fwd": "forward", "bwd": "backward"}


def save_bars(report: Report, path: Path, title: str) -> None:
    """One column of panels per direction, one row per (dtype, head dim, mask), one group of bars per length.

    The number over a bar is its height, a black line the speed on a hot GPU where the report has it; a provider
    without a number leaves a gap. Written atomically.
    """
    rows = [row for row in report.rows if row.median_ms() is not None]
    providers = list(dict.fromkeys(row.provider for row in rows))
    panels = sorted({(row.case.dtype, row.case.head_dim, row.case.causal) for row in rows})
    modes: list[Mode] = list(dict.fromkeys(row.mode for row in rows))
    unit, scale = rate_unit(report)
    longest = max((len(_groups(_of_panel(rows, mode, panel))) for mode in modes for panel in panels), default=1)
    width = max(5.0, 0.26 * longest * (len(providers) + 1) + 1)
    figure = Figure(figsize=(width * max(1, len(modes)), 3.2 * max(1, len(panels)) + 0.9), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(max(1, len(panels)), max(1, len(modes)), squeeze=False)
    for i, panel in enumerate(panels):
        for j, mode in enumerate(modes):
            dtype, head_dim, causal = panel
            mask = "causal" if causal else "no causal mask"
            axes[i, j].set_title(f"{_DIRECTION[mode]}, head dim {head_dim}, {mask}, {dtype}", fontsize=10)
            axes[i, j].set_ylabel(f"speed ({unit})")
            _draw_panel(axes[i, j], _of_panel(rows, mode, panel), providers, scale)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 5), frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=12)
    atomically(path, lambda temporary: figure.savefig(temporary, dpi=110))


def save_decoding(
    lines: Mapping[str, Mapping[int, float]], bars: Mapping[str, Mapping[str, float]], path: Path, title: str
) -> None:
    """{provider: {keys: microseconds}} as lines, {provider: {point: share of a copy's bandwidth}} as bars."""
    points = list(dict.fromkeys(point for shares in bars.values() for point in shares))
    figure = Figure(figsize=(14, 0.5 * len(points) + 3), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for provider, color in zip(lines, _COLORS, strict=False):
        left.plot(list(lines[provider]), list(lines[provider].values()), "o-", color=color, label=provider)
    left.set_xscale("log", base=2)
    lengths = sorted({keys for line in lines.values() for keys in line})
    left.set_xticks(lengths, map(_length, lengths))
    left.set_yscale("log")
    left.set(title="one sequence, 32 query heads, 1 key head", xlabel="keys", ylabel="microseconds")
    left.legend(frameon=False, fontsize=9)
    step = 0.9 / max(len(bars), 1)  # of a point's height: a bar and what is between two
    for point_at, point in enumerate(points):
        shares = {provider: bars[provider][point] for provider in bars if point in bars[provider]}
        at = [point_at + step * (i - (len(shares) - 1) / 2) for i in range(len(shares))]
        colors = [_COLORS[list(bars).index(provider)] for provider in shares]
        drawn = right.barh(at, list(shares.values()), 0.9 * step, color=colors)
        right.bar_label(drawn, fmt="%.2f", fontsize=6, padding=1)
    right.axvline(1, color=_COLORS[2], linewidth=0.8, linestyle=":")
    right.set_yticks(range(len(points)), points, fontsize=8)
    right.invert_yaxis()
    right.set(title="B, Hq, Hk, Sk: K and V read per second", xlabel="of the bandwidth of a copy")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=12)
    atomically(path, lambda temporary: figure.savefig(temporary, dpi=110))


def _of_panel(rows: Sequence[Row], mode: Mode, panel: tuple[str, int, bool]) -> list[Row]:
    return [r for r in rows if r.mode == mode and (r.case.dtype, r.case.head_dim, r.case.causal) == panel]


def _length(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens >= 1024 and tokens % 1024 == 0 else str(tokens)


def _group(case: Case) -> str:
    """The name of a case's group of bars: its length, and its heads where query heads share a key head."""
    length = _length(case.seqlen_q)
    return length if case.heads_q == case.heads_k else f"{length}\nH {case.heads_q}/{case.heads_k}"


def _groups(rows: Sequence[Row]) -> list[str]:
    ordered = sorted({row.case for row in rows}, key=lambda c: (c.heads_q != c.heads_k, c.seqlen_q))
    return list(dict.fromkeys(map(_group, ordered)))


def _draw_panel(axes: Axes, rows: Sequence[Row], providers: Sequence[str], scale: float) -> None:
    groups = _groups(rows)
    width = 0.85 / max(1, len(providers))
    for index, provider in enumerate(providers):
        cool, hot = (
            {
                groups.index(_group(row.case)) + (index - (len(providers) - 1) / 2) * width: rate / scale
                for row in rows
                if row.provider == provider and (rate := row.flops_per_second(pace)) is not None
            }
            for pace in PACES
        )
        label = PROVIDERS[provider].title if provider in PROVIDERS else provider
        bars = axes.bar(list(cool), list(cool.values()), width * 0.95, label=label, color=_COLORS[index % len(_COLORS)])
        axes.bar_label(bars, fmt="%.0f", fontsize=6, padding=1)
        left, right = ([at + side * width * 0.475 for at in hot] for side in (-1, 1))
        label = "on a hot GPU" if hot and provider == providers[-1] else ""
        axes.hlines(list(hot.values()), left, right, color="black", linewidth=1, label=label)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_xlabel("sequence length")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(y=0.12)
