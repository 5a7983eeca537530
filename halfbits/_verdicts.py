"""What the numbers of a watch mean: each function here yields Findings."""

import math
import re

from halfbits._tensors import BF16, FP16, SIXTEEN, fewer_names, ids_held_by, module_of, readable, sample, short
from halfbits.auditing import spoilt_buffers, states_of, who_keeps_masters
from halfbits.report import certain, likely, note, some

CASES = {  # the clinic's, by what the words of an Origin hold
    "all of it is masked": "Attention is NaN for rows of padding",
    r"in the forward.*convolution made inf \(float16": "Convolution gives inf in fp16",
    r"in the forward.*mm made inf \(float16": "Model trained in bf16 gives NaN in fp16",
    r"in the loss.*: (mul|pow|mse_?loss|sum) made inf .*float16": "Loss is inf but every output is finite",
    "divides by 0.* where float32 may": "Normalized vectors are NaN in fp16",
    "that of sqrt": "Loss scale falls in every step",
}


def case_of(origin):
    return next((case for words, case in CASES.items() if re.search(words, origin.words)), "")


def growth(losses):
    """How the loss grew over the last passes, in words; "" if it did not."""
    losses = list(losses)
    for start in range(max(0, len(losses) - 100), len(losses) - 2):
        first, last = abs(losses[start]), abs(losses[-1])
        if last > 30 * first > 0 and all(each > first for each in map(abs, losses[start + 1 :])):
            return f"The loss had grown from {first:.3g} to {last:.3g} in {len(losses) - start} passes"
    return ""


def _stopped(seen):
    if seen.problem is not None:
        yield certain(str(seen.problem).rstrip("."), "", "", seen.problem.case)


def _skipped(seen):
    """Steps that the scaler left out."""
    if not seen.scaling.skips:
        return
    falls = f"{seen.skipped} of {seen.scaling.tries} steps were skipped; the scale is now {seen.scaling.value:,.10g}"
    apart = [after - before for before, after in zip(seen.scaling.skips, seen.scaling.skips[1:])]
    regular = len(apart) > 2 and len(set(apart[1:])) == 1 and apart[-1] > 2
    every = f", always {apart[-1]} steps apart" if regular else ""
    culprit = seen.scaling.culprit
    once = f"Looked at once: {culprit}." if culprit else ""
    if culprit and culprit.why != "format":
        case = "" if every else "Loss scale falls in every step"
        yield certain(f"{falls}{every}: {culprit}", "", "No scale ends that.", case)
    elif seen.scaling.skips[-1] > seen.scaling.tries - 1 and len(seen.scaling.skips) > 12:
        yield likely(f"the last steps were skipped; {falls}", "", once)
    elif every:
        yield likely(f"{falls}{every}", "", "Something that the run does only then makes inf or NaN: look there.")
    else:
        what = f"gradients overflowed, as they do until the scale fits; {falls}"
        yield note(what, "", once, "Loss scale falls in the first steps")
    if seen.scaling.moved_in_skips:
        what = f"the learning rate went on in {seen.scaling.moved_in_skips} of {seen.skipped} steps that were skipped"
        cost = "Warm-up and decay pass while no step is taken. Call scheduler.step() only if the scale did not fall."
        yield likely(what, "", cost)


def _region(seen):
    """An autocast region that outlives a step, or that the forward is not in."""
    if seen.regions and not seen.region_is_used and not seen.elsewhere and seen.autocast == {None}:
        what = "autocast is entered, and no module runs in it"
        cost = "The region ends before the call, or is another thread's. Nothing is computed in 16 bits by it."
        yield likely(what, "", cost)
    if seen.stale:
        what = "one region of autocast spans steps: the forward uses the weights as they were cast before the step"
        yield certain(what, "", "Enter the region anew for each step.", "Loss stays the same in every step")


def _replaced(seen):
    """Weights that the optimizer held, and that others have replaced since."""
    held = ids_held_by(seen.optimizers)
    now = {name: id(weight) for name, weight in seen.plain.named_parameters() if weight.requires_grad}
    gone = [name for name, each in now.items() if each not in held and seen.first_ids.get(name) in held]
    if gone:
        cost = "A cast, a load or a merge has put new tensors in their place. Make the optimizer after that."
        yield certain("the optimizer holds tensors that are no weights any more", fewer_names(seen.plain, gone), cost)


