"""`kvist plan` on fewer KV heads: what a half, a quarter and an eighth of them cost and save."""

from __future__ import annotations

import json

import pytest

from kvist.cli.plan_heads import merged_numbers

GIB = 2**30
# Llama 3 70B, as published.
LLAMA3_70B: dict[str, object] = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}


@pytest.fixture(autouse=True)
def _free(monkeypatch):
    monkeypatch.setattr("kvist.cli.plan.available_bytes", lambda: 256 * GIB)


@pytest.fixture
def config_of(tmp_path):
    def written(**changes: object) -> str:
        path = tmp_path / "config.json"
        path.write_text(json.dumps({**LLAMA3_70B, **changes}))
        return str(path)

    return written


def test_a_70b_model_with_64_heads_and_8_kv_heads_from_a_bare_configuration(kvist, config_of):
    outcome = kvist(
        "plan", "--config", config_of(), "--context", "8192", "--batch", "4", "--kv-memory", "16GiB", "--json"
    )
    plan = json.loads(outcome.out)
    assert [one["num_kv_heads"] for one in plan["fewer_kv_heads"]] == [4, 2, 1]
    now = next(row for row in plan["rows"] if row["kv_format"] == "bf16")
    per_head = 4 * 8192 * 80 * 2 * 128 * 2  # sequences, tokens, layers, keys and values, dims, bytes
    assert now["kv_bytes"] == 8 * per_head
    for one in plan["fewer_kv_heads"]:
        kept = one["num_kv_heads"]
        found = one["formats"]["bf16"]
        assert (found["kv_bytes"], found["saved_bytes"]) == (kept * per_head, (8 - kept) * per_head)
        assert plan["weights_bytes"] - one["weights_bytes"] == (8 - kept) * 80 * 2 * 128 * 8192 * 2
        assert found["read_share"] == pytest.approx(
            (one["weights_bytes"] + found["kv_bytes"]) / (plan["weights_bytes"] + now["kv_bytes"])
        )
        assert found["tokens_that_fit"] == 16 * GIB // 4 // (64 * kept * 80 * 2 * 128 * 2) * 64  # whole pages
        assert found["sequences_that_fit"] == 16 * GIB // (kept * per_head // 4)


def test_the_table_names_what_is_saved_and_what_it_costs(kvist, config_of):
    outcome = kvist("plan", "--config", config_of(), "--context", "8192", "--kv-memory", "16GiB")
    assert outcome.code == 0
    table = outcome.out.partition("with fewer KV heads, in bf16")[2].splitlines()
    assert table[4].split() == [
        "4",
        "(1/2)",
        "16",
        "1.2",
        "GiB",
        "1.2",
        "GiB",
        "104,832",
        "12",
        "1.2",
        "GiB",
        "1.02",
        "x",
    ]
    assert [line.split()[:3] for line in table[5:7]] == [["2", "(1/4)", "32"], ["1", "(1/8)", "64"]]
    advice = " ".join(outcome.out.split())
    assert "`kvist convert gqa SRC DST --kv-heads 4 --method fitted --text FILE` makes such a model" in advice
    assert "`kvist convert report SRC DST --text FILE` measures it" in advice


def test_the_format_that_was_asked_for_is_the_one_that_is_shown(kvist, config_of):
    assert "fewer KV heads, in int4" in kvist("plan", "--config", config_of(), "--kv-format", "int4").out


def test_of_a_model_that_is_not_run_the_cache_alone_is_known(kvist, config_of):
    outcome = kvist("plan", "--config", config_of(model_type="phi3"), "--json")
    fewer = json.loads(outcome.out)["fewer_kv_heads"]
    assert [one["weights_bytes"] for one in fewer] == [None] * 3
    assert [one["formats"]["bf16"]["read_share"] for one in fewer] == [None] * 3
    assert "kvist convert" not in kvist("plan", "--config", config_of(model_type="phi3")).out


def test_where_there_is_one_head_none_is_advised(kvist, config_of):
    config = config_of(num_key_value_heads=1)
    assert json.loads(kvist("plan", "--config", config, "--json").out)["fewer_kv_heads"] == []
    assert "one for all query heads already, so none to merge" in kvist("plan", "--config", config).out


@pytest.mark.parametrize(
    ("num_kv_heads", "fewer"),
    [(1, ()), (2, (1,)), (3, (1,)), (4, (2, 1)), (5, (1,)), (6, (3,)), (8, (4, 2, 1)), (9, (3, 1)), (40, (20, 10, 5))],
)
def test_shares_are_whole_numbers_of_heads(num_kv_heads, fewer):
    assert merged_numbers(num_kv_heads) == fewer
    assert all(num_kv_heads % number == 0 for number in fewer)


def test_a_gguf_files_weights_are_counted_in_its_own_formats(kvist, smollm2_gguf):
    plan = json.loads(kvist("plan", "--model", str(smollm2_gguf), "--json").out)
    (one,) = plan["fewer_kv_heads"]
    # Of keys and values in 30 layers, two of three heads of 64 rows of 576, in Q4_1: 5 bits a weight.
    assert plan["weights_bytes"] - one["weights_bytes"] == pytest.approx(30 * 2 * 128 * 576 * 5 / 8, rel=0.02)
