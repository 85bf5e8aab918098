"""Reads the index (`.metadata`) of a torch_dist folder without running what is pickled in it.

torch and megatron-core unpickle a folder's index, and the objects beside the tensors, without
restriction: a checkpoint from elsewhere could run any code. So this project puts nothing but
tensors into a folder, and lets core read it only after `read` has gone through the whole index.
"""

import math
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from megatron_ext.errors import DataError

NAME = ".metadata"

# Written by megatron-core into each folder. It is an object, empty, and never read.
_COMMON_STATE = "common_state/shard_0_1"

_DCP = "torch.distributed.checkpoint"
_ALLOWED = {
    f"{_DCP}.metadata": {
        "_MEM_FORMAT_ENCODING",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    },
    f"{_DCP}.filesystem": {"_StorageInfo"},
    f"{_DCP}.planner": {"SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
    "torch": {"Size", "bfloat16", "float16", "float32", "float64", "int32", "int64", "uint8"},
    "torch.serialization": {"_get_layout"},
}


@dataclass(frozen=True)
class Entry:
    """A tensor in a folder."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: int  # in how many pieces it is stored

    @property
    def bytes(self) -> int:
        """Size of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


def read(folder: Path) -> dict[str, Entry]:
    """The tensors in a torch_dist folder, by key ("kind.name").

    Raises DataError if the index is damaged, holds a foreign object, or leads out of the folder.
    """
    path = folder / NAME
    try:
        with path.open("rb") as file:
            metadata = _Unpickler(file).load()
        return {
            key: Entry(tuple(entry.size), entry.properties.dtype, len(entry.chunks))
            for key, entry in _checked_tensors(metadata, path)
        }
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError(f"{path} is missing") from None
    except Exception as error:  # a damaged pickle raises nearly anything
        raise DataError(f"{path} cannot be read: {error}") from None


class _Unpickler(pickle.Unpickler):
    """Knows only the plain classes that an index is made of."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(
                f"it holds a foreign object, {module}.{name}; nothing in it was run"
            )
        return super().find_class(module, name)


def _checked_tensors(metadata: Any, path: Path) -> list[tuple[str, TensorStorageMetadata]]:
    tensors = []
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            tensors.append((key, entry))
        elif key != _COMMON_STATE or not isinstance(entry, BytesStorageMetadata):
            raise DataError(f"{path}: {key} is an object; only tensors are read")
    for stored in metadata.storage_data.values():
        name = stored.relative_path
        if Path(name).name != name or stored.transform_descriptors:
            raise DataError(f"{path} refers to {name}, which no save of this project wrote")
    return tensors
