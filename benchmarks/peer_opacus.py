"""Opacus as a subject of the audit: its own engine, loader, model wrapper, loss and optimizer, one step at a time."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from opacus import PrivacyEngine
from opacus.accountants import create_accountant
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from opacus.validators import ModuleValidator
from screened import Screened
from torch import Tensor, nn
from torch.utils.data import DataLoader

from privet.accounting import Mechanism, Relation
from privet.audit.accountant import check_accounting
from privet.audit.draws import check_sampling
from privet.audit.randomness import ERROR, check_noise, check_two_worlds
from privet.audit.replay import check_replay
from privet.audit.report import Check
from privet.audit.sensitivity import STRANGER, check_sensitivity
from privet.audit.statistics import epsilon_lower_from_rates, upper
from privet.audit.subject import Outcome, Record, Subject, Tape
from privet.noise import Source
from privet.sampling import Poisson, Sample

CLIP, NOISE, BATCH, DELTA = 1.0, 1.0, 6, 1e-5


class OpacusSubject(Subject):
    """What lies in `p.grad` after `optimizer.pre_step()`, times the batch size that Opacus divided it by.

    Args:
        mode: "hooks" or "ghost".
        public_size: the loader always sees as many records as the base has; else those that the training has.
    """

    relation: Relation = "add_remove"
    basis: Relation = "add_remove"
    noise_multiplier, delta = NOISE, DELTA

    def __init__(self, model: nn.Module, mode: str, *, name: str, public_size: bool = True, clip: float = CLIP) -> None:
        self.name, self.mode, self.public_size, self.clip = f"{name}, {mode} mode", mode, public_size, clip
        random = torch.Generator().manual_seed(0)
        inputs = torch.randn(12, 8, generator=random)
        self.base = [Record(i, x, torch.tensor(i % 3)) for i, x in enumerate(inputs)]
        self._model = copy.deepcopy(model)
        self._parts = self._private(self.base)
        self._start = copy.deepcopy(self._parts.module.state_dict())

    def _private(self, records: Sequence[Record]) -> Parts:
        return private(copy.deepcopy(self._model), [(r.x, r.y) for r in records], self.mode, BATCH, self.clip, NOISE)

    def step(self, sample: Sequence[Record], *, noise: bool) -> Outcome:
        parts = self._parts
        parts.module.load_state_dict(self._start)
        parts.optimizer.noise_multiplier = NOISE if noise else 0.0
        parts.backward([(r.x, r.y) for r in sample])
        parts.optimizer.pre_step()
        total = torch.cat([p.grad.double().flatten() for p in parts.optimizer.params])
        return Outcome(
            sums={"gradient": total * parts.optimizer.expected_batch_size},
            sensitivities={"gradient": {"add_remove": self.clip, "replace_one": 2 * self.clip}},
            stds={"gradient": NOISE * self.clip},
        )

    def gradient(self, record: Record) -> Callable[[Tensor], Tensor] | None:
        model = self._model

        def gradient(x: Tensor) -> Tensor:
            loss = F.cross_entropy(model(x.unsqueeze(0)), record.y.unsqueeze(0))
            trained = [p for p in model.parameters() if p.requires_grad]
            return torch.cat([g.flatten() for g in torch.autograd.grad(loss, trained, create_graph=True)])

        return gradient

    def train(self, samples: Sequence[Sequence[Record]], tape: Tape | None = None) -> tuple[Tape, dict[str, Any]]:
        everyone = {record.number: record for sample in samples for record in sample}
        played, played_back = Tape(), iter(tape.outputs if tape else ())
        facts: dict[str, Any] = {}
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            parts = self._private(self.base if self.public_size else list(everyone.values()))
            add_noise = parts.optimizer.add_noise

            def recorded() -> None:
                add_noise()
                for p in parts.optimizer.params:
                    if tape is None:
                        played.outputs.append(p.grad.clone())
                    else:
                        p.grad.copy_(next(played_back))

            parts.optimizer.add_noise = recorded
            for number, sample in enumerate(samples):
                parts.backward([(r.x, r.y) for r in sample])
                parts.optimizer.step()
                for name, p in parts.module.named_parameters():
                    facts[f"gradient of {name} in step {number}"] = None if p.grad is None else p.grad.clone()
                for name, value in parts.module.state_dict().items():
                    facts[f"{name} after step {number}"] = value.clone()
            facts["batch size divided by"] = parts.optimizer.expected_batch_size
            facts["sampling rate told to the accountant"] = parts.engine.accountant.history[-1][1]
            facts["claimed epsilon"] = parts.engine.get_epsilon(DELTA)
        facts["warnings"] = sorted({str(w.message) for w in heard})
        return tape or played, facts


@dataclass
class Parts:
    """What `make_private` gave."""

    engine: PrivacyEngine
    module: nn.Module
    optimizer: Any
    criterion: Any
    loader: DataLoader[Any]

    def backward(self, sample: list[tuple[Tensor, Tensor]]) -> None:
        """As a training loop does it, on a sample that Opacus's own loader put together (it knows empty ones)."""
        x, y = self.loader.collate_fn(sample)
        self.optimizer.zero_grad()
        self.criterion(self.module(x), y).backward()


