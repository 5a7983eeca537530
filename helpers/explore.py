"""Charts with sliders that work without a kernel: in a stored notebook, on the site, on a phone.

Data are computed in Python; the browser only moves them. A chart is stored as Vega-Lite 5, which JupyterLab draws by
itself, beside a picture of its first state for readers that draw no charts.
"""

import base64
import io
import json
import sys

import altair as alt
import numpy as np
import pandas as pd
from IPython.display import display
from PIL import Image

from helpers.formats import FORMATS
from helpers.plots import COLORS, NEUTRAL, color_of

WIDTH = 640
# Instead of vega-embed's own style sheet: the chart shrinks to fit, the inputs stand in columns.
STYLE = """.vega-embed{max-width:760px}.vega-embed svg.marks{max-width:100%;height:auto}
.vega-bindings{display:grid;grid-template-columns:repeat(auto-fill,minmax(17rem,1fr));gap:.3rem 1.5rem;font-size:14px}
.vega-bind label{display:flex;align-items:center;gap:.6em;flex-wrap:wrap}
.vega-bind input[type=range]{flex:1;min-width:6rem}
.vega-bind label>span:last-child{min-width:2.5em;text-align:right}.vega-bind-radio{display:flex;gap:.6em}"""
EMBED = {"actions": False, "renderer": "svg", "defaultStyle": STYLE}
INKED = dict.fromkeys(("labelColor", "titleColor", "domainColor", "tickColor"), NEUTRAL)
CONFIG = {  # the look of helpers.plots
    "background": "transparent",
    "font": "sans-serif",
    "view": {"stroke": None},
    "axis": INKED | {"grid": False, "labelFontSize": 12, "titleFontSize": 13, "titleFontWeight": "normal"},
    "legend": {"labelColor": NEUTRAL, "labelFontSize": 12, "orient": "bottom", "title": None},
    "title": {"color": NEUTRAL, "anchor": "start", "fontSize": 14},
    "text": {"color": NEUTRAL, "fontSize": 15, "align": "left", "baseline": "top"},
    "rule": {"color": NEUTRAL},
}
VEGA_LITE = "application/vnd.vegalite.v5+json"


