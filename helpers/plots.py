"""The suite's figures, in one language: a colour for each number format, kind of memory and fate of a number, the same
everywhere; a title that says what is found; lines named at their ends; readable on light pages and on dark ones.
"""

import base64
import html
import io
import re
import textwrap
from itertools import cycle

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from IPython.display import display
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

# Of middling lightness, for white pages and black ones; told apart by colour-blind readers with the markers' help.
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
    # kinds of network
    "vision": "#7a8c2e",
    "language": "#8a5fb5",
    # fates of a number
    "becomes 0": "#d8402f",
    "subnormal": "#c99a10",
    "normal": "#3a9d4b",
    "overflows": "#8e63c7",
}
# What arms, dtypes and columns are called; of two names in one, the first in this list counts.
NAMES = {"tf32": "tf32", "bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "AMP": "fp16"}
NAMES |= {"fp32": "fp32", "float32": "fp32", "fp8": "fp8", "e4m3": "fp8", "e5m2": "fp8", "fp4": "fp4", "e2m1": "fp4"}
NAMES |= {"fp6": "fp6", "e3m2": "fp6", "e2m3": "fp6"}
NAMES |= {name: name for name in COLORS} | {"momentum": "optimizer", "not worse": "normal", "worse": "becomes 0"}
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


def color_of(name):
    """The colour of whatever `name` tells of: a format, a kind of memory, a fate; else the neutral one.

    Examples
    --------
    >>> color_of("fp16 + GradScaler") == COLORS["fp16"], color_of("FP32 (TF32)") == COLORS["tf32"]
    (True, True)
    """
    name = str(name)
    return next((COLORS[NAMES[word]] for word in NAMES if word in name or word in name.lower()), NEUTRAL)


def _colors(names):
    """The colours of parts that lie side by side; those without one of their own take turns in shades of grey."""
    shades = cycle(["#5f5f5f", "#9a9a9a", "#7c7c7c", "#b8b8b8"])
    return [color if color != NEUTRAL else next(shades) for color in map(color_of, names)]


def _axes(title, height=3.0, **grid):
    figure, axes = plt.subplots(figsize=(7.0, height), layout="constrained", **grid)
    figure.suptitle(textwrap.fill(title, 66), x=0.01, ha="left")  # from the figure's left edge
    return axes


def _show(figure, what, values, compared=None):
    """Show the figure, at twice the page's resolution, with a text for whoever cannot see it: what it draws, and a
    number or words a name. nbval compares `compared`, or else these `values`, each number to one digit: in the second
    what was trained differs between CPUs."""
    words = {name: value if isinstance(value, str) else f"{value:,.3g}" for name, value in values.items()}
    alt = f"{what}: {'; '.join(f'{name} {value}' for name, value in words.items())}."
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=2 * figure.dpi, transparent=True)
    width, height = (round(figure.dpi * inches) for inches in figure.get_size_inches())
    compared = words if compared is None else compared
    drawn = "; ".join(f"{name} {_to_one_digit(value)}" for name, value in compared.items())
    picture = {"image/png": base64.b64encode(file.getvalue()).decode(), "text/plain": f"<Figure>\n{drawn}"}
    display(picture, metadata={"image/png": {"alt": alt, "width": width, "height": height}}, raw=True)
    plt.close(figure)


def _to_one_digit(words):
    return re.sub(r"\d[\d,]*(\.\d+)?(e[-+]\d+)?", lambda number: f"{float(number[0].replace(',', '')):.1g}", words)


def _mark(axes, text, place):
    """A dashed vertical line at a place on x, with words above: dark and white, to be seen on bars and pages."""
    axes.axvline(place, color="#333333", gapcolor="white", linewidth=1, linestyle="--")
    axes.annotate(text, (place, 1), (0, 2), ("data", "axes fraction"), "offset points", ha="center", va="bottom")


def _mark_powers(axes):
    """Ticks of logarithmic axes at evenly spaced powers of 2 or 10, at most nine of them; short ones written out."""
    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() == "log":
            base = axis.get_transform().base
            low, high = np.log(axis.get_view_interval()) / np.log(base)
            step = next(step for step in (1, 2, 4, 8, 16, 32, 64) if (high - low) / step <= 9)
            ticks = base ** (step * np.arange(np.ceil(low / step), np.floor(high / step) + 1))
            if len(ticks) < 2 and base == 10:
                ticks = np.outer(10.0 ** np.arange(np.floor(low), np.ceil(high)), [1, 2, 5]).flatten()
                ticks = ticks[(ticks >= base**low) & (ticks <= base**high)]
            axis.set_ticks(ticks)
            if len(ticks) and ticks[0] >= 0.01 and ticks[-1] < 10_000:
                axis.set_major_formatter("{x:g}")
            axes.minorticks_off()


