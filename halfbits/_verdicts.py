"""The verdicts: each function yields what it finds in what was seen; the first of the worst is the verdict."""

import functools
import math

import pandas as pd

from halfbits._hooks import _parts
from halfbits._search import _case_of
from halfbits._tensors import (
    BF16,
    FP16,
    LARGEST,
    SIXTEEN,
    _groups,
    _held,
    _is_compiled,
    _is_on,
    _module_of,
    _norms,
    _sample,
    _together,
    _whole,
)
from halfbits.auditing import SETTINGS, _lost_decay, _masters, _merged, _spoilt, _who_keeps_masters, _wrappers
from halfbits.report import _some, certain, likely, note

CALM = "A smaller rate, warm-up, or clipping. Whether precision has a part in it: train in float32."


def _settings(seen, severity):
    """Settings that are wrong by themselves, or that may be."""
    measured = "% updates lost" in seen.table()  # then `_rounded` tells of missing masters
    settings = [part for part in SETTINGS if seen.passes and not (measured and part is _masters)]
    parts = [part(*seen.run) for part in settings]
    yield from (each for part in [*parts, _wrappers(seen.model)] for each in part if each.severity == severity)


def _stopped(seen):
    """The first number that is not finite."""
    if seen.problem:
        words, phase = str(seen.problem).partition(" See the clinic")[0].rstrip("."), seen.problem.origin.phase
        guess = seen.problem.origin.why == "guess" or (phase == "backward" and not seen.problem.origin.op)
        say = likely if phase == "divergence" or guess else certain
        yield say(words, "", CALM if phase == "divergence" else "", seen.problem.case)


def _hidden(seen):
    """What single ops show, while the loss is finite."""
    if hidden := [*seen.hidden.values()]:
        others = [f"{each.op} of {each.module}" for each in hidden[1:]]
        where = f"also {_some(others)}" if others else ""
        cost = "Later ops hide it, and the loss is finite all the same. Compute it in float32, or in bf16."
        yield likely(hidden[0].words, where, cost)
    yield from seen.coarse.values()


def _skipped(seen):
    """Steps that a scaler skips: its routine, or not."""
    falls = f"the scale fell {seen.skipped} times" + ("" if math.isnan(seen.scale) else f", to {seen.scale:,.10g}")
    many, tries, went_on = 3 * seen.skipped > seen.calls.tries, seen.calls.tries, seen.calls.went_on
    if went_on > 9 and 5 * went_on > tries:
        cost = (
            "A warm-up is over before the first step: schedule only where the optimizer stepped, and lower init_scale."
        )
        yield likely(f"the learning rate went on in {went_on} steps that were skipped, of {tries}", "", cost)
    if seen.problem or (seen.last_bad < 0 and not seen.skipped):
        return
    if seen.why and seen.last_bad >= 0:
        cost = f"A lower scale does not help; {falls}."
        yield certain(f"steps are skipped: {seen.why}", "", cost, _case_of(seen.why))
    elif seen.skips() > 4 and (not many or seen.skips() == tries > 12):
        yield likely(f"the last {seen.skips()} steps were skipped: their gradients are not finite; {falls}")
    elif many and seen.skipped > 5 and seen.grown > 5:
        factor, interval = seen.scaler.get_growth_factor(), seen.scaler.get_growth_interval()
        cost = f"growth_factor={factor:g}, growth_interval={interval}; the defaults, 2 and 2000, skip one step in 2000."
        what = f"{seen.skipped} of {tries} steps are skipped: the scale grows back as fast as it falls"
        yield certain(what, "", cost)
    else:
        cost = f"A scaler's routine{', if too high a start: lower init_scale' if many and tries > 30 else ''}."
        yield note(f"gradients overflowed; {falls}", "", cost, "Loss scale falls in the first steps")