def show(chart, text):
    """Show an Altair chart whose parameters are all bound to inputs; `text` is for whoever cannot see it.

    On Colab, which does not draw stored charts, Altair's own HTML is shown.

    Examples
    --------
    >>> share = alt.param("share", value=1, bind=alt.binding_range(min=0, max=1))
    >>> dot = alt.Chart(pd.DataFrame({"x": [1]})).mark_point(opacity=alt.expr("share")).add_params(share)
    >>> show(dot, "A dot that fades.")  # doctest: +SKIP
    """
    chart = chart.configure(**CONFIG)
    if "google.colab" in sys.modules:
        display({"text/html": chart.to_html(), "text/plain": text}, raw=True)
        return
    # JupyterLab 4 draws version 5; these charts need nothing newer.
    spec = chart.to_dict() | {"$schema": "https://vega.github.io/schema/vega-lite/v5.json", "description": text}
    data, metadata = {VEGA_LITE: spec, "text/plain": text}, {VEGA_LITE: {"embed_options": EMBED}}
    if picture := _picture(spec):
        width, height = (side // 2 for side in Image.open(io.BytesIO(picture)).size)
        data["image/png"] = base64.b64encode(picture).decode()
        metadata["image/png"] = {"alt": text, "width": width, "height": height}
    display(data, metadata=metadata, raw=True)


def _picture(spec):
    """The chart's first state as PNG, packed tightly; None where vl-convert is not installed: it takes 84 MB."""
    try:
        import vl_convert
    except ImportError:
        return None
    png = vl_convert.vegalite_to_png(spec, vl_version="5.8", scale=2)
    file = io.BytesIO()
    Image.open(io.BytesIO(png)).save(file, "PNG", optimize=True)
    return file.getvalue()


def slider(name, text, values, start):
    """An input that goes through whole numbers from the first of `values` to the last."""
    binding = alt.binding_range(min=min(values), max=max(values), step=values[1] - values[0], name=text)
    return alt.param(name, value=start, bind=binding)


def choice(name, text, options, start, labels=None):
    """An input that offers `options`, shown as `labels`."""
    labels = labels or list(map(str, options))
    return alt.param(name, value=start, bind=alt.binding_radio(options=options, labels=labels, name=text))


def fates(values, scales, title, start=0):
    """A histogram of the nonzero `values` by their power of two, moved by a slider over the `scales`, exponents of 2:
    what fp16 makes of each number has its colour, and the shares that become 0 and that overflow are written out.

    Returns the shares at the first and at the last scale, as a DataFrame: what the slider shows at its ends.
    """
    powers = np.floor(np.log2(np.abs(values[values != 0].double().numpy(force=True)))).astype(int)
    counts = pd.Series(powers).value_counts().sort_index()
    data = pd.DataFrame({"power": counts.index, "count": counts.to_numpy(), "share": counts.to_numpy() / len(powers)})
    k = slider("k", "scale: 2 to the power of ", scales, start)
    names = ["becomes 0", "subnormal", "normal", "overflows"]
    moved = (
        alt.Chart(data)
        .transform_calculate(at="datum.power + k")
        .transform_calculate(
            fate="datum.at < -25 ? 'becomes 0' : datum.at < -14 ? 'subnormal' : datum.at < 16 ? 'normal' : 'overflows'"
        )
    )
    domain = [int(powers.min()), int(powers.max()) + max(scales) + 2]
    bars = moved.transform_calculate(middle="datum.at + 0.5")
    bars = bars.mark_bar(size=WIDTH / (domain[1] - domain[0]) - 1).encode(
        x=alt.X("middle:Q", title="log2 of the scaled gradient", scale=alt.Scale(domain=domain, nice=False)),
        y=alt.Y("count:Q", title="how many", scale=alt.Scale(domain=[0, int(1.15 * counts.max())])),
        color=alt.Color("fate:N", scale=alt.Scale(domain=names, range=[COLORS[name] for name in names])),
    )
    shares = moved.transform_calculate(
        lost="datum.at < -25 ? datum.share : 0", over="datum.at >= 16 ? datum.share : 0"
    ).transform_aggregate(lost="sum(lost)", over="sum(over)")
    says = "'scale 2^' + k + ': lost ' + format(datum.lost, '.1%') + ', overflowed ' + format(datum.over, '.1%')"
    words = shares.transform_calculate(says=says).mark_text(x=4, y=4, fontWeight="bold").encode(text="says:N")
    chart = alt.layer(bars, words).add_params(k).properties(width=WIDTH, height=220, title=title)
    show(chart, f"Histogram with a slider: {title}. The slider multiplies all gradients by a power of two.")
    ends = {f"2^{end}": (powers + end) for end in (scales[0], scales[-1])}
    rows = {name: {"becomes 0": (at < -25).mean(), "overflows": (at >= 16).mean()} for name, at in ends.items()}
    return pd.DataFrame.from_dict(rows, orient="index")


def steps(run, title, interval):
    """GradScaler stepped through a run, by a slider over the rows of `run`, with columns `step`, `scale` (before it),
    `tracker` and `next scale`; `interval` clean steps double the scale. One sentence says what the step did.
    """
    data = run.assign(
        log2=np.log2(run["scale"]), bad=run["next scale"] < run["scale"], up=run["next scale"] > run["scale"]
    )
    data["fate"] = np.where(data.bad, "overflows", "normal")
    clean = "all gradients are finite: the step is taken, clean step " + (data.tracker + 1).astype(str)
    clean += f" of {interval}" + np.where(data.up, ", so the scale doubles", "")
    data["says"] = np.where(data.bad, "a gradient is not finite: the step is skipped, the scale halves", clean)
    data["head"] = (
        "step " + data.step.astype(str) + ": the loss is multiplied by 2^" + data.log2.astype(int).astype(str)
    )
    step = slider("step", "step ", list(data.step), int(data.step.iloc[-1]))
    base = alt.Chart(data[["step", "log2", "fate", "says", "head"]])
    past = base.transform_filter("datum.step <= step")
    x = alt.X("step:Q", scale=alt.Scale(domain=[0, len(data)], nice=False))
    y = alt.Y("log2:Q", title="log2 of the scale", scale=alt.Scale(zero=False))
    names = ["normal", "overflows"]
    color = alt.Color("fate:N", scale=alt.Scale(domain=names, range=[COLORS[name] for name in names]), legend=None)
    line = past.mark_line(interpolate="step-after", color=NEUTRAL, strokeWidth=2).encode(x, y)
    ahead = base.mark_line(interpolate="step-after", color=NEUTRAL, strokeWidth=1, strokeDash=[2, 3]).encode(x, y)
    shape = alt.Shape("fate:N", scale=alt.Scale(domain=names, range=["circle", "triangle-down"]), legend=None)
    dots = past.mark_point(filled=True, size=60, opacity=1).encode(x, y, color=color, shape=shape)
    now = alt.Chart(data[["step", "says", "head"]]).transform_filter("datum.step == step")
    words = [now.mark_text(x=0, y=-44 + 20 * row).encode(text=name) for row, name in enumerate(("head", "says"))]
    chart = alt.layer(ahead, line, dots, *words).add_params(step).properties(width=WIDTH, height=220)
    chart = chart.properties(title=alt.TitleParams(title, offset=8))
    show(chart, f"GradScaler, step by step: {title}. A slider moves the step.")


def drawn_runs(runs, title, start):
    """What networks draw after runs with different loss weights and loss scales, and their losses; two inputs choose
    the run. `runs` maps `(weight, exponent of the scale)` to `(losses, pictures)`: a list, and a tensor of shape
    (n, 8, 8) in [0, 1]. `start` is the first pair.
    """
    rows, curves = [], []
    for (weight, k), (losses, pictures) in runs.items():
        name = f"{weight:g} {k}"
        pixels = (15 * pictures.nan_to_num(1.0).clamp(0, 1)).round().int().permute(1, 0, 2).flatten().tolist()
        end = f"ends at {losses[-1]:.3f}" if np.isfinite(losses[-1]) else "is not finite"
        says = f"weight {weight:g}, scale 2^{k}: the loss {end}"
        rows.append({"run": name, "pixels": "".join(f"{pixel:x}" for pixel in pixels), "says": says})
        every = max(1, len(losses) // 25)
        drawn = [(step, round(losses[step], 4)) for step in range(0, len(losses), every)]
        curves += [(name, step, loss) for step, loss in drawn if np.isfinite(loss)]
    width = 8 * pictures.shape[0]
    weights, scales = (list(dict.fromkeys(pair[place] for pair in runs)) for place in (0, 1))
    weight = choice("weight", "loss weight ", [f"{each:g}" for each in weights], f"{start[0]:g}")
    k = slider("k", "scale: 2 to the power of ", scales, start[1])
    images = alt.LookupData(pd.DataFrame(rows), "run", ["pixels", "says"])
    chosen = alt.Chart(alt.sequence(0, 8 * width, as_="i")).transform_calculate(run="weight + ' ' + k")
    chosen = chosen.transform_lookup("run", images)
    ink = "indexof('0123456789abcdef', substring(datum.pixels, datum.i, datum.i + 1))"
    columns = alt.Scale(domain=list(range(width + len(pictures))))  # with a gap after each picture
    position = {"x": alt.X("x:O", axis=None, scale=columns), "y": alt.Y("y:O", axis=None)}
    grey = alt.Color("ink:Q", scale=alt.Scale(domain=[0, 15], range=["white", "black"]), legend=None)
    x = f"datum.i % {width} + floor(datum.i % {width} / 8)"
    cells = chosen.transform_calculate(ink=ink, x=x, y=f"floor(datum.i / {width})")
    digits = cells.mark_rect().encode(color=grey, **position).properties(width=WIDTH, height=8 * WIDTH // width)
    table = pd.DataFrame(curves, columns=["run", "step", "loss"])
    x = alt.X("step:Q", title=f"step; grey: all {len(runs)} runs, many of them alike")
    y = alt.Y("loss:Q", scale=alt.Scale(domain=[0, max(table.loss) * 1.3], nice=False))
    all_runs = alt.Chart(table).mark_line(opacity=0.15, color=NEUTRAL).encode(x, y, detail="run:N")
    mine = alt.Chart(table).transform_filter("datum.run == weight + ' ' + k")
    line = mine.mark_line(strokeWidth=3, color=color_of("fp16")).encode(x, y)
    words = chosen.transform_filter("datum.i == 0").mark_text(x=120, y=4, fontWeight="bold").encode(text="says:N")
    losses = alt.layer(all_runs, line, words).properties(width=WIDTH, height=160)
    chart = alt.vconcat(digits.properties(title=title), losses).add_params(weight, k)
    show(chart, f"Digits drawn by a trained network, with two inputs: {title}. They choose the loss weight and scale.")


def calculator(parts, cards, title):
    """The memory of a training step at its peak, as backward begins, by five inputs: model, precision, optimizer, batch
    and card.

    `parts`: a DataFrame in GiB, one row a model and precision (index levels `model` and `precision`), with columns
    `weights`, `image` (what each image adds) and `rest` (what else does not grow with the batch). `cards`: a dict of
    GiB that are there for the step. Momentum takes as much as the weights, Adam twice that.
    """
    table = parts.round(5).reset_index().assign(key=lambda rows: rows.model + " " + rows.precision)
    rows = pd.DataFrame({"part": ["weights", "optimizer", "rest", "activations"], "order": range(4)})
    models, precisions = list(dict.fromkeys(table.model)), list(dict.fromkeys(table.precision))
    pick = {
        "model": alt.param("model", value=models[0], bind=alt.binding_select(options=models, name="model ")),
        "precision": choice("precision", "precision ", precisions, precisions[0]),
        "states": choice("states", "optimizer ", [0, 1, 2], 1, ["SGD", "momentum", "Adam"]),
        "batch": slider("batch", "batch ", range(4, 513), 32),
        "card": alt.param("card", value=next(iter(cards)), bind=alt.binding_select(options=list(cards), name="card ")),
    }
    found = alt.LookupData(table, "key", ["weights", "rest", "image"])
    base = alt.Chart(rows).transform_calculate(key="model + ' ' + precision").transform_lookup("key", found)
    size = "datum.part == 'activations' ? batch * datum.image : datum.part == 'optimizer' ? states * datum.weights"
    base = base.transform_calculate(GiB=f"{size} : datum[datum.part]")
    names = list(rows.part)
    colors = alt.Scale(domain=names, range=[color_of(name) for name in names])
    bars = base.mark_bar(height=48).encode(
        x=alt.X("GiB:Q", scale=alt.Scale(domainMin=0)),
        color=alt.Color("part:N", scale=colors, sort=names, legend=alt.Legend(columns=4)),
        order="order:Q",
    )
    total = base.transform_aggregate(total="sum(GiB)").transform_calculate(room=f"({json.dumps(cards)})[card]")
    says = "model + ', ' + precision + ', ' + batch + ' images, ' + card + ': ' + format(datum.total, '.1f') + ' of '"
    says += " + datum.room + ' GiB, ' + (datum.total > datum.room ? 'too much' : 'it fits')"
    words = total.transform_calculate(says=says).mark_text(x=0, y=-18, fontSize=13).encode(text="says:N")
    limit = alt.X("room:Q", title="GiB; dashed: there for the step")
    rule = total.mark_rule(strokeDash=[6, 3], strokeWidth=2).encode(limit)
    chart = alt.layer(bars, rule, words).add_params(*pick.values()).properties(width=WIDTH, height=70)
    chart = chart.properties(title=alt.TitleParams(title, offset=24))
    show(chart, f"A bar of memory with five inputs: {title}. Model, precision, optimizer, batch and card.")


def verdicts(intervals, title, margins, start):
    """What a test of "not worse" says by the number of runs and by its margin, which a slider moves.

    `intervals`: a DataFrame with columns `arm`, `seeds`, `value`, `low` and `high`. `margins`: the slider's values, in
    percent more errors.
    """
    margin = slider("margin", "margin: so many percent more errors ", margins, start)
    names = ["not worse", "undecided", "worse"]
    colors = alt.Scale(domain=names, range=[color_of(name) for name in names])
    limit = alt.Chart(pd.DataFrame({"one": [1]})).transform_calculate(limit="1 + margin / 100")
    line = limit.mark_rule(strokeDash=[6, 3]).encode(y="limit:Q")
    words = limit.transform_calculate(says="'dashed: margin ' + margin + '%'")
    words = words.mark_text(x=WIDTH // 2 - 40, y=0, align="right", fontSize=12).encode(text="says:N")
    panels = []
    for arm, rows in intervals.round(4).groupby("arm", sort=False):
        base = alt.Chart(rows).transform_calculate(
            verdict="datum.high < 1 + margin / 100 ? 'not worse' : datum.low > 1 + margin / 100 ? 'worse' : 'undecided'"
        )
        scale = alt.Scale(domain=[0, int(rows.seeds.max()) + 2], nice=False)  # room for the last interval
        x = alt.X("seeds:Q", title="seeds in each arm", scale=scale)
        y = alt.Y("low:Q", title="errors, FP32 = 1, 90% interval", scale=alt.Scale(zero=False))
        bands = base.mark_rule(strokeWidth=6).encode(x, y, y2="high:Q", color=alt.Color("verdict:N", scale=colors))
        dots = base.mark_point(filled=True, color="black", size=18, opacity=1).encode(x, y="value:Q")
        panel = alt.layer(bands, dots, line, words)
        name = alt.TitleParams(arm, fontWeight="normal")
        panels.append(panel.properties(title=name, width=WIDTH // 2 - 40, height=200))
    chart = alt.hconcat(*panels).resolve_scale(y="shared").add_params(margin)
    chart = chart.properties(title=alt.TitleParams(title, offset=12))
    show(chart, f"Intervals by the number of seeds, with a slider: {title}. The slider moves the margin.")


def step_graph(dtypes, title, start):
    """The tensors of a training step as a chain in rows of three, each in the colour of its dtype; an input chooses how
    the step is taken.

    `dtypes`: a DataFrame of formats' names ("fp32"), one row a tensor in the order of the step, one column a way to
    take it. `start` is the way to begin with.
    """
    place = np.arange(len(dtypes))
    y = place // 3
    x = np.where(y % 2, 2 - place % 3, place % 3)  # every second row runs backwards
    nodes = dtypes.rename_axis("tensor").reset_index().assign(x=x, y=y, name=dtypes.index.str.wrap(16).str.split("\n"))
    nodes = nodes.melt(["tensor", "name", "x", "y"], var_name="way", value_name="dtype")
    turns = np.select([y[1:] > y[:-1], x[1:] > x[:-1]], ["triangle-down", "triangle-right"], "triangle-left")
    arrows = pd.DataFrame({"x": (x[1:] + x[:-1]) / 2, "y": (y[1:] + y[:-1]) / 2, "shape": turns})
    way = choice("way", "the step ", list(dtypes), start)
    used = sorted(set(nodes.dtype))
    at_x = alt.X("left:Q", axis=None, scale=alt.Scale(domain=[-0.5, 2.5]))
    at_y = alt.Y("top:Q", axis=None, scale=alt.Scale(domain=[-0.5, int(y.max()) + 0.5], reverse=True))
    here = {"x": at_x, "y": at_y}
    heads = alt.Chart(arrows).transform_calculate(left="datum.x", top="datum.y")
    heads = heads.mark_point(filled=True, size=160, color=NEUTRAL, opacity=1).encode(
        shape=alt.Shape("shape:N", scale=None), **here
    )
    base = alt.Chart(nodes).transform_filter("datum.way == way")
    corners = {"left": "datum.x - 0.42", "right": "datum.x + 0.42", "top": "datum.y - 0.38", "bottom": "datum.y + 0.38"}
    colors = alt.Scale(domain=used, range=[color_of(name) for name in used])
    boxes = base.transform_calculate(**corners).mark_rect(cornerRadius=6)
    boxes = boxes.encode(x2="right", y2="bottom", color=alt.Color("dtype:N", scale=colors, legend=None), **here)
    middle = base.transform_calculate(left="datum.x", top="datum.y")
    words = {"align": "center", "color": "white", "fontSize": 17}
    names = middle.mark_text(dy=-30, **words).encode(text="name:N", **here)
    types = middle.mark_text(dy=12, fontWeight="bold", **words).encode(text="dtype:N", **here)
    chart = alt.layer(heads, boxes, names, types).add_params(way)
    show(
        chart.properties(width=WIDTH, height=100 * (int(y.max()) + 1), title=title),
        f"The tensors of a training step, coloured by dtype: {title}. An input chooses how the step is taken.",
    )


def walk(paths, unit, title, start):
    """A number that is lowered again and again by one update, exactly and in a format; inputs choose the format, the
    update and how many steps are taken.

    `paths` maps `(format, update)` to the numbers stored after 0, 1, 2 ... steps; an update is an integer, so many
    times `unit`. `start` is the update to begin with.
    """
    formats, updates = (list(dict.fromkeys(pair[place] for pair in paths)) for place in (0, 1))
    first = paths[formats[0], updates[0]]
    low = first[0] - 2 * len(first) * unit * updates[-1]
    rows = [{"key": f"{name} {update}", "path": path} for (name, update), path in paths.items()]
    spacings = {name: FORMATS[name].spacing(low) for name in formats}
    ticks = [(name, np.arange(np.ceil(low / each), first[0] / each + 2) * each) for name, each in spacings.items()]
    ticks = pd.DataFrame(ticks, columns=["format", "number"]).explode("number").astype({"number": float})
    chosen = choice("format", "format ", formats, formats[0])
    update = slider("update", f"update, in 1/{1 / unit:,.0f} ", updates, start)
    steps = slider("steps", "steps ", range(len(first)), len(first) - 1)
    lane = alt.Y("lane:N", title=None, sort=["exact", "stored"])
    # The line is as long as the steps ask for: small updates are seen from near.
    ends = {"domainMin": alt.expr(f"{first[0]} - {2 * len(first)} * update * {unit}")}
    ends["domainMax"] = alt.expr(f"{first[0]} + 2 * update * {unit}")
    scale = alt.Scale(nice=False, zero=False, **ends)
    x = alt.X("number:Q", title="weight", scale=scale, axis=alt.Axis(tickCount=6, format=".4f"))
    color = alt.Color(
        "format:N", scale=alt.Scale(domain=formats, range=[color_of(name) for name in formats]), legend=None
    )
    has = alt.Chart(ticks).transform_filter("datum.format == format").transform_calculate(lane="'stored'")
    has = has.mark_tick(size=34, thickness=1, clip=True).encode(x, lane, color=color)
    base = alt.Chart(alt.sequence(0, len(first), as_="step")).transform_filter("datum.step <= steps")
    base = base.transform_calculate(key="format + ' ' + update", format="format")
    base = base.transform_lookup("key", alt.LookupData(pd.DataFrame(rows), "key", ["path"]))
    base = base.transform_calculate(exact=f"{first[0]} - datum.step * update * {unit}", stored="datum.path[datum.step]")
    dots = base.transform_fold(["exact", "stored"], as_=["lane", "number"])
    fade = alt.condition("datum.step == steps", alt.value(1), alt.value(0.4))
    shape = alt.Shape("lane:N", scale=alt.Scale(range=["diamond", "circle"]), legend=None)
    dots = dots.mark_point(filled=True, size=110, clip=True).encode(x, lane, color=color, shape=shape, opacity=fade)
    now = base.transform_filter("datum.step == steps")
    lost = f"datum.stored == {first[0]} && datum.exact < {first[0]} ? ': every update is lost' : ''"
    says = {
        "sum": f"'w = w - ' + update + ' / {1 / unit:.0f}, ' + steps + ' times'",
        "result": f"'exact ' + format(datum.exact, '.4f') + ', stored ' + format(datum.stored, '.4f') + ({lost})",
    }
    now = now.transform_calculate(**says)
    words = [now.mark_text(x=0, y=-46 + 20 * row).encode(text=f"{name}:N") for row, name in enumerate(says)]
    chart = alt.layer(has, dots, *words).add_params(chosen, update, steps).properties(width=WIDTH, height=120)
    chart = chart.properties(title=alt.TitleParams(title, offset=8))
    show(
        chart, f"A number line with three inputs: {title}. They choose the format, the update and the number of steps."
    )


def timeline(rows, parts, inputs, title):
    """When each part of a machine works, step by step; inputs choose among the machines that were computed.

    `rows`: a DataFrame, one row a busy time, with columns `part`, `work`, `step`, `start` and `end` (ms), and one for
    each of `inputs`, a dict of the words beside the input by column. `parts` are named from top to bottom; the last is
    the device: where it is idle, its line is light red.
    """
    work, device = list(dict.fromkeys(rows.work)), parts[-1]
    chosen = [choice(name, text, list(dict.fromkeys(rows[name])), rows[name].iloc[0]) for name, text in inputs.items()]
    base = alt.Chart(rows.assign(length=rows.end - rows.start))
    base = base.transform_filter(" && ".join(f"datum.{name} == {name}" for name in inputs))
    x = alt.X("start:Q", title="ms", scale=alt.Scale(domain=[0, float(rows.end.max())], nice=False))
    y = alt.Y("part:N", title=None, scale=alt.Scale(domain=parts))
    shades = ["#9a9a9a", "#c4c4c4", COLORS["normal"], "#eba79e"]  # light enough for dark digits
    color = alt.Color("work:N", scale=alt.Scale(domain=[*work, "idle"], range=shades))
    mine = base.transform_filter(f"datum.part == '{device}'")
    mine = mine.transform_aggregate(end="max(end)", first="min(end)", steps="count()", length="mean(length)")
    mine = mine.transform_calculate(start="0", part=f"'{device}'", work="'idle'")
    mine = mine.transform_calculate(pace="(datum.end - datum.first) / (datum.steps - 1)")
    idle = mine.mark_bar().encode(x, y, x2="end:Q", color=color)
    bars = base.mark_bar(stroke="white", strokeWidth=1).encode(x, y, x2="end:Q", color=color)
    middle = base.transform_calculate(start="(datum.start + datum.end) / 2")
    numbers = middle.mark_text(align="center", baseline="middle", fontSize=11, color="black")
    pace = "format(datum.pace, '.1f') + ' ms a step; the device works '"
    mine = mine.transform_calculate(says=f"{pace} + format(datum.length / datum.pace, '.0%') + ' of the time'")
    words = mine.mark_text(x=0, y=-22, fontWeight="bold").encode(text="says:N")
    chart = alt.layer(idle, bars, numbers.encode(x, y, text="step:N"), words).add_params(*chosen)
    chart = chart.properties(width=WIDTH, height=36 * len(parts), title=alt.TitleParams(title, offset=8))
    show(chart, f"When each part of the machine works, with {len(inputs)} inputs: {title}.")
