"""cachespec: one async client for hosted and local language models."""
