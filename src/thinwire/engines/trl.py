"""thinwire in TRL's and transformers' trainers.

``AsyncGRPOTrainer`` takes :class:`ThinwireWeightTransfer` as its ``weight_transfer``; every other
trainer of TRL and transformers takes :class:`ThinwireCallback` as a callback. TRL itself is not
needed to import this file.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import TrainerCallback

from thinwire.errors import InvalidArgument, ThinwireError
from thinwire.stream.version import Version
from thinwire.torch import Ticket, TorchPublisher
from thinwire.torch.files import small_files

if TYPE_CHECKING:
    from thinwire.follow import Stream

_LOG = logging.getLogger(__name__)
_WEIGHTS_OF_ADAPTER = "adapter_model.safetensors"


class ThinwireWeightTransfer:
    """Publishes what ``AsyncGRPOTrainer`` sends to its samplers: a ``WeightTransferProtocol``.

    ::

        transfer = ThinwireWeightTransfer("s3://bucket/run", files="path/of/the/base/model")
        trainer = AsyncGRPOTrainer(..., weight_transfer=transfer)

    The trainer sends its weights once when training begins, then every ``weight_sync_steps``
    steps, from its main process only. It takes sync number n for the version that samples are
    made with from then on; in a new stream that is version n.

    The samplers fetch versions by themselves and change over between two requests, so nothing of
    theirs is stopped in :meth:`pause`. What the trainer waits for in :meth:`resume` is that the
    version is committed, and whatever ``serving`` waits for.

    The trainer gathers one tensor at a time; each is compared with the baseline and let go before
    the next is drawn. Only the first sync copies them all into host memory, to open the stream.

    Args:
        stream: The stream, or its URL.
        step: Asked for the trainer's step at each sync, such as
            ``lambda: trainer.state.global_step``; None: the number of syncs before.
        serving: Called with each version in :meth:`resume`; it returns once the samplers serve it.
        overlap: Let the trainer go on while the version is uploaded. Samples may then be made with
            one version less than the trainer takes them for. A failed version is logged and not
            raised: the next one holds what it would have held.
        timeout_s: How long a version may be on its way.
        options: Of :class:`thinwire.torch.TorchPublisher`, such as ``folder``, ``files``,
            ``dtype`` or ``exclude``.
    """

    def __init__(
        self,
        stream: Stream | str | os.PathLike[str],
        *,
        step: Callable[[], int] | None = None,
        serving: Callable[[Version], None] | None = None,
        overlap: bool = False,
        timeout_s: float = 1800.0,
        **options: Any,
    ) -> None:
        for name in ("model", "group", "when_busy"):
            if name in options:
                raise InvalidArgument(f"{name} is not for the caller to choose here")
        self._stream = stream
        self._step = step
        self._serving = serving
        self._overlap = overlap
        self._timeout_s = timeout_s
        self._options = options
        self._publisher: TorchPublisher | None = None
        self._ticket: Ticket | None = None
        self._count = 0

    @property
    def head(self) -> Version | None:
        """The newest version; None: nothing was published yet."""
        return None if self._publisher is None else self._publisher.head

    def init_weight_transfer(self) -> None:
        """Nothing: which tensors there are shows at the first sync."""

    def pause(self) -> None:
        """Nothing: samplers go on with what they have."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Capture the weights; the version is made behind the training.

        Raises:
            ThinwireError: They cannot be captured, or the stream cannot be opened.
        """
        self._report_failure()
        try:
            step = self._count if self._step is None else self._step()
            metadata = {"sync": self._count + 1}
            if self._publisher is None:
                self._ticket = self._begin(iterator, step, metadata)
            else:
                self._ticket = self._publisher.publish(step, metadata=metadata, tensors=iterator)
            self._count += 1
        finally:
            # The other ranks draw their own to the end, and each item is a collective of all.
            for _ in iterator:
                pass

    def resume(self) -> None:
        """Wait until the version is committed, and until the samplers serve it.

        Raises:
            ThinwireError: It could not be published, or not in time.
        """
        if self._ticket is None or self._overlap:
            return
        version = self._ticket.wait(self._timeout_s)
        if version is not None and self._serving is not None:
            self._serving(version)

    def destroy(self) -> None:
        """Wait for the version that is on its way, and let go of everything."""
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.close(self._timeout_s)
            self._report_failure()
        self._ticket = None

    def _begin(
        self, iterator: Iterator[tuple[str, torch.Tensor]], step: int, metadata: dict[str, Any]
    ) -> Ticket:
        """Open the stream with what comes first: only then it shows which tensors there are."""
        copies = {name: self._copied(tensor) for name, tensor in iterator}
        self._publisher = TorchPublisher(
            lambda: copies, self._stream, when_busy="block", group=False, **self._options
        )
        try:
            return self._publisher.publish(step, metadata=metadata)
        finally:
            copies.clear()

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """In host memory; rounded here already, where the publisher is sure to do the same."""
        dtype = self._options.get("dtype", torch.bfloat16)
        is_rounded = tensor.dtype.is_floating_point and tensor.element_size() > 1
        if dtype is None or not is_rounded or "dtypes" in self._options:
            dtype = tensor.dtype
        return tensor.detach().to("cpu", dtype, copy=True)

    def _report_failure(self) -> None:
        """Where nobody waited for a version, say that it failed."""
        if self._overlap and self._ticket is not None and self._ticket.is_done:
            _report(self._ticket)


class ThinwireCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Publishes a transformers trainer's model every so many optimizer steps.

    ::

        trainer = Trainer(..., callbacks=[ThinwireCallback("s3://bucket/run", every_steps=1)])

    Every rank publishes what it holds: right with DDP, FSDP2 and alone, without gathering. FSDP1
    and DeepSpeed's ZeRO-3 are refused. The weights that training begins with are published first,
    those that it ends with last. While training runs, a version that failed is logged: the next
    one holds what it would have held. Only when the last one fails, the end of the training raises.

    Of a PEFT model the adapter is published alone, as PEFT's own folder.

    Args:
        stream: The stream, or its URL.
        every_steps: Optimizer steps between two versions.
        state: Asked for the tensors by name at every version, with the model: for other names or
            other tensors than the model's parameters. None: those.
        timeout_s: How long the end of the training waits for a version.
        options: Of :class:`thinwire.torch.TorchPublisher`. Unless ``files`` is given, the first
            version holds the model's configuration and the tokenizer's files.
    """

    def __init__(
        self,
        stream: Stream | str | os.PathLike[str],
        *,
        every_steps: int = 1,
        state: Callable[[nn.Module], Mapping[str, torch.Tensor]] | None = None,
        timeout_s: float = 1800.0,
        **options: Any,
    ) -> None:
        if every_steps < 1:
            raise InvalidArgument(f"every_steps is {every_steps}, which is less than 1")
        self._stream = stream
        self._every_steps = every_steps
        self._state = state
        self._timeout_s = timeout_s
        self._options = options
        self._publisher: TorchPublisher | None = None
        self._ticket: Ticket | None = None

    @property
    def head(self) -> Version | None:
        """The newest version; None: nothing was published, or the training is over."""
        return None if self._publisher is None else self._publisher.head

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        **kwargs: Any,
    ) -> None:
        """Open the publisher and publish the weights that training begins with."""
        self.close()
        model = kwargs["model"]
        _check_whole(model)
        options = self._options
        if self._state is not None:
            get_state = self._state
            source: Any = lambda: get_state(model)  # noqa: E731
        elif hasattr(model, "peft_config"):
            source = lambda: _adapter(model)  # noqa: E731
            config = model.peft_config[model.active_adapter]
            options = {"files": _saved(config), "weights_name": _WEIGHTS_OF_ADAPTER, **options}
        else:
            source = model
        if "files" not in options:
            files = small_files(model, _saved(kwargs.get("processing_class")))
            options = {"files": files, **options}
        self._publisher = TorchPublisher(source, self._stream, **options)
        self._publish(state.global_step)

    def on_step_end(
        self,
        args: Any,
        state: Any,
        control: Any,
        **kwargs: Any,
    ) -> None:
        """Publish, if it is time to."""
        if state.global_step % self._every_steps == 0:
            self._publish(state.global_step)

    def on_train_end(
        self,
        args: Any,
        state: Any,
        control: Any,
        **kwargs: Any,
    ) -> None:
        """Publish the weights that training ends with, unless they are, and close.

        Raises:
            ThinwireError: They could not be published.
        """
        if self._publisher is None:
            return
        try:
            if not self._holds(state.global_step):
                self._publish(state.global_step)
                if self._ticket is not None:
                    self._ticket.wait(self._timeout_s)
        finally:
            self.close()

    def close(self) -> None:
        """Wait for the version that is on its way, and let go of everything.

        For those who catch what a training raised; its regular end closes by itself.
        """
        publisher, self._publisher = self._publisher, None
        self._ticket = None
        if publisher is not None:
            publisher.close(self._timeout_s)

    def _publish(self, step: int) -> None:
        if self._publisher is None:
            return
        if self._ticket is not None and self._ticket.is_done:
            _report(self._ticket)
        ticket = self._publisher.publish(step)
        # A skipped one tells nothing of the version that is still on its way.
        if ticket.state != "skipped":
            self._ticket = ticket

    def _holds(self, step: int) -> bool:
        """Whether the version on its way is of this step, and came through."""
        if self._ticket is None:
            return False
        with suppress(ThinwireError):
            self._ticket.wait(self._timeout_s)
        _report(self._ticket)
        return self._ticket.state == "committed" and self._ticket.step == step


def _report(ticket: Ticket) -> None:
    if ticket.error is not None:
        _LOG.warning("the weights of step %s were not published: %s", ticket.step, ticket.error)


def _check_whole(model: nn.Module) -> None:
    """Refuse weights that are no tensors of this process."""
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise InvalidArgument(
            "DeepSpeed's ZeRO-3 keeps the weights in parts of its own",
            hint="Use FSDP2, or give a function that returns whole tensors (state=)",
        )


def _adapter(model: nn.Module) -> dict[str, torch.Tensor]:
    from peft import get_peft_model_state_dict

    # "auto" would ask the hub whether the vocabulary grew.
    found: dict[str, torch.Tensor] = get_peft_model_state_dict(model, save_embedding_layers=False)
    return found


def _saved(part: Any) -> dict[str, bytes]:
    """The small files that a tokenizer or a configuration saves; none, where there is no such."""
    if not hasattr(part, "save_pretrained"):
        return {}
    with tempfile.TemporaryDirectory() as folder:
        part.save_pretrained(folder)
        return small_files(None, folder)
