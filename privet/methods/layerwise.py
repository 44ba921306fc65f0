"""Layerwise clipping: each layer of a record's gradient is clipped by itself (Nguyen et al. 2023, section 3.2 and 3.3).

It is per-example clipping with a group for each layer, noise in proportion to the thresholds, and the same options; the
paper's adaptive layerwise clipping is `thresholds="alc"`, which learns from public records, and the way without such
records is `adaptive=True`, a private quantile for each layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..noise import Allocation
from ..options import option
from .base import register
from .per_example import PerExample
from .thresholds import WHAT_GROUPS_ARE, Groups


@register
@dataclass(frozen=True, kw_only=True)
class Layerwise(PerExample):
    """Layerwise clipping.

    Formal guarantee: that of per-example clipping for each group h: one record moves its sum by at most C_h (2C_h when
    replaced). All groups together are one mechanism: with noise σ·C_h in each of L, its multiplier is σ/√L.
    """

    name = "layerwise"
    summary = "clip each layer of each record's gradient by itself, with thresholds that may be learned"

    groups: Groups | None = option("layer", WHAT_GROUPS_ARE)
    allocation: Allocation = option("proportional", "how noise is shared between groups")
