from __future__ import annotations

from pathlib import Path

import pytest
import run
from environments import InstallError, python_of
from peers import PEERS, Peer


def test_every_peer_is_measured_by_default_each_with_its_adapter() -> None:
    assert [peer.name for peer in run._chosen(None)] == ["llama.cpp", "openvino", "transformers", "vllm"]
    adapters = Path(run.__file__).parent / "adapters"
    assert all((adapters / peer.adapter).is_file() for peer in (*PEERS, run.KVIST))


def test_peers_can_be_chosen() -> None:
    assert [peer.name for peer in run._chosen("openvino,llama.cpp")] == ["openvino", "llama.cpp"]
    with pytest.raises(SystemExit, match=r"no peer is called 'mlx': there are llama.cpp, openvino"):
        run._chosen("openvino,mlx")


def test_every_kind_of_work_has_three_rounds_or_more() -> None:
    plan = run._plan(run._parser().parse_args([]))
    assert [limits.rounds for limits in (plan.decode, plan.prefill, plan.batch, plan.requests)] == [5, 3, 3, 3]
    assert (plan.contexts, plan.batches, plan.num_requests) == ((128, 1024, 4096, 7000), (8, 32), 32)
    assert plan.max_context == 7128


def test_rounds_and_contexts_can_be_asked_for() -> None:
    plan = run._plan(run._parser().parse_args(["--rounds", "2", "--contexts", "64,32"]))
    assert (plan.requests.rounds, plan.contexts) == (2, (32, 64))
    quick = run._plan(run._parser().parse_args(["--quick"]))
    assert (quick.decode.rounds, quick.batches, quick.num_requests) == (2, (8,), 4)


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--contexts", "1,128"], ["--contexts", "many"]])
def test_bad_options_are_refused(arguments: list[str], capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        run._parser().parse_args(arguments)
    assert f"argument {arguments[0]}: invalid" in capsys.readouterr().err


def test_a_peer_that_cannot_be_installed_is_missing_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    good, bad = Peer("good", (), ("good==1",)), Peer("bad", (), ("bad==1",))

    def install(peer: Peer, environments: Path) -> Path:
        if peer is bad:
            raise InstallError("ERROR: no wheel")
        return Path("python")

    monkeypatch.setattr(run, "python_of", install)
    installed, missing, versions = run._install([bad, good], tmp_path)
    assert [one.peer.name for one in installed] == ["kvist", "good"]
    assert [(one.label, one.reason) for one in missing] == [("bad", "ERROR: no wheel")]
    assert versions == {}
    assert capsys.readouterr().out == "bad: ERROR: no wheel\n"


def test_what_is_installed_is_not_installed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    monkeypatch.setattr(
        "environments.venv.create", lambda folder, **_: (folder.mkdir(parents=True), made.append(folder))
    )
    status = {"pip": 1}

    class Answer:
        @property
        def returncode(self) -> int:
            return status["pip"]

    def pip(command: list[str], stdout: object, **_: object) -> Answer:
        stdout.write("ERROR: nothing fits\n" if status["pip"] else "")  # type: ignore[attr-defined]
        return Answer()

    monkeypatch.setattr("environments.subprocess.run", pip)
    peer = Peer("other", (), ("other==1",))
    with pytest.raises(InstallError, match=r"ERROR: nothing fits \(all of it is in .*install.log\)"):
        python_of(peer, tmp_path)
    status["pip"] = 0
    python = python_of(peer, tmp_path)
    assert python_of(peer, tmp_path) == python == tmp_path / "other" / "bin" / "python"
    assert len(made) == 2
