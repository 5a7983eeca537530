"""Where `watch` meets a run: the boundary that no error of its own passes, and what hangs in PyTorch meanwhile.

Nothing is attached to a model, an optimizer or a scaler, so that they can be copied, pickled and compiled as ever.
"""

import functools
import importlib
import logging
import sys
import threading
import traceback
import warnings
from contextlib import contextmanager, nullcontext

import torch
from torch.nn.modules import module as modules
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from halfbits._ops import Operations


class NonFinite(RuntimeError):
    """The first number that is not finite: `origin`, an `Origin`; `path`, what was saved, or None; `case`."""

    def __init__(self, words, origin=None, path=None, case=""):
        super().__init__(words)
        self.origin, self.path, self.case = origin, path, case


class Busy(threading.local):
    """How deep this thread is within watches: what it computes there is their own, and none of them looks at it."""

    depth = 0


BUSY = Busy()


class Boundary:
    """Calls what is a watch's own, so that an error of it ends that part of the looking, and not the run."""

    def __init__(self):
        self.closed = {}  # a part of the watch, and why it does not look any more
        self.foreign = False  # whether a mode of the run's own is on

    def call(self, part, function, *args):
        """What the function returns; None if it fails, or if that part has failed before."""
        if part in self.closed:
            return None
        BUSY.depth += 1
        self.foreign = any(not isinstance(mode, Operations) for mode in _get_current_dispatch_mode_stack())
        try:
            with _disable_current_modes() if self.foreign else nullcontext():
                return function(*args)
        except NonFinite:
            raise
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            why = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
            self.close(part, f"of {why} (in {frame.name}, line {frame.lineno})")
            return None
        finally:
            BUSY.depth -= 1

    @property
    def busy(self):
        return BUSY.depth

    def close(self, part, why):
        if part not in self.closed:
            self.closed[part] = why
            logging.getLogger("halfbits").info("watch has stopped looking at %s, because %s", part, why)


