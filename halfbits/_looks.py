"""A close look at one pass: what is measured of outputs, gradients and updates, module by module."""

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from halfbits._ops import Operations, percent
from halfbits._tensors import FP16, SIXTEEN, ends, is_dense, module_of, readable, sample, short, spacing

STEP = "update/weight", "% updates lost", "moved"


class Look:
    """What is measured in one pass, as numbers by (module, what) in `now`, without waiting for the device."""

    def __init__(self, number, boundary, where, loss_only=False):
        self.number, self.boundary, self.loss_only = number, boundary, loss_only
        self.now, self.coarse, self.cut = {}, None, set()
        self.begins, self.done = 1, False  # forwards that began meanwhile; whether its pass is over
        self.gradients, self.weights = {}, []
        # The norm of all gradients after the backward; of those that the step takes, the norm then, before the step and
        # after it, and a cosine between the first two.
        self.norm = self.made = self.at_step = self.after = self.turned = None
        self.norms, self.names = {}, []  # of gradients after the backward; those that the step takes
        self.scale, self.opened, self.paused = 1.0, False, False
        self.operations = Operations(boundary, where, loss_only)
        self.sees_operations = False

    def open(self):
        """Enter the mode that sees operations, where no other mode is on that it could be confused with."""
        if not self.boundary.foreign and _get_current_dispatch_mode() is None:
            self.operations.__enter__()
            self.sees_operations = self.opened = True

    def pause(self):
        """Leave it for a step in float32, of which no operation is looked at, and which has many."""
        self.paused = self.close()
        self.operations.active = not self.paused

    def resume(self):
        if self.paused:
            self.paused, self.operations.active = False, True
            self.open()

    def close(self):
        """Leave it; if a mode of the run lies upon it, it stays there until then, and looks at nothing."""
        self.operations.active = self.paused = False
        if self.sees_operations and _get_current_dispatch_mode() is self.operations:
            self.operations.__exit__(None, None, None)
            self.sees_operations = False
        return not self.sees_operations

    def _keep(self, name, what, value):
        old = self.now.get((name, what))
        self.now[name, what] = value if old is None else torch.maximum(old, value)

    def _size(self, name, what, tensor):
        low, high = ends(tensor)
        self._keep(name, what, torch.maximum(-low, high).float())

    def output(self, name, module, outputs):
        for each in readable(outputs):
            self._size(name, "output", each)
        for each in outputs:
            if each.grad_fn is not None:
                each.grad_fn.register_prehook(self._gradient_hook(name, each.output_nr))
            elif not torch.is_grad_enabled() and any(weight.requires_grad for weight in module.parameters(False)):
                self.cut.add(name)

    def root(self, outputs, inputs):
        """Outputs in 16 bits that differ among the samples by less than their neighbours are apart."""
        inputs = [each for each in inputs if is_dense(each) and each.dim() > 0]
        if not any(len(each) > 1 and (each != each[:1]).any() for each in inputs):
            return  # the samples are all alike
        for each in readable(outputs):
            if each.dtype in SIXTEEN and each.dim() > 1 and each.shape[0] > 3 and each.numel() <= 2**22:
                values = each.float().flatten(1)
                size, spread = values.abs().mean(0), values.std(0)
                apart = torch.finfo(each.dtype).eps * 2.0 ** size.clamp(min=1e-30).log2().floor()
                if float((spread < apart).float().mean()) > 0.3 and float(size.max()) > 1:
                    largest = float(values.abs().max())
                    self.coarse = f"{short(each.dtype)} up to {largest:,.3g}", spacing(largest, each.dtype)

    def _gradient_hook(self, name, place):
        def look(gradients):
            if self.operations.active and place < len(gradients):
                self.boundary.call("gradients", self._gradient, name, gradients[place])

        return look

    def _gradient(self, name, gradient):
        for each in readable([gradient] if gradient is not None else []):
            self._size(name, "gradient", each)
            values = sample(each)
            there = values != 0
            self._keep(name, "% zero", 100 * (~there).float().mean())
            self._keep(name, "% 0 in fp16", 100 * (there & (values.to(FP16) == 0)).float().mean())

    def after_backward(self, found):
        """`found`: the gradients of weights by name."""
        for name, gradient in found.items():
            self._size(module_of(name), "weight gradient", gradient)
        self.gradients = {name: sample(gradient) for name, gradient in found.items()}

    def before_step(self, trained):
        """The weights as they are before the outermost step."""
        self.weights = []
        for name, weight in trained.items():
            for each in readable([weight]):
                self.weights.append((name, each, sample(each)))

    def after_step(self, rate):
        """What the whole step has done to them, where it should: not at a rate of 0, nor without a gradient."""
        moved, nothing_to_do = [], self.at_step is not None and float(self.at_step) == 0
        for name, weight, old in sorted(self.weights, key=lambda row: row[1].numel()):
            module, update, gradient = module_of(name), sample(weight) - old, self.gradients.get(name)
            moved.append(update.abs().max().float())
            if rate == 0 or nothing_to_do or gradient is None or gradient.shape != old.shape or not gradient.any():
                continue
            if old.any():
                self.now[module, "update/weight"] = (update.norm() / old.norm()).float()
            self.now[module, "% updates lost"] = torch.as_tensor(percent(update == 0, gradient != 0))
        if moved and rate != 0:
            self.now["", "moved"] = torch.stack(moved).max()
        self.weights = []

    def pack(self):
        """Keep the numbers only."""
        self.now = {key: float(value) for key, value in self.now.items()}
        self.operations.made_here = set()
        if not self.weights:
            self.gradients, self.norms = {}, {}

    def forget_step(self):
        """A fused optimizer has left the step out."""
        self.now = {key: value for key, value in self.now.items() if key[1] not in STEP}

    def rows(self):
        """(module, what, value) of everything, those of casts to FP8 too."""
        rows = [(module, what, float(value)) for (module, what), value in self.now.items()]
        for module, row in self.operations.eights.items():
            rows += [(module, what, value) for what, value in row.items()]
        return rows


def norms_of(tensors):
    """The norm of each, in one tensor, without waiting for it."""
    wide = torch.float64 if any(each.dtype == torch.float64 for each in tensors) else torch.float32
    norms = torch._foreach_norm([each.detach() for each in tensors], 2, dtype=wide)
    return torch.stack([norm.to(norms[0].device) for norm in norms])
