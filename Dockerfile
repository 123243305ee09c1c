# The images of Switchyard: --target operator, agent or worker.
#
#   docker build --target operator --build-arg VERSION=0.1.0 --build-arg REVISION=$(git rev-parse --short=12 HEAD) .
#
# What is in an image is laid out by `cargo xtask images --layout`, here in a stage of its own, and by `cargo xtask images` (which needs
# no other image, and no network) outside: there PROGRAMS is `prebuilt`, and the context is the folder that was laid out.
#
# The programs load NVIDIA's library at run time, so they are linked with glibc. An image holds the program, the C library, a table
# of users and nothing else: no shell, no package manager.
ARG PROGRAMS=build

FROM docker.io/library/rust:1.95-bookworm AS build
ARG REVISION=""
ARG SOURCE_DATE_EPOCH=0
WORKDIR /src
COPY . .
RUN SWITCHYARD_COMMIT="$REVISION" cargo run --release --locked --package xtask -- images --layout /out

FROM scratch AS prebuilt
COPY . /out/

FROM ${PROGRAMS} AS programs

FROM scratch AS operator
ARG VERSION=""
ARG REVISION=""
LABEL org.opencontainers.image.title="switchyard-controller" \
      org.opencontainers.image.description="Controller of topology-aware training jobs" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=programs /out/operator/ /
ENV PATH=/usr/bin
USER 65532:65532
ENTRYPOINT ["/usr/bin/switchyard-controller"]

FROM scratch AS agent
ARG VERSION=""
ARG REVISION=""
LABEL org.opencontainers.image.title="switchyard-node-agent" \
      org.opencontainers.image.description="Reports what a node is made of" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=programs /out/agent/ /
ENV PATH=/usr/bin
USER 65532:65532
ENTRYPOINT ["/usr/bin/switchyard-node-agent"]

FROM scratch AS worker
ARG VERSION=""
ARG REVISION=""
LABEL org.opencontainers.image.title="switchyard-worker" \
      org.opencontainers.image.description="Collective training engine" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=programs /out/worker/ /
# What NVIDIA's container runtime adds to a container that is given GPUs: the driver of CUDA, and NVML. Which GPUs, the device plugin says.
ENV PATH=/usr/bin NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 65532:65532
ENTRYPOINT ["/usr/bin/switchyard-worker"]