class Hub:
    """The hooks of all watches that are on: hung up for the first, and taken down after the last."""

    def __init__(self):
        self.watches, self.undo, self.module_hooks = [], [], []
        self.replaying = False  # a watch does a pass again: the others look away

    def add(self, watch):
        if not self.watches:
            self._hang_up()
        self.watches.append(watch)
        if _anything_compiled():
            watch.leave_operations()
        self._hang_up_modules()

    def remove(self, watch):
        self.watches = [each for each in self.watches if each is not watch]
        self._hang_up_modules()
        if not self.watches:
            for undo in reversed(self.undo):
                undo()
            self.undo = []

    def _hang_up(self):
        self.undo = [
            register_optimizer_step_pre_hook(self._before_step).remove,
            register_optimizer_step_post_hook(self._after_step).remove,
        ]
        self._wrap(torch.autograd, "backward", self._backward)
        self._wrap(torch.amp.GradScaler, "step", self._scaler_step)
        self._wrap(torch, "compile", self._compile)
        self._wrap(torch.autocast, "__enter__", self._region)
        self._wrap(importlib.import_module("torch._dynamo.eval_frame").OptimizedModule, "__call__", self._call)

    def _wrap(self, owner, name, around):
        original = vars(owner)[name]

        @functools.wraps(original)
        def wrapped(*args, **kwargs):
            return around(original, *args, **kwargs)

        def undo():
            if vars(owner)[name] is wrapped:  # else someone has wrapped it since, and calls what does nothing more
                setattr(owner, name, original)

        setattr(owner, name, wrapped)
        self.undo.append(undo)

    def _hang_up_modules(self):
        """Hooks for all modules, while a watch wants them."""
        wanted = any(watch.wants_modules() for watch in self.watches)
        if wanted and not self.module_hooks:
            self._register()
        elif not wanted:
            self._unregister()

    def _register(self):
        before = modules.register_module_forward_pre_hook(self._enter)
        after = modules.register_module_forward_hook(self._leave, with_kwargs=True, always_call=True)
        self.module_hooks = [before, after]

    def _unregister(self):
        for hook in self.module_hooks:
            hook.remove()
            modules._global_forward_hooks_with_kwargs.pop(hook.id, None)  # which PyTorch 2.15 leaves there
        self.module_hooks = []

    @contextmanager
    def replay(self):
        """A pass is done again, uncompiled: modules are seen, and it is no pass of the run."""
        self.replaying, registers = True, not self.module_hooks
        if registers:
            self._register()
        try:
            with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of hooks beside compiled modules
                yield
        finally:
            self.replaying = False
            if registers:
                self._unregister()

    def _call(self, original, module, *args, **kwargs):
        """Around what torch.compile has made: it must not meet hooks, and is seen from outside."""
        if self.replaying or not self.module_hooks:
            return original(module, *args, **kwargs)
        self._enter(module, args)
        self._unregister()
        output = None
        try:
            output = original(module, *args, **kwargs)
        finally:
            self._hang_up_modules()
            self._leave(module, args, kwargs, output)
        return output

    def around_compiled(self, module):
        """See a module that was compiled in place from outside; returns what undoes that. It is not pickled with it."""
        compiled = module._compiled_call_impl
        if compiled is None:
            return None

        def outside(*args, **kwargs):
            return self._call(lambda module, *args, **kwargs: compiled(*args, **kwargs), module, *args, **kwargs)

        def undo():
            if module._compiled_call_impl is outside:
                module._compiled_call_impl = compiled

        module._compiled_call_impl = outside
        return undo

    def _enter(self, module, args):
        if not torch.compiler.is_compiling():
            for watch in self.watches:
                watch.region_is_used |= any(map(torch.is_autocast_enabled, watch.regions))
                if watch.cares_for(module):
                    watch.boundary.call("modules", watch.enter, module)

    def _leave(self, module, args, *more):
        if not torch.compiler.is_compiling():
            kwargs = more[0] if len(more) == 2 else {}
            for watch in self.watches:
                if watch.cares_for(module):
                    watch.boundary.call("modules", watch.leave, module, args, kwargs, more[-1])

    def _backward(self, original, tensors, *args, **kwargs):
        watches = list(self.watches)
        for watch in watches:
            watch.boundary.call("the backward", watch.before_backward, tensors)
        try:
            result = original(tensors, *args, **kwargs)
        except BaseException:
            for watch in watches:
                watch.boundary.call("the backward", watch.leave_backward)
            raise
        for watch in watches:
            watch.boundary.call("the backward", watch.after_backward)
        return result

    def _before_step(self, optimizer, *_):
        for watch in self.watches:
            watch.boundary.call("the optimizer's step", watch.before_step, optimizer)

    def _after_step(self, optimizer, *_):
        for watch in self.watches:
            watch.boundary.call("the optimizer's step", watch.after_step, optimizer)

    def _scaler_step(self, original, scaler, optimizer, *args, **kwargs):
        watches = list(self.watches)
        for watch in watches:
            watch.boundary.call("the scaler", watch.before_scaler_step, scaler, optimizer)
        result = original(scaler, optimizer, *args, **kwargs)
        for watch in watches:
            watch.boundary.call("the scaler", watch.after_scaler_step, scaler, optimizer)
        return result

    def _region(self, original, region):
        for watch in self.watches:  # an island within a region is a use of it
            watch.region_is_used |= any(map(torch.is_autocast_enabled, watch.regions))
        result = original(region)
        if getattr(region, "_enabled", False):
            for watch in self.watches:
                watch.boundary.call("autocast", watch.enter_region, region.device)
        return result

    def _compile(self, original, *args, **kwargs):
        part = getattr(args[0], "__self__", None) if args else None  # of `module.compile()`
        for watch in self.watches:
            watch.leave_operations()
            if part is not None and watch.cares_for(part):
                watch.leave_modules()
        self._hang_up_modules()
        return original(*args, **kwargs)


def _anything_compiled():
    """Whether torch.compile was called in this process."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # slow to import, and not there if nothing was
    return dynamo is not None and any(backend is not None for backend in dynamo.cached_backends.values())


HUB = Hub()
