"""Record what this machine's GPU does: all that the suite wants to know of a card, in stages of at most 8 minutes.

uv run python -m tools.record                    # all stages; started again, it goes on where it was stopped
uv run python -m tools.record "07 step"          # the stages whose names contain these words
uv run python -m tools.record --report           # what the records say of each card, beside what was predicted
uv run python -m tools.record --pretend T4 --to FOLDER      # a dry run on a pretended card; all of it lies in FOLDER

The records go to data/records, or to where HALF_THE_BITS_SAVE_TO says. Neither Git nor a network is needed, nor uv:
`python -m tools.record` does, where nbclient, ipykernel and what the notebooks need are installed.
"""

import argparse
import os
import re
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from tqdm import tqdm

from helpers import records

ROOT = Path(__file__).resolve().parent.parent
MINUTES = 8  # a stage; its cells get 6, and what they have measured is saved in the rest
LADDER = 12  # comparisons, or fewer


@dataclass(frozen=True)
class Stage:
    """A part of a notebook: its cells up to the one that says `until`, less those that say a word of `without`."""

    name: str
    notebook: str
    until: str
    without: tuple = ()
    settings: str = ""

    def cells(self, notebook):
        """The code cells that this stage runs."""
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        (last,) = [number for number, cell in enumerate(code) if self.until in cell.source]
        return [cell for cell in code[: last + 1] if not any(words in cell.source for words in self.without)]


TIMED_07 = "measure.fitting_batch(", "measure.summary(", "measure.energy("
TIMED_08 = "explore.timeline(", "torch.profiler", "stages = {"
TIPS, DATA_PATH = 'keep("tips"', 'keep("data path"'
STAGES = [
    Stage("04 casts", "04", 'records.keep("04 casts"'),
    Stage("06 memory", "06", 'records.keep("06 memory"'),
    Stage("07 step", "07", 'keep("memory"'),
    Stage("07 training", "07", 'keep("training"', TIMED_07),
    Stage("08 tips", "08", TIPS, TIMED_08),
    Stage("08 data path", "08", DATA_PATH, (*TIMED_08, TIPS)),
]
for first in range(0, LADDER, 2):
    without = (*TIMED_08, TIPS, DATA_PATH)
    settings = f"COMPARISONS = slice({first}, {first + 2})"
    STAGES.append(Stage(f"08 ladder, from {first}", "08", 'keep("ladder"', without, settings))
STAGES.append(Stage("11 float8", "11", 'records.keep("11 own float8"'))


def run(stage, folder, bar):
    """Run a stage, and leave its executed copy in `folder`: the sign that it is done. Returns what went wrong."""
    (path,) = ROOT.glob(f"notebooks/{stage.notebook}_*.ipynb")
    notebook = nbformat.read(path, as_version=4)
    notebook.cells = stage.cells(notebook)
    for cell in notebook.cells:
        if "settings" in cell.metadata.get("tags", []):
            cell.source += f"\n{stage.settings}"
    before = {*records.save_folder().glob("*.json")}
    ends = time.monotonic() + 60 * (MINUTES - 2)
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        resources={"metadata": {"path": path.parent}},
        # As the stop button does: a notebook keeps what it has measured, and the next cell saves it.
        interrupt_on_timeout=True,
        timeout_func=lambda cell: max(30, ends - time.monotonic()),
        on_cell_complete=lambda cell, cell_index: bar.update(),
    )
    try:
        client.execute()
    except CellExecutionError as error:
        return f"{error.ename}: {error.evalue}"
    except (CellTimeoutError, DeadKernelError) as error:  # the system kills a kernel that takes all memory
        return f"{type(error).__name__}: {error}"
    said = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    if lost := re.search("(Not saved|Stopped by).*", said):
        return lost[0]
    if {*records.save_folder().glob("*.json")} == before:
        return f"nothing was saved in {MINUTES} minutes"
    unfinished = folder / "unfinished.ipynb"
    nbformat.write(notebook, unfinished)
    unfinished.replace(folder / f"{stage.name}.ipynb")
    return ""


