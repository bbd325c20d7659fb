"""Speculative decoding: who proposes tokens, how many, and which of them are kept. Owns no step and no KV:
the engine runs both."""