def _cast(seen):
    """Autocast and scaler that do not go together."""
    scaled = _is_on(seen.scaler)
    seen_all = seen.looks.dtypes and not any(map(_is_compiled, seen.model.modules()))
    fp32 = seen_all and seen.cast is None and set(seen.looks.dtypes.values()) == {"float32"}
    if seen.saved and seen.saved.get("backward in autocast"):
        cost = "Its products are cast too, also of parts that were taken out. Leave the region before it."
        say = likely if seen.cast_twice else note
        yield say("backward was called under autocast", "", cost, "Gradients are inf in a float32 layer")
    if seen.cast == BF16 and scaled:
        cost = "bf16 has float32's range and needs no scale: it doubles until float32 overflows. Remove the scaler."
        yield likely("bf16 autocast with a GradScaler", "", cost, "Loss scale grows without end in bf16")
    if seen.cast == FP16 and seen.own_scale and not scaled:
        cost = "An inf in the gradients skips no step, and the scale does not adapt: a GradScaler does both."
        yield note(f"the loop multiplies its loss by {seen.own_scale:,g} itself", "", cost)
    elif seen.cast == FP16 and not scaled:
        cost = "Small gradients become 0 in the backward. Add a GradScaler, or use bf16."
        yield likely(f"fp16 autocast without a GradScaler{': it is disabled' if seen.scaler else ''}", "", cost)
    if scaled and fp32 and not seen.problem:
        yield likely("a GradScaler, and no module's output is in 16 bits: autocast is not on")


def _no_gradient(seen):
    """Weights that no gradient reaches: None, or 0."""
    missing, held = sorted(seen.looks.missing or ()), set(map(id, _held(seen.optimizers)))
    cut = sorted(seen.looks.cut & set(map(_module_of, missing)))
    what, cost = "weights that no gradient reaches (None)", "They train (requires_grad), but"
    if seen.looks.moves_without:
        yield note("steps by gradients that the weights do not hold, as masters have")
    elif missing and len(missing) == len(seen.trained):
        cost += " at the step they have none: zero_grad stands between backward and step."
        yield certain(what, _whole(seen.plain, missing), cost)
    elif cut:
        cost += " their forward ran under no_grad, or in a reentrant checkpoint whose inputs require no gradient"
        stepped = [name for name in missing if _module_of(name) in cut and id(seen.trained[name]) in held]
        yield (certain if stepped else note)(what, cut, f"{cost}: use_reentrant=False.")
    elif ran := [name for name in missing if _module_of(name) in seen.looks.dtypes]:
        cost += " nothing leads from the loss to them: a detach, or a forward whose output is not used"
        cost += "; or a forward under no_grad, in the same autocast region, left its cast copies to this one"
        yield likely(what, _whole(seen.plain, ran), f"{cost}.")
    elif missing:
        yield note("weights that are not used", _whole(seen.plain, missing))
    if seen.zero:  # which may be by an inf, by numbers that are off, or the end of a run that grew
        coarse = [each for each in seen.coarse.values() if "made inf" in each.what or "No underflow" in seen.zero.cost]
        yield from coarse
        wild = coarse or any(CALM in each.cost for each in _too_large(seen))
        yield seen.zero._replace(severity="note") if wild else seen.zero


def _norms_seen(seen):
    """What happens to gradients between backward and step, and to weights at the step."""
    rows = seen.looks.rows()
    numbers = {what: group.set_index("pass").value for what, group in rows.groupby("what")}
    get = lambda what: numbers.get(what, pd.Series(dtype=float))
    made, before, step = get("norm after backward"), get("norm before unscale_"), get("norm at the step")
    ratio = (made / before).dropna()
    divided = (ratio < 65) & ((ratio - ratio.round()).abs() < 1e-3)  # by a number of passes or processes
    clipped = ratio[(ratio > 2) & (ratio < math.inf) & ~divided]
    if len(clipped):
        first, last = made[clipped.index[0]], before[clipped.index[0]]
        what = f"the norm of the gradients falls from {first:,.4g} to {last:,.4g} between backward and unscale_"
        cost = "Clipping acts on scaled gradients; unscaling then makes them too small. Call `unscale_` before it."
        to_a_limit = abs(last - float(f"{last:.2g}")) < 1e-3 * last
        if math.isclose(first, last * seen.scale, rel_tol=1e-3):
            yield certain(what, "", "By the scale: the loop divides by it, and unscale_ does it again. Do it once.")
        else:
            yield (certain if to_a_limit else likely)(what, "", cost, "Loss hardly falls with clipping")
    at_step = (step / made).dropna()
    if len(at_step) and (at_step == 0).all():
        cost = "zero_grad stands between backward and step, or a hook clears them."
        yield certain("gradients are 0 at the step, and were not after the backward", "", cost)
    if seen.looks.stale:
        cost = "Gradients that a step has used are still there at the next backward, which adds to them."
        yield likely("gradients are not set to zero", "", cost, "Training diverges without GradScaler")
    moved = get("moved")
    if len(moved) > 1 and moved.max() == 0:
        rates = [float(group.get("lr", 1)) for group in _groups(seen.optimizers)]
        cost = "Rounding takes the updates, or the optimizer holds others." if any(rates) else "The learning rate is 0."
        yield certain("steps that move none of the weights", "", cost)
    for what in [what for what in numbers if "% weights of" in what]:  # bfloat16's may be float16's too
        late = get(what)[(moved.cummax() > 0).shift(fill_value=False).reindex(get(what).index, fill_value=False)]
        if (late > 99).any():
            words = f"float32 weights whose numbers are all {what.split()[-1]}'s, in pass {(late > 99).idxmax():,}"
            cost = "They went there and back since the last step, as for a checkpoint: updates are lost. Cast a copy."
            yield certain(words, "", cost)
            break
    stands = max([each.iloc[-1] for what, each in numbers.items() if what.endswith("stands")], default=0)
    if stands > 30:
        what = f"a copy of the weights in 16 bits, as an average: {stands:.0f}% of it stand still between looks"
        cost = "Of its numbers more than 6% from the weight. Its small steps are rounded away: keep it in FP32."
        yield certain(what, "", cost)


