# The engine, with PyTorch's CUDA build: `loraplex engine`, `loraplex base pull`, and `loraplex up` for a trial in one
# container. The driver comes from the host; CUDA's libraries are in PyTorch's wheels. Build it with images/build.sh;
# docs/images.md.
ARG DEBIAN_IMAGE

# Debian's own Python 3.11 gets Debian's security fixes. The engine compiles its CPU operations for the processor that it
# finds, and Triton its launchers, so a compiler and Python's headers stay.
FROM ${DEBIAN_IMAGE} AS python
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates g++ libpython3-dev python3 \
    && rm -rf /var/lib/apt/lists/*

FROM python AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY requirements/build.txt requirements/engine.txt requirements/
# pip stays in /opt/loraplex: `loraplex base pull smollm2-135m` fetches through it.
RUN python3 -m venv /build \
    && /build/bin/pip install --no-cache-dir --require-hashes -r requirements/build.txt \
    && python3 -m venv /opt/loraplex \
    && /opt/loraplex/bin/pip install --no-cache-dir --only-binary :all: --require-hashes -r requirements/engine.txt
COPY pyproject.toml README.md LICENSE ./
COPY platform platform
COPY engine engine
COPY adapters_registry adapters_registry
COPY migrations migrations
COPY examples/adapters examples/adapters
RUN /build/bin/pip wheel --no-cache-dir --no-index --no-deps --no-build-isolation --wheel-dir /wheels . \
    && /opt/loraplex/bin/pip install --no-cache-dir --no-index --no-deps /wheels/*.whl \
    && /opt/loraplex/bin/pip check \
    && /build/bin/cyclonedx-py environment --output-reproducible --pyproject pyproject.toml --mc-type application \
        --output-file /opt/loraplex/sbom.cdx.json /opt/loraplex/bin/python

FROM python
RUN groupadd --gid 10001 loraplex \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/lib/loraplex --shell /usr/sbin/nologin loraplex \
    && install -d -m 0750 -o 10001 -g 10001 /var/lib/loraplex /var/cache/loraplex
COPY --from=build /opt/loraplex /opt/loraplex
COPY images/healthcheck.py /usr/local/bin/loraplex-healthcheck
ENV PATH=/opt/loraplex/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    LORAPLEX_DATA_DIR=/var/lib/loraplex \
    LORAPLEX_CACHE_DIR=/var/cache/loraplex \
    LORAPLEX_LISTEN=0.0.0.0:8100 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
ARG VERSION
ARG REVISION
LABEL org.opencontainers.image.title="loraplex-engine" \
      org.opencontainers.image.description="Engine of Loraplex, and all parts for a trial in one container" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
USER 10001:10001
WORKDIR /var/lib/loraplex
EXPOSE 8100
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s --retries=3 \
    CMD ["loraplex-healthcheck", "http://127.0.0.1:8100/readyz"]
ENTRYPOINT ["loraplex"]
CMD ["engine"]