def private(
    model: nn.Module, records: list[tuple[Tensor, Tensor]], mode: str, batch: int, clip: float, noise: float
) -> Parts:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = PrivacyEngine()
        given = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
            data_loader=DataLoader(records, batch_size=batch),  # type: ignore[arg-type]
            noise_multiplier=noise,
            max_grad_norm=clip,
            grad_sample_mode=mode,
        )
    module, optimizer, *criterion, loader = given
    return Parts(engine, module, optimizer, criterion[0] if criterion else nn.CrossEntropyLoss(), loader)


# Models


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))


def with_batch_norm(kind: str) -> nn.Module:
    """Over positions too, so that a sample of one record is allowed."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(4, affine=kind != "without affine")
    if kind == "frozen affine":
        norm.requires_grad_(False)
    features = nn.Sequential(nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 4, 3), norm, nn.Tanh(), nn.Flatten())
    return nn.Sequential(features, nn.Linear(24, 3))


class Reuse(nn.Module):
    """A layer's weight, used by the layer and once more by a function."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(x))) + F.linear(x, self.inner.weight)[:, :3]


class Tied(nn.Module):
    """One parameter in two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(torch.tanh(self.first(x))))


# Probes


def check_not_a_number(mode: str, value: float) -> Check:
    """One bad record among twelve good ones: how much of the update survives."""
    subject = OpacusSubject(mlp(), mode, name="")
    bad = Record(STRANGER, torch.full((8,), value), torch.tensor(0))
    total = subject.step([bad, *subject.base], noise=True).sums["gradient"]
    lost = int((~torch.isfinite(total)).sum())
    return Check(
        name=f"one record of {value} in 13, {mode} mode: entries of the noisy update that are not finite",
        holds=lost == 0,
        measured=lost,
        bound=0,
        detail=f"of {len(total)} entries",
    )


def check_divisor(trials: int = 300) -> list[Check]:
    """1000 records and 1001, batch size 100: one noisy gradient of each, told apart by its spread alone.

    All inputs are zero, so that the first layer's clipped gradients are exactly zero and p.grad is noise alone.
    """
    noise, spreads, facts = 2.0, {}, {}
    for size in (1000, 1001):
        records = [(torch.zeros(2000), torch.tensor(i % 2)) for i in range(size)]
        torch.manual_seed(0)
        parts = private(nn.Linear(2000, 2), records, "hooks", 100, CLIP, noise)
        spreads[size] = []
        for positions in _forever(parts.loader, trials):
            parts.backward([records[i] for i in positions])
            parts.optimizer.pre_step()
            spreads[size].append(float(parts.module._module.weight.grad.std()))
        one = create_accountant("prv")
        one.step(noise_multiplier=noise, sample_rate=1 / len(parts.loader))
        facts[size] = (parts.optimizer.expected_batch_size, 1 / len(parts.loader), one.get_epsilon(DELTA))
    (batch, rate, claim), (batch_more, rate_more, claim_more) = facts[1000], facts[1001]
    threshold = CLIP * noise * (1 / batch + 1 / batch_more) / 2
    errors = sum(s > threshold for s in spreads[1000]), sum(s <= threshold for s in spreads[1001])
    found = epsilon_lower_from_rates(*(upper(e, trials, ERROR / 2) for e in errors), DELTA)
    return [
        Check(
            name="divisor with one record more (1000 to 1001, batch_size=100)",
            holds=batch == batch_more,
            measured=batch_more,
            bound=batch,
            detail=f"sampling rate {rate_more:.4f} in place of {rate:.4f}",
        ),
        Check(
            name="1000 and 1001 records told apart by the spread of one released gradient",
            holds=bool(found <= max(claim, claim_more)),
            measured=found,
            bound=float(max(claim, claim_more)),
            detail=f"epsilon of one step, delta {DELTA:g}; {errors[0]} and {errors[1]} errors in {trials} trials each",
        ),
    ]


def _forever(loader: DataLoader[Any], count: int) -> Iterator[list[int]]:
    while True:
        for positions in loader.batch_sampler:  # type: ignore[union-attr]
            if count == 0:
                return
            count -= 1
            yield positions


def check_batch_norm(kind: str) -> list[Check]:
    """Refused, or else what one record does in a model that has it."""
    model = with_batch_norm(kind)
    errors = ModuleValidator.validate(model, strict=False)
    if errors:
        return [_refusal(f"BatchNorm, {kind}", type(errors[0]).__name__)]
    subject = Screened(OpacusSubject(model, "hooks", name=f"BatchNorm, {kind}"))
    refusal = Check(name=f"BatchNorm, {kind}: refused", holds=False, measured="passes ModuleValidator and make_private")
    checks, worst = check_sensitivity(subject)
    assert worst is not None
    return [refusal, *_named(f"BatchNorm, {kind}", checks[:2] + check_replay(subject, worst)[:1])]


def check_reuse(mode: str) -> list[Check]:
    subject = Screened(OpacusSubject(Reuse(), mode, name="functional reuse"))
    checks, worst = check_sensitivity(subject)
    assert worst is not None
    found, _, _ = check_two_worlds(subject, worst)
    loose = OpacusSubject(Reuse(), mode, name="", clip=1e6)
    released = loose.step(loose.base, noise=False).sums["gradient"]
    model = Reuse()
    x, y = torch.stack([r.x for r in loose.base]), torch.stack([r.y for r in loose.base])
    F.cross_entropy(model(x), y, reduction="sum").backward()
    true = torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])
    error = float((released - true).norm() / true.norm())
    right = Check(
        name="gradient without clipping against autograd's",
        holds=error < 1e-4,
        measured=error,
        bound=1e-4,
        detail="relative error",
    )
    return _named(f"functional reuse, {mode} mode", [*checks[:2], found, right])


def check_tied(mode: str) -> list[Check]:
    try:
        subject = Screened(OpacusSubject(Tied(), mode, name="tied"))
        checks, _ = check_sensitivity(subject)
    except NotImplementedError as error:
        return [_refusal(f"one parameter in two layers, {mode} mode", str(error))]
    return _named(f"one parameter in two layers, {mode} mode", checks[:2])


def _refusal(what: str, how: str) -> Check:
    return Check(name=f"{what}: refused", holds=True, measured="refused", detail=how)


def _named(what: str, checks: list[Check]) -> list[Check]:
    return [
        Check(name=f"{what}: {c.name}", holds=c.holds, measured=c.measured, bound=c.bound, detail=c.detail)
        for c in checks
    ]


def check_accountants() -> list[Check]:
    checks = []
    for kind in ("prv", "rdp", "gdp"):
        for noise, rate, steps in ((1.0, 0.01, 1000), (0.6, 0.01, 500)):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                accountant = create_accountant(kind)
                for _ in range(steps):
                    accountant.step(noise_multiplier=noise, sample_rate=rate)
                claimed = float(accountant.get_epsilon(DELTA))
            mechanism = Mechanism(kind="poisson", noise_multiplier=noise, rate=rate)
            what = f"accountant '{kind}' at noise {noise}, rate {rate}, {steps} steps"
            checks += _named(what, [check_accounting(mechanism, steps, claimed, DELTA)])
    return checks


@dataclass(frozen=True, kw_only=True)
class Drawn(Poisson):
    """Accounted as Poisson, as Opacus does, and drawn by Opacus's sampler."""

    shuffled: bool = False

    def _samples(
        self, *, size: int, records: int, source: Source, epoch_key: bytes | None, start: int, steps: int
    ) -> Iterator[Sample]:
        if self.shuffled:  # what make_private leaves with poisson_sampling=False
            drawn: Any = DataLoader(range(size), batch_size=self.batch, shuffle=True).batch_sampler  # type: ignore[arg-type]
        else:
            rate = self.batch / records
            drawn = UniformWithReplacementSampler(num_samples=size, sample_rate=rate, steps=steps)
        for positions in drawn:
            yield np.sort(np.array(positions, dtype=np.int64))


