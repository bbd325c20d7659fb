"""For authors of a store, a model or a connector: a store in memory (`stores`), tiny models on disk
(`tiny_models`) and a plain reference of their computation (`contiguous_kv`), lanes with a chosen order
(`sequencer`, `reduction`), engines under the sanitizer (`sanitized`), and arenas that undeclared work cannot
touch (`guarded`). Owns no tests."""
