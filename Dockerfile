# docker build --target cpu -t espalier:cpu .      processor only
# docker build --target cuda -t espalier:cuda .    GPUs (the host needs the NVIDIA container toolkit)
# docker build --target serve -t espalier:serve .  vLLM with the plug-in (docs/serve.md)
# docker run --rm -v "$PWD:/work" espalier:cpu run method=fastv ratio=0.9 limit=20
# docker run --rm --gpus all -p 8000:8000 espalier:serve llava-hf/llava-1.5-7b-hf
#
# BASE: any image with Python 3.11 and pip. CPU_INDEX: an index with torch for processors; PyPI's brings CUDA along.
# VLLM: an image with a tested version of vLLM and pip.
ARG BASE=python:3.11-slim-bookworm
ARG VLLM=vllm/vllm-openai:v0.32.0

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

FROM ${VLLM} AS serve
ENV PIP_BREAK_SYSTEM_PACKAGES=1
COPY --from=wheel /wheels /opt/espalier/
RUN python3 -m pip install --no-deps --no-index /opt/espalier/*.whl
# vLLM wants the model first. An --hf-overrides with a method, given after it, replaces this one.
ENTRYPOINT ["sh", "-c", "model=$1; shift; exec vllm serve \"$model\" --trust-request-mm-kwargs --trust-request-chat-template --hf-overrides '{\"espalier\": {}}' \"$@\"", "serve"]
CMD ["--help"]

FROM base AS cuda
RUN python3 -m pip install "espalier-vlm[wandb,slurm]" --find-links /opt/espalier --constraint /opt/espalier/constraints.txt
