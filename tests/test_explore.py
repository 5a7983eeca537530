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
from matplotlib.colors import to_rgb
from PIL import Image

from helpers import explore
from helpers.plots import COLORS, NEUTRAL


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
PARTS = pd.DataFrame(
    [("resnet50", "FP32", 0.1, 0.05, 0.08), ("resnet50", "fp16", 0.1, 0.1, 0.04)],
    columns=["model", "precision", "weights", "rest", "image"],
).set_index(["model", "precision"])
INTERVALS = pd.DataFrame(
    [("bf16", 2, 1.0, 0.7, 1.3), ("bf16", 4, 1.0, 0.9, 1.1), ("fp16", 2, 1.4, 1.3, 1.5)],
    columns=["arm", "seeds", "value", "low", "high"],
)
PATHS = {(name, update): [1.5, 1.5, 1.5 - update * 2.0**-11] for name in ("bf16", "fp16") for update in (1, 2)}
DTYPES = pd.DataFrame({"FP32": ["fp32"] * 5, "autocast": ["fp32", "bf16", "bf16", "bf16", "fp32"]}, list("abcde"))
BUSY = pd.DataFrame(
    [(0, "main process", "load", 0, 0, 3), (0, "device", "compute", 0, 3, 5), (1, "device", "compute", 0, 1, 3)],
    columns=["workers", "part", "work", "step", "start", "end"],
)
CHARTS = {
    "step_graph": (explore.step_graph, (DTYPES, "A step", "autocast")),
    "walk": (explore.walk, (PATHS, 2.0**-11, "Updates", 1)),
    "timeline": (explore.timeline, (BUSY, ["main process", "device"], {"workers": "workers "}, "Who works")),
    "calculator": (explore.calculator, (PARTS, {"T4, 16 GiB": 13, "A100, 80 GiB": 77}, "Will it fit?")),
    "verdicts": (explore.verdicts, (INTERVALS, "Verdicts", range(5, 55, 5), 20)),
    "fates": (explore.fates, (torch.tensor([2.0**-30, 2.0**-20, 1.0, 0.0]), range(0, 41), "Gradients")),
    "steps": (explore.steps, (RUN, "Edge", 2)),
    "drawn_runs": (explore.drawn_runs, (RUNS, "Digits", (0.01, 0))),
}


@pytest.mark.parametrize("name", CHARTS)
def test_a_chart_is_stored_for_whoever_can_and_cannot_draw_it(name, chart):
    function, arguments = CHARTS[name]
    data, metadata, _ = chart(function, *arguments)
    spec = data[explore.VEGA_LITE]
    assert spec["$schema"].endswith("/v5.json") and spec["description"] == data["text/plain"]
    assert len(json.dumps(spec)) < 200_000 and len(data["image/png"]) < 200_000
    assert metadata["image/png"]["alt"] == data["text/plain"]
    picture = Image.open(io.BytesIO(base64.b64decode(data["image/png"]))).convert("RGBA")
    assert picture.getpixel((0, 0))[3] == 0, "a white slab on a dark page"
    assert spec["config"]["title"]["color"] == NEUTRAL and not spec["config"]["axis"]["grid"], "as other figures look"
    inputs = [param for param in spec["params"] if "bind" in param]
    assert inputs and all(param["name"].isalpha() for param in inputs), "names that no run invents anew"
    assert data == chart(function, *arguments)[0], "the same data make the same chart"
    assert "container" not in json.dumps(spec), "JupyterLab draws such a width as 0 at times"


def test_gradients_are_counted_by_their_fate(chart):
    _, _, ends = chart(*([CHARTS["fates"][0], *CHARTS["fates"][1]]))
    assert ends["becomes 0"].tolist() == pytest.approx([1 / 3, 0]) and ends["overflows"].tolist() == pytest.approx(
        [0, 2 / 3]
    )


