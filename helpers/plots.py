"""The suite's figures: white face, seaborn's colour-blind palette, a marker or label wherever colour has a meaning."""

from itertools import cycle

import matplotlib.pyplot as plt
import numpy as np
import seaborn as sns
from IPython.display import display
from matplotlib.ticker import MaxNLocator

PALETTE = "colorblind"  # seaborn's; every figure of the suite takes its colours from here


def _axes(title, width=7.0, height=3.0):
    with sns.axes_style("white"):
        _, axes = plt.subplots(figsize=(width, height), layout="constrained", facecolor="white")
    axes.set_title(title, loc="left")
    sns.despine(ax=axes)
    return axes


def _show(figure, what, values):
    """Show the figure, stored with a text for whoever cannot see it: what it draws, and a number or words a name."""
    words = {name: value if isinstance(value, str) else f"{value:,.3g}" for name, value in values.items()}
    alt = f"{what}: {'; '.join(f'{name} {value}' for name, value in words.items())}."
    display(figure, metadata={"image/png": {"alt": alt}})
    plt.close(figure)


def _mark(axes, marks):
    for text, place in marks.items():
        axes.axvline(place, color="black", linewidth=1, linestyle="--")
        axes.annotate(f" {text}", (place, 1), xycoords=("data", "axes fraction"), va="top")


def bars(values, title, unit, low=None, high=None, reference=None):
    """Horizontal bars of a Series, each labelled with its number; `low` and `high` (Series) add intervals.

    `reference` draws a vertical line, 1 for instance where the values are ratios. A bar whose interval contains it has
    decided nothing: it is grey and hatched.

    Examples
    --------
    >>> import pandas as pd
    >>> bars(pd.Series({"FP32": 1.0, "bf16": 1.6}), "Speed of a step", "FP32 = 1")  # doctest: +SKIP
    """
    axes = _axes(title, height=0.9 + 0.45 * len(values))
    colors, hatches = sns.color_palette(PALETTE, len(values)), None
    words = {name: f"{value:,.3g}" for name, value in values.items()}
    if low is not None and reference is not None:
        undecided = (low <= reference) & (reference <= high)
        colors = ["0.75" if grey else colors[0] for grey in undecided]
        hatches = ["//" if grey else "" for grey in undecided]
        words = {name: f"{words[name]}, from {low[name]:,.3g} to {high[name]:,.3g}" for name in words}
        unit += f"; grey: the interval contains {reference:g}" if undecided.any() else ""
    error = None if low is None else [(values - low).clip(lower=0), (high - values).clip(lower=0)]
    axes.barh(values.index, values, color=colors, hatch=hatches, xerr=error, capsize=4, height=0.65, edgecolor="white")
    ends = values if high is None else high
    for row, (value, end) in enumerate(zip(values, ends)):
        axes.annotate(f"{value:,.3g}", (end, row), xytext=(6, 0), textcoords="offset points", va="center")
    if reference is not None:
        axes.axvline(reference, color="black", linewidth=1, linestyle="--")
    axes.set(xlabel=unit, xlim=(0, 1.15 * max(ends)))
    axes.invert_yaxis()
    _show(axes.figure, f"Bar chart: {title}. {unit}", words)


def stacked_bars(table, title, unit):
    """One horizontal bar a row of `table`, made of its columns; hatched so that grey print tells them apart."""
    axes = _axes(title, height=1.3 + 0.45 * len(table))
    left = 0 * table.iloc[:, 0]
    for column, color, hatch in zip(table, cycle(sns.color_palette(PALETTE)), cycle(["", "//", "..", "xx", "--"])):
        axes.barh(table.index, table[column], left=left, color=color, hatch=hatch, edgecolor="white", label=column)
        left = left + table[column]
    for row, total in enumerate(left):
        axes.annotate(f"{total:,.3g}", (total, row), xytext=(6, 0), textcoords="offset points", va="center")
    axes.set(xlabel=unit, xlim=(0, 1.15 * left.max()))
    axes.invert_yaxis()
    axes.figure.legend(frameon=False, ncols=table.shape[1], loc="outside lower center")
    _show(axes.figure, f"Stacked bars of {', '.join(table)}: {title}. {unit} in all", left)


