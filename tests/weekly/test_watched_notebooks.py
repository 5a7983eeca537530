"""Each network of the notebooks under `watch`: it accuses none but those that are shown as broken, nor fails."""

import contextlib
import io
import json
import os
import subprocess
import sys

import nbformat
import pytest
import torch

from halfbits import watch
from tools.execute import NOTEBOOKS

pytestmark = pytest.mark.weekly

NAMES = [path.stem for path in sorted(NOTEBOOKS.glob("*.ipynb"))]
BROKEN = {  # headings below which a network does what it should not
    "00": ["Four runs, and one learns nothing", "A real model that hardly learns", "Exercise: which learning rate"],
    "03": ["A training that stands still", "Static scaling by hand", "The window", "A scaler in twenty lines"],
    "05": ["A loop that learns nothing", "A few lines that break it"],
    "06": ["Language models: bytes per weight", "To take home"],  # an optimizer with states in bf16
    "10": ["The dtype of the checkpoint", "What you set and the lines it writes", "The loss is 0.0"],
    "11": ["A training step in FP8"],
    "12": ["Three runs of one fine-tuning", "Which parts of the model tolerate 16 bits"],
    "14b": [
        "Loss is NaN only in evaluation",
        "Loss is NaN after hundreds of good steps",
        "Loss is inf but every output is finite",
        "Weights are NaN after one step of Adam",
        "Model trained in bf16 gives NaN in fp16",
    ],
    "14c": [
        "Loss hardly falls with clipping",
        "Clipping fails with a fused optimizer",
        "Loss stays the same in every step",
        "Training diverges without GradScaler",
        "lr_scheduler step before optimizer step",
        "Weights do not change",
    ],
    "14d": ["DDP skips steps", "Loss scale falls in every step", "Loss scale grows without end in bf16"],
    "15": ["model.half with autocast"],
    "16": ["To take home"],  # rounding, whose gradient is 0
    "18": ["Master weights or none"],
}


class Watches:
    """Watches the first 8 networks of a cell, from the first forward on, for 400 passes: close looks take time."""

    def __init__(self):
        self.seen, self.depth, self.active = {}, 0, False  # by a network's id: its watch

    def enter(self, module, inputs):
        if torch.compiler.is_compiling():
            return
        if self.active and not self.depth and any(True for _ in module.parameters()):
            self.active = False  # what watch itself calls is not watched
            if id(module) not in self.seen and len(self.seen) < 8:
                self.seen[id(module)] = watch(module, save=None, warn=True, every=1, patience=10**6).start()
            elif id(module) in self.seen and self.seen[id(module)].passes > 400:
                self.seen[id(module)].stop()
            self.active = True
        self.depth += 1

    def leave(self, *_):
        self.depth -= not torch.compiler.is_compiling()

    def run(self, source, names):
        """What was seen of each network while a cell ran, which may raise."""
        self.seen, self.depth, self.active = {}, 0, True
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(Exception, KeyboardInterrupt):
            exec(source, names)
        self.active = False
        for seen in self.seen.values():
            seen.stop()
        return [*self.seen.values()]


def print_what_is_said(name):
    """A line for each network of a notebook: its heading, whether it is accused, and what watch could not look at."""
    watches, names, heading = Watches(), {"__name__": "__main__"}, ""
    torch.nn.modules.module.register_module_forward_pre_hook(watches.enter)
    torch.nn.modules.module.register_module_forward_hook(watches.leave, always_call=True)
    os.chdir(NOTEBOOKS)
    for cell in nbformat.read(f"{name}.ipynb", as_version=4).cells:
        if cell.cell_type == "markdown":
            headings = [line.strip("# ") for line in cell.source.splitlines() if line.startswith("#")]
            heading = headings[-1] if headings else heading
            continue
        lines = ["" if line.startswith(("%", "!")) else line for line in cell.source.splitlines()]
        for seen in watches.run("\n".join(lines), names):
            is_accused = any(severity != "note" for severity in seen.findings.severity)
            print(json.dumps([heading, is_accused, str(seen), seen.boundary.closed]))


@pytest.mark.parametrize("name", NAMES)
def test_watch_accuses_none_but_what_is_shown_as_broken(name):
    command = [sys.executable, "-m", "tests.weekly.test_watched_notebooks", name]
    environment = os.environ | {"MPLBACKEND": "agg", "OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=NOTEBOOKS.parent, env=environment, timeout=1200)
    assert done.returncode == 0, done.stderr[-2000:]
    said = [json.loads(line) for line in done.stdout.splitlines()]
    accused = {heading: words for heading, is_accused, words, _ in said if is_accused}
    shown = BROKEN.get(name.partition("_")[0], [])
    assert not [words for heading, words in accused.items() if not heading.startswith(tuple(shown))]
    assert all(any(heading.startswith(one) for heading in accused) for one in shown), accused.keys()
    assert not [closed for *_, closed in said if closed]


if __name__ == "__main__":
    print_what_is_said(sys.argv[1])
