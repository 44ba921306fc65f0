"""Randomness for noise and sampling: one `Source` per run, at one of three named levels.

- `seeded`: reproducible, for tests and debugging; promises no privacy.
- `system`: unpredictable, an AES-256-CTR keystream under a fresh key from the operating system. Attacks on
  the low bits of floating-point noise (Mironov 2012) are mitigated by rounding to a grid, not proven away.
- `exact`: as `system`, and the noise is a discrete Gaussian on an integer grid, sampled without any
  floating-point decision, so that the noise added is the noise accounted.

How the noise of a step is shared out among its parameter groups is `allocate`.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NoReturn, get_args

import numpy as np
import numpy.typing as npt
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from . import native
from .errors import ConfigError, PrivetError

Level = Literal["seeded", "system", "exact"]
Allocation = Literal["isotropic", "proportional", "optimal"]

# Pairs of normals made at a time: large enough for torch to use all threads, small enough to stay in cache.
_PAIRS = 2**16
_ZEROS = bytes(2**16)
# The grid lies 20 bits below the noise: rounding adds 1e-13 of the variance, and about 32 low bits are gone.
_GRID_BITS = 20
# Sums beyond this many grid cells are clamped (which moves no two of them apart), so that the
# rounding error of the division by the grid stays below 2^-7 of a cell.
_EXACT_RANGE = 2.0**46


class Source:
    """A stream of randomness for noise and sampling; one per run. Two threads at once are refused.

    Formal guarantee (`system`, `exact`): the key is 256 bits of `os.urandom`, drawn when the source is made
    and again in a process forked from it. It can be neither read nor set nor copied, so that no two sources,
    no two processes and no resumed run ever repeat noise, if AES-256 is a pseudorandom permutation.

    >>> Source("seeded", seed=7).integers(4, 10).tolist() == Source("seeded", seed=7).integers(4, 10).tolist()
    True
    """

    def __init__(self, level: Level = "system", *, seed: int | None = None) -> None:
        if level not in get_args(Level):
            raise ConfigError(f"level is {level!r}: choose one of {', '.join(get_args(Level))}.")
        if level == "seeded" and not isinstance(seed, int):
            raise ConfigError(f"seed is {seed!r}: the level 'seeded' needs a whole number as its seed.")
        if level != "seeded" and seed is not None:
            raise ConfigError(
                f"seed is {seed!r}: noise at level {level!r} must be unpredictable and takes no seed. "
                "Leave it out, or choose level='seeded', which promises no privacy."
            )
        self.level: Level = level
        self._rekey(os.urandom(32) if seed is None else hashlib.sha256(str(int(seed)).encode()).digest())
        # Two words more than are used: some versions of `cryptography` ask for room for a spare cipher block.
        self._words = torch.empty(2 * _PAIRS + 2, dtype=torch.int64, device="cpu")
        self._bytes = self._words.numpy().view(np.uint8).data
        self._in_use = threading.Lock()
        self._uniforms = torch.empty(2 * _PAIRS, dtype=torch.float64, device="cpu")
        self._noise = torch.empty(2 * _PAIRS, dtype=torch.float64, device="cpu")

    def __reduce__(self) -> NoReturn:
        raise ConfigError("A Source cannot be copied or pickled: it would give the same noise twice. Make a new one.")

    def _rekey(self, key: bytes) -> None:
        # The counter may start at zero, as no key is ever used for two streams; with 128 bits it never wraps.
        self._stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
        self._process = os.getpid()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Words lie in memory of this source until they are made use of: another thread would get the same ones."""
        self._take()
        try:
            yield
        finally:
            self._in_use.release()

    def _take(self) -> None:
        if not self._in_use.acquire(blocking=False):
            raise PrivetError(
                "Two threads draw from one source of randomness at the same time, which could give both the same "
                "noise. Nothing was released. Give each thread a run of its own."
            )

    def _fill(self, buffer: memoryview, count: int) -> None:
        """Write `count` keystream words to the front of `buffer` (of bytes), which has room for two more."""
        if self._process != os.getpid() and self.level != "seeded":
            self._rekey(os.urandom(32))
        size, start = 8 * count, 0
        while start < size:
            part = min(size - start, len(_ZEROS))
            self._stream.update_into(_ZEROS if part == len(_ZEROS) else _ZEROS[:part], buffer[start:])
            start += part

    def words(self, count: int) -> npt.NDArray[np.uint64]:
        """The next `count` words of 64 uniform bits; the first n of them do not depend on `count`."""
        buffer = np.empty(count + 2, dtype=np.uint64)
        with self._alone():
            self._fill(buffer.view(np.uint8).data, count)
        return buffer[:count]

    def uniforms(self, count: int) -> npt.NDArray[np.float64]:
        """Uniform on the multiples of 2^-53 in (0, 1]: never 0, so that a logarithm is finite."""
        return ((self.words(count) >> np.uint64(11)) + np.uint64(1)).astype(np.float64) * 2.0**-53

    def coins(self, count: int, probability: float) -> npt.NDArray[np.bool_]:
        """Independent coins, True with `probability` rounded down to a multiple of 2^-64 (0 and 1 exact)."""
        if not 0 <= probability <= 1:
            raise ConfigError(f"probability is {probability}: it must lie between 0 and 1.")
        threshold = int(float(probability) * 2.0**64)  # exact: the factor only moves the exponent
        if threshold == 2**64:
            return np.ones(count, dtype=np.bool_)
        return self.words(count) < np.uint64(threshold)

    def integers(self, count: int, bound: int) -> npt.NDArray[np.int64]:
        """Independent and exactly uniform in [0, bound), for a bound of at most 2^63."""
        if not 1 <= bound <= 2**63:
            raise ConfigError(f"bound is {bound}: it must lie between 1 and 2^63.")
        drawn = self.words(count)
        if bound & (bound - 1) == 0:
            return (drawn & np.uint64(bound - 1)).astype(np.int64)
        last = np.uint64(2**64 - 2**64 % bound - 1)  # the words up to here fall evenly on all remainders
        while (biased := np.flatnonzero(drawn > last)).size:
            drawn[biased] = self.words(biased.size)
        return (drawn % np.uint64(bound)).astype(np.int64)

    def subset(self, n: int, k: int) -> npt.NDArray[np.int64]:
        """A uniform subset of k of the numbers 0 to n-1, without replacement, sorted."""
        if not 0 <= k <= n:
            raise ConfigError(f"k is {k}: a subset of {n} has between 0 and {n} members.")
        if 2 * k > n:
            kept = np.ones(n, dtype=np.bool_)
            kept[self.subset(n, n - k)] = False
            return np.flatnonzero(kept)
        chosen = np.empty(0, dtype=np.int64)
        # Uniform by symmetry: no step of this treats one number differently from another.
        while chosen.size < k:
            chosen = np.union1d(chosen, self.integers(k - chosen.size, n))
        return chosen

    def gaussian(self, count: int) -> torch.Tensor:
        """Standard normals in float64 (Box-Muller), cut off by the 63-bit uniforms at 9.3 deviations."""
        if self.level == "exact":
            raise ConfigError(
                "Level 'exact' has no continuous normals: use add_noise, which draws on the integer grid."
            )
        normals = torch.empty(count, dtype=torch.float64, device="cpu")
        with self._alone():
            for part in torch.split(normals, 2 * _PAIRS):
                self._normals(part, scale=1.0)
        return normals

    def _normals(self, out: torch.Tensor, scale: float) -> torch.Tensor:
        """Fill `out` (float64, at most 2·_PAIRS entries) with scale·N(0, 1)."""
        half = (len(out) + 1) // 2
        self._fill(self._bytes, 2 * half)
        words, uniforms = self._words[: 2 * half], self._uniforms[: 2 * half]
        words[:half].bitwise_and_(2**63 - 1)
        uniforms.copy_(words)  # keeps the 53 leading bits of each
        # From (0, 1], with all 63 bits near 0, which is where the tail is; and from [-π, π].
        radius = uniforms[:half].add_(1).mul_(2.0**-63).log_().mul_(-2 * scale**2).sqrt_()
        angle = uniforms[half:].mul_(math.pi * 2.0**-63)
        torch.cos(angle, out=out[:half]).mul_(radius)
        rest = len(out) - half
        torch.sin(angle[:rest], out=out[half:]).mul_(radius[:rest])
        return out

    def _add_rounded(self, values: torch.Tensor, std: float, grid: float, out: torch.Tensor) -> bool:
        """values + N(0, std²), rounded to multiples of `grid`, to `out`; at most 2·_PAIRS of them.

        Gives whether all values are finite.
        """
        count = values.numel()
        self._take()
        try:
            if (
                native.serves(values, out)
                and values.is_contiguous()
                and out.is_contiguous()
                and abs(values.data_ptr() - out.data_ptr()) >= 4 * count
            ):
                self._fill(self._bytes, count + count % 2)
                return native.add_noise(self._words, values, std, grid, out)
            finite, noise = _all_finite(values), self._normals(self._noise[:count], scale=std / grid)
            out.copy_(noise.add_(values.cpu(), alpha=1 / grid).round_().mul_(grid))
            return finite
        finally:
            self._in_use.release()

    def add_noise(self, total: torch.Tensor, std: float, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """`total` (flat, float32 or float64) plus Gaussian noise of deviation `std`, on a grid; in float64.

        With `out`, a flat tensor of the same size (`total` itself is allowed), the result is written there in
        its precision and no memory is taken. `std` 0 adds nothing and rounds nothing: for tests and audits.

        Formal guarantee: noise is added and rounded in float64, and the grid depends on `std` alone.
        - `system`: the grid is the largest power of two not above std·2^-20. The low bits of a float sum tell
          which noise can have led to it (Mironov 2012); after rounding they are gone. A mitigation, no proof.
        - `exact`: the grid is std·2^-20; `total` is rounded to it, and discrete Gaussian noise is added.
          Account with `exact_sensitivity`; the discrete Gaussian then is at least as private in Rényi
          divergence as the continuous one (Canonne, Kamath, Steinke 2020, Theorem 4). Of `total` itself the
          caller must know the sensitivity, with the rounding of its summation.
        """
        if not (std == 0 or 1e-200 <= std <= 1e200):
            raise ConfigError(f"std is {std}: it must be 0 or a positive finite number between 1e-200 and 1e200.")
        if total.dim() != 1 or total.dtype not in (torch.float32, torch.float64):
            raise ConfigError(
                f"total is {total.dtype} of shape {tuple(total.shape)}: give a flat float32 or float64 one."
            )
        total = total.detach()
        if out is None:
            out = torch.empty_like(total, dtype=torch.float64)
        if std == 0:
            finite = _all_finite(total)
            out.copy_(total)
        elif total.numel() <= 2 * _PAIRS:
            finite = self._add_block(total, std, out)
        else:
            blocks = zip(torch.split(total, 2 * _PAIRS), torch.split(out, 2 * _PAIRS), strict=True)
            finite = all(self._add_block(values, std, result) for values, result in blocks)
        if not finite:  # noise hides nothing in an infinite sum, so fail closed
            out.zero_()
            raise PrivetError("The sum to be noised is not finite: the bound must drop non-finite records first.")
        return out

    def _add_block(self, values: torch.Tensor, std: float, out: torch.Tensor) -> bool:
        """At most 2·_PAIRS values, noised, to `out`; gives whether all of them are finite."""
        if self.level != "exact":
            return self._add_rounded(values, std, math.ldexp(1.0, math.frexp(std)[1] - 1 - _GRID_BITS), out)
        if not _all_finite(values):
            return False
        grid = math.ldexp(std, -_GRID_BITS)
        cells = np.rint(values.cpu().double().numpy() / grid).clip(-_EXACT_RANGE, _EXACT_RANGE)
        noised = cells.astype(np.int64) + _discrete_gaussian(self, len(cells), _GRID_BITS)
        out.copy_(torch.from_numpy(noised * grid))
        return True


def _all_finite(values: torch.Tensor) -> bool:
    return math.isfinite(values.sum().item())  # the cheapest test of all entries


def exact_sensitivity(sensitivity: float, size: int, std: float) -> float:
    """The L2 sensitivity of a sum of `size` entries after level `exact` has rounded it to its grid.

    Rounding moves each entry of either neighbour by half a cell, so their difference by a cell; 2^-6 of a
    cell more covers the float64 division by the grid.
    """
    return sensitivity + math.sqrt(size) * math.ldexp(std, -_GRID_BITS) * (1 + 2.0**-6)


def exact_std(std: float, sensitivity: float, size: int) -> float:
    """The deviation at which level `exact` has the noise multiplier that `std` has without rounding.

    Solves exact_sensitivity(sensitivity, size, s) / s = sensitivity / std for s.
    """
    if std == 0 or sensitivity == 0:
        return std
    left = sensitivity / std - exact_sensitivity(0.0, size, 1.0)
    if left <= 0:
        raise ConfigError(
            f"Noise level 'exact' cannot hold a noise multiplier of {std / sensitivity:.4g} over {size} "
            "parameters: the rounding to its grid alone would cost more. Use noise level 'system'."
        )
    return sensitivity / left


# The discrete Gaussian of Canonne, Kamath, Steinke (2020), Algorithms 1 to 3, for a deviation 2^b and all
# entries at once. Every decision compares integers below 2^63: nothing is rounded.


def _bernoulli_exp(source: Source, numerators: npt.NDArray[np.int64], bits: int) -> npt.NDArray[np.bool_]:
    """Coins, True with probability exp(-numerator / 2^bits), for numerators in [0, 2^bits] (Algorithm 1)."""
    accepted = np.zeros(len(numerators), dtype=np.bool_)
    running = np.arange(len(numerators))
    j = 1
    # An entry leaves in round j with probability 1 - γ/j, and is accepted if that round is odd. Round j is
    # reached with probability at most 1/(j-1)!, so that j·2^bits stays far below 2^63.
    while running.size:
        goes_on = source.integers(running.size, j << bits) < numerators[running]
        accepted[running[~goes_on]] = j % 2 == 1
        running = running[goes_on]
        j += 1
    return accepted


def _geometric(source: Source, count: int) -> npt.NDArray[np.int64]:
    """How many coins of probability exp(-1) fall True before the first False."""
    successes = np.zeros(count, dtype=np.int64)
    running = np.arange(count)
    while running.size:
        running = running[_bernoulli_exp(source, np.ones(running.size, dtype=np.int64), 0)]
        successes[running] += 1
    return successes


def _discrete_laplace(source: Source, count: int, bits: int) -> npt.NDArray[np.int64]:
    """Draws with P(y) ∝ exp(-|y| / 2^bits): as many as succeed in `count` attempts (Algorithm 2)."""
    low = source.integers(count, 1 << bits)
    low = low[_bernoulli_exp(source, low, bits)]
    magnitude = low + (_geometric(source, low.size) << bits)
    sign = 1 - 2 * source.integers(low.size, 2)
    return (sign * magnitude)[(magnitude > 0) | (sign > 0)]  # otherwise 0 would come twice as often


def _discrete_gaussian(source: Source, count: int, bits: int) -> npt.NDArray[np.int64]:
    """Draws with P(y) ∝ exp(-y² / 2σ²) on the integers, σ = 2^bits (Algorithm 3, with t = σ)."""
    sigma = 1 << bits
    found = [np.empty(0, dtype=np.int64)]
    missing = count
    while missing > 0:
        proposals = _discrete_laplace(source, 2 * missing + 64, bits)
        # Accept with exp(-(|y| - σ)² / 2σ²). The square fits while |y| < 2^31, or 2^11 σ at the default bits,
        # which fails with probability exp(-2^11).
        exponent = (np.abs(proposals) - sigma) ** 2
        whole, part = exponent >> (2 * bits + 1), exponent & ((1 << (2 * bits + 1)) - 1)
        accepted = _bernoulli_exp(source, part, 2 * bits + 1)
        large = np.flatnonzero(accepted & (whole > 0))
        accepted[large] = _geometric(source, large.size) >= whole[large]
        found.append(proposals[accepted][:missing])
        missing -= found[-1].size
    return np.concatenate(found)


def effective_multiplier(sensitivities: Sequence[float], stds: Sequence[float]) -> float:
    """The noise multiplier of all groups as one mechanism: (Σ_g (Δ_g / s_g)²)^(-1/2).

    Groups that no record moves (Δ_g = 0) cost nothing; a group that records move without noise gives 0.
    """
    if any(s == 0 < d for d, s in zip(sensitivities, stds, strict=True)):
        return 0.0
    norm = math.hypot(*(d / s for d, s in zip(sensitivities, stds, strict=True) if d > 0))
    return 1 / norm if norm else math.inf


def allocate(sensitivities: Sequence[float], sizes: Sequence[int], multiplier: float, rule: Allocation) -> list[float]:
    """The noise deviation s_g of each group, such that all groups together have the noise multiplier wanted.

    - `isotropic`: one deviation for all.
    - `proportional`: s_g ∝ Δ_g.
    - `optimal`: the least total noise Σ_g d_g·s_g², with d_g the group's size: s_g² ∝ Δ_g / √d_g.

    A group with sensitivity 0 does not depend on the records and gets no noise under any rule.

    Formal guarantee: `effective_multiplier(sensitivities, result)` is `multiplier`, to rounding.

    >>> allocate([3.0, 4.0], [10, 10], 2.0, "isotropic")
    [10.0, 10.0]
    """
    if len(sensitivities) != len(sizes):
        raise ConfigError(
            f"There are {len(sensitivities)} sensitivities and {len(sizes)} sizes: give one each per group."
        )
    if not all(0 <= number < math.inf for number in [*sensitivities, *sizes, multiplier]):
        raise ConfigError(
            f"sensitivities {list(sensitivities)}, sizes {list(sizes)} and multiplier {multiplier} "
            "must be finite and not negative."
        )
    moved = [(float(d), int(n)) for d, n in zip(sensitivities, sizes, strict=True) if d > 0]
    if any(n == 0 for _, n in moved):
        raise ConfigError(
            f"sizes are {list(sizes)}: a group of size 0 has sensitivity 0; say so, or leave the group out."
        )
    if rule == "isotropic":
        one = multiplier * math.hypot(*(d for d, _ in moved))
        return [one if d > 0 else 0.0 for d in sensitivities]
    if rule == "proportional":
        return [multiplier * math.sqrt(len(moved)) * d for d in sensitivities]
    if rule == "optimal":
        common = sum(d * math.sqrt(n) for d, n in moved)
        return [
            multiplier * math.sqrt(d / math.sqrt(n) * common) if d > 0 else 0.0
            for d, n in zip(sensitivities, sizes, strict=True)
        ]
    raise ConfigError(f"rule is {rule!r}: choose one of {', '.join(get_args(Allocation))}.")
