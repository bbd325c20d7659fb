"""Speculative decoding: proposers, the number of drafts, and their acceptance. Owns no step and no KV: the
engine runs both."""
