import base64
import io

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.colors import to_hex, to_rgb
from PIL import Image

from halfbits.formats import FORMATS
from helpers import plots
from helpers.plots import COLORS


@pytest.fixture
def figure(monkeypatch):
    """Calls a plotting function and returns the one figure that it showed, with the text that goes with it."""
    matplotlib.use("agg")
    close = plt.close

    def draw(function, *arguments, **more):
        shown, closed = [], []
        monkeypatch.setattr(plots, "display", lambda data, metadata, raw: shown.append((data, metadata)))
        monkeypatch.setattr(plots.plt, "close", closed.append)
        function(*arguments, **more)
        ((data, metadata),), (drawn,) = shown, closed
        close(drawn)
        assert not plt.get_fignums(), "an open figure is shown a second time at the end of its cell"
        picture, facts = Image.open(io.BytesIO(base64.b64decode(data["image/png"]))), metadata["image/png"]
        assert picture.size == (2 * facts["width"], 2 * facts["height"]), "twice the page's resolution"
        assert picture.convert("RGBA").getpixel((0, 0))[3] == 0, "a white slab on a dark page"
        drawn.alt, drawn.compared = facts["alt"], data["text/plain"]
        return drawn

    return draw


def texts(figure):
    return [text.get_text() for text in figure.findobj(matplotlib.text.Text)]


def test_bars_carry_their_numbers_intervals_and_reference(figure):
    speed = pd.Series({"FP32": 1.0, "bf16": 1.62})
    drawn = figure(plots.bars, speed, "Speed", "times", low=speed - 0.1, high=speed + 0.2, reference=1)
    assert {"Speed", "times; hatched: the interval contains 1", "FP32", "bf16", "1.62"} <= set(texts(drawn))
    axes = drawn.axes[0]
    assert [round(bar.get_width(), 2) for bar in axes.patches] == [1.0, 1.62]
    assert axes.get_xlim()[0] == 0, "a bar that does not begin at 0 lies"
    (intervals,) = [part for part in axes.containers if isinstance(part, matplotlib.container.ErrorbarContainer)]
    low, high = intervals.lines[2][0].get_segments()[1][:, 0]
    assert (round(low, 2), round(high, 2)) == (1.52, 1.82)
    assert drawn.alt == (
        "Bar chart: Speed. times; hatched: the interval contains 1: "
        "FP32 1, from 0.9 to 1.2; bf16 1.62, from 1.52 to 1.82."
    )
    equal, faster = axes.patches
    assert to_hex(equal.get_facecolor()) == to_hex("0.75") and to_hex(faster.get_facecolor()) == COLORS["bf16"]
    assert equal.get_hatch() and not faster.get_hatch()


@pytest.mark.parametrize(("low", "high", "grey"), [(0.9, 1.0, True), (1.0, 1.1, True), (0.9, 0.99, False)])
def test_an_interval_that_ends_at_the_reference_contains_it(figure, low, high, grey):
    bar = pd.Series({"bf16": (low + high) / 2})
    drawn = figure(plots.bars, bar, "Speed", "times", low=bar * 0 + low, high=bar * 0 + high, reference=1)
    assert ("times; hatched: the interval contains 1" in texts(drawn)) == grey


def test_the_reference_of_bars_is_named_and_within_the_picture(figure):
    values = pd.Series({"FP32": 1.0, "bf16": 1.62, "fp16": 0.6})
    drawn = figure(plots.bars, values, "Errors", "times", reference=1.1, named="limit")
    (line,) = drawn.axes[0].lines
    assert line.get_xdata() == [1.1, 1.1]
    words = {text.get_text(): text.xy for text in drawn.axes[0].texts}
    assert words == {"1": (1.0, 0), "1.62": (1.62, 1), "0.6": (0.6, 2), "limit": (1.1, 1)}
    far = figure(plots.bars, values, "Errors", "times", reference=3, named="limit")
    assert far.axes[0].get_xlim()[1] > 3


def test_nbval_compares_which_number_belongs_to_which_name(figure):
    """To one digit, and of an interval the middle: in the rest runs differ between CPUs."""
    speed = pd.Series({"FP32": 1.0, "bf16": 1.62})
    drawn = figure(plots.bars, speed, "Speed", "times", low=speed - 0.1, high=speed + 0.2, reference=1)
    assert drawn.compared == "<Figure>\nFP32 1; bf16 2", "a folded output shows its first line"
    table = pd.DataFrame({"step": [1, 2, 1, 2], "loss": [17, 8.08e-11, 65504, 0.5], "arm": ["a", "a", "b", "b"]})
    drawn = figure(plots.curves, table, "step", "loss", "arm", "Loss", log10=["loss"])
    assert drawn.compared == "<Figure>\na from 2e+01 to 8e-11; b from 7e+04 to 0.5"
    two_runs = pd.concat([table, table.assign(loss=1.0)])
    drawn = figure(plots.curves, two_runs, "step", "loss", "arm", "Loss", log10=["loss"])
    assert drawn.compared == "<Figure>\na of several runs; b of several runs"


