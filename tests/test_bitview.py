"""BitView's text, and the explorer's widgets as a browser would drive them."""

import math
import re

import numpy as np
import pytest
import torch

from halfbits.formats import FORMATS
from helpers import bitview
from helpers.bitview import SHOWN, BitView


def test_text_shows_fields_value_code_and_kind():
    assert repr(BitView(-6.25, "fp16")) == "fp16       1 | 10001 | 1001000000   -6.25   0xc640   normal"
    assert repr(BitView(1, "fp8_e5m2")) == "fp8_e5m2   0 | 00000 | 01   1.52587890625e-05   0x01   subnormal"
    assert repr(BitView(6.0, "fp4_e2m1fn")) == "fp4_e2m1fn 0 | 11 | 1   6.0   0x7   normal"


def test_rounding_is_told():
    assert repr(BitView(0.1, "fp16")).endswith("normal   0.1 rounded by -2.44e-05")
    assert repr(BitView(1e6, "fp16")).endswith("inf   0x7c00   infinity   1000000.0 rounded")
    assert "rounded" not in repr(BitView(math.nan, "fp16")) and "rounded" not in repr(BitView(0.5, "fp16"))
    assert repr(BitView(math.nan, "fp4_e2m1fn")).endswith("zero   nan rounded")
    assert repr(BitView(math.inf, "fp4_e2m1fn")).endswith("6.0   0x7   normal   inf rounded")


def test_int_is_a_code_and_float_a_value():
    assert BitView(1, "fp16").value == 2.0**-24
    assert BitView(1.0, "fp16").code == BitView(np.float32(1), "fp16").code == 0x3C00
    assert BitView(np.uint16(0x3C00), "fp16").value == BitView(np.array(0x3C00), "fp16").value == 1.0
    seen = torch.tensor(-6.25, dtype=torch.float16)
    assert BitView(seen, "fp16").value == BitView(seen.view(torch.uint16), "fp16").value == -6.25


