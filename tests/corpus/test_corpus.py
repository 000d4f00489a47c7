"""The corpus builder: Muon, GRPO's arithmetic, the decoder, the scorers, and repeatable bytes."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

CORPUS_FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "corpus"
MISSING = [name for name in ("torch", "safetensors") if importlib.util.find_spec(name) is None]
if MISSING:
    pytest.skip(
        f"{' and '.join(MISSING)} missing: the corpus builder trains with them and thinwire itself "
        "does not need them. pip install -r benchmarks/corpus/requirements.txt",
        allow_module_level=True,
    )

sys.path.insert(0, str(CORPUS_FOLDER))  # the builder is a program, not an installed package

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from decoder import Decoder, DecoderConfig  # noqa: E402
from grpo import (  # noqa: E402
    GRPOTrainer,
    MasterWeights,
    OptimizerSettings,
    build_optimizers,
    clipped_loss,
    group_advantages,
    through_first_end,
    token_log_probs,
)
from make_corpus import RunSettings, write_run  # noqa: E402
from muon import Muon, orthogonalise  # noqa: E402
from policy_decoder import ALPHABET, END_TOKEN, DecoderPolicy  # noqa: E402
from tasks import PRETRAIN_STREAM, Products, Question, SortLetters  # noqa: E402

TINY = DecoderConfig(
    vocabulary_size=len(ALPHABET),
    end_token=END_TOKEN,
    hidden_size=32,
    feed_forward_size=48,
    layer_count=2,
    head_count=4,
    key_value_head_count=2,
)
SETTINGS = RunSettings(
    model="decoder",
    optimizer="adamw",
    learning_rate=1e-4,
    beta1=0.9,
    beta2=0.999,
    steps=2,
    warmup_steps=1,
    questions_per_step=2,
    group_size=4,
    pretrain_steps=3,
    seed=7,
    threads=1,
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def write_tiny_run(settings: RunSettings, folder: Path) -> dict[str, str]:
    """Digest of every file but the timing, by path within the run."""
    task = SortLetters(settings.seed)
    policy = DecoderPolicy(settings.seed, TINY)
    policy.pretrain(task, settings.pretrain_steps)
    write_run(policy, task, settings, folder, prepare_s=0.0)
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "timing.json"
    }


class TestMuon:
    @pytest.mark.parametrize("shape", [(24, 24), (16, 48), (48, 16)])
    def test_orthogonalise_evens_out_the_singular_values(self, shape: tuple[int, int]) -> None:
        matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        values = torch.linalg.svdvals(orthogonalise(matrix))
        assert values.min() > 0.6
        assert values.max() < 1.3

    def test_orthogonalise_keeps_the_singular_vectors(self) -> None:
        matrix = torch.randn((16, 48), generator=torch.Generator().manual_seed(2))
        u, _, vt = torch.linalg.svd(matrix, full_matrices=False)
        cosine = torch.nn.functional.cosine_similarity(
            orthogonalise(matrix).flatten(), (u @ vt).flatten(), dim=0
        )
        assert cosine > 0.95

    def test_a_step_moves_a_weight_about_as_far_as_adamw(self) -> None:
        weight = torch.zeros((32, 64))
        weight.grad = torch.randn((32, 64), generator=torch.Generator().manual_seed(3))
        Muon([weight], lr=1e-3, weight_decay=0.0).step()
        assert 1e-4 < weight.square().mean().sqrt() < 3e-4

    def test_momentum_is_nesterov(self) -> None:
        """Two equal gradients point the same way as one; only the momentum's length differs."""
        weight = torch.zeros((8, 8))
        optimizer = Muon([weight], lr=1e-3, weight_decay=0.0)
        weight.grad = torch.randn((8, 8), generator=torch.Generator().manual_seed(4))
        optimizer.step()
        first = weight.clone()
        optimizer.step()
        torch.testing.assert_close(weight, 2 * first, rtol=1e-4, atol=1e-9)

    def test_a_vector_is_refused(self) -> None:
        with pytest.raises(ValueError, match="matrices"):
            Muon([torch.zeros(4)], lr=1e-3, weight_decay=0.0)

    def test_embedding_and_norms_stay_with_adamw(self) -> None:
        weights = MasterWeights(Decoder(TINY))
        optimizer_settings = OptimizerSettings("muon", 1e-3, 0.9, 0.999, 0)
        adamw, muon = build_optimizers(weights.master, optimizer_settings)
        names = {id(weight): name for name, weight in weights.master.items()}
        by_adamw = {names[id(weight)] for weight in adamw.param_groups[0]["params"]}
        by_muon = {names[id(weight)] for weight in muon.param_groups[0]["params"]}
        assert by_adamw | by_muon == set(weights.master)
        assert not by_adamw & by_muon
        assert "model.embed_tokens.weight" in by_adamw
        assert all(name.endswith("_proj.weight") for name in by_muon)


