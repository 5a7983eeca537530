"""The engine of all exercises: it calls an answer, compares, and replies in a box. It never raises.

An exercise has a reference, the cases that it is called with, and the mistakes that people make:
programs that make them, by the hint that helps. Where an answer differs from the reference, the
first mistake that has given the same results in all cases so far says which hint to give.
"""

import copy
import functools
import math
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, NamedTuple

import torch
from IPython.display import display

from helpers.check import passed
from helpers.plots import COLORS, NEUTRAL

RIGHT = "\N{CHECK MARK}", COLORS["normal"]
WRONG = "\N{MULTIPLICATION X}", COLORS["becomes 0"]
UNTRIED = "\N{WHITE CIRCLE}", NEUTRAL


class Case(NamedTuple):
    """The arguments of one call, and the hint where no known mistake explains the answer."""

    arguments: tuple
    hint: str = ""


class Reply(Exception):
    """What is wrong with an answer. `observe` raises it where there is nothing to compare."""


class Untouched(Exception):
    """The first call returned nothing: the stub is as it was."""


@dataclass
class Box:
    """A reply: a line of words; in a notebook in a box with a coloured mark."""

    mark: tuple[str, str]
    words: str

    def __repr__(self):
        return self.words

    def _repr_html_(self):
        sign, color = self.mark
        style = f"border-left:5px solid {color};padding:.3em .8em;overflow-wrap:anywhere"
        words = escape(self.words)
        return f'<div style="{style}"><b style="color:{color}">{sign}</b> {words}</div>'


def called(answer: Callable, *arguments: Any) -> Any:
    """What `answer` gives for copies of `arguments`: how most exercises observe an answer."""
    return answer(*copy.deepcopy(arguments))


def equal(given: Any, right: Any, rel: float = 0.0) -> bool:
    """Whether two results are the same, numbers within `rel`. NaN equals NaN, 0.0 is not -0.0."""
    if isinstance(right, dict):
        return all(equal(given[name], value, rel) for name, value in right.items())
    if isinstance(right, tuple | list):
        return len(given) == len(right) and all(equal(*pair, rel) for pair in zip(given, right))
    if isinstance(right, torch.Tensor):
        close = functools.partial(torch.allclose, rtol=rel, atol=0, equal_nan=True)
        return _form(given) == _form(right) and close(given, right)
    if isinstance(right, str | torch.dtype | None) or isinstance(given, str | None):
        return given == right
    if math.isnan(right):
        return math.isnan(given)
    if rel:
        return math.isclose(given, right, rel_tol=rel)
    return bool(given == right and math.copysign(1, given) == math.copysign(1, right))


def shown(value: Any) -> str:
    """`value` in a few words: a large tensor as its form, a long float with six digits."""
    if isinstance(value, torch.Tensor):
        return shown(value.tolist()) if value.numel() <= 8 else f"a tensor, {_form(value)}"
    if isinstance(value, float):
        return repr(value) if len(repr(value)) <= 12 else f"{value:.6g}"
    if isinstance(value, tuple | list):
        parts = ", ".join(map(shown, value[:8])) + (", ..." if len(value) > 8 else "")
        return f"({parts})" if isinstance(value, tuple) else f"[{parts}]"
    if isinstance(value, int | str | dict | torch.dtype | None):
        return str(value)
    return getattr(value, "__name__", type(value).__name__)


