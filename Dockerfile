# Toque in a container, for a CPU or for CUDA; docs/guides/container.md has the commands.
#
#   docker build --build-arg DEVICE=cuda --tag toque .
#   docker build --build-context wheels=FOLDER --tag toque .     a CPU build of torch, from a folder
#
# Where there is no engine, tools/try_container.py does these steps in a fresh Debian root.

# Nothing, unless --build-context wheels=FOLDER replaces it.
FROM scratch AS wheels

# CUDA itself comes with torch's packages, and the driver from the host: the base is the same for both.
FROM debian:bookworm-slim

# g++ and Python's headers: torch.compile writes C++ for a CPU and a launcher in C for a GPU.
RUN apt-get update --quiet=2 \
    && apt-get install --quiet=2 --no-install-recommends ca-certificates g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

# The folders belong to the user before they are volumes: a new named volume takes their owner.
RUN useradd --create-home --uid 1000 toque \
    && mkdir -p /workspace/models /workspace/stores /workspace/runs \
    && chown -R toque:toque /workspace \
    && python3 -m venv /opt/toque

ENV PATH=/opt/toque/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
ENV HF_HOME=/workspace/models/hub TOQUE_CACHE=/workspace/stores/cache
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
ENV PYTHONUNBUFFERED=1

# What Toque needs changes seldom and is a layer of its own: a change of the source does not fetch torch again.
# pip's settings are a secret of the build, since an index's address may hold a password.
ARG DEVICE=cpu
ARG EXTRAS=data,serve,structured
WORKDIR /source
COPY pyproject.toml requirements.lock ./
RUN --mount=type=bind,from=wheels,target=/wheels --mount=type=secret,id=pip,target=/etc/pip.conf \
    python3 -c 'import sys, tomllib; \
        read = tomllib.load(open("pyproject.toml", "rb")); \
        project, asked = read["project"], sys.argv[1].split(",") + ["gpu"] * (sys.argv[2] == "cuda"); \
        extras = [project["optional-dependencies"][name] for name in asked if name]; \
        print(*read["build-system"]["requires"], *project["dependencies"], *sum(extras, []), sep="\n")' \
        "$EXTRAS" "$DEVICE" >requirements.txt \
    && pip install --no-cache-dir --find-links /wheels --constraint requirements.lock --requirement requirements.txt

RUN python3 -c 'import sys, torch; \
    has, asked = "cuda" if torch.version.cuda else "cpu", sys.argv[1]; \
    has == asked or sys.exit(f"pip chose torch {torch.__version__}, a build for {has}, and DEVICE is {asked}. For a " \
        "CPU build give the folder that holds one: --build-context wheels=FOLDER. For CUDA: --build-arg DEVICE=cuda, " \
        "without such a folder.")' "$DEVICE"

COPY README.md LICENSE ./
COPY src ./src
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    pip install --no-cache-dir --no-build-isolation --no-deps . && rm -rf /source/*

COPY tools/container_health.py /opt/toque/
USER toque
WORKDIR /workspace
VOLUME ["/workspace/models", "/workspace/stores", "/workspace/runs"]
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=10s --start-period=120s CMD ["python3", "/opt/toque/container_health.py"]
ENTRYPOINT ["toque"]
CMD ["--help"]
