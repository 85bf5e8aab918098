# The training environment for Hopper GPUs: CUDA 13, PyTorch, megatron-core, Transformer Engine.
#   docker build -t muloco-megatron .
#   docker run --gpus all --ipc=host --network=host -v /runs:/runs muloco-megatron \
#       python -m launch doctor
# Nobody here has built it: there was no GPU and no container runtime at hand. The pins are those of
# `make check-te`, which builds and imports them.
FROM nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04

RUN apt-get update && apt-get install -y --no-install-recommends \
        git make python3.12 python3.12-dev python3.12-venv ibverbs-providers libibverbs1 \
    && rm -rf /var/lib/apt/lists/*

RUN python3.12 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /muloco-megatron

COPY requirements.txt requirements-gpu.txt ./
RUN pip install --no-cache-dir -r requirements.txt setuptools wheel ninja packaging pybind11 \
    && NVIDIA=$(python -c 'import nvidia; print(list(nvidia.__path__)[0])') \
    && CUDNN_PATH=$NVIDIA/cudnn \
       CPATH=$NVIDIA/cudnn/include:$NVIDIA/nccl/include:$NVIDIA/cu13/include \
       NVTE_CUDA_ARCHS=90 \
       pip install --no-cache-dir --no-build-isolation -r requirements-gpu.txt

COPY . .