def _long_steps(seen):
    """Steps that Adam cannot take."""
    rows = seen.looks.rows()
    rows = rows[(rows.what == "step/longest") & (rows.value > 3)]
    if len(rows):
        worst = rows.loc[rows.value.idxmax()]
        what = f"a step moves a number {worst.value:,.0f} times as far as Adam can with right moments"
        cost = "Its second moment is 0, or far too small, where the first is not, as in 8 or 16 bits: keep it in FP32."
        yield (certain if worst.value > 10 else likely)(what, worst.module, cost)


def _rounded(seen):
    """What rounding takes away from updates and sums, and steps that are too large for it, by module."""
    table, none = seen.table(), pd.Series(dtype=float)
    low = [weight for weight in seen.trained.values() if weight.dtype in SIXTEEN]
    lost, sums = (shares[shares > 10] for shares in (table.get(f"% {what} lost", none) for what in ("updates", "sums")))
    if low and len(lost) and not _who_keeps_masters(low, seen.optimizers):
        half_a_step, decay = _lost_decay(low, seen.optimizers)
        cost = f"The weights have no FP32 masters: what is below {half_a_step:.2g} of a weight is lost"
        cost += f", lr * weight_decay = {decay:.2g} with it." if decay else "."
        what = f"updates that rounding takes away: up to {lost.max():.0f}%"
        yield likely(what, [*lost.index], cost, "Weights do not change in 16 bits")
    if len(sums):
        what = f"gradients in 16 bits, summed over passes: what a pass adds is rounded away, up to {sums.max():.0f}%"
        yield likely(what, [*sums.index], "Add them up in FP32.")
    headroom = table.get("output headroom", none)
    if (headroom == math.inf).any() and len(seen.looks.records) > 1:
        zero = [*table.index[headroom == math.inf]]
        yield likely("outputs that are 0 everywhere, in all looks", zero, "What follows learns nothing.")


def _too_large(seen):
    """Outputs of which fp16 cannot hold the squares, steps as large as the weights, a loss that grows."""
    if (size := seen.hooks.evaluated.item()) > math.sqrt(LARGEST) / 2:
        cost = f"Squares are up to {size**2:,.0f}, and a sum of a few is past 65504: compute metrics of `.float()`."
        yield likely(f"outputs without gradients, as in evaluation, are float16 up to {size:,.0f}", "", cost)
    sizes = seen.table().get("update/weight", pd.Series(dtype=float))
    what = "a step changes weights by {:.2g} of their size (the median of modules)"
    if (size := sizes[sizes < math.inf].median()) > 0.5:
        yield likely(what.format(size), "", f"The learning rate is too large, in any precision. {CALM}")
    elif 0 < size < 2e-6:
        rate = max([rate for *_, rate in seen.trend], default=0)
        cost = f"Ten thousand such steps move them by {1e4 * size:.2g}. The learning rate is at most {rate:g}."
        yield likely(what.format(size), "", cost)
    rows = seen.looks.rows()
    rows = rows[(rows.what == "update/weight") & (rows.value < math.inf)]
    by_pass = rows.groupby("pass").value.median()
    if len(by_pass) > 2 and by_pass.max() > max(0.7, 20 * by_pass.median()):
        what = f"a single step, in pass {by_pass.idxmax():,}, changed weights by {by_pass.max():.2g} of their size"
        cost = "The optimizer had other numbers than the model: masters or states from before a checkpoint was loaded, "
        yield likely(f"{what}, others by {by_pass.median():.2g}", "", f"{cost}or second moments that fp16 made 0.")
    if not seen.problem and len(seen.trend) > 9 and (growth := _growth(seen)):
        yield likely(f"training diverges: {growth}", "", CALM)


