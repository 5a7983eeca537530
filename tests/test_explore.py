"""Charts with sliders: stored so that JupyterLab draws them alone, and true at their ends."""

import base64
import io
import json
import sys

import altair as alt
import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from helpers import explore, records


@pytest.fixture
def chart(monkeypatch):
    """Calls a function that shows a chart; what it stores, and what it returns."""

    def draw(function, *arguments, **more):
        shown = []
        monkeypatch.setattr(explore, "display", lambda data, metadata=None, raw=True: shown.append((data, metadata)))
        result = function(*arguments, **more)
        ((data, metadata),) = shown
        return data, metadata, result

    return draw


RUN = pd.DataFrame(
    {"step": range(4), "scale": [4.0, 2.0, 2.0, 4.0], "tracker": [0, 0, 1, 0], "next scale": [2.0, 2.0, 4.0, 4.0]}
)
RUNS = {(weight, k): ([0.2, 0.1 * weight + k], torch.rand(10, 8, 8)) for weight in (1, 0.01) for k in (0, 8)}


PATHS = {(name, update): [1.5, 1.5, 1.5 - update * 2.0**-11] for name in ("bf16", "fp16") for update in (1, 2)}


LINES = [("scale(loss)", "loss"), ("unscale_()", "")]
LOOPS = {(1, 1): ([65536.0, 1.01], "0.2"), (1, 0): ([65536.0, 2.0**-15], "0.7"), (0, 1): ([0.0], "stops")}
LOOPS[0, 0] = ([1.0, float("nan")], "0.3")


GRADIENTS = torch.tensor([2.0**-30, 2.0**-20, 1.0, 0.0])
CHARTS = {  # nbval ignores them in the notebooks, and compares all others
    "fates": (explore.fates, GRADIENTS, range(0, 41), "Gradients"),
    "steps": (explore.steps, RUN, "Edge", 2),
    "drawn_runs": (explore.drawn_runs, RUNS, "Digits", (0.01, 0)),
}


@pytest.mark.parametrize("name", CHARTS)
def test_a_chart_is_stored_for_whoever_can_and_cannot_draw_it(name, chart, monkeypatch):
    data, metadata, _ = chart(*CHARTS[name])
    spec = data[explore.VEGA_LITE]
    assert spec["$schema"].endswith("/v5.json")
    assert spec["description"] == data["text/plain"] == metadata["image/png"]["alt"]
    picture = Image.open(io.BytesIO(base64.b64decode(data["image/png"]))).convert("RGBA")
    assert picture.getpixel((0, 0))[3] == 0, "a white slab on a dark page"
    assert "container" not in json.dumps(spec), "JupyterLab draws such a width as 0 at times"
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    again, _, _ = chart(*CHARTS[name])
    assert again == {explore.VEGA_LITE: spec, "text/plain": data["text/plain"]}, "the same, without a picture"


def test_gradients_are_counted_by_their_fate(chart):
    _, _, ends = chart(*CHARTS["fates"])
    assert ends["becomes 0"].tolist() == pytest.approx([1 / 3, 0])
    assert ends["overflows"].tolist() == pytest.approx([0, 2 / 3])


def test_what_is_scaled_down_stays_on_the_axis(chart):
    data, _, _ = chart(explore.fates, torch.tensor([2.0**-3, 2.0**15]), range(-40, 9), "Numbers")
    axis = data[explore.VEGA_LITE]["layer"][0]["encoding"]["x"]
    assert axis["scale"]["domain"] == [-43, 25]


def test_steps_say_what_gradscaler_did(chart):
    data, _, _ = chart(explore.steps, RUN, "Edge", 2)
    said = [row["says"] for rows in data[explore.VEGA_LITE]["datasets"].values() for row in rows if "fate" in row]
    assert said[0] == "a gradient is not finite: the step is skipped, the scale halves"
    assert said[2] == "all gradients are finite: the step is taken, clean step 2 of 2, so the scale doubles"


def test_a_walk_has_a_tick_for_each_number_as_far_as_the_largest_update_goes(chart):
    spec = chart(explore.walk, PATHS, 2.0**-11, "Updates", 1)[0][explore.VEGA_LITE]
    ticks = [row for rows in spec["datasets"].values() for row in rows if "number" in row]
    for name, spacing in (("bf16", 2**-7), ("fp16", 2**-10)):
        numbers = [row["number"] for row in ticks if row["format"] == name]
        assert set(np.diff(numbers)) == {spacing}
        assert numbers[0] - spacing < 1.5 - 2 * 3 * 2 * 2**-11 <= numbers[0]
        assert numbers[-1] > 1.5


