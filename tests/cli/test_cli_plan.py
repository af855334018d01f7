"""`kvist plan`: what it prints for people and programs, and what it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from key_texts import identity_statics
from kvist.cache.kv_cache import KVCache
from kvist.config import CacheConfig, EngineConfig, LayerConfig
from kvist.kv_format import LayerFormats
from kvist.memory import binary_size

# Llama 3 8B, as published.
LLAMA3: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500_000.0,
}
GEMMA: dict[str, object] = {
    "model_type": "gemma3_text",
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "sliding_window": 512,
    "max_position_embeddings": 32_768,
}
DEFAULT_FORMATS = ["fp32", "bf16", "int8", "k=int8,v=int4", "int4"]
GIB = 2**30


@pytest.fixture(autouse=True)
def free(monkeypatch: pytest.MonkeyPatch):
    """A machine with 64 GiB to spare, or with another number of them."""

    def set_free(gibibytes: float) -> None:
        monkeypatch.setattr("kvist.cli.plan.available_bytes", lambda: int(gibibytes * GIB))

    set_free(64)
    return set_free


@pytest.fixture
def config_of(tmp_path: Path):
    def written(fields: Mapping[str, object] | str) -> str:
        path = tmp_path / "my-model" / "config.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(fields if isinstance(fields, str) else json.dumps(fields))
        return str(path)

    return written


@pytest.fixture
def planned(kvist, config_of):
    """The object of `--json`."""

    def plan(fields: Mapping[str, object], *arguments: str) -> dict:
        outcome = kvist("plan", "--config", config_of(fields), "--json", *arguments)
        assert (outcome.code, outcome.out.count("\n")) == (0, 1), outcome
        return json.loads(outcome.out)

    return plan


def row_of(plan: dict, kv_format: str) -> dict:
    (row,) = (row for row in plan["rows"] if row["kv_format"] == kv_format)
    return row


# --- for programs -----------------------------------------------------------------------------------------------------


def test_json_has_what_was_asked_and_a_row_for_each_format(planned):
    plan = planned(LLAMA3, "--context", "4096", "--kv-memory", "1GiB")
    assert list(plan)[:4] == ["context", "batch", "rows", "weights_bytes"]
    norms = 65 * 4096  # which are in fp32
    assert (plan["context"], plan["batch"], plan["weights_bytes"]) == (4096, 1, 2 * 8_030_261_248 + 2 * norms)
    assert [row["kv_format"] for row in plan["rows"]] == DEFAULT_FORMATS
    row = row_of(plan, "bf16")
    assert list(row)[:4] == ["kv_format", "kv_bytes_per_token", "kv_bytes", "tokens_that_fit"]
    assert row["kv_bytes_per_token"] == 32 * 2 * 8 * 128 * 2
    assert row["kv_bytes"] == 4096 * row["kv_bytes_per_token"] == GIB // 2
    assert (row["tokens_that_fit"], row["sequences_that_fit"]) == (8192, 2)


@pytest.mark.parametrize("fields", [LLAMA3, GEMMA], ids=["llama", "gemma"])
@pytest.mark.parametrize("kv_format", [*DEFAULT_FORMATS, "int4/0-1:int8"])
def test_the_figures_are_those_of_the_cache(planned, fields, kv_format):
    plan = planned(fields, "--context", "5000", "--kv-memory", "3GiB", "--kv-format", kv_format)
    windows = [512 if (i + 1) % 6 else None for i in range(18)] if fields is GEMMA else [None] * 32
    layers = [LayerConfig(1, 256, window) if fields is GEMMA else LayerConfig(8, 128, window) for window in windows]
    steps = EngineConfig.max_step_tokens
    cache_config = CacheConfig(LayerFormats.parse(kv_format), 3 * GIB, max_step_tokens=steps)
    cache = KVCache(layers, cache_config, key_statics=identity_statics(layers))
    (row,) = plan["rows"]
    assert row["kv_format"] == kv_format
    assert row["kv_bytes_per_token"] == cache.bytes_per_token
    assert row["kv_bytes"] == cache.bytes_for(5000)
    assert row["tokens_that_fit"] == cache.max_tokens
    groups = [(group["window"], group["num_layers"]) for group in row["groups"]]
    assert groups == [(group.layer_group.window, len(group.layer_group.layers)) for group in cache.groups]
    assert sum(group["kv_bytes"] for group in row["groups"]) == row["kv_bytes"]


def test_a_batch_costs_its_sequences_and_shares_the_budget(planned):
    one = row_of(planned(GEMMA, "--kv-memory", "1GiB"), "int8")
    four = row_of(planned(GEMMA, "--kv-memory", "4GiB", "--batch", "4"), "int8")
    assert four["kv_bytes"] == 4 * one["kv_bytes"]
    assert four["tokens_that_fit"] == one["tokens_that_fit"]
    assert four["sequences_that_fit"] == 4 * GIB // one["kv_bytes"]


def test_windows_keep_room_for_a_step(planned):
    def window(*arguments: str) -> dict:
        return row_of(planned(GEMMA, *arguments), "bf16")["groups"][1]

    assert window()["pages"] == -(-(512 + 64 + 2048) // 64) + 1
    assert window("--max-step-tokens", "256")["pages"] == (512 + 64 + 256) // 64 + 1
    assert window("--context", "100")["pages"] == 2


def test_windows_alone_never_end(planned):
    mistral = {**LLAMA3, "model_type": "mistral", "sliding_window": 4096}
    assert row_of(planned(mistral, "--kv-memory", "4GiB"), "bf16")["tokens_that_fit"] is None


def test_variants_share_keys_and_values_otherwise(planned):
    plan = planned(LLAMA3, "--context", "4096")
    variants = {variant["num_kv_heads"]: variant for variant in plan["variants"]}
    assert {heads: variant["kind"] for heads, variant in variants.items()} == {
        32: "MHA", 16: "GQA", 8: "GQA", 4: "GQA", 1: "MQA"
    }  # fmt: skip
    assert variants[8]["kv_bytes"] == {row["kv_format"]: row["kv_bytes"] for row in plan["rows"]}
    assert variants[32]["kv_bytes"]["bf16"] == 4 * variants[8]["kv_bytes"]["bf16"] == 2 * GIB


def test_weights_are_counted_in_their_format_and_unknown_for_other_families(planned):
    bf16 = planned(LLAMA3)["weights_bytes"]
    assert planned(LLAMA3, "--weights-format", "fp32")["weights_bytes"] == 2 * bf16 - 4 * 65 * 4096
    assert planned({**LLAMA3, "model_type": "somebody_elses"})["weights_bytes"] is None


def test_weights_that_are_not_known_are_told(kvist, config_of):
    config = config_of({**LLAMA3, "model_type": "somebody_elses"})
    unknown = "note: its weights are not known: the share is of all that is free\n"
    for share in ((), ("--kv-memory", "25%")):
        assert kvist("plan", "--config", config, *share).err.endswith(unknown)
    assert unknown not in kvist("plan", "--config", config, "--kv-memory", "1GiB").err
    assert json.loads(kvist("plan", "--config", config, "--json").out)["weights_format"] is None
    assert unknown not in kvist("plan", "--config", config_of(LLAMA3)).err


def test_a_weights_format_of_weights_that_are_not_known_is_refused(kvist, config_of):
    config = config_of({**LLAMA3, "model_type": "somebody_elses"})
    for name in ("bf16", "fp32"):
        error = kvist("plan", "--config", config, "--weights-format", name).error
        reason = "Kvist does not run my-model, so that its weights are not known: leave it out"
        assert error == f"weights_format is {name}, and {reason}"


def test_a_format_is_planned_once(kvist, config_of):
    for again in ("int8", "int8/1:int8"):
        arguments = ("--kv-format", "int8", "--kv-format", again, "--kv-format", "int4")
        error = kvist("plan", "--config", config_of(LLAMA3), *arguments).error
        assert error == "kv_format int8 is there twice: keep one"


def test_a_share_is_of_what_the_weights_leave(planned, free):
    weights_bytes = planned(LLAMA3)["weights_bytes"]
    free(20)
    assert planned(LLAMA3)["kv_memory_bytes"] == (20 * GIB - weights_bytes) // 2
    assert planned(LLAMA3, "--kv-memory", "25%")["kv_memory_bytes"] == (20 * GIB - weights_bytes) // 4
    assert planned(LLAMA3, "--kv-memory", "3GiB")["kv_memory_bytes"] == 3 * GIB
    assert planned({**LLAMA3, "model_type": "somebody_elses"})["kv_memory_bytes"] == 10 * GIB


def test_beside_weights_that_exceed_the_machine_nothing_fits(kvist, config_of, planned, free):
    free(8)
    outcome = kvist("plan", "--config", config_of(LLAMA3))
    excess = "the weights alone (15.0 GiB) exceed what is free (8.0 GiB)"
    assert (outcome.code, outcome.err) == (
        0, f"note: {excess}: give --kv-memory SIZE to plan for a larger machine\n"
    )  # fmt: skip
    assert "cache: at most 0 bytes, 50% of what is free beside the weights (--kv-memory)" in outcome.out
    assert "It fits in none of these formats: int4 lacks 320.0 MiB." in outcome.out
    row = row_of(planned(LLAMA3), "int4")
    assert (row["tokens_that_fit"], row["sequences_that_fit"]) == (0, 0)
    assert kvist("plan", "--config", config_of(LLAMA3), "--kv-memory", "1GiB").err == f"note: {excess}\n"


# --- for people -------------------------------------------------------------------------------------------------------


def test_which_format_lets_a_context_fit_is_said_in_one_line(kvist, config_of):
    outcome = kvist("plan", "--config", config_of(LLAMA3), "--context", "32768", "--kv-memory", "3GiB")
    lines = outcome.out.splitlines()
    assert lines[0] == "my-model: 32 layers, 32 query heads over 8 KV heads of 128 dims (GQA), context 8,192"
    assert lines[1] == "weights: 15.0 GiB in bf16, beside the cache"
    assert lines[2] == "cache: at most 3.0 GiB (--kv-memory)"
    assert "It fits as int8, k=int8,v=int4 and int4." in lines
    rows = {line.split()[0]: line.split()[1:] for line in lines[5:12] if line.startswith(tuple(DEFAULT_FORMATS))}
    assert rows["bf16"] == ["131,072", "4.0", "GiB", "█" * 6, "133%", "24,576*", "0"]
    assert outcome.err == "note: my-model takes 8,192 tokens at most: the 32,768 are planned all the same\n"


def test_what_the_model_or_the_engine_does_not_take_is_marked(kvist, config_of, planned):
    lines = kvist("plan", "--config", config_of(LLAMA3), "--kv-memory", "64GiB").out.splitlines()
    rows = {line.split()[0]: line.split()[-2:] for line in lines[5:12] if line.startswith(tuple(DEFAULT_FORMATS))}
    assert rows["fp32"] == ["262,144*", "32"]
    assert rows["bf16"] == ["524,288*", "64"]
    assert rows["int4"][1] == "204†"
    assert "* the model takes 8,192 tokens at most" in lines
    assert "† 64 sequences at once: the others wait" in lines
    unmarked = kvist("plan", "--config", config_of(LLAMA3), "--kv-memory", "1GiB", "--kv-format", "bf16").out
    assert "*" not in unmarked
    assert "†" not in unmarked
    assert kvist("plan", "--config", config_of(LLAMA3), "--batch", "65").err == (
        "note: 64 sequences run at once: the others of 65 wait\n"
    )
    assert planned(LLAMA3)["max_sequences"] == 64
    assert planned(LLAMA3, "--max-step-tokens", "8")["max_sequences"] == 8


def test_a_share_of_the_budget_below_a_percent_is_not_rounded_to_none(kvist, config_of):
    def share(context: int) -> str:
        # 128 KiB per token, and 64 GiB of budget: 1 % are 5,242.88 tokens, whole pages 5,248.
        arguments = ("--kv-format", "bf16", "--kv-memory", "64GiB", "--context", str(context))
        out = kvist("plan", "--config", config_of(LLAMA3), *arguments).out
        (row,) = (line for line in out.splitlines() if line.startswith("bf16 ") and "%" in line)
        return " ".join(row.split()[5:-2])

    assert (share(5184), share(5248)) == ("< 1%", "1%")


def test_a_budget_of_one_page_is_enough(planned):
    row = row_of(planned(LLAMA3, "--kv-memory", "2.5MiB"), "int4")
    assert row["tokens_that_fit"] == 64
    assert row["groups"][0]["kv_bytes"] // row["groups"][0]["pages"] == 5 * 2**19


def test_a_budget_that_is_too_small_for_the_context_says_what_lacks(kvist, config_of):
    out = kvist("plan", "--config", config_of(LLAMA3), "--kv-memory", "64MiB", "--batch", "2").out
    assert "They fit in none of these formats: int4 lacks 576.0 MiB." in out.splitlines()


def test_layer_groups_are_told_apart_where_there_are_several(kvist, config_of):
    lines = kvist("plan", "--config", config_of(GEMMA), "--kv-memory", "1GiB").out.splitlines()
    at = lines.index("by layer group")
    assert lines[at + 1].split() == ["all", "tokens,", "window", "of", "512,"]
    assert lines[at + 2].split() == ["kv_format", "3", "layers", "15", "layers", "together"]
    assert lines[at + 4].split() == ["bf16", "96.0", "MiB", "39.4", "MiB", "135.4", "MiB"]
    explained = (
        "a window of 512: at most 42 pages of a sequence, for the window, 64 tokens to rewind and a step of 2,048"
    )
    assert explained in lines
    assert "by layer group" not in kvist("plan", "--config", config_of(LLAMA3)).out


@pytest.mark.parametrize("columns", [40, 60, 72, 80, 120])
@pytest.mark.parametrize("no_color", [True, False])
def test_a_plan_fits_the_terminal_and_no_number_is_cut(kvist, config_of, planned, monkeypatch, columns, no_color):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm-256color")
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    else:
        monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    arguments = ("--context", "1000000", "--batch", "16", "--kv-memory", "8GiB")
    out = kvist("plan", "--config", config_of(GEMMA), *arguments).out
    colours = re.findall(r"\x1b\[3[0-9]m", out)
    assert bool(colours) is not (no_color or columns < 80)
    text = re.sub(r"\x1b\[[0-9;]*m", "", out)
    assert max(map(len, text.splitlines())) <= columns
    assert "…" not in text
    # Whatever a format costs stands in its lines, whole.
    for row in planned(GEMMA, *arguments)["rows"]:
        for number in (row["kv_bytes_per_token"], row["tokens_that_fit"]):
            assert re.search(rf"(?<![\d,]){number:,}(?![\d,])", text), number
        assert binary_size(row["kv_bytes"]) in text
    if columns >= 80:
        assert "█" in text
        assert re.search(r"^k=int8,v=int4 +7,560 +\d+\.\d [GM]iB +█", text, re.MULTILINE)


def test_a_family_that_is_not_run_is_planned_and_the_note_says_so(kvist, config_of):
    outcome = kvist("plan", "--config", config_of({**LLAMA3, "model_type": "phi3"}))
    assert outcome.code == 0
    assert outcome.err.startswith("note: Kvist does not run this model, it only plans its cache: architecture 'phi3'")
    assert "weights" not in outcome.out


def test_formats_that_the_head_dim_does_not_allow_are_left_out_and_named(kvist, config_of):
    outcome = kvist("plan", "--config", config_of({**LLAMA3, "head_dim": 20}), "--json")
    assert [row["kv_format"] for row in json.loads(outcome.out)["rows"]] == ["fp32", "bf16", "int8"]
    # Once, though k=int8,v=int4 is left out too.
    assert outcome.err.count("note: kv_format int4 cannot take a head dim of 20") == 1


def test_a_format_that_several_are_left_out_for_is_named_once(kvist, config_of):
    outcome = kvist("plan", "--config", config_of({**LLAMA3, "model_type": "x", "head_dim": 7}))
    notes = [line for line in outcome.err.splitlines() if "cannot take a head dim of 7" in line]
    assert [note.split(" cannot")[0] for note in notes] == [f"note: kv_format {n}" for n in ("bf16", "int8", "int4")]


def test_a_format_that_was_asked_for_is_not_left_out(kvist, config_of):
    config = config_of({**LLAMA3, "head_dim": 20})
    error = kvist("plan", "--config", config, "--kv-format", "bf16", "--kv-format", "int4").error
    assert "int4 cannot take a head dim of 20" in error


# --- models that are here, and those that are not ---------------------------------------------------------------------


def test_a_pulled_model_is_planned_without_being_loaded(smollm2_gguf, tmp_path):
    code = (
        "import sys\nfrom kvist.cli.app import command_line\n"
        "import kvist.loading.prepared as p\n"
        "p.prepared_copy = None\n"
        "code = command_line(['plan', '--json'])\n"
        "assert 'safetensors' not in sys.modules and 'kvist.llm' not in sys.modules\n"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    plan = json.loads(done.stdout)
    assert (plan["context"], plan["model"]) == (8192, "smollm2-135m")
    assert row_of(plan, "bf16")["kv_bytes_per_token"] == 23_040


def test_a_directory_is_read_like_its_configuration(kvist, config_of, planned):
    path = config_of(GEMMA)
    by_model = json.loads(kvist("plan", "--model", str(Path(path).parent), "--json", "--kv-memory", "1GiB").out)
    assert by_model == planned(GEMMA, "--kv-memory", "1GiB")


def test_what_is_not_here_is_not_fetched(kvist, monkeypatch, tmp_path):
    def fetch(*arguments: object) -> None:
        raise AssertionError("something was fetched")

    for name in ("pull", "fetch_file", "fetch_repository"):
        monkeypatch.setattr(f"kvist.loading.resolve.{name}", fetch)
    monkeypatch.setenv("KVIST_CACHE", str(tmp_path / "cache"))
    assert kvist("plan").error == "smollm2-135m is not here yet: fetch it with `kvist pull smollm2-135m`"
    for model in ("some/model", "some/model@v2", "some/model/file.gguf"):
        assert f"{model} is not in the Hub's local cache" in kvist("plan", "--model", model).error
    assert "did you mean 'smollm2-135m'" in kvist("plan", "--model", "smollm2").error
    assert not (tmp_path / "cache").exists()


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--context", "0"), "context is 0: it must be from 1 to"),
        (("--context", "-5"), "context is -5"),
        (("--context", "9" * 30), "context is 999"),
        (("--context", "32k"), "invalid value for '--context'"),
        (("--batch", "0"), "batch is 0"),
        (("--batch", "-1"), "batch is -1"),
        (("--max-step-tokens", "0"), "max_step_tokens is 0"),
        (("--kv-format", "int5"), "unknown kv_format 'int5': did you mean 'int"),
        (("--kv-format", "k=int8"), "gives no format for the values"),
        (("--kv-format", "k=int8;v=int4"), "a comma separates the sides, not ';'"),
        (
            ("--kv-memory", "2559.99KiB"),
            "kv_memory is 2,621,429 bytes: it must be at least 2.5 MiB (2,621,440 bytes), a page of 64 tokens in int4",
        ),
        (("--kv-format", "int4/32:int8"), "names layer 32: the model has 32 layers"),
        (("--weights-format", "int3"), "unknown weights_format 'int3'"),
        (("--kv-memory", "lots"), "'lots' is not a size in bytes"),
        (("--kv-memory", "0"), "it must be positive"),
        (
            ("--kv-memory", "1KiB"),
            "kv_memory is 1.0 KiB: it must be at least 2.5 MiB (2,621,440 bytes), a page of 64 tokens in int4",
        ),
        (("--model", "smollm2-135m"), "--model and --config name two models"),
    ],
)
def test_bad_options_are_one_line(kvist, config_of, arguments, message):
    assert message in kvist("plan", "--config", config_of(LLAMA3), *arguments).error


def test_a_budget_for_some_formats_only_is_no_error(planned):
    plan = planned(LLAMA3, "--kv-memory", "3MiB")
    fitting = {row["kv_format"]: row["tokens_that_fit"] for row in plan["rows"]}
    assert fitting == {"fp32": 0, "bf16": 0, "int8": 0, "k=int8,v=int4": 0, "int4": 64}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not valid JSON (it is empty)"),
        ("{", "is not valid JSON"),
        ("[1]", "holds no JSON object"),
        ("{}", "there is no num_hidden_layers"),
        (json.dumps({**LLAMA3, "model_type": ["a"]}), "model_type is ['a']: it must be a text like 'llama'"),
        (json.dumps({**LLAMA3, "num_key_value_heads": 5}), "32 query heads cannot share 5 KV heads"),
        (json.dumps({**LLAMA3, "num_hidden_layers": 0}), "num_hidden_layers is 0"),
        (json.dumps({**LLAMA3, "num_hidden_layers": 2**40}), "num_hidden_layers is 1099511627776"),
        (json.dumps({**LLAMA3, "hidden_size": 2**31, "vocab_size": 2**31}), "larger than any machine's memory"),
        (json.dumps({**LLAMA3, "head_dim": 2048}), "cannot take a head dim of 2048"),
        (json.dumps({"model_type": "deepseek_v3", "kv_lora_rank": 512}), "multi-head latent attention (MLA)"),
        ('{"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32}', "give --context N"),
        ('{"num_hidden_layers": 1e999, "num_attention_heads": 4}', "num_hidden_layers is inf"),
    ],
)
def test_a_configuration_that_cannot_be_is_one_line(kvist, config_of, text, message):
    assert message in kvist("plan", "--config", config_of(text)).error


def test_a_configuration_that_is_not_there_is_one_line(kvist, tmp_path):
    missing = tmp_path / "config.json"
    assert kvist("plan", "--config", str(missing)).error == (
        f"{missing} is not there: give the file config.json of a model"
    )
    assert "is a directory: give the file config.json" in kvist("plan", "--config", str(tmp_path)).error


def test_numbers_that_lie_are_planned_in_no_time(kvist, config_of):
    huge = {**LLAMA3, "model_type": "x", "num_hidden_layers": 9999, "num_attention_heads": 2**31}
    huge |= {"num_key_value_heads": 2**31, "head_dim": 1024, "max_position_embeddings": 2**31}
    started_s = time.process_time()
    arguments = ("--batch", str(2**40), "--context", str(2**40), "--kv-memory", "8000000TiB")
    outcome = kvist("plan", "--config", config_of(huge), *arguments)
    assert outcome.code == 0
    assert "They fit in none of these formats" in outcome.out
    assert time.process_time() - started_s < 20


def test_weights_are_planned_as_they_would_be_kept(kvist, smollm2_gguf: Path) -> None:
    """By default as the GGUF file holds them, in 5 and 8.5 bits; `int4` is the same for this file."""
    asked = [(), *(("--weights-format", name) for name in ("int4", "int8", "bf16"))]
    plans = [json.loads(kvist("plan", "--model", smollm2_gguf, "--json", *more).out) for more in asked]
    assert [plan["weights_format"] for plan in plans] == ["gguf", "int4", "int8", "bf16"]
    gguf, int4, int8, bf16 = (plan["weights_bytes"] for plan in plans)
    assert gguf == int4 < int8 < 0.6 * bf16
