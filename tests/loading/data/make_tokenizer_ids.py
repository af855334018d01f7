"""Writes the token ids that llama.cpp gives for `tokenizer_texts.json`, as the tests expect them.

To be run by hand, where llama-cpp-python and gguf are installed; the project does not need the former:

    python make_tokenizer_ids.py SmolLM2-135M-Instruct.Q4_1.gguf gemma-3-270m.Q4_K_M.gguf

`split_rules.json` and `sentencepiece_vocabulary.json` hold vocabularies too, trained on the texts. In the former texts
were not cut into words, so that its merges reach across any border that a word-splitting rule does not draw; the latter
lacks most of the rarer characters.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import gguf
import llama_cpp

HERE = Path(__file__).parent
RULES = ("default", "gpt-2", "smollm", "llama-bpe", "smaug-bpe", "qwen2", "tekken", "deepseek-coder", "seed-coder")
# Texts in which rules and flags differ.
FEW = (
    3,
    6,
    9,
    12,
    13,
    14,
    15,
    16,
    17,
    18,
    20,
    23,
    24,
    27,
    30,
    36,
    39,
    40,
    42,
    45,
    47,
    48,
    49,
    51,
    58,
    60,
    61,
    86,
    87,
    96,
)


def ids(model: str, texts: list[str], **overrides: str | bool) -> tuple[list[int], list[list[int]]]:
    """What llama.cpp puts before every text, and the ids of each."""
    llama = llama_cpp.Llama(model, vocab_only=True, verbose=False, kv_overrides=overrides or None)
    plain = [llama.tokenize(text.encode(), add_bos=False, special=True) for text in texts]
    added = llama.tokenize(b"", add_bos=True, special=True)
    for text, expected in zip(texts, plain, strict=True):
        assert llama.tokenize(text.encode(), add_bos=True, special=True) == added + expected
    return added, plain


def write_byte_level(path: str, alphabet: str, merges: list[str]) -> None:
    """A GGUF file with a byte-level vocabulary; no merge makes the token before its last."""
    tokens = [*alphabet, *(merge.replace(" ", "") for merge in merges), "\u0120jumps", "<|end|>"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 1) + [3])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(len(tokens) - 1)
    writer.add_eos_token_id(len(tokens) - 1)
    write_file(writer)


def write_sentencepiece(path: str, characters: str, merged: list[str]) -> None:
    """A GGUF file with a SentencePiece vocabulary, and a user-defined token for two newlines."""
    special, byte_tokens = ["<unk>", "<s>", "</s>"], [f"<0x{byte:02X}>" for byte in range(256)]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*special, *byte_tokens, "\n\n", *merged, *characters])
    writer.add_token_types([2, 3, 3] + [6] * 256 + [4] + [1] * (len(merged) + len(characters)))
    writer.add_token_scores([0.0] * 260 + [-float(rank) for rank in range(len(merged) + len(characters))])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    write_file(writer)


def write_file(writer: gguf.GGUFWriter) -> None:
    """Write what was added, without tensors."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def read(name: str) -> dict:
    """One of the files beside this one."""
    return json.loads((HERE / name).read_text(encoding="utf-8"))


def write(name: str, content: dict[str, object]) -> None:
    """JSON, the ids of each text on a line."""
    content = {"made by": f"llama-cpp-python {llama_cpp.__version__}", **content}
    text = json.dumps(content, separators=(",", ":")).replace("],[", "],\n[").replace('],"', '],\n"')
    (HERE / name).write_text(text + "\n", encoding="utf-8")


def main(smollm2: str, gemma3: str) -> None:
    """Write all expected ids."""
    texts = json.loads((HERE / "tokenizer_texts.json").read_text(encoding="utf-8"))
    added, plain = ids(smollm2, texts)
    write("smollm2_ids.json", {"added": added, "ids": plain})
    added, plain = ids(gemma3, texts)
    write("gemma3_ids.json", {"added": added, "ids": plain})

    few = [texts[index] for index in FEW]
    rules, pieces = read("split_rules.json"), read("sentencepiece_vocabulary.json")
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory) / "vocabulary.gguf")
        write_byte_level(path, rules["alphabet"], rules["merges"])
        by_rule = {rule: ids(path, few, **{"tokenizer.ggml.pre": rule}) for rule in RULES}
        write_sentencepiece(path, pieces["characters"], pieces["merged tokens"])
        for prefix, name in ((False, "ids"), (True, "ids with space prefix")):
            _, pieces[name] = ids(path, few, **{"tokenizer.ggml.add_space_prefix": prefix})
    write("sentencepiece_vocabulary.json", pieces)
    rules["texts"] = FEW
    rules["ids"] = {rule: plain for rule, (_, plain) in by_rule.items()}
    rules["added"] = {rule: added for rule, (added, _) in by_rule.items()}
    write("split_rules.json", rules)


if __name__ == "__main__":
    main(*sys.argv[1:])
