"""What cannot be trained is refused before anything is changed, in a line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_files import hf_config, hf_state, write_tiny_directory
from uptrain_tiny import files, student_state, train_config, training, write_student, write_teacher

from kvist.convert.uptrain import Uptraining
from kvist.convert.uptrain_config import UptrainConfig
from kvist.convert.uptrain_curve import CurveRow
from kvist.errors import KvistError, NumericsError, OptionError, PromptError
from kvist.evaluate.text_windows import EvaluationText


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    return write_teacher(tmp_path / "teacher")


@pytest.fixture
def student(tmp_path: Path) -> Path:
    return write_student(tmp_path / "student")


def refusal(student: Path, teacher: Path, config: UptrainConfig | None = None, **options: Any) -> str:
    before = files(student) if student.is_dir() else {}
    with pytest.raises(KvistError) as refused:
        training(student, teacher, config, **options)
    assert (files(student) if student.is_dir() else {}) == before
    assert "\n" not in str(refused.value)
    return f"{type(refused.value).__name__}: {refused.value}"


def test_bad_inputs_are_refused(tmp_path: Path, student: Path, teacher: Path) -> None:
    short = EvaluationText.of(b"Only a few words.", "short.txt")
    with pytest.raises(
        PromptError, match=r"17 tokens, too few for sequences of 16 .*: take --sequence 8 or less, or give"
    ):
        Uptraining(student, str(teacher), [short], train_config())
    with pytest.raises(PromptError, match="the held-out text has 17 tokens"):
        training(student, teacher, train_config(sequence=64), held_out=short)
    assert refusal(student, teacher, train_config(sequence=513)).startswith("ContextFullError")
    assert "kvist convert gqa" in refusal(tmp_path / "nowhere", teacher)
    assert "no model is called" in refusal(student, Path("nothing-here"))


def test_a_teacher_that_is_the_student_is_refused(tmp_path: Path, student: Path) -> None:
    (tmp_path / "link").symlink_to(student)
    assert f"the teacher is {student} itself" in refusal(student, student)
    assert f"the teacher is {student} itself" in refusal(student, tmp_path / "link")
    assert f"the teacher is {tmp_path / 'link'} itself" in refusal(tmp_path / "link", student)


def test_a_teacher_of_another_vocabulary_is_refused(student: Path, teacher: Path) -> None:
    tokenizer = teacher / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"a b"', '"e e"').replace('"ab"', '"ee"'))
    assert "another vocabulary" in refusal(student, teacher)


def test_a_teacher_of_another_shape_is_refused(tmp_path: Path, student: Path) -> None:
    state = {name: tensor for name, tensor in hf_state("llama").items() if ".layers.2." not in name}
    shallow = write_tiny_directory(tmp_path / "shallow", state, config=hf_config(num_hidden_layers=2))
    assert "has 2 layers of 64" in refusal(student, shallow)


def test_a_model_that_lacks_weights_is_refused(tmp_path: Path, student: Path, teacher: Path) -> None:
    """They would be trained, or learned from, as random numbers."""
    lost = "model.layers.1.self_attn.k_proj.weight"
    state = student_state()
    del state[lost]
    lacking = write_student(tmp_path / "lacking", state)
    assert "lacks layers.1.self_attn.k_proj.weight" in refusal(lacking, teacher)
    save_file(
        {name: tensor for name, tensor in hf_state("llama").items() if name != lost}, teacher / "model.safetensors"
    )
    assert "lacks layers.1.self_attn.k_proj.weight" in refusal(student, teacher)


def test_a_student_with_tensors_of_no_decoder_is_refused(tmp_path: Path, teacher: Path) -> None:
    state = {**student_state(), "model.layers.0.adapter.weight": torch.rand(2)}
    assert "also holds layers.0.adapter.weight" in refusal(write_student(tmp_path / "more", state), teacher)
    state = {**student_state(), "lm_head.weight": torch.rand(3, 64)}
    assert "'lm_head.weight' of shape [3, 64], which" in refusal(write_student(tmp_path / "head", state), teacher)


def test_a_student_in_a_dtype_that_is_not_trained_is_refused(tmp_path: Path, teacher: Path) -> None:
    student = write_student(tmp_path / "student", student_state(torch.float64))
    assert "is stored as F64" in refusal(student, teacher)


def test_quantised_weights_are_refused(student: Path, tmp_path: Path) -> None:
    quantised = write_tiny_directory(tmp_path / "q", config=hf_config(quantization_config={"quant_method": "gptq"}))
    assert "quantised with 'gptq'" in refusal(student, quantised)


@pytest.mark.parametrize("record", ["{", "[]", '{"uptraining": 3}'])
def test_a_damaged_record_is_refused_before_the_training(student: Path, teacher: Path, record: str) -> None:
    (student / "conversion.json").write_text(record)
    assert "conversion.json" in refusal(student, teacher)


def test_a_second_training_of_a_folder_is_refused(student: Path, teacher: Path) -> None:
    first, second = training(student, teacher), training(student, teacher)

    def told(row: CurveRow) -> None:
        if row.step == 2:
            with pytest.raises(OptionError, match=f"another training is at work in {student}: wait for its end"):
                second.run()
            first.save()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first.run(told)
    with pytest.raises(OptionError, match=f"another training was at work in {student} meanwhile: begin again"):
        second.run()
    assert training(student, teacher, resume=True).run().steps == 6


def test_a_batch_that_cannot_lie_in_memory_is_refused(student: Path, teacher: Path) -> None:
    said = refusal(student, teacher, train_config(batch=99_999_999_999))
    assert "the hidden states of 99,999,999,999 sequences of 16 tokens take 1" in said
    assert said.endswith("of memory are free: take a smaller --batch")


def test_a_seed_that_is_none_is_refused() -> None:
    assert train_config(seed=2**64 - 1).seed == 2**64 - 1
    with pytest.raises(OptionError, match="seed is 18446744073709551616: it must be from 0 to 18446744073709551615"):
        train_config(seed=2**64)


def test_weights_of_losses_that_no_step_survives_are_named(student: Path, teacher: Path) -> None:
    begun = training(student, teacher, train_config(text_weight=1e308, logit_weight=1e308))
    with pytest.raises(NumericsError, match="before it is trained: convert it again, or give its losses lower weights"):
        begun.run()
