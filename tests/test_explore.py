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
import vl_convert
from matplotlib.colors import to_rgb
from PIL import Image

from helpers import explore, records
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
    [
        ("resnet50", "FP32", "begins", "activations", 0.1, 0.08),
        ("resnet50", "FP32", "begins", "weights", 0.1, 0),
    ],
    columns=["model", "precision", "moment", "part", "fixed", "each"],
)
STATES = {"Adam": {("FP32", "begins"): 2.0}, "SGD": {("FP32", "begins"): 0.0}}
TIMES = pd.DataFrame(
    [("resnet50", "T4", 8, way, kind, ms) for way, ms in (("a", 2.0), ("b", 1.0)) for kind in ("products", "idle")],
    columns=["network", "card", "batch", "way", "kind", "ms"],
)
INTERVALS = pd.DataFrame(
    [("bf16", 2, 1.0, 0.7, 1.3), ("bf16", 4, 1.0, 0.9, 1.1), ("fp16", 2, 1.4, 1.3, 1.5)],
    columns=["arm", "seeds", "value", "low", "high"],
)
PATHS = {(name, update): [1.5, 1.5, 1.5 - update * 2.0**-11] for name in ("bf16", "fp16") for update in (1, 2)}
DTYPES = pd.DataFrame({"FP32": ["fp32"] * 5, "autocast": ["fp32", "bf16", "bf16", "bf16", "fp32"]}, list("abcde"))
BUSY = pd.DataFrame(
    [("loop", "part", "load", 0, 9), ("loop", "part", "item", 9, 9.1), ("ops", "op", "aten::mm", 3, 5)],
    columns=["part", "work", "name", "start", "end"],
)
POINTERS = {(name, position): [position, position / 10] for name in ("fp32", "bf16") for position in (3, 7)}
OWN = torch.tensor([[1, 1], [2, 2]])
LINES = [("scale(loss)", "loss"), ("unscale_()", "")]
LOOPS = {(1, 1): ([65536.0, 1.01], "0.2"), (1, 0): ([65536.0, 2.0**-15], "0.7"), (0, 1): ([0.0], "stops")}
LOOPS[0, 0] = ([1.0, float("nan")], "0.3")
RING = [OWN, torch.tensor([[1, 3], [3, 2]]), torch.tensor([[3, 3], [3, 3]])]
START = {"model": "resnet50", "precision": "FP32", "batch": 4, "gpus": 1, "card": "T4"}
CAST = "weight float32 -> float16"
TRACE = pd.DataFrame(
    [
        ("aten::native_layer_norm", "float32", "float32, float32", "", 0, "Net.layers.3.attn.norm"),
        ("aten::transpose.int", "float16", "float16", "", 0, "Net.layers.3.attn"),
        ("aten::_unsafe_view", "float16", "float16", "", 0, "Net.layers.3.attn"),
        ("aten::addmm", "float16", "float16", f"{CAST}; activation float32 -> float16", 8, "Net.head.a"),
        ("aten::add_.Tensor", "int64", "int64", "", 0, "Net.head"),
        ("aten::relu", "float16", "float16", CAST, 4, "Net"),
    ],
    columns=["op", "inputs", "output", "casts", "cast_bytes", "module"],
)
CHARTS = {
    "cast_map": (explore.cast_map, ({"one": TRACE, "long": pd.concat([TRACE] * 13)}, "Activations cast")),
    "step_graph": (explore.step_graph, (DTYPES, "A step", "autocast")),
    "walk": (explore.walk, (PATHS, 2.0**-11, "Updates", 1)),
    "timeline": (explore.timeline, (BUSY, ["loop", "ops"], "A trace")),
    "calculator": (
        explore.calculator,
        (PARTS, STATES, {"T4": (10, 16), "A100": (65, 80)}, "Will it fit?", START),
    ),
    "step_times": (
        explore.step_times,
        (TIMES, ["a", "b"], "Where time goes", {"network": "resnet50", "card": "T4", "batch": 8}),
    ),
    "verdicts": (explore.verdicts, (INTERVALS, "Verdicts", range(5, 55, 5), 20)),
    "fates": (explore.fates, (torch.tensor([2.0**-30, 2.0**-20, 1.0, 0.0]), range(0, 41), "Gradients")),
    "steps": (explore.steps, (RUN, "Edge", 2)),
    "ring": (explore.ring, (RING, "A ring of two")),
    "switches": (explore.switches, (LINES, LOOPS, "Two lines")),
    "pointers": (explore.pointers, (POINTERS, {3: [3.0, 0.3], 7: [7.0, 0.7]}, "Dials", ("bf16", 7))),
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
    inputs = [param for param in spec.get("params", []) if "bind" in param]
    assert (inputs or name == "timeline") and all(param["name"].isalpha() for param in inputs), (
        "names that no run invents anew"
    )
    assert data == chart(function, *arguments)[0], "the same data make the same chart"
    assert "container" not in json.dumps(spec), "JupyterLab draws such a width as 0 at times"


def test_gradients_are_counted_by_their_fate(chart):
    _, _, ends = chart(*([CHARTS["fates"][0], *CHARTS["fates"][1]]))
    assert ends["becomes 0"].tolist() == pytest.approx([1 / 3, 0]) and ends["overflows"].tolist() == pytest.approx(
        [0, 2 / 3]
    )


def test_what_is_scaled_down_stays_on_the_axis(chart):
    data, _, _ = chart(explore.fates, torch.tensor([2.0**-3, 2.0**15]), range(-40, 9), "A stream", what="activation")
    axis = data[explore.VEGA_LITE]["layer"][0]["encoding"]["x"]
    assert axis["scale"]["domain"] == [-43, 25] and axis["title"] == "log2 of the scaled activation"


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


def test_words_on_a_timeline_can_be_read(chart):
    """WCAG 2.1's contrast of text, of black on each colour of the work."""
    spec = chart(*([CHARTS["timeline"][0], *CHARTS["timeline"][1]]))[0][explore.VEGA_LITE]
    idle, bars, words, _ = spec["layer"]
    scale = bars["encoding"]["color"]["scale"]
    assert scale["domain"] == ["part", "op", "no op"] and words["mark"]["color"] == "black"
    assert "opacity" not in idle["mark"], "the legend would fade with it"
    for color in scale["range"]:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
        assert np.dot([0.2126, 0.7152, 0.0722], linear) + 0.05 > 4.5 * 0.05


def test_a_timeline_names_what_is_wide_enough(chart):
    """What is written on the loop's parts, and shown where one points."""
    spec = chart(*([CHARTS["timeline"][0], *CHARTS["timeline"][1]]))[0][explore.VEGA_LITE]
    assert "params" not in spec or not [param for param in spec["params"] if "bind" in param]
    _, bars, words, above = spec["layer"]
    (rows,) = spec["datasets"].values()
    assert [row["above"] for row in rows] == ["", "item", ""] and above["encoding"]["text"]["field"] == "above"
    assert [row["says"] for row in rows] == ["load", "", ""] and words["encoding"]["text"]["field"] == "says"
    assert [each["field"] for each in bars["encoding"]["tooltip"]] == ["name", "length"]


def test_a_walk_has_a_tick_for_each_number_as_far_as_the_largest_update_goes(chart):
    spec = chart(*CHARTS["walk"][:1], *CHARTS["walk"][1])[0][explore.VEGA_LITE]
    ticks = [row for rows in spec["datasets"].values() for row in rows if "number" in row]
    for name, spacing in (("bf16", 2**-7), ("fp16", 2**-10)):
        numbers = [row["number"] for row in ticks if row["format"] == name]
        assert set(np.diff(numbers)) == {spacing}
        assert numbers[0] - spacing < 1.5 - 2 * 3 * 2 * 2**-11 <= numbers[0] and numbers[-1] > 1.5


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


def test_a_ring_says_whose_numbers_are_where_and_frames_what_has_come(chart):
    data, _, _ = chart(explore.ring, RING, "A ring of two")
    (rows,) = data[explore.VEGA_LITE]["datasets"].values()
    now = [(row["sum"], row["has"], row["frame"] > 0) for row in rows if row["step"] == 1]
    assert now == [
        ("\N{UPWARDS ARROW} a", "its own numbers", False),
        ("a + b", "all", True),
        ("a + b", "all", True),
        ("\N{UPWARDS ARROW} b", "its own numbers", False),
    ]
    framed = {step: [row["frame"] > 0 for row in rows if row["step"] == step] for step in (0, 2)}
    assert framed == {0: [False] * 4, 2: [True, False, False, True]}, "what this step has brought, not one before"
    assert [rows[place]["says"] for place in (0, 4, 8)] == [
        "step 0 of 2: each has its own numbers",
        "step 1 of 2: each adds what the next one sends",
        "step 2 of 2: each takes over a sum that is complete",
    ]


def test_a_cast_map_draws_what_moves_and_marks_the_activations_that_are_cast(chart):
    data, _, _ = chart(*([CHARTS["cast_map"][0], *CHARTS["cast_map"][1]]))
    (rows,) = data[explore.VEGA_LITE]["datasets"].values()
    one = [
        (row["part"], row["name"], row["dtype"], row["thick"], row["cast"]) for row in rows if row["network"] == "one"
    ]
    assert one == [
        ("layers.3", "layer_norm", "float32", 20, None),
        ("head", "addmm", "float16", 10, "float16"),
        ("Net", "relu", "float16", 10, None),
    ]
    long = [row for row in rows if row["network"] == "long"]
    assert len(long) == 39 and max(row["place"] for row in long) == 12
    assert {row["name"] for row in long} == {""}, "no room for names"


def test_a_loop_says_what_each_line_leaves_in_the_gradients(chart):
    spec = chart(explore.switches, LINES, LOOPS, "Two lines")[0][explore.VEGA_LITE]
    left = {row["key"]: row["left"] for rows in spec["datasets"].values() for row in rows if "left" in row}
    assert left["11"] == ["scaled: 2^16 times", "true size"] and left["10"][1] == "too small: 2^-15 times"
    assert left["01"] == ["none"] and left["00"] == ["true size", "not finite"]
    texts = [row for rows in spec["datasets"].values() for row in rows if "off" in row]
    assert [row["off"] for row in texts] == ["loss", "# unscale_()"], "replaced, or a comment"
    kinds = spec["layer"][1]["encoding"]["color"]["scale"]["domain"]
    assert {size.split(":")[0] for sizes in left.values() for size in sizes} == set(kinds)
    assert explore._size(2) == "scaled: 2 times", "powers of two are for the large"
    assert [param["value"] for param in spec["params"]] == [True, True]


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


def test_the_calculator_adds_each_optimizers_states_to_the_weights(chart):
    data, _, _ = chart(*CHARTS["calculator"][:1], *CHARTS["calculator"][1])
    ((_, rows),) = data[explore.VEGA_LITE]["datasets"].items()
    states = {row["optimizer"]: row["fixed"] for row in rows if row["part"] == "optimizer"}
    assert states == {"Adam": 0.2, "SGD": 0}
    assert [row["part"] for row in rows] == ["weights", "optimizer", "optimizer", "activations"]


def test_an_optimizer_may_need_more_at_one_moment(chart):
    parts = pd.concat([PARTS, PARTS.assign(moment="steps")])
    states = {"Adam": {("FP32", "begins"): 2.0, ("FP32", "steps"): 3.0}}
    data, _, _ = chart(explore.calculator, parts, states, {"T4": (10, 16)}, "Will it fit?", START)
    ((_, rows),) = data[explore.VEGA_LITE]["datasets"].items()
    held = {row["moment"]: row["fixed"] for row in rows if row["part"] == "optimizer"}
    assert held == {"begins": 0.2, "steps": 0.3}


@pytest.mark.parametrize(("batch", "said"), [(1, "fit"), (2, "are too near to tell"), (5, "do not fit")])
def test_the_calculator_has_three_answers(batch, said, chart):
    """A prediction of 1 GiB a batch, on a card that surely holds 1.5 and has 4."""
    parts, start = PARTS.assign(fixed=0.0, each=[1.0, 0.0]), START | {"batch": batch, "card": "A"}
    data, _, _ = chart(explore.calculator, parts, STATES, {"A": (1.5, 4)}, "Fits?", start)
    drawn = vl_convert.vegalite_to_svg(data[explore.VEGA_LITE], vl_version="5.8")
    assert f"batch {batch}, A: {batch}.0 GiB {said}<" in drawn


def test_bars_of_time_say_their_sum_and_how_much_faster_they_are(chart):
    data, _, _ = chart(*CHARTS["step_times"][:1], *CHARTS["step_times"][1])
    said = [row["says"] for rows in data[explore.VEGA_LITE]["datasets"].values() for row in rows if "says" in row]
    assert said == ["4 ms", "2 ms, 2.0 times as fast"]
