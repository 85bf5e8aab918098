"""Batch scripts, run by a stub of the scheduler. What they start is real where it says so."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import launch.__main__ as launch
from tests.launch.slurm.scheduler import Scheduler
from tests.pretrain.corpus import write_corpus
from tests.pretrain.runs import SMALL, lines

# Stands for the interpreter: `-m launch doctor --node`, and `-m pretrain RECIPE …`.
PROGRAM = r"""#!/bin/bash
if [[ $2 == launch ]]; then
    [[ $NODE == sick* ]] && { echo "error: GPU 0: a matrix product is wrong"; exit 1; }
    exit 0
fi
[[ $RANK == 0 ]] && echo started >>"$STUB/starts"
attempt=$(wc -l <"$STUB/starts")
"""
FINISH = r"""
mkdir -p "$RUN/checkpoints"; echo step-00000160 >"$RUN/checkpoints/latest"
"""


@pytest.fixture
def scheduler(tmp_path):
    scheduler = Scheduler(tmp_path / "stub")
    (tmp_path / "stub/starts").touch()
    return scheduler


@pytest.fixture
def scripts(scheduler, tmp_path, capfd):
    """Writes the scripts of a run of two GPUs whose ranks do what `body` says."""

    def write(body: str, *arguments: str) -> Path:
        python = scheduler.program("python-stub", PROGRAM + body)
        code = launch.main(
            [
                *("slurm", "demo", f"run.dir={tmp_path}/run", "--python", str(python)),
                *(arguments or ("parallel.dp=2", "--gpus-per-node", "2")),
            ]
        )
        assert code == 0, capfd.readouterr().err
        return tmp_path / "run/slurm"

    return write


def test_finished_run_ends_the_job(scripts, scheduler, tmp_path):
    code, output = scheduler.run(scripts(FINISH) / "job.sbatch", "node1", RUN=tmp_path / "run")
    assert code == 0, output
    assert "finished: step-00000160" in output
    assert not any("requeue" in call for call in scheduler.calls)


def test_a_run_that_was_asked_to_stop_is_not_started_again(scripts, scheduler, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    # Of a request to an earlier job, which this one must not heed.
    (run / "stopped").write_text("7\n")
    body = '((attempt == 1)) && exit 1; echo 9 >"$RUN/stopped"; exit 0'
    code, output = scheduler.run(scripts(body) / "job.sbatch", "node1", RUN=run)
    assert code == 0, output
    assert "attempt 0 ended with exit code 1" in output
    assert "stopped on request, with exit code 0" in output
    assert not any("requeue" in call for call in scheduler.calls)


def test_ranks_get_their_places_and_the_recipe(scripts, scheduler, tmp_path):
    body = 'echo "$RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR $*"; exit 0'
    options = ("parallel.dp=4", "--gpus-per-node", "2", "data.blend=/a b/it's")
    folder = scripts(body, *options)
    scheduler.run(folder / "job.sbatch", "node1,node2")
    logs = [folder / f"4711/attempt-0/rank-{rank}.log" for rank in range(4)]
    places = [log.read_text().split(" ", 4) for log in logs]
    assert [place[:4] for place in places] == [
        [str(rank), str(rank % 2), "4", "node1"] for rank in range(4)
    ]
    assert places[0][4] == (
        f"-m pretrain demo run.dir={tmp_path}/run parallel.dp=4 data.blend=/a b/it's\n"
    )


def test_crash_is_tried_again_and_its_reason_is_told(scripts, scheduler, tmp_path):
    body = '((attempt < 3)) && { echo "error: replica 0 rank 1 was lost"; exit 1; }' + FINISH
    code, output = scheduler.run(scripts(body) / "job.sbatch", "node1", RUN=tmp_path / "run")
    assert code == 0
    assert output.count("error: replica 0 rank 1 was lost") == 2
    assert "attempt 2 on node1" in output


def test_crashes_end_the_job_after_the_limit(scripts, scheduler):
    folder = scripts("exit 1", "parallel.dp=2", "--gpus-per-node", "2", "--restarts", "1")
    code, output = scheduler.run(folder / "job.sbatch", "node1")
    assert code == 1
    assert "gave up after 1 restarts" in output
    assert not any("requeue" in call for call in scheduler.calls)


@pytest.mark.parametrize("code", [2, 3])
def test_wrong_configuration_and_bad_data_are_not_tried_again(code, scripts, scheduler, tmp_path):
    script = scripts(f'echo "error: shard 7 is damaged" >&2; exit {code}') / "job.sbatch"
    assert scheduler.run(script, "node1")[0] == code
    assert (tmp_path / "stub/starts").read_text().count("started") == 1


def test_run_that_saved_and_ended_early_goes_back_to_the_queue(scripts, scheduler):
    script = scripts("exit 0") / "job.sbatch"
    assert scheduler.run(script, "node1")[0] == 0
    assert scheduler.calls[-1] == "scontrol requeue 4711"
    code, output = scheduler.run(script, "node1", SLURM_RESTART_COUNT=100)
    assert code == 1
    assert "queued again 100 times already" in output


def test_hang_is_ended_and_tried_again(scripts, scheduler, tmp_path):
    body = "((attempt < 2)) && sleep 600" + FINISH
    options = ("parallel.dp=2", "--gpus-per-node", "2", "--stall-seconds", "1")
    folder = scripts(body, *options)
    code, output = scheduler.run(folder / "job.sbatch", "node1", RUN=tmp_path / "run")
    assert code == 0, output
    assert "no step was recorded for 1 s" in output
    assert "attempt 1 on node1" in output


def test_sick_node_is_replaced_by_a_spare_one(scripts, scheduler, tmp_path):
    options = ("parallel.dp=4", "--gpus-per-node", "2", "--spare-nodes", "1")
    folder = scripts(FINISH, *options)
    code, output = scheduler.run(folder / "job.sbatch", "node1,sick1,node2", RUN=tmp_path / "run")
    assert code == 0
    assert "sick1 fails its health check and is left out: error: GPU 0" in output
    assert "attempt 0 on node1 node2" in output


def test_too_few_healthy_nodes_queue_the_job_again_without_the_sick(scripts, scheduler):
    script = scripts(FINISH) / "job.sbatch"
    assert scheduler.run(script, "sick1")[0] == 0
    assert scheduler.calls[-2:] == [
        "scontrol update JobId=4711 ExcNodeList=sick1",
        "scontrol requeue 4711",
    ]


def test_separate_jobs_meet_where_replica_0_says(scripts, scheduler, tmp_path):
    body = 'echo "meets $REPLICAS_STORE as $FIRST_REPLICA"; sleep 2' + FINISH
    options = ("parallel.replicas=2", "outer.interval=10", "--separate", "--gpus-per-node", "1")
    folder = scripts(body, *options)
    assert (folder / "submit.sh").read_text().count("sbatch ") == 2
    variables = {"RUN": tmp_path / "run", "SLURM_JOB_ID": 10}
    later = scheduler.start(
        folder / "replica-01.sbatch", "nodeB", **(variables | {"SLURM_JOB_ID": 11})
    )
    first = scheduler.run(folder / "replica-00.sbatch", "nodeA", **variables)
    output, _ = later.communicate(timeout=60)
    assert (first[0], later.returncode) == (0, 0), first[1] + output
    for job, replica in ((10, 0), (11, 1)):
        log = (folder / f"{job}/attempt-0/rank-0.log").read_text()
        assert log == f"meets nodeA:20021 as {replica}\n"
    assert not (folder / "store").exists()


def test_scripts_are_clean_shell(scripts):
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    options = ("parallel.replicas=2", "outer.interval=10", "--separate", "data.blend=/a b/it's")
    found = [*scripts("").glob("*.sbatch"), *scripts("", *options).glob("*")]
    files = [str(path) for path in found if path.is_file()]
    assert len(files) == 5
    result = subprocess.run([shellcheck, *files], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


@pytest.mark.slow
def test_real_training_under_the_script_stops_at_the_signal_and_is_queued(tmp_path, scheduler):
    blend = write_corpus(tmp_path)
    values = SMALL | {"data.blend": blend, "run.dir": tmp_path / "run", "train.steps": 3000}
    overrides = [f"{key}={value}" for key, value in (values | {"parallel.dp": 2}).items()]
    # The health check is tested elsewhere; localhost resolves everywhere.
    python = scheduler.program(
        "python-real",
        "#!/bin/bash\n[[ $2 == launch ]] && exit 0\nexec " + sys.executable + ' "$@"\n',
    )
    options = ["--python", str(python), "--gpus-per-node", "2", "--cpus-per-gpu", "1"]
    assert launch.main(["slurm", "demo", *overrides, *options]) == 0
    job = scheduler.start(tmp_path / "run/slurm/job.sbatch", "localhost")
    metrics = tmp_path / "run/metrics.jsonl"
    while job.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.2)
    tasks = (tmp_path / "stub/tasks").read_text().split()
    subprocess.run(["kill", "-USR1", *tasks], check=True)
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 0, output
    assert scheduler.calls[-1] == "scontrol requeue 4711"
    last = lines(tmp_path / "run", "metrics")[-1]["step"]
    assert (tmp_path / "run/checkpoints/latest").read_text() == f"step-{last:08}\n"
