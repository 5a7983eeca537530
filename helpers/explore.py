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
.vega-bind label>span:last-child{min-width:2.5em;text-align:right}.vega-bind-radio{display:flex;gap:.6em}
.vega-bindings:has([type=search]){display:block}.vega-bind [type=search]{flex:1;font:inherit;padding:.4em}
.vega-embed:has([type=search]){display:flex;flex-direction:column-reverse}"""
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
VIEW = r"::(?:t|_?\w*view|expand|permute|transpose|(?:un)?squeeze|select|slice|split\w*|unbind|alias|detach)\b"
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


def _select(name, options, start):
    """An input that offers `options` in a list to open."""
    return alt.param(name, value=start, bind=alt.binding_select(options=options, name=f"{name} "))


def fates(values, scales, title, start=0, what="gradient"):
    """A histogram of the nonzero `values` by their power of two, moved by a slider over the `scales`, exponents of 2:
    what fp16 makes of each number has its colour, and the shares that become 0 and that overflow are written out.
    Each of them is called a `what`.

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
    domain = [int(powers.min()) + min(*scales, 0), int(powers.max()) + max(scales) + 2]
    bars = moved.transform_calculate(middle="datum.at + 0.5")
    bars = bars.mark_bar(size=WIDTH / (domain[1] - domain[0]) - 1).encode(
        x=alt.X("middle:Q", title=f"log2 of the scaled {what}", scale=alt.Scale(domain=domain, nice=False)),
        y=alt.Y("count:Q", title="how many", scale=alt.Scale(domain=[0, int(1.15 * counts.max())])),
        color=alt.Color("fate:N", scale=alt.Scale(domain=names, range=[COLORS[name] for name in names])),
    )
    shares = moved.transform_calculate(
        lost="datum.at < -25 ? datum.share : 0", over="datum.at >= 16 ? datum.share : 0"
    ).transform_aggregate(lost="sum(lost)", over="sum(over)")
    says = "'scale 2^' + k + ': lost ' + format(datum.lost, '.1%') + ', overflowed ' + format(datum.over, '.1%')"
    words = shares.transform_calculate(says=says).mark_text(x=4, y=4, fontWeight="bold").encode(text="says:N")
    chart = alt.layer(bars, words).add_params(k).properties(width=WIDTH, height=220, title=title)
    show(chart, f"Histogram with a slider: {title}. The slider multiplies all {what}s by a power of two.")
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
    x = alt.X("step:Q", scale=alt.Scale(domain=[-1, len(data)], nice=False))
    y = alt.Y("log2:Q", title="log2 of the scale", scale=alt.Scale(zero=False, padding=8))
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


