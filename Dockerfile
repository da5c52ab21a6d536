# An image for one process of a run, which `meshpar launch --k8s --image` starts (docs/guides/many-hosts.md):
#   docker build -t meshpar .                            CPUs
#   docker build -t meshpar --build-arg JAX=cuda13 .     NVIDIA GPUs; JAX=tpu for TPUs
FROM python:3.12-slim
ARG JAX=
COPY . /opt/meshpar
RUN pip install --no-cache-dir "/opt/meshpar[data]" ${JAX:+"jax[$JAX]"}
WORKDIR /work
RUN meshpar new --config quickstart
CMD ["meshpar", "--help"]
