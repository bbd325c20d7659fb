"""For authors of a store, a model or a connector: a store in memory (`stores`), tiny models on disk
(`tiny_models`), lanes with a chosen order (`sequencer`), engines under the sanitizer (`sanitized`), and
arenas that undeclared work cannot touch (`guarded`). Owns no tests."""
