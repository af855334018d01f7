from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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


# A model of three tokens, and files around it that the library takes until they make it fail.
BPE = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}
UNKNOWN_FRAME = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<x>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {},
}
SLOW_SPLIT = {"type": "Split", "pattern": {"Regex": "(a+)+$b"}, "behavior": "Isolated", "invert": False}


def hostile(directory: Path, **parts: Any) -> Path:
    absent = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    tokenizer = {"version": "1.0", "added_tokens": [], **absent, "model": BPE, **parts}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return directory


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {"model": BPE | {"continuing_subword_prefix": "####"}},
        {"model": BPE | {"merges": ["a b", "zz"]}},
    ],
)
def test_a_file_that_panics_when_it_is_read_is_refused(parts: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"tokenizer.json is no tokenizer .* fetch it again") as raised:
        Tokenizer.from_directory(hostile(tmp_path, **parts))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "parts",
    [
        {"post_processor": UNKNOWN_FRAME},
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
        {"pre_tokenizer": SLOW_SPLIT},
        {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}},
        {"model": {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": None}},
    ],
)
def test_a_tokenizer_that_fails_on_a_text_says_so(parts: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(hostile(tmp_path, **parts))
    with pytest.raises(ModelFileError, match=r"fails on this text .* fetch it again") as raised:
        tokenizer.encode("a" * 30 + " c xyz")
    assert "\n" not in str(raised.value)


def test_a_tokenizer_that_fails_on_tokens_says_so(tmp_path: Path) -> None:
    decoder = {"type": "Strip", "content": "a", "start": 5, "stop": 5}
    tokenizer = Tokenizer.from_directory(hostile(tmp_path, decoder=decoder))
    with pytest.raises(ModelFileError, match="fails on these tokens"):
        tokenizer.decode([0, 0, 1])


def test_a_panic_while_counting_the_vocabulary_is_told_and_an_interrupt_is_not_swallowed(tmp_path: Path) -> None:
    class PanicException(BaseException):
        pass

    PanicException.__module__ = "pyo3_runtime"
    tokenizer = Tokenizer.from_directory(hostile(tmp_path))

    class Backend:
        raised: type[BaseException] = PanicException

        def get_vocab(self, **_: object) -> None:
            raise self.raised

    backend = Backend()
    tokenizer._backend = backend  # type: ignore[assignment]
    with pytest.raises(ModelFileError, match="cannot list its vocabulary"):
        tokenizer.vocab_size  # noqa: B018
    backend.raised = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        tokenizer.vocab_size  # noqa: B018


def test_a_special_token_that_is_no_unicode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"cannot look up its bos_token .* fetch it again"):
        Tokenizer.from_directory(write_model(tmp_path, bos_token="a\ud800"))


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
        ("chat_template.json", b"{"),
        ("chat_template.json", b'{"chat_template": 3}'),
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
    # Older multimodal models keep theirs in a JSON file.
    (directory / "chat_template.json").write_text('{"chat_template": "older"}', encoding="utf-8")
    assert Tokenizer.from_directory(directory).render_chat(messages) == "older"
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
