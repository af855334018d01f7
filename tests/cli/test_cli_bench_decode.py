"""`kvist bench decode`, `prefill` and `batch`, in process, on a tiny model; the probe of the bandwidth is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_files import hf_config, hf_state, write_tiny_directory

from kvist.cli.bench_options import formats

ROW = {"kv_format", "bandwidth_gb_per_s", "spread_fraction", "repetitions", "discarded", "is_steady"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    config = hf_config(max_position_embeddings=2048)
    return str(write_tiny_directory(folder, {k: 0.2 * v for k, v in hf_state("llama").items()}, config=config))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVIST_CACHE", str(cache))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvist.kernels.native.read_rates", lambda **_: (2e10, 1e10))


@pytest.fixture
def bench(kvist, model: str):
    def command(verb: str, *arguments: str):
        return kvist("bench", verb, "--model", model, "--repetitions", "1", *arguments)

    return command


def test_matrices_that_the_format_does_not_fit_are_named(kvist, tmp_path: Path) -> None:
    """Columns of 40, no multiple of 32: those of the MLP's last matrix."""
    state = {name: 0.2 * tensor for name, tensor in hf_state("llama").items()}
    for name in [name for name in state if ".mlp." in name]:
        state[name] = (state[name][:, :40] if "down" in name else state[name][:40]).contiguous()
    folder = write_tiny_directory(tmp_path / "odd", state, config=hf_config(intermediate_size=40))
    asked = ("--model", str(folder), "--weights-format", "int8", "--kv-format", "bf16")
    said = "in bf16, whose columns are no multiple of 32 (layers.0.mlp.down_proj.weight"
    outcome = kvist("bench", "prefill", *asked, "--contexts", "8", "--repetitions", "1")
    assert said in outcome.out.splitlines()[-1]
    (tmp_path / "text.txt").write_text("Alice was beginning to get very tired of sitting by her sister.")
    outcome = kvist("eval", *asked, "--text", "text.txt", "--window", "8", "--windows", "1")
    assert said in outcome.out.splitlines()[0]


DECODE = ("--contexts", "128,64", "--tokens", "2")


def test_decode_has_a_row_for_each_context_and_format(bench) -> None:
    outcome = bench("decode", *DECODE, "--kv-format", "bf16,k=int8,v=int4", "--kv-format", "int8")
    assert (outcome.code, outcome.err) == (0, "")
    title, heading, *rows = outcome.out.splitlines()
    assert title == "decode, tiny, bf16 weights, one sequence, 2 tokens a run"
    assert heading.split() == [
        "context", "kv_format", "tokens/s", "limit", "fraction", "GB/s", "bandwidth",
        "weights", "MB", "cache", "MB", "spread",
    ]  # fmt: skip
    names = ("bf16", "k=int8,v=int4", "int8")
    assert [tuple(row.split()[:2]) for row in rows[:6]] == [(c, name) for c in ("128", "64") for name in names]
    assert rows[7].split() == ["MiB", "program", "weights", "caches", "predicted", "peak"]
    assert [row.split()[0] for row in rows[8:11]] == list(names)
    assert "threads on" in rows[-1]


def test_json_of_decode_holds_weights_and_cache_apart(bench) -> None:
    printed = json.loads(bench("decode", *DECODE, "--kv-format", "bf16", "--json", "-").out)
    assert list(printed) == [
        "work", "model", "weights_format", "weights_bytes", "bf16_matrices", "kernel", "text", "tokens", "rows",
        "memory", "machine",
    ]  # fmt: skip
    assert (printed["work"], printed["model"], printed["text"]) == ("decode", "tiny", "calibration_text.txt")
    row = printed["rows"][0]
    assert row.keys() == ROW | {
        "context", "batch", "tokens_per_s", "ratio_to_one", "limit_tokens_per_s", "weights_bytes", "cache_bytes",
        "gb_per_s", "roofline_fraction",
    }  # fmt: skip
    assert (row["context"], row["batch"], row["bandwidth_gb_per_s"]) == (128, 1, 20.0)
    assert row["weights_bytes"] == printed["weights_bytes"]
    assert row["cache_bytes"] == 768 * 259 // 2  # the two steps see 129 and 130 tokens
    assert row["limit_tokens_per_s"] == pytest.approx(2e10 / (row["weights_bytes"] + row["cache_bytes"]))
    (memory,) = printed["memory"]
    assert memory["peak_bytes"] > memory["program_bytes"]
    assert memory["predicted_bytes"] == sum(memory[f"{part}_bytes"] for part in ("program", "weights", "kv"))


