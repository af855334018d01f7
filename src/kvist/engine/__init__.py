"""The engine: requests of many callers in common steps."""

from kvist.engine.delta_stream import DeltaStream
from kvist.engine.engine import Engine
from kvist.engine.sequence import Request, Room, Sequence

__all__ = ["DeltaStream", "Engine", "Request", "Room", "Sequence"]
