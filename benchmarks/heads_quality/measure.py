"""How much fewer KV heads cost a model that is trained here, and what uptraining gives back.

    python benchmarks/heads_quality/measure.py --text TEXT [--minutes 20] [--out FOLDER]

An MHA decoder (8 layers, 16 heads) is trained on the text but for its last part; then it is converted to 8, 4, 2 and 1
KV heads by each method of `kvist.convert`, and each of these is trained on for a twentieth of the steps, on the text's
own loss, as in the GQA paper (arXiv 2305.13245, there with T5 and its pre-training). All losses are of the held-out
part. The folder keeps the trained model, and with it the second run begins where the first one ended: of the same text
and the same options of that model alone, which `mha.json` beside it says.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from figures import Row, draw, table
from small_model import NUM_HEADS, write_untrained

from kvist.bench.machine import MachineFacts
from kvist.checks import check_integer
from kvist.config import check_threads
from kvist.convert import to_gqa
from kvist.convert.gqa_config import GqaConfig
from kvist.convert.record import ConversionRecord
from kvist.convert.uptrain import Uptraining
from kvist.convert.uptrain_config import UptrainConfig
from kvist.convert.uptrain_curve import CurveRow
from kvist.convert.uptrain_result import UptrainResult
from kvist.errors import KvistError, OptionError, shown
from kvist.evaluate.text_windows import EvaluationText
from kvist.loading.untrusted_file import read_json, write_json

UPTRAINED_FRACTION = 0.05


def main() -> int:
    """Train, convert, train on; the table at the end."""
    options = parsed()
    planned = conversions(options)
    check_trainings(options)
    if options.threads is not None:
        check_threads("threads", options.threads)
        torch.set_num_threads(options.threads)
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    text = EvaluationText.read(options.text)
    mha = out / "mha"
    trained = trained_mha(mha, text, options)
    steps, mha_loss = int(trained["steps"]), float(trained["loss_after"])
    print(f"MHA: {steps:,} steps, loss {mha_loss:.3f}", flush=True)

    uptrain = UptrainConfig(
        steps=max(1, math.ceil(UPTRAINED_FRACTION * steps)), learning_rate=options.uptrain_rate, **losses(options)
    )
    rows: list[Row] = []
    for method, kv_heads in planned:
        rows.append(uptrained(method, kv_heads, mha, text, options, uptrain))
        write(out, rows, trained, uptrain, mha_loss)
    print(table(rows, mha_loss))
    return 0


def conversions(options: argparse.Namespace) -> list[tuple[GqaConfig | None, int]]:
    """Methods and KV heads, the control first: looked at before the MHA model takes its minutes.

    Raises:
        OptionError: there is no such method, or the KV heads are no divisors.
    """
    methods = [GqaConfig(method) for method in options.methods.split(",")]
    fewer = [divisor for divisor in range(1, NUM_HEADS) if NUM_HEADS % divisor == 0]
    counts = [int(count) if count.isdecimal() else count for count in options.kv_heads.split(",")]
    if wrong := [count for count in counts if count not in fewer]:
        raise OptionError(
            f"kv-heads names {shown(wrong[0])}: the model has {NUM_HEADS} heads, take {', '.join(map(str, fewer))}"
        )
    return [(None, NUM_HEADS), *((method, int(count)) for method in methods for count in counts)]


def check_trainings(options: argparse.Namespace) -> None:
    """Raise `OptionError` for what no training takes, that of the converted models too."""
    UptrainConfig(minutes=options.minutes, learning_rate=options.rate, **losses(options))
    UptrainConfig(steps=1, learning_rate=options.uptrain_rate, **losses(options))
    check_integer("vocab-size", options.vocab_size, 1)


def parsed() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description="Loss against KV heads, before and after uptraining.")
    parser.add_argument("--text", type=Path, required=True, help="the text to train on")
    parser.add_argument("--minutes", type=float, default=20.0, help="that the MHA model is trained for")
    parser.add_argument("--out", type=Path, default=Path("heads_quality"), help="a folder for models and figures")
    parser.add_argument("--kv-heads", default="8,4,2,1")
    parser.add_argument("--methods", default="first,mean,aligned,fitted")
    parser.add_argument("--vocab-size", type=int, default=1024)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rate", type=float, default=2e-3, help="the highest learning rate of the MHA model")
    parser.add_argument("--uptrain-rate", type=float, default=5e-4, help="and of those that are converted")
    parser.add_argument("--threads", type=int)
    return parser.parse_args()


def losses(options: argparse.Namespace) -> dict[str, Any]:
    """The text's own loss alone: there is no teacher."""
    return {
        "sequence": options.sequence,
        "batch": options.batch,
        "logit_weight": 0.0,
        "attention_weight": 0.0,
        "text_weight": 1.0,
        "weight_decay": 0.1,
    }