def _scaling(seen):
    """Autocast and scaler that do not go together, and a scaler that is used wrongly."""
    casts, scaled = seen.autocast - {None}, seen.scaling.tries > 0
    if seen.scaling.steps_not_scaled:
        what = f"in {seen.scaling.steps_not_scaled} steps the loss was not multiplied by the scale"
        cost = "scaler.step divides the gradients by it all the same. Call scaler.scale(loss).backward()."
        yield certain(what, "", cost)
    if seen.scaling.steps_past:
        what = f"{seen.scaling.steps_past} times optimizer.step was called on gradients that are still scaled"
        yield certain(
            what, "", f"They are {seen.scaling.scaler.get_scale():,g} times too large: call scaler.step(optimizer)."
        )
    if (many := len(seen.scaling.scalers)) > 2:
        cost = (
            "Each starts again with its own scale, and skips steps until that fits. Make one, and save its state_dict."
        )
        yield certain(f"{many} GradScalers were used one after the other, in {seen.scaling.tries} steps", "", cost)
    if BF16 in casts and scaled:
        cost = "bf16 has float32's range and needs no scale: it doubles until float32 overflows. Remove the scaler."
        yield likely("bf16 autocast with a GradScaler", "", cost, "Loss scale grows without end in bf16")
    rows = seen.history()
    zero = rows[rows.what == "% 0 in fp16"].value.max() if len(rows) else 0
    if seen.scaling.left_over:
        what = "the gradients of a skipped step are still there at the next backward, which adds to them"
        yield certain(what, "", "They are not finite, and stay so. Call zero_grad after each step, skipped or not.")
    if seen.scaling.by_hand > 1 and FP16 in casts and not scaled:
        cost = "An inf skips no step, and the scale does not adapt: a GradScaler does both."
        yield note(f"the loop multiplies its loss by {seen.scaling.by_hand:,g} itself", "", cost)
    elif FP16 in casts and not scaled and seen.passes and seen.steps and not seen.scaling.is_on():
        cost = "Small gradients become 0 in the backward. Add a GradScaler, or use bf16."
        cost = f"In one layer fp16 makes 0 of {zero:.0f}% of the gradients. {cost}" if zero > 1 else cost
        yield likely("fp16 autocast without a GradScaler", "", cost)
    if seen.elsewhere:
        what = f"autocast is on for {seen.elsewhere}, and the model is on {seen.device.type}: nothing of it is cast"
        yield certain(what, "", "Name the device of the tensors.")
    if seen.kept_float32 and casts & {*SIXTEEN}:
        what = "autocast is on, and these layers give float32"
        cost = "Under vmap the bias is added in float32; elsewhere a hook or a wrapper casts. Nothing is saved there."
        yield likely(what, sorted(seen.kept_float32), cost)


def _gradients(seen):
    """Weights that no gradient reaches or no optimizer moves, and gradients that change on their way to the step."""
    ids = ids_held_by(seen.optimizers)
    lacking = [name for look in seen.looks[-1:] for name in look.gradients if id(seen.trained.get(name)) not in ids]
    if lacking and seen.steps and len(lacking) < len(seen.trained):
        cost = "They have a gradient. Give them to the optimizer, or set requires_grad to False."
        yield likely("weights that no optimizer holds", fewer_names(seen.plain, lacking), cost)
    missing = sorted(seen.missing or ())
    if missing and seen.steps:
        cut = sorted(seen.cut & set(map(module_of, missing)))
        names = fewer_names(seen.plain, missing)
        if len(missing) == len(seen.trained):
            moved = any(look.now.get(("", "moved"), 0) for look in seen.looks)
            if not moved:
                cost = "zero_grad stands between backward and step, or the loss does not depend on them."
                yield certain("at the step no weight has a gradient, and none moves", "", cost)
        elif cut:
            cost = "Their forward ran under no_grad, or in a reentrant checkpoint whose inputs require no gradient."
            yield certain("weights that no gradient reaches", cut, f"{cost} Use use_reentrant=False.")
        elif [name for name in missing if module_of(name) in seen.dtypes]:
            cost = "They run, and nothing leads from the loss to them: a detach, or an output that is not used."
            yield likely("weights that no gradient reaches", names, cost)
        else:
            yield note("weights that are not used", names)
    if seen.all_zero:
        what = f"all gradients are exactly 0, in {seen.all_zero} of {len(seen.looks)} close looks"
        yield likely(
            what, "", seen.zero_made or "The loss does not depend on the weights there, or rounding made it so."
        )
    if seen.zero_weights and seen.zero_made:
        yield likely(
            "gradients that are 0 everywhere", fewer_names(seen.plain, sorted(seen.zero_weights)), seen.zero_made
        )
    looks = [look for look in seen.looks if look.made is not None and look.at_step is not None]
    for look in looks[-1:]:
        yield from _on_the_way(look)


