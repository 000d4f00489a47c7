# A stock vLLM image, and thinwire beside it: no fork and no patch. One image serves as the engine and as the sidecar that feeds it, so a
# node pulls its layers once. Linted here (`make check`), never built here: see README.md.
ARG VLLM_VERSION=v0.32.0
FROM vllm/vllm-openai:${VLLM_VERSION}

ARG THINWIRE_VERSION=0.1.0
# The second line stops a build in which vLLM would not find the weight-transfer backend.
RUN python3 -m pip install --no-cache-dir "thinwire[vllm]==${THINWIRE_VERSION}" \
    && python3 -c "from importlib.metadata import entry_points as e; assert 'thinwire' in e(group='vllm.general_plugins').names"

# Neither program needs root. The user has a name, which torch asks for when it is imported, and a number that the image's own users do not
# have. What vLLM, Triton and thinwire keep (compiled kernels, the index map) goes below HOME: mount a volume there.
RUN useradd --uid 10001 --user-group --create-home --home-dir /cache rollout
ENV HOME=/cache HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
USER 10001:10001
WORKDIR /cache

# Loopback: the routes of weight transfer (VLLM_SERVER_DEV_MODE=1) ask for no key, whatever --api-key says. Put a proxy that passes on the
# inference routes alone in front, as kubernetes/vllm.yaml does.
ENTRYPOINT ["python3", "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
