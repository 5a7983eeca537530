"""The suite's figures, in one language.

A format, a kind of memory and a fate of a number have one colour each, everywhere. A title says
what is found, lines are named at their ends, and light and dark pages both do.
"""

import base64
import html
import io
import re
import textwrap
from collections.abc import Sequence
from itertools import cycle

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from IPython.display import display
from matplotlib.patheffects import withStroke
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
from numpy.typing import ArrayLike

# Of middling lightness, for white and black pages; markers help colour-blind readers.
COLORS = {
    # number formats
    "fp32": "#3b78c2",
    "tf32": "#2e9bd6",
    "bf16": "#159a80",
    "fp16": "#d9772b",
    "fp8": "#c2559d",
    "fp6": "#8f8a2f",
    "fp4": "#9a7b4f",
    # kinds of memory
    "activations": "#4f9d9a",
    "autocast's copies": "#5a6fb0",
    "weights": "#8a8d99",
    "gradients": "#b077b5",
    "optimizer": "#c0962f",
    "images": "#a9a9a9",
    # fates of a number
    "becomes 0": "#d8402f",
    "subnormal": "#c99a10",
    "normal": "#3a9d4b",
    "overflows": "#8e63c7",
}
# What arms, dtypes and columns are called; of two names in one, the first in this list counts.
NAMES = {"tf32": "tf32", "bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16"}
NAMES |= {"AMP": "fp16", "fp32": "fp32", "float32": "fp32"}
NAMES |= {"fp8": "fp8", "e4m3": "fp8", "e5m2": "fp8"}
NAMES |= {"fp6": "fp6", "e3m2": "fp6", "e2m3": "fp6", "fp4": "fp4", "e2m1": "fp4"}
NAMES |= {name: name for name in COLORS}
NAMES |= {"momentum": "optimizer", "not worse": "normal", "worse": "becomes 0"}
NEUTRAL = "#767676"  # all else, and text; an arm that has decided nothing
_in_style = plt.rc_context(  # around each function that draws
    {
        "axes.edgecolor": NEUTRAL,
        "axes.labelcolor": NEUTRAL,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "text.color": NEUTRAL,
        "xtick.color": NEUTRAL,
        "ytick.color": NEUTRAL,
        "figure.titlesize": 12,
        "figure.titleweight": "bold",
        "figure.dpi": 100,  # of the page: the picture has twice as many
        "hatch.linewidth": 0.6,
    }
)


def color_of(name: object) -> str:
    """The colour of whatever `name` tells of: a format, a kind of memory, a fate; else grey.

    Examples
    --------
    >>> color_of("fp16 + GradScaler") == COLORS["fp16"], color_of("FP32 (TF32)") == COLORS["tf32"]
    (True, True)
    """
    name = str(name)
    for word, kind in NAMES.items():
        if word in name or word in name.lower():
            return COLORS[kind]
    return NEUTRAL


def _axes(title, height=3.0, **grid):
    figure, axes = plt.subplots(figsize=(7.0, height), layout="constrained", **grid)
    figure.suptitle(textwrap.fill(title, 66), x=0.01, ha="left")  # from the figure's left edge
    return axes


def _show(figure, what, values, compared=None):
    """Show the figure, at twice the page's resolution, with a text for whoever cannot see it.

    The text says what it draws, and a number or words for each name. nbval compares `compared`, or
    else `values`, each number to one digit, as what was trained differs between CPUs.
    """
    words = {}
    for name, value in values.items():
        words[name] = value if isinstance(value, str) else f"{value:,.3g}"
    alt = f"{what}: {'; '.join(f'{name} {value}' for name, value in words.items())}."
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=2 * figure.dpi, transparent=True)
    width, height = (round(figure.dpi * inches) for inches in figure.get_size_inches())
    compared = words if compared is None else compared
    drawn = "; ".join(f"{name} {_to_one_digit(value)}" for name, value in compared.items())
    picture = base64.b64encode(file.getvalue()).decode()
    facts = {"alt": alt, "width": width, "height": height}
    data = {"image/png": picture, "text/plain": f"<Figure>\n{drawn}"}
    display(data, metadata={"image/png": facts}, raw=True)
    plt.close(figure)


