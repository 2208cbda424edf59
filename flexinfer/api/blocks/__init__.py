"""The engine blocks of a ModelDeployment: the settings that each backend's users set most.

What is absent is left to the engine's own default; what has no field here goes into `extraArgs`.
File names (libraries, templates, adapters) are absolute or below the model's own directory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from flexinfer.api.blocks.llamacpp import LlamaCppBlock
from flexinfer.api.blocks.mlcllm import MlcLlmBlock, MlcOverrides
from flexinfer.api.blocks.ollama import OllamaBlock
from flexinfer.api.blocks.vllm import VllmBlock

__all__ = [
    "BLOCK_NAMES",
    "BLOCK_TYPES",
    "Backend",
    "Block",
    "LlamaCppBlock",
    "MlcLlmBlock",
    "MlcOverrides",
    "OllamaBlock",
    "VllmBlock",
]

Block = MlcLlmBlock | VllmBlock | LlamaCppBlock | OllamaBlock
Backend = Literal["mlc-llm", "ollama", "vllm", "llama-cpp"]

#: The YAML name of each backend's block.
BLOCK_NAMES: Mapping[Backend, str] = {
    "mlc-llm": "mlcllm",
    "ollama": "ollama",
    "vllm": "vllm",
    "llama-cpp": "llamacpp",
}
#: The type of each backend's block.
BLOCK_TYPES: Mapping[Backend, type[Block]] = {
    "mlc-llm": MlcLlmBlock,
    "ollama": OllamaBlock,
    "vllm": VllmBlock,
    "llama-cpp": LlamaCppBlock,
}
