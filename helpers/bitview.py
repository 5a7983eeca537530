"""The bits of a number, to look at (`BitView`) and to click at (`explore_bits`)."""

import math
from fractions import Fraction
from html import escape

import ipywidgets as widgets
import numpy as np
from IPython.display import display

from helpers.formats import FORMATS

# Each coloured box brings its own black text, so that it reads the same on a light page and on a dark one.
_COLORS = {"sign": "#f2a08c", "exponent": "#7ccb95", "fraction": "#8ab4f0"}
_PALE = {"sign": "#fcebe6", "exponent": "#e3f4e8", "fraction": "#e6effc"}  # of a bit that is 0
_BOX = "padding:1px 4px;border-radius:3px;color:black;background:"


class BitView:
    """The bits of one number in one format: a line of text, and in notebooks the same line in colour.

    value_or_code: a float is a value, and is rounded to the format; an int is a code, the bits themselves.
    format: a name in `helpers.formats.FORMATS`.

    Attributes: `format` (a FloatFormat), `code` (int), `value` (float), `kind` (see `FloatFormat.kind`), and `given`,
    the float before it was rounded. Raises TypeError, ValueError or KeyError as `helpers.formats` does.

    Examples
    --------
    >>> BitView(0.1, "fp16")
    fp16       0 | 01011 | 1001100110   0.0999755859375   0x2e66   normal   0.1 rounded by -2.44e-05
    """

    def __init__(self, value_or_code, format):
        self.format = FORMATS[format]
        is_code = isinstance(value_or_code, int) or np.asarray(value_or_code).dtype.kind in "iu"
        self.code = int(value_or_code if is_code else self.format.encode(value_or_code))
        self.value, self.kind = float(self.format.decode(self.code)), str(self.format.kind(self.code))
        self.given = self.value if is_code else float(value_or_code)

    @property
    def fields(self):
        """The bits of each field as text: {"sign": "0", "exponent": "01111", "fraction": "0000000000"}."""
        bits, end = f"{self.code:0{self.format.bits}b}", 1 + self.format.exponent_bits
        return {"sign": bits[0], "exponent": bits[1:end], "fraction": bits[end:]}

    @property
    def formula(self):
        """How the fields make the value."""
        sign, exponent, fraction = (int(field) for field in self.format.fields(self.code))
        if not math.isfinite(self.value):
            return f"exponent {exponent}, fraction {fraction}: {self.kind}"
        normal = int(self.kind == "normal")
        power = f"2^({exponent if normal else 1} - {self.format.bias})"
        return f"{'-' * sign}{power} x ({normal} + {fraction}/{2**self.format.mantissa_bits})"

    def neighbours(self):
        """The codes of the next number below and above, infinities included; None where there is none."""
        one_sign = 2 ** (self.format.exponent_bits + self.format.mantissa_bits)
        place = self.code % one_sign * (1 if self.code < one_sign else -1)  # numbers are ordered as their codes are
        found = []
        for rank in (place - 1, place + 1):
            code = abs(rank) + one_sign * (rank < 0)
            there = abs(rank) < one_sign and code < 2**self.format.bits
            found.append(code if there and not np.isnan([self.value, self.format.decode(code)]).any() else None)
        return tuple(found)

    def _facts(self):
        digits = 2 + -(-self.format.bits // 4)
        facts = [f"{self.value!r}", f"{self.code:#0{digits}x}", self.kind]
        if repr(self.value) != repr(self.given):
            off = self.value - self.given
            facts.append(f"{self.given!r} rounded{f' by {off:.3g}' if math.isfinite(off) else ''}")
        return facts

    def __repr__(self):
        return "   ".join([f"{self.format.name:<10} {' | '.join(self.fields.values())}", *self._facts()])

    def _repr_html_(self):
        boxes = [
            f'<span title="{name}" style="{_BOX}{_COLORS[name]}">{bits}</span>' for name, bits in self.fields.items()
        ]
        code = f'<code style="background:none;color:inherit">{" | ".join(boxes)}</code>'  # legible without the colours
        facts = "".join(f' <span style="margin-left:1.2em">{fact}</span>' for fact in self._facts())
        name = f'<span style="display:inline-block;width:6.5em">{self.format.name}</span> '
        return f'<div style="font-family:monospace;margin:3px 0;white-space:nowrap">{name}{code}{facts}</div>'


def _axis(y, caption, ticks, pointer):
    """SVG of a horizontal line with ticks {label: x}, and a triangle at x = `pointer`, or beyond the line's end."""
    marks = [
        f'<path d="M{x:.1f} {y} v7" stroke="currentColor"/><text x="{x:.1f}" y="{y + 20}">{label}</text>'
        for label, x in ticks.items()
    ]
    if pointer < 40:
        marks.append(f'<path d="M24 {y} l12 -6 v12 z"/>')
    elif pointer > 600:
        marks.append(f'<path d="M616 {y} l-12 -6 v12 z"/>')
    elif not math.isnan(pointer):
        marks.append(f'<path d="M{pointer:.1f} {y - 1} l-5 -10 h10 z"/>')
    title = f'<text x="4" y="{y - 18}" text-anchor="start" opacity="0.8">{caption}</text>'
    return title + f'<path d="M40 {y} h560" stroke="currentColor"/>' + "".join(marks)


def _number_line(view):
    """SVG of the number between its two neighbours, and of its size on a logarithmic line of the whole format."""
    form, drawing, size = view.format, "", abs(view.given)
    around = [float(form.decode(code)) for code in view.neighbours() if code is not None]
    if math.isfinite(view.value):
        around = [view.value, *filter(math.isfinite, around)]
        scale = 240 / max(abs(value - view.value) for value in around)
        ticks = {repr(value): 320 + scale * (value - view.value) for value in around}
        drawing = _axis(34, "the number and its neighbours", ticks, 320 + scale * (view.given - view.value))
    log2s = math.log2(form.smallest_subnormal), math.log2(form.max)

    def by_size(value):
        return 60 + 520 * (math.log2(value) - log2s[0]) / (log2s[1] - log2s[0])

    landmarks = {form.smallest_subnormal, 1.0, form.max}
    if by_size(form.smallest_normal) > 120:  # else its label would cover the one on the left
        landmarks.add(form.smallest_normal)
    pointer = by_size(size) if 0 < size < math.inf else {0: 0, math.inf: 640}.get(size, math.nan)
    ticks = {f"{value:.5g}": by_size(value) for value in sorted(landmarks)}
    drawing += _axis(104, f"its size in the range of {form.name}", ticks, pointer)
    label = f"{view.value!r} between its neighbours, and in the range of {form.name}"
    style = 'width="640" style="display:block" font-size="11" text-anchor="middle" fill="currentColor"'
    return f'<svg viewBox="0 0 640 130" {style} role="img" aria-label="{label}">{drawing}</svg>'


def _parse(text):
    """The value (float) or code (int) that a reader typed: 0.1, 1e-8, 2^-24, 1/3, inf, or bits as 0x3c00 or 0b1."""
    text = text.strip().lower().replace("**", "^").replace("\N{MINUS SIGN}", "-")
    try:
        if text.startswith(("0x", "0b")):
            return int(text, 0)
        sign, size = (-1, text[1:]) if text.startswith("-") else (1, text)
        base, power, exponent = size.partition("^")
        return sign * (float(base) ** float(exponent) if power else float(Fraction(size) if "/" in size else size))
    except ArithmeticError:
        raise ValueError(f"{text} is too large, or a division by zero.") from None
    except ValueError:
        raise ValueError(f"{text!r} is not a number. Try 0.1, 1e-8, 2^-24, 1/3, inf, or bits: 0x3c00.") from None


class _Explorer:
    """The widgets of `explore_bits`. Whatever is clicked or typed makes a new BitView, from which all are drawn."""

    def __init__(self, format, number):
        self.number = widgets.Text(description="number", continuous_update=False)
        self.format = widgets.Dropdown(description="format", options=list(FORMATS))
        self.steps = [
            widgets.Button(description=text, layout={"width": "auto"}) for text in ("next below", "next above")
        ]
        small = {"width": "2em", "padding": "0", "margin": "1px"}
        self.bits = [widgets.Button(layout=small, style={"text_color": "black"}) for _ in range(32)]
        self.captions = {field: widgets.HTML() for field in _COLORS}
        self.rows = {field: widgets.HBox(layout={"flex_flow": "row wrap"}) for field in _COLORS}
        self.problem, self.result = widgets.HTML(), widgets.HTML()
        self.show(BitView(number, format))
        self.format.value = format
        self.number.observe(self.read_number, "value")
        self.format.observe(lambda _: self.show(BitView(self.view.given, self.format.value)), "value")
        for place, button in enumerate(self.bits):
            button.on_click(lambda _, bit=1 << place: self.show(self.with_code(self.view.code ^ bit)))
        for side, button in enumerate(self.steps):
            button.on_click(lambda _, side=side: self.show(self.with_code(self.view.neighbours()[side])))
        gap = {"margin": "0 8px 0 0"}
        fields = [widgets.VBox([self.captions[field], self.rows[field]], layout=gap) for field in _COLORS]
        self.box = widgets.VBox(
            [
                widgets.HBox([self.number, self.format, *self.steps]),
                widgets.HBox(fields, layout={"flex_flow": "row wrap"}),
                self.problem,
                self.result,
            ]
        )

    def with_code(self, code):
        return BitView(code, self.view.format.name)

    def read_number(self, change):
        if not self.writing:
            try:
                self.show(BitView(_parse(change["new"]), self.view.format.name))
            except (TypeError, ValueError) as error:
                self.problem.value = f"<b>{escape(str(error))}</b>"

    def show(self, view):
        self.view, self.problem.value = view, ""
        self.writing = True  # so that the text below is not taken for the reader's
        self.number.value = repr(view.given)
        self.writing = False
        place = view.format.bits
        for field, number in zip(_COLORS, view.format.fields(view.code)):
            text = view.fields.get(field, "")
            self.rows[field].children = self.bits[place - len(text) : place][::-1]
            for button, bit in zip(self.rows[field].children, text):
                place -= 1
                button.description, button.tooltip = bit, f"bit {place}, {field}"
                button.style.button_color = _COLORS[field] if bit == "1" else _PALE[field]
                button.style.font_weight = "bold" if bit == "1" else "normal"
            self.captions[field].value = f"{field} {number}"
        for button, code in zip(self.steps, view.neighbours()):
            button.disabled = code is None
        facts = "&emsp;".join([f"<b class='bitview-value'>{view.value!r}</b>", *view._facts()[1:]])
        spacing = f"spacing here: {view.format.spacing(view.value):.6g}" if math.isfinite(view.value) else ""
        every = "".join(BitView(view.given, name)._repr_html_() for name in self.format.options)
        self.result.value = (
            f"<div style='font-size:1.2em'>{view.formula} = {facts}</div>"
            f"<div>{spacing}</div>{_number_line(view)}"
            f"<div>The same number in every format:</div>{every}"
        )


def explore_bits(format="fp16", number=0.1):
    """Show widgets in which every bit can be clicked, any number typed, and the format switched.

    format: a name in `FORMATS`. number: the float to begin with.

    A page without a live kernel shows a few fixed BitViews instead, which the live widgets hide.
    """
    form = FORMATS[format]
    explorer = _Explorer(format, number)
    fixed = [BitView(value, format) for value in (number, 1.0, form.max, form.smallest_normal, form.smallest_subnormal)]
    page = "".join(view._repr_html_() for view in fixed)
    text = "\n".join(map(repr, fixed))
    display(
        {
            "text/html": f'<div class="bitview-fixed" data-format="{format}" data-value="{number}">{page}</div>',
            "text/plain": text,
        },
        raw=True,
    )
    style = ".bitview-fixed {display: none} .bitview button:focus-visible {outline: 3px solid #0173b2}"
    explorer.box.add_class("bitview")
    explorer.box.children += (widgets.HTML(f"<style>{style}</style>"),)
    display(explorer.box._repr_mimebundle_() | {"text/plain": ""}, raw=True)
