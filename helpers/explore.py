"""Charts with sliders that work without a kernel: in a stored notebook, on the site, on a phone.

Data are computed in Python; the browser only moves them. A chart is stored as Vega-Lite 5, which
JupyterLab draws by itself, beside a picture of its first state for readers that draw no charts.
"""

import base64
import io
import sys

import altair as alt
import numpy as np
import pandas as pd
import torch
from IPython.display import display
from PIL import Image

from halfbits.formats import FORMATS
from helpers.plots import NEUTRAL, color_of

WIDTH = 640
# Instead of vega-embed's own style sheet: the chart shrinks to fit, the inputs stand in columns.
STYLE = """.vega-embed{max-width:760px}.vega-embed svg.marks{max-width:100%;height:auto}
.vega-bindings{display:grid;grid-template-columns:repeat(auto-fill,minmax(17rem,1fr));\
gap:.3rem 1.5rem;font-size:14px}
.vega-bind label{display:flex;align-items:center;gap:.6em;flex-wrap:wrap}
.vega-bind input[type=range]{flex:1;min-width:6rem}
.vega-bind label>span:last-child{min-width:2.5em;text-align:right}\
.vega-bind-radio{display:flex;gap:.6em}
.vega-bindings:has([type=search]){display:block}\
.vega-bind [type=search]{flex:1;font:inherit;padding:.4em}
.vega-embed:has([type=search]){display:flex;flex-direction:column-reverse}"""
EMBED = {"actions": False, "renderer": "svg", "defaultStyle": STYLE}
INKED = dict.fromkeys(("labelColor", "titleColor", "domainColor", "tickColor"), NEUTRAL)
AXIS = {"grid": False, "labelFontSize": 12, "titleFontSize": 13, "titleFontWeight": "normal"}
CONFIG = {  # the look of helpers.plots
    "background": "transparent",
    "font": "sans-serif",
    "view": {"stroke": None},
    "axis": INKED | AXIS,
    "legend": {"labelColor": NEUTRAL, "labelFontSize": 12, "orient": "bottom", "title": None},
    "title": {"color": NEUTRAL, "anchor": "start", "fontSize": 14},
    "text": {"color": NEUTRAL, "fontSize": 15, "align": "left", "baseline": "top"},
    "rule": {"color": NEUTRAL},
}
VIEW = (
    r"::(?:t|_?\w*view|expand|permute|transpose|(?:un)?squeeze|select|slice|split\w*|unbind"
    r"|alias|detach)\b"
)
VEGA_LITE = "application/vnd.vegalite.v5+json"


def show(chart: alt.TopLevelMixin, text: str) -> None:
    """Show an Altair chart whose parameters are all bound to inputs; `text` is for whoever cannot
    see it.

    On Colab, which does not draw stored charts, Altair's own HTML is shown.

    Examples
    --------
    >>> share = alt.param("share", value=1, bind=alt.binding_range(min=0, max=1))
    >>> dot = alt.Chart(pd.DataFrame({"x": [1]})).mark_point(opacity=alt.expr("share"))
    >>> show(dot.add_params(share), "A dot that fades.")  # doctest: +SKIP
    """
    chart = chart.configure(**CONFIG)
    if "google.colab" in sys.modules:
        display({"text/html": chart.to_html(), "text/plain": text}, raw=True)
        return
    # JupyterLab 4 draws version 5; these charts need nothing newer.
    schema = "https://vega.github.io/schema/vega-lite/v5.json"
    spec = chart.to_dict() | {"$schema": schema, "description": text}
    data = {VEGA_LITE: spec, "text/plain": text}
    metadata = {VEGA_LITE: {"embed_options": EMBED}}
    if picture := _picture(spec):
        data["image/png"], size = picture
        metadata["image/png"] = {"alt": text, **size}
    display(data, metadata=metadata, raw=True)


