"""What a conversion refuses, and that it then leaves nothing behind and nothing changed."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from pathlib import Path

import pytest
import torch
from convert_fakes import change_state, same_bits, state_of

from kvist.convert import converted_weights, expand, to_gqa
from kvist.convert.gqa_config import GqaConfig
from kvist.convert.uptrain_checkpoint import FOLDER
from kvist.errors import KvistError, ModelFileError, NumericsError, OptionError, PromptError

FITTED = GqaConfig("fitted", window=32, windows=6)


def left_over(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.name not in ("cache", "source", "text.txt")}


# --- numbers of heads -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_kv_heads", "message"),
    [
        (3, "kv_heads is 3: source has 4 KV heads for 8 query heads, which it does not divide: take 1, 2"),
        (4, "kv_heads is 4, and source has 4 KV heads for 8 query heads: there is nothing to merge; take 1, 2"),
        (
            8,
            r"kv_heads is 8: source has 4 KV heads .* merging makes fewer: take 1, 2 \(`kvist convert expand`",
        ),
        (0, "kv_heads is 0: source has 4 KV heads for 8 query heads, which it does not divide: take 1, 2"),
    ],
)
def test_a_number_that_is_no_smaller_divisor_is_refused_with_those_that_are(
    checkpoint, tmp_path, num_kv_heads, message
):
    with pytest.raises(OptionError, match=message):
        to_gqa(checkpoint(), tmp_path / "made", num_kv_heads)
    assert left_over(tmp_path) == set()


def test_a_single_kv_head_cannot_be_merged(checkpoint, tmp_path):
    with pytest.raises(OptionError, match="source has 1 KV head for 8 query heads, and there are none to merge"):
        to_gqa(checkpoint(num_key_value_heads=1), tmp_path / "made", 1)


def test_mha_cannot_be_expanded(checkpoint, tmp_path):
    with pytest.raises(OptionError, match="a KV head for each of its 8 query heads: there is nothing to expand"):
        expand(checkpoint(num_key_value_heads=8), tmp_path / "made")


# --- the text ---------------------------------------------------------------------------------------------------------


def test_a_method_and_a_text_go_together_or_not_at_all(checkpoint, tmp_path, text):
    with pytest.raises(OptionError, match="method fitted looks at the layers on a text: give --text FILE"):
        to_gqa(checkpoint(), tmp_path / "made", 2, config=FITTED)
    with pytest.raises(OptionError, match="method mean looks at no text: leave it out, or take aligned or fitted"):
        to_gqa(tmp_path / "source", tmp_path / "made", 2, text=text)
    with pytest.raises(OptionError, match="unknown method 'best'"):
        GqaConfig("best")


def test_a_text_that_is_too_short_says_what_would_do(checkpoint, tmp_path, text):
    text.write_text("a twig and a branch. " * 20)
    with pytest.raises(PromptError, match=r"too few for 6 windows of 128: take \d windows? of them"):
        to_gqa(checkpoint(), tmp_path / "made", 2, config=GqaConfig("fitted", window=128, windows=6), text=text)
    assert left_over(tmp_path) == set()


# --- the destination --------------------------------------------------------------------------------------------------


def test_what_exists_is_replaced_by_force_alone(checkpoint, tmp_path):
    source, made = checkpoint(), tmp_path / "made"
    to_gqa(source, made, 2)
    before = state_of(made)
    with pytest.raises(OptionError, match="made exists: give --force to replace it, or take another name"):
        to_gqa(source, made, 1)
    assert same_bits(state_of(made), before)
    (made / "vocab.txt").write_text("of the model that was there")
    to_gqa(source, made, 1, force=True)
    assert state_of(made)["model.layers.0.self_attn.k_proj.weight"].shape == (8, 64)
    assert not (made / "vocab.txt").exists()
    assert left_over(tmp_path) == {"made"}


def test_force_replaces_no_folder_that_holds_other_things(checkpoint, tmp_path):
    home = tmp_path / "made"
    home.mkdir()
    (home / "letters.txt").write_text("dear")
    with pytest.raises(OptionError, match="exists and holds no model, so it is not replaced: take another name"):
        to_gqa(checkpoint(), home, 2, force=True)
    assert (home / "letters.txt").read_text() == "dear"


@pytest.mark.parametrize("name", ["thesis.docx", "notes.txt", "run.py", "curve.png", ".env", "settings.json"])
def test_force_replaces_no_model_with_other_files_beside_it(checkpoint, tmp_path, name):
    made = tmp_path / "made"
    to_gqa(checkpoint(), made, 2)
    (made / name).write_text("work")
    with pytest.raises(OptionError, match=f"holds the file {name}, which is no part of a model, so it is not replaced"):
        to_gqa(tmp_path / "source", made, 1, force=True)
    assert (made / name).read_text() == "work"
    assert left_over(tmp_path) == {"made"}


def test_force_replaces_what_a_conversion_and_a_training_write(checkpoint, tmp_path):
    """All that transformers writes beside a model, what the source has besides, and what a kill left."""
    source, made = checkpoint(), tmp_path / "made"
    (source / "params.json").write_text("{}")
    (source / "LICENSE.txt").write_text("free")
    to_gqa(source, made, 2)
    for name in (
        "uptraining.jsonl",
        "special_tokens_map.json",
        "spiece.model",
        ".conversion.json.partial",
        "README.md",
    ):
        (made / name).write_text("{}")
    for name in (".trained.partial", ".uptraining.partial", "additional_chat_templates"):
        (made / name).mkdir()
    to_gqa(source, made, 1, force=True)
    assert {path.name for path in made.iterdir()} == {path.name for path in source.iterdir()} | {"conversion.json"}


@pytest.mark.parametrize("force", [False, True])
def test_what_came_meanwhile_is_not_replaced_unasked(checkpoint, tmp_path, monkeypatch, force):
    source, made = checkpoint(), tmp_path / "made"
    copy_others = converted_weights.ConvertedWeights.copy_others

    def meanwhile(self, progress):
        copy_others(self, progress)
        made.mkdir()
        (made / "thesis.txt").write_text("work")

    monkeypatch.setattr(converted_weights.ConvertedWeights, "copy_others", meanwhile)
    with pytest.raises(OptionError, match="made exists and holds no model, so it is not replaced"):
        to_gqa(source, made, 2, force=force)
    assert (made / "thesis.txt").read_text() == "work"
    assert left_over(tmp_path) == {"made"}


def test_what_a_kill_left_goes_away_with_the_next_and_what_another_makes_stays(checkpoint, tmp_path):
    source, made = checkpoint(), tmp_path / "made"
    for name in (".made.abc.partial", ".made.live.partial", ".other.abc.partial"):
        (tmp_path / name / "made").mkdir(parents=True)
    descriptor = os.open(tmp_path / ".made.live.partial", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        to_gqa(source, made, 2)
    finally:
        os.close(descriptor)
    assert left_over(tmp_path) == {"made", ".made.live.partial", ".other.abc.partial"}


def test_a_model_that_a_kill_left_moved_aside_gets_its_name_back(checkpoint, tmp_path, monkeypatch):
    source, made = checkpoint(), tmp_path / "made"
    to_gqa(source, made, 2)
    before, replace = state_of(made), Path.replace

    def killed(self, target):
        if self.name == "made" and ".partial" in str(self):
            self.parent.rename(kept)  # so that no cleanup finds it
            raise KeyboardInterrupt
        return replace(self, target)

    kept = tmp_path / "kept"
    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises((KeyboardInterrupt, FileNotFoundError)):
        to_gqa(source, made, 1, force=True)
    monkeypatch.undo()
    assert not made.exists()
    kept.rename(tmp_path / ".made.abc.partial")
    with pytest.raises(OptionError, match="made exists: give --force"):
        to_gqa(source, made, 1)
    assert same_bits(state_of(made), before)
    assert left_over(tmp_path) == {"made"}


@pytest.mark.parametrize("other", ["src/main.py", ".git/HEAD"])
def test_force_replaces_no_project_that_has_a_configuration_or_a_model_in_it(checkpoint, tmp_path, other):
    home = tmp_path / "made"
    to_gqa(checkpoint(), home, 2)
    (home / other).parent.mkdir()
    (home / other).write_text("work")
    folder = other.partition("/")[0]
    with pytest.raises(OptionError, match=f"holds the folder {folder}, which is no part of a model, so it is not repl"):
        to_gqa(tmp_path / "source", home, 1, force=True)
    assert (home / other).read_text() == "work"


def test_force_replaces_no_folder_with_a_configuration_alone(checkpoint, tmp_path):
    home = tmp_path / "made"
    home.mkdir()
    (home / "config.json").write_text('{"editor": "vi"}')
    with pytest.raises(OptionError, match="exists and holds no model, so it is not replaced"):
        to_gqa(checkpoint(), home, 1, force=True)
    assert (home / "config.json").read_text() == '{"editor": "vi"}'


def test_force_replaces_no_model_in_which_a_training_waits(checkpoint, tmp_path):
    made = tmp_path / "made"
    to_gqa(checkpoint(), made, 2)
    waiting = made / FOLDER / "step-00000120"
    waiting.mkdir(parents=True)
    with pytest.raises(OptionError, match=r"a training waits in it, .* remove .*/made/uptraining first, or take anoth"):
        to_gqa(tmp_path / "source", made, 1, force=True)
    assert waiting.is_dir()


@pytest.mark.parametrize("place", ["", "inside", ".."])
def test_the_source_is_never_in_the_way(checkpoint, place):
    source = checkpoint()
    before = state_of(source)
    with pytest.raises(OptionError, match="lie in one another"):
        to_gqa(source, source / place, 2, force=True)
    assert same_bits(state_of(source), before)


def test_a_destination_without_a_folder_is_refused(checkpoint, tmp_path):
    with pytest.raises(OptionError, match="there is no folder"):
        to_gqa(checkpoint(), tmp_path / "none" / "made", 2)


# --- what goes wrong on the way ---------------------------------------------------------------------------------------


def fails_midway(monkeypatch, error):
    """Copying fails after some weights are written."""

    def copy_others(self, progress):
        raise error

    monkeypatch.setattr(converted_weights.ConvertedWeights, "copy_others", copy_others)


@pytest.mark.parametrize(
    ("error", "raised"),
    [(OSError(errno.ENOSPC, "No space left on device"), OptionError), (KeyboardInterrupt(), KeyboardInterrupt)],
)
@pytest.mark.parametrize("was_there", [False, True])
def test_a_full_disk_and_an_interrupt_leave_what_was_there(checkpoint, tmp_path, monkeypatch, error, raised, was_there):
    source, made = checkpoint(), tmp_path / "made"
    if was_there:
        to_gqa(source, made, 2)
        before = state_of(made)
    fails_midway(monkeypatch, error)
    with pytest.raises(raised) as caught:
        to_gqa(source, made, 1, force=True)
    if raised is OptionError:
        assert "made cannot be written: No space left on device; nothing was left behind" in str(caught.value)
    assert left_over(tmp_path) == ({"made"} if was_there else set())
    if was_there:
        assert same_bits(state_of(made), before)


def test_a_swap_that_fails_gives_the_old_model_its_name_back(checkpoint, tmp_path, monkeypatch):
    source, made = checkpoint(), tmp_path / "made"
    to_gqa(source, made, 2)
    before, replace = state_of(made), Path.replace

    def failing(self, target):
        if self.name == "made" and ".partial" in str(self):
            raise KeyboardInterrupt
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", failing)
    with pytest.raises(KeyboardInterrupt):
        to_gqa(source, made, 1, force=True)
    assert same_bits(state_of(made), before)
    assert left_over(tmp_path) == {"made"}


def test_room_is_asked_for_before_anything_is_written(checkpoint, tmp_path, monkeypatch):
    usage = shutil._ntuple_diskusage(2**40, 2**40 - 1000, 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OptionError, match=r"cannot be written: it needs 451.8 KiB and 1,000 bytes are free"):
        to_gqa(checkpoint(), tmp_path / "made", 2)
    assert left_over(tmp_path) == set()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused_by_name(checkpoint, tmp_path, value):
    source = checkpoint()
    name = "model.layers.1.self_attn.v_proj.weight"
    weight = state_of(source)[name]
    weight[3, 5] = value
    change_state(source, {name: weight})
    with pytest.raises(NumericsError, match=r"source: layer 1's v_proj.weight holds values that are not finite"):
        to_gqa(source, tmp_path / "made", 2)
    assert left_over(tmp_path) == set()


@pytest.mark.parametrize("method", ["aligned", "fitted"])
@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("model.embed_tokens.weight", "in its embedding"),
        ("model.layers.0.input_layernorm.weight", "in the attention of layer 0"),
        ("model.layers.1.post_attention_layernorm.weight", "after layer 1"),
    ],
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_other_weights_that_are_no_numbers_are_refused_where_they_tell(
    checkpoint, tmp_path, text, method, name, where, value
):
    source = checkpoint()
    weight = state_of(source)[name]
    weight[..., 5] = value
    change_state(source, {name: weight})
    config = GqaConfig(method, window=32, windows=6)
    with pytest.raises(NumericsError, match=f"source gives values that are not finite numbers on this text, {where}: "):
        to_gqa(source, tmp_path / "made", 2, config=config, text=text)
    assert left_over(tmp_path) == set()


def test_fitted_weights_beyond_the_dtype_are_refused(checkpoint, tmp_path, text):
    source = checkpoint(dtype=torch.float16)
    name = "model.layers.1.self_attn.v_proj.weight"
    change_state(source, {name: 6e4 * state_of(source)[name].sign()})
    with pytest.raises(NumericsError, match=r"v_proj.weight has numbers that F16 does not hold, whose largest is 6.55"):
        to_gqa(source, tmp_path / "made", 1, config=FITTED, text=text)
    assert left_over(tmp_path) == set()


def test_hidden_states_that_overflow_are_refused(checkpoint, tmp_path, text):
    source = checkpoint()
    name = "model.layers.1.mlp.up_proj.weight"
    change_state(source, {name: torch.full_like(state_of(source)[name], 3e38)})
    with pytest.raises(NumericsError, match="not finite numbers on this text, after layer 1"):
        to_gqa(source, tmp_path / "made", 2, config=FITTED, text=text)
    assert left_over(tmp_path) == set()


def refusing(call, refused):
    """The same call, but for one file."""

    def wrapped(path, *arguments, **options):
        if path == refused:
            raise PermissionError(errno.EACCES, "Permission denied")
        return call(path, *arguments, **options)

    return wrapped


def test_a_file_of_the_source_that_cannot_be_read_is_named_and_not_the_destination(checkpoint, tmp_path, monkeypatch):
    refused = checkpoint() / "generation_config.json"
    monkeypatch.setattr(Path, "read_bytes", refusing(Path.read_bytes, refused))
    with pytest.raises(ModelFileError, match=r"source/generation_config.json cannot be read: Permission denied"):
        to_gqa(refused.parent, tmp_path / "made", 2)
    assert left_over(tmp_path) == set()


def test_weights_that_cannot_be_read_any_more_are_named_too(checkpoint, tmp_path, monkeypatch):
    refused = checkpoint() / "model.safetensors"
    copy_others = converted_weights.ConvertedWeights.copy_others

    def failing(self, progress):
        monkeypatch.setattr(Path, "open", refusing(Path.open, refused))
        copy_others(self, progress)

    monkeypatch.setattr(converted_weights.ConvertedWeights, "copy_others", failing)
    with pytest.raises(ModelFileError, match=r"source/model.safetensors cannot be read: Permission denied"):
        to_gqa(refused.parent, tmp_path / "made", 2)
    assert left_over(tmp_path) == set()


def test_damaged_sources_are_refused_as_by_loading(checkpoint, tmp_path):
    source = checkpoint()
    data = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(KvistError, match="damaged"):
        to_gqa(source, tmp_path / "made", 2)
    assert left_over(tmp_path) == set()
