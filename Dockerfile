# lightrft in a container, for a CPU or, with --build-arg BACKEND=cu130, for NVIDIA GPUs:
#   docker build -t lightrft .
#   docker run --rm -v "$PWD/runs:/data/runs" lightrft demo
FROM python:3.11-slim

# A backend of PyTorch, as uv names it: cpu, or a version of CUDA.
ARG BACKEND=cpu
ARG EXTRAS=serve

# Triton and torch.compile call a C compiler.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY lightrft lightrft
# The sources are not kept: the installed package has all that it needs.
RUN python -m venv /venv \
    && /venv/bin/python -m pip install --no-cache-dir uv==0.13.9 \
    && VIRTUAL_ENV=/venv UV_TORCH_BACKEND=$BACKEND /venv/bin/uv pip install --no-cache \
        -c constraints.txt ".[$EXTRAS]" \
    && rm -rf /src/*

RUN useradd --create-home --uid 1000 user && mkdir /data && chown user /data
USER 1000
WORKDIR /data
ENV PATH=/venv/bin:$PATH
ENTRYPOINT ["lightrft"]
CMD ["--help"]
