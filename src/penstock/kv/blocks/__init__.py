"""Who owns which slot: keys, slot states, handles, pool, order of eviction, tables. No torch, no threads, no
I/O."""
