"""Training from the first step to the last: that it learns, and what is written at the end."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from convert_fakes import FAMILIES, logits_of_kvist, logits_of_transformers, state_of, write_checkpoint
from safetensors.torch import load_file, save_file
from uptrain_tiny import (
    TRAINED_ON,
    files,
    same_weights,
    stopped,
    student_state,
    train_config,
    training,
    weights,
    write_student,
    write_teacher,
)

from kvist.convert import uptrain_checkpoint
from kvist.convert.conversion import to_gqa
from kvist.convert.converted_weights import ConvertedWeights
from kvist.convert.gqa_config import GqaConfig
from kvist.convert.uptrain import Uptraining
from kvist.convert.uptrain_folder import ModelFolder
from kvist.convert.uptrain_losses import text_loss
from kvist.convert.uptrain_models import load_model
from kvist.errors import OptionError
from kvist.evaluate.text_windows import EvaluationText
from kvist.loading import load


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    return write_teacher(tmp_path / "teacher")


@pytest.fixture
def student(tmp_path: Path) -> Path:
    return write_student(tmp_path / "student")


# --- it learns --------------------------------------------------------------------------------------------------------


def test_a_student_learns(student: Path, teacher: Path) -> None:
    before = weights(student)
    result = training(student, teacher, train_config(60, batch=4, learning_rate=5e-3)).run()
    first, last = result.curve.rows[1], result.curve.rows[-1]
    assert first.logits is not None
    assert last.logits is not None
    assert last.attention is not None
    assert last.logits < 0.5 * first.logits
    assert last.loss == pytest.approx(last.logits + last.attention)
    assert result.tokens == 60 * 4 * 16
    after = weights(student)
    assert {name: (t.shape, t.dtype) for name, t in after.items()} == {
        name: (t.shape, t.dtype) for name, t in before.items()
    }
    assert all(not torch.equal(after[name], before[name]) for name in after)


def test_the_losses_are_those_of_the_weights_in_the_folder(student: Path, teacher: Path) -> None:
    def loss(directory: Path) -> float:
        model = load_model(ModelFolder.student(directory), torch.float32, nullcontext)
        return text_loss(model, begun._ready.judged, 2)

    begun = training(student, teacher)
    before, of_teacher = loss(student), loss(teacher)
    result = begun.run()
    assert result.loss_before == pytest.approx(before, rel=1e-6)
    assert result.loss_after == pytest.approx(loss(student), rel=1e-6)
    assert result.references["teacher"] == pytest.approx(of_teacher, rel=1e-6)


def test_attention_outputs_come_nearer_to_the_teachers(student: Path, teacher: Path) -> None:
    config = train_config(60, batch=4, learning_rate=5e-3, logit_weight=0.0, train="attention")
    rows = training(student, teacher, config).run().curve.rows
    first, last = rows[1].attention, rows[-1].attention
    assert first is not None
    assert last is not None
    assert last < 0.9 * first


def test_without_a_teacher_the_text_is_learned(student: Path) -> None:
    config = train_config(60, batch=4, learning_rate=5e-3, logit_weight=0.0, attention_weight=0.0, text_weight=1.0)
    result = Uptraining(student, None, [TRAINED_ON], config).run()
    assert result.loss_after < 0.3 * result.loss_before
    assert result.references.keys() == {"bigram model"}


def test_attention_alone_is_trained_where_that_is_asked(student: Path, teacher: Path) -> None:
    before = weights(student)
    training(student, teacher, train_config(train="attention")).run()
    changed = {name for name, tensor in weights(student).items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if ".self_attn." in name}


def test_a_held_out_text_is_judged_and_never_trained_on(student: Path, teacher: Path) -> None:
    apart = EvaluationText.of(("Q" * 40).encode(), "apart.txt")
    begun = training(student, teacher, held_out=apart)
    assert begun._ready.judged.unique().tolist() == [ord("Q")]
    batches = torch.cat([begun._ready.text.batch(step, 4) for step in range(40)])
    assert ord("Q") not in batches
    assert begun.run().references.keys() == {"teacher", "bigram model"}


def test_minutes_become_steps(student: Path, teacher: Path) -> None:
    before = weights(student)
    begun = training(student, teacher, train_config(None, minutes=0.2))
    assert begun.num_steps > 1
    state = begun._ready.student.model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in before.items())
    assert not begun._ready.optimizer.state
    with pytest.raises(OptionError, match="needs more: give --minutes"):
        training(student, teacher, train_config(None, minutes=1e-6))


# --- what is written --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_and_kvist_give_the_same_logits_of_what_was_trained(tmp_path: Path, family: str) -> None:
    teacher = write_checkpoint(tmp_path / "source", family)
    kept = load(teacher).config.num_kv_heads // 2 or 1
    student = tmp_path / "few"
    if kept == load(teacher).config.num_kv_heads:
        student = write_checkpoint(student, family)
    else:
        to_gqa(teacher, student, kept, config=GqaConfig("mean"))
    before = logits_of_kvist(student)
    training(student, teacher, train_config(4)).run()
    after = logits_of_kvist(student)
    assert (after - before).abs().max() > 1e-2
    torch.testing.assert_close(after, logits_of_transformers(student), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_other_modalities_are_carried_and_the_text_model_is_trained(tmp_path: Path, tied: bool) -> None:
    """As multimodal checkpoints are: the text model is named otherwise, and others lie beside it."""
    vision = {"vision_tower.positions": torch.arange(9), "multi_modal_projector.w": torch.rand(3, 5)}
    for folder in ("teacher", "student"):
        directory = write_checkpoint(tmp_path / folder, "gemma3")
        state = {f"language_model.{name}": tensor for name, tensor in state_of(directory).items()}
        if not tied:
            state["language_model.lm_head.weight"] = state["language_model.model.embed_tokens.weight"].clone()
        save_file({**state, **vision}, directory / "model.safetensors", {"format": "pt"})
        raw = json.loads((directory / "config.json").read_text())
        outer = {"model_type": "gemma3", "text_config": raw, "tie_word_embeddings": tied}
        (directory / "config.json").write_text(json.dumps(outer))
    before = weights(tmp_path / "student")
    training(tmp_path / "student", tmp_path / "teacher", train_config(text_weight=1.0)).run()
    after = weights(tmp_path / "student")
    assert {name: tensor.dtype for name, tensor in after.items()} == {name: t.dtype for name, t in before.items()}
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert changed == before.keys() - vision.keys()
    if not tied:
        output, embedding = (after[f"language_model.{name}.weight"] for name in ("lm_head", "model.embed_tokens"))
        assert not torch.equal(output, embedding)
    assert load(tmp_path / "student").config.num_kv_heads == 4


def test_names_that_kvist_loads_are_trained_and_kept(tmp_path: Path, teacher: Path) -> None:
    """Without the prefix, with the output matrix repeated, and with a table that nobody reads."""
    state = {name.removeprefix("model."): tensor for name, tensor in student_state().items()}
    state["lm_head.weight"] = state["embed_tokens.weight"].clone()
    table = {"layers.0.self_attn.rotary_emb.inv_freq": torch.rand(16)}
    student = write_student(tmp_path / "student", {**state, **table})
    training(student, teacher).run()
    after = weights(student)
    assert after.keys() == {**state, **table}.keys()
    assert torch.equal(after["layers.0.self_attn.rotary_emb.inv_freq"], *table.values())
    assert all(not torch.equal(after[name], state[name]) for name in state)
    assert torch.equal(after["lm_head.weight"], after["embed_tokens.weight"])
    assert load(student).config.num_kv_heads == 1


def test_what_was_trained_says_how(student: Path, teacher: Path) -> None:
    (student / "conversion.json").write_text('{"method": "mean", "uptraining": [{"steps": 1}]}')
    result = training(student, teacher).run()
    record = json.loads((student / "conversion.json").read_text())
    assert record["method"] == "mean"
    earlier, entry = record["uptraining"]
    assert earlier == {"steps": 1}
    assert (entry["steps"], entry["minutes"], entry["teacher"]) == (6, None, "teacher")
    assert entry["texts"] == [{"name": "twig.txt", "sha256": TRAINED_ON.sha256}]
    assert entry["held_out"] == "the last part of the texts"
    assert entry["loss_after"] == result.loss_after
    assert (entry["settings"]["compute"], entry["settings"]["learning_rate"]) == ("fp32", 2e-3)
    lines = [json.loads(line) for line in (student / "uptraining.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(7))
    assert not (student / "uptraining").exists()


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


# --- a disk that fills ------------------------------------------------------------------------------------------------


def full(*arguments: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_disk_that_fills_with_a_checkpoint_leaves_what_was_there(
    student: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = files(student)
    begun = training(student, teacher)
    monkeypatch.setattr(uptrain_checkpoint, "write_safetensors", full)
    with pytest.raises(OptionError, match=r"No space left on device; free some space.*--resume"):
        begun.run()
    assert files(student) == before
    assert not (student / "uptraining").exists()


def test_a_disk_that_fills_with_the_weights_keeps_the_training(
    student: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = weights(student)
    begun = training(student, teacher)
    monkeypatch.setattr(ConvertedWeights, "write", full)
    with pytest.raises(OptionError, match=r"No space left on device; free some space.*--resume"):
        begun.run()
    monkeypatch.undo()
    assert same_weights(student, before)
    assert not [path for path in student.rglob("*") if "partial" in path.name]
    assert training(student, teacher, resume=True).run().steps == 6
    assert not same_weights(student, before)


@pytest.mark.parametrize(("train", "advice"), [("all", "--train attention"), ("attention", "free some$")])
def test_a_disk_that_is_too_small_is_refused_before_the_first_step(
    tmp_path: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch, train: str, advice: str
) -> None:
    """Two training checkpoints, or one and the new weights, which are larger where few are trained."""
    student = write_student(tmp_path / "student", {**student_state(), "vision_tower.w": torch.rand(100_000)})
    config = train_config(train=train)
    trained = [tensor for name, tensor in student_state().items() if train == "all" or ".self_attn." in name]
    saved = sum(12 * tensor.numel() for tensor in trained)
    stored = sum(tensor.nbytes for tensor in weights(student).values())
    assert (stored > saved) == (train == "attention")
    needed = saved + max(saved, stored)

    def with_free(num_bytes: int) -> None:
        monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": num_bytes})())

    with_free(needed - 1)
    with pytest.raises(OptionError, match=f"are free on its disk: .*{advice}"):
        training(student, teacher, config)
    with_free(needed)
    stopped(training(student, teacher, config), 2)
    with_free(needed - saved)  # the one that is there has its place already
    training(student, teacher, config, resume=True)
