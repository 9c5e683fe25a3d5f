# The server, for a CPU, or for NVIDIA GPUs with EXTRAS:
#
#   docker build -t swiftkv-jax .
#   docker build -t swiftkv-jax --build-arg EXTRAS=serve,gguf,cuda .
#   podman build --format docker -t swiftkv-jax .     # or buildah: without it there is no health check
#   docker run -p 127.0.0.1:8000:8000 -v /models/llama:/model:ro swiftkv-jax \
#       swiftkv infer serve --model /model --host 0.0.0.0 --insecure
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
ARG EXTRAS=serve,gguf
WORKDIR /source
COPY pyproject.toml requirements.lock README.md LICENSE MANIFEST.in ./
COPY swiftkv_jax ./swiftkv_jax
# The versions of the tests, where they say one.
RUN sed -n 's/^\([A-Za-z0-9._-]*==[^ ;]*\).*/\1/p' requirements.lock > versions.txt \
    && python -m venv /opt/swiftkv \
    && /opt/swiftkv/bin/pip install --no-cache-dir --constraint versions.txt ".[${EXTRAS}]"

FROM python:${PYTHON}-slim
COPY --from=build /opt/swiftkv /opt/swiftkv
# The folder of caches is there, or a new volume in its place would be root's.
RUN useradd --create-home --uid 10001 swiftkv \
    && install --directory --owner swiftkv --group swiftkv /home/swiftkv/.cache
ENV PATH=/opt/swiftkv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001
WORKDIR /home/swiftkv
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=5s --start-period=600s --retries=3 \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/ready')"]
CMD ["swiftkv", "infer", "serve", "--help"]
