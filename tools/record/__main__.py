"""Record what this machine's GPU does, the most valuable numbers first.

uv run python -m tools.record                    # ten minutes; started again, it goes on where it was stopped
uv run python -m tools.record --minutes 30       # as much as fits into half an hour
uv run python -m tools.record --stages b d       # these stages alone, and again what was recorded already
uv run python -m tools.record --report           # what the records say of each card, beside what was predicted
uv run python -m tools.record --estimate         # how long the stages would take, on cards that are not here
uv run python -m tools.record --pretend T4 --to FOLDER      # a dry run on a pretended card; all of it lies in FOLDER

Stages: a, matrix multiplications and overheads; b, the experiment of the blog post; c, memory; d, training a decoder;
e, notebook 08's ladder; f, casts. The records go to data/records, or where HALF_THE_BITS_SAVE_TO says. It needs torch,
timm, pandas, SciPy and pynvml, and neither uv, Jupyter, Git nor a network: `python -m tools.record` does.
"""

import argparse
import gc
import os
import sys
import tempfile
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
STAGES = ("a", "b", "c", "d", "e", "f")


def all_units(session):
    """All units that this device can run, in order of their value."""
    from tools.record import casts, decoder, experiment, ladder, machine, peaks

    stages = [machine, experiment, peaks, decoder, ladder, casts]
    return [unit for stage in stages for unit in stage.units(session)]


def run(session, stages):
    """Run what is not done yet, or the stages that are asked for. Returns the units that were not recorded."""
    import torch

    from helpers import records

    units = [unit for unit in all_units(session) if not stages or unit.stage in stages]
    left = [unit for unit in units if stages or str(unit) not in session.done]
    tqdm.write(f"{len(units) - len(left)} of {len(units)} parts are done already, by {session.done_file}")
    tqdm.write(f"The records go to {records.save_folder()}")
    lost = []
    bar = tqdm(left, unit="part")
    for unit in bar:
        bar.set_description(f"{unit}, {max(0, session.left) / 60:.1f} minutes left")
        if session.left < unit.seconds / 3:
            lost.append(f"{unit}: not reached in time")
            continue
        try:
            unit.run(session)
        except KeyboardInterrupt:
            lost += [f"{each}: not reached, you interrupted" for each in left[left.index(unit) :]]
            break
        except Exception as error:  # one part is lost, the others are not
            why = f"{type(error).__name__}: {error}".partition("\n")[0]
            lost.append(f"{unit}: NOT RECORDED. {why}")
            session.note(unit, why)
            if isinstance(error, getattr(torch, "AcceleratorError", ())):
                lost.append("The GPU's context is broken. Start the program again: it goes on after this part.")
                break
        else:
            session.note(unit)
        gc.collect()
        if session.device.type != "cpu":
            torch.accelerator.empty_cache()
    return lost


def report():
    """Print, for each card that has records, what was measured, and beside it what was predicted."""
    from helpers import records
    from tools.record import decoder, experiment, peaks

    measured = [record for record in records.load_all() if record["kind"] == "measured"]
    of_gpus = [record for record in measured if record["device"]["type"] != "cpu"]
    for card in sorted({record["device"]["name"] for record in of_gpus}):
        mine = [record for record in of_gpus if record["device"]["name"] == card]
        print(f"\n{card}")
        for stage in (experiment, decoder, peaks):
            try:
                for table in stage.report(mine):
                    print(f"\n{table.to_string(float_format='{:,.4g}'.format)}")
            except ImportError as error:
                print(f"No table here: {error}. Run --report where all packages are.")
        for record in mine:
            what, results = record["what"], record["results"]
            if what["experiment"] == "06 matmul rates":
                rates = ", ".join(f"{size}: {rate:,.1f}" for size, rate in results["tflops"].items())
                print(f"matmuls in {what['arm']}, TFLOP/s by size: {rates}")
            if what["experiment"] == "04 casts":
                print(f"casts of {what['arm']}: {results['differ']} of {results['ops']} ops are not as predicted")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10, help="stop after about so many")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=[], help="these alone, done or not")
    parser.add_argument("--report", action="store_true", help="record nothing, print what is recorded")
    parser.add_argument("--estimate", action="store_true", help="record nothing, print how long it would take")
    parser.add_argument("--pretend", metavar="CARD", help="a dry run on a card of tests/weekly/pretend_cuda.py")
    parser.add_argument("--to", type=Path, default=ROOT / "recorded", help="the folder that notes what is done")
    options = parser.parse_args()
    if options.estimate:
        from tools.record import estimate

        print(estimate.table().to_string(float_format="{:,.0f}".format))
        return 0
    lost = []
    with tempfile.TemporaryDirectory() as scratch:
        if options.pretend:
            from tests.weekly import pretend_cuda

            os.environ.update(pretend_cuda.environment(options.pretend, scratch))
            os.environ.update(HALF_THE_BITS_SAVE_TO=str(options.to / "records"), HALF_THE_BITS_ROUNDS="2")
            pretend_cuda.start()
        if not options.report:
            from tools.record.session import Session

            session = Session.begin(options.minutes, options.to)
            lost = run(session, options.stages)
        report()
    print("", *lost, sep="\n")
    return any("NOT RECORDED" in each for each in lost)


if __name__ == "__main__":
    sys.exit(main())
