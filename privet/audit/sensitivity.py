"""The exact sensitivity check: noise off, two neighbouring samples, ‖f(D′) − f(D)‖ of each sum against its declared Δ.

One hostile record is enough to break a bound, so they are looked for in many ways: huge, tiny, not a number, infinite,
on an axis that no other record uses, aligned and anti-aligned with the sum of the others, by gradient ascent on the
record's own gradient, and by climbing on the measured difference itself, which needs no knowledge of the method.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..accounting import Relation
from ..errors import PrivetError
from ..noise import effective_multiplier
from .report import Check
from .subject import Outcome, Record, Subject

_ROUNDING = 1e-5
"""Of sums in float32, relative to the sum and to Δ: what a difference of two may be off by."""
STRANGER = 10**6
"""The number of the record that is added: nobody else's."""
_CLIMBS = 16
_CROWDS = 4
_ASCENT_STEPS = 8
_OPPOSITES = 3
_COPIED = 4
_SCALES = (0.3, 1.0, 3.0, 10.0)


@dataclass(frozen=True, eq=False)
class Worst:
    """The largest difference found, as a share of what is declared."""

    ratio: float = 0.0
    how: str = "no hostile record was found"
    record: Record | None = None


def check_sensitivity(subject: Subject, seed: int = 0, *, crowds: bool = True) -> tuple[list[Check], Record | None]:
    """Both relations, and whether the declared numbers make up the claimed multiplier; also the worst record found.

    `crowds`: also among samples of hostile records, and with a longer search; without, for models of little interest.
    """
    search = _Search(subject, seed, crowds)
    added, replaced = search.add_remove(), search.replace_one()
    checks = [
        _verdict("sensitivity, a record added or removed", added),
        _verdict("sensitivity, a record replaced", replaced),
        check_multiplier(subject),
    ]
    return checks, added.record


def check_multiplier(subject: Subject) -> Check:
    """Rule 2: all sums of a step are one mechanism, whose multiplier is (Σ (Δ/std)²)^(-1/2)."""
    declared = subject.step(subject.base, noise=False)
    deltas = [declared.sensitivities[name][subject.basis] for name in declared.sums]
    multiplier = effective_multiplier(deltas, [declared.stds[name] for name in declared.sums])
    return Check(
        name="noise multiplier of all sums together",
        holds=multiplier >= subject.noise_multiplier * (1 - 1e-9),
        measured=multiplier,
        bound=float(subject.noise_multiplier),
        detail=f"{len(deltas)} sums of one sample are one mechanism",
    )


def _verdict(name: str, worst: Worst) -> Check:
    return Check(name=name, holds=worst.ratio <= 1, measured=worst.ratio, bound=1.0, detail=worst.how)


