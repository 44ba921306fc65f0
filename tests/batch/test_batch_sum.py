"""Batch clipping: the sum is the naive one, and a record can move one group's vector by 2C and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from conftest import Unit, bumpy_losses
from grouped import SETTING, B, bounded, close, images, naive, network, normalised, step
from torch import Tensor, nn

from privet.methods.batch import Batch

# The sum


@pytest.mark.parametrize("clip", [1e-3, 1.0, 1e6])
@pytest.mark.parametrize("build", [network, lambda: normalised(track_running_stats=False)], ids=["plain", "batchnorm"])
def test_the_sum_is_the_naive_one(build: Callable[[], nn.Module], clip: float) -> None:
    model, x = build(), images(12)
    parts = [(x[:3],), (x[3:4],), (x[4:],)] if isinstance(model[0], nn.Conv2d) else [(x[:3],), (x[3:6],), (x[6:],)]  # type: ignore[index]
    for units in (parts, [(x,)]):
        chosen = Batch(clip=clip, record_groups=len(units))
        close(bounded(chosen, model, [[u] for u in units]).total, naive(chosen, model, units))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("clip", [1e-3, 1e6])
def test_a_group_in_chunks_is_clipped_once(clip: float) -> None:
    model, x = network(), images(12)
    chosen = Batch(clip=clip, record_groups=2)
    chunked = bounded(chosen, model, [[(x[:4],), (x[4:5],), (x[5:7],)], [(x[7:11],), (x[11:],)]])
    close(chunked.total, naive(chosen, model, [(x[:7],), (x[7:],)]))


def test_empty_groups_and_empty_samples_add_zero() -> None:
    model, x = network(), images(3)
    chosen = Batch(record_groups=3)
    close(bounded(chosen, model, [[], [(x,)], []]).total, naive(chosen, model, [(x,)]))
    assert not bounded(chosen, model, []).total.any()


def test_a_step_starts_from_zero() -> None:
    model, x = network(), images(8)
    session = Batch().open(model, SETTING)
    first = step(session, model, [[(x,)]]).total.clone()
    with session.listening():
        session.add(bumpy_losses(model, x[:2]))  # of a step that is left
    assert torch.equal(step(session, model, [[(x,)]]).total, first)


# Groups


# Sensitivity, exactly: noise off, f(D ∪ {x}) − f(D) for hostile x


def squared(model: nn.Module, x: Tensor, targets: Tensor) -> Tensor:
    return (model(x) - targets).square().sum(1)


def hostile() -> list[tuple[Tensor, Tensor]]:
    x, y = images(1, seed=9), torch.zeros(1, 3)
    scales = [1.0, 1e-30, 1e-6, 0.0, 1e6, 1e18, 1e30, -1.0, math.nan, math.inf]
    return [(x * scale, y + target) for scale in scales for target in (0.0, 1e3, -1e3, 1e18, math.nan)]


@pytest.mark.parametrize("build", [network, lambda: normalised(track_running_stats=False)], ids=["plain", "batchnorm"])
@pytest.mark.parametrize("groups", [1, 2])
def test_one_record_moves_the_sum_by_no_more_than_its_sensitivity(build: Callable[[], nn.Module], groups: int) -> None:
    model, chosen = build(), Batch(clip=0.5, record_groups=groups)
    others, y = images(8), torch.ones(8, 3)
    rest: list[Unit] = [[(others[4:], y[4:])]] if groups == 2 else []
    sums = [bounded(chosen, model, [[(others[:4], y[:4])], *rest], squared).total.double()]
    for x, target in hostile():
        unit = (torch.cat([others[:4], x]), torch.cat([y[:4], target]))
        query = bounded(chosen, model, [[unit], *rest], squared)
        assert torch.isfinite(query.total).all()
        assert query.sensitivity.add_remove == query.sensitivity.replace_one == 2 * 0.5 * B / groups
        sums.append(query.total.double())
    apart = torch.pdist(torch.stack(sums))  # added, and exchanged for one another
    assert apart.max() <= 2 * 0.5 * B / groups * (1 + 1e-6)


@pytest.mark.parametrize("groups", [1, 3])
def test_a_record_can_turn_its_groups_vector_around(groups: int) -> None:
    """So the factor 2 is needed under add_remove: from +C to −C."""
    model, chosen = nn.Linear(1, 1, bias=False), Batch(clip=0.5, record_groups=groups)
    slope = lambda m, x: m(x).squeeze(1)  # noqa: E731 - the gradient is x itself
    ordinary = torch.ones(5, 1)
    before = bounded(chosen, model, [[(ordinary,)]], slope)
    after = bounded(chosen, model, [[(torch.cat([ordinary, torch.full((1, 1), -100.0)]),)]], slope)
    moved = (before.total - after.total).norm().item()
    assert 0.999 * before.sensitivity.add_remove < moved <= before.sensitivity.add_remove
    assert before.sensitivity.add_remove == 2 * 0.5 * B / groups


@pytest.mark.parametrize("scale", [1e-3, 1.0, 7.0, 1e12, 1e25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_vector_is_never_above_the_threshold(scale: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Linear(997, 3, dtype=dtype)
    for seed in range(10):
        x = torch.randn(6, 997, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
        query = bounded(Batch(clip=0.7), model, [[(x[:4].to(dtype),), (x[4:].to(dtype),)]], lambda m, x: m(x).sum(1))
        assert query.total.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert query.total.double().norm() <= 0.7 * B
        if scale >= 1:
            assert query.total.double().norm() > 0.7 * B * (1 - 1e-5)


def test_a_factor_too_small_for_float32_leaves_the_group_out() -> None:
    model = nn.Linear(3, 1, bias=False)
    query = bounded(Batch(clip=1e-7), model, [[(torch.full((1, 3), 3e38),)]], lambda m, x: m(x).squeeze(1) * 1e-30)
    assert query.total.norm() > 0
    query = bounded(Batch(clip=1e-7), model, [[(torch.full((1, 3), 1.1e38),)]], lambda m, x: m(x).squeeze(1))
    assert not query.total.any()


def test_the_sum_under_autocast_is_float32_and_bounded() -> None:
    model, x, chosen = network(), images(8), Batch(clip=0.5)

    def lower(m: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return bumpy_losses(m, x)

    total = bounded(chosen, model, [[(x,)]], lower).total
    assert total.dtype == torch.float32 and total.double().norm() <= 0.5 * B
    torch.testing.assert_close(total.double(), naive(chosen, model, [(x,)]), rtol=0.1, atol=0.05)


# Records that are not finite


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_left_out(bad: float) -> None:
    model, x, chosen = network(), images(4), Batch(clip=1e6)
    found = bounded(chosen, model, [[(x,)]], lambda m, x: bumpy_losses(m, x) + torch.tensor([0.0, 0.0, bad, 0.0]))
    close(found.total, naive(chosen, model, [(x[[0, 1, 3]],)]))
    only = bounded(chosen, model, [[(x[:1],)]], lambda m, x: bumpy_losses(m, x) + bad)
    assert not only.total.any()


def test_a_group_that_a_record_made_not_finite_adds_nothing_and_the_others_stay() -> None:
    model, x, chosen = network(), images(6), Batch(record_groups=2)
    x[1] = math.nan
    close(bounded(chosen, model, [[(x[:2],), (x[2:3],)], [(x[3:],)]]).total, naive(chosen, model, [(x[3:],)]))


def test_a_finite_loss_with_a_gradient_that_is_not_adds_nothing() -> None:
    model = nn.Linear(2, 1, bias=False)
    root = lambda m, x: m(x).square().sum(1).sqrt()  # noqa: E731
    assert not bounded(Batch(), model, [[(torch.zeros(1, 2),)]], root).total.any()
    assert bounded(Batch(), model, [[(torch.ones(1, 2),)]], root).total.any()
