"""Typical wrong answers to notebook 11's exercises get a reply that fits them."""

import math

import pytest
import torch

from helpers import check
from helpers.formats import FORMATS


def floor_rule(amax, name):
    return math.frexp(amax)[1] - math.frexp(FORMATS[name].max)[1] if amax else -127


def always_one_more(amax, name):
    return floor_rule(amax, name) + 1


def without_limits(amax, name):
    return math.ceil(math.log2(amax / FORMATS[name].max)) if amax else -127


def to_nearest(x, noise):
    return x.clamp(-57344, 57344).to(torch.float8_e5m2).half()


def without_clamp(x, noise):
    return ((x.view(torch.int16) + noise) & -256).view(torch.float16)


def not_cut_off(x, noise):
    return (x.clamp(-57344, 57344).view(torch.int16) + noise).view(torch.float16)


def in_float32(x, noise):
    return x.float()


def scale_without_care(history, scale, margin):
    amax = max(history)
    return 448 / 2**margin / amax if amax else scale


def the_way_back(history, scale, margin):
    if max(history) == 0 or not all(map(math.isfinite, history)):
        return scale
    return max(history) / 448 * 2**margin


def without_margin(history, scale, margin):
    if max(history) == 0 or not all(map(math.isfinite, history)):
        return scale
    return 448 / max(history)


@pytest.mark.parametrize(
    ("name", "answer", "reply"),
    [
        ("block_exponent", floor_rule, "449 / 2^0 is 449, past 448"),
        ("block_exponent", always_one_more, "keeps more of the small numbers"),
        ("block_exponent", without_limits, "E8M0 holds -127 to 127"),
        ("block_exponent", lambda amax, name: str(amax), "something unexpected"),
        ("to_e5m2", to_nearest, "rounding to nearest"),
        ("to_e5m2", without_clamp, "Clamp to 57344 first"),
        ("to_e5m2", not_cut_off, "becomes 1, and yours"),
        ("to_e5m2", in_float32, "asked for is fp16"),
        ("next_scale", scale_without_care, "Keep the old scale"),
        ("next_scale", the_way_back, "the way back"),
        ("next_scale", without_margin, "margin 2: 37.3333, and you say 149.333"),
    ],
)
def test_wrong_answer_gets_a_reply_that_fits(name, answer, reply, capsys):
    getattr(check, name)(answer)
    said = capsys.readouterr().out
    assert said.startswith("Not right yet: ") and reply in said