def _to_one_digit(words):
    number = r"\d[\d,]*(\.\d+)?(e[-+]\d+)?"
    return re.sub(number, lambda found: f"{float(found[0].replace(',', '')):.1g}", words)


def _mark(axes, text, place):
    """A dashed vertical line at a place on x, with words above; seen on bars and on dark pages."""
    axes.axvline(place, color="#333333", gapcolor="white", linewidth=1, linestyle="--")
    above = {"textcoords": "offset points", "ha": "center", "va": "bottom"}
    axes.annotate(text, (place, 1), (0, 2), ("data", "axes fraction"), **above)


def _mark_powers(axes):
    """Ticks of logarithmic axes at powers of their base, at most nine; short ones written out."""
    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() == "log":
            base = axis.get_transform().base
            low, high = axis.get_view_interval()
            short = base == 10 and high / low < 100
            axis.set_major_locator(LogLocator(base, (1, 2, 5) if short else (1,), numticks=9))
            axis.set_minor_locator(NullLocator())
            if short or (low >= 0.001 and high <= 20_000):
                axis.set_major_formatter("{x:g}")


def _shade(axes, regions):
    """Regions of x, `{text: (from, to)}`, in the colour of what becomes of numbers there."""
    for text, (start, end) in regions.items():
        axes.axvspan(start, end, color=color_of(text), alpha=0.15, linewidth=0)
        middle = np.sqrt(start * end) if axes.get_xscale() == "log" else (start + end) / 2
        place = {"xycoords": ("data", "axes fraction"), "ha": "center", "va": "top"}
        axes.annotate(text, (middle, 0.97), color=NEUTRAL, **place)


def _name_ends(axes, lines):
    """The name of each line in its colour, right of its end, `{name: (x, y)}`.

    Names that would touch move apart.
    """
    axes.autoscale_view()  # now, or a later change of the limits moves the lines away
    place = (axes.transData - axes.transAxes).transform
    ends = {name: place((axes.convert_xunits(x), y)) for name, (x, y) in lines.items()}
    last = max(x for x, _ in ends.values())
    above = -np.inf
    for name, (x, y) in sorted(ends.items(), key=lambda end: end[1][1]):
        above = max(y, above + 0.25 / axes.figure.get_figheight())
        at = {"xy": (1.01, above), "va": "center"}
        if x < last:
            at = {"xy": (x + 0.01, above), "va": "top"}
        look = {"color": color_of(name), "annotation_clip": False}
        axes.annotate(name, xycoords="axes fraction", **look, **at)


def _name_peaks(axes, lines):
    """A dot at the largest number of each line, `{name: Series}`, with its name and number."""
    late = 0.75 * max(axes.get_xlim())  # there is no room on the right of later ones
    for name, line in lines.items():
        peak = (line.idxmax(), line.max())
        color = color_of(name)
        axes.plot(*peak, "o", color=color)
        at = {"xytext": (0, 5), "ha": "center"}
        if peak[0] >= late:
            at = {"xytext": (-7, -3), "ha": "right"}
        words = f"{name}: {peak[1]:,.3g}"
        axes.annotate(words, peak, textcoords="offset points", color=color, **at)