def test_a_file_and_standard_input_may_give_the_text(bench, kvist, model) -> None:
    Path("twigs.txt").write_text("twigs and branches", encoding="utf-8")
    options = (*DECODE, "--kv-format", "bf16", "--json", "-")
    assert json.loads(bench("decode", *options, "--text", "twigs.txt").out)["text"] == "twigs.txt"
    outcome = kvist(
        "bench", "decode", "--model", model, "--repetitions", "1", *options, "--text", "-", given="twigs and branches"
    )
    assert json.loads(outcome.out)["text"] == "standard input"


def test_prefill_counts_tokens_over_the_time_to_the_first(bench) -> None:
    outcome = bench("prefill", "--contexts", "100,300", "--kv-format", "bf16", "--json", "out.json")
    assert outcome.out.splitlines()[1].split() == ["context", "kv_format", "tokens/s", "seconds", "bandwidth", "spread"]
    printed = json.loads(Path("out.json").read_text(encoding="utf-8"))
    assert printed["work"] == "prefill"
    assert [row["context"] for row in printed["rows"]] == [100, 300]
    for row in printed["rows"]:
        assert row.keys() == ROW | {"context", "tokens_per_s", "seconds"}
        assert row["tokens_per_s"] == pytest.approx(row["context"] / row["seconds"])


def test_batch_gives_the_ratio_to_one(bench) -> None:
    options = ("--batch", "1,3", "--context", "64", "--tokens", "2", "--kv-format", "bf16")
    outcome = bench("batch", *options, "--json", "out.json")
    assert outcome.out.splitlines()[1].split()[:5] == ["batch", "kv_format", "tokens/s", "to", "one"]
    one, three = json.loads(Path("out.json").read_text(encoding="utf-8"))["rows"]
    assert (one["batch"], three["batch"], one["ratio_to_one"]) == (1, 3, 1)
    assert three["ratio_to_one"] == pytest.approx(three["tokens_per_s"] / one["tokens_per_s"])
    assert three["cache_bytes"] == 3 * one["cache_bytes"]
    assert three["weights_bytes"] == one["weights_bytes"]


def test_requests_are_told_by_their_seconds(bench) -> None:
    outcome = bench("batch", "--requests", "2", "--kv-format", "bf16", "--json", "out.json")
    assert "requests, tiny, bf16 weights, 2 at once of " in outcome.out
    printed = json.loads(Path("out.json").read_text(encoding="utf-8"))
    (row,) = printed["rows"]
    assert row["prompt_tokens"] == sum(printed["prompt_tokens_each"])
    assert row["new_tokens"] == 2 * 64
    assert row["tokens_per_s"] == pytest.approx((row["prompt_tokens"] + 128) / row["seconds"])


def test_a_profile_adds_up(bench) -> None:
    outcome = bench("decode", *DECODE, "--kv-format", "bf16,fp32", "--profile", "--json", "out.json")
    assert outcome.code == 0
    assert "after 128 tokens" in outcome.out
    assert "after 64 tokens" in outcome.out
    for label in ("attention ", "norms ", "step with clocks", "step without", "in Python, between them"):
        assert outcome.out.count(label) == 2, label
    printed = json.loads(Path("out.json").read_text(encoding="utf-8"))
    assert [(one["context"], one["kv_format"]) for one in printed["profiles"]] == [
        (128, "bf16"), (128, "fp32"), (64, "bf16"), (64, "fp32"),
    ]  # fmt: skip
    for one in printed["profiles"]:
        assert one["step_ms"] > 0
        assert {"name", "calls", "ms", "native_ms"} == one["operations"][0].keys()


@pytest.mark.parametrize(
    ("arguments", "drawn"),
    [
        (("decode", *DECODE), "limit: bandwidth over bytes"),
        (("decode", *DECODE, "--profile"), "products with weights"),
        (("prefill", "--contexts", "64,100"), "tokens of the prompt"),
        (("batch", "--batch", "1,2", "--context", "64", "--tokens", "1"), "sequences"),
        (("batch", "--requests", "1"), "prompts and answers"),
    ],
)
def test_pictures_are_drawn(bench, arguments, drawn) -> None:
    outcome = bench(*arguments, "--kv-format", "bf16,fp32", "--plot", "a.svg")
    assert (outcome.code, outcome.err) == (0, "")
    picture = Path("a.svg").read_text(encoding="utf-8")
    assert picture.lstrip().startswith("<?xml")
    assert drawn in picture
    assert [path.name for path in Path.cwd().iterdir()] == ["a.svg"]