class TestGRPO:
    def test_advantages_are_normalised_within_each_group(self) -> None:
        rewards = torch.tensor([[0.0, 1.0, 0.5, 0.5], [0.9, 0.9, 1.0, 0.8]])
        advantages = group_advantages(rewards)
        torch.testing.assert_close(advantages.mean(dim=1), torch.zeros(2), atol=1e-6, rtol=0)
        torch.testing.assert_close(advantages.std(dim=1), torch.ones(2), atol=2e-3, rtol=0)

    def test_equal_rewards_teach_nothing(self) -> None:
        assert group_advantages(torch.full((1, 4), 0.7)).abs().max() < 1e-2

    def test_token_log_probs_look_one_token_back(self) -> None:
        logits = torch.randn((2, 5, 7), generator=torch.Generator().manual_seed(5))
        tokens = torch.tensor([[1, 2, 3, 4, 5], [6, 5, 4, 3, 2]])
        log_probs = token_log_probs(logits, tokens)
        assert log_probs.shape == tokens.shape
        assert log_probs[:, 0].eq(0).all()
        assert log_probs[1, 3] == logits[1, 2].log_softmax(-1)[tokens[1, 3]]

    def test_ratio_one_gives_the_policy_gradient(self) -> None:
        new = torch.tensor([[-1.0, -2.0, -3.0]], requires_grad=True)
        sampled = torch.tensor([[False, True, True]])
        loss = clipped_loss(new, new.detach(), torch.tensor([2.0]), sampled)
        torch.autograd.backward(loss.sum())
        assert new.grad is not None
        torch.testing.assert_close(new.grad, torch.tensor([[0.0, -1.0, -1.0]]))

    @pytest.mark.parametrize(("ratio", "advantage"), [(1.5, 1.0), (0.5, -1.0)])
    def test_no_gradient_beyond_the_clip_range(self, ratio: float, advantage: float) -> None:
        new = torch.tensor([[ratio]]).log().requires_grad_()
        loss = clipped_loss(
            new, torch.zeros((1, 1)), torch.tensor([advantage]), torch.ones((1, 1)).bool()
        )
        torch.autograd.backward(loss.sum())
        assert new.grad is not None
        assert new.grad.item() == 0.0

    def test_a_completion_stops_at_its_first_end(self) -> None:
        mask = through_first_end(torch.tensor([[1, 9, 2, 9], [1, 2, 3, 4]]), end_token=9)
        assert mask.tolist() == [[True, True, False, False], [True, True, True, True]]

    def test_warm_up_is_linear_and_ends(self) -> None:
        settings = OptimizerSettings("adamw", 1e-6, 0.9, 0.999, 5)
        rates = [settings.learning_rate_at(step) for step in (1, 5, 6)]
        assert rates == pytest.approx([2e-7, 1e-6, 1e-6])

    def test_small_moves_gather_in_the_master_until_the_bf16_value_follows(self) -> None:
        module = torch.nn.Linear(1, 1, bias=False)
        module.weight.data.fill_(1.0)  # the next BF16 value is 1 + 2**-7
        weights = MasterWeights(module)
        seen = []
        for _ in range(3):
            weights.master["weight"].add_(2**-9 * 1.01)
            weights.round_into_module()
            seen.append(module.weight.item())
        assert seen == [1.0, 1 + 2**-7, 1 + 2**-7]

    def test_a_question_asked_again_is_answered_better(self) -> None:
        task = SortLetters(1)
        policy = DecoderPolicy(1, TINY)
        policy.pretrain(task, steps=20)
        trainer = GRPOTrainer(policy, task, OptimizerSettings("adamw", 1e-2, 0.9, 0.999, 5), 16)
        questions = [task.question(0), task.question(1)]
        rewards = [trainer.step(step, questions).reward for step in range(1, 41)]
        assert sum(rewards[-5:]) > 2 * sum(rewards[:5]), rewards  # it grows about fourfold


