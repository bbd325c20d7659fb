"""Blocks in files on a local disk. A module imports only modules below it.

store      the `BlockStore`: what a call means for slots and files; moves blocks into slots and back survey
`penstock cache`: inspect, verify and clear without an engine index      which block lies in which slot; at
start a scan rebuilds it from the files segments   the files and the slots in them: what their bytes mean;
opens, makes, syncs and renews them directory  the lock, who may write there, the names of the files,
manifests of snapshots; system calls, which tests replace
"""
