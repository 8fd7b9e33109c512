# vLLM's own CUDA image with the plugin, which has never run on a GPU (docs/gpu.md). From the repository's root:
#   docker build -t vllm-kvmerge:cuda .
#   docker run --gpus all --ipc=host -p 127.0.0.1:8000:8000 -v kvmerge-models:/models vllm-kvmerge:cuda MODEL
# By its tag; .github/workflows/images.yml builds from the digest that the registry has for it.
ARG VLLM_IMAGE=vllm/vllm-openai:v0.32.0

FROM ${VLLM_IMAGE} AS builder
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY docker/requirements-build.txt /tmp/
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY configs configs
COPY csrc csrc
COPY vllm_kvmerge vllm_kvmerge
# The plugin's own wheel. A wheel that is called -any has no native operators: compiling them failed.
RUN uv build --no-cache --python python3 --wheel --out-dir /wheels \
        --build-constraints /tmp/requirements-build.txt --require-hashes . \
    && ls /wheels/vllm_kvmerge-*-py3-none-linux_*.whl

FROM ${VLLM_IMAGE}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="vllm-kvmerge" \
      org.opencontainers.image.description="vLLM with KV cache compression per request, for NVIDIA GPUs" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=builder /wheels /wheels
# vLLM brings all that it depends on, in versions that must stay.
RUN uv pip install --no-cache --system --break-system-packages --no-deps /wheels/*.whl \
    && rm -r /wheels \
    && python3 -I -c "import vllm_kvmerge.policies; from vllm_kvmerge.ops import cpu; print(cpu.levels())" \
    && useradd --uid 10001 --create-home --shell /usr/sbin/nologin kvmerge \
    && install --directory --owner=kvmerge --group=kvmerge /models
COPY docker/serve-cuda.yaml /etc/vllm-kvmerge/serve.yaml
ENV HF_HOME=/models
USER 10001:10001
WORKDIR /home/kvmerge
VOLUME /models
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s --retries=3 \
    CMD ["vllm-kvmerge", "health"]
ENTRYPOINT ["vllm-kvmerge", "serve"]
CMD ["demo", "--max-model-len", "4096"]
