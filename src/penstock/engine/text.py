"""Token ids to text as they arrive: incremental decoding and stop strings. Owns no request; runs on the reader's thread."""
