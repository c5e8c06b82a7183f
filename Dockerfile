# The worker image (the default target) and the dashboard image.
FROM python:3.12.11-slim-bookworm AS base
WORKDIR /app
COPY constraints.txt ./

FROM base AS dashboard
# rq-dashboard 0.9.0 imports six, but does not declare it as a dependency.
RUN pip install --no-cache-dir -c constraints.txt rq-dashboard==0.9.0 six==1.17.0
USER nobody
ENTRYPOINT ["rq-dashboard", "--json"]

# The CPU kernels, compiled: the worker image has no C++ compiler. They exist for x86-64 only.
FROM base AS kernels
RUN apt-get update && apt-get install -y --no-install-recommends g++
COPY jobs/__init__.py jobs/disk.py jobs/
COPY worker/processes worker/processes
COPY worker/kernels worker/kernels
RUN if [ "$(uname -m)" = x86_64 ]; then python -m worker.kernels.build; \
    else mkdir -p worker/kernels/prebuilt; fi

FROM base AS worker
RUN useradd --create-home --uid 1000 chatjobs \
    && install -d -o chatjobs -g chatjobs /results /models

# torch changes less often than the code, so its layer comes first. The default build supports NVIDIA
# GPUs. For a smaller image without GPU support: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG TORCH_INDEX=https://pypi.org/simple
RUN pip install --no-cache-dir -c constraints.txt --extra-index-url "$TORCH_INDEX" torch
# On GPUs, Triton compiles the module that starts its kernels, with the headers of Python in this image.
RUN if python -c 'import sys, torch; sys.exit(torch.version.cuda is None)'; then \
        apt-get update \
        && apt-get install -y --no-install-recommends gcc libc6-dev \
        && rm -rf /var/lib/apt/lists/*; \
    fi

COPY pyproject.toml README.md ./
COPY jobs jobs
COPY worker worker
COPY --from=kernels /app/worker/kernels/prebuilt worker/kernels/prebuilt
RUN pip install --no-cache-dir -c constraints.txt '.[worker,upstream]'

USER chatjobs
ENV CHATJOBS_REDIS_URL=redis://redis:6379/0 \
    CHATJOBS_RESULTS=/results \
    HF_HOME=/models \
    TRITON_CACHE_DIR=/models/triton \
    PYTHONUNBUFFERED=1
VOLUME ["/results", "/models"]

# Healthy while the worker of this container holds its lease in Redis.
HEALTHCHECK --interval=15s --timeout=10s --start-period=120s --retries=3 \
    CMD ["sh", "-c", "chatjobs status --json --host \"$(hostname)\""]

ENTRYPOINT ["chatjobs"]
CMD ["work", "--model", "demo"]
