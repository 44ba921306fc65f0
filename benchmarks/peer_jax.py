"""jax-privacy as a subject of the audit: its clipped sum, its noise and its way to pad a sample, one step at a time."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from jax_privacy import accounting, batch_selection, clipping, noise_addition
from jax_privacy.experimental import execution_plan

from privet.accounting import Mechanism, Relation
from privet.audit.accountant import check_accounting
from privet.audit.draws import check_sampling
from privet.audit.randomness import check_noise, check_two_worlds
from privet.audit.report import Check
from privet.audit.sensitivity import check_sensitivity
from privet.audit.subject import Outcome, Record, Subject
from privet.noise import Source
from privet.sampling import Poisson, Sample

NOISE, BATCH, DELTA, ROOM = 1.0, 6, 1e-5, 16
ADD_REMOVE = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
REPLACE = dp_accounting.NeighboringRelation.REPLACE_ONE

Privatizer = Callable[[float], optax.GradientTransformation]


def loss(params: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    """Two layers, the first weight used twice; a batch of one record, as `clipped_grad` gives it."""
    logits = jnp.tanh(x @ params["inner"]) @ params["head"] + (x @ params["inner"])[:, :3]
    return jnp.sum(optax.softmax_cross_entropy_with_integer_labels(logits, y))


def parameters() -> dict[str, jax.Array]:
    first, second = jax.random.split(jax.random.key(0))
    return {"inner": 0.4 * jax.random.normal(first, (8, 8)), "head": 0.4 * jax.random.normal(second, (8, 3))}


class JaxSubject(Subject):
    """A clipped sum, with the sensitivity that it declares itself, and a privatizer over it.

    Args:
        clipped: from `clipped_grad`, or made by an execution plan.
        divisor: what it divides by, so that the sum can be had again.
        privatizer: by the deviation of its noise; a plan chose that itself.
    """

    relation: Relation = "add_remove"
    basis: Relation = "add_remove"
    noise_multiplier, delta = NOISE, DELTA

    def __init__(self, name: str, clipped: Any, privatizer: Privatizer, divisor: float = 1.0) -> None:
        self.name, self.divisor = name, divisor
        random = torch.Generator().manual_seed(0)
        inputs = torch.randn(12, 8, generator=random)
        self.base = [Record(i, x, torch.tensor(i % 3)) for i, x in enumerate(inputs)]
        self.deltas: dict[Relation, float] = {
            "add_remove": clipped.sensitivity(ADD_REMOVE) * divisor,
            "replace_one": clipped.sensitivity(REPLACE) * divisor,
        }
        self._clipped, self._params = jax.jit(clipped.fun), parameters()
        self._noise = privatizer(NOISE * clipped.sensitivity(ADD_REMOVE))
        self._state = self._noise.init(self._params)
        self._update = jax.jit(self._noise.update)

    def step(self, sample: Sequence[Record], *, noise: bool) -> Outcome:
        """Their own padding brings each sample to the same size; -1 is nobody."""
        (places,) = batch_selection.split_and_pad_global_batch(np.arange(len(sample)), ROOM)
        x, y = np.zeros((ROOM, 8), np.float32), np.zeros(ROOM, np.int32)
        for row, place in enumerate(places):
            if place >= 0:
                x[row], y[row] = sample[place].x.numpy(), int(sample[place].y)
        total = self._clipped(
            self._params, jnp.asarray(x), jnp.asarray(y), is_padding_example=jnp.asarray(places == -1)
        )
        if noise:
            total, self._state = self._update(total, self._state)
        flat = np.concatenate([np.asarray(part, np.float64).ravel() for part in jax.tree.leaves(total)])
        return Outcome(
            sums={"gradient": torch.from_numpy(flat * self.divisor)},
            sensitivities={"gradient": dict(self.deltas)},
            stds={"gradient": NOISE * self.deltas["add_remove"]},
        )


def gaussian(std: float) -> optax.GradientTransformation:
    return noise_addition.gaussian_privatizer(stddev=std, prng_key=jax.random.key(7))


def make(name: str, divisor: float = 1.0, **options: Any) -> JaxSubject:
    clipped = clipping.clipped_grad(loss, batch_argnums=(1, 2), normalize_by=divisor, **options)
    return JaxSubject(name, clipped, gaussian, divisor)


def make_plan() -> JaxSubject:
    """The experimental plan puts clipping and noise together itself."""
    plan = execution_plan.BandMFExecutionPlanConfig(
        iterations=1000,
        strategy=np.ones(1),
        epsilon=None,
        delta=None,
        noise_multiplier=NOISE,
        l2_clip_norm=0.5,
        normalize_by=float(BATCH),
        sampling_prob=0.5,
        partition_type=batch_selection.PartitionType.INDEPENDENT,
        accountant=dp_accounting.pld.PLDAccountant(ADD_REMOVE),
        noise_seed=7,
    ).plan
    clipped = plan.clipped_grad(loss, batch_argnums=(1, 2))
    return JaxSubject("execution plan, one band", clipped, lambda _: plan.noise_addition_transform, float(BATCH))


# Probes


def check_small_entries() -> list[Check]:
    """`clip_pytree` states a norm of at most clip_norm (or 1); entries whose squares underflow put it to the test."""
    half = jnp.full(10**6, 1e-4, jnp.float16)
    tiny = jnp.concatenate([jnp.array([1.2e-19]), jnp.full(10**4, 1e-19)]).astype(jnp.float32)
    cases = [
        ("float16, clip_norm=0.01, a million entries of 1e-4", half, 0.01, False),
        ("float16, clip_norm=1, a million entries of 1e-4", half, 1.0, False),
        ("float32, clip_norm=0.01, ten thousand entries of 1e-19", tiny, 0.01, False),
        ("float32, clip_norm=0, rescale_to_unit_norm, ten thousand entries of 1e-19", tiny, 0.0, True),
    ]
    checks = []
    for name, entries, clip, rescale in cases:
        clipped, _ = clipping.clip_pytree({"g": entries}, clip, rescale_to_unit_norm=rescale)
        norm = float(np.linalg.norm(np.asarray(clipped["g"], np.float64)))
        bound = 1.0 if rescale else clip
        # 1e-3 for the rounding of float16 itself
        checks.append(
            Check(name=f"norm after clip_pytree: {name}", holds=norm <= bound * 1.001, measured=norm, bound=bound)
        )
    return checks


def check_half_sum() -> Check:
    """The first of the cases above in whole: a gradient in float16 that one record adds to the sum."""
    clipped = clipping.clipped_grad(lambda w, x: jnp.sum(w * x), l2_clip_norm=0.01, batch_argnums=1)
    weight = jnp.zeros(10**6, jnp.float16)
    others = jnp.zeros((2, 10**6), jnp.float16)
    record = jnp.full((1, 10**6), 1e-4, jnp.float16)
    moved = np.asarray(clipped(weight, jnp.concatenate([others, record])), np.float64)
    moved -= np.asarray(clipped(weight, others), np.float64)
    found, bound = float(np.linalg.norm(moved)), float(clipped.sensitivity(ADD_REMOVE))
    return Check(
        name="clipped_grad of a float16 model, l2_clip_norm=0.01: what one record adds",
        holds=found <= bound * 1.001,
        measured=found,
        bound=bound,
        detail="against its own .sensitivity(); without dtype=float32",
    )


def check_empty() -> list[Check]:
    """What becomes of an empty Poisson sample."""
    clipped = clipping.clipped_grad(loss, batch_argnums=(1, 2), l2_clip_norm=1.0)
    nobody = np.array([], np.int32)
    checks = []
    for how, places in (
        ("as it is", nobody),
        ("padded by pad_to_multiple_of", batch_selection.pad_to_multiple_of(nobody, ROOM)),
        ("padded by split_and_pad_global_batch", batch_selection.split_and_pad_global_batch(nobody, ROOM)[0]),
    ):
        size = len(places)
        try:
            clipped(
                parameters(), jnp.zeros((size, 8)), jnp.zeros(size, int), is_padding_example=jnp.asarray(places == -1)
            )
            measured, detail = "a sum of zeros", ""
        except ValueError as error:
            measured, detail = "ValueError", str(error)
        name = f"an empty sample, {how}"
        checks.append(Check(name=name, holds=not detail, measured=measured, bound="a sum of zeros", detail=detail))
    return checks


def check_default_key() -> list[Check]:
    """Where a privatizer's randomness comes from if nobody says."""

    def state() -> np.ndarray:
        return np.asarray(jax.random.key_data(noise_addition.gaussian_privatizer(stddev=1.0).init(parameters())[0]))

    keys = np.stack([state() for _ in range(200)])
    used = int(np.bitwise_or.reduce(keys.astype(np.uint64) @ np.array([2**32, 1], np.uint64))).bit_count()
    np.random.seed(0)  # as a script does that wants to be repeated
    first = state()
    np.random.seed(0)
    same = np.array_equal(first, state())
    return [
        Check(
            name="bits that differ between default keys",
            holds=used > 31,
            measured=used,
            bound=64,
            detail="over 200 privatizers; a key has 64",
        ),
        Check(
            name="default keys of two runs that both call np.random.seed(0)",
            holds=not same,
            measured="the same" if same else "different",
            bound="different",
        ),
    ]


