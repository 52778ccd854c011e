# onnxfuse with ONNX Runtime's CUDA provider; the driver comes from the host, by NVIDIA's container toolkit.
#
#   docker build -t onnxfuse .
#   docker run --gpus all -v "$PWD:/models" onnxfuse optimize model.onnx
#
# Without --gpus everything but measuring works, and the report says that kernels were not run.
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY . /source
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /source

FROM python:${PYTHON}-slim
COPY --from=build /wheels /wheels
# "cuda": ONNX Runtime's CUDA libraries come as packages of Python, so that no image of NVIDIA's is needed.
ARG EXTRA=cuda
RUN pip install --no-cache-dir "onnxfuse[${EXTRA}] @ file://$(ls /wheels/*.whl)" && rm -r /wheels
# Compiled kernels and measurements stay where a volume is mounted here.
ENV ONNXFUSE_CACHE_DIR=/cache NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN mkdir -m 700 /cache
WORKDIR /models
ENTRYPOINT ["onnxfuse"]
