"""What of a student a training leaves as it is: by that it is known when the training goes on."""

from __future__ import annotations

import json

from kvist.convert.converted_weights import stored_parts
from kvist.convert.uptrain_folder import ModelFolder, is_trained, transformers_name
from kvist.loading.progress import Progress


def student_hash(student: ModelFolder, train: str, progress: Progress) -> str:
    """The XXH3 hash of configuration, tokenizer, the tensors' forms, and the bytes of those that are not trained.

    It is the same before a training and after its end. Of tensors that are trained the bytes lie in the training
    checkpoint.

    Args:
        student: its files.
        train: `all` or `attention`, as in `UptrainConfig`.
        progress: told how much is read.

    Raises:
        ModelFileError: a file cannot be read.
    """
    import xxhash

    source = student.source
    trained = {
        source.checkpoint.stored(name).stored_name
        for name in source.checkpoint.names()
        if is_trained(transformers_name(name), train)
    }
    digest = xxhash.xxh3_128(json.dumps(source.raw_config, sort_keys=True).encode())
    if (tokenizer := student.path / "tokenizer.json").is_file():
        digest.update(tokenizer.read_bytes())
    tensors = sorted(source.checkpoint.all_stored, key=lambda tensor: tensor.stored_name)
    total = sum(tensor.num_bytes for tensor in tensors if tensor.stored_name not in trained)
    done = 0
    for tensor in tensors:
        digest.update(json.dumps([tensor.stored_name, tensor.dtype, list(tensor.shape)]).encode())
        if tensor.stored_name not in trained:
            for part in stored_parts(tensor):
                digest.update(part)
                done += len(part)
                progress("reading the weights that stay", done, total)
    return str(digest.hexdigest())