@pytest.mark.parametrize("name", FORMATS)
def test_formula_gives_the_value(name):
    last = 2 ** FORMATS[name].bits - 1
    for code in {*range(0, last, last // 1000 + 1), last}:
        view = BitView(code, name)
        if math.isfinite(view.value):
            python = view.formula.replace("^", "**").replace("x", "*")
            assert repr(float(eval(python))) == repr(view.value), (code, python)
        else:
            assert view.formula.endswith(view.kind)


@pytest.mark.parametrize("name", [name for name in FORMATS if FORMATS[name].bits <= 16])
def test_neighbours_are_the_next_numbers(name):
    codes = np.arange(2 ** FORMATS[name].bits)
    values = FORMATS[name].decode(codes)
    numbers = np.unique(values[~np.isnan(values)])  # sorted; -0 and 0 are one
    for code in codes[:: max(1, codes.size // 1000)]:
        view = BitView(code, name)
        below, above = (None if found is None else FORMATS[name].decode(found) for found in view.neighbours())
        if math.isnan(view.value):
            assert (below, above) == (None, None)
        else:
            place = np.searchsorted(numbers, view.value)
            assert below == (numbers[place - 1] if place else None)
            assert above == (numbers[place + 1] if place + 1 < numbers.size else None)


@pytest.mark.parametrize(
    "value_or_code, name, error", [(70_000, "fp16", ValueError), ("1", "fp16", TypeError), (1.0, "fp17", KeyError)]
)
def test_bad_input_is_refused(value_or_code, name, error):
    with pytest.raises(error):
        BitView(value_or_code, name)


@pytest.fixture
def explorer():
    return bitview._Explorer("fp16", 0.1)


def bits_shown(explorer):
    return "".join(button.description for row in explorer.rows.values() for button in row.children)


def test_explorer_shows_what_is_clicked(explorer):
    assert bits_shown(explorer) == f"{0x2E66:016b}"
    assert explorer.number.value == "0.1"
    explorer.bits[15].click()
    assert explorer.view.value == -0.0999755859375
    assert explorer.number.value == "-0.0999755859375"
    assert "-0.0999755859375</b>" in explorer.result.value
    assert bits_shown(explorer)[0] == "1"
    explorer.above.click()
    assert explorer.view.code == 0xAE65
    assert [caption.value for caption in explorer.captions.values()] == ["sign 1", "exponent 11", "fraction 613"]
    assert "spacing here: 6.10352e-05" in explorer.result.value
    explorer.number.value = "inf"
    assert explorer.above.disabled and not explorer.below.disabled


def test_explorer_keeps_the_typed_number_over_formats(explorer):
    for name in SHOWN:
        explorer.format.value = name
        assert explorer.view.given == 0.1 and len(bits_shown(explorer)) == FORMATS[name].bits
    explorer.format.value = "fp32"
    explorer.bits[31].click()
    assert explorer.view.value == -float(np.float32(0.1))


READ = {" 1 ": 0x3C00, "2^-24": 1, "2**-25": 0, "-2^4": 0xCC00, "-1/3": 0xB555, "1e9": 0x7C00}
READ |= {"\N{MINUS SIGN}2": 0xC000, "-INF": 0xFC00, "-0": 0x8000, "nan": 0x7E00, "0x3C00": 0x3C00, "0b11": 3}


@pytest.mark.parametrize("text, code", READ.items())
def test_explorer_reads_numbers_as_people_write_them(explorer, text, code):
    explorer.number.value = text
    assert explorer.view.code == code and not explorer.problem.value


REFUSED = dict.fromkeys(["a tenth", "", "2^3^4", "0xzz"], "is not a number")
REFUSED |= dict.fromkeys(["0x10000", hex(2**64)], "codes are integers from 0 to 0xffff")
REFUSED |= {"1/0": "division by zero", "10^400": "too large", "<b>": "&lt;b&gt;"}


@pytest.mark.parametrize("text, reply", REFUSED.items())
def test_explorer_explains_what_it_cannot_read_and_keeps_the_rest(explorer, text, reply):
    before = explorer.result.value
    explorer.number.value = text
    assert reply in explorer.problem.value and explorer.result.value == before
    explorer.bits[0].click()
    assert not explorer.problem.value and explorer.view.code == 0x2E67


def pointers(view):
    """The x of each triangle in the number line, after a check that everything is drawn within it."""
    drawing = bitview._number_line(view)
    places = [float(x) for x in re.findall(r"(?:M|x=\")(-?[\w.]+)", drawing)]
    assert all(0 <= x <= 640 for x in places), drawing
    return [float(x) for x in re.findall(r'd="M([\d.]+) \d+ l-?(?:5|12)', drawing)]


@pytest.mark.parametrize("name", SHOWN)
def test_explorer_draws_every_kind_of_number_and_its_number_line_stays_in_the_frame(explorer, name):
    explorer.format.value = name
    last = 2 ** FORMATS[name].bits - 1
    values = [0.1, -0.1, 1e300, -1e300, 5e-324, math.inf, -math.inf, math.nan, 0.0, 1.0, 3.0]
    for number in [0, 1, last // 2, last // 2 + 1, last, *values]:
        view = BitView(number, name)
        explorer.show(view)
        assert repr(view.value) in explorer.result.value
        pointers(view)


def test_number_line_points_at_the_typed_number():
    middle, size = pointers(BitView(1.0, "fp16"))
    above, _ = pointers(BitView(1 + 2**-12, "fp16"))  # a quarter of the way to the next number
    below, _ = pointers(BitView(1 - 2**-13, "fp16"))
    assert (middle, above - middle, middle - below) == (320, 60, 30)
    assert pointers(BitView(-1.0, "fp16"))[1] == size  # the second line shows the size alone
    assert size < pointers(BitView(1000.0, "fp16"))[1] < 580
    assert pointers(BitView(1e6, "fp16")) == pointers(BitView(math.inf, "fp16")) == [616]  # beyond the line's end
    assert pointers(BitView(1e-9, "fp16"))[1] == pointers(BitView(0.0, "fp16"))[1] == 24


def test_page_without_a_kernel_shows_fixed_numbers(monkeypatch):
    shown = []
    monkeypatch.setattr(bitview, "display", lambda data, raw: shown.append(data))
    bitview.explore_bits("bf16", number=0.1)
    fixed, live = shown
    assert "0.10009765625" in fixed["text/html"] and "0.10009765625" in fixed["text/plain"]
    assert fixed["text/html"].startswith('<div class="bitview-fixed" data-format="bf16" data-value="0.1">')
    assert live["text/plain"] == "" and "application/vnd.jupyter.widget-view+json" in live
