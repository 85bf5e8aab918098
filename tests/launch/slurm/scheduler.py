"""A stub of Slurm for one machine: srun, scontrol and scancel as little programs on PATH."""

import os
import subprocess
from pathlib import Path

SRUN = r"""#!/usr/bin/env python3
# Runs the tasks as processes of this machine; a non-zero exit of one ends the others.
import os, subprocess, sys, time
from pathlib import Path

command = sys.argv[1:]
options = {}
while command[0].startswith("--"):
    name, _, value = command.pop(0).partition("=")
    options[name] = value
stub = Path(os.environ["STUB"])
nodes = options.get("--nodelist", "")
with (stub / "calls").open("a") as calls:
    calls.write(f"srun {nodes}: {' '.join(command)}\n")
per_node = int(options.get("--ntasks-per-node", 1))
tasks = int(options.get("--ntasks", int(options.get("--nodes", 1)) * per_node))
output = options.get("--output")
running = {}
for task in range(tasks):
    places = {"SLURM_PROCID": task, "SLURM_LOCALID": task % per_node, "SLURM_NTASKS": tasks}
    environment = os.environ | {"NODE": nodes} | {k: str(v) for k, v in places.items()}
    log = open(output.replace("%t", str(task)), "wb") if output else None
    running[task] = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    if output:
        with (stub / "tasks").open("a") as pids:
            pids.write(f"{running[task].pid}\n")
code = 0
while running:
    time.sleep(0.02)
    for task, process in list(running.items()):
        if process.poll() is None:
            continue
        del running[task]
        if process.returncode and not code:
            # As Slurm tells it: 128 and the signal's number.
            code = process.returncode if process.returncode > 0 else 128 - process.returncode
            for other in running.values():
                other.kill()
sys.exit(code)
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
        try:
            output, _ = job.communicate(timeout=120)
        finally:
            job.kill()
        return job.returncode, output

    @property
    def calls(self) -> list[str]:
        """What the script asked of Slurm."""
        return (self._folder / "calls").read_text().splitlines()