def _growth(seen):
    """How loss, gradients and weights grew over the last passes, in words; "" if they did not."""
    passes, found = pd.DataFrame([*seen.trend], columns=["loss", "norm", "largest", "rate"]), []
    for what, key, far in (("the loss", "loss", 30), ("the norm of the gradients", "norm", 1000)):
        finite = passes[passes[key].abs() < math.inf]
        series, wide = finite[key].abs(), 3 if len(finite) > 7 else 1
        if len(series) < 3:
            continue
        smooth = [*series.rolling(wide).median().dropna()]
        start = smooth.index(min(smooth))
        near = series.iloc[max(0, start - 8) : start + 8] if wide > 1 else series.iloc[[start]]
        before, after = near.median(), smooth[-1]
        if after > far * before > 0 and after > 5 * smooth[0]:
            words = f"{what} grew from {before:.3g} to {series.iloc[-1]:.3g} in {len(series) - start} passes"
            first = next(place for place, each in enumerate(smooth) if place > start and each > far / 3 * before)
            found.append(words + (f", first of all that of {finite.largest.iloc[first]}" if key == "norm" else ""))
    total = lambda norms: math.hypot(*_together(norms, seen.device).tolist())
    now, start = total(_norms(seen.trained.values())), total(seen.first_norms)
    if 0 < 10 * start < now < math.inf:
        found.append(f"the norm of all weights is {now / start:,.0f} times that at the start")
    rates = [rate for rate in passes.rate if rate > 0]
    if found and rates:
        rose = f"rose from {rates[0]:.2g} to {rates[-1]:.2g}" if rates[-1] > 2 * rates[0] else f"is {rates[-1]:.2g}"
        found.append(f"the learning rate {rose}")
    return ", and ".join(found)


def _merges(seen):
    """Adapters that were, or would be, merged into weights of 16 bits."""
    shares = [100 * float((_sample(base) != old).float().mean()) for base, old in seen.looks.bases]
    if 0 < (share := min(filter(None, shares), default=0)) < 75:
        what = f"adapters were merged into weights of 16 bits, and {share:.0f}% of their numbers changed"
        yield likely(what, "", "The rest of the update is below half a step of the base: merge into a float32 copy.")
    elif not any(shares):
        yield from _merged(*seen.run)


def _unseen(seen):
    """What it could not see, in words."""
    forward = seen.hooks.forward_seen or seen.between.evaluations or seen.problem or seen.error
    unseen = {
        "saw nothing: neither the model's forward nor a backward was called": not (seen.passes or forward),
        "saw nothing of backward: torch.autograd.backward was not called": not (
            seen.passes or seen.problem or seen.error
        ),
        "saw nothing of forward: another module was called, or the compiled one": not forward,
        "saw nothing of updates: the optimizer took no step": not (seen.steps or seen.problem),
    }
    yield from [note(words) for words, is_so in unseen.items() if is_so][:1]
    if compiled := [name for name, module in _parts(seen.model) if _is_compiled(module)]:
        yield note(f"saw nothing inside of what is compiled ({_some(compiled)}), only its outputs")


def _nothing(seen):
    """What to say of a loss that does not fall where nothing is found."""
    losses = [loss for loss, *_ in seen.trend]
    first, last = (sorted(part)[len(part) // 2] for part in (losses[:10], losses[-10:])) if losses else (0, 0)
    if len(losses) < 30 or not 0 < first < 1.002 * last < math.inf:
        return []
    cost = "Not seen from here: data before the model's input, metrics, checkpoints, other processes. Try float32."
    return [note(f"the loss does not fall ({first:.3g} to {last:.3g}), and nothing of precision was found", "", cost)]


def _for_evaluation(seen):
    """What only an evaluation uses."""
    return [] if seen.problem else _spoilt(seen.plain)


SPOILS, MAY = (functools.partial(_settings, severity=severity) for severity in ("certain", "likely"))
JUDGES = [_long_steps, SPOILS, _stopped, _no_gradient, _skipped, _norms_seen, _hidden, _cast]
JUDGES += [_rounded, MAY, _too_large, _merges, _for_evaluation, _unseen]
