"""A small OpenAI-compatible sampling server on transformers that follows a stream.

For tests and small runs. One thread samples, in batches; :class:`thinwire.torch.TorchSink` changes
the model between them. ``thinwire serve`` starts it.
"""