def _on_the_way(look):
    made, at_step = float(look.made), float(look.at_step)
    scale, after = look.scale, float(look.after) if look.after is not None else 0.0
    if not 0 < made < math.inf:
        return
    if not math.isfinite(at_step):
        cost = "Clipping, a hook or the loop made them so."
        yield certain("gradients are finite after the backward, and not at the step", "", cost)
        return
    if at_step == 0:
        cost = "By zero_grad, by a hook, or by clipping with a norm that is infinite, as one of float16 may be."
        yield certain("gradients are 0 at the step, and were not after the backward", "", cost)
        return
    ratio = made / at_step
    if scale > 1 and math.isclose(ratio, scale * scale, rel_tol=1e-3):
        yield certain(
            f"gradients are divided by the scale, {scale:,g}, twice", "", "Once by hand, and once by unscale_."
        )
    elif (
        scale > 1
        and ratio > 2 * scale
        and abs(at_step * scale - float(f"{at_step * scale:.2g}")) < 1e-3 * at_step * scale
    ):
        what = f"gradients are clipped to {at_step * scale:.2g} while they are still scaled, and then divided by "
        what += f"{scale:,g}"
        cost = "Steps become far too small. Call `scaler.unscale_(optimizer)` before clipping."
        yield certain(what, "", cost, "Loss hardly falls with clipping")
    if look.turned is not None and float(look.turned) < -0.9:
        yield certain("gradients change their sign between backward and step", "", "The step goes uphill.")
    if after > 0 and at_step / after > 16:
        what = f"the optimizer's own step divides the gradients by {at_step / after:,.6g}"
        cost = "The loss was not multiplied by that: updates are as much too small." if scale == 1 else ""
        yield certain(what, "", cost)


def _updates(seen):
    """What rounding takes from updates, and steps that move nothing."""
    rows = seen.history()
    moved = rows[rows.what == "moved"].value
    if len(moved) and moved.max() == 0 and seen.steps > 1 and not seen.all_zero:
        what = f"steps that move none of the weights, at a learning rate of {seen.rate or 0:.3g}"
        yield likely(what, "", "Rounding takes the updates, or the optimizer holds other weights.")
    low = [weight for weight in seen.trained.values() if weight.dtype in SIXTEEN]
    modules = {module_of(name) for name, weight in seen.trained.items() if weight.dtype in SIXTEEN}
    lost = rows[(rows.what == "% updates lost") & rows.module.isin(modules)].groupby("module").value.max()
    lost = lost[lost > 10]
    own = any(not type(one).__module__.startswith("torch.") and one.state for one in seen.optimizers)
    if len(lost) and not who_keeps_masters(low, seen.optimizers):
        what = f"updates that rounding takes away: up to {lost.max():.0f}%"
        cost = "The weights are in 16 bits, and have no FP32 masters. Load or cast what trains as FP32."
        stands = _stand_still(seen, low)
        if own and stands < 30:  # it makes up for what is lost in one step, as by a compensated sum
            yield note(what, [*lost.index], "Over many steps they move: this optimizer makes up for it.")
        else:
            cost = f"{stands:.0f}% of them are as at the first look. {cost}" if stands > 30 else cost
            yield certain(what, [*lost.index], cost, "Weights do not change in 16 bits")


