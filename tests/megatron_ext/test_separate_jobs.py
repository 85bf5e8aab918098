"""Replicas in jobs that were started separately and meet at one address."""

import pytest

from megatron_ext.errors import ConfigError
from megatron_ext.replicas import ParallelConfig, join
from pretrain import exit, loop
from pretrain.config import load
from pretrain.session import open_session
from tests.megatron_ext.jobs import run_jobs
from tests.pretrain.corpus import write_corpus
from tests.pretrain.runs import SMALL, lines, losses, train

PARALLEL = ParallelConfig(replicas=3, tp=2)


def train_in_a_job(overrides: list[str]) -> str:
    exit.quieten_imports()
    with open_session(load("demo", overrides)) as session:
        loop.run(session)
        return f"replica {session.replicas.index} rank {session.replicas.rank}"


def test_two_jobs_train_what_one_job_trains(tmp_path):
    blend = write_corpus(tmp_path)
    options = {"parallel.replicas": 2, "parallel.tp": 2, "outer.interval": 3, "train.steps": 6}
    values = SMALL | options | {"data.blend": blend, "run.dir": tmp_path / "apart"}
    overrides = [f"{key}={value}" for key, value in values.items()]
    places = run_jobs(train_in_a_job, 2, 2, overrides)
    assert places == [f"replica {replica} rank {rank}" for replica in (0, 1) for rank in (0, 1)]

    train(blend, tmp_path / "together", **{k.replace(".", "__"): v for k, v in options.items()})
    assert losses(tmp_path / "apart") == losses(tmp_path / "together")
    assert [r["bytes_sent"] for r in lines(tmp_path / "apart", "rounds")] == [
        r["bytes_sent"] for r in lines(tmp_path / "together", "rounds")
    ]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "3", "FIRST_REPLICA": "0"}, "3 processes were started in this job"),
        ({"WORLD_SIZE": "4", "FIRST_REPLICA": "2"}, "FIRST_REPLICA=2 with 2 replicas.*at most 1"),
        ({"WORLD_SIZE": "2"}, "FIRST_REPLICA= with 1 replicas"),
        ({"WORLD_SIZE": "2", "FIRST_REPLICA": "0", "REPLICAS_STORE": "nowhere"}, "host:port"),
    ],
)
def test_wrong_place_of_a_job_is_told(variables, message, monkeypatch):
    for name, value in ({"REPLICAS_STORE": "127.0.0.1:1"} | variables).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        join(PARALLEL, timeout_seconds=1)
