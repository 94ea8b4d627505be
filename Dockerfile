# Toque in a container: docker build -t toque .        docker run --rm -it toque demo
# The guide: docs/guides/container.md. Where there is no Docker: tools/try_container.sh does these
# steps in a Debian root of its own.
FROM debian:bookworm-slim

# cuda, which also runs without a GPU; or cpu, for which pip must be told where a CPU build of torch
# is, by its own settings below. The build fails when pip took the other one.
ARG DEVICE=cuda
# Of pyproject.toml, with commas.
ARG EXTRAS=data,gguf,gcs,s3,track
# pip's own settings, where yours differ: each is its environment variable.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS

# torch.compile writes small C programs on a GPU.
RUN apt-get update \
 && if [ "$DEVICE" = cuda ]; then compiler="gcc libc6-dev python3-dev"; fi \
 && apt-get install --yes --no-install-recommends ca-certificates python3 python3-venv $compiler \
 && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 1000 toque \
 && mkdir -p /workspace/models /workspace/stores /workspace/runs \
 && chown -R toque:toque /workspace

COPY pyproject.toml README.md LICENSE /opt/toque/
COPY src /opt/toque/src
COPY tools/container_health.py /opt/toque/container_health.py

RUN python3 -m venv /opt/toque/venv \
 && /opt/toque/venv/bin/pip install --no-cache-dir --disable-pip-version-check "/opt/toque[$EXTRAS]" \
 && /opt/toque/venv/bin/python /opt/toque/container_health.py "$DEVICE"

ENV PATH=/opt/toque/venv/bin:/usr/local/bin:/usr/bin:/bin
ENV PYTHONUNBUFFERED=1
USER toque
WORKDIR /workspace
VOLUME ["/workspace/models", "/workspace/stores", "/workspace/runs"]
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=10s --start-period=120s \
  CMD ["python", "/opt/toque/container_health.py"]
ENTRYPOINT ["toque"]
CMD ["--help"]
