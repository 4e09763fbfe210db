"""A statement for others to read: a page of HTML, a section of a model card, a registry's draft."""

from __future__ import annotations

import base64
import html
import math
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import yaml

from dptrain.core import Guarantee, Kind
from dptrain.reporting.plots import plot_attacks, plot_privacy
from dptrain.reporting.publication.plain_words import plain_words
from dptrain.reporting.publication.run_facts import rows_of_facts
from dptrain.reporting.publication.whole_statement import read_statement
from dptrain.reporting.report import DECLARED, conditions, curve_words, written_by
from dptrain.reporting.weights import KEY, TAGS, key_facts

_FILL_IN = "FILL IN: "
_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:50rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;font-size:.9rem}"
    "td,th{border:1px solid #bbb;padding:.3rem .6rem;text-align:left;vertical-align:top;"
    "overflow-wrap:anywhere}img{max-width:100%}"
)


def html_page(value: Mapping[str, Any]) -> str:
    """One page of HTML with the plots in it, which loads nothing from anywhere and runs no script.

    Args:
        value: of a privacy statement, whose every text is escaped.

    Raises:
        ModuleNotFoundError: if matplotlib is missing.
        ValueError: if it is no statement.
    """
    read = read_statement(value)
    guarantee = read.guarantee
    plots = [("What a test can reach", lambda path: plot_attacks(read.limits, path))]
    if (profile := read.profile) is not None:
        plots.append(("δ at every ε", lambda path: plot_privacy(profile, guarantee, path)))
    body = [
        "<h1>Privacy statement</h1>",
        *(
            f"<h2>{_marked(question)}</h2><p>{_marked(answer)}</p>"
            for question, answer in plain_words(guarantee, read.limits, read.facts, read.date)
        ),
        f"<h2>The guarantee</h2><p>{_marked(str(guarantee))}</p>",
        *(f"<p>{_marked(each)}</p>" for each in (str(read.limits), *curve_words(read.refused))),
        *(
            f'<img alt="{html.escape(title)}" src="data:image/png;base64,{_drawn(draw)}">'
            for title, draw in plots
        ),
        "<h2>Conditions</h2>",
        f"<ul>{''.join(f'<li>{_marked(each)}</li>' for each in conditions(guarantee))}</ul>",
        f"<h2>What ran</h2>{_table(_rows(guarantee))}",
    ]
    if read.facts is not None:
        table = _table(rows_of_facts(read.facts))
        body.append(f"<h2>What was declared</h2><p>{DECLARED}</p>{table}")
    body.append(f"<p>{_marked(written_by(value))}</p>")
    head = (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'\"><title>Privacy statement</title>"
        f"<style>{_STYLE}</style></head>"
    )
    return f"{head}<body>{''.join(body)}</body></html>\n"


def model_card(value: Mapping[str, Any]) -> str:
    """A section and metadata for the card of a model on the Hugging Face hub.

    Metadata stand in front, between lines of dashes, as the hub reads them.

    Args:
        value: of a privacy statement.

    Raises:
        ValueError: if it is no statement, or promises nothing.
    """
    read = read_statement(value)
    _check_publishable(read.guarantee)
    metadata = {"tags": list(TAGS), KEY: key_facts(read.guarantee)}
    head = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)
    told = plain_words(read.guarantee, read.limits, read.facts, read.date)
    words = [f"**{question}.** {answer}" for question, answer in told]
    text = "\n\n".join(["## Privacy", *words, str(read.guarantee)])
    return f"---\n{head}---\n\n{text}\n"