def test_bars_have_the_colours_of_what_they_are_said_to_be(figure):
    shares = pd.Series({"JPEG to float32": 1.0, "bf16, spoiled": 2.0, "bf16": 3.0})
    drawn = figure(plots.bars, shares, "Verdicts", "times", kinds=["", "WORSE", "NOT WORSE"])
    found = [to_hex(bar.get_facecolor()) for bar in drawn.axes[0].patches]
    assert found == ["#9a9a9a", COLORS["becomes 0"], COLORS["normal"]]


def test_stacked_bars_add_up(figure):
    table = pd.DataFrame({"kept": [3.0, 1.5], "weights": [1.0, 1.0]}, index=["FP32", "bf16"])
    drawn = figure(plots.stacked_bars, table, "Memory", "MB")
    assert {"4", "2.5", "kept", "weights", "MB"} <= set(texts(drawn))
    assert drawn.alt == "Stacked bars of kept, weights: Memory. MB: FP32 3 + 1 = 4; bf16 1.5 + 1 = 2.5."


def test_nothing_to_draw_is_said(capsys):
    plots.curves(pd.DataFrame(columns=["x", "y", "arm"]), "x", "y", "arm", "Empty")
    assert capsys.readouterr().out == "Empty: nothing to draw\n"


def test_curves_have_their_names_at_their_ends_apart_from_each_other(figure):
    table = pd.DataFrame(
        {"epoch": [1, 2, 1, 2], "loss": [0.9, 0.5, 0.8, 0.45], "arm": ["FP32", "FP32", "bf16", "bf16"]}
    )
    drawn = figure(plots.curves, table, "epoch", "loss", "arm", "Loss", shade={"overflows": (1.5, 2)})
    names = {text.get_text(): text for text in drawn.axes[0].texts}
    assert set(names) == {"FP32", "bf16", "overflows"}
    assert names["FP32"].xy[1] - names["bf16"].xy[1] >= 0.069, "names that lie on each other"
    assert drawn.alt == "Line chart: Loss. loss over epoch: FP32 from 0.9 to 0.5; bf16 from 0.8 to 0.45."


def test_lines_on_logarithmic_axes_are_arithmetic_means(figure):
    table = pd.DataFrame({"epoch": [1, 2] * 2, "loss": [1.0, 0.1, 3.0, 0.3], "arm": "FP32"})
    drawn = figure(plots.curves, table, "epoch", "loss", "arm", "Loss", log10=["loss"])
    assert list(drawn.axes[0].lines[0].get_ydata()) == pytest.approx([2, 0.2])
    assert drawn.axes[0].get_yscale() == "log"


def test_a_line_that_ends_early_is_named_where_it_ends(figure):
    table = pd.DataFrame({"step": [1, 2, 3, 1, 2], "loss": [8.0, 4, 2, 8, 1], "arm": ["FP32"] * 3 + ["fp16"] * 2})
    drawn = figure(plots.curves, table, "step", "loss", "arm", "Loss", log2=["loss"], shade={"overflows": (1, 2)})
    places = {text.get_text(): text.xy for text in drawn.axes[0].texts}
    (left, right), (bottom, top) = drawn.axes[0].get_xlim(), np.log2(drawn.axes[0].get_ylim())
    at = {height: pytest.approx((height - bottom) / (top - bottom)) for height in (0, 1)}
    assert places["FP32"] == (1.01, at[1])
    assert places["fp16"] == (pytest.approx((2 - left) / (right - left) + 0.01), at[0])


def test_lines_may_be_named_at_their_peaks(figure):
    table = pd.DataFrame({"op": range(41), "GiB": [*range(20), 30.5, *range(20, 0, -1)], "run": "fp16"})
    drawn = figure(plots.curves, table, "op", "GiB", "run", "Memory", peaks=True)
    (name,) = drawn.axes[0].texts
    assert (name.get_text(), *name.xy, name.get_ha()) == ("fp16: 30.5", 20, 30.5, "center")
    assert drawn.alt == "Line chart: Memory. GiB over op: fp16 30.5."


def test_points_show_every_run_and_the_mean(figure):
    table = pd.DataFrame({"percent": [96.0, 98.0, 97.0], "arm": ["FP32", "FP32", "bf16"]})
    drawn = figure(plots.points, table, "percent", "arm", "Accuracy", 97.5, "margin")
    offsets = [x for dots in drawn.axes[0].collections for x, _ in dots.get_offsets()]
    assert sorted(offsets) == [96.0, 97.0, 97.0, 97.0, 98.0]  # three runs, two means
    assert drawn.axes[0].lines[-1].get_xdata() == [97.5, 97.5] and "margin" in texts(drawn)
    assert drawn.alt == "Dots and their mean: Accuracy. mean percent: FP32 97; bf16 97."


