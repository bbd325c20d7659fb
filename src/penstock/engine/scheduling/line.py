"""The requests that wait to run, in order of arrival. Owns that order and nothing else of them."""

from __future__ import annotations

from bisect import bisect_left, insort

from penstock.engine.scheduling.track import State, Track


class Line:
    """First come, first served; a retracted request comes back to its old place."""

    def __init__(self) -> None:
        self.tracks: list[Track] = []
        self.num_retracted = 0

    def __len__(self) -> int:
        return len(self.tracks)

    def add(self, track: Track) -> None:
        insort(self.tracks, track, key=arrival)
        self.num_retracted += track.state is State.RETRACTED

    def remove(self, track: Track) -> None:
        """Before its state changes."""
        del self.tracks[bisect_left(self.tracks, track.order, key=arrival)]
        self.num_retracted -= track.state is State.RETRACTED


def arrival(track: Track) -> int:
    return track.order
