"""Batch clipping: models, options and uses without a meaning are refused, and what a user may change is followed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import bumpy_losses
from grouped import SETTING, bounded, close, flat, images, linear, naive, network, release, running, step
from torch import Tensor, nn

from privet import ConfigError, Refused, method
from privet.methods.batch import Batch

# Models


@pytest.mark.parametrize("layer", [nn.Embedding(5, 3, max_norm=1.0), nn.EmbeddingBag(5, 3, max_norm=1.0)])
def test_an_embedding_that_rewrites_its_weights_is_refused(layer: nn.Module) -> None:
    with pytest.raises(Refused, match="max_norm"):
        Batch().open(nn.Sequential(layer), SETTING)


def test_sparse_gradients_are_those_of_a_dense_layer() -> None:
    tokens = torch.tensor([[1, 2], [1, 1], [0, 4]])
    totals = []
    for sparse in (False, True):
        torch.manual_seed(0)
        totals.append(bounded(Batch(), nn.Sequential(nn.Embedding(5, 3, sparse=sparse)), [[(tokens,)]]).total)
    close(*totals)


def test_a_backward_pass_of_the_users_own_is_refused_and_dropped() -> None:
    model, x = network(), images(4)
    session = Batch().open(model, SETTING)
    session.begin()
    with pytest.raises(Refused, match=r"step.backward\(losses\)"), session.listening():
        session.add(bumpy_losses(model, x))
        bumpy_losses(model, x).mean().backward()
    assert all(p.grad is None for p in model.parameters())


def test_frozen_layers_leave_the_sum_and_new_parameters_are_refused() -> None:
    model, x = network(), images(6)
    session, chosen = Batch(clip=0.1).open(model, SETTING), Batch(clip=0.1)
    for frozen in (True, False):
        model[0].requires_grad_(not frozen)  # type: ignore[index]
        query = step(session, model, [[(x,)]])
        assert query.group is not None and ("0.weight" in query.group.parameters) is not frozen
        close(query.total, naive(chosen, model, [(x,)]))
    model.extra = nn.Linear(3, 3)
    with pytest.raises(Refused, match=r"'extra\.(weight|bias)' was added"):
        session.begin()


def test_a_parameter_that_no_loss_reaches_gets_zero() -> None:
    model, x = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), torch.ones(3, 2)
    query = bounded(Batch(), model, [[(x,)]], lambda m, x: m[0](x).sum(1))
    assert query.group is not None
    parts = query.group.split(query.total)
    assert parts["0.weight"].any() and not parts["1.weight"].any()


# Options


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"clip": 0}, "clip must be a positive number, and is 0"),
        ({"clip": math.nan}, "clip must be"),
        ({"record_groups": 0}, "record_groups must be a whole number of at least 1"),
        ({"record_groups": 1.5}, "record_groups must be"),
        ({"record_groups": True}, "record_groups must be"),
    ],
)
def test_settings_without_a_meaning_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        method("batch", **options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"local_steps": 0}, "local_steps must be a whole number of at least 1"),
        ({"local_lr": 0.0}, "local_lr must be a positive number"),
        ({"local_optimizer": "Magic"}, "name a first-order one of torch.optim"),
        ({"local_optimizer": "LBFGS"}, "name a first-order one of torch.optim"),
        ({"local_momentum": 1.0}, "local_momentum must be at least 0 and below 1"),
        ({"local_optimizer": "Adam", "local_momentum": 0.5}, "belongs to local_optimizer SGD"),
        ({"sparsify": -1}, "sparsify must be a whole number of at least 0"),
        ({"sparsify": 2, "factors": True, "groups": "layer"}, "cannot be had together"),
        ({"record_groups": "all"}, "'each' or 'user', and is 'all'"),
    ],
)
def test_options_of_groups_without_a_meaning_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        method("batch", **options)


@pytest.mark.parametrize("options", [{"local_steps": 2}, {"sparsify": 2}])
def test_groups_of_one_record_have_no_steps_of_their_own(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="without local steps or sparsify"):
        Batch(record_groups="each", **options).open(linear(), SETTING)


def test_groups_of_one_record_must_be_independent_of_each_other() -> None:
    """They are per-example clipping, so what holds there holds here: made-up records are tried first."""

    def centred(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        output = model(x)
        return F.cross_entropy(output - output.mean(0), y, reduction="none")

    with running(linear(), Batch(record_groups="each")) as run, pytest.raises(Refused, match="another record"):
        release(run, range(10), centred)
    with running(linear(), Batch()) as run:
        assert run.statement()["independence_checked"] == "not needed"
        assert flat(release(run, range(10), centred)).any()
