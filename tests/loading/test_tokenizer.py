from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from kvist.errors import ModelFileError, OptionError, PromptError
from kvist.loading.tokenizer import Tokenizer

TEMPLATE = "{% for m in messages %}{{ bos_token }}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def write_model(directory: Path, *, bos: bool = True, **config: object) -> Path:
    """A directory as Hugging Face models have them: all bytes, `<s>` (256) and `</s>` (257), and a token at 300."""
    backend = tokenizers.Tokenizer(
        models.BPE({char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", normalized=False), AddedToken("</s>", normalized=False)])
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    if config:
        (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def test_bos_comes_from_the_post_processor_of_the_file(tmp_path: Path) -> None:
    with_bos = Tokenizer.from_directory(write_model(tmp_path / "with", bos_token="<s>", eos_token={"content": "</s>"}))
    without = Tokenizer.from_directory(write_model(tmp_path / "without", bos=False, bos_token="<s>"))
    ids = without.encode("hé")
    assert with_bos.encode("hé") == [256, *ids]
    assert with_bos.encode("hé", add_special_tokens=False) == ids
    assert with_bos.encode("") == [256]
    assert without.encode("") == []
    assert (with_bos.bos_token_id, with_bos.eos_token_id) == (256, 257)
    assert (without.bos_token_id, without.eos_token_id) == (256, None)


def test_special_tokens_are_also_read_from_their_map(tmp_path: Path) -> None:
    directory = write_model(tmp_path, bos_token="<s>")
    (directory / "special_tokens_map.json").write_text('{"eos_token": "</s>", "bos_token": "a"}', encoding="utf-8")
    tokenizer = Tokenizer.from_directory(directory)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 257)


def test_the_vocabulary_size_counts_up_to_the_highest_id(tmp_path: Path) -> None:
    directory = write_model(tmp_path)
    content = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    content["model"]["vocab"]["zz"] = 300
    (directory / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    assert Tokenizer.from_directory(directory).vocab_size == 301


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    directory = write_model(tmp_path, bos=False)
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=9)
    backend.save(str(directory / "tokenizer.json"))
    assert len(Tokenizer.from_directory(directory).encode("abcde")) == 5


def test_decoding_skips_special_tokens_and_ids_beyond_the_vocabulary_and_keeps_spaces(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(write_model(tmp_path))
    ids = tokenizer.encode("it 's , so .  ")
    assert tokenizer.decode(ids) == "it 's , so .  "
    assert tokenizer.decode([*ids, 299, 10**6]) == "it 's , so .  "
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>it 's , so .  "
    assert tokenizer.decode([]) == ""


def test_an_unfinished_character_ends_in_replacement_characters(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(write_model(tmp_path, bos=False))
    ids = tokenizer.encode("a🌍")
    assert [tokenizer.decode(ids[:count]) for count in range(1, 6)] == ["a", "a\ufffd", "a\ufffd", "a\ufffd", "a🌍"]


@pytest.mark.parametrize("ids", [[-1], [2**40], [1.5], ["a"]])
def test_numbers_that_are_no_ids_are_refused(ids: list[int], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="from 0 to 257"):
        Tokenizer.from_directory(write_model(tmp_path)).decode(ids)


def test_text_that_is_no_unicode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="no valid Unicode"):
        Tokenizer.from_directory(write_model(tmp_path)).encode("a\ud800")


def test_a_missing_tokenizer_says_how_to_write_one(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"tokenizer.json is missing .*\.save_pretrained"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b"{"),
        ("tokenizer.json", b"\xff\xfe"),
        ("tokenizer.json", b'{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}'),
        ("tokenizer_config.json", b"[1]"),
        ("tokenizer_config.json", b'{"chat_template": 3}'),
        ("special_tokens_map.json", b"{"),
        ("chat_template.jinja", b"\xff\xfe"),
    ],
)
def test_damaged_files_are_refused_in_one_line_that_names_them(name: str, content: bytes, tmp_path: Path) -> None:
    directory = write_model(tmp_path)
    (directory / name).write_bytes(content)
    with pytest.raises(ModelFileError) as raised:
        Tokenizer.from_directory(directory)
    assert name in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_chat_template_is_the_file_of_its_own_before_the_configuration(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    directory = write_model(tmp_path, bos_token="<s>", chat_template=TEMPLATE)
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.has_chat_template
    assert tokenizer.render_chat(messages) == "<s>user: hi\n"
    (directory / "chat_template.jinja").write_text("own", encoding="utf-8")
    assert Tokenizer.from_directory(directory).render_chat(messages) == "own"


def test_of_several_templates_the_default_counts(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    tokenizer = Tokenizer.from_directory(write_model(tmp_path / "both", chat_template=named))
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "plain"
    assert not Tokenizer.from_directory(write_model(tmp_path / "one", chat_template=named[:1])).has_chat_template


def test_a_base_model_says_how_to_go_without_a_template(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(write_model(tmp_path))
    assert not tokenizer.has_chat_template
    with pytest.raises(PromptError, match=r"no chat template .* --raw .* generate\(\)"):
        tokenizer.render_chat([{"role": "user", "content": "hi"}])