def calculator(parts, states, cards, title, start):
    """The memory of a training step, a bar for each moment of it, by six inputs: model, precision, optimizer, batch,
    GPUs and card.

    `parts`: a DataFrame in GiB, one row a part, with columns `model`, `precision`, `moment`, `part`, `fixed` (what is
    there anyway) and `each` (what is added for each in the batch), as `footprint.growth` finds them. `states`: a column
    an optimizer, a row a precision: the bytes of its states for each byte of weights. Several GPUs divide all parts but
    "activations" and "autocast's copies". `cards`: a dict of GiB that are there for the step. `start`: a dict of where
    the inputs `model`, `precision`, `batch`, `gpus` and `card` begin.
    """
    names, weights = ["weights", "optimizer", "gradients", "autocast's copies", "activations"], parts.part == "weights"
    held = [parts.assign(optimizer="")]
    for optimizer, ratios in states.items():
        more = parts.precision[weights].map(ratios) * parts.fixed[weights]
        held.append(parts[weights].assign(part="optimizer", optimizer=optimizer, fixed=more, each=0))
    held = pd.concat(held).sort_values("part", key=lambda part: part.map(names.index), kind="stable")
    models, precisions, moments = (list(dict.fromkeys(parts[name])) for name in ("model", "precision", "moment"))
    options = {"model": models, "precision": precisions, "optimizer": list(states)}
    inputs = [_select(name, some, start.get(name, some[0])) for name, some in options.items()]
    inputs += [
        slider("batch", "batch ", range(1, 513), start["batch"]),
        choice("gpus", "GPUs that share (FSDP2) ", [1, 2, 8, 64], start["gpus"]),
        _select("card", list(cards), start["card"]),
    ]
    chosen = "datum.model == model && datum.precision == precision"
    chosen += " && (datum.optimizer == '' || datum.optimizer == optimizer)"
    whole = json.dumps(["activations", "autocast's copies"])
    size = f"(datum.fixed + batch * datum.each) / (indexof({whole}, datum.part) < 0 ? gpus : 1)"
    base = alt.Chart(held.round(5)).transform_filter(chosen).transform_calculate(GiB=size)
    moment = alt.Y("moment:N", sort=moments, title=None)
    colors = alt.Scale(domain=names, range=[color_of(name) for name in names])
    bars = base.transform_calculate(order=f"indexof({json.dumps(names)}, datum.part)").mark_bar(height=34)
    color = alt.Color("part:N", scale=colors, sort=names, legend=alt.Legend(columns=4))
    bars = bars.encode(alt.X("GiB:Q", scale=alt.Scale(domainMin=0)), moment, color, order="order:Q")
    room = f"({json.dumps(cards)})[card]"
    peak = base.transform_aggregate(total="sum(GiB)", groupby=["moment"]).transform_aggregate(peak="max(total)")
    peak = peak.transform_calculate(room=room)
    says = "'batch ' + batch + ', ' + card + ': ' + format(datum.peak, ',.1f') + ' of ' + datum.room + ' GiB, '"
    says += " + (datum.peak > datum.room ? 'too much' : 'it fits')"
    words = peak.transform_calculate(says=says).mark_text(x=0, y=-18, fontSize=13).encode(text="says:N")
    limit = alt.X("room:Q", title="GiB a GPU; dashed: there for the step")
    rule = peak.mark_rule(strokeDash=[6, 3], strokeWidth=2).encode(limit)
    chart = alt.layer(bars, rule, words).add_params(*inputs).properties(width=WIDTH - 110, height=46 * len(moments))
    chart = chart.properties(title=alt.TitleParams(title, offset=24))
    show(chart, f"Bars of memory with six inputs: {title}. Model, precision, optimizer, batch, GPUs and card.")


def step_times(rows, ways, title, start):
    """What a training step's time is made of, a bar for each way to take it, by three inputs: network, card and batch.

    `rows`: a DataFrame with columns `network`, `card`, `batch`, `way`, `kind` (of op, or "idle") and `ms`. `ways` are
    named from top to bottom; the first is what the others are compared with. `start`: where the inputs begin.
    """
    options = {name: list(dict.fromkeys(rows[name])) for name in ("network", "card", "batch", "kind")}
    kinds = options.pop("kind")
    inputs = [_select(name, some, start[name]) for name, some in options.items()]
    filtered = " && ".join(f"datum.{name} == {name}" for name in options)
    base = alt.Chart(rows.round(3)).transform_filter(filtered)
    shades = ["#4f6d8f", "#8fa9c4", "#c4c4c4", "#eba79e"]  # the last as in `timeline`
    color = alt.Color("kind:N", scale=alt.Scale(domain=kinds, range=shades[-len(kinds) :]), sort=kinds)
    y = alt.Y("way:N", title=None, scale=alt.Scale(domain=ways))
    bars = base.transform_calculate(order=f"indexof({json.dumps(kinds)}, datum.kind)").mark_bar(height=30)
    bars = bars.encode(alt.X("ms:Q", title="ms a step"), y, color, order="order:Q")
    totals = rows.groupby([*options, "way"], sort=False).ms.sum().rename("ms").reset_index()
    first = totals[totals.way == ways[0]].drop(columns="way")
    totals = totals.merge(first, on=list(options), suffixes=("", " of the first"))
    says = [
        f"{ms:.3g} ms, {first / ms:.1f} times as fast" for ms, first in zip(totals.ms, totals.pop("ms of the first"))
    ]
    totals["says"] = np.where(totals.way == ways[0], [words.partition(",")[0] for words in says], says)
    ends = alt.Chart(totals).transform_filter(filtered).mark_text(dx=6, baseline="middle", fontSize=13)
    chart = alt.layer(bars, ends.encode(alt.X("ms:Q"), y, text="says:N")).add_params(*inputs)
    chart = chart.properties(width=WIDTH - 180, height=40 * len(ways), title=title)
    show(chart, f"Bars of time with three inputs: {title}. Network, card and batch.")


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


