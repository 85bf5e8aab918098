"""Damage is always seen and named, and a checkpoint from elsewhere cannot run code."""

import logging.handlers
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from megatron_ext.checkpoint import Checkpoints, index, manifest
from megatron_ext.errors import DataError
from megatron_ext.replicas import ParallelConfig, join
from tests.megatron_ext.checkpoint.toy import ToyState
from tests.ranks import run

pytestmark = pytest.mark.usefixtures("fast_heartbeat")

STEP = "step-00000005"


def _save(rank: int, folder: Path, parallel: ParallelConfig):
    with join(parallel, timeout_seconds=30) as replicas:
        Checkpoints(folder, replicas).save(ToyState(replicas, 1, 5), 5)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    """A checkpoint of two replicas of one rank each."""
    folder = tmp_path_factory.mktemp("checkpoints")
    run(_save, 2, folder, ParallelConfig(replicas=2))
    return folder / STEP


@pytest.fixture
def checkpoint(pristine, tmp_path) -> Path:
    """A copy to damage."""
    copy = tmp_path / STEP
    _copy(pristine, copy)
    return copy


def _copy(source: Path, target: Path) -> None:
    for path in source.rglob("*"):
        if path.is_file():
            (target / path.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
            (target / path.relative_to(source)).write_bytes(path.read_bytes())


def _flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    path.write_bytes(content)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def _load_with_each_file_damaged(rank: int, folder: Path, damage: Callable[[Path], None]):
    """What loading says, by damaged file."""
    seen = {}
    with join(ParallelConfig(replicas=2), timeout_seconds=30) as replicas:
        checkpoints = Checkpoints(folder.parent, replicas)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        for path in files:
            replicas.barrier("next file")
            content = path.read_bytes()
            replicas.barrier("read")
            if rank == 0:
                damage(path)
            replicas.barrier("damaged")
            try:
                checkpoints.load(folder, ToyState(replicas, 1))
                seen[path.relative_to(folder).as_posix()] = "loaded"
            except DataError as error:
                seen[path.relative_to(folder).as_posix()] = str(error)
            replicas.barrier("tried")
            if rank == 0:
                path.write_bytes(content)
    return seen


@pytest.mark.parametrize("damage", [_flip_a_bit, _truncate, _lengthen, Path.unlink])
def test_damage_to_any_file_is_found_and_named_on_every_rank(checkpoint, damage):
    results = run(_load_with_each_file_damaged, 2, checkpoint, damage)
    assert len(results[0]) == len([path for path in checkpoint.rglob("*") if path.is_file()]) > 10
    for result in results:
        assert {name: name in message for name, message in result.items()} == dict.fromkeys(
            result, True
        )


def test_a_flipped_bit_anywhere_in_the_manifest_is_found(checkpoint):
    path = checkpoint / manifest.NAME
    content = path.read_bytes()
    manifest.read(checkpoint)
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << random.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=manifest.NAME):
            manifest.read(checkpoint)


def test_checkers_share_the_files_without_gap_or_overlap(checkpoint):
    content = manifest.read(checkpoint)
    shares = [manifest.share(content, rank, 3) for rank in range(3)]
    assert sorted(name for share in shares for name in share) == sorted(content.files)
    loads = [sum(content.files[name].bytes for name in share) for share in shares]
    assert max(loads) - min(loads) <= max(file.bytes for file in content.files.values())


def _load(rank: int, folder: Path):
    with join(ParallelConfig(replicas=2), timeout_seconds=30) as replicas:
        state = ToyState(replicas, 1)
        Checkpoints(folder.parent, replicas).load(folder, state)
        return state.differences(5)


def _load_listening(rank: int, folder: Path):
    said = logging.handlers.BufferingHandler(1000)
    logging.getLogger("megatron_ext").addHandler(said)
    return _load(rank, folder), [record.getMessage() for record in said.buffer]


def test_unknown_files_are_reported_once_and_not_read(checkpoint):
    (checkpoint / "replica-0/common.pt").write_bytes(pickle.dumps(_Bomb(checkpoint / "ran")))
    (loaded, said), other = run(_load_listening, 2, checkpoint)
    assert loaded == []
    assert other == ([], [])
    assert "replica-0/common.pt" in said[0]
    assert not (checkpoint / "ran").exists()


class _Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def _sign(folder: Path) -> None:
    """Make the manifest right again, as an attacker would."""
    files = manifest.read(folder).files
    about = manifest.read(folder).about
    manifest.write(
        folder,
        manifest.Manifest(about, {name: manifest.record(folder / name) for name in files}),
    )


def _replace_payload(folder: Path, key: str, payload: object) -> None:
    """Let the index's entry for a key point to another pickled payload."""
    metadata = pickle.loads((folder / index.NAME).read_bytes())
    place = next(place for place in metadata.storage_data if place.fqn == key)
    stored = metadata.storage_data[place]
    with (folder / stored.relative_path).open("ab") as file:
        stored.offset = file.tell()
        torch.save(payload, file)
        stored.length = file.tell() - stored.offset
    (folder / index.NAME).write_bytes(pickle.dumps(metadata))


def test_a_foreign_object_in_the_index_is_refused_and_not_run(checkpoint):
    bomb = _Bomb(checkpoint.parent / "ran")
    path = checkpoint / "replica-0" / index.NAME
    metadata = pickle.loads(path.read_bytes())
    metadata.planner_data = bomb
    path.write_bytes(pickle.dumps(metadata))
    _sign(checkpoint)
    with pytest.raises(DataError, match=r"replica-0/.metadata .* foreign object, posix.mkdir"):
        run(_load, 2, checkpoint)
    assert not bomb.path.exists()


def test_a_foreign_object_in_place_of_a_tensor_is_refused_and_not_run(checkpoint):
    bomb = _Bomb(checkpoint.parent / "ran")
    _replace_payload(checkpoint / "replica-0", "master.embedding", bomb)
    _sign(checkpoint)
    with pytest.raises(DataError, match=r"replica-0 cannot be loaded: Weights only load failed"):
        run(_load, 2, checkpoint)
    assert not bomb.path.exists()


def test_a_tensor_that_the_index_calls_an_object_is_refused_and_not_run(checkpoint):
    bomb = _Bomb(checkpoint.parent / "ran")
    folder = checkpoint / "replica-0"
    _replace_payload(folder, "master.embedding", bomb)
    metadata = pickle.loads((folder / index.NAME).read_bytes())
    metadata.state_dict_metadata["master.embedding"] = BytesStorageMetadata()
    (folder / index.NAME).write_bytes(pickle.dumps(metadata))
    _sign(checkpoint)
    with pytest.raises(DataError, match=r"master.embedding is an object; only tensors are read"):
        run(_load, 2, checkpoint)
    assert not bomb.path.exists()


def test_a_foreign_object_beside_the_tensors_is_not_run(checkpoint):
    bomb = _Bomb(checkpoint.parent / "ran")
    _replace_payload(checkpoint / "replica-0", "common_state/shard_0_1", bomb)
    _sign(checkpoint)
    assert run(_load, 2, checkpoint) == [[], []]
    assert not bomb.path.exists()


def test_an_index_that_leads_out_of_the_checkpoint_is_refused(checkpoint):
    path = checkpoint / "replica-0" / index.NAME
    metadata = pickle.loads(path.read_bytes())
    next(iter(metadata.storage_data.values())).relative_path = "../../elsewhere"
    path.write_bytes(pickle.dumps(metadata))
    _sign(checkpoint)
    with pytest.raises(DataError, match=r"refers to ../../elsewhere"):
        run(_load, 2, checkpoint)
