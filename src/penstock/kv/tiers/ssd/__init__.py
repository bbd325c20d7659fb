"""Blocks in files on a local disk. A module imports only modules below it.

store       the `BlockStore`: moves blocks into slots of files and back
survey      `penstock cache`: inspects, verifies and clears without an engine
index       which block is in which slot; a scan at start rebuilds it from the files
segments    the files and their slots: format; opens, creates, syncs and renews files
directory   the lock, permissions, file names, manifests of snapshots; system calls, which tests replace
"""