def cast_map(traces, title):
    """Networks op by op, a line for each part, in the order of running. An op has the colour of the dtype that it
    returns, and half the height where that has 16 bits; a triangle before it is an activation that autocast casts.
    Pointing at an op names it; an input chooses the network.

    `traces`: what `autocast.trace_casts` returns, by the name of the network. Views and integers are left out.
    """
    ops = pd.concat([trace.assign(network=name, order=range(len(trace))) for name, trace in traces.items()])
    # "Net.layers.3.attn.proj" belongs to "layers.3", "Net.head.proj" to "head", and "Net" to "Net".
    parts = ops.module.str.extract(r"^(?:\w+\.)?(.*?\.\d+|\w+)")[0]
    ops = ops.assign(part=parts, dtype=ops.output.str.partition(",")[0]).drop(columns=["cast_bytes", "module"])
    ops = ops[ops.dtype.str.contains("float") & ~ops.op.str.contains(VIEW)]
    ops["place"] = ops.groupby(["network", "part"]).cumcount()
    ops["thick"] = np.where(ops.dtype.str.contains("16"), 10, 20)
    ops["cast"] = ops.casts.str.extract(r"activation \w+ -> (\w+)")[0]
    ops["name"] = ops.op.str.extract(r"::(?:native_|_scaled_dot_product_\w+_)?(\w+)")[0]
    ops.loc[ops.groupby("network").place.transform("max") > 11, "name"] = ""  # no room
    network = choice("network", "network ", list(traces), next(iter(traces)))
    used = sorted(set(ops.dtype), reverse=True)
    colors = alt.Scale(domain=used, range=[color_of(name) for name in used])
    shapes = alt.Scale(domain=["float16", "bfloat16", "float32"], range=["triangle-down"] * 2 + ["triangle-up"])
    at = {"y": alt.Y("part:N", title=None, sort=alt.EncodingSortField("order", op="min"))}
    at["x"] = alt.X("place:Q", title="ops, in the order of running", axis=alt.Axis(labels=False, ticks=False))
    base = alt.Chart(ops).transform_filter("datum.network == network").encode(**at, tooltip=list(ops)[:4])
    boxes = base.transform_calculate(end="datum.place + 0.96").mark_bar()
    boxes = boxes.encode(x2="end:Q", size=alt.Size("thick:Q", scale=None), color=alt.Color("dtype:N", scale=colors))
    names = base.transform_calculate(middle="datum.place + 0.48")
    names = names.mark_text(align="center", baseline="middle", color="white", fontSize=9, fontWeight="bold")
    casts = base.transform_filter("isValid(datum.cast)").mark_point(filled=True, size=50, color="black", opacity=1)
    casts = casts.encode(shape=alt.Shape("cast:N", scale=shapes, legend=None))
    chart = alt.layer(boxes, names.encode(x="middle:Q", text="name:N"), casts).add_params(network)
    chart = chart.properties(width=WIDTH - 60, height=alt.Step(22), title=title)
    show(chart, f"The ops of networks, coloured by dtype, with an input: {title}. It chooses the network.")


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


def schedule(took, workers, waits):
    """When each part of a machine works, as rows for `timeline`, if steps take the times `took`, a DataFrame in ms with
    columns `load`, `launch` and `compute`. Each of `workers` has at most two batches ahead, as PyTorch's do; without
    any the main process loads. With `waits` it does nothing more until the device is done.
    """
    rows, taken, free, main, done = [], [], {}, 0.0, 0.0
    for step, (load, launch, compute) in enumerate(took[["load", "launch", "compute"]].to_numpy().tolist()):
        loader = f"worker {step % workers + 1}" if workers else "main process"
        room = taken[step - 2 * workers] if workers and step >= 2 * workers else 0.0
        free[loader] = (max(free.get(loader, 0.0), room) if workers else main) + load
        rows.append((loader, "load", step, free[loader] - load, free[loader]))
        taken.append(max(main, free[loader]))
        main = taken[-1] + launch
        rows.append(("main process", "launch", step, taken[-1], main))
        done = max(main, done) + compute
        rows.append(("device", "compute", step, done - compute, done))
        main = done if waits else main
    return pd.DataFrame(rows, columns=["part", "work", "step", "start", "end"])