def test_steps_say_what_gradscaler_did(chart):
    data, _, _ = chart(explore.steps, RUN, "Edge", 2)
    said = [row["says"] for rows in data[explore.VEGA_LITE]["datasets"].values() for row in rows if "fate" in row]
    assert said[0] == "a gradient is not finite: the step is skipped, the scale halves"
    assert said[2] == "all gradients are finite: the step is taken, clean step 2 of 2, so the scale doubles"


def test_skipped_steps_look_skipped_whatever_comes_first_and_all_are_seen(chart):
    spec = chart(explore.steps, RUN, "Edge", 2)[0][explore.VEGA_LITE]
    dots = spec["layer"][2]["encoding"]
    assert dots["color"]["scale"] == {"domain": ["normal", "overflows"], "range": ["#3a9d4b", "#8e63c7"]}
    assert dots["shape"]["scale"] == {"domain": ["normal", "overflows"], "range": ["circle", "triangle-down"]}
    assert [param["value"] for param in spec["params"]] == [3]


def test_digits_on_a_timeline_can_be_read(chart):
    """WCAG 2.1's contrast of text, of black on each colour of the work."""
    spec = chart(*([CHARTS["timeline"][0], *CHARTS["timeline"][1]]))[0][explore.VEGA_LITE]
    idle, bars, numbers, _ = spec["layer"]
    scale = bars["encoding"]["color"]["scale"]
    assert scale["domain"] == ["load", "compute", "idle"] and numbers["mark"]["color"] == "black"
    assert "opacity" not in idle["mark"], "the legend would fade with it"
    for color in scale["range"]:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
        assert np.dot([0.2126, 0.7152, 0.0722], linear) + 0.05 > 4.5 * 0.05


def test_verdicts_have_the_colours_of_the_other_figures_and_room_for_the_last_interval(chart):
    spec = chart(*([CHARTS["verdicts"][0], *CHARTS["verdicts"][1]]))[0][explore.VEGA_LITE]
    encoding = spec["hconcat"][0]["layer"][0]["encoding"]
    assert encoding["color"]["scale"]["range"] == [COLORS["normal"], NEUTRAL, COLORS["becomes 0"]]
    assert encoding["x"]["scale"]["domain"] == [0, 6]


def test_each_panel_of_the_verdicts_has_its_own_arm(chart):
    data, _, _ = chart(*([CHARTS["verdicts"][0], *CHARTS["verdicts"][1]]))
    spec = data[explore.VEGA_LITE]
    arms = [{row["arm"] for row in rows} for rows in spec["datasets"].values() if "arm" in rows[0]]
    assert arms == [{"bf16"}, {"fp16"}] and [panel["title"]["text"] for panel in spec["hconcat"]] == ["bf16", "fp16"]


def test_runs_that_end_in_nan_say_so_and_are_drawn_blank(chart):
    runs = RUNS | {(1, 8): ([0.2, np.nan], torch.full((10, 8, 8), np.nan))}
    data, _, _ = chart(explore.drawn_runs, runs, "Digits", (1, 0))
    rows = [row for rows in data[explore.VEGA_LITE]["datasets"].values() for row in rows if "pixels" in row]
    by_run = {row["run"]: row for row in rows}
    assert by_run["1 8"]["says"] == "weight 1, scale 2^8: the loss is not finite"
    assert set(by_run["1 8"]["pixels"]) == {"f"}
    assert all(len(row["pixels"]) == 640 for row in rows)


def test_without_the_package_for_pictures_there_is_a_chart_without_one(chart, monkeypatch):
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    data, _, _ = chart(explore.steps, RUN, "Edge", 2)
    assert set(data) == {explore.VEGA_LITE, "text/plain"}


def test_colab_gets_html(chart, monkeypatch):
    monkeypatch.setitem(sys.modules, "google.colab", object())
    data, _, _ = chart(explore.show, alt.Chart(pd.DataFrame({"x": [1]})).mark_point(), "A dot.")
    assert set(data) == {"text/html", "text/plain"}
