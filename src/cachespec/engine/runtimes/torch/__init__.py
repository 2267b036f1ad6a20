"""The torch runtime: an own decoder for the Llama and Qwen family, on CPU and CUDA."""

from __future__ import annotations

from cachespec.engine.runtimes.torch.runtime import TorchRuntime

__all__ = ["TorchRuntime"]
