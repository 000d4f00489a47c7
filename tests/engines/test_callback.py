"""ThinwireCallback in a real transformers trainer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: its callback was NOT tested"
)
pytest.importorskip("accelerate", reason="accelerate is not installed: the callback was NOT tested")

import torch  # noqa: E402

from thinwire.errors import InvalidArgument, StoreError  # noqa: E402
from thinwire.follow import open_stream  # noqa: E402
from thinwire.follow.stream import Stream  # noqa: E402
from thinwire.store import open_store  # noqa: E402

from .making import Outage, bits, rebuilt, rounded, tiny_model, tokenizer_in  # noqa: E402
from .witness import Witness  # noqa: E402


def trainer(
    folder: Path, callbacks: list[Any], *, steps: int, model: Any = None, **options: Any
) -> Any:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 32, (64, 8), generator=generator)
    return transformers.Trainer(
        model=tiny_model() if model is None else model,
        args=transformers.TrainingArguments(
            output_dir=str(folder / "out"),
            max_steps=steps,
            per_device_train_batch_size=4,
            learning_rate=1e-3,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            **options,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=callbacks,
    )


def callback(url: str | Stream, **options: Any) -> Any:
    from thinwire.engines.trl import ThinwireCallback

    return ThinwireCallback(url, **{"when_busy": "block", **options})


def test_five_lines_publish_every_step(tmp_path: Path) -> None:
    url, witness = (tmp_path / "store").as_uri(), Witness()
    trainer(tmp_path, [callback(url), witness], steps=4).train()
    found = rebuilt(url, tmp_path / "live")
    assert [version.step for version, _ in found] == [0, 1, 2, 3, 4]
    for version, tensors in found:
        assert version.step is not None
        assert bits(tensors) == bits(witness.weights[version.step])
    assert all(version.changed_count for version, _ in found[1:])


def test_what_is_followed_is_a_model_with_its_tokenizer(tmp_path: Path) -> None:
    url, model = (tmp_path / "store").as_uri(), tiny_model()
    run = trainer(tmp_path, [callback(url)], steps=2, model=model)
    run.callback_handler.processing_class = tokenizer_in(tmp_path / "tokenizer")
    run.processing_class = run.callback_handler.processing_class
    run.train()
    rebuilt(url, tmp_path / "live")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "live")
    assert loaded.dtype == torch.bfloat16
    assert bits(rounded(loaded)) == bits(rounded(model))
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "live")
    assert tokenizer("w5 w7")["input_ids"] == [5, 7]


def test_every_so_many_optimizer_steps_and_the_last_one(tmp_path: Path) -> None:
    url, witness = (tmp_path / "store").as_uri(), Witness()
    options = {"gradient_accumulation_steps": 2}
    trainer(tmp_path, [callback(url, every_steps=2), witness], steps=5, **options).train()
    found = rebuilt(url, tmp_path / "live")
    assert [version.step for version, _ in found] == [0, 2, 4, 5]
    for version, tensors in found:
        assert version.step is not None
        assert bits(tensors) == bits(witness.weights[version.step])


def test_where_versions_are_skipped_the_last_one_is_not(tmp_path: Path) -> None:
    url, witness = (tmp_path / "store").as_uri(), Witness()
    trainer(tmp_path, [callback(url, when_busy="latest"), witness], steps=8).train()
    found = rebuilt(url, tmp_path / "live")
    assert (found[0][0].step, found[-1][0].step) == (0, 8)
    for version, tensors in found:
        assert version.step is not None
        assert bits(tensors) == bits(witness.weights[version.step])


def test_a_run_that_is_resumed_goes_on_in_the_same_stream(tmp_path: Path) -> None:
    url, model = (tmp_path / "store").as_uri(), tiny_model()
    trainer(tmp_path, [callback(url)], steps=2, model=model).train()
    trainer(tmp_path, [callback(url)], steps=1, model=model).train()
    found = rebuilt(url, tmp_path / "live")
    assert [version.step for version, _ in found] == [0, 1, 2, 0, 1]
    assert len({version.lineage for version, _ in found}) == 1
    assert found[3][0].changed_count == 0
    assert bits(found[-1][1]) == bits(rounded(model))


def test_one_callback_serves_two_trainings(tmp_path: Path) -> None:
    url, model = (tmp_path / "store").as_uri(), tiny_model()
    run = trainer(tmp_path, [callback(url)], steps=1, model=model)
    run.train()
    run.train()
    found = rebuilt(url, tmp_path / "live")
    assert [version.step for version, _ in found] == [0, 1, 0, 1]
    assert bits(found[-1][1]) == bits(rounded(model))


def test_other_tensors_by_a_function(tmp_path: Path) -> None:
    url, model = (tmp_path / "store").as_uri(), tiny_model()
    chosen = callback(url, state=lambda model: {"only": model.model.norm.weight})
    trainer(tmp_path, [chosen], steps=1, model=model).train()
    found = rebuilt(url, tmp_path / "live")
    assert bits(found[-1][1]) == bits({"only": model.model.norm.weight.detach().bfloat16()})


class Switch(transformers.TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Turns a store off and on at given steps, once what runs is done."""

    def __init__(self, store: Outage, down: range, settle: Callable[[], None]) -> None:
        self._store, self._down, self._settle = store, down, settle

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._settle()
        self._store.is_down = state.global_step + 1 in self._down


