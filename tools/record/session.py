"""What all stages share: the device, the time that is left, and what is done already."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from helpers import hardware, records


@dataclass(frozen=True)
class Unit:
    """The smallest part that is recorded as a whole: it saves its record when it ends.

    stage: a letter, in the order of their value. name: what is measured. run: takes the session. seconds: about how
    long it takes on an H200; a unit starts only if at least a third of that is left.
    """

    stage: str
    name: str
    run: Callable
    seconds: float

    def __str__(self):
        return f"{self.stage}: {self.name}"


@dataclass
class Session:
    """One call of the program: where it measures, until when, and what it has done.

    `full` is False on a CPU and in dry runs, where everything is small.
    """

    device: object
    full: bool
    ends: float
    done_file: Path
    done: dict = field(default_factory=dict)

    @classmethod
    def begin(cls, minutes, folder):
        device = hardware.pick_device()
        name = hardware.manifest(device)["device"]["name"].replace("/", "-")
        folder.mkdir(parents=True, exist_ok=True)
        done_file = folder / f"{name}.json"
        done = json.loads(done_file.read_text(encoding="utf-8")) if done_file.exists() else {}
        full = device.type != "cpu" and hardware.full_size()
        return cls(device, full, time.monotonic() + 60 * minutes, done_file, done)

    @property
    def left(self):
        """Seconds until the time is over."""
        return self.ends - time.monotonic()

    def note(self, unit, outcome="recorded"):
        """Note that a unit is done, or why it failed, so that the next call does not repeat it."""
        when = datetime.now(UTC).isoformat(timespec="seconds")
        self.done[str(unit)] = {"outcome": outcome, "when": when}
        unfinished = self.done_file.with_suffix(".tmp")
        unfinished.write_text(json.dumps(self.done, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(self.done_file)

    def save(self, experiment, arm, config, results, float32="ieee"):
        """Save one record. `float32` is what matmuls and convolutions of float32 numbers used: "ieee" or "tf32"."""
        facts = hardware.manifest(self.device)
        facts["precision"] |= {"convolutions": float32, "matmuls": float32}
        return records.save(records.new(experiment, arm, config, results, facts))


def use_float32(way):
    """Let float32 matmuls and convolutions use "ieee" or "tf32"."""
    import torch

    torch.backends.cudnn.allow_tf32 = way == "tf32"
    torch.set_float32_matmul_precision("high" if way == "tf32" else "highest")


def raise_if_stopped(times):
    """Raise what has stopped `measure.compare`, which only tells it. The rounds before are to be saved first."""
    if times.attrs["why"] == "Interrupted":
        raise KeyboardInterrupt
    if times.attrs["why"]:
        raise RuntimeError(times.attrs["why"])
