"""Data sets by name or file, encoded without looking at any private statistic."""

from privet.data.base import Data, holdout
from privet.data.sets import SETS, load

__all__ = ["SETS", "Data", "holdout", "load"]
