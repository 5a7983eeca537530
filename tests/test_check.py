"""Every solution in a notebook passes its check, and typical wrong answers get a reply that fits them."""

import math
import re
import sys

import nbformat
import numpy as np
import pytest
import torch

from helpers import check
from helpers.formats import FORMATS
from tools.execute import NOTEBOOKS

RIGHT = "Right.\n"


def solutions():
    """The code of every solution that a notebook shows, by the name of its exercise."""
    found = {}
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        text = "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells)
        blocks = re.findall(r"<summary>Solution</summary>\s*```python\n(.*?)```", text, re.DOTALL)
        mine = {re.search(r"def (\w+)\(", block)[1]: block for block in blocks}
        assert set(re.findall(r"^check\.(\w+)\(\w", text, re.MULTILINE)) == set(mine), path.name
        found |= mine
    return found


SOLUTIONS = solutions()


@pytest.mark.parametrize("name", SOLUTIONS)
def test_solution_is_right(name, capsys):
    scope = {"torch": torch, "criterion": torch.nn.BCEWithLogitsLoss()}
    exec(SOLUTIONS[name], scope)
    getattr(check, name)(scope[name])
    assert capsys.readouterr().out == RIGHT


@pytest.mark.parametrize("name", SOLUTIONS)
def test_untouched_stub_is_not_yet(name, capsys):
    getattr(check, name)(lambda *_: ...)
    getattr(check, name)(lambda *_: None)
    assert capsys.readouterr().out.count("Not yet") == 2


half = FORMATS["fp16"]


def decoded(code, bias=15, implicit=1, subnormals=True):
    sign, exponent, fraction = (-1.0 if code >> 15 else 1.0), code >> 10 & 31, code & 1023
    if exponent == 31:
        return math.nan if fraction else sign * math.inf
    if exponent == 0 and subnormals:
        return sign * 2.0**-14 * fraction / 1024
    return sign * 2.0 ** (exponent - bias) * (implicit + fraction / 1024)


def encoded_away_from_even(value):
    code, spacing = int(half.encode(value)), half.spacing(value)
    is_tie = abs(value) < 65504 and abs(half.decode(code)) == abs(value) - spacing / 2
    return code + bool(is_tie)


def encoded_but(value, condition, code):
    return code if condition(value) else int(half.encode(value))


def limits_of(*names, given):
    """Right for the formats named, and a KeyError for others."""
    known = {(f.exponent_bits, f.mantissa_bits): f for f in map(FORMATS.get, names)}[given]
    return known.max, known.smallest_normal, known.smallest_subnormal, known.eps


def encoded_by_cutting_off(value):
    code = int(half.encode(value))
    return code - bool(abs(half.decode(code)) > abs(value))


def smallest_step_by_power_of_two(weight, name):
    """Right for 1 and for odd codes only."""
    return half.spacing(weight) if math.frexp(weight)[0] == 0.5 else FORMATS[name].spacing(weight) / 2


def grown(scale, tracker, interval):
    return (2 * scale, 0) if tracker + 1 == interval else (scale, tracker + 1)


def wrong_accumulation(fault):
    def step(model, optimizer, scaler, parts, device_type, dtype):
        if fault != "no zero_grad":
            optimizer.zero_grad()
        for images, labels in parts:
            with torch.autocast(device_type, dtype, enabled=fault != "no autocast"):
                loss = torch.nn.BCEWithLogitsLoss()(model(images), labels)
            loss = loss / (4 if fault == "divided by 4" else 1 if fault == "not divided" else len(parts))
            (loss if fault == "not scaled" else scaler.scale(loss)).backward()
            if fault == "step each":
                scaler.step(optimizer)
                scaler.update()
        if fault == "step unscaled":
            scaler.unscale_(optimizer)
            optimizer.step()
        elif fault not in ("no step", "step each"):
            scaler.step(optimizer)
        if fault == "no step":
            scaler.unscale_(optimizer)
        if fault != "step each":
            scaler.update()
        return True

    return step


