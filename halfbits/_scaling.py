"""What a GradScaler does in a watched run: which losses it scaled, which steps it left out, and why."""

import math

import torch

from halfbits._tensors import groups_of, is_on, nodes_from, saved

ATTENTION = 64  # passes in which every node of the backward is looked at, after steps that were skipped


class Scaling:
    """Counts of a run under a loss scaler. `skips` are the numbers of the tries that were left out."""

    def __init__(self, scaler):
        self.scaler, self.scalers = scaler, set()
        self.tries, self.skips, self.value = 0, [], math.nan
        self.scaled = self.not_scaled = 0  # backwards since the last step
        self.steps_not_scaled = self.steps_past = self.moved_in_skips = 0
        self.last, self.within = {}, False  # by optimizer: its rate at the last try, and whether that was left out
        self.by_hand, self.left_over = 1.0, False
        self.attention, self.culprit = 0, None  # passes to be attentive in; the Origin of skipped steps

    def is_on(self):
        return is_on(self.scaler)

    def before_backward(self, root):
        """Note whether a loss was multiplied by a scale, which is returned; None if it was not."""
        scale = _scale_of(root.grad_fn)
        self.scaled += scale is not None
        self.not_scaled += scale is None and not _is_scaled_somewhere(root.grad_fn)
        if scale is None:
            self.by_hand = max(self.by_hand, _factor_of(root.grad_fn))
        return scale

    def scale_at_step(self):
        """What gradients are multiplied by at a step: 1 without a scaler, NaN if that is not known."""
        if not self.scaled:
            return 1.0
        return self.scaler.get_scale() if self.is_on() and hasattr(self.scaler, "get_scale") else math.nan

    def passed_by(self, optimizer):
        """Count a step that the loop takes itself, on gradients that are still scaled."""
        if self.scaled and not self.within and self.is_on():
            self.steps_past += not _found_inf(self.scaler, optimizer)  # it has not divided them either

    def before_step(self, scaler):
        self.scaler = self.scaler or scaler
        self.scalers.add(id(scaler))
        self.within = True

    def after_step(self, scaler, optimizer, took, at_once):
        """Whether the optimizer's step was taken; `took`, whether it was called. A fused one may still skip it."""
        self.within = False
        self.tries += 1
        self.steps_not_scaled += self.not_scaled > 0 and not self.scaled
        self.scaled = self.not_scaled = 0
        found = _found_inf(scaler, optimizer)
        if took and at_once and any(each.item() for each in found):
            took = False
        self.value = scaler.get_scale() if at_once else math.nan
        rate, was_skipped = self.last.get(id(optimizer), (None, False))
        self.moved_in_skips += was_skipped and rate != rate_of(optimizer)
        self.last[id(optimizer)] = rate_of(optimizer), not took
        if not took:
            self._skipped(at_once)
        return took

    def _skipped(self, at_once):
        self.skips.append(self.tries)
        streak = self.streak()
        alone = [each for each in self.skips if each - 1 not in self.skips and each > 4]
        known = self.culprit is not None and (self.culprit.why != "format" or streak % 4)
        if at_once and not known and (streak >= 2 or len(alone) >= 3):
            self.attention = ATTENTION

    def streak(self):
        """How many of the last tries were skipped in a row."""
        streak = 0
        while streak < len(self.skips) and self.skips[-1 - streak] == self.tries - streak:
            streak += 1
        return streak


def _found_inf(scaler, optimizer):
    """By device, whether a GradScaler has found inf in the gradients of an optimizer; [] before it has looked."""
    states = getattr(scaler, "_per_optimizer_states", {})
    return list(states[id(optimizer)]["found_inf_per_device"].values()) if id(optimizer) in states else []


def rate_of(optimizer):
    return next((float(group["lr"]) for group in groups_of([optimizer]) if "lr" in group), None)


def _scale_of(node):
    """The power of two that a loss was multiplied by at last, as a GradScaler does it; None if it was not."""
    for _ in range(4):
        other = saved(node, "_saved_other") if node.name() == "MulBackward0" else None
        if other is not None and other.numel() == 1 and other.dtype == torch.float32 and not other.requires_grad:
            power = other.is_cuda or math.log2(max(1.0, float(other))) % 1 == 0
            return other.detach() if power else None
        if node.name() not in ("DivBackward0", "MulBackward0", "ToCopyBackward0", "SumBackward0"):
            return None
        node = next((each for each, _ in node.next_functions if each is not None), None)
        if node is None:
            return None
    return None


def _factor_of(node):
    """The power of two, 64 or more, that a loss was multiplied by in Python; 1 if it was not."""
    other = saved(node, "_saved_other") if node.name() == "MulBackward0" else None
    if other is None or other.numel() != 1 or other.is_cuda or other.requires_grad:
        return 1.0
    factor = float(other)
    return factor if factor >= 64 and math.log2(factor) % 1 == 0 else 1.0


def _is_scaled_somewhere(node, most=50):
    """Whether a part of a loss may have been multiplied by a scale, or is compiled, where that cannot be seen."""
    return any("Compiled" in each.name() or _scale_of(each) is not None for each in nodes_from(node, most))
