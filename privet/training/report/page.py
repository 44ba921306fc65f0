"""The page, section by section. Everything that comes from a file is escaped where it enters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

import numpy as np

from ...accounting import Mechanism, epsilon, rounded_up, trade_off
from . import plots
from .style import CSS

_FALSE_POSITIVES = 0.01
_RELATIONS = {"add_remove": "adding or removing {}", "replace_one": "replacing {} by any other"}
_ENDS = {
    "budget": "The budget allowed no further step, so training ended before the plan did. The guarantee covers the "
    "steps that were taken.",
    "interrupted": "Training was interrupted before the plan was done. The guarantee covers the steps that were taken.",
}


def page(statement: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]], config: str) -> str:
    """The whole of report.html."""
    spent = _spent(statement)
    _check(statement, spent)
    title = f"Privacy report: {statement['model']} on {statement['data']['name']}"
    sections = [
        f'<h1>Privacy report</h1><p class="about">{escape(_subtitle(statement))}</p>',
        _guarantee(statement),
        _glance(statement),
        _section("Held-out accuracy and loss", _held_out(statement, metrics)),
        _section("What an attacker can learn", _attack(statement, spent)),
        _section("What each step releases", _releases(statement, spent)),
        *[_section("Diagnostics", found) for found in [_diagnostics(metrics)] if found],
        _section("What is not covered", _list(statement["not_covered"])),
        _section("How to repeat it", _repeat(config)),
        _section("Versions", _facts([*statement["versions"].items(), ("run ended", _time(statement))])),
        '<p class="sign">Read and approved (name, date, signature):</p>',
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{CSS}</style></head>\n<body><main>\n"
        + "\n".join(sections)
        + "\n</main></body></html>\n"
    )


# The guarantee


def _spent(statement: Mapping[str, Any]) -> list[tuple[Mechanism, int]]:
    """All that the run has paid for: its steps, and queries beside them."""
    if "spent" in statement:
        return [(Mechanism.from_json(part["mechanism"]), int(part["count"])) for part in statement["spent"]]
    return [(Mechanism.from_json(statement["mechanism"]), int(statement["compositions"]))]


def _check(statement: Mapping[str, Any], spent: list[tuple[Mechanism, int]]) -> None:
    """A statement that claims less than its own mechanisms cost is not printed."""
    stated, cost = float(statement["epsilon"]), epsilon(spent, float(statement["delta"])).epsilon
    if not stated >= cost * (1 - 1e-6):
        raise ValueError(f"privacy.json states epsilon {stated:.6g}, but what it says was spent costs {cost:.6g}")


def _protects(statement: Mapping[str, Any]) -> bool:
    return statement["noise_level"] != "seeded" and math.isfinite(float(statement["epsilon"]))


def _change(statement: Mapping[str, Any]) -> str:
    whose = "all records of one user" if statement["unit"] == "user" else f"one {statement['unit']}"
    return _RELATIONS[statement["relation"]].format(whose)


def _guarantee(s: Mapping[str, Any]) -> str:
    eps, delta = float(s["epsilon"]), float(s["delta"])
    figure = f'<p class="figure">ε = {rounded_up(eps)} at δ = {_power(delta)}</p>'
    end = f"<p><strong>{escape(_ENDS.get(s['ended'], s['ended']))}</strong></p>" if s["ended"] != "finished" else ""
    if s["noise_level"] == "seeded":
        return _alarm(
            "Its noise can be drawn again from a seed, by anyone who knows or guesses it. It is for tests and "
            "comparisons: do not release the model. (With unpredictable noise, all planned steps would have cost "
            f"ε = {rounded_up(float(s['planned']['epsilon']))} at δ = {_power(delta)}, for {escape(_change(s))}.)",
            end,
        )
    if not _protects(s):
        return _alarm("No finite ε holds for it: too little noise was added, or none. Do not release the model.", end)
    factor = f"e<sup>ε</sup> = {rounded_up(math.exp(eps), 1)}" if eps < 20 else "e<sup>ε</sup>, which is very large"
    tight = "close to the best bound there is" if s["tight"] else "an upper bound that may be far above the truth"
    return (
        f'<div class="guarantee">{figure}<p>This training is (ε, δ)-differentially private for '
        f"<strong>{escape(_change(s))}</strong>: whatever anyone concludes from the released model, such a change "
        f"makes it more likely by a factor of at most {factor}, plus {_power(delta)}.</p>"
        f'<p class="small">This ε is {escape(str(s["epsilon_is"]))}. It was computed by the {escape(s["accountant"])} '
        f"accountant ({tight}), and again from the mechanism when this page was written.</p>{end}</div>"
    )


def _alarm(why: str, end: str) -> str:
    figure = '<p class="figure"><strong>This run protects nothing.</strong></p>'
    return f'<div class="guarantee alarm" role="alert">{figure}<p>{why}</p>{end}</div>'


def _subtitle(s: Mapping[str, Any]) -> str:
    return f"Model {s['model']}, trained on {s['data']['name']}; {_time(s)}"


def _time(s: Mapping[str, Any]) -> str:
    return f"{datetime.fromisoformat(s['time']).astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def _glance(s: Mapping[str, Any]) -> str:
    held, total = s["held_out"], s["ledger_total"]
    runs = "this one run" if total["runs"] == 1 else f"all {total['runs']} runs"
    where = "a ledger in memory, which is gone" if s["ledger"] is None else s["ledger"]
    accuracy = "not measured" if held["accuracy"] is None else f"{float(held['accuracy']):.2%}"
    area = [] if held.get("auroc") is None else [("held-out AUROC", f"{float(held['auroc']):.4f}")]
    public = [] if s["public_records"] is None else [("public records", f"{s['public_records']}, not protected")]
    return _facts(
        [
            ("held-out accuracy", f"{accuracy} of {held['records']} records"),
            *area,
            ("trained on", f"{s['records']} {s['unit']}s (their number is public: {s['records_are_public']})"),
            *public,
            ("spent on this data", f"ε = {rounded_up(float(total['epsilon']))} for {runs} recorded in {where}"),
            ("data", s["data"]["description"]),
        ]
    )


# Usefulness


def _held_out(s: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> str:
    if not metrics:
        return "<p>No epoch was completed, so there is no curve.</p>"
    epochs = [float(line["epoch"]) for line in metrics]
    shares = {"accuracy": [line["accuracy"] for line in metrics]}
    if any(line.get("auroc") is not None for line in metrics):  # two classes
        shares["AUROC"] = [line.get("auroc") for line in metrics]
    what = " and ".join(shares)
    accuracy = plots.by_epoch(f"Held-out {what}", epochs, shares, unit=what, share=True)
    loss = plots.by_epoch("Held-out loss", epochs, {"loss": [line["loss"] for line in metrics]}, unit="cross-entropy")
    note = "Of records that were not trained on: measuring them costs the training records no privacy."
    return f"<p>{note}</p>{_plots(accuracy, loss)}"


# Privacy as an attacker sees it


def _attack(s: Mapping[str, Any], spent: list[tuple[Mechanism, int]]) -> str:
    if not _protects(s):
        return "<p>No bound holds: an attacker may learn everything about any record.</p>"
    alphas = np.unique(np.concatenate([np.geomspace(1e-4, 1, 60), np.linspace(0, 1, 61), [_FALSE_POSITIVES]]))
    betas = trade_off(spent, alphas)
    at = float(betas[alphas == _FALSE_POSITIVES][0])
    few = alphas >= 1e-4
    found = math.ceil(1000 * min(1.0, 1 - at) - 1e-9) / 10
    if s["relation"] == "add_remove":
        whose = "the records of one user were" if s["unit"] == "user" else "one record was"
        question = f"whether {whose} in the training data"
    else:
        question = f"which of two candidates {'one user' if s['unit'] == 'user' else 'one record'} was"
    return (
        f"<p>Take the strongest attacker: one who knows everything but {question}. <strong>The best attack with 1% "
        f"false positives has at most {found:g}% true positives</strong>; without the model it would have 1%.</p>"
        + _plots(
            plots.trade_off("Trade-off curve (f-DP)", alphas.tolist(), betas.tolist()),
            plots.power(
                "The same at few false positives", alphas[few].tolist(), betas[few].tolist(), (_FALSE_POSITIVES, at)
            ),
        )
    )


# The mechanism


def _releases(s: Mapping[str, Any], spent: list[tuple[Mechanism, int]]) -> str:
    rows = [(g["group"], f"{g['parameters']:,}", _g(g["sensitivity"]), _g(g["noise_std"])) for g in s["groups"]]
    sampling = ", ".join([str(s["sampling"]["rule"]), *_options(s["sampling"], "rule")])
    return (
        "<p>A step releases these sums over its sample, each with Gaussian noise, and nothing else. Together they are "
        f"one mechanism, with noise multiplier {_g(s['noise_multiplier'])}.</p>"
        + _table(["sum", "entries", "sensitivity Δ", "noise (std)"], rows)
        + _facts(
            [
                ("method", s["method"]["name"]),
                ("its options", ", ".join(_options(s["method"], "name")) or "none"),
                ("sampling", sampling),
                ("steps", f"{s['steps']} of {s['planned']['steps']} planned"),
                ("accounted as", "; ".join(_mechanism(m, n) for m, n in spent)),
                ("noise", f"level {s['noise_level']}"),
                ("independence of records", _independence(s["independence_checked"])),
            ]
        )
    )


def _mechanism(m: Mechanism, count: int) -> str:
    rate = {"poisson": f", rate {_g(m.rate)}", "fixed_size": f", {m.batch} of {m.records}"}.get(m.kind, "")
    discrete = "discrete " if m.discrete else ""
    return f"{count} × {discrete}Gaussian with multiplier {_g(m.noise_multiplier)} ({m.kind.replace('_', ' ')}{rate})"


def _independence(checked: object) -> str:
    if isinstance(checked, bool):
        return "checked on made-up records" if checked else "not checked"
    return str(checked)


# Diagnostics


def _diagnostics(metrics: Sequence[Mapping[str, Any]]) -> str:
    lines = [line for line in metrics if line.get("diagnostics")]
    if not lines:
        return ""
    epochs = [float(line["epoch"]) for line in lines]
    all_found = [line["diagnostics"] for line in lines]
    last = all_found[-1]
    pictures = [
        _norms("Norm of weights", epochs, all_found, "weights", "L2 norm"),
        _norms("Norm of pre-activations", epochs, all_found, "pre_activations", "mean L2 norm"),
    ]
    chosen = {f"epoch {epochs[i]:g}": all_found[i].get("gradients") for i in (0, len(lines) // 2, -1)}
    if histograms := {name: found["histogram"] for name, found in chosen.items() if found}:
        pictures.append(plots.histogram("Norms of single records' gradients", histograms, last["clip"]))
    gradients = [found.get("gradients") or {} for found in all_found]
    curves = {
        "cosine of clipped and unclipped sum": [g.get("cosine") for g in gradients],
        "share of records above C": [g.get("above_clip") for g in gradients],
    }
    if any(v is not None for values in curves.values() for v in values):
        pictures.append(plots.by_epoch("What clipping does", epochs, curves, unit="", share=True))
    clip = "" if last["clip"] is None else f" The clip C is {_g(last['clip'])}."
    text = (
        f"<p>Of {int(last['records'])} held-out or public records and the weights after each epoch, so they cost no "
        f"privacy. Norms that keep growing mean that more and more is clipped away.{clip}</p>"
    )
    left = [f"{name}: {why}" for name, why in last["left_out"].items()]
    return text + _plots(*pictures) + (f"<p>Left out:</p>{_list(left)}" if left else "")


def _norms(title: str, epochs: list[float], found: list[Mapping[str, Any]], part: str, unit: str) -> str:
    """The curves of a few layers, first and last included; metrics.jsonl has them all."""
    names = list(found[-1].get(part) or {})
    if not names:
        return ""
    matrices = [name for name in names if part != "weights" or not name.endswith("bias")] or names
    places = np.linspace(0, len(matrices) - 1, min(len(matrices), plots.LINES)).round().astype(int)
    shown = [matrices[i] for i in places]
    more = "" if len(shown) == len(names) else f" ({len(shown)} of {len(names)})"
    curves = {name: [(f.get(part) or {}).get(name) for f in found] for name in shown}
    return plots.by_epoch(title + more, epochs, curves, unit=unit)


# Repeating


def _repeat(config: str) -> str:
    return (
        "<p>The same training again, with fresh noise, which costs the same again:</p>"
        "<pre><code>privet train config.toml</code></pre>"
        f"<p>with this <code>config.toml</code>:</p><pre><code>{escape(config)}</code></pre>"
    )


# HTML


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def _plots(*figures: str) -> str:
    return f'<div class="plots">{"".join(figures)}</div>'


def _list(sentences: Iterable[str]) -> str:
    return f'<ul class="gaps">{"".join(f"<li>{escape(str(s))}</li>" for s in sentences)}</ul>'


def _facts(pairs: Iterable[tuple[str, object]]) -> str:
    rows = "".join(f'<tr><th scope="row">{escape(k)}</th><td>{escape(str(v))}</td></tr>' for k, v in pairs)
    return f'<table class="facts"><tbody>{rows}</tbody></table>'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The first column names the row; the others are numbers."""
    first, *rest = head
    tops = f'<th scope="col">{escape(first)}</th>' + "".join(
        f'<th scope="col" class="n">{escape(h)}</th>' for h in rest
    )
    body = "".join(
        f'<tr><th scope="row">{escape(str(row[0]))}</th>'
        + "".join(f'<td class="n">{escape(str(cell))}</td>' for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    return f'<div class="table"><table><thead><tr>{tops}</tr></thead><tbody>{body}</tbody></table></div>'


def _options(mapping: Mapping[str, Any], but: str) -> list[str]:
    said = {True: "yes", False: "no"}
    return [
        f"{name.replace('_', ' ')} {said[value] if isinstance(value, bool) else value}"
        for name, value in mapping.items()
        if name != but and value is not None
    ]


def _g(value: Any) -> str:
    return f"{float(value):.4g}"


def _power(value: float) -> str:
    """A small probability as HTML.

    >>> _power(1e-5), _power(2.5e-6)
    ('10<sup>−5</sup>', '2.5·10<sup>−6</sup>')
    """
    mantissa, exponent = f"{value:.2e}".split("e")
    short = f"{float(mantissa):g}"
    power = f"10<sup>{str(int(exponent)).replace('-', '−')}</sup>"
    return power if short == "1" else f"{short}·{power}"
