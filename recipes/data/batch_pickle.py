"""CIFAR's pickled batches, read without running what a pickle may ask for.

``pickle.load`` calls any function that a file names. Here the few names that occur in these files
stand for classes of this module that only keep their arguments, and every other name is refused.
"""

from __future__ import annotations

import pathlib
import pickle
from typing import Any

import numpy as np
import numpy.typing as npt


def read_batch_pickle(path: pathlib.Path) -> dict[str, Any]:
    """The dictionary in ``path``, with text for keys; arrays of bytes come as numpy arrays.

    Raises:
        ValueError: if the file is damaged, names anything but numpy arrays, or is no dictionary.
    """
    try:
        with path.open("rb") as file:
            content = _Unpickler(file, encoding="bytes").load()
        if not isinstance(content, dict):
            raise ValueError(f"it holds {type(content).__name__}, not a dictionary")
        return {_text(key): _value(value) for key, value in content.items()}
    except FileNotFoundError:
        raise
    except Exception as error:  # a damaged pickle fails in many ways
        raise ValueError(
            f"{path} is no batch of CIFAR-10 ({type(error).__name__}: {error}); unpack it again "
            "from the original archive"
        ) from error


class _Dtype:
    """Stands for ``numpy.dtype``: keeps the name, ignores the byte order (items are bytes)."""

    def __init__(self, name: bytes | str, *_: object) -> None:
        self.name = _text(name)

    def __setstate__(self, state: object) -> None:
        pass  # byte order and alignment, which a single byte does not have


class _Array:
    """Stands for a pickled ``numpy.ndarray`` of uint8."""

    content: tuple[object, object, object, object] | None = None

    def __init__(self, *_: object) -> None:
        """What numpy's constructor is given (class, empty shape, type) is replaced by the state."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, data = state
        self.content = (data, dtype, shape, fortran)

    @classmethod
    def from_buffer(cls, data: Any, dtype: Any, shape: Any, order: Any) -> _Array:
        """How numpy writes arrays since protocol 5."""
        array = cls()
        array.content = (data, dtype, shape, _text(order) == "F")
        return array

    def to_numpy(self) -> npt.NDArray[np.uint8]:
        """The array; numpy checks that the bytes fill the shape."""
        if self.content is None:
            raise ValueError("it holds an array without content")
        data, dtype, shape, fortran = self.content
        if not isinstance(dtype, _Dtype) or dtype.name not in ("u1", "|u1", "uint8"):
            raise ValueError("it holds an array of another type than uint8")
        if not isinstance(data, bytes | bytearray) or not isinstance(shape, tuple):
            raise ValueError("it holds an array whose content is no string of bytes")
        flat = np.frombuffer(data, dtype=np.uint8)
        return flat.reshape(shape, order="F" if fortran else "C")


def _latin1(text: str, encoding: str) -> bytes:
    """Stands for ``_codecs.encode``, with which Python 3 writes bytes in protocol 2."""
    if _text(encoding) != "latin1":
        raise ValueError(f"it asks for the encoding {encoding!r}")
    return text.encode("latin1")


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8")
    if isinstance(value, str):
        return value
    raise ValueError(f"it holds {value!r} where text belongs")


def _value(value: Any) -> Any:
    return value.to_numpy() if isinstance(value, _Array) else value


_STAND_INS = {
    "numpy.ndarray": _Array,
    "numpy.dtype": _Dtype,
    "numpy.core.multiarray._reconstruct": _Array,
    "numpy._core.multiarray._reconstruct": _Array,
    "numpy.core.numeric._frombuffer": _Array.from_buffer,
    "numpy._core.numeric._frombuffer": _Array.from_buffer,
    "_codecs.encode": _latin1,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _STAND_INS[f"{module}.{name}"]
        except KeyError:
            raise pickle.UnpicklingError(
                f"it asks for {module}.{name}, which no batch of CIFAR-10 needs and which is not "
                "run: do not trust this file"
            ) from None
