"""The bits of a number, to look at (`BitView`) and to click at (`explore_bits`)."""

import math
from html import escape

import ipywidgets as widgets
import numpy as np
from IPython.display import display

from halfbits.cli import parse_number
from halfbits.formats import FORMATS

# The formats that the explorer offers, here and on the site.
SHOWN = ["fp32", "tf32", "bf16", "fp16", "fp8_e5m2", "fp8_e4m3fn", "fp4_e2m1fn"]
# Each box has black text of its own, so that it reads the same on a light page and on a dark one.
COLORS = {"sign": "#f2a08c", "exponent": "#7ccb95", "fraction": "#8ab4f0"}
PALE = {"sign": "#fcebe6", "exponent": "#e3f4e8", "fraction": "#e6effc"}  # of a bit that is 0


class BitView:
    """The bits of one number in one format: a line of text, in notebooks the same in colour.

    value_or_code: a float is a value, and is rounded to the format; an int is a code, the bits
    themselves. format: a name in `halfbits.formats.FORMATS`.

    Attributes: `format` (a FloatFormat), `code` (int), `value` (float), `kind` (as of
    `FloatFormat.kind`), and `given`, the float before it was rounded. Raises TypeError, ValueError
    or KeyError as `halfbits.formats` does.

    Examples
    --------
    >>> BitView(0.1, "bf16")
    bf16       0 | 01111011 | 1001101   0.10009765625   0x3dcd   normal   0.1 rounded by 9.77e-05
    """

    def __init__(self, value_or_code: float | int, format: str):
        self.format = FORMATS[format]
        is_code = isinstance(value_or_code, int) or np.asarray(value_or_code).dtype.kind in "iu"
        self.code = int(value_or_code if is_code else self.format.encode(value_or_code))
        self.value = float(self.format.decode(self.code))
        self.kind = str(self.format.kind(self.code))
        self.given = self.value if is_code else float(value_or_code)

    @property
    def fields(self) -> dict[str, str]:
        """The bits of each field: {"sign": "0", "exponent": "01111", "fraction": "0000000000"}."""
        bits = f"{self.code:0{self.format.bits}b}"
        end = 1 + self.format.exponent_bits
        return {"sign": bits[0], "exponent": bits[1:end], "fraction": bits[end:]}

    @property
    def formula(self) -> str:
        """How the fields make the value."""
        sign, exponent, fraction = (int(field) for field in self.format.fields(self.code))
        if not math.isfinite(self.value):
            return f"exponent {exponent}, fraction {fraction}: {self.kind}"
        normal = int(self.kind == "normal")
        power = f"2^({exponent if normal else 1} - {self.format.bias})"
        return f"{'-' * sign}{power} x ({normal} + {fraction}/{2**self.format.mantissa_bits})"

    def neighbours(self) -> tuple[int | None, int | None]:
        """The codes of the next number below and above, infinities included, or None."""
        half = 2 ** (self.format.bits - 1)  # the first code with a sign
        rank = self.code if self.code < half else half - self.code  # in the order of the numbers
        return self._code_at(rank - 1, half), self._code_at(rank + 1, half)

    def _code_at(self, rank, half):
        if abs(rank) >= half:
            return None
        code = rank if rank >= 0 else half - rank
        return None if np.isnan([self.value, self.format.decode(code)]).any() else code

    def _facts(self):
        digits = 2 + -(-self.format.bits // 4)
        facts = [repr(self.value), f"{self.code:#0{digits}x}", self.kind]
        if repr(self.value) != repr(self.given):
            off = self.value - self.given
            by = f" by {off:.3g}" if math.isfinite(off) else ""
            facts.append(f"{self.given!r} rounded{by}")
        return facts

    def __repr__(self):
        bits = f"{self.format.name:<10} {' | '.join(self.fields.values())}"
        return "   ".join([bits, *self._facts()])

    def _repr_html_(self):
        box = "padding:1px 4px;border-radius:3px;color:black;background:"
        boxes = []
        for name, bits in self.fields.items():
            boxes.append(f'<span title="{name}" style="{box}{COLORS[name]}">{bits}</span>')
        code = f'<code style="background:none;color:inherit">{" | ".join(boxes)}</code>'
        spaced = '<span style="margin-left:1.2em">'
        facts = "".join(f" {spaced}{fact}</span>" for fact in self._facts())
        name = f'<span style="display:inline-block;width:6.5em">{self.format.name}</span> '
        line = '<div style="font-family:monospace;margin:3px 0;white-space:nowrap">'
        return f"{line}{name}{code}{facts}</div>"


def _axis(y, caption, ticks, pointer):
    """SVG of a horizontal line with ticks {label: x}, and a triangle at x = `pointer`."""
    marks = []
    for label, x in ticks.items():
        marks.append(f'<path d="M{x:.1f} {y} v7" stroke="currentColor"/>')
        marks.append(f'<text x="{x:.1f}" y="{y + 20}">{label}</text>')
    if pointer < 40:  # beyond the line's end
        marks.append(f'<path d="M24 {y} l12 -6 v12 z"/>')
    elif pointer > 600:
        marks.append(f'<path d="M616 {y} l-12 -6 v12 z"/>')
    elif not math.isnan(pointer):
        marks.append(f'<path d="M{pointer:.1f} {y - 1} l-5 -10 h10 z"/>')
    title = f'<text x="4" y="{y - 18}" text-anchor="start" opacity="0.8">{caption}</text>'
    return title + f'<path d="M40 {y} h560" stroke="currentColor"/>' + "".join(marks)


def _number_line(view):
    """SVG of the number between its neighbours, and of its size in the range of the format."""
    form = view.format
    drawing = ""
    if math.isfinite(view.value):
        codes = [code for code in view.neighbours() if code is not None]
        near = [view.value, *filter(math.isfinite, map(float, map(form.decode, codes)))]
        scale = 240 / max(abs(value - view.value) for value in near)
        ticks = {repr(value): 320 + scale * (value - view.value) for value in near}
        pointer = 320 + scale * (view.given - view.value)
        drawing = _axis(34, "the number and its neighbours", ticks, pointer)
    lowest = math.log2(form.smallest_subnormal)
    highest = math.log2(form.max)

    def by_size(value):
        return 60 + 520 * (math.log2(value) - lowest) / (highest - lowest)

    landmarks = [form.smallest_subnormal, 1.0, form.max]
    if by_size(form.smallest_normal) > 120:  # else its label would cover the one on the left
        landmarks.insert(1, form.smallest_normal)
    ticks = {f"{value:.5g}": by_size(value) for value in landmarks}
    size = abs(view.given)
    pointer = {0.0: 0, math.inf: 640}.get(size, math.nan)
    if 0 < size < math.inf:
        pointer = by_size(size)
    drawing += _axis(104, f"its size in the range of {form.name}", ticks, pointer)
    label = f"{view.value!r} between its neighbours, and in the range of {form.name}"
    look = 'width="640" style="display:block" font-size="11" text-anchor="middle"'
    look += f' fill="currentColor" role="img" aria-label="{label}"'
    return f'<svg viewBox="0 0 640 130" {look}>{drawing}</svg>'


class _Explorer:
    """The widgets of `explore_bits`. What is clicked or typed makes a new BitView, which `show`
    draws."""

    def __init__(self, format, number):
        self.number = widgets.Text(description="number", continuous_update=False)
        self.format = widgets.Dropdown(description="format", options=SHOWN)
        fit = {"width": "auto"}
        self.below = widgets.Button(description="next below", layout=fit)
        self.above = widgets.Button(description="next above", layout=fit)
        small = {"width": "2em", "padding": "0", "margin": "1px"}
        black = {"text_color": "black"}
        self.bits = [widgets.Button(layout=small, style=black) for _ in range(32)]
        wrapped = {"flex_flow": "row wrap"}
        self.captions = {field: widgets.HTML() for field in COLORS}
        self.rows = {field: widgets.HBox(layout=wrapped) for field in COLORS}
        self.problem = widgets.HTML()
        self.result = widgets.HTML()
        self.show(BitView(number, format))
        self.format.value = format

        self.number.observe(self.read_number, "value")
        self.format.observe(self.change_format, "value")
        self.below.on_click(lambda _: self.show_code(self.view.neighbours()[0]))
        self.above.on_click(lambda _: self.show_code(self.view.neighbours()[1]))
        for place, button in enumerate(self.bits):
            button.on_click(lambda _, bit=1 << place: self.show_code(self.view.code ^ bit))

        gap = {"margin": "0 8px 0 0"}
        top = widgets.HBox([self.number, self.format, self.below, self.above])
        columns = [[self.captions[field], self.rows[field]] for field in COLORS]
        fields = [widgets.VBox(column, layout=gap) for column in columns]
        middle = widgets.HBox(fields, layout=wrapped)
        self.box = widgets.VBox([top, middle, self.problem, self.result])

    def show_code(self, code):
        self.show(BitView(code, self.view.format.name))

    def change_format(self, change):
        self.show(BitView(self.view.given, change["new"]))

    def read_number(self, change):
        if not self.writing:
            try:
                self.show(BitView(parse_number(change["new"]), self.view.format.name))
            except (TypeError, ValueError) as error:
                self.problem.value = f"<b>{escape(str(error))}</b>"

    def show(self, view):
        self.view = view
        self.problem.value = ""
        self.writing = True  # so that the text below is not taken for the reader's
        self.number.value = repr(view.given)
        self.writing = False
        end = view.format.bits
        for (field, text), number in zip(view.fields.items(), view.format.fields(view.code)):
            self.captions[field].value = f"{field} {number}"
            self.rows[field].children = self.bits[end - len(text) : end][::-1]
            for button, bit in zip(self.rows[field].children, text):
                end -= 1
                button.description = bit
                button.tooltip = f"bit {end}, {field}"
                button.style.button_color = COLORS[field] if bit == "1" else PALE[field]
                button.style.font_weight = "bold" if bit == "1" else "normal"
        below, above = view.neighbours()
        self.below.disabled = below is None
        self.above.disabled = above is None
        value = f"<b class='bitview-value'>{view.value!r}</b>"
        facts = "&emsp;".join([value, *view._facts()[1:]])
        spacing = ""
        if math.isfinite(view.value):
            spacing = f"spacing here: {view.format.spacing(view.value):.6g}"
        every = "".join(BitView(view.given, name)._repr_html_() for name in SHOWN)
        self.result.value = (
            f"<div style='font-size:1.2em'>{view.formula} = {facts}</div>"
            f"<div>{spacing}</div>{_number_line(view)}"
            f"<div>The same number in every format:</div>{every}"
        )


def explore_bits(format: str = "fp16", number: float = 0.1) -> None:
    """Show widgets in which bits can be clicked, a number typed, and the format switched.

    format: a name in `SHOWN`. number: the float to begin with. A page without a live kernel shows a
    few fixed BitViews instead, which the live widgets hide.
    """
    form = FORMATS[format]
    explorer = _Explorer(format, number)
    values = [number, 1.0, form.max, form.smallest_normal, form.smallest_subnormal]
    fixed = [BitView(value, format) for value in values]
    data = f'class="bitview-fixed" data-format="{format}" data-value="{number}"'
    page = "".join(view._repr_html_() for view in fixed)
    text = "\n".join(map(repr, fixed))
    display({"text/html": f"<div {data}>{page}</div>", "text/plain": text}, raw=True)
    style = ".bitview-fixed {display: none} "
    style += ".bitview button:focus-visible {outline: 3px solid #0173b2}"
    explorer.box.add_class("bitview")
    explorer.box.children += (widgets.HTML(f"<style>{style}</style>"),)
    display(explorer.box._repr_mimebundle_() | {"text/plain": ""}, raw=True)
