"""Instruments for mixed-precision training in PyTorch: what rounding does, what autocast casts, what fits, what fails.

    from halfbits import audit, predict_memory, trace_casts, watch

Each name is imported from its module when it is first used, so that `import halfbits` takes no longer than
`import torch`. The same instruments work from a shell: `halfbits --help`.
"""

import importlib

_MODULES = {
    "FORMATS": "formats",
    "FloatFormat": "formats",
    "BlockFormat": "formats",
    "MXFP8": "formats",
    "MXFP6": "formats",
    "MXFP4": "formats",
    "NVFP4": "formats",
    "cast_policies": "casts",
    "trace_casts": "casts",
    "predict_memory": "memory",
    "largest_batch": "memory",
    "roofline": "speed",
    "GPUS": "speed",
    "audit": "auditing",
    "watch": "watching",
    "NonFinite": "watching",
    "compare": "comparing",
    "bisect": "comparing",
    "scan": "checkpoints",
    "explain": "errors",
}
__all__ = sorted(_MODULES)


def __getattr__(name):
    if name not in _MODULES:
        raise AttributeError(f"module 'halfbits' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(f"halfbits.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__():
    return __all__
