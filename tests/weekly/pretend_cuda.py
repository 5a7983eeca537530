"""A CUDA GPU, pretended: torch and NVML answer as if it were there, and the CPU computes.

tests/weekly/pretend.py pretends one of CARDS. `environment(card, folder)` gives the variables with which any
Python does: a kernel, torchrun's processes.

Each tensor's storage knows on which side it would lie. So this finds a tensor on the wrong side, `.numpy()` of one on
the GPU, CUDA in a forked process, a host sync in sync debug mode "error", too little memory, and whatever is wrong in a
line that only runs with CUDA. It knows nothing of speed, kernels, `torch.compile` (a function stays as it is), CUDA's
own lists of autocast (tensors get the CPU's), cuDNN and NCCL (Gloo stands in). Fake tensors are left alone.
"""

import functools
import importlib.util
import os
import sys
import time
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

CARDS = {  # compute capability, memory in bytes
    "V100": ((7, 0), 16 * 2**30),
    "T4": ((7, 5), 15 * 2**30),
    "RTX 3070": ((8, 6), 8 * 2**30),
    "RTX 3090": ((8, 6), 24 * 2**30),
    "H200": ((9, 0), 141 * 2**30),
    "B200": ((10, 0), 180 * 2**30),
}
VARIABLE = "HALF_THE_BITS_PRETEND"
ROOT = Path(__file__).resolve().parents[2]


def environment(card, folder):
    """Variables for a process that pretends `card`, small; what starts it lies in `folder`."""
    Path(folder, "sitecustomize.py").write_text("import tests.weekly.pretend_cuda as pretend\n\npretend.start()\n")
    path = os.pathsep.join([str(folder), str(ROOT)])
    return {VARIABLE: card, "PYTHONPATH": path, "HALF_THE_BITS_SIZE": "small"}


class _WhenImported:
    """Calls a function with a module as soon as it has been imported."""

    def __init__(self, install):
        self.install, self.asked = install, None

    def find_spec(self, name, path=None, target=None):
        if name not in self.install or name == self.asked:
            return None
        self.asked = name
        spec = importlib.util.find_spec(name)
        self.asked = None
        execute = spec.loader.exec_module

        def execute_and_install(module):
            execute(module)
            self.install[name](module)

        spec.loader.exec_module = execute_and_install
        return spec


def start():
    """Pretend the card that the environment names, from the moment at which torch and pynvml are imported."""
    card = Card(os.environ[VARIABLE])
    hooks = {"torch": card.install_torch, "pynvml": card.install_nvml, "torchvision.io.image": card.install_jpeg}
    hooks["halfbits.casts"] = card.install_fake_traces
    sys.meta_path.insert(0, _WhenImported(hooks))


