"""Sees to it that nothing but the release leaves a private step."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import nn

from dptrain.core import (
    ModuleState,
    attribute_of,
    content_of,
    extra_states,
    memory_of,
    on_processor,
)
from dptrain.engine.release_ledger import checksum

WINDOW = 1 << 24  # bytes whose values are compared in every step
_PENDING = 4  # microbatches whose values are held until a device is waited for

_PART = "[part "  # of a tensor that is made of several, as sparse ones are

PUBLIC_NOTE = (
    "the guarantee does not cover what the model's forward passes wrote to {}, which the trainer "
    "declared public (Gradients(buffers=...))"
)


class StateWatch:
    """Refuses a step in which anything of the module changed before the step was released.

    (docs/theory/run.md#thm-released-state;
    ``test_what_a_forward_pass_leaves_is_refused_and_named``.)

    A running mean, a cache, a counter that a forward pass leaves behind goes into ``model.pt``
    without noise, and into the gradients that other examples have in later steps. From the moment
    the private loader hands out a batch until ``optimizer.step()`` has its gradients, all state of
    the module (``ModuleState``) has to stay as it is, in every microbatch.

    What is proven, before the step's release:

    - that no parameter, buffer or attribute was assigned, added or removed, no number, byte array
      or generator changed and no tensor written to by an operator of torch, for every module in
      every step;
    - that no module was put into training or evaluation mode, but for modes that the step before
      had, and for those that train() of the whole module makes before the first step;
    - that no tensor's memory was written to past torch's version counters either (through
      ``.data``, NumPy or a kernel of one's own): in every step for a module of up to 16 MiB, and
      of a larger one with the first batch and in the last step, in between for 16 MiB in turn.
      Frozen parameters, buffers and attributes beyond that are compared again with what they were
      at the first batch whenever the run's state is saved, and in the last step.

    What the user's own code does to the module between ``optimizer.step()`` and the next batch is
    no part of a private step: evaluation there may leave behind what it likes, if its data are
    public or what it leaves is.

    What may change must be no part of a forward pass's graph: a loss that is made of it would be
    seen by no probe of the module's outputs.

    Once a change was found the watch stays at its refusal: the module holds what it should not.

    Args:
        public: patterns (as in ``fnmatch``) of the names of buffers and attributes that may
            change; see ``Gradients``.
        own: attributes that training puts there.
        rest: has the module hold what it holds between passes, where it exchanges parameters in
            these (``fully_shard``).
    """

    def __init__(
        self,
        module: nn.Module,
        public: Sequence[str] = (),
        own: Collection[str] = (),
        rest: Callable[[], None] | None = None,
    ) -> None:
        self.public = tuple(public)
        self._rest = rest
        self._module, self._own = module, own
        self._before: _Look | None = None  # at the batch that is under way
        self._settled: _Look | None = None  # at the end of the one before
        self._checked: _Look | None = None
        self._window: _ComparedBytes | None = None
        self._all: dict[str, str] = {}  # checksums at the batch that is under way
        self._untrained: dict[str, str] = {}  # those of what no optimizer changes
        self._refusal: str | None = None
        # Looks at values on devices that are still to be waited for.
        self._late: list[tuple[Callable[[], str | None], _Look]] = []
        self._turn = 0
        self._modes: dict[str, bool] | None = None  # in the last step

    @property
    def notes(self) -> tuple[str, ...]:
        """The assumption about what may change that the guarantee states."""
        if not self.public:
            return ()
        every = "its buffers and attributes"
        return (PUBLIC_NOTE.format(every if self.public == ("*",) else ", ".join(self.public)),)

    def begin(self, *, last: bool = False) -> None:
        """Start watching: a batch is handed out.

        Args:
            last: whether it is of the last step of the plan.
        """
        given_up = self._before is not None
        self.check()
        if given_up:
            self.confirm()
        now = self._look()
        first = self._settled is None
        parts = now.memory()
        size = sum(len(part) for part in parts.values())
        self._window = _ComparedBytes(parts, self._turn * WINDOW)
        self._turn = (self._turn + 1) % max(-(-size // WINDOW), 1)
        self._all = {}
        if size > WINDOW:
            if last:
                self._check_untrained(now)
            untrained = now.memory(trained=False)
            kept = self._unchanged_by_hand(now)
            new = {path: part for path, part in untrained.items() if path not in kept}
            self._untrained = kept | _checksums(new)
            if first or last:
                self._all = _checksums(parts)
        self._before = now

    def check(self) -> None:
        """Refuse a module that changed since the batch was handed out.

        The batch's gradients are there, and nothing has been made of them yet.
        """
        if self._refusal is not None:
            raise RuntimeError(self._refusal)
        if self._before is None:
            return
        assert self._window is not None
        now = self._look()
        if now.attached is not None:
            self._stop(
                f"{attribute_of(now.attached)!r}, declared public (buffers of Gradients), holds a "
                "tensor with gradients. It depends on the batch, and a loss computed from it "
                "would bypass the check that the module treats the examples separately; this step "
                "released nothing. Remedy: return the tensor from the module's forward, or store "
                "it with detach()"
            )
        self._check_modes(self._before.modes, now.modes)
        for path in self._before.changes(now):
            # A tensor may have been written to, or exchanged, with what it held.
            if not (self._window.covers(path) and self._before.same_values(now, path)):
                self._refuse(path, self._before, now)
        difference = self._window.difference()
        if isinstance(difference, str):
            self._refuse(difference, self._before, now)
        if difference is not None:
            if len(self._late) >= _PENDING:
                self.confirm()
            self._late.append((difference, now))
        if self._all:
            self._check_all(self._all, now.memory(), now)
        self._checked = now

    def confirm(self) -> None:
        """Refuse a module whose values on a device had changed when ``check`` looked at them.

        The device is waited for here, when the step's update has been asked for.
        """
        late, self._late = self._late, []
        for difference, now in late:
            if (written := difference()) is not None:
                self._refuse(written, now, now, late=True)

    def settle(self) -> None:
        """Mark the batch that ``check`` examined as released."""
        self._settled = self._checked
        self._modes = self._modes if self._checked is None else self._checked.modes
        self._before, self._window, self._all = None, None, {}

    def check_saved(self) -> None:
        """The run's state is about to be saved."""
        self.check()
        self.confirm()
        self._check_untrained(self._look())

    def restart(self) -> None:
        """Another state was loaded, for the next batch."""
        self._before, self._window, self._all = None, None, {}
        self._settled, self._untrained, self._turn = None, {}, 0
        self._late = []

    def _look(self) -> _Look:
        if self._rest is not None:
            self._rest()
        return _Look.at(self._module, self._public if self.public else None, self._own)

    def _public(self, path: str) -> bool:
        name = attribute_of(path)
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.public)

    def _unchanged_by_hand(self, now: _Look) -> dict[str, str]:
        """Checksums of what the user has not changed since the last step."""
        if self._settled is None:
            return {}
        changed = set(self._settled.changes(now, trained=False))
        return {
            path: digest
            for path, digest in self._untrained.items()
            if path.partition(_PART)[0] not in changed
        }

    def _check_untrained(self, now: _Look) -> None:
        before = self._unchanged_by_hand(now)
        memory = {p: m for p, m in now.memory(trained=False).items() if p in before}
        self._check_all(before, memory, now, earlier=True)

    def _check_all(
        self,
        before: dict[str, str],
        memory: dict[str, torch.Tensor],
        now: _Look,
        *,
        earlier: bool = False,
    ) -> None:
        after = _checksums(memory)
        for path, digest in before.items():
            if after.get(path) != digest:
                self._refuse(path, self._before or now, now, earlier=earlier)

    def _refuse(
        self,
        path: str,
        before: _Look,
        after: _Look,
        *,
        earlier: bool = False,
        late: bool = False,
    ) -> NoReturn:
        owner, _, name = attribute_of(path).rpartition(".")
        layer = dict(self._module.named_modules()).get(owner)
        kept_by = "the module itself" if not owner else f"layer {owner!r}"
        # Without a layer it is what a parameter or buffer has for an attribute.
        where = f"{owner!r}" if layer is None else f"{kept_by}, a {type(layer).__name__},"
        kind = after.kind(path) or before.kind(path)
        what = _told(before.entries.get(path), after.entries.get(path))
        remedy = (
            "a parameter may only change through the private optimizer: change it between "
            "optimizer.step() and the next batch, and only by values that do not depend on the data"
            if kind == "parameter"
            else (
                "prevent the layer from storing it (eval mode, track_running_stats=False, or a "
                "return value instead of an attribute), or, if it depends on no example, name it "
                f"in Gradients(buffers=[{attribute_of(path)!r}])"
            )
        )
        released = "was released before its device told" if late else "released nothing"
        when = (
            "in an earlier step without noise, so later releases may depend on it"
            if earlier
            else (
                "between the batch and its optimizer.step(), so data could leave the step without "
                f"noise; this step {released}"
            )
        )
        self._stop(f"{kind} {name!r} of {where} changed{what} {when}. Remedy: {remedy}")

    def _check_modes(self, before: dict[str, bool], after: dict[str, bool]) -> None:
        """Refuse a module that was put into another mode, by itself, since the batch came."""
        last = after if self._modes is None else self._modes
        whole = before[""] != after[""]  # train() of the model itself
        base = last if whole else before
        changed = [name for name in after if base.get(name, after[name]) != after[name]]
        if changed and after != self._modes:
            mode = "training" if after[changed[0]] else "evaluation"
            self._stop(
                f"the mode of layer {changed[0]!r} changed to {mode} between the batch and its "
                "optimizer.step(), so data could leave the step without noise; this step released "
                "nothing. Remedy: call train() and eval() on parts of the model before taking a "
                "batch, and not within a forward pass"
            )

    def _stop(self, what: str) -> NoReturn:
        """Refuse this step and every later one."""
        self._refusal = (
            f"{what}. Then build the module and the run anew, since this module still holds the "
            "change"
        )
        raise RuntimeError(self._refusal)


