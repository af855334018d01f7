"""A small decoder with as many KV heads as query heads, untrained, in Hugging Face format."""

from __future__ import annotations

from pathlib import Path

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

NUM_LAYERS, NUM_HEADS, HEAD_DIM = 8, 16, 16
END = "<|end|>"


def write_untrained(directory: Path, text: str, *, vocab_size: int, seed: int) -> None:
    """Make a tokenizer of a text's own frequent words and a decoder with random weights.

    Args:
        directory: to write to.
        text: that both are for.
        vocab_size: of the byte-pair encoding. A small one leaves the weights to the layers.
        seed: of the weights.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)  # type: ignore[no-untyped-call]
    fast.save_pretrained(directory)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=NUM_HEADS * HEAD_DIM,
        intermediate_size=2 * NUM_HEADS * HEAD_DIM,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_HEADS,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(END),
    )
    LlamaForCausalLM(config).save_pretrained(directory)
