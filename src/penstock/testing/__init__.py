"""For those who write a store, a model or a connector: a store in memory (`stores`), tiny models on disk
(`tiny_models`) and a plain reference of what they compute (`contiguous_kv`), lanes whose order is chosen
(`sequencer`, `reduction`), engines under the sanitizer (`sanitized`), and arenas that undeclared work cannot
touch (`guarded`). Owns no tests."""
