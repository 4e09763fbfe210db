"""Whether an error is a refusal that helps: it names a part of the model, and a remedy."""

from __future__ import annotations

import re

from torch import nn

# A refusal says which layer, by its name in the model, and what to do about it.
_NAMED = re.compile(r"(?:layer|parameter|module|buffer)s? '([^']+)'")
_REMEDY = re.compile(
    r"[;,:.] .*\b(?:freeze|replace|call|use|keep|give|leave|set|declare|have|run|build|take|"
    r"dptrain\.register_layer\(\)|Gradients\()",
    re.DOTALL | re.IGNORECASE,
)


def refuses(message: str, model: nn.Module) -> bool:
    """Whether a message names a layer or parameter of the model, and a remedy."""
    parts = {name for name, _ in [*model.named_modules(), *model.named_parameters()]}
    names = set(_NAMED.findall(message))
    return bool(names & {*parts, "(the module itself)"}) and _REMEDY.search(message) is not None