def trained_mha(mha: Path, text: EvaluationText, options: argparse.Namespace) -> dict[str, Any]:
    """Train the model, or find it trained; what is said of its training.

    Raises:
        OptionError: the model that is there is of another run.
    """
    record, waits, asked = last_training(mha), (mha / "uptraining").is_dir(), asked_of(text, options)
    if record is not None or waits:
        check_same_run(mha, asked)
    if record is not None:
        return record
    if not waits:
        write_json(asked_file(mha), asked)
        write_untrained(mha, text.text, vocab_size=options.vocab_size, seed=0)
    config = UptrainConfig(minutes=options.minutes, learning_rate=options.rate, **losses(options))
    run(Uptraining(mha, None, [text], config, resume=waits), "MHA")
    record = last_training(mha)
    assert record is not None
    return record


def asked_of(text: EvaluationText, options: argparse.Namespace) -> dict[str, object]:
    """What makes the MHA model the one that it is."""
    names = ("minutes", "vocab_size", "sequence", "batch", "rate")
    return {"text": text.sha256, **{name: getattr(options, name) for name in names}}


def asked_file(mha: Path) -> Path:
    """What `asked_of` gave when the model was made."""
    return mha.with_name("mha.json")


def check_same_run(mha: Path, asked: dict[str, object]) -> None:
    """Refuse a model that was made for another text, or with other options."""
    if not asked_file(mha).is_file():
        raise OptionError(f"{mha} is the model of a run that nothing is known of: give another --out")
    was = read_json(asked_file(mha))
    changed = [
        f"{name} was {shown(was.get(name))} and is {shown(now)}" for name, now in asked.items() if was.get(name) != now
    ]
    if changed:
        raise OptionError(
            f"{mha} is the model of another run: {'; '.join(changed)}: give the same options, or another --out"
        )


def last_training(directory: Path) -> dict[str, Any] | None:
    """What is written down of a training that came to its end; None where none did."""
    training = ConversionRecord.read(directory).training
    return None if training is None else dict(training.fields)


def uptrained(
    method: GqaConfig | None,
    kv_heads: int,
    mha: Path,
    text: EvaluationText,
    options: argparse.Namespace,
    config: UptrainConfig,
) -> Row:
    """Convert the MHA model, by no method for the control, and train what comes of it, which is not kept."""
    name = "none" if method is None else method.method
    with tempfile.TemporaryDirectory(dir=options.out) as folder:
        student = Path(folder) / f"{name}-{kv_heads}"
        if method is None:
            shutil.copytree(mha, student)
        else:
            to_gqa(mha, student, kv_heads, config=method, text=options.text if method.is_calibrated else None)
        result = run(Uptraining(student, None, [text], config), f"{name}, {kv_heads} KV heads")
    return Row(name, kv_heads, result.loss_before, result.loss_after, result.seconds)


def run(training: Uptraining, name: str) -> UptrainResult:
    """Train to the end, with a line now and then."""

    def told(row: CurveRow) -> None:
        if row.validation_loss is not None:
            facts = f"loss {row.loss:.3f}, held out {row.validation_loss:.3f}, {row.tokens_per_s:,.0f} tokens/s"
            print(f"{name}: step {row.step:,} of {training.num_steps:,}, {facts}", file=sys.stderr, flush=True)

    return training.run(told)


def write(out: Path, rows: list[Row], trained: dict[str, Any], config: UptrainConfig, mha_loss: float) -> None:
    """What is known by now: a run is long."""
    facts = {
        "mha": trained,
        "uptraining": vars(config),
        "rows": [asdict(row) for row in rows],
        "machine": asdict(MachineFacts.gather(torch.get_num_threads())),
    }
    (out / "heads_quality.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    (out / "heads_quality.md").write_text(table(rows, mha_loss) + "\n", encoding="utf-8")
    title = f"8 layers, 16 heads, {trained['steps']:,} steps; then {config.steps:,} more after the conversion"
    draw(out / "heads_quality.png", rows, mha_loss, title)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KvistError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
