"""The exercises. `check.NAME(answer)` prints at once what is wrong with an answer, or "Right."; it never raises.

`check.progress()` is a table of the exercises passed. A module bears the name of its notebook, without the number.
"""

from helpers.check import passed as _passed
from helpers.check.amp_training_loop import accumulated_step, clipped_step
from helpers.check.autocast_op_tables import paste, rms_norm
from helpers.check.beyond_fp16 import tile_amax
from helpers.check.distributed_amp import mean_over_processes, shard
from helpers.check.faster_training import mean_loss, to_float01
from helpers.check.four_bits import block_exponent, to_e5m2
from helpers.check.fp16_bit_layout import decode_fp16, limits
from helpers.check.fp32_vs_amp_experiment import bf16_step, verdict
from helpers.check.inference import in_four_bits
from helpers.check.language_models import moves
from helpers.check.learns_worse import mended_step
from helpers.check.library_integrations import optimizer_steps, trained
from helpers.check.loss_scaling import largest_scale, next_state
from helpers.check.memory import batch_that_fits, kept_bytes
from helpers.check.old_code_translated import in_torch
from helpers.check.rounding_and_range import rms, smallest_step
from helpers.check.same_weights_other_numbers import importance_ratio
from helpers.check.sharded_weights import bytes_sent
from helpers.check.speed import best_time
from helpers.check.troubleshooting_clinic import case_of, first_bad

EXERCISES = {  # in the order of the notebooks
    "fp16 bit layout": (decode_fp16, limits),
    "rounding and range": (smallest_step, rms),
    "loss scaling": (next_state, largest_scale),
    "autocast op tables": (paste, rms_norm),
    "amp training loop": (accumulated_step, clipped_step),
    "memory": (kept_bytes, batch_that_fits),
    "fp32 vs amp experiment": (verdict, bf16_step),
    "faster training": (to_float01, mean_loss),
    "distributed amp": (shard, mean_over_processes),
    "library integrations": (optimizer_steps, trained),
    "beyond fp16": (tile_amax,),
    "language models": (moves,),
    "inference": (in_four_bits,),
    "troubleshooting clinic": (first_bad, case_of),
    "learns worse": (mended_step,),
    "old code translated": (in_torch,),
    "four bits": (block_exponent, to_e5m2),
    "same weights other numbers": (importance_ratio,),
    "sharded weights": (bytes_sent,),
    "speed": (best_time,),
}


def progress():
    """A table of this reader's progress, one row a notebook: exercises passed, and which are still to do."""
    return _passed.table({topic: [each.__name__ for each in some] for topic, some in EXERCISES.items()})