class Card:
    """One GPU: what it is, and which storages lie in its memory."""

    def __init__(self, name):
        self.name = f"NVIDIA {name} (pretended)"
        self.capability, self.total = CARDS[name]
        self.uuid = "00000000-0000-4000-8000-000000000000"
        self.sides = {}  # a storage's address: "cuda" or "cpu"; nothing for what C++ makes within an operation
        self.used = self.peak = 0
        self.sync, self.forked = "default", False

    # Memory

    def storage(self, tensor):
        """The storage of a tensor whose side is known; None for fake tensors, sparse ones and other classes."""
        torch = self.torch
        real = type(tensor) in (torch.Tensor, torch.nn.Parameter) and self.true_device(tensor).type == "cpu"
        return tensor.untyped_storage() if real and tensor.layout is torch.strided else None

    def side(self, tensor):
        storage = self.storage(tensor)
        return None if storage is None else self.sides.get(storage._cdata)

    def put(self, tree, side):
        """Let all tensors of `tree` lie on `side`."""
        for tensor in self.tensors(tree):
            storage = self.storage(tensor)
            before = None if storage is None else self.sides.get(storage._cdata)
            if storage is None or before == side:
                continue
            size = -(-storage.nbytes() // 512) * 512
            if side == "cuda" and self.used + size > self.total:
                raise self.torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes (pretended).")
            if before is None:
                weakref.finalize(storage, self.forget, storage._cdata, size).atexit = False
            self.sides[storage._cdata] = side
            self.used += size * ((side == "cuda") - (before == "cuda"))
            self.peak = max(self.peak, self.used)
        return tree

    def forget(self, address, size):
        self.used -= size if self.sides.pop(address, None) == "cuda" else 0

    def tensors(self, tree):
        if isinstance(tree, self.torch.Tensor):
            if type(tree).__module__.startswith("torchao."):  # a quantized tensor is made of others
                return [part for name in tree.__tensor_flatten__()[0] for part in self.tensors(getattr(tree, name))]
            return [tree]
        leaves = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
        return [tensor for leaf in leaves for tensor in self.tensors(leaf)]

    # Rules

    def faking(self):
        return self.torch._C._get_dispatch_mode(self.torch._C._TorchDispatchModeKey.FAKE) is not None

    def is_cuda(self, device):
        """Whether a device that a call names is this GPU; the errors that CUDA gives for others."""
        torch = self.torch
        if device is None or isinstance(device, bool):
            return False
        device = torch.device(device) if isinstance(device, str | int) else device
        if getattr(device, "type", None) != "cuda":
            return False
        if self.forked:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, ...")
        if device.index:
            raise torch.AcceleratorError("CUDA error: invalid device ordinal")
        return True

    def has_tf32(self):
        return self.capability >= (8, 0) and self.torch.backends.cudnn.conv.fp32_precision == "tf32"

    def wait(self):
        if self.sync == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    def move(self, tensor, *args, **kwargs):
        """Tensor.to: a copy if the tensor changes sides."""
        torch, to = self.torch, self.torch.Tensor.to
        if args and isinstance(args[0], torch.Tensor):  # like another tensor
            args = (args[0].device, args[0].dtype, *args[1:])
        if args and not isinstance(args[0], torch.dtype):
            names = ("device", "dtype", "non_blocking", "copy")
            args, kwargs = (), dict(zip(names, args)) | kwargs
        target = kwargs.pop("device", None)
        if target is None:
            return to(tensor, *args, **kwargs)
        on_gpu = self.is_cuda(target)
        if not on_gpu and torch.device(target).type != "cpu":
            return to(tensor, target, *args, **kwargs)
        if on_gpu == (self.side(tensor) == "cuda"):
            return to(tensor, "cpu", *args, **kwargs)
        if not kwargs.get("non_blocking"):
            self.wait()
        return self.put(to(tensor, "cpu", *args, **kwargs | {"copy": True}), "cuda" if on_gpu else "cpu")

    # Torch

    def install_torch(self, torch):
        import torch._dynamo  # lists torch's functions as they are, before they are replaced

        self.torch, self.true_device = torch, torch.Tensor.device.__get__
        self.answer(torch)
        self.replace(torch)
        os.register_at_fork(after_in_child=lambda: setattr(self, "forked", True))
        _sides_of_operations(self).__enter__()
        _sides_of_calls(self).__enter__()

    def answer(self, torch):
        """What torch.cuda and torch.accelerator say about this card."""
        major, minor = self.capability
        facts = {"name": self.name, "major": major, "minor": minor, "total_memory": self.total, "uuid": self.uuid}
        facts |= {"multi_processor_count": 80, "warp_size": 32, "L2_cache_size": 50 * 2**20, "gcnArchName": ""}
        facts |= {"is_integrated": False, "shared_memory_per_block_optin": 101376, "regs_per_multiprocessor": 65536}
        pages = lambda size: -(-size // 2**21) * 2**21
        stream = _Stream()
        both = {
            "is_available": lambda: True,
            "is_initialized": lambda: not (self.forked or self.faking()),
            "device_count": lambda: 1,
            "synchronize": lambda device=None: None,
            "memory_allocated": lambda device=None: self.used,
            "max_memory_allocated": lambda device=None: self.peak,
            "memory_reserved": lambda device=None: pages(self.used),
            "max_memory_reserved": lambda device=None: pages(self.peak),
            "reset_peak_memory_stats": lambda device=None: setattr(self, "peak", self.used),
            "current_stream": lambda device=None: stream,
            "set_stream": lambda stream: None,
        }
        emptied = lambda: None
        emptied.__doc__ = torch.cuda.empty_cache.__doc__
        modes, built_for = ["default", "warn", "error"], torch.cuda.get_arch_list
        statistics = lambda device=None: {
            "allocated_bytes.all.current": self.used,
            "allocated_bytes.all.peak": self.peak,
            "reserved_bytes.all.current": pages(self.used),
            "num_alloc_retries": 0,
        }
        only = {
            "init": lambda: None,
            "_lazy_init": lambda: None,
            "_lazy_call": lambda call, **options: None,
            "_initialized": True,
            "current_device": lambda: 0,
            "set_device": self.is_cuda,
            "_exchange_device": lambda index: 0,
            "_maybe_exchange_device": lambda index: 0,
            "empty_cache": emptied,
            "get_device_properties": lambda device=None: SimpleNamespace(**facts),
            "get_device_capability": lambda device=None: self.capability,
            "get_device_name": lambda device=None: self.name,
            "get_arch_list": lambda: [*dict.fromkeys([*built_for(), f"sm_{major}{minor}"])],
            "mem_get_info": lambda device=None: (self.total - self.used, self.total),
            "memory_stats": statistics,
            "Event": _Event,
            "Stream": _Stream,
            "stream": lambda stream: stream or nullcontext(),
            "default_stream": lambda device=None: stream,
            "is_current_stream_capturing": lambda: False,
            "CUDAGraph": _Graph,
            "graph": lambda graph, **options: nullcontext(),
            "manual_seed": lambda seed: None,
            "manual_seed_all": lambda seed: None,
            "get_rng_state": lambda device=None: torch.get_rng_state(),
            "get_rng_state_all": lambda: [torch.get_rng_state()],
            "set_rng_state": lambda state, device=None: None,
            "set_rng_state_all": lambda states: None,
            "_sleep": lambda cycles: setattr(_Event, "ahead", _Event.ahead + cycles / 1.5e9),
            "set_sync_debug_mode": lambda mode: setattr(self, "sync", modes[mode] if isinstance(mode, int) else mode),
            "get_sync_debug_mode": lambda: modes.index(self.sync),
        }
        vars(torch.cuda).update(both | only)
        torch.cuda.memory.empty_cache = emptied
        accelerator = {"current_accelerator": lambda check_available=False: torch.device("cuda")}
        accelerator |= {"empty_cache": emptied, "current_device_index": lambda: 0, "set_device_index": self.is_cuda}
        accelerator |= {"device_index": lambda index: nullcontext()}
        vars(torch.accelerator).update(both | accelerator)
        torch.Event = _Event

    def replace(self, torch):
        """What would reach for a driver, or for a compiler of GPU code."""
        # Tensors are the CPU's: what autocast is told for CUDA must hold for them.
        for name in ("set_autocast_enabled", "set_autocast_dtype"):
            setattr(torch, name, self.told_twice(getattr(torch, name)))

        def compiled(model=None, *, mode=None, **options):
            if mode not in (None, "default", *torch._inductor.list_mode_options()):
                raise RuntimeError(f"Unrecognized mode={mode}")
            return model if model is not None else lambda function: function

        torch.compile = compiled
        torch.Generator = _generator_class(self)
        from_numpy, fork_rng = torch.from_numpy, torch.random.fork_rng
        torch.from_numpy = lambda array: self.put(from_numpy(array), "cpu")
        torch.random.fork_rng = lambda *args, **kwargs: fork_rng(devices=[])
        load = torch.load

        def loaded(file, map_location=None, **options):
            on_gpu = isinstance(map_location, str | torch.device) and torch.device(map_location).type == "cuda"
            return self.put(load(file, "cpu", **options), "cuda") if on_gpu else load(file, map_location, **options)

        torch.load = loaded
        torch._subclasses.fake_tensor.init_gpu_context = lambda device: None
        torch._subclasses.fake_tensor.FakeTensorMode.avoid_device_init = property(lambda mode: True)

        from torch.utils.data import dataloader

        make, following = dataloader.DataLoader.__init__, dataloader._BaseDataLoaderIter.__next__

        def unpinned(loader, *args, pin_memory=False, **options):
            make(loader, *args, **options)

        dataloader.DataLoader.__init__ = unpinned
        dataloader._BaseDataLoaderIter.__next__ = lambda iterator: self.put(following(iterator), "cpu")

        import torch.distributed.distributed_c10d as c10d

        begin = c10d.init_process_group

        def with_gloo(backend=None, *args, device_id=None, **options):
            begin("gloo" if backend == "nccl" else backend, *args, **options)

        c10d.init_process_group = torch.distributed.init_process_group = with_gloo

    def told_twice(self, told):
        def tell(kind, value):
            told(kind, value)
            if kind == "cuda" and not self.faking():
                told("cpu", value)

        return tell

    # NVML and the JPEG decoder

    def install_nvml(self, pynvml):
        began = time.perf_counter()
        context = 500 * 2**20
        answers = {
            "nvmlInit": lambda: None,
            "nvmlSystemGetDriverVersion": lambda: "0 (pretended)",
            "nvmlDeviceGetHandleByUUID": lambda uuid: "GPU",
            "nvmlDeviceGetHandleByIndex": lambda index: "GPU",
            "nvmlDeviceGetCount": lambda: 1,
            "nvmlDeviceGetName": lambda gpu: self.name,
            "nvmlDeviceGetClockInfo": lambda gpu, kind: 1400,
            "nvmlDeviceGetMaxClockInfo": lambda gpu, kind: 1980,
            "nvmlDeviceGetPowerManagementLimit": lambda gpu: 350_000,
            "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(total=self.total, used=self.peak + context),
            "nvmlDeviceGetComputeRunningProcesses": lambda gpu: [
                SimpleNamespace(pid=os.getpid(), usedGpuMemory=self.peak + context)
            ],
            "nvmlDeviceGetGraphicsRunningProcesses": lambda gpu: [],
            "nvmlDeviceGetTotalEnergyConsumption": lambda gpu: int(300_000 * (time.perf_counter() - began)),
        }
        vars(pynvml).update(answers)

    def install_jpeg(self, image):
        decode = image.decode_jpeg

        def decode_jpeg(data, mode=image.ImageReadMode.UNCHANGED, device="cpu", **options):
            if isinstance(data, list):
                return [decode_jpeg(each, mode, device, **options) for each in data]
            return decode(data, mode, **options).to(device)

        image.decode_jpeg = decode_jpeg

    def install_fake_traces(self, autocast):
        """CUDA's own lists of autocast hold for fake tensors alone."""
        trace_casts = autocast.trace_casts

        @functools.wraps(trace_casts)
        def traced(fn, *args, device_type="cuda", fake=None, **options):
            fake = device_type == "cuda" if fake is None else fake
            return trace_casts(fn, *args, device_type=device_type, fake=fake, **options)

        autocast.trace_casts = traced


class _Event:
    """A moment on the clock, which `torch.cuda._sleep` puts ahead."""

    ahead = 0.0

    def __init__(self, *args, **options):
        self.at = None

    def record(self, stream=None):
        self.at = time.perf_counter() + _Event.ahead

    def elapsed_time(self, end):
        return 1000 * (end.at - self.at)

    def query(self):
        return True

    def synchronize(self):
        pass

    wait = synchronize


class _Graph:
    """Recorded work, which nothing repeats."""

    def replay(self):
        pass


class _Stream:
    """The one queue of work: all of it is done already."""

    priority = cuda_stream = stream_id = device_index = 0

    def __init__(self, *args, **options):
        pass

    def record_event(self, event=None):
        event = event or _Event()
        event.record()
        return event

    def wait_stream(self, other=None):
        pass

    synchronize = wait_event = wait_stream

    def query(self):
        return True

    def is_capturing(self):
        return False

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


def _generator_class(card):
    class Generator(card.torch._C.Generator):
        def __new__(cls, device="cpu"):
            self = super().__new__(cls, "cpu")
            self.place = card.torch.device("cuda" if card.is_cuda(device) else "cpu")
            return self

        @property
        def device(self):
            return self.place

    return Generator


def _sides_of_operations(card):
    """A mode in which the outputs of an operation, forward or backward, lie where its inputs lie."""
    torch, aten = card.torch, card.torch.ops.aten
    free = {aten.copy_.default, aten._to_copy.default, aten._foreach_copy_.default, aten.set_.source_Tensor}
    indexing = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
    waiting = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default}

    from torch.utils._python_dispatch import TorchDispatchMode

    def to_tf32(tensor):
        """Rounded to 10 bits after the point, ties away from zero."""
        if tensor.dtype != torch.float32:
            return tensor
        return ((tensor.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)

    class Sides(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            if card.faking():
                return func(*args, **kwargs)
            named = card.is_cuda(kwargs.get("device"))
            if named:
                kwargs = kwargs | {"device": torch.device("cpu")}
            tensors = card.tensors((args, kwargs))
            sides = {side: t for t in tensors if (side := card.side(t)) and (t.dim() or side == "cuda")}
            self.refuse_both(func, args, sides)
            if "cuda" in sides and func in waiting:
                card.wait()
            if "cuda" in sides and func is aten.convolution.default and card.has_tf32():
                args = (*map(to_tf32, args[:2]), *args[2:])
            result = func(*args, **kwargs)
            if func.namespace == "prim":
                return result
            side = "cuda" if named or "cuda" in sides else next(iter(sides), None)
            if func in free and tensors and not named:
                side = card.side(tensors[0])
            if side:
                card.put([each for each in card.tensors(result) if card.side(each) is None], side)
            return result

        def refuse_both(self, func, args, sides):
            known = func.namespace in ("aten", "torchvision", "torchao") and func not in free
            if len(sides) < 2 or not known or torch.distributed.is_initialized():  # DDP's buckets are made by C++
                return
            if func in indexing and card.side(args[0]) != "cpu":
                return
            shapes = {side: tuple(tensor.shape) for side, tensor in sides.items()}
            raise RuntimeError(f"Expected all tensors to be on the same device: {func} got {shapes}")

    return Sides()


def _sides_of_calls(card):
    """A mode that reads devices in calls of torch's Python interface, and answers questions about them."""
    torch, Tensor = card.torch, card.torch.Tensor

    from torch.overrides import TorchFunctionMode

    def on_gpu(tensor):
        return card.side(tensor) == "cuda"

    answers = {
        Tensor.device.__get__: lambda tensor: torch.device("cuda", 0) if on_gpu(tensor) else card.true_device(tensor),
        Tensor.is_cuda.__get__: lambda tensor: on_gpu(tensor) or card.true_device(tensor).type == "cuda",
        Tensor.is_cpu.__get__: lambda tensor: not on_gpu(tensor) and card.true_device(tensor).type == "cpu",
        Tensor.get_device: lambda tensor: 0 if on_gpu(tensor) else -1,
        Tensor.to: card.move,
        Tensor.cuda: lambda tensor, device="cuda", **options: card.move(tensor, device or "cuda", **options),
        Tensor.cpu: lambda tensor, **options: card.move(tensor, "cpu", **options),
        Tensor.pin_memory: lambda tensor, device=None: tensor.clone(),
        Tensor.is_pinned: lambda tensor, device=None: False,
    }

    class Devices(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            if card.faking() or func in (Tensor._make_wrapper_subclass, torch._C._nn._parse_to):
                return func(*args, **kwargs)  # the second only reads what Module.to was given
            if func in answers:
                return answers[func](*args, **kwargs)
            if func is Tensor.backward:
                with self:  # hooks ask for devices too
                    return self.backward(*args, **kwargs)
            if func in (Tensor.numpy, Tensor.__array__) and on_gpu(args[0]) and not kwargs.get("force"):
                raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() ...")
            named = card.is_cuda(kwargs.get("device"))
            self.check_generator(named or (bool(args) and isinstance(args[0], Tensor) and on_gpu(args[0])), kwargs)
            if named:
                return self.made_on_gpu(func, args, kwargs)
            result = func(*args, **kwargs)
            if isinstance(result, Tensor) and not card.tensors((args, kwargs)) and card.side(result) is None:
                card.put(result, "cpu")
            return result

        def made_on_gpu(self, func, args, kwargs):
            try:
                return card.put(func(*args, **kwargs | {"device": torch.device("cpu")}), "cuda")
            except RuntimeError as error:
                if "can't allocate memory" in str(error):  # more than this machine has
                    raise torch.OutOfMemoryError(f"CUDA out of memory (pretended): {error}") from None
                raise

        def backward(self, tensor, gradient=None, retain_graph=None, create_graph=False, inputs=None):
            torch.autograd.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)

        def check_generator(self, there, kwargs):
            generator = kwargs.get("generator")
            if generator is not None and there != (generator.device.type == "cuda"):
                raise RuntimeError(f"Expected a {'cuda' if there else 'cpu'} device type for generator")

    return Devices()