def _shade(axes, regions):
    """Regions of x, `{text: (from, to)}`, in the colour of what becomes of numbers there."""
    for text, (start, end) in regions.items():
        axes.axvspan(start, end, color=color_of(text), alpha=0.15, linewidth=0)
        middle = np.sqrt(start * end) if axes.get_xscale() == "log" else (start + end) / 2
        axes.annotate(text, (middle, 0.97), xycoords=("data", "axes fraction"), ha="center", va="top", color=NEUTRAL)


def _name_ends(axes, lines):
    """The name of each line in its colour, right of its end, `{name: (x, y)}`; names that would touch move apart."""
    axes.autoscale_view()  # now, or a later change of the limits moves the lines away from their names
    place = (axes.transData - axes.transAxes).transform
    ends = {name: place((axes.convert_xunits(x), y)) for name, (x, y) in lines.items()}  # x may be a word
    last = max(x for x, _ in ends.values())
    above = -np.inf
    for name, (x, y) in sorted(ends.items(), key=lambda end: end[1][1]):
        above = max(y, above + 0.25 / axes.figure.get_figheight())
        at = {"xy": (1.01, above), "va": "center"} if x == last else {"xy": (x + 0.01, above), "va": "top"}
        axes.annotate(name, xycoords="axes fraction", color=color_of(name), annotation_clip=False, **at)


@_in_style
def bars(values, title, unit, low=None, high=None, reference=None, named="", kinds=None):
    """Horizontal bars of a Series, each labelled with its number; `low` and `high` (Series) add intervals.

    A bar that names a format has its colour; `kinds`, a word a bar, says otherwise what each is. `reference` draws a
    vertical line, `named` so; an interval that contains it decided nothing, and is hatched. Without intervals it may be
    a Series, with a tick for each bar.

    Examples
    --------
    >>> bars(pd.Series({"FP32": 1.0, "bf16": 1.6}), "bf16 is 1.6 times as fast", "FP32 = 1")  # doctest: +SKIP
    """
    axes = _axes(title, 0.9 + 0.42 * len(values))
    colors = [color.replace(NEUTRAL, "#9a9a9a") for color in map(color_of, values.index if kinds is None else kinds)]
    words = numbers = values.map("{:,.3g}".format)
    ends, error, hatches = values, None, None
    if low is not None:
        words = numbers + low.map(", from {:,.3g}".format) + high.map(" to {:,.3g}".format)
        ends, error = high, [(values - low).clip(lower=0), (high - values).clip(lower=0)]
        if reference is not None:
            undecided = (low <= reference) & (reference <= high)
            colors = ["0.75" if grey else color for grey, color in zip(undecided, colors)]
            hatches = ["//" if grey else "" for grey in undecided]
            unit += f"; hatched: the interval contains {reference:g}" if undecided.any() else ""
    look = {"color": colors, "hatch": hatches, "ecolor": "#333333", "edgecolor": "white", "linewidth": 0}
    drawn = axes.barh(values.index, values, xerr=error, capsize=4, height=0.65, **look)
    halo = [withStroke(linewidth=3, foreground="white")]  # seen on bars and dark pages
    for line in drawn.errorbar.lines[1] + drawn.errorbar.lines[2] if drawn.errorbar else ():
        line.set_path_effects(halo)
    if isinstance(reference, pd.Series):
        axes.scatter(reference, values.index, marker="|", s=700, color="#333333", zorder=3, path_effects=halo)
    elif reference is not None:
        _mark(axes, named, reference)
    inside = [False] * len(values)
    if reference is not None:  # no number on the line, or beyond it
        inside = (ends < reference) & (ends > reference - 0.12 * max(ends))
    for row, (number, end, start, within) in enumerate(zip(numbers, ends, values if low is None else low, inside)):
        place, side, gap = (start, "right", -6) if within else (end, "left", 6)
        look = {"path_effects": halo, "color": "#333333"} if within else {}
        axes.annotate(number, (place, row), (gap, 0), textcoords="offset points", va="center", ha=side, **look)
    furthest = max(ends) if reference is None else max(*ends, np.max(reference))
    axes.set(xlabel=textwrap.fill(unit, 56), xlim=(0, 1.15 * furthest))
    axes.invert_yaxis()
    _show(axes.figure, f"Bar chart: {title}. {unit}", words, numbers)  # the middle of an interval is steadier


