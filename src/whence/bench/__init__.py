"""Measuring attention: time and memory of every method and backend against its peers."""

from whence.bench.contenders import CONTENDERS, PEERS
from whence.bench.point import MODES, Point
from whence.bench.session import Session

__all__ = ["CONTENDERS", "MODES", "PEERS", "Point", "Session"]