def run_all(words, folder):
    """Run the stages that are not done yet, those whose names contain one of `words`; returns how many failed."""
    wanted = [stage for stage in STAGES if not words or any(word in stage.name for word in words)]
    if not wanted:
        raise SystemExit(f"no stage is called {words}; there are {', '.join(stage.name for stage in STAGES)}")
    folder.mkdir(parents=True, exist_ok=True)
    stages = [stage for stage in wanted if not (folder / f"{stage.name}.ipynb").exists()]
    tqdm.write(f"{len(wanted) - len(stages)} of {len(wanted)} stages are done already; their copies lie in {folder}")
    counts, failed = [], 0
    for stage in stages:
        (path,) = ROOT.glob(f"notebooks/{stage.notebook}_*.ipynb")
        counts.append(len(stage.cells(nbformat.read(path, as_version=4))))
    with tqdm(total=sum(counts), unit="cell") as bar:
        for number, stage in enumerate(stages):
            bar.set_description(f"{stage.name}; {MINUTES * (len(stages) - number)} minutes left at most")
            wrong = run(stage, folder, bar)
            failed += bool(wrong)
            bar.update(sum(counts[: number + 1]) - bar.n)
            tqdm.write(f"{stage.name}: {f'NOT RECORDED. {wrong}' if wrong else 'recorded'}")
    return failed


def report():
    """Print, for each card that has records, what was measured beside what was predicted."""
    import pandas as pd

    from helpers import measure

    precision = {"FP32": "fp32", "FP32 (TF32)": "fp32", "fp16 + GradScaler": "fp16", "fp32": "fp32", "fp16": "fp16"}
    of_gpus = [r for r in records.load_all() if r["kind"] == "measured" and r["device"]["type"] != "cpu"]
    for card in sorted({record["device"]["name"] for record in of_gpus}):
        mine = [record for record in of_gpus if record["device"]["name"] == card]
        print(f"\n{card}")
        steps = [r for r in mine if r["what"]["experiment"] == "07 step"]
        if steps:
            blocks = {r["what"]["arm"]: pd.Series(r["results"]["block_seconds"]) for r in steps}  # the last of each
            times = pd.DataFrame(blocks).dropna().rename_axis("round").reset_index()
            times = times.melt("round", var_name="arm", value_name="seconds")
            print(measure.summary(times, steps[-1]["results"]["images_per_step"], "FP32").round(3).to_string())
        rows = []
        for record in mine:
            arm, config, memory = record["what"]["arm"], record["what"]["config"], record["results"].get("memory", {})
            if isinstance(memory.get("allocated"), int) and "model" in config:
                predicted = _predicted(config["model"], config["batch"], *config["size"], precision.get(arm, "bf16"))
                rows.append((config["model"], config["batch"], arm, memory["allocated"] / 1e9, predicted / 1e9))
        if rows:
            table = pd.DataFrame(rows, columns=["model", "batch", "arm", "allocated (GB)", "predicted (GB)"])
            table["ratio"] = table["allocated (GB)"] / table["predicted (GB)"]
            near = (table.ratio - 1).abs() <= 0.05
            print(table.round(3).to_string(index=False))
            print(f"memory: {near.sum()} of {len(near)} within 5% of the prediction")
        for record in mine:
            if record["what"]["experiment"] == "04 casts":
                found = record["results"]
                print(f"casts of {record['what']['arm']}: {found['differ']} of {found['ops']} ops are not as predicted")


@cache
def _predicted(name, batch, width, height, way):
    """The predicted peak of a training step, in bytes."""
    import timm

    from helpers.footprint import predict_memory

    return predict_memory(lambda: timm.create_model(name, num_classes=1), (batch, 3, height, width), way).peak


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="parts of the names of stages; none: all stages")
    parser.add_argument("--report", action="store_true", help="record nothing, print what is recorded")
    parser.add_argument("--pretend", metavar="CARD", help="a dry run on a card of tests/weekly/pretend_cuda.py")
    parser.add_argument("--to", type=Path, default=ROOT / "recorded", help="the folder for the executed copies")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        if options.pretend:
            from tests.weekly import pretend_cuda

            os.environ.update(pretend_cuda.environment(options.pretend, scratch))
            os.environ.update(HALF_THE_BITS_SAVE_TO=str(options.to / "records"), HALF_THE_BITS_ROUNDS="2")
            pretend_cuda.start()
        failed = 0
        if not options.report:
            from helpers import hardware

            device = hardware.manifest(hardware.pick_device())["device"]
            name = re.sub(r"\W+", "-", f"{device['name']} {device.get('uuid', '')}")
            failed = run_all(options.words, options.to / name)
        report()
    raise SystemExit(f"{failed} stages failed" if failed else 0)


if __name__ == "__main__":
    main()