def _stand_still(seen, low):
    """The percentage of the numbers of weights in 16 bits that are what they were at the first look."""
    first = {name: old for name, old in seen.first_numbers.items() if id(seen.trained.get(name)) in set(map(id, low))}
    pairs = [(old, sample(each)) for name, old in first.items() for each in readable([seen.trained[name]])]
    same = [(old == now).float().mean().item() for old, now in pairs if old.shape == now.shape]
    return 100 * sum(same) / max(1, len(same))


def _operations(seen):
    """What the looks at operations found."""
    yield from seen.found.values()
    for origin in seen.hidden.values():
        hides = "What follows hides it from the loss. " if origin.phase == "forward" else ""
        yield likely(str(origin), "", f"{hides}Compute it in float32.")
    if seen.coarse:
        what, apart = seen.coarse
        cost = (
            f"Neighbours are {apart:g} apart there, and the samples differ by less: rounding takes what the model says "
        )
        cost += "about a sample. Compute the last layer, and what is subtracted from it, in float32."
        yield likely(f"the model's output is {what}", "", cost)
    eights = [pair for look in seen.looks for pair in look.operations.eights.items()]
    module, worst = max(eights, key=lambda pair: pair[1]["fp8 error"], default=("", {"fp8 error": 0}))
    if worst["fp8 error"] > 0.1:  # rounding alone makes 3% of E4M3, and 5% of E5M2
        what = f"a cast to FP8 is off by {worst['fp8 error']:.0%}: {worst['% 0 in fp8']:.0f}% of the numbers become 0, "
        what += f"{worst['% cut in fp8']:.0f}% are cut off"
        yield likely(what, module, "Scale by block or row.")


def _left_behind(seen):
    """What is in buffers and optimizers in the end."""
    if seen.problem is None:
        yield from spoilt_buffers(seen.plain)
        yield from states_of(seen.plain, seen.optimizers, seen.scaling.scaler)


JUDGES = _stopped, _region, _replaced, _skipped, _scaling, _operations, _gradients, _updates, _left_behind


def verdicts(seen):
    return [finding for judge in JUDGES for finding in judge(seen)]


def certain_so_far(seen):
    """What is certain already, in words; "" if nothing is."""
    return "; ".join(finding.what for finding in verdicts(seen) if finding.severity == "certain")


def what_was_seen(seen, is_bad):
    """In what nothing was found, and what was looked at and what not, in words."""
    dtypes = " and ".join(sorted({short(dtype) for dtype in seen.dtypes.values()}))
    casts = sorted(f"under autocast to {short(dtype)}" if dtype else "without autocast" for dtype in seen.autocast)
    computed = f", computed in {dtypes} {' and '.join(casts)}" if dtypes and casts else ""
    passes = f"{seen.passes:,} pass{'' if seen.passes == 1 else 'es'}"
    looked_at = f" in {passes}{computed}" if seen.passes else computed
    passes += f", {seen.steps:,} optimizer step{'' if seen.steps == 1 else 's'}"
    passes += f", {seen.skipped:,} skipped" if seen.scaling.tries else ""
    forwards = "forward" if seen.evaluations == 1 else "forwards"
    passes += f", {seen.evaluations:,} {forwards} without gradients" if seen.evaluations else ""
    words = [f"Seen: {passes}{computed if is_bad else ''}."]
    numbers = [look.number for look in seen.looks if look.norm is not None]
    if numbers:
        ops = "operation by operation" if seen.sees_operations else "without operations"
        words.append(f"Looked at closely, {ops}: pass {some(map(str, numbers), 6)}.")
    missing = list(seen.unseen)
    if not (seen.passes or seen.evaluations or seen.dtypes or seen.sees_forward):
        missing.append("anything, as neither forward nor backward reached this model")
    elif not seen.passes and not seen.evaluations:
        missing.append("a backward, as none reached the weights of this model")
    elif seen.passes and not seen.steps and seen.problem is None:
        missing.append("updates, as the optimizer took no step")
    if missing:
        words.append(f"Not seen: {', '.join(missing)}.")
    return looked_at, " ".join(words)