def test_unsteady_figures_are_marked(bench, monkeypatch) -> None:
    rates = iter([10.0**i for i in range(1, 100)])
    monkeypatch.setattr("kvist.kernels.native.read_rates", lambda **_: (next(rates),))
    outcome = bench("prefill", "--contexts", "64", "--kv-format", "bf16")
    assert outcome.out.splitlines()[2].endswith(" ?")
    assert outcome.out.splitlines()[-1].startswith("? the bandwidth moved by more than 10 %")


@pytest.fixture
def _unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*arguments: object, **options: object) -> None:
        raise AssertionError("the model was loaded before the mistake was told")

    monkeypatch.setattr("kvist.loading.load", load)


@pytest.mark.usefixtures("_unloaded")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["decode", "--contexts", "12,x"], "contexts is '12,x': 'x' is no whole number; write it like 128,1024"),
        (["decode", "--contexts", "12,"], "contexts is '12,': '' is no whole number"),
        (["decode", "--contexts", "0"], "contexts is 0: it must be at least 1"),
        (["prefill", "--contexts", "9,9"], "contexts is '9,9': 9 is there twice"),
        (["batch", "--batch", "1,a"], "batch is '1,a'"),
        (["batch", "--batch", "1,9999"], "batch is 9999: it must be from 1 to 2048"),
        (["batch", "--requests", "99999"], "--requests"),
        (["batch", "--context", "0"], "context is 0"),
        (["batch", "--requests", "0"], "--requests"),
        (["decode", "--tokens", "0"], "tokens is 0"),
        (["decode", "--repetitions", "0"], "--repetitions"),
        (["decode", "--kv-format", "bf16,int5"], "unknown kv_format 'int5'"),
        (["decode", "--kv-format", "bf16,bf16"], "kv_format bf16 is there twice"),
        (["decode", "--kv-format", "k=int8,bf16"], "'bf16' is neither k=FORMAT nor v=FORMAT"),
        (["decode", "--weights-format", "int5"], "unknown weights_format 'int5'"),
        (["decode", "--threads", "0"], "threads is 0"),
        (["decode", "--text", "nowhere.txt"], "the text nowhere.txt cannot be read"),
        (["decode", "--plot", "a.gif"], "has no known ending"),
        (["decode", "--json", "/no/such/folder/a.json"], "there is no folder"),
        (["decode", "--json", "a.png", "--plot", "./a.png"], "--json and --plot name the same file"),
        (["decode", "--text", "a.txt", "--json", "./a.txt"], "--text and --json name the same file"),
        (["prefill", "--text", "a.png", "--plot", "./a.png"], "--text and --plot name the same file"),
        (["batch", "--text", "a.png", "--plot", "./a.png"], "--text and --plot name the same file"),
    ],
)
def test_bad_input_is_one_line_before_a_model_is_loaded(bench, arguments, message) -> None:
    assert message in bench(*arguments).error
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["decode", "--contexts", "2040"],
            "2,040 tokens and 33 that follow are 2,073, and the context of tiny is 2,048",
        ),
        (["prefill", "--contexts", "2048"], "2,048 tokens and 1 that follow are 2,049"),
        (["decode", "--contexts", "64", "--kv-format", "int8/7:int4"], "names layer 7: the model has 3 layers"),
        (["decode", "--model", "nothing-of-the-kind"], "nothing-of-the-kind"),
    ],
)
def test_what_the_model_shows_is_one_line(bench, arguments, message) -> None:
    assert message in bench(*arguments).error


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (None, ["bf16", "int8", "int4"]),
        (["int8"], ["int8"]),
        (["bf16,int8", "int4"], ["bf16", "int8", "int4"]),
        (["k=int8,v=int4,bf16"], ["k=int8,v=int4", "bf16"]),
        (["bf16,k=int8,v=int4,k=int4,v=int8"], ["bf16", "k=int8,v=int4", "k=int4,v=int8"]),
        (["int4/0-1,29:int8,bf16"], ["int4/0-1,29:int8", "bf16"]),
        (["int4/0:k=int8,v=int4/3,5:bf16,int8"], ["int4/0:k=int8,v=int4/3,5:bf16", "int8"]),
        (["bf16, int8"], ["bf16", "int8"]),
    ],
)
def test_a_list_of_formats_is_cut_between_formats(given, names) -> None:
    assert [str(kv_format) for kv_format in formats(given)] == names
