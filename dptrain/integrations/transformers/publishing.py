"""Files beside a published model: the privacy statement and a model card that states it."""

from __future__ import annotations

import math
import pathlib
from typing import Any

import yaml

from dptrain.core import Guarantee
from dptrain.reporting import (
    KEY,
    STATEMENT,
    STATEMENT_TEXT,
    TAGS,
    RunFacts,
    key_facts,
    privacy_report,
)

CARD = "README.md"


def publish(
    folder: str, guarantee: Guarantee, *, about: dict[str, Any], hub_model_id: str | None = None
) -> None:
    """Write ``privacy_report.json`` and ``.md``, and the model card.

    Metadata of a card that is there already (peft writes one) are kept.

    Args:
        about: metadata of the card, such as ``library_name``.
        hub_model_id: the model's name on the hub, ``organization/model`` or ``model``, which the
            statement tells.
    """
    there = pathlib.Path(folder) / CARD
    retract(folder)
    metadata = {k: v for k, v in {**about, **_metadata_of(there)}.items() if v}
    tags = metadata.get("tags") or []
    metadata["tags"] = list(dict.fromkeys([*([tags] if isinstance(tags, str) else tags), *TAGS]))
    if math.isfinite(guarantee.epsilon):
        privacy_report(guarantee, folder, facts=_facts(hub_model_id))
        metadata[KEY] = key_facts(guarantee)
        text = (
            f"{guarantee}\n\nThe whole statement, with all its assumptions, is in "
            f"[{STATEMENT_TEXT}]({STATEMENT_TEXT}) and, for programs, in "
            f"[{STATEMENT}]({STATEMENT})."
        )
    else:
        text = (
            "The noise that was added in training is too small to protect anybody: there is no "
            "guarantee."
        )
    head = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)
    name = metadata.get("model_name", pathlib.Path(folder).resolve().name)
    there.write_text(
        f"---\n{head}---\n\n# {name}\n\n"
        f"Trained with differential privacy by dptrain.\n\n## Privacy\n\n{text}\n",
        encoding="utf-8",
    )


def _facts(hub_model_id: str | None) -> RunFacts | None:
    if not hub_model_id:
        return None
    organization, _, model = hub_model_id.rpartition("/")
    return RunFacts(model=model, organization=organization or None)


def retract(folder: str) -> None:
    """Remove what an earlier run stated here about other weights than those that lie here now."""
    for name in (STATEMENT, STATEMENT_TEXT):
        pathlib.Path(folder, name).unlink(missing_ok=True)
    card = pathlib.Path(folder) / CARD
    metadata = _metadata_of(card)
    if metadata.pop(KEY, None) is None:
        return
    tags = metadata.get("tags") or []
    metadata["tags"] = [tag for tag in tags if tag not in TAGS] if isinstance(tags, list) else tags
    head = yaml.safe_dump({k: v for k, v in metadata.items() if v}, sort_keys=False)
    card.write_text(f"---\n{head}---\n", encoding="utf-8")


def _metadata_of(path: pathlib.Path) -> dict[str, Any]:
    """The front matter of a card, if there is one."""
    if not path.is_file():
        return {}
    parts = path.read_text(encoding="utf-8").split("---\n", 2)
    if len(parts) < 3 or parts[0].strip():
        return {}
    try:
        found = yaml.safe_load(parts[1])
    except yaml.YAMLError:
        return {}
    return found if isinstance(found, dict) else {}
