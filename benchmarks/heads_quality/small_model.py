"""A small decoder with as many KV heads as query heads, untrained, in Hugging Face format."""

from __future__ import annotations

from pathlib import Path

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from kvist.attention import Decoder, DecoderConfig

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
    config = DecoderConfig(
        vocab_size=tokenizer.get_vocab_size(),
        embed_dim=NUM_HEADS * HEAD_DIM,
        num_layers=NUM_LAYERS,
        num_heads=NUM_HEADS,
        num_kv_heads=NUM_HEADS,
        mlp_dim=2 * NUM_HEADS * HEAD_DIM,
    )
    save_as_llama(Decoder(config), directory, end_token_id=tokenizer.token_to_id(END))


def save_as_llama(decoder: Decoder, directory: Path, *, end_token_id: int | None) -> None:
    """Write a pre-norm decoder with rope as the Llama checkpoint that it is: parameters have the same names."""
    config = decoder.config
    assert config.rope is not None
    assert config.mlp_dim is not None
    weights = {f"model.{name}": weight.contiguous() for name, weight in decoder.state_dict().items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=config.vocab_size,
        hidden_size=config.embed_dim,
        intermediate_size=config.mlp_dim,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        max_position_embeddings=1024,
        rms_norm_eps=config.eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
        tie_word_embeddings=config.tie_embeddings,
        bos_token_id=None,
        eos_token_id=end_token_id,
        dtype="float32",
    ).save_pretrained(directory)
