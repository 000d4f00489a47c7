"""What a stream of given size takes: bytes, requests, time, memory and cost, before anyone pays.

``model`` computes it, ``simulate`` plays it through with failures, ``check`` holds the model
against real publishers and followers. docs/scale.md carries 1 T weights through all of it.
"""
