"""Training checkpoints: all that a training needs to go on as if it had never stopped.

    DST/uptraining/step-00000120/
        training.safetensors   weight/NAME, first/NAME, second/NAME in float32 for each trained parameter; random
        training.json          what is trained, on what, and how far it is
        curve.jsonl            the learning curve

One is written beside its place and renamed, and only then the one before goes away: what is there is whole.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kvist.checks import check_integer, check_number
from kvist.convert.uptrain_curve import Curve
from kvist.convert.uptrain_plan import TrainingPlan
from kvist.errors import ModelFileError, OptionError, shown
from kvist.loading.cache_folder import move_into_place
from kvist.loading.safetensors_writer import TensorSpec, write_safetensors
from kvist.loading.untrusted_file import read_json, write_json

FOLDER = "uptraining"
FOLDER_LEAVING = f".{FOLDER}.partial"
"""What it is called while it is removed."""

_TENSORS, _FIELDS, _CURVE = "training.safetensors", "training.json", "curve.jsonl"
_PREFIX, _PARTIAL = "step-", ".partial"
_VERSION = 3
_MOMENTS = {"first": "exp_avg", "second": "exp_avg_sq"}


@dataclass(frozen=True)
class TrainingCheckpoint:
    """One that was found.

    Attributes:
        path: its folder.
        plan: of the training.
        step: that are done.
        seconds: that they took.
    """

    path: Path
    plan: TrainingPlan
    step: int
    seconds: float

    def curve(self) -> Curve:
        return Curve.read(self.path / _CURVE)

    def restore(self, trained: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        """Bring weights, the optimizer's moments and PyTorch's random numbers to where they were.

        Raises:
            ModelFileError: the file is damaged, or of another model.
        """
        path = self.path / _TENSORS
        try:
            with safe_open(path, framework="pt") as file, torch.no_grad():
                for name, parameter in trained.items():
                    parameter.copy_(_fitting(file, f"weight/{name}", parameter))
                    state: dict[str, torch.Tensor] = {"step": torch.tensor(float(self.step))}
                    for kind, key in _MOMENTS.items():
                        state[key] = _fitting(file, f"{kind}/{name}", parameter).clone()
                    optimizer.state[parameter] = state
                torch.set_rng_state(file.get_tensor("random").clone())
        except (SafetensorError, OSError, RuntimeError) as error:
            raise ModelFileError(f"{path} is damaged ({' '.join(str(error).split())[:120]}): {_START_AGAIN}") from error


_START_AGAIN = "start again with --restart"


def _fitting(file: Any, name: str, parameter: torch.nn.Parameter) -> torch.Tensor:
    tensor: torch.Tensor = file.get_tensor(name)
    if tensor.shape != parameter.shape:
        raise SafetensorError(f"{name} has shape {list(tensor.shape)} in place of {list(parameter.shape)}")
    return tensor


def latest(directory: Path) -> TrainingCheckpoint | None:
    """The last training checkpoint in the folder of a model; None where there is none.

    Raises:
        ModelFileError: it is damaged.
    """
    found = _found(directory)
    if not found:
        return None
    fields = read_json(found[-1] / _FIELDS)
    if fields.get("version") != _VERSION:
        raise ModelFileError(f"{found[-1]} was written by another version of Kvist: {_START_AGAIN}")
    try:
        plan = TrainingPlan.parsed(fields.get("plan"))
        step = check_integer("step", fields.get("step"), 1, plan.num_steps)
        seconds = check_number("seconds", fields.get("seconds"), 0)
    except ValueError as error:
        raise ModelFileError(f"{found[-1] / _FIELDS} is damaged ({shown(str(error))}): {_START_AGAIN}") from error
    return TrainingCheckpoint(found[-1], plan, step, seconds)


def _found(directory: Path) -> list[Path]:
    """The folders of all, the last one last."""
    folders = (directory / FOLDER).glob(f"{_PREFIX}*")
    return sorted(path for path in folders if path.name.removeprefix(_PREFIX).isdecimal())


def step_of_latest(directory: Path) -> int | None:
    """The steps of the last one in the folder of a model, of whatever form it is; None where there is none."""
    found = _found(directory)
    return int(found[-1].name.removeprefix(_PREFIX)) if found else None


def remove_all(directory: Path) -> None:
    """Drop the training checkpoints in the folder of a model: at once, so that no half of one is ever found."""
    leaving = directory / FOLDER_LEAVING
    shutil.rmtree(leaving, ignore_errors=True)
    with suppress(FileNotFoundError):
        (directory / FOLDER).replace(leaving)
    shutil.rmtree(leaving, ignore_errors=True)


def save(
    directory: Path,
    plan: TrainingPlan,
    step: int,
    seconds: float,
    trained: Mapping[str, torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    random: torch.Tensor,
    curve: Curve,
) -> None:
    """Keep a training as it stands after `step` steps, and drop the training checkpoints before.

    Args:
        directory: of the model.
        plan: of the training.
        step, seconds: that are done.
        trained: by name, float32.
        optimizer: of them.
        random: PyTorch's state.
        curve: so far.

    Raises:
        OptionError: it cannot be written. The one before is still there.
    """
    folder = directory / FOLDER
    target = folder / f"{_PREFIX}{step:08}"
    aside = folder / f"{target.name}{_PARTIAL}"
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        _write_tensors(aside / _TENSORS, trained, optimizer, random)
        curve.write(aside / _CURVE)
        write_json(aside / _FIELDS, {"version": _VERSION, "plan": plan.as_json(), "step": step, "seconds": seconds})
        move_into_place(aside, target)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        with suppress(OSError):  # others are in it
            folder.rmdir()
        raise OptionError(
            f"the training cannot be saved in {folder}: {error.strerror or error}; free some space or permit it, then "
            "go on from the training checkpoint before with --resume"
        ) from error
    shutil.rmtree(directory / FOLDER_LEAVING, ignore_errors=True)
    for other in folder.iterdir():
        if other != target:
            _remove(other)


def _remove(path: Path) -> None:
    """Drop one, by a name first under which no half of it is found."""
    leaving = path.with_name(path.name.removesuffix(_PARTIAL) + _PARTIAL)
    with suppress(OSError):
        path.replace(leaving)
    shutil.rmtree(leaving, ignore_errors=True)


def checkpoint_bytes(trained: Mapping[str, torch.nn.Parameter]) -> int:
    """What a training checkpoint takes on disk."""
    return sum(parameter.numel() for parameter in trained.values()) * 4 * (1 + len(_MOMENTS))


def _write_tensors(
    path: Path,
    trained: Mapping[str, torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    random: torch.Tensor,
) -> None:
    tensors = {"random": random}
    for name, parameter in trained.items():
        tensors[f"weight/{name}"] = parameter.detach()
        for kind, key in _MOMENTS.items():
            moment = optimizer.state[parameter].get(key) if parameter in optimizer.state else None
            tensors[f"{kind}/{name}"] = torch.zeros_like(parameter) if moment is None else moment

    def whole(name: str) -> Iterator[torch.Tensor]:
        yield tensors[name]

    specs = {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    write_safetensors(path, specs, whole, lambda written: None)
