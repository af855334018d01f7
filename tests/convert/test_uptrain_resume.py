"""A training that stops: what is kept of it, and that it goes on to the same bits or says what is other than before."""

from __future__ import annotations

import json
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from uptrain_tiny import (
    TEXT,
    TRAINED_ON,
    files,
    same_weights,
    stopped,
    stopping_at,
    train_config,
    training,
    weights,
    write_student,
    write_teacher,
)

import kvist.convert.uptrain as uptrain_module
from kvist.convert import uptrain_checkpoint
from kvist.convert.uptrain_losses import StepLosses
from kvist.errors import KvistError, ModelFileError, NumericsError, OptionError
from kvist.evaluate.text_windows import EvaluationText

OTHER = EvaluationText.of(b"A wood is more than its trees, as a tree is more than its twigs. " * 12, "wood.txt")


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    return write_teacher(tmp_path / "teacher")


@pytest.fixture
def student(tmp_path: Path) -> Path:
    return write_student(tmp_path / "student")


# --- to the bit -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.3], ids=["no_dropout", "dropout"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"train": "attention", "every": 3, "compute": "bf16"}, {"gradient_checkpointing": True}],
    ids=["plain", "attention", "gradient_checkpointing"],
)
def test_a_training_that_was_interrupted_goes_on_to_the_same_bits(
    tmp_path: Path, teacher: Path, changes: dict[str, Any], dropout: float
) -> None:
    whole, broken = (write_student(tmp_path / name, attention_dropout=dropout) for name in ("whole", "broken"))
    config = train_config(9, **changes)
    training(whole, teacher, config).run()
    before = weights(broken)
    for step in (2, 3, 7):
        begun = training(broken, teacher, config, resume=step > 2)
        torch.rand(step)  # what others draw is nothing to it
        stopped(begun, step)
        assert begun.saved_step == step
        assert same_weights(broken, before)
    result = training(broken, teacher, config, resume=True).run()
    assert same_weights(broken, weights(whole))
    assert [row.step for row in result.curve.rows] == list(range(10))


def test_saving_now_and_then_changes_no_bit(tmp_path: Path, teacher: Path) -> None:
    whole, saved = (write_student(tmp_path / name, attention_dropout=0.3) for name in ("whole", "saved"))
    training(whole, teacher).run()
    training(saved, teacher, train_config(save_minutes=0)).run()
    assert same_weights(saved, weights(whole))


