"""``TrainingArguments(fsdp=True)``: the trainer's model, divided by torch's ``fully_shard``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn


def _on(value: Any) -> bool:
    return str(value).lower() not in ("false", "none", "0", "no", "off", "")


# Entries of fsdp_config: which values are refused, and what to do instead.
_REFUSED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("version", lambda value: int(value) != 2,
             ("leave version out, which defaults to 2: FSDP1 joins the parameters of a layer into "
             "one, which has no per-example gradients")),
    ("xla", _on, "leave xla out, which is untested with private runs"),
    ("cpu_offload", _on, "leave cpu_offload out, which is untested with private runs"),
    ("activation_checkpointing", _on,
             "leave it out and set TrainingArguments(gradient_checkpointing=True)"),
    ("auto_wrap_policy", lambda value: value not in (None, "TRANSFORMER_BASED_WRAP"),
             ("leave auto_wrap_policy out: layers are divided by their class, named by "
             "transformer_layer_cls_to_wrap")),
    ("state_dict_type", lambda value: "FULL" not in str(value),
             ("leave state_dict_type out: save_model() writes the whole model, and each process "
             "writes its part of a checkpoint")),
)  # fmt: skip
_KNOWN = {
    "cpu_ram_efficient_loading",
    "min_num_params",
    "reshard_after_forward",
    "transformer_layer_cls_to_wrap",
    "xla_fsdp_grad_ckpt",
    "xla_fsdp_settings",
    "xla_fsdp_v2",
} | {name for name, _, _ in _REFUSED}


class Sharding(NamedTuple):
    """The division of a model among the processes of a run.

    Each layer of the named classes is gathered while it computes; what is left of the model is
    gathered for as long as it computes.

    Attributes:
        layers: names of classes; none are those that the model itself names.
        reshard_after_forward: True if a layer is given up after the forward pass, and gathered once
            more for the backward pass.
    """

    layers: tuple[str, ...]
    reshard_after_forward: bool

    @classmethod
    def asked_by(cls, args: Any) -> Sharding | None:
        """The division that the ``TrainingArguments`` ask for; ``None`` without ``fsdp``."""
        if not getattr(args, "fsdp", None):
            return None
        where = "TrainingArguments: "
        if args.fsdp is not True:
            raise ValueError(
                f"{where}fsdp={args.fsdp!r} was set after the arguments were created, which is too "
                "late: pass it to the constructor, TrainingArguments(fsdp=True, "
                f"fsdp_config={{...}})"
            )
        config = dict(args.fsdp_config or {})
        for name, wrong, remedy in _REFUSED:
            if name in config and wrong(config[name]):
                raise ValueError(f"{where}fsdp_config has {name}={config[name]!r}: {remedy}")
        if unknown := sorted(set(config) - _KNOWN):
            raise ValueError(
                f"{where}fsdp_config has {unknown[0]}={config[unknown[0]]!r}, which FSDP2 does not "
                "support or which is untested with private runs: leave it out"
            )
        if args.world_size < 2:
            raise ValueError(
                f"{where}fsdp=True with one process, which cannot divide the model: start the "
                "script with torchrun, or leave fsdp out"
            )
        if getattr(args, "load_best_model_at_end", False):
            raise ValueError(
                f"{where}load_best_model_at_end=True with fsdp=True: a whole model cannot be "
                "loaded into a divided one, so leave one of them out"
            )
        if getattr(args, "fp16", False):
            raise ValueError(
                f"{where}fp16=True with fsdp=True: each process would scale the loss and skip "
                "steps by its own shards; use bf16=True"
            )
        names = config.get("transformer_layer_cls_to_wrap") or ()
        return cls(tuple(names), _on(config.get("reshard_after_forward", True)))

    def divide(self, model: nn.Module, device: torch.device) -> None:
        """Call ``fully_shard`` on the layers and the whole model; all processes do.

        All begin with the first one's weights, as torch's own data parallelism does: a head that
        each drew for itself would be put together of several.
        """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        names = self.layers or tuple(sorted(getattr(model, "_no_split_modules", None) or ()))
        owners: dict[torch.Tensor, set[nn.Module]] = defaultdict(set)
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                owners[parameter].add(module)
        layers = [m for m in model.modules() if m is not model and type(m).__name__ in names]
        if not layers:
            raise ValueError(
                f"fsdp=True: {type(model).__name__} has no layer of the classes {list(names)}; "
                "name the class of its repeated layers by "
                'fsdp_config={"transformer_layer_cls_to_wrap": ["..."]}'
            )
        for tensor in [*model.parameters(), *model.buffers()]:
            torch.distributed.broadcast(tensor.detach(), 0)
        mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
        for layer in reversed(layers):  # those within others first
            own = set(layer.modules())
            # A weight that is tied to another layer's stays with the model, which has both.
            if all(owners[parameter] <= own for parameter in layer.parameters()):
                fully_shard(layer, mesh=mesh, reshard_after_forward=self.reshard_after_forward)
        fully_shard(model, mesh=mesh, reshard_after_forward=self.reshard_after_forward)


def whole_weights(model: nn.Module) -> dict[str, Any]:
    """The state of a divided model, on the CPU of the first process; empty on the others.

    All processes have to ask.
    """
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
    )

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: dict[str, Any] = get_model_state_dict(model, options=options)
    return state