@_in_style
def stacked_bars(table, title, unit):
    """One horizontal bar a row of `table`, made of its columns; hatched so that grey print tells them apart."""
    axes = _axes(title, 1.3 + 0.42 * len(table))
    totals, left = table.sum(axis=1), 0
    for column, color, hatch in zip(table, _colors(table), cycle(["", "//", "..", "xx", "--"])):
        look = {"color": color, "hatch": hatch, "edgecolor": "white", "linewidth": 0, "label": column}
        drawn = axes.barh(table.index, table[column], left=left, height=0.65, **look)
        left = left + table[column]
    axes.bar_label(drawn, totals.map("{:,.3g}".format), padding=6)
    axes.set(xlabel=unit, xlim=(0, 1.15 * max(totals)))
    axes.invert_yaxis()
    axes.figure.legend(frameon=False, ncols=table.shape[1], loc="outside lower center")
    sums = table.map("{:,.3g}".format).agg(" + ".join, axis=1) + totals.map(" = {:,.3g}".format)
    _show(axes.figure, f"Stacked bars of {', '.join(table)}: {title}. {unit}", sums)


@_in_style
def curves(table, x, y, by, title, log2=(), log10=(), from_zero=True, shade=None, peaks=False):
    """One line for each value of column `by`: the mean of `y`, in a band from min to max. Its name stands at its end;
    with `peaks`, a dot, name and number stand at its largest mean. Few points get markers. `x` may hold words.

    log2, log10: lists of the columns whose axes are logarithmic. from_zero: the linear y axis begins at 0.
    shade: `{what happens there: (from, to)}` on x.
    """
    if table.empty:
        print(f"{title}: nothing to draw")
        return
    axes = _axes(title, 3.6)
    shade, logs = shade or {}, dict.fromkeys(log2, 2) | dict.fromkeys(log10, 10)
    names = table[by].unique()
    look = {"hue": by, "style": by, "palette": {name: color_of(name) for name in names}}
    look |= {"markers": table[x].nunique() <= 30, "markeredgewidth": 0, "markersize": 7}
    sns.lineplot(table, x=x, y=y, errorbar=("pi", 100), legend=False, ax=axes, **look)
    # Only now: on logarithmic axes seaborn would draw geometric means.
    if x in logs:
        axes.set_xscale("log", base=logs[x])
    elif pd.api.types.is_numeric_dtype(table[x]):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    if y in logs:
        axes.set_yscale("log", base=logs[y])
    _shade(axes, shade)
    _mark_powers(axes)
    means = table.groupby([by, x], sort=False)[y].mean().groupby(by, sort=False)
    if shade:
        axes.margins(y=0.15)  # room for the words
    if from_zero and y not in logs:
        axes.set_ylim(bottom=0)
    several = table.groupby([by, x])[y].nunique().max() > 1
    axes.set(xlabel=x, ylabel=f"{y}\nmean and range of the runs" if several else y)
    words = means.agg(lambda line: f"from {line.iloc[0]:,.3g} to {line.iloc[-1]:,.3g}")
    if peaks:
        words = means.max()
        late = 0.75 * max(axes.get_xlim())  # names of later peaks stand on the left: there is no room on the right
        for name, line in means:
            peak, color = (line.idxmax()[1], line.max()), color_of(name)
            axes.plot(*peak, "o", color=color)
            at = {"xytext": (0, 5), "ha": "center"} if peak[0] < late else {"xytext": (-7, -3), "ha": "right"}
            axes.annotate(f"{name}: {peak[1]:,.3g}", peak, textcoords="offset points", color=color, **at)
    elif len(names) > 1:
        _name_ends(axes, {name: (line.dropna().index[-1][1], line.dropna().iloc[-1]) for name, line in means})
    compared = dict.fromkeys(names, "of several runs") if several else None  # CPUs differ in such means
    _show(axes.figure, f"Line chart: {title}. {y} over {x}", words, compared)


@_in_style
def points(table, x, by, title, reference, named, kind=None):
    """One dot a row of `table` at column `x`, in one line for each value of column `by`, with the mean as a bar,
    and a vertical line at `reference`, `named` so.

    kind: a column whose values have a colour and a marker each, in a legend. Then lines are closer, without means.
    """
    count = table[by].nunique()
    axes = _axes(title, 0.9 + 0.5 * count if kind is None else 1.2 + 0.3 * count)
    means = table.groupby(by, sort=False)[x].mean()
    if kind is None:
        palette = {name: color_of(name) for name in means.index}
        sns.stripplot(table, x=x, y=by, hue=by, palette=palette, jitter=0.2, alpha=0.7, legend=False, ax=axes)
        axes.scatter(means, means.index, marker="|", s=500, color=NEUTRAL, zorder=3)
        axes.set(xlabel=f"{x}; tall mark: the mean")
    else:
        palette = {name: color_of(name) for name in table[kind].unique()}
        sns.scatterplot(table, x=x, y=by, hue=kind, style=kind, palette=palette, s=60, alpha=0.8, ax=axes)
        axes.legend(frameon=False, ncols=len(palette), loc="lower center", bbox_to_anchor=(0.5, 1.02))
        axes.grid(axis="y", color=NEUTRAL, alpha=0.2)
        axes.set(xlabel=x)
    axes.set(ylabel="", ylim=(count - 0.5, -0.5))
    _mark(axes, named, reference)
    _show(axes.figure, f"Dots and their mean: {title}. mean {x}", means)