def wrong_clipping(fault):
    def step(model, optimizer, scaler, images, labels, device_type, dtype, max_norm):
        if fault != "no zero_grad":
            optimizer.zero_grad()
        with torch.autocast(device_type, dtype):
            loss = torch.nn.BCEWithLogitsLoss()(model(images), labels)
        scaler.scale(loss).backward()
        if fault != "not unscaled":
            scaler.unscale_(optimizer)
        limit = math.inf if fault == "not clipped" else max_norm
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        if fault != "no step":
            scaler.step(optimizer)
        if fault != "no update":
            scaler.update()
        return max_norm if fault == "limit" else norm

    return step


def added_one_by_one(terms):
    total = terms.new_zeros(())
    for term in terms:
        total = total + term
    return total


def wrong_step(fault):
    """A bf16 step with one fault in it."""

    def step(model, optimizer, images, labels):
        if fault != "accumulates":
            optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=fault != "float32"):
            output = model(images)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(output, labels)
        if fault == "loss outside":
            loss = (output - labels.bfloat16()).square().mean()
        if fault == "other loss":
            loss = (output.float() - labels).square().mean()
        loss.backward()
        if fault != "no step":
            optimizer.step()
        return loss if fault == "graph" else loss.detach()

    return step


def counted(key="memory", size="memory", own="parameters buffers"):
    def kept_bytes(model, images):
        seen = []
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: seen.append(tensor) or tensor, lambda t: t):
            model(images)
        owned = {tensor.data_ptr() for kind in own.split() for tensor in getattr(model, kind)()}
        keys = {
            "memory": lambda t: t.untyped_storage().data_ptr(),
            "view": torch.Tensor.data_ptr,
            "none": lambda t: object(),
        }
        sizes = {"memory": lambda t: t.untyped_storage().nbytes(), "view": lambda t: t.nbytes}
        kept = {}
        for tensor in seen:
            if tensor.data_ptr() not in owned:
                kept.setdefault(keys[key](tensor), sizes[size](tensor))
        return sum(kept.values())

    return kept_bytes


def straight_line(peak, memory):
    return max(0, int(16 + 16 * (memory - peak(16)) / (peak(32) - peak(16))))


def doubled(peak, memory):
    return max([2**power for power in range(12) if peak(2**power) <= memory], default=0)


def added_one_at_a_time(peak, memory, first=1):
    batch = first
    while peak(batch) <= memory:
        batch += 1
    return batch - 1


def summed(step, batches):
    total = 0
    for batch in batches:
        total = total + step(*batch)
    return total.item() / len(batches)


def read_each(step, batches):
    return sum(step(*batch).item() for batch in batches) / len(batches)


def kept_list(step, batches):
    return torch.stack([step(*batch) for batch in batches]).mean().item()


def read_later(step, batches):
    losses = [step(*batch).detach() for batch in batches]
    return sum(loss.item() for loss in losses) / len(losses)


def detached(step, batches, finish):
    total = 0
    for batch in batches:
        total = total + step(*batch).detach()
    return finish(total)


def sorted_only(images, labels, indices):
    ascending = sorted(indices)
    return torch.from_numpy(images[ascending]), labels[ascending]


def order_not_undone(images, labels, indices):
    order = np.argsort(indices)
    return torch.from_numpy(images[np.sort(indices)][order]), labels[indices]


def one_by_one(images, labels, indices):
    return torch.stack([torch.from_numpy(images[i]) for i in indices]), labels[indices]


def right_read(images, labels, indices):
    order = np.argsort(indices)
    return images[np.sort(indices)][np.argsort(order)], labels[indices]


def to_float01(images):
    return images.permute(0, 3, 1, 2).float() / 255


def changed(images):
    images.add_(1)
    return images.permute(0, 3, 1, 2) / 255