def test_an_interrupt_within_a_step_saves_the_step_before(
    tmp_path: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, broken = (write_student(tmp_path / name, attention_dropout=0.3) for name in ("whole", "broken"))
    training(whole, teacher).run()
    begun = training(broken, teacher)
    plain = uptrain_module.backward
    interrupts = iter([KeyboardInterrupt])

    def interrupted(*arguments: Any) -> StepLosses:
        losses = plain(*arguments)
        if begun.step == 3 and (error := next(interrupts, None)):
            raise error  # what a step drew before is drawn again
        return losses

    monkeypatch.setattr(uptrain_module, "backward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        begun.run()
    monkeypatch.undo()
    assert begun.saved_step == 3
    training(broken, teacher, resume=True).run()
    assert same_weights(broken, weights(whole))


def test_a_signal_within_an_update_leaves_the_checkpoint_before(
    student: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = training(student, teacher, train_config(save_minutes=0))
    plain = begun._update

    def ended(rate: float) -> None:
        plain(rate)
        if begun.step == 4:
            raise SystemExit(143)

    monkeypatch.setattr(begun, "_update", ended)
    with pytest.raises(SystemExit):
        begun.run()
    assert begun.saved_step == 4
    found = uptrain_checkpoint.latest(student)
    assert found is not None
    assert found.step == 4


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_old_checkpoints_go_away(student: Path, teacher: Path) -> None:
    stopped(training(student, teacher, train_config(save_minutes=0)), 5)
    assert [path.name for path in (student / "uptraining").iterdir()] == ["step-00000005"]


def test_a_step_that_is_saved_is_not_written_again(student: Path, teacher: Path) -> None:
    stopped(training(student, teacher), 2)
    saved = student / "uptraining" / "step-00000002"
    before = saved.stat().st_ino
    training(student, teacher, resume=True).save()
    assert saved.stat().st_ino == before


def test_a_checkpoint_stays_until_another_of_the_same_step_has_its_place(
    student: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped(training(student, teacher), 2)
    before = files(student)

    def killed(made: Path, target: Path) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(uptrain_checkpoint, "move_into_place", killed)
    with pytest.raises(OptionError, match="Input/output error"):
        training(student, teacher, restart=True).run(stopping_at(2))
    assert files(student) == before


@pytest.mark.parametrize("save_minutes", [0, 5])
def test_weights_that_diverged_are_never_saved(student: Path, teacher: Path, save_minutes: float) -> None:
    """After one step at such a rate weights are finite, and no loss is any more."""
    before = files(student)
    with pytest.raises(NumericsError, match=f"not a finite number: {student} is as it was: start again"):
        training(student, teacher, train_config(learning_rate=1e30, save_minutes=save_minutes)).run()
    assert files(student) == before


@pytest.mark.parametrize("rate", [1e30, 1e36, 3e38])
def test_a_training_that_diverges_keeps_the_last_good_checkpoint(student: Path, teacher: Path, rate: float) -> None:
    stopped(training(student, teacher), 3)
    before = files(student)
    again = training(student, teacher, train_config(learning_rate=rate, save_minutes=0), resume=True)
    with pytest.raises(NumericsError, match=r"step \d is not a finite number: .* step 3 is kept: .*--resume.*--learn"):
        again.run()
    assert files(student) == before
    assert training(student, teacher, train_config(learning_rate=7e-4), resume=True).run().steps == 6


def test_an_interrupt_after_it_diverged_keeps_the_last_good_checkpoint(student: Path, teacher: Path) -> None:
    stopped(training(student, teacher), 3)
    before = files(student)
    again = training(student, teacher, train_config(learning_rate=1e30), resume=True)
    stopped(again, 4)
    assert again.saved_step == 3
    assert files(student) == before


# --- the same as before -----------------------------------------------------------------------------------------------


def refusal(student: Path, teacher: Path, **options: Any) -> str:
    before = files(student)
    with pytest.raises(KvistError) as refused:
        training(student, teacher, **options)
    assert files(student) == before
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_training_that_waits_is_neither_begun_anew_nor_changed_unasked(student: Path, teacher: Path) -> None:
    assert "leave --resume out" in refusal(student, teacher, resume=True)
    stopped(training(student, teacher), 2)
    assert "after step 2 of 6: go on with --resume, or begin anew with --restart" in refusal(student, teacher)
    assert "batch was 2 and is 3" in refusal(student, teacher, config=train_config(batch=3), resume=True)
    assert "steps was 6 and is 8" in refusal(student, teacher, config=train_config(8), resume=True)
    minutes = train_config(None, minutes=1.0)
    assert "6 steps were asked for and now minutes is 1" in refusal(student, teacher, config=minutes, resume=True)
    other = write_teacher(teacher.with_name("other"), seed=1)
    assert "the teacher was teacher and is other" in refusal(student, other, resume=True)
    assert training(student, teacher, restart=True).run().steps == 6
    assert not (student / "uptraining").exists()


def test_other_texts_are_refused(student: Path, teacher: Path) -> None:
    replaced = EvaluationText.of((TEXT + "More.").encode(), TRAINED_ON.name)
    stopped(training(student, teacher, texts=[TRAINED_ON, OTHER]), 2)

    def said(**options: Any) -> str:
        return refusal(student, teacher, resume=True, **options)

    assert "the texts are others, or in another order" in said(texts=[OTHER, TRAINED_ON])
    assert "the texts are others" in said(texts=[replaced, OTHER])
    assert "the texts are others" in said(texts=[replaced, TRAINED_ON, OTHER])
    apart = said(texts=[TRAINED_ON], held_out=OTHER)
    assert "the texts are others" in apart
    assert "what is held out is another text" in apart
    assert "what is held out is another text" in said(texts=[TRAINED_ON, OTHER], held_out=replaced)
    renamed = EvaluationText(name="renamed.txt", sha256=OTHER.sha256, text=OTHER.text)
    assert training(student, teacher, texts=[TRAINED_ON, renamed], resume=True).step == 2


def test_minutes_are_those_that_were_planned_with(student: Path, teacher: Path) -> None:
    config = train_config(None, minutes=0.2)
    begun = training(student, teacher, config)
    stopped(begun, 2)
    longer = train_config(None, minutes=5.0)
    assert "minutes was 0.2 and now minutes is 5" in refusal(student, teacher, config=longer, resume=True)
    for same in (config, train_config(None), train_config(begun.num_steps)):
        assert training(student, teacher, same, resume=True).num_steps == begun.num_steps


def test_a_training_that_begins_has_a_length(student: Path, teacher: Path) -> None:
    assert "either steps or minutes" in refusal(student, teacher, config=train_config(None))


def test_the_rate_is_what_it_was_unless_another_is_given(tmp_path: Path, teacher: Path) -> None:
    whole, broken = write_student(tmp_path / "whole"), write_student(tmp_path / "broken")
    training(whole, teacher, train_config(learning_rate=1e-3)).run()
    stopped(training(broken, teacher, train_config(learning_rate=1e-3)), 2)
    other = training(broken, teacher, train_config(learning_rate=5e-4), resume=True)
    assert (other.learning_rate, other.learning_rate_before) == (5e-4, 1e-3)
    again = training(broken, teacher, train_config(learning_rate=None), resume=True)
    assert again.learning_rate == again.learning_rate_before == 1e-3
    again.run()
    assert same_weights(broken, weights(whole))


def test_another_rate_is_kept_for_the_next_time(student: Path, teacher: Path) -> None:
    stopped(training(student, teacher), 2)
    stopped(training(student, teacher, train_config(learning_rate=5e-4), resume=True), 3)
    again = training(student, teacher, train_config(learning_rate=None), resume=True)
    assert again.learning_rate == 5e-4
    again.run()
    assert json.loads((student / "conversion.json").read_text())["uptraining"][0]["settings"]["learning_rate"] == 5e-4


# --- damage -----------------------------------------------------------------------------------------------------------


def test_damaged_tensors_are_refused(student: Path, teacher: Path) -> None:
    stopped(training(student, teacher), 2)
    tensors = student / "uptraining" / "step-00000002" / "training.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-100])
    assert "damaged" in refusal(student, teacher, resume=True)


@pytest.mark.parametrize(
    "damage",
    [
        {"step": 7},
        {"step": True},
        {"seconds": "long"},
        {"plan": None},
        {"plan": {}},
        {"plan.asked.settings": {}},
        {"plan.asked.settings": "fp32"},
        {"plan.asked.settings.compute": "fp8"},
        {"plan.asked.texts": {"twig.txt": "0" * 64}},
        {"plan.asked.texts": ["twig.txt"]},
        {"plan.asked.held_out": "twig.txt"},
        {"plan.asked.learning_rate": None},
        {"plan.asked.minutes": "20"},
        {"plan.asked.teacher": "many"},
        {"plan.asked.teacher.files_hash": 3},
        {"plan.asked.student_hash": None},
        {"plan.training_id": 3},
        {"plan.num_threads": 0},
        {"plan.num_steps": 0},
    ],
    ids=str,
)
def test_damaged_facts_are_refused(student: Path, teacher: Path, damage: dict[str, object]) -> None:
    stopped(training(student, teacher), 2)
    path = student / "uptraining" / "step-00000002" / "training.json"
    raw = json.loads(path.read_text())
    for place, value in damage.items():
        *way, last = place.split(".")
        inner = raw
        for name in way:
            inner = inner[name]
        inner[last] = value
    path.write_text(json.dumps(raw))
    assert "is damaged" in refusal(student, teacher, resume=True)


def test_a_checkpoint_of_another_version_is_refused(student: Path) -> None:
    saved = student / "uptraining" / "step-00000002"
    saved.mkdir(parents=True)
    (saved / "training.json").write_text('{"version": 1, "plan": {}}')
    with pytest.raises(ModelFileError, match="another version of Kvist: start again with --restart"):
        uptrain_checkpoint.latest(student)


# --- the student, and how it is computed ------------------------------------------------------------------------------


def change(student: Path, name: str) -> None:
    state = weights(student)
    state[name] = 1.5 * state[name]
    save_file(state, student / "model.safetensors", {"format": "pt"})


def test_a_student_whose_other_weights_changed_is_refused(student: Path, teacher: Path) -> None:
    config = train_config(train="attention")
    stopped(training(student, teacher, config), 2)
    change(student, "model.layers.1.mlp.up_proj.weight")
    said = refusal(student, teacher, config=config, resume=True)
    assert "the model that is trained is another, or its files changed" in said


def test_what_the_checkpoint_has_may_lie_in_the_folder_in_any_state(student: Path, teacher: Path) -> None:
    """As after an end that was cut short."""
    config = train_config(train="attention")
    stopped(training(student, teacher, config), 2)
    change(student, "model.layers.1.self_attn.q_proj.weight")
    assert training(student, teacher, config, resume=True).run().steps == 6


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_student_of_another_configuration_or_tokenizer_is_refused(student: Path, teacher: Path, name: str) -> None:
    stopped(training(student, teacher), 2)
    for directory in (student, teacher) if name == "tokenizer.json" else (student,):
        text = (directory / name).read_text()
        changed = (
            text.replace('"a b"', '"e e"').replace('"ab"', '"ee"').replace('"rms_norm_eps": ', '"rms_norm_eps": 2')
        )
        assert changed != text
        (directory / name).write_text(changed)
    assert "the model that is trained is another, or its files changed" in refusal(student, teacher, resume=True)


def test_the_number_of_threads_is_kept_and_may_be_another(student: Path, teacher: Path) -> None:
    threads = torch.get_num_threads()
    begun = training(student, teacher)
    assert (begun.num_threads, begun.num_threads_before) == (threads, None)
    stopped(begun, 2)
    try:
        torch.set_num_threads(threads + 1)
        again = training(student, teacher, resume=True)
        assert (again.num_threads, again.num_threads_before) == (threads + 1, threads)
        stopped(again, 3)
        assert training(student, teacher, resume=True).num_threads_before == threads + 1
    finally:
        torch.set_num_threads(threads)


# --- begun anew -------------------------------------------------------------------------------------------------------


def test_a_restart_that_diverges_says_what_will_be_taken(student: Path, teacher: Path) -> None:
    stopped(training(student, teacher), 3)
    before = files(student)
    with pytest.raises(NumericsError, match="checkpoint in it are as they were: start again with --restart and a low"):
        training(student, teacher, train_config(learning_rate=1e30), restart=True).run()
    assert files(student) == before
    again = training(student, teacher, restart=True)
    stopped(again, 2)
    assert "step 2 is kept" in again._not_finite(3)


def test_a_model_whose_loss_is_no_number_from_the_first_is_not_blamed_on_the_rate(
    student: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are timed with a rate of 0."""
    begun_with = uptrain_module.backward

    def infinite(*arguments: Any) -> StepLosses:
        losses = begun_with(*arguments)
        for parameter in arguments[0].model.parameters():
            if parameter.grad is not None:
                parameter.grad.fill_(float("inf"))
        return losses

    monkeypatch.setattr(uptrain_module, "backward", infinite)
    for config in (train_config(None, minutes=0.2), train_config()):
        with pytest.raises(NumericsError, match="not a finite number before it is trained: convert it again, or"):
            training(student, teacher, config).run()


# --- how often it is judged -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "count"), [(1, 1), (7, 7), (8, 8), (9, 8), (15, 8), (16, 8), (17, 8)])
def test_a_training_is_judged_eight_times_at_most_and_at_its_end(
    student: Path, teacher: Path, steps: int, count: int
) -> None:
    judged = [step for step, _ in training(student, teacher, train_config(steps, batch=1)).run().curve.validations]
    assert judged[0] == 0
    assert judged[-1] == steps
    assert len(judged) == 1 + count
    assert max(later - one for one, later in pairwise(judged)) <= -(-steps // 8)


def test_no_more_steps_are_planned_than_may_be_asked_for(
    student: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uptrain_module, "MOST_STEPS", 5)
    assert training(student, teacher, train_config(None, minutes=5.0)).num_steps == 5


def test_an_interrupt_does_not_wait_for_a_forward_pass(
    student: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With which it is seen whether the weights can be saved."""
    begun = training(student, teacher, train_config(save_minutes=0))
    passes, plain = [], begun._compute_gradients

    def interrupted(*arguments: Any) -> StepLosses:
        losses = plain(*arguments)
        passes.append(begun.step)
        if len(passes) == 2:  # the first step's save
            signal.raise_signal(signal.SIGINT)
            passes.append(-1)
        return losses

    monkeypatch.setattr(begun, "_compute_gradients", interrupted)
    with pytest.raises(KeyboardInterrupt):
        begun.run()
    assert -1 not in passes
    assert begun.saved_step == 1
