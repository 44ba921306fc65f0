"""The sampling check: the records of each step are drawn by the rule that the accountant is told.

Which rule that is comes from the accounted mechanism and not from the sampler's name: batches of a shuffled data set
that are accounted as Poisson samples fail here, whatever their class is called.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from ..accounting import Relation
from ..noise import Source
from ..sampling import Sample, SamplingRule
from .randomness import ERROR
from .report import Check

_STEPS = 2000
_EPOCHS_WITH_ONE_MORE = 20


def check_sampling(rule: SamplingRule, relation: Relation, source: Source | None = None) -> list[Check]:
    """Draws many steps and compares sizes, rates and overlaps with what the accounted kind of sample would give."""
    source = source or Source()
    records = 4 * rule.batch
    accounted = rule.mechanism(records=records, noise_multiplier=1.0, relation=relation)
    kind = accounted.kind
    # a rate is that of the public number of records, whatever the true one is
    size = records - rule.batch if kind == "poisson" else records
    epochs = [_epoch(rule, size, records, source, rule.epoch_key(source)) for _ in range(-(-_STEPS // 4))]
    steps = [sample for epoch in epochs for sample in epoch]
    twice = sum(len(np.unique(sample)) < len(sample) for sample in steps)
    once = Check(name="no record is twice in a sample", holds=twice == 0, measured=twice, bound=0)
    present = np.zeros((len(steps), size), dtype=bool)
    for row, sample in zip(present, steps, strict=True):
        row[sample] = True
    if kind == "gaussian":
        return [once, *_once_per_epoch(rule, source, present.reshape(len(epochs), -1, size))]
    rate = accounted.rate if kind == "poisson" else (accounted.batch or 0) / (accounted.records or 1)
    if kind == "poisson":
        sizes = present.sum(1)
        spread = float(((sizes - size * rate) ** 2).sum()) / (size * rate * (1 - rate))
        met, variance = size * rate**2, size * rate**2 * (1 - rate**2)
        first = _chi_square("sizes of samples vary as those of independent coins", spread, len(sizes))
    else:
        wrong = int((present.sum(1) != rule.batch).sum())
        met = rule.batch * rate
        variance = met * (1 - rate) * (size - rule.batch) / (size - 1)
        first = Check(name="samples have the accounted size", holds=wrong == 0, measured=wrong, bound=0)
    counts = present.sum(0)
    deviation = float(((counts - len(steps) * rate) ** 2).sum()) / (len(steps) * rate * (1 - rate))
    if kind == "fixed_size":
        deviation *= (size - 1) / size  # the counts add up to a constant
    return [
        once,
        first,
        *(_meetings(present, apart, met, variance) for apart in (1, 2, 3)),
        _chi_square("every record has the same rate", deviation, size - (kind == "fixed_size")),
    ]


def _epoch(rule: SamplingRule, size: int, records: int, source: Source, key: bytes | None) -> list[Sample]:
    return list(rule.draw(size, records, source, epoch_key=key))


def _once_per_epoch(rule: SamplingRule, source: Source, present: npt.NDArray[np.bool_]) -> list[Check]:
    """Accounted without sampling, an epoch at a time: each record once in it, and nobody moved by another one."""
    times = present.sum(1)
    size, moved = present.shape[2], 0
    for key in [rule.epoch_key(source) for _ in range(_EPOCHS_WITH_ONE_MORE)]:
        with_one_more = [sample[sample < size] for sample in _epoch(rule, size + 1, size, source, key)]
        without = _epoch(rule, size, size, source, key)
        moved += sum(not np.array_equal(a, b) for a, b in zip(with_one_more, without, strict=True))
    steps = present.reshape(-1, size).sum(1)
    expected, share = size / present.shape[1], 1 / present.shape[1]
    spread = float(((steps - expected) ** 2).sum()) / (size * share)  # multinomial in each epoch
    return [
        Check(
            name="every record is in one step of an epoch",
            holds=bool((times == 1).all()),
            measured=int(times.max()),
            bound=1,
        ),
        Check(name="one record more moves no other", holds=moved == 0, measured=moved, bound=0),
        _chi_square(
            "sizes of batches vary as those of independent draws", spread, len(present) * (present.shape[1] - 1)
        ),
    ]


def _chi_square(name: str, statistic: float, freedom: int) -> Check:
    from scipy import special  # noqa: PLC0415 - slow to import

    low, high = special.chdtr(freedom, statistic), special.chdtrc(freedom, statistic)
    return Check(
        name=name,
        holds=bool(2 * min(low, high) > ERROR),
        measured=statistic / freedom,
        bound=1.0,
        detail=f"variance over the expected one, {freedom} degrees of freedom",
    )


def _meetings(present: npt.NDArray[np.bool_], apart: int, expected: float, variance: float) -> Check:
    """Overlaps of neighbouring pairs are correlated, so twice the variance of independent ones is allowed for."""
    overlaps = (present[apart:] & present[:-apart]).sum(1)
    deviations = abs(float(overlaps.mean()) - expected) / math.sqrt(2 * variance / len(overlaps))
    return Check(
        name=f"records meet in steps {apart} apart as often as accounted",
        holds=math.erfc(deviations / math.sqrt(2)) > ERROR,
        measured=float(overlaps.mean()),
        bound=expected,
    )
