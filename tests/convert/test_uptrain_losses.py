"""The losses in blocks, held against the plain ones over all logits at once."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional
from uptrain_tiny import write_student, write_teacher

import kvist.convert.uptrain_losses as losses
from kvist.convert.uptrain_config import UptrainConfig
from kvist.convert.uptrain_folder import ModelFolder
from kvist.convert.uptrain_models import Trained, load_model

EVERY_LOSS = UptrainConfig(steps=1, sequence=9, logit_weight=0.7, attention_weight=2.0, text_weight=0.3)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trained, Trained]:
    folder = tmp_path_factory.mktemp("models")
    return tuple(  # type: ignore[return-value]
        load_model(ModelFolder.student(write(folder / write.__name__)), torch.float32, nullcontext)
        for write in (write_student, write_teacher)
    )


def fresh(model: Trained) -> Trained:
    student = Trained.of(copy.deepcopy(model.model), nullcontext)
    student.choose_trained("all")
    return student


def gradients(model: Trained) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.model.named_parameters() if p.grad is not None}


def plainly(student: Trained, teacher: Trained, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The same loss as transformers computes it, all logits at once."""
    outputs: dict[str, list[torch.Tensor]] = {"student": [], "teacher": []}
    logits = {}
    for name, model in (("student", student), ("teacher", teacher)):
        handles = [
            layer.self_attn.register_forward_hook(lambda _, __, out, name=name: outputs[name].append(out[0]))
            for layer in model.model.model.layers
        ]
        logits[name] = model.model(input_ids=ids).logits
        for handle in handles:
            handle.remove()
    log_q, log_p = (logits[name][:, positions].log_softmax(-1) for name in ("student", "teacher"))
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    predicting = positions[positions < ids.shape[1] - 1]
    text = functional.cross_entropy(logits["student"][:, predicting].flatten(0, 1), ids[:, predicting + 1].flatten())
    relative = [
        ((ours - theirs) ** 2).sum() / (theirs**2).sum()
        for ours, theirs in zip(outputs["student"], outputs["teacher"], strict=True)
    ]
    config = EVERY_LOSS
    return (
        config.logit_weight * divergence
        + config.text_weight * text
        + config.attention_weight * torch.stack(relative).mean()
    )


@pytest.mark.parametrize("rows", [1, 4, 1000])
@pytest.mark.parametrize("every", [1, 3])
def test_blocks_of_logits_give_the_plain_loss_and_gradient(
    models: tuple[Trained, Trained], monkeypatch: pytest.MonkeyPatch, rows: int, every: int
) -> None:
    monkeypatch.setattr(losses, "block_rows", lambda vocab_size: rows)
    ids = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(3))
    positions = torch.arange(1 % every, 9, every)
    ours, theirs = fresh(models[0]), fresh(models[0])
    found = losses.backward(ours, models[1], ids, positions, EVERY_LOSS)
    expected = plainly(theirs, models[1], ids, positions)
    expected.backward()
    assert found.loss == pytest.approx(expected.item(), rel=1e-5)
    wanted = gradients(theirs)
    assert gradients(ours).keys() == wanted.keys()
    for name, gradient in gradients(ours).items():
        torch.testing.assert_close(
            gradient,
            wanted[name],
            rtol=1e-3,
            atol=1e-4 * wanted[name].abs().max().item(),
            msg=lambda text, name=name: f"{name}: {text}",
        )


def test_gradient_checkpointing_gives_the_same_gradient(models: tuple[Trained, Trained]) -> None:
    ids = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(3))
    plain, again = fresh(models[0]), fresh(models[0])
    again.model.activation_checkpointing_enable({"use_reentrant": False})
    again.model.train()
    for student in (plain, again):
        losses.backward(student, models[1], ids, torch.arange(9), EVERY_LOSS)
    for name, gradient in gradients(again).items():
        torch.testing.assert_close(gradient, gradients(plain)[name], rtol=1e-5, atol=1e-7)


def test_a_student_that_is_its_teacher_has_nothing_to_learn(models: tuple[Trained, Trained]) -> None:
    config = UptrainConfig(steps=1, sequence=9)
    found = losses.backward(fresh(models[1]), models[1], torch.arange(18).view(2, 9), torch.arange(9), config)
    assert found.logits == pytest.approx(0, abs=1e-6)
    assert found.attention == 0


def test_attention_alone_leaves_all_other_weights_without_gradient(models: tuple[Trained, Trained]) -> None:
    student = Trained.of(copy.deepcopy(models[0].model), nullcontext)
    chosen = student.choose_trained("attention")
    losses.backward(student, models[1], torch.arange(18).view(2, 9), torch.arange(9), EVERY_LOSS)
    assert gradients(student).keys() == chosen.keys()
    assert {name.split(".")[3] for name in chosen} == {"self_attn"}


def test_the_text_loss_is_that_of_transformers(models: tuple[Trained, Trained]) -> None:
    ids = torch.randint(0, 256, (3, 9), generator=torch.Generator().manual_seed(4))
    expected = models[1].model(input_ids=ids, labels=ids).loss.item()
    assert losses.text_loss(models[1], ids, batch=2) == pytest.approx(expected, rel=1e-5)


def test_the_softcap_is_applied(models: tuple[Trained, Trained]) -> None:
    capped = Trained(models[0].model, 300, models[0].attention_modules, nullcontext, softcap=0.5)
    hidden = torch.randn(4, 64) * 10
    plain = models[0].logits(hidden)
    torch.testing.assert_close(capped.logits(hidden), 0.5 * torch.tanh(plain / 0.5))
