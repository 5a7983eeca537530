import matplotlib
import matplotlib.pyplot as plt
import pandas as pd
import pytest
import torch

from helpers import plots


@pytest.fixture
def figure(monkeypatch):
    """Calls a plotting function and returns the one figure that it showed, with the text that goes with it."""
    matplotlib.use("agg")

    def draw(function, *arguments, **more):
        shown = []
        monkeypatch.setattr(plots, "display", lambda *figure, metadata: shown.append((*figure, metadata)))
        function(*arguments, **more)
        assert not plt.get_fignums(), "an open figure is shown a second time at the end of its cell"
        ((drawn, metadata),) = shown
        drawn.alt = metadata["image/png"]["alt"]
        drawn.draw_without_rendering()
        assert drawn.get_facecolor() == (1, 1, 1, 1)
        return drawn

    return draw


def texts(figure):
    return [text.get_text() for text in figure.findobj(matplotlib.text.Text)]


def test_bars_carry_their_numbers_intervals_and_reference(figure):
    speed = pd.Series({"FP32": 1.0, "bf16": 1.62})
    drawn = figure(plots.bars, speed, "Speed", "times", low=speed - 0.1, high=speed + 0.2, reference=1)
    assert {"Speed", "times; grey: the interval contains 1", "FP32", "bf16", "1.62"} <= set(texts(drawn))
    axes = drawn.axes[0]
    assert [round(bar.get_width(), 2) for bar in axes.patches] == [1.0, 1.62]
    assert axes.get_xlim()[0] == 0, "a bar that does not begin at 0 lies"
    (intervals,) = [part for part in axes.containers if isinstance(part, matplotlib.container.ErrorbarContainer)]
    low, high = intervals.lines[2][0].get_segments()[1][:, 0]
    assert (round(low, 2), round(high, 2)) == (1.52, 1.82)
    assert drawn.alt == (
        "Bar chart: Speed. times; grey: the interval contains 1: FP32 1, from 0.9 to 1.2; bf16 1.62, from 1.52 to 1.82."
    )
    equal, faster = axes.patches
    assert equal.get_facecolor() == matplotlib.colors.to_rgba("0.75") != faster.get_facecolor()
    assert equal.get_hatch() and not faster.get_hatch()


@pytest.mark.parametrize(("low", "high", "grey"), [(0.9, 1.0, True), (1.0, 1.1, True), (0.9, 0.99, False)])
def test_an_interval_that_ends_at_the_reference_contains_it(figure, low, high, grey):
    bar = pd.Series({"bf16": (low + high) / 2})
    drawn = figure(plots.bars, bar, "Speed", "times", low=bar * 0 + low, high=bar * 0 + high, reference=1)
    assert ("times; grey: the interval contains 1" in texts(drawn)) == grey


def test_bars_without_a_reference_are_not_grey(figure):
    speed = pd.Series({"FP32": 1.0, "bf16": 1.62})
    drawn = figure(plots.bars, speed, "Speed", "times", low=speed - 0.1, high=speed + 0.2)
    assert len({bar.get_facecolor() for bar in drawn.axes[0].patches}) == 2
    assert drawn.alt == "Bar chart: Speed. times: FP32 1; bf16 1.62."


def test_stacked_bars_add_up_and_differ_in_more_than_colour(figure):
    table = pd.DataFrame({"kept": [3.0, 1.5], "weights": [1.0, 1.0]}, index=["FP32", "bf16"])
    drawn = figure(plots.stacked_bars, table, "Memory", "MB")
    assert {"4", "2.5", "kept", "weights", "MB"} <= set(texts(drawn))
    assert len({bar.get_hatch() for bar in drawn.axes[0].patches}) == 2
    assert drawn.axes[0].get_xlim()[0] == 0
    assert drawn.alt == "Stacked bars of kept, weights: Memory. MB in all: FP32 4; bf16 2.5."


@pytest.mark.parametrize("plot", [plots.curves, plots.points])
def test_nothing_to_draw_is_said(plot, capsys):
    plot(pd.DataFrame(columns=["x", "y", "arm"]), "x", *(["y"] if plot is plots.curves else []), "arm", "Empty")
    assert capsys.readouterr().out == "Empty: nothing to draw\n"


def test_curves_have_markers(figure):
    table = pd.DataFrame({"epoch": [1, 2, 1, 2], "loss": [0.9, 0.5, 0.8, 0.4], "arm": ["FP32", "FP32", "bf16", "bf16"]})
    drawn = figure(plots.curves, table, "epoch", "loss", "arm", "Loss")
    lines = [line for line in drawn.axes[0].lines if len(line.get_xdata())]
    assert len({line.get_marker() for line in lines}) == 2
    assert {"Loss", "FP32", "bf16"} <= set(texts(drawn))
    assert drawn.alt == "Line chart: Loss. loss over epoch: FP32 from 0.9 to 0.5; bf16 from 0.8 to 0.4."


