"""The options of one examination, the same object from the command line to the child process."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from numbers import Real
from typing import TYPE_CHECKING, Any, SupportsIndex

from cnorm.storage.files import replaces
from onnx_export import runtimes

if TYPE_CHECKING:
    from onnx_export.model_io import Limits

_PATHS = ("input", "data_root", "fix", "outputs")
_LONGEST = 10**9  # seconds
_LARGEST = 2**60  # bytes of address space; a limit must fit the system's type


@dataclass(frozen=True)
class Options:
    """The options of `validation.validate`, which describes them. Empty paths and an opset of 0 are none."""

    input: str = ""
    batch: int = 1
    dim: int = 8
    sizes: Mapping[str, int] = field(default_factory=dict)
    seed: int = 0
    external_data: bool = False
    data_root: str = ""
    fix: str = ""
    opset: int = 0
    outputs: str = ""
    runtimes: tuple[str, ...] = ()
    find_only: bool = False
    timeout: float = 600.0
    memory: int = 8 * 2**30
    limits: Limits | None = None
    infer_shapes: bool = True

    @classmethod
    def checked(cls, **given: Any) -> Options:
        """Options from arguments of `validate`; None stands for the default.

        Raises
        ------
        TypeError
            If a path is not a path, a size or the seed is not an integer, or the timeout or memory is not a number.
        ValueError
            If a size, the timeout or the memory limit is not positive, the seed is negative, or a runtime has no table.
        """
        given = {name: value for name, value in given.items() if value is not None}
        sizes = given.get("sizes", {})
        whole = {name: given[name] for name in ("batch", "dim") if name in given}
        whole |= {f"sizes[{name!r}]": size for name, size in sizes.items()}
        _check_numbers(whole, given)
        given |= {name: path_text(name, given[name]) for name in _PATHS if name in given}
        given |= {name: operator.index(given[name]) for name in ("batch", "dim", "seed", "opset") if name in given}
        given |= {"sizes": {name: operator.index(size) for name, size in sizes.items()}}
        given |= {"runtimes": tuple(map(known_runtime, given.get("runtimes", ())))}
        given |= {"timeout": min(given["timeout"], _LONGEST)} if "timeout" in given else {}
        given |= {"memory": int(min(given["memory"], _LARGEST))} if "memory" in given else {}
        return cls(**given)

    def keep_apart(self, path: str) -> None:
        """Raise ValueError if `fix` would replace the model or the inputs."""
        for other, role in ((path, "the model"), (self.input, "the inputs")):
            if self.fix and other and replaces(self.fix, other):
                raise ValueError(f"fix must name another file than {role}, which it would replace, got {self.fix!r}")

    def size_of(self, name: str, position: int) -> int:
        """Size for an open dimension, by its name (empty for none) and its position in the shape."""
        if name in self.sizes:
            return self.sizes[name]
        return self.batch if position == 0 or "batch" in name.lower() else self.dim

    def to_json(self) -> dict[str, Any]:
        """Plain data for `from_json`."""
        return {each.name: getattr(self, each.name) for each in fields(self)} | {
            "sizes": dict(self.sizes),
            "limits": asdict(self.limits) if self.limits else None,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Options:
        """The inverse of `to_json`."""
        from onnx_export.model_io import Limits  # imports onnx, which the parent does without

        data = data | {"runtimes": tuple(data["runtimes"])}
        return cls(**data | {"limits": Limits(**data["limits"]) if data["limits"] else None})


def path_text(name: str, path: object) -> str:
    """A path as a str; TypeError if it is none."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"{name} must be a str or path-like, got {type(path).__name__}")
    return os.fsdecode(path)


def known_runtime(given: str) -> str:
    """NAME or NAME@VERSION of a runtime that has a table; ValueError for another."""
    known = runtimes.names()
    if given.partition("@")[0] not in known:
        raise ValueError(f"a runtime must be one of {', '.join(known)}, with @VERSION or without, got {given!r}")
    return given


def _check_numbers(whole: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuse a size or seed that is no integer, and a size or limit that is not positive."""
    for name, value in (whole | {name: given[name] for name in ("seed", "opset") if name in given}).items():
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{name} must be an integer, got {value!r}")
    for name, value in (whole | {name: given[name] for name in ("timeout", "memory") if name in given}).items():
        if isinstance(value, bool) or not isinstance(value, Real | SupportsIndex):
            raise TypeError(f"{name} must be a number, got {value!r}")
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive and finite, got {value}")
    if operator.index(given.get("seed", 0)) < 0:
        raise ValueError(f"seed must not be negative, got {given['seed']}")
