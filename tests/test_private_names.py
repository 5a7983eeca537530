"""The one list of private names of others that the suite uses: torch's next version may drop any of them.

Where a name has gone, the message says what needs it. A name that is used and not listed fails too.
"""

import ast
import importlib
from functools import cache

import nbformat
import pytest
import torch

from tools.execute import NOTEBOOKS

NEEDED_BY = {
    "torch._C._current_graph_task_id": "halfbits.watching: a forward that a backward does again",
    "torch._C._functorch.is_functorch_wrapped_tensor": "halfbits._tensors: a tensor within vmap or grad",
    "torch._C._functorch.peek_interpreter_stack": "halfbits.watching: a transform of torch.func at work",
    "torch.ops.aten._local_scalar_dense": "halfbits._ops: what `.item()` asks",
    "torch._ops.OpOverload": "halfbits._ops: an operation, and none of higher order",
    "torch.Tensor._version": "halfbits.watching: a gradient that a backward has changed",
    "torch.utils._python_dispatch._disable_current_modes": "halfbits._listening, _fake, _step, casts: modes of others",
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack": "halfbits._listening: modes of others",
    "accelerate.state.AcceleratorState._reset_state": "notebook 10: several trainings in one process",
    "node._input_metadata": "halfbits._step: the shape and dtype of a gradient that backward expects",
    "node._sequence_nr": "halfbits._step: the order in which backward runs",
    "torch.Tensor._base": "halfbits.casts.trace_casts: whose view a cast tensor is",
    "torch.Tensor._is_view": "halfbits.casts.trace_casts: whose view a cast tensor is",
    "torch.Tensor._make_wrapper_subclass": "halfbits.casts.cast_policies: a tensor of any device, without memory",
    "torch.UntypedStorage()._cdata": "halfbits._step: which tensors share their memory",
    "torch.ops.aten.mm.default._schema": "halfbits.casts, _step: the arguments of an op by name",
    "torch._C._autocast_supported_devices": "halfbits.casts.cast_policies: which backends have autocast",
    "torch._C._dispatch_get_registrations_for_dispatch_key": "halfbits.casts.cast_policies: the ops with a rule",
    "torch._C._dispatch_key_for_device": "halfbits.casts.cast_policies: the name of a device's autocast key",
    "torch._C._DisableAutocast": "halfbits.casts: an op called without autocast",
    "torch._C.DisableTorchFunctionSubclass": "check.mean_loss: a tensor that counts how often it is read",
    "torch._amp_update_scale_": "check.next_state: GradScaler's own rule",
    "torch._foreach_norm": "halfbits._tensors: one kernel for all gradients",
    "torch._functorch.config.backward_pass_autocast": "notebook 14: the dtypes of a compiled backward",
    "torch._subclasses.fake_tensor.FakeTensorMode": "halfbits.casts; notebooks 14 and 15: tensors without memory",
    "torch.cuda.memory._dump_snapshot": "notebook 06: the allocations of a step, as a file",
    "torch.cuda.memory._record_memory_history": "notebook 06: notes each allocation of a step",
    "torch.distributed._tools.mem_tracker.MemTracker": "test_memory: torch's own count, to compare with",
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state": "halfbits._tensors: FSDP2's policy",
    "torch.nn.Module()._compiled_call_impl": "halfbits._listening: what `module.compile()` compiled",
    "torch.nn.Module()._forward_hooks": "check.first_bad: hooks that were left behind",
    "torch.nn.Module()._forward_pre_hooks": "check.first_bad: hooks that were left behind",
    "torch.nn.modules.module._global_forward_hooks": "check.first_bad: hooks that were left behind",
    "torch.nn.modules.module._global_forward_pre_hooks": "check.first_bad: hooks that were left behind",
    "torch.nn.modules.module._global_forward_hooks_with_kwargs": "halfbits._listening: what remove() leaves there",
    "torch.ops.aten._scaled_dot_product_efficient_attention": "halfbits._fake: fused attention in float32",
    "torch.ops.aten._scaled_dot_product_flash_attention": "halfbits._fake: fused attention in 16 bits",
    "torch.ops.aten._to_copy": "halfbits.casts: the op that casts",
    "torch.utils._python_dispatch._get_current_dispatch_mode": "halfbits._looks: a mode that another entered",
    "torch.utils._python_dispatch.TorchDispatchMode": "halfbits.casts, _step, _ops: the ops that run",
    "torch.utils._pytree.tree_leaves": "halfbits.casts, _step: the tensors in nested arguments",
}


def look_up(name):
    """The object of a dotted name; `Class()` in it stands for an instance, `node` for one of autograd's."""
    first, *parts = name.split(".")
    node = torch.ones(1, requires_grad=True).exp().grad_fn
    found, path = node if first == "node" else importlib.import_module(first), first
    for part in parts:
        path = f"{path}.{part}"
        try:
            found = getattr(found, part.removesuffix("()"))
        except AttributeError:
            found = importlib.import_module(path)
        found = found() if part.endswith("()") else found
    return found


@pytest.mark.parametrize("name", NEEDED_BY)
def test_it_is_there(name):
    try:
        look_up(name)
    except (AttributeError, ImportError) as error:
        users = ", ".join(sorted({where for word, where in used_names()[0] if word == last_part(name)}))
        pytest.fail(f"{name} has gone ({error}). It is needed by {NEEDED_BY[name]}. It stands in {users}.")


def sources():
    tests = [NOTEBOOKS.parent / "tests" / name for name in ("test_memory.py", "test_casts.py")]
    for path in [*NOTEBOOKS.parent.glob("halfbits/*.py"), *NOTEBOOKS.parent.glob("helpers/**/*.py"), *tests]:
        yield path.name, path.read_text(encoding="utf-8")
    for path in NOTEBOOKS.glob("*.ipynb"):
        for cell in nbformat.read(path, as_version=4).cells:
            if cell.cell_type == "code" and not cell.source.startswith("%%"):
                yield path.name, cell.source


def is_private(name):
    return name.startswith("_") and not name.endswith("__")


def last_part(name):
    """The part of a dotted name by which its users know it: the private one, or the last."""
    parts = [part.removesuffix("()") for part in name.split(".")]
    return next((part for part in reversed(parts) if is_private(part)), parts[-1])


@cache
def used_names():
    """The private names that the suite uses, each with the file where it stands, and the names that it defines."""
    used, own = set(), {"_repr_mimebundle_", "_fields", "_replace"}  # documented: IPython's, a NamedTuple's
    own |= {path.stem for path in NOTEBOOKS.parent.glob("halfbits/_*.py")}
    for where, source in sources():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") not in ("self", "cls"):
                used.add((node.attr, where))
            elif isinstance(node, ast.ImportFrom) and node.module:
                used |= {(part, where) for part in node.module.split(".")}
                used |= {(alias.name, where) for alias in node.names}
    return {(name, where) for name, where in used if is_private(name)}, own


def test_all_that_are_used_are_listed():
    """Names of torch are told from the suite's own by where they are defined."""
    used, own = used_names()
    listed = {part.removesuffix("()") for name in NEEDED_BY for part in name.split(".")}
    assert not {(name, where) for name, where in used if name not in listed | own}


def test_all_that_are_listed_are_used():
    assert not {name for name in NEEDED_BY if last_part(name) not in {name for name, _ in used_names()[0]}}
