"""`python -m launch slurm`: write batch scripts for a run, in its folder."""

import argparse
import shlex
import sys
from pathlib import Path

from megatron_ext.checkpoint.folders import name_of
from megatron_ext.errors import ConfigError
from pretrain import exit
from pretrain.config import load
from pretrain.settings import RunConfig

BODY = Path(__file__).with_name("job.sh")


def parser() -> exit.Parser:
    """The command line of `launch slurm`."""
    parser = exit.Parser(prog="python -m launch slurm", description=__doc__)
    add = parser.add_argument
    add("--gpus-per-node", type=int, default=8, metavar="N", help="default 8")
    add("--cpus-per-gpu", type=int, default=12, metavar="N", help="default 12")
    add("--spare-nodes", type=int, default=0, metavar="N", help="more, in place of failing ones")
    add("--time", default="24:00:00", help="limit of one job (default 24:00:00)")
    add("--lead-seconds", type=int, default=900, help="before it, ask to save (default 900)")
    add("--restarts", type=int, default=3, help="of failed attempts in one job (default 3)")
    add("--requeues", type=int, default=100, help="of the job, after its limit (default 100)")
    add("--stall-seconds", type=int, default=3600, help="without a step: a hang (default 3600)")
    add("--separate", action="store_true", help="one job for each replica")
    add("--store", default="", metavar="HOST:PORT", help="where separate jobs meet, if fixed")
    add("--python", default=sys.executable, help="interpreter on the nodes (default: this one)")
    add("--sbatch", action="append", default=[], metavar="OPTION", help="one more, as --qos=high")
    return parser


def run(options: argparse.Namespace) -> None:
    """Write the scripts and say how to submit them. Raises ConfigError."""
    config = load(options.recipe, options.overrides).config
    _check(options, config)
    folder = Path(config.run.dir).resolve() / "slurm"
    folder.mkdir(parents=True, exist_ok=True)
    if not options.separate:
        path = folder / "job.sbatch"
        _write(path, script(options, config, None))
        print(f"sbatch {path}")
        return
    names = []
    for replica in range(config.parallel.replicas):
        path = folder / f"replica-{replica:02}.sbatch"
        _write(path, script(options, config, replica))
        names.append(path)
    submit = folder / "submit.sh"
    lines = [f"sbatch {shlex.quote(str(path))}" for path in names]
    _write(submit, "\n".join(["#!/bin/bash", "set -euo pipefail", *lines]) + "\n")
    print(f"bash {submit}")


def script(options: argparse.Namespace, config: RunConfig, replica: int | None) -> str:
    """The batch script of all replicas, or of one of them."""
    parallel = config.parallel
    ranks = parallel.world_size if replica is None else parallel.inner_world_size
    ranks_per_node = min(ranks, options.gpus_per_node)
    nodes = ranks // ranks_per_node
    run_dir = Path(config.run.dir).resolve()
    name = run_dir.name if replica is None else f"{run_dir.name}-{replica:02}"
    sbatch = [
        f"--job-name={name}",
        f"--nodes={nodes + options.spare_nodes}",
        f"--ntasks-per-node={ranks_per_node}",
        f"--gpus-per-node={ranks_per_node}",
        f"--cpus-per-task={options.cpus_per_gpu}",
        f"--time={options.time}",
        # To the ranks, which save and end; without "B:" the batch script does not get it.
        f"--signal=USR1@{options.lead_seconds}",
        "--requeue",
        "--open-mode=append",
        f"--output={run_dir}/slurm/{name}-%j.log",
        f"--chdir={Path.cwd()}",
        *options.sbatch,
    ]
    settings = {
        "PYTHON": options.python,
        "RUN_DIR": str(run_dir),
        "LAST_CHECKPOINT": name_of(config.train.stop_at or config.train.steps),
        "NODES": nodes,
        "RANKS_PER_NODE": ranks_per_node,
        "THREADS": options.cpus_per_gpu,
        "RESTARTS": options.restarts,
        "REQUEUES": options.requeues,
        "STALL_SECONDS": options.stall_seconds,
        "FIRST_REPLICA": "" if replica is None else replica,
        "STORE": options.store,
        "WAIT_SECONDS": int(config.run.timeout_seconds),
    }
    train = " ".join(_in_quotes(text) for text in [options.recipe, *options.overrides])
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {_quoted(option)}" for option in sbatch),
            "",
            *(f"{key}={_in_quotes(str(value))}" for key, value in settings.items()),
            "WATCH_SECONDS=${WATCH_SECONDS:-10}",
            f"TRAIN=({train})",
            "",
            BODY.read_text(encoding="utf-8"),
        ]
    )


def _check(options: argparse.Namespace, config: RunConfig) -> None:
    parallel = config.parallel
    ranks = parallel.inner_world_size if options.separate else parallel.world_size
    what = "a replica of" if options.separate else "all replicas of"
    for name in ("gpus_per_node", "cpus_per_gpu", "stall_seconds", "lead_seconds"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1")
    for name in ("spare_nodes", "restarts", "requeues"):
        if getattr(options, name) < 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 0")
    if ranks > options.gpus_per_node and ranks % options.gpus_per_node:
        raise ConfigError(
            f"{what} this layout need {ranks} GPUs, which do not fill nodes of "
            f"--gpus-per-node {options.gpus_per_node}; change one of the two"
        )
    if options.store and not options.separate:
        raise ConfigError("--store is where separate jobs meet; it needs --separate")
    if options.separate and parallel.replicas == 1:
        raise ConfigError("--separate needs parallel.replicas of at least 2")


def _quoted(option: str) -> str:
    key, equals, value = option.partition("=")
    return f"{key}{equals}{shlex.quote(value)}" if equals else key


def _in_quotes(value: str) -> str:
    """A shell's word; always quoted, so that step-00000100 is no subtraction to a checker."""
    return "'" + value.replace("'", "'\\''") + "'"


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