TWO_KERNELS = {"launched": [2.0, 3.0], "took": [4.0, 6.0], "own": 5.0, "loading": 1.0, "waits_for": None}


def replayed(trace, fast=None):
    return explore.replay(trace, fast).round(6).to_numpy().tolist()


def test_a_replay_waits_for_launches_or_for_the_kernel_before():
    trace = TWO_KERNELS | {"started": [2.0, 6.0], "recorded": 10.0}
    assert replayed(trace, 1) == [["step", 0, 10], ["load", 8, 9], ["compute", 0, 4], ["compute", 4, 10]], "the GPU"
    assert replayed(trace, 10)[0] == ["step", 0, 5], "the CPU sets the pace"
    assert replayed(trace, 10)[2:] == [["compute", 0, 0.4], ["compute", 1, 1.6]], "launches 1 ms apart"


def test_a_replay_lets_the_cpu_wait_for_its_copy():
    trace = TWO_KERNELS | {"started": [2.0, 6.0], "recorded": 10.0, "waits_for": 0}
    # The copy ends 4 ms after the GPU is free; only then the CPU goes on, and launches 1 ms later.
    assert replayed(trace, 1)[2:] == [["compute", 0, 4], ["compute", 5, 11]]
    assert replayed(trace, 1)[0] == ["step", 0, 11]


def test_what_was_recorded_is_drawn_as_it_was():
    trace = TWO_KERNELS | {"started": [7.0, 12.0], "recorded": 20.0}
    assert replayed(trace) == [["step", 0, 20], ["load", 18, 19], ["compute", 0, 4], ["compute", 5, 11]]


@pytest.mark.parametrize("record", records.load("08 published traces"), ids=lambda record: record["what"]["arm"])
def test_a_published_trace_is_whole_and_its_replay_right(record):
    trace = record["results"]
    assert len(trace["launched"]) == len(trace["started"]) == len(trace["took"]) > 1000
    assert 0.98 < explore.replay(trace, 1).end[0] / trace["recorded"] < 1.02
    assert sum(trace["by_op"].values()) == pytest.approx(sum(trace["took"]), rel=1e-3)
    ends = np.add(trace["started"], trace["took"])
    assert (ends[:-1] <= np.add(trace["started"][1:], 0.001)).all(), "one stream: kernels follow each other"


def test_a_loop_says_what_each_line_leaves_in_the_gradients(chart):
    spec = chart(explore.switches, LINES, LOOPS, "Two lines")[0][explore.VEGA_LITE]
    left = {row["key"]: row["left"] for rows in spec["datasets"].values() for row in rows if "left" in row}
    assert left == {
        "11": ["scaled: 2^16 times", "true size"],
        "10": ["scaled: 2^16 times", "too small: 2^-15 times"],
        "01": ["none"],
        "00": ["true size", "not finite"],
    }
    texts = [row for rows in spec["datasets"].values() for row in rows if "off" in row]
    assert [row["off"] for row in texts] == ["loss", "# unscale_()"], "replaced, or a comment"


def test_runs_that_end_in_nan_say_so_and_are_drawn_blank(chart):
    runs = RUNS | {(1, 8): ([0.2, np.nan], torch.full((10, 8, 8), np.nan))}
    data, _, _ = chart(explore.drawn_runs, runs, "Digits", (1, 0))
    rows = [row for rows in data[explore.VEGA_LITE]["datasets"].values() for row in rows if "pixels" in row]
    by_run = {row["run"]: row for row in rows}
    assert by_run["1 8"]["says"] == "weight 1, scale 2^8: the loss is not finite"
    assert set(by_run["1 8"]["pixels"]) == {"f"}
    assert all(len(row["pixels"]) == 640 for row in rows)


def test_colab_gets_html(chart, monkeypatch):
    monkeypatch.setitem(sys.modules, "google.colab", object())
    data, _, _ = chart(explore.show, alt.Chart(pd.DataFrame({"x": [1]})).mark_point(), "A dot.")
    assert set(data) == {"text/html", "text/plain"}