@_in_style
def bars(
    values: pd.Series,
    title: str,
    unit: str,
    low: pd.Series | None = None,
    high: pd.Series | None = None,
    reference: float | pd.Series | None = None,
    named: str = "",
    kinds: Sequence[str] | None = None,
) -> None:
    """Horizontal bars of a Series, each labelled with its number; `low` and `high` add intervals.

    A bar that names a format has its colour; `kinds`, a word per bar, says otherwise what each is.
    `reference` draws a vertical line, `named` so, or as a Series a tick on each bar. An interval
    that contains it decided nothing, and its bar is hatched.

    Examples
    --------
    >>> speed = pd.Series({"FP32": 1.0, "bf16": 1.6})
    >>> bars(speed, "bf16 is more than half as fast again", "FP32 = 1")  # doctest: +SKIP
    """
    axes = _axes(title, 0.9 + 0.42 * len(values))
    colors = [color_of(kind) for kind in (values.index if kinds is None else kinds)]
    colors = [color.replace(NEUTRAL, "#9a9a9a") for color in colors]
    numbers = values.map("{:,.3g}".format)
    words = numbers
    ends = values
    look = {"height": 0.65, "capsize": 4, "ecolor": "#333333", "edgecolor": "white", "linewidth": 0}
    if low is not None:
        words = numbers + low.map(", from {:,.3g}".format) + high.map(" to {:,.3g}".format)
        ends = high
        look["xerr"] = [(values - low).clip(lower=0), (high - values).clip(lower=0)]
        if reference is not None:
            undecided = (low <= reference) & (reference <= high)
            colors = ["0.75" if grey else color for grey, color in zip(undecided, colors)]
            look["hatch"] = ["//" if grey else "" for grey in undecided]
            holds = "its tick" if isinstance(reference, pd.Series) else f"{reference:g}"
            unit += f"; hatched: the interval contains {holds}" if undecided.any() else ""
    drawn = axes.barh(values.index, values, color=colors, **look)
    halo = [withStroke(linewidth=3, foreground="white")]  # seen on bars and dark pages
    for part in drawn.errorbar.get_children() if drawn.errorbar else ():
        part.set_path_effects(halo)
    furthest = max(ends)
    if isinstance(reference, pd.Series):
        axes.scatter(reference, values.index, marker="|", s=700, c="#333333", path_effects=halo)
    elif reference is not None:
        _mark(axes, named, reference)
    if reference is not None:
        furthest = max(furthest, np.max(reference))
    for row, (number, end) in enumerate(zip(numbers, ends)):
        axes.annotate(number, (end, row), (6, 0), textcoords="offset points", va="center")
    axes.set(xlabel=textwrap.fill(unit, 56), xlim=(0, 1.15 * furthest))
    axes.invert_yaxis()
    # The middle of an interval differs less between CPUs than its ends.
    _show(axes.figure, f"Bar chart: {title}. {unit}", words, compared=numbers)


@_in_style
def stacked_bars(table: pd.DataFrame, title: str, unit: str) -> None:
    """One horizontal bar per row of `table`, made of its columns, in colours and hatches."""
    axes = _axes(title, 1.3 + 0.42 * len(table))
    totals = table.sum(axis=1)
    left = 0
    greys = cycle(["#5f5f5f", "#9a9a9a", "#7c7c7c", "#b8b8b8"])
    for column, hatch in zip(table, cycle(["", "//", "..", "xx", "--"])):
        color = color_of(column)
        color = next(greys) if color == NEUTRAL else color
        look = {"color": color, "hatch": hatch, "edgecolor": "white", "linewidth": 0}
        drawn = axes.barh(table.index, table[column], 0.65, left, label=column, **look)
        left = left + table[column]
    axes.bar_label(drawn, totals.map("{:,.3g}".format), padding=6)
    axes.set(xlabel=unit, xlim=(0, 1.15 * max(totals)))
    axes.invert_yaxis()
    axes.figure.legend(frameon=False, ncols=table.shape[1], loc="outside lower center")
    sums = table.map("{:,.3g}".format).agg(" + ".join, axis=1) + totals.map(" = {:,.3g}".format)
    _show(axes.figure, f"Stacked bars of {', '.join(table)}: {title}. {unit}", sums)