def check_accountants() -> list[Check]:
    checks = []
    methods = accounting.SamplingMethod
    configs = {"PLD": accounting.PldAccountantConfig(), "RDP": accounting.RdpAccountantConfig()}
    for kind, config in configs.items():
        for noise, method in (
            (1.0, methods.POISSON),
            (0.6, methods.POISSON),
            (np.float32(1.0), methods.POISSON),
            (2.0, methods.FIXED_BATCH_SIZE),
        ):
            params = accounting.DpParams(
                noise_multipliers=noise, num_samples=10_000, delta=DELTA, batch_size=100, sampling_method=method
            )
            claimed = float(accounting.DpsgdTrainingAccountant(config).compute_epsilon(500, params))
            if method is methods.POISSON:
                mechanism = Mechanism(kind="poisson", noise_multiplier=float(noise), rate=0.01)
            else:  # theirs is over the clipping norm, Privet's over what an exchange moves
                mechanism = Mechanism(
                    kind="fixed_size",
                    noise_multiplier=float(noise) / 2,
                    relation="replace_one",
                    records=10_000,
                    batch=100,
                )
            found = check_accounting(mechanism, 500, claimed, DELTA)
            name = f"{kind}, {method.name}, noise {noise!r}, rate 0.01, 500 steps: {found.name}"
            checks.append(Check(name=name, holds=found.holds, measured=found.measured, bound=found.bound))
    return checks


