"""Data sets by name or file, encoded without looking at any private statistic."""

from privet.data.base import Data, Records, collate, holdout
from privet.data.features import scattering
from privet.data.sets import SETS, load

__all__ = ["SETS", "Data", "Records", "collate", "holdout", "load", "scattering"]
