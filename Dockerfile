# The installed package, `vitline`, for CPUs or for GPUs:
#
#   docker build --tag vitline:cpu .
#   docker build --tag vitline:cu128 --build-arg TORCH=cu128 .
#   docker run --rm --gpus all --shm-size 16g --volume /data:/data --volume /runs:/runs \
#     vitline:cu128 vitline train --config vit_b16 data.root=/data/imagenet run.dir=/runs/vit_b16
#
# docs/clusters.md: Kubernetes, SkyPilot, Apptainer.
ARG PYTHON=3.12

FROM python:${PYTHON}-slim-bookworm AS wheel
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /build
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim-bookworm
# The folder of wheels at download.pytorch.org: cpu, or a CUDA that the driver knows (cu126, cu128,
# cu130). CUDA itself, cuDNN and NCCL come with them.
ARG TORCH=cpu
ARG EXTRAS=s3,gs,tensorboard
# torch.compile calls g++, Triton gcc; apt's and pip's newest versions are meant.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*
# hadolint ignore=DL3013
RUN pip install --no-cache-dir --index-url "https://download.pytorch.org/whl/${TORCH}" torch
# The last command fails where the C decoder was not built or decodes other pixels.
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir "$(echo /wheels/vitline-*.whl)[${EXTRAS}]" \
 && python -c "from vit.data.decode import native; assert native.LIBRARY, native.UNAVAILABLE_REASON"
RUN useradd --uid 1000 --create-home vit
USER 1000
WORKDIR /home/vit
ENV OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
CMD ["vitline"]
