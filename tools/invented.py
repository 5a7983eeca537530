"""Invented records of machines that nobody measured: 16 bits 1.7 times as fast as FP32, in 0.55 of its memory.

uv run python -m tools.invented FOLDER

Contributed records will lie beside the suite's own. Whether notebooks and tests hold then is tried with these,
in a folder that HALF_THE_BITS_SAVE_TO names. Each bears INVENTED in its device's name; none belongs into data/records.
"""

import argparse
import copy
import itertools
import json
import re
from pathlib import Path

from helpers import records

FASTER, SMALLER = 1.7, 0.55
CUDA, MPS, CPU = "cuda", "mps", "cpu"
MACHINES = [  # type, name, compute capability, images/s in FP32
    (CUDA, "INVENTED T4", "7.5", 120),
    (CUDA, "INVENTED RTX 3090", "8.6", 400),
    (CUDA, "INVENTED H200", "9.0", 1600),
    (CUDA, "INVENTED B200", "10.0", 2900),
    (MPS, "INVENTED Apple M9", None, 90),
    (CPU, "INVENTED Arm CPU", None, 3000),
]
CONFIG = {"model": "tf_efficientnet_b0", "size": [384, 512], "batch": 32, "epochs": 6, "lr": 0.02, "momentum": 0.9}
CONFIG |= {"images": 360, "held_out": 1437, "data": "digits"}


def write(folder):
    """Write the invented records into `folder`, and return the number of files."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    count = 0
    for record in everything():
        records.validate(record)
        words = [record["what"]["experiment"], record["what"]["arm"], record["device"]["name"]]
        name = re.sub(r"[^A-Za-z0-9.]+", "-", " ".join(words))
        (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        count += 1
    return count


def everything():
    suite = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(records.RECORDS.glob("*.json"))]
    for number, machine in enumerate(MACHINES):
        when = f"{2020 if number == 0 else 2100}-01-01T00:00:0{number}+00:00"  # before the suite's own, and after
        results_of = itertools.chain(of_notebook_07(machine), as_in_the_suite(suite, machine))
        for experiment, arm, config, results in results_of:
            what = {"experiment": experiment, "arm": arm, "config": config}
            yield invented(suite, machine) | {"when": when, "what": what, "results": results}
    yield from published(suite)


def invented(suite, machine):
    """A record of `machine` without its results, with the software of one of the suite's records."""
    kind, name, capability, _ = machine
    device = {"type": kind, "name": name, "driver": "999.9" if kind == CUDA else None}
    if kind == CUDA:
        device |= {"uuid": "invented", "compute_capability": capability, "memory_total": 24 * 2**30}
    measured = next(record for record in suite if record["kind"] == "measured")
    return copy.deepcopy(measured) | {"device": device, "commit": "0" * 40}


def of_notebook_07(machine):
    """Experiment, arm, config and results of what notebook 07 saves, and of notebook 06's memory."""
    kind, name, capability, rate = machine
    arms = {"FP32": 1, "fp16 + GradScaler": FASTER}
    if name != "INVENTED T4":
        arms["bf16"] = FASTER
    if capability and float(capability) >= 8:
        arms["FP32 (TF32)"] = 1.2
    for arm, faster in arms.items():
        speed, size = rate * faster, SMALLER if "16" in arm else 1
        memory = {"allocated": 11.3e9, "reserved": 12.5e9, "process": 13.1e9, "device": 13.4e9} if kind == CUDA else {}
        memory = {part: round(size * number) for part, number in memory.items()}
        kept = {"float16" if "16" in arm else "float32": round(size * 11.1e9)}
        used = {"memory": memory, "joules_per_image": 0.2 * size if kind == CUDA else None, "kept_for_backward": kept}
        runs = [a_run(arm, seed, speed) for seed in range(3)]
        yield "07 step", arm, CONFIG, {"block_seconds": blocks(32 / speed), "images_per_step": 32}
        yield "07 memory", arm, CONFIG, used
        yield "07 training", arm, CONFIG, {"runs": runs}
        yield "07 parity training", arm, CONFIG, {"runs": [a_run(arm, seed, speed) for seed in range(30)]}
    if kind == CUDA:
        for arm, size in {"fp32": 1, "fp16": SMALLER}.items():
            config = {"model": "resnet50", "batch": 32, "size": [224, 224]}
            memory = {"allocated": round(2.9e9 * size), "reserved": round(3.1e9 * size)}
            yield "06 memory", arm, config, {"memory": memory | {"process": "unknown: invented", "device": 4 * 10**9}}


def a_run(arm, seed, rate):
    losses = [0.6 / 2**epoch + 0.001 * seed for epoch in range(6)]
    wrong = [(29 * number + seed) % 1437 for number in range(45 + (7 * seed + len(arm)) % 12)]
    run = {"arm": arm, "seed": seed, "images/s": rate, "losses": losses, "diverged": False}
    return run | {"wrong": wrong, "accuracy": 1 - len(wrong) / 1437}


def as_in_the_suite(suite, machine):
    """Notebook 08's experiments, with the arms of the suite's records; on every second machine as a reader's own."""
    rate = machine[-1]
    for record in suite:
        experiment = record["what"]["experiment"]
        if not experiment.startswith("08 ") or "blocks" not in record["results"]:
            continue
        if MACHINES.index(machine) % 2:
            experiment = experiment.replace("08 ", "08 own ")
        times = {}
        for arm, seconds in record["results"]["blocks"].items():
            workers = re.search(r"workers: (\d+)", arm)  # on these machines every worker helps
            faster = (FASTER if "16" in arm else 1) * (1 + int(workers[1]) if workers else 1) * rate / 3000
            times[arm] = [second / faster for second in seconds]
        yield experiment, record["what"]["arm"], record["what"]["config"], record["results"] | {"blocks": times}


def published(suite):
    """Two figures as the blog posts have them, of a card on which AMP is faster."""
    for record in suite:
        if record["what"]["experiment"] == "07 published" and record["device"]["name"] == "RTX 3090":
            memory, seconds = {"device": 14_000_000_000}, 100
            if record["what"]["arm"] != "FP32":
                memory, seconds = {"device": round(14_000_000_000 * SMALLER)}, 100 / FASTER
            device = {"type": CUDA, "name": "INVENTED A100", "driver": None}
            results = {"seconds": seconds, "memory": memory}
            yield copy.deepcopy(record) | {"device": device, "results": results, "source": "Invented."}


def blocks(seconds):
    return [seconds * (1 + 0.01 * (number % 5)) for number in range(20)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    print(f"{write(options.folder)} invented records in {options.folder}")
