#!/bin/sh
# Builds the real Transformer Engine in .venv-te, on a machine that needs nvcc 13 and no GPU, and
# constructs every FP8 recipe of the zoo with it. About 15 minutes on two cores the first time.
set -eu
cd "$(dirname "$0")/.."

venv=.venv-te
say() { printf 'check-te: %s\n' "$*" >&2; }

CUDA_HOME=${CUDA_HOME:-/usr/local/cuda}
if ! [ -x "$CUDA_HOME/bin/nvcc" ]; then
    say "there is no nvcc below CUDA_HOME=$CUDA_HOME; install the CUDA 13 toolkit, or set CUDA_HOME"
    exit 2
fi

stamp="$venv/requirements.$(cat requirements.txt requirements-gpu.txt | cksum | tr ' ' '-')"
if ! [ -e "$stamp" ]; then
    sh scripts/setup.sh
    say "making $venv: PyTorch, Transformer Engine's libraries, and its extension from source"
    .venv/bin/python -m venv --clear "$venv"
    pip="$venv/bin/python -m pip install --disable-pip-version-check --quiet"
    $pip -r requirements.txt setuptools wheel ninja packaging pybind11
    nvidia=$("$venv/bin/python" -c 'import nvidia; print(list(nvidia.__path__)[0])')
    export CUDA_HOME CUDNN_PATH="$nvidia/cudnn" MAX_JOBS="${MAX_JOBS:-2}"
    CPATH="$nvidia/cudnn/include:$nvidia/nccl/include:$nvidia/cu13/include:$nvidia/nvshmem/include"
    export CPATH
    $pip --no-build-isolation -r requirements-gpu.txt
    touch "$stamp"
fi
"$venv/bin/python" -m scripts.check_te