def _form(value):
    """What has to agree before numbers are compared, in words."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"{len(value)} values"
    return f"{type(value).__name__}, {shown(value)}"


def _has_form_of(given, right):
    """Whether `given` can be compared with `right`."""
    if isinstance(right, tuple | torch.Tensor):
        return _form(given) == _form(right)
    return True


def _difference(given, right, same):
    """What differs, in words."""
    what = "your result"
    if isinstance(right, dict):
        what = next(name for name in right if not same({name: given[name]}, {name: right[name]}))
        given = given[what]
        right = right[what]
    if not _has_form_of(given, right):
        return f"{what} is {_form(given)}; it should be {_form(right)}"
    if isinstance(right, torch.Tensor) and right.numel() > 8:
        off = (given.double() - right.double()).abs().max().item()
        return f"{what} is off by up to {shown(off)}"
    return f"{what} is {shown(given)}; it should be {shown(right)}"


@dataclass
class Exercise:
    """One exercise. Called with an answer, it shows its reply, and notes a right one as progress.

    reference: the right answer, with the name and the docstring of the exercise.
    cases: a sequence of `Case` or of tuples of arguments, or a function that returns one. They are
        tried in order, until one goes wrong.
    mistakes: answers that people give, by the hint that names the mistake.
    observe: `observe(answer, *arguments)` is what is compared: a number, text, tensor or tuple, or
        a dict of these by words that say what each is. It may raise `Reply`.
    same: `same(given, right)` tells whether two such observations agree.
    show: `show(*arguments)` puts a call into words.
    draw: `draw(given, right, *arguments)` are the pictures below a wrong answer.

    Examples
    --------
    >>> @exercise(cases=[(2.0,), (3.0,)], mistakes={"Do not double it.": lambda x: 2 * x})
    ... def square(x):
    ...     return x * x
    >>> square(lambda x: x + x)
    Not right yet: for 3.0 your result is 6.0; it should be 9.0. Do not double it.
    """

    reference: Callable
    cases: Sequence | Callable
    mistakes: dict = field(default_factory=dict)
    observe: Callable = called
    same: Callable = equal
    show: Callable = lambda *arguments: ", ".join(map(shown, arguments))
    draw: Callable = lambda *_: ()

    def __post_init__(self):
        functools.update_wrapper(self, self.reference)

    def __call__(self, answer):
        try:
            boxes = self._judge(_guarded(answer))
        except Untouched:
            words = "Not yet: your function returns None."
            boxes = [Box(UNTRIED, f"{words} Replace the dots by your code, with a return.")]
        except Reply as reply:
            boxes = [Box(WRONG, f"Not right yet: {reply}")]
        except Exception as error:  # the answer is of a kind that cannot even be compared
            words = "Not right yet: your function returns something unexpected"
            boxes = [Box(WRONG, f"{words} ({type(error).__name__}: {error})")]
        for each in boxes:
            display(each)

    def _judge(self, answer):
        """The reply to the first case that goes wrong, with its pictures, or else to all cases."""
        seen = []  # the arguments of each case so far, and what the answer gave
        for case in self.cases() if callable(self.cases) else self.cases:
            arguments, hint = case if isinstance(case, Case) else Case(case)
            right = self.observe(self.reference, *arguments)
            given = self.observe(answer, *arguments)
            seen.append((arguments, given))
            if not self._agree(given, right):
                known = (hint for hint, wrong in self.mistakes.items() if self._gives(wrong, seen))
                call = self.show(*arguments)
                where = f"for {call} " if call else ""
                words = f"{where}{_difference(given, right, self.same)}. {next(known, hint)}"
                box = Box(WRONG, f"Not right yet: {words.rstrip()}")
                return [box, *self.draw(given, right, *arguments)]
        return [Box(RIGHT, f"Right. {self._noted()}")]

    def _agree(self, given, right):
        return _has_form_of(given, right) and bool(equal(given, right) or self.same(given, right))

    def _gives(self, mistake, seen):
        """Whether a mistake gives what the answer gave, in all cases so far."""
        try:
            for arguments, given in seen:
                if not self._agree(given, self.observe(mistake, *arguments)):
                    return False
        except Exception:  # it fails in another way
            return False
        return True

    def _noted(self):
        """Note a right answer; how many exercises of its module, a notebook's, are right so far."""
        right = passed.note(self.__name__)
        values = vars(sys.modules[self.__module__]).values()
        names = [each.__name__ for each in values if isinstance(each, Exercise)]
        return f"{len(right.intersection(names))} of {len(names)} in this notebook."


def exercise(**parts: Any) -> Callable[[Callable], Exercise]:
    """A decorator: the function below it is the reference of an `Exercise` of these parts."""
    return functools.partial(Exercise, **parts)


def _guarded(answer):
    """`answer`, with words for a call that raises or returns nothing."""
    calls = []

    def guarded(*arguments):
        calls.append(arguments)
        call = ", ".join(map(shown, arguments))
        try:
            given = answer(*arguments)
        except (Exception, SystemExit) as error:
            where = _failed_line(answer, error)
            what = f"{type(error).__name__}: {error}{where}"
            raise Reply(f"called with {call}, your code raised {what}") from None
        if given is not None and given is not ...:
            return given
        if len(calls) == 1:
            raise Untouched
        raise Reply(f"called with {call}, your function returns None.")

    return guarded


def _failed_line(answer, error):
    """The line of the answer's own cell or file in which it failed, in words, if there is one."""
    file = getattr(getattr(answer, "__code__", None), "co_filename", None)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.line for frame in frames if frame.filename == file]
    return f", in the line `{lines[-1]}`" if lines and lines[-1] else ""