def timeline(rows, parts, inputs, title):
    """When each part of a machine works; inputs choose among the machines that were computed.

    `rows`: a DataFrame, one row a busy time, with columns `part`, `work`, `step`, `start` and `end` (ms), and one for
    each of `inputs`, a dict of the words beside the input by column. `parts` are named from top to bottom; the last is
    the device: where it is idle, its line is light red. Without inputs `name` says what each time is: written on the
    first kind of work, shown where one points.
    """
    work, device = list(dict.fromkeys(rows.work)), parts[-1]
    chosen = [choice(name, text, list(dict.fromkeys(rows[name])), rows[name].iloc[0]) for name, text in inputs.items()]
    rows = rows.assign(length=rows.end - rows.start).round(3)
    if not inputs:
        room = (rows.work == work[0]) & (rows.length > 0.05 * rows.end.max())
        rows["says"] = rows.name.where(room, "")
    base = alt.Chart(rows).transform_filter(" && ".join(f"datum.{name} == {name}" for name in inputs) or "true")
    x = alt.X("start:Q", title="ms", scale=alt.Scale(domain=[0, float(rows.end.max())], nice=False))
    y = alt.Y("part:N", title=None, scale=alt.Scale(domain=parts))
    # Light enough for dark digits; the last work is the device's.
    shades = [*["#9a9a9a", "#c4c4c4"][: len(work) - 1], COLORS["normal"], "#eba79e"]
    color = alt.Color("work:N", scale=alt.Scale(domain=[*work, "idle"], range=shades))
    mine = base.transform_filter(f"datum.part == '{device}'")
    mine = mine.transform_aggregate(end="max(end)", first="min(end)", steps="count()", length="mean(length)")
    mine = mine.transform_calculate(start="0", part=f"'{device}'", work="'idle'")
    mine = mine.transform_calculate(pace="(datum.end - datum.first) / (datum.steps - 1)")
    idle = mine.mark_bar().encode(x, y, x2="end:Q", color=color)
    edge = alt.value(1) if inputs else alt.condition(f"datum.part != '{device}'", alt.value(1), alt.value(0))
    bars = base.mark_bar(stroke="white").encode(x, y, x2="end:Q", color=color, strokeWidth=edge)
    bars = bars if inputs else bars.encode(tooltip=["name:N", "length:Q"])
    middle = base.transform_calculate(start="(datum.start + datum.end) / 2")
    numbers = middle.mark_text(align="center", baseline="middle", fontSize=11, color="black")
    numbers = numbers.encode(x, y, text="step:N" if inputs else "says:N")
    pace = "format(datum.pace, '.1f') + ' ms a step; the device works '"
    mine = mine.transform_calculate(says=f"{pace} + format(datum.length / datum.pace, '.0%') + ' of the time'")
    words = [mine.mark_text(x=0, y=-22, fontWeight="bold").encode(text="says:N")] if inputs else []
    chart = alt.layer(idle, bars, numbers, *words).add_params(*chosen)
    chart = chart.properties(width=WIDTH, height=36 * len(parts), title=alt.TitleParams(title, offset=8))
    show(chart, f"When each part of the machine works, with {len(inputs)} inputs: {title}.")