def check_secure_mode() -> Check:
    try:
        PrivacyEngine(secure_mode=True)
    except ImportError as error:
        how = str(error).partition("!")[0]
        return Check(name="secure_mode=True can be switched on", holds=False, measured="ImportError", detail=how)
    return Check(name="secure_mode=True can be switched on", holds=True, measured="yes")


def audit() -> dict[str, list[Check]]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        return _audit()


def _audit() -> dict[str, list[Check]]:
    sections: dict[str, list[Check]] = {}
    for mode in ("hooks", "ghost"):
        subject = OpacusSubject(mlp(), mode, name="two linear layers")
        screened = Screened(subject)
        sections[subject.name] = check_sensitivity(subject)[0][:2]
        checks, worst = check_sensitivity(screened)
        assert worst is not None
        checks += [*check_noise(screened), check_two_worlds(screened, worst)[0], *check_replay(screened, worst)]
        sections[f"{screened.name}, number of records held constant"] = checks
        counted = Screened(OpacusSubject(mlp(), mode, name="", public_size=False))
        sections[f"{screened.name}, loader over the records at hand"] = check_replay(counted, worst)[:1]
    sections["divisor"] = check_divisor()
    sections["not a number"] = [check_not_a_number(m, v) for m in ("hooks", "ghost") for v in (np.nan, np.inf, 1e30)]
    kinds = ("trained affine", "frozen affine", "without affine")
    sections["BatchNorm"] = [check for kind in kinds for check in check_batch_norm(kind)]
    reuse = [check for mode in ("hooks", "ghost") for check in check_reuse(mode)]
    sections["weights used twice"] = reuse + [check for mode in ("hooks", "ghost") for check in check_tied(mode)]
    sections["accountants"] = check_accountants()
    torch.manual_seed(0)
    sections["sampling, poisson_sampling=True"] = check_sampling(Drawn(batch=16), "add_remove")
    sections["sampling, poisson_sampling=False"] = check_sampling(Drawn(batch=16, shuffled=True), "add_remove")
    sections["noise source"] = [check_secure_mode()]
    return sections