def curves(table, x, y, by, title, log2=(), log10=(), step=False, from_zero=True):
    """One line with its own marker for each value of column `by`: the mean of `y`, in a band from min to max.

    log2, log10: lists of the columns whose axes are logarithmic. step: the value holds until the next row's.
    from_zero: the linear y axis begins at 0.
    """
    if table.empty:
        print(f"{title}: nothing to draw")
        return
    axes = _axes(title, height=3.6)
    style = {"hue": by, "style": by, "markers": True, "dashes": False, "palette": PALETTE}
    extremes = lambda values: (values.min(), values.max())
    sns.lineplot(table, x=x, y=y, errorbar=extremes, drawstyle="steps-post" if step else "default", ax=axes, **style)
    axes.legend(frameon=False)
    for column, axis, scale in ((x, axes.xaxis, axes.set_xscale), (y, axes.yaxis, axes.set_yscale)):
        if column in (*log2, *log10):
            scale("log", base=2 if column in log2 else 10)
        elif axis is axes.yaxis and from_zero:
            axes.set_ylim(bottom=0)
        elif axis is axes.xaxis:
            axis.set_major_locator(MaxNLocator(integer=True))
    means = table.groupby([by, x], sort=False)[y].mean().groupby(by, sort=False)
    ends = means.agg(lambda line: f"from {line.iloc[0]:,.3g} to {line.iloc[-1]:,.3g}")
    _show(axes.figure, f"Line chart: {title}. {y} over {x}", ends)


def histogram(values, title, x, edges, marks=None):
    """How many of `values` lie between each two of `edges`, along an axis called `x`.

    marks: {text: place on the axis} of dashed vertical lines.
    """
    axes = _axes(title)
    counts, *_ = axes.hist(values, edges, color=sns.color_palette(PALETTE)[0])
    _mark(axes, marks or {})
    axes.set(xlabel=x, ylabel="how many")
    if marks:
        axes.margins(y=0.15)  # room for their names above the bars
    fullest = counts.argmax()
    most = {"most": f"{counts[fullest]:,.0f} around {np.mean(edges[fullest : fullest + 2]):,.3g}"}
    _show(axes.figure, f"Histogram: {title}. How many by {x}", most | (marks or {}))


def ranges(table, title, x, y):
    """A horizontal line a row, at height `precision`, over the columns `subnormal` (dotted), `normal` and `max`.

    Axes are called `x` and `y`, both logarithmic; rows are named by the index.
    """
    axes = _axes(title, height=3.8)
    for row, color, marker in zip(table.itertuples(), cycle(sns.color_palette(PALETTE)), cycle("os^DvPX")):
        axes.plot([row.subnormal, row.normal], [row.precision] * 2, ":", color=color, linewidth=2)
        axes.plot([row.normal, row.max], [row.precision] * 2, color=color, marker=marker, linewidth=3)
        axes.annotate(row.Index, (row.max, row.precision), xytext=(0, 6), textcoords="offset points", ha="right")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set(xlabel=x, ylabel=y, ylim=(0.8 * table.precision.min(), 1.4 * table.precision.max()))
    axes.set_yticks(table.precision, table.precision.astype(int))
    axes.minorticks_off()
    spans = {row.Index: f"{row.precision:.0f} from {row.subnormal:.3g} to {row.max:.3g}" for row in table.itertuples()}
    _show(axes.figure, f"A line a format: {title}. {y} and {x}", spans)


