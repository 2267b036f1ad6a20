"""The local inference engine: tokens in, tokens out. It knows nothing of money or clients."""
