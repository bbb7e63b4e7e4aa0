# docker build --target cpu -t espalier:cpu .      processor only
# docker build --target cuda -t espalier:cuda .    GPUs (the host needs the NVIDIA container toolkit)
# docker run --rm -v "$PWD:/work" espalier:cpu run method=fastv ratio=0.9 limit=20
#
# BASE: any image with Python 3.11 and pip. CPU_INDEX: an index with torch for processors; PyPI's brings CUDA along.
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS wheel
WORKDIR /source
COPY . .
RUN python3 -m pip wheel . --no-deps --wheel-dir /wheels

FROM ${BASE} AS base
ENV PIP_NO_CACHE_DIR=1 HF_HOME=/work/.huggingface TOKENIZERS_PARALLELISM=false
COPY constraints.txt /opt/espalier/
COPY --from=wheel /wheels /opt/espalier/
WORKDIR /work
ENTRYPOINT ["espalier"]
CMD ["--help"]

FROM base AS cpu
ARG CPU_INDEX=https://download.pytorch.org/whl/cpu
RUN python3 -m pip install torch torchvision --constraint /opt/espalier/constraints.txt --index-url ${CPU_INDEX}
RUN python3 -m pip install "espalier-vlm[wandb,slurm]" --find-links /opt/espalier --constraint /opt/espalier/constraints.txt

FROM base AS cuda
RUN python3 -m pip install "espalier-vlm[wandb,slurm]" --find-links /opt/espalier --constraint /opt/espalier/constraints.txt
