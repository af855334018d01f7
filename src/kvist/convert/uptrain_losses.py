"""What a student learns from: the teacher's predictions, its layers' attention outputs, and the text itself.

The logits of a step would take `tokens * V * 4` bytes, several times over: 400 MB for 2,048 tokens of a vocabulary of
49,152. So they are computed for some rows at a time, forward and backward, and what remains is the gradient of the
last hidden states.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.nn import functional

from kvist.convert.uptrain_config import UptrainConfig
from kvist.convert.uptrain_models import Trained

# Of one block of logits in fp32. About ten such are alive at once.
_BLOCK_BYTES = 64 << 20


@dataclass(frozen=True)
class StepLosses:
    """What a step came to, means per token or layer.

    Attributes:
        loss: the weighted sum that is made smaller.
        logits: KL(teacher || student), nats per token; None where it was not asked for.
        attention: squared difference of the attention outputs over the teacher's square, mean over layers; None too.
        text: nats per token of the text; None too.
    """

    loss: float
    logits: float | None
    attention: float | None
    text: float | None


def backward(
    student: Trained, teacher: Trained | None, token_ids: torch.Tensor, positions: torch.Tensor, config: UptrainConfig
) -> StepLosses:
    """Add the gradient of a step's loss to the student's parameters.

    Args:
        student: what learns.
        teacher: what it learns from; None where `config` asks for the text's loss alone.
        token_ids: `[B, L]` int64.
        positions: of each sequence, those whose predictions count, ascending.
        config: the weights of the losses.
    """
    by_layer = teacher is not None and config.attention_weight > 0
    with _attention_outputs(student, wanted=by_layer) as of_student:
        hidden = student.hidden_states(token_ids)
    with _attention_outputs(teacher, wanted=by_layer) as of_teacher, torch.no_grad():
        wanted = None if teacher is None else teacher.hidden_states(token_ids)

    found = _prediction_losses(student, teacher, hidden.detach(), wanted, token_ids, positions, config)
    roots, gradients = [hidden], [found.hidden_gradient]
    attention: float | None = None
    if by_layer:
        differences = attention_loss(of_student, of_teacher)
        roots.append(config.attention_weight * differences)
        gradients.append(torch.ones_like(differences))
        attention = differences.item()
    torch.autograd.backward(roots, gradients)
    loss = config.attention_weight * (attention or 0.0) + found.loss
    return StepLosses(loss, found.logits, attention, found.text)


def attention_loss(student: list[torch.Tensor], teacher: list[torch.Tensor]) -> torch.Tensor:
    """How far attention outputs are from the teacher's: squares over the teacher's squares, mean over layers.

    Relative, since outputs of later layers are larger by orders of magnitude and would count alone.
    """
    parts = [
        (ours.float() - theirs.float()).square().sum() / theirs.float().square().sum().clamp_min(1e-12)
        for ours, theirs in zip(student, teacher, strict=True)
    ]
    return torch.stack(parts).mean()


@torch.no_grad()
def text_loss(model: Trained, sequences: torch.Tensor, batch: int) -> float:
    """Nats per token with which a model predicts sequences `[B, L]`, each from its second token on."""
    total = 0.0
    for ids in torch.split(sequences, batch):
        hidden = model.hidden_states(ids)[:, :-1].flatten(0, 1)
        targets = ids[:, 1:].flatten()
        rows = block_rows(model.vocab_size)
        for part, target in zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True):
            total += functional.cross_entropy(model.logits(part).float(), target, reduction="sum").double().item()
    return total / (sequences.shape[0] * (sequences.shape[1] - 1))


def block_rows(vocab_size: int) -> int:
    """How many rows of logits are computed at once."""
    return max(1, _BLOCK_BYTES // (4 * vocab_size))


@dataclass(frozen=True)
class _PredictionLosses:
    loss: float
    logits: float | None
    text: float | None
    hidden_gradient: torch.Tensor


def _prediction_losses(
    student: Trained,
    teacher: Trained | None,
    hidden: torch.Tensor,
    wanted: torch.Tensor | None,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    config: UptrainConfig,
) -> _PredictionLosses:
    """The losses of the predictions, and their gradient in the hidden states `[B, L, E]`.

    The output matrix gets its gradient here, block by block; what lies below the hidden states gets its own later.
    """
    gradient = torch.zeros_like(hidden)
    # The last position of a sequence predicts what is not there.
    targets = functional.pad(token_ids[:, 1:], (0, 1), value=-100)[:, positions].flatten()
    num_targets = max(1, int((targets >= 0).sum()))
    rows = block_rows(student.vocab_size)
    chosen = torch.split(hidden[:, positions].flatten(0, 1), rows)
    theirs = None if wanted is None else torch.split(wanted[:, positions].flatten(0, 1), rows)
    num_rows = len(targets)
    logits_total = text_total = 0.0
    by_logits, by_text = config.logit_weight > 0 and teacher is not None, config.text_weight > 0
    of_rows = []
    for index, (part, target) in enumerate(zip(chosen, torch.split(targets, rows), strict=True)):
        if not (by_logits or by_text):
            of_rows.append(torch.zeros_like(part))
            continue
        leaf = part.clone().requires_grad_()
        log_q = student.logits(leaf).float().log_softmax(-1)
        loss = log_q.new_zeros(())
        if by_logits:
            assert teacher is not None
            assert theirs is not None
            with torch.no_grad():
                log_p = teacher.logits(theirs[index]).float().log_softmax(-1)
            divergence = functional.kl_div(log_q, log_p, reduction="sum", log_target=True)
            logits_total += divergence.item()
            loss = loss + config.logit_weight / num_rows * divergence
        if by_text:
            surprisal = functional.nll_loss(log_q, target, reduction="sum")
            text_total += surprisal.item()
            loss = loss + config.text_weight / num_targets * surprisal
        loss.backward()  # type: ignore[no-untyped-call]
        assert leaf.grad is not None
        of_rows.append(leaf.grad)
    gradient[:, positions] = torch.cat(of_rows).view(len(token_ids), len(positions), -1).to(gradient.dtype)
    logits, text = logits_total / num_rows, text_total / num_targets
    return _PredictionLosses(
        config.logit_weight * logits + config.text_weight * text,
        logits if by_logits else None,
        text if by_text else None,
        gradient,
    )


@contextmanager
def _attention_outputs(model: Trained | None, *, wanted: bool) -> Iterator[list[torch.Tensor]]:
    """Within, a forward pass puts each layer's attention output `[B, L, E]` into the list.

    With gradient checkpointing layers run again in the backward pass, which is outside.
    """
    found: list[torch.Tensor] = []
    handles = []
    if wanted and model is not None:

        def keep(module: torch.nn.Module, inputs: object, output: object) -> None:
            found.append(output[0] if isinstance(output, tuple) else output)  # type: ignore[arg-type]

        handles = [module.register_forward_hook(keep) for module in model.attention_modules]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
