"""Batch clipping with record_groups='user': each user is clipped as one and moves the sum by C at most."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from grouped import clipped, close, entropy, flat, linear, mean_gradient, problem, release, running
from torch.utils.data import TensorDataset

from privet import Poisson
from privet.methods import Sensitivity
from privet.methods.batch import Batch

USERS = [(7 * i) % 11 for i in range(40)]
"""Eleven users with interleaved records, in order of their first: 0, 7, 3, 10, 6, …"""


def of_user(user: int) -> list[int]:
    return [i for i, u in enumerate(USERS) if u == user]


@pytest.mark.parametrize("physical", [2, 100])
@pytest.mark.parametrize("clip", [0.05, 100.0])
def test_users_are_clipped_each_as_one(clip: float, physical: int) -> None:
    model, chosen = linear(), Batch(clip=clip, record_groups="user")
    for users in (USERS, [f"user {u}" for u in USERS], torch.tensor(USERS), np.array(USERS)):
        with running(model, chosen, users=users, physical_batch=physical, sampling=Poisson(batch=4)) as run:
            found = flat(release(run, [0, 2, 3]))  # users by the order of their first records: 0, 3 and 10
            assert run.size == run.records == 11
            (query,) = run.session.finish()
            assert query.sensitivity == Sensitivity(add_remove=clip, replace_one=2 * clip)
        close(found, sum(clipped(mean_gradient(model, of_user(u)), clip) for u in (0, 3, 10)))


def test_the_order_of_records_does_not_matter_to_users() -> None:
    model, order = linear(), np.random.default_rng(0).permutation(40)
    x, y = problem(40).tensors
    sums = []
    for records in (np.arange(40), order, np.argsort(USERS, kind="stable")):
        users = [USERS[i] for i in records]
        numbers = {user: number for number, user in enumerate(dict.fromkeys(users))}
        dataset = TensorDataset(x[records], y[records])
        with running(model, Batch(clip=0.05, record_groups="user"), dataset, users=users) as run:
            sums.append(flat(release(run, [numbers[u] for u in (1, 4, 5)])))
    close(sums[0], sums[1])
    close(sums[0], sums[2])


@pytest.mark.parametrize("scale", [1e-3, 1e3, 1e20, math.nan])
def test_a_hostile_user_moves_the_sum_by_the_clip_at_most(scale: float) -> None:
    model, (x, y) = linear(), problem(40).tensors
    x[of_user(6)] *= scale
    with running(model, Batch(clip=0.05, record_groups="user"), TensorDataset(x, y), users=USERS) as run:
        numbers = list(dict.fromkeys(USERS))
        others = [numbers.index(u) for u in (1, 2, 3)]
        moved = flat(release(run, [*others, numbers.index(6)])) - flat(release(run, others))
    assert moved.norm() <= 0.05 * (1 + 1e-5)
    assert scale != 1e3 or moved.norm() > 0.05 * (1 - 1e-4)


def test_users_take_local_steps_too() -> None:
    model, expected = linear(), torch.zeros(38, dtype=torch.float64)
    for user in (0, 3):
        local = linear()
        x, y = (t[of_user(user)] for t in problem(40).tensors)
        steps = torch.optim.SGD(local.parameters(), lr=0.3)
        for _ in range(3):
            steps.zero_grad()
            entropy(local, x, y).mean().backward()
            steps.step()
        pairs = zip(model.parameters(), local.parameters(), strict=True)
        expected += clipped(torch.cat([(p - q).detach().double().flatten() for p, q in pairs]) / 0.3, 0.2)
    with running(model, Batch(clip=0.2, record_groups="user", local_steps=3, local_lr=0.3), users=USERS) as run:
        torch.testing.assert_close(flat(release(run, [0, 2])), expected, rtol=1e-3, atol=1e-5)
