"""Watch training steps from outside: the dtype of every tensor, and the first number that is not finite."""

import math

import pandas as pd
import torch


def _watch(model, note):
    """Call `note(what, where, tensor)` for all that the leaf modules of `model` put out, for the gradients that come
    back to it, and for those of the weights. Returns the hooks."""

    def outputs_of(name):
        def hook(module, inputs, outputs):
            for output in outputs if isinstance(outputs, tuple) else (outputs,):
                if isinstance(output, torch.Tensor) and output.is_floating_point():
                    note("output of", name, output)
                    if output.requires_grad:
                        output.register_hook(lambda gradient: note("gradient at output of", name, gradient))

        return hook

    leaves = {name: module for name, module in model.named_modules() if not list(module.children())}
    hooks = [module.register_forward_hook(outputs_of(name or "model")) for name, module in leaves.items()]
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            hook = lambda weight, name=name: note("gradient of", name, weight.grad)
            hooks.append(weight.register_post_accumulate_grad_hook(hook))
    return hooks


def diagnose(model, step, scaler=None, steps=3):
    """Call `step()`, one training step of `model`, `steps` times; say of each which tensor was the first that was not
    finite, and what the GradScaler `scaler` did. If `step` returns its loss, one that is not finite is told too. The
    steps are real: weights and scale change.

    Returns a DataFrame of the last step, one row a tensor in the order of time: the output of each leaf module, the
    gradient that came back to it, the gradient of each weight; with dtype, largest finite absolute value, percentage
    of zeros, and whether all of it is finite. Gradients are seen scaled, as backward computes them. An error of
    `step` is raised when what was seen until then has been told.

    Examples
    --------
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    >>> table = diagnose(model, lambda: model(torch.full((1, 2), math.inf)).sum().backward(), steps=1)
    step 1: output of 0 (float32) is the first that is not finite
    dtypes of outputs: float32
    """
    rows = []

    def note(what, where, tensor):
        values = tensor.detach().float()
        finite = values.isfinite()
        largest = values[finite].abs().max().item() if finite.any() else float("nan")
        zero = 100 * (values == 0).float().mean().item()
        rows.append((what, where, str(tensor.dtype).removeprefix("torch."), largest, zero, bool(finite.all())))

    def tell(number, returned, scale):
        bad = next((row for row in rows if not row[-1]), None)
        words = f"returned {returned}; " if isinstance(returned, float) and not math.isfinite(returned) else ""
        words += f"{bad[0]} {bad[1]} ({bad[2]}) is the first that is not finite" if bad else "all finite"
        if scaler is not None:
            after = scaler.get_scale()
            shown = [f"{each:,.0f}" if each >= 1 else f"{each:g}" for each in (scale, after)]
            words += f"; scale {' -> '.join(shown)}" + (", step skipped" if after < scale else "")
        print(f"step {number}: {words}")

    hooks = _watch(model, note)
    try:
        for number in range(1, steps + 1):
            rows.clear()
            scale, returned = scaler.get_scale() if scaler is not None else None, None
            try:
                returned = step()
                returned = returned.item() if isinstance(returned, torch.Tensor) and returned.numel() == 1 else returned
            finally:
                tell(number, returned, scale)
    finally:
        for hook in hooks:
            hook.remove()
    table = pd.DataFrame(rows, columns=["what", "where", "dtype", "largest", "% zero", "finite"])
    print("dtypes of outputs:", ", ".join(table["dtype"][table.what == "output of"].unique()) or "none seen")
    return table
