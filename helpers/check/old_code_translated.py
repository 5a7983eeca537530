"""Exercises of the notebook on old code."""

import torch

from helpers.check.exercise import exercise


def _in_torch(config, off=False, fixed=True, power=True, autocast=True):
    """DeepSpeed's blocks in torch's terms, right or with a rule left out."""
    blocks = {name: config.get(name, {}) for name in ("fp16", "bf16", "torch_autocast")}
    on = next((name for name, block in blocks.items() if block.get("enabled", off) or (off and block)), None)
    answer = {"weights": torch.float32, "autocast": None, "scale": 1}
    if on == "fp16":
        dynamic = 2 ** (blocks[on].get("initial_scale_power", 16) if power else 16)
        answer |= {"weights": torch.float16, "scale": (fixed and blocks[on].get("loss_scale", 0)) or dynamic}
    elif on == "bf16":
        answer["weights"] = torch.bfloat16
    elif on:
        answer["autocast"] = getattr(torch, blocks[on]["dtype"])
        answer["scale"] = 65536 if answer["autocast"] == torch.float16 else 1
        answer["weights"] = torch.float32 if autocast else answer["autocast"]
    return answer


@exercise(
    cases=[
        ({},),
        ({"fp16": {"enabled": True, "loss_scale": 0}},),
        ({"fp16": {"enabled": True, "loss_scale": 128}},),
        ({"fp16": {"enabled": True, "initial_scale_power": 12}},),
        ({"fp16": {"enabled": False, "loss_scale": 128}, "bf16": {"enabled": True}},),
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}},),
    ],
    mistakes={
        "A loss_scale that is not 0 is the scale.": lambda config: _in_torch(config, fixed=False),
        "A dynamic scale begins at 2 to the power that initial_scale_power says.": lambda config: _in_torch(
            config, power=False
        ),
        "A block that is not enabled says nothing.": lambda config: _in_torch(config, off=True),
        "torch_autocast leaves the weights in float32.": lambda config: _in_torch(config, autocast=False),
        "Only fp16 needs a scale: elsewhere it is 1.": lambda config: _in_torch(config) | {"scale": 65536},
    },
    show=str,
)
def in_torch(config):
    """`in_torch(config)` says of a DeepSpeed configuration: the dtypes of weights and autocast, and the first scale."""
    return _in_torch(config)