class _Search:
    def __init__(self, subject: Subject, seed: int, crowds: bool) -> None:
        self.subject, self.base, self.crowds = subject, subject.base, crowds
        self.random = torch.Generator().manual_seed(seed)
        self.without = subject.step(self.base, noise=False)
        self.found: list[tuple[float, Record]] = []

    def add_remove(self) -> Worst:
        worst = Worst()
        for how, record in self._hostile():
            worst = self._try(worst, how, record, position=0)
        for how, record in self._aligned():
            worst = self._try(worst, how, record, position=0)
        for how, record in self._ascended():
            worst = self._try(worst, how, record, position=0)
        if worst.record is None:
            return worst
        worst = self._climb(worst, lambda so_far, record: self._try(so_far, "climbing on the difference", record, 0))
        hardest = worst.record
        assert hardest is not None
        for position in (len(self.base) // 2, len(self.base)):
            worst = self._try(worst, f"the worst of all, as number {position} of its sample", hardest, position)
        found, where = self._alone(hardest)
        if found > worst.ratio:
            worst = Worst(found, f"the worst of all, alone in its sample{where}", hardest)
        if self.crowds:
            for record in (hardest, Record(STRANGER, self.base[-1].x, self.base[-1].y)):
                worst = self._in_crowds(worst, record)
            before = self.random.get_state()
            worst = self._among_opposites(worst)
            self.random.set_state(before)  # what follows looks where it looked without it
        return worst

    def _alone(self, record: Record) -> tuple[float, str]:
        try:
            nobody = self.subject.step([], noise=False)
        except Exception as error:
            return math.inf, f"; a sample of nobody stops the step ({type(error).__name__}: {str(error)[:120]})"
        return self._difference(nobody, [record], "add_remove")

    def replace_one(self) -> Worst:
        """Pairs of the records that moved most, against each other and against their opposites."""
        worst, start = Worst(), None
        best = [record for _, record in sorted(self.found, key=lambda pair: -pair[0])[:3]]
        opposite = [Record(r.number, -r.x, r.y) for r in best if r.x.is_floating_point()]
        others = [Record(STRANGER, r.x, r.y) for r in self.base[:2]]
        for first in best:
            try:
                before = self.subject.step([first, *self.base], noise=False)
            except Exception as error:
                return Worst(math.inf, _complaint(error), first)
            for second in [*best, *opposite, *others]:
                if second is not first:
                    found, where = self._difference(before, [second, *self.base], "replace_one")
                    if found > worst.ratio:
                        worst, start = Worst(found, f"one hostile record in place of another{where}", second), before
        if start is None or not self.crowds:
            return worst

        def tried(worst: Worst, record: Record) -> Worst:
            found, where = self._difference(start, [record, *self.base], "replace_one")
            return Worst(found, f"climbing on the difference{where}", record) if found > worst.ratio else worst

        return self._climb(worst, tried)

    def _try(self, worst: Worst, how: str, record: Record, position: int) -> Worst:
        sample = [*self.base[:position], record, *self.base[position:]]
        found, where = self._difference(self.without, sample, "add_remove")
        if math.isfinite(found):
            self.found.append((found, record))
        return Worst(found, f"{how}{where}", record) if found > worst.ratio else worst

    def _difference(self, before: Outcome, sample: Sequence[Record], relation: Relation) -> tuple[float, str]:
        """The largest ‖f(D′) − f(D)‖/Δ of all sums, less what rounding explains."""
        try:
            after = self.subject.step(sample, noise=False)
        except Exception as error:
            return math.inf, _complaint(error)
        if after.sums.keys() != before.sums.keys() or after.sensitivities != before.sensitivities:
            return math.inf, ": with it, other sums or sensitivities are declared"
        worst, where = 0.0, ""
        for name, total in after.sums.items():
            moved = _norm(total - before.sums[name])
            rounding = max(_ROUNDING, after.rounding) * (_norm(total) + _norm(before.sums[name]))
            delta = after.sensitivities[name][relation]
            ratio = math.inf if math.isnan(moved) else 0.0 if moved <= rounding else math.inf
            if delta > 0 and not math.isnan(moved):
                ratio = max(0.0, moved - rounding) / (delta * (1 + _ROUNDING))
            if ratio > worst:
                worst, where = ratio, f", in the sum '{name}'"
        return worst, where

    def _hostile(self) -> Iterator[tuple[str, Record]]:
        x, classes = self.base[0].x, _different([r.y for r in self.base])
        for label, y in enumerate(classes[: 2 if self.crowds else 1]):
            for how, hostile in _shapes(x, [r.x for r in self.base], self.random):
                yield f"{how}, target {label}", Record(STRANGER, hostile, y)

    def _aligned(self) -> Iterator[tuple[str, Record]]:
        """Of all that were tried, those whose own sum points most along and most against the sum of the others."""
        candidates = [r for _, r in sorted(self.found, key=lambda pair: -pair[0])[:6]]
        candidates += [Record(STRANGER, r.x, r.y) for r in self.base[:4]]
        scored = []
        for record in candidates:
            try:
                alone = self.subject.step([record], noise=False)
            except Exception:
                continue  # that it cannot be alone is found elsewhere
            scored.append((sum(float(alone.sums[n] @ self.without.sums[n]) for n in alone.sums), record))
        if not scored:
            return
        scored.sort(key=lambda pair: pair[0])
        for how, (_, record) in (("anti-aligned with the others", scored[0]), ("aligned with the others", scored[-1])):
            yield how, record
            if record.x.is_floating_point():
                yield f"{how}, a thousandfold", Record(STRANGER, 1e3 * record.x, record.y)

    def _ascended(self) -> Iterator[tuple[str, Record]]:
        """Gradient ascent on the input: for the norm of the record's gradient, and against the sum of the others."""
        start = self.base[-1]
        against = -torch.cat([total.double() for total in self.without.sums.values()])
        for how, towards in (("for its norm", None), ("against the others", against)):
            gradient = self.subject.gradient(start)
            if gradient is None:
                return
            x = start.x.clone().double().to(start.x.dtype)
            for step in range(_ASCENT_STEPS):
                try:
                    x = _ascend(gradient, x, towards, 0.5 * 2.0**step)
                except (RuntimeError, ValueError, PrivetError):
                    break  # no second derivative here: the climb below needs none
            yield f"gradient ascent {how}", Record(STRANGER, x, start.y)

    def _in_crowds(self, worst: Worst, record: Record) -> Worst:
        """Among others of very different sizes, where who comes first may decide what a part of the sample adds up to;
        and among its like, where an order statistic tips over."""
        crowds = [[self._resized(other) for other in self.base] for _ in range(_CROWDS)]
        half, stranger = len(self.base) // 2, Record(0, record.x * 1e3, record.y)
        for many in (1, half, half + 1, len(self.base) - 1):
            crowds.append([Record(r.number, record.x, record.y) if i < many else r for i, r in enumerate(self.base)])
            if record.x.is_floating_point():
                alike = [Record(r.number, r.x if i >= many else stranger.x, record.y) for i, r in enumerate(crowds[-1])]
                crowds.append([Record(r.number, record.x, r.y) if i >= many else r for i, r in enumerate(alike)])
        for crowd in crowds:
            try:
                before = self.subject.step(crowd, noise=False)
            except Exception:
                continue  # a crowd that stops the step by itself tells nothing about the record
            found, where = self._difference(before, [record, *crowd], "add_remove")
            if found > worst.ratio:
                worst = Worst(found, f"first in a crowd of hostile records{where}", record)
        return worst

    def _among_opposites(self, worst: Worst) -> Worst:
        """Beside a copy of itself with another target and a smaller gradient that points elsewhere: where records are
        bounded together, it may turn what they add up to around. Whose copy shares its bound is not known, so all are
        tried; and climbing from there."""
        found = Worst()
        for a, b in self._opposites()[:_OPPOSITES]:
            crowds = [[Record(r.number, a.x, a.y)] for r in self.base] + [
                [Record(r.number, a.x, a.y) for r in self.base]
            ]
            for crowd in crowds:
                try:
                    before = self.subject.step(crowd, noise=False)
                except Exception:
                    continue  # as above
                ratio, where = self._difference(before, [b, *crowd], "add_remove")
                if ratio > found.ratio:
                    found, start, beside = Worst(ratio, f"beside its like with another target{where}", b), before, crowd
        if found.record is None:
            return worst

        def tried(so_far: Worst, record: Record) -> Worst:
            ratio, where = self._difference(start, [record, *beside], "add_remove")
            how = f"climbing, beside its like with another target{where}"
            return Worst(ratio, how, record) if ratio > so_far.ratio else so_far

        return max(worst, self._climb(found, tried), key=lambda w: w.ratio)

    def _opposites(self) -> list[tuple[Record, Record]]:
        """Pairs of records with the same input, those first whose second turns the gradient of the first around."""
        scored: list[tuple[float, int, tuple[Record, Record]]] = []
        targets = _different([r.y for r in self.base])
        for copied in self.base[:_COPIED]:
            for scale in _SCALES:
                pair = []
                for y in targets:
                    gradient = self.subject.gradient(Record(STRANGER, copied.x, y))
                    if gradient is None:
                        return []
                    x = copied.x * scale
                    try:
                        own = gradient(x.requires_grad_()).detach().double()
                    except (RuntimeError, ValueError, PrivetError):
                        return []  # a model that takes no single record
                    pair.append((own, Record(STRANGER, x.detach(), y)))
                for (g, a), (h, b) in itertools.permutations(pair, 2):
                    turned = float(torch.nn.functional.cosine_similarity(g, g + h, dim=0))
                    if math.isfinite(turned):
                        scored.append((turned, len(scored), (a, b)))
        return [pair for *_, pair in sorted(scored)]

    def _resized(self, record: Record) -> Record:
        if not record.x.is_floating_point():
            return Record(record.number, _other_tokens(record.x, [r.x for r in self.base], self.random), record.y)
        power, sign = torch.rand(2, generator=self.random).tolist()
        return Record(record.number, record.x * (1 if sign > 0.5 else -1) * 10 ** (4 * power - 2), record.y)

    def _climb(self, worst: Worst, tried: Callable[[Worst, Record], Worst]) -> Worst:
        """Random steps that are kept if the measured difference grows."""
        stride = 0.3
        for _ in range(_CLIMBS if self.crowds else _CLIMBS // 2):
            record = worst.record
            assert record is not None
            if not record.x.is_floating_point():
                x = _other_tokens(record.x, [r.x for r in self.base], self.random)
            elif not bool(torch.isfinite(record.x).all()):
                return worst
            else:
                size = record.x.abs().clamp(min=1e-3)
                x = record.x + stride * size * torch.randn(record.x.shape, generator=self.random).to(record.x)
            better = tried(worst, Record(STRANGER, x, record.y))
            stride = stride * 1.5 if better is not worst else max(stride * 0.8, 1e-3)
            worst = better
        return worst


def _ascend(gradient: Callable[[Tensor], Tensor], x: Tensor, towards: Tensor | None, stride: float) -> Tensor:
    x = x.detach().requires_grad_()
    own = gradient(x).double()
    aim = own.norm() if towards is None or len(towards) < len(own) else own @ towards[: len(own)] / own.norm()
    slope: Tensor = torch.nan_to_num(torch.autograd.grad(aim, x)[0])
    moved: Tensor = x + stride * slope / slope.norm().clamp(min=1e-12)
    return moved.detach()


def _shapes(x: Tensor, others: Sequence[Tensor], random: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """Inputs that a careless bound does not expect."""
    if not x.is_floating_point():
        for number in range(4):
            yield f"tokens {number}", _other_tokens(x, others, random)
        yield "one token over and over", torch.full_like(x, int(x.flatten()[0]))
        return
    noise = torch.randn(x.shape, generator=random).to(x)
    for scale in (0.0, 1e-30, 1e-22, 1e-19, 1.0, 1e3, 1e12, 1e30):
        yield f"size {scale:g}", noise * scale
    yield "all the same and large", torch.full_like(x, 1e4)
    yield "the largest number", torch.full_like(x, torch.finfo(x.dtype).max)
    yield "not a number", torch.full_like(x, math.nan)
    yield "one entry not a number", _with_entry(x, math.nan)
    yield "infinite", torch.full_like(x, math.inf)
    yield "one entry infinite", _with_entry(x, -math.inf)
    unused = torch.stack([o.flatten().abs() for o in others]).sum(0)
    axis = torch.zeros_like(x).flatten()
    axis[int(unused.argmin())] = 1e3
    yield "on an axis of its own", axis.view(x.shape)


def _with_entry(x: Tensor, value: float) -> Tensor:
    changed = x.clone().flatten()
    changed[0] = value
    return changed.view(x.shape)


def _other_tokens(x: Tensor, others: Sequence[Tensor], random: torch.Generator) -> Tensor:
    seen = torch.stack([o.flatten() for o in others]).flatten()
    return seen[torch.randint(len(seen), (x.numel(),), generator=random)].view(x.shape)


def _different(targets: Sequence[Tensor]) -> list[Tensor]:
    kept: list[Tensor] = []
    for target in targets:
        if not any(torch.equal(target, other) for other in kept):
            kept.append(target)
    return kept


def _norm(total: Tensor) -> float:
    return float(total.double().norm())


def _complaint(error: Exception) -> str:
    return f": it stops the step ({type(error).__name__}: {str(error)[:120]})"