class TestDecoder:
    def test_a_token_never_sees_the_ones_after_it(self) -> None:
        torch.manual_seed(0)
        decoder = Decoder(TINY)
        tokens = torch.tensor([[1, 2, 3, 4, 5, 6]])
        changed = tokens.clone()
        changed[0, 4:] = 9
        before, after = decoder(tokens), decoder(changed)
        torch.testing.assert_close(before[:, :4], after[:, :4])
        assert not torch.allclose(before[:, 4:], after[:, 4:])

    def test_position_matters(self) -> None:
        torch.manual_seed(0)
        decoder = Decoder(TINY)
        logits = decoder(torch.tensor([[1, 2, 3], [2, 1, 3]]))
        assert not torch.allclose(logits[0, 2], logits[1, 2])

    def test_samples_carry_the_log_probs_they_were_drawn_with(self) -> None:
        policy = DecoderPolicy(3, TINY)
        task = SortLetters(3)
        with torch.no_grad():
            (rollouts,) = policy.sample([task.question(0), task.question(1)], group_size=3)
            log_probs = token_log_probs(policy.logits(rollouts.tokens_BT), rollouts.tokens_BT)
        assert rollouts.question_indices == [0, 0, 0, 1, 1, 1]
        assert not rollouts.is_sampled_BT[:, : len(task.question(0).prompt)].any()
        torch.testing.assert_close(rollouts.log_probs_BT, log_probs * rollouts.is_sampled_BT)

    @pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None,
        reason="transformers missing: it is the other implementation the logits are compared with",
    )
    def test_a_checkpoint_is_a_llama_to_transformers(self, tmp_path: Path) -> None:
        from transformers import AutoModelForCausalLM

        write_tiny_run(replace(SETTINGS, steps=1), tmp_path)
        folder = tmp_path / "0001"
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        ours = Decoder(TINY)
        ours.load_state_dict(load_file(folder / "model.safetensors"))
        tokens = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]])
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-5)


class TestTasks:
    def test_sort_letters_rewards_right_places(self) -> None:
        task = SortLetters(0)
        question = Question(prompt="fedcba>", answer="abcdef")
        assert task.score("abcdef", question) == 1.0
        assert task.score("abcfed", question) == pytest.approx(4 / 6)
        assert task.score("abc", question) == pytest.approx(3 / 6)
        assert task.score("abcdefgh", question) == pytest.approx(6 / 8)
        assert task.score("", question) == 0.0

    def test_questions_are_fixed_by_seed_and_index(self) -> None:
        assert SortLetters(1).question(5) == SortLetters(1).question(5)
        assert SortLetters(1).question(5) != SortLetters(2).question(5)
        assert SortLetters(1).question(5) != SortLetters(1).question(5, PRETRAIN_STREAM)

    @pytest.mark.skipif(
        importlib.util.find_spec("reasoning_gym") is None,
        reason="reasoning-gym missing: only the smollm2 policy is trained on its task",
    )
    def test_products_scores_the_last_number(self) -> None:
        task = Products(0)
        question = task.question(0)
        assert task.score(f"{question.prompt} 7 so it is {question.answer}.", question) == 1.0
        assert task.score("no idea", question) == 0.0
        assert task.score(f"{question.answer} or rather 9999", question) < 1.0


class TestRun:
    @pytest.mark.parametrize(
        ("learning_rate", "name"), [(1e-6, "1e-6"), (2.5e-7, "2.5e-7"), (1e-4, "1e-4")]
    )
    def test_run_name(self, learning_rate: float, name: str) -> None:
        settings = replace(SETTINGS, learning_rate=learning_rate)
        assert settings.run_name == f"decoder-adamw-lr{name}"

    @pytest.mark.parametrize("optimizer", ["adamw", "muon"])
    def test_the_same_settings_give_the_same_bytes(self, tmp_path: Path, optimizer: str) -> None:
        settings = replace(SETTINGS, optimizer=optimizer)
        first = write_tiny_run(settings, tmp_path / "first")
        second = write_tiny_run(settings, tmp_path / "second")
        assert first == second
        checkpoints = [f"{step:04d}/model.safetensors" for step in range(3)]
        assert len({first[name] for name in checkpoints}) == 3
        other = write_tiny_run(replace(settings, seed=8), tmp_path / "other")
        assert other[checkpoints[0]] != first[checkpoints[0]]

    def test_run_json_tells_what_the_checkpoints_show(self, tmp_path: Path) -> None:
        write_tiny_run(SETTINGS, tmp_path)
        report = json.loads((tmp_path / "run.json").read_text())
        states = [load_file(tmp_path / f"{step:04d}" / "model.safetensors") for step in range(3)]
        assert {weight.dtype for weight in states[0].values()} == {torch.bfloat16}
        assert "model.layers.0.self_attn.q_proj.weight" in states[0]
        for step in (1, 2):
            old, new = states[step - 1], states[step]
            changed = sum(
                int((old[n].view(torch.int16) != new[n].view(torch.int16)).sum()) for n in old
            )
            share = changed / report["parameter_count"]
            assert report["steps"][step - 1]["changed_share"] == pytest.approx(share)
            assert 0.0 <= report["steps"][step - 1]["reward"] <= 1.0
        assert report["settings"]["seed"] == SETTINGS.seed