@_in_style
def curves(
    table: pd.DataFrame,
    x: str,
    y: str,
    by: str,
    title: str,
    log2: Sequence[str] = (),
    log10: Sequence[str] = (),
    from_zero: bool = True,
    shade: dict[str, tuple[float, float]] | None = None,
    peaks: bool = False,
) -> None:
    """One line for each value of column `by`: the mean of `y`, in a band from min to max.

    A line's name stands at its end, or with `peaks` beside a dot at its largest mean. Few points
    get markers. `x` may hold words. log2, log10: the columns whose axes are logarithmic. from_zero:
    the linear y axis begins at 0. shade: `{what happens there: (from, to)}` on x.
    """
    if table.empty:
        print(f"{title}: nothing to draw")
        return
    axes = _axes(title, 3.6)
    numeric = pd.api.types.is_numeric_dtype(table[x])
    marked = table[x].nunique() <= 30
    looks = zip(cycle(["-", "--", ":", "-."]), cycle("oXsPDv"))
    means = {}
    for (name, rows), (style, marker) in zip(table.groupby(by, sort=False), looks):
        values = rows.groupby(x, sort=False)[y].agg(["mean", "min", "max"])
        means[name] = values["mean"]
        values = values.sort_index().dropna() if numeric else values.dropna()
        color = color_of(name)
        look = {"color": color, "linestyle": style, "marker": marker if marked else None}
        axes.plot(values.index, values["mean"], markeredgewidth=0, **look)
        band = {"color": color, "alpha": 0.2, "linewidth": 0}
        axes.fill_between(values.index, values["min"], values["max"], **band)
    logs = dict.fromkeys(log2, 2) | dict.fromkeys(log10, 10)
    if x in logs:
        axes.set_xscale("log", base=logs[x])
    elif numeric:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    if y in logs:
        axes.set_yscale("log", base=logs[y])
    _shade(axes, shade or {})
    _mark_powers(axes)
    if shade:
        axes.margins(y=0.15)  # room for the words
    if from_zero and y not in logs:
        axes.set_ylim(bottom=0)
    several = table.groupby([by, x])[y].nunique().max() > 1
    axes.set(xlabel=x, ylabel=f"{y}\nmean and range of the runs" if several else y)
    words = {}
    for name, line in means.items():
        words[name] = f"from {line.iloc[0]:,.3g} to {line.iloc[-1]:,.3g}"
    if peaks:
        words = {name: line.max() for name, line in means.items()}
        _name_peaks(axes, means)
    elif len(means) > 1:
        ends = {name: line.dropna() for name, line in means.items()}
        _name_ends(axes, {name: (line.index[-1], line.iloc[-1]) for name, line in ends.items()})
    compared = dict.fromkeys(means, "of several runs") if several else None  # CPUs differ in these
    _show(axes.figure, f"Line chart: {title}. {y} over {x}", words, compared)


@_in_style
def histogram(
    values: ArrayLike,
    title: str,
    x: str,
    edges: ArrayLike,
    shade: dict[str, tuple[float, float]] | None = None,
) -> None:
    """How many of `values` lie between each two of `edges`, along an axis called `x`.

    shade: `{what becomes of them: (from, to)}`, whose colour the bars there have.
    """
    axes = _axes(title)
    shade = shade or {}
    counts, _, drawn = axes.hist(values, edges, color=NEUTRAL)
    for text, (start, end) in shade.items():
        for bar in drawn:
            if start <= bar.get_x() < end:
                bar.set(color=color_of(text))
    _shade(axes, shade)
    axes.set(xlabel=x, ylabel="how many", xlim=(edges[0], edges[-1]))
    axes.margins(y=0.2 if shade else 0.05)  # room for the words above the bars
    fullest = counts.argmax()
    middle = np.mean(edges[fullest : fullest + 2])
    words = {"most": f"{counts[fullest]:,.0f} around {middle:,.3g}"}
    for text, (start, end) in shade.items():
        words[text] = f"from {start:,.3g} to {end:,.3g}"
    _show(axes.figure, f"Histogram: {title}. How many by {x}", words)


