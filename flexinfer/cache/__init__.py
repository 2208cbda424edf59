"""Weights on one node: where `model` points to. No Ray."""

from flexinfer.cache.errors import (
    AmbiguousModel,
    CacheError,
    IncompleteWeights,
    ModelNotFound,
    PathEscapes,
    UserPathNotFound,
)
from flexinfer.cache.locate import Weights, locate
from flexinfer.cache.places import Stores, demo_directory
from flexinfer.cache.userpaths import resolve_block, resolve_user_path

__all__ = [
    "AmbiguousModel",
    "CacheError",
    "IncompleteWeights",
    "ModelNotFound",
    "PathEscapes",
    "Stores",
    "UserPathNotFound",
    "Weights",
    "demo_directory",
    "locate",
    "resolve_block",
    "resolve_user_path",
]