@pytest.mark.parametrize(
    "name, answer, reply",
    [
        ("kept_bytes", counted(key="none", size="view"), "Some tensors share their memory: count it once."),
        ("kept_bytes", counted(own=""), "own parameters and buffers are not activations"),
        ("kept_bytes", counted(own="parameters"), "statistics are buffers: leave them out"),
        ("kept_bytes", counted(key="none", size="view", own=""), "You count every tensor that is seen"),
        ("kept_bytes", counted(key="view"), "A view may begin elsewhere in the same memory"),
        ("kept_bytes", counted(size="view"), "A view keeps the whole memory that it is part of"),
        ("kept_bytes", lambda model, images: model(images).nbytes, "for two linear layers"),
        ("best_time", lambda f, b, r, w: (f / r + b / w, "memory"), "You add up two times that pass at once"),
        ("best_time", lambda f, b, r, w: (min(f / r, b / w), "memory"), "you give 0.001 s; it is 2 s"),
        ("best_time", lambda f, b, r, w: (max(f / r, b / w), "memory"), "you say 'memory'; the op waits for compute"),
        ("best_time", lambda f, b, r, w: max(f / r, b / w), "asked for are two values"),
        ("best_time", lambda f, b, r, w: ("memory", f / r), "first the seconds"),
        ("batch_that_fits", added_one_at_a_time, "you call peak 1001 times to find 1000"),
        ("batch_that_fits", lambda peak, memory: added_one_at_a_time(peak, memory) + 1, "That one does not fit."),
        ("batch_that_fits", lambda peak, memory: added_one_at_a_time(peak, memory - 1), "One more fits"),
        ("batch_that_fits", straight_line, "you give"),
        ("batch_that_fits", doubled, "You stop at a power of two"),
        (
            "batch_that_fits",
            lambda peak, memory: next(b for b in range(9**9) if peak(b) > 9**9),
            "raised ValueError: the search does not end",
        ),
        ("decode_fp16", lambda code: decoded(code, bias=16), "your exponent bias is 16; for fp16 it is 15"),
        ("decode_fp16", lambda code: decoded(code, implicit=0), "for 0x3c00 you say 0.0; it is 1.0"),
        (
            "decode_fp16",
            lambda code: decoded(code, subnormals=False),
            "for 0x0001 you say 3.0547380447387695e-05; it is",
        ),
        (
            "decode_fp16",
            lambda code: abs(decoded(code)),
            "for 0xc000 you say 2.0; it is -2.0. The highest bit is the sign",
        ),
        (
            "decode_fp16",
            lambda code: decoded(code) if code & 0x7C00 != 0x7C00 else 65536.0,
            "31 with fraction 0 is infinity",
        ),
        ("decode_fp16", lambda code: decoded(code) + 0.0, "Zero has a sign too"),
        ("decode_fp16", lambda code: decoded(code ^ (code == 0x1234)), "for 0x1234 you say"),
        ("decode_fp16", lambda code: [1.0], "your function returns something unexpected (TypeError"),
        ("encode_fp16", lambda value: encoded_by_cutting_off(value), "round, do not cut off"),
        ("encode_fp16", lambda value: encoded_away_from_even(value), "for 2049.0 you give 2050.0; right is 2048.0"),
        ("encode_fp16", lambda value: half.encode(value, saturate=True), "for 65520.0 you give 65504.0; right is inf"),
        ("encode_fp16", lambda value: int(half.encode(abs(value))), "A negative number has the highest bit set"),
        ("encode_fp16", lambda value: value, "A code is an integer from 0 to 0xffff"),
        ("encode_fp16", lambda value: int(half.encode(value)) if value else 0, "Zero has a sign too"),
        ("encode_fp16", lambda value: value.hex, "A code is an integer from 0 to 0xffff"),
        (
            "limits",
            lambda e, m: (2.0**16, 2.0**-14, 2.0**-24, 2.0**-10),
            "max of fp16: you say 65536.0, which is 1.00049 times",
        ),
        ("limits", lambda e, m: (65504.0, 2.0**-14, 2.0**-24, 2.0**-10), "max of bf16: you say 65504.0"),
        ("limits", lambda e, m: (65504.0, 2.0**-15, 2.0**-25, 2.0**-10), "smallest normal of fp16"),
        ("limits", lambda e, m: 65504.0, "your function returns something unexpected (TypeError"),
        ("limits", lambda e, m: (65504.0,), "you return 1 values; asked for are four"),
        ("smallest_step", lambda weight, name: FORMATS[name].spacing(weight), "but so does 0.00048828125"),
        ("smallest_step", lambda weight, name: FORMATS[name].spacing(weight) / 2, "is still 1.0 in fp16"),
        ("smallest_step", lambda weight, name: 1.0, "1.0 moves 1.0 in fp16, but so does 0.0009765625"),
        ("smallest_step", lambda weight: 1.0, "raised TypeError"),
        (
            "decode_fp16",
            lambda code: decoded(code) if code < 0x7C00 else None,
            "called with 49152, your function returns None",
        ),
        (
            "encode_fp16",
            lambda value: int(torch.tensor(value).half().view(torch.uint16)),
            "Round once, not first to float32",
        ),
        ("encode_fp16", lambda value: -1 if value < 1 else int(half.encode(value)), "-1. A code is an integer"),
        ("smallest_step", smallest_step_by_power_of_two, "is still 1.001953125"),
        ("kahan_sum", lambda terms: terms[1:].sum() + 1, "[1000.0, 1.0] give 2.0, not 1001"),
        ("rms", lambda x: x.float().square().mean(-1).sqrt().half(), "it should be a scalar"),
        ("kahan_sum", added_one_by_one, "4,096 ones give 2048: the total stalls"),
        ("kahan_sum", lambda terms: terms.float().sum(), "the total is torch.float32. Keep it in torch.float16"),
        ("kahan_sum", lambda terms: 4096, "the total is int"),
        ("kahan_sum", lambda terms: terms[:100].sum(), "4,096 ones give 100.0"),
        ("kahan_sum", lambda terms: terms.new_tensor(len(terms)), "[1000.0, 1.0] give 2.0, not 1001"),
        ("rms", lambda x: x.square().mean().sqrt(), "a square, or their sum, overflowed"),
        ("rms", lambda x: (x / 65504).square().mean().sqrt() * 65504, "the squares underflowed"),
        ("rms", lambda x: x.abs().max() * (x / x.abs().max()).square().mean().sqrt(), "nan: 0/0. It is 0"),
        ("rms", lambda x: x.float().square().mean().sqrt(), "is torch.float32, and should be torch.float16"),
        ("rms", lambda x: x.float().square().mean().half(), "the rms of [3.0, 4.0] is 12.5; it should be 3.53553"),
        (
            "next_state",
            lambda scale, tracker, inf, n: (scale / 2, tracker) if inf else (scale, tracker + 1),
            "so it is (32768.0, 0)",
        ),
        (
            "next_state",
            lambda scale, tracker, inf, n: (scale / 2, 0) if inf else (scale, tracker + 1),
            "clean step 2000 of 2000",
        ),
        (
            "next_state",
            lambda scale, tracker, inf, n: (max(1, scale / 2), 0) if inf else grown(scale, tracker, n),
            "(0.25, 0)",
        ),
        ("next_state", lambda scale, tracker, inf, n: scale, "asked for are two values"),
        ("largest_scale", lambda gradients: 65504 / gradients.abs().max(), "which is not a power of two"),
        ("largest_scale", lambda gradients: 2.0**16, "[1.0, -2.0] times your 65536.0 is [inf, -inf]"),
        (
            "largest_scale",
            lambda gradients: 2.0 ** math.floor(math.log2(32768 / gradients.abs().max())),
            "but so it is",
        ),
        ("largest_scale", lambda gradients: 2.0 ** math.floor(math.log2(65520 / gradients.max())), "times your"),
        ("paste", lambda x, mask, y: x.masked_scatter_(mask, y[mask].to(x.dtype)), "x itself was changed"),
        ("paste", lambda x, mask, y: torch.where(mask, y, x), "your result is torch.float32; it should keep"),
        ("paste", lambda x, mask, y: x.clone().index_put_((mask,), y[mask]), "your code raised RuntimeError"),
        ("paste", lambda x, mask, y: x.clone(), "fives become [5.0, 5.0, 5.0], not [1, 5, 3]"),
        (
            "rms_norm",
            lambda x, w, eps: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w,
            "you return torch.float32",
        ),
        (
            "rms_norm",
            lambda x, w, eps: (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w).to(x.dtype),
            "for x in torch.float16",
        ),
        ("rms_norm", lambda x, w, eps: (x.float() * w).to(x.dtype), "you are off by"),
        ("accumulated_step", wrong_accumulation("not divided"), "4 times that of the whole batch"),
        ("accumulated_step", wrong_accumulation("no zero_grad"), "gradients of the step before"),
        ("accumulated_step", wrong_accumulation("step each"), "update() was called 4 times"),
        ("accumulated_step", wrong_accumulation("step unscaled"), "with an infinite gradient the weights moved"),
        ("accumulated_step", wrong_accumulation("divided by 4"), "the weights are not those of one step"),
        ("accumulated_step", wrong_accumulation("no autocast"), "output is torch.float32"),
        ("accumulated_step", wrong_accumulation("no step"), "the weights did not move"),
        ("accumulated_step", wrong_accumulation("not scaled"), "your script did not use scaler.scale"),
        ("clipped_step", wrong_clipping("not unscaled"), "of the scaled gradients"),
        ("clipped_step", wrong_clipping("not clipped"), "as without clipping"),
        ("clipped_step", wrong_clipping("no step"), "the weights did not move"),
        ("clipped_step", wrong_clipping("no update"), "update() was called 0 times"),
        ("clipped_step", wrong_clipping("no zero_grad"), "gradients of the step before are still in it"),
        ("largest_scale", lambda gradients: 2.0 ** math.floor(math.log2(65519 / gradients.norm())), "but so it is"),
        ("clipped_step", wrong_clipping("limit"), "you return 0.1; the norm before clipping is"),
        ("verdict", lambda low, high: "faster", "for [0.6, 0.7] you say 'faster', but the interval lies below 1"),
        ("verdict", lambda low, high: "faster" if high > 1 else "slower", "for [0.96, 1.04] you say 'faster'"),
        ("verdict", lambda low, high: low.faster, "called with 1.2, 1.5, your code raised AttributeError"),
        ("verdict", 3, "raised TypeError"),
        ("bf16_step", wrong_step("float32"), "output is torch.float32"),
        ("bf16_step", wrong_step("loss outside"), "the loss is torch.bfloat16"),
        ("bf16_step", wrong_step("graph"), "loss.detach()"),
        ("bf16_step", wrong_step("no step"), "did not move"),
        ("bf16_step", wrong_step("accumulates"), "optimizer.zero_grad()"),
        ("bf16_step", wrong_step("other loss"), "not those of a bf16 step"),
        ("bf16_step", lambda model: model, "raised TypeError"),
        ("bf16_step", lambda *given: wrong_step(None)(*given).item(), "Return the tensor, detached"),
        ("bf16_step", lambda *given: wrong_step(None)(*given) + 1, "the weights or the loss are not those"),
        (
            "verdict",
            lambda low, high: "faster" if low > 1.1 else "slower" if high < 0.8 else "undecided",
            "[1.01, 1.02]",
        ),
        ("verdict", lambda low, high: sys.exit(), "raised SystemExit"),
        ("smallest_step", lambda weight, name: 0.6 * FORMATS[name].spacing(weight), "is not a power of two"),
        ("encode_fp16", lambda value: encoded_but(value, lambda value: value != value, 0x7C00), "for nan you give inf"),
        (
            "kahan_sum",
            lambda terms: terms.sum() if len(terms) != 3000 else terms.float().sum(),
            "is torch.float32 of shape",
        ),
        ("limits", lambda e, m: limits_of("fp16", "bf16", given=(e, m)), "raised KeyError"),
        ("rms", lambda x: x.float().square().mean().sqrt().half() if len(x) < 9 else x.sum(), "the rms of [1.0, 1.0"),
        ("to_float01", lambda images: images.permute(0, 3, 1, 2).float(), "the values go up to 255"),
        ("to_float01", lambda images: images.float() / 255, "you return the shape (2, 4, 6, 3)"),
        ("to_float01", lambda images: images.reshape(2, 3, 4, 6).float() / 255, "the colours are mixed up"),
        ("to_float01", lambda images: images.permute(0, 3, 1, 2).float() / 256, "white is 255/256"),
        ("to_float01", lambda images: images.permute(0, 3, 1, 2).double() / 255, "your batch is torch.float64"),
        ("to_float01", lambda images: (images.permute(0, 3, 1, 2) // 255).float(), "nearly all pixels are 0"),
        ("to_float01", lambda images: images.permute(0, 3, 1, 2).flip(1) / 255, "red and blue"),
        ("to_float01", lambda images: images.numpy().transpose(0, 3, 1, 2) / 255, "ndarray, not a tensor"),
        ("to_float01", changed, "the bytes that were handed in have changed"),
        ("to_float01", lambda images: torch.rand(2) if images.is_meta else to_float01(images), "another device"),
        ("to_float01", lambda images: images.permute(0, 3, 1, 2).float() / 255 + 0.1, "the first pixel is"),
        ("mean_loss", summed, "Keep loss.detach()"),
        ("mean_loss", kept_list, "Keep loss.detach()"),
        ("mean_loss", read_each, "the loss was read 5 times before the last step"),
        ("mean_loss", read_later, "after the loop you read 6 tensors"),
        ("mean_loss", lambda step, batches: detached(step, batches, lambda total: total.item()), "the sum. Divide"),
        ("mean_loss", lambda step, batches: detached(step, batches, lambda total: total / 6), "you return a tensor"),
        ("mean_loss", lambda step, batches: [step(*batch).detach() for batch in batches][-1].item(), "last batch"),
        ("mean_loss", lambda step, batches: step(*batches[0]).item(), "step was called 1 times for 6 batches"),
        (
            "mean_loss",
            lambda step, batches: detached(step, batches, lambda total: total.item() / 7),
            "the mean of the losses",
        ),
        (
            "read_batch",
            lambda images, labels, indices: (torch.from_numpy(images[indices]), labels[indices]),
            "increasing order",
        ),
        ("read_batch", sorted_only, "undo the sorting"),
        ("read_batch", order_not_undone, "asked for [14, 2, 9, 5], you return the images"),
        ("read_batch", one_by_one, "you read 3 times for 3 images"),
        ("read_batch", right_read, "the images are ndarray"),
        (
            "read_batch",
            lambda images, labels, indices: (
                torch.from_numpy(right_read(images, labels, indices)[0]).float(),
                labels[indices],
            ),
            "Leave them uint8",
        ),
        (
            "read_batch",
            lambda images, labels, indices: (
                torch.from_numpy(right_read(images, labels, indices)[0]),
                labels[sorted(indices)],
            ),
            "but their labels are those of",
        ),
        (
            "read_batch",
            lambda images, labels, indices: (torch.from_numpy(images[:][indices]), labels[indices]),
            "you read 20 images for a batch of 3",
        ),
        (
            "read_batch",
            lambda images, labels, indices: torch.from_numpy(right_read(images, labels, indices)[0]),
            "asked for are two values",
        ),
        ("shard", lambda length, rank, world: list(range(length))[rank::world], "must get the same number"),
        (
            "shard",
            lambda length, rank, world: list(range(length))[rank * length // world : (rank + 1) * length // world],
            "process 0 of 2 gets [0, 2, 4]",
        ),
        (
            "shard",
            lambda length, rank, world: [i % length for i in range(rank, length + -length % world, world)][::-1],
            "another order",
        ),
        ("bytes_sent", lambda weights, size, world: (world - 1) / world * weights * size, "once more"),
        ("bytes_sent", lambda weights, size, world: weights * size, "1 processes: 0 bytes"),
        ("mean_over_processes", lambda means, counts: sum(means) / len(means), "weighs more"),
        (
            "mean_over_processes",
            lambda means, counts: sum(m * n for m, n in zip(means, counts)) / sum(counts),
            "leave out who saw nothing",
        ),
    ],
)
def test_wrong_answer_gets_a_reply_that_fits(name, answer, reply, capsys):
    getattr(check, name)(answer)
    said = capsys.readouterr().out
    assert said.startswith("Not right yet: ") and reply in said
