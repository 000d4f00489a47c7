"""vLLM: a weight-transfer backend for its workers, and a client that drives it over HTTP."""

from thinwire.engines.vllm.client import VLLM

__all__ = ["VLLM"]
