# docker build -t paceline .                                             CPU
# docker build --build-arg BASE=pytorch/pytorch:2.11.0-cuda12.8-cudnn9-runtime -t paceline:cuda .
# docker run --rm -v "$PWD:/work" paceline train run.yaml
ARG BASE=python:3.12-slim
FROM ${BASE}
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
COPY pyproject.toml README.md LICENSE /src/
COPY src /src/src
# A base image with torch keeps its own.
RUN (python -c "import torch" || pip install "torch>=2.11" --index-url "${TORCH_INDEX}") && pip install "/src[parquet,trees]"
RUN useradd --create-home --uid 1000 paceline
USER 1000
WORKDIR /work
ENTRYPOINT ["paceline"]
CMD ["--help"]