def outage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, down: range
) -> tuple[str, Witness, Any]:
    url = (tmp_path / "store").as_uri()
    store = Outage(open_store(url))
    stream = open_stream(store, retry_s=0.0)
    published, witness = callback(stream, maintain=False), Witness()
    caplog.set_level(logging.WARNING, "thinwire.engines.trl")

    def settle() -> None:
        ticket = published._ticket
        if ticket is not None:
            ticket._done.wait(60)

    switch = Switch(store, down, settle)
    return url, witness, trainer(tmp_path, [switch, published, witness], steps=4)


def test_training_goes_on_through_an_outage_and_loses_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url, witness, run = outage(tmp_path, caplog, range(2, 3))
    run.train()
    found = rebuilt(url, tmp_path / "live")
    assert [version.step for version, _ in found] == [0, 1, 3, 4]
    for version, tensors in found:
        assert version.step is not None
        assert bits(tensors) == bits(witness.weights[version.step])
    assert "step 2 were not published" in caplog.text


def test_the_end_raises_when_the_last_weights_are_not_published(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url, witness, run = outage(tmp_path, caplog, range(4, 9))
    with pytest.raises(StoreError):
        run.train()
    found = rebuilt(url, tmp_path / "live")
    assert [version.step for version, _ in found] == [0, 1, 2, 3]
    assert bits(found[-1][1]) == bits(witness.weights[3])


def test_an_adapter_is_published_alone(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: adapters were NOT tested")
    url, base = (tmp_path / "store").as_uri(), tiny_model()
    settings = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(base, settings)
    trainer(tmp_path, [callback(url, dtype=None)], steps=2, model=model).train()
    found = rebuilt(url, tmp_path / "live")
    assert [version.step for version, _ in found] == [0, 1, 2]
    assert bits(found[-1][1]) == bits(
        {name: tensor.clone() for name, tensor in peft.get_peft_model_state_dict(model).items()}
    )
    loaded = peft.PeftModel.from_pretrained(tiny_model(), tmp_path / "live")
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model.eval()(tokens).logits)


def test_zero_3_is_refused(tmp_path: Path) -> None:
    model = tiny_model()
    model.model.norm.weight.ds_id = 7  # as DeepSpeed marks what it took apart
    with pytest.raises(InvalidArgument, match="ZeRO-3"):
        trainer(tmp_path, [callback((tmp_path / "store").as_uri())], steps=1, model=model).train()


def test_less_than_every_step_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="every_steps"):
        callback("memory://x", every_steps=0)