def pointers(stored, exact, title, start):
    """Angles as pointers on dials, where each should point and where it does; inputs choose the format and position.

    `stored` maps `(format, position)` to angles in radians, one a dial (not finite: no pointer); `exact` maps
    `position` to what they should be. Positions are 2^k - 1, in order. `start` is the first pair.
    """
    formats, positions = (list(dict.fromkeys(pair[place] for pair in stored)) for place in (0, 1))
    powers = [position.bit_length() for position in positions]
    rows = []
    for (name, position), angles in stored.items():
        for dial, (angle, right) in enumerate(zip(angles, exact[position])):
            row = {"format": name, "k": position.bit_length(), "dial": dial, "says": "none"}
            row |= {"right x": dial + 0.42 * np.cos(right), "right y": 0.42 * np.sin(right)}
            if np.isfinite(angle):
                away = abs((np.degrees(angle - right) + 180) % 360 - 180)
                row |= {
                    "x": dial + 0.42 * np.cos(angle),
                    "y": 0.42 * np.sin(angle),
                    "says": f"{away:.0f}\N{DEGREE SIGN}",
                }
            rows.append(row)
    dials = len(angles)
    chosen = choice("format", "format ", formats, start[0])
    k = slider("k", "position: 2 to the power of k, minus 1; k = ", powers, start[1].bit_length())
    table = pd.DataFrame(rows).round(3)
    base = alt.Chart(table).transform_filter("datum.format == format && datum.k == k")
    base = base.transform_calculate(zero="0")
    x = alt.X("dial:Q", axis=None, scale=alt.Scale(domain=[-0.5, dials - 0.5], nice=False))
    y = alt.Y("zero:Q", axis=None, scale=alt.Scale(domain=[-0.5, 0.5], nice=False))
    radius = 0.42 * WIDTH / dials
    faces = base.mark_point(size=np.pi * radius**2, color=NEUTRAL, opacity=0.4, strokeWidth=1).encode(x, y)
    should = base.mark_rule(color=NEUTRAL, strokeWidth=5, opacity=0.5).encode(x, y, x2="right x:Q", y2="right y:Q")
    colors = alt.Scale(domain=formats, range=[color_of(name) for name in formats])
    color = alt.Color("format:N", scale=colors, legend=None)
    does = base.transform_filter("isValid(datum.x)").mark_rule(strokeWidth=2)
    does = does.encode(x, y, x2="x:Q", y2="y:Q", color=color)
    says = base.mark_text(dy=radius + 6, align="center", fontSize=13).encode(x, y, text="says:N")
    first = base.transform_filter("datum.dial == 0").transform_calculate(
        head="'position ' + format(pow(2, datum.k) - 1, ',') + ' in ' + datum.format + ': degrees away from exact'"
    )
    words = first.mark_text(x=0, y=-24).encode(text="head:N")
    chart = alt.layer(faces, should, does, says, words).add_params(chosen, k)
    chart = chart.properties(width=WIDTH, height=WIDTH // dials, title=alt.TitleParams(title, offset=12))
    show(chart, f"{dials} dials with two inputs: {title}. They choose the format and the position.")


def ring(held, title):
    """A ring all-reduce, step by step, by a slider: whose numbers are in what each process has of each part.

    held: integer tensors of shape (processes, parts), before the first step and after each: in the number of a process
    and a part, bit p says that it is a sum with the numbers of process p. What has just come has a frame.
    """
    world, rows = len(held[0]), []
    for step, now in enumerate(held):
        says = "adds what the next one sends" if step < world else "takes over a sum that is complete"
        says = f"step {step} of {len(held) - 1}: each {says if step else 'has its own numbers'}"
        for (process, part), bits in np.ndenumerate(now.numpy()):
            whose = [str(other) for other in range(world) if bits >> other & 1]
            has = "its own numbers" if len(whose) == 1 else "all" if len(whose) == world else "a part of the sum"
            frame = 3 if step and bits != held[step - 1][process, part] else 0
            place = {"process": f"process {process}", "part": f"part {part}"}
            rows.append({"step": step, **place, "sum": " + ".join(whose), "has": has, "frame": frame, "says": says})
    names, fills = ["its own numbers", "a part of the sum", "all"], ["#dcdcdc", "#dcbfe0", "#a6d6ae"]
    step = slider("step", "step ", range(len(held)), 2)
    base = alt.Chart(pd.DataFrame(rows)).transform_filter("datum.step == step")
    bare = {"title": None, "scale": alt.Scale(padding=0.1)}
    x = alt.X("part:N", axis=alt.Axis(orient="top", labelAngle=0, ticks=False, domain=False), **bare)
    y = alt.Y("process:N", axis=alt.Axis(ticks=False, domain=False), **bare)
    color = alt.Color("has:N", scale=alt.Scale(domain=names, range=fills))
    frame = alt.StrokeWidth("frame:Q", scale=None)
    boxes = base.mark_rect(stroke="#333333").encode(x, y, color=color, strokeWidth=frame)
    sums = base.mark_text(align="center", baseline="middle", color="black").encode(x, y, text="sum:N")
    first = base.transform_filter("datum.process == 'process 0' && datum.part == 'part 0'")
    words = first.mark_text(x=0, y=-44, fontWeight="bold").encode(text="says:N")
    chart = alt.layer(boxes, sums, words).add_params(step).properties(width=WIDTH - 80, height=44 * world)
    chart = chart.properties(title=alt.TitleParams(title, offset=24))
    show(chart, f"What {world} processes have of {world} parts, with a slider: {title}. The slider moves the step.")


def switches(lines, runs, title, off=()):
    """A loop with a switch a line: what each line leaves in the gradients, and above the loop how it ends.

    `lines` are pairs: a line, and what stands there without it ("": nothing). `runs` maps a tuple of 0 and 1, one a
    line, to `(sizes, says)`: the size of the gradients after each line that is reached (1: true, 0: there are none),
    and a sentence. `off`: the numbers of the lines that are off at first.
    """
    names = [f"line{'abcdefghijklm'[row]}" for row in range(len(lines))]
    inputs = [
        alt.param(name, value=row not in off, bind=alt.binding_checkbox(name=pair[0]))
        for row, (name, pair) in enumerate(zip(names, lines))
    ]
    rows = pd.DataFrame([{"row": row, "on": on, "off": off or f"# {on}"} for row, (on, off) in enumerate(lines)])
    ends = [{"key": "".join(map(str, on)), "left": [*map(_size, sizes)], "says": s} for on, (sizes, s) in runs.items()]
    base = alt.Chart(rows).transform_calculate(key=" + ".join(["''", *(f"({name} ? 1 : 0)" for name in names)]))
    base = base.transform_lookup("key", alt.LookupData(pd.DataFrame(ends), "key", ["left", "says"]))
    base = base.transform_calculate(there="datum.key[datum.row] == '1'", left="datum.left[datum.row] || ''")
    base = base.transform_calculate(text="datum.there ? datum.on : datum.off", kind="split(datum.left, '2^')[0]")
    y, x = alt.Y("row:O", axis=None), alt.value(WIDTH - 170)
    ink = alt.condition("datum.there", alt.value(NEUTRAL), alt.value(COLORS["becomes 0"]))
    code = base.mark_text(font="monospace", fontSize=13, baseline="middle")
    code = code.encode(y=y, x=alt.value(0), text="text:N", color=ink)
    fills = {"none": NEUTRAL, "true size": COLORS["gradients"], "scaled: ": "#5b2a63"}
    fills |= {"too small: ": COLORS["becomes 0"], "not finite": COLORS["overflows"]}
    color = alt.Color("kind:N", scale=alt.Scale(domain=list(fills), range=list(fills.values())), legend=None)
    left = base.transform_filter("datum.left != ''")
    boxes = left.mark_rect(stroke="white").encode(y=y, x=x, x2=alt.value(WIDTH), color=color)
    sizes = left.mark_text(dx=8, color="white", fontWeight="bold", fontSize=14, baseline="middle").encode(
        y=y, x=x, text="left:N"
    )
    first = base.transform_filter("datum.row == 0").mark_text(x=0, y=-20, fontWeight="bold", fontSize=13)
    chart = alt.layer(code, boxes, sizes, first.encode(text="says:N")).add_params(*inputs)
    chart = chart.properties(width=WIDTH, height=34 * len(lines), title=alt.TitleParams(title, offset=24))
    show(chart, f"A loop with a switch for each of its {len(lines)} lines: {title}. Beside each line the gradients.")


def _size(size):
    if size == 0 or not np.isfinite(size):
        return "not finite" if size else "none"
    words = f"{'scaled' if size > 1 else 'too small'}: 2^{np.log2(size):.0f} times"
    return "true size" if 0.7 < size < 1.4 else words