@_in_style
def pictures(rows, title):
    """Rows of small pictures, `{name of the row: tensor of shape (n, height, width)}` in [0, 1], black on white, or
    (n, 3, height, width) in colour.

    Examples
    --------
    >>> pictures({"FP32": torch.rand(10, 8, 8)}, "Ten digits")  # doctest: +SKIP
    """
    count = max(len(row) for row in rows.values())
    grid = _axes(title, 0.6 + 0.62 * len(rows), nrows=len(rows), ncols=count, squeeze=False)
    for line, (name, row) in zip(grid, rows.items()):
        for axes, picture in zip(line, row):
            picture = picture.permute(1, 2, 0) if picture.ndim == 3 else picture
            axes.imshow(picture.float().numpy(force=True), cmap="gray_r", vmin=0, vmax=1)
        for axes in line:
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
        line[0].set_ylabel(name, rotation=0, ha="right", va="center", color=color_of(name))
    words = {name: f"{len(row)} pictures, mean {row.float().mean():.2f}" for name, row in rows.items()}
    _show(grid[0, 0].figure, f"Rows of pictures: {title}", words)


@_in_style
def strips(spans, row, column, title):
    """When a device works in one step and when it rests: a strip for each value of columns `row` and `column` of a
    DataFrame, with as much green in each ms as it computes. Where it rests it is grey while the loader works, else red.

    spans: also columns `work` ("step", "load" or "compute"), `start` and `end` (ms); each strip has one "step".
    """
    rows, columns, words = spans[row].unique(), spans[column].unique(), {}
    shape = {"nrows": len(rows), "ncols": len(columns), "squeeze": False, "sharex": True, "sharey": True}
    grid = _axes(title, 1.2 + 0.6 * len(rows), **shape)
    looks = {"computes": COLORS["normal"], "waits for the loader": "#9a9a9a", "waits for launches": "#eba79e"}
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
    patches = [plt.Rectangle((0, 0), 1, 1, color=color, label=text) for text, color in looks.items()]
    axes.figure.legend(handles=patches, loc="outside lower left", ncols=3, frameon=False)
    _show(axes.figure, f"Strips of a step: {title}", words)


def show(table, digits=3):
    """Show a DataFrame or a Series as a table: text to the left, numbers to the right with `digits` significant digits,
    no index that only counts.

    Examples
    --------
    >>> show(pd.DataFrame({"format": ["fp16"], "largest": [65504.0]}))  # doctest: +SKIP
    """
    table = table.to_frame() if isinstance(table, pd.Series) else table
    table = table.rename_axis(None, axis="columns")
    texts = table.map(_digits, digits=digits)
    counted = isinstance(table.index, pd.RangeIndex)
    names = [] if counted else [name or "" for name in table.index.names]
    sides = ["left"] * len(names) + ["right" if kind.kind in "iuf" else "left" for kind in table.dtypes]
    cells = texts if counted else texts.reset_index(names=names, allow_duplicates=True)
    tags = ["th"] * len(names) + ["td"] * texts.shape[1]
    lines = [_line(["th"] * len(sides), cells, sides)]
    lines += [_line(tags, row, sides) for row in cells.itertuples(index=False, name=None)]
    page = "\n".join([" ", "<table>", *lines, "</table>"])  # a folded output shows its first line
    display({"text/html": page, "text/plain": texts.to_string(index=not counted)}, raw=True)


def _line(tags, texts, sides):
    """A row of HTML; the style is each cell's own, as pages that are not trusted lose a style sheet."""
    look = "vertical-align: top; max-width: 26em; text-align: "
    cells = zip(tags, sides, [html.escape(str(text)) for text in texts])
    row = "".join(f'<{tag} style="{look}{side}">{text}</{tag}>' for tag, side, text in cells)
    return f"<tr>{row}</tr>"


def _digits(cell, digits):
    if isinstance(cell, float) and np.isfinite(cell):
        return f"{cell:,.0f}" if 10**digits <= abs(cell) < 1e9 else f"{cell:,.{digits}g}"
    return f"{cell:,}" if isinstance(cell, int) and not isinstance(cell, bool) else str(cell)