def registry_record(value: Mapping[str, Any]) -> str:
    """A draft for the public registry of DP deployments, as YAML.

    Fields are those of ``schemas/deployments-schema.yaml`` of opendp/deployments-registry-data at
    commit 3e9c812a (15 July 2026). What a statement does not know of a deployment begins with
    ``FILL IN``; optional fields that it does not know are left out.

    Args:
        value: of a privacy statement.

    Raises:
        ValueError: if it is no statement, or promises nothing.
    """
    read = read_statement(value)
    guarantee = read.guarantee
    _check_publishable(guarantee)
    words = dict(plain_words(guarantee, read.limits, read.facts, read.date))
    unknown = {
        "name": "the name of the data product",
        "data_curators": "who publishes it",
        "description": "what it is",
        "intended_use": "what it is for",
        "data_product_region": "what region the data describe",
        "publication_date": "YYYY-MM-DD",
    }
    basic: dict[str, Any] = {name: _FILL_IN + what for name, what in unknown.items()}
    named = {"name": "model", "data_curators": "organization"}
    for field, name in named.items():
        if read.facts is not None and read.facts[name] is not None:
            basic[field] = str(read.facts[name])
    basic["data_curators"] = [basic["data_curators"]]
    basic["data_product_type"] = "Machine learning model"
    model: dict[str, Any] = {"model_name": "Central"}
    implementation = {
        "mechanisms": f"Matrix mechanism: Gaussian noise, {guarantee.strategy['type']}, with noise "
        f"multiplier {guarantee.noise_multiplier:.6g}, on clipped gradients of batches drawn by "
        f"{guarantee.scheme['type']}; by dptrain {value['software']['dptrain']}."
    }
    if read.facts is not None:
        model["actors"] = str(read.facts["trusted"])
        implementation["preprocessing_and_hyperparameter_tuning"] = words[
            "Whether this run was chosen among several"
        ]
    deployment = {
        "basic": basic,
        "dp_variant": {"variant_name": "Approximate DP"},
        "privacy_loss": {
            "privacy_unit": guarantee.unit.noun,
            "privacy_unit_details": "Neighboring data sets differ in that "
            f"{guarantee.adjacency.sentence(guarantee.unit)} ({guarantee.adjacency.value}).",
            "privacy_parameters": {"epsilon": guarantee.epsilon, "delta": guarantee.delta},
            "privacy_parameters_details": str(guarantee),
        },
        "deployment_model": model,
        "accounting": {
            "composition": f"All {guarantee.steps_planned} planned steps together, "
            f"{guarantee.kind.sentence} (accountant: {guarantee.accountant})."
        },
        "implementation": implementation,
    }
    record = {
        "url_slug": f"{_FILL_IN}a short name for a URL",
        "status": "Draft",
        "tier": 2,
        "deployment": deployment,
    }
    return yaml.safe_dump(record, sort_keys=False, allow_unicode=True)


def _check_publishable(guarantee: Guarantee) -> None:
    if guarantee.kind is Kind.ESTIMATE:
        raise ValueError("it is an estimate, which must not be published as a guarantee")
    if not math.isfinite(guarantee.epsilon) or guarantee.delta >= 1:
        raise ValueError(
            f"ε = {guarantee.epsilon:g} at δ = {guarantee.delta:g} is no protection that could be "
            "published"
        )


def _rows(guarantee: Guarantee) -> list[tuple[str, str]]:
    return [
        ("ε", f"{guarantee.epsilon:.6g}"),
        ("δ", f"{guarantee.delta:.6g}"),
        ("protected unit", guarantee.unit.noun),
        ("adjacency", guarantee.adjacency.value),
        ("how it was shown", guarantee.kind.sentence),
        ("accountant", guarantee.accountant),
        ("noise multiplier σ", f"{guarantee.noise_multiplier:.6g}"),
        ("steps planned", str(guarantee.steps_planned)),
        ("steps executed", str(guarantee.steps_executed)),
        ("sampling", guarantee.scheme["type"]),
        ("noise correlation", guarantee.strategy["type"]),
        ("mechanism hash", guarantee.mechanism_hash),
    ]


def _marked(text: str) -> str:
    """A text as HTML: escaped, and what is between backticks as code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(text)).replace("`", "&#96;")


def _table(rows: Iterable[tuple[str, str]]) -> str:
    cells = (f"<tr><th>{_marked(name)}</th><td>{_marked(told)}</td></tr>" for name, told in rows)
    return f"<table>{''.join(cells)}</table>"


def _drawn(draw: Callable[[pathlib.Path], None]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "plot.png"
        draw(path)
        return base64.b64encode(path.read_bytes()).decode("ascii")
