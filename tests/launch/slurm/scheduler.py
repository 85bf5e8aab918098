"""A stub of Slurm for one machine: srun, scontrol and scancel as little programs on PATH."""

import os
import subprocess
from pathlib import Path

SRUN = r"""#!/bin/bash
# Runs the tasks as processes of this machine; a non-zero exit of one ends the others.
nodes=1 per_node=1 ntasks= output= nodelist=
while [[ $1 == --* ]]; do
    case $1 in
        --nodes=*) nodes=${1#*=} ;;
        --ntasks-per-node=*) per_node=${1#*=} ;;
        --ntasks=*) ntasks=${1#*=} ;;
        --nodelist=*) nodelist=${1#*=} ;;
        --output=*) output=${1#*=} ;;
    esac
    shift
done
echo "srun $nodelist: $*" >>"$STUB/calls"
export SLURM_NTASKS=${ntasks:-$((nodes * per_node))} NODE=$nodelist
pids=()
for ((task = 0; task < SLURM_NTASKS; task++)); do
    log=/dev/stdout
    [[ -n $output ]] && log=${output//%t/$task}
    SLURM_PROCID=$task SLURM_LOCALID=$((task % per_node)) "$@" >"$log" 2>&1 &
    pids+=($!)
    [[ -n $output ]] && echo $! >>"$STUB/tasks"
done
code=0
while ((${#pids[@]})); do
    wait -n -p ended "${pids[@]}"
    status=$?
    rest=()
    for pid in "${pids[@]}"; do [[ $pid != "$ended" ]] && rest+=("$pid"); done
    pids=("${rest[@]}")
    if ((status && !code)); then
        code=$status
        ((${#pids[@]})) && kill -KILL "${pids[@]}"
    fi
done
exit "$code"
"""
SCONTROL = r"""#!/bin/bash
echo "scontrol $*" >>"$STUB/calls"
[[ $1 == show ]] && tr , '\n' <<<"$3"
exit 0
"""
SCANCEL = r"""#!/bin/bash
echo "scancel $*" >>"$STUB/calls"
xargs kill -KILL <"$STUB/tasks" 2>/dev/null
exit 0
"""


class Scheduler:
    """Runs batch scripts with a stub of Slurm."""

    def __init__(self, folder: Path):
        self._folder = folder
        folder.mkdir()
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("scancel", SCANCEL)):
            self.program(name, text)

    def program(self, name: str, text: str) -> Path:
        """Write an executable file."""
        path = self._folder / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def start(self, script: Path, nodes: str, **variables: object) -> subprocess.Popen[str]:
        """Run a batch script as a job on these nodes."""
        environment = {
            "PATH": f"{self._folder}:{os.environ['PATH']}",
            "STUB": str(self._folder),
            "SLURM_JOB_ID": "4711",
            "SLURM_JOB_NODELIST": nodes,
            "WATCH_SECONDS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        environment |= {name: str(value) for name, value in variables.items()}
        return subprocess.Popen(
            ["bash", str(script)],
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, script: Path, nodes: str, **variables: object) -> tuple[int, str]:
        """Run a batch script to its end: exit code and what it said."""
        job = self.start(script, nodes, **variables)
        output, _ = job.communicate(timeout=120)
        return job.returncode, output

    @property
    def calls(self) -> list[str]:
        """What the script asked of Slurm."""
        return (self._folder / "calls").read_text().splitlines()
