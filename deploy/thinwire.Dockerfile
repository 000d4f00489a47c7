# thinwire alone: hub, relay, maintainer, follower, and with EXTRAS=hub,metrics,serve the small server on transformers. Linted here
# (`make check`), never built here: see README.md.
FROM python:3.13-slim-bookworm

ARG THINWIRE_VERSION=0.1.0
ARG EXTRAS=hub,metrics
RUN python3 -m pip install --no-cache-dir "thinwire[${EXTRAS}]==${THINWIRE_VERSION}" \
    && thinwire --help > /dev/null

# Nothing needs root. What is kept goes below /var/lib/thinwire: mount a volume there.
RUN useradd --uid 10001 --user-group --create-home --home-dir /var/lib/thinwire thinwire
ENV HOME=/var/lib/thinwire PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 DO_NOT_TRACK=1
USER 10001:10001
WORKDIR /var/lib/thinwire

ENTRYPOINT ["thinwire"]