def test_points_show_every_run_and_the_mean(figure):
    table = pd.DataFrame({"percent": [96.0, 98.0, 97.0], "arm": ["FP32", "FP32", "bf16"]})
    drawn = figure(plots.points, table, "percent", "arm", "Accuracy")
    offsets = [x for dots in drawn.axes[0].collections for x, _ in dots.get_offsets()]
    assert sorted(offsets) == [96.0, 97.0, 97.0, 97.0, 98.0]  # three runs, two means
    assert drawn.alt == "Dots and their mean: Accuracy. mean percent: FP32 97; bf16 97."


def test_images_and_captions(figure):
    drawn = figure(plots.images, [torch.rand(3, 8, 6)] * 2, ["one", "two"])
    assert {"one", "two"} <= set(texts(drawn))
    assert drawn.axes[0].images[0].get_array().shape == (8, 6, 3)
    assert drawn.alt == "A row of pictures: 1 one; 2 two."


def test_histogram_counts_between_the_edges(figure):
    drawn = figure(plots.histogram, [0.1, 0.2, 1.5], "Halves", "value", [0, 1, 2], {"limit": 1.5})
    assert [bar.get_height() for bar in drawn.axes[0].patches] == [2, 1]
    assert {"Halves", "value", " limit"} <= set(texts(drawn))
    assert list(drawn.axes[0].lines[0].get_xdata()) == [1.5, 1.5]
    assert drawn.alt == "Histogram: Halves. How many by value: most 2 around 0.5; limit 1.5."


def test_marks_of_a_histogram_have_room_above_the_bars(figure):
    values, edges = torch.tensor([1.5] * 100), [0, 1, 2, 3]
    plain = figure(plots.histogram, values, "Sizes", "size", edges)
    marked = figure(plots.histogram, values, "Sizes", "size", edges, marks={"limit": 2})
    assert marked.axes[0].get_ylim()[1] >= 114 > plain.axes[0].get_ylim()[1]
    assert " limit" in texts(marked)


def test_ranges_put_each_row_at_its_precision(figure):
    columns = ["subnormal", "normal", "max", "precision"]
    table = pd.DataFrame(
        [[2.0**-24, 2.0**-14, 65504.0, 11], [2.0**-133, 2.0**-126, 3e38, 8]], ["fp16", "bf16"], columns
    )
    drawn = figure(plots.ranges, table, "Range", "size", "bits")
    assert {"Range", "size", "bits", "fp16", "bf16", "11", "8"} <= set(texts(drawn))
    dotted, solid = drawn.axes[0].lines[:2]
    assert dotted.get_linestyle() == ":" and list(dotted.get_xdata()) == [2.0**-24, 2.0**-14]
    assert list(solid.get_xdata()) == [2.0**-14, 65504.0] and list(solid.get_ydata()) == [11, 11]
    assert drawn.alt.startswith(
        "A line a format: Range. bits and size: fp16 11 from 5.96e-08 to 6.55e+04; bf16 8 from "
    )


def test_curves_can_have_logarithmic_axes_and_steps(figure):
    table = pd.DataFrame({"number": [1, 2, 4], "spacing": [1e-3, 2e-3, 4e-3], "format": "fp16"})
    drawn = figure(plots.curves, table, "number", "spacing", "format", "Spacing", log2=["number"], log10=["spacing"])
    assert drawn.axes[0].get_xscale() == drawn.axes[0].get_yscale() == "log"


def test_areas_are_stacked_hatched_and_marked(figure):
    table = pd.DataFrame({"kept": [1.0, 3.0, 0.0], "weights": [1.0, 1.0, 1.0]})
    drawn = figure(plots.areas, table, "Memory", "op", "GB", marks={"forward": 0, "backward": 1})
    assert {"Memory", "op", "GB", "kept", "weights", " forward", " backward"} <= set(texts(drawn))
    areas = [part for part in drawn.axes[0].collections if part.get_label() in table]
    assert [area.get_paths()[0].vertices[:, 1].max() for area in areas] == [3, 4]
    assert len({area.get_hatch() for area in areas}) == 2
    assert drawn.alt == "Stacked areas of kept, weights: Memory. GB by op: at most 4; forward 0; backward 1."


def test_the_roofline_puts_ops_under_their_roof_and_leaves_out_those_without_flops(figure):
    ops = pd.DataFrame(
        [("convolution", 4e12, 1e10, 2.0), ("convolution", 1e12, 1e12, 1.0), ("norm", 0, 1e12, 1.0)],
        columns=["kind", "flops", "bytes", "seconds"],
    )
    drawn = figure(plots.roofline, ops, {"FP32": 1e12, "16 bits": 2e12}, 1e12, "Roofs")
    assert {"Roofs", "FLOPs a byte", "FP32", "16 bits", "convolution"} <= set(texts(drawn))
    assert "norm" not in texts(drawn)
    axes = drawn.axes[0]
    assert axes.get_xscale() == axes.get_yscale() == "log"
    assert sorted(map(tuple, axes.collections[0].get_offsets().tolist())) == [(1, 1), (400, 2)]
    assert [line.get_ydata().max() for line in axes.lines[:2]] == [1, 2], "level roofs, in TFLOP/s"
    assert drawn.alt == "Roofline: Roofs. TFLOP/s over FLOPs a byte: FP32 1; 16 bits 2; dots convolution."