def points(table, x, by, title):
    """One dot a row of `table` at column `x`, in one line for each value of column `by`, with the mean as a bar."""
    if table.empty:
        print(f"{title}: nothing to draw")
        return
    axes = _axes(title, height=0.9 + 0.6 * table[by].nunique())
    sns.stripplot(table, x=x, y=by, hue=by, palette=PALETTE, jitter=0.2, alpha=0.7, legend=False, ax=axes)
    means = table.groupby(by, sort=False)[x].mean()
    axes.scatter(means, means.index, marker="|", s=500, color="black", zorder=3)
    axes.set(ylabel="", ylim=(table[by].nunique() - 0.5, -0.5))
    _show(axes.figure, f"Dots and their mean: {title}. mean {x}", means)


def images(pictures, captions):
    """A row of pictures, tensors of shape (3, height, width) in [0, 1], each under its caption."""
    size = (1.3 * len(pictures), 1.6)
    _, grid = plt.subplots(1, len(pictures), figsize=size, layout="constrained", facecolor="white", squeeze=False)
    for axes, picture, caption in zip(grid[0], pictures, captions):
        axes.imshow(picture.permute(1, 2, 0).numpy(force=True))
        axes.set_title(caption, fontsize=9)
        axes.axis("off")
    _show(axes.figure, "A row of pictures", dict(enumerate(captions, 1)))


def areas(table, title, x, y, marks):
    """The columns of `table` stacked over its index, the first at the bottom; hatched so that grey print tells them
    apart. `marks` is a dict of places on x by the label that begins there."""
    axes = _axes(title, height=3.6)
    colors = sns.color_palette(PALETTE, table.shape[1])
    drawn = axes.stackplot(table.index, table.T.to_numpy(), colors=colors, labels=table.columns, edgecolor="white")
    for area, hatch in zip(drawn, cycle(["", "//", "..", "xx", "--"])):
        area.set(hatch=hatch, linewidth=0)
    axes.set(xlabel=x, ylabel=y, xlim=(table.index[0], table.index[-1]), ylim=(0, 1.15 * table.sum(axis=1).max()))
    _mark(axes, marks)
    axes.figure.legend(frameon=False, ncols=3, loc="outside lower center")
    total = table.sum(axis=1)
    _show(axes.figure, f"Stacked areas of {', '.join(table)}: {title}. {y} by {x}", {"at most": total.max()} | marks)


def roofline(ops, rates, bandwidth, title):
    """Ops under their roofs: FLOP/s at best over FLOPs a byte, both axes logarithmic; a larger dot takes longer.

    ops: columns flops, bytes, seconds and kind; those without FLOPs are left out. rates: a dict of FLOP/s, a level
    roof each. bandwidth: bytes/s, the slope that all roofs share.
    """
    axes = _axes(title, height=4.2)
    ops = ops[ops.flops > 0]
    ops = ops.assign(intensity=ops.flops / ops.bytes, rate=ops.flops / ops.seconds / 1e12)
    span = np.geomspace(ops.intensity.min() / 2, 2 * max(*ops.intensity, *(r / bandwidth for r in rates.values())), 200)
    for (label, rate), style in zip(rates.items(), cycle(["-", "--", ":"])):
        axes.plot(span, np.minimum(rate, span * bandwidth) / 1e12, color="black", linestyle=style, label=label)
    look = {
        "hue": "kind",
        "style": "kind",
        "size": "seconds",
        "sizes": (15, 250),
        "palette": PALETTE,
        "alpha": 0.7,
    }
    sns.scatterplot(ops, x="intensity", y="rate", legend=False, ax=axes, zorder=3, **look)
    sns.scatterplot(ops.drop_duplicates("kind"), x="intensity", y="rate", ax=axes, **(look | {"size": None}))
    axes.set(xscale="log", yscale="log", xlabel="FLOPs a byte", ylabel="TFLOP/s at best")
    axes.legend(frameon=False, loc="lower right", fontsize=9)
    dots = {"dots": ", ".join(ops.kind.unique())}
    roofs = {label: rate / 1e12 for label, rate in rates.items()}
    _show(axes.figure, f"Roofline: {title}. TFLOP/s over FLOPs a byte", roofs | dots)