@_in_style
def ranges(
    table: pd.DataFrame,
    title: str,
    x: str,
    over: dict[str, tuple[float, float]] | None = None,
) -> None:
    """A row per format: a bar from the smallest normal number to the largest, and a thin one down
    to the smallest subnormal.

    table: columns `subnormal`, `normal`, `max` and `says`, which is written beside the row. over:
    `{words: (from, to)}`, numbers that should fit, drawn behind the rows.
    """
    axes = _axes(title, 1.3 + 0.38 * len(table))
    for text, (start, end) in (over or {}).items():
        axes.axvspan(start, end, color=NEUTRAL, alpha=0.2, linewidth=0)
        place = {"xycoords": ("data", "axes fraction"), "ha": "center", "va": "bottom"}
        axes.annotate(text, (np.sqrt(start * end), 1), **place)
    spans = {}
    for row, each in enumerate(table.itertuples()):
        color = color_of(each.Index)
        axes.plot([each.subnormal, each.normal], [row, row], color=color, linewidth=3)
        thick = {"linewidth": 11, "solid_capstyle": "butt"}
        axes.plot([each.normal, each.max], [row, row], color=color, **thick)
        place = {"xytext": (6, 0), "textcoords": "offset points", "va": "center"}
        axes.annotate(each.says, (each.max, row), color=color, **place)
        spans[each.Index] = f"{each.says}, from {each.subnormal:.3g} to {each.max:.3g}"
    axes.set_yticks(range(len(table)), table.index)
    axes.set_xscale("log", base=2)
    axes.set(xlabel=x, ylim=(len(table) - 0.4, -1))
    _mark_powers(axes)
    _show(axes.figure, f"A row a format: {title}. {x}", spans)


@_in_style
def points(table: pd.DataFrame, x: str, by: str, title: str, reference: float, named: str) -> None:
    """One dot per row of `table` at column `x`, in one line for each value of column `by`.

    A tall mark is the mean, and a vertical line stands at `reference`, `named` so.
    """
    axes = _axes(title, 0.9 + 0.5 * table[by].nunique())
    random = np.random.default_rng(0)
    means = {}
    for row, (name, values) in enumerate(table.groupby(by, sort=False)[x]):
        heights = row + random.uniform(-0.2, 0.2, len(values))
        axes.scatter(values, heights, color=color_of(name), alpha=0.7, linewidths=0)
        means[name] = values.mean()
    axes.scatter(means.values(), range(len(means)), marker="|", s=500, color=NEUTRAL)
    _mark(axes, named, reference)
    axes.set_yticks(range(len(means)), means)
    axes.set(xlabel=f"{x}; tall mark: the mean", ylim=(len(means) - 0.5, -0.5))
    _show(axes.figure, f"Dots and their mean: {title}. mean {x}", means)


@_in_style
def pictures(rows: dict[str, torch.Tensor], title: str) -> None:
    """Rows of small pictures, `{name of the row: tensor}`, with numbers in [0, 1].

    Of shape (n, height, width) they are drawn black on white, of (n, 3, height, width) in colour.

    Examples
    --------
    >>> pictures({"FP32": torch.rand(10, 8, 8)}, "Ten digits")  # doctest: +SKIP
    """
    count = max(len(row) for row in rows.values())
    shape = {"nrows": len(rows), "ncols": count, "squeeze": False}
    grid = _axes(title, 0.6 + 0.62 * len(rows), **shape)
    words = {}
    for line, (name, row) in zip(grid, rows.items()):
        for axes, picture in zip(line, row):
            picture = picture.permute(1, 2, 0) if picture.ndim == 3 else picture
            axes.imshow(picture.float().numpy(force=True), cmap="gray_r", vmin=0, vmax=1)
        for axes in line:
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
        line[0].set_ylabel(name, rotation=0, ha="right", va="center", color=color_of(name))
        words[name] = f"{len(row)} pictures, mean {row.float().mean():.2f}"
    _show(grid[0, 0].figure, f"Rows of pictures: {title}", words)


