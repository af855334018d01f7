"""Training from the first step to the last: that it learns, goes on to the bit, and ends well whatever comes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_files import hf_config, hf_state, write_tiny_directory
from uptrain_tiny import TEXT, write_student, write_teacher

import kvist.convert.uptrain as uptrain_module
from kvist.convert import uptrain_checkpoint, uptrain_finish
from kvist.convert.uptrain import Uptraining
from kvist.convert.uptrain_config import UptrainConfig
from kvist.convert.uptrain_curve import CurveRow
from kvist.convert.uptrain_losses import StepLosses
from kvist.errors import KvistError, NumericsError, OptionError, PromptError
from kvist.evaluate.text_windows import EvaluationText
from kvist.loading import load

SETTINGS: dict[str, Any] = {"sequence": 16, "batch": 2, "learning_rate": 2e-3, "compute": "fp32"}
STUDENT = EvaluationText.of(TEXT.encode(), "twig.txt")


def config(steps: int = 6, **changes: Any) -> UptrainConfig:
    return UptrainConfig(**{"steps": steps, **SETTINGS, **changes})


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    return write_teacher(tmp_path / "teacher")


@pytest.fixture
def student(tmp_path: Path) -> Path:
    return write_student(tmp_path / "student")


def training(student: Path, teacher: Path, settings: UptrainConfig | None = None, **options: Any) -> Uptraining:
    return Uptraining(student, str(teacher), [STUDENT], settings or config(), **options)


def stopping_at(step: int, error: type[BaseException] = KeyboardInterrupt) -> Callable[[CurveRow], None]:
    def told(row: CurveRow) -> None:
        if row.step == step:
            raise error

    return told


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_student_learns(student: Path, teacher: Path) -> None:
    before = weights(student)
    result = training(student, teacher, config(60, batch=4, learning_rate=5e-3)).run()
    first, last = result.curve.rows[1], result.curve.rows[-1]
    assert last.logits < 0.5 * first.logits
    assert last.loss == pytest.approx(last.logits + last.attention)
    assert result.loss_after != result.loss_before
    assert result.tokens == 60 * 4 * 16
    after = weights(student)
    assert {name: (t.shape, t.dtype) for name, t in after.items()} == {
        name: (t.shape, t.dtype) for name, t in before.items()
    }
    assert all(not torch.equal(after[name], before[name]) for name in after)


def test_attention_outputs_come_nearer_to_the_teachers(student: Path, teacher: Path) -> None:
    settings = config(60, batch=4, learning_rate=5e-3, logit_weight=0.0, train="attention")
    rows = training(student, teacher, settings).run().curve.rows
    assert rows[-1].attention < 0.9 * rows[1].attention


def test_without_a_teacher_the_text_is_learned(student: Path) -> None:
    settings = config(60, batch=4, learning_rate=5e-3, logit_weight=0.0, attention_weight=0.0, text_weight=1.0)
    result = Uptraining(student, None, [STUDENT], settings).run()
    assert result.loss_after < 0.3 * result.loss_before
    assert result.references.keys() == {"bigram model"}


def test_what_was_trained_loads_in_kvist_and_says_how(student: Path, teacher: Path) -> None:
    (student / "conversion.json").write_text('{"method": "mean"}')
    result = training(student, teacher).run()
    assert load(student).config.num_kv_heads == 1
    record = json.loads((student / "conversion.json").read_text())
    assert record["method"] == "mean"
    (entry,) = record["uptraining"]
    assert (entry["steps"], entry["teacher"], entry["texts"][0]["sha256"]) == (6, "teacher", STUDENT.sha256)
    assert entry["loss_after"] == result.loss_after
    assert entry["settings"]["compute"] == "fp32"
    lines = [json.loads(line) for line in (student / "uptraining.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(7))
    assert not (student / "uptraining").exists()


def test_attention_alone_is_trained_where_that_is_asked(student: Path, teacher: Path) -> None:
    before = weights(student)
    training(student, teacher, config(train="attention")).run()
    changed = {name for name, tensor in weights(student).items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if ".self_attn." in name}


@pytest.mark.parametrize("changes", [{}, {"train": "attention", "every": 3, "compute": "bf16"}])
def test_a_training_that_was_interrupted_goes_on_to_the_same_bits(
    tmp_path: Path, teacher: Path, changes: dict[str, Any]
) -> None:
    whole, broken = write_student(tmp_path / "whole"), write_student(tmp_path / "broken")
    training(whole, teacher, config(9, **changes)).run()
    before = weights(broken)
    for step in (2, 3, 7):
        begun = training(broken, teacher, config(9, **changes), resume=step > 2)
        with pytest.raises(KeyboardInterrupt):
            begun.run(stopping_at(step))
        assert begun.saved_step == step
        assert all(torch.equal(tensor, before[name]) for name, tensor in weights(broken).items())
    result = training(broken, teacher, config(9, **changes), resume=True).run()
    expected = weights(whole)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(broken).items())
    assert [row.step for row in result.curve.rows] == list(range(10))


def test_an_interrupt_within_a_step_saves_the_step_before(
    tmp_path: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, broken = write_student(tmp_path / "whole"), write_student(tmp_path / "broken")
    training(whole, teacher).run()
    begun = training(broken, teacher)
    plain = uptrain_module.backward

    def interrupted(*arguments: Any) -> StepLosses:
        losses = plain(*arguments)
        if begun.step == 3:
            torch.rand(5)  # what a step draws before it is interrupted is drawn again
            raise KeyboardInterrupt
        return losses

    monkeypatch.setattr(uptrain_module, "backward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        begun.run()
    monkeypatch.undo()
    assert begun.saved_step == 3
    training(broken, teacher, resume=True).run()
    expected = weights(whole)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(broken).items())


def test_a_signal_within_an_update_leaves_the_checkpoint_before(
    student: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = training(student, teacher, config(save_minutes=0))
    plain = begun._update

    def ended(rate: float) -> None:
        plain(rate)
        if begun.step == 4:
            raise SystemExit(143)

    monkeypatch.setattr(begun, "_update", ended)
    with pytest.raises(SystemExit):
        begun.run()
    assert begun.saved_step == 4
    assert uptrain_checkpoint.latest(student).step == 4


def test_a_loss_that_is_no_number_stops_and_keeps_the_last_checkpoint(
    student: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = weights(student)
    begun = training(student, teacher, config(save_minutes=0))
    plain = uptrain_module.backward

    def broken(*arguments: Any) -> StepLosses:
        losses = plain(*arguments)
        return StepLosses(float("nan"), None, None, None) if begun.step == 3 else losses

    monkeypatch.setattr(uptrain_module, "backward", broken)
    with pytest.raises(NumericsError, match=r"step 4 is not a finite number: .* step 3 is kept.*--resume.*0\.0007"):
        begun.run()
    monkeypatch.undo()
    assert uptrain_checkpoint.latest(student).step == 3
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(student).items())
    training(student, teacher, config(learning_rate=7e-4), resume=True).run()


def test_a_rate_without_bounds_ends_in_a_message(student: Path, teacher: Path) -> None:
    before = files(student)
    with pytest.raises(NumericsError, match=f"{student} is as it was"):
        training(student, teacher, config(learning_rate=1e36)).run()
    assert files(student) == before


def test_old_checkpoints_go_away(student: Path, teacher: Path) -> None:
    begun = training(student, teacher, config(save_minutes=0))
    with pytest.raises(KeyboardInterrupt):
        begun.run(stopping_at(5))
    assert [path.name for path in (student / "uptraining").iterdir()] == ["step-00000005"]


@pytest.mark.parametrize("module", [uptrain_checkpoint, uptrain_finish], ids=["checkpoint", "weights"])
def test_a_full_disk_leaves_what_was_there(
    student: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType
) -> None:
    before = weights(student)

    def full(path: Path, *arguments: Any) -> None:
        path.write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    begun = training(student, teacher)
    monkeypatch.setattr(module, "write_safetensors", full)
    with pytest.raises(OptionError, match=r"No space left on device; free some space.*--resume"):
        begun.run()
    monkeypatch.undo()
    assert all(torch.equal(tensor, before[key]) for key, tensor in weights(student).items())
    assert not [path for path in student.rglob("*") if "partial" in path.name]
    if module is uptrain_finish:
        assert training(student, teacher, resume=True).run().steps == 6
        assert any(not torch.equal(tensor, before[key]) for key, tensor in weights(student).items())


def test_a_disk_that_is_too_small_is_refused_before_the_first_step(
    student: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(OptionError, match="are free on its disk: free some"):
        training(student, teacher)


def test_shards_are_replaced_together_and_keep_their_dtype(tmp_path: Path, teacher: Path) -> None:
    student = write_student(tmp_path / "sharded", num_shards=2, dtype=torch.bfloat16)
    index = student / "model.safetensors.index.json"
    before = json.loads(index.read_text())["weight_map"]
    training(student, teacher).run()
    after = json.loads(index.read_text())["weight_map"]
    assert after.keys() == before.keys()
    assert set(after.values()) == {path.name for path in student.glob("*.safetensors")}
    assert set(after.values()).isdisjoint(before.values())
    stored = {k: v for file in set(after.values()) for k, v in load_file(student / file).items()}
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert load(student).config.num_kv_heads == 1


def test_minutes_become_steps(student: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = weights(student)
    begun = training(student, teacher, config(None, minutes=0.2))  # type: ignore[arg-type]
    assert begun.num_steps > 1
    assert all(
        torch.equal(value, before[name]) for name, value in begun._student.model.state_dict().items() if name in before
    )
    assert not begun._optimizer.state
    with pytest.raises(OptionError, match="needs more: give --minutes"):
        training(student, teacher, config(None, minutes=1e-6))  # type: ignore[arg-type]


def refusal(student: Path, teacher: Path, settings: UptrainConfig | None = None, **options: Any) -> str:
    before = files(student) if student.is_dir() else {}
    with pytest.raises(KvistError) as refused:
        training(student, teacher, settings, **options)
    assert (files(student) if student.is_dir() else {}) == before
    assert "\n" not in str(refused.value)
    return f"{type(refused.value).__name__}: {refused.value}"


def test_bad_inputs_are_refused_before_anything_is_changed(tmp_path: Path, student: Path, teacher: Path) -> None:
    short = EvaluationText.of(b"Only a few words.", "short.txt")
    with pytest.raises(
        PromptError, match=r"17 tokens, too few for sequences of 16 .*: take --sequence 8 or less, or give"
    ):
        Uptraining(student, str(teacher), [short], config())
    with pytest.raises(PromptError, match="the held-out text has 17 tokens"):
        training(student, teacher, config(sequence=64), held_out=short)
    assert refusal(student, teacher, config(sequence=513)).startswith("ContextFullError")
    assert "kvist convert gqa" in refusal(tmp_path / "nowhere", teacher)
    assert "is student itself" in refusal(student, student).replace(str(student), "student")
    assert "leave --resume out" in refusal(student, teacher, resume=True)
    assert "no model is called" in refusal(student, Path("nothing-here"))


def test_a_teacher_of_another_vocabulary_is_refused(student: Path, teacher: Path) -> None:
    tokenizer = teacher / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"a b"', '"e e"').replace('"ab"', '"ee"'))
    assert "another vocabulary" in refusal(student, teacher)


def test_a_teacher_of_another_shape_is_refused(tmp_path: Path, student: Path) -> None:
    state = {name: tensor for name, tensor in hf_state("llama").items() if ".layers.2." not in name}
    shallow = write_tiny_directory(tmp_path / "shallow", state, config=hf_config(num_hidden_layers=2))
    assert "has 2 layers of 64" in refusal(student, shallow)


def test_a_training_that_waits_is_neither_begun_anew_nor_changed_unasked(student: Path, teacher: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        training(student, teacher).run(stopping_at(2))
    assert "after step 2 of 6: go on with --resume, or drop it with --restart" in refusal(student, teacher)
    assert "batch was 2 and is 3" in refusal(student, teacher, config(batch=3), resume=True)
    assert "steps was 6 and is 8" in refusal(student, teacher, config(8), resume=True)
    other = EvaluationText.of((TEXT + "More.").encode(), "twig.txt")
    with pytest.raises(OptionError, match="the texts are others"):
        Uptraining(student, str(teacher), [other], config(), resume=True)
    assert training(student, teacher, restart=True).run().steps == 6
    assert not (student / "uptraining").exists()


def test_a_damaged_checkpoint_is_refused(student: Path, teacher: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        training(student, teacher).run(stopping_at(2))
    saved = student / "uptraining" / "step-00000002"
    tensors = saved / "training.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-100])
    assert "damaged" in refusal(student, teacher, resume=True)
    (saved / "training.json").write_text('{"version": 1}')
    assert "damaged" in refusal(student, teacher, resume=True)


def test_a_held_out_text_is_judged_and_never_trained_on(tmp_path: Path, student: Path, teacher: Path) -> None:
    apart = EvaluationText.of(("Q" * 40).encode(), "apart.txt")
    begun = training(student, teacher, held_out=apart)
    assert begun._judged.unique().tolist() == [ord("Q")]
    batches = torch.cat([begun._text.batch(step, 4) for step in range(40)])
    assert ord("Q") not in batches
    assert begun.run().references.keys() == {"teacher", "bigram model"}