class _Entry(NamedTuple):
    """The object found at a path, and what it is recognized by."""

    value: Any  # held, so that no other object can come to be at its place in memory
    kind: str
    version: int | None
    place: Any
    trained: bool


class _Look(NamedTuple):
    """The module's state at one moment.

    Attributes:
        entries: the values that are found, by path.
        modes: which modules are in training mode, by name.
        attached: where something that may change belongs to the graph of a forward pass, if any.
    """

    entries: dict[str, _Entry]
    modes: dict[str, bool]
    attached: str | None

    @classmethod
    def at(
        cls, module: nn.Module, public: Callable[[str], bool] | None, own: Collection[str]
    ) -> _Look:
        """The module's state now, except for what may change."""
        entries: dict[str, _Entry] = {}
        attached: str | None = None
        state = ModuleState(module, own)
        for path, value in (state.by_path | extra_states(state)).items():
            version: int | None = None
            place: Any = None
            trained = False
            kind = "attribute"
            if isinstance(value, torch.Tensor):
                if type(value) is nn.Parameter or isinstance(value, nn.Parameter):
                    kind, trained = "parameter", value.requires_grad
                elif id(value) in state.buffers:
                    kind = "buffer"
                version = None if value.is_inference() else value._version
                strided = value.layout == torch.strided and value.device.type != "meta"
                plain = strided and type(value) in (torch.Tensor, nn.Parameter)
                place = (value.data_ptr() if plain else None, value.dtype, value.shape)
            elif isinstance(value, np.ndarray):
                place = (value.ctypes.data, value.dtype, value.shape)
            elif state.held:  # may be one of those
                value = content_of(value)
            if public is not None and kind != "parameter" and public(path):
                if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                    attached = path
                continue
            # A step has thousands of entries, and a named tuple's own constructor is a function.
            entries[path] = tuple.__new__(_Entry, (value, kind, version, place, trained))
        modes = {name: m.training for name, m in state.modules.items()}
        return cls(entries, modes, attached)

    def changes(self, now: _Look, *, trained: bool = True) -> list[str]:
        """Paths at which something else is, or was written to so far as versions tell."""
        first, second = self.entries, now.entries
        cleared = set[str]()
        for look in (first, second):  # of parameters that are trained, or were
            cleared.update([f"{path}.grad" for path, entry in look.items() if entry.trained])
        found = [path for path in first if path not in second and path not in cleared]
        for path, entry in second.items():
            before = first.get(path)
            if (entry.trained and not trained) or path in cleared:
                continue
            if before is not None and before.value is entry.value:
                if entry.version != before.version or entry.place != before.place:
                    found.append(path)
            elif before is None or entry.version != before.version or not _same(before, entry):
                found.append(path)
        return found

    def same_values(self, now: _Look, path: str) -> bool:
        """True if a tensor is still there: the same one or, but for a parameter, another like it.

        Of the same one the window compares the values.
        """
        before, after = self.entries.get(path), now.entries.get(path)
        if before is None or after is None:
            return False
        if _same(before, after):
            return True
        first, second = before.value, after.value
        alike = (
            first is not second  # the same one with other memory does not say what it held
            and "parameter" not in (before.kind, after.kind)
            and type(first) is type(second) is torch.Tensor
            and first.layout == second.layout == torch.strided
            and (first.dtype, first.shape, first.device)
            == (second.dtype, second.shape, second.device)
        )
        return alike and _equal(*(_flat_bytes(tensor) for tensor in (first, second)))

    def kind(self, path: str) -> str | None:
        """Parameter, buffer or attribute."""
        return self.entries[path].kind if path in self.entries else None

    def memory(self, *, trained: bool = True) -> dict[str, torch.Tensor]:
        """The bytes of all tensors and arrays, each once, by their paths."""
        found: dict[str, torch.Tensor] = {}
        seen: set[int] = set()
        for path, entry in self.entries.items():
            if entry.trained and not trained:
                continue
            for number, part in enumerate(memory_of(entry.value)):
                if part.data_ptr() not in seen:
                    seen.add(part.data_ptr())
                    found[f"{path}{_PART}{number}]" if number else path] = part
        return found