@dataclass(frozen=True, kw_only=True)
class Drawn(Poisson):
    """Accounted as Poisson and drawn by jax-privacy."""

    def _samples(
        self, *, size: int, records: int, source: Source, epoch_key: bytes | None, start: int, steps: int
    ) -> Iterator[Sample]:
        rng = np.random.default_rng(int(source.words(1)[0]))
        drawn = batch_selection.CyclicPoissonSampling(sampling_prob=self.batch / records, iterations=steps)
        for places in drawn.batch_iterator(size, rng):
            yield np.sort(places.astype(np.int64))


def audit() -> dict[str, list[Check]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sections: dict[str, list[Check]] = {}
        for subject in (
            make("clipped_grad, l2_clip_norm=1", l2_clip_norm=1.0),
            make(
                "clipped_grad, l2_clip_norm=0.1, rescaled, normalize_by=6, microbatches of 4",
                float(BATCH),
                l2_clip_norm=0.1,
                rescale_to_unit_norm=True,
                microbatch_size=4,
            ),
            make_plan(),
        ):
            checks, worst = check_sensitivity(subject)
            assert worst is not None
            sections[subject.name] = [*checks, *check_noise(subject), check_two_worlds(subject, worst)[0]]
        unsafe = make("clipped_grad, nan_safe=False", l2_clip_norm=1.0, nan_safe=False)
        sections[unsafe.name] = check_sensitivity(unsafe)[0][:1]
        sections["entries whose squares underflow"] = [*check_small_entries(), check_half_sum()]
        sections["empty samples"] = check_empty()
        sections["default key"] = check_default_key()
        sections["accountants"] = check_accountants()
        sections["sampling, CyclicPoissonSampling"] = check_sampling(
            Drawn(batch=16), "add_remove", Source("seeded", seed=0)
        )
        return sections
