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


PATHS = {(name, update): [1.5, 1.5, 1.5 - update * 2.0**-11] for name in ("bf16", "fp16") for update in (1, 2)}


GRADIENTS = torch.tensor([2.0**-30, 2.0**-20, 1.0, 0.0])
CHARTS = {  # nbval ignores them in the notebooks, and compares all others
    "fates": (explore.fates, GRADIENTS, range(0, 41), "Gradients"),
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


def test_colab_gets_html(chart, monkeypatch):
    monkeypatch.setitem(sys.modules, "google.colab", object())
    data, _, _ = chart(explore.show, alt.Chart(pd.DataFrame({"x": [1]})).mark_point(), "A dot.")
    assert set(data) == {"text/html", "text/plain"}
