"""What several folders of tests share: engines driven by hand, gates, references, real stores. Ships with
nothing."""
