"""From a prompt to tokens: filters, cache, decoders, scheduler, and the Python API."""