class _ComparedBytes:
    """The values of a part of the memory, from some byte on and around its end.

    Args:
        parts: all of it, by path.
        start: the byte.
    """

    def __init__(self, parts: dict[str, torch.Tensor], start: int) -> None:
        self._slices: list[tuple[str, torch.Tensor]] = []
        self._names, self._whole = list(parts), set[str]()
        size = sum(len(part) for part in parts.values())
        start, left = (start % size if size else 0), min(WINDOW, size)
        for path, part in [*parts.items(), *parts.items()]:
            if left and start < len(part):
                some = part[start : start + left]
                left -= len(some)
                self._slices.append((path, some))
                if len(some) == len(part):
                    self._whole.add(path)
            start = max(start - len(part), 0)
        self._kept = self._values()

    def covers(self, path: str) -> bool:
        """True if all values of the object at the path are compared."""
        parts = [name for name in self._names if name.partition(_PART)[0] == path]
        return bool(parts) and self._whole.issuperset(parts)

    def difference(self) -> str | Callable[[], str | None] | None:
        """The path of the first value that is not what it was; ``None`` where there is none.

        Of values on a device a function that finds it, and is the first to wait for the device.
        """
        now, late = self._values(), list[tuple[torch.Tensor, ...]]()
        for device, kept in self._kept.items():
            if not on_processor(kept):
                differ = (kept != now[device]).any()
                late.append((differ, kept, now[device]))
            elif not _equal(kept, now[device]):
                return self._first(kept, now[device])
        return functools.partial(self._found, late) if late else None

    def _found(self, late: Sequence[tuple[torch.Tensor, ...]]) -> str | None:
        return next((self._first(kept, now) for differ, kept, now in late if bool(differ)), None)

    def _first(self, kept: torch.Tensor, now: torch.Tensor) -> str:
        byte = int((kept != now).to(torch.uint8).argmax())
        for path, some in self._slices:
            if some.device == kept.device:
                if byte < len(some):
                    return path
                byte -= len(some)
        raise AssertionError("no value is there")

    def _values(self) -> dict[torch.device, torch.Tensor]:
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for _, some in self._slices:
            by_device.setdefault(some.device, []).append(some)
        return {device: torch.cat(several) for device, several in by_device.items()}


def _same(before: _Entry, after: _Entry) -> bool:
    first, second = before.value, after.value
    if first is second:
        return bool(before.place == after.place)
    if isinstance(first, torch.Tensor | np.ndarray) or type(first) is not type(second):
        return False
    return bool(first == second) or (first != first and second != second)


def _equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """True if two rows of as many bytes are equal; in words, which takes an eighth of the time."""
    whole = len(first) // 8 * 8
    words = (part[:whole].view(torch.int64) for part in (first, second))
    return torch.equal(*words) and torch.equal(first[whole:], second[whole:])


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _checksums(parts: dict[str, torch.Tensor]) -> dict[str, str]:
    return {path: checksum([part]) for path, part in parts.items()}


def _told(before: _Entry | None, after: _Entry | None) -> str:
    """The kind of change, without the values before and after, which may be an example's."""
    if before is None or after is None:
        return " (it appeared)" if before is None else " (it was taken away)"
    return ""