def _picture(spec):
    """The chart's first state as PNG, and its size; None where vl-convert, of 84 MB, is missing."""
    try:
        import vl_convert
    except ImportError:
        return None
    large = vl_convert.vegalite_to_png(spec, vl_version="5.8", scale=2)
    picture = Image.open(io.BytesIO(large))
    file = io.BytesIO()
    picture.save(file, "PNG")  # a third of what vl-convert writes
    size = {"width": picture.width // 2, "height": picture.height // 2}
    return base64.b64encode(file.getvalue()).decode(), size


def _slider(name, text, values, start):
    """An input that goes through whole numbers from the first of `values` to the last."""
    step = values[1] - values[0]
    binding = alt.binding_range(min=min(values), max=max(values), step=step, name=text)
    return alt.param(name, value=start, bind=binding)


def _choice(name, text, options, start):
    """An input that shows all `options`."""
    binding = alt.binding_radio(options=options, labels=list(map(str, options)), name=text)
    return alt.param(name, value=start, bind=binding)


def _distinct(values):
    """Each of `values` once, in their order."""
    return list(dict.fromkeys(values))


def _chosen(table, *names):
    """The rows of `table` whose columns `names` have the values of the inputs of these names."""
    chosen = " && ".join(f"datum.{name} == {name}" for name in names)
    return alt.Chart(table).transform_filter(chosen)


def _colors(names):
    """The scale that gives each of `names` its colour."""
    return alt.Scale(domain=names, range=[color_of(name) for name in names])


def _show(layers, inputs, title, text, offset=None, **size):
    """Show `layers` on each other, with their inputs, and their title, raised by `offset`."""
    title = alt.TitleParams(title, offset=offset) if offset else title
    show(alt.layer(*layers).add_params(*inputs).properties(title=title, **size), text)


def fates(values: torch.Tensor, scales: range, title: str, start: int = 0) -> pd.DataFrame:
    """A histogram of nonzero gradients by their power of two, moved by a slider over the `scales`,
    exponents of 2.

    What fp16 makes of each number has its colour, and the shares that become 0 and that overflow
    are written out. Returns these shares at the first and at the last scale.
    """
    sizes = values[values != 0].double().abs().numpy(force=True)
    powers = np.floor(np.log2(sizes)).astype(int)
    power, count = np.unique(powers, return_counts=True)
    data = pd.DataFrame({"power": power, "count": count, "share": count / len(powers)})
    k = _slider("k", "scale: 2 to the power of ", scales, start)
    names = ["becomes 0", "subnormal", "normal", "overflows"]
    fate = "datum.at < -14 ? 'subnormal' : datum.at < 16 ? 'normal' : 'overflows'"
    moved = alt.Chart(data).transform_calculate(
        at="datum.power + k",
        fate=f"datum.at < -25 ? 'becomes 0' : {fate}",
    )
    low = int(power[0]) + min(*scales, 0)
    high = int(power[-1]) + max(scales) + 2
    domain = alt.Scale(domain=[low, high], nice=False)
    x = alt.X("middle:Q", title="log2 of the scaled gradient", scale=domain)
    domain = alt.Scale(domain=[0, int(1.15 * max(count))])
    y = alt.Y("count:Q", title="how many", scale=domain)
    bars = moved.transform_calculate(middle="datum.at + 0.5")
    bars = bars.mark_bar(size=WIDTH / (high - low) - 1)
    bars = bars.encode(x, y, color=alt.Color("fate:N", scale=_colors(names)))
    shares = moved.transform_calculate(
        lost="datum.at < -25 ? datum.share : 0",
        over="datum.at >= 16 ? datum.share : 0",
    )
    shares = shares.transform_aggregate(lost="sum(lost)", over="sum(over)")
    says = "'scale 2^' + k + ': lost ' + format(datum.lost, '.1%')"
    says += " + ', overflowed ' + format(datum.over, '.1%')"
    words = shares.transform_calculate(says=says).mark_text(x=4, y=4, fontWeight="bold")
    words = words.encode(text="says:N")
    text = f"Histogram with a slider: {title}. "
    text += "The slider multiplies all gradients by a power of two."
    _show([bars, words], [k], title, text, width=WIDTH, height=220)
    ends = [scales[0], scales[-1]]
    at = np.add.outer(ends, powers)
    shares = {"becomes 0": (at < -25).mean(axis=1), "overflows": (at >= 16).mean(axis=1)}
    return pd.DataFrame(shares, [f"2^{end}" for end in ends])


def cast_map(traces: dict[str, pd.DataFrame], title: str) -> None:
    """Networks op by op, a line for each part, in the order of running; an input chooses one.

    An op has the colour of the dtype that it returns, and half the height where that has 16 bits; a
    triangle before it is an activation that autocast casts. Pointing at an op names it. `traces`:
    what `halfbits.trace_casts` returns, by network. Views and integers are left out.
    """
    ops = []
    for name, trace in traces.items():
        ops.append(trace.assign(network=name, order=range(len(trace))))
    ops = pd.concat(ops)
    # "Net.layers.3.attn.proj" belongs to "layers.3", "Net.head.proj" to "head", and "Net" to "Net".
    ops["part"] = ops.module.str.extract(r"^(?:\w+\.)?(.*?\.\d+|\w+)")[0]
    ops["dtype"] = ops.output.str.partition(",")[0]
    ops = ops.drop(columns=["cast_bytes", "module"])
    ops = ops[ops.dtype.str.contains("float") & ~ops.op.str.contains(VIEW)]
    ops["place"] = ops.groupby(["network", "part"]).cumcount()
    ops["thick"] = np.where(ops.dtype.str.contains("16"), 10, 20)
    ops["cast"] = ops.casts.str.extract(r"activation \w+ -> (\w+)")[0]
    ops["name"] = ops.op.str.extract(r"::(?:native_|_scaled_dot_product_\w+_)?(\w+)")[0]
    crowded = ops.groupby("network").place.transform("max") > 11
    ops.loc[crowded, "name"] = ""
    network = _choice("network", "network ", list(traces), next(iter(traces)))
    y = alt.Y("part:N", title=None, sort=alt.EncodingSortField("order", op="min"))
    axis = alt.Axis(labels=False, ticks=False)
    x = alt.X("place:Q", title="ops, in the order of running", axis=axis)
    base = _chosen(ops, "network").encode(x=x, y=y, tooltip=list(ops)[:4])
    color = alt.Color("dtype:N", scale=_colors(sorted(set(ops.dtype), reverse=True)))
    boxes = base.transform_calculate(end="datum.place + 0.96").mark_bar()
    boxes = boxes.encode(x2="end:Q", size=alt.Size("thick:Q", scale=None), color=color)
    look = {"color": "white", "fontSize": 9, "fontWeight": "bold"}
    names = base.transform_calculate(middle="datum.place + 0.48")
    names = names.mark_text(align="center", baseline="middle", **look)
    names = names.encode(x="middle:Q", text="name:N")
    dtypes = {"float16": "triangle-down", "bfloat16": "triangle-down", "float32": "triangle-up"}
    shapes = alt.Scale(domain=list(dtypes), range=list(dtypes.values()))
    casts = base.transform_filter("isValid(datum.cast)")
    casts = casts.mark_point(filled=True, size=50, color="black", opacity=1)
    casts = casts.encode(shape=alt.Shape("cast:N", scale=shapes, legend=None))
    text = f"The ops of networks, coloured by dtype, with an input: {title}. "
    size = {"width": WIDTH - 60, "height": alt.Step(22)}
    layers = [boxes, names, casts]
    _show(layers, [network], title, text + "It chooses the network.", **size)


def walk(paths: dict[tuple[str, int], list[float]], unit: float, title: str, start: int) -> None:
    """A number that is lowered again and again by one update, exactly and in a format; inputs
    choose the format, the update and how many steps are taken.

    `paths` maps `(format, update)` to the numbers stored after 0, 1, 2 ... steps; an update is an
    integer, so many times `unit`. `start` is the update to begin with.
    """
    formats, updates = map(_distinct, zip(*paths))
    first = paths[formats[0], updates[0]]
    begin = first[0]
    count = len(first)
    low = begin - 2 * count * unit * updates[-1]
    ticks = []
    for name in formats:
        spacing = FORMATS[name].spacing(low)
        numbers = np.arange(np.ceil(low / spacing), begin / spacing + 2) * spacing
        ticks.append(pd.DataFrame({"format": name, "number": numbers}))
    inputs = [
        _choice("format", "format ", formats, formats[0]),
        _slider("update", f"update, in 1/{1 / unit:,.0f} ", updates, start),
        _slider("steps", "steps ", range(count), count - 1),
    ]
    lane = alt.Y("lane:N", title=None, sort=["exact", "stored"])
    # The line is as long as the steps ask for: small updates are seen from near.
    ends = {"domainMin": alt.expr(f"{begin} - {2 * count} * update * {unit}")}
    ends["domainMax"] = alt.expr(f"{begin} + 2 * update * {unit}")
    scale = alt.Scale(nice=False, zero=False, **ends)
    axis = alt.Axis(tickCount=6, format=".4f")
    x = alt.X("number:Q", title="weight", scale=scale, axis=axis)
    color = alt.Color("format:N", scale=_colors(formats), legend=None)
    has = _chosen(pd.concat(ticks), "format").transform_calculate(lane="'stored'")
    has = has.mark_tick(size=34, thickness=1, clip=True).encode(x, lane, color=color)
    rows = [{"key": f"{name} {update}", "path": path} for (name, update), path in paths.items()]
    base = alt.Chart(alt.sequence(0, count, as_="step")).transform_filter("datum.step <= steps")
    base = base.transform_calculate(key="format + ' ' + update", format="format")
    base = base.transform_lookup("key", alt.LookupData(pd.DataFrame(rows), "key", ["path"]))
    exact = f"{begin} - datum.step * update * {unit}"
    base = base.transform_calculate(exact=exact, stored="datum.path[datum.step]")
    fade = alt.condition("datum.step == steps", alt.value(1), alt.value(0.4))
    shape = alt.Shape("lane:N", scale=alt.Scale(range=["diamond", "circle"]), legend=None)
    dots = base.transform_fold(["exact", "stored"], as_=["lane", "number"])
    dots = dots.mark_point(filled=True, size=110, clip=True)
    dots = dots.encode(x, lane, color=color, shape=shape, opacity=fade)
    lost = f"datum.stored == {begin} && datum.exact < {begin} ? ': every update is lost' : ''"
    result = "'exact ' + format(datum.exact, '.4f')"
    result += f" + ', stored ' + format(datum.stored, '.4f') + ({lost})"
    now = base.transform_filter("datum.step == steps").transform_calculate(
        sum=f"'w = w - ' + update + ' / {1 / unit:.0f}, ' + steps + ' times'",
        result=result,
    )
    total = now.mark_text(x=0, y=-46).encode(text="sum:N")
    result = now.mark_text(x=0, y=-26).encode(text="result:N")
    text = f"A number line with three inputs: {title}. "
    text += "They choose the format, the update and the number of steps."
    size = {"width": WIDTH, "height": 120}
    _show([has, dots, total, result], inputs, title, text, offset=8, **size)


def replay(trace: dict, fast: float | None = None) -> pd.DataFrame:
    """When a step's kernels ran, or would run if each were `fast` times as fast: rows for
    `plots.strips`, in ms.

    `trace` is the results of a record of "08 published traces". A kernel starts when the CPU has
    launched it and the kernel before has ended. The CPU never waits, but for the copy `waits_for`;
    of four steps the last is returned.
    """
    times = list(zip(trace["started"], np.add(trace["started"], trace["took"])))
    until = times[0][0] + trace["recorded"]
    cpu = 0.0
    gpu = 0.0
    for _ in range(4 if fast else 0):
        begin = cpu
        times = []
        for number, (launched, took) in enumerate(zip(trace["launched"], trace["took"])):
            start = max(begin + launched, gpu)
            gpu = start + took / fast
            times.append((start, gpu))
            if number == trace["waits_for"]:
                begin = gpu - launched
        cpu = begin + trace["own"]
        until = max(cpu + trace["launched"][0], gpu)
    load = until - trace["launched"][0]
    spans = [("step", times[0][0], until), ("load", load, load + trace["loading"])]
    spans += [("compute", start, end) for start, end in times]
    rows = pd.DataFrame(spans, columns=["work", "start", "end"])
    rows[["start", "end"]] -= times[0][0]
    return rows
