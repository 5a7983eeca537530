"""The instruments from a shell: `halfbits bits`, `casts`, `memory`, `scan` and `explain`.

Exit status: 0 for an answer, 1 where `explain` does not know the message, 2 for input that it cannot use.
"""

import argparse
import json
import math
import os
import re
import sys
from fractions import Fraction

GIB = 2**30


def main(arguments: list[str] | None = None) -> int:
    """Run one command, and return its exit status. What is wrong with the input is said in one sentence."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["bits"]:
        # A space in front: else argparse takes -1/3 and -inf for options.
        arguments = [re.sub(r"^-(?=[\d.]|inf|nan)", " -", each) for each in arguments]
    try:
        options = _parser().parse_args(arguments)
        return options.run(options) or 0
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, TypeError, KeyError, OSError, ImportError) as error:
        return _refuse(str(error.args[0] if isinstance(error, KeyError) else error))
    except Exception as error:  # of a model that is somebody else's
        said = str(error).rstrip(".")
        return _refuse(f"{type(error).__name__}: {said}. Does the model run in Python with this input?")


def _refuse(words):
    first = " ".join(words.split())
    print(f"halfbits: {first if len(first) < 600 else first[:600] + ' ...'}", file=sys.stderr)
    return 2


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        sys.exit(_refuse(f"{message}; see `{self.prog} --help`"))


def _parser():
    parser = _Parser(prog="halfbits", description="Instruments for mixed-precision training in PyTorch.")
    parser.add_argument("--version", action="version", version="halfbits 0.1.0")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name, run, what):
        made = commands.add_parser(name, help=what, description=what)
        made.set_defaults(run=run)
        made.add_argument("--json", action="store_true", help="print JSON, for programs to read")
        return made

    bits = command("bits", _bits, "What a number becomes in each format, bit by bit.")
    bits.add_argument("number", help="0.1, 1e-8, 2^-24, 1/3, inf, or bits as 0x3c00 with --format")
    bits.add_argument("--format", help="one format only: fp16, bf16, fp8_e4m3fn, ...")

    casts = command("casts", _casts, "What autocast casts in a model, asked of the installed torch.")
    casts.add_argument("model", help="timm:NAME, hf:PATH of a config, or module:function")
    casts.add_argument("--input", type=_shape, metavar="1x3x224x224", help="the shape of the images")
    casts.add_argument("--tokens", type=_shape, metavar="1x128", help="sequences x tokens of a language model")
    casts.add_argument("--device", default="cuda", choices=["cuda", "cpu", "mps", "xpu"])
    casts.add_argument("--dtype", default="float16", choices=["float16", "bfloat16", "fp16", "bf16"])
    casts.add_argument("--ops", action="store_true", help="a line for each op, in the order of running")

    memory = command("memory", _memory, "What a training step needs, predicted without a GPU.")
    memory.add_argument("model", help="timm:NAME, hf:PATH of a config, or module:function")
    memory.add_argument("--input", type=_shape, metavar="32x3x224x224", help="the shape of a batch of images")
    memory.add_argument("--tokens", type=_shape, metavar="4x2048", help="sequences x tokens of a language model")
    memory.add_argument(
        "--optimizer",
        default="adamw",
        help="adamw (fused; the default), adamw_foreach, adamw_8bit, adam, sgd, sgd_momentum",
    )

    scan = command("scan", _scan, "What 16, 8 and 4 bits would do to the weights of a checkpoint.")
    scan.add_argument("path", help="a .safetensors file, a folder of them, or a file of torch.save")
    scan.add_argument(
        "--tensors", type=_count, default=1, metavar="N", help="how many of the worst, for each format (1)"
    )

    explain = command("explain", _explain, "What an error message means, with its cause and a fix.")
    explain.add_argument("message", nargs="*", help="the message; without it, standard input is read")
    return parser


def _shape(text):
    try:
        shape = tuple(int(part) for part in text.lower().split("x"))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        words = "is no shape: write whole numbers with an x between, as 32x3x224x224"
        raise argparse.ArgumentTypeError(f"{text!r} {words}")
    return shape


def _count(text):
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def _show(options, table, words=()):
    """Print a table, and sentences below it; or all of it as JSON."""
    if options.json:
        _print_json(table)
        return
    print(table.to_string(index=False, max_colwidth=60))
    for line in words:
        print(line)


def _print_json(table):
    """The rows as JSON, numbers in full, null for NaN and what is not there."""
    rows = table.astype(object).where(table.notna(), None).to_dict("records")
    print(json.dumps(rows, indent=1, default=lambda number: number.item()))


# bits


def parse_number(text: str) -> float | int:
    """The value (float) or code (int) that was typed: 0.1, 1e-8, 2^-24, 1/3, inf, or bits as 0x3c00 or 0b1.

    Examples
    --------
    >>> parse_number("2^-24"), parse_number("1/4"), parse_number("0x3c00")
    (5.960464477539063e-08, 0.25, 15360)
    """
    text = text.strip().lower().replace("**", "^").replace("\N{MINUS SIGN}", "-")
    try:
        if text.startswith(("0x", "0b")):
            return int(text, 0)
        sign = -1 if text.startswith("-") else 1
        size = text.removeprefix("-")
        base, power, exponent = size.partition("^")
        value = float(Fraction(base) if "/" in base else base)
        if power:
            value **= float(exponent)
        if math.isinf(value) and "inf" not in base:
            raise OverflowError
        if value == 0 and re.search("[1-9]", base):
            raise ValueError(f"{text} is too small for Python's own numbers, which end at 5e-324.")
        return sign * value
    except ArithmeticError:
        raise ValueError(f"{text} is too large, or a division by zero.") from None
    except ValueError as error:
        if "too small" in str(error):
            raise
        words = "is not a number. Try 0.1, 1e-8, 2^-24, 1/3, inf, or bits: 0x3c00."
        raise ValueError(f"{text!r} {words}") from None


def _bits(options):
    import pandas as pd

    from halfbits.formats import FORMATS

    number = parse_number(options.number)
    if isinstance(number, int) and not options.format:
        raise ValueError(f"{options.number} are bits: say of which format, as --format fp16")
    formats = [FORMATS[options.format]] if options.format else list(FORMATS.values())
    rows = []
    for form in formats:
        code = number if isinstance(number, int) else int(form.encode(number))
        value = float(form.decode(code))
        given = value if isinstance(number, int) else number
        digits = f"{code:0{form.bits}b}"
        exponent_ends = 1 + form.exponent_bits
        rows.append(
            {
                "format": form.name,
                "sign exponent fraction": f"{digits[0]} {digits[1:exponent_ends]} {digits[exponent_ends:]}",
                "hex": f"{code:#0{2 + math.ceil(form.bits / 4)}x}",
                "value": repr(value),
                "rounding": _rounding(given, value, form.max),
                "kind": str(form.kind(code)),
            }
        )
    _show(options, pd.DataFrame(rows))


def _rounding(given, value, largest):
    """What rounding did, in words."""
    if math.isnan(given) and not math.isnan(value):
        return "there is no NaN"
    if value == given or (math.isnan(value) and math.isnan(given)):
        return "exact"
    if not math.isfinite(value):
        return "overflows"
    if value == 0:
        return "becomes 0"
    if abs(value) == largest and abs(given) > 1.25 * largest:
        return "cut off"
    return f"off by {(value - given) / given:+.2g} of it"


# casts and memory


def _model(options):
    """The model, a function that makes what it is called with, and the shape of that."""
    import torch

    from halfbits._models import find_model

    named = find_model(options.model)
    reads_tokens = named.loss is not None
    if reads_tokens and options.input:
        raise ValueError("a language model reads tokens: give --tokens 4x2048 instead of --input")
    if options.tokens and options.model.startswith("timm:"):
        raise ValueError("timm's models are called with images: give --input 32x3x224x224 instead of --tokens")
    shape = options.tokens or options.input or named.shape
    if shape is None:
        flag = "--tokens 4x2048" if reads_tokens else "--input 32x3x224x224"
        raise ValueError(f"which inputs does the model take? Give their shape, as {flag}")
    if reads_tokens and len(shape) != 2:
        raise ValueError("--tokens are two numbers, sequences x tokens, as 4x2048")
    if options.tokens and not reads_tokens:
        return named, lambda: torch.zeros(shape, dtype=torch.long), shape
    return named, lambda: named.inputs(shape), shape


def _forward(model, inputs):
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _casts(options):
    import torch

    from halfbits._fake import made_on_meta
    from halfbits.casts import rules_of, trace_casts

    named, make_inputs, _ = _model(options)
    device = options.device
    is_here = device == "cpu" or torch.get_device_module(device).is_available()
    model = named.build() if is_here else made_on_meta(named.build)
    inputs = make_inputs() if is_here else made_on_meta(make_inputs)
    if device in ("mps", "xpu") and not is_here:
        table = rules_of(_forward, model, inputs, device_type=device)
        _show(options, table, [f"There is no {device} device here: these are torch's rules for the ops of the model."])
        return
    dtype = torch.bfloat16 if options.dtype in ("bf16", "bfloat16") else torch.float16
    try:
        traced = trace_casts(_forward, model, inputs, device_type=device, dtype=dtype)
    except ValueError as error:
        if "asks for values" not in str(error):
            raise
        said = str(error).removeprefix("fn ").replace('device_type="cpu"', "--device cpu")
        raise ValueError(f"the model {said}") from None
    if options.ops:
        _show(options, traced)
        return
    traced["casts"] = traced.casts.map(lambda casts: casts.count("->"))
    by_op = traced.groupby(["op", "inputs", "output"], sort=False, as_index=False)
    table = by_op.agg(times=("op", "size"), casts=("casts", "sum"), cast_bytes=("cast_bytes", "sum"))
    megabytes = table.cast_bytes.sum() / 1e6
    words = [f"{len(traced)} ops; {table.casts.sum()} casts, which read and write {megabytes:,.1f} MB."]
    _show(options, table, words)


def _memory(options):
    import pandas as pd

    from halfbits.memory import predict_memory

    named, inputs, shape = _model(options)
    ways = {"FP32": "fp32", "autocast": "bf16", "pure bf16": "pure_bf16"}
    rows = []
    for way, precision in ways.items():
        estimate = predict_memory(named.build, inputs, precision, options.optimizer, loss=named.loss)
        parts = {
            "weights": estimate.parameters + estimate.buffers,
            "gradients": estimate.gradients,
            "optimizer": estimate.optimizer_state,
            "activations": sum(estimate.activations.values()),
            "peak": estimate.peak,
        }
        if not options.json:  # there they stay bytes
            parts = {f"{part} (GiB)": round(size / GIB, 3) for part, size in parts.items()}
        rows.append({"in": way} | parts | {"fits on": _cards(estimate.peak)})
    called = f" of {'x'.join(map(str, shape))}" if shape else ""
    words = [
        f"One training step{called} with {options.optimizer}. autocast is bf16 or fp16, which need the same;",
        "pure bf16 has weights, gradients and states in bf16 too, without master weights.",
        "adam and adamw are fused; CUDA's default, adamw_foreach, needs more in its step.",
        "Not in it: the CUDA context, workspaces of cuDNN and cuBLAS, what the allocator cannot use again.",
        "A card fits if a tenth of it and 1 GiB are left for them.",
    ]
    _show(options, pd.DataFrame(rows), words)


def _cards(peak):
    """The cards that hold so many bytes, in words."""
    from halfbits.speed import GPUS

    large_enough = GPUS.memory[0.9 * GPUS.memory - 1 >= peak / GIB]
    if large_enough.empty:
        return f"none of up to {GPUS.memory.max()} GB"
    smallest = large_enough[large_enough == large_enough.min()]
    return f"{smallest.min()} GB ({', '.join(smallest.index)}) and larger"


# scan


def _scan(options):
    from halfbits.checkpoints import scan, summary, worst

    table = scan(options.path, progress=_progress if sys.stderr.isatty() else None)
    if options.json:
        _show(options, table)
        return
    if table.empty:
        raise ValueError(f"{options.path} has no floating-point tensors. {' '.join(table.attrs['notes'])}")
    whole = summary(table)
    print(f"{table['tensor'].nunique():,} tensors, {whole['numbers'].max():,} numbers\n")
    if whole["nonfinite"].any():
        print(f"{whole['nonfinite'].max():,} numbers are inf or NaN already.\n")
    print(_in_percent(whole).to_string(index=False))
    matrices = table[table["dimensions"] > 1]
    if len(matrices):
        print("\nThe largest losses in matrices:\n")
        print(_in_percent(worst(matrices, options.tensors)).to_string(index=False))
    print()
    for note in table.attrs["notes"]:
        print(note)
    print(
        "error: the norm of the differences, compared with the norm of the numbers. What overflows becomes\n"
        "inf or NaN in fp16, bf16 and fp8_e4m3fn, and is not in the error; in a format with a scale it is\n"
        "cut off to the largest number. Libraries leave norms, biases and often the first and last layer\n"
        "in 16 bits.\n"
        "A scan of weights knows nothing of activations, which often have the wider range."
    )


def _in_percent(table):
    """The shares of what is lost, in percent, behind the names that a table by `scan` or `summary` has."""
    losses = {
        "overflows": table["overflows"] / table["numbers"],
        "become 0": table["zeros"] / table["numbers"],
        "error": table["error"].fillna(0),
    }
    shown = table[[name for name in ("format", "tensor") if name in table]]
    shown = shown.assign(**{name: (100 * share).map("{:.3g}%".format) for name, share in losses.items()})
    without_scale = table["format"].isin(["fp16", "bf16", "fp8_e4m3fn"])
    breaks = without_scale & (table["overflows"] > 0)
    return shown.assign(error=shown["error"].mask(breaks, shown["error"] + " and inf"))


def _progress(done, total):
    end = "\n" if done >= total else ""
    print(f"\rread {done / 1e6:,.0f} of {total / 1e6:,.0f} MB", end=end, file=sys.stderr, flush=True)


# explain


def _explain(options):
    from halfbits.errors import explain

    if options.message:
        text = " ".join(options.message)
    elif sys.stdin.isatty():
        raise ValueError("there is no message: write it behind explain, in quotes, or pipe a log into it")
    else:
        text = sys.stdin.read()
    found = explain(text)
    if options.json:
        _print_json(found)
        return 0 if len(found) else 1
    if found.empty:
        print("No message that is known here was found. Give the line that names the error, or a few words of it.")
        return 1
    for entry in found.head(3).to_dict("records"):
        notebook, _, heading = entry["case"].partition("#")
        title = entry.get("title")
        print(title if isinstance(title, str) else entry["message"])
        print(f"  Why: {entry['cause']}")
        if entry["needs"]:
            print(f"  Fix: {entry['needs']}")
            print(f"       {entry['fix']}")
        else:
            print(f"  Fix: {entry['fix']}")
        print(f"  More: notebook {notebook.partition('_')[0]} of Half the Bits, {heading}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