@pytest.mark.parametrize("shape", [(8, 6), (3, 8, 6)])
def test_rows_of_pictures_bear_their_names(shape, figure):
    drawn = figure(plots.pictures, {"original": torch.ones(4, *shape), "fp16": torch.zeros(3, *shape)}, "Digits")
    assert {"original", "fp16", "Digits"} <= set(texts(drawn))
    assert drawn.axes[0].images[0].get_array().shape[:2] == (8, 6)
    assert drawn.alt == "Rows of pictures: Digits: original 4 pictures, mean 1.00; fp16 3 pictures, mean 0.00."


def test_a_logarithmic_axis_within_two_powers_is_drawn(figure):
    table = pd.DataFrame({"epoch": [1, 2], "loss": [0.4, 0.6], "arm": "bf16"})
    assert figure(plots.curves, table, "epoch", "loss", "arm", "Loss", log10=["loss"]).axes[0].get_yscale() == "log"


def test_tables_are_rounded_and_aligned_and_bear_no_counted_index(monkeypatch):
    shown = []
    monkeypatch.setattr(plots, "display", lambda data, raw: shown.append(data))
    table = pd.DataFrame({"format": ["fp16", "bf16"], "largest": [65504.0, 3.3895e38], "codes": [65536, 7]})
    plots.show(table)
    plots.show(table.set_index("format").largest, digits=2)
    first, second = shown
    words = "format largest codes fp16 65,504 65,536 bf16 3.39e+38 7"
    assert first["text/plain"].split() == words.split()
    assert second["text/plain"].split()[-1] == "3.4e+38" and "fp16" in second["text/plain"]
    assert first["text/html"].count("text-align: right") == 6 and "<th" in second["text/html"]


@pytest.mark.parametrize("theme", ["#ffffff", "#111111"])
def test_every_colour_can_be_seen_on_light_and_dark_pages(theme):
    """The contrast that WCAG 2.1 asks of graphics, and of text for the neutral colour of words."""

    def luminance(color):
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
        return np.dot([0.2126, 0.7152, 0.0722], linear)

    def contrast(color):
        low, high = sorted([luminance(color), luminance(theme)])
        return (high + 0.05) / (low + 0.05)

    faint = {name: contrast(color) for name, color in COLORS.items() if contrast(color) < 2.2}
    assert not faint
    assert contrast(plots.NEUTRAL) > 4


def test_names_find_their_colour():
    formats = {"FP32 (TF32)": "tf32", "torch.bfloat16": "bf16", "fp16 + GradScaler": "fp16", "fp8_e4m3fn": "fp8"}
    formats |= {"AMP": "fp16", "momentum": "optimizer", "becomes 0": "becomes 0"}
    assert {name: plots.color_of(name) for name in formats} == {name: COLORS[kind] for name, kind in formats.items()}
    assert plots.color_of("a sample") == plots.NEUTRAL
    assert plots.NEUTRAL not in map(plots.color_of, FORMATS)


def test_bars_have_a_tick_each_where_each_has_a_reference_of_its_own(figure):
    ratios = pd.Series({"FP32 again": 1.0, "bf16: speed": 0.7, "bf16: errors": 1.1})
    ticks = pd.Series({"FP32 again": 1.0, "bf16: speed": 1.0, "bf16: errors": 1.2})
    drawn = figure(plots.bars, ratios, "Verdict", "FP32 = 1", reference=ticks)
    (marks,) = [part for part in drawn.axes[0].collections if len(part.get_offsets()) == 3]
    assert marks.get_offsets().data.tolist() == [[1.0, 0], [1.0, 1], [1.2, 2]]


def test_strips_are_as_green_as_the_device_works(figure):
    rows = [("step", 0, 10.5), ("load", 8, 9), ("compute", 0, 4), ("compute", 4.5, 6)]
    table = pd.DataFrame(rows, columns=["work", "start", "end"])
    table = pd.concat([table.assign(trace="a", way="now"), table.iloc[[0, 2]].assign(trace="b", way="now")])
    drawn = figure(plots.strips, table, "trace", "way", "Who waits")
    first, second = drawn.axes
    red, grey, green = first.patches  # each over the one before
    values, edges, _ = green.get_data()
    assert values.round(6).tolist() == [1, 1, 1, 1, 0.5, 1, 0, 0, 0, 0, 0]
    assert edges[-1] == 10.5
    assert grey.get_data().edges.tolist() == [8, 9]
    assert red.get_data().edges.tolist() == [0, 10.5]
    assert len(second.patches) == 2, "no loader"
    assert {"10 ms, computes 52%", "10 ms, computes 38%", "waits for the loader", "ms, now"} <= set(texts(drawn))
    assert first.get_xlim() == second.get_xlim() == (0, 10.5)