@_in_style
def strips(spans: pd.DataFrame, row: str, column: str, title: str) -> None:
    """When a device works in one step and when it rests: a strip for each pair of values of columns
    `row` and `column`, with as much green in each ms as it computes. Where it rests it is grey
    while the loader works, else red.

    spans: also columns `work` ("step", "load" or "compute"), `start` and `end` (ms); each strip has
    one "step".
    """
    rows = spans[row].unique()
    columns = spans[column].unique()
    shape = {"nrows": len(rows), "ncols": len(columns), "squeeze": False}
    grid = _axes(title, 1.2 + 0.6 * len(rows), sharex=True, sharey=True, **shape)
    looks = {"computes": COLORS["normal"], "waits for the loader": "#9a9a9a"}
    looks["waits for launches"] = "#eba79e"
    words = {}
    for (name, how), mine in spans.groupby([row, column], sort=False):
        axes = grid[[*rows].index(name), [*columns].index(how)]
        (_, until), *load = mine.loc[mine.work != "compute", ["start", "end"]].to_numpy()
        busy = mine.loc[mine.work == "compute", ["start", "end"]].to_numpy()
        done = np.append(0, np.repeat(np.diff(busy).cumsum(), 2))[:-1]  # at each start and end
        edges = np.append(np.arange(0, until), until)
        share = np.diff(np.interp(edges, busy.ravel(), done)) / np.diff(edges)
        axes.stairs([1], [0, until], fill=True, color=looks["waits for launches"])
        for span in load:
            axes.stairs([1], span, fill=True, color=looks["waits for the loader"])
        axes.stairs(share, edges, fill=True, color=looks["computes"])
        words[f"{name}, {how}"] = f"{until:.0f} ms, computes {done[-1] / until:.0%}"
        axes.set_title(words[f"{name}, {how}"], loc="left", fontsize=9)
        axes.set(yticks=[], ylim=(0, 1), xlim=(0, spans.end.max()))
        axes.tick_params(bottom=name == rows[-1])
        axes.spines[["left", "bottom"]].set_visible(False)
    for axes, name in zip(grid[:, 0], rows):
        axes.set_ylabel(name, rotation=0, ha="right", va="center")
    for axes, how in zip(grid[-1], columns):
        axes.set_xlabel(f"ms, {how}")
    boxes = [plt.Rectangle((0, 0), 1, 1, color=color, label=text) for text, color in looks.items()]
    axes.figure.legend(handles=boxes, loc="outside lower left", ncols=3, frameon=False)
    _show(axes.figure, f"Strips of a step: {title}", words)


def show(table: pd.DataFrame | pd.Series, digits: int = 3) -> None:
    """Show a table: text to the left, numbers to the right with `digits` significant digits, and no
    index that only counts.

    Examples
    --------
    >>> show(pd.DataFrame({"format": ["fp16"], "largest": [65504.0]}))  # doctest: +SKIP
    """
    table = table.to_frame() if isinstance(table, pd.Series) else table
    table = table.rename_axis(None, axis="columns")
    texts = table.map(_digits, digits=digits)
    sides = ["right" if kind.kind in "iuf" else "left" for kind in table.dtypes]
    tags = ["td"] * texts.shape[1]
    cells = texts
    counted = isinstance(table.index, pd.RangeIndex)
    if not counted:
        names = [name or "" for name in table.index.names]
        sides = ["left"] * len(names) + sides
        tags = ["th"] * len(names) + tags
        cells = texts.reset_index(names=names, allow_duplicates=True)
    lines = [_line(["th"] * len(sides), cells, sides)]
    lines += [_line(tags, row, sides) for row in cells.itertuples(index=False, name=None)]
    page = "\n".join([" ", "<table>", *lines, "</table>"])  # a folded output shows its first line
    display({"text/html": page, "text/plain": texts.to_string(index=not counted)}, raw=True)


def _line(tags, texts, sides):
    """A row of HTML. Each cell has its own style: pages that are not trusted lose a style sheet."""
    look = "vertical-align: top; max-width: 26em; text-align: "
    cells = zip(tags, sides, [html.escape(str(text)) for text in texts])
    row = "".join(f'<{tag} style="{look}{side}">{text}</{tag}>' for tag, side, text in cells)
    return f"<tr>{row}</tr>"


def _digits(cell, digits):
    if isinstance(cell, float) and np.isfinite(cell):
        return f"{cell:,.0f}" if 10**digits <= abs(cell) < 1e9 else f"{cell:,.{digits}g}"
    return f"{cell:,}" if isinstance(cell, int) and not isinstance(cell, bool) else str(cell)
